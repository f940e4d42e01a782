"""What keeps a machine from running a model as fast as it could, or at all, and what to do about it; and which kernels run."""

import contextlib
import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from pallas_kernels import dispatch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Engine, max_drafts
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.sampling import make_sampler, prompt_keys
from qspec_jax.drafts.registry import make_draft, parse_draft
from qspec_jax.errors import InputError, is_out_of_memory, named
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket
from qspec_jax.models.sharding import mesh_of
from qspec_jax.planning.memory import Memory, largest, memory_of
from qspec_jax.planning.steps import outlined
from qspec_jax.quantization.outline import outline

DRIVER = Path("/proc/driver/nvidia/version")
OLDEST_DRIVER = {13: 580, 12: 525}  # by the major version of CUDA: NVIDIA's CUDA release notes, table of minimum driver versions
INSTALL = 'pip install "qspec-jax[cuda13]"'


def check_backend() -> None:
    """Raises InputError where JAX cannot start at all, as with JAX_PLATFORMS=cuda and no CUDA, saying what to do."""
    try:
        jax.devices()
    except Exception as error:  # of JAX, or of a plugin
        driver, asked_for = driver_version(), jax.config.jax_platforms
        remedy = f"unset it to run on the CPU{'; ' + INSTALL if driver else ''}"
        raise InputError(f"JAX cannot start with JAX_PLATFORMS={asked_for} ({named(error)}): {remedy}") from None


def problems() -> list[str]:
    """What is wrong with this machine, a line each that says what to do; empty where there is no GPU, and where all is well with it."""
    driver = driver_version()
    if jax.default_backend() == "cpu":
        return [] if driver is None or _cpu_was_chosen() else [_unused_gpu(driver)]
    device, capability = jax.devices()[0], dispatch.compute_capability()
    if capability < 8:
        what = f"compute capability {capability:g}" if capability else "not one of NVIDIA's"
        return [f"{device.device_kind} ({what}) has no kernels here, and runs in plain JAX, slowly: use an NVIDIA GPU from Ampere (8.0) on"]
    mosaic, triton = dispatch.no_mosaic_gpu(), dispatch.no_triton()
    if mosaic and capability == 9.0:
        return [f"jax {jax.__version__} is too old for the kernels of {device.device_kind}, which need 0.11: {INSTALL}"]
    if mosaic and triton:
        python = "" if importlib.util.find_spec("jax_triton") else ", with Python 3.12 or newer"
        return [f"the kernels of {device.device_kind} need jax-triton, which is not installed: {INSTALL}{python}"]
    return []


def _cpu_was_chosen() -> bool:
    """Whether somebody told JAX to run on the CPU, by JAX_PLATFORMS or its config."""
    return jax.config.jax_platforms == "cpu"


def _unused_gpu(driver: str) -> str:
    """Why JAX runs on the CPU where NVIDIA's driver is loaded, and what to do."""
    versions = [major for major in OLDEST_DRIVER if importlib.util.find_spec(f"jax_cuda{major}_plugin")]
    if not versions:
        return f"there is an NVIDIA GPU, but this JAX has no CUDA and runs on the CPU: {INSTALL}"
    oldest = OLDEST_DRIVER[max(versions)]
    if int(driver.partition(".")[0]) < oldest:
        return f"NVIDIA's driver {driver} is too old for CUDA {max(versions)}, so JAX runs on the CPU: update it to {oldest} or newer"
    return "there is an NVIDIA GPU, but JAX runs on the CPU: JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()' says why"


def driver_version() -> str | None:
    """The version of NVIDIA's driver, such as 580.65.06; None where it is not loaded."""
    with contextlib.suppress(OSError):
        if found := re.search(r"Kernel Module.*?\s(\d+\.\d+(\.\d+)?)\s", DRIVER.read_text()):
            return found[1]
    return None


