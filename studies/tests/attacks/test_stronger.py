"""Attacks that know the bounds, by hand, and one whole run of each kind on scikit-learn's digits."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from strategies.flower.arrays import Layout
from strategies.updates.buffers import Buffers
from studies.attacks.cell import OFF, Cell, outcome
from studies.attacks.hostile import HONEST, STRONGER, Lie
from studies.attacks.problem import IID
from studies.attacks.stronger import cells

BASE = np.array([1.0, 1.0])
KNOWN = [np.array([3.0, 4.0]), np.array([1.0, 4.0])]  # mean (2, 4), deviation (1, 0), 2 apart


def sent(name: str, **lie: object) -> np.ndarray:
    layout, rng = Layout.of(ArrayRecord({"w": Array(BASE)})), np.random.default_rng(0)
    made = Lie(layout, Buffers.of(layout, ()), BASE, BASE + KNOWN[0], KNOWN[0], rng, known=KNOWN, **lie)
    send = STRONGER[name].sends
    assert send is not None
    return np.asarray(send(made) - BASE)


def test_attacks_send_what_their_words_say():
    assert sent("alie") == pytest.approx([0.5, 4.0])
    assert sent("last-move", moved=np.array([0.0, 2.0])) == pytest.approx([0.0, -7.5])  # 1.5 × 5
    assert sent("colluders") == pytest.approx(-7.5 * np.array([2.0, 4.0]) / 20**0.5)
    against = sent("min-max")
    assert max(np.linalg.norm(against - each) for each in KNOWN) == pytest.approx(2.0, abs=0.02)
    assert np.linalg.norm(against - [2.0, 4.0]) > 0.1


def test_a_patch_is_learnt_and_a_class_forgotten_without_protection():
    found = {
        attack: outcome(Cell(IID, 5, 1, "fedavg", OFF, attack, False, 0), "")
        for attack in (HONEST, "backdoor", "one-class")
    }
    assert found[HONEST].backdoor < 0.2 < 0.6 < found["backdoor"].backdoor
    assert found["one-class"].one_class < found[HONEST].one_class


def test_honest_runs_come_first():
    known = set()
    for cell in cells():
        own = cell.division, cell.clients, cell.method
        assert cell.attack == HONEST or own in known
        known.add(own)
