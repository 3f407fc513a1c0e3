"""The methods in rounds. Each yields the model after every round of a problem, in the papers' own steps.

In all of them W is the global model, S a round's participants, w_i a client's local model, Δ_i = w_i − W, p_i a
client's importance, d_i its weight in a round (p_i / Σ_S p_j), and g_i the gradient of f_i.
"""

from collections.abc import Callable, Iterator

import numpy as np

from ..problem import Problem, Vector, total

Trajectory = Iterator[Vector]


def fedavg(problem: Problem) -> Trajectory:
    """W ← Σ_S d_i w_i."""
    return server_step(problem, lambda W, mean: mean)


def server_step(problem: Problem, step: Callable[[Vector, Vector], Vector]) -> Trajectory:
    """W ← step(W, Σ_S d_i w_i): FedAvg's round with a server optimizer's step."""
    W = problem.initial
    for S in problem.steps:
        W = step(W, total(d * problem.train(i, W) for i, d in zip(S, problem.weights(S), strict=True)))
        yield W


def fedavgm(problem: Problem) -> Trajectory:
    """v ← β v + Σ d_i Δ_i, W ← W + η_g v."""
    beta, rate = problem.parameters["beta"], problem.parameters["server_lr"]
    v = np.zeros_like(problem.initial)

    def step(W: Vector, mean: Vector) -> Vector:
        nonlocal v
        v = beta * v + (mean - W)
        return W + rate * v

    return server_step(problem, step)


def diloco(problem: Problem) -> Trajectory:
    """v ← β v + Δ, W ← W + η_g (Δ + β v), Δ = Σ d_i Δ_i."""
    beta, rate = problem.parameters["beta"], problem.parameters["server_lr"]
    v = np.zeros_like(problem.initial)

    def step(W: Vector, mean: Vector) -> Vector:
        nonlocal v
        v = beta * v + (mean - W)
        return W + rate * (mean - W + beta * v)

    return server_step(problem, step)


def adaptive(problem: Problem, second: Callable[[Vector, Vector, float], Vector]) -> Trajectory:
    """m ← β₁ m + (1 − β₁) Δ, v ← second(v, Δ²), W ← W + η_g m / (√v + τ), from m = 0 and v = τ²."""
    given = problem.parameters
    m, v = np.zeros_like(problem.initial), np.full_like(problem.initial, given["tau"] ** 2)

    def step(W: Vector, mean: Vector) -> Vector:
        nonlocal m, v
        m = given["beta_1"] * m + (1 - given["beta_1"]) * (mean - W)
        v = second(v, (mean - W) ** 2, given["beta_2"])
        return W + given["server_lr"] * m / (np.sqrt(v) + given["tau"])

    return server_step(problem, step)


def fedadagrad(problem: Problem) -> Trajectory:
    """v ← v + Δ²."""
    return adaptive(problem, lambda v, square, _: v + square)


def fedadam(problem: Problem) -> Trajectory:
    """v ← β₂ v + (1 − β₂) Δ²."""
    return adaptive(problem, lambda v, square, beta: beta * v + (1 - beta) * square)


def fedyogi(problem: Problem) -> Trajectory:
    """v ← v − (1 − β₂) Δ² sign(v − Δ²)."""
    return adaptive(problem, lambda v, square, beta: v - (1 - beta) * square * np.sign(v - square))


def fedexp(problem: Problem) -> Trajectory:
    """W ← W + η_g Δ, Δ = Σ d_i Δ_i, η_g = max(1, Σ d_i ‖Δ_i‖² / (2 (‖Δ‖² + ε))); the result is the mean of two W."""
    epsilon, W = problem.parameters["epsilon"], problem.initial
    for S in problem.steps:
        d, delta = problem.weights(S), [problem.train(i, W) - W for i in S]
        mean = total(weight * each for weight, each in zip(d, delta, strict=True))
        square = sum(weight * np.sum(each**2) for weight, each in zip(d, delta, strict=True))
        before, W = W, W + max(1.0, square / (2 * (np.sum(mean**2) + epsilon))) * mean
        yield (before + W) / 2


def qfedavg(problem: Problem) -> Trajectory:
    """W ← W + Σ_S F_i^q L Δ_i / Σ_S h_i, h_i = q F_i^(q−1) ‖L Δ_i‖² + L F_i^q, F_i = f_i(W)."""
    q, L, W = problem.parameters["q"], problem.parameters["L"], problem.initial
    for S in problem.steps:
        top, bottom = np.zeros_like(W), 0.0
        for i in S:
            F, slope = problem.clients[i].loss(W), L * (problem.train(i, W) - W)
            top = top + F**q * slope
            bottom += q * F ** (q - 1) * np.sum(slope**2) + L * F**q
        W = W + top / bottom
        yield W


