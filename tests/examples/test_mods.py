"""The table strategy × mod of the app in docs/flower.md: every cell is run, and does what the page says."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import fixedclipping_mod as older_mod
from flwr.client.mod import secagg_mod, secaggplus_mod
from flwr.clientapp import mod as mods
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

from strategies import REGISTRY, FedAvg, RunError, compress_updates, simulate
from strategies.flower import messages
from strategies.testing import MemoryGrid
from tests.examples.test_table import model, numpy_app, run, strategy_of
from tests.selection import covering

PAGE = (Path(__file__).parents[2] / "docs" / "flower.md").read_text("utf-8")
SECTION = PAGE.split("## Strategy × mod of the app\n")[1].split("\n## ")[0]
HEAD, _, *ROWS = [line.strip("| ").split(" | ") for line in SECTION.splitlines() if line.startswith("|")]
NOTES = dict(re.findall(r"^(\d)\. (.*(?:\n   .*)*)", SECTION, re.M))
OTHERS = "all others"

# Each clips to this norm; LocalDpMod adds no noise here.
NORM = 0.3
MODS: dict[str, Callable[..., Any]] = {
    "arrays_size_mod": mods.arrays_size_mod,
    "message_size_mod": mods.message_size_mod,
    "LocalDpMod": mods.LocalDpMod(NORM, 0.0, 1.0, 0.1),
    "fixedclipping_mod": mods.fixedclipping_mod,
    "adaptiveclipping_mod": mods.adaptiveclipping_mod,
    "secagg_mod": secagg_mod,
    "secaggplus_mod": secaggplus_mod,
}
CLIPPING = ["LocalDpMod", "fixedclipping_mod", "adaptiveclipping_mod"]
WITHOUT_NORM = "without clipping_norm"


def table() -> dict[tuple[str, str, bool], str]:
    """Return the page's cells, by strategy, mod, and whether clients are told a norm."""
    columns = [re.findall(r"`([\w-]+)`", cell) for cell in HEAD[1:]]
    named = {name for names in columns for name in names}
    assert HEAD[1] == OTHERS
    columns[0] = [name for name in REGISTRY if name not in named]
    return {
        (strategy, mod, WITHOUT_NORM not in row[0].replace("`", "")): cell
        for row in ROWS
        for mod in re.findall(r"`(\w+(?:_mod|Mod))`", row[0])
        for names, cell in zip(columns, row[1:], strict=True)
        for strategy in names
    }


CELLS = table()
WORKING = [name for name in REGISTRY if CELLS[name, "fixedclipping_mod", True] == "works"]


@pytest.fixture(autouse=True)
def nodes_are_there_at_once(monkeypatch):
    monkeypatch.setattr("strategies.flower.exchange.NODE_POLL", 0.0)


def norm() -> ConfigRecord:
    return ConfigRecord({"clipping_norm": NORM})


def grid_of(*given: Any, whole: bool = False) -> MemoryGrid:
    app = numpy_app(*given) if whole else numpy_app(train_mods=list(given))
    return MemoryGrid(app, [{"partition-id": i} for i in range(3)])


def said_in(note: str) -> str:
    """Return a pattern of the messages that a note quotes; … stands for anything."""
    text = re.sub(r"\s+", " ", note)
    quotes = [quote for quote in re.findall(r"`([^`]+)`", text) if quote.count(" ") > 3]
    assert quotes
    return "|".join(".*".join(map(re.escape, quote.split("…"))) for quote in quotes)


def test_the_table_has_every_strategy_and_every_mod():
    assert {(strategy, mod) for strategy, mod, _ in CELLS} == {(s, m) for s in REGISTRY for m in MODS}
    assert set(MODS) >= set(mods.__all__)
    assert {name for name in MODS if not hasattr(mods, name)} == {"secagg_mod", "secaggplus_mod"}


