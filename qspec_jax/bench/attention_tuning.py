"""`qspec bench attention --tune`: measures the configurations of our kernels and keeps the best for this device."""

import dataclasses
import functools
import importlib
import tempfile
from collections import defaultdict
from collections.abc import Sequence

import jax
from rich.console import RenderableType

from pallas_kernels import tuning
from qspec_jax.bench import attention, kernels
from qspec_jax.bench.attention_shapes import AttentionShape, random_problem, random_view
from qspec_jax.bench.kernels import KernelRow
from qspec_jax.errors import InputError
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.progress import progress_bar
from qspec_jax.reports import Run, grid, page, this_run

# The largest relative error, against the reference, of a right result.
MAX_ERROR = 1e-2
# Tokens in a row that errors are measured at: long enough for every warp to use its part of shared memory several times.
ERROR_TOKENS = 32768


@dataclasses.dataclass(frozen=True)
class Trial:
    """One configuration on one shape.

    Attributes:
        kernel: its name.
        problem: what the best configuration depends on, as the kernel says.
        config: the configuration.
        default: whether it is what the kernel would choose itself.
        row: its figures.
        chosen: whether it is kept for its problem.
    """

    kernel: str
    problem: dict[str, int | None]
    config: dict[str, int]
    default: bool
    row: KernelRow
    chosen: bool = False

    @property
    def valid(self) -> bool:
        return self.row.status == "measured" and self.row.relative_error <= MAX_ERROR


@dataclasses.dataclass(frozen=True)
class TuningReport(Run):
    """One sweep. file: where the chosen configurations went. not_tuned: what cannot run here, and why."""

    file: str
    trials: list[Trial]
    not_tuned: list[str] = dataclasses.field(default_factory=list)

    def table(self) -> RenderableType:
        """The trials of each shape, fastest first."""
        names = ("shape", "kernel", "configuration")
        found = grid(*names, "median us", "GB/s", "error", "", left=(*names, ""), wraps=(*names, ""))
        order = {shape: i for i, shape in enumerate(dict.fromkeys(trial.row.shape for trial in self.trials))}

        def time(trial):
            return trial.row.timing.median_us if trial.row.timing else float("inf")

        previous = None
        for trial in sorted(self.trials, key=lambda trial: (trial.kernel, order[trial.row.shape], time(trial))):
            row = trial.row
            if previous not in (None, (trial.kernel, row.shape)):
                found.add_section()
            previous = trial.kernel, row.shape
            figures = ["-"] * 3
            if t := row.timing:
                figures = [f"{t.median_us:,.1f}", f"{row.bytes / t.median_us / 1e3:,.0f}", f"{row.relative_error:.1e}"]
            notes = [row.note, "wrong" * (row.timing is not None and not trial.valid), "default" * trial.default, "chosen" * trial.chosen]
            cells = row.shape, trial.kernel, _describe(trial.config), *figures
            found.add_row(*cells, ", ".join(filter(None, notes)), style="green" if trial.chosen else "")
        notes = [f"The chosen ones are in {self.file}", *(f"Not tuned: {reason}" for reason in self.not_tuned)]
        return page(f"Configurations of decode attention on {self.device}", f", {self.date}", found, notes=notes)


def check() -> None:
    """Raises InputError where there is no GPU to tune for, or no place for what is found."""
    if jax.default_backend() != "gpu":
        raise InputError("--tune needs a GPU, and JAX finds none")
    folder = tuning.path().parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"--tune: nothing can be written in {folder} ({error.strerror})") from None


def run(
    shapes: Sequence[AttentionShape],
    implementations: Sequence[str],
    *,
    repeats: int = 20,
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
) -> TuningReport:
    """Measures every candidate on every shape, and stores the best of each problem as it is found.

    The best has the least mean, over the shapes of the problem, of its time over the least of that shape.
    """
    problems, reasons = defaultdict(list), []
    for name in implementations:
        for shape in shapes:
            if reason := attention.unsupported(shape, name):
                reasons.append(f"{name} on {shape.name} {reason}")
                continue
            kernel, problem, configs = _tunable(shape, name)
            problems[kernel, tuple(problem.items())].append((shape, name, problem, configs))
    if not problems:
        raise InputError(f"--tune: nothing can run: {'; '.join(dict.fromkeys(reasons))}")
    total = sum(len(configs) for work in problems.values() for *_, configs in work)
    chosen = []
    with progress_bar(total=total, progress=progress) as bar:
        for (kernel, _), work in problems.items():
            trials = []
            for shape, name, problem, configs in work:
                for config in configs:
                    label = f"{shape.name}, {name}, {_describe(dataclasses.asdict(config))}"
                    settings = dict(config=config, repeats=repeats, error_tokens=ERROR_TOKENS)
                    measure = functools.partial(attention.measure, shape, name, **settings)
                    row = kept.measured(label, KernelRow, measure, kernels.described, kernels.is_measured)
                    trials.append(Trial(kernel, problem, dataclasses.asdict(config), config == configs[0], row))
                    bar.update()
            trials = choose(trials)
            for trial in trials:
                if trial.chosen:
                    tuning.store(trial.kernel, trial.problem, trial.config, tuning.path())
            chosen += trials
    return TuningReport(
        not_tuned=reasons,
        **this_run(),
        file=str(tuning.path()),
        trials=chosen,
    )


def choose(trials: Sequence[Trial]) -> list[Trial]:
    """Marks the trials of the best configuration among the trials of one problem."""
    configs = defaultdict(list)
    for trial in trials:
        if trial.valid:
            configs[tuple(trial.config.items())].append(trial.row)
    rows = [row for of_config in configs.values() for row in of_config]
    least = {shape: min(row.timing.median_us for row in rows if row.shape == shape) for shape in {row.shape for row in rows}}

    def mean(config):
        return sum(row.timing.median_us / least[row.shape] for row in configs[config]) / len(configs[config])

    # One that failed on a shape is none for all.
    best = min((config for config, of in configs.items() if len(of) == len(least)), key=mean, default=None)
    return [dataclasses.replace(trial, chosen=tuple(trial.config.items()) == best) for trial in trials]


def _tunable(shape: AttentionShape, implementation: str) -> tuple[str, dict, list]:
    args = jax.eval_shape(lambda: (*random_problem(shape, 0), random_view(shape, 0)))
    module = importlib.import_module(f"pallas_kernels.attention.{implementation}")
    return module.tunable(*args)


def _describe(config: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in config.items())
