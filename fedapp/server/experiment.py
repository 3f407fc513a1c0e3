"""From a config to everything that a run needs, checked before a client starts."""

import copy
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from glob import escape as glob_escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn

from fedapp import federation
from fedapp.config import (
    ConfigError,
    RunConfig,
    Setting,
    Value,
    as_config_error,
    read_run,
    strategy_class,
    unread_keys,
)
from fedapp.config.conflicts import check_conflicts
from fedapp.config.run_keys import ROUNDS
from fedapp.config.strategy_keys import is_of_the_library, other_defaults, strategy_config
from fedapp.data import Dataset, Partition
from fedapp.data.extremes import extreme_rows
from fedapp.data.partition import BY_CLASS, OWN, names_of_clients, names_of_unseen_clients
from fedapp.data.remarks import remarks, tested_on
from fedapp.data.tables import tables_in
from fedapp.data.targets import check_counted
from fedapp.federation.records import OWN_ARRAYS
from fedapp.logs import kept_lines
from fedapp.models import ModelError
from fedapp.names import MODELS
from fedapp.own import OwnPartError, is_own
from fedapp.own.metrics import with_directions
from fedapp.server import fleet, tiers
from fedapp.server.best import check_metrics, directed_best_of, directions_of, say_unknown_directions
from fedapp.server.exporter import check_exporter
from fedapp.server.length import with_length
from fedapp.server.personal import check_layers, say_pooled
from fedapp.server.privacy import (
    check_account,
    say_standardized,
    say_what_stays,
    with_local_norm,
    with_noise,
    with_noise_source,
)
from fedapp.server.trackers import check_tracker
from fedapp.training import work as local_work
from fedapp.training.check import ROWS, check_extremes, check_parts
from fedapp.training.evaluation import AUTO, NONE, chosen_metrics
from fedapp.training.gpu import gpu
from fedapp.training.losses import LOSSES, loss_of
from fedapp.training.optimizer import optimizer_of
from fedapp.training.personal import apart
from fedapp.training.precision import say_slow
from fedapp.training.state import is_in_numpy, names_of
from fedapp.training.travelling import digest_of, frozen_bytes, travelling
from strategies import AsynchronousStrategy, FederatedStrategy
from strategies.clock import VirtualClock, WallClock
from strategies.core.best_model import BestModel
from strategies.core.config import PrivateConfig
from strategies.flower import messages
from strategies.flower.arrays import pack
from strategies.flower.frozen import FrozenParametersOfConfig
from strategies.timing.availability import ALWAYS
from strategies.timing.time_scenario import is_profile

log = logging.getLogger("flwr.fedapp")


@dataclass(frozen=True)
class Experiment:
    """Everything of a run that is known before a client starts.

    Attributes
    ----------
    strategy : FederatedStrategy
        Built from the config, once; a run starts it.
    unread : mapping of str to value
        Keys that are given and that nothing in the run reads: see ``fedapp.config.run_config``.
    travelling : tuple of str
        Names of the model's arrays that are sent to clients and back; the others are each side's.
    own : tuple of str
        Of the others, those that training changes: each client keeps its own.
    said : tuple of LogRecord
        The lines that were logged while it was prepared: the run's log begins with them.
    """

    config: RunConfig
    num_clients: int
    dataset: Dataset
    partition: Partition
    model: nn.Module
    device: torch.device
    strategy: FederatedStrategy = field(repr=False, compare=False)
    unread: Mapping[str, Value] = field(default_factory=dict)
    travelling: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    said: tuple[logging.LogRecord, ...] = field(default=(), repr=False, compare=False)

    def initial_arrays(self) -> ArrayRecord:
        """Return the arrays of the initial model that travel."""
        return federation.initial_arrays(self.model, self.travelling)

    @cached_property
    def client_names(self) -> tuple[str, ...]:
        """The natural ids of a simulation's clients, or what its regions are, by index; () where there are none."""
        if regions := tiers.regions_of(self.config, self.num_clients):
            return tiers.names_of(regions)
        return names_of_clients(self.dataset, self.partition, self.config.partitioner)

    @cached_property
    def unseen_names(self) -> tuple[str, ...]:
        """The natural ids of the clients that are only tested on, in their order; () without any."""
        config = self.config
        return names_of_unseen_clients(self.dataset, self.partition, config.partitioner, config.test_on)

    @cached_property
    def scored_model(self) -> nn.Module:
        """The model where the server evaluates it."""
        return self.model if self.device == federation.CPU else copy.deepcopy(self.model).to(self.device)


