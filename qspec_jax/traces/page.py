"""The page that shows traces: one HTML file with its style, script and data, which loads nothing else."""

import functools
import html
import importlib.resources
from collections.abc import Sequence
from typing import Any

import jinja2

from qspec_jax.files import to_json

FRAME_HEIGHT = 760  # pixels of the frame in a notebook


def page_of(traces: Sequence[dict[str, Any]]) -> str:
    """The page of traces as `Trace.as_object` gives them."""
    # Within a script element only "<" can end it.
    data = to_json({"traces": list(traces)}).replace("<", "\\u003c")
    settings = traces[0]["settings"]
    title = f"Trace: {traces[0]['about']['model']}, {settings['draft']}"
    return _template().render(title=html.escape(title), style=_part("page.css"), script=_part("page.js"), data=data)


def framed(page: str) -> str:
    """A page within another one, such as a notebook, whose styles and scripts stay apart."""
    return f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: {FRAME_HEIGHT}px; border: 0"></iframe>'


@functools.cache
def _template() -> jinja2.Template:
    return jinja2.Template(_part("page.html"))


def _part(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")
