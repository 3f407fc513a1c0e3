"""The arrays of a model that a client keeps for itself (FedPer: Arivazhagan et al. 2019).

They are kept as a task has left them and as they were before it, with the task's number. The former arrays count
where the task isn't over yet on the run's clock, though an engine has done its work, and where a resumed run has it
done again.
"""

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import Tensor

from fedapp import federation
from fedapp.client.kept import keep_model, kept_model
from fedapp.client.request import integer
from fedapp.federation.own_layers import BEFORE, TASK, as_kept
from strategies.flower import messages
from strategies.flower.arrays import pack, unpack


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
    context: Context,
    record: ConfigRecord,
    names: tuple[str, ...],
    sent: ArrayRecord,
    trained: Mapping[str, np.ndarray],
) -> None:
    """Keep a client's own arrays as a task has left them, unless they have diverged."""
    before = own_state(context, record, torch.device("cpu"), integer(record, messages.TASK))
    former = {name: before[name].numpy() if name in before else unpack(sent[name]) for name in names}
    arrays = {name: trained.get(name, former[name]) for name in names}
    if all(np.isfinite(array).all() for array in arrays.values()):
        after, begun = (
            ArrayRecord({name: pack(np.asarray(array)) for name, array in each.items()})
            for each in (arrays, former)
        )
        keep_model(context, record, as_kept(integer(record, messages.TASK), after, begun))
