"""What tests of several methods share."""

from typing import Any

import numpy as np
import pytest


@pytest.fixture
def go(request, federation, model, train_config):
    """Run a method on quadratics from w = 1, of the module's centres, sizes and γ; return models, grid, strategy."""
    module = request.module

    def run(
        kind: Any, rounds: int, *, grid: Any = None, start: float = 1.0, steps: int = 1, **options: Any
    ) -> tuple[np.ndarray, Any, Any]:
        grid, seen = grid or federation(module.CENTRES, module.SIZES), list[float]()
        strategy = kind(
            observer=lambda progress: seen.append(float(progress.arrays["w"].numpy()[0])),
            fraction_evaluate=0.0,
            **{"min_clients": 1, "eval_every": 1, "server_lr": 1.0} | options,
        )
        config = train_config(steps, module.GAMMA)
        strategy.start(grid, model(start), num_rounds=rounds, timeout=5.0, train_config=config)
        return np.array(seen), grid, strategy

    return run
