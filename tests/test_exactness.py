"""QuantSpec emits its target's own tokens: the schedule, round by round, and everything that must not change a row's tokens."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import random_head
from markov import Markov, MarkovDraft, MarkovSteps
from runs import prepared, random_model, random_prompts, run_rounds, with_draft
from tiers import in_system

from pallas_kernels.formats import kv_cache, quantization
from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax.caches.full import FullCache
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.caches.prefill import prefill
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.caches.schedule import Schedule
from qspec_jax.decoding import engine
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.round import current_round, decode, propose
from qspec_jax.decoding.sampling import Greedy, prompt_keys
from qspec_jax.decoding.state import LENGTH
from qspec_jax.drafts import make_draft, quantspec
from qspec_jax.drafts.cascade import CascadeDraft
from qspec_jax.drafts.combine import CombinedDraft
from qspec_jax.drafts.eagle3 import Eagle3Draft
from qspec_jax.drafts.prompt_lookup import PromptLookupDraft
from qspec_jax.drafts.quantspec import QuantSpecDraft
from qspec_jax.drafts.small_model import SmallModelDraft
from qspec_jax.errors import InputError
from qspec_jax.models import prompts as prompts_module
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.quantization.weights import quantize_linears

G = 8
LENGTHS = [1, G - 1, G, G + 1, 2 * G - 1, 2 * G, 2 * G + 1, 5 * G + 3]
ALONE = [[n] for n in LENGTHS]
BATCHES = [[LENGTHS[i], LENGTHS[(i + 3) % 8], LENGTHS[(i + 6) % 8]] for i in range(0, 8, 2)]
GAMMAS = [1, 2, 4, 6, 2 * G]
QUANTSPEC = GenerationConfig(draft="quantspec", max_new_tokens=4 * G + 4, group_size=G, ignore_eos=True)
TARGET = dataclasses.replace(QUANTSPEC, draft="none", cache="int8")
OTHERS = [
    "sparse:budget=0.2,min_groups=2,weight_bits=16",
    "sparse:budget=0.2,min_groups=2,newest=0.25,memory=0.6,heads=by-mass,weight_bits=16",
    "streaming-llm:budget=12,sinks=3",
    "snapkv:budget=36,generated=5,cache=int8",
    "prompt-lookup",
    "exact-topk:budget=0.2,weight_bits=16",
    "exact-topk:budget=12,unit=token,weight_bits=16",
    "h2o:budget=0.2,min_groups=2,weight_bits=16",
    "chunk-means:budget=12,chunk=2,rebuild=9,dense_layers=0,weight_bits=16",
    "retrieval:budget=44,chunk=2,rebuild=9,generated=7,cache=int8",
    "quantspec:skip=0m,weight_bits=16,cache=int8",
    "sparse:budget=0.2,min_groups=2,skip=0a,weight_bits=16",
]
SAMPLED = dataclasses.replace(QUANTSPEC, temperature=0.9, top_k=20)


@pytest.fixture(scope="module", autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model():
    """One layer compiles in half the time; two layers: test_decode.py."""
    return random_model(jnp.float64, num_hidden_layers=1)


@pytest.fixture(scope="module")
def targets(model):
    """What one-by-one decoding with the INT8 target emits, by prompt length."""
    return {n: run_rounds(model, random_prompts([n]), TARGET).tokens[0] for n in LENGTHS}


@pytest.fixture
def one_bit(monkeypatch):
    """A deliberately coarse cache, one bit in both planes: a token that reads a wrong cache mostly shows."""

    def scheme(x, low, high, dtype):
        scale = jnp.maximum((high - low) / 15, 1e-6)
        upper = jnp.where(x > (low + high) / 2, 15.0, 0.0)
        return upper, jnp.zeros_like(x), scale, low

    monkeypatch.setitem(quantization.SCHEMES, "one_bit", scheme)
    return "one_bit"


def prompts_of(lengths):
    return [random_prompts([n])[0] for n in lengths]


def check_schedule(run, lengths, config, *, gammas=None, some_rounds_without=False):
    """Every row's lengths, drafts and flushes after every round, against the schedule computed here from the lengths alone.

    gammas: see `check_greedy`. some_rounds_without: for a draft that proposes nothing now and then.
    """
    n = np.array(lengths)
    before = None
    for state in run.rounds:
        cached = n + state.emitted - 1
        assert (state.quantized == np.maximum(0, cached // G - 1) * G).all()
        assert (state.quantized + state.buffered == cached).all()
        assert (state.buffered <= 2 * G - 1).all()
        assert (state.flushes == (state.quantized - run.rounds[0].quantized) // G).all()
        if before is not None:
            wanted = config.max_new_tokens - before.emitted
            gamma = np.array(gammas or config.num_speculative_tokens) if config.speculative else 0
            eligible = np.where(before.status == 0, np.minimum(np.minimum(gamma, 2 * G - 1 - before.buffered), wanted - 1), 0)
            drafted = state.drafted - before.drafted
            assert ((drafted == eligible) | (some_rounds_without & (drafted == 0))).all()
            emitted = np.where(before.status == 0, state.accepted - before.accepted + 1, 0)
            assert (state.emitted - before.emitted == emitted).all()
        before = state
    assert (run.rounds[-1].status == LENGTH).all()


# Every length with every gamma, in one batch and program.
GRID = [*itertools.product(LENGTHS, GAMMAS)]


@pytest.mark.parametrize("gamma", [max(GAMMAS), *in_system(1, 4)])
def test_greedy_quantspec_is_its_target(model, targets, gamma):
    config = dataclasses.replace(QUANTSPEC, num_speculative_tokens=gamma)
    if gamma == max(GAMMAS):
        lengths, gammas = zip(*GRID)
        rate = check_greedy(model, targets, config, quantspec(model), [lengths], gammas)
    else:  # one prompt alone with the other gammas: test_decode.py
        rate = check_greedy(model, targets, config, quantspec(model), BATCHES + ALONE * (gamma == 4))
    # Otherwise nothing was rejected, or nothing accepted, and little was tested.
    assert 0.05 < rate < 0.95


def check_greedy(model, targets, config, draft, batches, gammas=None):
    """Tokens, lengths and flushes of prompts of these lengths; returns the acceptance rate. gammas: of each row; the config's, if None."""
    drafted = accepted = 0
    for lengths in batches:
        limits = gammas and make_limits(model, *[dataclasses.replace(config, num_speculative_tokens=gamma) for gamma in gammas])
        run = run_rounds(model, prompts_of(lengths), config, draft=draft, limits=limits)
        assert run.tokens == [targets[n] for n in lengths]
        check_schedule(run, lengths, config, gammas=gammas, some_rounds_without=isinstance(draft, PromptLookupDraft))
        assert (run.rounds[-1].flushes >= 3).all()
        drafted, accepted = drafted + run.rounds[-1].drafted.sum(), accepted + run.rounds[-1].accepted.sum()
    return accepted / drafted


