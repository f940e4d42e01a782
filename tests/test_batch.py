"""A batch that stays full: every row as if it were alone, whatever its neighbours, slot and batch size."""

import dataclasses
import functools
import gc
import itertools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems.batch import CONFIG, KEY, outcome, some_requests, with_settings
from runs import random_model, with_draft
from tiers import in_system

from qspec_jax import drafts
from qspec_jax.decoding import batch, prefill_groups, slots
from qspec_jax.decoding.batch import Request, run_batch
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.prefill import LAYER, PREFILL, START, Prefill
from qspec_jax.decoding.sampling import make_sampler, prompt_keys
from qspec_jax.decoding.state import RUNNING
from qspec_jax.decoding.text import first_stop
from qspec_jax.drafts.step_bytes import bytes_of
from qspec_jax.errors import InputError


@pytest.fixture(scope="module")
def draft(model):
    return drafts.quantspec(model)


def test_rows_are_as_alone(model, tokenizer, draft):
    requests = some_requests(7)
    whole = outcome(run_batch(model, with_draft(requests, draft), batch_size=3, tokenizer=tokenizer))
    assert [result.index for result in whole] == list(range(7))
    for request, result in zip(requests, whole):
        assert len(result.token_ids) == request.config.max_new_tokens and result.finish_reason == "length"
    for settings in ({"batch_size": 1}, {"batch_size": 3, "refill": False}):
        assert outcome(run_batch(model, with_draft(requests, draft), tokenizer=tokenizer, **settings)) == whole
    order = np.random.default_rng(1).permutation(7)
    shuffled = outcome(run_batch(model, with_draft([requests[i] for i in order], draft), batch_size=3, tokenizer=tokenizer))
    assert [dataclasses.replace(result, index=0) for result in shuffled] == [dataclasses.replace(whole[i], index=0) for i in order]


@pytest.mark.system
@pytest.mark.parametrize("name", ["quantspec", "none"])
def test_rows_are_those_of_generate(name, model, draft):
    config, draft = dataclasses.replace(CONFIG, draft=name, max_new_tokens=30, temperature=0.8), None if name == "none" else draft
    requests = [dataclasses.replace(request, config=config) for request in some_requests(6)]
    # Those that are compared take the places of others, in a batch of as many rows, which has the same program.
    results = outcome(run_batch(model, with_draft([*requests[3:], *requests[:3]], draft), batch_size=3))[3:]
    alone = generate(model, [request.tokens for request in requests[:3]], config=with_draft(config, draft), key=KEY)
    assert [result.token_ids for result in results] == alone.token_ids
    assert [result.stats for result in results] == alone.stats.rows


@pytest.mark.system
def test_every_slot_works_while_prompts_wait(model, draft):
    r = np.random.default_rng(0)
    lengths = np.exp(r.uniform(np.log(4), np.log(64), 24)).astype(int)
    requests = [Request([1, 2, 3], dataclasses.replace(CONFIG, max_new_tokens=int(n)), KEY) for n in lengths]
    full, fixed = (run_batch(model, with_draft(requests, draft), batch_size=4, refill=refill) for refill in (True, False))
    results = outcome(full)
    assert results == outcome(fixed)
    rounds = [result.stats.num_spec_steps for result in results]
    assert full.stats.busy_rounds == fixed.stats.busy_rounds == sum(rounds)
    assert fixed.stats.rounds == sum(max(rounds[i : i + 4]) for i in range(0, 24, 4))
    # As a queue with four servers: each prompt is begun when one is free.
    free = [0] * 4
    for count in rounds:
        free[free.index(min(free))] += count
    assert full.stats.rounds == max(free) < fixed.stats.rounds


def outcome_of(requests, model, draft):
    return outcome(run_batch(model, with_draft(requests, draft), batch_size=1))


