"""FedNova, SCAFFOLD, FedDyn and MIFA against their formulas in numpy, and where each is another method."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import Strategy

from strategies import REGISTRY, FedAvg, FedDyn, FedNova, Mifa, RunError, Scaffold
from strategies.core.conflicts import ConflictError
from strategies.flower import messages
from strategies.methods.fednova import scales
from strategies.methods.shared.local_path import paths_of

CENTRES, SIZES, A = (3.0, 2.0, -1.0, 0.5, 7.0), (1, 2, 5, 3, 4), (1.0, 2.0, 0.5, 1.5, 0.7)
STEPS, LR, ROUNDS, C = (1, 2, 5, 3, 4), 0.1, 12, 5
P = np.array(SIZES) / sum(SIZES)
START = np.array([1.0, -2.0])


@pytest.fixture
def run(federation, model, train_config, values_of):
    """Run a method on five clients; return who was asked in each round, and the model after each."""

    def go(
        kind: Any,
        *,
        steps: Any = STEPS,
        rounds: int = ROUNDS,
        lose: Any = None,
        lr: float = LR,
        **options: Any,
    ) -> tuple[list[list[int]], np.ndarray]:
        grid, seen = federation(CENTRES, SIZES, A), []
        for client, number in enumerate(steps):
            grid.node(client).context.node_config["local-steps"] = number

        def observe(progress: Any) -> None:
            seen.append(values_of(progress.arrays))
            if lose and progress.aggregation == lose[0]:
                grid.spoil(lose[1], "raise")

        strategy = kind(observer=observe, seed=3, fraction_evaluate=0.0, **options)
        strategy.start(grid, model(*START), num_rounds=rounds, timeout=9.0, train_config=train_config(lr=lr))
        asked = [grid.asked(messages.TRAIN, number) for number in range(1, rounds + 1)]
        return asked, np.array(seen)

    return go


def weights(scheme: str, asked: list[int]) -> np.ndarray:
    """d_i of those that were asked, by the table of participation schemes."""
    if scheme == "full":
        return P
    if scheme == "uniform":
        return P[asked] * C / len(asked)
    if scheme == "paired":
        return np.full(2, 0.5)
    return P[asked] / P[asked].sum()


def minimised(scheme: str) -> np.ndarray:
    """The p_i of the objective that a scheme minimises."""
    if scheme == "paired":
        return np.array([0.125] * 4 + [0.5])
    if scheme.startswith("fixed"):
        listed = np.isin(np.arange(C), [1, 3, 4])
        return np.where(listed, P, 0) / P[listed].sum()
    return P


def local(i: int, W: np.ndarray, h: Any = 0.0, alpha: float = 0.0) -> np.ndarray:
    w = W.copy()
    for _ in range(STEPS[i]):
        w = w - LR * (A[i] * (w - CENTRES[i]) + h + alpha * (w - W))
    return w


def reference(name: str, rounds: list[list[int]], scheme: str, alpha: float) -> np.ndarray:
    """The formulas, and nothing of the library's."""
    W, models, q = START.copy(), [START.copy()], minimised(scheme)
    own, H, cached = np.zeros((C, 2)), np.zeros(2), {}
    s = LR * np.array(STEPS)
    for asked in rounds:
        d = weights(scheme, asked)
        if name == "fednova":
            deltas = np.array([local(i, W) - W for i in asked])
            W = W + (d @ s[asked]) / d.sum() * (d @ (deltas / s[asked][:, None]))
        elif name == "scaffold":
            common = q @ own
            deltas = np.array([local(i, W, common - own[i]) - W for i in asked])
            for i, delta in zip(asked, deltas, strict=True):
                own[i] = own[i] - common - delta / s[i]
            W = W + d @ deltas
        elif name == "feddyn":
            deltas = np.array([local(i, W, -own[i], alpha) - W for i in asked])
            for i, delta in zip(asked, deltas, strict=True):
                own[i] = own[i] - alpha * delta
            H = H - alpha * (q[asked] @ deltas)
            W = W + d @ deltas - H / alpha
        else:
            cached |= {i: local(i, W) - W for i in asked}
            if len(cached) == np.count_nonzero(q):
                W = W + sum(q[i] * h for i, h in cached.items())
        models.append(W.copy())
    return np.array(models)


