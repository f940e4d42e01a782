"""Trains the embedded model: a small Llama on Python source, in a few minutes on one H100.

    python -m qspec_jax.demo.train --output DIR

DIR becomes a Hugging Face checkpoint (bfloat16) with its tokenizer, training.json (the exact settings and results) and
loss_curve.png. The matrices are trained with Muon (Jordan et al. 2024; scaled and decayed as in Liu et al., arXiv 2502.16982) on
a warm-up, constant, linear-decay schedule (Hu et al., arXiv 2404.06395): orthogonalized updates leave weights and activations
without the outliers that 4-bit rounding suffers from. Nothing in training knows of quantization.
"""

import argparse
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from optax.contrib import MuonDimensionNumbers, muon
from safetensors.flax import save_file

from qspec_jax.checkpoint import hf_name
from qspec_jax.config import LlamaConfig
from qspec_jax.demo import corpus
from qspec_jax.demo.tokenizer import END_OF_TEXT_ID, encode, save_tokenizer, token_bytes, train_tokenizer
from qspec_jax.model import Llama

log = logging.getLogger("train")

Params = dict[str, Array]
MOST_FILE_BYTES = 16_000_000

# config.json. Every matrix's input size is a multiple of 128, the group of the INT4 draft weights. transformers 4 reads rope_theta,
# transformers 5 rope_parameters.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": END_OF_TEXT_ID,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """One training run."""

    context: int = 8192  # tokens
    batch: int = 16  # sequences of `context` tokens per step
    muon_learning_rate: float = 5e-3  # matrices; the update's root mean square is 0.2 times this
    adam_learning_rate: float = 3e-3  # embedding and norms
    weight_decay: float = 0.1  # matrices, times the learning rate
    warmup: float = 0.02  # shares of the steps
    decay: float = 0.45
    clip: float = 1.0  # global gradient norm
    z_loss: float = 1e-4  # times mean log(Z)^2
    evaluations: int = 25
    held_out_rows: int = 32  # of `context` tokens, per evaluation while training; the last one reads all
    timed_steps: int = 20
    seed: int = 0


SMOKE_MODEL = MODEL | {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256}
SMOKE = Settings(context=256, batch=4, evaluations=2, held_out_rows=4, timed_steps=2)


# The model as it is trained


class _Trunk(Llama):
    """Llama up to its last norm, in bfloat16 over a float32 embedding, whose gradient adds up too many tokens for bfloat16."""

    def embed(self, tokens):
        return super().embed(tokens).astype(jnp.bfloat16)

    def logits(self, x):
        return self.norm(x)


class CausalAttention:
    """The cache that caches nothing: attention within the call's own tokens."""

    def attend(self, layer: int, q: Array, k: Array, v: Array, *, planes: int) -> tuple[Array, None]:
        fused = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if fused else "xla"), None

    def advance(self, layers: tuple[None, ...], tokens: int) -> "CausalAttention":
        return self


def initial_params(config: LlamaConfig, seed: int, std: float = 0.02) -> Params:
    """Float32 weights by path: normal, smaller by sqrt(2 L) where a matrix writes to the residual stream (GPT-2); norms 1."""
    rng = np.random.default_rng(seed)

    def make(path: str, shape: tuple[int, ...]) -> Array:
        if len(shape) == 1:
            return jnp.ones(shape, jnp.float32)
        residual = path.endswith(("o_proj.weight", "down_proj.weight"))
        return jnp.asarray(rng.normal(0, std / math.sqrt(2 * config.num_layers) if residual else std, shape), jnp.float32)

    return Llama(config, make).weights()


