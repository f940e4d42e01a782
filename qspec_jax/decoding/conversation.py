"""Conversations by a tokenizer's chat template, each of whose turns is read onto the state of those before."""

import dataclasses
import datetime
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array, Key

from qspec_jax.decoding.chat import chat_tokens, check_template, names_date
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import stream
from qspec_jax.decoding.reading import extend, prefill
from qspec_jax.decoding.saving import load_with_notes, save_state
from qspec_jax.drafts.registry import NONE
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.states.state import Reader, State

log = logging.getLogger(__name__)

KEPT, KEPT_ALONE = 16, 2  # earlier states that are kept, where they share pages and where each has the whole cache
INTERRUPTED = "interrupted"  # the finish reason of an answer that was ended early
_BEGINNINGS = ("a", "1", "(")  # what a message may begin with: tokens before it that are always the same can be read before it is known

Message = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The figures of an answer.

    Attributes:
        text: what was said.
        finish_reason: "eos", "stop", "length", or "interrupted".
        read_tokens: tokens that were read before it: those of the message, and of all that had to be read again.
        read_s: seconds that reading took, compiling included.
        new_tokens: tokens of the answer.
        drafted: tokens that were drafted for it.
        accepted: drafts that the target accepted.
        tokens_per_second: new tokens for each second after the first piece; None if there was one piece at most.
        tokens: the number of tokens of the whole conversation.
    """

    text: str
    finish_reason: str
    read_tokens: int
    read_s: float
    new_tokens: int
    drafted: int
    accepted: int
    tokens_per_second: float | None
    tokens: int


@dataclasses.dataclass(frozen=True)
class _Point:
    """A conversation between two turns.

    Attributes:
        messages: those so far.
        documents: the text that the next message begins with.
        time: when the conversation began, which is the date of a template that names one.
        state: what was read, which the tokens of all that follows begin with unless the template rewrites it; None where it is not kept.
    """

    messages: tuple[Message, ...]
    documents: str
    time: datetime.datetime
    state: State | None


class Conversation:
    """A conversation with a model.

    Before each answer the template is applied to all messages, and the state is extended by the tokens that are new. Where a template has
    changed earlier ones, as some do that remove an answer's reasoning, what follows the first change is read again; a line in the log
    (INFO) says so. The same holds where the text of an answer is tokenized otherwise than it was generated. A template that names the date
    is given that of the beginning of the conversation.

    Args:
        model: the target.
        tokenizer: with a chat template.
        config: draft, cache and settings of the answers; `max_new_tokens` is the maximum length of an answer. None: the defaults.
        key: from which all draws come; needed where the config has a temperature.
        system: the text of the system message; None: no such message.
        documents: names and texts. The first message begins with them: with each one's name, a colon, an empty line, the text
            and an empty line.
        room: see `prefill`.

    Attributes:
        config: the settings; once something was read, with what draft "auto" became.
        answer: the figures of the last answer; None before it.

    Raises:
        InputError: for a tokenizer without a chat template, and a temperature without a key.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Any,
        *,
        config: GenerationConfig | None = None,
        key: Key[Array, ""] | None = None,
        system: str | None = None,
        documents: Mapping[str, str] | None = None,
        room: int | None = None,
    ):
        check_template(tokenizer, "a conversation needs")
        self.model, self.tokenizer, self.config, self.key = model, tokenizer, config or GenerationConfig(), key
        self._room = room
        if key is None and self.config.temperature:
            raise InputError(f"temperature {self.config.temperature:g} draws tokens at random, so key should be given: jax.random.key(0)")
        first = () if system is None else (_message("system", system),)
        text = "".join(f"{name}:\n\n{document}\n\n" for name, document in (documents or {}).items())
        self._points = [_Point(first, text, datetime.datetime.now(), None)]
        self._asked: State | None = None  # of the last message without its answer
        self._reader: Reader | None = None
        self._answers = 0
        self.answer: Answer | None = None

    @property
    def messages(self) -> list[Message]:
        """All messages so far; the first of the user begins with the documents."""
        return list(self._now.messages)

    @property
    def state(self) -> State | None:
        """The state of what was read; None where nothing was, or it is not kept."""
        return self._now.state

    def read_documents(self) -> int:
        """Reads the documents before the first message is known. Returns the number of tokens that were read; 0 without documents."""
        if not self._now.documents:
            return 0
        texts = [self._tokens([*self.messages, _message("user", self._now.documents + first)]) for first in _BEGINNINGS]
        first, *others = texts
        ids = first[: min(_common(first, other) for other in others)]
        if not ids:
            return 0
        state, count = self._read(ids)
        self._points[-1] = dataclasses.replace(self._now, state=state)
        return count

    def ask(self, text: str) -> Iterator[str]:
        """The answer to a message, in pieces of text, one for each round; those without a whole character are empty.

        The message and the answer become part of the conversation at the end. So does an answer that is ended early, by `close()` or by
        leaving a loop over it, with what was said by then; after an error the conversation is as it was before. `answer` has the figures.

        Args:
            text: the message.

        Raises:
            InputError: for messages that do not fit the template or the model's positions.
        """
        messages = [*self.messages, _message("user", self._now.documents + text)]
        ids = self._tokens(messages)
        began = time.perf_counter()
        asked, count = self._read(ids)
        jax.block_until_ready(asked.logits)
        read_s = time.perf_counter() - began
        config = dataclasses.replace(self.config, max_new_tokens=min(self.config.max_new_tokens, self.model.config.max_length - len(ids)))
        key = None if self.key is None else jax.random.fold_in(self.key, self._answers)
        pieces, said, times = stream(self.model, asked, config=config, key=key, tokenizer=self.tokenizer), [], []
        state, reason = asked, INTERRUPTED
        try:
            for piece in pieces:
                said.append(piece)
                times.append(time.perf_counter())
                yield piece.text
            state, reason = pieces.generation.states[0], pieces.generation.finish_reason[0]
        except GeneratorExit:
            pieces.close()
        whole, counts = "".join(piece.text for piece in said), [len(piece.token_ids) for piece in said]
        self._answers += 1
        self._asked = asked
        self._add(_Point((*messages, _message("assistant", whole)), "", self._now.time, state))
        self.answer = Answer(
            text=whole,
            finish_reason=reason,
            read_tokens=count,
            read_s=read_s,
            new_tokens=sum(counts),
            drafted=sum(piece.drafted for piece in said),
            accepted=sum(piece.accepted for piece in said),
            tokens_per_second=sum(counts[1:]) / (times[-1] - times[0]) if len(times) > 1 else None,
            tokens=len(ids) + sum(counts),
        )

    def undo(self) -> None:
        """Takes back the last message and its answer, or the last `load` or `reset`. Raises InputError at the beginning."""
        if len(self._points) == 1:
            raise InputError("there is nothing to take back: this is the beginning of the conversation")
        self._points.pop()
        self._asked = None

    def reset(self) -> None:
        """Goes back to the beginning, where the documents are read and nothing is said."""
        self._add(self._points[0])

    def save(self, path: str | Path) -> None:
        """Writes the conversation and its state to a file, which appears whole or not at all.

        Raises InputError if the file cannot be written, and before anything was read.
        """
        if self.state is None:
            raise InputError("there is nothing to save: no document and no message was read")
        now = self._now
        save_state(now.state, path, notes={"messages": now.messages, "documents": now.documents, "time": now.time.isoformat()})

    def load(self, path: str | Path) -> None:
        """Goes on with a conversation that was saved. Raises InputError as `load_state` does, and for a state of something else."""
        state, notes = load_with_notes(path, self.model, config=self.config)
        if not isinstance(notes, dict) or "messages" not in notes:
            raise InputError(
                f"{path}: is the state of a text, not of a conversation; read the text with `qspec prefill --chat`, or continue it with "
                "`qspec generate --state`"
            )
        self._go_on_with(state.reader)
        began = datetime.datetime.fromisoformat(notes["time"])
        self._add(_Point(tuple(notes["messages"]), notes["documents"], began, state))
        if began.date() != datetime.date.today() and names_date(self.tokenizer):
            log.info("the chat template names the date, which stays that of the saved conversation: %s", began.date())

    @property
    def _now(self) -> _Point:
        return self._points[-1]

    def _add(self, point: _Point) -> None:
        """Goes on to a point. Of the states before it the first one and the latest ones are kept."""
        self._points.append(point)
        count = KEPT if self._reader is None or self._reader.pool is not None else KEPT_ALONE
        for i in range(1, len(self._points) - 1 - count):
            self._points[i] = dataclasses.replace(self._points[i], state=None)

    def _go_on_with(self, reader: Reader) -> None:
        """Takes the reader for all that follows, and its settings, in which "auto" is settled."""
        self._reader, self.config = reader, dataclasses.replace(self.config, **reader.settings)

    def _tokens(self, messages: Sequence[Message]) -> list[int]:
        ids, positions = chat_tokens(self.tokenizer, messages, time=self._now.time), self.model.config.max_length
        if len(ids) >= positions:
            raise InputError(
                f"the conversation would have {len(ids)} tokens, and the model has {positions} positions; go back to an earlier point, or "
                "say less"
            )
        return ids

    def _read(self, ids: list[int]) -> tuple[State, int]:
        """The state of these tokens, from the longest kept state that they begin with, and the number of tokens that were read for it."""
        now, asked = self._now.state, self._asked
        known = [*filter(None, [now, asked, *(point.state for point in reversed(self._points))])]
        kept = [state for state in known if not state.lost]
        beginning = max((_trimmed_to(state, ids) for state in kept), key=_length, default=None)
        if len(kept) < len(known):
            log.info("an interrupted run has lost what was read, so it is read again")
        elif now is not None and _length(beginning) < len(now):
            self._say_why(now, ids, _length(beginning))
        if beginning is not None:
            return extend(beginning, ids[len(beginning) :]), len(ids) - len(beginning)
        if self._reader is None:
            state = prefill(self.model, ids, config=self.config, room=self._room)
            self._go_on_with(state.reader)
            return state, len(ids)
        # The draft is made once, and the reader knows its text, which a file is given.
        config = dataclasses.replace(self.config, draft=self._reader.draft or NONE)
        state = prefill(self.model, ids, config=config, room=self._room)
        self._reader = dataclasses.replace(self._reader, pool=state.reader.pool)  # which is another where the earlier one is lost
        return dataclasses.replace(state, reader=self._reader), len(ids)

    def _say_why(self, now: State, ids: list[int], first: int) -> None:
        """Says why tokens from number `first` on are read again, though a state of more was kept."""
        same = _common(now.tokens, ids)
        if self.tokenizer.decode(ids).startswith(self.tokenizer.decode(now.tokens)):
            log.info("the text of an answer has other tokens than it was generated by, so tokens from %d on are read again", first)
        else:
            log.info(
                "the chat template has changed the conversation after its first %d tokens, so those from %d on are read again", same, first
            )


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _length(state: State | None) -> int:
    return 0 if state is None else len(state)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _trimmed_to(state: State, ids: Sequence[int]) -> State | None:
    """The state, or what can be trimmed of it, that begins these tokens and leaves one of them to read; None if there is none."""
    same = min(_common(state.tokens.tolist(), ids), len(ids) - 1)
    if same == len(state):
        return state
    try:
        return state.trim(same)
    except InputError:
        return None
