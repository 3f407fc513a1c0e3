"""Label and quantity skew as a partitioner for `flwr_datasets.FederatedDataset`."""

from datasets import Dataset as HFDataset
from flwr_datasets.partitioner import Partitioner

from fedapp.data.dataset import IntArray
from fedapp.data.skew import label_quantity_skew


class LabelQuantitySkewPartitioner(Partitioner):  # type: ignore[misc]  # untyped library
    """Divide a dataset with label skew and quantity skew (Buttaci 2024, §3.4.1; see `fedapp.data.skew`).

    Parameters
    ----------
    num_partitions : int
        C, the number of clients.
    partition_by : str
        Name of the label column.
    class_imbalance : float
        κ⁻¹ >= 0; 0 splits each class evenly, a large value concentrates it on one or two clients.
    data_imbalance : float
        φ² >= 0, the log-variance of the client sizes; 0 makes them equal.
    min_partition_size : int
        Least number of samples of a client.
    seed : int

    Raises
    ------
    ValueError
        On the first use, if there are too few samples or a parameter is out of range.

    Examples
    --------
    >>> from flwr_datasets import FederatedDataset
    >>> partitioner = LabelQuantitySkewPartitioner(100, "label", class_imbalance=2.0, data_imbalance=0.5)
    >>> federated = FederatedDataset(dataset="ylecun/mnist", partitioners={"train": partitioner})
    """

    def __init__(
        self,
        num_partitions: int,
        partition_by: str,
        class_imbalance: float = 0.0,
        data_imbalance: float = 0.0,
        min_partition_size: int = 2,
        seed: int = 42,
    ) -> None:
        super().__init__()
        if num_partitions < 1:
            raise ValueError(f"num_partitions = {num_partitions}: must be at least 1")
        self._num_partitions = num_partitions
        self._partition_by = partition_by
        self._class_imbalance = class_imbalance
        self._data_imbalance = data_imbalance
        self._min_partition_size = min_partition_size
        self._seed = seed
        self._division: tuple[IntArray, IntArray] | None = None

    @property
    def num_partitions(self) -> int:
        """Total number of partitions."""
        return self._num_partitions

    def load_partition(self, partition_id: int) -> HFDataset:
        """Return the samples of client `partition_id`, 0 … num_partitions - 1."""
        if self._division is None:
            self._division = label_quantity_skew(
                self.dataset.with_format("numpy")[:][self._partition_by],
                self._num_partitions,
                self._class_imbalance,
                self._data_imbalance,
                self._min_partition_size,
                self._seed,
            )
        indices, offsets = self._division
        if not 0 <= partition_id < self._num_partitions:
            raise ValueError(f"partition_id = {partition_id}: must be 0 to {self._num_partitions - 1}")
        return self.dataset.select(indices[offsets[partition_id] : offsets[partition_id + 1]])
