"""The small-model draft: a second model, with weights and a KV cache of its own (arXiv 2211.17192; the baseline of most later papers)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.views import FULL_PRECISION
from qspec_jax.caches.cache import AppendedCache, Cache, Reads
from qspec_jax.caches.compact import CompactCache
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.drafts.draft import Prompt, Proposal, Round, RoundResult
from qspec_jax.drafts.history import History
from qspec_jax.drafts.own_cache import OwnText, WholeText, Window
from qspec_jax.drafts.own_model import own_config, own_model
from qspec_jax.drafts.sink_window import tokens_of_sinks
from qspec_jax.drafts.stepwise import ModelDraft, propose_by_steps
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import Step, ViewedModel
from qspec_jax.settings_text import check_settings, setting

# Tokens that the model takes in at once if its cache lacks some: this number takes hardly longer than one.
BLOCK = 4
READS = ("text", "window")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SmallModelState:
    """The text of the rows, and what the model has read of it.

    fed: drafts of the last round whose keys and values are in `own.cache` beyond its lengths; in `history` they follow the pending token.
    """

    history: History
    own: OwnText
    fed: Int[Array, "B"]

    def caught_up(self, step: Step, model: Llama, eligible: Int[Array, "B"]) -> tuple[Float[Array, "B V"], OwnText]:
        """The model's logits after the pending token, and the text that it has read with all tokens up to that, in every row that may use
        drafts. step: of this model.

        It lacks the last draft if all were accepted, and more after rounds in which the row used none, or another draft's.
        """
        history, pending = self.history, self.history.n

        def block(carry):
            own, logits = carry
            tokens, positions = history.read(own.read_so_far, BLOCK), own.position[:, None] + jnp.arange(BLOCK)
            found, fed = step(tokens, positions, own.cache)
            at = pending - own.read_so_far  # -1 in a row that has caught up
            of_pending = jnp.take_along_axis(found, jnp.clip(at, 0, BLOCK - 1)[:, None, None], 1)[:, 0]
            logits = jnp.where(((at >= 0) & (at < BLOCK))[:, None], of_pending, logits)
            # A row that may use none waits. Otherwise other rows would decide when it catches up, and in which blocks, and its logits would
            # be rounded differently in another batch.
            count = jnp.where(eligible > 0, jnp.clip(at + 1, 0, BLOCK), 0)
            return own.keep(model, fed, count, BLOCK), logits

        def lacks_tokens(carry):
            return ((carry[0].read_so_far <= pending) & (eligible > 0)).any()

        shape, _ = jax.eval_shape(step, pending[:, None], pending[:, None], self.own.cache)
        own, logits = jax.lax.while_loop(lacks_tokens, block, (self.own, jnp.zeros(shape.shape[::2], shape.dtype)))
        return logits, own


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SmallModelDraft(ModelDraft):
    """Single-token steps of a model over a cache of its own.

    `commit` keeps the part of a round's drafts in the cache that was emitted, whichever draft proposed it.

    Attributes:
        step: the model, which reads all of its cache.
        sinks, window: how many first and most recent tokens it reads; a window of 0 is the whole text.
        vocab_size: the target's, if the model's own is padded differently.
    """

    step: ViewedModel
    sinks: int = dataclasses.field(default=0, metadata={"static": True})
    window: int = dataclasses.field(default=0, metadata={"static": True})
    vocab_size: int | None = dataclasses.field(default=None, metadata={"static": True})

    own_cache = own_model = independent = True
    first_pass = BLOCK

    @property
    def max_length(self) -> int | None:
        return None if self.window else self.step.model.config.max_length

    def reads(self, layer: int, cache: Cache, tokens: int) -> Reads:
        return Reads(0, 0, min(tokens, self.sinks + self.window + 1) if self.window else tokens)

    def cache_read(self, cache: Cache) -> AppendedCache:
        config = self.step.model.config
        return CompactCache.outline(config, "full") if self.window else CacheConfig("full").outline(config, 1)

    def holds(self, prompt: int, capacity: int, gamma: int) -> Reads:
        held = self.sinks + self.window + tokens_of_sinks(self.sinks) if self.window else capacity
        return Reads(0, 0, held + max(gamma, BLOCK) + 1)

    def reads_of_prompt(self, prompt: int) -> int:
        return min(prompt, self.sinks + self.window) if self.window else prompt

    def made_for(self) -> tuple[tuple[str, int], ...]:
        return (("vocab_size", self.step.model.config.vocab_size if self.vocab_size is None else self.vocab_size),)

    def in_own_vocabulary(self, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """The tokens, those that the model does not have replaced by its last one."""
        return tokens if self.vocab_size is None else jnp.minimum(tokens, self.step.model.config.vocab_size - 1)

    def in_targets_vocabulary(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: AppendedCache):
        """A step of the model, with logits of the target's tokens: -inf for those that the model does not have."""
        logits, cache = self.step(self.in_own_vocabulary(tokens), positions, cache)
        if self.vocab_size is not None:
            more = max(0, self.vocab_size - logits.shape[-1])
            logits = jnp.pad(logits[..., : self.vocab_size], ((0, 0), (0, 0), (0, more)), constant_values=-jnp.inf)
        return logits, cache

    def begin(self, prompt: Prompt) -> SmallModelState:
        model, appended = self.step.model, max(prompt.appended, BLOCK)
        prompt = dataclasses.replace(prompt, tokens=self.in_own_vocabulary(prompt.tokens))
        if self.window:
            own = Window.begin(model, prompt, appended, sinks=self.sinks, window=self.window)
        else:
            own = WholeText.begin(model, prompt, appended)
        return SmallModelState(History.begin(prompt), own, jnp.zeros_like(prompt.n))

    def begin_again(self, state: SmallModelState, prompt: Prompt, unchanged: Int[Array, "B"]) -> SmallModelState:
        if self.window:  # of which a pass reads all again
            return self.begin(prompt)

        def cut() -> SmallModelState:
            # The model reads the new tokens when it next drafts.
            history = History.begin(dataclasses.replace(prompt, tokens=self.in_own_vocabulary(prompt.tokens)))
            return SmallModelState(history, state.own.cut(unchanged), jnp.zeros_like(prompt.n))

        if not self.step.model.config.windowed_layers:
            return cut()
        return jax.lax.cond(state.own.can_cut(unchanged).all(), cut, lambda: self.begin(prompt))

    def propose(self, state: SmallModelState, cache: Cache, current: Round) -> tuple[Proposal, SmallModelState, Cache]:
        state = dataclasses.replace(state, history=state.history.written(0, current.pending[:, None]))
        logits, own = state.caught_up(self.in_targets_vocabulary, self.step.model, current.eligible)
        skipped = (own.read_so_far - own.position)[:, None]

        def step(tokens, positions, cache):
            return self.in_targets_vocabulary(tokens, positions - skipped, cache)

        proposal, fed = propose_by_steps(step, own.cache, current, first=logits)
        own = dataclasses.replace(own, cache=fed)
        # The last draft was not fed.
        state = SmallModelState(state.history.written(1, proposal.tokens), own, jnp.maximum(proposal.eligible - 1, 0))
        return proposal, state, cache

    def commit(self, state: SmallModelState, result: RoundResult, cache: Cache) -> SmallModelState:
        gamma = result.tokens.shape[1] - 1
        same = state.history.read(state.history.n + 1, gamma) == result.tokens[:, :gamma]
        right = jnp.cumprod(same, 1, dtype=state.fed.dtype).sum(1, dtype=state.fed.dtype)
        # Not the pending token, though it may be a draft that was fed: its logits are still to come.
        kept = jnp.minimum(jnp.minimum(state.fed, right), jnp.maximum(result.count - 1, 0))
        own = state.own.keep(self.step.model, state.own.cache, kept, gamma)
        return SmallModelState(state.history.after(result), own, jnp.zeros_like(kept))


