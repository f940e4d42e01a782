"""Arrays in host memory: what is done with them, and which layers' arrays are there.

XLA copies such an array to the device and back behind computation. Whatever else is done with it becomes, on a GPU, a kernel that reads or
writes host memory where it lies, at the speed of the bus; on a CPU it is as anywhere.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from qspec_jax.errors import InputError

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@dataclasses.dataclass(frozen=True)
class HostSettings:
    """resident: the share of the layers, from 0 to 1, of which all is on the device. They are spread evenly, so that others are copied
    while these are computed."""

    resident: float = 0.0

    in_host_memory: ClassVar[bool] = True

    def __post_init__(self):
        if not 0 <= self.resident <= 1:
            raise InputError(f"cache resident {self.resident:g} should be from 0 to 1, a share of the layers")

    def streamed(self, layers: int) -> tuple[bool, ...]:
        """Of each of so many layers, whether a part of it is in host memory."""
        others = layers - round(self.resident * layers)
        return tuple((i + 1) * others // layers > i * others // layers for i in range(layers))


def in_host(x: Array) -> bool:
    return jax.typeof(x).memory_space == HOST


def to_host(x: Array) -> Array:
    return jax.device_put(x, HOST)


def to_device(x: Array) -> Array:
    return jax.device_put(x, DEVICE)


def written(held: Array, new: Array, at: Int[Array, "B"]) -> Array:
    """The array, which is in host memory, with new[b] in place of as many entries of axis 2 from at[b] on. new: on the device."""
    zero = at[0] * 0
    for b in range(at.shape[0]):  # for a scatter into host memory goes wrong on a GPU (openxla/xla#34565)
        held = lax.dynamic_update_slice(held, to_host(new[b : b + 1]), (zero + b, zero, at[b], *(zero,) * (held.ndim - 3)))
    return held


def taken(held: Float[Array, "B K S H"], rows: Int[Array, "B K T"]) -> Float[Array, "B K T H"]:
    """These rows of each head, on the device, of an array in host memory; a number beyond either end stands for the row at that end."""
    at = to_host(jnp.clip(rows, 0, held.shape[2] - 1))
    take = jax.vmap(jax.vmap(lambda held, at: held.at[at].get(mode="promise_in_bounds")))
    return to_device(take(held, at))
