"""How much memory the devices have left, and how much rounds need."""

import jax
from jax.sharding import Mesh

from qspec_jax.models.config import LlamaConfig

MEMORY_RESERVE = 0.03  # the share of a device's memory that is left for what is not counted
# A round is assumed to hold, besides the batch, at most this many float32 arrays for each of its tokens: as wide as the logits, and as gate
# and up of an MLP, or of the experts that a token goes through.
ARRAYS = 8


def free_bytes(mesh: Mesh | None = None) -> int | None:
    """Bytes that are not in use on each of a mesh's devices, less `MEMORY_RESERVE`; None for devices that do not report it, such as CPUs.

    mesh: None is this thread's default device.
    """
    default = jax.config.jax_default_device
    devices = [default if isinstance(default, jax.Device) else jax.local_devices()[0]]  # it may be a platform's name
    found = [device.memory_stats() or {} for device in (devices if mesh is None else mesh.local_devices)]
    if not all("bytes_limit" in stats for stats in found):
        return None
    return min(int(stats["bytes_limit"] * (1 - MEMORY_RESERVE)) - stats["bytes_in_use"] for stats in found)


def bytes_of_round(model: LlamaConfig, drafts: int) -> int:
    """Bytes that a round with `drafts` drafts takes for each row, besides the row itself."""
    experts = model.experts
    width = model.intermediate_size if experts is None else max(model.intermediate_size, experts.chosen * experts.intermediate_size)
    return 4 * ARRAYS * (drafts + 1) * (model.vocab_size + 2 * width)
