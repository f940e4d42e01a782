"""The configuration of a KV cache."""

import dataclasses

from pallas_kernels.formats.quantization import SCHEMES
from qspec_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """The KV cache of a call to generate.

    group_size: tokens of a key group, even; None is 128, or head_dim when that is smaller. scheme: quantizer, a key of
    `pallas_kernels.kv_format.SCHEMES`. kind: "hierarchical", or "full" for a cache in the model's own precision.
    """

    kind: str = "hierarchical"
    group_size: int | None = None
    scheme: str = "int8_first"

    def __post_init__(self):
        if self.kind not in ("hierarchical", "full"):
            raise InputError(f"cache kind {self.kind!r} should be hierarchical or full")
        if self.group_size is not None and (self.group_size < 2 or self.group_size % 2):
            raise InputError(f"group size {self.group_size} should be an even number, at least 2")
        if self.scheme not in SCHEMES:
            raise InputError(f"scheme {self.scheme!r} should be one of {', '.join(SCHEMES)}")

    def group_size_for(self, head_dim: int) -> int:
        return min(128, head_dim) if self.group_size is None else self.group_size
