"""Weights of quantized checkpoints that stay in 4 bits: read, converted, counted, and shared by target and draft."""

import dataclasses
import functools
import json
import logging
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simulated_devices
from checkpoints import hf_config
from conversions import bits
from quantized_checkpoints import awq, compressed, gptq, make_quantized, write_model, write_quantized
from read_checkpoints import edit_json
from tiers import in_system

from convert import convert, export, verify
from pallas_kernels.formats.weights import Int4Weight, dequantize_weight
from qspec_jax import demo, generate, make_draft
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.huggingface import Source
from qspec_jax.checkpoints.info import model_info
from qspec_jax.checkpoints.loading import config_and_dtype, load_model, planned_config
from qspec_jax.checkpoints.weights_text import WeightsChoice
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.drafts.step_bytes import weight_bytes
from qspec_jax.errors import InputError, warn_once
from qspec_jax.planning.operations import head_bytes, model_bytes, step_weight_bytes
from qspec_jax.planning.steps import own_step

Q = "model.layers.0.self_attn.q_proj."


PACKABLE = ["ct-w4-group", "ct-w4-asym", "ct-w4-channel", "awq", "gptq-v1", "gptq-v2", "gptq-channel"]


MODEL_128 = dict(hidden_size=128, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64)


def packed_weights(model) -> dict[str, Int4Weight]:
    return {path: weight for path, weight in model.weights().items() if isinstance(weight, Int4Weight)}


@pytest.mark.parametrize("name", PACKABLE)
def test_packed_weights_are_the_dequantized_ones_bit_for_bit(name, tmp_path):
    write_quantized(tmp_path / "hf", name)
    source = Source(tmp_path / "hf")
    model = load_model(tmp_path / "hf", dtype="float32", weights="packed")
    packed = packed_weights(model)
    assert len(packed) == 14 and not packed_weights(load_model(tmp_path / "hf", dtype="float32"))
    for path, weight in packed.items():
        assert np.array_equal(np.asarray(dequantize_weight(weight, jnp.float32)), source.read(path))
        scale = source.tensors[source.places[path].name].scales()
        assert weight.scale.dtype == scale.dtype and np.array_equal(np.asarray(weight.scale), scale)


def test_fused_tensors_stay_packed_in_parts(tmp_path):
    write_quantized(tmp_path / "hf", "gptq-v1", architecture="Phi3ForCausalLM", pad_token_id=None)
    source, model = Source(tmp_path / "hf"), load_model(tmp_path / "hf", dtype="float32", weights="packed")
    for path, weight in packed_weights(model).items():
        assert np.array_equal(np.asarray(dequantize_weight(weight, jnp.float32)), source.read(path))


@pytest.mark.parametrize("name", ["fp8-block", "ct-w8-channel", "gptq-v1-order", "gptq-v1-8", "nf4"])
def test_other_weights_cannot_stay_packed(name, tmp_path):
    write_quantized(tmp_path / "hf", name)
    with pytest.raises(InputError, match="no linear layer of it is stored in whole groups of 4-bit codes"):
        load_model(tmp_path / "hf", weights="packed")


def write_128(directory: Path, name: str = "ct-w4-group", group_size: int = 128, **changes) -> None:
    of_format = {"awq": functools.partial(awq, group_size=group_size), "gptq-v1": gptq(4, group_size)}
    make = of_format.get(name) or compressed(4, group_size, name == "ct-w4-group")
    config, tensors, _ = make_quantized(name, make=make, **(MODEL_128 | changes))
    settings = config["quantization_config"] = json.loads(json.dumps(config["quantization_config"]))
    (settings["config_groups"]["group_0"]["weights"] if "config_groups" in settings else settings)["group_size"] = group_size
    write_model(directory, config, tensors)


