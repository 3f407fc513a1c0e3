"""Masks: what is padded in a batch of clients leaves no trace in the model."""

import pytest
import torch

from fedapp.training.autograd import batch_loss, train
from fedapp.training.rule import LocalRule
from fedapp.training.trainee import Trainee
from tests.training.cases import RULES, three_clients

LR = 0.2


@pytest.fixture
def arguments():
    """Loss, model sent, inputs and labels of one client with 20 examples."""
    task = three_clients("logistic", RULES["plain"])[1]
    return batch_loss(Trainee(task.model), task.loss, {}), task.start, task.x[task.rows], task.y[task.rows]


def test_a_masked_batch_equals_the_shorter_one(arguments):
    rows = torch.tensor([4, 7, 2])
    padded_rows, mask = torch.tensor([4, 7, 2, 0, 0]), torch.tensor([1.0, 1, 1, 0, 0])
    short, short_loss = train(*arguments, [(rows, None)], LR, LocalRule())
    masked, masked_loss = train(*arguments, [(padded_rows, mask)], LR, LocalRule())
    assert all(torch.allclose(short[name], masked[name], rtol=0, atol=1e-6) for name in short)
    assert float(masked_loss) == pytest.approx(float(short_loss), rel=1e-6)


def test_steps_of_padding_alone_move_nothing(arguments):
    rows = torch.tensor([4, 7, 2])
    nothing = (torch.zeros(3, dtype=torch.long), torch.zeros(3))
    rule = LocalRule(alpha=0.7, momentum=0.9, l2=0.3, clip_norm=1.0)
    once, once_loss = train(*arguments, [(rows, torch.ones(3))], LR, rule)
    padded, padded_loss = train(*arguments, [(rows, torch.ones(3)), nothing, nothing], LR, rule)
    assert all(torch.equal(once[name], padded[name]) for name in once)
    assert torch.equal(once_loss, padded_loss)
