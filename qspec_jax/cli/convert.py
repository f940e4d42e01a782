"""The commands `qspec convert`, `verify` and `export`."""

import dataclasses
import enum
from pathlib import Path
from typing import Annotated

import typer

from convert.compare import verify
from convert.to_hf import export
from convert.to_orbax import convert
from qspec_jax.cli.options import Json, WeightsOption
from qspec_jax.files import to_json

conversions = typer.Typer()
SOURCE = "Checkpoint directory in Hugging Face format, GGUF file, or ORG/NAME (or ORG/NAME@REVISION) on the Hub."


class ConvertedDtype(enum.StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


@conversions.command("convert")
def convert_command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help=SOURCE)],
    directory: Annotated[Path, typer.Argument(metavar="DST", help="Directory to make.")],
    dtype: Annotated[ConvertedDtype | None, typer.Option("--dtype", help="Dtype of the weights: as stored, if not given.")] = None,
    draft_bits: Annotated[int, typer.Option("--draft-bits", help="4 stores the draft's INT4 weights too; 16 does not.")] = 16,
    weights: WeightsOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier conversion, in a directory that holds nothing else.")
    ] = False,
    as_json: Json = False,
):
    """Convert a checkpoint, so that it loads faster. It restores straight to devices, its draft with it."""
    settings = dict(dtype=dtype and dtype.value, draft_bits=draft_bits, weights=weights, overwrite=overwrite)
    report = convert(source, directory, progress=False if as_json else None, **settings)
    if as_json:
        print(to_json(dataclasses.asdict(report)))
    else:
        draft = f" and a draft of {report.draft_bits} bits" if report.draft_bits == 4 else ""
        counts = {"in INT4": report.packed, "nested in 8 bits": report.nested}
        packed = "".join(f"{count} {how} and " for how, count in counts.items() if count)
        others = report.tensors - report.packed - report.nested
        print(f"{report.directory}: {packed}{others} tensors in {report.dtype}{draft}, {report.bytes_written / 1e9:.3g} GB")


@conversions.command("verify")
def verify_command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help=SOURCE)],
    directory: Annotated[Path, typer.Argument(metavar="DST", help="What it was converted to.")],
    logits: Annotated[bool | None, typer.Option(help="Compare logits too: where two models would fit in memory, if not given.")] = None,
    as_json: Json = False,
):
    """Compare a conversion with its source. The exit code is 1 if something differs."""
    report = verify(source, directory, logits=logits, progress=False if as_json else None)
    if as_json:
        print(to_json(dataclasses.asdict(report)))
    else:
        for what in report.wrong:
            print(f"{report.directory}: {what}")

        def errs(count: int, what: str, error: float | None) -> str:
            errors = "not finite" if error is None else f"at most {error:.2f} of what they may be"
            return f"; {count} {what}, whose errors are {errors}" if count else ""

        draft = errs(report.nested, "of them nested", report.nested_error) + errs(report.drafted, "of the draft", report.draft_error)
        verdict = "see above" if report.wrong else "all as in the source"
        print(f"{report.weights} weights compared{', and logits' if report.logits else ''}: {verdict}{draft}")
    if report.wrong:
        raise typer.Exit(1)


@conversions.command("export")
def export_command(
    source: Annotated[Path, typer.Argument(metavar="DST", help="Converted directory.")],
    directory: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Directory to make, in Hugging Face format.")],
    as_json: Json = False,
):
    """Write a converted checkpoint as Hugging Face safetensors."""
    report = export(source, directory, progress=False if as_json else None)
    if as_json:
        print(to_json(dataclasses.asdict(report)))
    else:
        print(f"{report.directory}: {report.tensors} tensors, {report.bytes_written / 1e9:.2f} GB")
