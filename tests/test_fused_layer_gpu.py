"""The GPU kernel of a layer between two attentions against float32, what it does not take, and the reference."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import gpu, skip_or_fail
from problems.fused_layer import EPS, arguments, exact, random_layer
from problems.matmul import random_weight

from pallas_kernels import dispatch, fused_layer
from pallas_kernels.formats.weights import Int4Weight, Int8Weight, dequantize_weight
from pallas_kernels.fused_layer import between_attentions, mosaic_gpu
from pallas_kernels.gpu import exchange, ptx
from pallas_kernels.matmul import linear, mosaic_plan
from pallas_kernels.norm import add_rms_norm

fused = functools.partial(between_attentions, eps=EPS, implementation="mosaic_gpu")
run = jax.jit(lambda *args: fused(*args)[:2])

# Widths of the residual stream, of attention and of the MLP, and the outputs of the next layer's projections, if there is one.
# With each, for how many rows threads have room for the residual stream on an H100.
SHAPES = {
    (4096, 4096, 14336, (4096, 1024, 1024)): 8,
    (4096, 4096, 11008, (4096, 4096, 4096)): 8,
    (5120, 5120, 13824, (5120, 5120, 5120)): 4,
    (2048, 2048, 8192, (2048, 512, 512)): 8,
    (8192, 8192, 28672, ()): 4,
    (256, 512, 768, (512, 256, 256)): 8,
    (4096, 2048, 5504, (2048, 2048, 2048)): 8,  # an odd number of groups
    (256, 256, 256, ()): 8,
}


def relative_error(a: jax.Array, b: jax.Array) -> float:
    return float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))


def check(args: list) -> None:
    """The results of the arguments of `random_layer` are near to those in float32, and have the same bits twice."""
    found, again, expected = run(*args), run(*args), exact(*args)
    # What stages hand over is rounded to bfloat16, as the reference's is, whose error is 2e-3 to 1.1e-2 here.
    composed = between_attentions(*args, eps=EPS, implementation="reference")[:2]
    for a, b, c, d in zip(found, again, expected, composed):
        assert a.shape == c.shape and a.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert relative_error(a, c) <= min(1.25 * relative_error(d, c) + 1e-3, 1.5e-2)


@gpu
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_float32_and_the_same_bits_twice(shape, rows):
    for outliers in (False, True):
        args = random_layer(*shape, rows, outliers)
        reason = mosaic_gpu.unsupported(arguments(*args))
        if rows > SHAPES[shape]:
            assert "no place" in reason or "registers" in reason
            return
        skip_or_fail("mosaic_gpu", reason)
        check(args)


@gpu
@pytest.mark.parametrize("scale_dtype", [jnp.bfloat16, jnp.float16, None])
@pytest.mark.parametrize("group_size", [128, 64, 32])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("shape", [(4096, 4096, 14336, (4096, 1024, 1024)), (4096, 2048, 5504, (2048, 2048, 2048)), (256, 256, 256, ())])
def test_zero_points_and_small_groups(shape, rows, group_size, scale_dtype):
    args = random_layer(*shape, rows, True, group_size=group_size, scale_dtype=scale_dtype)
    skip_or_fail("mosaic_gpu", mosaic_gpu.unsupported(arguments(*args)))
    check(args)


@gpu
@pytest.mark.parametrize(("group_size", "steps"), [(128, 16), (128, 8), (64, 8), (32, 16)])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("shape", [(4096, 4096, 14336, (4096, 1024, 1024)), (4096, 2048, 5504, (2048, 2048, 2048)), (256, 256, 256, ())])
def test_nested(shape, rows, group_size, steps):
    # In the small layer outliers cancel, so that a rounding more or less changes its output by up to 3 %.
    outliers = shape[0] > 256
    args = random_layer(*shape, rows, outliers, group_size=group_size, lower_steps=steps)
    skip_or_fail("mosaic_gpu", mosaic_gpu.unsupported(arguments(*args)))
    check(args)


def problem_here(*args) -> list:
    """`random_layer`; skips the test where this machine cannot run the kernel."""
    found = random_layer(*args)
    skip_or_fail("mosaic_gpu", mosaic_gpu.unsupported(arguments(*found)))
    return found


@gpu
def test_what_is_not_finite_stays_in_its_row():
    args = problem_here(4096, 4096, 11008, (4096, 1024, 1024), 3)
    clean = run(*args)
    for which in (0, 1):
        for row, spoilt in ((1, jnp.nan), (2, jnp.inf)):
            spoiled = [a.at[row, 77].set(spoilt) if i == which else a for i, a in enumerate(args)]
            others = np.arange(3) != row
            for a, b in zip(run(*spoiled), clean):
                assert not np.isfinite(np.asarray(a[row], np.float32)).all()
                np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])


@gpu
def test_many_in_a_row_wait_for_each_number():
    # A block that went on too early would take what is not there for a number.
    x, _, *first = problem_here(2048, 2048, 5632, (2048,), 1)
    _, _, *second = random_layer(2048, 2048, 5632, (2048,), 2)

    @functools.partial(jax.jit, static_argnames=("times", "call"))
    def loop(x, layers, times=100, call=fused):
        def body(_, x):
            blank = []
            for layer in layers:
                x, y, *blank = call(x, x, *layer, *blank)
                x = x + y
                x = x / jnp.abs(x).max()  # or the layers would make it infinite
            return x

        return jax.lax.fori_loop(0, times, body, x)

    layers = first, second
    assert relative_error(loop(x, layers, 2), loop(x.astype(jnp.float32), layers, 2, exact)) <= 0.1
    found = np.asarray(loop(x, layers), np.float32)
    assert np.isfinite(found).all()
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(loop(x, layers), np.float32), found)


# How launches share the device -------------------------------------------------------------------------------------------


def launched(args: list, plan: mosaic_plan.Plan, handoff: jax.Array | None = None) -> tuple[jax.Array, ...]:
    x, attended, o, norm, gate, up, down, following_norm, following = args
    handoff = mosaic_gpu.empty_handoff(plan) if handoff is None else handoff
    return mosaic_gpu.run(plan, x, attended, [norm, following_norm], [[o], [gate, up], [down], following], handoff)


def plan_of(args: list) -> mosaic_plan.Plan:
    rows, (_, _, o, _, gate, _, down, _, following) = args[0].shape[0], args
    return mosaic_gpu.plan_for(rows, o, gate, down, following, EPS)


def meeting(wait):
    """A wait after which the lanes of the warp meet: the compiler then orders the instructions behind it otherwise. Not where a single lane
    waits, which would wait for the others forever."""

    def wait_and_meet(barrier, parity):
        wait(barrier, parity)
        if sys._getframe(1).f_code.co_name != "following":
            ptx.synchronize(None, 1)

    return wait_and_meet


@gpu
@pytest.mark.parametrize("order", [None, meeting], ids=["as it is", "lanes meet behind waits"])
def test_the_same_bits_a_thousand_times(monkeypatch, order):
    # Eight rows: the inputs of the third stage have no place all at once, and some blocks fill slots of the ring with a tile that is not
    # there, which takes no time. Without `once_loaded`, 98 of 1,000 launches were wrong as it is, and 50 with lanes that met.
    args = problem_here(4096, 4096, 11008, (4096, 4096, 4096), 8)
    plan = plan_of(args)
    if order:
        monkeypatch.setattr(ptx, "wait_for_arrivals", order(ptx.wait_for_arrivals))
    jax.clear_caches()
    assert any(plan.together(stage) > 1 for stage in plan.stages)
    launch = jax.jit(lambda args: launched(args, plan)[:2]).lower(args).compile()
    jax.clear_caches()  # what follows is not to find this kernel
    expected = launch(args)
    differ = jax.jit(lambda a, b: sum((x != y).any().astype(jnp.int32) for x, y in zip(a, b)) > 0)
    wrong = sum(differ(launch(args), expected) for _ in range(1000))
    assert int(wrong) == 0


@gpu
@pytest.mark.timeout(120)
def test_more_blocks_than_fit_on_the_device_come_to_an_end():
    args = problem_here(2048, 2048, 5632, (2048,), 2)
    plan = plan_of(args)
    expected = launched(args, plan)
    for times in (2, 5):
        for a, b in zip(launched(args, dataclasses.replace(plan, blocks=times * plan.blocks))[:2], expected):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def in_a_process(function: str, *flags: str) -> subprocess.CompletedProcess:
    """Calls a function of this module where it may hang or spoil the device for what follows."""
    root = Path(__file__).parents[1]
    settings = {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")])}
    settings |= {"XLA_FLAGS": " ".join(flags), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    code = f"import test_fused_layer_gpu; test_fused_layer_gpu.{function}()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | settings, timeout=180)


def interleave() -> None:
    """Two models' steps in one program: chains of layers that do not depend on each other."""
    chains = [[random_layer(2048, 2048, 5632, (2048,), 1)[2:] for _ in range(12)] for _ in range(2)]
    starts = [jnp.full((1, 2048), 1 + i, jnp.bfloat16) for i in range(2)]

    def steps(starts):
        states = [(x, x, []) for x in starts]
        for layers in zip(*chains):
            for i, layer in enumerate(layers):
                x, y, handoff = states[i]
                x, y, *handoff = fused(x / jnp.abs(x).max(), y, *layer, *handoff)
                states[i] = x, y, handoff
        return [x + y for x, y, _ in states]

    alone = [np.asarray(jax.jit(steps)([x, x])[i]) for i, x in enumerate(starts)]
    together = jax.jit(lambda starts: jax.lax.fori_loop(0, 200, lambda _, x: [0 * a + b for a, b in zip(steps(starts), starts)], starts))
    jax.block_until_ready(together(starts))
    for _ in range(50):
        for a, b in zip(jax.jit(steps)(starts), alone):
            np.testing.assert_array_equal(np.asarray(a), b)


@gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["SERIALIZE", "CONCURRENT"])
def test_two_models_in_one_program_do_not_wait_for_each_other(mode):
    problem_here(2048, 2048, 5632, (2048,), 1)
    # CUDA graphs, in which what does not depend on each other may run at the same time.
    done = in_a_process("interleave", "--xla_gpu_graph_min_graph_size=1", f"--xla_gpu_command_buffer_scheduling_mode={mode}")
    assert done.returncode == 0, done.stderr[-2000:]


def wait_in_vain() -> None:
    """As if the blocks with the shares of the first stage had died: their tickets are drawn already."""
    args = random_layer(256, 512, 768, (512, 256, 256), 1)
    plan = plan_of(args)
    jax.block_until_ready(launched(args, plan, mosaic_gpu.empty_handoff(plan).at[0].set(plan.blocks)))


@gpu
@pytest.mark.timeout(200)
def test_waiting_in_vain_ends_with_an_error():
    problem_here(256, 512, 768, (512, 256, 256), 1)
    done = in_a_process("wait_in_vain")
    assert done.returncode != 0
    assert "a block of a fused layer waited in vain for another" in done.stderr, done.stderr[-2000:]


def test_in_a_fixed_order_it_takes_parts_of_all_rows(monkeypatch):
    """Whether it runs does not depend on how many there are."""
    assert [kernel.fixed_order_rows for kernel in dispatch.kernels("fused_layer")] == [mosaic_gpu.MAX_ROWS]
    asked, parts = [], []

    def kernel(args):
        parts.append(args)
        return args.x, args.attended, len(parts)

    def choose(operation, implementation, args, **_):
        asked.append((args.x.shape, args.attended.shape))
        return SimpleNamespace(between_attentions=kernel)

    x, attended, *others = random_layer(256, 384, 256, (16,), 21)
    monkeypatch.setattr(fused_layer, "choose", choose)
    monkeypatch.setattr(fused_layer.dispatch, "rows_in_fixed_order", lambda operation: 8)
    found = between_attentions(x.reshape(3, 7, -1), attended.reshape(3, 7, -1), *others, eps=EPS)
    assert asked == [((8, 256), (8, 384))] and found[2] == 3
    assert [(len(args.x), len(args.attended), args.handoff) for args in parts] == [(8, 8, None), (8, 8, 1), (5, 5, 2)]
    for ours, given in zip(found, (x, attended)):
        np.testing.assert_array_equal(np.asarray(ours).reshape(given.shape), np.asarray(given))