@pytest.mark.parametrize("whole", [False, True], ids=["training", "whole-app"])
@pytest.mark.parametrize("strategy", REGISTRY)
def test_a_cell(strategy, whole, caplog):
    for (name, mod, told), cell in CELLS.items():
        if name != strategy:
            continue
        caplog.clear()
        grid, config = grid_of(MODS[mod], whole=whole), {"clipping_norm": NORM} if told else {}
        made = strategy_of(strategy, fraction_evaluate=1.0)
        if cell == "works":
            assert run(made, grid, **config) != 0.0
            asked = len(grid.requests(messages.EVALUATE)) > 0
            assert asked
            lost = whole and mod in CLIPPING
            assert caplog.text.count("no client evaluates the model") == lost
            assert (len(made.session.run.result.evaluate_metrics_clientapp) == 0) == lost
        else:
            assert cell.startswith("refused ")
            note = NOTES[str("⁰¹²³⁴⁵⁶⁷⁸⁹".index(cell[-1]))]
            with pytest.raises(RunError, match=said_in(note)):
                run(made, grid, **config)


@pytest.mark.parametrize(("strategy", "mod"), covering(WORKING, CLIPPING, together=1))
def test_the_model_is_that_of_clients_that_clip_by_hand(strategy, mod):
    free = run(strategy_of(strategy), grid_of())
    by_hand = run(strategy_of(strategy), grid_of(), **{"by-hand": NORM})
    clipped = run(strategy_of(strategy), grid_of(MODS[mod]), clipping_norm=NORM)
    assert clipped == pytest.approx(by_hand, abs=1e-6)
    assert abs(clipped - free) > 1e-3 or strategy == "fadas"  # whose first steps are of one length


# ---- The whole app's mods and evaluation ---------------------------------------------------------------------------


@pytest.mark.parametrize("mod", CLIPPING)
def test_a_simulation_knows_the_mods_of_the_whole_app_and_asks_nobody_to_evaluate(mod, caplog):
    grid = grid_of(MODS[mod], whole=True)
    grid.client_app = grid.app  # type: ignore[attr-defined]
    assert run(FedAvg(), grid, clipping_norm=NORM) != 0.0
    assert grid.requests(messages.EVALUATE) == grid.requests(messages.DESCRIBE) == []
    assert caplog.text.count(f"no client is asked to evaluate the model: {mod} expects arrays in every") == 1


def test_devices_that_describe_themselves_tell_of_such_a_mod(caplog):
    grid = grid_of()
    apps = [numpy_app(*given) for given in ((), (mods.fixedclipping_mod,))]
    for app in apps:

        @app.query("describe")
        def describe(message: Message, context: Context) -> Message:
            return Message(RecordDict({"metrics": MetricRecord({"num-examples": 2})}), reply_to=message)

    grid.app = lambda m, c: apps[c.node_config["partition-id"] > 0](m, c)  # type: ignore[assignment]
    assert run(FedAvg(describe=True), grid, clipping_norm=NORM) != 0.0
    assert grid.asked(messages.EVALUATE) == [0, 0]
    assert (
        caplog.text.count("some clients aren't asked to evaluate the model: fixedclipping_mod expects") == 1
    )


def test_an_evaluation_that_nobody_answers_names_such_mods(caplog):
    grid = grid_of()
    for partition in range(3):
        grid.lose(partition, category="evaluate")
    made = FedAvg()
    made.start(grid, model(), 2, timeout=0.05)
    assert (
        caplog.text.count("nobody has answered the evaluation: a mod for clipping or local differential") == 1
    )
    assert caplog.text.count("evaluation of aggregation") == 2


def test_in_processes_a_refused_reply_is_an_error_at_once():
    app = numpy_app(train_mods=[mods.fixedclipping_mod, compress_updates])  # the wrong order
    with pytest.raises(RunError, match="fixedclipping_mod expects the keys in the ArrayRecord of the reply"):
        simulate(app, FedAvg(compression="int8"), 2, model(), 1, workers=1, train_config=norm())


