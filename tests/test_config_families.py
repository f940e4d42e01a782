"""What families and multimodal models have in config.json."""

import dataclasses

import pytest
from checkpoints import CASES, MODEL_TYPES, WRAPPER, hf_config, rope_settings, wrapped
from read_configs import refused

from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.experts_config import ExpertsConfig
from qspec_jax.models.rope_config import RopeConfig

LLAMA, MISTRAL, *_ = MODEL_TYPES


def test_absent_keys_of_the_others():
    needed = {key: hf_config()[key] for key in ("vocab_size", "intermediate_size", "num_hidden_layers")}
    needed |= {"hidden_size": 2048, "num_attention_heads": 64}
    phi, smol, intern = (
        LlamaConfig.from_hf(needed | {"architectures": [f"{name}ForCausalLM"]}) for name in ("Phi3", "SmolLM3", "InternLM3")
    )
    assert (phi.rms_norm_eps, phi.max_position_embeddings, phi.num_kv_heads, phi.tie_word_embeddings) == (1e-5, 4096, 64, False)
    assert (smol.rope.rope_theta, smol.max_position_embeddings, smol.num_kv_heads, smol.tie_word_embeddings) == (2e6, 32768, 4, True)
    assert (intern.max_position_embeddings, intern.num_kv_heads, intern.tie_word_embeddings) == (32768, 32, False)


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


def test_text_models_lack_what_transformers_assumes():
    # As google/gemma-3-4b-it has it; transformers leaves the values of its classes out.
    gemma = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": gemma}
    found = LlamaConfig.from_hf(outer)
    assert (found.vocab_size, found.num_heads, found.num_kv_heads, found.head_dim) == (262208, 8, 4, 256)
    assert (found.hidden_size, found.num_layers, found.sliding_window, found.tie_word_embeddings) == (2560, 34, 1024, True)
    sizes = ("vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    found = LlamaConfig.from_hf(wrapped({k: v for k, v in hf_config(MISTRAL).items() if k not in sizes}, tensors={})[0])
    assert (found.vocab_size, found.num_heads, found.num_kv_heads, found.intermediate_size) == (32000, 32, 8, 14336)
    refused({k: v for k, v in hf_config(MISTRAL).items() if k != "vocab_size"}, "vocab_size is missing")


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
