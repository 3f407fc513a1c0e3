"""A terminal of any encoding shows what there is to be shown."""

import codecs
import os
import subprocess
import sys

import pytest

from fedapp.terminal import in_ascii


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0.85 ± 0.07", "0.85 +- 0.07"),
        ("w ← w − γ g", "w <- w - gamma g"),
        ("w̄_t, Müller", "w_t, Muller"),
        ("Σ p_i ≤ 1 …", "sum p_i <= 1 ..."),
        ("\N{SNOWMAN}", "?"),
    ],
)
def test_signs_and_letters_have_names_in_ascii(text, shown):
    codecs.register_error("test.in-ascii", in_ascii)
    assert text.encode("ascii", "test.in-ascii") == shown.encode()


def test_the_command_answers_without_utf_8():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "fedapp.cli", "methods", "fedavg"]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert done.stdout.isascii()
    assert not done.stderr
