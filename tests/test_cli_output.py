"""What the command line writes: output files, standard output that cannot be written, and how a run ends that fails or is stopped."""

import io
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import processes
import pytest
from rich.console import Console
from tiers import in_system

from convert.compare import VerificationReport
from qspec_jax import cli, demo
from qspec_jax.cli import convert as convert_commands
from qspec_jax.cli.generate import stats_table
from qspec_jax.errors import InputError
from qspec_jax.files import output_to, to_json

DEMO = demo.MODEL
SETTINGS = ["--max-new-tokens", "24", "--group-size", "8", "--ignore-eos"]
GENERATE = ["generate", "--prompt", "ab", *SETTINGS, "--model"]


def test_output_file_is_whole_and_readable(run, directory, tmp_path):
    path = tmp_path / "out.txt"
    code, out, _ = run("generate", "--model", directory, "--prompt", "ab", *SETTINGS, "--output", path)
    assert (code, out) == (0, "")
    assert path.read_text().strip()
    assert [p.name for p in tmp_path.iterdir()] == ["out.txt"]


def test_a_device_is_written_to_and_not_replaced(run, directory):
    code, _, _ = run("generate", "--model", directory, "--prompt", "ab", *SETTINGS, "--output", "/dev/null")
    assert code == 0
    assert Path("/dev/null").is_char_device()


def test_an_output_that_is_a_link_or_standard_output(tmp_path, capfd):
    """A link stays. Until the end nothing lies beside the output, so that a process that is killed leaves nothing."""
    target, link, loop = tmp_path / "folder" / "target", tmp_path / "link", tmp_path / "loop"
    target.parent.mkdir()
    link.symlink_to(target)
    loop.symlink_to(loop)
    for text in ("new", "newer"):
        with output_to(link) as write:
            write(text)
            assert [path.read_text() for path in target.parent.iterdir()] == ["new"] * (text == "newer")
        assert link.is_symlink() and target.read_text() == text and list(target.parent.iterdir()) == [target]
    with pytest.raises(KeyboardInterrupt), output_to(link) as write:
        write("never")
        raise KeyboardInterrupt
    assert target.read_text() == "newer" and list(target.parent.iterdir()) == [target]
    with pytest.raises(InputError, match="loop: cannot be written"), output_to(loop):
        pass
    print("before")
    with output_to(Path("/dev/stdout")) as write:
        write("after\n")
    assert capfd.readouterr().out == "before\nafter\n"


