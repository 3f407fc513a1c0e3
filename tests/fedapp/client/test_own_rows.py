"""A device whose tokens a model has no embedding for says so before it takes part."""

import numpy as np

from fedapp import server
from fedapp.config import RunConfig
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
