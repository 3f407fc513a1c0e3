"""The synthetic study of 000: client drift where one client is an outlier and one parameter is trained.

papers/000_eaef941d18240f45.txt, sections 3.1 and 4. Twenty clients, a perceptron with frozen slope v of which only
the bias b is trained, full batches, η = 0.2, the outlier (the last client) and one other in each round: FedAvg with
τ ∈ {10, 50, 300, 1000} local steps, the same points dealt out IID at τ = 1000, and FedAvg beside FedProx at
τ = 3000. With one parameter, what the theory speaks of can be worked out from the data: minima, L, D, ζ.

    python -m fedapp.reproduce.study_000_synthetic OUT
"""

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray
from safetensors.numpy import load_file

from fedapp import federation
from fedapp.config import RunConfig
from fedapp.models import PERCEPTRON_SLOPE
from fedapp.report.figures import INK, STEPS, TEST, TRAIN, new_figure, save, style_axes
from fedapp.reproduce.curves import COLORS
from fedapp.reproduce.plan import PlannedRun, read_plan
from fedapp.reproduce.report import Report, Row, Verdict, judge, write_report
from fedapp.reproduce.runner import run_missing
from fedapp.reproduce.runs import Run, Runs
from fedapp.reproduce.synthetic_problem import NUM_CLIENTS, Problem
from fedapp.theory.constants import Constants
from fedapp.theory.convex import convex_bound

Array = NDArray[np.float64]

LR, ALPHA = 0.2, 0.1
LOCAL_STEPS = (10, 50, 300, 1000)
LONG = 3000  # local steps of the comparison with FedProx
SEEDS, ROUNDS = (0, 1, 2), 50
QUICK_ROUNDS, QUICK_LONG_ROUNDS = 15, 6

# The direction between the means of the usual client's classes.
DIAGONAL = (1.0, 1.0)

ZETA, SMOOTHNESS, DISTANCE = 0.407, 0.190, 2.0  # as published
CLOSE = 0.1  # relative difference up to which a published number is met
REACHED = 0.02  # a curve has reached its plateau when it comes this close to it, relative
PLATEAU = 0.2  # last part of a run over which its plateau is averaged


def run(out: Path, *, quick: bool, data_path: Path | str | None = None, engine: str, jobs: int = 1) -> None:
    """Make the runs, if they aren't there yet, and report on them.

    Parameters
    ----------
    out : Path
        Gets report.md, figure-2.png, figure-3.png, figure-5.png, numbers.csv, and the runs.
    quick : bool
        One seed and fewer rounds.
    data_path : Path, optional
        The authors' train.json and test.json, or a folder with ``synthetic_000`` in it; without it the data are
        generated, for each seed anew.
    engine : str
        One of `fedapp.engine.in_process.IN_PROCESS`.
    jobs : int
        Runs at a time.

    Raises
    ------
    DataError
        If the data aren't there.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    folder = _folder(data_path)
    planned = plan_runs(quick=quick, data_path=folder)
    problems = {seed: Problem.of(plan.config) for seed, plan in _one_per_seed(planned).items()}
    runs, failures = run_missing(planned, out / "runs", engine=engine, jobs=jobs)
    failures |= {run.path.name: "clients failed" for run in runs if run.final("failures")}
    if failures:
        raise RuntimeError("; ".join(f"{name}: {reason}" for name, reason in failures.items()))
    plan = read_plan("000-synthetic")
    rounds = f"{QUICK_ROUNDS} rounds, {QUICK_LONG_ROUNDS} at τ = {LONG}" if quick else f"{ROUNDS} rounds"
    setting = [
        f"{'**Quick**: ' * quick}{rounds}, {len(problems)} seed{'s' * (len(problems) > 1)}, engine {engine}",
        "data: the authors' own; seeds differ in who takes part"
        if folder
        else "data: generated anew for each seed",
    ]
    report = make_report(runs, problems, out)
    write_report(out, report, title=plan.title, source=plan.source, claims=plan.claims, setting=setting)
    _write_numbers(out / "numbers.csv", runs)


def plan_runs(*, quick: bool, data_path: str = "") -> list[PlannedRun]:
    """Return the study's runs: each has the labels ``case`` and ``seed``."""
    cases: dict[str, dict[str, str | int | float]] = {
        **{f"tau-{steps}": {"local-steps": steps} for steps in (*LOCAL_STEPS, LONG)},
        "iid": {"local-steps": LOCAL_STEPS[-1], "partitioner": "iid"},
        "fedprox": {"local-steps": LONG, "strategy": "fedprox", "proximal-mu": ALPHA},
    }
    planned = []
    for seed in SEEDS[:1] if quick else SEEDS:
        for case, values in cases.items():
            rounds = QUICK_LONG_ROUNDS if values["local-steps"] == LONG else QUICK_ROUNDS
            config = {
                "dataset": "synthetic",
                "data-path": data_path,
                "partitioner": "natural",
                "model": "perceptron",
                "participation": "paired",
                "local-epochs": 0,
                "batch-size": 0,
                "lr": LR,
                "num-server-rounds": rounds if quick else ROUNDS,
                "client-evaluation": True,
                "record-divergence": True,
                "client-device": "cpu",
                "server-device": "cpu",
                "seed": seed,
                **values,
            }
            # Where the data come from isn't part of a run's name by itself.
            labels = {"data": "authors" if data_path else "generated", "case": case, "seed": seed}
            planned.append(PlannedRun(labels, RunConfig.load(config), NUM_CLIENTS))
    return planned


