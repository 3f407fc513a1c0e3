"""A finished run beside the bounds that apply to it, the constants used, and why other bounds don't apply."""

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedapp import server
from fedapp.config import ConfigError, RunConfig, Value
from fedapp.data import Dataset, Normalize
from fedapp.models import PERCEPTRON_SLOPE
from fedapp.server import Experiment
from strategies.clients import graph
from strategies.methods.fedfix import contribution_periods, interval_of
from strategies.timing.time_scenario import TimeScenario
from studies.theory import asynchronous, convex, estimates, lojasiewicz, perturbed
from studies.theory.constants import Array, AssumptionError, Constants
from studies.theory.obstacles import ASYNCHRONOUS, failures, obstacles, uneven_work
from studies.theory.problems import ClientData, FrozenSlope, Logistic
from studies.theory.replay import Replay, replay

# The gradient noise is measured at up to this many of the run's models, evenly spaced.
_NOISE_MODELS = 20


@dataclass(frozen=True)
class BoundCurve:
    """An upper bound on f(w̄_t) − f*, or on its mean so far (``of_mean``), after each of ``rounds``.

    The mean that theorem 2.1 bounds is over all local steps; the run's mean beside it is over the ends of rounds.
    """

    name: str
    source: str
    rounds: Array
    values: Array
    of_mean: bool = False


@dataclass(frozen=True)
class ConstantRow:
    """A constant: its symbol, its value, and how it was found."""

    symbol: str
    value: float
    origin: str


@dataclass(frozen=True)
class RunBounds:
    """The bounds that apply to a run, or why none does.

    Attributes
    ----------
    refusals : list of str
        One reason for each theorem that doesn't apply, or the reasons why none does.
    rows : list of ConstantRow
        The constants used; none where no bound applies.
    gaps : array (T + 1,)
        f(w̄_t) − f*, by aggregation; empty where no bound applies.
    bounds : list of BoundCurve
    terms : dict of str to float
        Terms of an asynchronous bound at the last aggregation: arguments of O(·), which aren't drawn.
    """

    refusals: list[str]
    rows: list[ConstantRow] = field(default_factory=list)
    gaps: Array = field(default_factory=lambda: np.empty(0))
    bounds: list[BoundCurve] = field(default_factory=list)
    terms: dict[str, float] = field(default_factory=dict)

    @property
    def means(self) -> Array:
        """Mean of the gaps after rounds 1 to t, shape (T,)."""
        return np.cumsum(self.gaps[1:]) / np.arange(1, len(self.gaps))


def bounds_of_run(run_dir: Path, note: Callable[[int, int], None] = lambda done, total: None) -> RunBounds:
    """Work out which bounds apply to a finished run, and their values.

    Parameters
    ----------
    run_dir : Path
        A run's folder; its dataset must still be where it was.
    note : callable
        Called with the number of aggregations done and the number of all, while the run is repeated.

    Raises
    ------
    ConfigError, DataError
        If the folder holds no finished run, or the run can't be repeated.
    """
    config, num_clients = _read_config(run_dir)
    if found := obstacles(config, num_clients) + failures(run_dir):
        return RunBounds(found)
    experiment = server.prepare(config, num_clients)
    config = experiment.config  # with the values that the strategy sets, which config.toml may lack
    sizes = experiment.partition.sizes
    if found := uneven_work(config, sizes):
        return RunBounds(found)
    weights = _weights(config, sizes, run_dir)
    problem = _problem(experiment, weights)
    try:
        lowest = problem.value(problem.minimiser())
        problem.minimisers()
    except AssumptionError as error:
        return RunBounds([f"model = {config.model!r}: {error}"])
    total = config.num_server_rounds
    run = replay(experiment, problem, run_dir, lambda done: note(done, total))
    constants = _constants(problem, run, config)
    gaps = np.array([problem.value(w) for w in run.models]) - lowest
    refusals, bounds, terms = [], [], {}
    if config.strategy in ASYNCHRONOUS:
        refusals.append(
            "Fraboni et al. 2023, eqs. 38, 42: O(·) without constants, so their terms are listed and no bound is "
            "drawn"
        )
        try:
            terms = _terms(problem, config, constants, len(gaps) - 1)
        except AssumptionError as error:
            refusals.append(str(error))
    else:
        for candidate in _candidates(config, constants, np.arange(len(gaps), dtype=np.float64)):
            try:
                bounds.append(candidate())
            except AssumptionError as error:
                refusals.append(str(error))
    return RunBounds(refusals, _rows(constants, run, config), gaps, bounds, terms)


