"""The folders that the app keeps data in, and how `dataset` says where others' are."""

import os
from pathlib import Path

PREFIX = "hf:"


def default_cache_dir() -> Path:
    """Return the cache folder: $FEDAPP_CACHE, else fedapp in the user's cache (XDG base directories)."""
    if chosen := os.environ.get("FEDAPP_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedapp"


def handed_over_dir() -> Path:
    """Return the folder of arrays that were handed over in Python."""
    return default_cache_dir() / "arrays"
