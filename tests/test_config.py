"""Reading config.json, and what is refused in it."""

import dataclasses
import json
import logging
import math

import pytest
from checkpoints import CASES, MODEL_TYPES, OTHER_TYPES, ROPE_TYPES, WRAPPER, hf_config, old_spelling, rope_settings, variants, wrapped

from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.experts_config import ExpertsConfig
from qspec_jax.models.rope_config import RopeConfig

LLAMA, MISTRAL, QWEN2, QWEN3 = MODEL_TYPES
NAN, INF = float("nan"), float("inf")


def refused(config, *named: str) -> None:
    """from_hf must refuse a config in one line that names the file and these."""
    with pytest.raises(InputError) as error:
        LlamaConfig.from_hf(config, source="some/config.json")
    message = str(error.value)
    assert message.startswith("some/config.json: ") and "\n" not in message
    assert all(name in message for name in named), message


# Reading --------------------------------------------------------------------------------------------------------------


def test_every_field():
    config = hf_config(QWEN3, attention_bias=True, eos_token_id=[7, 9], tie_word_embeddings=True, dtype="bfloat16")
    assert LlamaConfig.from_hf(config) == LlamaConfig(
        architecture=QWEN3,
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(rope_theta=10000.0),
        max_position_embeddings=128,
        tie_word_embeddings=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=False,
        qk_norm="head",
        eos_token_ids=(7, 9),
        dtype="bfloat16",
    )


def test_reads_a_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hf_config()))
    assert LlamaConfig.from_hf(path) == LlamaConfig.from_hf(str(path)) == LlamaConfig.from_hf(hf_config())
    path.write_text(path.read_text(), encoding="utf-8-sig")  # with a byte order mark
    assert LlamaConfig.from_hf(path) == LlamaConfig.from_hf(hf_config())


@pytest.mark.parametrize(
    ("architecture", "kv_heads", "head_dim", "positions", "eos"),
    [(LLAMA, 64, 32, 2048, (2,)), (MISTRAL, 8, 32, 131072, (2,)), (QWEN2, 32, 32, 32768, ()), (QWEN3, 32, 128, 32768, ())],
)
def test_absent_keys_are_what_transformers_assumes(architecture, kv_heads, head_dim, positions, eos):
    needed = {key: hf_config()[key] for key in ("vocab_size", "intermediate_size", "num_hidden_layers")}
    needed |= {"architectures": [architecture], "hidden_size": 2048, "num_attention_heads": 64, "sliding_window": None}
    config = LlamaConfig.from_hf(needed)
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (kv_heads, head_dim, positions)
    assert config.eos_token_ids == eos
    assert config.rope == RopeConfig("default", 10000.0) and config.rms_norm_eps == 1e-6
    assert not config.tie_word_embeddings and not config.output_bias and not config.mlp_bias
    assert config.qkv_bias == (architecture == QWEN2) and config.qk_norm == ("head" if architecture == QWEN3 else None)
    assert config.dtype == "float32"


def test_absent_keys_of_the_others():
    needed = {key: hf_config()[key] for key in ("vocab_size", "intermediate_size", "num_hidden_layers")}
    needed |= {"hidden_size": 2048, "num_attention_heads": 64}
    phi, smol, intern = (
        LlamaConfig.from_hf(needed | {"architectures": [f"{name}ForCausalLM"]}) for name in ("Phi3", "SmolLM3", "InternLM3")
    )
    assert (phi.rms_norm_eps, phi.max_position_embeddings, phi.num_kv_heads, phi.tie_word_embeddings) == (1e-5, 4096, 64, False)
    assert (smol.rope.rope_theta, smol.max_position_embeddings, smol.num_kv_heads, smol.tie_word_embeddings) == (2e6, 32768, 4, True)
    assert (intern.max_position_embeddings, intern.num_kv_heads, intern.tie_word_embeddings) == (32768, 32, False)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_the_long_rope_of_phi_3_by_its_names(name):
    settings = rope_settings("longrope", 64)
    settings["rope_parameters"] |= {"rope_type": name}
    del settings["rope_parameters"]["original_max_position_embeddings"]
    config = LlamaConfig.from_hf(hf_config("Phi3ForCausalLM", **settings | {"max_position_embeddings": 8192}))
    assert (config.rope.rope_type, config.rope.original_max_position_embeddings, config.rope.factor) == ("longrope", 4096, 2.0)


