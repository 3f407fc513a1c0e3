"""``fedapp report``: what the page is made of, and what a browser makes of it."""

import http.client
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from PIL import Image
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.report.client_tables import Away, ClientsFile, TasksFile, write_away
from fedapp.report.page import LivePage, make_page
from fedapp.report.page.content import LINES, RUNS, page_content
from fedapp.report.page.html import packed, unpacked
from fedapp.report.series import with_extremes

POLL = 2000  # milliseconds between two questions of a page that follows a run
EVIL = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def write_run(
    folder: Path,
    clients: int = 12,
    evaluations: int = 6,
    name: str = "",
    *,
    own: bool = False,
    **config: Any,
) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(len(folder.name))
    places = {"run-name": folder.name, "log-format": "text" if len(folder.name) % 2 else "json"}
    (folder / "config.toml").write_text(tomli_w.dumps({"seed": 0, "lr": 0.1, **places, **config}))
    file = ClientsFile(folder)
    lines = []
    for number in range(evaluations):
        each = np.sort(rng.random(clients))
        lines.append(
            {
                "aggregation": number,
                "time": 1.5 * number,
                "clock": "virtual",
                "loss": 2.0 / (number + 1),
                "accuracy": number / evaluations,
                "bytes-up": 100 * number,
                "bytes-down": 300 * number,
                "client-accuracy-worst-tenth": float(each[0]),
                "staleness-mean": 1.0,
                **({name: 1.0} if name else {}),
            }
        )
        shares = np.full(clients, 1 / clients).tolist()
        columns = {"loss": (2 - each).tolist(), "accuracy": each.tolist(), "participation": [1.0] * clients}
        columns |= {"personal-accuracy": (1 - each / 2).tolist()} if own else {}
        columns |= {"device-seconds": [0.5 * number] * clients, "joules": [number] * clients}
        columns |= {"importance": shares, "expected-share": shares, "observed-share": shares}
        file.append(number, 1.5 * number, columns | {"wall-seconds": [2.0 * number] * clients}, {0: name})
    file.publish(last=True)
    tasks = TasksFile(folder)
    worked = [
        (client, 1.0 * begun, begun + 0.5, 2.0 * begun, 2.0 * begun + 1)
        for begun in range(3)
        for client in range(clients)
    ]
    tasks.add([(*each, "late" if each[0] == 1 else "accepted", None, None) for each in worked])
    tasks.publish(last=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "status": "finished",
        "strategy": "fedavg",
        "reason": name,
        "accuracy": 0.5,
        "bytes-up": 1234567,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    np.savez(
        folder / "partition.npz",
        client_offsets=np.arange(clients + 1) * 10,
        class_counts=rng.integers(0, 9, (clients, 4)),
    )
    mis = rng.random((clients, clients))
    np.savez(folder / "graph.npz", clients=np.arange(clients), misalignment=mis, eigenvalues=np.sort(mis[0]))
    (folder / "log.txt").write_text(f"round 1\n{name}\n")
    return folder


def draw_less(run: Path, *files: str) -> Path:
    """Take away what a browser takes its time to draw, and a test doesn't look at."""
    for name in files or ("graph.npz", "partition.npz", "tasks.parquet"):
        (run / name).unlink()
    return run


def test_numbers_are_those_of_the_folder(tmp_path):
    content = page_content([write_run(tmp_path / "one")])
    (run,) = content["runs"]
    assert run["curves"]["columns"]["loss"] == pytest.approx([2, 1, 2 / 3, 0.5, 0.4, 1 / 3], rel=1e-5)
    assert run["curves"]["columns"]["wall-seconds"] == [0, 2, 4, 6, 8, 10]
    assert run["clients"]["since"]["accuracy"] == 5
    assert run["clients"]["columns"]["accuracy"] == sorted(run["clients"]["columns"]["accuracy"])
    assert run["clients"]["columns"]["weight"] == pytest.approx([1 / 12] * 12, rel=1e-5)
    assert np.shape(run["partition"]["counts"]) == (4, 12)
    assert np.shape(run["graph"]["misalignment"]) == (12, 12)
    assert run["left_out"] == content["left_out"] == []


def test_what_is_too_much_is_thinned_out_and_said(tmp_path):
    run = write_run(tmp_path / "large", clients=3000, evaluations=2)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:1] * 4999 + lines[1:]) + "\n")
    (run / "log.txt").write_text("line\n" * 1000)
    content = page_content([run])["runs"][0]
    clients = content["clients"]
    assert clients["total"] == 3000
    assert len(clients["index"]) == 2000
    assert {0, 2999} <= set(clients["index"])  # the worst and the best
    assert 500 <= len(content["curves"]["columns"]["loss"]) <= 1000
    assert content["curves"]["columns"]["loss"][-1] == 1  # the last evaluation
    assert len(content["log"]) == LINES
    assert len(content["graph"]["index"]) == 300
    said = "\n".join(content["left_out"])
    for what in (
        "1,000 of 3,000 clients",
        "4,500 of 5,000 evaluations: of each stretch those with the lowest and the highest accuracy",
        "600 of 1,000 lines",
        "rows of the graph",
    ):
        assert what in said
    one = write_run(tmp_path / "run-0", 3, 2)
    others = [shutil.copytree(one, tmp_path / f"run-{number}") for number in range(1, RUNS + 2)]
    many = page_content([one, *others])
    assert len(many["runs"]) == RUNS
    assert many["left_out"] == ["2 of 62 runs: the first 60 are shown"]


