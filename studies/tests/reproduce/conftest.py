"""Experiments small enough for a test."""

from collections.abc import Callable
from typing import Any

import pytest
import tomli_w

from studies.reproduce.plan import Plan

# A run takes a tenth of a second.
TINY = {
    "num-clients": 3,
    "dataset": "digits",
    "model": "logistic",
    "batch-size": 0,
    "num-server-rounds": 2,
}


@pytest.fixture
def plan() -> Callable[..., Plan]:
    """Build a plan over the embedded digits."""

    def build(**changes: Any) -> Plan:
        content = {
            "title": "A test",
            "source": "nowhere",
            "report": "beyond:comparison",
            "settings": {"share": 0.95, "confidence-from": 5},
            "base": TINY,
            "grid": {"seed": [0, 1]},
            "quick": {"note": "one seed", "grid": {"seed": [0]}},
        }
        return Plan.model_validate({**content, **changes})

    return build


@pytest.fixture
def plan_file(plan: Callable[..., Plan], tmp_path) -> Callable[..., str]:
    """Write a plan to a TOML file and return its path."""

    def write(**changes: Any) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(tomli_w.dumps(plan(**changes).model_dump(exclude_none=True)), encoding="utf-8")
        return str(path)

    return write
