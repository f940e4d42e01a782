"""`qspec bench states`: what is gained by reading a text once, against reading it again for each question and each sample.

Everything runs once before it is timed, so that compiling is left out. Seconds are those that pass until all new tokens are there.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key
from rich.console import RenderableType

from qspec_jax import plots
from qspec_jax.bench.simulated import SimulatedGreedy
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.reading import extend, prefill
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.sampling import Sampler, make_sampler, sample_keys
from qspec_jax.errors import InputError
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.models.llama import Llama
from qspec_jax.progress import progress_bar, working
from qspec_jax.reports import Run, formatted, grid, page, this_run
from qspec_jax.states.state import State

FIRST_TOKEN, QUESTIONS, SAMPLES = "first token", "questions", "samples"
STATE, AGAIN = "from a state", "read again"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is read and generated.

    Attributes:
        documents: their number.
        questions: about each document; 0: none, but the time to a first token.
        question_tokens: of each question, which follows the document.
        answer_tokens: new tokens of each answer.
        samples: of one prompt; 0: none.
        sample_tokens: new tokens of each sample.
        batch_size: answers that are generated at a time.
        read_again: of all questions, the number whose document is also read again for each of them; None: all.
        repeats: questions of which the median time to the first token is given.
    """

    documents: int = 1
    questions: int = 5
    question_tokens: int = 64
    answer_tokens: int = 64
    samples: int = 4
    sample_tokens: int = 64
    batch_size: int = 1
    read_again: int | None = None
    repeats: int = 5

    @property
    def new(self) -> int:
        """The maximum number of tokens that follow a document or a prompt."""
        return max(self.question_tokens + self.answer_tokens, self.sample_tokens)


@dataclasses.dataclass(frozen=True)
class StatesRow:
    """Figures of one task that was done in one way.

    Attributes:
        task: "first token" of a question, "questions" about documents, or "samples" of one prompt.
        way: "from a state" or "read again".
        context: tokens of a document or of the prompt.
        count: the number of questions or samples.
        seconds: seconds that all of them took; for first tokens the median of one.
        seconds_each: seconds of one question or sample.
        new_tokens: the number of new tokens of all of them.
        decode_s: seconds of their decoding alone; None for first tokens.
        kv_bytes: of the document with its question, or of all samples; of samples that are read again, what rows that share nothing hold.
        acceptance_rate: accepted over drafted tokens; None where nothing was drafted.
    """

    task: str
    way: str
    context: int
    count: int
    seconds: float
    seconds_each: float
    new_tokens: int
    decode_s: float | None = None
    kv_bytes: int | None = None
    acceptance_rate: float | None = None

    @property
    def decoded_per_second(self) -> float | None:
        """New tokens for each second of decoding alone."""
        return self.new_tokens / self.decode_s if self.decode_s else None


@dataclasses.dataclass(frozen=True)
class StatesReport(Run):
    """Figures of each task in both ways.

    Attributes:
        model: its name.
        dtype: of its weights.
        draft: as its text.
        cache: the target's.
        gamma: drafts of a round, 0 without a draft.
        simulated_rate: the chance that a draft is accepted, given those before it; None: drafts were verified.
        sizes: of what was read and generated.
        rows: for each context the tasks, from a state first.
        speedups: of each context and task: the time of one from a state, as a multiple of which reading again takes.
    """

    model: str
    dtype: str
    draft: str
    cache: str
    gamma: int
    simulated_rate: float | None
    sizes: Sizes
    rows: list[StatesRow]
    speedups: list[tuple[int, str, float]]

    def table(self) -> RenderableType:
        """A line for each task and way."""
        figures = ("number", "seconds", "seconds each", "times as fast", "decoding, tokens/s", "KV", "accepted")
        found = grid("context", "", "way", *figures, left=("", "way"), wraps=("decoding, tokens/s",))
        gained = {(context, task): ratio for context, task, ratio in self.speedups}
        for row in self.rows:
            ratio = gained.get((row.context, row.task)) if row.way == STATE else None
            figures = f"{row.seconds:.3f}", f"{row.seconds_each:.4f}", formatted(ratio, ".1f")
            kv = formatted(row.kv_bytes and row.kv_bytes / 1e6, ",.1f", " MB")
            accepted = formatted(row.acceptance_rate, ".3f")
            rate = formatted(row.decoded_per_second, ",.1f")
            found.add_row(f"{row.context:,}", row.task, row.way, f"{row.count:,}", *figures, rate, kv, accepted)
        s = self.sizes
        note = (
            f"Draft {self.draft}, {self.gamma} drafts a round, cache {self.cache}, {self.dtype}. First token: after a question of "
            f"{s.question_tokens} tokens, the median of {s.repeats}. Questions: {s.questions} about each of the documents ({s.documents}), "
            f"answers of {s.answer_tokens} tokens, {s.batch_size} at a time; reading the documents counts. Samples: {s.samples} of one "
            f"prompt, {s.sample_tokens} tokens each. Times as fast: by the seconds each."
        )
        if self.simulated_rate is not None:
            note += f" Acceptance is simulated, at a rate of {self.simulated_rate:.3f}."
        return page(f"States of {self.model} on {self.device}", f", {self.date}", found, notes=[note])

    def figure(self):
        """A panel for each task: seconds of one against the context, in both ways."""
        tasks = list(dict.fromkeys(row.task for row in self.rows))
        contexts = list(dict.fromkeys(row.context for row in self.rows))
        titles = {
            FIRST_TOKEN: "to the first token of a question",
            QUESTIONS: "a question and its answer",
            SAMPLES: "a sample of one prompt",
        }
        figure, panels = plots.panels((4.2 * len(tasks), 3.4), len(tasks))
        for axes, task in zip(panels, tasks, strict=True):
            for number, way in enumerate((AGAIN, STATE)):
                line = [row.seconds_each for row in self.rows if (row.task, row.way) == (task, way)]
                axes.plot(contexts, line, marker="o", color=f"C{number}", label=way)
            plots.context_axis(axes, contexts)
            if task == FIRST_TOKEN:
                axes.set_yscale("log")
            else:
                axes.set_ylim(0)
            axes.set_ylabel(f"seconds {titles[task]}")
            axes.legend()
        figure.suptitle(f"{self.model} on {self.device}")
        return figure


