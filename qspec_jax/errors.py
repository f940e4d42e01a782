"""The exception for a user's mistake, texts of messages, warnings that are logged once, and errors that mean that memory is full."""

import contextlib
import functools
import logging
import os
from collections.abc import Iterable, Iterator

MAX_NAMED = 200  # characters of an error in a table
MAX_REASON = 300  # characters of an error in a message
MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


class InputError(ValueError):
    """A user's mistake: one sentence that names the file or value and says what would be right. Commands exit with code 2."""


class HostMemoryError(InputError):
    """A request that does not fit host memory; a shorter one may."""


class DraftRoomError(InputError):
    """A prompt that exceeds the positions of the draft's own model; another draft may have room."""


class BitsRefused(InputError):
    """A request that cannot have exact bits.

    Attributes:
        reason: why, as a sentence goes on after "exact bits".
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"exact bits {self.reason}; give exact tokens there"


@functools.cache
def warn_once(log: logging.Logger, message: str, level: int = logging.WARNING) -> None:
    """Logs a message the first time only that a process gives it: a checkpoint is opened several times."""
    log.log(level, "%s", message)


def listed(names: Iterable[str], max_names: int = 8) -> str:
    """Names for a message: the first ones, escaped if they are not printable, and the number of the others."""
    names = [name if name.isprintable() else ascii(name) for name in names]
    return ", ".join(names[:max_names]) + (f" and {len(names) - max_names} more" if len(names) > max_names else "")


def either(values: Iterable[object]) -> str:
    """Values for a message, with "or" before the last one."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def flat(text: str) -> str:
    """The text with its line breaks and runs of blanks as single blanks."""
    return " ".join(text.split())


def one_line(error: BaseException) -> str:
    """The message of an error in one line of at most MAX_REASON characters; of an OSError without its number and path."""
    return flat(getattr(error, "strerror", None) or str(error))[:MAX_REASON]


def with_type(error: BaseException) -> str:
    """`one_line` after the name of the error's class, for errors of other packages, whose messages often say little without it."""
    return f"{type(error).__name__}: {one_line(error)}"


def named(error: BaseException) -> str:
    """The class of an error and the first line of its message, at most MAX_NAMED characters in all, for a row of a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {flat(lines[0])}"[:MAX_NAMED]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device's memory or the host's is full.

    A kernel that asks for too much shared memory does not count: a shorter prompt would not help it.
    """
    text = str(error)
    return isinstance(error, HostMemoryError) or (
        any(sign in text for sign in ("RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY")) and "shared memory" not in text.lower()
    )


def more_memory() -> str:
    """The end of a message about a GPU's full memory: JAX takes only a part of it, unless the environment says how much. Else empty."""
    import jax  # a command that reads its options has not imported it yet

    if jax.default_backend() != "gpu" or os.environ.get(MEMORY_SHARE):
        return ""
    return f"; JAX takes 0.75 of a GPU's memory, {MEMORY_SHARE}=0.95 more"


@contextlib.contextmanager
def reading(what: object, *others: type[Exception]) -> Iterator[None]:
    """Turns an OSError of the block, or one of `others`, into an InputError: `what` cannot be read, and why."""
    with _refused(what, "read", others):
        yield


@contextlib.contextmanager
def writing(what: object, *others: type[Exception]) -> Iterator[None]:
    """Turns an OSError of the block, or one of `others`, into an InputError: `what` cannot be written, and why."""
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
