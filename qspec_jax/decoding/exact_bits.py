"""Where rows can have the same bits whatever is decoded with them (`exact="bits"`), beside what settings say (`GenerationConfig`)."""

from collections.abc import Sequence

import jax.numpy as jnp

from pallas_kernels import dispatch
from qspec_jax.decoding.config import BITS, GenerationConfig
from qspec_jax.decoding.requests import Request
from qspec_jax.drafts.draft import Draft
from qspec_jax.errors import BitsRefused, either
from qspec_jax.models.llama import Llama
from qspec_jax.models.sharding import mesh_of
from qspec_jax.models.uniform import WIDTH


def check_requests(found: Sequence[Request], *, from_states: bool) -> None:
    """Raises BitsRefused for requests that go on from what was read before. from_states: whether all of them do."""
    if from_states or any(request.prefix for request in found):
        raise BitsRefused("is for whole prompts, not for states and requests with a prefix")


def samples_with_bits(configs: Sequence[GenerationConfig]) -> bool:
    """Whether requests with these settings, which are alike in `exact`, have exact "bits" and some of them sample."""
    return configs[0].exact == BITS and any(config.temperature > 0 for config in configs)


def decodes_in_turn(configs: Sequence[GenerationConfig]) -> bool:
    """Whether rows with these settings are decoded one after the other: on a GPU passes of drafts and random draws have the same bits only
    if nothing else is decoded with them."""
    return samples_with_bits(configs) and dispatch.platform() == "gpu"


def check_together(configs: Sequence[GenerationConfig]) -> None:
    """Raises BitsRefused for the settings of several rows that are to be decoded together, and `decodes_in_turn`."""
    if len(configs) > 1 and decodes_in_turn(configs):
        raise BitsRefused(f"of samples on a GPU is for one prompt at a time, not for {len(configs)}; `qspec batch` decodes them in turn")


def check_alike(configs: Sequence[GenerationConfig], max_drafts: Sequence[int]) -> None:
    """Raises BitsRefused for requests with exact "bits" of which some sample, and whose rounds differ in their maximum number of drafts
    (`max_drafts`): all are compiled for the largest."""
    if samples_with_bits(configs) and not decodes_in_turn(configs) and len(found := sorted(set(max_drafts))) > 1:
        raise BitsRefused(f"of samples is for rows with the same num_speculative_tokens (gamma), and these have {either(found)}")


def check_bits(model: Llama, config: GenerationConfig, draft: Draft | None, max_drafts: int) -> None:
    """Raises BitsRefused where exact "bits" does not hold for a model, this device or a draft.

    Args:
        model: the target.
        config: the settings of a request, with the draft chosen.
        draft: None without one.
        max_drafts: the maximum number of drafts in a round.
    """

    def check(ok: bool, what: str) -> None:
        if not ok:
            raise BitsRefused(what)

    platform = dispatch.platform()
    check(platform in ("cpu", "gpu"), f"is for CPUs and GPUs, and this decodes on a {platform}")
    if platform == "gpu":
        reason = dispatch.no_mosaic_gpu()
        check(reason is None, f"on a GPU {reason}")
        check(model.dtype == jnp.bfloat16, f"on a GPU is for models in bfloat16, and this one is in {model.dtype.name}")
        check(model.config.experts is None, "on a GPU is for models without experts")
        # These norms are plain JAX (`RMSNorm.add`), and XLA chooses the order of their sums by the number of rows.
        check(not model.config.norm_offset, "on a GPU is for models whose norms multiply by their weights; in this one it is by 1 + weight")
    check(mesh_of(model) is None, "is for one device, and the model is divided over several")
    check(not model.config.windowed_layers, "is for models without sliding windows, and this one has layers with a window")
    appended = 0 if draft is None else max_drafts + draft.extra_rows
    check(
        appended < WIDTH,
        f"is for at most {WIDTH - 1} tokens that a draft appends in a round, and draft {config.draft_name} appends {appended} at "
        f"num_speculative_tokens (gamma) {max_drafts}",
    )
