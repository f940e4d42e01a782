"""The option `--trace`: the page of traces, of which it is known before the decode that it can be written."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from qspec_jax.errors import InputError
from qspec_jax.files import STANDARD, output_to
from qspec_jax.traces.page import page_of
from qspec_jax.traces.trace import Trace


@contextlib.contextmanager
def page_to(path: Path, output: Path | None) -> Iterator[Callable[[Sequence[Trace]], None]]:
    """Yields a function that writes the page of traces to a file (`output_to`).

    Args:
        path: the file.
        output: that of the command's result; None: it has none.

    Raises:
        InputError: for standard output, where both are the same, and as `output_to` does.
    """
    if path == STANDARD or (output is not None and path.resolve() == output.resolve()):
        raise InputError(f"--trace {path} should be a file of its own, such as trace.html")
    with output_to(path) as write:
        yield lambda traces: write(page_of([trace.as_object() for trace in traces]))
