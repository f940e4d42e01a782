"""Tiles of outputs in the Mosaic GPU matmuls that several kernels have in common: which weight a row is of, and work in clusters."""

import dataclasses
from collections.abc import Callable

from pallas_kernels.gpu import numerics, ptx


def row_of(arrays: list, outputs: tuple[int, ...], row) -> tuple:
    """The array that a row belongs to, and the row's number there. outputs: rows of each array; they count one after the other."""
    array, before, local = arrays[0], 0, row
    for count, other in zip(outputs, arrays[1:]):
        before += count
        beyond = ptx.i32(before - 1) < row
        array, local = ptx.select(beyond, other, array), ptx.select(beyond, row - before, local)
    return array, local


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


def add_clusters(add: Callable[[], None]) -> None:
    """Runs `add` once all blocks of the cluster have left their sums in shared memory, which stays until all have read it."""
    ptx.synchronize(None, 1)
    ptx.meet_cluster()
    add()
    ptx.synchronize(None, 1)
    ptx.meet_cluster()


def sums_of_cluster(addresses: list, words: int, cluster: int) -> list:
    """Sums of float32 words at the same addresses of each block's shared memory, in the order of the blocks'
    ranks, and of a block's in the order of the addresses."""
    found = [ptx.load_cluster(ptx.in_block(at, ptx.i32(rank)), words, "f") for rank in range(cluster) for at in addresses]
    return [numerics.total(each) for each in zip(*found)]
