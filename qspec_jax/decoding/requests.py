"""Requests: prompts and settings, checked once, before any work."""

import dataclasses
import logging
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from jaxtyping import Array, Key

from qspec_jax.checkpoints.tokenizers import padding_from, special_tokens
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.keys import as_threefry
from qspec_jax.decoding.limits import eos_ids
from qspec_jax.decoding.text import encoded
from qspec_jax.drafts.draft import Draft
from qspec_jax.errors import DraftRoomError, InputError, warn_once
from qspec_jax.models.llama import Llama

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt with settings and a key of its own.

    Attributes:
        tokens: token ids of the prompt.
        config: what to generate and how.
        key: of the row's random draws; a key of any of JAX's generators becomes one of threefry.
        prefix: how many of the tokens are a prefix, which is read once for all requests of a batch that begin with it; 0: none. The other
            tokens are read after it, as `extend` reads them, so the same tokens with another prefix may give other results.

    Raises:
        InputError: for a value that is no key.
    """

    tokens: Sequence[int]
    config: GenerationConfig
    key: Key[Array, ""]
    prefix: int = 0

    def __post_init__(self):
        object.__setattr__(self, "key", as_threefry(self.key))


def check_settings(model: Llama, config: GenerationConfig, tokenizer: Any = None) -> None:
    """Raises InputError for stop strings without a tokenizer, and for token ids that the model or the tokenizer does not have."""
    if config.stop and tokenizer is None:
        raise InputError("stop strings need a tokenizer")
    _check_ids(model, with_special_stops(config, tokenizer), tokenizer)


def checked_prompt(model: Llama, prompt: Any, config: GenerationConfig, tokenizer: Any = None, *, name: str = "the prompt") -> list[int]:
    """Returns the token ids of a prompt.

    Args:
        model: the target.
        prompt: a text or token ids.
        config: whose new tokens have to fit the model's positions together with the prompt.
        tokenizer: for a text.
        name: what error messages call the prompt.

    Raises:
        InputError: for an empty prompt, a token id outside the vocabulary, and a prompt that is too long.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InputError(f"{name} is a text, so a tokenizer is needed")
        prompt = encoded(tokenizer, prompt)
    try:
        if isinstance(prompt, bytes):
            raise TypeError
        row = [operator.index(token) for token in prompt]
    except TypeError:
        raise InputError(f"{name} should be a text or a list of token ids") from None
    if not row:
        raise InputError(f"{name} is empty; it should have at least one token")
    if min(row) < 0 or max(row) >= model.config.vocab_size:
        at = next(at for at, token in enumerate(row) if not 0 <= token < model.config.vocab_size)
        raise InputError(f"{name} has token id {row[at]} at index {at}, outside the vocabulary of {model.config.vocab_size}")
    check_length(model, name, len(row), config.max_new_tokens)
    return row


