"""Conversions that end on the way: the destination is whole, or what it was; and what others write beside or in place of it stays."""

import errno
import os
import random
import shutil
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import processes
import pytest
from checkpoints import hf_config, write_checkpoint
from conversions import bits, files, refused

from convert import convert, to_orbax
from convert.placing import written
from pallas_kernels.formats.weights import Int4Weight
from qspec_jax.checkpoints import converted, huggingface
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.errors import InputError
from qspec_jax.files import unfinished_prefix

pytestmark = pytest.mark.system


def test_one_that_is_being_written_is_left_alone(source, tmp_path):
    def check():
        if (tmp_path / "out").exists():
            raise InputError("is there")

    with written(tmp_path / "out", 0, check) as first:
        (first / "x").write_text("first")
        with pytest.raises(InputError, match="is there"), written(tmp_path / "out", 0, check) as second:  # whose place is taken
            assert (first / "x").exists() and first != second
            with written(tmp_path / "out.more", 0, lambda: None) as third:
                assert (first / "x").exists() and (second.exists() and third.exists())
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "thesis.txt").write_text("years")
        shutil.rmtree(tmp_path / "out")
    assert files(tmp_path / "out") == {"x": b"first"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out", "out.more"]


@pytest.mark.parametrize("there", [False, True])
def test_what_comes_meanwhile_is_not_replaced(there, source, tmp_path, monkeypatch):
    out, read = tmp_path / "out", huggingface.Source.read
    if there:
        convert(source, out)

    def reading(*args):
        out.mkdir(exist_ok=True)
        (out / "thesis.txt").write_text("years")
        return read(*args)

    monkeypatch.setattr(huggingface.Source, "read", reading)
    refused("not an earlier conversion and nothing else", source, out, overwrite=True)
    assert files(out)["thesis.txt"] == b"years" and sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]
    monkeypatch.undo()
    if there:
        (out / "thesis.txt").unlink()
        assert bits(load_model(out)) == bits(load_model(source))


def test_an_earlier_one_is_put_back_before_anything_else(source, tmp_path, monkeypatch):
    """What a kill between the two renames leaves."""
    out, left = tmp_path / "out", tmp_path / f"{unfinished_prefix(Path('out'))}abcdefgh.unfinished"
    convert(source, out)
    (left / "old").mkdir(parents=True)
    (left / "UNFINISHED").touch()
    shutil.copytree(out, left / "out")
    out.rename(left / "old" / "out")
    monkeypatch.setattr(to_orbax, "_write", lambda *args: pytest.fail("it was converted before it was refused"))
    refused("exists already; --overwrite", source, out)
    assert bits(load_model(out)) == bits(load_model(source)) and not left.exists()


@pytest.mark.parametrize("again", [False, True])
def test_what_cannot_be_put_in_place_leaves_the_earlier_one(again, source, tmp_path, monkeypatch):
    """again: nor can that one at once, and the next conversion puts it back, before anything else."""
    out, replace, calls = tmp_path / "out", os.replace, []
    convert(source, out)
    before = files(out)

    def failing(*args):
        if Path(args[1]) == out:
            calls.append(args)
            if len(calls) <= 1 + again:
                raise OSError(errno.EIO, "Input/output error")
        replace(*args)

    monkeypatch.setattr(os, "replace", failing)
    refused("Input/output error", source, out, dtype="bfloat16", overwrite=True)
    if again:
        assert not out.exists()
        refused("exists already", source, out)
    assert files(out) == before and sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


