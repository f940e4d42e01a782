"""compressed-tensors: packed integers of 4 or 8 bits (pack-quantized: W4A16, W8A16), and FP8 (float-quantized).

Packed codes lie along the inputs, zero points along the outputs, the lowest bits first, both as unsigned numbers: signed ones plus half of
their range, which cancels in their difference.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from pallas_kernels.matmul.support import GROUP_SIZES
from qspec_jax.checkpoints.quantized.fp8 import E4M3, Fp8Tensor, fp8_tensor
from qspec_jax.checkpoints.quantized.settings import Settings
from qspec_jax.checkpoints.quantized.tensor import SCALES, GroupedTensor, Parts, check_tensor, needed
from qspec_jax.checkpoints.quantized.words import unpack, words_for
from qspec_jax.errors import InputError

PACK_QUANTIZED, FLOAT_QUANTIZED = "pack-quantized", "float-quantized"
MIXED = "mixed-precision"  # of a checkpoint whose groups of modules have several formats
METHOD = "compressed-tensors"
PATTERN = "re:"  # before targets that are regular expressions


class PackedTensor(GroupedTensor):
    """A weight of packed integers."""

    def codes(self, first: int, rows: int) -> np.ndarray:
        """See `GroupedTensor`."""
        return unpack(self.parts["weight_packed"].read(first, rows), self.bits)[:, : self.shape[1]]

    def scales(self) -> np.ndarray:
        """See `GroupedTensor`."""
        return self.parts["weight_scale"].read()

    def zero_points(self) -> np.ndarray:
        """See `GroupedTensor`; the middle of the codes for a symmetric weight."""
        if "weight_zero_point" not in self.parts:
            return np.full((self.shape[0], self.groups), 1 << (self.bits - 1), np.uint8)
        return unpack(self.parts["weight_zero_point"].read().T, self.bits).T[: self.shape[0]]

    def check(self) -> None:
        """Raises InputError if weight_shape is another shape, or an input is in a group that does not exist."""
        if (shape := self.parts["weight_shape"].read().tolist()) != list(self.shape):
            raise self.error("weight_shape", f"is {shape}, and config.json asks for {list(self.shape)}")
        super().check()


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the weights of a group of modules are quantized.

    Attributes:
        targets: names of modules, or of their class, or regular expressions of names after re:.
        format: `PACK_QUANTIZED` or `FLOAT_QUANTIZED`.
        bits: of a code.
        symmetric: whether there are no zero points.
        block: outputs and inputs that share a scale; -1 for all of them.
        ordered: whether inputs are grouped by weight_g_idx.
    """

    targets: tuple[str, ...]
    format: str
    bits: int
    symmetric: bool
    block: tuple[int, int]
    ordered: bool


