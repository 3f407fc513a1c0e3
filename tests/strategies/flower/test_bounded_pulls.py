"""Flower's own Grid of a deployment reads no reply beyond a bound; the SuperLink behind it is one in memory."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from strategies.flower import messages
from strategies.flower.arrays import Layout
from strategies.flower.packing import TOO_LARGE, PackingGrid

MORE = 48 << 20  # bytes of a second record


class SuperLinkInMemory:
    """What a ServerApp's client of the SuperLink has of it: replies, and the objects they consist of."""

    def __init__(self, replies: list[Message]) -> None:
        self.replies, self.objects, self.bytes_read = replies, dict[str, bytes](), 0
        self.received: list[str] = []
        self.missing: set[str] = set()
        for reply in replies:
            reply.metadata.__dict__["_message_id"] = reply.object_id
            self.objects |= {key: each.deflate() for key, each in get_all_nested_objects(reply).items()}

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:  # noqa: N802
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(reply)) for reply in self.replies],
            message_object_trees=[get_object_tree(reply) for reply in self.replies],
        )

    def PullObject(self, request: Any) -> PullObjectResponse:  # noqa: N802
        if request.object_id in self.missing:
            return PullObjectResponse(object_found=False)
        content = self.objects[request.object_id]
        self.bytes_read += len(content)
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.received.append(request.message_object_id)


def model() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.arange(1 << 16, dtype=np.float32))})


def reply(more: int = 0) -> Message:
    """Return a reply, with a second record of so many bytes."""
    request = messages.request(messages.TRAIN, 1, ConfigRecord(), ttl=60.0, arrays=model())
    request.metadata.__dict__["_message_id"] = f"request-{more}"
    content = RecordDict({"arrays": model(), "metrics": MetricRecord({"num-examples": 10})})
    if more:
        zeros = (
            np.random.default_rng(0).integers(256, size=more).astype(np.uint8)
        )  # no two objects are the same
        content["more"] = ArrayRecord({"bytes": Array(zeros)})
    return Message(content, reply_to=request)


class Nightly(HttpGrid):
    """Flower's Grid of 1.43: of a reply whose objects are missing there is only a line in the log."""

    def pull_messages(self, message_ids: Any = None) -> list[Message]:
        return [reply for reply in super().pull_messages(message_ids) if not reply.has_error()]


def pulled(
    replies: list[Message], most: float, kind: type[HttpGrid] = HttpGrid, missing: tuple[int, ...] = ()
) -> tuple[list[Message], SuperLinkInMemory]:
    grid, link = kind(token="a token"), SuperLinkInMemory(replies)
    link.missing = {replies[place].metadata.message_id for place in missing}
    grid.set_run(Run.create_empty(1))
    grid._client = link  # type: ignore[assignment]
    packing = PackingGrid(grid, lambda: most)
    return list(packing.pull_messages(["request"])), link


MOST = Layout.of(model()).most_bytes + messages.MOST_BESIDE


@pytest.mark.parametrize("more", [0, 1 << 18])
def test_a_reply_within_the_bound_is_read_whole(more):
    (found,), link = pulled([reply(more)], MOST)
    assert messages.num_bytes(found.content.array_records["arrays"]) == messages.num_bytes(model())
    assert link.received == [found.metadata.message_id]
    assert link.bytes_read == sum(map(len, link.objects.values()))


@pytest.mark.parametrize("kind", [HttpGrid, Nightly])
def test_a_larger_reply_is_read_up_to_the_bound_and_dropped(kind):
    large = reply(MORE)
    (found,), link = pulled([large], MOST, kind)
    assert found.has_error()
    assert (found.error.code, found.error.reason) == (
        TOO_LARGE,
        f"its reply takes more than {MOST} bytes, and isn't read further",
    )
    assert found.metadata.reply_to_message_id == f"request-{MORE}"
    # Several objects are being read at the same time, as many as Flower has threads for them.
    assert link.bytes_read < MORE
    assert link.received == [large.metadata.message_id]  # the SuperLink keeps none of it


def test_one_large_reply_leaves_the_others_as_they_are():
    found, link = pulled([reply(), reply(MORE), reply(1000)], MOST)
    assert {each.metadata.reply_to_message_id: each.has_error() for each in found} == {
        "request-0": False,
        f"request-{MORE}": True,
        "request-1000": False,
    }
    assert len(link.received) == 3


@pytest.mark.parametrize("kind", [HttpGrid, Nightly])
def test_a_reply_of_which_the_superlink_lacks_a_part_is_an_error_with_a_reason(kind):
    found, _ = pulled([reply(), reply(1000)], MOST, kind, missing=(1,))
    (error,) = [each for each in found if each.has_error()]
    assert len(found) == 2
    assert error.metadata.reply_to_message_id == "request-1000"
    assert messages.reason_of(error) == "its reply can't be read: the SuperLink lacks a part of it"
