"""What a model reads through a view, on a cache of real text; what a view covers; and the mass that observing finds."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems.attention import Case, random_problem
from runs import random_model

from pallas_kernels.attention import decode_attention, reference
from pallas_kernels.formats.kv_cache import HeldKeys, Lengths, dequantize_groups
from pallas_kernels.formats.views import BOTH_PLANES, UPPER_PLANE, ChosenTokens, DenseView, LargestMass, ListedGroups
from pallas_kernels.rope_append import split_and_rotate
from qspec_jax import demo, load
from qspec_jax.caches.prefill import prefill
from qspec_jax.caches.registry import CACHES, STREAMED, CacheConfig
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import padded
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.training import corpus


@pytest.fixture(scope="module")
def trained():
    """The first layer of the embedded model, its cache of a real text, and what comes next of it."""
    whole, tokenizer = load(demo.MODEL, dtype="float32")
    weights = whole.weights()
    model = Llama(dataclasses.replace(whole.config, num_layers=1), lambda path, shape: weights[path])
    tokens = tokenizer(next(iter(corpus.held_out_files())).read_text())["input_ids"][:400]
    config = GenerationConfig(group_size=32).cache_config
    empty = config.empty(model.config, batch=2, capacity=512, num_speculative_tokens=4, dtype=model.dtype)
    rows, n = padded([tokens, tokens[:230]])
    _, cache = jax.jit(prefill)(model, rows, n, empty)
    return model, cache, jnp.array([tokens[:5], tokens[7:12]], jnp.int32)


@pytest.fixture(scope="module")
def run(trained):
    """The logits of what comes next, through a view."""
    model, cache, tokens = trained
    positions = cache.lengths.total[:, None] + jnp.arange(5)
    return jax.jit(lambda view: model(tokens, positions, cache, view=view)[0])


@pytest.mark.system
def test_all_groups_listed_are_the_dense_view(trained, run):
    _, cache, _ = trained
    K, C = cache.layers[0].keys.upper.shape[1:3]
    groups = jnp.broadcast_to(jnp.arange(C), (2, K, C))
    count = jnp.broadcast_to((cache.lengths.quantized // 32)[:, None], (2, K))
    dense = run(UPPER_PLANE)
    np.testing.assert_array_equal(run(ListedGroups(groups, count)), dense)
    assert np.abs(run(ListedGroups(groups, count // 2)) - dense).max() > 1e-3
    np.testing.assert_allclose(run(ListedGroups(count[..., None] - 1 - groups, count)), dense, atol=2e-4)
    for filler in (C, -1000):  # what stands behind the count is not read, whatever it is
        filled = jnp.where(jnp.arange(C) < count[..., None] // 2, groups, filler)
        np.testing.assert_array_equal(run(ListedGroups(filled, count // 2)), run(ListedGroups(groups, count // 2)))


@pytest.mark.system
def test_chosen_tokens_are_those_of_the_listed_groups(trained, run):
    """And all tokens chosen, by name or by mass, are the dense view."""
    _, cache, _ = trained
    K, C = cache.layers[0].keys.upper.shape[1:3]
    odd = jnp.broadcast_to(jnp.minimum(2 * jnp.arange(C) + 1, C - 1), (2, K, C)).at[:, 1].add(-1)
    listed = ListedGroups(odd, jnp.full((2, K), 3))
    chosen = jnp.zeros((2, K, C), bool).at[:, 0, 1:6:2].set(True).at[:, 1, 0:5:2].set(True)
    by_tokens = run(ChosenTokens(jnp.repeat(chosen, 32, axis=-1)))
    np.testing.assert_allclose(by_tokens, run(listed), atol=2e-4)
    np.testing.assert_array_equal(run(ChosenTokens(jnp.ones((2, K, C * 32), bool))), run(UPPER_PLANE))
    for whole_groups, parts in ((True, C), (False, 32 * C)):
        np.testing.assert_array_equal(run(LargestMass(jnp.full(2, parts), whole_groups)), run(UPPER_PLANE))
        assert np.abs(run(LargestMass(jnp.full(2, 1), whole_groups)) - run(UPPER_PLANE)).max() > 1e-3


@pytest.mark.system
@pytest.mark.parametrize("chunk", [1024, 20])
def test_what_a_view_covers(monkeypatch, chunk):
    """The largest mass by token and by group, and the share of a listed group, against a softmax that is written down here."""
    monkeypatch.setattr(reference, "CHUNK_TOKENS", chunk)
    case = Case(2, 4, 2, 16, group_size=16, capacity=5, groups=(5, 2, 0))
    q, layer = random_problem(case, "float32", "peaked")
    lengths = Lengths(jnp.array([80, 32, 0]), jnp.array([20, 17, 2]))
    listed = ListedGroups(jnp.full((3, 2, 2), 1), jnp.array([[1, 1], [1, 1], [0, 0]]))
    one = jnp.array([1, 1, 0])
    views = {"dense": UPPER_PLANE, "listed": listed, "group": LargestMass(one, True), "token": LargestMass(one, False)}
    everything = jnp.concatenate(
        [dequantize_groups(layer.keys, layer.values, planes=2, dtype=jnp.float32)[0][:, :, 1], layer.buffer.keys], 2
    )
    # The buffer of row 1 has 17 tokens, of which the last two are the round's own.
    views["held"] = HeldKeys(everything[:, :, : 16 + 15], jnp.full(3, 31))
    views["chosen"] = ChosenTokens(jnp.zeros((3, 2, 80), bool).at[:, :, 16:32].set(True))
    found = {name: reference.covered(q, layer, lengths, view) for name, view in views.items()}
    np.testing.assert_allclose(found["dense"], 1, atol=1e-6)
    np.testing.assert_allclose(found["listed"], found["chosen"], atol=1e-6)
    np.testing.assert_allclose(found["held"][1], found["listed"][1], atol=1e-5)
    keys = {planes: np.asarray(dequantize_groups(layer.keys, layer.values, planes=planes, dtype=jnp.float32)[0]) for planes in (1, 2)}
    for row, t in ((0, 0), (0, 1), (1, 1), (2, 0)):
        quantized, buffered = int(lengths.quantized[row]), int(lengths.buffered[row]) - 1 + t
        expected = {"listed": [], "group": [], "token": []}
        for k in range(2):
            share = {}
            for planes in (1, 2):
                whole = keys[planes][row, k].reshape(-1, 16)[:quantized], np.asarray(layer.buffer.keys[row, k])[:buffered]
                logits = np.asarray(q[row, t].reshape(2, 2, 16)[k], np.float64) @ np.concatenate(whole).T / 4
                weights = np.exp(logits - logits.max(-1, keepdims=True))
                share[planes] = (weights / weights.sum(-1, keepdims=True))[:, :quantized]
            left_out = 1 - share[2].sum(-1).mean()  # the buffer's, which every view reads
            by_group = {planes: share[planes].reshape(2, -1, 16).sum(-1) for planes in share}
            pick = lambda read, weighed: weighed[:, read.sum(0).argmax()].mean() if read.size else 0
            expected["group"].append(left_out + pick(by_group[1], by_group[2]))
            expected["token"].append(left_out + pick(share[1], share[2]))
            expected["listed"].append(left_out + (by_group[2][:, 1].mean() if quantized else 0))
        for name, shares in expected.items():
            np.testing.assert_allclose(found[name][row, t], np.mean(shares), atol=1e-4, err_msg=f"{name} {row} {t}")


def test_mass_is_that_of_float32_attention(trained):
    """Each group's share for each query token, from a softmax over everything that is written down here."""
    model, cache, tokens = trained
    positions = cache.lengths.total[:, None] + jnp.arange(5)

    class Recording(type(cache)):
        def attend(self, layer, qkv, cos, sin, *, view):
            out = super().attend(layer, qkv, cos, sin, view=view)
            seen.append((split_and_rotate(qkv, cos, sin, kv_heads=model.config.num_kv_heads)[0], out[1]))
            return out

    @jax.jit
    def run():
        recording = Recording(cache.layers, cache.lengths, cache.scheme)
        logits, _, of_pass = ViewedModel(model, BOTH_PLANES).watched(tokens, positions, recording, observe=True)
        return logits, of_pass.masses, seen

    seen = []
    _, masses, seen = run()
    for (q, layer), mass in zip(seen, masses, strict=True):
        K, H = layer.keys.upper.shape[1], q.shape[-1]
        keys, _ = dequantize_groups(layer.keys, layer.values, planes=2, dtype=jnp.float32)
        for row in range(2):
            quantized, buffered = int(cache.lengths.quantized[row]), int(cache.lengths.buffered[row]) + 5
            flat = np.asarray(keys[row]).reshape(K, -1, H)[:, :quantized]
            whole = np.concatenate([flat, np.asarray(layer.buffer.keys[row])[:, :buffered]], 1)
            for t in range(5):
                heads = np.asarray(q[row, t], np.float64).reshape(K, -1, H)
                logits = np.einsum("krh,ksh->krs", heads, whole[:, : quantized + buffered - 4 + t]) * H**-0.5
                weights = np.exp(logits - logits.max(-1, keepdims=True))
                weights /= weights.sum(-1, keepdims=True)
                expected = weights[..., :quantized].reshape(K, -1, quantized // 32, 32).sum((1, 3))
                assert expected.max() > 0.1
                np.testing.assert_allclose(mass[row, :, t, : quantized // 32], expected, atol=2e-5)
                assert (np.asarray(mass[row, :, t, quantized // 32 :]) == 0).all()


def test_mass_needs_groups(trained):
    _, cache, _ = trained
    layer, q = cache.layers[0], jnp.zeros((2, 1, 4, 32))
    with pytest.raises(ValueError, match="HierarchicalLayer"):
        decode_attention(q, layer.buffer, cache.lengths, DenseView(None, observed=True))


@pytest.mark.parametrize("name", [*CACHES, *(f"{name}:host=all" for name in STREAMED)])
def test_only_a_cache_of_groups_is_observed(name):
    config = random_model("float32", num_hidden_layers=1).config
    sizes = dict(batch=1, capacity=256, num_speculative_tokens=1, dtype=jnp.dtype("float32"))
    cache = CacheConfig.parse(name, 16).empty(config, **sizes)
    refused = pytest.raises(ValueError, match="has no groups whose attention could be observed; give the cache int8")
    with contextlib.nullcontext() if name.startswith("int8") else refused:
        cache.for_pass((DenseView(2, observed=True),))
