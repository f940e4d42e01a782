"""Which layers a draft may skip, found on the prompts' own tokens: `skip=auto`.

The last tokens of the prompts are walked in blocks as long as a round, each behind the target's own keys and values. A set of halves of
layers to skip counts by what it would come to: how many of the target's most likely tokens the model without them finds, against the bytes
that it then does not read. The search tries sets at random and, in turn, those that a Gaussian process over all tried so far holds to be
promising. Skipping nothing is among them, and stays where nothing does better on blocks that the search has not seen.

Source: SWIFT (arXiv 2410.06916), section 4.2, where the number of skipped halves is given, and what is compared is the agreement alone.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax.caches.cache import Cache, longer
from qspec_jax.caches.prefill import prefill
from qspec_jax.drafts.draft import Job, Reads
from qspec_jax.drafts.step_bytes import bytes_of_tokens, weight_bytes
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import padded
from qspec_jax.models.skipping import NOTHING, GatedModel, Skipped
from qspec_jax.models.viewed import ViewedModel

log = logging.getLogger(__name__)

ROWS, READ, WALKED = 4, 512, 64  # of the longest prompts, the last so many tokens before those that are walked
LEAST = 32  # tokens to walk, in all rows together, or nothing is skipped
TRIED, TOGETHER, FINALISTS = 128, 8, 4
MOST_SKIPPED = 0.5  # of the halves of layers
POOL, NEAR, CONFIDENCE = 512, 4.0, 1.0  # of the Gaussian process: candidates, how far sets are alike, and weight of what is not known


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk:
    """N blocks of T tokens from the ends of prompts, said: the target's most likely token after each. valid: False behind a prompt's end.
    cache: the target's with all of the tokens, and the lengths before the first block."""

    tokens: Int[Array, "N B T"]
    said: Int[Array, "N B T"]
    valid: Bool[Array, "N B T"]
    cache: Cache


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes that a round must read. halves: of each layer's attention, with its keys and values, and of its MLP, in the draft. rest: of
    what the draft cannot skip. verification: of the target."""

    halves: Float[np.ndarray, "L 2"]
    rest: int
    verification: int
    gamma: int

    @classmethod
    def of(cls, model: Llama, job: Job, reads: Sequence[Reads]) -> Self:
        """model: the draft's. reads: see `layers_to_skip`."""
        c, whole = model.config, weight_bytes(model)
        shape = dict(kv_heads=c.num_kv_heads, head_dim=c.head_dim, group_size=job.cache.group_size_for(c.head_dim))
        without = lambda **skipped: whole - weight_bytes(model, skipped=Skipped(**skipped))
        halves = [[without(attention={i}) + bytes_of_tokens(reads[i], **shape), without(mlp={i})] for i in range(len(reads))]
        quantized = int(job.cache.schedule_for(c.head_dim).quantized_length(job.longest))
        context = bytes_of_tokens(Reads(BOTH_PLANES.planes, quantized, job.longest - quantized), **shape)
        verification = weight_bytes(job.target) + len(reads) * context
        rest = whole + sum(bytes_of_tokens(each, **shape) for each in reads) - sum(map(sum, halves))
        return cls(np.array(halves, float), rest, verification, job.gamma)

    def step(self, skip: Bool[np.ndarray, "L 2"]) -> float:
        """Bytes of a draft step without these halves."""
        return self.rest + self.halves[~skip].sum()

    def speed(self, skip: Bool[np.ndarray, "L 2"], agreement: float) -> float:
        """Tokens a byte, where each draft is accepted with this chance if those before it are."""
        tokens = sum(agreement**i for i in range(self.gamma + 1))
        return tokens / (self.gamma * self.step(skip) + self.verification)


def layers_to_skip(step: ViewedModel, job: Job, reads: Sequence[Reads]) -> Skipped:
    """What the steps of a draft may leave out of its model. One line is logged, at INFO, with what was chosen and why.

    step: the draft's steps, which skip nothing. reads: what such a step reads of the context in each layer.
    """
    walk, layers = walked(job), job.target.config.num_layers
    if walk is None or layers < 3:
        log.info("draft skip auto: none, for %s", "the prompts are too short to choose by" if walk is None else "there are too few layers")
        return NOTHING
    found = _Search(step, walk, Cost.of(step.model, job, reads)).found()
    log.info(found.reason)
    return found.skipped


