"""`qspec eval exactness`: tokens that agree with one-by-one decoding, for drafts, gammas and batch sizes, with tables."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from qspec_jax.decoding.config import BITS, TOKENS, GenerationConfig
from qspec_jax.decoding.exact_bits import check_bits
from qspec_jax.decoding.requests import checked_prompts
from qspec_jax.decoding.text import text_of
from qspec_jax.drafts.int4 import int4_model
from qspec_jax.drafts.registry import NONE, make_draft
from qspec_jax.errors import InputError
from qspec_jax.evaluate.exactness import Agreement, Baseline, Difference
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.models.llama import Llama
from qspec_jax.progress import progress_bar, working
from qspec_jax.reports import Run, formatted, grid, page, this_run


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is compared with one-by-one decoding over the same cache.

    Attributes:
        drafts: the text of each draft; `none` is always compared, too.
        gammas: maximum numbers of drafts in a round.
        batches: numbers of rows that are decoded together.
        cache: of the target, as text.
        max_new_tokens: new tokens of each row.
        settings: other fields of `GenerationConfig`.
    """

    drafts: Sequence[str]
    gammas: Sequence[int]
    batches: Sequence[int]
    cache: str
    max_new_tokens: int
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def config(self, draft: str = NONE, gamma: int | None = None) -> GenerationConfig:
        """The config of a decode."""
        own = self.settings if draft != NONE else {name: value for name, value in self.settings.items() if name != "adaptive"}
        sizes = dict(max_new_tokens=self.max_new_tokens, num_speculative_tokens=gamma, ignore_eos=True)
        return GenerationConfig(draft=draft, cache=self.cache, **sizes, **{"exact": TOKENS} | own)

    def cases(self) -> list[tuple[str, int | None, int]]:
        """Draft, gamma and batch size of each row of the report."""
        drafts = [(NONE, None), *((draft, gamma) for draft in dict.fromkeys(self.drafts) if draft != NONE for gamma in self.gammas)]
        return [(draft, gamma, batch) for batch in self.batches for draft, gamma in drafts]