@pytest.mark.system
def test_stop_strings_and_sequences(model, tokenizer, draft):
    requests = some_requests(8)
    plain = outcome(run_batch(model, with_draft(requests, draft), batch_size=3, tokenizer=tokenizer))
    stopped = []
    for i, (request, result) in enumerate(zip(requests, plain)):
        at = len(result.token_ids) // 2
        if i % 2:
            # Not at an edge of tokens: from the middle of one.
            stop = (tokenizer.decode(result.token_ids[at : at + 2])[1:],)
            stopped.append(with_settings(request, stop=("never said", *(s for s in stop if s))))
        else:
            stopped.append(with_settings(request, stop_token_ids=((4095, 4095, 4095), tuple(result.token_ids[at : at + 2]))))
    results = outcome(run_batch(model, with_draft(stopped, draft), batch_size=3, tokenizer=tokenizer))
    for request, result, before in zip(stopped, results, plain):
        n = len(result.token_ids)
        assert result.token_ids == before.token_ids[:n]
        if request.config.stop_token_ids:
            tail = request.config.stop_token_ids[1]
            ends = [i + len(tail) for i in range(len(before.token_ids)) if tuple(before.token_ids[i : i + len(tail)]) == tail]
            assert n == ends[0] and result.finish_reason == "stop"
        elif (cut := first_stop(before.text, request.config.stop)) is not None:
            assert result.finish_reason == "stop" and result.text == before.text[:cut]
            text = lambda count: tokenizer.decode(before.token_ids[:count], skip_special_tokens=True)  # noqa: B023
            assert first_stop(text(n), request.config.stop) == cut and first_stop(text(n - 1), request.config.stop) is None
    assert sum(result.finish_reason == "stop" for result in results) >= 6
    assert outcome(run_batch(model, with_draft(stopped, draft), batch_size=3, tokenizer=tokenizer, refill=False)) == results


@pytest.mark.system
def test_a_stop_sequence_is_found_across_rounds_and_not_in_the_prompt(model, draft):
    config = dataclasses.replace(CONFIG, max_new_tokens=30)
    request = Request([7, 8, 9], config, KEY)
    tokens = outcome_of([request], model, draft)[0].token_ids
    places = [(at, length) for length in (1, 2, 5, 9) for at in (0, 1, 3, 10)]
    stopped = [with_settings(request, stop_token_ids=(tuple(tokens[at : at + length]),)) for at, length in places]
    # The prompt's end and the first token are no match.
    *results, last = outcome_of([*stopped, with_settings(request, stop_token_ids=((9, tokens[0]),))], model, draft)
    for (at, length), found in zip(places, results):
        first = next(i for i in range(30) if tokens[i : i + length] == tokens[at : at + length])
        assert found.token_ids == tokens[: first + length] and found.finish_reason == "stop"
    assert last.token_ids == tokens and last.finish_reason == "length"


@pytest.mark.system
def test_a_first_token_that_ends_a_row(model, tokenizer, draft):
    """Its counts too are as if it were alone, though its neighbour has ended as well."""
    requests = [Request([3907], dataclasses.replace(CONFIG, max_new_tokens=new), KEY) for new in (20, 1, 20)]
    first = run_batch(model, with_draft(requests[:1], draft), tokenizer=tokenizer)
    piece = tokenizer.decode(outcome(first)[0].token_ids[:1])
    requests[0] = with_settings(requests[0], stop=(piece,))
    results = {size: outcome(run_batch(model, with_draft(requests, draft), batch_size=size, tokenizer=tokenizer)) for size in (1, 2)}
    assert results[1] == results[2] and results[1][0].stats.num_spec_steps == 0 and results[1][0].text == ""


@pytest.mark.parametrize("refill", [True, False])
@pytest.mark.parametrize("batch_size", [3, *in_system(1)])
def test_first_tokens_alone_need_no_round(refill, batch_size, model, draft):
    requests = [Request([i, 7], dataclasses.replace(CONFIG, max_new_tokens=1), KEY) for i in range(7)]
    results = run_batch(model, with_draft(requests, draft), batch_size=batch_size, refill=refill)
    assert [len(result.token_ids) for result in outcome(results)] == [1] * 7
    assert results.stats.prompts == 7 and results.stats.slot_rounds == 0 and results.stats.rates["busy_slots"] is None


def test_requests_that_come_by_an_iterator_and_a_run_that_is_left(model, draft):
    run = run_batch(model, with_draft(iter(some_requests(6)), draft), batch_size=3)
    next(iter(run))
    run.close()
    assert list(run) == [] and 1 <= run.stats.prompts < 6


class Late:
    """Ready this number of seconds from now."""

    def __init__(self, seconds: float):
        self.made = time.perf_counter()
        self.ready = self.made + seconds

    def block_until_ready(self) -> None:
        time.sleep(max(0, self.ready - time.perf_counter()))


