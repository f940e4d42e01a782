"""The embedding in INT8, of targets that are loaded so: a model's own, or its head too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import hf_config, write_checkpoint
from runs import random_model, with_draft

from pallas_kernels.formats.weights import Int8Weight
from qspec_jax.checkpoints.loading import load_model, outline_model, planned_config
from qspec_jax.checkpoints.weights_text import WeightsChoice
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.reading import prefill
from qspec_jax.decoding.saving import load_state, save_state
from qspec_jax.drafts import make_draft
from qspec_jax.errors import InputError
from qspec_jax.planning.operations import model_bytes
from qspec_jax.quantization.weights import quantize_embedding, quantize_head, quantize_rows


@pytest.mark.parametrize("tied", [True, False])
def test_its_rows_are_those_of_codes_and_scales(tied):
    """In the model's dtype; all else is the same arrays."""
    model = random_model(jnp.bfloat16, tie_word_embeddings=tied)
    found, tokens = quantize_embedding(model), jnp.array([[3, 0, 63]])
    table, plain = found.weights()["embedding"], model.weights()
    np.testing.assert_array_equal(table.codes, quantize_rows(plain["embedding"]).codes)
    assert found.weights().keys() == plain.keys() and all(found.weights()[path] is plain[path] for path in plain.keys() - {"embedding"})
    assert found.dtype == jnp.bfloat16 and found.embed(tokens).dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.embed(tokens), (table.codes * table.scale[:, None]).astype(jnp.bfloat16)[tokens])
    error = jnp.linalg.norm((found.embed(tokens) - model.embed(tokens)).astype(jnp.float32))
    assert 0 < error < 0.01 * jnp.linalg.norm(model.embed(tokens).astype(jnp.float32))
    c = found.checkpoint_config
    assert (c.int8_embedding, c.int8_head, c.tie_word_embeddings) == (True, tied, tied)
    assert quantize_embedding(found) is found and (quantize_head(found) is found) == tied


@pytest.mark.parametrize("tied", [False, True])
def test_a_target_that_is_loaded_so(tied, tmp_path, caplog):
    directory = tmp_path / "hf"
    write_checkpoint(directory, hf_config(tie_word_embeddings=tied, num_hidden_layers=1))
    caplog.set_level("INFO", "qspec_jax")
    weights = "nested:head_bits=8,embedding_bits=8"
    model, plain = (load_model(directory, dtype="bfloat16", weights=text) for text in (weights, "nested"))
    assert "its embedding is put into INT8" in caplog.text and "its head is put into INT8" in caplog.text
    assert isinstance(model.weights()["embedding"], Int8Weight) and ("head" in model.weights()) != tied
    # Counted, planned and outlined as it is.
    found, outlined = (sum(x.nbytes for x in jax.tree.leaves(each.weights())) for each in (model, plain))
    V, D = plain.weights()["embedding"].shape
    assert outlined - found == (1 if tied else 2) * V * (D - 4)
    assert model_bytes(model.checkpoint_config) == found
    assert model_bytes(planned_config(directory, WeightsChoice.parse(weights))) == found
    shapes = outline_model(directory, dtype="bfloat16", weights=weights)
    assert jax.tree.map(jnp.shape, shapes.weights()) == jax.tree.map(jnp.shape, model.weights())
    # The draft, which has it too, proposes for this very target.
    config = GenerationConfig(draft="quantspec", max_new_tokens=24, ignore_eos=True, group_size=8)
    out, alone = (generate(model, [[1, 2, 3] * 9], config=with_draft(config, draft)) for draft in ("quantspec", "none"))
    assert out.token_ids == alone.token_ids
    # It is another model's state.
    with pytest.raises(InputError, match="made by another model"):
        generate(plain, [prefill(model, [1, 2, 3] * 9, config=config)], config=config)


def test_what_it_is_refused_for(tmp_path):
    write_checkpoint(tmp_path / "hf", hf_config(tie_word_embeddings=True, num_hidden_layers=1))
    for load in (load_model, outline_model):
        with pytest.raises(InputError, match="its embedding is its head too; give head_bits=8 beside embedding_bits=8, or neither"):
            load(tmp_path / "hf", weights="dequantized:embedding_bits=8")
    with pytest.raises(InputError, match="embedding_bits 4 should be 8 or 16"):
        load_model(tmp_path / "hf", weights="nested:embedding_bits=4")


def test_an_eagle3_head_reads_it():
    """As its own, where it has none."""
    target = quantize_embedding(random_model(jnp.float32, tie_word_embeddings=False))
    draft = make_draft("eagle3:model=random,window=20", target)
    assert draft.head.embedding.get_value().codes is target.embedding.get_value().codes
    config = GenerationConfig(draft=draft, cache="int8", group_size=16, max_new_tokens=24, num_speculative_tokens=3, ignore_eos=True)
    out, alone = (generate(target, [[1, 2, 3] * 9], config=with_draft(config, each)) for each in (draft, "none"))
    assert out.token_ids == alone.token_ids


def test_a_state_of_such_a_model_is_saved(tmp_path):
    target, prompt = quantize_embedding(random_model(jnp.float32, tie_word_embeddings=False)), [1, 2, 3] * 9
    config = GenerationConfig(draft="none", cache="int8", group_size=8, max_new_tokens=8, ignore_eos=True)
    save_state(prefill(target, prompt, config=config), tmp_path / "state")
    state = load_state(tmp_path / "state", target)
    assert generate(target, [state], config=config).token_ids == generate(target, [prompt], config=config).token_ids
