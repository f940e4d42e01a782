"""The caches that forget tokens, StreamingLLM and H2O, against attention to everything that is masked by their rule, token by token."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import prepared, random_model, random_prompts, run_rounds
from tiers import in_system

from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.rope_append import split_and_rotate
from qspec_jax.caches.cache import AppendedCache
from qspec_jax.caches.h2o import prompt_mass
from qspec_jax.caches.prefill import prefill
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.batch import Request, run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.drafts import make_draft
from qspec_jax.errors import InputError
from qspec_jax.evaluate.scoring import token_logprobs
from qspec_jax.models.prompts import padded

STREAMING, H2O = "streaming-llm:sinks=2,window=9", "h2o:heavy=6,recent=5"
EVICTING = [STREAMING, H2O]
PROMPTS = random_prompts([64, 17, 7])  # a whole bucket, and less than what is kept
NEW = 20
CONFIG = GenerationConfig(max_new_tokens=NEW, draft="none", cache="full", ignore_eos=True, num_speculative_tokens=0)


def over(cache: str, gamma: int = 0, **changes) -> GenerationConfig:
    draft = dict(draft="quantspec", num_speculative_tokens=gamma) if gamma else {}
    return dataclasses.replace(CONFIG, cache=cache, **draft, **changes)


@dataclasses.dataclass
class Everything:
    """A layer of one row: all keys and values [K, n, H], what each token got of the attention [K, n], and which are not forgotten."""

    keys: np.ndarray
    values: np.ndarray
    mass: np.ndarray
    kept: np.ndarray

    def read(self, q: np.ndarray) -> np.ndarray:
        """What a query [N, H] reads."""
        K = len(self.keys)
        logits = np.einsum("kgh,knh->kgn", q.reshape(K, -1, q.shape[-1]), self.keys) * q.shape[-1] ** -0.5
        weights = np.exp(np.where(self.kept[:, None], logits, -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        self.mass += weights.sum(1)
        return np.einsum("kgn,knh->kgh", weights, self.values).reshape(q.shape)


def window_of(sinks: int, window: int) -> Callable[[Everything], None]:
    """Forgets what the newest token does not read any more."""

    def forget(held: Everything) -> None:
        n = held.kept.shape[1]
        held.kept[:, sinks : max(sinks, n - window)] = False

    return forget


def heavy_of(heavy: int, recent: int) -> Callable[[Everything], None]:
    """Before a token reads, forgets those that lost against heavy hitters when the one before it was there."""

    def forget(held: Everything) -> None:
        old = max(0, (held.kept.shape[1] - 1) // recent - 1) * recent
        for kept, mass in zip(held.kept, held.mass):
            rivals = np.flatnonzero(kept[:old])
            kept[sorted(rivals, key=lambda token: -mass[token])[heavy:]] = False

    return forget


FORGET = {STREAMING: window_of(2, 9), H2O: heavy_of(6, 5)}


@dataclasses.dataclass
class Oracle(AppendedCache):
    """One row, one token at a time, without jit."""

    layers: tuple[Everything, ...]
    lengths: Lengths
    forget: Callable[[Everything], None]

    bytes_of_reads = None

    def attend(self, layer, qkv, cos, sin, *, view):
        held = self.layers[layer]
        q, k, v = (np.asarray(x)[0, 0] for x in split_and_rotate(qkv, cos, sin, kv_heads=len(held.keys)))
        more = lambda x, new: np.concatenate([x, np.broadcast_to(new, (len(k), 1, *x.shape[2:]))], 1)
        new = Everything(more(held.keys, k[:, None]), more(held.values, v[:, None]), more(held.mass, 0.0), more(held.kept, True))
        self.forget(new)
        return jnp.asarray(new.read(q))[None, None], new, None


def predicted(model, prompt: list[int], cache: str) -> tuple[list[int], list[float]]:
    """The likeliest tokens, fed one after the other, and the natural logarithms of their probabilities."""
    tokens, n = padded([prompt])
    S = tokens.shape[1]
    whole = CacheConfig("full").empty(model.config, batch=1, capacity=S, num_speculative_tokens=0, dtype=model.dtype)
    logits, whole, queries = jax.jit(prefill, static_argnames="num_queries")(model, tokens, n, whole, num_queries=S)
    layers = []
    for layer, q in zip(whole.layers, queries):
        keys, values = (np.asarray(x)[0, :, : len(prompt)] for x in (layer.keys, layer.values))
        everything = Everything(keys, values, np.zeros(keys.shape[:2]), np.ones(keys.shape[:2], bool))
        for i, one in enumerate(np.asarray(q)[0, S - len(prompt) :]):  # of the prompt each token reads all those before it
            Everything(*(x[:, : i + 1] for x in vars(everything).values())).read(one)
        layers.append(everything)
    held = Oracle(tuple(layers), Lengths(jnp.zeros(1, int), n), FORGET[cache])
    chosen, scores = [], []
    for _ in range(NEW):
        chosen.append(int(logits[0].argmax()))
        scores.append(float(jax.nn.log_softmax(logits[0])[chosen[-1]]))
        logits, held = model(jnp.array([[chosen[-1]]]), held.lengths.total[:, None], held)
        logits = logits[:, 0]
    assert not any(layer.kept.all(1).any() for layer in held.layers)
    return chosen, scores


@pytest.mark.parametrize("cache", [EVICTING[-1], *in_system(*EVICTING[:-1])])
def test_tokens_and_scores_are_the_rule_s(cache):
    """Past several evictions: with drafts that are rolled back, one at a time in slots that are refilled, and of text fed a block at a
    time."""
    with jax.enable_x64(True):
        model = random_model("float64", num_hidden_layers=1)
        expected, scores = zip(*(predicted(model, prompt, cache) for prompt in PROMPTS))
        run = run_rounds(model, PROMPTS, over(cache, gamma=3))
        assert run.tokens == list(expected) and 0 < run.rounds[-1].accepted.sum() < run.rounds[-1].drafted.sum()
        requests = [Request(prompt, over(cache), jax.random.key(0)) for prompt in PROMPTS]
        found = {result.index: result.token_ids for result in run_batch(model, requests, batch_size=2)}
        assert [found[i] for i in range(len(PROMPTS))] == list(expected)
        np.testing.assert_allclose(token_logprobs(model, PROMPTS, expected, CacheConfig.parse(cache)), scores, atol=1e-11)


@pytest.mark.parametrize("size", [4, 128])  # in two chunks
def test_a_prompt_s_last_queries_count(size):
    """No more of them than asked for, and none before its first token."""
    with jax.enable_x64(True):
        r, n = np.random.default_rng(0), np.array([30, 2])
        queries, keys = r.standard_normal((2, size, 4, 8)), r.standard_normal((2, 2, 32, 8))
        expected = np.zeros((2, 2, 32))
        for row in range(2):
            for i in range(size):
                if (seen := n[row] - size + i + 1) > 0:
                    for head in range(4):
                        weights = np.exp(keys[row, head // 2, :seen] @ queries[row, i, head] * 8**-0.5)
                        expected[row, head // 2, :seen] += weights / weights.sum()
        np.testing.assert_allclose(prompt_mass(*map(jnp.asarray, (queries, keys, n))), expected, atol=1e-12)


@pytest.mark.system
@pytest.mark.parametrize("cache", ["streaming-llm:sinks=0,window=90", "h2o:heavy=90,recent=5"])
def test_a_window_as_long_as_the_text_is_the_full_cache(cache):
    with jax.enable_x64(True):
        model = random_model("float64", num_hidden_layers=1)
        assert run_rounds(model, PROMPTS, over(cache, gamma=3)).tokens == run_rounds(model, PROMPTS, over("full")).tokens


@pytest.mark.parametrize("cache", [EVICTING[-1], *in_system(*EVICTING[:-1])])
def test_what_is_rolled_back_evicts_nothing(cache):
    with jax.enable_x64(True):
        model = random_model("float64", num_hidden_layers=1)
        state, *_ = prepared(model, PROMPTS, over(cache, gamma=3), draft=make_draft("quantspec", model))
        held, none = state.cache, jnp.zeros(3, jnp.int32)
        one_pass = jax.jit(lambda cache, tokens: model(tokens, cache.lengths.total[:, None] + jnp.arange(tokens.shape[1]), cache))
        next_logits = lambda cache: np.asarray(one_pass(cache, jnp.full((3, 1), 5))[0])
        rejected = held
        for _ in range(2):
            _, longer = one_pass(rejected, jnp.array([[7, 8, 9, 10]] * 3))
            rejected, _ = longer.commit(rejected.lengths, none, wait_for=[])
        np.testing.assert_array_equal(next_logits(rejected), next_logits(held))
        if cache == H2O:
            for layer, old in zip(rejected.layers, held.layers):
                np.testing.assert_array_equal(layer.mass, old.mass)
                there = 6 + 64 - 55  # of the first row, whose prompt leaves no room behind it
                assert (old.mass[0, :, :there] > 0).all() and not old.mass[0, :, there:].any()


def test_they_hold_what_they_say():
    """However long the text: sinks and window, heavy hitters and twice the recent tokens, and what a round appends."""
    model = random_model("float32")
    for cache, rows in ((STREAMING, 2 + 9), (H2O, 6 + 2 * 5)):
        made = [
            CacheConfig.parse(cache).empty(model.config, batch=2, capacity=capacity, num_speculative_tokens=3, dtype=model.dtype)
            for capacity in (64, 4096)
        ]
        tokens = getattr(made[0].layers[0], "tokens", made[0].layers[0])
        assert tokens.keys.shape == (2, 2, rows + 3 + 1, 16) and made[0].num_bytes == made[1].num_bytes
        assert [each.capacity for each in made] == [64, 4096]


@pytest.mark.parametrize("cache", EVICTING)
@pytest.mark.parametrize("draft", ["streaming-llm", "snapkv", "sparse", "retrieval"])
def test_drafts_that_take_tokens_or_groups_are_refused(cache, draft):
    model = random_model("float32")
    with pytest.raises(InputError, match=r"forgets tokens, and this draft takes|reads groups of the int8 cache"):
        run_rounds(model, PROMPTS, over(cache, gamma=3), draft=make_draft(draft, model))
    does = "reads groups of the int8" if draft == "sparse" else "takes single tokens from the target's"
    with pytest.raises(
        InputError, match=rf"^draft {draft} {does} cache; .* drafts for cache .* quantspec, small-model, eagle3, prompt-lookup, none$"
    ):
        dataclasses.replace(over(cache, gamma=3), draft=draft)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        ("streaming-llm:sinks=-1", "cache streaming-llm: sinks -1 should be from 0"),
        ("streaming-llm:window=0", "cache streaming-llm: window 0 should be from 1"),
        ("streaming-llm:window=all", "window should be a whole number, not 'all'"),
        ("h2o:heavy=0", "cache h2o: heavy 0 should be from 1"),
        ("h2o:recent=100000", "cache h2o: recent 100000 should be from 1 to 65536"),
        ("h2o:window=3", "'window=3' should be one of heavy=..., recent=..., queries=..."),
    ],
)
def test_wrong_settings(cache, words):
    with pytest.raises(InputError, match=words):
        CacheConfig.parse(cache)
