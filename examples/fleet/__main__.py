"""Time to accuracy of four methods on 1,000 lognormal devices that are there for half of a day each.

    python -m examples.fleet             the methods with the step sizes below, three seeds: a table and a figure
    python -m examples.fleet --tune      choose the step sizes anew first, on other seeds

What was made before isn't made again: the same command goes on where it was stopped.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import fedapp
from fedapp.report.figures import new_figure, save, style_axes
from strategies import make_availability

CLIENTS, PERIOD, TARGET, BUDGET = (
    1000,
    600.0,
    0.85,
    900.0,
)  # devices, seconds of a day, accuracy, seconds of a run
SEEDS, TUNING_SEEDS, STEP_SIZES = (0, 1, 2), (100, 101), (0.03, 0.1, 0.3, 1.0)
FLEET = {
    "dataset": "digits",
    "data-imbalance": 0.0,
    "min-samples": 1,
    "model": "logistic",
    "local-epochs": 5,
    "batch-size": 0,
    "time-scenario": "lognormal:0.5,1",
    "availability": f"diurnal:0.5,{PERIOD:g}",
    "num-server-rounds": 1_000_000,
    "client-records": "never",
    "checkpoint-every": 0,
    "figures": False,
}
ROUNDS = {"strategy": "fedavg", "participation": "uniform", "fraction-train": 0.1}
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": ROUNDS,
    "FedAvg, over-selection 0.3": {**ROUNDS, "over-select": 0.3},
    "FedBuff, buffer of 20": {"strategy": "fedbuff", "buffer-size": 20, "concurrency": 100, "eval-every": 5},
    "FedFix, every 5 s": {"strategy": "fedfix", "fedfix-interval": 5.0, "concurrency": 100},
}
# Of STEP_SIZES, those with the least mean time to TARGET on TUNING_SEEDS (tuning.csv).
PICKED = dict(zip(METHODS, (0.3, 1.0, 0.3, 0.3), strict=True))
COLOURS = ("#332288", "#88CCEE", "#CC6677", "#117733")


def runs(
    folder: Path, methods: Mapping[str, Sequence[float]], seeds: Sequence[int], options: Any
) -> pd.DataFrame:
    """Return a row for each method, step size and seed: when and at what cost TARGET was reached, and the end."""
    choices = [
        {"label": f"{name}, lr {lr:g}", **METHODS[name], "lr": lr}
        for name, all_lr in methods.items()
        for lr in all_lr
    ]
    fleet: dict[str, Any] = {**FLEET, "time-budget": options.budget}
    made = fedapp.sweep(
        out=folder,
        num_clients=options.clients,
        jobs=options.jobs,
        quiet=True,
        method=choices,
        seed=list(seeds),
        **{key.replace("-", "_"): value for key, value in fleet.items()},
    )
    rows = []
    for (label, seed), run in made.runs.groupby(["method", "seed"], sort=False):
        name, lr = str(label).rsplit(", lr ", 1)
        reached = run[run["accuracy"] >= TARGET]
        first = reached.iloc[0] if len(reached) else None
        rows.append(
            {
                "method": name,
                "lr": float(lr),
                "seed": seed,
                "status": run["status"].iloc[0],
                "time": np.nan if first is None else first["time"],
                "device-seconds": np.nan if first is None else first["device-seconds"],
                "wasted-seconds": np.nan if first is None else first["wasted-seconds"],
                "accuracy": run["accuracy"].iloc[-1],
            }
        )
    return pd.DataFrame(rows)


def picked(tried: pd.DataFrame, budget: float) -> dict[str, float]:
    """Return each method's step size: the least mean time, of a run that doesn't get there the budget.

    One with which a run came to no good end isn't picked; of equals the smaller is.
    """
    best = {}
    for name, rows in tried.groupby("method", sort=False):
        sound = {lr: each for lr, each in rows.groupby("lr") if (each["status"] == "finished").all()}
        best[str(name)] = min(sound, key=lambda lr: (sound[lr]["time"].fillna(budget).mean(), lr))
    return best


def table(shown: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each method: means over seeds, and the least and the largest time."""
    rows = []
    for name, each in shown.groupby("method", sort=False):
        there = each.dropna(subset="time")
        rows.append(
            {
                "method": name,
                "lr": each["lr"].iloc[0],
                "reached": f"{len(there)} of {len(each)}",
                "seconds": there["time"].mean(),
                "least": there["time"].min(),
                "most": there["time"].max(),
                "device-seconds": there["device-seconds"].mean(),
                "wasted-seconds": there["wasted-seconds"].mean(),
                "final accuracy": each["accuracy"].mean(),
            }
        )
    return pd.DataFrame(rows)


def draw(folder: Path, options: Any) -> Path:
    """Draw accuracy against virtual time, a line for each run, over how many devices are there."""
    swept = fedapp.load(folder / "shown")
    assert isinstance(swept, fedapp.SweepResult)
    figure = new_figure(
        5.6, f"{options.clients:,} lognormal devices, each there for half of a day of {PERIOD:g} s"
    )
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for name, colour in zip(METHODS, COLOURS, strict=True):
        mine = swept.runs[swept.runs["method"].str.startswith(f"{name}, lr ")]
        for number, (_, run) in enumerate(mine.groupby("seed")):
            above.plot(run["time"], run["accuracy"], color=colour, lw=1.1, label=name if not number else None)
    above.axhline(TARGET, color="#999999", lw=0.8, ls="--")
    above.set_ylabel("accuracy")
    above.legend(frameon=False, fontsize=9, loc="lower right")
    times = np.linspace(0, options.budget, 181)
    presence = make_availability(FLEET["availability"], options.clients, options.seeds[0])  # type: ignore[arg-type]
    there = [
        sum(presence.is_available(client, time) for client in range(options.clients))
        for time in times.tolist()
    ]
    below.fill_between(times, there, color="#BBBBBB")
    below.set_ylabel("there")
    below.set_xlabel("virtual seconds")
    for axes in (above, below):
        style_axes(axes)
    return save(figure, folder / "fleet.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.fleet", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=Path("results/fleet"), help="folder (results/fleet)")
    parser.add_argument("--tune", action="store_true", help="choose the step sizes anew, on other seeds")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--budget", type=float, default=BUDGET, help="virtual seconds of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args(arguments)
    step_sizes = PICKED
    if options.tune:
        tried = runs(options.out / "tuning", dict.fromkeys(METHODS, STEP_SIZES), TUNING_SEEDS, options)
        tried.to_csv(options.out / "tuning.csv", index=False)
        step_sizes = picked(tried, options.budget)
    shown = runs(
        options.out / "shown", {name: [lr] for name, lr in step_sizes.items()}, options.seeds, options
    )
    shown.to_csv(options.out / "shown.csv", index=False)
    print(f"time to an accuracy of {TARGET:g}, in virtual seconds; device-seconds until then")
    print(
        table(shown).to_string(
            index=False, float_format=lambda value: f"{value:.3g}" if value < 1 else f"{value:,.0f}"
        )
    )
    print(f"{options.out / 'shown.csv'}, {draw(options.out, options)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
