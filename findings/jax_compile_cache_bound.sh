#!/usr/bin/env bash
# jax 0.10.2: with jax_compilation_cache_max_size set, each program that is written to the persistent compilation cache costs a read of the
# date of every program that is already there, under a lock that all processes share, also where the bound is never reached. So a run that
# writes N programs reads some N * N / 2 small files. Without a bound no date is read or written.
#
# Behaviour seen: the (N + 1)th program opens the date files of the N others once each.
#
# Output seen:
#   bound 1 TB, 50 programs there: 50 dates opened to write one more
#   bound 1 TB, 200 programs there: 200 dates opened to write one more
#   no bound, 200 programs there: 0 dates opened to write one more
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2" "filelock==3.20.0" 2> /dev/null
for case in "1099511627776 50" "1099511627776 200" "-1 200"; do
    JAX_PLATFORMS=cpu "$folder/venv/bin/python" - "$folder/cache$case" $case <<'PYTHON'
import sys

import jax

directory, bound, programs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for name, value in {
    "jax_compilation_cache_dir": directory,
    "jax_compilation_cache_max_size": bound,
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}.items():
    jax.config.update(name, value)
shapes = [jax.ShapeDtypeStruct((n + 1,), "float32") for n in range(programs + 1)]
for shape in shapes[:-1]:
    jax.jit(lambda x: x + 1).lower(shape).compile()
opened = set()


def note(event, arguments):
    if event == "open" and str(arguments[0]).endswith("-atime") and "r" in str(arguments[1]):
        opened.add(arguments[0])


sys.addaudithook(note)
jax.jit(lambda x: x + 1).lower(shapes[-1]).compile()
print(f"{'no bound' if bound < 0 else 'bound 1 TB'}, {programs} programs there: {len(opened)} dates opened to write one more")
sys.exit(len(opened) != (programs if bound > 0 else 0))
PYTHON
done
