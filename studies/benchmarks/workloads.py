"""What is measured: workloads, contenders, and the data."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedapp.data.errors import DataError
from fedapp.data.npz import read_npz
from strategies import streams
from studies.benchmarks.job import Job

# Name on the command line → (kind of process, threads of loops and peers, name in tables and figures).
CONTENDERS: dict[str, tuple[str, int, str]] = {
    "bare-1": ("bare", 1, "bare loop, 1 thread"),
    "bare-2": ("bare", 2, "bare loop, 2 threads"),
    "stock": ("stock", 1, "stock Flower on Ray"),
    "simulate": ("simulate", 1, "stock by simulate"),
    "ray": ("ray", 1, "fedapp on Ray"),
    "sequential": ("sequential", 1, "fedapp, sequential"),
    "vectorized": ("vectorized", 1, "fedapp, vectorized"),
    "workers": ("workers", 1, "fedapp, 2 workers"),
    "vmap": ("vmap", 2, "vmap, by hand"),
    "jax": ("jax", 2, "JAX, by hand"),
    "batched": ("batched", 2, "batched, by hand"),
    "appfl": ("appfl", 1, "APPFL, simulated"),
    "flgo": ("flgo", 1, "FLGo"),
    "pfl": ("pfl", 2, "pfl-research"),
}
# Packages that some contenders need, beyond this project's own requirements.
PACKAGES = {"jax": "jax", "appfl": "appfl", "flgo": "flgo", "pfl": "pfl"}
ASYNCHRONOUS = ("appfl", "flgo")  # written for asynchronous FedAvg alone
DEFAULT_CONTENDERS = ("bare-1", "bare-2", "stock", "simulate", "ray", "vectorized")


@dataclass(frozen=True)
class Workload:
    """One comparison.

    Attributes
    ----------
    name, title : str
    data : str
        Name of the data, a key of ``Data.path``.
    model : str
    num_clients, participants, batch_size : int
    lr : float
    rounds : int
        Aggregations.
    rounds_of : dict
        Other numbers of aggregations, by contender.
    repeats : int
        Runs of each contender.
    warmup : int
        Aggregations at the start that aren't timed.
    server_lr : float
        Learning rate of the server in asynchronous FedAvg; 0: synchronous.
    without : tuple of str
        Contenders that can't do it, or would take too long.
    evaluate_every : int
        Aggregations between two evaluations; 0: one, where the shortest run ends.
    """

    name: str
    title: str
    data: str
    model: str
    num_clients: int
    participants: int
    batch_size: int
    lr: float
    rounds: int
    rounds_of: dict[str, int] = field(default_factory=dict)
    repeats: int = 3
    warmup: int = 1
    server_lr: float = 0.0
    without: tuple[str, ...] = ()
    evaluate_every: int = 0

    @property
    def unit(self) -> tuple[int, str]:
        """Aggregations that a figure is for, and their name."""
        return (1000, "1,000 events") if self.server_lr else (1, "round")

    def with_rounds(self, rounds: int) -> "Workload":
        """Return the workload with as many aggregations for every contender."""
        return replace(self, rounds=rounds, rounds_of={})

    def rounds_for(self, contender: str) -> int:
        """Return the aggregations of a contender."""
        return self.rounds_of.get(contender, self.rounds)

    def job(self, contender: str, data: Path) -> Job:
        """Return what a contender is told; all of them evaluate at the same aggregations."""
        return Job(
            data=str(data),
            model=self.model,
            num_clients=self.num_clients,
            participants=self.participants,
            batch_size=self.batch_size,
            lr=self.lr,
            rounds=self.rounds_for(contender),
            evaluate_every=self.evaluate_every or min([self.rounds, *self.rounds_of.values()]),
            server_lr=self.server_lr,
            threads=CONTENDERS[contender][1],
        )


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "W1",
            "logistic regression, 100 of 100 clients",
            "images",
            "logistic",
            100,
            100,
            64,
            0.1,
            10,
            without=ASYNCHRONOUS,
        ),
        Workload(
            "W2",
            "MLP 784-128-10, 100 of 100 clients",
            "images",
            "mlp",
            100,
            100,
            64,
            0.1,
            8,
            without=ASYNCHRONOUS,
        ),
        Workload(
            "W3",
            "CNN, 10 of 100 clients",
            "images",
            "cnn",
            100,
            10,
            64,
            0.1,
            20,  # after six rounds on MNIST accuracies of equal contenders differ by over a point
            repeats=2,
            without=("jax", "batched", *ASYNCHRONOUS),
        ),
        Workload(
            "W4",
            "digits, logistic regression, asynchronous FedAvg, 1,000 clients",
            "digits",
            "logistic",
            num_clients=1000,
            participants=1000,
            batch_size=16,
            lr=0.1,
            rounds=20_000,
            rounds_of={"ray": 2500},
            repeats=1,
            warmup=1000,  # on average one answer of each client
            server_lr=0.01,
            # They have no asynchronous strategy.
            without=("stock", "simulate", "vmap", "jax", "batched", "pfl"),
        ),
        Workload(
            "W5",
            "pfl-research's CIFAR10-IID, CNN, 50 of 1,000 clients",
            "colour",
            "studies.benchmarks.nets:simple_cnn",
            num_clients=1000,
            participants=50,
            batch_size=10,
            lr=0.1,
            rounds=20,  # of its 1,500
            repeats=2,
            without=("stock", "simulate", "vmap", "jax", "batched", *ASYNCHRONOUS),
            evaluate_every=10,
        ),
        Workload(
            "W6",
            "LoRA (peft) on a transformer of two layers, 50 of 50 clients",
            "letters",
            "custom.text:with_adapters",
            num_clients=50,
            participants=50,
            batch_size=4,
            lr=1.0,
            rounds=8,
            repeats=2,
            without=("stock", "simulate", "vmap", "jax", "batched", "pfl", *ASYNCHRONOUS),
        ),
    )
}

SCALES = (100, 1_000, 10_000, 100_000)
# With images of 8x8, as the digits are.
SMALL_SCALES = (1_000, 10_000, 100_000, 1_000_000)
SAMPLES_PER_CLIENT = 10

# More clients than that would take these contenders too long.
MOST_CLIENTS = {
    "stock": 1_000,
    "simulate": 10_000,
    "ray": 1_000,
    "bare-2": 0,
    "bare-1": 10_000,
    "sequential": 10_000,
    "vmap": 10_000,
    **dict.fromkeys(("appfl", "flgo", "pfl"), 0),
}


def scaled(num_clients: int, *, small: bool = False) -> Workload:
    """Return W1 with ``num_clients`` clients of ten samples each; ``small``: of 8x8 pixels."""
    without = tuple(name for name, most in MOST_CLIENTS.items() if num_clients > most)
    return replace(
        WORKLOADS["W1"],
        name=f"{'small' if small else 'W1'}x{num_clients}",
        title=f"logistic regression, {num_clients:,} of {num_clients:,} clients, {SAMPLES_PER_CLIENT} samples each"
        + ", 8x8" * small,
        data=f"{'small-' * small}images-{num_clients * SAMPLES_PER_CLIENT}",
        num_clients=num_clients,
        participants=num_clients,
        rounds=12 if num_clients == (1_000 if small else 100) else 5,
        repeats=1,
        without=without,
    )


# Shape and training rows of what is generated, and what shapes may take its place.
GENERATED: dict[str, tuple[tuple[int, ...], int]] = {
    "images": ((1, 28, 28), 60_000),
    "small-images": ((1, 8, 8), 60_000),
    "colour": ((3, 32, 32), 50_000),
}
OWN_SHAPES = {"images": [(28, 28)], "colour": [(3, 32, 32), (32, 32, 3)]}


class Data:
    """The data sets, written to a folder when they are first needed.

    Parameters
    ----------
    folder : Path
        The folder.
    images : Path, optional
        An .npz file of images in 10 classes, with test rows, to take in place of generated ones: 28x28, or 32x32 in
        colour, as CIFAR-10 is.

    Raises
    ------
    DataError
        If the file isn't such an .npz file.
    """

    def __init__(self, folder: Path, images: Path | None = None) -> None:
        self.folder = folder
        self.own: dict[str, Path] = {}  # by the names of what they take the place of
        if images is not None:
            splits = read_npz(images)
            shape, classes = splits[0].x.shape[1:], int(splits[0].y.max()) + 1
            fits = [kind for kind, shapes in OWN_SHAPES.items() if shape in shapes]
            if len(splits) != 2 or not fits or classes != 10:
                raise DataError(
                    f"--data-path {images}: must hold x_train, y_train, x_test, y_test, 28x28 images of 10 classes "
                    "or 32x32 in colour; "
                    f"found {len(splits) - 1} test sets, images of shape {shape}, {classes} classes"
                )
            self.own[fits[0]] = images.absolute()

    def path(self, name: str) -> Path:
        """Return the file of a name, such as ``digits``, or of N rows: ``images-N``, ``small-images-N``."""
        if name in self.own:
            return self.own[name]
        path = self.folder / f"{name}.npz"
        if not path.exists():
            kind, _, number = name.rpartition("-") if name[-1].isdigit() else (name, "", "")
            if kind in (own := {"digits": digits, "letters": letters}):
                arrays = own[kind]()
            else:
                shape, num_train = GENERATED[kind]
                arrays = images(int(number or num_train), 10_000, shape=shape)
            np.savez(path, **arrays)  # type: ignore[arg-type]
        return path


def images(
    num_train: int, num_test: int, seed: int = 0, shape: tuple[int, ...] = (1, 28, 28)
) -> dict[str, NDArray[np.generic]]:
    """Generate images of MNIST's shape, or another: bytes, ten classes; without an axis for a single channel.

    Each class has four soft spots a channel in places of its own, under noise that is cut off at black, as MNIST's
    ground is. One label in ten is drawn at random, so that the best accuracy there can be is 0.91.
    """
    rng = streams.generator(seed, "made-up-rows")
    grid = np.arange(shape[-1])
    spots = np.zeros((10, *shape), np.float32)
    for channel in spots.reshape(-1, *shape[1:]):
        for y, x, width in rng.uniform((4, 4, 2), (24, 24, 4), (4, 3)) * (shape[-1] / 28):
            channel += np.exp(-((grid[:, None] - y) ** 2 + (grid - x) ** 2) / (2 * width**2))
    spots = SPOTS * spots.clip(max=1)
    labels = rng.integers(0, 10, num_train + num_test)
    rows = np.empty((len(labels), *shape), np.uint8)
    for start in range(0, len(rows), 10_000):
        clean = spots[labels[start : start + 10_000]]
        noisy = clean + NOISE * rng.standard_normal(clean.shape, np.float32)
        rows[start : start + 10_000] = (255 * noisy).clip(0, 255)
    wrong = rng.random(len(labels)) < 0.1
    labels[wrong] = rng.integers(0, 10, wrong.sum())
    return _split(rows[:, 0] if shape[0] == 1 else rows, labels, num_train)


SPOTS, NOISE = 0.8, 0.4  # brightness of a spot's middle, deviation of the noise; white is 1


def digits() -> dict[str, NDArray[np.generic]]:
    """Return scikit-learn's digits in random order: 1,000 rows to train on, the other 797 to test on.

    Each training row is a group of its own: row i is client i's for every contender, so that asynchronous runs agree
    long before they converge.
    """
    from sklearn.datasets import load_digits

    source = load_digits()
    order = streams.generator(0, "sorted-rows").permutation(len(source.target))
    arrays = _split((source.images[order] / 16).astype(np.float32), source.target[order], 1_000)
    return {**arrays, "group_train": np.arange(1_000), "group_test": np.arange(797)}


def letters() -> dict[str, NDArray[np.generic]]:
    """Return sequences of 32 of 96 tokens, and the token after each: 1,600 rows to train on, 200 to test on.

    After each token comes one of two, of which one is three times as likely: what is right three times in four.
    """
    rng = streams.generator(0, "made-up-letters")
    after = np.stack([rng.permutation(96), rng.permutation(96)])
    tokens = np.empty((1_800, 33), np.int64)
    tokens[:, 0] = rng.integers(96, size=1_800)
    for place in range(1, 33):
        tokens[:, place] = after[(rng.random(1_800) < 0.25).astype(int), tokens[:, place - 1]]
    return _split(tokens[:, :-1], tokens[:, 1:], 1_600)


def _split(x: NDArray[np.generic], y: NDArray[np.int64], num_train: int) -> dict[str, NDArray[np.generic]]:
    return {
        "x_train": x[:num_train],
        "y_train": y[:num_train],
        "x_test": x[num_train:],
        "y_test": y[num_train:],
    }