# ---- One round and one client --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mod", CLIPPING)
def test_a_second_record_is_refused_after_one_round_and_without_it_spectral_works(mod):
    grid = grid_of(MODS[mod])
    with pytest.raises(RunError, match="each is sent neighbours; allowed are mods that let it pass, or"):
        run(strategy_of("spectral"), grid, clipping_norm=NORM)
    assert len(grid.requests()) == 3
    one = REGISTRY["spectral"](fraction_evaluate=0.0, perturbation_beta=1.0)
    assert run(one, grid, clipping_norm=NORM) != 0.0


def test_one_client_whose_mod_refuses_is_left_out_alone(caplog):
    plain, modded = numpy_app(), numpy_app(train_mods=[MODS["LocalDpMod"]])
    grid = MemoryGrid(plain, [{"partition-id": i} for i in range(3)], node_ids=[10, 20, 30])
    grid.app = lambda m, c: (modded if c.node_id == 10 else plain)(m, c)  # type: ignore[assignment, return-value]
    assert run(strategy_of("spectral"), grid) != 0.0
    assert caplog.text.count("left out client 0 (node 10): LocalDpMod expects exactly one ArrayRecord") == 2
    # A round of that client alone is no reason to end the run.
    alone = REGISTRY["spectral"](fraction_evaluate=0.0, participation="fixed:0")
    with pytest.raises(RunError, match="no client's work was accepted in 2 aggregations"):
        run(alone, grid)


# ---- Secure aggregation, and the older API -------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", REGISTRY)
def test_a_simulation_refuses_secure_aggregation_before_any_message(strategy):
    grid = grid_of(secaggplus_mod, whole=True)
    grid.client_app = grid.app  # type: ignore[attr-defined]
    with pytest.raises(RunError, match=r"^secaggplus_mod: a mod for secure aggregation waits for"):
        run(strategy_of(strategy), grid)
    assert grid.sent == []


@pytest.mark.parametrize("strategy", ["fedavg", "fedfix"])
def test_flowers_workflow_of_secure_aggregation_takes_no_strategy_of_messages(strategy):
    made = strategy_of(strategy)
    context = LegacyContext(
        Context(1, 1, {}, RecordDict(), {}), config=ServerConfig(num_rounds=1), strategy=made
    )
    workflow = DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2))
    with pytest.raises(
        RunError, match=rf"^{type(made).__name__} sends messages: LegacyContext and .* alone$"
    ):
        workflow(grid_of(), context)


def test_a_mod_of_the_older_api_is_named():
    with pytest.raises(RunError, match=r"or a mod of it, is of Flower's older API: .* flwr\.clientapp\.mod"):
        run(FedAvg(), grid_of(older_mod), clipping_norm=NORM)


# ---- On Ray --------------------------------------------------------------------------------------------------------

ON_RAY = """
import sys
from flwr.serverapp import ServerApp
from strategies import FedAvg, RunError
from strategies.flower.internals import simulate
from tests.examples.test_mods import MODS, model, norm
from tests.examples.test_table import numpy_app
server = ServerApp()
@server.main()
def main(grid, context):
    strategy = FedAvg(min_available_nodes=3)
    try:
        result = strategy.start(grid, model(), 1, timeout=500.0, train_config=norm())
    except RunError as error:
        print("refused:", error)
    else:
        print("w =", round(float(result.arrays["w"].numpy()[0]), 4), len(result.evaluate_metrics_clientapp))
simulate(server, numpy_app(MODS[sys.argv[1]]), num_supernodes=3, backend_config={"client_resources": {"num_cpus": 1}})
"""


@pytest.mark.thorough
@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mod", MODS)
def test_on_ray(mod):
    """The whole app has the mod: Flower would wait an hour for each evaluation that a clipping mod loses."""
    done = subprocess.run(
        [sys.executable, "-c", ON_RAY, mod],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    if CELLS["fedavg", mod, True] != "works":
        assert f"refused: {mod}: a mod for secure aggregation waits for" in said, said[-3000:]
    elif mod in CLIPPING:  # 0.3 along (1, 1)
        assert "w = 0.2121 0" in said, said[-3000:]
        assert said.count("no client is asked to evaluate the model") == 1
    else:
        assert "w = 1.5 1" in said, said[-3000:]  # the mean of 2, 3, 4, and half the way there
