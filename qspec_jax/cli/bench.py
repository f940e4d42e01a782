"""The commands of `qspec bench`: whole decodes, batches and drafts here, and those of other modules."""

import dataclasses
import itertools
import logging
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer

from qspec_jax import demo, reports
from qspec_jax.bench import batch, decode, decode_rows, end_to_end, transformers_decode
from qspec_jax.bench import drafts as drafts_bench
from qspec_jax.bench.architectures import ARCHITECTURES, architecture, check_gpu, random_int4, random_model, with_weights
from qspec_jax.bench.decode_rows import check_gamma, select_gammas
from qspec_jax.bench.simulated import rate_of_ratio, rates_of
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints import hub, huggingface, loading
from qspec_jax.checkpoints.weights_text import WeightsChoice
from qspec_jax.cli.bench_kernels import Repeats, kernels
from qspec_jax.cli.bench_options import DRAFT, Arch, Gammas, Model, NewTokens, Texts, drafts_of, int4_of
from qspec_jax.cli.bench_states import states_commands
from qspec_jax.cli.measuring import measure_and_show
from qspec_jax.cli.options import (
    Devices,
    DevicesOfModel,
    DtypeOption,
    Json,
    Output,
    Seed,
    WeightsOption,
    check_proposes,
    devices_of,
    load,
    place_of,
)
from qspec_jax.decoding.config import BITS, EXACT, GAMMA, GenerationConfig
from qspec_jax.decoding.requests import check_positions
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.int4 import stored_int4
from qspec_jax.drafts.registry import AUTO, NONE, USUAL, parse_draft
from qspec_jax.errors import InputError
from qspec_jax.evaluate.texts import token_stream
from qspec_jax.files import read_text
from qspec_jax.kept_rows import KeptRows
from qspec_jax.progress import progress_bar, tell_row, working
from qspec_jax.training import corpus

log = logging.getLogger(__name__)

COMPARED = (AUTO, USUAL, "prompt-lookup")  # drafts of `bench drafts`

benchmarks = typer.Typer(no_args_is_help=True, help="Measurements of speed.")
benchmarks.add_typer(kernels)
benchmarks.add_typer(states_commands)