@dataclasses.dataclass(frozen=True)
class SmallModelSettings:
    """A window is numbered without a gap, so that the text may be longer than the model takes."""

    model: str = setting("", "The checkpoint: a directory, in Hugging Face format or converted, or ORG/NAME on the Hub.")
    reads: str = setting("text", "Whether the model reads the whole text, or its first tokens and its most recent ones.", choices=READS)
    sinks: int = setting(16, "How many of the first tokens are read, with reads=window.", minimum=0)
    window: int = setting(1008, "How many of the most recent tokens are read, with reads=window.", minimum=1)
    weight_bits: int = setting(16, "Bits of the model's weights: INT4, or as they are.", choices=(4, 16))

    def __post_init__(self):
        if not self.model:
            raise InputError("the small-model draft needs a checkpoint: small-model:model=DIR")
        check_settings("draft", self)
        if self.reads == "text" and (self.sinks, self.window) != (SmallModelSettings.sinks, SmallModelSettings.window):
            raise InputError("the settings sinks and window of the small-model draft are for reads=window")

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The checkpoints that it reads besides the target's."""
        return (self.model,)

    def make(self, model: Llama, int4: Callable[[], Llama]) -> SmallModelDraft:
        """The draft for a model. Raises InputError for a checkpoint that cannot be loaded, or has another vocabulary; what pads it may
        differ."""
        config = own_config(self.model, model)
        if self.reads == "window":
            self.check_window(config)
        step = ViewedModel(own_model(self.model, model, weight_bits=self.weight_bits), FULL_PRECISION)
        reads = dict(sinks=self.sinks, window=self.window) if self.reads == "window" else {}
        target = model.checkpoint_config.vocab_size
        return SmallModelDraft(step, **reads, vocab_size=None if target == config.vocab_size else target)

    def check_window(self, config: LlamaConfig) -> None:
        """Raises InputError where a window of a text is nothing that a model with this config could read."""
        most, kind = config.max_length, config.rope.rope_type
        if self.sinks + self.window > most:
            given = f"draft sinks {self.sinks} and window {self.window}"
            raise InputError(f"{given} should together be at most the {most} positions of {self.model}")
        if config.windowed_layers:
            raise InputError(f"{self.model} has layers with a sliding window of their own; use reads=text")
        if kind in ("dynamic", "longrope"):
            raise InputError(f"{self.model}: its {kind} RoPE depends on the length of the whole text; use reads=text")
