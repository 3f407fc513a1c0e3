"""Metrics, by hand and against scikit-learn."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from fedapp.own import OwnPartError, register
from fedapp.report.files import measured_by
from fedapp.training.evaluation import METRICS, chosen_metrics, evaluate, metrics_of
from fedapp.training.losses import loss_of
from strategies.flower.higher_is_better import higher_is_better

LOGITS = torch.tensor([[2.0, 1, 0], [0, 2, 1], [0, 1, 2], [2, 0, 1]])
LABELS = torch.tensor([0, 1, 1, 2])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", 2 / 4),  # predicted 0, 1, 2, 0
        ("top5", 1.0),
        # class 0: precision 1/2, recall 1: 2/3; class 1: 1, 1/2: 2/3; class 2: 0
        ("f1-macro", (2 / 3 + 2 / 3 + 0) / 3),
    ],
)
def test_classes_by_hand(name, expected):
    assert METRICS[name].whole(LOGITS, LABELS) == pytest.approx(expected)


def test_numbers_by_hand():
    outputs, targets = torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([[1.0], [3.0], [2.0]])
    found = {name: METRICS[name].whole(outputs, targets) for name in ("mae", "rmse", "r2")}
    # differences 0, −1, 3; Σ (y − 2)² = 2
    assert found == pytest.approx({"mae": 4 / 3, "rmse": math.sqrt(10 / 3), "r2": 1 - 10 / 2})
    assert math.isnan(METRICS["r2"].whole(outputs, torch.ones(3, 1)))


@given(seed=st.integers(0, 10_000), rows=st.integers(3, 40))
def test_against_scikit_learn(seed, rows):
    rng = np.random.default_rng(seed)
    y, several = rng.normal(size=(rows, 2)), rng.random((rows, 3)) > 0.5
    outputs, logits = rng.normal(size=(rows, 2)), rng.normal(size=(rows, 3))
    of = {name: lambda *pair, name=name: METRICS[name].whole(*map(torch.tensor, pair)) for name in METRICS}
    assert of["r2"](outputs, y) == pytest.approx(sk.r2_score(y, outputs))
    assert of["mae"](outputs, y) == pytest.approx(sk.mean_absolute_error(y, outputs))
    assert of["accuracy"](logits, several.astype(float)) == pytest.approx(((logits > 0) == several).mean())
    if (several.any(0) & ~several.all(0)).all():
        expected = sk.roc_auc_score(several, logits, average="macro")
        assert of["auroc"](logits, several.astype(float)) == pytest.approx(expected)
    labels = rng.integers(0, 2, rows)
    if 0 < labels.sum() < rows:
        p = torch.softmax(torch.tensor(outputs), 1)[:, 1].numpy()
        assert of["auroc"](outputs, labels) == pytest.approx(sk.roc_auc_score(labels, p))


def guesses_of(kind, rng, rows):
    """Return outputs, targets, and for scikit-learn the truths and guesses of some rows."""
    if kind == "labels":
        outputs, truth = rng.normal(size=(rows, 3)), rng.random((rows, 3)) > 0.5
        return outputs, truth.astype(float), lambda at: (truth[at], outputs[at] > 0)
    if kind in ("label", "mask"):
        shape = (rows, 1) if kind == "label" else (rows, 1, 4, 5)
        outputs, truth = rng.normal(size=shape), rng.random(shape) > 0.5
        return outputs, truth.astype(float), lambda at: (truth[at].ravel(), outputs[at].ravel() > 0)
    shape = {"classes": (rows,), "tokens": (rows, 4), "pixels": (rows, 20, 20)}[kind]
    outputs, truth = rng.normal(size=(rows, 5, *shape[1:])), rng.integers(0, 5, shape)
    if kind != "classes":
        truth[rng.random(shape) > 0.8] = -100
    guess = outputs.argmax(1)
    return outputs, truth, lambda at: (truth[at][truth[at] >= 0], guess[at][truth[at] >= 0])


class Rows(torch.nn.Module):
    """Returns the outputs of the rows that it is asked for."""

    def __init__(self, outputs):
        super().__init__()
        self.register_buffer("outputs", torch.tensor(outputs))

    def forward(self, x):
        return self.outputs[x[:, 0].long()]


@pytest.mark.parametrize("kind", ["classes", "tokens", "pixels", "labels", "label", "mask"])
@settings(max_examples=settings.default.max_examples // 2)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 300))
def test_counts_by_class_give_scikit_learns_figures_and_outputs_are_not_kept(kind, seed, rows):
    outputs, targets, pairs = guesses_of(kind, np.random.default_rng(seed), rows)
    x = torch.arange(rows, dtype=torch.float32).unsqueeze(1)
    model, measured = Rows(outputs), metrics_of("f1-macro,iou,accuracy")
    loss = loss_of("bce" if targets.dtype.kind == "f" else "cross-entropy")
    score = evaluate(model, model.state_dict(), x, torch.tensor(targets), loss, measured)
    assert score.outputs is None
    assert score.by_class is not None
    assert score.by_class.nbytes <= rows * 3 * score.by_class.shape[2] * (4 if kind == "pixels" else 1)
    cut = rows // 3
    by_client = score.by_client(np.array([0, cut, rows]))
    for name, function in (("f1-macro", sk.f1_score), ("iou", sk.jaccard_score)):
        for client, at in enumerate((slice(0, cut), slice(cut, rows))):
            if len(pairs(at)[0]):
                expected = function(*pairs(at), average="macro", zero_division=0)
                assert by_client[name][client] == pytest.approx(expected)
        if len(pairs(slice(None))[0]):
            expected = function(*pairs(slice(None)), average="macro", zero_division=0)
            assert score.values()[name] == pytest.approx(expected)


def test_an_undefined_area_is_no_number():
    assert math.isnan(METRICS["auroc"].whole(torch.rand(4, 2), torch.zeros(4, dtype=torch.int64)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_area_under_scores_that_are_none_is_none(value):
    labels, several = torch.tensor([0, 1, 2, 0]), torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    for targets in (labels, labels.clamp(max=1), several):
        outputs = torch.rand(len(targets), 3 if targets is labels else 2)
        assert 0 <= METRICS["auroc"].whole(outputs, targets) <= 1
        outputs[0] = value
        assert math.isnan(METRICS["auroc"].whole(outputs, targets))


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.rows is not None])
def test_the_mean_over_rows_is_the_metric(name):
    classes = METRICS[name].targets != "numbers"
    outputs, targets = (LOGITS, LABELS) if classes else (LOGITS, LOGITS.flip(0))
    metric = METRICS[name]
    assert metric.rows is not None
    mean = float(metric.rows(outputs, targets).double().mean())
    assert metric.of_mean(mean) == metric.whole(outputs, targets)


def test_auto_suits_loss_and_targets():
    numbers = torch.zeros(1, 2)
    assert [m.name for m in chosen_metrics("auto", "cross-entropy", LABELS)] == ["accuracy"]
    assert [m.name for m in chosen_metrics("auto", "mse", numbers)] == ["rmse", "r2"]
    assert [m.name for m in chosen_metrics("auto", "bce", numbers)] == ["accuracy"]
    assert chosen_metrics("none", "mse", numbers) == ()
    mine = chosen_metrics("mae, custom.losses:worst_recall", "mse", numbers)[1]
    assert mine.name == "worst-recall"
    assert mine.whole(LOGITS, LABELS) == 0.0  # of class 2 none is right


def test_one_handed_over_is_called_as_its_function_is():
    def mean_error(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return 0.5

    names = f"accuracy,{register(mean_error)}"
    assert re.fullmatch(r"accuracy,python:mean_error_[0-9a-f]{8}", names)
    assert [metric.name for metric in metrics_of(names)] == ["accuracy", "mean-error"]
    assert measured_by(names) == ["loss", "accuracy", "mean-error"]
    assert higher_is_better("mean-error") is False


def test_one_that_changes_what_it_gets_changes_neither_data_nor_other_metrics():
    def zeroed(outputs, targets):
        hits = (outputs.argmax(1) == targets).double().mean()
        outputs.zero_()
        targets.zero_()
        return hits

    outputs, targets = torch.tensor([[0.0, 1.0], [0.0, 2.0], [3.0, 0.0]]), torch.tensor([1, 0, 0])
    first, second = metrics_of(f"{register(zeroed)},auroc")
    assert (first.whole(outputs, targets), second.whole(outputs, targets)) == (2 / 3, 0.5)
    assert (outputs.tolist(), targets.tolist()) == ([[0, 1], [0, 2], [3, 0]], [1, 0, 0])


def test_two_that_are_called_alike_are_refused():
    def worst_recall(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return 0.5

    with pytest.raises(OwnPartError, match=r"^metrics = .*: two are called 'worst-recall'$"):
        metrics_of(f"custom.losses:worst_recall,{register(worst_recall)}")


@pytest.mark.parametrize(
    "name", ["loss", "time", "train_loss", "status", "num_clients", "weight", "work", "client_accuracy_mean"]
)
def test_one_that_is_called_as_something_else_of_a_run_is_refused(name):
    def metric(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return 0.5

    metric.__qualname__ = name
    with pytest.raises(
        OwnPartError, match=rf"^metrics = 'python:{name}_.*; the function needs another name$"
    ):
        metrics_of(register(metric))


@pytest.mark.parametrize("names", ["precision", "accuracy,accuracy", "custom.losses:nothing", "math:pi"])
def test_what_is_no_metric_is_refused(names):
    with pytest.raises(OwnPartError, match=r"^metrics = "):
        metrics_of(names)