def make_report(runs: Runs, problems: dict[int, Problem], out: Path) -> Report:
    """Put numbers, verdicts and figures together."""
    measured = Measured(runs, problems)
    report = Report(digits=3)
    report.rows = measured.rows()
    report.extra = [measured.table()]
    report.verdicts = [
        measured.verdict_on_drift(),
        measured.verdict_on_iid(),
        measured.verdict_on_bound(),
        measured.verdict_on_fedprox(),
    ]
    report.figures = [
        draw_drift(out / "figure-2.png", measured),
        draw_fedprox(out / "figure-3.png", measured),
        draw_bound(out / "figure-5.png", measured),
    ]
    report.notes = [
        "Divergence after a round is the largest |∂f_i(b_i) − ∂F(b_i)| of the participants, each at its own local "
        f"model; ζ is its largest value at τ = {LOCAL_STEPS[-1]}, as in section 4.1.",
        f"The paper freezes the slope at v = {PERCEPTRON_SLOPE}. Its ζ and L fit the slope {DIAGONAL} instead, the "
        "direction between the usual class means: both are in the table.",
        "A plateau is the mean test loss over the last fifth of a run; a curve has reached it where it first comes "
        f"within {REACHED:.0%} of it.",
        "The outlier takes part in every round with weight ½, so that FedAvg aims at ½ f_C + ½ mean f_i rather than "
        "F: even with small τ its test loss stays above the optimum. Theorem 2.1 supposes that all take part.",
        "The gap is F(b) − F(b*) on the training points; the bound is 000's eq. 1 with σ = 0, the measured ζ, the "
        "largest L of the f_i, and D.",
    ]
    return report


