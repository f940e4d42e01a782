"""Views: what one pass of a model reads of a layer's cache. They are pytrees, so that a jitted pass takes new lists without compiling.

Attributes of every `View`:
    planes: 1: the upper 4-bit plane of a quantized region; 2: both planes; None: full precision.
    observed: whether the pass also finds the attention mass of each group.
"""

from typing import ClassVar

from jaxtyping import Array, Bool, Int

from pallas_kernels.formats.pytree import pytree


@pytree("planes", "observed")
class DenseView:
    """Everything that is cached. The only view that can be observed."""

    planes: int | None
    observed: bool = False


@pytree()
class ListedGroups:
    """The upper plane of some groups of the quantized region, and the whole buffer of recent tokens.

    Numbers out of range are clamped, so that no other memory is read: a count below 0 is taken as 0, one above n as n. In a layer of
    C groups, a number below 0 means group 0 and one above C - 1 means group C - 1. A group that is listed twice weighs twice. A group that
    is not quantized yet is read with undefined contents, and the result is then no attention over the row.

    Attributes:
        groups: the numbers of the groups that a row's KV head reads, each of them once, in any order, in the first count[b, k] of n
            columns, n >= 1; the other columns are not read. A group's number counts from the row's first token: group c holds the tokens
            c * G to (c + 1) * G - 1.
        count: the number of groups in each list.
    """

    planes: ClassVar[int] = 1
    observed: ClassVar[bool] = False

    groups: Int[Array, "B K n"]
    count: Int[Array, "B K"]


@pytree()
class ChosenTokens:
    """The upper plane of some tokens of the quantized region, and the whole buffer of recent tokens.

    Attributes:
        chosen: which of the region's tokens a row's KV head reads, token 0 of a row first.
    """

    planes: ClassVar[int] = 1
    observed: ClassVar[bool] = False

    chosen: Bool[Array, "B K S"]


@pytree("whole_groups")
class LargestMass:
    """The upper plane of those tokens, or groups, of the quantized region that a query attends to most, and the whole buffer.

    Each query token chooses for itself, in each KV head, by the attention that its query heads pay to the upper plane and the buffer. For
    that all keys are read first, so this view measures what a choice could be worth, and saves nothing.

    Attributes:
        count: the number of groups or tokens that are read, for each row of the batch.
        whole_groups: whether groups are chosen; False: single tokens.
    """

    planes: ClassVar[int] = 1
    observed: ClassVar[bool] = False

    count: Int[Array, "B"]
    whole_groups: bool


View = DenseView | ListedGroups | ChosenTokens | LargestMass

UPPER_PLANE = DenseView(1)
BOTH_PLANES = DenseView(2)
FULL_PRECISION = DenseView(None)