@pytest.mark.parametrize("stop", [(), ("never said",)])
def test_seconds_are_all_that_pass_but_the_readers(stop, model, tokenizer, draft, monkeypatch):
    """As on a GPU, the device prefills while the host goes on, and rounds have ended when their call returns. Both are made to take long,
    and neither is taken for the other; with stop strings the host looks before a round, too."""
    requests = [Request([i, 7], dataclasses.replace(CONFIG, max_new_tokens=9, stop=stop), KEY) for i in range(6)]
    run = lambda: run_batch(model, with_draft(requests, draft), batch_size=3, tokenizer=tokenizer)
    outcome(run())
    rows, called = [], []

    class SlowDevice(slots.Slots):
        def _put(self, *args):
            super()._put(*args)
            rows.append(Late(0.4))
            self.newest = rows[-1]

    class SlowRounds(Engine):
        def rounds(self, *args):
            called.append(time.perf_counter())
            state = jax.block_until_ready(super().rounds(*args))
            rows[-1].block_until_ready()
            time.sleep(0.05)
            return state

    monkeypatch.setattr("qspec_jax.decoding.prepare.Engine", SlowRounds)
    monkeypatch.setattr(batch, "Slots", SlowDevice)
    results, read = run(), 0.0
    began = time.perf_counter()
    for _ in results:
        time.sleep(0.1)
        read += 0.1
    passed, stats = time.perf_counter() - began, results.stats
    assert stats.compile_s == 0 and 0.9 * (passed - read) < stats.prefill_s + stats.decode_s <= passed - read
    # Of three rows that are placed together two may be prefilled at once.
    assert stats.prefill_s >= 3 * 0.4 and 0 <= stats.decode_s - 0.05 * len(called) < 0.8
    assert len(rows) == 6 and any(rows[-1].made < at < rows[-1].ready for at in called) == (not stop)


@pytest.mark.system
@pytest.mark.parametrize("refill", [True, False])
def test_a_first_token_that_stops_a_row_in_a_slot_that_stood_empty(refill, model, tokenizer, draft, paged, monkeypatch):
    """The host alone knows that it is over: the device must run it no further, for its pages are another row's then."""
    r = np.random.default_rng(5)
    drawn = lambda tokens, new, **settings: Request(
        r.integers(0, 4096, tokens).tolist(),
        dataclasses.replace(CONFIG, max_new_tokens=new, stop=("never said",), **settings),
        KEY,
    )
    stops = Request([3907], dataclasses.replace(CONFIG, max_new_tokens=80), KEY)
    (first,) = run_batch(model, with_draft([with_settings(stops, max_new_tokens=1)], draft), tokenizer=tokenizer)
    stops = with_settings(stops, stop=(first.text,))
    long, last = drawn(5, 100), drawn(100, 27, temperature=1.0)
    requests = [long, drawn(30, 30), stops, last] if refill else [long, drawn(5, 4), drawn(9, 20), stops, last]
    expected = outcome(run_batch(model, with_draft(requests, draft), batch_size=1, tokenizer=tokenizer))
    if refill:  # requests wait for pages, so that a slot stands empty
        monkeypatch.setattr(slots.capacity, "enough_for", lambda rows, groups: slots.capacity.Capacity(2, 1 + max(groups) + 2))
    found = run_batch(model, with_draft(requests, draft), batch_size=2, tokenizer=tokenizer, refill=refill)
    assert outcome(found) == expected and found.stats.busy_rounds == sum(result.stats.num_spec_steps for result in expected)


def test_rows_that_ended_are_not_read(model, draft, monkeypatch):
    """What a slot without a prompt holds would be read in every round of the others."""
    seen, rounds = [], Engine.rounds

    def spied(self, state, *args):
        seen.append((np.asarray(state.status), np.asarray(state.cache.lengths.total)))
        return rounds(self, state, *args)

    monkeypatch.setattr(Engine, "rounds", spied)
    requests = [Request([1, 2, 3], dataclasses.replace(CONFIG, max_new_tokens=n), KEY) for n in (3, 60, 4, 50, 5)]
    for refill in (True, False):
        seen.clear()
        list(run_batch(model, with_draft(requests, draft), batch_size=4, refill=refill))
        assert any((status != RUNNING).any() for status, _ in seen)
        for status, held in seen:
            assert (held[status == RUNNING] > 0).all() and not held[status != RUNNING].any()


# By the number of layers, each of which is a part, and by how many tokens and layers rows may have to wait for: what is done first. For the
# first of three prompts nobody waits.
PARTS = {
    2: {1: "part part  part rounds part  rounds part", 3 * 64: "part part  part part  part rounds part"},
    3: {1: "part part part  part rounds part rounds part  rounds part", 4 * 64: "part part part  part part part  part rounds part"},
}


