"""The command `qspec demo`."""

from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from qspec_jax import demo as embedded
from qspec_jax.cli.generate import Progress, as_object, generate_with_progress, stats_table
from qspec_jax.cli.options import Calibrate, Gamma, Json, Seed, load
from qspec_jax.decoding.config import GAMMA, GenerationConfig
from qspec_jax.decoding.keys import key_of
from qspec_jax.decoding.prepare import prepare
from qspec_jax.drafts import quantspec
from qspec_jax.errors import InputError
from qspec_jax.files import read_json, to_json
from qspec_jax.training import corpus


def demo(
    prompt_tokens: Annotated[int, typer.Option(help="How much of the held-out file to read.")] = 4096,
    max_new_tokens: Annotated[int, typer.Option(help="How much to continue it by.")] = 256,
    num_speculative_tokens: Gamma = GAMMA,
    temperature: Annotated[float, typer.Option(help="0 is greedy, which a model this small turns into repetition.")] = 0.8,
    seed: Seed = 0,
    calibrate: Calibrate = True,
    as_json: Json = False,
):
    """Continue a real file, with and without a draft."""
    console = Console(quiet=as_json)
    network, tokenizer = load(embedded.MODEL, embedded.dtype(), quiet=as_json)
    path = _demo_file()
    tokens = tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
    positions = network.config.max_length
    if prompt_tokens > min(len(tokens), positions - max_new_tokens):
        raise InputError(
            f"--prompt-tokens {prompt_tokens} and --max-new-tokens {max_new_tokens} are too many: {path.name} has {len(tokens)} tokens, "
            f"and the model {positions} positions for both"
        )
    prompt = tokens[:prompt_tokens]
    parameters = sum(weight.size for weight in network.weights().values())
    console.print(
        f"[bold]qspec demo[/]: a Llama of {parameters / 1e6:.1f} M parameters, trained on Python source, continues {path.name} "
        f"(held out from its training) after {prompt_tokens:,} tokens, by {max_new_tokens} new ones, "
        f"on {_device_name()} in {network.dtype.name}.\n"
    )
    shared = dict(max_new_tokens=max_new_tokens, temperature=temperature, ignore_eos=True)
    draft = quantspec(network, calibration=[prompt] if calibrate else None, progress=False if as_json else None)
    runs = {
        "quantspec": GenerationConfig(draft=draft, num_speculative_tokens=num_speculative_tokens, **shared),
        "autoregressive": GenerationConfig(draft="none", **shared),
    }
    results = {}
    for name, config in runs.items():
        prepared = prepare(network, [prompt], config=config, key=key_of(seed), tokenizer=tokenizer)
        results[name] = generate_with_progress(prepared, Progress(max_new_tokens, quiet=as_json, label=name))
    if as_json:
        print(to_json({"file": path.name, "dtype": network.dtype.name} | {name: as_object(out) for name, out in results.items()}))
        return
    context = tokenizer.decode(prompt[-60:])
    continued = Text.assemble((context, "dim"), (results["quantspec"].text[0], "green"))
    console.print(Panel(continued, title=f"{path.name}, continued by quantspec", title_align="left"))
    console.print(stats_table(results, bf16_bytes=_bf16_cache_bytes(network, prompt_tokens + max_new_tokens)))
    if jax.default_backend() == "cpu":
        console.print(
            "On a CPU speculation shows its [bold]acceptance[/], not its speed-up: it pays where decoding waits for memory, on a GPU at "
            "long context. Here unpacking 4-bit codes costs more than it saves.\n"
        )
        console.print(_on_a_gpu())


def _on_a_gpu() -> Table:
    """What was measured on GPUs, from demo/measured.json."""
    found = read_json(Path(embedded.__file__).parent / "measured.json")
    gpus = " and ".join(sorted({row["device"] for row in found["rows"]}))
    caption = "accepted: of the drafts, given those before. Sparse drafts, which read 3 or 6 % of the cache; batch 1."
    table = Table(title=f"Measured on one {gpus}, {found['date']}", caption=caption, title_justify="left", caption_justify="left", box=None)
    for label in ("model", "context", "accepted", "ms a token", "without", "speed-up"):
        table.add_column(label, justify="left" if label == "model" else "right")
    for row in found["rows"]:
        rate = f"{row['conditional_rate']:.2f}, {'simulated' if row['simulated'] else 'real'}"
        times = f"{row['ms']:.2f}", f"{row['baseline_ms']:.2f}", f"{row['speedup']:.2f}x"
        table.add_row(row["model"], f"{row['context'] // 1024}k", rate, *times)
    return table


def _demo_file() -> Path:
    path = next(iter(corpus.held_out_files()), None)
    if path is None:
        raise InputError("this Python has no sources of its standard library, which the demo reads; use another Python")
    return path


def _device_name() -> str:
    device = jax.devices()[0]
    return "a CPU" if device.platform == "cpu" else device.device_kind


def _bf16_cache_bytes(network, tokens: int) -> int:
    c = network.config
    return 2 * 2 * c.num_layers * c.num_kv_heads * c.head_dim * tokens
