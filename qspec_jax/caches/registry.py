"""Every cache by its name, and the configuration that chooses one. A further cache is a file beside this one, and an entry here."""

import dataclasses
import functools
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp

from pallas_kernels.formats.quantization import SCHEMES
from qspec_jax.caches.cache import MAX_TOKENS, Cache, Gives, PooledCache
from qspec_jax.caches.full import FullCache
from qspec_jax.caches.h2o import H2OCache
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.caches.host_memory import NONE
from qspec_jax.caches.kivi import KiviCache
from qspec_jax.caches.offloaded import OffloadedCache, OffloadedFullCache
from qspec_jax.caches.schedule import Schedule
from qspec_jax.caches.sliding import beside_rings
from qspec_jax.caches.specache import SpeCache
from qspec_jax.caches.streaming_llm import StreamingCache
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama
from qspec_jax.settings_text import read_settings, split_text


class RegisteredCache(Protocol):
    """The class of a cache, by which the registry makes one of a name and a few settings. It also has the protocol of `Cache`.

    Attributes:
        Settings: the class of the cache's own settings, see `qspec_jax.settings_text.setting`; a class without this attribute has none.
            A property `in_host_memory` of it says whether a part of the cache may be in host memory.
        default_group: tokens of a key group, if not given; 128 for a class that does not have this attribute.
        gives, takes_drafts, takes_group_size, chooses_by_head, trims: see `Cache`.
    """

    gives: ClassVar[frozenset[Gives]]
    takes_drafts: ClassVar[bool]
    takes_group_size: ClassVar[bool]
    chooses_by_head: ClassVar[bool]
    trims: ClassVar[bool]

    def schedule_of(self, group_size: int, settings: Any) -> Schedule:
        """The schedule of a cache with groups of `group_size` tokens. settings: its own; None for a class without any."""
        ...

    def make(
        self,
        model: LlamaConfig,
        *,
        group_size: int,
        scheme: str,
        settings: Any,
        batch: int,
        capacity: int,
        num_speculative_tokens: int,
        dtype: jnp.dtype,
    ) -> Cache:
        """A cache without tokens.

        Args:
            model: the shape of the model.
            group_size, scheme: see `CacheConfig`; a cache that does not quantize does not use them.
            settings: the cache's own; None for a class without any.
            batch: rows.
            capacity: the maximum number of cached tokens of a row.
            num_speculative_tokens: the maximum number of drafts in a round.
            dtype: the model's.
        """
        ...


class CacheChoice(Protocol):
    """What an engine is given as its cache, such as a `CacheConfig`: hashable, since programs are compiled for it.

    Attributes:
        in_host_memory: whether a part of the cache may be in host memory. Then it is a `CacheConfig`.
        streams: whether each pass copies a part of the cache from host memory.
        takes_drafts: whether any draft but `none` is compatible with the cache.
        guesses: whether each pass also reads the model's guess at the next token (`qspec_jax.drafts.guess`).
    """

    in_host_memory: bool
    streams: bool
    takes_drafts: bool
    guesses: bool

    def check_division(self, model: Llama) -> None:
        """Raises InputError where the cache cannot be divided over devices as the model is."""
        ...

    def empty(self, model: LlamaConfig, *, batch: int, capacity: int, num_speculative_tokens: int, dtype: jnp.dtype) -> Cache:
        """A cache without tokens; see `RegisteredCache.make`."""
        ...


