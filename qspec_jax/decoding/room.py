"""How much memory the devices have left, and what rounds need of it."""

import jax
from jax.sharding import Mesh

from qspec_jax.models.config import LlamaConfig

KEPT_BACK = 0.03  # of a device's memory, for what nobody counts
# What a round is taken to hold for each of its tokens besides the batch, an assumption on the safe side: so many float32 arrays as wide as
# the logits, and as gate and up of an MLP.
ARRAYS = 8


def free_bytes(mesh: Mesh | None = None) -> int | None:
    """Bytes that are not in use on each of a mesh's devices, or on this thread's default one, less what is kept back; None where a device
    does not say, as a CPU does not."""
    default = jax.config.jax_default_device
    devices = [default if isinstance(default, jax.Device) else jax.local_devices()[0]]  # it may be a platform's name
    found = [device.memory_stats() or {} for device in (devices if mesh is None else mesh.local_devices)]
    if not all("bytes_limit" in stats for stats in found):
        return None
    return min(int(stats["bytes_limit"] * (1 - KEPT_BACK)) - stats["bytes_in_use"] for stats in found)


def bytes_of_round(model: LlamaConfig, drafts: int) -> int:
    """Bytes that a round of so many drafts takes for each row, besides the row itself."""
    return 4 * ARRAYS * (drafts + 1) * (model.vocab_size + 2 * model.intermediate_size)
