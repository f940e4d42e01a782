"""`qspec train benchmark-model`: a Llama so large that decoding is bound by memory bandwidth, trained on the demo's corpus.

It has 419 M parameters, and MHA. It trains in segments: each trains until its time is over and saves parameters, optimizer state and step
in one file, from which the next continues exactly. Its last steps train at the longest context that `qspec bench end-to-end` reads. A share
of its text may be prompts in the form that `qspec eval needle` asks in; evaluate/needle.py makes both. Needs the extra `train`.
"""

import contextlib
import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from tokenizers import Tokenizer

from qspec_jax import demo
from qspec_jax.errors import InputError, writing
from qspec_jax.evaluate import needle
from qspec_jax.files import check_writable, read_json, whole_file, write_json
from qspec_jax.models.config import LlamaConfig
from qspec_jax.progress import progress_bar
from qspec_jax.training import embedded_model
from qspec_jax.training.pretraining import HeldOut, Settings, save_model
from qspec_jax.training.tokenizer import encode, save_tokenizer
from qspec_jax.training.trainer import Recipe, Trainer, TrainingReport, read_training_text

TOKENIZER = demo.MODEL / "tokenizer.json"
SAVE_SECONDS = 30  # set aside at the end of a segment to save a state of 3.3 GB

# Learning rate times square root of width is about as in the embedded model, so that a step of Muon changes spectral norms by as much.
_SHORT = Settings(context=8192, batch=8, muon_learning_rate=2e-3, adam_learning_rate=1e-3, evaluations=8, held_out_rows=64, timed_steps=6)
RECIPE = Recipe(
    embedded_model.MODEL
    | {
        "hidden_size": 2048,
        "intermediate_size": 5632,  # an even number of groups, which INT4 matmuls of many rows want on Hopper
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "max_position_embeddings": 66_560,  # 64k and 1,024 new tokens
    },
    _SHORT,
    dataclasses.replace(_SHORT, context=66_560, batch=1),
    long_share=0.15,
)
_SMOKE = Settings(context=128, batch=4, evaluations=2, held_out_rows=4, timed_steps=2)
SMOKE = Recipe(
    embedded_model.MODEL
    | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1},
    _SMOKE,
    dataclasses.replace(_SMOKE, context=512, batch=1),
    long_share=0.4,
)


def run(
    directory: Path,
    *,
    minutes: float,
    segment_minutes: float,
    steps: int = 0,
    needles: float = 0.0,
    smoke: bool = False,
    progress: bool | None = None,
) -> TrainingReport:
    """Trains for one segment, which begins a run or continues it; the last one leaves a checkpoint.

    Args:
        directory: of the run.
        minutes: time of all training steps; the first segment times some and settles how many there will be.
        segment_minutes: time of this call until training stops and the state is saved; its last step or evaluation may overrun, and the
            final evaluation comes on top.
        steps: the exact number of steps, which overrides `minutes`; 0: derived from it.
        needles: the share of the tokens, from 0 to below 1, that are prompts of `qspec eval needle` with their answers, with seeds that
            the evaluation never uses.
        smoke: whether a tiny model is trained on a tiny corpus.
        progress: see `progress_bar`.

    Raises:
        InputError: if JAX finds no GPU, and for a directory that cannot be written or holds another run.
    """
    until = time.monotonic() + 60 * segment_minutes - SAVE_SECONDS
    recipe = dataclasses.replace((SMOKE if smoke else RECIPE).across(jax.device_count()), needles=needles)
    if not smoke and jax.default_backend() != "gpu":
        raise InputError("training this model needs a GPU, and JAX finds none; --smoke runs anywhere")
    state = directory / "state.safetensors"
    if not state.exists() and (directory / "config.json").exists():
        raise InputError(
            f"--output {directory}: holds a checkpoint, but no state.safetensors of a run of this command; give another directory"
        )
    with _write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        check_writable(state)  # before the minutes of training, and not after
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    stream, description = _read_tokens(directory, tokenizer, smoke=smoke)
    stream = with_needles(stream, tokenizer, needles)
    held_out = HeldOut(LlamaConfig.from_hf(recipe.model), recipe.short, tokenizer)
    trainer = Trainer(recipe, stream, jax.devices())
    if state.exists():
        trainer.load(state)
        if steps and steps != trainer.progress.steps:
            raise InputError(f"--steps {steps}: {directory} holds a run of {trainer.progress.steps} steps; give another --output")
    else:
        trainer.begin(seconds=60 * minutes, steps=steps)
    if not trainer.progress.completed:
        with progress_bar(progress=progress, total=trainer.progress.steps, unit="step") as bar:
            trainer.train(until, held_out.sampled_bits_per_byte, bar)
        with _write_errors(directory):
            trainer.save(state)
    report = trainer.report(directory)
    if report.completed:
        report = dataclasses.replace(report, held_out_bits_per_byte=_bits_per_byte(trainer, held_out, tokenizer))
        history = {"train_nats_per_token": trainer.progress.train_nats, "corpus": description}
        with _write_errors(directory):
            save_model(trainer.params, recipe.model, directory)
            save_tokenizer(tokenizer, directory, max_length=recipe.model["max_position_embeddings"])
            write_json(directory / "training.json", {"recipe": dataclasses.asdict(recipe)} | dataclasses.asdict(report) | history)
    return report


def _read_tokens(directory: Path, tokenizer: Tokenizer, *, smoke: bool) -> tuple[np.ndarray, dict[str, Any]]:
    """The corpus as one stream of tokens, and its description.

    It is read once and kept beside the run, whose segments must not differ in it.
    """
    name = "smoke" if smoke else "corpus"
    path, about = directory / f"{name}.npy", directory / f"{name}.json"
    if not path.exists():
        read = read_training_text(smoke=smoke)
        tokens = np.concatenate(encode(tokenizer, [document.text for document in read.documents]))
        with _write_errors(directory), whole_file(path) as unfinished:
            write_json(about, read.description)
            np.save(unfinished, tokens)
    try:
        return np.load(path), read_json(about)
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: not a whole file of tokens ({error}); delete it") from None


def with_needles(stream: np.ndarray, tokenizer: Tokenizer, share: float) -> np.ndarray:
    """The stream of tokens, followed by needle prompts with their answers, of all formats in turn, that are this share of the whole.

    They can all be at the end, since windows of the stream are shuffled anyway; interleaved, they would cut more documents.
    """
    parts, missing, seeds = [stream], round(share / (1 - share) * len(stream)), itertools.count()
    while missing > 0:
        texts = [needle.training_text(style, next(seeds)) for _ in range(100) for style in needle.FORMATS]
        for tokens in encode(tokenizer, texts):
            if missing > 0:
                parts.append(tokens)
                missing -= len(tokens)
    return np.concatenate(parts)


def _write_errors(directory: Path) -> contextlib.AbstractContextManager[None]:
    """A context in which a write that fails raises InputError."""
    return writing(f"--output {directory}", SafetensorError)


def _bits_per_byte(trainer: Trainer, held_out: HeldOut, tokenizer: Tokenizer) -> dict[str, float]:
    long = HeldOut(trainer.config, trainer.recipe.long, tokenizer)
    by_context = {trainer.recipe.short.context: held_out, trainer.recipe.long.context: long}
    return {str(n): rows.sampled_bits_per_byte(trainer.params) for n, rows in by_context.items()}
