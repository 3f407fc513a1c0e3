"""The compression residual of a client (error feedback), in its context's state.

A client keeps two residuals: the one before its last task and the one after it. When a simulated run is saved
(strategies/core/compressed_updates.py), a task may be running by the virtual clock though its client has already done
the work: the resumed run dispatches the task again, and the client starts from the residual before it. On devices the
residual stays on the device, and is lost when its SuperNode restarts.
"""

from flwr.app import Array, ArrayRecord, ConfigRecord, Context

from strategies.flower import messages

# Records of the context's state: the residuals, and the run and the task that they belong to.
RESIDUALS, RESIDUALS_OF = "strategies.left-out", "strategies.left-out-of"
_BEFORE, _AFTER = "before", "since"


def residual_before(context: Context, run: int, task: int) -> Array | None:
    """Return a client's compression residual before this task of this run; None if there is none."""
    of, kept = context.state.get(RESIDUALS_OF), context.state.get(RESIDUALS)
    if not isinstance(of, ConfigRecord) or not isinstance(kept, ArrayRecord) or of[messages.RUN] != run:
        return None
    return kept.get(_BEFORE if of[messages.TASK] == task else _AFTER)


def residuals_of(context: Context, run: int) -> tuple[int, list[Array]] | None:
    """Return a client's last task in a run, and its residuals before it, if any, and after it; None without any."""
    of, kept = context.state.get(RESIDUALS_OF), context.state.get(RESIDUALS)
    if not isinstance(of, ConfigRecord) or not isinstance(kept, ArrayRecord) or of[messages.RUN] != run:
        return None
    return int(of[messages.TASK]), [kept[name] for name in (_BEFORE, _AFTER) if name in kept]  # type: ignore[arg-type]


def keep_residual(context: Context, run: int, task: int, before: Array | None, after: Array) -> None:
    """Keep the compression residual before a task, None if there was none, and the residual after it."""
    context.state[RESIDUALS_OF] = ConfigRecord({messages.RUN: run, messages.TASK: task})
    context.state[RESIDUALS] = ArrayRecord(
        {_AFTER: after} if before is None else {_BEFORE: before, _AFTER: after}
    )
