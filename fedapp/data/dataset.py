"""A dataset in memory-mapped arrays, and what a reader returns to have one prepared."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fedapp.data.errors import DataError
from fedapp.data.moments import Moments
from fedapp.names import Form, Part

Kind = Literal["image", "vector", "series", "text", "parts"]
Array = NDArray[Any]
IntArray = NDArray[np.int64]

# What a row's target is: one of some classes, or one or more numbers.
Targets = Literal["classes", "numbers"]

INDICATES = "="
"""Sign in the name of a column of 0 and 1, such as ``colour=red``: between an encoded column's name and a text."""

_TENTHS = np.arange(1, 10) / 10


@dataclass(frozen=True)
class Published:
    """The published facts of a named dataset.

    Attributes
    ----------
    shape : tuple of int
        Shape of one input, channels first.
    num_classes : int
        Number of classes; labels are 0 … num_classes - 1.
    mean, std : tuple of float
        Published mean and standard deviation per channel of inputs in [0, 1]; () where there are none.
    """

    shape: tuple[int, ...]
    num_classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


# How inputs are normalized after they are scaled to [0, 1]: see `Dataset.inputs`.
Normalize = bool | Literal["symmetric", "standardize"]

PUBLISHED: dict[str, Published] = {
    "digits": Published((1, 8, 8), 10),
    "synthetic": Published((2,), 2),
    "mnist": Published((1, 28, 28), 10, (0.1307,), (0.3081,)),
    "cifar10": Published((3, 32, 32), 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Published((3, 32, 32), 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "femnist": Published((1, 28, 28), 62),
    "femnist-digits": Published((1, 28, 28), 10),
    "shakespeare": Published((80,), 80),
}


class Split(NamedTuple):
    """Rows as a reader finds them: inputs (N, …), labels (N,) or targets (N, …), natural ids (N,) or None.

    `classes` has the names of the labels, () where labels are numbers; `parts` describes the inputs of a row, ()
    where a row has one input; `group_names` has the names of the natural clients, () where their ids are numbers. All
    are the same for the training and the test split.
    """

    x: Array
    y: Array
    groups: Array | None = None
    classes: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    group_names: tuple[str, ...] = ()


Encoded = tuple[tuple[str, tuple[str, ...]], ...]
"""Columns of texts that became columns of 0 and 1, each with its texts in the order of those columns."""

AUTO = "auto"
"""The value of keys by which the reader of a file finds out what they say, where it is sure."""

ImageMode = Literal["auto", "grey", "colour"]
"""The colours that images are converted to; "auto": none, so that all must be grey, or all in colour."""

Missing = Literal["refuse", "drop", "mean"]
"""How rows of a table that have an empty cell are treated."""


@dataclass(frozen=True)
class DataColumns:
    """Which columns of a table or of Hugging Face data are inputs, labels and natural ids, and how cells are read.

    Attributes
    ----------
    inputs : str
        One column, or several with commas between them; "": all columns but the labels and the natural ids.
    label : str
        One column, or several with commas between them; several columns must hold numbers.
    group : str
        The column of natural ids, "": none.
    drop : str
        Columns that are no inputs, with commas between them.
    missing : {"refuse", "drop", "mean"}
        Rows with an empty cell: refused; left out; or kept with NaN where a number is missing, which standardized
        inputs have as 0, the mean.
    missing_values : str
        Texts and numbers that stand for a missing value, with commas between them: their cells are empty.
    encode : bool
        Whether a column of texts becomes columns of 0 and 1, one for each text.
    csv_encoding, separator, decimal : str
        Name of a CSV file's encoding, sign between its columns ("tab": a tabulator) and that of decimals, "." or ",";
        "auto": as the file tells, where that is sure.
    image_size : str
        Height and width that images are scaled to, ``"48x64"``, or both as one number; "": all have one size.
    image_mode : {"auto", "grey", "colour"}
        Colours that images are converted to.
    """

    inputs: str = ""
    label: str = "label"
    group: str = ""
    drop: str = ""
    missing: Missing = "refuse"
    missing_values: str = ""
    encode: bool = False
    csv_encoding: str = AUTO
    separator: str = AUTO
    decimal: str = AUTO
    image_size: str = ""
    image_mode: ImageMode = "auto"


@dataclass(frozen=True, eq=False)
class RawData:
    """A dataset as read, before it is written to the cache.

    `blocks` are inputs of equal row shape that follow one another; they may be views (transposed images,
    sliding windows), so that nothing is copied before it goes to its file. `y` are int64 classes (N,), or of each
    position of a row (N, …), or float32 numbers (N, M, …), and with these `num_classes` is 0. The rest is as in
    `Dataset`.
    """

    blocks: Sequence[Array]
    y: Array
    groups: Array | None
    num_train: int
    num_classes: int
    kind: Kind
    scale: float
    classes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    remarks: tuple[str, ...] = ()
    group_names: tuple[str, ...] = ()
    encoded: Encoded = ()
    made_by: str = ""


@dataclass(frozen=True, eq=False)  # arrays have no single truth value: compare and hash by identity
class Dataset:
    """A dataset whose arrays are read-only memory maps, shared by all processes that open it.

    Rows [0, num_train) are training rows, the rest are test rows that the dataset ships.

    Attributes
    ----------
    name : str
        Value of the run-config key `dataset`.
    x : array (N, \\*input_shape)
        uint8 or float32; images channels first (N, C, H, W); series of T steps of F features (N, T, F); text as uint8
        token ids (N, 80).
    y : int64 array (N,) or (N, …), or float32 array (N, M, …)
        A label per row, for text the token id of the next character; or a label per position of a row, such as a
        pixel of a picture, where -100 marks a position without a label; or numbers for each row.
    groups : int64 array (N,) or None
        Natural client of each row: writer, role or synthetic client; None where there is none.
    num_train : int
        Number of training rows; N where the dataset ships no test rows.
    num_classes : int
        Number of classes, 0 where targets are numbers.
    kind : {"image", "vector", "series", "text", "parts"}
        What an input is; "parts": a row has several inputs, stored one after the other.
    scale : float
        x * scale lies in [0, 1]: 1/16 for digits, 1/255 for uint8 images; 1 for text and for float inputs,
        which are kept as they are.
    mean, std : tuple of float
        Published values per channel, () where there are none.
    classes : tuple of str
        Names of the classes in the order of their labels, () where labels are numbers only.
    columns : tuple of str
        Names of a vector's values, () where they have none.
    targets : {"classes", "numbers"}
        What `y` holds.
    moments : Moments or None
        Mean and deviation for `normalize = "standardize"`; None until they are computed over all clients.
    parts : tuple of Part
        Name, type and shape of each input of a row; () where a row has one input.
    remarks : tuple of str
        Assumptions that the reader of the data made, a line each.
    group_names : tuple of str
        Names of the natural clients, by their number in `groups`; () where their ids are numbers, or there are none.
    encoded : tuple of (str, tuple of str)
        Columns of texts that became columns of 0 and 1, each with its texts in the order of those columns.
    made_by : str
        What made the inputs before they were read, such as a collate function and a tokenizer, by name.
    digest : str
        Digest of the arrays and of all attributes above but name, mean, std, moments, group_names, encoded and
        made_by; "" where the dataset isn't from the cache.
    """

    name: str
    x: Array
    y: Array
    groups: IntArray | None
    num_train: int
    num_classes: int
    kind: str
    scale: float
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    classes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    targets: Targets = "classes"
    moments: Moments | None = None
    parts: tuple[Part, ...] = ()
    remarks: tuple[str, ...] = ()
    group_names: tuple[str, ...] = ()
    encoded: Encoded = ()
    made_by: str = ""
    digest: str = ""

    @property
    def form(self) -> Form:
        """What a model is made for: the shape of one input, or what the several inputs of a row are."""
        return self.parts or self.input_shape

    @property
    def num_outputs(self) -> int:
        """Number of a model's outputs: one for each class, or for each column of a row's numbers."""
        return self.num_classes if self.targets == "classes" else int(self.y.shape[1])

    @property
    def has_classes(self) -> bool:
        """Whether a row has a class, or numbers in columns: neither has one with labels of each of its positions."""
        return self.y.ndim == (1 if self.targets == "classes" else 2)

    @property
    def strata_are(self) -> str:
        """What a stratum of `strata` is: a class, a tenth, a natural client, or all rows."""
        if self.has_classes:
            return "class" if self.targets == "classes" else "tenth"
        return "all rows" if self.groups is None else "natural client"

    @cached_property
    def strata(self) -> IntArray:
        """The class of each row for partitioners, int64 (N,): its label; for numbers, a tenth of the first number.

        The tenths are bounded by the deciles of the numbers of all rows. Equal numbers are in one tenth, so that
        there may be fewer than ten. Where rows have no class (``has_classes``), the rows of each natural client are
        a stratum; without natural clients, all rows are one.
        """
        if not self.has_classes:
            if self.groups is None:
                return np.zeros(len(self.y), np.int64)
            return np.unique(self.groups, return_inverse=True)[1].astype(np.int64)
        if self.targets == "classes":
            return cast(IntArray, self.y)
        first = np.asarray(self.y[:, 0], np.float64)
        edges = np.unique(np.quantile(first, _TENTHS))
        _, strata = np.unique(np.searchsorted(edges, first, side="right"), return_inverse=True)
        return strata.astype(np.int64)

    @property
    def names_of_strata(self) -> tuple[str, ...]:
        """Names of the strata: of classes, or of natural clients; () where they have none."""
        if self.has_classes:
            return self.classes if self.targets == "classes" else ()
        return self.group_names

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(map(int, self.x.shape[1:]))

    @property
    def num_features(self) -> int:
        """Number of standardized features: values of a vector, channels of an image, or features of a series."""
        return self.input_shape[-1 if self.kind == "series" else 0]

    @property
    def num_strata(self) -> int:
        """Number of strata: of classes, also those that no row has, of tenths, or of natural clients."""
        return (self.has_classes and self.num_classes) or int(self.strata.max()) + 1

    def inputs(self, rows: Any, normalize: Normalize = False) -> Array:
        """Return the inputs of some rows, ready for a model.

        Parameters
        ----------
        rows : int array (n,), or anything that indexes the first axis of an array and keeps it
            Row numbers.
        normalize : bool, "symmetric" or "standardize"
            True: also subtract the published mean and divide by the published standard deviation, per channel;
            "symmetric": from [0, 1] to [-1, 1]; "standardize": subtract the mean and divide by the deviation in
            `moments`, per value of a vector, channel of an image or feature of a series.

        Returns
        -------
        array (n, \\*input_shape)
            A fresh C-contiguous array: int64 token ids for text, otherwise float32 times `scale`.

        Raises
        ------
        DataError
            If `normalize` is True and the dataset has no published values, "symmetric" and inputs aren't in [0, 1],
            or "standardize" and the dataset has no moments, is text or has several inputs a row.
        """
        if normalize == "standardize":
            self.require_moments()
        if normalize == "symmetric" and self.scale == 1.0:
            raise DataError(
                f"normalize = 'symmetric': dataset '{self.name}' has no known range; allowed for images, and for "
                f"your own data as uint8"
            )
        if normalize is True and not self.mean:
            known = ", ".join(name for name, facts in PUBLISHED.items() if facts.mean)
            raise DataError(
                f"normalize = true: dataset '{self.name}' has no published mean and deviation; "
                f"allowed for {known}; 'standardize' is for any inputs but text"
            )
        return self.prepared(self.x[rows], normalize)

    def require_values(self) -> None:
        """Raise `DataError` if these inputs can't be standardized."""
        if self.kind in ("text", "parts"):
            what = "is text" if self.kind == "text" else "has several inputs a row"
            raise DataError(
                f"normalize = 'standardize': dataset '{self.name}' {what}; allowed for images and vectors"
            )

    def require_moments(self) -> None:
        """Raise `DataError` if these inputs can't be standardized, or the dataset has no moments."""
        self.require_values()
        if self.moments is None:
            raise DataError(
                f"normalize = 'standardize': the mean and deviation of '{self.name}' over all clients aren't known; "
                "the server computes them from what each client reports"
            )

    def prepared(self, stored: Array, normalize: Normalize = False) -> Array:
        """Return rows as they are stored (n, \\*input_shape) as `inputs` does, without its checks."""
        if self.kind == "text":
            return np.array(stored, dtype=np.int64, order="C", subok=False)
        x = np.array(stored, dtype=np.float32, order="C", subok=False)
        if self.scale != 1.0:
            x *= np.float32(self.scale)
        if normalize == "symmetric":
            x *= 2
            x -= 1
        elif normalize:
            mean, std = self.mean, self.std
            if normalize == "standardize":
                self.require_moments()
                assert self.moments is not None
                mean, std = self.moments.mean, self.moments.std
            per_channel = (-1,) if self.kind == "series" else (-1,) + (1,) * (x.ndim - 2)
            x -= np.asarray(mean, np.float32).reshape(per_channel)
            x /= np.asarray(std, np.float32).reshape(per_channel)
            if normalize == "standardize":
                x[np.isnan(x)] = 0  # the mean, where a table's number is missing
        return cast(Array, x)
