"""The KIVI cache of 1 and 2 bits: its format, and that a draft over it emits that target's own tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import random_model, random_prompts, run_rounds
from tiers import in_system

from pallas_kernels.attention import decode_attention, mosaic_low_bits
from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.formats.low_bits import LowBits
from pallas_kernels.formats.token_codes import TokenCodes, TokenCodesLayer
from pallas_kernels.formats.views import BOTH_PLANES, FULL_PRECISION
from qspec_jax import demo
from qspec_jax.caches.kivi import KiviCache, KiviSettings
from qspec_jax.caches.registry import CACHES, CacheConfig
from qspec_jax.checkpoints import loading
from qspec_jax.decoding.batch import Request, run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.errors import InputError
from qspec_jax.models import prompts

KIVI = GenerationConfig(
    draft="quantspec", max_new_tokens=30, cache="kivi:bits=1,residual=8", group_size=4, ignore_eos=True, num_speculative_tokens=3
)


def numbers(*shape: int, dtype=jnp.float64) -> jax.Array:
    """With channels of very different sizes."""
    r = np.random.default_rng(0)
    return jnp.asarray(r.standard_normal(shape) * np.exp2(r.integers(-4, 5, shape[-1])), dtype)


def by_hand(x: np.ndarray, bits: int, rule: str) -> np.ndarray:
    """A group of numbers as it is read, by the papers' equations."""
    if bits == 1 and rule == "centred":  # SpeCache, equation 3
        zero, scale = (3 * x.min() + x.max()) / 4, (x.max() - x.min()) / 2
    else:
        zero, scale = x.min(), (x.max() - x.min()) / (2**bits - 1)
    return np.clip(np.rint((x - zero) / scale), 0, 2**bits - 1) * scale + zero


@pytest.mark.parametrize("rule", ["centred", "extremes"])
@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize(("tokens", "channels"), [(4, 1), (1, 8)])
def test_codes(bits, rule, tokens, channels):
    with jax.enable_x64(True):
        x = numbers(2, 2, 12, 16)
        codes = LowBits.of(x, bits=bits, tokens=tokens, channels=channels, rule=rule)
        assert codes.codes.shape == (2, 2, 12, 2 * bits)
        read, x = np.asarray(codes.dequantized(x.dtype)), np.asarray(x)
        for token in range(0, 12, tokens):
            for channel in range(0, 16, channels):
                group = np.s_[1, 0, token : token + tokens, channel : channel + channels]
                np.testing.assert_allclose(read[group], by_hand(x[group], bits, rule), atol=1e-12)
        at = jnp.array([[[3, 0, 11, 99, -5]]])
        np.testing.assert_array_equal(codes.read(at, jnp.array([1]), jnp.float64)[0], read[1][:, [3, 0, 11, 11, 0]])


def test_a_group_beyond_its_parameters_reads_as_nan_alone():
    """float16 holds 65,504, bfloat16 more."""
    x = numbers(1, 1, 8, 8, dtype=jnp.float32).at[0, 0, 2, 3].set(2.0**18)
    coded = functools.partial(LowBits.of, x, bits=2, tokens=4, channels=1, rule="extremes")
    read = coded(dtype=jnp.float16).dequantized(jnp.float32)
    assert np.isnan(read[0, 0, :4, 3]).all() and np.isfinite(np.delete(np.asarray(read[0, 0]), 3, 1)).all()
    assert np.isfinite(coded(dtype=jnp.bfloat16).dequantized(jnp.float32)).all()


def test_scales_are_in_sixteen_bits_where_the_model_is():
    """Keys' in float16, whose further digits logits need; values' in bfloat16."""
    for dtype, of_keys, of_values in ((jnp.bfloat16, jnp.float16, jnp.bfloat16), (jnp.float32, jnp.float32, jnp.float32)):
        config = CacheConfig.parse("kivi:residual=8", 4)
        (layer, *_) = config.empty(random_model(jnp.float32).config, batch=1, capacity=64, num_speculative_tokens=1, dtype=dtype).layers
        assert {layer.keys.scale.dtype, layer.keys.zero.dtype} == {jnp.dtype(of_keys)}
        assert {layer.values.scale.dtype, layer.values.zero.dtype} == {jnp.dtype(of_values)}


