"""Tables as people have them: signs for missing values, ids, dates, and CSV of other programs."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedapp.data import DataError, load_dataset
from fedapp.data.dataset import DataColumns, Dataset

ROWS = 200


@pytest.fixture
def frame():
    """Blood pressures and ages of 200 patients."""
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "bp": rng.integers(90, 180, ROWS),
            "age": rng.uniform(20, 90, ROWS).round(2),
            "label": rng.integers(0, 2, ROWS),
        }
    )


@pytest.fixture(params=["own.csv", "own.parquet"])
def path(request, tmp_path):
    return tmp_path / str(request.param)


def write(path: Path, frame: pd.DataFrame) -> None:
    frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path, index=False)


def loaded(path: Path, frame: pd.DataFrame, **columns: Any) -> Dataset:
    write(path, frame)
    return load_dataset("files", str(path), columns=DataColumns(**columns))


def refused(path: Path, frame: pd.DataFrame | None = None, **columns: Any) -> str:
    if frame is not None:
        write(path, frame)
    with pytest.raises(DataError) as caught:
        load_dataset("files", str(path), columns=DataColumns(**columns))
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"data-path = {str(path)!r}: ")


def with_text(frame: pd.DataFrame, column: str, *texts: str) -> pd.DataFrame:
    """Return a table with texts in the first cells of a column."""
    cells = frame[column].astype(str).tolist()
    return frame.assign(**{column: [*texts, *cells[len(texts) :]]})


# Missing values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encode", [False, True])
def test_a_sign_among_numbers_is_named_with_the_key_that_empties_it(path, frame, encode):
    assert refused(path, with_text(frame, "bp", "?"), encode=encode) == (
        "column 'bp': 199 of 200 cells are numbers, the other is '?'; missing-values = '?' makes it empty"
    )
    several = with_text(frame, "bp", "unknown", "?", "?")
    assert refused(path, several, encode=encode) == (
        "column 'bp': 197 of 200 cells are numbers, the other 3 are '?' or 'unknown'; missing-values = '?,unknown' "
        "makes them empty"
    )


def test_a_text_among_numbers_is_in_the_log_of_its_machine_alone(path, frame, caplog):
    with caplog.at_level(logging.WARNING):
        said = refused(path, with_text(frame, "bp", "Smith"))
    assert said.startswith(
        "column 'bp': 199 of 200 cells are numbers, the other is a text; missing-values = A,B,…"
    )
    assert "Smith" not in said
    assert "'Smith'" in caplog.text


def test_missing_values_are_empty_cells_of_texts_and_numbers(path, frame):
    texts = with_text(frame, "bp", "?", " NA ").assign(
        age=frame["age"].where(frame.index != 2, -999), colour=["red", "?", "blue"] + ["red"] * 197
    )
    markers = "?, NA ,-999"
    dropped = loaded(path, texts, missing_values=markers, missing="drop", encode=True)
    assert (len(dropped.y), dropped.columns) == (197, ("bp", "age", "colour=red"))
    np.testing.assert_array_equal(dropped.x[:, :2], frame[["bp", "age"]].to_numpy()[3:].astype(np.float32))
    kept = loaded(path, texts, missing_values=markers, missing="mean", encode=True)
    assert np.argwhere(np.isnan(kept.x)).tolist() == [[0, 0], [1, 0], [2, 1]]
    assert kept.columns == ("bp", "age", "colour=blue", "colour=red")
    assert kept.x[1, 2:].tolist() == [0, 0]
    assert refused(path, texts, missing_values=markers, encode=True).startswith(
        "column 'bp' has 2 empty cells; all must be filled"
    )


def test_missing_values_of_labels_stay_whole_numbers(path, frame):
    data = loaded(path, with_text(frame, "label", "?"), missing_values="?,-7", missing="drop")
    assert data.y.tolist() == frame["label"].tolist()[1:]
    assert data.targets == "classes"
    assert data.remarks == (
        "missing-values: no cell is '-7'",
        "1 of 200 rows have an empty cell (label: 1) and are left out",
    )


def test_categories_that_are_most_of_the_rows_are_refused_unless_named(path, frame):
    towns = frame.assign(town=[f"town {row % 120}" for row in range(ROWS)])
    assert refused(path, towns, encode=True) == (
        "column 'town' has 120 different texts in 200 rows, each of which would be an input; drop-column = 'town' "
        "leaves it out, and input-column = A,B,… keeps it if it is one of these"
    )
    assert loaded(path, towns, encode=True, inputs="town,age").x.shape == (ROWS, 121)
    few = frame.assign(town=[f"town {row % 100}" for row in range(ROWS)])
    assert loaded(path, few, encode=True).x.shape == (ROWS, 102)


# Ids, dates, values far from the others ----------------------------------------------------------------------


def test_ids_are_warned_of_or_left_out(path, frame):
    ids = frame.assign(patient=np.random.default_rng(1).permutation(ROWS) + 70_000)
    data = loaded(path, ids)
    assert data.remarks == (
        "column 'patient' has a different whole number in each of 200 rows, as ids have, and would be trained on; "
        "drop-column = 'patient' leaves it out",
    )
    without = loaded(path, ids, drop="patient")
    assert (without.columns, without.remarks) == (("bp", "age"), ())
    assert loaded(path, ids, inputs="patient,age").remarks == ()
    texts = frame.assign(patient=[f"P{row}" for row in range(ROWS)])
    for encode in (False, True):
        assert refused(path, texts, encode=encode) == (
            "column 'patient' has a different text in each of 200 rows, as an id has; drop-column = 'patient' leaves "
            "it out"
        )


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%y", "%Y-%m-%dT%H:%M:%S"])
@pytest.mark.parametrize("encode", [False, True])
def test_dates_are_one_line(path, frame, form, encode):
    days = pd.Series(pd.date_range("2024-01-01", periods=20).repeat(10))
    said = (
        "column 'seen' holds dates or times; numbers, such as days or years, are needed, or drop-column = 'seen' "
        "leaves it out"
    )
    assert refused(path, frame.assign(seen=days.dt.strftime(form)), encode=encode) == said
    assert refused(path, frame.assign(seen=days), encode=encode) == said
    assert loaded(path, frame.assign(seen=days), drop="seen").columns == ("bp", "age")


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        (
            "bp",
            [-999] * 3,
            r"3 of 200 cells are -999, far from the others \(9\d to 17\d\); missing-values = '-999' makes them empty",
        ),
        ("bp", [-999] * 80, r"80 of 200 cells are -999, far "),
        (
            "bp",
            [-999, 9999],
            r"2 of 200 cells are -999 or 9999, far .* missing-values = '-999,9999' makes them empty",
        ),
        (
            "age",
            [1987.0],
            r"1 of 200 cells is 1987, far from the others \(2\d.* to 8\d.*\); missing-values = '1987'",
        ),
        ("code", [9, 9], r"2 of 200 cells are 9, far from the others \(0 to 2\)"),
        ("wealth", [-99.0], r"1 of 200 cells is -99, far from"),
    ],
)
def test_values_far_from_the_others_are_named(path, frame, column, values, said):
    wealth = np.random.default_rng(2).lognormal(5, 1.5, ROWS)
    frame = frame.assign(code=np.arange(ROWS) % 3, wealth=wealth)
    assert loaded(path, frame).remarks == ()
    cells = frame[column].astype(type(values[0])).tolist()
    data = loaded(path, frame.assign(**{column: [*values, *cells[len(values) :]]}))
    assert len(data.remarks) == 1
    assert pd.Series(data.remarks).str.match(f"column '{column}': {said}").all()


def test_targets_far_from_the_others_are_named(path, frame):
    frame.loc[5, "age"] = -999
    data = loaded(path, frame, label="age", drop="label")
    assert data.remarks[0].startswith("column 'age': 1 of 200 cells is -999, far from the others")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            {"drop": "bq"},
            "needs a column 'bq' and others, each name once (found: bp, age, label); drop-column names it",
        ),
        ({"drop": "bp,age"}, "needs a column 'label' and others, each name once (found: bp, age, label)"),
        (
            {"drop": "label"},
            "column 'label' is to be two things; label-column = 'label' and drop-column = 'label' must differ",
        ),
        (
            {"drop": "age", "inputs": "age,bp"},
            "column 'age' is to be two things; input-column = 'age,bp' and drop-column = 'age' must differ",
        ),
    ],
)
def test_columns_that_can_not_be_left_out(path, frame, columns, said):
    assert refused(path, frame, **columns) == said


# CSV of other programs ---------------------------------------------------------------------------------------

WESTERN = "Größe;Krankenhaus;label\n1,5;Genève;ja\n2,25;Zürich;nein\n0,5;São Paulo;ja\n"


def read(path: Path, content: bytes, **columns: Any) -> Dataset:
    path.write_bytes(content)
    return load_dataset("files", str(path), columns=DataColumns(encode=True, **columns))


@pytest.mark.parametrize("encoding", ["cp1252", "utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_csv_of_a_spreadsheet_is_read_as_pandas_reads_it(tmp_path, encoding, separator):
    path = tmp_path / "own.csv"
    data = read(path, WESTERN.replace(";", separator).encode(encoding))
    frame = pd.read_csv(path, sep=separator, decimal=",", encoding=encoding)
    assert data.columns == ("Größe", "Krankenhaus=Genève", "Krankenhaus=São Paulo", "Krankenhaus=Zürich")
    assert data.x[:, 0].tolist() == frame["Größe"].tolist() == [1.5, 2.25, 0.5]
    assert data.classes == ("ja", "nein")
    between = "tabulators" if separator == "\t" else repr(separator)
    western = "as Windows-1252, " if encoding == "cp1252" else ""
    assert data.remarks == (
        f"CSV is read {western}with {between} between columns, with decimal commas; the keys csv-encoding, separator "
        "and decimal can say otherwise",
    )
    named = "cp1252" if encoding == "cp1252" else encoding
    stated = read(
        path,
        path.read_bytes(),
        csv_encoding=named,
        separator="tab" if separator == "\t" else separator,
        decimal=",",
    )
    assert (stated.x.tolist(), stated.columns, stated.remarks) == (data.x.tolist(), data.columns, ())


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("x,płeć,label\n1,a,0\n", "cp1250"),
        ("x,město,label\n1,příjem,0\n", "cp1250"),
        ("x,пол,label\n1,a,0\n", "cp1251"),
        ("x,größe,label\n1,a,0\n", "mac_roman"),
        ("x,größe,label\n1,a,0\n", "cp850"),
        ("x,性別,label\n1,a,0\n", "shift_jis"),
        ("x,szűrés,label\n1,a,0\n", "cp1250"),
    ],
)
def test_an_encoding_that_is_not_sure_is_asked_for(tmp_path, text, encoding):
    path = tmp_path / "own.csv"
    path.write_bytes(text.encode(encoding))
    assert refused(path) == (
        "isn't UTF-8, and its encoding isn't sure; csv-encoding names it, such as cp1250 or latin-1"
    )
    assert read(path, path.read_bytes(), csv_encoding=encoding, drop=text.split(",")[1]).columns == ("x",)


@pytest.mark.parametrize(
    ("text", "columns", "said"),
    [
        (
            "größe,label\n1,0\n",
            {"csv_encoding": "utf-8"},
            "isn't utf-8; csv-encoding = 'auto', or its encoding, is needed",
        ),
        ("größe,label\n1,0\n", {"csv_encoding": "ascii"}, "can't be decoded as csv-encoding = 'ascii'"),
        (
            "a;b,label\n1;2,0\n",
            {},
            "has ',' and ';' in its first row, and which of them is between columns isn't sure; separator says it",
        ),
        (
            "a;label\n1,234;0\n5,678;1\n",
            {},
            "column 'a' has numbers with commas; decimal = ',' or '.' says which sign is that of decimals",
        ),
    ],
)
def test_csv_that_is_not_sure_is_one_line_with_the_key(tmp_path, text, columns, said):
    path = tmp_path / "own.csv"
    path.write_bytes(text.encode("cp1252"))
    assert refused(path, **columns) == said


@pytest.mark.parametrize(
    ("cells", "decimal", "values"),
    [
        (["1,234", "5,678"], ".", [1234, 5678]),
        (["1,234", "5,678"], ",", [1.234, 5.678]),
        (["1.234,5", "12"], ",", [1234.5, 12]),
        (["1.234,5", "1.234"], "auto", [1234.5, 1234]),
        (["1,234.5", "12"], ".", [1234.5, 12]),
        (["0,234", "5,678"], "auto", [0.234, 5.678]),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_signs_before_each_three_digits(tmp_path, cells, decimal, values, kind):
    path, frame = tmp_path / f"own.{kind}", pd.DataFrame({"a": cells, "label": [0, 1]})
    if kind == "parquet" and decimal == "auto":
        return  # a text of a database is a text
    frame.to_csv(path, sep=";", index=False) if kind == "csv" else frame.to_parquet(path)
    data = load_dataset("files", str(path), columns=DataColumns(decimal=decimal))
    assert data.x[:, 0].tolist() == np.array(values, np.float32).tolist()


def test_signs_in_quotes_and_in_some_rows_are_no_separators(tmp_path):
    text = 'a,"b; c",label\n1,2,0\n3,4,1\n'
    assert read(tmp_path / "a.csv", text.encode()).columns == ("a", "b; c")
    text = "a,b,label\n1;x,2,0\n3,4,1\n"
    assert "a=1;x" in read(tmp_path / "b.csv", text.encode(), inputs="a,b").columns


def test_a_folder_says_what_was_assumed_once(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_bytes(b"x;label\n1,5;0\n2;1\n")
    data = load_dataset("files", str(tmp_path))
    assert data.x[:, 0].tolist() == [1.5, 2, 1.5, 2]
    assert len(data.remarks) == 1


# Columns ------------------------------------------------------------------------------------------------------


def test_columns_whose_names_have_commas_or_blanks_are_named_as_they_are(path, frame):
    odd = frame.rename(columns={"bp": "bp, mmHg", "age": " age ", "label": "died "})
    data = loaded(path, odd, label="died ", inputs="bp, mmHg, age ")
    assert data.columns == ("bp, mmHg", " age ")
    assert loaded(path, odd, label="died ", drop=" age ").columns == ("bp, mmHg",)
    said = refused(path, odd, label="died")
    assert said.startswith(
        "needs a column 'died' and others, each name once (found: 'bp, mmHg', ' age ', 'died ')"
    )


def test_tabulators_between_columns(tmp_path, frame):
    frame.to_csv(tmp_path / "t.tsv", sep="\t", index=False)
    data = load_dataset("files", str(tmp_path / "t.tsv"))
    assert np.array_equal(data.x, frame[["bp", "age"]].to_numpy(np.float32))


# Natural ids --------------------------------------------------------------------------------------------------


def test_natural_ids_that_begin_with_zeros_are_names(tmp_path, frame):
    sites = np.array(["007", "010", "1"])[np.arange(ROWS) % 3]
    data = loaded(tmp_path / "t.csv", frame.assign(site=sites), group="site")
    assert data.group_names == ("1", "007", "010")
    assert data.groups is not None
    assert [data.group_names[each] for each in data.groups] == sites.tolist()
    plain = loaded(tmp_path / "u.csv", frame.assign(site=np.arange(ROWS) % 3), group="site")
    assert (plain.group_names, plain.groups.tolist()) == ((), (np.arange(ROWS) % 3).tolist())


def test_natural_ids_that_pandas_has_written_beside_a_gap_are_whole_numbers(path, frame):
    sites = np.where(np.arange(ROWS) == 5, np.nan, np.arange(ROWS) % 3 + 1.0)
    data = loaded(path, frame.assign(site=sites), group="site", missing="drop")
    assert data.groups is not None
    assert data.groups.tolist() == [row % 3 + 1 for row in range(ROWS) if row != 5]
    said = refused(path, frame.assign(site=sites + 0.5), group="site", missing="drop")
    assert said == "column 'site' has type double; whole numbers or names are needed"
