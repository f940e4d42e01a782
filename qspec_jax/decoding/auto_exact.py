"""Exact "auto": bits where a single prompt has them at hardly any cost, which is on NVIDIA Hopper GPUs, and tokens elsewhere."""

import dataclasses
import logging
from collections.abc import Sequence

from jaxtyping import Array, Key

from pallas_kernels import dispatch
from pallas_kernels.formats.weights import CodedWeight
from qspec_jax.decoding.config import BITS, TOKENS, GenerationConfig
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.exact_bits import check_bits
from qspec_jax.decoding.limits import Limits
from qspec_jax.decoding.prepare import Prepared
from qspec_jax.decoding.sampling import Sampler
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
    prompts, configs = (() if prepared.states else prepared.prompts), prepared.configs
    exact = exact_of_rows(prepared.model, prepared.draft, configs[0], prompts, sampler, keys, limits)

    def settled(config: GenerationConfig) -> GenerationConfig:
        return dataclasses.replace(config, exact=exact)

    requests = tuple(dataclasses.replace(request, config=settled(request.config)) for request in prepared.requests)
    return dataclasses.replace(prepared, config=settled(prepared.config), requests=requests)


def exact_of_rows(
    model: Llama,
    draft: Draft | None,
    config: GenerationConfig,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    keys: Key[Array, "B"],
    limits: Limits,
) -> str:
    """What exact "auto" is for rows that are decoded together. On a GPU one line is logged, at INFO, with the choice.

    It is "bits" for a single greedy prompt that can have them, of a model whose layers were checked on a GPU. Prompts of a batch would be
    read one after the other; passes of many rows, and INT4 and nested weights, have been measured too little (docs/exact.md).

    Args:
        model, draft: of the rows; the model may be an outline.
        config: the settings of the first row.
        prompts: token ids; none where rows go on from states.
        sampler, keys, limits: of the rows.
    """
    if dispatch.platform() != "gpu":
        return TOKENS
    if len(prompts) != 1:
        return _logged(TOKENS, f"since {AUTO} is {BITS} for single prompts alone")
    if config.temperature > 0:
        return _logged(TOKENS, f"since {AUTO} is {BITS} for greedy decoding alone")
    if any(isinstance(weight, CodedWeight) for weight in model.weights().values()):
        return _logged(TOKENS, f"since {AUTO} is {BITS} for models without INT4 and nested weights")
    if not model.config.has_llama_layers:
        return _logged(
            TOKENS, f"since {AUTO} is {BITS} for Llama's layers alone, without biases, multipliers and norms of queries and keys"
        )
    try:
        config = dataclasses.replace(config, exact=BITS)
        engine = Engine.for_configs(model, draft, [config], prompt_tokens=len(prompts[0]))
        check_bits(model, config, draft, engine.gamma)
        # Whether kernels take the model's shapes is known once rounds are traced.
        engine.rounds_call(engine.prefill_of(prompts, sampler, keys, limits).shapes(), sampler, limits, lazy=True).shapes()
    except BitsRefused as refused:
        return _logged(TOKENS, f"since exact {BITS} {refused.reason}")
    return _logged(BITS, "tokens are those of decoding without a draft, to the last one")


def _logged(exact: str, why: str) -> str:
    warn_once(log, f"exact {AUTO}: {exact}, {why}", logging.INFO)
    return exact