@pytest.fixture(scope="module")
def drafts(model):
    """Drafts of other kinds."""
    # Logits of each token behind nothing: a toy that is right now and then.
    empty = CacheConfig("full").empty(model.config, batch=64, capacity=1, num_speculative_tokens=0, dtype=jnp.float64)
    alone, _ = jax.jit(model)(jnp.arange(64)[:, None], jnp.zeros((64, 1), jnp.int32), empty)
    noise = jax.random.normal(jax.random.key(0), (2, 64, 64)) * alone.std() / 4
    small, middle = (Markov(alone[:, 0] + more) for more in noise)
    second = ViewedModel(quantize_linears(model), BOTH_PLANES)
    return {text: make_draft(text, model) for text in OTHERS} | {
        "two levels": CascadeDraft(MarkovDraft(small), MarkovSteps(middle)),
        "triforce": CascadeDraft(SmallModelDraft(second, 2, G), make_draft("retrieval:budget=44,chunk=2,rebuild=9", model)),
        "small model": SmallModelDraft(second),
        # Each is used in some rounds, and lacks what the other proposed.
        "a lookup or a window": CombinedDraft(make_draft("prompt-lookup:longest=2,shortest=2", model), SmallModelDraft(second, 2, G)),
        "a head": Eagle3Draft(random_head(model), 2, 9),
        "a head before sparse": CascadeDraft(
            Eagle3Draft(random_head(model, tokens=32), 2, 9), make_draft("sparse:budget=0.2,min_groups=2,weight_bits=16", model)
        ),
        "a lookup before sparse": make_draft(
            "cascade:first=prompt-lookup,middle=(sparse:budget=0.2,min_groups=2,weight_bits=16),first_gamma=3", model
        ),
        "sparse before quantspec": make_draft("cascade:first=(sparse:budget=0.2,min_groups=2),middle=(quantspec:weight_bits=16)", model),
        "a lookup or sparse": make_draft("combine:(prompt-lookup:longest=3,shortest=3)+(sparse:budget=0.2,min_groups=2)", model),
    }


