"""StreamingLLM as a draft: the model reads the first tokens of the text, the attention sinks, and a window of the most recent ones.

Source: StreamingLLM (arXiv 2309.17453), as the baseline of QuantSpec (arXiv 2502.10424, section 5) has it. Unlike there, keys and values
come from the target's cache; the draft does not read the prompt for itself.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from pallas_kernels.formats.kv_cache import HeldKeys
from pallas_kernels.formats.views import View
from qspec_jax.caches.cache import AppendedCache, Cache, Reads
from qspec_jax.caches.compact import CompactCache
from qspec_jax.caches.ring import token_in_row
from qspec_jax.drafts.compact import CompactDraft, CompactSettings, tokens_of_round
from qspec_jax.drafts.draft import Prompt, RoundResult
from qspec_jax.drafts.sink_window import SinkWindow, tokens_of_sinks
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.settings_text import setting


@dataclasses.dataclass(frozen=True)
class StreamingDraftSettings(CompactSettings):
    """The budget is of sinks and window together. Numbering tokens without a gap is what the paper's baseline does."""

    sinks: int = setting(16, "How many tokens from the start of the text stay.", minimum=0)
    positions: str = setting(
        "window", "Whether tokens are numbered without a gap, or keep their positions in the text.", choices=("window", "kept")
    )

    @property
    def always(self) -> tuple[int, str]:
        return self.sinks, "sinks"

    def make(self, model: Llama, int4: Callable[[], Llama]) -> "StreamingDraft":
        """The draft of a model. Raises InputError as `parts` does, and for more sinks than it has positions for."""
        if self.sinks >= (positions := model.config.max_length):
            raise InputError(f"draft sinks {self.sinks} should be less than the model's {positions} positions")
        return StreamingDraft(**self.parts(model, int4))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingDraft(CompactDraft):
    """Steps over sinks and a window. Its state is their cache, whose ring is the window, with the sinks' keys as in the text.

    In a round nothing leaves: its drafts are in rows after the window.
    """

    settings: StreamingDraftSettings = dataclasses.field(metadata={"static": True})

    def begin(self, prompt: Prompt) -> SinkWindow:
        budget, most = self.budgets(prompt)
        kept = jnp.full_like(budget, self.settings.sinks)
        places = dict(kept=kept, ring=budget - kept, taken=prompt.n)
        positions = token_in_row(jnp.arange(most), **places)[:, None]
        layers, sinks = [], []
        for i in prompt.cache.full_layers:
            on_device, layers = prompt.cache.with_layer_on_device(i, after=layers)
            keys, values = on_device.tokens(i, positions)
            layers.append(CompactCache.make_layer(keys, values, kind=self.settings.cache, appended=prompt.appended))
            if self.settings.positions == "window" and self.settings.sinks:
                sinks.append(keys[:, :, : self.settings.sinks])
        return SinkWindow(CompactCache.of(layers, **places), tuple(sinks)).moved(self.step.model, jnp.ones_like(prompt.n, bool))

    def cache_of_steps(self, state: SinkWindow, cache: Cache) -> AppendedCache:
        return cache.steps_over(state.cache)

    def after_steps(self, state: SinkWindow, cache: Cache, stepped: AppendedCache, used: Bool[Array, "B"]) -> tuple[SinkWindow, Cache]:
        own, cache = cache.from_steps(stepped)
        return dataclasses.replace(state, cache=own), cache

    def commit(self, state: SinkWindow, result: RoundResult, cache: Cache) -> SinkWindow:
        return state.take_in(self.step.model, *tokens_of_round(result, cache))

    def read_in_round(self, state: SinkWindow, cache: Cache) -> tuple[View | HeldKeys, ...] | None:
        in_text = state.cache.with_first_keys(state.sinks, jnp.ones_like(state.cache.taken, bool)) if state.sinks else state.cache
        return super().read_in_round(in_text, cache)

    def holds(self, prompt: int, capacity: int, gamma: int) -> Reads:
        held, settings = super().holds(prompt, capacity, gamma), self.settings
        if settings.positions == "kept":
            return held
        return dataclasses.replace(held, full=held.full + tokens_of_sinks(settings.sinks))
