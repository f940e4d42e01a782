"""States of caches that fetch by guesses or are in host memory, and of a model that is divided over devices."""

import dataclasses

import jax
import numpy as np
import pytest
import simulated_devices
from checkpoints import hf_config, write_checkpoint
from runs import random_model, random_prompts

from qspec_jax import host
from qspec_jax.caches.host_memory import in_host
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.decoding import reading
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.reading import extend, prefill
from qspec_jax.decoding.saving import load_state, save_state
from qspec_jax.decoding.scoring import score
from qspec_jax.drafts import make_draft
from qspec_jax.errors import HostMemoryError, InputError
from qspec_jax.evaluate.scoring import token_logprobs
from qspec_jax.models.sharding import model_mesh
from qspec_jax.states.fingerprint import fingerprint

TEXT = random_prompts([170])[0]
SPECACHE = "specache:bits=1,residual=16,k=3"

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(scope="module")
def shallow():
    """One layer compiles in half the time."""
    return random_model("float64", num_hidden_layers=1)


def config(cache, draft="none", **changes) -> GenerationConfig:
    gamma = 0 if draft == "none" else 3
    size = None if cache.startswith("full") else 8
    return GenerationConfig(**dict(draft=draft, cache=cache, group_size=size, num_speculative_tokens=gamma, max_new_tokens=20) | changes)


@pytest.mark.system
@pytest.mark.parametrize("fetch", ["checked", "now", "ahead", "checked,host=store"])
def test_what_is_fetched_goes_on(shallow, fetch, tmp_path, monkeypatch):
    """Little is fetched, so that every token depends on the guess before it; over flushes, in pieces, in batches and through a file."""
    model, settings = shallow, config(f"{SPECACHE},fetch={fetch}", ignore_eos=True, max_new_tokens=30)
    prompt, text = TEXT[:45], TEXT[45:95]
    on_device = config(f"{SPECACHE},fetch={fetch.partition(',')[0]}").cache_config
    expected = token_logprobs(model, [prompt], [text], on_device)[0]
    monkeypatch.setattr(reading, "ROOM", 97)
    state = prefill(model, prompt, config=settings, room=128)
    pieces = [prefill(model, prompt, config=settings, room=10)]  # which grows to the same sizes, so that programs are shared
    for begin, end in ((0, 20), (20, 21), (21, 38)):
        pieces.append(extend(pieces[-1], text[begin:end]))
    assert pieces[0].room != pieces[1].room == state.room
    for after, read in zip([state, *pieces[1:]], (0, 20, 21, 38), strict=True):
        [found] = score(after, [text[read:]])
        np.testing.assert_allclose(found.logprobs, expected[read:], atol=1e-11)
    straight = generate(model, state, config=settings).token_ids[0]
    first = generate(model, state, config=dataclasses.replace(settings, max_new_tokens=7))
    assert first.token_ids[0] == straight[:7]
    assert generate(model, extend(state, straight[:7]), config=settings).token_ids[0][:23] == straight[7:]
    # A row that ends before its neighbour keeps what it has fetched.
    ends = dataclasses.replace(settings, ignore_eos=False, eos_token_ids=(straight[6],))
    for others in (9, 14, 20, 5):
        ended = generate(model, [state, extend(state, text[:others])], config=ends)
        new, longer = ended.token_ids
        again = generate(model, ended.states[0], config=dataclasses.replace(settings, max_new_tokens=30 - len(new))).token_ids[0]
        assert new + again == straight
        if len(longer) > len(new) + 2:
            break
    else:
        pytest.fail("no neighbour goes on for longer")
    if "now" not in fetch:
        with pytest.raises(InputError, match="cache specache forgets what it held before"):
            state.trim(44)
    save_state(pieces[1], tmp_path / "state")
    loaded = load_state(tmp_path / "state", model)
    assert generate(model, loaded, config=settings).token_ids == generate(model, pieces[1], config=settings).token_ids
    with pytest.raises(InputError, match=r"another cache \(specache:.*k=3.*, here specache:.*k=4"):
        load_state(tmp_path / "state", model, config=dataclasses.replace(settings, cache=settings.cache.replace("k=3", "k=4")))