CASCADES = ["two levels", "triforce", "a lookup before sparse", "a head before sparse", "sparse before quantspec"]
KINDS = [*OTHERS, *CASCADES, "a head", "small model", "a lookup or a window", "a lookup or sparse"]
# One that the model itself makes, and one that needs no model; others, in batches whose rows are replaced: test_drafts.py.
FIRST = (OTHERS[0], "prompt-lookup")


@pytest.mark.parametrize("kind", [*FIRST, *in_system(*(kind for kind in KINDS if kind not in FIRST))])
def test_greedy_tokens_of_other_drafts_are_the_targets(model, targets, drafts, kind):
    """What the targets emit alone; these drafts alone are here and in test_drafts.py."""
    lengths, gammas = zip(*GRID)
    config = dataclasses.replace(QUANTSPEC, num_speculative_tokens=max(GAMMAS))
    rate = check_greedy(model, targets, config, drafts[kind], [lengths], gammas)
    assert 0.005 < rate < 0.98


@pytest.mark.parametrize(
    "kind",
    [OTHERS[4], *in_system("two levels", OTHERS[5], OTHERS[-2], "small model")],
)
def test_greedy_tokens_of_other_drafts_alone(model, targets, drafts, kind):
    config = dataclasses.replace(QUANTSPEC, num_speculative_tokens=4)
    assert 0.005 < check_greedy(model, targets, config, drafts[kind], ALONE) < 0.98


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LongBlocks(CascadeDraft):
    """Planted: blocks of the middle that are longer than the target's verification."""

    def at_once(self, gamma):
        return self.first_gamma


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LongBlocksWithRows(LongBlocks):
    """The same, but it asks for room."""

    @property
    def extra_rows(self):
        return self.first_gamma


@pytest.mark.system
@pytest.mark.parametrize("kind", [CascadeDraft, LongBlocks, LongBlocksWithRows])
def test_a_middle_that_reads_the_targets_cache_has_room_in_it(model, targets, drafts, kind):
    """Every draft is accepted; what a longer block feeds beyond the room for the round is clamped onto rows that are valid."""
    draft = kind(drafts["two levels"].first, QuantSpecDraft(ViewedModel(model, BOTH_PLANES)), first_gamma=8)
    config, tokens, rates = dataclasses.replace(QUANTSPEC, num_speculative_tokens=4), [], []
    for lengths in BATCHES:
        run = run_rounds(model, prompts_of(lengths), config, draft=draft)
        tokens.append(run.tokens == [targets[n] for n in lengths])
        rates.append((run.rounds[-1].accepted == run.rounds[-1].drafted).all())
    assert (all(tokens) and all(rates)) == (kind is not LongBlocks)


@pytest.mark.system
def test_what_ends_a_row_ends_it_within_a_block_of_two_levels(model, targets, drafts):
    """An EOS, and a row's own stop sequence, as any of four drafts or behind them, and at every place relative to the length cap."""
    always = CascadeDraft(drafts["triforce"].first, QuantSpecDraft(ViewedModel(model, BOTH_PLANES)))  # so that blocks are long
    (n, tokens), places = max(targets.items()), set()
    prompts, config = prompts_of([n]) * 8, dataclasses.replace(QUANTSPEC, num_speculative_tokens=4, ignore_eos=False)
    never = next(token for token in range(64) if token not in tokens)  # so that one program has both ways to end
    for at in [i for i, token in enumerate(tokens) if token not in tokens[:i]][:12]:
        caps = np.clip(np.arange(at - 1, at + 7), 1, len(tokens))
        eos, stop = (tokens[at], (never,)) if at % 2 else (never, tuple(tokens[max(0, at - 1) : at + 1]))
        stops = {"eos_token_ids": (eos,), "stop_token_ids": (stop,)}
        limits = make_limits(model, *[dataclasses.replace(config, max_new_tokens=int(cap), **stops) for cap in caps])
        run = run_rounds(model, prompts, config, draft=always, limits=limits)
        assert run.tokens == [tokens[: min(at + 1, cap)] for cap in caps]
        for row in np.flatnonzero((at > 0) & (at < caps)):
            before = [state.emitted[row] for state in run.rounds if state.status[row] == 0]
            places.add(at - before[-1])
    assert places == {0, 1, 2, 3, 4}


