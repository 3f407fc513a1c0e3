"""What the README and the guides name, there is."""

import re
import sys
import types

import numpy as np
import pytest
from safetensors.torch import load_file

from fedapp.client.site_rules import RULES
from fedapp.config import RunConfig, defaults
from fedapp.config.methods import table
from fedapp.server import prepare
from strategies import REGISTRY, SynchronousStrategy
from strategies.core.about import About
from strategies.flower.arrays import Layout
from strategies.updates.compression import size_of
from tests.docs.pages import GUIDES, blocks_of, text_of
from tests.runs import lines_of, same_files

# A letter of a formula: one with an index, or one of those that stand alone.
LETTER = r"(?<![\w−-])(?:[A-Za-zα-ωΔ]_[a-z]\b|Δt\b|[BCDELRWchmwαβγδεηκτω](?![\w.-]))"


def own_strategy(name: str, monkeypatch: pytest.MonkeyPatch) -> type:
    """Return a class of docs/own-strategy.md."""
    page = blocks_of("docs/own-strategy.md")
    (code,) = [block.code for block in page if block.language == "python" and f"class {name}(" in block.code]
    names: dict = {"__name__": "guide"}
    monkeypatch.setitem(sys.modules, "guide", types.ModuleType("guide"))
    exec(code, names)
    return names[name]


def test_the_step_of_each_layer_is_bounded(run_app, monkeypatch):
    monkeypatch.setitem(REGISTRY, "layers", own_strategy("Layers", monkeypatch))

    def model(strategy, **keys):
        run = run_app({"strategy": strategy, "num-server-rounds": 1, **keys}, name=strategy)
        return {name: array.double() for name, array in load_file(run / "model.safetensors").items()}

    loose, bounded = model("fedavg", lr=0.5), model("layers", **{"lr": 0.5, "layer-bound": 0.2})
    config = RunConfig.load({"strategy": "fedavg", "lr": 0.5})
    start = prepare(config, 4).model.state_dict()
    norms = {name: float((array - start[name]).norm()) for name, array in loose.items()}
    assert min(norms.values()) < 0.2 < max(norms.values())
    for name, norm in norms.items():
        wanted = start[name] + (loose[name] - start[name]) * min(1, 0.2 / norm)
        assert bounded[name].numpy() == pytest.approx(wanted.numpy(), abs=1e-6)


def test_the_scheme_of_ones_own_is_a_strategy_of_the_app(run_app, monkeypatch):
    monkeypatch.setitem(REGISTRY, "mine", own_strategy("HalfLife", monkeypatch))

    mine, custom = (
        run_app({"strategy": strategy, "half-life": 2.0, "num-server-rounds": 6}, name=name)
        for name, strategy in (("mine", "mine"), ("custom", "custom.half_life:HalfLife"))
    )
    assert same_files(mine, custom)
    assert lines_of(mine)[-1]["weights-distance"] > 0.1


# What is set beside the run config, or is a key of a strategy on a page.
OTHERS = {
    "half-life",
    "layer-bound",
    "num-supernodes",
    "client-resources-num-gpus",
    "client-resources-num-cpus",
    "init-args-num-cpus",
}


@pytest.mark.parametrize("page", GUIDES)
def test_every_key_that_is_set_exists(page):
    shown = set(re.findall(r"(?<![\w-])([a-z0-9]+(?:-[a-z0-9]+)+)(?: = |=)", text_of(page)))
    assert shown <= set(defaults()) | OTHERS | set(RULES) | {"num-clients", "tuning-seeds", "same-upwards"}


def test_the_table_of_methods_is_the_registrys():
    assert table() in text_of("docs/methods.md")


@pytest.mark.parametrize("page", ["README.md", "docs/methods.md", "CHANGELOG.md"])
def test_the_methods_are_counted_alike_on_all_pages(page):
    words = " ".join(text_of(page).split())
    assert set(re.findall(r"\b(\d+) methods\b", words)) == {str(len(REGISTRY))}
    rounds = sum(issubclass(kind, SynchronousStrategy) for kind in REGISTRY.values())
    for synchronous, others in re.findall(
        r"\b(\d+) (?:work )?in rounds and (\d+) (?:are )?asynchronous", words
    ):
        assert (int(synchronous), int(others)) == (rounds, len(REGISTRY) - rounds)


def test_the_sheet_of_letters_has_every_letter_before_the_first_formula():
    before, sheet, after = re.split(
        r"^## (?:Letters and words|All methods)\n", text_of("docs/methods.md"), flags=re.M
    )
    assert not re.search(LETTER, before)
    told = {
        letter for row in re.findall(r"^\| ([^|]+) \|", sheet, re.M) for letter in re.findall(LETTER, row)
    }
    used = re.findall(LETTER, re.sub(r"`[^`]*`|\]\([^)]*\)", "", after))
    assert {letter.replace("_j", "_i") for letter in used} <= told
    assert {
        "W",
        "w_i",
        "d_i",
        "p_i",
        "q_i",
        "P_i",
        "τ_i",
        "τ_c",
        "M_c",
        "m",
        "L",
        "B",
        "R",
        "u_i",
        "h_i",
    } <= told


def test_every_method_says_its_rule_and_where_it_helps():
    for kind in REGISTRY.values():
        about = About.of(kind)
        assert re.search(r"\d{4}", about.source)
        assert about.new_model
        assert about.rule
        assert about.helps


def test_every_paper_that_a_method_names_is_in_the_references():
    rows = [line for line in text_of("docs/references.md").splitlines() if line.startswith("- ")]
    for kind in REGISTRY.values():
        cited = re.findall(r"([^\W\d_]+)(?: et al\.| and [^\W\d_]+)? (\d{4})", About.of(kind).source)
        assert cited
        for author, year in cited:
            assert any(author in row and year in row for row in rows), f"{author} {year}"


@pytest.mark.parametrize("page", ["README.md", "docs/methods.md"])
def test_every_strategy_is_named(page):
    text = text_of(page)
    assert set(re.findall(r"\bstrategy=([a-z0-9-]+)(?![\w.:-])", text)) - {"custom"} <= set(REGISTRY)


def test_the_two_commands_and_the_readmes_size():
    text = text_of("README.md")
    assert re.search(r"^make run\b", text, re.M)
    assert re.search(r"^make test\b", text, re.M)
    assert len(text.splitlines()) <= 120


def test_the_bytes_of_compressed_updates_are_those_of_the_mlp():
    names = ("1.weight", "1.bias", "3.weight", "3.bias")
    layout = Layout(names, ((128, 64), (128,), (10, 128), (10,)), (np.dtype(np.float32),) * 4)
    rows = re.findall(r"^\| ([a-z0-9:.]+) \| ([0-9,]+) \|", text_of("docs/compression.md"), re.M)
    assert len(rows) == 7
    for name, size in rows:
        assert int(size.replace(",", "")) == size_of(layout, name)
