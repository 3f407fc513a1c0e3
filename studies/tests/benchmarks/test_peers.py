"""Other simulators beside ours: that they compute the same, and what is shared with them."""

from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from studies.benchmarks.bare_loop import Loop
from studies.benchmarks.bare_loop import run as bare
from studies.benchmarks.job import Job, accuracy, load_rows
from studies.benchmarks.measure import measure
from studies.benchmarks.nets import simple_cnn
from studies.benchmarks.pfl_backend import participants
from studies.benchmarks.workloads import CONTENDERS, PACKAGES, WORKLOADS, Data, images


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Four clients of ten rows in a batch: what they make doesn't depend on the order of their rows."""
    path = tmp_path_factory.mktemp("data") / "images.npz"
    np.savez(path, **images(40, 1_000))
    return Job(str(path), "mlp", 4, 4, batch_size=10, lr=0.3, rounds=7, evaluate_every=1)


def peer(name: str) -> object:
    missing = find_spec(PACKAGES[name]) is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"{PACKAGES[name]} isn't installed"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [peer("appfl"), peer("flgo")])
def test_an_asynchronous_run_is_that_of_the_bare_loop(name: str, job: Job) -> None:
    """The first seven arrivals, before two of them are due at once (clients 0 and 3, at 1 s)."""
    asynchronous = replace(job, server_lr=0.5)
    check(asynchronous, measure(name, asynchronous, warmup=1, timeout=280).accuracy)


@pytest.mark.slow
@pytest.mark.parametrize("name", [peer("pfl")])
@pytest.mark.parametrize("processes", [1, 2])
def test_rounds_are_those_of_the_bare_loop(name: str, processes: int, job: Job) -> None:
    some = replace(job, participants=2)  # one in each of two processes
    check(some, measure(name, replace(some, threads=processes), warmup=1, timeout=280).accuracy)


def check(job: Job, found: dict[int, float]) -> None:
    """Every model along the way gets as many rows right as the bare loop's, but for rounding."""
    expected = bare(job).accuracy
    assert found.keys() == expected.keys() == set(range(1, 8))
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=0.0021)
    assert max(expected.values()) > min(expected.values()) + 0.05  # they aren't all the same


def test_who_takes_part_at_pfl_is_who_does_in_the_bare_loop(job: Job) -> None:
    some = replace(job, participants=2)
    rng, found = some.stream_of_participants(), participants(some)
    for _ in range(3):
        assert list(islice(found, 2)) == rng.choice(4, 2, replace=False).tolist()


def test_the_cnn_is_that_of_pfl() -> None:
    model = simple_cnn((3, 32, 32), 10)
    assert sum(value.numel() for value in model.parameters()) == 1_626_442  # what pfl reports of its own
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    bound = (6 / (128 + 10)) ** 0.5  # Glorot's, of the last layer
    assert 0.9 * bound < float(model[-1].weight.detach().abs().max()) <= bound


@pytest.fixture(scope="module")
def colour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10's shape and axes."""
    path = tmp_path_factory.mktemp("colour") / "cifar10.npz"
    arrays = images(40, 20, shape=(3, 32, 32))
    np.savez(path, **{k: v.transpose(0, 2, 3, 1) if v.ndim == 4 else v for k, v in arrays.items()})
    return path


def test_images_in_colour(colour: Path, tmp_path: Path) -> None:
    data = Data(tmp_path, colour)
    assert data.path("colour") == colour
    x, y = load_rows(str(colour), "train")
    assert (x.shape, x.is_contiguous(), len(y)) == ((40, 3, 32, 32), True, 40)
    np.testing.assert_array_equal(x.mul(255).round().numpy(), images(40, 20, shape=(3, 32, 32))["x_train"])
    assert data.path("images-30") == tmp_path / "images-30.npz"  # grey ones are still made


def test_dropout_is_on_in_training_and_off_in_evaluation(colour: Path) -> None:
    job = replace(WORKLOADS["W5"].with_rounds(3).job("bare-1", colour), num_clients=4, participants=2)
    loop = Loop(job)
    state = {name: value.clone() for name, value in loop.model.state_dict().items()}
    drawn = [loop.model(loop.x_test) for _ in range(2)]
    assert not torch.equal(*drawn)
    loop.evaluate(3, state)
    assert loop.log.accuracy[3] == accuracy(loop.model.eval(), loop.x_test, loop.y_test)
    loop.evaluate(3, state)
    assert loop.model.training


def test_pfl_is_evaluated_as_often_as_in_its_own_benchmark() -> None:
    workload = WORKLOADS["W5"]
    assert [each for each in range(21) if workload.job("pfl", Path("x.npz")).evaluates(each)] == [10, 20]
    assert WORKLOADS["W4"].job("ray", Path("x.npz")).evaluate_every == 2_500


def test_a_peer_that_is_not_installed_is_left_out_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from studies.benchmarks.__main__ import _installed

    assert set(PACKAGES) <= set(CONTENDERS)
    monkeypatch.setitem(PACKAGES, "pfl", "no_such_package")
    assert _installed(["pfl", "bare-1"]) == ["bare-1"]
    assert "pfl: left out, as no_such_package isn't installed" in capsys.readouterr().out
