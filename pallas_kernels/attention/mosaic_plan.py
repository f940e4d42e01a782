"""How the Mosaic GPU attention is laid out: blocks, teams of warps, query tiles, and what each keeps in shared memory."""

import dataclasses

WARPS = 4  # of a warpgroup
ROWS = 8  # query rows of a tile
SHARED_BYTES = 227 * 1024
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Config:
    """splits: blocks that share the tokens of a KV head, of all rows of the batch together. blocks: as many are to be resident on a
    multiprocessor, of `warpgroups` times four warps. team: warps that work on one group together, for many query rows."""

    splits: int
    blocks: int = 1
    warpgroups: int = 1
    team: int = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """The kernel for one set of shapes: who does what, and where it lies in shared memory. block_tiles: query tiles of a block."""

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
    config: Config = Config(1)

    def configured(self, config: Config | None) -> "Plan":
        """With this configuration, or a sane one: a warp alone for two query tiles at most, and three slots of the ring where they fit."""
        if config is not None:
            divided = [WARPS * config.warpgroups, self.head_dim // 16, *([self.group_size // 32] if self.planes else [])]
            if any(number % config.team for number in divided):
                raise ValueError(f"a team of {config.team} warps does not divide {divided} warps, tiles of channels and words of tokens")
            return dataclasses.replace(self, config=config)
        heads = self.kv_heads * self.blocks_of_rows
        largest = WARPS if self.planes is None else self.group_size // 32
        alone = [(2, 1, 1), (1, 1, 1), (1, 1, 2), (1, 1, 4)][self.planes is None :]
        together = [(1, 3, 4), (2, 1, 4), (1, 1, 4), (1, 1, 2)]
        shapes = [shape for shape in (alone if self.block_tiles <= 2 else together) if shape[2] <= largest]
        options = [Config(max(1, MULTIPROCESSORS * blocks // heads), blocks, groups, team) for blocks, groups, team in shapes]
        choices = [dataclasses.replace(self, config=option) for option in options]
        return next((c for c in choices if c.slots >= 3), choices[-1])

    @property
    def rows(self) -> int:
        """Query rows of a KV head: row t * heads_per_kv_head + h is token t of its h-th query head."""
        return self.tokens * self.heads_per_kv_head

    def query_row(self, batch, kv_head, row):
        """Where that row lies in [B T N]."""
        token, head = row // self.heads_per_kv_head, row % self.heads_per_kv_head
        return ((batch * self.tokens + token) * self.kv_heads + kv_head) * self.heads_per_kv_head + head

    @property
    def teams(self) -> int:
        return self.config.warpgroups * WARPS // self.config.team

    @property
    def splits(self) -> int:
        """Blocks that share the tokens of a KV head: at least one for each row of the batch."""
        return max(self.config.splits, self.batch)

    @property
    def block_rows(self) -> int:
        """Query rows of a block."""
        return self.block_tiles * ROWS

    @property
    def query_pitch(self) -> int:
        """Bytes from one query to the next in shared memory: eight of them start in different banks."""
        return self.head_dim * 2 + 16

    @property
    def query_bytes(self) -> int:
        """Of the queries in bfloat16, and if there are codes, in float16 and what they were multiplied by, and its inverse."""
        return self.block_rows * (self.query_pitch if self.planes is None else 2 * self.query_pitch + 8)

    @property
    def operand_bytes(self) -> int:
        """Of the operands that a team shares: queries times scales, then softmax weights."""
        return 16 * max(self.head_dim, self.group_size, self.chunk) * self.block_tiles

    @property
    def team_bytes(self) -> int:
        """Of what a team shares: operands, and numbers per query: where its logits start, and twice what each warp has."""
        return 0 if self.config.team == 1 else self.operand_bytes + 4 * self.block_rows * (1 + 2 * self.config.team)

    @property
    def chunk(self) -> int:
        """Tokens of the full-precision cache that are read at a time."""
        return 16 * max(self.config.team, 2 if self.head_dim <= 128 else 1)

    @property
    def slot_bytes(self) -> int:
        """Of the ring: the keys or the values of a group, or of a chunk."""
        full = self.chunk * self.head_dim * 2
        if self.planes is None:
            return full
        G, H = self.group_size, self.head_dim
        return max(full, self.planes * G * H // 2 + 4 * max(G, H))

    @property
    def slots(self) -> int:
        available = SHARED_BYTES // self.config.blocks - 2048 - self.query_bytes - self.teams * self.team_bytes
        return min(8, available // (self.teams * self.slot_bytes))

    @property
    def shared_bytes(self) -> int:
        return self.query_bytes + self.teams * (self.team_bytes + self.slots * self.slot_bytes)
