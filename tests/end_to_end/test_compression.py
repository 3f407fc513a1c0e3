"""Compressed updates: the app against float64 numpy, and the same bits on Ray and on devices."""

import numpy as np
import pytest

from tests.end_to_end.softmax import KEYS, Problem, assert_close
from tests.runs import lines_of, summary_of

ROUNDS, STEPS, CLIENTS, SHARE = 6, 5, 7, 0.1


def test_the_largest_values_with_error_feedback_equal_numpy(run_app):
    # Of no client are two values that nearly make it so close that float32 would take the other.
    own = {"local-steps": STEPS, "num-server-rounds": ROUNDS, "compression": f"topk:{SHARE}"}
    path = run_app(KEYS | own, CLIENTS)
    problem, W, left_out = Problem(path), np.zeros((10, 65)), np.zeros((CLIENTS, 10, 65))
    for _ in range(ROUNDS):
        before = W
        for i in range(CLIENTS):
            v = left_out[i] + problem.descend(i, before, STEPS) - before
            kept = np.where(np.abs(v) >= np.sort(np.abs(v), axis=None)[-round(SHARE * v.size)], v, 0.0)
            W, left_out[i] = W + problem.p[i] * kept, v - kept
    assert_close(path, W)
    assert np.linalg.norm(left_out) > 0.1


# Flower keeps a client's state from round to round, on Ray and on devices; and a second run begins without.
CONFIG = {
    "model": "logistic",
    "compression": "topk:0.05",
    "compression-down": "int8",
    "num-server-rounds": 3,
    "checkpoint-every": 1,
}


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_ray_gives_the_same_bits_and_resumes_to_them(simulate):
    two = "num-supernodes=2"
    whole = simulate(CONFIG, federation=two, engine="sequential")
    part = simulate({**CONFIG, "num-server-rounds": 2}, federation=two)
    assert part.returncode == 0, part.output
    assert list((part.path / "checkpoint").glob("*/left-out.npy"))
    place = {"results-dir": str(part.path.parent), "run-name": part.path.name}
    again = simulate({"resume": str(part.path), "num-server-rounds": 3, **place}, federation=two)
    assert again.returncode == 0, again.output
    assert (part.path / "model.safetensors").read_bytes() == whole.model


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_deployed_supernodes_give_the_same_bits_as_a_simulation(devices, simulate, tmp_path):
    for name in ("one", "other"):
        # On devices the safeguards are on by default, and shorten what is longer than usual.
        place = {"results-dir": str(tmp_path), "run-name": name, "safeguards": "off"}
        devices.start_run(CONFIG | place, tmp_path / f"{name}.log").wait(timeout=500)
        output = (tmp_path / f"{name}.log").read_text()
        assert (tmp_path / name / "model.safetensors").exists(), output
    summary = summary_of(tmp_path / "one")
    assert (summary["engine"], summary["status"]) == ("deployment", "finished")
    # 650 values: 33 of four bytes, and as many indices of ten bits.
    assert lines_of(tmp_path / "one")[-1]["bytes-up"] == 3 * 3 * (33 * 4 + 42)
    # A byte a value, a scale for each of two arrays, and a head that takes less than 200.
    assert 650 + 8 < lines_of(tmp_path / "one")[-1]["bytes-down"] / 9 < 650 + 8 + 200
    other = simulate(CONFIG, federation="num-supernodes=3", engine="sequential")
    for name in ("one", "other"):
        assert (tmp_path / name / "model.safetensors").read_bytes() == other.model
