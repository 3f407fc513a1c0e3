"""A run: the strategy on a grid, and all that watches it."""

import errno
import logging
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from flwr.serverapp import Grid

from fedapp import federation
from fedapp.config import ConfigError, RunConfig, in_keys
from fedapp.data.facts.preparation import Preparation
from fedapp.data.given.function import load_function
from fedapp.data.loading import is_function
from fedapp.logs import copied_to, logging_as, plain_where_piped
from fedapp.own import OwnPartError, raised_by
from fedapp.report import read_metrics
from fedapp.report.files import FAILED, without_digest
from fedapp.server.divergence import Divergence
from fedapp.server.ending import USER_ERRORS, ToldToStop
from fedapp.server.evaluation import Evaluation, when_by_client
from fedapp.server.experiment import Experiment, frozen_arrays, task_config
from fedapp.server.exporter import Exporter
from fedapp.server.failure import RoundsWithoutReply, judge
from fedapp.server.journal import Journal, KeptModel, Summary, Totals
from fedapp.server.own_layers import OwnLayers
from fedapp.server.personal import check_engine, evaluates_on_clients
from fedapp.server.privacy import SYSTEM, PrivacyAccount
from fedapp.server.progress import Display, Heartbeat, HowFar, Sparingly
from fedapp.server.record import Observer, Record, Saving
from fedapp.server.releases import Releases
from fedapp.server.run_directory import RunDirectory
from fedapp.server.run_folder import goes_on_from
from fedapp.server.standardize import standardized
from fedapp.server.tiers import NONE, RELAYS, tiered
from fedapp.server.trackers import make_tracker
from fedapp.training.losses import loss_of
from fedapp.training.travelling import frozen_bytes
from strategies import DivergedError, FederatedStrategy, RunError
from strategies.clock import WallClock
from strategies.flower import messages
from strategies.flower.arrays import Layout
from strategies.flower.exchange import never
from strategies.flower.grids import DEPLOYMENT, engine_of
from strategies.secure.openings import Openings

log = logging.getLogger("flwr.fedapp")

# Engines that have all clients in this process, and the seconds that they are waited for.
IN_PROCESS, FOREVER = ("sequential", "vectorized"), 1e9

# The file of a run's folder with the secure sums that were opened.
OPENINGS = "openings.jsonl"

# What writing to a disk that is full, broken or read-only raises.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def run(
    grid: Grid,
    experiment: Experiment,
    should_stop: Callable[[], bool] = never,
    directory: RunDirectory | None = None,
    observers: Sequence[Observer] = (),
) -> RunDirectory:
    """Run the federation and record it.

    Parameters
    ----------
    stopped : callable
        Asked at every poll; True ends the run after the last complete round, with a complete run directory.
    directory : RunDirectory, optional
        Where to; by default one is made as the config says.
    observers : sequence of Observer
        Who else is told, after the run's own.

    Raises
    ------
    ConfigError
        If the config can't be on this engine, the checkpoint is another strategy's, or the disk is full.
    """
    config, engine = experiment.config, engine_of(grid)
    if config.record_divergence and engine == DEPLOYMENT:
        raise ConfigError(
            "record-divergence = true: only a simulation has all clients' data; allowed is false"
        )
    if config.record_divergence and loss_of(config.loss).of_batch:
        raise ConfigError(
            f"record-divergence = true: loss = {config.loss!r}: a loss of the whole batch isn't a sum over rows, "
            "whose gradients it needs; allowed is false"
        )
    if config.personal:
        check_engine(experiment.strategy, config.personal, engine)
    directory = directory or RunDirectory(config)
    plain_where_piped()
    with logging_as(config.log_format) as lines:
        strategy = experiment.strategy
        strategy.run_options.should_stop = should_stop
        if lines is not None:
            lines.run, lines.aggregation = directory.path.name, lambda: strategy.session.aggregations
        try:
            with copied_to(directory.path, USER_ERRORS, before=experiment.said):
                _run(grid, experiment, strategy, directory, observers)
        finally:
            directory.close()
    return directory