@pytest.mark.parametrize("size", [0, 100])
@pytest.mark.parametrize("name", ["clients.parquet", "tasks.parquet", "partition.npz", "graph.npz"])
def test_a_damaged_file_is_named_and_all_else_is_shown(tmp_path, name, size):
    runs, part = [write_run(tmp_path / each) for each in ("whole", "damaged")], name.partition(".")[0]
    (runs[1] / name).write_bytes((runs[1] / name).read_bytes()[:size])
    whole, damaged = page_content(runs)["runs"]
    assert whole[part]
    assert not damaged[part]
    (said,) = damaged["left_out"]
    assert said.startswith(f"{runs[1] / name} can't be read (")
    assert "\n" not in said
    assert damaged["curves"]["columns"]["loss"] == whole["curves"]["columns"]["loss"]


def test_a_run_that_has_only_begun_is_shown(tmp_path):
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "config.toml").write_text("seed = 1\n")
    (run,) = page_content([tmp_path / "young"])["runs"]
    assert (run["curves"], run["clients"], run["partition"], run["graph"], run["log"]) == ({}, {}, {}, {}, [])
    assert run["config"] == {"seed": 1}


def test_runs_have_names_of_their_own_as_short_as_can_be(tmp_path):
    runs = ["a/runs/lr-0.1", "b/runs/lr-0.1", "b/runs/lr-0.3", "lr-0.1"]
    for run in runs:
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "config.toml").write_text("seed = 1\n")
    names = [run["name"] for run in page_content([tmp_path / run for run in runs])["runs"]]
    assert names == ["a/runs/lr-0.1", "b/runs/lr-0.1", "lr-0.3", f"{tmp_path.name}/lr-0.1"]


def test_runs_are_called_by_what_tells_them_apart(tmp_path):
    runs = [
        write_run(tmp_path / f"{number}-5d41402abc", strategy=strategy, lr=lr, seed=0)
        for number, (strategy, lr) in enumerate(
            [("fedfix", 0.03), ("fedavg", 0.03), ("fedavg", 0.1), ("fedavg", 0.1)]
        )
    ]
    names = [run["name"] for run in page_content(runs)["runs"]]
    assert names[:2] == ["fedfix lr=0.03", "fedavg lr=0.03"]
    assert names[2:] == ["fedavg lr=0.1 (2-5d41402abc)", "fedavg lr=0.1 (3-5d41402abc)"]  # one and the same


