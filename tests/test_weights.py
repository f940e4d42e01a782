"""INT4 weights: never worse than plain rounding, packed as documented; with moments of the inputs, better where it counts. INT8 rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import in_system
from weight_matrices import BFLOAT16, OUT, read, weights

from pallas_kernels.formats.weights import Int4Weight, Int8Weight, dequantize_weight
from pallas_kernels.matmul import coded_matmul, linear
from qspec_jax.quantization.weights import quantize_rows, quantize_weight, weight_group_size

dequantize_jit = jax.jit(dequantize_weight, static_argnames="dtype")
matmul_jit = jax.jit(lambda x, weight: coded_matmul(x, (weight,)))


def plain_rounding(weight: np.ndarray, size: int, *, farther: float = 1) -> np.ndarray:
    """Round to nearest over each group's full range, scale and zero stored as quantize_weight stores them. farther: times the scale."""
    narrow = weight.dtype == BFLOAT16
    n, wide = weight.shape[1], weight.astype(np.float32 if narrow else weight.dtype)
    groups = np.pad(wide, ((0, 0), (0, -n % size)), mode="edge").reshape(len(wide), -1, size)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale, zero = np.maximum((high - low) / 15 * wide.dtype.type(farther), np.finfo(wide.dtype).tiny), low
    if narrow:
        scale, zero = up_to_bfloat16(scale), -up_to_bfloat16(-zero)
    codes = np.clip(np.rint((groups - zero) / scale), 0, 15)
    return (codes.astype(np.float64) * scale + zero).reshape(len(wide), -1)[:, :n]


def up_to_bfloat16(x: np.ndarray) -> np.ndarray:
    nearest = x.astype(BFLOAT16)
    return np.where(nearest.astype(np.float32) < x, np.nextafter(nearest, BFLOAT16.type(np.inf)), nearest).astype(np.float64)


def error_per_group(weight: np.ndarray, stored: np.ndarray, size: int) -> np.ndarray:
    error = weight.astype(np.float64) - stored
    return np.square(np.pad(error, ((0, 0), (0, -error.shape[1] % size)))).reshape(len(error), -1, size).sum(-1)


# Rounding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "in_features, size", [(4096, 128), (128, 128), (192, 64), (64, 64), (96, 32), (32, 32), (80, 32), (100, 32), (7, 32)]
)
def test_group_size(in_features, size):
    assert weight_group_size(in_features) == size


@pytest.mark.parametrize(
    "in_features, dtype",
    [(256, "float32"), (256, "bfloat16"), (192, "bfloat16"), (96, "float64"), (80, "float32"), (100, "bfloat16")],
)
def test_never_worse_than_plain_rounding(in_features, dtype):
    size = weight_group_size(in_features)
    with jax.enable_x64(dtype == "float64"):
        for name, weight in weights(in_features).items():
            weight = weight.astype(BFLOAT16 if dtype == "bfloat16" else dtype)
            q = quantize_weight(jnp.asarray(weight))
            assert q.scale.dtype == q.zero.dtype == dtype
            error = error_per_group(weight, read(q), size)
            # A scale that bfloat16 holds exactly may be stored as the one above: XLA divides by 15 to the last bit but one.
            plain = [error_per_group(weight, plain_rounding(weight, size, farther=f), size) for f in (1, 1 + 2.0**-22)]
            smallest = (1e-6 * abs(weight.astype(np.float64)).max()) ** 2
            assert (error <= 1.0001 * np.maximum(*plain) + smallest).all(), name
            if name in ("gaussian", "huge", "tiny"):
                assert error.sum() < 0.88 * plain[0].sum(), name
            if name in ("outliers", "heavy tails"):
                assert error.sum() < 0.45 * plain[0].sum(), name
            if name in ("constant rows", "zeros"):
                np.testing.assert_array_equal(read(q), weight.astype(np.float64))


