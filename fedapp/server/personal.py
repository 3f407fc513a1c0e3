"""What a run with clients' own models, or with test rows of their own, is told and refused before it starts."""

import logging

from torch import nn

from fedapp.config import ConfigError, RunConfig
from fedapp.data import Dataset
from fedapp.data.partition import OWN
from fedapp.training.personal import matches_nothing, own_arrays
from fedapp.training.state import names_of
from strategies import FederatedStrategy
from strategies.flower.grids import DEPLOYMENT, RAY

log = logging.getLogger("flwr.fedapp")


def check_layers(config: RunConfig, model: nn.Module) -> None:
    """Refuse arrays of clients' own that the model hasn't; say what is alone.

    Raises
    ------
    ConfigError
    """
    given = f"personal = {config.personal!r}"
    names = names_of(model)
    if unknown := matches_nothing(model, config.personal):
        every = (*names.trained, *names.fixed)
        some = ", ".join(every[:20]) + (f" and {len(every) - 20} more" if len(every) > 20 else "")
        raise ConfigError(f"{given}: no array of the model is called {unknown[0]!r}; its arrays are {some}")
    own = own_arrays(model, config.personal)
    if config.personal_epochs and not (own.trained and own.shared):
        raise ConfigError(
            f"personal-epochs = {config.personal_epochs}: with {given} "
            f"{'no' if own.shared else 'every'} array that is trained is a client's own; allowed is 0"
        )
    log.info(
        "personal: clients keep %d of %d arrays; the model of the server has their first values, so that the scores "
        "of clients' models are the personal-… ones%s",
        len(own.names),
        len(names.trained) + len(names.fixed),
        "" if own.shared else "; each client trains alone, as all trained arrays are its own",
    )


def check_engine(strategy: FederatedStrategy, personal: str, engine: str) -> None:
    """Refuse arrays of clients' own on Ray without rounds: of training and evaluation at once one state is lost.

    Raises
    ------
    ConfigError
    """
    if engine == RAY and not strategy.has_rounds:
        raise ConfigError(
            f"personal = {personal!r}: on Ray a client that evaluates while it trains may lose what it keeps, and "
            f"{strategy.session.run.name} has no rounds; allowed with engine = vectorized, sequential"
        )


def say_pooled(config: RunConfig, dataset: Dataset) -> None:
    """Log that a dataset's test rows are divided over the clients, where clients have test rows of their own."""
    if shipped := len(dataset.y) - dataset.num_train:
        log.info(
            "test-on = 'own': the %d test rows that '%s' ships are divided over the clients with the others",
            shipped,
            config.dataset,
        )


def evaluates_on_clients(config: RunConfig, strategy: FederatedStrategy, engine: str) -> bool:
    """Return whether clients evaluate in a run in which they have models of their own, or fine-tune the global one.

    On devices they evaluate only with ``client-evaluation``. A warning says where clients' models aren't scored, or
    on which rows.
    """
    own = strategy.capabilities.personal or config.personal
    what = "clients' own models" if own else "what fine-tune-epochs asks for"
    if config.dp != "none":
        log.warning(
            "dp = %r: %s aren't scored, as clients' scores would be sent as they are", config.dp, what
        )
        return False
    if engine == DEPLOYMENT and not config.client_evaluation:
        log.warning("client-evaluation = false: on devices %s aren't scored; true has clients do it", what)
        return False
    if config.test_on != OWN:
        log.warning(
            "test-on = %r: %s are scored on the rows that they are trained on; test-on = 'own' has clients keep some "
            "to test on",
            config.test_on,
            what,
        )
    return True
