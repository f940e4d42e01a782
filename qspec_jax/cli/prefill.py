"""The command `qspec prefill`."""

import logging
import time
from pathlib import Path
from typing import Annotated

import jax
import typer

from qspec_jax.cli.options import (
    CacheOption,
    DraftOption,
    DtypeOption,
    GroupSize,
    Json,
    ModelDirectory,
    WeightsOption,
    check_saves,
    load,
    megabytes,
)
from qspec_jax.decoding.chat import hint_at_chat
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.conversation import Conversation
from qspec_jax.decoding.out_of_memory import explained_memory
from qspec_jax.decoding.reading import ROOM, prefill
from qspec_jax.decoding.requests import checked_prompt
from qspec_jax.decoding.saving import save_state
from qspec_jax.errors import InputError
from qspec_jax.files import name_of, read_text, to_json

log = logging.getLogger(__name__)


def prefill_command(
    model: ModelDirectory,
    file: Annotated[Path, typer.Option(metavar="DOC", help="The text file to read, or - for standard input.")],
    save: Annotated[Path, typer.Option(metavar="FILE", help="The file that the state is saved to: whole, or not at all.")],
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Read the document as `qspec chat --file` does, for `qspec chat --state`."),
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="With --chat, the system message.")] = None,
    draft: DraftOption = None,
    cache: CacheOption = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--gamma", "--num-speculative-tokens", help="Maximum draft tokens per round of what continues the state.")
    ] = None,
    room: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens that can follow before arrays grow. Default: {ROOM}, or what the positions leave.")
    ] = None,
    group_size: GroupSize = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    as_json: Json = False,
):
    """Read a document once, and save what was read."""
    config = GenerationConfig(draft=draft, cache=cache, num_speculative_tokens=num_speculative_tokens, group_size=group_size)
    if system is not None and not chat:
        raise InputError("--system is for --chat, which reads the document as the beginning of a conversation")
    check_saves("--save", save, [file])
    text = read_text(file)
    network, tokenizer = load(model, dtype, quiet=as_json, weights=weights, caches=[config.cache_config])
    tokens = checked_prompt(network, text, GenerationConfig(max_new_tokens=1), tokenizer, name=name_of(file))
    if not chat and (hint := hint_at_chat(tokenizer, text, "--chat reads it for qspec chat")):
        log.warning("%s", hint)
    talk = Conversation(network, tokenizer, config=config, system=system, documents={name_of(file): text}, room=room) if chat else None
    if not as_json:
        log.info("reads %s tokens of %s", f"{len(tokens):,}", name_of(file))
    began = time.perf_counter()
    with explained_memory(network, config, len(tokens), rows=1):
        if talk is None:
            state = prefill(network, tokens, config=config, room=room)
        else:
            talk.read_documents()
            state = talk.state
        jax.block_until_ready(state)
    read_s, began = time.perf_counter() - began, time.perf_counter()
    if talk is None:
        save_state(state, save)
    else:
        talk.save(save)
    save_s, size = time.perf_counter() - began, save.stat().st_size
    if as_json:
        names = ("draft", "cache", "num_speculative_tokens")
        settings = {name: state.reader.settings[name] for name in names} | {"cache": state.reader.cache.name}
        print(to_json(dict(file=str(save), tokens=len(state), bytes=size, read_s=read_s, save_s=save_s) | settings))
    else:
        print(f"{save}: {len(state):,} tokens in {megabytes(size)}, read in {read_s:.1f} s and saved in {save_s:.1f} s")
