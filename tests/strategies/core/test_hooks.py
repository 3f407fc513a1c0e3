"""What a method of one's own can be made of: each hook in a small scheme whose run is worked out by hand.

The three clients of the fixture: p = (1, 2, 5)/8, Δ_i = (c_i − w)/2 with c = (3, 2, −1), F80: τ = (.2, .6, 1).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from examples.methods import FedAsync, FedNova, PowerOfChoice, Ringmaster, Scaffold
from strategies import AsynchronousConfig, AsynchronousStrategy, FedAvg, FedBuff, Progress, RunError, streams
from strategies.clients.roster import Client
from strategies.clock import VirtualClock
from strategies.events.tasks import ClientState
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.updates.pipeline import Contribution

# SCAFFOLD, FedAsync and others are the examples'.


# ---- FedBuff with a discount for staleness, and so many at work --------------------------------------------


@dataclass(frozen=True)
class ConcurrentFedBuffConfig(AsynchronousConfig):
    """m contributions make a model, at most M_c clients are at work."""

    aggregation_weights: str = "identical"
    buffer_size: int = 2
    concurrency: int = 3


class ConcurrentFedBuff(AsynchronousStrategy):
    """FedBuff (Nguyen et al. 2022, algorithm 1): Σ (1 + δ_i)^−½ Δ_i / m; a free client drawn at random goes next."""

    Config = ConcurrentFedBuffConfig
    config: ConcurrentFedBuffConfig

    def ready(self, arrived: int) -> bool:
        return arrived >= self.config.buffer_size

    def weigh(self, contributions: Sequence[Contribution]) -> list[float]:
        return [(1 + c.staleness) ** -0.5 / self.config.buffer_size for c in contributions]

    def select_idle(self, free: Sequence[ClientState]) -> list[ClientState]:
        idle = [
            m
            for m in self.session.task_table.active_clients
            if m.is_available and not self.session.task_table.busy(m)
        ]
        places = self.config.concurrency - len(self.session.task_table.tasks)
        rng = streams.generator(self.config.seed, "next-clients", self.session.task_table.dispatched)
        return [idle[i] for i in rng.choice(len(idle), min(places, len(idle)), replace=False)]


# ---- The last update of every client -----------------------------------------------------------------------


class AllClientCache(AsynchronousStrategy):
    """At every arrival h_j ← Δ_j and W ← W + Σ p_i h_i (Gu et al. 2021), once all have answered."""

    def ready(self, arrived: int) -> bool:
        return all(member.answers for member in self.session.task_table.active_clients)

    def weigh(self, contributions: Sequence[Contribution]) -> list[float]:
        return [self.session.client_weights()[c.client.index] for c in contributions]

    def transform_update(self, contribution: Contribution) -> Vector:
        self.session.client_vectors("updates").put(contribution.client.index, contribution.update)
        return contribution.update

    def server_update(self, total: Vector) -> Vector:
        return self.session.client_vectors("updates").weighted_sum(self.session.client_weights())


# ---- Late work, whole models -------------------------------------------------------------------------------


class Rennala(AsynchronousStrategy):
    """Only work on the present model counts, a client as often as it comes (Tyurin & Richtárik 2023)."""

    def ready(self, arrived: int) -> bool:
        return arrived >= 2

    def accept(self, contribution: Contribution) -> bool:
        return contribution.staleness == 0

    def select_idle(self, free: Sequence[ClientState]) -> Sequence[ClientState]:
        return free

    def weigh(self, contributions: Sequence[Contribution]) -> list[float]:
        return [1 / len(contributions)] * len(contributions)


# ---- Runs --------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What was reported, and the states after every aggregation."""

    strategy: Any
    seen: list[Progress]
    states: list[Any]

    @property
    def values(self) -> list[float]:
        return [float(p.arrays["w"].numpy()[0]) for p in self.seen]


