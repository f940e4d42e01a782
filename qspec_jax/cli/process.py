"""The program as a process: its signals, its standard streams, its version.

It is imported first and imports next to nothing itself: until `begin` has run, Ctrl-C shows a traceback.
"""

import os
import signal
import sys
import time

CLEANING_SECONDS = 10  # after a signal, in which what is half-written is removed undisturbed
UNHANDLED_SECONDS = 2  # after a signal, in which native code may keep Python from handling it

# The signals that raised KeyboardInterrupt, and when (time.monotonic). The exit code is that of the last.
_received: list[tuple[int, float]] = []
_handled_at = 0.0  # when Python last handled or ignored a signal
_finished = False  # whether all is done with exit code 0
endings: list = []  # functions that are called where a signal ends the process without KeyboardInterrupt
_ctrl_c: "CtrlC | None" = None  # what Ctrl-C is for at present; None where it ends the process


def version() -> str:
    """The versions of this package and of JAX, in one line."""
    return f"qspec-jax {version_of('qspec-jax')} (jax {version_of('jax')})"


def version_of(package: str) -> str:
    """The version of an installed package; "unknown" for one that is not."""
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "unknown"


def begin() -> None:
    """Makes the standard streams fail in one line, and a signal end the process at once: while modules are imported, nothing is lost."""
    _on_signals(_end)
    import atexit

    atexit.register(_end_after_others)  # what is registered first is called last
    # Both are read once, when JAX starts. The text of a cache in host memory has this setting.
    if any("host=" in argument for argument in sys.argv):
        from qspec_jax import host

        host.limit_pool()
        # Or XLA warns, for each layer, of what is done with arrays in host memory where they lie. Its errors are shown.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Any file that is opened would take the number of a stream that is closed, and get what is meant for the stream.
    for descriptor, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            _open_nothing(flags)

    def as_file(stream, descriptor):
        return stream or os.fdopen(descriptor, "w", encoding="utf-8", closefd=False)

    sys.stdout, sys.stderr = _Output(as_file(sys.stdout, 1)), _Messages(as_file(sys.stderr, 2))
    # A terminal may know fewer characters than a text has, and no encoding knows half a character.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")


def finish() -> None:
    """The work is done and written: from now on a signal ends the process at once, with its exit code.

    While Python takes its modules apart, which takes a sixth of a second, it handles no signals. So that is left out.
    """
    global _finished
    _on_signals(_end)
    _finished = True


def _end(number: int, frame) -> None:
    os._exit(128 + number)


def _end_after_others() -> None:
    if _finished:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _on_signals(handler) -> None:
    """Handles Ctrl-C and SIGTERM, except one that the process was started to ignore, as by nohup and a shell's trap ''."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _open_nothing(flags: int) -> None:
    """Opens a file that can be neither read nor written, by its number or by another name such as /dev/stdout: on Linux a symbolic link
    itself. Elsewhere it is the null device, and flags leave out what the stream is for."""
    try:
        os.open("/proc/self", os.O_PATH | os.O_NOFOLLOW)
    except (AttributeError, OSError):
        os.open(os.devnull, flags)


def keep_output_clean() -> None:
    """From now on what libraries print on standard output by themselves, as Gloo does, goes to standard error."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)
    sys.stdout = _Output(own)


def raise_on_signals() -> None:
    """From now on Ctrl-C and SIGTERM raise KeyboardInterrupt, so that what is half-written is removed.

    While that is done, for CLEANING_SECONDS at most, others are ignored: people press Ctrl-C twice, and it would end the removing. A signal
    that comes while XLA compiles or computes ends the process by itself, UNHANDLED_SECONDS later.
    """
    import logging
    import threading

    read, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # or its signals would be taken for this process's
    threading.Thread(target=_end_where_python_waits, args=(read,), daemon=True).start()
    # With Python's own handler, asyncio, which Orbax runs, would end one of its tasks instead, and might lose the signal.
    _on_signals(_raise)
    # Orbax and TensorStore report every part that fails, besides raising an error that says it once.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = _unraisable


