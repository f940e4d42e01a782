"""Decode attention on NVIDIA Hopper in Pallas Mosaic GPU: split over the tokens, read at the speed of the memory.

A team of warps owns a run of groups and a softmax of its own, so that nothing waits for another team; the partial results are
merged once at the end. The cache streams through a ring in shared memory, keys and values in turn. Codes become bfloat16 in
registers, where they are the first operand of the tensor cores (16 tokens or channels a tile); the queries, or their softmax
weights, are the second (8 rows a tile). So the keys' scales multiply queries, and the values' scales weights, 8 rows at a time.

Codes enter as 1024 + code in float16, which costs no arithmetic. What is too much is a multiple of the sum of the operand as
rounded, and every sum starts from minus that. Queries and scales are brought to a common size by powers of two, so that float16
neither overflows nor loses what matters; the zeros' part is a product of its own in bfloat16.
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
WARPS = 4  # of a warpgroup
MAX_TOKENS = 16
MAX_ROWS = 64, 32, 16, 8  # query rows of a block; more are another block's, which reads the cache again
SHARED_BYTES = 227 * 1024
MULTIPROCESSORS = 132
ONES = 0x3C003C00  # a pair of float16
# Queries and scales in float16: their largest lies at 2^SIZE, unless that takes a factor of more than 2^(SIZE - LEAST).
SIZE, LEAST = 6, -40


@dataclasses.dataclass(frozen=True)
class Config:
    """splits: blocks that share the tokens of a KV head, of all rows of the batch together. blocks: as many are to be resident on a
    multiprocessor, of `warpgroups` times four warps. team: warps that work on one group together, for many query rows."""

    splits: int
    blocks: int = 1
    warpgroups: int = 1
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
    buffer = layer if isinstance(layer, FullLayer) else layer.buffer
    if {q.dtype, buffer.keys.dtype} != {jnp.dtype(jnp.bfloat16)}:
        return f"needs queries and a cache in bfloat16, not {q.dtype} and {buffer.keys.dtype}"
    if q.shape[1] > MAX_TOKENS:
        return f"supports up to {MAX_TOKENS} tokens a row, not {q.shape[1]}"
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
    quantized = isinstance(layer, HierarchicalLayer) and layer.groups > 0
    kernel = functools.partial(
        Kernel,
        batch=B,
        kv_heads=K,
        tokens=T,
        heads_per_kv_head=N // K,
        head_dim=H,
        group_size=layer.group_size if quantized else 0,
        groups=layer.groups if quantized else 0,
        buffer_rows=buffer.keys.shape[2],
        planes=planes if quantized else None,
    )
    # As many query rows in a block as leave room for the ring.
    for most in MAX_ROWS:
        blocks = math.ceil(R / most)
        rows = kernel(blocks_of_rows=blocks, block_tiles=math.ceil(R / blocks / ROWS)).configured(config)
        if rows.slots >= 3:
            break
    kernel = rows
    return kernel(q, lengths, layer)


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
        """With this configuration, or a sane one: a warp alone for two query tiles at most, and three slots of the ring where they fit."""
        if config is not None:
            configured = dataclasses.replace(self, config=config)
            if configured.slots < 2:
                raise ValueError(f"{config} leaves no room for two slots of {configured.slot_bytes} bytes for each team")
            return configured
        heads = self.kv_heads * self.blocks_of_rows
        largest = WARPS if self.planes is None else self.group_size // 32
        alone = [(2, 1, 1), (1, 1, 1), (1, 1, 2), (1, 1, 4)][self.planes is None :]
        together = [(1, 3, 4), (2, 1, 4), (1, 1, 4), (1, 1, 2)]
        shapes = [shape for shape in (alone if self.block_tiles <= 2 else together) if shape[2] <= largest]
        options = [Config(max(1, MULTIPROCESSORS * blocks // heads), blocks, groups, team) for blocks, groups, team in shapes]
        choices = [dataclasses.replace(self, config=option) for option in options]
        return next((c for c in choices if c.slots >= 3), choices[-1])

    @property
    def rows(self) -> int:
        """Query rows of a KV head: row t * heads_per_kv_head + h is token t of its h-th query head."""
        return self.tokens * self.heads_per_kv_head

    def query_row(self, batch, kv_head, row):
        """Where that row lies in [B T N]."""
        token, head = row // self.heads_per_kv_head, row % self.heads_per_kv_head
        return ((batch * self.tokens + token) * self.kv_heads + kv_head) * self.heads_per_kv_head + head

    @property
    def teams(self) -> int:
        return self.config.warpgroups * WARPS // self.config.team

    @property
    def splits(self) -> int:
        """Blocks that share the tokens of a KV head: at least one for each row of the batch."""
        return max(self.config.splits, self.batch)

    @property
    def block_rows(self) -> int:
        """Query rows of a block."""
        return self.block_tiles * ROWS

    @property
    def query_pitch(self) -> int:
        """Bytes from one query to the next in shared memory: eight of them start in different banks."""
        return self.head_dim * 2 + 16

    @property
    def query_bytes(self) -> int:
        """Of the queries in bfloat16, and if there are codes, in float16 and what they were multiplied by, and its inverse."""
        return self.block_rows * (self.query_pitch if self.planes is None else 2 * self.query_pitch + 8)

    @property
    def operand_bytes(self) -> int:
        """Of the operands that a team shares: queries times scales, then softmax weights."""
        return 16 * max(self.head_dim, self.group_size, self.chunk) * self.block_tiles

    @property
    def team_bytes(self) -> int:
        """Of what a team shares: operands, and numbers per query: where its logits start, and twice what each warp has."""
        return 0 if self.config.team == 1 else self.operand_bytes + 4 * self.block_rows * (1 + 2 * self.config.team)

    @property
    def chunk(self) -> int:
        """Tokens of the full-precision cache that are read at a time."""
        return 16 * max(self.config.team, 2 if self.head_dim <= 128 else 1)

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
        available = SHARED_BYTES // self.config.blocks - 2048 - self.query_bytes - self.teams * self.team_bytes
        return min(8, available // (self.teams * self.slot_bytes))

    @property
    def shared_bytes(self) -> int:
        return self.query_bytes + self.teams * (self.team_bytes + self.slots * self.slot_bytes)

    def __call__(self, q: Array, lengths: Lengths, layer: HierarchicalLayer | FullLayer) -> Array:
        buffer = layer.buffer if isinstance(layer, HierarchicalLayer) else layer
        inputs = {"q": q, "quantized": lengths.quantized, "buffered": lengths.buffered, "keys": buffer.keys, "values": buffer.values}
        if self.planes is not None:
            for name, planes in ("key", layer.keys), ("value", layer.values):
                inputs |= {f"{name}_upper": planes.upper, f"{name}_scale": planes.scale, f"{name}_zero": planes.zero}
                if self.planes == 2:
                    inputs[f"{name}_lower"] = planes.lower
        lead = (self.kv_heads * self.blocks_of_rows, self.splits * self.teams, self.block_rows)
        partial = {"out": (*lead, self.head_dim), "top": lead, "total": lead}
        partial = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in partial.items()}
        name = f"decode_attention_{'full' if self.planes is None else f'int{4 * self.planes}'}"
        blocks = lead[0] * self.splits
        partial = self._launch(
            name, functools.partial(emit_block, self), inputs, partial, blocks, self.config.warpgroups, self.shared_bytes
        )
        partial |= {"quantized": lengths.quantized, "buffered": lengths.buffered}
        merged = {"merged": jax.ShapeDtypeStruct(q.shape, q.dtype)}
        shared = 4 * WARPS * (self.head_dim + 1)
        rows = self.batch * self.tokens * self.kv_heads * self.heads_per_kv_head
        return self._launch("merge_attention", functools.partial(emit_merge, self), partial, merged, rows, 1, shared)["merged"]

    def _launch(self, name: str, emit: Callable, inputs: dict, outputs: dict, blocks: int, warpgroups: int, shared_bytes: int) -> dict:
        """Runs `emit(refs)` in that many blocks of so many warpgroups, each block with a ref "shared" of its own."""
        from jax.experimental.mosaic.gpu import core as mosaic
        from jax.experimental.pallas import mosaic_gpu as plgpu

        names = (*inputs, *outputs, "shared")

        def body(*refs):
            types = tuple(plgpu.RefType() for _ in refs)
            plgpu.inline_mgpu(arg_types=types)(lambda ctx, *raw: emit(dict(zip(names, raw))))(*refs)

        results = plgpu.kernel(
            body,
            out_type=tuple(outputs.values()),
            grid=(blocks,),
            grid_names=("block",),
            num_threads=warpgroups,
            thread_name="warpgroup",
            scratch_types=(plgpu.SMEM((shared_bytes,), jnp.uint8),),
            compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane),
            kernel_name=name,
        )(*inputs.values())
        return dict(zip(outputs, results))


def deal(kernel: Kernel, w, at: dict) -> tuple[list, list]:
    """(chunks of the buffer, groups) of each row of the batch, and the first of its blocks, ending with their number.

    The blocks of a KV head are dealt to the rows in proportion to what there is to read, one at least. Chunks and groups count alike.
    """
    units = []
    for b in range(kernel.batch):
        quantized, buffered = (w.load_global(at[name] + 4 * b)[0] for name in ("quantized", "buffered"))
        units.append(((buffered + (kernel.chunk - 1)) // kernel.chunk, quantized // kernel.group_size if kernel.planes else w.i32(0)))
    total = w.total([x for unit in units for x in unit])
    firsts, seen = [w.i32(0)], w.i32(0)
    for b, unit in enumerate(units[:-1]):
        seen = seen + w.total(unit)
        firsts.append(seen * (kernel.splits - kernel.batch) // total + (b + 1))
    return units, [*firsts, w.i32(kernel.splits)]


def emit_block(kernel: Kernel, refs: dict) -> None:
    """What a block does: its teams' shares of one row of the batch, KV head and run of query rows."""
    from pallas_kernels import warp as w

    H, team = kernel.head_dim, kernel.config.team
    warps = kernel.config.warpgroups * WARPS
    at = {name: w.address(ref) for name, ref in refs.items()}
    thread, block = w.thread_index(), w.block_index()
    lane, warp = thread & 31, w.uniform(thread >> 5)
    split, rest = block % kernel.splits, block // kernel.splits
    row_block, kv_head = rest % kernel.blocks_of_rows, rest // kernel.blocks_of_rows
    part = warp % team
    units, firsts = deal(kernel, w, at)
    batch, (chunks, groups), first, last = w.i32(0), units[0], firsts[0], firsts[1]
    for b in range(1, kernel.batch):
        here = firsts[b] < split + 1
        new = (w.i32(b), *units[b], firsts[b], firsts[b + 1])
        batch, chunks, groups, first, last = (w.select(here, x, old) for x, old in zip(new, (batch, chunks, groups, first, last)))
    worker, workers = (split - first) * kernel.teams + warp // team, (last - first) * kernel.teams
    first, last = ((worker + i) * (chunks + groups) // workers for i in (0, 1))
    buffered = w.load_global(at["buffered"] + w.i64(batch) * 4)[0]
    head = batch * kernel.kv_heads + kv_head

    queries = at["shared"]
    pieces = H // 8
    for offset in range(0, kernel.block_rows * pieces, 32 * warps):
        row, piece = (thread + offset) // pieces, thread % pieces
        with w.when(row < kernel.block_rows):
            source = kernel.query_row(batch, kv_head, w.minimum(row_block * kernel.block_rows + row, w.i32(kernel.rows - 1)))
            w.copy_async(queries + row * kernel.query_pitch + piece * 16, at["q"] + w.i64(source) * (2 * H) + w.i64(piece * 16))
    w.commit_copies()

    shared = queries + kernel.query_bytes + (warp // team) * (kernel.team_bytes + kernel.slots * kernel.slot_bytes)
    barrier = warp // team + 8
    tile = Tile(kernel, w, (queries, shared), lane, part, barrier, buffered)
    ring = functools.partial(Pipeline, kernel, w, shared + kernel.team_bytes, tile.meet)
    full = ring(FullSource(kernel, w, at, head, lane, part, buffered), *(w.minimum(x, chunks) for x in (first, last)))
    streams = [full]
    if kernel.planes is not None:
        source = QuantizedSource(kernel, w, at, head, lane, part)
        streams.insert(0, ring(source, *(w.maximum(x - chunks, w.i32(0)) for x in (first, last))))
    # The ring fills while the queries come and are prepared.
    streams[0].prefetch()
    w.wait_for_copies(kernel.slots - 1)
    w.synchronize(w.i32(0), warps)
    state = tile.empty()
    if kernel.planes is not None:
        for n in range(0, kernel.block_tiles, warps):
            with w.when(warp + n < kernel.block_tiles):
                tile.halve_queries(warp + n)
        w.synchronize(w.i32(0), warps)
        state = streams[0].run(tile.quantized_keys, tile.quantized_values, state)
        w.wait_for_copies(0)
        tile.meet()
        full.prefetch()
    limits = tile.limits(row_block * kernel.block_rows, buffered)
    fragments = tile.full_queries()
    state = full.run(lambda slot, i: tile.full_keys(slot, i, fragments, limits), tile.full_values, state)
    tile.store(at, (block * kernel.teams + warp // team) * kernel.block_rows, state)


def emit_merge(kernel: Kernel, refs: dict) -> None:
    """Merges what the workers found for one query row, the workers among four warps."""
    from pallas_kernels import warp as w

    H, R = kernel.head_dim, kernel.heads_per_kv_head
    at = {name: w.address(ref) for name, ref in refs.items()}
    thread, place = w.thread_index(), w.block_index()
    lane, warp = thread & 31, w.uniform(thread >> 5)
    kv_head = place // R % kernel.kv_heads
    batch, token = place // (R * kernel.kv_heads * kernel.tokens), place // (R * kernel.kv_heads) % kernel.tokens
    row = token * R + place % R
    row_block, row = row // kernel.block_rows, row % kernel.block_rows
    _, firsts = deal(kernel, w, at)
    first, last = firsts[0], firsts[1]
    for b in range(1, kernel.batch):
        first, last = (w.select(batch == b, x, old) for x, old in zip(firsts[b : b + 2], (first, last)))
    workers = (last - first) * kernel.teams
    first = ((kv_head * kernel.blocks_of_rows + row_block) * kernel.splits + first) * kernel.teams
    index = lambda worker: w.i64((first + w.minimum(worker, workers - 1)) * kernel.block_rows + row)
    load = lambda name, worker: w.load_global(at[name] + index(worker) * 4, result="f")[0]

    def highest(i, top):
        return functools.reduce(w.maximum, [load("top", i * 128 + lane + k) for k in range(0, 128, 32)], top)

    top = w.loop(w.i32(0), (workers + 127) // 128, w.f32(-math.inf), highest)
    top = w.all_rows(w.all_columns(top, w.maximum), w.maximum)
    width = H // 32  # channels of a lane

    def add(i, state):
        # Eight workers at a time, so that the loads wait together.
        for k in range(8):
            worker = i * (8 * WARPS) + warp + k * WARPS
            weight = w.select(worker < workers, w.exp2(load("top", worker) - top), w.f32(0.0))
            source = at["out"] + index(worker) * (4 * H) + w.i64(lane * (4 * width))
            values = [x for j in range(0, width, 4) for x in w.load_global(source + 4 * j, min(4, width), result="f")]
            values.append(load("total", worker))
            state = [w.fma(weight, x, old) for x, old in zip(values, state)]
        return state

    state = w.loop(w.i32(0), (workers + (8 * WARPS - 1)) // (8 * WARPS), [w.f32(0.0)] * (width + 1), add)
    mine = at["shared"] + warp * (4 * (H + 1))
    for i, x in enumerate(state[:-1]):
        w.store_shared(mine + (lane * width + i) * 4, x)
    w.store_shared(mine + 4 * H, state[-1])
    w.synchronize(w.i32(0), WARPS)
    pair = thread % (H // 2)
    merged = lambda i: w.total([w.load_shared(at["shared"] + (i + k * (H + 1)) * 4, 1, result="f")[0] for k in range(WARPS)])
    divisor = merged(w.i32(H))
    with w.when(thread < H // 2):
        word = w.pair(merged(pair * 2) / divisor, merged(pair * 2 + 1) / divisor, "bf16")
        w.store_global(at["merged"] + w.i64(place) * (2 * H) + w.i64(pair * 4), word)


class Pipeline:
    """Streams the keys and values of steps lower..upper through the ring, in turn, as many ahead as it has slots for."""

    def __init__(self, kernel: Kernel, w, ring, meet: Callable, source, lower, upper):
        self.kernel, self.w, self.ring, self.meet = kernel, w, ring, meet
        self.source, self.lower, self.upper = source, lower, upper

    def prefetch(self) -> None:
        """Fills the ring but for one slot."""
        for unit in range(self.kernel.slots - 1):
            self._issue(unit, self.lower, self.w.i32(unit))

    def run(self, keys: Callable, values: Callable, state):
        """The state after all steps: logits = keys(address, step), state = values(address, state, logits)."""
        w, last = self.w, self.kernel.slots - 1
        advance = lambda slot: w.select(slot == last, w.i32(0), slot + 1)

        def step(i, carry):
            slot, state = carry
            logits = keys(self._ready(0, i, slot), i)
            slot = advance(slot)
            state = values(self._ready(1, i, slot), state, logits)
            return advance(slot), state

        return w.loop(self.lower, self.upper, (w.i32(0), state), step)[1]

    def _issue(self, unit: int, step, slot) -> None:
        # The unit-th half step from here, if it is within the run.
        ahead = step + unit // 2
        with self.w.when(ahead < self.upper):
            copy = self.source.copy_values if unit % 2 else self.source.copy_keys
            copy(self.ring + slot * self.kernel.slot_bytes, ahead)
        self.w.commit_copies()

    def _ready(self, unit: int, step, slot):
        w, slots = self.w, self.kernel.slots
        w.wait_for_copies(slots - 2)
        self.meet()
        # Everyone is done with the slot before this one: it takes the half step that is slots - 1 ahead.
        self._issue(unit + slots - 1, step, w.select(slot == 0, w.i32(slots - 1), slot - 1))
        return self.ring + slot * self.kernel.slot_bytes


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
        to = self.thread * 16
        if name == "key":
            # Of four rows the middle two change places: a tile reads rows 0 and 2, and 1 and 3, which are to lie in different banks.
            row_bytes = kernel.head_dim // 2
            row = self.thread // (row_bytes // 16)
            to = to + (((row & 1) << 1 | (row >> 1) & 1) - (row & 3)) * row_bytes
        for plane in ("upper", "lower")[: kernel.planes]:
            source = self.at[f"{name}_{plane}"] + index * size + w.i64(self.thread * 16)
            for offset in range(0, size, 512 * kernel.config.team):
                w.copy_async(shared + to + offset, source + offset)
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
    """A warp's part of attention over whatever lies in its team's slots.

    Lane 4 g + t. Of the 8 queries of tile n, logits and results belong to queries 2 t and 2 t + 1. The warps of a team divide the
    tokens of a step for the logits, and the channels for the weighted values; between, they share the queries times the keys'
    scales, the maximum, and the weights. state: out[n][i], weighted values of channels 16 i + g and 16 i + g + 8 of this warp's;
    top[n], the running maximum (base 2); total[n], the sum of exponentials of this lane's tokens.
    """

    def __init__(self, kernel: Kernel, w, at, lane, part, barrier, length):
        self.kernel, self.w = kernel, w
        self.masks = w.nibble_masks(length >> 31)  # no length is negative
        self.g, self.t, self.lane, self.part = lane >> 2, lane & 3, lane, part
        self.queries, self.shared = at
        self.halves = self.queries + kernel.block_rows * kernel.query_pitch
        self.factors = self.halves + kernel.block_rows * kernel.query_pitch
        self.tiles = range(kernel.block_tiles)
        self.team = kernel.config.team
        self.meet = functools.partial(w.synchronize, barrier, self.team)
        # A code is read as 1024 more, and the lower plane is stored plus 8; its unit is a sixteenth of the scale.
        self.excess, self.unit = (1024.0, 1.0) if kernel.planes == 1 else (1032.0, 1 / 16)
        # One plane's high nibbles are read where they lie, sixteen times too large.
        self.high = 1 / 16 if kernel.planes == 1 else 1.0

    def empty(self) -> dict:
        f = self.w.f32
        channels = range(self.kernel.head_dim // 16 // self.team)
        return {
            "out": [[(f(0.0),) * 4 for _ in channels] for _ in self.tiles],
            "top": [[f(-1e30)] * 2 for _ in self.tiles],
            "total": [[f(0.0)] * 2 for _ in self.tiles],
        }

    def _operand_at(self, n, k, steps: int, words: int):
        """Where the team shares the words of operand n, step k of `steps`, that belong to this lane."""
        return self.shared + (n * steps + k) * (128 * words) + self.lane * (4 * words)

    def _row_at(self, row):
        """Where the team shares a row of 8 numbers, one for each query of a tile: this lane's two."""
        return self.shared + self.kernel.operand_bytes + row * 32 + self.t * 8

    def _share_rows(self, first: int, values: list) -> None:
        """Writes this warp's two numbers per tile to its rows, from row `first` on."""
        with self.w.when(self.g == 0):
            for n, pair in enumerate(values):
                self.w.store_shared(self._row_at(first + self.part * len(self.tiles) + n), *pair)

    def _shared_rows(self, first: int, combine: Callable) -> list:
        """What the team's warps have written, combined."""
        w = self.w
        row = lambda part, n: self._row_at(w.i32(first + part * len(self.tiles) + n))
        of_all = lambda n: zip(*(w.load_shared(row(part, n), 2, "f") for part in range(self.team)))
        return [[functools.reduce(combine, xs) for xs in of_all(n)] for n in self.tiles]

    # The quantized region. A lane reads the same words of every row: word k of row r holds entries e = 4 (words t + k) .. e + 3 of the
    # row's first half in the low nibbles, of its second half in the high ones. Products contract them in that order, a word a step,
    # as pairs (e, e + 2) and (e + 1, e + 3).

    def _pairs(self, at, entries: int, words: int) -> list:
        """This lane's pairs of an array of 16-bit floats [word][half], from `at` on."""
        halves = [self.w.load_shared(at + self.t * (entries // 4) + half * entries, 2 * words) for half in (0, 1)]
        return [[half[2 * k : 2 * k + 2] for half in halves] for k in range(words)]

    def _each(self, function: Callable, *operands: list) -> list:
        """function of each pair of operands [word][half]."""
        return [[tuple(map(function, *half)) for half in zip(*word)] for word in zip(*operands)]

    def _half(self, operand: list, *factors) -> list:
        """Neighbours in bfloat16, times a factor for each half of the row, as the pairs of a product in float16."""
        w = self.w

        def half(pairs: tuple, factor) -> tuple:
            a, b = ([entry * factor for entry in w.bf16_entries(x)] for x in pairs)
            return tuple(w.pair(*both, "f16") for both in zip(a, b))

        return [[half(*x) for x in zip(word, factors)] for word in operand]

    def _largest(self, operand: list):
        """The largest magnitude of pairs of bfloat16 in the four lanes of a row."""
        w = self.w
        return w.all_columns(w.largest_magnitude([x for word in operand for half in word for x in half]), w.maximum)

    def halve_queries(self, n) -> None:
        """Writes the queries of tile n in float16, what they were multiplied by, and the inverse."""
        w, kernel = self.w, self.kernel
        row = self.g + n * ROWS
        plain = self._pairs(self.queries + row * kernel.query_pitch, kernel.head_dim, kernel.head_dim // 32)
        factor, inverse = w.powers_of_two(self._largest(plain), SIZE, LEAST)
        for k, word in enumerate(self._half(plain, factor, factor)):
            for half, pairs in enumerate(word):
                at = self.halves + row * kernel.query_pitch + self.t * (kernel.head_dim // 4) + half * kernel.head_dim
                w.store_shared(at + 8 * k, *pairs)
        w.store_shared(self.factors + row * 8, factor, inverse)

    def _sums(self, operand: list, weights: list, kind: str) -> tuple:
        """Sums of operand times weights over [word][half], for queries 2 t and 2 t + 1."""
        # Two chains, for each product waits for the one before it.
        acc = [(self.w.f32(0.0),) * 4] * 2
        for word in zip(operand, weights):
            for half, (x, weight) in enumerate(zip(*word)):
                acc[half] = self.w.mma(acc[half], (weight[0], weight[0], weight[1], weight[1]), x, kind)
        return tuple(a + b for a, b in zip(*acc))[:2]

    def _scaled(self, operand: list, scale: list) -> tuple[list, tuple]:
        """The operand times the scales, and its excess: the sum times what the codes are read too large by."""
        scaled = self._each(self.w.multiply_pairs, operand, scale)
        ones = self._each(lambda _: self.w.i32(ONES), scaled)
        return scaled, tuple(x * self.excess for x in self._sums(scaled, ones, "f16"))

    def _contract(self, acc: list, at: list, row_bytes: int, plane_bytes: int, operand: Callable) -> None:
        """acc[m][n] += codes of tile m, whose rows g and g + 8 are at at[m], times operand(n, k) over all words k."""
        w, steps = self.w, row_bytes // 16
        words = [[[w.load_shared(row + p * plane_bytes, steps) for p in range(self.kernel.planes)] for row in rows] for rows in at]
        for k in range(steps):
            operands = [operand(n, k) for n in self.tiles]
            codes = [[w.unpack(planes[0][k], planes[1][k] if len(planes) == 2 else None, self.masks) for planes in rows] for rows in words]
            for half in (0, 1):
                for n in self.tiles:
                    for m, (a, b) in enumerate(codes):
                        fragment = (a[half][0], b[half][0], a[half][1], b[half][1])
                        acc[m][n] = w.mma(acc[m][n], fragment, operands[n][half], "f16")

    def _shared_operand(self, steps: int) -> Callable:
        def operand(n: int, k: int) -> tuple:
            words = self.w.load_shared(self._operand_at(n, k, steps, 4), 4)
            return words[:2], words[2:]

        return operand

    def quantized_keys(self, slot, group) -> tuple[list, list]:
        """Logits [n][tile] of this warp's tokens, those of word k, first half, second half, of the values' rows; and their units [n]."""
        kernel, w = self.kernel, self.w
        G, H = kernel.group_size, kernel.head_dim
        row_bytes, steps, words = H // 2, H // 32, G // 32
        parameters = slot + kernel.planes * G * row_bytes
        scale, zero = self._pairs(parameters, H, steps), self._pairs(parameters + 2 * H, H, steps)
        factor, inverse = w.powers_of_two(self._largest(scale), SIZE, LEAST)
        scale = self._half(scale, factor, factor * self.high)

        def prepared(n) -> tuple[list, list]:
            """Operand n, and where its logits start."""
            at = (self.g + n * ROWS) * kernel.query_pitch
            plain, half = self._pairs(self.queries + at, H, steps), self._pairs(self.halves + at, H, steps)
            scaled, excess = self._scaled(half, scale)
            sums, unit = self._sums(plain, zero, "bf16"), factor * (1 / self.unit)
            return scaled, [x * (factors[0] * unit) - e for x, factors, e in zip(sums, self._factors(n), excess)]

        if self.team == 1:
            scaled, start = zip(*(prepared(w.i32(n)) for n in self.tiles))
            operand = lambda n, k: scaled[n][k]
        else:
            for n in range(0, len(self.tiles), self.team):
                n = self.part + n
                with w.when(n < len(self.tiles)):
                    scaled, start = prepared(n)
                    for k, (low, high) in enumerate(scaled):
                        w.store_shared(self._operand_at(n, k, steps, 4), *low, *high)
                    with w.when(self.g == 0):
                        w.store_shared(self._row_at(n), *start)
            self.meet()
            start = [w.load_shared(self._row_at(w.i32(n)), 2, "f") for n in self.tiles]
            operand = self._shared_operand(steps)
        mine = words // self.team
        first = slot + (((self.g >> 1) * words + self.part * mine) * 4 + (self.g & 1)) * row_bytes + self.t * (H // 8)
        logits = [[] for _ in self.tiles]
        for k in range(mine):
            rows = [first + (4 * k + half * (G // 2)) * row_bytes for half in (0, 1)]
            acc = [[(*c, *c) for c in start] for _ in rows]
            self._contract(acc, [(row, row + 2 * row_bytes) for row in rows], row_bytes, G * row_bytes, operand)
            for n in self.tiles:
                logits[n] += [acc[0][n], acc[1][n]]
        units = [[factors[1] * (inverse * self.unit) for factors in self._factors(w.i32(n))] for n in self.tiles]
        return logits, units

    def _factors(self, n) -> tuple:
        """What queries 2 t and 2 t + 1 were multiplied by, and the inverse."""
        words = self.w.load_shared(self.factors + (self.t * 2 + n * ROWS) * 8, 4, "f")
        return words[:2], words[2:]

    def quantized_values(self, slot, state: dict, logits: tuple[list, list]) -> dict:
        """The state after this group."""
        kernel, w = self.kernel, self.w
        G, H = kernel.group_size, kernel.head_dim
        row_bytes, words = G // 2, G // 32
        mine = words // self.team
        parameters = slot + kernel.planes * H * row_bytes
        scale = self._pairs(parameters, G, words)
        factor, inverse = w.powers_of_two(self._largest(scale), SIZE, LEAST)
        if self.team > 1:
            scale = self._pairs(parameters + self.part * (8 * mine), G, mine)
        zero = self._pairs(parameters + 2 * G + self.part * (8 * mine), G, mine)
        zero = [[w.swap_neighbours(*half) for half in word] for word in zero]
        scale = self._half(scale, factor, factor * self.high)
        state, weights = self._softmax(state, *logits)
        by_word = lambda tiles, kind: [[self._operand(p, kind) for p in tiles[2 * k : 2 * k + 2]] for k in range(mine)]
        scaled, start = [], []
        for p in weights:
            sums = self._sums(by_word(p, "bf16"), zero, "bf16")
            x, excess = self._scaled(by_word(p, "f16"), scale)
            scaled.append(x)
            start.append([a * (factor * (1 / self.unit)) - e for a, e in zip(sums, excess)])
        operand = lambda n, k: scaled[n][k]
        if self.team > 1:
            for n in self.tiles:
                for k, (low, high) in enumerate(scaled[n]):
                    w.store_shared(self._operand_at(n, self.part * mine + k, words, 4), *low, *high)
            row = (1 + self.team) * len(self.tiles)
            self._share_rows(row, start)
            self.meet()
            start = self._shared_rows(row, lambda a, b: a + b)
            operand = self._shared_operand(words)
        channels = range(H // 16 // self.team)
        first = slot + (self.part * (16 * len(channels)) + self.g) * row_bytes + self.t * (G // 8)
        unit = inverse * self.unit
        for i in channels[::2]:
            both = channels[i : i + 2]
            acc = [[(*c, *c) for c in start] for _ in both]
            rows = [first + 16 * m * row_bytes for m in both]
            self._contract(acc, [(row, row + 8 * row_bytes) for row in rows], row_bytes, H * row_bytes, operand)
            for n in self.tiles:
                for m, tiles in zip(both, acc):
                    state["out"][n][m] = tuple(w.fma(x, unit, old) for x, old in zip(tiles[n], state["out"][n][m]))
        return state

    def _operand(self, p: tuple, kind: str) -> tuple:
        """Softmax weights of a tile of tokens as an operand."""
        w = self.w
        return w.transpose(w.pair(p[0], p[1], kind)), w.transpose(w.pair(p[2], p[3], kind))

    def _softmax(self, state: dict, logits: list, units: list) -> tuple[dict, list]:
        """The state with its maximum and sum brought up to date, multiplied accordingly, and weights [n][tile].

        units: [n] of the logits of two queries.
        """
        w = self.w
        base = math.log2(math.e) / math.sqrt(self.kernel.head_dim)
        units = [[x * base for x in pair] for pair in units]
        peak = lambda tiles, c: w.all_rows(functools.reduce(w.maximum, [x for s in tiles for x in s[c::2]]), w.maximum)
        peaks = [[peak(tiles, c) * units[n][c] for c in (0, 1)] for n, tiles in enumerate(logits)]
        if self.team > 1:
            self._share_rows(len(self.tiles), peaks)
            self.meet()
            peaks = self._shared_rows(len(self.tiles), w.maximum)
        new = {"out": [], "top": [], "total": []}
        weights = []
        for n, tiles in enumerate(logits):
            top = [w.maximum(old, x) for old, x in zip(state["top"][n], peaks[n])]
            down = [w.f32(0.0) - x for x in top]
            alpha = [w.exp2(old + x) for old, x in zip(state["top"][n], down)]
            p = [tuple(w.exp2(w.fma(x, units[n][c % 2], down[c % 2])) for c, x in enumerate(s)) for s in tiles]
            added = [w.total([x for s in p for x in s[c::2]]) for c in (0, 1)]
            new["top"].append(top)
            new["total"].append([w.fma(old, a, x) for old, a, x in zip(state["total"][n], alpha, added)])
            new["out"].append([tuple(x * alpha[c % 2] for c, x in enumerate(acc)) for acc in state["out"][n]])
            weights.append(p)
        return new, weights

    # The full-precision rows, 16 tokens or channels a step.

    def limits(self, first_row, length) -> list:
        """Tokens that each query may see."""
        kernel, w = self.kernel, self.w
        row = lambda n, c: first_row + (self.t * 2 + (n * ROWS + c))
        limit = lambda n, c: length - (kernel.tokens - 1) + row(n, c) // kernel.heads_per_kv_head
        return [[w.minimum(limit(n, c), length) for c in (0, 1)] for n in self.tiles]

    def full_queries(self) -> Callable:
        """The queries as operands (n, step); a warp with few tiles keeps them."""
        w = self.w
        start = self.queries + self.g * self.kernel.query_pitch + self.t * 4
        word = lambda n, channel: w.load_shared(start + (n * ROWS * self.kernel.query_pitch + 2 * channel), 1)[0]
        load = lambda n, b: (word(n, 16 * b), word(n, 16 * b + 8))
        if self.team > 1:
            return load
        kept = [[load(n, b) for b in range(self.kernel.head_dim // 16)] for n in self.tiles]
        return lambda n, b: kept[n][b]

    def _matrices(self, slot, row, piece, *, transposed: bool) -> Callable:
        """Loads the fragment whose rows start at 16 a and pieces at 2 b, as function (a, b)."""
        w, H = self.w, self.kernel.head_dim
        start, swizzled = slot + row * (2 * H), (piece ^ (self.lane & 7)) * 16
        return lambda a, b: w.load_matrices(start + a * (32 * H) + (swizzled ^ (b * 32)), transposed=transposed)

    def full_keys(self, slot, chunk, queries: Callable, limits: list) -> tuple[list, list]:
        """Logits [n][tile] of this warp's tokens of a chunk, -inf for those that a query may not see; and their units [n]."""
        kernel, w = self.kernel, self.w
        mine = kernel.chunk // 16 // self.team
        load = self._matrices(slot, self.lane & 15, self.lane >> 4, transposed=False)
        logits = [[] for _ in self.tiles]
        for a in range(mine):
            a = self.part * mine + a
            acc = [(w.f32(0.0),) * 4 for _ in self.tiles]
            for b in range(kernel.head_dim // 16):
                fragment = load(a, w.i32(b))
                acc = [w.mma(acc[n], fragment, queries(n, b), "bf16") for n in self.tiles]
            token = chunk * kernel.chunk + self.g + a * 16
            hidden = w.f32(-math.inf)
            for n in self.tiles:
                logits[n].append(tuple(w.select(token + 8 * (c // 2) < limits[n][c % 2], x, hidden) for c, x in enumerate(acc[n])))
        return logits, [[w.f32(1.0)] * 2 for _ in self.tiles]

    def full_values(self, slot, state: dict, logits: tuple[list, list]) -> dict:
        """The state after this chunk."""
        kernel, w = self.kernel, self.w
        steps = kernel.chunk // 16
        mine, channels = steps // self.team, kernel.head_dim // 16 // self.team
        state, weights = self._softmax(state, *logits)
        weights = [[self._operand(p, "bf16") for p in tiles] for tiles in weights]
        operand = lambda n, a: weights[n][a]
        if self.team > 1:
            for n in self.tiles:
                for a, words in enumerate(weights[n]):
                    w.store_shared(self._operand_at(n, self.part * mine + a, steps, 2), *words)
            self.meet()
            operand = lambda n, a: w.load_shared(self._operand_at(n, a, steps, 2), 2)
        load = self._matrices(slot, (self.lane & 7) + (self.lane >> 4) * 8, (self.lane >> 3) & 1, transposed=True)
        for a in range(steps):
            operands = [operand(n, a) for n in self.tiles]
            for i in range(channels):
                fragment = load(w.i32(a), self.part * channels + i)
                for n in self.tiles:
                    state["out"][n][i] = w.mma(state["out"][n][i], fragment, operands[n], "bf16")
        return state

    def store(self, at: dict, first_row, state: dict) -> None:
        """Writes the team's partial results: each warp those of its channels."""
        w, H = self.w, self.kernel.head_dim
        totals = [[w.all_rows(x, lambda a, b: a + b) for x in pair] for pair in state["total"]]
        if self.team > 1:
            self.meet()
            self._share_rows(0, totals)
            self.meet()
            totals = self._shared_rows(0, lambda a, b: a + b)
        for n in self.tiles:
            for c in (0, 1):
                row = w.i64(first_row + self.t * 2 + (n * ROWS + c))
                to = at["out"] + row * (4 * H) + w.i64(self.g * 4 + self.part * (4 * H // self.team))
                for i, acc in enumerate(state["out"][n]):
                    for high in (0, 1):
                        w.store_global(to + 4 * (16 * i + 8 * high), acc[c + 2 * high])
                with w.when(self.g == 0):
                    w.store_global(at["top"] + row * 4, state["top"][n][c])
                    w.store_global(at["total"] + row * 4, totals[n][c])
