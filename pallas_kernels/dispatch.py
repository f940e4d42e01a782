"""Chooses which implementation of a kernel runs: the one asked for, or the first that supports the device and the shapes."""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.util
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Literal

import jax

Implementation = Literal["auto", "reference", "mosaic_gpu", "triton"]

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel that was asked for, the implementation that runs, and why those before it do not: pairs of a name and a reason."""

    kernel: str
    implementation: str
    passed_over: tuple[tuple[str, str], ...] = ()


_seen: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("_seen", default=None)


@contextlib.contextmanager
def watched() -> Iterator[list[Choice]]:
    """The choices that are made within, by what is traced there; each once, in their order."""
    found: list[Choice] = []
    token = _seen.set(found)
    try:
        yield found
    finally:
        _seen.reset(token)


_devices: contextvars.ContextVar[tuple[jax.Device, ...]] = contextvars.ContextVar("_devices", default=())


@contextlib.contextmanager
def on(*devices: jax.Device) -> Iterator[None]:
    """What is traced within runs on these devices, on all of them at once. None given: on the first that JAX has."""
    token = _devices.set(devices)
    try:
        yield
    finally:
        _devices.reset(token)


def devices() -> tuple[jax.Device, ...]:
    """The devices that are traced for, see `on`."""
    return _devices.get() or (jax.devices()[0],)


def device() -> jax.Device:
    """The first of them: they are alike."""
    return devices()[0]


def platform() -> str:
    """The platform of the device that is traced for: "gpu", "cpu", ..."""
    traced_for = _devices.get()
    return traced_for[0].platform if traced_for else jax.default_backend()


def choose(
    kernel: str, candidates: tuple[str, ...], implementation: Implementation, *args, slow_reference: bool = True, **settings
) -> ModuleType:
    """The module of package `pallas_kernels.<kernel>` to run, for the device that is traced for (see `on`).

    candidates: its modules for GPUs, best first, imported when they are asked for. Each has a function `unsupported` that says why
    it cannot run on these arguments, or None if it can. The reference supports everything and comes last. slow_reference: whether
    running it on a GPU deserves a warning; else the reasons are logged as information.
    Raises ValueError where the implementation asked for is unknown or unsupported.
    """
    reasons: list[tuple[str, str]] = []

    def module(name: str) -> ModuleType:
        return importlib.import_module(f"pallas_kernels.{kernel}.{name}")

    def chosen(name: str) -> ModuleType:
        choice, seen = Choice(kernel, name, tuple(reasons)), _seen.get()
        if seen is not None and choice not in seen:
            seen.append(choice)
        return module(name)

    if implementation not in ("auto", *candidates, "reference"):
        raise ValueError(f"{kernel}: no implementation {implementation!r}; there are {', '.join([*candidates, 'reference'])}")
    if implementation == "auto" and platform() == "gpu":
        for name in candidates:
            if not (reason := module(name).unsupported(*args, **settings)):
                return chosen(name)
            _log_once(logging.INFO, f"{kernel}: {name} is passed over: it {reason}")
            reasons.append((name, reason))
        if slow_reference:
            why = "; ".join(f"{name} {reason}" for name, reason in reasons)
            _log_once(logging.WARNING, f"{kernel} runs in plain JAX, which is slow: {why}")
    elif implementation in candidates:
        if reason := module(implementation).unsupported(*args, **settings):
            raise ValueError(f"{kernel}: {implementation} {reason}")
        return chosen(implementation)
    return chosen("reference")


def compute_capability() -> float:
    """The compute capability of the device that is traced for: 9.0 is NVIDIA Hopper; 0 where it has none."""
    # AMD's names an architecture, such as gfx90a.
    text = str(getattr(device(), "compute_capability", ""))
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def no_mosaic_gpu() -> str | None:
    """Why kernels in Pallas Mosaic GPU for Hopper cannot run here, or None."""
    if jax.__version_info__ < (0, 11):
        return f"needs jax 0.11 or newer, not {jax.__version__}"
    return None if compute_capability() == 9.0 else "needs an NVIDIA Hopper GPU"


def no_triton() -> str | None:
    """Why kernels in Triton cannot run here, or None."""
    if not (importlib.util.find_spec("jax_triton") and importlib.util.find_spec("triton")):
        return "needs jax-triton, which is not installed"
    return None if compute_capability() >= 8 else "needs an NVIDIA GPU of compute capability 8.0 or newer"


def multiprocessors() -> int:
    """Multiprocessors of the device that is traced for, or an H100's where that is no GPU: what is compiled there is for another one."""
    return device().core_count if platform() == "gpu" else 132


def shared_memory() -> int:
    """Bytes of shared memory that a block may have on the device that is traced for, or on an H100 where that is no GPU."""
    capability = compute_capability() if platform() == "gpu" else 9.0
    return {8.0: 163, 8.7: 163, 9.0: 227, 10.0: 227}.get(capability, 99) * 1024


@functools.cache
def _log_once(level: int, message: str) -> None:
    log.log(level, message)
