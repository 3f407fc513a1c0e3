"""What all tests share: nothing that a test writes or starts outlives it."""

import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Two threads that wait for each other on a loaded machine make a small product take milliseconds; child processes
# inherit this. Before numpy and torch are imported, which read it then; tests of strategies don't import torch.
for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ[f"{library}_NUM_THREADS"] = "1"


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """Take all that there is out of the garbage collector's sight: Flower calls it for every array it sends."""
    gc.collect()
    gc.freeze()


def is_thorough(config: pytest.Config) -> bool:
    """Tell whether this run has the thorough tests, too."""
    return "not thorough" not in config.getoption("markexpr")


def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis try fewer examples in the default run."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    for name, examples in (("quick", 25), ("thorough", 200)):
        settings.register_profile(name, max_examples=examples, deadline=None, suppress_health_check=checks)
    settings.load_profile("thorough" if is_thorough(config) else "quick")


@pytest.fixture(scope="session")
def real_data():
    """The folder with real datasets, for tests that skip without it."""
    folder = Path(
        os.environ.get("FEDAPP_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
    )
    if not folder.is_dir():
        pytest.skip("no real data; set FEDAPP_TEST_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def thorough(pytestconfig):
    """Whether to go through all there is, as ``make test-all`` does; a default run takes a part."""
    return is_thorough(pytestconfig)


def pytest_sessionfinish() -> None:
    """What is left is collected at the exit, or the libraries in C++ warn of leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def own_environment(tmp_path_factory):
    """Keep caches in a folder of the session, and Flower quiet and off the network; child processes inherit it."""
    values = {
        "FEDAPP_CACHE": str(tmp_path_factory.mktemp("cache")),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_worker_niceness": "0",  # or a test beside it starves Ray's workers
        "COLUMNS": "120",
    }
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    yield
    for key, value in before.items():
        os.environ.pop(key) if value is None else os.environ.update({key: value})


@pytest.fixture(autouse=True)
def no_figures(request, monkeypatch):
    """Draw nothing at the end of the app's runs in this process: figures take several times as long as those.

    A test of a run's figures is marked ``figures``. Tests of strategies don't import the app.
    """
    if "strategies" in request.path.relative_to(request.config.rootpath).parts:
        return
    if not request.node.get_closest_marker("figures"):
        monkeypatch.setattr("fedapp.server.journal.draw_figures", lambda *_: None)


@pytest.fixture
def short_forecasts(monkeypatch):
    """Foresee how often clients contribute from few of their tasks: no number that a test expects depends on it.

    A run whose clients come and go, or fail, simulates 512 tasks of each client for its expected shares.
    """
    monkeypatch.setattr("strategies.timing.cycles.PLAYED", 16)


@pytest.fixture
def run_app(tmp_path):
    """Run the app in this process, on an engine by name or on a Grid; return the run's folder."""
    from fedapp import server
    from fedapp.config import RunConfig
    from fedapp.engine.run import make_grid

    def run(
        config: Mapping[str, Any] | None = None,
        clients: int = 4,
        *,
        name: str = "run",
        engine: Any = "sequential",
        **values: Any,
    ) -> Path:
        given = {**(config or {}), **{key.replace("_", "-"): value for key, value in values.items()}}
        if "resume" not in given:
            given = {"results-dir": str(tmp_path), "run-name": name, **given}
        grid = make_grid(engine, clients) if isinstance(engine, str) else engine
        return server.run(grid, server.prepare(RunConfig.load(given), clients)).path

    return run


@pytest.fixture(scope="session")
def repository():
    """The root of the repository."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def unused_ports():
    """The function that finds TCP ports on loopback that nobody listens on."""
    from fedapp.deploy.local import free_ports

    return free_ports


@pytest.fixture
def free_port(unused_ports):
    """One such port."""
    return unused_ports(1)[0]
