"""What a plan finds: intensities, sizes of caches, ways of decoding with their times, and the best of them."""

import dataclasses
import enum

from qspec_jax.planning.memory import Memory


@dataclasses.dataclass(frozen=True)
class Intensity:
    """FLOPs per byte in prefill and in decoding one token at a time over a full cache.

    Attributes:
        context, batch: tokens of each prompt, and prompts.
        prefill_linear, decode_linear: of the linear layers.
        prefill_attention, decode_attention: of attention.
        prefill_aggregate, decode_aggregate: of both together.
        attention_share: attention's share of the time of decoding, by bytes and FLOPs alone.
    """

    context: int
    batch: int
    prefill_linear: float
    prefill_attention: float
    prefill_aggregate: float
    decode_linear: float
    decode_attention: float
    decode_aggregate: float
    attention_share: float


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes of the caches of a batch.

    Attributes:
        context, batch: tokens of each prompt, and prompts.
        full_cache_bytes, int8_cache_bytes: of the two caches.
        full_cache_to_weights: the full cache's bytes divided by the weights'.
    """

    context: int
    batch: int
    full_cache_bytes: int
    int8_cache_bytes: int
    full_cache_to_weights: float


class Status(enum.StrEnum):
    """Whether a way of decoding is planned. The last three have no figures."""

    PLANNED = "planned"
    DOES_NOT_FIT = "does not fit"  # times are as if it did
    NO_COST = "no model of its cost"
    NO_ACCEPTANCE = "no acceptance known"
    NOT_PLANNED = "not planned"  # the note says why


@dataclasses.dataclass(frozen=True)
class PlannedRow:
    """A way of decoding at one context and batch.

    Attributes:
        context, batch: tokens of each prompt, and prompts.
        draft: its text, "none" without one.
        cache: the target's, as it was given.
        gamma: drafts of a round, 0 without a draft.
        first_gamma: those that a cascade's first draft makes at a time; None for other drafts.
        status: whether it is planned.
        note: sentences on what the times leave out.
        acceptance: the conditional one, of `combine` that of its drafts together; None where it drafts nothing.
        acceptance_source: where it comes from.
        inner_acceptance, inner_acceptance_source: the same of a cascade's first draft by its middle.
        proposing: the share of the rounds that have a proposal.
        assumed: which of "acceptance", "inner acceptance" and "proposing" were not given.
        kernels_measured: whether GPU kernels that read as it does were measured; if not, times are as if those that read everything did.
            None where nothing is planned.
        step_tuned, target_tuned: whether attention in a step and in a verification has configurations that were tuned on the device, see
            `timing.tuned`.
        accepted_of_drafted: the acceptance rate.
        tokens_per_round: tokens that a round emits for each row.
        prefill_s: seconds of prefill.
        step_ms: one step of the draft's model, None without one; of a cascade a pass of its middle.
        first_step_ms: one step of the model of a cascade's first draft.
        middle_passes: of a cascade's middle in a round.
        target_ms: a verification, or a step without a draft.
        copying_ms: the part of target_ms, all of it or less, in which the cache is copied from host memory.
        flush_ms, round_ms: a round's share of a flush, and a round with all of its drafts.
        ms_per_token: of each row.
        tokens_per_second: of all rows together.
        speedup: over the faster of the autoregressive ways that fit; None where none fits.
        baseline: the cache of that way.
        memory: what it takes.
        max_rows: the most rows of this context that fit.
        longest_context: the longest of this batch that fits, within the models' positions.
    """

    context: int
    batch: int
    draft: str
    cache: str
    gamma: int
    status: Status
    note: str = ""
    acceptance: float | None = None
    acceptance_source: str = ""
    inner_acceptance: float | None = None
    inner_acceptance_source: str = ""
    proposing: float | None = None
    assumed: tuple[str, ...] = ()
    kernels_measured: bool | None = None
    step_tuned: bool | None = None
    target_tuned: bool | None = None
    accepted_of_drafted: float | None = None
    tokens_per_round: float | None = None
    prefill_s: float | None = None
    step_ms: float | None = None
    first_step_ms: float | None = None
    middle_passes: float | None = None
    target_ms: float | None = None
    copying_ms: float | None = None
    flush_ms: float | None = None
    round_ms: float | None = None
    ms_per_token: float | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None
    baseline: str | None = None
    memory: Memory | None = None
    max_rows: int | None = None
    longest_context: int | None = None
    first_gamma: int | None = None

    @property
    def compared(self) -> bool:
        return self.status == Status.PLANNED and self.speedup is not None


@dataclasses.dataclass(frozen=True)
class Best:
    """What is fastest at a context and batch.

    Attributes:
        context, batch: tokens of each prompt, and prompts.
        draft: the draft, "none" where decoding without one is fastest; None where nothing fits.
        gamma: its drafts of a round.
        first_gamma: see `PlannedRow`.
        cache: the target's.
        speedup: see `PlannedRow`.
        drafts_compared: the number of drafts that fit and have figures.
        assumed: `PlannedRow.assumed` of that row, or without a draft of all that were compared.
        with_measured_kernels: the fastest way whose GPU kernels were measured, if that is another.
    """

    context: int
    batch: int
    draft: str | None
    gamma: int
    cache: str | None
    speedup: float | None
    drafts_compared: int = 0
    assumed: tuple[str, ...] = ()
    with_measured_kernels: "Best | None" = None
    first_gamma: int | None = None
