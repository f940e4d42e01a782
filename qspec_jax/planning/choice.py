"""The choice of `--draft auto`, and the cost of a draft beside a verification: by shapes and stored figures of devices, never by a clock.

So both are the same on every run with the same prompts and settings on the same kind of device. Costs are those of `qspec plan`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from pallas_kernels.attention.support import GROUP_SIZES, HEAD_DIMS
from pallas_kernels.matmul.support import GROUP_SIZE, OUTPUTS
from qspec_jax.caches.cache import Gives
from qspec_jax.caches.registry import CACHES, CacheConfig
from qspec_jax.drafts.cascade import FIRST_GAMMA
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.prompt_lookup import PromptLookupSettings
from qspec_jax.drafts.registry import AUTO, NONE, USUAL, first_gamma_of, parse_draft, with_first_gamma
from qspec_jax.drafts.step_bytes import skipped_by
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.planning import cpu, timing
from qspec_jax.planning.acceptance import first_level, last_level
from qspec_jax.planning.devices import Device, stored_device
from qspec_jax.planning.operations import layer_kinds, linear_shapes
from qspec_jax.planning.plan_report import PlannedRow
from qspec_jax.planning.planner import Planner
from qspec_jax.planning.repetition import Repetition
from qspec_jax.planning.steps import outlined, outlined_draft
from qspec_jax.quantization.outline import outline

CANDIDATES = ("sparse", "quantspec")  # with their default settings; and none
# Compared too where the prompts say how often their first draft would have been right.
CASCADES = ("cascade:first=prompt-lookup,middle=sparse", "cascade:first=prompt-lookup,middle=quantspec")
GAMMAS = range(1, 13)
# The share of a token's time that a draft should save, and a cascade beside other drafts; stored costs are not more accurate.
MIN_SAVING = 0.02
UNKNOWN = (USUAL, 4)  # draft and gamma where no stored cost holds

Repeats = Callable[[PromptLookupSettings], Repetition | None]  # of the prompts; None where they are too short


@dataclasses.dataclass(frozen=True)
class DraftChoice:
    """What `auto` chose.

    Attributes:
        draft: the text of a draft.
        gamma: drafts of a round.
        reason: a sentence that says why.
    """

    draft: str
    gamma: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a decode runs, which is no setting of a draft.

    Attributes:
        model: its shape.
        dtype: the name of its dtype.
        cache: the target's.
        device_kind: what JAX calls the kind of device.
        lacking: pairs of kernels (see `Device.kernels`) that cannot run there, and why, such as that they need a newer jax.
    """

    model: LlamaConfig
    dtype: str
    cache: CacheConfig
    device_kind: str
    lacking: tuple[tuple[str, str], ...] = ()

    def costed(self) -> Device | str:
        """The device whose stored figures hold, or why none do."""
        device = stored_device(self.device_kind)
        if device is None:
            return f"no costs are stored for {self.device_kind!r}"
        if why := dict(self.lacking).get(device.kernels):
            return f"stored costs are those of {device.kernels}, which {why}"
        if self.dtype != "bfloat16":
            return f"stored costs are those of bfloat16, not of {self.dtype}"
        if self.model.nested_weights:
            return "no costs are stored of nested weights"
        if self.model.head_dim not in HEAD_DIMS:
            return f"stored costs are those of kernels, which there are none of for a head_dim of {self.model.head_dim}"
        if self.cache.name not in ("full", "int8"):
            return f"no costs are stored for the {self.cache.name} cache"
        if self.model.experts is not None:
            return "stored costs are those of kernels, which there are none of for experts"
        size = self.cache.group_size_for(self.model.head_dim)
        if self.cache.kind != "full" and size not in GROUP_SIZES:
            return f"stored costs are those of kernels, which there are none of for groups of {size} tokens"
        return device


def without_kernels(config: LlamaConfig) -> str | None:
    """The reason why no draft pays on a GPU for a model of this shape: its linear layers or experts have no kernels. None if all have."""
    if config.experts is not None:
        chosen = f"{config.experts.chosen} of {config.experts.count} experts"
        return f"experts run in plain JAX, where verifying several tokens reads {chosen} for each of them, and tokens one by one take less"
    for outputs, inputs in (shape for layer in layer_kinds(config) for shape in linear_shapes(config, layer)):
        if inputs % GROUP_SIZE or outputs % OUTPUTS:
            return (
                f"a linear layer of {inputs} inputs and {outputs} outputs runs in plain JAX, where drafts are slower than decoding without "
                f"one: kernels take inputs in multiples of {GROUP_SIZE}, and outputs in multiples of {OUTPUTS}"
            )
    return None