def test_the_targets_own_lengths_follow_the_schedule(model):
    # Batches: test_decode.py.
    for lengths in ALONE:
        check_schedule(run_rounds(model, prompts_of(lengths), TARGET), lengths, TARGET)


@functools.cache
def coarse_targets(model, scheme):
    """What the coarse target emits, by prompt length."""
    return {n: run_rounds(model, random_prompts([n]), dataclasses.replace(TARGET, scheme=scheme)).tokens for n in LENGTHS}


def coarse_runs(model, scheme):
    """Quantspec's runs on that target."""
    config = dataclasses.replace(QUANTSPEC, scheme=scheme, num_speculative_tokens=6)
    # A draft good enough that rounds reach the limit of the schedule.
    draft = quantspec(model, weight_bits=16, cache="int8")
    for n in LENGTHS:
        yield n, config, run_rounds(model, random_prompts([n]), config, draft=draft)


@pytest.mark.system
def test_a_coarse_target_is_met_too(model, targets, one_bit):
    expected, differing = coarse_targets(model, one_bit), 0
    for n, config, run in coarse_runs(model, one_bit):
        assert run.tokens == expected[n]
        check_schedule(run, [n], config)
        differing += expected[n][0] != targets[n]
    assert differing >= 4  # the coarse cache is coarse enough to change tokens


@pytest.mark.system
def test_a_cap_one_larger_is_seen(model, one_bit, monkeypatch):
    expected = coarse_targets(model, one_bit)
    monkeypatch.setattr(Schedule, "draft_room", lambda schedule, lengths: 2 * schedule.flush_size - lengths.buffered)
    # A function of its own, since jit remembers what it has traced.
    afresh = lambda target, draft, sampler, state, limits, *rounds: decode(target, draft, sampler, state, limits, *rounds)
    monkeypatch.setattr(engine, "DECODE", Compiled(afresh, donate_argnums=3))
    wrong_tokens = wrong_schedule = 0
    for n, config, run in coarse_runs(model, one_bit):
        wrong_tokens += run.tokens != expected[n]
        try:
            check_schedule(run, [n], config)
        except AssertionError:
            wrong_schedule += 1
    assert wrong_tokens >= 2
    assert wrong_schedule == len(LENGTHS)


@pytest.mark.system
def test_groups_of_128_and_600_new_tokens(model):
    config = GenerationConfig(draft="quantspec", max_new_tokens=600, group_size=128, ignore_eos=True)
    prompts = random_prompts([200, 77])
    target = generate(model, prompts, config=dataclasses.replace(config, draft="none", cache="int8"))
    out = generate(model, prompts, config=config)
    assert out.token_ids == target.token_ids
    assert min(row.flushes for row in out.stats.rows) >= 4
    assert 0 < out.stats.draft_acceptance_rate < 1


def test_a_draft_that_is_the_target_is_always_accepted(model):
    out = generate(model, prompts_of([1, 19, 43]), config=with_draft(QUANTSPEC, quantspec(model, weight_bits=16, cache="int8")))
    assert out.stats.num_draft_tokens > 50
    assert out.stats.draft_acceptance_rate == 1.0


def test_speculation_over_a_full_cache(model):
    prompts = prompts_of([5, 43])
    target = generate(model, prompts, config=dataclasses.replace(TARGET, cache="full"))
    out = generate(model, prompts, config=dataclasses.replace(QUANTSPEC, cache="full"))
    assert out.token_ids == target.token_ids
    assert out.stats.flushes == 0
    assert out.stats.num_accepted_draft_tokens > 0


def test_drafting_and_rollback_leave_the_valid_cache_bitwise(model):
    config = dataclasses.replace(QUANTSPEC, num_speculative_tokens=4)
    state, _, limits = prepared(model, prompts_of([1, 2 * G + 1, 5 * G + 3]), config, draft=quantspec(model))
    current = dataclasses.replace(current_round(Greedy(), state, limits), eligible=jnp.array([4, 2, 0], jnp.int32))
    proposal, _, cache = jax.jit(propose)(quantspec(model), state.draft, state.cache, current)
    assert proposal.tokens.shape == (3, 4)
    jax.tree.map(np.testing.assert_array_equal, cache.lengths, state.cache.lengths)
    buffered = np.asarray(state.cache.lengths.buffered)
    touched = False
    for old, new in zip(state.cache.layers, cache.layers):
        jax.tree.map(np.testing.assert_array_equal, (new.keys, new.values), (old.keys, old.values))
        for a, b in ((new.buffer.keys, old.buffer.keys), (new.buffer.values, old.buffer.values)):
            for row, valid in enumerate(buffered):
                np.testing.assert_array_equal(a[row, :, :valid], b[row, :, :valid])
            touched |= bool((np.asarray(a) != np.asarray(b)).any())
    assert touched  # it did draft


