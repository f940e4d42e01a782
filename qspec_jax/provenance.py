"""Where figures come from: the device, the date and the packages that every report of a measurement names."""

import dataclasses
import datetime
import importlib.metadata
import platform
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "torch", "transformers", "flashinfer-python", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


@dataclasses.dataclass(frozen=True)
class Run:
    """The device that something was measured on, the day (ISO 8601), and the versions of the packages that took part."""

    device: str
    date: str
    versions: dict[str, str]


def this_run() -> dict[str, Any]:
    """The fields of `Run`, here and now."""
    device = jax.devices()[0]
    versions = {"python": platform.python_version(), "platform": " ".join(device.client.platform_version.split())}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"device": device.device_kind, "date": datetime.date.today().isoformat(), "versions": versions}