def test_a_group_that_is_not_finite_reads_as_nan_alone():
    x = numbers(1, 1, 8, 8, dtype=jnp.float32).at[0, 0, 2, 3].set(jnp.inf)
    read = LowBits.of(x, bits=2, tokens=4, channels=1, rule="extremes").dequantized(jnp.float32)
    assert np.isnan(read[0, 0, :4, 3]).all() and np.isfinite(np.delete(np.asarray(read[0, 0, :4]), 3, 1)).all()
    assert np.isfinite(read[0, 0, 4:]).all()
    constant = LowBits.of(jnp.full((1, 1, 4, 8), 3.0), bits=1, tokens=4, channels=1, rule="centred")
    np.testing.assert_array_equal(constant.dequantized(jnp.float32), 3)


attend = jax.jit(decode_attention)  # or each operation would be compiled by itself


@pytest.mark.parametrize("size", [24, *in_system(2400)])  # a part of a chunk, and several chunks of which the last is pulled back
def test_attention_reads_what_is_stored(size):
    with jax.enable_x64(True):
        keys, values, q = numbers(2, 2, size, 16), numbers(2, 2, size, 16), numbers(2, 3, 4, 16)
        coded = [
            LowBits.of(x, bits=2, tokens=tokens, channels=channels, rule="centred")
            for x, tokens, channels in ((keys, 24, 1), (values, 1, 8))
        ]
        buffer, lengths = FullLayer(keys[:, :, :9], values[:, :, :9]), Lengths(jnp.array([24, size]), jnp.array([9, 5]))
        found, _ = attend(q, TokenCodesLayer(*coded, buffer), lengths, BOTH_PLANES)
        for row in range(2):
            quantized, recent = int(lengths.quantized[row]), int(lengths.buffered[row])
            whole = [
                jnp.concatenate([codes.dequantized(q.dtype)[row, :, :quantized], x[row, :, :recent]], 1)
                for codes, x in zip(coded, (buffer.keys, buffer.values))
            ]
            layer = FullLayer(*(x[None] for x in whole))
            expected, _ = attend(q[row][None], layer, Lengths(jnp.zeros(1, int), jnp.array([quantized + recent])), FULL_PRECISION)
            np.testing.assert_allclose(found[row], expected[0], atol=1e-12)


