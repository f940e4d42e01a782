"""`qspec bench states`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from qspec_jax import demo, reports
from qspec_jax.bench import states
from qspec_jax.bench.architectures import architecture, check_gpu, random_model
from qspec_jax.bench.decode_rows import check_gamma
from qspec_jax.bench.simulated import rate_of_ratio
from qspec_jax.checkpoints import huggingface
from qspec_jax.cli.bench_options import DRAFT, Arch, Texts, int4_of
from qspec_jax.cli.measuring import measure_and_show
from qspec_jax.cli.options import DtypeOption, Json, Output, Seed, load
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.keys import key_of
from qspec_jax.decoding.requests import check_positions
from qspec_jax.decoding.resolve import resolve_draft
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.registry import AUTO, NONE
from qspec_jax.errors import InputError
from qspec_jax.evaluate.texts import token_stream
from qspec_jax.files import read_text
from qspec_jax.kept_rows import KeptRows
from qspec_jax.training import corpus

states_commands = typer.Typer()


@states_commands.command("states")
def bench_states(
    command: typer.Context,
    arch: Arch = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="A checkpoint directory, instead of --arch: the embedded model, if neither.")
    ] = None,
    file: Texts = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a document; may be given several times: 6000, if not given.")
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Number of documents.")] = states.Sizes.documents,
    questions: Annotated[int, typer.Option(min=0, help="Questions about each document; 0 leaves them out.")] = states.Sizes.questions,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a question.")] = states.Sizes.question_tokens,
    answer_tokens: Annotated[int, typer.Option(min=1, help="New tokens of an answer.")] = states.Sizes.answer_tokens,
    samples: Annotated[int, typer.Option(min=0, help="Samples of one prompt; 0 leaves them out.")] = states.Sizes.samples,
    sample_tokens: Annotated[int, typer.Option(min=1, help="New tokens of a sample.")] = states.Sizes.sample_tokens,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers that are generated at a time.")] = states.Sizes.batch_size,
    read_again: Annotated[
        int | None, typer.Option(min=1, help="Number of questions for which the document is also read again. Default: all of them.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--gamma", "--num-speculative-tokens", help="Most drafts of a round: the draft's default, if not given.")
    ] = None,
    draft: Annotated[str, typer.Option("--draft", metavar=DRAFT, help="The draft.")] = AUTO,
    cache: Annotated[
        str | None, typer.Option("--cache", metavar=DRAFT, help="The target's cache: int8 with a draft, full without, if not given.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    simulate_ratio: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Simulated acceptance: the share of drafts that is accepted on average."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="First tokens, of which the median is given.")] = states.Sizes.repeats,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    output: Output = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw seconds against the context, in both ways, to this file (.png, .pdf or .svg).")
    ] = None,
    as_json: Json = False,
):
    """Questions and samples from a state, against reading again."""
    if arch is not None and (model is not None or file or dtype):
        raise InputError("--arch has random weights in bfloat16 and random documents; leave out --model, --file and --dtype")
    if simulate_ratio is not None and temperature:
        raise InputError("--simulate-ratio simulates greedy decoding; leave out --temperature")
    if num_speculative_tokens is not None:
        check_gamma(num_speculative_tokens)
    settings = dict(cache=cache, num_speculative_tokens=num_speculative_tokens, temperature=temperature)
    config = GenerationConfig(draft=draft, ignore_eos=True, **settings)
    if simulate_ratio is not None and draft in (AUTO, NONE):
        raise InputError(f"--simulate-ratio needs a --draft whose number of drafts is known, not {draft}")
    sizes = states.Sizes(
        documents=documents,
        questions=questions,
        question_tokens=question_tokens,
        answer_tokens=answer_tokens,
        samples=samples,
        sample_tokens=sample_tokens,
        batch_size=batch_size,
        read_again=read_again,
        repeats=repeats,
    )
    contexts = list(dict.fromkeys(context or [6000]))
    shape = architecture(arch) if arch else huggingface.load_config(demo.MODEL if model is None else model)
    check_positions("model", shape.max_length, "--context", max(contexts), sizes.new)
    if arch is not None:
        check_gpu(arch)

    def measure(kept: KeptRows) -> reports.Report:
        if arch is not None:
            network = random_model(shape, seed=seed)
            words = np.random.default_rng(seed).integers(0, shape.vocab_size, 2 * max(contexts)).tolist()
        else:
            network, tokenizer = load(demo.MODEL if model is None else model, dtype, quiet=as_json)
            words = token_stream(tokenizer, map(read_text, file or corpus.held_out_files()))
        longest = max(contexts) + sizes.question_tokens
        (chosen,) = resolve_draft(network, [config], [longest], prompts=[words[:longest]], batch=batch_size)
        made = make_draft(chosen.draft, network, int4=int4_of(network, random=arch is not None)) or NONE
        return states.run(
            arch or ("the embedded model" if model is None else model),
            network,
            words,
            contexts,
            dataclasses.replace(chosen, draft=made),
            sizes,
            key_of(seed),
            draft=chosen.draft,
            rate=None if simulate_ratio is None else rate_of_ratio(simulate_ratio, chosen.num_speculative_tokens),
            kept=kept,
            progress=False if as_json else None,
        )

    measure_and_show(command, measure, output, as_json=as_json, plot=plot)
