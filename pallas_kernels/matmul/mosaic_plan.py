"""How the Mosaic GPU matmul of few rows divides its work: stages, each a matmul, one after the other in one launch."""

import dataclasses
import math

from pallas_kernels.gpu.layout import ROOM, Layout
from pallas_kernels.matmul import support
from pallas_kernels.matmul.support import GROUP_SIZE

TILE = support.OUTPUTS
ROWS = 4  # of activations in a tile of the tensor cores: two columns each
MATH_WARPS = 16  # they multiply: each takes a group of a pass
PRODUCER_WARPS = 4  # they copy: each has rows of a tile of its own
EPILOGUE_WARPS = 4  # they add what the math warps found of a tile
PASS = MATH_WARPS  # groups that a block takes at once
CODE_BYTES = GROUP_SIZE // 2  # of a group of one output
# Bytes from one output to the next in shared memory: neighbours lie in different banks.
CODE_PITCH = PASS * CODE_BYTES + 64
STEPS = GROUP_SIZE // 32  # words that a lane multiplies of a group
# Slots of the ring of codes: fewer than enough leave the memory idle. With plenty a stage's codes come while its inputs are waited for and
# placed; more than the most are of no use.
MIN_SLOTS, ENOUGH_SLOTS, PLENTY_SLOTS, MAX_SLOTS = 3, 4, 10, 12
SUMS_SLOTS = 2  # tiles whose sums there is place for
TICKET_SLOTS = 4  # tickets that warps of a block may be apart
COUNTER_WORDS = 32  # at the start of a handoff buffer, and of exchange memory: counters, and what keeps them apart from the rest
BUFFERS = 3  # for partial sums, in exchange memory (mosaic_exchange.py)
STATE_WORDS = 4  # of shared memory, for what a block knows of the exchange
VALUES_PER_PIECE = 8  # values of a row of activations that a thread moves at once
PIECES_AT_ONCE = 8  # pieces of a stage's inputs without a norm that a thread has in registers
PLACED_AT_ONCE = 4  # pieces of these inputs that a thread places at once, or one of each row if these are more
MAX_TOGETHER = 3  # tiles that a block takes: with more, their sums leave the registers


@dataclasses.dataclass(frozen=True)
class Stage:
    """A matmul.

    Attributes:
        groups: groups of inputs.
        outputs: the number of each weight's outputs.
        normed: whether its inputs are the norm of the sum of the residual stream and the outputs of the stage before.
        gated: whether the first weight's outputs go through silu and multiply the second's.
        partial: whether its outputs are partial sums, which are added up over the devices within the launch.
    """

    groups: int
    outputs: tuple[int, ...]
    normed: bool = False
    gated: bool = False
    partial: bool = False

    @property
    def tiles(self) -> int:
        return sum(self.outputs) // TILE

    @property
    def passes(self) -> int:
        """Passes over the inputs of a tile."""
        return math.ceil(self.groups / PASS)

    @property
    def tile_outputs(self) -> int:
        return TILE // 2 if self.gated else TILE

    @property
    def width(self) -> int:
        return self.tiles * self.tile_outputs


