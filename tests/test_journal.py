"""The journal of a batch beside hostile neighbours: what lies in its place, what comes there meanwhile, outputs that nothing replaces."""

import contextlib
import errno
import fcntl
import json
import os
import resource
import threading
from pathlib import Path

import pytest
from checkpoints import hf_config, write_checkpoint

from convert.to_orbax import convert
from qspec_jax import demo
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.cli import batch
from qspec_jax.decoding.journal import DEPENDS_ON, Journal, run_hashes
from qspec_jax.decoding.run_identity import of_checkpoint
from qspec_jax.errors import InputError

RUN = dict.fromkeys(DEPENDS_ON, "a hash")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["pipe", "link", "loop", "folder", "socket"])
def test_what_is_no_journal_stays_as_it_is(kind, tmp_path):
    path, other = tmp_path / "out.partial", tmp_path / "other"
    other.write_text("")
    make = {
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(other),
        "loop": lambda: path.symlink_to(path),
        "folder": path.mkdir,
        "socket": lambda: os.mknod(path, 0o140600),
    }
    make[kind]()
    for overwrite in (False, True):
        with pytest.raises(InputError, match=r"out\.partial: not what a run has left, so --overwrite does not touch it; move it away"):
            Journal(tmp_path / "out", RUN, overwrite=overwrite)
    assert names(tmp_path) == ["other", "out.partial"] and other.read_text() == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_in_the_journal_s_place(tmp_path):
    os.mknod(tmp_path / "out.partial", 0o020600, os.makedev(1, 3))  # as /dev/null
    with pytest.raises(InputError, match="not what a run has left"):
        Journal(tmp_path / "out", RUN, overwrite=True)


@pytest.mark.parametrize("journal_stays", [False, True])
def test_an_output_that_came_before_the_journal_was_locked(journal_stays, tmp_path, monkeypatch):
    """Another process has finished just then; its journal is gone, or this one has made it anew."""
    out, path, lock = tmp_path / "out", tmp_path / "out.partial", fcntl.flock

    def late(file, how):
        monkeypatch.setattr(fcntl, "flock", lock)
        out.write_text("theirs")
        if not journal_stays:
            path.unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(InputError, match="out: exists already; --overwrite replaces it"):
        Journal(out, RUN, overwrite=False)
    assert names(tmp_path) == ["out"] and out.read_text() == "theirs"


def test_a_journal_that_another_process_removes_is_made_anew(tmp_path, monkeypatch):
    path, lock = tmp_path / "out.partial", fcntl.flock

    def late(file, how):
        monkeypatch.setattr(fcntl, "flock", lock)
        path.unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    journal = Journal(tmp_path / "out", RUN, overwrite=False)
    assert path.read_bytes().count(b"\n") == 1
    with pytest.raises(InputError, match="another process"):
        Journal(tmp_path / "out", RUN, overwrite=False)
    journal.add({"line": 1})
    journal.finish()
    assert names(tmp_path) == ["out"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_that_cannot_be_opened_is_refused_before_the_work(tmp_path):
    os.mknod(tmp_path / "device", 0o020600, os.makedev(250, 7))
    with pytest.raises(InputError, match=r"device: cannot be written \(No such device or address\)"):
        Journal(tmp_path / "device", RUN, overwrite=False)


def test_a_pipe_is_open_from_the_beginning(tmp_path):
    """So its reader, who waits for it to be opened, goes on before the work."""
    fifo, opened, read = tmp_path / "fifo", threading.Event(), []
    os.mkfifo(fifo)

    def reads():
        with fifo.open() as file:
            opened.set()
            read.append(file.read())

    reader = threading.Thread(target=reads, daemon=True)
    reader.start()
    journal = Journal(fifo, RUN, overwrite=False)
    assert opened.wait(60)
    journal.add({"line": 2})
    journal.add({"line": 1})
    assert reader.is_alive() and not read
    journal.finish()
    reader.join(60)
    assert read == ['{"line": 1}\n{"line": 2}\n'] and names(tmp_path) == ["fifo"]


def test_names_that_leave_no_room_for_another(tmp_path):
    """The longest name that a journal has room for is written; a longer one is refused before any work."""
    for length in (240, 247):
        journal = Journal(tmp_path / ("a" * length), RUN, overwrite=False)
        journal.add({"line": 1})
        journal.finish()
        assert (tmp_path / ("a" * length)).read_text() == '{"line": 1}\n'
    before = names(tmp_path)
    for length in (248, 255, 256, 300):
        with pytest.raises(InputError, match=r"cannot be written \(File name too long"):
            Journal(tmp_path / ("a" * length), RUN, overwrite=False)
    assert names(tmp_path) == before


def test_a_journal_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "out.partial").write_text("[" * 100_000 + "\n")
    with pytest.raises(InputError, match="not what a run has left"):
        Journal(tmp_path / "out", RUN, overwrite=False)


