"""What `qspec eval perplexity` and `qspec eval quantizers` show: tables and plots."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from qspec_jax import plots
from qspec_jax.evaluate import perplexity, quantizers
from qspec_jax.evaluate.perplexity import TooShort

BAR = 0.4


def table(report: perplexity.Report) -> Group:
    """A line for each cache."""
    grid = _grid("cache", "perplexity", "change", "bits per byte", "KL, nats a token", "top-1 agreement")
    for row in report.results:
        figures = f"{row.perplexity:.4f}", f"{row.perplexity_change:+.3%}", f"{row.bits_per_byte:.4f}", f"{row.kl:.2e}"
        grid.add_row(row.cache, *figures, f"{row.top1_agreement:.2%}")
    notes = [
        _what(report),
        f"Groups of {report.group_size} tokens, scheme {report.scheme}. change, KL, agreement: from a cache in the model's own precision.",
        *_left_out(report.too_short),
    ]
    return Group(_head("Perplexity through decode", report), grid, *(Text(note, "dim") for note in notes))


def quantizers_table(report: quantizers.Report) -> Group:
    """Two lines for each quantizer, as draft and as target."""
    labels = "perplexity", "change", "KL, nats a token", "top-1 agreement", "error of keys", "of values", "accepted"
    grid = _grid("quantizer", "keys by", "values by", "scheme", "read by", *labels)
    for row in report.results:
        for reader, reading in (("draft", row.draft), ("target", row.target)):
            name = (row.variant, row.keys, row.values, row.scheme) if reader == "draft" else [""] * 4
            figures = f"{reading.perplexity:.4f}", f"{reading.perplexity_change:+.3%}", f"{reading.kl:.2e}", f"{reading.top1_agreement:.2%}"
            errors = f"{reading.key_error:.2%}", f"{reading.value_error:.2%}"
            grid.add_row(*name, reader, *figures, *errors, f"{row.acceptance_rate:.4f}" if reader == "draft" else "")
    notes = [
        _what(report) + f" With a cache in the model's own precision: perplexity {report.full_perplexity:.4f}.",
        f"Groups of {report.group_size} tokens. errors: rms, relative, in the prompts. accepted: of drafts by the model's own weights,",
        f"teacher-forced, gamma {report.gamma}, temperature 0.",
        *_left_out(report.too_short),
    ]
    return Group(_head("KV quantizers", report), grid, *(Text(note, "dim") for note in notes))


def plot(report: perplexity.Report, path: Path) -> None:
    """Two panels against the distance from the prompt: perplexity, and divergence from the full cache; a line for each cache.

    Raises InputError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    loss, divergence = figure.subplots(1, 2)
    for number, row in enumerate(report.results):
        middles = [(part.first + part.last) / 2 for part in row.by_distance]
        style = dict(color=f"C{number}", marker="o", label=f"{row.cache} ({row.perplexity:.3f}, KL {row.kl:.1e})")
        loss.plot(middles, [part.perplexity for part in row.by_distance], **style)
        divergence.plot(middles, [part.kl for part in row.by_distance], **style)
    # Not logarithmic all the way: the full cache's is 0.
    divergence.set_yscale("symlog", linthresh=1e-7)
    loss.set(ylabel="perplexity", title="Perplexity")
    divergence.set(ylabel="nats a token", title="KL from the full cache")
    for axes in (loss, divergence):
        axes.set_xlabel("tokens behind the prompt")
        axes.grid(alpha=0.3)
    loss.legend(fontsize=8)
    figure.suptitle(f"{report.model}: {report.texts} texts, prompts of {report.prompt_tokens:,} tokens", fontsize=11)
    plots.save(figure, path)


def quantizers_plot(report: quantizers.Report, path: Path) -> None:
    """Two panels: divergence from the full cache as draft and as target, and acceptance; bars for each quantizer.

    Raises InputError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    divergence, accepted = figure.subplots(1, 2)
    places = range(len(report.results))
    for offset, name, colour in ((-BAR / 2, "draft", "tab:orange"), (BAR / 2, "target", "tab:blue")):
        heights = [getattr(row, name).kl for row in report.results]
        divergence.bar([place + offset for place in places], heights, BAR, label=f"read by the {name}", color=colour)
    divergence.set_yscale("log")
    divergence.set(ylabel="nats a token", title="KL from the full cache")
    divergence.legend()
    accepted.bar(places, [row.acceptance_rate for row in report.results], BAR, color="tab:orange")
    accepted.set(ylabel="accepted / drafted", title=f"Acceptance, teacher-forced, gamma {report.gamma}", ylim=(None, 1))
    for axes in (divergence, accepted):
        axes.set_xticks(places, [row.variant for row in report.results], rotation=20)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(f"{report.model}: {report.texts} texts, axes of scales by keys-values", fontsize=11)
    plots.save(figure, path)


def _grid(*labels: str) -> Table:
    grid = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for label in labels:
        grid.add_column(label, justify="left" if label in ("cache", "quantizer", "keys by", "values by", "scheme", "read by") else "right")
    return grid


def _head(title: str, report: perplexity.Report | quantizers.Report) -> Text:
    return Text.assemble((f"{title} of {report.model}", "bold"), f" in {report.dtype} on {report.device}\n")


def _what(report: perplexity.Report | quantizers.Report) -> str:
    return (
        f"\n{report.tokens:,} tokens ({report.bytes:,} bytes): {report.max_new_tokens:,} behind {report.prompt_tokens:,} of each of "
        f"{report.texts} texts."
    )


def _left_out(texts: Sequence[TooShort]) -> list[str]:
    if not texts:
        return []
    longest = max(texts, key=lambda text: text.tokens)
    count = "1 text" if len(texts) == 1 else f"{len(texts)} texts"
    return [f"{count} left out, too short; the longest of them is {longest.name}, {longest.tokens:,} tokens."]