def prepare(config: RunConfig, num_clients: int, *, on_devices: bool = False) -> Experiment:
    """Check the config against the data, the model and the number of clients, and load what the server needs.

    ``clock = "auto"`` becomes real time on devices, and virtual time in a simulation.

    Raises
    ------
    ConfigError, DataError, ModelError
        With one clear message, before any client is started.
    """
    with kept_lines() as lines:
        experiment = _prepared(config, num_clients, on_devices=on_devices)
    return replace(experiment, said=tuple(lines))


def _prepared(config: RunConfig, num_clients: int, *, on_devices: bool) -> Experiment:
    config = _with_clock(config, on_devices=on_devices)
    tiers.check_place(config, on_devices=on_devices)
    regions = tiers.regions_of(config, num_clients)
    if on_devices or config.dp != "none" or config.message_epsilon:
        config = with_noise_source(config, on_devices=on_devices)
    given = config.model_copy(update={"metrics": with_directions(config.metrics)})
    try:
        config, strategy = _with_strategy(given, num_clients)
    except ValueError as error:
        raise as_config_error(error, type(given)) from None
    _check_surroundings(config, num_clients, on_devices=on_devices)
    device = _server_device(config)
    config = config.model_copy(update=federation.local_folders(config))
    dataset, partition = _data(config, num_clients, on_devices=on_devices)
    model = federation.model_of(config, dataset.kind, dataset.form, dataset.num_outputs)
    if config.personal:
        check_layers(config, model)
    config = _check_parts(config, dataset, partition, model, strategy.session.run.best)
    _check_extremes(config, dataset, partition, model)
    own: tuple[str, ...] = ()
    travel = _travelling(config, dataset, partition, model)
    if config.personal:
        travel, own = apart(model, config.personal, travel)
    _say_of_training(config, model, travel, on_devices=on_devices)
    _say_of_data(config, dataset, partition)
    gpus = on_devices or torch.cuda.is_available()
    unread = unread_keys(Setting(given, strategy, dataset, gpus=gpus, on_devices=on_devices))
    partition = tiers.by_region(partition, regions) if regions else partition
    return _with_lengths(
        Experiment(config, num_clients, dataset, partition, model, device, strategy, unread, travel, own)
    )


def _with_strategy(config: RunConfig, num_clients: int) -> tuple[RunConfig, FederatedStrategy]:
    """Build and check the strategy; return it and the config with what the strategy demands and the run's length."""
    if config.step_heterogeneity != "none":
        fleet.work_of_clients(config, num_clients)
    if config.availability != ALWAYS or ":" in config.time_scenario:
        fleet.check_fleet(config, num_clients)
    strategy = build_strategy(config)
    check_conflicts(config, strategy)
    if not is_of_the_library(type(strategy).Config):
        _say_other_defaults(config, strategy)
    regions = tiers.regions_of(config, num_clients)
    strategy.check(len(regions) or num_clients)
    # What the strategy demands, such as the spectral method's weights, is what the run's record says.
    resolved = {field.name: getattr(strategy.config, field.name) for field in fields(strategy.config)}
    # The strategy's best-of states the direction, which the record's metrics do.
    kept = ("best_of", *tiers.keys_of_clients(config))
    config = config.model_copy(update=resolved | {name: getattr(config, name) for name in kept})
    if not config.num_server_rounds and isinstance(strategy, AsynchronousStrategy):
        times = tiers.task_times(config, regions).means if regions else None
        config = with_length(config, strategy, num_clients, times)
    elif not config.num_server_rounds:
        config = config.model_copy(update={"num_server_rounds": ROUNDS})
    if config.dp != "none":
        config = _with_account(config, strategy, num_clients)
    return config, strategy