def test_a_run_is_on_the_page_once(tmp_path):
    pytest.importorskip("plotly")
    run = write_run(tmp_path / "one")
    (tmp_path / "link").symlink_to(run)
    out = tmp_path / "page.html"
    named = [str(run), str(tmp_path / "link"), str(run / ".." / "one")]
    done = CliRunner().invoke(app, ["report", *named, "-o", str(out)])
    assert done.exit_code == 0, done.output
    page = out.read_text("utf-8")
    content = json.loads(
        unpacked(page.partition('<script id="content" type="text/plain">')[2].partition("</script>")[0])
    )
    assert [each["name"] for each in content["runs"]] == ["one"]


def test_the_file_asks_for_nothing_and_holds_no_tag_of_others(tmp_path):
    pytest.importorskip("plotly")
    run = write_run(tmp_path / "evil", name=EVIL, model="</script><b>")
    page = make_page(page_content([run]))
    assert "<img src=x" not in page
    assert "</script><b>" not in page
    assert page.count("<script") - page.count("<script>") >= 1
    assert "connect-src 'none'" in page
    assert 'src="http' not in page
    assert "[[" not in page[: page.index("<style>")]


def test_a_packed_text_is_ascii_without_a_tag_and_comes_back():
    for text in ("", "a", "<!--<script>", "é € 😀", *("x" * length for length in range(1, 9))):
        assert unpacked(packed(text)) == text
        assert packed(text).isascii()
        assert "<" not in packed(text)


def test_a_curve_keeps_its_extremes():
    values = [0.0, 5.0, 1.0, 1.0, -2.0, 1.0, math.nan, 1.0, 1.0, 1.0, 7.0, 1.0]
    assert with_extremes(values, 8).tolist() == [0, 1, 4, 5, 8, 10, 11]
    assert with_extremes(values, 12).tolist() == list(range(12))
    assert len(with_extremes(np.sin(np.arange(10_000)).tolist(), 320)) <= 320


def test_the_page_of_eight_runs_is_below_two_megabytes(tmp_path):
    pytest.importorskip("plotly")
    runs = [
        write_run(tmp_path / "of" / "runs" / f"{strategy}-{seed}", 20, 3000, strategy=strategy, seed=seed)
        for strategy in ("fedavg", "fedfix", "scaffold", "feddyn")
        for seed in range(2)
    ]
    out = tmp_path / "new" / "page.html"
    done = CliRunner().invoke(app, ["report", *map(str, runs), "-o", str(out), "--format", "svg"])
    assert done.exit_code == 0, done.output
    assert out.stat().st_size < 2e6
    assert ">scaffold</" in out.with_suffix(".svg").read_text()
    assert out.with_suffix(".png").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "error: nowhere: holds no run, a folder with a config.toml"),
        (["one", "-o", "one/log.txt/a.html"], "error: -o one/log.txt/a.html: can't be written"),
        (["one", "--live", "-o", "a.html"], "error: -o a.html: --live serves the page and writes no file"),
        (["one", "--port", "80"], "error: --port 80: goes with --live"),
        (["one", "--live", "--format", "pdf"], "error: --format pdf: --live writes no figures"),
        (["one", "--width", "wide"], "error: --width wide: is no width of figures; allowed are one-column"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, said, tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "one")
    done = CliRunner().invoke(app, ["report", *arguments])
    assert done.exit_code == 1
    assert said in done.output


def test_without_plotly_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    done = CliRunner().invoke(app, ["report", str(write_run(tmp_path / "one"))])
    assert done.exit_code == 1
    assert "needs Plotly, the extra `report`: pip install '.[report]'" in done.output


# ---- Served ---------------------------------------------------------------------------------------------------


@pytest.fixture
def live(tmp_path):
    pytest.importorskip("plotly")
    page = LivePage([draw_less(write_run(tmp_path / "one"))])
    thread = threading.Thread(target=page.serve)
    thread.start()
    yield page
    page.stop()
    thread.join(30)