@pytest.mark.system
@pytest.mark.parametrize(
    "cache, draft",
    [
        ("int8:host=lower", "quantspec:weight_bits=16"),
        ("full:host=all,resident=0.5", "retrieval:budget=44,chunk=2"),
        ("int8:host=all", "streaming-llm:budget=20,sinks=3"),
        ("full:host=all", "none"),
    ],
)
def test_states_in_host_memory_are_those_on_the_device(shallow, cache, draft, tmp_path, monkeypatch):
    model = random_model("float64") if "resident" in cache else shallow  # of two layers one is resident
    there, here = (config(each, draft, temperature=1.0, ignore_eos=True) for each in (cache, cache.partition(":")[0]))
    monkeypatch.setattr(reading, "ROOM", 64)
    found = []
    for settings in (there, here):
        start = prefill(model, TEXT[:60], config=settings, room=20)
        if (pool := start.reader.pool) is not None:
            pool.make_room(80)  # at once: programs are compiled for its size
        state = extend(start, TEXT[60:100])
        both = generate(model, [*state.fork(2)], config=settings, key=jax.random.key(0))
        save_state(both.states[1], tmp_path / "state")
        loaded = load_state(tmp_path / "state", model, config=settings)
        again = generate(model, [*loaded.fork(2)], config=dataclasses.replace(settings, max_new_tokens=8), key=jax.random.key(2))
        samples = generate(model, [TEXT[:50]], config=dataclasses.replace(settings, num_return_sequences=2), key=jax.random.key(1))
        longer = extend(again.states[0], TEXT[120:130])
        assert state.room.text < len(longer) < longer.room.text
        found.append([both.token_ids, both.stats.rows, again.token_ids, again.stats.rows, samples.token_ids])
        scores = score(state, [TEXT[120:130]])[0].logprobs
        found[-1] += [scores, longer.logits]
        if settings is there:
            for each in (state, both.states[0], loaded, again.states[0], longer):
                assert any(map(in_host, jax.tree.leaves(each.cache))), "a part is in host memory"
                assert not all(map(in_host, jax.tree.leaves(each.cache.layers))) or cache == "full:host=all"
    for far, near in zip(found[0][5:], found[1][5:], strict=True):
        np.testing.assert_allclose(far, near, atol=1e-12)
    assert found[0][:5] == found[1][:5]
    state = prefill(model, TEXT[:60], config=there, room=20)
    monkeypatch.setattr(host, "room_bytes", lambda pooled: state.cache.num_host_bytes)
    extend(state, [1])
    with pytest.raises(HostMemoryError, match="host memory for these prompts"):
        generate(model, state.fork(2), config=there, key=jax.random.key(0))


@pytest.mark.system
def test_with_simulated_devices(request):
    simulated_devices.run_those_of(request, 4)


@pytest.mark.several_devices
@pytest.mark.parametrize("draft, cache", [("sparse:budget=0.3,min_groups=2", "int8"), ("none", "full"), ("snapkv:budget=40", "full")])
def test_states_of_a_divided_model(tmp_path, request, draft, cache):
    """All that states do, as on one device; and a file of one is for the other."""
    devices = simulated_devices.devices(request, 4)
    shape = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=8, head_dim=128, intermediate_size=1024)
    checkpoint = write_checkpoint(tmp_path / "hf", hf_config(num_key_value_heads=4, max_position_embeddings=1024, **shape))
    settings, found, r = config(cache, draft, ignore_eos=True), {}, np.random.default_rng(0)
    text = r.integers(0, 64, 300).tolist()
    models = {n: load_model(checkpoint, dtype="float64", mesh=None if n == 1 else model_mesh(devices[:n])) for n in (1, 4)}
    for n, model in models.items():
        first = generate(model, extend(prefill(model, text[:60], config=settings, room=40), text[60:90]), config=settings)
        longer = extend(first.states[0], text[100:260])  # which grows
        both = generate(model, longer.fork(2), config=settings)
        save_state(longer, tmp_path / f"{n}.state")
        found[n] = first.token_ids, first.stats.rows, both.token_ids, both.stats.rows
        found[n] += ([logprob for each in score(longer, [text[:5], text[7:9]]) for logprob in each.logprobs],)
    assert found[1][:4] == found[4][:4]
    np.testing.assert_allclose(found[1][4], found[4][4], atol=1e-11)
    for model in models.values():
        for file in (1, 4):
            again = generate(model, load_state(tmp_path / f"{file}.state", model, config=settings), config=settings)
            assert again.token_ids[0] == found[1][2][0] and again.stats.rows[0] == found[1][3][0]


@pytest.mark.several_devices
def test_fingerprints_of_divided_weights(tmp_path, request):
    """Programs that exchange something must not queue up: simulated devices wait for each other in vain, and end the process after 40 s."""
    devices = simulated_devices.devices(request, 4)
    shape = dict(num_hidden_layers=2, num_key_value_heads=4, max_position_embeddings=512, intermediate_size=128)
    checkpoint = write_checkpoint(tmp_path / "hf", hf_config(**shape))
    one, divided = (load_model(checkpoint, dtype="float64", mesh=mesh) for mesh in (None, model_mesh(devices)))
    assert fingerprint(divided) == fingerprint(one)
    draft = make_draft("quantspec", divided)
    assert len({fingerprint((divided, draft)) for _ in range(30)}) == 1
