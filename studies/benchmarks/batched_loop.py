"""FedAvg by hand in PyTorch: the gradients of a dense network written out, as batched products over clients.

For dense models only. Clients are divided over threads, each of which works on a few of them at a time: torch's own
threads within a product took 1.2 times as long here.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from studies.benchmarks.hand_written import HandWritten, Integers
from studies.benchmarks.job import Job, Log, accuracy

# Participants that are trained together: what stays in a core's cache.
TOGETHER = 10


def run(job: Job) -> Log:
    """Run a job."""
    torch.set_num_threads(1)
    return BatchedLoop(job).run()


class BatchedLoop(HandWritten):
    """Weights (out, in) and biases (out,) of the layers, stacked over clients in training."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.layers = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        if {type(module) for module in self.model} - {nn.Linear, nn.ReLU, nn.Flatten}:  # type: ignore[union-attr]
            raise ValueError(f"written for dense networks with ReLU; the model is {job.model}")
        self.x = self.x.flatten(1)
        self.threads = ThreadPoolExecutor(job.threads)

    def _train(self, chosen: Tensor, batches: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the sums over some clients of their trained weights and biases."""
        count = len(chosen)
        w = [layer.weight.detach().repeat(count, 1, 1) for layer in self.layers]
        b = [layer.bias.detach().repeat(count, 1).unsqueeze(1) for layer in self.layers]
        own = self.rows * chosen[:, None]
        for rows in batches.unbind(1):
            size = int((rows[0] >= 0).sum())  # all clients have as many rows
            at = own + rows[:, :size]
            inputs = [self.x[at]]
            for weight, bias in zip(w, b, strict=True):
                inputs.append(torch.baddbmm(bias, inputs[-1], weight.mT))
                if weight is not w[-1]:
                    inputs[-1].relu_()
            error = torch.softmax(inputs.pop(), 2)
            error.scatter_add_(2, self.y[at].unsqueeze(2), torch.full((count, size, 1), -1.0))
            error *= -self.job.lr / size
            for depth in range(len(w) - 1, -1, -1):
                below = (error @ w[depth]) * (inputs[depth] > 0) if depth else None
                w[depth].baddbmm_(error.mT, inputs[depth])
                b[depth] += error.sum(1, keepdim=True)
                error = below if below is not None else error
        return [(weight.sum(0), bias.sum(0).squeeze(0)) for weight, bias in zip(w, b, strict=True)]

    def round(self, chosen: Integers, batches: Integers) -> None:
        """Let clients train, some at a time."""
        with torch.no_grad():
            parts = zip(
                torch.from_numpy(chosen).split(TOGETHER),
                torch.from_numpy(batches).split(TOGETHER),
                strict=True,
            )
            sums = list(self.threads.map(lambda part: self._train(*part), parts))
            for number, layer in enumerate(self.layers):
                layer.weight.copy_(sum(each[number][0] for each in sums) / len(chosen))
                layer.bias.copy_(sum(each[number][1] for each in sums) / len(chosen))

    @property
    def state(self) -> dict[str, Tensor]:
        """The model's parameters, by name."""
        return {name: value.detach() for name, value in self.model.named_parameters()}

    def accuracy(self) -> float:
        """Share of the test rows that the model gets right."""
        return accuracy(self.model, self.x_test, self.y_test)
