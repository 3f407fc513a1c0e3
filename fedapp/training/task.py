"""A task: all that a client's local training needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from fedapp.training.augment import Augmentation
from fedapp.training.batches import Batches
from fedapp.training.draws import SENT, Draws
from fedapp.training.losses import CROSS_ENTROPY, Loss
from fedapp.training.optimizer import SGD, LocalOptimizer
from fedapp.training.rule import LocalRule
from fedapp.training.vectors import Parameters


@dataclass(frozen=True, eq=False)
class LocalTask:
    """All that a client's local training needs.

    Attributes
    ----------
    model : nn.Module
        Says what the parameters mean; its own values aren't used.
    start : dict of str to Tensor
        Where training starts, on the data's device: w̄, the parameters sent to the client.
    x, y : Tensor
        Inputs (N, ...) and targets, labels (N,) or numbers (N, M): the client's own rows are those from
        ``offset`` on.
    offset : int
        0, or where the client's rows begin in data that are shared by many.
    batches : Batches
        What each local step sees of the client's rows.
    lr : float
        γ, the step size.
    rule : LocalRule
        The method's local step.
    neighbours : dict of str to Tensor, optional
        u, the neighbour average; needed if ``rule.beta`` < 1.
    constant : dict of str to Tensor, optional
        h, added to every gradient after it is clipped: a client's control variate.
    fixed : mapping of str to Tensor
        What of the model's state isn't trained: frozen parameters, and buffers as they were sent.
    loss : Loss
        Of an example.
    optimizer : LocalOptimizer
        What moves the model along a step's direction.
    ids : three ints
        Seed, client and task: what the model's own random numbers (dropout) follow from.
    augmentation : Augmentation, optional
        What becomes of the images that each step reads.
    anchor : dict of str to Tensor, optional
        What ``rule.alpha`` pulls towards, where that isn't ``start``.
    draws : Draws
        The streams that its random numbers come from.
    """

    model: nn.Module
    start: Parameters
    x: Tensor
    y: Tensor
    offset: int
    batches: Batches
    lr: float
    rule: LocalRule
    neighbours: Parameters | None = None
    constant: Parameters | None = None
    fixed: Mapping[str, Tensor] = field(default_factory=dict)
    loss: Loss = CROSS_ENTROPY
    optimizer: LocalOptimizer = SGD
    ids: tuple[int, int, int] = (0, 0, 0)
    augmentation: Augmentation | None = None
    anchor: Parameters | None = None
    draws: Draws = SENT

    def __post_init__(self) -> None:
        self.rule.check(self.neighbours)

    @property
    def noise(self) -> int:
        """Return the seed of the random numbers that the model draws in training."""
        seed, client, task = self.ids
        return self.draws.randomness(seed, client, task)

    @property
    def pulled_to(self) -> Parameters:
        """What ``rule.alpha`` pulls towards."""
        return self.start if self.anchor is None else self.anchor

    @property
    def rows(self) -> slice:
        """The client's rows of x and y."""
        return slice(self.offset, self.offset + self.batches.num_examples)
