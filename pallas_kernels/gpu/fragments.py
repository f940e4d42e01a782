"""Tensor-core products and the fragments they read and write: what the 32 lanes of a warp hold of a matrix.

Lanes are numbered 4 g + t, g = 0..7 a row or column of a fragment and t = 0..3 the place within it (docs/kernels/formats.md). Besides
the products there are the ways in and out of fragments: loads of whole matrices, a transpose, and sums, maxima and the like over the
lanes that share a row or a column. 16-bit floats travel in pairs, two to a word: "bf16" or "f16".
"""

from collections.abc import Callable, Sequence

from pallas_kernels.gpu import ptx
from pallas_kernels.gpu.ptx import Value


def mma(acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value], kind: str) -> tuple[Value, ...]:
    """acc [16, 8] float32 + a [16, 16] @ b [16, 8] (m16n8k16), which a lane holds in 4, 4 and 2 registers.

    Lane 4 g + t holds four numbers of acc: columns 2 t and 2 t + 1 of row g, then of row g + 8. Of a it holds the pairs of columns
    (2 t, 2 t + 1) in rows g and g + 8, then those 8 columns higher; of b, in column g, the pairs of rows (2 t, 2 t + 1), then 8 higher.
    """
    code = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};"
    return ptx.inline(code, *a, *b, *acc, results="ffff", effects=False, collective=True)


def mma_bytes(acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value]) -> tuple[Value, ...]:
    """acc [16, 8] int32 + a [16, 32] @ b [32, 8] (m16n8k32), a unsigned and b signed bytes: four in a register where `mma` has pairs."""
    code = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    return ptx.inline(code, *a, *b, *acc, results="rrrr", effects=False, collective=True)


def mma_warpgroup(a: Sequence[Sequence[Value]], b: Value, tiles: int, tile_bytes: int) -> list[tuple[Value, ...]]:
    """The sum over i of a[i] [64, 16] @ b[i] [16, 8 tiles], float16: for each tile the registers of `mma`.

    The four warps of a warpgroup run it together, each with 16 rows of a. b is an address in shared memory, where for each i the words of
    `mma`'s b lie, the first word of every lane and then the second; those of the next tile come `tile_bytes` later. They must have been
    published (`publish`).
    """
    columns = 4 * tiles
    acc = [f"d{i}" for i in range(columns)]
    # Where b is, and in units of 16 bytes the distances of the two words and of tiles (PTX ISA, "Matrix Descriptor Format").
    distances = 128 // 16 << 16 | tile_bytes // 16 << 32
    lines = [
        f".reg .b32 at; .reg .b64 b; .reg .pred add; .reg .f32 d<{columns}>;",
        # Of an address its last 18 bits: in a cluster the block's rank is above them.
        f"bfe.u32 at, ${columns}, 4, 14; cvt.u64.u32 b, at; or.b64 b, b, {distances}; setp.ne.u32 add, at, at;",
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
    out = ptx.inline(f"{{ {' '.join(lines)} }}", b, *words, results="f" * columns, collective=True)
    return [out[i : i + 4] for i in range(0, columns, 4)]


def start_products(acc: Sequence[Value], a: Sequence[Sequence[Value]], b: Value, places: Sequence[int], tile_bytes: int) -> list[Value]:
    """Starts acc [64, columns] + the sum over i of a[i] [64, 16] @ b[i] [16, columns], bfloat16, and returns acc, which is not to be read
    before `products_done`.

    As `mma_warpgroup`, but b[i] lies `places[i]` bytes after b, and a must not change before `wait_for_products` has waited.
    """
    columns = len(acc)
    registers = ", ".join(f"${i}" for i in range(columns))
    at = 2 * columns
    distances = 128 // 16 << 16 | tile_bytes // 16 << 32
    lines = [
        ".reg .b32 at; .reg .b64 start, b;",
        f"bfe.u32 at, ${at}, 4, 14; cvt.u64.u32 start, at; or.b64 start, start, {distances};",
        "wgmma.fence.sync.aligned;",
    ]
    form = f"wgmma.mma_async.sync.aligned.m64n{2 * columns}k16.f32.bf16.bf16"
    for i, place in enumerate(places):
        fragment = ", ".join(f"${at + 1 + 4 * i + j}" for j in range(4))
        lines.append(f"add.s64 b, start, {place // 16}; {form} {{{registers}}}, {{{fragment}}}, b, 1, 1, 1, 0;")
    lines.append("wgmma.commit_group.sync.aligned;")
    return list(ptx.update(f"{{ {' '.join(lines)} }}", acc, b, *(x for fragment in a for x in fragment)))


def wait_for_products(pending: int) -> None:
    """Waits until no more than `pending` calls of `start_products` are under way."""
    ptx.inline(f"wgmma.wait_group.sync.aligned {pending};", collective=True)


def products_done(acc: Sequence[Value]) -> list[Value]:
    """Waits for all products, and returns acc, which may be read."""
    return list(ptx.update("wgmma.wait_group.sync.aligned 0;", acc))


def publish() -> None:
    """Lets `mma_warpgroup` and `start_products` read what this lane has written to shared memory, once all lanes have met after this."""
    ptx.inline("fence.proxy.async.shared::cta;")


def transpose(x: Value) -> Value:
    """Transposes an 8 x 8 matrix of 16-bit entries: lane 4 g + t gives row g, columns 2 t and 2 t + 1, and gets those of the transpose."""
    return ptx.inline("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", x, results="r", effects=False, collective=True)[0]


def load_matrices(at: Value, *, transposed: bool) -> tuple[Value, ...]:
    """Loads four 8 x 8 matrices of 16-bit entries from shared memory; lane 8 i + r gives the address of row r of matrix i."""
    form = ".trans" if transposed else ""
    return ptx.inline(f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16 {{$0, $1, $2, $3}}, [$4];", at, results="rrrr", collective=True)


def all_rows(x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Combines what the eight lanes 4 g + t, g = 0..7, hold; all of them get the result."""
    for bit in (4, 8, 16):
        x = combine(x, ptx.shuffle("bfly", x, bit))
    return x


def all_columns(x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Combines what the four lanes 4 g + t, t = 0..3, hold; all of them get the result."""
    for bit in (1, 2):
        x = combine(x, ptx.shuffle("bfly", x, bit))
    return x


def scatter_rows(values: Sequence[Value], g: Value, combine: Callable[[Value, Value], Value]) -> tuple[list[Value], Value]:
    """Combines many values as `all_rows` does one, and leaves each lane with some of them: V / 8, at least one, from the returned index on.

    V is their number, rounded up to a power of two by repeating the last. Takes fewer shuffles than `all_rows` for each.
    """
    values, index = list(values), ptx.i32(0)
    size = 1 << (len(values) - 1).bit_length()
    values += values[-1:] * (size - len(values))
    for bit in (1, 2, 4):
        if len(values) == 1:
            values = [combine(values[0], ptx.shuffle("bfly", values[0], 4 * bit))]
            continue
        upper, half = (g & bit) == bit, len(values) // 2
        pairs = list(zip(values[:half], values[half:]))
        sent = [ptx.shuffle("bfly", ptx.select(upper, a, b), 4 * bit) for a, b in pairs]
        values = [combine(ptx.select(upper, b, a), x) for (a, b), x in zip(pairs, sent)]
        index = index + ptx.select(upper, ptx.i32(half), ptx.i32(0))
    return values, index
