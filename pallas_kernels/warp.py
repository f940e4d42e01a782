"""What one warp of an NVIDIA GPU does, for kernels in Mosaic GPU that place every register themselves.

Pallas' own operations belong to a warpgroup of four warps, which then wait for each other in every step. These functions emit
MLIR for a single warp: tensor core products of fragments (PTX ISA, "mma.m16n8k16", "mma.m16n8k32"), copies that run in the background, and
arithmetic on values that each of its 32 lanes holds. They are for the bodies of `plgpu.inline_mgpu`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

ABSENT = 0xFFFFFFFF  # a word that nobody has handed over yet: two NaNs in bfloat16 that no conversion gives
SPIN_TRIES = 1 << 23  # of `spin_wait`: some seconds, where microseconds are to be expected


@dataclasses.dataclass(frozen=True)
class Value:
    """One value per lane: i32, i64, f32 or i1. Integers are unsigned in shifts and division, signed in comparisons."""

    raw: ir.Value

    @property
    def is_float(self) -> bool:
        return isinstance(self.raw.type, ir.FloatType)

    def like(self, other: "Value | float") -> "Value":
        return other if isinstance(other, Value) else Value(utils.c(other, self.raw.type))

    def binary(self, other: "Value | float", integers: Callable, floats: Callable | None = None) -> "Value":
        return Value((floats if self.is_float else integers)(self.raw, self.like(other).raw))

    def __add__(self, other):
        return self.binary(other, arith.addi, arith.addf)

    def __sub__(self, other):
        return self.binary(other, arith.subi, arith.subf)

    def __mul__(self, other):
        return self.binary(other, arith.muli, arith.mulf)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other):
        return self.binary(other, None, arith.divf)

    def __floordiv__(self, other):
        return self.binary(other, arith.divui)

    def __mod__(self, other):
        return self.binary(other, arith.remui)

    def __and__(self, other):
        return self.binary(other, arith.andi)

    def __or__(self, other):
        return self.binary(other, arith.ori)

    def __xor__(self, other):
        return self.binary(other, arith.xori)

    def __rshift__(self, other):
        return self.binary(other, arith.shrui)

    def __lshift__(self, other):
        return self.binary(other, arith.shli)

    def __lt__(self, other):
        return Value(arith.cmpi(arith.CmpIPredicate.slt, self.raw, self.like(other).raw))

    def __eq__(self, other):
        return Value(arith.cmpi(arith.CmpIPredicate.eq, self.raw, self.like(other).raw))

    def __ne__(self, other):
        return Value(arith.cmpi(arith.CmpIPredicate.ne, self.raw, self.like(other).raw))

    __hash__ = object.__hash__


def i32(x: int) -> Value:
    return Value(utils.c(x, ir.IntegerType.get_signless(32)))


def f32(x: float) -> Value:
    return Value(utils.c(x, ir.F32Type.get()))


def i64(x: Value) -> Value:
    """A non-negative i32 as i64."""
    return Value(arith.extui(ir.IntegerType.get_signless(64), x.raw))


def as_float(x: Value) -> Value:
    """The float32 with the bits of an i32."""
    return Value(arith.bitcast(ir.F32Type.get(), x.raw))


def as_bits(x: Value) -> Value:
    return Value(arith.bitcast(ir.IntegerType.get_signless(32), x.raw))


def select(condition: Value, yes: Value, no: Value) -> Value:
    return Value(arith.select(condition.raw, yes.raw, no.raw))


def minimum(a: Value, b: Value) -> Value:
    return Value(arith.minsi(a.raw, b.raw))


def maximum(a: Value, b: Value) -> Value:
    """Of signed integers, or of floats: the other where one is NaN."""
    return Value((arith.maxnumf if a.is_float else arith.maxsi)(a.raw, b.raw))


def ptx(code: str, *args: Value, results: str = "", effects: bool = True, collective: bool = False) -> tuple[Value, ...]:
    """Inline PTX; `results` has a letter per result: r (i32) or f (f32).

    effects: it touches memory. collective: all lanes of the warp run it together.
    """
    types = [{"r": ir.IntegerType.get_signless(32), "f": ir.F32Type.get()}[letter] for letter in results]
    raw = [a.raw for a in args]
    out = utils.inline_ptx(code, *raw, result_types=types or None, has_side_effects=effects, convergent=collective)
    return tuple(map(Value, out or ()))


def pure(code: str, *args: Value, result: str = "r") -> Value:
    """Inline PTX that computes one result, $0, from this lane's arguments alone."""
    return ptx(code, *args, results=result, effects=False)[0]


