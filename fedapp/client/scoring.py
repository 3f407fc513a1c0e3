"""The answer to a request to evaluate: what a model scores on a client's rows, and its own model beside it."""

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from fedapp import federation
from fedapp.client.kept import kept_model
from fedapp.client.own_layers import own_state
from fedapp.client.request import device_of, local_data, read_config, sent_model
from fedapp.client.training import StateOf, TensorsOf, TestsOf, model_of, own_tensors, tested_tensors
from fedapp.training.evaluation import Score, chosen_metrics
from fedapp.training.evaluation import evaluate as score
from fedapp.training.losses import loss_of
from strategies.flower import messages


def scored_reply(
    message: Message,
    context: Context,
    tuned: Mapping[str, np.ndarray] | None = None,
    state_of: StateOf = federation.to_state,
    tests_of: TestsOf = tested_tensors,
    tensors: TensorsOf = own_tensors,
) -> Message:
    """Score the model in a request on this client's test rows, or on all its rows where it has none apart.

    Beside it the client's own model, if it has one: the one that the request brings, the one that it keeps (before
    there is one, the global model), or what became of the global one on its rows, ``tuned``.
    """
    record, config = read_config(message)
    data, device = local_data(config, record, context), device_of(config)
    if data.test_rows is None:
        x, y, begin = tensors(config, data, device)
        x, y = x[begin : begin + len(data.rows)], y[begin : begin + len(data.rows)]
    else:
        x, y = tests_of(config, data, device)
    sent = state_of(sent_model(message), device)
    model, loss = model_of(record, config, data.dataset, device, sent), loss_of(config.loss)
    measured = chosen_metrics(config.metrics, config.loss, y)

    def metrics_of(state: dict[str, Tensor]) -> dict[str, float]:
        found: Score = score(model, state, x, y, loss, measured)
        # A metric that isn't defined on these rows is left out.
        told, rows = {"loss": found.loss, **found.values()}, np.array([0, len(x)])
        values = {name: np.array([value]) for name, value in told.items()}
        return {name: value for name, value in told.items() if not found.undefined(name, values, rows)}

    metrics = MetricRecord({messages.NUM_EXAMPLES: len(data.rows), **metrics_of(sent)})
    own = _own_state(message, context, record, sent, device)
    if tuned is not None:
        own = sent | {name: torch.from_numpy(value).to(device) for name, value in tuned.items()}
    if own is not None:
        for name, value in metrics_of(own).items():
            metrics[f"{messages.OF_PERSONAL}{name}"] = value
    return Message(RecordDict({messages.METRICS: metrics}), reply_to=message)


def _own_state(
    message: Message, context: Context, record: ConfigRecord, sent: dict[str, Tensor], device: torch.device
) -> dict[str, Tensor] | None:
    if read_config(message)[1].personal:
        under_way = int(record.get(messages.UNDER_WAY, 0))  # type: ignore[arg-type]
        return {**sent, **own_state(context, record, device, under_way)}
    arrays = messages.arrays_of(message, messages.PERSONAL_MODEL)
    if arrays is None and messages.PERSONAL in record:
        arrays = kept_model(context, record)
        if arrays is None:
            return sent
    return None if arrays is None else federation.to_state(arrays, device)