@pytest.mark.parametrize("name", ["linear", "dynamic", "llama3"])
def test_phi_3_has_no_other_rope(name):
    refused(hf_config("Phi3ForCausalLM", **rope_settings(name)), f"rope type {name}", "longrope")


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_null_kv_heads_are_all_heads_and_null_eos_is_none(architecture):
    config = LlamaConfig.from_hf(hf_config(architecture, num_key_value_heads=None, eos_token_id=None))
    assert config.num_kv_heads == config.num_heads and config.eos_token_ids == ()


@pytest.mark.parametrize(("given", "ids"), [(5, (5,)), ([5, 6], (5, 6)), ([], ()), (0, (0,))])
def test_eos(given, ids):
    assert LlamaConfig.from_hf(hf_config(eos_token_id=given)).eos_token_ids == ids


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_dtype(key, name):
    assert LlamaConfig.from_hf(hf_config(dtype=...) | {key: name}).dtype == name


@pytest.mark.parametrize("change", [{"sliding_window": None}, {"sliding_window": 128}, {"sliding_window": 129}])
@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_an_idle_sliding_window_is_accepted(architecture, change):
    LlamaConfig.from_hf(hf_config(architecture, use_sliding_window=True, max_window_layers=0, **change))


@pytest.mark.parametrize("architecture", [QWEN2, QWEN3])
@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": False},
        {"use_sliding_window": ...},
        {"use_sliding_window": True, "max_window_layers": 2},
        {"use_sliding_window": True, "layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_a_sliding_window_that_no_layer_uses_is_accepted(architecture, change):
    LlamaConfig.from_hf(hf_config(architecture, sliding_window=16, **change))


# What transformers reads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", variants())
def test_variants_are_what_transformers_reads(name):
    from transformers import CONFIG_MAPPING

    model, written = variants()[name]
    theirs, ours = CONFIG_MAPPING[model["model_type"]].from_dict(json.loads(json.dumps(written))), LlamaConfig.from_hf(written)
    if not hasattr(theirs, "rope_parameters"):
        pytest.skip("transformers 4 has no one spelling of RoPE")
    rope = {key: value for key, value in theirs.rope_parameters.items() if value is not None}
    assert (ours.rope.rope_type, ours.rope.rope_theta) == (rope["rope_type"], rope["rope_theta"])
    if ours.rope.rope_type != "default":
        given = {"factor", "low_freq_factor", "high_freq_factor", "truncate", "beta_fast", "beta_slow"} & rope.keys()
        assert {key: getattr(ours.rope, key) for key in given} == {key: rope[key] for key in given}
        assert ours.rope.original_max_position_embeddings == rope.get("original_max_position_embeddings", theirs.max_position_embeddings)
        assert ours.rope.short_factor == tuple(rope.get("short_factor", ())) and ours.rope.long_factor == tuple(rope.get("long_factor", ()))
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.num_kv_heads, ours.tie_word_embeddings) == (theirs.num_key_value_heads, theirs.tie_word_embeddings)
    assert (ours.rms_norm_eps, ours.max_position_embeddings) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert ours.qkv_bias == (model["model_type"] == "qwen2" or getattr(theirs, "attention_bias", False))
    assert ours.mlp_bias == (model["model_type"] in ("llama", "smollm3") and getattr(theirs, "mlp_bias", False))
    assert ours == dataclasses.replace(LlamaConfig.from_hf(model), eos_token_ids=ours.eos_token_ids)


@pytest.mark.parametrize("architecture", MODEL_TYPES | OTHER_TYPES)
@pytest.mark.parametrize("names", [..., None, [], "base"])
def test_the_model_type_says_what_the_architectures_do_not(architecture, names):
    names = [architecture.replace("ForCausalLM", "Model")] if names == "base" else names
    expected = LlamaConfig.from_hf(hf_config(architecture))
    assert LlamaConfig.from_hf(hf_config(architecture, architectures=names)) == expected
    assert expected.architecture == architecture


