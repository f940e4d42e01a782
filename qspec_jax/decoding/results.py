"""Results and statistics: of a call of `generate`, and of a batch."""

import dataclasses
import time
from collections.abc import Sequence

from qspec_jax.decoding.displayed import generation_html
from qspec_jax.states.state import State
from qspec_jax.traces.trace import Trace


@dataclasses.dataclass(frozen=True)
class RowStats:
    """Counts of one row, or of several together.

    Attributes:
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens that were generated.
        num_spec_steps: draft/verify rounds; 0 without a draft.
        num_draft_tokens: tokens that were drafted.
        num_accepted_draft_tokens: drafts that the target accepted.
        draft_acceptance_rate: accepted / drafted tokens (the token that the target adds to each round not counted); None where nothing was
            drafted.
        mean_acceptance_length: 1 + accepted / rounds, tokens per round; None without rounds of a draft.
        acceptance_histogram: [a] counts the rounds that accepted a drafts.
        flushes: groups that left the buffer.
    """

    prompt_tokens: int
    new_tokens: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_histogram: list[int]
    flushes: int


@dataclasses.dataclass(frozen=True)
class Stats(RowStats):
    """Totals of a call to generate, over its prompts.

    Attributes:
        compile_s: seconds of compiling, apart from the two that follow.
        prefill_s: seconds of reading the prompts.
        decode_s: seconds of the rounds.
        tokens_per_second: of decode_s alone, all rows together.
        peak_memory_bytes: of the first device; None where it does not say.
        cache_bytes: what the KV cache has allocated, on all devices together and in host memory.
        host_cache_bytes: the part of it in host memory.
        rows: the counts of each prompt.
    """

    compile_s: float
    prefill_s: float
    decode_s: float
    tokens_per_second: float
    peak_memory_bytes: int | None
    cache_bytes: int
    host_cache_bytes: int
    rows: list[RowStats]


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of `generate`. A notebook shows it as a table with the histogram of accepted drafts.

    Attributes:
        token_ids: the new tokens of each prompt, or of each sample of each prompt in turn, an EOS included, and up to the token in which a
            stop string was complete.
        text: of each prompt's new tokens, without a stop string; None without a tokenizer.
        finish_reason: "eos", "stop" or "length" for each prompt.
        stats: totals, and in `rows` the counts of each prompt.
        logprobs: the target's log-probability of each new token; None if they were not asked for.
        top_logprobs: pairs of token id and log-probability for the most likely tokens of each position.
        states: where states were continued, those after the new tokens; else None.
        trace: what happened in each round, if it was asked for.
    """

    token_ids: list[list[int]]
    text: list[str] | None
    finish_reason: list[str]
    stats: Stats
    logprobs: list[list[float]] | None = None
    top_logprobs: list[list[list[tuple[int, float]]]] | None = None
    states: list[State] | None = None
    trace: Trace | None = None

    def _repr_html_(self) -> str:
        return generation_html(self.stats, self.text, self.token_ids, self.finish_reason)


def summary(prompt_tokens, new_tokens, rounds, drafted, accepted, histogram, flushes, *, speculative: bool) -> RowStats:
    """The counts of a row, or of several together."""
    return RowStats(
        prompt_tokens=int(prompt_tokens),
        new_tokens=int(new_tokens),
        num_spec_steps=int(rounds) if speculative else 0,
        num_draft_tokens=int(drafted),
        num_accepted_draft_tokens=int(accepted),
        draft_acceptance_rate=float(accepted / drafted) if drafted else None,
        mean_acceptance_length=float(1 + accepted / rounds) if speculative and rounds else None,
        acceptance_histogram=histogram.tolist() if speculative else [],
        flushes=int(flushes),
    )


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one request, with the fields that `Generation` and its `Stats.rows` have for each prompt.

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