def walked(job: Job) -> Walk | None:
    """The ends of the longest prompts; None if they are too short."""
    longest = sorted(job.prompts, key=len, reverse=True)[:ROWS]
    T = job.gamma + 1
    blocks = math.ceil(WALKED / T)
    texts = [list(text[-READ - blocks * T :]) for text in longest if len(text) > T]
    before = [max(1, len(text) - blocks * T) for text in texts]
    if sum(len(text) - n for text, n in zip(texts, before)) < LEAST:
        return None
    tokens, n = padded([text[:n] for text, n in zip(texts, before)])
    rest = np.zeros((len(texts), blocks * T), np.int32)
    for row, text, start in zip(rest, texts, before):
        row[: len(text) - start] = text[start:]
    valid = np.arange(blocks * T) < np.array([[len(text) - start] for text, start in zip(texts, before)])
    of_blocks = lambda x: jnp.asarray(x).reshape(len(texts), blocks, T).swapaxes(0, 1)
    empty = job.cache.empty(
        job.target.config, batch=len(texts), capacity=tokens.shape[1], num_speculative_tokens=blocks * T, dtype=job.target.dtype
    )
    said, cache = _target(ViewedModel(job.target, BOTH_PLANES), tokens, n, empty, of_blocks(rest))
    return Walk(of_blocks(rest), said, of_blocks(valid), cache)


@jax.jit
def _target(target: ViewedModel, tokens: Array, n: Array, empty: Cache, blocks: Int[Array, "N B T"]) -> tuple[Array, Cache]:
    """The target's most likely tokens after each of the blocks', and its cache with them all, at the lengths before the first."""
    _, cache = prefill(target.model, tokens, n, empty)
    before = cache.lengths

    def block(cache, tokens):
        logits, cache = target(tokens, cache.lengths.total[:, None] + jnp.arange(tokens.shape[1]), cache)
        return cache, logits.argmax(-1)

    cache, said = lax.scan(block, cache, blocks)
    return said, cache.rollback(before)


