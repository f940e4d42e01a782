"""What one warp of an NVIDIA GPU does, for kernels in Mosaic GPU that place every register themselves.

Pallas' own operations belong to a warpgroup of four warps, which then wait for each other in every step. These functions emit MLIR for
a single warp, by inline PTX where MLIR has no operation for it: values that each of the 32 lanes holds, control flow, loads and stores,
copies that run in the background, barriers, exchanges between lanes, and waiting for other blocks. They are for the bodies of
`plgpu.inline_mgpu`. Products of the tensor cores are in fragments.py, arithmetic in numerics.py.

Every function that differs between a GPU and the simulated one of the tests is looked up in this module when it is called, so the tests
replace it here (tests/simulated_ptx.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, cf, llvm, scf

ABSENT = 0xFFFFFFFF  # a word that no thread has handed over yet: two NaNs in bfloat16 that no conversion gives
SPIN_TRIES = 1 << 23  # of `spin_wait` for another block: some seconds, where microseconds are to be expected
DEVICE_SPIN_TRIES = 1 << 26  # for another device, which may begin later: most of a minute


def _operator(integers: Callable | None, floats: Callable | None = None) -> Callable:
    """A method of `Value` by MLIR's operation for integers, or for floats."""

    def method(self: "Value", other: "Value | float") -> "Value":
        return Value((floats if self.is_float else integers)(self.raw, self.like(other).raw))

    return method


@dataclasses.dataclass(frozen=True)
class Value:
    """One value per lane: i32, i64, f32 or i1. Integers are unsigned in shifts and division, signed in comparisons."""

    raw: ir.Value

    @property
    def is_float(self) -> bool:
        return isinstance(self.raw.type, ir.FloatType)

    def like(self, other: "Value | float") -> "Value":
        return other if isinstance(other, Value) else Value(utils.c(other, self.raw.type))

    __add__ = __radd__ = _operator(arith.addi, arith.addf)
    __sub__ = _operator(arith.subi, arith.subf)
    __mul__ = __rmul__ = _operator(arith.muli, arith.mulf)
    __truediv__ = _operator(None, arith.divf)
    __floordiv__ = _operator(arith.divui)
    __mod__ = _operator(arith.remui)
    __and__ = _operator(arith.andi)
    __or__ = _operator(arith.ori)
    __xor__ = _operator(arith.xori)
    __rshift__ = _operator(arith.shrui)
    __lshift__ = _operator(arith.shli)
    __lt__ = _operator(functools.partial(arith.cmpi, arith.CmpIPredicate.slt))
    __eq__ = _operator(functools.partial(arith.cmpi, arith.CmpIPredicate.eq))
    __ne__ = _operator(functools.partial(arith.cmpi, arith.CmpIPredicate.ne))
    __hash__ = object.__hash__


def i32(x: int) -> Value:
    """A 32-bit integer constant, the same in all lanes."""
    return Value(utils.c(x, ir.IntegerType.get_signless(32)))


def f32(x: float) -> Value:
    """A float32 constant, the same in all lanes."""
    return Value(utils.c(x, ir.F32Type.get()))


def i64(x: Value) -> Value:
    """A non-negative i32 as i64."""
    return Value(arith.extui(ir.IntegerType.get_signless(64), x.raw))


def as_float(x: Value) -> Value:
    """The float32 with the bits of an i32."""
    return Value(arith.bitcast(ir.F32Type.get(), x.raw))


def as_bits(x: Value) -> Value:
    """The bits of a float32 as an i32."""
    return Value(arith.bitcast(ir.IntegerType.get_signless(32), x.raw))


def select(condition: Value, yes: Value, no: Value) -> Value:
    """`yes` in the lanes where the condition holds, `no` in the others."""
    return Value(arith.select(condition.raw, yes.raw, no.raw))


def minimum(a: Value, b: Value) -> Value:
    """The smaller of two signed integers."""
    return Value(arith.minsi(a.raw, b.raw))


def maximum(a: Value, b: Value) -> Value:
    """The larger of two signed integers or two floats; where one float is NaN, the other."""
    return Value((arith.maxnumf if a.is_float else arith.maxsi)(a.raw, b.raw))


# Inline PTX, and what lanes tell each other ----------------------------------------------------------------------------


