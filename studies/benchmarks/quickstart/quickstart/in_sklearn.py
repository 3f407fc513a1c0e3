"""Flower's quickstart-sklearn: iterations of scikit-learn's logistic regression from the model that came."""

import warnings

import numpy as np
from flwr.app import ArrayRecord
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from quickstart import in_numpy

ITERATIONS = 2  # of L-BFGS a round


def initial(config: dict) -> ArrayRecord:
    """Return the first model: coefficients (10, 784) and intercepts (10,), zeros."""
    return ArrayRecord([np.zeros((10, 784)), np.zeros(10)])


def model_of(arrays: ArrayRecord) -> LogisticRegression:
    """Return a classifier of ten digits that goes on from arrays."""
    model = LogisticRegression(max_iter=ITERATIONS, warm_start=True)
    model.classes_ = np.arange(10)
    model.coef_, model.intercept_ = arrays.to_numpy_ndarrays()
    return model


def train(arrays: ArrayRecord, config: dict, node: dict) -> tuple[ArrayRecord, float, int]:
    """Fit for some iterations; return the model, its loss, and the number of rows."""
    x, y = in_numpy.own_rows(config["data"], node["partition-id"], node["num-partitions"])
    model = model_of(arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # two iterations are what is wanted
        model.fit(x, y)
    loss = log_loss(y, model.predict_proba(x), labels=model.classes_)
    return ArrayRecord([model.coef_, model.intercept_]), float(loss), len(x)


def accuracy(arrays: ArrayRecord, config: dict) -> float:
    """Return the share of test rows that the model gets right."""
    return float(model_of(arrays).score(*in_numpy.rows(config["data"], "test")))
