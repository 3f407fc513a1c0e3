"""A device whose tokens a model has no embedding or outputs for says so before it takes part."""

import numpy as np

from fedapp import server
from fedapp.config import RunConfig
from fedapp.data.partition import own_split
from strategies.flower import messages
from tests import own_models
from tests.fedapp.client.asking import ask


def test_a_device_tries_its_own_rows_before_it_takes_part(tmp_path):
    for name, token in (("server", 5), ("fits", 5), ("too-large", 40)):
        x, y = own_models.texts()
        x[200, 2] = token
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y)
    keys = {
        "dataset": "npz",
        "data-path": str(tmp_path / "server.npz"),
        "model": "tests.own_models:NextToken",
    }
    experiment = server.prepare(RunConfig.load(keys), 4)
    for name, said in (("fits", ""), ("too-large", "0 to 11 are allowed; the data ask for others")):
        reply = ask(messages.DESCRIBE, experiment, {"data-path": str(tmp_path / f"{name}.npz")})
        assert reply.has_error() == bool(said)
        assert said in (reply.error.reason if said else "")


def test_the_models_outputs_bound_a_devices_tokens_not_the_servers_rows(tmp_path):
    keys = {"dataset": "npz", "data-path": str(tmp_path / "server.npz"), "test-on": "own"}
    config = RunConfig.load(keys | {"model": "tests.fedapp.test_extremes:Tokens"})
    x, y = own_models.texts()
    np.savez(tmp_path / "server.npz", x_train=x, y_train=np.where(y == 11, -100, y))
    experiment = server.prepare(config, 4)
    parts = own_split(np.arange(len(y)), config.test_fraction, config.seed, 0)
    for name, row, label, said in (
        ("fits", 0, 11, ""),
        ("trained", parts[0][0], 12, "whose largest label is 12"),
        ("tested", parts[1][0], 12, "whose largest label is 12"),
    ):
        own = y.copy()
        own[row, 0] = label
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=own)
        reply = ask(messages.DESCRIBE, experiment, {"data-path": str(tmp_path / f"{name}.npz")})
        assert reply.has_error() == bool(said)
        assert said in (reply.error.reason if said else "")
