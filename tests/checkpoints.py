"""Tiny Hugging Face checkpoints of random weights, made with numpy alone, and the cases whose logits are in tests/goldens.

The tests load these directories with qspec_jax, make_goldens.py loads the same ones with transformers. A tensor follows
from its name and the seed alone, so that no weights need to be stored. Imports nothing of qspec_jax, nor JAX or torch.
"""

import json
import math
import shutil
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

GOLDENS = Path(__file__).parent / "goldens" / "logits.npz"

MODEL_TYPES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
OTHER_TYPES = {
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
    "InternLM3ForCausalLM": "internlm3",
    "SeedOssForCausalLM": "seed_oss",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
    "Exaone4ForCausalLM": "exaone4",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "Glm4ForCausalLM": "glm4",
    "Ministral3ForCausalLM": "ministral3",
    "Olmo3ForCausalLM": "olmo3",
    "CwmForCausalLM": "cwm",
    "Gemma3ForCausalLM": "gemma3_text",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
# The activations of those whose MLP has no gate.
UNGATED = {"ApertusForCausalLM": "xielu", "ArceeForCausalLM": "relu2"}
ACTIVATIONS = UNGATED | {"Gemma3ForCausalLM": "gelu_pytorch_tanh"}
WRAPPER = "Mistral3ForConditionalGeneration"
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
HEAD_DIMS = (64, 96, 128)


def hf_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """A config.json as transformers 5 writes it. A key changed to `...` is left out."""
    config = {
        "architectures": [architecture],
        "model_type": (MODEL_TYPES | OTHER_TYPES)[architecture],
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": ACTIVATIONS.get(architecture, "silu"),
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}
        | ({"llama_4_scaling_beta": 0.1} if architecture == "Ministral3ForCausalLM" else {}),
        "sliding_window": None,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "dtype": "float32",
    } | changes
    return {key: value for key, value in config.items() if value is not ...}


