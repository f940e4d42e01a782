"""The Triton program of decode attention: one KV head, one share of its tokens, one block of query rows.

Codes enter the tensor cores under a constant high byte: as 128 + code in bfloat16, for one. That takes one byte permutation and no
arithmetic. The excess is a multiple of the sum of the other operand as rounded, and is taken off in every step: left to the
end, it would outgrow the accumulator. Codes count from 8, so that rounding errs in proportion to the spread of the data and not to
its mean.

Keys meet queries times scales, and an error there is one of a logit, which grows in the exponential: bfloat16 is too coarse for
loud channels. They are float16, both factors first divided by the power of two of their maximum. Values meet weights times scales,
in bfloat16.
"""

import triton
import triton.language as tl

from pallas_kernels.gpu.triton_unpack import unpack

# High bytes, and the numbers that they make of code n.
KEY_UPPER = tl.constexpr(0x64)  # float16 1024 + n
KEY_LOWER = tl.constexpr(0x54)  # float16 64 + n / 16
VALUE_UPPER = tl.constexpr(0x43)  # bfloat16 128 + n
VALUE_LOWER = tl.constexpr(0x41)  # bfloat16 8 + n / 16
# The excess, and 8 (the lower code is stored plus 8 already, at a sixteenth).
KEY_OFFSET = tl.constexpr((1024 + 8, 1024 + 8 + 64 + 0.5))
VALUE_OFFSET = tl.constexpr((128 + 8, 128 + 8 + 8 + 0.5))


@triton.jit
def multiply_codes(x_low, x_high, address, acc, HIGH_BYTE: tl.constexpr):
    """acc + x @ codes, where codes and x are split in two halves along the axis that they share."""
    low, high = unpack(tl.load(address), HIGH_BYTE, x_low.dtype)
    acc = tl.dot(x_low, low, acc)
    return tl.dot(x_high, high, acc)


@triton.jit
def power_of_two(x):
    """The largest power of two that is no more than x, and its inverse; within 2**-64 and 2**126."""
    bits = tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 0x1F800000), 0x7E800000)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def normalized(low, high):
    """Two halves of a row divided by the power of two of their maximum, as float16, and that power."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    power, inverse = power_of_two(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 0))
    return (low * inverse).to(tl.float16), (high * inverse).to(tl.float16), power


@triton.jit
def query_rows(T: tl.constexpr, K: tl.constexpr, PER_HEAD: tl.constexpr, M: tl.constexpr):
    """The program's block of query rows: their numbers in the KV head, which of its T tokens each is of, whether there is such a row, and
    its number among all rows of the queries."""
    head = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(2) * M + tl.arange(0, M)
    query = rows // PER_HEAD
    q_row = (head // K * T + query) * (K * PER_HEAD) + (head % K) * PER_HEAD + rows % PER_HEAD
    return rows, query, rows < T * PER_HEAD, q_row


@triton.jit
def take_in(logits, values, acc, top, total):
    """Weighted values, maximum (base 2) and sum of exponentials, with more tokens: of their logits [M, tile] and values [tile, H]."""
    new_top = tl.maximum(top, tl.max(logits, 1))
    decay = tl.exp2(top - new_top)
    weights = tl.exp2(logits - new_top[:, None])
    total = total * decay + tl.sum(weights, 1)
    return tl.dot(weights.to(values.dtype), values, acc * decay[:, None]), new_top, total


@triton.jit
def store_partial(
    out_ptr, top_ptr, total_ptr, acc, top, total, rows, valid, R: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Stores the partial results for each of the program's query rows."""
    row = (tl.program_id(0).to(tl.int64) * SPLITS + tl.program_id(1)) * R + rows
    tl.store(out_ptr + row[:, None] * H + tl.arange(0, H)[None, :], acc, mask=valid[:, None])
    tl.store(top_ptr + row, top, mask=valid)
    tl.store(total_ptr + row, total, mask=valid)


