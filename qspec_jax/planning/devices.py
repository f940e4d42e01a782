"""Devices to plan for: what their datasheets say, and what was measured on them.

Peaks are NVIDIA's published ones, dense (without sparsity), bfloat16 with accumulation in float32: the datasheets of the H200 SXM, H100
SXM, A100 SXM 80 GB, RTX A6000, GeForce RTX 4090 (Ada architecture whitepaper), L40S, and Jetson AGX Orin 64 GB (technical brief).
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

from qspec_jax.errors import InputError
from qspec_jax.files import read_json

# The share of its peak bandwidth that a device reads at: 0.943 on the H100 and 0.954 on the H200, and assumed for other devices.
READ_SHARE = 0.94
# The share of PCIe's peak bandwidth, 64 GB/s in version 5.0, that copies from host memory reach: 54 GB/s on the H200, and assumed for other
# devices.
HOST_SHARE = 54 / 64
KERNELS = ("mosaic_gpu", "triton")
MOST = 1e9  # of any field: what is larger is a mistake in its unit


@dataclasses.dataclass(frozen=True)
class Device:
    """A device.

    Attributes:
        name: as people call it.
        bandwidth_gb_per_s: of its memory, at its peak.
        memory_gb: gigabytes of 10^9 bytes.
        bf16_tflops: the dense peak of the tensor cores.
        multiprocessors, clock_ghz: how fast kernels do all that tensor cores do not, such as unpacking codes.
        read_gb_per_s: the bandwidth that reading reaches; 0 where it was not measured.
        kernels: those that run there, "mosaic_gpu" (Hopper) or "triton".
        shared_memory: whether the processor's memory is the same.
        host_gb_per_s: the bandwidth at which the processor's memory is copied to the device, of PCIe 4.0 unless given.
        kind: what JAX calls the device, by which tuned configurations are found.
    """

    name: str
    bandwidth_gb_per_s: float
    memory_gb: float
    bf16_tflops: float
    multiprocessors: int
    clock_ghz: float
    read_gb_per_s: float = 0.0
    kernels: str = "triton"
    shared_memory: bool = False
    kind: str = ""
    host_gb_per_s: float = HOST_SHARE * 32

    @property
    def measured(self) -> bool:
        """Whether times on this device rest on measurements there."""
        return self.read_gb_per_s > 0

    @property
    def read_bytes_per_s(self) -> float:
        return 1e9 * (self.read_gb_per_s or READ_SHARE * self.bandwidth_gb_per_s)

    @property
    def host_bytes_per_s(self) -> float:
        """The bandwidth of copies from host memory. In memory that is shared a copy reads and writes."""
        return self.read_bytes_per_s / 2 if self.shared_memory else 1e9 * (self.host_gb_per_s or HOST_SHARE * 32)

    @property
    def flops_per_s(self) -> float:
        return 1e12 * self.bf16_tflops

    @property
    def ridge(self) -> float:
        """The arithmetic intensity from which on bfloat16 is bound by FLOPs and not by memory, in FLOPs per byte."""
        return self.flops_per_s / (1e9 * self.bandwidth_gb_per_s)

    @property
    def reserved_bytes(self) -> float:
        """Memory that programs do not get: the driver's, and on shared memory the operating system's."""
        return 8e9 if self.shared_memory else 1e9


DEVICES = {
    "h200": Device("H200", 4800, 141, 989, 132, 1.98, 4581, kernels="mosaic_gpu", kind="NVIDIA H200", host_gb_per_s=54),
    "h100": Device("H100", 3350, 80, 989, 132, 1.98, 3160, kernels="mosaic_gpu", kind="NVIDIA H100 80GB HBM3", host_gb_per_s=54),
    "a100": Device("A100", 2039, 80, 312, 108, 1.41),
    "a6000": Device("RTX A6000", 768, 48, 154.8, 84, 1.80),
    "rtx4090": Device("RTX 4090", 1008, 24, 165.2, 128, 2.52),
    "l40s": Device("L40S", 864, 48, 362, 142, 2.52),
    "orin": Device("Jetson AGX Orin", 204.8, 64, 42.5, 16, 1.30, shared_memory=True),
}


def stored_device(kind: str) -> Device | None:
    """The device of `DEVICES` for JAX's name of a kind: the one whose name is a part of it, as "A100" is of "NVIDIA A100-SXM4-80GB". None
    for any other, a CPU among them."""
    for device in DEVICES.values():
        if re.search(rf"(?<!\w){re.escape(device.name)}(?!\w)", kind):
            return device
    return None


def find_device(text: str) -> Device:
    """The device of a name in `DEVICES`, or that of a JSON file with the fields of `Device`.

    Raises InputError for an unknown name, a file that cannot be read, and a field that is missing, unknown or senseless, naming it.
    """
    if found := DEVICES.get(text.lower()):
        return found
    path = Path(text)
    if not path.exists():
        raise InputError(f"no device {text!r}; there are {', '.join(DEVICES)}, or give a JSON file with the fields of one")
    raw = read_json(path)
    fields = {field.name: field for field in dataclasses.fields(Device)}
    if unknown := [name for name in raw if name not in fields]:
        raise InputError(f"{path}: {unknown[0]} is no field of a device; there are {', '.join(fields)}")
    if missing := [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in raw]:
        raise InputError(f"{path}: {missing[0]} is missing")
    for name, value in raw.items():
        _check(path, name, fields[name].type, value, optional=fields[name].default is not dataclasses.MISSING)
    return Device(**raw)


def _check(path: Path, name: str, kind: type, value: Any, *, optional: bool) -> None:
    """Raises InputError for a value that the field of a device cannot have."""
    if kind is str:
        if not isinstance(value, str):
            raise InputError(f"{path}: {name} is {value!r}, should be a text")
        if name == "kernels" and value not in KERNELS:
            raise InputError(f"{path}: kernels is {value!r}, should be {' or '.join(KERNELS)}")
    elif kind is bool:
        if not isinstance(value, bool):
            raise InputError(f"{path}: {name} is {value!r}, not true or false")
    else:
        number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not number or not 0 <= value < MOST or (value == 0 and not optional):
            what = "a whole number" if kind is int else "a number"
            raise InputError(f"{path}: {name} is {value!r}, should be {what} of more than 0")
