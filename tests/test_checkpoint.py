"""Loading checkpoint directories: what is stored arrives unchanged."""

import itertools
import json
import logging
import os
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import MODEL_TYPES, hf_config, random_tensors, write_checkpoint
from read_checkpoints import INDEX, edit_json, loaded, refused
from safetensors.numpy import load_file, save_file
from tiers import in_system

from convert import convert, verify
from qspec_jax.checkpoints.huggingface import load_config
from qspec_jax.checkpoints.info import model_info
from qspec_jax.checkpoints.loading import load, load_model
from qspec_jax.checkpoints.source import all_finite
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.run_identity import of_checkpoint
from qspec_jax.errors import InputError

LLAMA, _, QWEN2, QWEN3 = MODEL_TYPES


# What arrives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config",
    [
        hf_config(LLAMA, attention_bias=True, mlp_bias=True),
        hf_config(QWEN2, tie_word_embeddings=True),
        hf_config(QWEN3, attention_bias=True),
    ],
    ids=["llama", "qwen2-tied", "qwen3"],
)
def test_every_tensor_arrives_bit_for_bit(config, dtype, shards, tmp_path):
    model = load_model(write_checkpoint(tmp_path, config | {"dtype": dtype}, dtype=dtype, shards=shards))
    stored, weights = random_tensors(config, dtype=dtype), loaded(model)
    assert weights.keys() == stored.keys()
    for name, tensor in stored.items():
        assert weights[name].dtype == tensor.dtype and weights[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize("wanted", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_are_converted(stored, wanted, tmp_path):
    config = hf_config(dtype=stored)
    directory = write_checkpoint(tmp_path, config, dtype=stored)
    with jax.enable_x64(True):
        weights = loaded(load_model(directory, dtype=wanted))
    kind = ml_dtypes.bfloat16 if wanted == "bfloat16" else wanted
    for name, tensor in random_tensors(config, dtype=stored).items():
        assert weights[name].dtype == kind and np.array_equal(weights[name], tensor.astype(kind)), name


def test_mixed_dtypes_become_the_config_s(tmp_path):
    tensors = random_tensors(hf_config(), dtype="bfloat16")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    model = load_model(write_checkpoint(tmp_path, hf_config(dtype="bfloat16"), tensors=tensors))
    assert {weight.dtype for weight in loaded(model).values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_float16_becomes_bfloat16_with_a_warning(tmp_path, caplog):
    directory = write_checkpoint(tmp_path, hf_config(dtype="float16"), dtype="float16")
    with caplog.at_level(logging.WARNING):
        assert load_model(directory).dtype == ml_dtypes.bfloat16
    assert "float16" in caplog.text and "bfloat16" in caplog.text
    caplog.clear()
    assert load_model(directory, dtype="float32").dtype == np.float32
    assert not caplog.text


@pytest.mark.parametrize("dtype", ["float16", "int8", "float33"])
def test_other_dtypes_are_refused(dtype, tmp_path):
    with pytest.raises(InputError, match=dtype):
        load_model(write_checkpoint(tmp_path, hf_config()), dtype=dtype)


def test_float64_needs_64_bit_jax(tmp_path):
    directory = write_checkpoint(tmp_path, hf_config(dtype="float64"), dtype="float64")
    with jax.enable_x64(False), pytest.raises(InputError, match="float64 needs 64-bit JAX"):
        load_model(directory)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_numbers_that_are_not_finite(dtype):
    finite = np.linspace(-1, 1, (1 << 17) + 3).astype(dtype)
    largest = np.asarray(ml_dtypes.finfo(finite.dtype).max, finite.dtype)
    for value, expected in ((largest, True), (-largest, True), (np.inf, False), (-np.inf, False), (np.nan, False)):
        for at in (0, len(finite) - 1):
            changed = finite.copy()
            changed[at] = value
            assert all_finite(changed.reshape(-1, 5) if len(changed) % 5 == 0 else changed) == expected
    assert all_finite(finite[:0])


def test_weights_that_are_not_finite_are_named(tmp_path, caplog):
    tensors = random_tensors(hf_config())
    for name, value in (("lm_head.weight", np.nan), ("model.layers.1.mlp.up_proj.weight", -np.inf)):
        tensors[name] = tensors[name].copy()
        tensors[name][3, 5] = value
    directory = write_checkpoint(tmp_path / "hf", hf_config(), tensors=tensors)
    said = f"{directory}: 2 tensors hold numbers that are not finite: lm_head.weight, model.layers.1.mlp.up_proj.weight"
    for reads in (load_model, lambda source: convert(source, tmp_path / "out"), lambda source: verify(source, tmp_path / "out")):
        caplog.clear()
        reads(directory)
        assert [record.getMessage() for record in caplog.records if "finite" in record.getMessage()] == [said]


def test_buffers_of_old_checkpoints_are_ignored(tmp_path):
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(32, np.float32) for i in range(2)}
    buffers["model.rotary_emb.inv_freq"] = np.ones(32, np.float32)
    load_model(write_checkpoint(tmp_path, hf_config(), tensors=random_tensors(hf_config()) | buffers))


# Tied embeddings: by what the config says and what the checkpoint holds ------------------------------------------------


def test_tied_with_an_equal_head(tmp_path):
    config = hf_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert load_model(write_checkpoint(tmp_path, config, tensors=tensors)).head is None


def test_tied_with_a_head_that_differs(tmp_path):
    tensors = random_tensors(hf_config())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][-1, -1] += 1e-6
    refused(write_checkpoint(tmp_path, hf_config(tie_word_embeddings=True), tensors=tensors), "tie_word_embeddings", "lm_head.weight")


@pytest.mark.parametrize("tied", [False, ...])
def test_untied_without_a_head(tied, tmp_path):
    tensors = random_tensors(hf_config(tie_word_embeddings=True))
    directory = write_checkpoint(tmp_path, hf_config(tie_word_embeddings=tied), tensors=tensors)
    refused(directory, "missing lm_head.weight", "not tied")


# Which files, which names ---------------------------------------------------------------------------------------------


def _beside_shards(directory: Path) -> tuple[dict, dict]:
    """A whole file beside shards of other weights with their index. Returns the tensors of the file and of the shards."""
    write_checkpoint(directory, hf_config(), shards=3, seed=1)
    write_checkpoint(directory, hf_config())
    return random_tensors(hf_config()), random_tensors(hf_config(), seed=1)


def test_a_whole_file_goes_before_an_index_with_a_warning(tmp_path, caplog):
    whole, _ = _beside_shards(tmp_path)
    weights = loaded(load_model(tmp_path))
    assert all(np.array_equal(weights[name], whole[name]) for name in whole)
    load_model(tmp_path)
    assert (
        caplog.text.count("model.safetensors is read") == 1 and INDEX in caplog.text and "model-00003-of-00003.safetensors" in caplog.text
    )
    before = of_checkpoint(tmp_path)
    (tmp_path / "model-00001-of-00003.safetensors").write_bytes(b"")
    (tmp_path / INDEX).write_text("{")
    assert of_checkpoint(tmp_path) == before and load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert of_checkpoint(tmp_path) != before


def test_an_index_that_names_the_whole_file_is_nothing_to_warn_of(tmp_path, caplog):
    write_checkpoint(tmp_path, hf_config())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(random_tensors(hf_config()), "model.safetensors")}))
    load_model(tmp_path)
    assert not caplog.text


