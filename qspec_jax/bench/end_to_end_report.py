"""What `qspec bench end-to-end` shows: a table, and plots of speed-up and acceptance."""

from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from qspec_jax import plots
from qspec_jax.bench.end_to_end import Report, TeacherForced
from qspec_jax.errors import InputError

Key = tuple[int, float, int]  # context, temperature, gamma


def table(report: Report) -> Group:
    """A line for every context, temperature and gamma; the baseline's gamma is 0."""
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


def plot(report: Report, path: Path) -> None:
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


def _walks(report: Report) -> dict[Key, TeacherForced]:
    return {(walk.context, walk.temperature, walk.gamma): walk for walk in report.teacher_forced}
