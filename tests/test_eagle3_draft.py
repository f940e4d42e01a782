"""The draft of an EAGLE-3 head: its features, windows and first drafts. That its output is the target's: test_exactness.py."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import random_head, write_head
from runs import prepared, random_model, random_prompts, with_draft
from safetensors.flax import load_file
from test_eagle3_head import HEADS, NAMES, close
from tiers import in_system

from pallas_kernels.formats.views import FULL_PRECISION
from pallas_kernels.formats.weights import Int4Weight, Int8Weight
from pallas_kernels.rope_append import reference as rope_append_reference
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.reading import extend, prefill
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.round import current_round, propose
from qspec_jax.decoding.rows import joined
from qspec_jax.decoding.sampling import Greedy, make_sampler
from qspec_jax.decoding.saving import load_state, save_state
from qspec_jax.drafts.cascade import CascadeDraft
from qspec_jax.drafts.combine import CombinedDraft
from qspec_jax.drafts.eagle3 import Eagle3Draft, HeadState
from qspec_jax.drafts.registry import make_draft
from qspec_jax.errors import InputError
from qspec_jax.models.eagle3 import Eagle3Head
from qspec_jax.models.llama import Llama
from qspec_jax.quantization.weights import quantize_rows
from qspec_jax.states import file

FULL = GenerationConfig(draft="none", cache="full", max_new_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def golden():
    with np.load(HEADS / "golden.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def target():
    return load_model(HEADS / "eagle3-target", dtype="float32")


def next_drafts(draft, state, limits):
    """The tokens that a draft proposes in the round after a state."""
    return np.asarray(propose(draft, state.draft, state.cache, current_round(Greedy(), state, limits))[0].tokens)


def test_features_are_the_residual_streams(target, golden):
    tokens = jnp.asarray(golden["input_ids"])
    B, T = tokens.shape
    cache = CacheConfig("full").empty(target.config, batch=B, capacity=T, num_speculative_tokens=T, dtype=jnp.float32)
    seen = []
    for at in range(0, T, 8):
        _, cache, found = target.watched(tokens[:, at : at + 8], jnp.broadcast_to(jnp.arange(at, at + 8), (B, 8)), cache, taps=(2, 4, 5))
        seen.append(found.features)
    assert close(jnp.concatenate(seen, 1), golden["features"])


def test_the_last_tap_is_what_the_last_layer_leaves():
    model = random_model(jnp.float32)
    cache = CacheConfig("full").empty(model.config, batch=1, capacity=4, num_speculative_tokens=4, dtype=jnp.float32)
    logits, _, seen = model.watched(jnp.arange(4)[None], jnp.arange(4)[None], cache, taps=(0, 2))
    embedded, left = jnp.split(seen.features, 2, -1)
    np.testing.assert_array_equal(embedded, model.embed(jnp.arange(4)[None]))
    np.testing.assert_allclose(model.logits(left), logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [NAMES[0], *in_system(*NAMES[1:])])
def test_the_first_drafts_are_the_goldens(name, target, golden):
    draft = make_draft(f"eagle3:model={HEADS / name},sinks=4,window=56", target)
    config = dataclasses.replace(FULL, num_speculative_tokens=5, draft="quantspec")
    state, _, limits = prepared(target, golden["input_ids"].tolist(), config, draft=draft)
    np.testing.assert_array_equal(state.pending, golden["next_ids"])
    for each in draft, draft.in_loop():
        np.testing.assert_array_equal(next_drafts(each, state, limits), golden[f"{name}.chain_ids"])


@pytest.mark.parametrize("sinks", [2, *in_system(0)])
def test_what_a_head_has_read_by_rounds_is_what_it_reads_at_once(float64, sinks):
    """Beyond the window, where drafts were accepted and where none were. Drafts are compared where one pair came: of several that are read
    in one pass the later ones see a longer window."""
    model, window = random_model(jnp.float64), 9
    draft = Eagle3Draft(random_head(model, tokens=16), sinks, window)
    prompts = random_prompts([23, 7, 2])
    config = dataclasses.replace(FULL, num_speculative_tokens=3, draft="quantspec", temperature=1.5)  # so that drafts are accepted
    state, step, limits = prepared(model, prompts, config, draft=draft)
    compared = 0
    for _ in range(9):
        state = step(state)
        if (one := np.asarray(state.draft.count) == 1).any():
            rows = zip(prompts, np.asarray(state.tokens), np.asarray(state.emitted), strict=True)
            again, _, more = prepared(model, [[*prompt, *row[: n - 1].tolist()] for prompt, row, n in rows], config, draft=draft)
            again = dataclasses.replace(again, pending=state.pending)
            np.testing.assert_array_equal(next_drafts(draft, again, more)[one], next_drafts(draft, state, limits)[one])
            compared += one.sum()
    accepted = np.asarray(state.counts.accepted)
    assert compared > 12 and (accepted > 0).all() and (accepted < 27).all() and (np.asarray(state.draft.own.cache.taken) > window).all()


READ = random_prompts([600], seed=3)[0]


def head_states(state):
    """What the heads in a state have read, by names, without what is beyond the pairs that they read, or waits for no token."""
    found = []
    for each in jax.tree.leaves(state.draft, is_leaf=lambda x: isinstance(x, HeadState)):
        if isinstance(each, HeadState):
            cache, pairs = each.own.cache, int(each.own.cache.taken[0])
            places = jnp.arange(min(pairs, int(cache.kept[0] + cache.ring[0])))[None, None]
            read = [layer.read(places) for layer in cache.layers]
            found.append(dict(count=each.count, pairs=pairs, skipped=each.own.skipped, waits=each.hidden[:, 0], read=read))
    return found


def same_heads(one, two):
    one, two = head_states(one), head_states(two)
    assert one and all((each["count"] == 1).all() for each in two)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), one, two)
    return True


@pytest.mark.parametrize(
    ("first", "pieces"),
    [(30, [11]), *in_system((30, [1] * 5), (2, [1, 60]), (30, [300]), (30, [300, 3, 1]), (3, [1]), (1, [2, 250, 4]), (300, [6]))],
)
@pytest.mark.parametrize("draft", ["a head of two layers", *in_system("a cascade", "a combine")])
def test_the_window_after_more_was_read_is_that_of_the_whole_text(float64, first, pieces, draft):
    """And so are the first drafts, and what follows, over a cache in full precision, where prefill and extension give the same features."""
    model, two = random_model(jnp.float64), draft == "a head of two layers"
    made = Eagle3Draft(random_head(model, **(dict(num_hidden_layers=2) if two else {})), 3, 9)
    if not two:
        quantspec = make_draft("quantspec:weight_bits=16", model)
        made = CascadeDraft(made, quantspec) if draft == "a cascade" else CombinedDraft(make_draft("prompt-lookup", model), made)
    config = with_draft(dataclasses.replace(FULL, num_speculative_tokens=3, max_new_tokens=12), made)
    state, n = prefill(model, READ[:first], config=config), first
    for piece in pieces:
        state, n = extend(state, READ[n : n + piece]), n + piece
    whole = prefill(model, READ[:n], config=config)
    assert same_heads(state, whole)
    out, again = (generate(model, [each], config=config) for each in (state, whole))
    assert out.token_ids == again.token_ids == generate(model, [READ[:n]], config=dataclasses.replace(FULL, max_new_tokens=12)).token_ids
    assert out.stats.rows == again.stats.rows and out.stats.num_draft_tokens > 0


@pytest.mark.parametrize(("cut", "sinks"), [*in_system((1, 3), (40, 0)), (200, 3)])
def test_the_window_of_what_was_generated_cut_and_read(float64, cut, sinks, tmp_path):
    """From forks and files, too; rows of several lengths that read in one batch, some of which read nothing, are as they are alone."""
    model = random_model(jnp.float64)
    made = Eagle3Draft(random_head(model), sinks, 9)
    config = with_draft(dataclasses.replace(FULL, num_speculative_tokens=3, max_new_tokens=12), made)
    before = generate(model, [prefill(model, READ[:300], config=config)], config=config).states[0]
    save_state(before, tmp_path / "state")
    tokens = before.tokens.tolist()
    for state in (*before.fork(2), load_state(tmp_path / "state", model, config=config)):
        whole = prefill(model, [*tokens, *READ[400:430]], config=config)
        assert same_heads(extend(extend(state, READ[400:401]), READ[401:430]), whole)
    short = [*tokens[: len(tokens) - cut], *READ[400:402]]
    state = extend(before.trim(len(tokens) - cut), READ[400:402])
    assert same_heads(state, prefill(model, short, config=config))
    alone = [generate(model, [each], config=config) for each in (before, state)]
    both = generate(model, [before, state], config=config)
    assert both.token_ids == [each.token_ids[0] for each in alone] and both.stats.rows == [each.stats.rows[0] for each in alone]


def test_rows_that_read_together_are_as_alone(float64):
    """Rows of several lengths read pieces of several lengths in one pass; a row that reads nothing stays as it is."""
    model = random_model(jnp.float64)
    config = with_draft(dataclasses.replace(FULL, num_speculative_tokens=3), Eagle3Draft(random_head(model), 3, 9))
    first = prefill(model, READ[:2], config=config, room=400)
    before = [extend(first, READ[2:n]) if n > 2 else first for n in (250, 2, 90, 90)]
    ends = [255, 100, 91, 90]
    rows = joined(before, ends)
    rows.read(before, [READ[:end] for end in ends], ends)
    for b, (state, end) in enumerate(zip(before, ends, strict=True)):
        found = rows.state(b, state, np.array(READ[:end], np.int32), end)
        assert same_heads(found, prefill(model, READ[:end], config=config))


def without_features(path):
    """Writes a saved state as before the features of heads were kept."""
    header, arrays = file.read_header(path), load_file(path)
    file.write(path, header | {"format": 2}, {name: x for name, x in arrays.items() if ".kept." not in name})


def test_what_a_head_reads_where_features_are_not_known(float64, tmp_path):
    """Those of tokens that left the ring before a text was cut, or of a state of an older file. Then the window begins later."""
    model = random_model(jnp.float64)
    made = Eagle3Draft(random_head(model), 3, 9)
    config = with_draft(dataclasses.replace(FULL, num_speculative_tokens=3), made)
    whole = prefill(model, READ, config=config)
    save_state(whole, tmp_path / "state")
    without_features(tmp_path / "state")
    older = load_state(tmp_path / "state", model, config=config)
    assert generate(model, [older], config=config).stats.rows == generate(model, [whole], config=config).stats.rows
    after = generate(model, [older], config=config).states[0]
    for state, pairs in (
        (extend(whole.trim(200), READ[200:206]), 3 + 5),  # the first tokens, and the new ones but the last
        (extend(older, READ[:7]), 6),
        (extend(extend(older, READ[:3]), READ[3:50]), 12),
        (extend(after, READ[:3]), 12),
    ):
        assert head_states(state)[0]["pairs"] == pairs
        expected = generate(model, [state.tokens.tolist()], config=FULL).token_ids
        assert generate(model, [state], config=config).token_ids == expected


def test_two_that_read_other_features_are_refused():
    model = random_model(jnp.float32)
    one, other = Eagle3Draft(random_head(model), 2, 9), Eagle3Draft(random_head(model, taps=(0, 2)), 2, 9)
    assert CombinedDraft(one, make_draft("prompt-lookup", model)).taps == one.taps
    with pytest.raises(InputError, match="should read the same ones"):
        generate(model, random_prompts([9]), config=with_draft(FULL, CombinedDraft(one, other)))


@pytest.mark.parametrize("first", ["eagle3", "sparse"])
@pytest.mark.parametrize("skip", ["(1)", "0a", "auto"])
def test_a_middle_that_skips_layers_is_refused(first, skip):
    """It gives no features, and does not write what the first would read."""
    model = random_model(jnp.float32)
    made = Eagle3Draft(random_head(model), 2, 9) if first == "eagle3" else make_draft(first, model)
    with pytest.raises(InputError, match="should skip no layers, unless the first is prompt-lookup or small-model"):
        CascadeDraft(made, make_draft(f"quantspec:skip={skip}", model))
    CascadeDraft(make_draft("prompt-lookup", model), make_draft(f"quantspec:skip={skip}", model))


@pytest.mark.parametrize("draft", ["a head before quantspec", *in_system("a head", "sparse before quantspec", "planted")])
def test_proposals_depend_on_nothing_beyond_the_lengths(float64, draft, monkeypatch):
    """Such rows are of drafts that were rejected. One row alone is written at a time, as by the kernel for GPUs. Planted: a middle that
    leaves out what the first then reads."""
    monkeypatch.setattr(rope_append_reference, "_two_rows", lambda x: x)
    model, planted = random_model(jnp.float64), draft == "planted"
    if planted:
        monkeypatch.setattr(CascadeDraft, "__post_init__", lambda self: None)
    made, skip = Eagle3Draft(random_head(model, tokens=32), 2, 9), "skip=(0a)" if planted else "skip=none"
    if draft != "a head":
        sparse = make_draft("sparse:budget=0.2,min_groups=2,weight_bits=16", model)
        made = CascadeDraft(made if "head" in draft else sparse, make_draft(f"quantspec:weight_bits=16,{skip}", model), 3)
    settings = dict(max_new_tokens=40, group_size=16, ignore_eos=True, temperature=4.0, num_speculative_tokens=8)
    config = GenerationConfig(draft="quantspec", **settings)
    state, step, limits = prepared(model, random_prompts([17, 5, 43]), config, draft=made)
    sampler, r = make_sampler(*[config] * 3), np.random.default_rng(0)
    run = jax.jit(lambda state: propose(made, state.draft, state.cache, current_round(sampler, state, limits))[0])

    def beyond(x, lengths):
        there = np.arange(x.shape[2]) < np.asarray(lengths)[:, None]
        return jnp.where(there[:, None, :, None], x, jnp.asarray(r.normal(0, 30, x.shape)))

    differ = []
    for _ in range(6):
        lengths = state.cache.lengths.buffered
        other = tuple(layer.with_buffer(jax.tree.map(lambda x: beyond(x, lengths), layer.buffer)) for layer in state.cache.layers)  # noqa: B023
        one, two = run(state), run(dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=other)))
        np.testing.assert_array_equal(one.eligible, two.eligible)
        usable = np.arange(8) < np.asarray(one.eligible)[:, None]
        differ.append((np.asarray(one.tokens)[usable] != np.asarray(two.tokens)[usable]).any())
        state = step(state)
    assert any(differ) == planted


def test_the_head_of_a_row_that_has_ended_stays(float64):
    model = random_model(jnp.float64, num_hidden_layers=1)
    draft = Eagle3Draft(random_head(model), 2, 9)
    config = dataclasses.replace(FULL, num_speculative_tokens=3, draft="quantspec", temperature=1.0)
    limits = make_limits(model, dataclasses.replace(config, max_new_tokens=4), config)
    state, step, _ = prepared(model, random_prompts([9, 14]), config, draft=draft, limits=limits)
    while state.status[0] == 0:
        state = step(state)
    kept = lambda state: (state.draft.count[0], state.draft.own.cache.taken[0], state.draft.tokens[0], state.draft.hidden[0])
    before, state = kept(state), step(state)
    assert before[0] > 0 and state.status[1] == 0
    jax.tree.map(np.testing.assert_array_equal, kept(state), before)


@pytest.fixture
def directory(tmp_path):
    return write_head(tmp_path / "head", random_model(jnp.float32), tokens=16)


@pytest.mark.parametrize(
    "draft", ["cascade:first=({}),middle=quantspec", *in_system("{}", "combine:prompt-lookup+({},weight_bits=4,head_bits=8)")]
)
def test_a_head_by_its_directory(directory, draft):
    model, prompts = random_model(jnp.float32), random_prompts([30, 11])
    text = draft.format(f"eagle3:model={directory},window=20")
    config = dataclasses.replace(FULL, draft=text, cache="int8", group_size=16, num_speculative_tokens=3)
    out = generate(model, prompts, config=config)
    assert out.token_ids == generate(model, prompts, config=dataclasses.replace(config, draft="none")).token_ids


@pytest.mark.parametrize(
    ("bits", "kinds"), [("weight_bits=4", {Int4Weight: 8}), ("weight_bits=4,head_bits=8", {Int4Weight: 8, Int8Weight: 1})]
)
def test_a_head_in_fewer_bits_is_nearly_the_same(directory, bits, kinds):
    model = random_model(jnp.float32)
    plain, coded = (make_draft(f"eagle3:model={directory}{more}", model).head for more in ("", f",{bits}"))
    found = Counter(type(weight) for weight in coded.weights().values())
    assert {kind: found[kind] for kind in (Int4Weight, Int8Weight) if found[kind]} == kinds
    features = jax.random.normal(jax.random.key(0), (1, 9, 2 * model.config.hidden_size))

    def logits(head):
        cache = CacheConfig("full").empty(head.config, batch=1, capacity=9, num_speculative_tokens=9, dtype=jnp.float32)
        return np.asarray(head(head.fused(features), jnp.arange(9)[None], jnp.arange(9)[None], cache, view=FULL_PRECISION)[0])

    error = np.linalg.norm(logits(coded) - logits(plain)) / np.linalg.norm(logits(plain))
    assert 0.01 < error < 0.3


@pytest.mark.parametrize("settings", [dict(temperature=0.9), *in_system(dict(temperature=0.0))], ids=str)
def test_rows_that_are_replaced_are_those_of_a_batch_of_one(directory, settings):
    model = random_model(jnp.float32)
    config = dataclasses.replace(FULL, draft=f"eagle3:model={directory},window=20", num_speculative_tokens=3, max_new_tokens=20, **settings)
    draft = make_draft(config.draft, model)
    requests = [Request(prompt, with_draft(config, draft), jax.random.key(b)) for b, prompt in enumerate(random_prompts([30, 11, 2, 25]))]

    def found(batch_size):
        return {result.index: result.token_ids for result in run_batch(model, requests, batch_size=batch_size)}

    assert found(2) == found(1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eagle3", "eagle3:model=DIR"),
        ("eagle3:model=no/such", "no/such: no such directory"),
        ("eagle3:model={},window=0", "window 0 should be at least 1"),
        ("eagle3:model={},window=5000", "sinks 4 and window 5000 should together be at most the 4096 positions"),
        ("cascade:first=(eagle3:model={}),middle=prompt-lookup", "middle draft of a cascade should be one that only steps"),
        ("cascade:first=snapkv,middle=quantspec", "the first draft of a cascade should be prompt-lookup, small-model"),
        ("cascade:first=quantspec,middle=retrieval", "or both should be drafts that step the target's own cache"),
        ("cascade:first_gamma=16", "first_gamma 16 should be auto, or a whole number from 1 to 15"),
    ],
)
def test_mistakes(directory, text, message):
    with pytest.raises(InputError, match=message):
        make_draft(text.format(directory), random_model(jnp.float32))


def test_a_head_of_another_target_is_refused(directory):
    with pytest.raises(InputError, match="target_hidden_size"):
        make_draft(f"eagle3:model={directory}", random_model(jnp.float32, hidden_size=32, num_attention_heads=2, num_key_value_heads=1))


def test_the_head_predicts_its_own_vocabulary_alone():
    """And probabilities are of the target's ids, on which processors act."""
    model = random_model(jnp.float32)
    head = random_head(model, tokens=16)
    logits = jax.random.normal(jax.random.key(0), (2, 16))
    wide = np.asarray(head.in_targets_vocabulary(logits))
    np.testing.assert_array_equal(wide[:, ::4], logits)
    assert np.isneginf(np.delete(wide, np.arange(0, 64, 4), 1)).all()
    draft = Eagle3Draft(head, 4, 20).in_loop()
    np.testing.assert_array_equal(draft.constants.numbers, [i // 4 if i % 4 == 0 else 16 for i in range(64)])
    np.testing.assert_array_equal(head.in_targets_vocabulary(logits, draft.constants), wide)


def test_a_pass_for_one_token_of_each_row_is_that_of_all(float64):
    """Its logits and hidden state; what it appends is that of all its tokens."""
    model = random_model(jnp.float64)
    head = random_head(model, tokens=16)
    features = jax.random.normal(jax.random.key(0), (2, 5, 2 * model.config.hidden_size))
    cache = CacheConfig("full").empty(head.config, batch=2, capacity=5, num_speculative_tokens=5, dtype=jnp.float64)
    args = head.fused(features), jnp.arange(10).reshape(2, 5), jnp.broadcast_to(jnp.arange(5), (2, 5)), cache
    (logits, hidden, whole), only = head(*args, view=FULL_PRECISION), jnp.array([3, 0])
    found = head(*args, view=FULL_PRECISION, only=only)
    for one, every in zip(found[:2], (logits, hidden)):
        np.testing.assert_allclose(one[:, 0], every[jnp.arange(2), only], rtol=1e-12)
    jax.tree.map(np.testing.assert_array_equal, found[2].layers, whole.layers)


@pytest.mark.parametrize("first", ["a head", *in_system("a combine")])
def test_within_a_round_a_head_reads_what_a_pass_of_the_middle_may_emit(first, monkeypatch):
    """Not what a round may."""
    model, read = random_model(jnp.float32), []
    head = Eagle3Draft(random_head(model), 4, 20)
    drafts = head if first == "a head" else CombinedDraft(make_draft("prompt-lookup", model), head)
    draft = CascadeDraft(drafts, make_draft("sparse", model), first_gamma=2)
    config = dataclasses.replace(FULL, draft=draft, cache="int8", group_size=16, num_speculative_tokens=7)
    call = Eagle3Head.__call__

    def watched(head, hidden, *args, **kwargs):
        if kwargs.get("only") is not None:
            read.append(hidden.shape[1])
        return call(head, hidden, *args, **kwargs)

    monkeypatch.setattr(Eagle3Head, "__call__", watched)
    generate(model, random_prompts([30, 11]), config=config)
    assert sorted(set(read)) == [3, 8]


def test_a_head_that_shares_the_targets_head_in_int8_takes_it_as_it_is():
    model = random_model(jnp.float32)
    weights = model.weights() | {"head": quantize_rows(model.weights()["embedding"])}
    target = Llama(dataclasses.replace(model.config, tie_word_embeddings=False, int8_head=True), lambda path, shape: weights[path])
    head = make_draft("eagle3:model=random,head_bits=8", target).head
    np.testing.assert_array_equal(head.weights()["head"].codes, weights["head"].codes)
