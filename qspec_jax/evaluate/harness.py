"""Models of this library in lm-evaluation-harness: `qspec eval harness`; and its own command line with `--model qspec`, by
`python -m qspec_jax.evaluate.harness`.

Whatever it asks for goes through decode, and so through the cache: log-likelihoods feed the continuation as generation would, where others
run a prompt's pass over it and never touch the cache. A context that several continuations share is read once.
"""

import contextlib
import dataclasses
import io
import itertools
import logging
import math
import os
import subprocess
import sys
import traceback
import unittest.mock
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jinja2
import lm_eval
from datasets.exceptions import DatasetsError
from lm_eval import evaluator, utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from rich.console import Group
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from qspec_jax.checkpoints.generation_defaults import SAMPLING, StoredDefaults, stored_defaults
from qspec_jax.checkpoints.loading import config_and_dtype, load_model
from qspec_jax.checkpoints.tokenizers import load_tokenizer, special_tokens
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GAMMA, GenerationConfig
from qspec_jax.decoding.keys import key_of
from qspec_jax.decoding.requests import Request
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.draft import checkpoints_of
from qspec_jax.drafts.registry import AUTO, USUAL, parse_draft
from qspec_jax.errors import InputError, named, one_line, warn_once, with_type
from qspec_jax.evaluate.perplexity import UPPER, WIDTH, CacheView, cache_view, score
from qspec_jax.models.llama import Llama

log = logging.getLogger(__name__)

NAME = "qspec"
WITHOUT_FORKS = {"DISABLE_MULTIPROC": "1"}  # as the harness calls it
Pair = tuple[tuple[int, ...], tuple[int, ...]]  # token ids of a context, and of what continues it


