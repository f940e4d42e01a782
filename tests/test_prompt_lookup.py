"""Drafts without a model, and of two drafts: what is looked up, and whose proposal a row uses. Exactness: test_exactness.py as well."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markov import DRAFTS, ROWS, TABLE, Markov, MarkovDraft, V, counted, filtered, p_value
from runs import prepared, random_model, random_prompts
from tiers import in_system

from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.round import current_round, decode
from qspec_jax.decoding.sampling import make_sampler
from qspec_jax.drafts import combine
from qspec_jax.drafts.combine import CombinedDraft
from qspec_jax.drafts.draft import Draft, Proposal
from qspec_jax.drafts.history import History
from qspec_jax.drafts.prompt_lookup import PromptLookupDraft, look_up
from qspec_jax.drafts.registry import parse_draft

SAMPLERS = [{"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.8}]
CONFIG = GenerationConfig(draft="quantspec", max_new_tokens=24, group_size=4, ignore_eos=True)


# What is looked up -------------------------------------------------------------------------------------------------------


def looked_up(text, longest, shortest):
    """The token behind the most recent place, by loops; None where there is no such place."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        places = [i for i in range(len(text) - n) if text[i : i + n] == text[-n:]]
        if places:
            return text[places[-1] + n]


@pytest.mark.parametrize(
    ("text", "longest", "shortest", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 3, 1, [4, 9, 1, 2]),  # the most recent of two
        ([7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2], 3, 1, [3, 9, 1, 2]),  # the longest, though it is older
        ([7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2], 2, 1, [4, 7, 1, 2]),
        ([5, 6, 5, 6], 3, 1, [5, 6, 5, 6]),  # goes on in itself
        ([5, 6, 5], 3, 2, None),
        *in_system(([5, 5], 3, 1, [5, 5, 5, 5]), ([1, 2, 3], 3, 1, None), ([1], 3, 1, None)),
    ],
)
def test_the_most_recent_place_of_the_longest_ngram(text, longest, shortest, expected):
    for rows in (len(text), len(text) + 5):  # what lies behind the text is not read
        padded = jnp.array([text + text[-1:] * (rows - len(text))])
        tokens, found = look_up(padded, jnp.array([len(text)]), 4, longest=longest, shortest=shortest)
        assert (tokens[0].tolist() if found[0] else None) == expected


@pytest.mark.parametrize(("longest", "shortest"), [(1, 1), (3, 1), (3, 2), (40, 4)])
def test_looked_up_is_what_loops_find(longest, shortest):
    """Texts of two or three tokens, in which much is repeated; the first token, for a second look-up may find a longer n-gram elsewhere."""
    rng, rows = np.random.default_rng(0), 200
    lengths = rng.integers(1, 24, rows)
    texts = [rng.integers(0, 2 + i % 2, n).tolist() for i, n in enumerate(lengths)]
    padded = jnp.array([text + [0] * (24 - len(text)) for text in texts])
    tokens, found = jax.jit(look_up, static_argnums=2, static_argnames=("longest", "shortest"))(
        padded, jnp.asarray(lengths), 1, longest=longest, shortest=shortest
    )
    expected = [looked_up(text, longest, shortest) for text in texts]
    assert [int(token) if there else None for token, there in zip(tokens[:, 0], found)] == expected
    assert 10 < sum(token is not None for token in expected) < rows


# Sampling ----------------------------------------------------------------------------------------------------------------

PROMPT = [0, 3, 1, 0, 2, 5, 4, 0, 1, 1, 0, 5, 2, 3]  # whatever comes next has been there, but not always what follows it


def history() -> History:
    """Rows with this prompt, before the pending token 0 of `counted`."""
    tokens = jnp.array([PROMPT + [0] * 8], jnp.int32)
    return History(jnp.repeat(tokens, ROWS, 0), jnp.full(ROWS, len(PROMPT), jnp.int32))


def lookup(longest=3, shortest=1) -> PromptLookupDraft:
    return PromptLookupDraft(V, longest, shortest)


def drawn(table: str) -> MarkovDraft:
    return MarkovDraft(Markov(jnp.asarray(DRAFTS[table])))


