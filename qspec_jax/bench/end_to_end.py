"""`qspec bench end-to-end`: a trained model on real text. What share of its drafts is accepted, and how much faster whole decodes are.

Nothing is simulated. The texts of a context are cut from one stream of tokens, apart from each other: their last `max_new_tokens` tokens
are walked (teacher-forced acceptance), and what is before them is the prompt of the decodes that are timed (free-running acceptance).
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from qspec_jax import plots
from qspec_jax.bench import decode
from qspec_jax.bench.decode_rows import Case, DecodeRow, Method, compared
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.keys import key_of
from qspec_jax.decoding.prepare import prepare
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.int4 import int4_model
from qspec_jax.drafts.registry import USUAL, make_draft
from qspec_jax.errors import InputError, named
from qspec_jax.evaluate import acceptance
from qspec_jax.evaluate.acceptance import Acceptance, with_error
from qspec_jax.evaluate.stream import cut
from qspec_jax.models.llama import Llama
from qspec_jax.reports import Run, this_run

log = logging.getLogger(__name__)

MARKERS = "osv^D"
Key = tuple[int, float, str, int]  # context, temperature, draft, gamma


@dataclasses.dataclass(frozen=True)
class TeacherForced:
    """Teacher-forced acceptance of a draft along the texts of one context. acceptance: None unless the status is "measured"."""

    context: int
    temperature: float
    draft: str
    gamma: int
    texts: int
    status: str
    note: str = ""
    acceptance: Acceptance | None = None


@dataclasses.dataclass(frozen=True)
class EndToEndReport(Run):
    """Decodes and acceptance. Each context and temperature has a row for the baseline and one for each draft and gamma, and an entry of
    teacher_forced for each draft and gamma.

    calibrated: the drafts' weights are rounded for the prompts of the context at hand.
    """

    model: str
    parameters: int
    max_new_tokens: int
    calibrated: bool
    rows: list[DecodeRow]
    teacher_forced: list[TeacherForced]


def run(
    name: str,
    model: Llama,
    stream: Sequence[int],
    contexts: Sequence[int],
    temperatures: Sequence[float],
    gammas: Sequence[int],
    methods: Sequence[Method],
    *,
    max_new_tokens: int,
    texts: int,
    calibrate: bool,
    seed: int = 0,
    progress: bool | None = None,
) -> EndToEndReport:
    """Measures every method at every context and temperature, those that draft with each gamma. The first is the baseline.

    stream: real text, as token ids. texts: how many of each context, fewer where the stream has no more; they are decoded one after the
    other and walked as a batch. progress: a bar on standard error;
    None where that is a terminal. Raises InputError where the stream or the model's positions are too few for a context; what fails later
    gets a row that says so.
    """
    texts_of = {context: cut(stream, context + max_new_tokens, texts) for context in contexts}
    make_config = lambda temperature, gamma: GenerationConfig(
        draft=USUAL, max_new_tokens=max_new_tokens, temperature=temperature, num_speculative_tokens=gamma
    )
    for temperature, gamma, found in itertools.product(temperatures, gammas, texts_of.values()):
        acceptance.check(model, [text[:-max_new_tokens] for text in found], make_config(temperature, gamma))
    rows, walks = [], []
    tell = _tell if progress is not False else lambda *args: None
    walked = [(method.draft, gamma) for method in methods if method.speculative for gamma in gammas]
    decoded = [(method, gamma) for method in methods for gamma in (gammas if method.speculative else [0])]
    total = len(contexts) * len(temperatures) * (len(decoded) + len(walked))
    with tqdm(total=total, leave=False, disable=None if progress is None else not progress) as bar:
        for context, found in texts_of.items():
            bar.set_description(f"{context:,} tokens")
            prompts = [text[:-max_new_tokens] for text in found]
            calibration = prompts if calibrate else None
            # Made where it is needed first: if that fails, rows say so.
            int4 = functools.cache(functools.partial(int4_model, model, calibration=calibration, progress=False))

            def make(draft: str, gamma: int, int4=int4, prompts=prompts) -> Draft:
                made = make_draft(draft, model, int4=int4)
                return prepare(model, prompts, config=dataclasses.replace(make_config(0, gamma), draft=made)).draft

            for temperature in temperatures:
                bar.set_description(f"{context:,} tokens, temperature {temperature:g}")
                cases = [Case(method, gamma, temperature) for method, gamma in decoded]
                decodes = []
                for row in decode.measure(model, int4, cases, prompts, max_new_tokens, seed=seed):
                    decodes.append(row)
                    tell(row, row.method, f"{row.tokens_per_second or 0:,.1f} tokens/s")
                    bar.update()
                rows += compared(decodes)
                asked = [(draft, make_config(temperature, gamma)) for draft, gamma in walked]
                _compile_walks(model, make, found, asked, seed)
                for draft, config in asked:
                    walk = _walk(model, draft, make, found, config, seed)
                    walks.append(walk)
                    rate = walk.acceptance and walk.acceptance.acceptance_rate
                    tell(walk, draft, "nothing drafted" if rate is None else f"{rate:.3f} accepted, teacher-forced")
                    bar.update()
    return EndToEndReport(
        **this_run(),
        model=name,
        parameters=sum(weight.size for weight in model.weights().values()),
        max_new_tokens=max_new_tokens,
        calibrated=calibrate,
        rows=rows,
        teacher_forced=walks,
    )


def _tell(row: DecodeRow | TeacherForced, method: str, figure: str) -> None:
    """Logs a row once it is measured: a run takes long, and may be ended before its report."""
    told = figure if row.status == "measured" else f"{row.status}: {row.note}"
    log.info("%s tokens, temperature %g, %s, gamma %d: %s", f"{row.context:,}", row.temperature, method, row.gamma, told)


def _compile_walks(
    model: Llama,
    make: Callable[[str, int], Draft],
    texts: Sequence[Sequence[int]],
    asked: Sequence[tuple[str, GenerationConfig]],
    seed: int,
) -> None:
    """Makes the programs of these walks side by side. What fails here fails again in its turn, and gets its row then."""

    def runs():
        for draft, config in asked:
            try:
                made = make(draft, config.num_speculative_tokens)
            except Exception:
                continue
            yield model, made, texts, config, key_of(seed)

    acceptance.compile_side_by_side(runs())


def _walk(
    model: Llama, draft: str, make: Callable[[str, int], Draft], texts: Sequence[Sequence[int]], config: GenerationConfig, seed: int
) -> TeacherForced:
    context = len(texts[0]) - config.max_new_tokens
    row = TeacherForced(context, config.temperature, draft, config.num_speculative_tokens, len(texts), "measured")
    try:
        made = make(draft, config.num_speculative_tokens)
        return dataclasses.replace(row, acceptance=acceptance.teacher_forced(model, made, texts, config, key_of(seed)))
    except InputError:  # a draft's settings that do not fit the model, for one
        raise
    except Exception as error:  # one row of many
        return dataclasses.replace(row, status="failed", note=named(error))


def table(report: EndToEndReport) -> Group:
    """A table with a line for every context, temperature, method and gamma; the baseline has none."""
    walks = _walks(report)
    head = Text.assemble(
        (f"Decode of {report.model} ({report.parameters / 1e6:,.0f} M parameters) on {report.device}", "bold"), f", {report.date}\n"
    )
    grid = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    columns = ["context", "temper-\nature", "method", "gamma", "tokens/s", "ms/token", "speed-up", "accepted", "repeated"]
    for label in (*columns, "teacher-\nforced", "given those\nbefore", "prefill\ns", "compile\ns", "cache\nGB"):
        is_name = label == "method"
        grid.add_column(label, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    number = lambda x, form, unit="": "-" if x is None else format(x, form) + unit
    for row in report.rows:
        name = f"{row.context:,}", f"{row.temperature:g}", row.method, str(row.gamma) if row.gamma else "-"
        walk = walks.get((row.context, row.temperature, row.method, row.gamma))
        found = None if walk is None else walk.acceptance
        walked = number(found.acceptance_rate, ".3f") if found else "-" if walk is None else walk.status
        given = with_error(found.conditional_rate, found.conditional_error) if found else "-"
        if row.status != "measured":
            grid.add_row(*name, row.status, *["-"] * 4, walked, given, *["-"] * 3)
            continue
        figures = [f"{row.tokens_per_second:,.1f}", f"{row.ms_per_token:,.2f}", number(row.speedup, ".2f", "x")]
        figures += [number(row.acceptance_ratio, ".3f"), f"{row.repeated_ngrams:.1%}", walked, given]
        grid.add_row(*name, *figures, f"{row.prefill_s:.2f}", f"{row.compile_s:.1f}", f"{row.cache_bytes / 1e9:.2f}")
    counts = {walk.context: walk.texts for walk in report.teacher_forced}
    errors = ", +- its standard error over texts" if any(n > 1 for n in counts.values()) else ""
    notes = [
        f"Batch 1, {report.max_new_tokens} new tokens after each of",
        ", ".join(f"{n} texts of {context:,} tokens" for context, n in counts.items()) + ";",
        "drafts calibrated on the prompts." if report.calibrated else "drafts rounded to nearest.",
        "speed-up: over autoregressive decoding with a cache in the model's own precision. accepted: of the drafts, free-running;",
        "repeated: the share of that text's 8-grams which stood in it before. teacher-forced: accepted of the drafts along real text;",
        f"given those before: the chance that a draft is accepted there once those before it are{errors}.",
    ]
    failed = dict.fromkeys(row.note for row in [*report.rows, *report.teacher_forced] if row.status != "measured")
    return Group(head, grid, *(Text(f"failed: {note}") for note in failed), Text("\n" + " ".join(notes), "dim"))


def plot(report: EndToEndReport, path: Path) -> None:
    """Two panels against context: speed-up, and acceptance, teacher-forced and free-running; a line for every method, temperature and
    gamma.

    Raises InputError if nothing was measured, or the file cannot be written.
    """
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.gamma and row.speedup]
    if not rows:
        raise InputError(f"--plot {path}: nothing was measured")
    walks = _walks(report)
    contexts = sorted({row.context for row in rows})
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    speed, accepted = figure.subplots(1, 2)
    line_of = lambda row: (row.method, row.temperature, row.gamma)
    lines = list(dict.fromkeys(map(line_of, rows)))
    for number, (method, temperature, gamma) in enumerate(lines):
        line = [row for row in rows if line_of(row) == (method, temperature, gamma)]
        style = dict(color=f"C{number % 10}", marker=MARKERS[number // 10 % len(MARKERS)])
        style["label"] = f"{method}, temperature {temperature:g}, gamma {gamma}"
        speed.plot([row.context for row in line], [row.speedup for row in line], **style)
        walked = [
            (row.context, found.acceptance_rate)
            for row in line
            if (found := walks[row.context, temperature, method, gamma].acceptance) and found.acceptance_rate is not None
        ]
        if walked:
            accepted.plot(*zip(*walked), **style)
        accepted.plot([row.context for row in line], [row.acceptance_ratio for row in line], color=style["color"], linestyle=":")
    for axes in (speed, accepted):
        plots.context_axis(axes, contexts)
    speed.set(ylabel="speed-up over autoregressive", title="Speed-up", ylim=(0, None))
    accepted.set(ylabel="accepted / drafted", title="Acceptance: teacher-forced (dotted: free-running)")
    speed.legend(fontsize=8)
    figure.suptitle(f"{report.model} ({report.parameters / 1e6:,.0f} M parameters) on {report.device}, {report.date}", fontsize=11)
    plots.save(figure, path)


def _walks(report: EndToEndReport) -> dict[Key, TeacherForced]:
    """Teacher-forced acceptance by context, temperature, draft and gamma."""
    return {(walk.context, walk.temperature, walk.draft, walk.gamma): walk for walk in report.teacher_forced}
