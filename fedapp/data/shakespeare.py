"""Next-character prediction on Shakespeare's roles: 80 characters in, the next one out."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedapp.data.arrays import join_rows
from fedapp.data.dataset import RawData, Split
from fedapp.data.errors import one_line, path_error
from fedapp.data.readers import LeafFiles, leaf_files, leaf_splits, read_json

VOCABULARY = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters; a character's token id is its position."""

UNKNOWN = VOCABULARY.index(" ")
"""Token id of every character outside the vocabulary: that of the space, 1."""

SEQUENCE_LENGTH = 80

_TOKEN_IDS = np.full(256, UNKNOWN, np.uint8)
_TOKEN_IDS[[ord(character) for character in VOCABULARY]] = range(len(VOCABULARY))


def encode(text: str) -> NDArray[np.uint8]:
    """Return the token ids of a text, uint8 (len(text),)."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return _TOKEN_IDS[np.where(points < 256, points, 0)]


def find_files(path: Path) -> LeafFiles:
    """Return the files to read for a file or a folder given as `data-path`.

    In a folder the first of these is taken: roles (`*roles*.json`), LEAF's `*train*.json` with `*test*.json`
    (or its sub-folders train and test), plays (`*plays*.txt`). With a single LEAF train file the test file
    beside it (train → test in its name) is read too.

    Raises
    ------
    DataError
        If there is none of these.
    """
    if path.is_dir():
        for files in (LeafFiles(sorted(path.glob("*roles*.json"))[:1], []), leaf_files(path)):
            if files.train:
                return files
        if plays := sorted(path.glob("*plays*.txt")):
            return LeafFiles(plays[:1], [])
        raise path_error(path, "holds no 'shakespeare'; allowed: *roles*.json, *train*.json or *plays*.txt")
    if not path.is_file() or path.suffix not in (".json", ".txt"):
        raise path_error(path, "a folder, a .json file (roles or LEAF) or a .txt file (plays) is needed")
    return leaf_files(path)


def shakespeare_data(files: LeafFiles) -> RawData:
    """Read roles, plays or LEAF samples from the files that `find_files` returns.

    Raises
    ------
    DataError
        If the files aren't in one of the three formats.
    """
    first = files.train[0]
    if first.suffix == ".txt":
        return roles_data(
            first, {f"{role} ({play})": text for (play, role), text in read_plays(first).items()}
        )
    content = read_json(first)
    if "user_data" in content:
        return samples_data(leaf_splits(files, encode_samples))
    if not all(isinstance(text, str) for text in content.values()):
        raise path_error(first, "is neither roles {name: text} nor LEAF's users and user_data")
    return roles_data(first, content)


def read_plays(path: Path) -> dict[tuple[str, str], str]:
    """Read plays as {(play, role): text}, in order of appearance.

    The format: a line `=== PLAY: title ===` per play; speeches divided by blank lines, each a line `SPEAKER:`
    and then the lines spoken.

    Raises
    ------
    DataError
        If the file isn't UTF-8 text or has no play.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise path_error(path, f"can't be read as UTF-8 text ({one_line(error)})") from error
    speeches: dict[tuple[str, str], list[str]] = {}
    play = None
    for paragraph in re.split(r"\n\s*\n", text):
        head, _, spoken = paragraph.strip("\n").partition("\n")
        if title := re.fullmatch(r"=== PLAY: (.*) ===", head.strip()):
            play = title[1]
        elif play is not None and head.rstrip().endswith(":"):
            speeches.setdefault((play, head.rstrip()[:-1]), []).append(spoken)
    if play is None:
        raise path_error(path, "has no line '=== PLAY: title ==='; plays in that format are needed")
    return {role: "\n".join(spoken) for role, spoken in speeches.items()}


def roles_data(path: Path, texts: Mapping[str, str]) -> RawData:
    """Cut each role's text into one window per position; `groups` numbers the roles that are long enough.

    As LEAF does, line ends become spaces and several spaces become one. Roles that then have fewer than 81
    characters are dropped. There are no test rows; windows drawn at random to test on overlap training ones,
    so an accuracy to report needs LEAF's own test samples, or the natural partitioner and unseen clients.
    """
    tokens_of = {name: encode(re.sub("  +", " ", text.replace("\n", " "))) for name, text in texts.items()}
    encoded = {name: tokens for name, tokens in tokens_of.items() if len(tokens) > SEQUENCE_LENGTH}
    if not encoded:
        raise path_error(
            path, f"has no role with more than {SEQUENCE_LENGTH} characters; at least one is needed"
        )
    # Views, not copies: a play's windows are 80 times its text.
    blocks = [sliding_window_view(tokens[:-1], SEQUENCE_LENGTH) for tokens in encoded.values()]
    y = np.concatenate([tokens[SEQUENCE_LENGTH:] for tokens in encoded.values()]).astype(np.int64)
    groups = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])
    return RawData(blocks, y, groups, len(y), len(VOCABULARY), "text", 1.0, group_names=tuple(encoded))


def encode_samples(sequences: list[str], targets: list[str]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return token ids (N, 80) and (N,) of sequences and the characters that follow them.

    Raises
    ------
    ValueError
        If a sequence hasn't 80 characters or a target not one.
    """
    if any(len(text) != SEQUENCE_LENGTH for text in sequences) or any(len(text) != 1 for text in targets):
        raise ValueError(f"samples must be {SEQUENCE_LENGTH} characters and 1 character to predict")
    return encode("".join(sequences)).reshape(-1, SEQUENCE_LENGTH), encode("".join(targets))


def samples_data(splits: list[Split]) -> RawData:
    """Put encoded samples together."""
    y, groups, num_train = join_rows(splits)
    blocks, names = [split.x for split in splits], splits[0].group_names
    return RawData(blocks, y, groups, num_train, len(VOCABULARY), "text", 1.0, group_names=names)
