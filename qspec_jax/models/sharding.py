"""Tensor parallelism: how weights are divided over the devices of a mesh, and functions that run on all of them at once.

A function runs on every device, with the weights and the part of the cache there: some attention heads, some columns of an MLP, a part of
the vocabulary. Communication is explicit, at the places where the model needs it (`Linear`, `Block.until`, `Llama.embed`, `Llama.logits`),
so nothing is gathered by accident. Source: Megatron-LM (arXiv 1909.08053), section 3.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig

MODEL = "model"  # the axis of a mesh over which a model is divided
# Names of the axes of each weight [out, in], by the part of its path that identifies it; norms are whole on every device.
AXES: dict[str, tuple[str | None, str | None]] = {
    "embedding": ("vocab", None),
    "head": ("vocab", None),
    "q_proj": ("heads", None),
    "k_proj": ("kv_heads", None),
    "v_proj": ("kv_heads", None),
    "o_proj": (None, "heads"),
    "gate_proj": ("ff", None),
    "up_proj": ("ff", None),
    "down_proj": (None, "ff"),
}


def model_mesh(devices: list[jax.Device]) -> Mesh:
    """A mesh of these devices over which a model can be divided."""
    return Mesh(np.array(devices), (MODEL,), axis_types=(AxisType.Auto,))


def normal(mesh: Mesh) -> Mesh:
    """The mesh with the kind of axis that `model_mesh` gives it; a mesh with other axes than `MODEL` as it is."""
    return model_mesh(list(mesh.devices.flat)) if mesh.axis_names == (MODEL,) else mesh


def kv_copies(config: LlamaConfig, mesh: Mesh) -> int:
    """The number of devices of a mesh that have a copy of the same KV head: more than one if there are fewer heads than devices.

    Raises InputError for a mesh with another axis than `MODEL`, and if its size does not divide the heads or the columns of the MLP.
    """
    if mesh.axis_names != (MODEL,):
        axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
        raise InputError(f"the mesh has axes {axes}; a model is divided over a mesh of one axis, {MODEL}")
    devices, kv_heads = mesh.size, config.num_kv_heads
    for name, size in (("attention heads", config.num_heads), ("columns of the MLP", config.intermediate_size)):
        if size % devices:
            raise InputError(f"{devices} devices do not divide the model's {size} {name} evenly; {_numbers_of_devices(config)} do")
    if kv_heads % devices and devices % kv_heads:
        text = f"{devices} devices neither divide the model's {kv_heads} KV heads nor hold them equally often"
        raise InputError(f"{text}; {_numbers_of_devices(config)} do")
    return max(1, devices // kv_heads)


def _numbers_of_devices(config: LlamaConfig) -> str:
    """The numbers of devices that a model can be divided over, as a text."""

    def fits(n: int) -> bool:
        divides = config.num_heads % n == 0 and config.intermediate_size % n == 0
        return divides and (config.num_kv_heads % n == 0 or n % config.num_kv_heads == 0)

    return ", ".join(str(n) for n in range(1, min(config.num_heads, 64) + 1) if fits(n))


def weight_sharding(path: str, shape: tuple[int, ...], mesh: Mesh | None) -> jax.sharding.Sharding:
    """Where an array of the weight at a path of the model goes: to the default device, or over a mesh by `AXES`.

    shape: the array's, as a whole; its first two axes, if it has so many, are outputs and inputs, in any format of weights. A vocabulary
    that the devices do not divide evenly is whole on all of them.
    """
    if mesh is None:
        return jnp.zeros(()).sharding
    names = next((axes for part, axes in AXES.items() if part in path.split(".")), (None, None))
    if path.endswith(".bias"):
        names = names[:1]
    divides = lambda name, size: name is not None and (name != "vocab" or size % mesh.size == 0)
    return NamedSharding(mesh, PartitionSpec(*(MODEL if divides(name, size) else None for name, size in zip(names, shape))))


def repeated(x: Any, heads: int, copies: int) -> Any:
    """An array whose rows are those of so many heads, of numpy or JAX, with each head so many times, one after the other."""
    of_heads = x.reshape(heads, -1, *x.shape[1:])
    return of_heads.repeat(copies, 0).reshape(-1, *x.shape[1:])


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that the model in a tree of arrays, or of shapes, is divided over; None where it is on one device."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
    return next((each.mesh for each in shardings if isinstance(each, NamedSharding) and each.mesh.axis_names == (MODEL,)), None)


def on_each_device(function: Callable, mesh: Mesh, args: tuple) -> tuple[Callable, Any]:
    """The function as it runs on all devices of a mesh at once, and the shapes of what it then returns, with their shardings.

    function: of arrays in any trees; it is given what of them lies on a device. args: arrays or their shapes, of which those without a
    sharding over this mesh are whole on all devices. What it returns is divided where it comes out smaller on a device than it would be
    with all of the arguments; else it is whole, and the function has to see to it that all devices come to the same.
    """
    leaves, tree = jax.tree.flatten(args)
    specs = tuple(_spec(leaf, mesh) for leaf in leaves)
    whole, alone = PartitionSpec(), Mesh(mesh.devices.reshape(-1)[:1], (MODEL,))
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def over(mesh: Mesh, specs: tuple, out_specs: Any, returned: Callable = lambda out: out) -> Callable:
        parts = [jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype) for spec, x in zip(specs, shapes)]
        run = lambda *arrays: returned(function(*jax.tree.unflatten(tree, _with_empty(arrays, parts))))
        # `jit` keeps constants inside. Otherwise JAX passes them to the `shard_map` as arguments, those without elements too.
        return jax.shard_map(jax.jit(run), mesh=mesh, in_specs=_without_empty(specs, shapes), out_specs=out_specs, check_vma=False)

    with_elements = _without_empty(shapes, shapes)
    on_one, out_tree = jax.tree.flatten(jax.eval_shape(over(alone, (whole,) * len(specs), whole), *with_elements))
    on_each = jax.tree.leaves(jax.eval_shape(over(mesh, specs, whole), *with_elements))
    out_specs = tuple(_out_spec(one.shape, each.shape) for one, each in zip(on_one, on_each, strict=True))
    run = over(mesh, specs, _without_empty(out_specs, on_one), returned=lambda out: _without_empty(jax.tree.leaves(out), on_one))
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)) for x, spec in zip(on_one, out_specs)]

    def on_all(*args: Any) -> Any:
        return jax.tree.unflatten(out_tree, _with_empty(run(*_without_empty(jax.tree.leaves(args), shapes)), on_one))

    return on_all, jax.tree.unflatten(out_tree, placed)


def _without_empty(items: Sequence[Any], shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple:
    """Those of the items, one for each array of these shapes, whose array has elements: XLA for GPUs ends the process where an array
    without any goes into a `shard_map` or comes out of it (jax 0.11)."""
    return tuple(item for item, x in zip(items, shapes, strict=True) if x.size)


def _with_empty(arrays: Sequence[Array], shapes: Sequence[jax.ShapeDtypeStruct]) -> list[Array]:
    """Arrays of all of these shapes. arrays: those of them that have elements."""
    given = iter(arrays)
    return [next(given) if x.size else jnp.zeros(x.shape, x.dtype) for x in shapes]


def divided_over(mesh: Mesh | None, function: Callable) -> Callable:
    """The function of arrays, jitted for what lies on each device of a mesh; itself for None."""
    return function if mesh is None else functools.partial(_call, function, mesh)


def _call(function: Callable, mesh: Mesh, *args: Array) -> Any:
    specs = tuple(_spec(leaf, mesh) for leaf in jax.tree.leaves(args))
    return _jitted(function, mesh, jax.tree.structure(args), specs, tuple((x.shape, x.dtype) for x in jax.tree.leaves(args)))(*args)


@functools.lru_cache(maxsize=64)
def _jitted(function: Callable, mesh: Mesh, tree: Any, specs: tuple, shapes: tuple) -> Callable:
    placed = [jax.ShapeDtypeStruct(*each, sharding=NamedSharding(mesh, spec)) for each, spec in zip(shapes, specs)]
    run, returned = on_each_device(function, mesh, jax.tree.unflatten(tree, placed))
    return jax.jit(run, out_shardings=shardings_of(returned))


def shardings_of(shapes: Any) -> Any:
    """Where arrays of these shapes, a tree, are to lie."""
    return jax.tree.map(lambda shape: shape.sharding, shapes)


def _spec(leaf: Any, mesh: Mesh) -> PartitionSpec:
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) and sharding.mesh == mesh else PartitionSpec()


def _out_spec(one: tuple[int, ...], each: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec(*(None if size == part else MODEL for size, part in zip(one, each)))
