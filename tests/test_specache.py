"""SpeCache: what a pass reads in full precision, and how that is chosen."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import prepared, random_model, random_prompts, run_rounds
from scipy.special import logsumexp
from tiers import in_system

from pallas_kernels.attention import decode_attention
from pallas_kernels.attention.reference import attend_replaced
from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.formats.low_bits import LowBits
from pallas_kernels.formats.token_codes import FullTokens, TokenCodesLayer
from pallas_kernels.formats.views import FULL_PRECISION
from pallas_kernels.gather import gather_positions
from pallas_kernels.replaced_attention.choice import top_k
from qspec_jax.bench import timing
from qspec_jax.caches import specache as specache_cache
from qspec_jax.caches.prefill import prefill
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.batch import Request, run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.errors import InputError
from qspec_jax.evaluate.scoring import token_logprobs
from qspec_jax.models.prompts import padded

FULL = GenerationConfig(max_new_tokens=6, draft="none", cache="full", group_size=4, ignore_eos=True, num_speculative_tokens=0)
PROMPTS = random_prompts([41, 50, 35])  # with a residual of 16 no flush comes within 6 tokens
attended = jax.jit(attend_replaced)  # or each operation would be compiled by itself
SIZES = dict(batch=3, capacity=64, num_speculative_tokens=2, dtype=jnp.float64)


def cache_of(**settings) -> str:
    """1 bit, and these settings."""
    return "specache:" + ",".join(f"{name}={value}" for name, value in ({"bits": 1, "residual": 16} | settings).items())


def specache(**settings) -> GenerationConfig:
    return dataclasses.replace(FULL, cache=cache_of(**settings))


def test_attention_by_hand():
    """Codes, but for the tokens that are replaced; and the share of each quantized token in the last query's attention."""
    with jax.enable_x64(True):
        r = np.random.default_rng(0)
        keys, values = r.standard_normal((2, 1, 2, 12, 8))
        q, recent = r.standard_normal((1, 2, 4, 8)), r.standard_normal((2, 1, 2, 5, 8))
        coded = [LowBits.of(jnp.asarray(x), bits=1, tokens=t, channels=c, rule="centred") for x, t, c in ((keys, 4, 1), (values, 1, 4))]
        layer = TokenCodesLayer(*coded, FullLayer(*map(jnp.asarray, recent)))
        positions = np.array([[[3, 7, -1], [0, 3, 11]]])
        lengths = Lengths(jnp.array([8]), jnp.array([4]))  # position 11 is not there: only the caller's choice would put it there
        tokens = [np.take_along_axis(x, np.maximum(positions, 0)[..., None], 2) for x in (keys, values)]
        replaced = FullTokens(jnp.asarray(positions), jnp.stack(tokens, 3))
        found, share = attended(jnp.asarray(q), layer, lengths, replaced)
        read = [np.array(codes.dequantized(jnp.float64))[0] for codes in coded]
        for head in range(2):
            there = np.arange(12) < 8
            for at in positions[0, head]:
                if at >= 0:
                    read[0][head, at], read[1][head, at], there[at] = keys[0, head, at], values[0, head, at], True
            whole = [np.concatenate([x[head], y[0, head]]) for x, y in zip(read, recent)]
            for token in range(2):
                seen = np.concatenate([there, np.arange(5) < 3 + token])
                for group in range(2):
                    query = q[0, token, 2 * head + group]
                    logits = np.where(seen, whole[0] @ query * 8**-0.5, -np.inf)
                    weights = np.exp(logits - logsumexp(logits))
                    np.testing.assert_allclose(found[0, token, 2 * head + group], weights @ whole[1], atol=1e-12)
            with np.errstate(divide="ignore"):
                queries = q[0, 1, 2 * head : 2 * head + 2]
                logits = np.where(np.concatenate([there, np.arange(5) < 4]), queries @ whole[0].T * 8**-0.5, -np.inf)
                expected = logsumexp(logits - logsumexp(logits, 1, keepdims=True), 0)[:12]
            np.testing.assert_allclose(share[0, head], expected, atol=1e-12)


