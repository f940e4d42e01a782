"""Arithmetic on what a lane holds: rounding and pairs of 16-bit floats, float32 functions, maxima, and 4-bit and INT8 codes made floats.

Everything here is computed by each lane for itself, from its own words, without looking at memory or at other lanes.
"""

import functools
from collections.abc import Sequence

from pallas_kernels.gpu import ptx
from pallas_kernels.gpu.ptx import Value

BF16_ONES = 0x3F803F80  # a pair of 1


def pair(low: Value, high: Value, kind: str) -> Value:
    """Two float32 rounded to 16-bit floats of a kind, "bf16" or "f16", in one word; `low` in its low half."""
    return ptx.pure(f"cvt.rn.{kind}x2.f32 $0, $1, $2;", high, low)


def round_bf16(x: Value) -> Value:
    """A float32 rounded to what bfloat16 has, still a float32."""
    return bf16_entries(pair(x, x, "bf16"))[0]


def bf16_entries(x: Value) -> tuple[Value, Value]:
    """The two float32 of a pair of bfloat16."""
    return ptx.as_float(x << 16), ptx.as_float(x & 0xFFFF0000)


def f16_entries(x: Value) -> tuple[Value, Value]:
    """The two float32 of a pair of float16."""

    def entry(which):
        return ptx.pure(f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.f32.f16 $0, {which}; }}", x, result="f")

    return entry("low"), entry("high")