def _run(
    grid: Grid,
    experiment: Experiment,
    strategy: FederatedStrategy,
    directory: RunDirectory,
    observers: Sequence[Observer],
) -> None:
    """Let the strategy go, recorded."""
    config, engine, should_stop = experiment.config, engine_of(grid), strategy.run_options.should_stop
    experiment = _with_unread(experiment, engine)
    _set_options(strategy, experiment, engine)
    layers = OwnLayers(experiment, strategy) if config.personal else None
    if layers is not None:
        observers = [layers, *observers]
    record = _record(experiment, engine, strategy, directory, observers)
    strategy.run_options.observer = record
    _warn_of_unread(experiment)
    for remark in experiment.dataset.remarks:
        log.warning("data: %s", remark)
    arrays = experiment.initial_arrays()
    _offer_frozen(strategy, experiment, engine)
    if config.secure_sums and engine == DEPLOYMENT:
        strategy.run_options.openings = Openings(directory.path / OPENINGS)
    best = strategy.session.run.best
    by_client = when_by_client(
        experiment,
        has_rounds=strategy.has_rounds,
        on_devices=engine == DEPLOYMENT,
        watched=() if best is None else best.watched,
    )
    if directory.checkpoint is not None:
        with _in_words(config, directory, record):
            strategy.restore(directory.checkpoint.strategy)
            log.info("resumed from aggregation %s", directory.checkpoint.strategy["aggregations"])
            record.restore(directory.checkpoint, Layout.of(arrays))
    with _recorded_end(strategy, config, directory, record) as end:
        with _in_words(config, directory, record):
            record.begin()
        if config.normalize == "standardize":
            experiment = standardized(grid, experiment, directory, should_stop)
        with _in_words(config, directory, record):
            _write_preparation(experiment, directory)
        sent = task_config(experiment)
        if layers is not None:
            sent.update(layers.fields)
        evaluation = Evaluation(experiment, by_client=by_client, objective=not strategy.has_rounds)
        with _in_words(config, directory, record):
            # Clients in this process always answer, however long that takes.
            timeout = FOREVER if engine in IN_PROCESS else config.round_timeout
            strategy.start(
                tiered(grid, config, strategy, timeout),
                arrays,
                num_rounds=config.num_server_rounds,
                timeout=timeout if config.tiers in (NONE, RELAYS) else FOREVER,
                train_config=sent,
                evaluate_fn=evaluation,
            )
            if should_stop():
                end.status = "interrupted"
                return
            record.judge()
            end.complete = True
            judge(read_metrics(directory.path), experiment.dataset.num_classes, config)
            end.reason = record.ended()
            record.save_end()
        end.status = "finished"
        if best is not None:
            end.reason = best.over or end.reason


def _set_options(strategy: FederatedStrategy, experiment: Experiment, engine: str) -> None:
    """Tell the strategy what follows from the engine: clients' names, and whether clients evaluate."""
    config = experiment.config
    strategy.run_options.deterministic_noise = engine != DEPLOYMENT and config.dp_noise != SYSTEM
    if engine != DEPLOYMENT:
        strategy.run_options.client_names = dict(enumerate(experiment.client_names))
    asks_clients = config.client_evaluation
    if strategy.capabilities.personal or config.fine_tune_epochs or config.personal:
        asks_clients = evaluates_on_clients(config, strategy, engine)
    strategy.flower_options = replace(strategy.flower_options, fraction_evaluate=float(asks_clients))


def _offer_frozen(strategy: FederatedStrategy, experiment: Experiment, engine: str) -> None:
    """Offer the arrays that aren't sent with each message: in this process, else by the strategy."""
    frozen = frozen_arrays(experiment)
    if frozen is not None:
        federation.offer(frozen.digest, partial(frozen_bytes, experiment.model, experiment.travelling))
        strategy.run_options.frozen = None if engine in IN_PROCESS else frozen


@dataclass
class _End:
    """How a run ended: its status and the reason for it, and whether all its rounds were played."""

    status: str = FAILED
    reason: str = ""
    complete: bool = False


@contextmanager
def _recorded_end(
    strategy: FederatedStrategy, config: RunConfig, directory: RunDirectory, record: Record
) -> Iterator[_End]:
    """Write how the run in this block ended to its record; the block sets the status of a run that raises nothing."""
    end = _End()
    try:
        yield end
    except ToldToStop as ending:
        end.status = ending.status
        raise
    except KeyboardInterrupt:
        end.status = "interrupted"
        raise
    except Exception as error:
        end.status = "diverged" if isinstance(error, DivergedError) else FAILED
        end.reason = _line(error, config)
        raise
    finally:
        # A full disk, which may be what ended the run, must not hide why.
        with suppress(*((OSError,) if end.status in (FAILED, "diverged") else ())):
            record.end(end.status, end.reason, complete=end.complete)
        if end.status in ("interrupted", "stopped") and (how := goes_on_from(directory.path)):
            log.info("%s after aggregation %d: %s", end.status, strategy.session.aggregations, how)


@contextmanager
def own_parts_named(config: RunConfig) -> Iterator[None]:
    """Turn an exception of a user-defined part into an ``OwnPartError`` of one line that says where it was raised."""
    try:
        yield
    except USER_ERRORS:
        raise
    except Exception as error:
        if not (line := raised_by(error, config.flat())):
            raise
        raise OwnPartError(f"{line}; the run's log.txt has the traceback") from error


def _line(error: Exception, config: RunConfig) -> str:
    """Return the text of an error for summary.json: one line without unprintable characters."""
    raised = "" if isinstance(error, USER_ERRORS) else raised_by(error, config.flat())
    return messages.clean(raised or in_keys(error) or type(error).__name__)