@register_model(NAME)
class QspecLM(TemplateLM):
    """A model for tasks of the harness.

    pretrained: a checkpoint's directory, or its name at a hub. cache: how the target reads its cache, as `perplexity.cache_view` takes it;
    int4 reads the upper plane alone, to measure what it is worth. draft, gamma: for generation, whose output does not depend on them; none
    where the target reads int4. batch_size: rows at a time. max_length: the most tokens that are read for one prediction; None: as many as
    the model takes. max_gen_toks: new tokens where a task does not say. add_bos_token: None leaves that to the tokenizer.
    chat_template_args: for the tokenizer's template. seed: of sampling. progress: bars on standard error. model, tokenizer: loaded already,
    in place of `pretrained`, of which only generation_config.json is then read, where that is a directory.

    Raises InputError for a setting that is out of range, and as `load_model`, `load_tokenizer` and `make_draft` do.
    """

    def __init__(
        self,
        pretrained: str | Path,
        *,
        cache: str = "int8",
        draft: str = USUAL,
        gamma: int = GAMMA,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        dtype: str | None = None,
        add_bos_token: bool | None = None,
        chat_template_args: dict | None = None,
        seed: int = 0,
        progress: bool | None = None,
        device: str | None = None,
        model: Llama | None = None,
        tokenizer: Any = None,
    ):
        super().__init__()
        reading = cache_view(cache)
        if draft == AUTO:
            raise InputError(f"draft {AUTO} chooses for one run of prompts; name a draft for the tasks of a harness")
        if not (str(batch_size).isdecimal() and int(batch_size) > 0):
            raise InputError(f"batch_size {batch_size} should be a whole number, at least 1")
        if (device or "").partition(":")[0].replace("cuda", "gpu") not in ("", jax.default_backend()):
            log.warning("device %s is ignored: JAX chose %s; JAX_PLATFORMS says otherwise", device, jax.default_backend())
        self.directory, self.read = str(pretrained), cache
        self.model = load_model(pretrained, dtype=dtype) if model is None else model
        self.tokenizer = load_tokenizer(pretrained) if tokenizer is None else tokenizer
        # The last token of a window is predicted, not read.
        most = self.model.config.max_length - 1
        self.max_length = most if max_length is None else int(max_length)
        if not 2 <= self.max_length <= most:
            raise InputError(f"max_length {max_length} should be from 2 to {most}, one less than the model's positions")
        self.batch_size, self.max_gen_toks, self.add_bos_token = int(batch_size), max_gen_toks, add_bos_token
        self.chat_template_args, self.seed, self.progress = chat_template_args or {}, seed, progress
        self.config = GenerationConfig(
            max_new_tokens=max_gen_toks,
            draft="none" if cache == UPPER or reading.one_by_one else draft,
            cache="int8" if cache == UPPER else cache,
            num_speculative_tokens=gamma,
        )
        for checkpoint in checkpoints_of(parse_draft(self.config.draft)) if self.config.speculative else ():
            config_and_dtype(checkpoint)  # which may be refused, before hours of work
        self._draft = None
        here = model is None or Path(pretrained).is_dir()
        self._stored = stored_defaults(pretrained) if here else StoredDefaults(None, {})
        self._special = special_tokens(self.tokenizer)

    # Tokens and templates -----------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int | None:
        """The tokenizer's EOS; None where it has none."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What is read before the first token of a text: BOS, or EOS in a model that has none. Raises InputError where there is neither."""
        if (first := self._first_token) is None:
            raise InputError(
                f"{self.directory}: its tokenizer has neither BOS nor EOS, and a text without a context is read after one of them; name "
                "bos_token or eos_token in tokenizer_config.json"
            )
        return first

    @property
    def _first_token(self) -> int | None:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.directory.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        chosen = self.add_bos_token if add_special_tokens is None else add_special_tokens
        first = self._first_token
        if add_special_tokens is None and first is not None and has_bos_prefix(string, self.tokenizer.decode(first)):
            chosen = False  # as a chat template's text begins
        return self.tokenizer.encode(string, **({} if chosen is None else {"add_special_tokens": chosen}))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        settings = dict(add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt)
        template = lambda turns: self.tokenizer.apply_chat_template(turns, tokenize=False, **settings, **self.chat_template_args)
        if not self.tokenizer.chat_template:
            raise InputError(f"{self.directory}: its tokenizer has no chat template; leave that option out")
        try:
            return template(chat_history)
        except jinja2.TemplateError:
            log.warning("the chat template takes no system message, which is left out")
            return template([turn for turn in chat_history if turn["role"] != "system"])

    # Scores -------------------------------------------------------------------------------------------------------------

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of context and continuation together, cut after the longest beginning that they share with the context alone.

        Blanks at the end of the context belong to the continuation, as lm_eval has it. Where the context's tokens are a beginning of the
        whole, this is `TemplateLM`'s pair. Where its last ones merge with the continuation, the merged token is scored; lm_eval cuts by
        number there, and leaves out what no token of the continuation is left for.
        """
        kept = context.rstrip()
        whole, alone = self.tok_encode(context + continuation), self.tok_encode(kept)
        shared = next((i for i, (token, other) in enumerate(zip(whole, alone)) if token != other), min(len(whole), len(alone)))
        if shared < len(alone):
            warn_once(
                log,
                "where the end of a context merges with its continuation into one token, that is scored too; lm_eval's hf leaves it out",
            )
        return whole[:shared] or [self.prefix_token_id], whole[shared:]

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        for context, continuation in (request.args for request in requests):
            if not context and not self.tok_encode(continuation, add_special_tokens=False):
                raise _nothing_to_score(context, continuation)
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **_) -> list[tuple[float, bool]]:
        for key, _, continuation in requests:
            if not continuation:
                raise _nothing_to_score(*key or ("", ""))
        pairs, keys = [self._window(tuple(context), tuple(continuation)) for _, context, continuation in requests], defaultdict(list)
        for (key, *_), pair in zip(requests, pairs):
            keys[pair].append(key)
        found: dict[Pair, tuple[float, bool]] = {}
        for pair, answer in self._scored(pairs, quiet=disable_tqdm):
            found[pair] = answer
            for key in keys[pair]:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return [found[pair] for pair in pairs]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        windows_of = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            windows = utils.get_rolling_token_windows(tokens, self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
            windows_of.append([tuple(map(tuple, utils.make_disjoint_window(window))) for window in windows])
        waiting, found = defaultdict(set), {}
        left = [set(windows) for windows in windows_of]
        for i, windows in enumerate(left):
            for pair in windows:
                waiting[pair].add(i)
        sums = {i: 0.0 for i, windows in enumerate(left) if not windows}
        for pair, answer in self._scored([pair for windows in windows_of for pair in windows], quiet=disable_tqdm):
            found[pair] = answer[0]
            for i in waiting[pair]:
                left[i].discard(pair)
                if not left[i]:
                    sums[i] = math.fsum(found[window] for window in windows_of[i])
                    self.cache_hook.add_partial("loglikelihood_rolling", requests[i].args, sums[i])
        return [sums[i] for i in range(len(requests))]

    def _window(self, context: tuple[int, ...], continuation: tuple[int, ...]) -> Pair:
        """The end of a context, as much as there is room for."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise InputError(f"a continuation of {len(continuation)} tokens is longer than max_length, {self.max_length}")
        return self._cut(context, room), continuation

    def _cut(self, context: Sequence[int], room: int) -> Sequence[int]:
        if len(context) > room:
            warn_once(log, f"contexts that are longer than max_length, {self.max_length} tokens, lose their beginning")
        return context[-room:]

    def _scored(self, pairs: Sequence[Pair], *, quiet: bool) -> Iterator[tuple[Pair, tuple[float, bool]]]:
        """Each different pair as it comes, with its continuation's log-likelihood, and whether that is what greedy decoding gives. No
        continuation is empty."""
        view = cache_view(self.read)
        waiting = dict.fromkeys(pairs)
        with self._bar("log-likelihoods", len(waiting), quiet) as bar:
            for batch in batches_of(waiting, self.batch_size):
                yield from zip(batch, self._scores_of(batch, view))
                bar.update(len(batch))

    def _bar(self, what: str, total: int, quiet: bool) -> tqdm:
        hidden = True if quiet else None if self.progress is None else not self.progress
        return tqdm(total=total, desc=what, leave=False, disable=hidden)

    def _scores_of(self, batch: Sequence[Pair], view: CacheView) -> list[tuple[float, bool]]:
        contexts = list(dict.fromkeys(context for context, _ in batch))
        longest = max(len(tokens) for _, tokens in batch)
        # Rows, contexts and room come in few sizes, so that there are few programs. A row without work has a token to score.
        settings = dict(room=WIDTH << math.ceil(math.log2(max(1, longest / WIDTH))))
        rows = [*batch, *[(contexts[0], batch[0][1][:1])] * (self.batch_size - len(batch))]
        if len(contexts) < len(rows):
            settings["prompt_of"] = [contexts.index(context) for context, _ in rows]
            contexts += contexts[:1] * (min(self.batch_size, 1 << (len(contexts) - 1).bit_length()) - len(contexts))
        scores = score(self.model, contexts, [tokens for _, tokens in rows], [view], **settings)
        return [
            (math.fsum(scores.logprobs[0, i, : len(tokens)].tolist()), bool(scores.likeliest[0, i, : len(tokens)].all()))
            for i, (_, tokens) in enumerate(batch)
        ]

    # Generation ---------------------------------------------------------------------------------------------------------

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        asked = [self._request(i, *request.args) for i, request in enumerate(requests)]
        if self._draft is None and self.config.speculative:
            self._draft = make_draft(self.config.draft, self.model)
        if self._draft is not None:
            asked = [dataclasses.replace(each, config=dataclasses.replace(each.config, draft=self._draft)) for each in asked]
        texts: dict[int, str] = {}
        run = run_batch(self.model, asked, batch_size=self.batch_size, tokenizer=self.tokenizer, view=cache_view(self.read).view)
        with self._bar("generation", len(asked), disable_tqdm) as bar:
            for result in run:
                texts[result.index] = result.text
                self.cache_hook.add_partial("generate_until", requests[result.index].args, result.text)
                bar.update()
        return [texts[i] for i in range(len(asked))]

    def _request(self, index: int, context: str, settings: dict) -> Request:
        """What a task asks for, with the settings that the model `hf` of lm_eval would decode it with: see `_sampling`."""
        until = _as_list(settings.get("until"))
        try:
            wanted = dict(normalize_gen_kwargs(settings | {"until": until, "do_sample": False, "temperature": 0.0}, self.max_gen_toks))
        except (TypeError, ValueError) as error:
            raise InputError(f"generation_kwargs {settings}: max_gen_toks should be a whole number ({one_line(error)})") from None
        sampling, new = self._sampling(settings), wanted.pop("max_gen_toks")
        for name in ("until", "do_sample", *SAMPLING):
            wanted.pop(name, None)
        if wanted:
            warn_once(log, f"generation settings that are ignored: {', '.join(sorted(wanted))}")
        if new >= self.max_length:
            raise InputError(f"max_gen_toks {new} should be less than max_length, {self.max_length}")
        # Special tokens never stand in a text; where a string has one, its tokens end the row. So does the tokenizer's EOS, always.
        special = [text for text in until if any(name in text for name in self._special)]
        stop_ids = [tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in special]
        stop_ids += [] if self.eot_token_id is None else [(self.eot_token_id,)]
        config = dataclasses.replace(
            self.config,
            max_new_tokens=new,
            stop=tuple(text for text in until if text not in special),
            stop_token_ids=tuple(dict.fromkeys(stop_ids)),
            **sampling,
        )
        tokens = self._cut(self.tok_encode(context), self.max_length - new) or [self.prefix_token_id]
        return Request(tokens, config, jax.random.fold_in(key_of(self.seed), index))

    def _sampling(self, settings: Mapping[str, Any]) -> dict[str, float | int]:
        """The sampling settings of a task, as fields of `GenerationConfig`.

        do_sample and temperature are read as lm_eval 0.4.13's `hf` reads them: a temperature above 0 samples unless do_sample is false,
        and without one decoding is greedy unless do_sample is true. The rest is what `generate` of transformers takes: the task's own
        settings, then those of generation_config.json, then transformers' defaults, with a top_k of 50. `hf` gives `generate` a
        temperature of 0 where a task says `do_sample: true` alone, which that refuses; here the temperature is the checkpoint's, or 1.
        """
        said = {name: settings[name] for name in SAMPLING if name in settings}
        temperature, sampled = said.get("temperature"), settings.get("do_sample")
        if temperature is None:
            said.pop("temperature", None)
        if sampled is None:
            sampled = temperature not in (None, 0)
        taken = self._stored.with_said(said | {"do_sample": sampled})
        if sampled and temperature is None:
            warn_once(
                log, f"do_sample is true and the task names no temperature, which lm_eval's hf refuses: it is {taken['temperature']:g} here"
            )
        warn_once(log, self._stored.described(said, taken, "the task"), logging.INFO)
        return taken