def fedprox(problem: Problem) -> Trajectory:
    """w ← w − γ (g_i(w) + α (w − W))."""
    alpha, W = problem.parameters["alpha"], problem.initial

    def local(i: int, W: Vector) -> Vector:
        g = problem.clients[i].gradient
        return problem.train(i, W, lambda w: g(w) + alpha * (w - W))

    for S in problem.steps:
        W = total(d * local(i, W) for i, d in zip(S, problem.weights(S), strict=True))
        yield W


def similarities(problem: Problem) -> Vector:
    """Return A_ij = −ln(‖m_i − m_j‖²/4) (C, C), A_ii = 0, m_i the principal direction of client i's rows."""
    directions = []
    for client in problem.clients:
        m = np.linalg.svd(client.x, full_matrices=False)[2][0]
        directions.append(m if m.sum() >= 0 else -m)
    C = len(directions)
    A = np.zeros((C, C))
    for i in range(C):
        for j in range(C):
            if i != j:
                A[i, j] = -np.log(np.sum((directions[i] - directions[j]) ** 2) / 4)
    return A


def spectral(problem: Problem) -> Trajectory:
    """The gradient is taken at β w + (1 − β) u_i, u_i = Σ_j (p_ij / p_i) × the last local model of client j."""
    A = similarities(problem)
    C = len(A)
    p_ij = A / A.sum()
    p_i = p_ij.sum(axis=1)
    if not np.allclose(p_i, problem.importance, rtol=1e-12):
        raise ValueError("the problem's importances must be those of its clients' directions")
    beta, W = problem.parameters["beta"], problem.initial
    last = [W] * C

    def local(i: int, W: Vector, u: Vector) -> Vector:
        g = problem.clients[i].gradient
        return problem.train(i, W, lambda w: g(beta * w + (1 - beta) * u))

    for S in problem.steps:
        u = [total(p_ij[i, j] / p_i[i] * last[j] for j in range(C)) for i in range(C)]
        for i in S:
            last[i] = local(i, W, u[i])
        W = total(d * last[i] for i, d in zip(S, problem.weights(S), strict=True))
        yield W


def fednova(problem: Problem) -> Trajectory:
    """W ← W + τ_eff Σ d_i Δ_i / ‖a_i‖₁, τ_eff = Σ d_i ‖a_i‖₁."""
    rho, W = problem.momentum, problem.initial
    for S in problem.steps:
        d = problem.weights(S)
        K = np.array([problem.local_steps[i] for i in S])
        norm = (K - rho * (1 - rho**K) / (1 - rho)) / (1 - rho)
        normalized = [(problem.train(i, W) - W) / each for i, each in zip(S, norm, strict=True)]
        W = W + (d @ norm) * total(weight * each for weight, each in zip(d, normalized, strict=True))
        yield W


def scaffold(problem: Problem) -> Trajectory:
    """Option II; c is updated by the differences of the c_i, and the sum is over all N clients."""
    N, W = len(problem.clients), problem.initial
    c, c_i = np.zeros_like(W), [np.zeros_like(W) for _ in range(N)]

    def local(i: int, W: Vector, own: Vector, c: Vector) -> Vector:
        g = problem.clients[i].gradient
        return problem.train(i, W, lambda y: g(y) - own + c)

    for S in problem.steps:
        dy, dc = np.zeros_like(W), np.zeros_like(W)
        for i in S:
            y = local(i, W, c_i[i], c)
            plus = c_i[i] - c + (W - y) / (problem.local_steps[i] * problem.lr)
            dy, dc = dy + (y - W), dc + (plus - c_i[i])
            c_i[i] = plus
        W, c = W + dy / len(S), c + dc / N
        yield W


def feddyn(problem: Problem) -> Trajectory:
    """∇L_i is each client's vector, h the server's."""
    alpha, N, W = problem.parameters["alpha"], len(problem.clients), problem.initial
    h, slope = np.zeros_like(W), [np.zeros_like(W) for _ in range(N)]

    def local(i: int, W: Vector, own: Vector) -> Vector:
        g = problem.clients[i].gradient
        return problem.train(i, W, lambda w: g(w) - own + alpha * (w - W))

    for S in problem.steps:
        theta = {i: local(i, W, slope[i]) for i in S}
        for i in S:
            slope[i] = slope[i] - alpha * (theta[i] - W)
        h = h - alpha / N * total(theta[i] - W for i in S)
        W = total(theta.values()) / len(S) - h / alpha
        yield W


