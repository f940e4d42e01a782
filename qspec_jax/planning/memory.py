"""What fits into a device's memory: weights, what a draft adds to them, caches, and what prefill and decoding hold besides."""

import dataclasses
from collections.abc import Callable, Sequence

from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.models.config import LlamaConfig
from qspec_jax.planning.heads import head_memory
from qspec_jax.planning.operations import head_bytes, int4_bytes, layer_kinds, layer_weight_bytes, model_bytes
from qspec_jax.planning.steps import OutlinedDraft

# Arrays that prefill holds for each token besides the cache: of the hidden state's width, and of a layer's keys and values. Those of a full
# cache are fitted on two measured rows of docs/measurements/2026-11.md; the others on the memory of programs that XLA compiled for an H100
# (Llama-2-7B and Llama-3.1-8B, 131,072 tokens), where a prompt is read in three programs for caches in host memory.
PREFILL_ARRAYS = {
    "full": (2.13, 0.53),
    "int8": (2.4, 0.84),
    **dict.fromkeys(("full:host=all", "int8:host=lower", "int8:host=all"), (2.4, 0.96)),
    # Assumed.
    **dict.fromkeys(("kivi", "specache", "specache:host=store", "streaming-llm", "h2o"), (2.4, 0.84)),
}
MOST = 1 << 26  # tokens or rows that are looked for


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of weights, of what the draft adds to them, of the target's cache on the device and in host memory, and of what is held
    besides: by prefill, or by decoding where that is more. total: on the device."""

    weights: float
    draft: float
    cache: float
    besides: float
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.draft + self.cache + self.besides


def memory_of(
    config: LlamaConfig, cache: CacheConfig, drafts: Sequence[OutlinedDraft], *, batch: int, context: int, new_tokens: int, gamma: int
) -> Memory:
    """The memory that decoding takes, all prompts prefilled at once, in bfloat16. drafts: all that a round may ask."""
    parts = [(part, gamma + each.beyond) for each in drafts for part in each.parts]
    steps = [(part, appended) for part, appended in parts if part.model is not None]
    shared = [each for each, _ in steps if not each.model.own_model]
    # Drafts of the target's own model have its INT4 weights in common, and those that step the same layers their head too.
    own = [i for i, bits in enumerate(zip(*(each.weight_bits for each in shared))) if 4 in bits]
    in_target = config.int4_weights or config.nested_weights
    draft = 0 if in_target else sum(count * int4_bytes(config, i) for i, count in layer_kinds(config, own).items())
    made = {each.weight_bits for each in shared if each.head_bits == 8}
    decoding = 0 if config.int8_head else len(made) * head_bytes(config, 8)  # made after prefill
    shapes = cache.outline(config, context + new_tokens, gamma)
    for each, appended in steps:
        own = each.model.step.model.config
        if each.model.own_model:
            changed = (layer_weight_bytes(own, bits, i) - layer_weight_bytes(own, 16, i) for i, bits in enumerate(each.weight_bits))
            draft += model_bytes(own) + sum(changed)
        if each.model.own_cache:
            held, cache_read = each.model.holds(context, context + new_tokens, appended), each.model.cache_read(shapes)
            if each.model.own_model:
                of_layers = enumerate(cache_read.reads_of_layer(i, held, held.full) for i in range(own.num_layers))
            else:  # the rings of other layers are the target's
                of_layers = ((i, held) for i in cache_read.full_layers)
            draft += batch * sum(cache_read.bytes_of_reads(i, reads)[0] for i, reads in of_layers)
    heads = (part.head for part, _ in parts if part.head is not None)
    draft += sum(head_memory(head, batch=batch, appended=gamma + 1, int8_head=config.int8_head) for head in heads)
    host = batch * shapes.num_host_bytes
    # While a layer is computed, the next is copied. The last one without a sliding window is copied if any is.
    reads = shapes.reads(BOTH_PLANES, context)
    copied = max((shapes.bytes_of_reads(layer, reads)[1] for layer in shapes.full_layers[-1:]), default=0)
    besides = max(prefill_bytes(config, cache.name, batch=batch, context=context), decoding + 2 * batch * copied)
    return Memory(model_bytes(config), draft, batch * shapes.num_bytes - host, besides, host)


def prefill_bytes(config: LlamaConfig, cache: str, *, batch: int, context: int) -> float:
    """What prefill holds besides weights and cache. cache: its `CacheConfig.name`, a key of `PREFILL_ARRAYS`."""
    wide, pairs = PREFILL_ARRAYS[cache]
    keys = 2 * config.num_kv_heads * config.head_dim
    return 2 * batch * context * (wide * max(config.hidden_size, config.num_heads * config.head_dim) + pairs * keys)


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
