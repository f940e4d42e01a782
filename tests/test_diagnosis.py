"""What is said of a machine that cannot run a model, or only slowly; `qspec doctor`. Machines are simulated here."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import dispatch
from qspec_jax import errors
from qspec_jax.checkpoints import loading
from qspec_jax.cli import doctor
from qspec_jax.compile_cache import VARIABLE
from qspec_jax.decoding import diagnosis, out_of_memory
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.errors import InputError

H100 = dict(capability="9.0", kind="NVIDIA H100 80GB HBM3", jax="0.11.2", installed=("jax_triton", "triton"))
DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\nGCC version: 12\n"


def on(monkeypatch, tmp_path, *, capability, kind, jax, installed, driver="580.65.06", backend="gpu", memory=80e9):
    """A machine with one GPU, as JAX, the driver and the installed packages tell of it."""
    device = SimpleNamespace(
        compute_capability=capability, device_kind=kind, platform=backend, memory_stats=lambda: {"bytes_limit": memory} if memory else None
    )
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(dispatch.jax, name, lambda: [device])
    monkeypatch.setattr(dispatch.jax, "default_backend", lambda: backend)
    monkeypatch.setattr(dispatch.jax, "__version__", jax)
    monkeypatch.setattr(dispatch.jax, "__version_info__", tuple(map(int, jax.split("."))))
    found = importlib.util.find_spec
    of_gpus = ("jax_triton", "triton", "jax_cuda12_plugin", "jax_cuda13_plugin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: (name in installed or None) if name in of_gpus else found(name))
    monkeypatch.setattr(diagnosis, "_cpu_was_chosen", lambda: False)
    monkeypatch.setattr(diagnosis, "DRIVER", tmp_path / "version")
    if driver:
        diagnosis.DRIVER.write_text(DRIVER.format(driver))


CASES = {
    "well": ({}, None),
    "Ampere": ({"capability": "8.0", "kind": "NVIDIA A100"}, None),
    "no jax-triton on Hopper": ({"installed": ()}, None),
    "no GPU": ({"backend": "cpu", "driver": None}, None),
    "no CUDA": ({"backend": "cpu", "installed": ()}, 'this JAX has no CUDA and runs on the CPU: pip install "qspec-jax[cuda13]"'),
    "old driver": (
        {"backend": "cpu", "installed": ("jax_cuda13_plugin",), "driver": "550.54.15"},
        "NVIDIA's driver 550.54.15 is too old for CUDA 13, so JAX runs on the CPU: update it to 580 or newer",
    ),
    "CUDA 12": ({"backend": "cpu", "installed": ("jax_cuda12_plugin",), "driver": "550.54.15"}, "JAX_PLATFORMS=cuda python -c"),
    "old jax": ({"jax": "0.10.2"}, "jax 0.10.2 is too old for the kernels of NVIDIA H100 80GB HBM3, which need 0.11: pip install"),
    "no jax-triton": (
        {"capability": "8.0", "kind": "NVIDIA A100", "installed": ()},
        'the kernels of NVIDIA A100 need jax-triton, which is not installed: pip install "qspec-jax[cuda13]", with Python 3.12 or newer',
    ),
    "unsupported card": ({"capability": "7.5", "kind": "Tesla T4"}, "Tesla T4 (compute capability 7.5) has no kernels here"),
    "another maker's": ({"capability": "gfx90a", "kind": "MI250"}, "MI250 (not one of NVIDIA's) has no kernels here"),
}


@pytest.mark.parametrize("case", CASES)
def test_problems(monkeypatch, tmp_path, case):
    machine, words = CASES[case]
    on(monkeypatch, tmp_path, **H100 | machine)
    found = diagnosis.problems()
    assert found == [] if words is None else len(found) == 1 and words in found[0], found


def test_who_chose_the_cpu_is_told_nothing(monkeypatch, tmp_path):
    on(monkeypatch, tmp_path, **H100 | {"backend": "cpu", "installed": ()})
    assert len(diagnosis.problems()) == 1
    monkeypatch.undo()
    monkeypatch.setattr(diagnosis, "driver_version", lambda: "580.65.06")
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", "cpu")
        assert diagnosis.problems() == []
    finally:
        jax.config.update("jax_platforms", before)


@pytest.mark.parametrize("case", [name for name, (_, words) in CASES.items() if words])
def test_doctor_says_what_to_do(monkeypatch, tmp_path, run, case):
    """With exit code 2, in one line; generate and batch say the same as a warning, for they can run."""
    machine, words = CASES[case]
    with monkeypatch.context() as patched:
        on(patched, tmp_path, **H100 | machine | {"memory": None})
        said = diagnosis.problems()
    monkeypatch.setattr(diagnosis, "problems", lambda: list(said))
    monkeypatch.setattr(diagnosis, "kernels", lambda *_: [dispatch.KernelChoice("attention", "triton", (("mosaic_gpu", "needs more"),))])
    code, out, err = run("doctor", "--context", 64)
    assert code == 2 and err.strip().splitlines() == [f"qspec: error: {said[0]}"] and words in err
    assert re.search(r"^attention +Triton +Pallas Mosaic GPU: needs more", out, re.M)


@pytest.mark.system
def test_a_jax_that_cannot_start_is_no_traceback(directory):
    for command in (["doctor"], ["generate", "--model", directory, "--prompt", "x"]):
        done = subprocess.run(
            [sys.executable, "-m", "qspec_jax.cli", *command], env=os.environ | {"JAX_PLATFORMS": "cuda"}, capture_output=True, text=True
        )
        assert done.returncode == 2 and done.stdout == "", done.stderr
        assert "JAX cannot start with JAX_PLATFORMS=cuda" in done.stderr and "unset it to run on the CPU" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((128,), "--context 128 and a new token are more than the model's 128 positions"),
        ((100, "--max-new-tokens", 29), "--context 100 and --max-new-tokens 29 are more than the model's 128 positions"),
    ],
)
def test_doctor_names_what_was_given(options, message, directory, fails):
    fails(["doctor", "--model", directory, "--context", *options], message)


def test_doctor_says_whether_compiled_programs_are_kept(directory, run, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        code, out, _ = run("doctor", "--model", directory, "--context", 100, "--no-compile-cache")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert code == 0 and ", not used now" in " ".join(out.split())


def test_doctor_asks_for_tokens_that_fit(directory, run):
    assert run("doctor", "--model", directory, "--context", 100)[0] == 0
    for options, prompt in (((), 64), (("--max-new-tokens", 100), 28)):
        code, out, _ = run("doctor", "--model", directory, *options)
        assert code == 0 and f"a prompt of {prompt} tokens" in " ".join(out.split())


def test_doctor_lists_kernels(directory):
    command = [sys.executable, "-m", "qspec_jax.cli", "doctor", "--model", directory, "--context", "64", "--max-new-tokens", "8", "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert report["problems"] == [] and report["fits"] is None
    programs = report["compiled_programs"]
    assert programs["used"] and Path(programs["directory"]).parent == Path(os.environ[VARIABLE])
    assert programs.keys() == {"directory", "used", "programs", "bytes"}
    assert {choice["kernel"] for choice in report["kernels"]} >= {"attention", "matmul", "flush", "norm"}
    assert {choice["implementation"] for choice in report["kernels"]} == {"reference"}


def test_why_a_kernel_is_passed_over(monkeypatch):
    monkeypatch.setattr(dispatch.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "KERNELS", (dispatch.Kernel("sums", "fast"), dispatch.Kernel("sums", "slow")))
    fast, slow = SimpleNamespace(unsupported=lambda: "needs more"), SimpleNamespace(unsupported=lambda: None)
    monkeypatch.setattr(dispatch.importlib, "import_module", lambda name: {"fast": fast, "slow": slow}.get(name.rpartition(".")[2]))
    with dispatch.watched() as found:
        for _ in range(2):
            assert dispatch.choose("sums", "auto") is slow
    assert found == [dispatch.KernelChoice("sums", "slow", (("fast", "needs more"),))]
    dispatch.choose("sums", "auto")
    assert len(found) == 1


def test_a_checkpoint_that_is_larger_than_the_device(monkeypatch, directory, fails):
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 100_000}, device_kind="NVIDIA H100")
    monkeypatch.setattr(loading.jax, "local_devices", lambda: [device])
    with pytest.raises(
        InputError, match=r"its weights take 0\.0 GB in float32, 0\.0 GB more than the 0\.0 GB .* of NVIDIA H100; up to 0\.0 bill"
    ):
        loading.load_model(directory, dtype="float32")


def test_a_full_gpu_is_said_to_have_more(monkeypatch):
    """Unless the environment says how much of it JAX takes; a CPU has all that it has."""
    monkeypatch.delenv(errors.MEMORY_SHARE, raising=False)
    assert errors.more_memory() == ""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert errors.more_memory() == "; JAX takes 0.75 of a GPU's memory, XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 more"
    monkeypatch.setenv(errors.MEMORY_SHARE, "0.9")
    assert errors.more_memory() == ""


def test_a_prompt_that_does_not_fit(monkeypatch, directory, fails, run):
    """What the device says when its memory is full becomes a line with figures; `doctor` says it beforehand."""
    config = loading.config_and_dtype(directory)[0]
    settings = GenerationConfig(draft="quantspec", max_new_tokens=8)
    whole = out_of_memory.fit(config, settings, 64, room=1).memory.total
    assert out_of_memory.fit(config, settings, 64, room=int(whole)).short == pytest.approx(0, abs=1)
    found = out_of_memory.fit(config, settings, 96, room=int(whole))
    assert found.short > 0 and found.longest == 64
    monkeypatch.setattr(out_of_memory, "memory_bytes", lambda: int(whole))
    words = "a prompt of 96 tokens and 8 new ones take ", " GB more than cpu has: at most 64 tokens a prompt fit"
    code, out, err = run("doctor", "--model", directory, "--context", "96", "--max-new-tokens", "8")
    assert code == 2 and "at most 64 tokens fit" in " ".join(out.split()) and all(each in err for each in words)

    def full(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 85899345920 bytes.")

    monkeypatch.setattr("qspec_jax.decoding.engine.Engine.rounds", full)
    prompt = "x " * 96  # 97 tokens or so
    fails(
        ["generate", "--model", directory, "--prompt", prompt, "--max-new-tokens", "8", "--draft", "quantspec"],
        "GB more than cpu has: at most 64 tokens a prompt",
    )
    monkeypatch.setattr(out_of_memory, "memory_bytes", lambda: None)
    fails(
        ["generate", "--model", directory, "--prompt", prompt, "--max-new-tokens", "8", "--draft", "quantspec"],
        "the memory of cpu is too small; give a shorter prompt",
    )
    monkeypatch.setattr(doctor.diagnosis, "problems", full)
    fails(["doctor"], "the device's memory is too small for this; `qspec doctor` and `qspec plan` say what fits")
