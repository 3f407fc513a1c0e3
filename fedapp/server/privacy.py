"""What a run's differential privacy costs, and what it forbids."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fedapp.config import ConfigError, RunConfig, strategy_class
from fedapp.config.conflicts import LEAST_NOISE
from fedapp.server.record import Entry, Observer
from fedapp.server.releases import Releases
from fedapp.server.sampled_gaussian import EVERYBODY, Sampling, is_installed, sampled_epsilon
from strategies import AsynchronousStrategy, FederatedStrategy, SynchronousStrategy
from strategies.core.conflicts import IN_ORDER
from strategies.timing.availability import ALWAYS

# Of the noise multiplier z: the ε that goes with less is beyond what a float holds, or as good as no privacy; more
# noise than the most is beyond what the key accepts.
MOST_NOISE = 1e6
# Where a run has no end beforehand, no client of it sends more often.
MOST_RELEASES = 2**40
# Where noise comes from: the run's seed, or the operating system.
SEED, SYSTEM = "seed", "system"
# S where clients add the noise, and no norm is given.
LOCAL_NORM = 1.0
# How exactly the noise for a target is solved for, relative to it.
SOLVED = 1e-4

log = logging.getLogger("flwr.fedapp")


class PrivacyAccount(Observer):
    """Adds ε of the client that has sent most; of every round, whether a client took part or not.

    The server knows who takes part in which round: with noise that protects from it, only these rounds count.

    Where clients are placed in a graph, each request for a client's direction costs (``message-epsilon``,
    ``message-delta``) more. The two kinds are added up, ε and δ.
    """

    def __init__(
        self, config: RunConfig, strategy: FederatedStrategy, num_clients: int, releases: Releases
    ) -> None:
        self.config = config
        self.strategy = strategy
        self.sampling = sampling_of(config, strategy, num_clients)
        self._by_client = _protects_from_server(strategy) and self.sampling == EVERYBODY
        self._most = lru_cache(self._most_with)
        self._releases = releases
        self._restored = False
        # Without rounds: tasks that were sent twice, by client, and resumptions by which one more of each may count.
        self._repeated: Counter[int] = Counter()
        self._under_way = 0
        if config.dp_noise == SYSTEM:
            strategy.run_options.before_release = releases.note

    def restore(self, state: Mapping[str, Any]) -> None:
        """Count what was sent after the checkpoint, and is sent again, with other noise."""
        self.sampling = replace(
            self.sampling, repeats=tuple((int(first), int(n)) for first, n in state.get("dp-repeats", ()))
        )
        self._repeated = Counter({int(index): int(n) for index, n in state.get("dp-repeated-tasks", ())})
        self._under_way, self._restored = state.get("dp-under-way", 0), True
        if "dp-releases-size" in state:
            self._count_repeated(state["dp-releases-size"], state["last"].get("aggregation", 0))

    def begin(self) -> None:
        """Count what was sent before a run starts over, if it had no checkpoint."""
        if not self._restored:
            self._count_repeated(0, 0)

    def state(self) -> dict[str, Any]:
        """Return the size of the file of releases, and what was repeated so far."""
        return {
            "dp-releases-size": self._releases.size(),
            "dp-repeats": self.sampling.repeats,
            "dp-repeated-tasks": list(self._repeated.items()),
            "dp-under-way": self._under_way,
        }

    def _count_repeated(self, size: int, aggregations: int) -> None:
        if not (lines := self._releases.since(size)):
            return
        if self.strategy.has_rounds:
            number = len(lines)
            self.sampling = replace(self.sampling, repeats=(*self.sampling.repeats, (aggregations, number)))
        else:
            sent = Counter(index for line in lines for index in line)
            number = max(sent.values(), default=0)
            self._repeated += sent
            self._under_way += (
                self.config.dp == "central"
            )  # a task that was under way may be in a model since
        log.warning(
            "dp = %r: %d %s after the checkpoint that this run goes on from were sent already, and are sent again "
            "with new noise: dp-epsilon counts both",
            self.config.dp,
            number,
            "rounds" if self.strategy.has_rounds else "tasks of a client",
        )

    def releases(self) -> int:
        """Return the number of releases so far of the client that has sent most."""
        strategy, done = self.strategy, self.strategy.session.aggregations
        if self._by_client:
            # Also of sums that didn't count: the server could open them.
            return max(
                (max(each.opened, each.accepted) for _, each in strategy.session.client_stats.items()),
                default=0,
            )
        if not isinstance(strategy, AsynchronousStrategy) or not done:
            return done
        table, repeated = strategy.session.task_table, self._repeated
        if self.config.dp == "central":
            return table.max_contributions_per_client(repeated) + self._under_way
        return max(1, table.max_tasks_per_client(repeated))

    def measure(self, entry: Entry) -> None:
        """Add ``dp-epsilon`` at ``dp-delta``, or, with directions, at the ``dp-delta`` that is added, too."""
        config, releases, directions = self.config, self.releases(), self._directions()
        spent = epsilon_of(config, releases, self.sampling) if releases else 0.0
        if directions:
            entry.metrics["dp-delta"] = (
                config.dp_delta if releases else 0.0
            ) + directions * config.message_delta
        if releases or directions:
            entry.metrics["dp-epsilon"] = spent + directions * config.message_epsilon

    def watching(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """Return ``should_stop``, which is also True where one more release would pass ``limit``."""
        return lambda: should_stop() or self._reached_contribution_limit()

    @property
    def ended(self) -> str:  # type: ignore[override]
        """Why the run ended before its last aggregation; "" if the account isn't why."""
        config, strategy = self.config, self.strategy
        if strategy.session.aggregations >= config.num_server_rounds:
            return ""
        if isinstance(strategy, AsynchronousStrategy) and strategy.session.task_table.all_reached_limit:
            return (
                f"dp-max-contributions = {config.dp_max_contributions}: every client has contributed as often"
            )
        if not self.limit or not self._reached_contribution_limit():
            return ""
        unit = "round" if strategy.has_rounds else "task of a client"
        key = "dp-max-epsilon" if config.dp_max_epsilon == self.limit else "dp-target-epsilon"
        return f"{key} = {getattr(config, key.replace('-', '_')):g}: one more {unit} would pass it"

    @property
    def limit(self) -> float:
        """The ε that ends the run: ``dp-max-epsilon``, and the target where releases are repeated; 0: none."""
        config, repeats = self.config, self.sampling.repeats or self._repeated or self._under_way
        target = config.dp_target_epsilon * (1 + SOLVED) if repeats else 0.0
        return min(filter(None, (config.dp_max_epsilon, target)), default=0.0)

    def _reached_contribution_limit(self) -> bool:
        strategy = self.strategy
        if isinstance(strategy, AsynchronousStrategy) and self.config.dp == "local":
            done = strategy.session.task_table.max_tasks_per_client(self._repeated)
        else:
            done = self.releases()
        return done >= self._most(self._directions())

    def _directions(self) -> int:
        return 0 if self.strategy.session.graph is None else self.strategy.session.graph.most_asked()

    def _most_with(self, directions: int) -> int:
        """Return how many releases ``dp-max-epsilon`` allows beside so many directions."""
        if not self.limit:
            return MOST_RELEASES
        left = self.limit - directions * self.config.message_epsilon
        known = self.config.num_server_rounds if self.strategy.has_rounds else 0
        return most_releases(self.config, left, self.sampling, known)