def inline(code: str, *args: Value, results: str = "", effects: bool = True, collective: bool = False) -> tuple[Value, ...]:
    """Emits inline PTX in which $0, $1, ... are the results, then the arguments.

    results: a letter for each result, r (i32) or f (f32). effects: whether it touches memory, so that the compiler keeps it where it is.
    collective: whether all lanes of the warp run it together.
    """
    types = [{"r": ir.IntegerType.get_signless(32), "f": ir.F32Type.get()}[letter] for letter in results]
    raw = [a.raw for a in args]
    out = utils.inline_ptx(code, *raw, result_types=types or None, has_side_effects=effects, convergent=collective)
    return tuple(map(Value, out or ()))


def pure(code: str, *args: Value, result: str = "r") -> Value:
    """Emits inline PTX that computes one result, $0, from this lane's arguments alone."""
    return inline(code, *args, results=result, effects=False)[0]


def update(code: str, values: Sequence[Value], *args: Value) -> tuple[Value, ...]:
    """Emits inline PTX that all lanes of the warp run together, and that changes float32 values in the registers where they are.

    With n values they are $0, $1, ..., and the arguments begin with $2n.
    """
    n = len(values)
    kinds = ["f" if x.is_float else "r" for x in args]
    constraints = ",".join(["=f"] * n + [str(i) for i in range(n)] + kinds)
    result = llvm.StructType.get_literal([x.raw.type for x in values])
    raw = [x.raw for x in (*values, *args)]
    out = llvm.inline_asm(result, raw, code, constraints, has_side_effects=True, convergent=True)
    return tuple(Value(llvm.extractvalue(x.raw.type, out, [i])) for i, x in enumerate(values))


def shuffle(mode: str, x: Value, lane: int) -> Value:
    """Gives each lane x of lane `lane` (mode "idx"), or of the lane whose number differs from its own in those bits ("bfly")."""
    code = f"shfl.sync.{mode}.b32 $0, $1, {lane}, 31, -1;"
    return inline(code, x, results="f" if x.is_float else "r", effects=False, collective=True)[0]


def uniform(x: Value) -> Value:
    """Gives all lanes x of lane 0, which tells the compiler that they agree."""
    return shuffle("idx", x, 0)


def of_lane(x: Value, lane: Value) -> Value:
    """Gives all lanes x of that lane, on which they agree."""
    return of_lanes(x, lane)


def of_lanes(x: Value, lanes: Value) -> Value:
    """Gives each lane x of the lane that it names itself."""
    return inline("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", x, lanes, results="f" if x.is_float else "r", effects=False, collective=True)[0]


def any_greater(pairs: Sequence[tuple[Value, Value]]) -> Value:
    """1 in all lanes if, in any lane, the first of one of these pairs of float32 is greater than the second; otherwise 0."""
    (a, b), *others = pairs
    more = " ".join(f"setp.gt.or.f32 any, ${2 * i + 3}, ${2 * i + 4}, any;" for i in range(len(others)))
    code = f"{{ .reg .pred any; setp.gt.f32 any, $1, $2; {more} vote.sync.any.pred any, any, -1; selp.b32 $0, 1, 0, any; }}"
    return inline(code, a, b, *(x for pair in others for x in pair), results="r", effects=False, collective=True)[0]


def ballot(condition: Value) -> Value:
    """A word of which bit i says whether the condition holds in lane i."""
    code = "{ .reg .pred holds; setp.ne.b32 holds, $1, 0; vote.sync.ballot.b32 $0, holds, -1; }"
    return inline(code, select(condition, i32(1), i32(0)), results="r", effects=False, collective=True)[0]


def sum_lanes(x: Value) -> Value:
    """The sum of all lanes' integers, which all of them get."""
    return inline("redux.sync.add.s32 $0, $1, -1;", x, results="r", effects=False, collective=True)[0]


def count_bits(x: Value) -> Value:
    """How many bits of a word are 1."""
    return pure("popc.b32 $0, $1;", x)


def block_index() -> Value:
    """The number of this block in the launch."""
    return Value(utils.block_idx())


def thread_index() -> Value:
    """The number of this lane's thread in its block: 32 times the warp's, plus the lane's."""
    return Value(utils.thread_idx())


# Control flow ----------------------------------------------------------------------------------------------------------


