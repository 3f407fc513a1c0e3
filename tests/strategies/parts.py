"""What parts of a strategy are built with when they are tested alone."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from strategies import FedAvg, messages
from strategies.clients.roster import Client, Roster
from strategies.clock import Clock, VirtualClock
from strategies.core.config import FlowerOptions, StrategyConfig, SynchronousConfig
from strategies.core.population import Population
from strategies.core.receiver import Receiver
from strategies.core.requests import TrainingRequests
from strategies.core.run_state import RunOptions, RunState
from strategies.flower.internals import give_id
from strategies.timing.scheduler import Scheduler
from strategies.timing.virtual_scheduler import VirtualScheduler
from strategies.updates.buffers import Buffers
from strategies.updates.pipeline import Clip, Contribution
from strategies.updates.safeguards import Bounds, Safeguards


def client(index: int, size: int | None = 1) -> Client:
    return Client(100 + index, index, size, MetricRecord())


def run_of(clients: Sequence[Client] = (), **values: Any) -> Any:
    """Return what a part asks of a run's state."""
    scheduler = SimpleNamespace(real_time=False, always=True, now=lambda: 0.0)
    known = {
        "clients": list(clients),
        "aggregations": 0,
        "earlier": 0,
        "any_nonzero_update": False,
        "scheduler": scheduler,
        "timeout": 5.0,
        "best": None,
        "options": RunOptions(),
        "should_stop": lambda: False,
        "model": np.zeros(2),
        "buffers": Buffers(np.empty(0, np.intp), np.empty(0, bool), np.empty(0, bool)),
    }
    return SimpleNamespace(**known | values)


def model_of(*values: float) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.array(values or (0.0, 0.0)))})


def begun(
    clients: Iterable[Client] = (), config: StrategyConfig | None = None, *values: float, **flower: Any
) -> RunState:
    """Return the state of a run in virtual time that has just begun, from the model w = ``values``."""
    config = config or SynchronousConfig()

    def scheduler(clock: Clock) -> Scheduler:
        times = config.time_scenario, config.seed, config.time_budget
        return VirtualScheduler(clock, *times, None, config.availability, config.task_failure)

    run = RunState("FedAvg", config, FlowerOptions(**flower), scheduler, RunOptions(VirtualClock()))
    run.begin(model_of(*values))
    run.clients = list(clients)
    run.scheduler.register_clients(run.clients)
    return run


def safeguards(mode: str = "off", **bounds: float) -> Safeguards:
    return Safeguards(mode, Bounds(**bounds), lambda: False)  # type: ignore[arg-type]


def population(run: RunState, kind: str = "samples") -> Population:
    return Population(run, Roster(), safeguards(), kind)


def training_requests(run: RunState, **hooks: Any) -> TrainingRequests:
    nothing = {"local_rule": dict, "task_fields": dict, "extra_records": lambda client: {}}
    method: Any = SimpleNamespace(**nothing | hooks)
    return TrainingRequests(run, run.scheduler.task_costs, method)


def receiver(
    run: RunState, guards: Safeguards | None = None, clip: Clip | None = None, **hooks: Any
) -> Receiver:
    known: dict[str, Any] = {
        "capabilities": replace(FedAvg.capabilities, sees_single_updates=True),
        "local_rule": dict,
        "on_local_model": lambda client, model: None,
    }
    method: Any = SimpleNamespace(**known | hooks)
    return Receiver(run, guards or safeguards(), method, clip=clip)


def reply(
    to: Message | None = None, values: Sequence[float] | None = None, records: Any = None, **metrics: Any
) -> Message:
    """Return a reply with the model w = ``values`` and metrics, where ``_`` stands for ``-``."""
    content = RecordDict({} if values is None else {messages.ARRAYS: model_of(*values)})
    content["metrics"] = MetricRecord({name.replace("_", "-"): value for name, value in metrics.items()})
    for name, record in (records or {}).items():
        content[name] = record
    return Message(content, reply_to=to or request(0))


def request(node_id: int, message_type: str = messages.TRAIN, **fields: Any) -> Message:
    made = messages.request(message_type, node_id, ConfigRecord(fields), ttl=60.0)
    give_id(made, f"request-{node_id}")
    return made


def contribution(index: int, update: Sequence[float] = (1.0, 0.0), **values: Any) -> Contribution:
    known: dict[str, Any] = {
        "base": np.zeros(len(update)),
        "version": 0,
        "staleness": 0,
        "metrics": MetricRecord({messages.NUM_EXAMPLES: 2}),
        "records": {},
        "num_bytes": 8,
    }
    return Contribution(client=client(index), update=np.array(update), **known | values)