def run(
    name: str,
    model: Llama,
    words: Sequence[int],
    contexts: Sequence[int],
    config: GenerationConfig,
    sizes: Sizes,
    key: Key[Array, ""],
    *,
    draft: str,
    rate: float | None = None,
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
) -> StatesReport:
    """Measures each task in both ways.

    Args:
        name: the model's, for the report.
        model: the target.
        words: token ids that documents and questions are cut from.
        contexts: tokens of a document.
        config: its draft, made, and its cache; `max_new_tokens` is of no effect.
        sizes: of what is read and generated.
        key: of the draws.
        draft: the text of the draft, for the report.
        rate: the simulated chance that a draft is accepted, given those before it; None: drafts are verified.
        kept: the rows of an earlier run.
        progress: see `progress_bar`.

    Raises:
        InputError: where the text is shorter than a document.
    """

    def strategy(*configs: GenerationConfig) -> Sampler:
        return make_sampler(*configs) if rate is None else SimulatedGreedy(jnp.full(len(configs), rate))

    rows: list[StatesRow] = []
    with progress_bar(total=3 * 2 * len(contexts), progress=progress) as bar:
        for context in contexts:
            measured = _Measured(model, _Texts(words, context, sizes), config, sizes, key, strategy)
            for task, way, row in measured.tasks():
                rows.append(kept.measured(f"{context:,} tokens, {task}, {way}", StatesRow, row, _described))
                bar.update()
    pairs = [(one, other) for one, other in itertools.pairwise(rows) if (one.context, one.task) == (other.context, other.task)]
    return StatesReport(
        **this_run(),
        model=name,
        dtype=model.dtype.name,
        draft=draft,
        cache=config.cache_config.name,
        gamma=config.num_speculative_tokens if config.speculative else 0,
        simulated_rate=rate,
        sizes=sizes,
        rows=rows,
        speedups=[(one.context, one.task, other.seconds_each / one.seconds_each) for one, other in pairs],
    )


def _described(row: StatesRow) -> str:
    decoded = row.decoded_per_second
    return f"{row.seconds_each:.4f} s each" + ("" if decoded is None else f", decoding {decoded:,.1f} tokens/s")


class _Texts:
    """Documents and questions, which are cut from one text at places that are spread over it."""

    def __init__(self, words: Sequence[int], context: int, sizes: Sizes):
        if len(words) < max(context, sizes.question_tokens):
            raise InputError(f"--context {context}: the text has {len(words):,} tokens")
        self._words, self.context, self._sizes = list(words), context, sizes

    def document(self, d: int) -> list[int]:
        last = len(self._words) - self.context
        at = last * d // max(1, self._sizes.documents - 1) if d else 0
        return self._words[at : at + self.context]

    def question(self, i: int) -> list[int]:
        size = self._sizes.question_tokens
        at = i * (size + 1) % (len(self._words) - size + 1)
        return self._words[at : at + size]