@dataclasses.dataclass(frozen=True)
class CompressedTensors:
    """The format of quant_method compressed-tensors.

    Attributes:
        schemes: of the groups of modules.
        source: the file of the settings, for messages.
    """

    schemes: Sequence[Scheme]
    source: str
    name = METHOD
    suffixes = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    unused = ("input_global_scale", *(f"{of}_{kind}" for of in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point")))

    @property
    def kernel_group_size(self) -> int | None:
        """See `Format`."""
        size = self.schemes[0].block[1]
        wanted = dict(format=PACK_QUANTIZED, bits=4, block=(1, size), ordered=False)
        suits = size in GROUP_SIZES and all(dataclasses.replace(scheme, **wanted) == scheme for scheme in self.schemes)
        return size if suits else None

    def tensor(self, module: str, shape: tuple[int, int], parts: Parts) -> PackedTensor | Fp8Tensor | None:
        """See `Format`."""
        if parts.keys() <= {"weight"} and (not parts or parts["weight"].dtype != E4M3):
            return None
        scheme = self._scheme(module)
        codes = "weight" if scheme.format == FLOAT_QUANTIZED else "weight_packed"
        needed(module, codes, parts, next(iter(parts)))
        needed(module, "weight_scale", parts, codes)
        outputs, inputs = (whole if size == -1 else size for size, whole in zip(scheme.block, shape))
        if scheme.format == FLOAT_QUANTIZED:
            return fp8_tensor(module, shape, {name: parts[name] for name in ("weight", "weight_scale")}, "weight_scale", (outputs, inputs))
        return self._packed(module, shape, parts, scheme, inputs)

    def _packed(self, module: str, shape: tuple[int, int], parts: Parts, scheme: Scheme, group_size: int) -> PackedTensor:
        names = ["weight_packed", "weight_scale", "weight_shape"]
        names += [] if scheme.symmetric else ["weight_zero_point"]
        names += ["weight_g_idx"] if scheme.ordered else []
        found = {name: needed(module, name, parts, "weight_scale") for name in names}
        tensor = PackedTensor(module, shape, found, scheme.bits, group_size, "weight_g_idx" if scheme.ordered else None)
        check_tensor(module, "weight_packed", parts, ("I32",), (shape[0], words_for(shape[1], scheme.bits)))
        check_tensor(module, "weight_scale", parts, SCALES, (shape[0], tensor.groups))
        check_tensor(module, "weight_shape", parts, ("I64", "I32"), (2,))
        if not scheme.symmetric:
            check_tensor(module, "weight_zero_point", parts, ("I32",), (words_for(shape[0], scheme.bits), tensor.groups))
        if scheme.ordered:
            check_tensor(module, "weight_g_idx", parts, ("I32",), (shape[1],))
        return tensor

    def _scheme(self, module: str) -> Scheme:
        """The scheme of a module: one that names it, else one of its class; the only one of a checkpoint that has one."""
        if len(self.schemes) == 1:
            return self.schemes[0]
        named = [each for each in self.schemes if any(_matches(target, module) for target in each.targets)]
        of_class = [each for each in self.schemes if "Linear" in each.targets]
        if not named + of_class:
            raise InputError(f"{self.source}: {module} is quantized, and no targets of the config_groups name it")
        return (named + of_class)[0]


def compressed_tensors(settings: Settings) -> CompressedTensors:
    """The format that the settings of quant_method compressed-tensors ask for. Raises InputError for one that is not supported."""
    for name, hint in (("transform_config", "weights with transforms"), ("sparsity_config", "sparse weights")):
        inner = settings.within(name)
        if inner and (inner.raw.get("config_groups") or inner.raw.get("format", "dense") != "dense"):
            raise settings.refused(f"{hint} ({name}) of the {METHOD} quantization are not supported")
    settings.choice("format", (None, PACK_QUANTIZED, FLOAT_QUANTIZED, MIXED))
    groups = settings.within("config_groups")
    if groups is None or not groups.raw:
        raise settings.refused(f"config_groups of the {METHOD} quantization is missing")
    schemes = [_scheme(settings, name, groups.within(name)) for name in sorted(groups.raw)]
    return CompressedTensors(schemes, settings.source)


def _scheme(settings: Settings, name: str, group: Settings | None) -> Scheme:
    weights = None if group is None else group.within("weights")
    if group is None or weights is None:
        raise settings.refused(f"{name} of the {METHOD} quantization has no weights")
    raw: Mapping = group.raw if group.raw.get("format") is not None else settings.raw
    kind = Settings(raw, settings.source, METHOD).choice("format", (PACK_QUANTIZED, FLOAT_QUANTIZED))
    targets = group.raw.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise settings.refused(f"targets of {name} of the {METHOD} quantization are {targets!r}, should be a list of names")
    for pattern in (target.removeprefix(PATTERN) for target in targets if target.startswith(PATTERN)):
        try:
            re.compile(pattern)
        except re.error as error:
            raise settings.refused(f"a target of {name} of the {METHOD} quantization, {pattern!r}, is no pattern: {error}") from None
    is_float = kind == FLOAT_QUANTIZED
    weights.choice("type", ("float",) if is_float else ("int",))
    bits = weights.number("num_bits", allowed=(8,) if is_float else (4, 8))
    symmetric = weights.raw.get("symmetric", True) is True
    if is_float and not symmetric:
        raise settings.refused(f"FP8 with zero points of the {METHOD} quantization is not supported")
    strategy = weights.choice("strategy", ("channel", "tensor", "group", "block") if is_float else ("channel", "group"))
    ordered = weights.choice("actorder", (None, False, "weight", "static", "group", "dynamic")) in ("group", "dynamic")
    return Scheme(tuple(targets), kind, bits, symmetric, _block(weights, strategy), ordered)


def _block(weights: Settings, strategy: str) -> tuple[int, int]:
    """Outputs and inputs that share a scale; -1 for all."""
    if strategy == "block":
        block = weights.raw.get("block_structure")
        if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
            raise weights.refused(f"block_structure of the {METHOD} quantization is {block!r}, should be two whole numbers")
        return (block[0], block[1])
    if strategy == "group":
        return (1, weights.number("group_size"))
    return (1, -1) if strategy == "channel" else (-1, -1)


def _matches(target: str, module: str) -> bool:
    """Whether a target names a module, or is a regular expression of its name."""
    return re.match(target.removeprefix(PATTERN), module) is not None if target.startswith(PATTERN) else target == module
