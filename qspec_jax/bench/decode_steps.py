"""The steps of a round, each timed alone on a filled cache, and the bytes that each must read.

A step reads its weights and what every row has cached. What it writes is not counted, nor are activations.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax.bench.decode_rows import StepTiming
from qspec_jax.bench.timing import Bandwidth, loop_trips, time_loop
from qspec_jax.caches.cache import Cache
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.sampling import DRAFT, Sampler, prompt_keys
from qspec_jax.decoding.state import DecodeState
from qspec_jax.drafts.cascade import CascadeDraft
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.eagle3 import Eagle3Draft, FedBack
from qspec_jax.drafts.step_bytes import cache_bytes_of_step, devices_of, step_bytes, weight_bytes
from qspec_jax.drafts.stepwise import StepwiseDraft
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.progress import working


@dataclasses.dataclass(frozen=True)
class TimedStep:
    """A step to be timed: tokens, cache, state = function(tokens, cache, state, *inputs), where the state is the draft's in a step of the
    draft. seconds: about how long it takes. bytes: what it must read on the device (0: not counted). host_bytes: what it copies to it.
    of_draft: whether it is a step of the draft; no other needs the draft's state, and without it drafts share the program."""

    name: str
    function: Callable
    inputs: tuple
    seconds: float
    bytes: int = 0
    host_bytes: int = 0
    of_draft: bool = False

    @property
    def trips(self) -> int:
        return loop_trips(self.seconds)

    def kept(self, state: Any) -> Any:
        """What the loop has of the draft's state."""
        return state if self.of_draft else ()


@dataclasses.dataclass(frozen=True)
class StepsOfRound:
    """What the steps of a round depend on. target: the model as it verifies. shapes: of the cache, after prefill. context: of the prompts,
    in tokens. gamma: drafts in a round, or 1 for SpeCache's guess. bandwidth: by which the seconds of a step are estimated."""

    target: ViewedModel
    sampler: Sampler
    cache_config: CacheConfig
    shapes: Cache
    batch_size: int
    context: int
    gamma: int
    bandwidth: Bandwidth

    def of(self, state: DecodeState, draft: Draft | None) -> list[TimedStep]:
        """The steps. state: the one after prefill, with the rows of the batch. Of both arguments the shapes are enough to compile them."""
        lengths, B = state.cache.lengths, self.batch_size
        width, vocabulary = self.gamma + 1, self.target.model.config.vocab_size
        logits = jax.random.normal(jax.random.key(0), (B, width, vocabulary))
        keys, positions = prompt_keys(jax.random.key(0), B), jnp.broadcast_to(jnp.arange(width), (B, width))
        eligible = jnp.full(B, self.gamma, jnp.int32)
        _, proposal = self.sampler.choose(logits[:, 0], keys, positions[:, 0], DRAFT)
        proposals = jnp.broadcast_to(proposal[:, None], (B, self.gamma, proposal.shape[-1]))
        steps = [self._verification(lengths, observed=draft is not None and draft.observes)]
        if isinstance(draft, StepwiseDraft):
            steps.append(self._step("draft", _drafted, (lengths, draft), self._bytes_of(draft, 1), of_draft=True))
        if isinstance(draft, CascadeDraft):
            size = self._bytes_of(draft.middle, draft.at_once(self.gamma) + 1)
            steps.append(self._step("middle", _of_middle, (lengths, draft), size, of_draft=True))
        if isinstance(head := _first_or_itself(draft), Eagle3Draft):
            size = head.step_bytes(self.context, batch=self.batch_size)
            steps.append(self._step("head", _of_head, (draft,), size, of_draft=True))
        # Goes through the logits a few times.
        seconds = max(5e-5, self.bandwidth.seconds(4 * logits.nbytes))
        steps.append(TimedStep("sampling", _sampled, (self.sampler, logits, proposals, eligible, keys, positions), seconds))
        if (size := self.cache_config.schedule_for(self.target.model.config.head_dim).flush_size) is not None:
            for name, buffered, seconds in ("flush due", 2 * size, 5e-4), ("flush not due", size, 2.5e-5):
                at = dataclasses.replace(lengths, buffered=jnp.full(B, buffered, jnp.int32))
                steps.append(TimedStep(name, _flushed, (at,), seconds))
        return steps

    def timed(
        self, state: DecodeState, draft: Draft | None, programs: Mapping[str, tuple[Callable, int]], repeats: int
    ) -> dict[str, StepTiming]:
        """Times every step. programs: the loop of each, by its name, and its trips. The state's cache and its draft's state are spent: a
        step overwrites what the one before wrote, and flushes move its buffer."""
        tokens, cache, of_draft = jnp.zeros((self.batch_size, self.gamma + 1), jnp.int32), state.cache, state.draft
        shown = dataclasses.replace(state, cache=state.cache.rollback(jax.tree.map(jnp.copy, state.cache.lengths)))
        timings = {}
        for step in self.of(shown, draft):
            carry = tokens, cache, step.kept(of_draft)
            with working(f"timing the step {step.name}"):
                timing, (tokens, cache, kept) = time_loop(*programs[step.name], carry, step.inputs, repeats=repeats)
            of_draft = kept if step.of_draft else of_draft
            share = self.bandwidth.seconds(step.bytes, step.host_bytes) * 1e6 / timing.median_us
            timings[step.name] = StepTiming(timing, step.bytes, share, step.host_bytes)
        return timings

    def _verification(self, lengths: Lengths, *, observed: bool) -> TimedStep:
        size, copied = target_bytes(self.target.model, self.shapes, self.context + self.gamma + 1, self.batch_size, self.gamma + 1)
        return self._step("target", _verified_and_observed if observed else _verified, (lengths, self.target), size, copied)

    def _bytes_of(self, draft: StepwiseDraft, new_tokens: int) -> int:
        """What a step of `new_tokens` tokens of each row must read; 0 where it copies something of the target's cache from host memory."""
        tokens = self.context + new_tokens
        _, copied = cache_bytes_of_step(draft, self.shapes, tokens)
        sizes = dict(batch=self.batch_size, new_tokens=new_tokens, on_device=True)
        return 0 if copied else step_bytes(draft, self.cache_config, tokens, **sizes)

    def _step(self, name: str, function: Callable, inputs: tuple, size: int, host_bytes: int = 0, *, of_draft: bool = False) -> TimedStep:
        return TimedStep(name, function, inputs, max(5e-5, self.bandwidth.seconds(size, host_bytes)), size, host_bytes, of_draft)


