"""The commands of `qspec bench`."""

import dataclasses
import functools
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer
from tqdm import tqdm

from pallas_kernels.attention.support import MAX_TOKENS
from qspec_jax import demo, plots, reports
from qspec_jax.bench import (
    all_reduce,
    attention,
    attention_tuning,
    batch,
    decode,
    decode_report,
    decode_rows,
    end_to_end,
    flush,
    matmul,
    transformers_decode,
)
from qspec_jax.bench import drafts as drafts_bench
from qspec_jax.bench.architectures import ARCHITECTURES, architecture, check_gpu, random_int4, random_model
from qspec_jax.bench.simulated import rate_of_ratio
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints import huggingface, loading
from qspec_jax.cli.options import (
    ALL,
    Devices,
    DevicesOfModel,
    DtypeOption,
    Gamma,
    Json,
    Output,
    Seed,
    check_proposes,
    devices_of,
    load,
    place_of,
    show,
)
from qspec_jax.decoding.config import GAMMA, GenerationConfig
from qspec_jax.decoding.requests import check_positions
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.int4 import int4_model, stored_int4
from qspec_jax.drafts.registry import AUTO, NONE, USUAL, parse_draft
from qspec_jax.errors import InputError
from qspec_jax.evaluate.stream import token_stream
from qspec_jax.files import output_to, read_text
from qspec_jax.models.sharding import model_mesh
from qspec_jax.training import corpus

log = logging.getLogger(__name__)

Repeats = Annotated[int, typer.Option(min=1, help="Timed batches, of which the median is given.")]

COMPARED = (AUTO, USUAL, "prompt-lookup")  # drafts of `bench drafts`

Gammas = Annotated[
    list[int] | None,
    typer.Option("--gamma", "--num-speculative-tokens", help="Most drafts of a round; may be given several times, to find the best."),
]

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
        typer.Option(help="One of ours: mosaic_gpu, triton, reference; may be given several times: the kernels on a GPU, if not given."),
    ] = None,
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
            raise InputError("--tune does not go with --append, which takes the configurations of attention alone")
        if observe:
            raise InputError("--tune does not go with --observe, which takes the configurations that do without it")
        if plot or "reference" in implementations:
            raise InputError("--tune does not go with --plot, nor with the reference, which has nothing to tune")
        run = functools.partial(attention_tuning.run, shapes, implementations)
    else:
        if plot:
            plots.check(plot, output)
            if all(one.batch > 1 for one in shapes):
                raise InputError("--plot shows shapes of a single row, and none is chosen")
        run = functools.partial(attention.run, shapes, implementations, peers=peers and not append)
    reports.show(lambda: run(repeats=repeats, progress=False if as_json else None), output, as_json=as_json, plot=plot)


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
        typer.Option(help="One of ours: mosaic_gpu, triton, reference; may be given several times: the kernels on a GPU, if not given."),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure bfloat16 matmuls of XLA and torch too.")] = True,
    repeats: Repeats = 20,
    output: Output = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the times of each layer to this file (.png, .pdf or .svg).")] = None,
    as_json: Json = False,
):
    """INT4 matmuls, beside bfloat16 ones. One run times our kernels, and bfloat16 matmuls of the same shapes."""
    shapes = matmul.select_shapes(shape or [])
    implementations = matmul.select_implementations(implementation or [])
    progress = False if as_json else None
    run = functools.partial(matmul.run, shapes, implementations, peers=peers, repeats=repeats, progress=progress)
    reports.show(run, output, as_json=as_json, plot=plot)


