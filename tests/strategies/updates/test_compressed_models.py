"""Models that are sent compressed: what clients have then is what the server counts on, on every way to them."""

import logging
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies import REGISTRY, FedAvg, RunError, compress_updates, unpack_arrays
from strategies.clock import VirtualClock
from strategies.flower import messages
from strategies.flower.arrays import Layout
from strategies.flower.grids import DEPLOYMENT
from strategies.flower.messages import CompressedModel
from strategies.secure import masks_updates
from strategies.updates.buffers import UNTRAINED
from strategies.updates.client_compression import decoded
from strategies.updates.compressed_models import MODEL, ModelCompression
from strategies.updates.compressors import OF_MODELS
from tests.strategies.methods.test_registry import content, initial_model, small_config

CENTRES, SIZES = [0.0, 1.0, -2.0, 3.0, 0.5, 2.0], [1, 2, 3, 4, 5, 6]

models = st.lists(
    st.sampled_from("fde").flatmap(
        lambda kind: hnp.arrays(
            kind,
            hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4),
            elements=st.floats(-1000, 1000, width=16),
        )
    ),
    min_size=1,
    max_size=4,
)


def compression_of(record: ArrayRecord, name: str, untrained: tuple[str, ...] = ()) -> ModelCompression:
    return ModelCompression(name, Layout.of(record), untrained)


def as_a_client_has_it(record: ArrayRecord) -> ArrayRecord:
    message = messages.request(messages.TRAIN, 1, ConfigRecord({}), ttl=60.0, arrays=record)
    return decoded(message).content["arrays"]  # type: ignore[return-value]


# What a client has -----------------------------------------------------------------------------------------------


def test_int8_by_hand():
    # The largest magnitude is 127/64, so that the scale is 1/64, and 1/3 is 21.33 of it: 21.
    record = ArrayRecord({"w": Array(np.float32([127 / 64, 1 / 3, -0.5])), "n": Array(np.int64([7]))})
    sent, vector = compression_of(record, "int8").sent(Layout.of(record).to_vector(record))
    assert vector.tolist() == [127 / 64, 21 / 64, -0.5, 7.0]
    (array,) = sent.travels.values()
    assert array.data.endswith(
        np.float32(1 / 64).tobytes() + np.int8([127, 21, -32]).tobytes() + b"\x07" + bytes(7)
    )


def test_a_scale_is_rounded_up_so_that_its_multiples_are_float32_numbers():
    values = np.float32([0.1, 0.05, -0.1])
    record = ArrayRecord({"w": Array(values)})
    _, vector = compression_of(record, "int8").sent(values.astype(float))
    scale = vector[0] / 127
    assert scale * 2**26 == int(scale * 2**26) < 2**16 * 2**5  # 16 bits
    assert float(np.float32(0.1)) / 127 <= scale < float(np.float32(0.1)) / 127 * (1 + 2**-15)
    assert (vector == vector.astype(np.float32)).all()


@given(models, st.sampled_from(sorted(OF_MODELS)), st.booleans())
def test_a_client_has_what_the_server_counts_on(arrays, name, apart):
    record = ArrayRecord({f"a{place}": Array(values) for place, values in enumerate(arrays)})
    compression, layout = compression_of(record, name, ("a0",) if apart else ()), Layout.of(record)
    model = layout.to_vector(record)
    sent, vector = compression.sent(model)
    assert (
        content(as_a_client_has_it(sent.travels))
        == content(sent.as_arrays)
        == content(layout.to_record(vector))
    )
    assert messages.num_bytes(sent) == messages.num_bytes(sent.travels) == compression.num_bytes
    for place, values in enumerate(arrays):
        span, worst = layout.spans[place], float(np.abs(values.astype(float)).max(initial=0))
        most = worst / 254 * 1.001 if name == "int8" else worst * 2**-11
        if apart and not place:
            most = 0.0
        slack = 0.0 if values.dtype != np.float16 else worst * 2**-10  # rounded once more
        assert np.abs(vector[span] - model[span]).max(initial=0) <= most + slack + 2**-25 * bool(most)


@given(models, st.sampled_from(sorted(OF_MODELS)))
def test_what_was_sent_can_be_sent_again(arrays, name):
    record = ArrayRecord({f"a{place}": Array(values) for place, values in enumerate(arrays)})
    compression = compression_of(record, name)
    _, vector = compression.sent(Layout.of(record).to_vector(record))
    again = compression.sent_again(vector.astype(Layout.of(record).narrow))
    assert Layout.of(record).to_vector(again).tolist() == vector.tolist()
    if all(values.dtype != np.float16 for values in arrays):
        assert isinstance(again, CompressedModel)


