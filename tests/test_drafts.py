"""Drafts with more to them: the sparse draft, a draft of two levels, one that depends on what it observed. All are exact."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markov import DRAFTS, ROWS, TABLE, Markov, MarkovDraft, V, counted, filtered, p_value
from runs import random_model, random_prompts, run_rounds
from two_levels import TwoLevels

from pallas_kernels.attention import decode_attention, reference
from pallas_kernels.formats.kv_cache import dequantize_groups
from pallas_kernels.formats.views import BOTH_PLANES, UPPER_PLANE, ListedGroups
from pallas_kernels.rope_append import split_and_rotate
from qspec_jax import demo, load
from qspec_jax.caches.cache import longer
from qspec_jax.decoding import round as rounds
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.prefill import prefill
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.round import decode
from qspec_jax.decoding.sampling import make_sampler, prompt_keys
from qspec_jax.drafts import make_draft, quantspec
from qspec_jax.drafts.draft import Draft, Prompt, Proposal, propose_by_steps
from qspec_jax.drafts.quantspec import QuantSpecDraft
from qspec_jax.drafts.registry import DRAFTS as REGISTRY
from qspec_jax.drafts.registry import parse_draft
from qspec_jax.drafts.sparse import select_groups
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import padded
from qspec_jax.training import corpus

G = 4
SAMPLERS = [{"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.8}]
SPARSE = "sparse:budget=0.2,least_groups=2"
CONFIG = GenerationConfig(max_new_tokens=24, group_size=G, ignore_eos=True, draft=SPARSE)


@pytest.fixture(scope="module")
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model(float64):
    return random_model(jnp.float64, num_hidden_layers=1)


# A draft of two levels ---------------------------------------------------------------------------------------------------


def two_levels(middle: str, small: str, **settings) -> TwoLevels:
    return TwoLevels(MarkovDraft(Markov(jnp.asarray(DRAFTS[small]))), Markov(jnp.asarray(DRAFTS[middle])), **settings)


@pytest.mark.parametrize("options", SAMPLERS, ids=str)
@pytest.mark.parametrize(("middle", "small"), [("another table", "uniform"), ("the target", "another table"), ("uniform", "the target")])
@pytest.mark.slow
def test_two_levels_have_the_targets_distribution(options, middle, small):
    p = filtered(TABLE, **options)
    counts = counted(TABLE, two_levels(middle, small), make_sampler(GenerationConfig(**options)), gamma=4, length=3)
    assert p_value(counts, p[0][:, None, None] * p[:, :, None] * p) > 1e-3


@pytest.mark.parametrize("fault", ["keys", "distributions"])
def test_what_two_levels_get_wrong_is_seen(fault):
    p = filtered(TABLE)
    counts = counted(TABLE, two_levels("another table", "uniform", fault=fault), make_sampler(GenerationConfig(temperature=1.0)))
    assert p_value(counts, p[0][:, None] * p) < 1e-6


def test_two_levels_are_greedy():
    tokens = [0]
    while len(tokens) < 9:
        tokens.append(int(TABLE[tokens[-1]].argmax()))
    for middle, small in (("another table", "uniform"), ("the target", "the target"), ("uniform", "one-hot wrong")):
        counts = counted(TABLE, two_levels(middle, small), make_sampler(GenerationConfig()), gamma=5, length=4, at=5)
        assert np.argwhere(counts).tolist() == [tokens[5:9]]


# A draft that depends on what it observed --------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observed(Markov):
    """A target whose attention mass gives its query tokens away: query t attends to the group with its token's number."""

    def __call__(self, tokens, positions, cache, *, observe=False):
        out = self.table[tokens], cache.rollback(longer(cache.lengths, tokens.shape[1]))
        return (*out, (jax.nn.one_hot(tokens, V)[:, None],)) if observe else out


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adversary(Draft):
    """Drafts uniformly, but where it observed the second draft of the last round, from that token and the last one alone.

    The noise that drew a rejected token is used again for the next token of its position. Whoever knows which token it drew from all knows
    that it will draw the same from these two, though they look equally likely.
    """

    observes = True

    def begin(self, prompt):
        return jnp.full(prompt.tokens.shape[0], -1)

    def propose(self, state, cache, round):
        def step(tokens, positions, cache):
            two = (jnp.arange(V) == state[:, None]) | (jnp.arange(V) == V - 1)
            table = jnp.where((state[:, None] < 0) | two, 0.0, -1e9)
            return table[:, None], cache.rollback(longer(cache.lengths, 1))

        proposal, cache = propose_by_steps(step, cache, round)
        return proposal, state, cache

    def commit(self, state, result, cache):
        second = result.masses[0][:, 0, 2]
        return jnp.where(second.sum(-1) > 0, second.argmax(-1), -1)


