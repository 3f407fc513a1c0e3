"""The attributes that Flower's strategies have: they read and set the keywords of the same names.

A subclass or an app that reads or sets them works as with Flower's strategies: ``strategy.fraction_train = 0.5`` does
what ``FedAvg(fraction_train=0.5)`` does. A value is checked as the keyword's is.
"""

from typing import Any

from flwr.serverapp import strategy as flower

from strategies.core.config import changed

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
        own, keywords = strategy.config, strategy.run.flower
        if self._name == "min_available_nodes":
            return keywords.min_available_nodes or own.min_clients
        if self._name in _FUNCTIONS:
            return getattr(keywords, self._name) or getattr(_STOCK, self._name)
        return getattr(own if hasattr(own, self._name) else keywords, self._name)

    def __set__(self, strategy: Any, value: Any) -> None:
        if self._name in _FUNCTIONS and value is getattr(_STOCK, self._name):
            value = None
        run, roster = strategy.run, strategy.population.roster
        config, run.flower = changed(run.name, strategy.config, run.flower, self._name, value)
        strategy.config = run.config = strategy.adapted(config)
        roster.weight_key, roster.config_key = run.flower.weighted_by_key, run.flower.configrecord_key
        roster.min_clients, roster.min_nodes = config.min_clients, run.flower.min_available_nodes