def ask(page: LivePage, path: str, **headers: str) -> tuple[int, bytes, str]:
    connection = http.client.HTTPConnection("127.0.0.1", page.server.server_port, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers.get("ETag", "")
    finally:
        connection.close()


def test_what_is_new_is_served_and_what_is_not_is_not(live):
    status, body, tag = ask(live, "/content.json")
    assert status == 200
    assert len(json.loads(body)["runs"][0]["curves"]["columns"]["loss"]) == 6
    assert ask(live, "/content.json", **{"If-None-Match": tag})[0] == 304
    with (live.runs[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"aggregation": 6, "loss": 0.1}) + "\n")
    status, body, _ = ask(live, "/content.json", **{"If-None-Match": tag})
    assert status == 200
    assert json.loads(body)["runs"][0]["curves"]["columns"]["loss"][-1] == 0.1


def test_only_this_machine_is_answered_and_only_the_page_is_served(live):
    assert live.server.server_address[0] == "127.0.0.1"
    assert ask(live, "/", Host="evil.example")[0] == 403
    assert ask(live, "/../config.toml")[0] == 404
    assert ask(live, "/")[0] == 200


@pytest.mark.thorough
def test_an_interrupt_ends_it(tmp_path):
    pytest.importorskip("plotly")
    command = [sys.executable, "-m", "fedapp.cli", "report", str(write_run(tmp_path / "one")), "--live"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("http://127.0.0.1:")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            assert "Traceback" not in errors
        finally:
            process.kill()


# ---- In a browser ---------------------------------------------------------------------------------------------

BROWSER = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("plotly")
    playwright = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("no browser: neither chromium nor google-chrome is there")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=arguments)
        yield browser
        browser.close()


def opened(browser: Any, url: str, **options: Any) -> tuple[Any, list[str]]:
    page, errors = browser.new_page(**options), []
    page.set_default_timeout(120_000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: errors.append(request.url) if "http" in request.url[:4] else None)
    page.clock.install()  # which goes on, and can be put forward
    page.goto(url)
    until(page, "document.body.dataset.drawn")
    return page, errors


def until(page: Any, holds: str) -> None:
    """Wait; the page's policy lets Playwright's own way of it evaluate nothing."""
    deadline = time.monotonic() + 120
    while not page.evaluate(holds):
        assert time.monotonic() < deadline, holds
        page.wait_for_timeout(20)


def written(folder: Path, *runs: Path) -> str:
    path = folder / "report.html"
    done = CliRunner().invoke(app, ["report", *map(str, runs), "-o", str(path)])
    assert done.exit_code == 0, done.output
    return path.as_uri()


DRAWN = ("curve-loss", "curve-accuracy", "clients-loss", "clients-accuracy", "weights", "partition", "graph")
DRAWN += ("spectrum", "fleet", "tasks")


def open_with_all_drawn(browser: Any, url: str, scheme: str, width: int) -> tuple[Any, list[str]]:
    """Open a page of two runs that differ in lr, and check that nothing is missing, too wide or too light."""
    page, errors = opened(browser, url, color_scheme=scheme, viewport={"width": width, "height": 900})
    for name in DRAWN:
        assert page.locator(f"#{name} .main-svg").count() > 0, name
    assert page.locator("#config tr.differs th").all_inner_texts() == ["lr"]
    assert "round 1" in page.locator("#log pre").inner_text()
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    boxes = page.locator(".plot").evaluate_all(
        "all => all.map(p => p.querySelector('.main-svg').clientWidth <= p.clientWidth + 1)"
    )
    assert len(boxes) > 8
    assert all(boxes)
    drawn = "document.querySelector('#{} .plot').layout"
    assert page.evaluate(drawn.format("partition") + ".yaxis.dtick") == 1  # ticks at whole classes
    axes = [page.evaluate(drawn.format(name) + ".xaxis.range") for name in ("fleet", "tasks")]
    assert axes[0] == axes[1]
    return page, errors


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """The page of two runs."""
    folder = tmp_path_factory.mktemp("two")
    return written(folder, write_run(folder / "one"), write_run(folder / "two", lr=0.5))


