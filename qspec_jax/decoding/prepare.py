"""Prepares requests: all that happens between prompts and an engine, once and in one place.

Prompts and settings are checked, stop strings that are special tokens become ids, draft `auto` is resolved, the draft is made and gets the
settings that depend on the prompts, and costs of drafting are filled in. `generate`, `stream`, `run_batch`, benchmarks, evaluations and
commands decode what `prepare` returns.
"""

import dataclasses
import json
import logging
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxtyping import Array, Key

from qspec_jax.decoding import resolve
from qspec_jax.decoding.chat import with_chats
from qspec_jax.decoding.config import BITS, TOKENS, GenerationConfig
from qspec_jax.decoding.engine import Engine, max_drafts
from qspec_jax.decoding.exact_bits import check_alike, check_bits, check_requests, decodes_in_turn
from qspec_jax.decoding.keys import key_of
from qspec_jax.decoding.requests import (
    Request,
    check_draft_room,
    check_length,
    check_settings,
    checked_prompt,
    checked_prompts,
    with_tokenizer,
)
from qspec_jax.decoding.sampling import prompt_keys, sample_keys
from qspec_jax.drafts.draft import Draft, check_made_for
from qspec_jax.drafts.registry import AUTO, make_draft, may_become
from qspec_jax.errors import InputError, warn_once
from qspec_jax.models.llama import Llama, check_model
from qspec_jax.states.state import Reader, State

log = logging.getLogger(__name__)

