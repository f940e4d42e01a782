"""Which tokens of each KV head have the largest shares of attention, on NVIDIA Hopper: one block for each KV head.

Shares are positive, so that their bits order them as integers. The block first takes the largest share of each tile of 32 tokens, reading
all weights once. The k largest shares are in the k tiles whose own largest come first, and only these tiles are read again. In both steps
the k-th largest is found two bits at a time: all warps count how many numbers reach a bound, until exactly k do. Of equal shares the first
are taken.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.attention.mosaic_low_bits_plan import TILE
from pallas_kernels.dispatch import no_mosaic_gpu
from pallas_kernels.gpu.launch import launch, lowered_once
from pallas_kernels.gpu.layout import ROOM
from pallas_kernels.replaced_attention.mosaic_choice_plan import MAX_ENTRIES, MAX_HEADS, Plan


def unsupported(size: int, heads: int, replaced: int, k: int) -> str | None:
    """Why this kernel cannot run on such shapes here, or None. See `Plan`."""
    if reason := no_mosaic_gpu():
        return reason
    if not 1 <= heads <= MAX_HEADS:
        return f"supports 1 to {MAX_HEADS} query heads of a KV head, not {heads}"
    if size == 0 or size % TILE:
        return f"supports tokens in codes by tiles of {TILE}, not {size} tokens"
    if not replaced or not k:
        return "needs room for a replaced token, and at least one to choose"
    plan = Plan(1, 1, size, heads, heads, 1, replaced, k)
    if max(plan.tiles, plan.candidates) > MAX_ENTRIES:
        return f"supports up to {MAX_ENTRIES} tiles of {TILE} tokens, and tokens of k tiles, not {plan.tiles} and {plan.candidates}"
    if (needed := plan.shared.total) > ROOM:
        return f"supports shapes that need up to {ROOM} bytes of shared memory, not {needed}"
    return None


def choose_tokens(found: dict[str, Array], positions: Int[Array, "B K n"], quantized: Int[Array, "B"], k: int) -> Int[Array, "B K k"]:
    """The positions of the k tokens of each KV head that have the largest shares of the last token's attention, each once, in the order of
    positions, followed by -1 where a row has fewer tokens. Of equal shares the first are taken.

    A token's share is the sum over heads of its part of all weights. Each part counts as at least 2^MIN_LOG_SHARE (partials.py), and NaN
    counts as that.

    Args:
        found: the result of `mosaic_low_bits.run`. Its entries for tokens from `quantized` on, a multiple of 32, do not matter.
        positions: of tokens that are replaced, all before `quantized`; -1: none.
    """
    (B, K, S, N), (splits, rows) = found["weights"].shape, found["top"].shape[1:]
    inputs = {name: found[name] for name in ("weights", "relative_to", "top", "total", "replaced_logits")}
    return run(Plan(B, K, S, N, rows, splits, positions.shape[2], k), inputs, positions, quantized)


@lowered_once
def run(plan: Plan, found: dict[str, Array], positions: Int[Array, "B K n"], quantized: Int[Array, "B"]) -> Int[Array, "B K k"]:
    """The launch of `choose_tokens`."""
    from pallas_kernels.replaced_attention.mosaic_choice_block import emit_block

    inputs = {**found, "positions": positions, "quantized": quantized}
    outputs = {"chosen": jax.ShapeDtypeStruct((plan.batch, plan.kv_heads, plan.k), jnp.int32)}
    emit = functools.partial(emit_block, plan)
    return launch("largest_shares", emit, inputs, outputs, plan.batch * plan.kv_heads, plan.warpgroups, plan.shared.total)["chosen"]