def _protects_from_server(strategy: FederatedStrategy) -> bool:
    """Return True if clients add the noise: it protects from the server, which knows who was drawn."""
    return isinstance(strategy, SynchronousStrategy) and strategy.config.distributes_noise


def neighbours(config: RunConfig) -> str:
    """Return the neighbouring relation of ``dp-epsilon`` in words: in what two neighbouring runs differ."""
    if config.dp == "local":
        return "replace one client: all its data, or any others in their place"
    if not strategy_class(config.strategy).has_rounds:
        return "one client's updates, or zero in their place, with the same times of its tasks"
    if config.dp_mechanism == "distributed":
        return "one client's updates, or zero in their place, with the same rounds in which it takes part"
    return "add or remove one client: its update, or zero in its place, with the same divisor of the sum"


def sampling_of(config: RunConfig, strategy: FederatedStrategy, num_clients: int) -> Sampling:
    """Return how clients are drawn, as far as the account may count on it.

    Without rounds a client counts as often as it contributes, and the server knows who sends what: nothing is hidden
    from it, where clients add the noise. A fixed number of clients counts where each draw is among all clients: not
    where some may be away or still at work.
    """
    if config.dp != "central" or not isinstance(strategy, SynchronousStrategy):
        return EVERYBODY
    scheme = strategy.session.selection.scheme
    if scheme.scheme in IN_ORDER and not strategy.capabilities.chooses_clients:
        tree = config.dp_mechanism == "tree"
        return Sampling(num_turns=scheme.num_turns, restart=config.dp_restart if tree else 1)
    if _protects_from_server(strategy):
        return EVERYBODY
    if strategy.session.selection.hides:
        return Sampling(probability=scheme.fraction)
    whole = config.availability == ALWAYS and config.clock != "wall" and not strategy.config.closes_early
    if strategy.capabilities.chooses_clients or config.drop_stragglers or not whole:
        return EVERYBODY
    if scheme.scheme not in ("uniform", "flower"):
        return EVERYBODY
    return Sampling(drawn=scheme.sample_size(num_clients), clients=num_clients)


