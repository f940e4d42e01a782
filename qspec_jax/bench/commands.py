"""The commands of `qspec bench`."""

import functools
from pathlib import Path
from typing import Annotated

import typer

from pallas_kernels.attention.support import MAX_TOKENS
from qspec_jax import drafts
from qspec_jax.bench import attention, attention_report, attention_tuning, decode, decode_report, flush, matmul, matmul_report
from qspec_jax.bench.architectures import ARCHITECTURES, architecture, random_int4, random_model
from qspec_jax.bench.report import check_plot
from qspec_jax.bench.simulated import rate_of_ratio
from qspec_jax.command_line import Gamma, Json, Seed, load, output_to, show
from qspec_jax.errors import InputError

Repeats = Annotated[int, typer.Option(min=1, help="Timed batches, of which the median is given.")]
Output = Annotated[Path | None, typer.Option(help="Write the result to this file instead.")]

benchmarks = typer.Typer(no_args_is_help=True, help="Measurements of speed.")


@benchmarks.command("attention")
def bench_attention(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="A shape, or the beginning of the names of several (int4, tiny); may be given several times: all large ones, if not given."
        ),
    ] = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(help="Of ours: mosaic_gpu, triton, reference; may be given several times: the kernels on a GPU, if not given."),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure the other libraries too.")] = True,
    repeats: Repeats = 20,
    output: Output = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latency against context to this file (.png, .pdf or .svg).")] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Try the configurations of our kernels; keep the best for this GPU.")] = False,
    as_json: Json = False,
):
    """Decode attention: our kernels, and other libraries on a bfloat16 cache, in one run."""
    if tune:
        attention_tuning.check()
    shapes = attention.select_shapes(shape or [])
    implementations = attention.select_implementations(implementation or [])
    progress = False if as_json else None
    if tune:
        if plot or "reference" in implementations:
            raise InputError("--tune does not go with --plot, nor with the reference, which has nothing to tune")
        with output_to(output) as write:
            report = attention_tuning.run(shapes, implementations, repeats=repeats, progress=progress)
            show(report, attention_tuning.table, output, write, as_json=as_json)
        return
    if plot:
        attention_report.check_plot(plot, output, shapes)
    with output_to(output) as write:
        report = attention.run(shapes, implementations, peers=peers, repeats=repeats, progress=progress)
        show(report, attention_report.table, output, write, as_json=as_json)
    if plot:
        attention_report.plot(report, plot)


@benchmarks.command("matmul")
def bench_matmul(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="A shape, or the beginning of the names of several (llama-3.1-8b-qkv, tiny); may be given several times: all large "
            "ones, if not given."
        ),
    ] = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(help="Of ours: mosaic_gpu, triton, reference; may be given several times: the kernels on a GPU, if not given."),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure bfloat16 matmuls of XLA and torch too.")] = True,
    repeats: Repeats = 20,
    output: Output = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the times of each layer to this file (.png, .pdf or .svg).")] = None,
    as_json: Json = False,
):
    """INT4 matmuls: our kernels, and bfloat16 matmuls of the same shapes, in one run."""
    shapes = matmul.select_shapes(shape or [])
    implementations = matmul.select_implementations(implementation or [])
    if plot:
        check_plot(plot, output)
    with output_to(output) as write:
        report = matmul.run(shapes, implementations, peers=peers, repeats=repeats, progress=False if as_json else None)
        show(report, matmul_report.table, output, write, as_json=as_json)
    if plot:
        matmul_report.plot(report, plot)


@benchmarks.command("flush")
def bench_flush(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="As in `bench attention`, with a quantized cache: three large ones, if not given."),
    ] = None,
    num_speculative_tokens: Gamma = 6,
    layers: Annotated[int, typer.Option(min=1, help="Of the cache.")] = 32,
    repeats: Repeats = 20,
    output: Output = None,
    as_json: Json = False,
):
    """Flushing the cache: when rows are due, when none is, and the share of a round."""
    shapes = flush.select_shapes(shape or [])
    _check_gamma(num_speculative_tokens)
    with output_to(output) as write:
        report = flush.run(shapes, gamma=num_speculative_tokens, layers=layers, repeats=repeats, progress=False if as_json else None)
        show(report, flush.table, output, write, as_json=as_json)


@benchmarks.command("decode")
def bench_decode(
    arch: Annotated[str | None, typer.Option(help=f"A known shape, with random weights: {', '.join(ARCHITECTURES)}.")] = None,
    model: Annotated[Path | None, typer.Option(help="A checkpoint directory in Hugging Face format, in place of --arch.")] = None,
    context: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of the prompt; may be given several times: 4096.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(decode.METHODS)}; may be given several times: the baseline and quantspec, if not given."),
    ] = None,
    num_speculative_tokens: Gamma = 6,
    max_new_tokens: Annotated[int, typer.Option(min=16, help="New tokens: 640 are five flushes.")] = 640,
    simulate_acceptance: Annotated[
        float | None, typer.Option(min=0, max=1, help="Accept each draft with this chance, given those before it; random weights need it.")
    ] = None,
    simulate_ratio: Annotated[
        float | None, typer.Option(min=0, max=1, help="The same, by the mean of accepted over drafted tokens that it is to give.")
    ] = None,
    seed: Seed = 0,
    repeats: Repeats = 10,
    output: Output = None,
    plot: Annotated[Path | None, typer.Option(help="Draw speed-up, a round and memory to this file (.png, .pdf or .svg).")] = None,
    as_json: Json = False,
):
    """Whole decodes and their steps, by each method, against the bytes that they must read."""
    if (arch is None) == (model is None):
        raise InputError("one of --arch and --model should be given")
    if simulate_acceptance is not None and simulate_ratio is not None:
        raise InputError("--simulate-acceptance and --simulate-ratio say the same; give one of them")
    methods = decode.select_methods(method or [])
    _check_gamma(num_speculative_tokens)
    if max_new_tokens < 4 * (num_speculative_tokens + 1):
        raise InputError(f"--max-new-tokens {max_new_tokens} should be at least four rounds' {4 * (num_speculative_tokens + 1)}")
    rate = simulate_acceptance if simulate_ratio is None else rate_of_ratio(simulate_ratio, num_speculative_tokens)
    if plot:
        check_plot(plot, output)
    with output_to(output) as write:
        if arch is not None:
            network = random_model(architecture(arch), seed=seed)
            make_draft = lambda: random_int4(network)
        else:
            network, _ = load(model, None, quiet=as_json)
            make_draft = lambda: drafts.quantspec(network).model
        int4 = functools.cache(make_draft)
        report = decode.run(
            arch or str(model),
            network,
            lambda is_int4: int4() if is_int4 else network,
            context or [4096],
            methods,
            gamma=num_speculative_tokens,
            max_new_tokens=max_new_tokens,
            rate=rate,
            repeats=repeats,
            seed=seed,
            progress=False if as_json else None,
        )
        show(report, decode_report.table, output, write, as_json=as_json)
    if plot:
        decode_report.plot(report, plot)


def _check_gamma(gamma: int) -> None:
    if not 1 <= gamma < MAX_TOKENS:
        raise InputError(f"--gamma {gamma} should be from 1 to {MAX_TOKENS - 1}, what the kernels verify at once")