@dataclasses.dataclass(frozen=True)
class Plan:
    """The stages of one launch, and the parts of a block's shared memory.

    A stage whose activations all have their place is resident: a block takes its tiles one after the other, each over all inputs. In any
    other stage a block takes several tiles together, all of them over the inputs of some passes, then over those of the next.

    Attributes:
        rows: of activations.
        stages: in the order in which they run.
        blocks: of the launch.
        room: passes whose activations fit in a block.
        eps: the norms' epsilon.
        num_devices: devices that run this launch at the same time and add up partial sums.
        parameters: of the weights.
    """

    rows: int
    stages: tuple[Stage, ...]
    blocks: int
    room: int
    eps: float = 0.0
    num_devices: int = 1
    parameters: support.Parameters = support.DEFAULT_PARAMETERS

    @classmethod
    def fitting(
        cls,
        rows: int,
        stages: tuple[Stage, ...],
        blocks: int,
        eps: float = 0.0,
        num_devices: int = 1,
        parameters: support.Parameters = support.DEFAULT_PARAMETERS,
    ) -> "Plan":
        """A plan with as many stages resident as leave enough slots; those with a norm always are.

        Where there are not plenty, a stage of which a block takes all its tiles together is not: its inputs are placed once in any case.
        """
        largest = max(stage.passes for stage in stages)
        at_once = min(passes_at_once(rows), largest)

        def with_room(passes: int) -> Plan:
            return cls(rows, stages, blocks, max(passes, at_once) if passes < largest else passes, eps, num_devices, parameters)

        plan = with_room(largest)
        if plan.slots >= PLENTY_SLOTS:
            return plan
        normed = max((stage.passes for stage in stages if stage.normed), default=0)
        several = [stage.passes for stage in stages if stage.tiles > MAX_TOGETHER * blocks]
        for passes in sorted({normed, *(each for each in several if each > normed)}, reverse=True):
            plan = with_room(passes)
            if plan.slots >= ENOUGH_SLOTS:
                break
        return plan

    @property
    def row_tiles(self) -> int:
        return math.ceil(self.rows / ROWS)

    def resident(self, stage: Stage) -> bool:
        return stage.passes <= self.room

    def together(self, stage: Stage) -> int:
        """Tiles that a block takes over the same inputs."""
        most = math.ceil(stage.tiles / self.blocks)
        return 1 if self.resident(stage) else math.ceil(most / math.ceil(most / MAX_TOGETHER))

    @property
    def x_pitch(self) -> int:
        """Bytes from one column of activations to the next in shared memory: neighbours lie in different banks."""
        return GROUP_SIZE * PASS * self.room + 64

    def words_before(self, number: int) -> int:
        """Words of 32 bits, pairs of numbers, that stages before this one hand over in the same way: to other blocks, or to all devices."""
        return self._words(self.stages[number].partial, self.stages[:number])

    def _words(self, partial: bool, stages: tuple[Stage, ...]) -> int:
        return self.rows * sum(stage.width for stage in stages if stage.partial == partial) // 2

    @property
    def handoff_words(self) -> int:
        """Words of a handoff buffer: the counter of tickets, and what stages hand to those after them."""
        return COUNTER_WORDS + self._words(False, self.stages[:-1])

    @property
    def partial_words(self) -> int:
        """Words of a device's partial sums of a launch."""
        return self._words(True, self.stages[:-1])

    @property
    def buffer_words(self) -> int:
        """Words of the partial sums of all devices."""
        return self.num_devices * self.partial_words

    @property
    def exchange_words(self) -> int:
        """Words of each device's exchange memory."""
        return COUNTER_WORDS + BUFFERS * self.buffer_words

    @property
    def group_pitch(self) -> int:
        """Bytes from the sums and scales of activations of one group to those of the next."""
        return self.row_pitch * ROWS * self.row_tiles

    @property
    def row_pitch(self) -> int:
        """Bytes from the sums and the scale of one row of a group to those of the next."""
        return 8 * self.parameters.subgroups

    @property
    def parameter_pitch(self) -> int:
        """Bytes from one output's scales or zeros to the next's in a slot: neighbours lie in different banks."""
        return 2 * PASS * self.parameters.subgroups + 4

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a pass, after which its scales and zeros lie."""
        return self.parameters.planes * TILE * CODE_PITCH

    @property
    def slot_bytes(self) -> int:
        """Bytes of the codes, scales and zeros of a pass."""
        return self.code_bytes + 2 * TILE * self.parameter_pitch

    @property
    def tile_bytes(self) -> int:
        """Bytes of a warp's sums of a tile."""
        return 4 * TILE * ROWS * self.row_tiles

    def _layout(self, slots: int) -> Layout:
        sizes = {
            "x": 2 * self.rows * self.x_pitch,
            "group_sums": PASS * self.room * self.group_pitch,  # and scales
            "squares": 4 * MATH_WARPS * self.rows,  # the warps' sums of squares of rows
            "sums": SUMS_SLOTS * MATH_WARPS * self.tile_bytes,  # the ring of the warps' sums of tiles
            "tickets": 4 * TICKET_SLOTS,
            "exchange": 4 * STATE_WORDS if self.num_devices > 1 else 0,
            "barriers": 2 * 8 * (MAX_SLOTS + SUMS_SLOTS + TICKET_SLOTS),  # mbarriers of the three rings
            "codes": slots * self.slot_bytes,
        }
        return Layout(sizes, {"codes": 128})  # copies of whole lines to other addresses take longer

    @property
    def layout(self) -> Layout:
        """The parts of shared memory."""
        return self._layout(self.slots)

    @property
    def slots(self) -> int:
        """Slots of the ring of codes, limited by the room in shared memory."""
        return max(0, min(MAX_SLOTS, (ROOM - self._layout(0).total) // self.slot_bytes))


def passes_at_once(rows: int) -> int:
    """How many passes a warp places the activations of at once: an even number, for half of its lanes take one of two."""
    return 2 * max(1, PLACED_AT_ONCE // rows)
