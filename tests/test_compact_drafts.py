"""Drafts over a compact cache of their own, streaming-llm and snapkv: what they read, against the model and plain numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import prepared, random_model, random_prompts, run_rounds, with_draft
from tiers import in_system

from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.drafts import make_draft
from qspec_jax.errors import InputError

G = 8
CONFIG = GenerationConfig(draft="quantspec", max_new_tokens=4 * G + 4, group_size=G, ignore_eos=True, cache="full")
EVERYTHING = ["streaming-llm:budget=128", "streaming-llm:budget=128,sinks=3,positions=kept", "snapkv:budget=128"]


@pytest.fixture(scope="module", autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def shallow():
    """A model of one layer: what is cached of a token depends on that token alone."""
    return random_model(jnp.float64, num_hidden_layers=1)


@pytest.fixture(scope="module")
def model():
    return random_model(jnp.float64)


def accepted(model, draft, **settings) -> float:
    config = dataclasses.replace(CONFIG, **settings)
    return generate(model, random_prompts([1, 5, 19, 43]), config=with_draft(config, draft)).stats.draft_acceptance_rate


@pytest.mark.parametrize("text", [*EVERYTHING[::2], *in_system(EVERYTHING[1])])
def test_a_draft_that_reads_everything_is_always_accepted(model, text):
    """So nothing is missing behind a full acceptance, and nothing is there twice or at another position."""
    assert accepted(model, make_draft(text, model)) == 1.0


def test_what_is_missing_behind_a_full_acceptance_is_seen(model, monkeypatch):
    """Planted: the last draft's keys and values are not taken in, as the draft itself never had them."""
    draft = make_draft(EVERYTHING[0], model)
    commit = type(draft).commit
    lacking = lambda self, state, result, cache: commit(
        self, state, dataclasses.replace(result, accepted=result.accepted - (result.accepted == result.tokens.shape[1] - 1)), cache
    )
    monkeypatch.setattr(type(draft), "commit", lacking)
    assert accepted(model, draft, num_speculative_tokens=3) < 0.9


@pytest.mark.system
@pytest.mark.parametrize(
    ("gamma", "text"),
    [
        (2 * G, EVERYTHING[1]),
        (3, EVERYTHING[2]),
        (3, EVERYTHING[1]),
        (2 * G, EVERYTHING[2]),
    ],
)
def test_what_a_round_left_in_an_int8_cache_is_taken_in(shallow, text, gamma):
    """Also what the flush at the round's end has quantized already, where a short prompt is followed by more than a group."""
    lengths = [3, 2 * G + 1, 43]
    config, draft = dataclasses.replace(CONFIG, cache="int8", num_speculative_tokens=gamma), make_draft(text, shallow)
    state, step, _ = prepared(shallow, random_prompts(lengths), config, draft=draft)
    read = jax.jit(lambda cache: cache.tokens(0, jnp.arange(43 + config.max_new_tokens)[None, None]))
    at_once = 0
    while (np.asarray(state.status) == 0).any():
        before = np.asarray(state.cache.lengths.total)
        state = step(state)
        own, n = draft.cache_of_steps(state.draft, state.cache), np.asarray(state.cache.lengths.total)
        at_once += (np.asarray(state.cache.lengths.quantized) > before).sum()
        np.testing.assert_array_equal(own.taken, n)
        for held, found in zip((own.layers[0].keys, own.layers[0].values), map(np.asarray, read(state.cache))):
            for row in range(len(lengths)):
                error = np.abs(np.asarray(held)[row, :, : n[row]] - found[row, :, : n[row]])
                assert error.max() < 0.03 * np.abs(found[row]).max()
    assert (at_once > 0) == (gamma > G)
    assert (np.asarray(state.counts.flushes) >= 3).all()


def after_rounds(model, prompts, text: str, rounds: int, **settings):
    """The state after some rounds, and all tokens of each row whose keys and values are cached, with the pending one behind them."""
    config = dataclasses.replace(CONFIG, **settings)
    draft = make_draft(text, model)
    state, step, _ = prepared(model, prompts, config, draft=draft)
    for _ in range(rounds):
        state = step(state)
    tokens = [prompt + row[:n].tolist() for prompt, row, n in zip(prompts, np.asarray(state.tokens), state.emitted)]
    return draft, state, tokens


@pytest.mark.system
@pytest.mark.parametrize(
    ("positions", "cache", "rounds"),
    [
        *(("window", "full", 5), ("kept", "int8", 5), ("window", "int8", 0)),
        ("kept", "full", 0),
        ("window", "full", 0),
        ("kept", "int8", 0),
        ("window", "int8", 5),
        ("kept", "full", 5),
    ],
)
def test_streaming_llm_is_a_forward_pass_over_sinks_and_window(shallow, positions, cache, rounds):
    """At the positions 0, 1, 2, ... of the tokens that are left, or at those in the text; some prompts are shorter than the budget."""
    check_streaming_llm(shallow, positions, cache, rounds)


