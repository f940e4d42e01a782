"""StreamingLLM as a draft: the model reads the first tokens of the text, the attention sinks, and a window of the most recent ones.

Source: StreamingLLM (arXiv 2309.17453), as the baseline of QuantSpec (arXiv 2502.10424, section 5) has it. Unlike there, keys and values
come from the target's cache; the draft does not read the prompt for itself.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from qspec_jax.caches.cache import Cache
from qspec_jax.caches.compact import CompactCache
from qspec_jax.caches.ring import token_in_row
from qspec_jax.drafts.compact import CompactDraft, CompactSettings, with_sinks_before_window
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama

POSITIONS = ("window", "kept")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingDraft(CompactDraft):
    """Steps over sinks and a window. Its state is their cache, whose ring is the window.

    In a round nothing leaves: its drafts lie behind the window. sinks: the first so many tokens of a text stay. positions: "window" numbers
    the tokens that are there without a gap, "kept" leaves each its position in the text. See `CompactDraft` for the others.
    """

    sinks: int = dataclasses.field(metadata={"static": True})
    positions: str = dataclasses.field(metadata={"static": True})

    def begin(self, prompt):
        budget, most = self.budgets(prompt)
        sinks = jnp.full_like(budget, self.sinks)
        places = dict(kept=sinks, ring=budget - sinks, taken=prompt.n)
        positions = token_in_row(jnp.arange(most), **places)[:, None]
        layers = []
        for i in range(len(prompt.cache.layers)):
            there, layers = prompt.cache.with_layer_on_device(i, after=layers)
            layers.append(CompactCache.make_layer(*there.tokens(i, positions), kind=self.kind, appended=prompt.gamma))
        own = CompactCache.of(layers, **places)
        return self.renumbered(own, prompt.cache, jnp.ones_like(prompt.n, bool))

    def commit(self, state, result, cache):
        return self.renumbered(super().commit(state, result, cache), cache, result.count > 0)

    def read_in_round(self, state, cache):
        # The target has the sinks where they stand in the text.
        first = jnp.arange(self.sinks)[None, None]
        own = state.with_first_keys([cache.tokens(i, first)[0] for i in range(len(state.layers))], jnp.ones_like(state.taken, bool))
        return super().read_in_round(own, cache)

    def renumbered(self, own: CompactCache, cache: Cache, changed: Bool[Array, "B"]) -> CompactCache:
        """The cache with the sinks right before the window, where positions are numbered so.

        Attention asks for differences of positions alone. So it is not the window that moves down to the sinks, but the sinks that move up
        to the window, by as many positions as tokens have left.
        """
        if self.positions == "kept" or self.sinks == 0:
            return own
        first = jnp.arange(self.sinks)[None, None]
        return with_sinks_before_window(self.step.model, own, [cache.tokens(i, first)[0] for i in range(len(own.layers))], changed)


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