def rope_settings(rope_type: str, head_dim: int = 64, /, **changes: Any) -> dict[str, Any]:
    """The keys of a config that a rope type needs; `changes` go into rope_parameters."""
    parameters: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10000.0}
    positions = 128
    match rope_type:
        case "linear" | "dynamic":
            positions = 32
            parameters |= {"factor": 4.0}
        case "yarn":
            positions = 2048
            parameters |= {"factor": 4.0, "original_max_position_embeddings": 512}
        case "longrope":
            ramp = np.linspace(0, 1, head_dim // 2)
            parameters |= {"short_factor": list(1 + ramp / 2), "long_factor": list(1 + 5 * ramp), "original_max_position_embeddings": 32}
        case "llama3":
            parameters |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    return {"rope_parameters": parameters | changes, "max_position_embeddings": positions}


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 4 writes it: rope_theta and rope_scaling, torch_dtype."""
    rope, local = dict(config["rope_parameters"]), {}
    if isinstance(rope.get("full_attention"), dict) and "sliding_attention" in rope:  # RoPE differs between kinds of layers
        local = {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"]} if config["model_type"] == "gemma3_text" else {}
        rope = dict(rope["full_attention"])
    old = local | {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config["dtype"]}
    old |= {key: rope.pop(key) for key in ("partial_rotary_factor",) if key in rope}
    return old | {"rope_scaling": None if rope == {"rope_type": "default"} else rope}


def _cases() -> dict[str, dict[str, Any]]:
    cases = {}
    for a, (architecture, model_type) in enumerate(MODEL_TYPES.items()):
        for r, rope_type in enumerate(ROPE_TYPES):
            # Over an architecture's six rope types: every pair of a head_dim with tied or untied, GQA and MHA three times each.
            head_dim = HEAD_DIMS[(a + r) % 3]
            cases[f"{model_type}-{rope_type}"] = hf_config(
                architecture,
                head_dim=head_dim,
                num_key_value_heads=(2, 4)[(a + r // 2) % 2],
                tie_word_embeddings=(a + r) % 2 == 0,
                **rope_settings(rope_type, head_dim),
            )
    yarn = lambda **changes: hf_config(**rope_settings("yarn", **changes))
    no_padding = {"pad_token_id": None}
    two_heads = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    return cases | {
        "llama-biases": hf_config(attention_bias=True, mlp_bias=True),
        # Of the two keys Qwen 3 knows the first, Mistral and Qwen 2 neither.
        "qwen3-biases": hf_config("Qwen3ForCausalLM", attention_bias=True, mlp_bias=True),
        "mistral-stray-bias-keys": hf_config("MistralForCausalLM", attention_bias=True, mlp_bias=True),
        "qwen2-stray-bias-keys": hf_config("Qwen2ForCausalLM", attention_bias=True, mlp_bias=True),
        "llama-eps": hf_config(rms_norm_eps=1e-3),
        "qwen3-eps": hf_config("Qwen3ForCausalLM", rms_norm_eps=1e-3),
        "llama-theta": hf_config(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
        # head_dim is hidden_size / num_attention_heads where it is not given, in Qwen 3 it is 128.
        "llama-no-head-dim": hf_config(head_dim=..., **two_heads),
        "mistral-no-head-dim": hf_config("MistralForCausalLM", head_dim=None, **two_heads),
        "qwen2-no-head-dim": hf_config("Qwen2ForCausalLM", head_dim=..., **two_heads),
        "qwen3-no-head-dim": hf_config("Qwen3ForCausalLM", head_dim=...),
        "mistral-idle-window": hf_config("MistralForCausalLM", sliding_window=128),
        "qwen2-idle-window": hf_config("Qwen2ForCausalLM", sliding_window=16, use_sliding_window=True, max_window_layers=2),
        "yarn-mscale": yarn(mscale=1.3, mscale_all_dim=0.7),
        "yarn-mscale-alone": yarn(mscale=1.3),
        "yarn-attention-factor": yarn(attention_factor=0.8),
        "yarn-no-truncate": yarn(truncate=False, beta_fast=16, beta_slow=2),
        "yarn-factor-null": yarn(factor=None),
        # The ramp's upper end below its lower one, and both the same.
        "yarn-ramp-reversed": yarn(original_max_position_embeddings=4),
        "yarn-ramp-empty": yarn(original_max_position_embeddings=6),
        "yarn-ramp-beyond": yarn(rope_theta=4.0),
        "longrope-factor": hf_config(**rope_settings("longrope", factor=2.0)),
        "longrope-attention-factor": hf_config(**rope_settings("longrope", attention_factor=1.5)),
        "phi3-default": hf_config("Phi3ForCausalLM", tie_word_embeddings=True, head_dim=..., **two_heads, **no_padding),
        "phi3-longrope": hf_config(
            "Phi3ForCausalLM", head_dim=..., original_max_position_embeddings=32, **two_heads, **no_padding, **rope_settings("longrope")
        ),
        # Every fourth layer without RoPE, or those that are named.
        "smollm3-interval": hf_config("SmolLM3ForCausalLM", num_hidden_layers=4, tie_word_embeddings=True, **no_padding),
        "smollm3-layers": hf_config("SmolLM3ForCausalLM", no_rope_layers=[0, 1], attention_bias=True, **no_padding),
        "internlm3-dynamic": hf_config("InternLM3ForCausalLM", qkv_bias=False, bias=False, **rope_settings("dynamic")),
        "internlm3-biases": hf_config("InternLM3ForCausalLM", qkv_bias=True, bias=True),
        **_family_cases(),
        **_window_cases(),
        # As Phi 3 has it: this one counts.
        "longrope-original-outside": hf_config(original_max_position_embeddings=16, **rope_settings("longrope")),
    }


def _family_case(
    architecture: str, rope_type: str = "default", *, dim: int = 16, rope: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    settings = {"head_dim": 16, "pad_token_id": None} | rope_settings(rope_type, dim, **(rope or {}))
    return hf_config(f"{architecture}ForCausalLM", **(settings | changes))


def _family_cases() -> dict[str, dict[str, Any]]:
    """Families whose layers differ from Llama's, each with all that it differs in."""

    case = _family_case
    # The query scale then changes twice, and the ramp of the frequencies is not empty.
    ministral = {
        "llama_4_scaling_beta": 0.5,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 16,
        "beta_fast": 2.0,
    }
    # Enough experts for one or two tokens to read those alone that they choose.
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
    granite = {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.3, "logits_scaling": 0.5}
    return {
        "seed_oss-biases": case("SeedOss", attention_bias=..., attention_out_bias=True, mlp_bias=True),
        "granite-multipliers": case("Granite", tie_word_embeddings=True, **granite),
        "granite-biases": case("Granite", attention_bias=True, mlp_bias=True, **(granite | {"residual_multiplier": 1.5})),
        "phi3-partial": case("Phi3", rope={"partial_rotary_factor": 0.75}),
        "phi3-partial-longrope": case(
            "Phi3", "longrope", dim=12, rope={"partial_rotary_factor": 0.75}, original_max_position_embeddings=32
        ),
        "olmo2-widths": case("Olmo2", attention_bias=True),
        "exaone4-full": case("Exaone4", "llama3", layer_types=["full_attention"] * 2, tie_word_embeddings=True),
        "hunyuan-alpha": case(
            "HunYuanDenseV1", "dynamic", rope={"alpha": 50.0, "factor": 1.0}, max_position_embeddings=128, tie_word_embeddings=True
        ),
        "apertus-xielu": case("Apertus", "llama3", attention_bias=True),
        "arcee-relu2": case("Arcee", "yarn", mlp_bias=True),
        "glm4-partial": case("Glm4", rope={"partial_rotary_factor": 0.5}, attention_bias=True),
        "glm4-whole": case("Glm4", "yarn", rope={"partial_rotary_factor": 1.0}, attention_bias=False, num_key_value_heads=1),
        "ministral3-scaled": case("Ministral3", "yarn", rope=ministral),
        "qwen3_moe-experts": case("Qwen3Moe", num_experts=12, norm_topk_prob=True, **experts),
        "qwen3_moe-mixed": case("Qwen3Moe", num_local_experts=5, mlp_only_layers=[1], tie_word_embeddings=True, **experts),
    }


def _window_cases() -> dict[str, dict[str, Any]]:
    """Layers with a sliding window, which 48 tokens exceed."""
    case = _family_case
    window = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}

    def ropes(local_theta: float, **of_full: Any) -> dict[str, Any]:
        local = {"rope_type": "default", "rope_theta": local_theta}
        return {"rope_parameters": {"full_attention": {"rope_theta": 1e6} | of_full, "sliding_attention": local}}

    yarn = rope_settings("yarn", original_max_position_embeddings=16, rope_theta=5e5)["rope_parameters"]
    gemma3 = window | ropes(500.0, rope_type="linear", factor=8.0)
    gemma = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
    return {
        "mistral-window": case("Mistral", sliding_window=12),
        "qwen2-window": case("Qwen2", sliding_window=12, use_sliding_window=True, max_window_layers=1),
        "exaone4-window": case("Exaone4", "llama3", sliding_window=12, sliding_window_pattern=2),
        "olmo3-window": case("Olmo3", **window, **ropes(5e5, **yarn)),
        "cwm-window": case("Cwm", "llama3", sliding_window=12, layer_types=["full_attention", "sliding_attention"]),
        "gemma3-window": case("Gemma3", **gemma3, **gemma),
        "gemma3-idle-window": case("Gemma3", **(gemma3 | {"sliding_window": 128}), **gemma),
    }


