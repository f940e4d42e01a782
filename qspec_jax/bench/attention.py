"""`qspec bench attention`: our decode attention over the quantized cache against other libraries' over a bfloat16 one.

All are measured on named shapes in one run. Rows are independent: what cannot run, or fails, gets a row that says why.
"""

import dataclasses
import functools
import importlib
from collections import defaultdict
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import append_attend, dispatch
from pallas_kernels.attention import decode_attention
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths
from pallas_kernels.formats.views import FULL_PRECISION, View
from pallas_kernels.rope_append import rotate_and_append
from qspec_jax import plots
from qspec_jax.bench import kernels
from qspec_jax.bench.attention_shapes import LARGE, TINY, AttentionShape, bytes_read, random_problem, random_projections, random_view
from qspec_jax.bench.kernels import Figures, KernelReport, KernelRow
from qspec_jax.bench.peers import PEERS, Unavailable
from qspec_jax.bench.timing import Timing, input_count, time_in_place, time_jax
from qspec_jax.errors import InputError
from qspec_jax.kept_rows import NOT_KEPT, KeptRows

# Tokens in a row of the shortened shape that errors are measured on: the float32 reference is slow.
ERROR_TOKENS = 4096


class AttentionReport(KernelReport):
    """Decode attention on named shapes."""

    TITLE = "Decode attention"
    NOTES = (
        "Peers, where there are any, read a bfloat16 cache of the same context. MB: what must be read of the cache.",
        f"error: norm, against the reference in float32, on at most {ERROR_TOKENS:,} tokens.",
    )

    def figure(self):
        """Latency against context of single rows, one panel for each (T, heads): our fastest by format, and the fastest peer.

        Panels with a single context are left out where another has more.
        """
        from matplotlib.ticker import LogLocator

        panels = defaultdict(lambda: defaultdict(dict))
        for name, shape in self.shapes.items():
            if shape.batch > 1:
                continue
            lines = panels[shape.tokens, shape.heads, shape.kv_heads, shape.head_dim]
            for row in self.rows:
                if row.shape == name and row.timing:
                    line = lines["fastest bf16 peer" if row.peer else shape.format]
                    line[shape.context[0]] = min(row.timing.median_us, line.get(shape.context[0], float("inf")))
        several = {key: lines for key, lines in panels.items() if any(len(line) > 1 for line in lines.values())}
        panels = several or panels
        figure, of_panels = plots.panels((5.5 * len(panels), 4.5), len(panels))
        styles = {"INT4": "o-", "INT8": "s-", "bf16": "^-", "fastest bf16 peer": "x--"}
        for axes, ((tokens, heads, kv_heads, head_dim), lines) in zip(of_panels, panels.items()):
            for label, style in styles.items():
                if line := sorted(lines.get(label, {}).items()):
                    ours = label if "peer" in label else f"qspec-jax, {label}"
                    axes.plot(*zip(*line), style, label=ours)
            ticks = sorted({context for line in lines.values() for context in line})
            axes.set_yscale("log")
            plots.context_axis(axes, ticks)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_ylabel("latency (us)")
            axes.set_title(f"T={tokens}, {heads} query and {kv_heads} KV heads of {head_dim}", fontsize=10)
            if lines:
                axes.legend()
        figure.suptitle(f"Decode attention on {self.device}, {self.date}", fontsize=11)
        return figure


def select_shapes(names: Sequence[str]) -> list[AttentionShape]:
    """The shapes of these names; see `kernels.select_shapes`."""
    return kernels.select_shapes(names, LARGE, TINY)


def reading(shapes: Sequence[AttentionShape], *, listed: float | None, observe: bool, append: bool = False) -> list[AttentionShape]:
    """The shapes, read as was asked for.

    Args:
        shapes: as they are named.
        listed: the share of the groups that is read by lists; None: all groups are read.
        observe: whether the attention mass is found too.
        append: whether tokens are appended too.

    Raises:
        InputError: for a share that is not one, for lists and mass at once, and for a shape that is not read that way.
    """
    if append:
        shapes = [dataclasses.replace(shape, name=f"{shape.name}-appended", append=True) for shape in shapes]
    if listed is None and not observe:
        return list(shapes)
    if listed is not None and observe:
        raise InputError("--listed and --observe exclude each other, as mass is observed where all groups are read; give one of them")
    if listed is not None and not 0 < listed <= 1:
        raise InputError(f"--listed {listed:g} should be a share of the groups, above 0 and up to 1")
    flag, planes = ("--observe", (1, 2)) if observe else ("--listed", (1,))
    if other := next((shape for shape in shapes if shape.planes not in planes), None):
        raise InputError(f"{flag} reads {'groups' if observe else 'the upper plane'}, and {other.name} does not; choose others by --shape")
    suffix = "observed" if observe else f"listed-{listed:g}"
    return [dataclasses.replace(shape, name=f"{shape.name}-{suffix}", listed=listed, observe=observe) for shape in shapes]


