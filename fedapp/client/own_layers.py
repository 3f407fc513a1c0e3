"""The arrays of a model that a client keeps for itself (FedPer: Arivazhagan et al. 2019).

They don't travel: a client begins with those of the model that it builds, as the server does.
They are kept as a task has left them and as they were before it, with the task's number. The former arrays count
where the task isn't over yet on the run's clock, though an engine has done its work, and where a resumed run has it
done again.
"""

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import Tensor, nn

from fedapp import federation
from fedapp.client.kept import keep_model, kept_model
from fedapp.client.request import integer
from fedapp.federation.own_layers import BEFORE, TASK, as_kept
from fedapp.federation.records import OWN_ARRAYS
from strategies.flower import messages
from strategies.flower.arrays import pack, unpack


def own_names(record: ConfigRecord) -> tuple[str, ...]:
    """Return the names of the arrays that clients keep in a run."""
    return tuple(record.get(OWN_ARRAYS, ()))  # type: ignore[arg-type]


def initial_own(record: ConfigRecord, model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return the arrays of clients' own as the initial model has them."""
    if not (names := own_names(record)):
        return {}
    state = model.state_dict()
    return {name: state[name].detach().clone().to(device) for name in names}


def own_state(
    context: Context, record: ConfigRecord, device: torch.device, under_way: int
) -> dict[str, Tensor]:
    """Return a client's own arrays as they were before a task under way, by its number; {} if it has none yet."""
    if (kept := kept_model(context, record)) is None:
        return {}
    own = {name: array for name, array in kept.items() if name != TASK}
    begins = int(unpack(kept[TASK])[0]) == under_way
    found = {
        name.removeprefix(BEFORE): array for name, array in own.items() if name.startswith(BEFORE) == begins
    }
    return federation.to_state(ArrayRecord(found), device)


def keep_own(
    context: Context, record: ConfigRecord, model: nn.Module, trained: Mapping[str, np.ndarray]
) -> None:
    """Keep a client's own arrays as a task has left them, unless they have diverged."""
    cpu = torch.device("cpu")
    before = initial_own(record, model, cpu) | own_state(context, record, cpu, integer(record, messages.TASK))
    former = {name: value.numpy() for name, value in before.items()}
    arrays = {name: trained.get(name, value) for name, value in former.items()}
    if all(np.isfinite(array).all() for array in arrays.values()):
        after, begun = (
            ArrayRecord({name: pack(np.asarray(array)) for name, array in each.items()})
            for each in (arrays, former)
        )
        keep_model(context, record, as_kept(integer(record, messages.TASK), after, begun))
