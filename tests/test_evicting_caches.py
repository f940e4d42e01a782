"""The caches that forget tokens, StreamingLLM and H2O, against attention to everything that is masked by their rule, token by token."""

import dataclasses
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import prepared, random_model, random_prompts, run_rounds

from pallas_kernels.formats.kv_cache import Lengths
from pallas_kernels.rope_append import split_and_rotate
from qspec_jax.caches.cache import AppendedCache
from qspec_jax.caches.prefill import prefill
from qspec_jax.caches.registry import CACHES, CacheConfig
from qspec_jax.decoding.batch import Request, run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.drafts import make_draft
from qspec_jax.errors import InputError
from qspec_jax.evaluate.perplexity import token_logprobs
from qspec_jax.models.prompts import padded

STREAMING, H2O = "streaming-llm:sinks=2,window=9", "h2o:heavy=6,recent=5"
EVICTING = [STREAMING, H2O]
PROMPTS = random_prompts([41, 17, 7])  # the last one is shorter than what is kept
NEW = 26
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

    def attend(self, layer, qkv, cos, sin, *, view, observe=False):
        held = self.layers[layer]
        q, k, v = (np.asarray(x)[0, 0] for x in split_and_rotate(qkv, cos, sin, kv_heads=len(held.keys)))
        more = lambda x, new: np.concatenate([x, np.broadcast_to(new, (len(k), 1, *x.shape[2:]))], 1)
        new = Everything(more(held.keys, k[:, None]), more(held.values, v[:, None]), more(held.mass, 0.0), more(held.kept, True))
        self.forget(new)
        return jnp.asarray(new.read(q))[None, None], new, None


def predicted(model, prompt: list[int], cache: str, given: list[int] | None = None) -> tuple[list[int], np.ndarray]:
    """The likeliest tokens, and the log-probabilities [NEW, V] in their places; fed are they themselves, or those given."""
    tokens, n = padded([prompt])
    whole = CacheConfig("full").empty(model.config, batch=1, capacity=len(tokens[0]), num_speculative_tokens=0, dtype=model.dtype)
    logits, whole, queries = prefill(model, tokens, n, whole, queries=len(prompt))
    layers = []
    for layer, q in zip(whole.layers, queries):
        keys, values = (np.asarray(x)[0, :, : len(prompt)] for x in (layer.keys, layer.values))
        everything = Everything(keys, values, np.zeros(keys.shape[:2]), np.ones(keys.shape[:2], bool))
        for i, one in enumerate(np.asarray(q)[0]):  # of the prompt each token reads all those before it
            part = Everything(keys[:, : i + 1], values[:, : i + 1], everything.mass[:, : i + 1], everything.kept[:, : i + 1])
            part.read(one)
        layers.append(everything)
    held = Oracle(tuple(layers), Lengths(jnp.zeros(1, int), n), FORGET[cache])
    chosen, scores = [], []
    for i in range(NEW):
        scores.append(np.asarray(jax.nn.log_softmax(logits[0])))
        chosen.append(int(scores[-1].argmax()))
        fed = chosen[-1] if given is None else given[i]
        logits, held = model(jnp.array([[fed]]), held.lengths.total[:, None], held)
        logits = logits[:, 0]
    assert not any(layer.kept.all(1).any() for layer in held.layers)
    return chosen, np.stack(scores)


@pytest.mark.parametrize("cache", EVICTING)
def test_greedy_tokens_are_the_rule_s(cache):
    """One at a time, and with drafts that are rolled back, past several evictions; and in slots that are refilled."""
    with jax.enable_x64(True):
        model = random_model("float64")
        expected = [predicted(model, prompt, cache)[0] for prompt in PROMPTS]
        run = run_rounds(model, PROMPTS, over(cache, gamma=3))
        assert run.tokens == expected
        drafted, accepted = (sum(getattr(round, name).sum() for round in run.rounds[-1:]) for name in ("drafted", "accepted"))
        assert 0 < accepted < drafted
        requests = [Request(prompt, over(cache), jax.random.key(0)) for prompt in PROMPTS]
        found = {result.index: result.token_ids for result in run_batch(model, requests, batch_size=2)}
        assert [found[i] for i in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("cache", EVICTING)
def test_scores_are_the_rule_s(cache):
    """Of text that is fed a block at a time."""
    with jax.enable_x64(True):
        model, texts = random_model("float64"), random_prompts([NEW] * 3, seed=2)
        expected = [predicted(model, prompt, cache, text)[1][np.arange(NEW), text] for prompt, text in zip(PROMPTS, texts)]
        np.testing.assert_allclose(token_logprobs(model, PROMPTS, texts, CacheConfig.parse(cache)), expected, atol=1e-11)


@pytest.mark.parametrize("cache", ["streaming-llm:sinks=0,window=70", "streaming-llm:sinks=70,window=1", "h2o:heavy=60,recent=5"])
def test_a_window_as_long_as_the_text_is_the_full_cache(cache):
    with jax.enable_x64(True):
        model = random_model("float64")
        assert run_rounds(model, PROMPTS, over(cache, gamma=3)).tokens == run_rounds(model, PROMPTS, over("full")).tokens


@pytest.mark.parametrize("cache", EVICTING)
def test_what_is_rolled_back_evicts_nothing(cache):
    with jax.enable_x64(True):
        model = random_model("float64")
        state, *_ = prepared(model, PROMPTS, over(cache, gamma=3), draft=make_draft("quantspec", model))
        held, none = state.cache, jnp.zeros(3, jnp.int32)
        next_logits = lambda cache: np.asarray(model(jnp.full((3, 1), 5), cache.lengths.total[:, None], cache)[0])
        rejected = held
        for _ in range(2):
            wrong = jnp.array([[7, 8, 9, 10]] * 3)
            _, longer = model(wrong, rejected.lengths.total[:, None] + jnp.arange(4), rejected)
            rejected, _ = longer.commit(rejected.lengths, none, wait_for=[])
        np.testing.assert_array_equal(next_logits(rejected), next_logits(held))
        if cache == H2O:
            for layer, old in zip(rejected.layers, held.layers):
                np.testing.assert_array_equal(layer.mass, old.mass)


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
        run_rounds(model, PROMPTS, dataclasses.replace(over(cache, gamma=3), draft=draft))


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        ("streaming-llm:sinks=-1", "cache sinks -1 should be from 0"),
        ("streaming-llm:window=0", "cache window 0 should be from 1"),
        ("streaming-llm:window=all", "window should be a whole number, not 'all'"),
        ("h2o:heavy=0", "cache heavy 0 should be from 1"),
        ("h2o:recent=100000", "cache recent 100000 should be from 1 to 65536"),
        ("h2o:window=3", "'window=3' should be one of heavy=..., recent=..., queries=..."),
    ],
)
def test_wrong_settings(cache, words):
    with pytest.raises(InputError, match=words):
        CacheConfig.parse(cache)


def test_by_their_names(run, directory):
    assert {"streaming-llm", "h2o"} <= set(CACHES)
    for cache in EVICTING:
        command = ["generate", "--model", directory, "--prompt", "def f(x):\n" * 20, "--cache", cache, "--draft", "none"]
        code, out, err = run(*command, "--max-new-tokens", 4, "--json")
        assert code == 0 and len(json.loads(out)["token_ids"][0]) == 4, err
