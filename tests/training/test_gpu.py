"""A GPU's results repeat, and are a CPU's up to rounding; its switches are set for a run alone."""

import copy
import os
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedapp.training import replay
from fedapp.training.augment import Augmentation
from fedapp.training.gpu import WORKSPACE, gpu, gpu_as_it_was
from fedapp.training.optimizer import LocalOptimizer
from fedapp.training.replay import has_replay
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


def normed() -> nn.Module:
    """A net with batch normalisation, whose buffers training changes."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def long_tasks(name: str, rule: str, *, device: torch.device, augment: bool = False) -> list[LocalTask]:
    """Return three clients' tasks on a GPU, with enough steps of each kind for replays."""
    amount = {"batch": 6, "epochs": 12}
    image = name in ("cnn", "normed")
    tasks = three_clients(
        "cnn" if image else name,
        RULES[rule],
        (3, 16, 16) if image else (1, 2, 3),
        constant=True,
        anchor=True,
        **amount,
    )
    if name == "normed":
        net = normed()
        start = {key: value.detach().clone() for key, value in net.named_parameters()}
        other = {key: 0.9 * value for key, value in start.items()}
        fixed = {key: value.clone() for key, value in net.named_buffers()}
        anchors = {
            part: None if getattr(tasks[0], part) is None else other
            for part in ("neighbours", "constant", "anchor")
        }
        tasks = [replace(task, model=net, start=start, fixed=fixed, **anchors) for task in tasks]
    if augment:
        tasks = [
            replace(task, augmentation=Augmentation.drawn("flip+crop", *task.batches.indices.shape, 0, k, 1))
            for k, task in enumerate(tasks)
        ]
    model = copy.deepcopy(tasks[0].model).to(device)
    return [on_gpu(task, device, model) for task in tasks]


@pytest.fixture
def recorded(monkeypatch):
    """What has been recorded: the kinds of steps, in their order."""
    kinds = []
    record = replay._Replayed._record

    def noted(self, inputs):
        kinds.append(inputs)
        return record(self, inputs)

    monkeypatch.setattr(replay._Replayed, "_record", noted)
    return kinds


@needs_gpu
@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", ["single", "vmapped", "stacked"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "normed"])
def test_replayed_steps_have_the_bits_of_steps_that_are_not(name, way, rule, augment, recorded, monkeypatch):
    if augment and name != "cnn":
        pytest.skip("no images")
    tasks = long_tasks(name, rule, device=gpu(tf32=False), augment=augment)
    if not can(way, tasks[0]):
        pytest.skip("isn't trained so")
    monkeypatch.setattr(replay, "BEFORE", 2)
    replayed = by_way(way, tasks)
    assert recorded
    monkeypatch.setattr(replay, "BEFORE", sys.maxsize)
    recorded.clear()
    plain = by_way(way, tasks)
    assert not recorded
    for (w, loss), (same, same_loss) in zip(replayed, plain, strict=True):
        assert loss == same_loss
        assert list(w) == list(same)
        assert all(torch.equal(value, same[key]) for key, value in w.items())


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :CLASSES]


@pytest.mark.parametrize(
    "module", [nn.Dropout(0.5), nn.RReLU(), nn.LSTM(3, 3), Own(), nn.BatchNorm2d(4, momentum=None)]
)
def test_what_may_differ_from_step_to_step_is_not_replayed(module):
    assert not replay._is_known(module)


def test_a_layer_with_a_hook_is_not_replayed():
    layer = nn.Linear(2, 2)
    assert replay._is_known(layer)
    layer.register_forward_hook(lambda *_: None)
    assert not replay._is_known(layer)


@needs_gpu
def test_which_tasks_are_replayed():
    (task, *_) = long_tasks("cnn", "plain", device=gpu(tf32=False))
    assert has_replay(task)
    assert not has_replay(replace(task, precision="bf16"))
    assert not has_replay(replace(task, optimizer=LocalOptimizer("adam")))
    assert not has_replay(replace(task, loss=replace(task.loss, name="custom.losses:focal")))
