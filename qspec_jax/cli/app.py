"""The commands: `qspec demo`, `chat`, `generate`, `prefill`, `score`, `doctor`, `convert`, `verify`, `export`, `info`, `plan`, `batch`,
`eval ...`, `bench ...`, `train ...`.

With --json, standard output is one JSON object. `qspec_jax.cli.main` runs them.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from qspec_jax.cli import process
from qspec_jax.cli.batch import batch
from qspec_jax.cli.bench import benchmarks
from qspec_jax.cli.chat import chat
from qspec_jax.cli.convert import conversions
from qspec_jax.cli.demo import demo
from qspec_jax.cli.doctor import doctor
from qspec_jax.cli.evaluate import evaluations
from qspec_jax.cli.generate import generate_command
from qspec_jax.cli.info import info
from qspec_jax.cli.plan import plan
from qspec_jax.cli.prefill import prefill_command
from qspec_jax.cli.score import score_command
from qspec_jax.cli.train import trainings
from qspec_jax.compile_cache import keep_compiled
from qspec_jax.errors import InputError

NoCompileCache = Annotated[bool, typer.Option("--no-compile-cache", help="Compile everything again, and keep none of it on disk.")]
CompileCache = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The folder of compiled programs, which later runs read: $QSPEC_COMPILE_CACHE, or ~/.cache/qspec-jax/programs, if not given.",
    ),
]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(evaluations, name="eval")
app.add_typer(benchmarks, name="bench")
app.add_typer(trainings, name="train")
app.add_typer(conversions)
COMMANDS = {
    "demo": demo,
    "chat": chat,
    "generate": generate_command,
    "prefill": prefill_command,
    "score": score_command,
    "batch": batch,
    "doctor": doctor,
    "info": info,
    "plan": plan,
}
for name, command in COMMANDS.items():
    app.command(name)(command)


def _print_version(asked: bool) -> None:
    if asked:
        print(process.version())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
):
    """Lossless speculative decoding for long contexts: a Llama-family model drafts for itself.

    To begin with: `qspec demo` shows what it does, with a model that is here.

    `qspec doctor --model DIR` checks that your checkpoint fits this machine, and says which kernels will run.

    `qspec chat --model DIR` talks with a model.

    `qspec generate --model DIR --prompt TEXT` continues a text; `qspec batch` does that with a file of them.
    """


def with_compile_cache(function: Callable) -> Callable:
    """The function of a command with two more options: it keeps compiled programs on disk."""

    def command(*args, no_compile_cache: NoCompileCache = False, compile_cache: CompileCache = None, **options):
        if no_compile_cache and compile_cache:
            raise InputError("--no-compile-cache and --compile-cache exclude each other; give one of them")
        if not no_compile_cache:
            keep_compiled(compile_cache)
        return function(*args, **options)

    # Typer reads a command's options from its signature and annotations.
    more = [each for each in inspect.signature(command).parameters.values() if each.kind is inspect.Parameter.KEYWORD_ONLY]
    signature, annotations = inspect.signature(function), command.__annotations__
    functools.update_wrapper(command, function)
    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *more])
    command.__annotations__ = function.__annotations__ | annotations
    return command


def _with_compile_cache(group: typer.Typer) -> None:
    for command in group.registered_commands:
        command.callback = with_compile_cache(command.callback)
    for inner in group.registered_groups:
        _with_compile_cache(inner.typer_instance)


_with_compile_cache(app)
