"""Apps in the shape of Flower's examples, from public interfaces alone and with synthetic data.

Each builds what its example sends: the names, shapes and dtypes of its arrays, and its metrics. Client i has its own
rows, which follow from i alone, so that a run repeats itself whatever runs the clients.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

ROWS = (20, 30, 50)  # of each client
FEATURES = 4


@dataclass(frozen=True)
class Shape:
    """An app, its initial model, and the loss of a model on the rows of all clients."""

    app: ClientApp
    initial: Callable[[], ArrayRecord]
    loss: Callable[[ArrayRecord], float]


def rows(i: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a client's features (n, 4) and classes (n,): the sign of the features' sum, from shifted inputs."""
    rng = np.random.default_rng(i)
    x = rng.normal(0.3 * (i - 1), 1.0, (ROWS[i], FEATURES)).astype(np.float32)
    return x, (x.sum(1) > 0).astype(np.int64)


def everything() -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of all clients."""
    x, y = zip(*map(rows, range(len(ROWS))), strict=True)
    return np.concatenate(x), np.concatenate(y)


def app_of(
    train: Callable[[ArrayRecord, int], ArrayRecord],
    loss: Callable[[ArrayRecord, np.ndarray, np.ndarray], float],
) -> ClientApp:
    """Return a ClientApp as the quickstarts have it: ``train`` returns the arrays of a client's trained model."""
    app = ClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        arrays = train(message.content.array_records["arrays"], i)
        metrics = MetricRecord({"train_loss": loss(arrays, *rows(i)), "num-examples": ROWS[i]})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        scored = loss(message.content.array_records["arrays"], *rows(i))
        metrics = MetricRecord({"eval_loss": scored, "num-examples": ROWS[i]})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def shape(
    initial: Callable[[], ArrayRecord],
    train: Callable[[ArrayRecord, int], ArrayRecord],
    loss: Callable[[ArrayRecord, np.ndarray, np.ndarray], float],
) -> Shape:
    """Return a shape by the functions that train and score its model."""
    return Shape(app_of(train, loss), initial, lambda arrays: loss(arrays, *everything()))


# ---- quickstart-jax: a list of arrays, in the order of the tree ----------------------------------------------------


def jax() -> Shape:
    """Return logistic regression of two layers with JAX."""
    import jax
    import jax.numpy as jnp

    def score(params: Sequence[Any], x: Any, y: Any) -> Any:
        hidden, bias, out = params
        logits = jnp.tanh(x @ hidden + bias) @ out
        return jnp.mean(jnp.logaddexp(0.0, logits) - y * logits)

    gradient = jax.jit(jax.grad(score))

    def train(arrays: ArrayRecord, i: int) -> ArrayRecord:
        x, y = rows(i)
        params = [jnp.asarray(array) for array in arrays.to_numpy_ndarrays()]
        for _ in range(5):
            params = [w - 0.3 * g for w, g in zip(params, gradient(params, x, y), strict=True)]
        return ArrayRecord([np.asarray(w) for w in params])

    def initial() -> ArrayRecord:
        keys = jax.random.split(jax.random.PRNGKey(0))
        hidden, out = (jax.random.normal(k, s) / 2 for k, s in zip(keys, ((FEATURES, 8), (8,)), strict=True))
        return ArrayRecord([np.asarray(hidden), np.zeros(8, np.float32), np.asarray(out)])

    return shape(initial, train, lambda arrays, x, y: float(score(arrays.to_numpy_ndarrays(), x, y)))


# ---- quickstart-pytorch, quickstart-huggingface, quickstart-pytorch-lightning: a state dict ------------------------


def of_torch(
    make: Callable[[], Any],
    logits: Callable[[Any, Any], Any],
    fit: Any = None,
    lr: float = 0.2,
    steps: int = 3,
) -> Shape:
    """Return the shape of a PyTorch module, whose state dict travels; ``fit(module, x, y)`` trains it."""
    import torch

    def made(arrays: ArrayRecord) -> Any:
        module = make()
        module.load_state_dict(arrays.to_torch_state_dict())
        return module

    def descend(module: Any, x: Any, y: Any) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=lr)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits(module, x), y).backward()
            optimizer.step()

    def train(arrays: ArrayRecord, i: int) -> ArrayRecord:
        module = made(arrays).train()
        (fit or descend)(module, *map(torch.from_numpy, rows(i)))
        return ArrayRecord(module.state_dict())

    def loss(arrays: ArrayRecord, x: np.ndarray, y: np.ndarray) -> float:
        with torch.no_grad():
            scored = logits(made(arrays).eval(), torch.from_numpy(x))
            return float(torch.nn.functional.cross_entropy(scored, torch.from_numpy(y)))

    def initial() -> ArrayRecord:
        torch.manual_seed(0)
        return ArrayRecord(make().state_dict())

    return shape(initial, train, loss)