@gpu
def test_leading_dimensions_are_rows():
    x, attended, *rest = problem_here(256, 256, 256, (512,), 4)
    flat, shaped = run(x, attended, *rest), run(x.reshape(2, 2, -1), attended.reshape(2, 2, -1), *rest)
    for a, b in zip(flat, shaped):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b).reshape(a.shape))


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("shape", SHAPES)
def test_plans_fit(shape, rows):
    width, heads, hidden, outputs = shape

    def weight(out: int, inputs: int) -> Int4Weight:
        codes, scale = (
            jax.ShapeDtypeStruct((out, inputs // 128, *shape), dtype) for shape, dtype in (((64,), jnp.uint8), ((), jnp.bfloat16))
        )
        return Int4Weight(codes, scale, scale)

    o, gate, down, following = weight(width, heads), weight(hidden, width), weight(width, hidden), [weight(out, width) for out in outputs]
    plan = mosaic_gpu.plan_for(rows, o, gate, down, following, EPS)
    assert plan.layout.total <= 227 * 1024
    assert plan.slots >= mosaic_plan.MIN_SLOTS
    assert plan.blocks == 132
    for stage in plan.stages:
        assert plan.resident(stage) or not stage.normed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({0: jnp.zeros((1, 256))}, "bfloat16, not float32"),
        ({3: jnp.zeros(256)}, "norms in bfloat16"),
        ({1: jnp.zeros((1, 512), jnp.bfloat16)}, "512 inputs, the number of activations, not 256"),
        ({6: random_weight(256, 384, 0)}, "256 inputs, the number of activations, not 384"),
        ({4: random_weight(24, 256, 0), 5: random_weight(24, 256, 0)}, "multiples of 16"),
        ({8: [random_weight(64, 256, 0, 64)]}, "groups have one size"),
        ({5: random_weight(512, 256, 0)}, "gate and up of one shape"),
        ({1: jnp.zeros((2, 256), jnp.bfloat16)}, "as many rows attended"),
        ({2: random_weight(512, 256, 0)}, "as wide as x, 256, not 512"),
        ({3: jnp.zeros(512, jnp.bfloat16)}, "as wide as x, 256, not 512"),
        ({0: jnp.zeros((9, 256), jnp.bfloat16), 1: jnp.zeros((9, 256), jnp.bfloat16)}, "supports up to 8 rows of activations, not 9"),
        ({4: jnp.zeros((256, 256), jnp.bfloat16)}, "all weights in INT4"),
        ({8: [jnp.zeros((512, 256), jnp.bfloat16)]}, "all weights in INT4"),
        ({6: Int8Weight(jnp.zeros((256, 256), jnp.int8), jnp.zeros(256, jnp.bfloat16))}, "all weights in INT4"),
    ],
)
def test_takes_no_other_arguments(monkeypatch, change, reason):
    monkeypatch.setattr(mosaic_gpu, "no_mosaic_gpu", lambda: None)
    args = random_layer(256, 256, 256, (512,), 1)
    assert mosaic_gpu.unsupported(arguments(*args)) is None
    for place, value in change.items():
        args[place] = value
    assert reason in mosaic_gpu.unsupported(arguments(*args))