@pytest.fixture
def go(federation, model, train_config):
    def run(kind: Any, rounds: int, *, grid: Any = None, state: Any = None, **options: Any) -> Run:
        done = Run(None, [], [])

        def observe(progress: Progress) -> None:
            done.seen.append(progress)
            state = done.strategy.state()
            done.states.append({k: v.copy() if isinstance(v, np.ndarray) else v for k, v in state.items()})

        usual = {"eval_every": 1, "server_lr": 1.0}
        done.strategy = kind(
            kind.Config(**usual | options), clock=VirtualClock(), observer=observe, fraction_evaluate=0.0
        )
        if state is not None:
            done.strategy.restore(state)
        done.strategy.start(
            grid or federation(), model(1.0), num_rounds=rounds, timeout=5.0, train_config=train_config()
        )
        return done

    return run


def test_a_discount_for_staleness_by_hand(go):
    # M_c = 3: all are at work, and only the one that has answered is free: it is handed the model at once.
    # 0@.2 and 0@.4, both of model 0: (1 + 1)/2, w = 2. Then 0@.6 of model 1, δ = 0, Δ = .5, with 1@.6 of model 0
    # δ = 1, Δ = .5: w = 2 + (.5 + .5/√2)/2.
    run = go(ConcurrentFedBuff, 2)
    assert run.values == pytest.approx([1.0, 2.0, 2.0 + (0.5 + 0.5 / 2**0.5) / 2], rel=1e-12)
    assert [p.time for p in run.seen] == pytest.approx([0, 0.4, 0.6])
    assert run.seen[1].clients["participation"] == [2, 0, 0]


def test_so_many_are_at_work_and_all_get_their_turn(go, federation):
    grid, at_work = federation(range(8), [1] * 8), []
    pull = grid.pull_messages

    def watched(ids: Any) -> Any:
        at_work.append(sum(grid.under_way().values()))
        return pull(ids)

    grid.pull_messages = watched
    run = go(ConcurrentFedBuff, 60, grid=grid, concurrency=3, eval_every=60)
    assert max(at_work) == 3
    assert set(at_work[20:]) == {3}
    assert min(run.seen[-1].clients["participation"]) > 0
    assert run.seen[-1].clients["observed-share"] == pytest.approx(
        run.seen[-1].clients["expected-share"], abs=0.2
    )


def test_a_cache_of_last_updates_by_hand(go):
    # All have answered at 1: h = (1, .5, −1), Σ p h = −3/8, w = 5/8. Then 0@1.2: h_0 = (3 − 5/8)/2 = 19/16 and
    # Σ p h = (19/16 + 1 − 5)/8 = −45/128, w = 35/128. 0@1.4: h_0 = (3 − 35/128)/2, and so on.
    run = go(AllClientCache, 3)
    assert [p.time for p in run.seen] == pytest.approx([0, 1.0, 1.2, 1.4])
    w = 35 / 128
    assert run.values == [1.0, 0.625, w, w + ((3 - w) / 2 + 1 - 5) / 8]
    assert [p.metrics["contributions"] for p in run.seen[1:]] == [3, 1, 1]


def test_control_variates_by_hand(go):
    # Round 1 is FedAvg's: w = 5/8. c_i = −Δ_i/.5 = g_i(1) = (−2, −1, 2), c = (−2 − 2 + 10)/8 = 3/4. Round 2: the
    # gradients at 5/8 are (−2.375, −1.375, 1.625); with c − c_i all are .375: Δ_i = −.1875, the same for all.
    run = go(Scaffold, 2, lr=0.5)
    assert run.values == [1.0, 0.625, 0.4375]
    variates = run.strategy.session.client_vectors("variates")
    assert [variates.get(i)[0] for i in range(3)] == [-2.375, -1.375, 1.625]
    assert run.seen[2].metrics["bytes-down"] == 2 * run.seen[2].metrics["bytes-up"]  # two vectors for one


