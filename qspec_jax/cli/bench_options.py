"""Options that several commands of `qspec bench` have, and the INT4 models of their drafts."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from qspec_jax.bench.architectures import ARCHITECTURES, random_int4
from qspec_jax.drafts.int4 import int4_model
from qspec_jax.models.llama import Llama

DRAFT = "NAME[:SETTING=VALUE,...]"

Gammas = Annotated[
    list[int] | None,
    typer.Option("--gamma", "--num-speculative-tokens", help="Most drafts of a round; may be given several times, to find the best."),
]
Arch = Annotated[str | None, typer.Option(help=f"A known shape, with random weights: {', '.join(ARCHITECTURES)}.")]
Model = Annotated[str | None, typer.Option(metavar="DIR", help="A checkpoint directory, instead of --arch.")]
Texts = Annotated[
    list[Path] | None,
    typer.Option(help="A text that prompts are cut from; may be given several times: the demo's held-out files, if not given."),
]
NewTokens = Annotated[int, typer.Option(min=16, help="New tokens: 640 are five flushes.")]


def drafts_of(help_text: str):
    """The option of several drafts."""
    return Annotated[list[str] | None, typer.Option("--draft", metavar=DRAFT, help=help_text)]


def int4_of(network: Llama, *, random: bool) -> Callable[[], Llama]:
    """Makes the model with INT4 weights, once: random ones, or those of its weights."""
    return functools.cache(lambda: random_int4(network) if random else int4_model(network))