def _write_preparation(experiment: Experiment, directory: RunDirectory) -> None:
    """Write preparation.json, and say where a part of the preparation isn't known."""
    config, dataset = experiment.config, experiment.dataset
    # Moments are missing if the run was stopped before they were known.
    if config.normalize == "standardize" and dataset.moments is None:
        return
    function = without_digest(config.dataset) if is_function(config.dataset) else ""
    if function and getattr(load_function(config.dataset), "returns_given", False):
        function = ""  # the inputs are columns of what was given
    made_by = ", ".join(filter(None, [function, dataset.made_by]))
    columns = federation.columns_of(config)
    directory.write_preparation(Preparation.of(dataset, config.normalize, columns, made_by))
    if made_by:
        log.info(
            "data: how %s makes the model's inputs isn't known here: preparation.json names it, and fedapp predict "
            "takes inputs as it returns them",
            made_by,
        )


def _with_unread(experiment: Experiment, engine: str) -> Experiment:
    """Add ``round-timeout`` to the keys that aren't read, if it is given and the engine doesn't read it."""
    usual = type(experiment.config).defaults()["round-timeout"]
    if engine not in IN_PROCESS or experiment.config.round_timeout == usual:
        return experiment
    unread = {**experiment.unread, "round-timeout": experiment.config.round_timeout}
    return replace(experiment, unread=unread)


def _warn_of_unread(experiment: Experiment) -> None:
    if experiment.unread:
        values = ", ".join(f"{key} = {value!r}" for key, value in experiment.unread.items())
        log.warning("not read by %s: %s", experiment.config.strategy, values)


@contextmanager
def _in_words(config: RunConfig, directory: RunDirectory, record: Record) -> Iterator[None]:
    """Turn errors of a full disk, of TLS, and of a checkpoint that doesn't fit the run, into one line."""
    stays = "what it has stays, and resume continues from its checkpoint"
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise ConfigError(
            f"results-dir = {config.results_dir!r}: {directory.path} can't be written to any more "
            f"({error.strerror}); {stays}"
        ) from None
    except (KeyError, TypeError, IndexError, ValueError) as error:
        if directory.checkpoint is None or record.noted or isinstance(error, ConfigError):
            raise
        reason = f"its checkpoint has no {error}" if isinstance(error, KeyError) else error
        raise ConfigError(f"resume = {config.resume!r}: {reason}") from error
    except Exception as error:
        if (refused := _certificate_error(error)) is None:
            raise
        raise RunError(
            f"the SuperLink's certificate isn't trusted any more ({refused.verify_message}), so {directory.path} "
            f"ends; {stays}"
        ) from None


def _certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Return the error of TLS that a Grid's error comes from: Flower retries other lost connections, not these."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def _record(
    experiment: Experiment,
    engine: str,
    strategy: FederatedStrategy,
    directory: RunDirectory,
    others: Sequence[Observer],
) -> Record:
    """Return the record with its observers: those that measure come before those that write, also at the end."""
    config, watch = experiment.config, WallClock()
    best = strategy.session.run.best
    unstable = partial(getattr, strategy.session.reporter.stability, "warning")
    summary = Summary(experiment, engine, directory, watch, unstable, best)
    sparingly = Sparingly()
    display = Display(
        config.num_server_rounds,
        summary,
        sparingly,
        has_rounds=strategy.has_rounds,
        json=config.log_format == "json",
    )
    heartbeat = _heartbeat(config, strategy, sparingly)
    if not display.live:
        strategy.run_options.should_stop = heartbeat.watching(strategy.run_options.should_stop)
    account = None
    if config.dp != "none":
        account = PrivacyAccount(config, strategy, experiment.num_clients, Releases(directory.path))
    if account is not None and (config.dp_max_epsilon or config.dp_target_epsilon):
        strategy.run_options.should_stop = account.watching(strategy.run_options.should_stop)
    labels = {"run": directory.path.name, "strategy": config.strategy, "engine": engine}
    observers = [
        *([Divergence(experiment, strategy)] if config.record_divergence else []),
        *([] if account is None else [account]),
        Totals(),
        RoundsWithoutReply(strategy),
        *([KeptModel(experiment, best, directory)] if best is not None and best.keeps else []),
        Journal(experiment, strategy, directory, watch),
        summary,
        display,
        *([] if display.live else [heartbeat]),
        *([make_tracker(config, directory)] if config.tracker != "none" else []),
        *others,
        *([Exporter(config, strategy, labels)] if config.metrics_port else []),
    ]
    return Record(strategy, config.clock, observers, Saving(config, directory, watch, display.announces))


def _heartbeat(config: RunConfig, strategy: FederatedStrategy, sparingly: Sparingly) -> Heartbeat:
    """Return what logs how far the run is."""

    def standing() -> HowFar:
        return HowFar(
            strategy.session.aggregations, len(strategy.session.busy_clients()), len(strategy.session.clients)
        )

    def budget_left() -> float | None:
        limited = config.clock == "wall" and config.time_budget > 0
        return (
            max(
                0.0,
                config.time_budget - (strategy.session.scheduler.now() - strategy.session.scheduler.began),
            )
            if limited
            else None
        )

    return Heartbeat(config.num_server_rounds, standing, sparingly, budget_left)
