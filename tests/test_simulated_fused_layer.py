"""The fused layer on a CPU, instruction by instruction (simulated_ptx.py): what it computes on one device and on several.

Also what it leaves for the next launch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems.fused_layer import EPS, arguments, exact, random_layer
from simulated_gpu import Lanes, constant, launch
from simulated_ptx import at_once, simulate
from simulated_races import here

import pallas_kernels.fused_layer.mosaic_gpu as fused_layer
from pallas_kernels.formats.weights import Int4Weight
from pallas_kernels.gpu import ptx
from pallas_kernels.matmul import mosaic_block
from pallas_kernels.matmul.mosaic_plan import BUFFERS, COUNTER_WORDS, Plan, Stage

pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    simulate(monkeypatch)
    monkeypatch.setattr(fused_layer, "launch", launch)


@pytest.mark.parametrize(
    ("shape", "rows", "blocks", "resident", "parameters"),
    [
        ((256, 256, 256, ()), 3, 2, 2, {}),
        ((256, 512, 256, (32, 16, 16)), 1, 3, 1, {}),
        ((256, 256, 256, (32,)), 2, 2, 2, dict(scale_dtype=jnp.float16)),
        ((256, 256, 256, (32,)), 2, 2, 2, dict(scale_dtype=jnp.float16, group_size=32)),
        ((256, 384, 256, (32, 16)), 3, 2, 2, dict(lower_steps=16)),
        ((256, 256, 256, ()), 1, 2, 2, dict(lower_steps=8, group_size=64)),
        ((256, 256, 256, (32,)), 2, 2, 2, dict(lower_steps=16, group_size=32)),
    ],
    ids=[
        "three stages",
        "four stages, fewer blocks fit than there are",
        "zero points",
        "zero points, small groups",
        "nested",
        "nested and calibrated, small groups",
        "nested, smaller groups",
    ],
)
def test_between_attentions(monkeypatch, shape, rows, blocks, resident, parameters):
    monkeypatch.setattr(fused_layer, "launch", functools.partial(launch, resident=resident))
    x, attended, o, weight, gate, up, down, following_weight, following = problem = random_layer(*shape, rows, **parameters)
    plan = dataclasses.replace(fused_layer.plan_for(rows, o, gate, down, following, EPS), blocks=blocks)
    norms, weights = [weight, following_weight], [[o], [gate, up], [down], following]
    count = len(plan.stages)
    handoff = fused_layer.empty_handoff(plan)
    *found, another = at_once(fused_layer.run)(plan, x, attended, norms[: count // 2], weights[:count], handoff)
    assert_empty(another)
    bound = 1.5e-2 if parameters else 1e-2  # with zero points as in test_fused_layer_gpu.py
    for ours, expected in zip(found, exact(*problem)):
        assert ours.dtype == jnp.bfloat16
        assert np.linalg.norm(np.asarray(ours, np.float32) - expected) <= bound * np.linalg.norm(expected)


@pytest.mark.parametrize("nested", [{}, dict(lower_steps=16)], ids=["INT4", "nested"])
def test_a_row_has_the_same_bits_whatever_rows_there_are(nested):
    """The activations of the first stage have three passes: of one row all fit in a block at once, of five rows two."""
    x, attended, o, weight, gate, up, down, following_weight, following = random_layer(128, 4352, 128, (16,), 5, **nested)

    def bits(rows: slice, room: int) -> list[np.ndarray]:
        plan = fused_layer.plan_for(len(x[rows]), o, gate, down, following, EPS)
        plan = dataclasses.replace(plan, blocks=2, room=room)
        assert plan.resident(plan.stages[0]) == (room == 3)
        layer = [weight, following_weight], [[o], [gate, up], [down], following]
        found = at_once(fused_layer.run)(plan, x[rows], attended[rows], *layer, fused_layer.empty_handoff(plan))
        return [np.asarray(array) for array in found[:2]]

    for alone, together in zip(bits(slice(4, 5), 3), bits(slice(0, 5), 2)):
        np.testing.assert_array_equal(alone[0], together[4])


def part_of(weight: Int4Weight, device: int, devices: int, *, inputs: bool) -> Int4Weight:
    """A device's part of a weight, some of its groups of inputs or some of its outputs."""
    return jax.tree.map(lambda a: jnp.array_split(a, devices, axis=1 if inputs else 0)[device], weight)