def loop(lower: Value, upper: Value, carry, body: Callable):
    """Runs carry = body(i, carry) for i from lower to upper - 1 and returns the carry, a pytree of Values."""
    leaves, structure = jax.tree.flatten(carry)
    for_op = scf.ForOp(lower.raw, upper.raw, i32(1).raw, [x.raw for x in leaves])
    with ir.InsertionPoint(for_op.body):
        inner = jax.tree.unflatten(structure, map(Value, for_op.inner_iter_args))
        leaves = jax.tree.leaves(body(Value(for_op.induction_variable), inner))
        scf.YieldOp([x.raw for x in leaves])
    return jax.tree.unflatten(structure, map(Value, for_op.results))


def while_loop(condition: Callable, carry, body: Callable):
    """Runs carry = body(carry) as long as condition(carry) holds, on which all lanes agree; returns the carry, a pytree of Values."""
    leaves, structure = jax.tree.flatten(carry)
    types = [x.raw.type for x in leaves]
    while_op = scf.WhileOp(types, [x.raw for x in leaves])

    def inner(block):
        return jax.tree.unflatten(structure, map(Value, block.arguments))

    before, after = (ir.Block.create_at_start(region, types) for region in while_op.regions)
    with ir.InsertionPoint(before):
        scf.ConditionOp(condition(inner(before)).raw, before.arguments)
    with ir.InsertionPoint(after):
        scf.YieldOp([x.raw for x in jax.tree.leaves(body(inner(after)))])
    return jax.tree.unflatten(structure, map(Value, while_op.results))


def changed_if(condition: Value, carry, body: Callable):
    """carry = body(carry) if the condition holds, on which all lanes agree; returns the carry, a pytree of Values."""
    leaves, structure = jax.tree.flatten(carry)
    if_op = scf.IfOp(condition.raw, [x.raw.type for x in leaves], has_else=True)
    with ir.InsertionPoint(if_op.then_block):
        scf.YieldOp([x.raw for x in jax.tree.leaves(body(carry))])
    with ir.InsertionPoint(if_op.else_block):
        scf.YieldOp([x.raw for x in leaves])
    return jax.tree.unflatten(structure, map(Value, if_op.results))


def when(condition: Value):
    """A context: what is emitted inside it runs in the lanes where the condition holds."""
    return utils.when(condition.raw)


def fail_where(condition: Value, message: str) -> None:
    """Ends the whole launch with an error where the condition holds in some lane; CUDA prints the message on standard error."""
    with when(condition):
        bit = ir.IntegerType.get_signless(1)
        cf.assert_(arith.constant(bit, ir.IntegerAttr.get(bit, 0)), message)
        # Or registers would be kept for what comes after the call, which slows the path that never gets here.
        inline("exit;")


# Memory ----------------------------------------------------------------------------------------------------------------


_TYPES = {"r": "b32", "f": "f32"}


def _vector(words: int) -> str:
    return {1: "", 2: ".v2", 4: ".v4"}[words]


def _list(words: int) -> str:
    return "$0" if words == 1 else "{" + ", ".join(f"${i}" for i in range(words)) + "}"


def address(ref: ir.Value) -> Value:
    """The byte address of a ref's first element: i64 in global, i32 in shared memory."""
    pointer = utils.memref_ptr(ref)
    width = 32 if utils.is_smem_ref(ref) else 64
    return Value(llvm.ptrtoint(ir.IntegerType.get_signless(width), pointer))


def load_global(at: Value, words: int = 1, result: str = "r") -> tuple[Value, ...]:
    """Loads 1, 2 or 4 words of 32 bits; `at` is a multiple of their size. result: r (i32) or f (f32)."""
    return inline(f"ld.global{_vector(words)}.{_TYPES[result]} {_list(words)}, [${words}];", at, results=result * words)


def load_shared(at: Value, words: int, result: str = "r") -> tuple[Value, ...]:
    """Loads any number of words of 32 bits, four or fewer at a time; `at` is a multiple of their size. result: r (i32) or f (f32)."""
    out = []
    while len(out) < words:
        n = min(4, words - len(out))
        out += inline(f"ld.shared{_vector(n)}.{_TYPES[result]} {_list(n)}, [${n}];", at + 4 * len(out), results=result * n)
    return tuple(out)


def store_global(at: Value, x: Value) -> None:
    """Stores 32 bits."""
    inline(f"st.global.{'f32' if x.is_float else 'b32'} [$0], $1;", at, x)


