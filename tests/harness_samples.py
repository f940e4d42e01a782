"""What a model answers to each question of the tasks in tests/harness_tasks, through lm-evaluation-harness."""

from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent / "harness_tasks"
NAMES = ("qspec_choices", "qspec_last", "qspec_rolling", "qspec_lines", "qspec_needle")
LENGTHS = (256, 512)


def answers(model, model_args: dict | None, directory: str, names: tuple[str, ...] = NAMES) -> dict[str, list]:
    """The model's answers by task, one entry for each document in order: log-likelihoods with greedy flags, or texts."""
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata={"pretrained": directory, "max_seq_lengths": LENGTHS})
    found = lm_eval.simple_evaluate(model, model_args, tasks=list(names), task_manager=manager, bootstrap_iters=0, torch_random_seed=None)
    ordered = lambda task: sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return {task: [sample["resps"] for sample in ordered(task)] for task in names}