@pytest.mark.parametrize(
    ("devices", "shape", "rows", "blocks", "resident", "launches"),
    [
        (2, (256, 256, 768, (32, 32, 32)), 2, 2, 2, 1),
        pytest.param(4, (256, 512, 512, (64,)), 1, 1, 4, 1, marks=pytest.mark.system),
        (2, (256, 256, 256, ()), 1, 2, 3, 4),
    ],
    ids=["an odd number of groups on each, one block at a time", "four devices", "three stages, all places and the first again"],
)
def test_between_attentions_on_several_devices(monkeypatch, devices, shape, rows, blocks, resident, launches):
    """One simulated launch runs the blocks of all devices."""
    x, attended, o, weight, gate, up, down, following_weight, following = problem = random_layer(*shape, rows)
    expected = exact(*problem)
    weights = []
    for d in range(devices):
        by_inputs, by_outputs = (functools.partial(part_of, device=d, devices=devices, inputs=inputs) for inputs in (True, False))
        weights.append([[by_inputs(o)], [by_outputs(gate), by_outputs(up)], [by_inputs(down)], [by_outputs(w) for w in following]])
    (first_o,), (first_gate, _), (first_down,), last = weights[0]
    plan = fused_layer.plan_for(rows, first_o, first_gate, first_down, last, EPS, devices)
    plan = dataclasses.replace(plan, blocks=blocks)
    norms = [weight, following_weight] if following else [weight]
    memories = [np.where(np.arange(plan.exchange_words) < COUNTER_WORDS, 0, ptx.ABSENT).astype(np.uint32)] * devices
    launched, monitored = [], functools.partial(launch, resident=resident)

    def together(name, emit, inputs, outputs, blocks, warpgroups, shared_bytes, updated):
        launched.append((emit, inputs, outputs, updated))
        return outputs | updated

    monkeypatch.setattr(fused_layer, "launch", together)
    monkeypatch.setattr(ptx, "block_index", lambda: Lanes(constant(here.block.index // devices, np.int32)))
    for turn in range(launches):
        launched.clear()
        for d in range(devices):
            heads = jnp.array_split(attended, devices, axis=1)[d]
            table = np.zeros((1 + devices, 2), np.uint32)
            at_once(fused_layer.run)(plan, x, heads, norms, weights[d][: len(plan.stages)], fused_layer.empty_handoff(plan), table)
        of_device = lambda arrays, d: {f"{name}/{d}": array for name, array in arrays.items()}
        several = [{}, {}, {}]
        for d, (_, *arrays) in enumerate(launched):
            several = [all | of_device(some, d) for all, some in zip(several, arrays)]
        inputs, outputs, updated = several

        def emit(refs):
            device = here.block.index % devices
            memory = here.block.device.memory
            entry = refs[f"exchange_table/{device}"] - memory.start
            addresses = [device, *(refs[f"memory/{d}"] for d in range(devices))]
            memory.bytes[entry : entry + 8 * len(addresses)].view(np.int64)[:] = addresses
            mine = {name.partition("/")[0]: ref for name, ref in refs.items() if name.endswith(f"/{device}")}
            launched[device][0](mine | {"shared": refs["shared"]})

        updated |= {f"memory/{d}": memory for d, memory in enumerate(memories)}
        found = monitored("all devices", emit, inputs, outputs, devices * blocks, fused_layer.WARPGROUPS, plan.layout.total, updated)
        memories = [np.asarray(found[f"memory/{d}"]) for d in range(devices)]
        for memory in memories:
            assert memory[0] == (turn + 1) % BUFFERS and memory[1] == 0
            buffers = memory[COUNTER_WORDS:].reshape(BUFFERS, -1)
            assert (buffers[(turn + 2) % BUFFERS] == ptx.ABSENT).all() and (buffers[turn % BUFFERS] != ptx.ABSENT).all()
        residuals, outputs = ([np.asarray(found[f"{name}/{d}"], np.float32) for d in range(devices)] for name in ("residual_out", "y"))
        assert all(np.array_equal(residual, residuals[0]) for residual in residuals)
        if following:
            of_weight = zip(*(split(out, last) for out in outputs))
            y = np.concatenate([part for parts in of_weight for part in parts], axis=-1)
        else:
            y = sum(outputs)
        for ours, wanted in zip((residuals[0], y), expected):
            # Parts are rounded to bfloat16 one by one.
            assert np.linalg.norm(ours - wanted) <= 2e-2 * np.linalg.norm(wanted)


def split(y: np.ndarray, weights: list[Int4Weight]) -> list[np.ndarray]:
    """The outputs of each weight."""
    return np.split(y, np.cumsum([weight.shape[0] for weight in weights])[:-1], axis=-1)


def assert_empty(handoff: jax.Array) -> None:
    assert handoff[0] == 0
    np.testing.assert_array_equal(np.asarray(handoff[COUNTER_WORDS:]), ptx.ABSENT)


def test_a_launch_leaves_an_empty_handoff_buffer():
    # More than the threads of a block fill in a turn, and not the same share for each block.
    plan = Plan(8, (Stage(16, (2048,)), Stage(16, (2048,))), blocks=3, room=1)

    def emit(refs: dict) -> None:
        start = ptx.address(refs["next"])
        mosaic_block.fill_absent(plan, start, plan.handoff_words, ptx.block_index(), ptx.thread_index(), with_counter=True)

    shape = jax.ShapeDtypeStruct((plan.handoff_words,), jnp.uint32)
    found = launch("fill_absent", emit, {}, {"next": shape}, 3, fused_layer.WARPGROUPS, 128)
    assert found["next"].size == fused_layer.empty_handoff(plan).size
    assert_empty(found["next"])


def test_a_handoff_buffer_that_is_too_small_is_not_used(monkeypatch):
    problem = random_layer(256, 256, 256, (), 1)
    plans = []
    monkeypatch.setattr(fused_layer, "multiprocessors", lambda: 2)
    monkeypatch.setattr(
        fused_layer, "run", lambda plan, x, attended, norms, weights, handoff, _: plans.append((plan, handoff)) or (x, x, handoff)
    )
    for size in (None, 8, 288, 1024):
        handoff = None if size is None else jnp.zeros(size, jnp.uint32)
        fused_layer.between_attentions(arguments(*problem, handoff=handoff))
        plan, used = plans.pop()
        assert plan.handoff_words == 288
        if size is not None and size >= 288:
            assert used is handoff
        else:
            assert used.size == 288
            assert_empty(used)
