"""Views: what one pass of a model reads of a layer's cache. They are pytrees, so that a jitted pass takes new lists without compiling."""

from jaxtyping import Array, Int

from pallas_kernels.formats.pytree import pytree


@pytree("planes")
class DenseView:
    """Everything that is cached: of a quantized region the upper 4-bit plane (planes=1) or both (planes=2); None: full precision."""

    planes: int | None


@pytree()
class ListedGroups:
    """The upper plane of some groups of the quantized region, and the whole buffer of recent tokens.

    groups: the numbers of the groups that a row's KV head reads, each of them once, in the first count[b, k] of n columns; what stands
    behind is not read. A group's number counts from the row's first token: group c holds the tokens c * G to (c + 1) * G - 1.
    """

    groups: Int[Array, "B K n"]
    count: Int[Array, "B K"]

    @property
    def planes(self) -> int:
        return 1


View = DenseView | ListedGroups

UPPER_PLANE = DenseView(1)
BOTH_PLANES = DenseView(2)
FULL_PRECISION = DenseView(None)