def shuffle(mode: str, x: Value, lane: int) -> Value:
    """x of lane `lane` (mode "idx"), or of the lane whose number differs in those bits ("bfly")."""
    code = f"shfl.sync.{mode}.b32 $0, $1, {lane}, 31, -1;"
    return ptx(code, x, results="f" if x.is_float else "r", effects=False, collective=True)[0]


def block_index() -> Value:
    return Value(utils.block_idx())


def thread_index() -> Value:
    return Value(utils.thread_idx())


def uniform(x: Value) -> Value:
    """x of lane 0: tells the compiler that all lanes agree."""
    return shuffle("idx", x, 0)


def loop(lower: Value, upper: Value, carry, body: Callable):
    """carry = body(i, carry) for i from lower to upper; carry is a pytree of Values."""
    leaves, structure = jax.tree.flatten(carry)
    for_op = scf.ForOp(lower.raw, upper.raw, i32(1).raw, [x.raw for x in leaves])
    with ir.InsertionPoint(for_op.body):
        inner = jax.tree.unflatten(structure, map(Value, for_op.inner_iter_args))
        leaves = jax.tree.leaves(body(Value(for_op.induction_variable), inner))
        scf.YieldOp([x.raw for x in leaves])
    return jax.tree.unflatten(structure, map(Value, for_op.results))


def while_loop(condition: Callable, carry, body: Callable):
    """carry = body(carry) as long as condition(carry) holds, which all lanes agree on; carry is a pytree of Values."""
    leaves, structure = jax.tree.flatten(carry)
    types = [x.raw.type for x in leaves]
    while_op = scf.WhileOp(types, [x.raw for x in leaves])
    inner = lambda block: jax.tree.unflatten(structure, map(Value, block.arguments))
    before, after = (ir.Block.create_at_start(region, types) for region in while_op.regions)
    with ir.InsertionPoint(before):
        scf.ConditionOp(condition(inner(before)).raw, before.arguments)
    with ir.InsertionPoint(after):
        scf.YieldOp([x.raw for x in jax.tree.leaves(body(inner(after)))])
    return jax.tree.unflatten(structure, map(Value, while_op.results))


def when(condition: Value):
    """Context: what is emitted inside runs in the lanes where the condition holds."""
    return utils.when(condition.raw)


def trap_where(condition: Value) -> None:
    """Ends the whole launch where the condition holds, with an error.

    Without a message of CUDA's (an assertion): with calls of that in the loops of matmul/mosaic_block.py, a result was wrong now and then.
    """
    with when(condition):
        ptx("trap;")


# Memory --------------------------------------------------------------------------------------------------------------


def address(ref: ir.Value) -> Value:
    """Byte address of a ref's first element: i64 in global, i32 in shared memory."""
    pointer = utils.memref_ptr(ref)
    width = 32 if utils.is_smem_ref(ref) else 64
    return Value(llvm.ptrtoint(ir.IntegerType.get_signless(width), pointer))


def load_global(at: Value, words: int = 1, result: str = "r") -> tuple[Value, ...]:
    """1, 2 or 4 words of 32 bits, as many as `at` is aligned to."""
    return ptx(f"ld.global{_vector(words)}.{_TYPES[result]} {_list(words)}, [${words}];", at, results=result * words)


def load_shared(at: Value, words: int, result: str = "r") -> tuple[Value, ...]:
    """Any number of words of 32 bits, read four or fewer at a time."""
    out = []
    while len(out) < words:
        n = min(4, words - len(out))
        out += ptx(f"ld.shared{_vector(n)}.{_TYPES[result]} {_list(n)}, [${n}];", at + 4 * len(out), results=result * n)
    return tuple(out)


