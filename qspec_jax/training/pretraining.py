"""Pretraining: a Llama's loss, its optimizer, batches of one stream of tokens, held-out text, and writing a checkpoint.

The matrices are trained with Muon (Jordan et al. 2024; scaled and decayed as in Liu et al., arXiv 2502.16982) on a warm-up, constant,
linear-decay schedule (Hu et al., arXiv 2404.06395): orthogonalized updates leave weights and activations without the outliers that
4-bit rounding suffers from. The loss knows nothing of quantization. Needs the extra `train`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from optax.contrib import MuonDimensionNumbers, muon
from safetensors.flax import save_file

from pallas_kernels.rope_append import split_and_rotate
from qspec_jax.checkpoints.tensor_names import places
from qspec_jax.errors import InputError
from qspec_jax.files import whole_file, write_json
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import AttendingCache, Llama
from qspec_jax.quantization.weights import is_linear
from qspec_jax.training import corpus
from qspec_jax.training.tokenizer import encode, token_bytes

Params = dict[str, Array]
INITIAL_STD = 0.02
EVALUATED_TOKENS = 32768  # evaluated at once, unless a single row is longer


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of one training run."""

    context: int = 8192  # tokens
    batch: int = 16  # sequences of `context` tokens per step
    muon_learning_rate: float = 5e-3  # for the matrices; the update's root mean square is 0.2 times this
    adam_learning_rate: float = 3e-3  # for the embedding and the norms
    weight_decay: float = 0.1  # of the matrices, times the learning rate
    warmup: float = 0.02  # shares of the steps
    decay: float = 0.45
    clip: float = 1.0  # global gradient norm
    z_loss: float = 1e-4  # times mean log(Z)^2
    evaluations: int = 25
    held_out_rows: int = 32  # rows of `context` tokens in an evaluation while training; the last evaluation reads all
    timed_steps: int = 20
    seed: int = 0


# The model as it is trained


class _Trunk(Llama):
    """Llama up to its last norm, in bfloat16. Its embedding stays in float32: that gradient sums over too many tokens for bfloat16."""

    def embed(self, tokens):
        return super().embed(tokens).astype(jnp.bfloat16)

    def logits(self, x, added=None):
        return self.norm.add(x, added)[1]


@dataclasses.dataclass(frozen=True)
class CausalAttention(AttendingCache):
    """A cache that keeps nothing: causal attention within the tokens of the call.

    windows: of each layer the number of tokens that a token attends to, itself included; None: all. Empty: all, in all layers.
    """

    kv_heads: int
    windows: tuple[int | None, ...] = ()

    def attend(self, layer: int, qkv: Array, cos: Array, sin: Array, *, view: Any) -> tuple[Array, None, None]:
        q, k, v = split_and_rotate(qkv, cos, sin, kv_heads=self.kv_heads)
        fused = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
        window = self.windows[layer] if self.windows else None
        how = dict(implementation="cudnn" if fused else "xla", local_window_size=None if window is None else (window - 1, 0))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, **how), None, None

    def advance(self, layers: tuple[None, ...], tokens: int) -> "CausalAttention":
        return self


def initial_params(config: LlamaConfig, seed: int) -> Params:
    """Initial float32 weights by path: normal, smaller by sqrt(2 L) where a matrix writes to the residual stream (GPT-2); norms 1."""
    rng = np.random.default_rng(seed)

    def make(path: str, shape: tuple[int, ...]) -> Array:
        if len(shape) == 1:
            return jnp.ones(shape, jnp.float32)
        residual = path.endswith(("o_proj.weight", "down_proj.weight"))
        return jnp.asarray(rng.normal(0, INITIAL_STD / math.sqrt(2 * config.num_layers) if residual else INITIAL_STD, shape), jnp.float32)

    return Llama(config, make).weights()


