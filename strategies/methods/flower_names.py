"""Flower's strategies under their names: FedAvg with another server optimizer or a robust rule, and QFedAvg.

The classes have Flower's keywords and results. Where they differ from ``server_optimizer`` and ``aggregation_rule``:

    FedAdam, FedAdagrad, FedYogi   v₀ = 0 in place of τ², and FedAdagrad has β₁ = 0. FedAdam corrects the bias of m
                                   and v: in round t its η is η √(1−β₂^(t+1)) / (1−β₁^(t+1))
    robust rules                   any ``client_weights`` and, but for Bulyan, any number of replies. Running
                                   statistics and counters become the median of the clients'

FedAdam, FedAdagrad and FedYogi: S. Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 2. FedAvgM:
T.-M. H. Hsu, H. Qi and M. Brown, "Measuring the effects of non-identical data distribution for federated visual
classification", 2019, section 4. FedMedian, FedTrimmedAvg: D. Yin, Y. Chen, K. Ramchandran and P. Bartlett,
"Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018, definitions 1 and 2. Krum,
MultiKrum: P. Blanchard, E. M. El Mhamdi, R. Guerraoui and J. Stainer, "Machine learning with adversaries: Byzantine
tolerant gradient descent", NeurIPS 2017, section 4. Bulyan: E. M. El Mhamdi, R. Guerraoui and S. Rouault, "The hidden
vulnerability of distributed learning in Byzantium", ICML 2018, section 4.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp import strategy as flower

from strategies.core.config import FLOWERS_ORDER, StrategyConfig, SynchronousConfig
from strategies.core.flower_attributes import FlowerAttribute
from strategies.core.parameters import parameter
from strategies.rounds.strategy import SynchronousStrategy
from strategies.updates.aggregation import Rule
from strategies.updates.server_optimizer import Adagrad, Adam, Adaptive, Momentum, Yogi

log = logging.getLogger("flwr.strategies")


# ---- Server optimizers -----------------------------------------------------------------------------------------


class CorrectedAdam(Adam):
    """Adam's step with the bias of both moments corrected, by the number of the round (``number``)."""

    @property
    def rate(self) -> float:
        """η_t = η √(1 − β₂ᵗ⁺¹) / (1 − β₁ᵗ⁺¹) in round t."""
        t = self.number + 1.0
        return float(self.lr * np.sqrt(1 - self.beta_2**t) / (1 - self.beta_1**t))


@dataclass(frozen=True)
class FedAdagradConfig(SynchronousConfig):
    """Parameters of FedAdagrad; as in Flower all arguments are keywords."""

    positional: ClassVar[tuple[str, ...]] = ()

    eta: float = parameter(0.1, "η, the server's learning rate", gt=0)
    eta_l: float = parameter(0.1, "the clients' learning rate, which no message has, as in Flower", gt=0)
    tau: float = parameter(1e-3, "τ, the lower bound of √v", gt=0)

    def new_optimizer(self) -> Adaptive:
        """Return Adagrad with v₀ = 0 and without momentum."""
        return Adagrad(self.eta, 0.0, 0.0, self.tau, initial=0.0, usual_lr=0.0)


@dataclass(frozen=True)
class FedAdamConfig(FedAdagradConfig):
    """Parameters of FedAdam."""

    optimizer: ClassVar[type[Adaptive]] = CorrectedAdam

    beta_1: float = parameter(0.9, "β₁, the decay of m", ge=0, lt=1)
    beta_2: float = parameter(0.99, "β₂, the decay of v", ge=0, lt=1)

    def new_optimizer(self) -> Adaptive:
        """Return the optimizer with v₀ = 0."""
        return self.optimizer(self.eta, self.beta_1, self.beta_2, self.tau, initial=0.0, usual_lr=0.0)


@dataclass(frozen=True)
class FedYogiConfig(FedAdamConfig):
    """Parameters of FedYogi."""

    optimizer: ClassVar[type[Adaptive]] = Yogi

    eta: float = 0.01
    eta_l: float = 0.0316


class FedAdagrad(SynchronousStrategy):
    """FedAdagrad (Reddi et al. 2021, algorithm 2), as Flower has it."""

    Config: ClassVar[type[StrategyConfig]] = FedAdagradConfig
    own_optimizer: ClassVar[bool] = True

    eta, eta_l, tau = FlowerAttribute(), FlowerAttribute(), FlowerAttribute()

    def default_server_lr(self) -> float:
        """Return η."""
        return float(self.eta)


class FedAdam(FedAdagrad):
    """FedAdam (Reddi et al. 2021, algorithm 2), as Flower has it: with the bias of the moments corrected."""

    Config: ClassVar[type[StrategyConfig]] = FedAdamConfig

    beta_1, beta_2 = FlowerAttribute(), FlowerAttribute()


class FedYogi(FedAdam):
    """FedYogi (Reddi et al. 2021, algorithm 2), as Flower has it."""

    Config: ClassVar[type[StrategyConfig]] = FedYogiConfig


