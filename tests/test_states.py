"""States: what they hold is what the straight way gives, however a text was cut, and through forks and files."""

import dataclasses
import gc
import itertools
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import interrupted_rounds, random_model, random_prompts
from tiers import in_system

from pallas_kernels.formats.views import BOTH_PLANES, UPPER_PLANE
from qspec_jax.decoding import rows as rows_of_states
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.generate import generate, stream
from qspec_jax.decoding.prepare import prepare
from qspec_jax.decoding.reading import extend, prefill
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.sampling import prompt_keys, sample_keys
from qspec_jax.decoding.saving import load_state, save_state
from qspec_jax.decoding.scoring import score
from qspec_jax.drafts import make_draft
from qspec_jax.errors import InputError
from qspec_jax.models.viewed import ViewedModel

G = 8
CACHES = ("int8", "full", "kivi:residual=8", "h2o:heavy=8,recent=8", "streaming-llm:sinks=2,window=24")
DRAFTS = ("quantspec", "prompt-lookup")
MORE_DRAFTS = ("sparse", "retrieval:rebuild=16", "snapkv", "streaming-llm", "h2o", "chunk-means:chunk=4,dense_layers=0")
TEXT = random_prompts([170])[0]
ROOM = 180  # programs are compiled for it: prompts of up to 64 tokens with this room share them

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(scope="module", autouse=True)
def short_spans():
    """Over a full cache passes end at multiples of this number of tokens, which all texts here go beyond."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qspec_jax.caches.full.PASS_SPAN", 24)
        Compiled.forget()
        yield
    Compiled.forget()


@pytest.fixture(scope="module")
def model(short_spans):
    """One layer compiles in half the time; states of two and more are in test_states_files.py and test_states_drafts.py. Its pool is so
    large that it seldom grows: programs are compiled for its size, too."""
    network = random_model("float64", num_hidden_layers=1)
    pool = prefill(network, TEXT[:40], config=config(network), room=ROOM).reader.pool
    pool.make_room(255)
    yield network


def config(model, draft="none", cache="int8", **changes) -> GenerationConfig:
    made = draft if draft == "none" else make_draft(draft, model)
    size = G if cache.startswith(("int8", "kivi")) else None
    return GenerationConfig(**dict(draft=made, cache=cache, group_size=size, num_speculative_tokens=3, max_new_tokens=12) | changes)


def process_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@jax.jit
def step(target, cache, token):
    logits, after = target(token[None, None], cache.lengths.total[:, None], cache)
    return logits[:, 0], after.commit(cache.lengths, jnp.ones(1, jnp.int32), wait_for=[])[0]


def one_by_one(model, prompt, tokens, cache):
    """Logits after each token, when the target is fed these tokens one at a time after a prompt, and the cache after them."""
    target = ViewedModel(model, BOTH_PLANES)
    engine = Engine(model, None, cache=cache, gamma=0, prompt_tokens=len(prompt), max_new_tokens=len(tokens))
    held, found = engine.read(prompt).cache, []
    for token in tokens:
        logits, held = step(target, held, jnp.int32(token))
        found.append(logits)
    return found, held


@pytest.mark.parametrize("cache", [CACHES[0], CACHES[1], *in_system(*(CACHES[i] for i in (2, 3, 4)))])
def test_extend_is_one_by_one_decoding_however_the_text_is_cut(model, cache):
    """Around every flush, in one call and in several."""
    start = 2 * G + 5
    state = prefill(model, TEXT[:start], config=config(model, cache=cache), room=ROOM)
    new = TEXT[start : start + 3 * G]
    found, straight = one_by_one(model, TEXT[:start], new, state.reader.cache)
    for cuts in ([], [1], [G - 5], [G - 6, G - 5, G - 4], [2, 3, 2 * G + 4]):
        after = state
        for begin, end in itertools.pairwise([0, *cuts, len(new)]):
            after = extend(after, new[begin:end])
            np.testing.assert_allclose(after.logits, found[end - 1], rtol=1e-12, atol=1e-12)
        assert after.cached == len(after) == start + len(new) and not after.pending
        assert after.cache.lengths.quantized.tolist() == straight.lengths.quantized.tolist()


@pytest.mark.parametrize("draft", [*DRAFTS, *in_system(*MORE_DRAFTS)])
def test_a_draft_goes_on_from_a_state_whatever_its_way(model, draft):
    """Tokens and acceptance are the same for a text that was read at once and in pieces, after a fork, and after a file."""
    settings = config(model, draft)
    state = prefill(model, TEXT[:60], config=settings, room=ROOM)
    at_once = extend(state, TEXT[60:92])
    in_pieces = extend(extend(extend(state, TEXT[60:61]), TEXT[61:68]), TEXT[68:92])
    first, second, third = (generate(model, each, config=settings) for each in (at_once, in_pieces, at_once.fork(2)[1]))
    assert first.token_ids == second.token_ids == third.token_ids
    assert first.stats.rows == second.stats.rows == third.stats.rows
    assert len(first.states[0]) == 104 and first.states[0].pending
    # What comes later does not depend on where generating stopped.
    longer = generate(model, at_once, config=dataclasses.replace(settings, max_new_tokens=24))
    assert first.token_ids[0] + generate(model, first.states[0], config=settings).token_ids[0] == longer.token_ids[0]


def test_generating_from_a_state_is_generating_from_its_prompt(model):
    settings = config(model, "quantspec", max_new_tokens=30, repetition_penalty=1.3, output_logprobs=True, top_logprobs=2)
    straight = generate(model, [TEXT[:50]], config=settings)
    state = prefill(model, TEXT[:50], config=settings)
    found = generate(model, [state], config=dataclasses.replace(settings, draft="auto", cache=None, group_size=None))
    assert found.token_ids == straight.token_ids
    np.testing.assert_allclose(found.logprobs, straight.logprobs, rtol=1e-12)
    assert found.stats.rows == straight.stats.rows
    pieces = stream(model, state, config=settings)
    assert [token for piece in pieces for token in piece.token_ids] == straight.token_ids[0]
    assert pieces.generation.states[0].tokens.tolist() == TEXT[:50] + straight.token_ids[0]


@pytest.mark.system
def test_rows_of_states_that_differ_in_length(model):
    """In one batch each row is as alone; pages are shared, and come back."""
    settings = config(model, "sparse", max_new_tokens=20)
    short = prefill(model, TEXT[:40], config=settings, room=ROOM)
    states = [short, extend(short, TEXT[40:75]), extend(short, TEXT[80:83]), short]
    together = generate(model, states, config=settings)
    for state, tokens, stats in zip(states, together.token_ids, together.stats.rows):
        alone = generate(model, state, config=settings)
        assert alone.token_ids[0] == tokens and alone.stats.rows[0] == stats
    pool = short.reader.pool
    assert set(states[1].pages[: len(short.pages)]) == set(short.pages)
    del together, alone, states, state
    gc.collect()
    assert pool.pages.reserved == len(short.pages)


def test_eos_within_accepted_drafts_is_pending(model):
    """The state holds what was emitted, and not the drafts after it."""
    settings = config(model, "quantspec", max_new_tokens=40)
    state = prefill(model, TEXT[:40], config=settings, room=ROOM)
    plain = generate(model, state, config=settings).token_ids[0]
    for eos in dict.fromkeys(plain[3:12]):
        ended = generate(model, state, config=dataclasses.replace(settings, eos_token_ids=(eos,)))
        after, new = ended.states[0], ended.token_ids[0]
        assert after.tokens.tolist() == TEXT[:40] + new and new[-1] == eos and after.cached == len(after) - 1
        again = generate(model, after, config=dataclasses.replace(settings, max_new_tokens=6))
        assert again.token_ids[0] == plain[len(new) : len(new) + 6]


def test_trim_goes_back_within_the_buffer_only(model):
    settings = config(model, "quantspec")
    state = prefill(model, TEXT[:40], config=settings, room=ROOM)
    longer = extend(state, TEXT[40:47])
    back = extend(longer.trim(41), TEXT[41:47])
    np.testing.assert_array_equal(back.logits, longer.logits)
    assert generate(model, back, config=settings).token_ids == generate(model, longer, config=settings).token_ids
    with pytest.raises(InputError, match="should be extended by at least one"):
        generate(model, longer.trim(41), config=settings)
    with pytest.raises(InputError, match="has 32 of them quantized, so it can be trimmed to 40 or more, not to 39"):
        longer.trim(39)
    evicting = prefill(model, TEXT[:40], config=config(model, cache=CACHES[3]))
    with pytest.raises(InputError, match="forgets what it held"):
        evicting.trim(39)


@pytest.mark.parametrize(
    "draft, cache",
    [
        *(("quantspec", "int8"), ("none", "h2o")),
        *in_system(("sparse", "int8"), ("snapkv", "full"), ("none", "kivi"), ("none", "streaming-llm")),
    ],
)
def test_a_state_in_a_file(model, tmp_path, draft, cache):
    """Before and after generating; what follows is the same, acceptance too."""
    settings = config(model, draft, cache)
    state = extend(prefill(model, TEXT[:40], config=settings, room=ROOM), TEXT[40:70])
    after = generate(model, state, config=settings).states[0]
    for each in (state, after):
        save_state(each, tmp_path / "state")
        loaded = load_state(tmp_path / "state", model, config=settings)
        assert repr(loaded) == repr(each)
        found, expected = (generate(model, one, config=settings) for one in (loaded, each))
        assert found.token_ids == expected.token_ids and found.stats.rows == expected.stats.rows


def test_a_file_is_for_the_same_model_cache_and_draft(model, tmp_path):
    settings = config(model, "quantspec")
    save_state(prefill(model, TEXT[:40], config=settings, room=ROOM), path := tmp_path / "state")
    for other, changed, message in (
        (random_model("float64", num_hidden_layers=1, seed=1), settings, "other weights;"),
        (random_model("float32", num_hidden_layers=1), settings, r"another dtype \(float64, here float32\)"),
        (model, dataclasses.replace(settings, scheme="paper"), r"another cache \(int8:scheme=int8_first, here int8:scheme=paper\)"),
        (model, config(model, "sparse"), r"another draft \(QuantSpecDraft"),
        (
            random_model("float64", num_hidden_layers=1, rope_parameters={"rope_type": "default", "rope_theta": 7.0}),
            settings,
            "another RoPE",
        ),
        (random_model("float64", num_hidden_layers=1, rms_norm_eps=1e-3), settings, r"other layers .*1e-05, here .*rms_norm_eps=0.001"),
    ):
        with pytest.raises(InputError, match=message):
            load_state(path, other, config=changed if other is model else dataclasses.replace(changed, draft="quantspec"))
    content, r = path.read_bytes(), np.random.default_rng(0)
    for i in range(200):
        at = int(r.integers(len(content) if i % 2 else 4000))
        changed = [content[:at], content[:at] + bytes([content[at] ^ int(r.integers(1, 256))]) + content[at + 1 :], content + b"0"][i % 3]
        path.write_bytes(changed)
        with pytest.raises(InputError):
            load_state(path, model, config=settings)


@pytest.mark.system
@pytest.mark.parametrize("draft", ["snapkv", "sparse"])
def test_states_grow_with_what_is_read(model, draft):
    """A state of little room is extended and goes on generating beyond it."""
    settings = config(model, draft, max_new_tokens=20)
    large = extend(prefill(model, TEXT[:20], config=settings), TEXT[20:150])
    small = prefill(model, TEXT[:20], config=settings, room=1)
    assert small.room.text < 150 < large.room.text
    small = extend(small, TEXT[20:150])
    assert generate(model, small, config=settings).token_ids == generate(model, large, config=settings).token_ids


@pytest.mark.parametrize(("draft", "cache"), [pytest.param("snapkv", "int8", marks=pytest.mark.system), ("none", "full")])
def test_states_grow_at_the_end_of_the_positions(draft, cache):
    """Where less can be generated than the state had room for."""
    network = random_model("float64", num_hidden_layers=1, max_position_embeddings=256)
    settings = config(network, draft, cache)
    large = extend(prefill(network, TEXT[:20], config=settings, room=ROOM), TEXT[20:] + TEXT[:50])
    small = prefill(network, TEXT[:20], config=settings, room=172)
    assert small.room.text < 220
    small = extend(small, TEXT[20:] + TEXT[:50])
    assert small.room == large.room
    assert generate(network, small, config=settings).token_ids == generate(network, large, config=settings).token_ids


@pytest.mark.system
@pytest.mark.parametrize("cache", ["int8", "full"])
def test_states_grow_where_other_numbers_of_tokens_are_read_together(model, monkeypatch, tmp_path, cache):
    """As those of a file that another version of this program has saved."""
    settings = config(model, cache=cache)
    expected = extend(prefill(model, TEXT[:20], config=settings), TEXT[20:150])
    for first, then in ((4, 64), (64, 4)):
        monkeypatch.setattr(rows_of_states, "TOGETHER", first)
        state = prefill(model, TEXT[:20], config=settings, room=1)
        monkeypatch.setattr(rows_of_states, "TOGETHER", then)
        state = extend(state, TEXT[20:150])
        save_state(state, tmp_path / "state")
        state = load_state(tmp_path / "state", model, config=settings)
        np.testing.assert_allclose(state.logits, expected.logits, atol=1e-12)


@pytest.mark.system
def test_memory_is_flat(model):
    """States that are made, forked, extended and dropped leave nothing: 2,100 of them, and as many that generate."""
    settings = config(model, "quantspec", max_new_tokens=3)
    state = prefill(model, TEXT[:40], config=settings, room=ROOM)
    pool, sizes, rounds = state.reader.pool, set(), 700
    for i in range(rounds):
        forks = [extend(fork, [i % 60, j]) for j, fork in enumerate(state.fork(3))]
        generate(model, forks, config=settings)
        if i > 10:
            sizes.add((len(jax.live_arrays()), pool.pages.size))
        if i in (50, rounds - 1):
            memory = process_bytes() - (memory if i > 50 else 0)
    del forks
    assert len(sizes) == 1 and pool.pages.reserved == len(state.pages)
    assert memory < 32 << 20, f"the process has grown by {memory} bytes"


@pytest.mark.parametrize("cache", ["int8", *in_system("full", "h2o:heavy=8,recent=8")])
def test_scores_of_continuations_are_those_of_one_by_one_decoding(model, cache):
    """A continuation is scored as if it were the only one, after a state without and with a pending token."""
    settings = config(model, cache=cache, max_new_tokens=2)
    state = prefill(model, TEXT[: 2 * G + 3], config=settings, room=ROOM)
    after = generate(model, state, config=settings).states[0]
    r = np.random.default_rng(3)
    continuations = [r.integers(0, 64, n).tolist() for n in (1, 20, 5, 1, 9, 3, 30, 2, 7, 11)]
    for each in (state, after):
        for ids, found in zip(continuations, score(each, continuations), strict=True):
            logits, _ = one_by_one(model, TEXT[: 2 * G + 3], [*each.tokens[2 * G + 3 :], *ids], each.reader.cache)
            first = state.logits if each is state else logits[1]
            of_tokens = [first, *logits[len(each) - 2 * G - 3 :]][: len(ids)]
            expected = [float(jax.nn.log_softmax(row)[0, token]) for row, token in zip(of_tokens, ids, strict=True)]
            np.testing.assert_allclose(found.logprobs, expected, rtol=1e-9)
            assert found.greedy == all(int(row.argmax()) == token for row, token in zip(of_tokens, ids))
    with pytest.raises(InputError, match="continuation 0 is empty"):
        score(state, [[]])


@pytest.mark.parametrize(
    "draft, cache",
    [
        ("none", "int8"),
        *in_system(("quantspec", "int8"), ("sparse", "int8"), ("none", "h2o:heavy=8,recent=8")),
    ],
)
def test_samples_of_a_prompt_are_rows_that_read_it_once(model, draft, cache):
    """Each draws for itself, its first token too, as a row alone with its key does; pages of the prompt are there once."""
    settings = config(model, draft, cache, max_new_tokens=20, ignore_eos=True, temperature=1.5, num_return_sequences=5)
    prompts, key = [TEXT[:60], TEXT[60:100]], jax.random.key(3)
    found = generate(model, prompts, config=settings, key=key)
    assert len({tuple(tokens) for tokens in found.token_ids}) == 10
    assert len({tokens[0] for tokens in found.token_ids[:5]}) > 1
    alone = dataclasses.replace(settings, num_return_sequences=1)
    plain = generate(model, prompts, config=alone, key=key)
    assert [found.token_ids[0], found.token_ids[5]] == plain.token_ids
    for prompt, row in ((0, 1), (0, 4), (1, 3)):
        own = sample_keys(prompt_keys(key, 2)[prompt], 5)[row]
        [result] = run_batch(model, [Request(prompts[prompt], alone, own)])
        assert result.token_ids == found.token_ids[5 * prompt + row] and result.stats == found.stats.rows[5 * prompt + row]
    if cache == "int8":
        pages = [set(state.pages[:5]) for state in found.states[:5]]
        assert all(of_row == pages[0] for of_row in pages)
    again = generate(model, found.states, config=alone, key=key)
    assert [len(tokens) for tokens in again.token_ids] == [20] * 10


@pytest.mark.parametrize("draft, cache", in_system(("quantspec", "int8"), ("snapkv", "full"), ("eagle3:model=random,window=9", "int8")))
def test_requests_that_share_a_prefix(model, draft, cache):
    """Neither neighbours nor order, batch size or what shares the prefix change a result; each prefix is read once. With fewer settings, as
    lines of a file: test_prefixes.py."""
    settings = config(model, draft, cache, temperature=0.8, ignore_eos=True)
    first, second, r = TEXT[:60], TEXT[60:118], np.random.default_rng(5)
    keys, requests = prompt_keys(jax.random.key(1), 6), []
    for i in range(6):
        prefix = (first, second, [])[i % 3]
        rest = r.integers(0, 64, 4 + 3 * (i % 4)).tolist() if i != 3 else []
        changed = dataclasses.replace(settings, max_new_tokens=5 + i, output_logprobs=True)
        requests.append(Request([*prefix, *(rest or TEXT[:9] * (not prefix))], changed, keys[i], prefix=len(prefix)))
    expected = [dataclasses.replace(result, index=i) for i, one in enumerate(requests) for result in run_batch(model, [one])]
    assert [len(result.token_ids) for result in expected] == [5 + i for i in range(6)] and all(result.logprobs for result in expected)
    for size, order in ((2, range(6)), (None, r.permutation(6))):
        run = run_batch(model, [requests[i] for i in order], batch_size=size)
        found = {int(order[result.index]): result for result in run}
        for i, result in enumerate(expected):
            np.testing.assert_allclose(found[i].logprobs, result.logprobs, rtol=1e-12)
        bare = lambda result, i: dataclasses.replace(result, index=i, logprobs=None, top_logprobs=None)
        assert [bare(found[i], i) for i in range(6)] == [bare(result, i) for i, result in enumerate(expected)] and run.stats.prompts == 6
    run = run_batch(model, [requests[i] for i in (0, 3, 2)], batch_size=2)
    assert len(list(run)) == 3 and run.stats.batch_size == 2  # of the two that share; one does not
    straight = extend(prefill(model, first, config=settings, room=9), requests[0].tokens[60:])
    alone = generate(model, straight, config=dataclasses.replace(requests[0].config, temperature=0.0))
    greedy = dataclasses.replace(requests[0], config=dataclasses.replace(requests[0].config, temperature=0.0))
    assert next(iter(run_batch(model, [greedy]))).token_ids == alone.token_ids[0]


@pytest.mark.system
def test_selected_samples_are_those_of_all(model):
    """A selection that begins within the samples of a prompt goes on with that prompt in the first row alone."""
    settings = config(model, temperature=1.5, num_return_sequences=2)
    prepared = prepare(model, [TEXT[:20], TEXT[20:50]], config=settings, key=jax.random.key(0))
    expected = generate(model, prepared).token_ids
    for selection in ([1, 2], [3, 0]):
        assert generate(model, prepared.select(selection)).token_ids == [expected[i] for i in selection]


def test_a_pool_whose_arrays_a_program_has_is_not_lost(model):
    """Another thread's state waits for it, and does not make a pool of its own."""
    settings = config(model)
    state = prefill(model, TEXT[:40], config=settings, room=ROOM)
    pool = state.reader.pool

    def read():
        with jax.enable_x64(True):
            return prefill(model, TEXT[:40], config=settings, room=ROOM)

    with ThreadPoolExecutor(1) as other:
        with pool.lock:
            kept, pool.groups = pool.groups, jax.tree.map(jnp.copy, pool.groups)
            for leaf in jax.tree.leaves(pool.groups):
                leaf.delete()
            reading = other.submit(read)
            with pytest.raises(TimeoutError):
                reading.result(timeout=0.5)
            pool.groups = kept
        assert reading.result(timeout=60).reader.pool is pool


