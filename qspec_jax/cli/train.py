"""The commands of `qspec train`, which need the extra `train`."""

import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from qspec_jax import reports
from qspec_jax.cli import process
from qspec_jax.cli.options import DtypeOption, Json, ModelDirectory, Seed, load
from qspec_jax.errors import InputError
from qspec_jax.files import read_texts

trainings = typer.Typer(no_args_is_help=True, help="Train the embedded model, the benchmark model, and draft heads.")

WINDOW = 512  # of a head
Steps = Annotated[int, typer.Option(min=0, help="The exact number of steps, whatever time they take; 0 goes by the time.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="A tiny model on a tiny corpus, to see that everything works.")]


@trainings.command("embedded")
def train_embedded(
    output: Annotated[Path, typer.Option(help="Directory of the checkpoint.")],
    seconds: Annotated[float, typer.Option(min=0, help="Seconds of training, without compilation.")] = 390,
    total_seconds: Annotated[float, typer.Option(min=0, help="Seconds of the whole run, which shorten training.")] = 515,
    steps: Steps = 0,
    smoke: Smoke = False,
    as_json: Json = False,
):
    """Train the embedded model and its tokenizer. It has 8 M parameters and reads Python source for minutes on one H100."""
    recipe, settings = _recipe("embedded_model"), dict(seconds=seconds, total_seconds=total_seconds, steps=steps, smoke=smoke)
    reports.show(lambda: recipe.run(output, **settings, progress=False if as_json else None), None, as_json=as_json)


@trainings.command("benchmark-model")
def train_benchmark_model(
    output: Annotated[Path, typer.Option(help="Directory of the run, which in the end is a checkpoint; it takes 8 GB.")],
    minutes: Annotated[float, typer.Option(min=0, max=10_000, help="Time of all training steps; compiling and saving come on top.")] = 10,
    segment_minutes: Annotated[
        float, typer.Option(min=0, max=10_000, help="Time of this call until the state is saved; call again until it is completed.")
    ] = 7.5,
    steps: Steps = 0,
    needles: Annotated[
        float,
        typer.Option(min=0, max=0.9, help="Share of the tokens that are prompts of `eval needle` with their answers, of other seeds."),
    ] = 0,
    smoke: Smoke = False,
    as_json: Json = False,
):
    """Train a model of 419 M parameters on the demo's corpus. It runs in segments, for `bench end-to-end`, on one or more GPUs of 80 GB."""
    recipe = _recipe("benchmark_model")
    settings = dict(minutes=minutes, segment_minutes=segment_minutes, steps=steps, needles=needles, smoke=smoke)
    reports.show(lambda: recipe.run(output, **settings, progress=False if as_json else None), None, as_json=as_json)


@trainings.command("head")
def train_head(
    model: ModelDirectory,
    output: Annotated[Path, typer.Option(help="Directory of the run, which in the end is the head's checkpoint.")],
    file: Annotated[
        list[Path] | None, typer.Option(help="A text to train on (repeatable): the demo's corpus of Python source, if not given.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole run.")] = 2000,
    batch: Annotated[int, typer.Option(min=1, help="Rows of text in a step.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 2048,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="How many recent tokens the head reads, also when it drafts: 512, or --length if less, if not given."),
    ] = None,
    unroll: Annotated[int, typer.Option(min=1, max=16, help="How many drafts, one after the other, are trained from each token.")] = 3,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="Of the matrices: 0.08 over the root of the model's hidden size, if not given.")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="I,J,...",
            help="The layers of the model whose inputs the head reads: 2, n / 2 and n - 3 of n layers, if not given.",
        ),
    ] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(min=1, help="How many tokens the head predicts, those frequent in the texts: all, if not given.")
    ] = None,
    seed: Seed = 0,
    segment_minutes: Annotated[
        float, typer.Option(min=0, max=10_000, help="Time of this call until the state is saved; 0 goes on until the run is completed.")
    ] = 0,
    dtype: DtypeOption = None,
    as_json: Json = False,
):
    """Train an EAGLE-3 head, which drafts for a model. The same command goes on with a run that was interrupted."""
    recipe = _recipe("head")
    taps = None if layers is None else _numbers("--layers", layers)
    texts = read_texts("--file", file or [])
    recipe.check_directory(output)
    target, tokenizer = load(model, dtype, quiet=as_json)
    window = min(WINDOW, length) if window is None else window
    settings = dict(steps=steps, batch=batch, length=length, window=window, unroll=unroll, learning_rate=learning_rate, layers=taps)
    settings |= dict(draft_vocab=draft_vocab, seed=seed, segment_minutes=segment_minutes, progress=False if as_json else None)

    def interrupted() -> None:
        state = output / recipe.STATE
        goes_on = f"; the same command goes on from {state}" if state.exists() else ", before anything was saved"
        print(f"qspec: interrupted{goes_on}", file=sys.stderr)

    with process.WhenInterrupted(interrupted):
        reports.show(lambda: recipe.run(output, target, tokenizer, texts, **settings), None, as_json=as_json)


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text} should be whole numbers with commas between them") from None


def _recipe(name: str):
    """The module of a recipe. Raises InputError if a package that training needs is not installed."""
    try:
        return importlib.import_module(f"qspec_jax.training.{name}")
    except ModuleNotFoundError as error:
        raise InputError(f"training needs {error.name}: pip install optax tokenizers") from None
