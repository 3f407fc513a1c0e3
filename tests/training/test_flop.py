"""Operations of a model, against what they are by hand; and the examples of a task against its batches."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedapp.training.batches import plan_batches
from fedapp.training.flop import flop_of
from fedapp.training.work import examples_of


def test_a_dense_network_by_hand():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    assert flop_of(model, torch.zeros(8, 1, 8, 8)) == 3 * 2 * (64 * 128 + 128 * 10)


def test_a_convolution_by_hand():
    # 16 × 16 places, 4 kernels of 3 × 5 × 5 values; then 4 × 16 × 16 values to 10.
    model = nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(1024, 10))
    running = model[1].running_mean.clone()
    model.train()
    assert flop_of(model, torch.randn(2, 3, 16, 16)) == 3 * 2 * (256 * 4 * 75 + 1024 * 10)
    assert model.training
    assert torch.equal(model[1].running_mean, running)  # counting leaves no trace


def test_recurrent_models_count():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 16, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0][:, -1]

    # 20 steps, 4 gates of 16 values, from 8 inputs and 16 of its own.
    assert flop_of(Recurrent(), torch.zeros(4, 20, 8)) == 3 * 2 * 20 * 4 * 16 * (8 + 16)


def test_transformers_count():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    # 10 places: queries, keys, values and output 4 × 16 × 16, the two dense layers 2 × 16 × 32; both of attention's
    # products 10 × 16.
    assert flop_of(layer, torch.zeros(3, 10, 16)) == 3 * 2 * 10 * (4 * 16 * 16 + 2 * 16 * 32 + 2 * 10 * 16)


def test_what_multiplies_nothing_counts_nothing():
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.by

    assert flop_of(Shift(), torch.zeros(3, 2)) == 0


@given(st.integers(1, 90), st.integers(0, 40), st.integers(0, 5), st.integers(1, 5))
def test_the_examples_of_a_task_are_those_of_its_batches(n, batch, epochs, steps):
    steps = 0 if epochs else steps
    plan = plan_batches(n, batch_size=batch, epochs=epochs, steps=steps, rng=np.random.default_rng(0))
    assert examples_of(n, batch, epochs, steps) == plan.sizes.sum()
