"""Which implementation of an operation runs: a table of those that there are, and the choice by device and arguments."""

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
class Kernel:
    """A row of the table of kernels for GPUs.

    Attributes:
        operation: the package `pallas_kernels.<operation>`.
        implementation: the name by which it is chosen and reported.
        weight_format: of the weights, where the operation has kernels for several formats.
        min_rows, max_rows: rows of activations for which it is a candidate; None: any number.
        module: the module of the package that has it, if it is not called as the implementation is.
        fixed_order_rows: the maximum number of rows in `fixed_order`, from 1 on; 0: it is no candidate there. Callers divide more rows
            into parts (`rows_in_fixed_order`); one with `ANY` divides them itself.
    """

    operation: str
    implementation: str
    weight_format: str | None = None
    min_rows: int = 1
    max_rows: int | None = None
    module: str = ""
    fixed_order_rows: int = 0

    @property
    def module_name(self) -> str:
        return self.module or self.implementation

    def takes_rows(self, rows: int | None) -> bool:
        """Whether it is a candidate for that many rows; None: the operation does not count rows."""
        if in_fixed_order():
            return (rows or 1) <= self.fixed_order_rows
        return rows is None or (self.min_rows <= rows and (self.max_rows is None or rows <= self.max_rows))


ANY = 1 << 30  # number of rows
# The best come first. For rows that are missing here, XLA is faster (docs/kernels/matmul.md), or no kernel supports them.
KERNELS = (
    Kernel("append_attend", "mosaic_gpu", fixed_order_rows=ANY),
    Kernel("attention", "mosaic_gpu", fixed_order_rows=ANY),
    Kernel("attention", "mosaic_gpu", module="mosaic_shared"),
    Kernel("attention", "triton"),
    Kernel("flush", "mosaic_gpu"),
    Kernel("fused_layer", "mosaic_gpu", fixed_order_rows=8),
    Kernel("gather", "mosaic_gpu"),
    Kernel("matmul", "mosaic_gpu", "int4", 9, 64, module="mosaic_wide", fixed_order_rows=64),
    Kernel("matmul", "mosaic_gpu", "int4", 1, 16),
    Kernel("matmul", "triton", "int4", 1, 16),
    Kernel("matmul", "mosaic_gpu", "nested", 1, 64, module="mosaic_wide", fixed_order_rows=64),
    Kernel("matmul", "mosaic_gpu", "nested", 1, 8),
    Kernel("matmul", "triton", "nested", 1, 16),
    Kernel("matmul", "mosaic_int8", "int8", 1, 1, fixed_order_rows=16),
    Kernel("matmul", "mosaic_int8", "int8", 9, 16),
    Kernel("matmul", "mosaic_plain", "plain", 2, 64, fixed_order_rows=ANY),
    Kernel("norm", "mosaic_gpu", fixed_order_rows=ANY),
    Kernel("replaced_attention", "mosaic_gpu"),
    Kernel("rope_append", "mosaic_gpu", fixed_order_rows=ANY),
)
# Operations whose references call other operations, which a GPU has kernels for.
COMPOSED = ("append_attend", "fused_layer")


def kernels(operation: str, weight_format: str | None = None) -> tuple[Kernel, ...]:
    """The kernels of an operation for one format of weights, best first."""
    return tuple(kernel for kernel in KERNELS if (kernel.operation, kernel.weight_format) == (operation, weight_format))


def implementations(operation: str, weight_format: str | None = None) -> tuple[str, ...]:
    """The names of an operation's implementations for GPUs, best first."""
    return tuple(dict.fromkeys(kernel.implementation for kernel in kernels(operation, weight_format)))


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """The implementation that runs of an operation.

    Attributes:
        kernel: the operation.
        implementation: what runs.
        passed_over: pairs of a better implementation and the reason why it cannot run.
    """

    kernel: str
    implementation: str
    passed_over: tuple[tuple[str, str], ...] = ()


_seen: contextvars.ContextVar[list[KernelChoice] | None] = contextvars.ContextVar("_seen", default=None)


@contextlib.contextmanager
def watched() -> Iterator[list[KernelChoice]]:
    """Collects the choices that are made while programs are traced within the context, each once, in their order."""
    found: list[KernelChoice] = []
    token = _seen.set(found)
    try:
        yield found
    finally:
        _seen.reset(token)


_devices: contextvars.ContextVar[tuple[jax.Device, ...]] = contextvars.ContextVar("_devices", default=())


@contextlib.contextmanager
def on(*devices: jax.Device) -> Iterator[None]:
    """Kernels are chosen for these devices, which run a program together, while it is traced within the context; without devices, for the
    first that JAX has."""
    token = _devices.set(devices)
    try:
        yield
    finally:
        _devices.reset(token)


def devices() -> tuple[jax.Device, ...]:
    """The devices that are traced for, see `on`."""
    return _devices.get() or (jax.devices()[0],)


def device() -> jax.Device:
    """The first of `devices`, which are alike."""
    return devices()[0]


def platform() -> str:
    """The platform of the device that is traced for: "gpu", "cpu", ..."""
    traced_for = _devices.get()
    return traced_for[0].platform if traced_for else jax.default_backend()


class NoFixedOrder(NotImplementedError):
    """No kernel on this GPU computes an operation in a fixed order."""


_fixed_order: contextvars.ContextVar[bool] = contextvars.ContextVar("_fixed_order", default=False)