class _Measured:
    """The tasks at one context."""

    def __init__(self, model: Llama, texts: _Texts, config: GenerationConfig, sizes: Sizes, key: Key[Array, ""], strategy: Callable):
        self._model, self._texts, self._config, self._sizes, self._key, self._strategy = model, texts, config, sizes, key, strategy

    def tasks(self) -> Iterator[tuple[str, str, Callable[[], StatesRow]]]:
        """Names of a task and of a way, and what measures them."""
        yield FIRST_TOKEN, STATE, self._first_from_state
        yield FIRST_TOKEN, AGAIN, self._first_read_again
        if self._sizes.questions:
            asked = [(d, d * self._sizes.questions + i) for d in range(self._sizes.documents) for i in range(self._sizes.questions)]
            yield QUESTIONS, STATE, lambda: self._questions(STATE, asked, asked[: 2 * self._sizes.questions])
            again = self._thinned(asked)
            yield QUESTIONS, AGAIN, lambda: self._questions(AGAIN, again, again[: 2 * self._sizes.batch_size])
        if self._sizes.samples:
            yield SAMPLES, STATE, self._samples_of_state
            yield SAMPLES, AGAIN, self._samples_read_again

    def _thinned(self, asked: list) -> list:
        """The questions for which documents are read again, from all documents."""
        count = min(self._sizes.read_again or len(asked), len(asked))
        return [asked[i * len(asked) // count] for i in range(count)]

    def _generate(self, prompts: Sequence, new: int, **settings):
        config = dataclasses.replace(self._config, max_new_tokens=new, **settings)
        configs = [config] * len(prompts) * config.num_return_sequences
        return generate(self._model, prompts, config=config, key=self._key, sampler=self._strategy(*configs))

    def _first(self, way: str, answered: Callable[[list[int]], object], kv_bytes: int | None = None) -> StatesRow:
        times = []
        for i in range(self._sizes.repeats + 1):  # the first one compiles
            with working(f"question {i} of {self._sizes.repeats}" if i else "warm-up"):
                question, began = self._texts.question(i), time.perf_counter()
                answered(question)
                times.append(time.perf_counter() - began)
        median = statistics.median(times[1:])
        return StatesRow(FIRST_TOKEN, way, self._texts.context, self._sizes.repeats, median, median, self._sizes.repeats, kv_bytes=kv_bytes)

    def _first_from_state(self) -> StatesRow:
        document = prefill(self._model, self._texts.document(0), config=self._config, room=self._sizes.new)
        kv_bytes = _kv_bytes([extend(document, self._texts.question(0))])
        return self._first(STATE, lambda question: self._generate([extend(document, question)], 1), kv_bytes)

    def _first_read_again(self) -> StatesRow:
        document = self._texts.document(0)
        return self._first(AGAIN, lambda question: self._generate([document + question], 1))

    def _questions(self, way: str, asked: Sequence[tuple[int, int]], warm_up: Sequence[tuple[int, int]]) -> StatesRow:
        config = dataclasses.replace(self._config, max_new_tokens=self._sizes.answer_tokens)
        prefix = self._texts.context if way == STATE else 0

        def requests(asked: Sequence[tuple[int, int]]) -> list[Request]:
            texts = [self._texts.document(d) + self._texts.question(i) for d, i in asked]
            return [Request(text, config, jax.random.fold_in(self._key, i), prefix) for text, (_, i) in zip(texts, asked, strict=True)]

        return self._batch(QUESTIONS, way, requests(asked), requests(warm_up), self._sizes.batch_size)

    def _batch(
        self, task: str, way: str, requests: list[Request], warm_up: list[Request], batch_size: int, kv_bytes: int | None = None
    ) -> StatesRow:
        for doing, timed in (("warm-up", warm_up), (f"{len(requests)} {task}", requests)):
            with working(doing):
                began = time.perf_counter()
                batch = run_batch(self._model, timed, batch_size=batch_size, strategy=self._strategy)
                list(batch)
        seconds, stats = time.perf_counter() - began, batch.stats
        figures = dict(decode_s=stats.decode_s, kv_bytes=kv_bytes, acceptance_rate=stats.rates["draft_acceptance_rate"])
        count = len(requests)
        return StatesRow(task, way, self._texts.context, count, seconds, seconds / count, stats.new_tokens, **figures)

    def _samples_of_state(self) -> StatesRow:
        prompt, count = self._texts.document(0), self._sizes.samples

        def sampled(samples: int):
            return self._generate([prompt], self._sizes.sample_tokens, num_return_sequences=samples)

        sampled(count)
        began = time.perf_counter()
        found = sampled(count)
        seconds, stats = time.perf_counter() - began, found.stats
        kv_bytes = None if found.states is None else _kv_bytes(found.states)  # one sample alone is a prompt of its own
        figures = dict(decode_s=stats.decode_s, kv_bytes=kv_bytes, acceptance_rate=stats.draft_acceptance_rate)
        return StatesRow(SAMPLES, STATE, self._texts.context, count, seconds, seconds / count, stats.new_tokens, **figures)

    def _samples_read_again(self) -> StatesRow:
        prompt, count = self._texts.document(0), self._sizes.samples
        config = dataclasses.replace(self._config, max_new_tokens=self._sizes.sample_tokens)
        kv_bytes = count * _kv_bytes([prefill(self._model, prompt, config=config, room=self._sizes.sample_tokens)])
        requests = [Request(prompt, config, key) for key in sample_keys(self._key, count)]
        return self._batch(SAMPLES, AGAIN, requests, requests, count, kv_bytes)


def _kv_bytes(states: Sequence[State]) -> int:
    """Bytes of the states' caches: pages that several have count once."""
    own = {id(state): sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache)) for state in states}
    pool = states[0].reader.pool
    pages = set() if pool is None else set(np.concatenate([state.pages for state in states]).tolist())
    return sum(own.values()) + (len(pages) * pool.num_bytes // pool.pages.size if pages else 0)
