"""The loops that are written by hand train as the bare loop does."""

import os
from dataclasses import replace

import numpy as np
import pytest

from studies.benchmarks.bare_loop import Loop, copy_of
from studies.benchmarks.batched_loop import BatchedLoop
from studies.benchmarks.hand_written import HandWritten
from studies.benchmarks.job import Job
from studies.benchmarks.vmap_loop import VmapLoop
from studies.benchmarks.workloads import images


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Four clients of ten rows in a batch: what they make doesn't depend on the order of their rows."""
    path = tmp_path_factory.mktemp("data") / "images.npz"
    np.savez(path, **images(40, 100))
    return Job(str(path), "mlp", 4, 2, batch_size=10, lr=0.1, rounds=1, evaluate_every=1)


def jax_loop(job: Job) -> HandWritten:
    pytest.importorskip("jax")
    os.environ["JAX_PLATFORMS"] = "cpu"
    from studies.benchmarks.jax_loop import JaxLoop

    return JaxLoop(job)


@pytest.mark.parametrize("make", [VmapLoop, BatchedLoop, jax_loop], ids=["vmap", "batched", "jax"])
def test_a_round_is_that_of_the_bare_loop(make, job: Job) -> None:
    bare, chosen = Loop(job), np.array([1, 3])
    state = copy_of(bare.model)
    trained = [copy_of_state(bare.train(state, client)) for client in chosen]
    expected = {name: np.mean([one[name] for one in trained], axis=0) for name in state}
    loop = make(job)
    batches = loop.batches()
    assert batches.shape == (2, 1, 10)
    loop.round(chosen, batches)
    found = loop.state
    if not isinstance(found, dict):
        found = {
            f"{n}.{part}": v.T
            for n, layer in zip((1, 3), found, strict=True)
            for part, v in zip(("weight", "bias"), layer, strict=True)
        }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(np.asarray(found[name]), value, atol=1e-6)
        assert np.abs(value - state[name].numpy()).max() > 1e-3


def copy_of_state(state):
    return {name: value.numpy().copy() for name, value in state.items()}


def test_a_last_batch_that_is_short_counts_its_rows_alone(job: Job) -> None:
    # Ten rows in batches of four: the last has two, and the mean of its step is over two.
    loop = VmapLoop(replace(job, batch_size=4))
    batches = loop.batches()
    assert batches.shape == (2, 3, 4)
    for own in batches:
        assert sorted(own.ravel()) == [-1, -1, *range(10)]
        assert (own[2, 2:] == -1).all()
    bare, state = Loop(job), copy_of(loop.model)
    bare.job = replace(job, batch_size=4)
    bare.rng = type("Fixed", (), {"permutation": lambda self, n: batches[0].ravel()[:n]})()
    expected = copy_of_state(bare.train(state, 2))
    loop.round(np.array([2]), batches[:1])
    for name, value in expected.items():
        np.testing.assert_allclose(loop.state[name].numpy(), value, atol=1e-6)


def test_what_it_is_not_written_for_is_refused(job: Job) -> None:
    with pytest.raises(ValueError, match="same number of rows"):
        VmapLoop(replace(job, num_clients=3))
    with pytest.raises(ValueError, match="same number of rows"):
        VmapLoop(replace(job, server_lr=0.1))