def test_sixteen_levels_are_kept():
    r = np.random.default_rng(0)
    codes = r.integers(0, 16, (OUT, 2, 128))
    codes[..., 5], codes[..., 77] = 0, 15
    for scale in (2.0**-6, 0.01, 0.3):
        for zero in (-7.5 * scale, 0.0, 0.7):
            weight = (np.float32(scale) * codes + np.float32(zero)).reshape(OUT, 256).astype(np.float32)
            q = quantize_weight(jnp.asarray(weight))
            np.testing.assert_array_equal(np.concatenate([np.asarray(q.codes) & 15, np.asarray(q.codes) >> 4], -1), codes)
            assert abs(read(q) - weight).max() <= 2 * np.spacing(abs(weight).max()), (scale, zero)


@pytest.mark.parametrize("in_features, groups, size", [(256, 2, 128), (100, 4, 32)])
def test_layout(in_features, groups, size):
    weight = weights(in_features)["gaussian"].astype(BFLOAT16)
    q = quantize_weight(jnp.asarray(weight))
    assert q.codes.shape == (OUT, groups, size // 2) and q.codes.dtype == jnp.uint8
    assert q.scale.shape == q.zero.shape == (OUT, groups)
    assert q.shape == weight.shape and q.in_features == in_features
    assert q.nbytes == OUT * groups * (size // 2 + 4)
    for dtype in ("float32", "bfloat16"):
        wide = dequantize_jit(q, dtype=dtype)
        assert wide.dtype == dtype and wide.shape == weight.shape
        np.testing.assert_allclose(np.asarray(wide).astype(np.float64), read(q), rtol=0, atol=16 * float(jnp.finfo(dtype).eps) * 0.1)
    # The right input's code in the right place: half a step of the scale, but for what is clipped.
    step = np.repeat(np.asarray(q.scale).astype(np.float64), size, -1)[:, :in_features]
    assert np.quantile(abs(read(q) - weight.astype(np.float64)) / step, 0.9) <= 0.5


def test_bits_per_weight():
    q = jax.eval_shape(quantize_weight, jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16))
    size = sum(x.size * x.dtype.itemsize for x in (q.codes, q.scale, q.zero))
    assert 8 * size / 4096**2 == 4.25
    q = quantize_weight(jnp.asarray(weights(256)["gaussian"], jnp.bfloat16))
    assert 8 * q.nbytes / (OUT * 256) == 4.25


@pytest.mark.parametrize("dtype, in_features", [("float32", 256), ("bfloat16", 256), ("float64", 96), ("float32", 80)])
def test_matmul(dtype, in_features):
    with jax.enable_x64(dtype == "float64"):
        q = quantize_weight(jnp.asarray(weights(in_features)["mean 100"] - 100, dtype))
        x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, in_features)), dtype)
        y = matmul_jit(x, q)
        assert y.shape == (2, 3, OUT) and y.dtype == dtype
        expected = np.asarray(x).astype(np.float64) @ read(q).T
        # Sums are at least in float32; bfloat16 is rounded to once, at the end.
        tolerance = 1e-5 * abs(expected).max() if dtype != "float64" else 1e-13
        rounding = 2.0**-8 * abs(expected) if dtype == "bfloat16" else 0
        assert (abs(np.asarray(y).astype(np.float64) - expected) <= tolerance + rounding).all()
        np.testing.assert_allclose(matmul_jit(x[0, 0], q).astype(jnp.float32), y[0, 0].astype(jnp.float32), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "formats", [("full",), ("int4",), ("int8",), ("int4", "int4"), ("int8", "full"), ("full", "int4", "int8")], ids="-".join
)
@pytest.mark.parametrize("dtype", ["bfloat16", *in_system("float32", "float64")])
def test_linear_layers_of_any_format(dtype, formats, biased):
    with jax.enable_x64(dtype == "float64"):
        r = np.random.default_rng(2)
        draw = lambda *shape: jnp.asarray(r.standard_normal(shape), dtype)
        make = {"full": lambda w: w, "int4": quantize_weight, "int8": quantize_rows}
        layers = [make[name](draw(OUT + i, 128)) for i, name in enumerate(formats)]
        biases = [draw(OUT + i) for i in range(len(layers))] if biased else []
        x = draw(2, 3, 128)
        y = linear(x, layers, biases)
        assert y.dtype == dtype
        wide = lambda array: np.asarray(array, np.float64)
        stored = {Int4Weight: read, Int8Weight: lambda w: wide(w.codes) * wide(w.scale)[:, None]}
        expected = np.concatenate([wide(x) @ stored.get(type(w), wide)(w).T for w in layers], -1)
        expected = expected + np.concatenate([wide(bias) for bias in biases]) if biased else expected
        np.testing.assert_allclose(wide(y), expected, rtol=0, atol={"float32": 1e-4, "bfloat16": 0.3, "float64": 1e-11}[dtype])
        if not biased:
            assert linear(x, layers, dtype=jnp.promote_types(dtype, jnp.float32)).dtype == jnp.promote_types(dtype, jnp.float32)


