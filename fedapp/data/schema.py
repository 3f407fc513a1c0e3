"""What a model expects of a client's data, and a client's data as a model expects them."""

from dataclasses import dataclass, replace

import numpy as np

from fedapp.data.dataset import INDICATES, Dataset, Targets
from fedapp.data.errors import DataError, brief
from fedapp.names import Part


@dataclass(frozen=True)
class Schema:
    """Kind, type and shape of an input, and the classes.

    Attributes
    ----------
    kind : str
        image, vector, series, text or parts.
    dtype : str
        uint8 or float32: inputs of different type are scaled differently (`Dataset.scale`).
    shape : tuple of int
        Shape of one input, channels first.
    num_classes : int
    classes : tuple of str
        Names of the classes in the order of their labels; () where labels are numbers.
    columns : tuple of str
        Names of a vector's values in their order; () where they have none.
    targets : {"classes", "numbers"}
    target_shape : tuple of int
        Shape of one row's targets; () for a class.
    parts : tuple of Part
        Name, type and shape of each input of a row; () where a row has one input.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    num_classes: int
    classes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    targets: Targets = "classes"
    target_shape: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()

    @property
    def num_outputs(self) -> int:
        """Number of the model's outputs."""
        return self.num_classes or self.target_shape[0]

    @classmethod
    def of(cls, dataset: Dataset) -> "Schema":
        """Return the schema of the data that a model is made for."""
        return cls(
            dataset.kind,
            str(dataset.x.dtype),
            dataset.input_shape,
            dataset.num_classes,
            dataset.classes,
            dataset.columns,
            dataset.targets,
            tuple(map(int, dataset.y.shape[1:])),
            dataset.parts,
        )

    def fit(self, dataset: Dataset) -> Dataset:
        """Return a client's dataset with the model's labels.

        A client may lack some of the classes. Where both have names for theirs, the names decide. Labels of each
        position are bounded by the model's outputs alone, as server and client may have other tokens of a vocabulary.

        Raises
        ------
        DataError
            If the data are of another kind, type or shape, have other columns or targets, or a class that the
            model hasn't.
        """
        own = Schema.of(dataset)
        self._check_targets(own)
        if own.kind == self.kind == "vector" and own.columns != self.columns:
            dataset = self._with_indicators(dataset)
            own = Schema.of(dataset)
        self._check_inputs(own)
        self._check_classes(own)
        if own.classes == self.classes:
            return dataset
        labels = np.array([self.classes.index(name) for name in own.classes], np.int64)
        return replace(dataset, y=labels[dataset.y], classes=self.classes, num_classes=self.num_classes)

    def _check_targets(self, own: "Schema") -> None:
        if (own.targets, own.target_shape) != (self.targets, self.target_shape):
            raise DataError(
                f"this client's targets are {own._of_targets()}, the model's {self._of_targets()}"
            )
        if own.parts != self.parts:
            described = [", ".join(map(str, parts)) or "one" for parts in (own.parts, self.parts)]
            raise DataError(f"this client's inputs are {described[0]}; the model's {described[1]}")

    def _check_inputs(self, own: "Schema") -> None:
        has_unknown_labels = not own.classes and not own.target_shape and own.num_classes > self.num_classes
        if (own.kind, own.shape) != (self.kind, self.shape) or has_unknown_labels:
            raise DataError(
                f"this client's data are {own.kind} {list(own.shape)} with {own.num_classes} classes, "
                f"the model's {self.kind} {list(self.shape)} with {self.num_classes}"
            )
        if own.dtype != self.dtype:
            raise DataError(f"this client's inputs are {own.dtype}, the model's {self.dtype}")
        if own.columns and self.columns and own.columns != self.columns:
            raise DataError(
                f"this client's columns are {brief(own.columns)}, the model's {brief(self.columns)}"
            )

    def _check_classes(self, own: "Schema") -> None:
        if bool(own.classes) != bool(self.classes):
            named, numbered = ("client's", "model's") if own.classes else ("model's", "client's")
            raise DataError(f"the {named} classes have names, the {numbered} are numbers; both must be alike")
        if unknown := [name for name in own.classes if name not in self.classes]:
            raise DataError(
                f"this client's data have the classes {brief(unknown)}, the model's are {brief(self.classes)}"
            )

    def _with_indicators(self, dataset: Dataset) -> Dataset:
        """Return a table that has the model's columns, if it lacks nothing but texts of encoded columns.

        A client on whose rows no ``colour`` is red has 0 for ``colour=red``.
        """
        known = {name.partition(INDICATES)[0] for name in dataset.columns if INDICATES in name}
        lacking = set(self.columns) - set(dataset.columns)
        in_order = tuple(name for name in self.columns if name in dataset.columns) == dataset.columns
        if not in_order or any(
            name.partition(INDICATES)[0] not in known or INDICATES not in name for name in lacking
        ):
            return dataset
        x = np.zeros((len(dataset.x), len(self.columns)), dataset.x.dtype)
        x[:, [self.columns.index(name) for name in dataset.columns]] = dataset.x
        return replace(dataset, x=x, columns=self.columns)

    def _of_targets(self) -> str:
        if not self.target_shape:
            return self.targets
        shape = self.target_shape[0] if len(self.target_shape) == 1 else self.target_shape
        return f"{self.targets}, {shape} for each row"