def mifa(problem: Problem) -> Trajectory:
    """W ← W − γ (1/N) Σ G_i, G_i = (W − w_i) / γ of client i's last round; all take part in the first."""
    N, W = len(problem.clients), problem.initial
    G: dict[int, Vector] = {}
    for S in problem.steps:
        G |= {i: (W - problem.train(i, W)) / problem.lr for i in S}
        W = W - problem.lr / N * total(G.values())
        yield W


def fedstale(problem: Problem) -> Trajectory:
    """W ← W + (1/|S|) Σ_S (Δ_i − β h_i) + (β/C) Σ_i h_i, and then h_i ← Δ_i in S."""
    beta, C, W = problem.parameters["beta"], len(problem.clients), problem.initial
    h = [np.zeros_like(W) for _ in range(C)]
    for S in problem.steps:
        delta = {i: problem.train(i, W) - W for i in S}
        W = W + total(delta[i] - beta * h[i] for i in S) / len(S) + beta / C * total(h)
        for i in S:
            h[i] = delta[i]
        yield W


def fedvarp(problem: Problem) -> Trajectory:
    """v = ȳ + (1/|S|) Σ_S (Δ_i − y_i) with ȳ = (1/C) Σ_i y_i, W ← W + v, and then y_i ← Δ_i in S."""
    C, W = len(problem.clients), problem.initial
    y = np.zeros((C, len(W)))
    for S in problem.steps:
        delta = np.array([problem.train(i, W) - W for i in S])
        W = W + y.mean(axis=0) + (delta - y[S]).mean(axis=0)
        y[S] = delta
        yield W


def fedau(problem: Problem) -> Trajectory:
    """W ← W + Σ_S p_i ω_i Δ_i; ω_i is the mean of the intervals that have ended before this round."""
    K, W = problem.parameters["K"], problem.initial
    C = len(problem.clients)
    omega, M, length = [1.0] * C, [0] * C, [0] * C
    for S in problem.steps:
        W = W + total(problem.importance[i] * omega[i] * (problem.train(i, W) - W) for i in S)
        for i in range(C):
            length[i] += 1
            if i in S or length[i] == K:
                omega[i] = length[i] if M[i] == 0 else (M[i] * omega[i] + length[i]) / (M[i] + 1)
                M[i], length[i] = M[i] + 1, 0
        yield W


def fedawe(problem: Problem) -> Trajectory:
    """x_i† = x_i + η_g (t − τ_i) (w_i − x_i), W ← (1/|S|) Σ_S x_i†, and then x_i ← W, τ_i ← t for i in S alone."""
    rate, W = problem.parameters["server_lr"], problem.initial
    x, tau = [W] * len(problem.clients), [0] * len(problem.clients)
    for t, S in enumerate(problem.steps, 1):
        W = total(x[i] + rate * (t - tau[i]) * (problem.train(i, x[i]) - x[i]) for i in S) / len(S)
        for i in S:
            x[i], tau[i] = W, t
        yield W


def ditto(problem: Problem) -> Trajectory:
    """W as FedAvg's; v_i ← v_i − γ (g_i(v_i) + λ (v_i − W)) from client i's last v_i, at first W."""
    pull, W = problem.parameters["lambda"], problem.initial
    v = [W for _ in problem.clients]

    def own(i: int, W: Vector) -> Vector:
        g = problem.clients[i].gradient
        return problem.train(i, v[i], lambda w: g(w) + pull * (w - W))

    for S in problem.steps:
        for i in S:
            v[i] = own(i, W)
        W = total(d * problem.train(i, W) for i, d in zip(S, problem.weights(S), strict=True))
        yield np.stack([W, *v])


def fedamp(problem: Problem) -> Trajectory:
    """u_i = Σ_j ξ_ij w_j, ξ_ij = α_k A′(‖w_i − w_j‖²) with A(x) = 1 − e^(−x/σ), ξ_ii what is left of 1."""
    given, C = problem.parameters, len(problem.clients)
    sigma, alpha_k, mu = given["sigma"], given["alpha_k"], given["mu"]
    w = [problem.initial for _ in range(C)]

    def local(i: int, u: Vector) -> Vector:
        g = problem.clients[i].gradient
        return problem.train(i, u, lambda x: g(x) + mu * (x - u))

    for S in problem.steps:
        before = list(w)
        for i in S:
            xi = np.array(
                [
                    alpha_k / sigma * np.exp(-np.sum((before[i] - before[j]) ** 2) / sigma) if j != i else 0.0
                    for j in range(C)
                ]
            )
            xi[i] = 1 - xi.sum()
            w[i] = local(i, total(share * model for share, model in zip(xi, before, strict=True)))
        W = total(p * model for p, model in zip(problem.importance, w, strict=True))
        yield np.stack([W, *w])
