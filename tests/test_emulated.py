"""Emulated caches: the stored format's own quantizer gives what the hierarchical cache gives; the others, what they should."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import random_model, random_prompts
from tiers import in_system

from pallas_kernels.formats.kv_cache import FullLayer, Lengths, dequantize_groups
from pallas_kernels.formats.rounding import parameter_dtype
from pallas_kernels.formats.views import DenseView
from qspec_jax.caches.full import FullCache
from qspec_jax.caches.prefill import prefill
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.drafts import quantspec
from qspec_jax.errors import InputError
from qspec_jax.evaluate import acceptance, quantizers
from qspec_jax.evaluate.cache_views import CacheView
from qspec_jax.evaluate.emulated import EmulatedConfig, Quantizer, in_groups
from qspec_jax.evaluate.scoring import score

G = 4


@pytest.fixture(scope="module")
def float64():
    with jax.enable_x64(True):
        yield


def both_caches(scheme):
    """What makes the hierarchical cache, and its emulation."""
    return CacheConfig(group_size=G, scheme=scheme), EmulatedConfig(Quantizer(scheme=scheme), G)


# The stored format's own quantizer ----------------------------------------------------------------------------------------


@pytest.mark.system
def test_decoding_is_that_of_the_hierarchical_cache(float64):
    """Rows of all kinds of lengths, through eight flushes and more: the same probabilities, for draft and target."""
    model = random_model(jnp.float64, num_hidden_layers=1)
    prompts, continuations = random_prompts([1, G + 1, 2 * G, 5 * G + 3]), random_prompts([30, 40, 17, 33], seed=4)
    cases = ("int8_first", 1), ("paper", 2)
    views = [CacheView(cache, DenseView(planes)) for scheme, planes in cases for cache in both_caches(scheme)]
    found = score(model, prompts, continuations, views, width=7).logprobs
    for row, tokens in enumerate(continuations):
        of_row = found[:, row, : len(tokens)]
        np.testing.assert_allclose(of_row[1::2], of_row[::2], atol=1e-11)
        # Otherwise nothing quantized was read.
        assert np.abs(of_row[0] - of_row[2]).max() > 1e-4


@pytest.mark.parametrize(("scheme", "dtype"), [("int8_first", "bfloat16"), *in_system(("paper", "float32"))])
def test_what_is_read_is_what_the_hierarchical_cache_stores(dtype, scheme):
    """To float32's rounding, in either dtype of the model: after prefill of rows of several lengths, and after a flush of two of them."""
    model = random_model(jnp.dtype(dtype), num_hidden_layers=1)
    rng = np.random.default_rng(0)
    real, emulated = (
        config.empty(model.config, batch=3, capacity=32, num_speculative_tokens=3, dtype=model.dtype) for config in both_caches(scheme)
    )
    keys, values = (jnp.asarray(rng.normal(size=(3, 2, 24, 16)), dtype) for _ in range(2))
    n = jnp.array([1, 2 * G + 1, 5 * G + 2])
    # Then the first row and the last buffer 2G tokens, the second one fewer.
    more = jnp.array([2 * G - 1, G - 2, G - 2])

    @jax.jit
    def steps(real, emulated):
        caches = []
        for cache in (real, emulated):
            cache = cache.filled((cache.fill(0, keys, values, n),), n)
            caches.append(cache)
            full = cache.lengths.buffered + more
            caches.append(dataclasses.replace(cache, lengths=dataclasses.replace(cache.lengths, buffered=full)).flush()[0])
        return caches

    found = steps(real, emulated)
    for stored, read in zip(found[:2], found[2:]):
        np.testing.assert_array_equal(stored.lengths.quantized, read.lengths.quantized)
        np.testing.assert_array_equal(stored.lengths.buffered, read.lengths.buffered)
        layer, views = stored.layers[0], read.layers[0]
        for planes, view in ((1, views.draft), (2, views.target)):
            expected = dequantize_groups(layer.keys, layer.values, planes=planes, dtype=jnp.float32)
            for whole, mine, buffer in zip(expected, (view.keys, view.values), (layer.buffer.keys, layer.buffer.values)):
                assert mine.dtype == jnp.float32
                for row, (quantized, buffered) in enumerate(zip(*jax.tree.leaves(stored.lengths))):
                    tokens = np.asarray(whole[row]).reshape(2, -1, 16)
                    # A step is 1e-2 and more.
                    np.testing.assert_allclose(mine[row, :, :quantized], tokens[:, :quantized], atol=1e-6)
                    end = min(24, int(quantized + buffered))
                    np.testing.assert_array_equal(mine[row, :, quantized:end], np.float32(buffer[row, :, : end - quantized]))
    np.testing.assert_array_equal(found[1].lengths.quantized, [G, G, 5 * G])
    np.testing.assert_array_equal(found[0].lengths.quantized, [0, G, 4 * G])


