"""The flush kernels for GPUs against the reference: the same bits, except codes at a tie, and nothing moved that need not be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import gpu
from jax import lax
from paging import in_pages, of_nobody, out_of_pages
from problems.flush import DUE, B, K, bits, check, filled_layer, lengths_of

from pallas_kernels import dispatch
from pallas_kernels.flush import flush, mosaic_gpu
from pallas_kernels.formats.kv_cache import FullLayer, HierarchicalLayer, Lengths, Planes
from pallas_kernels.formats.quantization import SCHEMES, unpack
from qspec_jax.caches.hierarchical import HierarchicalCache

schemes = pytest.mark.parametrize("scheme", SCHEMES)


def same_but_for_ties(tokens: FullLayer, got: tuple[Planes, Planes], expected: tuple[Planes, Planes]) -> None:
    """Equal scales and zeros; codes may differ where the quotient that is rounded is half way between integers."""
    for x, ours, reference in zip((tokens.keys, np.swapaxes(tokens.values, -1, -2)), got, expected):
        for a, b in ((ours.scale, reference.scale), (ours.zero, reference.zero)):
            np.testing.assert_array_equal(a.astype(float), b.astype(float))
        read = lambda planes: [np.asarray(unpack(plane)).astype(int) for plane in (planes.upper, planes.lower)]
        (upper, lower), (upper_expected, lower_expected) = read(ours), read(reference)
        differs = (upper != upper_expected) | (lower != lower_expected)
        if not differs.any():
            continue
        assert differs.mean() < 1e-3
        scale, zero = (np.broadcast_to(p.astype(float)[..., None, :], x.shape)[differs] for p in (reference.scale, reference.zero))
        steps = (x[differs].astype(float) - zero) / (scale / 16)
        from_a_tie = lambda y: abs(y - np.floor(y) - 0.5)
        # The relative error of a float32 division, of at most 255 steps.
        assert (np.minimum(from_a_tie(steps), 16 * from_a_tie(steps / 16)) < 1e-4).all()
        code = (16 * upper + lower)[differs] - (16 * upper_expected + lower_expected)[differs]
        assert (abs(code) <= 1).all()


def with_extremes(layer: HierarchicalLayer) -> HierarchicalLayer:
    """Gives every row keys and values that are not finite, constant, zero, tiny, huge and outliers, each in another group."""
    G, H = layer.group_size, layer.buffer.keys.shape[-1]
    cases = [
        lambda x: np.where(np.arange(x.shape[-1]) == 7, np.nan, x),
        lambda x: np.where(np.arange(x.shape[-1]) == x.shape[-1] - 1, np.inf, x),
        lambda x: np.where(np.arange(x.shape[-1]) == 0, -np.inf, x),
        lambda x: np.where(np.arange(x.shape[-1]) % 2, -np.inf, np.nan),
        lambda x: 0 * x + 1.37,
        lambda x: 0 * x - 1e-20,
        lambda x: 0 * x,
        lambda x: np.where(x > 3, 0.0, -0.0),
        lambda x: np.where(np.arange(x.shape[-1]) == 5, 1e4 * x, x),
        lambda x: np.where(np.arange(x.shape[-1]) == 5, -3e38, 3e38),
        lambda x: np.sign(x) * 3e38 / 4,
        lambda x: 1e-36 * x,
        lambda x: 1e-40 * x,
        lambda x: x + 1e4,
        lambda x: np.where(x > 3, 0.1, -0.3),
    ]
    keys, values = (np.asarray(x).astype(float) for x in (layer.buffer.keys, layer.buffer.values))
    for i, case in enumerate(cases):
        channel, token = (5 * i + 1) % H, (7 * i + 2) % G
        keys[:, :, :G, channel] = case(keys[:, :, :G, channel])
        values[:, :, token] = case(values[:, :, token])
    return dataclasses.replace(layer, buffer=FullLayer(jnp.asarray(keys, jnp.bfloat16), jnp.asarray(values, jnp.bfloat16)))


@gpu
@pytest.mark.parametrize("due", DUE)
def test_groups_in_pages_get_the_same_bits(due):
    run = jax.jit(functools.partial(flush, scheme="int8_first", implementation="mosaic_gpu"))
    layer, due = filled_layer(128, "bfloat16", 128), jnp.array(due)
    expected, found = run(layer, lengths_of(128), due), run(paged := in_pages(layer), lengths_of(128), due)
    for x, y in zip(jax.tree.leaves(out_of_pages(found)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))
    for x, y in zip(of_nobody(found), of_nobody(paged)):
        np.testing.assert_array_equal(x, y)


@gpu
@pytest.mark.parametrize("G", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@schemes
def test_equals_the_reference(scheme, head_dim, G):
    run = jax.jit(functools.partial(flush, scheme=scheme, implementation="mosaic_gpu"))
    layer = filled_layer(G, "bfloat16", head_dim)
    for tokens in (layer, with_extremes(layer)):
        for due in DUE:
            new = run(tokens, lengths_of(G), jnp.array(due))
            check(tokens, new, due, scheme, same_but_for_ties)
            again = run(tokens, lengths_of(G), jnp.array(due))
            assert all((bits(x) == bits(y)).all() for x, y in zip(*map(jax.tree.leaves, (new, again))))


@pytest.mark.parametrize(("head_dim", "G"), [(64, 64), (128, 128)])
@schemes
def test_the_emulated_kernel_equals_the_reference(scheme, head_dim, G):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if jax.default_backend() != "cpu" or jax.__version_info__ < (0, 11):
        pytest.skip("needs a CPU, and jax 0.11 to emulate Mosaic GPU")
    layer, due = with_extremes(filled_layer(G, "bfloat16", head_dim)), DUE[0]
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        new = jax.jit(functools.partial(mosaic_gpu.flush, scheme=scheme))(layer, lengths_of(G), jnp.array(due))
    check(layer, new, due, scheme, same_but_for_ties)


@gpu
@pytest.mark.parametrize("rows", [256, 257, 319, 320, 321, 400, 600])
def test_a_buffer_of_any_length_moves_up(rows):
    G, due = 128, DUE[2]
    layer = filled_layer(G, "bfloat16", 128)
    longer = lambda x: jnp.asarray(np.random.default_rng(rows).standard_normal((B, K, rows, 128)), x.dtype)
    layer = dataclasses.replace(layer, buffer=jax.tree.map(longer, layer.buffer))
    check(layer, jax.jit(functools.partial(flush, scheme="paper"))(layer, lengths_of(G), jnp.array(due)), due, "paper", same_but_for_ties)


def grown(cache: HierarchicalCache, keys: jax.Array, values: jax.Array) -> HierarchicalCache:
    """The cache after appending tokens [steps, B, 1, K, H] one by one, flushed when a row is due."""

    def step(i, cache):
        layers = [dataclasses.replace(x, buffer=x.buffer.append(keys[i], values[i], cache.lengths.buffered)) for x in cache.layers]
        return cache.advance(tuple(layers), 1).flush()[0]

    return lax.fori_loop(0, len(keys), step, cache)


def empty_cache(batch: int, groups: int, scheme: str) -> HierarchicalCache:
    layers = tuple(HierarchicalLayer.zeros(batch, K, groups, 128, 2 * 128 + 5, 128, jnp.dtype(jnp.bfloat16)) for _ in range(2))
    # Two arrays: a donated one may be given away once only.
    return HierarchicalCache(layers, Lengths(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32)), scheme)


@gpu
@schemes
def test_a_loop_of_flushes_equals_the_reference(scheme, monkeypatch):
    """Rows begun at other lengths, so that they are due at other times."""
    tokens = jax.random.normal(jax.random.key(0), (2, 4 * 128, B, 1, K, 128), jnp.bfloat16)
    begun = jnp.array([0, 1, 100, 127, 128], jnp.int32)

    def run():
        cache = empty_cache(B, 6, scheme)
        cache = dataclasses.replace(cache, lengths=Lengths(0 * begun, begun))
        return jax.jit(lambda *args: grown(*args))(cache, *tokens)

    got = run()
    monkeypatch.setattr(dispatch, "KERNELS", ())
    expected = run()
    np.testing.assert_array_equal(got.lengths.quantized, expected.lengths.quantized)
    assert (got.lengths.quantized >= 3 * 128).all()
    for ours, reference in zip(got.layers, expected.layers):
        for x, y in zip(*map(jax.tree.leaves, ((ours.keys, ours.values), (reference.keys, reference.values)))):
            # Codes at a tie may differ; the test above sees to it that no others do.
            assert (bits(x) != bits(y)).mean() < (1e-3 if x.dtype == jnp.uint8 else 1e-9)
        for x, y in zip(*map(jax.tree.leaves, (ours.buffer, reference.buffer))):
            for row, length in enumerate(got.lengths.buffered):
                np.testing.assert_array_equal(bits(x)[row, :, :length], bits(y)[row, :, :length])


@gpu
def test_the_cache_is_updated_where_it_lies():
    cache = empty_cache(1, 2048, "paper")
    tokens = jnp.zeros((2, 300, 1, 1, K, 128), jnp.bfloat16)
    compiled = jax.jit(lambda *args: grown(*args), donate_argnums=0).lower(cache, *tokens).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.num_bytes
    assert memory.temp_size_in_bytes < cache.num_bytes / 100
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == len(cache.layers)
    place = lambda cache: [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache.layers)]
    before = place(cache)
    assert place(compiled(cache, *tokens)) == before


@gpu
def test_what_it_does_not_support_goes_to_the_reference():
    for layer, reason in ((filled_layer(4, "float32", 24), "bfloat16"), (filled_layer(4, "bfloat16", 64), "groups")):
        assert reason in mosaic_gpu.unsupported(layer, lengths_of(4), jnp.array(DUE[0]), scheme="paper")
        check(layer, flush(layer, lengths_of(4), jnp.array(DUE[0]), scheme="paper"), DUE[0], "paper", same_but_for_ties)
        with pytest.raises(NotImplementedError, match=reason):
            flush(layer, lengths_of(4), jnp.array(DUE[0]), scheme="paper", implementation="mosaic_gpu")
