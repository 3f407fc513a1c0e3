"""FedAvg's error after many rounds, its floor: does it follow theorems F.2 and F.4 of 001?

Theorem F.2 bounds the floor E F(θ_R) − F*, F* the mean of the clients' minima, by 8ζ²/μ, because clients differ, plus
16ηLσ²/(Cμ) + 12η²(H−1)L²σ²/μ, because gradients are noisy. `floor.measure` measures both parts on losses whose
curvatures differ between clients; this module fits exponents and judges the claims.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from fedapp.report.figures import TEST, TRAIN, new_figure, save, style_axes
from fedapp.report.method_styles import COLORS
from studies.reproduce.experiment import Numbers, Results, digest
from studies.reproduce.floor import measure as floor_measure
from studies.reproduce.floor.measure import KINDS, PARTS, STEPS
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge
from studies.reproduce.runs import Runs
from studies.theory.constants import Array

WAYS = ("spread", "number deviating")
GAPS = {"gap": "F − F*", "drift": "F − min F"}
STEP_NAMES = {"theorem": "η = 1/(18LH)", "fixed": "one η"}


def measure(plan: Plan, runs: Runs, known: Numbers, data_path: str) -> Numbers:
    """Measure the floors (``floor.measure.measure``), unless they are known. No data are read."""
    return known if known.keys() == set(PARTS) else floor_measure.measure(plan.settings)


def sources(plan: Plan, runs: Runs) -> dict[str, str]:
    """Every number is measured from the settings."""
    return dict.fromkeys(PARTS, digest(plan.settings))


def report(results: Results, plan: Plan, folder: Path) -> Report:
    """Judge each part of claim 001-1 by the exponents of the floors."""
    found = Findings(results.numbers, plan)
    report = Report()
    report.figures.append(_draw(folder, found))
    report.rows += [*_floor_rows(found), *_noise_rows(found), *_power_rows(found)]
    report.verdicts += [
        _heterogeneity(found, plan),
        _local_steps(found, plan),
        _variance(found, plan),
        _lojasiewicz(found, plan),
        _bounds(found),
    ]
    report.notes += _notes(found)
    return report


@dataclass(frozen=True)
class Findings:
    """The numbers of ``floor.measure.measure`` as arrays, and the settings of their axes."""

    numbers: Numbers
    plan: Plan

    @property
    def local_steps(self) -> list[int]:
        """Every H."""
        steps: list[int] = self.plan.setting("local-steps")
        return steps

    @property
    def clients(self) -> Array:
        """Numbers of clients with noise."""
        return np.array(self.plan.setting("noise-clients"), dtype=np.float64)

    @property
    def powers(self) -> list[str]:
        """Every p, as a key of the numbers."""
        return list(self.numbers["power-floors"])

    def floors(self, kind: str, step: str, column: str, *, least: int = 1) -> Array:
        """Return a column for H ≥ ``least``, (H, own curvature, problem, seed)."""
        return np.array(self.numbers["floors"][kind][step][column])[np.array(self.local_steps) >= least]

    def power_floors(self, power: str, column: str) -> Array:
        """Return a column, (H, problem, seed)."""
        return np.array(self.numbers["power-floors"][power][column])

    def noise(self, kind: str, step: str, column: str) -> Array:
        """Return a column, (H, C, seed)."""
        return np.array(self.numbers["noise"][kind][step][column])

    def power_noise(self, power: str, column: str) -> Array:
        """Return a column, (C, seed)."""
        return np.array(self.numbers["power-noise"][power][column])

    def slopes(self, kind: str, step: str, column: str, way: str) -> Array:
        """Slopes of ln floor against ln ζ² over the problems of one of `WAYS`, (H, own curvature, seed).

        For F − min F, H = 1 is left out: the floor is 0.
        """
        least = 2 if column == "drift" else 1
        x, y = (self._of_way(self.floors(kind, step, name, least=least), way) for name in ("zeta2", column))
        return slope(x, y, axis=2)

    def power_slopes(self, power: str, way: str) -> Array:
        """Slopes of ln(F_∞ − F*) against ln ζ², (H, seed)."""
        x, y = (self._of_way(self.power_floors(power, name), way) for name in ("zeta2", "gap"))
        return slope(x, y, axis=1)

    def noise_slopes(self, kind: str, step: str, least: int = 1) -> Array:
        """Slopes of ln level against ln C over C ≥ ``least``, (H, seed)."""
        return client_slope(self.clients, self.noise(kind, step, "level"), least, axis=1)

    def explained(self, kind: str, step: str, column: str) -> float:
        """R² of the regression of ln floor on ln ζ², over all problems and H."""
        least = 2 if column == "drift" else 1
        x, y = (np.log(self.floors(kind, step, name, least=least)).ravel() for name in ("zeta2", column))
        return float(np.corrcoef(x, y)[0, 1] ** 2)

    def _of_way(self, table: Array, way: str) -> Array:
        """Return the problems (the last axis but one) of one of `WAYS`."""
        first = len(self.plan.setting("spreads"))
        return table[..., :first, :] if way == WAYS[0] else table[..., first:, :]


def slope(x: Array, y: Array, axis: int) -> Array:
    """Slope of ln y against ln x along an axis, by least squares; NaN for fewer than two points."""
    if x.shape[axis] < 2:
        return np.full(np.delete(x.shape, axis), np.nan)
    a, b = (np.log(v) - np.log(v).mean(axis=axis, keepdims=True) for v in (x, y))
    found: Array = (a * b).sum(axis=axis) / (a * a).sum(axis=axis)
    return found


def client_slope(clients: Array, level: Array, least: int, axis: int) -> Array:
    """Slope of ln level against ln C along an axis, over C ≥ ``least``."""
    kept = np.compress(clients >= least, level, axis=axis)
    shape = [-1 if at == axis else 1 for at in range(level.ndim)]
    return slope(np.broadcast_to(clients[clients >= least].reshape(shape), kept.shape), kept, axis)


# ---- Verdicts --------------------------------------------------------------------------------------------------


def _cases() -> Iterator[tuple[str, str]]:
    yield from ((kind, step) for kind in KINDS for step in STEPS)


def _near(slopes: Sequence[Array], target: float, band: float) -> bool:
    """Tell whether every mean over seeds (the last axis) is within the band; a NaN isn't."""
    return all(bool((np.abs(each.mean(axis=-1) - target) <= band).all()) for each in slopes)


