"""Compiled programs that are kept on disk, where later processes find them: JAX's persistent compilation cache in a folder of ours.

JAX marks each use of an entry in a file beside it, and drops those that were used longest ago beyond a number of bytes, all under a lock.
It does not compare the CPU that LLVM compiled a program for, so each kind of CPU has a folder of its own.
"""

import contextlib
import dataclasses
import glob
import hashlib
import logging
import os
import platform
import re
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import filelock
import jax

from qspec_jax.errors import InputError

log = logging.getLogger(__name__)

VARIABLE = "QSPEC_COMPILE_CACHE"  # of the environment: the folder
MAX_BYTES = 4 << 30  # for each kind of CPU
MAX_PROGRAMS = 2000  # when a process begins: JAX reads the mark of every program before it writes one
MAX_UNUSED_S = 60 * 24 * 3600  # folders of other kinds of CPU are removed after that
MIN_COMPILE_S = 0.05  # what compiles in less time is compiled again
LOCK_S = 10.0  # that another process may hold the lock while this one starts
_ENTRY, _MARK = "-cache", "-atime"  # JAX's suffixes of an entry, and of the time of its last use
# JAX's warnings of an entry that cannot be read or written, with the name of the program.
_UNREADABLE = re.compile(r"Error reading persistent compilation cache entry for '(?P<program>[^']*)': (?P<reason>.*)", re.DOTALL)
_UNWRITABLE = re.compile(r"Error writing persistent compilation cache entry for '(?P<program>[^']*)': (?P<reason>.*)", re.DOTALL)
_CPUINFO = Path("/proc/cpuinfo")
_KIND = re.compile("[0-9a-f]{12}")  # the name of a kind of CPU


@dataclasses.dataclass(frozen=True)
class Held:
    """What a folder of compiled programs holds. programs: their number. bytes: on disk."""

    programs: int
    bytes: int


def default_directory() -> Path:
    """The folder that the environment names, or qspec-jax/programs in the user's cache folder. Raises InputError without a home."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise InputError(f"the user has no home folder for compiled programs; {VARIABLE}=DIR names a folder") from None
    return Path(caches) / "qspec-jax" / "programs"


def held(directory: Path) -> Held:
    """What a folder holds, and those in it."""
    sizes = []
    for path in directory.rglob(f"*{_ENTRY}"):
        with contextlib.suppress(OSError):  # another process may drop it
            sizes.append(path.stat().st_size)
    return Held(len(sizes), sum(sizes))


def keep_compiled(directory: str | Path | None = None, *, max_bytes: int = MAX_BYTES) -> Path | None:
    """Keeps the programs that this process compiles from now on, and reads those that are kept. Call it before anything is compiled.

    Where `jax_compilation_cache_dir` is set already, JAX goes on to use that folder. A folder that cannot be written, a full disk, and a
    program that cannot be read do no harm: a log line says so, and what is not found is compiled. Several processes may share a folder.

    Args:
        directory: in which each kind of CPU has a folder of its own, made if it is not there; `default_directory` unless given.
        max_bytes: of the programs for this kind of CPU; those that were used longest ago are dropped.

    Returns:
        The folder for this kind of CPU, or None if none is used.

    Raises:
        InputError: for a size that is not positive.
    """
    if max_bytes <= 0:
        raise InputError(f"max_bytes {max_bytes} should be at least 1")
    if used := jax.config.jax_compilation_cache_dir:
        if directory is not None:
            log.warning("compiled programs are kept in %s already, and not in %s", used, directory)
        return Path(used)
    try:
        root = Path(directory) if directory is not None else default_directory()
    except InputError as error:
        log.warning("compiled programs are not kept: %s", error)
        return None
    own = root / kind_of_cpu()
    try:
        own.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=own):
            pass
        _tidy(root, own)
    except (OSError, filelock.Timeout) as error:
        log.warning("compiled programs are not kept: %s: %s", root, getattr(error, "strerror", None) or error)
        return None
    settings = {
        "jax_compilation_cache_dir": str(own),
        "jax_compilation_cache_max_size": max_bytes,
        "jax_persistent_cache_min_compile_time_secs": MIN_COMPILE_S,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
    _log_warnings(own)
    return own


def kind_of_cpu() -> str:
    """A name for the instructions that programs for this CPU may have."""
    try:
        features = next(line for line in _CPUINFO.read_text().splitlines() if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = f"{platform.machine()} {platform.processor()}"
    return hashlib.sha256(features.encode()).hexdigest()[:12]


def _tidy(root: Path, own: Path) -> None:
    """Removes what a killed process left half-written, over which JAX (0.10) fails, programs beyond `MAX_PROGRAMS`, and unused folders."""
    with filelock.FileLock(own / ".lockfile").acquire(timeout=LOCK_S):
        used = {}
        for entry in own.glob(f"*{_ENTRY}"):
            mark = entry.with_name(entry.name.removesuffix(_ENTRY) + _MARK)
            whole = mark.exists() and mark.stat().st_size == 8
            used[entry, mark] = mark.stat().st_mtime if whole else 0.0
        for entry, mark in sorted(used, key=used.__getitem__)[:-MAX_PROGRAMS]:
            used[entry, mark] = 0.0
        for (entry, mark), at in used.items():
            if not at:
                entry.unlink(missing_ok=True)
                mark.unlink(missing_ok=True)
    os.utime(own)
    for other in root.iterdir():
        with contextlib.suppress(OSError):
            ours = _KIND.fullmatch(other.name) and (other / ".lockfile").is_file()  # the user's own folders may be beside them
            if ours and other != own and time.time() - other.stat().st_mtime > MAX_UNUSED_S:
                shutil.rmtree(other, ignore_errors=True)


def _log_warnings(directory: Path) -> None:
    """Turns JAX's warnings of this cache into one log line of each kind, and removes what cannot be read, so that it is written again."""
    show, logged = warnings.showwarning, set()

    def log_first(what: str, reason: str) -> None:
        if what not in logged:
            logged.add(what)
            log.warning("%s: %s (%s)", directory, what, reason.partition("\n")[0][:200])

    def shown(message, category, filename, lineno, file=None, line=None):
        if unreadable := _UNREADABLE.fullmatch(str(message)):
            for suffix in (_ENTRY, _MARK):
                for path in directory.glob(f"{glob.escape(unreadable['program'])}-*{suffix}"):
                    path.unlink(missing_ok=True)
            log_first("a compiled program cannot be read, and is compiled again", unreadable["reason"])
        elif unwritable := _UNWRITABLE.fullmatch(str(message)):
            log_first("compiled programs cannot be kept", unwritable["reason"])
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = shown
    warnings.filterwarnings("always", message="Error (reading|writing) persistent compilation cache")