def check_streaming_llm(model, positions, cache, rounds):
    sinks, budget = 3, 20
    text = f"streaming-llm:budget={budget},sinks={sinks},positions={positions},cache={cache}"
    draft, state, tokens = after_rounds(model, random_prompts([2, 9, 20, 70]), text, rounds)
    cached = jnp.array([len(row) - 1 for row in tokens])
    found, _ = jax.jit(draft.step)(state.pending[:, None], cached[:, None], draft.cache_of_steps(state.draft, state.cache))
    for row, whole in enumerate(tokens):
        before = list(range(len(whole) - 1))
        left = before if len(before) <= budget else before[:sinks] + before[sinks - budget :]
        left = np.array([*left, len(whole) - 1])
        at = np.arange(len(left)) if positions == "window" else left
        empty = CacheConfig("full").empty(model.config, batch=1, capacity=len(left), num_speculative_tokens=0, dtype=model.dtype)
        expected, _ = jax.jit(model)(jnp.array([np.array(whole)[left]]), jnp.array([at]), empty)
        np.testing.assert_allclose(found[row, 0], expected[0, -1], atol=1e-4 if cache == "full" else 0.1 * np.std(expected[0, -1]))


def test_sinks_in_8_bits_are_encoded_once():
    """A row's first tokens may come after its prompt, a few in each round; those that are there stay as they are until they move."""
    model = random_model("bfloat16", num_hidden_layers=1)
    config = dataclasses.replace(CONFIG, cache="full", num_speculative_tokens=1, max_new_tokens=20)
    draft = make_draft("streaming-llm:budget=100,sinks=16,cache=int8", model)
    state, step, _ = prepared(model, random_prompts([1, 2, 17]), config, draft=draft)
    first = lambda state: [np.asarray(x[:, :, 0], np.float32) for x in jax.tree.leaves(state.draft.cache.layers[0].keys)]
    before = first(state)
    while (np.asarray(state.status) == 0).any():
        state = step(state)
        jax.tree.map(np.testing.assert_array_equal, first(state), before)
    assert (state.draft.cache.taken > 16).all()


@pytest.mark.system
def test_sinks_move_by_the_angles_of_a_type_that_scales_attention():
    """YaRN multiplies keys by its attention factor, once."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    model = random_model(jnp.float64, num_hidden_layers=1, rope_scaling=yarn)
    assert model.config.rope.attention_factor > 1.1
    check_streaming_llm(model, "window", "full", 2)


def snapkv_tokens(model, prompt: list[int], budget: int, longest: int) -> list[list[int]]:
    """The positions that each KV head keeps in the first layer, in plain numpy. Padded to the longest prompt, so that JAX compiles once."""
    n, config = len(prompt), model.config
    angles = model.angles(jnp.arange(longest)[None], jnp.full((1, longest), n))
    tokens = jnp.array([prompt + [0] * (longest - n)])
    q, k, _ = (np.asarray(x[0])[:n] for x in model.layers[0].before_attention(model.embed(tokens), *model.layers[0].angles_of(angles)))
    kept = []
    for head in range(config.num_kv_heads):
        score = np.zeros(max(n - 32, 0))
        for t in range(max(n - 32, 0), n):
            for query in np.split(q[t], config.num_kv_heads)[head]:
                weights = np.exp(k[: t + 1, head] @ query / np.sqrt(config.head_dim))
                score += (weights / weights.sum())[: len(score)]
        pooled = [sum(score[max(0, i - 2) : i + 3]) / 5 for i in range(len(score))]
        best = sorted(range(len(score)), key=lambda i: -pooled[i])[: max(0, budget - 32)]
        kept.append(sorted(best) + list(range(max(0, n - 32), n)))
    return kept


@pytest.mark.parametrize("chunk", [1024, 48])
def test_snapkv_keeps_what_the_last_queries_attend_to(shallow, chunk, monkeypatch):
    """In a ragged batch: the last queries are each prompt's own, never padding; prompts shorter than 32 and than the budget are whole."""
    monkeypatch.setattr("qspec_jax.drafts.snapkv.CHUNK_TOKENS", chunk)
    prompts, budget = random_prompts([20, 33, 90, 150]), 41
    _, state, _ = after_rounds(shallow, prompts, f"snapkv:budget={budget}", 0, max_new_tokens=20 + (chunk == 48))
    keys, values = np.asarray(state.draft.layers[0].keys), np.asarray(state.draft.layers[0].values)
    assert state.draft.rows.tolist() == [20, 33, 41, 41]
    longest = max(map(len, prompts))
    all_tokens = [np.asarray(x) for x in state.cache.tokens(0, jnp.arange(longest)[None, None])]
    for row, prompt in enumerate(prompts):
        all_keys, all_values = (x[row] for x in all_tokens)
        chosen = snapkv_tokens(shallow, prompt, budget, longest)
        for head, positions in enumerate(chosen):
            np.testing.assert_allclose(keys[row, head, : len(positions)], all_keys[head, positions], atol=1e-12)
            np.testing.assert_allclose(values[row, head, : len(positions)], all_values[head, positions], atol=1e-12)
        assert (chosen[0] != chosen[1]) == (len(prompt) > budget)


