"""What the tests of data sources share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.data import DataError, load_dataset


def save(path: Path, arrays: dict[str, Any]) -> str:
    np.savez(path, **arrays)
    return str(path)


def message(*arguments: Any, **more: Any) -> str:
    with pytest.raises(DataError) as caught:
        load_dataset(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)
