"""``fedapp bounds`` on real, small runs: constants and curve against PyTorch and SciPy, bounds above, refusals."""

import json
import logging
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from scipy.optimize import minimize
from typer.testing import CliRunner

import run_simulation
from fedapp.cli import app
from fedapp.config import ConfigError, RunConfig
from fedapp.data import load_dataset
from studies.theory.obstacles import ANY_VALUE, DEMANDS
from studies.theory.run_bounds import bounds_of_run

CLIENTS, L2, LR = 4, 0.5, 0.002
COMMON = {
    "model": '"logistic"',
    "l2": L2,
    "lr": LR,
    "local-epochs": 0,
    "local-steps": 2,
    "batch-size": 16,
    "client-weights": '"uniform"',
    "num-server-rounds": 6,
    "run-name": '"run"',
}

ASYNC = {"strategy": '"async-fedavg"'}

RunOnce = Callable[..., Path]


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> RunOnce:
    """Run the app in this process and return the run's folder; the same keys are run once."""
    done: dict[str, Path] = {}

    def run(**keys: object) -> Path:
        values = {**COMMON, **{key.replace("_", "-"): value for key, value in keys.items()}}
        text = " ".join(f"{key}={value}" for key, value in values.items())
        if text not in done:
            results = tmp_path_factory.mktemp("results")
            arguments = ["--engine", "sequential", "--run-config", f'{text} results-dir="{results}"']
            assert run_simulation.main([*arguments, "--federation-config", f"num-supernodes={CLIENTS}"]) == 0
            done[text] = results / "run"
        return done[text]

    return run


def command(run_dir: Path) -> object:
    return CliRunner().invoke(app, ["bounds", str(run_dir)])


def objective(run_dir: Path) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """f and its gradient, Σ p_i f_i with p_i = 1/C, by PyTorch from the run's own partition."""
    dataset = load_dataset("digits", "", num_clients=0, seed=0)
    with np.load(run_dir / "partition.npz") as stored:
        indices, offsets = stored["client_indices"], stored["client_offsets"]
    clients = np.split(indices, offsets[1:-1])
    rows = [
        (torch.tensor(dataset.inputs(r)).double().flatten(1), torch.tensor(dataset.y[r])) for r in clients
    ]

    def f(w: np.ndarray) -> tuple[float, np.ndarray]:
        v = torch.tensor(w, requires_grad=True)
        losses = [
            torch.nn.functional.cross_entropy(x @ v[:640].reshape(10, 64).T + v[640:], y.long())
            for x, y in rows
        ]
        total = torch.stack(losses).mean() + L2 / 2 * v @ v
        (gradient,) = torch.autograd.grad(total, v)
        return total.item(), gradient.numpy()

    return f