def choose(setting: Setting, *, context: int | None, batch: int, gamma: int | None = None, repeats: Repeats | None = None) -> DraftChoice:
    """The draft, and the number of drafts of a round, with which a token takes least time: of `CANDIDATES`, and of `CASCADES` where the
    prompts say how often prompt lookup would have been right, over the setting's cache; or none, where none of them saves `MIN_SAVING`.

    On a CPU it is what `qspec_jax.planning.cpu` has measured. Acceptance is what `qspec plan` assumes. Memory is not considered. Where no
    stored cost holds it is `UNKNOWN`, with gamma where that is given.

    Args:
        setting: where the decode runs.
        context: tokens of the longest row, its new ones among them; None where it is not known.
        batch: rows at a time.
        gamma: drafts of a round; None chooses it too.
        repeats: what prompt lookup would have proposed along the ends of the prompts, which is asked where it decides something; None: they
            are not known.
    """
    if gamma == 0:
        return DraftChoice(NONE, 0, f"draft {AUTO}: none, since a round is to have no drafts")
    device = setting.costed()
    if isinstance(device, str) and setting.device_kind == cpu.KIND:
        draft, gamma, why = cpu.choose(setting.model, setting.dtype, gamma)
        return DraftChoice(draft, gamma, f"draft {AUTO}: {_with_gamma(draft, gamma)}, {why}")
    if context is None:
        device = "the lengths of the rows are not known"
    if (why := without_kernels(setting.model)) and stored_device(setting.device_kind):
        return DraftChoice(NONE, 0, f"draft {AUTO}: none, since {why}")
    if isinstance(device, str):
        draft, usual = UNKNOWN
        why = "the default" if gamma is None else "as given"
        gamma = usual if gamma is None else gamma
        return DraftChoice(draft, gamma, f"draft {AUTO}: {draft} with {gamma} drafts a round, {why}, as {device}")
    rows, left_out = [_planner(setting, device, {}).autoregressive(setting.cache, context, batch)], []
    repeated: dict[str, Repetition] = {}
    for text in (*CANDIDATES, *CASCADES):
        found = _repeats_before(text, repeats)
        if text in CASCADES and not found:
            continue
        repeated |= found
        groups = Gives.GROUPS in CACHES[setting.cache.kind].gives
        if last_level(text) == "sparse" and (device.kernels != "mosaic_gpu" or not groups):
            lacks = "has no kernel for its verifications there" if groups else "needs the int8 cache"
            left_out.append(f"{text} {lacks}")
            continue
        rows.append(_fastest(_planner(setting, device, found), text, setting, context, batch, GAMMAS if gamma is None else [gamma]))

    def weighed(row: PlannedRow) -> float:
        """Its time; less where it has no draft, and more where it is a cascade's."""
        return row.ms_per_token * (1 - MIN_SAVING if row.draft == NONE else 1 / (1 - MIN_SAVING) if row.draft in CASCADES else 1)

    best = min(rows, key=weighed)
    compared = ", ".join(_shown(row, repeated) for row in rows)
    chosen, where = _with_gamma(_settled(best), best.gamma), _where(setting, device, context, batch)
    reason = f"draft {AUTO}: {chosen}, by {where}; expected ms a token: {compared}"
    if best.draft == NONE:
        left_out.insert(0, f"no draft saves {MIN_SAVING:.0%}")
    return DraftChoice(_settled(best), best.gamma, "; ".join([reason, *left_out]))


def choose_gammas(
    setting: Setting, draft: str, *, context: int | None, batch: int, gamma: int | None = None, repeats: Repeats | None = None
) -> DraftChoice:
    """The numbers of drafts with which a token takes least time with a cascade that leaves one or both of them open: of a round, and of its
    first draft at a time, which the text of the choice has.

    Acceptance is what `qspec plan` assumes of a draft that is named; that of prompt lookup by a middle is what the prompts say, if they are
    long enough. Where none is known, and where no stored cost holds, they are those of `UNKNOWN` and `FIRST_GAMMA`.

    Args:
        setting: where the decode runs.
        draft: the text of the cascade.
        context, batch, gamma, repeats: as of `choose`.
    """
    first_gamma = first_gamma_of(draft)
    repeated = _repeats_before(draft, repeats)
    found = _row_of_cascade(setting, draft, context, batch, GAMMAS if gamma is None else [gamma], repeated)
    if isinstance(found, str):
        gamma = UNKNOWN[1] if gamma is None else gamma
        first_gamma, settled = (FIRST_GAMMA, with_first_gamma(draft, FIRST_GAMMA)) if first_gamma is None else (first_gamma, draft)
        return DraftChoice(settled, gamma, f"draft {draft}: {_gammas(gamma, first_gamma)}, the default, as {found}")
    where = _where(setting, setting.costed(), context, batch)
    expected = f"expected ms a token: {found.ms_per_token:.3g} ({_rests_on(found, repeated)})"
    return DraftChoice(_settled(found), found.gamma, f"draft {draft}: {_gammas(found.gamma, found.first_gamma)}, by {where}; {expected}")


