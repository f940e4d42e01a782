"""The command `qspec eval needle`, its table and its plot."""

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from qspec_jax import demo, plots
from qspec_jax.cli.options import CacheKind, DtypeOption, EvaluatedModel, Json, Method, Plot, Seed, load, number_list, show
from qspec_jax.drafts import make_draft
from qspec_jax.errors import InputError
from qspec_jax.evaluate import needle as needles
from qspec_jax.evaluate.needle import Cell, Report

Style = enum.StrEnum("Style", list(needles.FORMATS))


def needle(
    model: EvaluatedModel = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, with commas between them.")] = "1024,2048,4096",
    depths: Annotated[str, typer.Option(help="Where the needle stands, from 0 to 1, with commas between them.")] = "0,0.25,0.5,0.75,1",
    samples: Annotated[int, typer.Option(min=1, help="Prompts for each length and depth.")] = 4,
    style: Annotated[
        Style, typer.Option("--format", help="python: functions, for models of code; text: sentences, for all others.")
    ] = Style.python,
    method: Annotated[Method | None, typer.Option(help="This one alone: quantspec and the full cache, if not given.")] = None,
    cache: Annotated[CacheKind | None, typer.Option(help="Of --method autoregressive: full, if not given.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 4,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    plot: Plot = None,
    as_json: Json = False,
):
    """How often a model finds a value in a synthetic text, by length and depth, with a full cache and with quantspec's."""
    if cache is not None and method is not Method.autoregressive:
        raise InputError("--cache is for --method autoregressive; quantspec always has the int8 cache")
    methods = needles.METHODS
    if method is not None:
        methods = (needles.Method(method.value, "int8" if method is Method.quantspec else (cache or CacheKind.full).value),)
    sizes, shares = number_list("--lengths", lengths, int), number_list("--depths", depths, float)
    if plot:
        plots.check(plot, None)
    directory, progress = model or demo.MODEL, False if as_json else None
    network, tokenizer = load(directory, dtype or (None if model else demo.dtype()), quiet=as_json)
    report = needles.run(
        network,
        tokenizer,
        lengths=sizes,
        depths=shares,
        samples=samples,
        style=style.value,
        methods=methods,
        seed=seed,
        batch_size=batch_size,
        draft=make_draft("quantspec", network, directory=directory) if any(m.method == "quantspec" for m in methods) else None,
        progress=progress,
    )
    show(report, table, None, sys.stdout.write, as_json=as_json)
    if plot:
        draw(report, plot)


def table(report: Report) -> Group:
    """For every method the right answers, by depth and length."""
    parts = []
    for name, cells in _by_method(report).items():
        lengths = list(dict.fromkeys(cell.length for cell in cells))
        grid = Table()
        for label in ("depth", *(f"{length:,} tokens" for length in lengths)):
            grid.add_column(label, justify="right")
        for depth in dict.fromkeys(cell.depth for cell in cells):
            grid.add_row(f"{depth:g}", *(f"{cell.correct}/{cell.samples}" for cell in cells if cell.depth == depth))
        correct, asked = sum(cell.correct for cell in cells), sum(cell.samples for cell in cells)
        short = max(cell.length - cell.tokens for cell in cells)
        note = f"{correct} of {asked} right" + (f"; some prompts are up to {short} tokens shorter\n" if short else "\n")
        parts += [Text(f"Needle in a haystack ({report.format}): {name}", "bold"), grid, Text(note)]
    if both := report.agreement:
        agreed = f"the same tokens for {both.same_tokens} and the same score for {both.same_score}"
        parts.append(Text(f"Of {both.prompts} prompts, both gave {agreed}."))
    return Group(*parts)


def draw(report: Report, path: Path) -> None:
    """A heat map of the share of right answers, depth against length, for every method. Raises InputError if the file cannot be written."""
    from matplotlib.figure import Figure

    panels = _by_method(report)
    figure = Figure(figsize=(1 + 4.5 * len(panels), 4), layout="constrained")
    for axes, (name, cells) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        lengths, depths = (sorted({getattr(cell, axis) for cell in cells}) for axis in ("length", "depth"))
        shares = {(cell.depth, cell.length): cell.correct / cell.samples for cell in cells}
        grid = [[shares[depth, length] for length in lengths] for depth in depths]
        image = axes.imshow(grid, vmin=0, vmax=1, aspect="auto")
        for y, row in enumerate(grid):
            for x, share in enumerate(row):
                axes.text(x, y, f"{share:.0%}", ha="center", va="center", color="black" if share > 0.6 else "white")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
        axes.set(xlabel="prompt (tokens)", ylabel="depth of the needle", title=name)
    figure.colorbar(image, ax=figure.axes, label="right")
    plots.save(figure, path)


def _by_method(report: Report) -> dict[str, list[Cell]]:
    panels: dict[str, list[Cell]] = {}
    for cell in report.results:
        panels.setdefault(f"{cell.method}, {cell.cache} cache", []).append(cell)
    return panels
