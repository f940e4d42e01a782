"""What the target must compute, written down a second way: a whole text in one pass, with no cache, no rounds and no flushes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.kv_cache import dequantize_groups, quantize_groups
from pallas_kernels.formats.rounding import parameter_dtype
from pallas_kernels.rope_append import split_and_rotate
from qspec_jax.models.llama import AttendingCache, Llama


def one_bit(x: Array, low: Array, high: Array, dtype) -> tuple[Array, Array, Array, Array]:
    """A scheme for `quantization.SCHEMES`: one bit in both planes, so coarse that reading a wrong cache shows in tokens."""
    upper = jnp.where(x > (low + high) / 2, 15.0, 0.0)
    return upper, jnp.zeros_like(x), jnp.maximum((high - low) / 15, 1e-6), low


@dataclasses.dataclass(frozen=True)
class OnePass(AttendingCache):
    """Stands for a cache. The query at position t has t tokens before it: in a prompt of n[b] tokens it reads them all as they are,
    behind the prompt the oldest `max(0, t // G - 1) * G` of them quantized. scheme None: never quantized."""

    n: Int[Array, "B"]
    group_size: int
    scheme: str | None
    kv_heads: int

    def attend(self, layer: int, qkv: Array, cos: Array, sin: Array, *, view) -> tuple[Float[Array, "B T N H"], None, None]:
        q, k, v = split_and_rotate(qkv, cos, sin, kv_heads=self.kv_heads)
        B, T, K, H = k.shape
        G = self.group_size
        k, v, t = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), jnp.arange(T)
        coarse_k, coarse_v, quantized = k, v, jnp.zeros((B, T), int)
        if self.scheme is not None:
            groups = lambda x: x.reshape(B, K, T // G, G, H)
            codes = quantize_groups(groups(k), groups(v), scheme=self.scheme, dtype=parameter_dtype(k.dtype))
            coarse_k, coarse_v = (x.reshape(B, K, T, H) for x in dequantize_groups(*codes, planes=2, dtype=k.dtype))
            quantized = jnp.where(t < self.n[:, None], 0, jnp.maximum(0, t // G - 1) * G)
        coarse = (t < quantized[..., None])[:, None, None]  # B 1 1 T S
        heads = q.reshape(B, T, K, -1, H)
        logits = lambda keys: jnp.einsum("btkrh,bksh->bkrts", heads, keys) * H**-0.5
        weights = jnp.where(coarse, logits(coarse_k), logits(k))
        weights = jax.nn.softmax(jnp.where(t <= t[:, None], weights, -jnp.inf), -1)
        read = lambda mask, values: jnp.einsum("bkrts,bksh->btkrh", jnp.where(mask, weights, 0), values)
        return (read(coarse, coarse_v) + read(~coarse, v)).reshape(B, T, -1, H), None, None

    def advance(self, layers: tuple, tokens: int) -> "OnePass":
        return self


def target_logits(
    model: Llama, prompts: list[list[int]], new: list[list[int]], *, group_size: int, scheme: str | None
) -> list[Float[np.ndarray, "new V"]]:
    """Per prompt, the target's logits for each of its new tokens, given those before it."""
    texts = [prompt + tokens for prompt, tokens in zip(prompts, new)]
    length = -(-max(map(len, texts)) // group_size) * group_size
    tokens = jnp.array([text + [0] * (length - len(text)) for text in texts], jnp.int32)
    n = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    logits = np.asarray(_logits(model, tokens, n, group_size, scheme))
    return [row[len(prompt) - 1 : len(text) - 1] for row, prompt, text in zip(logits, prompts, texts)]


@functools.partial(jax.jit, static_argnums=(3, 4))
def _logits(model: Llama, tokens: Array, n: Array, group_size: int, scheme: str | None) -> Float[Array, "B T V"]:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model(tokens, positions, OnePass(n, group_size, scheme, model.config.num_kv_heads))[0]
