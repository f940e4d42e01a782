"""Residual connection and RMSNorm on NVIDIA Hopper, for the few rows of a decode step: a block a row, 16 bytes of it a thread.

XLA takes two launches, for it sums a row in one and divides by the sum in the other.
"""

import functools
import math

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import in_fixed_order, no_mosaic_gpu
from pallas_kernels.gpu.launch import launch

MAX_ROWS = 64  # for more, as in prefill, XLA does well
MAX_WIDTH = 8192
WARPGROUP = 128  # threads
VALUES = 8  # of a row, in a thread


def unsupported(x: Array, added: Array | None, weight: Array) -> str | None:
    if reason := no_mosaic_gpu():
        return reason
    if others := {a.dtype.name for a in (x, added, weight) if a is not None} - {"bfloat16"}:
        return f"needs bfloat16, not {', '.join(sorted(others))}"
    if (rows := math.prod(x.shape[:-1])) > MAX_ROWS and not in_fixed_order():
        return f"supports up to {MAX_ROWS} rows, not {rows}"
    if weight.ndim == 2 and x.shape[-2] != weight.shape[0]:
        return f"needs rows in turns of {weight.shape[0]}, the number of weights, not of {x.shape[-2]}"
    if (width := x.shape[-1]) % VALUES or width > MAX_WIDTH:
        return f"supports widths in multiples of {VALUES} up to {MAX_WIDTH}, not {width}"
    return None


def add_rms_norm(
    x: Float[Array, "*rows D"], added: Float[Array, "*rows D"] | None, weight: Float[Array, "*n D"], *, eps: float
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    def flat(a):
        return a.reshape(-1, x.shape[-1])

    total, normed = run(flat(x), None if added is None else flat(added), weight, eps=eps)
    return x if added is None else total.reshape(x.shape), normed.reshape(x.shape)


# A function of its own in the program: however many layers call it, it is lowered once.
@functools.partial(jax.jit, static_argnames="eps")
def run(
    x: Float[Array, "M D"], added: Float[Array, "M D"] | None, weight: Float[Array, "*n D"], *, eps: float
) -> tuple[Array | None, Array]:
    """One launch: the sum (None where nothing is added) and its norm."""
    rows, width = x.shape
    inputs = {"x": x, "weight": weight} | ({} if added is None else {"added": added})
    outputs = {"normed": x} | ({} if added is None else {"total": x})
    outputs = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in outputs.items()}
    warpgroups = math.ceil(width / VALUES / WARPGROUP)
    emit = functools.partial(_emit_row, width, weight.size // width, warpgroups * WARPGROUP // 32, eps)
    found = launch("add_rms_norm", emit, inputs, outputs, rows, warpgroups, 128)
    return found.get("total"), found["normed"]


def _emit_row(width: int, weights: int, warps: int, eps: float, refs: dict) -> None:
    from pallas_kernels.gpu import fragments, numerics, ptx

    at = {name: ptx.address(ref) for name, ref in refs.items()}
    thread, row = ptx.thread_index(), ptx.block_index()
    there = thread < width // VALUES
    place = ptx.select(there, thread, ptx.i32(0)) * (2 * VALUES)
    within = ptx.i64(row * (2 * width) + place)
    words = ptx.load_global(at["x"] + within, VALUES // 2)
    turn = (row % weights) * (2 * width) + place if weights > 1 else place
    weight = ptx.load_global(at["weight"] + ptx.i64(turn), VALUES // 2)
    if "added" in at:
        added = ptx.load_global(at["added"] + within, VALUES // 2)
        words = [numerics.add_bf16(x, y) for x, y in zip(words, added)]
        with ptx.when(there):
            ptx.store_global_words(at["total"] + within, *words)
    numbers = [x for word in words for x in numerics.bf16_entries(word)]
    square = numerics.total([x * x for x in numbers])
    square = fragments.all_rows(fragments.all_columns(ptx.select(there, square, ptx.f32(0.0)), numerics.add), numerics.add)
    with ptx.when((thread & 31) == 0):
        ptx.store_shared(at["shared"] + (thread >> 5) * 4, square)
    ptx.synchronize(ptx.i32(0), warps)
    mean = numerics.total(ptx.load_shared(at["shared"], warps, "f")) * (1 / width)
    scale = numerics.rsqrt(mean + eps)
    pairs = [numerics.pair(a * scale, b * scale, "bf16") for a, b in zip(numbers[::2], numbers[1::2])]
    normed = [numerics.multiply_bf16(x, w) for x, w in zip(pairs, weight)]
    with ptx.when(there):
        ptx.store_global_words(at["normed"] + within, *normed)
