"""The acceptance that `qspec bench decode` simulates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qspec_jax.bench.simulated import SimulatedGreedy, rate_of_ratio, ratio_of_rate
from qspec_jax.decoding.sampling import Greedy, prompt_keys


@pytest.mark.parametrize("gamma", [1, 4, 7])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.912, 1.0])
def test_the_rate_gives_the_ratio(ratio, gamma):
    assert ratio_of_rate(rate_of_ratio(ratio, gamma), gamma) == pytest.approx(ratio, abs=1e-9)


def test_a_rate_of_one_half():
    # One in two is accepted, then one in four, one in eight.
    assert ratio_of_rate(0.5, 3) == pytest.approx((1 / 2 + 1 / 4 + 1 / 8) / 3)


verify = jax.jit(lambda sampler, *args: sampler.verify(*args))


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
def test_simulated_acceptance(rate):
    B, gamma, V = 2000, 3, 11
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((B, gamma + 1, V)), jnp.float32)
    drafts = jnp.zeros((B, gamma), jnp.int32)
    eligible = jnp.where(jnp.arange(B) % 2, gamma, 1)
    positions = jnp.broadcast_to(jnp.arange(gamma + 1), (B, gamma + 1))
    rest = (jnp.zeros((B, gamma, 0)), eligible, prompt_keys(jax.random.key(1), B), positions)
    accepted, after = verify(SimulatedGreedy(jnp.float32(rate)), logits, drafts, *rest)
    best = jnp.argmax(logits, -1)
    np.testing.assert_array_equal(after, jnp.take_along_axis(best, accepted[:, None], 1)[:, 0])
    odd, even = (np.asarray(accepted)[1::2], np.asarray(accepted)[::2])
    assert even.max(initial=0) <= 1
    assert abs(even.mean() - rate) < 0.06
    assert abs(odd.mean() - gamma * ratio_of_rate(rate, gamma)) < 0.12
    # Without drafts it is greedy decoding.
    nothing = (drafts[:, :0], rest[0][:, :0], eligible, rest[2], positions[:, :1])
    for simulated, greedy in zip(*(verify(s, logits[:, :1], *nothing) for s in (SimulatedGreedy(jnp.float32(rate)), Greedy()))):
        np.testing.assert_array_equal(simulated, greedy)


def test_a_level_below_has_a_rate_of_its_own():
    one, other = SimulatedGreedy(jnp.float32(0.9)), SimulatedGreedy(jnp.float32(0.9), jnp.float32(0.5))
    assert one.below().rate == one.rate and other.below().rate == 0.5 == other.below().below().rate
