"""How the commands of `eval` and `bench` measure: they say what they do, keep finished rows, and show the report."""

import contextlib
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from qspec_jax import reports
from qspec_jax.checkpoints.gguf_file import is_gguf
from qspec_jax.cli import process
from qspec_jax.decoding.run_identity import of_checkpoint
from qspec_jax.errors import InputError
from qspec_jax.files import is_replaced
from qspec_jax.kept_rows import KeptRows
from qspec_jax.progress import shown

NOT_OF_ROWS = {"output", "plot", "as_json", "compile_cache", "no_compile_cache"}  # parameters that no row depends on


def measure_and_show(
    command: typer.Context, measure: Callable[[KeptRows], reports.Report], output: Path | None, *, as_json: bool, plot: Path | None = None
) -> None:
    """Measures, keeping finished rows beside the output, and prints the report; see `reports.show`.

    Args:
        command: the context of the command.
        measure: makes the report, of rows that are kept.
        output: as in `reports.show`.
        as_json: as in `reports.show`; then nothing is said meanwhile.
        plot: as in `reports.show`.
    """
    options = _options(command) if output is not None and is_replaced(output) else {}
    with KeptRows.beside(output, command.command_path, options) as kept:

        def report() -> reports.Report:
            with shown(False if as_json else None):
                return dataclasses.replace(measure(kept), earlier=kept.earlier)

        def interrupted() -> None:
            if kept.goes_on:
                print(f"qspec: interrupted{kept.goes_on}", file=sys.stderr)

        with process.WhenInterrupted(interrupted):
            reports.show(report, output, as_json=as_json, plot=plot)


def _options(command: typer.Context) -> dict[str, Any]:
    """The options of a command by their names, and the contents of files and checkpoints that they name."""
    names = {parameter.name: parameter.opts[0] for parameter in command.command.params}
    found = {names[name]: value for name, value in command.params.items() if name not in NOT_OF_ROWS}
    contents = {f"content of {name}": content for name, value in found.items() if (content := _content(value))}
    return json.loads(json.dumps(found | contents, default=str))


def _content(value: Any) -> list[str]:
    """Hashes of the files and checkpoints among an option's values."""
    found = []
    for each in value if isinstance(value, list | tuple) else [value]:
        path = Path(each) if isinstance(each, str | Path) else None
        with contextlib.suppress(InputError, OSError, ValueError):  # what cannot be read is refused where it is read
            if path and (path.is_dir() or is_gguf(path)):
                found.append(b"\0".join(of_checkpoint(path)))
            elif path and path.is_file():
                found.append(path.read_bytes())
    return [hashlib.sha256(content).hexdigest() for content in found]