def log_probabilities(config: LlamaConfig, params: Params, rows: Int[Array, "B T+1"]) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log probability (nats) of each row's tokens but its first, and log Z of their softmax."""
    trunk = _Trunk(config, lambda path, shape: params[path] if path == "embedding" else params[path].astype(jnp.bfloat16))
    tokens, targets = rows[:, :-1], rows[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = trunk(tokens, positions, CausalAttention())
    logits = _head(hidden, params["embedding"].astype(jnp.bfloat16))
    log_z = jax.nn.logsumexp(logits, -1)
    # A masked sum instead of a gather, whose derivative would be scattered into an array of the logits' size.
    chosen = jnp.sum(jnp.where(targets[..., None] == jnp.arange(config.vocab_size), logits, 0), -1)
    return chosen - log_z, log_z


@jax.custom_vjp
def _head(hidden: Float[Array, "B T D"], embedding: Float[Array, "V D"]) -> Float[Array, "B T V"]:
    """Float32 logits of bfloat16 operands, whose derivative stays on the bfloat16 matrix units too."""
    return jnp.einsum("BTD,VD->BTV", hidden, embedding, preferred_element_type=jnp.float32)


def _head_backward(residuals: tuple[Array, Array], gradient: Float[Array, "B T V"]) -> tuple[Array, Array]:
    (hidden, embedding), gradient = residuals, gradient.astype(jnp.bfloat16)
    return jnp.einsum("BTV,VD->BTD", gradient, embedding), jnp.einsum("BTV,BTD->VD", gradient, hidden)


_head.defvjp(lambda hidden, embedding: (_head(hidden, embedding), (hidden, embedding)), _head_backward)


# Training


def make_optimizer(s: Settings) -> optax.GradientTransformation:
    """Muon for the layers' matrices (stored [out, in]), AdamW without decay for the embedding and the norms."""
    out_in = MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    matrices = lambda params: {path: out_in if path.endswith("_proj.weight") else None for path in params}
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
    """Warm-up, constant, linear decay to 0."""
    progress = (step + 1) / steps
    return min(1.0, progress / s.warmup, (1 - step / steps) / s.decay)


def make_step(config: LlamaConfig, s: Settings, optimizer: optax.GradientTransformation) -> Callable:
    """step(params, state, stream [tokens], starts [B], scale) -> params, state, mean nats per token; params and state are donated."""

    def loss(params: Params, rows: Array) -> tuple[Array, Array]:
        log_p, log_z = log_probabilities(config, params, rows)
        nats = -jnp.mean(log_p)
        return nats + s.z_loss * jnp.mean(log_z**2), nats

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, stream, starts, scale):
        rows = stream[starts[:, None] + jnp.arange(s.context + 1)].astype(jnp.int32)
        (_, nats), gradient = jax.value_and_grad(loss, has_aux=True)(params, rows)
        updates, state = optimizer.update(gradient, state, params)
        # Updates and their decay are linear in the learning rate, so the schedule may scale both here.
        return jax.tree.map(lambda p, u: p + scale * u, params, updates), state, nats

    return step


def batches(tokens: int, s: Settings) -> Iterator[np.ndarray]:
    """Starts [B] of each step's windows in a stream of tokens: every epoch cuts it at another offset and shuffles the windows."""
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
    """The held-out files as rows of context + 1 tokens, and the model's bits per byte on them."""

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
        # The last row is filled up with targets that count nothing.
        padding = count * s.context + 1 - len(stream)
        stream, owner = np.pad(stream, (0, padding)), np.pad(owner, (0, padding), constant_values=-1)
        window = np.arange(count)[:, None] * s.context + np.arange(s.context + 1)
        self.rows, self.owner = stream[window], owner[window[:, 1:]]
        self.bytes = token_bytes(tokenizer)[self.rows[:, 1:]]
        self.sample = np.unique(np.linspace(0, count - 1, s.held_out_rows).astype(int))
        self.log_p = jax.jit(lambda params, rows: log_probabilities(config, params, rows)[0])
        self.chunk = min(4, len(self.sample))

    def nats(self, params: Params, rows: np.ndarray) -> np.ndarray:
        """Nats of each target of these rows (indices), [rows, T]."""
        filled = np.resize(rows, math.ceil(len(rows) / self.chunk) * self.chunk)  # one shape, compiled once
        chunks = [self.log_p(params, self.rows[filled[i : i + self.chunk]]) for i in range(0, len(filled), self.chunk)]
        return -np.concatenate([np.asarray(c) for c in chunks])[: len(rows)]

    def sampled_bits_per_byte(self, params: Params) -> float:
        """Over the rows of an evaluation while training: evenly spaced ones."""
        nats, counts = self.nats(params, self.sample), self.owner[self.sample] >= 0
        return float(nats[counts].sum() / math.log(2) / self.bytes[self.sample][counts].sum())

    def bits_per_byte_by_name(self, params: Params) -> dict[str, dict[str, float]]:
        """Over all rows: name -> bytes and bits per byte, and "all"."""
        nats = self.nats(params, np.arange(len(self.rows)))
        wanted = {"all": self.owner >= 0} | {name: self.owner == i for i, name in enumerate(self.names)}
        totals = {name: (nats[mask].sum() / math.log(2), int(self.bytes[mask].sum())) for name, mask in wanted.items()}
        return {name: {"bytes": size, "bits_per_byte": round(float(bits) / size, 4)} for name, (bits, size) in totals.items()}