@benchmarks.command("flush")
def bench_flush(
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
    _check_gamma(num_speculative_tokens)
    progress = False if as_json else None
    run = functools.partial(flush.run, shapes, gamma=num_speculative_tokens, layers=layers, repeats=repeats, progress=progress)
    reports.show(run, output, as_json=as_json)


@benchmarks.command("all-reduce")
def bench_all_reduce(
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
    mesh, progress = model_mesh(found), False if as_json else None
    reports.show(lambda: all_reduce.run(mesh, rows or [1, 8, 2048], width, repeats=repeats, progress=progress), output, as_json=as_json)


@benchmarks.command("decode")
def bench_decode(
    arch: Annotated[str | None, typer.Option(help=f"A known shape, with random weights: {', '.join(ARCHITECTURES)}.")] = None,
    model: Annotated[Path | None, typer.Option(help="A checkpoint directory in Hugging Face format, in place of --arch.")] = None,
    layers: Annotated[
        int | None, typer.Option(help="Only so many layers of --arch: to compare what a layer takes, in less time and memory.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of the prompt; may be given several times: 4096, if not given.")
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option("--draft", metavar="NAME[:SETTING=VALUE,...]", help="A draft, beside the baseline; may be given several times."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "--methods",
            help=f"One of {', '.join(decode_rows.METHODS)}, or several with commas between them: the baseline and quantspec, if not given.",
        ),
    ] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            "--cache",
            metavar="NAME[:SETTING=VALUE,...]",
            help="A cache that every --draft decodes over; may be given several times: int8, if not given.",
        ),
    ] = None,
    baseline_cache: Annotated[
        str,
        typer.Option("--baseline-cache", metavar="NAME[:SETTING=VALUE,...]", help="The cache of the autoregressive baseline."),
    ] = "full",
    num_speculative_tokens: Gammas = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Rows decoded together, all after the same prompt; may be given several times: 1, if not given."),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Read only the shape of --model; --arch always has random weights.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=16, help="New tokens: 640 are five flushes.")] = 640,
    simulate_acceptance: Annotated[
        list[float] | None,
        typer.Option(
            min=0, max=1, help="Accept each draft with this chance, given those before it; one for all contexts, or one for each --context."
        ),
    ] = None,
    simulate_ratio: Annotated[
        list[float] | None, typer.Option(min=0, max=1, help="Simulate acceptance so that this is the mean of accepted over drafted tokens.")
    ] = None,
    simulate_inner_acceptance: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="The chance of what triforce's small model drafts; that of the others, if not given."),
    ] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Measure transformers' generate too, in a process of its own; needs torch.")
    ] = False,
    devices: DevicesOfModel = None,
    seed: Seed = 0,
    repeats: Repeats = 10,
    output: Output = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw speed-up, a round and memory, or with several batch sizes tokens/s, to this file (.png, .pdf or .svg)."),
    ] = None,
    as_json: Json = False,
):
    """Whole decodes and their steps, by each method. Times are compared with the bytes that each step must read."""
    if (arch is None) == (model is None):
        raise InputError("one of --arch and --model should be given")
    if layers is not None and (arch is None or transformers):
        raise InputError("--layers goes with --arch, and without --transformers")
    if simulate_acceptance and simulate_ratio:
        raise InputError("--simulate-acceptance and --simulate-ratio say the same; give one of them")
    if simulate_inner_acceptance is not None and not (simulate_acceptance or simulate_ratio):
        raise InputError("--simulate-inner-acceptance goes with --simulate-acceptance or --simulate-ratio")
    named = (name for names in method or [] for name in names.split(","))
    methods = decode_rows.select_methods(named, draft or [], cache or [], baseline_cache=baseline_cache)
    gammas = _gammas(num_speculative_tokens, [6], max_new_tokens, methods)
    if simulate_ratio and len(gammas) > 1:
        raise InputError("--simulate-ratio goes with one --gamma; with several give --simulate-acceptance")
    contexts, batch_sizes = list(dict.fromkeys(context or [4096])), sorted(set(batch_size or [1]))
    simulated = simulate_acceptance or [rate_of_ratio(ratio, gammas[0]) for ratio in simulate_ratio or []]
    if len(simulated) not in (0, 1, len(contexts)):
        flag = "--simulate-ratio" if simulate_ratio else "--simulate-acceptance"
        raise InputError(f"{flag} is given {len(simulated)} times for {len(contexts)} contexts; once for all or once for each would do")
    rates = dict(zip(contexts, simulated * len(contexts) if len(simulated) == 1 else simulated)) or None
    if transformers:
        if random_weights:
            raise InputError("--transformers goes with --arch or a whole checkpoint, not with --random-weights")
        if batch_sizes != [1]:
            raise InputError("--transformers measures one row only; leave out --batch-size")
        transformers_decode.check()
    if plot:
        plots.check(plot, output)
    shape = huggingface.load_config(model) if arch is None else architecture(arch, layers)
    check_positions("model", shape.max_length, "--context", max(contexts), max_new_tokens)
    for method in methods:
        CacheConfig.parse(method.cache).check(shape)
    if arch is not None and not transformers:  # that is to come before jax takes the GPU's memory
        check_gpu(arch)
    with output_to(output) as write:
        if rates is None and (arch is not None or random_weights) and any(method.speculative for method in methods):
            log.warning("random weights: their acceptance means nothing; --simulate-ratio simulates one")
        beside = []
        if transformers:  # before jax takes the GPU's memory
            dtype, source = loading.stored_dtype(shape), ARCHITECTURES[arch] if arch else model
            each = tqdm(contexts, desc="transformers", unit="context", leave=False, disable=True if as_json else None)
            beside = [transformers_decode.measure(source, context, dtype=dtype, seed=seed) for context in each]
        name, place = arch or str(model), place_of(devices, distributed=False)
        if arch is not None or random_weights:
            network = random_model(shape, seed=seed, mesh=place)
            make_int4 = lambda: random_int4(network)
        else:
            network, _ = load(model, None, quiet=as_json, place=place)
            make_int4 = lambda: int4_model(network)
        report = decode.run(
            name if layers is None else f"{name}, {layers} of {architecture(arch).num_layers} layers",
            network,
            functools.cache(make_int4),
            contexts,
            methods,
            gammas,
            max_new_tokens=max_new_tokens,
            rates=rates,
            inner_rate=simulate_inner_acceptance,
            batch_sizes=batch_sizes,
            beside=beside,
            repeats=repeats,
            seed=seed,
            progress=False if as_json else None,
        )
        show(report, decode_report.table, output, write, as_json=as_json)
    if plot:
        decode_report.plot(report, plot)


