"""The tiles of outputs that a block of the Mosaic GPU matmul of few rows works on: its own share, or shares that it draws tickets for."""

import dataclasses
from collections.abc import Callable

from pallas_kernels.gpu import ptx
from pallas_kernels.gpu.ring import Ring
from pallas_kernels.matmul.mosaic_plan import MATH_WARPS, Plan, Stage


@dataclasses.dataclass(frozen=True)
class Share:
    """A number from 0 to `plan.blocks` - 1, and the tiles of outputs of a stage that belong to it."""

    plan: Plan
    number: ptx.Value

    def tiles(self, stage: Stage) -> tuple:
        """The share's first tile of a stage, and its last + 1."""
        return self.number * stage.tiles // self.plan.blocks, (self.number + 1) * stage.tiles // self.plan.blocks

    def turns(self, stage: Stage):
        """How many turns the share takes, in each of which a block works on as many tiles as it may take together."""
        lower, upper = self.tiles(stage)
        together = self.plan.together(stage)
        return (upper - lower + (together - 1)) // together


class OwnShare:
    """The one share of a block in a launch of one stage, in which no block waits for another: that of its own number."""

    def __init__(self, plan: Plan, block):
        self.share = Share(plan, block)

    def of_stage(self, number: int, carry, work: Callable):
        """Runs carry = work(share, carry) for each of the block's shares of a stage, and returns the carry."""
        return work(self.share, carry)


class Tickets:
    """The shares of a block as one of its warps comes to them: ticket t is share t % plan.blocks of stage t // plan.blocks.

    counter: for the producer warps, the address in global memory where tickets are counted. The first lane of the first of them draws for
    the block, the next ticket whenever it passes one on, so that no warp waits for the counter.
    """

    def __init__(self, plan: Plan, ring: Ring, thread, counter=None):
        self.plan, self.ring, self.lane, self.counter = plan, ring, thread & 31, counter
        self.draws = ptx.select(thread == 32 * MATH_WARPS, ptx.i32(1), ptx.i32(0))
        drawn = () if counter is None else (ptx.take_ticket(counter, self.draws),)
        self.state = self.following(ptx.i32(0), ptx.i32(0), *drawn)

    def following(self, slot, parity, *drawn) -> tuple:
        """The next ticket, and the state from which `following` comes to the one after it."""
        if drawn:
            with ptx.when(self.draws == 1):
                ptx.wait_for_arrivals(self.ring.emptied_barrier(slot), parity ^ 1)
                ptx.store_shared(self.ring.slot(slot), *drawn)
                ptx.arrive(self.ring.filled_barrier(slot))
            drawn = (ptx.take_ticket(self.counter, self.draws),)
        ptx.wait_for_arrivals(self.ring.filled_barrier(slot), parity)
        ticket = ptx.uniform(ptx.load_shared(self.ring.slot(slot), 1)[0])
        emptied = ptx.once_loaded(self.ring.emptied_barrier(slot), [ticket])
        ptx.synchronize(None, 1)
        with ptx.when(self.lane == 0):
            ptx.arrive(emptied)
        return ticket, *self.ring.following(slot, parity), *drawn

    def of_stage(self, number: int, carry, work: Callable):
        """Runs carry = work(share, carry) for each of the block's shares of a stage, and returns the carry; stages come in their order."""
        blocks = self.plan.blocks

        def step(both):
            (ticket, *state), carry = both
            carry = work(Share(self.plan, ticket - number * blocks), carry)
            return self.following(*state), carry

        self.state, carry = ptx.while_loop(lambda both: both[0][0] < (number + 1) * blocks, (self.state, carry), step)
        return carry