def test_standard_output_by_its_short_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal = Journal(Path("-"), RUN, overwrite=False)
    journal.add({"line": 1})
    journal.finish()
    assert capsys.readouterr().out == '{"line": 1}\n' and names(tmp_path) == []


def test_a_run_sees_weights_that_were_changed_in_place_with_their_time_set_back(tmp_path):
    write_checkpoint(tmp_path, hf_config())
    weights, seen = tmp_path / "model.safetensors", of_checkpoint(tmp_path)
    found = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    with weights.open("r+b") as file:
        file.write(content)
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    now = weights.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (found.st_size, found.st_mtime_ns, found.st_ino)
    assert of_checkpoint(tmp_path) != seen


def test_what_loading_refuses_is_not_refused_before(tmp_path):
    """The hash comes first, and loading has the better messages."""
    write_checkpoint(tmp_path, hf_config())
    for map_of_weights in ({"a": "no such file"}, {"a": "\udcff\ud800"}, {"a": "a\0b"}, {"a": 3}, [], None):
        (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {json.dumps(map_of_weights)}}}')
        of_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    of_checkpoint(tmp_path)


def test_weights_that_change_while_they_are_loaded(fails, tmp_path, monkeypatch):
    """Results of both would be one file's: those that were made before a restart are of what was there before."""
    model, source = tmp_path / "model", tmp_path / "in.jsonl"
    write_checkpoint(model, hf_config(vocab_size=4096, num_hidden_layers=1), tokenizer=demo.MODEL)
    source.write_text('{"token_ids": [1]}')
    load = batch.load

    def slow(*args, **settings):
        loaded = load(*args, **settings)
        os.utime(model / "model.safetensors", (1, 1))
        return loaded

    monkeypatch.setattr(batch, "load", slow)
    fails(["batch", source, tmp_path / "out", "--model", model, "--max-new-tokens", 2], model, "its files changed while they were loaded")
    assert names(tmp_path) == ["in.jsonl", "model"]


def test_a_conversion_with_a_link_that_leads_nowhere(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out)
    seen = of_checkpoint(out)
    (out / "target" / "x").symlink_to("nowhere")
    assert load_model(out, progress=False).config.num_layers == 2 and of_checkpoint(out) == seen
    stored = next(path for path in (out / "target").rglob("*") if path.is_file())
    stored.rename(tmp_path / "moved")
    stored.symlink_to("nowhere")
    with pytest.raises(InputError, match="is not there, or not whole"):
        load_model(out, progress=False)


def test_a_full_disk_while_the_first_line_is_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "_write", full)
    with pytest.raises(InputError, match=r"out\.partial: cannot be written \(No space left on device\)"):
        Journal(tmp_path / "out", RUN, overwrite=False)
    assert names(tmp_path) == []


