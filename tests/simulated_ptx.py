"""`pallas_kernels.gpu.ptx` on a simulated GPU (simulated_gpu.py): what it emits is done at once.

Its arithmetic is on arrays of 32 lanes, its PTX by the few instructions that the kernels use. Copies of lanes come as late as their waits
allow, those of whole lines at once; products of a warpgroup are done when they are waited for.
"""

import functools
import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from simulated_gpu import Arrivals, Lanes, Memory, changed_if, constant, loop, scalar, when, while_loop
from simulated_races import BULK, COPIED, LANES, here

from pallas_kernels.gpu import ptx

RANK_BITS = 20  # of an address of shared memory below the rank of its block


def inline(code: str, *args: Lanes, results: str = "", effects: bool = True, collective: bool = False) -> tuple[Lanes, ...]:
    assert not collective or here.mask.all() or not here.mask.any(), f"not all lanes run {code}"
    run, found = instruction(code)
    out = run(found, code, *[x.raw for x in args])
    out = () if out is None else out if isinstance(out, tuple) else (out,)
    out = tuple([x if isinstance(x, Lanes) else Lanes(x) for x in out])
    assert "".join(["f" if x.raw.dtype == np.float32 else "r" for x in out]) == results, code
    return out


@functools.cache
def instruction(code: str) -> tuple[Callable, re.Match]:
    for pattern, run in INSTRUCTIONS.items():
        if found := re.match(pattern, code.strip()):
            return run, found
    raise LookupError(f"INSTRUCTIONS has none like {code}")


def _memory(name: str) -> Memory:
    return here.block.device.memory if name == "global" else here.block.shared


def _load(found, code, at):
    return _memory(found[1]).load(at, int(found[2] or 1), {"b": np.int32, "f": np.float32}[found[3]])


def _load_cluster(found, code, at):
    """Addresses as `_in_block` makes them."""
    out = np.zeros((32, int(found[1] or 1)), np.float32 if found[2] == "f" else np.int32)
    rank, at = at >> RANK_BITS, at & ((1 << RANK_BITS) - 1)
    for other in np.unique(rank[here.mask]):
        with when(Lanes(rank == other)):
            block = here.block.cluster.blocks[other - 1]
            assert not block.ended, f"block {here.block.index} reads shared memory of block {block.index}, which has ended"
            loaded = block.shared.load(at, out.shape[1], out.dtype)
            out[here.mask] = np.stack([x.raw for x in loaded], 1)[here.mask]
    return tuple(np.ascontiguousarray(column) for column in out.T)


def _in_block(found, code, at, rank):
    """The address with the block's rank, plus 1, above it: no address of a block's own."""
    assert (rank[here.mask] >= 0).all() and (rank[here.mask] < len(here.block.cluster.blocks)).all(), f"no blocks of ranks {rank}"
    return at + ((rank + 1) << RANK_BITS)


def _meet_cluster(found, code):
    assert here.mask.all(), "all lanes of a cluster meet"
    here.block.cluster.meet()


def _store(found, code, *args):
    *values, at = (args[1], args[0]) if code.rstrip(";").endswith("$1") else args
    _memory(found[1]).store(at, np.stack([x.view(np.int32) for x in values], 1))


def _any_greater(found, code, *pairs):
    with np.errstate(invalid="ignore"):
        return constant(int(any((a > b).any() for a, b in zip(pairs[::2], pairs[1::2]))), np.int32)


def _ballot(found, code, x):
    return constant(int(np.sum((x != 0) << LANES.astype(np.int64))), np.int32)


def to_odd(x: np.ndarray) -> np.ndarray:
    """float32 of float64, where what lies between two numbers becomes the odd one: rounding that once more is as rounding `x` once."""
    with np.errstate(over="ignore"):
        nearest = x.astype(np.float32)
    beside = np.nextafter(nearest, np.where(x > nearest, np.inf, -np.inf).astype(np.float32))
    return np.where((nearest == x) | ~np.isfinite(nearest) | (nearest.view(np.int32) & 1 == 1), nearest, beside)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    # ml_dtypes rounds float64 once from 0.7 on, and by way of float32 before.
    bits = (to_odd(x) if x.dtype == np.float64 else x).astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(np.isnan(x), 0x7FFF, bits).astype(np.uint16)


