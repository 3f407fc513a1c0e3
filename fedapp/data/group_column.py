"""Natural ids in a column of a torch Dataset's rows, or of the batch that a DataLoader's collate function makes."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from fedapp.data.dataset import Array
from fedapp.data.targets import Problem


class WithoutColumn:
    """Rows of a dataset without the column of natural ids, which are kept.

    A row is a mapping that has the column, or a pair (inputs, target) whose inputs are such a mapping. Other rows
    stay as they are.

    Attributes
    ----------
    ids : dict of int to id
        The natural ids of the rows that have been read, by row number.
    """

    def __init__(self, rows: Any, column: str) -> None:
        self.rows, self.column = rows, column
        self.ids: dict[int, Any] = {}

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        """Return a row without the column."""
        item = self.rows[row]
        if isinstance(item, Mapping):
            return self._without(row, item)
        if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], Mapping):
            return self._without(row, item[0]), item[1]
        return item

    def _without(self, row: int, named: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.column not in named:
            return named
        self.ids[row] = named[self.column]
        return {name: value for name, value in named.items() if name != self.column}

    def found(self, problem: Problem, batch: Any = None) -> Array:
        """Return the natural ids of all rows (N,), which the rows have, or else the batch that was made of them.

        The column is taken out of the batch.
        """
        ids: Any = [self.ids[row] for row in range(len(self)) if row in self.ids]
        if not ids and (named := _mapping_of(batch)) is not None and self.column in named:
            ids = list(named.pop(self.column))
        if len(ids) != len(self):
            raise problem(
                f"has a natural id, group-column = {self.column!r}, in {len(ids)} of {len(self)} rows; all rows, or "
                "the batch that collate_fn makes, must be dicts, or have inputs in dicts, with this name"
            )
        return np.asarray([each.item() if hasattr(each, "item") else each for each in ids])


def _mapping_of(batch: Any) -> MutableMapping[str, Any] | None:
    """Return the dict of a batch's inputs; None where they have no names."""
    inputs = batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch
    return inputs if isinstance(inputs, MutableMapping) else None
