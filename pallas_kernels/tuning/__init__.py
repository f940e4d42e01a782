"""Which configuration of a kernel measured best on a device: a JSON file each, written by `qspec bench ... --tune`.

A file maps kernels to entries {"problem": {...}, "config": {...}}. A problem is what the best configuration depends on, by the
kernel's own account; one without an entry gets the kernel's default.
"""

import functools
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax

FOLDER = Path(__file__).parent


def path(folder: Path = FOLDER) -> Path:
    """The file of the default device."""
    return folder / f"{re.sub('[^a-z0-9]+', '-', jax.devices()[0].device_kind.lower())}.json"


def lookup(kernel: str, problem: Mapping[str, int | None]) -> dict | None:
    """The configuration that measured best for this problem on the default device, if any."""
    return next((entry["config"] for entry in _entries(path()).get(kernel, []) if entry["problem"] == dict(problem)), None)


def store(kernel: str, problem: Mapping[str, int | None], config: Mapping[str, int], file: Path) -> None:
    """Adds an entry to a file, in place of the one for the same problem. Raises OSError where that cannot be written."""
    entries = dict(_entries.__wrapped__(file))
    others = [entry for entry in entries.get(kernel, []) if entry["problem"] != dict(problem)]
    order = lambda entry: [(name, value or 0) for name, value in entry["problem"].items()]
    entries[kernel] = sorted([*others, {"problem": dict(problem), "config": dict(config)}], key=order)
    # A line for each entry.
    lines = lambda rows: ",\n".join(f"  {json.dumps(row)}" for row in rows)
    text = "{\n" + ",\n".join(f" {json.dumps(name)}: [\n{lines(rows)}\n ]" for name, rows in sorted(entries.items())) + "\n}\n"
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False) as new:
        new.write(text)
    os.replace(new.name, file)
    _entries.cache_clear()


@functools.cache
def _entries(file: Path) -> dict:
    return json.loads(file.read_text()) if file.exists() else {}
