"""How far each client's local steps went: what methods divide an update by to tell its mean gradient.

A client's path s_i is how far its steps go along a gradient that stays 1 (J. Wang et al. 2020, section 3: γ_i
‖a_i‖₁), K_i γ_i for plain SGD. So Δ_i = −s_i × a mean of the gradients on the way, whatever the steps' number, size
and momentum. A client reports s_i in the record ``strategies.applied`` of its reply, if the request asks for it
(``messages.PATH``).
"""

from collections.abc import Sequence

import numpy as np

from strategies.clients.weights import Weights
from strategies.flower import messages
from strategies.updates.pipeline import Contribution


def paths_of(contributions: Sequence[Contribution], bound: float = 0.0) -> Weights:
    """Return the paths s_i (n,) of a round's contributions; NaN where a client reports none.

    Parameters
    ----------
    bound : float
        A safeguard, b: a path counts as at most b times the round's median, and at least 1/b of it; 0: no bound. A
        device that reports too short a path could otherwise make its update count without limit.
    """
    paths = np.array([messages.path_of(each.records.get(messages.APPLIED)) for each in contributions])
    if bound and not np.isnan(paths).all():
        typical = float(np.nanmedian(paths))
        paths = np.clip(paths, typical / bound, typical * bound)
    return paths
