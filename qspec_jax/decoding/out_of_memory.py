"""Explains where a device has run out of memory: what was asked for, by how much it is too large, and what fits."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import max_drafts
from qspec_jax.decoding.resolve import resolve_draft
from qspec_jax.drafts.draft import Draft
from qspec_jax.errors import InputError, is_out_of_memory, more_memory
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket
from qspec_jax.models.sharding import mesh_of
from qspec_jax.planning.memory import Memory, largest, memory_of
from qspec_jax.planning.steps import outlined
from qspec_jax.quantization.outline import outline


def memory_bytes() -> int | None:
    """Bytes of the first local device that JAX may take; None where it does not say, as on a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


@dataclasses.dataclass(frozen=True)
class Fit:
    """Whether prompts of one length and their new tokens fit a device, by arithmetic (`planning.memory`).

    Attributes:
        memory: what they take.
        room: bytes of the device.
        longest: tokens of the longest prompt that fits, with the same number of prompts; 0: none.
    """

    memory: Memory
    room: int
    longest: int

    @property
    def short(self) -> float:
        """Bytes that are missing; 0 if it fits."""
        return max(0.0, self.memory.total - self.room)

    def __str__(self) -> str:
        m = self.memory
        parts = dict(weights=m.weights, draft=m.draft, cache=m.cache)
        parts["prefill and decoding"] = m.besides
        listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
        return f"{m.total / 1e9:.1f} GB ({listed}) of {self.room / 1e9:.1f} GB"


def fit(config: LlamaConfig, settings: GenerationConfig, prompt_tokens: int, *, rows: int = 1, room: int) -> Fit:
    """Whether prompts fit.

    Args:
        config: of the model.
        settings: what is to be generated; a draft counts if `qspec plan` knows its cost.
        prompt_tokens: the length of each prompt.
        rows: the number of prompts.
        room: bytes of the device.
    """
    model, drafts = outline(config), ()
    if settings.speculative and not isinstance(settings.draft, Draft):
        with contextlib.suppress(InputError):  # of skipped layers and oracles
            drafts = outlined(settings.draft_settings, model, lambda: outline(config, int4=True)) or ()
    new, gamma = bucket(settings.max_new_tokens), max_drafts(model, settings)

    def memory(tokens: int) -> Memory:
        return memory_of(config, settings.cache_config, drafts, batch=rows, context=bucket(tokens), new_tokens=new, gamma=gamma)

    most = config.max_length - settings.max_new_tokens
    return Fit(memory(prompt_tokens), room, largest(lambda tokens: tokens <= most and memory(tokens).total <= room))


@contextlib.contextmanager
def explained_memory(model: Llama, settings: GenerationConfig, prompt_tokens: int, *, rows: int) -> Iterator[None]:
    """Turns the error of a device whose memory is too small into an InputError that says by how much, as far as is known, and what fits.

    Args:
        model: the target.
        settings: what is generated.
        prompt_tokens: the length of the longest prompt.
        rows: prompts at a time.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        (settings,) = resolve_draft(model, [settings], [prompt_tokens], batch=rows, logs=False)  # it was logged when it was resolved
        mesh = mesh_of(model.weights())
        devices = 1 if mesh is None else mesh.size
        raise InputError(does_not_fit(model.checkpoint_config, settings, prompt_tokens, rows=rows, devices=devices)) from None


def does_not_fit(config: LlamaConfig, settings: GenerationConfig, prompt_tokens: int, *, rows: int, devices: int = 1) -> str:
    """The error message: what was asked for, by how much it is too large, and what fits. devices: over how many the model is divided."""
    return _too_large(config, settings, prompt_tokens, rows, devices) + more_memory()


def _too_large(config: LlamaConfig, settings: GenerationConfig, prompt_tokens: int, rows: int, devices: int) -> str:
    device, room = jax.devices()[0].device_kind, memory_bytes()
    if devices > 1:
        device, room = f"{devices} x {device}", room and room * devices
    many, fewer = ("a prompt", "") if rows == 1 else (f"{rows} prompts", ", or fewer at a time")
    asked = f"{many} of {prompt_tokens:,} tokens and {settings.max_new_tokens:,} new ones"
    if room is None or settings.cache_config.name not in ("full", "int8"):  # of which the arithmetic knows
        return f"{asked}: the memory of {device} is too small; give a shorter prompt{fewer}"
    found = fit(config, settings, prompt_tokens, rows=rows, room=room)
    if not found.short:  # what others hold, or what the arithmetic leaves out
        return f"{asked}: the memory of {device} is full; by arithmetic they take {found}; give a shorter prompt{fewer}"
    fits = f"at most {found.longest:,} tokens a prompt fit" if found.longest else "the model leaves no room for a prompt"
    return f"{asked} take {found}, {found.short / 1e9:.1f} GB more than {device} has: {fits}{fewer}"
