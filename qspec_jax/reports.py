"""Reports of measurements and plans: where figures come from, how they are printed, and how they are drawn.

A report is a dataclass whose fields are what --json prints. Its method `table` makes what people read, and `figure`, if it has one, what
--plot draws. So a new measurement is one file:

    @dataclasses.dataclass(frozen=True)
    class CopyReport(Run):
        rows: list[CopyRow]

        def table(self) -> RenderableType:
            columns = grid("way", "GB/s", "note", left=("way", "note"), wraps=("note",))
            for row in self.rows:
                columns.add_row(row.way, formatted(row.gb_per_s, ",.1f"), row.error)
            return page(f"Copies on {self.device}", f", {self.date}", columns, notes=["GB/s: 1e9 bytes a second."])

    def run(..., kept: KeptRows = NOT_KEPT, progress: bool | None = None) -> CopyReport:
        rows = []
        for case in progress_bar(cases, progress=progress):
            rows.append(kept.measured(case.name, CopyRow, lambda case=case: measured(case), lambda row: f"{row.gb_per_s:,.1f} GB/s"))
        return CopyReport(**this_run(), rows=rows)

and its command parses options and ends with `measure_and_show(context, lambda kept: copies.run(..., kept=kept), output, as_json=as_json)`.
"""

import dataclasses
import datetime
import importlib.metadata
import io
import platform
import sys
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any, Protocol

import jax
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from qspec_jax import plots
from qspec_jax.files import output_to, to_json

TABLE_WIDTH = 150  # characters in a line of a table that goes to a file or a pipe
PACKAGES = (
    "qspec-jax",
    "jax",
    "jaxlib",
    "jax-triton",
    "triton",
    "torch",
    "transformers",
    "flashinfer-python",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)


class Report(Protocol):
    """A dataclass of figures that can be printed."""

    def table(self) -> RenderableType:
        """The figures as people read them."""
        ...


@dataclasses.dataclass(frozen=True)
class Run:
    """Where the figures of a report come from.

    Attributes:
        device: the kind of device that they were measured on.
        date: the day, in ISO 8601.
        versions: of Python, the platform and the packages that took part, by name.
        earlier: labels of the rows that an earlier run of the same command measured, on the same day and machine with the same versions.
    """

    device: str
    date: str
    versions: dict[str, str]
    earlier: list[str] = dataclasses.field(default_factory=list, kw_only=True)


def this_run() -> dict[str, Any]:
    """The fields of `Run`, here and now."""
    device = jax.devices()[0]
    versions = {"python": platform.python_version(), "platform": " ".join(device.client.platform_version.split())}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"device": device.device_kind, "date": datetime.date.today().isoformat(), "versions": versions}


def grid(*labels: str, left: Container[str] = (), wraps: Container[str] = ()) -> Table:
    """An empty table without lines.

    Args:
        labels: of the columns.
        left: those of names and notes, which are at the left; figures are at the right.
        wraps: those whose cells may be broken over several lines.
    """
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for label in labels:
        table.add_column(label, justify="left" if label in left else "right", no_wrap=label not in wraps, overflow="fold")
    return table


def page(title: str, beside: str, *parts: RenderableType, notes: Iterable[str] = ()) -> Group:
    """A report as people read it.

    Args:
        title: what was measured, and on which device.
        beside: follows the title without a space, on its line and on further ones.
        parts: tables and texts.
        notes: paragraphs below them.
    """
    head = Text.assemble((title, "bold"), f"{beside}\n")
    return Group(head, *parts, Text(), *(Text(note, "dim") for note in notes))


def formatted(value: float | None, form: str, unit: str = "") -> str:
    """A figure in a table: "-" if there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def show(measure: Callable[[], Report], output: Path | None, *, as_json: bool, plot: Path | None = None) -> None:
    """Measures, and prints the report: as a line of JSON, or as its table; that in colours to a terminal.

    Args:
        measure: makes the report, once it is known that the files can be written.
        output: the file that it is written to; None: standard output.
        as_json: whether its fields are written as JSON.
        plot: the file that it is drawn to; None: none.
    """
    if plot:
        plots.check(plot, output)
    with output_to(output) as write:
        report = measure()
        if as_json:
            write(to_json(dataclasses.asdict(report)) + "\n")
        elif output is None and sys.stdout.isatty():
            # A narrow terminal wraps lines; the table would drop what is in its columns.
            Console(width=max(Console().width, TABLE_WIDTH)).print(_printed(report))
        else:
            text = io.StringIO()
            Console(file=text, width=TABLE_WIDTH).print(_printed(report))
            write("".join(line.rstrip() + "\n" for line in text.getvalue().splitlines()))
    if plot:
        plots.save(report.figure(), plot)


def _printed(report: Report) -> RenderableType:
    """The table, with a note on rows of an earlier run."""
    if not (earlier := getattr(report, "earlier", None)):
        return report.table()
    return Group(report.table(), Text(f"Measured by an earlier run of this command, on the same day: {'; '.join(earlier)}.", "dim"))