# With the rows of a batch that stays full: test_batch.py.
@pytest.mark.system
def test_a_sampled_rows_tokens_depend_on_that_row_alone(model):
    """Greedy ones are compared in test_greedy_quantspec_is_its_target: alone and in batches they are the target's, made alone."""
    config, prompts = SAMPLED, prompts_of([9, 17, 300])
    keys = prompt_keys(jax.random.key(5), 3)
    together = run_rounds(model, prompts, config, keys=keys).tokens
    assert len({tuple(row) for row in together}) == 3
    order = jnp.array([2, 0, 1])
    permuted = run_rounds(model, [prompts[i] for i in order], config, keys=keys[order]).tokens
    assert permuted == [together[i] for i in order]
    # Without the long one its cache is smaller too.
    assert run_rounds(model, prompts[:1], config, keys=keys[:1]).tokens == together[:1]


# Of the command: test_cli.py.
@pytest.mark.system
def test_sampling_is_repeatable_and_follows_the_key(model):
    prompts = prompts_of([9, 17, 300])
    a, b, c = (run_rounds(model, prompts, SAMPLED, keys=prompt_keys(jax.random.key(seed), 3)).tokens for seed in (3, 3, 4))
    assert a == b != c


def first_times(tokens):
    """(position, token) of each token at its first occurrence."""
    return [(i, token) for i, token in enumerate(tokens) if token not in tokens[:i]]


@pytest.mark.parametrize(
    ("method", "first"), [("quantspec", 0), *in_system(("quantspec", 1), ("autoregressive", 0), ("autoregressive", 1))]
)
def test_eos_at_every_position_and_the_length_cap(model, targets, method, first):
    """At every second position, from this one."""
    base = QUANTSPEC if method == "quantspec" else TARGET
    prompt, tokens = random_prompts([2 * G + 1]), targets[2 * G + 1]
    assert len(first_times(tokens)) > 6
    for at, eos in first_times(tokens)[first::2]:
        for cap in {at, at + 1, at + 2, base.max_new_tokens} - {0}:
            config = dataclasses.replace(base, eos_token_ids=(eos,), ignore_eos=False, max_new_tokens=cap)
            out = generate(model, prompt, config=config)
            assert out.token_ids[0] == tokens[: min(at + 1, cap)]
            assert out.finish_reason == ["eos" if at < cap else "length"]


def test_each_row_ends_by_itself(model, targets):
    lengths = [9, 2 * G, 5 * G + 3]
    eos = tuple(targets[n][i] for n, i in zip(lengths, (2, 11, 5)))
    out = generate(model, prompts_of(lengths), config=dataclasses.replace(QUANTSPEC, eos_token_ids=eos, ignore_eos=False))
    for n, row, reason in zip(lengths, out.token_ids, out.finish_reason):
        first = min((i for i, token in enumerate(targets[n]) if token in eos), default=None)
        assert row == (targets[n] if first is None else targets[n][: first + 1])
        assert reason == ("length" if first is None else "eos")


def test_statistics_add_up(model):
    out = generate(model, prompts_of([1, 19, 43]), config=QUANTSPEC)
    for row in out.stats.rows:
        assert row.num_accepted_draft_tokens + row.num_spec_steps + 1 == row.new_tokens == QUANTSPEC.max_new_tokens
        assert sum(row.acceptance_histogram) == row.num_spec_steps
        assert sum(a * count for a, count in enumerate(row.acceptance_histogram)) == row.num_accepted_draft_tokens
        assert row.num_draft_tokens <= 4 * row.num_spec_steps
    assert out.stats.new_tokens == sum(row.new_tokens for row in out.stats.rows)
    assert out.stats.mean_acceptance_length == 1 + out.stats.num_accepted_draft_tokens / out.stats.num_spec_steps


