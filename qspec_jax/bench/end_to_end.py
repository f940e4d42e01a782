"""`qspec bench end-to-end`: a trained model on real text. What share of its drafts is accepted, and how much faster whole decodes are.

Nothing is simulated. The texts of a context are cut from one stream of tokens, apart from each other: their last `max_new_tokens` tokens
are walked (teacher-forced acceptance), and what is before them is the prompt of the decodes that are timed (free-running acceptance).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from qspec_jax import plots
from qspec_jax.bench import decode
from qspec_jax.bench.decode_rows import AUTOREGRESSIVE, METHODS, Case, DecodeRow, compared
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.drafts.int4 import int4_model
from qspec_jax.drafts.registry import make_draft
from qspec_jax.errors import InputError, named
from qspec_jax.evaluate import acceptance
from qspec_jax.evaluate.acceptance import Acceptance
from qspec_jax.models.llama import Llama
from qspec_jax.provenance import Run, this_run

BASELINE, SPECULATIVE = METHODS[AUTOREGRESSIVE], METHODS["quantspec"]
Key = tuple[int, float, int]  # context, temperature, gamma


@dataclasses.dataclass(frozen=True)
class TeacherForced:
    """Teacher-forced acceptance along the texts of one context. acceptance: None unless the status is "measured"."""

    context: int
    temperature: float
    gamma: int
    texts: int
    status: str
    note: str = ""
    acceptance: Acceptance | None = None


@dataclasses.dataclass(frozen=True)
class EndToEndReport(Run):
    """Decodes and acceptance. Each context and temperature has a row for the baseline and one for each gamma, and an entry of
    teacher_forced for each gamma.

    calibrated: the draft's weights are rounded for the prompts of the context at hand.
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
    *,
    max_new_tokens: int,
    texts: int,
    calibrate: bool,
    seed: int = 0,
    progress: bool | None = None,
) -> EndToEndReport:
    """Measures quantspec with each gamma against the baseline, at every context and temperature.

    stream: real text, as token ids. texts: how many of each context, fewer where the stream has no more; they are decoded one after the
    other and walked as a batch. progress: a bar on standard error; None where that is a terminal. Raises InputError where the stream or
    the model's positions are too few for a context; what fails later gets a row that says so.
    """
    cut = {context: _cut(stream, context + max_new_tokens, texts) for context in contexts}
    make_config = lambda temperature, gamma: GenerationConfig(
        max_new_tokens=max_new_tokens, temperature=temperature, num_speculative_tokens=gamma
    )
    for temperature, gamma, found in itertools.product(temperatures, gammas, cut.values()):
        acceptance.check(model, [text[:-max_new_tokens] for text in found], make_config(temperature, gamma))
    rows, walks = [], []
    total = len(contexts) * len(temperatures) * (1 + 2 * len(gammas))
    with tqdm(total=total, leave=False, disable=None if progress is None else not progress) as bar:
        for context, found in cut.items():
            bar.set_description(f"{context:,} tokens")
            prompts = [text[:-max_new_tokens] for text in found]
            calibration = prompts if calibrate else None
            # Made where it is needed first: if that fails, rows say so.
            int4 = functools.cache(functools.partial(int4_model, model, calibration=calibration, progress=False))
            for temperature in temperatures:
                bar.set_description(f"{context:,} tokens, temperature {temperature:g}")
                cases = [Case(BASELINE, 0, temperature), *(Case(SPECULATIVE, gamma, temperature) for gamma in gammas)]
                decodes = []
                for row in decode.measure(model, int4, cases, prompts, max_new_tokens, seed=seed):
                    decodes.append(row)
                    bar.update()
                rows += compared(decodes)
                for gamma in gammas:
                    walks.append(_walk(model, int4, found, make_config(temperature, gamma), seed))
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


def token_stream(tokenizer, texts: Iterable[str]) -> list[int]:
    """The tokens of these texts one after the other, each behind the tokenizer's BOS token, if it has one."""
    stream = []
    for text in texts:
        tokens = tokenizer(text)["input_ids"]
        if tokenizer.bos_token_id is not None and tokens[:1] != [tokenizer.bos_token_id]:
            stream.append(tokenizer.bos_token_id)
        stream += tokens
    return stream


