"""The text of new tokens as they come: whole characters only, and stop strings."""

import functools
import itertools
import logging
from collections.abc import Sequence

from qspec_jax.checkpoints.tokenizers import special_tokens
from qspec_jax.errors import InputError, warn_once

log = logging.getLogger(__name__)


_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder makes of a part of a character
_CONTEXT = 8  # tokens before those that are decoded
_OPEN = 3  # tokens that a character may lack its last byte in; it has at most 4 bytes, and a token at least one


class RowText:
    """The text of one row's new tokens.

    It is what they add to the text of the prompt: a blank at its beginning stays, and a character that the prompt begins and they complete
    is theirs. Special tokens are in no text, and text after them continues that before them. It does not depend on how tokens are
    divided over calls of `add`.

    token_ids: what was added, up to the token in which a stop string was complete; text: what they say, complete after `end`.

    Args:
        tokenizer: decodes token ids, as those of transformers do.
        stop: strings that end the text, cut off with all that follows.
        prompt: the tokens before the new ones. One of special tokens alone has no text, so that a text begins; without a prompt it goes on
            after an ordinary letter.
    """

    def __init__(self, tokenizer, stop: Sequence[str] = (), prompt: Sequence[int] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._special = frozenset(special_tokens(tokenizer).values())
        # Tokens are decoded after some whose text is complete, the context. _shown: characters of the others' text that are in `text`.
        self._context: list[int] = [] if len(prompt) else self._letter
        self._others: list[int] = []
        self._shown = self._of_prompt = 0
        self.token_ids: list[int] = []
        self.text, self.stopped, self._returned, self._searched = "", False, 0, 0
        before = itertools.islice((token for token in reversed(prompt) if token not in self._special), _CONTEXT)
        for token in reversed(list(before)):
            self._read([int(token)])  # those of a state are of an array
        # Of the prompt's unfinished character what stays unfinished is the prompt's.
        self.text, self._of_prompt = "", len(self._new(self._context, self._others)) - self._shown

    def add(self, token_ids: Sequence[int]) -> str:
        """Text that no later token can change: without an unfinished character, or what may be the beginning of a stop string."""
        for part in ([token] for token in token_ids) if self._stop else (token_ids,):
            if not self.stopped:
                self.token_ids += part
                self._read([token for token in part if token not in self._special])
                self._look_for_stop()
        return self._take(self._held_back())

    def end(self) -> str:
        """What `add` still held back."""
        if not self.stopped:
            self._show(self._new(self._context, self._others))
            self._look_for_stop()
        return self._take(0)

    @functools.cached_property
    def _letter(self) -> list[int]:
        return [*self._tokenizer.encode("a", add_special_tokens=False)]

    def _read(self, tokens: Sequence[int]) -> None:
        """Takes in tokens that are no special ones: all at once where no character is left unfinished, else one by one."""
        if len(tokens) > 1 and not self._others and _UNFINISHED not in (new := self._new(self._context, tokens)):
            self._others = [*tokens]
            self._show(new)
            self._close(new)
            return
        for token in tokens:
            self._others.append(token)
            new = self._new(self._context, self._others)
            unfinished = min(_trailing(new), len(new) - self._shown)
            if unfinished and len(self._others) > _OPEN:
                self._others = self._others[-_OPEN:]
                left = self._new(self._context, self._others)
                unfinished = min(unfinished, _trailing(left))
                self._show(new, unfinished)
                self._shown = len(left) - unfinished
            else:
                self._show(new, unfinished)
            if not unfinished:
                self._close(new)

    def _close(self, new: str) -> None:
        """Makes the tokens, whose text is complete, the context of those to come. A byte that is in no character must not be in it: some
        decoders make no characters of those next to it either."""
        self._context = self._letter if _UNFINISHED in new else [*self._context, *self._others][-_CONTEXT:]
        self._others, self._shown = [], 0

    def _new(self, context: Sequence[int], tokens: Sequence[int]) -> str:
        """The text that tokens add to that of the context."""
        if not tokens:
            return ""
        before, now = (text_of(self._tokenizer, ids) for ids in (context, [*context, *tokens]))
        if now.startswith(before) and (_UNFINISHED not in before or context == self._letter):
            return now[len(before) :]
        # The context begins within a character, or the tokens change its text: some decoders make no characters of all bytes in a row, once
        # one of them is in none.
        return self._new(self._letter if context != self._letter else (), tokens)

    def _show(self, new: str, unfinished: int = 0) -> None:
        """Adds to the text what `new` has beyond the characters shown, but for the last ones."""
        end = max(self._shown, len(new) - unfinished)
        more, self._shown = new[self._shown : end], end
        if more and self._of_prompt:
            kept = more[min(self._of_prompt, len(more) - len(more.lstrip(_UNFINISHED))) :]
            self._of_prompt = 0 if kept else self._of_prompt - len(more)
            more = kept
        self.text += more

    def _look_for_stop(self) -> None:
        if (cut := first_stop(self.text, self._stop, self._searched)) is not None:
            self.text, self.stopped = self.text[:cut], True
        self._searched = max(0, len(self.text) - max(map(len, self._stop), default=1) + 1)

    def _held_back(self) -> int:
        """How long the longest end of the text is that may be the beginning of a stop string."""
        if self.stopped:
            return 0
        lengths = range(min(len(self.text) - self._returned, max(map(len, self._stop), default=1) - 1), 0, -1)
        return next((n for n in lengths if any(string.startswith(self.text[-n:]) for string in self._stop)), 0)

    def _take(self, held_back: int) -> str:
        begin, self._returned = self._returned, len(self.text) - held_back
        return self.text[begin : self._returned]


def encoded(tokenizer, text: str) -> list[int]:
    """The token ids of a text. Raises InputError for what is no Unicode text, such as bytes of another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"character {error.start} of the prompt is half of one (a surrogate); it should be text in UTF-8") from None
    # A tokenizer may add a BOS token to it; it is empty all the same.
    ids = tokenizer(text)["input_ids"] if text else []
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and [*ids[:2]] == [bos, bos] and [*tokenizer("")["input_ids"][:1]] == [bos]:
        token = tokenizer.bos_token
        warn_once(log, f"a prompt begins with {token!r}, and the tokenizer puts another before it; leave it out, or give token ids")
    return ids


def text_of(tokenizer, token_ids: Sequence[int]) -> str:
    """The text of token ids without special tokens. Nothing is cleaned up: older tokenizers remove blanks before punctuation by default."""
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def first_stop(text: str, stop: Sequence[str], start: int = 0) -> int | None:
    """The index at which the first of the strings begins in a text, from `start` on; None if none does."""
    found = [at for string in stop if (at := text.find(string, start)) >= 0]
    return min(found, default=None)


def _trailing(text: str) -> int:
    """How many characters at the end of a text may be parts of one."""
    return len(text) - len(text.rstrip(_UNFINISHED))
