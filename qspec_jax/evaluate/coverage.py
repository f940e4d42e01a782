"""The share of the target's attention on the tokens that a draft reads, measured while the target reads all."""

import dataclasses

import jax
from jaxtyping import Array, Float

from pallas_kernels.attention.reference import covered
from pallas_kernels.formats.kv_cache import HeldKeys
from pallas_kernels.formats.views import View
from qspec_jax.caches.cache import longer
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.caches.queried import QueriedCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WatchedCache(QueriedCache):
    """A target's cache for one pass of the model, which also measures how much attention a draft's choice covers.

    Attributes:
        cache: the target's.
        choice: what a draft reads in each layer, see `Draft.read_in_round`.
        shares: after the pass, the share of each query token's attention on the choice, the mean over layers and query heads.
    """

    cache: HierarchicalCache
    choice: tuple[View | HeldKeys, ...]
    shares: Float[Array, "B T"] | None = None

    def of_queries(self, layer, q, entry):
        return covered(q, entry, longer(self.cache.lengths, q.shape[1]), self.choice[layer])

    def after_pass(self, left):
        return dataclasses.replace(self, shares=sum(left) / len(left))
