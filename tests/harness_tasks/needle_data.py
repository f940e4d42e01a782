"""Needles in RULER's form: prompts of several lengths, scored by its own functions."""

import datasets
from lm_eval.tasks.ruler.common_utils import aggregate_metrics, get_tokenizer, process_results, resolve_tokenizer_name

from qspec_jax.evaluate import needle

__all__ = ["aggregate_metrics", "needles", "process_results"]


def needles(**metadata):
    """Prompts of metadata["max_seq_lengths"] tokens, with room for the answer."""
    tokenizer = get_tokenizer(resolve_tokenizer_name(metadata))
    rows = []
    for length in metadata["max_seq_lengths"]:
        for sample in range(3):
            prompt = needle.make_prompt(tokenizer, length - 16, 0.2, style="two-names", seed=0, sample=sample)
            rows.append({"input": prompt.text, "outputs": [prompt.value], "max_length": length})
    return {"test": datasets.Dataset.from_list(rows)}
