"""Conversion: what arrives is what direct loading gives, and what was exported what it was."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import sharing
import simulated_devices
from checkpoints import CASES, hf_config, random_tensors, write_checkpoint
from conversions import bits, files, refused
from safetensors.numpy import load_file
from tiers import in_system

from convert import by_rows, convert, export, to_hf, verify
from convert.by_rows import stored_error
from pallas_kernels.formats.weights import Int4Weight, dequantize_weight
from qspec_jax import drafts, load
from qspec_jax.checkpoints import converted
from qspec_jax.checkpoints.huggingface import load_config
from qspec_jax.checkpoints.info import model_info
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.drafts.int4 import stored_int4
from qspec_jax.errors import InputError
from qspec_jax.quantization.weights import quantize_weight

# What arrives ---------------------------------------------------------------------------------------------------------


FAMILIES = ["llama-biases", "qwen3-biases", "mistral-default", "phi3-longrope", "smollm3-interval", "internlm3-biases"]


# How many bytes a number has does not depend on the family; phi3's tensors are split as they are read. More families: test_families.py.
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *(("llama-biases", "float32"), ("phi3-longrope", "bfloat16")),
        *in_system(*((case, "float32") for case in FAMILIES[1:]), ("llama-biases", "bfloat16")),
    ],
)
def test_a_converted_model_is_the_one_that_is_loaded_directly(case, dtype, tmp_path, monkeypatch):
    for name in ("BATCH_BYTES", "LOADED_BYTES"):
        monkeypatch.setattr(converted, name, 30_000)
    source = write_checkpoint(tmp_path / "hf", CASES[case] | {"dtype": dtype}, dtype=dtype, shards=2)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    before = files(source)
    report = convert(source, tmp_path / "out")
    assert files(source) == before and report.tensors == len(load_model(source).weights())
    assert bits(load_model(tmp_path / "out")) == bits(load_model(source))
    assert load_config(tmp_path / "out") == load_config(source)
    assert model_info(tmp_path / "out") == model_info(source)
    assert stored_int4(tmp_path / "out", load_model(tmp_path / "out")) is None


@pytest.mark.parametrize(
    ("stored", "converted", "loaded"),
    [("float32", "bfloat16", None), ("bfloat16", "float32", None), ("float16", None, None), ("bfloat16", None, "float32")],
)
def test_dtypes(stored, converted, loaded, tmp_path):
    source = write_checkpoint(tmp_path / "hf", hf_config(dtype=stored), dtype=stored)
    report = convert(source, tmp_path / "out", dtype=converted)
    assert report.dtype == converted or converted is None
    assert bits(load_model(tmp_path / "out", dtype=loaded)) == bits(load_model(source, dtype=loaded or converted))


@pytest.mark.parametrize("dtype", ["float32", *in_system("bfloat16")])
def test_the_draft_is_the_one_that_is_made_of_the_model(dtype, tmp_path, monkeypatch):
    for name in ("BATCH_BYTES", "LOADED_BYTES"):
        monkeypatch.setattr(converted, name, 30_000)
    source = write_checkpoint(tmp_path / "hf", hf_config(dtype=dtype, num_hidden_layers=1, tie_word_embeddings=True), dtype=dtype)
    assert convert(source, tmp_path / "out", draft_bits=4).draft_bits == 4
    model = load_model(tmp_path / "out")
    draft = drafts.make_draft("quantspec", model)
    expected = drafts.quantspec(load_model(source))
    assert (draft.step.view, draft.head_bits) == (expected.step.view, expected.head_bits)
    assert bits(stored_int4(tmp_path / "out", model)) == bits(draft.step.model) == bits(expected.step.model)
    assert sum(isinstance(weight, Int4Weight) for weight in draft.step.model.weights().values()) == 7
    assert jax.tree.structure(draft) == jax.tree.structure(expected)
    (tmp_path / "out").rename(tmp_path / "moved")
    with pytest.raises(InputError, match="out: no such directory, where the model was loaded from"):
        drafts.make_draft("quantspec", model)
    (tmp_path / "moved").rename(tmp_path / "out")
    if dtype == "float32":  # to compile the other takes twice as long, and says no more
        run, settings = generate, dict(max_new_tokens=9, num_speculative_tokens=3)
        found = [
            run(m, [[1, 2, 3] * 9], config=GenerationConfig(draft=d, **settings))
            for m, d in ((model, draft), (load_model(source), "quantspec"))
        ]
        assert found[0].token_ids == found[1].token_ids
    other = "bfloat16" if dtype == "float32" else "float32"
    assert stored_int4(tmp_path / "out", load_model(tmp_path / "out", dtype=other)) is None


def test_rows_are_quantized_some_at_a_time(monkeypatch):
    monkeypatch.setattr(by_rows, "ROWS_SIZE", 40 * 96)
    weight = np.random.default_rng(0).standard_normal((100, 96)).astype(np.float32)
    parts, whole = by_rows.quantize_by_rows(weight), quantize_weight(weight)
    assert jax.tree.map(lambda x: (x.dtype, x.shape), parts) == jax.tree.map(lambda x: (x.dtype, x.shape), whole)
    # XLA adds in another order, by which scales differ in their last bits, and now and then a code.
    np.testing.assert_allclose(parts.scale, whole.scale, rtol=1e-5)
    error = lambda found: np.square(dequantize_weight(found, np.float32) - weight).mean(1)
    np.testing.assert_allclose(error(parts), error(whole), rtol=1e-4)


@pytest.mark.system
def test_over_a_mesh(tmp_path):
    source = write_checkpoint(tmp_path / "hf", hf_config(num_key_value_heads=4, num_hidden_layers=1, head_dim=128, intermediate_size=512))
    convert(source, tmp_path / "out", draft_bits=4)
    script = """