def test_weights_that_kernels_read_stay_packed_by_default(tmp_path, caplog):
    caplog.set_level("INFO", "qspec_jax.checkpoints.loading")
    write_128(tmp_path / "kernels")
    assert len(packed_weights(load_model(tmp_path / "kernels"))) == 14 and "14 of 14 stay in INT4" in caplog.text
    caplog.clear()
    for weight in packed_weights(load_model(tmp_path / "kernels")).values():
        assert {weight.scale.dtype, weight.zero.dtype} == {jnp.dtype(jnp.bfloat16)}
    assert not packed_weights(load_model(tmp_path / "kernels", weights="dequantized"))
    assert "they are dequantized to bfloat16" in caplog.text
    assert not packed_weights(load_model(tmp_path / "kernels", dtype="float32"))
    write_128(tmp_path / "groups", group_size=16)
    assert not packed_weights(load_model(tmp_path / "groups"))
    assert len(packed_weights(load_model(tmp_path / "groups", weights="packed"))) == 14


@pytest.mark.parametrize(
    ("name", "group_size", "scales"),
    [
        *(("ct-w4-asym", 32, jnp.bfloat16), ("awq", 128, jnp.float16), ("gptq-v1", 32, jnp.float16)),
        *in_system(("ct-w4-asym", 128, jnp.bfloat16), ("awq", 64, jnp.float16), ("gptq-v1", 128, jnp.float16)),
    ],
)
def test_weights_with_zero_points_and_small_groups_stay_packed_by_default(name, group_size, scales, tmp_path):
    write_128(tmp_path / "hf", name, group_size, dtype="float16")
    source, model = Source(tmp_path / "hf"), load_model(tmp_path / "hf")
    packed = packed_weights(model)
    assert len(packed) == 14 and planned_config(tmp_path / "hf").int4_weights and model.config.int4_weights
    for path, weight in packed.items():
        assert (weight.scale.dtype, weight.zero.dtype) == (scales, jnp.int16)
        assert np.array_equal(np.asarray(dequantize_weight(weight, jnp.float32)), source.read(path))
    assert not packed_weights(load_model(tmp_path / "hf", weights="dequantized"))
    config = planned_config(tmp_path / "hf")
    assert config == model.config == config_and_dtype(tmp_path / "hf")[0]
    convert(tmp_path / "hf", tmp_path / "out", progress=False)
    assert planned_config(tmp_path / "out").int4_group_size == config.int4_group_size == (None if group_size == 128 else group_size)
    assert model_bytes(dataclasses.replace(config, dtype="bfloat16")) == sum(x.nbytes for x in jax.tree.leaves(model.weights()))


def test_plans_are_of_the_weights_that_are_chosen(tmp_path, caplog):
    write_128(tmp_path / "hf")
    caplog.set_level(logging.INFO)
    write_model(tmp_path / "plain", hf_config(), {})
    for source, text in [("hf", "packed"), ("hf", "dequantized"), ("hf", "nested"), ("plain", "nested:head_bits=8")]:
        config = planned_config(tmp_path / source, WeightsChoice.parse(text))
        found = config.int4_weights, config.nested_weights, config.int8_head
        assert found == (text == "packed", text.startswith("nested"), text.endswith("=8"))
        if source == "hf":
            loaded = load_model(tmp_path / source, weights=text)
            assert model_bytes(config) == sum(x.nbytes for x in jax.tree.leaves(loaded.weights()))
    write_model(tmp_path / "tied", hf_config(tie_word_embeddings=True), {})
    head = head_bytes(planned_config(tmp_path / "tied"), 8)
    plain, with_head = (model_bytes(planned_config(tmp_path / "tied", WeightsChoice.parse(f"nested:head_bits={n}"))) for n in (16, 8))
    assert with_head == plain + head
    with pytest.raises(InputError, match="which stay in INT4; plan without packed weights"):
        planned_config(tmp_path / "plain", WeightsChoice.parse("packed"))
    planned = [line.rpartition("planned ")[2] for line in caplog.messages if "they are planned" in line]
    assert planned == ["in INT4", "as dequantized", "nested in 8 bits"]
    convert(tmp_path / "hf", tmp_path / "out", weights="nested", progress=False)
    assert planned_config(tmp_path / "out").nested_weights
    assert not planned_config(tmp_path / "out", WeightsChoice.parse("dequantized")).nested_weights
    with pytest.raises(InputError, match="its weights are stored nested; convert the checkpoint again with packed weights"):
        planned_config(tmp_path / "out", WeightsChoice.parse("packed"))


