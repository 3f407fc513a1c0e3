"""What server and clients each work out by themselves must agree; and the cache of prepared inputs."""

import os
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from fedapp import federation
from fedapp.data import Dataset, load_dataset
from fedapp.federation import TensorCache, dataset_of, division_of, model_of, partition_of, to_tensors

CPU = torch.device("cpu")


def forget() -> None:
    """Do as another process would: nothing is known yet."""
    federation.forget()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"dataset": "synthetic", "partitioner": "natural"},
        {"partitioner": "iid", "seed": 3},
        {"partitioner": "dirichlet", "dirichlet_alpha": 1.0},
        {"test_on": "unseen-clients"},
    ],
)
def test_two_processes_agree_on_data_division_and_model(values, configure):
    config = configure(**values)
    found = []
    for _ in range(2):
        forget()
        dataset, partition = dataset_of(config, 6), partition_of(config, 6)
        model = model_of(config, dataset.kind, dataset.input_shape, dataset.num_classes)
        found.append((np.array(dataset.x), np.array(dataset.y), partition, model.state_dict()))
    (x, y, partition, state), (other_x, other_y, other_partition, other_state) = found
    assert np.array_equal(x, other_x)
    assert np.array_equal(y, other_y)
    for part in ("client_indices", "client_offsets", "test_indices", "test_offsets"):
        assert np.array_equal(getattr(partition, part), getattr(other_partition, part))
    assert all(torch.equal(state[name], other_state[name]) for name in state)


def test_a_process_loads_and_divides_once(configure):
    config, same = configure(lr=0.1), configure(lr=0.2)  # lr doesn't touch the data
    assert dataset_of(config, 5) is dataset_of(same, 7)  # nor does the number of clients, but for synthetic
    assert partition_of(config, 5) is partition_of(same, 5)
    assert partition_of(config, 5) is not partition_of(same, 7)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partitioner", "iid"),
        ("class_imbalance", 0.5),
        ("data_imbalance", 0.0),
        ("min_samples", 100),
        ("test_on", "unseen-clients"),
        ("test_fraction", 0.3),
        ("seed", 1),
    ],
)
def test_every_key_of_the_division_counts(key, value, configure):
    base, other = configure(), configure(**{key: value})
    assert division_of(base) != division_of(other)
    one, two = (
        [part.tolist() for part in (found.client_indices, found.client_offsets, found.test_offsets)]
        for found in (partition_of(base, 10), partition_of(other, 10))
    )
    assert one != two


def test_dirichlet_alpha_counts(configure):
    one, two = (
        partition_of(configure(partitioner="dirichlet", dirichlet_alpha=alpha), 10) for alpha in (0.5, 50.0)
    )
    assert one.sizes.tolist() == two.sizes.tolist()
    assert one.client_indices.tolist() != two.client_indices.tolist()


def test_synthetic_has_the_clients_it_is_asked_for(configure):
    config = configure(dataset="synthetic", partitioner="natural")
    for clients in (3, 20):
        # 50 points of each of 2 classes
        assert partition_of(config, clients).sizes.tolist() == [100] * clients


def test_a_nodes_own_path_comes_before_the_configs(configure, save_npz):
    config = configure(dataset="npz", data_path=save_npz("server.npz"))
    own = save_npz("own.npz", shape=(4, 4))
    assert dataset_of(config, 2).input_shape == (1, 8, 8)
    assert dataset_of(config, 2, own).input_shape == (1, 4, 4)
    assert partition_of(config, 2, own).num_clients == 2


def test_paths_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert federation.absolute("x/y.npz") == str(tmp_path / "x" / "y.npz")
    assert federation.absolute(str(tmp_path)) == str(tmp_path)
    assert federation.absolute("~/x") == os.path.expanduser("~/x")
    assert federation.absolute("") == ""


# Tensors ---------------------------------------------------------------------------------------------------


def test_digits_are_scaled_by_a_sixteenth():
    digits = load_dataset("digits")
    x, y = to_tensors(digits, np.array([5, 0, 1796]), False, CPU)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert x.shape == (3, 1, 8, 8)
    assert torch.equal(x * 16, torch.tensor(np.array(digits.x[[5, 0, 1796]])).float())
    assert y.tolist() == digits.y[[5, 0, 1796]].tolist()


def test_images_are_scaled_and_normalised_by_the_published_values(save_npz):
    x_train = np.zeros((30, 28, 28), np.uint8)
    x_train[0, 0, :3] = (0, 51, 255)  # 51 / 255 = 0.2
    mnist = load_dataset("mnist", save_npz(x_train=x_train))
    plain, _ = to_tensors(mnist, np.array([0]), False, CPU)
    assert plain[0, 0, 0, :3].tolist() == pytest.approx([0.0, 0.2, 1.0])
    normal, _ = to_tensors(mnist, np.array([0]), True, CPU)
    # (v − 0.1307) / 0.3081
    assert normal[0, 0, 0, :3].tolist() == pytest.approx([-0.424213, 0.224927, 2.821487], rel=1e-5)


def test_tensors_are_a_copy(save_npz):
    dataset = load_dataset("npz", save_npz())
    x, y = to_tensors(dataset, np.arange(3), False, CPU)
    x += 1
    y += 1
    again, labels = to_tensors(dataset, np.arange(3), False, CPU)
    assert torch.equal(again + 1, x)
    assert torch.equal(labels + 1, y)