CACHES: dict[str, RegisteredCache] = {
    "full": FullCache,
    "int8": HierarchicalCache,
    "kivi": KiviCache,
    "specache": SpeCache,
    "streaming-llm": StreamingCache,
    "h2o": H2OCache,
}
# The classes of caches whose setting `host` names a part that each pass copies from host memory.
STREAMED: dict[str, RegisteredCache] = {"full": OffloadedFullCache, "int8": OffloadedCache}


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """The KV cache of a call to generate.

    Attributes:
        kind: a key of `CACHES`: "int8" is the hierarchical cache, "full" one in the model's own precision; "kivi", "specache",
            "streaming-llm" and "h2o" are lossy.
        group_size: tokens of a key group, even. None is 128 (32 for kivi and specache), or head_dim if that is smaller. full,
            streaming-llm and h2o have no groups.
        scheme: the quantizer of "int8", a key of `pallas_kernels.formats.quantization.SCHEMES`.
        settings: the cache's own, of its class `Settings`; None: the defaults.
    """

    kind: str = "int8"
    group_size: int | None = None
    scheme: str = "int8_first"
    settings: Any = None

    def __post_init__(self):
        if self.kind not in CACHES:
            raise InputError(f"cache {self.kind!r} should be one of {', '.join(CACHES)}")
        if self.group_size is not None and (not 2 <= self.group_size <= MAX_TOKENS or self.group_size % 2):
            raise InputError(f"group size {self.group_size} should be an even number from 2 to {MAX_TOKENS}")
        if self.scheme not in SCHEMES:
            raise InputError(f"scheme {self.scheme!r} should be one of {', '.join(SCHEMES)}")
        if self.settings is None and self._class_of_settings is not None:
            object.__setattr__(self, "settings", self._class_of_settings())
        if self.group_size is not None:
            self._schedule(self.group_size)  # which may be refused

    @classmethod
    def parse(cls, text: str, group_size: int | None = None, scheme: str = scheme) -> Self:
        """The cache of a text NAME[:SETTING=VALUE,...] such as kivi:bits=1,residual=64, see `qspec_jax.settings_text`.

        A cache with a default group size of its own also has the setting `group`, which counts before `group_size`. Raises InputError for
        an unknown name or setting, and for a value that is none of its setting's.
        """
        kind, parts = split_text("cache", text)
        plain = cls(kind, None, scheme)
        more = {"group": int} if hasattr(CACHES[kind], "default_group") else {}
        given = read_settings("cache", text, parts, plain._class_of_settings, more=more)
        size = given.pop("group", group_size)
        settings = dataclasses.replace(plain.settings, **given) if given else plain.settings
        return dataclasses.replace(plain, group_size=size, settings=settings)

    @property
    def name(self) -> str:
        """The kind, with the part of the cache that is in host memory, if any: a text of the cache without its other settings."""
        host = getattr(self.settings, "host", NONE)
        return self.kind if host == NONE else f"{self.kind}:host={host}"

    @property
    def streams(self) -> bool:
        """Whether each pass copies a part of the cache from host memory, unless all layers are resident."""
        return self._class is STREAMED.get(self.kind)

    def pools(self, model: LlamaConfig) -> bool:
        """Whether rows of the cache of a model may share a pool of pages."""
        return issubclass(self._class, PooledCache) and not self.streams and bool(model.full_layers)

    def with_resident(self, share: float) -> Self:
        """The cache with this share of its layers on the device, see `HostSettings`; for one that `streams`."""
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, resident=share))

    @property
    def trims(self) -> bool:
        """Whether a row may be cut back to fewer tokens of which the same ones are quantized."""
        return CACHES[self.kind].trims and not self.guesses  # which have chosen what was fetched

    @property
    def guesses(self) -> bool:
        """Whether each pass also reads the model's guess at the next token (`qspec_jax.drafts.guess`)."""
        return getattr(self.settings, "guesses", False)

    @property
    def takes_drafts(self) -> bool:
        """Whether any draft but `none` is compatible with the cache."""
        return CACHES[self.kind].takes_drafts

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
    def _class(self) -> RegisteredCache:
        return CACHES[self.kind] if getattr(self.settings, "host", NONE) == NONE else STREAMED.get(self.kind, CACHES[self.kind])

    def group_size_for(self, head_dim: int) -> int:
        """Tokens of a group, for a model with heads of this size."""
        return min(getattr(CACHES[self.kind], "default_group", 128), head_dim) if self.group_size is None else self.group_size

    def schedule_for(self, head_dim: int) -> Schedule:
        """The schedule of the cache, for a model with heads of this size."""
        return self._schedule(self.group_size_for(head_dim))

    def _schedule(self, group_size: int) -> Schedule:
        return CACHES[self.kind].schedule_of(group_size, self.settings)

    def outline(self, model: LlamaConfig, capacity: int, num_speculative_tokens: int = 0) -> Cache:
        """The shapes of a cache of one row, in bfloat16, see `empty`. Raises InputError as it does."""
        return _outline(self, model, capacity, num_speculative_tokens)

    def check(self, model: LlamaConfig) -> None:
        """Raises InputError where no model of this shape can have the cache."""
        self.outline(model, 1)

    def check_division(self, model: Llama) -> None:
        """Raises InputError where the cache cannot be divided over devices as the model is."""
        if self.in_host_memory and model.axis is not None:
            raise InputError(f"cache {self.name} with a part in host memory is for one device, and the model is divided over several")
        if CACHES[self.kind].chooses_by_head and model.kv_copies > 1:
            raise InputError(f"cache {self.kind} is for no more devices than there are KV heads")

    def empty(self, model: LlamaConfig, *, batch: int, capacity: int, num_speculative_tokens: int, dtype: jnp.dtype) -> Cache:
        """A cache without tokens; see `RegisteredCache.make`."""
        choice = dict(group_size=self.group_size_for(model.head_dim), scheme=self.scheme, settings=self.settings)
        sizes = dict(batch=batch, capacity=capacity, num_speculative_tokens=num_speculative_tokens, dtype=dtype)
        if not model.windowed_layers:
            return self._class.make(model, **choice, **sizes)
        if not model.full_layers and (self.guesses or self.in_host_memory):
            does = "chooses tokens" if self.guesses else "keeps in host memory a part"
            raise InputError(f"cache {self.name} {does} of layers without a sliding window, and the model has no such layer")
        return beside_rings(lambda others: self._class.make(others, **choice, **sizes), model, self.schedule_for(model.head_dim), **sizes)


@functools.lru_cache(maxsize=256)
def _outline(cache: CacheConfig, model: LlamaConfig, capacity: int, num_speculative_tokens: int) -> Cache:
    sizes = dict(batch=1, capacity=capacity, num_speculative_tokens=num_speculative_tokens, dtype=jnp.dtype(jnp.bfloat16))
    if model.windowed_layers:
        return jax.eval_shape(lambda: cache.empty(model, **sizes))
    made = jax.eval_shape(lambda: cache.empty(dataclasses.replace(model, num_layers=1), **sizes))
    return dataclasses.replace(made, layers=made.layers * model.num_layers)  # all have the same shapes
