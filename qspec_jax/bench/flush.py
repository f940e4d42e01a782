"""`qspec bench flush`: what quantizing the oldest group of tokens costs, against the attention of a round.

A flush is due once in G tokens, and in every round the loop asks whether one is. The round is counted by its attention alone; it has
weights to read besides, so shares of a whole round are smaller.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from rich.console import RenderableType

from pallas_kernels.formats.kv_cache import Lengths
from qspec_jax.bench import attention
from qspec_jax.bench.attention_shapes import AttentionShape, random_problem
from qspec_jax.bench.timing import Timing, loop, loop_trips, time_loop
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.drafts.step_bytes import ITEM_BYTES
from qspec_jax.errors import InputError, named
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.progress import progress_bar, working
from qspec_jax.reports import Run, grid, page, this_run

DEFAULT_SHAPES = "int4-T1-mha-128k", "int4-T1-gqa"  # beginnings of names


@dataclasses.dataclass(frozen=True)
class FlushRow:
    """Time of flushing a cache.

    Attributes:
        shape: the name of a layer's shape.
        layers: of the cache.
        gamma: drafts of a round.
        bytes: read and written when all rows are due.
        due: every row of the batch flushes.
        not_due: no row does, and only the question costs.
        attention_us: microseconds of attention in a round of gamma drafts, all layers together.
        share_of_round: the average time of flushing over attention_us if every draft is accepted, which flushes most often.
        error: why there are no figures; empty if there are.
    """

    shape: str
    layers: int
    gamma: int
    bytes: int
    due: Timing | None = None
    not_due: Timing | None = None
    attention_us: float | None = None
    share_of_round: float | None = None
    error: str = ""


@dataclasses.dataclass(frozen=True)
class FlushReport(Run):
    """What flushing costs: a row for each shape."""

    rows: list[FlushRow]

    def table(self) -> RenderableType:
        """A line for each shape."""
        labels = ("layers", "due us", "a layer", "MB", "not due us", "gamma", "attention us", "of a round")
        found = grid("shape", *labels, "", left=("shape", ""), wraps=("shape", ""))
        for row in self.rows:
            figures = ["-"] * 7
            if row.due:
                due, not_due = row.due.median_us, row.not_due.median_us
                figures = [f"{due:,.1f}", f"{due / row.layers:,.1f}", f"{row.bytes / 1e6:,.1f}", f"{not_due:,.1f}", f"{row.gamma}"]
                figures += [f"{row.attention_us:,.0f}", f"{row.share_of_round:.2%}"]
            found.add_row(row.shape, str(row.layers), *figures, row.error)
        note = "due: every row flushes. not due: no row does, and only the question costs. of a round: of its attention alone, on average, "
        return page(f"Flush on {self.device}", f", {self.date}", found, notes=[note + "with every draft accepted."])


def select_shapes(names: Sequence[str]) -> list[AttentionShape]:
    """The shapes of `attention.select_shapes` that have a hierarchical cache; raises InputError where none is left."""
    shapes = [shape for shape in attention.select_shapes(names or DEFAULT_SHAPES) if shape.planes]
    if not shapes:
        raise InputError(f"{', '.join(names)}: nothing is flushed in a bf16 cache; there are int4, int8 and tiny-int shapes")
    return shapes


def run(
    shapes: Sequence[AttentionShape],
    *,
    gamma: int,
    layers: int,
    repeats: int = 20,
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
) -> FlushReport:
    """Measures caches of these shapes, and the attention over them.

    Args:
        shapes: the shape of a layer of each cache.
        gamma: drafts of a round.
        layers: the number of layers of each cache.
        repeats: the number of timed batches.
        kept: the rows of an earlier run.
        progress: see `progress_bar`.
    """

    def row(shape: AttentionShape) -> FlushRow:
        begun = FlushRow(shape.name, layers, gamma, layers * bytes_moved(shape))
        try:
            return _measured(begun, shape, repeats)
        except Exception as error:  # one row of many
            return dataclasses.replace(begun, error=named(error))

    rows = []
    for shape in progress_bar(shapes, progress=progress):
        rows.append(
            kept.measured(f"{shape.name}, {layers} layers", FlushRow, functools.partial(row, shape), _described, lambda row: not row.error)
        )
    return FlushReport(**this_run(), rows=rows)


def _described(row: FlushRow) -> str:
    return f"{row.due.median_us:,.1f} us when due, {row.share_of_round:.2%} of a round" if row.due else row.error


def bytes_moved(shape: AttentionShape) -> int:
    """Bytes moved in a layer whose rows are all due: the buffer is read, all but G of its rows are written, and a group of codes."""
    buffer = jax.eval_shape(lambda: random_problem(shape, 0))[1].buffer
    rows, G, H = buffer.keys.shape[2], shape.group_size, shape.head_dim
    codes, parameters = 2 * G * H, 2 * ITEM_BYTES * (G + H)
    return shape.batch * shape.kv_heads * (2 * (2 * rows - G) * H * ITEM_BYTES + codes + parameters)


def _measured(row: FlushRow, shape: AttentionShape, repeats: int) -> FlushRow:
    G, B = shape.group_size, shape.batch

    def flushed(buffered: int, seconds: float) -> Timing:
        layers = tuple(random_problem(shape, seed)[1] for seed in range(row.layers))
        lengths = Lengths(jnp.zeros(B, jnp.int32), jnp.full(B, buffered, jnp.int32))

        # The lengths stay, so that every trip does the same.
        def trip(cache, lengths):
            return (dataclasses.replace(cache.flush()[0], lengths=lengths),)

        carry, trips = (HierarchicalCache(layers, jax.tree.map(jnp.copy, lengths), CacheConfig.scheme),), loop_trips(row.layers * seconds)
        program, _ = loop(trip, trips).compile(carry, (lengths,))
        return time_loop(program, trips, carry, (lengths,), repeats=repeats)[0]

    def attention_us(planes: int, tokens: int) -> float:
        step = dataclasses.replace(shape, planes=planes, tokens=tokens)
        # The first that can run, as the dispatch chooses.
        names = [*attention.select_implementations([]), "reference"]
        name = next(name for name in names if not attention.unsupported(step, name))
        with working("attention"):
            measured = attention.measure(step, name, repeats=repeats)
        if not measured.timing:
            raise ValueError(measured.note)
        return measured.timing.median_us

    due, not_due = flushed(2 * G, 2e-5), flushed(G, 3e-6)
    attended = row.layers * (row.gamma * attention_us(1, 1) + attention_us(2, row.gamma + 1))
    often = (row.gamma + 1) / G
    share = (often * due.median_us + (1 - often) * not_due.median_us) / attended
    return dataclasses.replace(row, due=due, not_due=not_due, attention_us=attended, share_of_round=share)