@contextlib.contextmanager
def files_of_at_most(size: int):
    """The system refuses to write more to a file, as where the disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("where", ["journal", "output"])
def test_a_full_disk_loses_nothing(where, tmp_path):
    """Wherever it is full, the message says that the same command goes on, and it does."""
    out, path = tmp_path / "out", tmp_path / "out.partial"
    journal = Journal(out, RUN, overwrite=False)
    journal.add({"line": 1, "text": "a" * 1000})
    goes_on = rf"\(File too large\); the same command, with the same input, goes on from {path}"
    with files_of_at_most(path.stat().st_size + 10 if where == "journal" else 100):
        with pytest.raises(InputError, match=goes_on):
            if where == "journal":
                journal.add({"line": 2, "text": "b" * 1000})
            journal.finish()
        journal.close()
    assert names(tmp_path) == ["out.partial"]
    again = Journal(out, RUN, overwrite=False)
    assert list(again.done) == [1]
    again.add({"line": 2})
    again.finish()
    assert names(tmp_path) == ["out"] and [json.loads(line)["line"] for line in out.read_text().splitlines()] == [1, 2]


def test_a_full_device_has_nothing_to_go_on_from():
    journal = Journal(Path("/dev/full"), RUN, overwrite=False)
    journal.add({"line": 1})
    with pytest.raises(InputError, match=r"^/dev/full: cannot be written \(No space left on device\)$"):
        journal.finish()
    journal.close()


@pytest.mark.parametrize("found", [0, 1])
def test_only_a_run_with_results_leaves_a_journal(found, tmp_path):
    """One that is refused after it was opened has nothing to go on from; and to close it again is not to take another's away."""
    path = tmp_path / "out.partial"
    journal = Journal(tmp_path / "out", RUN, overwrite=False)
    for number in range(found):
        journal.add({"line": number})
    journal.close()
    assert path.exists() == bool(found)
    other = Journal(tmp_path / "out", RUN, overwrite=False)
    journal.close()
    assert path.exists() and list(other.done) == list(range(found))
    other.close()


def test_a_journal_in_its_form_goes_on(tmp_path):
    """The bytes are spelled out here: a journal outlives the program that wrote it."""
    path = tmp_path / "out.partial"
    path.write_bytes(json.dumps({"run": RUN}).encode() + b'\n{"line": 2, "text": "\\u00e9"}\n{"line": 1, "te')
    journal = Journal(tmp_path / "out", RUN, overwrite=False)
    assert journal.done == {2: {"line": 2, "text": "é"}}
    journal.add({"line": 1})
    assert path.read_bytes() == json.dumps({"run": RUN}).encode() + b'\n{"line": 2, "text": "\\u00e9"}\n{"line": 1}\n'
    journal.finish()
    assert (tmp_path / "out").read_text() == '{"line": 1}\n{"line": 2, "text": "\\u00e9"}\n'


def test_a_run_of_the_version_before_does_not_go_on(fails, tmp_path):
    """Its settings and its version were hashed in another way; the input was hashed as it is now."""
    lines = "".join(json.dumps({"prompt": f"def f{i}(x):", "max_new_tokens": 4}) + "\n" for i in range(4))
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines)
    old = {
        "prompts": "f8a3eda14a95026b1ed8f9b07298228b6e803127ab12a2c97155d3c969ab36f0",
        "settings": "3dfc3a5a383a25c336a0fcaa5b97eced5082db547061c6329204f839405dbd91",
        "checkpoint": run_hashes(**{key: [b""] for key in DEPENDS_ON} | {"checkpoint": of_checkpoint(demo.MODEL)})["checkpoint"],
        "version": "8309566e8f0789c888565f3c532ebfd989f4dbafcfdbf26d5fa042d318eedd83",
    }
    assert run_hashes(**{key: [b""] for key in DEPENDS_ON} | {"prompts": [lines.encode()]})["prompts"] == old["prompts"]
    left = json.dumps({"run": old}) + "\n" + json.dumps({"line": 1, "text": "theirs"}) + "\n"
    (tmp_path / "out.jsonl.partial").write_text(left)
    settings = ["--draft", "none", "--cache", "full", "--max-new-tokens", 4, "--batch-size", 1]
    fails(
        ["batch", source, output, "--model", demo.MODEL, *settings],
        "is of a run with another version of this program; --overwrite drops the 1 lines that are done there",
    )
    assert (tmp_path / "out.jsonl.partial").read_text() == left and not output.exists()