CASES: dict[str, dict[str, Any]] = _cases()
FAMILY_CASES, WINDOW_CASES = tuple(_family_cases()), tuple(_window_cases())


def variants() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Ways in which files say what a model is, all of which transformers reads: a config, and the same model's as the file has it."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}

    def add(name: str, config: dict[str, Any], **changes: Any) -> None:
        found[name] = config, {key: value for key, value in (config | changes).items() if value is not ...}

    def spell(name: str, config: dict[str, Any]) -> None:
        """One model with its RoPE in every spelling."""
        old, rope = old_spelling(config), dict(config["rope_parameters"])
        rope_type, theta = rope.pop("rope_type"), rope.pop("rope_theta")
        found[f"{name} new"], found[f"{name} old"] = (config, config), (config, old)
        add(f"{name} theta outside", config, rope_parameters={"rope_type": rope_type, **rope}, rope_theta=theta)
        add(f"{name} whole theta", config, rope_parameters=config["rope_parameters"] | {"rope_theta": int(theta)})
        if rope_type == "default":
            add(f"{name} without rope", config, rope_parameters=..., rope_theta=theta)
            return
        scaling = {"rope_parameters": ..., "rope_theta": theta}
        add(f"{name} type", config, **scaling, rope_scaling={"type": rope_type, **rope})
        add(f"{name} both types", config, **scaling, rope_scaling={"type": rope_type, "rope_type": rope_type, **rope})
        add(f"{name} null type", config, **scaling, rope_scaling={"type": None, "rope_type": rope_type, **rope})
        add(f"{name} finetuned", config, **scaling, rope_scaling={"type": rope_type, "finetuned": True, **rope})
        if "original_max_position_embeddings" in rope:
            original = float(rope["original_max_position_embeddings"])
            whole = {"original_max_position_embeddings": original}
            add(f"{name} original with a point", config, rope_parameters=config["rope_parameters"] | whole)

    for rope_type in ROPE_TYPES:
        spell(f"llama {rope_type}", hf_config(**rope_settings(rope_type)))
    for architecture in ("MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        spell(f"{MODEL_TYPES[architecture]} yarn", hf_config(architecture, **rope_settings("yarn")))
    llama = hf_config(attention_bias=True, mlp_bias=True)
    for name, names in {"absent": ..., "null": None, "empty": [], "base": ["LlamaModel"], "old": ["LLaMAForCausalLM"]}.items():
        add(f"architectures {name}", llama, architectures=names)
    for architecture, model_type in (MODEL_TYPES | OTHER_TYPES).items():
        if model_type != "internlm3":
            phi = {} if architecture in MODEL_TYPES else {"head_dim": 16, "pad_token_id": None}
            phi |= {"layer_types": ["full_attention"] * 2} if model_type == "exaone4" else {}
            phi |= {"sliding_window": 128} if model_type == "cwm" else {}  # which has to have one
            add(f"{model_type} by its type", hf_config(architecture, **phi), architectures=None)
    add("hidden_act swish", llama, hidden_act="swish")
    add("dtype null", llama, dtype=None)
    add("dtype of old", llama, dtype=..., torch_dtype="float32")
    add("tied", hf_config(tie_word_embeddings=True))
    add("no head_dim", hf_config(head_dim=16), head_dim=...)
    for name, ids in {"one": 5, "list": [5, 6, 7], "null": None, "of one": [0]}.items():
        add(f"eos {name}", hf_config(eos_token_id=ids))
    for model_type, change in {
        "mistral": {"sliding_window": 128},
        "qwen2": {"sliding_window": 16, "use_sliding_window": False},
        "qwen3": {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["full_attention"] * 2},
    }.items():
        add(f"{model_type} window", hf_config({v: k for k, v in MODEL_TYPES.items()}[model_type], **change))
    return found


def known_to_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """The same model under an architecture whose code transformers has."""
    if config["architectures"] != ["InternLM3ForCausalLM"]:
        return config
    biases = {"attention_bias": config["qkv_bias"], "mlp_bias": config["bias"]}
    return config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | biases


def case_lengths(name: str) -> tuple[int, ...]:
    """How many of a case's tokens its goldens were computed from: around the original length, mostly 32, where that matters."""
    rope = CASES[name].get("rope_parameters", {})
    return (24, 32, 33, 48) if rope.get("rope_type") in ("dynamic", "longrope") and "alpha" not in rope else (48,)


# Prompts and new tokens of "phi3-longrope" that lie on one side of its original length, 32, as near to it as can be: the last new token is
# never fed back.
CONTINUED = ((25, 8), (33, 8))


def case_tokens(name: str) -> np.ndarray:
    """Two rows of 48 tokens."""
    return (_uniform(name, 0, 2 * 48) * CASES[name]["vocab_size"]).astype(np.int32).reshape(2, 48)


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint of a config, without lm_head.weight where it is tied."""
    config = known_to_transformers(config)
    architecture = config["architectures"][0]
    hidden, width, vocab, heads = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"))
    head_dim = config.get("head_dim") or (128 if architecture == "Qwen3ForCausalLM" else hidden // heads)
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    no_bias = ("MistralForCausalLM", "Ministral3ForCausalLM", "Qwen2ForCausalLM", "Exaone4ForCausalLM")
    attention_bias = architecture not in no_bias and config.get("attention_bias", architecture == "SeedOssForCausalLM")
    qkv_bias = architecture == "Qwen2ForCausalLM" or attention_bias
    output_bias = config.get("attention_out_bias", False) if architecture == "SeedOssForCausalLM" else attention_bias
    output_bias = output_bias and architecture != "Glm4ForCausalLM"
    with_mlp_bias = ("LlamaForCausalLM", "SmolLM3ForCausalLM", "SeedOssForCausalLM", "GraniteForCausalLM", "ArceeForCausalLM")
    mlp_bias = architecture in with_mlp_bias and config.get("mlp_bias", False)

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    norms = {
        "Olmo2ForCausalLM": ("post_attention", "post_feedforward"),
        "Exaone4ForCausalLM": ("post_attention", "post_feedforward"),
        "ApertusForCausalLM": ("attention", "feedforward"),
        "Glm4ForCausalLM": ("input", "post_attention", "post_self_attn", "post_mlp"),
        "Olmo3ForCausalLM": ("post_attention", "post_feedforward"),
        "Gemma3ForCausalLM": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
    }.get(architecture, ("input", "post_attention"))
    qk_norms = {
        "Olmo2ForCausalLM": {"q_norm": queries, "k_norm": keys},
        "Olmo3ForCausalLM": {"q_norm": queries, "k_norm": keys},
        "HunYuanDenseV1ForCausalLM": {"query_layernorm": head_dim, "key_layernorm": head_dim},
    }.get(architecture, {})
    if architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Exaone4ForCausalLM", "ApertusForCausalLM", "Gemma3ForCausalLM"):
        qk_norms = {"q_norm": head_dim, "k_norm": head_dim}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in norms}
        shapes |= {f"{layer}.self_attn.{name}.weight": (size,) for name, size in qk_norms.items()}
        for name, shape, bias in (
            ("self_attn.q_proj", (queries, hidden), qkv_bias),
            ("self_attn.k_proj", (keys, hidden), qkv_bias),
            ("self_attn.v_proj", (keys, hidden), qkv_bias),
            ("self_attn.o_proj", (hidden, queries), output_bias),
            ("mlp.gate_proj", (width, hidden), mlp_bias),
            ("mlp.up_proj", (width, hidden), mlp_bias),
            ("mlp.down_proj", (hidden, width), mlp_bias),
        ):
            shapes |= {f"{layer}.{name}.weight": shape} | ({f"{layer}.{name}.bias": shape[:1]} if bias else {})
        fused = {
            "Phi3ForCausalLM": {"self_attn.qkv": ("self_attn.q", "self_attn.k", "self_attn.v"), "mlp.gate_up": ("mlp.gate", "mlp.up")},
            "Glm4ForCausalLM": {"mlp.gate_up": ("mlp.gate", "mlp.up")},
        }.get(architecture, {})
        for name, parts in fused.items():
            rows = sum(shapes.pop(f"{layer}.{part}_proj.weight")[0] for part in parts)
            shapes[f"{layer}.{name}_proj.weight"] = (rows, hidden)
        if architecture in UNGATED:
            shapes = {name: shape for name, shape in shapes.items() if "gate_proj" not in name}
        if architecture == "Qwen3MoeForCausalLM" and i not in config.get("mlp_only_layers", ()):
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith(f"{layer}.mlp.")}
            count, of_expert = config.get("num_experts") or config.get("num_local_experts", 128), config.get("moe_intermediate_size", 768)
            shapes[f"{layer}.mlp.gate.weight"] = (count, hidden)
            for expert in range(count):
                path = f"{layer}.mlp.experts.{expert}"
                shapes |= {f"{path}.{name}_proj.weight": (of_expert, hidden) for name in ("gate", "up")}
                shapes[f"{path}.down_proj.weight"] = (hidden, of_expert)
        if architecture == "ApertusForCausalLM":
            shapes |= {
                f"{layer}.mlp.act_fn.{name}": shape for name, shape in {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}.items()
            }
    return shapes


def random_tensors(config: dict[str, Any], *, seed: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Weights under which logits spread over about ten, and no norm or bias can be lost unseen."""

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        x = math.sqrt(12) * (_uniform(name, seed, math.prod(shape)).reshape(shape) - 0.5)  # mean 0, variance 1
        if "norm" in name:
            return 1 + 0.3 * x
        if name.endswith(".bias"):
            return 0.3 * x
        if "act_fn" in name:
            return {"beta": np.float64(0.5), "eps": np.float64(-0.01)}.get(name.split(".")[-1], 0.5 + 0.5 * x)
        scale = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 0.5}.get(name, shape[-1] ** -0.5)
        return scale * x

    # numpy knows bfloat16 through ml_dtypes only.
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return {name: np.asarray(draw(name, shape), kind) for name, shape in tensor_shapes(config).items()}