ROWS_OF_AUTO = 32  # for which draft auto is resolved where the batch size depends on the memory that the draft leaves
OF_STATES = ("draft", "cache", "group_size", "scheme", "num_speculative_tokens")  # settings that a state is made for
# Settings that all requests of a batch have in common.
SHARED = ("draft", "cache", "eos_token_ids", "ignore_eos", "group_size", "scheme", "exact")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Requests that are ready to be decoded by a model, and the draft that they share. `prepare` makes one.

    Attributes:
        model: the target.
        config: the settings that were given, with what draft "auto" became.
        requests: each with token ids, its complete settings and its key.
        draft: None where none of them drafts.
        tokenizer: of the texts; None if there is none.
        choices: what the draft's open settings (`skip=auto`) became, as texts.
        samples: rows of each prompt, which follow one another.
        keyed: whether the keys of the draws were given; without one, prompts have the keys of seed 0, and nothing may be drawn.
        states: of each request, where states are continued; else None.
    """

    model: Llama
    config: GenerationConfig
    requests: tuple[Request, ...]
    draft: Draft | None
    tokenizer: Any = None
    choices: tuple[str, ...] = ()
    samples: int = 1
    keyed: bool = True
    states: tuple[State, ...] | None = None

    @property
    def prompts(self) -> list[Sequence[int]]:
        """The token ids of each request's prompt."""
        return [request.tokens for request in self.requests]

    @property
    def configs(self) -> list[GenerationConfig]:
        """The settings of each request."""
        return [request.config for request in self.requests]

    @property
    def exact(self) -> str:
        """See `GenerationConfig`."""
        return self.requests[0].config.exact

    @property
    def longest_prompt(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(len(request.tokens) for request in self.requests)

    def select(self, indices: Iterable[int]) -> "Prepared":
        """Some of the requests, as they were prepared together with the others. Raises InputError if there are none."""
        indices = list(indices)
        requests = tuple(self.requests[i] for i in indices)
        if not requests:
            raise InputError("at least one request should be selected")
        states = self.states and tuple(self.states[i] for i in indices)
        # A selection may have some samples of a prompt and not others, so each is a prompt of its own.
        return dataclasses.replace(self, requests=requests, states=states, samples=1)

    def engine(self, **settings: Any) -> Engine:
        """An engine with room for all requests. settings: see `Engine`."""
        return Engine.for_configs(self.model, self.draft, self.configs, prompt_tokens=self.longest_prompt, **settings)

    def identity(self) -> str:
        """A text that differs wherever `config`, and what was resolved by the prompts or the device, would change results.

        A journal hashes it, beside the prompts and the settings that single requests give.

        Raises InputError if a draft object was given, whose settings are not known.
        """
        draft = self.config.draft if self.config.draft == AUTO else repr(self.config.draft_settings)
        settings = vars(self.config) | {"draft": draft, "logit_bias": sorted(self.config.logit_bias.items())}
        settings["exact"] = TOKENS if self.config.exact == AUTO else self.config.exact  # in a batch they are the same
        costs = [config.draft_cost for config in self.configs] if self.config.adaptive else None
        return json.dumps([settings, costs, self.choices], sort_keys=True)


def prepare(
    model: Llama,
    requests: Iterable[Any],
    *,
    config: GenerationConfig | None = None,
    key: Key[Array, ""] | None = None,
    tokenizer: Any = None,
    batch_size: int | None = None,
    calibrate: bool = False,
    progress: bool | None = None,
) -> Prepared:
    """Checks requests, completes their settings and makes their draft.

    Args:
        model: the target.
        requests: `Request`s, or prompts or states as `generate` takes them; a single text, list of token ids or state is one prompt.
        config: the settings of all prompts; of requests, which have their own, those that `Prepared.config` reports. None: the defaults, or
            the first request's.
        key: for the draws of prompts, see `generate`; requests have their own.
        tokenizer: for texts, conversations and stop strings.
        batch_size: rows that are decoded at a time, by which draft "auto" is resolved; None: all.
        calibrate: whether INT4 weights of the draft are rounded for these prompts, see `drafts.make_draft`.
        progress: a bar on standard error while weights are quantized; None shows it on a terminal.

    Raises:
        InputError: for requests that cannot be decoded, that differ in a setting of `SHARED`, and for a draft that was made for another
            model.
    """
    check_model(model)
    if isinstance(requests, Mapping):
        given = ", ".join(map(repr, requests))
        raise InputError(f"prompts should be a list, not a mapping with {given}; of what a tokenizer returns, give 'input_ids'")
    if isinstance(requests, str | bytes | State) or _are_token_ids(requests):
        requests = [requests]
    found = list(requests) if isinstance(requests, Iterable) else requests
    keyed, states, samples = key is not None, None, 1
    if isinstance(found, list) and found and all(isinstance(request, Request) for request in found):
        keyed = True
        if key is not None:
            raise InputError("key is for prompts; each request has a key of its own")
        found = _checked_requests(model, found, tokenizer)
    else:
        config = config or GenerationConfig()
        if isinstance(found, list) and any(isinstance(each, State) for each in found):
            states = _checked_states(model, found)
            config = _config_for(states[0].reader, config)
            rows = _tokens_of_states(model, states, config, tokenizer)
        else:
            rows = checked_prompts(model, with_chats(found, tokenizer), config, tokenizer)
        found = _requests_of(rows, config, key)
        if (samples := config.num_return_sequences) > 1:
            found = [dataclasses.replace(request, key=own) for request in found for own in sample_keys(request.key, samples)]
            states = states and tuple(state for state in states for _ in range(samples))
    settings = dict(batch_size=batch_size, calibrate=calibrate, progress=progress, keyed=keyed, reader=states[0].reader if states else None)
    prepared = completed(model, found, config=config, tokenizer=tokenizer, **settings)
    return dataclasses.replace(prepared, samples=samples, states=states)


def completed(
    model: Llama,
    found: Sequence[Request],
    *,
    config: GenerationConfig | None = None,
    tokenizer: Any = None,
    batch_size: int | None = None,
    calibrate: bool = False,
    progress: bool | None = None,
    keyed: bool = True,
    reader: Reader | None = None,
) -> Prepared:
    """Completes the settings of requests and makes their draft, as `prepare` does once it has checked them.

    Args:
        model, config, tokenizer, batch_size, calibrate, progress: see `prepare`.
        found: requests that were checked one by one, such as lines (`jsonl.LineReader`).
        keyed: see `Prepared`.
        reader: what has read the states that are continued, whose draft goes on; None: there are none.

    Raises:
        InputError: for requests that differ in a setting of `SHARED`, and as `prepare` does for the draft.
    """
    _check_shared(found)
    prompts, config = [request.tokens for request in found], config or found[0].config
    lengths = list(map(len, prompts))
    configs = [with_tokenizer(request.config, model, tokenizer) for request in found]
    rows = 1 if decodes_in_turn(configs) else min(batch_size or len(found), len(found))
    configs = resolve.resolve_draft(model, configs, lengths, prompts=prompts, batch=rows)
    if config.draft == AUTO or config.leaves_gammas_open:
        config = dataclasses.replace(config, **{name: getattr(configs[0], name) for name in ("draft", "num_speculative_tokens", "cache")})
    draft = _made(model, configs, prompts if calibrate else None, progress) if reader is None else reader.draft
    for i, (length, each) in enumerate(zip(lengths, configs, strict=True)):
        check_draft_room(draft, f"prompt {i}", length, each.max_new_tokens)
    given = draft.chosen() if draft else ()
    if reader is None:
        draft = resolve.resolve_prompt_settings(model, draft, configs, prompts)
    if configs[0].exact == BITS:
        check_requests(found, from_states=reader is not None)
        for each in configs:
            check_bits(model, each, draft, max_drafts(model, each))
        check_alike(configs, [max_drafts(model, each) for each in configs])
    choices = draft.chosen() if draft and draft.chosen() != given else ()
    configs = resolve.fill_draft_costs(model, configs, lengths, draft)
    settled = (dataclasses.replace(request, config=each) for request, each in zip(found, configs, strict=True))
    return Prepared(model, config, tuple(settled), draft, tokenizer, choices, keyed=keyed)


def config_of(reader: Reader) -> GenerationConfig:
    """Settings with the draft and the cache for which a reader makes states."""
    return GenerationConfig(**reader.settings)


def _checked_states(model: Llama, found: Sequence[Any]) -> tuple[State, ...]:
    """The states of a batch, all of which the same reader has made for rows of the same size."""
    if not all(isinstance(each, State) for each in found):
        raise InputError("a batch is of prompts or of states, not of both; `prefill` makes states of prompts")
    first = found[0]
    if first.reader.model is not model:
        raise InputError("the state was made by another model")
    if any(not state.reader.reads_as(first.reader) or state.room != first.room for state in found):
        raise InputError("the states of a batch should have the same draft object, cache and room (`prefill(..., room=)`)")
    if unread := [state for state in found if state.logits is None and not state.pending]:
        raise InputError(f"a state that was trimmed to {len(unread[0])} tokens should be extended by at least one before it generates")
    return tuple(found)


def _config_for(reader: Reader, config: GenerationConfig) -> GenerationConfig:
    """The config with the settings that states of this reader were made for. Raises InputError where it has others."""
    own, default = reader.settings, GenerationConfig()
    for name in OF_STATES:
        given = getattr(config, name)
        if (
            given is own[name]
            or (not isinstance(given, Draft) and given in (getattr(default, name), own[name]))
            or may_become(given, own[name])
        ):
            continue
        raise InputError(f"{name} {given!r:.60} should be {own[name]!r:.60}, for which the state was made, or left out")
    return dataclasses.replace(config, **own)


def _are_token_ids(requests: Any) -> bool:
    """Whether this is a single prompt, as a sequence or a one-dimensional array of token ids."""
    if isinstance(requests, Sequence):
        return len(requests) > 0 and isinstance(requests[0], numbers.Integral)
    if getattr(requests, "ndim", None) != 1:
        return False
    try:
        return operator.index(next(iter(requests), "")) >= 0
    except TypeError:  # an array of texts, or of prompts of several lengths
        return False


def _tokens_of_states(model: Llama, states: Sequence[State], config: GenerationConfig, tokenizer: Any) -> list[Sequence[int]]:
    """The tokens of states, which were checked when they were read, and now with the new ones for the model's positions."""
    check_settings(model, config, tokenizer)
    for i, state in enumerate(states):
        check_length(model, f"prompt {i}", len(state), config.max_new_tokens)
    return [state.tokens for state in states]


def _requests_of(rows: Sequence[Sequence[int]], config: GenerationConfig, key: Key[Array, ""] | None) -> list[Request]:
    """Token ids as requests with the same settings."""
    if key is None and config.temperature:
        draws = f"temperature {config.temperature:g} draws tokens at random"
        raise InputError(f"{draws}, so key should be given, such as jax.random.key(0)")
    filters = [name for name in ("top_k", "top_p", "min_p") if getattr(config, name) != getattr(GenerationConfig, name)]
    if filters and not config.temperature:
        warn_once(
            log, f"{', '.join(filters)} {'has' if len(filters) == 1 else 'have'} no effect at temperature 0, which is greedy decoding"
        )
    keys = prompt_keys(key_of(0) if key is None else key, len(rows))
    return [Request(row, config, keys[i]) for i, row in enumerate(rows)]


def _check_shared(requests: Sequence[Request]) -> None:
    def value(request: Request, name: str) -> Any:
        found = getattr(request.config, name)
        return TOKENS if name == "exact" and found == AUTO else found  # which it is where there are several

    for name in SHARED:
        first, *others = (value(request, name) for request in requests)
        # Drafts that are made hold arrays, which do not compare.
        if any(other is not first and (isinstance(first, Draft) or other != first) for other in others):
            raise InputError(f"all requests should have the same {name}")


def _checked_requests(model: Llama, requests: Sequence[Request], tokenizer: Any) -> list[Request]:
    """Requests with token ids, once they and what they share are checked."""
    _check_shared(requests)  # first: settings that differ are named before what is wrong with one of them
    checked = []
    for i, request in enumerate(requests):
        check_settings(model, request.config, tokenizer)
        if request.config.num_return_sequences > 1:
            raise InputError("num_return_sequences is for `generate`; in a batch, give a request for each sample")
        tokens = checked_prompt(model, request.tokens, request.config, tokenizer, name=f"prompt {i}")
        if not 0 <= request.prefix <= len(tokens):
            raise InputError(f"prompt {i} has {len(tokens)} tokens, and prefix {request.prefix} should be from 0 to that")
        if request.prefix:
            check_length(model, f"the prefix of prompt {i}", request.prefix, len(tokens) - request.prefix + request.config.max_new_tokens)
        checked.append(dataclasses.replace(request, tokens=tokens))
    return checked


def _made(
    model: Llama, configs: Sequence[GenerationConfig], calibration: Sequence[Sequence[int]] | None, progress: bool | None
) -> Draft | None:
    """The draft that the configs share, made where it is not given; None where no config drafts."""
    draft = configs[0].draft
    if isinstance(draft, Draft):
        check_made_for(draft, model)
    if not any(config.num_speculative_tokens for config in configs):
        return None
    return draft if isinstance(draft, Draft) else make_draft(draft, model, calibration=calibration, progress=progress)
