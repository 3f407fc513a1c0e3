"""Adaptive clipping: its update rule by hand, its noise, and the quantile that it goes to."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import FedAvg, streams
from strategies.updates.clipping import AdaptiveClip
from strategies.updates.pipeline import LocalModel
from tests.strategies.parts import client


def rng() -> np.random.Generator:
    return streams.generator(1, "central-noise", 1)


def clipped(clip: AdaptiveClip, *norms: float) -> list[float]:
    """Put updates of these norms through; return what is left of them."""
    left = []
    for norm in norms:
        local = LocalModel(client(0), np.array([norm, 0.0]), np.zeros(2), bounded=True)
        clip(local)
        assert not local.bounded
        left.append(float(local.model[0]))
    return left


def test_a_round_by_hand():
    clip = AdaptiveClip(0.5)
    assert clipped(clip, 0.05, 0.1, 0.2, 0.3, 0.4) == pytest.approx([0.05, 0.1, 0.1, 0.1, 0.1])
    # b = 1, 1, 0, 0, 0, of which Σ (b − ½) = −½; n = 5, and σ_b = max(5/20, z)
    for noise, deviation in ((0.01, 0.25), (0.5, 0.5)):
        again = AdaptiveClip(0.5)
        clipped(again, 0.05, 0.1, 0.2, 0.3, 0.4)
        again.adapt(noise, 5.0, rng())
        within = 0.5 + (-0.5 + deviation * rng().standard_normal()) / 5
        assert 0 < within < 1
        assert again.norm == pytest.approx(0.1 * math.exp(-0.2 * (within - 0.5)), rel=1e-12)


def test_the_noise_of_the_sum_by_hand():
    # z = 1, n = 100: σ_b = 5, z_Δ = (1 − 1/100)^(−½); n = 3: σ_b = z, z_Δ = (1 − ¼)^(−½)
    clip = AdaptiveClip(0.5)
    assert clip.multiplier(1.0, 100.0) == pytest.approx(1.0050378)
    assert clip.multiplier(1.0, 3.0) == pytest.approx(1.1547005)


@given(st.floats(1e-3, 1e3), st.floats(1.0, 1e5))
def test_sum_and_count_together_are_one_release_with_the_noise_that_is_accounted_for(z, n):
    # The distance of a client from none, in deviations: S of z_Δ S, and ½ of σ_b.
    sigma = max(n / 20, z)
    distance = math.hypot(1 / AdaptiveClip(0.5).multiplier(z, n), 0.5 / sigma)
    assert distance == pytest.approx(1 / z, rel=1e-9)


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.8])
def test_it_goes_to_the_quantile(quantile):
    clip, drawn = AdaptiveClip(quantile), streams.generator(0, "lognormal-norms")
    norms = drawn.lognormal(1.0, 1.0, size=200)
    rates = []
    for number in range(200):
        clip.begin()
        clipped(clip, *norms)
        rates.append(float(np.mean(norms <= clip.norm)))
        clip.adapt(1.0, 200.0, streams.generator(0, "central-noise", number))
    assert np.mean(rates[100:]) == pytest.approx(quantile, abs=0.03)


def test_extreme_noise_moves_the_norm_by_a_factor_at_most():
    clip = AdaptiveClip(0.5)
    for number in range(5):
        before = clip.norm
        clip.adapt(1e6, 3.0, streams.generator(2, "central-noise", number))
        assert clip.norm / before == pytest.approx(
            math.exp(0.1), rel=1e-9
        ) or clip.norm / before == pytest.approx(math.exp(-0.1), rel=1e-9)


def test_a_round_that_counts_for_nothing_leaves_no_count():
    clip, other = AdaptiveClip(0.5), AdaptiveClip(0.5)
    clipped(clip, 9.0, 9.0)
    clip.begin()
    for each in (clip, other):
        clipped(each, 0.01)
        each.adapt(0.1, 1.0, rng())
    assert clip.norm == other.norm


def test_rounds_without_a_norm_have_the_adaptive_one_and_its_noise(federation, model, train_config):
    strategy = FedAvg(client_weights="uniform", dp="central", dp_noise_multiplier=30.0, seed=1)
    strategy.run_options.deterministic_noise = True
    result = strategy.start(federation(), model(*[1.0] * 20_000), num_rounds=1, train_config=train_config())
    noise = np.asarray(result.arrays["w"].numpy(), dtype=np.float64) - 1
    # z_Δ S / n = 30 · 1.1547 · .1 / 3 = 1.1547, with four standard errors
    assert noise.std() == pytest.approx(1.1547, rel=0.02)
    assert result.train_metrics_clientapp[1]["dp-clipping-norm"] == 0.1
    assert strategy.session.receiver.clip is not None
    assert strategy.session.receiver.clip.norm != 0.1