def test_a_fedavg_run_and_all_its_bounds(run_once: RunOnce) -> None:
    run_dir = run_once()
    done = []
    found = bounds_of_run(run_dir, lambda count, total: done.append((count, total)))
    assert done == [(n, 6) for n in range(7)]
    assert found.refusals == []
    f = objective(run_dir)
    best = minimize(
        f, np.zeros(650), jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-10, "maxiter": 2000}
    )
    state = safetensors.torch.load_file(run_dir / "model.safetensors")
    final = np.concatenate([state["1.weight"].double().numpy().ravel(), state["1.bias"].double().numpy()])
    assert found.gaps[-1] == pytest.approx(f(final)[0] - best.fun, rel=1e-6)
    rows = {row.symbol: row.value for row in found.rows}
    assert rows["C"] == CLIENTS
    assert rows["μ"] == L2
    assert rows["S"] == pytest.approx(1 / CLIENTS)
    assert rows["Δ"] == pytest.approx(found.gaps[0])
    # Each σ, ζ and G is at least what the final model shows.
    assert rows["ζ²"] >= rows["ζ² (mean)"] > 0
    assert rows["G²"] >= rows["σ²"] > 0
    sources = [bound.source for bound in found.bounds]
    assert sources == ["Dhasade et al., theorem 2.1", "001 theorem F.2", "Buttaci 2024, lemma B.2"]
    for bound in found.bounds:
        measured = found.means if bound.of_mean else found.gaps
        assert bound.values.shape == measured.shape
        assert (bound.values >= measured).all()
    # Dhasade et al. by hand from the rows: D²/(2ητT) + ησ²/C + 4τη²Lσ² + 18τ²η²Lζ² with τ = 2, T = 6.
    by_hand = rows["D²"] / (24 * LR) + LR * rows["σ²"] / 4
    by_hand += rows["L"] * LR**2 * (8 * rows["σ²"] + 72 * rows["ζ²"])
    assert found.bounds[0].values[-1] == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("strategy", "more", "source"),
    [
        ("fedprox", {"proximal_mu": 1.0}, "Buttaci 2024, lemma B.2"),
        ("spectral", {"perturbation_beta": 0.5}, "Buttaci 2024, lemma C.2"),
    ],
)
def test_the_other_synchronous_methods(
    run_once: RunOnce, strategy: str, more: dict[str, float], source: str
) -> None:
    found = bounds_of_run(run_once(strategy=f'"{strategy}"', **more))
    assert [bound.source for bound in found.bounds] == [source]
    if strategy == "spectral":  # whatever client-weights says
        with np.load(run_once(strategy=f'"{strategy}"', **more) / "graph.npz") as stored:
            degrees = stored["adjacency"].sum(axis=1)
        rows = {row.symbol: row.value for row in found.rows}
        assert rows["S"] == pytest.approx(((degrees / degrees.sum()) ** 2).sum())
    assert (found.bounds[0].values >= found.gaps).all()
    assert found.refusals == []


@pytest.mark.parametrize("strategy", ["async-fedavg", "fedfix"])
def test_asynchronous_runs_have_terms_and_no_bound(run_once: RunOnce, strategy: str) -> None:
    # 4 clients of F80: τ = .2, 7/15, 11/15, 1.
    run_dir = run_once(strategy=f'"{strategy}"', server_lr=0.5, fedfix_interval=0.5)
    found = bounds_of_run(run_dir)
    assert found.bounds == []
    assert [
        "Fraboni et al. 2023, eqs. 38, 42: O(·) without constants" in reason for reason in found.refusals
    ] == [True]
    rows = {row.symbol: row.value for row in found.rows}
    assert found.terms["initial"] == pytest.approx(rows["D²"] / 12**0.5)  # K N = 2 · 6
    # FedFix: ⌈τ/.5⌉ = 1, 1, 2, 2 and lcm 2. Async: in fifteenths 3, 7, 11, 15: lcm 1155: 385 + 165 + 105 + 77.
    window = {"fedfix": 2, "async-fedavg": 732}[strategy]
    assert found.terms["window"] == pytest.approx((window - 1) / 12**0.5)
    done = command(run_dir)
    assert done.exit_code == 0
    assert "staleness" in done.output
    assert not (run_dir / "bounds.png").exists()


def test_normalized_steps_have_the_bounds_of_their_size(run_once: RunOnce) -> None:
    plain = bounds_of_run(run_once(local_steps=4))
    found = bounds_of_run(run_once(local_steps=4, lr=4 * LR, normalize_steps="true"))
    assert found.gaps == pytest.approx(plain.gaps)
    assert found.refusals == plain.refusals
    assert [bound.source for bound in found.bounds] == [bound.source for bound in plain.bounds]
    for bound, same in zip(found.bounds, plain.bounds, strict=True):
        assert bound.values == pytest.approx(same.values)


