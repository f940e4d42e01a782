"""Chat messages as token ids, by a tokenizer's chat template, and prompts that look as if they should have been messages."""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qspec_jax.errors import InputError, with_type

_CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")  # how templates format the present time
PROBE = "qspecprobe"  # a text that no template has
SHAPE = "messages should be a list of objects with role and content"


def chat_tokens(tokenizer: Any, messages: Any, *, answers: bool = True, time: datetime.datetime | None = None) -> list[int]:
    """The token ids of a conversation by the chat template, up to where the assistant's answer begins.

    Values of None are left out, as if their keys were absent. A content that is a list of text parts goes as it is to a template that
    takes parts, and its texts joined by line breaks to any other. Raises InputError for what is no conversation of texts, and where there
    is no template.

    Args:
        tokenizer: with a chat template.
        messages: a list of objects with a role and a content.
        answers: whether the assistant's answer begins after them; else the messages end there.
        time: what a template that names the date takes for the present; None: now.
    """
    check_template(tokenizer, "messages need")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError(f"{SHAPE}, not {_kind(messages)}")
    if isinstance(messages[0], Sequence) and not isinstance(messages[0], str):
        raise InputError("messages is a list of conversations, and should be one conversation: give each of them a prompt of its own")
    template = _template(tokenizer)
    turns = [_message(i, message, template) for i, message in enumerate(messages)]
    try:
        json.dumps(turns, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise InputError("messages have half of a character (a surrogate); they should be text in UTF-8") from None
    try:
        fixed = {"chat_template": _dated(tokenizer.chat_template, time)} if time is not None and names_date(tokenizer) else {}
        return tokenizer.apply_chat_template(turns, add_generation_prompt=answers, return_dict=True, **fixed)["input_ids"]
    except Exception as error:  # of the template, which is the checkpoint's
        raise InputError(f"messages do not fit the chat template ({with_type(error)})") from None


def with_chats(prompts: Any, tokenizer: Any) -> Any:
    """The prompts, with conversations as token ids. Raises InputError as `chat_tokens` does.

    Args:
        prompts: of `generate`; those that are lists of messages are conversations.
        tokenizer: needed where there is a conversation.
    """
    if not isinstance(prompts, list | tuple):
        return prompts
    if prompts and isinstance(prompts[0], Mapping):
        raise InputError("prompts is a list of messages, and should be a list of prompts: put the conversation in a list of its own")
    if not any(map(_is_chat, prompts)):
        return prompts
    if tokenizer is None:
        raise InputError("prompts are messages, so a tokenizer is needed")
    found = []
    for i, prompt in enumerate(prompts):
        try:
            found.append(chat_tokens(tokenizer, prompt) if _is_chat(prompt) else prompt)
        except InputError as error:
            raise InputError(f"prompt {i}: {error}") from None
    return found


def check_template(tokenizer: Any, what: str) -> None:
    """Raises InputError where the tokenizer has no chat template. what: the beginning of the message, with its verb."""
    if not getattr(tokenizer, "chat_template", None):
        whose = getattr(tokenizer, "name_or_path", "") or "this checkpoint"
        raise InputError(f"{what} a tokenizer with a chat template, and that of {whose} has none; a text or token ids need no template")


def hint_at_chat(tokenizer: Any, prompt: str, instead: str) -> str | None:
    """A line for the log where a text looks as if it should have been a message: the chat template puts marks around one, and the text has
    none of them. None where it has some, or there is no template.

    Args:
        tokenizer: of the checkpoint.
        prompt: the text.
        instead: the end of the line, which says how to give messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    marks = _template(tokenizer).marks
    if not marks or any(mark in prompt for mark in marks):
        return None
    return f"the checkpoint has a chat template, and a prompt without its marks ({' '.join(marks)}) is a raw text; {instead}"


def names_date(tokenizer: Any) -> bool:
    """Whether the chat template has the present date or time in the conversation."""
    return isinstance(tokenizer.chat_template, str) and _CLOCK.search(tokenizer.chat_template) is not None


def _dated(template: str, time: datetime.datetime) -> str:
    return _CLOCK.sub(lambda found: json.dumps(time.strftime(found[2])), template)


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping | list | tuple)


def _kind(value: Any) -> str:
    return "an empty list" if isinstance(value, list | tuple) else "one object" if isinstance(value, Mapping) else f"{value!r:.40}"


def _message(i: int, message: Any, template: "_Template") -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{SHAPE}, and message {i} is {message!r:.40}")
    found = _without_none(message)
    if not isinstance(role := found.get("role"), str):
        raise InputError(f"message {i} has no role: {SHAPE}")
    content = found.get("content")
    if content is None:
        if role == "assistant" and found.get("tool_calls"):
            return found
        raise InputError(f"message {i} has no content, which only an assistant's message with tool_calls may leave out")
    if isinstance(content, str):
        return found | {"content": [_text_part(content)]} if template.parts_alone else found
    if not isinstance(content, list | tuple):
        raise InputError(f"the content of message {i} should be a text or a list of text parts, not {content!r:.40}")
    texts = [_text_of(i, part) for part in content]
    return found | {"content": [_text_part(text) for text in texts] if template.takes_parts else "\n".join(texts)}


def _text_of(i: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind != "text":
        named = "what is no object" if kind is None else f"a part of type {kind!r}"
        raise InputError(f"the content of message {i} has {named}; only text parts can be read")
    if not isinstance(text := part.get("text"), str):
        raise InputError(f"the content of message {i} has a text part without a text")
    return text


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list | tuple) else value


class _Template:
    """What a chat template makes of one message.

    Attributes:
        takes_parts: whether a content may be a list of parts.
        parts_alone: whether it has to be, as a text is lost.
        marks: what it puts around the message: special tokens but for BOS, or the texts where there are none.
    """

    def __init__(self, tokenizer: Any):
        of_text, of_parts, of_two = (_rendered(tokenizer, [_text_part(PROBE)] * n if n else PROBE) for n in range(3))
        if PROBE in of_text:
            self.takes_parts = of_parts == of_text
        else:
            self.takes_parts = PROBE in of_parts and not any(key in of_parts for key in ("'type'", '"type"'))
        self.takes_parts = self.takes_parts and of_two.count(PROBE) == 2 * of_parts.count(PROBE)  # some read the first part alone
        self.parts_alone = self.takes_parts and PROBE not in of_text
        text = (of_parts if self.parts_alone else of_text).replace(tokenizer.bos_token or "\0", "")
        added = {token.content for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        special = sorted((token for token in added if token in text), key=text.index)
        around = [part.strip() for part in text.split(PROBE)] if PROBE in text else []
        self.marks = tuple(special or filter(None, around))


def _rendered(tokenizer: Any, content: Any) -> str:
    """What the template makes of a user's message; empty where it fails."""
    try:
        message = {"role": "user", "content": content}
        return tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    except Exception:  # of the template, which is the checkpoint's
        return ""


def _template(tokenizer: Any) -> _Template:
    return _known_template(tokenizer, str(tokenizer.chat_template))


@functools.lru_cache(maxsize=8)
def _known_template(tokenizer: Any, template: str) -> _Template:
    return _Template(tokenizer)