def log_probabilities(config: LlamaConfig, params: Params, rows: Int[Array, "B T+1"]) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log probability (nats) of each row's tokens but its first, and log Z of their softmax."""
    trunk = _Trunk(config, lambda path, shape: params[path] if path == "embedding" else params[path].astype(jnp.bfloat16))
    tokens, targets = rows[:, :-1], rows[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = trunk(tokens, positions, CausalAttention(config.num_kv_heads))
    logits = _head(hidden, params["embedding"].astype(jnp.bfloat16))
    log_z = jax.nn.logsumexp(logits, -1)
    # A masked sum instead of a gather, whose derivative would be scattered into an array of the logits' size.
    chosen = jnp.sum(jnp.where(targets[..., None] == jnp.arange(config.vocab_size), logits, 0), -1)
    return chosen - log_z, log_z


@jax.custom_vjp
def _head(hidden: Float[Array, "B T D"], embedding: Float[Array, "V D"]) -> Float[Array, "B T V"]:
    """Logits in float32 from bfloat16 operands; the derivative is computed on the bfloat16 matrix units too."""
    return jnp.einsum("BTD,VD->BTV", hidden, embedding, preferred_element_type=jnp.float32)


def _head_backward(residuals: tuple[Array, Array], gradient: Float[Array, "B T V"]) -> tuple[Array, Array]:
    (hidden, embedding), gradient = residuals, gradient.astype(jnp.bfloat16)
    return jnp.einsum("BTV,VD->BTD", gradient, embedding), jnp.einsum("BTV,BTD->VD", gradient, hidden)


_head.defvjp(lambda hidden, embedding: (_head(hidden, embedding), (hidden, embedding)), _head_backward)


# Training


def make_optimizer(s: Settings, *, others: Sequence[str] = ()) -> optax.GradientTransformation:
    """Muon for the matrices of the layers (stored [out, in]), AdamW without decay for the embedding and the norms.

    others: paths of further matrices.
    """
    out_in = MuonDimensionNumbers(reduction_axis=1, output_axis=0)

    def matrices(params):
        return {path: out_in if is_linear(path) or path in others else None for path in params}

    return optax.chain(
        optax.clip_by_global_norm(s.clip),
        muon(
            s.muon_learning_rate,
            weight_decay=s.weight_decay,
            adam_learning_rate=s.adam_learning_rate,
            adam_b2=0.95,
            muon_weight_dimension_numbers=matrices,
            consistent_rms=0.2,
        ),
    )


def learning_rate_scale(s: Settings, step: int, steps: int) -> float:
    """The factor on the learning rate at a step: linear warm-up, constant, linear decay to 0."""
    progress = (step + 1) / steps
    return min(1.0, progress / s.warmup, (1 - step / steps) / s.decay)


def over(devices: Sequence[jax.Device]) -> tuple[NamedSharding, NamedSharding]:
    """Shardings for when every device takes its share of a step's rows: whole on each device, and cut along the first axis."""
    mesh = jax.make_mesh((len(devices),), ("rows",), axis_types=(AxisType.Auto,), devices=devices)
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("rows"))


def make_step(
    config: LlamaConfig, s: Settings, optimizer: optax.GradientTransformation, devices: Sequence[jax.Device] | None = None
) -> Callable:
    """Makes step(params, state, stream [tokens], starts [B], scale) -> params, state, mean nats per token; params and state are donated.

    Each device (by default only the first) takes an equal share of the rows, whose number must be a multiple of the devices'.
    """
    whole, by_row = over(devices or jax.devices()[:1])

    def loss(params: Params, rows: Array) -> tuple[Array, Array]:
        log_p, log_z = log_probabilities(config, params, rows)
        nats = -jnp.mean(log_p)
        return nats + s.z_loss * jnp.mean(log_z**2), nats

    @partial(jax.jit, donate_argnums=(0, 1), in_shardings=(whole, whole, whole, by_row, whole), out_shardings=whole)
    def step(params, state, stream, starts, scale):
        rows = stream[starts[:, None] + jnp.arange(s.context + 1)].astype(jnp.int32)
        (_, nats), gradient = jax.value_and_grad(loss, has_aux=True)(params, rows)
        updates, state = optimizer.update(gradient, state, params)
        # Updates and their decay are linear in the learning rate, so the schedule may scale both here.
        return jax.tree.map(lambda p, u: p + scale * u, params, updates), state, nats

    return step


