"""The configuration of a model, read from a Hugging Face config.json and checked."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qspec_jax.errors import InputError, flat, warn_once
from qspec_jax.files import read_json
from qspec_jax.models.config_values import Values
from qspec_jax.models.experts_config import ExpertsConfig, read_experts
from qspec_jax.models.families import ACTIVATION_NAMES, ARCHITECTURES, GATED, INPUT, OUTPUT, SILU, WRAPPERS, Wrapper
from qspec_jax.models.rope_config import RopeConfig, read_local_rope, read_rope
from qspec_jax.models.sliding_layers import read_window

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The configuration of a Llama-family model, with Hugging Face's names where they are the same.

    Attributes:
        architecture: of the text model, one of `families.ARCHITECTURES`.
        int4_weights: whether all linear layers are in INT4, as their checkpoint has them; config.json does not say it.
        int4_group_size: inputs of a group of these weights; None: those of `quantization.weights.weight_group_size`.
        nested_weights: whether linear layers are nested in 8 bits, see `load_model`.
        int8_head: whether the head is in INT8, see `load_model`.
        int8_embedding: the same of the embedding.
        wrapper: the multimodal model that the text model is a part of, one of `families.WRAPPERS`; None for a text model by itself.
        qk_norm: what the norm of queries and keys covers, one of `families.QK_NORMS`; None without such a norm.
        norms: where the other norms are, one of `families.NORM_PLACES`.
        activation: of the MLP, one of `families.ACTIVATIONS`.
        nope_layers: the layers without RoPE.
        sliding_layers: the layers that differ from others in their window or their RoPE.
        sliding_window: the number of tokens that a token attends to in these layers, itself included; None: all.
        sliding_rope: the RoPE of these layers; None: it is that of all layers.
        norm_offset: is added to the weights of norms.
        embedding_multiplier: embeddings are multiplied by it.
        attention_scale: the products of queries and keys are multiplied by it; None: head_dim ** -0.5.
        residual_multiplier: what attention and MLP add to the residual stream is multiplied by it.
        logits_scaling: logits are divided by it.
        experts: of layers that have experts instead of one MLP of `intermediate_size`; None if no layer has any.
    """

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
    qk_norm: str | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    nope_layers: tuple[int, ...] = ()
    sliding_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    sliding_rope: RopeConfig | None = None
    norms: str = INPUT
    norm_offset: float = 0.0
    activation: str = SILU
    embedding_multiplier: float = 1.0
    attention_scale: float | None = None
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    wrapper: str | None = None
    experts: ExpertsConfig | None = None
    int4_weights: bool = False
    int4_group_size: int | None = None
    nested_weights: bool = False
    int8_head: bool = False
    int8_embedding: bool = False

    def __post_init__(self):
        if self.norms == OUTPUT and self.residual_multiplier != 1:
            # The residual stream is kept divided by it, and norms of what is read from the stream take that out.
            raise ValueError(f"residual_multiplier is {self.residual_multiplier}; without norms before attention and MLP it should be 1")

    @property
    def gated_mlp(self) -> bool:
        """Whether the MLP multiplies by an activated gate; otherwise it activates the one projection that it has."""
        return self.activation in GATED

    @property
    def is_fusable(self) -> bool:
        """Whether `pallas_kernels.fused_layer` computes what is between two attentions: norms where Llama has them, and its MLP."""
        return self.norms == INPUT and self.activation == SILU and not self.norm_offset and self.experts is None

    @property
    def has_llama_layers(self) -> bool:
        """Whether layers compute what Llama's do: `is_fusable`, all with RoPE, no biases, norms of queries and keys or multipliers."""
        multipliers = self.embedding_multiplier, self.residual_multiplier, self.logits_scaling
        biases = self.qkv_bias or self.output_bias or self.mlp_bias
        others = self.qk_norm is not None or self.attention_scale is not None or self.nope_layers or set(multipliers) != {1.0}
        return self.is_fusable and not (biases or others)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers that have experts instead of one MLP."""
        return () if self.experts is None else self.experts.layers

    @property
    def mlp_sizes(self) -> dict[str, int]:
        """The intermediate sizes of the model's MLPs, by what has them."""
        sizes = {} if len(self.expert_layers) == self.num_layers else {"the MLP": self.intermediate_size}
        return sizes if self.experts is None else sizes | {"each expert": self.experts.intermediate_size}

    @property
    def windowed_layers(self) -> tuple[int, ...]:
        """The layers whose tokens attend to no more than `sliding_window` tokens."""
        return () if self.sliding_window is None else self.sliding_layers

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers whose tokens attend to all tokens before them."""
        return tuple(i for i in range(self.num_layers) if i not in self.windowed_layers)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different RoPEs of layers: that of most, and that of sliding layers if it is another."""
        return (self.rope,) if self.sliding_rope is None else (self.rope, self.sliding_rope)

    def rope_of(self, layer: int) -> int | None:
        """The index in `ropes` of a layer's; None for a layer without RoPE."""
        if layer in self.nope_layers:
            return None
        return int(self.sliding_rope is not None and layer in self.sliding_layers)

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens: linear, dynamic and YaRN scaling extend the length that the checkpoint was trained for."""
        match self.rope.rope_type:
            case "linear" if ARCHITECTURES[self.architecture].scaled_positions:
                return self.max_position_embeddings
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


def text_model_config(raw: Mapping[str, Any], *, source: str = "config.json") -> dict[str, Any]:
    """The config.json of the text model by itself, of that of a multimodal model, which should be a supported one.

    Args:
        raw: the contents of the multimodal model's config.json.
        source: the name of the contents in messages.
    """
    reader = _Reader(raw, source, "float32")
    return {**reader.text_of(raw, WRAPPERS[reader.wrapper]), "architectures": [reader.name]}


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class _Reader(Values):
    """Reads one config.json."""

    def __init__(self, raw: Mapping[str, Any], source: str, dtype: str):
        super().__init__(raw, source)
        self.assumed_dtype, self.wrapper = dtype, self.wrapper_of(raw)
        raw = raw if self.wrapper is None else self.text_of(raw, WRAPPERS[self.wrapper])
        self.name = self.architecture_of(raw)
        whose = "" if self.wrapper is None else f", the text model of {self.wrapper},"
        mixture = any(mark in self.name.lower() for mark in ("moe", "mixtral")) or any(raw.get(key) for key in _EXPERTS)
        known = [name for name, family in ARCHITECTURES.items() if family.experts]
        if mixture and self.name not in known:
            raise self.error(
                f"{self.name}{whose} is a mixture of experts that is not supported; {', '.join(known)} is, and dense models are"
            )
        if self.name not in ARCHITECTURES:
            supported = ", ".join(ARCHITECTURES if self.wrapper else [*ARCHITECTURES, *WRAPPERS])
            raise self.error(f"architecture {self.name}{whose} is not supported; supported are {supported}")
        self.architecture = ARCHITECTURES[self.name]
        # A null hides the architecture's default, and then counts as an absent key.
        assumed = {**self.architecture.defaults, **(self.architecture.sizes if self.wrapper else {})}
        self.raw = {k: v for k, v in {**assumed, **raw}.items() if v is not None}

    def wrapper_of(self, raw: Mapping[str, Any]) -> str | None:
        """The multimodal model that a config.json is of; None for a text model. Raises InputError for one that is not supported."""
        names, model_type = raw.get("architectures"), raw.get("model_type")
        given = names[0] if isinstance(names, list) and names else None
        found = next((name for name, wrapper in WRAPPERS.items() if given == name or model_type == wrapper.model_type), None)
        if raw.get("text_config") is None:
            if found is not None:
                raise self.error(f"text_config is missing, the settings of the text model of {found}")
            return None
        if found is None:
            described = given if isinstance(given, str) else f"of model type {model_type}"
            raise self.error(
                f"architecture {described} around a text model (text_config) is not supported; supported are {', '.join(WRAPPERS)}"
            )
        return found

    def text_of(self, raw: Mapping[str, Any], wrapper: Wrapper) -> dict[str, Any]:
        """The settings of the text model, with those that a multimodal model has outside of `text_config`."""
        text = raw["text_config"]
        if not isinstance(text, Mapping):
            raise self.error(f"text_config is {text!r}, should be an object")
        outside = {"eos_token_id": raw["eos_token_id"]} if text.get("eos_token_id") is None and "eos_token_id" in raw else {}
        dtype = stated_dtype(raw) or stated_dtype(text)
        tied = wrapper.tied if raw.get("tie_word_embeddings") is None else raw["tie_word_embeddings"]
        model_type = {"model_type": wrapper.text_model_type} if text.get("model_type") is None else {}
        return {**text, **outside, **model_type, "dtype": dtype, "tie_word_embeddings": tied}

    def architecture_of(self, raw: Mapping[str, Any]) -> str:
        """The architecture's name: that of the model type, as in transformers, unless `architectures` names a model of another kind."""
        names, model_type = raw.get("architectures"), raw.get("model_type")
        given = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "(none)"
        by_type = next((name for name, family in ARCHITECTURES.items() if family.model_type == model_type), None)
        named = next((name for name in ARCHITECTURES if given.lower() in (name.lower(), f"{_family(name)}Model".lower())), None)
        if by_type is None:
            if named and isinstance(model_type, str):
                warn_once(log, f"{self.source}: read as {named}, by its architectures; its model_type is {flat(model_type)}")
            is_other = isinstance(model_type, str) and (names is None or names == [])
            return f"of model type {model_type}" if is_other else named or given
        if named not in (None, by_type):
            warn_once(log, f"{self.source}: read as {by_type}, by its model_type, as transformers does, and not as {flat(given)}")
        return by_type if named or names is None or names == [] else given

    def llama(self) -> LlamaConfig:
        raw = self.raw
        known = ACTIVATION_NAMES[self.architecture.activation]
        for key in ("hidden_activation", "hidden_act"):  # Gemma's files may have both, of which the first counts
            if raw.get(key, known[0]) not in known:
                raise self.error(f"{key} {raw[key]} is not supported for {self.name}, only {known[0]}")
            if key in raw:
                break
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if raw.get(key):
                raise self.error(f"{key} {raw[key]} is not supported; it should be null or false")
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
            rope=read_rope(self, self.name, self.architecture, head_dim=head_dim, positions=positions),
            max_position_embeddings=positions,
            tie_word_embeddings=self.flag("tie_word_embeddings"),
            qkv_bias=self.bias(self.architecture.qkv_bias),
            output_bias=self.bias(self.architecture.output_bias),
            mlp_bias=self.bias(self.architecture.mlp_bias),
            qk_norm=self.architecture.qk_norm,
            eos_token_ids=self.eos_token_ids(vocab_size),
            dtype=self.dtype(),
            nope_layers=self.nope_layers(layers) if self.architecture.nope else (),
            norms=self.architecture.norms,
            activation=self.architecture.activation,
            wrapper=self.wrapper,
            experts=read_experts(self, layers) if self.architecture.experts else None,
            norm_offset=float(self.architecture.unit_offset),
            **{field: self.number(key, kind=float) for field, key in self.architecture.multipliers.items()},
        )
        if self.architecture.scaled_embeddings:
            config = dataclasses.replace(config, embedding_multiplier=hidden**0.5)
        if self.architecture.query_pre_attn_scalar:
            config = dataclasses.replace(config, attention_scale=self.number("query_pre_attn_scalar", kind=float) ** -0.5)
        return self.with_sliding_layers(config)

    def with_sliding_layers(self, config: LlamaConfig) -> LlamaConfig:
        layers, window = read_window(self, self.architecture, config.num_layers, config.nope_layers)
        if self.architecture.hybrid and window is not None:
            config = dataclasses.replace(config, nope_layers=tuple(i for i in range(config.num_layers) if i not in layers))
        if window is not None and window >= config.max_length:
            window = None
        rope = None
        if self.architecture.local_theta is not None:
            rope = read_local_rope(self, self.name, self.architecture, head_dim=config.head_dim, positions=config.max_position_embeddings)
            rope = None if rope == config.rope else rope
        if window is None and rope is None:
            return config
        return dataclasses.replace(config, sliding_layers=layers, sliding_window=window, sliding_rope=rope if layers else None)

    def bias(self, setting: bool | str) -> bool:
        return self.flag(setting) if isinstance(setting, str) else setting

    def eos_token_ids(self, vocab_size: int) -> tuple[int, ...]:
        ids = self.raw.get("eos_token_id")
        # The default for the architecture's own vocabulary is no mistake in a file with a smaller one.
        assumed = ids is not None and ids == self.architecture.defaults.get("eos_token_id")
        return (*ids,) if assumed and isinstance(ids, list) else (ids,) if assumed else eos_token_ids(ids, self.source, vocab_size)

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


def stated_dtype(raw: Mapping[str, Any]) -> str | None:
    """The dtype that a config.json names, under its new key or its old one; None if it names none."""
    found = next((raw[key] for key in ("dtype", "torch_dtype") if raw.get(key) is not None), None)
    return None if found is None else str(found).removeprefix("torch.")


def _family(architecture: str) -> str:
    """The prefix of the names of an architecture's models."""
    return architecture.removesuffix("ForCausalLM")


def eos_token_ids(value: Any, source: str, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids of a config's value, one id or a list. Raises InputError for one that is not in the vocabulary."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
        raise InputError(f"{source}: eos_token_id should be a token id or a list of them, not {value!r}")
    if outside := [v for v in values if v >= vocab_size]:
        raise InputError(f"{source}: eos_token_id {outside[0]} should be in the vocabulary, below vocab_size {vocab_size}")
    return tuple(values)