# ---- Does theory apply? ----------------------------------------------------------------------------------------


def _read_config(run_dir: Path) -> tuple[RunConfig, int]:
    path = run_dir / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{run_dir}: is no run's folder, it has no config.toml")
    values = tomllib.loads(path.read_text("utf-8"))
    if not (run_dir / "model.safetensors").is_file():
        raise ConfigError(f"{run_dir}: the run has no model yet")
    values.pop("versions", None)
    num_clients = values.pop("num-clients")
    # The result doesn't depend on the device; the repeated run has no tracker and no port.
    here: dict[str, Value] = {
        "server-device": "auto",
        "client-device": "cpu",
        "tracker": "none",
        "metrics-port": 0,
    }
    return RunConfig.load({**values, **here}), num_clients


def _local_steps(config: RunConfig) -> int:
    """E, the same for all clients: ``uneven_work`` refuses epochs of more than one step."""
    return config.local_steps or config.local_epochs


def _step_size(config: RunConfig) -> float:
    """γ of a local step."""
    return config.lr / _local_steps(config) if config.normalize_steps else config.lr


# ---- Constants -------------------------------------------------------------------------------------------------


def _weights(config: RunConfig, sizes: np.ndarray, run_dir: Path) -> Array:
    """p_i, as the run had them."""
    if config.client_weights == "adjacency":
        with np.load(run_dir / "graph.npz") as stored:
            return graph.client_weights(stored["adjacency"])
    shares = sizes.astype(np.float64) if config.client_weights == "samples" else np.ones(len(sizes))
    weights: Array = shares / shares.sum()
    return weights


def _problem(experiment: Experiment, weights: Array) -> Logistic | FrozenSlope:
    config, dataset = experiment.config, experiment.dataset
    clients = [
        client_data(dataset, experiment.partition.client(i), config.normalize)
        for i in range(experiment.num_clients)
    ]
    if config.model == "perceptron":
        return FrozenSlope(clients, PERCEPTRON_SLOPE, config.l2, weights)
    return Logistic(clients, dataset.num_classes, config.l2, weights)


def client_data(dataset: Dataset, rows: np.ndarray, normalize: Normalize) -> ClientData:
    """Return rows of a dataset as the models see them, in float64."""
    inputs = np.asarray(dataset.inputs(rows, normalize), dtype=np.float64)
    return ClientData(inputs.reshape(len(rows), -1), np.asarray(dataset.y[rows]).astype(np.int64))


def _constants(problem: Logistic | FrozenSlope, run: Replay, config: RunConfig) -> Constants:
    some = np.unique(np.linspace(0, len(run.models) - 1, _NOISE_MODELS).astype(int))
    sigma2 = max(float(problem.sampling_variances(w, config.batch_size).max()) for w in run.models[some])
    return estimates.constants(problem, run.models, sigma2=sigma2, G2=run.gradient2 + sigma2)


