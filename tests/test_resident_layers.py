"""How many layers are resident on the device, and how many rows have their caches in host memory."""

import dataclasses

import jax
import pytest
from runs import prepared, random_model, random_prompts, run_rounds

from qspec_jax import host
from qspec_jax.caches.full import FullSettings
from qspec_jax.caches.host_memory import in_host
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding import capacity, host_residence, prefill_groups, slots
from qspec_jax.decoding.batch import Request, run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.host_residence import Residence, refused, residence
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.sampling import make_sampler, prompt_keys
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.step_bytes import bytes_of
from qspec_jax.errors import HostMemoryError, InputError

CONFIG = GenerationConfig(draft="quantspec", max_new_tokens=30, cache="int8", group_size=8, ignore_eos=True, num_speculative_tokens=3)
PROMPTS = random_prompts([41, 20, 7])


def test_resident_layers_are_spread():
    assert FullSettings("all", 0).streamed(3) == (True,) * 3 and FullSettings("all", 1).streamed(3) == (False,) * 3
    assert FullSettings("all", 0.5).streamed(6) == (False, True) * 3
    assert FullSettings("all", 0.25).streamed(8) == (False, True, True, True) * 2
    model = random_model("float32")
    cache = CacheConfig.parse("full:host=all,resident=0.5").empty(
        model.config, batch=1, capacity=8, num_speculative_tokens=0, dtype=model.dtype
    )
    assert [layer.keys.sharding.memory_kind == "pinned_host" for layer in cache.layers] == [False, True]


@pytest.mark.system
def test_as_many_layers_are_resident_as_fit(monkeypatch):
    """Where the device says how much is free; of tokens nothing changes."""
    model, config = random_model("float32"), dataclasses.replace(CONFIG, draft="none", num_speculative_tokens=0)
    expected = run_rounds(model, PROMPTS, config).tokens
    sizes = dict(batch=3, capacity=128, num_speculative_tokens=0)
    own_cache = ("retrieval:budget=44,chunk=2", [True, True])  # which leaves less room
    for name, drafts in (("full:host=all", (("none", [False, True]), own_cache)), ("int8:host=lower", (own_cache,))):

        def of(free: int, name: str = name) -> Residence:
            monkeypatch.setattr(host_residence, "free_bytes", lambda: free)
            return residence(CacheConfig.parse(name, group_size=8), model, **sizes)

        least, found = of(0), of(1 << 40)
        made = least.cache.empty(model.config, **sizes, dtype=model.dtype)
        of_layer = [sum(leaf.nbytes for leaf in jax.tree.leaves(layer) if in_host(leaf)) for layer in made.layers]
        assert of_layer == [least.layer_bytes] * 2 and least.host_bytes == 2 * least.layer_bytes
        assert (found.cache.settings.resident, found.host_bytes, found.layer_bytes) == (1, 0, least.layer_bytes)
        free, shares = 0, []
        while not shares or shares[-1] < 1:  # a layer more each time that there is so much more room
            each = of(free)
            assert each.host_bytes == (1 - each.cache.settings.resident) * 2 * each.layer_bytes
            shares.append(each.cache.settings.resident)
            free += found.layer_bytes
        assert sorted(set(shares)) == [0, 0.5, 1] and len(shares) - shares.index(0.5) == 2
        of(free - 2 * found.layer_bytes)
        for draft, expected_kinds in drafts:
            settings = dict(draft=draft, num_speculative_tokens=0 if draft == "none" else 3, cache=name, max_new_tokens=64)
            state, *_ = prepared(model, PROMPTS, dataclasses.replace(CONFIG, **settings), draft=make_draft(draft, model))
            kinds = [any(leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(layer)) for layer in state.cache.layers]
            assert kinds == expected_kinds, (draft, kinds)
    assert run_rounds(model, PROMPTS, dataclasses.replace(config, cache="int8:host=lower")).tokens == expected
    monkeypatch.setattr(host, "free_bytes", lambda: 1000)
    with pytest.raises(
        HostMemoryError,
        match=r"int8:host=lower needs 0\.0 GB of host memory for these prompts, of 0\.0 GB that",
    ):
        run_rounds(model, PROMPTS, dataclasses.replace(config, cache="int8:host=lower,resident=0"))
    with pytest.raises(HostMemoryError, match=r"cache specache:host=store needs"):
        run_rounds(model, PROMPTS, dataclasses.replace(config, cache="specache:host=store,residual=8", group_size=4))


