"""Hugging Face directories: their config, their safetensors files and the tensors in these."""

import dataclasses
import logging
import re
from collections.abc import Set
from pathlib import Path

import numpy as np

from pallas_kernels.formats.weights import Int4Weight
from qspec_jax.checkpoints import converted
from qspec_jax.checkpoints.gguf_file import is_gguf
from qspec_jax.checkpoints.gguf_source import gguf_config
from qspec_jax.checkpoints.hub import local
from qspec_jax.checkpoints.other_formats import MERGE, describe_folder, is_of_an_adapter
from qspec_jax.checkpoints.quantized.formats import CONFIG_KEY, quantized_format
from qspec_jax.checkpoints.quantized.tensor import GroupedTensor, Parts, QuantizedTensor
from qspec_jax.checkpoints.safetensors_file import FLOAT_NAMES, FLOATS, Tensor, read_header
from qspec_jax.checkpoints.small_files import small_file
from qspec_jax.checkpoints.source import WeightSource
from qspec_jax.checkpoints.tensor_names import BASE, Place, canonical, places, table, tensor_shapes
from qspec_jax.checkpoints.weight_files import INDEX, WHOLE, WeightFiles, weight_files
from qspec_jax.errors import InputError, listed, reading, warn_once
from qspec_jax.files import read_json
from qspec_jax.models.config import LlamaConfig, eos_token_ids, stated_dtype
from qspec_jax.models.families import WRAPPERS

log = logging.getLogger(__name__)

# Buffers of old checkpoints, which are computed here.
_IGNORED = re.compile(r"((.*\.)?rotary_emb\.inv_freq|.*\.masked_bias|.*\.attn\.bias)$")
# Tensors that quantized checkpoints of several formats have, besides a weight or alone.
_OF_QUANTIZATION = re.compile(
    r".*\.(qweight|qzeros|g_idx|weight_packed|weight_shape|weight_scale(_inv|_2)?|weight_zero_point|input_scale|SCB|weight_format|scales|biases"
    r"|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*))$"
)


def load_config(directory: str | Path, *, dtype: str | None = None) -> LlamaConfig:
    """The model's config, with the EOS ids of generation_config.json if that has them.

    Args:
        directory: the checkpoint's directory, its GGUF file, or its name on the Hub.
        dtype: the weights' dtype if config.json has none; None: the dtype of the tensors, or float32 if there are none.

    Raises:
        InputError: for a directory without a config, as `LlamaConfig.from_hf` does, and for quantized weights in an unknown format.
    """
    directory = local(directory)
    if is_gguf(directory):
        return gguf_config(directory)
    path = directory / "config.json"
    with reading(path):
        missing = not path.exists()
    if missing:
        reason = "it is a link to a file that is not there" if path.is_symlink() else "No such file or directory"
        hint = describe_folder(directory) or ("an empty name or . is the current directory" if directory == Path() else "")
        raise InputError(
            f"{path}: cannot be read ({reason}); the directory of a Hugging Face checkpoint is needed{f', and {hint}' if hint else ''}"
        )
    raw = read_json(path)
    config = LlamaConfig.from_hf(raw, source=str(path), dtype=dtype or "float32")
    quantized_format(directory, raw)
    if dtype is None and stated_dtype(raw) is None:
        config = dataclasses.replace(config, dtype=_dtype_of_tensors(directory, config.dtype))
    if config.wrapper is not None and config.tie_word_embeddings and _has_head(directory):
        config = dataclasses.replace(config, tie_word_embeddings=False)  # as transformers does
    generation = directory / "generation_config.json"
    if generation.exists():
        eos = eos_token_ids(read_json(generation).get("eos_token_id"), str(generation), config.vocab_size)
        config = dataclasses.replace(config, eos_token_ids=eos or config.eos_token_ids)
    return config


def _dtype_of_tensors(directory: Path, default: str) -> str:
    """The dtype of a directory's weights as transformers finds it: that of their index, or of the first tensor of floats."""
    files = weight_files(directory)
    if files.dtype and (stated := files.dtype.removeprefix("torch.")) in FLOAT_NAMES.values():
        return stated
    if not (directory / files.names[0]).is_file():
        return default
    tensors = read_header(directory / files.names[0])
    return next((FLOAT_NAMES[tensors[name].dtype] for name in sorted(tensors) if tensors[name].dtype in FLOATS), default)


