"""Files that appear whole or not at all, what killed processes leave, and errors in one line."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qspec_jax.errors import InputError, one_line, reading, with_type, writing
from qspec_jax.files import UNFINISHED, half_written, is_replaced, is_same_file, output_to, whole_file, whole_folder, write_json

_KILLED = """
import os, signal, sys
from pathlib import Path
from qspec_jax.files import whole_file
with whole_file(Path(sys.argv[1])) as unfinished:
    unfinished.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_whole_or_what_it_was(tmp_path):
    path = tmp_path / "file.bin"
    for before in (None, b"first"):
        with pytest.raises(KeyboardInterrupt), whole_file(path) as unfinished:
            unfinished.write_bytes(b"half")
            assert unfinished.suffix == ".bin" and (path.read_bytes() if before else path.exists()) == (before or False)
            raise KeyboardInterrupt
        assert names(tmp_path) == ["file.bin"] * (before is not None)
        with whole_file(path) as unfinished:
            unfinished.write_bytes(b"first" if before is None else b"second")
    assert path.read_bytes() == b"second" and names(tmp_path) == ["file.bin"]
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "no" / "file"):
        pytest.fail("there is no such folder")
    with pytest.raises(IsADirectoryError), whole_file(tmp_path):
        pytest.fail("it is a folder")


def test_removing_goes_on_after_an_interruption(tmp_path, monkeypatch):
    remove, interrupted = shutil.rmtree, []

    def once_interrupted(*args, **settings):
        if not interrupted:
            interrupted.append(args)
            raise KeyboardInterrupt
        remove(*args, **settings)

    monkeypatch.setattr(shutil, "rmtree", once_interrupted)
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "folder", lambda: None) as unfinished:
        (unfinished / "half").write_text("half")
        assert half_written == {unfinished.parent}
        raise OSError("no space")
    assert interrupted and not names(tmp_path) and not half_written


def test_what_a_killed_process_leaves_is_removed_and_what_is_under_way_is_not(tmp_path):
    path, other = tmp_path / "state[1]", tmp_path / "state"
    path.write_bytes(b"before")
    for target in (path, other):
        ran = subprocess.run([sys.executable, "-c", _KILLED, str(target)], timeout=60)
        assert ran.returncode < 0
    assert path.read_bytes() == b"before" and not other.exists()
    assert len(list(tmp_path.glob(".*.unfinished/state?1]"))) == len(list(tmp_path.glob(".*.unfinished/state"))) == 1
    with whole_file(path) as first:
        first.write_bytes(b"first")
        with whole_file(path) as second:
            second.write_bytes(b"second")
            assert first.exists()
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert len(names(tmp_path)) == 2 and not list(tmp_path.glob(".*.unfinished/state?1]"))
    write_json(other, {"a": [1]})
    assert names(tmp_path) == ["state", "state[1]"] and other.read_text() == '{\n  "a": [\n    1\n  ]\n}\n'


def test_links_permissions_and_devices(tmp_path):
    target, link, loop, fifo = (tmp_path / name for name in ("target", "link", "loop", "fifo"))
    link.symlink_to(target)
    loop.symlink_to(loop)
    old = os.umask(0o027)
    try:
        with whole_file(link) as unfinished:
            unfinished.touch(0o600)  # as safetensors does
    finally:
        os.umask(old)
    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o640
    target.chmod(0o604)
    with whole_file(link) as unfinished:
        unfinished.touch()
    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o604
    with pytest.raises(InputError, match="a loop of symbolic links"), whole_file(loop):
        pytest.fail("it leads nowhere")
    os.mkfifo(fifo)
    with whole_file(fifo) as unfinished:
        assert unfinished == fifo
    assert fifo.is_fifo() and names(tmp_path) == ["fifo", "link", "loop", "target"]


def test_the_longest_names_a_file_can_have(tmp_path):
    """They are written; what is too long is refused before the work, whose result would be lost."""
    for length in (245, 246, 255):
        path = tmp_path / ("a" * length)
        with output_to(path) as write:
            write("text")
        assert path.read_text() == "text"
        with whole_folder(tmp_path / ("b" * length), lambda: None) as unfinished:
            (unfinished / "file").touch()
    before = names(tmp_path)
    assert len(before) == 6
    deep = tmp_path / "d"
    while len(str(deep)) < 4000:
        deep = deep / ("d" * 90)
    deep.mkdir(parents=True)
    # The folder's path is not too long, and the file's is.
    for path in (tmp_path / ("a" * 256), tmp_path / ("a" * 300), deep / ("a" * 200)):
        with pytest.raises(InputError, match=r"cannot be written \(File name too long"), output_to(path):
            pytest.fail("the work has begun")
    shutil.rmtree(tmp_path / "d")
    assert names(tmp_path) == before and is_replaced(tmp_path / ("a" * 300))


def test_what_would_be_read_and_replaced(tmp_path):
    one, other, link = (tmp_path / name for name in ("one", "other", "link"))
    one.touch()
    link.symlink_to(one)
    assert is_same_file(one, one) and is_same_file(link, one) and is_same_file(one, link)
    for pair in ((one, other), (other, other), (one, tmp_path / ("a" * 300)), (tmp_path, tmp_path), (Path("/dev/null"), Path("/dev/null"))):
        assert not is_same_file(*pair)


def test_a_folder_called_as_the_marker(tmp_path):
    """Whatever its name is, and in a folder that is itself being written."""
    with whole_folder(tmp_path / "out", lambda: None) as outer, whole_file(outer / UNFINISHED) as unfinished:
        unfinished.write_bytes(b"x")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == [UNFINISHED]


def test_errors_are_one_line():
    full = OSError(errno.ENOSPC, "No space left on device", "/somewhere/hidden")
    assert one_line(full) == "No space left on device" and one_line(OSError("lost\n the  connection")) == "lost the connection"
    assert with_type(ValueError("a\n\nb")) == "ValueError: a b" and len(one_line(ValueError("x" * 1000))) == 300
    for manager, verb in ((reading, "read"), (writing, "written")):
        with pytest.raises(InputError) as said, manager("file"):
            raise full
        assert str(said.value) == f"file: cannot be {verb} (No space left on device)"
        with pytest.raises(InputError, match="mine"), manager("file", ValueError):
            raise InputError("mine")
        with pytest.raises(InputError, match=rf"file: cannot be {verb} \(odd\)"), manager("file", ValueError):
            raise ValueError("odd")
        with pytest.raises(ValueError, match="odd") as raised, manager("file"):
            raise ValueError("odd")
        assert type(raised.value) is ValueError
