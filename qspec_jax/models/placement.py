"""The devices of a model's weights: the default device, or a mesh over which they are divided (sharding.py)."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qspec_jax.models.block import Weight
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama
from qspec_jax.models.sharding import MODEL, kv_copies, normal, repeated, weight_sharding


class Placement:
    """The devices of the weights of a model with this configuration.

    mesh: None is the default device. Raises InputError as `kv_copies` does.
    """

    def __init__(self, config: LlamaConfig, mesh: Mesh | None):
        self.config, self.mesh = config, None if mesh is None else normal(mesh)
        self.copies = 1 if mesh is None else kv_copies(config, self.mesh)

    def model(self, make: Callable[[str, tuple[int, ...]], Weight]) -> Llama:
        """The model. make: see `Llama`; it returns weights that `put` or `spread` has placed."""
        if self.mesh is None:
            return Llama(self.config, make)
        return Llama(self.config, make, axis=MODEL, kv_copies=self.copies)

    def stored(self, path: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        """The sharding of an array of a weight that is read from a converted directory, before `spread`.

        Weights that `spread` repeats are whole on all devices.
        """
        if self._is_repeated(path):
            return NamedSharding(self.mesh, PartitionSpec())
        return weight_sharding(path, shape, self.mesh)

    def bytes_on_device(self, shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> int:
        """Bytes of weights of these shapes, by their paths, on each device."""

        def on_device(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
            if self.mesh is None:
                return shape
            whole = (shape[0] * self.copies, *shape[1:]) if self._is_repeated(path) else shape
            return weight_sharding(path, whole, self.mesh).shard_shape(whole)

        return sum(math.prod(on_device(path, shape)) for path, shape in shapes.items()) * itemsize

    def put(self, path: str, weight: np.ndarray) -> jax.Array:
        """Puts a weight of the model, by its path, from the host onto its devices; each gets its part alone."""
        if self.mesh is None:
            return jnp.asarray(weight)
        if self._is_repeated(path):
            weight = repeated(weight, self.config.num_kv_heads, self.copies)
        return jax.make_array_from_callback(weight.shape, weight_sharding(path, weight.shape, self.mesh), lambda part: weight[part])

    def spread(self, path: str, weight: Weight) -> Weight:
        """The weight at a path of the model, in any format, on the devices that need it: KV heads that several devices have are repeated.

        weight: with the sharding of `stored`.
        """
        return jax.tree.map(lambda x: self._spread(path, x), weight) if self._is_repeated(path) else weight

    def _spread(self, path: str, x: jax.Array) -> jax.Array:
        whole = _repeated(x, self.config.num_kv_heads, self.copies)
        return jax.device_put(whole, weight_sharding(path, whole.shape, self.mesh))

    def _is_repeated(self, path: str) -> bool:
        return self.copies > 1 and not {"k_proj", "v_proj", "k_width_norm"}.isdisjoint(path.split("."))


_repeated = jax.jit(repeated, static_argnums=(1, 2))
