"""`qspec eval harness`: runs tasks of lm-evaluation-harness with a model of this library, and reports their figures."""

import contextlib
import dataclasses
import functools
import io
import os
import sys
import traceback
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval
from datasets.exceptions import DatasetsError
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from rich.console import Group
from rich.text import Text

from qspec_jax.errors import InputError, named, one_line, with_type
from qspec_jax.evaluate import harness
from qspec_jax.evaluate.harness import WITHOUT_FORKS, QspecLM, without_git_errors
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.reports import Run, grid, this_run


@dataclasses.dataclass(frozen=True)
class Metric:
    """A figure of a task.

    Attributes:
        filter: the part of an answer that was compared; "none": all of it.
    """

    task: str
    filter: str
    metric: str
    value: float
    error: float | None
    samples: int | None


@dataclasses.dataclass(frozen=True)
class HarnessReport(Run):
    """What `qspec eval harness` measured.

    Attributes:
        cache: as the target read it.
        draft: of generation.
        harness: the version of lm_eval.
        results: figures of tasks and groups.
    """

    model: str
    dtype: str
    cache: str
    draft: str
    harness: str
    results: list[Metric]

    def table(self) -> Group:
        """A table with a line for each metric of each task."""

        def shown(value: float | None) -> str:
            return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)

        names = "task", "filter", "metric"
        columns = grid(*names, "value", "standard error", "samples", left=names)
        for row in self.results:
            columns.add_row(row.task, row.filter, row.metric, shown(row.value), shown(row.error), shown(row.samples))
        head = Text.assemble((f"{self.model} on {self.device}", "bold"), f", {self.dtype}, cache {self.cache}, draft {self.draft}")
        return Group(head, columns, Text(f"Through decode, with lm_eval {self.harness}.", "dim"))


def run(
    lm: QspecLM,
    tasks: Sequence[str],
    *,
    include_path: Sequence[Path] = (),
    num_fewshot: int | None = None,
    limit: float | None = None,
    apply_chat_template: bool = False,
    system_instruction: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    seed: int = 1234,
    kept: KeptRows = NOT_KEPT,
) -> HarnessReport:
    """Runs tasks of the harness.

    Args:
        tasks: names of tasks, groups or tags.
        include_path: directories with tasks of your own.
        num_fewshot: examples before each question; None: as the task says.
        limit: the number of samples of each task, or their share if below 1; None: all.
        apply_chat_template: whether prompts go through the tokenizer's chat template.
        system_instruction: the beginning of each prompt.
        metadata: settings that some tasks ask for, as RULER's do for max_seq_lengths.
        seed: of few-shot examples.
        kept: the tasks of an earlier run.

    Raises:
        InputError: for an unknown task, for a mistake in one, and for data that are not on this machine and cannot be fetched.
    """
    if limit is not None and limit <= 0:
        raise InputError(f"limit {limit:g} should be above 0: a number of samples of each task, or a share of them if below 1")
    for path in include_path:
        if not path.is_dir():
            raise InputError(f"{path}: no such directory; include_path (--include-path) should name one with tasks")
    with _mistakes_of_tasks(tasks), _quiet(lm.progress):
        manager = TaskManager(include_path=list(map(str, include_path)), metadata={"pretrained": lm.directory, **(metadata or {})})
        own = TaskManager(include_path=list(map(str, include_path)), include_defaults=False).all_tasks if include_path else []
    for task in tasks:
        if not manager.match_tasks([task]):
            _check_yaml(include_path)
            there = f"; {', '.join(map(str, include_path))} has {', '.join(own[:10]) or 'none'}" if include_path else ""
            raise InputError(f"there is no task {task!r}, nor one like it, among the {len(manager.all_tasks):,} of lm_eval{there}")
    settings = dict(num_fewshot=num_fewshot, limit=limit, apply_chat_template=apply_chat_template, system_instruction=system_instruction)
    settings |= dict.fromkeys(("random_seed", "numpy_random_seed", "fewshot_random_seed"), seed) | {"torch_random_seed": None}

    def measured(task: str) -> list[Metric]:
        with _mistakes_of_tasks([task]), _quiet(lm.progress):
            found = lm_eval.simple_evaluate(lm, tasks=[task], task_manager=manager, log_samples=False, **settings)
        return list(_metrics(found["results"]))

    metrics: dict[tuple[str, str, str], Metric] = {}  # a task may be named twice, alone and by its group
    for task in tasks:
        for metric in kept.measured(task, list[Metric], functools.partial(measured, task), _described):
            metrics[metric.task, metric.filter, metric.metric] = metric
    return HarnessReport(
        **this_run(),
        model=lm.directory,
        dtype=lm.model.dtype.name,
        cache=lm.read,
        draft=lm.config.draft,
        harness=lm_eval.__version__,
        results=list(metrics.values()),
    )


def _described(metrics: list[Metric]) -> str:
    return ", ".join(f"{metric.metric} {metric.value:.4f}" for metric in metrics if isinstance(metric.value, float))


@contextlib.contextmanager
def _quiet(progress: bool | None) -> Iterator[None]:
    """A context without lm_eval's output on standard output, without its bars if ours are not shown, and without forks.

    It would fork for bootstraps, which JAX's threads do not survive.
    """
    shown = sys.stderr.isatty() if progress is None else progress
    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.dict(os.environ, WITHOUT_FORKS))
        stack.enter_context(without_git_errors())
        stack.enter_context(contextlib.redirect_stdout(sys.stderr if shown else io.StringIO()))
        if not shown:
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


@contextlib.contextmanager
def _mistakes_of_tasks(tasks: Sequence[str]) -> Iterator[None]:
    """Turns exceptions of lm_eval and of a task's own code into an InputError in one line; those of this library pass unchanged."""
    names = ", ".join(tasks)
    try:
        yield
    except InputError:
        raise
    except (OSError, DatasetsError) as error:  # for example data that cannot be fetched
        raise InputError(f"the data of {names} cannot be read ({named(error)})") from None
    except ImportError as error:  # a task's own code needs a package, and its message says which
        raise InputError(f"{names} cannot be read ({one_line(error)})") from None
    except Exception as error:
        if any(frame.filename == harness.__file__ for frame in traceback.extract_tb(error.__traceback__)):
            raise
        raise InputError(f"lm_eval failed on {names}: {named(error)}") from None


def _check_yaml(folders: Sequence[Path]) -> None:
    """Raises InputError for the first file that is no readable task; lm_eval would skip it without a message."""
    for path in sorted(path for folder in folders for path in folder.rglob("*.yaml")):
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:
            raise InputError(f"{path}: lm_eval cannot read a task from it ({with_type(error)})") from None


def _metrics(results: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    for task, figures in results.items():
        for name, value in figures.items():
            metric, comma, kept = name.partition(",")
            # RULER's tasks give -1 for lengths that no prompt has.
            if not comma or metric.endswith("_stderr") or (metric.isdecimal() and value == -1):
                continue
            error = figures.get(f"{metric}_stderr,{kept}")
            yield Metric(task, kept, metric, value, None if error == "N/A" else error, figures.get("sample_len"))
