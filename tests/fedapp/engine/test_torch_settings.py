"""What a run sets in PyTorch for its process is set back when the run ends."""

import pytest
import torch

from fedapp.engine.run import torch_as_it_was


def test_the_threads_of_a_run_that_fails_are_given_back():
    before = torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(before + 1)
        raise KeyError

    with pytest.raises(KeyError):
        torch_as_it_was()(run)()
    assert torch.get_num_threads() == before
