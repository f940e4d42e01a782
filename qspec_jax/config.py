"""What a model, its cache and a call to generate are: frozen dataclasses, checked where they are made."""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qspec_jax.errors import InputError

log = logging.getLogger(__name__)

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How an architecture differs from Llama, and what Hugging Face assumes where its config.json is silent."""

    qkv_bias: bool = False
    qk_norm: bool = False
    defaults: tuple[tuple[str, Any], ...] = ()


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(defaults=(("sliding_window", 4096), ("num_key_value_heads", 8))),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, defaults=(("num_key_value_heads", 32), ("use_sliding_window", False))),
    "Qwen3ForCausalLM": Architecture(
        qk_norm=True, defaults=(("num_key_value_heads", 32), ("head_dim", 128), ("use_sliding_window", False))
    ),
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the union of what the types need, with Hugging Face's names."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """A Llama-family model, from its Hugging Face config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    dtype: str

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens: linear and dynamic scaling stretch what the checkpoint was trained for."""
        stretch = self.rope.factor if self.rope.rope_type in ("linear", "dynamic") else 1.0
        return int(self.max_position_embeddings * stretch)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | str | Path, *, source: str = "config.json") -> "LlamaConfig":
        """Reads a config.json (its path, or its contents).

        Raises InputError for an architecture, rope type, activation, sliding window or quantization that is not supported,
        naming it, and for a missing or senseless value.
        """
        if isinstance(config, (str, Path)):
            source = str(config)
            config = read_json(Path(config))
        return _Reader(config, source).llama()


class _Reader:
    """Reads one config.json; every error names the file."""

    def __init__(self, raw: Mapping[str, Any], source: str):
        self.source = source
        names = raw.get("architectures") or ["(none)"]
        self.name = names[0]
        if self.name not in ARCHITECTURES:
            raise self.error(f"architecture {self.name} is not supported; supported are {', '.join(ARCHITECTURES)}")
        self.architecture = ARCHITECTURES[self.name]
        self.raw = dict(self.architecture.defaults) | {k: v for k, v in raw.items() if v is not None or k == "sliding_window"}

    def error(self, what: str) -> InputError:
        return InputError(f"{self.source}: {what}")

    def number(self, name: str, default=None, *, of: Mapping[str, Any] | None = None, kind=int, least=None):
        value = (self.raw if of is None else of).get(name, default)
        if value is None:
            raise self.error(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or kind(value) != value:
            raise self.error(f"{name} is {value!r}, not {'a whole number' if kind is int else 'a number'}")
        if not math.isfinite(value) or value < (least if least is not None else 1 if kind is int else 0):
            raise self.error(f"{name} is {value}, too small" if math.isfinite(value) else f"{name} is not finite")
        return kind(value)

    def llama(self) -> LlamaConfig:
        raw = self.raw
        if raw.get("quantization_config"):
            raise self.error("the checkpoint is quantized already (quantization_config); bring the unquantized one")
        if raw.get("hidden_act", "silu") != "silu":
            raise self.error(f"hidden_act {raw['hidden_act']} is not supported, only silu")
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        kv_heads = self.number("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        head_dim = self.number("head_dim", hidden // heads)
        if head_dim % 2:
            raise self.error(f"head_dim {head_dim} is odd; rotary embedding needs an even one")
        positions = self.number("max_position_embeddings", 2048)
        self.refuse_sliding_window(positions)
        bias = bool(raw.get("attention_bias", False))
        return LlamaConfig(
            architecture=self.name,
            vocab_size=self.number("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.number("intermediate_size"),
            num_layers=self.number("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.number("rms_norm_eps", 1e-6, kind=float),
            rope=self.rope(head_dim, positions),
            max_position_embeddings=positions,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=self.architecture.qkv_bias or bias,
            output_bias=bias and not self.architecture.qkv_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=self.architecture.qk_norm,
            eos_token_ids=token_ids(raw.get("eos_token_id"), self.source),
            dtype=self.dtype(),
        )

    def dtype(self) -> str:
        name = str(self.raw.get("dtype", self.raw.get("torch_dtype", "float32"))).removeprefix("torch.")
        if name not in ("float16", "bfloat16", "float32", "float64"):
            raise self.error(f"dtype {name} is not supported; float16, bfloat16, float32 or float64 is")
        return name

    def refuse_sliding_window(self, positions: int) -> None:
        window = self.raw.get("sliding_window")
        types = self.raw.get("layer_types")
        if types is not None:
            active = "sliding_attention" in types
        else:
            active = self.raw.get("use_sliding_window", self.name == "MistralForCausalLM")
        if active and window is not None and window < positions:
            raise self.error(
                f"sliding-window attention (sliding_window {window}, {positions} positions) is not supported; "
                "only full attention is"
            )

    def rope(self, head_dim: int, positions: int) -> RopeConfig:
        # transformers 4 spells it rope_theta and rope_scaling, transformers 5 rope_parameters.
        given = dict(self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {})
        rope_type = given.get("rope_type", given.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise self.error(f"rope type {rope_type} is not supported; supported are {', '.join(ROPE_TYPES)}")
        if given.get("partial_rotary_factor", self.raw.get("partial_rotary_factor", 1.0)) != 1.0:
            raise self.error("partial_rotary_factor is not supported; the whole head must be rotated")
        theta = self.number("rope_theta", self.raw.get("rope_theta", 10000.0), of=given, kind=float)
        if rope_type == "default":
            return RopeConfig(rope_theta=theta)
        original = self.raw.get("original_max_position_embeddings", given.get("original_max_position_embeddings", positions))
        original = self.number("original_max_position_embeddings", of={"original_max_position_embeddings": original})
        if rope_type in ("yarn", "longrope"):
            factor = self.number("factor", positions / original, of=given, kind=float)
        else:
            factor = self.number("factor", of=given, kind=float)
        rope = RopeConfig(rope_type, theta, factor, original)
        if rope_type == "yarn":
            return dataclasses.replace(
                rope,
                attention_factor=self.yarn_attention_factor(given, factor),
                beta_fast=float(given.get("beta_fast") or 32),
                beta_slow=float(given.get("beta_slow") or 1),
                truncate=bool(given.get("truncate", True)),
            )
        if rope_type == "longrope":
            default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
            return dataclasses.replace(
                rope,
                attention_factor=self.number("attention_factor", default, of={k: v for k, v in given.items() if v is not None}, kind=float),
                short_factor=self.factors(given, "short_factor", head_dim // 2),
                long_factor=self.factors(given, "long_factor", head_dim // 2),
            )
        if rope_type == "llama3":
            low = self.number("low_freq_factor", of=given, kind=float)
            high = self.number("high_freq_factor", of=given, kind=float)
            if high <= low:
                raise self.error(f"high_freq_factor {high} must be larger than low_freq_factor {low}")
            return dataclasses.replace(rope, low_freq_factor=low, high_freq_factor=high)
        return rope

    def yarn_attention_factor(self, given: Mapping[str, Any], factor: float) -> float:
        if given.get("attention_factor") is not None:
            return self.number("attention_factor", of=given, kind=float)
        mscale = lambda m: 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0
        if given.get("mscale") and given.get("mscale_all_dim"):
            return mscale(given["mscale"]) / mscale(given["mscale_all_dim"])
        return mscale(1.0)

    def factors(self, given: Mapping[str, Any], name: str, length: int) -> tuple[float, ...]:
        values = given.get(name)
        if not isinstance(values, list) or len(values) != length:
            raise self.error(f"{name} must be a list of {length} numbers (head_dim / 2)")
        return tuple(float(v) for v in values)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; InputError when it cannot be read or is no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: should hold a JSON object")
    return value


def token_ids(value: Any, source: str) -> tuple[int, ...]:
    """One token id or a list of them, as a tuple."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(v, int) and v >= 0 for v in values):
        raise InputError(f"{source}: eos_token_id should be a token id or a list of them, not {value!r}")
    return tuple(values)


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """The KV cache of a call to generate.

    group_size: tokens of a key group, even; None is 128, or head_dim when that is smaller. scheme: quantizer, a key of
    `pallas_kernels.kv_format.SCHEMES`. kind: "hierarchical", or "full" for a cache in the model's own precision.
    """

    kind: str = "hierarchical"
    group_size: int | None = None
    scheme: str = "int8_first"

    def group_size_for(self, head_dim: int) -> int:
        size = min(128, head_dim) if self.group_size is None else self.group_size
        if size < 2 or size % 2:
            raise InputError(f"group size {size} should be an even number, at least 2")
        return size


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """What to generate and how.

    method: "quantspec" (draft and verify) or "autoregressive". cache: "int8" (the hierarchical cache, both planes) or
    "full"; None is "int8" for quantspec, "full" for autoregressive. num_speculative_tokens is the paper's gamma; fewer are drafted
    where the schedule or the length cap leaves no room for more. temperature 0 is greedy; top_k 0 and top_p 1 filter
    nothing. eos_token_ids None takes the checkpoint's.
    """

    max_new_tokens: int = 256
    method: str = "quantspec"
    cache: str | None = None
    num_speculative_tokens: int = 4
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    eos_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    group_size: int | None = None
    scheme: str = CacheConfig.scheme

    def __post_init__(self):
        def check(ok: bool, what: str):
            if not ok:
                raise InputError(what)

        check(self.method in ("quantspec", "autoregressive"), f"method {self.method!r} should be quantspec or autoregressive")
        check(self.cache in (None, "full", "int8"), f"cache {self.cache!r} should be full or int8")
        check(self.max_new_tokens >= 1, f"max_new_tokens {self.max_new_tokens} should be at least 1")
        check(self.num_speculative_tokens >= 0, f"num_speculative_tokens (gamma) {self.num_speculative_tokens} should be 0 or more")
        check(math.isfinite(self.temperature) and self.temperature >= 0, f"temperature {self.temperature} should be 0 or more")
        check(self.top_k >= 0, f"top_k {self.top_k} should be 0 (off) or more")
        check(0 < self.top_p <= 1, f"top_p {self.top_p} should be in (0, 1]")

    @property
    def cache_config(self) -> CacheConfig:
        cache = self.cache or ("int8" if self.method == "quantspec" else "full")
        return CacheConfig("full" if cache == "full" else "hierarchical", self.group_size, self.scheme)
