"""The head in INT8, which drafts have, and targets that are loaded so."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import hf_config, write_checkpoint
from runs import random_model, with_draft

from pallas_kernels.formats.views import BOTH_PLANES, UPPER_PLANE
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.drafts import make_draft, quantspec
from qspec_jax.drafts.step_bytes import weight_bytes
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.planning.operations import model_bytes, step_weight_bytes
from qspec_jax.planning.steps import own_step
from qspec_jax.quantization.outline import outline
from qspec_jax.quantization.weights import quantize_head, quantize_rows


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_int8_is_the_drafts_own(tied):
    model = random_model(jnp.float32, tie_word_embeddings=tied)
    before, after = model.weights(), quantize_head(model).weights()
    assert after.keys() == before.keys() | {"head"} and all(after[path] is before[path] for path in after.keys() - {"head"})
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, model.config.hidden_size)), jnp.float32)
    exact, found = model.logits(x), quantize_head(model).logits(x)
    assert found.dtype == exact.dtype
    assert 0 < float(jnp.linalg.norm(found - exact)) < 0.01 * float(jnp.linalg.norm(exact))


def test_heads_of_drafts(monkeypatch):
    model = random_model(jnp.float32, tie_word_embeddings=False)
    mine = model.weights()["head"]
    drafts = [quantspec(model), quantspec(model, head_bits=16), quantspec(model, weight_bits=16)]
    # Kept in the model's own precision, and on a CPU used so.
    assert all(draft.step.model.weights()["head"] is mine for draft in drafts)
    assert all(draft.in_loop().step is draft.step for draft in drafts)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    first, *others = [draft.in_loop().step for draft in drafts]
    np.testing.assert_array_equal(first.model.weights()["head"].codes, quantize_rows(mine).codes)
    assert others == [draft.step for draft in drafts[1:]]
    with pytest.raises(InputError, match="head_bits 4 should be 8 or 16"):
        quantspec(model, head_bits=4)


def test_two_drafts_of_the_same_weights_share_their_head(monkeypatch):
    """In the loop too, where it is made; one that wants its own precision keeps that."""
    model = random_model(jnp.float32, tie_word_embeddings=False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    head = lambda draft: draft.step.model.weights()["head"]
    shared = make_draft("combine:sparse+(quantspec:cache=int8)", model).in_loop()
    assert head(shared.first).codes is head(shared.second).codes
    assert [draft.step.view for draft in (shared.first, shared.second)] == [UPPER_PLANE, BOTH_PLANES]
    for text, wide in (("combine:(quantspec:head_bits=16)+sparse", 0), ("combine:sparse+(quantspec:weight_bits=16)", 1)):
        own = make_draft(text, model).in_loop()
        heads = head(own.first), head(own.second)
        assert heads[wide] is model.weights()["head"] and heads[1 - wide].codes.dtype == jnp.int8


@pytest.mark.system
def test_the_loops_draft_has_its_head_in_int8(monkeypatch):
    model = random_model(jnp.float32, tie_word_embeddings=False)
    weights = model.weights()
    # What all logits have in common changes no probability, but with it 8 bits have little left for anything else.
    weights["head"] = weights["head"].at[:, 0].set(100)
    model = Llama(model.config, lambda path, shape: weights[path])
    prompt = [np.random.default_rng(0).integers(model.config.vocab_size, size=70).tolist()]
    config = GenerationConfig(draft="quantspec", max_new_tokens=60, num_speculative_tokens=3, ignore_eos=True)
    draft = quantspec(model)
    in_loop = lambda draft: dataclasses.replace(draft, step=ViewedModel(quantize_head(draft.step.model), draft.step.view))
    monkeypatch.setattr(type(draft), "in_loop", in_loop)
    loop = generate(model, prompt, config=with_draft(config, draft)).stats.draft_acceptance_rate
    monkeypatch.undo()
    assert loop < 0.5 * generate(model, prompt, config=with_draft(config, draft)).stats.draft_acceptance_rate


@pytest.mark.parametrize("tied", [False, True])
def test_a_target_with_its_head_in_int8(tied, tmp_path, caplog, monkeypatch):
    write_checkpoint(tmp_path / "hf", hf_config(tie_word_embeddings=tied, num_hidden_layers=1))
    caplog.set_level("INFO", "qspec_jax")
    model = load_model(tmp_path / "hf", dtype="float32", weights="dequantized:head_bits=8")
    assert "its head is put into INT8" in caplog.text
    plain = load_model(tmp_path / "hf", dtype="float32")
    head = (plain.embedding if tied else plain.head).get_value()
    np.testing.assert_array_equal(model.head.get_value().codes, quantize_rows(head).codes)
    np.testing.assert_array_equal(model.embedding.get_value(), plain.embedding.get_value())
    # Counted, and read by the draft too.
    V, D = head.shape
    assert model_bytes(model.config) - model_bytes(plain.config) == V * (D + 4) - (0 if tied else 2 * V * D)
    step = own_step(model.config, CacheConfig("full").outline(model.config, 64), 64)
    assert (step.head_bits, step_weight_bytes(step)) == (8, weight_bytes(outline(model.config)))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert make_draft("quantspec", model).in_loop().step.model.head.get_value().codes is model.head.get_value().codes
    monkeypatch.undo()
    settings = dict(max_new_tokens=24, ignore_eos=True, group_size=8)
    out, alone = (generate(model, [[1, 2, 3] * 9], config=GenerationConfig(draft=draft, **settings)) for draft in ("quantspec", "none"))
    assert out.token_ids == alone.token_ids