class Measured:
    """What the runs and their data say, one value per seed."""

    def __init__(self, runs: Runs, problems: dict[int, Problem]) -> None:
        self.problems = problems
        self.seeds = list(problems)
        self._runs = {(str(run["case"]), int(run["seed"])): run for run in runs}

    def run(self, case: str, seed: int) -> Run:
        """Return one run."""
        return self._runs[case, seed]

    def each(self, case: str) -> list[Run]:
        """Return a case's runs, by seed."""
        return [self.run(case, seed) for seed in self.seeds]

    def curve(self, case: str, key: str) -> Array:
        """Return a metric after each round, from round 0, mean over seeds."""
        return np.asarray(np.mean([run.column(key) for run in self.each(case)], axis=0))

    def plateaus(self, case: str) -> list[float]:
        """Test loss at the end."""
        return [float(run.tail("loss", PLATEAU).mean()) for run in self.each(case)]

    def reached(self, case: str) -> list[float]:
        """First round whose test loss is close to the plateau: later ones swing with who takes part."""
        return [
            float(np.argmax(np.abs(run.column("loss") / plateau - 1) <= REACHED))
            for run, plateau in zip(self.each(case), self.plateaus(case), strict=True)
        ]

    def divergences(self, case: str) -> list[float]:
        """Largest divergence of all rounds."""
        return [float(np.nanmax(run.column("divergence"))) for run in self.each(case)]

    def biases(self, case: str) -> list[float]:
        """The final b."""
        return [float(load_file(run.path / "model.safetensors")["bias"][0]) for run in self.each(case)]

    def gaps(self, case: str) -> list[float]:
        """F − F* at the end, on the training points."""
        return [
            float(run.tail("client-loss", PLATEAU).mean()) - self._least(seed)
            for seed, run in zip(self.seeds, self.each(case), strict=True)
        ]

    def gap_curve(self, case: str) -> Array:
        """Mean of F − F* over the rounds so far, from round 1: what the theorem bounds, at the ends of rounds."""
        curves = [
            run.column("client-loss")[1:] - self._least(seed)
            for seed, run in zip(self.seeds, self.each(case), strict=True)
        ]
        rounds = np.arange(1, len(curves[0]) + 1)
        return np.cumsum(np.mean(curves, axis=0)) / rounds

    def bound(self, steps: int, rounds: ArrayLike, seed: int) -> Array:
        """Theorem 2.1 with what was measured."""
        return convex_bound(rounds, self._constants(seed), lr=LR, local_steps=steps)

    def optima(self) -> list[float]:
        """Least test loss of any b."""
        tests = [problem.points(problem.test) for problem in self.problems.values()]
        return [float(test.loss(test.minimiser)) for test in tests]

    def aims(self) -> list[float]:
        """Test loss at the b that the participation aims at."""
        return [float(p.points(p.test).loss(p.paired_minimiser)) for p in self.problems.values()]

    def rows(self) -> list[Row]:
        """Return the table of numbers."""
        problems = list(self.problems.values())
        diagonal = [Problem(p.clients, p.test, DIAGONAL) for p in problems]
        top = LOCAL_STEPS[-1]
        return [
            Row(f"ζ, largest divergence at τ = {top}", self.divergences(f"tau-{top}"), ZETA),
            Row("L of F, by numerical differentiation", [p.smoothness for p in problems], SMOOTHNESS),
            Row("D, from b = 0 to the minimiser of F", [p.distance for p in problems], DISTANCE),
            Row("divergence as τ → ∞", [p.limit_divergence for p in problems]),
            Row("sup of |∂f_i − ∂F| over all b", [p.largest_divergence for p in problems]),
            Row("largest L of the f_i", [p.local_smoothness for p in problems]),
            Row(f"slope {DIAGONAL}: divergence as τ → ∞", [p.limit_divergence for p in diagonal], ZETA),
            Row(f"slope {DIAGONAL}: L of F", [p.smoothness for p in diagonal], SMOOTHNESS),
            Row("least test loss of any b", self.optima()),
            Row("test loss at the minimiser of ½ f_C + ½ mean f_i", self.aims()),
        ]

    def table(self) -> str:
        """Return what each case came to, as Markdown."""
        columns = {
            "plateau of the test loss": self.plateaus,
            "plateau reached in round": self.reached,
            "largest divergence": self.divergences,
            "final b": self.biases,
            "F − F* at the end": self.gaps,
        }
        lines = ["| case |" + "".join(f" {name} |" for name in columns), "|---|" + "--:|" * len(columns)]
        for case in self.cases():
            cells = [_with_spread(measure(case)) for measure in columns.values()]
            lines.append(f"| {case_name(case)} |" + "".join(f" {cell} |" for cell in cells))
        return "\n".join(["## Runs", "", *lines])

    def cases(self) -> list[str]:
        """Names of the cases, in order."""
        return list(dict.fromkeys(case for case, _ in self._runs))

    def verdict_on_drift(self) -> Verdict:
        """000-1."""
        cases = [f"tau-{steps}" for steps in LOCAL_STEPS]
        plateaus, reached, largest = (
            [_mean(measure(case)) for case in cases]
            for measure in (self.plateaus, self.reached, self.divergences)
        )
        rises = all(np.all(np.diff(values) > 0) for values in (plateaus, largest))
        quicker = bool(np.all(np.diff(reached) < 0.5)) and reached[-1] < reached[0]  # a round is coarse
        close = abs(largest[-1] / ZETA - 1) < CLOSE
        return judge(
            "000-1",
            bool(rises and quicker and close),
            f"τ = {_listed(LOCAL_STEPS)}: plateaus {_listed(plateaus)}; plateau reached in round {_listed(reached)}; "
            f"largest divergences {_listed(largest)}, the last one is ζ",
        )

    def verdict_on_iid(self) -> Verdict:
        """000-2."""
        optimum, iid, drifted = (
            _mean(v) for v in (self.optima(), self.plateaus("iid"), self.plateaus(f"tau-{LOCAL_STEPS[-1]}"))
        )
        share = (iid - optimum) / (drifted - optimum)
        return judge(
            "000-2",
            share < REACHED,
            f"IID ends at {iid:.4f}, least possible {optimum:.4f}, by client {drifted:.4f}: {share:.2%} of that gap",
        )

    def verdict_on_bound(self) -> Verdict:
        """000-3."""
        smooth, distance, diagonal = (
            _mean([getattr(p, name) for p in problems])
            for name, problems in (
                ("smoothness", self.problems.values()),
                ("distance", self.problems.values()),
                ("smoothness", [Problem(p.clients, p.test, DIAGONAL) for p in self.problems.values()]),
            )
        )
        ratios = self.ratios()
        numbers = abs(smooth / SMOOTHNESS - 1) < CLOSE and round(distance) == DISTANCE
        far = all(ratio > 100 for steps, ratio in ratios.items() if steps >= 300)
        shown = ", ".join(f"{ratio:,.0f} at τ = {steps}" for steps, ratio in ratios.items())
        return judge(
            "000-3",
            numbers and far,
            f"L = {smooth:.3f} with the frozen slope ({diagonal:.3f} with slope {DIAGONAL}), D = {distance:.2f}; "
            f"bound over gap: {shown}",
        )

    def verdict_on_fedprox(self) -> Verdict:
        """000-4."""
        (average, prox), (quick, slow) = (
            [_mean(measure(case)) for case in (f"tau-{LONG}", "fedprox")]
            for measure in (self.plateaus, self.reached)
        )
        optimum = _mean(self.optima())
        return judge(
            "000-4",
            prox - optimum < (average - optimum) / 2 and slow > quick,
            f"τ = {LONG}: FedProx ends at {prox:.4f}, FedAvg at {average:.4f} (least possible {optimum:.4f}); "
            f"plateau reached in round {slow:.3g} and {quick:.3g}",
        )

    def ratios(self) -> dict[int, float]:
        """Bound over measured gap after the last round, by τ."""
        return {steps: bound / gap for steps, (bound, gap) in self.ends().items()}

    def ends(self) -> dict[int, tuple[float, float]]:
        """Bound and measured mean gap after the last round, by τ; means over seeds."""
        found: dict[int, tuple[float, float]] = {}
        for steps in LOCAL_STEPS:
            gap = self.gap_curve(f"tau-{steps}")
            bounds = [float(self.bound(steps, len(gap), seed)) for seed in self.seeds]
            found[steps] = (_mean(bounds), float(gap[-1]))
        return found

    def _least(self, seed: int) -> float:
        objective = self.problems[seed].objective
        return float(objective.loss(objective.minimiser))

    def _constants(self, seed: int) -> Constants:
        problem = self.problems[seed]
        zeta = float(np.nanmax(self.run(f"tau-{LOCAL_STEPS[-1]}", seed).column("divergence")))
        return Constants(
            NUM_CLIENTS, L=problem.local_smoothness, zeta2=zeta**2, distance2=problem.distance**2, sigma2=0.0
        )