def test_linear_layers_have_all_a_bias_or_none():
    with pytest.raises(ValueError, match="1 biases for 2 weights"):
        linear(jnp.zeros((1, 4)), [jnp.zeros((2, 4))] * 2, [jnp.zeros(2)])


# Rounding for the inputs ----------------------------------------------------------------------------------------------


def correlated_inputs(in_features: int, tokens: int, seed: int = 0) -> np.ndarray:
    """Inputs with a few directions that are strong, as hidden states have."""
    r = np.random.default_rng(seed)
    mix = np.random.default_rng(5).standard_normal((in_features, in_features)) * np.linspace(2, 0.05, in_features) ** 3
    return r.standard_normal((tokens, in_features)) @ mix.T


def output_error(weight: np.ndarray, stored: np.ndarray, moments: np.ndarray) -> float:
    """E |(W - Q) x|^2 times the number of inputs."""
    error = weight.astype(np.float64) - stored
    return float((error @ moments * error).sum())


@pytest.mark.parametrize("dtype, in_features", [("bfloat16", 256), ("float32", 80), *in_system(("float32", 256), ("float64", 96))])
def test_moments_reduce_the_error_of_outputs(dtype, in_features):
    x, unseen = correlated_inputs(in_features, 2048), correlated_inputs(in_features, 2048, seed=1)
    with jax.enable_x64(dtype == "float64"):
        weight = weights(in_features)["gaussian"].astype(BFLOAT16 if dtype == "bfloat16" else dtype)
        moments = x.T @ x
        plain = read(quantize_weight(jnp.asarray(weight)))
        q = quantize_weight(jnp.asarray(weight), jnp.asarray(moments, jnp.promote_types(dtype, jnp.float32)))
        assert q.codes.shape == quantize_weight(jnp.asarray(weight)).codes.shape and q.scale.dtype == dtype
        fitted = read(q)
    for inputs in (x, unseen):
        assert output_error(weight, fitted, inputs.T @ inputs) < 0.5 * output_error(weight, plain, inputs.T @ inputs)


