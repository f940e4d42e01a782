"""Lines of a JSON Lines file: what a line may ask for, and the line of its result."""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from qspec_jax.decoding import config_values as values
from qspec_jax.decoding.chat import chat_tokens, hint_at_chat
from qspec_jax.decoding.config import BITS, READERS, GenerationConfig
from qspec_jax.decoding.keys import key_of
from qspec_jax.decoding.openai_lines import KEYS as OPENAI_KEYS
from qspec_jax.decoding.openai_lines import Call, as_own, in_openai_names, is_openai
from qspec_jax.decoding.prefixes import Prefixes
from qspec_jax.decoding.requests import Request, check_draft_room, check_length, check_settings, checked_prompt
from qspec_jax.decoding.results import Result
from qspec_jax.decoding.sampling import sample_keys
from qspec_jax.decoding.text import encoded
from qspec_jax.drafts.draft import Draft
from qspec_jax.errors import BitsRefused, InputError
from qspec_jax.models.llama import Llama

log = logging.getLogger(__name__)

PROMPTS = ("prompt", "token_ids", "messages")
MAX_SAMPLES = 1024  # of a line


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; 16.0 is one, as data frames write a column of whole numbers in which some are missing."""
    return type(value) is int or (type(value) is float and value.is_integer())


def _whole(name: str, value: Any) -> int:
    return values.whole(name, int(value) if is_whole(value) else value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(is_whole, value)):
        raise InputError(f"{name} should be a list of whole numbers, which are token ids")
    return tuple(map(int, value))


def _sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list) or not all(isinstance(sequence, list) for sequence in value):
        raise InputError(f"{name} should be a list of lists of token ids")
    return tuple(_ids(name, sequence) for sequence in value)


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or not all(token.isdecimal() and len(token) < 11 for token in value):
        raise InputError(f"{name} should be an object with a number for each token id")
    # Tables whose rows have different tokens give each row all of them, most with null.
    return {int(token): values.number(name, bias) for token, bias in value.items() if bias is not None}


def _top_k(name: str, value: Any) -> int:
    return 0 if value == -1 else _whole(name, value)  # -1 is off elsewhere


# The settings of `GenerationConfig` that a line may give. JSON has its own forms of ids and whole numbers; the config reads the others.
SETTINGS: dict[str, values.Reader] = {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "top_logprobs"), _whole),
    **{name: READERS[name] for name in ("temperature", "top_p", "min_p", "repetition_penalty", "stop", "output_logprobs")},
    "top_k": _top_k,
    "logit_bias": _biases,
    "banned_token_ids": _ids,
    "stop_token_ids": _sequences,
}
SAMPLES, PREFIX = "n", "prefix"
KEYS = (*PROMPTS, PREFIX, *SETTINGS, SAMPLES, "seed", "id")
# The keys of the output, which columns that are passed through cannot have.
OUTPUT_KEYS = (
    *("line", "id", "text", "token_ids", "finish_reason", "stats", "logprobs", "top_logprobs", "error"),
    *("samples", "custom_id", "response", "result"),
)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the input.

    Attributes:
        number: from 1; None where there is none.
        id: its `id`.
        request: what it asks for, once for all its samples (`requests`); None where it is wrong.
        error: what is wrong with it; None where nothing is.
        passed: columns that its output has too, as they are.
        call: what its output needs where it is a line of OpenAI's batch files; None for a line of our own.
        seeded: whether it has a seed of its own.
    """

    number: int | None
    id: Any = None
    request: Request | None = None
    error: str | None = None
    passed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    call: Call | None = None
    seeded: bool = False

    @property
    def samples(self) -> int:
        """The number of samples, each of which is a row of the batch."""
        return self.request.config.num_return_sequences

    def requests(self, *, shared: bool) -> list[Request]:
        """A request for each sample, with a key of its own. shared: whether several samples read the prompt once."""
        request = dataclasses.replace(self.request, config=dataclasses.replace(self.request.config, num_return_sequences=1))
        if shared and self.samples > 1 and not request.prefix:
            request = dataclasses.replace(request, prefix=len(request.tokens))
        return [dataclasses.replace(request, key=key) for key in sample_keys(request.key, self.samples)]


@dataclasses.dataclass(frozen=True)
class Columns:
    """What becomes of keys that no line of ours has; they are refused where nothing is said.

    Attributes:
        ignore: whether they are left out.
        passed: keys that the output has too, unchanged; those of our own may be among them.
    """

    ignore: bool = False
    passed: tuple[str, ...] = ()

    def __post_init__(self):
        if repeated := [name for name in self.passed if name in OUTPUT_KEYS]:
            raise InputError(f"column {repeated[0]!r} cannot be passed through: the output has a key of that name itself")


