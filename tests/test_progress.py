"""What commands say while they work: statements, bars and rows, on terminals and elsewhere."""

import io
import logging
import os
import re
import select
import subprocess
import sys
import threading
import time

import pytest

from qspec_jax import progress
from qspec_jax.progress import awaited, progress_bar, shown, tell_row, working


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def lines(self) -> list[str]:
        """What was written, without what moves a terminal's cursor."""
        return [line.strip() for line in self.getvalue().replace("\x1b[A", "\r").replace("\n", "\r").split("\r") if line.strip()]


def standard_error(monkeypatch, kind=io.StringIO):
    """Takes its place within a test: before it, pytest would put its own back."""
    monkeypatch.setattr(sys, "stderr", kind())
    return sys.stderr


def until(condition):
    """Waits until a thread has done something."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def speakers() -> int:
    return sum(thread.name.startswith(progress.SPEAKER) for thread in threading.enumerate())


def test_statements_come_into_a_file_at_the_interval(monkeypatch):
    """With what is stated around them, and the seconds so far; an equal one within another is said once."""
    file = standard_error(monkeypatch)
    with shown(None, file_seconds=0.02):
        assert speakers() == 1
        with working("draft sparse, temperature 1"), working("compiling"), working("compiling"):
            until(lambda: "compiling" in file.getvalue())
        with working("text 2 of 4"):
            until(lambda: "text 2" in file.getvalue())
        until(lambda: "s: working" in file.getvalue())
    said = file.getvalue()
    assert "qspec: 0 s: draft sparse, temperature 1: compiling\n" in said and "qspec: 0 s: text 2 of 4\n" in said
    assert "compiling: compiling" not in said and "\r" not in said
    with working("nothing"):
        time.sleep(0.05)
    assert file.getvalue() == said and speakers() == 0


def test_nothing_is_said_before_the_interval_has_passed(monkeypatch):
    file = standard_error(monkeypatch)
    with shown(None, file_seconds=20), working("compiling"):
        time.sleep(0.05)
    assert file.getvalue() == "" and progress.FILE_SECONDS == 60 and progress.TERMINAL_SECONDS <= 10


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_is_said_after_an_error(error, monkeypatch):
    file = standard_error(monkeypatch)
    with pytest.raises(error), shown(None, file_seconds=0.01), working("compiling"):
        until(file.getvalue)
        raise error
    said = file.getvalue()
    time.sleep(0.05)
    assert file.getvalue() == said and speakers() == 0
    with shown(None, file_seconds=0.01):
        until(lambda: "s: working" in file.getvalue())  # and what was stated is forgotten


def test_a_quiet_command_says_nothing(monkeypatch):
    file = standard_error(monkeypatch)
    with shown(False, file_seconds=0.01), progress_bar(range(2), progress=False), working("compiling"):
        assert speakers() == 0
        tell_row("a row: 1")
        time.sleep(0.03)
    assert file.getvalue() == ""


def test_rows_of_a_file_are_whole_lines(monkeypatch):
    file = standard_error(monkeypatch)
    with shown(None):
        tell_row("a row: 1")
    assert file.getvalue() == "qspec: a row: 1\n"


def test_statements_of_other_threads_are_left_out(monkeypatch):
    file = standard_error(monkeypatch)

    def other():
        with working("another thread"):
            time.sleep(0.05)

    with shown(None, file_seconds=0.01), working("this thread"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        until(file.getvalue)
    assert "this thread\n" in file.getvalue() and "another" not in file.getvalue()


def test_a_terminal_has_a_line_that_is_updated(monkeypatch):
    """Rows and log lines come above it and the bar, and nothing of them is left."""
    terminal = standard_error(monkeypatch, Terminal)
    log = logging.getLogger("test_progress")
    handler = logging.StreamHandler(terminal)
    logging.root.addHandler(handler)
    try:
        with shown(None, terminal_seconds=0.01), progress_bar(total=2, progress=None, mininterval=0) as bar:
            with working("row 1"):
                until(lambda: "qspec: 0 s: row 1" in terminal.lines())
            tell_row("row 1: 3.2")
            log.warning("a warning")
            bar.update()
            with working("row 2"):
                until(lambda: "qspec: 0 s: row 2" in terminal.lines())
    finally:
        logging.root.removeHandler(handler)
    lines = terminal.lines()
    assert any("1/2" in line for line in lines)
    for line in ("qspec: row 1: 3.2", "a warning"):  # at the beginning of a line that was cleared
        assert re.search(rf"\r(\x1b\[A)*{line}\n", terminal.getvalue())
    assert terminal.getvalue().endswith("\r") and not terminal.getvalue().rpartition("\x1b[A")[2].strip()


def test_long_statements_fit_a_line(monkeypatch):
    terminal = standard_error(monkeypatch, Terminal)
    monkeypatch.setattr(progress, "_columns", lambda file: 40)
    with shown(None, terminal_seconds=0.01), working("a draft with a long name"), working("at a context"), working("compiling"):
        until(lambda: any(line.endswith(": compiling") for line in terminal.lines()))
    assert all(len(line) < 40 for line in terminal.lines())


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_a_terminal_that_says_no_size_has_a_line_too(monkeypatch):
    """As in a container; tqdm shows nothing there."""
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert os.get_terminal_size(writer).columns == 0
        with shown(None, terminal_seconds=0.01), working("compiling"):
            found = b""
            while b"qspec: 0 s: compiling" not in found:
                assert select.select([reader], [], [], 10)[0]
                found += os.read(reader, 1000)
    os.close(reader)


def test_bars_alone_say_what_is_done(monkeypatch):
    """As in Python, where no command shows statements."""
    terminal = standard_error(monkeypatch, Terminal)
    with progress_bar(total=2, progress=True, desc="load") as bar:
        assert bar.desc == "load"
        with working("text 1"), working("compiling"):
            assert bar.desc == "text 1: compiling"
        assert bar.desc == "load"
        tell_row("text 1: 3.2")
    assert "qspec: text 1: 3.2" in terminal.lines()
    with working("text 2"):
        assert bar.desc == "load"


def test_what_is_awaited_is_counted(monkeypatch):
    file = standard_error(monkeypatch)

    def slow():
        for i in range(3):
            until(lambda i=i: f"prompt {i + 1} of 3" in file.getvalue())
            yield i

    with shown(None, file_seconds=0.005):
        assert list(awaited(slow(), "prompt", 3)) == [0, 1, 2]


def test_bars_in_notebooks_are_those_of_tqdm_auto():
    """Without ipywidgets they are of text, and nothing warns of that."""
    code = """
import sys, types
shell = types.ModuleType("IPython"); shell.get_ipython = lambda: types.SimpleNamespace(config={"IPKernelApp": 1})
shell.display = types.SimpleNamespace(display=print, HTML=str)
sys.modules |= {"IPython": shell, "IPython.display": shell.display, "ipykernel.zmqshell": shell, "ipywidgets": None}
from qspec_jax.progress import progress_bar
with progress_bar(total=1, progress=True) as bar:
    bar.update()
"""
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True)
    assert (done.returncode, "0/1" in done.stderr, "IProgress" in done.stderr) == (0, True, False), done.stderr
