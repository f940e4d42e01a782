"""`qspec bench end-to-end`: a trained model on real text. What share of its drafts is accepted, and how much faster whole decodes are.

Nothing is simulated. The texts of a context are cut from one stream of tokens, apart from each other: their last `max_new_tokens` tokens
are walked (teacher-forced acceptance), and what is before them is the prompt of the decodes that are timed (free-running acceptance).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from jaxtyping import Array, Key
from rich.console import RenderableType
from rich.text import Text

from qspec_jax import plots
from qspec_jax.bench import decode
from qspec_jax.bench.decode_rows import Case, DecodeMethod, DecodeRow, attempt, compared
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.keys import key_of
from qspec_jax.decoding.prepare import prepare
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.int4 import int4_model
from qspec_jax.drafts.registry import USUAL, make_draft
from qspec_jax.errors import InputError, named
from qspec_jax.evaluate import acceptance
from qspec_jax.evaluate.acceptance import Acceptance, with_error
from qspec_jax.evaluate.texts import cut
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.models.llama import Llama
from qspec_jax.progress import progress_bar
from qspec_jax.reports import Run, formatted, grid, page, this_run


@dataclasses.dataclass(frozen=True)
class TeacherForced:
    """Teacher-forced acceptance of a draft along the texts of one context. acceptance: None unless the status is "measured"."""

    context: int
    temperature: float
    draft: str
    gamma: int
    texts: int
    status: str
    note: str = ""
    acceptance: Acceptance | None = None


@dataclasses.dataclass(frozen=True)
class EndToEndReport(Run):
    """Decodes and acceptance.

    Attributes:
        model: its name.
        parameters: of the model.
        max_new_tokens: tokens that each decode adds.
        calibrated: whether the drafts' weights are rounded for the prompts of each context.
        rows: at each context and temperature one for the baseline, and one for each draft and gamma.
        teacher_forced: at each context and temperature one for each draft and gamma.
    """

    model: str
    parameters: int
    max_new_tokens: int
    calibrated: bool
    rows: list[DecodeRow]
    teacher_forced: list[TeacherForced]

    def table(self) -> RenderableType:
        """A line for every context, temperature, method and gamma; the baseline has no gamma."""
        columns = ["context", "temper-\nature", "method", "gamma", "tokens/s", "ms/token", "speed-up", "accepted", "repeated"]
        columns += ["teacher-\nforced", "given those\nbefore", "prefill\ns", "compile\ns", "cache\nGB"]
        found, walks = grid(*columns, left=("method",), wraps=("method",)), self._walks()
        for row in self.rows:
            name = f"{row.context:,}", f"{row.temperature:g}", row.method, str(row.gamma) if row.gamma else "-"
            walk = walks.get((row.context, row.temperature, row.method, row.gamma))
            rates = None if walk is None else walk.acceptance
            walked = formatted(rates.acceptance_rate, ".3f") if rates else "-" if walk is None else walk.status
            given = with_error(rates.conditional_rate, rates.conditional_error) if rates else "-"
            speed = formatted(row.tokens_per_second, ",.1f") if row.status == "measured" else row.status
            figures = [speed, formatted(row.ms_per_token, ",.2f"), formatted(row.speedup, ".2f", "x")]
            figures += [formatted(row.acceptance_ratio, ".3f"), formatted(row.repeated_ngrams, ".1%"), walked, given]
            gigabytes = row.cache_bytes and row.cache_bytes / 1e9
            costs = formatted(row.prefill_s, ".2f"), formatted(row.compile_s, ".1f"), formatted(gigabytes, ".2f")
            found.add_row(*name, *figures, *costs)
        counts = {walk.context: walk.texts for walk in self.teacher_forced}
        errors = ", +- its standard error over texts" if any(n > 1 for n in counts.values()) else ""
        notes = [
            f"Batch 1, {self.max_new_tokens} new tokens after each of",
            ", ".join(f"{n} texts of {context:,} tokens" for context, n in counts.items()) + ";",
            "drafts calibrated on the prompts." if self.calibrated else "drafts rounded to nearest.",
            "speed-up: over autoregressive decoding with a cache in the model's own precision. accepted: of the drafts, free-running;",
            "repeated: the share of that text's 8-grams that occur in it before. teacher-forced: accepted of the drafts along real text;",
            f"given those before: the chance that a draft is accepted there once those before it are{errors}.",
        ]
        failed = dict.fromkeys(row.note for row in [*self.rows, *self.teacher_forced] if row.status != "measured")
        title = f"Decode of {self.model} ({self.parameters / 1e6:,.0f} M parameters) on {self.device}"
        return page(title, f", {self.date}", found, *(Text(f"failed: {note}") for note in failed), notes=[" ".join(notes)])

    def figure(self):
        """Two panels against context: speed-up, and acceptance, teacher-forced and free-running; a line for every method, temperature and
        gamma.

        Raises InputError if nothing was measured.
        """
        rows = [row for row in self.rows if row.gamma and row.speedup]
        if not rows:
            raise InputError("--plot: nothing was measured")
        walks = self._walks()
        contexts = sorted({row.context for row in rows})
        figure, (speed, accepted) = plots.panels((11, 4.5), 2)

        def line_of(row):
            return (row.method, row.temperature, row.gamma)

        lines = list(dict.fromkeys(map(line_of, rows)))
        for number, (method, temperature, gamma) in enumerate(lines):
            line = [row for row in rows if line_of(row) == (method, temperature, gamma)]
            style = plots.line_style(number, f"{method}, temperature {temperature:g}, gamma {gamma}")
            speed.plot([row.context for row in line], [row.speedup for row in line], **style)
            walked = [
                (row.context, found.acceptance_rate)
                for row in line
                if (found := walks[row.context, temperature, method, gamma].acceptance) and found.acceptance_rate is not None
            ]
            if walked:
                accepted.plot(*zip(*walked), **style)
            accepted.plot([row.context for row in line], [row.acceptance_ratio for row in line], color=style["color"], linestyle=":")
        for axes in (speed, accepted):
            plots.context_axis(axes, contexts)
        speed.set(ylabel="speed-up over autoregressive", title="Speed-up", ylim=(0, None))
        accepted.set(ylabel="accepted / drafted", title="Acceptance: teacher-forced (dotted: free-running)")
        speed.legend(fontsize=8)
        figure.suptitle(f"{self.model} ({self.parameters / 1e6:,.0f} M parameters) on {self.device}, {self.date}", fontsize=11)
        return figure

    def _walks(self) -> dict[tuple[int, float, str, int], TeacherForced]:
        """Teacher-forced acceptance by context, temperature, draft and gamma."""
        return {(walk.context, walk.temperature, walk.draft, walk.gamma): walk for walk in self.teacher_forced}


def run(
    name: str,
    model: Llama,
    stream: Sequence[int],
    contexts: Sequence[int],
    temperatures: Sequence[float],
    gammas: Sequence[int],
    methods: Sequence[DecodeMethod],
    *,
    max_new_tokens: int,
    texts: int,
    calibrate: bool,
    seed: int = 0,
    kept: KeptRows = NOT_KEPT,
    progress: bool | None = None,
) -> EndToEndReport:
    """Measures every method at every context and temperature, those that draft with each gamma. The first is the baseline.

    What fails after the first check gets a row that says so.

    Args:
        stream: real text, as token ids.
        texts: how many of each context, fewer where the stream has no more; they are decoded one after the other and walked as a batch.
        kept: the rows of an earlier run.
        progress: see `progress_bar`.

    Raises:
        InputError: where the stream or the model's positions are too few for a context.
    """
    texts_of = {context: cut(stream, context + max_new_tokens, texts) for context in contexts}

    def make_config(temperature, gamma):
        return GenerationConfig(draft=USUAL, max_new_tokens=max_new_tokens, temperature=temperature, num_speculative_tokens=gamma)

    for temperature, gamma, found in itertools.product(temperatures, gammas, texts_of.values()):
        acceptance.check(model, [text[:-max_new_tokens] for text in found], make_config(temperature, gamma))
    rows, walks = [], []
    walked = [(method.draft, gamma) for method in methods if method.speculative for gamma in gammas]
    decoded = [(method, gamma) for method in methods for gamma in method.gammas(gammas)]
    total = len(contexts) * len(temperatures) * (len(decoded) + len(walked))
    with progress_bar(total=total, progress=progress) as bar:
        for context, found in texts_of.items():
            prompts = [text[:-max_new_tokens] for text in found]
            calibration = prompts if calibrate else None
            # Made where it is needed first: if that fails, rows say so.
            int4 = functools.cache(functools.partial(int4_model, model, calibration=calibration, progress=False))

            def make(draft: str, gamma: int, int4=int4, prompts=prompts) -> Draft:
                made = make_draft(draft, model, int4=int4)
                return prepare(model, prompts, config=dataclasses.replace(make_config(0, gamma), draft=made)).draft

            for temperature in temperatures:
                cases = [Case(method, gamma, temperature) for method, gamma in decoded]
                decodes = []
                for row in decode.measure(model, int4, cases, prompts, decode.Settings(max_new_tokens, seed=seed), kept=kept):
                    decodes.append(row)
                    bar.update()
                rows += compared(decodes)
                labels = {
                    f"{context:,} tokens, temperature {temperature:g}, {draft}, gamma {gamma}, teacher-forced": (draft, gamma)
                    for draft, gamma in walked
                }
                missing = [(draft, make_config(temperature, gamma)) for label, (draft, gamma) in labels.items() if label not in kept]
                found_walks = _walked(model, make, found, missing, key_of(seed))
                for label in labels:
                    walks.append(kept.measured(label, TeacherForced, functools.partial(next, found_walks), _described, _is_measured))
                    bar.update()
    return EndToEndReport(
        **this_run(),
        model=name,
        parameters=sum(math.prod(weight.shape) for weight in model.weights().values()),
        max_new_tokens=max_new_tokens,
        calibrated=calibrate,
        rows=rows,
        teacher_forced=walks,
    )


def _is_measured(walk: TeacherForced) -> bool:
    return walk.status == "measured"


def _described(walk: TeacherForced) -> str:
    if walk.status != "measured":
        return f"{walk.status}: {walk.note}"
    rate = walk.acceptance.acceptance_rate
    return "nothing drafted" if rate is None else f"{rate:.3f} accepted"


def _walked(
    model: Llama,
    make: Callable[[str, int], Draft],
    texts: Sequence[Sequence[int]],
    asked: Sequence[tuple[str, GenerationConfig]],
    key: Key[Array, ""],
) -> Iterator[TeacherForced]:
    """Walks the texts with each of the drafts, whose programs are first compiled side by side; a draft that fails gets a row too."""
    made = [attempt(make, draft, config.num_speculative_tokens) for draft, config in asked]
    runs = [(model, draft, texts, config, key) for draft, (_, config) in zip(made, asked)]
    acceptance.compile_side_by_side(run for run in runs if not isinstance(run[1], Exception))
    for (draft, config), run in zip(asked, runs):
        context = len(texts[0]) - config.max_new_tokens
        row = functools.partial(TeacherForced, context, config.temperature, draft, config.num_speculative_tokens, len(texts))
        found = run[1] if isinstance(run[1], Exception) else attempt(acceptance.teacher_forced, *run)
        yield row("failed", named(found)) if isinstance(found, Exception) else row("measured", acceptance=found)