# A test below opens it dark and wide.
@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 400),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in (("dark", 400), ("light", 1400))),
    ],
)
def test_a_browser_draws_it_all(browser, two_runs, scheme, width):
    _, errors = open_with_all_drawn(browser, two_runs, scheme, width)
    assert errors == []


def test_seeds_are_one_setting_and_two_settings_are_beside_each_other(browser, tmp_path):
    runs = [
        draw_less(write_run(tmp_path / f"{strategy}-{'x' * seed}", strategy=strategy, seed=seed))
        for strategy in ("fedavg", "fedfix")
        for seed in range(2)
    ]
    for factor, run in enumerate(runs, 1):
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        text = "".join(json.dumps({**line, "accuracy": line["accuracy"] / factor}) + "\n" for line in lines)
        (run / "metrics.jsonl").write_text(text)
    page, errors = opened(browser, written(tmp_path, *runs), viewport={"width": 1000, "height": 900})
    drawn = "document.querySelector('#curve-accuracy .plot').data.filter(t => t.name).map(t => [t.name, t.y.at(-1)])"
    means = [["fedavg, 2 seeds", 0.625], ["fedfix, 2 seeds", pytest.approx(5 / 6 * 7 / 24, rel=1e-5)]]
    assert page.evaluate(drawn) == means  # 5/6 (1 + 1/2)/2, 5/6 (1/3 + 1/4)/2
    page.check("input[name=single]")
    names = [name for name, _ in page.evaluate(drawn)]
    assert names[2:] == ["fedavg seed=0", "fedavg seed=1", "fedfix seed=0", "fedfix seed=1"]
    page.locator("#ends summary").click()
    assert page.locator("#ends details tbody tr").count() == 4
    rows = [row.split("\t") for row in page.locator("#two tr").all_inner_texts()]
    assert rows[0] == ["at the end", "fedavg", "fedfix", "difference"]
    assert rows[2] == ["accuracy", "0.625 ± 0.29", "0.243 ± 0.049", "−0.382"]
    top = page.locator("#curve-accuracy").bounding_box()
    assert top["y"] + top["height"] < 900  # scores and curves of both on one screen
    assert page.locator("#config tbody tr").count() == 2  # strategy, seed
    page.locator("#alike").click()
    assert page.locator("#config tbody tr").count() == 5  # and lr, run-name and log-format
    assert page.locator("#config tr.differs th").all_inner_texts() == ["seed", "strategy"]
    assert page.locator("#curves p").inner_text() == "Lines and bands: mean ± 1 s.d. of 2 seeds."
    page.locator("#runs button[aria-pressed]").first.click()
    assert page.locator("#two").is_hidden()
    assert {name.split()[0].strip(",") for name, _ in page.evaluate(drawn)} == {"fedfix"}
    page.emulate_media(media="print")
    assert not page.locator("#log").is_visible()
    assert not page.locator(".png").first.is_visible()
    assert errors == []


