"""Prompts in a JSON Lines file, results in another: what a line may say, and a journal by which a run that was killed goes on."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax

from qspec_jax.decoding.batch import Result
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.requests import Request, check_draft_room, checked_prompts
from qspec_jax.decoding.text import encoded
from qspec_jax.drafts.draft import Draft
from qspec_jax.errors import InputError, one_line, with_type, writing
from qspec_jax.files import PARTIAL, check_writable, is_replaced, output_to, real, to_json
from qspec_jax.models.llama import Llama

PROMPTS = ("prompt", "token_ids", "messages")


def _whole(name: str, value: Any) -> int:
    if type(value) is not int:
        raise InputError(f"{name} should be a whole number, not {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{name} should be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{name} is too large a number") from None


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} should be true or false, not {value!r}")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(string, str) for string in value):
        raise InputError(f"{name} should be a string or a list of them")
    return tuple(value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise InputError(f"{name} should be a list of token ids")
    return tuple(value)


def _sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list) or not all(isinstance(sequence, list) for sequence in value):
        raise InputError(f"{name} should be a list of lists of token ids")
    return tuple(_ids(name, sequence) for sequence in value)


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or not all(token.isdecimal() and len(token) < 11 for token in value):
        raise InputError(f"{name} should be an object with a number for each token id")
    return {int(token): _number(name, bias) for token, bias in value.items()}


# What a line may say of `GenerationConfig`, and how it is read.
SETTINGS = {
    "max_new_tokens": _whole,
    "temperature": _number,
    "top_k": _whole,
    "top_p": _number,
    "min_p": _number,
    "repetition_penalty": _number,
    "min_new_tokens": _whole,
    "logit_bias": _biases,
    "banned_token_ids": _ids,
    "stop": _strings,
    "stop_token_ids": _sequences,
    "output_logprobs": _flag,
    "top_logprobs": _whole,
}
KEYS = (*PROMPTS, *SETTINGS, "seed", "id")


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the input: its number, from 1 (None where nobody counts), its `id`, and the request in it, or what is wrong with it."""

    number: int | None
    id: Any = None
    request: Request | None = None
    error: str | None = None


def read_lines(content: bytes, model: Llama, tokenizer, config: GenerationConfig, seed: int, draft: Draft | None = None) -> list[Line]:
    """Every line of a file's content but blank ones at its end; `config` is of what a line does not say, and `draft` is what the lines are
    to be decoded with, whose own model may take fewer tokens.

    A line is a JSON object with one of `prompt` (text), `token_ids` or `messages` (to the tokenizer's chat template), and perhaps settings
    of its own (`SETTINGS`, as in `GenerationConfig`), a `seed` and an `id`. A line's draws are of its own seed, or of `seed` and its
    number.
    """
    key = jax.random.key(seed)
    return [
        read_line(number, raw, model, tokenizer, config, key, draft) for number, raw in enumerate(content.rstrip().splitlines(), start=1)
    ]


def read_line(number: int, raw: bytes, model: Llama, tokenizer, config: GenerationConfig, key: jax.Array, draft: Draft | None) -> Line:
    """One line, by its number; see `read_lines`. key: of all lines' draws."""
    name = None
    try:
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
        name = said.get("id")
        if unknown := sorted(said.keys() - set(KEYS)):
            raise InputError(f"unknown key {unknown[0]!r}; there are {', '.join(KEYS)}")
        own = _own_key(said["seed"]) if "seed" in said else jax.random.fold_in(key, number - 1)
        settings = _config(said, config)
        request = Request(checked_prompts(model, [_tokens(said, tokenizer)], settings, tokenizer)[0], settings, own)
        check_draft_room(draft, "the prompt", len(request.tokens), settings.max_new_tokens)
        return Line(number, name, request)
    except InputError as error:
        return Line(number, name, error=str(error).replace("prompt 0", "the prompt"))


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} stands there twice")
        found[key] = value
    return found


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits[:20]} is too large a number")
    return number


def _tokens(said: Mapping[str, Any], tokenizer) -> list[int]:
    given = [name for name in PROMPTS if name in said]
    if len(given) != 1:
        raise InputError(f"should have one of {', '.join(PROMPTS)}, and has {' and '.join(given) or 'none'}")
    prompt = said[given[0]]
    if given == ["prompt"]:
        if not isinstance(prompt, str):
            raise InputError("prompt should be a text")
        return encoded(tokenizer, prompt)
    if given == ["token_ids"]:
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise InputError("token_ids should be a list of whole numbers")
        return prompt
    if not tokenizer.chat_template:
        raise InputError("messages need a tokenizer with a chat template; give prompt or token_ids")
    try:
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    except Exception as error:  # of the template, which is the checkpoint's
        raise InputError(f"messages do not fit the chat template ({with_type(error)})") from None


def _config(said: Mapping[str, Any], config: GenerationConfig) -> GenerationConfig:
    own = {name: read(name, said[name]) for name, read in SETTINGS.items() if name in said}
    return dataclasses.replace(config, **own)


def _own_key(seed: Any) -> jax.Array:
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise InputError(f"seed should be a whole number from 0 to {2**32 - 1}, not {seed!r}")
    return jax.random.fold_in(jax.random.key(seed), 0)