def test_drafts_behind_an_eos_do_not_count(model, targets):
    """A draft that is the target: every counted draft was emitted, so the rate stays 1 and no round flatters it."""
    eos = first_times(targets[9])[4][1]
    at = targets[9].index(eos)
    config = dataclasses.replace(QUANTSPEC, eos_token_ids=(eos,), ignore_eos=False)
    # Three times the same, for which test_a_draft_that_is_the_target_is_always_accepted has compiled the loop.
    stats = generate(model, prompts_of([9] * 3), config=with_draft(config, quantspec(model, weight_bits=16, cache="int8"))).stats
    for row in stats.rows:
        assert row.new_tokens == at + 1
        assert row.draft_acceptance_rate == 1.0
        assert row.num_accepted_draft_tokens + row.num_spec_steps in (at, at + 1)


@pytest.mark.parametrize("rounds", [1, 3])
def test_streaming_gives_the_same_tokens(model, rounds):
    prompts = prompts_of([1, 19, 43])
    whole = generate(model, prompts, config=QUANTSPEC)
    seen = [[], [], []]

    def on_tokens(new):
        for row, tokens in zip(seen, new):
            row += tokens

    out = generate(model, prompts, config=QUANTSPEC, on_tokens=on_tokens, rounds_per_update=rounds)
    assert seen == out.token_ids == whole.token_ids


def test_chunked_prefill_is_a_forward_pass(model, monkeypatch):
    """384 tokens: four chunks, and a prompt that fills its bucket; against all tokens in one call. A KV head at a time is quantized."""
    for name in ("models.prompts.CHUNK_TOKENS", "models.prompts.CHUNK_QUERIES", "caches.prefill.CHUNK_TOKENS"):
        monkeypatch.setattr(f"qspec_jax.{name}", 100)
    monkeypatch.setattr("qspec_jax.models.prompts.QUANTIZED_BYTES", 1)
    parts, equal_parts = [], prompts_module.equal_parts
    monkeypatch.setattr(prompts_module, "equal_parts", lambda *args: parts.append((*args, equal_parts(*args))) or equal_parts(*args))
    n = np.array([3, 175, 384], np.int32)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 64, (3, 384)), jnp.int32)
    make = lambda kind: CacheConfig(kind, group_size=G).empty(
        model.config, batch=3, capacity=448, num_speculative_tokens=0, dtype=jnp.float64
    )
    positions = jnp.broadcast_to(jnp.arange(384), tokens.shape)
    # On the host, where taking a part of them compiles nothing.
    logits, direct = jax.device_get(jax.jit(lambda cache: model(tokens, positions, cache))(make("full")))
    for kind in ("full", "int8"):
        last, cache = jax.device_get(jax.jit(prefill)(model, tokens, n, make(kind)))
        for row in range(3):
            np.testing.assert_allclose(last[row], logits[row, n[row] - 1], atol=1e-10)
        np.testing.assert_array_equal(cache.lengths.total, n)
    assert {(384, 100, 4), (2, 1, 2)} <= set(parts)
    assert isinstance(cache, HierarchicalCache) and isinstance(direct, FullCache)
    for got, full in zip(cache.layers, direct.layers):
        keys, values = kv_cache.dequantize_groups(got.keys, got.values, planes=2, dtype=jnp.float64)
        for row in range(3):
            whole = int(cache.lengths.quantized[row])
            rest = int(n[row]) - whole
            for buffer, exact in ((got.buffer.keys, full.keys), (got.buffer.values, full.values)):
                np.testing.assert_allclose(buffer[row, :, :rest], exact[row, :, whole : whole + rest], atol=1e-10)
            for quantized, exact in ((keys, full.keys), (values, full.values)):
                flat = quantized[row].reshape(2, -1, 16)[:, :whole]
                assert np.abs(flat - exact[row, :, :whole]).max(initial=0) < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "at least one prompt"),
        ([[]], "prompt 0 is empty"),
        ([[1], [2, 64]], "prompt 1 has token id 64 at index 1, outside the vocabulary of 64"),
        ([[-1]], "outside the vocabulary"),
        (["text"], "tokenizer"),
        ("text", "prompt 0 is a text, so a tokenizer is needed"),
        (5, "list"),
        ([[1] * 5000], "4096 positions; shorten it to at most 4"),
        ([[1] * 4090], "ask for at most 6 new tokens"),
    ],
)
def test_bad_prompts(model, prompts, words):
    with pytest.raises(InputError, match=words) as error:
        generate(model, prompts, config=QUANTSPEC)
    assert "\n" not in str(error.value)
