"""The command `qspec info`."""

import dataclasses
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.info import ModelInfo, model_info
from qspec_jax.cli.options import GroupSize, Json, megabytes
from qspec_jax.files import to_json


def info(
    directory: Annotated[
        str, typer.Argument(help="Checkpoint directory (Hugging Face's or converted), GGUF file, or ORG/NAME on the Hub.")
    ],
    context: Annotated[int | None, typer.Option(help="Tokens to size the cache for: the model's longest sequence, if not given.")] = None,
    group_size: GroupSize = None,
    as_json: Json = False,
):
    """What a checkpoint is, and what it takes in memory."""
    found = model_info(directory, context=context, cache=CacheConfig(group_size=group_size))
    if as_json:
        print(to_json(dataclasses.asdict(found)))
    else:
        Console().print(_info_table(found))


def _info_table(found: ModelInfo) -> Table:
    table = Table("", "", box=None, show_header=False, padding=(0, 3, 0, 0))
    experts = found.experts
    mlp = "" if experts is not None and len(experts.layers) == found.num_layers else f", MLP {found.intermediate_size}"
    rows: dict[str, Any] = {
        "architecture": f"{found.architecture}, stored in {found.quantization + ' and ' if found.quantization else ''}{found.dtype}",
        "parameters": f"{found.parameters:,}",
        "layers": f"{found.num_layers} of {found.hidden_size}{mlp}",
        "heads": f"{found.num_heads} query, {found.num_kv_heads} KV, of {found.head_dim}",
        "vocabulary": f"{found.vocab_size:,}, embeddings {'tied' if found.tie_word_embeddings else 'not tied'}",
        "positions": f"{found.max_length:,}, rope {found.rope_type}",
        "EOS ids": ", ".join(map(str, found.eos_token_ids)) or "none",
        "weights": f"{megabytes(found.weight_bytes)} target, {megabytes(found.draft_weight_bytes)} more for the INT4 draft",
        f"KV cache, {found.context:,} tokens": f"{megabytes(found.cache_bytes)} int8, {megabytes(found.full_cache_bytes)} full",
    }
    if experts is not None:
        rows["experts"] = (
            f"{experts.count} of width {experts.intermediate_size} in each of {len(experts.layers)} layers, {experts.chosen} for each token"
        )
        rows["parameters"] += f", of which a token goes through {found.token_parameters:,}"
    if found.sliding_window is not None:
        rows["sliding window"] = f"{found.sliding_window:,} tokens in {found.sliding_layers} of {found.num_layers} layers"
    if found.linear_layers:
        rows["linear layers"] = found.linear_layers
    for label, value in rows.items():
        table.add_row(label, value)
    return table
