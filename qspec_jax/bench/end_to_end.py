"""`qspec bench end-to-end`: a trained model on real text. What share of its drafts is accepted, and how much faster whole decodes are.

Nothing is simulated. The texts of a context are cut from one stream of tokens, apart from each other: their last `max_new_tokens` tokens
are walked (teacher-forced acceptance), and what is before them is the prompt of the decodes that are timed (free-running acceptance).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from tqdm import tqdm

from qspec_jax import drafts
from qspec_jax.bench import decode
from qspec_jax.bench.decode_rows import AUTOREGRESSIVE, METHODS, Case, Row, compared
from qspec_jax.bench.rows import Run, one_line, this_run
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.drafts.cached_model import CachedModel
from qspec_jax.errors import InputError
from qspec_jax.evaluate import acceptance
from qspec_jax.evaluate.acceptance import Acceptance
from qspec_jax.models.llama import Llama

BASELINE, SPECULATIVE = METHODS[AUTOREGRESSIVE], METHODS["quantspec"]


@dataclasses.dataclass(frozen=True)
class TeacherForced:
    """Acceptance along the texts of one context; None unless its status is "measured"."""

    context: int
    temperature: float
    gamma: int
    texts: int
    status: str
    note: str = ""
    acceptance: Acceptance | None = None


@dataclasses.dataclass(frozen=True)
class Report(Run):
    """For every context and temperature a row of the baseline and one of each gamma, and for each gamma teacher-forced acceptance.

    calibrated: the draft's weights are rounded for the prompts of the context at hand.
    """

    model: str
    parameters: int
    max_new_tokens: int
    calibrated: bool
    rows: list[Row]
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
) -> Report:
    """Measures quantspec with each gamma against the baseline, at every context and temperature.

    stream: real text, as token ids. texts: of each context, one after the other (walked, they are a batch); fewer where the stream has no
    more. progress: a bar on standard error; None where that is a terminal. Raises InputError where the stream or the model's positions
    are too few for a context; what fails later is a row that says so.
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
            draft = functools.cache(functools.partial(drafts.quantspec, model, calibration=calibration, progress=False))
            make_draft = lambda int4, draft=draft: draft().model
            for temperature in temperatures:
                bar.set_description(f"{context:,} tokens, temperature {temperature:g}")
                cases = [Case(BASELINE, 0, temperature), *(Case(SPECULATIVE, gamma, temperature) for gamma in gammas)]
                decodes = []
                for row in decode.measure(model, make_draft, cases, prompts, max_new_tokens, seed=seed):
                    decodes.append(row)
                    bar.update()
                rows += compared(decodes)
                for gamma in gammas:
                    walks.append(_walk(model, draft, found, make_config(temperature, gamma), seed))
                    bar.update()
    return Report(
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
    """So many texts of this length, evenly spread over the stream, that do not overlap."""
    count = min(count, len(stream) // length)
    if count == 0:
        raise InputError(
            f"the text has {len(stream):,} tokens, and {length:,} are needed for context and new tokens; give more with --file"
        )
    starts = np.linspace(0, len(stream) - length, count).astype(int)
    return [list(stream[start : start + length]) for start in starts]


def _walk(
    model: Llama, draft: Callable[[], CachedModel], texts: Sequence[Sequence[int]], config: GenerationConfig, seed: int
) -> TeacherForced:
    context = len(texts[0]) - config.max_new_tokens
    row = TeacherForced(context, config.temperature, config.num_speculative_tokens, len(texts), "measured")
    try:
        return dataclasses.replace(row, acceptance=acceptance.teacher_forced(model, draft(), texts, config, jax.random.key(seed)))
    except Exception as error:  # one row of many
        return dataclasses.replace(row, status="failed", note=one_line(error))