def test_the_perceptron_with_whole_batches(run_once: RunOnce) -> None:
    synthetic = {"dataset": '"synthetic"', "partitioner": '"natural"', "model": '"perceptron"'}
    run_dir = run_once(**synthetic, l2=0.0, batch_size=0, lr=0.2, local_steps=10)
    found = bounds_of_run(run_dir)
    rows = {row.symbol: row.value for row in found.rows}
    assert rows["σ²"] == 0
    assert rows["L"] == 0.25
    assert [bound.source for bound in found.bounds] == ["Dhasade et al., theorem 2.1"]
    assert (found.bounds[0].values >= found.means).all()
    assert [reason.partition(":")[0] for reason in found.refusals] == [
        "001 theorem F.2",
        "Buttaci 2024, lemma B.2",
    ]
    assert "mu is 0" in found.refusals[1]


def changed(run_dir: Path, to: Path, **keys: str) -> Path:
    """Copy a run's folder and change its config.toml."""
    shutil.copytree(run_dir, to, ignore=shutil.ignore_patterns("bounds.png"))
    text = (to / "config.toml").read_text()
    for key, value in keys.items():
        name = key.replace("_", "-")
        text, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
        assert count == 1
    (to / "config.toml").write_text(text)
    return to


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"model": '"mlp"'}, "model = 'mlp': its loss isn't convex; logistic and perceptron are"),
        ({"momentum": "0.9"}, "momentum = 0.9: the theorems are about steps without"),
        ({"clip_norm": "1.0"}, "clip-norm = 1.0: a clipped gradient is biased"),
        ({"update_norm_bound": "1.0"}, "update-norm-bound = 1.0: a shortened update is biased"),
        ({"dp": '"local"'}, "dp = 'local': its clipping is biased"),
        ({"lr_schedule": '"cosine"'}, "lr-schedule = 'cosine': must be constant"),
        ({"participation": '"fixed:0,1"'}, "participation = 'fixed:0,1': all clients must take part"),
        ({"server_optimizer": '"adam"'}, "server-optimizer = 'adam': must be sgd"),
        ({"server_lr": "0.5"}, "server-lr = 0.5: must be 1, but for async-fedavg and fedfix"),
        ({"strategy": '"fedbuff"'}, "strategy = 'fedbuff': no theorem is about it"),
        ({"clock": '"wall"'}, "clock = 'wall': the run can't be repeated"),
        ({"safeguards": '"on"'}, "safeguards = 'on': a bounded update is biased"),
        ({"compression": '"topk:0.01"'}, "compression = 'topk:0.01': the theorems are about updates as they"),
        ({"augment": '"flip"'}, "augment = 'flip': images changed at random are other data"),
        ({"stragglers": "0.5"}, "stragglers = 0.5: all clients must do the same number of steps"),
        (
            {"participation": '"uniform"', "fraction_train": "0.5", "over_select": "0.5"},
            "participation = 'uniform': all clients must take part",
        ),
        ({"availability": '"bernoulli:0.5"'}, "availability = 'bernoulli:0.5': all clients must be there"),
        ({"task_failure": "0.1"}, "task-failure = 0.1: every client must take part as planned"),
        ({**ASYNC, "concurrency": "2"}, "concurrency = 2: all clients must be at work"),
        (
            {**ASYNC, "aggregation_weights": '"observed"'},
            "aggregation-weights = 'observed': must be time-based,",
        ),
        (
            {**ASYNC, "aggregation_weights": '"identical"'},
            "aggregation-weights = 'identical': must be time-based,",
        ),
        (
            {**ASYNC, "time_scenario": '"lognormal:1"'},
            "time-scenario = 'lognormal:1': the asynchronous terms are of",
        ),
        (
            {**ASYNC, "time_scenario": '"exponential"'},
            "time-scenario = 'exponential': the asynchronous terms are of",
        ),
        (
            {"local_steps": "0", "local_epochs": "1"},
            "local-epochs = 1 with batch-size = 16: the batches of an epoch",
        ),
        ({"l2": "0.0"}, "model = 'logistic': l2 = 0: without a regulariser"),
    ],
)
def test_what_breaks_an_assumption_is_named(
    run_once: RunOnce, tmp_path: Path, keys: dict[str, str], reason: str
) -> None:
    run_dir = changed(run_once(), tmp_path / "run", **keys)
    found = bounds_of_run(run_dir)
    assert found.refusals[0].startswith(reason)
    assert (found.bounds, found.rows) == ([], [])


