"""Where the weights of a model go: to the default device, or divided over a mesh (sharding.py)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama, Weight
from qspec_jax.models.sharding import MODEL, kv_copies, repeated, weight_sharding


class Placement:
    """The places of the weights of a model with this configuration. mesh: None is the default device.

    Raises InputError as `kv_copies` does.
    """

    def __init__(self, config: LlamaConfig, mesh: Mesh | None):
        self.config, self.mesh = config, mesh
        self.copies = 1 if mesh is None else kv_copies(config, mesh)

    def model(self, make: Callable[[str, tuple[int, ...]], Weight]) -> Llama:
        """The model. make: as of `Llama`; it returns weights that `put` or `spread` has placed."""
        if self.mesh is None:
            return Llama(self.config, make)
        return Llama(self.config, make, axis=MODEL, kv_copies=self.copies)

    def put(self, path: str, weight: np.ndarray) -> jax.Array:
        """The weight at a path of the model, from the host to where it belongs; each device is given its part alone."""
        if self.mesh is None:
            return jnp.asarray(weight)
        if self._is_repeated(path):
            weight = repeated(weight, self.config.num_kv_heads, self.copies)
        return jax.make_array_from_callback(weight.shape, weight_sharding(path, weight.shape, self.mesh), lambda part: weight[part])

    def spread(self, path: str, weight: Weight) -> Weight:
        """The weight at a path of the model, in any format, once its devices have it divided by its rows: where KV heads stand on several
        devices each, with them repeated."""
        return jax.tree.map(lambda x: self._spread(path, x), weight) if self._is_repeated(path) else weight

    def _spread(self, path: str, x: jax.Array) -> jax.Array:
        whole = _repeated(x, self.config.num_kv_heads, self.copies)
        return jax.device_put(whole, weight_sharding(path, whole.shape, self.mesh))

    def _is_repeated(self, path: str) -> bool:
        return self.copies > 1 and not {"k_proj", "v_proj"}.isdisjoint(path.split("."))


_repeated = jax.jit(repeated, static_argnums=(1, 2))
