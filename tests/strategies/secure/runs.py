"""Runs with secure sums of six bare clients, which go away where a test says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message

from strategies import FedAvg, FederatedStrategy, RunError, messages
from strategies.secure import masks_updates
from strategies.secure.openings import Openings

Make = Callable[..., Any]

CENTRES, SIZES = (3.0, 2.0, -1.0, 0.5, 7.0, 1.0), (1, 2, 5, 3, 4, 1)
CLIPPING = 8.0
SECURE = {"secure_sums": True, "secure_clipping": CLIPPING}
PRIVATE = {"dp": "central", "client_weights": "uniform", "dp_noise_multiplier": 0.3, "server_lr": 1.0}


def goes_away(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
    """Fail before the stage that the node's config names."""
    record = message.content.get(messages.SECURE)
    if record is not None and record["stage"] == context.node_config.get("goes"):
        raise RuntimeError("went away")
    return call_next(message, context)


MODS = (goes_away, masks_updates)


class Runs:
    """Runs strategies with or without secure sums."""

    def __init__(self, federation: Make, model: Make, train_config: Make, values_of: Make) -> None:
        self._federation, self._model = federation, model
        self._train_config, self._values_of = train_config, values_of

    def __call__(
        self,
        kind: type[FederatedStrategy] = FedAvg,
        *,
        rounds: int = 3,
        mods: Any = MODS,
        goes: dict[int, str] | None = None,
        describes: bool = True,
        steps: tuple[int, ...] = (),
        seed_of_grid: int = 0,
        state: dict[str, Any] | None = None,
        states: dict[int, Any] | None = None,
        openings: Openings | None = None,
        remember: Path | None = None,
        **options: Any,
    ) -> tuple[list[float], Any, Any]:
        """Return the model's values, the metrics and the grid; go on from ``state``, fill ``states``.

        ``remember``: the folder in which each client remembers the sums of its updates.
        """
        grid = self._federation(CENTRES, SIZES, mods=mods, describes=describes, seed=seed_of_grid)
        for partition, stage in (goes or {}).items():
            grid.node(partition).context.node_config["goes"] = stage
        for partition in range(len(SIZES) if remember else 0):
            grid.node(partition).context.node_config["state-path"] = str(remember / str(partition))
        for partition, number in enumerate(steps):
            grid.node(partition).context.node_config["local-steps"] = number
        strategy = kind(**options)
        strategy.run_options.deterministic_noise = True  # central noise by the seed
        strategy.run_options.openings = openings
        if states is not None:
            strategy.run_options.observer = lambda progress: states.update(
                {progress.aggregation: strategy.state()}
            )
        if state is not None:
            strategy.restore(state)
        result = strategy.start(grid, self._model(1.0, -1.0), rounds, train_config=self._train_config())
        return self._values_of(result.arrays), result.train_metrics_clientapp, grid

    def refuses(self, said: str, *kind: Any, **options: Any) -> None:
        """Assert that a run ends with this error before a client trains."""
        trained = []

        def notes(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
            trained.append(message.metadata.message_type)
            return call_next(message, context)

        with pytest.raises((RunError, ValueError), match=said):
            self(*kind, mods=(notes,), **options)
        assert messages.TRAIN not in trained