def _spin_wait(found, code, *at):
    words = []

    def there():
        words[:] = [word for address in at for word in here.block.device.memory.load(address, 4, np.int32)]
        return not (np.stack([word.raw for word in words])[:, here.mask].view(np.uint32) == ptx.ABSENT).any()

    here.block.device.wait(there, "what another block hands over")
    return *words, constant(0, np.int32)


def _take_ticket(found, code, counter, taker):
    out = np.zeros(32, np.int32)
    for lane in LANES[here.mask & (taker != 0)]:
        with when(Lanes(lane == LANES)):
            memory = here.block.device.memory
            (count,) = memory.load(counter, 1, np.int32)
            memory.store(counter, (count.raw + 1)[:, None])
            out[lane] = count.raw[lane]
    return out


def _copy(to, source, width, sizes):
    memory, shared = here.block.device.memory, here.block.shared
    to, source, sizes = (x[here.mask].astype(np.int64) for x in (to, source, sizes))
    assert not ((to | source) % min(width, 16)).any() and (sizes >= 0).all() and (sizes <= width).all()
    read = np.arange(width) < sizes[:, None]
    places = np.where(read, (source - memory.start)[:, None] + np.arange(width), 0)
    assert memory.allowed[places][read].all(), f"addresses {source} are of no array"
    within = (to - shared.start)[:, None] + np.arange(width)
    assert within.size == 0 or (within.min() >= 0 and within.max() < len(shared.bytes))
    shared.bytes[within] = np.where(read, memory.bytes[places], 0)


def _words(to, width):
    return (to[here.mask].astype(np.int64) - here.block.shared.start)[:, None] // 4 + np.arange(width // 4)


def _copy_async(found, code, to, source, size=None):
    if not here.mask.any():  # as in most calls: a branch that is not taken is emitted all the same
        return
    offset, width = int(found[1]), int(found[2])
    here.copies[-1].append((here.mask, to + offset, source + offset, width, np.full(32, width) if size is None else size))
    words = np.arange(0, width, 4)
    here.block.shared.touched.writes(_words(to + offset, width), LANES[here.mask], COPIED, source[here.mask][:, None] + offset + words)


def _commit(found, code):
    if here.mask.any():
        here.copies.append([])
        here.past.tell_of_copies(COPIED)


def _land(groups: int) -> None:
    """All copies but those of this number of groups, the last committed."""
    while len(here.copies) > groups + 1:
        for mask, *copy in here.copies.pop(0):
            before, here.mask = here.mask, mask
            _copy(*copy)
            here.mask = before


def _wait_for_copies(found, code):
    if here.mask.any():
        _land(int(found[1]))
        here.past.landed = here.past.copy_steps[COPIED] - 1 - int(found[1])


def _arrive_after_copies(found, code, at):
    if here.mask.any():
        here.copies.append([])
        _land(0)
        told = here.past.tell_of_copies(COPIED)
        for lane in LANES[here.mask]:
            here.block.arrivals[int(at[lane])].change(told, arrivals=1)


def _copy_bulk(found, code, to, source, size, arrival):
    for lane in LANES[here.mask]:
        with when(Lanes(lane == LANES)):
            assert size[lane] > 0 and size[lane] % 16 == 0
            here.block.shared.touched.writes(_words(to, int(size[lane])), LANES[here.mask], BULK)
            _copy(to, source, int(size[lane]), size)
            here.block.arrivals[int(arrival[lane])].change(here.past.tell_of_copies(BULK), size=-int(size[lane]))


def _init(found, code, at):
    for address in at[here.mask]:
        here.block.arrivals[int(address)] = Arrivals(int(found[1]), here.block.device)


def _arrive(found, code, at, size=None):
    if here.mask.any():
        told = here.past.tell(here.mask)
        for lane in LANES[here.mask]:
            here.block.arrivals[int(at[lane])].change(told, arrivals=1, size=0 if size is None else int(size[lane]))


def _wait(found, code, at, parity):
    if here.mask.any():
        address, wanted = scalar(Lanes(at)), scalar(Lanes(parity))
        here.block.arrivals[address].wait(lambda found: found.phase % 2 != wanted, f"arrivals at {address}")


