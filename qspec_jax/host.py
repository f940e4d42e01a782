"""The host's memory, and XLA's pool of it for arrays that a GPU reads and copies. It imports no JAX, which reads the pool's limit once."""

import contextlib
import os
from pathlib import Path

from qspec_jax.errors import InputError

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# Of XLA: how many GiB its pool of pinned host memory may have, 64 where it is not set.
POOL_LIMIT, POOL_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64


def free_bytes() -> int | None:
    """Bytes of host memory that this process may still take; None where Linux does not say.

    The smaller of what Linux says and of what the control group's limit leaves. But where that limit is more than all memory that Linux
    shows, the machine is a virtual one that is given more once it takes what it has, and the limit counts.
    """
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
        total, available = (1024 * int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError):  # no limit is the word max
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        left = limit - used + int(stat.get("inactive_file", 0))  # what files have is given up when it is needed
        return left if limit > total else min(left, available)
    return available


def pool_bytes() -> int:
    """The most that XLA's pool may have. Raises InputError for a limit that is no whole number."""
    text = os.environ.get(POOL_LIMIT, str(POOL_GIB))
    if not text.isdecimal():
        raise InputError(f"{POOL_LIMIT}={text} should be a whole number of GiB")
    return int(text) << 30


def limit_pool() -> None:
    """Lets XLA's pool have four fifths of what is free now and no more, unless somebody has set its limit. To be called before JAX starts.

    The pool grows beyond what lies in it, up to its limit, and the process takes some 10 GB besides. Where there is no more, Linux kills it
    without a word: seen with 110 GiB for the pool, of 128.
    """
    if (free := free_bytes()) is not None:
        os.environ.setdefault(POOL_LIMIT, str(free * 4 // 5 >> 30))


def room_bytes(*, pooled: bool) -> int | None:
    """The most that arrays in host memory may take; None where Linux does not say. A limit of the pool that is set is believed. Else it is
    what is free, and where the arrays are of XLA's pool no more than that has by itself.

    pooled: whether they are, as on a GPU.
    """
    if POOL_LIMIT in os.environ:
        return pool_bytes()
    free = free_bytes()
    return min(free, pool_bytes()) if pooled and free is not None else free
