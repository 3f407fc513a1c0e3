"""Labels of each position of a row, such as tokens and pixels: losses, metrics and means, by hand."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedapp.training.autograd import batch_loss
from fedapp.training.divergence import DivergenceMeter
from fedapp.training.evaluation import METRICS, evaluate
from fedapp.training.losses import CROSS_ENTROPY, LOSSES, Loss, class_axis
from fedapp.training.trainee import Trainee

LN2 = math.log(2)
# Three classes with logits (ln 2, 0, 0): p = 1/2, 1/4, 1/4; and the same the other way round.
UP, DOWN = [LN2, 0.0, 0.0], [0.0, 0.0, LN2]
OUTPUTS = torch.tensor([[UP, UP], [UP, DOWN], [UP, UP]])
LABELS = torch.tensor([[0, 1], [0, -100], [-100, -100]])  # of three rows 2, 1 and no positions count
# −ln p of the positions that count
ROWS = [LN2 + 2 * LN2, LN2, 0.0]


def own(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")


def of_rows(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").sum(1)


@pytest.mark.parametrize("loss", [CROSS_ENTROPY, Loss("m:own", own)])
def test_a_mean_is_over_the_positions_that_count(loss):
    sums, counts = loss.each(OUTPUTS, LABELS)
    assert counts is not None
    assert sums.tolist() == pytest.approx(ROWS)
    assert counts.tolist() == [2, 1, 0]
    assert float(loss.mean(OUTPUTS, LABELS)) == pytest.approx(4 * LN2 / 3)
    assert float(loss.mean(OUTPUTS, LABELS, torch.tensor([0.0, 1, 1]))) == pytest.approx(LN2)


def test_where_nothing_counts_the_mean_is_unknown_and_has_no_gradient():
    outputs = OUTPUTS[2:].clone().requires_grad_()
    mean = CROSS_ENTROPY.mean(outputs, LABELS[2:])
    assert mean.isnan()
    assert torch.autograd.grad(mean, outputs)[0].eq(0).all()


def test_where_a_loss_is_of_rows_each_row_counts_once():
    assert float(Loss("m:rows", of_rows).mean(OUTPUTS, LABELS)) == pytest.approx(4 * LN2 / 3)
    assert float(Loss("m:rows", of_rows).mean(OUTPUTS[:2], LABELS[:2])) == pytest.approx(4 * LN2 / 2)


@given(seed=st.integers(0, 1000), pictures=st.booleans())
def test_cross_entropy_is_pytorchs(seed, pictures):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1, 5, (3, 4, 2) if pictures else (3, 4), generator=rng)
    labels[labels < 0] = -100
    labels[0, 0] = 0
    outputs = torch.randn(*labels.shape, 5, generator=rng, dtype=torch.float64)
    expected = F.cross_entropy(outputs.movedim(-1, 1), labels)
    shown = outputs.movedim(-1, 1) if pictures else outputs
    torch.testing.assert_close(CROSS_ENTROPY.mean(shown, labels), expected)


@pytest.mark.parametrize(
    ("outputs", "labels", "axis"),
    [
        ((2, 5, 3), (2, 5), 2),
        ((2, 3, 5), (2, 5), 1),
        ((2, 5, 5), (2, 5), 2),
        ((2, 3, 5, 6), (2, 5, 6), 1),
        ((2, 5, 6, 3), (2, 5, 6), 3),
        ((2, 5, 5, 5), (2, 5, 5), 1),
        ((2, 3), (2,), 1),
    ],
)
def test_the_axis_of_the_classes(outputs, labels, axis):
    assert class_axis(torch.empty(outputs), torch.empty(labels)) == axis


def test_outputs_without_an_axis_for_the_classes_are_refused():
    with pytest.raises(
        ValueError, match=r"outputs \(2, 5\) don't fit labels \(2, 5\): they need one axis more"
    ):
        class_axis(torch.empty(2, 5), torch.empty(2, 5))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", 2 / 3),  # of the classes 0, 1, 0 the first and the last are found: 0, 0, 0
        ("top5", 1.0),
        ("perplexity", 2 ** (4 / 3)),
        # class 0: found and true at two, either at three; class 1: never found
        ("iou", (2 / 3 + 0) / 2),
        ("f1-macro", (0.8 + 0) / 2),
    ],
)
def test_metrics_by_hand(name, expected):
    assert METRICS[name].whole(OUTPUTS, LABELS) == pytest.approx(expected)
    assert METRICS[name].whole(OUTPUTS.movedim(2, 1), LABELS) == pytest.approx(expected)


def test_of_a_picture_of_numbers_all_values_are_one_column():
    truth = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    logits = torch.tensor([[[2.0, 1.0], [-1.0, -1.0]]])
    # one: 1 of 2; zero: 2 of 3
    assert METRICS["iou"].whole(logits, truth) == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert METRICS["accuracy"].whole(logits, truth) == 3 / 4
    assert METRICS["r2"].whole(truth, truth) == 1
    # (1, 1, −1, −1) from (1, 0, 0, 0), whose mean is 1/4: 3 squares of 1 beside 3/4
    assert METRICS["r2"].whole(logits.clamp(-1, 1), truth) == pytest.approx(1 - 3 / 0.75)
    assert float(LOSSES["mse"].mean(logits, truth)) == pytest.approx((1 + 1 + 1 + 1) / 4)


class Table(nn.Module):
    """Returns what it has for a token."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([UP, DOWN]))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits[x.long()]


