"""How the Mosaic GPU attention is laid out: blocks, teams of warps, query tiles, and what each keeps in shared memory."""

import dataclasses
import functools
import itertools
import math

from pallas_kernels import tuning
from pallas_kernels.attention.support import MAX_ROUND_TOKENS, PASS_SPAN, listed_problem
from pallas_kernels.dispatch import multiprocessors
from pallas_kernels.gpu.launch import RESERVED_BYTES, SHARED_BYTES
from pallas_kernels.gpu.layout import Layout

KERNEL = "attention.mosaic_gpu"
WARPS = 4  # of a warpgroup
WARPGROUPS = 8  # of a block, at most
TEAMS = 8  # of a block: each has a named barrier
WAVES = 64  # blocks for each multiprocessor, at most: more only cost memory for their partial results
# Blocks for a batch (`Plan.balanced`): one for each row, and besides at least TURNS times the resident ones. Up to MORE_EACH more for each
# row are tried as well, and the smallest number is taken that keeps BUSY of the best share of multiprocessors at work.
# With fixed runs a team of a batch should have PARTIALS_EACH partial results, if that leaves all multiprocessors at work.
TURNS, MORE_EACH, BUSY, PARTIALS_EACH = 2, 4, 0.95, 2
MORE_TILES = 3  # of query rows: a problem that was tuned with up to 3 tiles more lends its configuration (`alike`)
MIN_SLOTS, ENOUGH_SLOTS = 2, 4  # of a team: keys and values in turn, once and twice
LIST_WORDS = 2  # of a list that a lane keeps, 32 columns each
ROWS = 8  # query rows of a tile
# Registers of a multiprocessor, and of a thread at most.
REGISTERS, THREAD_REGISTERS = 65536, 255
# With fixed runs (`mosaic_runs`): those of a row for each multiprocessor that a KV head has, over codes, for 1 or 3 teams of a
# multiprocessor to share them evenly, and over a full-precision cache, for 4; the minimum of units of a run, as a partial result of many
# query tokens may take as long as a unit; and the runs of a fold.
RUNS, FULL_RUNS, MIN_UNITS, FOLD_RUNS = 3, 4, 2, 4
FULL_SLICES = 2  # of a full-precision cache (`Plan.slices`), so chunks of 32 tokens: faster on an H200 than 64 (docs/exact.md)
FOLDS_EACH = 2  # for each team that is resident at once, where teams have whole folds: with fewer some would have twice as much to do
SPILLED = 16  # registers of a thread that may be in memory at times, where others compute meanwhile, and once a run


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        splits: blocks that share the tokens of a KV head, of all rows of the batch together.
        blocks: blocks that should be resident on a multiprocessor.
        warpgroups: of a block, of four warps each.
        team: warps that work on one group together, for many query rows.
    """

    splits: int
    blocks: int = 1
    warpgroups: int = 1
    team: int = 1

    def __post_init__(self):
        tuning.check_counts(self)


def alike(problem: dict) -> list[dict]:
    """A problem, and those whose best teams and blocks serve it too: with one row of the batch, with a few tiles of query rows more, and,
    where one row reads everything, with twice the heads, of which each of two devices has half."""
    batches = dict.fromkeys((problem["batch"], 1))
    tiles = range(problem["block_tiles"], problem["block_tiles"] + MORE_TILES + 1)
    one_row = problem["batch"] == 1 and "list_width" not in problem
    heads = [problem["heads"] * times for times in ((1, 2) if one_row else (1,))]
    return [problem | dict(heads=count, batch=batch, block_tiles=number) for count in heads for number in tiles for batch in batches]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The kernel for one set of shapes: which warps do what, and where it lies in shared memory.

    Attributes:
        block_tiles: query tiles of a block.
        blocks_of_rows: blocks that divide the query rows of a KV head.
        list_width: columns of the lists of groups to read; None: all groups are read.
        observe: whether each group's attention mass is found.
        appends: whether queries, keys and values come as they were projected, for the kernel to rotate and to append.
        paged: whether the rows' groups lie in pages of a pool.
        totals: whether the sum of exponentials of each query row is found too, and values are in float32, to be combined with others.
        fixed_runs: whether a query row is added up in the order of `dispatch.fixed_order` (`mosaic_runs`).
    """

    batch: int
    kv_heads: int
    tokens: int
    heads_per_kv_head: int
    head_dim: int
    group_size: int
    groups: int
    buffer_rows: int
    planes: int | None
    block_tiles: int
    blocks_of_rows: int
    list_width: int | None = None
    observe: bool = False
    appends: bool = False
    paged: bool = False
    totals: bool = False
    fixed_runs: bool = False
    config: Config = Config(1)

    def configured(self, config: Config | None) -> "Plan":
        """The plan with this configuration, or the one that measured best here, or the default. Raises ValueError where it cannot work."""
        if config is None:
            found = (tuning.tuned(KERNEL, problem, functools.partial(self._tuned, problem)) for problem in alike(self.problem))
            return next(filter(None, found), None) or self.default().balanced()
        if config.splits > self.max_splits:
            raise ValueError(f"splits is {config.splits}, should be at most {self.max_splits}")
        if config.warpgroups > WARPGROUPS:
            raise ValueError(f"{config} has {config.warpgroups} warpgroups; a block may have {WARPGROUPS}")
        divided = [WARPS * config.warpgroups, self.head_dim // 16]
        if self.planes or self.fixed_runs:
            divided.append(self._max_slices)
        if any(number % config.team for number in divided):
            raise ValueError(f"a team of {config.team} warps does not divide {divided} warps, tiles of channels and words of tokens")
        plan = dataclasses.replace(self, config=config)
        if config.team > 1 and plan.teams > TEAMS:
            raise ValueError(f"{config} has {plan.teams} teams; a block has barriers for {TEAMS}")
        return plan

    def _tuned(self, problem: dict, found: dict) -> "Plan":
        """The plan with the best configuration of a problem, this one or one of `alike`."""
        config = Config(**found)
        if problem == self.problem:
            return self.configured(config).with_room()
        # With other rows or heads other splits fill the device.
        plan = self.configured(config).with_room()
        same_splits = all(problem[name] == self.problem[name] for name in ("batch", "heads"))
        return plan if same_splits else plan._resident(config.blocks, config.warpgroups, config.team).balanced()

    def balanced(self) -> "Plan":
        """The plan with splits to deal out among the rows of a batch, in a number that leaves few multiprocessors idle at the end.

        Its splits before are the blocks that are resident at once. Each row gets one, whatever it holds, so rows that hold much need more;
        and the number should be a multiple of the rows, for rows that all hold the same.
        """
        if self.batch == 1:
            return self
        resident = self.config.splits
        min_each = math.ceil((self.batch + TURNS * resident) / self.batch)
        last = min_each + resident // self.batch + MORE_EACH
        if self.fixed_runs:  # with more blocks teams would have few runs, or none
            most = max(resident // self.batch, self.max_partials // (PARTIALS_EACH * self.teams), 1)
            min_each, last = min(min_each, most), min(last, most + 1)
        options = [self.batch * each for each in range(min_each, last)]

        def busy(splits: int) -> float:
            return splits / (math.ceil(splits / resident) * resident)

        splits = next(splits for splits in options if busy(splits) >= BUSY * max(map(busy, options)))
        return dataclasses.replace(self, config=dataclasses.replace(self.config, splits=splits))

    def with_room(self) -> "Plan":
        """The plan itself. Raises ValueError where its configuration leaves too few slots of the ring."""
        if self.slots < MIN_SLOTS:
            raise ValueError(f"{self.config} leaves no room for {MIN_SLOTS} slots of {self.slot_bytes} bytes for each team")
        return self

    def default(self) -> "Plan":
        """The configuration that did well in sweeps on an H100 and an H200, with three slots of the ring where they fit."""
        few = {
            1: [(2, 1, 4), (1, 1, 4), (1, 1, 2), (1, 1, 1)],
            2: [*([(1, 3, 4)] if self.block_tiles == 2 else []), (1, 1, 4), (1, 1, 2), (1, 1, 1)],
            None: [(1, 1, 1), (1, 1, 2), (1, 1, 4)],
        }
        many = [*([] if self.planes is None else [(1, 3, 4)]), (1, 2, 4), (2, 1, 4), (1, 1, 4), (1, 1, 2)]
        if self.fixed_runs and self.planes is None:
            few[None], many = [(1, 1, 1)], [(2, 1, 2), (1, 1, 2)]
        elif self.fixed_runs and self.batch > 1:  # a row has few runs, and all teams of a block are of one row
            few[self.planes], many = ([(2, 1, 4), *each] for each in (few[self.planes], many))
        elif self.fixed_runs:
            few[self.planes] = [(1, 3, 4), *few[self.planes]]
        shapes = few[self.planes] if self.block_tiles <= 2 else many
        if self.list_width is not None:
            shapes = [(1, 3, 2), *shapes]  # many teams, for a step or two each
        options = [self._resident(*shape) for shape in shapes if shape[2] <= self._max_slices]
        return next((plan for plan in options if plan.slots >= 3), options[-1])

    def candidates(self) -> list["Plan"]:
        """Plans worth measuring: the default first, then all that leave three slots of the ring and the registers that they need.

        Where more than three warpgroups share a multiprocessor, two slots and fewer registers may be enough, as some of them wait while
        others compute.
        """
        configs = [self._resident(*shape).config for shape in itertools.product((1, 2, 3), (1, 2, 3, 4), (1, 2, 4))]
        plans = []
        for config in configs:
            try:
                plan = self.configured(config).with_room()
            except ValueError:
                continue
            crowded = config.warpgroups * config.blocks > 3
            slots = MIN_SLOTS if crowded else 3
            if plan.slots >= slots and plan.registers_needed <= plan.registers + (SPILLED if crowded else 0):
                plans += [each for each in (plan, plan.balanced()) if each.splits <= self.max_splits]
        return list(dict.fromkeys([self.default().balanced(), *plans]))

    def _resident(self, blocks: int, warpgroups: int, team: int) -> "Plan":
        """The plan with the blocks that are resident at once."""
        return dataclasses.replace(self, config=Config(max(1, multiprocessors() * blocks // self.heads), blocks, warpgroups, team))

    @property
    def max_splits(self) -> int:
        return max(1, WAVES * multiprocessors() // self.heads)

    @property
    def heads(self) -> int:
        """Blocks without splits."""
        return self.kv_heads * self.blocks_of_rows

    @property
    def problem(self) -> dict:
        """The properties that the best configuration depends on. Observing takes the configuration without it."""
        names = "planes", "head_dim", "group_size", "batch", "heads", "block_tiles"
        fixed = {"fixed_runs": True} if self.fixed_runs else {}
        return {name: getattr(self, name) for name in names} | listed_problem(self.list_width) | fixed

    @property
    def list_words(self) -> int:
        """Words of the list of groups that each lane keeps, so that a warp has all of it; 0 where a list is too long."""
        words = -(-(self.list_width or 0) // 32)
        return words if words <= LIST_WORDS else 0

    @property
    def rows(self) -> int:
        """Query rows of a KV head: row t * heads_per_kv_head + h is token t of its h-th query head."""
        return self.tokens * self.heads_per_kv_head

    def query_row(self, batch, kv_head, row):
        """The place of that row in [B T N]."""
        token, head = row // self.heads_per_kv_head, row % self.heads_per_kv_head
        return ((batch * self.tokens + token) * self.kv_heads + kv_head) * self.heads_per_kv_head + head

    @property
    def padded_rows(self) -> int:
        """Query rows of a KV head in all its blocks, including those that fill up the last tiles."""
        return self.blocks_of_rows * self.block_rows

    @property
    def teams(self) -> int:
        return self.config.warpgroups * WARPS // self.config.team

    @property
    def whole_warpgroup(self) -> bool:
        """Whether the warps of a team multiply together: an operand is then read once for all, but all wait for each product."""
        return self.planes is not None and self.config.team == WARPS and self.block_tiles > 2

    @property
    def splits(self) -> int:
        """Blocks that share the tokens of a KV head: at least one for each row of the batch."""
        return max(self.config.splits, self.batch)

    @property
    def _max_slices(self) -> int:
        """Warps of the largest team."""
        if self.planes is None:
            return FULL_SLICES if self.fixed_runs else WARPS
        return self.group_size // 32

    @property
    def buffer_chunks(self) -> int:
        """Chunks of a full buffer beside groups, which fixed runs count whether they are there or not."""
        return math.ceil((2 * self.group_size + MAX_ROUND_TOKENS) / self.chunk)

    @property
    def runs_limit(self) -> int:
        """Fixed runs of a row, whatever its length."""
        return max(1, (FULL_RUNS if self.planes is None else RUNS) * (multiprocessors() // self.kv_heads))

    @property
    def max_runs(self) -> int:
        """Fixed runs of a row, at most."""
        if self.planes is None:
            units = (self.buffer_rows // PASS_SPAN + 1) * PASS_SPAN // self.chunk
        else:
            units = (self.groups if self.list_width is None else self.list_width) + self.buffer_chunks
        return min(self.runs_limit, max(1, units // MIN_UNITS))

    @property
    def max_partials(self) -> int:
        """Partial results that a row has room for, with fixed runs."""
        return math.ceil(self.max_runs / FOLD_RUNS) if self.whole_folds else self.max_runs

    @property
    def whole_folds(self) -> bool:
        """Whether teams have whole folds of fixed runs: where there are enough, and registers for what a run is folded into."""
        resident = multiprocessors() * self.config.blocks // self.heads * self.teams
        folded = self.block_tiles * self.head_dim // (4 * self.config.team)
        enough = self.batch * math.ceil(self.max_runs / FOLD_RUNS) >= FOLDS_EACH * max(1, resident)
        return enough and self.registers_needed + folded <= self.registers + SPILLED

    @property
    def registers_needed(self) -> int:
        """Registers that a thread needs, about, without a partial result that runs are folded into."""
        tiles = (self.head_dim + (self.group_size if self.planes else self.chunk)) // 16
        return 80 + 4 * self.block_tiles * tiles // self.config.team

    @property
    def registers(self) -> int:
        """Registers that a thread may have, for the blocks to be resident at once."""
        return min(THREAD_REGISTERS, REGISTERS // (32 * WARPS * self.config.warpgroups * self.config.blocks))

    @property
    def slices(self) -> int:
        """Slices of a step's tokens whose sums a team keeps apart, and adds in their order at the end: one for each of its warps. With
        fixed runs there is one for each warp of the largest team, so that the order is the same for any team."""
        return self._max_slices if self.fixed_runs else self.config.team

    @property
    def block_rows(self) -> int:
        """Query rows of a block."""
        return self.block_tiles * ROWS

    @property
    def query_pitch(self) -> int:
        """Bytes from one query to the next in shared memory: eight of them start in different banks."""
        return self.head_dim * 2 + 16

    @functools.cached_property
    def of_block(self) -> Layout:
        """The parts that all teams of a block share: the queries in bfloat16; where there are codes, the queries in float16, with the
        factor of each and its inverse; then new keys and values."""
        queries = self.block_rows * self.query_pitch
        coded = {"halves": queries, "factors": 8 * self.block_rows} if self.planes is not None else {}
        return Layout({"queries": queries, **coded, "new": 4 * self.tokens * self.head_dim if self.appends else 0})

    @functools.cached_property
    def of_team(self) -> Layout:
        """The parts that the warps of a team share: operands for the logits, which are queries times scales, and for the weighted values,
        which are softmax weights; then arrays of a number for each query. One array is added to logits, and each warp has two, or three
        where it observes; with fixed runs each slice. A team of one warp shares nothing."""
        keys = 0 if self.planes is None else 16 * self.head_dim * self.block_tiles
        arrays = 1 + (3 if self.observe else 2) * self.slices
        weights = 16 * max(self.group_size, self.chunk) * self.block_tiles
        return Layout({"keys": keys, "weights": weights, "numbers": arrays * self.numbers_bytes})

    @property
    def team_bytes(self) -> int:
        """Bytes of a team beside its ring."""
        return 0 if self.config.team == 1 else self.of_team.total

    @property
    def numbers_bytes(self) -> int:
        """Bytes of a per-query float array.

        Each of a row's four lanes holds two entries per tile, padded to a power of two of at least 4.
        """
        return 4 * 4 * max(4, 1 << (2 * self.block_tiles - 1).bit_length())

    @property
    def chunk(self) -> int:
        """Tokens of the full-precision cache that are read at a time."""
        if self.fixed_runs:
            return 16 * self.slices
        return 16 * max(self.config.team, 2 if self.head_dim <= 128 else 1)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of the ring: the keys or the values of a group, or of a chunk."""
        full = self.chunk * self.head_dim * 2
        if self.planes is None:
            return full
        G, H = self.group_size, self.head_dim
        return max(full, self.planes * G * H // 2 + 4 * max(G, H))

    @property
    def slots(self) -> int:
        """Slots of a team's ring, up to 8."""
        available = SHARED_BYTES // self.config.blocks - RESERVED_BYTES - self.of_block.total - self.teams * self.team_bytes
        return min(8, available // (self.teams * self.slot_bytes))

    @property
    def shared_bytes(self) -> int:
        return self.of_block.total + self.teams * (self.team_bytes + self.slots * self.slot_bytes)