def test_the_model_type_goes_first(caplog):
    read = LlamaConfig.from_hf(hf_config("LlamaForCausalLM", model_type="qwen3"), source="mixed.json")
    assert read.architecture == QWEN3 and read.qk_norm
    assert "mixed.json: read as Qwen3ForCausalLM" in caplog.text and "not as LlamaForCausalLM" in caplog.text
    caplog.clear()
    LlamaConfig.from_hf(hf_config(model_type=...))
    LlamaConfig.from_hf(hf_config())
    assert not caplog.text


@pytest.mark.parametrize("change", [{"dtype": ...}, {"dtype": None}, {"dtype": None, "torch_dtype": None}])
def test_a_dtype_that_is_not_named_is_the_given_one(change):
    assert LlamaConfig.from_hf(hf_config(**change), dtype="bfloat16").dtype == "bfloat16"
    assert LlamaConfig.from_hf(hf_config(), dtype="bfloat16").dtype == "float32"


@pytest.mark.parametrize("head_dim", [64, ...])
def test_heads_that_do_not_divide_the_hidden_size(head_dim):
    settings = dict(hidden_size=66, num_attention_heads=4, head_dim=head_dim)
    refused(hf_config(**settings), "hidden_size 66 is not a multiple of num_attention_heads 4")
    assert LlamaConfig.from_hf(hf_config(QWEN3, **settings)).head_dim == (64 if head_dim == 64 else 128)


# Rope settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_names_of_the_rope_type(key):
    config = old_spelling(hf_config(**rope_settings("linear"))) | {"rope_scaling": {key: "linear", "factor": 4.0}}
    assert LlamaConfig.from_hf(config).rope == RopeConfig("linear", 10000.0, 4.0, 32)


def test_rope_scaling_wins_over_rope_parameters():
    config = hf_config(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=500.0)
    assert LlamaConfig.from_hf(config).rope == RopeConfig("linear", 500.0, 2.0, 128)