@pytest.mark.system
@pytest.mark.parametrize(
    ("method", "layers"),
    [
        ("sparse", 2),
        ("none", 3),
        ("streaming-llm:budget=24,sinks=2", 2),
        ("quantspec", 3),
    ],
)
def test_long_prompts_are_prefilled_in_parts(method, layers, monkeypatch):
    """With rounds of the other rows between, after as many parts as they may have to wait for: the same results."""
    model = random_model(jnp.float32, vocab_size=4096, num_hidden_layers=layers)
    config = dataclasses.replace(CONFIG, draft=method, cache="int8")
    short = lambda r: dataclasses.replace(config, max_new_tokens=r.config.max_new_tokens, num_speculative_tokens=2)
    requests = [dataclasses.replace(r, config=short(r)) for r in some_requests(7)]
    draft = drafts.make_draft(method, model)
    expected = outcome(run_batch(model, with_draft(requests, draft), batch_size=3))
    events, rounds, in_parts = [], Engine.rounds, Engine.prefill_in_parts

    def seen(*args, **settings):
        for ready in in_parts(*args, **settings):
            events.append("part")
            yield ready

    monkeypatch.setattr(Engine, "rounds", lambda *args: events.append("rounds") or rounds(*args))
    monkeypatch.setattr(Engine, "prefill_in_parts", seen)
    monkeypatch.setattr(prefill_groups, "PART", 64)
    for max_wait, first in PARTS[layers].items():
        events.clear()
        monkeypatch.setattr(slots, "MAX_WAIT", max_wait)
        run = run_batch(model, with_draft(requests, draft), batch_size=3)
        assert outcome(run) == expected
        assert events.count("part") == 7 * layers and events[: len(first.split())] == first.split()


def test_parts_share_their_angles_and_know_their_layers_without_rope():
    """What is held between parts has the cosines and sines of one layer: those of all layers of a long prompt take gigabytes. Layers with
    RoPE share a program, as do those without, and the programs made ahead are those that are run."""
    layers = dict(num_hidden_layers=4, no_rope_layers=[1, 0, 0, 1])
    model = random_model(jnp.float32, architecture="SmolLM3ForCausalLM", **layers)
    config = dataclasses.replace(CONFIG, draft="none", cache="int8", num_speculative_tokens=0, max_new_tokens=8, top_logprobs=3)
    engine = Engine.for_configs(model, None, [config], prompt_tokens=60)
    prompt = np.random.default_rng(0).integers(0, 64, 60).tolist()
    args = [prompt], make_sampler(config), prompt_keys(KEY, 1), make_limits(model, config)
    prefill = engine.prefill_of(*args, layers=2)
    _, angles, _ = prefill.first.shapes()
    assert [each.shape for each in jax.tree.leaves(angles)] == [(1, 64, 8)] * 2
    engine.compile_prefills([prefill])
    made = set(engine._executables)
    kinds = [variant[-1] for program, variant in made if program is LAYER]
    assert len(kinds) == 2 and prefill.kinds == (0, 1, 1, 0)
    *between, state = engine.prefill_in_parts(prefill)
    assert len(between) == 1 and set(engine._executables) == made
    whole, looked_at = engine.prefill(*args), lambda state: (state.tokens, state.logprobs, state.cache)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4), looked_at(state), looked_at(whole))


@pytest.mark.parametrize("results", [1, 6])
def test_a_run_that_is_over_holds_nothing_on_the_device(results, model, draft):
    """Also where it is ended early, and before Python looks for objects that refer to each other."""
    requests = some_requests(6)
    gc.collect()
    before, run = bytes_of(jax.live_arrays()), run_batch(model, with_draft(requests, draft), batch_size=3)
    gc.disable()
    try:
        assert len(list(itertools.islice(run, results))) == results
        run.close()
        assert bytes_of(jax.live_arrays()) - before < 10_000
    finally:
        gc.enable()


