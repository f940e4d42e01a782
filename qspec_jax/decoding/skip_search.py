"""The layers that a draft may skip, found on the prompts' own tokens: `skip=auto`.

The ends of the longest prompts are read in blocks of the length of a round, each after the target's own keys and values. A draft can skip
sublayers, that is, the attention or the MLP of a layer. A set of sublayers is scored by the speed that skipping it would give: how many of
the target's most likely tokens the model predicts without them, and how many bytes it then reads. In each batch of sets half are random,
and half are the most promising by a Gaussian process over all sets tried so far. The best are finally compared with skipping nothing on
blocks that were not used in the search, and must be faster there by more than the error of that comparison.

Source: SWIFT (arXiv 2410.06916), section 4.2, where the number of skipped sublayers is fixed, and only agreement is compared.
"""

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.support import MAX_ROUND_TOKENS
from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax.caches.cache import Cache, longer
from qspec_jax.caches.prefill import prefill
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.drafts.self_speculative import SelfSpeculativeDraft
from qspec_jax.drafts.step_bytes import ITEM_BYTES, reads_of_step, weight_bytes
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import padded
from qspec_jax.models.skipping import NO_LAYERS, MaskedSkippingModel, Skipped
from qspec_jax.models.viewed import ViewedModel

log = logging.getLogger(__name__)

MAX_ROWS = 4  # prompts; and at most MAX_ROUND_TOKENS tokens in a pass
CONTEXT_TOKENS = 512  # of each prompt, before those of the blocks
BLOCK_TOKENS = 128  # of all rows and blocks together
MIN_TOKENS = 32  # with fewer in either half of the blocks nothing is skipped
MAX_SETS = 128  # that are tried
BATCH_SETS = 8  # that are tried at a time
FINALISTS = 4  # sets that are compared in the end
MAX_SKIPPED = 0.5  # of the sublayers
POOL_SETS = 512  # that the Gaussian process chooses from
LENGTH_SCALE = 4.0  # the number of different sublayers at which the correlation of two sets is 1 / e
CONFIDENCE = 1.0  # standard deviations in the upper confidence bound


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Passage:
    """N blocks of T tokens from the ends of B prompts.

    Attributes:
        tokens: the tokens of the blocks.
        predicted: the target's most likely token after each.
        valid: False after a prompt's end.
        cache: the target's, with all of the tokens, and the lengths before the first block.
    """

    tokens: Int[Array, "N B T"]
    predicted: Int[Array, "N B T"]
    valid: Bool[Array, "N B T"]
    cache: Cache


@dataclasses.dataclass(frozen=True)
class RoundBytes:
    """Bytes that a round of gamma drafts reads.

    Attributes:
        sublayers: by a draft step in each layer's attention, keys and values included, and in its MLP.
        others: by a draft step in the rest of the model.
        verification: by the target.
        gamma: the number of draft steps.
    """

    sublayers: Float[np.ndarray, "L 2"]
    others: int
    verification: int
    gamma: int

    @classmethod
    def of(cls, target: Llama, draft: SelfSpeculativeDraft, cache: CacheConfig, gamma: int, tokens: int) -> Self:
        """The bytes for a row with `tokens` tokens."""
        model, c = draft.step.model, target.config
        of_weights, shapes = functools.partial(weight_bytes, max_item_bytes=ITEM_BYTES), cache.outline(c, tokens)
        read = draft.cache_read(shapes)
        keys_values = [read.bytes_of_reads(layer, each)[0] for layer, each in enumerate(reads_of_step(draft, shapes, tokens))]
        everything = of_weights(model) + sum(keys_values)

        def saved(**skipped: set[int]) -> int:
            return of_weights(model) - of_weights(model, skipped=Skipped(**skipped))

        sublayers = [(saved(attention={i}) + of_layer, saved(mlp={i})) for i, of_layer in enumerate(keys_values)]
        of_target = of_weights(target, rows=gamma + 1) + shapes.bytes_of_pass(BOTH_PLANES, tokens)[0]
        return cls(np.array(sublayers, float), everything - sum(map(sum, sublayers)), of_target, gamma)

    def of_step(self, skip: Bool[np.ndarray, "L 2"]) -> float:
        """Bytes of a draft step without these sublayers."""
        return self.others + self.sublayers[~skip].sum()

    def speed(self, skip: Bool[np.ndarray, "L 2"], agreement: Float[np.ndarray, "*any"]) -> Float[np.ndarray, "*any"]:
        """Tokens per byte at this conditional acceptance rate."""
        tokens = sum(agreement**i for i in range(self.gamma + 1))
        return tokens / (self.gamma * self.of_step(skip) + self.verification)