@pytest.mark.parametrize("factor", [..., None])
def test_yarn_without_a_factor_takes_the_ratio(factor):
    config = hf_config(**rope_settings("yarn", factor=factor))
    if factor is ...:
        del config["rope_parameters"]["factor"]
    rope = LlamaConfig.from_hf(config).rope
    assert rope.factor == 4 and rope.attention_factor == 0.1 * math.log(4) + 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, math.sqrt(1 + math.log(4) / math.log(32))),
        ({"factor": 2.0}, math.sqrt(1 + math.log(2) / math.log(32))),
        ({"factor": 1.0}, 1.0),
        ({"attention_factor": 1.25}, 1.25),
    ],
)
def test_longrope_attention_factor(change, expected):
    assert LlamaConfig.from_hf(hf_config(**rope_settings("longrope", **change))).rope.attention_factor == expected


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        (rope_settings("default"), 128),
        (rope_settings("linear"), 128),
        (rope_settings("dynamic"), 128),
        (rope_settings("yarn"), 2048),
        (rope_settings("yarn") | {"max_position_embeddings": 512}, 2048),
        (rope_settings("longrope"), 128),
        (rope_settings("llama3"), 128),
    ],
    ids=str,
)
def test_max_length(settings, longest):
    assert LlamaConfig.from_hf(hf_config(**settings)).max_length == longest


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["Two\nLines"]}, "Two Lines"),
        ({"architectures": None, "model_type": ...}, "(none)"),
        ({"architectures": [], "model_type": None}, "(none)"),
        ({"architectures": [], "model_type": "gpt_neox"}, "gpt_neox"),
        ({"architectures": None, "model_type": "mixtral"}, "mixture of experts"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": "LlamaForCausalLM"}, "(none)"),
        ({"architectures": [["LlamaForCausalLM"]]}, "(none)"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": 64.5}, "hidden_size is 64.5"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 1001}, "num_hidden_layers is 1001, should be at most 1000"),
        ({"rope_scaling": {"type": "linear", "factor": 1e308}}, "factor is 1e+308, should be at most 1e+06"),
        ({"intermediate_size": -96}, "intermediate_size is -96"),
        ({"intermediate_size": 96.0}, "intermediate_size is 96.0, not a whole number"),
        ({"vocab_size": INF}, "vocab_size is inf"),
        ({"vocab_size": NAN}, "vocab_size is nan"),
        ({"vocab_size": 10**400}, "vocab_size is 1000"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 is not a multiple of num_key_value_heads 2"),
        ({"head_dim": 63}, "head_dim 63 is odd"),
        ({"head_dim": ..., "num_attention_heads": 128}, "head_dim is 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"mlp_bias": 0}, "mlp_bias is 0"),
        ({"dtype": "int8"}, "int8"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"eos_token_id": [2, 10**12]}, "eos_token_id 1000000000000 should be in the vocabulary, below vocab_size 64"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is a mixture of experts"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "model_type": ...}, "Qwen2MoeForCausalLM is a mixture of experts"),
        ({"num_local_experts": 8}, "LlamaForCausalLM is a mixture of experts that is not supported; Qwen3MoeForCausalLM is, and dense"),
    ],
)
def test_refused(change, named):
    refused(hf_config(**change), named)


@pytest.mark.parametrize(
    ("architecture", "change", "named"),
    [
        ("ArceeForCausalLM", {"hidden_act": "silu"}, "hidden_act silu is not supported for ArceeForCausalLM, only relu2"),
        (LLAMA, {"hidden_act": "relu2"}, "hidden_act relu2 is not supported for LlamaForCausalLM, only silu"),
        ("GraniteForCausalLM", {"residual_multiplier": 0}, "residual_multiplier is 0, should be more than 0"),
        ("GraniteForCausalLM", {"logits_scaling": "8"}, "logits_scaling is '8', not a finite number"),
        ("GraniteForCausalLM", {"attention_multiplier": None}, "attention_multiplier is missing"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported for LlamaForCausalLM"),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 0.3}, "partial_rotary_factor 0.3 rotates 19 of 64 channels"),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 0.01}, "rotates 0 of 64 channels"),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, should be at most 1"),
        ("Ministral3ForCausalLM", {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta is missing"),
        ("HunYuanDenseV1ForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "alpha": -1}}, "alpha is -1, should be more than 0"),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 129}, "num_experts_per_tok is 129, should be at most num_experts, which is 128"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [2]}, "mlp_only_layers is [2], should be a list of layers, from 0 to 1"),
    ],
)
def test_what_a_family_refuses(architecture, change, named):
    refused(hf_config(architecture, **change), named)


def test_absent_keys_of_families():
    """Those that differ from Llama's."""
    needed = {key: hf_config()[key] for key in ("vocab_size", "intermediate_size", "num_hidden_layers")}
    needed |= {"hidden_size": 2048, "num_attention_heads": 64}

    def read(name: str, **more) -> LlamaConfig:
        return LlamaConfig.from_hf(needed | {"architectures": [f"{name}ForCausalLM"]} | more)

    seed, granite, olmo, apertus, glm, ministral = map(read, ("SeedOss", "Granite", "Olmo2", "Apertus", "Glm4", "Ministral3"))
    assert (seed.qkv_bias, seed.output_bias, seed.head_dim, seed.max_position_embeddings) == (True, False, 128, 524288)
    assert (granite.embedding_multiplier, granite.attention_scale, granite.residual_multiplier, granite.logits_scaling) == (1, 1, 1, 1)
    assert (olmo.eos_token_ids, olmo.rms_norm_eps, olmo.num_kv_heads) == ((50279,), 1e-5, 64)
    assert (apertus.rope.rope_type, apertus.rope.rope_theta, apertus.activation) == ("llama3", 12e6, "xielu")
    assert (glm.rope.partial_rotary_factor, glm.num_kv_heads, glm.eos_token_ids) == (0.5, 2, (151329, 151336, 151338))
    assert (ministral.rope.rope_type, ministral.rope.query_scale_beta, ministral.rope.original_max_position_embeddings) == (
        "yarn",
        0.1,
        16384,
    )
    assert read("Exaone4", sliding_window=None, num_key_value_heads=8).qk_norm == "head"
    moe = read("Qwen3Moe")
    assert (moe.head_dim, moe.num_kv_heads, moe.max_position_embeddings, moe.qk_norm) == (32, 4, 32768, "head")
    assert moe.experts == ExpertsConfig((0, 1), 128, 8, 768, normalized=False)


def test_hunyuan_stretches_theta():
    rope = LlamaConfig.from_hf(CASES["hunyuan-alpha"]).rope
    assert rope == RopeConfig(rope_theta=10000.0 * 50.0 ** (16 / 14))
    plain = hf_config("HunYuanDenseV1ForCausalLM", **rope_settings("dynamic"))
    assert LlamaConfig.from_hf(plain).rope.rope_type == "dynamic"


# Multimodal models ----------------------------------------------------------------------------------------------------


def test_a_multimodal_model_is_read_as_its_text_model():
    text = CASES["ministral3-scaled"]
    found = LlamaConfig.from_hf(wrapped(text)[0])
    assert found == dataclasses.replace(LlamaConfig.from_hf(text), wrapper=WRAPPER)
    # Of what both have, the outer one counts for the embeddings and the dtype, the text model's for the rest.
    outer = wrapped(text, tied=True, dtype="bfloat16", eos_token_id=7, hidden_size=5)[0]
    assert LlamaConfig.from_hf(outer) == dataclasses.replace(found, tie_word_embeddings=True, dtype="bfloat16")
    assert LlamaConfig.from_hf(wrapped(text, tied=None)[0]).tie_word_embeddings
    without = {key: value for key, value in text.items() if key not in ("eos_token_id", "model_type")}
    read = LlamaConfig.from_hf(wrapped(without, eos_token_id=7, architectures=None)[0])
    assert (read.architecture, read.eos_token_ids) == ("MistralForCausalLM", (7,))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"text_config": {"model_type": "other_text"}},
            f"of model type other_text, the text model of {WRAPPER}, is not supported; supported",
        ),
        ({"text_config": {"model_type": "qwen2_moe"}}, f"of model type qwen2_moe, the text model of {WRAPPER}, is a mixture of experts"),
        ({"text_config": hf_config(MISTRAL, num_experts=8)}, f"MistralForCausalLM, the text model of {WRAPPER}, is a mixture of experts"),
        ({"text_config": []}, "text_config is [], should be an object"),
        ({"text_config": None}, f"text_config is missing, the settings of the text model of {WRAPPER}"),
        ({"architectures": ["OtherForConditionalGeneration"], "model_type": "other"}, "OtherForConditionalGeneration around a text model"),
        (
            {"architectures": None, "model_type": "other"},
            "architecture of model type other around a text model (text_config) is not supported",
        ),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, not true or false"),
    ],
)
def test_multimodal_models_that_are_refused(change, named):
    refused(wrapped(hf_config(MISTRAL))[0] | change, named)


@pytest.mark.parametrize("layers", [[1], [1, 2], [1, "0"], "10", {"0": 1}, [], 0])
def test_no_rope_layers_are_one_for_each_layer(layers):
    refused(hf_config("SmolLM3ForCausalLM", no_rope_layers=layers), "no_rope_layers")


@pytest.mark.parametrize(
    ("architecture", "change", "layers"),
    [
        (MISTRAL, {"sliding_window": 127}, (0, 1)),
        ("Phi3ForCausalLM", {"sliding_window": 127}, (0, 1)),
        ("SmolLM3ForCausalLM", {"sliding_window": 127, "use_sliding_window": True, "num_hidden_layers": 4}, (3,)),
        # transformers' Mistral looks at nothing but the window.
        (MISTRAL, {"sliding_window": 127, "layer_types": ["full_attention"] * 2}, (0, 1)),
        (MISTRAL, {"sliding_window": 127, "use_sliding_window": False}, (0, 1)),
        # Idle in what the checkpoint was trained for, but not in what linear scaling makes of it.
        (MISTRAL, {"sliding_window": 127} | rope_settings("linear"), (0, 1)),
        *((qwen, {"sliding_window": 127, "use_sliding_window": True, "max_window_layers": 1}, (1,)) for qwen in (QWEN2, QWEN3)),
        *((qwen, {"sliding_window": 127, "layer_types": ["full_attention", "sliding_attention"]}, (1,)) for qwen in (QWEN2, QWEN3)),
        ("CwmForCausalLM", {"sliding_window": 127, "num_hidden_layers": 5}, (1, 2, 3)),
        ("Olmo3ForCausalLM", {"sliding_window": 127, "num_hidden_layers": 5}, (0, 1, 2, 4)),
        ("Gemma3ForCausalLM", {"sliding_window": 127, "num_hidden_layers": 7}, (0, 1, 2, 3, 4, 6)),
        ("Gemma3ForCausalLM", {"sliding_window": 127, "sliding_window_pattern": 2}, (0,)),
        ("Exaone4ForCausalLM", {"sliding_window": 127, "sliding_window_pattern": "LG"}, (0,)),
    ],
    ids=str,
)
def test_layers_with_a_sliding_window(architecture, change, layers):
    config = LlamaConfig.from_hf(hf_config(architecture, hidden_act=..., **change))
    assert (config.windowed_layers, config.sliding_window) == (layers, 127)


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        (MISTRAL, {"max_position_embeddings": 4097}),
        (QWEN2, {"use_sliding_window": True, "num_hidden_layers": 29, "max_position_embeddings": 4097}),
    ],
    ids=str,
)
def test_a_window_that_config_json_does_not_have(architecture, change):
    config = LlamaConfig.from_hf(hf_config(architecture, sliding_window=..., **change))
    assert config.sliding_window == 4096 and config.windowed_layers


