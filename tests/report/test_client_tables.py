"""clients.parquet: written as a run goes, whole after a kill, and no row twice."""

import math

import pytest
from pyarrow import parquet

from fedapp.report.client_tables import (
    ClientsFile,
    by_evaluation,
    last_clients,
    read_clients,
)


@pytest.fixture
def written(tmp_path):
    file = ClientsFile(tmp_path)
    file.append(0, 0.0, {"loss": [2.0, 3.0]}, {})
    file.append(5, 1.5, {"loss": [1.0, math.nan, 4.0], "importance": [0.5, 0.25, 0.25]}, {0: "oslo"})
    return file


def test_rows_are_read_back_while_the_run_goes_and_after(written, tmp_path):
    growing = read_clients(tmp_path)
    written.publish()
    assert parquet.read_table(tmp_path / "clients.parquet").equals(growing)
    written.publish(last=True)
    assert not (tmp_path / "clients.arrows").exists()
    assert read_clients(tmp_path).equals(growing)
    assert growing["client"].to_pylist() == [0, 1, 0, 1, 2]
    assert growing["weight"].to_pylist() == [None, None, 0.5, 0.25, 0.25]
    assert growing["name"].to_pylist() == [None, None, "oslo", None, None]
    first, last = by_evaluation(tmp_path).values()
    assert first == {"loss": [2, 3]}
    assert last["importance"] == [0.5, 0.25, 0.25]
    assert last["name"] == ["oslo", "", ""]
    assert last_clients(tmp_path)["loss"] == pytest.approx([1, math.nan, 4], nan_ok=True)


def test_what_was_written_bit_by_bit_is_read_in_groups_of_rows(written, tmp_path, monkeypatch):
    monkeypatch.setattr("fedapp.report.client_tables._ROWS", 4)
    for aggregation in (6, 7, 8):
        written.append(aggregation, 2.0, {"loss": [0.5]}, {})
    growing = read_clients(tmp_path)
    written.publish()
    groups = parquet.ParquetFile(tmp_path / "clients.parquet").metadata
    # 2, 3, 1, 1 and 1 rows: a group is as many pieces as have four.
    assert [groups.row_group(number).num_rows for number in range(groups.num_row_groups)] == [5, 3]
    assert parquet.read_table(tmp_path / "clients.parquet").equals(growing)


@pytest.mark.parametrize("lost", [1, 8, 200])
def test_a_torn_end_is_left_out(written, tmp_path, lost):
    content = (tmp_path / "clients.arrows").read_bytes()
    (tmp_path / "clients.arrows").write_bytes(content[:-lost] if lost > 8 else content + b"\xff" * lost)
    assert len(read_clients(tmp_path)) == (2 if lost > 8 else 5)


@pytest.mark.parametrize("ended", [False, True])
def test_a_resumed_run_goes_on_after_the_rows_of_its_checkpoint(written, tmp_path, ended):
    if ended:
        written.publish(last=True)
    again = ClientsFile(tmp_path)
    again.cut(2)
    again.append(5, 1.5, {"loss": [7.0, 8.0]}, {})
    assert again.sync() == 4
    again.publish(last=True)
    assert read_clients(tmp_path)["loss"].to_pylist() == [2, 3, 7, 8]
    with pytest.raises(ValueError, match="has lost rows since the checkpoint: 4 of 9"):
        ClientsFile(tmp_path).cut(9)


def test_a_metric_takes_no_column_of_the_records_own(tmp_path):
    file = ClientsFile(tmp_path)
    file.append(
        1, 0.0, {"loss": [1.0], "rows": [5.0], "client": [7.0], "name": [8.0], "aggregation": [9.0]}, {}
    )
    (row,) = read_clients(tmp_path).to_pylist()
    assert row == {"aggregation": 1, "time": 0.0, "client": 0, "name": None, "rows": "train", "loss": 1.0}


def test_a_folder_without_any_has_none(tmp_path):
    assert len(read_clients(tmp_path)) == 0
    assert last_clients(tmp_path) == {}