@dataclasses.dataclass(frozen=True)
class Row:
    """A decode beside one-by-one decoding.

    Attributes:
        draft: its text; "none" at batch 1 is one-by-one decoding once more.
        gamma: None without a draft.
        batch: rows that are decoded together.
        context: tokens of each prompt.
        rows, tokens, agreeing, differences: see `Agreement`.
        share: agreeing / tokens.
        first: the lowest position of a difference; None if there is none.
        texts: of each difference the texts of its two tokens.
    """

    draft: str
    gamma: int | None
    batch: int
    context: int
    rows: int
    tokens: int
    agreeing: int
    share: float
    first: int | None
    differences: list[Difference]
    texts: list[tuple[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactnessReport(Run):
    """What `qspec eval exactness` measured.

    Attributes:
        cache: of the target.
        new_tokens: of each row.
        settings: other settings of all decodes.
        skipped: names of texts that are too short for the first context.
    """

    model: str
    dtype: str
    cache: str
    new_tokens: int
    settings: dict[str, Any]
    skipped: list[str]
    results: list[Row]

    def table(self) -> Group:
        """A line for each decode, and one for the first difference of each of its rows."""
        counts = "rows that\ndiffer", "tokens", "tokens before\nthe first", "share of tokens\nthat agree"
        decodes = grid("draft", "gamma", "batch", "context", "rows", *counts, left=("draft",), wraps=counts)
        for row in self.results:
            name = row.draft, formatted(row.gamma, "d"), str(row.batch), f"{row.context:,}"
            first = formatted(row.first, ",")
            decodes.add_row(*name, str(row.rows), str(len(row.differences)), f"{row.tokens:,}", first, f"{row.share:.2%}")
        notes = [
            "Compared with greedy decoding of each prompt alone, one token at a time, over the same cache."
            + " The row of none at batch 1 is that once more." * any(row.draft == NONE and row.batch == 1 for row in self.results),
            "Tokens agree up to the first difference of their row; after it the row reads another text.",
        ]
        parts: list[Any] = [decodes]
        if any(row.differences for row in self.results):
            parts += ["", self._differences()]
            notes.append(
                "Logits of the two tokens: by the pass of one-by-one decoding, and by that of the round. Units: the first minus the "
                f"second, in distances between neighbouring numbers of {self.dtype}."
            )
            if not all(difference.reproduced for row in self.results for difference in row.differences):
                notes.append(
                    "Not reproduced: the passes that show the logits run in programs of their own, whose rounding made another choice."
                )
        settings = "".join(f", {name} {value}" for name, value in self.settings.items())
        title = f"Agreement with one-by-one decoding of {self.model}"
        return page(title, f" in {self.dtype}, cache {self.cache}{settings}, on {self.device}", *parts, notes=notes)

    def _differences(self) -> Table:
        columns = "draft", "gamma", "batch", "context", "prompt", "position", "tokens", "one by one", "in the round", "units", "reproduced"
        found = grid(*columns, left=("draft", "tokens", "reproduced"), wraps=("tokens",))
        for row in self.results:
            for each, texts in zip(row.differences, row.texts, strict=True):
                name = row.draft, formatted(row.gamma, "d"), str(row.batch), f"{row.context:,}", str(each.prompt), str(each.position)
                tokens = " / ".join(f"{token} {text!r}" for token, text in zip(each.tokens, texts, strict=True))
                logits = (f"{first:.4f} / {second:.4f}" for first, second in (each.one_by_one, each.in_round))
                units = " / ".join(f"{units:+.2f}" for units in each.units)
                found.add_row(*name, tokens, *logits, units, "yes" if each.reproduced else "no")
        return found


def run(
    name: str,
    model: Llama,
    tokenizer: Any,
    prompts: Sequence[tuple[int, Sequence[Sequence[int]]]],
    asked: Comparison,
    *,
    skipped: Sequence[str] = (),
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
) -> ExactnessReport:
    """Compares every decode that is asked for with one-by-one decoding.

    Args:
        name: of the model.
        model: the target.
        tokenizer: the model's.
        prompts: token ids, by the number of tokens of each.
        asked: drafts, gammas and batch sizes.
        skipped: see `ExactnessReport`.
        kept: the rows of an earlier run.
        progress: see `progress_bar`.

    Raises:
        InputError: before anything is measured, for a draft or a setting that does not fit the cache or the prompts.
    """
    configs = [asked.config(draft, gamma) for draft, gamma, _ in asked.cases()]
    for _, of_context in prompts:
        for config in configs:
            checked_prompts(model, of_context, config, tokenizer)
        if (largest := max(asked.batches)) > len(of_context):
            raise InputError(
                f"--batch {largest} should be at most the number of texts, {len(of_context)}: those that are long enough, one of each file "
                "without --joined"
            )
    int4 = functools.cache(lambda: int4_model(model, progress=progress))
    made = functools.cache(lambda text: make_draft(text, model, int4=int4))
    for config in (each for each in configs if each.exact == BITS):
        check_bits(model, config, None if config.draft == NONE else made(config.draft), config.num_speculative_tokens or 0)
    rows = []
    with progress_bar(total=len(prompts) * len(configs), unit="decode", progress=progress) as bar:
        for context, of_context in prompts:
            baseline = functools.cache(functools.partial(Baseline, model, of_context, asked.config(), tokenizer))
            for draft, gamma, batch in asked.cases():

                def measured(draft=draft, gamma=gamma, batch=batch, context=context, baseline=baseline) -> Row:
                    config = asked.config(draft, gamma)
                    config = config if draft == NONE else dataclasses.replace(config, draft=made(draft))
                    with working("comparing"):
                        found = baseline().compared(config, batch)
                    return _row(draft, gamma, batch, context, found, tokenizer)

                label = f"{draft}{'' if gamma is None else f', gamma {gamma}'}, batch {batch}, {context:,} tokens"
                rows.append(kept.measured(label, Row, measured, _described))
                bar.update()
    about = dict(model=name, dtype=model.dtype.name, cache=asked.cache, new_tokens=asked.max_new_tokens, settings=asked.settings)
    return ExactnessReport(**this_run(), **about, skipped=list(skipped), results=rows)


def _row(draft: str, gamma: int | None, batch: int, context: int, found: Agreement, tokenizer: Any) -> Row:
    texts = [tuple(text_of(tokenizer, [token]) for token in each.tokens) for each in found.differences]
    counts = found.rows, found.tokens, found.agreeing, found.share, found.first
    return Row(draft, gamma, batch, context, *counts, found.differences, texts)


def _described(row: Row) -> str:
    return f"{len(row.differences)} of {row.rows} rows differ, {row.share:.2%} of {row.tokens:,} tokens agree"
