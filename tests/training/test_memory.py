"""What a step frees, the next one finds again."""

import os

import pytest

from fedapp.training.autograd import train_single
from fedapp.training.memory import keep_freed
from fedapp.training.rule import LocalRule
from tests.training.cases import make_tasks, plan


@pytest.mark.skipif(not keep_freed(), reason="the C library isn't glibc")
def test_steps_on_images_need_no_new_memory():
    import resource  # not on Windows

    def faults(steps: int) -> int:
        (task,) = make_tasks("cnn", LocalRule(), [plan(64, batch=64, steps=steps)], [0.1], shape=(1, 28, 28))
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        train_single(task)
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    faults(2)
    few, many = faults(2), faults(12)
    # The activations of a step are 30 MiB.
    assert (many - few) / 10 < (3 << 20) / os.sysconf("SC_PAGE_SIZE")
