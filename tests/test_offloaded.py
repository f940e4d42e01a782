"""Caches with a part in host memory: every token, and every code, as with all of it on the device."""

import dataclasses
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import hf_config, write_checkpoint
from gpus import gpu
from runs import prepared, random_model, random_prompts, run_rounds, with_draft
from tiers import in_system

from qspec_jax.bench.architectures import random_int4
from qspec_jax.caches import host_memory
from qspec_jax.caches.host_memory import in_host
from qspec_jax.caches.offloaded import OffloadedCache
from qspec_jax.caches.prefill import embedded, through_layers
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.decoding import prefill_groups, slots
from qspec_jax.decoding.batch import Request, run_batch
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.prefill import BEGIN, END, START
from qspec_jax.decoding.sampling import make_sampler, prompt_keys
from qspec_jax.drafts import make_draft
from qspec_jax.errors import InputError
from qspec_jax.models.sharding import model_mesh

CONFIG = GenerationConfig(draft="quantspec", max_new_tokens=30, cache="int8", group_size=8, ignore_eos=True, num_speculative_tokens=3)
PROMPTS = random_prompts([41, 20, 7])


def test_many_rows_are_written_in_a_loop(monkeypatch):
    """XLA takes minutes to compile a write for each row of each layer. Some trips write several rows, and the last fewer."""
    monkeypatch.setattr(host_memory, "ROWS_AT_ONCE", 2)
    held, new = np.zeros((5, 2, 9, 3), np.float32), np.random.default_rng(0).standard_normal((5, 2, 4, 3)).astype(np.float32)
    at = jnp.array([0, 5, 2, 1, 3], jnp.int32)
    there = jax.device_put(held, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    program = jax.jit(host_memory.written, donate_argnums=0).lower(there, new, at)
    assert "stablehlo.while" in program.as_text()
    compiled = program.compile()
    assert not re.search(r"f32\[5,2,9,3\]\S* copy\(", compiled.as_text()), "what is held is copied"
    found = compiled(there, new, at)
    for b, start in enumerate(at):
        held[b, :, start : start + 4] = new[b]
    np.testing.assert_array_equal(found, held)
    assert in_host(found)


def offloaded(config: GenerationConfig) -> GenerationConfig:
    return dataclasses.replace(config, cache="int8:host=lower")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint with the random models' vocabulary."""
    config = hf_config(num_hidden_layers=1, hidden_size=32, max_position_embeddings=256)
    return write_checkpoint(tmp_path_factory.mktemp("small"), config)


@pytest.mark.parametrize("temperature", [0.0, *in_system(0.8)])
def test_tokens_and_codes_are_those_on_the_device(temperature):
    with jax.enable_x64(True):
        model = random_model("float64", num_hidden_layers=1)
        config = dataclasses.replace(CONFIG, draft="sparse:budget=0.3,min_groups=2,weight_bits=16", temperature=temperature)
        states = []
        for each in (config, offloaded(config)):
            state, step, _ = prepared(model, PROMPTS, each, draft=make_draft(each.draft, model))
            while (np.asarray(state.status) == 0).any():
                state = step(state)
            states.append(state)
        one, other = states
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.counts.accepted, other.counts.accepted)
        assert (np.asarray(one.counts.flushes) >= 3).all()
        for mine, theirs in zip(one.cache.layers, other.cache.layers):
            for here, there in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                assert there.lower.sharding.memory_kind == "pinned_host"
                assert {x.sharding.memory_kind for x in (there.upper, there.scale, there.zero)} == {here.upper.sharding.memory_kind}
                for row, quantized in enumerate(np.asarray(one.cache.lengths.quantized) // 8):
                    for name in ("upper", "lower", "scale", "zero"):
                        pair = (np.asarray(getattr(planes, name))[row, :, :quantized] for planes in (here, there))
                        np.testing.assert_array_equal(*pair)


@pytest.mark.system
@pytest.mark.parametrize(
    ("cache", "draft"),
    [
        ("full:host=all", "quantspec:weight_bits=16"),  # whose steps read the target's cache
        ("full:host=all,resident=0.5", "retrieval:budget=44,chunk=2"),  # which looks tokens up in it
        ("int8:host=lower,resident=0.5", "none"),
        ("int8:host=all", "quantspec:weight_bits=16"),  # which copies the upper plane
        ("int8:host=all,resident=0.5", "retrieval:budget=44,chunk=2"),
        ("int8:host=lower", "triforce:model={small},middle=(retrieval:budget=44,chunk=2)"),
        ("int8:host=all", "streaming-llm:budget=20,sinks=3"),
    ],
)
def test_others_and_layers_that_are_resident(cache, draft, small):
    with jax.enable_x64(True):
        model = random_model("float64")
        config = dataclasses.replace(CONFIG, draft=draft.format(small=small), num_speculative_tokens=0 if draft == "none" else 3)
        here, there = (run_rounds(model, PROMPTS, dataclasses.replace(config, cache=c)) for c in (cache.partition(":")[0], cache))
    assert here.tokens == there.tokens
    assert [each.accepted.tolist() for each in here.rounds] == [each.accepted.tolist() for each in there.rounds]


@pytest.mark.system
def test_streaming_llm_reads_no_old_tokens_in_a_round(monkeypatch):
    """It has its sinks by itself: to look them up in the target's cache would copy whole layers to the device, twice in each round."""
    draft = make_draft("streaming-llm:budget=20,sinks=3", model := random_model("float32", num_hidden_layers=1))
    config = dataclasses.replace(CONFIG, draft="streaming-llm", cache="int8:host=all")
    state, step, _ = prepared(model, PROMPTS, config, draft=draft)
    monkeypatch.setattr(OffloadedCache, "whole_layer", lambda *args: pytest.fail("a layer was copied whole"))
    step(state)


@pytest.mark.system
def test_a_row_that_is_full_is_not_touched_by_another_s_flush():
    """What is written for a row that is not due goes behind its last group, also where it has no room for another."""
    model = random_model("float32", num_hidden_layers=1)
    # Of four groups of a row, the first has all when the second flushes.
    prompts = random_prompts([64, 38])
    config = dataclasses.replace(CONFIG, draft="none", num_speculative_tokens=0, max_new_tokens=64, group_size=24)
    assert run_rounds(model, prompts, offloaded(config)).tokens == run_rounds(model, prompts, config).tokens


@pytest.mark.system
def test_recent_tokens_are_those_that_the_cache_holds():
    """At every place of a group, just after a flush too, and for more tokens than the buffer is sure to hold."""
    with jax.enable_x64(True):
        model = random_model("float64")
        state, step, _ = prepared(model, PROMPTS, dataclasses.replace(CONFIG, draft="none", num_speculative_tokens=0))
        both = jax.jit(lambda cache, positions: (cache.recent_tokens(1, positions), cache.tokens(1, positions)))
        flushes = 0
        while (np.asarray(state.status) == 0).all():
            for T in (1, 8, 12):
                positions = (jnp.maximum(state.cache.lengths.total, T) - T)[:, None, None] + jnp.arange(T)
                there = np.asarray(positions < state.cache.lengths.total[:, None, None])[:, 0]
                for found, expected in zip(*both(state.cache, positions)):
                    np.testing.assert_array_equal(np.swapaxes(found, 1, 2)[there], np.swapaxes(expected, 1, 2)[there])
            state = step(state)
            flushes += int(np.asarray(state.cache.lengths.buffered == 8).any())
        assert flushes > 3


@pytest.mark.system
def test_a_cache_without_room_for_a_group():
    model = random_model("float32", num_hidden_layers=1)
    config = dataclasses.replace(CONFIG, draft="quantspec:weight_bits=16", group_size=512)
    prompts = [prompt[:12] for prompt in PROMPTS]
    assert run_rounds(model, prompts, offloaded(config)).tokens == run_rounds(model, prompts, config).tokens


@pytest.mark.parametrize(("resident", "at_once"), [(0, 2), (0.34, 0)])  # the first layer of six is resident, or not
def test_copies_wait_for_the_queries_of_an_earlier_layer(resident, at_once):
    """Or XLA would begin with all of them, and hold as much on the device."""
    model, tokens = random_model("float32", num_hidden_layers=6), jnp.zeros((1, 1), jnp.int32)
    sizes = dict(batch=1, capacity=8, num_speculative_tokens=0, dtype=model.dtype)
    cache = CacheConfig.parse(f"full:host=all,resident={resident}").empty(model.config, **sizes)
    equations = jax.make_jaxpr(lambda cache: model(tokens, tokens, cache))(cache).eqns
    made_by = {out: equation for equation in equations for out in equation.outvars}
    copied = [e.invars[0] for e in equations if e.primitive.name == "device_put" and in_host(e.invars[0].aval)]
    assert len(copied) == 2 * sum(in_host(layer.keys) for layer in cache.layers)
    waiting = [made_by[x] for x in copied if x in made_by]
    assert len(copied) - len(waiting) == at_once
    assert {each.primitive.name for each in waiting} == {"optimization_barrier"}
    queries = [each.invars[0] for each in waiting]
    assert len(set(queries)) == len(queries) / 2 and all(x.aval.shape == (1, 1, 128) for x in queries)


def test_groups_are_written_as_the_cache_is_laid_out():
    """Or XLA lays the cache out as the codes that it has just made, and turns all of it round in each round: 34 GB at 512k tokens."""
    model = random_model("float32", num_hidden_layers=2)
    sizes = dict(batch=1, capacity=256, num_speculative_tokens=4, dtype=model.dtype)
    cache = dataclasses.replace(CacheConfig.parse("int8:host=lower"), group_size=32).empty(model.config, **sizes)
    jaxpr = jax.make_jaxpr(lambda cache: cache.flushed_layers(jnp.array([True])))(cache)
    (loop,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "while"]
    constrained = [e for e in loop.params["body_jaxpr"].eqns if e.primitive.name == "layout_constraint"]
    assert len(constrained) == len(jax.tree.leaves([(layer.keys, layer.values) for layer in cache.layers]))
    assert all(e.params["layout"].major_to_minor == tuple(range(e.invars[0].aval.ndim)) for e in constrained)


def test_prefill_holds_the_queries_of_one_layer():
    """After a layer only its last ones are left. Where memory was short XLA kept those of all tokens and layers to the end, 35 GiB. What is
    attended takes the place of all: so the last ones are taken before, or XLA would copy all to take them afterwards."""
    model = random_model("float32", num_hidden_layers=3)
    sizes = dict(batch=1, capacity=64, num_speculative_tokens=0, dtype=model.dtype)
    cache, tokens, n = CacheConfig.parse("full:host=all").empty(model.config, **sizes), jnp.zeros((1, 64), jnp.int32), jnp.array([64])

    def read(tokens):
        x, angles = embedded(model, tokens, n)
        return through_layers(model.layers, angles, x, n, cache, num_queries=2)

    jaxpr = jax.make_jaxpr(read)(tokens)
    made_by = {id(out): equation for equation in jaxpr.eqns for out in equation.outvars}
    queries = jaxpr.jaxpr.outvars[-3:]
    all_queries = (1, 64, *queries[0].aval.shape[2:])
    assert [x.aval.shape for x in queries] == [(1, 2, *all_queries[2:])] * 3
    for x in queries:
        while made_by[id(x)].primitive.name == "slice":
            (x,) = made_by[id(x)].invars
        barrier = made_by[id(x)]
        assert barrier.primitive.name == "optimization_barrier"
        (attended,) = [out for out in barrier.outvars if out.aval.shape == all_queries]
        (attention,) = [equation for equation in jaxpr.eqns if attended in equation.invars]
        assert attention.primitive.name in ("while", "scan")


@pytest.mark.parametrize(
    ("cache", "draft", "resident"),
    [
        *(("full:host=all", "retrieval:budget=64", 0), ("int8:host=lower", "sparse", 0.5)),
        *in_system(
            ("full:host=all", "retrieval:budget=64", 0.5),
            ("int8:host=lower", "sparse", 0),
            *(("int8:host=all", draft, share) for draft in ("snapkv:budget=64", "streaming-llm:budget=64,sinks=0") for share in (0, 0.5)),
        ),
    ],
)
def test_a_draft_begins_with_one_layer_at_a_time(cache, draft, resident):
    """A copy waits for a result of the layer copied before, which is used after the wait: XLA drops the wait for what is not
    used. Layers in host memory share a program, as do those on the device."""
    model = random_model("float32", num_hidden_layers=4)
    config = GenerationConfig(cache=f"{cache},resident={resident}", draft=draft, max_new_tokens=8, group_size=32)
    engine = Engine.for_configs(model, make_draft(draft, model), [config], prompt_tokens=256)
    keys = prompt_keys(jax.random.key(0), 1)
    prefill = engine.prefill_of(random_prompts([200]), make_sampler(config), keys, make_limits(model, config))
    begin, *parts, end, start = prefill.calls()
    assert (begin.program, end.program, start.program) == (BEGIN, END, START)
    assert len(parts) == (2 if resident else 1)
    Compiled.forget()  # so that the one program that is held is the one traced here
    end.shapes()
    (program,) = END.programs.values()
    jaxpr = program.traced.jaxpr.jaxpr
    waits = [e for e in jaxpr.eqns if e.primitive.name == "optimization_barrier" and in_host(e.invars[0].aval)]
    used = {id(x) for x in (*jaxpr.outvars, *(x for e in jaxpr.eqns for x in e.invars))}
    assert len(waits) == 4 * (1 - resident)
    assert all(id(x) in used for wait in waits for x in wait.outvars)
    for before, wait in itertools.pairwise(waits):
        descends = {id(before.outvars[0])}
        for equation in jaxpr.eqns:
            if descends & {id(x) for x in equation.invars}:
                descends |= {id(x) for x in equation.outvars}
            if equation is wait:
                break
        assert any(id(x) in descends for x in wait.invars)


@gpu
@pytest.mark.parametrize(
    ("cache", "draft"),
    [
        ("int8:host=lower,resident=0", "quantspec"),
        ("int8:host=lower,resident=0.5", "sparse:budget=0.2"),
        ("full:host=all,resident=0", "none"),
        ("full:host=all,resident=0.5", "retrieval:budget=256"),
        ("int8:host=all,resident=0", "retrieval:budget=256"),
        ("specache:host=store", "none"),
    ],
)
def test_host_memory_of_a_gpu(cache, draft):
    """The same kernels read the same bits, over several flushes of rows that are due at different times."""
    shape = dict(hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=128)
    model = random_model("bfloat16", vocab_size=4096, spread=0.03, tie_word_embeddings=False, **shape)
    prompts = random_prompts([900, 701], vocab_size=4096)
    gamma = 0 if draft == "none" else 3
    found = []
    for each in (cache.partition(":")[0], cache):
        config = GenerationConfig(max_new_tokens=400, cache=each, draft=draft, ignore_eos=True, num_speculative_tokens=gamma)
        state, step, _ = prepared(model, prompts, config, draft=make_draft(draft, model, int4=random_int4(model)) if gamma else None)
        while (np.asarray(state.status) == 0).any():
            state = step(state)
        found.append(state)
    one, other = found
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.counts.accepted, other.counts.accepted)
    assert any(leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(other.cache.layers))
    if not cache.startswith("specache"):
        total = int(np.asarray(one.cache.lengths.total).min())
        positions = jnp.broadcast_to(jnp.arange(total), (2, 4, total))
        tokens = jax.jit(lambda cache: [cache.tokens(layer, positions) for layer in range(4)])
        for here, there in zip(*(jax.tree.leaves(tokens(state.cache)) for state in found), strict=True):
            np.testing.assert_array_equal(here, there)


