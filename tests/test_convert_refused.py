"""What cannot be converted, and places where it cannot go, are said in one line; nothing is changed."""

import errno
import json
import shutil
from pathlib import Path

import jax
import pytest
from checkpoints import hf_config, write_checkpoint
from conversions import bits, files, refused

from convert import convert, export, verify
from pallas_kernels.formats.weights import Int4Weight
from qspec_jax.checkpoints import converted
from qspec_jax.checkpoints.converted import TARGET, restore
from qspec_jax.checkpoints.info import model_info
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.drafts.int4 import stored_int4
from qspec_jax.errors import InputError


def test_a_destination_that_exists(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out)
    before = files(out)
    refused("--overwrite", source, out)
    assert files(out) == before
    convert(source, out, dtype="bfloat16", overwrite=True)
    assert load_model(out).dtype == jax.numpy.bfloat16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    refused("not an earlier conversion", source, tmp_path / "mine", overwrite=True)
    assert files(tmp_path / "mine") == {"thesis.txt": b"years"}
    (out / "notes.txt").write_text("mine")
    refused("'notes.txt'", source, out, overwrite=True)
    (tmp_path / "file").write_text("x")
    for overwrite in (False, True):
        refused("file: exists already and is no directory", source, tmp_path / "file", overwrite=overwrite)
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty")


def test_a_destination_within_the_source(source, tmp_path):
    before = files(source)
    for place in (source, source / "out", source / ".." / "hf" / "out", tmp_path):
        refused("neither within", source, place)
    (tmp_path / "link").symlink_to(source)
    refused("neither within", source, tmp_path / "link" / "out")
    assert files(source) == before and not (source / "out").exists()


def test_a_place_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("x")
    refused("cannot be written", source, tmp_path / "file" / "out")
    refused("cannot be written", source, tmp_path / ("x" * 300))
    (tmp_path / "round").symlink_to(tmp_path / "round")
    refused("cannot be written", source, tmp_path / "round" / "out")
    refused("is a mount point", source, "/proc")


def test_a_small_file_of_the_source_that_cannot_be_read(source, tmp_path, monkeypatch):
    (source / "tokenizer.json").write_text("{}")
    read = Path.read_bytes

    def failing(path):
        if path == source / "tokenizer.json":
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    refused(f"{source / 'tokenizer.json'}: cannot be read (Input/output error)", source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_neighbours_stay_as_they_are(tmp_path):
    """Whatever they are called, the source among them."""
    source = write_checkpoint(tmp_path / "out.old", hf_config())
    mine = [tmp_path / name for name in ("out.unfinished", ".out.x.unfinished", ".out.x.old")]
    for directory in mine:
        directory.mkdir()
        (directory / "thesis.txt").write_text("years")
    before = files(source)
    for _ in range(2):
        convert(source, tmp_path / "out", overwrite=True)
    assert files(source) == before and all(files(directory) == {"thesis.txt": b"years"} for directory in mine)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.x.old", ".out.x.unfinished", "out", "out.old", "out.unfinished"]


def test_too_little_room(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    refused("GB are free", source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize("settings", [{"draft_bits": 8}, {"dtype": "int8"}])
def test_senseless_settings(settings, source, tmp_path):
    refused(str(*settings.values()), source, tmp_path / "out", **settings)


def test_a_manifest_of_another_version_and_a_broken_checkpoint(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out)
    manifest = json.loads((out / "qspec.json").read_text())
    broken = (
        *({"format": 1}, {"dtype": "int8"}, {"more": 1}, {"source": None}),
        *({"shapes": []}, {"shapes": {"x": None}}, {"shapes": {"x": [1.5]}}, {"sha256": []}, {"sha256": {"x": 1}}),
        *({"written": None}, {"written": {"target": 3, "draft": []}}, {"written": {"target": {"x": 3}, "draft": {}}}),
        *({"packed": []}, {"packed": {"x": 1}}, {"packed": {"x": {name: [[1], "uint8"] for name in ("codes", "scale", "zero")}}}),
        *({"files": {"x": "1"}}, {"versions": []}, {"versions": {"jax": 1}}),
    )
    for changed in broken:
        (out / "qspec.json").write_text(json.dumps(manifest | changed))
        with pytest.raises(InputError, match="not a manifest of format 3"):
            load_model(out)
    (out / "qspec.json").write_text(json.dumps(manifest))
    load_model(out)
    config = json.loads((out / "config.json").read_text())
    for changed in ({"num_hidden_layers": 3}, {"intermediate_size": 32}):
        (out / "config.json").write_text(json.dumps(config | changed))
        for reads in (load_model, model_info, lambda out: export(out, tmp_path / "back")):
            with pytest.raises(InputError, match=r"config.json is not the one that was converted: layers\.\d"):
                reads(out)
    (out / "config.json").write_text(json.dumps(config))
    largest = max((out / "target").rglob("*"), key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    for spoil in (lambda: largest.write_bytes(whole[:-1]), largest.unlink):
        spoil()
        for reads in (load_model, model_info, lambda out: export(out, tmp_path / "back"), lambda out: verify(source, out)):
            with pytest.raises(InputError, match="is not there, or not whole; copy it again"):
                reads(out)
    convert(source, out, overwrite=True)
    assert bits(load_model(out)) == bits(load_model(source))


def test_what_orbax_cannot_read_is_said_in_one_line(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out)
    file = out / "target" / "state" / "manifest.ocdbt"
    file.write_bytes(bytes(len(file.read_bytes())))
    shape = jax.ShapeDtypeStruct((hf_config()["hidden_size"],), jax.numpy.float32)
    with pytest.raises(InputError, match="cannot be restored") as error:
        restore(out, TARGET, {"norm.weight": shape})  # one: of more, Orbax says the first error and closes its loop while the others come
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("lost", ["head", "layers.1.up_proj.weight"])
def test_a_weight_that_is_not_stored_is_named(lost, source, tmp_path, monkeypatch):
    """As Orbax would give back the description of what it does not find, when it loads in part."""
    out = tmp_path / "out"
    kept = converted.as_tree
    monkeypatch.setattr(converted, "as_tree", lambda weights: kept({path: w for path, w in weights.items() if path != lost}))
    convert(source, out)
    for reads in (load_model, lambda out: export(out, tmp_path / "back"), lambda out: verify(source, out)):
        with pytest.raises(InputError, match=f"target: {lost} of it is not stored; copy it again, or convert again"):
            reads(out)


@pytest.mark.parametrize("part", ["codes", "scale"])
def test_a_part_of_the_drafts_weight_that_is_not_stored_is_named(part, source, tmp_path, monkeypatch):
    kept = converted._as_dict
    without = lambda weight: {k: v for k, v in kept(weight).items() if k != part} if isinstance(weight, Int4Weight) else weight
    with monkeypatch.context() as changed:
        changed.setattr(converted, "_as_dict", without)
        convert(source, tmp_path / "out", draft_bits=4)
    model = load_model(tmp_path / "out")
    with pytest.raises(InputError, match=r"draft: layers\.0\.\w+\.weight and \d+ more of it is not stored"):
        stored_int4(tmp_path / "out", model)