def batches_of(pairs: Iterable[Pair], rows: int) -> Iterator[list[Pair]]:
    """The pairs in batches of at most so many: the longest first, and those that share a context together."""
    by_context = sorted(pairs, key=lambda pair: (-len(pair[0]), pair[0], -len(pair[1]), pair[1]))
    batch: list[Pair] = []
    for _, sharing in itertools.groupby(by_context, key=lambda pair: pair[0]):
        sharing = list(sharing)
        if batch and len(batch) + len(sharing) > rows:
            yield batch
            batch = []
        for pair in sharing:
            batch.append(pair)
            if len(batch) == rows:
                yield batch
                batch = []
    if batch:
        yield batch


def _as_list(until: Any) -> list[str]:
    """The stop strings of a task, without empty ones. Raises InputError for anything else."""
    found = [until] if isinstance(until, str) else until or []
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) for text in found):
        raise InputError(f"until {until!r} should be a string or a list of strings")
    return list(filter(None, found))


def _nothing_to_score(context: str, continuation: str) -> InputError:
    end = f"{'...' if len(context) > 40 else ''}{context[-40:]}"
    return InputError(
        f"the continuation {continuation!r} after {end!r} has no token of its own to score; each choice and target needs some text"
    )


def _commit() -> str | None:
    """The commit of the repository that this runs in; None without one. lm_eval's own way lets git's complaint through."""
    with contextlib.suppress(OSError):
        found = subprocess.run(["git", "describe", "--always"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return found.stdout.strip() or None
    return None


def _asks_git_quietly() -> contextlib.AbstractContextManager:
    return unittest.mock.patch.object(evaluator, "get_git_commit_hash", _commit)


@dataclasses.dataclass(frozen=True)
class Metric:
    """A figure of a task. filter: what of an answer was compared; "none": all of it. error: the figure's standard error, if known."""

    task: str
    filter: str
    metric: str
    value: float
    error: float | None
    samples: int | None


@dataclasses.dataclass(frozen=True)
class HarnessReport:
    """What `qspec eval harness` reports. cache: how the target read it. harness: the version of lm_eval. results: of tasks and groups."""

    model: str
    device: str
    dtype: str
    cache: str
    draft: str
    harness: str
    results: list[Metric]


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
) -> HarnessReport:
    """Runs tasks of the harness by their names. include_path: directories with tasks of one's own. metadata: what some tasks ask for, as
    RULER's do for max_seq_lengths. seed: of few-shot examples.

    Raises InputError for a task that is not there, for one that is written wrong, and where its data are not on this machine and cannot be
    fetched.
    """
    if limit is not None and limit <= 0:
        raise InputError(f"limit {limit:g} should be more than 0: the first so many of each task, or that share, if less than 1")
    for path in include_path:
        if not path.is_dir():
            raise InputError(f"{path}: no directory with tasks")
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
    with _mistakes_of_tasks(tasks), _quiet(lm.progress):
        found = lm_eval.simple_evaluate(lm, tasks=list(tasks), task_manager=manager, log_samples=False, **settings)
    return HarnessReport(
        model=lm.directory,
        device=jax.devices()[0].device_kind,
        dtype=lm.model.dtype.name,
        cache=lm.read,
        draft=lm.config.draft,
        harness=lm_eval.__version__,
        results=list(_metrics(found["results"])),
    )


@contextlib.contextmanager
def _quiet(progress: bool | None) -> Iterator[None]:
    """Without the harness's bars where ours are not shown, and without what it prints among results; and without forks for its bootstraps,
    which JAX's threads do not survive."""
    shown = sys.stderr.isatty() if progress is None else progress
    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.dict(os.environ, WITHOUT_FORKS))
        stack.enter_context(_asks_git_quietly())
        stack.enter_context(contextlib.redirect_stdout(sys.stderr if shown else io.StringIO()))
        if not shown:
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


