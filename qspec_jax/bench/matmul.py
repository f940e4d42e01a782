"""`qspec bench matmul`: our INT4 matmuls against other libraries' of the same weights in bfloat16, on named shapes in one run.

Rows are independent: what cannot run, or fails, gets a row that says why.
"""

import functools
import importlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Group

from pallas_kernels.matmul import GPU_IMPLEMENTATIONS, int4_matmul
from qspec_jax import plots
from qspec_jax.bench import kernels
from qspec_jax.bench.kernels import KernelReport, KernelRow
from qspec_jax.bench.matmul_shapes import LARGE, LAYERS, ROWS, TINY, Shape, bf16_problem, random_problem
from qspec_jax.bench.peers import Peer, Unavailable, to_jax, to_torch, torch_with_cuda
from qspec_jax.bench.timing import Timing, input_count, time_calls, time_torch
from qspec_jax.errors import named

WIDTH = 0.4  # of a bar, as the distance between two numbers of rows
GAP = 0.6  # between two layers, in the same unit


def select_shapes(names: Sequence[str]) -> list[Shape]:
    """The shapes of these names; see `kernels.select_shapes`."""
    layers = ", ".join(f"{model}-{layer}" for model, layer, *_ in LAYERS)
    several = ", ".join(f"-M{m}" for m in ROWS)
    listing = f"{layers} (each with {several}), {', '.join(shape.name for shape in TINY)}"
    return kernels.select_shapes(names, LARGE, TINY, listing=listing)


def select_implementations(names: Sequence[str]) -> list[str]:
    """The implementations of these names; see `kernels.select_implementations`."""
    return kernels.select_implementations(names, GPU_IMPLEMENTATIONS)


def run(
    shapes: Sequence[Shape], implementations: Sequence[str], *, peers: bool = True, repeats: int = 20, progress: bool | None = None
) -> KernelReport:
    """Measures every implementation and peer on every shape. progress: see `kernels.run`."""
    row = functools.partial(measure, repeats=repeats)
    return kernels.run(shapes, [*(PEERS if peers else ()), *implementations], row, repeats=repeats, progress=progress)


def measure(shape: Shape, name: str, *, repeats: int = 20) -> KernelRow:
    """Measures one of our implementations or one peer on one shape.

    Its error is against the product in float32 with the weights that it reads.
    """
    peer = name in PEERS
    row = functools.partial(KernelRow, shape.name, name, peer, bytes=shape.bf16_bytes if peer else shape.int4_bytes)
    try:
        timing, error = (_peer if peer else _ours)(shape, name, repeats)
    except Unavailable as reason:
        return row("unavailable", str(reason))
    except Exception as error:  # one row of many
        return row("failed", named(error))
    return row("measured", "", timing=timing, relative_error=error)


def unsupported(shape: Shape, implementation: str) -> str | None:
    """Why that implementation cannot run on a shape here, or None."""
    if implementation == "reference":
        return None
    module = importlib.import_module(f"pallas_kernels.matmul.{implementation}")
    return module.unsupported(*jax.eval_shape(lambda: random_problem(shape, 0)))


def _ours(shape: Shape, implementation: str, repeats: int) -> tuple[Timing, float]:
    if reason := unsupported(shape, implementation):
        raise Unavailable(reason)
    multiply = functools.partial(int4_matmul, implementation=implementation)
    x, weights = random_problem(shape, 0)
    error = kernels.relative_error(jax.jit(multiply)(x, weights), _reference(x.astype(jnp.float32), weights))
    inputs = [random_problem(shape, seed)[1:] for seed in range(input_count(shape.int4_bytes))]
    return time_calls(multiply, x, inputs, repeats=repeats), error


def _peer(shape: Shape, name: str, repeats: int) -> tuple[Timing, float]:
    peer = PEERS[name]()
    x, weight = bf16_problem(shape, 0)
    error = kernels.relative_error(peer(x, weight), _wide_product(x, weight))
    inputs = []
    for seed in range(input_count(shape.bf16_bytes)):
        activations, *values = peer.convert(*bf16_problem(shape, seed))
        inputs.append(tuple(values))
    return peer.time(activations, inputs, repeats=repeats), error


_reference = jax.jit(functools.partial(int4_matmul, implementation="reference"))
_wide_product = jax.jit(lambda x, w: jnp.matmul(x.astype(jnp.float32), w.astype(jnp.float32).T, precision=lax.Precision.HIGHEST))


def xla() -> Peer:
    """XLA, which calls cuBLAS where it has no kernel of its own that is faster."""
    multiply = lambda x, weight: lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)
    return Peer(jax.jit(multiply), lambda x, weight: (x, weight), lambda out: out, time_calls)


def torch_matmul() -> Peer:
    """torch, which calls cuBLAS."""
    torch = torch_with_cuda()

    def convert(x, weight):
        x, weight = to_torch(x, weight)
        return x, weight.T

    return Peer(torch.matmul, convert, to_jax, functools.partial(time_torch, chained=False))


PEERS: dict[str, Callable[[], Peer]] = {"xla": xla, "torch": torch_matmul}


def table(found: KernelReport) -> Group:
    """The rows of every shape; see `kernels.table`."""
    return kernels.table(
        found,
        "INT4 matmul",
        _describe,
        [
            "Peers multiply by the same weights in bfloat16, in one matrix. MB: what must be read of the weights, with scales and zeros.",
            "xla and torch call cuBLAS, xla unless it finds a kernel of its own faster.",
            "error: norm, against the product in float32 with the weights that were read.",
        ],
    )


def _describe(shape: Shape) -> str:
    return f"M={shape.rows}, {' + '.join(f'{out:,}' for out in shape.outputs)} outputs of {shape.inputs:,} inputs"


def plot(found: KernelReport, path: Path) -> None:
    """Times as bars, a panel for each model: for each layer and M our fastest beside the fastest peer.

    Raises InputError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    models = defaultdict(lambda: defaultdict(list))
    for shape in found.shapes.values():
        models[shape.model][shape.layer].append(shape)
    figure = Figure(figsize=(7 * len(models), 4.5), layout="constrained")
    for axes, (model, layers) in zip(figure.subplots(1, len(models), squeeze=False)[0], models.items()):
        at, places, middles = 0.0, {}, {}
        for layer, shapes in layers.items():
            places |= {shape.name: at + i for i, shape in enumerate(shapes)}
            middles[layer] = at + (len(shapes) - 1) / 2
            at += len(shapes) + GAP
        for peer, label, colour in ((False, "qspec-jax, INT4", "tab:green"), (True, "fastest bf16 peer", "tab:gray")):
            times = defaultdict(list)
            for row in found.rows:
                if row.peer == peer and row.timing and row.shape in places:
                    times[row.shape].append(row.timing.median_us)
            if times:
                left = [places[name] + (WIDTH if peer else -WIDTH) / 2 for name in times]
                axes.bar(left, [min(each) for each in times.values()], WIDTH, label=label, color=colour)
        # A layer's name is below its middle M.
        axes.xaxis.remove_overlapping_locs = False
        axes.set_xticks(list(places.values()), [f"{found.shapes[name].rows}" for name in places], minor=True)
        axes.set_xticks(list(middles.values()), [f"\n{layer}" for layer in middles])
        axes.tick_params(axis="x", which="both", length=0)
        axes.set(ylabel="time (us)", xlabel="rows M, layer", title=model)
        axes.margins(y=0.2)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.suptitle(f"Matmuls on {found.device}, {found.date}", fontsize=11)
    plots.save(figure, path)
