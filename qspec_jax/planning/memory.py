"""What fits into a device's memory: weights, what a draft adds to them, caches, and what prefill and decoding hold besides."""

import dataclasses
from collections.abc import Callable

from qspec_jax.caches.registry import CacheConfig
from qspec_jax.models.config import LlamaConfig
from qspec_jax.planning.operations import cache_bytes, cache_bytes_read, head_bytes, int4_bytes, model_bytes
from qspec_jax.planning.steps import StepReads

# What prefill holds for each token besides the cache, fitted on two measured rows of docs/results.md: so many arrays as wide as the hidden
# state, and so many of a layer's keys and values. Filling a quantized cache keeps more of the latter.
PREFILL_ARRAYS = {"full": (2.13, 0.53), "int8": (1.72, 1.91)}
MOST = 1 << 26  # tokens or rows that are looked for


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of weights, of what the draft adds to them, of the target's cache, and of what is held besides: by prefill, or by decoding
    where that is more."""

    weights: float
    draft: float
    cache: float
    besides: float

    @property
    def total(self) -> float:
        return self.weights + self.draft + self.cache + self.besides


def memory_of(
    config: LlamaConfig, cache: CacheConfig, reads: StepReads | None, *, batch: int, context: int, new_tokens: int, gamma: int
) -> Memory:
    """The memory that decoding takes, all prompts prefilled at once, in bfloat16. reads: a draft's step; None without one."""
    wide, pairs = PREFILL_ARRAYS["int8" if cache.kind != "full" else "full"]
    keys = 2 * config.num_kv_heads * config.head_dim
    prefill = 2 * batch * context * (wide * max(config.hidden_size, config.num_heads * config.head_dim) + pairs * keys)
    draft = decoding = 0.0
    if reads is not None:
        draft = sum(layer.weight_bits == 4 for layer in reads.layers) * int4_bytes(config)
        if reads.own_cache:  # it keeps what it reads
            draft += batch * sum(cache_bytes_read(config, layer, cache.group_size_for(config.head_dim)) for layer in reads.layers)
        decoding = head_bytes(config, reads.head_bits) if reads.head_bits == 8 else 0.0  # made after prefill
    kept = cache_bytes(config, cache, batch=batch, capacity=context + new_tokens, gamma=gamma)
    return Memory(model_bytes(config), draft, kept, max(prefill, decoding))


def largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, 0 if not even 1 does; what fits a number fits all smaller ones."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