def test_full_layers_of_a_hybrid_model_have_no_rope():
    """However long the window is; without one, all layers have RoPE."""
    for window, layers in ((16, (1,)), (128, (1,)), (None, ())):
        config = hf_config("Exaone4ForCausalLM", sliding_window=window, layer_types=["sliding_attention", "full_attention"])
        if window is None:
            config["layer_types"] = None
        assert LlamaConfig.from_hf(config).nope_layers == layers


def test_rope_of_layers_with_a_window():
    """Where theirs is another, they have it however long the window is."""
    rope = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_parameters": ...}
    old = LlamaConfig.from_hf(hf_config("Gemma3ForCausalLM", hidden_act=..., sliding_window=128, **rope, rope_local_base_freq=500.0))
    assert (old.rope.factor, old.sliding_rope.rope_theta, old.sliding_rope.rope_type) == (8.0, 500.0, "default")
    assert old.sliding_layers == (0, 1) == old.windowed_layers  # linear scaling makes positions of which 128 are not all
    plain = {"sliding_window": 128, "rope_theta": 1e6, "rope_local_base_freq": 500.0, "rope_parameters": ...}
    idle = LlamaConfig.from_hf(hf_config("Gemma3ForCausalLM", hidden_act=..., **plain))
    assert idle.sliding_layers == (0, 1) and idle.windowed_layers == () and idle.sliding_rope == old.sliding_rope
    by_kind = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 500.0}}
    assert LlamaConfig.from_hf(hf_config("Gemma3ForCausalLM", hidden_act=..., sliding_window=128, rope_parameters=by_kind)) == old
    olmo = LlamaConfig.from_hf(hf_config("Olmo3ForCausalLM", sliding_window=16, **rope))
    assert (olmo.rope.rope_type, olmo.sliding_rope.rope_type, olmo.sliding_rope.rope_theta) == ("linear", "default", 1e6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["sliding_attention"]}, "an entry for each of 2 layers"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"hidden_activation": "gelu"}, "hidden_activation gelu"),
    ],
)
def test_windows_that_are_refused(change, named):
    refused(hf_config("Gemma3ForCausalLM", **({"hidden_act": ..., "sliding_window": 16} | change)), named)


