"""The GPU kernel of plain weights and more than 128 rows: the bits of few rows, what a CPU can emulate of it, and its plans."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from gpus import gpu, skip_or_fail
from problems.matmul import activations, plain_weight, relative_error, separate
from test_skinny_matmul_gpu import GATED_TOLERANCE, PLAIN_SHAPES, gated_error, gated_matmul, needs_cores, skinny_kernel

from pallas_kernels.gpu.launch import RESERVED_BYTES, SHARED_BYTES
from pallas_kernels.matmul import mosaic_plain, mosaic_tiled_plan

MANY_ROWS_SHAPES = [(4096, (4096, 1024, 1024)), (14336, (4096,)), (1920, (1064,)), (4096, (8, 24))]  # of the last too few for a tile


@gpu
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "gated"])
@pytest.mark.parametrize("rows", [136, 320, 513])
@pytest.mark.parametrize(("inputs", "outputs"), MANY_ROWS_SHAPES)
def test_many_rows_have_the_bits_of_few(inputs, outputs, rows, kind):
    gated = kind == "gated"
    outputs = 2 * outputs[:1] if gated else outputs
    weights, x = tuple(plain_weight(out, inputs, i) for i, out in enumerate(outputs)), activations(rows, inputs, True)
    run = skinny_kernel(plain_weight, x, weights, "bfloat16" if gated else kind)
    multiply = (lambda x: gated_matmul(x, *weights)) if gated else (lambda x: run(x, weights))
    together = np.asarray(multiply(x))
    if gated:
        assert gated_error(together, x, *weights) <= GATED_TOLERANCE
    else:
        most = max(relative_error(part, x, weight) for part, weight in zip(separate(together, weights), weights))
        assert most <= (2e-5 if kind == "float32" else 5e-3)
    for first, count in itertools.product((0, 100), (1, 8, 128)):
        some = slice(first, min(first + count, rows))
        np.testing.assert_array_equal(np.asarray(multiply(x[some])), together[some])


@gpu
@pytest.mark.parametrize(("inputs", "outputs", "gated"), [(4096, (4096, 1024, 1024), False), (4096, (2816, 2816), True)])
def test_every_division_of_many_rows_gives_the_same_bits(inputs, outputs, gated):
    weights, x = tuple(plain_weight(out, inputs, i) for i, out in enumerate(outputs)), activations(320, inputs, True)
    skip_or_fail("mosaic_gpu", mosaic_plain.unsupported(x, weights, dtype="bfloat16"))
    plans = [
        mosaic_tiled_plan.TiledPlan(320, inputs, outputs, 132, gated=gated, config=config) for config in mosaic_tiled_plan.configs(320)
    ]
    found = [np.asarray(mosaic_plain.run_tiled(plan, x, weights)) for plan in plans if plan.fits]
    assert len(found) > 10
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "kind", "config", "races"),
    [
        (160, 1024, (192,), "", ("rows", 2), True),  # more steps than slots; warpgroups divide rows
        (160, 256, (256, 128), "", ("outputs", 2), True),  # warpgroups divide outputs
        (160, 512, (128, 128), "gated", ("rows", 2), True),
        (153, 512, (200, 200), "gated", ("outputs", 2), False),  # tiles overlap, and the last rows are not whole
        (129, 256, (136, 64), "", ("rows", 2), False),
        (160, 256, (192,), "float32", ("rows", 2), True),
        (153, 256, (256, 136), "float32", ("outputs", 2), False),
        (137, 256, (128,), "", ("outputs", 7), False),  # two parts of the same rows
    ],
)
def test_the_emulated_plain_kernel_with_many_rows(capfd, rows, inputs, outputs, kind, config, races):
    """One block a cluster, since the emulator wants a core for each warpgroup of one; for others see the next test."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if jax.default_backend() != "cpu" or jax.__version_info__ < (0, 11):
        pytest.skip("needs a CPU, and jax 0.11 to emulate Mosaic GPU")
    needs_cores(rows)
    x, weights = activations(rows, inputs, True), [plain_weight(out, inputs, i) for i, out in enumerate(outputs)]
    config = mosaic_tiled_plan.Config(*config)
    plan = mosaic_tiled_plan.TiledPlan(rows, inputs, outputs, 132, kind == "float32", kind == "gated", config=config)
    assert plan.fits
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=races)):
        y = mosaic_plain.run_tiled(plan, x, weights)
    assert y.shape == (rows, sum(plan.written)) and y.dtype == (kind or "bfloat16").replace("gated", "bfloat16")
    assert "RACE" not in "".join(capfd.readouterr())
    if kind == "gated":
        assert gated_error(y, x, *weights) <= GATED_TOLERANCE
    else:
        most = max(relative_error(part, x, weight) for part, weight in zip(separate(y, weights), weights))
        assert most <= (2e-5 if kind == "float32" else 5e-3)


@pytest.mark.kernels
def test_the_emulated_plain_kernel_in_clusters():
    """What it computes; that no block fills a slot too early is for the tests on a GPU to see."""
    if jax.default_backend() != "cpu" or jax.__version_info__ < (0, 11):
        pytest.skip("needs a CPU, and jax 0.11 to emulate Mosaic GPU")
    script, environment = Path(__file__).with_name("emulated_clusters.py"), os.environ | {"NPROC": "32"}
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(found) == 5
    for each in found:
        assert each["fits"] and each["error"] <= (2e-5 if each["float32"] else GATED_TOLERANCE)


@pytest.mark.parametrize("rows", [129, 165, 320, 512, 1024])
def test_plans_of_many_rows_cover_all_and_fit(rows):
    for inputs, outputs in PLAIN_SHAPES:
        for gated in {False, len(set(outputs)) == 1 and len(outputs) == 2}:
            plan = mosaic_tiled_plan.tiled_plan(rows, inputs, outputs, 132, gated=gated)
            if plan is None:
                assert min(outputs) < 64
                continue
            tiles, parts = plan.grid
            clusters = (plan.config.cluster, 1) if plan.config.common == "rows" else (1, plan.config.cluster)
            assert tiles * clusters[0] >= sum(plan.tiles) and parts * clusters[1] * plan.row_tile >= rows
            assert all(count * plan.config.tile >= out for count, out in zip(plan.tiles, plan.written, strict=True))
            slot = 2 * mosaic_tiled_plan.STEP * (plan.weights_at_once * plan.config.tile + plan.row_tile)
            assert plan.slots * slot <= SHARED_BYTES - RESERVED_BYTES and plan.slots >= min(plan.steps, 3)


def test_the_division_of_many_rows_is_one_that_was_fast_on_an_h200():
    """With 320 rows, within 10 % of the fastest one that was measured (docs/kernels/matmul.md)."""

    def config(inputs, outputs, gated=False):
        found = mosaic_tiled_plan.tiled_plan(320, inputs, outputs, 132, gated=gated).config
        return found.tile, found.row_tiles, found.cluster, found.common

    assert config(4096, (14336, 14336), True) in {(128, 2, 1, "rows"), (128, 2, 2, "outputs"), (64, 1, 2, "rows")}
    assert config(14336, (4096,)) in {(64, 2, 2, "rows"), (64, 1, 4, "rows"), (128, 4, 2, "outputs")}
    assert config(4096, (4096, 1024, 1024)) in {(64, 1, 4, "rows"), (128, 2, 1, "rows"), (128, 2, 2, "rows")}
    assert config(4096, (4096,)) in {(64, 2, 2, "rows"), (128, 4, 2, "outputs"), (128, 2, 1, "rows")}
