"""Shakespeare from roles, plays and LEAF's samples: windows of 80 characters and the one that follows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.data import DataError, load_dataset
from fedapp.data.shakespeare import UNKNOWN, VOCABULARY, encode

LINE = "".join(VOCABULARY[10 + i % 60] for i in range(100)).replace(" ", "x")


def decode(tokens: np.ndarray) -> str:
    return "".join(VOCABULARY[token] for token in tokens)


def write(path: Path, content: Any) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return str(path)


def leaf(**users: list[tuple[str, str]]) -> dict[str, Any]:
    data = {user: {"x": [x for x, _ in rows], "y": [y for _, y in rows]} for user, rows in users.items()}
    return {"users": list(users), "num_samples": [len(rows) for rows in users.values()], "user_data": data}


def message(path: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        load_dataset("shakespeare", str(path))
    return str(caught.value)


def test_vocabulary_is_leafs():
    assert len(set(VOCABULARY)) == len(VOCABULARY) == 80
    assert encode("\n }a").tolist() == [0, 1, 79, 53]
    # Outside the vocabulary: ASCII, Latin-1, beyond, an astral and an unpaired surrogate.
    assert encode("~é’😀\ud800").tolist() == [UNKNOWN] * 5
    assert decode(encode(VOCABULARY)) == VOCABULARY


def test_roles_one_window_per_position(tmp_path):
    path = write(tmp_path / "roles.json", {"A": LINE, "short": LINE[:80], "B": LINE[:81]})
    data = load_dataset("shakespeare", path)
    assert data.x.shape == (21, 80)
    assert data.x.dtype == np.uint8
    assert (data.kind, data.num_classes, data.num_train, data.scale) == ("text", 80, 21, 1.0)
    assert data.groups.tolist() == [0] * 20 + [1]  # roles with a window are numbered
    for row in range(20):
        assert decode(data.x[row]) == LINE[row : row + 80]
        assert VOCABULARY[data.y[row]] == LINE[row + 80]
    assert decode(data.x[20]) == LINE[:80]
    inputs = data.inputs(np.array([1, 2]))
    assert inputs.dtype == np.int64
    assert inputs.flags.c_contiguous
    with pytest.raises(DataError, match="normalize = true"):
        data.inputs([0], normalize=True)


def test_white_space_is_joined_as_leaf_does(tmp_path):
    path = write(tmp_path / "roles.json", {"A": "a\n    b  c\n" + LINE})
    assert decode(load_dataset("shakespeare", path).x[0]).startswith("a b c " + LINE[:10])


def test_plays_speaker_by_speaker(tmp_path):
    text = f"""=== PLAY: One ===

ROMEO:
{LINE[:50]}
{LINE[50:70]}

JULIET:
{LINE}

ROMEO:
{LINE[70:]}

=== PLAY: Two ===