def test_a_window_of_llama_is_refused():
    config = hf_config(LLAMA, sliding_window=127, layer_types=["sliding_attention"] * 2)
    refused(config, "layer_types", "full attention")


@pytest.mark.parametrize(
    ("rope_type", "change", "named"),
    [
        ("default", {"rope_type": "proportional"}, "proportional"),
        ("default", {"rope_type": ["yarn"]}, "rope type"),
        ("default", {"rope_theta": 0}, "rope_theta is 0"),
        ("default", {"rope_theta": "1e4"}, "rope_theta is '1e4'"),
        ("default", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("default", {"full_attention": {"rope_type": "yarn"}}, "flat"),
        ("linear", {"factor": None}, "factor is missing"),
        ("linear", {"factor": 0}, "factor is 0"),
        ("dynamic", {"factor": NAN}, "factor is nan"),
        ("yarn", {"beta_fast": "32"}, "beta_fast"),
        ("yarn", {"truncate": 0}, "truncate"),
        ("yarn", {"mscale": "a", "mscale_all_dim": 1.0}, "mscale"),
        ("yarn", {"attention_factor": -1.0}, "attention_factor is -1.0"),
        ("yarn", {"original_max_position_embeddings": 512.5}, "original_max_position_embeddings is 512.5"),
        ("longrope", {"long_factor": [1.0] * 31}, "long_factor must be a list of 32"),
        ("longrope", {"short_factor": 1.0}, "short_factor must be a list of 32"),
        ("longrope", {"short_factor": [1.0] * 31 + ["1"]}, "short_factor is '1'"),
        ("longrope", {"long_factor": [0.0] * 32}, "long_factor is 0.0"),
        ("longrope", {"original_max_position_embeddings": 1}, "original_max_position_embeddings is 1"),
        ("llama3", {"low_freq_factor": None}, "low_freq_factor is missing"),
        ("llama3", {"high_freq_factor": 1.0}, "high_freq_factor 1.0"),
    ],
)
@pytest.mark.parametrize("spelling", [dict, old_spelling])
def test_refused_rope_settings(rope_type, change, named, spelling):
    refused(spelling(hf_config(**rope_settings(rope_type, **change))), named)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rope_type": None, "factor": 2.0}, "rope_type"),
        ({"rope_type": None, "type": "yarn", "factor": 2.0}, "rope_type"),
        ({"type": None, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, "type"),
        ({"rope_type": None}, "rope_type"),
    ],
)
def test_a_rope_type_of_null_is_refused(key, settings, named):
    refused(hf_config(rope_parameters=...) | {key: settings}, f"{named} of the rope settings is null", "yarn")