def test_runs_are_toggled_the_axis_is_chosen_and_a_chart_is_saved(browser, two_runs, tmp_path):
    page, errors = open_with_all_drawn(browser, two_runs, "dark", 1400)

    def x_of_loss() -> list[Any]:
        return page.evaluate("document.querySelector('#curve-loss .plot').data.map(t => [t.name, t.x[5]])")

    assert x_of_loss() == [["lr=0.1", 5], ["lr=0.5", 5]]
    page.select_option("select[name=axis]", "bytes")
    assert x_of_loss() == [["lr=0.1", 0.002], ["lr=0.5", 0.002]]  # MB
    page.select_option("select[name=axis]", "wall-seconds")
    assert x_of_loss() == [["lr=0.1", 10], ["lr=0.5", 10]]
    page.locator("#runs button[aria-pressed]").first.click()
    assert x_of_loss() == [["lr=0.5", 10]]
    page.select_option("select[name=run]", "lr=0.5")
    assert page.locator("#log h2").inner_text() == "Log of lr=0.5"
    names = page.evaluate(
        "document.querySelector('#clients-accuracy .plot').data.map(t => [t.name, t.y.length])"
    )
    assert names == [["worst tenth", 2], ["the others", 10]]
    by_rank = page.evaluate("Array.from(document.querySelectorAll('[id^=clients-]'), each => each.id)")
    assert by_rank == ["clients-loss", "clients-accuracy"], "what work costs is no metric of a model"
    bars = page.evaluate(
        "document.querySelector('#tasks .plot').data.map(t => [t.name, t.y[0], t.x.slice(0, 2)])"
    )
    assert bars == [  # wall time, as of the curves
        ["at the client", 0, [0, 1]],
        ["ends: accepted", 0, [1, 1]],
        ["ends: late", 1, [1, 3]],
    ]
    with page.expect_download() as saved:
        page.locator("#curve-loss .png").click()
    assert saved.value.suggested_filename == "curve-loss.png"
    saved.value.save_as(tmp_path / "loss.png")
    assert Image.open(tmp_path / "loss.png").size == (2400, 1200)
    assert errors == []


def with_parts(run: Path, clients: int) -> Path:
    """Give a run's tasks parts, and let client 0 be away for the end of each round."""
    file = TasksFile(run)
    file.cut(0)
    every = [(client, 1.0 * begun) for begun in range(3) for client in range(clients)]
    file.add([(c, b, b + 0.5, b, b + 1, "accepted", 0.1, 0.15) for c, b in every])
    file.publish(last=True)
    times = np.arange(3.0)
    write_away(run, Away(np.zeros(3, np.int32), times + 0.75, times + 1, 0.0, 3.0))
    return run


@pytest.fixture(scope="module")
def evil(browser, tmp_path_factory):
    """An open page of a run all of whose texts are tags, and whose tasks have parts; and its errors."""
    folder = tmp_path_factory.mktemp("evil")
    run = with_parts(write_run(folder / "<b>bold", name=EVIL, model=EVIL), 12)
    return opened(browser, written(folder, draw_less(run, "graph.npz", "partition.npz")))


def test_the_parts_of_tasks_and_absences_are_drawn(evil):
    page, errors = evil
    drawn = page.evaluate(
        "document.querySelector('#tasks .plot').data.map(t => [t.name, t.y[0], t.x.slice(0, 2)])"
    )
    assert [line[:2] for line in drawn] == [
        ["away", 0],
        ["receiving the model", 0],
        ["working", 0],
        ["sending the update", 0],
        ["ends: accepted", 0],
    ]
    expected = [[0.75, 1], [0, 0.1], [0.1, 0.35], [0.35, 0.5], [0.5, 0.5]]
    assert [line[2] for line in drawn] == [pytest.approx(each) for each in expected]
    fleet = page.evaluate(
        "document.querySelector('#fleet .plot').data.map(t => [t.name, t.y.slice(0, -1)])"
        ".map(([name, y]) => [name, y.reduce((a, b) => a + b) / y.length])"
    )
    assert [name for name, _ in fleet] == [
        "working",
        "receiving the model",
        "sending the update",
        "waiting",
        "away",
    ]
    means = [0.25, 0.1, 0.15, 0.5 - 0.25 / 12, 0.25 / 12]
    assert [mean for _, mean in fleet] == [pytest.approx(mean, abs=0.005) for mean in means]
    assert errors == []


def test_text_of_others_is_shown_as_text(evil):
    page, errors = evil
    assert page.locator("img, #main b, #runs b").count() == 0
    assert EVIL in page.locator("#log pre").inner_text()
    assert page.locator("#runs button").inner_text() == "<b>bold"
    assert "&lt;script&gt;" in page.evaluate("document.querySelector('#weights .plot').data[0].text[0]")
    page.select_option("select[name=metric]", EVIL)
    assert page.title() == "Federated runs"
    assert page.locator("#curve-chosen .ytitle").inner_html().count("<") == 0
    assert errors == []