SCHEMES: list[dict[str, Any]] = [
    {},
    {"participation": "uniform", "fraction_train": 0.4},
    {"participation": "flower", "fraction_train": 0.6},
    {"participation": "paired"},
    {"participation": "fixed:1,3,4"},
]


@pytest.mark.parametrize(
    "options", SCHEMES, ids=[str(options.get("participation", "full")) for options in SCHEMES]
)
@pytest.mark.parametrize("name", ["fednova", "scaffold", "feddyn", "mifa"])
def test_it_is_its_formula(name, options, run):
    own = {"feddyn_alpha": 0.7} if name == "feddyn" else {}
    asked, models = run(REGISTRY[name], **options, **own)
    expected = reference(name, asked, options.get("participation", "full"), 0.7)
    assert models == pytest.approx(expected, rel=1e-5, abs=1e-6)  # what the server keeps is float32
    assert not np.allclose(models[-1], models[0])


def test_of_whom_no_reply_came_nothing_is_learnt_and_the_others_have_its_weight(run):
    # From the second round on client 2 fails: its c_2 stays, and the others count p_i / (1 − p_2).
    _, models = run(Scaffold, lose=(1, 2), rounds=3)
    W, own, s, here = START.copy(), np.zeros((C, 2)), LR * np.array(STEPS), [0, 1, 3, 4]
    for number in (1, 2, 3):
        asked = list(range(C)) if number == 1 else here
        common = P @ own
        deltas = {i: local(i, W, common - own[i]) - W for i in asked}
        for i, delta in deltas.items():
            own[i] = own[i] - common - delta / s[i]
        W = W + sum(P[i] * delta for i, delta in deltas.items()) / P[asked].sum()
    assert models[-1] == pytest.approx(W, rel=1e-5)


def test_a_cache_counts_whoever_fails_later(run):
    _, models = run(Mifa, lose=(1, 2), rounds=3)
    expected = reference("mifa", [list(range(C)), [0, 1, 3, 4], [0, 1, 3, 4]], "full", 0.0)
    assert models == pytest.approx(expected, rel=1e-5)


# ---- Where they are other methods --------------------------------------------------------------------------------


def test_with_equal_steps_normalised_averaging_is_fedavg_bit_for_bit(run):
    for options in SCHEMES:
        one, other = (run(kind, steps=[3] * C, **options)[1] for kind in (FedNova, FedAvg))
        assert one.tobytes() == other.tobytes()


def test_the_first_round_with_control_variates_is_fedavgs(run):
    one, other = (run(kind, rounds=2)[1] for kind in (Scaffold, FedAvg))
    assert one[1].tobytes() == other[1].tobytes()
    assert not np.allclose(one[2], other[2])


def test_with_one_step_and_all_clients_control_variates_cancel(run):
    one, other = (run(kind, steps=[1] * C)[1] for kind in (Scaffold, FedAvg))
    assert one == pytest.approx(other, rel=1e-6)


def test_with_all_clients_a_cache_is_fedavg(run):
    one, other = (run(kind)[1] for kind in (Mifa, FedAvg))
    assert one == pytest.approx(other, rel=1e-6)


def test_without_a_regularizer_feddyn_adds_all_updates_there_were(run):
    # α → 0: v ← v + Δ, W ← W + Δ + v, which is 2 Δ in the first round.
    models, W, v = run(FedDyn, feddyn_alpha=1e-6, rounds=6)[1], START.copy(), np.zeros(2)
    for found in models[1:]:
        delta = P @ np.array([local(i, W) - W for i in range(C)])
        v = v + delta
        W = W + delta + v
        assert found == pytest.approx(W, rel=1e-4, abs=1e-4)


# ---- What clients tell -------------------------------------------------------------------------------------------


def test_the_path_tells_the_length_of_steps_too(federation, model, train_config):
    # normalize-steps: γ_i = γ/K_i, so that all paths are γ and FedNova is FedAvg.
    finals = []
    for kind in (FedNova, FedAvg):
        grid = federation(CENTRES, SIZES, A)
        for client, number in enumerate(STEPS):
            grid.node(client).context.node_config["local-steps"] = number
        message = train_config(lr=0.1, **{"normalize-steps": True})
        finals.append(kind().start(grid, model(1.0), num_rounds=3, train_config=message).arrays["w"].numpy())
    assert finals[0] == pytest.approx(finals[1], rel=1e-12)


