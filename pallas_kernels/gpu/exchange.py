"""Exchange memory: memory of each of several devices that kernels on all of them write to.

JAX knows arrays that lie on one device, and no kernel of another device finds them. So kernels get addresses, which stay the same for as
long as the process lives, as a constant of the program. What lies there, and who waits for what, is the kernel's affair
(matmul/mosaic_exchange.py).
"""

import ctypes
import functools
import itertools

import jax
import numpy as np

_kept: list[jax.Array] = []  # or the memory would be freed


def unreachable(devices: tuple[jax.Device, ...]) -> str | None:
    """Why kernels on these devices cannot write to each other's memory, or None, also for devices that are not here (see `addresses`)."""
    if len({device.process_index for device in devices}) > 1:
        return "needs all devices in one process"
    for one, other in itertools.permutations(devices if _here(devices) else (), 2):
        if not _reaches(one.local_hardware_id, other.local_hardware_id):
            return f"needs devices that reach each other's memory, and {one} does not reach that of {other}"
    return None


@functools.cache
def addresses(devices: tuple[jax.Device, ...], words: int, zeros: int) -> np.ndarray:
    """Where `words` words of 32 bits lie on each device, [device, lower and upper half] in uint32.

    zeros: how many of the words begin as 0; the others have all bits set. For devices that are not here, which a program can be compiled
    for all the same, the addresses are 0.
    """
    if not _here(devices):
        return np.zeros((len(devices), 2), np.uint32)
    found = []
    with jax.ensure_compile_time_eval():  # also while a program is traced
        for device in devices:
            start = np.where(np.arange(words) < zeros, 0, 0xFFFFFFFF).astype(np.uint32)
            _kept.append(jax.block_until_ready(jax.device_put(start, device)))
            found.append(_kept[-1].unsafe_buffer_pointer())
    return np.array([(address & 0xFFFFFFFF, address >> 32) for address in found], np.uint32)


def _here(devices: tuple[jax.Device, ...]) -> bool:
    try:
        return set(devices) <= set(jax.local_devices(backend=devices[0].platform))
    except RuntimeError:  # JAX runs on no such platform here
        return False


@functools.cache
def _reaches(one: int, other: int) -> bool:
    """Whether a GPU may write to another's memory, by the CUDA driver."""
    found = ctypes.c_int(0)
    return ctypes.CDLL("libcuda.so.1").cuDeviceCanAccessPeer(ctypes.byref(found), one, other) == 0 and found.value == 1