def _meet(found, code, barrier):
    if here.mask.any():
        here.block.meet(scalar(Lanes(barrier)), int(found[1]) // 32)


def _meet_in_warp(found, code):
    if here.mask.any():
        here.past.meet()


def _shuffle(found, code, x):
    lane = int(found[2])
    return x[LANES ^ lane if found[1] == "bfly" else np.full(32, lane)]


G, T = LANES >> 2, LANES & 3  # lane 4 g + t


def _multiplied(args: tuple, entries_a: Callable, entries_b: Callable, kind) -> tuple[np.ndarray, ...]:
    """`mma` and `mma_bytes`. entries_a, entries_b: the numbers [lane, 2 or 4] of a register."""
    a, b, acc = [entries_a(x) for x in args[:4]], [entries_b(x) for x in args[4:6]], args[6:]
    each = a[0].shape[1]
    within = each * T[:, None] + np.arange(each)
    left, right, sums = np.zeros((16, 8 * each)), np.zeros((8 * each, 8)), np.zeros((16, 8))
    for i in range(4):
        left[(G + 8 * (i & 1))[:, None], 4 * each * (i >> 1) + within] = a[i]
        sums[G + 8 * (i >> 1), 2 * T + (i & 1)] = acc[i]
    for i in range(2):
        right[4 * each * i + within, G[:, None]] = b[i]
    sums += np.einsum("ik,kj", left, right)  # not BLAS, whose calls let go of Python's lock
    return tuple(sums[G + 8 * (i >> 1), 2 * T + (i & 1)].astype(kind) for i in range(4))


def _mma_bytes(found, code, *args):
    view = lambda kind: lambda x: np.ascontiguousarray(x).view(kind).reshape(32, 4)
    return _multiplied(args, view(np.uint8), view(np.int8), np.int32)


def halves(x: np.ndarray, kind: str) -> np.ndarray:
    """[lane, 2] float32 of pairs of 16-bit floats."""
    entries = np.ascontiguousarray(x).view({"bf16": ml_dtypes.bfloat16, "f16": np.float16}[kind]).reshape(32, 2)
    return entries.astype(np.float32)


def _mma(found, code, *args):
    entries = lambda x: halves(x, found[1])
    return _multiplied(args, entries, entries, np.float32)


def _operand(at: np.ndarray) -> list[np.ndarray]:
    """The two words of `mma`'s b of each lane, of which the second lies 128 bytes behind the first."""
    shared = here.block.shared
    hidden = shared.touched.hidden[(at[here.mask] - shared.start)[:, None] // 4 + np.array([0, 32])]
    assert not hidden.any(), f"a race: at {at[here.mask]} lies what has not been published"
    return [shared.load(at + 128 * word, 1, np.int32)[0].raw for word in (0, 1)]


def _mma_warpgroup(found, code, b, *words):
    """A warp's 16 rows, for which it needs no other warp."""
    tile_bytes = (int(found[1]) >> 32) * 16
    out = []
    for tile in range(int(re.search(r"m64n(\d+)k16\.f32\.f16\.f16", code)[1]) // 8):
        acc = (np.zeros(32, np.float32),) * 4
        for i in range(0, len(words), 4):
            at = b + tile * tile_bytes + i // 4 * 256 + (4 * LANES).astype(np.int32)
            operand = _operand(at)
            entries = lambda x: halves(x, "f16")
            acc = _multiplied((*words[i : i + 4], *operand, *acc), entries, entries, np.float32)
        out += acc
    return tuple(out)


def _start_products(found, code, *args):
    """As `_mma_warpgroup`, but done when it is waited for: until then the sums are NaNs. args: the sums, where b is, and the fragments."""
    columns, tile_bytes = int(found[2]) // 2, (int(found[1]) >> 32) * 16
    acc, b, words = args[:columns], args[columns], args[columns + 1 :]
    places = [int(place) * 16 for place in re.findall(r"add\.s64 b, start, (\d+);", code)]
    out = [np.full(32, np.nan, np.float32) for _ in acc]
    entries = lambda x: halves(x, "bf16")

    def multiply():
        for tile in range(0, columns, 4):
            sums = acc[tile : tile + 4]
            for i, place in enumerate(places):
                operand = _operand(b + tile // 4 * tile_bytes + place + (4 * LANES).astype(np.int32))
                sums = _multiplied((*words[4 * i : 4 * i + 4], *operand, *sums), entries, entries, np.float32)
            for register, x in zip(out[tile : tile + 4], sums):
                register[:] = x

    if here.mask.any():
        here.products.append(multiply)
    return tuple(out)


def _wait_for_products(found, code, *acc):
    while here.mask.any() and len(here.products) > int(found[1]):
        here.products.pop(0)()
    return acc


def _of_matrix(rows: np.ndarray, transposed: bool) -> np.ndarray:
    """Registers of lanes 4 g + t: row g of rows [8, 8] of 16-bit entries, columns 2 t and 2 t + 1."""
    entries = np.ascontiguousarray(rows.T if transposed else rows)
    return entries.reshape(32, 2).view(np.int32)[:, 0]


def _load_matrices(found, code, at):
    places = here.block.shared.places(at, 16)
    here.block.shared.touched.reads(places, LANES)
    rows = here.block.shared.words[places].view(np.uint16).reshape(4, 8, 8)
    return tuple(_of_matrix(matrix, bool(found[1])) for matrix in rows)


def _transpose(found, code, x):
    return _of_matrix(np.ascontiguousarray(x).view(np.uint16).reshape(8, 8), True)


def _prmt(found, code, a, b):
    order = int(found[1], 0)
    source = np.stack([a, b], 1).view(np.uint8).reshape(32, 8)
    picked = np.stack([source[:, order >> 4 * i & 7] for i in range(4)], 1)
    return np.ascontiguousarray(picked).view(np.int32)[:, 0]


def _pair(found, code, high, low):
    bits = bf16_bits if found[1] == "bf16" else lambda x: x.astype(np.float16).view(np.uint16)
    return (bits(low).astype(np.uint32) | bits(high).astype(np.uint32) << 16).view(np.int32)


def _max_bf16(found, code, a, b):
    wide = lambda x: (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return bf16_bits(np.fmax(wide(a), wide(b))).view(np.int32)


def _multiply_f16(found, code, a, b):
    kind = found[1]
    products = halves(a, kind) * halves(b, kind)
    return np.ascontiguousarray(products.astype(np.float16) if kind == "f16" else bf16_bits(products)).view(np.int32)[:, 0]


def _fma_bf16(found, code, a, b, c):
    a, b, c = (halves(x, "bf16").astype(np.float64) for x in (a, b, c))
    return bf16_bits(a * b + c).reshape(64).view(np.int32)


def _max_u16(found, code, a, b):
    return np.maximum(np.ascontiguousarray(a).view(np.uint16), np.ascontiguousarray(b).view(np.uint16)).view(np.int32)


def _approximate(function: Callable) -> Callable:
    """All of them flush what is too small for a normal number."""

    def run(found, code, x):
        out = function(x.astype(np.float64)).astype(np.float32)
        return np.where(np.abs(out) < np.finfo(np.float32).tiny, np.float32(0), out)

    return run


def _fma(found, code, a, b, c):
    return (a.astype(np.float64) * b + c).astype(np.float32)


INSTRUCTIONS = {
    r"ld\.(global|shared)(?:\.v(\d))?\.([bf])32": _load,
    r"ld\.shared::cluster(?:\.v(\d))?\.([bf])32": _load_cluster,
    r"mapa\.shared::cluster\.u32": _in_block,
    r"barrier\.cluster\.arrive\.release\.aligned; barrier\.cluster\.wait\.acquire\.aligned;": _meet_cluster,
    r"st\.(?:relaxed\.(?:gpu|sys)\.)?(global|shared)(?:\.v(\d))?\.([bf])32": _store,
    r"\{ \.reg \.b16 low; .* st\.global\.b16": lambda found, code, at, x: here.block.device.memory.store_halves(at, x),
    r"red\.shared\.max\.s32": lambda found, code, at, x: here.block.shared.raise_to(at, x),
    r"\{ \.reg \.pred holds; .* vote\.sync\.ballot": _ballot,
    r"redux\.sync\.add\.s32": lambda found, code, x: constant(int(x.sum()), np.int32),
    r"popc\.b32": lambda found, code, x: np.bitwise_count(x.view(np.uint32)).astype(np.int32),
    r"\{ \.reg \.pred any; .* vote\.sync\.any": _any_greater,
    r"\{ \.reg \.pred again; .* left, \d+; spin:": _spin_wait,
    r"\{ \.reg \.pred takes; .* atom\.": _take_ticket,
    r"cp\.async\.c[ag]\.shared\.global(?:\.L2::\d+B)? \[\$0\+(\d+)\], \[\$1\+\d+\], (\d+)": _copy_async,
    r"cp\.async\.bulk\.": _copy_bulk,
    r"cp\.async\.commit_group": _commit,
    r"cp\.async\.wait_group (\d+)": _wait_for_copies,
    r"mbarrier\.init\.shared\.b64 \[\$0\], (\d+)": _init,
    r"mbarrier\.arrive\.": _arrive,
    r"\{ \.reg \.b32 all, zero; .* add\.u32 \$0, \$1, all; \}": lambda found, code, address, *words: address,
    r"cp\.async\.mbarrier\.arrive\.noinc": _arrive_after_copies,
    r"\{ \.reg \.pred done; again: mbarrier\.try_wait\.parity": _wait,
    r"bar\.warp\.sync": _meet_in_warp,
    r"bar\.sync \$0, (\d+)": _meet,
    r"shfl\.sync\.(bfly|idx)\.b32 \$0, \$1, (\d+)": _shuffle,
    r"shfl\.sync\.idx\.b32 \$0, \$1, \$2": lambda found, code, x, lane: x[lane & 31],
    r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.u8\.s8": _mma_bytes,
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)": _mma,
    r"\{ \.reg \.b32 at; .* or\.b64 b, b, (\d+); .*wgmma": _mma_warpgroup,
    r"\{ \.reg \.b32 at; \.reg \.b64 start, b; .* start, start, (\d+); .*? wgmma\.mma_async\S*n(\d+)k16\.f32\.bf16": _start_products,
    r"wgmma\.wait_group\.sync\.aligned (\d+);": _wait_for_products,
    r"fence\.proxy\.async": lambda found, code: here.block.shared.touched.publish(here.mask),
    r"ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared\.b16": _load_matrices,
    r"movmatrix\.sync": _transpose,
    r"mul\.rn\.(f16|bf16)x2": _multiply_f16,
    r"max\.u16x2": _max_u16,
    r"lop3\.b32 \$0, \$1, \$2, (\w+), 0xEA;": lambda found, code, a, b: a & b | constant(int(found[1], 0), np.int32),
    r"prmt\.b32 \$0, \$1, \$2, (\w+)": _prmt,
    r"cvt\.rn\.(bf16|f16)x2\.f32": _pair,
    r"\{ \.reg \.b16 low, high; .* cvt\.f32\.f16 \$0, (low|high)": lambda found, code, x: halves(x, "f16")[:, int(found[1] == "high")],
    r"max\.bf16x2": _max_bf16,
    r"cvt\.rn\.f32\.s32": lambda found, code, x: x.astype(np.float32),
    r"fma\.rn\.f32": _fma,
    r"fma\.rn\.bf16x2": _fma_bf16,
    r"rcp\.approx": _approximate(lambda x: 1 / x),
    r"rsqrt\.approx": _approximate(lambda x: 1 / np.sqrt(x)),
    r"ex2\.approx": _approximate(np.exp2),
    r"lg2\.approx": _approximate(np.log2),
}


def fail_where(condition: Lanes, message: str) -> None:
    assert not (condition.raw & here.mask).any(), message


def of_lane(x: Lanes, lane: Lanes) -> Lanes:
    if here.mask.any():
        scalar(lane)
    return ptx.of_lanes(x, lane)


def simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives `pallas_kernels.gpu.ptx` these values and instructions, and with it fragments, numerics and every kernel."""
    i32 = lambda x: Lanes(constant(x, np.int32))
    replaced = {
        "Value": Lanes,
        "inline": inline,
        "update": lambda code, values, *args: inline(code, *values, *args, results="f" * len(values), collective=True),
        "when": when,
        "fail_where": fail_where,
        "of_lane": of_lane,
        "loop": loop,
        "while_loop": while_loop,
        "changed_if": changed_if,
        "i32": i32,
        "f32": lambda x: Lanes(constant(x, np.float32)),
        "i64": lambda x: Lanes(x.raw.view(np.uint32).astype(np.int64)),
        "as_float": lambda x: Lanes(x.raw.view(np.float32)),
        "as_bits": lambda x: Lanes(x.raw.view(np.int32)),
        "select": lambda condition, yes, no: Lanes(np.where(condition.raw, yes.raw, no.raw)),
        "minimum": lambda a, b: Lanes(np.minimum(a.raw, b.raw)),
        "maximum": lambda a, b: Lanes(np.fmax(a.raw, b.raw)),
        "block_index": lambda: i32(here.block.index),
        "thread_index": lambda: Lanes((here.warp * 32 + LANES).astype(np.int32)),
        "address": lambda at: Lanes(constant(at, np.int32 if at < 1 << 31 else np.int64)),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(ptx, name, value)


def at_once(function):
    """What a jitted function does, without tracing it."""
    return function.__wrapped__