def store_global_half(at: Value, x: Value) -> None:
    """Stores the lower 16 bits of a word; `at` is a multiple of 2."""
    inline("{ .reg .b16 low; cvt.u16.u32 low, $1; st.global.b16 [$0], low; }", at, x)


def store_global_words(at: Value, *x: Value) -> None:
    """Stores 1, 2 or 4 words of 32 bits; `at` is a multiple of their size."""
    inline(f"st.global{_vector(len(x))}.b32 [${len(x)}], {_list(len(x))};", *x, at)


def store_shared(at: Value, *x: Value) -> None:
    """Stores 1, 2 or 4 values of 32 bits; `at` is a multiple of their size."""
    code = f"st.shared{_vector(len(x))}.{'f32' if x[0].is_float else 'b32'} [${len(x)}], {_list(len(x))};"
    inline(code, *x, at)


def raise_shared(at: Value, x: Value) -> None:
    """Makes a signed integer in shared memory the larger of itself and x, whatever other lanes do so at the same time."""
    inline("red.shared.max.s32 [$0], $1;", at, x)


# Copies to shared memory in the background -----------------------------------------------------------------------------


def copy_async(shared: Value, source: Value, size: Value | None = None, *, width: int = 16, offset: int = 0) -> None:
    """Starts a copy of `width` bytes (4, 8 or 16) from global to shared memory, `offset` bytes from both addresses.

    Only the first `size` bytes are read, all by default; the rest arrive as zeros.
    """
    tail, args = ("", ()) if size is None else (", $2", (size,))
    level = "cg" if width == 16 else "ca"
    inline(f"cp.async.{level}.shared.global [$0+{offset}], [$1+{offset}], {width}{tail};", shared, source, *args)


def commit_copies() -> None:
    """Makes this lane's copies since its last commit one group, for `wait_for_copies`."""
    inline("cp.async.commit_group;")


def wait_for_copies(pending: int) -> None:
    """Waits until no more than `pending` of this lane's groups are under way."""
    inline(f"cp.async.wait_group {pending};")


def copy_bulk(shared: Value, source: Value, size: Value, barrier: Value) -> None:
    """Starts a copy of `size` bytes, a multiple of 16, from global to shared memory, whole lines at a time.

    The bytes count towards the mbarrier at `barrier`, where a lane announces them (`arrive_with`).
    """
    code = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    inline(code, shared, source, size, barrier)


# Barriers of a block ---------------------------------------------------------------------------------------------------


def synchronize(barrier: Value | None, warps: int) -> None:
    """Waits for the lanes of this warp (warps = 1), or for the `warps` warps that name the same hardware barrier, 0 to 15."""
    if warps == 1:
        inline("bar.warp.sync -1;", collective=True)
    else:
        inline(f"bar.sync $0, {32 * warps};", barrier, collective=True)


def barrier_init(barrier: Value, arrivals: int) -> None:
    """Makes 8 bytes of shared memory an mbarrier that `arrivals` arrivals complete; all who use it must meet after that."""
    inline(f"mbarrier.init.shared.b64 [$0], {arrivals}; fence.mbarrier_init.release.cluster;", barrier)


def once_loaded(address: Value, words: Sequence[Value]) -> Value:
    """The address, which is not known before these words are: whatever uses it waits for the loads of the words.

    `arrive` alone does not: its machine code is sent while loads before it are queued, and what they read may then be overwritten
    (docs/kernels/matmul.md, "An arrival is made to wait for its loads").
    """
    ors = " ".join(f"or.b32 all, all, ${i};" for i in range(2, 2 + len(words)))
    # %ctaid.y is zero in launches of one dimension (launch.py), which the compiler does not know.
    code = f"{{ .reg .b32 all, zero; mov.b32 all, 0; {ors} mov.u32 zero, %ctaid.y; and.b32 all, all, zero; add.u32 $0, $1, all; }}"
    return inline(code, address, *words, results="r")[0]


def arrive(barrier: Value) -> None:
    """Arrives at an mbarrier, without waiting."""
    inline("mbarrier.arrive.shared.b64 _, [$0];", barrier)


def arrive_with(barrier: Value, size: Value) -> None:
    """Arrives at an mbarrier and announces `size` bytes of `copy_bulk`, which must also be there to complete it."""
    inline("mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", barrier, size)


