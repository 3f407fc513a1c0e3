"""What the server does in a round: Flower's FedAvg and FedAdam, ours, and FedBuff, on the same replies.

    python -m studies.benchmarks.server_round --clients 100 --size 1000000 --rounds 5 --repeats 5
    python -m studies.benchmarks.server_round --clients 8 --size 10000000 --arrays 50 --rounds 2     # large models

Clients are a stub that answers with a model of its own in float32 arrays, so that only the server works. The
strategies run in processes of their own, in turn; what is shown are medians of CPU seconds a round, of their ratios
to Flower's in the same turn, with the least and the largest, and of the memory that rounds allocate beside the
replies. FedBuff's buffer holds half of the clients; as many replies count as a round.
"""

import argparse
import json
import logging
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam as FlowersFedAdam
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg

from strategies import FedAdam, FedAvg, FedBuff, messages, streams
from strategies.testing import LocalGrid, be_the_server

# What is measured, with its aggregations a round of C clients, and what it is compared with.
KINDS: dict[str, tuple[Callable[[int], Any], int, str]] = {
    "flower": (lambda clients: FlowersFedAvg(fraction_evaluate=0.0), 1, "flower"),
    "off": (lambda clients: FedAvg(fraction_evaluate=0.0, safeguards="off"), 1, "flower"),
    "on": (lambda clients: FedAvg(fraction_evaluate=0.0, safeguards="on"), 1, "flower"),
    "flower-adam": (lambda clients: FlowersFedAdam(fraction_evaluate=0.0), 1, "flower-adam"),
    "adam": (lambda clients: FedAdam(fraction_evaluate=0.0), 1, "flower-adam"),
    "fedbuff": (lambda clients: FedBuff(buffer_size=max(clients // 2, 1)), 2, "flower"),
}


class Answers(LocalGrid):
    """A Grid whose clients answer at once, with models that are there beforehand."""

    def __init__(self, models: list[ArrayRecord]) -> None:
        self._models, self._replies = models, dict[str, Message]()

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes, one for each model."""
        return range(1, len(self._models) + 1)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Answer the messages."""
        ids = []
        for message in messages:
            ids.append(f"{len(self._replies)}-{message.metadata.dst_node_id}-{message.metadata.message_type}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self._replies[ids[-1]] = self._answer(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies."""
        return [self._replies.pop(name) for name in list(message_ids) if name in self._replies]

    def _answer(self, message: Message) -> Message:
        place = message.metadata.dst_node_id - 1
        metrics: dict[str, Any] = {messages.NUM_EXAMPLES: 10}
        if message.metadata.message_type == messages.DESCRIBE:
            metrics |= {"partition-id": place, "num-partitions": len(self._models)}
            return Message(RecordDict({messages.METRICS: MetricRecord(metrics)}), reply_to=message)
        content = {messages.ARRAYS: self._models[place], messages.METRICS: MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]


def model_of(number: int, size: int, arrays: int) -> ArrayRecord:
    """Return the model of a client, or the initial one for -1, in so many arrays of float32."""
    rng = streams.generator(0, "server-round", number + 1)
    values = rng.standard_normal(size, dtype=np.float32)
    return ArrayRecord({f"{i}": Array(part) for i, part in enumerate(np.array_split(values, arrays))})


def measure(kind: str, clients: int, size: int, rounds: int, arrays: int) -> tuple[float, float]:
    """Return the CPU seconds a round, and the MiB that rounds allocate beside the replies at most."""
    be_the_server()
    logging.disable(logging.WARNING)
    initial, *models = (model_of(number, size, arrays) for number in range(-1, clients))

    def run() -> None:
        strategy, number, _ = KINDS[kind]
        strategy(clients).start(Answers(models), initial, num_rounds=rounds * number, timeout=60.0)

    began = time.process_time()
    run()
    seconds = (time.process_time() - began) / rounds
    tracemalloc.start()  # a run of its own, as counting takes time
    run()
    return seconds, tracemalloc.get_traced_memory()[1] / 2**20


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--size", type=int, default=1_000_000, help="values of the model")
    parser.add_argument("--arrays", type=int, default=10, help="arrays of the model")
    parser.add_argument("--rounds", type=int, default=5, help="of a process")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["flower", "off", "on"])
    parser.add_argument("--kind", choices=KINDS, help="measure this one, in this process")
    options = parser.parse_args()
    if options.kind:
        asked = options.clients, options.size, options.rounds, options.arrays
        print(json.dumps(measure(options.kind, *asked)))
        return
    command = [
        sys.executable,
        "-m",
        __spec__.name,
        f"--clients={options.clients}",
        f"--size={options.size}",
        f"--arrays={options.arrays}",
        f"--rounds={options.rounds}",
    ]
    kinds = [kind for kind in KINDS if kind in {*options.kinds, *(KINDS[kind][2] for kind in options.kinds)}]
    turns = []
    for _ in range(options.repeats):
        ran = {
            kind: subprocess.run([*command, f"--kind={kind}"], capture_output=True, text=True, check=True)
            for kind in kinds
        }
        turns.append({kind: json.loads(each.stdout.splitlines()[-1]) for kind, each in ran.items()})
    for kind in kinds:
        beside = KINDS[kind][2]
        seconds, memory = (
            median(turn[kind][0] for turn in turns),
            median(turn[kind][1] - turn[beside][1] for turn in turns),
        )
        ratios = [turn[kind][0] / turn[beside][0] for turn in turns]
        share = f"{median(ratios):5.2f} times {beside}'s ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{kind:12} {seconds:6.2f} CPU s  {share}  {memory:+7.1f} MiB")


if __name__ == "__main__":
    main()
