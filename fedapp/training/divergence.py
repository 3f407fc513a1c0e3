"""How far clients drift apart in a round, and how unlike their objectives are where they end.

The divergence after a round is max ‖∇f_i(w_i) − ∇f(w_i)‖ over its participants i, each at its own local model; its
largest value estimates ζ. The drift of lemma 2.3, at the end of the round, is the participants' mean ‖w_i − w̄‖² with
w̄ the mean of their models (Dhasade, Kremer and Renard, EPFL student report, eq. 3 and section 4.1).
"""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fedapp.names import IGNORED
from fedapp.training.evaluation import CHUNK
from fedapp.training.losses import CROSS_ENTROPY, Loss
from fedapp.training.parts import inputs_of
from fedapp.training.state import completed, names_of


class DivergenceMeter:
    """Measures the local models of one aggregation, one by one as they arrive; needs every client's data.

    Parameters
    ----------
    model : nn.Module
        On the device of the data.
    x, y : Tensor
        All clients' inputs (N, ...) and targets (N, ...), client after client.
    offsets : array (C+1,)
        Client i owns rows ``offsets[i]`` to ``offsets[i+1]``.
    loss : Loss
        Of an example.
    """

    def __init__(
        self, model: nn.Module, x: Tensor, y: Tensor, offsets: np.ndarray, loss: Loss = CROSS_ENTROPY
    ) -> None:
        self.model, self.x, self.y, self.offsets, self.loss = model, x, y, offsets, loss
        self._names = names_of(model)
        # Of how many examples each client's loss is the mean, or of how many positions.
        self._sizes = np.diff(offsets)
        if y.dim() > 1 and not y.is_floating_point() and self._is_of_positions():
            counted = (y != IGNORED).flatten(1).sum(1).cpu().numpy()
            self._sizes = np.maximum(np.add.reduceat(counted, offsets[:-1]), 1)
        self._recurrent = any(isinstance(layer, nn.RNNBase) for layer in model.modules())
        self._start()

    def _is_of_positions(self) -> bool:
        with torch.no_grad():
            x, y = self.x[:1], self.y[:1]
            *_, counts = self.loss.each(self.model(x), y, lambda: inputs_of(self.model, x))
        return counts is not None

    def _start(self) -> None:
        self._count, self._largest, self._squares = 0, 0.0, 0.0
        self._mean = np.zeros(0)

    def take(self, client: int, state: dict[str, Tensor], client_weights: Mapping[int, float]) -> None:
        """Measure a client's local model; ``importance`` has the p_j of f = Σ p_j f_j by client."""
        weights = np.zeros(len(self._sizes))
        for other, p in client_weights.items():
            weights[other] = -p / self._sizes[other]
        weights[client] += 1 / self._sizes[client]
        by_row = torch.from_numpy(np.repeat(weights, np.diff(self.offsets))).to(self.x.device)
        self._largest = max(self._largest, self._gradient_norm(state, by_row))
        flat = torch.cat([state[name].flatten() for name in self._names.trained])
        vector = flat.double().cpu().numpy()
        self._mean = self._mean if self._count else np.zeros_like(vector)
        self._count += 1
        step = vector - self._mean  # Welford's sums: no cancellation, and no need to keep the models
        self._mean = self._mean + step / self._count
        self._squares += float(step @ (vector - self._mean))

    def metrics(self) -> dict[str, float]:
        """Return divergence and drift since the last call; nothing if there was no local model."""
        found = {"divergence": self._largest, "drift": self._squares / self._count} if self._count else {}
        self._start()
        return found

    def _gradient_norm(self, state: dict[str, Tensor], weights: Tensor) -> float:
        """‖Σ_rows weight ∇loss‖, the weights (N,) in float64."""
        leaves = {name: state[name].detach().requires_grad_() for name in self._names.trained}
        total = [torch.zeros_like(leaf, dtype=torch.float64) for leaf in leaves.values()]
        chunks = (torch.split(values, CHUNK) for values in (self.x, self.y, weights))
        for x, y, weight in zip(*chunks, strict=True):
            # In evaluation mode recurrent layers have no gradient by cuDNN.
            with torch.backends.cudnn.flags(enabled=False) if self._recurrent else nullcontext():
                outputs = torch.func.functional_call(
                    self.model, {**completed(self.model, state), **leaves}, (x,)
                )
            losses, _ = self.loss.each(outputs, y, partial(inputs_of, self.model, x))
            gradients = torch.autograd.grad(
                (losses * weight).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
            )
            total = [sum_ + gradient.to_dense() for sum_, gradient in zip(total, gradients, strict=True)]
        return float(torch.sqrt(torch.stack([gradient.square().sum() for gradient in total]).sum()))