@jax.jit
def _agrees(step: ViewedModel, walk: Walk, blocks: Int[Array, "M"], keep: Bool[Array, "C L 2"]) -> Float[Array, "C"]:
    """The share of the target's tokens in these blocks that the model finds which keeps these halves of its layers."""
    T = walk.tokens.shape[2]

    def of_block(keep, index):
        tokens, lengths = walk.tokens[index], longer(walk.cache.lengths, index * T)
        positions = lengths.total[:, None] + jnp.arange(T)
        logits, _ = GatedModel(step.model, step.view, keep)(tokens, positions, walk.cache.rollback(lengths))
        return ((logits.argmax(-1) == walk.said[index]) & walk.valid[index]).sum()

    hits = lax.map(lambda keep: lax.map(functools.partial(of_block, keep), blocks).sum(), keep)
    return hits / walk.valid[blocks].sum()


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search came to. reason: a line about it."""

    skipped: Skipped
    reason: str


class _Search:
    """One search. Sets of halves [L, 2] are remembered by their bytes."""

    def __init__(self, step: ViewedModel, walk: Walk, cost: Cost):
        self.step, self.walk, self.cost = step, walk, cost
        self.shape = cost.halves.shape
        self.may = np.ones(self.shape, bool)
        self.may[[0, -1]] = False  # as in SWIFT: without the first or the last layer little is right
        self.rng = np.random.default_rng(0)
        self.tried: dict[bytes, float] = {}  # the logarithm of the speed

    def found(self) -> Found:
        blocks = np.arange(len(self.walk.tokens))
        nothing = np.zeros(self.shape, bool)
        batch = [nothing, *(self._at_random() for _ in range(TOGETHER - 1))]
        while batch and len(self.tried) < TRIED:
            self.tried |= {skip.tobytes(): self._score(skip, agreed) for skip, agreed in zip(batch, self._agreed(batch, blocks[::2]))}
            batch = self._next()
        best = sorted(self.tried, key=self.tried.get, reverse=True)[:FINALISTS]
        finalists = [nothing, *(self._set(key) for key in best if key != nothing.tobytes())]
        agreed = self._agreed(finalists, blocks[1::2])  # which had no part in the choice so far
        speeds = list(map(self.cost.speed, finalists, agreed))
        i = int(np.argmax(speeds))
        skipped = Skipped(*(frozenset(np.flatnonzero(half).tolist()) for half in finalists[i].T))
        share = self.cost.step(finalists[i]) / self.cost.step(nothing)
        reason = (
            f"draft skip auto: {skipped}, of {len(self.tried)} sets tried. It finds {agreed[i]:.0%} of the target's tokens, the whole "
            f"draft {agreed[0]:.0%}; it reads {share:.0%} of that one's bytes, and by bytes is {speeds[i] / speeds[0]:.3f} times as fast"
        )
        return Found(skipped, reason)

    def _agreed(self, sets: list[np.ndarray], blocks: np.ndarray) -> list[float]:
        """What share of the target's tokens in these blocks the model finds without each of these sets."""
        rows = -len(sets) % TOGETHER  # so that there is one program
        keep = np.array([*(~skip for skip in sets), *[~sets[0]] * rows])
        return [
            share
            for first in range(0, len(keep), TOGETHER)
            for share in np.asarray(
                _agrees(self.step, self.walk, jnp.asarray(blocks), jnp.asarray(keep[first : first + TOGETHER]))
            ).tolist()
        ][: len(sets)]

    def _score(self, skip: np.ndarray, agreed: float) -> float:
        return math.log(self.cost.speed(skip, agreed))

    def _at_random(self) -> np.ndarray:
        skip, may = np.zeros(self.shape, bool), np.flatnonzero(self.may)
        skip.flat[self.rng.choice(may, self.rng.integers(1, max(1, int(MOST_SKIPPED * len(may))) + 1), replace=False)] = True
        return skip

    def _next(self) -> list[np.ndarray]:
        """The sets to try next, none of which has been: half of them at random, the others promising."""
        new: dict[bytes, np.ndarray] = {}
        for skip in (self._at_random() for _ in range(POOL)):
            if len(new) == TOGETHER // 2:
                break
            if skip.tobytes() not in self.tried:
                new[skip.tobytes()] = skip
        pool = [self._at_random() for _ in range(POOL // 2)]
        best = sorted(self.tried, key=self.tried.get, reverse=True)[:FINALISTS]
        pool += [self._changed(self._set(best[self.rng.integers(len(best))])) for _ in range(POOL // 2)]
        known = self.tried.keys() | new.keys()
        pool = list({skip.tobytes(): skip for skip in pool if skip.tobytes() not in known}.values())
        tried = np.array([self._set(key).ravel() for key in self.tried])
        if pool:
            promise = promises(tried, np.array(list(self.tried.values())), np.array([skip.ravel() for skip in pool]))
            for at in np.argsort(-promise)[: TOGETHER - len(new)]:
                new[pool[at].tobytes()] = pool[at]
        return list(new.values())

    def _changed(self, skip: np.ndarray) -> np.ndarray:
        """The set with a half or two more or fewer."""
        skip = skip.copy()
        at = self.rng.choice(np.flatnonzero(self.may), self.rng.integers(1, 3), replace=False)
        skip.flat[at] ^= True
        return skip

    def _set(self, key: bytes) -> np.ndarray:
        return np.frombuffer(key, bool).reshape(self.shape)


def promises(tried: Bool[np.ndarray, "N F"], scores: Float[np.ndarray, "N"], pool: Bool[np.ndarray, "P F"]) -> Float[np.ndarray, "P"]:
    """The upper confidence bound of each set of a pool: a Gaussian process's mean, and its standard deviation times `CONFIDENCE`.

    Two sets are alike by exp(-d / `NEAR`), where d is in how many halves they differ.
    """
    alike = lambda a, b: np.exp(-(a[:, None] != b[None]).sum(-1) / NEAR)
    mean, deviation = scores.mean(), scores.std() or 1.0
    inverse = np.linalg.inv(alike(tried, tried) + 0.1 * np.eye(len(tried)))  # 0.1: what is measured is uncertain
    near = alike(pool, tried)
    known = np.einsum("pn,nm,pm->p", near, inverse, near)
    return mean + deviation * (near @ inverse @ ((scores - mean) / deviation) + CONFIDENCE * np.sqrt(np.maximum(1 - known, 0)))