def test_what_states_and_prefixes_are_refused_for(model):
    settings = config(model, "quantspec", max_new_tokens=4)
    state = prefill(model, TEXT[:40], config=settings)
    with pytest.raises(InputError, match="states are continued by `generate` and `stream`"):
        run_batch(model, prepare(model, [state], config=settings))
    for prefix in (-1, 6):
        with pytest.raises(InputError, match=f"prompt 0 has 5 tokens, and prefix {prefix} should be from 0 to that"):
            run_batch(model, [Request(TEXT[:5], settings, jax.random.key(0), prefix=prefix)])
    with pytest.raises(InputError, match="view is for requests without a prefix"):
        run_batch(model, [Request(TEXT[:5], settings, jax.random.key(0), prefix=2)], view=UPPER_PLANE)


def test_nothing_is_read_across_the_switch_to_long_rope_factors(model, monkeypatch):
    """Keys before it have the short factors: a state that has them is not extended over it, in no way."""
    monkeypatch.setattr(type(model.config), "short_length", 64)  # as of Phi-3
    settings = GenerationConfig(draft="none", cache="int8", group_size=G, max_new_tokens=4)
    state = prefill(model, TEXT[:60], config=settings)
    assert len(extend(state, TEXT[60:64])) == 64
    shared = Request(TEXT[:70], settings, jax.random.key(0), prefix=60)
    for read in (lambda: extend(state, TEXT[60:65]), lambda: score(state, [TEXT[60:65]]), lambda: run_batch(model, [shared])):
        with pytest.raises(InputError, match="cross the 64 tokens"):
            read()


