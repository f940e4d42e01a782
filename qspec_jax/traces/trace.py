"""What happened in each round of a decode: who proposed what, with which probabilities, and what the target made of it."""

import base64
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from jaxtyping import Float, UInt8

from qspec_jax.files import output_to
from qspec_jax.traces.page import framed, page_of

DIGITS = 4  # significant digits of probabilities and seconds in the JSON
MAX_GROUP_BINS, MAX_ROUND_BINS = 256, 400  # of a map of what was read

Likely = list[tuple[int, float]]  # token ids and their probabilities, the most likely first


@dataclasses.dataclass(frozen=True)
class DraftedToken:
    """A token that a draft proposed.

    Attributes:
        token: its id.
        by: who proposed it, an index of `Trace.proposers`.
        q: its probability by the draft; None where the strategy does not say.
        p: its probability by the target; None where the strategy does not say.
        uniform: the number from [0, 1) that decided: the token is accepted if uniform * q < p. None where nothing is drawn.
        likely: the draft's most likely tokens there; empty where the strategy does not say.
    """

    token: int
    by: int
    q: float | None
    p: float | None
    uniform: float | None
    likely: Likely

    @property
    def chance(self) -> float | None:
        """The chance that sampling accepts it, min(1, p / q); None where p or q is not known."""
        if self.p is None or self.q is None:
            return None
        return min(1.0, self.p / self.q) if self.q else 1.0


@dataclasses.dataclass(frozen=True)
class DraftLimits:
    """What limits the number of drafts of a round; the smallest of these is what a draft was asked for.

    Attributes:
        gamma: the row's maximum.
        adaptive: what adaptive speculation chose; None without it.
        room: drafts that the cache has room for: after them it would be due for a flush, or over a full cache a span of tokens ends
            (`Schedule.span`); None: any number.
        wanted: drafts after which the row would have all its tokens.
    """

    gamma: int
    adaptive: int | None
    room: int | None
    wanted: int

    @property
    def asked(self) -> int:
        """How many drafts were asked for."""
        return max(0, min(number for number in vars(self).values() if number is not None))


@dataclasses.dataclass(frozen=True)
class RoundTrace:
    """A round of one row.

    Attributes:
        first: the index of the round's first token among the row's new tokens.
        emitted: the number of tokens that it emitted: the accepted drafts and the target's own token, up to the end of the row.
        limits: what limited the number of drafts.
        drafts: the proposed tokens that could be accepted. Fewer than `limits.asked` where the draft stopped by itself.
        judged_accepted: how many of them the target accepted.
        drafted, accepted: what the round adds to the statistics of the row. They leave out drafts after an accepted EOS.
        own_token: the target's own token after the accepted drafts.
        own_p: its probability by the target; None where the strategy does not say.
        likely: after the pending token and each draft the target's most likely tokens.
        flushed: whether a group left the buffer at the end of the round.
    """

    first: int
    emitted: int
    limits: DraftLimits
    drafts: list[DraftedToken]
    judged_accepted: int
    drafted: int
    accepted: int
    own_token: int
    own_p: float | None
    likely: list[Likely]
    flushed: bool


@dataclasses.dataclass(frozen=True)
class GroupsRead:
    """Which groups of the cache the drafts read, as shares from 0 to 255 in bytes; 255: every KV head of every layer read the group.

    Attributes:
        group_size: tokens of a group.
        groups_per_bin: groups that share a byte.
        rounds_per_bin: rounds that share a byte.
        over_rounds: by round and group, the mean over layers and KV heads.
        over_layers: by layer and group, the mean over KV heads and rounds.
    """

    group_size: int
    groups_per_bin: int
    rounds_per_bin: int
    over_rounds: UInt8[np.ndarray, "rounds groups"]
    over_layers: UInt8[np.ndarray, "layers groups"]

    @classmethod
    def of(cls, rounds: Sequence[UInt8[np.ndarray, "layers groups"]], group_size: int) -> Self:
        """The maps of a row. rounds: for each of its rounds the share of KV heads that read each group that the row had, in each layer."""
        groups, layers = max((each.shape[1] for each in rounds), default=0), rounds[0].shape[0] if rounds else 0
        by_round, by_layer = np.zeros((len(rounds), groups), np.float32), np.zeros((layers, groups), np.float32)
        there = np.zeros((len(rounds), groups), bool)
        for i, each in enumerate(rounds):
            own = slice(each.shape[1])
            by_round[i, own], there[i, own] = each.mean(0), True
            by_layer[:, own] += each
        per_round, per_group = (max(1, math.ceil(n / bins)) for n, bins in ((len(rounds), MAX_ROUND_BINS), (groups, MAX_GROUP_BINS)))
        by_layer /= np.maximum(there.sum(0), 1)
        over_layers = _binned(by_layer, 1, per_group, np.broadcast_to(there.any(0), by_layer.shape))
        return cls(group_size, per_group, per_round, _binned(by_round, per_round, per_group, there), over_layers)

    def as_object(self) -> dict[str, Any]:
        """As JSON can have it: the maps in base64."""
        maps = {name: getattr(self, name) for name in ("over_rounds", "over_layers")}
        shapes = {f"{name}_shape": list(each.shape) for name, each in maps.items()}
        coded = {name: base64.b64encode(each.tobytes()).decode("ascii") for name, each in maps.items()}
        sizes = {name: getattr(self, name) for name in ("group_size", "groups_per_bin", "rounds_per_bin")}
        return sizes | shapes | coded


