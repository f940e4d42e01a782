"""Every cache by its name, and the configuration that chooses one. A further cache is a file beside this one, and an entry here."""

import dataclasses
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp

from pallas_kernels.formats.quantization import SCHEMES
from qspec_jax.caches.cache import MOST_TOKENS, Cache, Gives
from qspec_jax.caches.full import FullCache
from qspec_jax.caches.h2o import H2OCache
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.caches.kivi import KiviCache
from qspec_jax.caches.offloaded import OffloadedCache, OffloadedFullCache, OffloadedPlanesCache
from qspec_jax.caches.schedule import Schedule
from qspec_jax.caches.specache import SpeCache
from qspec_jax.caches.streaming_llm import StreamingCache
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig


class RegisteredCache(Protocol):
    """What the class of a cache has besides the protocol of `Cache`, so that a name and a few settings are enough to make one.

    One with settings of its own has their class in `Settings`: a frozen dataclass whose fields have defaults, and which raises InputError
    for what is out of range. A field's type is called with the text of its value; one that needs another function has it in its metadata as
    "parse", and what it takes, for messages, as "values". Its `in_host_memory`, if it has one, says whether a part of the cache may be in
    host memory. `make` and `schedule_of` are then given `settings`. default_group: tokens of a key group, if not given; 128 for a class
    that does not say. gives, takes_group_size, chooses_by_head: see `Cache`.
    """

    gives: ClassVar[frozenset[Gives]]
    takes_group_size: ClassVar[bool]
    chooses_by_head: ClassVar[bool]

    def schedule_of(self, group_size: int) -> Schedule:
        """The schedule of a cache with groups of so many tokens."""
        ...

    def make(
        self,
        model: LlamaConfig,
        *,
        group_size: int,
        scheme: str,
        batch: int,
        capacity: int,
        num_speculative_tokens: int,
        dtype: jnp.dtype,
    ) -> Cache:
        """A cache without tokens, for rows of at most `capacity` cached tokens and rounds of `num_speculative_tokens` drafts.

        group_size, scheme: see `CacheConfig`; a cache that does not quantize has no use for them. dtype: the model's.
        """
        ...


