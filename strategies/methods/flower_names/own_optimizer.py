"""Methods whose server optimizer is a part of them, with a learning rate under the method's own keyword."""

from typing import ClassVar

from strategies.core.config import StrategyConfig
from strategies.rounds.strategy import SynchronousStrategy


class OwnOptimizer(SynchronousStrategy):
    """A method of rounds whose ``Config.new_optimizer`` is its own."""

    #: The keyword of the server's learning rate.
    lr_keyword: ClassVar[str]

    def adapted(self, config: StrategyConfig) -> StrategyConfig:
        """Return the config; refuse the keys of another server optimizer."""
        for key, none in (("server_lr", 0.0), ("server_optimizer", "sgd")):
            if (value := getattr(config, key)) != none:
                raise ValueError(
                    f"{key} = {value!r}: {type(self).__name__} has its own server optimizer, with learning rate "
                    f"{self.lr_keyword}; allowed is {none}"
                )
        return config

    def own_lr(self) -> float:
        """Return η."""
        return float(getattr(self.config, self.lr_keyword))
