"""``metrics = auto`` is what fits: none for a variational autoencoder with its own loss."""

import logging

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedapp
from fedapp.own import OwnPartError

LATENT = 2


class Autoencoder(nn.Module):
    """Returns the picture, then mean and log-variance of the code, side by side (B, D + 4)."""

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(*input_shape, 2 * LATENT), nn.Linear(LATENT, *input_shape)

    def forward(self, x: Tensor) -> Tensor:
        code = self.encode(x)
        return torch.cat([self.decode(code[:, :LATENT]), code], dim=1)


def evidence(outputs: Tensor, targets: Tensor) -> Tensor:
    seen, mean, variance = outputs.split([targets.shape[1], LATENT, LATENT], dim=1)
    distance = 0.5 * (mean.square() + variance.exp() - variance - 1).sum(1)
    return (seen - targets).square().sum(1) + distance


def test_a_loss_of_ones_own_is_not_asked_for_rmse(tmp_path, caplog):
    x = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
    keys = {"dataset": (x, x), "model": Autoencoder, "results_dir": tmp_path, "num_clients": 2}
    with caplog.at_level(logging.INFO, "flwr.fedapp"):
        run = fedapp.run(**keys, loss=evidence, num_server_rounds=2, figures=False)
    assert "metrics = auto: none beside the loss, as 'rmse': can't take outputs (8, 9)" in caplog.text
    assert "rmse" not in run.metrics
    assert np.isfinite(run.summary["loss"])
    with pytest.raises(OwnPartError, match="metrics = 'rmse': can't take outputs"):
        fedapp.run(**keys, loss=evidence, metrics="rmse")