@benchmarks.command("batch")
def bench_batch(
    arch: Annotated[str | None, typer.Option(help=f"A known shape, with random weights: {', '.join(ARCHITECTURES)}.")] = None,
    model: Annotated[Path | None, typer.Option(help="A checkpoint directory, in place of --arch.")] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(help="With --model, a text that prompts are cut from; may be given several times: the demo's held-out files."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 200,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded at a time.")] = 8,
    prompt_tokens: Annotated[str, typer.Option(metavar="LEAST-MOST", help="Tokens of a prompt, log-uniform.")] = "64-2048",
    new_tokens: Annotated[str, typer.Option(metavar="LEAST-MOST", help="New tokens after a prompt, log-uniform.")] = "16-512",
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option("--gamma", "--num-speculative-tokens", help=f"Most drafts of a round: {GAMMA}, if not given."),
    ] = None,
    draft: Annotated[str, typer.Option("--draft", metavar="NAME[:SETTING=VALUE,...]", help="The draft.")] = USUAL,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    simulate_ratio: Annotated[
        float | None, typer.Option(min=0, max=1, help="Accept this share of the drafts in the mean, whatever they are.")
    ] = None,
    fixed: Annotated[bool, typer.Option("--fixed/--no-fixed", help="Also fixed batches, to compare.")] = True,
    one_by_one: Annotated[bool, typer.Option("--one-by-one", help="Also one prompt at a time, to compare their tokens.")] = False,
    devices: Devices = "1",
    seed: Seed = 0,
    dtype: DtypeOption = None,
    output: Output = None,
    as_json: Json = False,
):
    """Many prompts of mixed lengths. A batch that is refilled is compared with fixed batches."""
    if (arch is None) == (model is None):
        raise InputError("one of --arch and --model should be given")
    if simulate_ratio is not None and temperature:
        raise InputError("--simulate-ratio simulates greedy decoding; it does not go with --temperature")
    if arch is not None and (file or dtype):
        raise InputError("--file and --dtype go with --model; --arch has random prompts, and weights in bfloat16")
    lengths, new = _bounds("--prompt-tokens", prompt_tokens, 1), _bounds("--new-tokens", new_tokens, 2)  # the first is prefill's
    parse_draft(draft)  # which raises InputError for auto, whose gamma would be open
    config = GenerationConfig(draft=draft, num_speculative_tokens=num_speculative_tokens, temperature=temperature, ignore_eos=True)
    _check_gamma(config.num_speculative_tokens)
    several = devices_of(devices)
    left_out = {way for way, asked in (("fixed", fixed), ("one by one", one_by_one), (batch.SEVERAL, len(several) > 1)) if not asked}
    rate = None if simulate_ratio is None else rate_of_ratio(simulate_ratio, config.num_speculative_tokens)
    positions = (architecture(arch) if arch else huggingface.load_config(model)).max_length
    if lengths[1] + new[1] > positions:
        raise InputError(f"--prompt-tokens {prompt_tokens} and --new-tokens {new_tokens} exceed the model's {positions} positions")
    if arch is not None:
        check_gpu(arch)
    with output_to(output) as write:
        if arch is not None:
            network = random_model(architecture(arch), seed=seed)
            int4 = random_int4(network)
            words = np.random.default_rng(seed).integers(0, network.config.vocab_size, 4 * lengths[1])
            sources = [words.tolist()]
        else:
            network, tokenizer = load(model, dtype, quiet=as_json)
            int4 = stored_int4(model, network)
            sources = [tokenizer(read_text(path))["input_ids"] for path in file or corpus.held_out_files()]
        made = make_draft(config.draft, network, int4=int4)
        config = dataclasses.replace(config, draft=made or NONE)
        requests = batch.make_requests(sources, prompts, lengths, new, config, seed=seed)
        report = batch.run(
            arch or str(model),
            network,
            requests,
            batch_size=batch_size,
            ways=[way for way in batch.WAYS if way not in left_out],
            devices=several,
            rate=rate,
            progress=False if as_json else None,
        )
        show(report, batch.table, output, write, as_json=as_json)


