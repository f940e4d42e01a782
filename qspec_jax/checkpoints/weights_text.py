"""How the weights of a checkpoint are loaded, and the text NAME[:SETTING=VALUE,...] that says it."""

import dataclasses
from typing import Self

from qspec_jax.errors import InputError
from qspec_jax.settings_text import check_settings, read_settings, setting, split_text

PACKED, DEQUANTIZED = "packed", "dequantized"  # how linear layers of a quantized checkpoint are loaded
NESTED = "nested"  # linear layers of any checkpoint in 8 bits, whose upper 4 are the draft's
CHOICES = PACKED, DEQUANTIZED, NESTED


@dataclasses.dataclass(frozen=True)
class _Settings:
    calibration: str = setting("", "A file of text for whose activations nested weights are rounded (GPTQ).")
    head_bits: int = setting(16, "Bits of the head: 8 puts it in INT8, with a scale for each output.", choices=(8, 16))
    embedding_bits: int = setting(16, "Bits of the embedding: 8 puts it in INT8, with a scale for each token.", choices=(8, 16))


@dataclasses.dataclass(frozen=True)
class WeightsChoice:
    """How weights are loaded.

    Attributes:
        linears: one of `CHOICES`; None for no choice.
        calibration: a file of text for whose activations nested weights are rounded; None: they are rounded to nearest.
        head_bits: 8 if the head is put into INT8; it is then another model's. 16: as it is stored.
        embedding_bits: the same of the embedding.
    """

    linears: str | None = None
    head_bits: int = 16
    calibration: str | None = None
    embedding_bits: int = 16

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """The choice of a text such as packed:head_bits=8, see `qspec_jax.settings_text`; None is no choice. Raises InputError."""
        if text is None:
            return cls()
        name, parts = split_text("weights", text)
        if name not in CHOICES:
            raise InputError(f"weights {name!r} should be one of {', '.join(CHOICES)}")
        settings = _Settings(**read_settings("weights", text, parts, _Settings))
        check_settings("weights", settings)
        if not settings.calibration and any(part.strip().startswith("calibration=") for part in parts):
            raise InputError(f"weights {text!r}: calibration should be a file of text")
        if settings.calibration and name != NESTED:
            raise InputError(f"weights {text!r}: calibration is for {NESTED} weights; leave it out")
        return cls(name, settings.head_bits, settings.calibration or None, settings.embedding_bits)

    def described(self, *, in_int4: bool) -> str:
        """The formats of a model's weights, for after its name; empty where all are as they are stored. in_int4: whether linear layers are
        said to be in INT4."""
        nested = ["linear layers nested in 8 bits"] * (self.linears == NESTED)
        tables = [f"{name} in INT8" for name, bits in (("head", self.head_bits), ("embedding", self.embedding_bits)) if bits == 8]
        parts = [*["linear layers in INT4"] * in_int4, *nested, *tables]
        return "".join(f", {part}" for part in [*parts, "all else in bfloat16"]) if parts else ""


AS_STORED = WeightsChoice()
