"""The command `qspec chat`."""

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from qspec_jax.cli.options import (
    DtypeOption,
    ModelDirectory,
    SeedOfSampling,
    StateFile,
    WeightsOption,
    load,
    megabytes,
    used_seed,
    with_settings,
)
from qspec_jax.cli.process import CtrlC, CtrlCAtPrompt
from qspec_jax.decoding.config import BITS, GenerationConfig
from qspec_jax.decoding.conversation import INTERRUPTED, Answer, Conversation
from qspec_jax.decoding.keys import key_of
from qspec_jax.errors import InputError, flat
from qspec_jax.files import STANDARD, name_of, read_text

log = logging.getLogger(__name__)

SIGN, SIGN_WITHIN = "> ", ". "
SEVERAL = '"""'  # around a message of several lines
HELP = f"""\
/save FILE    save the conversation, with all that was read
/load FILE    go on with a conversation that was saved
/undo         take back the last message and its answer
/reset        go back to the beginning, with the documents
/help         show this
/quit         leave, as does Ctrl-D
//TEXT        send a message that begins with /
{SEVERAL}           begin a message of several lines, and end it
Ctrl-C ends an answer, and what it says by then is kept; pressed again before that, it leaves.
"""


@functools.partial(with_settings, max_new_tokens=2048)
def chat(
    model: ModelDirectory,
    config: GenerationConfig,
    silent_on_sampling: bool,
    file: Annotated[
        list[Path] | None,
        typer.Option(metavar="DOC", help="A text file that the first message begins with, after its name and a colon (repeatable)."),
    ] = None,
    state: StateFile = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    seed: SeedOfSampling = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
):
    """Talk with a model: each line is a message, /help lists commands. Through a pipe there are no prompt signs, and an error ends it."""
    if config.exact == BITS:
        raise InputError(f"--exact {BITS} is for whole prompts, and a conversation goes on from what was read; leave --exact out")
    if config.logprobs is not None:
        raise InputError("--logprobs and --top-logprobs are for generate --json; leave them out")
    if state is not None and (file or system is not None):
        raise InputError(f"--state {state} has its own documents and system message; leave {'--file' if file else '--system'} out")
    if file and STANDARD in file:
        raise InputError("--file - cannot be read, since messages come from standard input; give the name of a file")
    if len(set(names := [name_of(path) for path in file or []])) < len(names):
        raise InputError(f"--file {next(name for name in names if names.count(name) > 1)} is given twice")
    documents = {name: read_text(path) for name, path in zip(names, file or [])}
    network, tokenizer = load(
        model, dtype, quiet=False, weights=weights, caches=[config.cache_config], silent_on_sampling=silent_on_sampling
    )
    settings = dict(config=config, key=key_of(used_seed(seed, [config])), system=system, documents=documents)
    talk = Conversation(network, tokenizer, **settings)
    if state is not None:
        talk.load(state)
        _say_where(talk)
    elif documents:
        began = time.perf_counter()
        count = talk.read_documents()
        log.info("read %s tokens of %s in %.1f s", f"{count:,}", ", ".join(documents), time.perf_counter() - began)
    _Chat(talk, terminal=sys.stdin is not None and sys.stdin.isatty()).run()


