"""What is refused in quantized checkpoints."""

from pathlib import Path

import numpy as np
import pytest
from quantized_checkpoints import FORMATS, make_quantized, words, write_model, write_quantized
from read_checkpoints import edit_json, refused

from qspec_jax.checkpoints.huggingface import Source, load_config
from qspec_jax.errors import InputError


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
        (
            "ct-w4-group",
            {"format": "marlin-24", "config_groups": {"group_0": {"format": "pack-quantized", "targets": ["Linear"], "weights": {}}}},
            "format 'marlin-24' of the compressed-tensors",
        ),
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
        ("ct-w4-group", "weight_packed", "weight_packed is missing"),
        ("ct-w4-asym", "weight_zero_point", "weight_zero_point is missing"),
        ("ct-w4-order", "weight_g_idx", "weight_g_idx is missing"),
        ("awq", "scales", "scales is missing"),
        ("awq", "qzeros", "qzeros is missing"),
        ("gptq-v1", "qweight", "qweight is missing"),
        ("gptq-v1", "scales", "scales is missing"),
        ("gptq-v1-order", "g_idx", "g_idx is missing"),
        ("nf4", "weight.absmax", "weight.absmax is missing"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__nf4 is missing"),
        ("nf4-double", "weight.nested_absmax", "weight.nested_absmax is missing"),
    ],
)
def test_a_missing_part_is_named(name, lost, named, tmp_path):
    config, tensors, _ = make_quantized(name)
    del tensors[Q + lost]
    write_model(tmp_path / "hf", config, tensors)
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
    write_model(tmp_path / "hf", config, tensors)
    refused(tmp_path / "hf", "model.safetensors", Q, named, read=opened)


def test_tensors_of_another_format_are_refused(tmp_path):
    config, tensors, plain = make_quantized("awq")
    write_model(tmp_path / "both", config, tensors | {Q + "weight": plain[Q + "weight"]})
    refused(tmp_path / "both", Q + "weight too", read=opened)
    write_model(tmp_path / "none", {key: value for key, value in config.items() if key != "quantization_config"}, tensors)
    refused(tmp_path / "none", "quantized", "qweight", "quantization_config", read=opened)
    config["quantization_config"] = FORMATS["gptq-v1"][0]
    write_model(tmp_path / "gptq", config, tensors)
    refused(tmp_path / "gptq", "qweight has shape [64", read=opened)


def test_integers_are_never_cast(tmp_path):
    """A tensor of integers where a weight should be is refused, whatever the format."""
    config, tensors, plain = make_quantized("awq")
    for suffix in ("qweight", "qzeros", "scales"):
        del tensors[Q + suffix]
    write_model(tmp_path / "hf", config, tensors | {Q + "weight": words(plain[Q + "weight"].astype(np.int8).view(np.uint8), 8, 0)})
    with pytest.raises(InputError, match=r"q_proj\.weight has"):
        Source(tmp_path / "hf")
