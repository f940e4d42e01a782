"""Exact "auto": bits where greedy decoding has them at hardly any cost, which is on NVIDIA Hopper GPUs, and tokens elsewhere."""

import dataclasses
import logging
from collections.abc import Sequence

from jaxtyping import Array, Key

from pallas_kernels import dispatch
from pallas_kernels.formats.weights import CodedWeight
from qspec_jax.decoding.config import BITS, TOKENS, GenerationConfig
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.exact_bits import check_bits, check_requests
from qspec_jax.decoding.keys import stacked
from qspec_jax.decoding.limits import Limits, make_limits
from qspec_jax.decoding.prefill_groups import SHORT_PROMPT
from qspec_jax.decoding.prepare import Prepared
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.sampling import Sampler, make_sampler
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.registry import AUTO
from qspec_jax.errors import BitsRefused, warn_once
from qspec_jax.models.llama import Llama

log = logging.getLogger(__name__)


def resolve_exact(prepared: Prepared, sampler: Sampler, keys: Key[Array, "B"], limits: Limits) -> Prepared:
    """The requests of a batch with exact "auto" resolved, see `exact_of_rows`.

    Args:
        prepared: with any exact.
        sampler, keys, limits: of its requests.
    """
    if prepared.exact != AUTO:
        return prepared
    prompts = () if prepared.states else prepared.prompts
    return _with(prepared, exact_of_rows(prepared.model, prepared.draft, prepared.configs, prompts, sampler, keys, limits))


def resolve_exact_of_slots(prepared: Prepared) -> Prepared:
    """The requests of `run_batch` with exact "auto" resolved: "bits" where all can have them and are prefilled one by one anyway. On
    a GPU one line is logged, at INFO, with the choice."""
    if prepared.exact != AUTO:
        return prepared
    request, *others = prepared.requests
    if dispatch.platform() != "gpu" or any(other.config.exact == TOKENS for other in others):
        return _with(prepared, TOKENS)
    if others and min(len(each.tokens) for each in prepared.requests) <= SHORT_PROMPT:
        why = f"since {AUTO} is {BITS} where prompts are prefilled one by one, and some of up to {SHORT_PROMPT} tokens are together"
        return _with(prepared, _logged(TOKENS, why))
    sampler, limits = make_sampler(request.config), make_limits(prepared.model, request.config, tokenizer=prepared.tokenizer)
    of_first = request.tokens, sampler, stacked([request.key]), limits
    return _with(prepared, _exact_of(prepared.model, prepared.draft, prepared.configs, *of_first, prepared.requests))


def exact_of_rows(
    model: Llama,
    draft: Draft | None,
    configs: Sequence[GenerationConfig],
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    keys: Key[Array, "B"],
    limits: Limits,
) -> str:
    """What exact "auto" is for rows that are prefilled together. On a GPU one line is logged, at INFO, with the choice.

    It is "bits" for a single greedy prompt that can have them, of a model whose layers were checked on a GPU. Several prompts would be
    read one after the other; INT4 and nested weights have been measured too little (docs/exact.md).

    Args:
        model, draft: of the rows; the model may be an outline.
        configs: the settings of each row.
        prompts: token ids; none where rows go on from states.
        sampler, keys, limits: of the rows.
    """
    if dispatch.platform() != "gpu":
        return TOKENS
    if len(prompts) != 1:
        return _logged(TOKENS, f"since {AUTO} is {BITS} where prompts are prefilled one by one, and not for states")
    return _exact_of(model, draft, configs, prompts[0], sampler, keys, limits)


def _exact_of(
    model: Llama,
    draft: Draft | None,
    configs: Sequence[GenerationConfig],
    prompt: Sequence[int],
    sampler: Sampler,
    keys: Key[Array, "1"],
    limits: Limits,
    requests: Sequence[Request] = (),
) -> str:
    """What exact "auto" is on a GPU for rows with these settings and kernels, one of which has this prompt, sampler, key and limits."""
    if any(config.temperature > 0 for config in configs):
        return _logged(TOKENS, f"since {AUTO} is {BITS} for greedy decoding alone")
    if any(isinstance(weight, CodedWeight) for weight in model.weights().values()):
        return _logged(TOKENS, f"since {AUTO} is {BITS} for models without INT4 and nested weights")
    if not model.config.has_llama_layers:
        return _logged(
            TOKENS, f"since {AUTO} is {BITS} for Llama's layers alone, without biases, multipliers and norms of queries and keys"
        )
    try:
        check_requests(requests, from_states=False)
        configs = [dataclasses.replace(config, exact=BITS) for config in configs]
        engine = Engine.for_configs(model, draft, configs, prompt_tokens=len(prompt))
        check_bits(model, configs[0], draft, engine.gamma)
        # Whether kernels take the model's shapes is known once rounds are traced.
        engine.rounds_call(engine.prefill_of([prompt], sampler, keys, limits).shapes(), sampler, limits, lazy=True).shapes()
    except BitsRefused as refused:
        return _logged(TOKENS, f"since exact {BITS} {refused.reason}")
    return _logged(BITS, "tokens are those of decoding without a draft, to the last one")


def _with(prepared: Prepared, exact: str) -> Prepared:
    """The requests with this `exact`."""

    def settled(config: GenerationConfig) -> GenerationConfig:
        return dataclasses.replace(config, exact=exact)

    requests = tuple(dataclasses.replace(request, config=settled(request.config)) for request in prepared.requests)
    return dataclasses.replace(prepared, config=settled(prepared.config), requests=requests)


def _logged(exact: str, why: str) -> str:
    warn_once(log, f"exact {AUTO}: {exact}, {why}", logging.INFO)
    return exact
