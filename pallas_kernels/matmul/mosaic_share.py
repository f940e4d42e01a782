"""What a block works on in the matmuls whose clusters divide the tiles of outputs, and the blocks of a cluster the inputs."""

import dataclasses

from pallas_kernels.gpu import ptx


@dataclasses.dataclass(frozen=True)
class ClusterShare:
    """The cluster's tiles, from `lower` to `upper` - 1, and of their inputs `count` parts from part `first` on, which are the block's.

    rank: the block's number in the cluster.
    """

    rank: ptx.Value
    lower: ptx.Value
    upper: ptx.Value
    first: ptx.Value
    count: ptx.Value

    @classmethod
    def of_block(cls, block, *, cluster: int, clusters: int, tiles: int, parts: int) -> "ClusterShare":
        """The share of a block by its number in the launch. cluster: blocks of a cluster. parts: of the inputs of a tile."""
        rank, number = block % cluster, block // cluster
        lower, upper = (i * tiles // clusters for i in (number, number + 1))
        first, end = (i * parts // cluster for i in (rank, rank + 1))
        return cls(rank, lower, upper, first, end - first)
