"""A plugin of pytest (`make test-shapes`): every call of the library checks that arrays have the shapes and dtypes of its signature."""

import inspect
from collections.abc import Callable, Iterator
from types import EllipsisType, NoneType
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook

PLAIN = (NoneType, EllipsisType, ..., bool, int)


def checked(function: Callable) -> Callable:
    """The function, which checks annotations of arrays, and of tuples, lists and alternatives of arrays; others are static analysis's.

    Fields of a pytree are not checked: JAX makes pytrees of anything, such as of an array's shape or of a batch of arrays.
    """
    if not inspect.isfunction(function) or function.__name__ == "__init__":
        return function
    for name, hint in function.__annotations__.items():
        kinds = list(_kinds(hint))
        if not any(map(_is_array, kinds)) or not all(_is_array(kind) or kind in PLAIN for kind in kinds):
            function.__annotations__[name] = Any
    return beartype(function)


def _kinds(hint: Any) -> Iterator[Any]:
    if parts := get_args(hint):
        for part in parts:
            yield from _kinds(part)
    else:
        yield hint


def _is_array(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, AbstractArray)


install_import_hook(["qspec_jax", "pallas_kernels"], "checked_shapes.checked")