def draw_drift(path: Path, measured: Measured) -> Path:
    """Draw the separators, the test loss and the divergence, by τ: figure 2."""
    figure = new_figure(3.6, "FedAvg on the synthetic problem, by local steps τ")
    separators, losses, divergences = figure.subplots(1, 3, width_ratios=[1, 1.3, 1.3])
    problem = measured.problems[measured.seeds[0]]
    x = np.concatenate([x for x, _ in problem.clients])
    y = np.concatenate([y for _, y in problem.clients])
    separators.scatter(*x.T, c=np.where(y > 0, "#BBBBBB", "#666666"), s=2, lw=0)
    rounds = measured.curve("iid", "aggregation")
    for steps, color in zip(LOCAL_STEPS, COLORS, strict=False):
        case = f"tau-{steps}"
        _separator(separators, problem, measured.biases(case)[0], color)
        losses.plot(rounds, measured.curve(case, "loss"), color=color, lw=1.5, label=case_name(case))
        divergences.plot(rounds[1:], measured.curve(case, "divergence")[1:], color=color, lw=1.5)
    losses.plot(rounds, measured.curve("iid", "loss"), color=INK, lw=1.2, ls="--", label=case_name("iid"))
    divergences.plot(rounds[1:], measured.curve("iid", "divergence")[1:], color=INK, lw=1.2, ls="--")
    losses.axhline(_mean(measured.optima()), color=INK, lw=0.8, ls=":", label="least possible")
    divergences.axhline(ZETA, color=INK, lw=0.8, ls="-.", label="ζ as published")
    separators.set(xlim=(-1, 5), ylim=(-1, 5), title="separators", xlabel="x₁", ylabel="x₂", aspect="equal")
    _finish(losses, "test loss", rounds[-1])
    _finish(divergences, "divergence", rounds[-1])
    style_axes(separators)
    separators.title.set_fontsize(10)
    figure.legend(loc="outside lower center", ncols=7, frameon=False, fontsize=8, columnspacing=1)
    return save(figure, path)


