"""The EAGLE-3 draft: a trained head of a layer or a few, which reads the target's hidden states (arXiv 2503.01840).

At position p the head reads a pair: the target's features of the token there, and the token of position p + 1. Of a text it reads the first
pairs and the most recent ones, numbered without a gap: over a whole long text, or at positions beyond those of its training, drafts of such
heads are hardly ever accepted. In a round it reads the pairs that came since the last one, then drafts one token after the other from what
it fed back. The passes over drafts are not kept: after verification their pairs are read again, with the target's own features.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.views import FULL_PRECISION
from pallas_kernels.formats.weights import Int8Weight
from qspec_jax.caches.cache import AppendedCache, Cache, Reads, where_rows
from qspec_jax.caches.compact import CompactCache
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.eagle3 import load_head
from qspec_jax.checkpoints.random_head import random_head
from qspec_jax.drafts.draft import Draft, Prompt, Proposal, Proposes, Round, RoundResult, Taps
from qspec_jax.drafts.kept_features import KeptFeatures
from qspec_jax.drafts.own_cache import Window
from qspec_jax.drafts.step_bytes import bytes_of
from qspec_jax.drafts.stepwise import propose_by_steps
from qspec_jax.errors import InputError
from qspec_jax.models.block import Weight
from qspec_jax.models.eagle3 import Eagle3Head, PassConstants
from qspec_jax.models.llama import Llama
from qspec_jax.quantization.outline import is_outline
from qspec_jax.quantization.weights import is_linear, quantize_rows, quantize_weight
from qspec_jax.settings_text import check_settings, setting

log = logging.getLogger(__name__)
# Features are kept of this many tokens more than a window: those that `State.trim` may cut off where a group has 128 tokens.
TRIMMED = 255
RANDOM = "random"  # instead of a checkpoint


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadState:
    """The pairs that the head has read, and those that it is to read.

    Attributes:
        own: its keys and values of the first pairs and the most recent ones.
        hidden: the fused features of the pairs to read.
        tokens: the token of each of these pairs but the last, whose token is the pending one.
        count: the number of these pairs; 0 where no features of the row's last token are known.
        kept: the features of the target's tokens, from which the window is read again when the row has read more.
    """

    own: Window
    hidden: Float[Array, "B W D"]
    tokens: Int[Array, "B W"]
    count: Int[Array, "B"]
    kept: KeptFeatures


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FedBack:
    """The head's cache, and the hidden states that it fed back for its next pass."""

    cache: AppendedCache
    hidden: Float[Array, "B 1 D"]

    @property
    def lengths(self) -> Lengths:
        return self.cache.lengths

    def rollback(self, lengths: Lengths) -> Self:
        return dataclasses.replace(self, cache=self.cache.rollback(lengths))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Eagle3Draft(Draft):
    """Single-token steps of a head, each from the hidden states of the one before.

    Attributes:
        head: the head, which is given the target's features.
        sinks: how many of the first pairs it reads.
        window: how many of the most recent pairs it reads; of several that come in one pass, the later ones also see those before them.
        constants: `Eagle3Head.constants`, in the decode loop; else None.
    """

    head: Eagle3Head
    sinks: int = dataclasses.field(metadata={"static": True})
    window: int = dataclasses.field(metadata={"static": True})
    constants: PassConstants | None = None

    independent = True
    proposes = Proposes.ALL

    @property
    def taps(self) -> Taps:
        # The last token's are those of a pair that waits for its token.
        return Taps(self.head.taps, self.sinks, self.window + 1 + TRIMMED)

    def in_loop(self) -> Self:
        return dataclasses.replace(self, constants=self.head.constants())

    def made_for(self) -> tuple[tuple[str, int], ...]:
        return ("vocab_size", self.head.config.vocab_size), ("hidden_size", self.head.settings.target_hidden_size)

    def window_bytes(self, reads: Reads) -> int:
        """Bytes of these keys and values of a row, in all layers of the head. Its window is no sliding window of the cache."""
        config = dataclasses.replace(self.head.config, sliding_layers=(), sliding_window=None)
        cache = CompactCache.outline(config, "full")
        return sum(cache.bytes_of_reads(layer, reads)[0] for layer in range(config.num_layers))

    def step_bytes(self, tokens: int, *, batch: int = 1) -> int:
        """The bytes that a pass over one token of each row must read after texts of `tokens` tokens. It fuses no features."""
        window = self.window_bytes(Reads(0, 0, min(tokens, self.sinks + self.window)))
        return bytes_of(self.head.step_weights()) + batch * window

    def begin(self, prompt: Prompt) -> HeadState:
        head, taps, zeros = self.head, self.taps, jnp.zeros_like(prompt.n)
        none = KeptFeatures.none(len(zeros), taps.first + taps.last, head.config.hidden_size, head.dtype, sinks=self.sinks)
        return self._begun(prompt, none, zeros)

    def begin_again(self, state: HeadState, prompt: Prompt, unchanged: Int[Array, "B"]) -> HeadState:
        return where_rows(prompt.n > unchanged, self._begun(prompt, state.kept, unchanged), state)

    def _begun(self, prompt: Prompt, kept: KeptFeatures, first_new: Int[Array, "B"]) -> HeadState:
        """The state of rows that have read their tokens from first_new[b] on. kept: features of those before."""

        def of_rows(prompt: Prompt, kept: KeptFeatures, first_new: Int[Array, "B"]) -> HeadState:
            return self._read(prompt, self._with_features(kept, prompt, first_new))

        def of_row(args: tuple) -> HeadState:
            return jax.tree.map(lambda x: x[0], of_rows(*jax.tree.map(lambda x: x[None], args)))

        args = dataclasses.replace(prompt, cache=None, queries=(), num_queries=None), kept, first_new
        # One row after the other: the attention of a window takes far more memory than the window.
        return of_rows(*args) if len(first_new) == 1 else lax.map(of_row, args)

    def _with_features(self, kept: KeptFeatures, prompt: Prompt, begin: Int[Array, "B"]) -> KeptFeatures:
        """The features with those of a prompt's tokens from begin[b] on."""
        if prompt.features is None:
            return kept
        taps = self.taps.of_width(prompt.features.shape[1])
        start = jnp.maximum(prompt.n - taps.last, begin)
        return kept.put(self.head.fused(prompt.features), taps.of_prompt(prompt.n), begin, start, prompt.n)

    def _read(self, prompt: Prompt, kept: KeptFeatures) -> HeadState:
        """The state of rows whose window is read at once: the first pairs and the most recent ones whose features are kept."""
        head, n, size, width = self.head, prompt.n, self.sinks + self.window, prompt.gamma + 1
        B, column, known = n.shape[0], jnp.arange(size), (kept.until == n).astype(n.dtype)
        recent = jnp.maximum(kept.recent, n - 1 - self.window)
        at = jnp.where(column < self.sinks, kept.origin[:, None] + column, recent[:, None] + column - self.sinks)
        tokens = jnp.take_along_axis(prompt.tokens, jnp.minimum(at + 1, prompt.tokens.shape[1] - 1), 1)
        # A pass over no more than what the head reads needs no sliding window of the cache.
        config = dataclasses.replace(head.config, sliding_layers=(), sliding_window=None)
        empty = CacheConfig("full").empty(config, batch=B, capacity=size, num_speculative_tokens=0, dtype=head.dtype)
        *_, read = head(kept.of(at), tokens, jnp.broadcast_to(column, (B, size)), empty, view=FULL_PRECISION)
        pairs = known * (jnp.clip(n - 1 - kept.origin, 0, self.sinks) + jnp.maximum(n - 1 - recent, 0))
        own = Window.of(read, pairs, n - 1 - pairs, width, sinks=self.sinks, window=self.window)
        last = kept.of(n[:, None] - 1)
        return HeadState(own, jnp.pad(last, ((0, 0), (0, width - 1), (0, 0))), jnp.zeros((B, width), jnp.int32), known, kept)

    def propose(self, state: HeadState, cache: Cache, current: Round) -> tuple[Proposal, HeadState, Cache]:
        head, width = self.head, state.hidden.shape[1]
        count = jnp.where(current.running, state.count, 0)  # a row that has ended keeps its pairs for what may continue it
        column, last = jnp.arange(width), jnp.maximum(count - 1, 0)
        tokens = jnp.where(column == last[:, None], current.pending[:, None], state.tokens)
        positions = state.own.position[:, None] + column
        first, hidden, fed = head(
            state.hidden, tokens, positions, state.own.cache, view=FULL_PRECISION, only=last, constants=self.constants
        )
        own = state.own.keep(head, fed, count, width)

        def step(tokens, positions, carried):
            # The pair of a token is at the position before it.
            return self.next_pass(tokens, own.position[:, None] + positions - current.position[:, None] - 1, carried)

        carried = FedBack(own.cache, hidden)
        proposal, carried = propose_by_steps(step, carried, current, first=head.in_targets_vocabulary(first[:, 0], self.constants))
        own = dataclasses.replace(own, cache=carried.cache)
        knows = count > 0
        foreseen = jnp.where(knows, current.eligible, 0)
        proposal = dataclasses.replace(proposal, eligible=jnp.where(knows, proposal.eligible, 0), foreseen=foreseen)
        return proposal, dataclasses.replace(state, own=own, count=state.count - count), cache

    def next_pass(self, tokens: Int[Array, "B 1"], at: Int[Array, "B 1"], fed_back: FedBack) -> tuple[Float[Array, "B 1 V"], FedBack]:
        """A pass over the pair of each row's token and what the pass before fed back, at these positions: the logits, and what it feeds
        back."""
        logits, hidden, cache = self.head(fed_back.hidden, tokens, at, fed_back.cache, view=FULL_PRECISION, constants=self.constants)
        return self.head.in_targets_vocabulary(logits, self.constants), FedBack(cache, hidden)

    def within_round(self, state: HeadState, max_tokens: int) -> HeadState:
        # A row that runs has read its pairs, and `commit` puts others there; one that has ended reads none.
        return dataclasses.replace(state, hidden=state.hidden[:, :max_tokens], tokens=state.tokens[:, :max_tokens])

    def commit(self, state: HeadState, result: RoundResult, cache: Cache) -> HeadState:
        came, more = (result.count > 0)[:, None], state.hidden.shape[1] - result.tokens.shape[1]
        fused, until = self.head.fused(result.features), cache.lengths.total
        hidden, begin = jnp.pad(fused, ((0, 0), (0, more), (0, 0))), until - result.count
        return HeadState(
            state.own,
            jnp.where(came[..., None], hidden, state.hidden),
            jnp.where(came, jnp.pad(result.tokens, ((0, 0), (0, more))), state.tokens),
            jnp.where(came[:, 0], result.count, state.count),
            state.kept.put(fused, begin[:, None] + jnp.arange(fused.shape[1]), begin, begin, until),
        )


