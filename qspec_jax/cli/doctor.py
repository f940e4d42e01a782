"""The command `qspec doctor`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from qspec_jax import compile_cache, demo
from qspec_jax.bench.architectures import architecture
from qspec_jax.checkpoints.loading import load_plan
from qspec_jax.checkpoints.tokenizers import tokenizer_problem
from qspec_jax.cli import process
from qspec_jax.cli.options import Json, megabytes
from qspec_jax.decoding import diagnosis, out_of_memory
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.drafts.registry import USUAL
from qspec_jax.errors import InputError
from qspec_jax.files import to_json
from qspec_jax.planning.choice import without_kernels
from qspec_jax.reports import this_run

CONTEXT = 4096
IMPLEMENTATIONS = {
    "mosaic_gpu": "Pallas Mosaic GPU",
    "mosaic_plain": "Pallas Mosaic GPU for plain weights",
    "mosaic_int8": "Pallas Mosaic GPU for INT8 weights",
    "triton": "Triton",
    "reference": "plain JAX",
}


def doctor(
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Checkpoint directory, GGUF file, or ORG/NAME on the Hub: the embedded model, if not given."),
    ] = None,
    arch: Annotated[str | None, typer.Option(help="A known shape instead of a checkpoint, see `qspec plan`.")] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help=f"Tokens of the prompt that should fit: {CONTEXT}, or those that the model's positions have room for."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"New tokens after it: {GenerationConfig.max_new_tokens}, or the positions that are left, if fewer, if not given."
        ),
    ] = None,
    draft: Annotated[str, typer.Option(metavar="NAME[:SETTING=VALUE,...]", help="What drafts.")] = USUAL,
    as_json: Json = False,
):
    """Devices, versions, and the kernels that would run. If something is wrong, the exit code is 2, and a line says what to do."""
    diagnosis.check_backend()
    if arch is not None and model is not None:
        raise InputError("--arch and --model exclude each other; give one of them")
    model = demo.MODEL if model is None else model
    plan = None if arch else load_plan(model)
    config = plan.config if plan else architecture(arch)
    if context is None:
        new = max_new_tokens or min(GenerationConfig.max_new_tokens, config.max_length // 2)
        context = max(1, min(CONTEXT, config.max_length - new))
    room = config.max_length - context
    if room < (max_new_tokens or 1):
        asked = f"--context {context}" + (f" and --max-new-tokens {max_new_tokens}" if max_new_tokens else " and a new token")
        raise InputError(f"{asked} are more than the model's {config.max_length} positions")
    settings = GenerationConfig(draft=draft, max_new_tokens=max_new_tokens or min(GenerationConfig.max_new_tokens, room))
    room, found = out_of_memory.memory_bytes(), diagnosis.problems()
    fit = None if room is None else out_of_memory.fit(config, settings, context, room=room)
    if fit and fit.short:
        found.append(out_of_memory.does_not_fit(config, settings, context, rows=1))
    if not arch and (unread := tokenizer_problem(model)):
        found.append(unread)
    chosen = diagnosis.kernels(config, settings, context)
    report = {
        "versions": {"qspec-jax": process.version_of("qspec-jax")} | this_run()["versions"],
        "driver": diagnosis.driver_version(),
        "devices": [{"kind": device.device_kind, "platform": device.platform} for device in jax.local_devices()],
        "memory_bytes": room,
        "model": arch or str(model),
        "linear_layers": plan.described_linears() if plan else None,
        "context": context,
        "fits": None if fit is None else dataclasses.asdict(fit) | {"short": fit.short},
        "kernels": [dataclasses.asdict(choice) for choice in chosen],
        "no_draft_pays": without_kernels(config),
        "compiled_programs": _compiled_programs(),
        "problems": found,
    }
    if as_json:
        print(to_json(report))
    else:
        _print(report, fit)
    if found:
        raise InputError("; ".join(found))


def _compiled_programs() -> dict[str, Any]:
    """The folder of compiled programs, whether this process keeps them there, and what it holds; or why there is none."""
    used = jax.config.jax_compilation_cache_dir
    try:
        directory = Path(used) if used else compile_cache.default_directory()
    except InputError as error:
        return {"directory": f"none: {error}", "used": False}
    return {"directory": str(directory), "used": bool(used)} | dataclasses.asdict(compile_cache.held(directory))


def _print(report: dict[str, Any], fit: out_of_memory.Fit | None) -> None:
    console = Console()
    machine = Table("", "", box=None, show_header=False, padding=(0, 3, 0, 0))
    devices = [f"{len(report['devices'])} x {report['devices'][0]['kind']}"]
    devices += [f"{megabytes(report['memory_bytes'])} each that JAX may take"] if report["memory_bytes"] else []
    devices += [f"driver {report['driver']}"] if report["driver"] else []
    machine.add_row("devices", ", ".join(devices))
    machine.add_row("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items() if name != "platform"))
    machine.add_row("model", f"{report['model']}, a prompt of {report['context']:,} tokens")
    if report["linear_layers"]:
        machine.add_row("linear layers", report["linear_layers"])
    machine.add_row(
        "memory", "not known, as this device does not say how much it has" if fit is None else f"{fit}; at most {fit.longest:,} tokens fit"
    )
    kept = report["compiled_programs"]
    held = f": {kept['programs']} in {megabytes(kept['bytes'])}" if "programs" in kept else ""
    machine.add_row("compiled programs", f"{kept['directory']}{held}{'' if kept['used'] else ', not used now'}")
    console.print(machine)
    kernels = Table("kernel", "runs in", "not in", box=None, header_style="bold", padding=(0, 3, 0, 0))
    for choice in report["kernels"]:
        others = "; ".join(f"{IMPLEMENTATIONS[name]}: {reason}" for name, reason in choice["passed_over"])
        kernels.add_row(choice["kernel"], IMPLEMENTATIONS[choice["implementation"]], others)
    console.print(kernels)
    if report["no_draft_pays"]:
        console.print(f"On a GPU give --draft none: {report['no_draft_pays']}.")
    if jax.default_backend() == "cpu":
        console.print("On a CPU everything runs in plain JAX. README.md says what a GPU gives.", style="dim")
