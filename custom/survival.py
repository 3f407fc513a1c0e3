"""An example of a loss of a whole batch, and of its metric: survival times, of which some are censored.

Targets are (event, time), (B, 2): event 1 where the time is one of death, 0 where it is that of the last sight.
`model="custom.survival:risk" loss="custom.survival:cox" metrics="max:custom.survival:concordance"`
"""

import torch
from torch import Tensor, nn


def risk(input_shape: tuple[int, ...], num_outputs: int) -> nn.Linear:
    """Make the model of Cox's regression: a score that is linear in the inputs."""
    return nn.Linear(input_shape[0], 1)


def cox(outputs: Tensor, targets: Tensor) -> Tensor:
    """Negative log partial likelihood (Cox 1972) of a batch, divided by its rows: a scalar.

    −(1/B) Σ_i event_i (s_i − ln Σ_j exp s_j), with j over the rows of the batch that live at least as long as i.
    """
    score, (event, time) = outputs.squeeze(1), targets[:, :2].unbind(1)
    order = torch.argsort(time, descending=True, stable=True)
    score, event = score[order], event[order]
    return (event * (torch.logcumsumexp(score, 0) - score)).mean()


cox.of_batch = True  # type: ignore[attr-defined]


def concordance(outputs: Tensor, targets: Tensor) -> float:
    """Harrell's C: the share of comparable pairs in which who dies first has the higher score; ties count half.

    A pair is comparable if the one with the shorter time dies then, or, with equal times, if one of the two dies.
    """
    score = outputs.squeeze(1).double().numpy()
    event, time = targets[:, 0].numpy() > 0, targets[:, 1].double().numpy()
    earlier = time[:, None] < time
    earlier |= (time[:, None] == time) & ~event
    comparable = earlier & event[:, None]
    if not comparable.any():
        return float("nan")
    higher = (score[:, None] > score) + 0.5 * (score[:, None] == score)
    return float(higher[comparable].mean())
