"""A program against the public names, as people write them: pyright finds nothing wrong with it (test_types.py). It is never run."""

import dataclasses
from pathlib import Path
from typing import assert_type

import jax

from qspec_jax import CacheConfig, Generation, GenerationConfig, InputError, Request, Stream, generate, load, make_draft, run_batch, stream
from qspec_jax.caches.cache import Cache
from qspec_jax.decoding.batch import BatchRun
from qspec_jax.decoding.results import Result
from qspec_jax.drafts.draft import Draft, Proposal, Round, State


def continued(directory: Path) -> str:
    try:
        model, tokenizer = load(directory, dtype="bfloat16")
    except InputError as error:
        return str(error)
    config = GenerationConfig(max_new_tokens=8, draft="sparse:budget=0.03", temperature=0.8, cache=CacheConfig().kind)
    out = generate(model, ["import os"], config=config, key=jax.random.key(0), tokenizer=tokenizer)
    assert_type(out, Generation)
    assert_type(out.token_ids, list[list[int]])
    pieces = stream(model, "import os", config=config, tokenizer=tokenizer)
    assert_type(pieces, Stream)
    texts = [piece.text for piece in pieces]
    assert_type(texts, list[str])
    draft = make_draft("quantspec", model)
    assert_type(draft, Draft | None)
    assert draft is not None
    run = run_batch(model, [Request([1, 2], GenerationConfig(draft=draft), jax.random.key(0))], batch_size=8, tokenizer=tokenizer)
    assert_type(run, BatchRun)
    results = {result.index: result for result in run}
    assert_type(results, dict[int, Result])
    return (out.text or [""])[0] + f"{out.stats.tokens_per_second:.1f}" + "".join(texts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MyDraft(Draft):
    """A draft of one's own."""

    def propose(self, state: State, cache: Cache, current: Round) -> tuple[Proposal, State, Cache]:
        tokens = current.pending[:, None]
        return Proposal(tokens, current.certain(tokens, 64), current.eligible), state, cache
