"""Frozen dataclasses that JAX takes apart."""

import dataclasses

import jax


def pytree(*static: str):
    """A decorator: makes a class a frozen dataclass registered with JAX; the fields named are static."""

    def register(cls):
        cls = dataclasses.dataclass(frozen=True)(cls)
        data = [f.name for f in dataclasses.fields(cls) if f.name not in static]
        return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=list(static))

    return register