import sys, jax, numpy as np
from qspec_jax.checkpoints.loading import load_model
from qspec_jax import GenerationConfig, drafts, generate
mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
direct, *others = (load_model(d, mesh=m).weights() for d, m in ((sys.argv[1], None), (sys.argv[1], mesh), (sys.argv[2], mesh)))
for weights in others:
    for path, weight in weights.items():
        assert np.array_equal(np.asarray(weight), np.asarray(direct[path])), path
        assert weight.sharding.mesh == mesh and len(weight.sharding.device_set) == 4
        inputs = "o_proj" in path or "down_proj" in path
        assert weight.sharding.shard_shape(weight.shape)[inputs] * (4 if weight.ndim > 1 else 1) == weight.shape[inputs], path
model = load_model(sys.argv[2], mesh=mesh)
draft = drafts.make_draft("quantspec", model)
assert len(draft.step.model.layers[0].q_proj.weight.get_value().codes.sharding.device_set) == 4
of = lambda draft: GenerationConfig(draft=draft, max_new_tokens=5, num_speculative_tokens=2)
found = [generate(m, [[1, 2, 3]], config=of(d)).token_ids for m, d in ((model, draft), (load_model(sys.argv[1]), "quantspec"))]
assert found[0] == found[1], found
"""
    env, command = simulated_devices.environment(4) | sharing.environment(), [sys.executable, "-c", script, source, tmp_path / "out"]
    run = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]


def test_the_tokenizer_comes_along_and_no_code(tmp_path):
    from tokenizers import Tokenizer, models

    source = write_checkpoint(tmp_path / "hf", hf_config())
    Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (source / "modeling_evil.py").write_text("raise SystemExit")
    convert(source, tmp_path / "out")
    assert load(tmp_path / "out")[1].encode("ab") == [0, 1]
    assert not list((tmp_path / "out").rglob("*.py"))


# And back, and compared -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama-biases", "phi3-longrope", *in_system("smollm3-interval")])
def test_exported_it_is_what_it_was(case, tmp_path, monkeypatch):
    monkeypatch.setattr(to_hf, "SHARD_BYTES", 40_000 if case == "phi3-longrope" else 10**9)
    source = write_checkpoint(tmp_path / "hf", CASES[case])
    (source / "tokenizer.json").write_text("{}")
    convert(source, tmp_path / "out", draft_bits=4)
    report = export(tmp_path / "out", tmp_path / "back")
    shards = [load_file(tmp_path / "back" / file) for file in report.files]
    found = {name: tensor for shard in shards for name, tensor in shard.items()}
    expected = load_file(source / "model.safetensors")
    assert found.keys() == expected.keys() and report.tensors == len(expected) == sum(map(len, shards))
    assert all(found[name].dtype == x.dtype and found[name].tobytes() == x.tobytes() for name, x in expected.items())
    assert (len(shards) > 1) == (case == "phi3-longrope")
    assert bits(load_model(tmp_path / "back")) == bits(load_model(source)) and (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    for place, named in ((tmp_path / "back", "exists already"), (tmp_path / "out" / "in", "neither within")):
        with pytest.raises(InputError, match=named):
            export(tmp_path / "out", place)
    with pytest.raises(InputError, match="not a converted checkpoint"):
        export(source, tmp_path / "again")


def test_an_export_of_what_was_damaged(source, tmp_path):
    convert(source, tmp_path / "out")
    largest = max((tmp_path / "out" / "target").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(InputError, match="is not what was written; copy it again"):
        export(tmp_path / "out", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_an_export_has_the_dtype_of_the_conversion(source, tmp_path):
    convert(source, tmp_path / "out", dtype="bfloat16")
    assert model_info(tmp_path / "out").dtype == "bfloat16"
    export(tmp_path / "out", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    assert bits(load_model(tmp_path / "back")) == bits(load_model(source, dtype="bfloat16"))


def another(source: Path, place: Path) -> Path:
    """A checkpoint as `source`, but for the last row of one matrix."""
    tensors = random_tensors(hf_config())
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].copy()
    tensors["model.layers.1.mlp.up_proj.weight"][-1] = -tensors["model.layers.1.mlp.up_proj.weight"][-1]
    found = write_checkpoint(place, hf_config(), tensors=tensors)
    (found / "tokenizer.json").write_text((source / "tokenizer.json").read_text())
    return found


def test_verify(source, tmp_path, monkeypatch):
    monkeypatch.setattr(converted, "BATCH_BYTES", 30_000)
    out = tmp_path / "out"
    (source / "tokenizer.json").write_text("{}")
    convert(source, out, draft_bits=4)
    report = verify(source, out)
    assert not report.wrong and report.logits and (report.weights, report.drafted) == (21, 14) and 0 < report.draft_error <= 1
    first, second, third = verify(another(source, tmp_path / "other"), out).wrong
    assert "is not the tensor that was converted" in first and "layers.1.up_proj.weight differs from" in second and "as it may" in third
    with pytest.raises(InputError, match="is a conversion; give its source first"):
        verify(out, source)
    with pytest.raises(InputError, match="its config"):
        verify(write_checkpoint(tmp_path / "third", hf_config(rms_norm_eps=1e-3)), out)
    with pytest.raises(InputError, match="not a converted checkpoint"):
        verify(source, source)


@pytest.mark.system
def test_verify_sees_what_was_changed(source, tmp_path, monkeypatch):
    """Another conversion in the place of this one, the small files, of either; a bit of the draft, which errs no more for it; what can only
    be in the logits."""
    monkeypatch.setattr(converted, "BATCH_BYTES", 30_000)
    out = tmp_path / "out"
    (source / "tokenizer.json").write_text("{}")
    convert(source, out, draft_bits=4)
    other = another(source, tmp_path / "other")
    convert(other, tmp_path / "others")
    shutil.rmtree(out / "target")
    shutil.copytree(tmp_path / "others" / "target", out / "target")
    with pytest.raises(InputError, match="is not there, or not whole"):
        verify(source, out)
    manifest = json.loads((out / "qspec.json").read_text())
    (out / "qspec.json").write_text(json.dumps(manifest | {"files": converted.stored_files(out)}))
    assert verify(source, out).wrong == ["layers.1.up_proj.weight differs from model.layers.1.mlp.up_proj.weight"]
    convert(source, out, overwrite=True, draft_bits=4)
    for directory in (source, out):
        (directory / "vocab.json").write_text("{}")
        assert verify(source, out).wrong == ["vocab.json is not the source's"]
        (directory / "vocab.json").unlink()
    manifest = json.loads((out / "qspec.json").read_text())
    manifest["written"]["draft"]["layers.0.q_proj.weight"] = "0"
    (out / "qspec.json").write_text(json.dumps(manifest))
    assert verify(source, out).wrong == ["the draft's layers.0.q_proj.weight is not what was written"]
    convert(source, out, overwrite=True)
    logits = iter([np.zeros(3), np.ones(3)])
    monkeypatch.setattr("convert.compare._logits", lambda model: next(logits))
    assert verify(source, out).wrong == ["the logits differ"]


@pytest.mark.parametrize(
    ("scale", "width", "dtype"),
    [
        *((1e-39, 50, "float32"), (1.0, 256, "bfloat16")),
        *in_system(*((scale, 50, dtype) for scale in (1e-36, 1.0, 1e36) for dtype in ("float32", "bfloat16"))),
        *in_system((1e-39, 50, "bfloat16"), (1.0, 256, "float32")),
    ],
)
def test_the_draft_s_bound_holds_and_binds(dtype, scale, width, monkeypatch):
    weight = jax.numpy.asarray(scale * np.random.default_rng(0).standard_t(2, (48, width)), dtype)
    monkeypatch.setattr("convert.by_rows.ROWS_SIZE", 10 * width)
    quantized = quantize_weight(weight)
    assert stored_error(quantized, np.asarray(weight)) <= 1
    if scale < 1e-30:  # zeros on some machines
        monkeypatch.setattr("convert.by_rows.ROWS_SIZE", width)
        assert stored_error(by_rows.quantize_by_rows(np.asarray(weight)), np.asarray(weight)) <= 1
        return
    assert not stored_error(jax.tree.map(jax.numpy.zeros_like, quantized), np.asarray(weight)) <= 1
    code = quantized.codes[3, 1, 2]
    nan, far = (np.asarray(weight.at[3, 7].set(value)) for value in (np.nan, 200 * scale))
    assert stored_error(quantized, nan) <= 1 < stored_error(quantized, far)
    for change in (
        {"codes": quantized.codes.at[3, 1].set(quantized.codes[3, 1] ^ 0x11)},
        {"codes": quantized.codes.at[3, 1, 2].set((code & 0xF0) | (code + 8 & 0x0F))},
        {"scale": quantized.scale * 1.05},
        {"zero": quantized.zero.at[3, 1].set(np.nan)},
    ):
        assert not stored_error(dataclasses.replace(quantized, **change), np.asarray(weight)) <= 1


def test_relative_paths_and_links(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    convert("hf", "out", draft_bits=4)
    assert bits(load_model("out")) == bits(load_model("hf"))
    assert stored_int4("out", load_model("out")) is not None
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    convert("hf", "link")
    convert("hf", "link", overwrite=True)
    assert (tmp_path / "link").is_symlink() and bits(load_model("link")) == bits(load_model("hf"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert("../hf", ".")
    assert bits(load_model(tmp_path / "here")) == bits(load_model(source))


@pytest.mark.parametrize("name", ["out[1]", *in_system("o*", "a\\b")])
def test_names_that_orbax_takes_for_patterns(name, source, tmp_path):
    around = tmp_path / name
    convert(source, around / name, draft_bits=4)
    assert not verify(source, around / name).wrong
    assert stored_int4(around / name, load_model(around / name)) is not None
    export(around / name, around / "back")
    assert bits(load_model(around / "back")) == bits(load_model(source))
    assert sorted(path.name for path in around.iterdir()) == sorted([name, "back"])


def test_nor_are_they_for_temporary_files(source, tmp_path, monkeypatch):
    (tmp_path / "t[1]").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t[1]"))
    refused("set TMPDIR", source, tmp_path / "out[1]")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "t[1]"]


def test_a_byte_order_mark_stays_behind(source, tmp_path):
    (source / "generation_config.json").write_text('{"eos_token_id": 5}', encoding="utf-8-sig")
    (source / "config.json").write_text((source / "config.json").read_text(), encoding="utf-8-sig")
    convert(source, tmp_path / "out")
    assert not verify(source, tmp_path / "out", logits=False).wrong
    export(tmp_path / "out", tmp_path / "back")
    for directory in (tmp_path / "out", tmp_path / "back"):
        assert load_config(directory).eos_token_ids == (5,)
        assert all(json.loads((directory / name).read_text(encoding="utf-8")) for name in ("config.json", "generation_config.json"))


def test_what_the_manifest_says_and_what_is_checked(source, tmp_path):
    report = convert(source, tmp_path / "out", draft_bits=4, dtype="bfloat16")
    manifest = json.loads((tmp_path / "out" / "qspec.json").read_text())
    tensors = {path: load_model(source).weights()[path] for path in manifest["sha256"]}
    assert {path: hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for path, x in tensors.items()} == manifest["sha256"]
    assert report.bytes_read == sum(x.nbytes for x in tensors.values()) < 2 * report.bytes_written
    model = load_model(tmp_path / "out")
    expected = drafts.quantspec(load_model(source, dtype="bfloat16")).step.model
    assert bits(stored_int4(tmp_path / "out", model)) == bits(expected)
    refused("is converted already", tmp_path / "out", tmp_path / "again")
    tensors = random_tensors(hf_config(tie_word_embeddings=True))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    differs = write_checkpoint(tmp_path / "differs", hf_config(tie_word_embeddings=True), tensors=tensors)
    refused("tie_word_embeddings", differs, tmp_path / "no")
    assert not (tmp_path / "no").exists()
    double = write_checkpoint(tmp_path / "double", hf_config(dtype="float64"), dtype="float64")
    refused("--dtype", double, tmp_path / "no")