def draw_fedprox(path: Path, measured: Measured) -> Path:
    """Draw the test loss of FedAvg and FedProx: figure 3."""
    figure = new_figure(3.4, f"FedAvg and FedProx (μ = {ALPHA}) at τ = {LONG}")
    axes = figure.subplots()
    for case, color, name in ((f"tau-{LONG}", TRAIN, "FedAvg"), ("fedprox", TEST, "FedProx")):
        axes.plot(measured.curve(case, "aggregation"), measured.curve(case, "loss"), "o-", color=color, ms=3, lw=1.5,
                  label=name)  # fmt: skip
    axes.axhline(_mean(measured.optima()), color=INK, lw=0.8, ls=":", label="least possible")
    _finish(axes, "test loss", measured.curve("fedprox", "aggregation")[-1])
    axes.legend(frameon=False, fontsize=9)
    return save(figure, path)


def draw_bound(path: Path, measured: Measured) -> Path:
    """Draw bound and measured gap, by τ after the last round and round by round: figure 5."""
    figure = new_figure(3.8, "Theorem 2.1 and what was measured")
    at_end, by_round = figure.subplots(1, 2)
    bounds, gaps = zip(*measured.ends().values(), strict=True)
    at_end.loglog(LOCAL_STEPS, bounds, "s--", color=INK, label="bound")
    at_end.loglog(LOCAL_STEPS, gaps, "o-", color=TEST, label="measured mean gap F − F*")
    for steps, bound, gap in zip(LOCAL_STEPS, bounds, gaps, strict=True):
        at_end.annotate(
            f"×{float(f'{bound / gap:.2g}'):,.0f}",
            (steps, math.sqrt(bound * gap)),
            ha="center",
            fontsize=8,
            color=INK,
        )
    at_end.set_xticks(LOCAL_STEPS, [str(steps) for steps in LOCAL_STEPS])
    at_end.minorticks_off()
    at_end.set(xlabel="local steps τ", title="after the last round")
    at_end.margins(x=0.12)
    rounds = np.arange(1, len(measured.gap_curve(f"tau-{LOCAL_STEPS[0]}")) + 1)
    for steps, color in zip(LOCAL_STEPS, COLORS, strict=False):
        bound = np.mean([measured.bound(steps, rounds, seed) for seed in measured.seeds], axis=0)
        by_round.semilogy(rounds, bound, color=color, ls="--", lw=1.2)
        by_round.semilogy(
            rounds, measured.gap_curve(f"tau-{steps}"), color=color, lw=1.5, label=f"τ = {steps}"
        )
    by_round.set(xlabel="server round", title="by round: bound dashed", xlim=(0, rounds[-1]))
    for axes in (at_end, by_round):
        style_axes(axes)
        axes.title.set_fontsize(10)
        axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8, columnspacing=1)
    return save(figure, path)


