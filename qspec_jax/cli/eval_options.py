"""What the commands of `eval` share: options, texts, and the model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from qspec_jax import demo
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.cli.options import load
from qspec_jax.evaluate.acceptance_report import Walk, along_stream, along_texts
from qspec_jax.evaluate.texts import token_stream
from qspec_jax.files import read_text
from qspec_jax.models.llama import Llama
from qspec_jax.progress import working
from qspec_jax.training import corpus

SETTINGS = "NAME[:SETTING=VALUE,...]"
Files = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="Texts: the demo's held-out files, if not given.")]
PromptTokens = Annotated[int, typer.Option(help="Context before the first token that is scored.")]
ScoredTokens = Annotated[int, typer.Option(help="Tokens to score of each text.")]
Scheme = Annotated[str, typer.Option(help="KV quantizer: int8_first or paper.")]


def loaded(
    model: str | None, dtype: str | None, weights: str | None, *, quiet: bool, caches: Sequence[CacheConfig] = ()
) -> tuple[Llama, Any]:
    """The model and its tokenizer: those of a checkpoint, or the embedded ones. For `caches` see `load`."""
    return load(*with_embedded(model, dtype), quiet=quiet, weights=weights, caches=caches)


def with_embedded(model: str | None, dtype: str | None) -> tuple[str | Path, str | None]:
    """The checkpoint and the dtype to load it as; without a checkpoint those of the embedded model."""
    return (model, dtype) if model is not None else (demo.MODEL, dtype or demo.dtype())


def name_of_model(model: str | None) -> str:
    """What reports call the model."""
    return "the embedded model" if model is None else model


def contents_of(files: Sequence[Path] | None) -> list[tuple[str, str]]:
    """Name and text of each of the files, or of the held-out ones."""
    return [(str(path), read_text(path)) for path in files or corpus.held_out_files()]


@working("tokenizing")
def token_ids_of(tokenizer: Any, contents: Sequence[tuple[str, str]]) -> dict[str, list[int]]:
    """The token ids of each text, by its name."""
    return {name: tokenizer(text)["input_ids"] for name, text in contents}


def walks_along(
    tokenizer: Any, contents: Sequence[tuple[str, str]], contexts: Sequence[int], new_tokens: int, texts: int | None, *, joined: bool
) -> list[Walk]:
    """What is walked along the texts at each context.

    Args:
        tokenizer: the model's.
        contents: name and text of each file.
        contexts: tokens of each prompt.
        new_tokens: tokens of a text after its prompt.
        texts: the maximum number of texts; None: all, or 4 if they are joined.
        joined: whether the files are joined and the texts cut from them.
    """
    if joined:
        stream = token_stream(tokenizer, [text for _, text in contents])
        return [along_stream(stream, size, new_tokens, texts or 4) for size in contexts]
    tokens = token_ids_of(tokenizer, contents)
    return [along_texts(tokens, size, new_tokens, texts) for size in contexts]
