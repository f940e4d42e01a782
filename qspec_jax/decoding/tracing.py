"""A trace of a decode: the records of its rounds, with texts, settings, and where it was run."""

import datetime
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from qspec_jax import demo
from qspec_jax.checkpoints.tokenizers import special_tokens
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.sampling import Greedy, Sampler, Sampling
from qspec_jax.decoding.text import RowText, text_of
from qspec_jax.decoding.traced_rounds import Records
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.registry import NONE, name_of_draft
from qspec_jax.models.llama import Llama
from qspec_jax.reports import this_run
from qspec_jax.traces.trace import GroupsRead, RoundTrace, RowTrace, Trace

PROMPT_END = 64  # tokens of a prompt whose text a trace has


class DecodedRow(NamedTuple):
    """A row of a batch that was decoded.

    Attributes:
        prompt: the tokens of its prompt.
        token_ids: the new tokens.
        text: of the new tokens; None for all that they say.
        finish_reason: what ended it.
    """

    prompt: Sequence[int]
    token_ids: Sequence[int]
    text: str | None
    finish_reason: str


def trace_of(
    model: Llama,
    draft: Draft | None,
    config: GenerationConfig,
    sampler: Sampler,
    tokenizer: Any,
    rows: Sequence[DecodedRow],
    records: Records,
    *,
    prefill_s: float | None = None,
    forced: bool = False,
) -> Trace:
    """The trace of rows that were decoded together.

    Args:
        model: the target.
        draft: None where rounds have no drafts.
        config: the settings that are shown, those of the first row.
        sampler: the strategy.
        tokenizer: of the texts; None: there are none.
        rows: what was decoded.
        records: of its rounds.
        prefill_s, forced: see `Trace`.
    """
    greedy, run = isinstance(sampler, Greedy), this_run()
    settings: dict[str, Any] = {"draft": NONE if draft is None else _name(draft, config), "temperature": config.temperature}
    if draft is not None:
        settings["gamma"] = config.num_speculative_tokens
    settings["cache"] = config.cache_config.name
    differ = ("top_k", "top_p", "min_p", "repetition_penalty", "adaptive", "min_draft_confidence")
    settings |= {name: value for name in differ if (value := getattr(config, name)) != getattr(GenerationConfig, name)}
    if type(sampler) not in (Greedy, Sampling):
        settings["strategy"] = type(sampler).__name__
    place = model.origin.directory
    name = f"a model of {model.config.num_layers} layers" if place is None else place.name
    if place == demo.MODEL.resolve():
        name = "the embedded model"
    about = {"model": name, "dtype": model.dtype.name, "date": datetime.datetime.now().astimezone().isoformat(timespec="minutes")}
    about |= {"device": run["device"], "versions": run["versions"], "loaded": place is not None}
    proposers = tuple(map(name_of_draft, () if draft is None else draft.proposers()))
    group_size = config.cache_config.group_size_for(model.config.head_dim)
    of_rows = zip(rows, records.rounds, records.reads, strict=True)
    found = [_row_trace(tokenizer, row, rounds, GroupsRead.of(reads, group_size) if reads else None) for row, rounds, reads in of_rows]
    names = names_of(tokenizer, found)
    return Trace(settings, about, proposers, greedy, forced, records.phases, records.seconds, prefill_s, found, names)


def _row_trace(tokenizer: Any, row: DecodedRow, rounds: list[RoundTrace], reads: GroupsRead | None) -> RowTrace:
    """The trace of a row; see `trace_of` and `RowTrace`."""
    end = pieces = None
    if tokenizer is not None:
        end = text_of(tokenizer, [int(token) for token in row.prompt[-PROMPT_END:]]).lstrip("\N{REPLACEMENT CHARACTER}")
        pieces = pieces_of(tokenizer, row.prompt, row.token_ids, row.text)
    return RowTrace(len(row.prompt), end, list(row.token_ids), pieces, row.finish_reason, rounds, reads)


def pieces_of(tokenizer: Any, prompt: Sequence[int], token_ids: Sequence[int], text: str | None) -> list[str]:
    """The text that each token adds, together the text of the row: see `RowTrace.pieces`.

    text: of the row, up to a stop string; None for all that the tokens say.
    """
    row = RowText(tokenizer, prompt=prompt)
    pieces = [row.add([token]) for token in token_ids]
    if pieces:
        pieces[-1] += row.end()
    left = len(row.text if text is None else text)
    for i, piece in enumerate(pieces):
        pieces[i], left = piece[:left], left - len(piece[:left])
    return pieces


def names_of(tokenizer: Any, rows: Iterable[RowTrace]) -> dict[int, str]:
    """The texts of all token ids in these traces; those of special tokens are their names."""
    if tokenizer is None:
        return {}
    ids: set[int] = set()
    for row in rows:
        ids.update(row.token_ids)
        for each in row.rounds:
            likely = [*each.likely, *(draft.likely for draft in each.drafts)]
            ids.update((each.own_token, *(draft.token for draft in each.drafts), *(token for found in likely for token, _ in found)))
    special = {index: name for name, index in special_tokens(tokenizer).items()}
    return {index: special.get(index) or text_of(tokenizer, [index]) for index in sorted(ids)}


def _name(draft: Draft, config: GenerationConfig) -> str:
    return name_of_draft(draft) if isinstance(config.draft, Draft) else config.draft_name
