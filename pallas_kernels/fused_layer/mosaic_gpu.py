"""All that lies between two attentions in one launch, on NVIDIA Hopper in Pallas Mosaic GPU, for few rows.

Each multiprocessor runs one block through the matmuls of a layer, all with INT4 or all with nested weights: output projection, gate and up,
down, the next projections.
Separate kernels would leave the memory idle whenever one ends and the next begins.

Blocks wait for what others hand over (docs/kernels/fused-layer.md). They draw their work in the order in which
it can be done (matmul/mosaic_block.py). So however few blocks run at once, all come to an end, and launches that do not depend on each
other may run at the same time on one device. Where a model is divided over devices, these add their partial sums within the launch
(matmul/mosaic_exchange.py).
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt32

from pallas_kernels.dispatch import devices, multiprocessors, no_mosaic_gpu
from pallas_kernels.formats.weights import CodedWeight, Int4Weight, NestedWeight
from pallas_kernels.fused_layer.arguments import LayerArguments
from pallas_kernels.gpu import exchange
from pallas_kernels.gpu.launch import launch, lowered_once
from pallas_kernels.matmul import support
from pallas_kernels.matmul.mosaic_gpu import WARPGROUPS
from pallas_kernels.matmul.mosaic_plan import COUNTER_WORDS, MATH_WARPS, MIN_SLOTS, VALUES_PER_PIECE, Plan, Stage
from pallas_kernels.matmul.support import GROUP_SIZE

MAX_ROWS = 8
MAX_DEVICES = 8  # GPUs of a usual Hopper server
MAX_PIECES = 8  # of VALUES_PER_PIECE values of x, all rows, that a thread holds in registers; a row of the norm's weight comes on top


def unsupported(args: LayerArguments) -> str | None:
    x, attended, o, norm, gate, up, down, following_norm, following, _, eps, biases, axis = args
    if reason := no_mosaic_gpu():
        return reason
    every = o, gate, up, down, *following
    if not any(all(isinstance(weight, kind) for weight in every) for kind in (Int4Weight, NestedWeight)):
        return "needs all weights in INT4, or all nested"
    if biases:
        return f"adds no biases, and there are some of {', '.join(biases)}"
    if (count := num_devices_of(axis)) > 1:
        if count > MAX_DEVICES:
            return f"adds up over {MAX_DEVICES} devices at most, not {count}"
        if count != len(devices()):
            return f"needs to know the {count} devices of {axis}, and is traced for {len(devices())} (`dispatch.on`)"
        if reason := exchange.unreachable(devices()):
            return reason
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    norms = [norm, following_norm] if following else [norm]
    if attended.shape[:-1] != x.shape[:-1] or gate.shape[0] != up.shape[0]:
        return "needs as many rows attended as there are in x, and gate and up of one shape"
    if others := {o.shape[0], down.shape[0], *(a.size for a in norms)} - {width}:
        return f"needs output projections and norms as wide as x, {width}, not {', '.join(map(str, sorted(others)))}"
    hidden = jax.ShapeDtypeStruct((*x.shape[:-1], gate.shape[0]), x.dtype)
    for inputs, weights in (attended, [o]), (x, [gate, up]), (hidden, [down]), *([(x, following)] if following else []):
        if reason := support.unsupported_by_mosaic(inputs, weights):
            return reason
    if not support.alike(every):
        return "needs weights whose groups have one size, whose scales and zeros have the same dtypes, and whose planes are alike"
    if others := {a.dtype.name for a in norms} - {"bfloat16"}:
        return f"needs norms in bfloat16, not {', '.join(sorted(others))}"
    pieces = rows * math.ceil(width / (VALUES_PER_PIECE * 32 * MATH_WARPS))
    if rows > MAX_ROWS:
        return f"supports up to {MAX_ROWS} rows of activations, not {rows}"
    if pieces > MAX_PIECES:
        return f"keeps up to {MAX_PIECES} pieces of x in a thread's registers, and {rows} rows of width {width} have {pieces}"
    if plan_for(rows, o, gate, down, following, eps, count).slots < MIN_SLOTS:
        return f"has no place for the activations of {rows} rows beside weights in shared memory"
    return None


def num_devices_of(axis: str | None) -> int:
    """How many devices a layer is divided over."""
    return 1 if axis is None else lax.axis_size(axis)


def plan_for(
    rows: int, o: CodedWeight, gate: CodedWeight, down: CodedWeight, following: Sequence[CodedWeight], eps: float, num_devices: int = 1
) -> Plan:
    """The four stages of a layer for this number of rows, or three for the last layer, which has none following."""
    divided = num_devices > 1
    stages = [
        Stage(o.in_features // GROUP_SIZE, o.shape[:1], partial=divided),
        Stage(gate.in_features // GROUP_SIZE, gate.shape[:1] * 2, normed=True, gated=True),
        # The last stage's outputs are added up after the launch.
        Stage(down.in_features // GROUP_SIZE, down.shape[:1], partial=divided and bool(following)),
    ]
    if following:
        stages.append(Stage(following[0].in_features // GROUP_SIZE, tuple(weight.shape[0] for weight in following), normed=True))
    return Plan.fitting(rows, tuple(stages), multiprocessors(), eps, num_devices, support.parameters_of(o))


def between_attentions(args: LayerArguments) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows out"], Array]:
    x, attended, o, norm, gate, up, down, following_norm, following, handoff, eps, _, axis = args
    rows = math.prod(x.shape[:-1])
    plan = plan_for(rows, o, gate, down, following, eps, num_devices_of(axis))
    norms = [norm, following_norm] if following else [norm]
    weights = [[o], [gate, up], [down], following][: len(plan.stages)]
    if handoff is None or handoff.size < plan.handoff_words:
        handoff = empty_handoff(plan)
    table = _table(plan, axis) if plan.num_devices > 1 else None
    residual, y, handoff = run(plan, x.reshape(rows, -1), attended.reshape(rows, -1), norms, weights, handoff, table)
    if table is not None and not following:
        y = lax.psum(y, axis)
    return *(a.reshape(*x.shape[:-1], -1) for a in (residual, y)), handoff


def _table(plan: Plan, axis: str) -> UInt32[Array, "devices_and_1 2"]:
    """What `mosaic_exchange.Exchange` has to know of the devices.

    Row 0 is (this device's index, 0); row 1 + d has the lower and the upper half of device d's address.
    """
    number = jnp.stack([lax.axis_index(axis).astype(jnp.uint32), jnp.uint32(0)])
    return jnp.concatenate([number[None], jnp.asarray(exchange.addresses(devices(), plan.exchange_words, COUNTER_WORDS))])


def empty_handoff(plan: Plan) -> Array:
    """A fresh handoff buffer: the first COUNTER_WORDS words are 0, of which word 0 counts tickets, and the others ABSENT."""
    from pallas_kernels.gpu.ptx import ABSENT

    # Not a constant, which would be as large in the program and copied each time.
    return jnp.where(jnp.arange(plan.handoff_words) < COUNTER_WORDS, jnp.uint32(0), jnp.uint32(ABSENT))


@lowered_once
def run(
    plan: Plan,
    x: Float[Array, "M D"],
    attended: Float[Array, "M channels"],
    norms: Sequence[Float[Array, "D"]],
    weights: Sequence[Sequence[CodedWeight]],
    handoff: Array,
    table: UInt32[Array, "devices_and_1 2"] | None = None,
) -> tuple[Array, Array, Array]:
    """One launch: the residual stream, the last stage's outputs, and the next launch's handoff buffer.

    Args:
        plan: of these shapes.
        x, attended: the residual stream, and the attended values.
        norms: the weight of each norm, in the order of the stages that have one.
        weights: of each stage a list of those whose outputs it has.
        handoff: consumed; use the returned one.
        table: the devices' addresses for `mosaic_exchange.Exchange`; None for one device.
    """
    from pallas_kernels.matmul import mosaic_block

    inputs = {"residual": x, "x": attended} | {f"norm{i}": norm for i, norm in enumerate(norms)}
    for number, stage_weights in enumerate(weights):
        inputs |= support.weight_inputs(stage_weights, number)
    if table is not None:
        inputs["exchange_table"] = table
    shapes = {"residual_out": x.shape, "y": (plan.rows, plan.stages[-1].width)}
    outputs = {name: jax.ShapeDtypeStruct(shape, x.dtype) for name, shape in shapes.items()}
    outputs["next_handoff"] = jax.ShapeDtypeStruct((plan.handoff_words,), handoff.dtype)
    emit = functools.partial(mosaic_block.emit_block, plan)
    found = launch("between_attentions", emit, inputs, outputs, plan.blocks, WARPGROUPS, plan.layout.total, {"handoff": handoff})
    return found["residual_out"], found["y"], found["next_handoff"]
