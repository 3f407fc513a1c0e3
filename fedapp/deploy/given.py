"""What a run on devices is given: pairs and files, a simulation's config.toml among them."""

from fedapp.config import ConfigError, Value, defaults, own_keys, read_run, strategy_class
from fedapp.config.options import read_run_options
from fedapp.config.own_keys import folded

OPTION = "--run-config"

# What a run's config.toml has because of where it ran, not because somebody wanted it.
_OF_ITS_PLACE = ("clock", "registered-nodes")

# What is counted in seconds of the run's clock, and by which strategy alone; 0: not at all.
_IN_SECONDS = {"time-budget": "", "round-deadline": "", "fedfix-interval": "fedfix"}


def read_given(texts: list[str] | None) -> tuple[dict[str, Value], int | None, list[str]]:
    """Read ``--run-config`` for a run in real time.

    Returns
    -------
    tuple
        The keys, without the clock and the registered nodes of a run's config.toml, and with those of a strategy of
        one's own in ``strategy-config``; that run's number of clients; what is to be said of it.
    """
    whole, _ = read_run_options(OPTION, texts)
    values, num_clients = read_run_options(OPTION, texts, but=_OF_ITS_PLACE)
    values = _with_own_keys_in_one(values)
    if "clock" in values or whole.get("clock") != "virtual":
        return values, num_clients, []
    line = "clock = virtual: was the simulation's, and isn't taken over; devices have real time"
    counted = [
        f"{key} = {values[key]:g}"
        for key, whose in _IN_SECONDS.items()
        if values.get(key) and whose in ("", values.get("strategy"))
    ]
    if counted:
        line += f", in seconds of which {' and '.join(counted)} count now"
    return values, num_clients, [line]


def _with_own_keys_in_one(values: dict[str, Value]) -> dict[str, Value]:
    """Flower refuses every key that doesn't stand in pyproject.toml."""
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
        If its folder isn't on this machine, so that nobody knows whose keys those are.
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