def test_takes_no_more_pieces_than_registers_hold(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "no_mosaic_gpu", lambda: None)
    taken, refused = (arguments(*random_layer(4224, 128, 128, (128,), rows)) for rows in (4, 5))
    assert mosaic_gpu.unsupported(taken) is None
    assert "up to 8 pieces of x in a thread's registers, and 5 rows of width 4224 have 10" in mosaic_gpu.unsupported(refused)


def test_which_devices_it_adds_up_over(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "no_mosaic_gpu", lambda: None)
    args, reached = random_layer(256, 256, 256, (512,), 1), {(0, 1), (1, 0), (0, 2), (2, 0), (1, 2)}
    device = lambda number, process=0: SimpleNamespace(local_hardware_id=number, process_index=process, platform="gpu")
    one, two, three, elsewhere = device(0), device(1), device(2), device(0, process=1)
    monkeypatch.setattr(mosaic_gpu, "multiprocessors", lambda: 132)
    monkeypatch.setattr(exchange, "_here", lambda devices: True)
    monkeypatch.setattr(exchange, "_reaches", lambda number, other: (number, other) in reached)

    def reason(*devices, axis_size: int) -> str | None:
        monkeypatch.setattr(mosaic_gpu, "num_devices_of", lambda axis: axis_size)
        with dispatch.on(*devices):
            return mosaic_gpu.unsupported(arguments(*args, axis="model"))

    assert reason(one, axis_size=1) is None and reason(one, two, axis_size=2) is None
    assert "is traced for 1" in reason(one, axis_size=2)
    assert "8 devices at most, not 9" in reason(*map(device, range(9)), axis_size=9)
    assert "all devices in one process" in reason(one, elsewhere, axis_size=2)
    assert "does not reach that of" in reason(one, two, three, axis_size=3)