def case_name(case: str) -> str:
    """Name a case in words."""
    named = {"iid": f"IID, τ = {LOCAL_STEPS[-1]}", "fedprox": f"FedProx, τ = {LONG}"}
    return named.get(case, case.replace("tau-", "τ = "))


def _finish(axes: Axes, title: str, last_round: float) -> None:
    style_axes(axes)
    axes.set(title=title, xlabel="server round", xlim=(0, last_round))
    axes.title.set_fontsize(10)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=STEPS))


def _separator(axes: Axes, problem: Problem, bias: float, color: str) -> None:
    """The line v·x + b = 0."""
    x = np.array([-1.0, 5.0])
    axes.plot(x, -(bias + problem.slope[0] * x) / problem.slope[1], color=color, lw=1.5)


def _write_numbers(path: Path, runs: Runs) -> None:
    """Write every evaluation of every run, one a row."""
    columns = ("aggregation", "loss", "client-loss", "divergence", "drift")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("case", "seed", *columns))
        for run in runs:
            for record in run.metrics:
                writer.writerow((run["case"], run["seed"], *(record.get(key, "") for key in columns)))


def _folder(data_path: Path | str | None) -> str:
    """Return the folder of the authors' data, or nothing."""
    if not data_path:
        return ""
    inside = Path(data_path).expanduser() / "synthetic_000"
    return federation.absolute(str(inside if inside.is_dir() else data_path))


def _one_per_seed(planned: Sequence[PlannedRun]) -> dict[int, PlannedRun]:
    """Return a run of each seed whose clients have the data as generated."""
    return {int(run.labels["seed"]): run for run in planned if run.labels["case"] == f"tau-{LONG}"}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _with_spread(values: Sequence[float]) -> str:
    spread = f" ± {np.std(values, ddof=1):.1g}" if len(values) > 1 else ""
    return f"{_mean(values):.4g}{spread}"


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="The synthetic study of 000: runs, figures and report.")
    parser.add_argument("out", type=Path, help="folder for report.md, the figures, numbers.csv and the runs")
    parser.add_argument("--quick", action="store_true", help="one seed, fewer rounds")
    parser.add_argument("--data-path", type=Path, help="the authors' data; without it data are generated")
    parser.add_argument("--engine", default="sequential", help="what runs the clients")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options = parser.parse_args(arguments)
    run(
        options.out,
        quick=options.quick,
        data_path=options.data_path,
        engine=options.engine,
        jobs=options.jobs,
    )


if __name__ == "__main__":
    main()