@pytest.fixture(scope="module")
def many(browser, tmp_path_factory):
    """An open page of a run of 12 clients and of one of 200, who have models of their own; and its errors."""
    folder = tmp_path_factory.mktemp("many")
    runs = write_run(folder / "one"), with_parts(write_run(folder / "two", 200, own=True), 200)
    for run in runs:
        draw_less(run, "graph.npz", "partition.npz")
    return opened(browser, written(folder, *runs))


def test_the_clients_of_all_runs_are_drawn_from_the_worst_to_the_best(many):
    page, errors = many
    drawn = page.evaluate(
        "document.querySelector('#everyone .plot').data.map(t => [t.name, t.line.dash, t.mode, t.x[0], t.y])"
    )
    assert [line[:3] for line in drawn] == [
        ["one", "solid", "lines+markers"],
        ["two", "dash", "lines"],  # of the same method
        ["two, own models", "dot", "lines"],
    ]
    assert drawn[0][3] == pytest.approx(100 / 24)
    assert all(line[4] == sorted(line[4]) for line in drawn)
    assert len(drawn[2][4]) == 200
    page.locator("#runs button[aria-pressed]").first.click()
    assert page.evaluate("document.querySelector('#everyone .plot').data.length") == 2
    assert errors == []


def test_of_many_clients_the_share_of_time_in_a_state_is_drawn(many):
    page, errors = many
    page.select_option("select[name=run]", "two")
    (kind, lines, most) = page.evaluate(
        "(t => [t.type, t.z.length, Math.max(...t.z.flat())])(document.querySelector('#tasks .plot').data[0])"
    )
    assert (kind, lines, most) == ("heatmap", 100, pytest.approx(1))
    mean = (
        "(z => z.reduce((a, b) => a + b) / z.length)(document.querySelector('#tasks .plot').data[0].z.flat())"
    )
    found = {}
    for state in page.locator("select[name=state] option").all_inner_texts():
        page.select_option("select[name=state]", state)
        found[state] = page.evaluate(mean)
    assert list(found) == ["at work", "working", "receiving", "sending", "waiting", "away"]
    expected = [0.5, 0.25, 0.1, 0.15, 0.5, 0.25 / 200]
    assert list(found.values()) == [pytest.approx(each, abs=0.005) for each in expected]
    assert found["away"] > 0
    assert errors == []


@pytest.mark.thorough
def test_sixty_runs_of_a_thousand_clients_are_drawn(browser, tmp_path):
    runs = [write_run(tmp_path / f"run-{number:02d}", 1000, 200) for number in range(60)]
    url = written(tmp_path, *runs)
    assert (tmp_path / "report.html").stat().st_size < 25e6
    page, errors = opened(browser, url)
    assert len(page.evaluate("document.querySelector('#curve-loss .plot').data")) == 60
    assert "clients: clients evenly spaced by rank are drawn" in page.locator("#left-out").inner_text()
    assert errors == []


def test_the_page_follows_a_run(browser, live):
    page, errors = opened(browser, live.url)
    length = "document.querySelector('#curve-loss .plot').data[0].y.length"
    assert page.evaluate(length) == 6
    with (live.runs[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"aggregation": 6, "time": 9.0, "clock": "virtual", "loss": 0.1}) + "\n")
    page.clock.fast_forward(POLL)
    until(page, f"{length} === 7")
    assert "1234567" in page.locator("#ends").inner_text()
    assert {url for url in errors if not url.startswith(live.url)} == set()
    standing = "document.getElementById('standing').textContent"
    page.route("**/content.json", lambda route: route.abort())
    page.clock.fast_forward(POLL)
    until(page, f"{standing}.startsWith('not followed any more')")
    page.unroute("**/content.json")  # and nothing has changed meanwhile
    page.clock.fast_forward(POLL)
    until(page, f"{standing} === '1 run; this page follows'")
