"""Lines of OpenAI's batch files, as vLLM's run-batch reads them: what a line asks for in our own keys, and its output in OpenAI's form.

Nothing of an output depends on a clock or on chance: its ids are the line's `custom_id`, and `created` is 0.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.results import Result
from qspec_jax.errors import InputError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEYS = ("custom_id", "method", "url", "body")
# What a body may say of the settings of a line, by our names for it.
SAME = ("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "seed", "logit_bias")
RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
THEIRS = ("logprobs", "top_logprobs", "stop_token_ids", "ignore_eos")
IGNORED = ("model", "user", "metadata")
# What is not supported, and the value that asks for nothing.
NEUTRAL = {
    "best_of": 1,
    "stream": False,
    "echo": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "response_format": {"type": "text"},
}
MIN_LOGPROB = -9999.0  # OpenAI's: JSON has no -inf
ERROR_CODE = "invalid_request_error"


def is_openai(said: Mapping[str, Any], own: Sequence[str]) -> bool:
    """Whether a line is one of an OpenAI batch file. own: keys of which such a line has none, our own prompts."""
    return len(said.keys() & set(KEYS)) >= 2 and not any(said.get(name) is not None for name in own)


@dataclasses.dataclass(frozen=True)
class Call:
    """What the output of a line needs of it.

    Attributes:
        custom_id: None where the line has none.
        chat: whether the answer is a message.
        model: as the body calls it.
    """

    custom_id: str | None
    chat: bool
    model: str

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Call":
        name, body = said.get("custom_id"), said.get("body")
        model = body.get("model") if isinstance(body, dict) else None
        return cls(name if isinstance(name, str) else None, said.get("url") == CHAT, model if isinstance(model, str) else "")

    def output(self, line: int | None, results: Sequence[Result], prompt_tokens: int, tokenizer: Any) -> dict[str, Any]:
        """OpenAI's output line.

        Args:
            line: the line's number.
            results: the continuations.
            prompt_tokens: how many the prompt has.
            tokenizer: of which the texts of tokens with log-probabilities are.
        """
        new = sum(len(result.token_ids) for result in results)
        body = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self._name(line)}",
            "object": "chat.completion" if self.chat else "text_completion",
            "created": 0,
            "model": self.model,
            "choices": [{"index": i} | self._choice(result, tokenizer) for i, result in enumerate(results)],
            "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": new, "total_tokens": prompt_tokens + new},
        }
        return self._line(line, 200, body, None)

    def _choice(self, result: Result, tokenizer: Any) -> dict[str, Any]:
        answer = {"message": {"role": "assistant", "content": result.text, "refusal": None}} if self.chat else {"text": result.text}
        logprobs = None
        if result.logprobs is not None:
            logprobs = (_chat_logprobs if self.chat else _logprobs)(result, tokenizer)
        return answer | {"logprobs": logprobs, "finish_reason": "length" if result.finish_reason == "length" else "stop"}

    def wrong(self, line: int | None, error: str) -> dict[str, Any]:
        """OpenAI's output line for one that is wrong. line: its number. error: what is wrong with it."""
        body = {"error": {"message": error, "type": ERROR_CODE, "param": None, "code": None}}
        return self._line(line, 400, body, {"code": ERROR_CODE, "message": error})

    def _name(self, line: int | None) -> str:
        return str(line) if self.custom_id is None else self.custom_id

    def _line(self, line: int | None, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> dict[str, Any]:
        name = self._name(line)
        response = {"status_code": status, "request_id": f"req_{name}", "body": body}
        return {"id": f"batch_req_{name}", "custom_id": self.custom_id, "response": response, "error": error}


def as_own(said: Mapping[str, Any], config: GenerationConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """What a line asks for, in our own keys, and what the body calls each of those that has another name there. Values are checked where
    lines of our own are. Raises InputError for what is refused.

    Args:
        said: the line.
        config: of the command, which says what all lines share.
    """
    if not isinstance(said.get("custom_id"), str):
        raise InputError(f"custom_id should be a text, not {said.get('custom_id')!r:.40}")
    if said.get("method") != "POST":
        raise InputError(f"method should be POST, not {said.get('method')!r:.40}")
    if said.get("url") not in (CHAT, COMPLETIONS):
        raise InputError(f"url should be {CHAT} or {COMPLETIONS}, not {said.get('url')!r:.80}")
    if not isinstance(said.get("body"), dict):
        raise InputError("body should be an object")
    chat, body = said["url"] == CHAT, {name: value for name, value in said["body"].items() if value is not None}
    prompt = "messages" if chat else "prompt"
    known = (prompt, *SAME, *RENAMED, *THEIRS, *NEUTRAL, *IGNORED)
    if unknown := [name for name in body if name not in known]:
        raise InputError(f"body has {unknown[0]!r}, which is not supported; there are {', '.join(known)}")
    for name, nothing in NEUTRAL.items():
        if body.get(name, nothing) != nothing:
            raise InputError(f"{name} {body[name]!r:.40} is not supported; it should be {str(nothing).lower()}, or left out")
    if body.get("ignore_eos", config.ignore_eos) != config.ignore_eos:
        raise InputError("ignore_eos is shared by all lines: leave it out, and give the command --ignore-eos or not")
    if prompt not in body:
        raise InputError(f"body should have {prompt}")
    own = {name: body[name] for name in SAME if name in body}
    names = {}
    for name, ours in RENAMED.items():
        if name in body:
            if ours in own and own[ours] != body[name]:
                raise InputError(f"{names[ours]} and {name} are the same, and should not differ")
            own[ours], names[ours] = body[name], name
    if "stop_token_ids" in body:
        ids = body["stop_token_ids"]
        if not isinstance(ids, list) or any(isinstance(token, list) for token in ids):
            raise InputError("stop_token_ids should be a list of token ids, each of which stops by itself")
        own["stop_token_ids"] = [[token] for token in ids]
    (_ask_chat_logprobs if chat else _ask_logprobs)(body, own, names)
    if chat:
        return own | {"messages": body["messages"]}, names
    return own | _prompt(body["prompt"], names), names


def in_openai_names(error: str, names: Mapping[str, str]) -> str:
    """A message about our own keys, with the names that the body has for them."""
    for ours, theirs in names.items():
        error = re.sub(rf"\b{ours}\b", theirs, error)
    return error


def _prompt(prompt: Any, names: dict[str, str]) -> dict[str, Any]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        if any(isinstance(part, str | list) for part in prompt):
            raise InputError("prompt should be one text or one list of token ids; give each prompt a line of its own")
        names["token_ids"] = "prompt"
        return {"token_ids": prompt}
    return {"prompt": prompt}


def _ask_logprobs(body: Mapping[str, Any], own: dict[str, Any], names: dict[str, str]) -> None:
    if "top_logprobs" in body:
        raise InputError(f"top_logprobs is for {CHAT}; here logprobs says how many")
    if "logprobs" in body:
        own["output_logprobs"], own["top_logprobs"], names["top_logprobs"] = True, body["logprobs"], "logprobs"


def _ask_chat_logprobs(body: Mapping[str, Any], own: dict[str, Any], names: dict[str, str]) -> None:
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise InputError("top_logprobs needs logprobs, which should be true")
    if "logprobs" in body:
        own["output_logprobs"], own["top_logprobs"] = body["logprobs"], body.get("top_logprobs", 0)
        names["output_logprobs"] = "logprobs"


def _logprobs(result: Result, tokenizer: Any) -> dict[str, Any]:
    """The log-probabilities of the new tokens, as completions have them."""
    tokens = [_text(tokenizer, token) for token in result.token_ids]
    offsets = [0]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    top = [{_text(tokenizer, token): _finite(chance) for token, chance in place} for place in result.top_logprobs]
    chances = [_finite(chance) for chance in result.logprobs]
    return {"tokens": tokens, "token_logprobs": chances, "top_logprobs": top, "text_offset": offsets[: len(tokens)]}


def _chat_logprobs(result: Result, tokenizer: Any) -> dict[str, Any]:
    """The log-probabilities of the new tokens, as messages have them."""

    def entry(token: int, chance: float) -> dict[str, Any]:
        text = _text(tokenizer, token)
        whole = "\N{REPLACEMENT CHARACTER}" not in text  # or the bytes of the text are not the token's
        return {"token": text, "logprob": _finite(chance), "bytes": list(text.encode()) if whole else None}

    places = zip(result.token_ids, result.logprobs, result.top_logprobs, strict=True)
    return {"content": [entry(token, chance) | {"top_logprobs": [entry(*each) for each in top]} for token, chance, top in places]}


def _text(tokenizer: Any, token: int) -> str:
    return tokenizer.decode([token], clean_up_tokenization_spaces=False)


def _finite(chance: float) -> float:
    return max(chance, MIN_LOGPROB)
