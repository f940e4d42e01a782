"""Rotary position embedding: default, linear, dynamic NTK, YaRN, LongRoPE and Llama 3 frequencies.

Dynamic and longrope frequencies depend on the length of a token's sequence. `lengths` holds it for each token: its position + 1 while
decoding, the whole prompt's length in prefill, as in transformers.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from qspec_jax.models.rope_config import RopeConfig


def cos_sin(
    rope: RopeConfig, head_dim: int, max_positions: int, positions: Int[Array, "B T"], lengths: Int[Array, "B T"]
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosine and sine, float32, of each token's angles (half: head_dim / 2), times the type's attention factor.

    Channels are paired as `channel_order` orders them; the angles of pairs that are not rotated are 0.

    lengths: the length of each token's sequence, for the types whose frequencies depend on it.
    """
    rotated = rope.rotary_dim(head_dim)
    # XLA takes one launch for cosines and sines only where both read an array that is no constant.
    frequencies = lax.optimization_barrier(_inverse_frequencies(rope, rotated, max_positions, lengths))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor
    if rotated == head_dim:
        return cos, sin
    others = (*angles.shape[:-1], (head_dim - rotated) // 2)
    return jnp.concatenate([cos, jnp.ones(others, cos.dtype)], -1), jnp.concatenate([sin, jnp.zeros(others, sin.dtype)], -1)


def channel_order(rope: RopeConfig, head_dim: int) -> np.ndarray | None:
    """The order of a head's channels in which channel i of the first half and channel i of the second are a pair; None if it is theirs.

    Queries and keys in this order have the products that they have in the checkpoint's order.
    """
    rotated = rope.rotary_dim(head_dim)
    if rotated == head_dim and not rope.interleaved:
        return None
    channels, others = np.arange(rotated), np.arange(rotated, head_dim)
    first, second = (channels[::2], channels[1::2]) if rope.interleaved else np.split(channels, 2)
    return np.concatenate([first, others[: len(others) // 2], second, others[len(others) // 2 :]])


def query_scale(rope: RopeConfig, positions: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The number by which queries at these positions are multiplied, in float32; see `RopeConfig.query_scale_beta`."""
    return 1 + rope.query_scale_beta * jnp.log1p((positions // rope.original_max_position_embeddings).astype(jnp.float32))


def unrotated(cos: Float[Array, "*b half"], sin: Float[Array, "*b half"]) -> tuple[Float[Array, "*b half"], Float[Array, "*b half"]]:
    """The cosines and sines, of the same shape, that rotate nothing: for a layer without RoPE."""
    return jnp.ones_like(cos), jnp.zeros_like(sin)


def _inverse_frequencies(rope: RopeConfig, head_dim: int, max_positions: int, lengths: Array) -> Array | np.ndarray:
    """The angle per position of each pair of channels, in radians, [half], or [B, T, half] if it depends on the lengths.

    head_dim: the number of channels that are rotated.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    periods = np.float32(rope.rope_theta) ** exponents
    plain = 1.0 / periods
    match rope.rope_type:
        case "default":
            return plain
        case "linear":
            return plain / np.float32(rope.factor)
        case "dynamic":
            length = jnp.maximum(lengths, max_positions).astype(jnp.float32)[..., None]
            stretch = rope.factor * length / max_positions - (rope.factor - 1)
            return 1.0 / (rope.rope_theta * stretch ** (head_dim / (head_dim - 2))) ** exponents
        case "yarn":
            return _yarn(rope, head_dim, plain)
        case "longrope":
            # Multiplied and rounded in transformers' order: at 100,000 tokens the last bit is a hundredth of a radian.
            short, long = (1.0 / (np.asarray(f, np.float32) * periods) for f in (rope.short_factor, rope.long_factor))
            return jnp.where(lengths[..., None] > rope.original_max_position_embeddings, long, short)
        case "llama3":
            return _llama3(rope, plain)
    raise AssertionError(f"rope type {rope.rope_type} has no frequencies; `RopeConfig` should have refused it")


def _yarn(rope: RopeConfig, head_dim: int, plain: np.ndarray) -> np.ndarray:
    """YaRN frequencies (arXiv 2309.00071, section 3.2): interpolated for slow channels, unchanged for fast ones."""

    def channel(rotations: float) -> float:
        wavelength = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.rope_theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # 0.001 for an empty range only; a reversed one, from extreme settings, remains as in transformers.
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low or 0.001), 0, 1)
    return (plain / np.float32(rope.factor) * ramp + plain * (1 - ramp)).astype(np.float32)


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Llama 3.1's frequencies: low ones are divided by the factor, high ones unchanged, those between blended."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    blend = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return ((1 - blend) * plain / rope.factor + blend * plain).astype(np.float32)
