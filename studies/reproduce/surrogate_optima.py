"""The optima behind asynchronous FedAvg's ends, for logistic regression (Fraboni et al. 2023, section 5.2.1).

A scheme that gives client i's contributions the weight d_i and hears from it 1/τ_i times a second minimises the
surrogate objective Σ q_i f_i, q_i ∝ d_i/τ_i, and not f = Σ p_i f_i unless q = p (Fraboni et al. 2023,
eq. 10). How much worse f is at the surrogate's minimum is known without any run: the suboptimum that runs tend to.
"""

import numpy as np

from fedapp import federation
from fedapp.config import ConfigError, RunConfig
from strategies.core.population import IMPORTANCES, importances
from strategies.methods import async_fedavg
from strategies.timing.time_scenario import TimeScenario
from studies.theory.constants import Array
from studies.theory.problems import Logistic
from studies.theory.run_bounds import client_data

# λ²/2 up to which a model counts as a minimiser.
DECREMENT = 1e-6

# The fields of a run's config that `optima` reads, beside its data and seed.
READ = ("model", "strategy", "client_weights", "l2", "time_scenario")

FEDERATED, IDENTICAL, TIME_BASED = "federated-least", "identical", "time-based"


def logistic_problem(config: RunConfig, num_clients: int, weights: Array) -> Logistic:
    """Return Σ p_i f_i of logistic regression on a run's rows, as its models see them; ``weights`` are the p_i."""
    partition = federation.partition_of(config, num_clients)
    dataset = federation.with_moments(config, federation.dataset_of(config, num_clients), partition)
    clients = [client_data(dataset, partition.client(i), config.normalize) for i in range(num_clients)]
    return Logistic(clients, dataset.num_classes, config.l2, weights)


def optima(config: RunConfig, num_clients: int) -> dict[str, float]:
    """Return the federated loss at the minimisers of the objectives that asynchronous FedAvg minimises.

    Parameters
    ----------
    config : RunConfig
        Of a run of ``async-fedavg`` with model ``logistic``: its data, division, client weights, l2 and task times.
    num_clients : int
        C.

    Returns
    -------
    dict of str to float
        ``federated-least``: min f. ``identical`` and ``time-based``: f at the minimiser of the scheme's surrogate.
        ``federated-decrement`` and ``identical-decrement``: λ²/2 of f and of ``identical``'s surrogate at the models
        found, an estimate of how far each is above its infimum.

    Raises
    ------
    ConfigError
        If strategy, model or client weights of the run are others.
    DataError
        If the data aren't there.
    AssumptionError
        If a minimiser isn't found: λ²/2 stays above 1e-6.
    """
    _check(config)
    sizes = federation.partition_of(config, num_clients).sizes
    p = np.array(importances(config.client_weights, sizes.tolist()))
    problem = logistic_problem(config, num_clients, p)
    weights = surrogate_weights(
        problem.weights, TimeScenario(config.time_scenario, num_clients, config.seed).means
    )
    best = problem.least(DECREMENT)
    found = {FEDERATED: problem.value(best), "federated-decrement": problem.half_decrement(best)}
    for scheme, q in weights.items():
        if np.allclose(q, problem.weights, rtol=1e-12, atol=0):
            found[scheme] = found[FEDERATED]
            continue
        surrogate = Logistic(problem.clients, problem.num_classes, problem.l2, q)
        end = surrogate.least(DECREMENT)
        found |= {scheme: problem.value(end), f"{scheme}-decrement": surrogate.half_decrement(end)}
    return found


def surrogate_weights(p: Array, times: Array) -> dict[str, Array]:
    """Return q of both schemes, (C,), each with sum 1.

    ``time-based`` has d_i = p_i P_i with the P_i of ``strategies.methods.async_fedavg``. These are proportional to
    τ_i (eq. 36), so that q = p.

    Parameters
    ----------
    p, times : array (C,)
        p_i, and the mean task times τ_i in seconds.
    """
    received = {IDENTICAL: 1 / times, TIME_BASED: p * async_fedavg.contribution_periods(times) / times}
    return {scheme: share / share.sum() for scheme, share in received.items()}


def _check(config: RunConfig) -> None:
    for key, value, allowed in (
        ("model", config.model, ("logistic",)),
        ("strategy", config.strategy, ("async-fedavg",)),
        ("client-weights", config.client_weights, IMPORTANCES),
    ):
        if value not in allowed:
            raise ConfigError(f"{key} = {value!r}: its optima are known for {', '.join(allowed)}")
