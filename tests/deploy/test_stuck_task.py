"""A SuperNode whose task expires before its message was fetched ends: Flower's own would wait for ever."""

import subprocess
import sys

import pytest

# A state of Flower's with a message and its running task, whose token expires.
SCRIPT = """
import sys
from flwr.app import Message, RecordDict
from flwr.supercore.constant import TaskType
from flwr.supercore.task_identity import TaskIdentity
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from fedapp.deploy.supernode import end_where_no_reply_can_come

assert end_where_no_reply_can_come()
state = InMemoryNodeState(ObjectStoreFactory().store())
task = state.create_task(task_type=TaskType.CLIENT_APP, run_id=7, fab_hash="f")
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 7, 2
message = Message(RecordDict(), dst_node_id=3, message_type="train")
message.metadata.__dict__.update(_message_id="m")
state.store_message(message)
if sys.argv[1] == "fetched":
    state.get_messages_legacy(run_ids=[7], is_reply=False, limit=1)
    state.record_message_processing_start("m")
state._on_task_tokens_expired(state.get_tasks(task_ids=[task]))
(reply,) = state.get_messages_legacy(is_reply=True)
print(reply.metadata.reply_to_message_id, reply.error.reason)
"""


@pytest.mark.parametrize(
    ("state", "code", "said"), [("fetched", 0, "m ClientApp stopped responding."), ("unfetched", 1, "")]
)
def test_a_supernode_ends_where_no_reply_can_come(state, code, said):
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, state], capture_output=True, text=True, check=False, timeout=120
    )
    assert (ended.returncode, ended.stdout.strip()) == (code, said), ended.stderr
    assert ("before it had fetched its message" in ended.stderr) == (state == "unfetched")