def test_a_draft_emits_the_target_s_own_tokens():
    """Across flushes, at all places of a group; the schedule is that of a row's length alone."""
    with jax.enable_x64(True):
        model, prompts = random_model("float64", num_hidden_layers=1), random_prompts([1, 7, 8, 15, 16, 33])
        alone = run_rounds(model, prompts, dataclasses.replace(KIVI, draft="none", num_speculative_tokens=0))
        drafted = run_rounds(model, prompts, dataclasses.replace(KIVI, draft="quantspec"))
        assert drafted.tokens == alone.tokens
        full = run_rounds(model, prompts, dataclasses.replace(KIVI, draft="none", num_speculative_tokens=0, cache="full"))
        assert full.tokens != alone.tokens  # or the codes would not matter
        for run in (alone, drafted):
            for each in run.rounds:
                total = each.quantized + each.buffered
                np.testing.assert_array_equal(each.quantized, np.maximum(0, total // 8 - 1) * 8)


@pytest.mark.system
def test_single_tokens_and_other_rows():
    """`tokens` gives what attention reads; and a row that takes another's place is as it was."""
    model, prompts = random_model("float32", num_hidden_layers=1), random_prompts([41, 20])
    requests = [
        Request(prompt, dataclasses.replace(KIVI, draft="none", num_speculative_tokens=0), jax.random.key(0)) for prompt in prompts * 2
    ]
    found = {result.index: result.token_ids for result in run_batch(model, requests, batch_size=2)}
    assert found[0] == found[2] and found[1] == found[3]

    config = CacheConfig.parse("kivi:residual=8", 4)
    empty = config.empty(model.config, batch=1, capacity=64, num_speculative_tokens=2, dtype=model.dtype)
    assert isinstance(empty, KiviCache) and empty.schedule.flush_size == 8
    keys, values = numbers(1, 2, 64, 16, dtype=jnp.float32), numbers(1, 2, 64, 16, dtype=jnp.float32)[..., ::-1]
    n = jnp.array([30])
    cache = jax.jit(lambda: empty.filled((empty.fill(0, keys, values, n),), n))()
    read = jax.jit(lambda: cache.tokens(0, jnp.arange(30)[None, None]))()
    layer = cache.layers[0]
    for found, codes, whole in zip(read, (layer.keys, layer.values), (keys, values)):
        quantized = int(cache.lengths.quantized[0])
        assert quantized == 16
        np.testing.assert_array_equal(found[0, :, :quantized], codes.dequantized(jnp.float32)[0, :, :quantized])
        np.testing.assert_array_equal(found[0, :, quantized:], whole[0, :, quantized:30])


def test_a_flush_writes_what_prefill_would():
    """Rows of different lengths, over three flushes, in which now one row is due and now another."""
    r, config = np.random.default_rng(0), CacheConfig.parse("kivi:bits=2,residual=8", 4)
    model = random_model("float32", num_hidden_layers=1)
    keys, values = (r.standard_normal((2, 2, 64, 16)).astype(np.float32) for _ in range(2))
    make = lambda: config.empty(model.config, batch=2, capacity=64, num_speculative_tokens=2, dtype=jnp.float32)
    filled = jax.jit(lambda n: (empty := make()).filled((empty.fill(0, keys, values, n),), n))

    @jax.jit
    def with_tokens(cache, *new):
        (layer,) = cache.layers
        layer = dataclasses.replace(layer, buffer=layer.buffer.append(*new, cache.lengths.buffered))
        return cache.advance((layer,), 1).flush()[0]

    cache, n = filled(jnp.array([13, 17])), np.array([13, 17])
    for _ in range(24):
        cache = with_tokens(cache, *(np.stack([x[row, :, n[row]] for row in range(2)])[:, None] for x in (keys, values)))
        n = n + 1
    expected = filled(jnp.asarray(n))
    np.testing.assert_array_equal(cache.lengths.quantized, expected.lengths.quantized)
    assert np.asarray(cache.lengths.quantized).tolist() == [24, 32]
    for mine, theirs in zip(cache.layers, expected.layers):
        for here, there in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            for row, quantized in enumerate(np.asarray(cache.lengths.quantized)):
                read = (np.asarray(codes.dequantized(jnp.float32))[row, :, :quantized] for codes in (here, there))
                np.testing.assert_array_equal(*read)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kivi:bits=3", "cache kivi: bits 3 should be 1 or 2"),
        ("kivi:residual=0", "cache kivi: residual 0 should be from 1"),
        ("kivi:rule=nearest", "cache kivi: rule 'nearest' should be centred or extremes"),
        ("kivi:bits=two", "bits should be a whole number, not 'two'"),
        ("kivi:bit=2", r"'bit=2' should be one of bits=1\|2, residual=..., rule=centred\|extremes, group=...$"),
        ("kivi:bits=2,bits=1", "bits is given twice"),
        ("kivi:group=64,residual=100", "cache kivi: residual 100 should be a multiple of the group size, 64"),
        ("specache:group=24", "cache specache: residual 64 should be a multiple of the group size, 24"),
        ("kivi:group=31", "group size 31 should be an even number"),
        ("kivi:group=few", "group should be a whole number, not 'few'"),
        ("int8:bits=2", r"'bits=2' should be one of host=none\|lower\|all, resident=...$"),
        ("kivy", "cache 'kivy' should be one of full, int8, kivi"),
    ],
)
def test_wrong_settings(text, words):
    with pytest.raises(InputError, match=words.replace("(", r"\(")):
        GenerationConfig(cache=text)


def test_settings_that_do_not_fit():
    model = random_model("float32")
    sizes = dict(batch=1, capacity=64, num_speculative_tokens=0, dtype=model.dtype)
    with pytest.raises(InputError, match="cache kivi: residual 128 should be a multiple of the group size, 12"):
        CacheConfig.parse("kivi", 12).empty(model.config, **sizes)
    with pytest.raises(InputError, match="cache kivi: group size 32 should divide the model's head_dim, 16"):
        CacheConfig.parse("kivi", 32).empty(model.config, **sizes)
    with pytest.raises(InputError, match="residual 64 should be a multiple of the group size, 12"):
        CacheConfig.parse("kivi:group=12,residual=64", 4).empty(model.config, **sizes)
    assert CacheConfig.parse("kivi:residual=24", 12).schedule_for(48).flush_size == 24
    for text in CACHES:
        CacheConfig.parse(text, 8).check(model.config)
    with pytest.raises(InputError, match="cache specache: residual 20 should be a multiple of the group size, 16"):
        CacheConfig.parse("specache:residual=20").check(model.config)
    assert CacheConfig.parse("kivi:bits=1").settings == KiviSettings(bits=1)
    assert CacheConfig.parse("kivi:group=8", 4).group_size_for(16) == 8 and CacheConfig.parse("kivi:bits=1", 4).group_size_for(16) == 4
    (layer, _) = CacheConfig.parse("kivi:group=8,residual=16", 4).empty(model.config, **sizes).layers
    assert (layer.keys.group_tokens, layer.values.scale.shape[3]) == (8, 2)