@pytest.mark.system
def test_a_pool_that_grows_while_a_stream_waits(model):
    """What others read between two pieces changes nothing."""
    settings = config(model, "quantspec", max_new_tokens=24)
    state = prefill(model, TEXT[:40], config=settings, room=ROOM)
    expected, size = generate(model, state, config=settings).token_ids[0], state.reader.pool.pages.size
    pieces = stream(model, state, config=settings)
    found, others = list(next(pieces).token_ids), []
    while state.reader.pool.pages.size == size:
        others.append(prefill(model, TEXT, config=settings, room=ROOM))
    assert found + [token for piece in pieces for token in piece.token_ids] == expected


def test_memory_that_ends_while_a_pool_grows_costs_no_states(model, monkeypatch):
    state = prefill(model, TEXT[:40], config=config(model), room=ROOM)
    pool, expected = state.reader.pool, extend(state, TEXT[40:60]).logits
    gc.collect()
    size, reserved = pool.pages.size, pool.pages.reserved
    held = pool.reserve(pool.pages.free)
    pads = iter(range(5))  # of the first layer

    def limited(*arguments):
        if next(pads, None) is None:
            raise MemoryError
        return pad(*arguments)

    pad = jnp.pad
    monkeypatch.setattr(jnp, "pad", limited)
    with pytest.raises(MemoryError):
        extend(state, TEXT)
    monkeypatch.undo()
    del held
    gc.collect()
    assert (pool.pages.size, pool.pages.reserved, pool.lost) == (size, reserved, False)
    np.testing.assert_array_equal(extend(state, TEXT[40:60]).logits, expected)