def _verified(tokens, cache, state, lengths, target):
    return *_forward(tokens, cache, lengths, target, width=tokens.shape[1]), state


def _verified_and_observed(tokens, cache, state, lengths, target):
    return *_forward(tokens, cache, lengths, functools.partial(target.watched, observe=True), width=tokens.shape[1]), state


def _drafted(tokens, cache, state, lengths, draft, width=1):
    tokens, stepped = _forward(tokens, draft.cache_of_steps(state, cache), lengths, draft.step_in_round(state, cache), width=width)
    state, cache = draft.after_steps(state, cache, stepped, jnp.ones(tokens.shape[0], bool))
    return tokens, cache, state


def _of_middle(tokens, cache, state, lengths, draft):
    first, middle = state
    tokens, cache, middle = _drafted(tokens, cache, middle, lengths, draft.middle, 1 + draft.at_once(tokens.shape[1] - 1))
    return tokens, cache, (first, middle)


def _first_or_itself(draft):
    """A cascade's first draft, or the draft itself."""
    return draft.first if isinstance(draft, CascadeDraft) else draft


def _of_head(tokens, cache, state, draft):
    own_state, *others = state if isinstance(draft, CascadeDraft) else (state,)
    own, before = own_state.own, own_state.own.cache.lengths
    logits, fed_back = _first_or_itself(draft).next_pass(tokens[:, :1], own.position[:, None], FedBack(own.cache, own_state.hidden[:, :1]))
    tokens = tokens.at[:, 0].set(jnp.argmax(logits[:, 0], -1).astype(jnp.int32))
    own = dataclasses.replace(own, cache=fed_back.cache.rollback(before))
    own_state = dataclasses.replace(own_state, own=own, hidden=own_state.hidden.at[:, :1].set(fed_back.hidden))
    return tokens, cache, (own_state, *others) if isinstance(draft, CascadeDraft) else own_state


def _forward(tokens, cache, lengths, model, *, width):
    positions, before = lengths.total[:, None] + jnp.arange(width), cache.lengths
    logits, cache, *seen = model(tokens[:, :width], positions, cache)
    for mass in jax.tree.leaves(seen):  # which are never negative, but have to be computed
        logits = jnp.where((mass < 0).any(), 0, logits)
    # Other tokens in every trip, or a cache that fetches only what it has not would soon have all.
    following = (jnp.argmax(logits, -1).astype(jnp.int32) + tokens[:, :width] + 1) % logits.shape[-1]
    return tokens.at[:, :width].set(following), cache.rollback(before)


def _sampled(tokens, cache, state, sampler, logits, *proposal_and_keys):
    # The tokens enter, or the loop would do it once.
    logits = logits + (tokens[..., None] < 0)
    _, after = sampler.verify(logits, tokens[:, 1:], *proposal_and_keys)
    return tokens.at[:, 0].set(after), cache, state


def _flushed(tokens, cache, state, lengths):
    return tokens, cache.rollback(lengths).flush()[0].rollback(lengths), state


def target_bytes(model: Llama, cache: Cache, tokens: int, batch_size: int, new_tokens: int = 1) -> tuple[int, int]:
    """The bytes that each device must read in a pass of the target, its weights included, and those that the pass copies from host memory.

    Args:
        model: the target.
        cache: its cache, or the shapes of it.
        tokens: that each row holds, those of the pass included.
        batch_size: rows.
        new_tokens: of each row, in the pass.
    """
    read, copied = (batch_size * each for each in cache.bytes_of_pass(BOTH_PLANES, tokens))
    return weight_bytes(model, rows=batch_size * new_tokens, on_device=True) + read // devices_of(model), copied