def batch_norm() -> Shape:
    """Return a network with batch norm: running statistics, and counters that are integers of no axis."""
    from torch import nn

    def make() -> Any:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    return of_torch(make, lambda module, x: module(x))


def transformers() -> Shape:
    """Return a small BERT for classification, from a config; its tokens are the rows' signs."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=2,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=FEATURES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
        initializer_range=0.2,  # so that a few steps are enough
    )
    return of_torch(
        lambda: BertForSequenceClassification(config),
        lambda module, x: module(input_ids=(x > 0).long()).logits,
        lr=0.05,
        steps=9,
    )


def lightning() -> Shape:
    """Return a LightningModule that a Trainer fits."""
    import pytorch_lightning as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 2))

        def training_step(self, batch: Any, place: int) -> Any:
            return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.3)

    def fit(module: Any, x: Any, y: Any) -> None:
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the number of workers of the loader
            trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=len(x)))

    return of_torch(Classifier, lambda module, x: module.layers(x), fit)


# ---- sklearn: coefficients in float64, in two arrays ---------------------------------------------------------------


def sklearn() -> Shape:
    """Return scikit-learn's linear classifier, which goes on from the coefficients that it is given."""
    from sklearn.linear_model import SGDClassifier
    from sklearn.metrics import log_loss

    def made(arrays: ArrayRecord) -> Any:
        model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.05, random_state=0)
        model.classes_, (model.coef_, model.intercept_) = np.arange(2), arrays.to_numpy_ndarrays()
        return model

    def train(arrays: ArrayRecord, i: int) -> ArrayRecord:
        x, y = rows(i)
        model = made(arrays).partial_fit(x.astype(np.float64), y, classes=np.arange(2))
        return ArrayRecord([model.coef_, model.intercept_])

    def loss(arrays: ArrayRecord, x: np.ndarray, y: np.ndarray) -> float:
        return float(log_loss(y, made(arrays).predict_proba(x), labels=[0, 1]))

    return shape(lambda: ArrayRecord([np.zeros((1, FEATURES)), np.zeros(1)]), train, loss)


# ---- quickstart-pandas: statistics of columns, without a model -----------------------------------------------------


def pandas() -> Shape:
    """Return the means of a table's columns; the loss is their distance to those of all rows."""
    import pandas as pd

    def means(x: np.ndarray) -> np.ndarray:
        return pd.DataFrame(x.astype(np.float64)).mean().to_numpy()

    return shape(
        lambda: ArrayRecord({"means": _array(np.full(FEATURES, 9.0))}),
        lambda arrays, i: ArrayRecord({"means": _array(means(rows(i)[0]))}),
        lambda arrays, x, y: float(np.linalg.norm(arrays["means"].numpy() - means(x))),
    )


def _array(values: np.ndarray) -> Any:
    from flwr.app import Array

    return Array(values)


# ---- quickstart-xgboost: the bytes of a booster, which grow --------------------------------------------------------


def xgboost() -> ClientApp:
    """Return clients that add trees to a booster, whose JSON travels as an array of bytes; the first has none."""
    import xgboost as xgb

    options = {"objective": "binary:logistic", "max_depth": 2, "nthread": 1}
    app = ClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        data, given = xgb.DMatrix(rows(i)[0], rows(i)[1]), message.content["arrays"]["0"].numpy().tobytes()
        model = None
        if given:
            model = xgb.Booster(params=options)
            model.load_model(bytearray(given))
        grown = xgb.train(options, data, 1, xgb_model=model)
        last = grown[grown.num_boosted_rounds() - 1 :]
        arrays = ArrayRecord([np.frombuffer(last.save_raw("json"), np.uint8)])
        metrics = MetricRecord({"num-examples": ROWS[i]})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app
