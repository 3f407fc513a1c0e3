"""Evaluation of a model on rows of data."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedapp.training.layers import dense_layers
from fedapp.training.losses import CROSS_ENTROPY, Loss
from fedapp.training.metrics import METRICS, Metric
from fedapp.training.state import for_one_call, names_of
from fedapp.training.trainee import as_it_is, by_channel, takes_by_channel
from fedapp.training.vectors import Parameters

# Rows per forward pass: bounds the memory of a large test set. What convolutions and recurrent layers make of a few
# rows stays in a processor's cache, of many it doesn't.
CHUNK, FEW = 2048, 128

ACCURACY = (METRICS["accuracy"],)


@dataclass(frozen=True, eq=False)
class Score:
    """What a model scores on N examples.

    Attributes
    ----------
    losses : array (N,), float64
        Loss of every example.
    rows : mapping of str to array (N,)
        What every example adds to those metrics that are means.
    outputs, targets : Tensor (N, ...), optional
        What the other metrics are made of.
    metrics : tuple of Metric
    """

    losses: np.ndarray
    rows: Mapping[str, np.ndarray]
    outputs: Tensor | None
    targets: Tensor | None
    metrics: tuple[Metric, ...]

    @property
    def loss(self) -> float:
        """Mean loss."""
        return float(self.losses.mean())

    def values(self, among: slice = slice(None)) -> dict[str, float]:
        """Return every metric, of all examples or of some."""
        return {metric.name: self._value(metric, among) for metric in self.metrics}

    def by_client(self, offsets: np.ndarray) -> dict[str, np.ndarray]:
        """Return loss and metrics of every client (C,), NaN for one without examples; i owns ``offsets[i:i+2]``."""
        sizes = np.diff(offsets)
        owned = sizes > 0
        found = {
            name: np.full(len(sizes), np.nan) for name in ("loss", *(each.name for each in self.metrics))
        }
        for name, values in {"loss": self.losses, **self.rows}.items():
            found[name][owned] = (
                np.add.reduceat(values.astype(np.float64), offsets[:-1][owned]) / sizes[owned]
            )
        for metric in self.metrics:
            if metric.name not in self.rows:
                for client in np.flatnonzero(owned):
                    found[metric.name][client] = self._value(metric, slice(*offsets[client : client + 2]))
        return found

    def _value(self, metric: Metric, among: slice) -> float:
        if metric.name in self.rows:
            return float(self.rows[metric.name][among].mean())
        assert self.outputs is not None
        assert self.targets is not None
        return metric.whole(self.outputs[among], self.targets[among])


def evaluate(
    model: nn.Module,
    state: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: Loss = CROSS_ENTROPY,
    metrics: tuple[Metric, ...] = ACCURACY,
) -> Score:
    """Score ``model``, in evaluation mode, with a ``state`` on inputs (N, ...) and targets, on their device."""
    state = names_of(model).own(state)
    few = x.device.type == "cpu" and not dense_layers(model)
    chunk = FEW if few else CHUNK

    def outputs_of(state: Parameters, inputs: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(model, for_one_call(model, state), (inputs,))
        return found

    images = few and x.dim() == 4 and len(x) > 0
    lay_out = by_channel if images and takes_by_channel(model, outputs_of, state, x) else as_it_is
    state = {name: lay_out(value) for name, value in state.items()}
    losses: list[Tensor] = []
    outputs: list[Tensor] = []
    rows: dict[str, list[Tensor]] = {metric.name: [] for metric in metrics if metric.rows is not None}
    whole = len(rows) < len(metrics)
    with torch.no_grad():
        for inputs, targets in zip(torch.split(x, chunk), torch.split(y, chunk), strict=True):
            found = outputs_of(state, lay_out(inputs))
            losses.append(loss.rows(found, targets).double().cpu())
            if whole:
                outputs.append(found.cpu())
            for metric in metrics:
                if metric.rows is not None:
                    rows[metric.name].append(metric.rows(found, targets).cpu())
    return Score(
        torch.cat(losses).numpy(),
        {name: torch.cat(each).numpy() for name, each in rows.items()},
        torch.cat(outputs) if whole else None,
        y.cpu() if whole else None,
        metrics,
    )
