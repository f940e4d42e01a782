"""The choice of `--draft auto`, and the cost of a draft beside a verification: by shapes and stored figures of devices, never by a clock.

So both are the same on every run with the same settings on the same kind of device. Costs are those of `qspec plan`.
"""

import dataclasses

from pallas_kernels.attention.support import GROUP_SIZES, HEAD_DIMS
from pallas_kernels.matmul.support import GROUP_SIZE, OUTPUTS
from qspec_jax.caches.cache import Gives
from qspec_jax.caches.registry import CACHES, CacheConfig
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.registry import AUTO, NONE, USUAL, parse_draft
from qspec_jax.drafts.step_bytes import skipped_by
from qspec_jax.models.config import LlamaConfig
from qspec_jax.planning import cpu, timing
from qspec_jax.planning.acceptance import ACCEPTANCE
from qspec_jax.planning.devices import Device, stored_device
from qspec_jax.planning.operations import layer_kinds, linear_shapes
from qspec_jax.planning.plan_report import PlannedRow
from qspec_jax.planning.planner import Planner
from qspec_jax.planning.steps import outlined, outlined_draft
from qspec_jax.quantization.outline import outline

CANDIDATES = ("sparse", "quantspec")  # with their default settings; and none
GAMMAS = range(1, 13)
MIN_SAVING = 0.02  # the share of a token's time that a draft should save; stored costs are not more accurate
UNKNOWN = (USUAL, 4)  # draft and gamma where no stored cost holds


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


def choose(setting: Setting, *, context: int | None, batch: int, gamma: int | None = None) -> DraftChoice:
    """The draft, and the number of drafts of a round, with which a token takes least time: `CANDIDATES`, over the setting's cache; or none,
    where none of them saves `MIN_SAVING`.

    On a CPU it is what `qspec_jax.planning.cpu` has measured. Acceptance is what `qspec plan` assumes. Memory is not considered. Where no
    stored cost holds it is `UNKNOWN`, with gamma where that is given.

    Args:
        setting: where the decode runs.
        context: tokens of the longest row, its new ones among them; None where it is not known.
        batch: rows at a time.
        gamma: drafts of a round; None chooses it too.
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
    planner = Planner(setting.model, device, 0, {}, {})
    rows, left_out = [planner.autoregressive(setting.cache, context, batch)], []
    for text in CANDIDATES:
        groups = Gives.GROUPS in CACHES[setting.cache.kind].gives
        if text == "sparse" and (device.kernels != "mosaic_gpu" or not groups):
            lacks = "has no kernel for its verifications there" if groups else "needs the int8 cache"
            left_out.append(f"{text} {lacks}")
            continue
        drafts = outlined(parse_draft(text), outline(setting.model), lambda: outline(setting.model, int4=True))
        found = planner.drafted(text, drafts, setting.cache, context, batch, GAMMAS if gamma is None else [gamma])
        rows.append(min(found, key=lambda row: row.ms_per_token))
    # Rows begin with that without a draft.
    best = min(rows, key=lambda row: row.ms_per_token * (1 - MIN_SAVING if row is rows[0] else 1))
    same = device.kind == setting.device_kind
    estimated = "" if device.measured and same else ", ESTIMATES,"
    named = "" if same else f" for {setting.device_kind!r}"
    where = f"stored costs of the {device.name}{named}{estimated} at {context:,} tokens, batch {batch}, {setting.cache.kind} cache"
    compared = ", ".join(_shown(row) for row in rows)
    reason = f"draft {AUTO}: {_with_gamma(best.draft, best.gamma)}, by {where}; expected ms a token: {compared}"
    if best is rows[0]:
        left_out.insert(0, f"no draft saves {MIN_SAVING:.0%}")
    return DraftChoice(best.draft, best.gamma, "; ".join([reason, *left_out]))


def _with_gamma(draft: str, gamma: int) -> str:
    return draft if draft == NONE else f"{draft} with {gamma} drafts a round"


def _shown(row: PlannedRow) -> str:
    rests = "" if row.draft == NONE else f" ({row.gamma} drafts, acceptance ASSUMED {ACCEPTANCE[row.draft].rate:g})"
    return f"{row.draft} {row.ms_per_token:.3g}{rests}"


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
