"""Resolves what a `GenerationConfig` leaves open: draft `auto` and the cost of a draft, by stored costs (`qspec_jax.planning.choice`), and
settings of a draft that depend on the prompts.

No time is measured: the same model, prompts, settings and kind of device give the same result on every run.
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
from qspec_jax.planning.choice import Setting, choose, choose_gammas, relative_cost
from qspec_jax.planning.repetition import repetition
from qspec_jax.quantization.outline import is_outline

log = logging.getLogger(__name__)


def resolve_draft(
    model: Llama,
    configs: Sequence[GenerationConfig],
    prompt_tokens: Sequence[int] | None,
    *,
    prompts: Sequence[Sequence[int]] = (),
    batch: int,
    device_kind: str | None = None,
    logs: bool = True,
) -> list[GenerationConfig]:
    """The configs, which share a draft, with the draft that pays for the longest row instead of "auto", and its gamma where a config has
    none; with the text of a cascade, with the numbers of drafts that it leaves open. One line is logged, at INFO, with the choice and its
    reason.

    Args:
        model: the target; an outline is enough.
        configs: one of each row.
        prompt_tokens: the length of each row's prompt. None if the rows are not known yet: the choice then depends on model, settings and
            device alone.
        prompts: their token ids; without them no cascade is chosen, and the acceptance of a first draft is an assumed one.
        batch: rows that are decoded at a time.
        device_kind: what JAX calls the device that will decode; None for the first one here.
        logs: whether the line is logged.
    """
    if not configs or not (configs[0].draft == AUTO or any(config.leaves_gammas_open for config in configs)):
        return list(configs)
    longest = None
    if prompt_tokens is not None:
        longest = max(tokens + config.max_new_tokens for tokens, config in zip(prompt_tokens, configs, strict=True))
    given = {config.num_speculative_tokens for config in configs}
    gamma = given.pop() if len(given) == 1 else None
    if gamma:  # no more than a round is compiled for
        gamma = max(max_drafts(model, beside_draft(config)) for config in configs)
    repeats = functools.cache(functools.partial(repetition, prompts)) if len(prompts) else None
    setting, sizes = _setting(model, configs[0], device_kind), dict(context=longest, batch=batch, gamma=gamma, repeats=repeats)
    found = choose(setting, **sizes) if configs[0].draft == AUTO else choose_gammas(setting, configs[0].draft, **sizes)
    if logs:
        log.info(found.reason + (_without_effect(configs) if found.draft == NONE else ""))

    def chosen(config: GenerationConfig) -> GenerationConfig:
        gamma = found.gamma if config.num_speculative_tokens is None else config.num_speculative_tokens
        # The target does not depend on the choice.
        cache = config.cache_config.kind if config.cache is None and found.draft == NONE else config.cache
        return dataclasses.replace(config, draft=found.draft, num_speculative_tokens=gamma, cache=cache)

    return list(map(chosen, configs))


def _without_effect(configs: Sequence[GenerationConfig]) -> str:
    """The end of the log line, which names settings that have no effect without a draft; empty if there are none."""
    given = {
        "num_speculative_tokens": any(config.num_speculative_tokens for config in configs),
        "adaptive": any(config.adaptive for config in configs),
        "draft_cost": any(config.draft_cost is not None for config in configs),
        "min_draft_confidence": any(config.min_draft_confidence for config in configs),
    }
    names = [name for name, is_given in given.items() if is_given]
    return f"; without a draft, {' and '.join(names)} {'has' if len(names) == 1 else 'have'} no effect" if names else ""


def resolve_prompt_settings(
    model: Llama, draft: Draft | None, configs: Sequence[GenerationConfig], prompts: Sequence[Sequence[int]]
) -> Draft | None:
    """The draft with those of its settings resolved that depend on the prompts, such as `skip=auto`.

    Args:
        model: the target; with an outline nothing is resolved.
        draft: None and a draft that no config uses are returned unchanged.
        configs: one of each prompt; they share a cache.
        prompts: token ids.
    """
    gamma = max((max_drafts(model, config) for config in configs), default=0)
    if draft is None or not gamma or is_outline(model):
        return draft
    return draft.with_choice(functools.partial(layers_to_skip, model, prompts, configs[0].cache_config, gamma))


def fill_draft_costs(
    model: Llama, configs: Sequence[GenerationConfig], prompt_tokens: Sequence[int], draft: Draft | None
) -> list[GenerationConfig]:
    """The configs, each with a `draft_cost` if it is adaptive and has none: the stored cost for its row at full length, as if the row were
    alone, so that it does not depend on neighbours; `DRAFT_COST` if no cost is stored.

    Args:
        model: the target.
        configs: one of each row; they share the draft and the cache.
        prompt_tokens: the length of each row's prompt.
        draft: the draft, if there is one.
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