def epsilon_of(config: RunConfig, releases: int, sampling: Sampling) -> float:
    """Return ε of so many releases with a config's noise."""
    return sampled_epsilon(config.dp_noise_multiplier, config.dp_delta, releases, sampling)


def most_releases(config: RunConfig, epsilon: float, sampling: Sampling, known: int) -> int:
    """Return the largest number of releases with an ε of at most this; no more than are ``known`` to come, if any."""

    def fits(releases: int) -> bool:
        return epsilon_of(config, releases, sampling) <= epsilon

    low, high = 0, known or 1
    if known and fits(known):
        return known
    while not known and fits(high) and high < MOST_RELEASES:
        low, high = high, 2 * high
    while high - low > 1:  # low fits, high doesn't
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _asks_directions(strategy: FederatedStrategy) -> bool:
    """Return True if each client is asked for the direction of its data."""
    return strategy.session.graph is not None and strategy.session.graph.by_data


def with_local_norm(config: RunConfig) -> RunConfig:
    """Return the config with a clipping norm where clients add the noise: nobody sees norms to follow."""
    if config.dp != "local" or config.dp_clipping_norm:
        return config
    log.info(
        "dp = 'local': dp-clipping-norm = %g, as none is given, and none adapts to what nobody sees",
        LOCAL_NORM,
    )
    return config.model_copy(update={"dp_clipping_norm": LOCAL_NORM})


def with_noise(config: RunConfig, strategy: FederatedStrategy, num_clients: int) -> RunConfig:
    """Return the config with the least noise by which all its rounds together have ``dp-target-epsilon``.

    A run that goes on keeps its noise: what it has sent can't be changed any more.

    Raises
    ------
    ConfigError
        If no noise does, or the config has another.
    """
    target, given = config.dp_target_epsilon, config.dp_noise_multiplier
    rounds, unit = config.num_server_rounds, "rounds"
    said = f"dp-target-epsilon = {target:g}"
    if not strategy.has_rounds:
        rounds, unit = config.dp_max_contributions, "contributions of a client"
    left = target - config.message_epsilon * _asks_directions(strategy)
    sampling = sampling_of(config, strategy, num_clients)
    if left <= 0:
        raise ConfigError(
            f"{said}: the direction of a client alone costs message-epsilon = {config.message_epsilon:g}"
        )

    def epsilon(noise: float) -> float:
        return sampled_epsilon(noise, config.dp_delta, rounds, sampling)

    if config.resume:
        if (spent := epsilon(given)) > left * (1 + SOLVED):
            raise ConfigError(
                f"num-server-rounds = {config.num_server_rounds}: with the noise that the run has, "
                f"dp-noise-multiplier = {given:.6g}, "
                f"dp-epsilon comes to {spent + target - left:.4g}, and dp-target-epsilon is {target:g}"
            )
        return config
    usual = type(config).defaults()["dp-noise-multiplier"]
    noise = _least_noise(epsilon, left)
    if noise > MOST_NOISE:
        raise ConfigError(
            f"{said}: can't be reached in {rounds} {unit} with dp-noise-multiplier up to {MOST_NOISE:g}"
        )
    if given != usual and abs(given - noise) > 2 * SOLVED * noise:
        raise ConfigError(
            f"dp-noise-multiplier = {given:g}: {said} needs {noise:.4g} for {rounds} {unit}; give one of the two"
        )
    log.info(
        "%s: dp-noise-multiplier = %.4g for %d %s (dp-delta = %g; %s)",
        said,
        noise,
        rounds,
        unit,
        config.dp_delta,
        neighbours(config),
    )
    return config.model_copy(update={"dp_noise_multiplier": noise})