X = torch.tensor([[0.0, 0], [0, 1], [0, 0]])


def test_scores_of_all_and_of_clients_weigh_positions():
    measured = tuple(METRICS[name] for name in ("accuracy", "perplexity", "iou"))
    model = Table()
    score = evaluate(model, model.state_dict(), X, LABELS, CROSS_ENTROPY, measured)
    assert score.loss == pytest.approx(4 * LN2 / 3)
    assert score.values() == pytest.approx({"accuracy": 2 / 3, "perplexity": 2 ** (4 / 3), "iou": 1 / 3})
    by_client = score.by_client(np.array([0, 1, 1, 3]))
    assert by_client["loss"] == pytest.approx([1.5 * LN2, np.nan, LN2], nan_ok=True)
    assert by_client["accuracy"] == pytest.approx([0.5, np.nan, 1], nan_ok=True)
    assert by_client["perplexity"] == pytest.approx([2**1.5, np.nan, 2], nan_ok=True)


def test_rows_without_a_position_that_counts_have_no_score():
    measured = tuple(METRICS[name] for name in ("accuracy", "perplexity", "iou"))
    model, offsets = Table(), np.array([0, 1, 2, 3])
    score = evaluate(model, model.state_dict(), X, LABELS, CROSS_ENTROPY, measured)
    by_client = score.by_client(offsets)
    for name, values in by_client.items():
        assert np.isnan(values).tolist() == [False, False, True]
        assert score.uncounted(name, offsets) == [2]
    assert math.isnan(evaluate(model, model.state_dict(), X[2:], LABELS[2:], CROSS_ENTROPY, measured).loss)


def test_a_padded_batch_has_the_gradient_of_the_batch():
    trainee, state = Trainee(Table()), {"logits": torch.tensor([UP, DOWN])}
    of = batch_loss(trainee, CROSS_ENTROPY, {})
    padded = torch.func.grad(of)(state, X[[0, 1, 1]], LABELS[[0, 1, 1]], torch.tensor([1.0, 1, 0]))
    alone = torch.func.grad(of)(state, X[:2], LABELS[:2], None)
    torch.testing.assert_close(padded, alone)


def test_divergence_is_of_means_over_positions():
    # Two clients, (row 0) and (rows 1, 2); the second's loss is of one position. ∇ of −ln p is p − e.
    model = Table()
    meter = DivergenceMeter(model, X, LABELS, np.array([0, 1, 3]))
    meter.take(0, {"logits": torch.tensor([UP, DOWN])}, {0: 0.5, 1: 0.5})
    p = np.array([0.5, 0.25, 0.25])
    first, second = (2 * p - [1, 1, 0]) / 2, p - [1, 0, 0]
    assert meter.metrics()["divergence"] == pytest.approx(np.linalg.norm(first - (first + second) / 2))
