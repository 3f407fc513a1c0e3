"""A user's own data in common formats: tables in CSV, TSV or Parquet, or a folder of images by class.

No message quotes a value that is in the data: it may be told to the server.
"""

from pathlib import Path

from fedapp.data.dataset import DataColumns, RawData, Targets
from fedapp.data.errors import path_error
from fedapp.data.image_folder import image_files, image_folder_data
from fedapp.data.npz import npz_data
from fedapp.data.tables import TABLES, table_data, tables_in

FORMATS = (
    "a .npz, .csv, .tsv or .parquet file, a folder of images by class, or one with a table for each client"
)


def own_data(path: Path, columns: DataColumns, targets: Targets | None) -> RawData:
    """Read a user's own dataset, whatever its format.

    Raises
    ------
    DataError
        If it is in none of the formats, or not as its format demands.
    """
    if path.is_dir() and not tables_in(path):
        return image_folder_data(path, columns)
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return npz_data(path, targets)
    if suffix in TABLES or path.is_dir():
        return table_data(path, columns, targets)
    raise path_error(path, f"is in no known format; allowed: {FORMATS}")


def files_of(path: Path) -> list[Path]:
    """Return the files that a dataset is read from, sorted."""
    if path.is_dir():
        if tables := tables_in(path):
            return tables
        return image_files(path)
    return [path]