def _range(slopes: Sequence[Array]) -> str:
    means = np.concatenate([each.mean(axis=-1).ravel() for each in slopes])
    return f"{means.min():.2f} to {means.max():.2f}"


def _against_zeta2(found: Findings, column: str) -> tuple[dict[str, list[Array]], list[float]]:
    """Return the slopes by each of `WAYS`, and R² of each case (`Findings.explained`)."""
    slopes = {way: [found.slopes(kind, step, column, way) for kind, step in _cases()] for way in WAYS}
    return slopes, [found.explained(kind, step, column) for kind, step in _cases()]


def _set_by_zeta2(found: Findings, plan: Plan, claim: str, column: str) -> tuple[bool, str]:
    slopes, shares = _against_zeta2(found, column)
    near = _near([each for way in WAYS for each in slopes[way]], 1, plan.threshold(claim, "band"))
    listed = "; ".join(f"by {way} {_range(slopes[way])}" for way in WAYS)
    evidence = (
        f"{GAPS[column]} goes as ζ² to the power (means over seeds, all losses, step sizes and H) {listed}; "
        f"ln ζ² explains {min(shares):.2f} to {max(shares):.2f} of its variance"
    )
    return near and min(shares) >= plan.threshold(claim, "explained"), evidence


def _tightest(found: Findings) -> float:
    """Largest floor / bound."""
    return max(float((found.floors(*case, "gap") / found.floors(*case, "bound")).max()) for case in _cases())


