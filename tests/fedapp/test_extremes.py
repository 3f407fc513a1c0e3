"""The largest tokens and labels of all clients are tried before any client starts, and outputs must be finite."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedapp
from fedapp.data import Dataset
from fedapp.data.extremes import extreme_rows
from fedapp.names import Part
from fedapp.training.check import check_extremes
from fedapp.training.losses import CROSS_ENTROPY, LOSSES, Loss
from tests import own_models

RUN: dict[str, Any] = {"num_clients": 4, "num_server_rounds": 1}
LATE = 230  # a row that is in no client's first ones


class Tokens(nn.Module):
    """An embedding of 12 tokens, and as many outputs."""

    def __init__(self, outputs: int = 12) -> None:
        super().__init__()
        self.tokens, self.output = nn.Embedding(12, 4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.tokens(x.long()))
        return logits


class Few(Tokens):
    """Has too few outputs."""

    def __init__(self) -> None:
        super().__init__(11)


class Infinite(Tokens):
    """Divides by what is 0 at the start."""

    def __init__(self, last: float = torch.inf) -> None:
        super().__init__()
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return torch.cat([logits[..., :-1], torch.full_like(logits[..., :1], self.last)], -1)


class Masked(Infinite):
    """Never says the last token."""

    def __init__(self) -> None:
        super().__init__(-torch.inf)


def texts(token: int = 5, target: int = 5) -> tuple[np.ndarray, np.ndarray]:
    x, y = own_models.texts()
    y[y == 11] = -100  # the last token is seen nowhere else
    x[LATE, 2], y[LATE, 2] = token, target
    return x, y


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"dataset": texts(token=40), "model": Tokens},
            r"its Embedding 'tokens' has 12 rows, 0 to 11 are allowed; the data \(x up to 40\) ask for 40$",
        ),
        (
            {"dataset": texts(token=-3), "model": Tokens},
            r"0 to 11 are allowed; the data \(x up to 11\) ask for -3",
        ),
        (
            {"dataset": texts(target=11), "model": Few, "loss": own_models.per_token, "metrics": "none"},
            r"per_token': can't take outputs .* for targets .*, whose largest label is 11 \(IndexError: Target 11 is",
        ),
        (
            {"dataset": texts(), "model": Infinite},
            r"model = '.*:Infinite': its outputs aren't finite at the start, before any training: 80 of 960 are NaN",
        ),
    ],
)
def test_it_fails_in_one_line_before_clients_start(config, said, capfd):
    with pytest.raises(ValueError, match=said) as error:
        fedapp.run(**RUN, **config)
    assert "\n" not in str(error.value)
    assert "round" not in capfd.readouterr().err


def test_a_logit_of_minus_infinity_is_one():
    x, y = (torch.tensor(each[:4]) for each in texts())
    y[y == 11] = -100
    check_extremes("m:m", Masked().eval(), CROSS_ENTROPY, x.float(), y)
    y[0, 0] = 11
    with pytest.raises(
        ValueError, match=r"loss = 'cross-entropy': isn't finite at the start, .*, of 1 of 40 losses"
    ):
        check_extremes("m:m", Masked().eval(), CROSS_ENTROPY, x.float(), y)


def test_a_devices_values_are_not_told():
    x, y = torch.full((1, 10), 40.0), torch.zeros(1, 10, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"0 to 11 are allowed; the data ask for others$"):
        check_extremes("m:m", Tokens().eval(), CROSS_ENTROPY, x, y, quoted=False)


def data(x: np.ndarray, **more: Any) -> Dataset:
    y = np.zeros(len(x), np.int64)
    y[3] = 7
    return Dataset(
        "own", x.astype(np.float32), y, None, len(x), 8, **{"kind": "vector", "scale": 1.0, **more}
    )


def test_the_rows_are_those_of_the_largest_and_least_of_each_column_of_whole_numbers():
    x = np.random.default_rng(0).normal(size=(50, 4))
    x[:, 1:3] = 5
    x[10, 1], x[11, 1], x[12, 2] = 9, 2, 8
    x[:, 2].flat[:] = np.where(np.arange(50) == 12, 8, 5)
    every = np.arange(50)
    assert extreme_rows(data(x), every).tolist() == [0, 3, 10, 11, 12]
    assert extreme_rows(data(x), every[11:]).tolist() == [11, 12]
    assert extreme_rows(data(x, scale=1 / 255), every).tolist() == [0, 3]
    many = np.full((50, 300), 4)
    many[20, 150], many[21, 299], many[22, 100], many[23, 10] = 6, 7, 1, 2
    assert extreme_rows(data(many), every).tolist() == [0, 3, 21, 22]
    parts = (Part("a", "int64", (200,)), Part("b", "int64", (100,)))
    assert extreme_rows(data(many, kind="parts", parts=parts), every).tolist() == [0, 3, 20, 21, 22]


def test_a_row_beyond_the_first_block_is_found(monkeypatch):
    monkeypatch.setattr("fedapp.data.extremes._BLOCK", 8)
    x = np.zeros((50, 2))
    x[30, 1], x[40, 0] = 3, -1
    numbers = replace(data(x), y=np.zeros((50, 1), np.float32), targets="numbers", num_classes=0)
    assert extreme_rows(numbers, np.arange(50)).tolist() == [0, 30, 40]


def test_a_loss_that_is_no_number_at_the_start_is_refused():
    loss = Loss("m:m", lambda outputs, targets: (outputs - targets).flatten(1).sum(1) / 0, "numbers")
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    check_extremes("m:m", nn.Linear(3, 3), LOSSES["mse"], x, y)
    with pytest.raises(
        ValueError, match="loss = 'm:m': isn't finite at the start, before any training, of 2 of 2"
    ):
        check_extremes("m:m", nn.Linear(3, 3), loss, x, y)