@pytest.mark.parametrize("named", [INDEX, "model-00001-of-00001.safetensors"])
def test_the_config_may_name_the_weights(named, tmp_path):
    whole, other = _beside_shards(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(transformers_weights=named)))
    save_file(other, tmp_path / "model-00001-of-00001.safetensors")
    weights = loaded(load_model(tmp_path))
    assert all(np.array_equal(weights[name], other[name]) for name in whole)


@pytest.mark.parametrize("named", ["../model.safetensors", "/model.safetensors", "pytorch_model.bin", 3, ""])
def test_the_config_names_only_safetensors_in_the_directory(named, tmp_path):
    refused(write_checkpoint(tmp_path, hf_config(transformers_weights=named)), "transformers_weights", repr(named))


def test_shards_in_a_folder(tmp_path):
    write_checkpoint(tmp_path, hf_config(), shards=2)
    shard = "model-00002-of-00002.safetensors"
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / shard).rename(tmp_path / "deep" / "er" / shard)
    move = lambda index: index["weight_map"].update({k: f"deep/er/{shard}" for k, v in index["weight_map"].items() if v == shard})
    edit_json(tmp_path / INDEX, move)
    assert loaded(load_model(tmp_path)).keys() == random_tensors(hf_config()).keys()
    before = of_checkpoint(tmp_path)
    os.utime(tmp_path / "deep" / "er" / shard, (1, 1))
    assert of_checkpoint(tmp_path) != before