def test_plans_and_info_count_the_bytes_of_packed_weights(tmp_path):
    write_128(tmp_path / "hf")
    model, info = load_model(tmp_path / "hf"), model_info(tmp_path / "hf")
    config = planned_config(tmp_path / "hf")
    assert config.int4_weights and config == model.config == config_and_dtype(tmp_path / "hf")[0]
    assert model_bytes(config) == info.weight_bytes == sum(x.nbytes for x in jax.tree.leaves(model.weights()))
    assert model_bytes(dataclasses.replace(config, int4_weights=False)) > info.weight_bytes
    step = own_step(config, CacheConfig("full").outline(config, 64), 64)
    assert step_weight_bytes(step) == weight_bytes(model)
    write_128(tmp_path / "groups", group_size=16)
    assert not planned_config(tmp_path / "groups").int4_weights and not load_model(tmp_path / "groups").config.int4_weights


@pytest.mark.system
def test_with_simulated_devices(request):
    simulated_devices.run_those_of(request, 2)


@pytest.mark.several_devices
def test_packed_weights_are_divided_over_devices(request, tmp_path):
    """Groups of 32 inputs: those of 64 inputs are two, one on each device; of 96 they are three, which would be cut."""
    mesh = jax.sharding.Mesh(simulated_devices.devices(request, 2), ("model",))
    write_quantized(tmp_path / "hf", "gptq-v1")
    alone = load_model(tmp_path / "hf", dtype="float32", weights="packed")
    convert(tmp_path / "hf", tmp_path / "out", dtype="float32", weights="packed", progress=False)
    model = load_model(tmp_path / "hf", dtype="float32", weights="packed", mesh=mesh)
    cut = {path for path in packed_weights(alone) if "down_proj" in path}
    assert packed_weights(model).keys() == packed_weights(alone).keys() - cut and len(cut) == 2
    assert packed_weights(model)["layers.0.o_proj.weight"].codes.sharding.spec[1] == "model"
    settings = GenerationConfig(draft="quantspec:weight_bits=16", max_new_tokens=8, ignore_eos=True, group_size=8)
    tokens = [generate(each, [[1, 2, 3] * 9], config=settings).token_ids for each in (alone, model)]
    assert tokens[0] == tokens[1]
    with pytest.raises(InputError, match=r"2 devices would cut groups of layers\.0\.down_proj\.weight"):
        load_model(tmp_path / "out", mesh=mesh)
    plain = load_model(tmp_path / "hf", dtype="float32", weights="dequantized")
    assert bits(load_model(tmp_path / "out", weights="dequantized", mesh=mesh)) == bits(plain)


def test_the_draft_reads_the_targets_own_codes(tmp_path, caplog):
    write_quantized(tmp_path / "hf", "gptq-v1")
    model = load_model(tmp_path / "hf", dtype="float32", weights="packed")
    own = packed_weights(model)
    for text in ("quantspec", "sparse", "streaming-llm"):
        draft = make_draft(text, model)
        assert all(weight.codes is own[path].codes for path, weight in packed_weights(draft.step.model).items())
    warn_once.cache_clear()
    caplog.set_level("INFO", "qspec_jax")
    assert make_draft("quantspec", model, calibration=[[1, 2, 3]]).step.model is model
    assert "nothing is calibrated: the draft reads the target's own INT4 weights" in caplog.text
    path = "layers.0.q_proj.weight"
    some = model.with_weights(model.weights() | {path: dequantize_weight(own[path], jnp.float32)})
    assert packed_weights(make_draft("quantspec", some).step.model).keys() == own.keys()
    with pytest.raises(InputError, match="some of the target's layers are in INT4 already"):
        make_draft("quantspec", some, calibration=[[1, 2, 3]])


@pytest.mark.system
def test_a_draft_with_the_targets_codes_emits_its_tokens(tmp_path):
    write_quantized(tmp_path / "hf", "gptq-v1")
    model = load_model(tmp_path / "hf", dtype="float32", weights="packed")
    settings = dict(max_new_tokens=24, ignore_eos=True, group_size=8)
    out = generate(model, [[1, 2, 3] * 9], config=GenerationConfig(draft="quantspec", **settings))
    alone = generate(model, [[1, 2, 3] * 9], config=GenerationConfig(draft="none", **settings))
    assert out.token_ids == alone.token_ids