def memory_bytes() -> int | None:
    """Bytes of the first local device that JAX may take; None where it does not say, as a CPU does not."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def kernels(config: LlamaConfig, settings: GenerationConfig, prompt_tokens: int) -> list[dispatch.KernelChoice]:
    """The kernels that prefill and decode ask for here with a model of this config in bfloat16, for one prompt, found out without weights.

    Call it in a fresh process: what was traced there before is not traced again, so that its kernels would be missing.
    """
    model, settings = outline(config), dataclasses.replace(settings, draft=settings.draft.replace("skip=auto", "skip=none"))
    draft = make_draft(settings.draft, model, int4=lambda: outline(config, int4=True)) if settings.speculative else None
    engine = Engine.for_configs(model, draft, [settings], prompt_tokens=prompt_tokens)
    sampler, limits = make_sampler(settings), make_limits(model, settings)
    with dispatch.watched() as found:
        prefill = engine.prefill_of([[0] * prompt_tokens], sampler, prompt_keys(jax.random.key(0), 1), limits)
        engine.rounds_call(prefill.shapes(), sampler, limits, lazy=True).shapes()
    return found


@dataclasses.dataclass(frozen=True)
class Fit:
    """Whether so many prompts of one length and their new tokens fit a device, by arithmetic (`planning.memory`). room: its bytes.
    longest: the longest prompt that fits, of so many; 0: none."""

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
    """Whether prompts fit. settings: with a draft whose cost `qspec plan` knows; others count as none."""
    model, drafts = outline(config), ()
    if settings.speculative:
        with contextlib.suppress(InputError):  # of skipped layers and oracles
            drafts = outlined(parse_draft(settings.draft), model, lambda: outline(config, int4=True)) or ()
    new, gamma = bucket(settings.max_new_tokens), max_drafts(model, settings)

    def memory(tokens: int) -> Memory:
        return memory_of(config, settings.cache_config, drafts, batch=rows, context=bucket(tokens), new_tokens=new, gamma=gamma)

    most = config.max_length - settings.max_new_tokens
    return Fit(memory(prompt_tokens), room, largest(lambda tokens: tokens <= most and memory(tokens).total <= room))


@contextlib.contextmanager
def explained_memory(model: Llama, settings: GenerationConfig, prompt_tokens: int, *, rows: int) -> Iterator[None]:
    """Where a device's memory is too small for what is done within, an InputError says by how much, as far as is known, and what fits."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        mesh = mesh_of(model.weights())
        devices = 1 if mesh is None else mesh.size
        raise InputError(does_not_fit(model.checkpoint_config, settings, prompt_tokens, rows=rows, devices=devices)) from None


def does_not_fit(config: LlamaConfig, settings: GenerationConfig, prompt_tokens: int, *, rows: int, devices: int = 1) -> str:
    """A line for where memory has run out: what was asked for, by how much that is too much, and what would fit. devices: over how many
    the model is divided."""
    device, room = jax.devices()[0].device_kind, memory_bytes()
    if devices > 1:
        device, room = f"{devices} x {device}", room and room * devices
    many, fewer = ("a prompt", "") if rows == 1 else (f"{rows} prompts", ", or fewer at a time")
    asked = f"{many} of {prompt_tokens:,} tokens and {settings.max_new_tokens:,} new ones"
    if room is None or settings.cache_config.kind not in ("full", "int8"):  # of which the arithmetic knows
        return f"{asked}: the memory of {device} is too small; give a shorter prompt{fewer}"
    found = fit(config, settings, prompt_tokens, rows=rows, room=room)
    if not found.short:  # what others hold, or what the arithmetic leaves out
        return f"{asked}: the memory of {device} is full; by arithmetic they take {found}; give a shorter prompt{fewer}"
    fits = f"at most {found.longest:,} tokens a prompt fit" if found.longest else "the model leaves no room for a prompt"
    return f"{asked} take {found}, {found.short / 1e9:.1f} GB more than {device} has: {fits}{fewer}"
