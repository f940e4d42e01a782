"""The commands of `qspec train`, which need the extra `train`."""

import importlib
from pathlib import Path
from typing import Annotated

import typer

from qspec_jax import reports
from qspec_jax.cli.options import Json
from qspec_jax.errors import InputError

trainings = typer.Typer(no_args_is_help=True, help="Train the embedded model and the benchmark model.")

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


def _recipe(name: str):
    """The module of a recipe. Raises InputError if a package that training needs is not installed."""
    try:
        return importlib.import_module(f"qspec_jax.training.{name}")
    except ModuleNotFoundError as error:
        raise InputError(f"training needs {error.name}: pip install optax tokenizers") from None
