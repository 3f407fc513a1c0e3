"""Which client has which rows: the split into training and test rows, and the division over clients."""

from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np

from fedapp.data.dataset import Dataset, IntArray
from fedapp.data.errors import DataError
from fedapp.data.flower_partitioners import by_shards, by_similarity, flower_partition
from fedapp.data.skew import label_quantity_skew
from fedapp.names import Partitioner
from strategies import streams

PARTITIONERS: tuple[str, ...] = get_args(Partitioner)
"""Values of the run-config key `partitioner`.

- label-quantity-skew (Buttaci 2024, §3.4.1) and dirichlet (Fraboni et al. 2023, §5.1): one division, the latter with
  the class imbalance 1 / `dirichlet_alpha`; see `fedapp.data.skew`.
- iid.
- similarity (Karimireddy et al. 2020, section 7): clients of one size, of whose rows a share `similarity` is dealt
  out at random; all others are sorted by class and dealt out in that order.

Those that need classes take tenths of a dataset whose targets are numbers, and natural clients, or all rows as one
class, where a row has no class: `Dataset.strata`.

- class-dirichlet (Yurochkin et al. 2019; Li et al. 2022, NIID-Bench): each class is dealt out by Dirichlet(α 1_C),
  to clients that have less than n/C rows so far; drawn anew, up to ten times, until each has `min_samples`.
- pathological (Li et al. 2022, "#C = k"): client i has class i modulo K and k − 1 others that are drawn; a class's
  rows are dealt out evenly to the clients that have it, and go unused where none has.
- shards (McMahan et al. 2017, section 3): rows sorted by label are cut into 2 C shards, whose sizes differ by one
  row at most; each client gets two shards at random.
- natural: one client per natural id. `num_clients` of those with at least `min_samples` training rows, drawn by the
  seed, in order of their ids; the rest goes unused.
"""

BY_CLASS = tuple(name for name in PARTITIONERS if name not in ("iid", "natural"))
"""The partitioners that divide rows by their classes."""

OWN, UNSEEN = "own", "unseen-clients"
HALVES = {"held-out": slice(None), "held-out-even": slice(0, None, 2), "held-out-odd": slice(1, None, 2)}
"""Values of the run-config key `test-on`, with ``OWN`` and ``UNSEEN``.

- held-out: test rows are those the dataset ships, or a random `test_fraction` of all rows where it ships none.
  held-out-even and held-out-odd are every second of them, from the first and from the second: keys that are tuned on
  one half can be judged on the other.
- unseen-clients (Buttaci 2024, §3.4.1): all rows are pooled and split at random, and both sides are divided over
  `num_clients` clients by the same scheme; with natural the testing clients are other ids, as many (at most) as make
  up `test_fraction` of all clients.
- own: all rows are pooled and divided over the clients; then each keeps `test_fraction` of its rows, one at least, to
  test on: see `own_split`.
"""

LAST = "last"
"""One of the values of the run-config key `hold-out`.

- random: test rows are drawn.
- last: all rows are divided over the clients, and each client's last `test_fraction` of its rows, in the dataset's
  order, are test rows: those of all clients together with held-out, where the dataset ships no test rows, and the
  client's with own.
"""

LEAST_OWN = 2
"""Least number of rows of a client with test-on = "own": one to train on and one to test on."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Row numbers into a dataset, clients one after the other.

    Attributes
    ----------
    client_indices : int64 array
        Training rows of all C clients; ascending within a client.
    client_offsets : int64 array (C + 1,)
        Client i has client_indices[client_offsets[i]:client_offsets[i + 1]].
    test_indices : int64 array
        Test rows.
    test_offsets : int64 array (T + 1,)
        The same for T unseen testing clients, or for the C clients' own test rows; [0, len(test_indices)] for
        held-out rows.
    unused_indices : int64 array
        Rows that were to be divided and are in no client, ascending: of classes that no client of pathological draws,
        of natural clients that aren't drawn, or that have fewer rows than `min_samples`.
    """

    client_indices: IntArray
    client_offsets: IntArray
    test_indices: IntArray
    test_offsets: IntArray
    unused_indices: IntArray = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def num_clients(self) -> int:
        """Number of training clients C."""
        return len(self.client_offsets) - 1

    @property
    def sizes(self) -> IntArray:
        """Training samples per client, int64 (C,)."""
        return np.diff(self.client_offsets)

    def client(self, i: int) -> IntArray:
        """Return the training rows of client i, 0 <= i < C."""
        return _part(self.client_indices, self.client_offsets, i)

    def test_client(self, i: int) -> IntArray:
        """Return the rows of testing client i, 0 <= i < T; those held out are client 0."""
        return _part(self.test_indices, self.test_offsets, i)

    def split(self, fraction: float, seed: int, hold_out: str = "random") -> "Partition":
        """Return the partition in which each client keeps a share of its rows to test on."""
        sides = [own_split(self.client(i), fraction, seed, i, hold_out) for i in range(self.num_clients)]
        made = _partition([train for train, _ in sides], [test for _, test in sides])
        return replace(made, unused_indices=self.unused_indices)

    def held_out(self, half: slice) -> "Partition":
        """Return the partition whose test rows, or every second of them, are those of all clients together."""
        indices, offsets = _join([np.sort(self.test_indices)[half]])
        return replace(self, test_indices=indices, test_offsets=offsets)


