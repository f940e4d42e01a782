"""How many greedy tokens agree with one-by-one decoding, and how close the first ones that differ were.

Greedy output is the target's in exact arithmetic. In bfloat16 and float32, passes of other shapes round differently, and a near tie may be
broken differently; after that a row reads another text.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.keys import stacked
from qspec_jax.decoding.limits import Limits, make_limits
from qspec_jax.decoding.prepare import prepare
from qspec_jax.decoding.round import current_round, feed
from qspec_jax.decoding.sampling import Sampler, make_sampler
from qspec_jax.decoding.state import RUNNING, DecodeState
from qspec_jax.drafts.draft import Draft
from qspec_jax.models.llama import Llama
from qspec_jax.models.viewed import Step
from qspec_jax.progress import working


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a pass chose between two tokens.

    Attributes:
        token: the token with the largest logit of all.
        logits: of the two tokens.
    """

    token: int
    logits: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token of a row that is not that of one-by-one decoding. Both decodes have the same tokens before it.

    The logits are of passes of the same shapes and caches as in the two decodes, but in programs of their own, which may round differently.

    Attributes:
        prompt: the number of the prompt.
        position: of the token among the new ones.
        tokens: that of one-by-one decoding, and that of the other decode.
        one_by_one: the logits of both by the pass of one-by-one decoding.
        in_round: their logits by the pass of the round that decided.
        units: for each of these passes, the first logit minus the second, in units of the model's dtype: in distances between neighbouring
            numbers at the larger one of them.
        reproduced: whether these passes choose the two tokens.
    """

    prompt: int
    position: int
    tokens: tuple[int, int]
    one_by_one: tuple[float, float]
    in_round: tuple[float, float]
    units: tuple[float, float]
    reproduced: bool


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Tokens of a decode beside those of one-by-one decoding.

    Attributes:
        rows: prompts that were compared.
        tokens: new tokens of all rows.
        agreeing: those before the first difference of their row.
        differences: of the rows that differ.
    """

    rows: int
    tokens: int
    agreeing: int
    differences: list[Difference]

    @property
    def share(self) -> float:
        """The share of tokens before the first difference of their row."""
        return self.agreeing / self.tokens

    @property
    def first(self) -> int | None:
        """The lowest position of a difference; None if there is none."""
        return min((difference.position for difference in self.differences), default=None)


class Baseline:
    """One-by-one decoding of prompts without a draft, each prompt alone.

    Args:
        model: the target.
        prompts: token ids.
        config: with the cache and the number of new tokens, and draft "none".
        tokenizer: only its ids are generated; None: any.
    """

    def __init__(self, model: Llama, prompts: Sequence[Sequence[int]], config: GenerationConfig, tokenizer: Any = None):
        self._model = model
        self._alone = [_Decoding(model, [prompt], config, tokenizer) for prompt in prompts]
        self._prompts, self._tokenizer = prompts, tokenizer
        self.tokens = []
        for i, decoding in enumerate(self._alone):
            with working(f"decoding prompt {i + 1} of {len(prompts)} one by one"):
                self.tokens += decoding.tokens

    def compared(self, config: GenerationConfig, batch: int) -> Agreement:
        """The agreement of a decode with another draft, or of a batch of rows.

        Args:
            config: with the same cache and number of new tokens.
            batch: rows that are decoded together.
        """
        differences: list[Difference] = []
        agreeing = 0
        for first in range(0, len(self._prompts), batch):
            decoding = _Decoding(self._model, self._prompts[first : first + batch], config, self._tokenizer)
            wanted: dict[int, tuple[int, tuple[int, int]]] = {}
            for b, (own, other) in enumerate(zip(self.tokens[first : first + batch], decoding.tokens, strict=True)):
                position = next((i for i, pair in enumerate(zip(own, other)) if pair[0] != pair[1]), None)
                agreeing += len(own) if position is None else position
                if position is not None:
                    wanted[b] = position, (own[position], other[position])
            in_round = decoding.choices(wanted)
            for b, (position, tokens) in wanted.items():
                alone = self._alone[first + b].choices({0: (position, tokens)})[0]
                differences.append(_difference(first + b, position, tokens, alone, in_round[b], self._model.dtype))
        return Agreement(len(self._prompts), sum(map(len, self.tokens)), agreeing, differences)


def _difference(prompt: int, position: int, tokens: tuple[int, int], alone: Choice, in_round: Choice, dtype: Any) -> Difference:
    units = units_between(alone.logits, dtype), units_between(in_round.logits, dtype)
    reproduced = (alone.token, in_round.token) == tokens
    return Difference(prompt, position, tokens, alone.logits, in_round.logits, units, reproduced)


