"""What `qspec eval acceptance` shows: a table, and a plot against gamma."""

import dataclasses
from pathlib import Path
from typing import Any

from rich.table import Table

from qspec_jax import plots

STYLES = {"teacher-forced": "-", "free-running": ":"}


@dataclasses.dataclass(frozen=True)
class Report:
    """texts: how many were measured; skipped: files too short; results: each an `Acceptance`, with its gamma, temperature and mode."""

    texts: int
    skipped: list[str]
    results: list[dict[str, Any]]


def table(report: Report) -> Table:
    """A line for every gamma, temperature and mode."""
    grid = Table(title="Acceptance")
    columns = ("gamma", "temperature", "mode", "accepted / drafted", "given those before", "tokens a round", "drafted", "repeated 8-grams")
    for label in columns:
        grid.add_column(label, justify="left" if label == "mode" else "right")
    for row in report.results:
        conditional = "-" if row["conditional_rate"] is None else f"{row['conditional_rate']:.3f}"
        rates = f"{row['acceptance_rate']:.3f}", conditional, f"{row['mean_acceptance_length']:.2f}"
        name = str(row["gamma"]), f"{row['temperature']:g}", row["mode"]
        grid.add_row(*name, *rates, f"{row['drafted']:,}", f"{row['repeated_ngrams']:.1%}")
    return grid


def plot(report: Report, path: Path) -> None:
    """Two panels against gamma, accepted / drafted and tokens a round; a line for every temperature and mode (arXiv 2502.10424, figure 9).

    Raises InputError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    results = report.results
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    accepted, tokens = figure.subplots(1, 2)
    temperatures = list(dict.fromkeys(row["temperature"] for row in results))
    for temperature, mode in dict.fromkeys((row["temperature"], row["mode"]) for row in results):
        line = [row for row in results if (row["temperature"], row["mode"]) == (temperature, mode)]
        line.sort(key=lambda row: row["gamma"])
        style = dict(color=f"C{temperatures.index(temperature)}", linestyle=STYLES[mode], marker="o")
        for axes, name in ((accepted, "acceptance_rate"), (tokens, "mean_acceptance_length")):
            axes.plot([row["gamma"] for row in line], [row[name] for row in line], label=f"temperature {temperature:g}, {mode}", **style)
    for axes in (accepted, tokens):
        axes.set(xlabel="gamma (most drafts of a round)", xticks=sorted({row["gamma"] for row in results}))
        axes.grid(alpha=0.3)
    accepted.set(ylabel="accepted / drafted", title="Acceptance", ylim=(0, 1.02))
    tokens.set(ylabel="tokens", title="Tokens a round", ylim=(0, None))
    tokens.legend(fontsize=8)
    plots.save(figure, path)
