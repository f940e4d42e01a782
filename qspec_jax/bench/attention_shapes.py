"""Named problems of decode attention, for benchmarks and tuning: their random inputs, and the bytes that must be read."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths, Planes
from pallas_kernels.formats.views import DenseView, ListedGroups, View
from qspec_jax.caches.cache import Reads
from qspec_jax.caches.full import FullCache
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.caches.registry import CacheConfig

SPARE_ROWS = 8
INT32_BYTES = FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """One problem, in bfloat16.

    Attributes:
        name: that it is asked for by.
        planes: how many are read: 1 (INT4), 2 (INT8), or None (a bfloat16 cache).
        tokens: T, the query tokens of each row.
        heads, kv_heads: query and KV heads.
        context: tokens cached in each row, the T query tokens among them; the batch is ragged where rows differ.
        head_dim, group_size: as of the cache.
        listed: the share of a row's groups that are read, by lists; None: all.
        observe: whether the attention mass is asked for.
        append: whether the T tokens come as they were projected, to be rotated and appended too.
    """

    name: str
    planes: int | None
    tokens: int
    heads: int
    kv_heads: int
    context: tuple[int, ...]
    head_dim: int = 128
    group_size: int = 128
    listed: float | None = None
    observe: bool = False
    append: bool = False

    @property
    def batch(self) -> int:
        return len(self.context)

    @property
    def ragged(self) -> bool:
        return len(set(self.context)) > 1

    @property
    def format(self) -> str:
        return {1: "INT4", 2: "INT8", None: "bf16"}[self.planes]

    @property
    def description(self) -> str:
        context = f"{min(self.context):,} to {max(self.context):,}" if self.ragged else f"{self.context[0]:,}"
        rows = f", {self.batch} rows" if self.batch > 1 else ""
        listed = "" if self.listed is None else f", {self.listed:.3g} of the groups listed"
        more = ", mass observed" * self.observe + ", appended" * self.append
        return f"{self.format}, T={self.tokens}, {self.heads}/{self.kv_heads} heads{rows} of {context} tokens{listed}{more}"

    @property
    def quantized(self) -> tuple[int, ...]:
        """Tokens in the quantized region of each row: whole groups, with the last G to 2G - 1 tokens of the row left out."""
        if self.planes is None:
            return (0,) * self.batch
        G = self.group_size
        return tuple(max(0, (tokens - G) // G * G) for tokens in self.context)

    @property
    def groups(self) -> int:
        """The capacity of the quantized region in groups."""
        return max(1, max(self.quantized) // self.group_size)

    @property
    def listed_groups(self) -> tuple[int, ...]:
        """Groups that are read in each row."""
        share = 1.0 if self.listed is None else self.listed
        return tuple(math.ceil(share * (tokens // self.group_size)) for tokens in self.quantized)

    @property
    def buffered(self) -> tuple[int, ...]:
        """Tokens in full precision in each row."""
        return tuple(tokens - old for tokens, old in zip(self.context, self.quantized))

    def shortened(self, max_tokens: int) -> "AttentionShape":
        """The same problem with at most `max_tokens` tokens in a row, whose rows differ in the same proportions."""
        longest = max(self.context)
        if longest <= max_tokens:
            return self
        # A half group more than whole ones, as the shapes below have.
        context = tuple(max(self.tokens, tokens * max_tokens // longest - self.group_size // 2) for tokens in self.context)
        return dataclasses.replace(self, name=f"{self.name} (at most {max_tokens})", context=context)


def _uniform(name: str, planes: int | None, tokens: int, heads: int, kv_heads: int, thousands: int, rows: int = 1) -> AttentionShape:
    # Half a group past a round number: 1.5 G tokens in the buffer, which is what decoding has on average.
    return AttentionShape(name, planes, tokens, heads, kv_heads, (thousands * 1024 + 64,) * rows)


# mha: 32 query and 32 KV heads, gqa: 32 and 8.
LARGE = (
    *(_uniform(f"int4-T1-mha-{k}k", 1, 1, 32, 32, k) for k in (64, 128, 256)),
    _uniform("int8-T7-mha-128k", 2, 7, 32, 32, 128),
    _uniform("int8-T13-mha-128k", 2, 13, 32, 32, 128),
    _uniform("int4-T1-gqa-128k", 1, 1, 32, 8, 128),
    _uniform("int4-T4-gqa-128k", 1, 4, 32, 8, 128),  # the middle of a cascade
    _uniform("int8-T7-gqa-128k", 2, 7, 32, 8, 128),
    # What each of two devices has of these.
    _uniform("int4-T1-mha-128k-halved", 1, 1, 16, 16, 128),
    _uniform("int8-T7-mha-128k-halved", 2, 7, 16, 16, 128),
    _uniform("int4-T1-gqa-128k-halved", 1, 1, 16, 4, 128),
    _uniform("int8-T7-gqa-128k-halved", 2, 7, 16, 4, 128),
    # Full batches: the drafts' and the verifying passes of `bench decode --batch-size`.
    _uniform("int4-T1-gqa-32k-16rows", 1, 1, 32, 8, 32, rows=16),
    _uniform("int8-T6-gqa-32k-16rows", 2, 6, 32, 8, 32, rows=16),
    _uniform("int4-T1-gqa-4k-64rows", 1, 1, 32, 8, 4, rows=64),
    _uniform("int8-T5-gqa-4k-64rows", 2, 5, 32, 8, 4, rows=64),
    AttentionShape("int4-T1-gqa-16k-ragged", 1, 1, 32, 8, (4160, 5915, 7671, 9426, 11182, 12937, 14693, 16448)),
    _uniform("bf16-T1-gqa-128k", None, 1, 32, 8, 128),
    _uniform("bf16-T7-gqa-128k", None, 7, 32, 8, 128),
    # For the plot of latency against context.
    *(_uniform(f"int8-T1-mha-{k}k", 2, 1, 32, 32, k) for k in (64, 128, 256)),
    *(_uniform(f"bf16-T1-mha-{k}k", None, 1, 32, 32, k) for k in (64, 128, 256)),
)
# Small enough for a CPU to take a second.
TINY = (
    *(AttentionShape(f"tiny-int4-T1-{n - 32}", 1, 1, 4, 2, (n,), head_dim=64, group_size=64) for n in (288, 544)),
    AttentionShape("tiny-int8-T3-ragged", 2, 3, 4, 2, (40, 288), head_dim=64, group_size=64),
    AttentionShape("tiny-bf16-T3-ragged", None, 3, 4, 2, (40, 288), head_dim=64, group_size=64),
)
SHAPES = {shape.name: shape for shape in (*LARGE, *TINY)}


def bytes_read(shape: AttentionShape) -> int:
    """Bytes that attention must read once: codes, scales and zeros of the quantized region or of what is listed of it, the lists, and used
    rows of the buffer; and where it observes, those of the mass that it must write."""
    reads = Reads(shape.planes or 0, sum(shape.listed_groups) * shape.group_size, sum(shape.buffered))
    _, layer, lengths = jax.eval_shape(lambda: random_problem(shape, 0))
    cache = FullCache((layer,), lengths) if shape.planes is None else HierarchicalCache((layer,), lengths, scheme=CacheConfig.scheme)
    size, _ = cache.bytes_of_reads(0, reads)
    if shape.listed is not None:
        size += shape.kv_heads * INT32_BYTES * sum(count + 1 for count in shape.listed_groups)
    if shape.observe:
        size += shape.batch * shape.kv_heads * shape.tokens * shape.groups * FLOAT32_BYTES
    return size


@functools.partial(jax.jit, static_argnames="shape")
def random_problem(shape: AttentionShape, seed: int | Array) -> tuple[Float[Array, "B T N H"], HierarchicalLayer | FullLayer, Lengths]:
    """Queries, a layer of random codes or values of variance about 1 (filled also beyond the lengths), and its lengths.

    Made on the device. The buffer of a hierarchical layer has 2G + 8 rows; a full layer has a row for each token of the longest context.
    """
    B, K, H, G = shape.batch, shape.kv_heads, shape.head_dim, shape.group_size
    # The default generator takes seconds to compile these draws.
    keys = iter(jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), 16))

    def normal(*dims):
        return jax.random.normal(next(keys), dims, jnp.bfloat16)

    q = normal(B, shape.tokens, shape.heads, H)
    lengths = Lengths(jnp.array(shape.quantized, jnp.int32), jnp.array(shape.buffered, jnp.int32))
    if shape.planes is None:
        rows = max(shape.context)
        return q, FullLayer(normal(B, K, rows, H), normal(B, K, rows, H)), lengths

    def planes(*codes: int) -> Planes:
        lead = (B, K, shape.groups)
        upper, lower = (jax.random.bits(next(keys), (*lead, *codes), jnp.uint8) for _ in range(2))

        # Codes 0 to 15 are -2 to 2; scales and zeros vary by a tenth.
        def tenth():
            return jax.random.uniform(next(keys), (*lead, 2 * codes[1]), minval=0.9, maxval=1.1)

        scale, zero = ((middle * tenth()).astype(jnp.bfloat16) for middle in (4 / 15, -2.0))
        return Planes(upper, lower, scale, zero)

    rows = 2 * G + SPARE_ROWS
    return q, HierarchicalLayer(planes(G, H // 2), planes(H, G // 2), FullLayer(normal(B, K, rows, H), normal(B, K, rows, H))), lengths


@functools.partial(jax.jit, static_argnames="shape")
def random_projections(
    shape: AttentionShape, seed: int | Array
) -> tuple[Float[Array, "B T channels"], Float[Array, "B T half"], Float[Array, "B T half"]]:
    """The T tokens' queries, keys and values before RoPE, and the cosines and sines of their angles."""
    keys = jax.random.split(jax.random.key(seed))
    lead = shape.batch, shape.tokens
    qkv = jax.random.normal(keys[0], (*lead, (shape.heads + 2 * shape.kv_heads) * shape.head_dim), jnp.bfloat16)
    angles = jax.random.uniform(keys[1], (*lead, shape.head_dim // 2), maxval=2 * math.pi)
    return qkv, jnp.cos(angles).astype(jnp.bfloat16), jnp.sin(angles).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnames="shape")
def random_view(shape: AttentionShape, seed: int | Array) -> View:
    """What is read of a random problem. Listed groups are drawn for each KV head, and are in ascending order."""
    if shape.listed is None:
        return DenseView(shape.planes, observed=shape.observe)
    lead, number = (shape.batch, shape.kv_heads), jnp.arange(shape.groups)
    there = jnp.array([tokens // shape.group_size for tokens in shape.quantized])[:, None, None]
    drawn = jax.random.uniform(jax.random.key(seed), (*lead, shape.groups))
    _, groups = jax.lax.top_k(jnp.where(number < there, drawn, -1.0), max(1, *shape.listed_groups))
    count = jnp.broadcast_to(jnp.array(shape.listed_groups, jnp.int32)[:, None], lead)
    # What a shorter row does not read comes last.
    groups = jnp.sort(jnp.where(jnp.arange(groups.shape[2]) < count[..., None], groups, shape.groups), -1)
    return ListedGroups(groups.astype(jnp.int32), count)
