"""A GPU's results repeat, and are a CPU's up to rounding; its switches are set for a run alone."""

import copy
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedapp.training.gpu import WORKSPACE, gpu, gpu_as_it_was
from fedapp.training.rule import Parameters
from fedapp.training.task import LocalTask
from fedapp.training.trainer import can
from tests.training.cases import CLASSES, RULES, assert_equals_reference, by_way, three_clients

Switches = tuple[object, ...]


def switches() -> Switches:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    precisions = [each.fp32_precision for each in (cudnn.conv, cudnn.rnn, matmul)]
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    return workspace, cudnn.deterministic, cudnn.benchmark, *precisions


def older_names() -> tuple[bool, bool]:
    """Return what other code may ask for; an error where PyTorch's two ways of saying it don't agree."""
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


@pytest.fixture(autouse=True)
def own_switches(monkeypatch):
    monkeypatch.delenv(WORKSPACE[0], raising=False)
    with gpu_as_it_was():
        yield


@pytest.mark.parametrize(("tf32", "precision"), [(False, "ieee"), (True, "tf32")])
def test_all_is_float32_unless_tf32_is_asked_for(tf32, precision):
    torch.backends.cudnn.benchmark = True
    assert gpu(tf32=tf32) == torch.device("cuda")
    assert switches() == (":4096:8", True, False, precision, precision, precision)
    assert older_names() == (tf32, tf32)


def test_what_the_user_has_cublas_take_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    gpu(tf32=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_what_a_run_sets_is_set_back():
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    before, older = switches(), older_names()

    def run() -> None:
        gpu(tf32=False)
        assert switches() != before
        raise KeyError

    with pytest.raises(KeyError):
        gpu_as_it_was()(run)()
    assert (switches(), older_names()) == (before, older)


def test_what_a_run_finds_untouched_is_untouched_after_it():
    before, older = switches(), older_names()
    with gpu_as_it_was():
        gpu(tf32=False)
    assert (switches(), older_names()) == (before, older)


class Recurrent(nn.Module):
    """An LSTM over the rows of an image of one channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, 8, batch_first=True)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x.squeeze(1))[0][:, -1])


def tasks_of(name: str) -> list[LocalTask]:
    """Return three clients' tasks, on the CPU."""
    if name != "lstm":
        return three_clients(name, RULES["plain"], (3, 16, 16) if name == "cnn" else (1, 2, 3))
    tasks, model = three_clients("mlp", RULES["plain"]), Recurrent(3)
    start = {key: value.detach().clone() for key, value in model.named_parameters()}
    return [replace(task, model=model, start=start) for task in tasks]


def on_gpu(task: LocalTask, device: torch.device, model: nn.Module) -> LocalTask:
    def moved(named: Parameters | None) -> Parameters | None:
        return None if named is None else {name: value.to(device) for name, value in named.items()}

    start, fixed = moved(task.start) or {}, moved(dict(task.fixed)) or {}
    anchors = {name: moved(getattr(task, name)) for name in ("neighbours", "constant", "anchor")}
    return replace(
        task, model=model, start=start, x=task.x.to(device), y=task.y.to(device), fixed=fixed, **anchors
    )


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


@needs_gpu
@pytest.mark.parametrize("way", ["single", "vmapped", "stacked"])
@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "lstm"])
def test_a_gpu_repeats_itself_and_rounds_as_a_cpu(name, way):
    device, tasks = gpu(tf32=False), tasks_of(name)
    model = copy.deepcopy(tasks[0].model).to(device)
    moved = [on_gpu(task, device, model) for task in tasks]
    if not can(way, moved[0]):
        pytest.skip("isn't trained so")
    once, again = by_way(way, moved), by_way(way, moved)
    for task, (w, loss), (same, same_loss) in zip(tasks, once, again, strict=True):
        assert loss == same_loss
        assert all(torch.equal(value, same[key]) for key, value in w.items())
        assert_equals_reference(task, {key: value.cpu() for key, value in w.items()}, loss)
