"""The bytes that a step of a draft must read: its weights, and what it reads of the context."""

import math
from collections import Counter

import jax

from pallas_kernels.formats.views import UPPER_PLANE
from qspec_jax.caches.cache import Cache, Reads
from qspec_jax.caches.host_memory import in_host
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.stepwise import ModelDraft
from qspec_jax.models.experts import is_expert_matrix
from qspec_jax.models.llama import Llama
from qspec_jax.models.sharding import mesh_of
from qspec_jax.models.skipping import NO_LAYERS, Skipped

# bfloat16: queries, buffers, full caches, scales and zeros.
ITEM_BYTES = 2


def step_bytes(
    draft: Draft,
    cache: CacheConfig,
    tokens: int,
    *,
    batch: int = 1,
    new_tokens: int = 1,
    max_item_bytes: int = 8,
    on_device: bool = False,
) -> int | None:
    """The bytes that a draft's step must read on the device: its weights, and keys and values. None for a draft that is no `ModelDraft`.

    Args:
        draft: the draft.
        cache: the target's.
        tokens: that the target's cache would hold in each row, the one that the step appends included.
        batch: rows, which share the weights.
        new_tokens: of each row, if the step has several.
        max_item_bytes, on_device: see `bytes_of`.
    """
    if not isinstance(draft, ModelDraft):
        return None
    model = draft.step.model
    of_weights = weight_bytes(model, rows=batch * new_tokens, skipped=skipped_by(draft), max_item_bytes=max_item_bytes, on_device=on_device)
    read, _ = cache_bytes_of_step(draft, cache.outline(model.config, tokens), tokens)
    return of_weights + batch * read // (devices_of(model) if on_device else 1)


def cache_bytes_of_step(draft: ModelDraft, cache: Cache, tokens: int) -> tuple[int, int]:
    """Bytes of keys and values that a draft's step reads of a row on the device, and those that it copies from host memory.

    cache: the target's, or its shapes. tokens: that it holds in the row, the one that the step appends included.
    """
    own = draft.cache_read(cache)
    read, copied = zip(*(own.bytes_of_reads(layer, each) for layer, each in enumerate(reads_of_step(draft, cache, tokens))))
    return sum(read), sum(copied)


def reads_of_step(draft: ModelDraft, cache: Cache, tokens: int) -> tuple[Reads, ...]:
    """What a draft's step reads of each layer of a row. Arguments as of `cache_bytes_of_step`."""
    own = draft.cache_read(cache)
    return tuple(own.reads_of_layer(layer, draft.reads(layer, cache, tokens), tokens) for layer in range(len(own.layers)))


def devices_of(model: Llama) -> int:
    """The number of devices that a model is divided over."""
    mesh = None if model.axis is None else mesh_of(model.weights())
    return 1 if mesh is None else mesh.size


def cache_share(draft: Draft, cache: CacheConfig, tokens: int) -> float | None:
    """The bytes of keys and values that a draft's step reads, as a share of those of its model's whole upper plane and buffer. Arguments as
    of `step_bytes`. None for a draft that is no `ModelDraft`."""
    if not isinstance(draft, ModelDraft):
        return None
    shapes = cache.outline(draft.step.model.config, tokens)
    return cache_bytes_of_step(draft, shapes, tokens)[0] / shapes.bytes_of_pass(UPPER_PLANE, tokens)[0]


def raised_groups(draft: Draft, cache: CacheConfig, tokens: int) -> int | None:
    """`ModelDraft.raised_to` for a row of `tokens` tokens; None for a draft that is no `ModelDraft`."""
    if not isinstance(draft, ModelDraft):
        return None
    head_dim = draft.step.model.config.head_dim
    return draft.raised_to(int(cache.schedule_for(head_dim).quantized_length(tokens)), cache.group_size_for(head_dim))


def skipped_by(draft: Draft) -> Skipped:
    """What the draft's steps leave out of its model."""
    return getattr(draft, "skipped", NO_LAYERS)


def weight_bytes(model: Llama, *, rows: int = 1, skipped: Skipped = NO_LAYERS, max_item_bytes: int = 8, on_device: bool = False) -> int:
    """Bytes of the weights that a step reads: all but what is skipped, an embedding that is not also the head, of which it reads a row for
    each token, and experts that no token chooses. `planning.operations.step_weight_bytes` counts the same from a model's shape alone.

    Args:
        model: the model.
        rows: tokens of the step, which read the experts that they choose (`ExpertsConfig.read`).
        skipped: what the step leaves out.
        max_item_bytes, on_device: see `bytes_of`.
    """
    weights = dict(model.weights())
    for path in skipped.weights(weights):
        weights.pop(path)
    if model.head is not None:
        weights.pop("embedding")
    matrices = {path: weights.pop(path) for path in list(weights) if is_expert_matrix(path)}
    size, of_experts = (bytes_of(part, max_item_bytes=max_item_bytes, on_device=on_device) for part in (weights, matrices))
    return size + (model.checkpoint_config.experts.read(of_experts, rows) if matrices else 0)


def bytes_of(tree, *, max_item_bytes: int = 8, on_device: bool = False) -> int:
    """Bytes of the arrays, or shapes, in a tree, each counted once.

    Args:
        tree: a pytree.
        max_item_bytes: the maximum size of an array element: 2 counts float32 as if it were bfloat16.
        on_device: whether to count what each device has: its part of arrays that are divided over a mesh, and no array in host memory.
    """
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(tree) if not (on_device and in_host(leaf))}.values()

    def divided(leaf):
        return on_device and getattr(leaf, "sharding", None) is not None

    def held(leaf):
        return leaf.sharding.shard_shape(leaf.shape) if divided(leaf) else leaf.shape

    return sum(math.prod(held(leaf)) * min(leaf.dtype.itemsize, max_item_bytes) for leaf in arrays)


def bytes_in_loop(draft: Draft | None) -> int:
    """Bytes of the arrays that `Draft.in_loop` makes, such as the INT8 head, besides those of the draft.

    They are recognized by their shapes and dtypes, since they are not made yet. If the model is divided, each counts as if it were whole on
    every device.
    """

    def count(draft):
        return Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(draft))

    made = count(jax.eval_shape(lambda draft: draft and draft.in_loop(), draft)) - count(draft)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in made.elements())