@pytest.mark.parametrize("command", [["generate", "--prompt", "a", "--draft", "none"], ["eval", "needle"], ["eval", "perplexity"]])
def test_a_cache_that_no_such_model_can_have_is_refused_before_its_weights_are_read(fails, monkeypatch, command):
    monkeypatch.setattr(loading, "load_model", None)
    words = "cache kivi: residual 100 should be a multiple of the group size, 32"
    fails([*command, "--model", demo.MODEL, "--cache", "kivi:residual=100"], words)


def test_a_prompt_is_encoded_some_heads_at_a_time(monkeypatch):
    """To the same codes as all of them at once."""
    keys, model = numbers(1, 2, 40, 16, dtype=jnp.float32), random_model("float32")
    sizes = dict(batch=1, capacity=48, num_speculative_tokens=0, dtype=model.dtype)
    empty = CacheConfig.parse("kivi:bits=2,residual=8", 4).empty(model.config, **sizes)
    fill = lambda: jax.jit(lambda: empty.fill(0, keys, 2 * keys, jnp.array([37])))()
    parts, equal_parts, at_once = [], prompts.equal_parts, fill()
    monkeypatch.setattr(prompts, "QUANTIZED_BYTES", 1)
    monkeypatch.setattr(prompts, "equal_parts", lambda *args: parts.append(equal_parts(*args)) or equal_parts(*args))
    jax.tree.map(np.testing.assert_array_equal, fill(), at_once)
    assert parts == [2, 2] and np.asarray(at_once.keys.codes).any()


def test_what_its_kernel_does_not_support(monkeypatch):
    monkeypatch.setattr(mosaic_low_bits, "no_mosaic_gpu", lambda: None)
    bf16 = lambda *shape: jnp.zeros(shape, jnp.bfloat16)
    dtype = lambda group: jnp.bfloat16 if group == 1 else jnp.float16  # of values, and of keys
    coded = lambda channels, group, bits=2: LowBits.zeros(1, 1, 64, 64, dtype(group), bits=bits, tokens=group, channels=channels)
    layer = lambda group=32: TokenCodesLayer(coded(1, group), coded(32, 1), FullLayer(bf16(1, 1, 80, 64), bf16(1, 1, 80, 64)))
    lengths, q = Lengths(jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)), bf16(1, 1, 2, 64)
    assert mosaic_low_bits.unsupported(q, layer(), lengths) is None
    eight = TokenCodes.of(bf16(1, 1, 64, 64), scheme="int8_first")
    other = functools.partial(dataclasses.replace, layer())
    wide = jax.tree.map(lambda x: x if x.dtype == jnp.uint8 else x.astype(jnp.float32), layer().values)
    short = dataclasses.replace(layer().keys, codes=layer().keys.codes[:, :, :48])
    cases = (
        ((q, other(keys=eight, values=eight), lengths), "not yet those in 8"),
        ((q.astype(jnp.float32), layer(), lengths), "a cache in bfloat16, not float32"),
        ((bf16(1, 17, 2, 64), layer(), lengths), "up to 8 query rows of a KV head, not 34"),
        ((bf16(1, 1, 2, 32), layer(), lengths), "head_dim 64, 128 and 256, not 32"),
        ((q, layer(), Lengths(np.zeros(1, np.int64), np.ones(1, np.int64))), "lengths in int32, not int64"),
        ((q, layer(16), lengths), "a multiple of 32 tokens, not 16 of 64"),
        ((q, other(keys=short), lengths), "a multiple of 32 tokens, not 24 of 48"),
        ((bf16(1, 5, 2, 64), layer(), lengths), "up to 8 query rows of a KV head, not 10"),
        ((q, other(keys=coded(1, 32, 1), values=coded(32, 1, 1)), lengths), "a multiple of 16 bytes, not 8"),
        ((q, other(values=coded(32, 1, 1)), lengths), "as many bits for values as for keys, not 1 and 2"),
        ((q, other(values=coded(8, 1)), lengths), "a multiple of 16 of a value's channels, 8 at most, not 8 of 8"),
        ((q, other(keys=coded(32, 32)), lengths), "a scale for each channel"),
        ((q, other(values=wide), lengths), "a cache in bfloat16, not float32"),
        ((q, other(keys=layer().values), lengths), "keys' scales and zeros in float16, not bfloat16"),
    )
    for args, words in cases:
        assert words in (mosaic_low_bits.unsupported(*args) or ""), words