@pytest.mark.system
def test_acceptance_is_that_of_the_hierarchical_cache(float64):
    """Greedy drafts from the upper plane alone, along two texts."""
    model = random_model(jnp.float64, num_hidden_layers=1)
    texts = random_prompts([50, 41])
    config = GenerationConfig(draft="quantspec", max_new_tokens=30, num_speculative_tokens=3, group_size=G)
    walk = functools.partial(acceptance.teacher_forced, model, quantspec(model, weight_bits=16), texts, config, jax.random.key(0))
    expected = walk()
    assert 0 < expected.accepted < expected.drafted
    assert walk(cache=both_caches("int8_first")[1]) == expected


# Other quantizers ----------------------------------------------------------------------------------------------------------


def groups(seed=0):
    """Two heads of three groups, in float64: keys and values [1, 2, 3, G, 16]."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(1, 2, 3, G, 16))) for _ in range(2)]


@pytest.mark.parametrize("keys", ["channel", "token"])
@pytest.mark.parametrize("values", ["channel", "token"])
def test_axes(float64, keys, values):
    """What is constant within each group is read exactly, and along the other axis it is not; each group has a range of its own."""
    spread = {"channel": jnp.arange(1.0, 17), "token": jnp.arange(1.0, G + 1)[:, None]}
    quantizer = Quantizer(keys, values)
    for view in quantizer.views(*(jnp.broadcast_to(spread[axis], (1, 2, 3, G, 16)) for axis in (keys, values)), jnp.dtype(jnp.float64)):
        np.testing.assert_allclose(view.keys, jnp.broadcast_to(spread[keys], view.keys.shape), rtol=1e-12)
        np.testing.assert_allclose(view.values, jnp.broadcast_to(spread[values], view.values.shape), rtol=1e-12)
    other = {"channel": "token", "token": "channel"}
    view, _ = quantizer.views(*(jnp.broadcast_to(spread[other[axis]], (1, 2, 3, G, 16)) for axis in (keys, values)), jnp.dtype(jnp.float64))
    assert jnp.abs(view.keys - spread[other[keys]]).max() > 0.05 and jnp.abs(view.values - spread[other[values]]).max() > 0.05

    raw = groups()
    axis = {"channel": -2, "token": -1}
    for view, steps in zip(quantizer.views(*raw, jnp.dtype(jnp.float64)), (16, 1)):
        for x, read, by in zip(raw, (view.keys, view.values), (keys, values)):
            step = steps * (x.max(axis[by], keepdims=True) - x.min(axis[by], keepdims=True)) / 255
            assert (jnp.abs(read - x) <= step * 0.54).all()


def test_truncation_rounds_down(float64):
    """Codes run from 0 to 255 over a group's range: a draft reads the multiple of 16 below, the target all 8 bits."""
    x = jnp.asarray(np.random.default_rng(0).uniform(size=(1, 1, 1, 64, 2))).at[..., 0, :].set(0.0).at[..., 1, :].set(1.0)
    draft, target = Quantizer("channel", "channel", "truncation").views(x, x, jnp.dtype(jnp.float64))
    codes = np.rint(x * 255)
    np.testing.assert_allclose(target.keys, codes / 255, atol=1e-12)
    np.testing.assert_allclose(draft.values, codes // 16 * 16 / 255, atol=1e-12)
    rounded, _ = Quantizer("channel", "channel").views(x, x, jnp.dtype(jnp.float64))
    error = lambda view: float(jnp.sqrt(jnp.mean((view.keys - x) ** 2)))
    assert error(draft) > 1.7 * error(rounded)


def test_scales_have_the_stored_precision():
    """A model in bfloat16 has scales rounded to bfloat16; the numbers that they give are not."""
    keys, values = (x.astype(jnp.bfloat16) for x in groups())
    coarse, _ = Quantizer().views(keys, values, parameter_dtype(jnp.bfloat16))
    fine, _ = Quantizer().views(keys, values, jnp.dtype(jnp.float32))
    assert coarse.keys.dtype == jnp.float32
    assert jnp.abs(coarse.keys - fine.keys).max() > 1e-4
    assert (coarse.keys != coarse.keys.astype(jnp.bfloat16)).any()


def test_unknown_quantizers():
    for wrong in (dict(keys="head"), dict(values="group"), dict(scheme="magic")):
        with pytest.raises(InputError, match=next(iter(wrong.values()))):
            Quantizer(**wrong)


def test_reading_errors(float64):
    """Against the errors of keys and values that prefill puts in a full cache, in rows of several lengths and in two batches."""
    model = random_model(jnp.float64, num_hidden_layers=1)
    prompts = random_prompts([5 * G + 1, 2 * G - 1, 3 * G])
    variants = [Quantizer(), Quantizer("token", "channel", "paper"), Quantizer(scheme="truncation")]
    found = quantizers.reading_errors(model, prompts, variants, group_size=G)
    tokens = jnp.array([row + [0] * (64 - len(row)) for row in prompts])
    n = jnp.array([len(row) for row in prompts])
    empty = FullCache((FullLayer.zeros(3, 2, 64, 16, jnp.float64),), Lengths(0 * n, 0 * n))
    layer = jax.jit(prefill)(model, tokens, n, empty)[1].layers[0]
    raw = [in_groups(x, G) for x in (layer.keys, layer.values)]
    # Whole groups but the last: 4, none and 2.
    pick = lambda x: np.concatenate([np.asarray(x[0, :, :4]).ravel(), np.asarray(x[2, :, :2]).ravel()])
    rms = lambda x: np.sqrt(np.mean(x**2))
    for quantizer, errors in zip(variants, found, strict=True):
        for view, (key_error, value_error) in zip(quantizer.views(*raw, jnp.dtype(jnp.float64)), errors):
            assert key_error == pytest.approx(rms(pick(view.keys) - pick(raw[0])) / rms(pick(raw[0])))
            assert value_error == pytest.approx(rms(pick(view.values) - pick(raw[1])) / rms(pick(raw[1])))
    assert (found[:, 0] > 10 * found[:, 1]).all()


# The command ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text("".join(f"value_{i} = {i}\n" for i in range(40)))
    return path


SIZES = ["--prompt-tokens", 40, "--max-new-tokens", 24, "--group-size", 8]


@pytest.mark.system
def test_eval_quantizers(run, directory, file, tmp_path):
    plot, short = tmp_path / "plot.svg", tmp_path / "short.py"
    short.write_text("import os\n")
    command = ["eval", "quantizers", file, short, "--model", directory, *SIZES, "--variant", "truncation"]
    code, out, err = run(*command, "--json", "--plot", plot)
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert set(report) == {field.name for field in dataclasses.fields(quantizers.QuantizersReport)}
    assert (report["texts"], report["tokens"], report["group_size"], report["gamma"]) == (1, 24, 8, 4)
    assert [text["name"] for text in report["too_short"]] == [str(short)]
    (row,) = report["results"]
    assert (row["variant"], row["keys"], row["values"], row["scheme"]) == ("truncation", "channel", "token", "truncation")
    draft, target = row["draft"], row["target"]
    for name in ("kl", "key_error", "value_error"):
        assert 0 < 10 * target[name] < draft[name]
    for reading in (draft, target):
        assert reading["perplexity_change"] == pytest.approx(reading["perplexity"] / report["full_perplexity"] - 1)
    assert row["acceptance_rate"] == row["accepted"] / row["drafted"] and 15 <= row["drafted"] <= 23 * 4
    assert "</svg>" in plot.read_text()
    code, out, _ = run(*command)
    assert code == 0
    for words in ("truncation", "target", "24 tokens", "1 text left out", f"{draft['key_error']:.2%}", f"{row['acceptance_rate']:.4f}"):
        assert words in out


def test_variants(fails, file):
    fails(["eval", "quantizers", file, "--variant", "magic"], "magic", *quantizers.VARIANTS)
    assert len({*quantizers.VARIANTS.values()}) == 6


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--prompt-tokens", "15"], "prompt_tokens 15 should be at least 16"),
        (["--max-new-tokens", "2"], "max_new_tokens"),
        (["--prompt-tokens", "120"], "128 positions"),
        (["--plot", "plot.txt"], "plot.txt"),
    ],
)
def test_bad_input(fails, directory, file, flags, word):
    fails(["eval", "quantizers", file, "--model", directory, *SIZES, *flags], word)
