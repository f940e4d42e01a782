"""Host memory, and XLA's pool of it for arrays that a GPU reads and copies. Imports no JAX, which reads the pool's limit when it starts."""

import contextlib
import os
from pathlib import Path

from qspec_jax.errors import InputError

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# The variable by which XLA limits its pool of pinned host memory, in GiB, and its default.
POOL_LIMIT, POOL_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64


def free_bytes() -> int | None:
    """Bytes of host memory that this process may still take; None where /proc does not say.

    That is the smaller of what Linux reports as available and what the control group's limit leaves. But a limit above all memory that
    Linux reports means a virtual machine that gets more memory as it uses up what it has; then the limit decides.
    """
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
        total, available = (1024 * int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError):  # no limit is the word max
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        left = limit - used + int(stat.get("inactive_file", 0))  # cached files give up their memory when it is needed
        return left if limit > total else min(left, available)
    return available


def pool_bytes() -> int:
    """The limit of XLA's pool. Raises InputError for a limit that is not a whole number."""
    text = os.environ.get(POOL_LIMIT, str(POOL_GIB))
    if not text.isdecimal():
        raise InputError(f"{POOL_LIMIT}={text} should be a whole number of GiB")
    return int(text) << 30


def limit_pool() -> None:
    """Limits XLA's pool to four fifths of the free memory, unless its limit is set. Call it before JAX starts.

    The pool grows beyond what lies in it, up to its limit, and the process takes some 10 GB besides. Linux kills a process without a
    message when memory runs out: seen with a pool of 110 GiB, of 128.
    """
    if (free := free_bytes()) is not None:
        os.environ.setdefault(POOL_LIMIT, str(free * 4 // 5 >> 30))


def room_bytes(*, pooled: bool) -> int | None:
    """Bytes that arrays in host memory may take; None where /proc does not say.

    That is the pool's limit if it is set; otherwise the free memory, and for arrays in the pool at most its default limit.

    pooled: whether the arrays are in XLA's pool, as on a GPU.
    """
    if POOL_LIMIT in os.environ:
        return pool_bytes()
    free = free_bytes()
    return min(free, pool_bytes()) if pooled and free is not None else free
