"""Quantized checkpoints: each format's weights bit for bit, also when it was converted, and what is refused."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import simulated_devices
from conversions import bits
from quantized_checkpoints import FORMATS, GROUP, compressed, make_quantized, words, write_quantized, write_safetensors
from read_checkpoints import edit_json, loaded, refused
from safetensors.numpy import load_file

from convert import convert, export, verify
from pallas_kernels.formats.weights import Int4Weight, dequantize_weight
from qspec_jax import demo, generate, make_draft
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.huggingface import Source, load_config
from qspec_jax.checkpoints.info import model_info
from qspec_jax.checkpoints.loading import config_and_dtype, load_model, planned_config
from qspec_jax.checkpoints.quantized import tensor as quantized
from qspec_jax.checkpoints.quantized.awq import AwqTensor
from qspec_jax.checkpoints.quantized.bitsandbytes import Nf4Tensor
from qspec_jax.checkpoints.quantized.compressed_tensors import PackedTensor
from qspec_jax.checkpoints.quantized.fp8 import fp8_tensor
from qspec_jax.checkpoints.quantized.gptq import GptqTensor
from qspec_jax.checkpoints.safetensors_file import read_header
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.drafts.step_bytes import weight_bytes
from qspec_jax.errors import InputError
from qspec_jax.planning.operations import model_bytes, step_weight_bytes
from qspec_jax.planning.steps import own_step

ONE_OF_EACH = ["fp8-block", "ct-w4-asym", "awq", "gptq-v1", "nf4"]


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name].astype(np.float32)) for name in wanted)


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_each_weight_is_the_one_that_its_tensors_mean(name, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "DEQUANTIZED", 1000)  # a few rows at a time
    plain = write_quantized(tmp_path / "hf", name)
    model = load_model(tmp_path / "hf", dtype="float32")
    assert same(loaded(model), plain)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_fused_tensors_are_split(name, tmp_path):
    plain = write_quantized(tmp_path / "hf", name, architecture="Phi3ForCausalLM", pad_token_id=None)
    assert any("qkv_proj" in path for path in plain)
    assert same(loaded(load_model(tmp_path / "hf", dtype="float32")), plain)


def test_a_weight_is_rounded_once(tmp_path):
    plain = write_quantized(tmp_path / "hf", "gptq-v1")
    found = load_model(tmp_path / "hf").weights()["layers.0.q_proj.weight"]
    wanted = plain["model.layers.0.self_attn.q_proj.weight"].astype(ml_dtypes.bfloat16)
    assert found.dtype == jnp.bfloat16 and np.array_equal(np.asarray(found), wanted)


def stored(tmp_path: Path, tensors: dict[str, np.ndarray]) -> dict:
    write_safetensors(tmp_path / "x.safetensors", tensors)
    return read_header(tmp_path / "x.safetensors")


def test_gptqs_zero_point_of_0_borrows_from_the_others(tmp_path):
    """Zero points 0 to 7 less 0x11111111: a borrow runs through the word."""
    zeros = np.array([[0x76543210 - 0x11111111]], np.uint32).view(np.int32)
    assert zeros[0, 0] == 0x654320FF
    parts = {"qweight": np.zeros((1, 8), np.int32), "qzeros": zeros, "scales": np.ones((1, 8), np.float16)}
    tensor = GptqTensor("m", (8, 8), stored(tmp_path, parts), 4, 8)
    assert tensor.zero_points()[:, 0].tolist() == list(range(8))
    assert tensor.read()[:, 0].tolist() == [-float(i) for i in range(8)]


def test_awqs_outputs_have_an_order_of_their_own(tmp_path):
    word = np.array([[0x75316420]], np.int32)  # of outputs that are their own number
    parts = {"qweight": word.repeat(8, 0), "qzeros": np.zeros((1, 1), np.int32), "scales": np.ones((1, 8), np.float16)}
    tensor = AwqTensor("m", (8, 8), stored(tmp_path, parts), 4, 8)
    assert tensor.read()[:, 3].tolist() == list(range(8))
    assert tensor.read(3, 2)[:, 0].tolist() == [3, 4]


def test_zero_points_of_compressed_tensors_are_packed_along_the_outputs(tmp_path):
    zeros = np.array([[0x76543210, 0x11111111]], np.int32)  # [1, 2]: of 8 outputs and 2 groups
    scales, shape = np.ones((8, 2), np.float32), np.array([8, 8])
    parts = {"weight_packed": np.zeros((8, 1), np.int32), "weight_scale": scales, "weight_zero_point": zeros, "weight_shape": shape}
    tensor = PackedTensor("m", (8, 8), stored(tmp_path, parts), 4, 4)
    assert tensor.read()[:, 0].tolist() == [-float(i) for i in range(8)] and (tensor.read()[:, 4:] == -1).all()


def test_partial_blocks_of_fp8_begin_at_multiples_of_the_block(tmp_path):
    codes, scales = np.ones((6, 6), ml_dtypes.float8_e4m3fn), np.array([[1, 2], [3, 4]], np.float32)
    tensor = fp8_tensor("m", (6, 6), stored(tmp_path, {"weight": codes, "s": scales}), "s", (4, 4))
    assert tensor.read().tolist() == [[1] * 4 + [2] * 2] * 4 + [[3] * 4 + [4] * 2] * 2
    assert tensor.read(3, 2).tolist() == [[1] * 4 + [2] * 2, [3] * 4 + [4] * 2]


def test_maxima_of_nf4_run_over_the_flat_weight(tmp_path):
    """Blocks of 4 in rows of 6; the high nibble comes first; rows of odd numbers of inputs begin within a byte."""
    table = np.arange(16, dtype=np.float32)
    parts = {"weight": np.full((6, 1), 0x12, np.uint8), "weight.quant_map": table, "weight.absmax": np.array([1, 10, 100], np.float32)}
    tensor = Nf4Tensor("m", (2, 6), stored(tmp_path, parts), 4, None, 0.0)
    assert tensor.read().tolist() == [[1, 2, 1, 2, 10, 20], [10, 20, 100, 200, 100, 200]]
    odd = Nf4Tensor("m", (4, 3), tensor.parts, 4, None, 0.0)
    assert odd.read(1, 2).tolist() == [[2, 10, 20], [10, 20, 100]]


# Dispatch and what is left out ----------------------------------------------------------------------------------------


def test_gptq_without_a_version_is_the_first(tmp_path):
    directory = tmp_path / "hf"
    plain = write_quantized(directory, "gptq-v1")
    edit_json(directory / "config.json", lambda raw: raw["quantization_config"].pop("checkpoint_format"))
    assert same(loaded(load_model(directory, dtype="float32")), plain)
    edit_json(directory / "config.json", lambda raw: raw.pop("quantization_config"))
    (directory / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": GROUP, "desc_act": False}))
    assert same(loaded(load_model(directory, dtype="float32")), plain)


def test_modules_without_scales_zero_biases_and_scales_of_activations(tmp_path):
    config, tensors, plain = make_quantized("gptq-v1")
    name = "model.layers.1.mlp.up_proj."
    for suffix in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[name + suffix]
    tensors[name + "weight"] = plain[name + "weight"]
    tensors["model.layers.0.mlp.up_proj.bias"] = np.zeros(96, np.float16)
    write(tmp_path / "a", config, tensors)
    assert same(loaded(load_model(tmp_path / "a", dtype="float32")), plain)
    tensors["model.layers.0.mlp.up_proj.bias"] = np.ones(96, np.float16)
    write(tmp_path / "b", config, tensors)
    refused(tmp_path / "b", "unexpected model.layers.0.mlp.up_proj.bias")
    config, tensors, plain = make_quantized("fp8-tensor")
    tensors["model.layers.0.mlp.up_proj.activation_scale"] = np.ones((), np.float32)
    write(tmp_path / "c", config, tensors)
    assert same(loaded(load_model(tmp_path / "c", dtype="float32")), plain)


def test_names_of_a_model_that_was_saved_without_its_head(tmp_path):
    config, tensors, plain = make_quantized("awq", tie_word_embeddings=True)
    write(tmp_path / "hf", config, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    assert same(loaded(load_model(tmp_path / "hf", dtype="float32")), plain)


def test_schemes_of_compressed_tensors_are_found_by_their_targets(tmp_path):
    config, tensors, plain = make_quantized("ct-w4-group")
    _, eight, plain_eight = make_quantized("ct-w8-channel")
    own = re.compile(r"model\.layers\.\d\.mlp\.down_proj\.")
    for name in [name for name in tensors if own.match(name)]:
        del tensors[name]
    tensors |= {name: tensor for name, tensor in eight.items() if own.match(name)}
    plain |= {name: tensor for name, tensor in plain_eight.items() if own.match(name)}
    group = FORMATS["ct-w8-channel"][0]["config_groups"]["group_0"] | {"targets": ["re:.*down_proj$"]}
    config["quantization_config"] = json.loads(json.dumps(config["quantization_config"]))
    config["quantization_config"]["config_groups"]["group_1"] = group
    write(tmp_path / "hf", config, tensors)
    assert same(loaded(load_model(tmp_path / "hf", dtype="float32")), plain)


def write(directory: Path, config: dict, tensors: dict[str, np.ndarray]) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", tensors)


# Conversion -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_converted_verified_generated_and_exported(name, tmp_path):
    write_quantized(tmp_path / "hf", name)
    convert(tmp_path / "hf", tmp_path / "out", progress=False)
    assert not verify(tmp_path / "hf", tmp_path / "out", progress=False).wrong
    model = load_model(tmp_path / "out")
    assert bits(model) == bits(load_model(tmp_path / "hf")) and model_info(tmp_path / "out") == model_info(tmp_path / "hf")
    out = generate(model, [[1, 2, 3]], config=GenerationConfig(max_new_tokens=4, ignore_eos=True, group_size=8))
    assert len(out.token_ids[0]) == 4
    export(tmp_path / "out", tmp_path / "plain", progress=False)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert bits(load_model(tmp_path / "plain")) == bits(model)
    assert load_file(tmp_path / "plain" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype == ml_dtypes.bfloat16


# Mistakes -------------------------------------------------------------------------------------------------------------


def opened(directory: Path) -> None:
    Source(directory).check_contents()


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("awq", {"quant_method": "hqq"}, 'quantization by "hqq" is not supported'),
        ("awq", {"quant_method": "mxfp4"}, 'quantization by "mxfp4" is not supported'),
        ("awq", {"quant_method": "modelopt"}, 'quantization by "modelopt" is not supported'),
        ("awq", {"quant_method": None}, "quantization by null is not supported"),
        ("awq", {"quant_method": ["awq"]}, 'quantization by ["awq"] is not supported'),
        ("awq", {"version": "gemv"}, "version 'gemv' of the AWQ quantization is not supported"),
        ("awq", {"zero_point": False}, "zero_point False of the AWQ"),
        ("awq", {"bits": 3}, "bits of the AWQ quantization is 3"),
        ("awq", {"group_size": "all"}, "group_size of the AWQ quantization is 'all'"),
        ("gptq-v1", {"checkpoint_format": "gptq_p"}, "checkpoint_format 'gptq_p' of the GPTQ"),
        ("gptq-v1", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' of the GPTQ"),
        ("gptq-v1", {"bits": 3}, "bits of the GPTQ quantization is 3"),
        ("gptq-v1", {"pack_dtype": "int16"}, "pack_dtype 'int16' of the GPTQ"),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type 'fp4' of the bitsandbytes"),
        ("nf4", {"load_in_8bit": True, "load_in_4bit": False}, "8 bits"),
        ("fp8-block", {"fmt": "e5m2"}, "fmt 'e5m2' of the FP8"),
        ("fp8-block", {"weight_block_size": [128]}, "weight_block_size of the FP8 quantization is [128]"),
        ("ct-w4-group", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' of the compressed-tensors"),
        ("ct-w4-group", {"format": "mxfp4-pack-quantized"}, "format 'mxfp4-pack-quantized'"),
        ("ct-w4-group", {"format": "int-quantized"}, "format 'int-quantized'"),
        ("ct-w4-group", {"format": None}, "format None of the compressed-tensors"),
        ("ct-w4-group", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ("ct-w4-group", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("ct-w4-group", {"config_groups": {}}, "config_groups"),
        ("ct-w4-group", {"config_groups": {"group_0": {"targets": ["Linear"], "weights": None}}}, "group_0"),
        ("ct-w4-group", {"config_groups": {"group_0": {"targets": ["re:("], "weights": {"type": "int"}}}}, "'(', is no pattern"),
        ("ct-w4-group", {"config_groups": []}, "config_groups of the compressed-tensors quantization is [], should be an object"),
    ],
)
def test_other_formats_are_refused_by_name(name, change, named, tmp_path):
    write_quantized(tmp_path / "hf", name)
    edit_json(tmp_path / "hf" / "config.json", lambda raw: raw["quantization_config"].update(change))
    refused(tmp_path / "hf", named, read=load_config)


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("name", "lost", "named"),
    [
        ("fp8-block", "weight_scale_inv", "weight_scale_inv is missing"),
        ("fp8-block", "weight", "weight_scale_inv is the scale of"),
        ("ct-fp8-channel", "weight_scale", "weight_scale is missing"),
        ("ct-w4-group", "weight_scale", "weight_scale is missing"),
        ("ct-w4-group", "weight_packed", "weight is missing"),
        ("ct-w4-asym", "weight_zero_point", "weight_zero_point is missing"),
        ("ct-w4-order", "weight_g_idx", "weight_g_idx is missing"),
        ("awq", "scales", "scales is missing"),
        ("awq", "qzeros", "qzeros is missing"),
        ("gptq-v1", "qweight", "qweight is missing"),
        ("gptq-v1", "scales", "scales is missing"),
        ("nf4", "weight.absmax", "weight.absmax is missing"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__nf4 is missing"),
        ("nf4-double", "weight.nested_absmax", "weight.nested_absmax is missing"),
    ],
)
def test_a_missing_part_is_named(name, lost, named, tmp_path):
    config, tensors, _ = make_quantized(name)
    del tensors[Q + lost]
    write(tmp_path / "hf", config, tensors)
    refused(tmp_path / "hf", "model.safetensors", Q, named, read=opened)


@pytest.mark.parametrize(
    ("name", "suffix", "change", "named"),
    [
        (
            "gptq-v1-order",
            "g_idx",
            lambda x: np.where(np.arange(len(x)) == 3, 2, x).astype(np.int32),
            "g_idx has a group of 2, should be from 0 to 1",
        ),
        ("gptq-v1-order", "g_idx", lambda x: x - 1, "g_idx has a group of -1"),
        ("ct-w4-order", "weight_g_idx", lambda x: x + 1, "weight_g_idx has a group of 2"),
        ("gptq-v1", "scales", lambda x: x[:1], "scales has shape [1, 64], should be [2, 64]"),
        ("gptq-v1", "scales", lambda x: x.view(np.int16).astype(np.int32), "scales has dtype I32"),
        ("gptq-v1", "qweight", lambda x: x[:-1], "qweight has shape [7, 64], should be [8, 64]"),
        ("gptq-v1", "qweight", lambda x: x.astype(np.float32), "qweight has dtype F32, should be I32"),
        ("gptq-v1", "g_idx", lambda x: x[:-1], "g_idx has shape [63]"),
        ("awq", "qzeros", lambda x: x[:, :-1], "qzeros has shape [2, 7], should be [2, 8]"),
        ("awq", "qweight", lambda x: x.T.copy(), "qweight has shape [8, 64], should be [64, 8]"),
        ("ct-w4-group", "weight_shape", lambda x: x[::-1] * 2, "weight_shape is [128, 128]"),
        ("ct-w4-group", "weight_packed", lambda x: x[:, :-1], "weight_packed has shape [64, 7]"),
        ("ct-w4-asym", "weight_zero_point", lambda x: x.repeat(8, 0), "weight_zero_point has shape [64, 2], should be [8, 2]"),
        ("fp8-block", "weight_scale_inv", lambda x: x[:, :1], "weight_scale_inv has shape [1, 1], should be [1, 2]"),
        ("fp8-block", "weight", lambda x: x[:-1], "weight has shape [63, 64]"),
        ("fp8-block", "weight", lambda x: x.astype(np.float32), "weight has dtype F32, should be F8_E4M3"),
        ("nf4", "weight.absmax", lambda x: x[:-1], "weight.absmax has shape [63], should be [64]"),
        ("nf4", "weight", lambda x: x[:-1], "weight has shape [2047, 1]"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda x: x[:-1], "should hold a JSON object"),
    ],
)
def test_a_wrong_part_is_named(name, suffix, change, named, tmp_path):
    config, tensors, _ = make_quantized(name)
    tensors[Q + suffix] = np.ascontiguousarray(change(tensors[Q + suffix]))
    write(tmp_path / "hf", config, tensors)
    refused(tmp_path / "hf", "model.safetensors", Q, named, read=opened)


def test_tensors_of_another_format_are_refused(tmp_path):
    config, tensors, plain = make_quantized("awq")
    write(tmp_path / "both", config, tensors | {Q + "weight": plain[Q + "weight"]})
    refused(tmp_path / "both", Q + "weight too", read=opened)
    write(tmp_path / "none", {key: value for key, value in config.items() if key != "quantization_config"}, tensors)
    refused(tmp_path / "none", "quantized", "qweight", "quantization_config", read=opened)
    config["quantization_config"] = FORMATS["gptq-v1"][0]
    write(tmp_path / "gptq", config, tensors)
    refused(tmp_path / "gptq", "qweight has shape [64", read=opened)


def test_integers_are_never_cast(tmp_path):
    """A tensor of integers where a weight should be is refused, whatever the format."""
    config, tensors, plain = make_quantized("awq")
    for suffix in ("qweight", "qzeros", "scales"):
        del tensors[Q + suffix]
    write(tmp_path / "hf", config, tensors | {Q + "weight": words(plain[Q + "weight"].astype(np.int8).view(np.uint8), 8, 0)})
    with pytest.raises(InputError, match=r"q_proj\.weight has"):
        Source(tmp_path / "hf")


def test_the_text_model_of_a_multimodal_one(tmp_path):
    config, tensors, plain = make_quantized("fp8-tensor")
    settings = {name: config.pop(name) for name in ("quantization_config", "tie_word_embeddings", "dtype")}
    vision = {"model_type": "pixtral", "hidden_size": 32}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "vision_config": vision, **settings}
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_tower.x.q_proj.weight"] = np.ones((2, 2), ml_dtypes.bfloat16)
    write(tmp_path / "hf", whole | {"text_config": config | {"model_type": "mistral", "architectures": None}}, tensors)
    found = loaded(load_model(tmp_path / "hf", dtype="float32"))
    assert same({name.removeprefix("language_model."): tensor for name, tensor in found.items()}, plain)


# Packed ---------------------------------------------------------------------------------------------------------------

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
    config, tensors, _ = make_quantized(name, make=compressed(4, group_size, name == "ct-w4-group"), **(MODEL_128 | changes))
    config["quantization_config"] = json.loads(json.dumps(config["quantization_config"]))
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = group_size
    write(directory, config, tensors)


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
    write_128(tmp_path / "zeros", "ct-w4-asym")
    write_128(tmp_path / "groups", group_size=64)
    for name in ("zeros", "groups"):
        assert not packed_weights(load_model(tmp_path / name))
        assert len(packed_weights(load_model(tmp_path / name, weights="packed"))) == 14


def test_plans_and_info_count_the_bytes_of_packed_weights(tmp_path):
    write_128(tmp_path / "hf")
    model, info = load_model(tmp_path / "hf"), model_info(tmp_path / "hf")
    config = planned_config(tmp_path / "hf")
    assert config.int4_weights and config == model.config == config_and_dtype(tmp_path / "hf")[0]
    assert model_bytes(config) == info.weight_bytes == sum(x.nbytes for x in jax.tree.leaves(model.weights()))
    assert model_bytes(dataclasses.replace(config, int4_weights=False)) > info.weight_bytes
    step = own_step(config, CacheConfig("full").outline(config, 64), 64)
    assert step_weight_bytes(step) == weight_bytes(model)
    write_128(tmp_path / "zeros", "ct-w4-asym")
    assert not planned_config(tmp_path / "zeros").int4_weights and not load_model(tmp_path / "zeros").config.int4_weights


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


def test_the_draft_reads_the_targets_own_codes(tmp_path):
    write_quantized(tmp_path / "hf", "gptq-v1")
    model = load_model(tmp_path / "hf", dtype="float32", weights="packed")
    own = packed_weights(model)
    for text in ("quantspec", "sparse", "streaming-llm"):
        draft = make_draft(text, model)
        assert all(weight.codes is own[path].codes for path, weight in packed_weights(draft.step.model).items())
    assert make_draft("quantspec", model, calibration=[[1, 2, 3]]).step.model is model
    path = "layers.0.q_proj.weight"
    some = model.with_weights(model.weights() | {path: dequantize_weight(own[path], jnp.float32)})
    assert packed_weights(make_draft("quantspec", some).step.model).keys() == own.keys()
    with pytest.raises(InputError, match="some of the target's layers are in INT4 already"):
        make_draft("quantspec", some, calibration=[[1, 2, 3]])
    settings = dict(max_new_tokens=24, ignore_eos=True, group_size=8)
    out = generate(model, [[1, 2, 3] * 9], config=GenerationConfig(draft="quantspec", **settings))
    alone = generate(model, [[1, 2, 3] * 9], config=GenerationConfig(draft="none", **settings))
    assert out.token_ids == alone.token_ids


def test_packed_weights_are_converted_and_verified(tmp_path):
    write_quantized(tmp_path / "hf", "awq")
    source, out = tmp_path / "hf", tmp_path / "out"
    convert(source, out, weights="packed", progress=False)
    assert not verify(source, out, logits=True, progress=False).wrong
    assert bits(load_model(out)) == bits(load_model(source, weights="packed"))
    assert bits(load_model(out, weights="dequantized")) == bits(load_model(source, weights="dequantized"))
    whole, packed = model_info(source), model_info(out)
    assert packed.parameters == whole.parameters and packed.draft_weight_bytes < whole.draft_weight_bytes
    assert packed.weight_bytes == sum(x.nbytes for x in jax.tree.leaves(load_model(out).weights())) < whole.weight_bytes
    with pytest.raises(InputError, match="in INT4, which export does not write"):
        export(out, tmp_path / "plain", progress=False)
    with pytest.raises(InputError, match="--draft-bits 16"):
        convert(source, tmp_path / "both", weights="packed", draft_bits=4, progress=False)
    convert(source, tmp_path / "plain", weights="dequantized", progress=False)
    with pytest.raises(InputError, match="stored dequantized"):
        load_model(tmp_path / "plain", weights="packed")
    with pytest.raises(InputError, match="packed or dequantized"):
        load_model(source, weights="both")
    # A code that changed.
    raw = json.loads((source / "config.json").read_text())
    _, tensors, _ = make_quantized("awq")
    tensors[Q + "qweight"] = tensors[Q + "qweight"] ^ 1
    write(tmp_path / "other", raw, tensors)
    assert any("q_proj" in line for line in verify(tmp_path / "other", out, progress=False).wrong)


def test_commands_take_weights(tmp_path, run, fails, caplog):
    config, tensors, _ = make_quantized("awq", vocab_size=4096, num_hidden_layers=1)
    write(tmp_path / "hf", config, tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, tmp_path / "hf")
    arguments = ("generate", "--model", tmp_path / "hf", "--prompt", "import", "--max-new-tokens", "2", "--draft", "none")
    for weights, said in (("packed", "7 of 7 stay in INT4"), ("dequantized", "they are dequantized to bfloat16")):
        caplog.clear()
        code, _, _ = run(*arguments, "--weights", weights)
        assert code == 0 and said in caplog.text
    code, _, _ = run("convert", tmp_path / "hf", tmp_path / "out", "--weights", "packed", "--json")
    assert code == 0 and packed_weights(load_model(tmp_path / "out"))
    edit_json(tmp_path / "hf" / "config.json", lambda raw: raw["quantization_config"].update(bits=3))
    fails(arguments, "bits of the AWQ quantization is 3")