def test_clients_that_dont_tell_their_path_are_named_once_and_count_as_in_fedavg(
    federation, model, train_config, values_of, caplog
):
    finals = []
    for kind in (FedNova, Scaffold, FedAvg):
        grid = federation(CENTRES, SIZES, A)
        plain = grid.app

        def silent(message: Any, context: Any, plain: Any = plain) -> Any:
            reply = plain(message, context)
            reply.content.pop(messages.APPLIED, None)
            return reply

        grid.app = silent
        result = kind().start(grid, model(1.0), num_rounds=3, train_config=train_config(2, 0.1))
        finals.append(values_of(result.arrays))
    assert finals[0] == finals[1] == finals[2]
    said = [
        r.getMessage() for r in caplog.records if "don't say that their local steps go by" in r.getMessage()
    ]
    assert [messages.PATH in line for line in said] == [True, True]


@pytest.mark.parametrize("said", [0.0, -1.0, math.nan, math.inf, "long", [1.0], True])
def test_a_path_that_cannot_be_counts_as_none(said):
    told = SimpleNamespace(records={messages.APPLIED: {messages.PATH: said}})
    expected = 1.0 if said is True else math.nan
    assert paths_of([told]).tolist() == pytest.approx([expected], nan_ok=True)  # type: ignore[list-item]


def test_who_tells_no_path_counts_with_the_mean_of_those_that_do():
    # s = (1, 3) with d = (.25, .25): s_eff = 2; the third counts as it is.
    assert scales(np.array([1.0, 3.0, np.nan]), [0.25, 0.25, 0.5]).tolist() == [2.0, 2 / 3, 1.0]
    assert scales(np.array([np.nan, np.nan]), [0.5, 0.5]).tolist() == [1.0, 1.0]
    assert scales(np.array([1.0, 3.0]), [0.0, 0.0]).tolist() == [1.0, 1.0]  # nobody counts


def test_a_path_counts_as_at_most_so_many_times_the_usual_and_at_least_its_part():
    def told(*paths: float) -> Any:
        return [SimpleNamespace(records={messages.APPLIED: {messages.PATH: path}}) for path in paths]

    # The median of 1, 2, 3, 1e-9 and 1e9 is 2; a fifth of it and five times as much are 0.4 and 10.
    assert paths_of(told(1, 2, 3, 1e-9, 1e9), 5.0).tolist() == [1, 2, 3, 0.4, 10]
    # Who tells none is no part of the median, 2, and is left to the method.
    assert paths_of(told(-1, 1e-9, 2, 2.5), 5.0).tolist() == pytest.approx([np.nan, 0.4, 2, 2.5], nan_ok=True)
    assert paths_of(told(-1, 0), 5.0).tolist() == pytest.approx([np.nan] * 2, nan_ok=True)
    assert paths_of(told(1, 1e9)).tolist() == [1, 1e9]  # without a bound


@pytest.mark.parametrize("name", ["fednova", "scaffold"])
def test_on_devices_a_path_that_is_far_too_short_counts_as_a_fifth_of_the_usual(
    name, federation, model, train_config, values_of
):
    finals = []
    for devices in (True, False):
        grid = federation(CENTRES, SIZES, A)
        plain = grid.app

        def lying(message: Any, context: Any, plain: Any = plain) -> Any:
            reply = plain(message, context)
            if message.metadata.message_type == messages.TRAIN and context.node_config["partition-id"] == 2:
                reply.content[messages.APPLIED][messages.PATH] = 1e-9
            return reply

        grid.app = lying
        options = {"safeguards": "on" if devices else "off", "client_weights": "uniform"}
        try:
            result = REGISTRY[name](**options).start(
                grid, model(1.0), num_rounds=2, train_config=train_config(2, 0.1)
            )
            finals.append(abs(values_of(result.arrays)[0]))
        except RunError:
            finals.append(math.inf)
    assert finals[0] < 10
    assert finals[1] > 1e3


# ---- What doesn't make sense -------------------------------------------------------------------------------------


CORRECTING = ["fednova", "scaffold", "feddyn", "mifa", "fedstale", "fedau", "fedawe"]