def _check_surroundings(config: RunConfig, num_clients: int, *, on_devices: bool) -> None:
    """Check the number of clients, the tracker and the exporter."""
    if config.resume and (before := read_run(config.resume)[1]) != num_clients:
        raise ConfigError(f"num-supernodes = {num_clients}: the run to resume has {before} clients")
    # A run that goes on on devices has those that it had, however many are waited for.
    if config.min_clients > num_clients and not (config.resume and on_devices):
        raise ConfigError(f"min-clients = {config.min_clients}: there are {num_clients} clients")
    if config.tracker != "none":
        check_tracker(config)
    if config.metrics_port:
        check_exporter(config)


def _data(config: RunConfig, num_clients: int, *, on_devices: bool) -> tuple[Dataset, Partition]:
    """Return the dataset, with its moments if a simulation standardizes it, and its division among the clients."""
    dataset = federation.dataset_of(config, num_clients)
    partition = federation.partition_of(config, num_clients)
    if dataset.targets == "classes" and dataset.y.ndim > 1:  # a label for each position
        check_counted(dataset, partition)
    if config.augment != "none" and dataset.kind != "image":
        raise ConfigError(
            f"augment = {config.augment!r}: the inputs of '{config.dataset}' are {dataset.kind}; only images can be "
            "mirrored or moved, (N, H, W) of uint8 or (N, C, H, W); allowed is none"
        )
    if config.normalize == "standardize":
        dataset.require_values()
        say_standardized(config)
        if not on_devices:
            dataset = federation.with_moments(config, dataset, partition)
    return dataset, partition


def _with_account(config: RunConfig, strategy: FederatedStrategy, num_clients: int) -> RunConfig:
    """Check that the run's privacy can be accounted for; return the config with the noise that its target ε needs."""
    config = with_local_norm(config)
    check_account(config, strategy, num_clients)
    if config.dp_target_epsilon:
        config = with_noise(config, strategy, num_clients)
        assert isinstance(strategy.config, PrivateConfig)
        strategy.config = replace(strategy.config, dp_noise_multiplier=config.dp_noise_multiplier)
    return config


def _with_clock(config: RunConfig, *, on_devices: bool) -> RunConfig:
    """Return a config that says which clock the run has; a virtual one on devices is said, too."""
    if config.clock == "auto":
        if on_devices:
            log.info("clock = auto: real time, on devices")
        return config.model_copy(update={"clock": "wall" if on_devices else "virtual"})
    if config.clock == "virtual" and on_devices:
        log.warning(
            "clock = virtual: times of this run on devices are made up, and safeguards = auto bounds nothing that a "
            "device does; clock = auto is real time here"
        )
    return config


def _with_lengths(experiment: Experiment) -> Experiment:
    """Return the experiment with what the data and the model tell the strategy.

    The strategy is given the names of the arrays that aren't trained, the duration of a task, and how often the model
    is evaluated. Where a task's duration follows from its work and bytes, so does the run's length.
    """
    config, strategy = experiment.config, experiment.strategy
    fixed = (name for name in names_of(experiment.model).fixed if name in experiment.travelling)
    strategy.flower_options = replace(strategy.flower_options, untrained=tuple(map(glob_escape, fixed)))
    if config.clock != "wall" and is_profile(config.time_scenario):  # task times follow from what tasks weigh
        sizes, work = np.diff(experiment.partition.client_offsets), task_work(experiment)
        strategy.session.run.scheduler.task_costs.work_of = fleet.by_client(work, sizes)
        times = fleet.task_times(config, work, sizes, experiment.initial_arrays())
        if not config.num_server_rounds and isinstance(strategy, AsynchronousStrategy):
            config = with_length(config, strategy, experiment.num_clients, times)
    strategy.config = replace(strategy.config, eval_every=config.eval_every)
    return replace(experiment, config=config)


def task_work(experiment: Experiment) -> Callable[[int, float], float]:
    """Return the function that gives the work of a client's task from the client's index and number of examples."""
    config, dataset, partition = experiment.config, experiment.dataset, experiment.partition

    def rows() -> torch.Tensor:
        return _some_rows(config, dataset, partition)[0]

    strategy = experiment.strategy
    reference_steps = strategy.reference_steps if isinstance(strategy, AsynchronousStrategy) else 0
    return fleet.work_of(config, experiment.num_clients, experiment.model, rows, reference_steps)