class Journal:
    """Results that are there already, in a file beside the output: a line each as they come, so that a run may be killed and go on.

    It is beside the file that a symbolic link leads to. A pipe or a device, which nothing can lie beside, has none: then `path` is None,
    and it is opened here, so that one that cannot be written is refused before the work.
    """

    def __init__(self, output: Path, run: dict[str, str], *, overwrite: bool):
        """run: `run_hashes` of all that results depend on. Raises InputError where the output exists, or is being made, or belongs to
        another run; unless overwrite says that it may go."""
        self.output, self.path, self.done, self._file = output, None, {}, None
        self._result = contextlib.ExitStack()  # what the output is opened in, where no new file takes its place
        if not is_replaced(output):
            self._write_result = self._result.enter_context(output_to(output))
            return
        with writing(output):
            place = real(output)
            if output.is_dir():
                raise InputError(f"{output}: is a folder; OUTPUT should be a file")
            self._check_not_there(overwrite)
            check_writable(place)  # only written at the end, so it fails here
        self.path = place.with_name(place.name + PARTIAL)
        with writing(self.path):
            self._file = self._locked()
            try:
                self._check_not_there(overwrite)  # another process may have made it since
                self.done = self._read(run, overwrite)
            except BaseException:
                if not os.fstat(self._file.fileno()).st_size:
                    self.path.unlink()  # it was made here
                self._file.close()
                raise

    def _check_not_there(self, overwrite: bool) -> None:
        if self.output.exists() and not overwrite:
            raise InputError(f"{self.output}: exists already; --overwrite replaces it")

    def _locked(self) -> BinaryIO:
        """The journal's file, opened and locked. Raises OSError, or InputError where another process has it or it is no regular file."""
        while True:
            if os.path.lexists(self.path) and not stat.S_ISREG(self.path.lstat().st_mode):
                raise self._foreign()
            # Something else may come there in between: it is neither followed nor waited for.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self.path, flags, 0o666)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise self._foreign()
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise InputError(f"{self.output}: is being written by another process") from None
                with contextlib.suppress(FileNotFoundError):  # a process that had it has finished, and removed it
                    if os.path.samestat(os.fstat(descriptor), self.path.lstat()):
                        return os.fdopen(os.dup(descriptor), "ab+")
            finally:
                os.close(descriptor)

    def _foreign(self) -> InputError:
        return InputError(f"{self.path}: not what a run has left, so --overwrite does not touch it; move it away")

    def _read(self, run: dict[str, str], overwrite: bool) -> dict[int, dict]:
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        whole = sum(len(line) + 1 for line in lines[:-1])  # a last line that was cut short is written again
        try:
            header, *results = [json.loads(line) for line in lines[:-1]] or [None]
            done = {result["line"]: result for result in results}
        except (ValueError, TypeError, KeyError, RecursionError):
            raise self._foreign() from None
        if header is not None and header != {"run": run}:
            if done and not overwrite:
                raise InputError(f"{self.path}: {_difference(header, run)}; --overwrite drops the {len(done):,} lines that are done there")
            whole, done, header = 0, {}, None
        self._file.truncate(whole)
        if header is None:
            self._write({"run": run})
        return done

    def add(self, result: dict) -> None:
        if self._file:
            self._write(result)
        self.done[result["line"]] = result

    def _write(self, value: dict) -> None:
        try:
            self._file.write(to_json(value).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({one_line(error)}){self.goes_on}") from None

    def finish(self) -> None:
        """The output, in the order of the input, in place of the journal."""
        if self.path:
            self._write_result = self._result.enter_context(output_to(self.output))
        with self._result:
            for number in sorted(self.done):
                self._write_result(to_json(self.done[number]) + "\n")
        if self._file:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self.close()

    def close(self) -> None:
        """Lets another process have the journal. One without any result goes: there is nothing to go on from."""
        with contextlib.suppress(OSError, InputError):  # of a write that failed, and said so
            self._result.close()
        if self._file and not self._file.closed:
            with contextlib.suppress(OSError):
                if not self.done:
                    self.path.unlink()
            with contextlib.suppress(OSError):
                self._file.close()

    @property
    def goes_on(self) -> str:
        """The end of a message about a run that was cut short."""
        return f"; the same command, with the same input, goes on from {self.path}" if self.path and self.done else ""


def as_wrong(line: Line) -> dict:
    """What is written of a line that is wrong."""
    return {"line": line.number} | ({} if line.id is None else {"id": line.id}) | {"error": line.error}


def as_line(line: Line, result: Result) -> dict:
    """A result as it is written; without anything that depends on how fast the machine is, or on what else runs."""
    own = {} if line.id is None else {"id": line.id}
    of_result = {name: getattr(result, name) for name in ("text", "token_ids", "finish_reason")} | {"stats": vars(result.stats)}
    if result.logprobs is not None:
        of_result |= {"logprobs": result.logprobs, "top_logprobs": result.top_logprobs}
    return {"line": line.number} | own | of_result


# What the results of a run depend on, and how a message calls what is not as it was.
DEPENDS_ON = {
    "prompts": "other prompts",
    "settings": "other settings",
    "checkpoint": "another checkpoint, or one whose files were copied or touched since",
    "version": "another version of this program",
}


def run_hashes(**parts: Sequence[bytes]) -> dict[str, str]:
    """A hash of each of the `DEPENDS_ON`."""
    found = {}
    for name in DEPENDS_ON:
        whole = hashlib.sha256()
        for part in parts[name]:
            whole.update(len(part).to_bytes(8, "little") + part)
        found[name] = whole.hexdigest()
    return found


def _difference(header: Any, run: dict[str, str]) -> str:
    """What a journal's run had otherwise."""
    before = header.get("run") if isinstance(header, dict) else None
    if not isinstance(before, dict) or before.keys() != run.keys():
        return "is of another run, by another version of this program"
    return f"is of a run with {' and '.join(text for name, text in DEPENDS_ON.items() if before[name] != run[name])}"
