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
# Names of the axes of each weight, by the part of its path that identifies it: [out, in], or [experts, in, out] of all experts of a layer;
# and of norms over all heads. Other norms and routers are whole on every device.
AXES: dict[str, tuple[str | None, ...]] = {
    "embedding": ("vocab", None),
    "head": ("vocab", None),
    "q_proj": ("heads", None),
    "k_proj": ("kv_heads", None),
    "v_proj": ("kv_heads", None),
    "q_width_norm": ("heads", None),
    "k_width_norm": ("kv_heads", None),
    "o_proj": (None, "heads"),
    "gate_proj": ("ff", None),
    "up_proj": ("ff", None),
    "down_proj": (None, "ff"),
    "gate": (None, None, "ff"),
    "up": (None, None, "ff"),
    "down": (None, "ff", None),
}


def model_mesh(devices: list[jax.Device]) -> Mesh:
    """A mesh of these devices over which a model can be divided."""
    return Mesh(np.array(devices), (MODEL,), axis_types=(AxisType.Auto,))


def normal(mesh: Mesh) -> Mesh:
    """The mesh with the kind of axis that `model_mesh` gives it; a mesh with other axes than `MODEL` as it is."""
    return model_mesh(list(mesh.devices.flat)) if mesh.axis_names == (MODEL,) else mesh


def kv_copies(config: LlamaConfig, mesh: Mesh) -> int:
    """The number of devices of a mesh that have a copy of the same KV head: more than one if there are fewer heads than devices.

    Raises InputError for a mesh with another axis than `MODEL`, and if its size does not divide the heads or the columns of MLPs.
    """
    if mesh.axis_names != (MODEL,):
        axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
        raise InputError(f"the mesh has axes {axes}; a model is divided over a mesh of one axis, {MODEL}")
    devices, kv_heads = mesh.size, config.num_kv_heads
    columns = {f"columns of {name}": size for name, size in config.mlp_sizes.items()}
    for name, size in {"attention heads": config.num_heads, **columns}.items():
        if size % devices:
            raise InputError(f"{devices} devices do not divide the model's {size} {name} evenly; {_numbers_of_devices(config)} do")
    if kv_heads % devices and devices % kv_heads:
        text = f"{devices} devices neither divide the model's {kv_heads} KV heads nor hold them equally often"
        raise InputError(f"{text}; {_numbers_of_devices(config)} do")
    return max(1, devices // kv_heads)


def _numbers_of_devices(config: LlamaConfig) -> str:
    """The numbers of devices that a model can be divided over, as a text."""

    def fits(n: int) -> bool:
        divides = all(size % n == 0 for size in (config.num_heads, *config.mlp_sizes.values()))
        return divides and (config.num_kv_heads % n == 0 or n % config.num_kv_heads == 0)

    return ", ".join(str(n) for n in range(1, min(config.num_heads, 64) + 1) if fits(n))


def weight_sharding(path: str, shape: tuple[int, ...], mesh: Mesh | None) -> jax.sharding.Sharding:
    """The sharding of an array of the weight at a path of the model: the default device, or over a mesh by `AXES`.

    A vocabulary that the number of devices does not divide is whole on all of them.

    shape: of the whole array; its first two axes, if it has two, are outputs and inputs, in any format of weights but that of experts.
    """
    if mesh is None:
        return jnp.zeros(()).sharding
    names = next((axes for part, axes in AXES.items() if part in path.split(".")), (None, None))
    if path.endswith(".bias"):
        names = names[:1]
    divided = (name is not None and (name != "vocab" or size % mesh.size == 0) for name, size in zip(names, shape))
    return NamedSharding(mesh, PartitionSpec(*(MODEL if axis else None for axis in divided)))


def repeated(x: Any, heads: int, copies: int) -> Any:
    """An array, of numpy or JAX, whose rows are those of `heads` heads, with each head `copies` times in succession."""
    of_heads = x.reshape(heads, -1, *x.shape[1:])
    return of_heads.repeat(copies, 0).reshape(-1, *x.shape[1:])


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that the model in a tree of arrays, or shapes, is divided over; None for a model on one device."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
    return next((each.mesh for each in shardings if isinstance(each, NamedSharding) and each.mesh.axis_names == (MODEL,)), None)


def on_each_device(function: Callable, mesh: Mesh, args: tuple) -> tuple[Callable, Any]:
    """Makes a function run on all devices of a mesh at once.

    Args:
        function: takes arrays in any trees; on each device it gets the parts that are there.
        mesh: the devices.
        args: the arrays or their shapes. Those without a sharding over this mesh are whole on all devices.

    Returns:
        The function of whole arrays, and the shapes of its results with their shardings. A result that is smaller on a device than with
        the whole arguments is divided. Any other is whole, and the function has to return the same on all devices.
    """
    leaves, tree = jax.tree.flatten(args)
    specs = tuple(_spec(leaf, mesh) for leaf in leaves)
    whole, alone = PartitionSpec(), Mesh(mesh.devices.reshape(-1)[:1], (MODEL,))
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def over(mesh: Mesh, specs: tuple, out_specs: Any, returned: Callable = lambda out: out) -> Callable:
        parts = [jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype) for spec, x in zip(specs, shapes)]

        def run(*arrays: Array) -> Any:
            return returned(function(*jax.tree.unflatten(tree, _with_empty(arrays, parts))))

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
    """The items, one for each array of these shapes, whose array has elements.

    XLA for GPUs ends the process if an array without any goes into a `shard_map` or comes out of it (jax 0.11).
    """
    return tuple(item for item, x in zip(items, shapes, strict=True) if x.size)


def _with_empty(arrays: Sequence[Array], shapes: Sequence[jax.ShapeDtypeStruct]) -> list[Array]:
    """Arrays of all of these shapes. arrays: those that have elements."""
    given = iter(arrays)
    return [next(given) if x.size else jnp.zeros(x.shape, x.dtype) for x in shapes]


def divided_over(mesh: Mesh | None, function: Callable, *, donate: int | None = None) -> Callable:
    """The function of arrays, jitted for the parts on each device of a mesh; for None, the function itself.

    donate: the index of an argument that the function may consume, which a function for None has to say itself.
    """
    return function if mesh is None else functools.partial(_call, function, mesh, donate)


def _call(function: Callable, mesh: Mesh, donate: int | None, *args: Any) -> Any:
    leaves, tree = jax.tree.flatten(args)
    specs = tuple(_spec(leaf, mesh) for leaf in leaves)
    return _jitted(function, mesh, donate, tree, specs, tuple((x.shape, x.dtype) for x in leaves))(*args)


@functools.lru_cache(maxsize=64)
def _jitted(function: Callable, mesh: Mesh, donate: int | None, tree: Any, specs: tuple, shapes: tuple) -> Callable:
    placed = [jax.ShapeDtypeStruct(*each, sharding=NamedSharding(mesh, spec)) for each, spec in zip(shapes, specs)]
    run, returned = on_each_device(function, mesh, jax.tree.unflatten(tree, placed))
    return jax.jit(run, out_shardings=shardings_of(returned), donate_argnums=donate)


def shardings_of(shapes: Any) -> Any:
    """The shardings of a tree of shapes."""
    return jax.tree.map(lambda shape: shape.sharding, shapes)


def _spec(leaf: Any, mesh: Mesh) -> PartitionSpec:
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) and sharding.mesh == mesh else PartitionSpec()


def _out_spec(one: tuple[int, ...], each: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec(*(None if size == part else MODEL for size, part in zip(one, each)))
