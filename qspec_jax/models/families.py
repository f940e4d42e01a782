"""The families of models: how each differs from Llama, and the multimodal models that one of them is a part of.

A family is data: an `Architecture` here, and a table of tensor names in `qspec_jax.checkpoints.tensor_names`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Where norms are: before attention and MLP as in Llama, after them (on what they add to the residual stream), or both.
NORM_PLACES = INPUT, OUTPUT, SANDWICH = "input", "output", "sandwich"
# What a norm of queries and keys covers: each head before RoPE, each head after RoPE, or all heads together before RoPE.
QK_NORMS = HEAD, HEAD_AFTER_ROPE, WIDTH = "head", "head after rope", "width"
# Activations of MLPs: of a gate that multiplies `up` (the first two), or of `up` alone without a gate.
ACTIVATIONS = SILU, GELU, RELU2, XIELU = "silu", "gelu", "relu2", "xielu"
# The names that config.json (`hidden_act`) has for them.
ACTIVATION_NAMES = {SILU: ("silu", "swish"), GELU: ("gelu_pytorch_tanh",), RELU2: ("relu2",), XIELU: ("xielu",)}
GATED = (SILU, GELU)
# The layers that have a sliding window where config.json does not list them (`layer_types`).
ALL = "all"
ALL_IF_USED = "all if used"  # if `use_sliding_window` is set, all
FROM = "from"  # if it is set, those from `max_window_layers` on
WITHOUT_ROPE = "without rope"  # if it is set, those without RoPE
BUT_LAST = "all but last"  # of each `period` of layers all but the last
BUT_FIRST = "all but first"  # of each `period` of layers all but the first
WINDOW_RULES = ALL, ALL_IF_USED, FROM, WITHOUT_ROPE, BUT_LAST, BUT_FIRST


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How an architecture differs from Llama, and the defaults that Hugging Face assumes for keys that config.json lacks.

    Attributes:
        model_type: its `model_type` in config.json.
        qkv_bias: whether queries, keys and values have a bias, or the key of config.json that says so.
        output_bias: the same for attention's output projection.
        mlp_bias: the same for the MLP.
        norms: where norms are, one of `NORM_PLACES`.
        qk_norm: what the norm of queries and keys covers, one of `QK_NORMS`; None without such a norm.
        activation: of the MLP, one of `ACTIVATIONS`.
        multipliers: fields of `LlamaConfig` that are numbers of config.json, and their keys there.
        interleaved: whether RoPE rotates pairs of neighbouring channels; otherwise a channel of the first half with one of the second.
        partial_rotary: whether `partial_rotary_factor` counts, the share of a head's channels that RoPE rotates.
        query_scale: whether queries grow with their position, by `llama_4_scaling_beta` of the rope settings.
        ntk_alpha: whether `alpha` of the rope settings stretches rope_theta, where their type is dynamic.
        window_rule: the layers that have a sliding window, one of `WINDOW_RULES`; None: no layer ever has one.
        period: of `BUT_LAST` and `BUT_FIRST` the number of layers, of which one attends to everything, without `sliding_window_pattern`.
        hybrid: whether a sliding window, however long, takes RoPE from the layers that do not have it.
        local_theta: the rope_theta of layers with a window, which then have no other rope settings: its key, and its default; None: their
            RoPE is that of the other layers. The key rope_theta itself: that of the others.
        unit_offset: whether norms multiply by 1 + weight, before they round, and not by the weight.
        query_pre_attn_scalar: whether the square root of this key takes the place of that of head_dim in attention.
        scaled_embeddings: whether embeddings are multiplied by the square root of hidden_size.
        scaled_positions: whether `max_position_embeddings` counts the positions that linear scaling of RoPE adds.
        nope: whether some layers have no RoPE (`no_rope_layers`).
        experts: whether layers have experts instead of one MLP, as `num_experts` and other keys say (`experts_config`).
        whole_heads: whether transformers refuses heads that do not divide hidden_size, even if head_dim is given.
        only_longrope: whether longrope, under any of its names, is the only rope type besides the default.
        defaults: the values of keys that config.json lacks.
        sizes: the values of keys that the config of a text model within a multimodal one (`text_config`) lacks, besides `defaults`:
            transformers writes no value there that is its class's own.
    """

    model_type: str
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    norms: str = INPUT
    qk_norm: str | None = None
    activation: str = SILU
    multipliers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    interleaved: bool = False
    partial_rotary: bool = False
    query_scale: bool = False
    ntk_alpha: bool = False
    window_rule: str | None = None
    period: int = 4
    hybrid: bool = False
    local_theta: tuple[str, float] | None = None
    unit_offset: bool = False
    query_pre_attn_scalar: bool = False
    scaled_embeddings: bool = False
    scaled_positions: bool = False
    nope: bool = False
    experts: bool = False
    whole_heads: bool = False
    only_longrope: bool = False
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """A multimodal model, whose text model (`text_config`) is of one of the `ARCHITECTURES`.

    Attributes:
        model_type: its `model_type` in config.json.
        text_model_type: that of a `text_config` without one.
        left_out: how the names of tensors begin that are not the text model's.
        tied: whether embedding and head are tied where config.json, outside `text_config`, lacks `tie_word_embeddings`.
    """

    model_type: str
    text_model_type: str
    left_out: tuple[str, ...]
    tied: bool = True


