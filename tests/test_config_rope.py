"""RoPE's settings in config.json."""

import logging
import math

import pytest
from checkpoints import ROPE_TYPES, hf_config, old_spelling, rope_settings
from read_configs import refused

from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.rope_config import RopeConfig

NAN, INF = float("nan"), float("inf")


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


def test_positions_of_gemma_count_its_linear_scaling():
    config = hf_config("Gemma3ForCausalLM", hidden_act=..., **rope_settings("linear"), rope_local_base_freq=500.0)
    assert LlamaConfig.from_hf(config).max_length == config["max_position_embeddings"]


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
