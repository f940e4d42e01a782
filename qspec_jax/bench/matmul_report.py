"""What `qspec bench matmul` shows: a table, and a plot of time against layer and rows."""

from collections import defaultdict
from pathlib import Path

from rich.console import Group

from qspec_jax import plots
from qspec_jax.bench import report
from qspec_jax.bench.matmul_shapes import Shape
from qspec_jax.bench.rows import Report

WIDTH = 0.4  # of a bar
GAP = 0.6  # between two layers


def table(found: Report) -> Group:
    """See `report.table`."""
    return report.table(
        found,
        "INT4 matmul",
        _describe,
        [
            "Peers multiply by the same weights in bfloat16, in one matrix. MB: what must be read of the weights, with scales and zeros.",
            "xla and torch call cuBLAS, xla unless it finds a kernel of its own faster.",
            "error: norm, against the product in float32 with the weights that were read.",
        ],
    )


def _describe(shape: Shape) -> str:
    return f"M={shape.rows}, {' + '.join(f'{out:,}' for out in shape.outputs)} outputs of {shape.inputs:,} inputs"


def plot(found: Report, path: Path) -> None:
    """Times as bars, a panel for each model: for each layer and M our fastest beside the fastest peer.

    Raises InputError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    models = defaultdict(lambda: defaultdict(list))
    for shape in found.shapes.values():
        models[shape.model][shape.layer].append(shape)
    figure = Figure(figsize=(7 * len(models), 4.5), layout="constrained")
    for axes, (model, layers) in zip(figure.subplots(1, len(models), squeeze=False)[0], models.items()):
        at, places, middles = 0.0, {}, {}
        for layer, shapes in layers.items():
            places |= {shape.name: at + i for i, shape in enumerate(shapes)}
            middles[layer] = at + (len(shapes) - 1) / 2
            at += len(shapes) + GAP
        for peer, label, colour in ((False, "qspec-jax, INT4", "tab:green"), (True, "fastest bf16 peer", "tab:gray")):
            times = defaultdict(list)
            for row in found.rows:
                if row.peer == peer and row.timing and row.shape in places:
                    times[row.shape].append(row.timing.median_us)
            if times:
                left = [places[name] + (WIDTH if peer else -WIDTH) / 2 for name in times]
                axes.bar(left, [min(each) for each in times.values()], WIDTH, label=label, color=colour)
        # A layer's name is below its middle M.
        axes.xaxis.remove_overlapping_locs = False
        axes.set_xticks(list(places.values()), [f"{found.shapes[name].rows}" for name in places], minor=True)
        axes.set_xticks(list(middles.values()), [f"\n{layer}" for layer in middles])
        axes.tick_params(axis="x", which="both", length=0)
        axes.set(ylabel="time (us)", xlabel="rows M, layer", title=model)
        axes.margins(y=0.2)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.suptitle(f"Matmuls on {found.device}, {found.date}", fontsize=11)
    plots.save(figure, path)
