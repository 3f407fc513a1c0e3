"""Every model by name: shapes, parameters counted by hand, seeds, and what it refuses."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedapp
from fedapp.models import PERCEPTRON_SLOPE, ModelError, build_model, check_model
from fedapp.names import INITS, MODELS


class Data(NamedTuple):
    kind: str
    shape: tuple[int, ...]
    classes: int


DATA = {
    "digits": Data("image", (1, 8, 8), 10),
    "synthetic": Data("vector", (2,), 2),
    "mnist": Data("image", (1, 28, 28), 10),
    "cifar10": Data("image", (3, 32, 32), 10),
    "cifar100": Data("image", (3, 32, 32), 100),
    "femnist": Data("image", (1, 28, 28), 62),
    "shakespeare": Data("text", (80,), 80),
    "npz-vector": Data("vector", (7,), 3),
    "npz-tiny": Data("image", (2, 5, 4), 3),
}
IMAGES = tuple(name for name, data in DATA.items() if data.kind == "image")
FITS = {
    "logistic": tuple(name for name in DATA if name != "shakespeare"),
    "perceptron": ("synthetic",),
    "mlp": tuple(name for name in DATA if name != "shakespeare"),
    "cnn": IMAGES,
    "lstm": ("shakespeare",),
    "resnet18": IMAGES,
}
PAIRS = [(model, name) for model, names in FITS.items() for name in names]
MISFITS = [(model, name) for model in MODELS for name in DATA if name not in FITS[model]]


def build(model: str, data: Data, init: str = "default", seed: int = 0) -> nn.Module:
    return build_model(
        model, kind=data.kind, input_shape=data.shape, num_classes=data.classes, init=init, seed=seed
    )


def inputs(data: Data, rows: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if data.kind == "text":
        return torch.randint(data.classes, (rows, *data.shape), generator=generator)
    return torch.rand(rows, *data.shape, generator=generator)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def equal(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_every_model_is_tested():
    assert tuple(FITS) == MODELS


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize(("model", "name"), PAIRS)
def test_logits_have_a_row_per_input_and_a_finite_loss(model, name, init):
    data = DATA[name]
    logits = build(model, data, init)(inputs(data)).detach()
    assert logits.shape == (3, data.classes)
    loss = F.cross_entropy(logits, torch.tensor([0, 1, data.classes - 1]))
    assert math.isfinite(loss)
    if init == "zeros" and model != "perceptron":  # all classes alike: loss ln K
        assert float(loss) == pytest.approx(math.log(data.classes), rel=1e-6)


@pytest.mark.parametrize(("model", "name"), MISFITS)
def test_a_model_that_does_not_fit_says_so_in_one_line(model, name):
    data = DATA[name]
    with pytest.raises(ModelError) as caught:
        build(model, data)
    text = str(caught.value)
    assert text.startswith(f"model = {model!r}: ")
    assert f"the data are {data.kind} {list(data.shape)} with {data.classes} classes" in text
    assert "\n" not in text


@pytest.mark.parametrize("model", ["cnn", "resnet18"])
@pytest.mark.parametrize("shape", [(1, 3, 8), (1, 8, 3), (3, 1, 1)])
def test_images_under_4x4_are_too_small_for_a_convolution(model, shape):
    with pytest.raises(ModelError, match="needs images of 4x4 or more"):
        check_model(model, kind="image", input_shape=shape, num_classes=10)
    check_model(model, kind="image", input_shape=(1, 4, 4), num_classes=10)
    assert build(model, Data("image", (1, 4, 4), 10))(torch.rand(2, 1, 4, 4)).shape == (2, 10)


def test_an_unknown_model_is_refused():
    with pytest.raises(ModelError, match=r"^model = 'mpl': allowed are logistic, perceptron, mlp"):
        build("mpl", DATA["digits"])


@pytest.mark.parametrize("data", [Data("vector", (3,), 2), Data("vector", (2,), 3)])
def test_the_perceptron_is_for_two_features_and_two_classes(data):
    with pytest.raises(ModelError, match="needs two features and two classes"):
        build("perceptron", data)


# Seeds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "name"), [(model, names[0]) for model, names in FITS.items()])
def test_the_seed_alone_decides_and_global_randomness_is_left_alone(model, name):
    torch.manual_seed(1)
    first = build(model, DATA[name], seed=5)
    torch.manual_seed(2)
    torch.rand(17)
    before = torch.get_rng_state()
    second = build(model, DATA[name], seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert equal(first, second)
    if model != "perceptron":  # starts at 0 whatever the seed
        assert not equal(first, build(model, DATA[name], seed=6))


def test_a_module_that_draws_when_it_is_imported_changes_no_parameters(tmp_path, monkeypatch):
    lines = [
        "import torch",
        "torch.rand(5)",
        "def net(num_classes):",
        "    return torch.nn.Linear(4, num_classes)",
    ]
    (tmp_path / "draws_on_import.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    made = [
        build_model("draws_on_import:net", kind="vector", input_shape=(4,), num_classes=2, seed=3)
        for _ in range(2)
    ]
    assert torch.equal(made[0].weight, made[1].weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "name"), [(model, names[0]) for model, names in FITS.items()])
def test_zeros_are_zeros(model, name):
    assert all(not parameter.any() for parameter in build(model, DATA[name], "zeros").parameters())


# Each model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "name", "parameters"),
    [
        ("logistic", "mnist", 784 * 10 + 10),
        ("logistic", "cifar10", 3 * 32 * 32 * 10 + 10),
        ("logistic", "synthetic", 2 * 2 + 2),
        ("mlp", "mnist", (784 * 128 + 128) + (128 * 10 + 10)),
        ("mlp", "digits", (64 * 128 + 128) + (128 * 10 + 10)),
        ("perceptron", "synthetic", 1),  # the slope is frozen
        # grey: two 5x5 convolutions, 28 → 14 → 7 after pooling, hidden 512
        (
            "cnn",
            "mnist",
            (25 * 32 + 32) + (25 * 32 * 64 + 64) + (64 * 7 * 7 * 512 + 512) + (512 * 10 + 10),
        ),
        # colour: 32 → 16 → 8, no hidden layer
        ("cnn", "cifar10", (25 * 3 * 32 + 32) + (25 * 32 * 64 + 64) + (64 * 8 * 8 * 10 + 10)),
        # embedding; four gates of 100 over input and hidden, each with two biases; output
        (
            "lstm",
            "shakespeare",
            80 * 8 + 400 * (8 + 100 + 2) + 400 * (100 + 100 + 2) + (100 * 80 + 80),
        ),
    ],
)
def test_number_of_parameters_by_hand(model, name, parameters):
    assert count(build(model, DATA[name])) == parameters


def test_numbers_without_an_axis_of_channels_are_grey_images_to_a_cnn():
    x = torch.rand(3, 8, 8)
    series = build_model("cnn", kind="series", input_shape=(8, 8), num_classes=10, seed=3)
    image = build_model("cnn", kind="image", input_shape=(1, 8, 8), num_classes=10, seed=3)
    assert torch.equal(series(x), image(x.unsqueeze(1)))
    with pytest.raises(ModelError, match="needs images of 4x4 or more"):
        build_model("cnn", kind="series", input_shape=(8, 3), num_classes=10)


def test_the_perceptron_trains_the_intercept_only():
    model = build("perceptron", DATA["synthetic"], seed=9)
    assert [name for name, _ in model.named_parameters()] == ["bias"]
    assert model.bias.tolist() == [0.0]
    assert PERCEPTRON_SLOPE == (2.700213, 0.7134238)  # Dhasade et al., section 3.1
    assert model.slope.tolist() == pytest.approx([2.700213, 0.7134238], rel=1e-6)
    assert not model.slope.requires_grad
    # zeros sets the parameters, not the frozen slope
    assert build("perceptron", DATA["synthetic"], "zeros").slope.tolist() == model.slope.tolist()


def test_the_perceptrons_loss_and_gradient_are_those_of_binary_cross_entropy():
    model = build("perceptron", DATA["synthetic"])
    x, y = torch.randn(50, 2, generator=torch.Generator().manual_seed(3)), torch.arange(50) % 2
    with torch.no_grad():
        model.bias.fill_(-0.7)
    loss = F.cross_entropy(model(x), y)
    logit = x.double() @ torch.tensor(PERCEPTRON_SLOPE, dtype=torch.float64) - 0.7
    expected = F.binary_cross_entropy_with_logits(logit, y.double())
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-6)
    # ∂/∂b = mean(σ(v·x + b) − y)
    (gradient,) = torch.autograd.grad(loss, [model.bias])
    assert float(gradient) == pytest.approx(float((torch.sigmoid(logit) - y).mean()), abs=1e-6)


def test_the_perceptron_by_hand():
    logits = build("perceptron", DATA["synthetic"])(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    # 2.700213 + 0.7134238 = 3.4136368
    assert logits.flatten().tolist() == pytest.approx([0, 0, 0, 3.4136368], rel=1e-6)


@pytest.mark.parametrize("position", [60, 78, 79])
def test_the_lstm_reads_up_to_the_last_character(position):
    model = build("lstm", DATA["shakespeare"])
    x = inputs(DATA["shakespeare"], 1)
    changed = x.clone()
    changed[0, position] = (x[0, position] + 1) % 80
    assert not torch.equal(model(x), model(changed))


@pytest.mark.parametrize("name", ["digits", "cifar10"])
def test_resnet18_has_no_batch_statistics(name):
    model = build("resnet18", DATA[name])
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    assert sum(isinstance(module, nn.GroupNorm) for module in model.modules()) == 20
    assert len(list(model.buffers())) == 0
    x = inputs(DATA[name], 4)
    # A row's logits don't depend on the other rows.
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-4, atol=1e-5)


class HalfLazy(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.used, self.unused = nn.LazyLinear(num_classes), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.used(x.flatten(1))
        return outputs


class Complex(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(64, num_classes, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1).to(torch.complex64) @ self.turn).abs()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            HalfLazy,
            "its parameter unused.weight is of a lazy layer that forward doesn't use, and so has no shape",
        ),
        (
            Complex,
            "its parameter turn is complex; real ones can be trained, as torch.view_as_real makes them",
        ),
    ],
)
def test_a_parameter_that_can_not_be_sent_is_named_before_a_run(model, said, tmp_path):
    with pytest.raises(ValueError, match=said) as error:
        fedapp.run(dataset="digits", model=model, num_server_rounds=1, num_clients=2, results_dir=tmp_path)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