def store_global(at: Value, x: Value) -> None:
    ptx(f"st.global.{'f32' if x.is_float else 'b32'} [$0], $1;", at, x)


def store_global_words(at: Value, *x: Value) -> None:
    """1, 2 or 4 words of 32 bits, as many as `at` is aligned to."""
    ptx(f"st.global{_vector(len(x))}.b32 [${len(x)}], {_list(len(x))};", *x, at)


def store_relaxed(at: Value, word: Value) -> None:
    """32 bits for another block that waits for them with `spin_wait`."""
    ptx("st.relaxed.gpu.global.b32 [$0], $1;", at, word)


def spin_wait(at: Sequence[Value]) -> list[tuple[Value, ...]]:
    """Loads four words at each address, again and again until none is `ABSENT`: other blocks store them with `store_relaxed`.

    A vector load is a load of each of its words (PTX ISA, "Vector Data-types" of the memory consistency model), and each word says itself
    whether it is there, so no order between them matters. After SPIN_TRIES the launch ends with an error.
    """
    count = 4 * len(at)
    loads, checks = [], []
    for i in range(len(at)):
        words = [f"${4 * i + j}" for j in range(4)]
        loads.append(f"ld.relaxed.gpu.global.v4.b32 {{{', '.join(words)}}}, [${count + 1 + i}];")
        checks += [f"max.u32 most, most, {word};" for word in words]
    code = f"""{{ .reg .pred again; .reg .b32 most, left; mov.b32 left, {SPIN_TRIES}; spin: {" ".join(loads)}
        mov.b32 most, 0; {" ".join(checks)} sub.u32 left, left, 1; setp.ne.u32 again, left, 0;
        setp.eq.and.u32 again, most, {ABSENT}, again; @again bra spin;
        setp.eq.u32 again, most, {ABSENT}; vote.sync.any.pred again, again, -1; selp.b32 ${count}, 1, 0, again; }}"""
    # All lanes vote, so that none of them branches alone: instructions for whole warps follow.
    *out, in_vain = ptx(code, *at, results="r" * (count + 1), collective=True)
    trap_where(in_vain == 1)
    return [tuple(out[i : i + 4]) for i in range(0, count, 4)]


def take_ticket(counter: Value, taker: Value) -> Value:
    """Adds 1 to a counter in global memory, in the lane where `taker` is not 0, and gives that lane what it was before; 0 to others."""
    code = "{ .reg .pred takes; setp.ne.s32 takes, $2, 0; mov.b32 $0, 0; @takes atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }"
    return ptx(code, counter, taker, results="r")[0]


def store_shared(at: Value, *x: Value) -> None:
    """1, 2 or 4 values of 32 bits."""
    code = f"st.shared{_vector(len(x))}.{'f32' if x[0].is_float else 'b32'} [${len(x)}], {_list(len(x))};"
    ptx(code, *x, at)


_TYPES = {"r": "b32", "f": "f32"}


def _vector(words: int) -> str:
    return {1: "", 2: ".v2", 4: ".v4"}[words]


def _list(words: int) -> str:
    return "$0" if words == 1 else "{" + ", ".join(f"${i}" for i in range(words)) + "}"


def copy_async(shared: Value, source: Value, size: Value | None = None, *, width: int = 16, offset: int = 0) -> None:
    """`width` bytes (4, 8 or 16) to shared memory in the background, `offset` from both addresses.

    Of them the first `size` are read, and the rest are zero.
    """
    tail, args = ("", ()) if size is None else (", $2", (size,))
    level = "cg" if width == 16 else "ca"
    ptx(f"cp.async.{level}.shared.global [$0+{offset}], [$1+{offset}], {width}{tail};", shared, source, *args)


def commit_copies() -> None:
    """Makes the copies since the last commit one group."""
    ptx("cp.async.commit_group;")


def wait_for_copies(pending: int) -> None:
    """Waits until no more than `pending` of this lane's groups are under way."""
    ptx(f"cp.async.wait_group {pending};")


def copy_bulk(shared: Value, source: Value, size: Value, arrival: Value) -> None:
    """`size` bytes, a multiple of 16, to shared memory in the background, whole lines at a time; they count towards `arrival`."""
    code = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    ptx(code, shared, source, size, arrival)