JULIET:
{LINE}
"""
    data = load_dataset("shakespeare", write(tmp_path / "my_plays.txt", text))
    # ROMEO's two speeches make one text of 102 characters; JULIET of another play is another role.
    assert np.bincount(data.groups).tolist() == [22, 20, 20]
    assert decode(data.x[0]) == f"{LINE[:50]} {LINE[50:70]} {LINE[70:78]}"
    assert np.array_equal(data.x[data.groups == 1], data.x[data.groups == 2])


def test_leaf_train_and_test(tmp_path):
    rows = [(LINE[i : i + 80], LINE[i + 80]) for i in range(6)]
    train = write(tmp_path / "my_train_9.json", leaf(b=rows[:2], a=rows[2:4]))
    assert load_dataset("shakespeare", train).num_train == 4
    write(tmp_path / "my_test_9.json", leaf(a=rows[4:5], new=rows[5:]))
    for path in (train, tmp_path):
        data = load_dataset("shakespeare", str(path))
        assert (data.num_train, len(data.y)) == (4, 6)
        assert data.groups.tolist() == [0, 0, 1, 1, 1, 2]
        assert [decode(x) for x in data.x] == [x for x, _ in rows]
        assert decode(data.y) == "".join(y for _, y in rows)


def test_leafs_own_folders_and_several_files(tmp_path):
    rows = [(LINE[:80], "a"), (LINE[:80], "b"), (LINE[:80], "c")]
    for i, part in enumerate(("train/one.json", "train/two.json", "test/one.json")):
        write(tmp_path / part, leaf(**{f"u{i}": rows[i : i + 1]}))
    data = load_dataset("shakespeare", str(tmp_path))
    assert data.num_train == 2
    assert decode(data.y) == "abc"


def test_a_folder_prefers_roles_then_leaf_then_plays(tmp_path):
    write(tmp_path / "plays.txt", f"=== PLAY: One ===\n\nA:\n{LINE}\n")
    assert len(load_dataset("shakespeare", str(tmp_path)).y) == 20
    write(tmp_path / "train.json", leaf(a=[(LINE[:80], "a")]))
    assert len(load_dataset("shakespeare", str(tmp_path)).y) == 1
    write(tmp_path / "roles.json", {"A": LINE[:85]})
    assert len(load_dataset("shakespeare", str(tmp_path)).y) == 5


def test_errors(tmp_path):
    assert message(tmp_path).endswith(
        "holds no 'shakespeare'; allowed: *roles*.json, *train*.json or *plays*.txt"
    )
    path = write(tmp_path / "file.csv", "x")
    assert message(path) == (
        f"data-path = {path!r}: a folder, a .json file (roles or LEAF) or a .txt file (plays) is needed"
    )
    path = write(tmp_path / "a.txt", LINE)
    assert message(path).endswith("has no line '=== PLAY: title ==='; plays in that format are needed")
    Path(path).write_bytes(b"\xff\xfe\xff")
    assert "can't be read as UTF-8 text (UnicodeDecodeError" in message(path)
    path = write(tmp_path / "a.json", {"A": LINE[:80]})
    assert message(path).endswith("has no role with more than 80 characters; at least one is needed")
    write(tmp_path / "a.json", {"A": 3})
    assert message(path).endswith("is neither roles {name: text} nor LEAF's users and user_data")
    write(tmp_path / "a.json", leaf(a=[(LINE[:79], "a")]))
    assert "user 'a': ValueError: samples must be 80 characters and 1 character to predict" in message(path)
    write(tmp_path / "a.json", leaf(a=[(7, "a")]))
    assert "user 'a': TypeError" in message(path)
    write(tmp_path / "a.json", {"users": ["a"], "user_data": {}})
    assert "isn't LEAF's users and user_data with x and y" in message(path)


@pytest.mark.parametrize(
    ("file", "roles"), [("leaf_shakespeare_roles.json", 572), ("shakespeare_plays.txt", 1392)]
)
def test_real_roles(real_data, file, roles):
    if not (real_data / file).is_file():
        pytest.skip(f"no {file}")
    data = load_dataset("shakespeare", str(real_data / file))
    assert len(data.y) > 1_000_000
    assert 300 < data.groups.max() < roles
    # A window moved by one is the next window, and its last character is the label of the one before.
    rows = np.flatnonzero(data.groups == 100)[:500]
    assert np.array_equal(data.x[rows[1:], :79], data.x[rows[:-1], 1:])
    assert np.array_equal(data.x[rows[1:], 79], data.y[rows[:-1]])


def test_real_leaf_samples(real_data):
    path = real_data / "leaf_shakespeare_train.json"
    if not path.is_file():
        pytest.skip("no leaf_shakespeare_train.json")
    data = load_dataset("shakespeare", str(path))
    # LEAF leaves out the 79 test windows per user that overlap training ones, but counts them in num_samples
    # (4,671 - 10 · 79 = 3,881).
    assert (data.num_train, len(data.y)) == (41_990, 41_990 + 3_881)
    assert len(np.unique(data.groups)) == 10
    assert decode(data.x[0]).startswith("Here, mighty Theseus. There is a brief")
    assert VOCABULARY[data.y[0]] == "w"