@contextlib.contextmanager
def _mistakes_of_tasks(tasks: Sequence[str]) -> Iterator[None]:
    """What lm_eval and a task's own code raise becomes an InputError, in one line; what this module raises goes on as it is."""
    names = ", ".join(tasks)
    try:
        yield
    except InputError:
        raise
    except (OSError, DatasetsError) as error:  # such as data that are neither here nor within reach
        raise InputError(f"the data of {names} cannot be read ({named(error)})") from None
    except ImportError as error:  # of a package that a task's own code needs, which says what to install
        raise InputError(f"{names} cannot be read ({one_line(error)})") from None
    except Exception as error:
        files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
        if files.count(Path(__file__)) > 2:  # here, in `run`, and below
            raise
        raise InputError(f"lm_eval cannot do {names} so ({named(error)})") from None


def _check_yaml(folders: Sequence[Path]) -> None:
    """Raises InputError for the first file with a task that cannot be read, which lm_eval passes over."""
    for path in sorted(path for folder in folders for path in folder.rglob("*.yaml")):
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:
            raise InputError(f"{path}: no task that lm_eval can read ({with_type(error)})") from None


def _metrics(results: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    for task, figures in results.items():
        for name, value in figures.items():
            metric, comma, kept = name.partition(",")
            # RULER's tasks say -1 for lengths that no prompt has.
            if not comma or metric.endswith("_stderr") or (metric.isdecimal() and value == -1):
                continue
            error = figures.get(f"{metric}_stderr,{kept}")
            yield Metric(task, kept, metric, value, None if error == "N/A" else error, figures.get("sample_len"))


def table(report: HarnessReport) -> Group:
    """A table with a line for each metric of each task."""
    grid = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for label in ("task", "filter", "metric", "value", "standard error", "samples"):
        grid.add_column(label, justify="right" if label in ("value", "standard error", "samples") else "left")
    shown = lambda x: "-" if x is None else f"{x:.4f}" if isinstance(x, float) else str(x)
    for row in report.results:
        grid.add_row(row.task, row.filter, row.metric, shown(row.value), shown(row.error), shown(row.samples))
    head = Text.assemble((f"{report.model} on {report.device}", "bold"), f", {report.dtype}, cache {report.cache}, draft {report.draft}")
    return Group(head, grid, Text(f"Through decode, with lm_eval {report.harness}.", "dim"))


def main() -> None:
    """The command line of lm_eval, which knows of `--model qspec` once this module is imported."""
    from lm_eval.__main__ import cli_evaluate

    os.environ |= WITHOUT_FORKS
    try:
        with _asks_git_quietly():
            cli_evaluate()
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
