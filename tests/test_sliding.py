"""Models in which some layers, or all, have a sliding window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import random_model, random_prompts
from tiers import in_system

from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax.caches.cache import Reads
from qspec_jax.caches.prefill import prefill as prefill_model
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.reading import extend, prefill
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.saving import load_state, save_state
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.step_bytes import reads_of_step
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.planning.devices import DEVICES
from qspec_jax.planning.operations import pass_work, prefill_work
from qspec_jax.planning.plan import plan
from qspec_jax.planning.plan_report import Status
from qspec_jax.planning.steps import own_step

pytestmark = pytest.mark.usefixtures("float64")
G, WINDOW = 8, 12
SOME = dict(
    architectures=["Gemma3ForCausalLM"],
    model_type="gemma3_text",
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=WINDOW,
    sliding_window_pattern=2,  # of two layers, the first has a window
    rope_local_base_freq=100.0,
    query_pre_attn_scalar=16,
)
ALL = dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=WINDOW)
read_prompt = jax.jit(prefill_model)  # or each operation would be compiled by itself


@pytest.fixture(scope="module", params=[SOME, ALL], ids=["some", "all"])
def model(request, float64):
    return random_model("float64", **request.param)


# The drafts, caches and states of a model in which all layers have a window are among the longer tests.
mostly_some = pytest.mark.parametrize("model", [SOME, pytest.param(ALL, marks=pytest.mark.system)], ids=["some", "all"], indirect=True)


def config(model, draft="none", cache="int8", **changes) -> GenerationConfig:
    made = draft if draft == "none" else make_draft(draft, model)
    size = G if cache.startswith(("int8", "kivi")) else None
    return GenerationConfig(**dict(draft=made, cache=cache, group_size=size, num_speculative_tokens=3, max_new_tokens=40) | changes)


@jax.jit
def step(target, cache, token):
    logits, after = target(token[None, None], cache.lengths.total[:, None], cache)
    return logits[0, 0], after.commit(cache.lengths, jnp.array([1]), wait_for=[])[0]


def one_by_one(model, prompt, tokens, cache, appended=0):
    """Logits after each token, fed one at a time after a prompt."""
    room = len(prompt) + len(tokens)
    held = cache.empty(model.config, batch=1, capacity=room, num_speculative_tokens=appended, dtype=model.dtype)
    padded = jnp.pad(jnp.array([prompt]), ((0, 0), (0, 64 - len(prompt))))
    _, held = read_prompt(model, padded, jnp.array([len(prompt)]), held)
    found = []
    for token in tokens:
        logits, held = step(ViewedModel(model, BOTH_PLANES), held, jnp.int32(token))
        found.append(logits)
    return np.stack(found)


def test_a_window_is_attended_to_and_nothing_before_it(model):
    """Prefill, and passes of several tokens after it, give what a prompt without the tokens before gives, where all layers have the window;
    where one has none, what prefill of all of it gives."""
    prompt, text = random_prompts([30, 70])
    found = one_by_one(model, prompt, text, CacheConfig("full"))
    whole = [*prompt, *text]
    empty = CacheConfig("full").empty(model.config, batch=1, capacity=128, num_speculative_tokens=0, dtype=model.dtype)
    logits, _ = read_prompt(model, jnp.pad(jnp.array([whole]), ((0, 0), (0, 28))), jnp.array([100]), empty)
    np.testing.assert_allclose(found[-1], logits[0], atol=1e-12)
    other = [(token + 1) % 64 for token in whole]
    # Two layers: what is 2 * (WINDOW - 1) tokens back is seen, and no more.
    for back in (2 * (WINDOW - 1), 2 * (WINDOW - 1) + 1):
        changed = [*other[: 100 - back], *whole[100 - back :]]
        again, _ = read_prompt(model, jnp.pad(jnp.array([changed]), ((0, 0), (0, 28))), jnp.array([100]), empty)
        same = np.abs(np.asarray(again[0] - logits[0])).max() < 1e-12
        assert same == (len(model.config.windowed_layers) == model.config.num_layers and back == 2 * (WINDOW - 1) + 1)


@mostly_some
@pytest.mark.parametrize(
    "draft",
    [
        "quantspec",
        *in_system("sparse", "prompt-lookup", "h2o", "exact-topk", "combine:prompt-lookup+sparse"),
    ],
)
def test_greedy_tokens_are_the_targets(model, draft):
    if draft == "exact-topk" and not model.config.full_layers:
        pytest.skip("needs a layer without a window: test_sliding_drafts.py")
    prompts = random_prompts([5, 30, 61])
    expected = generate(model, prompts, config=config(model))
    found = generate(model, prompts, config=config(model, draft))
    assert found.token_ids == expected.token_ids
    if draft in ("quantspec", "sparse"):
        assert 0 < found.stats.num_accepted_draft_tokens < found.stats.num_draft_tokens


@pytest.mark.system
@mostly_some
@pytest.mark.parametrize(
    "cache",
    ["h2o:heavy=8,recent=8", "full", "kivi", "streaming-llm:sinks=2,window=9"],
)
def test_greedy_tokens_over_other_caches(model, cache):
    prompts = random_prompts([5, 45])
    draft = "none" if cache.startswith(("h2o", "streaming")) else "prompt-lookup"
    found, alone = generate(model, prompts, config=config(model, draft, cache)), config(model, cache=cache)
    assert found.token_ids == [generate(model, [prompt], config=alone).token_ids[0] for prompt in prompts]


@pytest.mark.system
@mostly_some
def test_a_batch_whose_rows_share_pages(model, paged):
    prompts, settings = random_prompts([5, 30, 61, 12, 40, 22]), config(model, "quantspec")
    requests = [Request(prompt, settings, jax.random.key(0)) for prompt in prompts]
    found = {result.index: result.token_ids for result in run_batch(model, requests, batch_size=2)}
    expected = generate(model, prompts, config=config(model)).token_ids
    assert [found[i] for i in range(len(prompts))] == expected


@pytest.mark.system
@mostly_some
@pytest.mark.parametrize("cache", ["int8", "full"])
def test_states(model, cache, tmp_path):
    """Reading on, in pieces, past windows and flushes, is one-by-one decoding; forks, files and batches go on."""
    prompt, text = random_prompts([30, 60])
    settings = config(model, "quantspec", cache, max_new_tokens=20) if cache == "int8" else config(model, cache=cache, max_new_tokens=20)
    start = prefill(model, prompt, config=settings, room=98)
    expected = one_by_one(model, prompt, text, settings.cache_config)
    for cuts in ([60], [1, 6, 60], [40, 41, 48, 56, 60]):  # up to 8 tokens, and more than 32, are read by two programs
        state, done = start, 0
        for cut in cuts:
            state, done = extend(state, text[done:cut]), cut
            np.testing.assert_allclose(state.logits[0], expected[cut - 1], atol=1e-12)
    straight = generate(model, [*state.fork(2)], config=settings)
    save_state(state, tmp_path / "state")
    loaded = load_state(tmp_path / "state", model, config=settings)
    both = generate(model, [*loaded.fork(2)], config=settings)
    assert both.token_ids == straight.token_ids and both.token_ids[0] == both.token_ids[1]
    after = extend(both.states[1], text[:8])
    np.testing.assert_allclose(after.logits, extend(straight.states[0], text[:8]).logits, atol=1e-12)


def test_what_a_pass_reads(model):
    """A pass reads at most the window of a ring, and all tokens of the other layers."""
    shapes = CacheConfig("full").outline(model.config, 128)
    short, long = (shapes.bytes_of_pass(BOTH_PLANES, tokens)[0] for tokens in (WINDOW, 100))
    full, windowed = len(shapes.full_layers), len(model.config.windowed_layers)
    assert long * (full + windowed) * WINDOW == short * (full * 100 + windowed * WINDOW)


def test_what_a_plan_counts(model):
    """The operations and bytes of attention to a window, or to the whole context if it is shorter, whatever the draft chooses elsewhere."""
    c, shapes = model.config, CacheConfig(group_size=G).outline(model.config, 128)
    per_token = 4 * c.num_heads * c.head_dim
    for tokens in (WINDOW - 2, 100):
        of_window = min(tokens, WINDOW)
        step = own_step(c, shapes, tokens)
        seen = len(c.full_layers) * tokens + len(c.windowed_layers) * of_window
        assert pass_work(step, batch=3, tokens=1).attention.flops == 3 * per_token * seen
        attended = [sum(min(t, most) for t in range(1, tokens + 1)) for most in (tokens, WINDOW)]
        pairs = len(c.full_layers) * attended[0] + len(c.windowed_layers) * attended[1]
        assert prefill_work(c, batch=3, tokens=tokens).attention.flops == 3 * per_token * pairs
        if c.full_layers:
            for draft in ("snapkv:budget=33,generated=1", "sparse:budget=8,min_groups=1"):
                found = reads_of_step(make_draft(draft, model), shapes, tokens)
                assert [found[i] for i in c.windowed_layers] == [Reads(0, 0, of_window)] * len(c.windowed_layers)
                assert all((found[i].quantized + found[i].full < tokens) == (tokens > 34) for i in c.full_layers)


def test_a_plan_has_no_draft_that_is_refused(model):
    found = {row.draft: row.status for row in plan("m", model.config, DEVICES["h100"], [64], [1], max_new_tokens=8).rows}
    assert found["quantspec"] == found["prompt-lookup"] == Status.PLANNED
    assert found["sparse"] == Status.PLANNED
    of_full = {found[draft] for draft in ("snapkv", "streaming-llm", "retrieval", "chunk-means")}
    assert (Status.NOT_PLANNED in of_full, Status.PLANNED in of_full) == ((True, False) if not model.config.full_layers else (False, True))
