"""`qspec eval acceptance`: acceptance of several drafts along texts of several contexts, with a table and a plot."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from qspec_jax import plots
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.keys import key_of
from qspec_jax.decoding.prepare import prepare
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.int4 import int4_model
from qspec_jax.drafts.registry import USUAL, DraftSettings, make_draft, unbudgeted
from qspec_jax.drafts.step_bytes import ITEM_BYTES, cache_share, raised_groups, step_bytes
from qspec_jax.evaluate import acceptance, needle
from qspec_jax.evaluate.acceptance import MODES, TEACHER_FORCED, with_error
from qspec_jax.evaluate.texts import check_lengths, cut, long_enough
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.models.llama import Llama
from qspec_jax.progress import progress_bar
from qspec_jax.reports import Run, formatted, grid, this_run

log = logging.getLogger(__name__)

MAX_NAME = 28  # characters of a draft's name, or of a part of it between commas, in one line of the table
STYLES = dict(zip(MODES, ("-", ":")))  # of lines in the plot


@dataclasses.dataclass(frozen=True)
class Walk:
    """Texts to measure acceptance on.

    Attributes:
        context: tokens before the first draft, exactly or about.
        texts: token ids.
        new_tokens: tokens at the end of each text that are walked.
        skipped: names of texts that are too short.
        right: if the texts are answers to needle prompts: how many of them the model itself gives with a full cache.
    """

    context: int
    texts: Sequence[Sequence[int]]
    new_tokens: int
    skipped: list[str] = dataclasses.field(default_factory=list)
    right: int | None = None

    @property
    def prompts(self) -> list[Sequence[int]]:
        """The texts without the tokens that are walked."""
        return [text[: -self.new_tokens] for text in self.texts]


def along_texts(texts: Mapping[str, Sequence[int]], context: int, new_tokens: int, max_texts: int | None = None) -> Walk:
    """A walk along the texts (token ids by name) that are long enough; a warning names the others.

    Raises:
        InputError: if no text is long enough.
    """
    chosen, too_short = long_enough(texts, context, new_tokens)
    if too_short:
        names = ", ".join(text.name for text in too_short[:3]) + (", ..." if len(too_short) > 3 else "")
        size = context + new_tokens
        log.warning("%d of %d texts have fewer than %d tokens and are left out: %s", len(too_short), len(texts), size, names)
    return Walk(context, chosen[:max_texts], new_tokens, [text.name for text in too_short])


def along_stream(stream: Sequence[int], context: int, new_tokens: int, max_texts: int) -> Walk:
    """A walk along texts cut from one stream of tokens.

    Raises:
        InputError: if the stream is too short.
    """
    check_lengths(context, new_tokens)
    return Walk(context, cut(stream, context + new_tokens, max_texts), new_tokens)


def along_answers(model: Llama, tokenizer: Any, context: int, **prompts: Any) -> Walk:
    """A walk along the answers to needle prompts; a warning says if the model itself finds too few of them.

    Args:
        context: tokens of a prompt.
        prompts: settings of `needle.answered`.
    """
    found = needle.answered(model, tokenizer, length=context, **prompts)
    if found.void:
        asked = f"{found.right} of {len(found.texts)} needles of {context} tokens"
        log.warning("void: with a full cache the model finds %s, so that acceptance there says little of drafts", asked)
    return Walk(context, found.texts, found.answer_tokens, right=found.right)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Which drafts are measured, and with which settings.

    Attributes:
        drafts: settings by the text of each draft.
        gammas: maximum numbers of draft tokens in a round.
        temperatures: of target and draft.
        modes: of `MODES`.
        group_size: tokens in a group; None: the cache's own choice.
        calibrate: whether INT4 weights are calibrated for the prompts.
    """

    drafts: Mapping[str, DraftSettings]
    gammas: Sequence[int]
    temperatures: Sequence[float] = (0.0, 1.0)
    modes: Sequence[str] = MODES
    scheme: str = CacheConfig.scheme
    group_size: int | None = None
    calibrate: bool = True
    seed: int = 0

    def configs(self, new_tokens: int) -> list[GenerationConfig]:
        """A config for each gamma and temperature."""
        cache = dict(scheme=self.scheme, group_size=self.group_size)
        return [
            GenerationConfig(draft=USUAL, num_speculative_tokens=gamma, temperature=temperature, max_new_tokens=new_tokens, **cache)
            for gamma in self.gammas
            for temperature in self.temperatures
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceReport(Run):
    """What `qspec eval acceptance` measured.

    Attributes:
        scheme: of the target's cache.
        group_size: of the target's cache, in tokens.
        calibration: whether INT4 weights were calibrated for the texts.
        texts: number of texts at the first context.
        skipped: names of texts that are too short for the first context.
        results: the fields of an `Acceptance` each, with draft, context (tokens before the first draft), gamma, temperature and mode;
            step_bytes: what one step of the draft reads after that context, each number as two bytes at most; cache_share: the share of
            its keys and values in the bytes of a whole upper plane and buffer; both None for a draft that is no `ModelDraft`;
            raised_groups: the number of groups that it reads if its budget asks for fewer, see `step_bytes.raised_groups`; texts, right:
            at this context, see `Walk`.
    """

    model: str
    dtype: str
    seed: int
    scheme: str
    group_size: int
    calibration: bool
    texts: int
    skipped: list[str]
    results: list[dict[str, Any]]

    def table(self) -> Table:
        """A table with a line for every draft, context, gamma, temperature and mode."""
        cascades = any(row.get("inner_rate") is not None for row in self.results)
        columns = (
            *("draft", "context", "gamma", "temper-\nature", "mode", "accepted /\ndrafted", "given those\nbefore"),
            *(("inner, given\nthose before",) if cascades else ()),
            "covered",
            *("MB a\ndraft", "of the\ncache", "tokens\na round", "drafted", "repeated\n8-grams"),
        )
        names = [row["draft"] for row in self.results]
        longest = max((len(part) for name in names for part in name.split(",")), default=0)
        whole = {"mode", "draft"} if longest <= MAX_NAME else {"mode"}
        found = grid(*columns, left=("draft", "mode"), wraps=set(columns) - whole)
        found.title = "Acceptance"
        found.caption = (
            "covered: share of the target's attention on what a draft reads.\n"
            "of the cache: keys and values that a draft reads, as a share of the bytes of a whole upper plane and buffer."
        )
        if cascades:
            found.caption = f"inner: of a cascade's first draft, as its middle accepts it.\n{found.caption}"
        if any(row.get("conditional_error") is not None for row in self.results):
            found.caption = f"+-: standard error over texts. {found.caption}"
        for row in self.results:
            given = with_error(row["conditional_rate"], row.get("conditional_error"))
            size = None if row.get("step_bytes") is None else row["step_bytes"] / 1e6
            # Between two settings a name may be broken, in a number it may not.
            draft = row["draft"] if len(row["draft"]) <= MAX_NAME else row["draft"].replace(",", ",\n")
            name = draft, formatted(row.get("context"), ","), str(row["gamma"]), f"{row['temperature']:g}", row["mode"]
            inner = (with_error(row.get("inner_rate"), row.get("inner_error")),) if cascades else ()
            rates = formatted(row["acceptance_rate"], ".3f"), given, *inner, formatted(row.get("covered"), ".3f")
            read = formatted(size, ".2f"), formatted(row.get("cache_share"), ".1%")
            counts = f"{row['mean_acceptance_length']:.2f}", f"{row['drafted']:,}", f"{row['repeated_ngrams']:.1%}"
            found.add_row(*name, *rates, *read, *counts)
        asked = [(row["context"], row["right"], row["texts"]) for row in self.results if row.get("right") is not None]
        for context, right, texts in dict.fromkeys(asked):
            found.caption += f"\nWith a full cache the model itself finds {right} of {texts} needles of {context:,} tokens."
        raised = {}
        for row in self.results:
            if row.get("raised_groups") is not None:
                raised.setdefault((row["context"], row["raised_groups"]), []).append(row["draft"])
        for (context, groups), drafts in raised.items():
            few = ", ".join(dict.fromkeys(drafts))
            found.caption += f"\nAt {context:,} tokens these read {groups} groups (min_groups), more than their budgets ask for: {few}."
        return found

    def figure(self) -> Any:
        """At one gamma, teacher-forced acceptance against the context if there are more than two, or acceptance against the bytes that each
        of several drafts reads, unless drafts differ in their budgets; otherwise against gamma."""
        drafts, gammas = ({row[name] for row in self.results} for name in ("draft", "gamma"))
        contexts = {row.get("context") for row in self.results if row["mode"] == TEACHER_FORCED and row.get("conditional_rate") is not None}
        series = len(set(map(unbudgeted, drafts))) < len(drafts)
        if len(gammas) == 1 and len(contexts) > 2 and not series:
            return _against_context(self.results)
        return _against_bytes(self.results) if len(drafts) > 1 and len(gammas) == 1 else _against_gamma(self.results)


def run(
    name: str,
    model: Llama,
    tokenizer: Any,
    walks: Sequence[Walk],
    asked: Comparison,
    *,
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
    on_trace: acceptance.OnTrace | None = None,
) -> AcceptanceReport:
    """Measures every draft with every gamma, temperature and mode along every walk.

    Args:
        tokenizer: the model's, which says which ids are padding.
        walks: the texts, by context.
        asked: drafts and settings.
        kept: the rows of an earlier run.
        progress: see `progress_bar`.
        on_trace: called with the trace of each measurement; None: nothing is traced.

    Raises:
        InputError: before anything is measured, if a draft or a setting does not fit the model or the texts.
    """
    configs_of = [(walk, asked.configs(walk.new_tokens)) for walk in walks]
    for walk, configs in configs_of:
        for config in configs:
            acceptance.check(model, walk.prompts, config)
    missing = {walk.context: [case for case in _cases(walk, configs, asked) if case.label not in kept] for walk, configs in configs_of}
    first = next((walk for walk in walks if missing[walk.context]), walks[0])
    made = _Drafts(model, asked, progress)
    made.make({case.draft: asked.drafts[case.draft] for cases in missing.values() for case in cases}, first.prompts)
    for walk, configs in configs_of:
        largest = max(configs, key=lambda config: config.num_speculative_tokens)
        for text in dict.fromkeys(case.draft for case in missing[walk.context]):
            acceptance.check_draft(model, made.drafts[text], walk.prompts, largest)
    about = {"model": name, "dtype": model.dtype.name, "seed": asked.seed, "scheme": asked.scheme}
    about["group_size"] = configs_of[0][1][0].cache_config.group_size_for(model.config.head_dim)
    about["calibration"] = asked.calibrate
    rows = []
    total = len(asked.drafts) * len(asked.modes) * sum(len(configs) for _, configs in configs_of)
    with progress_bar(total=total, unit="run", progress=progress) as bar:
        for walk, configs in configs_of:
            if missing[walk.context] and walk is not first:
                made.calibrate_for(walk.prompts)
            found = _measured(model, tokenizer, made.drafts, walk, missing[walk.context], asked, on_trace)
            for case in _cases(walk, configs, asked):
                rows.append(kept.measured(case.label, dict[str, Any], functools.partial(next, found), _described))
                bar.update()
            found.close()  # which frees drafts before others take as much memory
    return AcceptanceReport(**this_run(), **about, texts=len(walks[0].texts), skipped=walks[0].skipped, results=rows)


class _Drafts:
    """The drafts of a run by their texts; those with INT4 weights share them."""

    def __init__(self, model: Llama, asked: Comparison, progress: bool | None):
        self.drafts: dict[str, Draft] = {}
        self._model, self._asked, self._progress = model, asked, progress
        self._with_int4: list[str] = []

    def make(self, settings: Mapping[str, DraftSettings], prompts: Sequence[Sequence[int]]) -> None:
        """Makes the drafts with these settings; INT4 weights, if one asks for them, are calibrated for the prompts."""

        @functools.cache
        def int4() -> Llama:
            calibration = prompts if self._asked.calibrate else None
            return int4_model(self._model, calibration=calibration, progress=self._progress)

        def asked_by(text: str) -> Llama:
            self._with_int4.append(text)
            return int4()

        for text, each in settings.items():
            self.drafts[text] = make_draft(each, self._model, int4=functools.partial(asked_by, text))

    def calibrate_for(self, prompts: Sequence[Sequence[int]]) -> None:
        """Makes the drafts with INT4 weights again, calibrated for other prompts."""
        if not self._asked.calibrate:
            return
        again, self._with_int4 = {text: self._asked.drafts[text] for text in self._with_int4}, []
        for text in again:  # before others like them take as much memory
            del self.drafts[text]
        self.make(again, prompts)


class _Case(NamedTuple):
    """What a row measures: a draft by its text, at a context."""

    draft: str
    context: int
    config: GenerationConfig
    mode: str

    @property
    def label(self) -> str:
        gamma, temperature = self.config.num_speculative_tokens, self.config.temperature
        return f"{self.draft}, {self.context:,} tokens, gamma {gamma}, temperature {temperature:g}, {self.mode}"


def _described(row: dict[str, Any]) -> str:
    return f"accepted / drafted {formatted(row['acceptance_rate'], '.3f')}, {row['mean_acceptance_length']:.2f} tokens a round"


def _cases(walk: Walk, configs: Sequence[GenerationConfig], asked: Comparison) -> list[_Case]:
    return [_Case(draft, walk.context, config, mode) for draft, config, mode in itertools.product(asked.drafts, configs, asked.modes)]


def _measured(
    model: Llama,
    tokenizer: Any,
    drafts: Mapping[str, Draft],
    walk: Walk,
    cases: Sequence[_Case],
    asked: Comparison,
    on_trace: acceptance.OnTrace | None,
) -> Iterator[dict[str, Any]]:
    """Yields the row of each case."""
    prompts, key = walk.prompts, key_of(asked.seed)
    with_gamma = {(case.draft, case.config.num_speculative_tokens): case.config for case in cases}
    chosen = {
        (text, gamma): prepare(model, prompts, config=dataclasses.replace(config, draft=drafts[text]), key=key).draft
        for (text, gamma), config in with_gamma.items()
    }
    runs = (
        (model, chosen[case.draft, case.config.num_speculative_tokens], walk.texts, case.config, key, tokenizer)
        for case in cases
        if case.mode == TEACHER_FORCED
    )
    traced = on_trace and (lambda trace: on_trace(trace.named(case.label, draft=case.draft)))
    in_turn = (
        acceptance.teacher_forced_in_turn(runs) if traced is None else (acceptance.teacher_forced(*run, on_trace=traced) for run in runs)
    )
    for case in cases:
        text, context, config, mode = case
        draft = chosen[text, config.num_speculative_tokens]
        read = draft, config.cache_config, context + 1
        if mode == TEACHER_FORCED:
            found = next(in_turn)
        else:
            found = acceptance.free_running(model, draft, prompts, config, key, tokenizer, on_trace=traced)
        settings = {"gamma": config.num_speculative_tokens, "temperature": config.temperature, "mode": mode}
        yield (
            {"draft": text, "context": context, **settings}
            | dataclasses.asdict(found)
            | {"step_bytes": step_bytes(*read, max_item_bytes=ITEM_BYTES), "cache_share": cache_share(*read)}
            | {"raised_groups": raised_groups(*read), "texts": len(prompts), "right": walk.right}
        )
    in_turn.close()


def _against_bytes(results: list[dict[str, Any]]) -> Any:
    """Teacher-forced conditional acceptance with standard errors against the bytes that a draft reads.

    There is a panel for each context and temperature. Drafts that differ only in their budget are one line; drafts that are no `ModelDraft`
    are horizontal lines.
    """
    found = [row for row in results if row["mode"] == "teacher-forced" and row["conditional_rate"] is not None]
    panels = list(dict.fromkeys((row["context"], row["temperature"]) for row in found))
    lines = list(dict.fromkeys(unbudgeted(row["draft"]) for row in found))
    figure, of_panels = plots.panels((1 + 5.5 * len(panels), 5), len(panels), sharey=True)
    for axes, panel in zip(of_panels, panels, strict=True):
        for i, line in enumerate(lines):
            rows = [row for row in found if (row["context"], row["temperature"]) == panel and unbudgeted(row["draft"]) == line]
            style = plots.line_style(i, line)
            for row in (row for row in rows if row["step_bytes"] is None):
                axes.axhline(row["conditional_rate"], linestyle=":", **(style | {"marker": ""}))
            if read := sorted((row for row in rows if row["step_bytes"] is not None), key=lambda row: row["step_bytes"]):
                points = [[row["step_bytes"] / 1e6 for row in read], [row["conditional_rate"] for row in read]]
                errors = [row["conditional_error"] for row in read]
                axes.errorbar(*points, yerr=None if None in errors else errors, capsize=3, **style)
        axes.set(xlabel="read by a draft (MB)", title=f"context of {panel[0]:,} tokens, temperature {panel[1]:g}")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("accepted, given those before")
    max(figure.axes, key=lambda axes: len(axes.get_legend_handles_labels()[1])).legend(fontsize=8)  # not every panel has every line
    return figure


def _against_context(results: list[dict[str, Any]]) -> Any:
    """Teacher-forced conditional acceptance with standard errors against context, of a cascade's first draft too."""
    found = sorted((row for row in results if row["mode"] == TEACHER_FORCED), key=lambda row: row["context"])
    lines = dict.fromkeys((row["draft"], row["temperature"], kind) for row in found for kind in ("conditional", "inner"))
    figure, (axes,) = plots.panels((9, 5))
    shown = 0
    for draft, temperature, kind in lines:
        rate, error = f"{kind}_rate", f"{kind}_error"
        rows = [row for row in found if (row["draft"], row["temperature"]) == (draft, temperature) and row.get(rate) is not None]
        if not rows:
            continue
        name = f"{draft}{'' if kind == 'conditional' else ', its first draft by its middle'}, temperature {temperature:g}"
        errors = [row[error] for row in rows]
        points = [row["context"] for row in rows], [row[rate] for row in rows]
        axes.errorbar(*points, yerr=None if None in errors else errors, capsize=3, **plots.line_style(shown, name))
        shown += 1
    plots.context_axis(axes, sorted({row["context"] for row in found}))
    axes.set(ylabel="accepted, given those before", ylim=(0, 1))
    axes.legend(fontsize=8)
    return figure


def _against_gamma(results: list[dict[str, Any]]) -> Any:
    """Accepted / drafted and tokens per round against gamma (arXiv 2502.10424, figure 9).

    There is a line for every draft, context, temperature and mode.
    """
    figure, (accepted, tokens) = plots.panels((10, 4.5), 2)
    several = len({row.get("context") for row in results}) > 1
    lines: dict[tuple, list[dict[str, Any]]] = {}
    for row in sorted(results, key=lambda row: row["gamma"]):
        lines.setdefault((row["draft"], row.get("context"), row["temperature"], row["mode"]), []).append(row)
    colours = list(dict.fromkeys(key[:3] for key in lines))
    for (draft, context, temperature, mode), line in lines.items():
        style = dict(color=f"C{colours.index((draft, context, temperature))}", linestyle=STYLES[mode], marker="o")
        label = f"{draft}{f', context {context:,}' if several else ''}, temperature {temperature:g}, {mode}"
        for axes, name in ((accepted, "acceptance_rate"), (tokens, "mean_acceptance_length")):
            axes.plot([row["gamma"] for row in line], [row[name] for row in line], label=label, **style)
    for axes in (accepted, tokens):
        axes.set(xlabel="gamma (maximum drafts in a round)", xticks=sorted({row["gamma"] for row in results}))
        axes.grid(alpha=0.3)
    accepted.set(ylabel="accepted / drafted", title="Acceptance", ylim=(0, 1.02))
    tokens.set(ylabel="tokens", title="Tokens a round", ylim=(0, None))
    tokens.legend(fontsize=8)
    return figure
