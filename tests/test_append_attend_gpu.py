"""RoPE, append and attention in one: the kernel against the kernels one after the other, and what it does not take."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import gpu, needs_gpu, skip_or_fail
from problems.attention import Case, random_lists, random_problem
from problems.rope_append import random_projections

from pallas_kernels import attention
from pallas_kernels.append_attend import append_and_attend, mosaic_gpu
from pallas_kernels.attention.mosaic_plan import Config
from pallas_kernels.formats.kv_cache import HierarchicalLayer, Lengths
from pallas_kernels.formats.views import DenseView, View
from pallas_kernels.rope_append import rotate_and_append

run = jax.jit(append_and_attend, static_argnames="implementation")
CASES = {
    "T1-MHA": Case(1, 8, 8, 128, group_size=128, capacity=40, groups=(40,)),
    "T1-GQA4-rows": Case(1, 8, 2, 128, group_size=128, capacity=40, groups=(0, 17, 40)),
    "T7-GQA4": Case(7, 8, 2, 128, group_size=128, capacity=17, groups=(17, 1)),
    "T16-GQA7-64": Case(16, 7, 1, 64, group_size=64, capacity=9, groups=(9, 0)),
}


def problem(case: Case, planes: int | None, listed: bool, *, observe: bool = False) -> tuple[tuple, View]:
    """Arguments of `append_and_attend`; the buffers hold from no token to all but those that a round may add."""
    B, T, G = len(case.groups), case.tokens, case.group_size
    qkv, cos, sin, *_ = random_projections(B, T, case.heads, case.kv_heads, case.head_dim)
    _, layer = random_problem(case, "bfloat16")
    buffered = jnp.array([2 * G - 1 - T, 0, G // 2][:B], jnp.int32)
    lengths = Lengths(case.lengths.quantized[:B], buffered)
    if planes is None:
        layer, lengths = layer.buffer, dataclasses.replace(lengths, quantized=jnp.zeros_like(buffered))
    return (qkv, cos, sin, layer, lengths), random_lists(case) if listed else DenseView(planes, observed=observe)


def one_after_the_other(qkv, cos, sin, layer, lengths, view, *, config):
    hierarchical = isinstance(layer, HierarchicalLayer)
    q, buffer = rotate_and_append(qkv, cos, sin, layer.buffer if hierarchical else layer, lengths.buffered, implementation="mosaic_gpu")
    new = dataclasses.replace(layer, buffer=buffer) if hierarchical else buffer
    longer = dataclasses.replace(lengths, buffered=lengths.buffered + qkv.shape[1])
    return *attention.mosaic_gpu.decode_attention(q, new, longer, view, config=config), new


@gpu
@pytest.mark.parametrize(
    ("planes", "listed", "observe"), [(1, True, False), (1, False, False), (2, False, True), (2, False, False), (None, False, False)]
)
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_one_after_the_other(name, planes, listed, observe):
    case = CASES[name]
    args, view = problem(case, planes, listed, observe=observe)
    config = Config(16, team=2)
    skip_or_fail("mosaic_gpu", attention.mosaic_gpu.no_mosaic_gpu())
    together = jax.jit(lambda *a: mosaic_gpu.append_and_attend(*a, config=config))
    apart = jax.jit(lambda *a: one_after_the_other(*a, config=config))
    out, new, mass = together(*args, view)
    expected, expected_mass, appended = apart(*args, view)
    for ours, theirs in zip(jax.tree.leaves(new), jax.tree.leaves(appended)):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    np.testing.assert_array_equal(np.asarray(out), np.asarray(expected))
    if observe:
        np.testing.assert_array_equal(np.asarray(mass), np.asarray(expected_mass))
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(together(*args, view)[0]), np.asarray(out))


@gpu
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_whatever_runs_equals_the_reference(name, listed):
    args, view = problem(CASES[name], 1, listed)
    out, new, mass = run(*args, view)
    expected, appended, _ = run(*args, view, implementation="reference")
    assert mass is None
    for ours, theirs in zip(jax.tree.leaves(new), jax.tree.leaves(appended)):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    out, expected = (np.asarray(x, np.float32).reshape(len(x), -1) for x in (out, expected))
    assert (np.linalg.norm(out - expected, axis=1) <= 1e-2 * np.linalg.norm(expected, axis=1)).all()


@pytest.mark.parametrize("observe", [False, True])
def test_the_reference_is_one_after_the_other(observe):
    args, view = problem(CASES["T7-GQA4"], 2, False, observe=observe)
    qkv, cos, sin, layer, lengths = args
    out, new, mass = run(*args, view, implementation="reference")
    q, buffer = rotate_and_append(qkv, cos, sin, layer.buffer, lengths.buffered)
    longer = dataclasses.replace(lengths, buffered=lengths.buffered + 7)
    expected, expected_mass = attention.decode_attention(q, dataclasses.replace(layer, buffer=buffer), longer, view)
    np.testing.assert_array_equal(np.asarray(new.buffer.keys), np.asarray(buffer.keys))
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=2**-6)
    assert (mass is None) == (not observe)
    if observe:
        np.testing.assert_allclose(mass, expected_mass, atol=1e-3)


@pytest.mark.parametrize("implementation", ["reference", pytest.param("mosaic_gpu", marks=[pytest.mark.gpu, needs_gpu])])
def test_tokens_beyond_the_last_are_passed_over(implementation):
    case = Case(3, 8, 2, 128, group_size=128, capacity=17, groups=(17,))
    (qkv, *others), view = problem(case, 2, False)
    expected, buffer, _ = run(qkv, *others, view, implementation=implementation)
    filled = jnp.concatenate([qkv, jnp.full((1, 5, qkv.shape[2]), jnp.nan, qkv.dtype)], 1)
    out, longer, _ = run(filled, *others, view, implementation=implementation)
    assert out.shape[:2] == (1, 8)
    np.testing.assert_array_equal(np.asarray(out[:, :3]), np.asarray(expected))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), longer, buffer)


def test_what_the_kernel_does_not_take(monkeypatch):
    for module in (mosaic_gpu.attention, mosaic_gpu.rope_append):
        monkeypatch.setattr(module, "no_mosaic_gpu", lambda: None)
    args, view = problem(CASES["T1-MHA"], 1, True)
    assert mosaic_gpu.unsupported(*args, view) is None
    assert "float32" in mosaic_gpu.unsupported(args[0].astype(jnp.float32), *args[1:], view)
    # New rows of 16 tokens would take a slot of the ring.
    room = lambda case, planes: mosaic_gpu.unsupported(*problem(case, planes, False)[0], DenseView(planes))
    wide = Case(16, 16, 4, 256, group_size=128, capacity=1, groups=(1,))
    assert "fewer than 4 slots of the ring" in room(wide, 2)
    (qkv, *others), view = problem(CASES["T7-GQA4"], 1, False)
    assert "of a single row" in mosaic_gpu.unsupported(jnp.pad(qkv, ((0, 0), (0, 1), (0, 0))), *others, view)


def test_a_view_that_does_not_fit_is_refused():
    args, _ = problem(CASES["T1-MHA"], 1, False)
    with pytest.raises(ValueError, match="planes"):
        append_and_attend(*args, DenseView(None))
