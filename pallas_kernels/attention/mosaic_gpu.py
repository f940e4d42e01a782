"""Decode attention on NVIDIA Hopper in Pallas Mosaic GPU: split over the tokens, read at the speed of the memory.

A team of warps owns a run of groups and a softmax of its own, so that nothing waits for another team; the partial results are
merged once at the end. The cache streams through a ring in shared memory, keys and values in turn. Codes become bfloat16 in
registers, where they are the first operand of the tensor cores (16 tokens or channels a tile); the queries, or their softmax
weights, are the second (8 rows a tile). So the keys' scales multiply queries, and the values' scales weights, 8 rows at a time.

Codes enter as 128 + code (and 8 + code / 16 for the lower plane), which costs no arithmetic. What is too much is a multiple of the
sum of the operand as rounded, and is taken off in the same step; codes count from 8, so that rounding errs in proportion to the
spread of the data and not to its mean.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.kv_format import FullLayer, HierarchicalLayer, Lengths

ROWS = 8  # query rows of a tile
WARPS = 4  # of a block
MAX_ROWS = 64  # query rows of a block; more are another block, which reads the cache again
SHARED_BYTES = 227 * 1024
MULTIPROCESSORS = 132
CENTER = 8  # codes count from here
ONE = 0x3F80  # bfloat16 1


@dataclasses.dataclass(frozen=True)
class Config:
    """splits: blocks that share the tokens of a KV head. blocks: resident on a multiprocessor at a time. team: warps that share what is read, with some of the query rows each."""

    splits: int
    blocks: int = 2
    team: int = 1


def unsupported(q: Array, layer: HierarchicalLayer | FullLayer, lengths: Lengths, *, planes: int | None) -> str | None:
    """Why this kernel cannot run on these arguments here, or None."""
    try:
        from pallas_kernels import warp  # noqa: F401
    except ImportError as error:
        return f"needs jax >= 0.11 ({error})"
    device = jax.devices()[0]
    if float(getattr(device, "compute_capability", 0)) != 9.0:
        return "needs an NVIDIA Hopper GPU"
    if q.dtype != jnp.bfloat16:
        return f"needs bfloat16 queries, not {q.dtype}"
    if q.shape[3] not in (64, 128, 256):
        return f"supports head_dim 64, 128 and 256, not {q.shape[3]}"
    if isinstance(layer, HierarchicalLayer) and layer.groups and layer.group_size not in (64, 128):
        return f"supports groups of 64 and 128 tokens, not {layer.group_size}"
    return None


def decode_attention(
    q: Float[Array, "B T N H"],
    layer: HierarchicalLayer | FullLayer,
    lengths: Lengths,
    *,
    planes: int | None,
    config: Config | None = None,
) -> Float[Array, "B T N H"]:
    """See `pallas_kernels.attention.decode_attention`."""
    B, T, N, H = q.shape
    buffer = layer if isinstance(layer, FullLayer) else layer.buffer
    K = buffer.keys.shape[1]
    R = T * (N // K)
    blocks_of_rows = math.ceil(R / MAX_ROWS)
    tiles = math.ceil(R / blocks_of_rows / ROWS)
    kernel = Kernel(
        batch=B,
        kv_heads=K,
        tokens=T,
        heads_per_kv_head=N // K,
        head_dim=H,
        group_size=layer.group_size if isinstance(layer, HierarchicalLayer) else 0,
        groups=layer.groups if isinstance(layer, HierarchicalLayer) else 0,
        buffer_rows=buffer.keys.shape[2],
        planes=planes if isinstance(layer, HierarchicalLayer) and layer.groups else None,
        block_tiles=tiles,
        blocks_of_rows=blocks_of_rows,
    )
    kernel = kernel.configured(config)
    rows = q.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B * K, R, H)
    rows = jnp.pad(rows, ((0, 0), (0, blocks_of_rows * kernel.block_rows - R), (0, 0)))
    out, top, total = kernel(rows, lengths, layer)
    peak = top.max(1, keepdims=True)
    weight = jnp.exp2(top - peak)
    out = (out * weight[..., None]).sum(1) / (total * weight).sum(1)[..., None]
    out = out.reshape(B, K, -1, H)[:, :, :R].reshape(B, K, T, N // K, H)
    return out.transpose(0, 2, 1, 3, 4).reshape(B, T, N, H).astype(q.dtype)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel for one set of shapes. block_tiles: query tiles of a block, at least."""

    batch: int
    kv_heads: int
    tokens: int
    heads_per_kv_head: int
    head_dim: int
    group_size: int
    groups: int
    buffer_rows: int
    planes: int | None
    block_tiles: int
    blocks_of_rows: int
    config: Config = Config(1)

    def configured(self, config: Config | None) -> "Kernel":
        """With this configuration, or a sane one: two query tiles a warp at most, three slots of the ring at least where they fit."""
        if config is not None:
            return dataclasses.replace(self, config=config)
        heads = self.batch * self.kv_heads * self.blocks_of_rows
        least = 2 ** math.ceil(math.log2(self.block_tiles / 2)) if self.block_tiles > 2 else 1
        options = [(team, blocks) for team in (1, 2, 4) for blocks in (2, 1) if team >= least]
        choices = [
            dataclasses.replace(self, config=Config(max(1, MULTIPROCESSORS * blocks // heads), blocks, team)) for team, blocks in options
        ]
        return next((c for c in choices if c.slots >= 3), choices[-1])

    @property
    def tiles(self) -> int:
        """Query tiles of a warp."""
        return math.ceil(self.block_tiles / self.config.team)

    @property
    def teams(self) -> int:
        return WARPS // self.config.team

    @property
    def workers(self) -> int:
        """Teams that share the tokens of a KV head."""
        return self.config.splits * self.teams

    @property
    def block_rows(self) -> int:
        """Query rows of a block."""
        return self.config.team * self.tiles * ROWS

    @property
    def query_bytes(self) -> int:
        return self.block_rows * self.head_dim * 2

    @property
    def chunk(self) -> int:
        """Tokens of the full-precision cache that are read at a time."""
        return 32 if self.head_dim <= 128 else 16

    @property
    def slot_bytes(self) -> int:
        """Of the ring: the keys or the values of a group, or of a chunk."""
        full = self.chunk * self.head_dim * 2
        if self.planes is None:
            return full
        G, H = self.group_size, self.head_dim
        return max(full, self.planes * G * H // 2 + 4 * max(G, H))

    @property
    def slots(self) -> int:
        available = SHARED_BYTES // self.config.blocks - 2048 - self.query_bytes
        return min(8, available // (self.teams * self.slot_bytes))

    @property
    def shared_bytes(self) -> int:
        return self.query_bytes + self.teams * self.slots * self.slot_bytes

    def __call__(self, rows: Array, lengths: Lengths, layer: HierarchicalLayer | FullLayer) -> tuple[Array, Array, Array]:
        """Partial results of each worker: weighted values [B K row-blocks, workers, rows, H], maximum (base 2) and sum of exponentials."""
        from jax.experimental.mosaic.gpu import core as mosaic
        from jax.experimental.pallas import mosaic_gpu as plgpu

        inputs = {"rows": rows, "quantized": lengths.quantized, "buffered": lengths.buffered}
        buffer = layer
        if isinstance(layer, HierarchicalLayer):
            buffer = layer.buffer
        inputs |= {"keys": buffer.keys, "values": buffer.values}
        if self.planes is not None:
            for name, planes in ("key", layer.keys), ("value", layer.values):
                inputs |= {f"{name}_upper": planes.upper, f"{name}_scale": planes.scale, f"{name}_zero": planes.zero}
                if self.planes == 2:
                    inputs[f"{name}_lower"] = planes.lower
        lead = (self.batch * self.kv_heads * self.blocks_of_rows, self.workers, self.block_rows)
        shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
        names = (*inputs, "out", "top", "total", "shared")

        def body(*refs):
            emit = lambda ctx, *raw: emit_block(self, dict(zip(names, raw)))
            plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in refs))(emit)(*refs)

        return plgpu.kernel(
            body,
            out_type=(shape(*lead, self.head_dim), shape(*lead), shape(*lead)),
            grid=(lead[0] * self.config.splits,),
            grid_names=("block",),
            scratch_types=(plgpu.SMEM((self.shared_bytes,), jnp.uint8),),
            compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane),
            kernel_name=f"decode_attention_{'full' if self.planes is None else f'int{4 * self.planes}'}",
        )(*inputs.values())


def emit_block(kernel: Kernel, refs: dict) -> None:
    """What the four warps of a block do."""
    from pallas_kernels import warp as w

    H, team, G = kernel.head_dim, kernel.config.team, kernel.group_size
    at = {name: w.address(ref) for name, ref in refs.items()}
    thread, block = w.thread_index(), w.block_index()
    lane, warp = thread & 31, w.uniform(thread >> 5)
    split, rest = block % kernel.config.splits, block // kernel.config.splits
    row_block, head = rest % kernel.blocks_of_rows, rest // kernel.blocks_of_rows
    batch = head // kernel.kv_heads
    worker = split * kernel.teams + warp // team
    part = warp % team
    quantized = w.load_global(at["quantized"] + w.i64(batch) * 4)[0]
    buffered = w.load_global(at["buffered"] + w.i64(batch) * 4)[0]

    queries = at["shared"]
    first_row = (head * kernel.blocks_of_rows + row_block) * kernel.block_rows
    for i in range(0, kernel.query_bytes, 16 * 32 * WARPS):
        offset = thread * 16 + i
        with w.when(offset < kernel.query_bytes):
            w.copy_async(queries + offset, at["rows"] + w.i64(first_row) * (2 * H) + w.i64(offset))
    w.commit_copies()
    w.wait_for_copies(0)
    w.ptx("bar.sync 0;", collective=True)

    ring = queries + kernel.query_bytes + (warp // team) * (kernel.slots * kernel.slot_bytes)
    tile = Tile(kernel, w, lane, part, queries + part * (kernel.tiles * ROWS * H * 2))
    state = tile.empty()
    stream = functools.partial(pipeline, w, kernel, ring, warp // team + 8)
    if kernel.planes is not None:
        groups = quantized // G
        lower, upper = worker * groups // kernel.workers, (worker + 1) * groups // kernel.workers
        source = QuantizedSource(kernel, w, at, head, lane, part)
        state = stream(lower, upper, source.copy_keys, source.copy_values, tile.quantized_keys, tile.quantized_values, state)
        w.wait_for_copies(0)
        w.synchronize(warp // team + 8, team)
    chunks = (buffered + (kernel.chunk - 1)) // kernel.chunk
    lower, upper = worker * chunks // kernel.workers, (worker + 1) * chunks // kernel.workers
    source = FullSource(kernel, w, at, head, lane, part, buffered)
    rows = row_block * kernel.block_rows + part * (kernel.tiles * ROWS)
    limits = tile.limits(rows, buffered)
    fragments = tile.full_queries()
    keys = lambda slot, i: tile.full_keys(slot, i, fragments, limits)
    state = stream(lower, upper, source.copy_keys, source.copy_values, keys, tile.full_values, state)

    place = (head * kernel.blocks_of_rows + row_block) * kernel.workers + worker
    tile.store(at, place * kernel.block_rows + part * (kernel.tiles * ROWS), state)


def pipeline(w, kernel: Kernel, ring, barrier, lower, upper, copy_keys: Callable, copy_values: Callable, keys: Callable, values: Callable, state):
    """Streams keys and values of steps lower..upper through the ring, in turn, as many ahead as it has slots for.

    copy_*(shared address, step) start copies; logits = keys(address, step) and state = values(address, state, logits) use them.
    """
    slots, size = kernel.slots, kernel.slot_bytes

    def issue(unit: int, step, slot) -> None:
        # The unit-th half step from here, if it is within the run.
        ahead = step + unit // 2
        with w.when(ahead < upper):
            (copy_values if unit % 2 else copy_keys)(ring + slot * size, ahead)
        w.commit_copies()

    def ready(unit: int, step, slot):
        w.wait_for_copies(slots - 2)
        w.synchronize(barrier, kernel.config.team)
        # Everyone is done with the slot before this one: it takes the half step that is slots - 1 ahead.
        before = w.select(slot == 0, w.i32(slots - 1), slot - 1)
        issue(unit + slots - 1, step, before)
        return ring + slot * size

    advance = lambda slot: w.select(slot == slots - 1, w.i32(0), slot + 1)
    for unit in range(slots - 1):
        issue(unit, lower, w.i32(unit))

    def step(i, carry):
        slot, state = carry
        logits = keys(ready(0, i, slot), i)
        slot = advance(slot)
        state = values(ready(1, i, slot), state, logits)
        return advance(slot), state

    return w.loop(lower, upper, (w.i32(0), state), step)[1]


class QuantizedSource:
    """Copies the keys or values of a group to shared memory: the planes, then scales and zeros."""

    def __init__(self, kernel: Kernel, w, at: dict, head, lane, part):
        self.kernel, self.w, self.at, self.head = kernel, w, at, head
        self.lane, self.thread = lane, part * 32 + lane

    def copy_keys(self, shared, group) -> None:
        self._copy("key", self.kernel.head_dim, shared, group)

    def copy_values(self, shared, group) -> None:
        self._copy("value", self.kernel.group_size, shared, group)

    def _copy(self, name: str, parameters: int, shared, group) -> None:
        kernel, w = self.kernel, self.w
        index = w.i64(self.head * kernel.groups + group)
        size = kernel.group_size * kernel.head_dim // 2
        for plane in ("upper", "lower")[: kernel.planes]:
            source = self.at[f"{name}_{plane}"] + index * size + w.i64(self.thread * 16)
            for offset in range(0, size, 512 * kernel.config.team):
                w.copy_async(shared + self.thread * 16 + offset, source + offset)
            shared += size
        # Every warp of a team copies these few, the same bytes to the same place.
        chunk = self.lane % min(32, parameters // 4)
        for first in range(0, parameters // 4, 32):
            i = chunk + first
            is_zero = i < parameters // 8
            array = w.select(is_zero, self.at[f"{name}_scale"], self.at[f"{name}_zero"])
            within = w.select(is_zero, i, i - parameters // 8)
            w.copy_async(shared + i * 16, array + index * (2 * parameters) + w.i64(within * 16))


class FullSource:
    """Copies a chunk of full-precision rows to shared memory, zeros for those beyond the length.

    The 16-byte pieces of row r change places by r % 8, so that a column of pieces lies in different banks.
    """

    def __init__(self, kernel: Kernel, w, at: dict, head, lane, part, length):
        self.kernel, self.w, self.at, self.head, self.length = kernel, w, at, head, length
        self.thread = part * 32 + lane

    def copy_keys(self, shared, chunk) -> None:
        self._copy("keys", shared, chunk)

    def copy_values(self, shared, chunk) -> None:
        self._copy("values", shared, chunk)

    def _copy(self, name: str, shared, chunk) -> None:
        kernel, w = self.kernel, self.w
        pieces, threads = kernel.head_dim // 8, 32 * kernel.config.team
        piece = self.thread % pieces
        for first in range(0, kernel.chunk * pieces, threads):
            row = self.thread // pieces + first // pieces
            token = chunk * kernel.chunk + row
            size = w.select(token < self.length, w.i32(16), w.i32(0))
            place = self.head * kernel.buffer_rows + w.minimum(token, w.i32(kernel.buffer_rows - 1))
            source = self.at[name] + w.i64(place) * (2 * kernel.head_dim) + w.i64(piece * 16)
            w.copy_async(shared + row * (2 * kernel.head_dim) + (piece ^ (row & 7)) * 16, source, size)


class Tile:
    """A warp's query rows: its part of attention over whatever lies in shared memory.

    Lane 4 g + t. Of the 8 queries of tile n, logits and results belong to queries 2 t and 2 t + 1. state: out[n][i], the weighted
    values of channels 16 i + g and 16 i + g + 8; top[n] and total[n], the running maximum and sum of exponentials (base 2; the sum
    is of this lane's tokens); zero[n], what is to be added to every channel.
    """

    def __init__(self, kernel: Kernel, w, lane, part, queries):
        self.kernel, self.w = kernel, w
        self.g, self.t, self.lane = lane >> 2, lane & 3, lane
        self.queries = queries
        self.tiles = range(kernel.tiles)
        # 128, CENTER and, for the lower plane, 8 and its bias of 8 / 16.
        self.excess = 128 + CENTER + (8.5 if kernel.planes == 2 else 0)

    def empty(self) -> dict:
        f = self.w.f32
        channels = range(self.kernel.head_dim // 16)
        return {
            "out": [[(f(0.0),) * 4 for _ in channels] for _ in self.tiles],
            "top": [[f(-1e30)] * 2 for _ in self.tiles],
            "total": [[f(0.0)] * 2 for _ in self.tiles],
            "zero": [[f(0.0)] * 2 for _ in self.tiles],
        }

    # The quantized region. A lane reads the same words of every row: word k of row r holds entries 4 (words t + k) .. + 3 of the
    # row's first half in the low nibbles, of its second half in the high ones. Products contract them in that order.

    def _pairs(self, at, entries: int) -> dict:
        """This lane's pairs of an array of bfloat16, by (word, half)."""
        words = entries // 32
        out = {}
        for half in (0, 1):
            pairs = self.w.load_shared(at + self.t * (8 * words) + half * entries, 2 * words)
            out |= {(k, half): pairs[2 * k : 2 * k + 2] for k in range(words)}
        return out

    def _contract(self, acc: list, at, row_bytes: int, plane_bytes: int, operands: list) -> list:
        """acc[m][n] += rows of codes (g, and g + 8 of tile m at at[m][1]) times operands[n]."""
        w = self.w
        for plane in range(self.kernel.planes):
            exponent = (0x43, 0x41)[plane]
            words = [[w.load_shared(row + plane * plane_bytes, row_bytes // 16) for row in rows] for rows in at]
            for k in range(row_bytes // 16):
                codes = [[w.unpack(row[k], exponent) for row in rows] for rows in words]
                for half in (0, 1):
                    for n in self.tiles:
                        for m, (a, b) in enumerate(codes):
                            fragment = (a[half][0], b[half][0], a[half][1], b[half][1])
                            acc[m][n] = w.mma(acc[m][n], fragment, operands[n][k, half])
        return acc

    def _corrections(self, scale: dict, zero: dict, plain: dict, scaled: dict) -> list:
        """What the codes' zeros add and their excess takes off, for queries 2 t and 2 t + 1."""
        w = self.w
        ones = (w.splat_pair(ONE),) * 4
        linear = excess = (w.f32(0.0),) * 4
        for key in plain:
            linear = w.mma(linear, (zero[key][0], scale[key][0], zero[key][1], scale[key][1]), plain[key])
            excess = w.mma(excess, ones, scaled[key])
        return [
            w.fma(w.f32(-self.excess), excess[c], w.fma(w.f32(float(CENTER)), linear[2 + c], linear[c])) for c in (0, 1)
        ]

    def quantized_keys(self, slot, group) -> list:
        """Logits [n][tile] of a group, before the softmax scale. Tile (k, half) has the tokens that word k of the values has."""
        kernel, w = self.kernel, self.w
        G, H = kernel.group_size, kernel.head_dim
        row_bytes, words = H // 2, G // 32
        parameters = slot + kernel.planes * G * row_bytes
        scale, zero = self._pairs(parameters, H), self._pairs(parameters + 2 * H, H)
        plain = [self._pairs(self.queries + (self.g + n * ROWS) * (2 * H), H) for n in self.tiles]
        scaled = [{key: tuple(map(w.multiply_pairs, q[key], scale[key])) for key in q} for q in plain]
        start = [self._corrections(scale, zero, *operands) for operands in zip(plain, scaled)]
        first = slot + ((self.g >> 1) * (4 * words) + (self.g & 1)) * row_bytes + self.t * (H // 8)
        logits = [[] for _ in self.tiles]
        for k in range(words):
            rows = [first + (4 * k + half * (G // 2)) * row_bytes for half in (0, 1)]
            acc = [[(*c, *c) for c in start] for _ in rows]
            acc = self._contract(acc, [(row, row + 2 * row_bytes) for row in rows], row_bytes, G * row_bytes, scaled)
            for n in self.tiles:
                logits[n] += [acc[0][n], acc[1][n]]
        return logits

    def quantized_values(self, slot, state: dict, logits: list) -> dict:
        """The state after this group."""
        kernel, w = self.kernel, self.w
        G, H = kernel.group_size, kernel.head_dim
        row_bytes = G // 2
        parameters = slot + kernel.planes * H * row_bytes
        scale, zero = self._pairs(parameters, G), self._pairs(parameters + 2 * G, G)
        state, weights, shrink = self._softmax(state, logits)
        plain = [dict(zip(((k, half) for k in range(G // 32) for half in (0, 1)), tiles)) for tiles in weights]
        scaled = [{key: tuple(map(w.multiply_pairs, p[key], scale[key])) for key in p} for p in plain]
        for n in self.tiles:
            added = self._corrections(scale, zero, plain[n], scaled[n])
            state["zero"][n] = [w.fma(z, a, x) for z, a, x in zip(state["zero"][n], shrink[n], added)]
        first = slot + self.g * row_bytes + self.t * (G // 8)
        channels = H // 16
        for i in range(0, channels, 2):
            rows = [first + 16 * m * row_bytes for m in (i, i + 1)]
            acc = [[state["out"][n][m] for n in self.tiles] for m in (i, i + 1)]
            acc = self._contract(acc, [(row, row + 8 * row_bytes) for row in rows], row_bytes, H * row_bytes, scaled)
            for n in self.tiles:
                state["out"][n][i], state["out"][n][i + 1] = acc[0][n], acc[1][n]
        return state

    def _softmax(self, state: dict, logits: list) -> tuple[dict, list, list]:
        """The state with its maximum and sum brought up to date, weights [n][tile] as operands, and what the state was multiplied by."""
        w = self.w
        unit = math.log2(math.e) / math.sqrt(self.kernel.head_dim)
        new = {"out": [], "top": [], "total": [], "zero": state["zero"].copy()}
        weights, shrink = [], []
        for n, tiles in enumerate(logits):
            peak = [functools.reduce(w.maximum, [x for s in tiles for x in s[c::2]]) for c in (0, 1)]
            top = [w.maximum(old, w.all_rows(x, w.maximum) * unit) for old, x in zip(state["top"][n], peak)]
            down = [w.f32(0.0) - x for x in top]
            alpha = [w.exp2(old + x) for old, x in zip(state["top"][n], down)]
            p = [tuple(w.exp2(w.fma(x, w.f32(unit), down[c % 2])) for c, x in enumerate(s)) for s in tiles]
            added = [w.total([x for s in p for x in s[c::2]]) for c in (0, 1)]
            new["top"].append(top)
            new["total"].append([w.fma(old, a, x) for old, a, x in zip(state["total"][n], alpha, added)])
            new["out"].append([tuple(x * alpha[c % 2] for c, x in enumerate(acc)) for acc in state["out"][n]])
            weights.append([(w.transpose(w.pair(s[0], s[1])), w.transpose(w.pair(s[2], s[3]))) for s in p])
            shrink.append(alpha)
        return new, weights, shrink

    # The full-precision rows.

    def limits(self, first_row, length) -> list:
        """Tokens that each query may see."""
        kernel, w = self.kernel, self.w
        row = lambda n, c: first_row + (self.t * 2 + (n * ROWS + c))
        limit = lambda n, c: length - (kernel.tokens - 1) + row(n, c) // kernel.heads_per_kv_head
        return [[w.minimum(limit(n, c), length) for c in (0, 1)] for n in self.tiles]

    def full_queries(self) -> list:
        """Queries [n][step] as operands, 16 channels a step."""
        w, H = self.w, self.kernel.head_dim
        word = lambda n, channel: w.load_shared(self.queries + (self.g + n * ROWS) * (2 * H) + self.t * 4 + 2 * channel, 1)[0]
        return [[(word(n, 16 * s), word(n, 16 * s + 8)) for s in range(H // 16)] for n in self.tiles]

    def _matrices(self, slot, row, piece, *, transposed: bool) -> Callable:
        """Loads the fragment whose rows start at 16 a, and pieces at 2 b, as function (a, b)."""
        w, H = self.w, self.kernel.head_dim
        start, swizzled = slot + row * (2 * H), (piece ^ (self.lane & 7)) * 16
        return lambda a, b: w.load_matrices(start + 32 * H * a + (swizzled ^ (32 * b)), transposed=transposed)

    def full_keys(self, slot, chunk, queries: list, limits: list) -> list:
        """Logits [n][tile] of a chunk, 16 tokens a tile; -inf for those that a query may not see."""
        kernel, w = self.kernel, self.w
        load = self._matrices(slot, self.lane & 15, self.lane >> 4, transposed=False)
        logits = [[] for _ in self.tiles]
        for a in range(kernel.chunk // 16):
            acc = [(w.f32(0.0),) * 4 for _ in self.tiles]
            for b in range(kernel.head_dim // 16):
                fragment = load(a, b)
                acc = [w.mma(acc[n], fragment, queries[n][b]) for n in self.tiles]
            token = chunk * kernel.chunk + self.g + 16 * a
            hidden = w.f32(-math.inf)
            for n in self.tiles:
                logits[n].append(
                    tuple(w.select(token + 8 * (c // 2) < limits[n][c % 2], x, hidden) for c, x in enumerate(acc[n]))
                )
        return logits

    def full_values(self, slot, state: dict, logits: list) -> dict:
        """The state after this chunk."""
        kernel, w = self.kernel, self.w
        state, weights, shrink = self._softmax(state, logits)
        state["zero"] = [[z * a for z, a in zip(*pair)] for pair in zip(state["zero"], shrink)]
        load = self._matrices(slot, (self.lane & 7) + (self.lane >> 4) * 8, (self.lane >> 3) & 1, transposed=True)
        for i in range(kernel.head_dim // 16):
            for a in range(kernel.chunk // 16):
                fragment = load(a, i)
                for n in self.tiles:
                    state["out"][n][i] = w.mma(state["out"][n][i], fragment, weights[n][a])
        return state

    def store(self, at: dict, first_row, state: dict) -> None:
        """Writes the partial results of this warp's rows."""
        w, H = self.w, self.kernel.head_dim
        for n in self.tiles:
            for c in (0, 1):
                row = w.i64(first_row + self.t * 2 + (n * ROWS + c))
                to = at["out"] + row * (4 * H) + w.i64(self.g * 4)
                for i, acc in enumerate(state["out"][n]):
                    for high in (0, 1):
                        w.store_global(to + 4 * (16 * i + 8 * high), acc[c + 2 * high] + state["zero"][n][c])
                total = w.all_rows(state["total"][n][c], lambda a, b: a + b)
                with w.when(self.g == 0):
                    w.store_global(at["top"] + row * 4, state["top"][n][c])
                    w.store_global(at["total"] + row * 4, total)
