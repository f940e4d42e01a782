"""`qspec bench pretrain`: trains a Llama large enough for memory to bind (419 M parameters, MHA) on the demo's corpus, on one GPU or more.

It trains in segments: each trains until its time is over and saves parameters, optimizer state and step in one file, from which the next
goes on as if nothing had come between. Most steps are at a short context; the last ones are as long as any text that `qspec bench
end-to-end` reads. Every GPU adds the same number of rows to each step. Needs the extra `train`.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file
from tokenizers import Tokenizer
from tqdm import tqdm

from qspec_jax import demo
from qspec_jax.errors import InputError, one_line, writing
from qspec_jax.evaluate import needle
from qspec_jax.files import check_writable, read_json, whole_file, write_json
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama
from qspec_jax.reports import Run, this_run
from qspec_jax.training import corpus, embedded_model
from qspec_jax.training.pretraining import (
    HeldOut,
    Params,
    Settings,
    batches,
    initial_params,
    learning_rate_scale,
    make_optimizer,
    make_step,
    over,
    save_model,
)
from qspec_jax.training.tokenizer import encode, save_tokenizer

TOKENIZER = demo.MODEL / "tokenizer.json"
SAVE_SECONDS = 30  # set aside at the end of a segment to save a state of 3.3 GB


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is trained, and how. model: its config.json. short: settings of the first steps; long: those of the last `long_share` of the
    steps. The optimizer and the schedule of the learning rate are those of `short`. needles: the share of the tokens that are needle
    prompts with their answers."""

    model: dict[str, Any]
    short: Settings
    long: Settings
    long_share: float
    needles: float = 0.0

    def across(self, devices: int) -> "Recipe":
        """The recipe for several devices, each of which takes as many rows as one does here."""
        many = lambda s: dataclasses.replace(s, batch=devices * s.batch)
        return dataclasses.replace(self, short=many(self.short), long=many(self.long))


# Learning rate times square root of width is as in the embedded model, so that a step of Muon changes spectral norms by as much.
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


@dataclasses.dataclass
class Progress:
    """How far training has come. train_nats: mean nats per token of every step. held_out: tokens seen and bits per byte at every
    evaluation. seconds: taken by steps, without compilation."""

    steps: int
    step: int = 0
    seconds: float = 0.0
    train_nats: list[float] = dataclasses.field(default_factory=list)
    held_out: list[list[float]] = dataclasses.field(default_factory=list)

    @property
    def completed(self) -> bool:
        return self.step == self.steps


@dataclasses.dataclass(frozen=True)
class SegmentReport(Run):
    """Where training stands after a segment. tokens_per_second: in training steps alone. nats_per_token: mean of the last 20 steps, on
    training text. held_out_bits_per_byte: by the context that the text is cut into; empty until training is completed."""

    directory: str
    devices: int
    parameters: int
    completed: bool
    step: int
    steps: int
    tokens_seen: int
    train_seconds: float
    tokens_per_second: float
    nats_per_token: float
    held_out_while_training: list[list[float]]
    held_out_bits_per_byte: dict[str, float]


def run(
    directory: Path,
    *,
    minutes: float,
    segment_minutes: float,
    steps: int = 0,
    needles: float = 0.0,
    smoke: bool = False,
    progress: bool | None = None,
) -> SegmentReport:
    """Trains for one segment, which begins a run in this directory or goes on with it; the last one leaves a checkpoint there.

    minutes: time of all training steps; the first segment times some and settles how many there will be. steps: exactly so many instead.
    segment_minutes: time of this call, with all that it does before training. needles: the share of the tokens, from 0 to below 1, that
    are prompts of `qspec eval needle` with their answers, of other seeds than its own. progress: a bar on standard error; None where that
    is a terminal. Raises InputError where JAX finds no GPU, and for a directory that cannot be written or holds another run.
    """
    until = time.monotonic() + 60 * segment_minutes - SAVE_SECONDS
    recipe = dataclasses.replace((SMOKE if smoke else RECIPE).across(jax.device_count()), needles=needles)
    if not smoke and jax.default_backend() != "gpu":
        raise InputError("training this model needs a GPU, and JAX finds none; --smoke runs anywhere")
    state = directory / "state.safetensors"
    if not state.exists() and (directory / "config.json").exists():
        raise InputError(f"--output {directory}: holds a model that is none of these runs; give another directory")
    with _written(directory):
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
        with tqdm(total=trainer.progress.steps, unit="step", leave=False, disable=None if progress is None else not progress) as bar:
            trainer.train(until, held_out.sampled_bits_per_byte, bar)
        with _written(directory):
            trainer.save(state)
    report = trainer.report(directory)
    if report.completed:
        report = dataclasses.replace(report, held_out_bits_per_byte=_bits_per_byte(trainer, held_out, tokenizer))
        history = {"train_nats_per_token": trainer.progress.train_nats, "corpus": description}
        with _written(directory):
            save_model(trainer.params, recipe.model, directory)
            save_tokenizer(tokenizer, directory, max_length=recipe.model["max_position_embeddings"])
            write_json(directory / "training.json", {"recipe": dataclasses.asdict(recipe)} | dataclasses.asdict(report) | history)
    return report