def layers_to_skip(target: Llama, prompts: Sequence[Sequence[int]], cache: CacheConfig, gamma: int, draft: SelfSpeculativeDraft) -> Skipped:
    """The sublayers that a draft's steps may skip. One line is logged, at INFO, with the choice and its reason.

    Bytes of keys and values are those of the context that is read here, which is at most `CONTEXT_TOKENS` and the blocks: savings in longer
    contexts were not tried.

    Args:
        target: the target.
        prompts: token ids; the longest prompts are read.
        cache: the target's.
        gamma: the number of drafts in a round.
        draft: the draft without skipping.
    """
    layers = target.config.num_layers
    passage = None if layers < 3 else passage_of(target, prompts, cache, gamma)
    if passage is None:
        short = f"the prompts are too short to choose by: their ends should have {2 * MIN_TOKENS} tokens or more"
        log.info("draft skip auto: none, for %s", "the first and the last layer stay, and there is no other" if layers < 3 else short)
        return NO_LAYERS
    tokens = int(passage.cache.lengths.total.max()) + passage.tokens.shape[0] * passage.tokens.shape[2]
    search, began = _Search(draft.step, passage, RoundBytes.of(target, draft, cache, gamma, tokens)), time.perf_counter()
    skipped, reason = search.found()
    log.info("%s (in %.1f s)", reason, time.perf_counter() - began)
    return skipped


