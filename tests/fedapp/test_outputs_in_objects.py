"""Models that return their outputs in an object, as those of transformers do, and series for recurrent layers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedapp
from fedapp.training.parts import logits_of
from tests import own_models
from tests.runs import same_files

IDS, Y = own_models.baskets()[0]["ids"], own_models.baskets()[1]
RUN: dict[str, Any] = {"num_clients": 3, "partitioner": "iid", "num_server_rounds": 2, "lr": 0.05}


@dataclass
class Output:
    """What the model of another library returns."""

    logits: Tensor
    loss: Tensor | None = None


class Plain(nn.Module):
    """Counts kinds."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(16, num_classes)

    def forward(self, input_ids: Tensor) -> Any:
        return self.output(F.one_hot(input_ids, 16).float().mean(1))


class InObject(Plain):
    """The same in an object."""

    def forward(self, input_ids: Tensor) -> Output:
        return Output(super().forward(input_ids))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def test_a_builtin_loss_gets_the_logits_of_an_object(tmp_path):
    data = {"dataset": ({"input_ids": IDS % 16}, Y)}
    paths = [
        fedapp.run(
            **RUN, **data, model=model, engine=engine, run_name=engine, results_dir=tmp_path / name
        ).path
        for name, model in (("plain", Plain), ("object", InObject))
        for engine in ("sequential", "vectorized")
    ]
    assert same_files(paths[0], paths[2])
    assert same_files(paths[1], paths[3])
    own = fedapp.run(
        **RUN,
        **data,
        model=InObject,
        loss=cross_entropy,
        results_dir=tmp_path,
        engine="sequential",
    )
    plain = fedapp.load(paths[0])
    assert own.summary["loss"] == pytest.approx(plain.summary["loss"], rel=1e-6)


def test_which_tensor_is_taken():
    x, y = torch.ones(2, 3), torch.zeros(2, 5)
    assert logits_of(x) is x
    assert logits_of(Output(x)) is x
    assert logits_of((x, y)) == (x, y)
    assert logits_of({"logits": x}) == {"logits": x}
    assert logits_of(Output(x), of_mappings=False) is x
    modeling = pytest.importorskip("transformers.modeling_outputs", reason="transformers isn't installed")
    assert logits_of(modeling.SequenceClassifierOutput(loss=None, logits=x, hidden_states=(y,))) is x
    assert logits_of(modeling.BaseModelOutput(last_hidden_state=y)) is y
    whole = modeling.SequenceClassifierOutput(logits=x)
    assert logits_of(whole, of_mappings=False) is whole
    several = modeling.BaseModelOutputWithPooling(last_hidden_state=y, pooler_output=x)
    assert logits_of(several) is several


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_classifier_of_transformers_as_it_is(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers isn't installed")

    def bert(num_classes: int) -> nn.Module:
        small = transformers.BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
            num_labels=num_classes,
        )
        return transformers.BertForSequenceClassification(small)

    inputs = {"input_ids": IDS % 32, "attention_mask": (IDS > 0).astype(np.int64)}
    made = fedapp.run(
        **RUN | {"num_server_rounds": 1},
        dataset=(inputs, Y),
        model=bert,
        results_dir=tmp_path,
        engine="vectorized",
    )
    assert made.summary["failures"] == 0
    assert 0 < made.summary["accuracy"] <= 1


class Recurrent(nn.Module):
    """An LSTM over (B, T, F), that refuses an axis more."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(input_shape[1], 8, batch_first=True)
        self.output = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.output(self.lstm(x)[0][:, -1])
        return outputs


def test_series_train_a_recurrent_layer(tmp_path):
    """Series that rise or fall from time step to time step."""
    rng = np.random.default_rng(0)
    y = np.arange(240) % 2
    x = rng.normal(size=(240, 10, 3)) + (np.arange(10)[:, None] - 5) * (2 * y - 1)[:, None, None]
    made = fedapp.run(
        **RUN | {"num_server_rounds": 4, "lr": 0.5},
        dataset=(100 * x, y),
        normalize="standardize",
        hold_out="last",
        model=Recurrent,
        results_dir=tmp_path,
    )
    assert made.summary["accuracy"] > 0.9
    stored = np.load(made.path / "partition.npz")
    rest = np.setdiff1d(np.arange(240), stored["client_indices"])
    assert stored["test_indices"].tolist() == rest.tolist()
