"""Many devices in one process, for a SuperLink to serve: Flower's own connection and keys, but no ClientApp.

    python -m studies.benchmarks.light_devices DEPLOYMENT [--unpacked] [--task-seconds 180]

Each device of the deployment is a thread that does what a SuperNode does: it asks for messages every three seconds,
fetches their objects one by one, answers, and sends a heartbeat, all over TLS and signed with its own key. It answers
with the model it was sent a little changed, so that what it sends is new to the SuperLink: at once, or, with
``--task-seconds``, after a training task of that mean length, the slowest device's 5/3 as long as the fastest's. With
``--unpacked`` it reads models as Flower sends them, not as one array.
"""

import argparse
import logging
import os
import threading
import time
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.cli.flower_config import read_superlink_connection
from flwr.cli.utils import init_http_client_from_connection
from flwr.proto.control_pb2 import RegisterNodeRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_connection import http_request_response

from fedapp.deploy.files import CONNECTION, read_deployment
from fedapp.deploy.plan import Deployment, environment
from strategies.flower import messages
from strategies.flower.packing import unpack_arrays

POLL = 3.0  # seconds: a SuperNode's pause after it found no message
SPREAD = 0.5  # difference between the longest and the shortest task time, as a share of their mean
NUM_EXAMPLES = 100


def task_seconds(mean: float, index: int, devices: int) -> float:
    """Return the seconds that a device's training tasks take, equally spaced over the devices round their mean."""
    return mean * (1 + SPREAD * (index / max(devices - 1, 1) - 0.5))


def serve(folder: Path, deployment: Deployment, index: int, packed: bool, seconds: float) -> None:
    """Be a device until the process ends; each of its training tasks takes ``seconds``."""
    key = load_ssh_private_key((folder / deployment.devices[index].name / "device.key").read_bytes(), None)
    trust = str(folder / "ca.crt")
    seen: set[int] = set()
    with http_request_response(deployment.address, False, trust, (key, key.public_key())) as connection:  # type: ignore[arg-type]
        _, receive, send, get_run, get_app, pull, push, confirm = connection
        while True:
            if (received := receive()) is None:
                time.sleep(POLL)
                continue
            head, tree = received
            run_id = head.metadata.run_id
            if run_id not in seen:
                get_app(get_run(run_id).fab_hash, run_id)
                seen.add(run_id)
            request = pull_and_inflate_object_from_tree(
                tree, partial(pull, run_id), partial(confirm, run_id), return_type=Message
            )
            request.metadata.__dict__["_message_id"] = tree.object_id
            if request.metadata.message_type != messages.DESCRIBE:
                time.sleep(seconds)
            reply = respond(request, index, len(deployment.devices), packed=packed)
            reply.metadata.__dict__["_message_id"] = reply.object_id
            with no_object_id_recompute():
                missing, session = send(reply, get_object_tree(reply), 0.0)
                push_objects(
                    get_all_nested_objects(reply), partial(push, run_id, session), object_ids_to_push=missing
                )


def respond(request: Message, index: int, devices: int, *, packed: bool) -> Message:
    """Answer, as a ClientApp that reads packed models or one that doesn't."""
    context = Context(request.metadata.run_id, index, {}, RecordDict(), {})
    if packed:
        return unpack_arrays(request, context, lambda message, _: answer(message, index, devices))
    return answer(request, index, devices)


def answer(request: Message, index: int, devices: int) -> Message:
    """Answer as this app's ClientApp does, without data."""
    metrics = MetricRecord({messages.NUM_EXAMPLES: NUM_EXAMPLES})
    content = RecordDict({messages.METRICS: metrics})
    if request.metadata.message_type == messages.DESCRIBE:
        metrics[messages.PARTITION_ID], metrics[messages.NUM_PARTITIONS] = index, devices
    else:
        metrics[messages.TRAIN_LOSS] = 1.0
        sent = messages.arrays_of(request)
        assert sent is not None
        # Each device's own, and no two arrays alike, such as biases that are zero: Flower sends equal ones once.
        step = 1e-6 * (index + 1)
        content[messages.ARRAYS] = ArrayRecord(
            {
                name: Array(((1 - step) * array.numpy() + step * place).astype(array.dtype))
                for place, (name, array) in enumerate(sent.items())
            }
        )
    return Message(content, reply_to=request)


def main(folder: Path, *, packed: bool = True, mean_seconds: float = 0.0) -> None:
    """Register the devices of a deployment whose SuperLink runs, and be all of them."""
    os.environ.update(environment(str(folder)))
    logging.getLogger("flwr").setLevel(logging.WARNING)
    deployment = read_deployment(folder)
    control = init_http_client_from_connection(read_superlink_connection(CONNECTION))
    for device in deployment.devices:
        key = load_ssh_private_key((folder / device.name / "device.key").read_bytes(), None)
        control.RegisterNode(
            request=RegisterNodeRequest(
                public_key=public_key_to_bytes(key.public_key()),  # type: ignore[arg-type]
                name=device.name,
            )
        )
    devices = len(deployment.devices)
    threads = [
        threading.Thread(
            target=serve, args=(folder, deployment, index, packed, task_seconds(mean_seconds, index, devices))
        )
        for index in range(devices)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("deployment", type=Path)
    parser.add_argument("--unpacked", action="store_true")
    parser.add_argument("--task-seconds", type=float, default=0.0, help="mean length of a training task")
    options = parser.parse_args()
    main(options.deployment.absolute(), packed=not options.unpacked, mean_seconds=options.task_seconds)
