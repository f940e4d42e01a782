"""Attention over a bfloat16 cache by other libraries, each called in its fastest way.

A peer that has no mask for the last T tokens, or none for ragged rows, is run without: it does no more work than with one, and its note
says so.
"""

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from qspec_jax.bench.attention_shapes import AttentionShape
from qspec_jax.bench.timing import Timing, time_jax, time_torch

MAX_XLA_LOGITS_BYTES = 4e9


class Unavailable(Exception):
    """Why a peer cannot run here, or not on this shape."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """One library's function, here attention for one shape.

    convert: makes what `compute` takes from query [B, T, N, H], keys and values [B, K, S, H]. compute: returns an output shaped like its
    query. restore: turns that output into a JAX array [B, T, N, H]. exact: whether it computes what decode_attention does, with its masks.
    """

    compute: Callable
    convert: Callable[..., tuple]
    restore: Callable[..., Array]
    timer: Callable[..., Timing]
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    note: str = ""
    exact: bool = True

    def time(self, query, inputs: Sequence[tuple], *, repeats: int) -> Timing:
        with self.context():
            return self.timer(self.compute, query, inputs, repeats=repeats)

    def __call__(self, *arrays: Array) -> Array:
        with self.context():
            return self.restore(self.compute(*self.convert(*arrays)))


def cudnn(shape: AttentionShape) -> Peer:
    """cuDNN through jax.nn.dot_product_attention, over a cache stored with tokens before heads, as it expects."""
    _need_gpu()
    lengths = jnp.array(shape.context, jnp.int32) if shape.ragged else None
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", key_value_seq_lengths=lengths)
    swap = jax.jit(lambda q, k, v: (q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)))
    notes = ["key_value_seq_lengths"] * shape.ragged + ["no causal mask"] * (shape.tokens > 1)
    return Peer(attend, swap, lambda out: out, time_jax, note=", ".join(notes), exact=shape.tokens == 1)


def xla(shape: AttentionShape) -> Peer:
    """XLA through jax.nn.dot_product_attention."""
    T, S = shape.tokens, max(shape.context)
    logits = 4 * shape.batch * shape.heads * T * S
    if logits > MAX_XLA_LOGITS_BYTES:
        raise Unavailable(f"its logits would take {logits / 1e9:.0f} GB")

    def attend(q, k, v):
        mask = None
        if T > 1 or shape.ragged:
            seen = jnp.array(shape.context)[:, None] - T + jnp.arange(T) + 1
            mask = (jnp.arange(S) < seen[..., None])[:, None]
        return jax.nn.dot_product_attention(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), mask=mask, implementation="xla")

    return Peer(attend, lambda q, k, v: (q, k, v), lambda out: out, time_jax)


def torch_flash(shape: AttentionShape) -> Peer:
    """torch's scaled_dot_product_attention with its flash backend."""
    return _torch(shape, "FLASH_ATTENTION", masks=True)


def torch_cudnn(shape: AttentionShape) -> Peer:
    """torch's scaled_dot_product_attention with its cuDNN backend."""
    return _torch(shape, "CUDNN_ATTENTION", masks=False)


def _torch(shape: AttentionShape, backend: str, *, masks: bool) -> Peer:
    torch = torch_with_cuda()
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    causal = shape.tokens > 1
    settings = {"enable_gqa": True} if shape.heads != shape.kv_heads else {}
    if causal and masks:
        settings["attn_mask"] = causal_lower_right(shape.tokens, max(shape.context))
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, **settings)
    notes = ["padded to the longest row"] * shape.ragged + ["no causal mask"] * (causal and not masks)
    return Peer(
        attend,
        lambda q, k, v: to_torch(jnp.swapaxes(q, 1, 2), k, v),
        lambda out: to_jax(out.transpose(1, 2)),
        time_torch,
        context=lambda: sdpa_kernel(getattr(SDPBackend, backend)),
        note=", ".join(notes),
        exact=not shape.ragged and (masks or not causal),
    )


def flashinfer(shape: AttentionShape) -> Peer:
    """FlashInfer's kernels for a single row."""
    _need_installed("flashinfer")
    torch_with_cuda()
    import flashinfer

    if shape.batch > 1:
        raise Unavailable("its kernels for unpaged caches take one row")
    if shape.tokens > 1:
        attend = functools.partial(flashinfer.single_prefill_with_kv_cache, causal=True, kv_layout="HND")
        query, restore = lambda q: q[0], lambda out: to_jax(out)[None]
    else:
        # On tensor cores the query heads of a KV head share what is read.
        use_tensor_cores = shape.heads != shape.kv_heads
        attend = functools.partial(flashinfer.single_decode_with_kv_cache, kv_layout="HND", use_tensor_cores=use_tensor_cores)
        query, restore = lambda q: q[0, 0], lambda out: to_jax(out)[None, None]
    return Peer(attend, lambda q, k, v: to_torch(query(q), k[0], v[0]), restore, time_torch)


PEERS: dict[str, Callable[[AttentionShape], Peer]] = {
    "cudnn": cudnn,
    "xla": xla,
    "torch_flash": torch_flash,
    "torch_cudnn": torch_cudnn,
    "flashinfer": flashinfer,
}


def _need_gpu() -> None:
    if jax.default_backend() != "gpu":
        raise Unavailable("needs an NVIDIA GPU")


def _need_installed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise Unavailable("not installed")


def torch_with_cuda():
    """Imports torch. Raises Unavailable where it is not installed or has no GPU."""
    _need_installed("torch")
    _need_gpu()
    import torch

    if not torch.cuda.is_available():
        raise Unavailable("torch is installed without CUDA")
    return torch


def to_torch(*arrays: Array) -> tuple:
    """torch tensors over the memory of these arrays, without a copy."""
    import torch

    return tuple(torch.from_dlpack(x) for x in jax.block_until_ready(arrays))


def to_jax(tensor) -> Array:
    """A JAX array over a torch tensor's memory, once torch is done with it; a copy where the tensor is not contiguous."""
    import torch

    torch.cuda.synchronize()
    return jnp.from_dlpack(tensor.contiguous())