class _Chat:
    """A conversation whose messages are the lines of standard input."""

    def __init__(self, talk: Conversation, *, terminal: bool):
        self._talk, self._terminal = talk, terminal
        self._commands: dict[str, Callable[[str], None]] = {
            "/save": self._save,
            "/load": self._load,
            "/undo": self._undo,
            "/reset": self._reset,
            "/help": lambda _: _print(HELP),
        }

    def run(self) -> None:
        """Answers until the end of standard input, or /quit."""
        if self._terminal:
            with contextlib.suppress(ImportError):  # Windows has none
                import readline  # noqa: F401  (lines are then edited, and earlier ones come back)
            _print("/help lists commands, Ctrl-D leaves\n")
        with CtrlC() as ctrl_c:
            for line in self._messages(ctrl_c):
                name, _, rest = line.partition(" ")
                if name == "/quit":
                    return
                try:
                    self._take(line, name, rest.strip(), ctrl_c)
                except InputError as error:
                    if not self._terminal:
                        raise
                    _print(f"qspec: error: {flat(str(error))}\n")

    def _take(self, line: str, name: str, rest: str, ctrl_c: CtrlC) -> None:
        if line.startswith("/") and not line.startswith("//"):
            if name not in self._commands:
                raise InputError(f"{name} is no command: /help lists them, and //TEXT sends a message that begins with /")
            if bool(rest) != (name in ("/save", "/load")):
                raise InputError(f"{name} {'takes nothing after it' if rest else 'needs the name of a file after it'}")
            self._commands[name](rest)
        elif line.strip():
            self._answer(line.removeprefix("/") if line.startswith("//") else line, ctrl_c)

    def _answer(self, message: str, ctrl_c: CtrlC) -> None:
        ctrl_c.pressed = False
        pieces = self._talk.ask(message)
        try:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
                if ctrl_c.pressed:
                    pieces.close()
                    break
        finally:
            ctrl_c.pressed = False
        sys.stdout.write("\n")
        sys.stdout.flush()
        _print(f"[{figures(self._talk.answer)}]\n")

    def _undo(self, _: str) -> None:
        self._talk.undo()
        _say_where(self._talk)

    def _reset(self, _: str) -> None:
        self._talk.reset()
        _say_where(self._talk)

    def _save(self, path: str) -> None:
        path = os.path.expanduser(path)
        self._talk.save(path)
        _print(f"[saved to {path}: {len(self._talk.state):,} tokens in {megabytes(Path(path).stat().st_size)}]\n")

    def _load(self, path: str) -> None:
        self._talk.load(os.path.expanduser(path))
        _say_where(self._talk)

    def _messages(self, ctrl_c: CtrlC) -> Iterator[str]:
        while True:
            ctrl_c.at_prompt = True
            try:
                message = self._message()
            except CtrlCAtPrompt:
                if not self._terminal:
                    raise
                _print("\n")
                continue
            finally:
                ctrl_c.at_prompt = False
            if message is None:
                return
            yield message

    def _message(self) -> str | None:
        """The next line, or the lines between two marks of several; None at the end."""
        line = self._line(SIGN)
        if line is None or not line.lstrip().startswith(SEVERAL):
            return line
        lines = [line.lstrip().removeprefix(SEVERAL)]
        while not lines[-1].rstrip().endswith(SEVERAL):
            if (line := self._line(SIGN_WITHIN)) is None:
                raise InputError(f"the message that {SEVERAL} began has no end; put {SEVERAL} after its last line")
            lines.append(line)
        lines[-1] = lines[-1].rstrip().removesuffix(SEVERAL)
        message = "\n".join(lines).strip("\n")
        return f"/{message}" if message.startswith("/") else message  # no command

    def _line(self, sign: str) -> str | None:
        """The next line; None at the end."""
        if not self._terminal:
            try:
                line = b"" if sys.stdin is None else sys.stdin.buffer.readline()
                return line.decode().rstrip("\r\n") if line else None
            except UnicodeDecodeError:
                raise InputError("standard input: a line is not text in UTF-8") from None
        try:
            if sys.stdout.isatty():
                return input(sign)
            _print(sign)
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        except EOFError:
            _print("\n")
            return None


def figures(answer: Answer) -> str:
    """The figures of an answer as people read them."""
    parts = [f"{answer.new_tokens:,} tokens"]
    if answer.tokens_per_second:
        parts.append(f"{answer.tokens_per_second:.1f} tokens/s")
    if answer.drafted:
        parts.append(f"{answer.accepted / answer.drafted:.0%} of {answer.drafted:,} drafts accepted")
    parts.append(f"read {answer.read_tokens:,} in {answer.read_s:.1f} s")
    parts.append(f"{answer.tokens:,} in all")
    ended = {INTERRUPTED: "ended by Ctrl-C", "length": "ended at --max-new-tokens"}
    return ", ".join(parts + [ended[answer.finish_reason]] * (answer.finish_reason in ended))


def _say_where(talk: Conversation) -> None:
    count = sum(message["role"] == "user" for message in talk.messages)
    tokens = "" if talk.state is None else f"{len(talk.state):,} tokens, "
    _print(f"[{tokens}{count} {'message' if count == 1 else 'messages'} and answers, by draft {talk.config.draft_name}]\n")


def _print(text: str) -> None:
    """Messages are on standard error, so that standard output has the answers alone."""
    sys.stderr.write(text)
    sys.stderr.flush()