@pytest.mark.system
@pytest.mark.parametrize("method", ["none", "sparse"])
def test_short_prompts_are_prefilled_together(method, model, paged, monkeypatch):
    """Two at a time, if both are short and there are two slots: the same results, and lines begin in their order."""
    requests = some_requests(12)
    for i, request in enumerate(requests):
        # With a draft greedy ones alone, whose program is half as large.
        config = request.config if method == "none" else dataclasses.replace(CONFIG, max_new_tokens=request.config.max_new_tokens)
        config = dataclasses.replace(config, draft=method, cache="full" if method == "none" else "int8")
        requests[i] = dataclasses.replace(request, config=config)
    draft = drafts.make_draft(method, model)
    expected = outcome(run_batch(model, with_draft(requests, draft), batch_size=4))
    begun, run_in_parts = [], Prefill.run_in_parts

    def noted(self, executables):
        begun.append([tokens[:n].tolist() for tokens, n in zip(self.tokens, self.n)])
        return run_in_parts(self, executables)

    monkeypatch.setattr(Prefill, "run_in_parts", noted)
    monkeypatch.setattr(prefill_groups, "ROWS_PER_PREFILL", {"cpu": 2})
    monkeypatch.setattr(prefill_groups, "SHORT_PROMPT", 40)
    assert outcome(run_batch(model, with_draft(requests, draft), batch_size=4)) == expected
    assert [prompt for prompts in begun for prompt in prompts] == [request.tokens for request in requests]
    assert {len(prompts) for prompts in begun} == {1, 2}
    assert all(len(prompt) <= 40 for prompts in begun if len(prompts) == 2 for prompt in prompts)
    begun.clear()
    monkeypatch.setattr(
        prefill_groups, "MAX_ROOM", 2 * Engine.for_configs(model, draft, [r.config for r in requests], prompt_tokens=59).sizes.capacity - 1
    )
    next(iter(run_batch(model, with_draft(requests, draft), batch_size=4)))
    assert {len(prompts) for prompts in begun} == {1}


def test_programs_of_prefill_are_made_before_the_first_prompt_is_read(model, draft, monkeypatch):
    """Those for all lengths of prompts, each once."""
    requests = [Request([7] * length, dataclasses.replace(CONFIG, max_new_tokens=2), KEY) for length in (3, 70, 5)]
    made, compile_prefills = [], Engine.compile_prefills

    def seen(self, prefills, **others):
        compile_prefills(self, prefills, **others)
        made.append(list(self._executables))

    monkeypatch.setattr(Engine, "compile_prefills", seen)
    outcome(run_batch(model, with_draft(requests, draft), batch_size=1))
    assert [variant[0] for program, variant in made[0] if program is PREFILL] == [(1, 64), (1, 128)]
    assert [program for program, _ in made[0] if program is not PREFILL] == [START]


