"""Where the weights of a model go: to the default device, or divided over a mesh (sharding.py)."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama, Weight
from qspec_jax.models.sharding import MODEL, kv_copies, normal, repeated, weight_sharding


class Placement:
    """The places of the weights of a model with this configuration. mesh: None is the default device.

    Raises InputError as `kv_copies` does.
    """

    def __init__(self, config: LlamaConfig, mesh: Mesh | None):
        self.config, self.mesh = config, None if mesh is None else normal(mesh)
        self.copies = 1 if mesh is None else kv_copies(config, self.mesh)

    def model(self, make: Callable[[str, tuple[int, ...]], Weight]) -> Llama:
        """The model. make: as of `Llama`; it returns weights that `put` or `spread` has placed."""
        if self.mesh is None:
            return Llama(self.config, make)
        return Llama(self.config, make, axis=MODEL, kv_copies=self.copies)

    def stored(self, path: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        """Where an array of the weight at a path goes that is read from a converted directory, before `spread`: what is to be repeated is
        whole on all devices until then."""
        if self._is_repeated(path):
            return NamedSharding(self.mesh, PartitionSpec())
        return weight_sharding(path, shape, self.mesh)

    def bytes_on_device(self, shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> int:
        """What the weights of these shapes, by their paths, take on each device."""
        of = lambda path, shape: (shape[0] * (self.copies if self._is_repeated(path) else 1), *shape[1:])
        held = lambda path, shape: shape if self.mesh is None else weight_sharding(path, shape, self.mesh).shard_shape(shape)
        return sum(math.prod(held(path, of(path, shape))) for path, shape in shapes.items()) * itemsize

    def put(self, path: str, weight: np.ndarray) -> jax.Array:
        """The weight at a path of the model, from the host to where it belongs; each device is given its part alone."""
        if self.mesh is None:
            return jnp.asarray(weight)
        if self._is_repeated(path):
            weight = repeated(weight, self.config.num_kv_heads, self.copies)
        return jax.make_array_from_callback(weight.shape, weight_sharding(path, weight.shape, self.mesh), lambda part: weight[part])

    def spread(self, path: str, weight: Weight) -> Weight:
        """The weight at a path of the model, in any format, as the model needs it: its KV heads repeated where they are to be on several
        devices each. It lies where `stored` says."""
        return jax.tree.map(lambda x: self._spread(path, x), weight) if self._is_repeated(path) else weight

    def _spread(self, path: str, x: jax.Array) -> jax.Array:
        whole = _repeated(x, self.config.num_kv_heads, self.copies)
        return jax.device_put(whole, weight_sharding(path, whole.shape, self.mesh))

    def _is_repeated(self, path: str) -> bool:
        return self.copies > 1 and not {"k_proj", "v_proj"}.isdisjoint(path.split("."))


_repeated = jax.jit(repeated, static_argnums=(1, 2))