def _rows(c: Constants, run: Replay, config: RunConfig) -> list[ConstantRow]:
    measured = "largest over the run's models"
    whole = config.batch_size == 0
    rows = [
        ConstantRow("C", c.num_clients, "clients"),
        ConstantRow("L", c.L, "holds everywhere, from the data"),
        ConstantRow("μ", c.mu, "l2"),
        ConstantRow(
            "σ²",
            c.sigma2,
            "0: whole-data gradients" if whole else f"exact for batches of {config.batch_size}, {measured}",
        ),
        ConstantRow("ζ²", c.zeta2, f"max over clients, {measured}"),
        ConstantRow("ζ² (mean)", c.mean_zeta2, f"mean over clients, {measured}"),
        ConstantRow("G²", c.G2, "largest at the ends of every local task, plus σ²"),
        ConstantRow("Γ", c.Gamma, "minima by Newton's method"),
        ConstantRow("Δ", c.Delta, "f(w̄₀) − f*"),
        ConstantRow("D²", c.distance2, "‖w̄₀ − w*‖²"),
        ConstantRow("S", c.S, "Σ p_i²"),
        ConstantRow("drift²", run.drift2, "largest ‖w_i − w̄_t‖² of a local task"),
    ]
    return [row for row in rows if math.isfinite(row.value)]


# ---- Bounds ----------------------------------------------------------------------------------------------------


def _candidates(config: RunConfig, c: Constants, rounds: Array) -> list[Callable[[], BoundCurve]]:
    lr, E = _step_size(config), _local_steps(config)

    def of_000() -> BoundCurve:
        _check_even("Dhasade et al., theorem 2.1", c)
        values = convex.convex_bound(rounds[1:], c, lr=lr, local_steps=E)
        return BoundCurve(
            "convex, of the mean so far", "Dhasade et al., theorem 2.1", rounds[1:], values, of_mean=True
        )

    def of_001() -> BoundCurve:
        _check_even("001 theorem F.2", c)
        # The theorem's F* lies Γ below f*.
        values = lojasiewicz.pl_bound(rounds, c, mu=2 * c.mu, lr=lr, local_steps=E) - c.Gamma
        return BoundCurve("Polyak-Łojasiewicz", "001 theorem F.2", rounds, values)

    def of_fedprox() -> BoundCurve:
        alpha = config.proximal_mu if config.strategy == "fedprox" else 0.0
        values = perturbed.fedprox_bound(rounds, c, lr=lr, local_steps=E, alpha=alpha)
        return BoundCurve("strongly convex", "Buttaci 2024, lemma B.2", rounds, values)

    def of_spectral() -> BoundCurve:
        values = perturbed.spectral_bound(rounds, c, lr=lr, local_steps=E, beta=config.perturbation_beta)
        return BoundCurve("strongly convex, perturbed", "Buttaci 2024, lemma C.2", rounds, values)

    if config.strategy == "spectral":
        return [of_spectral]
    return [of_fedprox] if config.strategy == "fedprox" else [of_000, of_001, of_fedprox]


def _check_even(theorem: str, c: Constants) -> None:
    if c.S * c.num_clients > 1 + 1e-9:
        raise AssumptionError(
            f"{theorem}: all clients must count the same, but Σ p_i² = {c.S:.4g} isn't 1/C = "
            f"{1 / c.num_clients:.4g}; with client-weights = 'uniform' they do"
        )


def _terms(
    problem: Logistic | FrozenSlope, config: RunConfig, c: Constants, aggregations: int
) -> dict[str, float]:
    _check_even("Fraboni et al. 2023, eqs. 38, 42", c)
    best = problem.minimiser()
    squares = np.sum(problem.gradients(best) ** 2, axis=1) + problem.sampling_variances(
        best, config.batch_size
    )
    times = TimeScenario(config.time_scenario, problem.num_clients, config.seed).means
    noise, steps = float(squares.mean()), _local_steps(config)
    if config.strategy == "fedfix":
        counts = contribution_periods(times, interval_of(config.fedfix_interval, times)).astype(int).tolist()
        terms = asynchronous.fedfix_terms(
            aggregations,
            c,
            local_steps=steps,
            noise=noise,
            residual=c.Gamma,
            periods=max(counts),
            window=asynchronous.fedfix_window(counts),
        )
    else:
        terms = asynchronous.asynchronous_terms(
            aggregations,
            c,
            local_steps=steps,
            noise=noise,
            residual=c.Gamma,
            spread=float(times.max() / times.min()),
            window=asynchronous.asynchronous_window(times.tolist()),
        )
    return {name: float(value) for name, value in vars(terms).items()}
