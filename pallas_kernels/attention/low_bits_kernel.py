"""The Triton programs of decode attention over KIVI's format: one KV head, one share of its tokens, one block of query rows.

Codes become keys and values in the queries' dtype on the way into the tensor cores, as they would be read from a cache in that dtype.
"""

import triton
import triton.language as tl

from pallas_kernels.attention.triton_kernel import attend_buffer, query_rows, store_partial, take_in


@triton.jit
def unpacked(address, BITS: tl.constexpr, TILE: tl.constexpr, H: tl.constexpr):
    """Codes [TILE, H] of the bytes [TILE, H * BITS / 8] there: a byte has those of channels that are as many apart, the first lowest."""
    shifts = BITS * tl.arange(0, 8 // BITS)
    codes = (tl.load(address)[:, None, :].to(tl.int32) >> shifts[None, :, None]) & (2**BITS - 1)
    return tl.reshape(codes, [TILE, H]).to(tl.float32)


@triton.jit
def attend_codes(
    q, rows, query, head, quantized,
    key_codes, key_scale, key_zero, value_codes, value_scale, value_zero, left_out_ptr, logits_ptr,
    TO_BASE_2, T: tl.constexpr, PER_HEAD: tl.constexpr, H: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr,
    KEY_GROUP: tl.constexpr, VALUE_GROUP: tl.constexpr, CODED_TILE: tl.constexpr, SPLITS: tl.constexpr, REPLACED: tl.constexpr,
):  # fmt: skip
    """Weighted values, maximum and sum with the program's share of the tokens in codes, of which there are `quantized`.

    SIZE: tokens that there is room for. KEY_GROUP: tokens that share a key's scale, a multiple of CODED_TILE. VALUE_GROUP: channels that
    share a value's. REPLACED: whether some are left out, and the logits (base 2) of the last token's queries are stored.
    """
    BYTES: tl.constexpr = H * BITS // 8
    split = tl.program_id(1)
    channels = tl.arange(0, H)
    top = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, H], tl.float32)
    tokens = tl.arange(0, CODED_TILE)
    in_row = tl.arange(0, BYTES)
    tiles = quantized // CODED_TILE
    first = split * tiles // SPLITS
    last = (split + 1) * tiles // SPLITS
    for i in range(first, last):
        token = head * SIZE + i * CODED_TILE + tokens
        at = token[:, None] * BYTES + in_row[None, :]
        group = (head * (SIZE // KEY_GROUP) + i * CODED_TILE // KEY_GROUP) * H + channels
        scale, zero = tl.load(key_scale + group).to(tl.float32), tl.load(key_zero + group).to(tl.float32)
        keys = unpacked(key_codes + at, BITS, CODED_TILE, H) * scale[None, :] + zero[None, :]
        logits = tl.dot(q, tl.trans(keys.to(q.dtype))) * TO_BASE_2
        if REPLACED:
            store_logits(logits_ptr, logits, head, rows, query, i * CODED_TILE + tokens, SIZE, T, PER_HEAD)
            logits = tl.where((tl.load(left_out_ptr + token) != 0)[None, :], float("-inf"), logits)
        group = token[:, None] * (H // VALUE_GROUP) + (channels // VALUE_GROUP)[None, :]
        scale, zero = tl.load(value_scale + group).to(tl.float32), tl.load(value_zero + group).to(tl.float32)
        values = unpacked(value_codes + at, BITS, CODED_TILE, H) * scale + zero
        acc, top, total = take_in(logits, values.to(q.dtype), acc, top, total)
    return acc, top, total


@triton.jit
def store_logits(
    logits_ptr, logits, head, rows, query, token, SIZE: tl.constexpr, T: tl.constexpr, PER_HEAD: tl.constexpr
):  # fmt: skip
    """Stores the logits [M, tile] of the query rows of the last token, each at its own of SIZE tokens."""
    at = (head * PER_HEAD + rows % PER_HEAD)[:, None] * SIZE + token[None, :]
    tl.store(logits_ptr + at, logits, mask=(query == T - 1)[:, None] & (token < SIZE)[None, :])


@triton.jit
def attend(
    q_ptr, quantized_ptr, buffered_ptr,
    key_codes, key_scale, key_zero, value_codes, value_scale, value_zero,
    keys_ptr, values_ptr,
    out_ptr, top_ptr, total_ptr,
    TO_BASE_2, T: tl.constexpr, K: tl.constexpr, PER_HEAD: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
    BITS: tl.constexpr, SIZE: tl.constexpr, KEY_GROUP: tl.constexpr, VALUE_GROUP: tl.constexpr, CODED_TILE: tl.constexpr,
    CAPACITY: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Weighted values, maximum (base 2) and sum of exponentials of each query row, over the program's share of the tokens."""
    head = tl.program_id(0).to(tl.int64)
    batch = head // K
    rows, query, valid, q_row = query_rows(T, K, PER_HEAD, M)
    q = tl.load(q_ptr + q_row[:, None] * H + tl.arange(0, H)[None, :], mask=valid[:, None], other=0.0)
    acc, top, total = attend_codes(
        q, rows, query, head, tl.load(quantized_ptr + batch),
        key_codes, key_scale, key_zero, value_codes, value_scale, value_zero, q_ptr, q_ptr,
        TO_BASE_2, T, PER_HEAD, H, M, BITS, SIZE, KEY_GROUP, VALUE_GROUP, CODED_TILE, SPLITS, False,
    )  # fmt: skip
    acc, top, total = attend_buffer(
        q, query, tl.load(buffered_ptr + batch), keys_ptr + head * CAPACITY * H, values_ptr + head * CAPACITY * H, acc, top, total,
        TO_BASE_2, T, PER_HEAD, H, M, TILE, SPLITS,
    )  # fmt: skip
    store_partial(out_ptr, top_ptr, total_ptr, acc, top, total, rows, valid, T * PER_HEAD, H, SPLITS)


@triton.jit
def attend_replaced(
    q_ptr, quantized_ptr, buffered_ptr,
    key_codes, key_scale, key_zero, value_codes, value_scale, value_zero,
    left_out_ptr, positions_ptr, replacing_keys, replacing_values,
    keys_ptr, values_ptr,
    out_ptr, top_ptr, total_ptr, logits_ptr, replaced_logits_ptr,
    TO_BASE_2, T: tl.constexpr, K: tl.constexpr, PER_HEAD: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
    BITS: tl.constexpr, SIZE: tl.constexpr, KEY_GROUP: tl.constexpr, VALUE_GROUP: tl.constexpr, CODED_TILE: tl.constexpr,
    CAPACITY: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """What `attend` does, where up to COUNT tokens of the KV head are read in full precision and left out of its codes. Also stores the
    logits (base 2) that the queries of the last token have with each token in codes, and with each of those."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    batch = head // K
    channels = tl.arange(0, H)
    rows, query, valid, q_row = query_rows(T, K, PER_HEAD, M)
    q = tl.load(q_ptr + q_row[:, None] * H + channels[None, :], mask=valid[:, None], other=0.0)
    acc, top, total = attend_codes(
        q, rows, query, head, tl.load(quantized_ptr + batch),
        key_codes, key_scale, key_zero, value_codes, value_scale, value_zero, left_out_ptr, logits_ptr,
        TO_BASE_2, T, PER_HEAD, H, M, BITS, SIZE, KEY_GROUP, VALUE_GROUP, CODED_TILE, SPLITS, True,
    )  # fmt: skip
    tiles = (COUNT + TILE - 1) // TILE
    for i in range(split * tiles // SPLITS, (split + 1) * tiles // SPLITS):
        number = i * TILE + tl.arange(0, TILE)
        there = tl.load(positions_ptr + head * COUNT + number, mask=number < COUNT, other=-1) >= 0
        at = (head * COUNT + number) * H
        keys = tl.load(replacing_keys + at[None, :] + channels[:, None], mask=there[None, :], other=0.0)
        values = tl.load(replacing_values + at[:, None] + channels[None, :], mask=there[:, None], other=0.0)
        logits = tl.where(there[None, :], tl.dot(q, keys) * TO_BASE_2, float("-inf"))
        store_logits(replaced_logits_ptr, logits, head, rows, query, number, COUNT, T, PER_HEAD)
        acc, top, total = take_in(logits, values, acc, top, total)
    acc, top, total = attend_buffer(
        q, query, tl.load(buffered_ptr + batch), keys_ptr + head * CAPACITY * H, values_ptr + head * CAPACITY * H, acc, top, total,
        TO_BASE_2, T, PER_HEAD, H, M, TILE, SPLITS,
    )  # fmt: skip
    store_partial(out_ptr, top_ptr, total_ptr, acc, top, total, rows, valid, T * PER_HEAD, H, SPLITS)
