"""Shared by drafts that read a part of the target's cache: checks of their budget, their dense layers and the cache."""

import math

from qspec_jax.caches.cache import Cache
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.caches.registry import CACHES
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama


def check_budget(budget: float) -> None:
    """Raises InputError for what is neither a share nor a number of tokens."""
    if not (0 < budget <= 1 or (float(budget).is_integer() and budget > 1)):
        raise InputError(f"draft budget {budget:g} should be a share, more than 0 and at most 1, or a whole number of tokens")


def check_fits(model: Llama, budget: float, dense_layers: int) -> None:
    """Raises InputError for more tokens than a model has positions for, and for more dense layers than it has layers."""
    if budget > model.config.max_length:
        raise InputError(f"draft budget {budget:g} should be at most the model's {model.config.max_length} positions")
    layers = model.config.num_layers
    if not 0 <= dense_layers <= layers:
        raise InputError(f"dense_layers {dense_layers} should be from 0 to the model's {layers} layers")


def parts_asked(budget: float, parts, size: int):
    """How many of `parts` parts, each of `size` tokens, a budget asks for, not rounded; `parts` is a number or an array."""
    return budget * parts if budget <= 1 else budget / size


def tokens_asked(budget: float, quantized: int, size: int) -> int:
    """How many of the quantized tokens, which are in parts of `size` tokens, a budget asks for."""
    return math.ceil(parts_asked(budget, quantized // size, size)) * size


def check_has_groups(cache: Cache, draft: str) -> None:
    """Raises InputError for a cache without groups. draft: the name of the draft that chooses from them."""
    if not isinstance(getattr(cache, "pooled_part", None), HierarchicalCache):
        given = next((f", not {name}" for name, kind in CACHES.items() if isinstance(cache, kind)), "")
        raise InputError(f"draft {draft} reads groups of the int8 cache; give --cache int8{given}")


def is_dense(cache: Cache, layer: int, dense_layers: int) -> bool:
    """Whether a step reads all of a layer that a pass of the target reads: of one with a sliding window, and of the first others."""
    return layer not in cache.full_layers[dense_layers:]
