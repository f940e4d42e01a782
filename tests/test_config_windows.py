"""Sliding windows in config.json."""

import pytest
from checkpoints import MODEL_TYPES, hf_config, rope_settings
from read_configs import refused

from qspec_jax.models.config import LlamaConfig

LLAMA, MISTRAL, QWEN2, QWEN3 = MODEL_TYPES


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
    old = LlamaConfig.from_hf(hf_config("Gemma3ForCausalLM", hidden_act=..., sliding_window=127, **rope, rope_local_base_freq=500.0))
    assert (old.rope.factor, old.sliding_rope.rope_theta, old.sliding_rope.rope_type) == (8.0, 500.0, "default")
    assert old.sliding_layers == (0, 1) == old.windowed_layers
    plain = {"sliding_window": 128, "rope_theta": 1e6, "rope_local_base_freq": 500.0, "rope_parameters": ...}
    idle = LlamaConfig.from_hf(hf_config("Gemma3ForCausalLM", hidden_act=..., **plain))
    assert idle.sliding_layers == (0, 1) and idle.windowed_layers == () and idle.sliding_rope == old.sliding_rope
    by_kind = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 500.0}}
    assert LlamaConfig.from_hf(hf_config("Gemma3ForCausalLM", hidden_act=..., sliding_window=127, rope_parameters=by_kind)) == old
    olmo = LlamaConfig.from_hf(hf_config("Olmo3ForCausalLM", sliding_window=16, **rope))
    assert (olmo.rope.rope_type, olmo.sliding_rope.rope_type, olmo.sliding_rope.rope_theta) == ("linear", "default", 1e6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["sliding_attention"]}, "an entry for each of 2 layers"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"sliding_window_pattern": ""}, "sliding_window_pattern is empty, should be a whole number or letters such as LLLG"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"hidden_activation": "gelu"}, "hidden_activation gelu"),
    ],
)
def test_windows_that_are_refused(change, named):
    refused(hf_config("Gemma3ForCausalLM", **({"hidden_act": ..., "sliding_window": 16} | change)), named)


def test_a_window_of_llama_is_refused():
    config = hf_config(LLAMA, sliding_window=127, layer_types=["sliding_attention"] * 2)
    refused(config, "layer_types", "full attention")
