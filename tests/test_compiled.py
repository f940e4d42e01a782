"""What compiles once, and that the compiled decode loop copies, converts and transposes nothing of the cache's size."""

import dataclasses
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding
from loops import faults
from runs import random_model, random_prompts, with_draft
from tiers import in_system

from qspec_jax.caches.full import FullCache
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding import compiled, round
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.prefill import PREFILL
from qspec_jax.decoding.programs import DECODE
from qspec_jax.drafts import quantspec
from qspec_jax.models.prompts import CHUNK_TOKENS, bucket, equal_parts

# Buckets ---------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 24))
def test_a_bucket_wastes_little(tokens):
    size = bucket(tokens)
    assert size % 64 == 0
    assert 0 <= size - tokens <= tokens // 4 + 63
    assert bucket(size) == size
    assert bucket(tokens + 1) >= size


@pytest.mark.parametrize("tokens", [64, 100, 4096, 5000, 1 << 20])
def test_few_buckets_to_an_octave(tokens):
    sizes = {bucket(n) for n in range(tokens + 1, 2 * tokens + 1, max(1, tokens // 4096))}
    assert len(sizes) <= 5
    # Prefill reads all weights for every chunk.
    chunks = {size: size // equal_parts(size, CHUNK_TOKENS) for size in sizes}
    assert all(size % chunk == 0 and min(size, CHUNK_TOKENS // 2) <= chunk <= CHUNK_TOKENS for size, chunk in chunks.items())


# Executables -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="tests lower in one context there, see sharing.py")
def test_programs_that_threads_compile_share_no_context_of_mlir():
    double, contexts = Compiled(lambda x: 2 * x), []
    for size in range(3):
        jnp.zeros(size) + size  # lowered in a context of its own, or of other such operations
        double.lowered(jnp.zeros(size))
        contexts += [jax.jit(lambda x: x).lower(0.0).compiler_ir().context]
        contexts += [program.lowered.compiler_ir().context for program in double.programs.values()][-1:]
    assert len(set(map(id, contexts))) == len(contexts)


@pytest.fixture
def compilations():
    """Everything that XLA compiles from here on, by the seconds it took."""
    seen = []

    def listen(event: str, seconds: float, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_threads_compile_a_program_once():
    traced = []
    program = Compiled(lambda x: traced.append(x) or x + 1)
    assert program.shapes(jnp.ones(3)).shape == (3,)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: program.compile(jnp.ones(3)), range(8)))
    assert len(traced) == 1 and len({id(executable) for executable, _ in found}) == 1
    assert any(seconds > 0 for _, seconds in found) and program.compile(jnp.ones(3))[1] == 0


def test_waiting_for_a_thread_that_compiles_counts_as_compiling():
    program, x = Compiled(lambda x: x + 1), jnp.ones(3)
    compile_lowered, (one,) = program.lowered(x), program.programs.values()
    with ThreadPoolExecutor() as pool:
        with one.lock:
            waiting = pool.submit(compile_lowered)
            time.sleep(0.2)
            one.executable = one.lowered.compile()
        assert waiting.result()[1] > 0.1


def test_what_is_traced_may_come_to_a_program_that_another_thread_compiles():
    inner, asked = Compiled(lambda x: 2 * x), threading.Event()
    shape = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=jnp.ones(3).sharding)

    def function(x):
        asked.set()
        time.sleep(0.3)  # the other thread is waiting by now
        return inner.compile(shape)[1] + x

    def other():
        asked.wait(10)
        inner.compile(jnp.ones(3))

    work = Compiled(function).compile, other
    threads = [threading.Thread(target=target, args=args, daemon=True) for target, args in zip(work, ((jnp.ones(3),), ()))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def test_a_shape_without_a_place_is_that_of_an_array_on_the_default_device(monkeypatch):
    doubled, x = Compiled(lambda x: 2 * x), jnp.ones(3)
    for each in (x, jax.ShapeDtypeStruct(x.shape, x.dtype)):
        doubled.compile(each)
    assert len(doubled.programs) == 1
    other = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")  # which any second device would do for
    monkeypatch.setattr(compiled, "_usual_place", lambda: other)
    doubled.compile(jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert len(doubled.programs) == 2


def test_few_traces_are_kept():
    program = Compiled(lambda x: x + 1)
    for n in range(compiled.MIN_PROGRAMS + 3):
        program.shapes(jnp.ones(n))
    kept = [one for one in program.programs.values() if one.traced is not None]
    assert len(kept) == compiled.MIN_PROGRAMS and program.shapes(jnp.ones(0)).shape == (0,)


@pytest.mark.parametrize(("lengths", "vocabulary"), [((1, 64), 61), *in_system(((2, 63), 59))])
def test_prompts_of_a_bucket_compile_once(compilations, lengths, vocabulary):
    model = random_model(jnp.float32, vocab_size=vocabulary, num_hidden_layers=1)  # shapes that no other test has
    drafts = {"quantspec": quantspec(model)}

    def run(length: int, key: int = 0, **settings):
        usual = {"draft": "quantspec", "max_new_tokens": 5, "group_size": 4, "eos_token_ids": (3,), "temperature": 1.0}
        config = GenerationConfig(**(usual | settings))
        before = len(PREFILL.programs), len(DECODE.programs), len(compilations)
        out = generate(
            model, random_prompts([length], vocabulary), config=with_draft(config, drafts.get(config.draft)), key=jax.random.key(key)
        )
        grown = len(PREFILL.programs) - before[0], len(DECODE.programs) - before[1]
        return grown, out.stats.compile_s, len(compilations) - before[2]

    grown, seconds, made = run(7)
    assert grown == (1, 1) and seconds > 0 and made >= 2
    for length in lengths:
        for settings in ({}, {"max_new_tokens": 64}, {"max_new_tokens": 1}, {"temperature": 0.3}, {"eos_token_ids": (5,)}):
            assert run(length, length, **settings) == ((0, 0), 0.0, 0), (length, settings)
    if vocabulary == 59:  # beyond a bucket, by the method that compiles fastest
        plain = {"draft": "none"}
        assert run(64, **plain)[0] == run(65, **plain)[0] == run(64, max_new_tokens=65, **plain)[0] == (1, 1)
        assert run(63, **plain) == ((0, 0), 0.0, 0)


def test_lists_of_settings_compile_once(compilations):
    model = random_model(jnp.float32, vocab_size=67, num_hidden_layers=1)  # shapes that no other test has

    def run(**settings):
        config = GenerationConfig(max_new_tokens=5, draft="none", cache="int8", group_size=4, **settings)
        before = len(compilations)
        out = generate(model, random_prompts([7], 67), config=config)
        assert [len(place) for place in out.top_logprobs[0]] == [config.top_logprobs] * len(out.token_ids[0])
        return len(compilations) - before

    assert run(banned_token_ids=(1,), stop_token_ids=((2,),), top_logprobs=1, ignore_eos=True)
    few = dict(banned_token_ids=(1, 2, 3), logit_bias={4: -1.0}, stop_token_ids=((2, 3, 4), (5,)), top_logprobs=2, eos_token_ids=(3, 5))
    assert run(**few) == 0
    assert run(**few | {"top_logprobs": 8, "banned_token_ids": tuple(range(10, 17)), "stop_token_ids": ((7,) * 8,) * 8}) == 0
    engine = Engine.for_configs(model, None, [GenerationConfig(draft="none", top_logprobs=67)], prompt_tokens=1)
    assert engine.sizes.logprobs == 67  # no more than the vocabulary


# What is kept ----------------------------------------------------------------------------------------------------------


def test_the_programs_used_longest_ago_are_dropped(monkeypatch, caplog):
    monkeypatch.setattr(compiled, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(compiled, "_too_many_maps", lambda: False)
    Compiled.forget()
    one, two = Compiled(lambda x: x + 1), Compiled(lambda x: x * 2)
    live = lambda: len(jax.devices()[0].client.live_executables())
    shapes = [jax.ShapeDtypeStruct((n,), jnp.float32, sharding=jnp.zeros(()).sharding) for n in range(1, 6)]
    x = jnp.ones(1)
    before = live()
    seconds = lambda program, i: program.compile(shapes[i])[1]
    assert all(seconds(program, 0) for program in (one, two)) and seconds(one, 1) and live() == before + 3
    assert seconds(one, 0) == 0.0 and not caplog.records  # now the only one of `two` is the oldest
    running, _ = two.compile(shapes[0])
    assert seconds(two, 1) and (len(one.programs), len(two.programs)) == (1, 2)  # of `one` the second went
    assert "is dropped, 3 are kept; it is compiled again when it is needed" in caplog.text
    assert live() == before + 3 and seconds(one, 1) > 0 and seconds(two, 1) == 0.0
    assert np.array_equal(running(x), [2.0])
    monkeypatch.setattr(compiled, "MIN_PROGRAMS", 1)
    monkeypatch.setattr(compiled, "_too_many_maps", lambda: True)
    del running
    assert seconds(two, 2) and (len(one.programs), len(two.programs)) == (0, 1) and live() == before + 1


def test_a_program_that_cannot_be_compiled_is_not_kept():
    bad = Compiled(lambda x: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            bad.compile(jnp.ones(3))
    assert not bad.programs


def test_pieces_of_mapped_memory_are_counted(monkeypatch, tmp_path):
    for lines, most, expected in ((3, 6, False), (4, 7, True)):
        (tmp_path / "maps").write_text("x\n" * lines)
        (tmp_path / "most").write_text(f"{most}\n")
        monkeypatch.setattr(compiled, "_MAPS", tmp_path / "maps")
        monkeypatch.setattr(compiled, "_MAX_MAPS", tmp_path / "most")
        assert compiled._too_many_maps() == expected
    (tmp_path / "maps").unlink()
    assert not compiled._too_many_maps()  # nobody tells


# The loop --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "batch", "gamma"),
    [
        *(("int8", 1, 4), ("full", 3, 4)),
        *in_system(("int8", 3, 0), ("int8", 1, 0), ("int8", 3, 4), ("full", 1, 0), ("full", 1, 4), ("full", 3, 0)),
    ],
)
def test_the_loop_makes_nothing_of_cache_size(kind, batch, gamma):
    assert faults(kind, batch, gamma) == []


@pytest.mark.system
def test_nor_does_it_when_it_samples():
    assert faults("int8", 1, 4, temperature=1.0) == []


@pytest.mark.system
def test_nor_does_it_when_it_observes():
    """The second reader of the cache, too, has read it before it is flushed."""
    assert faults("int8", 1, 3, draft="sparse:budget=0.03") == []


@pytest.mark.system
@pytest.mark.parametrize("draft", ["snapkv:budget=32768", "streaming-llm:budget=32768,cache=int8"])
def test_nor_of_a_drafts_own_cache(draft):
    """Half as many tokens as the target's cache has room for; smaller arrays count as large here, and are none of the cache's."""
    assert [fault for fault in faults("int8", 2, 3, draft=draft) if re.search(r",327\d\d,64]|bytes", fault)] == []


def test_a_flush_that_does_not_wait_for_all_readers_is_seen(monkeypatch):
    commit = HierarchicalCache.commit
    monkeypatch.setattr(HierarchicalCache, "commit", lambda self, *args, wait_for: commit(self, *args, wait_for=wait_for[:1]))
    assert any("copy" in fault for fault in faults("int8", 1, 3, draft="sparse:budget=0.03"))


def test_a_flush_waits_for_one_number_of_each_row():
    """To test all numbers of what XLA knows, such as the masses of an empty cache, took it seconds. Nothing is there to wait for where the
    cache has no room for a group."""
    model = random_model("float32", num_hidden_layers=1)
    cache = CacheConfig("full").empty(model.config, batch=2, capacity=64, num_speculative_tokens=3, dtype=model.dtype)
    total = lambda mass: cache.commit(cache.lengths, jnp.array([2, 3]), wait_for=[mass])[0].lengths.total
    mass = jnp.zeros((2, 2, 3, 64))
    readers = [e.primitive.name for e in jax.make_jaxpr(total)(mass).eqns if any(x.aval.size == mass.size for x in e.invars)]
    assert readers[0] == "reshape" and not {"lt", "reduce_or"} & set(readers), readers
    # As it would not be without waiting for them: masses are never negative.
    assert total(mass).tolist() == [2, 3] and total(mass.at[1].add(-1)).tolist() == [2, 0]
    assert total(mass[..., :0]).tolist() == [2, 3]


def test_a_cache_that_is_not_donated_is_seen():
    assert any("given back" in fault for fault in faults("int8", 1, 0, donate=False))


@pytest.mark.system
def test_a_loop_that_asks_before_each_draft_is_seen(monkeypatch):
    known = round.current_round
    monkeypatch.setattr(round, "current_round", lambda *args: dataclasses.replace(known(*args), varies=True))
    assert faults("int8", 1, 3) == ["no loop of 3 trips"]


@pytest.mark.parametrize(("kind", "cache"), [("int8", HierarchicalCache), *in_system(("full", FullCache))])
def test_a_cache_that_is_moved_is_seen(monkeypatch, kind, cache):
    """Planted: every round moves all that is cached by one place."""
    flush = cache.flush
    roll = lambda layers: jax.tree.map(lambda x: jnp.roll(x, 1, 2), layers)
    monkeypatch.setattr(cache, "flush", lambda self: flush(dataclasses.replace(self, layers=roll(self.layers))))
    assert faults(kind, 1, 0)
