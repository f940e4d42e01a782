"""What the commands share: options, where results go, how a checkpoint is read."""

import contextlib
import dataclasses
import enum
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console, RenderableType

from qspec_jax import checkpoint
from qspec_jax.errors import InputError

# Of tables in files and pipes.
TABLE_WIDTH = 150


class Method(enum.StrEnum):
    quantspec = "quantspec"
    autoregressive = "autoregressive"


class CacheKind(enum.StrEnum):
    full = "full"
    int8 = "int8"


class Dtype(enum.StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


Gamma = Annotated[int, typer.Option("--gamma", "--num-speculative-tokens", help="Most drafts of a round.")]
GammaList = Annotated[
    str, typer.Option("--gamma", "--num-speculative-tokens", help="Most drafts of a round; several with commas between them: 1,2,4,6.")
]
MethodOption = Annotated[Method, typer.Option("--method", help="Draft and verify, or one token at a time.")]
MaxNewTokens = Annotated[int, typer.Option(help="Most new tokens of each prompt.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="0 is off.")]
TopP = Annotated[float, typer.Option(help="1 is off.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the random draws.")]
ModelDirectory = Annotated[
    Path, typer.Option("--model", help="Checkpoint directory, in Hugging Face format or converted; or ORG/NAME on the Hub.")
]
DtypeOption = Annotated[Dtype | None, typer.Option("--dtype", help="As stored, if not given. float64 is for exactness checks on a CPU.")]
GroupSize = Annotated[int | None, typer.Option("--group-size", help="Tokens of a key group: 128, or head_dim when smaller, if not given.")]
Calibrate = Annotated[
    bool,
    typer.Option(help="Round the draft's INT4 weights for the prompts' activations (GPTQ): a higher acceptance for some seconds more."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the results to this file (.png, .pdf or .svg).")]


def load(directory: Path, dtype: str | None, *, quiet: bool):
    """The model of a checkpoint directory, and its tokenizer. quiet: without a progress bar."""
    if dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    network = checkpoint.load_model(directory, dtype=dtype and str(dtype), progress=False if quiet else None)
    return network, checkpoint.load_tokenizer(directory)


def number_list(option: str, text: str, kind: type[int] | type[float]) -> list:
    """The numbers of an option, between commas. Raises InputError for what is no number of that kind, and for one that stands twice."""
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{option} {text!r} should be {what} with commas between them") from None
    if repeated := [number for i, number in enumerate(numbers) if number in numbers[:i]]:
        raise InputError(f"{option} {text}: {repeated[0]:g} stands there twice")
    return numbers


def read_text(path: Path) -> str:
    """Raises InputError for what is no text file in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file in UTF-8") from None


@contextlib.contextmanager
def output_to(path: Path | None) -> Iterator[Callable[[str], object]]:
    """Where the result goes: standard output, or a file that appears whole or not at all. Fails before the work begins."""
    if path is None:
        yield sys.stdout.write
        return
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("w", encoding="utf-8") as device:  # a pipe or a device cannot be replaced
                yield device.write
            return
        path = path.resolve()
        # In place of an old file with its permissions, or with those of any new one.
        if path.exists():
            path.open("a").close()
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            draft = Path(folder) / path.name
            with draft.open("w", encoding="utf-8") as file:
                yield file.write
            if path.exists():
                draft.chmod(path.stat().st_mode & 0o777)
            draft.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


def show(report, table: Callable[[object], RenderableType], output: Path | None, write: Callable[[str], object], *, as_json: bool) -> None:
    """Writes a report, a dataclass, as a line of JSON or as its table; that in colours to a terminal."""
    if as_json:
        write(json.dumps(dataclasses.asdict(report)) + "\n")
    elif output is None and sys.stdout.isatty():
        # A narrow terminal wraps lines; the table would drop what is in its columns.
        Console(width=max(Console().width, TABLE_WIDTH)).print(table(report))
    else:
        text = io.StringIO()
        Console(file=text, width=TABLE_WIDTH).print(table(report))
        write("".join(line.rstrip() + "\n" for line in text.getvalue().splitlines()))
