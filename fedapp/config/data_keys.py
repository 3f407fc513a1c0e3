"""Keys of the data: which, how they are prepared, and how they are divided over clients."""

from typing import Annotated, Literal

from pydantic import Field

from fedapp.config.key import (
    Counting,
    Encoding,
    Flag,
    Inside,
    Keys,
    NonNegative,
    Positive,
    Setting,
    Text,
    UnitInterval,
    if_,
    key,
    pattern,
    where,
)
from fedapp.data.csv_files import TAB
from fedapp.data.dataset import AUTO, ImageMode, Missing
from fedapp.data.errors import PREFIX, expanded
from fedapp.data.loading import DATASETS, FORMS, FUNCTION, is_function
from fedapp.data.synthetic import PATTERN as SYNTHETIC
from fedapp.data.tables import PARQUET, TABLES, tables_in
from fedapp.names import Partitioner


def _rows_are_split(setting: Setting) -> bool:
    dataset = setting.dataset
    return setting.config.test_on in ("unseen-clients", "own") or dataset.num_train == len(dataset.y)


def _has_columns(setting: Setting) -> bool:
    """Tell whether the data may have columns; a function's that have none refuse them themselves."""
    config = setting.config
    return _is_table(setting) or config.dataset.startswith(PREFIX) or is_function(config.dataset)


def _is_table(setting: Setting) -> bool:
    config = setting.config
    return config.dataset == "files" and (
        config.data_path.lower().endswith(TABLES)
        or (
            bool(config.data_path) and (path := expanded(config.data_path)).is_dir() and bool(tables_in(path))
        )
    )


def _may_have_groups(setting: Setting) -> bool:
    is_folder = setting.config.dataset == "files" and not setting.config.data_path.lower().endswith(".npz")
    return is_folder or _has_columns(setting)


def _has_csv(setting: Setting) -> bool:
    config = setting.config
    if not _is_table(setting):
        return False
    path = expanded(config.data_path)
    return any(file.suffix.lower() != PARQUET for file in (tables_in(path) if path.is_dir() else [path]))


def _may_have_images(setting: Setting) -> bool:
    return setting.dataset.kind == "image" and _may_have_groups(setting)


_TABLE = if_("a table, or a folder of tables", _is_table)
_COLUMNS = if_("a table, hf:… or module:function", _has_columns)
_CSV = if_("a CSV file, or a folder with some", _has_csv)
_IMAGES = if_("a folder of images, hf:… or module:function", _may_have_images)
_GROUPS = if_("a table, hf:…, module:function or a folder of images", _may_have_groups)


class DataKeys(Keys):
    """What the clients train on."""

    dataset: Annotated[
        str,
        pattern(
            f"one of {', '.join(DATASETS)}, {FORMS}",
            rf"^({'|'.join(DATASETS)}|{SYNTHETIC}|{PREFIX}[^\x00-\x1f]+|{FUNCTION})$",
        ),
        key("the data; npz and files are your own"),
    ]
    data_path: Annotated[Text, key("where the data are; empty: the Hugging Face hub, or embedded")]
    input_column: Annotated[Text, key("the column of inputs, or several: A,B,…; empty: all others", _COLUMNS)]
    label_column: Annotated[Text, key("the column of labels, or several of numbers: A,B,…", _COLUMNS)]
    group_column: Annotated[Text, key("the column of natural ids, for partitioner = natural", _GROUPS)]
    drop_column: Annotated[Text, key("columns that are no inputs: A,B,…", _COLUMNS)]
    missing_values: Annotated[Text, key("texts and numbers that stand for an empty cell: ?,NA,-999", _TABLE)]
    missing: Annotated[
        Missing,
        key(
            "rows with an empty cell: refused, left out, or filled in with the column's training mean; rows without "
            "a label are left out by both",
            _TABLE,
        ),
    ]
    encode: Annotated[Flag, key("make columns of 0 and 1 of texts (one-hot)", _TABLE)]
    csv_encoding: Annotated[
        Encoding,
        key(
            "the encoding of CSV files; auto: UTF-8, by the file's first bytes, or Windows-1252 where that is sure",
            _CSV,
        ),
    ]
    separator: Annotated[
        str,
        pattern("auto, tab, or one sign such as ;", rf"^({AUTO}|{TAB}|[^\w\s\"'.-])$"),
        key("the sign between columns of CSV files; auto: as the first rows tell, where that is sure", _CSV),
    ]
    decimal: Annotated[
        str,
        pattern("auto, a point or a comma", rf"^({AUTO}|[.,])$"),
        key("the sign of decimals in tables; auto: a point, of CSV also a comma where that is sure", _TABLE),
    ]
    image_size: Annotated[
        str,
        pattern("empty, one number, or HEIGHTxWIDTH, in pixels", r"^([1-9]\d{0,3}(x[1-9]\d{0,3})?)?$"),
        key("height and width that images are scaled to; empty: as they are", _IMAGES),
    ]
    image_mode: Annotated[ImageMode, key("what images are converted to; auto: nothing", _IMAGES)]
    normalize: Annotated[
        bool | Literal["symmetric", "standardize"],
        Field(description="true, false, symmetric or standardize"),
        key(
            "inputs in [0, 1] (false), in [−1, 1] (symmetric), by the dataset's published mean and deviation (true), "
            "or by those of all training rows (standardize)"
        ),
    ]
    augment: Annotated[
        Literal["none", "flip", "crop", "flip+crop"],
        key("mirror training images at random, move them by up to 4 pixels, or both"),
    ]
    test_fraction: Annotated[
        Inside,
        key(
            "share of rows, or of each client's, held out for testing",
            if_("test-on = unseen-clients or own, or data without test rows", _rows_are_split),
        ),
    ]
    test_on: Annotated[
        Literal["held-out", "held-out-even", "held-out-odd", "unseen-clients", "own"],
        key(
            "rows to test on: held-out ones (the even to tune, the odd to judge), those of other clients, or each "
            "client's own"
        ),
    ]
    hold_out: Annotated[
        Literal["random", "last"],
        key(
            "whether test rows are drawn, or are the last of each client's rows, as of time series",
            if_("test-on = own, or data without test rows", _rows_are_split),
        ),
    ]
    partitioner: Annotated[Partitioner, key("how rows are divided over clients")]
    class_imbalance: Annotated[
        NonNegative,
        key(
            "κ⁻¹: how unlike clients' shares of classes are (non-IID); 0: alike",
            where("partitioner", "label-quantity-skew"),
        ),
    ]
    data_imbalance: Annotated[
        NonNegative,
        key(
            "φ², log-variance of the clients' sizes; 0: equal",
            where("partitioner", "label-quantity-skew", "dirichlet"),
        ),
    ]
    min_samples: Annotated[Counting, key("the fewest rows of a client")]
    dirichlet_alpha: Annotated[
        Positive,
        key(
            "α of the clients' classes (1 / class-imbalance) or of each class's clients",
            where("partitioner", "dirichlet", "class-dirichlet"),
        ),
    ]
    classes_per_client: Annotated[Counting, key("classes of a client", where("partitioner", "pathological"))]
    similarity: Annotated[
        UnitInterval,
        key(
            "share of a client's rows drawn from all; the others are sorted by class",
            where("partitioner", "similarity"),
        ),
    ]