def checked_prompts(
    model: Llama, prompts: Iterable[Any], config: GenerationConfig, tokenizer: Any = None, names: Sequence[str] | None = None
) -> list[list[int]]:
    """Returns the token ids of prompts with the same settings. names: what error messages call each; None: "prompt 0" and so on.

    Raises InputError as `checked_prompt` and `check_settings` do.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Iterable) or not (prompts := list(prompts)):
        raise InputError("prompts should be a list with at least one prompt")
    check_settings(model, config, tokenizer)
    names = names or [f"prompt {i}" for i in range(len(prompts))]
    return [checked_prompt(model, prompt, config, tokenizer, name=name) for name, prompt in zip(names, prompts, strict=True)]


def with_tokenizer(config: GenerationConfig, model: Llama, tokenizer: Any) -> GenerationConfig:
    """Returns the config as a tokenizer completes it: stop strings that are special tokens are ids, and rows end at its EOS.

    Args:
        config: settings that were checked with this tokenizer, see `check_settings`.
        model: the target.
        tokenizer: the target's tokenizer, or None.
    """
    config = with_special_stops(config, tokenizer)
    eos, ends = getattr(tokenizer, "eos_token_id", None), model.config.eos_token_ids
    if config.eos_token_ids is not None or config.ignore_eos or eos is None or eos in ends or not 0 <= eos < model.config.vocab_size:
        return config
    others = ", ".join(map(str, ends)) or "none"
    warn_once(
        log,
        f"the tokenizer's EOS {tokenizer.eos_token!r}, {eos}, is not among those of config.json and generation_config.json ({others}), and "
        "rows end at all of them; eos_token_id in generation_config.json, or eos_token_ids in Python, says which it should be, and "
        "--ignore-eos none",
    )
    return dataclasses.replace(config, eos_token_ids=(*ends, eos))


def with_special_stops(config: GenerationConfig, tokenizer: Any) -> GenerationConfig:
    """Returns the config with its stop strings that are special tokens among its stop_token_ids, for they are in no text.

    Args:
        config: settings with stop strings.
        tokenizer: knows the special tokens; None knows none.

    Raises InputError for a stop string that has a special token and other text in it.
    """
    special = special_tokens(tokenizer) if config.stop and tokenizer is not None else {}
    for string in config.stop:
        if string not in special and (inside := [token for token in special if token and token in string]):
            raise InputError(
                f"stop string {string!r} has the special token {max(inside, key=len)!r} in it, so it is in no text; stop (--stop) should "
                "have the token alone, or text without it"
            )
    ids = [(special[string],) for string in config.stop if string in special]
    if not ids:
        return config
    stop = tuple(string for string in config.stop if string not in special)
    return dataclasses.replace(config, stop=stop, stop_token_ids=tuple(dict.fromkeys([*config.stop_token_ids, *ids])))


def _check_ids(model: Llama, config: GenerationConfig, tokenizer: Any) -> None:
    size = model.config.vocab_size
    first_padded = padding_from(tokenizer, size)
    known = size if first_padded is None else first_padded
    sequences = (config.logit_bias, config.banned_token_ids, config.eos_token_ids or (), *config.stop_token_ids)
    for token in (token for sequence in sequences for token in sequence):
        if not 0 <= token < size:
            raise InputError(f"token id {token} to favour, ban or stop at is outside the vocabulary of {size}")
    forbidden = {*config.banned_token_ids, *(token for token, bias in config.logit_bias.items() if bias == -math.inf)}
    eos = eos_ids(model, config) if config.min_new_tokens and not config.ignore_eos else ()
    if len([token for token in forbidden.union(eos) if token < known]) >= known:
        raise InputError("no token is left that may be generated: fewer should be banned")
    favoured = (token for token, bias in config.logit_bias.items() if bias > 0)
    if padded := [token for sequence in (favoured, *config.stop_token_ids) for token in sequence if token >= known]:
        raise InputError(f"token id {padded[0]} to favour or stop at is padding of the vocabulary: the tokenizer has {known} ids")
    if config.top_logprobs > size:
        raise InputError(f"top_logprobs {config.top_logprobs} should be at most the vocabulary of {size}")


def check_length(model: Llama, name: str, tokens: int, new: int) -> None:
    """Raises InputError if a prompt and its new tokens do not fit the model's positions.

    Args:
        model: the target.
        name: what the message calls the prompt.
        tokens: of the prompt.
        new: the number of new tokens.
    """
    positions, short = model.config.max_length, model.config.short_length
    check_positions("model", positions, name, tokens, new)
    # The last new token is never fed back.
    if short is not None and tokens <= short < tokens + new - 1:
        raise InputError(
            f"{name} of {tokens} tokens and {new} new ones cross the {short} tokens after which the model uses its long RoPE factors, "
            f"which is not supported; ask for at most {short - tokens + 1} new tokens, or give a prompt of more than {short}"
        )


def check_draft_room(draft: Draft | None, name: str, tokens: int, new: int) -> None:
    """Raises DraftRoomError if a prompt and its new tokens exceed the positions of the draft's own model, if it has one."""
    if draft is not None and draft.max_length is not None:
        check_positions("draft", draft.max_length, name, tokens, new, error=DraftRoomError)


def check_positions(owner: str, positions: int, name: str, tokens: int, new: int, *, error: type[InputError] = InputError) -> None:
    """Raises the error if a prompt and its new tokens exceed a number of positions, those of the owner. name: what the message calls the
    prompt."""
    if tokens + new > positions:
        if positions > tokens:
            advice = f"ask for at most {positions - tokens} new tokens"
        elif positions > new:
            advice = f"shorten it to at most {positions - new} tokens"
        else:
            advice = f"shorten it, and ask for less than {positions} new tokens"
        raise error(f"{name} of {tokens} tokens and {new} new ones exceed the {owner}'s {positions} positions; {advice}")