@pytest.mark.parametrize("name", CORRECTING)
@pytest.mark.parametrize(("key", "value"), [("dp", "central"), ("aggregation_rule", "median")])
def test_what_rests_on_a_plain_mean_is_refused(name, key, value):
    with pytest.raises(ConflictError) as raised:
        REGISTRY[name](client_weights="uniform", **{key: value})
    assert raised.value.keys == (key, "strategy")


@pytest.mark.parametrize("name", CORRECTING)
def test_a_loop_around_them_is_refused(name, federation, model, train_config):
    with pytest.raises(
        RunError, match="a wrapper around the strategy, such as one for privacy, knows nothing of"
    ):
        Strategy.start(REGISTRY[name](), federation(), model(1.0), num_rounds=1, train_config=train_config())


# ---- What else a run tells ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "down"), [(name, 1 + (name in ("scaffold", "feddyn"))) for name in CORRECTING]
)
def test_bytes_and_shares(name, down, federation, model, train_config):
    seen: list[Any] = []
    REGISTRY[name](observer=seen.append).start(
        federation(), model(1.0), num_rounds=2, train_config=train_config()
    )
    assert seen[-1].metrics["bytes-down"] == down * seen[-1].metrics["bytes-up"]
    kept = {"fednova": None, "fedau": None, "fedawe": 8}.get(
        name, 3 * 1 * 4
    )  # of float32; of float64 one model
    assert seen[-1].metrics.get("bytes-kept") == kept
    assert seen[-1].metrics["bytes-server"] == 8 + (kept or 0)  # the model is one float64
    assert seen[-1].clients["expected-share"] == pytest.approx([1 / 8, 2 / 8, 5 / 8])
    assert seen[-1].clients["observed-share"] == pytest.approx([1 / 8, 2 / 8, 5 / 8])


def test_the_servers_bytes_have_the_vectors_of_its_optimizer(federation, model, train_config):
    """FedAvg keeps a model of one float64, and Adam two means of that size from its first step on."""
    seen: list[Any] = []
    FedAvg(server_optimizer="adam", observer=seen.append).start(
        federation(), model(1.0), num_rounds=2, train_config=train_config()
    )
    assert [each.metrics["bytes-server"] for each in seen] == [8, 24, 24]


def test_a_cache_counts_all_whoever_takes_part(federation, model, train_config):
    seen: list[Any] = []
    Mifa(observer=seen.append, participation="uniform", fraction_train=0.3, seed=1).start(
        federation(), model(1.0), num_rounds=12, train_config=train_config()
    )
    waiting = [p for p in seen[1:] if p.arrays["w"].numpy()[0] == 1.0]
    assert waiting  # one client a round: the model can't be moved before the third
    assert not any(sum(p.clients["observed-share"]) for p in waiting)
    assert seen[-1].clients["observed-share"] == pytest.approx([1 / 8, 2 / 8, 5 / 8])
    assert seen[-1].clients["participation"] != [12 - len(waiting)] * 3


@pytest.mark.parametrize("name", CORRECTING)
def test_what_is_not_trained_is_averaged_and_never_corrected(
    name, federation, model, train_config, values_of
):
    # The whole model is said to be untrained: each round it is the mean of what clients send, Σ p w_i, and what the
    # server keeps of them is 0.
    grid = federation(CENTRES, SIZES, A)
    for client, number in enumerate(STEPS):
        grid.node(client).context.node_config["local-steps"] = number
    strategy = REGISTRY[name](untrained=["w"], seed=3)
    result = strategy.start(grid, model(*START), num_rounds=3, train_config=train_config(lr=LR))
    W = START.copy()
    for _ in range(3):
        W = P @ np.array([local(i, W, 0.0, 0.01 if name == "feddyn" else 0.0) for i in range(C)])
    assert values_of(result.arrays) == pytest.approx(W, rel=1e-12)
    assert not any(vectors.matrix.any() for vectors in strategy.session.memory.client_vectors.values())