def _some_rows(
    config: RunConfig, dataset: Dataset, partition: Partition
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels that parts of the run can be tried on."""
    return federation.tried_tensors(config, dataset, partition.client_indices[:ROWS])


def _say_of_training(
    config: RunConfig, model: nn.Module, travelling: Collection[str], *, on_devices: bool
) -> None:
    """Log what a user may not expect of the run's privacy and precision."""
    if config.dp != "none":
        say_what_stays(config, [name for name in names_of(model).fixed if name in travelling])
    if config.precision == "fp32":
        return
    log.info(
        "precision = %r: clients train by automatic differentiation, one at a time in a process, with products "
        "in bfloat16 (8 bits of significand); the model is float32 when it travels and is evaluated",
        config.precision,
    )
    if not on_devices:
        on_gpu = config.client_device != "cpu" and torch.cuda.is_available()
        say_slow(config.precision, torch.device("cuda" if on_gpu else "cpu"))


def _say_of_data(config: RunConfig, dataset: Dataset, partition: Partition) -> None:
    """Log what a user may not expect of the data and of the metrics that are taken on it."""
    if config.test_on == OWN:
        say_pooled(config, dataset)
    if not dataset.has_classes and config.partitioner in BY_CLASS:
        how = "at random" if dataset.groups is None else "by natural client"
        log.info(
            "data: a row of '%s' has no class: %s divides rows %s", dataset.name, config.partitioner, how
        )
    if config.dataset == "files" and config.partitioner != "natural" and config.group_column == "":
        tables = tables_in(path) if (path := Path(config.data_path)).is_dir() else []
        if tables:
            log.warning(
                "data: the %d tables of data-path are divided anew; partitioner = natural makes each a client",
                len(tables),
            )
    say_unknown_directions(config)
    for remark in remarks(dataset, partition, config.normalize):
        log.warning("data: %s", remark)
    if named := tested_on(dataset, partition, config.partitioner, config.test_on):
        log.info(named)


def _check_parts(
    config: RunConfig, dataset: Dataset, partition: Partition, model: nn.Module, best: BestModel | None
) -> RunConfig:
    """Try model, loss, metrics and optimizer on some of the data.

    Returns the config; without metrics where they are ``auto``, the loss is the user's own, and no usual metric can
    take the outputs: what such a loss makes of them is its own affair, as in a variational autoencoder.
    """
    optimizer_of(config.optimizer, config.optimizer_options)
    x, y = _some_rows(config, dataset, partition)
    loss, metrics = loss_of(config.loss), chosen_metrics(config.metrics, config.loss, y)
    if best is not None:
        check_metrics(config, best, [metric.name for metric in metrics])
    known: dict[str, Any] = {"num_classes": dataset.num_classes, "targets": dataset.y}
    known["precision"] = config.precision
    try:
        check_parts(config.model, model, loss, metrics, x, y, **known)
    except OwnPartError as error:
        unfit = str(error).startswith("metrics = ")
        if not (unfit and config.metrics == AUTO and is_own(config.loss)):
            raise
        check_parts(config.model, model, loss, (), x, y, **known)
        if best is not None:
            check_metrics(config, best, [])
        log.info("metrics = auto: none beside the loss, as %s", str(error).removeprefix("metrics = "))
        return config.model_copy(update={"metrics": NONE})
    return config


def _check_extremes(config: RunConfig, dataset: Dataset, partition: Partition, model: nn.Module) -> None:
    """Try parts of the user's own on the rows of all clients with the largest tokens and labels."""
    if config.model not in MODELS or config.loss not in LOSSES:
        rows = extreme_rows(dataset, np.concatenate([partition.client_indices, partition.test_indices]))
        tried = federation.tried_tensors(config, dataset, rows)
        check_extremes(config.model, model, loss_of(config.loss), *tried)


def _travelling(
    config: RunConfig, dataset: Dataset, partition: Partition, model: nn.Module
) -> tuple[str, ...]:
    """Return the names of the model's arrays that travel, which must be finite, and of a type that NumPy has."""
    names, state = names_of(model), model.state_dict()
    travel = tuple(names.own(state))
    if names.fixed:
        travel = travelling(model, loss_of(config.loss), *_some_rows(config, dataset, partition))
    for name in travel:
        if not is_in_numpy(state[name].dtype):
            raise ModelError(
                f"model = {config.model!r}: its buffer {name} is {state[name].dtype}, in which nothing can be sent; "
                "running statistics, and buffers that training changes, must be float32"
            )
        if not bool(torch.isfinite(state[name]).all()):
            raise ModelError(
                f"model = {config.model!r}: its array {name} isn't finite at the start; parameters that are trained, "
                "and buffers that training changes, must be"
            )
    return travel


def build_strategy(config: RunConfig) -> FederatedStrategy:
    """Make the configured strategy: its config's fields are run-config keys."""
    strategy = strategy_class(config.strategy)
    clock = WallClock() if config.clock == "wall" else VirtualClock()
    own = {"best_of": directed_best_of(config), **tiers.keys_of_clients(config)}
    config = config.model_copy(update=own)
    made = strategy(
        strategy_config(strategy, partial(getattr, config)),
        clock=clock,
        fraction_evaluate=float(config.client_evaluation),
        describe=True,
    )
    made.run_options.higher_is_better = directions_of(config)
    usual: dict[str, Any] = type(config).defaults()
    made.run_options.default_config = strategy_config(strategy, lambda name: usual[name.replace("_", "-")])
    return made


def _say_other_defaults(config: RunConfig, strategy: FederatedStrategy) -> None:
    """Say which defaults of the strategy's own don't stand, since the run's config has a value for the key."""
    usual = type(config).defaults()
    for name, default in other_defaults(type(strategy)).items():
        key, value = name.replace("_", "-"), getattr(strategy.config, name)
        if value != default and value == usual[key]:
            log.warning(
                "%s = %r: stands, as the run config always has a value; the default of %s, %r, counts only if given",
                key,
                value,
                config.strategy,
                default,
            )


NOT_FOR_CLIENTS = (
    messages.ALPHA,
    "tiers",
    "edge-rounds",
    "registered-nodes",
    "keep",
    "best-of",
    "stop-at",
    "patience",
)


def task_config(experiment: Experiment) -> ConfigRecord:
    """Return what every message to a client carries: the run config and the shape of the data.

    Its ``step-heterogeneity`` is the list of all clients' work, so that a client needs nothing else to know its own.
    What only the strategy reads, which tells clients by the same name, or what is about other devices, isn't in it.
    """
    config = experiment.config
    work = "none"
    if config.step_heterogeneity != "none":
        work = local_work.to_text(fleet.work_of_clients(config, experiment.num_clients))
    return ConfigRecord(
        {
            **{key: value for key, value in config.flat().items() if key not in NOT_FOR_CLIENTS},
            "step-heterogeneity": work,
            **tiers.fields_for_relays(config),
            **federation.schema_fields(experiment.dataset),
            **({OWN_ARRAYS: list(experiment.own)} if experiment.own else {}),
            **({messages.FROZEN: frozen.digest} if (frozen := frozen_arrays(experiment)) is not None else {}),
        }
    )


def frozen_arrays(experiment: Experiment) -> FrozenParametersOfConfig | None:
    """Return the arrays of a run's model that aren't sent with each message; None if all are."""
    model, sent = experiment.model, experiment.travelling
    if not set(names_of(model).fixed).difference(sent):
        return None

    def record() -> ArrayRecord:
        return ArrayRecord({messages.FROZEN: pack(np.frombuffer(frozen_bytes(model, sent), np.uint8))})

    return FrozenParametersOfConfig(digest_of(model, sent), record)


def _server_device(config: RunConfig) -> torch.device:
    if config.server_device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("server-device = 'cuda': this machine has no GPU; allowed are auto, cpu")
    use_gpu = config.server_device != "cpu" and torch.cuda.is_available()
    return gpu(tf32=config.tf32) if use_gpu else torch.device("cpu")
