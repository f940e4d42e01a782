"""Checkpoint directories that are wrong, or no checkpoints at all: what is wrong is said in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import hf_config, random_tensors, write_checkpoint
from read_checkpoints import INDEX, edit_json, loaded, refused
from safetensors.numpy import load_file, save_file

from qspec_jax.checkpoints.huggingface import Source, load_config
from qspec_jax.checkpoints.loading import load, load_model
from qspec_jax.checkpoints.tensor_names import places
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.run_identity import of_checkpoint
from qspec_jax.errors import InputError

Edit = Callable[[Path], object]


# Directories that are wrong -------------------------------------------------------------------------------------------


def _retouch(change: Callable[[dict[str, np.ndarray]], object]) -> Edit:
    """Changes the tensors of model.safetensors."""

    def edit(directory: Path) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return edit


def _overwrite(file: str, content: bytes | str) -> Edit:
    return lambda d: (d / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def _cut(file: str, size: int) -> Edit:
    return lambda d: (d / file).write_bytes((d / file).read_bytes()[:size])


def _without(file: str) -> Edit:
    return lambda d: (d / file).unlink()


def _outside(file: str) -> Edit:
    """An index that leads elsewhere."""
    return lambda d: edit_json(d / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": file}))


def _again(more: float) -> Edit:
    """A tensor a second time, so much larger."""

    def edit(directory: Path) -> None:
        shards = sorted(directory.glob("model-*.safetensors"))
        holds = next(shard for shard in shards if "model.norm.weight" in load_file(shard))
        other = next(shard for shard in shards if shard != holds)
        save_file(load_file(other) | {"model.norm.weight": load_file(holds)["model.norm.weight"] + np.float32(more)}, other)

    return edit


def _only_bin(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


NOT_JSON = [
    (_overwrite("config.json", "{"), ("config.json", "not valid JSON")),
    (_overwrite("config.json", ""), ("config.json", "not valid JSON")),
    (_overwrite("config.json", b"\xff\xfe"), ("config.json", "not valid JSON")),
    (_overwrite("config.json", "[" * 100_000), ("config.json", "not valid JSON")),
    (_overwrite("config.json", "[1, 2]"), ("config.json", "JSON object")),
    (_without("config.json"), ("config.json", "cannot be read")),
    (_overwrite("generation_config.json", "{"), ("generation_config.json", "not valid JSON")),
    (_overwrite("generation_config.json", '{"eos_token_id": "</s>"}'), ("generation_config.json", "eos_token_id", "</s>")),
    (_overwrite("generation_config.json", '{"eos_token_id": 64}'), ("generation_config.json", "eos_token_id 64", "below vocab_size 64")),
]

ONE_FILE = [
    (_without("model.safetensors"), ("model.safetensors: missing", "has its weights in model.safetensors, or in shards")),
    (_only_bin, ("model.safetensors: missing", "can run code", "save the model as safetensors")),
    (_cut("model.safetensors", 0), ("model.safetensors", "not a whole safetensors file")),
    (_cut("model.safetensors", 100), ("model.safetensors", "not a whole safetensors file")),
    (_cut("model.safetensors", -1), ("model.safetensors", "not a whole safetensors file")),
    (_overwrite("model.safetensors", b"garbage\n" * 100), ("model.safetensors", "not a whole safetensors file")),
    (_overwrite("model.safetensors", (16).to_bytes(8, "little") + b'{"a\n\n": not json'), ("not a whole safetensors file",)),
    (_retouch(lambda t: t.update(stray=np.zeros(1))), ("unexpected stray",)),
    (_retouch(lambda t: t.pop("model.norm.weight")), ("missing model.norm.weight",)),
    (
        _retouch(lambda t: t.update({"model.norm.weight": np.zeros(64, np.int32)})),
        ("model.norm.weight has dtype I32", "F16, BF16, F32, F64"),
    ),
]

SHARDS = [
    (_without("model-00002-of-00003.safetensors"), ("model-00002-of-00003.safetensors: missing",)),
    (_cut("model-00003-of-00003.safetensors", -1), ("model-00003-of-00003.safetensors", "not a whole safetensors file")),
    (_overwrite(INDEX, "{"), (INDEX, "not valid JSON")),
    (_overwrite(INDEX, "{}"), (INDEX, "weight_map")),
    (_overwrite(INDEX, '{"weight_map": {"model.norm.weight": 3}}'), (INDEX, "weight_map")),
    *(
        (_outside(file), (INDEX, "files beside it", repr(file)))
        for file in ("../x.safetensors", "/etc/passwd", "a/../b", "a//b", "a/", "./b", "..", ".", "a\\b", "", "\ud800")
    ),
    (_again(1.0), ("model.norm.weight is in both model-00001-of-00003.safetensors", "differs")),
    (
        lambda d: edit_json(d / INDEX, lambda index: index["weight_map"].pop("model.norm.weight")),
        (INDEX, "no entry", "model.norm.weight"),
    ),
    (
        lambda d: edit_json(d / INDEX, lambda index: index["weight_map"].update(ghost="model-00001-of-00003.safetensors")),
        (INDEX, "names tensors that model-00001-of-00003.safetensors lacks: ghost"),
    ),
    (
        lambda d: edit_json(d / INDEX, lambda index: index["weight_map"].update(ghost="model-00004-of-00003.safetensors")),
        ("model-00004-of-00003.safetensors: missing",),
    ),
]


@pytest.mark.parametrize(
    ("shards", "edit", "named"),
    [(1, *bad) for bad in NOT_JSON + ONE_FILE] + [(3, *bad) for bad in SHARDS],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else None,
)
def test_refused(shards, edit, named, tmp_path):
    directory = write_checkpoint(tmp_path, hf_config(), shards=shards)
    load_model(directory)
    edit(directory)
    refused(directory, *named)


def test_a_tensor_in_two_files_may_be_the_same(tmp_path):
    directory = write_checkpoint(tmp_path, hf_config(), shards=3)
    _again(0.0)(directory)
    assert loaded(load_model(directory)).keys() == random_tensors(hf_config()).keys()


@pytest.mark.system
def test_mutated_headers_are_refused_or_read(tmp_path, monkeypatch):
    directory = write_checkpoint(tmp_path, hf_config(num_hidden_layers=1))
    found = places(load_config(directory))
    monkeypatch.setattr("qspec_jax.checkpoints.huggingface.places", lambda config: found)  # which takes most of the time
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    r = np.random.default_rng(0)
    interesting = b'{}[],:"0123456789-.eE\\\x00\xff nulltruefalse'
    refusals = 0
    for i in range(2500):
        header = bytearray(whole[8 : 8 + size])
        length = size
        match i % 5:
            case 0:  # the length
                length = int(r.integers(0, 1 << int(r.integers(1, 64)), dtype=np.uint64))
            case 1:  # something cut out
                at = int(r.integers(size))
                del header[at : at + int(r.integers(1, 40))]
                length = len(header)
            case 2:  # something twice
                at, more = int(r.integers(size)), int(r.integers(1, 40))
                header[at:at] = header[at : at + more]
                length = len(header)
            case _:  # bytes
                for _ in range(int(r.integers(1, 6))):
                    header[int(r.integers(size))] = interesting[int(r.integers(len(interesting)))]
        path.write_bytes(length.to_bytes(8, "little") + header + whole[8 + size :])
        try:
            Source(directory)
        except InputError:
            refusals += 1
    assert refusals > 2000


@pytest.mark.parametrize("shards", [1, 3])
def test_all_that_is_wrong_with_the_tensors_is_said_at_once(shards, tmp_path):
    tensors = random_tensors(hf_config())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = np.zeros(65, np.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((64, 128), np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((96, 64), np.float32)
    refused(
        write_checkpoint(tmp_path, hf_config(), tensors=tensors, shards=shards),
        "missing model.layers.1.mlp.up_proj.weight",
        "unexpected model.layers.2.mlp.up_proj.weight",
        "model.norm.weight has shape [65], config.json asks for [64]",
        "model.layers.0.self_attn.k_proj.weight has shape [64, 128], config.json asks for [128, 64]",
    )


def test_a_long_list_is_cut_short(tmp_path):
    message = refused(write_checkpoint(tmp_path, hf_config(num_hidden_layers=1), tensors=random_tensors(hf_config())), "unexpected")
    assert "and 1 more" in message and len(message) < 1000


@pytest.mark.parametrize("read", [load_config, load_model, load_tokenizer, load])
def test_no_such_directory(read, tmp_path):
    refused(tmp_path / "gone", "no such directory", read=read)
    (tmp_path / "weights").write_text("")
    refused(tmp_path / "weights", "weights: is a file", read=read)


# What is no checkpoint ------------------------------------------------------------------------------------------------

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0a" * 32 + "\nsize 4976698672\n"


def _only(name: str, content: bytes = b"x", *, keep: tuple[str, ...] = ("config.json",)) -> Edit:
    """Another file in place of the weights, and of all that is not kept."""

    def edit(directory: Path) -> None:
        for path in directory.iterdir():
            if path.name not in keep:
                path.unlink()
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)

    return edit


def _renamed(rename: Callable[[str], str], dtype: str | None = None) -> Edit:
    def edit(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        save_file({rename(k): v.astype(dtype or v.dtype) for k, v in tensors.items()}, directory / "model.safetensors")

    return edit


ADAPTER = json.dumps({"base_model_name_or_path": "org/base-7b"}).encode()
NOTHING = ()
NO_CHECKPOINT = [
    (_overwrite("model.safetensors", POINTER), ("model.safetensors: is a git-lfs pointer", "git lfs pull")),
    (_overwrite("config.json", POINTER), ("config.json: is a git-lfs pointer", "git lfs pull")),
    (_overwrite("generation_config.json", POINTER), ("generation_config.json: is a git-lfs pointer",)),
    (_only("adapter_config.json", ADAPTER, keep=NOTHING), ("config.json", "an adapter of org/base-7b", "merge it into its base model")),
    (_only("adapter_model.bin"), ("model.safetensors: missing", "an adapter (adapter_model.bin)")),
    (_only("consolidated.00.pth", keep=NOTHING), ("config.json", "(consolidated) layout", "consolidated.00.pth")),
    (_only("consolidated-00001-of-00002.safetensors"), ("(consolidated) layout",)),
    (_only("Model-Q4_K_M.GGUF", keep=NOTHING), ("Model-Q4_K_M.GGUF: is not a GGUF file",)),
    (_only("sha256-0badcafe", b"GGUF\x03\0\0\0" + bytes(32)), ("model.safetensors: missing", "a model in GGUF", "sha256-0badcafe")),
    (_only("model-00002-of-00004.safetensors"), ("shards without the index", "model.safetensors.index.json")),
    (_only("model.fp16.safetensors"), ("safetensors under another name (model.fp16.safetensors)",)),
    (_only("weights.00.pt"), ("pickled weights", "can run code")),
    (_only("onnx/decoder_model.onnx"), ("a model in ONNX", "onnx/decoder_model.onnx")),
    (_only("weights.npz"), ("a model of MLX",)),
    (_only("tf_model.h5"), ("a model of TensorFlow",)),
    (_only("flax_model-00001-of-00002.msgpack"), ("a model of Flax",)),
    (_only("model_index.json", b"{}", keep=NOTHING), ("config.json", "a pipeline of diffusers")),
    (_only("__0_0.distcp"), ("a training run's divided state",)),
    (_only("checkpoint-500/config.json", keep=NOTHING), ("config.json", "there is a checkpoint in a folder of it, checkpoint-500")),
    (_only("training_args.bin"), ("model.safetensors: missing",)),
    (_renamed("base_model.model.{}".format), ("adapter of PEFT", "base_model.model.", "merge it")),
    (_renamed(lambda name: name.replace("q_proj.weight", "q_proj.base_layer.weight")), ("adapter of PEFT", "base_layer")),
    (_renamed(lambda name: name.replace("proj.weight", "proj.qweight")), ("quantized", "quantization_config", "qweight")),
    (_renamed(lambda name: name.replace("up_proj.weight", "up_proj.weight_packed")), ("quantized", "quantization_config", "weight_packed")),
    (_renamed(lambda name: name.replace("v_proj.weight", "v_proj.SCB")), ("quantized", "quantization_config", "v_proj.SCB")),
    (_renamed(str, "int8"), ("quantized", "quantization_config", "proj.weight")),
]


@pytest.mark.parametrize(("edit", "named"), NO_CHECKPOINT, ids=lambda v: " ".join(v) if isinstance(v, tuple) else None)
def test_what_is_no_checkpoint_is_called_what_it_is(edit, named, tmp_path):
    directory = write_checkpoint(tmp_path, hf_config())
    edit(directory)
    assert len(refused(directory, *named)) < len(str(tmp_path)) + 400
    assert of_checkpoint(directory)  # without a refusal of its own


def test_an_empty_name_is_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="the name of the checkpoint is empty"):
        load_model("")
    with pytest.raises(InputError, match=r"an empty name or \. is the current directory"):
        load_model(Path(""))


def test_links_that_lead_nowhere(tmp_path):
    directory = write_checkpoint(tmp_path / "models--org--name" / "snapshots" / "0123", hf_config())
    (directory / "model.safetensors").unlink()
    refused(directory, "it is a snapshot of org/name without weights")
    refused(tmp_path / "models--org--name", "give org/name instead")
    (directory / "model.safetensors").symlink_to("../../blobs/gone")
    refused(directory, "model.safetensors: missing", "a link to a file that is not there")
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to("../../blobs/gone")
    refused(directory, "config.json: cannot be read", "a link to a file that is not there")


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("tiny.gguf", b"GGUF", "is not whole"),
        ("blob", b"GGUF\x03\0\0\0", "is not whole"),
        ("model.safetensors", POINTER.encode(), "is a git-lfs pointer"),
        ("model.safetensors", bytes(16), "give the directory that it is in"),
        ("notes.txt", b"", "is a file; the directory"),
    ],
)
def test_a_file_in_place_of_a_directory(name, content, named, tmp_path):
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, named)


def test_an_adapter_beside_a_model_is_not_applied(tmp_path, caplog):
    write_checkpoint(tmp_path, hf_config())
    (tmp_path / "adapter_config.json").write_bytes(ADAPTER)
    load_model(tmp_path)
    assert "without the adapter" in caplog.text and "adapter_config.json" in caplog.text