def read_lines(
    content: bytes,
    model: Llama,
    tokenizer: Any,
    config: GenerationConfig,
    seed: int,
    columns: Columns = Columns(),
    prefixes: Prefixes | None = None,
) -> list[Line]:
    """Every line of a file's content but blank ones at its end. The other parameters are those of `LineReader`."""
    reader = LineReader(model, tokenizer, config, seed, columns, prefixes)
    lines = [reader.read(number, raw) for number, raw in enumerate(content.rstrip().splitlines(), start=1)]
    if absent := [name for name in reader.columns.passed if lines and name not in reader.seen]:
        log.warning("no line has the key %r, which should be passed through", absent[0])
    if reader.ignored:
        log.warning("keys that are ignored: %s", ", ".join(sorted(reader.ignored)))
    return lines


class LineReader:
    """Reads lines.

    A line is a JSON object with one of `prompt` (text), `token_ids` or `messages` (to the tokenizer's chat template), and perhaps settings
    of its own (`SETTINGS`, as in `GenerationConfig`), a number of samples `n`, a `seed`, an `id`, and a `prefix` that its prompt follows
    (see `prefixes`); or one of OpenAI's batch files (see `openai_lines`). A key with null is as one that is absent. A line's draws are of
    its own seed, or of the run's and its number.

    Args:
        model: what the prompts are for.
        tokenizer: of texts and messages.
        config: the settings that a line does not give. If its draft is made already, lines have to fit the draft's model too.
        seed: the run's.
        columns: what becomes of keys that are unknown.
        prefixes: reads prefixes; None: no line may name a file as its prefix.

    Attributes:
        seen: the keys to be passed through that a line had.
        ignored: the keys that were left out.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Any,
        config: GenerationConfig,
        seed: int,
        columns: Columns = Columns(),
        prefixes: Prefixes | None = None,
    ):
        self.model, self.tokenizer, self.config, self.columns = model, tokenizer, config, columns
        self.key, self.prefixes = key_of(seed), prefixes or Prefixes(tokenizer, None)
        self.seen: set[str] = set()
        self.ignored: set[str] = set()
        self._hinted = False

    def read(self, number: int | None, raw: bytes) -> Line:
        """One line. number: from 1; None where there is none, which a sampled line needs unless it has a seed."""
        line, names = Line(number), {}
        try:
            said = _parsed(raw)
            passed = {name: said[name] for name in self.columns.passed if name in said}
            self.seen |= passed.keys()
            line = dataclasses.replace(line, id=said.get("id"), passed=passed)
            if is_openai(said, PROMPTS):
                line = dataclasses.replace(line, id=None, call=Call.of(said))
                self._check_keys(said, OPENAI_KEYS)
                own, names = as_own(said, self.config)
            else:
                self._check_keys(said, KEYS)
                own = {name: value for name, value in said.items() if name in KEYS and value is not None}
            return dataclasses.replace(line, request=self._request(number, own), seeded="seed" in own)
        except InputError as error:
            return dataclasses.replace(line, error=in_openai_names(str(error), names))

    def _check_keys(self, said: Mapping[str, Any], known: Sequence[str]) -> None:
        unknown = sorted(name for name, value in said.items() if value is not None and name not in {*known, *self.columns.passed})
        if unknown and not self.columns.ignore:
            raise InputError(
                f"unknown key {unknown[0]!r}; there are {', '.join(known)}; --ignore-columns leaves other keys out, and --pass-columns "
                "NAME,... copies them to the output"
            )
        self.ignored |= set(unknown)

    def _request(self, number: int | None, said: Mapping[str, Any]) -> Request:
        settings = dataclasses.replace(self.config, **{name: read(name, said[name]) for name, read in SETTINGS.items() if name in said})
        if SAMPLES in said:
            if not 1 <= (samples := _whole(SAMPLES, said[SAMPLES])) <= MAX_SAMPLES:
                raise InputError(f"{SAMPLES} {samples} should be from 1 to {MAX_SAMPLES:,}")
            settings = dataclasses.replace(settings, num_return_sequences=samples)
        if number is None and settings.temperature and "seed" not in said:
            raise InputError("a sampled row should have a seed, or its number as line")
        own = _own_key(said["seed"]) if "seed" in said else jax.random.fold_in(self.key, (number or 1) - 1)
        check_settings(self.model, settings, self.tokenizer)
        tokens, prefix = self._tokens(number, said)
        if prefix and settings.exact == BITS:
            raise BitsRefused(f"is for whole prompts, not for a prompt with a {PREFIX}")
        tokens = checked_prompt(self.model, tokens, settings)
        if prefix:
            check_length(self.model, "the prefix", prefix, len(tokens) - prefix + settings.max_new_tokens)
        if isinstance(settings.draft, Draft):
            check_draft_room(settings.draft, "the prompt", len(tokens), settings.max_new_tokens)
        return Request(tokens, settings, own, prefix)

    def _tokens(self, number: int | None, said: Mapping[str, Any]) -> tuple[Sequence[int], int]:
        """The token ids of a line, and how many of them are its prefix."""
        given = [name for name in PROMPTS if name in said]
        if len(given) != 1:
            raise InputError(f"should have one of {', '.join(PROMPTS)}, and has {' and '.join(given) or 'none'}")
        prompt = said[given[0]]
        if given == ["token_ids"]:
            prompt = _ids("token_ids", prompt)
        elif given == ["prompt"] and not isinstance(prompt, str):
            raise InputError("prompt should be a text")
        if PREFIX in said:
            prefix = said[PREFIX]
            if isinstance(prefix, list) and all(map(is_whole, prefix)):
                prefix = list(map(int, prefix))
            return self.prefixes.tokens(prefix, prompt, chat=given == ["messages"])
        if given == ["token_ids"]:
            return prompt, 0
        if given == ["messages"]:
            return chat_tokens(self.tokenizer, prompt), 0
        if not self._hinted and (hint := hint_at_chat(self.tokenizer, prompt, "give messages instead of prompt to use it")):
            self._hinted = True
            log.warning("%s: %s", "a row" if number is None else f"line {number}", hint)
        return encoded(self.tokenizer, prompt), 0


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        said = json.loads(raw.decode("utf-8-sig"), parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_once_each)
    except UnicodeDecodeError as error:
        raise InputError(f"not in UTF-8 (its byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise InputError("empty" if not raw.strip() else f"not JSON ({error.msg}, character {error.pos + 1})") from None
    except RecursionError:
        raise InputError("not JSON that can be read (brackets within brackets, too many)") from None
    except ValueError as error:  # of the functions given, and of a whole number with thousands of digits
        said = "a number has too many digits" if "int_max_str_digits" in str(error) else error
        raise InputError(f"not JSON that can be read ({said})") from None
    if not isinstance(said, dict):
        raise InputError("should be a JSON object")
    return said


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is given twice")
        found[key] = value
    return found


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits[:20]} is too large a number")
    return number


def first_with_prefix(content: bytes) -> int | None:
    """The number of the first line that names a prefix; None if there is none. Lines that are wrong are left out."""
    for number, raw in enumerate(content.splitlines(), start=1):
        if PREFIX.encode() in raw:
            try:
                if _parsed(raw).get(PREFIX) is not None:
                    return number
            except InputError:
                continue
    return None


def _own_key(seed: Any) -> jax.Array:
    if not is_whole(seed) or not 0 <= seed < 2**32:
        raise InputError(f"seed should be a whole number from 0 to {2**32 - 1}, not {seed!r:.40}")
    return jax.random.fold_in(key_of(int(seed)), 0)


def as_wrong(line: Line) -> dict:
    """What the output says of a line that is wrong."""
    if line.call:
        return line.call.wrong(line.number, line.error) | line.passed
    return {"line": line.number} | ({} if line.id is None else {"id": line.id}) | line.passed | {"error": line.error}


def as_line(line: Line, results: Sequence[Result], tokenizer: Any) -> dict:
    """What the output says of results; without anything that depends on how fast the machine is, or on what else runs.

    Args:
        line: what was asked for.
        results: one for each of its samples.
        tokenizer: for what OpenAI's form says of tokens.
    """
    if line.call:
        return line.call.output(line.number, results, len(line.request.tokens), tokenizer) | line.passed
    own, samples = {} if line.id is None else {"id": line.id}, list(map(_of_result, results))
    return {"line": line.number} | own | line.passed | (samples[0] if len(samples) == 1 else {"samples": samples})


def _of_result(result: Result) -> dict:
    found = {name: getattr(result, name) for name in ("text", "token_ids", "finish_reason")} | {"stats": vars(result.stats)}
    if result.logprobs is not None:
        found |= {"logprobs": result.logprobs, "top_logprobs": result.top_logprobs}
    return found


def error_of(output: dict) -> str | None:
    """What a line of the output says is wrong."""
    error = output.get("error")
    return error["message"] if isinstance(error, dict) else error
