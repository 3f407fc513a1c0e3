"""What a paper takes: figures in its columns and fonts, and tables of LaTeX with their references."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.config.citations import bibliography, paper_name, papers_of
from fedapp.report.cells import Tuning, cells_of
from fedapp.report.comparison import Comparison
from fedapp.report.overlay import question
from fedapp.report.paper import GIVEN, PaperTable, latex_of
from fedapp.report.recorded import RecordedRun
from strategies import REGISTRY
from strategies.core.about import About
from tests.report.test_comparison import write_run

DOCS = Path(__file__).parents[2] / "docs"


def levels(
    folder: Path, by_setting: dict[tuple[str, float], Sequence[float]], **config: object
) -> list[Path]:
    """Write a run of each setting, (strategy, lr), and seed, with the accuracy at its end."""
    return [
        write_run(
            folder / f"{strategy}-{lr}-{seed}",
            [0.0, 10.0],
            [0.1, value],
            **{"strategy": strategy, "lr": lr, "seed": seed, "time-budget": 10.0, **config},
        )
        for (strategy, lr), values in by_setting.items()
        for seed, value in enumerate(values)
    ]


@pytest.fixture
def apart(tmp_path):
    """Three methods, of which FedDyn is ahead of both others by about as much on every seed."""
    scores = {
        ("fedavg", 0.1): [0.50, 0.52, 0.54, 0.52],
        ("feddyn", 0.3): [0.91, 0.93, 0.94, 0.92],
        ("fedbuff", 0.1): [0.60, 0.62, 0.64, 0.62],
    }
    return levels(tmp_path / "runs", scores)


TUNED = Tuning(("lr",), "lr tuned for each setting by accuracy on 2 other seeds", "accuracy")


def comparison_of(paths: Sequence[Path], tuning: Tuning = TUNED) -> Comparison:
    return Comparison([RecordedRun(path) for path in paths], tuning)


# ---- Citations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REGISTRY)
def test_each_method_has_a_paper_that_the_references_have(name):
    papers = papers_of(name)
    assert papers
    references = " ".join((DOCS / "references.md").read_text("utf-8").split()).lower()
    source = About.of(REGISTRY[name]).source
    for paper in papers:
        assert paper.title.lower() in references
        assert paper.year in source
        assert paper.surname.split()[-1] in source
        assert f"{{{paper.key}," in bibliography([name])
    assert source.removeprefix("The ").lower().startswith(paper_name(name).lower())


def test_keys_are_of_one_paper_each_and_entries_have_its_facts():
    by_key = {paper.key: paper for name in REGISTRY for paper in papers_of(name)}
    assert len({paper.title for paper in by_key.values()}) == len(by_key)
    assert bibliography(["fedfix", "async-fedavg", "mine:Own"]) == (
        "@article{fraboni2023general,\n"
        "  author = {Y. Fraboni and R. Vidal and L. Kameni and M. Lorenzi},\n"
        "  title = {{A general theory for federated optimization with asynchronous and heterogeneous clients "
        "updates}},\n"
        "  year = {2023},\n  journal = {JMLR},\n  volume = {24},\n}\n"
    )
    assert "  author = {X. Chang and others},\n" in bibliography(["ace"])
    assert [paper_name(name) for name in ("scaffold", "ca2fl", "spectral", "mine:Own")] == [
        "SCAFFOLD",
        "CA²FL",
        "Spectral-graph perturbed method",
        "Own",
    ]
    assert papers_of("mine:Own") == []


# ---- Tables ----------------------------------------------------------------------------------------------------


def test_a_table_has_methods_by_result_tuned_keys_as_columns_and_the_leader_in_bold(apart):
    shown = PaperTable.of(comparison_of(apart), "accuracy")
    assert shown.head == ["method", "lr", "at time 10", "at round 1", "at 2 MB"]
    assert [(row.name, *row.cells[:2], row.leads) for row in shown.rows] == [
        ("FedDyn", "0.3", "0.925 ± 0.013", True),
        ("FedBuff", "0.1", "0.620 ± 0.016", False),
        ("FedAvg", "0.1", "0.520 ± 0.016", False),
    ]
    assert shown.caption == (
        "Accuracy on digits (mlp), mean ± standard deviation over n = 4 seeds; each run had 10 s of virtual time; "
        "lr tuned for each setting by accuracy on 2 other seeds. Bold: what is apart from every other (paired "
        "t-tests at time 10 over 4 seeds, p-values by Holm over all 3 pairs, level 0.05). Each run's last "
        "evaluation up to there, untested: at round 1, at 2 MB."
    )
    for path in apart:
        config = path / "config.toml"
        config.write_text(config.read_text() + 'num-clients = 20\ntime-scenario = "F80"\n')
    caption = PaperTable.of(comparison_of(apart, Tuning()), "accuracy").caption
    assert "4 seeds; 20 clients, the fastest 5 times as fast as the slowest; each run had 10 s" in caption
    text = latex_of(comparison_of(apart))
    assert r"\textbf{FedDyn~\cite{acar2021federated}} & 0.3 & \textbf{0.925 $\pm$ 0.013} & 0.925" in text
    assert text.count(r"\textbf") == 2
    given = PaperTable.of(comparison_of(apart), "accuracy", GIVEN)
    assert [row.name for row in given.rows] == ["FedAvg", "FedDyn", "FedBuff"]


def test_keys_that_were_not_tuned_are_in_the_names_and_nothing_is_bold_where_none_leads(tmp_path):
    scores = {("fedavg", 0.1): [0.5, 0.9, 0.6], ("fedavg", 0.2): [0.6, 0.8, 0.7]}
    shown = PaperTable.of(comparison_of(levels(tmp_path, scores), Tuning()), "accuracy")
    assert [(row.name, row.leads) for row in shown.rows] == [
        ("FedAvg, lr=0.2", False),
        ("FedAvg, lr=0.1", False),
    ]
    bold = "Nothing is bold, as none is apart from every other (paired t-test at time 10 over 3 seeds, level 0.05)."
    assert bold in shown.caption
    single = levels(tmp_path / "one", {("fedavg", 0.1): [0.5], ("fedfix", 0.1): [0.6]})
    one = PaperTable.of(comparison_of(single), "accuracy")
    assert "Nothing is bold: no test is possible." in one.caption
    assert ", one seed; each run had 10 s of virtual time" in one.caption


def test_legends_leave_out_keys_that_were_tuned(apart, tmp_path):
    cells = cells_of(map(RecordedRun, apart), TUNED)
    assert [cell.label for cell in cells] == ["fedavg", "feddyn", "fedbuff"]
    assert [cell.name for cell in cells] == ["fedavg lr=0.1", "feddyn lr=0.3", "fedbuff lr=0.1"]
    twice = levels(tmp_path / "twice", {("fedavg", 0.1): [0.5], ("fedavg", 0.2): [0.6]})
    assert [cell.label for cell in cells_of(map(RecordedRun, twice), TUNED)] == ["lr=0.1", "lr=0.2"]


# ---- Figures ---------------------------------------------------------------------------------------------------


def test_titles_name_what_curves_show(apart):
    cells = cells_of(map(RecordedRun, apart))
    assert question(cells, ["accuracy", "loss"], ["time"]) == "Test accuracy and loss over virtual time"
    assert question(cells, ["rmse"], ["aggregation", "bytes"]) == "Test rmse over rounds and bytes sent"
    assert (
        question(cells, ["client-loss-mean"], ["time"])
        == "Client-loss-mean (training rows) over virtual time"
    )


@pytest.mark.parametrize(("width", "inches", "panels"), [("one-column", 3.5, 1), ("two-columns", 7.16, 3)])
def test_a_figure_has_the_width_and_the_font_of_a_paper(apart, tmp_path, width, inches, panels):
    out = tmp_path / "out"
    options = ["--format", "pdf,svg", "--width", width, "--font", "serif", "--font-size", "7"]
    done = CliRunner().invoke(app, ["compare", *map(str, apart), "-o", str(out), *options])
    assert done.exit_code == 0, done.output
    with Image.open(out / "comparison.png") as image:
        assert image.width == round(300 * inches)
    drawn = (out / "comparison.svg").read_text()
    size = re.search(r'<svg [^>]*width="([\d.]+)pt"', drawn)
    assert size is not None
    assert float(size[1]) == pytest.approx(72 * inches, abs=1)
    assert drawn.count(">virtual time</") == 1
    assert drawn.count('id="axes_') == panels
    assert ">lines and bands: mean ± 1 s.d. of 4 seeds</" in drawn
    assert "font-size: 7px; font-family: 'DejaVu Serif'" in drawn
    pdf = (out / "comparison.pdf").read_bytes()
    assert b"/Type0" in pdf or b"/CIDFontType2" in pdf  # TrueType, whose text is text
    assert b"/Type3" not in pdf


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--width", "wide"], "--width wide: is no width of figures; allowed are one-column, two-columns"),
        (["--font-size", "99"], "--font-size 99: must be from 4 to 24 points"),
        (
            ["--font", "None Such"],
            "--font None Such: isn't installed; allowed are sans-serif, serif, monospace, and",
        ),
        (["--latex", "--order", "best"], "--order best: is no order of settings; allowed are result, given"),
        (["--order", "given"], "--order given: goes with --latex or --markdown"),
    ],
)
def test_what_cannot_be_is_one_line(apart, tmp_path, options, said):
    done = CliRunner().invoke(app, ["compare", *map(str, apart), "-o", str(tmp_path / "out"), *options])
    assert done.exit_code == 1
    assert f"error: {said}" in done.output
    done = CliRunner().invoke(app, ["compare", *map(str, apart), "--width", "one-column"])
    assert done.output.strip() == "error: --width one-column: goes with --out, which has the figure"


PAPER = r"""
\documentclass{article}
\usepackage{booktabs,graphicx}
\begin{document}
\input{table.tex}
\noindent\includegraphics{comparison.pdf}
\bibliographystyle{plain}
\bibliography{methods}
\end{document}
"""


@pytest.mark.skipif(not (shutil.which("pdflatex") and shutil.which("bibtex")), reason="no LaTeX is installed")
def test_table_figure_and_references_are_one_page_of_latex(apart, tmp_path):
    out = tmp_path / "out"
    options = ["--latex", "--format", "pdf", "--width", "one-column"]
    done = CliRunner().invoke(app, ["compare", *map(str, apart), "-o", str(out), *options])
    assert done.exit_code == 0, done.output
    (out / "paper.tex").write_text(PAPER)
    latex = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper"]
    for command in (latex, ["bibtex", "paper"], latex, latex):
        made = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stdout
    assert "Output written on paper.pdf (1 page" in made.stdout
    assert not re.search("undefined|Overfull", made.stdout)