def test_a_key_that_theory_does_not_know_of_is_named_where_it_is_read(
    run_once: RunOnce, tmp_path: Path
) -> None:
    kept = changed(run_once(), tmp_path / "kept", keep='"best"')
    assert bounds_of_run(kept).refusals == ["keep = 'best': the theorems are about runs with 'last'"]
    # FedAvg reads none of these.
    unread = {
        "concurrency": 2,
        "aggregation_weights": '"observed"',
        "norm_ratio_bound": 0.1,
    }
    found = bounds_of_run(run_once(**unread, safeguards='"off"'))
    assert found.refusals == []
    assert found.gaps == pytest.approx(bounds_of_run(run_once()).gaps)


def test_the_keys_that_theory_knows_of_are_keys() -> None:
    assert (ANY_VALUE | DEMANDS.keys()) <= set(RunConfig.key_names())
    assert not ANY_VALUE & DEMANDS.keys()


def test_a_trace_with_one_time_for_each_client_has_terms(run_once: RunOnce, tmp_path: Path) -> None:
    for name, last in (("fixed", 3), ("changing", 4)):
        rows = [*((client, client + 1) for client in range(CLIENTS)), (2, last)]
        text = "".join(f"{client},{seconds}\n" for client, seconds in rows)
        (tmp_path / f"{name}.csv").write_text(f"client,seconds\n{text}")
    run_dir = run_once(**ASYNC, time_scenario=f'"trace:{tmp_path / "fixed.csv"}"')
    # lcm(1, 2, 3, 4) = 12: 12 + 6 + 4 + 3.
    assert bounds_of_run(run_dir).terms["window"] == pytest.approx(24 / 12**0.5)
    other = changed(run_dir, tmp_path / "run", time_scenario=f'"trace:{tmp_path / "changing.csv"}"')
    assert bounds_of_run(other).refusals[0].startswith("time-scenario = 'trace:")
    (tmp_path / "changing.csv").unlink()
    with pytest.raises(ConfigError, match="time-scenario = "):
        bounds_of_run(other)


@pytest.mark.parametrize(
    "keys",
    [
        {"normalize": '"standardize"', "lr": 1e-5, "init": '"zeros"'},
        {"time_scenario": '"lognormal:1,1e9"', "task_work": '"flop"'},
        {"client_evaluation": "true", "fine_tune_epochs": 1, "test_on": '"own"', "batch_size": 0},
        {"strategy": '"spectral"', "message_epsilon": 1.0, "neighbours": 2, "data_imbalance": 1.0, "seed": 3},
    ],
)
def test_keys_that_may_have_any_value(run_once: RunOnce, keys: dict[str, object]) -> None:
    run_dir = run_once(**keys)
    found = bounds_of_run(run_dir)
    assert found.refusals == []
    for bound in found.bounds:
        assert (bound.values >= (found.means if bound.of_mean else found.gaps)).all()