@pytest.mark.parametrize(("options", "masked"), [*((options, True) for options in SAMPLERS), (SAMPLERS[1], False)], ids=str)
@pytest.mark.slow
def test_observations_of_rejected_drafts_are_hidden(options, masked, monkeypatch):
    if not masked:
        monkeypatch.setattr(rounds, "seen_by_accepted", lambda masses, kept: masses)
    loop = jax.jit(lambda *args: decode(*args))  # of its own, since jit remembers what it has traced
    p, sampler = filtered(TABLE, **options), make_sampler(GenerationConfig(**options))
    state = jnp.full(ROWS, -1)
    counts = counted(Observed(jnp.asarray(TABLE)), Adversary(), sampler, length=3, loop=loop, draft_state=state)
    chance = p_value(counts, p[0][:, None, None] * p[:, :, None] * p)
    assert chance > 1e-3 if masked else chance < 1e-6


# The sparse draft --------------------------------------------------------------------------------------------------------


def test_groups_are_chosen_by_mass_and_age():
    mass = jnp.array([[[0.1, 0.0, 0.5, 0.3, 0.2, 0.0, 0.9, 0.0]]])
    pick = lambda groups, **settings: select_groups(mass, jnp.array([groups]), **settings)
    for groups, settings, expected in (
        (7, dict(budget=0.5, newest=0.5, least_groups=2), [0, 2, 5, 6]),  # the sink, the newest two of four, and the most mass
        (7, dict(budget=0.5, newest=0.0, least_groups=2), [0, 2, 3, 6]),  # the newest is always there
        (7, dict(budget=0.5, newest=1.0, least_groups=2), [0, 4, 5, 6]),
        (7, dict(budget=0.01, newest=0.5, least_groups=2), [0, 6]),
        (7, dict(budget=0.01, newest=0.5, least_groups=1), [0]),
        (5, dict(budget=1.0, newest=0.5, least_groups=2), [0, 1, 2, 3, 4]),
        (1, dict(budget=0.5, newest=0.5, least_groups=2), [0]),
        (0, dict(budget=0.5, newest=0.5, least_groups=2), []),
    ):
        found = pick(groups, **settings)
        assert found.groups[0, 0, : int(found.count[0, 0])].tolist() == expected


def test_before_the_first_verification_the_newest_are_read(model):
    """And a mass that is no number takes nobody's place."""
    draft = make_draft("sparse:budget=0.3", model)
    cache = CONFIG.cache_config.empty(model.config, batch=1, capacity=124, num_speculative_tokens=1, dtype=model.dtype)
    (mass,) = draft.begin(Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), cache))
    for found in (mass, mass.at[0, 0, 20].set(jnp.nan)):
        chosen = select_groups(found, jnp.array([30]), budget=0.3, newest=0.5, least_groups=2)
        assert chosen.groups[0, 0, :9].tolist() == [0, *range(22, 30)]


