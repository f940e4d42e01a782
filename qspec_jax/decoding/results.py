"""Results and statistics of a batch."""

import dataclasses
import time
from collections.abc import Sequence

from qspec_jax.decoding.generate import RowStats


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one request, with the fields that `generate.Generation` and its `Stats.rows` have for each prompt.

    Attributes:
        index: of the request.
    """

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: str
    stats: RowStats
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None


@dataclasses.dataclass
class BatchStats:
    """Totals of a run, of `batch_size` rows at a time. slot_rounds counts every slot in every round; busy_rounds counts those that were
    working on a prompt. full_rounds and full_decode_s are of rounds for which every slot had a prompt and others waited, so that the rounds
    ended when one of them did, or `REFILL_SHARE` of them.

    The seconds are all that pass until the last result, but for what is done with results meanwhile, when the device may be reading the
    next prompt; compile_s is apart. held_bytes is the most that rows at work ever held together: their pages, and what each has of its own.
    """

    batch_size: int = 0
    prompts: int = 0
    new_tokens: int = 0
    rounds: int = 0
    slot_rounds: int = 0
    busy_rounds: int = 0
    full_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    compile_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    full_decode_s: float = 0.0
    held_bytes: int = 0

    def become_total(self, parts: Sequence["BatchStats"]) -> None:
        """Sets these figures to those of several devices that work at the same time. Counts are added, and with full_rounds its seconds;
        those of prefill and decoding are of the device that has taken longest; compile_s and held_bytes are the most of any."""
        slowest = max(parts, key=lambda part: part.prefill_s + part.decode_s)
        for field in dataclasses.fields(self):
            values = [getattr(part, field.name) for part in parts]
            if field.name in ("prefill_s", "decode_s"):
                total = getattr(slowest, field.name)
            else:
                total = max(values) if field.name in ("compile_s", "held_bytes") else sum(values)
            setattr(self, field.name, total)

    @property
    def rates(self) -> dict[str, float | None]:
        """Rates of the run; None where there is nothing to divide by.

        tokens_per_second counts the seconds of prefill and decoding. busy_slots is busy over slot rounds; the ideal is 1.
        draft_acceptance_rate is accepted over drafted tokens.
        """

        def divided(part: float, whole: float) -> float | None:
            return part / whole if whole else None

        return {
            "tokens_per_second": divided(self.new_tokens, self.prefill_s + self.decode_s),
            "busy_slots": divided(self.busy_rounds, self.slot_rounds),
            "draft_acceptance_rate": divided(self.num_accepted_draft_tokens, self.num_draft_tokens),
        }


class LapTimes:
    """The seconds of a run, added to its statistics lap by lap: what passes between two laps is of one kind."""

    def __init__(self, stats: BatchStats):
        self.stats, self.began = stats, time.perf_counter()

    def restart(self) -> None:
        """Begins a lap now; what has passed since the last one is not counted."""
        self.began = time.perf_counter()

    def add(self, name: str, until: float | None = None) -> float:
        """Adds the seconds since the last lap to the statistics of this name, and returns them. until: the lap's end; None: now."""
        until = time.perf_counter() if until is None else until
        passed, self.began = until - self.began, until
        setattr(self.stats, name, getattr(self.stats, name) + passed)
        return passed