def test_a_device_that_joins_late_counts_in_a_cache_from_its_first_answer(
    federation, add_node, model, train_config, values_of
):
    grid, seen = federation(CENTRES[:2], (1, 1)), []

    def observe(progress: Any) -> None:
        seen.append(values_of(progress.arrays)[0])
        if progress.aggregation == 1:
            add_node(grid, 0, 2, 99, centre=-1.0)

    Mifa(observer=observe, fraction_evaluate=0.0).start(
        grid, model(1.0), num_rounds=2, train_config=train_config()
    )
    # Half the way to c each, of two clients and then of three: 1 + (1 + .5)/2, and half the way from there to 4/3.
    assert seen == pytest.approx([1.0, 1.75, (1.75 + 4 / 3) / 2])


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "mifa"])
def test_what_is_told_of_the_shares_is_what_is_minimised(name, run, tmp_path):
    path, made = tmp_path / "there.csv", []

    def kind(**options: Any) -> Any:
        made.append(REGISTRY[name](**options))
        return made[-1]

    for least in (0.4, 5):  # tasks take a second
        stays = [f"{client},0,{10 if client else least},10" for client in range(C)]
        path.write_text("\n".join(["client,start,end,period", *stays]))
        run(kind, steps=[1] * C, rounds=2, availability=f"trace:{path}", time_scenario="F0")
        p = np.where(np.arange(C) == 0, 0 if least < 1 else P, P)
        assert made[-1].session.client_columns()["expected-share"] == pytest.approx(p / p.sum(), rel=1e-12)


@pytest.mark.parametrize(
    ("stay", "others", "rounds"),
    # It goes for good in the fourth round, which begins at 3 s; or it is there every ten seconds, and too briefly.
    [("2.5,3.9", "0,99", 4), ("0,0.5,10", "0,10,10", 0)],
)
def test_mifa_does_not_wait_for_one_who_never_answers(run, tmp_path, stay, others, rounds):
    path = tmp_path / "there.csv"
    path.write_text("\n".join(f"{client},{others if client else stay}" for client in range(C)))
    there = {"availability": f"trace:{path}", "time_scenario": "F0"}
    _, models = run(Mifa, steps=[1] * C, rounds=rounds + 3, **there)
    share, W = P[1:] / P[1:].sum(), START
    assert (models[rounds] == START).all()
    for _ in range(3):
        W = W + share @ np.array([-LR * A[i] * (W - CENTRES[i]) for i in range(1, C)])
    assert models[-1] == pytest.approx(W, rel=1e-5)


@pytest.mark.parametrize("fault", ["raise", "nan", "drop"])  # failed, refused, late
def test_mifa_does_not_wait_for_one_whose_first_tasks_come_to_nothing(
    fault, federation, model, train_config, values_of, caplog
):
    grid, seen = federation(CENTRES[:3], (1, 1, 2)), []
    grid.lose(2) if fault == "drop" else grid.spoil(2, fault)

    def observe(progress: Any) -> None:
        seen.append((values_of(progress.arrays)[0], progress.clients.get("expected-share")))
        if progress.aggregation == 4:  # it is well again
            grid.node(2).transport.clear()
            grid.spoil(2, None)

    Mifa(observer=observe, fraction_evaluate=0.0).start(
        grid, model(1.0), num_rounds=5, timeout=0.05, train_config=train_config()
    )
    # Half the way to (3 + 2)/2, twice; then half the way to (3 + 2 − 2 · 1)/4.
    expected = [1.0, 1.0, 1.0, 1.75, 2.125, (2.125 + 3 / 4) / 2]
    assert [value for value, _ in seen] == pytest.approx(expected)
    shares = [share for _, share in seen[1:]]
    assert shares[2:4] == [[0.25, 0.25, 0.0]] * 2
    assert shares[-1] == [0.25, 0.25, 0.5]
    said = [r.getMessage() for r in caplog.records if "has never answered" in r.getMessage()]
    assert said == [
        "client 2 has never answered, 3 tasks of its came to nothing: nobody waits for it, and it counts from its "
        "first answer on"
    ]


@pytest.mark.parametrize("rounds", [1, 12])
def test_a_run_that_was_too_short_for_a_first_model_says_so(rounds, federation, model, train_config, caplog):
    strategy = Mifa(participation="uniform", fraction_train=0.3, seed=1)
    strategy.start(federation(), model(1.0), num_rounds=rounds, train_config=train_config())
    said = [r.getMessage() for r in caplog.records if "the model is the initial one" in r.getMessage()]
    too_few = "were too few for Mifa, which waits until all clients that count have answered once"
    assert said == [f"1 aggregations {too_few}: the model is the initial one"] * (rounds == 1)