UNNAMED = ({}, {"dtype": None}, {"dtype": None, "torch_dtype": None})
READ_AS = (("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", "bfloat16"))


@pytest.mark.parametrize(
    ("stored", "read", "named"),
    [
        *((*READ_AS[i], UNNAMED[i]) for i in range(3)),
        *in_system(*((*READ_AS[i], UNNAMED[j]) for i, j in itertools.permutations(range(3), 2))),
    ],
    ids=str,
)
def test_without_a_dtype_it_is_that_of_the_tensors(stored, read, named, tmp_path):
    for shards in (1, 2):
        source = write_checkpoint(tmp_path / f"{shards}", hf_config(dtype=...) | named, dtype=stored, shards=shards)
        assert load_model(source).dtype == read and load_config(source).dtype == stored
        convert(source, tmp_path / f"out{shards}")
        assert verify(source, tmp_path / f"out{shards}", logits=False).wrong == []
        assert load_model(tmp_path / f"out{shards}").dtype == read and model_info(tmp_path / f"out{shards}").dtype == read
    edit_json(source / INDEX, lambda index: index["metadata"].update(dtype="torch.float32"))
    assert load_config(source).dtype == "float32"


def test_without_a_dtype_and_without_weights_it_is_float32(tmp_path):
    (write_checkpoint(tmp_path, hf_config(dtype=...), dtype="bfloat16") / "model.safetensors").unlink()
    assert load_config(tmp_path).dtype == "float32"


TIED = hf_config(tie_word_embeddings=True)


def test_tied_with_the_head_alone(tmp_path):
    tensors = random_tensors(TIED)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    for shards in (1, 2):
        model = load_model(write_checkpoint(tmp_path / str(shards), TIED, tensors=tensors, shards=shards))
        assert model.head is None and np.array_equal(model.weights()["embedding"], tensors["lm_head.weight"])
    del tensors["lm_head.weight"]
    refused(write_checkpoint(tmp_path / "neither", TIED, tensors=tensors), "missing model.embed_tokens.weight")


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"])
@pytest.mark.parametrize("where", ["index", "shard"])
def test_what_is_not_read_may_be_in_the_index_or_a_shard_alone(name, where, tmp_path):
    write_checkpoint(tmp_path, TIED, shards=2)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    if where == "index":
        edit_json(tmp_path / INDEX, lambda index: index["weight_map"].update({name: shard.name}))
    else:
        extra = random_tensors(TIED)["model.embed_tokens.weight"] if name == "lm_head.weight" else np.ones(32, np.float32)
        save_file(load_file(shard) | {name: extra}, shard)
    assert loaded(load_model(tmp_path)).keys() == random_tensors(TIED).keys()


@pytest.mark.parametrize("where", ["index", "shard"])
def test_a_head_that_is_not_tied_is_in_both(where, tmp_path):
    write_checkpoint(tmp_path, hf_config(), shards=2)
    holder = json.loads((tmp_path / INDEX).read_text())["weight_map"]["lm_head.weight"]
    if where == "index":
        save_file({k: v for k, v in load_file(tmp_path / holder).items() if k != "lm_head.weight"}, tmp_path / holder)
    else:
        edit_json(tmp_path / INDEX, lambda index: index["weight_map"].pop("lm_head.weight"))
    refused(tmp_path, INDEX, "lm_head.weight")


