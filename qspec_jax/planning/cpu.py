"""What drafts cost on a CPU, measured, and which of them pays there. Nothing is timed at run time.

On a CPU kernels are plain JAX: a pass with INT4 weights unpacks them first, and takes several times what a pass of the target does. A
verification of a few tokens takes longer than a pass of one, since there arithmetic is the bottleneck and not memory. docs/cpu.md says
how the figures were measured.
"""

import dataclasses
import math

from qspec_jax.drafts.registry import NONE
from qspec_jax.drafts.step_bytes import ITEM_BYTES
from qspec_jax.models.config import LlamaConfig
from qspec_jax.planning.acceptance import ACCEPTANCE
from qspec_jax.planning.operations import model_bytes

KIND = "cpu"  # what JAX calls the kind of device
GAMMA = 4  # drafts a round of the measurements
SLOWEST = 0.95  # of the speed without a draft: slower than that prompt-lookup may not be where it finds nothing


@dataclasses.dataclass(frozen=True)
class CpuCosts:
    """Costs that were measured with a model over an int8 cache of 1,024 tokens, where a step without a draft takes 1.

    Attributes:
        millions: parameters of the model, in millions.
        dtype: of the model, by its name.
        verification: a pass of the target over `GAMMA` + 1 tokens, with a round of prompt-lookup around it.
        int4_step: a step of the quantspec draft.
    """

    millions: float
    dtype: str
    verification: float
    int4_step: float

    def verification_of(self, gamma: int) -> float:
        """A pass of the target over gamma + 1 tokens."""
        return 1 + (self.verification - 1) * gamma / GAMMA


MEASURED = (
    CpuCosts(8, "bfloat16", 1.44, 1.77),
    CpuCosts(8, "float32", 1.77, 1.62),
    CpuCosts(135, "bfloat16", 1.77, 1.79),
    CpuCosts(135, "float32", 2.34, 4.83),
)


def nearest(model: LlamaConfig, dtype: str) -> CpuCosts:
    """The measured costs used for a model: of its kind of dtype, 16 bits or more, and of the number of parameters nearest to its."""
    kind = "bfloat16" if dtype in ("bfloat16", "float16") else "float32"
    millions = model_bytes(model) / ITEM_BYTES / 1e6
    return min((costs for costs in MEASURED if costs.dtype == kind), key=lambda costs: abs(math.log(costs.millions / millions)))


def choose(model: LlamaConfig, dtype: str, gamma: int | None) -> tuple[str, int, str]:
    """The draft that pays on a CPU, its number of drafts a round, 0 without one, and why.

    Args:
        model: the target's shape.
        dtype: its name.
        gamma: drafts of a round; None for `GAMMA`.
    """
    costs, gamma = nearest(model, dtype), GAMMA if gamma is None else gamma
    quantspec, lookup = _quantspec(costs, gamma), costs.verification_of(gamma)
    draft = "quantspec" if quantspec < 1 else "prompt-lookup" if lookup <= 1 / SLOWEST else NONE
    drafts = f"{gamma} draft{'' if gamma == 1 else 's'} a round"
    why = f"by costs stored for CPUs, measured with a model of {costs.millions:g} M parameters in {costs.dtype} ({drafts})"
    rate = ACCEPTANCE["quantspec"].rate
    times = f"a token takes {quantspec:.3g} times as long with quantspec (acceptance ASSUMED {rate:g}) as without a draft, and {lookup:.3g}"
    return draft, 0 if draft == NONE else gamma, f"{why}: {times} times with prompt-lookup where it finds nothing"


def _quantspec(costs: CpuCosts, gamma: int) -> float:
    """What a token takes with the quantspec draft, on average."""
    tokens = sum(ACCEPTANCE["quantspec"].rate ** i for i in range(gamma + 1))
    return (gamma * costs.int4_step + costs.verification_of(gamma)) / tokens
