"""GPTQ: codes that are packed along the inputs, zero points along the outputs, and the group of each input (act-order).

Version 1 stores zero points minus one. One was subtracted in whole words, so that a zero point of 0 has borrowed from those above it: it is
added to whole words, before they are unpacked.
"""

import dataclasses

import numpy as np

from pallas_kernels.matmul.support import GROUP_SIZES
from qspec_jax.checkpoints.quantized.settings import Settings
from qspec_jax.checkpoints.quantized.tensor import SCALES, GroupedTensor, Parts, check_tensor, needed
from qspec_jax.checkpoints.quantized.words import unpack, words_for

BITS = (2, 4, 8)
V1, V2 = "gptq", "gptq_v2"  # of checkpoint_format
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # one in each field of a word


@dataclasses.dataclass(frozen=True)
class GptqTensor(GroupedTensor):
    """A weight of GPTQ. minus_one: whether zero points are stored minus one."""

    minus_one: bool = True

    def codes(self, first: int, rows: int) -> np.ndarray:
        """See `GroupedTensor`."""
        words = self.parts["qweight"].read()[:, first : first + rows]
        return unpack(words.T, self.bits)[:, : self.shape[1]]

    def scales(self) -> np.ndarray:
        """See `GroupedTensor`."""
        return self.parts["scales"].read().T

    def zero_points(self) -> np.ndarray:
        """See `GroupedTensor`."""
        words = self.parts["qzeros"].read().view(np.uint32)
        words = words + np.uint32(_ONES[self.bits]) if self.minus_one else words
        return unpack(words.view(np.int32), self.bits).T[: self.shape[0]]


@dataclasses.dataclass(frozen=True)
class GptqFormat:
    """The format of quant_method gptq.

    Attributes:
        bits: that weights may have: the settings' own, and those of its rules for single modules.
        group_size: inputs that share a scale; -1: all. None: there are rules for single modules, and the scales say it.
        minus_one: whether zero points are stored minus one.
        act_order: whether the groups of inputs may be out of order.
    """

    bits: tuple[int, ...]
    group_size: int | None
    minus_one: bool
    act_order: bool
    name = "GPTQ"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    unused = ()

    @property
    def kernel_group_size(self) -> int | None:
        """See `Format`."""
        return self.group_size if self.bits == (4,) and self.group_size in GROUP_SIZES and not self.act_order else None

    def tensor(self, module: str, shape: tuple[int, int], parts: Parts) -> GptqTensor | None:
        """See `Format`."""
        if not parts:
            return None
        beside, (outputs, inputs) = next(iter(parts)), shape
        found = {name: needed(module, name, parts, beside) for name in ("qweight", "qzeros", "scales")}
        bits = self._bits(module, parts, inputs)
        stored = parts["scales"].shape
        if self.group_size is not None:
            size = inputs if self.group_size == -1 else self.group_size
        else:
            size = -(-inputs // stored[0]) if stored and stored[0] else inputs
        order = "g_idx" if "g_idx" in parts or (self.act_order and size < inputs) else None
        found |= {order: needed(module, order, parts, beside)} if order else {}
        tensor = GptqTensor(module, shape, found, bits, size, order, self.minus_one)
        check_tensor(module, "qweight", parts, ("I32",), (words_for(inputs, bits), outputs))
        check_tensor(module, "qzeros", parts, ("I32",), (tensor.groups, words_for(outputs, bits)))
        check_tensor(module, "scales", parts, SCALES, (tensor.groups, outputs))
        if order:
            check_tensor(module, "g_idx", parts, ("I32",), (inputs,))
        return tensor

    def _bits(self, module: str, parts: Parts, inputs: int) -> int:
        """The bits of a code, by the size of the packed codes where weights may have several."""
        rows = parts["qweight"].shape[0] if parts["qweight"].shape else 0
        found = [bits for bits in self.bits if rows == words_for(inputs, bits)]
        return found[0] if found else self.bits[0]


def gptq_format(settings: Settings) -> GptqFormat:
    """The format that the settings of quant_method gptq ask for. Raises InputError for one that is not supported."""
    versions = {settings.choice(name, (None, V1, V2)) for name in ("checkpoint_format", "format")} - {None}
    if len(versions) > 1:
        raise settings.refused(f"checkpoint_format and format of the GPTQ quantization differ: {settings.raw['checkpoint_format']}")
    settings.choice("pack_dtype", (None, "int32"))
    bits, size = settings.number("bits", allowed=BITS), settings.number("group_size")
    act_order, rules = settings.raw.get("desc_act") is True, settings.within("dynamic")
    if rules is None or not rules.raw:
        return GptqFormat((bits,), size, V2 not in versions, act_order)
    several = {bits}
    for name in rules.raw:
        rule = None if name.startswith("-:") else rules.within(name)
        several |= {rule.number("bits", allowed=BITS)} if rule is not None and "bits" in rule.raw else set()
    return GptqFormat((bits, *sorted(several - {bits})), None, V2 not in versions, act_order)