class Trainer:
    """A training run in the device's memory: parameters, optimizer state and progress. `begin` it or `load` it, then `train`."""

    params: Params
    progress: Progress

    def __init__(self, recipe: Recipe, stream: np.ndarray, devices: Sequence[jax.Device] | None = None):
        self.recipe = recipe
        self.config = LlamaConfig.from_hf(recipe.model)
        self.optimizer = make_optimizer(recipe.short)
        self.devices = devices or jax.devices()[:1]
        self.stream = jax.device_put(stream, over(self.devices)[0])
        self.compiled: dict[Settings, Callable] = {}

    def begin(self, *, seconds: float, steps: int = 0) -> None:
        """Starts from initial parameters. seconds: time of all training steps, which are timed to settle their number. steps: exactly so
        many instead."""
        self.params = initial_params(self.config, self.recipe.short.seed)
        self.state = self.optimizer.init(self.params)
        self.progress = Progress(steps or self._steps_in(seconds))

    def _steps_in(self, seconds: float) -> int:
        """The number of steps, short and long, that take this long."""
        short, long = map(self._seconds_of_a_step, (self.recipe.short, self.recipe.long))
        self.state = self.optimizer.init(self.params)
        share = self.recipe.long_share
        return max(1, int(seconds / ((1 - share) * short + share * long)))

    def _seconds_of_a_step(self, s: Settings) -> float:
        """Times a few steps, which leave the parameters as they are."""
        starts = next(batches(len(self.stream), s))
        for i in range(1 + s.timed_steps):
            if i == 1:
                began = time.monotonic()
            self._step(s, starts, 0.0)
        return (time.monotonic() - began) / s.timed_steps

    def train(self, until: float, evaluate: Callable[[Params], float], bar: tqdm) -> None:
        """Takes steps to the last, or until a time (of time.monotonic()), but at least one. evaluate(params) gives bits per byte."""
        p, current = self.progress, None
        every = max(1, p.steps // self.recipe.short.evaluations)
        bar.update(p.step)
        while not p.completed:
            s, taken = self._phase()
            if s is not current:
                current, starts = s, itertools.islice(batches(len(self.stream), s), taken, None)
                self._compile(s)
            scale = learning_rate_scale(self.recipe.short, p.step, p.steps)
            began = time.monotonic()
            nats = self._step(s, next(starts), scale)
            if not math.isfinite(nats):
                raise InputError(f"step {p.step}: the loss is {nats}, so this segment is lost; what the one before saved is still there")
            p.step, p.seconds = p.step + 1, p.seconds + time.monotonic() - began
            p.train_nats.append(nats)
            bar.update()
            bar.set_postfix(nats=f"{nats:.3f}", context=s.context, refresh=False)
            if p.completed or p.step % every == 0:
                p.held_out.append([self.tokens_seen, evaluate(self.params)])
            if time.monotonic() > until:
                return

    def _phase(self) -> tuple[Settings, int]:
        """The settings of the next step, and how many steps were taken with them."""
        p, recipe = self.progress, self.recipe
        first_long = p.steps - round(recipe.long_share * p.steps)
        return (recipe.short, p.step) if p.step < first_long else (recipe.long, p.step - first_long)

    @property
    def tokens_seen(self) -> int:
        s, taken = self._phase()
        before = self.progress.step - taken
        return before * self.recipe.short.batch * self.recipe.short.context + taken * s.batch * s.context

    def _step(self, s: Settings, starts: np.ndarray, scale: float) -> float:
        """Takes a step at `scale` times the learning rate; returns the mean nats per token before it."""
        step = self._compile(s)
        self.params, self.state, nats = step(self.params, self.state, self.stream, starts, np.float32(scale))
        return float(nats)

    def _compile(self, s: Settings) -> Callable:
        if s not in self.compiled:
            args = (self.params, self.state, self.stream, np.zeros(s.batch, np.int32), np.float32(0))
            self.compiled[s] = make_step(self.config, s, self.optimizer, self.devices).lower(*args).compile()
        return self.compiled[s]

    def save(self, path: Path) -> None:
        """Writes everything that `load` needs; a reader finds the old file or the new one, whole."""
        metadata = {"recipe": _recipe_json(self.recipe), "progress": json.dumps(dataclasses.asdict(self.progress))}
        with whole_file(path) as draft:
            save_file(_named((self.params, self.state)), draft, metadata=metadata)

    def load(self, path: Path) -> None:
        """Raises InputError for a file that `save` did not write, or wrote for another recipe."""
        make = lambda name, shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        params = Llama(self.config, make).weights()
        wanted = params, jax.eval_shape(self.optimizer.init, params)
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                if metadata.get("recipe") != _recipe_json(self.recipe):
                    raise InputError(f"{path}: is of a run with other settings, or on another number of GPUs; give another --output")
                tensors = [jnp.asarray(file.get_tensor(name)) for name in _named(wanted)]
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: not a whole safetensors file ({one_line(error)})") from None
        self.params, self.state = jax.tree.unflatten(jax.tree.structure(wanted), tensors)
        self.progress = Progress(**json.loads(metadata["progress"]))

    def report(self, directory: Path) -> SegmentReport:
        """Figures so far, without those of a completed run."""
        p = self.progress
        return SegmentReport(
            **this_run(),
            directory=str(directory),
            devices=len(self.devices),
            parameters=sum(array.size for array in self.params.values()),
            completed=p.completed,
            step=p.step,
            steps=p.steps,
            tokens_seen=self.tokens_seen,
            train_seconds=p.seconds,
            tokens_per_second=self.tokens_seen / p.seconds,
            nats_per_token=float(np.mean(p.train_nats[-20:])),
            held_out_while_training=p.held_out,
            held_out_bits_per_byte={},
        )


def table(report: SegmentReport) -> Table:
    """A table of a segment's figures, one to a line."""
    grid = Table(box=None, show_header=False, padding=(0, 3, 0, 0))
    state = "completed" if report.completed else "not completed: run it again to go on"
    grid.add_row("model", f"{report.directory}: {report.parameters / 1e6:,.1f} M parameters, {state}")
    grid.add_row("steps", f"{report.step:,} of {report.steps:,}, {report.tokens_seen / 1e6:,.1f} M tokens")
    grid.add_row(
        "training", f"{report.train_seconds:,.0f} s, {report.tokens_per_second:,.0f} tokens/s on {report.devices} x {report.device}"
    )
    grid.add_row("training text", f"{report.nats_per_token:.4f} nats per token (last 20 steps)")
    for tokens, bits in report.held_out_while_training:
        grid.add_row(f"after {tokens / 1e6:,.1f} M tokens", f"{bits:.4f} bits per byte of held-out text")
    for context, bits in report.held_out_bits_per_byte.items():
        grid.add_row("held-out text", f"{bits:.4f} bits per byte at a context of {int(context):,}")
    return grid


def _read_tokens(directory: Path, tokenizer: Tokenizer, *, smoke: bool) -> tuple[np.ndarray, dict[str, Any]]:
    """The corpus as one stream of tokens, and its description.

    It is read once and kept beside the run, whose segments must not differ in it.
    """
    name = "smoke" if smoke else "corpus"
    path, about = directory / f"{name}.npy", directory / f"{name}.json"
    if not path.exists():
        read = corpus.read_corpus((), most_bytes=2_000_000) if smoke else corpus.read_corpus()
        tokens = np.concatenate(encode(tokenizer, [document.text for document in read.documents]))
        with _written(directory), whole_file(path) as draft:
            write_json(about, read.description)
            np.save(draft, tokens)
    try:
        return np.load(path), read_json(about)
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: not a whole file of tokens ({error}); delete it") from None


def with_needles(stream: np.ndarray, tokenizer: Tokenizer, share: float) -> np.ndarray:
    """The stream of tokens and behind it needle prompts with their answers, of all formats in turn, until they are this share of the whole.

    They stand together, and windows of the stream come in random order; so few documents are cut by a window's end.
    """
    parts, missing, seeds = [stream], round(share / (1 - share) * len(stream)), itertools.count()
    while missing > 0:
        texts = [needle.training_text(style, next(seeds)) for _ in range(100) for style in needle.FORMATS]
        for tokens in encode(tokenizer, texts):
            if missing > 0:
                parts.append(tokens)
                missing -= len(tokens)
    return np.concatenate(parts)


def _written(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Raises InputError where what is written inside cannot be."""
    return writing(f"--output {directory}", SafetensorError)


def _bits_per_byte(trainer: Trainer, held_out: HeldOut, tokenizer: Tokenizer) -> dict[str, float]:
    long = HeldOut(trainer.config, trainer.recipe.long, tokenizer)
    by_context = {trainer.recipe.short.context: held_out, trainer.recipe.long.context: long}
    return {str(n): rows.sampled_bits_per_byte(trainer.params) for n, rows in by_context.items()}


def _named(tree) -> dict[str, Any]:
    """The leaves of a tree, in order, by their paths."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _recipe_json(recipe: Recipe) -> str:
    values = dataclasses.asdict(recipe)
    if not recipe.needles:
        del values["needles"]  # as runs were saved before there were any
    return json.dumps(values)