def test_host_memory_that_is_left(monkeypatch, tmp_path):
    """What Linux says, or less where the control group has less; but a virtual machine may grow."""
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    assert host.free_bytes() is None
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:    3 kB\n")
    assert host.free_bytes() == 3072
    for limit, free in (("max", 3072), (8000, 3072), (9000, 3072), (3000, 2500), (90_000, 89_500)):
        for name, text in (("max", limit), ("current", 1000), ("stat", "anon 500\ninactive_file 500")):
            (tmp_path / f"memory.{name}").write_text(f"{text}\n")
        assert host.free_bytes() == free, limit


def test_xlas_pool_of_host_memory(monkeypatch):
    """On a GPU it has 64 GiB, or less if less is free, unless a number is given, which is believed also where Linux shows less."""
    monkeypatch.delenv(host.POOL_LIMIT, raising=False)
    large = lambda: refused("full:host=all", 80 << 30)
    for backend, free, room in (("cpu", 100, None), ("cpu", 70, 70), ("gpu", 100, 64), ("gpu", 50, 50)):
        monkeypatch.setattr(host, "free_bytes", lambda free=free: free << 30)
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert (large() is None) == (room is None)
        assert room is None or f"of {(room << 30) / 1e9:.1f} GB that it may take" in large()
    assert f"by {host.POOL_LIMIT}=81 before JAX starts" in large()
    monkeypatch.setenv(host.POOL_LIMIT, "81")
    host.limit_pool()
    assert large() is None
    monkeypatch.setenv(host.POOL_LIMIT, "much")
    with pytest.raises(InputError, match=f"{host.POOL_LIMIT}=much should be a whole number of GiB"):
        large()
    monkeypatch.delenv(host.POOL_LIMIT)
    host.limit_pool()
    assert host.pool_bytes() == 40 << 30  # of 50 that are free


@pytest.mark.system
@pytest.mark.parametrize(("lengths", "free", "resident"), [((100, 20, 90), 1 << 40, 1), ((100, 20, 90), 0, 0)])
def test_rows_that_fit_settle_what_is_resident(lengths, free, resident, monkeypatch):
    """Prompts go through prefill at once or in parts: with the layers on the device that all rows leave room for, which nobody knew when
    the first program was compiled."""
    monkeypatch.setattr(prefill_groups, "PART", 128)
    monkeypatch.setattr(slots, "PAGED", ("cpu",))
    monkeypatch.setattr(host_residence, "free_bytes", lambda: free)
    monkeypatch.setattr(capacity, "free_bytes", lambda mesh=None: 1 << 40)
    far, replace = [], Engine.replace

    def watched(engine, state, *args):
        far.append({in_host(layer.keys.lower) for layer in state.cache.layers})
        return replace(engine, state, *args)

    monkeypatch.setattr(Engine, "replace", watched)
    model, found = random_model("float32", num_hidden_layers=1), []
    for cache in ("int8", "int8:host=lower", "int8:host=lower,resident=1"):
        config = dataclasses.replace(CONFIG, cache=cache, draft="none", num_speculative_tokens=0)
        requests = [Request(prompt, config, jax.random.key(0)) for prompt in random_prompts(lengths)]
        found.append({result.index: result.token_ids for result in run_batch(model, requests, batch_size=None)})
    assert found[0] == found[1] == found[2]
    assert far == [{False}] * 3 + [{not resident}] * 3 + [{False}] * 3


def test_as_many_rows_as_host_memory_has_room_for(monkeypatch):
    model, prompts = random_model("float32", num_hidden_layers=1), random_prompts([20] * 6)
    config = dataclasses.replace(CONFIG, cache="int8:host=lower", draft="none", num_speculative_tokens=0)
    requests = [Request(prompt, config, jax.random.key(0)) for prompt in prompts]
    engine = Engine.for_configs(model, None, [config], prompt_tokens=20)
    engine.settle_for(0)
    row = engine.prefill_of([prompts[0]], make_sampler(config), prompt_keys(jax.random.key(0), 1), make_limits(model, config)).shapes()
    in_host = bytes_of(row) - bytes_of(row, on_device=True)
    for room, rows in ((5 * in_host, 3), (100 * in_host, 6)):
        monkeypatch.setattr(host, "free_bytes", lambda room=room: room)
        run = run_batch(model, requests, batch_size=None)
        assert len(list(run)) == 6 and run.stats.batch_size == rows
    monkeypatch.setattr(host, "free_bytes", lambda: 2 * in_host)
    with pytest.raises(HostMemoryError, match="not one row fits; 3 of them take"):
        list(run_batch(model, requests, batch_size=None))
    with pytest.raises(HostMemoryError, match=r"int8:host=lower needs 0\.0 GB of host memory"):
        list(run_batch(model, requests, batch_size=4))
