"""The text of new tokens as they come: whole characters only, and stop strings."""

from collections.abc import Sequence

from qspec_jax.errors import InputError


class RowText:
    """The text of one row's new tokens. stop: strings that end it, cut off with all that follows.

    token_ids: what was added, up to the token in which a stop string was complete; text: what they say, complete after `end`.
    """

    def __init__(self, tokenizer, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self.token_ids: list[int] = []
        self.text, self.stopped = "", False
        # Tokens are decoded together with those just before them, [_window, _read), whose text is known: what a tokenizer does at
        # the beginning of a text is then done to those.
        self._window = self._read = self._shown = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Text that no later token can change: without an unfinished character, or what may be the beginning of a stop string."""
        for part in ([token] for token in token_ids) if self._stop else (token_ids,):
            if not self.stopped:
                self.token_ids += part
                self._decode(unfinished=False)
        return self._take(self._held_back())

    def end(self) -> str:
        """What `add` still held back."""
        if not self.stopped:
            self._decode(unfinished=True)
        return self._take(0)

    def _decode(self, *, unfinished: bool) -> None:
        before, now = (text_of(self._tokenizer, self.token_ids[self._window : end]) for end in (self._read, len(self.token_ids)))
        new = now[len(before) :]
        whole = new if unfinished else new.rstrip("\N{REPLACEMENT CHARACTER}")
        cut = first_stop(self.text + whole, self._stop, self._shown)
        if cut is not None:
            self.text, self.stopped = (self.text + whole)[:cut], True
        elif new and new == whole:
            self.text += new
            self._window, self._read = self._read, len(self.token_ids)

    def _held_back(self) -> int:
        """How long the longest end of the text is that may be the beginning of a stop string."""
        if self.stopped:
            return 0
        lengths = range(min(len(self.text) - self._shown, max(map(len, self._stop), default=1) - 1), 0, -1)
        return next((n for n in lengths if any(string.startswith(self.text[-n:]) for string in self._stop)), 0)

    def _take(self, held_back: int) -> str:
        shown, self._shown = self._shown, len(self.text) - held_back
        return self.text[shown : self._shown]


def encoded(tokenizer, text: str) -> list[int]:
    """The token ids of a text. Raises InputError for what is no Unicode text, such as bytes of another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"character {error.start} of the prompt is half of one (a surrogate); it should be text in UTF-8") from None
    # A tokenizer may add a BOS token to it; it is empty all the same.
    return tokenizer(text)["input_ids"] if text else []


def text_of(tokenizer, token_ids: Sequence[int]) -> str:
    """Without special tokens, and as it is: older tokenizers take blanks away from before punctuation unless told not to."""
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def first_stop(text: str, stop: Sequence[str], start: int = 0) -> int | None:
    """Where the first of the strings begins in a text, at `start` or behind it."""
    found = [at for string in stop if (at := text.find(string, start)) >= 0]
    return min(found, default=None)
