"""001's floors: losses and their constants, limits and levels against FedAvg itself, and the verdicts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from studies.reproduce import floor_report as study
from studies.reproduce.experiment import Results, collect, report_on
from studies.reproduce.floor import losses as floor_losses
from studies.reproduce.floor import measure as floor_measure
from studies.reproduce.floor.losses import LogisticLosses, Losses, PowerLosses, QuadraticLosses
from studies.reproduce.plan import Plan, read_plan
from studies.reproduce.report import Report
from studies.reproduce.runs import Runs
from studies.reproduce.store import FILE, read_stored, write_stored
from studies.theory.constants import AssumptionError

KINDS = ("quadratics", "logistic", "powers")


def some_losses(kind: str, num_clients: int = 3, num_parameters: int = 2) -> Losses:
    rng = np.random.default_rng(5)
    shape = num_clients, num_parameters
    matrices = floor_losses.curvatures(rng, *shape, 10.0, 0.7)
    points = floor_losses.optima(rng, shape, spread=1.0)
    if kind == "quadratics":
        return QuadraticLosses(matrices, points)
    if kind == "logistic":
        return LogisticLosses(floor_losses.labelled_rows(rng, 4 * matrices, points, 30), 0.1)
    return PowerLosses(4.0, np.array([1.0, 0.5, 0.2])[:num_clients], points, 6.0)


def averaged(losses: Losses, w: np.ndarray, rounds: int, lr: float, steps: int) -> np.ndarray:
    """FedAvg with whole gradients, step by step."""
    for _ in range(rounds):
        local = losses.at(w)
        for _ in range(steps):
            local = local - lr * losses.gradients(local)
        w = local.mean(axis=0)
    return w


# ---- Losses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_curvatures_are_those_of_the_values(kind: str) -> None:
    losses = some_losses(kind)
    w = np.random.default_rng(0).normal(size=losses.shape)
    hessians = losses.hessians(w)
    for d, step in enumerate(1e-5 * np.eye(2)):
        slopes = (losses.values(w + step) - losses.values(w - step)) / 2e-5
        np.testing.assert_allclose(losses.gradients(w)[:, d], slopes, atol=1e-8)
        changes = (losses.gradients(w + step) - losses.gradients(w - step)) / 2e-5
        np.testing.assert_allclose(hessians[:, :, d], changes, atol=1e-8)
    stacked = np.stack([w, 2 * w])
    np.testing.assert_allclose(losses.gradients(stacked)[1], losses.gradients(2 * w))
    np.testing.assert_allclose(losses.values(stacked)[1], losses.values(2 * w))


@pytest.mark.parametrize("kind", KINDS)
def test_the_papers_assumptions_hold_with_the_constants(kind: str) -> None:
    losses = some_losses(kind)
    rng = np.random.default_rng(1)
    for _ in range(50):
        w = losses.at(rng.uniform(-2, 2, 2))
        gaps = losses.values(w) - losses.lowest()
        squares = np.sum(losses.gradients(w) ** 2, axis=1)
        assert (gaps >= 0).all()
        assert (squares >= losses.mu * gaps**losses.exponent * (1 - 1e-9)).all()  # FL-2
        assert np.linalg.eigvalsh(losses.hessians(w)).max() <= losses.L * (1 + 1e-9)  # FL-1


@pytest.mark.parametrize("power", [3.0, 4.0, 6.0])
def test_the_exponent_of_powers_is_sharp(power: float) -> None:
    # f = ‖w‖^p/p at r: ‖∇f‖² = r^(2p−2), f^α = (r^p/p)^(2−2/p) = r^(2p−2)/p^α; μ = p^α leaves nothing over, at any r.
    losses = PowerLosses(power, np.ones(1), np.zeros((1, 1)), 1.0)
    assert losses.exponent == pytest.approx({3.0: 4 / 3, 4.0: 3 / 2, 6.0: 5 / 3}[power])
    for r in (0.01, 1.0):
        w = np.full((1, 1), r)
        assert np.sum(losses.gradients(w) ** 2) == pytest.approx(
            losses.mu * losses.values(w)[0] ** losses.exponent
        )


def test_the_drawn_problems_are_what_was_asked_for() -> None:
    rng = np.random.default_rng(2)
    alike, own = (floor_losses.curvatures(rng, 4, 3, 10.0, share) for share in (0.0, 1.0))
    assert np.ptp(alike, axis=0).max() == 0
    assert np.ptp(own, axis=0).max() > 0.01
    for matrices in (alike, own):
        eigenvalues = np.linalg.eigvalsh(matrices)
        assert 0.1 - 1e-12 <= eigenvalues.min() <= eigenvalues.max() <= 1 + 1e-12
    points = floor_losses.optima(rng, (5, 3), deviating=2)
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), [1, 1, 0, 0, 0])
    np.testing.assert_allclose(points[0], points[1])
    spread = floor_losses.optima(rng, (4000, 3), spread=2.0)
    assert np.mean(np.sum(spread**2, axis=1)) == pytest.approx(4, rel=0.1)


# ---- Without noise ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_limit_is_where_fedavg_ends(kind: str, steps: int) -> None:
    losses = some_losses(kind)
    # The L of powers is that far from their optima, and their curvature near them much smaller.
    best, lr = losses.minimiser(), (20 if kind == "powers" else 0.5) / losses.L
    end = floor_measure.limit(losses, lr, steps, best)
    ran = averaged(losses, np.zeros(2), 2000, lr, steps)
    np.testing.assert_allclose(end, ran, atol=1e-8)
    gap = losses.values(losses.at(end)).mean() - losses.values(losses.at(best)).mean()
    assert floor_measure.rise(losses, best, end) == pytest.approx(gap, abs=1e-12)
    assert (gap > 1e-7) == (steps > 1)  # one step has no drift


def test_a_floor_by_hand() -> None:
    # f_1 = ½(w−1)², f_2 = ¼(w+1)², η = ½, H = 2. Locally w → c + (1−ηa)²(w−c): ¼(w−1) + 1 and 9/16 (w+1) − 1, whose
    # mean is w for w = ½(13/16 w + 5/16): w = 5/19. F' = ½[(w−1) + ½(w+1)] = 0 at w = 1/3.
    losses = QuadraticLosses(np.array([[[1.0]], [[0.5]]]), np.array([[1.0], [-1.0]]))
    best = losses.minimiser()
    assert best == pytest.approx([1 / 3])
    end = floor_measure.limit(losses, 0.5, 2, best)
    assert end == pytest.approx([5 / 19])
    lr = 1 / 36
    found = floor_measure.floor(losses, best, lr, 2)
    at = floor_measure.limit(losses, lr, 2, best)[0]
    assert found["gap"] == pytest.approx((2 * (at - 1) ** 2 + (at + 1) ** 2) / 8)
    assert found["drift"] == pytest.approx(0.375 * (at - 1 / 3) ** 2)  # F'' = ¾
    zeta2 = ((at - 1) - (at + 1) / 2) ** 2 / 4
    assert found["zeta2"] == pytest.approx(zeta2)
    assert found["bound"] == pytest.approx(8 * zeta2 / 1.0)  # μ = 2 · ½


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_a_limit_that_is_not_there_says_so() -> None:
    with pytest.raises(AssumptionError, match="no fixed point of a round found"):
        # Steps of 3/L throw the clients further and further off.
        floor_measure.limit(some_losses("powers"), 3.0, 20, np.full(2, 50.0))


# ---- With noise -------------------------------------------------------------------------------------------------


def test_the_level_on_quadratics_by_hand_and_by_fedavg() -> None:
    # One client, one step: variance s = (1 − ηa)² s + η²σ², level ½ a s.
    one = QuadraticLosses(np.array([[[0.5]]]), np.zeros((1, 1)))
    expected = 0.5 / 2 * 0.01 * 2.0 / (1 - 0.95**2)
    assert floor_measure.quadratic_level(one, 0.1, 1, 2.0) == pytest.approx(expected)
    losses, lr, steps, chains = some_losses("quadratics"), 0.2, 3, 4000
    rng = np.random.default_rng(3)
    end = floor_measure.limit(losses, lr, steps, losses.minimiser())
    w = np.broadcast_to(end, (chains, 2))
    for _ in range(100):
        local = losses.at(w)
        for _ in range(steps):
            local = local - lr * (losses.gradients(local) + rng.normal(size=local.shape) / 2**0.5)
        w = local.mean(axis=1)
    rises = losses.values(losses.at(w)).mean(axis=1) - losses.values(losses.at(end)).mean()
    error = rises.std() / chains**0.5
    assert abs(rises.mean() - floor_measure.quadratic_level(losses, lr, steps, 1.0)) < 4 * error


def test_the_sampled_level_is_fedavgs() -> None:
    small, large = some_losses("logistic", 2), some_losses("logistic", 5)
    assert isinstance(small, LogisticLosses)
    assert isinstance(large, LogisticLosses)
    lr, steps = 0.1, 2
    limits = [floor_measure.limit(losses, lr, steps, losses.minimiser()) for losses in (small, large)]
    ours = floor_measure.sampled_level(
        [small, large], limits, lr, steps, (60, 300), 200, np.random.default_rng(4)
    )
    for losses, end, level in zip((small, large), limits, ours, strict=True):
        rng, rises, w = np.random.default_rng(6), [], np.tile(end, (400, 1))
        for now in range(200):
            local = [w.copy() for _ in losses.signed]
            for rows, own in zip(losses.signed, local, strict=True):
                for _ in range(steps):
                    z = rows[rng.integers(len(rows), size=len(own))]
                    own -= lr * (0.1 * own - z / (1 + np.exp(np.sum(z * own, axis=1)))[:, None])
            w = np.mean(local, axis=0)
            if now >= 60:
                rises.append(losses.values(losses.at(w)).mean() - losses.values(losses.at(end)).mean())
        assert level == pytest.approx(np.mean(rises), rel=0.05)


def test_row_variance_is_that_of_all_rows() -> None:
    losses = some_losses("logistic", 2)
    assert isinstance(losses, LogisticLosses)
    w = np.array([0.3, -0.2])
    exact = losses.gradients(losses.at(w))
    rows = [
        np.array([LogisticLosses(z[None, None], 0.1).gradients(w[None])[0] for z in client])
        for client in losses.signed
    ]
    expected = max(np.mean(np.sum((own - f) ** 2, axis=1)) for own, f in zip(rows, exact, strict=True))
    assert losses.row_variance(w) == pytest.approx(expected)


def test_the_level_of_powers_obeys_the_virial_theorem() -> None:
    # Small steps: a Langevin equation of temperature T = ησ²/(2DC); E[w·∇f] = DT and w·∇f = p f: E f = ησ²/(2pC).
    settings = {
        "noise-clients": [1, 4],
        "power-parameters": 2,
        "sigma2": 1.0,
        "power-chains": 200,
        "power-burn-in": 2000,
        "power-steps": 6000,
    }
    found = floor_measure.power_level(settings, 4.0, seed=0)
    lr = 1 / (18 * 3)
    np.testing.assert_allclose(found, [lr / 8, lr / 32], rtol=0.1)
    with pytest.raises(AssumptionError, match=r"a model came to .* L is that up to 1"):
        floor_measure.power_level({**settings, "sigma2": 400.0}, 4.0, seed=0)


# ---- The report -------------------------------------------------------------------------------------------------


@pytest.fixture
def plan() -> Plan:
    """The experiment as it ships, with fewer of everything and two seeds."""
    full = read_plan("001-floor")
    smaller = {"seeds": [0, 1], "noise-clients": [1, 16, 64], "own-curvature": [0.5], "powers": [4.0]}
    return full.model_copy(update={"settings": {**full.settings, **smaller}})


Make = Callable[..., dict[str, Any]]


@pytest.fixture
def numbers(plan: Plan) -> Make:
    """Numbers that go exactly with these powers of ζ² and C; 2 % of the bound."""

    def make(
        gap: float = 1.0,
        drift: float = 1.0,
        noise: float = -1.0,
        powers: tuple[float, float] = (2 / 3, -2 / 3),
        share: float = 0.02,
        scatter: float = 0.0,
    ) -> dict[str, Any]:
        settings = plan.settings
        problems, steps = len(settings["spreads"]) + len(settings["deviating"]), len(settings["local-steps"])
        clients = np.array(settings["noise-clients"], dtype=float)
        zeta2 = np.broadcast_to(np.geomspace(0.1, 10, problems)[:, None], (steps, 1, problems, 2))
        by_step = np.exp(scatter * np.arange(steps))[:, None, None, None]
        floors = {
            "zeta2": zeta2,
            "gap": by_step * zeta2**gap,
            "drift": 0.01 * by_step * zeta2**drift,
            "bound": by_step * zeta2**gap / share,
        }
        level = np.broadcast_to(clients[:, None] ** noise, (steps, 3, 2))
        noisy = {"level": level, "bound": level / share}
        power = {
            "zeta2": zeta2[:, 0],
            "gap": zeta2[:, 0] ** powers[0],
            "bound": zeta2[:, 0] ** powers[0] / share,
        }
        power_level = np.broadcast_to(clients[:, None] ** powers[1], (3, 2))
        kinds = dict.fromkeys(("quadratics", "logistic"))

        def listed(tables: dict[str, np.ndarray]) -> dict[str, Any]:
            return {name: table.tolist() for name, table in tables.items()}

        return {
            "floors": {kind: {step: listed(floors) for step in ("theorem", "fixed")} for kind in kinds},
            "noise": {kind: {step: listed(noisy) for step in ("theorem", "fixed")} for kind in kinds},
            "power-floors": {"4": listed(power)},
            "power-noise": {"4": listed({"level": power_level, "bound": power_level / share})},
        }

    return make


def reported(numbers: dict[str, Any], plan: Plan, folder: Path) -> Report:
    return study.report(Results([], Runs([]), numbers, {}, {}), plan, folder)


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({}, ""),
        ({"gap": 1.2}, "001-1-heterogeneity"),
        ({"drift": 0.8}, "001-1-local-steps"),
        ({"noise": -0.8}, "001-1-variance"),
        ({"powers": (0.85, -2 / 3)}, "001-1-lojasiewicz"),
        ({"powers": (2 / 3, -0.85)}, "001-1-lojasiewicz"),
        # The exponents are right, but H moves the floor as much as ζ² does; or the bound is broken.
        ({"scatter": 1.0}, "001-1-heterogeneity 001-1-local-steps"),
        ({"share": 1.01}, "001-1-heterogeneity 001-1-variance 001-1-lojasiewicz 001-1-bounds"),
    ],
)
def test_each_verdict_falls_with_what_it_is_about(
    numbers: Make, plan: Plan, tmp_path: Path, change: dict[str, Any], fails: str
) -> None:
    found = reported(numbers(**change), plan, tmp_path)
    assert {v.claim for v in found.verdicts} == set(plan.claims)
    assert [v.claim for v in found.verdicts if v.outcome == "doesn't hold"] == fails.split()
    assert {v.outcome for v in found.verdicts} <= {"holds", "doesn't hold"}


def test_a_floor_that_stops_falling_at_many_clients_fails(numbers: Make, plan: Plan, tmp_path: Path) -> None:
    made = numbers()
    for step in ("theorem", "fixed"):  # from 16 to 64 clients as 1/C^0.8; over all C still within the band
        level = np.array(made["noise"]["logistic"][step]["level"])
        level[:, 2] *= 4**0.2
        made["noise"]["logistic"][step]["level"] = level.tolist()
    verdicts = {v.claim: v for v in reported(made, plan, tmp_path).verdicts}
    assert verdicts["001-1-variance"].outcome == "doesn't hold"
    assert (
        "logistic: C to the power -0.94 to -0.94, for C ≥ 16 -0.80 to -0.80"
        in verdicts["001-1-variance"].evidence
    )


def test_floors_of_other_settings_are_measured_anew_and_never_reported(
    numbers: Make, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(settings: Any) -> dict[str, Any]:
        asked.append(settings["condition"])
        return numbers()

    asked: list[float] = []
    monkeypatch.setattr(floor_measure, "measure", measured)
    other = plan.model_copy(update={"settings": {**plan.settings, "condition": 1000.0}})
    for each in (plan, plan, other, other):
        assert collect(each, tmp_path) == []
    assert asked == [10.0, 1000.0]
    assert "**holds**" in report_on(other, tmp_path).read_text()
    text = report_on(plan, tmp_path).read_text()
    assert "**holds**" not in text
    assert "Not there: floors: was measured from other settings" in text

    stored = read_stored(tmp_path / FILE)
    write_stored(tmp_path / FILE, replace(stored, sources={}))  # as it was before sources were kept
    (remark,) = collect(plan, tmp_path)
    assert "doesn't say from which settings these are; taken as they are: floors; noise; power" in remark
    assert read_stored(tmp_path / FILE).sources == {}
    assert len(asked) == 2


def test_the_study_as_a_whole(plan: Plan, tmp_path: Path) -> None:
    tiny = {
        "local-steps": [1, 2, 4],
        "clients": 8,
        "parameters": 3,
        "rows": 40,
        "chains": 2,
        "burn-in": 0.05,
        "measured": 0.05,
        "power-chains": 8,
        "power-burn-in": 100,
        "power-steps": 300,
        "deviating": [1, 2, 4],
    }
    plan = plan.model_copy(update={"settings": {**plan.settings, **tiny}})
    numbers = study.measure(plan, Runs([]), {}, "")
    assert study.measure(plan, Runs([]), {}, "") == numbers
    assert numbers.keys() == set(floor_measure.PARTS)
    assert np.shape(numbers["floors"]["logistic"]["fixed"]["drift"]) == (3, 1, 9, 2)
    assert np.shape(numbers["noise"]["quadratics"]["theorem"]["level"]) == (3, 3, 2)
    found = reported(numbers, plan, tmp_path)
    rows = {row.quantity: row for row in found.rows}
    first = "F − min F with H = 4 over that with H = 2; published: (H−1)²η²"
    for kind in ("quadratics", "logistic"):
        assert rows[f"{kind}, one η: {first}"].published == pytest.approx(9)
        assert rows[f"{kind}, one η: {first}"].mean == pytest.approx(9, rel=0.1)
        assert rows[f"{kind}, η = 1/(18LH): {first}"].mean == pytest.approx(2.25, rel=0.1)
    # All of F scales with the distance of the optima.
    spread = rows["quadratics, one η: slope of ln(F − min F) against ln ζ², by spread"]
    assert spread.ours == pytest.approx([1, 1], abs=1e-4)
    with Image.open(found.figures[0]) as image:
        assert image.width == 1200
