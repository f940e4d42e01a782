"""The configuration of a model, read from a Hugging Face config.json and checked."""

import dataclasses
import functools
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qspec_jax.errors import InputError, flat, warn_once
from qspec_jax.files import read_json

log = logging.getLogger(__name__)
# The rope settings of each type, besides its name, rope_theta and partial_rotary_factor.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ("short_factor", "long_factor", "factor", "original_max_position_embeddings", "attention_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
ROPE_TYPES = tuple(_ROPE_KEYS)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How an architecture differs from Llama, and the defaults that Hugging Face assumes for keys that config.json lacks.

    Attributes:
        qkv_bias: whether queries, keys and values have a bias, or the key of config.json that says so.
        output_bias: the same for attention's output projection.
        mlp_bias: the same for the MLP.
        qk_norm: whether queries and keys are normalized.
        windowed: whether `sliding_window` is in effect by itself, without another key that switches it on.
        nope: whether some layers have no RoPE (`no_rope_layers`).
        whole_heads: whether transformers refuses heads that do not divide hidden_size, even if head_dim is given.
        only_longrope: whether longrope, under any of its names, is the only rope type besides the default.
        defaults: the values of keys that config.json lacks.
    """

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windowed: bool = False
    nope: bool = False
    whole_heads: bool = False
    only_longrope: bool = False
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_QWEN_DEFAULTS = dict(max_position_embeddings=32768, num_key_value_heads=32, sliding_window=4096, max_window_layers=28)
_ATTENTION_BIAS = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        **_ATTENTION_BIAS,
        mlp_bias="mlp_bias",
        whole_heads=True,
        defaults=dict(max_position_embeddings=2048, eos_token_id=2),
    ),
    "MistralForCausalLM": Architecture(
        windowed=True,
        defaults=dict(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096, eos_token_id=2),
    ),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, defaults=_QWEN_DEFAULTS),
    "Qwen3ForCausalLM": Architecture(**_ATTENTION_BIAS, qk_norm=True, defaults=_QWEN_DEFAULTS | dict(head_dim=128)),
    "Phi3ForCausalLM": Architecture(
        windowed=True,
        only_longrope=True,
        defaults=dict(max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5, eos_token_id=32000),
    ),
    "SmolLM3ForCausalLM": Architecture(
        **_ATTENTION_BIAS,
        mlp_bias="mlp_bias",
        nope=True,
        defaults=dict(max_position_embeddings=32768, num_key_value_heads=4, rope_theta=2e6, eos_token_id=128001, tie_word_embeddings=True),
    ),
    "InternLM3ForCausalLM": Architecture(
        qkv_bias="qkv_bias",
        output_bias="bias",
        mlp_bias="bias",
        defaults=dict(max_position_embeddings=32768, num_key_value_heads=32, eos_token_id=2),
    ),
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the settings of all types together, with Hugging Face's names."""

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
    """The configuration of a Llama-family model, with Hugging Face's names where they are the same."""

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
    nope_layers: tuple[int, ...] = ()  # the layers without RoPE

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens: linear, dynamic and YaRN scaling extend the length that the checkpoint was trained for."""
        match self.rope.rope_type:
            case "linear" | "dynamic":
                return int(self.max_position_embeddings * self.rope.factor)
            case "yarn":  # users who add rope_scaling may leave max_position_embeddings as it was
                return max(self.max_position_embeddings, int(self.rope.original_max_position_embeddings * self.rope.factor))
        return self.max_position_embeddings

    @property
    def short_length(self) -> int | None:
        """The longest sequence with Phi-3's short RoPE factors; one token more, and transformers computes the whole cache again with the
        long ones. None for a model that never does."""
        recomputed = ARCHITECTURES[self.architecture].only_longrope and self.rope.rope_type == "longrope"
        return self.rope.original_max_position_embeddings if recomputed else None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | str | Path, *, source: str = "config.json", dtype: str = "float32") -> "LlamaConfig":
        """Reads a config.json.

        Args:
            config: its path, or its contents.
            source: the name of the contents in messages.
            dtype: the dtype of the weights if the config names none.

        Raises:
            InputError: for an architecture, rope type, activation, sliding window or quantization that is not supported, and for a value
                that is missing or impossible.
        """
        if isinstance(config, (str, Path)):
            source = str(config)
            config = read_json(Path(config))
        return _Reader(config, source, dtype).llama()


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class _Reader:
    """Reads one config.json; every error names the file."""

    def __init__(self, raw: Mapping[str, Any], source: str, dtype: str):
        self.source, self.assumed_dtype = source, dtype
        self.name = self.architecture_of(raw)
        if any(mark in self.name.lower() for mark in ("moe", "mixtral")) or any(raw.get(key) for key in _EXPERTS):
            raise self.error(f"{self.name} is a mixture of experts, which is not supported; a dense model is")
        if self.name not in ARCHITECTURES:
            raise self.error(f"architecture {self.name} is not supported; supported are {', '.join(ARCHITECTURES)}")
        self.architecture = ARCHITECTURES[self.name]
        # A null hides the architecture's default, and then counts as an absent key.
        self.raw = {k: v for k, v in {**self.architecture.defaults, **raw}.items() if v is not None}

    def architecture_of(self, raw: Mapping[str, Any]) -> str:
        """The architecture's name: that of the model type, as in transformers, unless `architectures` names a model of another kind."""
        names, model_type = raw.get("architectures"), raw.get("model_type")
        given = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "(none)"
        by_type = next((name for name in ARCHITECTURES if _family(name).lower() == model_type), None)
        named = next((name for name in ARCHITECTURES if given.lower() in (name.lower(), f"{_family(name)}Model".lower())), None)
        if by_type is None:
            if named and isinstance(model_type, str):
                warn_once(log, f"{self.source}: read as {named}, by its architectures; its model_type is {flat(model_type)}")
            is_other = isinstance(model_type, str) and (names is None or names == [])
            return f"of model type {model_type}" if is_other else named or given
        if named not in (None, by_type):
            warn_once(log, f"{self.source}: read as {by_type}, by its model_type, as transformers does, and not as {flat(given)}")
        return by_type if named or names is None or names == [] else given

    def error(self, what: str) -> InputError:
        return InputError(f"{self.source}: {flat(what)}")

    def number(
        self, name: str, default=None, *, of: Mapping[str, Any] | None = None, kind=int, above: float = 0, maximum: float = math.inf
    ):
        value = (self.raw if of is None else of).get(name, default)
        if value is None:
            raise self.error(f"{name} is missing")
        try:
            # transformers, which reads the file for the tokenizer, does not take 48.0 for a whole number.
            good = isinstance(value, (int, kind)) and not isinstance(value, bool) and math.isfinite(value) and kind(value) == value
        except OverflowError:
            good = False
        if not good:
            raise self.error(f"{name} is {value!r}, not {'a whole number' if kind is int else 'a finite number'}")
        if value <= above:
            raise self.error(f"{name} is {value}, should be more than {above}")
        if value > maximum:
            raise self.error(f"{name} is {value}, should be at most {maximum:g}")
        return kind(value)

    def flag(self, name: str, default: bool = False, *, of: Mapping[str, Any] | None = None) -> bool:
        value = (self.raw if of is None else of).get(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}, not true or false")
        return value

    def llama(self) -> LlamaConfig:
        raw = self.raw
        if raw.get("quantization_config"):
            method = raw["quantization_config"].get("quant_method") if isinstance(raw["quantization_config"], Mapping) else None
            raise self.error(quantized_already(f"quantization_config{f', {method}' if method else ''}"))
        if raw.get("hidden_act", "silu") not in ("silu", "swish"):  # two names of one function
            raise self.error(f"hidden_act {raw['hidden_act']} is not supported, only silu")
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        kv_heads = self.number("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        head_dim = self.number("head_dim", hidden // heads, above=2)
        if head_dim % 2:
            raise self.error(f"head_dim {head_dim} is odd; rotary embedding needs an even one")
        if self.architecture.whole_heads and hidden % heads:
            raise self.error(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, as {self.name} needs it")
        positions = self.number("max_position_embeddings")
        layers, vocab_size = self.number("num_hidden_layers", maximum=1000), self.number("vocab_size")
        config = LlamaConfig(
            architecture=self.name,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=self.number("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.number("rms_norm_eps", 1e-6, kind=float),
            rope=self.rope(head_dim, positions),
            max_position_embeddings=positions,
            tie_word_embeddings=self.flag("tie_word_embeddings"),
            qkv_bias=self.bias(self.architecture.qkv_bias),
            output_bias=self.bias(self.architecture.output_bias),
            mlp_bias=self.bias(self.architecture.mlp_bias),
            qk_norm=self.architecture.qk_norm,
            eos_token_ids=self.eos_token_ids(vocab_size),
            dtype=self.dtype(),
            nope_layers=self.nope_layers(layers) if self.architecture.nope else (),
        )
        self.refuse_sliding_window(config)
        return config

    def bias(self, setting: bool | str) -> bool:
        return self.flag(setting) if isinstance(setting, str) else setting

    def eos_token_ids(self, vocab_size: int) -> tuple[int, ...]:
        ids = self.raw.get("eos_token_id")
        # The default for the architecture's own vocabulary is no mistake in a file with a smaller one.
        assumed = ids is not None and ids == self.architecture.defaults.get("eos_token_id")
        return (ids,) if assumed else eos_token_ids(ids, self.source, vocab_size)

    def nope_layers(self, layers: int) -> tuple[int, ...]:
        given = self.raw.get("no_rope_layers")
        if given is None:
            interval = self.number("no_rope_layer_interval", 4)
            return tuple(i for i in range(layers) if (i + 1) % interval == 0)
        if not isinstance(given, list) or len(given) != layers or any(rope not in (0, 1) for rope in given):
            raise self.error(f"no_rope_layers should be a list of 0 or 1 for each of {layers} layers, 0 where there is no RoPE")
        return tuple(i for i, rope in enumerate(given) if not rope)

    def dtype(self) -> str:
        name = stated_dtype(self.raw) or self.assumed_dtype
        if name not in ("float16", "bfloat16", "float32", "float64"):
            raise self.error(f"dtype {name} is not supported; float16, bfloat16, float32 or float64 is")
        return name

    def refuse_sliding_window(self, config: LlamaConfig) -> None:
        types = self.raw.get("layer_types")
        if types is not None and not (isinstance(types, list) and all(t in ("full_attention", "sliding_attention") for t in types)):
            raise self.error(f"layer_types {types!r} should be a list of full_attention")
        if self.architecture.windowed:
            active = True
        elif types is not None:
            active = "sliding_attention" in types
        elif self.architecture.nope:  # the layers without RoPE have the window
            active = self.flag("use_sliding_window") and bool(config.nope_layers)
        else:
            active = self.flag("use_sliding_window") and self.number("max_window_layers", above=-1) < config.num_layers
        if active and "sliding_window" in self.raw and (window := self.number("sliding_window")) < config.max_length:
            raise self.error(
                f"sliding-window attention (sliding_window {window}, {config.max_length} positions) is not supported; "
                "only full attention is"
            )

    def rope(self, head_dim: int, positions: int) -> RopeConfig:
        # transformers 4 calls it rope_theta and rope_scaling, transformers 5 rope_parameters; both prefer the older key.
        given = self.raw.get("rope_scaling") or self.raw.get("rope_parameters") or {}
        if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
            raise self.error(f"rope settings {given!r} should be one flat object")
        key = "rope_type" if "rope_type" in given else "type"
        rope_type = given.get(key, "default")
        if rope_type is None:
            raise self.error(f"{key} of the rope settings is null; supported rope types are {', '.join(ROPE_TYPES)}")
        given = {k: v for k, v in given.items() if v is not None}
        if self.architecture.only_longrope and rope_type != "default":
            if rope_type not in ("longrope", "su", "yarn"):  # the last two are old names of the first
                raise self.error(f"rope type {rope_type} is not supported for {self.name}; longrope is")
            rope_type = "longrope"
        if rope_type not in ROPE_TYPES:
            raise self.error(f"rope type {rope_type} is not supported; supported are {', '.join(ROPE_TYPES)}")
        if given.get("partial_rotary_factor", self.raw.get("partial_rotary_factor", 1.0)) != 1.0:
            raise self.error("partial_rotary_factor is not supported; the whole head must be rotated")
        if unused := sorted(map(str, given.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_ROPE_KEYS[rope_type]})):
            # As transformers does; many files have keys such as `finetuned`.
            warn_once(log, f"{self.source}: rope type {rope_type} does not use {flat(', '.join(unused))} of the rope settings")
        real = functools.partial(self.number, of=given, kind=float)
        theta = real("rope_theta", self.raw.get("rope_theta", 10000.0), above=1)
        if rope_type == "default":
            return RopeConfig(rope_theta=theta)
        outside = {k: v for k, v in self.raw.items() if k == "original_max_position_embeddings"}
        original = self.number("original_max_position_embeddings", positions, of=_whole(given | outside), above=1)
        implied = positions / original if rope_type in ("yarn", "longrope") else None
        factor = real("factor", implied, maximum=1e6)
        rope = RopeConfig(rope_type, theta, factor, original)
        if rope_type == "yarn":
            return dataclasses.replace(
                rope,
                attention_factor=self.yarn_attention_factor(given, factor),
                beta_fast=real("beta_fast", 32),
                beta_slow=real("beta_slow", 1),
                truncate=self.flag("truncate", True, of=given),
            )
        if rope_type == "longrope":
            default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
            return dataclasses.replace(
                rope,
                attention_factor=real("attention_factor", default),
                short_factor=self.factors(given, "short_factor", head_dim // 2),
                long_factor=self.factors(given, "long_factor", head_dim // 2),
            )
        if rope_type == "llama3":
            low, high = real("low_freq_factor"), real("high_freq_factor")
            if high <= low:
                raise self.error(f"high_freq_factor {high} must be larger than low_freq_factor {low}")
            return dataclasses.replace(rope, low_freq_factor=low, high_freq_factor=high)
        return rope

    def yarn_attention_factor(self, given: Mapping[str, Any], factor: float) -> float:
        def mscale(m: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

        default = mscale(1.0)
        if given.get("mscale") and given.get("mscale_all_dim"):
            part, whole = (self.number(name, of=given, kind=float) for name in ("mscale", "mscale_all_dim"))
            default = mscale(part) / mscale(whole)
        return self.number("attention_factor", default, of=given, kind=float)

    def factors(self, given: Mapping[str, Any], name: str, length: int) -> tuple[float, ...]:
        values = given.get(name)
        if not isinstance(values, list) or len(values) != length:
            raise self.error(f"{name} must be a list of {length} numbers (head_dim / 2)")
        return tuple(self.number(name, of={name: value}, kind=float) for value in values)


def stated_dtype(raw: Mapping[str, Any]) -> str | None:
    """The dtype that a config.json names, under its new key or its old one; None if it names none."""
    found = next((raw[key] for key in ("dtype", "torch_dtype") if raw.get(key) is not None), None)
    return None if found is None else str(found).removeprefix("torch.")


def quantized_already(sign: str) -> str:
    """The message that a checkpoint is quantized. sign: the evidence for that."""
    return f"the checkpoint is quantized already ({sign}); give the unquantized one, which the draft is made from"


def _family(architecture: str) -> str:
    """The prefix of the names of an architecture's models; in lower case it is the model type."""
    return architecture.removesuffix("ForCausalLM")


def _whole(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with floats such as 4096.0 as whole numbers: transformers takes them among the rope settings, but not elsewhere."""
    return {key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in settings.items()}


def eos_token_ids(value: Any, source: str, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids of a config's value, one id or a list. Raises InputError for one that is not in the vocabulary."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
        raise InputError(f"{source}: eos_token_id should be a token id or a list of them, not {value!r}")
    if outside := [v for v in values if v >= vocab_size]:
        raise InputError(f"{source}: eos_token_id {outside[0]} should be in the vocabulary, below vocab_size {vocab_size}")
    return tuple(values)
