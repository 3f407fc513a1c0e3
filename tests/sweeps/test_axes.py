"""Axes on a command line."""

import pytest

from fedapp.config import ConfigError
from fedapp.config.words import read_words
from fedapp.sweeps.axes import read_axes


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=0.03,0.1,1", [0.03, 0.1, 1]),
        ("strategy=fedavg,fedprox", ["fedavg", "fedprox"]),
        ("strategy=custom.mine:Half", ["custom.mine:Half"]),
        ("seed=0-3,7", [0, 1, 2, 3, 7]),
        ("num-clients=5-7", [5, 6, 7]),
        ("lr=1e-3,2", [1e-3, 2]),
        ("time-scenario=0-4,F80", ["0-4", "F80"]),  # a text is no range
        ("run-name=2020", ["2020"]),
        ('step-heterogeneity="list:1,2",none', ["list:1,2", "none"]),
        ("step-heterogeneity='list:1,2'", ["list:1,2"]),
        ("client-evaluation=true,false", [True, False]),
        ("case=good", ["good"]),
    ],
)
def test_values_of_an_axis(text, values):
    (found,) = read_axes([text]).values()
    assert found == values
    assert list(map(type, found)) == list(map(type, values))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["lr"], "'lr': is not of the form KEY=VALUE,VALUE"),
        (["lr="], "is not of the form"),
        (["=1"], "is not of the form"),
        (["lr=1,"], "ends in a comma"),
        (["lr=1,,2"], "is no list of values"),
        (["seed=4-1"], "4-1 must go up"),
        (["seed=0-99999999"], "by fewer than 10000"),
        (["lr=1", "lr=2"], "the axis lr is given twice"),
        (['strategy="fedavg'], "is no list of values"),
    ],
)
def test_what_is_no_axis_is_named(texts, message):
    with pytest.raises(ConfigError, match=message):
        read_axes(texts)


def test_nothing_is_an_empty_text():
    assert read_axes(["input-column="]) == {"input-column": [""]}
    assert read_words(["input-column=", "lr=0.1"]) == {"input-column": "", "lr": 0.1}
