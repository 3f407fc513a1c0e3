"""What a run on devices is given: pairs and files, a simulation's config.toml among them."""

from typing import NamedTuple

from fedapp.config import ConfigError, Value, defaults, own_keys, read_run, strategy_class
from fedapp.config.options import SimulationConfig, read_run_options
from fedapp.config.own_keys import folded
from fedapp.meant import NUM_CLIENTS

OPTION = "--run-config"

# Keys of a run's config.toml that follow from where the run was made, and that nobody gave.
_OF_ITS_PLACE = ("clock", "registered-nodes")

# Keys in seconds of the run's clock, and the one strategy that reads each ("": all do). At 0 a key is switched off;
# fedfix-interval = "auto" follows the task times, in any clock.
_IN_SECONDS = {"time-budget": "", "round-deadline": "", "fedfix-interval": "fedfix"}


class Given(NamedTuple):
    """``--run-config`` as it was read for a run on devices.

    Attributes
    ----------
    values : dict
        The keys, without the clock and the registered nodes of a run's config.toml, and with those of a strategy of
        one's own in ``strategy-config``.
    num_clients : int or None
        ``num-clients`` in a pair or in a file that isn't a run's config.toml.
    of_a_run : int or None
        The number of clients of the run whose config.toml was given.
    lines : list of str
        Messages about what isn't taken over.
    """

    values: dict[str, Value]
    num_clients: int | None
    of_a_run: int | None
    lines: list[str]


def read_given(texts: list[str] | None) -> Given:
    """Read ``--run-config`` for a run in real time.

    Raises
    ------
    ConfigError
        If a text can't be read, or ``num-clients`` isn't a number of clients.
    """
    whole, _ = read_run_options(OPTION, texts)
    values, of_a_run = read_run_options(OPTION, texts, but=_OF_ITS_PLACE)
    num_clients = None
    if NUM_CLIENTS in values:
        num_clients = SimulationConfig.read({NUM_CLIENTS: values.pop(NUM_CLIENTS)}).num_supernodes
    values = _with_own_keys_in_one(values)
    if "clock" in values or whole.get("clock") != "virtual":
        return Given(values, num_clients, of_a_run, [])
    line = "clock = virtual: was the simulation's, and isn't taken over; devices have real time"
    counted = [
        f"{key} = {values[key]:g}"
        for key, whose in _IN_SECONDS.items()
        if whose in ("", values.get("strategy")) and values.get(key) not in (None, 0, "auto")
    ]
    if counted:
        line += f", in seconds of which {' and '.join(counted)} count now"
    return Given(values, num_clients, of_a_run, [line])


def _with_own_keys_in_one(values: dict[str, Value]) -> dict[str, Value]:
    """Fold a user-defined strategy's keys into ``strategy-config``: Flower refuses keys without a default."""
    if values.keys() <= defaults().keys():
        return values
    name = values["strategy"] if "strategy" in values else _strategy_before(values)
    if not isinstance(name, str):
        return values
    return folded(values, own_keys(strategy_class(name)).key_names(), defaults())


def _strategy_before(values: dict[str, Value]) -> Value | None:
    """Return the strategy of the run to go on with; None if there is no such run.

    Raises
    ------
    ConfigError
        If the run's folder isn't on this machine, so that the keys of its strategy aren't known.
    """
    if not (path := values.get("resume")):
        return None
    try:
        return read_run(str(path))[0].get("strategy")
    except ConfigError:
        key = min(values.keys() - defaults().keys())
        raise ConfigError(
            f"{key} = {values[key]!r}: no key of every run, and resume = {path!r}, whose strategy may have it, isn't "
            "here: give strategy=… too, or strategy-config"
        ) from None