def _tightest_noise(found: Findings) -> float:
    """Largest noise floor / bound."""
    return max(float((found.noise(*case, "level") / found.noise(*case, "bound")).max()) for case in _cases())


def _tightest_power(found: Findings, power: str) -> float:
    """Largest floor / bound of a loss with α > 1: with clients that differ, or with noise."""
    return max(_largest(found.power_floors, power, "gap"), _largest(found.power_noise, power, "level"))


def _largest(table: Callable[[str, str], Array], power: str, column: str) -> float:
    return float((table(power, column) / table(power, "bound")).max())


def _tightest_of_powers(found: Findings, steps: slice) -> float:
    """Largest floor / bound of losses with α > 1 and clients that differ, over a slice of the H."""
    floors = {
        power: (found.power_floors(power, "gap"), found.power_floors(power, "bound"))
        for power in found.powers
    }
    return max(float((gap[steps] / bound[steps]).max(initial=0.0)) for gap, bound in floors.values())


def _heterogeneity(found: Findings, plan: Plan) -> Verdict:
    claim = "001-1-heterogeneity"
    holds, evidence = _set_by_zeta2(found, plan, claim, "gap")
    tightest = _tightest(found)
    return judge(
        claim, holds and tightest <= 1, f"{evidence}; the largest floor is {tightest:.3f} of its bound"
    )


def _local_steps(found: Findings, plan: Plan) -> Verdict:
    claim = "001-1-local-steps"
    holds, evidence = _set_by_zeta2(found, plan, claim, "drift")
    return judge(claim, holds, evidence)


def _variance(found: Findings, plan: Plan) -> Verdict:
    claim = "001-1-variance"
    band, many = plan.threshold(claim, "band"), plan.threshold(claim, "many")
    by_kind = {kind: [found.noise_slopes(kind, step) for step in STEPS] for kind in KINDS}
    at_many = {kind: [found.noise_slopes(kind, step, many) for step in STEPS] for kind in KINDS}
    slopes = [each for group in (by_kind, at_many) for kind in KINDS for each in group[kind]]
    tightest = _tightest_noise(found)
    listed = "; ".join(
        f"{kind}: C to the power {_range(by_kind[kind])}, for C ≥ {many} {_range(at_many[kind])}"
        for kind in KINDS
    )
    evidence = (
        f"{listed} (means over seeds, by step size and H); the largest floor is {tightest:.3f} of its bound"
    )
    return judge(claim, _near(slopes, -1, band) and tightest <= 1, evidence)


def _lojasiewicz(found: Findings, plan: Plan) -> Verdict:
    claim = "001-1-lojasiewicz"
    band, holds, evidence = plan.threshold(claim, "band"), True, []
    for power in found.powers:
        exponent = _exponent(power)
        slopes = {way: [found.power_slopes(power, way)] for way in WAYS}
        noise = _power_noise_slope(found, power)
        tightest = _tightest_power(found, power)
        holds &= _near([each for way in WAYS for each in slopes[way]], 1 / exponent, band)
        holds &= _near([noise], -1 / exponent, band) and tightest <= 1
        listed = ", ".join(f"{_range(slopes[way])} by {way}" for way in WAYS)
        evidence.append(
            f"α = {exponent:.2f}, 1/α = {1 / exponent:.2f}: F − F* goes as ζ² to the power {listed}; the noise "
            f"floor as C to the power {noise.mean():.2f}; at most {tightest:.3f} of the bound"
        )
    return judge(claim, holds, ". ".join(evidence))