def units_between(pair: tuple[float, float], dtype: Any) -> float:
    """The first number minus the second, in distances between neighbouring numbers of a dtype at the larger magnitude."""
    largest = max(map(abs, pair))
    if not largest or not math.isfinite(largest):
        return pair[0] - pair[1]
    return (pair[0] - pair[1]) / (float(jnp.finfo(dtype).eps) * 2.0 ** math.floor(math.log2(largest)))


class _Decoding:
    """A greedy decode of prompts that are one batch. It can be run again, to see how a token was chosen."""

    def __init__(self, model: Llama, prompts: Sequence[Sequence[int]], config: GenerationConfig, tokenizer: Any):
        prepared = prepare(model, prompts, config=config, tokenizer=tokenizer)
        self._prompts = prepared.prompts
        self._engine = prepared.engine()
        self._keys = stacked([request.key for request in prepared.requests])
        self._sampler, self._limits = make_sampler(*prepared.configs), make_limits(model, *prepared.configs, tokenizer=tokenizer)

    @functools.cached_property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each row."""
        state = self._engine.rounds(self._begun(), self._sampler, self._limits)
        return [row[:count].tolist() for row, count in zip(*jax.device_get((state.tokens, state.emitted)))]

    def choices(self, wanted: dict[int, tuple[int, tuple[int, int]]]) -> dict[int, Choice]:
        """How the passes of the rounds that decided chose tokens.

        Args:
            wanted: of each row the position of a token, and two token ids.
        """
        found: dict[int, Choice] = {}
        if not wanted:
            return found
        B, gamma = len(self._prompts), self._engine.gamma
        position, pair = np.full(B, -1, np.int32), np.zeros((B, 2), np.int32)
        for b, (at, tokens) in wanted.items():
            position[b], pair[b] = at, tokens
        new = np.array([[*row, *[0] * gamma] for row in self.tokens], np.int32)
        found |= self._chosen_in_prefill(position, pair)
        state = self._begun()
        emitted, status = jax.device_get((state.emitted, state.status))
        while (status == RUNNING).any() and (emitted <= position).any():
            column = position - emitted
            due = (column >= 0) & (column <= gamma)  # rounds that may decide; the last of them does
            if due.any():
                drafts = np.stack([row[count : count + gamma] for row, count in zip(new, emitted)])
                args = jnp.asarray(drafts), jnp.asarray(np.clip(column, 0, gamma)), jnp.asarray(pair)
                chosen, logits = jax.device_get(self._engine.run(self._engine.call(PASS, state, self._sampler, self._limits, *args)))
                found |= {int(b): _choice(chosen[b], logits[b]) for b in np.flatnonzero(due)}
            state = self._engine.rounds(state, self._sampler, self._limits, 1)
            emitted, status = jax.device_get((state.emitted, state.status))
        return found

    def _begun(self) -> DecodeState:
        return self._engine.prefill(self._prompts, self._sampler, self._keys, self._limits)

    def _chosen_in_prefill(self, position: Int[np.ndarray, "B"], pair: Int[np.ndarray, "B 2"]) -> dict[int, Choice]:
        """The choices of first tokens, which prefill makes."""
        if (position != 0).all():
            return {}
        logits = self._engine.read(*self._prompts).logits
        processed = self._limits.processed(logits[:, None], jnp.zeros(len(logits), jnp.int32), None)[:, 0]
        chosen, logits = jax.device_get((processed.argmax(-1), jnp.take_along_axis(processed, jnp.asarray(pair), 1)))
        return {int(b): _choice(chosen[b], logits[b]) for b in np.flatnonzero(position == 0)}


def _choice(token: Any, logits: Any) -> Choice:
    return Choice(int(token), (float(logits[0]), float(logits[1])))


def _passed(
    target: Step,
    draft: Draft | None,
    sampler: Sampler,
    state: DecodeState,
    limits: Limits,
    drafts: Int[Array, "B gamma"],
    column: Int[Array, "B"],
    pair: Int[Array, "B 2"],
) -> tuple[Int[Array, "B"], Float[Array, "B 2"]]:
    """The pass of a round over these drafts: in a column of each row the most likely token, and the logits of two others."""
    current = current_round(sampler, state, limits)
    tokens = jnp.concatenate([state.pending[:, None], drafts], 1)
    logits, _, _ = feed(target, tokens, state.cache, current, draft)
    of_column = jnp.take_along_axis(current.processed(logits, drafts), column[:, None, None], 1)[:, 0]
    return of_column.argmax(-1), jnp.take_along_axis(of_column, pair, 1)


PASS = Compiled(_passed, passes=True)