@contextlib.contextmanager
def fixed_order() -> Iterator[None]:
    """What is traced within the context gives a token the same bits whatever else a pass holds: sums are added up in an order that depends
    on the row's length alone; over a full-precision cache it changes at every multiple of `attention.support.PASS_SPAN` tokens.

    On a GPU "auto" chooses only kernels that do so; another implementation that is asked for by name may not. The reference keeps to it in
    attention alone, whose chunks of the cache then have one size and places that do not depend on the capacity. A function under `jax.jit`
    that was traced outside of the context, for arguments like these, is not traced again within it; what runs is then what was chosen
    outside.
    """
    token = _fixed_order.set(True)
    try:
        yield
    finally:
        _fixed_order.reset(token)


def in_fixed_order() -> bool:
    """Whether this is traced within `fixed_order`."""
    return _fixed_order.get()


def rows_in_fixed_order(operation: str, weight_format: str | None = None) -> int:
    """The maximum number of rows of one launch in `fixed_order`, or `ANY` outside of it and where no kernels are chosen."""
    if not in_fixed_order() or platform() != "gpu":
        return ANY
    return max(kernel.fixed_order_rows for kernel in kernels(operation, weight_format))


def choose(
    operation: str,
    implementation: Implementation,
    *args,
    weight_format: str | None = None,
    rows: int | None = None,
    slow_reference: bool = True,
    **settings,
) -> ModuleType:
    """The module of package `pallas_kernels.<operation>` to run, for the device that is traced for (see `on`).

    Modules are imported when they are considered. Each has the function of the operation, which its package documents, and a function
    `unsupported` that returns why it cannot run on the arguments, or None if it can. The reference supports everything and comes last.

    Args:
        operation: the name of the package.
        implementation: "auto", or the one to run.
        args, settings: what `unsupported` is given.
        weight_format: of the weights, see `Kernel`.
        rows: of activations, where the table of kernels has limits of rows.
        slow_reference: whether the reference on a GPU deserves a warning; otherwise the reasons are logged as information.

    Raises:
        ValueError: there is no such implementation.
        NotImplementedError: the implementation asked for does not support the device or the arguments; or no kernel does, and the results
            should be those of `fixed_order` (`NoFixedOrder`).
    """
    names, reasons = implementations(operation, weight_format), {}
    if implementation not in ("auto", *names, "reference"):
        raise ValueError(f"{operation}: no implementation {implementation!r}; there are {', '.join([*names, 'reference'])}")

    def chosen(name: str, module: ModuleType) -> ModuleType:
        choice, seen = KernelChoice(operation, name, tuple(reasons.items())), _seen.get()
        if seen is not None and choice not in seen:
            seen.append(choice)
        return module

    if implementation == "reference" or (implementation == "auto" and platform() != "gpu"):
        return chosen("reference", _module(operation, "reference"))
    for name in names if implementation == "auto" else [implementation]:
        if implementation == "auto" and (in_fixed_order() or not slow_reference) and not _of_rows(operation, name, weight_format, rows):
            continue
        module, reason = _supporting(operation, name, weight_format, rows, args, settings)
        if module is not None:
            return chosen(name, module)
        if implementation == name:
            raise NotImplementedError(f"{operation}: {name} {reason}")
        _log_once(logging.INFO, f"{operation}: {name} is passed over: it {reason}")
        reasons[name] = reason
    if in_fixed_order() and operation not in COMPOSED:
        why = "; ".join(f"{name} {reason}" for name, reason in reasons.items()) or "there is no such kernel"
        raise NoFixedOrder(f"{operation} in a fixed order: {why}")
    if slow_reference:
        why = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
        _log_once(logging.WARNING, f"{operation} runs in plain JAX, which is slow: {why}")
    return chosen("reference", _module(operation, "reference"))


def unsupported(
    operation: str, implementation: str, *args, weight_format: str | None = None, rows: int | None = None, **settings
) -> str | None:
    """Why an implementation of an operation cannot run on these arguments here, or None if it can. For the parameters see `choose`."""
    return None if implementation == "reference" else _supporting(operation, implementation, weight_format, rows, args, settings)[1]


def _supporting(
    operation: str, name: str, weight_format: str | None, rows: int | None, args: tuple, settings: dict
) -> tuple[ModuleType | None, str | None]:
    """The first module of an implementation that supports the arguments, or why the first one does not."""
    first = None
    own = [kernel for kernel in kernels(operation, weight_format) if kernel.implementation == name]
    for kernel in _of_rows(operation, name, weight_format, rows) or own:
        module = _module(operation, kernel.module_name)
        if not (reason := module.unsupported(*args, **settings)):
            return module, None
        first = first or reason
    return None, first


def _of_rows(operation: str, name: str, weight_format: str | None, rows: int | None) -> list[Kernel]:
    return [kernel for kernel in kernels(operation, weight_format) if kernel.implementation == name and kernel.takes_rows(rows)]


def _module(operation: str, name: str) -> ModuleType:
    return importlib.import_module(f"pallas_kernels.{operation}.{name}")


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
    """Multiprocessors of the device that is traced for, or of an H100 if that is no GPU."""
    return device().core_count if platform() == "gpu" else 132


def shared_memory() -> int:
    """Bytes of shared memory that a block may have on the device that is traced for, or on an H100 if that is no GPU."""
    capability = compute_capability() if platform() == "gpu" else 9.0
    return {8.0: 163, 8.7: 163, 9.0: 227, 10.0: 227}.get(capability, 99) * 1024


@functools.cache
def _log_once(level: int, message: str) -> None:
    log.log(level, message)
