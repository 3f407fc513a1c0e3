"""FedMedian, FedTrimmedAvg, Krum, MultiKrum and Bulyan under Flower's names, with Flower's keywords and models.

Of the clients' models, in each coordinate or by the squared distances between models:

    FedMedian       the median
    FedTrimmedAvg   the mean without the ⌊β n⌋ largest and smallest of n values
    MultiKrum       the mean, by the number of examples, of the models with the least Σ ‖w_i − w_j‖² over the
                    n − f − 2 nearest w_j
    Krum            MultiKrum with one model
    Bulyan          of the n − 2f models of least score, the mean of the n − 4f values nearest to their median

D. Yin, Y. Chen, K. Ramchandran and P. Bartlett, "Byzantine-robust distributed learning: towards optimal statistical
rates", ICML 2018, definitions 1 and 2; P. Blanchard, E. M. El Mhamdi, R. Guerraoui and J. Stainer, "Machine learning
with adversaries: Byzantine tolerant gradient descent", NeurIPS 2017, section 4; E. M. El Mhamdi, R. Guerraoui and
S. Rouault, "The hidden vulnerability of distributed learning in Byzantium", ICML 2018, section 4. Unlike
``aggregation_rule``, these classes take any ``client_weights`` and, but for Bulyan, any number of replies, as Flower
does. Running statistics and counters become the median of the clients'.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from flwr.app import RecordDict
from flwr.serverapp import strategy as flower

from strategies.core.config import FLOWERS_ORDER, StrategyConfig, SynchronousConfig
from strategies.core.flower_attributes import FlowerAttribute
from strategies.core.parameters import parameter
from strategies.rounds.strategy import SynchronousStrategy
from strategies.updates.aggregation import MEAN, Rule

log = logging.getLogger("flwr.strategies")


@dataclass(frozen=True)
class FedMedianConfig(SynchronousConfig):
    """FedMedian has no parameters of its own."""

    def rule(self) -> Rule:
        """Return the median."""
        return Rule("FedMedian", lambda n: flower.FedMedian())


@dataclass(frozen=True)
class FedTrimmedAvgConfig(SynchronousConfig):
    """Parameters of FedTrimmedAvg.

    Parameters
    ----------
    beta : float
        β, the share of the values that is cut off at each end
    """

    positional: ClassVar[tuple[str, ...]] = (*FLOWERS_ORDER, "beta")

    beta: float = parameter(0.2, ge=0, lt=0.5)

    def rule(self) -> Rule:
        """Return the trimmed mean."""
        return Rule(f"FedTrimmedAvg, beta = {self.beta}", lambda n: flower.FedTrimmedAvg(beta=self.beta))


@dataclass(frozen=True)
class KrumConfig(SynchronousConfig):
    """Parameters of Krum.

    Parameters
    ----------
    num_malicious_nodes : int
        f, the number of clients that may send anything
    """

    positional: ClassVar[tuple[str, ...]] = (*FLOWERS_ORDER[:5], "num_malicious_nodes", *FLOWERS_ORDER[5:])

    num_malicious_nodes: int = parameter(0, ge=0)

    @property
    def tolerating(self) -> int:
        """The least number of replies with which the rule tolerates f clients."""
        return 2 * self.num_malicious_nodes + 3

    def rule(self) -> Rule:
        """Return Krum."""
        f = self.num_malicious_nodes
        return Rule(f"Krum, num_malicious_nodes = {f}", lambda n: flower.Krum(num_malicious_nodes=f))


@dataclass(frozen=True)
class MultiKrumConfig(KrumConfig):
    """Parameters of MultiKrum.

    Parameters
    ----------
    num_nodes_to_select : int
        the number of models that are averaged
    """

    positional: ClassVar[tuple[str, ...]] = (
        *KrumConfig.positional[:6],
        "num_nodes_to_select",
        *KrumConfig.positional[6:],
    )

    num_nodes_to_select: int = parameter(1, ge=1)

    def rule(self) -> Rule:
        """Return MultiKrum."""
        f, selected = self.num_malicious_nodes, self.num_nodes_to_select
        return Rule(
            f"MultiKrum, num_malicious_nodes = {f}",
            lambda n: flower.MultiKrum(num_malicious_nodes=f, num_nodes_to_select=selected),
        )


@dataclass(frozen=True)
class BulyanConfig(KrumConfig):
    """Parameters of Bulyan.

    Parameters
    ----------
    selection_rule : callable, optional
        selects contents, given those of the replies, f and how many; each content has one array, a client's update.
        By default MultiKrum's selection
    """

    positional: ClassVar[tuple[str, ...]] = (*KrumConfig.positional, "selection_rule")

    selection_rule: Callable[[list[RecordDict], int, int], list[RecordDict]] | None = None

    @property
    def tolerating(self) -> int:
        """The least number of replies."""
        return 4 * self.num_malicious_nodes + 3

    def rule(self) -> Rule:
        """Return Bulyan."""
        f, selection = self.num_malicious_nodes, self.selection_rule
        return Rule(
            f"Bulyan, num_malicious_nodes = {f}",
            lambda n: flower.Bulyan(num_malicious_nodes=f, selection_rule=selection),
            self.tolerating,
        )


class FedMedian(SynchronousStrategy):
    """FedMedian (Yin et al. 2018, definition 1), as Flower has it."""

    Config: ClassVar[type[StrategyConfig]] = FedMedianConfig

    def adapted(self, config: StrategyConfig) -> StrategyConfig:
        """Return the config; refuse the keys of another rule."""
        for key, none in (("aggregation_rule", MEAN), ("faulty_clients", 0)):
            if (value := getattr(config, key)) != none:
                raise ValueError(
                    f"{key} = {value!r}: {type(self).__name__} is a robust rule itself; allowed is {none}"
                )
        return config


class FedTrimmedAvg(FedMedian):
    """FedTrimmedAvg (Yin et al. 2018, definition 2), as Flower has it."""

    Config: ClassVar[type[StrategyConfig]] = FedTrimmedAvgConfig

    beta = FlowerAttribute()


class Krum(FedMedian):
    """Krum (Blanchard et al. 2017, section 4), as Flower has it."""

    Config: ClassVar[type[StrategyConfig]] = KrumConfig
    config: KrumConfig

    num_malicious_nodes = FlowerAttribute()

    def check(self, num_clients: int) -> None:
        """Raise ValueError if so many clients are too few; warn if they are too few for a guarantee."""
        super().check(num_clients)
        if self.config.num_malicious_nodes and num_clients < self.config.tolerating:
            log.warning(
                "num_malicious_nodes = %d: %s tolerates fewer with %d clients; %d or more are needed",
                self.config.num_malicious_nodes,
                type(self).__name__,
                num_clients,
                self.config.tolerating,
            )


class MultiKrum(Krum):
    """MultiKrum (Blanchard et al. 2017, section 4), as Flower has it."""

    Config: ClassVar[type[StrategyConfig]] = MultiKrumConfig

    num_nodes_to_select = FlowerAttribute()


class Bulyan(Krum):
    """Bulyan (El Mhamdi et al. 2018, section 4), as Flower has it."""

    Config: ClassVar[type[StrategyConfig]] = BulyanConfig

    selection_rule = FlowerAttribute()