_QWEN_DEFAULTS = dict(max_position_embeddings=32768, num_key_value_heads=32, sliding_window=4096, max_window_layers=28)
_ATTENTION_BIAS = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
_MULTIPLIERS = {name: name for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")}
_MINISTRAL_ROPE = dict(
    **dict(rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384),
    **dict(beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
)
_APERTUS_ROPE = dict(
    **dict(rope_type="llama3", rope_theta=12e6, factor=8.0, original_max_position_embeddings=8192),
    **dict(low_freq_factor=1.0, high_freq_factor=4.0),
)
_CWM_ROPE = dict(
    **dict(rope_type="llama3", rope_theta=1e6, factor=16.0, original_max_position_embeddings=8192),
    **dict(low_freq_factor=1.0, high_freq_factor=4.0),
)
_MISTRAL_SIZES = dict(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        "llama",
        **_ATTENTION_BIAS,
        mlp_bias="mlp_bias",
        whole_heads=True,
        defaults=dict(max_position_embeddings=2048, eos_token_id=2),
    ),
    "MistralForCausalLM": Architecture(
        "mistral",
        window_rule=ALL,
        defaults=dict(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096, eos_token_id=2),
        sizes=_MISTRAL_SIZES,
    ),
    "Ministral3ForCausalLM": Architecture(
        "ministral3",
        query_scale=True,
        window_rule=ALL,
        defaults=dict(
            **dict(max_position_embeddings=262144, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, eos_token_id=2),
            rope_parameters=_MINISTRAL_ROPE,
        ),
        sizes=_MISTRAL_SIZES | dict(vocab_size=131072, num_hidden_layers=34),
    ),
    "Qwen2ForCausalLM": Architecture("qwen2", qkv_bias=True, window_rule=FROM, defaults=_QWEN_DEFAULTS),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", **_ATTENTION_BIAS, qk_norm=HEAD, window_rule=FROM, defaults=_QWEN_DEFAULTS | dict(head_dim=128)
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        **_ATTENTION_BIAS,
        qk_norm=HEAD,
        window_rule=ALL_IF_USED,
        experts=True,
        defaults=dict(
            **dict(max_position_embeddings=32768, num_key_value_heads=4, sliding_window=4096, mlp_only_layers=[]),
            **dict(decoder_sparse_step=1, moe_intermediate_size=768, num_experts_per_tok=8, norm_topk_prob=False),
        ),
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3",
        partial_rotary=True,
        window_rule=ALL,
        only_longrope=True,
        defaults=dict(max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5, eos_token_id=32000),
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        **_ATTENTION_BIAS,
        mlp_bias="mlp_bias",
        window_rule=WITHOUT_ROPE,
        nope=True,
        defaults=dict(max_position_embeddings=32768, num_key_value_heads=4, rope_theta=2e6, eos_token_id=128001, tie_word_embeddings=True),
    ),
    "InternLM3ForCausalLM": Architecture(
        "internlm3",
        qkv_bias="qkv_bias",
        output_bias="bias",
        mlp_bias="bias",
        defaults=dict(max_position_embeddings=32768, num_key_value_heads=32, eos_token_id=2),
    ),
    "SeedOssForCausalLM": Architecture(
        "seed_oss",
        qkv_bias="attention_bias",
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        defaults=dict(max_position_embeddings=524288, num_key_value_heads=8, head_dim=128, attention_bias=True, eos_token_id=2),
    ),
    "GraniteForCausalLM": Architecture(
        "granite",
        **_ATTENTION_BIAS,
        mlp_bias="mlp_bias",
        multipliers=_MULTIPLIERS | {"attention_scale": "attention_multiplier"},
        defaults=dict(max_position_embeddings=2048, eos_token_id=2, attention_multiplier=1.0, **dict.fromkeys(_MULTIPLIERS, 1.0)),
    ),
    "Olmo2ForCausalLM": Architecture(
        "olmo2",
        **_ATTENTION_BIAS,
        norms=OUTPUT,
        qk_norm=WIDTH,
        defaults=dict(max_position_embeddings=2048, rms_norm_eps=1e-5, eos_token_id=50279),
    ),
    "Olmo3ForCausalLM": Architecture(
        "olmo3",
        **_ATTENTION_BIAS,
        norms=OUTPUT,
        qk_norm=WIDTH,
        window_rule=BUT_LAST,
        local_theta=("rope_theta", 500000.0),
        defaults=dict(max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=500000.0, sliding_window=4096, eos_token_id=50279),
    ),
    "CwmForCausalLM": Architecture(
        "cwm",
        mlp_bias="mlp_bias",
        window_rule=BUT_FIRST,
        defaults=dict(
            **dict(max_position_embeddings=131072, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, sliding_window=8192),
            **dict(rope_theta=1e6, rope_parameters=_CWM_ROPE, eos_token_id=[128001, 128008, 128009]),
        ),
    ),
    "Gemma3ForCausalLM": Architecture(
        "gemma3_text",
        **_ATTENTION_BIAS,
        norms=SANDWICH,
        qk_norm=HEAD,
        activation=GELU,
        window_rule=BUT_LAST,
        period=6,
        local_theta=("rope_local_base_freq", 10000.0),
        unit_offset=True,
        query_pre_attn_scalar=True,
        scaled_positions=True,
        scaled_embeddings=True,
        defaults=dict(
            **dict(max_position_embeddings=131072, num_key_value_heads=4, head_dim=256, rms_norm_eps=1e-6, sliding_window=4096),
            **dict(rope_theta=1e6, query_pre_attn_scalar=256, tie_word_embeddings=True, eos_token_id=1),
        ),
        sizes=dict(vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8),
    ),
    "Exaone4ForCausalLM": Architecture(
        "exaone4",
        norms=OUTPUT,
        qk_norm=HEAD,
        window_rule=BUT_LAST,
        hybrid=True,
        defaults=dict(max_position_embeddings=2048, num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096, eos_token_id=2),
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        "hunyuan_v1_dense",
        **_ATTENTION_BIAS,
        qk_norm=HEAD_AFTER_ROPE,
        ntk_alpha=True,
        defaults=dict(max_position_embeddings=2048, rms_norm_eps=1e-5, eos_token_id=2),
    ),
    "ApertusForCausalLM": Architecture(
        "apertus",
        **_ATTENTION_BIAS,
        qk_norm=HEAD,
        activation=XIELU,
        defaults=dict(max_position_embeddings=65536, rms_norm_eps=1e-5, rope_theta=12e6, rope_parameters=_APERTUS_ROPE, eos_token_id=2),
    ),
    "ArceeForCausalLM": Architecture(
        "arcee",
        **_ATTENTION_BIAS,
        mlp_bias="mlp_bias",
        activation=RELU2,
        whole_heads=True,
        defaults=dict(max_position_embeddings=4096, rms_norm_eps=1e-5, eos_token_id=128001),
    ),
    "Glm4ForCausalLM": Architecture(
        "glm4",
        qkv_bias="attention_bias",
        norms=SANDWICH,
        interleaved=True,
        partial_rotary=True,
        defaults=dict(
            **dict(max_position_embeddings=131072, num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-7, attention_bias=True),
            **dict(partial_rotary_factor=0.5, eos_token_id=[151329, 151336, 151338]),
        ),
    ),
}
_VISION = tuple(f"{base}{part}." for base in ("", "model.") for part in ("vision_tower", "multi_modal_projector"))
# Devstral and Mistral Small 3 have a text model of Mistral, Ministral 3 one of its own.
WRAPPERS: dict[str, Wrapper] = {
    "Mistral3ForConditionalGeneration": Wrapper("mistral3", "mistral", left_out=_VISION),
    "Gemma3ForConditionalGeneration": Wrapper("gemma3", "gemma3_text", left_out=_VISION),
}
