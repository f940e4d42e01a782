"""The one exception for a user's mistake, how messages show any other error, warnings that are given once, and which errors are of a
device's full memory."""

import contextlib
import functools
import logging
from collections.abc import Iterator

MOST_CHARACTERS = 200
LONGEST_REASON = 300


class InputError(ValueError):
    """Bad input: one clear sentence that names the file or value and what would be right. The CLI exits with code 2."""


class HostMemoryError(InputError):
    """What was asked for does not fit host memory; something shorter may."""


@functools.cache
def warn_once(log: logging.Logger, message: str, level: int = logging.WARNING) -> None:
    """Logs a message the first time that a process gives it: a checkpoint is opened several times.

    Args:
        log: the logger of the module that warns.
        message: the whole sentence.
        level: of the message.
    """
    log.log(level, "%s", message)


def flat(text: str) -> str:
    """The text with its line breaks and runs of blanks as single blanks."""
    return " ".join(text.split())


def one_line(error: BaseException) -> str:
    """The message of an error in one line of at most 300 characters; an OSError's without its number and path, which our messages name."""
    return flat(getattr(error, "strerror", None) or str(error))[:LONGEST_REASON]


def with_type(error: BaseException) -> str:
    """`one_line` behind the name of the error's class, for errors of other packages, whose messages often say little without it."""
    return f"{type(error).__name__}: {one_line(error)}"


def named(error: BaseException) -> str:
    """The class of an error and the first line of its message, at most 200 characters in all: what a row of a table has room for."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {flat(lines[0])}"[:MOST_CHARACTERS]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory was too small, as JAX says it, or the host's. A kernel that asks for more shared memory than there is does
    not count: no shorter prompt helps it."""
    text = str(error)
    return isinstance(error, HostMemoryError) or (
        any(sign in text for sign in ("RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY")) and "shared memory" not in text.lower()
    )


@contextlib.contextmanager
def reading(what: object, *others: type[Exception]) -> Iterator[None]:
    """Makes an OSError of the block, or one of `others`, an InputError that says that `what` cannot be read, and why."""
    with _refused(what, "read", others):
        yield


@contextlib.contextmanager
def writing(what: object, *others: type[Exception]) -> Iterator[None]:
    """Makes an OSError of the block, or one of `others`, an InputError that says that `what` cannot be written, and why."""
    with _refused(what, "written", others):
        yield


@contextlib.contextmanager
def _refused(what: object, verb: str, others: tuple[type[Exception], ...]) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (OSError, *others) as error:
        raise InputError(f"{what}: cannot be {verb} ({one_line(error)})") from None