def test_the_port_of_a_run_is_not_listened_on_again(run_once: RunOnce, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run_dir = changed(run_once(), tmp_path / "run", metrics_port=str(taken.getsockname()[1]))
        assert bounds_of_run(run_dir).refusals == []


def test_a_single_theorem_that_does_not_apply(run_once: RunOnce) -> None:
    found = bounds_of_run(run_once(lr=0.01, client_weights='"samples"'))
    assert [bound.source for bound in found.bounds] == ["Buttaci 2024, lemma B.2"]
    assert found.refusals[0].startswith(
        "Dhasade et al., theorem 2.1: all clients must count the same, but Σ p_i² = 0."
    )
    assert found.refusals[1].startswith("001 theorem F.2: all clients must count the same")
    found = bounds_of_run(run_once(lr=0.01))
    assert found.refusals[0].startswith("001 theorem F.2: step size 0.01 is outside (0, 1/(18LH) = 0.00")
    assert [bound.source for bound in found.bounds] == [
        "Dhasade et al., theorem 2.1",
        "Buttaci 2024, lemma B.2",
    ]


def test_the_command_prints_and_draws(run_once: RunOnce) -> None:
    run_dir, log = run_once(), logging.getLogger("flwr")
    level = log.level
    done = command(run_dir)
    assert done.exit_code == 0, done.output
    assert log.level == level
    for text in (
        "Dhasade et al., theorem 2.1",
        "001 theorem F.2",
        "Buttaci 2024, lemma B.2",
        "after 6 rounds",
        "Γ",
    ):
        assert text in done.output
    assert Image.open(run_dir / "bounds.png").width == 1200
    assert str(run_dir / "bounds.png") in done.output


def test_the_command_refuses_and_draws_none(run_once: RunOnce, tmp_path: Path) -> None:
    run_dir = changed(run_once(), tmp_path / "run", model='"mlp"', momentum="0.5")
    done = command(run_dir)
    assert done.exit_code == 0
    assert "doesn't apply: model = 'mlp'" in done.output
    assert "doesn't apply: momentum = 0.5" in done.output
    assert not (run_dir / "bounds.png").exists()


@pytest.mark.parametrize(
    "keys",
    [
        {"time_budget": 5.5},
        {**ASYNC, "time_budget": 2.5, "server_lr": 0.5},
        {"strategy": '"fedfix"', "time_budget": 5.5},
        # Where a task takes 2 s and more by its 32 examples, and would take 20 by those of its client.
        {"time_scenario": '"lognormal:0.1,16"', "time_budget": 9.5},
    ],
)
def test_a_run_that_its_time_budget_ends(run_once: RunOnce, keys: dict[str, object]) -> None:
    run_dir = run_once(**keys, num_server_rounds=40, eval_every=20)
    number = json.loads((run_dir / "summary.json").read_text())["aggregations"]
    assert 0 < number < 40
    assert number != 20
    done = []
    found = bounds_of_run(run_dir, lambda count, total: done.append((count, total)))
    assert len(found.gaps) == number + 1
    assert done[: number + 1] == [(n, 40) for n in range(number + 1)]


def test_a_run_that_ends_before_its_first_new_model_has_no_bounds(run_once: RunOnce) -> None:
    run_dir = run_once(time_budget=0.001)
    assert json.loads((run_dir / "summary.json").read_text())["aggregations"] == 0
    done = command(run_dir)
    assert done.exit_code == 0, done.output
    reason = "doesn't apply: aggregations = 0: the run ended before its first new model"
    assert done.output.strip() == reason


def test_what_is_no_repeatable_run_is_an_error(run_once: RunOnce, tmp_path: Path) -> None:
    done = command(tmp_path)
    assert done.exit_code == 1
    assert "is no run's folder, it has no config.toml" in done.output
    steep = changed(run_once(), tmp_path / "steep", lr="1e30")
    done = command(steep)
    assert done.exit_code == 1
    assert done.output.splitlines()[-1].startswith("error: ")
    assert "(lr)" in done.output
    other = changed(run_once(), tmp_path / "other", seed="5")
    with pytest.raises(ConfigError, match=r"repeating the run gives another model \(distance"):
        bounds_of_run(other)
    unfinished = changed(run_once(), tmp_path / "unfinished")
    summary = (unfinished / "summary.json").read_text()
    (unfinished / "summary.json").write_text(summary.replace('"finished"', '"interrupted"'))
    assert bounds_of_run(unfinished).refusals == ["status = 'interrupted': the run must be finished"]
    (unfinished / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="the run has no model yet"):
        bounds_of_run(unfinished)
