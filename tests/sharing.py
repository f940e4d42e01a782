"""A cache of compiled programs that the processes of a test run share, and that the next run finds again; and one context for what the
tests of a process lower.

It is kept in $XDG_CACHE_HOME/qspec-tests (~/.cache/qspec-tests), in a directory for each version of JAX and each kind of CPU. Delete it at
any time.

JAX writes an entry in place, so that a process that is killed leaves part of one, which the next reader warns of. Pytest's processes write
to a file beside it and rename that. Other processes (`environment()`) have a directory of their own, where JAX locks the directory and
writes a second file after each entry: an entry without it is removed when the next run begins.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import filelock
import jax
import jaxlib
from jax._src import lru_cache
from jax._src.interpreters import mlir

from qspec_jax import compile_cache

DIRECTORY = "QSPEC_TESTS_COMPILED"  # the environment variable that names the directory to processes that pytest starts
MAX_BYTES = 3 << 30
MAX_AGE_S = 14 * 24 * 3600


def begin(config) -> None:
    """Sets the cache up before anything is compiled. Workers and processes started by tests inherit the environment variable.

    Args:
        config: pytest's configuration.
    """
    if DIRECTORY not in os.environ:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qspec-tests"
        directory = root / _key()
        (directory / "started").mkdir(parents=True, exist_ok=True)
        _remove_old(root, directory)
        os.environ[DIRECTORY] = str(directory)
        os.environ[compile_cache.VARIABLE] = str(directory / "commands")  # or commands would keep programs in the user's folder
        config.add_cleanup(lambda: [os.environ.pop(name) for name in (DIRECTORY, compile_cache.VARIABLE)])
    lru_cache.LRUCache.get, lru_cache.LRUCache.put = _get, _put
    jax.config.update("jax_compilation_cache_dir", os.environ[DIRECTORY])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def lower_in_one_context() -> None:
    """Makes a context of MLIR that this thread lowers in from here on. JAX makes one for each program, with all dialects, in 4 ms: a
    twelfth of the time of tests. What was lowered stays in a context as long as that lives, so call this from time to time.
    """
    if jax.__version_info__ >= (0, 11):  # newer ones than the flags of conftest.py are for are left as they are
        return
    context, thread = _make_ir_context(), threading.current_thread()
    mlir.make_ir_context = lambda: context if threading.current_thread() is thread else _make_ir_context()
    # Passes load their dialects the first time: not while another thread lowers.
    jax.jit(lambda: 0).lower().compile()


_make_ir_context = getattr(mlir, "make_ir_context", None)


def environment() -> dict[str, str]:
    """The environment variables with which a process that is not pytest's shares programs with others of its kind."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(Path(os.environ[DIRECTORY]) / "started"),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(1 << 34),  # never reached; with a bound, JAX locks the directory
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _key() -> str:
    """A name for what a program depends on and JAX does not check when it reads one."""
    return hashlib.sha256(f"{jax.__version__} {jaxlib.__version__} {compile_cache.kind_of_cpu()}".encode()).hexdigest()[:12]


def _get(cache: lru_cache.LRUCache, key: str) -> bytes | None:
    """An entry, which is marked as used now; None if there is none."""
    path = Path(cache.path, f"{key}-cache")
    try:
        value = path.read_bytes()
        os.utime(path)
    except FileNotFoundError:  # another run may remove it at any time
        return None
    return value


def _put(cache: lru_cache.LRUCache, key: str, value: bytes) -> None:
    """Writes an entry such that nobody ever sees part of it."""
    with tempfile.NamedTemporaryFile(dir=cache.path, prefix="partial-", delete=False) as partial:
        partial.write(value)
    os.replace(partial.name, Path(cache.path, f"{key}-cache"))


def _remove_old(root: Path, directory: Path) -> None:
    """Removes what was not used for long, what a killed process left half-written, and the oldest entries beyond `MAX_BYTES`."""
    now = time.time()
    for other in root.iterdir():
        if other != directory and now - max((path.stat().st_mtime for path in _files(other)), default=0) > MAX_AGE_S:
            shutil.rmtree(other, ignore_errors=True)
    entries = []
    for path in _files(directory):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if path.name.startswith("partial-"):
                if now - status.st_mtime > 3600:
                    path.unlink()
            else:
                entries.append((status.st_mtime, status.st_size, path))
    kept = MAX_BYTES
    for used, size, path in sorted(entries, reverse=True):
        kept -= size
        if kept < 0 or now - used > MAX_AGE_S:
            path.unlink(missing_ok=True)
    started = directory / "started"
    with filelock.FileLock(started / ".lockfile"):
        for entry in started.glob("*-cache"):
            mark = entry.with_name(entry.name.removesuffix("-cache") + "-atime")
            # The mark has the time of the last use; JAX fails over one that is empty.
            if not mark.exists() or mark.stat().st_size != 8 or now - mark.stat().st_mtime > MAX_AGE_S:
                entry.unlink()
                mark.unlink(missing_ok=True)


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_file()]
