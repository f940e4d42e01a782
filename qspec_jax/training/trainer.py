"""A training run in the device's memory: it begins or is loaded, takes steps until a time is over, and is saved or reported.

Most steps are at a short context, the last ones at a long one. Every device adds the same number of rows to each step.
"""

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
from rich.console import RenderableType
from rich.table import Table
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file
from tqdm import tqdm

from qspec_jax.errors import InputError, one_line
from qspec_jax.files import whole_file
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama
from qspec_jax.reports import Run, this_run
from qspec_jax.training import corpus
from qspec_jax.training.pretraining import Params, Settings, batches, initial_params, learning_rate_scale, make_optimizer, make_step, over

SMOKE_BYTES = 2_000_000  # of the standard library, which smoke runs train on
USED_SHARE = 0.98  # of the time that is left when steps have been timed: later steps may take longer


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is trained, and how.

    Attributes:
        model: its config.json.
        short: settings of the first steps; the optimizer and the schedule of the learning rate are theirs throughout.
        long: settings of the last steps.
        long_share: the share of the steps that are long.
        needles: the share of the tokens that are needle prompts with their answers.
    """

    model: dict[str, Any]
    short: Settings
    long: Settings
    long_share: float
    needles: float = 0.0

    def across(self, devices: int) -> "Recipe":
        """The recipe for several devices, each of which takes the rows that one takes here."""
        short, long = (dataclasses.replace(s, batch=devices * s.batch) for s in (self.short, self.long))
        return dataclasses.replace(self, short=short, long=long)


@dataclasses.dataclass
class TrainingProgress:
    """How far training has come.

    Attributes:
        steps: of the whole run.
        step: steps taken.
        seconds: taken by steps, without compilation.
        train_nats: mean nats per token of every step.
        held_out: tokens seen and bits per byte at every evaluation.
    """

    steps: int
    step: int = 0
    seconds: float = 0.0
    train_nats: list[float] = dataclasses.field(default_factory=list)
    held_out: list[list[float]] = dataclasses.field(default_factory=list)

    @property
    def completed(self) -> bool:
        return self.step == self.steps


@dataclasses.dataclass(frozen=True)
class TrainingReport(Run):
    """How far a training run has come.

    Attributes:
        directory: of the run.
        devices: that train.
        parameters: of the model.
        completed: whether all steps are taken.
        step: steps taken.
        steps: of the whole run.
        tokens_seen: in all steps so far.
        train_seconds: of the steps alone.
        tokens_per_second: in training steps alone.
        nats_per_token: mean of the last 20 steps, on training text.
        held_out_while_training: tokens seen and bits per byte at every evaluation.
        held_out_bits_per_byte: by the context that the held-out text is cut into; empty until training is completed.
    """

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

    def table(self) -> RenderableType:
        """The figures, one to a line."""
        grid = Table(box=None, show_header=False, padding=(0, 3, 0, 0))
        state = "completed" if self.completed else "not completed: run it again to go on"
        grid.add_row("model", f"{self.directory}: {self.parameters / 1e6:,.1f} M parameters, {state}")
        grid.add_row("steps", f"{self.step:,} of {self.steps:,}, {self.tokens_seen / 1e6:,.1f} M tokens")
        speed = f"{self.tokens_per_second:,.0f} tokens/s on {self.devices} x {self.device}"
        grid.add_row("training", f"{self.train_seconds:,.0f} s, {speed}")
        grid.add_row("training text", f"{self.nats_per_token:.4f} nats per token (last 20 steps)")
        for tokens, bits in self.held_out_while_training:
            grid.add_row(f"after {tokens / 1e6:,.1f} M tokens", f"{bits:.4f} bits per byte of held-out text")
        for context, bits in self.held_out_bits_per_byte.items():
            grid.add_row("held-out text", f"{bits:.4f} bits per byte at a context of {int(context):,}")
        return grid


class Trainer:
    """A training run in the device's memory: parameters, optimizer state and progress. `begin` it or `load` it, then `train`."""

    params: Params
    progress: TrainingProgress

    def __init__(self, recipe: Recipe, stream: np.ndarray, devices: Sequence[jax.Device] | None = None):
        self.recipe = recipe
        self.config = self._config()
        self.optimizer = make_optimizer(recipe.short)
        self.devices = devices or jax.devices()[:1]
        self.stream = jax.device_put(stream, over(self.devices)[0])
        self.compiled: dict[Settings, Callable] = {}

    def begin(self, *, seconds: float, steps: int = 0, until: float = math.inf, evaluate: Callable[[Params], float] | None = None) -> None:
        """Starts from initial parameters.

        Args:
            seconds: time of all training steps; a few are timed to settle their number.
            steps: the exact number of steps instead; 0: by the time.
            until: when steps and evaluations are to be over at the latest, a time of time.monotonic().
            evaluate: the function that `train` will be given, if the initial parameters are to be evaluated and evaluations to be timed.
        """
        self.params = self._initial()
        self.state = self.optimizer.init(self.params)
        held_out = [[0, evaluate(self.params)]] if evaluate else []
        self.progress = TrainingProgress(steps or self._steps_in(seconds, until, evaluate), held_out=held_out)

    def _steps_in(self, seconds: float, until: float, evaluate: Callable[[Params], float] | None) -> int:
        """The number of steps, short and long, that take this long and are over, with their evaluations, by `until`."""
        short, long = map(self._seconds_of_a_step, (self.recipe.short, self.recipe.long))
        self.state = self.optimizer.init(self.params)
        share = self.recipe.long_share
        step, began = (1 - share) * short + share * long, time.monotonic()
        if evaluate:
            evaluate(self.params)
        now = time.monotonic()
        evaluation, left = now - began, USED_SHARE * (until - now)
        steps = max(1, int(min(seconds, max(0, left)) / step))
        while steps > 1 and steps * step + math.ceil(steps / self._evaluated_every(steps)) * evaluation > left:
            steps -= 1
        return steps

    def _evaluated_every(self, steps: int) -> int:
        """The number of steps from one evaluation to the next; the last step is followed by one too."""
        return max(1, steps // self.recipe.short.evaluations)

    def _seconds_of_a_step(self, s: Settings) -> float:
        """Times a few steps, which leave the parameters as they are."""
        starts = next(batches(len(self.stream), s))
        for i in range(1 + s.timed_steps):
            if i == 1:
                began = time.monotonic()
            self._step(s, starts, 0.0)
        return (time.monotonic() - began) / s.timed_steps

    def train(self, until: float, evaluate: Callable[[Params], float], bar: tqdm, *, evaluated: Callable[[], None] = lambda: None) -> None:
        """Takes steps to the last, but at least one.

        Args:
            until: a time of time.monotonic() after which no other step begins.
            evaluate: evaluate(params) gives bits per byte.
            bar: is updated with each step.
            evaluated: called after each evaluation.
        """
        p, current = self.progress, None
        every = self._evaluated_every(p.steps)
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
                evaluated()
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
            self.compiled[s] = self._made(s, args)
        return self.compiled[s]

    # What is trained: a Llama.

    def _config(self) -> LlamaConfig:
        return LlamaConfig.from_hf(self.recipe.model)

    def _initial(self) -> Params:
        return initial_params(self.config, self.recipe.short.seed)

    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return Llama(self.config, lambda path, shape: jax.ShapeDtypeStruct(shape, jnp.float32)).weights()

    def _made(self, s: Settings, args: tuple) -> Callable:
        return make_step(self.config, s, self.optimizer, self.devices).lower(*args).compile()

    def save(self, path: Path) -> None:
        """Writes everything that `load` needs; a reader finds the old file or the new one, whole."""
        metadata = {"recipe": _recipe_json(self.recipe), "progress": json.dumps(dataclasses.asdict(self.progress))}
        with whole_file(path) as unfinished:
            save_file(_named((self.params, self.state)), unfinished, metadata=metadata)

    def load(self, path: Path) -> None:
        """Raises InputError for a file that `save` did not write, or wrote for another recipe."""
        params = self._shapes()
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
        self.progress = TrainingProgress(**json.loads(metadata["progress"]))

    def report(self, directory: Path) -> TrainingReport:
        """Figures so far, without those of a completed run."""
        figures = self.figures_so_far() | dict(nats_per_token=self.recent_nats, held_out_bits_per_byte={})
        return TrainingReport(**this_run(), directory=str(directory), devices=len(self.devices), **figures)

    def figures_so_far(self) -> dict[str, Any]:
        """The figures that reports of all recipes have, by the names of their fields."""
        p = self.progress
        return dict(
            parameters=sum(array.size for array in self.params.values()),
            completed=p.completed,
            step=p.step,
            steps=p.steps,
            tokens_seen=self.tokens_seen,
            train_seconds=p.seconds,
            tokens_per_second=self.tokens_seen / p.seconds,
            held_out_while_training=p.held_out,
        )

    @property
    def recent_nats(self) -> float:
        """The mean loss of the last 20 steps, on training text."""
        return float(np.mean(self.progress.train_nats[-20:]))


def read_training_text(*, smoke: bool) -> corpus.Corpus:
    """The corpus; for a smoke run a small one."""
    return corpus.read_corpus((), max_bytes=SMOKE_BYTES) if smoke else corpus.read_corpus()


def _named(tree) -> dict[str, Any]:
    """The leaves of a tree, in order, by their paths."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _recipe_json(recipe: Recipe) -> str:
    values = dataclasses.asdict(recipe)
    if not recipe.needles:
        del values["needles"]  # as runs were saved before there were any
    return json.dumps(values)
