"""What makes the inputs of a dataset from rows, by name: a collate function, a tokenizer, a torch Dataset."""

from typing import Any

MADE_BY = "made_by"
"""The array of an .npz file that has this name, where the file's arrays were made so."""


def maker_of(found: Any) -> str:
    """Return the names of what makes inputs: of a DataLoader its collate_fn and a tokenizer; "" of arrays.

    A tokenizer has the name that it was loaded by.
    """
    parts = found if isinstance(found, tuple | list) and len(found) == 2 else (found,)
    named = dict.fromkeys(name for part in parts for name in _names_of(part))
    return ", ".join(named)


def _names_of(found: Any) -> list[str]:
    collate, rows = getattr(found, "collate_fn", None), getattr(found, "dataset", found)
    tokenizer = getattr(collate, "tokenizer", None) or getattr(rows, "tokenizer", None)
    names = []
    if _is_torch_dataset(rows):
        names.append(f"dataset {_called(rows)}")
    if collate is not None and not str(getattr(collate, "__module__", "")).startswith("torch.utils.data"):
        names.append(f"collate_fn {_called(collate)}")
    if tokenizer is not None:
        names.append(f"tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}")
    return names


def _is_torch_dataset(found: Any) -> bool:
    kinds = type(found).__mro__
    return any(
        kind.__module__.startswith("torch.utils.data") and kind.__name__ == "Dataset" for kind in kinds
    )


def _called(found: Any) -> str:
    """Return module and name of a function, or of an object's class."""
    named = found if hasattr(found, "__qualname__") else type(found)
    return f"{named.__module__}.{named.__qualname__}"