def passage_of(target: Llama, prompts: Sequence[Sequence[int]], cache: CacheConfig, gamma: int) -> Passage | None:
    """The ends of the longest prompts; None if they are too short."""
    T = gamma + 1
    longest = sorted(prompts, key=len, reverse=True)[: max(1, min(MAX_ROWS, MAX_ROUND_TOKENS // T))]
    blocks = 2 * math.ceil(BLOCK_TOKENS / (2 * T * len(longest)))
    texts = [list(text[-CONTEXT_TOKENS - blocks * T :]) for text in longest if len(text) > T]
    if not texts:
        return None
    before = [max(1, len(text) - blocks * T) for text in texts]
    ends = np.zeros((len(texts), blocks * T), np.int32)
    for row, text, start in zip(ends, texts, before):
        row[: len(text) - start] = text[start:]
    valid = np.arange(blocks * T) < np.array([[len(text) - start] for text, start in zip(texts, before)])
    ends, valid = (np.swapaxes(x.reshape(len(texts), blocks, T), 0, 1) for x in (ends, valid))
    if min(valid[half::2].sum() for half in (0, 1)) < MIN_TOKENS:
        return None
    tokens, n = padded([text[:start] for text, start in zip(texts, before)])
    args = ViewedModel(target, BOTH_PLANES), tokens, n, jnp.asarray(ends)
    predicted, filled = PREDICT.compile(*args, cache=cache)[0](*args)
    return Passage(args[-1], predicted, jnp.asarray(valid), filled)


def _predicted(target: ViewedModel, tokens: Array, n: Array, blocks: Int[Array, "N B T"], *, cache: CacheConfig) -> tuple[Array, Cache]:
    """The target's most likely token after each token of the blocks, and its cache with all of them, at the lengths before the first."""
    model, (N, batch, T) = target.model, blocks.shape
    sizes = dict(batch=batch, capacity=tokens.shape[1], num_speculative_tokens=N * T, dtype=model.dtype)
    _, filled = prefill(model, tokens, n, cache.empty(model.config, **sizes))
    before = filled.lengths

    def block(cache, tokens):
        logits, cache = target(tokens, cache.lengths.total[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32), cache)
        return cache, logits.argmax(-1)

    filled, predicted = lax.scan(block, filled, blocks)
    return predicted, filled.rollback(before)


def _hits(step: ViewedModel, passage: Passage, blocks: Int[Array, "M"], keep: Bool[Array, "C L 2"]) -> Int[Array, "C M"]:
    """How many of the target's tokens in each of these blocks the model predicts with these sublayers alone."""
    T = passage.tokens.shape[2]

    def of_block(keep, index):
        tokens, lengths = passage.tokens[index], longer(passage.cache.lengths, index * T)
        positions = lengths.total[:, None] + jnp.arange(T, dtype=jnp.int32)
        logits, _ = MaskedSkippingModel(step.model, step.view, keep)(tokens, positions, passage.cache.rollback(lengths))
        return ((logits.argmax(-1) == passage.predicted[index]) & passage.valid[index]).sum()

    return lax.map(lambda keep: lax.map(functools.partial(of_block, keep), blocks), keep)


PREDICT, HITS = Compiled(_predicted, static_argnames=("cache",)), Compiled(_hits)


class _Search:
    """One search. A set is an array [L, 2] of the sublayers that are skipped; its key is the array's bytes."""

    def __init__(self, step: ViewedModel, passage: Passage, cost: RoundBytes):
        self.step, self.passage, self.cost = step, passage, cost
        self.shape = cost.sublayers.shape
        may = np.ones(self.shape, bool)
        may[[0, -1]] = False  # as in SWIFT: without the first or the last layer few predictions are right
        self.may = np.flatnonzero(may)
        self.max_skipped = max(1, int(MAX_SKIPPED * len(self.may)))
        self.rng = np.random.default_rng(0)
        self.scores: dict[bytes, float] = {}  # the logarithm of the speed
        blocks = np.arange(len(passage.tokens), dtype=np.int32)
        self.searched, self.held_out = blocks[::2], blocks[1::2]
        self.valid = np.asarray(passage.valid).sum((1, 2))

    def found(self) -> tuple[Skipped, str]:
        """The sublayers to skip, and a line about them."""
        nothing = np.zeros(self.shape, bool)
        batch = [nothing, *(self._at_random() for _ in range(BATCH_SETS - 1))]
        while batch and len(self.scores) < MAX_SETS:
            for skip, hits in zip(batch, self._hits(batch, self.searched)):
                self.scores[skip.tobytes()] = math.log(self.cost.speed(skip, hits.sum() / self.valid[self.searched].sum()))
            batch = self._next()
        best = sorted(self.scores, key=self.scores.get, reverse=True)[:FINALISTS]
        finalists = [nothing, *(self._array(key) for key in best if key != nothing.tobytes())]
        hits, valid = self._hits(finalists, self.held_out), self.valid[self.held_out]
        gains = [self._gain(skip, own, hits[0], valid) for skip, own in zip(finalists, hits)]
        i = int(np.argmax(gains))
        agreed = [own.sum() / valid.sum() for own in hits]
        speeds = [self.cost.speed(skip, share) for skip, share in zip(finalists, agreed)]
        skipped = Skipped(*(frozenset(np.flatnonzero(kind).tolist()) for kind in finalists[i].T))
        reason = (
            f"draft skip auto: {skipped}, of {len(self.scores)} sets tried; the whole draft predicts {agreed[0]:.0%} of the target's tokens"
        )
        if i:
            share = self.cost.of_step(finalists[i]) / self.cost.of_step(nothing)
            faster = f"{speeds[i] / speeds[0]:.2f} times as fast"
            reason += f", this one {agreed[i]:.0%} with {share:.0%} of the bytes, and is {faster} by bytes"
        return skipped, reason

    def _gain(self, skip: np.ndarray, hits: np.ndarray, of_nothing: np.ndarray, valid: np.ndarray) -> float:
        """How much faster a set is than skipping nothing, as the difference of logarithms, minus its standard error.

        The error is the jackknife's over blocks, of the difference, since both often miss the same tokens.
        """
        if not skip.any():
            return 0.0
        nothing = np.zeros(self.shape, bool)

        def difference(kept: np.ndarray) -> float:
            agreed, of_all = (each[kept].sum() / valid[kept].sum() for each in (hits, of_nothing))
            return math.log(self.cost.speed(skip, agreed) / self.cost.speed(nothing, of_all))

        there = np.flatnonzero(valid)
        without = [difference(there[there != block]) for block in there]
        error = math.sqrt((len(there) - 1) * np.var(without))
        return difference(there) - error

    def _hits(self, sets: Sequence[np.ndarray], blocks: np.ndarray) -> list[np.ndarray]:
        """How many of the target's tokens in each of these blocks the model predicts without each of these sets."""
        filled = [*sets, *[sets[0]] * (-len(sets) % BATCH_SETS)]  # so that there is one program
        found: list[np.ndarray] = []
        for first in range(0, len(filled), BATCH_SETS):
            args = self.step, self.passage, jnp.asarray(blocks), jnp.asarray(~np.array(filled[first : first + BATCH_SETS]))
            found += list(np.asarray(HITS.compile(*args)[0](*args)))
        return found[: len(sets)]

    def _at_random(self) -> np.ndarray:
        skip = np.zeros(self.shape, bool)
        skip.flat[self.rng.choice(self.may, self.rng.integers(1, self.max_skipped + 1), replace=False)] = True
        return skip

    def _next(self) -> list[np.ndarray]:
        """New sets to try next: half of them random, the others promising."""
        new: dict[bytes, np.ndarray] = {}
        for skip in (self._at_random() for _ in range(POOL_SETS)):
            if len(new) == BATCH_SETS // 2:
                break
            if skip.tobytes() not in self.scores:
                new[skip.tobytes()] = skip
        pool = [self._at_random() for _ in range(POOL_SETS // 2)]
        best = sorted(self.scores, key=self.scores.get, reverse=True)[:FINALISTS]
        pool += [self._changed(self._array(best[self.rng.integers(len(best))])) for _ in range(POOL_SETS // 2)]
        known = self.scores.keys() | new.keys()
        pool = list({skip.tobytes(): skip for skip in pool if skip.tobytes() not in known}.values())
        if pool:
            of_scores = np.array([self._array(key).ravel() for key in self.scores]), np.array(list(self.scores.values()))
            promise = promises(*of_scores, np.array([skip.ravel() for skip in pool]))
            for at in np.argsort(-promise)[: BATCH_SETS - len(new)]:
                new[pool[at].tobytes()] = pool[at]
        return list(new.values())

    def _changed(self, skip: np.ndarray) -> np.ndarray:
        """The set with one or two sublayers added or removed; the set itself if it would become too large."""
        changed = skip.copy()
        changed.flat[self.rng.choice(self.may, self.rng.integers(1, min(3, len(self.may) + 1)), replace=False)] ^= True
        return changed if changed.sum() <= self.max_skipped else skip

    def _array(self, key: bytes) -> np.ndarray:
        return np.frombuffer(key, bool).reshape(self.shape)


def promises(tried: Bool[np.ndarray, "N F"], scores: Float[np.ndarray, "N"], pool: Bool[np.ndarray, "P F"]) -> Float[np.ndarray, "P"]:
    """The upper confidence bound of each set of a pool: a Gaussian process's mean, and its standard deviation times `CONFIDENCE`.

    The correlation of two sets is exp(-d / `LENGTH_SCALE`), where d is the number of sublayers in which they differ.
    """

    def alike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.exp(-(a[:, None] != b[None]).sum(-1) / LENGTH_SCALE)

    mean, deviation = scores.mean(), scores.std() or 1.0
    inverse = np.linalg.inv(alike(tried, tried) + 0.1 * np.eye(len(tried)))  # 0.1: the scores are uncertain
    near = alike(pool, tried)
    known = np.einsum("pn,nm,pm->p", near, inverse, near)
    return mean + deviation * (near @ inverse @ ((scores - mean) / deviation) + CONFIDENCE * np.sqrt(np.maximum(1 - known, 0)))