@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        ({"factor": 4.0}, "factor"),
        ({"rope_type": "default", "mrope_section": [16, 8, 8]}, "mrope_section"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 16, "alpha": 2}, "alpha, beta_fast"),
        ({"type": "dynamic", "factor": 2.0, "finetuned": True}, "finetuned"),
    ],
)
def test_rope_settings_that_change_nothing_are_named(settings, unused, caplog):
    read = LlamaConfig.from_hf(hf_config(rope_parameters=settings), source="own.json")
    assert f"own.json: rope type {read.rope.rope_type} does not use {unused} of the rope settings" in caplog.text


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_rope_settings_that_are_used_are_not_named(rope_type, caplog):
    with caplog.at_level(logging.INFO):
        for spelling in (dict, old_spelling):
            LlamaConfig.from_hf(spelling(hf_config(**rope_settings(rope_type))))
    assert not caplog.text


@pytest.mark.parametrize("rope_type", ["yarn", "longrope", "llama3"])
def test_whole_numbers_with_a_point_among_rope_settings(rope_type):
    settings = rope_settings(rope_type)
    original = settings["rope_parameters"].pop("original_max_position_embeddings")
    expected = LlamaConfig.from_hf(hf_config(**settings, original_max_position_embeddings=original))
    found = LlamaConfig.from_hf(hf_config(**settings, original_max_position_embeddings=float(original)))
    assert found == expected and type(found.rope.original_max_position_embeddings) is int


def test_rope_settings_that_are_no_object():
    refused(hf_config(rope_parameters=["yarn"]), "rope settings")


SENSELESS = [None, True, "x\ny", [], {}, [{}], {"a": 1}, -1, 0, 0.5, 3, NAN, INF, -INF, 10**400]


@pytest.mark.parametrize("architecture", [*MODEL_TYPES, "GraniteForCausalLM", "Glm4ForCausalLM", "HunYuanDenseV1ForCausalLM"])
def test_any_value_is_read_or_refused(architecture):
    """Whatever a key holds: no other exception, and one line."""
    own = ["alpha", "partial_rotary_factor", "llama_4_scaling_beta"]
    for rope_type in ("default", "yarn", "longrope", "llama3"):
        base = hf_config(architecture, use_sliding_window=True, layer_types=None, **rope_settings(rope_type))
        changed = [base | {key: value} for key in base for value in SENSELESS]
        rope = base["rope_parameters"]
        inner = [*rope, *own, "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "truncate"]
        multipliers = {"residual_multiplier": 1.0, "attention_multiplier": 1.0, "text_config": None}
        changed += [base | multipliers | {key: value} for key in multipliers for value in SENSELESS]
        changed += [base | {"rope_parameters": rope | {"mscale_all_dim": 1.0, key: value}} for key in inner for value in SENSELESS]
        for config in changed:
            try:
                LlamaConfig.from_hf(config)
            except InputError as error:
                assert "\n" not in str(error)
