"""Recognizes folders and files that are no readable checkpoint, to say what they are and what to give instead."""

import itertools
import json
from pathlib import Path

from qspec_jax.errors import listed
from qspec_jax.files import IS_POINTER, is_pointer

_GGUF = b"GGUF"  # the first bytes of such files
_MAX_OPENED = 200  # files of a folder whose first bytes are read
MERGE = "merge it into its base model (merge_and_unload and save_pretrained of PEFT) and bring that"
_MAX_NAMES = 2  # of files in a message
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "rng_state*.pth")  # a training run's, without a model
_INSTEAD = "bring the model as Hugging Face has it: config.json, model.safetensors and the tokenizer's files"
_AS_SAFETENSORS = "save the model as safetensors (save_pretrained of transformers)"
# Names of files or folders, what they are, and what to do; the first entry that matches counts.
_FORMATS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("consolidated*.safetensors", "consolidated*.pth"),
        "the original (consolidated) layout of Meta's and Mistral's models",
        f"{_INSTEAD}, which transformers' conversion script makes",
    ),
    (
        ("*-of-*.safetensors",),
        "shards without the index that says which tensors they hold",
        "bring model.safetensors.index.json, and all the shards that it names, too",
    ),
    (("*.safetensors",), "safetensors under another name", "name the file model.safetensors, or bring model.safetensors.index.json too"),
    (("model_index.json",), "a pipeline of diffusers", _INSTEAD),
    (("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl"), "pickled weights (.bin), which can run code and are not read", _AS_SAFETENSORS),
    (("*.onnx", "onnx/*.onnx"), "a model in ONNX, which is not read", _INSTEAD),
    (("weights*.npz", "*.npz"), "a model of MLX (.npz), which is not read", _INSTEAD),
    (("*.h5", "*.keras", "saved_model.pb", "*.ckpt.index"), "a model of TensorFlow, which is not read", _AS_SAFETENSORS),
    (("*.msgpack",), "a model of Flax (.msgpack), which is not read", _AS_SAFETENSORS),
    (("*.distcp", "global_step*", "zero_to_fp32.py"), "a training run's divided state", _AS_SAFETENSORS),
    (("*.nemo",), "a model of NeMo, which is not read", _INSTEAD),
    (("modules.json",), "a model of sentence-transformers without a language model's weights", _INSTEAD),
    (("*.incomplete", "*.part", "*.aria2", "*.crdownload"), "a download that is not finished", "fetch it again"),
    (("*.zip", "*.tar", "*.tar.*", "*.tgz", "*.7z"), "an archive", "unpack it"),
)


def describe_folder(directory: Path) -> str:
    """A part of a sentence on a directory without a checkpoint's config or weights: what it holds, and what to bring.

    It is empty for a folder that is not recognized.
    """
    if found := _adapter(directory) or _gguf(directory):
        return found
    for patterns, what, instead in _FORMATS:
        paths = {path for pattern in patterns for path in directory.glob(pattern) if not any(map(path.match, _NO_WEIGHTS))}
        if names := sorted(path.relative_to(directory).as_posix() for path in paths):
            return f"it holds {what} ({listed(names, _MAX_NAMES)}); {instead}"
    return _of_the_hub(directory) or _below(directory)


def describe_file(path: Path) -> str:
    """A part of a sentence on a file given as a checkpoint's directory: what it is, and what to give."""
    if is_pointer(_first_bytes(path)):
        return IS_POINTER
    if path.suffix == ".safetensors":
        return "is a file of weights; give the directory that it is in, with config.json and the tokenizer's files"
    return "is a file; the directory of a Hugging Face checkpoint is needed"


def is_of_an_adapter(tensor: str) -> bool:
    """Whether a tensor's name is one of PEFT's: of an adapter, or of a model with an adapter that is not merged."""
    return tensor.startswith("base_model.model.") or any(part in tensor for part in (".lora_", ".base_layer.", ".modules_to_save."))


def _adapter(directory: Path) -> str:
    names = [name for name in ("adapter_model.safetensors", "adapter_model.bin", "adapter_config.json") if (directory / name).exists()]
    if not names:
        return ""
    try:
        base = json.loads((directory / "adapter_config.json").read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    of = f" of {base}" if isinstance(base, str) and base and base.isprintable() else ""
    return f"it holds an adapter{of} ({names[0]}), not a model; {MERGE}"


def _gguf(directory: Path) -> str:
    beside = itertools.islice((path for path in sorted(directory.iterdir()) if path.is_file()), _MAX_OPENED)
    names = [path.name for path in beside if _first_bytes(path).startswith(_GGUF)]
    return f"it holds a model in GGUF ({listed(names, _MAX_NAMES)}); give the file" if names else ""


def _of_the_hub(directory: Path) -> str:
    """What a folder of the Hub's cache is."""
    place = directory.absolute()
    is_snapshot = place.parent.name == "snapshots"
    folder = place.parent.parent if is_snapshot else place
    repository = folder.name.removeprefix("models--").replace("--", "/")
    if not folder.name.startswith("models--"):
        return ""
    if is_snapshot:
        return f"it is a snapshot of {repository} without weights; {repository} has no safetensors, or they are still to be fetched"
    if (place / "snapshots").is_dir():
        return f"it is a folder of the Hub's cache; give {repository} instead, or the folder of a commit in snapshots"
    return ""


def _below(directory: Path) -> str:
    """Which folder of a directory is a checkpoint."""
    found = sorted(path.parent.name for path in directory.glob("*/config.json"))
    return f"there is a checkpoint in a folder of it, {listed(found, _MAX_NAMES)}" if found else ""


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError:
        return b""
