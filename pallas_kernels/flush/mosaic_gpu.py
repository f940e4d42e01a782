"""Flush on NVIDIA Hopper in Pallas Mosaic GPU: one launch a layer, which writes codes and moves the buffer where they lie.

A block of one warpgroup does the keys or the values of a KV head, and nothing if its row is not due. Values are read transposed,
through shared memory, so that a group spans the rows for both. Columns half a row apart share bytes: tiles of both go together
through the schemes of `formats/quantization.py`. Little is moved, once in G tokens: the plain structure costs nothing that matters.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool

from pallas_kernels.dispatch import no_mosaic_gpu
from pallas_kernels.formats import quantization
from pallas_kernels.formats.kv_cache import HierarchicalLayer, Lengths, Planes

# Sizes of a tile: no more than 256 x 16 and 64 x 256 numbers are in the registers of the 128 threads.
COLUMNS = 16
ROWS = 64


def unsupported(layer: HierarchicalLayer, lengths: Lengths, due: Bool[Array, "B"], *, scheme: str) -> str | None:
    if reason := no_mosaic_gpu():
        return reason
    if lengths.quantized.dtype != jnp.int32:
        return f"needs lengths in int32, not {lengths.quantized.dtype}"
    if layer.buffer.keys.dtype != jnp.bfloat16:
        return f"needs a bfloat16 cache, not {layer.buffer.keys.dtype}"
    rows, head_dim = layer.buffer.keys.shape[2:]
    if head_dim not in (64, 128, 256):
        return f"supports head_dim 64, 128 and 256, not {head_dim}"
    if layer.groups == 0 or layer.group_size not in (64, 128):
        return f"supports groups of 64 and 128 tokens, not {layer.groups} of {layer.group_size}"
    if rows < 2 * layer.group_size:
        return f"needs a buffer of two groups, not {rows} rows"
    return None


# A function of its own in the program: however many layers call it, it is lowered once.
@functools.partial(jax.jit, static_argnames="scheme")
def flush(layer: HierarchicalLayer, lengths: Lengths, due: Bool[Array, "B"], *, scheme: str) -> HierarchicalLayer:
    batch, kv_heads, _, head_dim = layer.buffer.keys.shape
    places = layer.next_places(lengths, due)
    refs = jax.tree.map(jax.new_ref, dataclasses.replace(layer, pages=None))
    plgpu.kernel(
        functools.partial(_body, scheme=scheme),
        grid=(batch, kv_heads, 2),
        grid_names=("row", "head", "part"),
        scratch_types=(plgpu.SMEM((layer.group_size, head_dim), jnp.bfloat16),),
        kernel_name="flush",
    )(refs, places)
    return dataclasses.replace(jax.tree.map(jax.freeze, refs), pages=layer.pages)


def _body(layer: HierarchicalLayer, places, staged, *, scheme: str) -> None:
    row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
    first, third = (index[row] for index in places)
    size = layer.keys.upper.shape
    due = (first < size[0]) & (third >= 0) & (third < size[2])

    def of_group(planes):
        return jax.tree.map(lambda ref: ref.at[first, head, third], planes)

    @pl.when(due & (part == 0))
    def _():
        buffer = layer.buffer.keys.at[row, head]
        _quantize(lambda at: _load(buffer.at[: layer.group_size, at]), of_group(layer.keys), scheme)
        _move_up(buffer, layer.group_size)

    @pl.when(due & (part == 1))
    def _():
        buffer = layer.buffer.values.at[row, head]
        for rows in _chunks(layer.group_size):
            staged[rows] = _load(buffer.at[rows])
        plgpu.commit_smem()
        _quantize(lambda at: _load(staged.at[at].transpose((1, 0))), of_group(layer.values), scheme)
        _move_up(buffer, layer.group_size)


def _load(ref) -> Array:
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)


def _store(ref, value: Array) -> None:
    # jax 0.12 refuses a plain assignment whose accesses are no whole sectors of 32 bytes; before it there is no `store`.
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def _quantize(columns: Callable, planes: Planes, scheme: str) -> None:
    """Quantizes a group and writes it. columns: reads columns of its keys, or of its transposed values."""
    half = planes.upper.shape[1]
    encode = functools.partial(quantization.encode, scheme=scheme, dtype=jnp.dtype(jnp.bfloat16))

    @pl.loop(0, half // COLUMNS)
    def _(tile):
        def codes(start: int) -> tuple[Array, Array]:
            at = pl.ds(start + tile * COLUMNS, COLUMNS)
            x = columns(at).astype(jnp.float32)
            spoilt = jnp.where(jnp.abs(x) < jnp.inf, 0.0, 1.0).max(0)
            low, high = jnp.where(spoilt == 0, x.min(0), jnp.nan), x.max(0)
            _, _, scale, zero = encode(low, low, high)
            _store(planes.scale.at[at], scale.astype(jnp.bfloat16))
            _store(planes.zero.at[at], zero.astype(jnp.bfloat16))

            def to_rows(extreme):
                return lax.broadcast_in_dim(extreme, x.shape, [1])

            return encode(x, to_rows(low), to_rows(high))[:2]

        for plane, low, high in zip((planes.upper, planes.lower), codes(0), codes(half)):
            _store(plane.at[:, pl.ds(tile * COLUMNS, COLUMNS)], (low + 16 * high).astype(jnp.uint8))


def _move_up(buffer, group_size: int) -> None:
    """Moves all rows but the first G up by G."""
    for rows in _chunks(buffer.shape[0] - group_size):
        moved = _load(buffer.at[rows.start + group_size : rows.stop + group_size])
        plgpu.commit_smem()  # as a barrier: all have read what this overwrites
        _store(buffer.at[rows], moved)


def _chunks(rows: int) -> list[slice]:
    """Slices of ROWS rows that cover `rows` rows; the last may overlap the one before, which does no harm: none is read once written."""
    return [slice(start, start + ROWS) for start in (*range(0, rows - ROWS, ROWS), rows - ROWS)]