@gpu
@pytest.mark.parametrize(
    ("cache", "draft", "dtype"),
    # Fetched tokens enter sums in programs of their own, which round in other places: in bfloat16 a choice between two tokens turns on it.
    [
        ("int8:host=lower,resident=0.5", "quantspec", "bfloat16"),
        ("specache:host=store", "none", "float32"),
        ("specache:fetch=checked,host=store", "none", "float32"),
    ],
)
def test_batches_on_a_gpu(cache, draft, dtype, monkeypatch):
    monkeypatch.setattr(slots, "PAGED", ())  # or the rows on the device would have a pool, and another program
    shape = dict(hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=128)
    model = random_model(dtype, vocab_size=4096, spread=0.03, tie_word_embeddings=False, **shape)
    made, found = make_draft(draft, model, int4=random_int4(model)), []
    for each in (re.sub("[:,]host=.*", "", cache), cache):
        settings = dict(cache=each, draft=draft, ignore_eos=True, num_speculative_tokens=3)
        requests = [
            Request(prompt, GenerationConfig(max_new_tokens=140 + 40 * i, **settings), jax.random.key(i))
            for i, prompt in enumerate(random_prompts([900, 300, 640], vocab_size=4096))
        ]
        found.append({result.index: result.token_ids for result in run_batch(model, with_draft(requests, made), batch_size=2)})
    assert found[0] == found[1]