@pytest.mark.parametrize("missing", [7, 8])
def test_weights_that_follow_have_a_norm(missing):
    args = random_layer(256, 256, 256, (512,), 1)
    args[missing] = None if missing == 7 else []
    with pytest.raises(ValueError, match="given together"):
        between_attentions(*args, eps=EPS)


def test_takes_no_biases(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "no_mosaic_gpu", lambda: None)
    args = random_layer(256, 256, 256, (512,), 1)
    bias = jnp.zeros(256, jnp.bfloat16)
    assert mosaic_gpu.unsupported(arguments(*args, biases={})) is None
    assert "adds no biases, and there are some of down" in mosaic_gpu.unsupported(arguments(*args, biases={"down": bias}))
    with pytest.raises(ValueError, match="biases of q, should be of o, gate, up, down"):
        between_attentions(*args, eps=EPS, biases={"q": bias})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("biased", [("o",), ("o", "gate", "up", "down")], ids="-".join)
@pytest.mark.parametrize("plain", ["all", "some", "none"])
def test_the_reference_is_its_parts(plain, biased, dtype):
    """The very bits, for weights of any format."""
    x, attended, o, norm, gate, up, down, following_norm, following = random_layer(256, 512, 768, (512, 256), 3)
    x, attended, norm, following_norm = (a.astype(dtype) for a in (x, attended, norm, following_norm))
    widen = lambda weight, i: dequantize_weight(weight, dtype) if plain == "all" or (plain == "some" and i % 2) else weight
    o, gate, up, down, *following = [widen(weight, i) for i, weight in enumerate([o, gate, up, down, *following])]
    r = np.random.default_rng(0)
    biases = {name: jnp.asarray(r.standard_normal(256 if name in ("o", "down") else 768), dtype) for name in biased}
    of = lambda *names: [biases[name] for name in names if name in biases]
    args = x, attended, o, norm, gate, up, down
    settings = {"eps": EPS, "biases": biases, "implementation": "reference"}
    before, h = add_rms_norm(x, linear(attended, [o], of("o")), norm, eps=EPS)
    gates, ups = jnp.split(linear(h, [gate, up], of("gate", "up")), 2, -1)
    added = linear(jax.nn.silu(gates) * ups, [down], of("down"))
    after, h = add_rms_norm(before, added, following_norm, eps=EPS)
    for ours, expected in zip(between_attentions(*args, following_norm, following, **settings), (after, linear(h, following))):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(expected, np.float32))
    for ours, expected in zip(between_attentions(*args, **settings), (before, added)):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(expected, np.float32))


def test_the_reference_is_close_to_float32():
    args = random_layer(256, 512, 768, (512, 256), 3)
    for a, b in zip(between_attentions(*args, eps=EPS, implementation="reference")[:2], exact(*args)):
        assert relative_error(a, b) <= 1e-2