def _where(setting: Setting, device: Device, context: int, batch: int) -> str:
    """Whose costs a choice is by, and at which sizes."""
    same = device.kind == setting.device_kind
    named = "" if same else f" for {setting.device_kind!r}"
    estimated = "" if device.measured and same else ", ESTIMATES,"
    return f"stored costs of the {device.name}{named}{estimated} at {context:,} tokens, batch {batch}, {setting.cache.kind} cache"


def _planner(setting: Setting, device: Device, repeated: Mapping[str, Repetition]) -> Planner:
    """A planner. repeated: what the prompts say of prompt lookup, by the text of the draft that it is."""
    proposing = {text: found.proposing for text, found in repeated.items()}
    return Planner(setting.model, device, 0, {}, proposing, {text: found.acceptance for text, found in repeated.items()})


def _repeats_before(draft: str, repeats: Repeats | None) -> dict[str, Repetition]:
    """What the prompts say of a cascade's first draft, by its text; empty where it is no prompt lookup, or they say nothing."""
    first = first_level(draft)
    settings = parse_draft(first)
    found = repeats(settings) if repeats is not None and isinstance(settings, PromptLookupSettings) else None
    return {} if found is None else {first: found}


def _row_of_cascade(
    setting: Setting, draft: str, context: int | None, batch: int, gammas: Sequence[int], repeated: Mapping[str, Repetition]
) -> PlannedRow | str:
    """What is expected of a cascade with the best of these gammas, or why nothing is. repeated: see `_repeats_before`."""
    device = setting.costed()
    if isinstance(device, str):
        return device
    if context is None:
        return "the lengths of the rows are not known"
    if why := without_kernels(setting.model):
        return why
    try:
        found = _fastest(_planner(setting, device, repeated), draft, setting, context, batch, gammas)
    except InputError as error:
        return str(error)
    known = f"no acceptance is stored of a part of it ({found.note.removeprefix('give ')} of `qspec plan`)"
    return known if found.ms_per_token is None else found


def _fastest(planner: Planner, text: str, setting: Setting, context: int, batch: int, gammas: Sequence[int]) -> PlannedRow:
    """The row of a draft with the best of these gammas, or the one that says why there is none."""
    drafts = outlined(parse_draft(text), outline(setting.model), lambda: outline(setting.model, int4=True))
    found = planner.drafted(text, drafts, setting.cache, context, batch, gammas)
    return found[0] if found[0].ms_per_token is None else min(found, key=lambda row: row.ms_per_token)


def _settled(row: PlannedRow) -> str:
    """The draft of a row, with how many tokens a cascade's first draft drafts at a time."""
    left_open = row.first_gamma is not None and first_gamma_of(row.draft) is None
    return with_first_gamma(row.draft, row.first_gamma) if left_open else row.draft


def _gammas(gamma: int, first_gamma: int) -> str:
    return f"{gamma} drafts a round, {first_gamma} of its first draft at a time"


def _with_gamma(draft: str, gamma: int) -> str:
    return draft if draft == NONE else f"{draft} with {gamma} drafts a round"


def _shown(row: PlannedRow, repeated: Mapping[str, Repetition]) -> str:
    rests = "" if row.draft == NONE else f" ({row.gamma} drafts, {_rests_on(row, repeated)})"
    return f"{row.draft} {row.ms_per_token:.3g}{rests}"


def _rests_on(row: PlannedRow, repeated: Mapping[str, Repetition]) -> str:
    """What the time of a draft rests on. repeated: see `_repeats_before`."""
    inner = ""
    if found := repeated.get(first_level(row.draft)):
        inner = f", inner acceptance {found.acceptance:.2g} in {found.proposing:.0%} of passes, as at the prompts' ends"
    elif row.inner_acceptance is not None:
        inner = f", inner acceptance ASSUMED {row.inner_acceptance:g}"
    return f"acceptance ASSUMED {row.acceptance:g}{inner}"


def relative_cost(setting: Setting, draft: Draft, *, context: int, gamma: int) -> float | None:
    """What a step of a draft takes, where verifying a round of gamma drafts takes 1, for a row alone that holds `context` tokens. None
    where no stored cost holds, for a draft without a model, for an oracle, and for steps that skip layers.

    Of drafts that a round asks in turn it is that of the last one with a model; None if an oracle is among them.
    """
    device = setting.costed()
    if isinstance(device, str):
        return None
    if any(map(skipped_by, draft.in_turn())):
        return None
    asked = [outlined_draft(each) for each in draft.in_turn()]
    models = [each for each in asked if each.model is not None]
    if not models or any(each.model.oracle for each in models):
        return None
    where = dict(context=context, batch=1)
    step = timing.draft_cost(device, models[-1], setting.model, setting.cache, **where)
    observe = any(each.observes for each in asked)
    target = timing.target_cost(device, setting.model, setting.cache, **where, tokens=gamma + 1, observe=observe)
    return step.seconds(device) / target.seconds(device)