@benchmarks.command("decode")
def bench_decode(
    command: typer.Context,
    arch: Arch = None,
    model: Model = None,
    layers: Annotated[
        int | None,
        typer.Option(help="The number of first layers of --arch to measure, to compare layers in less time and memory."),
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of the prompt; may be given several times: 4096, if not given.")
    ] = None,
    draft: drafts_of("A draft, beside the baseline; may be given several times.") = None,
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
            metavar=DRAFT,
            help="The cache of each --draft; may be given several times: int8, if not given.",
        ),
    ] = None,
    baseline_cache: Annotated[
        str,
        typer.Option("--baseline-cache", metavar=DRAFT, help="The cache of the autoregressive baseline."),
    ] = "full",
    num_speculative_tokens: Gammas = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Rows decoded together, all after the same prompt; may be given several times: 1, if not given."),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Read only the shape of --model; --arch always has random weights.")
    ] = False,
    max_new_tokens: NewTokens = 640,
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
        typer.Option(min=0, max=1, help="The chance of what the first draft of a cascade drafts; that of the others, if not given."),
    ] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Measure transformers' generate too, in a process of its own; needs torch.")
    ] = False,
    transformers_draft: Annotated[
        list[str] | None,
        typer.Option(metavar="DRAFT", help="Measure it with this draft too: prompt-lookup, or the checkpoint that assists (repeatable)."),
    ] = None,
    transformers_quantized: Annotated[
        bool, typer.Option("--transformers-quantized", help="Measure it with its quantized cache too, which needs optimum-quanto.")
    ] = False,
    exact: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(EXACT),
            help="bits: all methods with exact bits; auto, if not given: as generate has it; may be given several times, to "
            "compare them in one run.",
        ),
    ] = None,
    devices: DevicesOfModel = None,
    weights: WeightsOption = None,
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
        raise InputError("give one of --arch and --model")
    ways = transformers_decode.ways(transformers_draft or [], quantized_cache=transformers_quantized)
    transformers |= len(ways) > 1
    if layers is not None and (arch is None or transformers):
        raise InputError("--layers needs --arch, and leaves --transformers out")
    if simulate_inner_acceptance is not None and not (simulate_acceptance or simulate_ratio):
        raise InputError("--simulate-inner-acceptance needs --simulate-acceptance or --simulate-ratio")
    named = (name for names in method or [] for name in names.split(","))
    methods = decode_rows.select_methods(named, draft or [], cache or [], baseline_cache=baseline_cache)
    gammas = select_gammas(num_speculative_tokens, [6], max_new_tokens, methods)
    contexts, batch_sizes = list(dict.fromkeys(context or [4096])), sorted(set(batch_size or [1]))
    rates = rates_of(simulate_acceptance, simulate_ratio, contexts, gammas)
    if transformers:
        if random_weights:
            raise InputError("--transformers needs --arch or a whole checkpoint; leave out --random-weights")
        if batch_sizes != [1]:
            raise InputError("--transformers measures one row only; leave out --batch-size")
        transformers_decode.check()
    exacts = list(dict.fromkeys(exact or [AUTO]))
    for method, each in itertools.product(methods, exacts):  # which refuses caches that have no exact bits
        GenerationConfig(cache=method.cache, draft=method.draft, exact=each, num_speculative_tokens=max(gammas))
    choice = WeightsChoice.parse(weights)
    shape = huggingface.load_config(model) if arch is None else architecture(arch, layers)
    if arch is not None or random_weights:
        shape = with_weights(shape, choice)
        loading.with_tables(shape, choice, arch or model)  # which refuses what it cannot have
    check_positions("model", shape.max_length, "--context", max(contexts), max_new_tokens)
    for method in methods:
        CacheConfig.parse(method.cache).check(shape)
    if arch is not None and not transformers:  # transformers is measured before jax takes the GPU's memory
        check_gpu(arch)

    def measure(kept: KeptRows) -> reports.Report:
        if rates is None and (arch is not None or random_weights) and any(method.speculative for method in methods):
            log.warning("random weights: their acceptance means nothing; --simulate-ratio simulates one")
        beside = []
        if transformers:  # before jax takes the GPU's memory
            dtype, source = loading.default_dtype(shape, arch or model), ARCHITECTURES[arch] if arch else hub.local(model)
            runs = list(itertools.product(contexts, ways))
            for context, way in progress_bar(runs, progress=False if as_json else None, unit="run"):
                with working(f"transformers, {context:,} tokens, {way}"):
                    beside.append(transformers_decode.measure(source, context, dtype=dtype, way=way, seed=seed))
                tell_row(f"{context:,} tokens, {beside[-1].method}: {decode.described(beside[-1])}")
        name, place = arch or model, place_of(devices, distributed=False)
        if arch is not None or random_weights:
            network = random_model(shape, seed=seed, mesh=place)
            network = loading.quantize_tables(network, choice, name)
        else:
            network, _ = load(model, None, quiet=as_json, weights=weights, place=place)
        return decode.run(
            name
            + ("" if layers is None else f", {layers} of {architecture(arch).num_layers} layers")
            + choice.described(in_int4=shape.int4_weights and (arch is not None or random_weights))
            + (", exact bits" if exacts == [BITS] else ""),
            network,
            int4_of(network, random=arch is not None or random_weights),
            contexts,
            methods,
            gammas,
            decode.Settings(max_new_tokens, inner_rate=simulate_inner_acceptance, seed=seed, repeats=repeats),
            rates=rates,
            batch_sizes=batch_sizes,
            exact=exacts,
            beside=beside,
            kept=kept,
            progress=False if as_json else None,
        )

    measure_and_show(command, measure, output, as_json=as_json, plot=plot)


