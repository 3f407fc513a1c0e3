"""The local step of every method.

Every method's local rule fits one form (Li et al. 2020, eq. 2; Buttaci, master's thesis at the Politecnico di Torino,
algorithm 2)::

    w̃ = at(w, u)          = β w + (1−β) u        β = 1: w itself
    g = ∇f_i(w̃) + λ w̃                            clipped to norm G, if asked
    w ← w − γ [ g + pull(w, w̄) ],  pull = α (w − w̄)

so a client needs no branch per method.
"""

from dataclasses import dataclass

import torch

from fedapp.training.vectors import Parameters


@dataclass(frozen=True)
class LocalRule:
    """The symbols of the local step.

    Parameters
    ----------
    alpha : float
        α ≥ 0, the pull towards the model that was sent; 0: none.
    beta : float
        β in [0, 1]: the gradient is taken at β w + (1−β) u; 1: at w.
    momentum : float
        Heavy-ball momentum on the whole step, in [0, 1).
    l2 : float
        λ of ½ λ ‖w‖², all parameters; its gradient is taken at w̃ too.
    clip_norm : float
        G: the gradient's norm is cut to G; 0: not.
    """

    alpha: float = 0.0
    beta: float = 1.0
    momentum: float = 0.0
    l2: float = 0.0
    clip_norm: float = 0.0


def mix(beta: float, w: Parameters, u: Parameters) -> Parameters:
    return {name: beta * w[name] + (1 - beta) * u[name] for name in w}


def direction(
    g: Parameters, w: Parameters, point: Parameters, start: Parameters, velocity: Parameters, rule: LocalRule
) -> Parameters:
    """Return what the step size multiplies: the gradient ``g`` at ``point`` with λ, G, α and momentum.

    ``velocity`` is the step before's direction, empty at the first.
    """
    if rule.l2:
        g = {name: g[name] + rule.l2 * point[name] for name in g}
    if rule.clip_norm:
        g = _clip(g, rule.clip_norm)
    if rule.alpha:
        g = {name: g[name] + rule.alpha * (w[name] - start[name]) for name in g}
    if rule.momentum and velocity:
        g = {name: rule.momentum * velocity[name] + g[name] for name in g}
    return g


def _clip(g: Parameters, norm: float) -> Parameters:
    length = torch.sqrt(sum((value.square().sum() for value in g.values()), start=torch.zeros(())))
    scale = (norm / length.clamp(min=1e-12)).clamp(max=1.0)
    return {name: scale * value for name, value in g.items()}
