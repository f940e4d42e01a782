"""StreamingLLM as a draft: the model reads the first tokens of the text, the attention sinks, and a window of the most recent ones.

Source: StreamingLLM (arXiv 2309.17453), as the baseline of QuantSpec (arXiv 2502.10424, section 5) has it. Unlike there, keys and values
come from the target's cache; the draft does not read the prompt for itself.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from qspec_jax.caches.compact import CompactCache
from qspec_jax.caches.ring import token_in_row
from qspec_jax.drafts.compact import CompactDraft, CompactSettings, tokens_of_round
from qspec_jax.drafts.sink_window import SinkWindow, tokens_of_sinks
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama

POSITIONS = ("window", "kept")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingDraft(CompactDraft):
    """Steps over sinks and a window. Its state is their cache, whose ring is the window, with the sinks' keys as in the text.

    In a round nothing leaves: its drafts lie behind the window. sinks: the first so many tokens of a text stay. positions: "window" numbers
    the tokens that are there without a gap, "kept" leaves each its position in the text. See `CompactDraft` for the others.
    """

    sinks: int = dataclasses.field(metadata={"static": True})
    positions: str = dataclasses.field(metadata={"static": True})

    def begin(self, prompt):
        budget, most = self.budgets(prompt)
        kept = jnp.full_like(budget, self.sinks)
        places = dict(kept=kept, ring=budget - kept, taken=prompt.n)
        positions = token_in_row(jnp.arange(most), **places)[:, None]
        layers, sinks = [], []
        for i in range(len(prompt.cache.layers)):
            on_device, layers = prompt.cache.with_layer_on_device(i, after=layers)
            keys, values = on_device.tokens(i, positions)
            layers.append(CompactCache.make_layer(keys, values, kind=self.kind, appended=prompt.gamma))
            if self.positions == "window" and self.sinks:
                sinks.append(keys[:, :, : self.sinks])
        return SinkWindow(CompactCache.of(layers, **places), tuple(sinks)).moved(self.step.model, jnp.ones_like(prompt.n, bool))

    def cache_of_steps(self, state, cache):
        return state.cache

    def after_steps(self, state, cache, stepped, used):
        return dataclasses.replace(state, cache=stepped), cache

    def commit(self, state, result, cache):
        return state.take_in(self.step.model, *tokens_of_round(result, cache))

    def read_in_round(self, state, cache):
        in_text = state.cache.with_first_keys(state.sinks, jnp.ones_like(state.cache.taken, bool)) if state.sinks else state.cache
        return super().read_in_round(in_text, cache)

    def holds(self, layer, prompt, capacity, gamma):
        held = super().holds(layer, prompt, capacity, gamma)
        return dataclasses.replace(held, full=held.full + tokens_of_sinks(self.sinks)) if self.positions == "window" else held


@dataclasses.dataclass(frozen=True)
class StreamingSettings(CompactSettings):
    """The settings of the draft.

    budget: sinks and window together; for the other shared ones see `CompactSettings`. sinks: so many tokens from the start of the text
    stay. positions: "window", renumbered as in the paper's baseline, or "kept".
    """

    sinks: int = 16
    positions: str = "window"

    @property
    def always(self):
        return self.sinks, "sinks"

    def __post_init__(self):
        if self.sinks < 0:
            raise InputError(f"draft sinks {self.sinks} should be at least 0")
        if self.positions not in POSITIONS:
            raise InputError(f"draft positions {self.positions!r} should be {' or '.join(POSITIONS)}")
        super().__post_init__()

    def make(self, model: Llama, int4: Callable[[], Llama]) -> StreamingDraft:
        """The draft of a model. int4: makes the model's INT4 weights. Raises InputError for more tokens than it has positions for."""
        if self.sinks >= (positions := model.config.max_length):
            raise InputError(f"draft sinks {self.sinks} should be less than the model's {positions} positions")
        return StreamingDraft(**self.shared(model, int4), sinks=self.sinks, positions=self.positions)