def select_implementations(names: Sequence[str], *, append: bool = False) -> list[str]:
    """The implementations of these names; see `kernels.select_implementations`.

    With `append`, the reference is all kernels one after the other, and is measured by default.
    """
    if append and not names:
        names = [*(dispatch.implementations("append_attend") if jax.default_backend() == "gpu" else ()), "reference"]
    return kernels.select_implementations(names, dispatch.implementations("attention"))


def run(
    shapes: Sequence[AttentionShape],
    implementations: Sequence[str],
    *,
    peers: bool = True,
    repeats: int = 20,
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
) -> AttentionReport:
    """Measures every implementation and peer on every shape; see `kernels.run`.

    Shapes that differ in the cache's format alone share their peers' figures.
    """
    peer = functools.cache(functools.partial(measure_peer, repeats=repeats))

    def row(shape: AttentionShape, name: str) -> KernelRow:
        if name in PEERS:
            return dataclasses.replace(peer(_bf16(shape), name), shape=shape.name)
        return measure(shape, name, repeats=repeats)

    settings = dict(repeats=repeats, kept=kept, progress=progress)
    return kernels.run(AttentionReport, shapes, [*(PEERS if peers else ()), *implementations], row, **settings)


def measure(shape: AttentionShape, implementation: str, *, config=None, repeats: int = 20, error_tokens: int = ERROR_TOKENS) -> KernelRow:
    """Measures one of our implementations on one shape.

    Args:
        shape: of the problem.
        implementation: its name.
        config: of the kernel; None: what the kernel chooses.
        repeats: timed batches.
        error_tokens: the most tokens in a row of the shape that the error, against the reference, is found with.
    """

    def figures() -> Figures:
        if reason := unsupported(shape, implementation):
            raise Unavailable(reason)
        if shape.append:
            function = _by(implementation, append_attend.append_and_attend, "append_attend", config)
            error = appended_error(function, _unnamed(shape.shortened(error_tokens)))
            return Figures(time_appended(function, _unnamed(shape), repeats=repeats), error)
        attend = _attend(implementation, config)
        error = _error(implementation, _unnamed(shape.shortened(error_tokens)), config)
        problems = _problems(_unnamed(shape))
        timing = time_jax(attend, problems[0][0], [problem[1:] for problem in problems], repeats=repeats, size=bytes_read(shape))
        return Figures(timing, error)

    return kernels.measured(shape.name, implementation, bytes_read(shape), figures)


def measure_peer(shape: AttentionShape, name: str, *, repeats: int = 20) -> KernelRow:
    """Measures one peer on a shape with a bfloat16 cache. Its error is None where it is run without a mask that it would need."""

    def figures() -> Figures:
        peer = PEERS[name](shape)
        error = _peer_error(name, _unnamed(shape.shortened(ERROR_TOKENS))) if peer.exact else None
        query, inputs = None, []
        for seed in range(input_count(bytes_read(shape))):
            q, layer, _ = random_problem(shape, seed)
            query, *cache = peer.convert(q, layer.keys, layer.values)
            inputs.append(tuple(cache))
            del q, layer, cache
        return Figures(peer.time(query, inputs, repeats=repeats), error, peer.note)

    return kernels.measured(shape.name, name, bytes_read(shape), figures, peer=True)


def unsupported(shape: AttentionShape, implementation: str) -> str | None:
    """Why that implementation cannot run on a shape here, or None."""
    if implementation == "reference":
        return None
    problem = jax.eval_shape(lambda: _problem(shape, 0))
    if shape.append:
        if implementation not in dispatch.implementations("append_attend"):
            return "does not append; the reference is all kernels one after the other"
        module = importlib.import_module(f"pallas_kernels.append_attend.{implementation}")
        projections = jax.eval_shape(lambda: random_projections(shape, 0))
        return module.unsupported(*projections, *problem[1:])
    module = importlib.import_module(f"pallas_kernels.attention.{implementation}")
    return module.unsupported(*problem)


