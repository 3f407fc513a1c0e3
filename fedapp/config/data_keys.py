"""Keys of the data: which, how they are prepared, and how they are divided over clients."""

from typing import Annotated, Literal

from pydantic import Field

from fedapp.config.key import (
    Counting,
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
from fedapp.data.dataset import Missing
from fedapp.data.errors import PREFIX, expanded
from fedapp.data.loading import DATASETS, FORMS, FUNCTION, is_function
from fedapp.data.synthetic import PATTERN as SYNTHETIC
from fedapp.data.tables import TABLES, tables_in
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


_TABLE = if_("a table, or a folder of tables", _is_table)
_COLUMNS = if_("a table, hf:… or module:function", _has_columns)
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
    input_column: Annotated[
        Text, key("the column of inputs, or several: A,B,…; empty: all that are nothing else", _COLUMNS)
    ]
    label_column: Annotated[Text, key("the column of labels, or several, which are numbers: A,B,…", _COLUMNS)]
    group_column: Annotated[
        Text,
        key("the column of natural ids, such as a writer, for partitioner = natural; empty: none", _GROUPS),
    ]
    missing: Annotated[
        Missing,
        key(
            "rows with an empty cell: refused, left out, or filled in with the column's mean over all clients' "
            "training rows, which needs normalize = standardize",
            _TABLE,
        ),
    ]
    encode: Annotated[
        Flag, key("a column of texts becomes columns of 0 and 1, one for each text (one-hot)", _TABLE)
    ]
    normalize: Annotated[
        bool | Literal["symmetric", "standardize"],
        Field(description="true, false, symmetric or standardize"),
        key(
            "false: inputs in [0, 1]; symmetric: in [−1, 1]; true: less the dataset's published mean, over its "
            "standard deviation; standardize: the same by those of all clients' training rows"
        ),
    ]
    augment: Annotated[
        Literal["none", "flip", "crop", "flip+crop"],
        key("images changed at random in local training: mirrored, moved by up to 4 pixels, or both"),
    ]
    test_fraction: Annotated[
        Inside,
        key(
            "share of the rows, or of each client's, that are held out for testing",
            if_("test-on = unseen-clients or own, or data that ship no test rows", _rows_are_split),
        ),
    ]
    test_on: Annotated[
        Literal["held-out", "held-out-even", "held-out-odd", "unseen-clients", "own"],
        key(
            "what accuracy is measured on: held-out rows, every second of them (tune on the even ones, judge on the "
            "odd ones), clients with a division of their own, or each client's own "
            "rows that it doesn't train on"
        ),
    ]
    partitioner: Annotated[
        Partitioner,
        key("how rows are divided over clients"),
    ]
    class_imbalance: Annotated[
        NonNegative,
        key(
            "κ⁻¹: how unlike the clients' shares of the classes are (non-IID); 0: alike",
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
    min_samples: Annotated[Counting, key("rows that a client has at least")]
    dirichlet_alpha: Annotated[
        Positive,
        key(
            "α of the clients' classes (dirichlet: class-imbalance is 1 / α) or of each class's clients",
            where("partitioner", "dirichlet", "class-dirichlet"),
        ),
    ]
    classes_per_client: Annotated[
        Counting, key("classes of which a client has rows", where("partitioner", "pathological"))
    ]
    similarity: Annotated[
        UnitInterval,
        key(
            "share of each client's rows that is drawn from all; the others are dealt out sorted by class",
            where("partitioner", "similarity"),
        ),
    ]