# Runs ------------------------------------------------------------------------------------------------------------


def started(name: str, grid: Any, **options: Any) -> Any:
    strategy = REGISTRY[name](small_config(name, **options), clock=VirtualClock())
    return strategy.start(
        grid,
        initial_model(),
        num_rounds=3,
        timeout=10.0,
        train_config=ConfigRecord({"lr": 0.1, "local-steps": 2}),
    )


@pytest.mark.parametrize("kind", OF_MODELS)
def test_the_servers_model_stays_exact(kind, federation, train_config):
    # Clients take one step to their centres from b = Q(w̄): w̄ moves by lr Σ d_i (c_i − b), and isn't rounded itself.
    start = np.float64([0.123456789, -1.0, 0.7])
    record = ArrayRecord({"w": Array(start)})
    result = FedAvg(compression_down=kind, fraction_evaluate=0.0).start(
        federation([2.0, -1.0], [1, 3]), record, num_rounds=4, timeout=10.0, train_config=train_config(1, 0.1)
    )
    model, compression = start.copy(), compression_of(record, kind)
    for _ in range(4):
        sent = compression.sent(model)[1]
        model += 0.1 * (0.25 * (2.0 - sent) + 0.75 * (-1.0 - sent))
    assert result.arrays["w"].numpy() == pytest.approx(model, rel=1e-12)
    assert compression.sent(model)[1] != pytest.approx(model, rel=1e-6)


@pytest.mark.parametrize("kind", OF_MODELS)
@pytest.mark.parametrize("name", REGISTRY)
def test_the_way_to_a_client_changes_nothing(name, kind, federation):
    """Clients in this process, devices that decode, and devices that are sent the rounded arrays."""
    found = []
    for engine, mods in (
        ("memory", ()),
        (DEPLOYMENT, (unpack_arrays, compress_updates)),
        (DEPLOYMENT, (compress_updates,)),
        (DEPLOYMENT, (unpack_arrays,)),
    ):
        grid = federation(CENTRES, SIZES, mods=mods, num_partitions=len(SIZES))
        grid.engine = engine
        result = started(name, grid, compression_down=kind)
        sent = [record for each in grid.requests() for record in messages.array_records(each).values()]
        travels = [[array.stype for array in record.values()] == [MODEL] for record in sent]
        assert any(travels) == (compress_updates in mods)
        metrics = result.train_metrics_clientapp
        told = [dict(metrics[number]) for number in metrics]
        assert sum(each["bytes-down"] for each in told) > 0
        if compress_updates not in mods and engine == DEPLOYMENT:  # whole models have more bytes
            assert sum(each["bytes-down"] for each in told) > sum(each["bytes-down"] for each in found[0][1])
            for each, first in zip(told, found[0][1], strict=True):
                each["bytes-down"] = first["bytes-down"]
        found.append((content(result.arrays), told))
    assert all(each == found[0] for each in found)
    plain = started(name, federation(CENTRES, SIZES))
    assert content(plain.arrays) != found[0][0]


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedbuff", "async-fedavg"])
def test_what_is_counted_is_what_the_requests_hold(name, federation):
    grid = federation(CENTRES, SIZES, mods=(unpack_arrays, compress_updates), num_partitions=len(SIZES))
    grid.engine = DEPLOYMENT
    result = started(name, grid, compression_down="int8", fraction_evaluate=0.0)
    told = sum(metrics[messages.BYTES_DOWN] for metrics in result.train_metrics_clientapp.values())
    asked = grid.requests()
    of_models = [each for each in asked if (messages.arrays_of(each) or ArrayRecord())]
    size = compression_of(initial_model(), "int8", UNTRAINED).num_bytes
    assert {messages.num_bytes(each.content["arrays"]) for each in of_models} == {size}  # type: ignore[arg-type]
    if name == "scaffold":  # beside the model its c goes whole, as one packed array
        assert told > sum(messages.num_bytes(each.content["arrays"]) for each in asked)  # type: ignore[arg-type]
    else:
        assert told == size * len(asked) or told == size * (len(asked) - len(SIZES))  # the last are under way