def test_late_work_is_thrown_away_and_its_client_gets_the_present_model(go, federation):
    # 0@.2 and 0@.4: Δ = 1 each, w = 2. 0@.6 counts; 1@.6 is late, next 1@1.2. 0@.8: Δ = .5 each, w = 2.5. 0@1; 2@1 is
    # late. 0@1.2: w = 2.75; then 1@1.2 is late.
    grid = federation()
    run = go(Rennala, 4, grid=grid)
    assert run.values == [1.0, 2.0, 2.5, 2.75, 2.875]
    assert [p.time for p in run.seen] == pytest.approx([0, 0.4, 0.8, 1.2, 1.6])
    assert [p.metrics.get("discarded-updates") for p in run.seen[1:]] == [None, 1, 1, 1]
    sent = [m.content.config_records["config"] for m in grid.requests()]
    assert [(c["server-round"] - 1) for c in sent if c[messages.CLIENT] == 1] == [0, 1, 3]
    assert run.seen[-1].clients["participation"] == [8, 0, 0]


def test_whole_models_by_hand(go):
    # 0@.2: w_0 = 2, α = .6: w = 1.6. 0@.4: w_0 = 2.3, w = 1.6 + .6·.7 = 2.02. 0@.6: w_0 = 2.51, w = 2.02 + .6·.49
    # 2.314. 1@.6 of model 0: w_1 = 1.5, δ = 3, α = .3: w = 2.314 − .3·.814.
    run = go(FedAsync, 4)
    assert run.values == pytest.approx([1.0, 1.6, 2.02, 2.314, 2.0698], rel=1e-12)


@pytest.mark.parametrize("kind", [ConcurrentFedBuff, AllClientCache, Rennala, FedAsync])
def test_resumed_after_any_aggregation_it_is_the_same_run(go, federation, kind):
    def grid() -> Any:
        return federation([3.0, 2.0, -1.0, 0.5, 7.0], [1, 2, 5, 3, 4])

    whole = go(kind, 9, grid=grid(), time_scenario="exponential")
    for k in range(1, 9):
        rest = go(kind, 9, grid=grid(), state=whole.states[k], time_scenario="exponential")
        assert whole.values[: k + 1] + rest.values == whole.values
        assert [(p.time, p.metrics, p.clients) for p in whole.seen[k + 1 :]] == [
            (p.time, p.metrics, p.clients) for p in rest.seen
        ]