@benchmarks.command("drafts")
def bench_drafts(
    arch: Annotated[str | None, typer.Option(help=f"A known shape, with random weights: {', '.join(ARCHITECTURES)}.")] = None,
    model: Annotated[Path | None, typer.Option(help="A checkpoint directory, in place of --arch: the embedded model, if neither.")] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            metavar="NAME[:SETTING=VALUE,...]",
            help=f"A draft beside none; may be given several times: {', '.join(COMPARED)}, if not given.",
        ),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option("--cache", metavar="NAME[:SETTING=VALUE,...]", help="The target's cache with all drafts: int8, if not given."),
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="With a checkpoint, a text that the prompt is cut from: the demo's held-out files.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 256,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--gamma", "--num-speculative-tokens", help="Most drafts of a round: each draft's default, if not given.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each decode.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Turns, of which the medians are given.")] = 7,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    output: Output = None,
    as_json: Json = False,
):
    """Whole decodes with each draft against none, in turns. This shows what pays on this machine, which may be a CPU."""
    if arch is not None and (model is not None or file):
        raise InputError("--arch has random weights and a random prompt; leave out --model and --file")
    if num_speculative_tokens is not None:
        _check_gamma(num_speculative_tokens)
    drafts = list(dict.fromkeys(draft or COMPARED))
    for text in drafts:  # what is wrong with one is found before any is measured
        GenerationConfig(draft=text, cache=cache, num_speculative_tokens=num_speculative_tokens)
    shape = architecture(arch) if arch else huggingface.load_config(model or demo.MODEL)
    check_positions("model", shape.max_length, "--context", context, max_new_tokens)
    with output_to(output) as write:
        if arch is not None:
            if dtype == "float64":
                jax.config.update("jax_enable_x64", True)
            network = random_model(shape, seed=seed)
            if dtype is not None:
                network = network.with_weights({path: weight.astype(dtype) for path, weight in network.weights().items()})
            words = np.random.default_rng(seed).integers(0, shape.vocab_size, context).tolist()
            make_int4 = lambda: random_int4(network)
            log.warning("random weights: what drafts accept of them means nothing")
        else:
            network, tokenizer = load(model or demo.MODEL, dtype, quiet=as_json)
            words = token_stream(tokenizer, map(read_text, file or corpus.held_out_files()))[:context]
            if len(words) < context:
                raise InputError(f"--context {context}: the text has {len(words)} tokens")
            make_int4 = lambda: int4_model(network)
        report = drafts_bench.run(
            arch or str(model or "the embedded model"),
            network,
            functools.cache(make_int4),
            words,
            drafts,
            cache=cache,
            gamma=num_speculative_tokens,
            max_new_tokens=max_new_tokens,
            turns=repeats,
            progress=False if as_json else None,
        )
        show(report, drafts_bench.table, output, write, as_json=as_json)