def arrivals_init(arrival: Value, arrivals: int) -> None:
    """Makes 8 bytes of shared memory a barrier that so many arrive at; then all must meet."""
    ptx(f"mbarrier.init.shared.b64 [$0], {arrivals}; fence.mbarrier_init.release.cluster;", arrival)


def arrive(arrival: Value) -> None:
    ptx("mbarrier.arrive.shared.b64 _, [$0];", arrival)


def arrive_with(arrival: Value, size: Value) -> None:
    """Arrives; the barrier also waits for so many bytes of `copy_bulk`."""
    ptx("mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", arrival, size)


def arrive_after_copies(arrival: Value) -> None:
    """Arrives once this lane's copies so far are there."""
    ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", arrival)


def wait_for_arrivals(arrival: Value, parity: Value) -> None:
    """Waits for all to have arrived; parity: 0 the first time, then 1, then 0. With 1 the first time it does not wait.

    Without a bound: only warps and copies of the same block arrive, and these come to an end, or end the launch (`spin_wait`).
    """
    code = "{ .reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [$0], $1; @!done bra again; }"
    ptx(code, arrival, parity)


def synchronize(barrier: Value, warps: int) -> None:
    """Waits for the lanes of this warp, or of the `warps` warps that name the same barrier."""
    if warps == 1:
        ptx("bar.warp.sync -1;", collective=True)
    else:
        ptx(f"bar.sync $0, {32 * warps};", barrier, collective=True)


# Fragments: pairs of 16-bit floats in words, "bf16" or "f16" --------------------------------------------------------------


def mma(acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value], kind: str) -> tuple[Value, ...]:
    """acc [16, 8] float32 + a [16, 16] @ b [16, 8], in 4, 4 and 2 registers.

    Lane 4 g + t holds of acc rows g, g, g + 8, g + 8, columns 2 t, 2 t + 1; of a, pairs of columns (2 t, 2 t + 1) of rows g,
    g + 8, then columns 8 higher; of b, pairs of rows (2 t, 2 t + 1), then 8 higher, of column g.
    """
    code = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};"
    return ptx(code, *a, *b, *acc, results="ffff", effects=False, collective=True)


def mma_bytes(acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value]) -> tuple[Value, ...]:
    """acc [16, 8] int32 + a [16, 32] @ b [32, 8], unsigned and signed bytes, four in a register, where `mma` has pairs."""
    code = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    return ptx(code, *a, *b, *acc, results="rrrr", effects=False, collective=True)


def mma_warpgroup(a: Sequence[Sequence[Value]], b: Value, tiles: int, tile_bytes: int) -> list[tuple[Value, ...]]:
    """The sum over i of a[i] [64, 16] @ b[i] [16, 8 tiles], float16: for each tile the registers of `mma`.

    The four warps of a warpgroup run it together, each with 16 rows of a. b: where in shared memory, for each i, the words of `mma`'s
    b lie, the first of every lane and then the second; those of the next tile come `tile_bytes` later. They must be published.
    """
    columns = 4 * tiles
    acc = [f"d{i}" for i in range(columns)]
    # Where b is, and in units of 16 bytes the distances of the two words and of tiles (PTX ISA, "Matrix Descriptor Format").
    distances = 128 // 16 << 16 | tile_bytes // 16 << 32
    lines = [
        f".reg .b32 at; .reg .b64 b; .reg .pred add; .reg .f32 d<{columns}>;",
        f"shr.u32 at, ${columns}, 4; cvt.u64.u32 b, at; or.b64 b, b, {distances}; setp.ne.u32 add, at, at;",
        "wgmma.fence.sync.aligned;",
    ]
    for i in range(len(a)):
        fragment = ", ".join(f"${columns + 1 + 4 * i + j}" for j in range(4))
        form = f"wgmma.mma_async.sync.aligned.m64n{8 * tiles}k16.f32.f16.f16"
        # The first product replaces what is in the accumulators.
        lines.append(f"{form} {{{', '.join(acc)}}}, {{{fragment}}}, b, {'1' if i else 'add'}, 1, 1, 0; add.s64 b, b, {256 // 16};")
    lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
    lines += [f"mov.f32 ${i}, {x};" for i, x in enumerate(acc)]
    words = [x for fragment in a for x in fragment]
    out = ptx(f"{{ {' '.join(lines)} }}", b, *words, results="f" * columns, collective=True)
    return [out[i : i + 4] for i in range(0, columns, 4)]


