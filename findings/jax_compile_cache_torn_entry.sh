#!/usr/bin/env bash
# jax 0.10.2: an entry of the persistent compilation cache that is not whole is never repaired. Programs are written in place, so a process
# that is killed meanwhile, or a full disk, leaves part of one. Each later process then warns that it could not read the entry, compiles the
# program again, and does not write it, because a file of that name is there.
#
# Behaviour seen: after the entry was cut to half its length, a second and a third process warn alike, and the file keeps its half length.
#
# Output seen:
#   first process: 0 warnings, entry whole: True
#   second process: 1 warnings, entry whole: False
#   third process: 1 warnings, entry whole: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2" 2> /dev/null
for case in first second third; do
    JAX_PLATFORMS=cpu "$folder/venv/bin/python" - "$folder/cache" "$case" <<'PYTHON'
import pathlib
import sys
import warnings

import jax
import jax.numpy as jnp

directory, case = pathlib.Path(sys.argv[1]), sys.argv[2]
for name, value in {
    "jax_compilation_cache_dir": str(directory),
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}.items():
    jax.config.update(name, value)
x = jnp.arange(8.0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    jax.jit(lambda x: (x @ x, jnp.sort(x)))(x)
found = [warning for warning in caught if "persistent compilation cache" in str(warning.message)]
(entry,) = directory.glob("jit__lambda*-cache")
size = directory / "size"
if case == "first":
    size.write_text(str(entry.stat().st_size))
whole = entry.stat().st_size == int(size.read_text())
print(f"{case} process: {len(found)} warnings, entry whole: {whole}")
if case == "first":
    entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
sys.exit((len(found), whole) != ((0, True) if case == "first" else (1, False)))
PYTHON
done
