"""Quantized checkpoints: each format's weights bit for bit, also when it was converted."""

import dataclasses
import json
import re
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conversions import bits
from quantized_checkpoints import FORMATS, GROUP, make_quantized, write_model, write_quantized, write_safetensors
from read_checkpoints import edit_json, loaded, refused
from safetensors.numpy import load_file
from tiers import in_system

from convert import convert, export, verify
from qspec_jax import generate
from qspec_jax.checkpoints.info import model_info
from qspec_jax.checkpoints.loading import load_model, planned_config
from qspec_jax.checkpoints.quantized import tensor as quantized
from qspec_jax.checkpoints.quantized.awq import AwqTensor
from qspec_jax.checkpoints.quantized.bitsandbytes import Nf4Tensor
from qspec_jax.checkpoints.quantized.compressed_tensors import PackedTensor
from qspec_jax.checkpoints.quantized.fp8 import fp8_tensor
from qspec_jax.checkpoints.quantized.gptq import GptqTensor
from qspec_jax.checkpoints.safetensors_file import read_header
from qspec_jax.decoding.config import GenerationConfig

ONE_OF_EACH = ["fp8-block", "ct-w4-asym", "awq", "gptq-v1", "nf4"]


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name].astype(np.float32)) for name in wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_each_weight_is_the_one_that_its_tensors_mean(name, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "PART", 1000)  # a few rows at a time
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
    found = load_model(tmp_path / "hf", weights="dequantized").weights()["layers.0.q_proj.weight"]
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
    write_model(tmp_path / "a", config, tensors)
    assert same(loaded(load_model(tmp_path / "a", dtype="float32")), plain)
    tensors["model.layers.0.mlp.up_proj.bias"] = np.ones(96, np.float16)
    write_model(tmp_path / "b", config, tensors)
    refused(tmp_path / "b", "unexpected model.layers.0.mlp.up_proj.bias")
    of_activations = {
        "fp8-tensor": ("mlp.up_proj.activation_scale", "self_attn.kv_scale"),
        "ct-fp8-channel": ("mlp.up_proj.input_scale", "self_attn.k_proj.output_scale", "self_attn.k_proj.output_zero_point"),
    }
    for name, beside in of_activations.items():
        config, tensors, plain = make_quantized(name)
        tensors |= {f"model.layers.0.{each}": np.ones((), np.float32) for each in beside}
        write_model(tmp_path / name, config, tensors)
        assert same(loaded(load_model(tmp_path / name, dtype="float32")), plain)


def test_names_of_a_model_that_was_saved_without_its_head(tmp_path):
    config, tensors, plain = make_quantized("awq", tie_word_embeddings=True)
    write_model(tmp_path / "hf", config, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
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
    write_model(tmp_path / "hf", config, tensors)
    assert same(loaded(load_model(tmp_path / "hf", dtype="float32")), plain)


@pytest.mark.parametrize("name", ["fp8-block", "awq", "nf4", *in_system("ct-w4-asym", "gptq-v1")])
def test_converted_verified_generated_and_exported(name, tmp_path):
    write_quantized(tmp_path / "hf", name)
    convert(tmp_path / "hf", tmp_path / "out", weights="dequantized", progress=False)
    assert not verify(tmp_path / "hf", tmp_path / "out", progress=False).wrong
    model = load_model(tmp_path / "out")
    assert bits(model) == bits(load_model(tmp_path / "hf", weights="dequantized"))
    if not planned_config(tmp_path / "hf").int4_weights:
        described = model_info(tmp_path / "hf")
        assert described.quantization and described.linear_layers
        assert model_info(tmp_path / "out") == dataclasses.replace(described, quantization=None, linear_layers=None)
    out = generate(model, [[1, 2, 3]], config=GenerationConfig(max_new_tokens=4, ignore_eos=True, group_size=8))
    assert len(out.token_ids[0]) == 4
    export(tmp_path / "out", tmp_path / "plain", progress=False)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert bits(load_model(tmp_path / "plain")) == bits(model)
    assert load_file(tmp_path / "plain" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype == ml_dtypes.bfloat16


def test_the_text_model_of_a_multimodal_one(tmp_path):
    config, tensors, plain = make_quantized("fp8-tensor")
    settings = {name: config.pop(name) for name in ("quantization_config", "tie_word_embeddings", "dtype")}
    vision = {"model_type": "pixtral", "hidden_size": 32}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "vision_config": vision, **settings}
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_tower.x.q_proj.weight"] = np.ones((2, 2), ml_dtypes.bfloat16)
    write_model(tmp_path / "hf", whole | {"text_config": config | {"model_type": "mistral", "architectures": None}}, tensors)
    found = loaded(load_model(tmp_path / "hf", dtype="float32"))
    assert same({name.removeprefix("language_model."): tensor for name, tensor in found.items()}, plain)