@pytest.mark.parametrize(("size", "k"), [(100, 3), (640, 5), (1000, 7), (330, 5), (31, 31)])
def test_the_largest(size, k):
    """With blocks and without, among many that are equal or not there."""
    r = np.random.default_rng(size)
    x = np.where(r.random((3, 2, size)) < 0.3, -np.inf, r.integers(0, size // 10, (3, 2, size))).astype(np.float32)
    x[0, :, : size - 2] = -np.inf
    for found, expected in zip(top_k(jnp.asarray(x), k), jax.lax.top_k(jnp.asarray(x), k), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.system
def test_several_chunks():
    """The last chunk is pulled back, with replaced tokens in it; all tokens replaced is attention in full precision."""
    with jax.enable_x64(True):
        r, size = np.random.default_rng(0), 2400
        keys, values = (jnp.asarray(r.standard_normal((1, 1, size, 8))) for _ in range(2))
        q, buffer = jnp.asarray(r.standard_normal((1, 1, 2, 8))), FullLayer(keys[:, :, :4], values[:, :, :4])
        coded = [LowBits.of(x, bits=1, tokens=t, channels=c, rule="centred") for x, t, c in ((keys, 24, 1), (values, 1, 8))]
        layer, lengths = TokenCodesLayer(*coded, buffer), Lengths(jnp.array([size]), jnp.array([4]))
        everything = FullTokens(jnp.arange(size)[None, None], jnp.stack([keys, values], 3))
        found, share = attended(q, layer, lengths, everything)
        whole = FullLayer(*(jnp.concatenate(both, 2) for both in ((keys, buffer.keys), (values, buffer.values))))
        expected, _ = decode_attention(q, whole, Lengths(jnp.array([0]), jnp.array([size + 4])), FULL_PRECISION)
        np.testing.assert_allclose(found, expected, atol=1e-12)
        some = FullTokens(everything.positions[:, :, ::7], everything.keys_values[:, :, ::7])
        logits = np.array(coded[0].dequantized(jnp.float64))[0, 0]
        logits[::7] = keys[0, 0, ::7]
        logits = np.concatenate([logits, buffer.keys[0, 0]]) @ np.asarray(q)[0, 0].T * 8**-0.5
        _, share = attended(q, layer, lengths, some)
        np.testing.assert_allclose(share[0, 0], logsumexp(logits - logsumexp(logits, 0), 1)[:size], atol=1e-12)


@pytest.mark.parametrize("fetch", ["ahead", *in_system("checked")])
def test_everything_fetched_is_the_full_cache(fetch):
    """One pass before the first round, and from then on the guess chooses."""
    with jax.enable_x64(True):
        model = random_model("float64", num_hidden_layers=1)
        full = run_rounds(model, PROMPTS, FULL).tokens
        assert run_rounds(model, PROMPTS, specache(k=128, fetch=fetch)).tokens == full
        assert run_rounds(model, PROMPTS, specache(k=1, fetch=fetch)).tokens != full


@pytest.mark.system
def test_everything_fetched_is_the_full_cache_over_flushes():
    """Where a pass chooses for itself."""
    with jax.enable_x64(True):
        model, long = random_model("float64", num_hidden_layers=1), dict(max_new_tokens=40)
        config = dataclasses.replace(specache(k=128, fetch="now"), **long)
        assert run_rounds(model, PROMPTS, config).tokens == run_rounds(model, PROMPTS, dataclasses.replace(FULL, **long)).tokens


@pytest.mark.system
def test_scores_of_real_text_go_by_guesses_too():
    """With everything fetched they are the full cache's; with little they are not, and depend on the guess."""
    with jax.enable_x64(True):
        model, continuations = random_model("float64", num_hidden_layers=1), random_prompts([6, 5, 4], seed=2)
        scores = lambda text: token_logprobs(model, PROMPTS, continuations, CacheConfig.parse(text, 4))
        full = scores("full")
        np.testing.assert_allclose(scores("specache:bits=1,residual=16,k=64"), full, atol=1e-11)
        little = scores("specache:bits=1,residual=16,k=4")
        assert np.nanmax(np.abs(little - full)) > 1e-4
        assert np.nanmax(np.abs(little - scores("specache:bits=1,residual=16,k=4,fetch=now"))) > 1e-6


@pytest.mark.system
@pytest.mark.parametrize("fetch", ["checked", "ahead"])
def test_what_is_generated_is_what_is_scored(fetch):
    """With few tokens fetched the guess decides which: decoding, by the draft, the others in host memory, and scoring, by a loop of its
    own, come to the same."""
    with jax.enable_x64(True):
        model = random_model("float64", num_hidden_layers=1)
        config = dataclasses.replace(specache(k=3, host="store", fetch=fetch), max_new_tokens=30, output_logprobs=True)
        out = generate(model, PROMPTS, config=config)
        scores = token_logprobs(model, PROMPTS, out.token_ids, specache(k=3, fetch=fetch).cache_config)
        np.testing.assert_allclose(scores, out.logprobs, atol=1e-11)


@pytest.mark.system
def test_a_wrong_guess_is_put_right():
    """Rows in which it was wrong read what the pass itself chooses, as with `fetch=now`; the others read what was fetched."""
    with jax.enable_x64(True):
        model = random_model("float64", num_hidden_layers=1)
        caches = [
            jax.jit(prefill)(model, *padded(PROMPTS), config.cache_config.empty(model.config, **SIZES))[1]
            for config in (specache(k=3, fetch="now"), specache(k=3), specache(k=3, fetch="checked"))
        ]
        at = caches[0].lengths.total[:, None]
        step = jax.jit(lambda cache, tokens: model(tokens, at + jnp.arange(tokens.shape[1]), cache))
        block = jnp.array([[1, 2], [3, 4], [5, 6]])
        guessed = [step(cache, block)[1].rollback(cache.lengths) for cache in caches]  # it was fetched for 2, 4 and 6
        checked = dataclasses.replace(guessed[2], missed=jnp.array([True, False, True]))
        now, ahead, found = (step(cache, jnp.array([[7], [8], [9]]))[0] for cache in (guessed[0], guessed[1], checked))
        assert not np.allclose(now, ahead)
        np.testing.assert_allclose(found, np.where(np.array([True, False, True])[:, None, None], now, ahead), atol=1e-12)


@pytest.mark.system
def test_the_last_token_of_a_pass_chooses():
    with jax.enable_x64(True):
        model, config = random_model("float64"), specache(k=3)
        sizes = dict(batch=1, capacity=64, num_speculative_tokens=2, dtype=model.dtype)
        empty = config.cache_config.empty(model.config, **sizes)
        _, cache = jax.jit(prefill)(model, *padded(PROMPTS[:1]), empty)
        block = jnp.array([[5, 9]])
        step = jax.jit(lambda tokens: model(tokens, cache.lengths.total[:, None] + jnp.arange(tokens.shape[1]), cache)[1])
        both, first = step(block), step(block[:, :1])
        q, layer = jnp.asarray(np.random.default_rng(1).standard_normal((1, 2, 4, 16))), both.layers[0]
        lengths = both.lengths
        _, share = attended(q, layer.codes, lengths, layer.fetched)
        _, alone = attended(q[:, 1:], layer.codes, lengths, layer.fetched)
        np.testing.assert_allclose(share, alone, atol=1e-12)  # by the last of a pass's tokens
        chosen = lambda cache: np.sort(np.asarray(cache.layers[1].fetched.positions[0]), -1).tolist()
        assert chosen(both) != chosen(first) and all(len(set(row)) == 3 for row in chosen(both))


@pytest.mark.system
def test_one_token_a_round_and_no_draft_of_it():
    model = random_model("float32", num_hidden_layers=1)
    run = run_rounds(model, PROMPTS, specache(k=8))
    assert [len(row) for row in run.tokens] == [6] * 3
    assert all((each.drafted == 0).all() for each in run.rounds) and len(run.rounds) == 6  # the first is prefill's


@pytest.mark.system
def test_a_row_depends_on_nothing_but_itself(monkeypatch):
    """Slots that are refilled: a row that begins among others gets its pass before the first round, and theirs stay. Together, rows keep
    what they have fetched from host memory, as the kernel for it does; alone, each token comes from the store."""
    reused = []

    def gathered(store, positions, fetched):
        new = gather_positions(store, positions)
        if fetched is None:
            return new
        reused.append(positions.shape)
        same = (positions[..., None] == fetched.positions[:, :, None]) & (positions >= 0)[..., None]
        old = jnp.take_along_axis(fetched.keys_values, same.argmax(-1)[..., None, None], 2)
        return jnp.where(same.any(-1)[..., None, None], old, new)

    monkeypatch.setattr(specache_cache, "gather_tokens", gathered)
    with jax.enable_x64(True):
        model, prompts = random_model("float64", num_hidden_layers=1), random_prompts([41, 20, 50, 35, 60])

        def requests(**settings) -> list[Request]:
            config = dataclasses.replace(specache(k=9, fetch="checked", **settings), temperature=0.7)
            each = [dataclasses.replace(config, max_new_tokens=5 + 9 * i) for i in range(len(prompts))]
            return [Request(prompt, config, jax.random.key(i)) for i, (prompt, config) in enumerate(zip(prompts, each))]

        together = {result.index: result.token_ids for result in run_batch(model, requests(host="store"), batch_size=2)}
        assert reused
        for i, request in enumerate(requests(host="none")):
            (alone,) = run_batch(model, [request], batch_size=1)
            assert together[i] == alone.token_ids


@pytest.mark.system
@pytest.mark.parametrize("host", ["store", "none"])
def test_a_row_that_is_full_is_not_touched_by_another_s_flush(host):
    """What is stored for a row that is not due goes behind its last quantized token, also where it has no room for more."""
    with jax.enable_x64(True):
        model, prompts = random_model("float64", num_hidden_layers=1), random_prompts([64, 38])
        config = dataclasses.replace(specache(k=128, fetch="now", host=host, residual=24), max_new_tokens=64)
        full = dataclasses.replace(FULL, max_new_tokens=64)
        assert run_rounds(model, prompts, config).tokens == run_rounds(model, prompts, full).tokens
        state, *_ = prepared(model, prompts, config)
        assert (state.cache.layers[0].store.sharding.memory_kind == "pinned_host") == (host == "store")


@pytest.mark.system
def test_layers_may_fetch_while_others_compute(monkeypatch):
    """Nothing goes on from what a layer fetches before all layers have fetched, and rounds are compiled for kernels to run side by side."""
    model = random_model(jnp.float32)
    sizes = SIZES | {"dtype": jnp.float32}
    caches = {host: CacheConfig.parse(cache_of(host=host), 4).empty(model.config, **sizes) for host in ("none", "store")}
    tokens = jnp.zeros((3, 2), jnp.int32)
    for host, cache in caches.items():
        traced = jax.make_jaxpr(lambda cache: model(tokens, tokens, cache))(cache)
        waits = [len(equation.invars) for equation in traced.eqns if equation.primitive.name == "optimization_barrier"]
        assert (2 * model.config.num_layers in waits) == (host == "store")
    assert caches["store"].compiler_options == {}
    monkeypatch.setattr(specache_cache, "platform", lambda: "gpu")
    assert caches["store"].compiler_options == {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    assert caches["none"].compiler_options == {}
    monkeypatch.undo()
    monkeypatch.setattr(specache_cache.SpeCache, "compiler_options", {"xla_no_such_option": "1"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        generate(model, PROMPTS, config=specache(k=4))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        timing.loop(lambda cache: (cache,), 1).compile((caches["store"],), ())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(cache="specache:k=0"), "cache specache: k 0 should be from 1"),
        (dict(cache="specache:fetch=later"), "cache specache: fetch 'later' should be ahead, checked or now"),
        (dict(cache="specache:host=disk"), "cache specache: host 'disk' should be none or store"),
        (
            dict(cache="specache:store=host"),
            "'store=host' should be one of bits=1.2, residual=..., rule=centred.extremes, k=..., fetch=ahead.checked.now, host=none.store",
        ),
        (dict(draft="specache"), "draft 'specache' should be one of quantspec, "),
        (dict(cache="specache", draft="quantspec"), "draft quantspec: the only draft that is compatible with cache specache is none"),
        (dict(cache="specache:fetch=now", draft="prompt-lookup"), "compatible with cache specache:fetch=now is none"),
    ],
)
def test_wrong_settings(settings, words):
    with pytest.raises(InputError, match=words):
        GenerationConfig(**settings)


@pytest.mark.parametrize("fetch", ["ahead", "checked", "now"])
def test_auto_over_it_is_none(fetch):
    for named in ({}, {"draft": "auto"}):
        config = GenerationConfig(cache=f"specache:fetch={fetch}", **named)
        assert (config.draft, config.cache_config.kind) == ("none", "specache")


@pytest.mark.system
def test_by_its_name(run, directory):
    prompt, cache = "def f(x):\n" * 20, "specache:residual=32,k=4,host=store"
    command = ["generate", "--model", directory, "--prompt", prompt, "--cache", cache, "--max-new-tokens", 8]
    code, out, err = run(*command, "--json")
    model = load_model(directory)
    config = GenerationConfig(draft="none", cache=cache, max_new_tokens=8)
    expected = generate(model, [prompt], config=config, tokenizer=load_tokenizer(directory))
    assert code == 0 and json.loads(out)["token_ids"] == expected.token_ids, err
    (layer,), stats = CacheConfig.parse(cache).empty(model.config, **SIZES | {"dtype": model.dtype}).layers, json.loads(out)["stats"]
    of_token = layer.store[0, :, 0].size * model.dtype.itemsize
    assert stats["host_cache_bytes"] % of_token == 0 and stats["host_cache_bytes"] >= of_token * expected.stats.prompt_tokens
    assert stats["host_cache_bytes"] < stats["cache_bytes"]
    named = {"specache:bits=1": "none", "specache:fetch=now": "none", "kivi": "auto", None: "auto"}
    assert {cache: GenerationConfig(cache=cache).draft for cache in named} == named