@dataclass(frozen=True)
class FedAvgMConfig(SynchronousConfig):
    """Parameters of FedAvgM."""

    positional: ClassVar[tuple[str, ...]] = (*FLOWERS_ORDER, "server_learning_rate", "server_momentum")

    server_learning_rate: float = parameter(1.0, "η, the server's learning rate", gt=0)
    server_momentum: float = parameter(0.0, "β, the decay of the momentum", ge=0, lt=1)

    def new_optimizer(self) -> Momentum:
        """Return heavy-ball momentum with the decay β."""
        return Momentum(self.server_learning_rate, self.server_momentum)


class FedAvgM(SynchronousStrategy):
    """FedAvgM (Hsu et al. 2019, section 4), as Flower has it."""

    Config: ClassVar[type[StrategyConfig]] = FedAvgMConfig
    own_optimizer: ClassVar[bool] = True

    server_learning_rate, server_momentum = FlowerAttribute(), FlowerAttribute()

    def default_server_lr(self) -> float:
        """Return η."""
        return float(self.server_learning_rate)


# ---- Robust rules ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FedMedianConfig(SynchronousConfig):
    """FedMedian has no parameters of its own."""

    stock: ClassVar[type[flower.FedAvg]] = flower.FedMedian
    own: ClassVar[tuple[str, ...]] = ()  # the rule's keywords, of which messages name the first

    def rule(self) -> Rule:
        """Return Flower's rule."""
        keywords = {name: getattr(self, name) for name in self.own}
        text = [self.stock.__name__, *(f"{name} = {value}" for name, value in keywords.items())]
        return Rule(", ".join(text[:2]), lambda n: self.stock(**keywords))


@dataclass(frozen=True)
class FedTrimmedAvgConfig(FedMedianConfig):
    """Parameters of FedTrimmedAvg."""

    positional: ClassVar[tuple[str, ...]] = (*FLOWERS_ORDER, "beta")
    stock: ClassVar[type[flower.FedAvg]] = flower.FedTrimmedAvg
    own: ClassVar[tuple[str, ...]] = ("beta",)

    beta: float = parameter(0.2, "β, the share of the values that is cut off at each end", ge=0, lt=0.5)


@dataclass(frozen=True)
class KrumConfig(FedMedianConfig):
    """Parameters of Krum."""

    positional: ClassVar[tuple[str, ...]] = (*FLOWERS_ORDER[:5], "num_malicious_nodes", *FLOWERS_ORDER[5:])
    stock: ClassVar[type[flower.FedAvg]] = flower.Krum
    own: ClassVar[tuple[str, ...]] = ("num_malicious_nodes",)

    num_malicious_nodes: int = parameter(0, "f, the number of clients that may send anything", ge=0)

    @property
    def tolerating(self) -> int:
        """The least number of replies with which the rule tolerates f clients."""
        return 2 * self.num_malicious_nodes + 3


@dataclass(frozen=True)
class MultiKrumConfig(KrumConfig):
    """Parameters of MultiKrum."""

    positional: ClassVar[tuple[str, ...]] = (
        *KrumConfig.positional[:6],
        "num_nodes_to_select",
        *KrumConfig.positional[6:],
    )
    stock, own = flower.MultiKrum, (*KrumConfig.own, "num_nodes_to_select")

    num_nodes_to_select: int = parameter(1, "the number of models that are averaged", ge=1)


@dataclass(frozen=True)
class BulyanConfig(KrumConfig):
    """Parameters of Bulyan.

    ``selection_rule`` takes the place of MultiKrum's selection: it is given the contents of the replies, f and how
    many to select, and returns the selected ones. Each content has one array, a client's update.
    """

    positional: ClassVar[tuple[str, ...]] = (*KrumConfig.positional, "selection_rule")
    stock, own = flower.Bulyan, (*KrumConfig.own, "selection_rule")

    selection_rule: Callable[[list[RecordDict], int, int], list[RecordDict]] | None = None

    @property
    def tolerating(self) -> int:
        """The least number of replies."""
        return 4 * self.num_malicious_nodes + 3

    def rule(self) -> Rule:
        """Return Flower's rule, without a result for fewer replies than it tolerates f clients with."""
        return replace(super().rule(), least=self.tolerating)


class FedMedian(SynchronousStrategy):
    """FedMedian (Yin et al. 2018, definition 1), as Flower has it."""

    Config: ClassVar[type[StrategyConfig]] = FedMedianConfig
    own_rule: ClassVar[bool] = True


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
        f, needed = self.config.num_malicious_nodes, self.config.tolerating
        if f and num_clients < needed:
            log.warning(
                "num_malicious_nodes = %d: %s tolerates fewer with %d clients; %d or more are needed",
                *(f, type(self).__name__, num_clients, needed),
            )


class MultiKrum(Krum):
    """MultiKrum (Blanchard et al. 2017, section 4), as Flower has it."""

    Config: ClassVar[type[StrategyConfig]] = MultiKrumConfig

    num_nodes_to_select = FlowerAttribute()


class Bulyan(Krum):
    """Bulyan (El Mhamdi et al. 2018, section 4), as Flower has it."""

    Config: ClassVar[type[StrategyConfig]] = BulyanConfig

    selection_rule = FlowerAttribute()