def publish() -> None:
    """Lets `mma_warpgroup` read what this lane has written to shared memory, once all have met."""
    ptx("fence.proxy.async.shared::cta;")


def transpose(x: Value) -> Value:
    """An 8 x 8 matrix of 16-bit entries: lane 4 g + t gives row g, columns 2 t and 2 t + 1, and gets those of the transpose."""
    return ptx("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", x, results="r", effects=False, collective=True)[0]


def load_matrices(at: Value, *, transposed: bool) -> tuple[Value, ...]:
    """Four 8 x 8 matrices of 16-bit entries from shared memory; lane 8 i + r gives the address of row r of matrix i."""
    form = ".trans" if transposed else ""
    return ptx(f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16 {_list(4)}, [$4];", at, results="rrrr", collective=True)


def pair(low: Value, high: Value, kind: str) -> Value:
    """Two float32 rounded to 16 bits."""
    return pure(f"cvt.rn.{kind}x2.f32 $0, $1, $2;", high, low)


def round_bf16(x: Value) -> Value:
    return bf16_entries(pair(x, x, "bf16"))[0]


def bf16_entries(x: Value) -> tuple[Value, Value]:
    """The two float32 of a pair of bfloat16."""
    return as_float(x << 16), as_float(x & 0xFFFF0000)


def combine_bf16(combine: Callable[[Value, Value], Value], a: Value, b: Value) -> Value:
    """Pairs of bfloat16, combined in float32 and rounded."""
    return pair(*map(combine, bf16_entries(a), bf16_entries(b)), "bf16")


def multiply_pairs(a: Value, b: Value) -> Value:
    return pure("mul.rn.f16x2 $0, $1, $2;", a, b)


def largest(pairs: Sequence[Value]) -> Value:
    """The largest entry of pairs of bfloat16, as float32; NaNs count for nothing."""
    return maximum(*bf16_entries(functools.reduce(lambda a, b: pure("max.bf16x2 $0, $1, $2;", a, b), pairs)))


def largest_positive(pairs: Sequence[Value]) -> Value:
    """The bits of the largest entry of pairs of bfloat16 that are no less than 0, as those of a float32: a NaN is larger than all."""
    both = functools.reduce(lambda a, b: pure("max.u16x2 $0, $1, $2;", a, b), pairs)
    return maximum((both << 16) & 0x7FFFFFFF, both & 0x7FFF0000)


def nibble_masks(zero: Value) -> tuple[Value, Value]:
    """The masks of `unpack`, from a zero that the compiler does not know: it would make constants anew at every use."""
    return zero ^ 0x000F000F, zero ^ 0x00F000F0


def unpack(upper: Value, lower: Value | None, masks: tuple[Value, Value]) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
    """The codes of 4 bytes, or of 4 bytes in two planes (16 upper + lower), as float16 1024 + code: the last bits of the mantissa.

    Pairs of bytes (0, 2) and (1, 3), first of the low nibbles, then of the high ones, which without a lower plane are 1024 + 16 code.
    """
    if lower is None:
        both = upper, upper >> 8
        take = lambda x, mask: pure("lop3.b32 $0, $1, $2, 0x64006400, 0xEA;", x, mask)  # x & mask | 0x64006400
        return tuple(tuple(take(x, mask) for x in both) for mask in masks)
    low = (upper << 4) & 0xF0F0F0F0 | lower & 0x0F0F0F0F
    high = upper & 0xF0F0F0F0 | (lower >> 4) & 0x0F0F0F0F
    exponents = i32(0x64646464)
    expand = lambda x, order: pure(f"prmt.b32 $0, $1, $2, {order};", x, exponents)
    return tuple((expand(x, "0x4240"), expand(x, "0x4341")) for x in (low, high))


def gather_bytes(words: Sequence[Value], byte: int) -> Value:
    """That byte of four words."""
    halves = (pure(f"prmt.b32 $0, $1, $2, {byte | (4 + byte) << 4};", *words[i : i + 2]) for i in (0, 2))
    return pure("prmt.b32 $0, $1, $2, 0x5410;", *halves)


def swap_neighbours(a: Value, b: Value) -> tuple[Value, Value]:
    """The pairs (a0, b0) and (a1, b1) of pairs a and b."""
    return tuple(pure(f"prmt.b32 $0, $1, $2, {order};", a, b) for order in ("0x5410", "0x7632"))


# Arithmetic --------------------------------------------------------------------------------------------------------------


def fma(a: Value, b: Value, c: Value) -> Value:
    return pure("fma.rn.f32 $0, $1, $2, $3;", a, b, c, result="f")


def dot(tiles: Sequence[Sequence[Value]], weights: Sequence[Sequence[Value]], column: int, start: Value) -> Value:
    """start + the sum of one of this lane's columns of tiles of products, times weights [tile][row]."""
    for tile, pair in zip(tiles, weights):
        for x, weight in zip(tile[column::2], pair):
            start = fma(x, weight, start)
    return start


def add(a: Value, b: Value) -> Value:
    return a + b


def multiply(a: Value, b: Value) -> Value:
    return a * b


def to_float(x: Value) -> Value:
    """A signed integer."""
    return pure("cvt.rn.f32.s32 $0, $1;", x, result="f")


def reciprocal(x: Value) -> Value:
    return pure("rcp.approx.ftz.f32 $0, $1;", x, result="f")


def rsqrt(x: Value) -> Value:
    return pure("rsqrt.approx.ftz.f32 $0, $1;", x, result="f")


def exp2(x: Value) -> Value:
    return pure("ex2.approx.ftz.f32 $0, $1;", x, result="f")


def all_rows(x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Combines what the eight lanes 4 g + t, g = 0..7, hold; all of them get the result."""
    for bit in (4, 8, 16):
        x = combine(x, shuffle("bfly", x, bit))
    return x


def scatter_rows(values: Sequence[Value], g: Value, combine: Callable[[Value, Value], Value]) -> tuple[list[Value], Value]:
    """As `all_rows` for many values, but each lane gets some: V / 8 or one, from the returned index on. V: a power of two, if need be."""
    values, index = list(values), i32(0)
    size = 1 << (len(values) - 1).bit_length()
    values += values[-1:] * (size - len(values))
    for bit in (1, 2, 4):
        if len(values) == 1:
            values = [combine(values[0], shuffle("bfly", values[0], 4 * bit))]
            continue
        upper, half = (g & bit) == bit, len(values) // 2
        pairs = list(zip(values[:half], values[half:]))
        sent = [shuffle("bfly", select(upper, a, b), 4 * bit) for a, b in pairs]
        values = [combine(select(upper, b, a), x) for (a, b), x in zip(pairs, sent)]
        index = index + select(upper, i32(half), i32(0))
    return values, index


def all_columns(x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Combines what the four lanes 4 g + t, t = 0..3, hold; all of them get the result."""
    for bit in (1, 2):
        x = combine(x, shuffle("bfly", x, bit))
    return x


def halve_positive(x: Value, bias: Value) -> Value:
    """Positive pairs of bfloat16 as float16, times a power of two: `bias`, in the place of both exponents, is subtracted.

    The result must be below 2^16; what would be below 2^-14 loses its digits. A NaN becomes some number.
    """
    return (pure("max.u16x2 $0, $1, $2;", x, bias) - bias) << 3


def powers_of_two(x: Value, exponent: int, least: int) -> tuple[Value, Value]:
    """A power of two that brings x >= 0 to between 2^exponent and twice that, and its inverse; no more than 2^(exponent - least)."""
    biased = maximum(as_bits(x) >> 23, i32(127 + least))
    return as_float((i32(254 + exponent) - biased) << 23), as_float((biased - exponent) << 23)


def total(values: Sequence[Value]) -> Value:
    return functools.reduce(lambda a, b: a + b, values)