@pytest.mark.system
@pytest.mark.parametrize(
    ("cache", "draft", "settings"),
    [
        ("int8:host=lower,resident=0.5", "quantspec:weight_bits=16", dict(temperature=0.8)),
        ("full:host=all", "none", {}),
        ("specache:residual=16,k=4,host=store", "none", {}),
    ],
)
def test_batches(cache, draft, settings, monkeypatch):
    """Rows that end, and those that take their places, have the tokens that they have alone on the device; prompts in parts too, and of
    some layers on the device."""
    monkeypatch.setattr(prefill_groups, "PART", 64)  # of a layer of the longest prompt
    with jax.enable_x64(True):
        model, r = random_model("float64"), np.random.default_rng(3)
        prompts = random_prompts([41, 20, 7, 50, 33], seed=1)
        new = [int(n) for n in r.integers(10, 30, len(prompts))]

        def of(cache: str) -> list[tuple]:
            config = dataclasses.replace(CONFIG, cache=cache, draft=draft, **settings)
            requests = [
                Request(prompt, dataclasses.replace(config, max_new_tokens=count), jax.random.key(i))
                for i, (prompt, count) in enumerate(zip(prompts, new))
            ]
            found = {result.index: result for result in run_batch(model, requests, batch_size=2)}
            return [(found[i].token_ids, found[i].stats.num_accepted_draft_tokens) for i in range(len(prompts))]

        assert of(cache) == of(re.sub("[:,]host=.*", "", cache))