@triton.jit
def attend_buffer(
    q, query, buffered, keys_ptr, values_ptr, acc, top, total,
    TO_BASE_2, T: tl.constexpr, PER_HEAD: tl.constexpr, H: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Weighted values, maximum and sum with the program's share of the tokens in the full-precision buffer of its KV head, of which there
    are `buffered`. query: which of the row's T last tokens each query row is of."""
    split = tl.program_id(1)
    channels = tl.arange(0, H)
    seen = buffered - T + query + 1
    # The tokens that the last row of the block sees.
    longest = buffered - T + 1 + tl.minimum((tl.program_id(2) * M + M - 1) // PER_HEAD, T - 1)
    tiles = (longest + TILE - 1) // TILE
    tokens = tl.arange(0, TILE)
    first = split * tiles // SPLITS
    last = (split + 1) * tiles // SPLITS
    for i in range(first, last):
        token = i * TILE + tokens
        at = token.to(tl.int64) * H
        stored = token < longest
        keys = tl.load(keys_ptr + at[None, :] + channels[:, None], mask=stored[None, :], other=0.0)
        values = tl.load(values_ptr + at[:, None] + channels[None, :], mask=stored[:, None], other=0.0)
        logits = tl.dot(q, keys) * TO_BASE_2
        logits = tl.where(token[None, :] < seen[:, None], logits, float("-inf"))
        acc, top, total = take_in(logits, values, acc, top, total)
    return acc, top, total


@triton.jit
def attend(
    q_ptr, quantized_ptr, buffered_ptr, listed_ptr, count_ptr, pages_ptr,
    key_upper, key_lower, key_scale, key_zero,
    value_upper, value_lower, value_scale, value_zero,
    keys_ptr, values_ptr,
    out_ptr, top_ptr, total_ptr,
    TO_BASE_2, T: tl.constexpr, K: tl.constexpr, PER_HEAD: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
    PLANES: tl.constexpr, GROUPS: tl.constexpr, LIST_WIDTH: tl.constexpr, PAGED: tl.constexpr, G: tl.constexpr,
    CAPACITY: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Weighted values, maximum (base 2) and sum of exponentials of each query row, over the program's share of the tokens.

    LIST_WIDTH: columns of the lists of groups to read; 0: all groups are read. PAGED: whether a row's groups lie in pages of a pool.
    """
    R: tl.constexpr = T * PER_HEAD
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    batch = head // K
    rows, query, valid, q_row = query_rows(T, K, PER_HEAD, M)
    channels = tl.arange(0, H)
    top = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, H], tl.float32)
    buffered = tl.load(buffered_ptr + batch)

    if PLANES > 0:
        half_channels = tl.arange(0, H // 2)
        half_tokens = tl.arange(0, G // 2)
        q_low_ptr = q_ptr + q_row[:, None] * H + half_channels[None, :]
        q_low = tl.load(q_low_ptr, mask=valid[:, None], other=0.0)
        q_high = tl.load(q_low_ptr + H // 2, mask=valid[:, None], other=0.0)
        loudest = tl.maximum(tl.max(tl.abs(q_low.to(tl.float32)), 1), tl.max(tl.abs(q_high.to(tl.float32)), 1))
        q_power, inverse = power_of_two(loudest)
        q_power *= TO_BASE_2
        q_low = (q_low.to(tl.float32) * inverse[:, None]).to(tl.float16)
        q_high = (q_high.to(tl.float32) * inverse[:, None]).to(tl.float16)
        # The sums that products with codes need, on the tensor cores too: zeros in column 0, scales in the others.
        column = tl.arange(0, 8)
        is_zero = column[None, :] == 0
        one_channels = tl.full([H // 2, 8], 1.0, tl.float16)
        one_tokens = tl.full([G // 2, 8], 1.0, value_scale.dtype.element_ty)

        groups = tl.load(quantized_ptr + batch) // G
        if LIST_WIDTH > 0:
            groups = tl.minimum(tl.maximum(tl.load(count_ptr + head), 0), LIST_WIDTH)
        first = split * groups // SPLITS
        last = (split + 1) * groups // SPLITS
        for i in range(first, last):
            number = i
            if LIST_WIDTH > 0:
                # Whatever is in a list, only groups of this KV head are read.
                number = tl.minimum(tl.maximum(tl.load(listed_ptr + head * LIST_WIDTH + i), 0), GROUPS - 1)
            group = head * GROUPS + number
            if PAGED:
                group = tl.load(pages_ptr + batch * GROUPS + number).to(tl.int64) * K + head % K
            low = group * H + half_channels
            scale_low, scale_high, scale_power = normalized(tl.load(key_scale + low), tl.load(key_scale + low + H // 2))
            zero_low, zero_high, zero_power = normalized(tl.load(key_zero + low), tl.load(key_zero + low + H // 2))
            x_low = q_low * scale_low[None, :]
            x_high = q_high * scale_high[None, :]
            sums = tl.dot(q_low, tl.where(is_zero, zero_low[:, None], scale_low[:, None]))
            sums = tl.dot(q_high, tl.where(is_zero, zero_high[:, None], scale_high[:, None]), sums)
            offsets = tl.dot(x_high, one_channels, tl.dot(x_low, one_channels))
            # In units of the logits' own power of two, like the logits.
            of_sums = tl.where(column == 0, zero_power / scale_power, tl.where(column == 1, 8.0, 0.0))
            of_offsets = tl.where(column == 0, KEY_OFFSET[PLANES - 1], 0.0)
            shift = tl.sum(sums * of_sums[None, :] - offsets * of_offsets[None, :], 1)
            power = q_power * scale_power

            at = group * (G * H // 2) + half_tokens[None, :] * (H // 2) + half_channels[:, None]
            logits_low = tl.zeros([M, G // 2], tl.float32)
            logits_high = tl.zeros([M, G // 2], tl.float32)
            logits_low = multiply_codes(x_low, x_high, key_upper + at, logits_low, KEY_UPPER)
            logits_high = multiply_codes(x_low, x_high, key_upper + at + G * H // 4, logits_high, KEY_UPPER)
            if PLANES == 2:
                logits_low = multiply_codes(x_low, x_high, key_lower + at, logits_low, KEY_LOWER)
                logits_high = multiply_codes(x_low, x_high, key_lower + at + G * H // 4, logits_high, KEY_LOWER)

            highest = tl.max(tl.maximum(logits_low, logits_high), 1)
            new_top = tl.maximum(top, (highest + shift) * power)
            decay = tl.exp2(top - new_top)
            shift = shift * power - new_top
            weights_low = tl.exp2(logits_low * power[:, None] + shift[:, None])
            weights_high = tl.exp2(logits_high * power[:, None] + shift[:, None])

            low = group * G + half_tokens
            scale_low = tl.load(value_scale + low)
            scale_high = tl.load(value_scale + low + G // 2)
            zero_low = tl.load(value_zero + low)
            zero_high = tl.load(value_zero + low + G // 2)
            y_low = (weights_low * scale_low.to(tl.float32)[None, :]).to(scale_low.dtype)
            y_high = (weights_high * scale_high.to(tl.float32)[None, :]).to(scale_low.dtype)
            total = total * decay + tl.sum(weights_low + weights_high, 1)
            sums = tl.dot(weights_low.to(scale_low.dtype), tl.where(is_zero, zero_low[:, None], scale_low[:, None]))
            sums = tl.dot(weights_high.to(scale_low.dtype), tl.where(is_zero, zero_high[:, None], scale_high[:, None]), sums)
            offsets = tl.dot(y_high, one_tokens, tl.dot(y_low, one_tokens))
            of_sums = tl.where(column == 0, 1.0, tl.where(column == 1, 8.0, 0.0))
            of_offsets = tl.where(column == 0, VALUE_OFFSET[PLANES - 1], 0.0)
            shift = tl.sum(sums * of_sums[None, :] - offsets * of_offsets[None, :], 1)

            at = group * (G * H // 2) + channels[None, :] * (G // 2) + half_tokens[:, None]
            acc = acc * decay[:, None] + shift[:, None]
            acc = multiply_codes(y_low, y_high, value_upper + at, acc, VALUE_UPPER)
            if PLANES == 2:
                acc = multiply_codes(y_low, y_high, value_lower + at, acc, VALUE_LOWER)
            top = new_top

    q = tl.load(q_ptr + q_row[:, None] * H + channels[None, :], mask=valid[:, None], other=0.0)
    acc, top, total = attend_buffer(
        q, query, buffered, keys_ptr + head * CAPACITY * H, values_ptr + head * CAPACITY * H, acc, top, total,
        TO_BASE_2, T, PER_HEAD, H, M, TILE, SPLITS,
    )  # fmt: skip
    store_partial(out_ptr, top_ptr, total_ptr, acc, top, total, rows, valid, R, H, SPLITS)
