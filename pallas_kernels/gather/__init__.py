"""Reads single tokens of a cache, which may be in host memory."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.formats.token_codes import FullTokens
from pallas_kernels.gather.reference import gather_positions as gather_positions


def gather_tokens(
    store: Float[Array, "B K S 2 H"],
    positions: Int[Array, "B K n"],
    fetched: FullTokens | None = None,
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "B K n 2 H"]:
    """The tokens at these positions of each KV head, each its key and its value, on the device.

    Args:
        store: of each token its key, then its value, in host or device memory.
        positions: of the tokens; a position beyond either end reads the token at that end.
        fetched: tokens of the same store that are on the device already. The GPU kernel, which is for a store in host memory, copies these
            from there if they are at most 128 of each KV head; the reference reads all tokens from the store.
        implementation: see `dispatch.choose`, also for what it raises.
    """
    module = choose("gather", implementation, store, positions, fetched, slow_reference=False)
    return module.gather_tokens(store, positions, fetched)
