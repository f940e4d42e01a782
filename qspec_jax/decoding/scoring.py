"""Log-probabilities of given tokens after a state: of one continuation, or of many of the same text."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.reading import ROOM, check_reads, continuation_ids, room_for, with_room
from qspec_jax.decoding.requests import checked_prompt
from qspec_jax.decoding.rows import joined
from qspec_jax.errors import InputError
from qspec_jax.states.state import State

BATCH_SIZE = 8  # continuations that are read at a time, unless said otherwise


@dataclasses.dataclass(frozen=True)
class Score:
    """What the target says of a continuation.

    Attributes:
        token_ids: of the continuation.
        logprobs: the log-probability of each token after the text and the tokens before it.
        greedy: whether every token is the most likely one at its place.
    """

    token_ids: list[int]
    logprobs: list[float]
    greedy: bool

    @property
    def logprob(self) -> float:
        """The log-probability of the whole continuation."""
        return sum(self.logprobs)


def score(state: State, continuations: Sequence[Any], *, tokenizer: Any = None, batch_size: int = BATCH_SIZE) -> list[Score]:
    """Scores continuations of a state, each as if it were the only one. The state stays as it is.

    The target reads its own cache, so with the cache int8 these are the probabilities by which it generates.

    Args:
        state: the state of the text before.
        continuations: texts, which get no BOS, or lists of token ids; a single one is a list of one.
        tokenizer: for texts.
        batch_size: continuations that are read at a time.

    Raises:
        InputError: for an empty continuation, and as `extend` does.
    """
    if batch_size < 1:
        raise InputError(f"batch size {batch_size} should be at least 1")
    if isinstance(continuations, str) or (len(continuations) and isinstance(continuations[0], int | np.integer)):
        continuations = [continuations]
    model = state.reader.model
    if state.logits is None and not state.pending:
        raise InputError(f"a state that was trimmed to {len(state)} tokens should be extended by at least one before it scores")
    config = GenerationConfig(max_new_tokens=1)
    rows = []
    for i, continuation in enumerate(continuations):
        ids = checked_prompt(model, continuation_ids(continuation, tokenizer), config, name=f"continuation {i}")
        check_reads(state, f"continuation {i}", len(ids))
        rows.append(ids)
    longest = max((len(state) + len(ids) for ids in rows), default=0)
    if longest > state.room.text:
        state = with_room(state, room_for(state.reader, longest, ROOM))
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    found: dict[int, Score] = {}
    for first in range(0, len(rows), batch_size):
        indices = by_length[first : first + batch_size]
        texts = [np.concatenate([state.tokens, np.array(rows[i], np.int32)]) for i in indices]
        # A batch of one size, so that there is one program; what fills it up reads the shortest.
        texts += texts[:1] * (min(batch_size, len(rows)) - len(texts))
        states, ends = [state] * len(texts), list(map(len, texts))
        scored = joined(states, ends).read(states, texts, ends, scores=True)
        for i, (logprobs, likely) in zip(indices, scored):
            own = slice(len(logprobs) - len(rows[i]), None)  # a pending token is read before them
            found[i] = Score(rows[i], logprobs[own].tolist(), bool(likely[own].all()))
    return [found[i] for i in range(len(rows))]
