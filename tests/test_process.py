"""The program as a process: streams that are closed or know few characters, signals from the first moment."""

import os
import signal
import subprocess
import sys

import processes
import pytest
from tiers import in_system

BEGUN = "from qspec_jax.cli import process; process.begin(); from pathlib import Path; from qspec_jax import files\n"


def ran(code: str, before: str = "", streams: str = "", **environment: str) -> subprocess.CompletedProcess:
    """Python with this code, in a process of its own. before, streams: what a shell does first, and its redirections."""
    shell = ["sh", "-c", f'{before} exec "$@" {streams}', "sh", sys.executable, "-c", code]
    return subprocess.run(shell, capture_output=True, timeout=60, env=os.environ | environment)


@pytest.mark.parametrize("output", ["/dev/stdout", "/dev/fd/1", "link", "-"])
def test_standard_output_that_is_closed_is_so_by_every_name(output, tmp_path):
    if output == "link":
        (tmp_path / "link").symlink_to("/proc/self/fd/1")
        output = str(tmp_path / "link")
    code = f"with files.output_to(Path({output!r})) as write: raise SystemExit('it could be opened')"
    done = ran(BEGUN + code, streams=">&-")
    assert done.returncode == 1 and b"InputError: standard output: cannot be written (Bad file descriptor)" in done.stderr


def test_standard_error_that_is_closed_is_no_file(tmp_path):
    code = "try:\n with files.output_to(Path('/dev/stderr')) as write: write('lost')\nexcept files.InputError as error: print(error)"
    done = ran(BEGUN + code, streams="2>&-")
    assert done.stdout.startswith(b"/dev/stderr: cannot be written ("), done


@pytest.mark.parametrize("name", ["/dev/stdin", "/proc/self/fd/0"])
def test_standard_input_that_is_closed_is_so_by_every_name(name):
    done = ran(BEGUN + f"files.read_bytes(Path({name!r}))", streams="<&-")
    assert f"InputError: {name}: cannot be read (Bad file descriptor)" in done.stderr.decode()


@pytest.mark.parametrize("output", ["/dev/stdout", *in_system("-")])
def test_no_result_is_lost_in_silence(output, shallow, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "def"}')
    flags = ["--model", shallow, "--max-new-tokens", 2, "--draft", "none"]
    for command in (["batch", source, output], ["generate", "--prompt", "def", "--output", output]):
        process = processes.command_line([*command, *flags], None, tmp_path / "err")
        process.join(120)
        assert process.exitcode == 2
    assert (tmp_path / "err").read_text() == "qspec: error: standard output: cannot be written (Bad file descriptor)\n" * 2


