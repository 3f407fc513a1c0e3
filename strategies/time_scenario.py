"""How long a client's task takes, in virtual time.

Source: papers/002_840aee1ee8a82ff9.txt, section 5.1.
"""

import re

import numpy as np

_FIXED = re.compile(r"F(\d{1,2}|100)")


def fixed_task_times(scenario: str, num_clients: int) -> np.ndarray:
    """Task times τ_i of scenario ``F-X``, in seconds.

    Evenly spaced from 1 − X/100 (client 0, the fastest) to 1 (the last); ``F0``: all 1.

    Parameters
    ----------
    scenario : str
        ``"F0"`` to ``"F99"``.
    num_clients : int
        C, the number of clients.

    Returns
    -------
    np.ndarray
        Shape (C,), float64, in (0, 1].

    Raises
    ------
    ValueError
        If ``scenario`` is none of these.
    """
    match = _FIXED.fullmatch(scenario)
    if match is None or int(match[1]) > 99:
        raise ValueError(f"time-scenario = {scenario!r}: allowed are F0 to F99")
    if num_clients == 1:
        return np.ones(1)
    return np.linspace(1 - int(match[1]) / 100, 1.0, num_clients)
