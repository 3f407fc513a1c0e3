"""The problems' settings: for each method its source, its formula, what the paper leaves open, and the numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import arrivals, rounds
from .arrivals import by_harmonic_mean, in_speed_groups, in_two_phases, schedule

# In five of the ten rounds a client takes part that wasn't in the round before; the third has all.
PARTICIPANTS = [[0, 2, 3], [1, 2], [0, 1, 2, 3, 4], [4], [0, 3], [1, 4], [0, 1, 2], [2, 3, 4], [1], [0, 4]]
ALL_FIRST = [[0, 1, 2, 3, 4], *PARTICIPANTS[:2], *PARTICIPANTS[3:]]

# Seconds of each client's tasks, no two of which end at the same time. The fastest client has five tasks while the
# slowest has one.
SECONDS = [1.0, 1.37, 1.73, 2.91, 5.33]
IN_GROUPS, TASK_STEPS = in_speed_groups(SECONDS, 20, least=2, most=10, slack=1.2)

LOCAL = (
    "client i, from w ← W: v ← ρ v + g_i(w), w ← w − γ v, K_i times; g_i is the gradient over all of its rows"
)
STALENESS = "A contribution's staleness δ counts the new models since its client was sent its own."
SIZES = "p_i are by the number of rows; with participants S, d_i = p_i / Σ_S p_j."
EQUAL = "p_i = 1/C, as in the paper; with participants S, d_i = 1/|S|."


@dataclass(frozen=True)
class Setting:
    """The content of a problem's file beside its models.

    Attributes
    ----------
    rule : callable
        The method, a function of ``rounds`` or ``arrivals``.
    weights : str
        How p_i are set: ``samples``, ``uniform`` or ``adjacency``.
    steps : list
        The participants of each round, or the arrivals of each model.
    task_steps : list
        Local steps of each arrival if the server sets them; else empty.
    """

    rule: Callable[..., Any]
    source: str
    formula: Sequence[str]
    reading: str
    steps: Sequence[Sequence[Any]]
    weights: str = "uniform"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    momentum: float = 0.5
    local_steps: Sequence[int] = (4, 4, 4, 4, 4)
    personal: bool = False
    task_steps: Sequence[Sequence[int]] = ()

    @property
    def asynchronous(self) -> bool:
        """Whether work arrives, without rounds."""
        return self.rule.__module__ == arrivals.__name__


ADAPTIVE = {"server_lr": 0.05, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}
REDDI = "S. Reddi et al., Adaptive federated optimization, ICLR 2021, algorithm 2"
NO_CORRECTION = "There is no bias correction; m starts at 0 and v at τ². "

SETTINGS: dict[str, Setting] = {
    "fedavg": Setting(
        rounds.fedavg,
        "B. McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS "
        "2017, algorithm 1",
        [LOCAL, "server: W ← Σ_S d_i w_i"],
        SIZES,
        PARTICIPANTS,
        "samples",
    ),
    "fedprox": Setting(
        rounds.fedprox,
        "T. Li et al., Federated optimization in heterogeneous networks, MLSys 2020, algorithm 2 and equation 2",
        [
            "client i, from w ← W: v ← ρ v + g_i(w) + α (w − W), w ← w − γ v, K_i times",
            "server: W ← Σ_S d_i w_i",
        ],
        "The proximal term is α/2 ‖w − W‖². " + SIZES,
        PARTICIPANTS,
        "samples",
        {"alpha": 0.5},
    ),
    "spectral": Setting(
        rounds.spectral,
        "E. Buttaci, 2024, equation 4.6 and algorithm 2; definitions 3.2 and 3.4",
        [
            "m_i: the first right singular vector of X_i, not centred, with a sum ≥ 0; A_ij = −ln(‖m_i − m_j‖²/4) "
            "for i ≠ j, A_ii = 0; p_ij = A_ij / Σ A, p_i = Σ_j p_ij",
            "server: u_i = Σ_j (p_ij / p_i) w_j, w_j the last local model of client j",
            "client i, from w ← W: v ← ρ v + g_i(β w + (1 − β) u_i), w ← w − γ v, K_i times",
            "server: W ← Σ_S d_i w_i, d_i = p_i / Σ_S p_j",
        ],
        "A client that doesn't take part keeps its last local model; before its first round that is the first W.",
        PARTICIPANTS,
        "adjacency",
        {"beta": 0.6},
    ),
    "fednova": Setting(
        rounds.fednova,
        "J. Wang et al., Tackling the objective inconsistency problem in heterogeneous federated optimization, "
        "NeurIPS 2020, equation 9 and section 3",
        [
            LOCAL,
            "‖a_i‖₁ = (K_i − ρ (1 − ρ^K_i) / (1 − ρ)) / (1 − ρ)",
            "server: W ← W + τ_eff Σ_S d_i Δ_i / ‖a_i‖₁, τ_eff = Σ_S d_i ‖a_i‖₁",
        ],
        SIZES,
        PARTICIPANTS,
        "samples",
        local_steps=(6, 5, 4, 2, 1),
    ),
    "scaffold": Setting(
        rounds.scaffold,
        "S. P. Karimireddy et al., SCAFFOLD: stochastic controlled averaging for federated learning, ICML 2020, "
        "algorithm 1 with option II of equation 4, and equation 5",
        [
            "client i, from y ← W: y ← y − γ (g_i(y) − c_i + c), K_i times; c_i⁺ = c_i − c + (W − y) / (K_i γ)",
            "server: W ← W + (1/|S|) Σ_S (y_i − W), c ← c + (1/C) Σ_S (c_i⁺ − c_i)",
        ],
        "c and all c_i start at 0, η_g = 1. There is no momentum: with it (W − y) / (K_i γ) is no mean of gradients.",
        PARTICIPANTS,
        momentum=0.0,
        local_steps=(6, 5, 4, 4, 3),
    ),
    "feddyn": Setting(
        rounds.feddyn,
        "D. A. E. Acar et al., Federated learning based on dynamic regularization, ICLR 2021, algorithm 1",
        [
            "client i, from w ← W: v ← ρ v + g_i(w) − h_i + α (w − W), w ← w − γ v, K_i times; "
            "h_i ← h_i − α (w_i − W)",
            "server: h ← h − α (1/C) Σ_S (w_i − W), W ← (1/|S|) Σ_S w_i − h/α",
        ],
        "h and all h_i start at 0. K_i local steps take the place of the exact minimum.",
        PARTICIPANTS,
        parameters={"alpha": 0.5},
    ),
    "mifa": Setting(
        rounds.mifa,
        "X. Gu et al., Fast federated learning in the presence of arbitrary device unavailability, NeurIPS 2021, "
        "algorithm 1",
        [LOCAL, "server: G_i ← (W − w_i) / γ for i in S; W ← W − γ (1/C) Σ_i G_i over all clients"],
        "All clients take part in the first round, as in the paper.",
        ALL_FIRST,
    ),
    "ditto": Setting(
        rounds.ditto,
        "T. Li et al., Ditto: fair and robust federated learning through personalization, ICML 2021, algorithm 1",
        [
            LOCAL
            + "; and from its own v_i, as many steps along g_i(v_i) + λ (v_i − W), with momentum of their own",
            "server: W ← Σ_S d_i w_i",
        ],
        "Both are trained from the W that was sent; v_i starts as the first W. " + SIZES,
        ALL_FIRST,
        "samples",
        {"lambda": 0.5},
        personal=True,
    ),
    "fedamp": Setting(
        rounds.fedamp,
        "Y. Huang et al., Personalized cross-silo federated learning on non-IID data, AAAI 2021, equations 2 to 5 "
        "and algorithm 1, A(x) = 1 − e^(−x/σ)",
        [
            "server: u_i = Σ_j ξ_ij w_j, ξ_ij = (α_k/σ) e^(−‖w_i − w_j‖²/σ) for j ≠ i, ξ_ii = 1 − Σ_j≠i ξ_ij",
            "client i, from w ← u_i: v ← ρ v + g_i(w) + μ (w − u_i), w ← w − γ v, K_i times; w_i ← w",
            "the global model is (1/C) Σ w_i",
        ],
        "All w_i start as the first W. K_i local steps take the place of the exact minimum; μ is the paper's λ/α_k.",
        ALL_FIRST,
        parameters={"sigma": 2.0, "alpha_k": 0.3, "mu": 0.5},
        personal=True,
    ),
    "async-fedavg": Setting(
        arrivals.async_fedavg,
        "Y. Fraboni et al., A general theory for federated optimization with asynchronous and heterogeneous clients "
        "updates, JMLR 2023, equation 36",
        [LOCAL, "server, at every arrival: W ← W + η_g d_i Δ_i, d_i = (Σ_j 1/τ_j) τ_i p_i"],
        "τ_i are the task-seconds, and p_i are by the number of rows. " + STALENESS,
        schedule(SECONDS, 32),
        "samples",
        {"server_lr": 0.2},
    ),
    "fedfix": Setting(
        arrivals.fedfix,
        "Y. Fraboni et al., A general theory for federated optimization with asynchronous and heterogeneous clients "
        "updates, JMLR 2023, equation 40",
        [LOCAL, "server, every Δt: W ← W + η_g Σ d_i Δ_i of what has arrived since, d_i = ⌈τ_i/Δt⌉ p_i"],
        "τ_i are the task-seconds, and p_i are by the number of rows. " + STALENESS,
        schedule(SECONDS, 12, interval=1.5),
        "samples",
        {"server_lr": 1.0, "interval": 1.5},
    ),
    "fedbuff": Setting(
        arrivals.fedbuff,
        "J. Nguyen et al., Federated learning with buffered asynchronous aggregation, AISTATS 2022, algorithm 1",
        [LOCAL, "server, of m arrivals: W ← W + η_g (1/m) Σ s(δ_i) Δ_i, s(δ) = (1 + δ)^(−1/2)"],
        "Δ_i is relative to the model that the client was sent. A client whose work waits begins anew with the next "
        "model. " + STALENESS,
        schedule(SECONDS, 14, buffer=2),
        parameters={"server_lr": 1.0, "m": 2},
    ),
    "fedasync": Setting(
        arrivals.fedasync,
        "C. Xie et al., Asynchronous federated optimization, 2019, algorithm 1, option I",
        [LOCAL, "server, at every arrival: W ← (1 − α_t) W + α_t w_i, α_t = α (δ + 1)^(−a)"],
        "w_i is the client's whole model. " + STALENESS,
        schedule(SECONDS, 32),
        parameters={"alpha": 0.6, "a": 0.5},
    ),
    "delay-adaptive": Setting(
        arrivals.delay_adaptive,
        "A. Koloskova et al., Sharper convergence guarantees for asynchronous SGD for distributed and federated "
        "learning, NeurIPS 2022; K. Mishchenko et al., Asynchronous SGD beats minibatch SGD under arbitrary delays, "
        "NeurIPS 2022",
        [LOCAL, "server, at every arrival: W ← W + η_g min(1, τ_c/δ) Δ_i"],
        "τ_c, the concurrency, is the number of clients. " + STALENESS,
        schedule(SECONDS, 32),
        parameters={"server_lr": 0.2, "tau_c": 5},
    ),
    "ringmaster": Setting(
        arrivals.ringmaster,
        "A. Maranjyan et al., Ringmaster ASGD: the first asynchronous SGD with optimal time complexity, ICML 2025, "
        "algorithm 4",
        [LOCAL, "server, at every arrival: W ← W + η_g Δ_i if δ < R, else Δ_i is thrown away"],
        "A client is sent the present model either way. " + STALENESS,
        schedule(SECONDS, 30, stale_from=3),
        parameters={"server_lr": 0.2, "R": 3},
    ),
    "rennala": Setting(
        arrivals.rennala,
        "A. Tyurin & P. Richtárik, Optimal time complexities of parallel stochastic optimization methods under a "
        "fixed computation model, NeurIPS 2023, section 4",
        [LOCAL, "server: W ← W + η_g (1/B) Σ Δ_i of the first B arrivals with δ = 0; others are thrown away"],
        "A client goes on with the model that it has until its work comes too late, and is then sent the present "
        "one. " + STALENESS,
        schedule(SECONDS, 10, buffer=4, stale_from=1, trains_while_waiting=True),
        parameters={"server_lr": 1.0, "B": 4},
    ),
    "ca2fl": Setting(
        arrivals.ca2fl,
        "Y. Wang et al., Tackling the data heterogeneity in asynchronous federated learning with cached update "
        "calibration, ICLR 2024, algorithm 2",
        [
            LOCAL,
            "server, of m arrivals: W ← W + η_g (h + (1/m) Σ (Δ_i − h_i)), h = (1/C) Σ_j h_j; then h_i ← Δ_i",
        ],
        "All h_i start at 0. A client whose work waits begins anew with the next model. " + STALENESS,
        schedule(SECONDS, 14, buffer=2),
        parameters={"server_lr": 1.0, "m": 2},
    ),
    "ace": Setting(
        arrivals.ace,
        "X. Chang et al., Mitigating participation imbalance bias in asynchronous federated learning, arXiv "
        "2511.19066, 2025",
        [LOCAL, "server, at every arrival: h_i ← Δ_i, W ← W + η_g (1/C) Σ_j h_j"],
        "The first model is made when all clients have answered once; until then they wait. " + STALENESS,
        schedule(SECONDS, 24, first=len(SECONDS)),
        parameters={"server_lr": 0.2},
    ),
    "fadas": Setting(
        arrivals.fadas,
        "Y. Wang et al., FADAS: towards federated adaptive asynchronous optimization, ICML 2024, algorithm 1",
        [
            LOCAL,
            "server, of m arrivals, Δ = (1/m) Σ Δ_i: M ← β₁ M + (1 − β₁) Δ, V ← β₂ V + (1 − β₂) Δ², "
            "V̂ ← max(V̂, V), W ← W + η_g / max(1, δ_max/τ_c) · M / (√V̂ + τ)",
        ],
        "M starts at 0, V and V̂ at τ². The factor max(1, δ_max/τ_c) is a reading of the delay-adaptive step, whose "
        "threshold the paper leaves open; τ_c is the number of clients. " + STALENESS,
        schedule(SECONDS, 14, buffer=2),
        parameters={**ADAPTIVE, "m": 2, "tau_c": 5},
    ),
    "fedavgm": Setting(
        rounds.fedavgm,
        "T.-M. H. Hsu, H. Qi & M. Brown, Measuring the effects of non-identical data distribution for federated "
        "visual classification, 2019, section 3.3",
        [LOCAL, "server: Δ = Σ_S d_i w_i − W, u ← β u + Δ, W ← W + η_g u"],
        SIZES,
        PARTICIPANTS[:5],
        "samples",
        {"server_lr": 1.0, "beta": 0.9},
    ),
    "fedadagrad": Setting(
        rounds.fedadagrad,
        REDDI,
        [
            LOCAL,
            "server: Δ = Σ_S d_i w_i − W, m ← β₁ m + (1 − β₁) Δ, v ← v + Δ², W ← W + η_g m / (√v + τ)",
        ],
        NO_CORRECTION + SIZES,
        PARTICIPANTS,
        "samples",
        ADAPTIVE,
    ),
    "fedadam": Setting(
        rounds.fedadam,
        REDDI,
        [
            LOCAL,
            "server: Δ = Σ_S d_i w_i − W, m ← β₁ m + (1 − β₁) Δ, v ← β₂ v + (1 − β₂) Δ², W ← W + η_g m / (√v + τ)",
        ],
        NO_CORRECTION + SIZES,
        PARTICIPANTS,
        "samples",
        ADAPTIVE,
    ),
    "fedyogi": Setting(
        rounds.fedyogi,
        REDDI,
        [
            LOCAL,
            "server: Δ = Σ_S d_i w_i − W, m ← β₁ m + (1 − β₁) Δ, v ← v − (1 − β₂) Δ² sign(v − Δ²), "
            "W ← W + η_g m / (√v + τ)",
        ],
        NO_CORRECTION + SIZES,
        PARTICIPANTS,
        "samples",
        ADAPTIVE,
    ),
    "fedvarp": Setting(
        rounds.fedvarp,
        "D. Jhunjhunwala et al., FedVARP: tackling the variance due to partial client participation in federated "
        "learning, UAI 2022, algorithm 1",
        [
            LOCAL,
            "server: v = (1/C) Σ_j y_j + (1/|S|) Σ_S (Δ_i − y_i), W ← W + v; then y_i ← Δ_i for i in S",
        ],
        "All y_i start at 0, η_g = 1. " + EQUAL,
        PARTICIPANTS,
    ),
    "fedstale": Setting(
        rounds.fedstale,
        "A. Rodio & G. Neglia, FedStale: leveraging stale client updates in federated learning, ECAI 2024",
        [
            LOCAL,
            "server: W ← W + (1/|S|) Σ_S (Δ_i − β h_i) + β (1/C) Σ_j h_j; then h_i ← Δ_i for i in S",
        ],
        "All h_i start at 0. The paper divides by a client's probability to take part, here |S|/C. " + EQUAL,
        PARTICIPANTS,
        parameters={"beta": 0.4},
    ),
    "fedau": Setting(
        rounds.fedau,
        "S. Wang & M. Ji, A lightweight method for tackling unknown participation statistics in federated averaging, "
        "ICLR 2024, algorithms 1 and 2",
        [
            LOCAL,
            "server: W ← W + Σ_S p_i ω_i Δ_i, ω_i the mean of the intervals of client i, in rounds, that ended "
            "before this round, 1 before the first; an interval ends with a round of the client's, or after K rounds",
        ],
        "The first interval begins with the first round. p_i are by the number of rows.",
        PARTICIPANTS,
        "samples",
        {"K": 3},
    ),
    "aced": Setting(
        arrivals.aced,
        "X. Chang et al., Mitigating participation imbalance bias in asynchronous federated learning, arXiv "
        "2511.19066, 2025, the delay-aware variant of ACE",
        [
            LOCAL,
            "server, at every arrival: h_i ← Δ_i, W ← W + η_g (1/|A|) Σ_A h_j, A the clients whose h_j arrived at "
            "most τ models ago",
        ],
        "That A depends on the age since the arrival is a reading: of the paper the abstract was read. The first "
        "model is made when all clients have answered once; until then they wait. " + STALENESS,
        schedule(SECONDS, 24, first=len(SECONDS)),
        parameters={"server_lr": 0.2, "tau": 3},
    ),
    "ringleader": Setting(
        arrivals.ringleader,
        "A. Maranjyan & P. Richtárik, Ringleader ASGD: the first asynchronous SGD with optimal time complexity under "
        "data heterogeneity, arXiv 2509.22860, 2025, algorithm 1",
        [
            LOCAL,
            "server, phase 1: G_i ← G_i + Δ_i, b_i ← b_i + 1; the client goes on with the model that it has; when "
            "all b_i ≥ 1, the client that came last makes a step and is sent the new model, and phase 2 begins",
            "phase 2: the same sums, a step and the new model for a client without a step in this round; of a client "
            "with one G⁺_i ← G⁺_i + Δ_i, b⁺_i ← b⁺_i + 1, and it goes on; after C steps G, b ← G⁺, b⁺, G⁺, b⁺ ← 0, "
            "and phase 1 begins",
            "a step: W ← W + η_g (1/C) Σ_i G_i / b_i",
        ],
        "All sums start at 0. " + STALENESS,
        in_two_phases(SECONDS, 20),
        parameters={"server_lr": 0.2},
    ),
    "area": Setting(
        arrivals.area,
        "C. Iakovidou & K. Kim, Asynchronous federated stochastic optimization for heterogeneous objectives under "
        "arbitrary delays, arXiv 2405.10123, 2024, algorithm 1",
        [
            LOCAL,
            "client i sends w_i − y_i, and then y_i ← w_i",
            "server, of m arrivals: W ← W + (1/C) Σ (w_i − y_i)",
        ],
        "All y_i start as the first W. A client whose work waits begins anew with the next model. "
        + STALENESS,
        schedule(SECONDS, 14, buffer=2),
        parameters={"m": 2},
    ),
    "async-spectral": Setting(
        arrivals.async_spectral,
        "this repository's own method, strategies/methods/async_spectral.py: E. Buttaci, 2024, algorithm 2, with the "
        "server of J. Nguyen et al., AISTATS 2022, and the weights of Y. Fraboni et al., JMLR 2023, section 4.5",
        [
            "A_ij, p_i, and the local steps with u_i as for spectral",
            "u_i, when client i begins: Σ_j A_ij s(a_j) w_j / Σ_j A_ij s(a_j), w_j the last local model of client j, "
            "s(a) = (1 + a)^(−1/2), a_j the models since the one that w_j went into",
            "server, of m arrivals: W ← W + η_g Σ d_i Δ_i, d_i = p_i N / N_i; N models, of which N_i have client i",
        ],
        "Before a client's first local model w_j is the first W. A client whose work waits begins anew with the next "
        "model.",
        schedule(SECONDS, 14, buffer=2),
        "adjacency",
        {"server_lr": 0.5, "m": 2, "beta": 0.6, "a": 0.5},
    ),
    "fedcompass": Setting(
        arrivals.fedcompass,
        "Z. Li et al., FedCompass: efficient cross-silo federated learning on heterogeneous client devices using a "
        "computing power-aware scheduler, ICLR 2024, algorithm 1, with the rules of its authors' scheduler in APPFL",
        [
            "client i, from w ← W: v ← ρ v + g_i(w), w ← w − γ v, Q times, as the server asks",
            "server, of a client's first work, and then when all clients of a group have come: "
            "W ← W + η_g Σ p_i s(δ_i) Δ_i, s(δ) = (1 + δ)^(−1/2); they are assigned again, the fastest first",
            "client i with σ_i seconds a step, at time t, is assigned to the group with the largest "
            "Q = ⌊(T − t)/σ_i⌋ in Q_min to Q_max, T its expected time",
            "without one it founds a group with the largest Q = ⌊(T' + Q_max σ − t)/σ_i⌋ ≤ Q_max, at least Q_min, "
            "over the groups whose latest time T' is to come and whose fastest client has σ; Q_max without any; "
            "T = t + Q σ_i, T' = t + λ Q σ_i",
        ],
        "All begin with Q_max steps. Of groups with equal Q the one that was founded last is taken. A task of Q "
        "steps takes Q/Q_max of the client's seconds, so that nobody is late. " + STALENESS,
        IN_GROUPS,
        weights="samples",
        parameters={"server_lr": 1.0, "Q_min": 2, "Q_max": 10, "lambda": 1.2},
        local_steps=(10, 10, 10, 10, 10),
        task_steps=TASK_STEPS,
    ),
    "fedexp": Setting(
        rounds.fedexp,
        "D. Jhunjhunwala, S. Wang and G. Joshi, FedExP: speeding up federated averaging via extrapolation, ICLR "
        "2023, algorithm 1",
        [
            LOCAL,
            "server: Δ = Σ_S d_i w_i − W, η_g = max(1, Σ_S d_i ‖w_i − W‖² / (2 (‖Δ‖² + ε))), W ← W + η_g Δ",
            "result: the mean of the last two W",
        ],
        "The model of a round is the result after it. " + EQUAL,
        PARTICIPANTS,
        parameters={"epsilon": 1e-3},
    ),
    "qfedavg": Setting(
        rounds.qfedavg,
        "T. Li et al., Fair resource allocation in federated learning, ICLR 2020, algorithm 2",
        [
            LOCAL,
            "h_i = q F_i^(q−1) ‖L Δ_i‖² + L F_i^q, Δ_i = w_i − W",
            "server: W ← W + Σ_S F_i^q L Δ_i / Σ_S h_i",
        ],
        "L = 1/γ, as in the paper. F_i = f_i(W) is the loss of the model that the client was sent. In the paper "
        "clients are drawn by p_i, which is therefore in no sum.",
        PARTICIPANTS,
        parameters={"q": 1.5, "L": 1 / 0.2},
    ),
    "diloco": Setting(
        rounds.diloco,
        "A. Douillard et al., DiLoCo: distributed low-communication training of language models, 2023, algorithm 1",
        [LOCAL, "server: Δ = Σ_S d_i w_i − W, u ← β u + Δ, W ← W + η_g (Δ + β u)"],
        "Clients take steps with momentum, not AdamW. " + SIZES,
        PARTICIPANTS[:5],
        "samples",
        {"server_lr": 0.7, "beta": 0.9},
    ),
    "malenia": Setting(
        arrivals.malenia,
        "A. Tyurin & P. Richtárik, Optimal time complexities of parallel stochastic optimization methods under a "
        "fixed computation model, NeurIPS 2023, method 6",
        [
            LOCAL,
            "B_i is the number of arrivals of client i with δ = 0; others are thrown away",
            "server, when B_i ≥ 1 for all i and (1/C Σ_i 1/B_i)^(−1) ≥ S/C: "
            "W ← W + η_g (1/C) Σ_i (1/B_i) Σ_b Δ_ib",
        ],
        "A client goes on with the model that it has until its work comes too late, and is then sent the present "
        "one. " + STALENESS,
        by_harmonic_mean(SECONDS, 8, 10),
        parameters={"server_lr": 1.0, "S": 10},
    ),
    "fedawe": Setting(
        rounds.fedawe,
        "M. Xiang et al., Efficient federated learning against heterogeneous and non-stationary client "
        "unavailability, NeurIPS 2024, algorithm 1",
        [
            "client i in S, round t: w ← x_i; v ← ρ v + g_i(w), w ← w − γ v, K_i times; "
            "x_i† = x_i + η_g (t − τ_i) (w − x_i)",
            "server: W = (1/|S|) Σ_S x_i†; then x_i ← W, τ_i ← t for i in S; the others keep x_i and τ_i",
        ],
        "All x_i start as the first W, and all τ_i at 0; the first round is 1. The model of a round is W. p_i = 1/C, "
        "as in the paper.",
        PARTICIPANTS,
        parameters={"server_lr": 0.7},
    ),
}
