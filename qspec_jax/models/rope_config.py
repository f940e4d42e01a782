"""The settings of rotary position embedding, read from a config.json and checked."""

import dataclasses
import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

from qspec_jax.errors import flat, warn_once
from qspec_jax.models.config_values import Values
from qspec_jax.models.families import Architecture

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
_FULL, _LOCAL = "full_attention", "sliding_attention"  # of which rope settings may be in an object of their own
# Settings that Hunyuan's files have beside `alpha`, and no model uses.
_BESIDE_ALPHA = ("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the settings of all types together, with Hugging Face's names where it has one.

    Attributes:
        partial_rotary_factor: the share of a head's channels, its first ones, that are rotated.
        interleaved: whether neighbouring channels are pairs; otherwise a channel of the rotated ones' first half and one of their second.
        query_scale_beta: queries at position p are multiplied by 1 + beta * ln(1 + floor(p / original_max_position_embeddings)).
    """

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
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    query_scale_beta: float = 0.0

    def rotary_dim(self, head_dim: int) -> int:
        """The number of channels of a head that are rotated."""
        return int(head_dim * self.partial_rotary_factor)


def read_rope(values: Values, name: str, architecture: Architecture, *, head_dim: int, positions: int) -> RopeConfig:
    """The rope settings of a config.json.

    Args:
        values: of the config.json.
        name: the architecture's name.
        architecture: how it differs from Llama.
        head_dim: channels of a head.
        positions: max_position_embeddings.

    Raises:
        InputError: for a rope type that is not supported, and for a setting that is missing or impossible.
    """
    return _RopeReader(values, name, architecture, head_dim, positions, _given(values, architecture, _FULL)).read()


def read_local_rope(values: Values, name: str, architecture: Architecture, *, head_dim: int, positions: int) -> RopeConfig:
    """The rope settings of layers with a sliding window, of an architecture with `local_theta`. Arguments and errors as of `read_rope`."""
    key, default = architecture.local_theta
    given = {"rope_theta": values.raw.get(key, default)} | dict(_given(values, architecture, _LOCAL))
    return _RopeReader(values, name, architecture, head_dim, positions, given).read()


def _given(values: Values, architecture: Architecture, kind: str) -> Mapping[str, Any]:
    """The rope settings of a config.json, of layers of one kind."""
    # transformers 4 calls it rope_theta and rope_scaling, transformers 5 rope_parameters; both prefer the older key.
    given = values.raw.get("rope_scaling") or values.raw.get("rope_parameters") or {}
    if isinstance(given, Mapping) and architecture.local_theta is not None:
        by_kind = {_FULL, _LOCAL} & given.keys()
        given = (given.get(kind) or {}) if by_kind else given if kind == _FULL else {}
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        raise values.error(f"rope settings {given!r} should be one flat object")
    return given


class _RopeReader:
    """Reads the rope settings of one config.json."""

    def __init__(self, values: Values, name: str, architecture: Architecture, head_dim: int, positions: int, given: Mapping[str, Any]):
        self.values, self.name, self.architecture, self.head_dim, self.positions = values, name, architecture, head_dim, positions
        self.rope_type = self._type_of(given)
        self.given = {k: v for k, v in given.items() if v is not None}
        self.real = functools.partial(values.number, of=self.given, kind=float)

    def _type_of(self, given: Mapping[str, Any]) -> str:
        key = "rope_type" if "rope_type" in given else "type"
        rope_type = given.get(key, "default")
        if rope_type is None:
            raise self.values.error(f"{key} of the rope settings is null; supported rope types are {', '.join(ROPE_TYPES)}")
        if self.architecture.only_longrope and rope_type != "default":
            if rope_type not in ("longrope", "su", "yarn"):  # the last two are old names of the first
                raise self.values.error(f"rope type {rope_type} is not supported for {self.name}; longrope is")
            rope_type = "longrope"
        if rope_type not in ROPE_TYPES:
            raise self.values.error(f"rope type {rope_type} is not supported; supported are {', '.join(ROPE_TYPES)}")
        return rope_type

    def read(self) -> RopeConfig:
        stretched = self.architecture.ntk_alpha and self.rope_type == "dynamic" and bool(self.given.get("alpha"))
        used = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *(_BESIDE_ALPHA if stretched else _ROPE_KEYS[self.rope_type])}
        if self.architecture.query_scale:
            used |= {"llama_4_scaling_beta", "original_max_position_embeddings"}
        if unused := sorted(map(str, self.given.keys() - used)):
            # As transformers does; many files have keys such as `finetuned`.
            names = flat(", ".join(unused))
            warn_once(log, f"{self.values.source}: rope type {self.rope_type} does not use {names} of the rope settings")
        theta = self.real("rope_theta", self.values.raw.get("rope_theta", 10000.0), above=1)
        rope = RopeConfig(rope_theta=theta, partial_rotary_factor=self._share(), interleaved=self.architecture.interleaved)
        if stretched:
            # Labelled dynamic, it does not depend on the length of a sequence: a larger base alone, as in NTK-aware scaling.
            stretch = self.real("alpha", maximum=1e9) ** (self.head_dim / (self.head_dim - 2))
            return dataclasses.replace(rope, rope_theta=theta * stretch)
        if self.rope_type != "default":
            rope = self._scaled(rope)
        if self.architecture.query_scale:
            beta = self.real("llama_4_scaling_beta", above=-1)
            original = rope.original_max_position_embeddings or self._original()
            rope = dataclasses.replace(rope, query_scale_beta=beta, original_max_position_embeddings=original)
        return rope

    def _share(self) -> float:
        """The share of a head's channels that are rotated."""
        share = self.real("partial_rotary_factor", self.values.raw.get("partial_rotary_factor", 1.0), maximum=1)
        if share != 1 and not self.architecture.partial_rotary:
            raise self.values.error(f"partial_rotary_factor is not supported for {self.name}; the whole head must be rotated")
        if (rotated := int(self.head_dim * share)) % 2 or not rotated:
            raise self.values.error(
                f"partial_rotary_factor {share} rotates {rotated} of {self.head_dim} channels; it should rotate an even number, at least 2"
            )
        return share

    def _original(self) -> int:
        outside = {k: v for k, v in self.values.raw.items() if k == "original_max_position_embeddings"}
        return self.values.number("original_max_position_embeddings", self.positions, of=_whole(self.given | outside), above=1)

    def _scaled(self, rope: RopeConfig) -> RopeConfig:
        """The settings of a type that is not the default."""
        rope_type, real, original = self.rope_type, self.real, self._original()
        implied = self.positions / original if rope_type in ("yarn", "longrope") else None
        factor = real("factor", implied, maximum=1e6)
        rope = dataclasses.replace(rope, rope_type=rope_type, factor=factor, original_max_position_embeddings=original)
        if rope_type == "yarn":
            return dataclasses.replace(
                rope,
                attention_factor=self._yarn_attention_factor(factor),
                beta_fast=real("beta_fast", 32),
                beta_slow=real("beta_slow", 1),
                truncate=self.values.flag("truncate", True, of=self.given),
            )
        if rope_type == "longrope":
            default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
            pairs = rope.rotary_dim(self.head_dim) // 2
            return dataclasses.replace(
                rope,
                attention_factor=real("attention_factor", default),
                short_factor=self._factors("short_factor", pairs),
                long_factor=self._factors("long_factor", pairs),
            )
        if rope_type == "llama3":
            low, high = real("low_freq_factor"), real("high_freq_factor")
            if high <= low:
                raise self.values.error(f"high_freq_factor {high} must be larger than low_freq_factor {low}")
            return dataclasses.replace(rope, low_freq_factor=low, high_freq_factor=high)
        return rope

    def _yarn_attention_factor(self, factor: float) -> float:
        def mscale(m: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

        default = mscale(1.0)
        if self.given.get("mscale") and self.given.get("mscale_all_dim"):
            default = mscale(self.real("mscale")) / mscale(self.real("mscale_all_dim"))
        return self.real("attention_factor", default)

    def _factors(self, name: str, length: int) -> tuple[float, ...]:
        values = self.given.get(name)
        if not isinstance(values, list) or len(values) != length:
            raise self.values.error(f"{name} must be a list of {length} numbers (half of the channels that are rotated)")
        return tuple(self.values.number(name, of={name: value}, kind=float) for value in values)


def _whole(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with floats such as 4096.0 as whole numbers: transformers takes them among the rope settings, but not elsewhere."""
    return {key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in settings.items()}