@dataclasses.dataclass(frozen=True)
class Eagle3Settings:
    """The checkpoint is a directory of config.json and safetensors, as SpecForge and speculators write it, of a head that was trained for
    this target. With model=random it is a head of the usual size whose drafts are hardly ever accepted. For a head with a sliding window
    `sinks` counts as 0, and `window` is at most that window, as a log line says."""

    model: str = setting("", "The head's checkpoint: a directory, or ORG/NAME on the Hub; random for random weights, to measure speed.")
    sinks: int = setting(4, "How many of the text's first tokens the head reads.", minimum=0)
    window: int = setting(1020, "How many of its most recent tokens it reads.", minimum=1)
    weight_bits: int = setting(16, "Bits of its linear layers: INT4, or as they are.", choices=(4, 16))
    head_bits: int = setting(16, "Bits of what makes its logits: INT8, or as it is.", choices=(8, 16))

    def __post_init__(self):
        if not self.model:
            raise InputError("the eagle3 draft needs a head: eagle3:model=DIR")
        check_settings("draft", self)

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The checkpoints that it reads besides the target's."""
        return () if self.model == RANDOM else (self.model,)

    def make(self, model: Llama, int4: Callable[[], Llama]) -> Eagle3Draft:
        """The draft of a model. Raises InputError as `load_head` does, and for a window that the head's positions or RoPE do not allow."""
        head = self._in_bits(random_head(model) if self.model == RANDOM else load_head(self.model, model))
        if (kind := head.config.rope.rope_type) in ("dynamic", "longrope"):
            raise InputError(f"{self.model}: the head's {kind} RoPE depends on the length of the whole text, of which it reads a window")
        if (own := head.config.sliding_window) is not None and head.config.windowed_layers:
            before = min(self.window, max(1, own - 1))  # a window counts the pair itself
            log.info("draft eagle3: the head has a sliding window; sinks is 0, and window %d", before)
            return Eagle3Draft(head, 0, before)
        if self.sinks + self.window > (most := head.config.max_length):
            given = f"draft sinks {self.sinks} and window {self.window}"
            raise InputError(f"{given} should together be at most the {most} positions of {self.model}")
        return Eagle3Draft(head, self.sinks, self.window)

    def _in_bits(self, head: Eagle3Head) -> Eagle3Head:
        """The head with its weights in the formats that were asked for, rounded to nearest."""

        def quantized(head: Eagle3Head) -> Eagle3Head:
            def chosen(path: str, weight: Weight) -> Weight:
                if path == "head":
                    # The target's, if the head has none of its own, may be in INT8 already.
                    return quantize_rows(weight) if self.head_bits == 8 and not isinstance(weight, Int8Weight) else weight
                return quantize_weight(weight) if self.weight_bits == 4 and (is_linear(path) or path == "fc.weight") else weight

            return head.with_weights({path: chosen(path, weight) for path, weight in head.weights().items()})

        if (self.weight_bits, self.head_bits) == (16, 16):
            return head
        return jax.eval_shape(quantized, head) if is_outline(head) else quantized(head)