def _bounds(found: Findings) -> Verdict:
    """Judge theorems F.2 and F.4 themselves: no floor is above its bound."""
    tightest = {
        "clients that differ, α = 1": _tightest(found),
        "noise, α = 1": _tightest_noise(found),
        "clients that differ, α > 1, H = 1": _tightest_of_powers(found, slice(0, 1)),
        "clients that differ, α > 1, H > 1": _tightest_of_powers(found, slice(1, None)),
        "noise, α > 1, H = 1": max(_largest(found.power_noise, power, "level") for power in found.powers),
    }
    evidence = "; ".join(f"{name}: {share:.3f}" for name, share in tightest.items())
    return judge("001-1-bounds", max(tightest.values()) <= 1, f"largest floor over its bound, {evidence}")


def _exponent(power: str) -> float:
    """α = 2 − 2/p (``floor.losses.PowerLosses``)."""
    return 2 - 2 / float(power)


def _power_noise_slope(found: Findings, power: str) -> Array:
    return client_slope(found.clients, found.power_noise(power, "level"), 1, axis=0)


# ---- Numbers ---------------------------------------------------------------------------------------------------


def _floor_rows(found: Findings) -> Iterator[Row]:
    for column, symbol in GAPS.items():
        for kind, step in _cases():
            name = f"{kind}, {STEP_NAMES[step]}"
            for way in WAYS:
                slopes = found.slopes(kind, step, column, way).mean(axis=(0, 1))
                yield Row(f"{name}: slope of ln({symbol}) against ln ζ², by {way}", slopes.tolist(), 1.0)
            share = found.explained(kind, step, column)
            yield Row(f"{name}: share of the variance of ln({symbol}) that ln ζ² explains", [share])
    for kind, step in _cases():
        drift = np.log(found.floors(kind, step, "drift", least=2)).mean(axis=(1, 2))
        listed = [H for H in found.local_steps if H >= 2]
        for H, growth in zip(listed[1:], np.exp(drift[1:] - drift[0]), strict=True):
            # To first order in η the limit is (H − 1) η away from the minimiser.
            steps = (H - 1) / (listed[0] - 1) * (1 if step == "fixed" else listed[0] / H)
            name = f"{kind}, {STEP_NAMES[step]}: F − min F with H = {H} over that with H = {listed[0]}"
            yield Row(f"{name}; published: (H−1)²η²", growth.tolist(), steps**2)
        share = np.exp(drift - np.log(found.floors(kind, step, "gap", least=2)).mean(axis=(1, 2)))
        yield Row(f"{kind}, {STEP_NAMES[step]}: (F − min F) / (F − F*), H = {listed[-1]}", share[-1].tolist())


def _noise_rows(found: Findings) -> Iterator[Row]:
    for kind, step in _cases():
        bound = client_slope(found.clients, found.noise(kind, step, "bound"), 1, axis=1)
        for H, ours, theirs in zip(
            found.local_steps, found.noise_slopes(kind, step), bound.mean(axis=1), strict=True
        ):
            name = f"{kind}, {STEP_NAMES[step]}, H = {H}: slope of ln(noise floor) against ln C"
            yield Row(f"{name}; published: the bound's", ours.tolist(), float(theirs))


def _power_rows(found: Findings) -> Iterator[Row]:
    for power in found.powers:
        name, exponent = f"α = {_exponent(power):.3g} (p = {power})", _exponent(power)
        for way in WAYS:
            slopes = found.power_slopes(power, way).mean(axis=0)
            yield Row(f"{name}: slope of ln(F − F*) against ln ζ², by {way}", slopes.tolist(), 1 / exponent)
        noise = _power_noise_slope(found, power)
        yield Row(f"{name}: slope of ln(noise floor) against ln C", noise.tolist(), -1 / exponent)