def interrupted() -> int:
    """The exit code after KeyboardInterrupt: 130 for Ctrl-C, 143 for SIGTERM. The process is about to end, and ignores further signals."""
    if _received:
        _on_signals(signal.SIG_IGN)
    return 128 + (_received[-1][0] if _received else signal.SIGINT)


class WhenInterrupted:
    """Calls a function if a signal ends this block, with KeyboardInterrupt or without."""

    def __init__(self, act):
        self._act = act

    def __enter__(self):
        endings.append(self._act)

    def __exit__(self, kind, *_):
        try:
            if kind is not None and issubclass(kind, KeyboardInterrupt):
                self._act()
        finally:
            endings.remove(self._act)


class CtrlCAtPrompt(KeyboardInterrupt):
    """Ctrl-C while the program waits for a line."""


class CtrlC:
    """Within this block Ctrl-C ends what runs and not the process: the program looks at `pressed` where it can stop.

    Nothing is interrupted in the middle, such as a program of XLA that has consumed its arguments. The second Ctrl-C while something runs
    raises KeyboardInterrupt as elsewhere.

    Attributes:
        at_prompt: whether the program waits for a line; then Ctrl-C raises CtrlCAtPrompt.
        pressed: whether Ctrl-C was pressed while something ran.
    """

    def __init__(self):
        self.at_prompt = self.pressed = False

    def __enter__(self):
        global _ctrl_c
        self._before, _ctrl_c = signal.signal(signal.SIGINT, self._handle), self
        return self

    def __exit__(self, *_):
        global _ctrl_c
        _ctrl_c = None
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame) -> None:
        global _handled_at
        _handled_at = time.monotonic()
        if self.at_prompt:
            raise CtrlCAtPrompt
        if self.pressed:
            _raise(number, frame)
        self.pressed = True


def _raise(number: int, frame) -> None:
    global _handled_at
    _handled_at = now = time.monotonic()
    if _received and now <= _received[-1][1] + CLEANING_SECONDS and _half_written():
        return
    _received.append((number, now))
    raise KeyboardInterrupt


def _half_written() -> bool:
    files = sys.modules.get("qspec_jax.files")  # a handler imports nothing
    return bool(files and files.half_written)


def _end_where_python_waits(pipe: int) -> None:
    """Ends the process after a signal that Python does not come to handle, because its main thread is in native code: XLA compiles for
    minutes. While something is half-written it waits. pipe: where the interpreter writes the number of each signal as it arrives."""
    import contextlib

    while True:
        before, number, arrived = _handled_at, os.read(pipe, 1)[0], time.monotonic()
        if number == signal.SIGINT and _ctrl_c is not None:
            continue
        # Two at once are handled together, and one may have been handled before it was read here.
        while not (handled := _handled_at not in (0.0, before) or _handled_at > arrived - 1):
            if time.monotonic() > arrived + UNHANDLED_SECONDS and not _half_written():
                break
            time.sleep(0.05)
        if not handled and number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(Exception):
                if sys.stderr.isatty():
                    sys.stderr.write("\n")  # after a progress bar
                for ending in endings:
                    ending()
                sys.stdout.flush()
            os._exit(128 + number)


def _unraisable(unraisable) -> None:
    """Handles an exception that no code can catch: a signal that came just there is sent again, anything else is logged."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt) and _received:
        import _thread
        import threading

        def again(signal_and_time: tuple[int, float]):
            global _handled_at
            _handled_at = 0.0
            _received.remove(signal_and_time)  # or it would be ignored as a second one
            _thread.interrupt_main(signal_and_time[0])

        threading.Timer(0.05, again, _received[-1:]).start()
    else:
        import logging

        logging.getLogger(__name__).debug("%r", unraisable.exc_value)


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
        from qspec_jax.errors import InputError, one_line

        if isinstance(error, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE) from None
        raise InputError(f"standard output: cannot be written ({one_line(error)})") from None


class _Messages(_Stream):
    """Standard error, whose errors are ignored: whether messages arrive changes nothing of the work."""

    def _failed(self, error: OSError) -> None:
        pass
