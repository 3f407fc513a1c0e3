"""pfl-research's simulation of FedAvg (``SimulatedBackend``, ``FederatedAveraging``), set up as its benchmarks are.

A process of one thread for each core, started by torchrun, which pfl divides a round's participants over: on two
cores 1.6 times as fast as one process, of one thread or two. The same participants in each round as in the bare loop,
from the same initial model. A client's batches are its rows in the order of the file, the same each time: pfl doesn't
shuffle them. Kinder than its benchmarks in two ways: images are scaled before the run, and participants' own
accuracies, before and after training, aren't taken.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategies import streams
from studies.benchmarks.job import Job, Log, accuracy, load_rows


def run(job: Job) -> Log:
    """Run a job in as many processes as it has threads."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("job.json", "log.json")]
        job.write(paths[0])
        group = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        group += [f"--nproc-per-node={job.threads}", "-m", "studies.benchmarks.pfl_backend", *map(str, paths)]
        subprocess.run(group, check=True)
        return Log.read(paths[1])


def simulate(job: Job) -> tuple[Log, "Trained"]:
    """Run a job in this process, one of a group if torchrun has started it; return what it left behind."""
    # Imported here: pfl looks for its group when it is imported.
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.internal.ops.pytorch_ops import get_default_device
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    log = Log()
    x, y, *test_rows = (
        rows.to(get_default_device()) for part in ("train", "test") for rows in load_rows(job.data, part)
    )

    class Notes(TrainingProcessCallback):
        """Told after each aggregation."""

        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            number = central_iteration + 1
            if job.evaluates(number):
                log.accuracy[number] = accuracy(model.pytorch_model.eval(), *test_rows)
            log.mark()
            return False, Metrics()

    rows = zip(x.tensor_split(job.num_clients), y.tensor_split(job.num_clients), strict=True)
    clients, sampler = [Dataset(raw_data=own) for own in rows], participants(job)
    federation = FederatedDataset(clients.__getitem__, lambda: next(sampler))
    module = Trained(job.initial_model(x))
    log.mark()
    FederatedAveraging().run(
        NNAlgorithmParams(
            job.rounds, evaluation_frequency=job.rounds, train_cohort_size=job.participants, val_cohort_size=0
        ),
        SimulatedBackend(federation, federation, [WeightByDatapoints()]),
        PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=job.lr, local_batch_size=job.batch_size),
        callbacks=[Notes()],
    )
    return log, module


def participants(job: Job) -> Iterator[int]:
    """Yield who trains, one after the other: pfl asks for one at a time, of each process.

    Each takes as many, so that with a number of participants that processes don't divide, some would be left out.
    """
    if job.participants % job.threads:
        raise ValueError(f"{job.participants} participants can't be divided over {job.threads} processes")
    rng = job.stream_of_participants()
    while True:
        yield from rng.choice(job.num_clients, job.participants, replace=False).tolist()


class Trained(nn.Module):
    """A model with the two methods that pfl calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        outputs: Tensor = self.model(x)
        return outputs

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch."""
        self.train()
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
        """Return none: the benchmark evaluates by itself, in ``Notes``."""
        return {}


def main(job_path: str, log_path: str) -> None:
    """Run a job as one process of a group, the first of which writes the log."""
    job, rank = Job.read(Path(job_path)), int(os.environ["RANK"])
    torch.set_num_threads(1)
    # What dropout draws from.
    torch.manual_seed(streams.whole_number(job.seed, "pfl-dropout", rank))  # noqa: TID251
    log, _ = simulate(job)
    if rank == 0:
        log.write(Path(log_path))


if __name__ == "__main__":
    main(*sys.argv[1:])