def _problem(shape: AttentionShape, seed: int) -> tuple[Array, HierarchicalLayer | FullLayer, Lengths, View]:
    return *random_problem(shape, seed), random_view(shape, seed)


def _problems(shape: AttentionShape) -> list[tuple[Array, HierarchicalLayer | FullLayer, Lengths, View]]:
    """The inputs to rotate over. Inputs with lists are counted by what the lists read; they share caches and read other groups of them."""
    caches = [random_problem(shape, seed) for seed in range(input_count(bytes_read(dataclasses.replace(shape, listed=None))))]
    return [(*caches[i % len(caches)], random_view(shape, i)) for i in range(input_count(bytes_read(shape)))]


def _attend(implementation: str, config=None):
    """A function (q, layer, lengths, view) of what is attended to, which waits for the attention mass where that is observed."""
    call = _by(implementation, decode_attention, "attention", config)
    # Without the barrier XLA would leave out what is made of the mass and not used.
    return lambda *args: jax.lax.optimization_barrier(call(*args))[0]


def _by(implementation: str, function: Callable, kernel: str, config=None) -> Callable:
    """A function of kernels by that implementation of this kernel, perhaps with a configuration of its own."""
    if config is None:
        return functools.partial(function, implementation=implementation)
    module = importlib.import_module(f"pallas_kernels.{kernel}.{implementation}")
    return functools.partial(getattr(module, function.__name__), config=config)


def time_appended(function: Callable, shape: AttentionShape, *, repeats: int) -> Timing:
    """Times a function like `append_and_attend` on a shape whose context counts the T new tokens. Every call has a buffer of its own."""

    problems = _problems(shape)
    # Constants of the program: a model adds to them once for all layers, and not before each.
    lengths = _without(problems[0][2], shape.tokens)

    def call(qkv, buffer, cos, sin, layer, view):
        attended, new, mass = function(qkv, cos, sin, buffer if layer is None else layer.with_buffer(buffer), lengths, view)
        return (attended, mass), new.buffer

    qkv, *angles = random_projections(shape, 0)
    kept, inputs = [], []
    for _, layer, _, view in problems:
        kept.append(jax.tree.map(jnp.copy, layer.buffer))
        inputs.append((*angles, layer.with_buffer(None), view))
    return time_in_place(call, qkv, kept, inputs, repeats=repeats, size=bytes_read(shape))


def appended_error(function: Callable, shape: AttentionShape) -> float:
    """The relative error of a function like `append_and_attend`, against attention in float32 to what the reference appends."""
    qkv, cos, sin = random_projections(shape, 0)
    _, layer, lengths, view = _problem(shape, 0)
    attended, *_ = jax.jit(function)(qkv, cos, sin, layer, _without(lengths, shape.tokens), view)
    q, buffer = rotate_and_append(qkv, cos, sin, layer.buffer, _without(lengths, shape.tokens).buffered, implementation="reference")
    return _relative_error(attended, q, layer.with_buffer(buffer), lengths, view)


def _without(lengths: Lengths, tokens: int) -> Lengths:
    return dataclasses.replace(lengths, buffered=lengths.buffered - tokens)


@functools.cache
def _error(implementation: str, shape: AttentionShape, config=None) -> float:
    problem = _problem(shape, 0)
    return _relative_error(jax.jit(_attend(implementation, config))(*problem), *problem)


@functools.cache
def _peer_error(name: str, shape: AttentionShape) -> float:
    q, layer, lengths = random_problem(shape, 0)
    return _relative_error(PEERS[name](shape)(q, layer.keys, layer.values), q, layer, lengths, FULL_PRECISION)


def _relative_error(out: Array, q: Array, layer: HierarchicalLayer | FullLayer, lengths: Lengths, view: View) -> float:
    def wide(x):
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    attend = jax.jit(functools.partial(decode_attention, implementation="reference"))
    expected, _ = attend(wide(q), jax.tree.map(wide, layer), lengths, view)
    return kernels.relative_error(out, expected)


def _bf16(shape: AttentionShape) -> AttentionShape:
    return dataclasses.replace(_unnamed(shape), planes=None, listed=None, observe=False)


def _unnamed(shape: AttentionShape) -> AttentionShape:
    # So that equal shapes compile once.
    return dataclasses.replace(shape, name="")
