"""`qspec train embedded`: the embedded model, a small Llama, trained on Python source in a few minutes on one H100.

The directory becomes a Hugging Face checkpoint (bfloat16) with its tokenizer, training.json (the exact settings and results) and
loss_curve.png. Needs the extra `train`.
"""

import dataclasses
import logging
import math
import time
from pathlib import Path

import numpy as np
import optax

from qspec_jax import plots
from qspec_jax.errors import writing
from qspec_jax.files import write_json
from qspec_jax.models.config import LlamaConfig
from qspec_jax.progress import progress_bar
from qspec_jax.training.pretraining import HeldOut, Settings, save_model
from qspec_jax.training.tokenizer import END_OF_TEXT_ID, encode, save_tokenizer, train_tokenizer
from qspec_jax.training.trainer import Recipe, Trainer, TrainingProgress, TrainingReport, read_training_text

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 16_000_000
SAVE_SECONDS = 30  # set aside for the last evaluation, of all held-out text, and the checkpoint

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
_SMOKE = Settings(context=256, batch=4, evaluations=2, held_out_rows=4, timed_steps=2)
RECIPE = Recipe(MODEL, Settings(), Settings(), long_share=0)
SMOKE = Recipe(SMOKE_MODEL, _SMOKE, _SMOKE, long_share=0)
SMOKE_STEPS = 5


def run(
    directory: Path, *, seconds: float, total_seconds: float, steps: int = 0, smoke: bool = False, progress: bool | None = None
) -> TrainingReport:
    """Trains on one device, and leaves a checkpoint.

    Args:
        directory: of the checkpoint.
        seconds: of training, without compilation.
        total_seconds: of the whole run, which shorten training.
        steps: the exact number of steps instead, to repeat a run; 0: by the time.
        smoke: whether a tiny model is trained on a tiny corpus.
        progress: see `progress_bar`.

    Raises:
        InputError: for a directory that cannot be written, and if matplotlib is not installed.
    """
    plots.need_matplotlib("training the embedded model")
    deadline = time.monotonic() + total_seconds - SAVE_SECONDS
    recipe = SMOKE if smoke else RECIPE
    s, config = recipe.short, LlamaConfig.from_hf(recipe.model)
    with writing(f"--output {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
    read = read_training_text(smoke=smoke)
    texts = [document.text for document in read.documents]
    log.info("%d files, %.1f MB; left out %s", len(texts), read.description["bytes"] / 1e6, read.description["left_out_files"])
    tokenizer = train_tokenizer(texts, config.vocab_size, seed=s.seed)
    with writing(f"--output {directory}"):
        save_tokenizer(tokenizer, directory, max_length=config.max_position_embeddings)
    stream = np.concatenate(encode(tokenizer, texts))
    bytes_per_token = read.description["bytes"] / len(stream)
    held_out = HeldOut(config, s, tokenizer)
    log.info("%.2f M tokens, %.2f bytes each; %d held-out rows", len(stream) / 1e6, bytes_per_token, len(held_out.rows))

    trainer = Trainer(recipe, stream)
    trainer.begin(seconds=seconds, steps=steps or SMOKE_STEPS * smoke, until=deadline, evaluate=held_out.sampled_bits_per_byte)
    with progress_bar(progress=progress, total=trainer.progress.steps, unit="step") as bar:
        trainer.train(math.inf if steps else deadline, held_out.sampled_bits_per_byte, bar)
    done = trainer.progress
    if not done.completed:
        log.warning("out of time after %d of %d steps: the learning rate has not reached 0", done.step, done.steps)
    by_name = held_out.bits_per_byte_by_name(trainer.params)
    bits = {str(s.context): by_name["all"]["bits_per_byte"]}
    report = dataclasses.replace(trainer.report(directory), held_out_bits_per_byte=bits)
    with writing(f"--output {directory}"):
        size = save_model(trainer.params, recipe.model, directory, max_bytes=MAX_FILE_BYTES)
        if len(done.held_out) > 1:  # else time was over before the first evaluation
            draw_loss_curve(directory / "loss_curve.png", done, s.batch * s.context, bytes_per_token)
        record = dataclasses.asdict(report) | {
            "settings": dataclasses.asdict(s),
            "command": {"seconds": seconds, "total_seconds": total_seconds, "steps": steps, "smoke": smoke},
            "versions": report.versions | {"optax": optax.__version__},
            "model_bytes": size,
            "corpus": read.description | {"tokens": len(stream), "bytes_per_token": round(bytes_per_token, 4)},
            "held_out_bits_per_byte": by_name,
            "train_nats_per_token": [round(nats, 5) for nats in done.train_nats],
        }
        write_json(directory / "training.json", record)
    return report


def draw_loss_curve(path: Path, progress: TrainingProgress, tokens_per_step: int, bytes_per_token: float) -> None:
    """Draws bits per byte against tokens seen, for training text (running mean) and for held-out files."""
    train = np.asarray(progress.train_nats) / math.log(2) / bytes_per_token
    width = max(1, len(train) // 100)
    smooth = np.convolve(train, np.ones(width) / width, "valid")
    at = (np.arange(len(smooth)) + (width + 1) / 2) * tokens_per_step / 1e6
    held_tokens, held_bits = np.array(progress.held_out[1:]).T
    figure, (axes,) = plots.panels((8, 4.5))
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
    plots.save(figure, path)
