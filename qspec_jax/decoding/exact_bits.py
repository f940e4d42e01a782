"""Where greedy decoding can have the bits of one-by-one decoding (`exact="bits"`)."""

from pallas_kernels import dispatch
from qspec_jax.decoding.config import BITS, GenerationConfig
from qspec_jax.drafts.draft import Draft
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.sharding import mesh_of
from qspec_jax.models.uniform import WIDTH

CACHES_WITH_BITS = ("full", "int8")  # without a part in host memory


def check_bits(model: Llama, config: GenerationConfig, draft: Draft | None, max_drafts: int) -> None:
    """Raises InputError where exact "bits" does not hold.

    Args:
        model: the target.
        config: the settings of a request, with the draft chosen.
        draft: None without one.
        max_drafts: the maximum number of drafts in a round.
    """

    def check(ok: bool, what: str) -> None:
        if not ok:
            raise InputError(f"exact {BITS} {what}; leave it out")

    check(dispatch.platform() == "cpu", f"is for CPUs, and this decodes on a {dispatch.platform()}")
    check(mesh_of(model) is None, "is for one device, and the model is divided over several")
    check(not model.config.windowed_layers, "is for models without sliding windows, and this one has layers with a window")
    cache = config.cache_config
    check(cache.name in CACHES_WITH_BITS, f"is for the caches {' and '.join(CACHES_WITH_BITS)}, not for {cache.name}")
    check(config.temperature == 0, f"is for greedy decoding, and temperature is {config.temperature:g}")
    check(config.num_return_sequences == 1, "is for one sample of each prompt")
    check(max_drafts < WIDTH, f"is for at most {WIDTH - 1} drafts in a round, and num_speculative_tokens (gamma) is {max_drafts}")
    extra = 0 if draft is None else draft.extra_rows
    check(
        max_drafts + extra < WIDTH,
        f"is for at most {WIDTH - 1} tokens that a draft appends, and draft {config.draft_name} appends {max_drafts + extra} at "
        f"num_speculative_tokens (gamma) {max_drafts}",
    )