def test_several_devices_are_refused(directory):
    config = offloaded(dataclasses.replace(CONFIG, draft="none", num_speculative_tokens=0))
    with pytest.raises(InputError, match="cache int8:host=lower with a part in host memory is for one device"):
        generate(load_model(directory, mesh=model_mesh(jax.devices()[:1])), [[1, 2, 3]], config=config)
    with pytest.raises(InputError, match="int8:host=lower has a part in host memory, which several devices would share; decode"):
        run_batch(random_model("float32"), [Request([1, 2, 3], config, jax.random.key(0))], devices=jax.devices()[:1] * 2)


@pytest.mark.system
def test_by_its_name(run, fails, directory, tmp_path):
    command = ["generate", "--model", directory, "--prompt", "def f(x):\n" * 20, "--max-new-tokens", 8, "--group-size", 16, "--json"]
    command += ["--draft", "quantspec"]
    outs = [run(*command, "--cache", cache) for cache in ("int8", "int8:host=lower")]
    assert [code for code, *_ in outs] == [0, 0], outs
    tokens = [json.loads(out)["token_ids"] for _, out, _ in outs]
    assert tokens[0] == tokens[1]
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "def f(x):\n" * 20}) + "\n")
    batch = ["batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--model", directory, "--max-new-tokens", 8, "--group-size", 16]
    batch += ["--draft", "quantspec"]
    assert run(*batch, "--cache", "int8:host=lower", "--devices", "all")[0] == 0
    assert [json.loads((tmp_path / "out.jsonl").read_text())["token_ids"]] == tokens[1]
    for cache, words in (
        ("int8:host=disk", "cache host 'disk' should be none, lower or all"),
        (
            "int8:host=lower,resident=1.5",
            "resident=1.5': resident should be auto, or a share from 0 to 1, not '1.5'",
        ),
        ("full:host=all,resident=half", "resident should be auto, or a share from 0 to 1, not 'half'"),
    ):
        fails([*command, "--cache", cache], words)
