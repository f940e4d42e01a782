"""The command `qspec score`."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from qspec_jax.cli.options import CacheOption, DtypeOption, GroupSize, Json, ModelDirectory, Output, StateFile, WeightsOption, load
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.out_of_memory import explained_memory
from qspec_jax.decoding.reading import prefill
from qspec_jax.decoding.requests import checked_prompt
from qspec_jax.decoding.saving import load_state
from qspec_jax.decoding.scoring import Score, score
from qspec_jax.decoding.text import text_of
from qspec_jax.drafts.registry import NONE
from qspec_jax.errors import InputError
from qspec_jax.files import name_of, output_to, read_text, to_json
from qspec_jax.reports import grid, show
from qspec_jax.states.state import State


@dataclasses.dataclass(frozen=True)
class Scored:
    """The log-probability of a text.

    Attributes:
        text: the text.
        token_ids: of the text.
        logprob: of the whole text, in nats.
        logprobs: of each token, after the context and the tokens before it.
        perplexity: of a token.
        bits_per_byte: of the text in UTF-8.
        greedy: whether each token is the most likely one at its place.
    """

    text: str
    token_ids: list[int]
    logprob: float
    logprobs: list[float]
    perplexity: float
    bits_per_byte: float
    greedy: bool


@dataclasses.dataclass(frozen=True)
class TextReport(Scored):
    """The score of a text itself, whose first token is given, or BOS.

    Attributes:
        name: of the file.
    """

    name: str

    def line(self) -> str:
        """The figures as people read them."""
        each = f"perplexity {self.perplexity:.4f} a token, {self.bits_per_byte:.4f} bits per byte"
        return f"{self.name}: log-probability {self.logprob:.4f} of {len(self.token_ids):,} tokens: {each}"


@dataclasses.dataclass(frozen=True)
class ScoreReport:
    """Scores of continuations of one context.

    Attributes:
        context_tokens: tokens of the context.
        scores: of each continuation.
    """

    context_tokens: int
    scores: list[Scored]

    def table(self) -> RenderableType:
        """A line for each continuation."""
        columns = grid("log-probability", "tokens", "perplexity", "bits per byte", "greedy", "continuation", left=("continuation",))
        for row in self.scores:
            figures = f"{row.logprob:.4f}", f"{len(row.token_ids)}", f"{row.perplexity:.4f}", f"{row.bits_per_byte:.4f}"
            columns.add_row(*figures, "yes" if row.greedy else "no", repr(row.text))
        return columns


def score_command(
    model: ModelDirectory,
    file: Annotated[
        Path | None, typer.Option(metavar="TEXT", help="A text file, or - for standard input: scored itself, or the context.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The context of the continuations.")] = None,
    state: StateFile = None,
    continuation: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A continuation of the context; may be given several times.")
    ] = None,
    cache: CacheOption = None,
    group_size: GroupSize = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    output: Output = None,
    as_json: Json = False,
):
    """Log-probabilities of a text, or of continuations of one context."""
    given = [name for name, value in {"--file": file, "--prompt": prompt, "--state": state}.items() if value is not None]
    if len(given) != 1:
        raise InputError(f"one of --file, --prompt and --state should be given, not {' and '.join(given) or 'none of them'}")
    if file is None and not continuation:
        raise InputError(f"{given[0]} is a context, so at least one --continuation should be given; --file alone is scored itself")
    config = GenerationConfig(cache=cache, group_size=group_size, **({} if state else {"draft": NONE}))
    text = prompt if file is None else read_text(file)

    def measured() -> TextReport | ScoreReport:
        network, tokenizer = load(model, dtype, quiet=as_json, weights=weights, caches=[config.cache_config])
        if state is not None:
            return _continued(load_state(state, network, config=config), continuation, tokenizer)
        name = "the prompt" if file is None else name_of(file)
        tokens = checked_prompt(network, text, dataclasses.replace(config, max_new_tokens=1), tokenizer, name=name)
        with explained_memory(network, config, len(tokens), rows=1):
            if continuation:
                return _continued(prefill(network, tokens, config=config), continuation, tokenizer)
            if len(tokens) == 1:
                raise InputError(f"{name} has one token, whose probability depends on what is before it; it should have at least two")
            found = score(prefill(network, tokens[:1], config=config), [tokens[1:]])[0]
        given = len(text_of(tokenizer, tokens[:1]).encode())  # 0 for BOS
        return TextReport(**vars(_scored(found, text, len(text.encode()) - given)), name=name)

    if continuation:
        show(measured, output, as_json=as_json)
        return
    with output_to(output) as write:
        report = measured()
        write((to_json(dataclasses.asdict(report)) if as_json else report.line()) + "\n")


def _continued(state: State, continuations: list[str], tokenizer: Any) -> ScoreReport:
    found = score(state, continuations, tokenizer=tokenizer)
    return ScoreReport(len(state), [_scored(each, text, len(text.encode())) for each, text in zip(found, continuations, strict=True)])


def _scored(found: Score, text: str, num_bytes: int) -> Scored:
    """num_bytes: of the tokens that are scored."""
    perplexity, bits = math.exp(-found.logprob / len(found.logprobs)), -found.logprob / math.log(2) / max(1, num_bytes)
    return Scored(text, found.token_ids, found.logprob, found.logprobs, perplexity, bits, found.greedy)
