"""From prompts to text: `generate` for a batch of prompts of any lengths, and `stream` for one prompt in pieces."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Key

from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.fixed_batch import Run
from qspec_jax.decoding.prepare import Prepared, prepare
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.results import Generation
from qspec_jax.decoding.sampling import Sampler
from qspec_jax.decoding.state import UNLIMITED
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.sharding import mesh_of
from qspec_jax.states.state import State


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a stream.

    Attributes:
        token_ids: new tokens.
        text: the text that is certain by now.
        drafted: the number of draft tokens; those after a stop string count, though they are cut off.
        accepted: the number of accepted draft tokens.
        flushes: groups that left the buffer.
    """

    token_ids: list[int]
    text: str
    drafted: int
    accepted: int
    flushes: int


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | State


def generate(
    model: Llama,
    prompts: Prompt | Sequence[Prompt] | Prepared,
    *,
    config: GenerationConfig | None = None,
    key: Key[Array, ""] | None = None,
    tokenizer: Any = None,
    sampler: Sampler | None = None,
    on_tokens: Callable[[list[list[int]]], None] | None = None,
    rounds_per_update: int = 1,
    trace: bool = False,
) -> Generation:
    """Continues prompts; they are one batch, of any lengths.

    The output is exactly that of the target with the config's cache (in exact arithmetic): greedy, its very tokens; sampled, its
    distribution.

    Args:
        model: the target.
        prompts: texts, conversations for the chat template, which are lists of messages (both need a tokenizer), or lists of token ids; a
            single text or list of token ids; states, which are continued and stay as they are; or what `prepare` returned for this model,
            which has config, key and tokenizer.
        config: what to generate and how, with the draft; None: the defaults. For many calls, make the draft once:
            `GenerationConfig(draft=make_draft("quantspec", model))`.
        key: `jax.random.key(seed)`, from which all draws come; needed where there are any, and of any generator of JAX (see
            `qspec_jax.decoding.keys`).
        tokenizer: for texts, conversations and stop strings; ids that it does not have are then not generated.
        sampler: chooses tokens instead of the config's temperature and filters: a `qspec_jax.decoding.sampling.Sampler`.
        on_tokens: called with the new tokens of each prompt after prefill and after every `rounds_per_update` rounds; after every round
            if there are stop strings.
        rounds_per_update: see on_tokens.
        trace: whether to record each round (`Generation.trace`). Rounds then run one at a time, in a program for each phase, which takes
            longer; the tokens are the same, but for rounding.

    Returns:
        What was generated for each prompt, with one entry for a single prompt.

    Raises:
        InputError: for an empty prompt, a token id outside the vocabulary, prompts that are too long, stop strings without a tokenizer,
            draws without a key, a draft that was made for another model, and a trace of a model that is divided over devices.
    """
    _check_sampler(sampler, key, prompts)
    if trace:
        check_traceable(model)
    rounds = rounds_per_update if on_tokens else UNLIMITED
    run = Run(_prepared(model, prompts, config, key, tokenizer), sampler, rounds, traced=trace)
    for update in run.updates():
        if on_tokens:
            on_tokens([new for new, _ in update])
    return run.generation()


def check_traceable(model: Llama) -> None:
    """Raises InputError for a model whose rounds cannot be traced: one that is divided over devices."""
    if mesh_of(model) is not None:
        raise InputError("a trace is of a model on one device, and this model is divided over several; leave trace out, or the devices")


def _prepared(model: Llama, prompts: Any, config: GenerationConfig | None, key: Key[Array, ""] | None, tokenizer: Any) -> Prepared:
    if isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], Request):
        raise InputError("a Request has settings and a key of its own: give requests to run_batch, or to prepare and what it returns here")
    if not isinstance(prompts, Prepared):
        return prepare(model, prompts, config=config or GenerationConfig(), key=key, tokenizer=tokenizer)
    if given := [name for name, value in dict(config=config, key=key, tokenizer=tokenizer).items() if value is not None]:
        raise InputError(f"{given[0]} should be given to `prepare`, since these prompts are prepared already")
    if prompts.model is not model:
        raise InputError("the prompts were prepared for another model")
    return prompts


def _check_sampler(sampler: Sampler | None, key: Key[Array, ""] | None, prompts: Any) -> None:
    if not (sampler is None or hasattr(sampler, "verify")):
        raise InputError(f"sampler should have the methods of qspec_jax.decoding.sampling.Sampler, and {sampler!r:.60} has not")
    if sampler is not None and not (prompts.keyed if isinstance(prompts, Prepared) else key is not None):
        raise InputError("a sampler of your own draws, so key should be given, such as jax.random.key(0)")


class Stream:
    """The continuation of one prompt while it is generated: iterate over its pieces. After the last one, `generation` has the result."""

    def __init__(self, run: Run):
        self.generation: Generation | None = None
        self._pieces = self._run(run)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends it early. Nothing runs between two pieces; what it holds on the device is freed."""
        self._pieces.close()

    def _run(self, run: Run) -> Iterator[Piece]:
        before = np.zeros(3, int)
        for new in run.updates():
            now = np.array([count[0] for count in (run.counts.drafted, run.counts.accepted, run.counts.flushes)])
            yield Piece(*new[0], *(now - before).tolist())
            before = now
        self.generation = run.generation()


def stream(
    model: Llama,
    prompt: Prompt | Prepared,
    *,
    config: GenerationConfig | None = None,
    key: Key[Array, ""] | None = None,
    tokenizer: Any = None,
    sampler: Sampler | None = None,
    rounds_per_update: int = 1,
) -> Stream:
    """Continues one prompt, as `generate` does, in pieces: one after prefill, and one after every `rounds_per_update` rounds; after every
    round if there are stop strings.

    The texts of the pieces never split a character, hold no part of a stop string, and are together the whole text; "" without a tokenizer.
    """
    _check_sampler(sampler, key, prompt)
    prepared = _prepared(model, prompt if isinstance(prompt, Prepared) else [prompt], config, key, tokenizer)
    if len(prepared.requests) > 1:
        raise InputError(f"stream continues one prompt, and {len(prepared.requests)} are prepared")
    return Stream(Run(prepared, sampler, rounds_per_update, follow=True))