def _least_noise(epsilon: Callable[[float], float], most: float) -> float:
    """Return the least noise z, rounded up, whose ε is at most this; more than ``MOST_NOISE`` if none is."""
    from scipy.optimize import brentq

    low, high = 0.5, 1.0
    while high <= MOST_NOISE and epsilon(high) > most:
        low, high = high, 4 * high
    while low >= LEAST_NOISE and epsilon(low) <= most:
        low, high = low / 4, low
    if not LEAST_NOISE <= low < high <= MOST_NOISE:
        return high
    found = brentq(
        lambda z: math.log(max(epsilon(math.exp(z)), 1e-300) / most),
        math.log(low),
        math.log(high),
        xtol=SOLVED / 4,
    )
    noise = math.exp(found)
    while epsilon(noise) > most:
        noise *= 1 + SOLVED / 4
    return noise


def check_account(config: RunConfig, strategy: FederatedStrategy, num_clients: int) -> None:
    """Raise ConfigError if the account of a run can't be made, or allows not a single release."""
    sampling = sampling_of(config, strategy, num_clients)
    if sampling.amplifies and not is_installed():
        raise ConfigError(
            f"dp = 'central' with participation = {config.participation!r}: its account needs dp-accounting, which "
            "isn't installed; pip install '.[privacy]', or participation = 'full'"
        )
    most, direction = config.dp_max_epsilon, config.message_epsilon * _asks_directions(strategy)
    if most and (least := epsilon_of(config, 1, sampling) + direction) > most:
        raise ConfigError(
            f"dp-max-epsilon = {most:g}: the first round alone costs {least:.4g}; more noise "
            f"(dp-noise-multiplier = {config.dp_noise_multiplier:g}) costs less"
        )


def say_standardized(config: RunConfig) -> None:
    """Say that central noise doesn't cover what ``normalize = "standardize"`` tells every client."""
    if config.dp == "central":
        log.warning(
            "dp = central: its noise doesn't cover the mean and deviation of all inputs, which every client is told "
            "(normalize = standardize)"
        )


def say_what_stays(config: RunConfig, names: Sequence[str]) -> None:
    """Say which arrays no client's data may change, of those that training changes without a gradient."""
    if names:
        log.warning(
            "dp = %r: arrays that aren't trained would tell of the data, and stay as the initial model has "
            "them: %s%s",
            config.dp,
            ", ".join(names[:3]),
            f", … ({len(names)})" if len(names) > 3 else "",
        )


def with_noise_source(config: RunConfig, *, on_devices: bool) -> RunConfig:
    """Return a config that says where noise comes from: on devices from the system, else by default from the seed.

    Raises
    ------
    ConfigError
        If it is to come from the seed on devices.
    """
    if config.dp_noise == SEED and on_devices:
        raise ConfigError(
            "dp-noise = 'seed': whoever has the run's config could subtract the devices' noise; allowed on devices "
            "are auto, system"
        )
    if config.dp == "none" and not config.message_epsilon:
        return config
    source = config.dp_noise if config.dp_noise != "auto" else SYSTEM if on_devices else SEED
    if source == SEED:
        log.warning(
            "dp-noise = seed: the noise of this simulation follows from seed = %d, so that whoever has config.toml "
            "can subtract it; with dp-noise = system nobody can, and dp-epsilon holds",
            config.seed,
        )
    return config.model_copy(update={"dp_noise": source})
