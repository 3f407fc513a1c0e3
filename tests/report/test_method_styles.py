"""How methods look: each has a colour and a mark of its own, the same on figures and on the page."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedapp.report import figures
from fedapp.report.cells import cells_of
from fedapp.report.method_styles import COLORS, MethodStyle, styles_of
from fedapp.report.overlay import draw_overlay
from fedapp.report.page.content import page_content
from fedapp.report.recorded import RecordedRun
from strategies import REGISTRY
from tests.report.test_comparison import write_run

# What people see without one kind of cones (Machado, Oliveira and Fernandes 2009, severity 1), in linear RGB.
SIGHT = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no M cones": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no L cones": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no S cones": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def seen(color: str, sight: list[list[float]]) -> Any:
    """Return a colour in CIELAB, (3,), as it is seen."""
    values = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(sight) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.array(to_xyz) @ linear / np.array([0.9505, 1.0, 1.089])
    f = [np.cbrt(each) if each > 0.008856 else 7.787 * each + 16 / 116 for each in (x, y, z)]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_are_told_apart_without_a_kind_of_cones(sight):
    """A difference of about 2.3 is just noticeable; the grey of strategies of one's own is the closest to another."""
    for colors, least in ((COLORS, 10), (COLORS[:-1], 16)):
        for one, other in itertools.combinations(colors, 2):
            assert np.linalg.norm(seen(one, SIGHT[sight]) - seen(other, SIGHT[sight])) > least, (one, other)


def test_each_method_has_a_look_of_its_own():
    looks = dict(zip(REGISTRY, styles_of(REGISTRY), strict=True))
    assert len({(look.color, look.mark) for look in looks.values()}) == len(REGISTRY)
    assert not [name for name, look in looks.items() if look.color == COLORS[-1]]
    assert styles_of(["fedfix", "fedavg"]) == [looks["fedfix"], looks["fedavg"]]


def test_settings_of_one_method_are_variations_of_its_look():
    looks = styles_of(["fedavg"] * 8 + ["scaffold"])
    assert looks[0] == styles_of(["fedavg"])[0]
    assert {look.mark for look in looks[:8]} == {"o"}
    assert len(set(looks)) == 9
    assert looks[1].color == "#003F62"  # 55 % of 0, 114, 178
    assert looks[2].color == "#73B1D5"  # 55 % of these and 45 % of 255


def test_strategies_of_ones_own_are_grey_and_differ_in_their_marks():
    assert [(look.color, look.mark) for look in styles_of(["mine:A", "fedavg", "mine:B", "mine:A"])] == [
        (COLORS[-1], "v"),
        (COLORS[0], "o"),
        (COLORS[-1], "P"),
        ("#434343", "v"),
    ]


def test_figures_and_the_page_have_the_looks(tmp_path, monkeypatch):
    runs = [
        write_run(tmp_path / f"{strategy}-{lr}", [0.0, 1.0], [0.1, 0.5], strategy=strategy, lr=lr)
        for strategy, lr in (("fedfix", 0.1), ("fedavg", 0.1), ("fedavg", 0.2))
    ]
    looks = styles_of(["fedfix", "fedavg", "fedavg"])
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "_save_png", lambda figure, _: drawn.append(figure))
    draw_overlay(Path("none"), cells_of(map(RecordedRun, runs)), ["accuracy"], {"time": 1.0})
    lines = drawn[0].axes[0].get_lines()
    assert [(line.get_color(), line.get_marker()) for line in lines] == [
        (look.color, look.mark) for look in looks
    ]
    content = page_content(runs)
    for shown in (content["runs"], content["settings"]):
        assert [each["look"] for each in shown] == [_in_plotly(look) for look in looks]


def _in_plotly(look: MethodStyle) -> dict[str, Any]:
    return {"color": look.color, "dash": look.dash, "symbol": look.symbol, "marks": 8}