@pytest.mark.parametrize(
    "environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}]
)
def test_text_that_standard_output_has_no_characters_for(environment):
    done = ran(BEGUN + r"print('\xe9 \u2192 \udcff')", **environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\\xe9 \\u2192 \\udcff\n", b"")
    done = ran(BEGUN + r"print('\xe9 \u2192 \ud800')", PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stdout) == (0, "é → \\ud800\n".encode())


def test_a_file_takes_half_a_character(tmp_path):
    done = ran(BEGUN + rf"with files.output_to(Path({str(tmp_path / 'out')!r})) as write: write('\xe9 \udcff')")
    assert (done.returncode, done.stderr) == (0, b"") and (tmp_path / "out").read_bytes() == "é \\udcff".encode()


def test_next_to_nothing_is_imported_before_signals_are_taken_care_of():
    """What a signal meets before is Python's own handler, which shows a traceback."""
    spy = """
import sys, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
class Spy:
    def find_spec(self, name, *_):
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            seen.append(name)
seen = []
sys.meta_path.insert(0, Spy())
sys.argv = ["qspec", "--version"]
from qspec_jax.cli import main
try:
    main()
finally:
    print(*seen)
"""
    done = ran(spy)
    assert done.stdout.decode().splitlines()[1:] == ["qspec_jax qspec_jax.cli qspec_jax.cli.process"], done


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_with_the_first_import_of_each_kind(number):
    """Each module that is imported from then on, one after the other, is interrupted."""
    for module in ("qspec_jax.errors", "logging", "contextlib", "typer", "qspec_jax.cli.app", "jax", "numpy"):
        spy = f"""
import sys, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
class Spy:
    def find_spec(self, name, *_):
        if name == {module!r}:
            signal.raise_signal({int(number)})
sys.meta_path.insert(0, Spy())
for name in ("contextlib", "logging"):
    sys.modules.pop(name, None)
sys.argv = ["qspec", "demo"]
from qspec_jax.cli import main
main()
"""
        done = ran(spy)
        assert (done.returncode, done.stdout, done.stderr) == (128 + number, b"", b""), module


def test_a_signal_that_is_ignored_stays_so():
    """A shell's trap '' INT, and nohup, are for all that they start."""
    code = "import signal; numbers = signal.SIGINT, signal.SIGTERM; signal.signal(signal.SIGINT, signal.default_int_handler); "
    look = "print(*(signal.getsignal(number) == signal.SIG_IGN for number in numbers)); "
    for name, expected in {"INT": "True False", "TERM": "False True", "HUP": "False False"}.items():
        ignored = f"signal.signal(signal.SIG{name}, signal.SIG_IGN); "
        done = ran(code + ignored + BEGUN + look + "process.raise_on_signals(); " + look)
        assert done.stdout.decode().splitlines() == [expected] * 2, done


@pytest.mark.parametrize(
    ("half_written", "number"),
    [(False, signal.SIGTERM), (True, signal.SIGINT), *in_system((False, signal.SIGINT), (True, signal.SIGTERM))],
)
def test_a_signal_while_native_code_runs_ends_the_process(number, half_written):
    """At once, as one that Python handles, though the main thread is in native code; but not while something is half-written."""
    rounds = 3_000_000 if half_written else 2_000_000_000  # seconds, and many minutes
    code = f"""process.raise_on_signals(); process.UNHANDLED_SECONDS = 0.2
import hashlib, os, signal, threading
files.half_written.update([Path("x")] if {half_written} else [])
threading.Timer(0.3, lambda: os.kill(os.getpid(), {int(number)})).start()
try:
    hashlib.pbkdf2_hmac("sha256", b"", b"", {rounds})  # no native code looks for signals less
except KeyboardInterrupt:
    print("handled")
    sys.exit(process.interrupted())"""
    done = ran(BEGUN + "import sys\n" + code)
    assert (done.returncode, done.stderr) == (128 + number, b"")
    assert done.stdout == (b"handled\n" if half_written else b"")


def test_a_signal_to_a_child_does_not_end_its_parent():
    code = """process.raise_on_signals(); process.UNHANDLED_SECONDS = 0.2
import multiprocessing, time
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
time.sleep(0.3)
child.terminate()
child.join()
time.sleep(1)
print("alive")"""
    assert ran(BEGUN + code).stdout == b"alive\n"


def test_what_is_called_where_a_signal_ends_the_process():
    code = """process.raise_on_signals(); process.UNHANDLED_SECONDS = 0.2
import hashlib, os, signal, sys, threading
process.endings.append(lambda: print("its last words", file=sys.stderr))
print("not flushed", end="")
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)"""
    done = ran(BEGUN + code)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"not flushed", b"its last words\n")


def test_a_signal_while_something_half_written_is_removed_is_ignored():
    code = """process.raise_on_signals()
def after(seconds, number):
    now[0] += seconds
    try:
        signal.raise_signal(number)
        return "ignored"
    except KeyboardInterrupt:
        return process._received[-1][0]
import signal
now = [50.0]
process.time.monotonic = lambda: now[0]
print(after(0, signal.SIGINT), after(1, signal.SIGTERM), end=" ")
files.half_written.add(Path("x"))
print(after(9, signal.SIGINT), after(2, signal.SIGINT), after(99, signal.SIGINT))"""
    done = ran(BEGUN + code)
    assert (done.stdout, done.stderr) == (b"2 15 ignored 2 2\n", b""), done


def test_submodules_are_there_without_being_imported_first():
    code = "import qspec_jax; qspec_jax.errors.InputError; qspec_jax.cli.main; print(hasattr(qspec_jax, 'nothing'), 'jax' in vars())"
    assert ran(code).stdout == b"False False\n"
    missing = ran("import qspec_jax, sys; sys.modules['jax'] = None; qspec_jax.drafts")
    assert b"ModuleNotFoundError: import of jax halted" in missing.stderr
