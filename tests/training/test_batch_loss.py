"""Losses of a whole batch, such as Cox's: trained without padding, scored client by client, or refused."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedapp
from custom.survival import concordance, cox
from fedapp.config import ConfigError
from fedapp.own import OwnPartError
from fedapp.training import trainer
from fedapp.training.batches import Batches
from fedapp.training.evaluation import evaluate
from fedapp.training.losses import Loss, loss_of
from fedapp.training.rule import LocalRule
from fedapp.training.task import LocalTask
from tests.runs import lines_of, vector_of

COX = "custom.survival:cox"

rng = np.random.default_rng(0)
X = rng.normal(size=(41, 3)).astype(np.float32)
Y = np.column_stack([rng.random(41) < 0.6, rng.exponential(np.exp(X[:, 0]))]).astype(np.float32)


def run(folder: Path, **keys: Any) -> Any:
    plain: dict[str, Any] = {
        "dataset": {"x_train": X, "y_train": Y, "x_test": X[:9], "y_test": Y[:9]},
        "model": "custom.survival:risk",
        "loss": COX,
        "metrics": "max:custom.survival:concordance",
        "num_clients": 3,
        "num_server_rounds": 2,
        "batch_size": 8,
        "lr": 0.05,
        "engine": "sequential",
        "figures": False,
        "quiet": True,
    }
    return fedapp.run(**{**plain, **keys}, results_dir=folder)


def test_coxs_loss_and_concordance_by_hand():
    scores = torch.tensor([[0.0], [1.0], [2.0]])
    targets = torch.tensor(
        [[1.0, 5.0], [0.0, 7.0], [1.0, 3.0]]
    )  # the third dies first, the second is censored
    first = math.log(1 + math.e) - 0.0  # at risk with the first: itself and the second
    third = math.log(1 + math.e + math.e**2) - 2.0  # with the third: all
    assert float(cox(scores, targets)) == pytest.approx((first + third) / 3)
    # Comparable: (third, first), (third, second), (first, second). The first's score is below the second's.
    assert concordance(scores, targets) == pytest.approx(2 / 3)
    assert concordance(torch.zeros(3, 1), targets) == 0.5
    assert math.isnan(concordance(scores, targets * torch.tensor([0.0, 1.0])))
    same_time = torch.tensor([[1.0, 3.0], [0.0, 3.0]])  # who is seen alive then has lived longer
    assert concordance(torch.tensor([[2.0], [1.0]]), same_time) == 1.0


def test_a_batch_is_never_padded(tmp_path):
    """Of 41 rows on 3 clients batches of 8 differ in size; a stack of clients would pad them."""
    made = [run(tmp_path, engine=engine, local_epochs=3) for engine in ("sequential", "vectorized")]
    assert vector_of(made[0].path) == pytest.approx(vector_of(made[1].path), abs=1e-6)
    assert not trainer.can("vmapped", task_of(cox=True))
    assert trainer.can("vmapped", task_of(cox=False))


def task_of(*, cox: bool) -> LocalTask:
    """Return a task of a linear model, by Cox's loss or the squared error."""
    model, y = nn.Linear(3, 1), torch.from_numpy(Y if cox else Y[:, :1])
    batches = Batches(np.arange(8).reshape(1, 8), np.array([8]), 8)
    start = {name: value.detach() for name, value in model.state_dict().items()}
    x = torch.from_numpy(X)
    return LocalTask(model, start, x, y, 0, batches, 0.1, LocalRule(), loss=loss_of(COX if cox else "mse"))


def test_a_clients_loss_is_that_of_its_rows_as_one_batch():
    model = nn.Linear(3, 1)
    loss = loss_of(COX)
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    score = evaluate(model, dict(model.state_dict()), x, y, loss, ())
    outputs = model(x).detach()
    assert score.loss == pytest.approx(float(cox(outputs, y)))
    offsets = np.array([0, 10, 10, 41])
    expected = [float(cox(outputs[:10], y[:10])), math.nan, float(cox(outputs[10:], y[10:]))]
    assert score.by_client(offsets)["loss"] == pytest.approx(expected, nan_ok=True)
    assert score.undefined("loss", score.by_client(offsets), offsets) == []


def test_one_step_is_pytorchs(tmp_path):
    plain: dict[str, Any] = {"num_clients": 1, "num_server_rounds": 1, "batch_size": 64}
    made = run(tmp_path, **plain)
    model = run(tmp_path, **plain, lr=1e-30).model()  # as it was before the step
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    cox(model(torch.from_numpy(X)), torch.from_numpy(Y)).backward()
    optimizer.step()
    expected = np.concatenate([p.detach().numpy().ravel() for _, p in sorted(model.named_parameters())])
    assert vector_of(made.path) == pytest.approx(expected, abs=1e-6)


def test_a_run_learns_and_tells_the_loss_of_the_test_rows(tmp_path):
    made = run(tmp_path, num_server_rounds=20)
    lines = lines_of(made.path)
    assert lines[-1]["concordance"] > 0.7
    assert lines[-1]["loss"] < lines[0]["loss"]


class Rows:
    """A loss of the batch by its attribute, which returns one of each row."""

    of_batch = True

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.squeeze(1)


class Other(Rows):
    of_batch = 1  # type: ignore[assignment]


def with_inputs(outputs: Tensor, targets: Tensor, inputs: Tensor) -> Tensor:
    return outputs.mean()


with_inputs.of_batch = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            {"loss": f"{__name__}:Rows"},
            "states of_batch = True and must return one number, a tensor without axes",
        ),
        ({"loss": f"{__name__}:Other"}, "its of_batch must be True or False, is 1"),
        ({"loss": f"{__name__}:with_inputs"}, "a loss of the whole batch takes outputs and targets alone"),
        (
            {"record_divergence": True},
            "a loss of the whole batch isn't a sum over rows, whose gradients it needs",
        ),
    ],
)
def test_what_a_loss_of_the_batch_cant_do_is_refused_before_the_run(keys, why, tmp_path):
    with pytest.raises((ConfigError, OwnPartError), match=re.escape(why)):
        run(tmp_path, **keys)
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_mean_without_the_attribute_is_told_of_it(tmp_path):
    with pytest.raises(OwnPartError, match="a loss of the whole batch states of_batch = True"):
        run(tmp_path, loss=f"{__name__}:mean")


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def test_the_losses_that_are_built_in_are_of_rows():
    assert not any(
        isinstance(each, Loss) and each.of_batch for each in map(loss_of, ("mse", "cross-entropy"))
    )