def names_of_clients(dataset: Dataset, partition: Partition, partitioner: str) -> tuple[str, ...]:
    """Return the natural ids of the clients by index, (C,); () unless clients are natural and have ids of their own.

    Ids that are the clients' indices, as those of generated data, aren't names.
    """
    return _ids_of(dataset, partitioner, partition.client_indices, partition.client_offsets)


def names_of_unseen_clients(
    dataset: Dataset, partition: Partition, partitioner: str, test_on: str
) -> tuple[str, ...]:
    """Return the natural ids (T,) of the clients that don't train and are tested on; () unless there are such ids."""
    if test_on != UNSEEN:
        return ()
    return _ids_of(dataset, partitioner, partition.test_indices, partition.test_offsets)


def _ids_of(dataset: Dataset, partitioner: str, indices: IntArray, offsets: IntArray) -> tuple[str, ...]:
    if partitioner != "natural" or dataset.groups is None:
        return ()
    ids = np.asarray(dataset.groups)[indices[offsets[:-1]]]
    if not dataset.group_names:
        return () if np.array_equal(ids, np.arange(len(ids))) else tuple(map(str, ids.tolist()))
    return tuple(dataset.group_names[each] for each in ids.tolist())


def own_split(
    rows: IntArray, fraction: float, seed: int, client: int, hold_out: str = "random"
) -> tuple[IntArray, IntArray]:
    """Return a client's training and test rows, ascending: a share of its rows to test on, drawn or the last ones.

    One at least, and one at least to train on.

    Raises
    ------
    DataError
        If it has less than two rows.
    """
    if len(rows) < LEAST_OWN:
        raise DataError(
            f"test-on = 'own' and hold-out = 'last' need {LEAST_OWN} rows of a client or more, one to train and one "
            f"to test on; it has {len(rows)}"
        )
    number = min(max(1, round(fraction * len(rows))), len(rows) - 1)
    if hold_out == LAST:
        ascending = np.sort(rows)
        return ascending[:-number], ascending[-number:]
    shuffled = streams.generator(seed, "own-test-rows", client).permutation(len(rows))
    return np.sort(rows[shuffled[number:]]), np.sort(rows[shuffled[:number]])


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a dataset is divided: the values of the run-config keys of these names.

    Attributes
    ----------
    partitioner : str
        One of `PARTITIONERS`.
    class_imbalance, data_imbalance : float
        κ⁻¹ of label-quantity-skew; φ² of it and of dirichlet.
    min_samples : int
        Least number of rows of a client.
    dirichlet_alpha : float
        Concentration of dirichlet: each client's classes are distributed by Dirichlet(α 1_K), as far as every
        sample landing once lets them; and of class-dirichlet.
    similarity : float
        Share of each client's rows that similarity draws from all, from 0 to 1.
    classes_per_client : int
        Classes of each client by pathological, k.
    test_on : str
        One of `HALVES`, ``OWN`` or ``UNSEEN``.
    test_fraction : float
        Share of the rows to test on, between 0 and 1.
    hold_out : str
        ``LAST``, or "random".
    seed : int
    """

    partitioner: str
    class_imbalance: float
    data_imbalance: float
    min_samples: int
    dirichlet_alpha: float
    similarity: float = 0.0
    classes_per_client: int = 2
    test_on: str
    test_fraction: float
    hold_out: str = "random"
    seed: int

    def check(self, num_clients: int) -> None:
        """Raise DataError if there is no client, or a client may have too few rows of its own to test on.

        The run config has checked the range of each value.
        """
        if num_clients < 1:
            raise DataError(f"num-supernodes = {num_clients}: must be an integer >= 1")
        if self.test_on == OWN and self.min_samples < LEAST_OWN:
            raise DataError(
                f"min-samples = {self.min_samples}: with test-on = 'own' a client needs {LEAST_OWN} rows or more, "
                "one to train and one to test on"
            )

    def split_rows(self, dataset: Dataset) -> tuple[IntArray, IntArray]:
        """Return training and test rows, ascending; no test rows where each client's are split off later."""
        num_rows = len(dataset.y)
        ships_tests = self.test_on in HALVES and dataset.num_train < num_rows
        if self.test_on == OWN or (self.hold_out == LAST and not ships_tests):
            return np.arange(num_rows), np.empty(0, np.int64)
        if ships_tests:
            train, test = np.arange(dataset.num_train), np.arange(dataset.num_train, num_rows)
        else:
            shuffled = streams.generator(self.seed, "test-rows").permutation(num_rows)
            num_test = min(max(1, round(self.test_fraction * num_rows)), num_rows)
            train, test = np.sort(shuffled[num_test:]), np.sort(shuffled[:num_test])
        test = test[HALVES.get(self.test_on, slice(None))]
        if not len(test):
            raise DataError(
                f"test-on = {self.test_on!r}: '{dataset.name}' has 1 test row; at least 2 are needed"
            )
        return train, test

    def partition(self, clients: list[IntArray], test: IntArray, divided: IntArray) -> Partition:
        """Return the partition of clients that test on their own rows, or all together on held-out rows."""
        if len(test):
            return _partition(clients, [test], divided)
        made = _partition(clients, [], divided).split(self.test_fraction, self.seed, self.hold_out)
        return made if self.test_on == OWN else made.held_out(HALVES[self.test_on])


