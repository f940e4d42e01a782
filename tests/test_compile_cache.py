"""Compiled programs on disk: read by later processes, bounded, and no harm where they cannot be kept or read."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from qspec_jax import InputError, compile_cache, keep_compiled
from qspec_jax.compile_cache import Held, held

# Compiles a few programs, and prints how many were read from disk, and sums with all of their bits. Arguments: a folder, max_bytes, and the
# most bytes of a file, or 0.
SCRIPT = """
import json, logging, resource, sys
import jax, jax.numpy as jnp
from qspec_jax import compile_cache, keep_compiled
directory, max_bytes, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
logging.basicConfig(format="%(message)s")
compile_cache.MIN_COMPILE_S = 0.0
used = keep_compiled(directory, max_bytes=max_bytes)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
x = jnp.arange(12.0) / 7
found = [float(jax.jit(lambda x, n=n: jnp.sin(x * n).sum())(x)).hex() for n in range(3)]
print(json.dumps({"used": used and str(used), "hits": len(hits), "found": found}))
"""


def start(directory: Path, max_bytes: int = compile_cache.MAX_BYTES, limit: int = 0) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))}
    command = [sys.executable, "-c", SCRIPT, str(directory), str(max_bytes), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment | {"JAX_PLATFORMS": "cpu"})


def processed(directory: Path, **settings) -> tuple[dict, list[str]]:
    """What a process printed, and its log lines."""
    process = start(directory, **settings)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out), [line for line in err.splitlines() if "cpu_aot" not in line]


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> tuple[Path, dict]:
    """A folder that a process has filled, and what it printed."""
    directory = tmp_path_factory.mktemp("filled") / "programs"
    first, lines = processed(directory)
    assert (Path(first["used"]).parent, first["hits"], lines) == (directory, 0, [])
    return directory, first


def entries(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*-cache"))


def test_a_second_process_reads_them_and_finds_the_same_bits(filled):
    directory, first = filled
    second, lines = processed(directory)
    assert second["hits"] >= 3 and second["found"] == first["found"] and lines == []
    kept = entries(directory)
    assert held(directory) == Held(len(kept), sum(path.stat().st_size for path in kept)) and len(kept) >= 3


def test_what_cannot_be_read_is_compiled_and_written_again(filled):
    directory, first = filled
    for path in entries(directory):
        path.write_bytes(path.read_bytes()[:100])
    found, lines = processed(directory)
    assert found["found"] == first["found"] and found["hits"] == 0
    (line,) = lines
    assert str(directory) in line and "a compiled program cannot be read, and is compiled again" in line
    again, lines = processed(directory)
    assert again["hits"] >= 3 and lines == []


def test_what_a_killed_process_left_is_removed(filled):
    directory, first = filled
    whole = entries(directory)[0]
    content = whole.read_bytes()
    whole.write_bytes(content[: len(content) // 2])
    whole.with_name(whole.name.removesuffix("-cache") + "-atime").unlink()
    old, users = directory / "0123456789ab", directory / "photographs"
    for path in (old, users):
        path.mkdir()
        (path / ".lockfile").touch()
        os.utime(path, (time.time() - 2 * compile_cache.MAX_UNUSED_S,) * 2)
    found, lines = processed(directory)
    assert found["found"] == first["found"] and lines == [] and users.exists() and not old.exists()
    assert whole.stat().st_size > len(content) // 2, "written again"


def test_the_oldest_are_dropped(filled, tmp_path):
    largest = max(path.stat().st_size for path in entries(filled[0]))
    _, lines = processed(tmp_path / "small", max_bytes=2 * largest)
    assert lines == [] and 0 < held(tmp_path / "small").bytes <= 2 * largest < held(filled[0]).bytes


def test_few_are_left_when_a_process_begins(tmp_path):
    for i in range(compile_cache.MAX_PROGRAMS + 5):
        for suffix, content in (("-cache", b"."), ("-atime", bytes(8))):
            path = tmp_path / f"jit_{i}{suffix}"
            path.write_bytes(content)
            os.utime(path, (1e9 + i, 1e9 + i))
    compile_cache._tidy(tmp_path.parent, tmp_path)
    left = sorted(int(path.name[4:-6]) for path in tmp_path.glob("*-cache"))
    assert left == list(range(5, compile_cache.MAX_PROGRAMS + 5)) and len(list(tmp_path.glob("*-atime"))) == len(left)


def test_where_nothing_can_be_written(filled, tmp_path):
    """A folder that cannot be made, and a disk that is full."""
    (tmp_path / "file").write_text("")
    found, (line,) = processed(tmp_path / "file" / "programs")
    assert found == filled[1] | {"used": None}
    assert line == f"compiled programs are not kept: {tmp_path / 'file' / 'programs'}: Not a directory"
    found, (line,) = processed(tmp_path / "full", limit=64)
    assert found["found"] == filled[1]["found"] and "compiled programs cannot be kept" in line


@pytest.mark.system
def test_processes_share_a_folder(filled, tmp_path):
    processes = [start(tmp_path / "shared") for _ in range(3)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert json.loads(out)["found"] == filled[1]["found"] and "programs" not in err
    assert processed(tmp_path / "shared")[0]["hits"] >= 3


def test_the_folder_that_is_used(monkeypatch, tmp_path):
    monkeypatch.delenv(compile_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_cache.default_directory() == tmp_path / "qspec-jax" / "programs"
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "own"))
    assert compile_cache.default_directory() == tmp_path / "own" and held(tmp_path / "own") == Held(0, 0)
    used = keep_compiled(tmp_path / "other")
    assert used == Path(jax.config.jax_compilation_cache_dir) != tmp_path / "other", "the tests' own folder, which JAX uses already"
    monkeypatch.delenv(compile_cache.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(InputError, match="QSPEC_COMPILE_CACHE=DIR names a folder"):
        compile_cache.default_directory()
    with pytest.raises(InputError, match="max_bytes 0 should be at least 1"):
        keep_compiled(max_bytes=0)


def test_options_of_commands(run, fails, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("qspec_jax.cli.app.keep_compiled", asked.append)
    for flags, expected in (([], [None]), (["--compile-cache", tmp_path], [tmp_path]), (["--no-compile-cache"], [])):
        asked.clear()
        assert run("plan", "--arch", "tiny", "--json", *flags)[0] == 0 and asked == expected
    fails(["plan", "--arch", "tiny", "--no-compile-cache", "--compile-cache", tmp_path], "exclude each other; give one of them")