@benchmarks.command("batch")
def bench_batch(
    command: typer.Context,
    arch: Arch = None,
    model: Model = None,
    file: Texts = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 200,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded at a time.")] = 8,
    prompt_tokens: Annotated[str, typer.Option(metavar="MIN-MAX", help="Tokens of a prompt, log-uniform.")] = "64-2048",
    new_tokens: Annotated[str, typer.Option(metavar="MIN-MAX", help="New tokens after a prompt, log-uniform.")] = "16-512",
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option("--gamma", "--num-speculative-tokens", help=f"Most drafts of a round: {GAMMA}, if not given."),
    ] = None,
    draft: Annotated[str, typer.Option("--draft", metavar=DRAFT, help="The draft.")] = USUAL,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    simulate_ratio: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Simulated acceptance: the share of drafts that is accepted on average."),
    ] = None,
    fixed: Annotated[bool, typer.Option("--fixed/--no-fixed", help="Also fixed batches, to compare.")] = True,
    one_by_one: Annotated[bool, typer.Option("--one-by-one", help="Also one prompt at a time, to compare their tokens.")] = False,
    exact: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(EXACT),
            help="bits: with exact bits; auto, the default: tokens, as batch has it. Given both, the batch with bits is compared "
            "to one with tokens.",
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(
            min=1,
            help="Decodes in each way, which take turns. That with the median of tokens/s is given; of an even number, the slower one in "
            "the middle.",
        ),
    ] = 1,
    devices: Devices = "1",
    seed: Seed = 0,
    dtype: DtypeOption = None,
    output: Output = None,
    as_json: Json = False,
):
    """Many prompts of mixed lengths. A batch that is refilled is compared with fixed batches."""
    if (arch is None) == (model is None):
        raise InputError("give one of --arch and --model")
    if simulate_ratio is not None and temperature:
        raise InputError("--simulate-ratio simulates greedy decoding; leave out --temperature")
    exacts = {*(exact or [AUTO])}
    if simulate_ratio is not None and BITS in exacts:
        raise InputError(f"--exact {BITS} is for drafts that are verified; leave out --simulate-ratio")
    if arch is not None and (file or dtype):
        raise InputError("--file and --dtype need --model; --arch has random prompts, and weights in bfloat16")
    lengths, new = batch.bounds("--prompt-tokens", prompt_tokens, 1), batch.bounds("--new-tokens", new_tokens, 2)  # the first is prefill's
    parse_draft(draft)  # which raises InputError for auto, whose gamma would be open
    gamma = GAMMA if num_speculative_tokens is None else num_speculative_tokens
    settings = dict(draft=draft, num_speculative_tokens=gamma, temperature=temperature, ignore_eos=True)
    configs = {each: GenerationConfig(**settings, exact=each) for each in sorted(exacts)}
    config = configs[BITS if BITS in exacts else min(exacts)]
    check_gamma(config.num_speculative_tokens)
    several = devices_of(devices)
    both = BITS in exacts and len(exacts) > 1
    asked = {"fixed": fixed, "one by one": one_by_one, batch.SEVERAL: len(several) > 1, batch.EXACT_TOKENS: both}
    left_out = {way for way, wanted in asked.items() if not wanted}
    rate = None if simulate_ratio is None else rate_of_ratio(simulate_ratio, config.num_speculative_tokens)
    positions = (architecture(arch) if arch else huggingface.load_config(model)).max_length
    if lengths[1] + new[1] > positions:
        raise InputError(f"--prompt-tokens {prompt_tokens} and --new-tokens {new_tokens} exceed the model's {positions} positions")
    if arch is not None:
        check_gpu(arch)

    def measure(kept: KeptRows) -> reports.Report:
        if arch is not None:
            network = random_model(architecture(arch), seed=seed)
            words = np.random.default_rng(seed).integers(0, network.config.vocab_size, 4 * lengths[1])
            sources = [words.tolist()]
        else:
            network, tokenizer = load(model, dtype, quiet=as_json)
            sources = [tokenizer(read_text(path))["input_ids"] for path in file or corpus.held_out_files()]
        int4 = random_int4(network) if arch else stored_int4(model, network)
        made = make_draft(config.draft, network, int4=int4) or NONE
        with_draft = dataclasses.replace(config, draft=made)
        requests = batch.make_requests(sources, prompts, lengths, new, with_draft, seed=seed)
        return batch.run(
            arch or model,
            network,
            requests,
            draft=draft,
            batch_size=batch_size,
            ways=[way for way in batch.WAYS if way not in left_out],
            devices=several,
            rate=rate,
            repeats=repeats,
            kept=kept,
            progress=False if as_json else None,
        )

    measure_and_show(command, measure, output, as_json=as_json)


