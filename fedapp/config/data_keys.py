"""Keys of the data: which, how they are prepared, and how they are divided over clients."""

from typing import Annotated, Literal

from pydantic import Field

from fedapp.config.key import Setting, if_, key, where
from fedapp.config.values import Counting, Inside, Keys, NonNegative, Positive, Text


def _rows_are_split(setting: Setting) -> bool:
    dataset = setting.dataset
    return setting.config.test_on == "unseen-clients" or dataset.num_train == len(dataset.y)


class DataKeys(Keys):
    """What the clients train on."""

    dataset: Annotated[
        Literal[
            "digits", "synthetic", "mnist", "cifar10", "cifar100", "femnist", "femnist-digits", "shakespeare", "npz",
            "files",
        ],
        key("the data; npz and files are your own"),
    ]  # fmt: skip
    data_path: Annotated[Text, key("where they are; empty: from the Hugging Face hub, or embedded")]
    normalize: Annotated[
        bool | Literal["symmetric"],
        Field(description="true, false or symmetric"),
        key("inputs in [0, 1], in [−1, 1], or by the dataset's published mean and deviation (true)"),
    ]
    test_fraction: Annotated[
        Inside,
        key(
            "share of the rows that are held out for testing",
            if_("test-on = unseen-clients, or data that ship no test rows", _rows_are_split),
        ),
    ]
    test_on: Annotated[
        Literal["held-out", "unseen-clients"],
        key("what accuracy is measured on: held-out rows, or clients with a division of their own"),
    ]
    partitioner: Annotated[
        Literal["label-quantity-skew", "iid", "dirichlet", "shards", "natural"],
        key("how rows are divided over clients"),
    ]
    class_imbalance: Annotated[
        NonNegative,
        key(
            "κ⁻¹: how unlike the clients' classes are; 0: alike", where("partitioner", "label-quantity-skew")
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
        key("α of the clients' classes; class-imbalance is 1 / α", where("partitioner", "dirichlet")),
    ]
