"""Trains the embedded model, a small Llama, on Python source in a few minutes on one H100.

    python -m qspec_jax.training.embedded_model --output DIR

DIR becomes a Hugging Face checkpoint (bfloat16) with its tokenizer, training.json (the exact settings and results) and
loss_curve.png. How it is trained is in pretraining.py.
"""

import argparse
import dataclasses
import logging
import math
import time
from pathlib import Path

import jax
import numpy as np
import optax

from qspec_jax.files import write_json
from qspec_jax.models.config import LlamaConfig
from qspec_jax.training import corpus
from qspec_jax.training.pretraining import (
    HeldOut,
    Settings,
    batches,
    initial_params,
    learning_rate_scale,
    make_optimizer,
    make_step,
    save_model,
)
from qspec_jax.training.tokenizer import END_OF_TEXT_ID, encode, save_tokenizer, train_tokenizer

log = logging.getLogger("train")

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
SMOKE_MODEL = MODEL | {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256}
SMOKE = Settings(context=256, batch=4, evaluations=2, held_out_rows=4, timed_steps=2)


# Training


@dataclasses.dataclass
class History:
    """The course of a training run. train_nats: nats per token of every step. held_out: tokens seen and bits per byte of every evaluation.
    completed: whether the learning rate reached 0."""

    steps: int
    train_nats: list[float]
    held_out: list[tuple[int, float]]
    seconds: float
    compile_seconds: float
    completed: bool


def train(config: LlamaConfig, s: Settings, stream: np.ndarray, held_out: HeldOut, *, seconds: float, deadline: float, steps: int = 0):
    """Trains for about `seconds` (or exactly `steps` steps), ending in any case by `deadline` (time.monotonic); returns params and
    History.

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
        # During the timed steps the length is not known yet; any larger length gives them the same warm-up.
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


def draw_loss_curve(path: Path, history: History, tokens_per_step: int, bytes_per_token: float) -> None:
    """Draws bits per byte against tokens seen, for training text (running mean) and for held-out files."""
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


class _Stages:
    """Seconds of each stage of the run, logged as it ends."""

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
    parser.add_argument("--seconds", type=float, default=390, help="seconds of training, without compilation (default 390)")
    parser.add_argument("--total-seconds", type=float, default=515, help="seconds of the whole run, which shorten training (default 515)")
    parser.add_argument("--steps", type=int, default=0, help="train exactly so many steps, however long they take (to repeat a run)")
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
    size = save_model(params, model, args.output, most_bytes=MOST_FILE_BYTES)
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
    write_json(args.output / "training.json", record)
    log.info("done in %.0f s: %s", time.monotonic() - stages.start, args.output)


if __name__ == "__main__":
    main()