def arrive_after_copies(barrier: Value) -> None:
    """Arrives at an mbarrier as soon as this lane's copies by `copy_async` so far are there, without waiting for them."""
    inline("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", barrier)


def wait_for_arrivals(barrier: Value, parity: Value) -> None:
    """Waits until an mbarrier is complete: for the first time with parity 0, then 1, then 0. Parity 1 at first does not wait.

    The wait has no bound: only warps and copies of the same block arrive, and these come to an end, or end the launch (`spin_wait`).
    """
    code = "{ .reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [$0], $1; @!done bra again; }"
    inline(code, barrier, parity)


# Blocks of a cluster ---------------------------------------------------------------------------------------------------


def meet_cluster() -> None:
    """Waits for all lanes of all blocks of the cluster: what each has done to shared memory before is there for all of them after."""
    inline("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", collective=True)


def in_block(shared: Value, rank: Value) -> Value:
    """The address, for `load_cluster`, of what lies at this address of shared memory in the block of that rank in the cluster."""
    return inline("mapa.shared::cluster.u32 $0, $1, $2;", shared, rank, results="r", effects=False)[0]


def load_cluster(at: Value, words: int, result: str = "r") -> tuple[Value, ...]:
    """Loads 1, 2 or 4 words of 32 bits from another block's shared memory, which lives until that block ends (`in_block`)."""
    code = f"ld.shared::cluster{_vector(words)}.{_TYPES[result]} {_list(words)}, [${words}];"
    return inline(code, at, results=result * words)


# Waiting for other blocks ----------------------------------------------------------------------------------------------


def store_relaxed(at: Value, word: Value, *, across_devices: bool = False) -> None:
    """Stores 32 bits for another block that waits for them with `spin_wait`. across_devices: the block, or the memory, may be another
    device's."""
    inline(f"st.relaxed.{'sys' if across_devices else 'gpu'}.global.b32 [$0], $1;", at, word)


def spin_wait(at: Sequence[Value], *, across_devices: bool = False) -> list[tuple[Value, ...]]:
    """Loads four words at each address, again and again until none is `ABSENT`: other blocks store them with `store_relaxed`.

    A vector load is a load of each of its words (PTX ISA, "Vector Data-types" of the memory consistency model), and each word says itself
    whether it is there, so no order between them matters. After SPIN_TRIES attempts the launch ends with an error. across_devices:
    blocks of other devices may store them, or be waited for by those that do; the attempts are then DEVICE_SPIN_TRIES.
    """
    count, scope, tries = 4 * len(at), "sys" if across_devices else "gpu", DEVICE_SPIN_TRIES if across_devices else SPIN_TRIES
    loads, checks = [], []
    for i in range(len(at)):
        words = [f"${4 * i + j}" for j in range(4)]
        loads.append(f"ld.relaxed.{scope}.global.v4.b32 {{{', '.join(words)}}}, [${count + 1 + i}];")
        checks += [f"max.u32 most, most, {word};" for word in words]
    code = f"""{{ .reg .pred again; .reg .b32 most, left; mov.b32 left, {tries}; spin: {" ".join(loads)}
        mov.b32 most, 0; {" ".join(checks)} sub.u32 left, left, 1; setp.ne.u32 again, left, 0;
        setp.eq.and.u32 again, most, {ABSENT}, again; @again bra spin;
        setp.eq.u32 again, most, {ABSENT}; vote.sync.any.pred again, again, -1; selp.b32 ${count}, 1, 0, again; }}"""
    # All lanes vote, so that none of them branches alone: instructions for whole warps follow.
    *out, in_vain = inline(code, *at, results="r" * (count + 1), collective=True)
    fail_where(in_vain == 1, f"a block of a fused layer waited in vain for another{' device' if across_devices else ''}")
    return [tuple(out[i : i + 4]) for i in range(0, count, 4)]


def take_ticket(counter: Value, taker: Value) -> Value:
    """Adds 1 to a counter in global memory in the lane where `taker` is not 0, which gets what it was before; other lanes get 0."""
    code = "{ .reg .pred takes; setp.ne.s32 takes, $2, 0; mov.b32 $0, 0; @takes atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }"
    return inline(code, counter, taker, results="r")[0]
