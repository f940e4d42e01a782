"""The identity of what has read a state: model, draft and cache, as JSON can express it, and how two identities differ."""

import dataclasses
from typing import Any

from pallas_kernels.formats.views import View
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.drafts.draft import Draft
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.skipping import Skipped
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.states.fingerprint import fingerprint
from qspec_jax.states.state import Reader

# What a message calls the parts of an identity; of those that are hashed it gives no values.
NAMES = {
    "model": "another model",
    "dtype": "another dtype",
    "rope": "another RoPE",
    "layers": "other layers",
    "cache": "another cache",
    "draft": "another draft",
    "weights": "other weights",
    "draft_weights": "other weights of the draft",
}
HASHED = ("weights", "draft_weights")
# Where weights are stored, and how: the fingerprint is of what they are.
_NOT_COMPUTED = ("wrapper", "int4_weights", "int4_group_size", "nested_weights", "int8_head", "int8_embedding")


def identity_of(reader: Reader) -> dict[str, Any]:
    """What a state depends on besides its tokens, by the names of `NAMES`; of weights the fingerprints."""
    config = reader.model.config
    return {
        "model": f"{config.num_layers} layers of {config.hidden_size}",
        "dtype": str(reader.model.dtype),
        "rope": f"{config.rope}, {config.max_position_embeddings} positions",
        "layers": _layers_of(config),
        "cache": _settings_of(reader.cache, config.head_dim),
        "draft": _described(reader.draft),
        "weights": fingerprint(reader.model),
        "draft_weights": fingerprint(reader.draft),
    }


def difference(found: dict[str, Any], own: dict[str, Any]) -> str | None:
    """The first part of an identity that differs, as a message says it; None if all parts are equal.

    Args:
        found: the identity that a state was made with.
        own: the identity of what it should go on with.
    """
    for name, part in own.items():
        if (other := found[name]) != part:
            return NAMES[name] + ("" if name in HASHED else f" ({_shown(other, part)}, here {_shown(part, other)})")
    return None


def _layers_of(config: LlamaConfig) -> str:
    """What a model's layers compute, besides their sizes and RoPE: the settings that are not Llama's own."""
    others = [field for field in dataclasses.fields(config) if field.default is not dataclasses.MISSING and field.name not in _NOT_COMPUTED]
    differ = [f"{field.name}={value}" for field in others if (value := getattr(config, field.name)) != field.default]
    return ", ".join([f"qk_norm={config.qk_norm}", f"rms_norm_eps={config.rms_norm_eps}", *differ])


def _settings_of(cache: CacheConfig, head_dim: int) -> dict[str, Any]:
    """The settings of a cache by their names, its kind first."""
    own = {} if cache.settings is None else dataclasses.asdict(cache.settings)
    return {"kind": cache.kind, "group": cache.group_size_for(head_dim), "scheme": cache.scheme} | own


def _shown(part: Any, other: Any) -> str:
    """A part of an identity for a message: of two caches of a kind, the settings that differ."""
    if not isinstance(part, dict) or not isinstance(other, dict):
        return f"{part}"
    kind, differ = part.get("kind"), [f"{name}={value}" for name, value in part.items() if other.get(name) != value]
    return f"{kind}:{','.join(differ)}" if kind == other.get("kind") else f"{kind}"


def _described(draft: Draft | None) -> str:
    """The classes and the settings of a draft and of those that it is made of."""
    if draft is None:
        return "none"
    parts = {field.name: getattr(draft, field.name) for field in dataclasses.fields(draft)}
    parts = {name: part.view if isinstance(part, ViewedModel) else part for name, part in parts.items()}
    described = int | float | str | Skipped | View | tuple
    settings = [f"{name}={part}" for name, part in parts.items() if isinstance(part, described) or name == "settings"]
    return f"{type(draft).__name__}({', '.join(settings + [_described(part) for part in parts.values() if isinstance(part, Draft)])})"
