"""Sizes that clients tell by their replies alone: they count as those that clients describe themselves with."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from strategies import REGISTRY, AsyncFedAvg, FedAMP, FedAvg, FedDyn, Mifa, Spectral
from strategies.testing import MemoryGrid

CENTRES, SIZES = (3.0, 2.0, -1.0), (1, 2, 5)
# Spectral weighs clients by how alike they are.
ROUNDS = [kind for kind in REGISTRY.values() if kind.has_rounds and kind is not Spectral]


class Clients:
    """Clients without the handler, or with it: client i moves half the way to c_i and says that it has n_i."""

    def __init__(self, centres: Any = CENTRES, sizes: Any = SIZES, *, describe: bool = False) -> None:
        self.sizes, self.fail = list(sizes), set[int]()
        self.states: list[Any] = []
        self.after: Callable[[int], None] = lambda number: None
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            i = int(context.node_config["partition-id"])
            if i in self.fail:
                raise RuntimeError("no memory")
            start = message.content.array_records["arrays"]["w"].numpy()
            metrics = MetricRecord({"num-examples": self.sizes[i]})
            arrays = ArrayRecord({"w": Array(start + 0.5 * (centres[i] - start))})
            return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

        if describe:

            @app.query("describe")
            def described(message: Message, context: Context) -> Message:
                i = int(context.node_config["partition-id"])
                metrics = MetricRecord({"partition-id": i, "num-examples": self.sizes[i]})
                return Message(RecordDict({"metrics": metrics}), reply_to=message)

        number = len(centres)
        self.grid = MemoryGrid(
            app, [{"partition-id": i} for i in range(number)], node_ids=[10 * (i + 1) for i in range(number)]
        )

    def run(self, kind: Any, rounds: int = 1, state: Any = None, **options: Any) -> tuple[list[float], Any]:
        """Return the models of a run from w = 1, or from a state, and its strategy; ``states`` has those after it."""
        seen: list[float] = []

        def note(progress: Any) -> None:
            seen.append(float(progress.arrays["w"].numpy()[0]))
            self.states.append(deepcopy(strategy.state()))
            self.after(progress.aggregation)

        strategy = kind(observer=note, **{"min_clients": 1, "fraction_evaluate": 0.0, **options})
        if state is not None:
            strategy.restore(state)
        self.result = strategy.start(self.grid, ArrayRecord({"w": Array(np.ones(2))}), num_rounds=rounds)
        return seen, strategy


# ---- In rounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ROUNDS)
def test_a_method_of_rounds_does_the_same_with_the_handler_and_without(kind):
    told, strategy = Clients().run(kind, 3)
    described, _ = Clients(describe=True).run(kind, 3)
    assert told == pytest.approx(described, rel=1e-14)
    assert strategy.session.client_weights() == {0: 1 / 8, 1: 2 / 8, 2: 5 / 8}


# From w = 1, the updates are 0 and 1 with 100 and 300 examples: Σ p_i Δ_i = 0.75, which FedDyn goes twice.
@pytest.mark.parametrize(("kind", "value"), [(Mifa, 1.75), (FedAMP, 1.75), (FedDyn, 2.5), (FedAvg, 1.75)])
def test_the_first_round_goes_by_the_sizes_that_it_brings(kind, value):
    values, strategy = Clients((1.0, 3.0), (100, 300)).run(kind)
    assert values[-1] == pytest.approx(value)
    assert strategy.session.client_columns()["importance"] == [0.25, 0.75]


def test_a_client_counts_by_what_it_said_last_as_with_flower():
    clients = Clients((1.0, 3.0), (1, 1))
    clients.after = lambda number: clients.sizes.__setitem__(1, 3)
    values, strategy = clients.run(FedAvg, 2)
    assert values == pytest.approx([1, 1 + 3 / 4, 1.75 + (0.5 * -0.75 + 3 * 0.5 * 1.25) / 4])
    assert strategy.session.client_weights() == {0: 0.25, 1: 0.75}


def test_without_rounds_too():
    clients = Clients((1.0, 3.0), (1, 1))  # of which 0 is the fast one
    clients.after = lambda number: clients.sizes.__setitem__(0, 3 if number >= 6 else 1)
    _, strategy = clients.run(AsyncFedAvg, 6)
    assert strategy.session.client_weights() == {0: 0.5, 1: 0.5}
    clients.sizes[0] = 1
    _, strategy = clients.run(AsyncFedAvg, 12)
    assert strategy.session.client_weights() == {0: 0.75, 1: 0.25}
    _, strategy = Clients((1.0, 3.0), (3, 1)).run(AsyncFedAvg, 13, state=clients.states[-1])
    assert strategy.session.client_weights() == {0: 0.75, 1: 0.25}


def test_who_is_away_counts_by_what_it_said_before():
    # Updates 0 and 1, then client 0's alone: −0.375, while client 1's 1 counts as it did.
    clients = Clients((1.0, 3.0), (100, 300))
    clients.after = lambda number: clients.fail.update({1} if number else set())
    values, _ = clients.run(Mifa, 2)
    assert values[1:] == pytest.approx([1.75, 1.75 + 0.25 * -0.375 + 0.75 * 1.0])


def test_a_run_that_goes_on_still_knows_the_sizes():
    options = {"fraction_train": 0.34, "min_train_nodes": 1, "seed": 5}
    whole, _ = (clients := Clients()).run(FedAMP, 6, **options)
    rest, _ = Clients().run(FedAMP, 6, state=clients.states[3], **options)
    assert clients.states[3]["told-sizes"]
    assert rest == whole[4:]


# ---- Safeguards ----------------------------------------------------------------------------------------------------


def test_clients_that_fail_do_not_bound_the_sizes_of_the_others(caplog):
    clients = Clients((-1.0, *[3.0] * 8), (10, *[100] * 8))
    clients.fail = {1, 2, 3, 4}
    values, _ = clients.run(FedAvg, safeguards="on", norm_ratio_bound=0.0)
    assert values[1] == pytest.approx(1 + (10 * -1 + 4 * 100 * 1) / 410)
    assert "says it has" not in caplog.text


def test_a_round_in_which_most_fail_is_no_end():
    clients = Clients((1.0, 3.0, 3.0, 3.0, 3.0), (100, 300, 300, 300, 300))
    clients.fail = {2, 3, 4}
    values, _ = clients.run(FedAvg, safeguards="on", norm_ratio_bound=0.0)
    assert values[1] == pytest.approx(1.75)