def make_partition(dataset: Dataset, num_clients: int, division: Division) -> Partition:
    """Split a dataset into training and test rows and divide them over C clients; the same seed gives the same.

    Raises
    ------
    DataError
        If a value is out of range or the dataset can't be divided like this.
    """
    division.check(num_clients)
    if division.partitioner == "natural":
        return _natural(dataset, num_clients, division)
    train, test = division.split_rows(dataset)
    _require_enough(dataset, num_clients, division.min_samples, len(train), "training")
    seed = streams.whole_number(division.seed, "training-division")
    clients = _divide(dataset, num_clients, division, train, seed)
    if division.test_on != UNSEEN:
        return division.partition(clients, test, train)
    _require_enough(dataset, num_clients, division.min_samples, len(test), "test")
    seed = streams.whole_number(division.seed, "testing-division")
    testing = _divide(dataset, num_clients, division, test, seed)
    return _partition(clients, testing, np.concatenate([train, test]))


def _divide(
    dataset: Dataset, num_clients: int, division: Division, rows: IntArray, seed: int
) -> list[IntArray]:
    """Return the rows of each client, out of some rows of a dataset, for all partitioners but natural."""
    partitioner, labels = division.partitioner, dataset.strata[rows]
    if partitioner in ("label-quantity-skew", "dirichlet"):
        dirichlet = partitioner == "dirichlet"
        imbalance = 1 / division.dirichlet_alpha if dirichlet else division.class_imbalance
        indices, offsets = label_quantity_skew(
            labels, num_clients, imbalance, division.data_imbalance, division.min_samples, seed
        )
        return [rows[_part(indices, offsets, i)] for i in range(num_clients)]
    # The partitioners below cut rows in the order in which they come.
    order = streams.generator(seed, "order-of-rows").permutation(len(rows))
    rows, labels = rows[order], labels[order]
    if partitioner == "similarity":
        clients = by_similarity(rows, labels, num_clients, division.similarity)
    elif partitioner == "shards":
        clients = by_shards(rows, labels, num_clients, seed)
    else:
        clients = flower_partition(
            partitioner,
            rows,
            labels,
            None,
            num_clients,
            division.min_samples,
            seed,
            dirichlet_alpha=division.dirichlet_alpha,
            classes_per_client=division.classes_per_client,
        )
    _check_division(partitioner, clients, rows, division.min_samples, exact=partitioner != "pathological")
    return clients


def number_of_natural_clients(dataset: Dataset, division: Division) -> int:
    """Return how many clients train if all natural clients with enough rows take part; 0 if there are none."""
    if dataset.groups is None:
        return 0
    number = len(_natural_ids(dataset, np.asarray(dataset.groups), division)[2])
    if division.test_on != UNSEEN:
        return number
    return min(round((1 - division.test_fraction) * number), number - 1)