@pytest.mark.system
def test_threads_take_turns(model):
    """Each gets what it gets alone, while the others make the pool grow."""
    settings = config(model, "quantspec", max_new_tokens=6)
    state = prefill(model, TEXT[:40], config=settings, room=ROOM)

    def ask(i: int) -> list[list[int]]:
        with jax.enable_x64(True):  # a setting of each thread
            made = [extend(fork, TEXT[40 : 57 + 4 * (i % 4)]) for fork in state.fork(4)]
            return generate(model, made, config=settings).token_ids

    alone, pages = [ask(i) for i in range(4)], state.reader.pool.pages
    held, size = state.reader.pool.reserve(pages.free - 6), pages.size
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(12))) == alone * 3
    assert held and pages.size > size


@pytest.mark.system
def test_states_whose_pages_an_interruption_has_lost_say_so(model, tmp_path):
    """The pool that all tests before share is lost, too."""
    settings = config(model, "quantspec")
    state = prefill(model, TEXT[:40], config=settings, room=ROOM)
    with interrupted_rounds():
        generate(model, state, config=settings)
    with pytest.raises(InputError, match="was lost when a run was interrupted"):
        generate(model, state, config=settings)
    for use in (lambda: save_state(state, tmp_path / "state"), lambda: extend(state, TEXT * 3), lambda: score(state, [TEXT * 3])):
        with pytest.raises(InputError, match="was lost when a run was interrupted"):
            use()
    again = prefill(model, TEXT[:40], config=settings, room=ROOM)
    assert len(generate(model, again, config=settings).token_ids[0]) == 12


@pytest.mark.system
def test_compiling_is_no_prefill():
    """Seconds of compiling are apart from those of reading, for samples of a prompt and for requests with a prefix."""
    model = random_model("float64", num_hidden_layers=1, intermediate_size=96)  # of which nothing is compiled
    first, again = (generate(model, [TEXT[:40]], config=config(model, num_return_sequences=2)).stats for _ in range(2))
    assert first.prefill_s < first.compile_s and again.compile_s == 0
    Compiled.forget()
    shared = [Request(TEXT[:50], config(model), jax.random.key(0), prefix=40)]
    for compiles in (True, False):
        run = run_batch(model, shared)
        assert len(list(run)) == 1
        assert run.stats.prefill_s < run.stats.compile_s if compiles else run.stats.compile_s == 0