def _notes(found: Findings) -> list[str]:
    shares = [
        np.exp(np.log(found.floors(*case, "drift", least=2) / found.floors(*case, "gap", least=2)).mean())
        for case in _cases()
    ]
    return [
        "What the theorem's floor counts: F* is the mean of the clients' own minima and lies below min F as soon as "
        "these differ. So F − F* has a part min F − F* that no algorithm can undo and on which H and η have no "
        f"effect; what local steps cause, F − min F, is {min(shares):.1e} to {max(shares):.1e} of it here "
        "(geometric means over problems and H ≥ 2).",
        "True by construction and no test: on quadratics and powers, the exponent by spread, as all of F scales with "
        "the distance of the optima; and that F − F* follows ζ² within a factor 2L/μ, by smoothness and FL-2 at the "
        "minimiser. A test: exponents of logistic losses, those by number deviating, F − min F, and what ζ² explains "
        "where curvatures and H vary.",
        "Of the bound's two terms of noise the second, 12η²(H−1)L²σ²/μ, doesn't fall with C: its slope is the "
        "published one in the rows above. On quadratics a round is linear and no such term can be; logistic losses "
        "could have one, as noise of a client's own steps moves the mean of a curved gradient.",
        "Not tested: the rate at which a start is forgotten; α = 2, which no power has; noise with H > 1 where "
        "α > 1; ζ² over all models, as FL-3 has it; clients that count differently or don't all take part, which the "
        "theorems leave out.",
    ]


# ---- Figure ----------------------------------------------------------------------------------------------------


def _draw(folder: Path, found: Findings) -> Path:
    figure = new_figure(6.4, "what FedAvg leaves over: clients that differ, and noise")
    (left, right), (below, powers) = figure.subplots(2, 2)
    for axes in (left, right, below, powers):
        style_axes(axes)
        axes.set(xscale="log", yscale="log")
    _scatter(left, found, "gap")
    _scatter(right, found, "drift")
    _noise_panel(below, found)
    for color, power in zip(COLORS, found.powers, strict=False):
        x, y = (found.power_floors(power, name).ravel() for name in ("zeta2", "gap"))
        powers.plot(x, y, "o", color=color, ms=2, mew=0, label=f"α = {_exponent(power):.2f}")
    powers.set(xlabel="ζ²", ylabel="F − F*", title="α > 1")
    for axes in (left, right, below, powers):
        axes.title.set_fontsize(10)
        axes.legend(frameon=False, fontsize=8, markerscale=2)
    return save(figure, folder / "floors.png")


def _scatter(axes: Axes, found: Findings, column: str) -> None:
    """A floor against ζ² with one step size, all problems."""
    x = found.floors("logistic", "fixed", "zeta2", least=2)
    if column == "gap":
        bound = found.floors("logistic", "fixed", "bound", least=2)
        axes.plot(x.ravel(), bound.ravel(), "x", color="#BBBBBB", ms=3, label="bound 8ζ²/μ")
    listed = [H for H in found.local_steps if H >= 2]
    for color, H, zeta2, floor in zip(
        COLORS, listed, x, found.floors("logistic", "fixed", column, least=2), strict=False
    ):
        axes.plot(zeta2.ravel(), floor.ravel(), "o", color=color, ms=2, mew=0, label=f"H = {H}")
    axes.set(xlabel="ζ²", ylabel=GAPS[column], title=f"logistic, one η: {GAPS[column]}")


def _noise_panel(axes: Axes, found: Findings) -> None:
    H = found.local_steps[-1]
    for kind, color in zip(KINDS, (TEST, TRAIN), strict=True):
        level, bound = (found.noise(kind, "theorem", name)[-1].mean(axis=1) for name in ("level", "bound"))
        axes.plot(found.clients, bound, "x", color=color, ms=4, label=f"{kind}, bound")
        axes.plot(found.clients, level, "o-", color=color, lw=1, ms=3, label=kind)
    axes.plot(found.clients, level[0] / found.clients, color="#BBBBBB", lw=1, label="1/C")
    axes.set(xlabel="clients C", ylabel="noise floor", title=f"η = 1/(18LH), H = {H}", xticks=found.clients)
    axes.set_xticklabels([f"{number:g}" for number in found.clients])
    axes.minorticks_off()
