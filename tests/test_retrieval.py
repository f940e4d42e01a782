"""The retrieval draft: which chunks it copies, and when it chooses anew. Exactness: test_exactness.py, test_sampling.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import prepared, random_model, random_prompts
from tiers import in_system

from qspec_jax.caches.host_memory import in_host
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.draft import RoundResult
from qspec_jax.drafts.retrieval import RECENT

CHUNK, G = 4, 8
CONFIG = GenerationConfig(draft="quantspec", max_new_tokens=24, group_size=G, ignore_eos=True, num_speculative_tokens=3)
LENGTHS = [1, RECENT + CHUNK, 70, 133]


@pytest.fixture(scope="module")
def model(float64):
    return random_model(jnp.float64, num_hidden_layers=1)


def text_of(cache, own, row):
    """For each KV head the positions in the text of what a row's compact cache holds, found by the keys."""
    S, n = cache.capacity, int(own.taken[row])
    keys, _ = cache.tokens(0, jnp.arange(S)[None, None])
    found = []
    for held, all in zip(np.asarray(own.layers[0].keys[row, :, :n]), np.asarray(keys[row])):
        same = (held[:, None] == all[None, : int(cache.lengths.total[row])]).all(-1)
        assert (same.sum(1) == 1).all()
        found.append(same.argmax(1).tolist())
    return found


