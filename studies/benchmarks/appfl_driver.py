"""APPFL's simulator with a virtual clock (``appfl.vsim``), told to compute asynchronous FedAvg.

Its ``FedAsyncAggregator`` adds alpha · w_i / Σ w_j times a client's change, where clients send changes and w_i are
the sizes it is told: with w_i = τ_i n_i that is d_i, to rounding. Times are those of its profiles, to the bit.
Arrivals at the very same moment are all aggregated before any of their clients takes the new model; in the bare loop
each client takes it at once.

Its fastest settings, as its code has them: no validation, nothing logged, no garbage collection between the parts of
each step (``optimize_memory``, on by itself: with 1,000 clients in a process a collection takes a second or two, and
each event asks for several).
"""

import copy
import logging
from itertools import pairwise

import numpy as np
import torch
from appfl.agent import SimClientAgent, SimServerAgent
from appfl.vsim import AsyncSimDriver, ClientProfile
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import TensorDataset

from strategies.timing.time_scenario import TimeScenario
from studies.benchmarks.job import Job, Log, accuracy, load_rows

# Options that are given though they are off by default: for a missing option OmegaConf searches similar names at
# every access, which takes a sixth of the time.
UNUSED = (
    "optimize_memory",
    "clip_grad",
    "use_dp",
    "use_secure_agg",
    "do_validation",
    "do_pre_validation",
)


def run(job: Job) -> Log:
    """Run a job."""
    torch.set_num_threads(job.threads)
    logging.disable(logging.INFO)
    driver = AppflDriver(job)
    driver.log.mark()
    driver.run()
    return driver.log


class AppflDriver(AsyncSimDriver):
    """APPFL's driver, which also marks each complete aggregation, and evaluates as this benchmark does."""

    def __init__(self, job: Job) -> None:
        self.job, self.log = job, Log()
        x, y = load_rows(job.data, "train")
        self.test_rows = load_rows(job.data, "test")
        self.model = job.initial_model(x)
        bounds = np.linspace(0, len(x), job.num_clients + 1).round().astype(int)
        sizes, times = np.diff(bounds), TimeScenario("F80", job.num_clients).means
        alpha = job.server_lr * (1 / times).sum() * (times * sizes).sum() / sizes.sum()
        clients, profiles, server = [], {}, AppflServer(server_config(job, float(alpha)), self.model)
        for number, (first, last) in enumerate(pairwise(bounds)):
            rows = TensorDataset(x[first:last], y[first:last])
            client = AppflClient(client_config(job), self.model, client_id=str(number), client_dataset=rows)
            steps = -(-len(rows) // job.batch_size)
            profiles[client.get_id()] = ClientProfile(float(times[number]) / steps, bandwidth=0)
            # The signature says int; the arithmetic takes a float, too.
            server.set_sample_size(client.get_id(), float(times[number] * sizes[number]))
            clients.append(client)
        super().__init__(
            server, clients, profiles, job.num_clients, logging.getLogger("appfl"), base_step_time=1.0
        )

    def _handle_train_complete(self, cid: str, completion_time: float) -> None:
        super()._handle_train_complete(cid, completion_time)
        number = self._cur_epoch()
        if self.job.evaluates(number):
            self.model.load_state_dict(self.server.get_parameters(serial_run=True))
            self.log.accuracy[number] = accuracy(self.model, *self.test_rows)
        self.log.mark()


class AppflServer(SimServerAgent):
    """APPFL's server with the job's model; APPFL itself loads a model from a file."""

    def __init__(self, config: OmegaConf, model: nn.Module) -> None:
        self._of_ours = model
        super().__init__(config)

    def _load_model(self) -> None:
        self.model = copy.deepcopy(self._of_ours)


class AppflClient(SimClientAgent):
    """APPFL's client with the job's model."""

    def __init__(self, config: OmegaConf, model: nn.Module, **others: object) -> None:
        self._of_ours = model
        super().__init__(config, **others)

    def _load_model(self) -> None:
        self.model = copy.deepcopy(self._of_ours)

    def _load_metric(self) -> None:
        self.metric = lambda labels, outputs: (outputs.argmax(1) == labels).mean()


def server_config(job: Job, alpha: float) -> OmegaConf:
    """Return the config of APPFL's server."""
    aggregator = {
        "alpha": alpha,
        "staleness_fn": "constant",
        "client_weights_mode": "sample_size",
        "optimize_memory": False,
    }
    server = {
        "num_clients": job.num_clients,
        "num_global_epochs": job.rounds,
        "aggregator": "FedAsyncAggregator",
        "aggregator_kwargs": aggregator,
        "scheduler": "AsyncScheduler",
        "scheduler_kwargs": {"optimize_memory": False},
        "optimize_memory": False,
    }
    clients = {"train_configs": {"loss_fn": "CrossEntropyLoss", "send_gradient": True}}
    return OmegaConf.create({"server_configs": server, "client_configs": clients})


def client_config(job: Job) -> OmegaConf:
    """Return the config of APPFL's clients."""
    training = {
        "trainer": "VanillaTrainer",
        "mode": "epoch",
        "num_local_epochs": 1,
        "train_batch_size": job.batch_size,
        "optim": "SGD",
        "optim_args": {"lr": job.lr},
        "loss_fn": "CrossEntropyLoss",
        "send_gradient": True,
        "device": "cpu",
        "logging_output_dirname": "",  # it writes a file for each client
        "logging_output_filename": "",
        **dict.fromkeys(UNUSED, False),
    }
    return OmegaConf.create({"train_configs": training, "optimize_memory": False})
