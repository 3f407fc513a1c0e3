"""A user's own parts: found by name, named when they are given as objects, and told apart by fingerprints.

``parts`` imports and registers them, ``sources`` finds the Python files that a part depends on, and ``fingerprint``
digests an object.
"""

from fedapp.own.parts import (
    HERE,
    PARTS,
    OwnPartError,
    changed_since,
    described,
    imported,
    in_process_names,
    is_own,
    own_parts,
    raised_by,
    register,
    source_digest,
    source_files,
    sources_of,
)
from fedapp.own.sources import file_digest
from strategies.flower.higher_is_better import higher_is_better, split_direction

__all__ = [
    "HERE",
    "PARTS",
    "OwnPartError",
    "changed_since",
    "described",
    "file_digest",
    "higher_is_better",
    "imported",
    "in_process_names",
    "is_own",
    "own_parts",
    "raised_by",
    "register",
    "source_digest",
    "source_files",
    "sources_of",
    "split_direction",
]
