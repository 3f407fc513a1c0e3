"""What messages hold, and how many bytes of it are models."""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from strategies.flower import messages


def record(*sizes: int) -> ArrayRecord:
    return ArrayRecord({f"w{i}": Array(np.zeros(size, np.float32)) for i, size in enumerate(sizes)})


def request(arrays: ArrayRecord | None = None, **extra_records: ArrayRecord) -> Message:
    config = ConfigRecord({"lr": 0.1})
    return messages.request(messages.TRAIN, 7, config, ttl=60.0, arrays=arrays, extra_records=extra_records)


def test_arrays_by_key():
    model, neighbours = record(3), record(4)
    message = request(arrays=model, neighbours=neighbours)
    assert messages.arrays_of(message) is model
    assert messages.arrays_of(message, messages.NEIGHBOURS) is neighbours
    assert messages.arrays_of(request(arrays=model), messages.NEIGHBOURS) is None
    assert messages.arrays_of(request()) is None


def test_a_record_of_another_type_under_the_key_is_none():
    content = RecordDict({messages.ARRAYS: MetricRecord({"loss": 1.0}), "other": record(1)})
    message = Message(content=content, dst_node_id=7, message_type=messages.TRAIN, ttl=60.0)
    assert messages.arrays_of(message) is None


def test_bytes_are_those_of_all_arrays():
    # .npy: a header of 128 bytes, then 4 bytes a value
    assert messages.num_bytes(record(3, 5)) == 2 * 128 + 4 * (3 + 5)
    assert messages.total_bytes(request(arrays=record(3, 5))) == 2 * 128 + 4 * 8
    assert messages.total_bytes(request(arrays=record(3, 5), neighbours=record(2))) == 3 * 128 + 4 * 10
    assert messages.total_bytes(request()) == 0
