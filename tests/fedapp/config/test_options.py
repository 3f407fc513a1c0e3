"""Options in the syntax of ``flwr run``: what is read, what is refused, and a key that is given twice."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedapp.config import ConfigError
from fedapp.config.options import read_options


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (None, {}),
        ([], {}),
        ([""], {}),
        (["lr=0.1"], {"lr": 0.1}),
        (
            ['strategy="fedprox" proximal-mu=0.1 seed=3 normalize=true'],
            {"strategy": "fedprox", "proximal-mu": 0.1, "seed": 3, "normalize": True},
        ),
        (["  lr=0.1   seed=1  "], {"lr": 0.1, "seed": 1}),
        (["strategy='fedprox'"], {"strategy": "fedprox"}),
        (['run-name="two words"'], {"run-name": "two words"}),
        (['data-path="/a/b=c.npz"'], {"data-path": "/a/b=c.npz"}),
        (["lr=0.1", "seed=1"], {"lr": 0.1, "seed": 1}),
        # One word needs no quotes, unless it means something in TOML.
        (["strategy=fedprox normalize=true"], {"strategy": "fedprox", "normalize": True}),
        (
            ["participation=uniform time-scenario=exponential:F80"],
            {"participation": "uniform", "time-scenario": "exponential:F80"},
        ),
        (
            ["strategy=custom.half_life:HalfLife data-path=~/a-b/c.npz results-dir=/tmp/x"],
            {"strategy": "custom.half_life:HalfLife", "data-path": "~/a-b/c.npz", "results-dir": "/tmp/x"},
        ),
        (["metrics=auroc,min:a.b:far_off lr=0.1"], {"metrics": "auroc,min:a.b:far_off", "lr": 0.1}),
    ],
)
def test_key_value_pairs(texts, values):
    read = read_options("--run-config", texts)
    assert read == values
    assert [type(value) for value in read.values()] == [type(value) for value in values.values()]


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        (["lr"], "'lr' is not of the form key=value"),
        (["lr 0.1"], "'lr 0.1' is not of the form key=value"),
        (["lr="], "'lr=' is not of the form key=value"),
        (["lr=0.1 strategy"], "'strategy' is not of the form key=value"),
        (['run-name="a"b'], "'b' is not of the form key=value"),
        (["lr=0.1,momentum=0.9"], "invalid format"),
        (["lr=[1,2]"], "lr"),
        (["lr=0.1", "x.toml"], "x.toml"),
        (["none.toml"], "no such file"),
        (["lr=0.1 none.toml"], "no such file"),
    ],
)
def test_what_is_not_an_option_is_named_in_one_line(texts, named):
    with pytest.raises(ConfigError) as caught:
        read_options("--run-config", texts)
    text = str(caught.value)
    assert text.startswith("--run-config '")
    assert named in text
    assert "\n" not in text


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_a_toml_file(tmp_path):
    path = write(tmp_path / "run.toml", 'strategy = "fedprox"\nlr = 0.5\nseed = 3\nnormalize = false\n')
    expected = {"strategy": "fedprox", "lr": 0.5, "seed": 3, "normalize": False}
    assert read_options("--run-config", [path]) == expected


def test_a_toml_file_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "run.toml", "lr = 0.5\n")
    assert read_options("--run-config", ["~/run.toml"]) == {"lr": 0.5}


@pytest.mark.parametrize(
    "content", ["lr = = 2\n", "lr\n", b"lr = '\xff'\n", "lr = [1, 2]\n", "lr = 2026-01-01\n"]
)
def test_a_toml_file_that_is_none(content, tmp_path):
    path = write(tmp_path / "bad.toml", content)
    with pytest.raises(ConfigError) as caught:
        read_options("--run-config", [path])
    assert str(caught.value).startswith(f"--run-config {path!r}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["--run-config", "--federation-config"])
def test_what_comes_later_takes_the_place_of_what_a_file_has(tmp_path, name):
    path = write(tmp_path / "run.toml", "lr = 0.5\nseed = 3\n")
    other = write(tmp_path / "other.toml", "seed = 4\n")
    assert read_options(name, [path, "lr=0.3 batch-size=8"]) == {"lr": 0.3, "seed": 3, "batch-size": 8}
    assert read_options(name, [path, other]) == {"lr": 0.5, "seed": 4}
    assert read_options(name, ["batch-size=8", path]) == {"lr": 0.5, "seed": 3, "batch-size": 8}


def test_keys_of_a_file_may_have_underscores_as_in_python(tmp_path):
    path = write(tmp_path / "run.toml", "num_server_rounds = 3\nbatch-size = 8\n")
    assert read_options("--run-config", [path]) == {"num-server-rounds": 3, "batch-size": 8}


def test_a_file_does_not_take_the_place_of_what_stands_before_it(tmp_path):
    path = write(tmp_path / "run.toml", "lr = 0.5\n")
    said = refusal(["lr=0.3", path])
    assert said.startswith(f"--run-config {path!r}: has lr, which is given before it; the file comes first")


# A key given twice -----------------------------------------------------------------------------------------


def refusal(texts: list[str], name: str = "--run-config") -> str:
    with pytest.raises(ConfigError) as caught:
        read_options(name, texts)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["lr=0.1 lr=0.2"], "lr is given twice, as 0.1 and 0.2"),
        (["lr=0.1", "lr=0.2 seed=1"], "lr is given twice, as 0.1 and 0.2"),
        (["lr=0.1 seed=1", "", "seed=1"], "seed is given twice, as 1 and 1"),
        (["run-name='a b' seed=1 run-name=\"c\""], "run-name is given twice, as 'a b' and 'c'"),
        (['lr=0.1 "lr"=0.2'], "lr is given twice, as 0.1 and 0.2"),  # TOML's other way to write a key
        (["lr=0.1 lr=0.2 lr=0.3"], "lr is given twice, as 0.1 and 0.2"),
    ],
)
def test_in_one_text_or_in_several(texts, said):
    assert refusal(texts) == f"--run-config {' '.join(texts)!r}: {said}"
    assert refusal(texts, "--federation-config") == f"--federation-config {' '.join(texts)!r}: {said}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("lr = 0.1\nseed = 1\n\nlr = 0.2  # later\n", "lr is given twice, as 0.1 and 0.2"),
        (
            "strategy = \"fedavg\"\nstrategy = 'fedprox'\n",
            "strategy is given twice, as 'fedavg' and 'fedprox'",
        ),
        ("batch-size = 1\nbatch_size = 2\n", "batch-size is given twice, as 1 and 2"),
        ("seed = 1\n[versions]\nseed = 2\nseed = 3\n", "seed is given twice, as 2 and 3"),
    ],
)
def test_in_a_toml_file(content, said, tmp_path):
    path = write(tmp_path / "run.toml", content)
    assert refusal([path]) == f"--run-config {path!r}: {said}"


def test_the_same_key_in_two_tables_is_two_keys(tmp_path):
    path = write(tmp_path / "run.toml", "seed = 1\n[a]\nseed = 2\n[b]\nseed = 3\n")
    assert read_options("--run-config", [path]) == {"seed": 1, "a.seed": 2, "b.seed": 3}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["lr", "seed", "run-name", "x"]), st.sampled_from(["1", "0.5", '"a b"', "true"])
        ),
        max_size=5,
    ),
    st.integers(0, 5),
)
def test_it_is_refused_if_and_only_if_a_key_is_there_twice(pairs, cut):
    words = [f"{key}={value}" for key, value in pairs]
    texts = [" ".join(words[:cut]), " ".join(words[cut:])]
    keys = [key for key, _ in pairs]
    if len(set(keys)) == len(keys):
        assert read_options("-c", texts) == {key: tomllib.loads(f"v = {value}")["v"] for key, value in pairs}
    else:
        assert " is given twice, as " in refusal(texts, "-c")
