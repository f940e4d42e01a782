"""Reading config.json, and values that are refused in it. RoPE, windows and families have files of their own."""

import dataclasses
import json

import pytest
from checkpoints import MODEL_TYPES, OTHER_TYPES, hf_config, rope_settings, variants
from read_configs import refused

from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.rope_config import RopeConfig

LLAMA, MISTRAL, QWEN2, QWEN3 = MODEL_TYPES
NAN, INF = float("nan"), float("inf")


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