def test_more_drafts_than_a_round_allows_are_not_counted(model):
    """Or the output would silently not be the target's."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Greedy(QuantSpecDraft):
        def propose(self, state, cache, round):
            proposal, state, cache = super().propose(state, cache, round)
            return dataclasses.replace(proposal, eligible=jnp.full_like(proposal.eligible, round.gamma)), state, cache

    honest = quantspec(model, weight_bits=16, cache="int8")
    runs = [run_rounds(model, random_prompts([5, 30]), CONFIG, draft=draft) for draft in (honest, Greedy(honest.step))]
    assert runs[0].tokens == runs[1].tokens
    np.testing.assert_array_equal([state.buffered for state in runs[0].rounds], [state.buffered for state in runs[1].rounds])


def test_an_engine_without_a_draft(model):
    engine = Engine(model, None, cache=CONFIG.cache_config, gamma=4, prompt_tokens=9, max_new_tokens=24)
    state = engine.prefill(random_prompts([9]), make_sampler(CONFIG), prompt_keys(jax.random.key(0), 1), make_limits(model, CONFIG))
    state = engine.rounds(state, make_sampler(CONFIG), make_limits(model, CONFIG))
    target = dataclasses.replace(CONFIG, draft="none", cache="int8")
    assert state.tokens[0, :24].tolist() == run_rounds(model, random_prompts([9]), target).tokens[0]


@pytest.fixture(scope="module")
def trained():
    """The first layers of the embedded model, their cache of a real text, and what comes next of it."""
    whole, tokenizer = load(demo.MODEL, dtype="float32")
    weights = whole.weights()
    model = Llama(dataclasses.replace(whole.config, num_layers=2), lambda path, shape: weights[path])
    tokens = tokenizer(next(iter(corpus.held_out_files())).read_text())["input_ids"][:400]
    config = GenerationConfig(group_size=32).cache_config
    empty = config.empty(model.config, batch=2, capacity=512, num_speculative_tokens=4, dtype=model.dtype)
    rows, n = padded([tokens, tokens[:230]])
    _, cache = jax.jit(prefill)(model, rows, n, empty)
    return model, cache, jnp.array([tokens[:5], tokens[7:12]], jnp.int32)


@pytest.mark.slow
def test_all_groups_listed_are_the_dense_view(trained):
    model, cache, tokens = trained
    positions = cache.lengths.total[:, None] + jnp.arange(5)
    run = jax.jit(lambda view: model(tokens, positions, cache, view=view)[0])
    K, C = cache.layers[0].keys.upper.shape[1:3]
    groups = jnp.broadcast_to(jnp.arange(C), (2, K, C))
    count = jnp.broadcast_to((cache.lengths.quantized // 32)[:, None], (2, K))
    dense = run(UPPER_PLANE)
    np.testing.assert_array_equal(run(ListedGroups(groups, count)), dense)
    assert np.abs(run(ListedGroups(groups, count // 2)) - dense).max() > 1e-3
    np.testing.assert_allclose(run(ListedGroups(count[..., None] - 1 - groups, count)), dense, atol=2e-4)
    for filler in (C, -1000):  # what stands behind the count is not read, whatever it is
        filled = jnp.where(jnp.arange(C) < count[..., None] // 2, groups, filler)
        np.testing.assert_array_equal(run(ListedGroups(filled, count // 2)), run(ListedGroups(groups, count // 2)))


def test_mass_is_that_of_float32_attention(trained):
    """Each group's share for each query token, from a softmax over everything that is written down here."""
    model, cache, tokens = trained
    positions = cache.lengths.total[:, None] + jnp.arange(5)

    class Recording(type(cache)):
        def attend(self, layer, qkv, cos, sin, *, view, observe=False):
            out = super().attend(layer, qkv, cos, sin, view=view, observe=observe)
            seen.append((split_and_rotate(qkv, cos, sin, kv_heads=model.config.num_kv_heads)[0], out[1]))
            return out

    @jax.jit
    def run():
        logits, _, masses = model(tokens, positions, Recording(cache.layers, cache.lengths, cache.scheme), observe=True)
        return logits, masses, seen

    seen = []
    _, masses, seen = run()
    for (q, layer), mass in zip(seen, masses, strict=True):
        K, H = layer.keys.upper.shape[1], q.shape[-1]
        keys, _ = dequantize_groups(layer.keys, layer.values, planes=2, dtype=jnp.float32)
        for row in range(2):
            quantized, buffered = int(cache.lengths.quantized[row]), int(cache.lengths.buffered[row]) + 5
            flat = np.asarray(keys[row]).reshape(K, -1, H)[:, :quantized]
            whole = np.concatenate([flat, np.asarray(layer.buffer.keys[row])[:, :buffered]], 1)
            for t in range(5):
                heads = np.asarray(q[row, t], np.float64).reshape(K, -1, H)
                logits = np.einsum("krh,ksh->krs", heads, whole[:, : quantized + buffered - 4 + t]) * H**-0.5
                weights = np.exp(logits - logits.max(-1, keepdims=True))
                weights /= weights.sum(-1, keepdims=True)
                expected = weights[..., :quantized].reshape(K, -1, quantized // 32, 32).sum((1, 3))
                assert expected.max() > 0.1
                np.testing.assert_allclose(mass[row, :, t, : quantized // 32], expected, atol=2e-5)
                assert (np.asarray(mass[row, :, t, quantized // 32 :]) == 0).all()


def test_observing_changes_nothing(model):
    """Neither in the logits, nor by chunks that are not whole: 13 groups, some at a time."""
    prompts, n = padded(random_prompts([61, 40]))
    empty = CONFIG.cache_config.empty(model.config, batch=2, capacity=64, num_speculative_tokens=4, dtype=model.dtype)
    _, cache = jax.jit(prefill)(model, prompts, n, empty)
    tokens = prompts[:, :3]
    positions = cache.lengths.total[:, None] + jnp.arange(3)
    plain, _ = jax.jit(lambda: model(tokens, positions, cache))()
    observed, _, masses = jax.jit(lambda: model(tokens, positions, cache, observe=True))()
    np.testing.assert_array_equal(plain, observed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "CHUNK_TOKENS", 5 * G)
        *_, chunks = jax.jit(lambda: model(tokens, positions, cache, observe=True))()
    np.testing.assert_allclose(chunks[0], masses[0], atol=1e-7)
    assert masses[0].shape[3] == 15 and (np.asarray(masses[0]).sum(-1) < 2).all() and np.asarray(masses[0]).sum(-1).max() > 0.5


def test_mass_needs_groups(trained):
    _, cache, _ = trained
    layer, q = cache.layers[0], jnp.zeros((2, 1, 4, 32))
    with pytest.raises(ValueError, match="HierarchicalLayer"):
        decode_attention(q, layer.buffer, cache.lengths, type(BOTH_PLANES)(None), observe=True)


@pytest.mark.slow
def test_more_of_the_cache_is_more_accepted(float64):
    """A draft of the target's own weights: with the budget alone it differs from the target's reading, with everything in nothing."""
    model = random_model(jnp.float64, num_hidden_layers=1, spread=0.4)
    prompts = random_prompts([150, 201])
    rates = {}
    for draft in ("sparse:budget=0.01,least_groups=1,weight_bits=16", "sparse:budget=1.0,weight_bits=16", "quantspec:weight_bits=16"):
        config = dataclasses.replace(CONFIG, draft=draft, num_speculative_tokens=2)
        rates[draft] = generate(model, prompts, config=config).stats.draft_acceptance_rate
    few, all, dense = rates.values()
    assert few < all == dense


@pytest.mark.parametrize("settings", [{"adaptive": True}, {"min_draft_confidence": 0.1}, {"temperature": 0.9, "top_k": 9}], ids=str)
@pytest.mark.slow
def test_rows_replaced_in_a_running_batch_are_as_alone(settings, model):
    config = dataclasses.replace(CONFIG, **settings)
    draft = make_draft(SPARSE, model)
    keys = prompt_keys(jax.random.key(3), 5)
    prompts = random_prompts([3, 30, 9, 41, 17])
    new = (24, 9, 24, 5, 20)
    requests = [Request(prompt, dataclasses.replace(config, max_new_tokens=n), key) for prompt, n, key in zip(prompts, new, keys)]
    together = {result.index: result.token_ids for result in run_batch(model, requests, batch_size=2, draft=draft)}
    for i, (request, prompt) in enumerate(zip(requests, prompts)):
        alone = run_rounds(model, [prompt], request.config, draft=draft, keys=keys[i : i + 1])
        assert together[i] == alone.tokens[0] and len(together[i]) == new[i]
        if "temperature" not in settings:
            target = dataclasses.replace(CONFIG, draft="none", cache="int8", max_new_tokens=new[i])
            assert alone.tokens == run_rounds(model, [prompt], target).tokens


# Drafts by name ----------------------------------------------------------------------------------------------------------


def test_a_text_chooses_a_draft():
    assert parse_draft("none") is None
    assert parse_draft("sparse:budget=0.03,newest=0.25") == REGISTRY["sparse"](budget=0.03, newest=0.25)
    assert parse_draft("quantspec") == REGISTRY["quantspec"]()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("magic", "quantspec, sparse, none"),
        ("", "quantspec, sparse, none"),
        ("none:budget=1", "has no settings"),
        ("sparse:", "budget=..."),
        ("sparse:size=3", "'size=3'"),
        ("sparse:budget=much", "a number, not 'much'"),
        ("sparse:dense_layers=1.5", "a whole number, not '1.5'"),
        ("sparse:budget=0.1,budget=0.2", "twice"),
        ("sparse:budget=0", "budget 0"),
        ("sparse:newest=1.5", "newest 1.5"),
        ("sparse:least_groups=0", "least_groups 0"),
        ("sparse:dense_layers=9", "dense_layers 9"),
        ("quantspec:cache=int2", "'int2'"),
        ("quantspec:weight_bits=5", "weight_bits 5"),
    ],
)
def test_texts_that_choose_none(text, words, model):
    with pytest.raises(InputError, match=words) as error:
        make_draft(text, model)
    assert "\n" not in str(error.value)


def test_sparse_drafts_need_the_int8_cache(model):
    with pytest.raises(InputError, match="int8 cache"):
        generate(model, random_prompts([9]), config=dataclasses.replace(CONFIG, cache="full"))


def test_drafts_that_keep_the_prompt_are_replaced_in_a_batch(model):
    """Prompts of several buckets, whose tokens are the draft's state; it proposes the token that came last before the same one."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Remembering(Draft):
        def begin(self, prompt):
            return prompt.tokens, prompt.n

        def propose(self, state, cache, round):
            tokens, n = state
            same = (tokens == round.pending[:, None]) & (jnp.arange(tokens.shape[1]) < n[:, None] - 1)
            at = jnp.where(same, jnp.arange(tokens.shape[1]), 0).max(1)[:, None] + jnp.arange(1, round.gamma + 1)
            found = jnp.take_along_axis(tokens, jnp.minimum(at, tokens.shape[1] - 1), 1)
            return Proposal(found, round.certain(found, 64), round.eligible), state, cache

    prompts = random_prompts([70, 3, 150, 20])
    requests = [Request(prompt, CONFIG, key) for prompt, key in zip(prompts, prompt_keys(jax.random.key(0), 4))]
    found = {result.index: result.token_ids for result in run_batch(model, requests, batch_size=2, draft=Remembering())}
    target = dataclasses.replace(CONFIG, draft="none", cache="int8")
    assert [found[i] for i in range(4)] == run_rounds(model, prompts, target).tokens


def test_a_draft_gets_the_last_real_queries(model):
    """The prompts are ragged, and one is shorter than what is asked for; in float64."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Asking(Draft):
        prompt_queries = 5

        def begin(self, prompt):
            return prompt.queries

        def propose(self, state, cache, round):
            raise AssertionError("no round is run here")

    prompts = random_prompts([3, 70, 64])
    engine = Engine(model, Asking(), cache=CONFIG.cache_config, gamma=1, prompt_tokens=70, max_new_tokens=4)
    state = engine.prefill(prompts, make_sampler(CONFIG), prompt_keys(jax.random.key(0), 3), make_limits(model, *[CONFIG] * 3))
    queries = state.draft
    for row, prompt in enumerate(prompts):
        tokens, _ = padded([prompt])
        angles = model.cos_sin(jnp.arange(tokens.shape[1])[None], jnp.full(tokens.shape, len(prompt)))
        q, _, _ = model.layers[0].before_attention(model.embed(tokens), *angles)
        expected = np.asarray(q[0, max(0, len(prompt) - 5) : len(prompt)])
        found = np.asarray(queries[0][row])
        np.testing.assert_allclose(found[5 - len(expected) :], expected, atol=1e-12)
        assert (found[: 5 - len(expected)] == 0).all()
