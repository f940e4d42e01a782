"""What all plots share: files they may go to, and an axis of contexts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qspec_jax.errors import InputError, writing
from qspec_jax.files import whole_file

SUFFIXES = (".png", ".pdf", ".svg")


def check(path: Path, output: Path | None) -> None:
    """Raises InputError if `save` cannot write this file, or if it is the file that the report goes to."""
    need_matplotlib("--plot")
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"--plot {path}: the name must end in one of {', '.join(SUFFIXES)}")
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"--plot {path}: cannot be written ({'it is a folder' if path.is_dir() else 'no such folder'})")
    if output and output.resolve() == path.resolve():
        raise InputError(f"--output and --plot are the same file, {path}")


def need_matplotlib(what: str) -> None:
    """Raises InputError if matplotlib is not installed. what: needs it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError(f"{what} needs matplotlib: pip install matplotlib") from None


def panels(size: tuple[float, float], columns: int = 1, **settings: Any) -> tuple[Any, Sequence[Any]]:
    """A matplotlib figure of this size in inches and the axes of its panels, which are side by side; settings: of `Figure.subplots`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False, **settings)[0]


def line_style(number: int, label: str) -> dict[str, str]:
    """How a line with this number, from 0, is drawn: after ten colors come the same ones with another marker."""
    return {"color": f"C{number % 10}", "marker": "osv^D"[number // 10 % 5], "label": label}


def context_axis(axes, contexts: Sequence[int]) -> None:
    """Makes the horizontal axis of a matplotlib plot one of these contexts, on a logarithmic scale."""
    axes.set_xscale("log")
    # A context may have a few tokens more, which are buffered.
    axes.set_xticks(contexts, [f"{n // 1024}k" if n % 1024 <= n // 100 and n % 1000 else f"{n:,}" for n in contexts])
    axes.minorticks_off()
    axes.set_xlabel("context (tokens)")
    axes.grid(alpha=0.3)


def save(figure, path: Path) -> None:
    """Writes a matplotlib figure, whole or not at all. Raises InputError if the file cannot be written."""
    with writing(f"--plot {path}"), whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=150)
