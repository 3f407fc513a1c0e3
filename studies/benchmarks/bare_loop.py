"""The least that federated averaging takes in PyTorch: one process, clients one after the other, no framework.

Data are tensors in memory and batches are drawn by indexing, without a DataLoader.
"""

import heapq

import numpy as np
import torch
from torch import Tensor, nn

from strategies import streams
from strategies.timing.time_scenario import TimeScenario
from studies.benchmarks.job import Job, Log, accuracy, cross_entropy, load_rows

State = dict[str, Tensor]


def run(job: Job) -> Log:
    """Run a job."""
    torch.set_num_threads(job.threads)
    # The random stream of dropout.
    torch.manual_seed(streams.whole_number(job.seed, "bare-dropout"))  # noqa: TID251
    return Loop(job).run_asynchronous() if job.server_lr else Loop(job).run_rounds()


class Loop:
    """Clients, model and test rows of a job. The rows of the file are in random order: each client has a stretch."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.x, self.y = load_rows(job.data, "train")
        self.x_test, self.y_test = load_rows(job.data, "test")
        self.model = job.initial_model(self.x).train()
        self.bounds = np.linspace(0, len(self.x), job.num_clients + 1).round().astype(int)
        self.rng = job.stream_of_batches()
        self.log = Log()

    def run_rounds(self) -> Log:
        """FedAvg."""
        job, rng = self.job, self.job.stream_of_participants()
        state = copy_of(self.model)
        self.log.mark()
        for number in range(1, job.rounds + 1):
            chosen = rng.choice(job.num_clients, job.participants, replace=False)
            sizes = np.diff(self.bounds)[chosen]
            total = {name: torch.zeros_like(value) for name, value in state.items()}
            for client, weight in zip(chosen, sizes / sizes.sum(), strict=True):
                for name, value in self.train(state, client).items():
                    total[name].add_(value, alpha=float(weight))
            state = total
            self.evaluate(number, state)
            self.log.mark()
        return self.log

    def run_asynchronous(self) -> Log:
        """Asynchronous FedAvg in virtual time (Fraboni et al. 2023, eq. 36): d_i = (Σ 1/τ_j) τ_i p_i."""
        job = self.job
        times = TimeScenario("F80", job.num_clients).means
        sizes = np.diff(self.bounds)
        weights = (job.server_lr * (1 / times).sum() * times * sizes / sizes.sum()).tolist()
        state = copy_of(self.model)
        bases = [state] * job.num_clients
        due = [(seconds, client) for client, seconds in enumerate(times.tolist())]
        heapq.heapify(due)
        self.log.mark()
        for number in range(1, job.rounds + 1):
            now, client = due[0]
            base, trained = bases[client], self.train(bases[client], client)
            state = {
                name: torch.add(value, trained[name] - base[name], alpha=weights[client])
                for name, value in state.items()
            }
            bases[client] = state
            heapq.heapreplace(due, (now + times[client], client))
            self.evaluate(number, state)
            self.log.mark()
        return self.log

    def train(self, state: State, client: int) -> State:
        """Train one client for one epoch; return the model's own arrays, which the next client overwrites."""
        self.model.load_state_dict(state, strict=False)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.job.lr)
        rows = slice(self.bounds[client], self.bounds[client + 1])
        x, y = self.x[rows], self.y[rows]
        for batch in torch.from_numpy(self.rng.permutation(len(x))).split(self.job.batch_size):
            optimizer.zero_grad()
            cross_entropy(self.model(x[batch]), y[batch]).backward()
            optimizer.step()
        return moving(self.model)

    def evaluate(self, number: int, state: State) -> None:
        """Note the accuracy of a model, if it is due."""
        if self.job.evaluates(number):
            self.model.load_state_dict(state, strict=False)
            self.log.accuracy[number] = accuracy(self.model.eval(), self.x_test, self.y_test)
            self.model.train()


def moving(model: nn.Module) -> State:
    """Return the model's arrays without the frozen ones."""
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def copy_of(model: nn.Module) -> State:
    """Return copies of the model's arrays without the frozen ones."""
    return {name: value.clone() for name, value in moving(model).items()}