def naive_codes(weight: np.ndarray, moments: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """GPTQ's rounding with given parameters per weight, as its derivation has it: after each input, the others are solved for anew."""
    weight, codes = weight.copy(), np.zeros(weight.shape)
    moments = moments + 0.01 * np.diag(moments).mean() * np.eye(len(moments))
    for i in range(weight.shape[1]):
        codes[:, i] = np.clip(np.rint((weight[:, i] - zero[:, i]) / scale[:, i]), 0, 15)
        error = weight[:, i] - codes[:, i] * scale[:, i] - zero[:, i]
        rest = moments[i + 1 :, i + 1 :]
        if len(rest):
            weight[:, i + 1 :] += np.outer(error, np.linalg.solve(rest, moments[i + 1 :, i]))
    return codes


def test_compensation_is_what_its_derivation_says():
    with jax.enable_x64(True):
        weight, x = weights(96)["gaussian"], correlated_inputs(96, 500)
        q = quantize_weight(jnp.asarray(weight), jnp.asarray(x.T @ x))
    scale, zero = (np.repeat(np.asarray(p), 32, -1) for p in (q.scale, q.zero))
    codes = np.rint((read(q) - zero) / scale)
    np.testing.assert_array_equal(codes, naive_codes(weight, x.T @ x, scale, zero))


def test_moments_without_correlation_change_nothing():
    weight = weights(256)["gaussian"].astype(np.float32)
    plain = quantize_weight(jnp.asarray(weight))
    for power in (1e-20, 1.0, 1e20):
        q = quantize_weight(jnp.asarray(weight), jnp.asarray(power * np.eye(256, dtype=np.float32)))
        assert (np.asarray(q.codes) == np.asarray(plain.codes)).mean() > 0.999
        assert output_error(weight, read(q), np.eye(256)) == pytest.approx(output_error(weight, read(plain), np.eye(256)), rel=1e-3)


def test_moments_weigh_the_search():
    # Without correlation too, an input of a hundred times the power is rounded with more care.
    weight, power = weights(256)["gaussian"].astype(np.float32), np.where(np.arange(256) % 32 == 7, 100.0, 1.0)
    plain, fitted = read(quantize_weight(jnp.asarray(weight))), read(quantize_weight(jnp.asarray(weight), jnp.diag(jnp.asarray(power))))
    assert output_error(weight, fitted, np.diag(power)) < 0.7 * output_error(weight, plain, np.diag(power))


def singular_moments() -> dict[str, np.ndarray]:
    x = np.random.default_rng(2).standard_normal((1000, 256))
    dead = x * (np.arange(256) % 5 > 0)
    group = x * (np.arange(256) >= 128)
    return {
        "few inputs": x[:16],
        "one input": x[:1],
        "the same input": np.repeat(x[:1], 100, 0),
        "all alike": np.ones((10, 256)),
        "dead channels": dead,
        "a dead group": group,
        "the last alone": x * (np.arange(256) == 255),
        "a loud channel": np.where(np.arange(256) == 9, 1000, 1) * x,
        "large": 1e12 * x[:16],
        "small": 1e-12 * x[:16],
    }


@pytest.mark.parametrize("dtype", ["bfloat16", *in_system("float32")])
def test_singular_moments(dtype):
    weight = weights(256)["gaussian"].astype(BFLOAT16 if dtype == "bfloat16" else dtype)
    plain = read(quantize_weight(jnp.asarray(weight)))
    for name, x in singular_moments().items():
        q = quantize_weight(jnp.asarray(weight), jnp.asarray(x.T @ x, jnp.float32))
        assert np.isfinite(read(q)).all(), name
        assert output_error(weight, read(q), x.T @ x) < 1.02 * output_error(weight, plain, x.T @ x), name
        # What makes up for errors elsewhere stays a weight of that layer.
        assert abs(read(q)).max() < 1.5 * abs(plain).max(), name
        assert np.square(read(q) - weight.astype(np.float64)).sum() < 0.1 * np.square(weight.astype(np.float64)).sum(), name


@pytest.mark.parametrize("in_features", [256, 80])
def test_moments_of_zero_are_no_moments(in_features):
    weight = jnp.asarray(weights(in_features)["gaussian"], jnp.float32)
    plain, q = quantize_weight(weight), quantize_weight(weight, jnp.zeros((in_features, in_features)))
    assert (np.asarray(q.codes) == np.asarray(plain.codes)).mean() > 0.999
    np.testing.assert_allclose(q.scale, plain.scale, rtol=1e-5)


# INT8 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
@pytest.mark.parametrize("name", weights(256))
def test_rows_are_rounded_to_the_nearest_of_255_codes(name, dtype):
    weight = weights(256)[name].astype(dtype)
    found = jax.jit(quantize_rows)(jnp.asarray(weight))
    wide = weight.astype(np.float64)
    codes, scale = np.asarray(found.codes, np.float64), np.asarray(found.scale, np.float64)[:, None]
    assert (found.codes.dtype, found.scale.dtype, found.shape) == (jnp.int8, jnp.float32, weight.shape)
    np.testing.assert_allclose(scale[:, 0] * 127, np.abs(wide).max(1), rtol=1e-6, atol=1e-30)
    assert (np.abs(codes * scale - wide) <= 0.5001 * scale).all() and np.abs(codes).max() <= 127