def test_many_rows_are_prepared_some_at_a_time(monkeypatch):
    digits, rows = load_dataset("digits"), np.array([9, 3, 1796, 0, 5, 3, 8])
    whole = to_tensors(digits, rows, False, CPU)
    asked = []
    inputs = Dataset.inputs
    monkeypatch.setattr(
        Dataset, "inputs", lambda self, own, *how: asked.append(len(own)) or inputs(self, own, *how)
    )
    monkeypatch.setattr("fedapp.federation.loaded.AT_ONCE", 3 * 64 * 4)  # three images
    parts = to_tensors(digits, rows, False, CPU)
    assert asked == [1, 3, 3, 1]  # first one, for its shape
    assert all(torch.equal(one, other) for one, other in zip(parts, whole, strict=True))


def row_bytes() -> int:
    return 64 * 4 + 8  # 64 float32 values and an int64 label


def test_the_cache_hits_by_key_normalisation_and_device(save_npz):
    mnist = load_dataset("mnist", save_npz(shape=(28, 28)))
    cache, rows = TensorCache(), np.arange(4)
    first = cache.get(("a",), mnist, rows, False, CPU)
    assert cache.get(("a",), mnist, rows, False, CPU) is first
    assert cache.get(("b",), mnist, rows, False, CPU) is not first
    normal = cache.get(("a",), mnist, rows, True, CPU)
    assert not torch.equal(normal[0], first[0])


def test_the_cache_lets_the_longest_unused_go_when_over_budget():
    digits = load_dataset("digits")
    cache = TensorCache(budget=2 * 10 * row_bytes())  # two clients of 10 rows

    def get(client: int) -> tuple[torch.Tensor, torch.Tensor]:
        return cache.get((client,), digits, np.arange(10 * client, 10 * client + 10), False, CPU)

    zero, one = get(0), get(1)
    assert get(0) is zero  # both fit; now 1 is the longest unused
    two = get(2)
    assert get(0) is zero
    assert get(2) is two
    again = get(1)  # was let go, and lets 0 go now
    assert again is not one
    assert torch.equal(again[0], one[0])
    assert get(2) is two
    assert get(0) is not zero


def test_the_cache_looks_at_what_it_drops_alone(monkeypatch):
    class Counted(OrderedDict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]]):
        def values(self) -> Any:
            pytest.fail("looks at all that it has")

    monkeypatch.setattr("fedapp.federation.loaded.OrderedDict", Counted)
    digits = load_dataset("digits")
    cache = TensorCache(budget=2 * 10 * row_bytes())

    def get(client: int) -> tuple[torch.Tensor, torch.Tensor]:
        return cache.get((client,), digits, np.arange(10), False, CPU)

    for _ in range(2):
        zero, one = get(0), get(1)
        assert get(0) is zero
        assert get(1) is one
        cache.clear()  # all of the budget is free again
    zero, _, _ = get(0), get(1), get(2)
    assert get(0) is not zero


def test_the_cache_serves_what_exceeds_its_budget():
    cache, digits = TensorCache(budget=1), load_dataset("digits")
    pair = cache.get((0,), digits, np.arange(10), False, CPU)
    assert len(pair[1]) == 10
    assert cache.get((0,), digits, np.arange(10), False, CPU) is pair  # the last one stays
    assert len(cache.get((1,), digits, np.arange(5), False, CPU)[1]) == 5
    assert cache.get((0,), digits, np.arange(10), False, CPU) is not pair


def test_the_tensors_of_all_clients_are_each_clients_one_after_the_other(configure):
    config = configure(data_imbalance=1.0)
    x, y = federation.training_tensors(config, 6, CPU)
    dataset, partition = dataset_of(config, 6), partition_of(config, 6)
    assert len(x) == len(y) == partition.client_offsets[-1]
    for client in range(6):
        own, labels = to_tensors(dataset, partition.client(client), False, CPU)
        rows = slice(*partition.client_offsets[client : client + 2].tolist())
        assert torch.equal(x[rows], own)
        assert torch.equal(y[rows], labels)


def test_the_tensors_of_all_clients_are_made_once_for_a_division(configure):
    x, _ = federation.training_tensors(configure(lr=0.1), 6, CPU)
    assert federation.training_tensors(configure(lr=0.2), 6, CPU)[0] is x
    for other, clients in ((configure(), 5), (configure(seed=1), 6), (configure(class_imbalance=0.5), 6)):
        partition = partition_of(other, clients)
        found, _ = federation.training_tensors(other, clients, CPU)
        assert torch.equal(
            found, to_tensors(dataset_of(other, clients), partition.client_indices, False, CPU)[0]
        )
        assert not torch.equal(found, x)


def test_a_model_is_made_once_for_a_device(configure):
    config = configure()
    on_cpu = model_of(config, "image", (1, 8, 8), 10)
    assert model_of(config, "image", (1, 8, 8), 10, CPU) is on_cpu
    shapes = model_of(config, "image", (1, 8, 8), 10, torch.device("meta"))  # stands for a GPU
    assert {value.device.type for value in shapes.parameters()} == {"meta"}
    assert {value.device.type for value in on_cpu.parameters()} == {"cpu"}