@dataclasses.dataclass(frozen=True)
class RowTrace:
    """The rounds of one row.

    Attributes:
        prompt_tokens: the number of tokens of the prompt.
        prompt_end: the text at the prompt's end; None without a tokenizer.
        token_ids: the new tokens.
        pieces: the text that each of them adds, which together are the row's text; None without a tokenizer. A token that ends within a
            character adds nothing, and the one that completes it all of it.
        finish_reason: "eos", "stop" or "length"; "the end of the text" where the tokens are those of a given text.
        rounds: the rounds in their order.
        reads: which groups the drafts read; None for a draft that does not list groups.
    """

    prompt_tokens: int
    prompt_end: str | None
    token_ids: list[int]
    pieces: list[str] | None
    finish_reason: str
    rounds: list[RoundTrace]
    reads: GroupsRead | None = None


@dataclasses.dataclass(frozen=True)
class Trace:
    """A decode, round by round. In a notebook it is shown as the page that `save` writes.

    Attributes:
        settings: what was run, by names that the page shows: draft, gamma, temperature, cache and others.
        about: where it was run: the model, the device, the date, versions.
        proposers: the names of the drafts, of which `DraftedToken.by` is an index.
        greedy: whether the target takes its most likely token; then nothing is drawn.
        forced: whether the tokens after each round are those of a given text, as in teacher-forced measurements.
        phases: the names of the parts of a round that are timed.
        seconds: of each round, all rows together, the seconds of each phase, with dispatch and the wait for the device.
        prefill_s: the seconds of reading the prompts; None where they were not measured.
        rows: of each prompt.
        names: texts of the token ids that occur; empty without a tokenizer.
    """

    settings: dict[str, Any]
    about: dict[str, Any]
    proposers: tuple[str, ...]
    greedy: bool
    forced: bool
    phases: tuple[str, ...]
    seconds: list[tuple[float, ...]]
    prefill_s: float | None
    rows: list[RowTrace]
    names: dict[int, str]

    def named(self, name: str, *, draft: str) -> Self:
        """The trace with a name, by which a page of several lists it, and the text of a draft that was made before."""
        return dataclasses.replace(self, settings=self.settings | {"name": name, "draft": draft})

    def as_object(self) -> dict[str, Any]:
        """As JSON can have it, with probabilities and seconds rounded to `DIGITS` significant digits."""
        plain = dataclasses.replace(self, rows=[dataclasses.replace(row, reads=None) for row in self.rows])
        found = dataclasses.asdict(plain)
        for row, own in zip(found["rows"], self.rows, strict=True):
            row["reads"] = own.reads and own.reads.as_object()
        return _rounded(found)

    def save(self, path: str | Path) -> None:
        """Writes the page that shows the trace, one HTML file that needs nothing else. Raises InputError where it cannot be written."""
        with output_to(Path(path)) as write:
            write(page_of([self.as_object()]))

    def _repr_html_(self) -> str:
        return framed(page_of([self.as_object()]))


def _binned(shares: Float[np.ndarray, "n groups"], per_row: int, per_group: int, there: np.ndarray) -> UInt8[np.ndarray, "rows bins"]:
    """The means of bins of `per_row` rows and `per_group` groups, over the entries that are there."""
    rows, columns = (math.ceil(size / per) for size, per in zip(shares.shape, (per_row, per_group), strict=True))

    def sums(x: np.ndarray) -> np.ndarray:
        padded = np.zeros((rows * per_row, columns * per_group), np.float32)
        padded[: x.shape[0], : x.shape[1]] = x
        return padded.reshape(rows, per_row, columns, per_group).sum((1, 3))

    return np.round(sums(shares * there) / np.maximum(sums(there), 1)).astype(np.uint8)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