def batches(tokens: int, s: Settings) -> Iterator[np.ndarray]:
    """Yields the starts [B] of each step's windows in a stream of tokens. Every epoch cuts it at another offset and shuffles the windows.

    Raises ValueError for a stream shorter than a window.
    """
    left = np.empty(0, np.int32)
    for epoch in range(1 << 30):
        rng = np.random.default_rng((s.seed, epoch))
        windows = np.arange(rng.integers(s.context), tokens - s.context - 1, s.context, dtype=np.int32)
        left = np.concatenate([left, rng.permutation(windows)])
        if len(windows) == 0:
            raise ValueError(f"{tokens} tokens are too few for a context of {s.context}")
        while len(left) >= s.batch:
            yield left[: s.batch]
            left = left[s.batch :]


class HeldOut:
    """The held-out files as rows of context + 1 tokens, on which a model's bits per byte are measured."""

    def __init__(self, config: LlamaConfig, s: Settings, tokenizer: Any):
        names, texts = [], []
        for name, paths in corpus.held_out_by_name().items():
            names += [name] * len(paths)
            texts += [path.read_text(encoding="utf-8") for path in paths]
        documents = encode(tokenizer, texts)
        self.names = list(dict.fromkeys(names))
        owner = np.concatenate([np.full(len(d), self.names.index(name)) for name, d in zip(names, documents)])
        stream = np.concatenate(documents).astype(np.int32)
        count = math.ceil((len(stream) - 1) / s.context)
        # The last row is padded with targets that do not count.
        padding = count * s.context + 1 - len(stream)
        stream, owner = np.pad(stream, (0, padding)), np.pad(owner, (0, padding), constant_values=-1)
        window = np.arange(count)[:, None] * s.context + np.arange(s.context + 1)
        self.rows, self.owner = stream[window], owner[window[:, 1:]]
        self.bytes = token_bytes(tokenizer)[self.rows[:, 1:]]
        self.sample = np.unique(np.linspace(0, count - 1, s.held_out_rows).astype(int))
        self.log_p = jax.jit(lambda params, rows: log_probabilities(config, params, rows)[0])
        self.chunk = max(1, min(4, EVALUATED_TOKENS // s.context, len(self.sample)))

    def nats(self, params: Params, rows: np.ndarray) -> np.ndarray:
        """Nats of each target in the rows with these indices, [rows, T]."""
        filled = np.resize(rows, math.ceil(len(rows) / self.chunk) * self.chunk)  # one shape, compiled once
        chunks = [self.log_p(params, self.rows[filled[i : i + self.chunk]]) for i in range(0, len(filled), self.chunk)]
        return -np.concatenate([np.asarray(c) for c in chunks])[: len(rows)]

    def sampled_bits_per_byte(self, params: Params) -> float:
        """Bits per byte over evenly spaced rows, for an evaluation while training."""
        nats, counts = self.nats(params, self.sample), self.owner[self.sample] >= 0
        return float(nats[counts].sum() / math.log(2) / self.bytes[self.sample][counts].sum())

    def bits_per_byte_by_name(self, params: Params) -> dict[str, dict[str, float]]:
        """Bytes and bits per byte over all rows, for each held-out name and for "all"."""
        nats = self.nats(params, np.arange(len(self.rows)))
        wanted = {"all": self.owner >= 0} | {name: self.owner == i for i, name in enumerate(self.names)}
        totals = {name: (nats[mask].sum() / math.log(2), int(self.bytes[mask].sum())) for name, mask in wanted.items()}
        return {name: {"bytes": size, "bits_per_byte": round(float(bits) / size, 4)} for name, (bits, size) in totals.items()}


# What is written


def save_model(params: Params, model: dict[str, Any], directory: Path, *, max_bytes: int | None = None) -> int:
    """Writes config.json, generation_config.json and model.safetensors (bfloat16), and returns the bytes of the last.

    Raises InputError if those are more than max_bytes.
    """
    ids = {"bos_token_id": model["bos_token_id"], "eos_token_id": model["eos_token_id"]}
    write_json(directory / "config.json", model)
    write_json(directory / "generation_config.json", ids)
    path = directory / "model.safetensors"
    names = places(LlamaConfig.from_hf(model))
    with whole_file(path) as unfinished:
        save_file({names[p].name: a.astype(jnp.bfloat16) for p, a in params.items()}, unfinished, metadata={"format": "pt"})
    if max_bytes is not None and path.stat().st_size > max_bytes:
        raise InputError(f"{path} has {path.stat().st_size:,} bytes, more than the {max_bytes:,} that are meant for it")
    return path.stat().st_size
