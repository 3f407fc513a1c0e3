"""How a task is trained: in the way that suits the model and the device.

- **stacked**: models of dense layers as one stack of batched products (``fedapp.training.dense``);
- **dual**: the same with many features and few examples, each client by itself (``fedapp.training.dual``);
- **vmapped**: other models under ``torch.func.vmap``, ragged clients padded and masked, where that works;
- **single**: one client after the other. Both by automatic differentiation (``fedapp.training.autograd``).

On a CPU convolutions and LSTMs are trained singly: batched over clients they are several times slower. On a GPU,
where the launch of a small kernel costs more than the kernel, they are vmapped. The choice follows from task and
device alone, never from a stopwatch, so that it is the same in every run.
"""

from fedapp.names import Way
from fedapp.training.dual import has_dual, is_dual_faster
from fedapp.training.layers import dense_layers
from fedapp.training.task import LocalTask
from fedapp.training.vmapped import trains_under_vmap


def way_of(task: LocalTask) -> Way:
    """Return how a client is trained: a way that ``can``."""
    on_cpu = task.x.device.type == "cpu"
    if can("stacked", task):
        return "dual" if on_cpu and is_dual_faster(task) and can("dual", task) else "stacked"
    return "single" if on_cpu or not can("vmapped", task) else "vmapped"


def can(way: Way, task: LocalTask) -> bool:
    """Say whether a task can be trained in a way: dense models alone in a stack or in dual form.

    Neither, where the images of a step are changed as it reads them.
    """
    if task.augmentation is not None and way in ("stacked", "dual"):
        return False
    if way == "dual":
        return has_dual(task)
    if way == "stacked":
        return bool(dense_layers(task.model)) and task.loss.errors is not None and task.optimizer.stacks
    return way == "single" or trains_under_vmap(task)
