"""How much memory the devices have left."""

import jax
from jax.sharding import Mesh

KEPT_BACK = 0.03  # of a device's memory, for what nobody counts


def free_bytes(mesh: Mesh | None = None) -> int | None:
    """Bytes that are not in use on each of a mesh's devices, or on this thread's default one, less what is kept back; None where a device
    does not say, as a CPU does not."""
    default = jax.config.jax_default_device
    devices = [default if isinstance(default, jax.Device) else jax.local_devices()[0]]  # it may be a platform's name
    found = [device.memory_stats() or {} for device in (devices if mesh is None else mesh.local_devices)]
    if not all("bytes_limit" in stats for stats in found):
        return None
    return min(int(stats["bytes_limit"] * (1 - KEPT_BACK)) - stats["bytes_in_use"] for stats in found)
