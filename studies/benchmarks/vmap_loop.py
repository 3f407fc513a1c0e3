"""FedAvg by hand in PyTorch: ``torch.func.vmap`` over the clients of a round, a loop over their steps."""

import torch
import torch.nn.functional as F
from torch import Tensor

from studies.benchmarks.hand_written import HandWritten, Integers
from studies.benchmarks.job import Job, Log, accuracy

# Participants that are trained together: all of them at once are no faster, and take more memory.
TOGETHER = 25


def run(job: Job) -> Log:
    """Run a job."""
    torch.set_num_threads(job.threads)
    return VmapLoop(job).run()


class VmapLoop(HandWritten):
    """Parameters by name, stacked over clients in training."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.clients = (
            self.x.unflatten(0, (job.num_clients, self.rows)),
            self.y.unflatten(0, (job.num_clients, self.rows)),
        )
        self.state = {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def _step(self, w: dict[str, Tensor], x: Tensor, y: Tensor, rows: Tensor) -> dict[str, Tensor]:
        real = rows >= 0
        rows = rows.clamp(min=0)

        def loss(w: dict[str, Tensor]) -> Tensor:
            logits = torch.func.functional_call(self.model, w, (x[rows],))
            return (F.cross_entropy(logits, y[rows], reduction="none") * real).sum() / real.sum()

        gradient = torch.func.grad(loss)(w)
        return {name: value - self.job.lr * gradient[name] for name, value in w.items()}

    def round(self, chosen: Integers, batches: Integers) -> None:
        """Let clients train, some at a time."""
        total = {name: torch.zeros_like(value) for name, value in self.state.items()}
        for own, rows in zip(
            torch.from_numpy(chosen).split(TOGETHER), torch.from_numpy(batches).split(TOGETHER), strict=True
        ):
            x, y = (each[own] for each in self.clients)
            w = {name: value.expand(len(own), *value.shape) for name, value in self.state.items()}
            for step in rows.unbind(1):
                w = torch.func.vmap(self._step)(w, x, y, step)
            for name, value in w.items():
                total[name] += value.sum(0)
        self.state = {name: value / len(chosen) for name, value in total.items()}

    def accuracy(self) -> float:
        """Share of the test rows that the model gets right."""
        self.model.load_state_dict(self.state)
        return accuracy(self.model, self.x_test, self.y_test)