def by_hand(queries, cache, row, budget):
    """The same positions by the definition: the best chunks by the softmax over mean keys, then all from the last one's end on."""
    n = int(cache.lengths.total[row])
    keys = np.asarray(cache.tokens(0, jnp.arange(cache.capacity)[None, None])[0][row])
    whole = max(n - RECENT, 0) // CHUNK
    count, found = min(whole, (budget - RECENT - CHUNK) // CHUNK), []
    rows = np.asarray(queries[0][row]).reshape(len(keys), -1, keys.shape[2])
    for q, k in zip(rows, keys):
        means = k[: whole * CHUNK].reshape(whole, CHUNK, k.shape[1]).mean(1)
        logits = q @ means.T / np.sqrt(k.shape[1])
        weights = np.exp(logits - logits.max(-1, keepdims=True, initial=-np.inf)) if whole else logits
        score = (weights / weights.sum(-1, keepdims=True)).sum(0)
        best = sorted([0, *(1 + np.argsort(-score[1:], kind="stable")[: max(0, count - 1)])][:count])
        found.append([chunk * CHUNK + i for chunk in best for i in range(CHUNK)] + list(range(whole * CHUNK, n)))
    return found


@pytest.mark.parametrize(
    ("budget", "cache"),
    [*((RECENT + 4 * CHUNK, "int8"), (0.6, "full")), *in_system((RECENT + 4 * CHUNK, "full"), (0.6, "int8"))],
)
def test_the_best_chunks_and_recent_tokens_are_copied(model, cache, budget):
    draft = make_draft(f"retrieval:budget={budget},chunk={CHUNK}", model)
    state, *_ = prepared(model, random_prompts(LENGTHS), dataclasses.replace(CONFIG, cache=cache), draft=draft)
    own, held = state.draft.own, []
    for row, n in enumerate(LENGTHS):
        asked = budget if budget > 1 else max(64, int(np.ceil(budget * n)))
        held.append(int(own.taken[row]))
        assert text_of(state.cache, own, row) == by_hand(state.draft.queries, state.cache, row, asked)
        assert held[-1] == n or asked - CHUNK - CHUNK < held[-1] <= asked
    assert held[-1] < LENGTHS[-1]


def test_a_budget_beyond_the_room_copies_everything(model):
    state, *_ = prepared(model, random_prompts(LENGTHS), CONFIG, draft=make_draft("retrieval", model))
    assert state.draft.own.taken.tolist() == LENGTHS
    assert state.draft.own.layers[0].keys.shape[2] < 400  # and has no more room than there are tokens


@pytest.mark.system
@pytest.mark.parametrize(("settings", "accepted", "anew"), [("rebuild=6", 2, [2, 4]), ("rebuild=0,least_accepted=0.7", 0, [2, 4])])
def test_the_choice_is_made_anew(model, settings, accepted, anew):
    """Two rounds later, by the number of tokens or for want of accepted drafts; only in rows that go on, with the queries of that time."""
    draft = make_draft(f"retrieval:budget=60,chunk={CHUNK},{settings}", model)
    state, *_ = prepared(model, random_prompts(LENGTHS), CONFIG, draft=draft)
    cache, own, before = state.cache, state.draft, int(state.draft.own.taken[3])
    goes_on = jnp.array([1, 1, 0, 1], jnp.int32)
    for number in range(1, 5):
        queries = tuple(jax.random.normal(jax.random.key(number), q.shape, q.dtype) for q in own.queries)
        count = goes_on * (accepted + 1)
        cache = cache.rollback(dataclasses.replace(cache.lengths, buffered=cache.lengths.buffered + count)).flush()[0]
        result = RoundResult(jnp.zeros((4, 4), jnp.int32), count, goes_on * 3, goes_on * accepted, 0 * count)
        last, own = own, draft.commit(dataclasses.replace(own, queries=queries), result, cache)
        for row in (1, 3):
            if number in anew:
                assert text_of(cache, own.own, row) == by_hand(queries, cache, row, 60) and own.since[row] == 0
            else:
                assert own.own.taken[row] == last.own.taken[row] + accepted + 1
        np.testing.assert_array_equal(own.own.layers[0].keys[2], state.draft.own.layers[0].keys[2])
        assert own.since[2] == 0 and own.own.taken[2] == state.draft.own.taken[2]
    assert before < LENGTHS[3]


def test_acceptance_is_of_what_a_row_drafted(model):
    """Not of what any row of its batch may draft, on which its choices would then depend; a round without drafts says nothing of it."""
    draft = make_draft("retrieval:budget=60,rebuild=0,least_accepted=0.7", model)
    state, *_ = prepared(model, random_prompts(LENGTHS), CONFIG, draft=draft)
    drafted, accepted = jnp.array([3, 2, 0, 2], jnp.int32), jnp.array([3, 2, 0, 1], jnp.int32)
    cache = state.cache.rollback(dataclasses.replace(state.cache.lengths, buffered=state.cache.lengths.buffered + accepted + 1))
    for gamma in (3, 6):
        result = RoundResult(jnp.zeros((4, gamma + 1), jnp.int32), accepted + 1, drafted, accepted, 0 * drafted)
        np.testing.assert_allclose(draft.commit(state.draft, result, cache).accepted, [1, 1, 1, 0.9], rtol=1e-6)


@pytest.mark.parametrize(("settings", "since"), [("generated=5,rebuild=9", 5), ("generated=9,rebuild=5", 5), ("generated=7,rebuild=0", 7)])
def test_a_step_reads_no_more_than_what_can_have_come_since_the_choice(model, settings, since):
    found = make_draft(f"retrieval:budget=60,{settings}", model).held(200)
    assert found.full == 60 + 1 + since  # with the token that it appends


def test_a_new_choice_is_put_in_its_place_layer_by_layer():
    """The next layer's copy waits for the cache that the one before was put into: or copies of all layers would wait for the last."""
    model = random_model(jnp.float32, num_hidden_layers=3)
    draft = make_draft(f"retrieval:budget={RECENT + 4 * CHUNK},chunk={CHUNK},rebuild=1", model)
    state, *_ = prepared(model, random_prompts([70]), dataclasses.replace(CONFIG, cache="full:host=all,resident=0"), draft=draft)
    one = jnp.ones(1, jnp.int32)
    result = RoundResult(jnp.ones((1, 4), jnp.int32), one, one, one, 0 * one)
    jaxpr = jax.make_jaxpr(lambda own, cache: draft.commit(own, result, cache))(state.draft, state.cache)
    (loop,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "while"]
    waits = [e for e in loop.params["body_jaxpr"].eqns if e.primitive.name == "optimization_barrier" and in_host(e.invars[0].aval)]
    whole = state.draft.own.layers[0].keys.shape
    assert [sum(x.aval.shape == whole for x in wait.invars) for wait in waits] == [0, 2, 4]


def test_retrieval_chooses_by_judged_drafts_alone():
    """Rounds that differ in nothing but how many drafts came after the first rejected one leave the same state."""
    model, gamma = random_model(jnp.float32, num_hidden_layers=1), 7
    draft = make_draft("retrieval:budget=44,chunk=2,rebuild=0,least_accepted=0.9,generated=1", model)
    config = GenerationConfig(group_size=16, max_new_tokens=9, num_speculative_tokens=gamma)
    state, *_ = prepared(model, [list(range(60))], config, draft=draft)
    one, commit = jnp.ones(1, jnp.int32), jax.jit(draft.commit)  # or each operation would be compiled by itself
    for accepted in (0, 4):
        result = lambda drafted, a=accepted: RoundResult(jnp.zeros((1, gamma + 1), int), (a + 1) * one, drafted * one, a * one, 0 * one)
        states = [commit(state.draft, result(drafted), state.cache) for drafted in (accepted + 1, accepted + 2, gamma)]
        assert all(jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), states[0], other)) for other in states[1:])