@pytest.mark.system
def test_packed_weights_are_converted_and_verified(tmp_path):
    write_quantized(tmp_path / "hf", "awq")
    source, out = tmp_path / "hf", tmp_path / "out"
    report = convert(source, out, weights="packed", progress=False)
    assert report.packed == sum(isinstance(weight, Int4Weight) for weight in load_model(out).weights().values()) > 0
    assert not verify(source, out, logits=True, progress=False).wrong
    assert bits(load_model(out)) == bits(load_model(source, weights="packed"))
    assert bits(load_model(out, weights="dequantized")) == bits(load_model(source, weights="dequantized"))
    assert not convert(source, tmp_path / "plain", weights="dequantized", progress=False).packed
    whole, packed = model_info(tmp_path / "plain"), model_info(out)
    of_source = model_info(source)
    assert packed == dataclasses.replace(of_source, quantization=None, linear_layers=packed.linear_layers)
    assert of_source.linear_layers == f"AWQ, {packed.linear_layers}"
    assert packed.parameters == whole.parameters and packed.draft_weight_bytes < whole.draft_weight_bytes
    assert packed.weight_bytes == sum(x.nbytes for x in jax.tree.leaves(load_model(out).weights())) < whole.weight_bytes
    with pytest.raises(InputError, match="in INT4, which export does not write"):
        export(out, tmp_path / "exported", progress=False)
    with pytest.raises(InputError, match="--draft-bits 16"):
        convert(source, tmp_path / "both", weights="packed", draft_bits=4, progress=False)
    with pytest.raises(InputError, match="stored dequantized"):
        load_model(tmp_path / "plain", weights="packed")
    with pytest.raises(InputError, match="should be one of packed, dequantized, nested"):
        load_model(source, weights="both")
    with pytest.raises(InputError, match="head_bits 4 should be 8 or 16"):
        load_model(source, weights="packed:head_bits=4")
    with pytest.raises(InputError, match="give head_bits where the directory is loaded"):
        convert(source, tmp_path / "head", weights="packed:head_bits=8", progress=False)
    # A code that changed.
    raw = json.loads((source / "config.json").read_text())
    _, tensors, _ = make_quantized("awq")
    tensors[Q + "qweight"] = tensors[Q + "qweight"] ^ 1
    write_model(tmp_path / "other", raw, tensors)
    assert any("q_proj" in line for line in verify(tmp_path / "other", out, progress=False).wrong)


@pytest.mark.system
def test_commands_take_weights(tmp_path, run, fails, caplog):
    config, tensors, _ = make_quantized("awq", vocab_size=4096, num_hidden_layers=1)
    write_model(tmp_path / "hf", config, tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, tmp_path / "hf")
    arguments = ("generate", "--model", tmp_path / "hf", "--prompt", "import", "--max-new-tokens", "2", "--draft", "none")
    for weights, said in (("packed", "7 of 7 stay in INT4"), ("dequantized", "they are dequantized to bfloat16")):
        caplog.clear()
        code, _, _ = run(*arguments, "--weights", weights)
        assert code == 0 and said in caplog.text
    code, _, _ = run("convert", tmp_path / "hf", tmp_path / "out", "--weights", "packed", "--json")
    assert code == 0 and packed_weights(load_model(tmp_path / "out"))
    for command in (("info", tmp_path / "hf"), ("doctor", "--model", tmp_path / "hf")):
        code, out, _ = run(*command)
        assert code == 0 and re.search(r"^linear layers +AWQ, 7 of 7 stay in INT4 *$", out, re.M)
    assert re.search(r"^linear layers +7 of 7 stay in INT4 *$", run("info", tmp_path / "out")[1], re.M)
    caplog.clear()
    assert run("plan", "--model", tmp_path / "hf", "--draft", "quantspec")[0] == 0 and "(AWQ); they are planned in INT4" in caplog.text
    edit_json(tmp_path / "hf" / "config.json", lambda raw: raw["quantization_config"].update(bits=3))
    fails(arguments, "bits of the AWQ quantization is 3")