@benchmarks.command("drafts")
def bench_drafts(
    command: typer.Context,
    arch: Arch = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="A checkpoint directory, instead of --arch: the embedded model, if neither.")
    ] = None,
    draft: drafts_of(f"A draft beside none; may be given several times: {', '.join(COMPARED)}, if not given.") = None,
    cache: Annotated[
        str | None,
        typer.Option("--cache", metavar=DRAFT, help="The target's cache with all drafts: int8, if not given."),
    ] = None,
    file: Texts = None,
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
        check_gamma(num_speculative_tokens)
    drafts = list(dict.fromkeys(draft or COMPARED))
    for text in drafts:  # what is wrong with one is found before any is measured
        GenerationConfig(draft=text, cache=cache, num_speculative_tokens=num_speculative_tokens)
    shape = architecture(arch) if arch else huggingface.load_config(demo.MODEL if model is None else model)
    check_positions("model", shape.max_length, "--context", context, max_new_tokens)

    def measure(kept: KeptRows) -> reports.Report:
        if arch is not None:
            if dtype == "float64":
                jax.config.update("jax_enable_x64", True)
            network = random_model(shape, seed=seed)
            if dtype is not None:
                network = network.with_weights({path: weight.astype(dtype) for path, weight in network.weights().items()})
            words = np.random.default_rng(seed).integers(0, shape.vocab_size, context).tolist()
            log.warning("random weights: their acceptance means nothing")
        else:
            network, tokenizer = load(demo.MODEL if model is None else model, dtype, quiet=as_json)
            words = token_stream(tokenizer, map(read_text, file or corpus.held_out_files()))[:context]
            if len(words) < context:
                raise InputError(f"--context {context}: the text has {len(words)} tokens")
        return drafts_bench.run(
            arch or ("the embedded model" if model is None else model),
            network,
            int4_of(network, random=arch is not None),
            words,
            drafts,
            cache=cache,
            gamma=num_speculative_tokens,
            max_new_tokens=max_new_tokens,
            turns=repeats,
            kept=kept,
            progress=False if as_json else None,
        )

    measure_and_show(command, measure, output, as_json=as_json)


@benchmarks.command("end-to-end")
def bench_end_to_end(
    command: typer.Context,
    model: Annotated[str, typer.Option(metavar="DIR", help="Checkpoint directory in Hugging Face format.")],
    file: Texts = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of the prompts; may be given several times: 8k, 16k, 32k and 64k, if not given.")
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="May be given several times: 0 and 1, if not given.")] = None,
    num_speculative_tokens: Gammas = None,
    draft: drafts_of(f"A draft to decode with, over an int8 cache; may be given several times: {USUAL}, if not given.") = None,
    max_new_tokens: NewTokens = 640,
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
    gammas = select_gammas(num_speculative_tokens, [4, 6], max_new_tokens, methods)

    def measure(kept: KeptRows) -> reports.Report:
        network, tokenizer = load(model, None, quiet=as_json)
        return end_to_end.run(
            model,
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
            kept=kept,
            progress=False if as_json else None,
        )

    measure_and_show(command, measure, output, as_json=as_json, plot=plot)
