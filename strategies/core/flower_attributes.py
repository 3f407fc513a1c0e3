"""The attributes that Flower's strategies have: they read and set the keywords of the same names.

A subclass or an app that reads or sets them works as with Flower's strategies: ``strategy.fraction_train = 0.5`` does
what ``FedAvg(fraction_train=0.5)`` does. A value is checked as the keyword's is.
"""

from typing import Any

from flwr.serverapp import strategy as flower

from strategies.core.config import changed
from strategies.core.conflicts import check_conflicts

# What Flower's FedAvg takes where no function is given; it has no public name.
_STOCK = flower.FedAvg()
_FUNCTIONS = ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn")


class FlowerAttribute:
    """An attribute of a strategy that is a keyword of Flower's strategy of the name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, strategy: Any, kind: type | None = None) -> Any:
        if strategy is None:
            return self
        own, keywords = strategy.config, strategy.flower_options
        if self._name == "min_available_nodes":
            return keywords.min_available_nodes or own.min_clients
        if self._name in _FUNCTIONS:
            return getattr(keywords, self._name) or getattr(_STOCK, self._name)
        return getattr(own if hasattr(own, self._name) else keywords, self._name)

    def __set__(self, strategy: Any, value: Any) -> None:
        if self._name in _FUNCTIONS and value is getattr(_STOCK, self._name):
            value = None
        name, run, roster = type(strategy).__name__, strategy.session.run, strategy.session.population.roster
        config, keywords = changed(name, strategy.config, strategy.flower_options, self._name, value)
        config = strategy.resolve_config(config)
        check_conflicts(name, strategy.capabilities, config, keywords, real_time=run.in_real_time())
        strategy.config, strategy.flower_options, run.config = config, keywords, config
        if not strategy.session.used:
            strategy.session.server_step.optimizer = strategy.config.new_optimizer()
        roster.weight_key, roster.config_key = keywords.weighted_by_key, keywords.configrecord_key
        roster.min_clients, roster.min_nodes = config.min_clients, keywords.min_available_nodes
