"""The program as a process: its signals, its standard streams, its version. Imports nothing slow, since all else is imported after it."""

import _thread
import errno
import importlib.metadata
import logging
import os
import signal
import sys
import threading

from qspec_jax.errors import InputError, one_line

log = logging.getLogger(__name__)

# The signals that came; the last one ends the process.
_received: list[int] = []


def version() -> str:
    """The versions of this package and of JAX, in one line."""
    return f"qspec-jax {version_of('qspec-jax')} (jax {version_of('jax')})"


def version_of(package: str) -> str:
    """The version of an installed package; "unknown" for one that is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "unknown"


def begin() -> None:
    """Makes the standard streams fail in one line, and a signal end the process at once: while modules are imported, nothing is lost."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(128 + number))
    # Any file that is opened would take the number of a stream that is closed, and get what is meant for the stream.
    for descriptor, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):  # reading input and writing output still fail
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)
    as_file = lambda stream, descriptor: stream or os.fdopen(descriptor, "w", encoding="utf-8", closefd=False)
    sys.stdout, sys.stderr = _Output(as_file(sys.stdout, 1)), _Messages(as_file(sys.stderr, 2))


def raise_on_signals() -> None:
    """From now on Ctrl-C and SIGTERM raise KeyboardInterrupt, so that what is half-written is removed."""
    # With Python's own handler, asyncio, which Orbax runs, would end one of its tasks instead, and might lose the signal.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _raise)
    # Orbax and TensorStore report every part that fails, besides raising an error that says it once.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = _unraisable


def interrupted() -> int:
    """The exit code after KeyboardInterrupt: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (_received[-1] if _received else signal.SIGINT)


def _raise(number: int, frame) -> None:
    _received.append(number)
    raise KeyboardInterrupt


def _unraisable(unraisable) -> None:
    """Handles an exception where nobody can catch it: a signal that came just there is sent again, anything else is logged."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        threading.Timer(0.05, _thread.interrupt_main, _received[-1:]).start()
    else:
        log.debug("%r", unraisable.exc_value)


class _Stream:
    """A standard stream whose errors go to `_failed`."""

    def __init__(self, file):
        self._file = file

    def __getattr__(self, name: str):
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self._failed(error)


class _Output(_Stream):
    """Standard output. An error is an InputError; where its reader has left, the process ends as by SIGPIPE."""

    def _failed(self, error: OSError) -> None:
        if error.errno == errno.EPIPE:
            raise SystemExit(128 + signal.SIGPIPE) from None
        raise InputError(f"standard output: cannot be written ({one_line(error)})") from None


class _Messages(_Stream):
    """Standard error, whose errors are ignored: whether messages arrive changes nothing of the work."""

    def _failed(self, error: OSError) -> None:
        pass
