"""Models of this library in lm-evaluation-harness: `qspec eval harness`; and its own command line with `--model qspec`, by
`python -m qspec_jax.evaluate.harness`.

Everything goes through decode, and so through the cache: log-likelihoods feed the continuation as generation would, where other adapters
score it in a prompt's pass, which never touches the cache. A context that several continuations share is read once: in one batch with
them, or, if they are more than a batch, as a state of which they are forks.
"""

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import subprocess
import sys
import unittest.mock
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jinja2
from lm_eval import evaluator, utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs
from tqdm import tqdm

from pallas_kernels.formats.views import UPPER_PLANE
from qspec_jax.checkpoints.generation_defaults import SAMPLING, StoredDefaults, stored_defaults
from qspec_jax.checkpoints.loading import config_and_dtype, load_model
from qspec_jax.checkpoints.tokenizers import load_tokenizer, special_tokens
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GAMMA, GenerationConfig
from qspec_jax.decoding.keys import key_of
from qspec_jax.decoding.reading import prefill
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.scoring import score as score_forks
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.draft import checkpoints_of
from qspec_jax.drafts.registry import AUTO, NONE, USUAL, parse_draft
from qspec_jax.errors import InputError, one_line, warn_once
from qspec_jax.evaluate.cache_views import UPPER, CacheView, cache_view
from qspec_jax.evaluate.scoring import WIDTH, score
from qspec_jax.models.llama import Llama
from qspec_jax.progress import awaited, progress_bar

log = logging.getLogger(__name__)

NAME = "qspec"
FORKED = 256  # continuations of one context whose scores are given at a time
WITHOUT_FORKS = {"DISABLE_MULTIPROC": "1"}  # as the harness calls it
Pair = tuple[tuple[int, ...], tuple[int, ...]]  # token ids of a context, and of what continues it


