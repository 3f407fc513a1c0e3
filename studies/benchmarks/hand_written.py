"""The base of the hand-written loops: FedAvg on arrays, all participants of a round at once."""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from studies.benchmarks.job import Job, Log, load_rows

Integers = NDArray[np.int64]


class HandWritten(ABC):
    """Clients, model and test rows of a job, whose clients all have the same number of rows.

    Raises
    ------
    ValueError
        If clients have different numbers of rows, or the job is asynchronous.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.x, self.y = load_rows(job.data, "train")
        self.x_test, self.y_test = load_rows(job.data, "test")
        self.rows, rest = divmod(len(self.x), job.num_clients)
        if rest or job.server_lr:
            raise ValueError("written for rounds of clients that all have the same number of rows")
        self.model = job.initial_model(self.x)
        self.rng = job.stream_of_batches()

    def run(self) -> Log:
        """FedAvg."""
        job, rng, log = self.job, self.job.stream_of_participants(), Log()
        log.mark()
        for number in range(1, job.rounds + 1):
            chosen = np.sort(rng.choice(job.num_clients, job.participants, replace=False))
            self.round(chosen, self.batches())
            if job.evaluates(number):
                log.accuracy[number] = self.accuracy()
            log.mark()
        return log

    def batches(self) -> Integers:
        """Return the rows of each participant's steps, (participants, steps, batch); −1 where there is none."""
        size = min(self.job.batch_size, self.rows)
        steps = -(-self.rows // size)
        drawn = np.full((self.job.participants, steps * size), -1)
        for own in drawn:
            own[: self.rows] = self.rng.permutation(self.rows)
        return drawn.reshape(len(drawn), steps, size)

    @abstractmethod
    def round(self, chosen: Integers, batches: Integers) -> None:
        """Let clients train, and take the mean of their models."""

    @abstractmethod
    def accuracy(self) -> float:
        """Share of the test rows that the model gets right."""
