"""The benchmark of a round's work on the server: each kind aggregates the models of all clients."""

import sys

import pytest

from studies.benchmarks import server_round


def test_each_kind_is_a_row_beside_flowers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        ["server_round", "--clients=3", "--size=20", "--repeats=1", "--kinds", *server_round.KINDS],
    )
    server_round.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], float(row[1]) >= 0) for row in rows] == [(kind, True) for kind in server_round.KINDS]
    assert float(rows[0][4]) == 1.0