@pytest.mark.parametrize("calls", [1, 3])
def test_a_disk_that_is_full_on_the_way(calls, source, tmp_path, monkeypatch):
    from orbax.checkpoint import v1 as ocp

    save = ocp.partial.save

    def full(*args):
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(*args)

    monkeypatch.setattr(converted, "BATCH_BYTES", 30_000)
    monkeypatch.setattr(ocp.partial, "save", full)
    refused("No space left on device", source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


_LIMITED = """
import resource, signal, sys
from qspec_jax.checkpoints import converted
from qspec_jax.cli import main
converted.BATCH_BYTES = 30_000
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.argv = ["qspec", *sys.argv[2:]]
main()
"""


@pytest.mark.parametrize("most", [20, 40_000])
def test_a_file_system_that_takes_no_more(most, source, tmp_path):
    """By the kernel's own error: of our files, of Orbax's and of TensorStore's."""
    command = [sys.executable, "-c", _LIMITED, str(most), "convert", str(source), str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2 and "out: cannot be written (" in ran.stderr and "File too large" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


_INTERRUPTED = """
import contextlib, gc, itertools, os, signal, sys, threading, time
from orbax.checkpoint import v1 as ocp
from qspec_jax.checkpoints import converted
from qspec_jax.cli import main
as_tree, converted.BATCH_BYTES, when = converted.as_tree, 30_000, sys.argv.pop(1)
interrupt = lambda *_: os.kill(os.getpid(), signal.SIGINT)
def saving(folder, *args):  # as Orbax's threads would, that nothing stops
    end, files = time.monotonic() + 0.5, itertools.count()
    threading.Timer(0.05, interrupt).start()
    if when == "twice":
        threading.Timer(0.25, interrupt).start()
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / str(next(files))).touch()
def interrupted_in_gc(weights):
    gc.callbacks.append(lambda phase, info: gc.callbacks.clear() or interrupt())
    gc.collect()
    time.sleep(0.2)
    return as_tree(weights)
if when == "where nobody can catch it":
    converted.as_tree = interrupted_in_gc
else:
    ocp.partial.save = saving
main()
"""


@pytest.mark.parametrize("when", ["once", "twice", "where nobody can catch it"])
def test_interrupted(when, source, tmp_path):
    """Nothing is left, though files are written still when the signal comes."""
    command = [sys.executable, "-c", _INTERRUPTED, when, "convert", str(source), str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


_INTERRUPTED_AT_THE_END = """
import atexit, os, signal, sys
from qspec_jax.cli import main, process
class Late:  # is deleted as Python takes its modules apart
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
when = sys.argv.pop(1)
begin = process.begin
def began():
    begin()
    if when == "while functions of atexit are called":
        atexit.register(os.kill, os.getpid(), signal.SIGINT)
process.begin = began
if when == "while modules are taken apart":
    process.late = Late()
main()
"""


@pytest.mark.parametrize(
    ("when", "code"), [("never", 0), ("while functions of atexit are called", 130), ("while modules are taken apart", 0)]
)
def test_interrupted_at_the_very_end(when, code, source, tmp_path):
    """The exit code is that of Ctrl-C, or that of the work, which is done; and nothing is said of it."""
    command = [sys.executable, "-c", _INTERRUPTED_AT_THE_END, when, "convert", str(source), str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (code, "") and "tensors in float32" in ran.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"] and load_model(tmp_path / "out")


def _convert_in_a_process(source: Path, out: Path) -> None:
    converted.BATCH_BYTES = 30_000
    # To compile it would take most of the time.
    to_orbax.quantize_by_rows = lambda weight: Int4Weight(weight, weight[:, 0], weight[:, 1])
    convert(source, out, draft_bits=4, overwrite=True, progress=False)


def test_killed_at_any_moment(tmp_path):
    """Twenty times: the destination is absent, or what it was; what is left over is refused; and converting again succeeds."""
    source = write_checkpoint(tmp_path / "hf", hf_config(num_hidden_layers=1))
    expected, out = bits(load_model(source)), tmp_path / "out"

    def started(directory: Path) -> BaseProcess:
        process = processes.context().Process(target=_convert_in_a_process, args=(source, directory))
        process.start()
        return process

    for i in range(2):  # the first starts the server too
        began = time.monotonic()
        process = started(tmp_path / f"timed{i}")
        process.join(120)
        assert process.exitcode == 0
        whole = time.monotonic() - began
    r, killed = random.Random(0), 0
    for i in range(20):
        there, began = out.exists(), time.monotonic()
        process = started(out)
        process.join(r.uniform(0, 1.1) * whole)
        if process.is_alive():
            killed += 1
        else:  # other work on the machine may have come to its end
            whole = time.monotonic() - began
        process.kill()
        process.join(120)
        # Killed behind the renaming, it is there too.
        assert out.exists() or not there
        if out.exists():
            assert bits(load_model(out)) == expected
        for left in tmp_path.glob(".*.unfinished/out"):
            with pytest.raises(InputError, match="unfinished conversion"):
                load_model(left)
        if i % 5 == 4:
            convert(source, out, draft_bits=4, overwrite=True)
            assert bits(load_model(out)) == expected and not list(tmp_path.glob(".*.unfinished"))
            if i < 14:
                shutil.rmtree(out)
    assert killed >= 10