CACHES: dict[str, RegisteredCache] = {
    "full": FullCache,
    "full:host": OffloadedFullCache,
    "int8": HierarchicalCache,
    "int8:lower=host": OffloadedCache,
    "int8:host": OffloadedPlanesCache,
    "kivi": KiviCache,
    "specache": SpeCache,
    "streaming-llm": StreamingCache,
    "h2o": H2OCache,
}


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """The KV cache of a call to generate.

    kind: a key of `CACHES`; "int8" is the hierarchical cache, "full" one in the model's own precision; "kivi", "specache",
    "streaming-llm" and "h2o" are lossy.
    group_size: tokens of a key group, even; None is 128 (32 for kivi and specache), or head_dim when that is smaller; full, streaming-llm
    and h2o have no groups. scheme: the quantizer of "int8", a key of `pallas_kernels.formats.quantization.SCHEMES`. settings: the cache's
    own, of its class `Settings`; None: the defaults.
    """

    kind: str = "int8"
    group_size: int | None = None
    scheme: str = "int8_first"
    settings: Any = None

    def __post_init__(self):
        if self.kind == "hierarchical":  # its name before version 0.2
            object.__setattr__(self, "kind", "int8")
        if self.kind not in CACHES:
            raise InputError(f"cache {self.kind!r} should be {' or '.join(CACHES)}")
        if self.group_size is not None and (not 2 <= self.group_size <= MOST_TOKENS or self.group_size % 2):
            raise InputError(f"group size {self.group_size} should be an even number from 2 to {MOST_TOKENS}")
        if self.scheme not in SCHEMES:
            raise InputError(f"scheme {self.scheme!r} should be one of {', '.join(SCHEMES)}")
        if self.settings is None and self._class_of_settings is not None:
            object.__setattr__(self, "settings", self._class_of_settings())
        if self.group_size is not None:
            self._schedule(self.group_size)  # which may be refused

    @classmethod
    def parse(cls, text: str, group_size: int | None = None, scheme: str = scheme) -> Self:
        """The cache of a text NAME or NAME:SETTING=VALUE,... such as kivi:bits=1,residual=64; behind a name that has a colon itself a comma
        comes before the settings, as in int8:lower=host,resident=0.5. A cache with a default group size of its own has the setting group,
        which counts before `group_size`. Raises InputError for an unknown name or setting, and for a value
        that is no such setting's."""
        kind, mark, rest = text.partition(":")
        for name in CACHES:
            if ":" in name and text.startswith(name):
                kind, (before, mark, rest) = name, text.removeprefix(name).partition(",")
                if before:
                    raise InputError(f"cache {text!r}: behind {name} there should be nothing, or a comma and settings, not {before!r}")
        plain = cls(kind, None, scheme)
        if not mark:
            return dataclasses.replace(plain, group_size=group_size)
        fields = {} if plain.settings is None else {field.name: field for field in dataclasses.fields(plain.settings)}
        kinds = {name: field.metadata.get("parse", field.type) for name, field in fields.items()}
        if hasattr(CACHES[kind], "default_group"):
            kinds["group"] = int
        given: dict[str, Any] = {}
        for part in rest.split(","):
            name, equals, value = part.partition("=")
            if name not in kinds or not equals:
                known = f"one of {', '.join(f'{name}=...' for name in kinds)}" if kinds else _no_settings(kind)
                raise InputError(f"cache {text!r}: {part!r} should be {known}")
            if name in given:
                raise InputError(f"cache {text!r}: {name} stands there twice")
            try:
                given[name] = kinds[name](value)
            except ValueError:
                metadata = fields[name].metadata if name in fields else {}
                values = metadata.get("values", "a whole number" if kinds[name] is int else "a number")
                raise InputError(f"cache {text!r}: {name} should be {values}, not {value!r}") from None
        size = given.pop("group", group_size)
        return dataclasses.replace(plain, group_size=size, settings=dataclasses.replace(plain.settings, **given))

    @property
    def takes_group_size(self) -> bool:
        """Whether a group size makes any difference to the cache."""
        return CACHES[self.kind].takes_group_size

    @property
    def in_host_memory(self) -> bool:
        """Whether a part of the cache may be in host memory, as far as its settings alone tell."""
        return getattr(self.settings, "in_host_memory", False)

    @property
    def _class_of_settings(self) -> type | None:
        return getattr(CACHES[self.kind], "Settings", None)

    @property
    def _own(self) -> dict[str, Any]:
        return {} if self.settings is None else {"settings": self.settings}

    def group_size_for(self, head_dim: int) -> int:
        """Tokens of a group, for a model with heads of this size."""
        return min(getattr(CACHES[self.kind], "default_group", 128), head_dim) if self.group_size is None else self.group_size

    def schedule_for(self, head_dim: int) -> Schedule:
        """The schedule of the cache, for a model with heads of this size."""
        return self._schedule(self.group_size_for(head_dim))

    def _schedule(self, group_size: int) -> Schedule:
        return CACHES[self.kind].schedule_of(group_size, **self._own)

    def check(self, model: LlamaConfig) -> None:
        """Raises InputError where no model of this shape can have the cache, as `empty` does; only shapes are computed with."""
        sizes = dict(batch=1, capacity=1, num_speculative_tokens=0, dtype=jnp.dtype(jnp.bfloat16))
        jax.eval_shape(lambda: self.empty(model, **sizes))

    def empty(self, model: LlamaConfig, *, batch: int, capacity: int, num_speculative_tokens: int, dtype: jnp.dtype) -> Cache:
        """A cache without tokens; see `RegisteredCache.make`."""
        choice = dict(group_size=self.group_size_for(model.head_dim), scheme=self.scheme, **self._own)
        sizes = dict(batch=batch, capacity=capacity, num_speculative_tokens=num_speculative_tokens, dtype=dtype)
        return CACHES[self.kind].make(model, **choice, **sizes)


def _no_settings(kind: str) -> str:
    """What should stand behind a cache without settings, for messages: nothing, or what makes it another one's name."""
    others = [name for name in CACHES if name.startswith(f"{kind}:")]
    settings = lambda name: "".join(f"[,{field.name}=...]" for field in dataclasses.fields(CACHES[name].Settings))
    of_others = " or ".join(name + settings(name) for name in others)
    return f"left out; {kind} has no settings" if not others else f"left out, or the cache should be {of_others}; {kind} has no settings"