def rotated(a: Value, b: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    """Pairs of bfloat16, those of a head's first and second half, rotated by angles with these cosines and sines (pairs too)."""
    entries = [bf16_entries(x) for x in (a, b, cos, sin)]
    first = pair(*(x * c - y * s for x, y, c, s in zip(*entries)), "bf16")
    second = pair(*(y * c + x * s for x, y, c, s in zip(*entries)), "bf16")
    return first, second


def multiply_f16(a: Value, b: Value) -> Value:
    """Products of two pairs of float16, entry by entry."""
    return ptx.pure("mul.rn.f16x2 $0, $1, $2;", a, b)


def multiply_bf16(a: Value, b: Value) -> Value:
    """Products of two pairs of bfloat16, entry by entry."""
    return ptx.pure("mul.rn.bf16x2 $0, $1, $2;", a, b)


def add_bf16(a: Value, b: Value) -> Value:
    """Sums of two pairs of bfloat16, entry by entry, each rounded once. A sum in float32, then rounded to bfloat16, is the same."""
    return fma_bf16(a, ptx.i32(BF16_ONES), b)


def times_power(x: Value, power: int) -> Value:
    """A pair of bfloat16 times 2^power, with power from -126 to 127."""
    return multiply_bf16(x, ptx.i32(((power + 127) << 7) * 0x00010001))


def fma_bf16(a: Value, b: Value, c: Value) -> Value:
    """a * b + c of pairs of bfloat16, entry by entry, each rounded once."""
    return ptx.pure("fma.rn.bf16x2 $0, $1, $2, $3;", a, b, c)


def largest(pairs: Sequence[Value]) -> Value:
    """The largest entry of pairs of bfloat16, as float32; NaNs count for nothing."""
    return ptx.maximum(*bf16_entries(functools.reduce(lambda a, b: ptx.pure("max.bf16x2 $0, $1, $2;", a, b), pairs)))


def largest_positive_bits(pairs: Sequence[Value]) -> Value:
    """The largest entry of pairs of bfloat16, all with sign bit 0, as the bits of a float32; a NaN counts as larger than all."""
    both = functools.reduce(lambda a, b: ptx.pure("max.u16x2 $0, $1, $2;", a, b), pairs)
    return ptx.maximum((both << 16) & 0x7FFFFFFF, both & 0x7FFF0000)


def nibble_masks(runtime_zero: Value) -> tuple[Value, Value]:
    """The masks of `unpack`, made from a zero that the compiler does not know: it would load constants again at every use."""
    return runtime_zero ^ 0x000F000F, runtime_zero ^ 0x00F000F0


def unpack(upper: Value, lower: Value | None, masks: tuple[Value, Value]) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
    """The codes in the nibbles of 4 bytes as float16 numbers 1024 + code: a code becomes the last bits of the mantissa of 1024.

    With a lower plane a code is 16 upper + lower. Returns two pairs of float16 for the low nibbles, from bytes (0, 2) and (1, 3), and then
    two for the high nibbles, which without a lower plane are 1024 + 16 code (docs/kernels/formats.md, "Unpacking").
    """
    if lower is None:
        both = upper, upper >> 8

        def take(x, mask):
            return ptx.pure("lop3.b32 $0, $1, $2, 0x64006400, 0xEA;", x, mask)  # x & mask | 0x64006400

        return tuple(tuple(take(x, mask) for x in both) for mask in masks)
    low, high = nested_bytes(upper, lower, 16)
    exponents = ptx.i32(0x64646464)

    def expand(x, order):
        return ptx.pure(f"prmt.b32 $0, $1, $2, {order};", x, exponents)

    return tuple((expand(x, "0x4240"), expand(x, "0x4341")) for x in (low, high))


NIBBLES_DIVISOR = 2.0**32  # the results of `nibbles_to_bf16` are this many times too small


def nibble_factors(scale: Value, zero_point: Value) -> tuple[Value, Value, Value]:
    """What `nibbles_to_bf16` needs of a scale and a zero, each duplicated in both halves of a pair of bfloat16: scale * 2^101 for low
    nibbles, scale * 2^97 for high ones, and zero / NIBBLES_DIVISOR. Scales must be below 2^26."""
    return tuple(times_power(x, power) for x, power in ((scale, 133 - 32), (scale, 129 - 32), (zero_point, -32)))


def nibbles_to_bf16(x: Value, factors: tuple[Value, Value, Value]) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
    """code * scale + zero, divided by NIBBLES_DIVISOR, for the codes in the nibbles of 4 bytes, rounded once to bfloat16.

    A nibble alone in a bfloat16 is a multiple of 2^-133, the smallest number (docs/kernels/formats.md). Returns two pairs for the low
    nibbles, from bytes (0, 2) and (1, 3), and then two for the high nibbles.
    """
    low, high, zero_point = factors

    def take(x, mask, factor):
        return fma_bf16(x & mask, factor, zero_point)

    both = x, x >> 8
    return tuple(tuple(take(x, mask, factor) for x in both) for mask, factor in ((0x000F000F, low), (0x00F000F0, high)))


def nested_factors(scale: Value, zero: Value, steps: int) -> tuple[Value, Value]:
    """What `nested_to_bf16` needs of a scale and a zero, each duplicated in both halves of a pair of bfloat16. steps: 16 or 8."""
    return times_power(scale, 1 - steps.bit_length()), times_power(zero, -32)


def nested_bytes(upper: Value, lower: Value, steps: int) -> tuple[Value, Value]:
    """The codes steps * u + l, a byte each, of u and l in the low nibbles of 4 bytes of each plane, and of those in the high ones.

    steps: 16 or 8.
    """
    first, second = lower & 0x0F0F0F0F, (lower >> 4) & 0x0F0F0F0F
    if steps == 16:
        return (upper << 4) & 0xF0F0F0F0 | first, upper & 0xF0F0F0F0 | second
    return ((upper & 0x0F0F0F0F) << 3) + first, ((upper >> 1) & 0x78787878) + second


def nested_to_bf16(upper: Value, lower: Value, factors: tuple[Value, Value], steps: int) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
    """(code - 8) * scale / steps + zero, divided by NIBBLES_DIVISOR, for codes steps * u + l, rounded once to bfloat16. u and l are in the
    nibbles of 4 bytes of each plane.

    A byte alone in a bfloat16 is a multiple of 2^-133 too: from 128 on its upper bit is an exponent of 1. code - 8 is exact. Returns pairs
    as `nibbles_to_bf16` does.
    """
    scaled, zero = factors
    low, high = nested_bytes(upper, lower, steps)
    unit, middle = ptx.i32(0x72007200), ptx.i32(0xB100B100)  # pairs of 2^101 and of -8 * 2^-32

    def take(x):
        return fma_bf16(fma_bf16(x & 0x00FF00FF, unit, middle), scaled, zero)

    return tuple((take(x), take(x >> 8)) for x in (low, high))


INT8_DIVISOR = 64.0  # the results of `int8_to_bf16` are this many times too small


def int8_to_bf16(x: Value) -> tuple[Value, Value]:
    """Four signed bytes divided by INT8_DIVISOR, exactly, as two pairs of bfloat16 in their order (docs/kernels/formats.md)."""
    unsigned, factor, offset = x ^ 0x80808080, ptx.i32(0x7F007F00), ptx.i32(0xC000C000)  # pairs of 2^127 and of -2

    def expand(order):
        return ptx.pure(f"prmt.b32 $0, $1, $2, {order};", unsigned, ptx.i32(0))

    return tuple(fma_bf16(expand(order), factor, offset) for order in ("0x4140", "0x4342"))


def lower_bytes(words: Sequence[Value]) -> tuple[Value, Value]:
    """The lowest bytes of four words as one word, and their second bytes as another."""
    return transpose_pairs(*(ptx.pure("prmt.b32 $0, $1, $2, 0x5140;", *words[i : i + 2]) for i in (0, 2)))


def spread_bytes(x: Value) -> tuple[Value, Value]:
    """The bytes of a word as halves of two words, in their order."""
    return tuple(ptx.pure(f"prmt.b32 $0, $1, $2, {order};", x, ptx.i32(0)) for order in ("0x4140", "0x4342"))


def transpose_pairs(a: Value, b: Value) -> tuple[Value, Value]:
    """The pairs (a0, b0) and (a1, b1) of pairs a and b."""
    return tuple(ptx.pure(f"prmt.b32 $0, $1, $2, {order};", a, b) for order in ("0x5410", "0x7632"))


def fma(a: Value, b: Value, c: Value) -> Value:
    """a * b + c in float32, rounded once."""
    return ptx.pure("fma.rn.f32 $0, $1, $2, $3;", a, b, c, result="f")


def dot(tiles: Sequence[Sequence[Value]], weights: Sequence[Sequence[Value]], column: int, start: Value) -> Value:
    """start + the sum over t and r of tiles[t][column + 2 r] * weights[t][r], for one of this lane's two columns of accumulator tiles."""
    for tile, rows in zip(tiles, weights):
        for x, weight in zip(tile[column::2], rows):
            start = fma(x, weight, start)
    return start


def add(a: Value, b: Value) -> Value:
    """a + b, for functions that take how to combine."""
    return a + b


def multiply(a: Value, b: Value) -> Value:
    """a * b, for functions that take how to combine."""
    return a * b


def total(values: Sequence[Value]) -> Value:
    """The sum of this lane's values, added in their order."""
    return functools.reduce(lambda a, b: a + b, values)


def to_float(x: Value) -> Value:
    """A signed integer as a float32."""
    return ptx.pure("cvt.rn.f32.s32 $0, $1;", x, result="f")


def reciprocal(x: Value) -> Value:
    """1 / x in float32, approximately."""
    return ptx.pure("rcp.approx.ftz.f32 $0, $1;", x, result="f")


def rsqrt(x: Value) -> Value:
    """1 / sqrt(x) in float32, approximately."""
    return ptx.pure("rsqrt.approx.ftz.f32 $0, $1;", x, result="f")


def exp2(x: Value) -> Value:
    """2^x in float32, approximately."""
    return ptx.pure("ex2.approx.ftz.f32 $0, $1;", x, result="f")


def log2(x: Value) -> Value:
    """The logarithm of x to base 2 in float32, approximately; -inf for 0."""
    return ptx.pure("lg2.approx.ftz.f32 $0, $1;", x, result="f")


def positive_to_float16(x: Value, bias: Value) -> Value:
    """Positive pairs of bfloat16 as float16, times a power of two. bias: in both halves, the exponent to subtract, shifted left by 7.

    The result must be below 2^16; results below 2^-14 are wrong: some number from 0 to 2^-14. A NaN becomes some number.
    """
    return (ptx.pure("max.u16x2 $0, $1, $2;", x, bias) - bias) << 3


def powers_of_two(x: Value, exponent: int, least: int) -> tuple[Value, Value]:
    """The power of two p, at most 2^(exponent - least), with 2^exponent <= p x < 2^(exponent + 1), and 1 / p. x is
    more than 0; for one below 2^least p is the largest there is, so that p x is below 2^exponent."""
    biased = ptx.maximum(ptx.as_bits(x) >> 23, ptx.i32(127 + least))
    return ptx.as_float((ptx.i32(254 + exponent) - biased) << 23), ptx.as_float((biased - exponent) << 23)