def test_arrays_to_a_client_and_back_in_both_loops(federation, model, train_config):
    got: list[tuple[int, list[float]]] = []

    class Echo:
        """Sends each client a vector of its own and reads it back."""

        def extra_vectors(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
            return iter([{"echo": np.array([10.0 + client.index])} for client in clients])

        def transform_update(self, contribution: Contribution) -> Vector:
            got.append((contribution.client.index, contribution.arrays["echo"]["w"].numpy().tolist()))
            return contribution.update

    class Rounds(Echo, FedAvg):
        pass

    class Events(Echo, AllArrivals):
        pass

    for kind, number in ((Rounds, 1), (Events, 3)):
        grid = federation()
        plain = grid.app

        def app(message: Any, context: Any, plain: Any = plain) -> Any:
            reply = plain(message, context)
            if (echo := messages.arrays_of(message, "echo")) is not None:
                reply.content["echo"] = ArrayRecord(dict(echo))
            return reply

        grid.app = app
        got.clear()
        kind().start(grid, model(1.0), num_rounds=number, train_config=train_config())
        assert [values for _, values in got] == [[10.0 + index] for index, _ in got]
        assert len(got) == 3


class AllArrivals(AsynchronousStrategy):
    """A scheme that says no more than when."""

    def ready(self, arrived: int) -> bool:
        return arrived >= 1


def test_without_periods_they_are_those_observed(go):
    # 0@.2 0@.4 0@.6 1@.6: contributions (3, 1, 0), the last taken as 1: for the fifth (5/3, 5, 5) were observed. The
    # mean period of all is 15/4, with which the second has (5 + 15/4) / 2 = 35/8, less than 5.
    run = go(AllArrivals, 4)
    assert run.seen[4].clients["participation"] == [3, 1, 0]
    assert run.seen[4].clients["weight"] == pytest.approx([5 / 3 / 8, 35 / 8 * 2 / 8, 5 * 5 / 8])


@dataclass(frozen=True)
class DiscountConfig(AsynchronousConfig):
    """The power of 1 + staleness that an update is divided by."""

    discount: float = 0.5


class Discount(AsynchronousStrategy):
    """A new model at every arrival; late work counts less, and very late work not at all."""

    Config = DiscountConfig
    config: DiscountConfig

    def ready(self, arrived: int) -> bool:
        return arrived >= 1

    def accept(self, contribution: Contribution) -> bool:
        return contribution.staleness < 20

    def weigh(self, contributions: Sequence[Contribution]) -> list[float]:
        return [(1 + c.staleness) ** -self.config.discount for c in contributions]


def test_a_model_at_every_arrival_with_a_discount_by_hand(go):
    # 0@.2: w = 1 + 1. 0@.4: 2 + .5. 0@.6: 2.5 + .25. 1@.6 of model 0: δ = 3, w = 2.75 + .5/4^discount.
    assert go(Discount, 4, discount=1.0).values == [1.0, 2.0, 2.5, 2.75, 2.875]
    assert go(Discount, 4).values == [1.0, 2.0, 2.5, 2.75, 3.0]


# ---- The other examples --------------------------------------------------------------------------------------


def test_normalised_averaging_by_hand(go, federation):
    # τ = (1, 2, 4) steps of γ = ½ from 1: Δ_i = (c_i − 1)(1 − 2^−τ) = (1, .75, −1.875). p = (1, 2, 5)/8, τ̄ = 25/8:
    # w = 1 + 25/8 · (1/8 · 1 + 2/8 · .75/2 − 5/8 · 1.875/4)
    grid = federation()
    for client, steps in enumerate((1, 2, 4)):
        grid.node(client).context.node_config["local-steps"] = steps
    plain = grid.app

    def counting(message: Any, context: Any) -> Any:
        reply = plain(message, context)
        if message.metadata.message_type == messages.TRAIN:
            reply.content["metrics"]["num-steps"] = context.node_config["local-steps"]
        return reply

    grid.app = counting
    run = go(FedNova, 1, grid=grid)
    assert run.values[1] == pytest.approx(
        1 + 25 / 8 * (1 / 8 + 2 / 8 * 0.75 / 2 - 5 / 8 * 1.875 / 4), rel=1e-12
    )


def test_those_with_large_losses_are_chosen_by_hand(go, federation):
    # All are candidates, and losses aren't known at first: client 0, then 1, then 2 (ties by index). Then the losses
    # (c − w)²/2 at the models they were sent decide, the largest first.
    grid = federation()
    go(PowerOfChoice, 5, grid=grid, candidates=3, chosen=1)
    assert grid.asked("train")[:3] == [0, 1, 2]
    # 0 was sent 1 and had loss 2, 1 was sent 2 and had 0, 2 was sent 2 and had 4.5: 2 again, from .5: then 1.1.
    assert grid.asked("train")[3:] == [2, 0]


def test_they_are_chosen_among_those_who_are_there(go, federation):
    # Half of the clients are there at a time, and of those some may be at work on a round that is over.
    grid = federation(range(8), range(1, 9))
    absent = {"availability": "diurnal:0.5,4", "round_deadline": 0.5}
    run = go(PowerOfChoice, 20, grid=grid, candidates=5, chosen=2, **absent)
    assert len(run.seen) == 21
    assert sum(p.metrics["participants"] for p in run.seen[1:]) > 3


def test_who_chooses_by_itself_is_told_what_it_may_not_read(caplog):
    said = "PowerOfChoice selects clients itself; these keys have no effect unless its select() reads them"
    PowerOfChoice(candidates=5)
    FedAvg(participation="uniform", fraction_train=0.5)
    assert said not in caplog.text
    PowerOfChoice(fraction_train=0.5)
    assert f"participation = 'flower', fraction_train = 0.5: {said}" in caplog.text


def test_late_steps_are_thrown_away(go):
    # 0@.2, .4: w = 2, 2.5. 0@.6, then 1@.6, three aggregations old: thrown away with R = 3, not with R = 4.
    assert go(Ringmaster, 4, delay_threshold=3).seen[-1].clients["participation"] == [4, 0, 0]
    assert go(Ringmaster, 4, delay_threshold=4).seen[-1].clients["participation"] == [3, 1, 0]


@pytest.mark.parametrize("kind", [Scaffold, PowerOfChoice])
def test_resumed_after_any_round_it_is_the_same_run(go, federation, kind):
    own = {"candidates": 3, "chosen": 2} if kind is PowerOfChoice else {}
    whole = go(kind, 6, **own)
    for k in range(1, 6):
        assert whole.values[: k + 1] + go(kind, 6, state=whole.states[k], **own).values == whole.values


def test_an_example_takes_no_private_member_and_few_lines():
    source = Path(__file__).parents[3].joinpath("examples", "methods.py").read_text()
    assert not re.findall(r"self\._\w+", source)
    for block in source.split("\nclass ")[1:]:
        body = block.split("\n\n\n")[0]
        assert len(body.splitlines()) <= 33, body.splitlines()[0]


@pytest.mark.parametrize(
    ("kind", "config", "base"),
    [
        (AsynchronousStrategy, object, "AsyncConfigBase"),
        (FedBuff, FedAvg.Config, "AsyncConfigBase"),
        (FedAvg, FedBuff.Config, "SynchronousConfig"),
        (FedAvg, FedAvg.Config(), "SynchronousConfig"),
    ],
)
def test_a_config_that_lacks_what_the_loop_reads_is_refused(kind, config, base):
    with pytest.raises(TypeError, match=rf"^Mine\.Config = .*: must be a subclass of {base}$"):

        class Mine(kind):
            Config = config


NONE = float("nan")


@pytest.mark.parametrize(
    ("base", "hook", "given", "said"),
    [
        (FedAvg, "weigh", [1.0, NONE, 1.0], "weigh returns nan for client 1: must be >= 0 and finite"),
        (
            FedAvg,
            "weigh",
            [1.0],
            r"weigh returns an array \(1,\): must be \(3,\), .*",
        ),
        (FedAvg, "weigh", "abc", "weigh returns 'abc': must be 3 numbers, one for each client"),
        (FedAvg, "select", [1.0, 1.0, -1.0], "select returns -1 for client 2: must be >= 0 and finite"),
        (FedAvg, "select", [1.0], r"select returns an array \(1,\): must be \(3,\), .*"),
        (FedBuff, "weigh", [], r"weigh or discount returns an array \(0,\): must be \(2,\), .*"),
        (FedBuff, "discount", np.inf, "weigh or discount returns inf for client 0: must be >= 0 and finite"),
    ],
)
def test_a_weight_of_ones_own_is_a_number_for_each_client(go, base, hook, given, said):
    def own(self: object, clients: object, *_: object) -> object:
        return (clients, given) if hook == "select" else given

    with pytest.raises(RunError, match=f"^Mine.{said}$"):
        go(type("Mine", (base,), {hook: own}), 2)


@pytest.mark.parametrize("base", [FedAvg, FedBuff])
@pytest.mark.parametrize(
    ("made", "shape"), [(0.5, r"\(\)"), (np.zeros(2), r"\(2,\)"), (np.zeros((1, 1)), r"\(1, 1\)")]
)
def test_what_aggregate_makes_is_a_model(go, base, made, shape):
    own = type("Mine", (base,), {"aggregate": lambda *_: made})
    with pytest.raises(
        RunError, match=rf"^Mine\.aggregate returns an array {shape}: must be the model, \(1,\)$"
    ):
        go(own, 2)


def test_a_number_of_local_steps_needs_no_usual_one(federation, model):
    grid = federation()
    type("Mine", (FedBuff,), {"task_steps": lambda *_: 7})().start(grid, model(1.0), num_rounds=1)
    assert {each.content["config"][messages.STEPS] for each in grid.requests()} == {7}