@dataclasses.dataclass
class History:
    """What training.json and the picture tell: nats per token of every step, and [tokens, bits per byte] of every evaluation."""

    steps: int
    train_nats: list[float]
    held_out: list[tuple[int, float]]
    seconds: float
    compile_seconds: float
    completed: bool


def train(config: LlamaConfig, s: Settings, stream: np.ndarray, held_out: HeldOut, *, seconds: float, deadline: float, steps: int = 0):
    """Trains for about `seconds` (or exactly `steps` steps), ending in any case by `deadline` (time.monotonic); params and History.

    The first steps are timed and decide how many there are, so that the learning rate reaches 0 at the end of the time.
    """
    optimizer = make_optimizer(s)
    params = initial_params(config, s.seed)
    state, step_function, starts = optimizer.init(params), make_step(config, s, optimizer), batches(len(stream), s)
    on_device, losses, per_step = jax.device_put(stream), [], s.batch * s.context
    history = History(0, [], [], 0.0, 0.0, True)

    began = time.monotonic()
    step_function = step_function.lower(params, state, on_device, np.zeros(s.batch, np.int32), np.float32(0)).compile()
    first = held_out.sampled_bits_per_byte(params)
    evaluation_began = time.monotonic()
    history.held_out.append((0, held_out.sampled_bits_per_byte(params)))
    start = time.monotonic()
    history.compile_seconds, evaluation_seconds = start - began, start - evaluation_began
    log.info("compiled in %.1f s; held-out %.3f bits per byte before training", history.compile_seconds, first)
    seconds = min(seconds, deadline - start)

    step, total = 0, max(steps, s.timed_steps)
    while step < total:
        # The length is not known in the timed steps; any length gives them the same warm-up, if it is longer than this.
        scale = learning_rate_scale(s, step, steps or history.steps or max(2000, total))
        params, state, nats = step_function(params, state, on_device, next(starts), np.float32(scale))
        losses.append(nats)
        step += 1
        if step == 2:
            nats.block_until_ready()
            timed = time.monotonic()
        if step == s.timed_steps and not steps:
            nats.block_until_ready()
            per = (time.monotonic() - timed) / (step - 2) if step > 2 else time.monotonic() - start
            left = seconds - (time.monotonic() - start) - evaluation_seconds * s.evaluations
            total = history.steps = max(step + int(0.98 * left / per), step + 1)
            log.info("%.0f ms per step, %.2f M tokens/s: %d steps", per * 1e3, per_step / per / 1e6, total)
        if step == total or (step > s.timed_steps and step % max(1, total // s.evaluations) == 0):
            bits = held_out.sampled_bits_per_byte(params)
            history.held_out.append((step * per_step, bits))
            elapsed = time.monotonic() - start
            log.info("step %d, %.0f s: train %.4f nats per token, held-out %.4f bits per byte", step, elapsed, float(nats), bits)
            if time.monotonic() > deadline + 15 and step < total:
                log.warning("out of time after %d of %d steps: the learning rate has not reached 0", step, total)
                history.completed = False
                break
    history.steps, history.seconds = step, time.monotonic() - start
    history.train_nats = [round(float(x), 5) for x in jax.device_get(losses)]
    return params, history


# What is written


def save_model(params: Params, model: dict[str, Any], directory: Path) -> int:
    """Writes config.json, generation_config.json and model.safetensors in bfloat16; the latter's bytes."""
    ids = {"bos_token_id": model["bos_token_id"], "eos_token_id": model["eos_token_id"]}
    _write_json(directory / "config.json", model)
    _write_json(directory / "generation_config.json", ids)
    path = directory / "model.safetensors"
    save_file({hf_name(p): a.astype(jnp.bfloat16) for p, a in params.items()}, path, metadata={"format": "pt"})
    path.chmod(0o644)
    if path.stat().st_size > MOST_FILE_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, more than {MOST_FILE_BYTES}")
    return path.stat().st_size


def draw_loss_curve(path: Path, history: History, tokens_per_step: int, bytes_per_token: float) -> None:
    """Bits per byte against tokens: training text (running mean) and held-out files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    train = np.asarray(history.train_nats) / math.log(2) / bytes_per_token
    width = max(1, len(train) // 100)
    smooth = np.convolve(train, np.ones(width) / width, "valid")
    at = (np.arange(len(smooth)) + (width + 1) / 2) * tokens_per_step / 1e6
    held_tokens, held_bits = np.array(history.held_out[1:]).T
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes.plot(at, smooth, color="#9aa5b1", linewidth=1.3, label="training text")
    axes.plot(held_tokens / 1e6, held_bits, color="#1f6feb", linewidth=2, marker="o", markersize=4, label="held-out files")
    last = (held_tokens[-1] / 1e6, held_bits[-1])
    axes.annotate(f"{last[1]:.3f}", last, (0, 10), textcoords="offset points", ha="center", color="#1f6feb")
    low, high = min(smooth.min(), held_bits.min()), max(held_bits[0], smooth[len(smooth) // 20])
    margin = 0.1 * (high - low)
    axes.set(xlabel="tokens seen (millions)", ylabel="bits per byte", xlim=(0, None), ylim=(low - margin, high + margin))
    axes.set_title("The embedded model on Python source", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


class _Stages:
    """Seconds of each stage of the run, printed as they end."""

    def __init__(self):
        self.start = self.last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def end(self, name: str, detail: str = "") -> None:
        now = time.monotonic()
        self.seconds[name] = round(now - self.last, 2)
        log.info("%-10s %6.1f s  (%.0f s in all)  %s", name, now - self.last, now - self.start, detail)
        self.last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--seconds", type=float, default=390, help="of training, without compilation (default 390)")
    parser.add_argument("--total-seconds", type=float, default=515, help="training is shortened to end by then (default 515)")
    parser.add_argument("--steps", type=int, default=0, help="exactly so many steps, whatever they take (to repeat a run)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a tiny corpus, to see that everything works")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("qspec_jax").setLevel(logging.INFO)
    log.setLevel(logging.INFO)
    stages = _Stages()
    model, s = (SMOKE_MODEL, SMOKE) if args.smoke else (MODEL, Settings())
    steps = args.steps or (5 if args.smoke else 0)
    config = LlamaConfig.from_hf(model)
    args.output.mkdir(parents=True, exist_ok=True)

    read = corpus.read_corpus((), most_bytes=2_000_000) if args.smoke else corpus.read_corpus()
    texts = [d.text for d in read.documents]
    stages.end("corpus", f"{len(texts)} files, {read.description['bytes'] / 1e6:.1f} MB; left out {read.description['left_out_files']}")
    tokenizer = train_tokenizer(texts, config.vocab_size, seed=s.seed)
    save_tokenizer(tokenizer, args.output, max_length=config.max_position_embeddings)
    stages.end("tokenizer", f"{tokenizer.get_vocab_size()} tokens")
    stream = np.concatenate(encode(tokenizer, texts))
    bytes_per_token = read.description["bytes"] / len(stream)
    held_out = HeldOut(config, s, tokenizer)
    stages.end("encode", f"{len(stream) / 1e6:.2f} M tokens, {bytes_per_token:.2f} bytes each; {len(held_out.rows)} held-out rows")

    deadline = stages.start + args.total_seconds - 10
    params, history = train(config, s, stream, held_out, seconds=args.seconds, deadline=deadline, steps=steps)
    stages.end("train", f"{history.steps} steps")
    size = save_model(params, model, args.output)
    by_name = held_out.bits_per_byte_by_name(params)
    stages.end("save", f"model.safetensors {size:,} bytes; held-out {by_name['all']['bits_per_byte']} bits per byte")

    per_step = s.batch * s.context
    count = int(sum(a.size for a in params.values()))
    draw_loss_curve(args.output / "loss_curve.png", history, per_step, bytes_per_token)
    stages.end("picture")
    record = {
        "settings": dataclasses.asdict(s),
        "command": {"seconds": args.seconds, "total_seconds": args.total_seconds, "steps": steps, "smoke": args.smoke},
        "parameters": count,
        "model_bytes": size,
        "device": f"{jax.devices()[0].device_kind}, jax {jax.__version__}, optax {optax.__version__}",
        "steps": history.steps,
        "completed": history.completed,
        "tokens_seen": history.steps * per_step,
        "train_seconds": round(history.seconds, 1),
        "compile_seconds": round(history.compile_seconds, 1),
        "stage_seconds": stages.seconds,
        "tokens_per_second": round(history.steps * per_step / history.seconds),
        "corpus": read.description | {"tokens": len(stream), "bytes_per_token": round(bytes_per_token, 4)},
        "held_out_bits_per_byte": by_name,
        "held_out_by_tokens_seen": [{"tokens": t, "bits_per_byte": round(b, 4)} for t, b in history.held_out],
        "train_nats_per_token": history.train_nats,
    }
    _write_json(args.output / "training.json", record)
    log.info("done in %.0f s: %s", time.monotonic() - stages.start, args.output)


if __name__ == "__main__":
    main()
