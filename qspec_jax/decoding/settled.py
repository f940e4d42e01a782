"""What a `GenerationConfig` leaves open: draft `auto`, and what a draft costs for adaptive speculation, both by stored costs
(`qspec_jax.planning.choice`), and what a draft chooses by the prompts.

No time is measured: the same model, prompts, settings and kind of device give the same on every run.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence

import jax

from pallas_kernels import dispatch
from qspec_jax.decoding.config import GenerationConfig, beside_draft
from qspec_jax.decoding.engine import max_drafts
from qspec_jax.decoding.limits import DRAFT_COST
from qspec_jax.decoding.skip_search import layers_to_skip
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.registry import AUTO, NONE
from qspec_jax.models.llama import Llama
from qspec_jax.planning.choice import Setting, choose, relative_cost

log = logging.getLogger(__name__)


def with_draft(
    model: Llama,
    configs: Sequence[GenerationConfig],
    prompt_tokens: Sequence[int] | None,
    *,
    batch: int,
    draft: Draft | None = None,
    device_kind: str | None = None,
) -> list[GenerationConfig]:
    """The configs, which share a draft, with a named one in place of "auto": the one that pays for the longest of the rows, and its gamma
    where a config has none. One line is logged, at INFO, with what was chosen and why.

    Args:
        model: the target; an outline will do.
        configs: of the rows.
        prompt_tokens: of each config's prompt. None where the rows are not known, and the choice is to depend on model, settings and
            device alone.
        batch: rows at a time.
        draft: one that is made already, which "auto" then gives way to.
        device_kind: what JAX calls the device that is to decode; None for the first one here.
    """
    if not configs or configs[0].draft != AUTO:
        return list(configs)
    if draft is not None:
        return list(map(beside_draft, configs))
    longest = None
    if prompt_tokens is not None:
        longest = max(tokens + config.max_new_tokens for tokens, config in zip(prompt_tokens, configs, strict=True))
    given = {config.num_speculative_tokens for config in configs}
    gamma = given.pop() if len(given) == 1 else None
    if gamma:  # as many as rounds are made for, whatever is asked
        gamma = max(max_drafts(model, beside_draft(config)) for config in configs)
    found = choose(_setting(model, configs[0], device_kind), context=longest, batch=batch, gamma=gamma)
    log.info(found.reason + (_without_effect(configs) if found.draft == NONE else ""))

    def chosen(config: GenerationConfig) -> GenerationConfig:
        gamma = found.gamma if config.num_speculative_tokens is None else config.num_speculative_tokens
        # The target does not depend on the choice.
        cache = config.cache_config.kind if config.cache is None and found.draft == NONE else config.cache
        return dataclasses.replace(config, draft=found.draft, num_speculative_tokens=gamma, cache=cache)

    return list(map(chosen, configs))


def _without_effect(configs: Sequence[GenerationConfig]) -> str:
    """The part of a log line that names the settings which have no effect without a draft; empty if there are none."""
    given = {
        "num_speculative_tokens": any(config.num_speculative_tokens for config in configs),
        "adaptive": any(config.adaptive for config in configs),
        "draft_cost": any(config.draft_cost is not None for config in configs),
        "min_draft_confidence": any(config.min_draft_confidence for config in configs),
    }
    names = [name for name, is_given in given.items() if is_given]
    return f"; without a draft, {' and '.join(names)} {'has' if len(names) == 1 else 'have'} no effect" if names else ""


def for_prompts(model: Llama, draft: Draft | None, configs: Sequence[GenerationConfig], prompts: Sequence[Sequence[int]]) -> Draft | None:
    """The draft with what it leaves to be chosen by the prompts, such as `skip=auto`. configs: that it is used with, all of one cache. If
    none of them has drafts, the draft comes back as it is.
    """
    gamma = max((max_drafts(model, config) for config in configs), default=0)
    if draft is None or not gamma:
        return draft
    return draft.with_choice(functools.partial(layers_to_skip, model, prompts, configs[0].cache_config, gamma))


def with_costs(
    model: Llama, configs: Sequence[GenerationConfig], prompt_tokens: Sequence[int], draft: Draft | None
) -> list[GenerationConfig]:
    """These configs, each with a `draft_cost` where it is adaptive and has none: by stored costs for the row at its longest, as if it were
    alone, so that it does not depend on its neighbours; `DRAFT_COST` where no stored cost holds.

    prompt_tokens: of each config's prompt. draft: which they share, as they do the target's cache.
    """

    @functools.cache
    def cost(context: int, gamma: int) -> float:
        if draft is None or not gamma:
            return DRAFT_COST
        if (found := relative_cost(_setting(model, configs[0]), draft, context=context, gamma=gamma)) is None:
            log.info("adaptive: no stored cost of this draft here, so a step of it is taken to cost %g of a verification", DRAFT_COST)
        return found or DRAFT_COST

    def costed(config: GenerationConfig, tokens: int) -> GenerationConfig:
        if not config.adaptive or config.draft_cost is not None:
            return config
        return dataclasses.replace(config, draft_cost=cost(tokens + config.max_new_tokens, max_drafts(model, config)))

    return list(map(costed, configs, prompt_tokens))


def _setting(model: Llama, config: GenerationConfig, device_kind: str | None = None) -> Setting:
    reasons = {"mosaic_gpu": dispatch.no_mosaic_gpu(), "triton": dispatch.no_triton()}
    lacking = tuple((kernels, why) for kernels, why in reasons.items() if why)
    return Setting(model.checkpoint_config, model.dtype.name, config.cache_config, device_kind or jax.devices()[0].device_kind, lacking)