def _bounds(flag: str, text: str, least: int) -> tuple[int, int]:
    """Reads LEAST-MOST. Raises InputError for any other text, and for a bound below `least`."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and least <= int(low) <= int(high)):
        raise InputError(f"{flag} {text} should be the least, {least} or more, a hyphen, and the most, as 64-2048")
    return int(low), int(high)


@benchmarks.command("pretrain")
def bench_pretrain(
    output: Annotated[Path, typer.Option(help="Directory of the run, which in the end is a checkpoint; it takes 8 GB.")],
    minutes: Annotated[float, typer.Option(min=0, max=10_000, help="Time of all training steps; compiling and saving come on top.")] = 10,
    segment_minutes: Annotated[
        float, typer.Option(min=0, max=10_000, help="Time of this call, all in all; call again until it is completed.")
    ] = 7.5,
    steps: Annotated[int, typer.Option(min=0, help="Train exactly so many steps, however long they take; 0 goes by --minutes.")] = 0,
    needles: Annotated[
        float,
        typer.Option(min=0, max=0.9, help="Share of the tokens that are prompts of `eval needle` with their answers, of other seeds."),
    ] = 0,
    smoke: Annotated[bool, typer.Option("--smoke", help="A tiny model on a tiny corpus, to see that everything works.")] = False,
    as_json: Json = False,
):
    """Train a model of 419 M parameters on the demo's corpus. It runs in segments, for `bench end-to-end`, on one or more GPUs of 80 GB."""
    try:
        from qspec_jax.training import benchmark_model
    except ModuleNotFoundError as error:
        raise InputError(f"training needs {error.name}: pip install optax tokenizers") from None
    settings = dict(minutes=minutes, segment_minutes=segment_minutes, steps=steps, needles=needles, smoke=smoke)
    report = benchmark_model.run(output, **settings, progress=False if as_json else None)
    show(report, benchmark_model.table, None, sys.stdout.write, as_json=as_json)


@benchmarks.command("end-to-end")
def bench_end_to_end(
    model: Annotated[Path, typer.Option(help="Checkpoint directory in Hugging Face format.")],
    file: Annotated[
        list[Path] | None,
        typer.Option(help="A text; may be given several times, and all are joined: the demo's held-out files, if not given."),
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of the prompts; may be given several times: 8k, 16k, 32k and 64k, if not given.")
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="May be given several times: 0 and 1, if not given.")] = None,
    num_speculative_tokens: Gammas = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            metavar="NAME[:SETTING=VALUE,...]",
            help="A draft to decode with, over an int8 cache; may be given several times: quantspec, if not given.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=16, help="New tokens: 640 are five flushes.")] = 640,
    texts: Annotated[int, typer.Option(min=1, help="Texts of each context, fewer where there is less text.")] = 4,
    calibrate: Annotated[bool, typer.Option(help="Round the draft's INT4 weights for the prompts' activations (GPTQ).")] = True,
    seed: Seed = 0,
    output: Output = None,
    plot: Annotated[Path | None, typer.Option(help="Draw speed-up and acceptance to this file (.png, .pdf or .svg).")] = None,
    as_json: Json = False,
):
    """A trained model on real text. This measures acceptance, and the speed-up over autoregressive decoding."""
    methods = decode_rows.select_methods([], draft or [USUAL])
    for method in methods:
        if method.draft != NONE:
            check_proposes(method.draft, parse_draft(method.draft))
    if not any(method.speculative for method in methods):
        raise InputError("--draft none is the baseline, which is always measured; name a draft")
    gammas = _gammas(num_speculative_tokens, [4, 6], max_new_tokens, methods)
    if plot:
        plots.check(plot, output)
    with output_to(output) as write:
        network, tokenizer = load(model, None, quiet=as_json)
        report = end_to_end.run(
            str(model),
            network,
            token_stream(tokenizer, map(read_text, file or corpus.held_out_files())),
            list(dict.fromkeys(context or [8192, 16384, 32768, 65536])),
            list(dict.fromkeys(temperature or [0.0, 1.0])),
            gammas,
            methods,
            max_new_tokens=max_new_tokens,
            texts=texts,
            calibrate=calibrate,
            seed=seed,
            progress=False if as_json else None,
        )
        show(report, end_to_end.table, output, write, as_json=as_json)
    if plot:
        end_to_end.plot(report, plot)


def _gammas(given: list[int] | None, otherwise: list[int], max_new_tokens: int, methods: Sequence[decode_rows.Method]) -> list[int]:
    """The numbers of drafts asked for, each once.

    Raises InputError for one that the kernels cannot verify, and where one of the methods has fewer than four rounds.
    """
    gammas = list(dict.fromkeys(given or otherwise))
    if given and not any(method.speculative for method in methods):
        log.warning("--gamma makes no difference: no method has drafts for the target to verify")
    for gamma in gammas:
        _check_gamma(gamma)
    for gamma in (gamma for method in methods for gamma in method.gammas(gammas)):
        if max_new_tokens < 4 * (gamma + 1):
            raise InputError(f"--max-new-tokens {max_new_tokens} should be at least {4 * (gamma + 1)}, four rounds of --gamma {gamma}")
    return gammas


def _check_gamma(gamma: int) -> None:
    """Raises InputError for more drafts than the kernels verify at once."""
    if not 1 <= gamma < MAX_TOKENS:
        raise InputError(f"--gamma {gamma} should be from 1 to {MAX_TOKENS - 1}, what the kernels verify at once")
