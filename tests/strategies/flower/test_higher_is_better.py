"""Which values of a metric are better: by the words of its name, as it is stated, and where neither is known."""

import math

import pytest

from strategies import FedAvg
from strategies.clients.client_metrics import spread
from strategies.core.best_model import BestModel
from strategies.core.config import StrategyConfig
from strategies.flower.higher_is_better import higher_is_better, split_direction
from tests.strategies.parts import model_of

LOWER = (
    "loss median-mae mse valid_RMSE nll brier-score ece perplexity smape wer test_error error-rate MSELoss "
    "MedianError negative-log-likelihood false-positive-rate fpr-at-tpr95 accuracy-std "
    "client-median-mae-worst-tenth losses"
)
HIGHER = (
    "accuracy acc auroc roc-auc f1-macro F1Score top5 top-5 recall-at-fpr worst-recall mAP50 r2 r-squared c-index "
    "iou log-likelihood balanced_accuracy error-free-accuracy personal-auroc-mean client-loss-jain"
)
UNKNOWN = "score within-ten value validity neg-mean-squared-error accuracy-gap brier-skill-score mean-of-losses size"


@pytest.mark.parametrize(
    ("names", "expected"),
    [(LOWER, False), (HIGHER, True), (UNKNOWN, None)],
    ids=["lower", "higher", "unknown"],
)
def test_the_words_of_a_name_say_which_values_are_better(names, expected):
    assert {name: higher_is_better(name) for name in names.split()} == dict.fromkeys(names.split(), expected)


def test_what_is_stated_counts_in_place_of_the_name_and_over_clients_too():
    assert split_direction(" min:custom.errors:far_off") == (False, "custom.errors:far_off")
    assert split_direction("max:auroc") == (True, "auroc")
    assert split_direction("custom.errors:far_off") == (None, "custom.errors:far_off")
    stated = {"score": False, "loss": True}
    names = ("score", "client-score-worst-tenth", "personal-score-mean", "loss", "score-std")
    assert [higher_is_better(name, stated) for name in names] == [False, False, False, True, False]


def test_the_best_goes_by_what_is_stated_and_is_refused_where_nothing_is_known():
    with pytest.raises(
        ValueError,
        match=r"^best_of = 'score': it isn't known whether a lower or a higher score is better; 'min:score' or "
        r"'max:score' states it$",
    ):
        FedAvg(keep="best", best_of="score")
    FedAvg(best_of="score")  # nothing is compared
    for stated, expected in (("min:score", 1), ("max:score", 2)):
        best = BestModel(StrategyConfig(keep="best", best_of=stated))
        for number, value in enumerate((0.5, 0.2, 0.9)):
            best.evaluated(number, model_of(float(number)), {"score": value})
        assert (best.by, best.aggregation) == ("score", expected)


def test_the_worst_and_the_best_clients_are_told_only_where_the_direction_is_known():
    values = [1.0, 2.0, 3.0, 4.0]
    assert spread("score", values) == pytest.approx(
        {"client-score-mean": 2.5, "client-score-std": math.sqrt(1.25)}
    )
    lower, higher = (spread("score", values, {"score": higher}) for higher in (False, True))
    assert (lower["client-score-worst-tenth"], lower["client-score-best"]) == (4.0, 1.0)
    assert (higher["client-score-worst-tenth"], higher["client-score-best"]) == (1.0, 4.0)
    assert "client-score-jain" in higher.keys() - lower.keys()
