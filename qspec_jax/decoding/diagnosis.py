"""What keeps a machine from running a model at full speed, or at all, and what to do about it; and which kernels run."""

import contextlib
import dataclasses
import importlib.util
import re
from pathlib import Path

import jax

from pallas_kernels import dispatch
from qspec_jax.decoding.auto_exact import resolve_exact
from qspec_jax.decoding.config import BITS, GenerationConfig
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.prepare import prepare
from qspec_jax.decoding.sampling import make_sampler, prompt_keys
from qspec_jax.drafts.registry import NONE, make_draft
from qspec_jax.errors import InputError, named
from qspec_jax.models.config import LlamaConfig
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
    """Whether JAX is set to run on the CPU, by JAX_PLATFORMS or its config."""
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


def kernels(config: LlamaConfig, settings: GenerationConfig, prompt_tokens: int) -> list[dispatch.KernelChoice]:
    """The kernels that prefill and decode ask for here with a model of this config in bfloat16, for one prompt, found without weights.

    Call it in a fresh process: what was traced there before is not traced again, and its kernels would be missing.
    """
    model, text = outline(config), settings.draft.replace("skip=auto", "skip=none")
    draft = make_draft(text, model, int4=lambda: outline(config, int4=True))
    prepared = prepare(model, [[0] * prompt_tokens], config=dataclasses.replace(settings, draft=draft or NONE))
    engine, (request,) = prepared.engine(), prepared.requests
    sampler, limits = make_sampler(request.config), make_limits(model, request.config)
    keys = prompt_keys(jax.random.key(0), 1)
    with dispatch.watched() as found:
        exact = resolve_exact(prepared, sampler, keys, limits).exact  # on a GPU it traces all that bits would run
    if exact == BITS:
        return found
    with dispatch.watched() as found:
        prefill = engine.prefill_of(prepared.prompts, sampler, keys, limits)
        engine.rounds_call(prefill.shapes(), sampler, limits, lazy=True).shapes()
    return found
