"""`qspec bench matmul`: our matmuls of INT4 and nested weights against other libraries' of the same weights in bfloat16, on named shapes
in one run.

Rows are independent: what cannot run, or fails, gets a row that says why.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import dispatch, matmul
from pallas_kernels.formats.weights import Int4Weight, NestedWeight, dequantize_weight
from pallas_kernels.matmul import coded_matmul
from qspec_jax import plots
from qspec_jax.bench import kernels
from qspec_jax.bench.kernels import Figures, KernelReport, KernelRow
from qspec_jax.bench.peers import Peer, Unavailable, to_jax, to_torch, torch_with_cuda
from qspec_jax.bench.timing import input_count, time_calls, time_torch
from qspec_jax.kept_rows import NOT_KEPT, KeptRows

WIDTH = 0.4  # of a bar, as the distance between two numbers of rows
GAP = 0.6  # between two layers, in the same unit


GROUP_SIZE = 128
ITEM_BYTES = 2  # bfloat16: activations, scales, zeros, full weights


@dataclasses.dataclass(frozen=True)
class MatmulShape:
    """One layer of a model: M rows of activations times weights that share their input.

    Attributes:
        model, layer: their names.
        rows: M.
        inputs: the input size.
        outputs: the output size of each weight.
        planes: of the weights' codes: 1 is INT4, 2 nested.
    """

    model: str
    layer: str
    rows: int
    inputs: int
    outputs: tuple[int, ...]
    planes: int = 1

    @property
    def name(self) -> str:
        return f"{self.model}-{self.layer}-M{self.rows}" + ("-nested" if self.planes == 2 else "")

    @property
    def description(self) -> str:
        return f"M={self.rows}, {' + '.join(f'{out:,}' for out in self.outputs)} outputs of {self.inputs:,} inputs"

    @property
    def coded_bytes(self) -> int:
        """Bytes of the weights: codes, a nibble each in every plane, and the scale and zero of every group."""
        return sum(self.outputs) * (self.planes * self.inputs // 2 + 2 * ITEM_BYTES * self.inputs // GROUP_SIZE)

    @property
    def bf16_bytes(self) -> int:
        """Bytes of the same weights in bfloat16."""
        return sum(self.outputs) * self.inputs * ITEM_BYTES


ROWS = (1, 4, 7, 16, 32, 64)
LAYERS = (
    ("llama-3.1-8b", "qkv", 4096, (4096, 1024, 1024)),
    ("llama-3.1-8b", "o", 4096, (4096,)),
    ("llama-3.1-8b", "gate_up", 4096, (14336, 14336)),
    ("llama-3.1-8b", "down", 14336, (4096,)),
    # Its o has the shape of the one above.
    ("llama-2-7b", "qkv", 4096, (4096, 4096, 4096)),
    ("llama-2-7b", "gate_up", 4096, (11008, 11008)),
    ("llama-2-7b", "down", 11008, (4096,)),
)
LARGE = tuple(MatmulShape(model, layer, rows, inputs, outputs) for model, layer, inputs, outputs in LAYERS for rows in ROWS)
NESTED_ROWS = (1, 8, 16, 64)
NESTED = tuple(
    MatmulShape(model, layer, rows, inputs, outputs, planes=2) for model, layer, inputs, outputs in LAYERS for rows in NESTED_ROWS
)
# Small enough for a CPU to take a second.
TINY = (
    MatmulShape("tiny", "qkv", 1, 256, (64, 32, 32)),
    MatmulShape("tiny", "down", 7, 512, (48,)),
    MatmulShape("tiny", "down", 7, 512, (48,), 2),
)
SHAPES = {shape.name: shape for shape in (*LARGE, *NESTED, *TINY)}


def random_problem(shape: MatmulShape, seed: int) -> tuple[Float[Array, "M in"], tuple[Int4Weight | NestedWeight, ...]]:
    """Activations of variance 1 and the weights, in bfloat16, made on the device."""
    return activations(shape), _weights(shape.inputs, shape.outputs, shape.planes, seed)


def bf16_problem(shape: MatmulShape, seed: int) -> tuple[Float[Array, "M in"], Float[Array, "out in"]]:
    """The activations of `random_problem`, and its weights one after the other in bfloat16."""
    return activations(shape), _bf16_weight(shape.inputs, shape.outputs, shape.planes, seed)


def activations(shape: MatmulShape) -> Float[Array, "M in"]:
    """The activations that all problems of a shape share: normal, in bfloat16."""
    return jax.random.normal(jax.random.key(0), (shape.rows, shape.inputs), jnp.bfloat16)


# These take only what every M shares, so that they compile once for all.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _weights(inputs: int, outputs: tuple[int, ...], planes: int, seed: int | Array) -> tuple[Int4Weight | NestedWeight, ...]:
    keys = iter(jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), 3 * len(outputs)))

    def weight(out: int) -> Int4Weight | NestedWeight:
        groups = inputs // GROUP_SIZE
        codes = jax.random.bits(next(keys), (out, groups, GROUP_SIZE // 2), jnp.uint8)
        scale = jax.random.uniform(next(keys), (out, groups), minval=0.005, maxval=0.015)
        upper = Int4Weight(codes, scale.astype(jnp.bfloat16), (-7.4 * scale).astype(jnp.bfloat16))
        return upper if planes == 1 else NestedWeight(upper, jax.random.bits(next(keys), codes.shape, jnp.uint8))

    return tuple(weight(out) for out in outputs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _bf16_weight(inputs: int, outputs: tuple[int, ...], planes: int, seed: int | Array) -> Float[Array, "out in"]:
    weights = _weights(inputs, outputs, planes, seed)
    return jnp.concatenate([dequantize_weight(weight, jnp.float32).astype(jnp.bfloat16) for weight in weights])


class MatmulReport(KernelReport):
    """Matmuls of layers of models."""

    TITLE = "Matmul of weights in 4 and 8 bits"
    NOTES = (
        "Peers multiply by the same weights in bfloat16, in one matrix. MB: what must be read of the weights, with scales and zeros.",
        "xla and torch call cuBLAS, xla unless it finds a kernel of its own faster.",
        "error: norm, against the product in float32 with the weights that were read.",
    )

    def figure(self):
        """Times as bars, a panel for each model: for each layer and M our fastest beside the fastest peer."""
        models = defaultdict(lambda: defaultdict(list))
        for shape in self.shapes.values():
            models[shape.model][shape.layer].append(shape)
        figure, of_models = plots.panels((7 * len(models), 4.5), len(models))
        for axes, (model, layers) in zip(of_models, models.items()):
            at, places, middles = 0.0, {}, {}
            for layer, shapes in layers.items():
                places |= {shape.name: at + i for i, shape in enumerate(shapes)}
                middles[layer] = at + (len(shapes) - 1) / 2
                at += len(shapes) + GAP
            for peer, label, colour in ((False, "qspec-jax", "tab:green"), (True, "fastest bf16 peer", "tab:gray")):
                times = defaultdict(list)
                for row in self.rows:
                    if row.peer == peer and row.timing and row.shape in places:
                        times[row.shape].append(row.timing.median_us)
                if times:
                    left = [places[name] + (WIDTH if peer else -WIDTH) / 2 for name in times]
                    axes.bar(left, [min(each) for each in times.values()], WIDTH, label=label, color=colour)
            # A layer's name is below its middle M.
            axes.xaxis.remove_overlapping_locs = False
            axes.set_xticks(list(places.values()), [f"{self.shapes[name].rows}" for name in places], minor=True)
            axes.set_xticks(list(middles.values()), [f"\n{layer}" for layer in middles])
            axes.tick_params(axis="x", which="both", length=0)
            axes.set(ylabel="time (us)", xlabel="rows M, layer", title=model)
            axes.margins(y=0.2)
            axes.grid(axis="y", alpha=0.3)
            axes.set_axisbelow(True)
            if axes.get_legend_handles_labels()[0]:
                axes.legend()
        figure.suptitle(f"Matmuls on {self.device}, {self.date}", fontsize=11)
        return figure


def select_shapes(names: Sequence[str]) -> list[MatmulShape]:
    """The shapes of these names; see `kernels.select_shapes`."""
    layers = ", ".join(f"{model}-{layer}" for model, layer, *_ in LAYERS)
    several = ", ".join(f"-M{m}" for m in ROWS)
    nested = ", ".join(f"-M{m}-nested" for m in NESTED_ROWS)
    listing = f"{layers} (each with {several}, {nested}), {', '.join(shape.name for shape in TINY)}"
    return kernels.select_shapes(names, LARGE, TINY, more=NESTED, listing=listing)


def select_implementations(names: Sequence[str]) -> list[str]:
    """The implementations of these names; see `kernels.select_implementations`."""
    return kernels.select_implementations(names, dispatch.implementations("matmul", "int4"))


def run(
    shapes: Sequence[MatmulShape],
    implementations: Sequence[str],
    *,
    peers: bool = True,
    repeats: int = 20,
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
) -> MatmulReport:
    """Measures every implementation and peer on every shape; see `kernels.run`."""
    row = functools.partial(measure, repeats=repeats)
    settings = dict(repeats=repeats, kept=kept, progress=progress)
    return kernels.run(MatmulReport, shapes, [*(PEERS if peers else ()), *implementations], row, **settings)


def measure(shape: MatmulShape, name: str, *, repeats: int = 20) -> KernelRow:
    """Measures one of our implementations or one peer on one shape.

    Its error is against the product in float32 with the weights that it reads.
    """
    peer = name in PEERS
    size = shape.bf16_bytes if peer else shape.coded_bytes
    return kernels.measured(shape.name, name, size, lambda: (_peer if peer else _ours)(shape, name, repeats), peer=peer)


def unsupported(shape: MatmulShape, implementation: str) -> str | None:
    """Why that implementation cannot run on a shape here, or None."""
    return matmul.unsupported(*jax.eval_shape(lambda: random_problem(shape, 0)), implementation)


def _ours(shape: MatmulShape, implementation: str, repeats: int) -> Figures:
    if reason := unsupported(shape, implementation):
        raise Unavailable(reason)
    multiply = functools.partial(coded_matmul, implementation=implementation)
    x, weights = random_problem(shape, 0)
    reference = jax.jit(functools.partial(coded_matmul, implementation="reference"))
    error = kernels.relative_error(jax.jit(multiply)(x, weights), reference(x.astype(jnp.float32), weights))
    inputs = [random_problem(shape, seed)[1:] for seed in range(input_count(shape.coded_bytes))]
    return Figures(time_calls(multiply, x, inputs, repeats=repeats), error)


def _peer(shape: MatmulShape, name: str, repeats: int) -> Figures:
    peer = PEERS[name]()
    x, weight = bf16_problem(shape, 0)
    error = kernels.relative_error(peer(x, weight), _wide_product(x, weight))
    inputs = []
    for seed in range(input_count(shape.bf16_bytes)):
        activations, *values = peer.convert(*bf16_problem(shape, seed))
        inputs.append(tuple(values))
    return Figures(peer.time(activations, inputs, repeats=repeats), error)


_wide_product = jax.jit(lambda x, w: jnp.matmul(x.astype(jnp.float32), w.astype(jnp.float32).T, precision=lax.Precision.HIGHEST))


def xla() -> Peer:
    """XLA, which calls cuBLAS where it has no kernel of its own that is faster."""

    def multiply(x, weight):
        return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)

    return Peer(jax.jit(multiply), lambda x, weight: (x, weight), lambda out: out, time_calls)


def torch_matmul() -> Peer:
    """torch, which calls cuBLAS."""
    torch = torch_with_cuda()

    def convert(x, weight):
        x, weight = to_torch(x, weight)
        return x, weight.T

    return Peer(torch.matmul, convert, to_jax, functools.partial(time_torch, chained=False))


PEERS: dict[str, Callable[[], Peer]] = {"xla": xla, "torch": torch_matmul}
