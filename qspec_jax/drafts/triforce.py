"""TriForce: a cascade whose first draft is a small model over a window, and whose middle is the target's own model over a retrieval cache.

Source: TriForce (arXiv 2404.11912), section 4; cascade.py has its algorithm.
"""

import dataclasses
from collections.abc import Callable

from qspec_jax.drafts.cascade import FIRST_GAMMA, CascadeDraft, first_gamma_setting
from qspec_jax.drafts.draft import DraftSettings
from qspec_jax.drafts.draft_of_two import SettingsOfTwo
from qspec_jax.drafts.retrieval import RetrievalSettings
from qspec_jax.drafts.small_model import SmallModelSettings
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.settings_text import check_settings, setting

RETRIEVAL = RetrievalSettings()


@dataclasses.dataclass(frozen=True)
class TriForceSettings(SettingsOfTwo):
    """The small model reads the first tokens and the most recent ones, see `SmallModelSettings`. The middle is any draft that only makes
    steps of a model (`StepwiseDraft`): retrieval, streaming-llm, snapkv, sparse, quantspec, ..."""

    model: str = setting("", "The small model's checkpoint: a directory, or ORG/NAME on the Hub.")
    gamma1: int | None = first_gamma_setting("the small model")
    middle: DraftSettings = setting(
        RETRIEVAL,
        "The draft whose steps verify what the small model drafts, retrieval by default.",
        example="middle=(retrieval:budget=8192,chunk=4)",
    )
    sinks: int = setting(16, "How many of the first tokens the small model reads.", minimum=0)
    window: int = setting(240, "How many of the most recent tokens the small model reads.", minimum=1)
    PARTS = "first", "middle"
    NAME_OF_FIRST_GAMMA = "gamma1"

    def __post_init__(self):
        if not self.model:
            raise InputError("the triforce draft needs a small model: triforce:model=DIR")
        check_settings("draft", self)

    @property
    def first(self) -> SmallModelSettings:
        """The settings of the small model."""
        return SmallModelSettings(self.model, reads="window", sinks=self.sinks, window=self.window)

    def make(self, model: Llama, int4: Callable[[], Llama]) -> CascadeDraft:
        """The draft of a model. Raises InputError as the small model's settings and the middle's do, and as `CascadeDraft`."""
        first = self.first.make(model, int4)  # which may be refused, before the middle's INT4 weights take their time
        return CascadeDraft(first, self.middle.make(model, int4), FIRST_GAMMA if self.gamma1 is None else self.gamma1)