def test_of_generated_tokens_the_oldest_leave_snapkv(shallow):
    """The chosen ones of the prompt stay, and of the others the last are there, whatever their order."""
    prompts = random_prompts([20, 90])
    _, before, _ = after_rounds(shallow, prompts, "snapkv:budget=40,generated=7", 0)
    _, state, tokens = after_rounds(shallow, prompts, "snapkv:budget=40,generated=7", 15)
    held, first = (np.asarray(x.draft.layers[0].keys) for x in (state, before))
    for row, kept in enumerate([20, 40]):
        n = len(tokens[row]) - 1
        assert n - len(prompts[row]) > 7 and int(state.draft.rows[row]) == kept + 7
        np.testing.assert_array_equal(held[row, :, :kept], first[row, :, :kept])
        recent, _ = state.cache.tokens(0, jnp.arange(n - 7, n)[None, None])
        by_first = lambda x: x[:, np.argsort(x[0, :, 0])]
        np.testing.assert_allclose(by_first(held[row, :, kept : kept + 7]), by_first(np.asarray(recent)[row]), atol=1e-12)


@pytest.mark.parametrize("text", ["streaming-llm", "snapkv"])
def test_a_share_is_of_each_rows_own_prompt(shallow, text):
    prompts = random_prompts([10, 100, 300, 401])
    config = dataclasses.replace(CONFIG, num_speculative_tokens=2)
    draft = make_draft(f"{text}:budget=0.25", shallow)
    state, _, _ = prepared(shallow, prompts, config, draft=draft)
    own = draft.cache_of_steps(state.draft, state.cache)
    assert own.rows.tolist() == [10, 64, 75, 101]
    # Enough room for the longest, and not for all of the context.
    assert own.layers[0].keys.shape[2] < (401 if text == "streaming-llm" else 401 + 64)


def test_a_row_that_has_ended_does_not_change(model):
    draft = make_draft("streaming-llm:budget=20,sinks=3", model)
    state, step, _ = prepared(model, random_prompts([30, 30, 5]), dataclasses.replace(CONFIG, max_new_tokens=9), draft=draft)
    state = dataclasses.replace(state, status=jnp.array([0, 2, 0], jnp.int32))
    own = lambda state: [np.asarray(x)[1, ..., :20, :] if x.ndim > 1 else np.asarray(x)[1] for x in jax.tree.leaves(state.draft)]
    before = own(state)
    state = step(state)
    jax.tree.map(np.testing.assert_array_equal, own(state), before)
    assert state.draft.cache.taken[0] > 30


@pytest.mark.system
def test_more_of_the_context_is_more_accepted(shallow):
    few, many = (accepted(shallow, make_draft(f"streaming-llm:budget={budget},sinks=2", shallow)) for budget in (6, 30))
    assert few < many < 1  # 1 with all of it: test_a_draft_that_reads_everything_is_always_accepted


def test_a_budget_beyond_the_context_is_refused(model):
    for text in ("streaming-llm:budget=129", "snapkv:budget=129"):
        with pytest.raises(InputError, match="draft budget 129 should be at most 128") as error:
            run_rounds(model, random_prompts([9]), CONFIG, draft=make_draft(text, model))
        assert "\n" not in str(error.value)


def test_what_is_always_kept_is_bounded_too(shallow):
    """By the row where the budget is a share, and by the model; the least tokens of a share are fewer in a short row, and no error."""
    with pytest.raises(InputError, match="always keeps, 200 tokens, should be less than 128"):
        run_rounds(shallow, random_prompts([9]), CONFIG, draft=make_draft("streaming-llm:sinks=200", shallow))
    short = dataclasses.replace(CONFIG, max_new_tokens=3)
    assert run_rounds(shallow, random_prompts([1]), short, draft=make_draft("streaming-llm:sinks=63", shallow)).tokens
    for text in ("streaming-llm:sinks=4096", f"streaming-llm:sinks={10**20 - 1}", "streaming-llm:budget=4097", "snapkv:budget=1e20"):
        with pytest.raises(InputError, match=r"the model's 4096 positions$"):
            make_draft(text, shallow)