def _has_head(directory: Path) -> bool:
    """Whether a directory, converted or not, has a head besides the embedding."""
    if converted.is_converted(directory):
        return "head" in converted.read_manifest(directory).shapes
    files = weight_files(directory)
    found = [directory / name for name in files.names if not files.weight_map and (directory / name).is_file()]
    names = files.weight_map or {key for file in found for key in read_header(file)}
    return any("lm_head" in name.split(".") for name in names)


class Source(WeightSource):
    """A Hugging Face directory with all tensors of its model in the right shapes, which are read one at a time.

    Raises:
        InputError: for a directory without a checkpoint; it lists every missing, unexpected or misshapen tensor at once.
    """

    def __init__(self, directory: str | Path):
        self.directory = local(directory)
        self.config = load_config(self.directory)
        self.format = quantized_format(self.directory, read_json(self.directory / "config.json"))
        self.tensors: dict[str, Tensor | QuantizedTensor] = {}
        self.twice: list[tuple[str, Tensor | QuantizedTensor, Tensor | QuantizedTensor]] = []
        self._names_in: dict[str, Set[str]] = {}
        self._is_base = False  # whether its tensors have names of a model without a head
        self.not_finite: set[str] = set()
        self.files = weight_files(self.directory)
        self._open()
        experts = sum(self.config.experts.count for _ in self.config.expert_layers)
        if self.config.num_layers + experts > len(self.tensors):  # a huge number of layers would take long to count
            asked = f"{self.config.num_layers} layers" + (f" with {experts} experts together" if experts else "")
            raise InputError(f"{directory}: config.json asks for {asked}, and there are {len(self.tensors)} tensors")
        self.places = places(self.config)
        self._rename(tensor_shapes(self.config).keys() | {self.head})
        self._find_quantized()
        has_codes = any(isinstance(tensor, QuantizedTensor) for tensor in self.tensors.values())
        self.quantization = self.format.name if has_codes else None
        self._check()

    def read(self, path: str, memory: np.ndarray | None = None) -> np.ndarray:
        """The weight at a path of the model, see `WeightSource`."""
        place = self.places[path]
        if place.experts is not None:
            return self._read_experts(place, memory)
        tensor = self.tensors[place.name]
        return tensor.read(memory=memory) if place.first is None else tensor.read(place.first, place.shape[0], memory)

    def _read_experts(self, place: Place, memory: np.ndarray | None) -> np.ndarray:
        """The matrices of all experts of a layer; one of them at a time is held besides."""
        kind = np.dtype(FLOATS[self.tensors[place.names[0]].dtype])
        whole = np.empty(place.shape, kind) if memory is None else memory.view(kind).reshape(place.shape)
        for name, matrix in zip(place.names, whole, strict=True):
            matrix[:] = self.tensors[name].read().T
        return whole

    def read_bytes(self, path: str) -> int:
        """Bytes of the array that `read` returns."""
        place = self.places[path]
        return place.size * np.dtype(FLOATS[self.tensors[place.names[0]].dtype]).itemsize

    def can_pack(self, path: str) -> bool:
        """See `WeightSource`."""
        tensor = self.tensors.get(self.places[path].name)
        return isinstance(tensor, GroupedTensor) and tensor.can_pack()

    def read_packed(self, path: str) -> Int4Weight:
        """See `WeightSource`."""
        tensor, first, rows = self._grouped(path)
        return tensor.pack(first, rows)

    def read_parameters(self, path: str) -> tuple[np.ndarray, np.ndarray]:
        """See `WeightSource`."""
        tensor, first, rows = self._grouped(path)
        return tensor.parameters(first, rows)

    def _grouped(self, path: str) -> tuple[GroupedTensor, int, int]:
        """The tensor of a weight that can be packed, and its rows there: the first one, and their number."""
        place = self.places[path]
        tensor = self.tensors[place.name]
        assert isinstance(tensor, GroupedTensor)
        return tensor, place.first or 0, place.shape[0]

    def check_contents(self) -> None:
        """Raises InputError for wrong contents.

        They are two copies of a tensor that differ, a head that differs from the embedding that it is tied to, and tensors of quantized
        weights that contradict config.json or each other.
        """
        for tensor in self.tensors.values():
            if isinstance(tensor, QuantizedTensor):
                tensor.check()
        for name, one, other in self.twice:
            if not one.equals(other):
                where = f"both {one.file.name} and {other.file.name}" if one.file != other.file else f"{one.file.name} by two names"
                raise InputError(f"{self.directory}: {name} is in {where}, and differs; one of them is wrong")
        if self.carries_head and not self.tensors[self.head].equals(self.tensors[self.embedding]):
            raise InputError(
                f"{self.directory}: config.json says tie_word_embeddings, but {self.head} differs from the embedding; one of them is wrong"
            )

    def small_file(self, name: str) -> bytes | None:
        """The contents of a file of the directory, see `WeightSource`."""
        return small_file(self.directory, name)

    @property
    def head(self) -> str:
        """The name of the head's tensor."""
        return next(name for name, paths in table(self.config).items() if paths == ("head",))

    @property
    def embedding(self) -> str:
        """The name of the embedding's tensor."""
        return self.places["embedding"].name

    @property
    def carries_head(self) -> bool:
        """Whether a head is stored although the embeddings are tied."""
        return self.config.tie_word_embeddings and self.head in self.tensors

    def _is_left_out(self, name: str) -> bool:
        """Whether a tensor is not read: a buffer, or of another part of a multimodal model than its text model."""
        return bool(_IGNORED.match(name)) or (self.config.wrapper is not None and name.startswith(WRAPPERS[self.config.wrapper].left_out))

    def _open(self) -> None:
        """Finds the tensors of all files, and warns of other files of weights, which are not read."""
        for name in self.files.names:
            path = self.directory / name
            if not path.is_file():
                raise InputError(f"{path}: missing{why_missing(path, self.directory, self.files)}")
            found = read_header(path)
            self._names_in[name] = found.keys()
            self.twice += [
                (key, self.tensors[key], found[key]) for key in sorted(found.keys() & self.tensors.keys()) if not self._is_left_out(key)
            ]
            self.tensors = found | self.tensors
        if self.files.passed_over:
            read = ", ".join(self.files.names) if self.files.index is None else self.files.index
            others = listed(self.files.passed_over)
            warn_once(log, f"{self.directory}: {read} is read, as transformers does, and {others} passed over")
        if (wrapper := self.config.wrapper) and (others := sorted(filter(self._is_left_out, self.tensors))):
            count = f"{len(others)} tensors of its other parts are left out ({listed(others, 1)})"
            warn_once(log, f"{self.directory}: the text model of {wrapper} is read; {count}")
        if (self.directory / "adapter_config.json").exists():
            warn_once(log, f"{self.directory}: the model is read without the adapter in its directory (adapter_config.json)")

    def _rename(self, expected: Set[str]) -> None:
        """Gives tensors their names in a whole model, and checks that the files have the tensors that their index names.

        Names differ if the model was saved without its head, or if only the head of two tied tensors is stored. `expected` has the names
        of the model's tensors and of its head.
        """
        own = {name: self._own_name(name, expected) for name in self.tensors}
        renamed = sorted(name for name in own if own[name] != name)
        self._is_base = any(own[name] == BASE + name for name in renamed)
        for name in renamed:
            tensor = self.tensors.pop(name)
            if own[name] in self.tensors:
                self.twice.append((own[name], self.tensors[own[name]], tensor))
            self.tensors[own[name]] = tensor
        if self.config.tie_word_embeddings and self.embedding not in self.tensors and self.head in self.tensors:
            self.tensors[self.embedding] = self.tensors.pop(self.head)
        # One of two tied tensors may be left out, and buffers are not read: index and files may differ in these.
        free = {self.head, self.embedding} if self.config.tie_word_embeddings else set()

        def matters(name: str) -> bool:
            return not self._is_left_out(name) and self._own_name(name, expected) not in free

        for file in self.files.names if self.files.index else ():
            index, found = self.directory / self.files.index, self._names_in[file]
            named = {name for name, holder in self.files.weight_map.items() if holder == file}
            if lost := sorted(filter(matters, named - found)):
                raise InputError(f"{index}: names tensors that {file} lacks: {listed(lost)}")
            if stray := sorted(filter(matters, found - self.files.weight_map.keys())):
                raise InputError(f"{index}: has no entry for tensors of {file}: {listed(stray)}")

    def _own_name(self, name: str, expected: Set[str]) -> str:
        """The name of a tensor in a whole model, also of a part of a quantized weight, whose own name `expected` does not have."""
        for suffix in (*self.format.suffixes, "bias") if self.format else ():
            if name.endswith(f".{suffix}"):
                weight = name.removesuffix(suffix) + "weight"
                if name not in expected and (own := canonical(weight, expected)) in expected:
                    return own.removesuffix("weight") + suffix
        return canonical(name, expected)

    def _find_quantized(self) -> None:
        """Replaces the tensors of each quantized weight by the weight, and leaves out tensors that weights do not need."""
        if self.format is None:
            return
        expected, unused = tensor_shapes(self.config), tuple(f".{suffix}" for suffix in self.format.unused)
        for name, shape in (expected | {self.head: self.places["embedding"].shape}).items():
            module = name.removesuffix(".weight")
            found = {suffix: self.tensors.get(f"{module}.{suffix}") for suffix in self.format.suffixes}
            parts: Parts = {suffix: tensor for suffix, tensor in found.items() if isinstance(tensor, Tensor)}
            quantized = self.format.tensor(module, shape, parts) if module != name and len(shape) == 2 else None
            if quantized is None:
                continue
            for suffix in quantized.parts:
                del self.tensors[f"{module}.{suffix}"]
            if name in self.tensors:
                raise InputError(f"{quantized.file}: {module} has quantized weights, and {name} too; one of them is wrong")
            self.tensors[name] = quantized
            bias = self.tensors.get(f"{module}.bias")
            # Some files have a bias of zeros for each quantized layer.
            if bias is not None and f"{module}.bias" not in expected and bias.dtype in FLOATS and not bias.read().any():
                del self.tensors[f"{module}.bias"]
        for name in [name for name in self.tensors if unused and name.endswith(unused)]:
            del self.tensors[name]

    def _check(self) -> None:
        """Raises one InputError for all wrong names, shapes and dtypes."""
        expected = tensor_shapes(self.config)
        if self.carries_head:
            expected[self.head] = self.places["embedding"].shape
        missing = sorted(expected.keys() - self.tensors.keys())
        extra = sorted(k for k in self.tensors.keys() - expected.keys() if not self._is_left_out(k))
        if any(map(is_of_an_adapter, extra)):
            raise InputError(f"{self.directory}: its tensors are those of an adapter of PEFT, or not merged ({listed(extra, 2)}); {MERGE}")
        named = [name for name in extra if missing and _OF_QUANTIZATION.match(name)]
        packed = [name for name in sorted(self.tensors) if name.endswith("_proj.weight") and self.tensors[name].dtype not in FLOATS]
        if self.format is None and (named or packed):
            raise InputError(
                f"{self.directory}: the checkpoint is quantized ({listed(named or packed, 2)}), and its config.json has no {CONFIG_KEY}, "
                "which says how; bring the config.json that belongs to it"
            )
        wrong = []
        if missing:
            alone = " (config.json says that the embeddings are not tied)" if missing == [self.head] else ""
            base = "; it was saved without its head, as a base model: bring the one with it" if alone and self._is_base else ""
            wrong.append(f"missing {listed(missing)}{alone}{base}")
        if extra:
            wrong.append(f"unexpected {listed(extra)}")
        for name in sorted(expected.keys() & self.tensors.keys()):
            tensor = self.tensors[name]
            if tensor.shape != expected[name]:
                wrong.append(f"{name} has shape {list(tensor.shape)}, config.json asks for {list(expected[name])}")
            elif tensor.dtype not in FLOATS:
                wrong.append(f"{name} has dtype {tensor.dtype}, should be one of {', '.join(FLOATS)}")
        for place in self.places.values():
            kinds = {self.tensors[name].dtype: name for name in place.names if place.experts and name in self.tensors}
            if len(kinds) > 1:
                described = " and ".join(f"{name} {kind}" for kind, name in sorted(kinds.items()))
                wrong.append(f"{described}; the experts of a layer should have one dtype")
        if wrong:
            raise InputError(f"{self.directory}: the checkpoint does not fit its config: {'; '.join(wrong)}")


def why_missing(path: Path, directory: Path, files: WeightFiles) -> str:
    """The end of a sentence on a file of weights that is missing: the reason, or what to give."""
    if path.is_symlink():
        return "; it is a link to a file that is not there: fetch it again"
    if files.index:
        return f"; {files.index} names it: fetch it too"
    whole = f"a Hugging Face checkpoint has its weights in {WHOLE}, or in shards and {INDEX}"
    return f"; {describe_folder(directory) or whole}"
