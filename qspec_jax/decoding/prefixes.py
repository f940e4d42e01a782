"""Prefixes that lines name, and what follows them, as token ids with a cut between the two."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qspec_jax.decoding.chat import chat_tokens
from qspec_jax.decoding.reading import continuation_ids
from qspec_jax.decoding.text import encoded
from qspec_jax.errors import InputError, reading

log = logging.getLogger(__name__)

SHAPE = 'prefix should be a text, a list of token ids, {"file": PATH}, or a list of messages where the line has messages'
FILE = "file"


class Prefixes:
    """Reads the prefixes of lines.

    Where prefix and rest are divided depends on the line alone. A rest that is a text is tokenized by itself, without BOS. Messages of the
    prefix and of the line are one conversation, and the prefix has those first tokens that the template gives to its messages alone, too.

    Args:
        tokenizer: of texts and messages.
        folder: to which paths of files are relative; None: there may be no files.

    Attributes:
        contents: of each file that was read, by its path as it is given.
    """

    def __init__(self, tokenizer: Any, folder: Path | None):
        self.tokenizer, self.folder = tokenizer, folder
        self.contents: dict[str, bytes] = {}
        self._ids: dict[str, list[int]] = {}
        self._warned = False

    def tokens(self, prefix: Any, rest: Any, *, chat: bool) -> tuple[Sequence[int], int]:
        """The token ids of a line, and how many of them are its prefix.

        Args:
            prefix: a text, token ids, messages, or an object with the path of a file.
            rest: a text, token ids, or with `chat` messages.
            chat: whether the line has messages.

        Raises:
            InputError: for a prefix of another form, and for a file that cannot be read.
        """
        if chat != (isinstance(prefix, list) and bool(prefix) and all(isinstance(message, dict) for message in prefix)):
            raise InputError(f"{SHAPE}, not {prefix!r:.40}")
        if chat:
            return self._conversation(prefix, rest)
        if isinstance(prefix, str):
            first = self._text(prefix)
        elif isinstance(prefix, dict):
            first = self._text(self._file(prefix))
        elif isinstance(prefix, list) and all(type(token) is int for token in prefix):
            first = prefix
        else:
            raise InputError(f"{SHAPE}, not {prefix!r:.40}")
        if not first:
            raise InputError("the prefix is empty; it should have at least one token")
        return [*first, *(continuation_ids(rest, self.tokenizer) if rest else [])], len(first)

    def _text(self, text: str) -> list[int]:
        if text not in self._ids:
            self._ids[text] = encoded(self.tokenizer, text)
        return self._ids[text]

    def _file(self, said: dict[str, Any]) -> str:
        if said.keys() != {FILE} or not isinstance(name := said[FILE], str) or not name or "\0" in name:
            raise InputError(f"{SHAPE}, not {said!r:.40}")
        if self.folder is None:
            raise InputError(f"the prefix file {name} has no input file that its path is relative to; give its text as prefix")
        if name not in self.contents:
            self.contents[name] = _unchanged(self.folder / name)
        try:
            return self.contents[name].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"the prefix file {name} is not in UTF-8 (its byte {error.start + 1})") from None

    def _conversation(self, prefix: list[Any], rest: Any) -> tuple[list[int], int]:
        if not isinstance(rest, list):
            raise InputError(f"messages should be a list of objects with role and content, not {rest!r:.40}")
        whole, alone = chat_tokens(self.tokenizer, [*prefix, *rest]), chat_tokens(self.tokenizer, prefix, answers=False)
        same = next((i for i, (one, other) in enumerate(zip(whole, alone)) if one != other), min(len(whole), len(alone)))
        if same < len(alone) and not self._warned:
            self._warned = True
            log.warning(
                "the chat template changes the messages of a prefix once others follow them: of its %d tokens the first %d are the "
                "prefix, and the others are read with each line",
                len(alone),
                same,
            )
        return whole, same


def _unchanged(path: Path) -> bytes:
    """The content of a prefix file. Raises InputError if it cannot be read, or is changed meanwhile."""
    name = f"the prefix file {path}"
    with reading(name):
        before = os.stat(path)
        if not path.is_file():
            raise InputError(f"{name} should be a file")
        content, after = path.read_bytes(), os.stat(path)
    same = all(getattr(before, field) == getattr(after, field) for field in ("st_size", "st_mtime_ns", "st_ino"))
    if not same or len(content) != after.st_size:
        raise InputError(f"{name} was changed while it was read; start again once it is as it should be")
    return content