@pytest.mark.parametrize("architecture", [QWEN3, "Phi3ForCausalLM"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_model_that_was_saved_without_its_head(shards, architecture, tmp_path):
    base = architecture.replace("ForCausalLM", "Model")
    config = hf_config(architecture, tie_word_embeddings=True, architectures=[base], head_dim=16)
    stored = random_tensors(config | {"architectures": [architecture]})
    tensors = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    weights = loaded(load_model(write_checkpoint(tmp_path / "tied", config, tensors=tensors, shards=shards)))
    assert weights.keys() == stored.keys() and all(np.array_equal(weights[name], stored[name]) for name in stored)
    untied = config | {"tie_word_embeddings": False}
    directory = write_checkpoint(tmp_path / "untied", untied, tensors=tensors, shards=shards)
    refused(directory, "missing lm_head.weight", "saved without its head")
    whole = tensors | {"lm_head.weight": stored["model.embed_tokens.weight"]}
    assert load_model(write_checkpoint(tmp_path / "whole", untied, tensors=whole, shards=shards)).head is not None


def test_a_tensor_under_both_names_may_be_the_same(tmp_path):
    tensors = random_tensors(hf_config())
    write_checkpoint(tmp_path, hf_config(), tensors=tensors | {"norm.weight": tensors["model.norm.weight"]})
    assert loaded(load_model(tmp_path)).keys() == tensors.keys()
    write_checkpoint(tmp_path, hf_config(), tensors=tensors | {"norm.weight": tensors["model.norm.weight"] + 1})
    refused(tmp_path, "model.norm.weight", "differs")


# Config and tokenizer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("generation", "ids"), [({"eos_token_id": [5, 6]}, (5, 6)), ({"eos_token_id": 7}, (7,)), ({}, (2,)), (None, (2,))])
def test_eos_of_generation_config_wins(generation, ids, tmp_path):
    write_checkpoint(tmp_path, hf_config(eos_token_id=2))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_config(tmp_path).eos_token_ids == load_model(tmp_path).config.eos_token_ids == ids


def test_no_tokenizer(tmp_path):
    refused(write_checkpoint(tmp_path, hf_config()), "tokenizer.json", read=load_tokenizer)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]"])
def test_a_broken_tokenizer(content, tmp_path):
    (write_checkpoint(tmp_path, hf_config()) / "tokenizer.json").write_text(content)
    refused(tmp_path, "no tokenizer that transformers can read", read=load_tokenizer)


def test_a_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models

    write_checkpoint(tmp_path, hf_config())
    Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    model, tokenizer = load(tmp_path)
    assert tokenizer.encode("abba") == [0, 1, 1, 0] and model.config.vocab_size == 64
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((tmp_path / name).read_text(), encoding="utf-8-sig")  # with a byte order mark
    assert load(tmp_path)[1].encode("abba") == [0, 1, 1, 0]


@pytest.mark.parametrize("marked", ["config.json", "tokenizer_config.json", "additional_chat_templates/b.jinja", "tokenizer.1.0.0.json"])
def test_a_byte_order_mark_changes_nothing_else(marked, tmp_path):
    """Neither the chat templates beside the well-known files, nor the tokenizer of a certain version of transformers."""
    from tokenizers import Tokenizer, models

    write_checkpoint(tmp_path, hf_config())
    (tmp_path / "additional_chat_templates").mkdir()
    for name, vocabulary in {"tokenizer.json": {"a": 1, "b": 0}, "tokenizer.1.0.0.json": {"a": 0, "b": 1}}.items():
        Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(tmp_path / name))
    of_versions = {"tokenizer_class": "PreTrainedTokenizerFast", "fast_tokenizer_files": ["tokenizer.1.0.0.json", "tokenizer.json"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(of_versions))
    for name in ("chat_template", "additional_chat_templates/a", "additional_chat_templates/b"):
        (tmp_path / f"{name}.jinja").write_text(name)
    plain = load_tokenizer(tmp_path)
    assert plain.encode("ab") == [0, 1] and sorted(plain.chat_template) == ["a", "b", "default"]
    (tmp_path / marked).write_text((tmp_path / marked).read_text(), encoding="utf-8-sig")
    found = load_tokenizer(tmp_path)
    assert (found.encode("ab"), found.chat_template) == ([0, 1], plain.chat_template)