def _cut(stream: Sequence[int], length: int, count: int) -> list[list[int]]:
    """Cuts `count` texts of this length from the stream, or as many as it has: evenly spread, without overlap."""
    count = min(count, len(stream) // length)
    if count == 0:
        raise InputError(
            f"the text has {len(stream):,} tokens, and {length:,} are needed for context and new tokens; give more with --file"
        )
    starts = np.linspace(0, len(stream) - length, count).astype(int)
    return [list(stream[start : start + length]) for start in starts]


def _walk(model: Llama, int4: Callable[[], Llama], texts: Sequence[Sequence[int]], config: GenerationConfig, seed: int) -> TeacherForced:
    context = len(texts[0]) - config.max_new_tokens
    row = TeacherForced(context, config.temperature, config.num_speculative_tokens, len(texts), "measured")
    try:
        draft = make_draft(SPECULATIVE.draft, model, int4=int4)
        return dataclasses.replace(row, acceptance=acceptance.teacher_forced(model, draft, texts, config, jax.random.key(seed)))
    except Exception as error:  # one row of many
        return dataclasses.replace(row, status="failed", note=named(error))


def table(report: EndToEndReport) -> Group:
    """A table with a line for every context, temperature and gamma; the baseline's gamma is 0."""
    walks = _walks(report)
    head = Text.assemble(
        (f"Decode of {report.model} ({report.parameters / 1e6:,.0f} M parameters) on {report.device}", "bold"), f", {report.date}\n"
    )
    grid = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    columns = ["context", "temperature", "method", "gamma", "tokens/s", "ms/token", "speed-up", "accepted", "repeated", "teacher-forced"]
    for label in (*columns, "prefill s", "compile s", "cache GB"):
        grid.add_column(label, justify="left" if label == "method" else "right", no_wrap=True)
    for row in report.rows:
        name = f"{row.context:,}", f"{row.temperature:g}", row.method, str(row.gamma) if row.gamma else "-"
        walk = walks.get((row.context, row.temperature, row.gamma))
        walked = "-" if walk is None else f"{walk.acceptance.acceptance_rate:.3f}" if walk.acceptance else walk.status
        if row.status != "measured":
            grid.add_row(*name, row.status, *["-"] * 4, walked, *["-"] * 3)
            continue
        number = lambda x, form, unit="": "-" if x is None else format(x, form) + unit
        figures = [f"{row.tokens_per_second:,.1f}", f"{row.ms_per_token:,.2f}", number(row.speedup, ".2f", "x")]
        figures += [number(row.acceptance_ratio, ".3f"), f"{row.repeated_ngrams:.1%}", walked]
        grid.add_row(*name, *figures, f"{row.prefill_s:.2f}", f"{row.compile_s:.1f}", f"{row.cache_bytes / 1e9:.2f}")
    counts = {walk.context: walk.texts for walk in report.teacher_forced}
    notes = [
        f"Batch 1, {report.max_new_tokens} new tokens after each of",
        ", ".join(f"{n} texts of {context:,} tokens" for context, n in counts.items()) + ";",
        "draft calibrated on the prompts." if report.calibrated else "draft rounded to nearest.",
        "speed-up: over autoregressive decoding with a cache in the model's own precision. accepted: of the drafts, free-running;",
        "repeated: the share of that text's 8-grams which stood in it before. teacher-forced: accepted of the drafts along real text.",
    ]
    failed = dict.fromkeys(row.note for row in [*report.rows, *report.teacher_forced] if row.status != "measured")
    return Group(head, grid, *(Text(f"failed: {note}") for note in failed), Text("\n" + " ".join(notes), "dim"))


def plot(report: EndToEndReport, path: Path) -> None:
    """Two panels against context: speed-up, and acceptance, teacher-forced and free-running; a line for every temperature and gamma.

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
    for number, (temperature, gamma) in enumerate(dict.fromkeys((row.temperature, row.gamma) for row in rows)):
        line = [row for row in rows if (row.temperature, row.gamma) == (temperature, gamma)]
        style = dict(color=f"C{number}", marker="o", label=f"temperature {temperature:g}, gamma {gamma}")
        speed.plot([row.context for row in line], [row.speedup for row in line], **style)
        walked = [
            (row.context, walk.acceptance.acceptance_rate) for row in line if (walk := walks[row.context, temperature, gamma]).acceptance
        ]
        if walked:
            accepted.plot(*zip(*walked), **style)
        accepted.plot([row.context for row in line], [row.acceptance_ratio for row in line], color=f"C{number}", linestyle=":")
    for axes in (speed, accepted):
        plots.context_axis(axes, contexts)
    speed.set(ylabel="speed-up over autoregressive", title="Speed-up", ylim=(0, None))
    accepted.set(ylabel="accepted / drafted", title="Acceptance: teacher-forced (dotted: free-running)")
    speed.legend(fontsize=8)
    figure.suptitle(f"{report.model} ({report.parameters / 1e6:,.0f} M parameters) on {report.device}, {report.date}", fontsize=11)
    plots.save(figure, path)


def _walks(report: EndToEndReport) -> dict[Key, TeacherForced]:
    """Teacher-forced acceptance by context, temperature and gamma."""
    return {(walk.context, walk.temperature, walk.gamma): walk for walk in report.teacher_forced}