def test_parts_of_a_prompt_are_equal():
    for layers, tokens in itertools.product((1, 22, 28, 32, 61, 80), (100, 2048, 2560, 5120, 16384, 131072, 10**6)):
        found, most = prefill_groups.layers_at_once(layers, tokens), max(1, prefill_groups.PART // tokens)
        parts = -(-layers // found)
        assert found <= most and parts == -(-layers // most)  # no more parts than it takes
        assert layers - (parts - 1) * found > 0
    assert [prefill_groups.layers_at_once(layers, tokens) for layers, tokens in ((32, 2048), (32, 32768), (32, 2560), (61, 2560))] == [
        32,
        2,
        16,
        21,
    ]


def test_others_wait_until_a_share_of_the_rows_has_ended(model, draft, monkeypatch):
    r, seen, rounds = np.random.default_rng(0), [], Engine.rounds
    requests = [Request([1, 2, 3], dataclasses.replace(CONFIG, max_new_tokens=int(n)), KEY) for n in r.integers(4, 60, 16)]
    expected = outcome(run_batch(model, with_draft(requests, draft), batch_size=4))
    monkeypatch.setattr(slots, "REFILL_SHARE", 1 / 2)
    running = lambda state: int((np.asarray(state.status) == RUNNING).sum())

    def spied(self, state, *args):
        before = running(state)
        state = rounds(self, state, *args)
        seen.append((before, args[-1], before - running(state)))
        return state

    monkeypatch.setattr(Engine, "rounds", spied)
    run = run_batch(model, with_draft(requests, draft), batch_size=4)
    assert outcome(run) == expected
    assert seen[0][:2] == (4, 3) and seen[-1][1] == 1  # nobody waits any more
    full = [ended for before, least, ended in seen if (before, least) == (4, 3)]
    assert full and min(full) == 2 and run.stats.full_rounds > 0


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """What is done, a letter each: a prefill is prepared ahead (a) or begins (e), a row is put into its slot (p), rounds run (u), and the
    host sees the new tokens (o)."""
    events = []
    noted = lambda letter, method: lambda *args: events.append(letter) or method(*args)
    for letter, name in {"a": "prepare_prefill", "p": "replace", "u": "rounds"}.items():
        monkeypatch.setattr(Engine, name, noted(letter, getattr(Engine, name)))
    monkeypatch.setattr(Prefill, "run_in_parts", noted("e", Prefill.run_in_parts))
    start_poll = Engine.start_poll  # returns the function that fetches: that call is noted
    monkeypatch.setattr(Engine, "start_poll", lambda *args: noted("o", start_poll(*args)))
    return events


def test_the_next_prompt_is_prefilled_before_the_host_looks_who_has_ended(model, draft, events):
    """It is prepared before the rounds that a row ends in, and put into the slot after the look."""
    lengths = np.random.default_rng(0).integers(4, 60, 9)
    requests = [Request([1, 2, 3], dataclasses.replace(CONFIG, max_new_tokens=int(n)), KEY) for n in lengths]
    outcome(run_batch(model, with_draft(requests, draft), batch_size=2))
    # Where two rows end at once, a second prompt follows.
    assert re.fullmatch("(ep){2}(aueop(ep)?)+(uo)+", "".join(events)), events
    assert events.count("e") == 9


def test_what_was_prepared_ahead_is_left_where_too_few_rows_have_ended(model, events, monkeypatch):
    """Two short prompts are prepared for the two rows of four after which a segment ends; but in the first segment only one ends."""
    monkeypatch.setattr(prefill_groups, "ROWS_PER_PREFILL", {"cpu": 2})
    monkeypatch.setattr(slots, "REFILL_SHARE", 1 / 2)
    config = dataclasses.replace(CONFIG, draft="none", num_speculative_tokens=0, cache="full")
    requests = [Request([1 + i], dataclasses.replace(config, max_new_tokens=n), KEY) for i, n in enumerate((5, 100, 120, 120, 7, 8, 9))]
    found = outcome(run_batch(model, requests, batch_size=4))
    # The first alone takes the place of the one that ended; then two others are prepared, and begin before the look.
    assert re.match("(ep){2}auo(ep)+aueop", "".join(events)), events
    assert found == outcome(run_batch(model, requests, batch_size=4, refill=False))


@pytest.mark.parametrize(
    "second",
    [dict(max_new_tokens=65), dict(max_new_tokens=1, stop=("never said",)), dict(max_new_tokens=9, stop=("never said",))],
)
def test_a_row_that_was_prefilled_ahead_has_all_its_tokens(second, model, tokenizer):
    """Its first, which came before the last look, is among what is looked at: here as one token more than a segment has rounds."""
    settings = dict(draft="none", num_speculative_tokens=0, cache="full")
    requests = [
        Request([1, 2, 3], dataclasses.replace(CONFIG, **settings | {"max_new_tokens": 5}), KEY),
        Request([4, 5], dataclasses.replace(CONFIG, **settings | second), KEY),
        Request([6], dataclasses.replace(CONFIG, **settings | {"max_new_tokens": 100}), KEY),
    ]
    run = lambda **more: outcome(run_batch(model, requests, batch_size=1, tokenizer=tokenizer, **more))
    assert run() == run(refill=False)


def test_eos_ends_a_row(model, draft):
    requests = some_requests(6)
    plain = outcome(run_batch(model, with_draft(requests, draft), batch_size=3))
    eos = plain[0].token_ids[len(plain[0].token_ids) // 2]
    ended = [dataclasses.replace(r, config=dataclasses.replace(r.config, ignore_eos=False, eos_token_ids=(eos,))) for r in requests]
    for result, before in zip(outcome(run_batch(model, with_draft(ended, draft), batch_size=3)), plain):
        n = before.token_ids.index(eos) + 1 if eos in before.token_ids else len(before.token_ids)
        assert result.token_ids == before.token_ids[:n] and result.finish_reason == ("eos" if eos in before.token_ids else "length")


def test_what_is_refused(model, draft):
    config = dataclasses.replace(CONFIG, max_new_tokens=30)
    request = Request([1], config, KEY)
    other = dataclasses.replace(request, config=dataclasses.replace(config, group_size=16))
    for requests, settings, named in (
        ([request], {"batch_size": 0}, "batch size 0"),
        ([], {}, "at least one"),
        ([request, other], {}, "same group_size"),
        ([with_settings(request, stop=("x",))], {}, "need a tokenizer"),
        ([dataclasses.replace(request, tokens=[])], {}, "empty"),
        ([dataclasses.replace(request, tokens=[1] * 200)], {}, "positions"),
    ):
        with pytest.raises(InputError, match=named):
            run_batch(model, with_draft(requests, draft), **settings)
