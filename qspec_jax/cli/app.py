"""The commands: `qspec demo`, `chat`, `generate`, `prefill`, `score`, `doctor`, `convert`, `verify`, `export`, `info`, `plan`, `batch`,
`eval ...`, `bench ...`, `train ...`.

With --json, standard output is one JSON object. `qspec_jax.cli.main` runs them.
"""

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