@register_model(NAME)
class QspecLM(TemplateLM):
    """A model for tasks of the harness.

    Args:
        pretrained: a checkpoint's directory, or its name on a hub.
        cache: the target's cache, as `cache_view` takes it; int4 reads the upper plane of int8 alone, and then there is no draft.
        draft: for generation; it does not change the output.
        gamma: maximum number of draft tokens in a round.
        batch_size: rows at a time.
        max_batch_size: ignored; lm_eval passes it.
        max_length: maximum number of tokens that are read for one prediction; None: the model's.
        max_gen_toks: new tokens if a task does not say.
        dtype: to load the model as; None: as stored.
        add_bos_token: whether texts begin with BOS; None: as the tokenizer does.
        chat_template_args: for the tokenizer's template.
        seed: of sampling.
        progress: whether bars are shown; None: where standard error is a terminal.
        device: ignored; lm_eval passes it.
        model: loaded already; of `pretrained` only generation_config.json is then read, if that is a directory.
        tokenizer: loaded already.

    Raises:
        InputError: for a setting that is out of range, and as `load_model`, `load_tokenizer` and `make_draft` do.
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
            raise InputError(f"draft {AUTO} chooses for one run of prompts; name a draft for tasks of the harness")
        if not (str(batch_size).isdecimal() and int(batch_size) > 0):
            raise InputError(f"batch_size {batch_size} should be a whole number, at least 1")
        if (device or "").partition(":")[0].replace("cuda", "gpu") not in ("", jax.default_backend()):
            log.warning("device %s is ignored: JAX chose %s; JAX_PLATFORMS can name another", device, jax.default_backend())
        self.directory, self.read = str(pretrained), cache
        self.model = load_model(pretrained, dtype=dtype) if model is None else model
        self.tokenizer = load_tokenizer(pretrained) if tokenizer is None else tokenizer
        # The last token of a window is predicted, not read.
        longest = self.model.config.max_length - 1
        self.max_length = longest if max_length is None else int(max_length)
        if not 2 <= self.max_length <= longest:
            raise InputError(f"max_length {max_length} should be from 2 to {longest}, one less than the model's positions")
        self.batch_size, self.max_gen_toks, self.add_bos_token = int(batch_size), max_gen_toks, add_bos_token
        self.chat_template_args, self.seed, self.progress = chat_template_args or {}, seed, progress
        self.config = GenerationConfig(
            max_new_tokens=max_gen_toks,
            draft="none" if cache == UPPER or reading.one_by_one else draft,
            cache="int8" if cache == UPPER else cache,
            num_speculative_tokens=gamma,
        )
        for checkpoint in checkpoints_of(parse_draft(self.config.draft)) if self.config.speculative else ():
            config_and_dtype(checkpoint)  # a bad checkpoint is refused before hours of work
        self._draft = None
        has_directory = model is None or Path(pretrained).is_dir()
        self._stored = stored_defaults(pretrained) if has_directory else StoredDefaults(None, {})
        self._special = special_tokens(self.tokenizer)

    # Tokens and templates -----------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int | None:
        """The tokenizer's EOS; None if it has none."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before the first one of a text: BOS, or EOS if there is no BOS. Raises InputError if there is neither."""
        if (first := self._first_token) is None:
            raise InputError(
                f"{self.directory}: its tokenizer has neither BOS nor EOS, one of which a text without a context is read after; name "
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
            chosen = False  # a chat template has begun the text with it
        return self.tokenizer.encode(string, **({} if chosen is None else {"add_special_tokens": chosen}))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        settings = dict(add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt)

        def template(turns: list[dict[str, str]]) -> str:
            return self.tokenizer.apply_chat_template(turns, tokenize=False, **settings, **self.chat_template_args)

        if not self.tokenizer.chat_template:
            raise InputError(f"{self.directory}: its tokenizer has no chat template; leave apply_chat_template out")
        try:
            return template(chat_history)
        except jinja2.TemplateError:
            log.warning("the chat template takes no system message, which is left out")
            return template([turn for turn in chat_history if turn["role"] != "system"])

    # Scores -------------------------------------------------------------------------------------------------------------

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of context and continuation together, cut after the longest beginning that they share with the context alone.

        Blanks at the end of the context belong to the continuation, as in lm_eval. If the context's tokens are a beginning of the whole,
        this is `TemplateLM`'s pair. If the last one merges with the continuation, the merged token is scored; lm_eval cuts by number of
        tokens there and does not score it.
        """
        kept = context.rstrip()
        whole, alone = self.tok_encode(context + continuation), self.tok_encode(kept)
        shared = next((i for i, (token, other) in enumerate(zip(whole, alone)) if token != other), min(len(whole), len(alone)))
        if shared < len(alone):
            warn_once(
                log,
                "a token that has the end of a context and the beginning of its continuation is scored; lm_eval's hf leaves it out",
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
        """A pair whose context keeps only the tokens at its end that max_length has room for."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise InputError(f"a continuation of {len(continuation)} tokens is longer than max_length, {self.max_length}")
        return self._cut(context, room), continuation

    def _cut(self, context: Sequence[int], room: int) -> Sequence[int]:
        if len(context) > room:
            warn_once(log, f"contexts that are longer than max_length, {self.max_length} tokens, lose their beginning")
        return context[-room:]

    def _scored(self, pairs: Sequence[Pair], *, quiet: bool) -> Iterator[tuple[Pair, tuple[float, bool]]]:
        """Yields each different pair once, with its continuation's log-likelihood and whether greedy decoding gives that continuation.

        No continuation may be empty.
        """
        view = cache_view(self.read)
        waiting = dict.fromkeys(pairs)
        with self._bar("log-likelihoods", len(waiting), quiet) as bar:
            found = itertools.chain(self._forked(waiting, view), self._batched(waiting, view))
            for batch, scores in awaited(found, "log-likelihood", len(waiting), lambda batch: len(batch[0])):
                yield from zip(batch, scores)
                bar.update(len(batch))

    def _batched(self, waiting: Iterable[Pair], view: CacheView) -> Iterator[tuple[list[Pair], list[tuple[float, bool]]]]:
        for batch in batches_of(waiting, self.batch_size):
            yield batch, self._scores_of(batch, view)

    def _forked(self, waiting: dict[Pair, None], view: CacheView) -> Iterator[tuple[list[Pair], list[tuple[float, bool]]]]:
        """The scores of pairs whose contexts have more continuations than a batch has rows. These pairs are removed from `waiting`, so that
        `_batched`, which comes next, has the others."""
        if view.view == UPPER_PLANE or view.one_by_one or view.cache.guesses:  # what is read there is not what states read
            return
        sharing = defaultdict(list)
        for context, continuation in waiting:
            sharing[context].append(continuation)
        config = dataclasses.replace(self.config, draft=NONE)
        for context in sorted(sharing, key=len, reverse=True):
            pairs = [(context, continuation) for continuation in sharing[context]]
            longest = max(map(len, sharing[context]))
            if len(pairs) <= self.batch_size or len(context) + longest > self.model.config.max_length - 1:
                continue
            state = prefill(self.model, context, config=config, room=_room_of(longest))
            for pair in pairs:
                del waiting[pair]
            for first in range(0, len(pairs), FORKED):
                batch = pairs[first : first + FORKED]
                scores = score_forks(state, [continuation for _, continuation in batch], batch_size=self.batch_size)
                yield batch, [(math.fsum(each.logprobs), each.greedy) for each in scores]

    def _bar(self, description: str, total: int, quiet: bool) -> tqdm:
        return progress_bar(total=total, desc=description, progress=False if quiet else self.progress)

    def _scores_of(self, batch: Sequence[Pair], view: CacheView) -> list[tuple[float, bool]]:
        contexts = list(dict.fromkeys(context for context, _ in batch))
        longest = max(len(tokens) for _, tokens in batch)
        # Rows, contexts and room have few sizes, so that few programs are compiled; rows that fill the batch up score one token.
        settings = dict(room=_room_of(longest))
        rows = [*batch, *[(contexts[0], batch[0][1][:1])] * (self.batch_size - len(batch))]
        if len(contexts) < len(rows):
            settings["prompt_of"] = [contexts.index(context) for context, _ in rows]
            contexts += contexts[:1] * (min(self.batch_size, 1 << (len(contexts) - 1).bit_length()) - len(contexts))
        scores = score(self.model, contexts, [tokens for _, tokens in rows], [view], **settings)
        return [
            (math.fsum(scores.logprobs[0, i, : len(tokens)].tolist()), bool(scores.is_top[0, i, : len(tokens)].all()))
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
            for result in awaited(run, "prompt", len(asked)):
                texts[result.index] = result.text
                self.cache_hook.add_partial("generate_until", requests[result.index].args, result.text)
                bar.update()
        return [texts[i] for i in range(len(asked))]

    def _request(self, index: int, context: str, settings: dict) -> Request:
        """The request of a task, with the settings that lm_eval's `hf` would decode it with, see `_sampling`."""
        until = _as_list(settings.get("until"))
        try:
            wanted = dict(normalize_gen_kwargs(settings | {"until": until, "do_sample": False, "temperature": 0.0}, self.max_gen_toks))
        except (TypeError, ValueError) as error:
            raise InputError(f"generation_kwargs {settings}: max_gen_toks should be a whole number ({one_line(error)})") from None
        sampling, new = self._sampling(settings), wanted.pop("max_gen_toks")
        for name in ("until", "do_sample", *SAMPLING):
            wanted.pop(name, None)
        if wanted:
            warn_once(log, f"these generation settings are ignored: {', '.join(sorted(wanted))}")
        if new >= self.max_length:
            raise InputError(f"max_gen_toks {new} should be less than max_length, {self.max_length}")
        # No text has special tokens, so a string with one and other text ends the row by its tokens. A special token alone and the
        # tokenizer's EOS end a row in every request, see `with_tokenizer`.
        mixed = [text for text in until if text not in self._special and any(name in text for name in self._special)]
        config = dataclasses.replace(
            self.config,
            max_new_tokens=new,
            stop=tuple(text for text in until if text not in mixed),
            stop_token_ids=tuple(tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in mixed),
            **sampling,
        )
        tokens = self._cut(self.tok_encode(context), self.max_length - new) or [self.prefix_token_id]
        return Request(tokens, config, jax.random.fold_in(key_of(self.seed), index))

    def _sampling(self, settings: Mapping[str, Any]) -> dict[str, float | int]:
        """The sampling settings of a task, as fields of `GenerationConfig`.

        do_sample and temperature are read as lm_eval 0.4.13's `hf` reads them: a temperature above 0 samples unless do_sample is false,
        and without a temperature decoding is greedy unless do_sample is true. The rest is as in `generate` of transformers: the task's own
        settings, then those of generation_config.json, then transformers' defaults, with a top_k of 50. If a task says `do_sample: true`
        alone, `hf` passes a temperature of 0, which `generate` refuses; here the temperature is the checkpoint's, or 1.
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
    """The pairs in batches of at most `rows`: the longest first, and those that share a context together."""
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


def _room_of(longest: int) -> int:
    """Tokens that there is room for after a context: few different numbers, so that few programs are compiled."""
    return WIDTH << math.ceil(math.log2(max(1, longest / WIDTH)))


def _as_list(until: Any) -> list[str]:
    """The stop strings of a task without empty ones. Raises InputError for anything but strings."""
    found = [until] if isinstance(until, str) else until or []
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) for text in found):
        raise InputError(f"until {until!r} should be a string or a list of strings")
    return list(filter(None, found))


def _nothing_to_score(context: str, continuation: str) -> InputError:
    end = f"{'...' if len(context) > 40 else ''}{context[-40:]}"
    return InputError(
        f"the continuation {continuation!r} after {end!r} has no token of its own to score; every choice and target needs some text"
    )


def _commit() -> str | None:
    """The commit of the repository that this runs in; None without one. (lm_eval's own function lets git print its error.)"""
    with contextlib.suppress(OSError):
        found = subprocess.run(["git", "describe", "--always"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return found.stdout.strip() or None
    return None


def without_git_errors() -> contextlib.AbstractContextManager:
    """A context in which lm_eval asks git for the commit without printing git's errors."""
    return unittest.mock.patch.object(evaluator, "get_git_commit_hash", _commit)


def main() -> None:
    """The command line of lm_eval, which knows `--model qspec` once this module is imported."""
    from lm_eval.__main__ import cli_evaluate

    os.environ |= WITHOUT_FORKS
    try:
        with without_git_errors():
            cli_evaluate()
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