def test_an_output_file_keeps_its_permissions(run, directory, tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    path.chmod(0o640)
    run("generate", "--model", directory, "--prompt", "ab", *SETTINGS, "--output", path)
    assert path.read_text() != "old"
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_output(fails, directory, tmp_path):
    tmp_path.chmod(0o500)
    fails([*GENERATE, directory, "--output", tmp_path / "out"], tmp_path)


def test_a_failed_run_leaves_the_output_file_alone(fails, directory, tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("kept")
    fails([*GENERATE, directory, "--prompt", "", "--output", path], "empty")
    assert path.read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["out.txt"]
    fails([*GENERATE, directory, "--output", tmp_path], tmp_path)


def test_json_has_no_infinities():
    value = {"a": [1.5, float("-inf"), ("é", float("nan"))], "b": "\udcff"}
    assert to_json(value) == '{"a": [1.5, null, ["\\u00e9", null]], "b": "\\udcff"}'


def test_reports_of_conversions_have_no_infinities(run, monkeypatch):
    report = VerificationReport("s", "d", 1, 1, math.nan, False, [])
    monkeypatch.setattr(convert_commands, "verify", lambda *_, **__: report)
    assert json.loads(run("verify", "s", "d", "--json")[1], parse_constant=pytest.fail)["draft_error"] is None


@pytest.mark.parametrize(
    ("arguments", "out", "code", "said"),
    [
        (["info", DEMO], "/dev/full", 2, "No space left on device"),
        (["info", DEMO, "--json"], "/dev/full", 2, "No space left on device"),
        (["info", DEMO, "--json"], None, 2, "Bad file descriptor"),
        (["--help"], "/dev/full", 2, "No space left on device"),
        (["--version"], None, 2, "Bad file descriptor"),
    ],
)
def test_standard_output_that_cannot_be_written(arguments, out, code, said, tmp_path):
    process = processes.command_line(arguments, out and Path(out), tmp_path / "err")
    process.join(60)
    assert process.exitcode == code
    assert (tmp_path / "err").read_text() == f"qspec: error: standard output: cannot be written ({said})\n"


def test_a_stream_that_cannot_be_written(directory, tmp_path):
    flags = ["--draft", "none", "--max-new-tokens", 2, "--stream"]
    process = processes.command_line([*GENERATE, directory, *flags], Path("/dev/full"), tmp_path / "err")
    process.join(120)
    assert process.exitcode == 2
    assert "qspec: error: standard output: cannot be written (No space left on device)\n" in (tmp_path / "err").read_text()
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_messages_that_cannot_be_written(tmp_path):
    for err in (None, Path("/dev/full")):
        process = processes.command_line(["info", tmp_path], Path("/dev/null"), err)
        process.join(60)
        assert process.exitcode == 2


def test_a_reader_that_leaves(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    process = processes.command_line(["info", DEMO], fifo, tmp_path / "err")
    deadline = time.monotonic() + 60
    while not (tmp_path / "err").exists() and time.monotonic() < deadline:
        time.sleep(0.001)  # its streams are opened, standard error last
    os.close(reader)
    process.join(60)
    assert process.exitcode == 141 and (tmp_path / "err").read_text() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, *in_system(signal.SIGTERM)])
def test_a_signal_while_modules_are_imported(number, tmp_path):
    for delay in (0, 0.1, 0.4, 0.9):
        process = subprocess.Popen([sys.executable, "-m", "qspec_jax.cli", "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        caught, deadline = 0, time.monotonic() + 60
        while not caught >> (signal.SIGTERM - 1) & 1 and time.monotonic() < deadline:  # Python itself has taken no care of this one
            caught = int(Path(f"/proc/{process.pid}/status").read_text().split("SigCgt:")[1].split()[0], 16)
        time.sleep(delay)
        process.send_signal(number)
        assert (process.communicate(timeout=60), process.returncode) == ((b"", b""), 128 + number)


def test_a_gpu_that_fails_is_one_line(monkeypatch, run):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA error: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure\nstack")

    monkeypatch.setattr(cli, "_run", fails)
    code, out, err = run("demo")
    assert (code, out, err.count("\n")) == (1, "", 1) and "CUDA_ERROR_LAUNCH_FAILED" in err


@pytest.mark.parametrize(
    ("library", "message"),
    [
        ("NCCL", "NOT_FOUND: libnccl.so.2: cannot open shared object file\nstack"),
        ("Gloo", "UNKNOWN: Gloo all-reduce failed: closed by peer"),
    ],
)
def test_devices_that_cannot_talk_to_each_other(monkeypatch, run, library, message):
    def fails(*_):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(cli, "_run", fails)
    code, out, err = run("demo")
    assert (code, out, err.count("\n")) == (1, "", 1) and f"{library}, through which devices talk" in err


def test_messages_of_all_modules_but_a_few_are_shown(run):
    assert run("--version")[0] == 0
    shown = [logging.getLogger(f"qspec_jax.{module}").isEnabledFor(logging.INFO) for module in ("decoding.auto_exact", *cli.QUIET)]
    assert shown == [True] + [False] * len(cli.QUIET)


def test_the_statistics_name_a_long_draft_whole():
    draft = "cascade:first=(eagle3:model=random,window=1020),middle=(sparse:budget=0.06)"
    rates = dict(num_draft_tokens=0, num_accepted_draft_tokens=0, draft_acceptance_rate=None, mean_acceptance_length=None, num_spec_steps=0)
    seconds = dict(tokens_per_second=1.0, prefill_s=0.0, decode_s=1.0, compile_s=0.0)
    stats = SimpleNamespace(new_tokens=1, prompt_tokens=1, flushes=0, cache_bytes=1, host_cache_bytes=0, **rates, **seconds)
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(stats_table({draft: SimpleNamespace(stats=stats)}))
    header = console.export_text().split("new tokens")[0]
    assert "".join(header.split()) == draft
