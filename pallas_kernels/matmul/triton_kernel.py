"""The Triton program of the matmul with INT4 or nested weights: some tiles of outputs, over a slice of the inputs.

Codes enter the tensor cores as 128 + code in bfloat16, which costs no arithmetic. The excess is 128 times the sum of the
activations, and is added through the zero: y = scale (sum x (128 + code)) + (zero - 128 scale) sum x, group by group. The codes of a
lower plane have scale / steps for their scale, and -8 of these for their zero. Groups are a batch of products, which Triton deals out to
the warps: they need each other only when a tile is done.
"""

import triton
import triton.language as tl

from pallas_kernels.formats import weights
from pallas_kernels.gpu.triton_unpack import unpack

HIGH_BYTE = tl.constexpr(0x43)  # bfloat16 128 + n
EXCESS = tl.constexpr(128.0)
LOWER_MIDDLE = tl.constexpr(float(weights.LOWER_MIDDLE))


@triton.jit
def of_weight(tile, first, second, third, END0: tl.constexpr, END1: tl.constexpr):
    """Chooses what belongs to the weight that this tile of all outputs is part of."""
    return tl.where(tile < END0, first, tl.where(tile < END1, second, third))


@triton.jit
def multiply(
    x_ptr,
    codes0, scale0, zero0, lower0, codes1, scale1, zero1, lower1, codes2, scale2, zero2, lower2,
    y_ptr,
    M: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr,
    SLICE: tl.constexpr, BATCH: tl.constexpr,
    END0: tl.constexpr, END1: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    ZERO_POINTS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The program's tiles of y, or of its slice's summand.

    M: rows, which count as ROWS. GROUPS: of G inputs. SLICE: groups of a slice, which count as BATCH. END0, END1: where the tiles of
    the first and of the second weight end. ZERO_POINTS: whether zeros are zero points, else minima. STEPS: of the lower plane
    in a step of the upper one; 0: there is none, and lower0 to lower2 are not read.
    """
    program = tl.program_id(0)
    part = tl.program_id(1)
    batch = tl.arange(0, BATCH)
    group = part * SLICE + batch
    there = (batch < SLICE) & (group < GROUPS)
    rows = tl.arange(0, ROWS)
    half = tl.arange(0, G // 2)
    outputs = tl.arange(0, TILE)

    low_ptr = x_ptr + rows[None, None, :] * (GROUPS * G) + group[:, None, None] * G + half[None, :, None]
    valid = there[:, None, None] & (rows < M)[None, None, :]
    x_low = tl.load(low_ptr, mask=valid, other=0.0)
    x_high = tl.load(low_ptr + G // 2, mask=valid, other=0.0)
    sums = tl.sum(x_low.to(tl.float32) + x_high.to(tl.float32), 1)

    first = program * TILES // tl.num_programs(0)
    last = (program + 1) * TILES // tl.num_programs(0)
    # Stages given here are for scales and zeros too.
    for tile in tl.range(first, last, num_stages=STAGES):
        codes_ptr = of_weight(tile, codes0, codes1, codes2, END0, END1)
        scale_ptr = of_weight(tile, scale0, scale1, scale2, END0, END1)
        zero_ptr = of_weight(tile, zero0, zero1, zero2, END0, END1)
        number = tile - of_weight(tile, 0, END0, END1, END0, END1)
        at = (number * TILE).to(tl.int64) * GROUPS + outputs[None, :] * GROUPS + group[:, None]
        byte = at[:, :, None] * (G // 2) + half[None, None, :]
        packed = tl.load(codes_ptr + byte, mask=there[:, None, None], other=0)
        scale = tl.load(scale_ptr + at, mask=there[:, None], other=0.0).to(tl.float32)
        if ZERO_POINTS:
            zero = -(tl.load(zero_ptr + at, mask=there[:, None], other=0).to(tl.float32) + EXCESS) * scale
        else:
            zero = tl.load(zero_ptr + at, mask=there[:, None], other=0.0).to(tl.float32) - EXCESS * scale
        low, high = unpack(packed, HIGH_BYTE, x_low.dtype)
        acc = tl.dot(high, x_high, tl.dot(low, x_low))
        of_groups = acc * scale[:, :, None]
        if STEPS:
            lower_ptr = of_weight(tile, lower0, lower1, lower2, END0, END1)
            low, high = unpack(tl.load(lower_ptr + byte, mask=there[:, None, None], other=0), HIGH_BYTE, x_low.dtype)
            fine = scale / STEPS
            of_groups += tl.dot(high, x_high, tl.dot(low, x_low)) * fine[:, :, None]
            zero -= (EXCESS + LOWER_MIDDLE) * fine
        y = tl.sum(of_groups + sums[:, None, :] * zero[:, :, None], 0)
        place = (part * M + rows)[None, :] * (TILES * TILE) + tile * TILE + outputs[:, None]
        tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=(rows < M)[None, :])