COMBINED = {
    "prompt lookup": lambda: (lookup(), history()),
    # Where two tokens stand as they did before, the first; otherwise the second.
    "a lookup of two tokens, or draws": lambda: (CombinedDraft(lookup(2, 2), drawn("another table")), (history(), ())),
    "draws within draws": lambda: (
        CombinedDraft(CombinedDraft(lookup(3, 3), lookup(2, 2)), drawn("zero where the target is likely")),
        ((history(), history()), ()),
    ),
}


@pytest.mark.parametrize(
    ("kind", "confidence", "options"),
    [
        # Each kind with some samplers, and each sampler with some kind; all of the one in the middle are among the longer tests.
        ("a lookup of two tokens, or draws", 0.0, SAMPLERS[1]),
        *in_system(
            ("a lookup of two tokens, or draws", 0.4, SAMPLERS[2]),
            ("prompt lookup", 0.0, SAMPLERS[0]),
            ("draws within draws", 0.0, SAMPLERS[3]),
            *(("a lookup of two tokens, or draws", 0.0, SAMPLERS[i]) for i in (0, 2, 3)),
            ("a lookup of two tokens, or draws", 0.4, SAMPLERS[1]),
            ("prompt lookup", 0.0, SAMPLERS[3]),
            ("draws within draws", 0.0, SAMPLERS[2]),
        ),
    ],
    ids=str,
)
def test_three_tokens_have_the_targets_distribution(kind, options, confidence):
    draft, state = COMBINED[kind]()
    p, settings = filtered(TABLE, **options), GenerationConfig(ignore_eos=True, min_draft_confidence=confidence, **options)
    counts = counted(TABLE, draft, make_sampler(settings), gamma=4, length=3, settings=settings, draft_state=state)
    assert p_value(counts, p[0][:, None, None] * p[:, :, None] * p) > 1e-3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fickle(MarkovDraft):
    """Draws, and gives up behind its first draft where that is one of the lower tokens: allowed, for the first one stays whatever it is.

    Whoever takes it for the shorter proposal then would use it with higher first tokens alone.
    """

    def propose(self, state, cache, current):
        proposal, state, cache = super().propose(state, cache, current)
        some = jnp.where(proposal.tokens[:, 0] < V // 2, 1, current.eligible)
        return dataclasses.replace(proposal, eligible=jnp.minimum(proposal.eligible, some)), state, cache


PAIRS = {
    # A model that is sure enough behind some of its first tokens only, against tokens that are given.
    "confidence": lambda: (drawn("another table"), lookup(1, 1), 0.4),
    "fickle": lambda: (Fickle(Markov(jnp.asarray(DRAFTS["uniform"]))), lookup(1, 1), 0.0),
    "two that draw": lambda: (Fickle(Markov(jnp.asarray(DRAFTS["uniform"]))), drawn("another table"), 0.0),
}


@pytest.mark.parametrize(
    ("pair", "planted"),
    [
        *(("fickle", planted) for planted in (False, True)),
        *in_system(*((pair, planted) for pair in PAIRS if pair != "fickle" for planted in (False, True))),
    ],
)
def test_no_choice_depends_on_a_token_that_was_drawn(pair, planted, monkeypatch):
    """Planted: the longer proposal by how long it came to be."""
    if planted:
        monkeypatch.setattr(combine, "_foreseen", lambda proposal, eligible: proposal.eligible)
    first, second, confidence = PAIRS[pair]()
    settings = GenerationConfig(ignore_eos=True, temperature=1.0, min_draft_confidence=confidence)
    loop = jax.jit(lambda *args: decode(*args))  # of its own, since jit remembers what it has traced
    state = tuple(history() if isinstance(draft, PromptLookupDraft) else () for draft in (first, second))
    draft, p = CombinedDraft(first, second), filtered(TABLE)
    counts = counted(TABLE, draft, make_sampler(settings), length=3, settings=settings, loop=loop, draft_state=state)
    chance = p_value(counts, p[0][:, None, None] * p[:, :, None] * p)
    assert chance < 1e-6 if planted else chance > 1e-3


# Two drafts as one -------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Saying(Draft):
    """Proposes one token, as many as some rows have foreseen; asks for what it is told to ask for, and remembers what it got."""

    token: int = dataclasses.field(metadata={"static": True})
    foreseen: tuple[int, ...] | None = dataclasses.field(metadata={"static": True}, default=None)
    prompt_queries: int = dataclasses.field(metadata={"static": True}, default=0)
    extra_rows: int = dataclasses.field(metadata={"static": True}, default=0)
    observes: bool = dataclasses.field(metadata={"static": True}, default=False)
    max_length: int | None = dataclasses.field(metadata={"static": True}, default=None)

    def begin(self, prompt):
        return prompt.queries, jnp.full_like(prompt.n, -1)

    def propose(self, state, cache, current):
        tokens = jnp.full((len(current.pending), current.gamma), self.token, jnp.int32)
        foreseen = None if self.foreseen is None else jnp.array(self.foreseen, jnp.int32)
        eligible = current.eligible if foreseen is None else jnp.minimum(current.eligible, foreseen)
        return Proposal(tokens, current.certain(tokens, 64), eligible, foreseen), (state[0], current.eligible), cache


def test_the_longer_proposal_of_each_row_and_the_first_of_equals(float64):
    model = random_model(jnp.float64, num_hidden_layers=1)
    first, second = Saying(1, (0, 2, 3, 4)), Saying(2, (1, 3, 3, 9))
    for a, b, tokens, eligible, asked in (
        (first, second, [2, 2, 1, 1], [1, 3, 3, 4], [4, 4, 4, 0]),
        (second, first, [2, 2, 2, 2], [1, 3, 3, 4], [4, 4, 4, 0]),
        (first, Saying(2), [2, 2, 2, 1], [4, 4, 4, 4], [4, 4, 4, 0]),
        (Saying(2), first, [2, 2, 2, 2], [4, 4, 4, 4], [0, 0, 0, 0]),
    ):
        draft = CombinedDraft(a, b)
        state, _, limits = prepared(model, random_prompts([8] * 4), CONFIG, draft=draft)
        current = dataclasses.replace(current_round(make_sampler(CONFIG), state, limits), eligible=jnp.full(4, 4))
        proposal, (_, (_, seen)), _ = draft.propose(state.draft, state.cache, current)
        assert proposal.tokens[:, 0].tolist() == tokens and proposal.eligible.tolist() == eligible
        assert seen.tolist() == asked  # the second is not asked where the first has all


def test_two_drafts_get_what_each_asks_for(float64):
    model = random_model(jnp.float64, num_hidden_layers=1)
    draft = CombinedDraft(Saying(1, prompt_queries=2, extra_rows=3, max_length=99), Saying(2, prompt_queries=5, observes=True))
    assert (draft.prompt_queries, draft.extra_rows, draft.observes, draft.max_length) == (5, 3, True, 99)
    assert CombinedDraft(Saying(1), Saying(2)).max_length is None
    queries = []
    for each in (draft, CombinedDraft(Saying(1), draft), Saying(1, prompt_queries=5)):
        state, _, _ = prepared(model, random_prompts([9]), CONFIG, draft=each)
        queries.append([q for q in jax.tree.leaves(state.draft) if q.ndim == 4])
    few, many = queries[0]
    np.testing.assert_array_equal(many, queries[2][0])
    np.testing.assert_array_equal(few, many[:, 3:])
    jax.tree.map(np.testing.assert_array_equal, queries[1], queries[0])


def test_int4_weights_are_made_once(float64):
    model, made = random_model(jnp.float64, num_hidden_layers=1), []

    def int4():
        made.append(model)
        return model

    draft = parse_draft("combine:(combine:prompt-lookup+sparse)+quantspec").make(model, int4)
    assert draft.observes and draft.first.second.step.model is draft.second.step.model is model and len(made) == 1


def test_a_text_that_repeats_itself_is_looked_up(float64):
    """A model's own loop: what it emits again and again is proposed in full."""
    model = random_model(jnp.float64, num_hidden_layers=1)
    config = dataclasses.replace(CONFIG, max_new_tokens=64)
    prompts = random_prompts([30, 9])
    out = generate(model, prompts, config=dataclasses.replace(config, draft="prompt-lookup:longest=2"))
    assert out.token_ids == generate(model, prompts, config=dataclasses.replace(config, draft="none", cache="int8")).token_ids
    assert out.stats.num_accepted_draft_tokens > 10