def test_both_ways_compressed(federation, caplog):
    found = []
    for engine in ("memory", DEPLOYMENT):
        grid = federation(CENTRES, SIZES, mods=(unpack_arrays, compress_updates), num_partitions=len(SIZES))
        grid.engine = engine
        found.append(started("fedavg", grid, compression_down="int8", compression="topk:0.3"))
    assert content(found[0].arrays) == content(found[1].arrays)
    assert found[0].train_metrics_clientapp == found[1].train_metrics_clientapp
    assert "was overwritten" not in caplog.text  # a warning of Flower, for each message


def test_secure_sums_are_of_updates_from_what_clients_have(federation):
    found = []
    for mods, options in (
        ((compress_updates,), {}),
        ((unpack_arrays, compress_updates, masks_updates), {"secure_sums": True, "secure_clipping": 10.0}),
    ):
        grid = federation(CENTRES, SIZES, mods=mods, num_partitions=len(SIZES))
        grid.engine = DEPLOYMENT
        result = started("fedavg", grid, compression_down="int8", fraction_evaluate=0.0, **options)
        found.append(np.concatenate([array.numpy().ravel() for array in result.arrays.values()]))
    assert found[1] == pytest.approx(found[0], abs=1e-5)
    assert (found[1] != found[0]).any()


def test_devices_without_the_mod_are_sent_whole_models_and_the_log_says_so(federation, caplog):
    grid = federation(CENTRES, SIZES, num_partitions=len(SIZES))
    grid.engine = DEPLOYMENT
    with caplog.at_level(logging.WARNING, "flwr.strategies"):
        started("fedavg", grid, compression_down="fp16")
    lines = [each.getMessage() for each in caplog.records if "compression_down" in each.getMessage()]
    assert lines == [
        "compression_down = 'fp16': some clients are sent the rounded model in full precision; a ClientApp decodes "
        "compressed models by the mod strategies.compress_updates"
    ]


def test_an_evaluation_is_of_the_model_itself(federation):
    grid = federation(CENTRES, SIZES, mods=(compress_updates,))
    result = started("fedavg", grid, compression_down="int8")
    asked = grid.requests(messages.EVALUATE)
    last = messages.arrays_of(asked[-1])
    assert last is not None
    assert content(last) == content(result.arrays)


# What it doesn't go with -----------------------------------------------------------------------------------------


def test_a_loop_around_the_strategy_and_a_model_that_clients_make_are_refused(federation):
    grid = federation(CENTRES, SIZES)
    with pytest.raises(
        RunError, match=r"compression_down = 'int8': .* takes the model for what clients were sent"
    ):
        list(FedAvg(compression_down="int8").configure_train(1, initial_model(), ConfigRecord(), grid))
    with pytest.raises(RunError, match=r"no arrays, and secure_sums, compression, compression_down"):
        FedAvg(compression_down="fp16").start(grid, ArrayRecord(), num_rounds=1, timeout=10.0)
    with pytest.raises(ValueError, match=r"compression_down = 'topk:0.1'"):
        FedAvg(compression_down="topk:0.1")


def test_a_hook_that_makes_requests_of_its_own_is_taken_at_its_word(federation, train_config):
    """It adds a client with the global model itself: that client's update is counted from there."""

    class AsksOneMore(FedAvg):
        def configure_train(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Any:
            asked = list(super().configure_train(server_round, arrays, config, grid))
            there = {each.metadata.dst_node_id for each in asked}
            other = next(node for node in sorted(grid.get_node_ids()) if node not in there)
            content = {**asked[0].content, "arrays": arrays}
            return [*asked, Message(RecordDict(content), dst_node_id=other, message_type=messages.TRAIN)]

    bases: dict[int, Any] = {}

    def noted(message: Message, context: Context, call_next: Any) -> Message:
        if message.metadata.message_type == messages.TRAIN:
            bases[context.node_config["partition-id"]] = message.content["arrays"]["w"].numpy()  # type: ignore
        return call_next(message, context)

    grid = federation([1.0, 2.0], [1, 1], mods=(noted,))
    options: dict[str, Any] = {
        "participation": "fixed:0",
        "fraction_evaluate": 0.0,
        "client_weights": "uniform",
    }
    start = np.float64([0.3, 1.0])
    strategy = AsksOneMore(compression_down="int8", **options)
    result = strategy.start(
        grid, ArrayRecord({"w": Array(start)}), num_rounds=1, timeout=10.0, train_config=train_config(1, 0.1)
    )
    assert bases[1].tolist() == start.tolist() != bases[0].tolist()
    moves = [0.1 * (1.0 - bases[0]), 0.1 * (2.0 - bases[1])]
    assert result.arrays["w"].numpy() == pytest.approx(start + sum(moves) / 2, rel=1e-12)