def wrapped(
    config: dict[str, Any],
    *,
    tied: bool | None = False,
    prefix: str = "language_model.model.",
    tensors: dict[str, np.ndarray] | None = None,
    **changes: Any,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A multimodal model around a text model: its config, and its tensors with random ones of its other parts.

    Args:
        config: of the text model.
        tied: tie_word_embeddings outside of the text model's config; None: it is left out.
        prefix: of the names of the text model's tensors but the head.
        tensors: of the text model, by the names that it has by itself; None: random ones.
        changes: other keys of the config.
    """
    text = {key: value for key, value in config.items() if key != "architectures"}
    flag = {} if tied is None else {"tie_word_embeddings": tied}
    outer = {"architectures": [WRAPPER], "model_type": "mistral3", "text_config": text, "vision_config": {"model_type": "pixtral"}, **flag}
    head = "language_model.lm_head." if prefix.startswith("language_model.") else "lm_head."
    own = {
        head + name.removeprefix("lm_head.") if name.startswith("lm_head.") else prefix + name.removeprefix("model."): tensor
        for name, tensor in (random_tensors(config) if tensors is None else tensors).items()
    }
    beside = "" if prefix.startswith("language_model.") else "model."
    others = ("vision_tower.ln_pre.weight", "multi_modal_projector.norm.weight")
    return outer | changes, own | {beside + name: np.ones(8, np.float32) for name in others}


def write_checkpoint(
    directory: Path,
    config: dict[str, Any],
    *,
    shards: int = 1,
    seed: int = 0,
    dtype: str = "float32",
    tensors: dict[str, np.ndarray] | None = None,
    tokenizer: Path | None = None,
) -> Path:
    """Writes config.json and `tensors` (None: random ones of `dtype`) as one file, or as shards with an index, and the tokenizer of that
    directory; returns the directory."""
    tensors = random_tensors(config, seed=seed, dtype=dtype) if tensors is None else tensors
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
        shutil.copy(tokenizer / name, directory)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return directory
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        save_file(part, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return directory


def _uniform(name: str, seed: int, count: int) -> np.ndarray:
    """Numbers in [0, 1), from the raw stream: numpy promises that one in every version, and its distributions in none."""
    return (np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(count) >> np.uint64(11)) * 2.0**-53