def _natural_ids(
    dataset: Dataset, groups: IntArray, division: Division
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the rows to divide, the held-out rows, and the ids of the natural clients with enough rows, sorted."""
    train, test = np.arange(len(dataset.y)), np.empty(0, np.int64)
    if division.test_on in HALVES:
        train, test = division.split_rows(dataset)
    ids, counts = np.unique(groups[train], return_counts=True)
    return train, test, ids[counts >= division.min_samples]


def _natural(dataset: Dataset, num_clients: int, division: Division) -> Partition:
    if dataset.groups is None:
        raise DataError(
            f"partitioner = 'natural': dataset '{dataset.name}' has no natural clients; allowed: "
            f"{', '.join(PARTITIONERS[:-1])}, or a dataset with writers, roles or groups"
        )
    groups = np.asarray(dataset.groups)
    train, test, ids = _natural_ids(dataset, groups, division)
    spare, min_samples = 1 if division.test_on == UNSEEN else 0, division.min_samples
    if not len(ids):
        most = int(np.unique(groups[train], return_counts=True)[1].max())
        raise DataError(
            f"min-samples = {min_samples}: no natural client of '{dataset.name}' has as many rows to train on; the "
            f"largest has {most}"
        )
    if num_clients + spare > len(ids):
        raise DataError(
            f"num-supernodes = {num_clients}: '{dataset.name}' has {len(ids)} natural clients with at least "
            f"min-samples = {min_samples} rows; at most {max(len(ids) - spare, 0)} clients are allowed"
            + (", as test-on = 'unseen-clients' needs others to test on" if spare else "")
        )
    drawn = streams.generator(division.seed, "natural-clients").permutation(len(ids))

    def clients(chosen: IntArray) -> list[IntArray]:
        rows = train[np.isin(groups[train], ids[chosen])]
        found = flower_partition(
            "natural", rows, dataset.strata[rows], groups[rows], len(chosen), min_samples, division.seed
        )
        _check_division("natural", found, rows, min_samples, exact=True)
        return found

    if division.test_on != UNSEEN:
        return division.partition(clients(drawn[:num_clients]), test, train)
    fraction = division.test_fraction
    num_testing = max(1, round(num_clients * fraction / (1 - fraction)))
    testing = clients(drawn[num_clients : num_clients + num_testing])
    return _partition(clients(drawn[:num_clients]), testing, train)


def _partition(
    clients: list[IntArray], testing: list[IntArray], divided: IntArray | None = None
) -> Partition:
    """Return the partition; of the ``divided`` rows those that no training or testing client has are unused."""
    made = Partition(*_join(clients), *_join(testing))
    if divided is None:
        return made
    used = np.concatenate([made.client_indices, made.test_indices])
    return replace(made, unused_indices=np.setdiff1d(divided, used))


def _join(parts: list[IntArray]) -> tuple[IntArray, IntArray]:
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    return np.concatenate([np.empty(0, np.int64), *map(np.sort, parts)]).astype(np.int64), offsets


def _part(indices: IntArray, offsets: IntArray, i: int) -> IntArray:
    if not 0 <= i < len(offsets) - 1:
        raise IndexError(f"client {i}: there are {len(offsets) - 1}, counted from 0")
    return indices[offsets[i] : offsets[i + 1]]


def _require_enough(dataset: Dataset, num_clients: int, min_samples: int, num_rows: int, which: str) -> None:
    if num_clients * min_samples > num_rows:
        raise DataError(
            f"num-supernodes = {num_clients}: '{dataset.name}' has {num_rows} {which} rows, at least "
            f"min-samples = {min_samples} per client are needed; at most {num_rows // min_samples} clients"
        )


def _check_division(
    partitioner: str, clients: list[IntArray], rows: IntArray, min_samples: int, *, exact: bool
) -> None:
    """Raise unless every client has enough rows, none twice, and (`exact`) every row is used."""
    smallest = min(len(rows) for rows in clients)
    if smallest < min_samples:
        raise DataError(
            f"partitioner = {partitioner!r}: over {len(clients)} clients it leaves one with {smallest} rows; "
            f"min-samples = {min_samples} needs fewer clients or must be lower"
        )
    used = np.sort(np.concatenate(clients))
    if (exact and not np.array_equal(used, np.sort(rows))) or (used[1:] == used[:-1]).any():
        raise DataError(
            f"partitioner = {partitioner!r}: it loses or repeats rows with these values; change them"
        )
