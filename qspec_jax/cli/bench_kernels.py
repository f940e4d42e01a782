"""The commands of `qspec bench` that measure kernels: attention, INT4 matmuls, flushes, all-reduces."""

import functools
from pathlib import Path
from typing import Annotated

import typer

from qspec_jax import plots
from qspec_jax.bench import all_reduce, attention, attention_tuning, flush, matmul
from qspec_jax.bench.decode_rows import check_gamma
from qspec_jax.cli.measuring import measure_and_show
from qspec_jax.cli.options import ALL, Devices, Gamma, Json, Output, devices_of
from qspec_jax.errors import InputError
from qspec_jax.models.sharding import model_mesh

Repeats = Annotated[int, typer.Option(min=1, help="Timed batches, of which the median is given.")]
Implementations = Annotated[
    list[str] | None,
    typer.Option(help="One of ours: mosaic_gpu, triton, reference; may be given several times: the kernels on a GPU, if not given."),
]


def shapes_of(examples: str):
    """The option of named shapes. examples: of beginnings of their names."""
    some = f"A shape, or the beginning of the names of several ({examples}); may be given several times: all large ones, if not given."
    return Annotated[list[str] | None, typer.Option(help=some)]


kernels = typer.Typer()


@kernels.command("attention")
def bench_attention(
    command: typer.Context,
    shape: shapes_of("int4, tiny") = None,
    implementation: Implementations = None,
    listed: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Read this share of the groups, random ones, by lists; INT4 shapes alone.")
    ] = None,
    observe: Annotated[
        bool, typer.Option("--observe", help="Also find the attention mass of each group, as a verification does for --draft sparse.")
    ] = False,
    append: Annotated[
        bool,
        typer.Option(
            "--append",
            help="Also RoPE, and appending to the buffer: all launches of a layer's attention. The reference is the kernels one after the "
            "other; other libraries are left out.",
        ),
    ] = False,
    peers: Annotated[bool, typer.Option(help="Measure the other libraries too.")] = True,
    repeats: Repeats = 20,
    output: Output = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latency against context to this file (.png, .pdf or .svg).")] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Try the configurations of our kernels and keep the best for this GPU.")] = False,
    as_json: Json = False,
):
    """Decode attention, beside other libraries. One run times our kernels, and other libraries on a bfloat16 cache."""
    if tune:
        attention_tuning.check()
    shapes = attention.reading(attention.select_shapes(shape or []), listed=listed, observe=observe, append=append)
    implementations = attention.select_implementations(implementation or [], append=append)
    if plot and (listed is not None or observe or append):
        raise InputError("--plot shows shapes that are read whole, and attention alone; leave out --listed, --observe and --append")
    if tune:
        if append:
            raise InputError("--tune finds configurations of attention alone, which --append takes too; leave out --append")
        if observe:
            raise InputError("--tune finds configurations for attention without its mass, which --observe takes too; leave out --observe")
        if plot or "reference" in implementations:
            raise InputError("--tune draws nothing, and the reference has nothing to tune; leave out --plot and the reference")
        run = functools.partial(attention_tuning.run, shapes, implementations)
    else:
        if plot:
            plots.check(plot, output)
            if all(one.batch > 1 for one in shapes):
                raise InputError("--plot shows shapes of a single row, and none is chosen")
        run = functools.partial(attention.run, shapes, implementations, peers=peers and not append)
    run = functools.partial(run, repeats=repeats, progress=False if as_json else None)
    measure_and_show(command, lambda kept: run(kept=kept), output, as_json=as_json, plot=plot)


@kernels.command("matmul")
def bench_matmul(
    command: typer.Context,
    shape: shapes_of("llama-3.1-8b-qkv, tiny") = None,
    implementation: Implementations = None,
    peers: Annotated[bool, typer.Option(help="Measure bfloat16 matmuls of XLA and torch too.")] = True,
    repeats: Repeats = 20,
    output: Output = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the times of each layer to this file (.png, .pdf or .svg).")] = None,
    as_json: Json = False,
):
    """Matmuls with INT4 and nested weights, beside bfloat16 ones. One run times our kernels, and bfloat16 matmuls of the same shapes."""
    shapes = matmul.select_shapes(shape or [])
    implementations = matmul.select_implementations(implementation or [])
    progress = False if as_json else None
    run = functools.partial(matmul.run, shapes, implementations, peers=peers, repeats=repeats, progress=progress)
    measure_and_show(command, lambda kept: run(kept=kept), output, as_json=as_json, plot=plot)


@kernels.command("flush")
def bench_flush(
    command: typer.Context,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="A shape of `bench attention` with a quantized cache; may be given several times: three large ones, if not given."
        ),
    ] = None,
    num_speculative_tokens: Gamma = 6,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the cache.")] = 32,
    repeats: Repeats = 20,
    output: Output = None,
    as_json: Json = False,
):
    """Flushing the cache. It is timed when all rows are due and when none is, and its share of a round is computed."""
    shapes = flush.select_shapes(shape or [])
    check_gamma(num_speculative_tokens)
    progress = False if as_json else None
    run = functools.partial(flush.run, shapes, gamma=num_speculative_tokens, layers=layers, repeats=repeats, progress=progress)
    measure_and_show(command, lambda kept: run(kept=kept), output, as_json=as_json)


@kernels.command("all-reduce")
def bench_all_reduce(
    command: typer.Context,
    devices: Devices = ALL,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Rows; may be given several times: 1, 8 and 2048, if not given.")] = None,
    width: Annotated[int, typer.Option(min=1, help="Columns: a model's hidden size.")] = 4096,
    repeats: Repeats = 20,
    output: Output = None,
    as_json: Json = False,
):
    """Adding up hidden states over devices. A model that is divided over them does this twice in a layer."""
    if len(found := devices_of(devices)) < 2:
        raise InputError("there is one device; an all-reduce needs two or more")
    progress = False if as_json else None
    run = functools.partial(all_reduce.run, model_mesh(found), rows or [1, 8, 2048], width, repeats=repeats, progress=progress)
    measure_and_show(command, lambda kept: run(kept=kept), output, as_json=as_json)
