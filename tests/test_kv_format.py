"""The two 4-bit planes: bounds of the error, groups that nothing else may touch, rounding of the parameters, packing and layout."""

import functools
from collections.abc import Callable

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.formats.kv_cache import HierarchicalLayer, Planes, dequantize_groups, quantize_groups
from pallas_kernels.formats.quantization import SCHEMES, dequantize, pack, quantize, unpack
from pallas_kernels.formats.rounding import parameter_dtype, round_down, round_up

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Largest error in steps of scale / 16 of both planes, and of the upper one: rounding E to -8..7 leaves one step where E is 8;
# one rounding to 8 bits leaves half a step, and the lower code, at least -8, is half a scale.
BOUNDS = {"paper": (1, 8), "int8_first": (0.5, 8.5)}
# What float32 arithmetic may add to that.
SLACK = 2e-4

quantize_jit = jax.jit(quantize, static_argnames=("axis", "scheme", "dtype"))
dequantize_jit = jax.jit(dequantize, static_argnames="dtype")
pack_jit, unpack_jit = (jax.jit(function) for function in (pack, unpack))
quantize_groups_jit = jax.jit(quantize_groups, static_argnames=("scheme", "dtype"))
dequantize_groups_jit = jax.jit(dequantize_groups, static_argnames=("planes", "dtype"))
repeatably = functools.partial(settings, deadline=None, derandomize=True, database=None)
both = pytest.mark.parametrize("scheme", SCHEMES)


def stored(x: np.ndarray, scheme: str, dtype: str) -> tuple[np.ndarray, ...]:
    """Upper and lower as stored, scale and zero, of groups along the last axis."""
    # Always 64 groups at a time, so that JAX compiles one shape.
    batches = np.pad(x, ((0, -len(x) % 64), (0, 0))).reshape(-1, 64, x.shape[1])
    parts = [quantize_jit(jnp.asarray(batch), axis=-1, scheme=scheme, dtype=dtype) for batch in batches]
    result = tuple(np.concatenate(part)[: len(x)] for part in zip(*parts))
    assert [y.shape for y in result] == [x.shape, x.shape, (len(x), 1), (len(x), 1)]
    assert [y.dtype for y in result] == [np.uint8, np.uint8, dtype, dtype]
    assert max(result[0].max(), result[1].max()) <= 15
    return result


def errors_in_steps(x: np.ndarray, planes: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """|x - what is stored| / (scale / 16), with both planes and with the upper one, in more than float64."""
    upper, lower, scale, zero = (y.astype(np.longdouble) for y in planes)
    step, x = scale / 16, x.astype(np.longdouble)
    return abs(x - (16 * upper + lower - 8) * step - zero) / step, abs(x - 16 * upper * step - zero) / step


def assert_within_a_step(x: np.ndarray, scheme: str, dtype: str) -> tuple[np.ndarray, ...]:
    planes = stored(x, scheme, dtype)
    assert np.isfinite(planes[2].astype(float)).all() and (planes[2] > 0).all() and np.isfinite(planes[3].astype(float)).all()
    for error, bound in zip(errors_in_steps(x, planes), BOUNDS[scheme]):
        assert error.max() <= bound + SLACK
    return planes


def bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}")


# Error ----------------------------------------------------------------------------------------------------------------


def _groups() -> dict[str, np.ndarray]:
    """64 groups of 128 in float64, all within float32."""
    r = np.random.default_rng(0)
    gauss = r.standard_normal((64, 128))
    row = np.arange(64)[:, None]
    at = np.arange(128) == row  # another place in every group
    return {
        "gaussian": gauss,
        "uniform": r.uniform(size=gauss.shape),
        "mean 100": gauss + 100,
        "mean -100": gauss - 100,
        "mean 1e4": gauss + 1e4,
        "mean -1e4": gauss - 1e4,
        "mean 1e6": 1e-3 * gauss + 1e3,
        "means": gauss * (1 + row) + 1000 * np.linspace(-1, 1, 64)[:, None],
        "outlier": np.where(at, 1000 * abs(gauss), gauss),
        "outlier below": np.where(at, -1000 * abs(gauss), gauss),
        "two outliers": np.where(at, 1000.0, np.where(at[:, ::-1], -1000.0, gauss)),
        "huge range": np.sign(gauss) * 10 ** r.uniform(-30, 30, gauss.shape),
        "whole float32": np.where(at, 1e38, np.where(at[:, ::-1], -1e38, gauss)),
        "around 1e38": np.clip(gauss, -1, 1) * 1e38,
        "constants": np.broadcast_to(np.where(row % 2, -1, 1) * 1.37 ** (row - 32.0), gauss.shape),
        "small constants": np.broadcast_to(10 ** (-20 - row / 2.5), gauss.shape),
        "zeros": 0 * gauss,
        "one step of a float apart": np.where(at, 1 + 2.0**-23, 1.0),
        "two values": np.where(gauss > 0, 0.1, -0.3),
        "smallest normal": gauss * 10 ** (-30 - row / 7.0),
        "subnormal": gauss * 1e-39,
        "subnormal with a mean": 1e-39 * abs(gauss) + 2e-39,
        "subnormal outlier": np.where(at, 1e-30, 1e-39 * gauss),
    }


GROUPS = _groups()
FORMATS = [("float32", "bfloat16"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float64", "float64")]


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("x_dtype, dtype", FORMATS, ids=["-".join(f) for f in FORMATS])
@both
def test_error_is_at_most_one_step(scheme, x_dtype, dtype, name):
    with np.errstate(over="ignore"):
        x = GROUPS[name].astype(BFLOAT16 if x_dtype == "bfloat16" else x_dtype)
    if x_dtype == "float16":
        x = np.clip(x, np.finfo(np.float16).min, np.finfo(np.float16).max)
    with jax.enable_x64(x_dtype == "float64"):
        assert_within_a_step(x, scheme, dtype)


finite = st.floats(-(2.0**126), 2.0**126, width=32)
centred = st.tuples(st.floats(-(2.0**120), 2.0**120, width=32), st.sampled_from([2.0**-e for e in range(0, 40, 3)]))


@repeatably(max_examples=200)
@given(
    x=hnp.arrays(np.float32, (4, 16), elements=finite),
    means=st.lists(centred, min_size=4, max_size=4),
    unit=hnp.arrays(np.float32, (4, 16), elements=st.floats(-1, 1, width=32)),
    scheme=st.sampled_from([*SCHEMES]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_error_is_at_most_one_step_of_anything(x, means, unit, scheme, dtype):
    assert_within_a_step(x, scheme, dtype)
    mean, spread = np.array(means, np.float32).T[..., None]
    assert_within_a_step(mean + mean * spread * unit, scheme, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@both
def test_scale_is_no_larger_than_it_must_be(scheme, dtype):
    # An error in steps says nothing of a step that is too large.
    steps, lift = {"paper": (15, 0), "int8_first": (255 / 16, 8 / 255)}[scheme]
    unit = {"bfloat16": 2.0**-7, "float32": 2.0**-23}[dtype]
    for name, x in GROUPS.items():
        x = x.astype(np.float32)
        scale = stored(x, scheme, dtype)[2].astype(float)
        low, extent = x.min(-1, keepdims=True).astype(float), np.ptp(x.astype(float), -1, keepdims=True)
        # Rounding moves the zero by up to a unit, and the scale must reach that much farther; then it is itself rounded up.
        moved = unit * abs(low + lift * extent) / 15 + 2.0**-22 * abs(low)
        smallest = 2.0**20 * np.finfo(np.float32).tiny
        assert (scale <= np.maximum((extent / steps + moved) * (1 + unit) * 1.00001, smallest)).all(), name


@pytest.mark.parametrize("scheme, upper, target", [("paper", 1.91e-2, 1.30e-3), ("int8_first", 1.84e-2, 1.12e-3)])
def test_published_errors(scheme, upper, target):
    x = np.random.default_rng(1).standard_normal((4096, 128)).astype(np.float32)
    planes = stored(x, scheme, "float32")
    steps = errors_in_steps(x, planes)
    relative = [error * (planes[2].astype(float) / 16) / np.ptp(x, -1, keepdims=True) for error in steps]
    rms = [float(np.sqrt(np.mean(error**2))) for error in relative]
    assert rms == [pytest.approx(target, rel=0.03), pytest.approx(upper, rel=0.03)]
    assert float(steps[0].max()) == pytest.approx(BOUNDS[scheme][0], rel=0.07)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@both
def test_formulas(scheme, dtype):
    """The notes' equations, group by group, in numpy."""
    with jax.enable_x64(dtype == "float64"):
        for name in ("gaussian", "mean -100", "outlier"):
            x = GROUPS[name].astype(dtype)
            got = stored(x, scheme, dtype)
            for row, *planes in zip(x.astype(float), *got):
                low, high = row.min(), row.max()
                scale, zero = ((high - low) / 15, low) if scheme == "paper" else (16 * (high - low) / 255, low + 8 * (high - low) / 255)
                eps = float(np.finfo(dtype).eps)
                np.testing.assert_allclose(float(planes[3][0]), zero, rtol=4 * eps)
                np.testing.assert_allclose(float(planes[2][0]), scale, rtol=0, atol=4 * eps * (scale + abs(low)))
                scale, zero = float(planes[2][0]), float(planes[3][0])
                if scheme == "paper":
                    upper = np.rint(np.clip((row - zero) / scale, 0, 15))
                    lower = np.rint(np.clip((row - (upper * scale + zero)) / (scale / 16), -8, 7))
                else:
                    code = np.clip(np.rint((row - zero) / (scale / 16)), -8, 247).astype(int)
                    upper = (code + 8) >> 4
                    lower = code - 16 * upper
                # Where a value is halfway, float32 and float64 may part.
                apart = (planes[0] != upper) | (planes[1] != lower + 8)
                assert apart.mean() <= 0.02
                assert abs((16 * planes[0].astype(int) + planes[1] - 8) - (16 * upper + lower)).max() <= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@both
def test_constant_groups_are_read_exactly(scheme, dtype):
    x = np.broadcast_to(np.float32([0, 1, -1, 0.75, -160, 1e30, -(2.0**-60), 1.5 * 2**-100])[:, None], (8, 128))
    planes = stored(x, scheme, dtype)
    for lower in (None, planes[1]):  # bfloat16 holds these but for 1e30
        read = dequantize_jit(planes[0], lower, *planes[2:], dtype="float32")
        exact = np.delete(np.arange(8), 5) if dtype == "bfloat16" else np.arange(8)
        np.testing.assert_array_equal(np.asarray(read)[exact], x[exact])
    assert_within_a_step(x, scheme, dtype)


@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16", "float64"])
@both
def test_planes_are_read_back(scheme, x_dtype):
    """dequantize, in each dtype, against the formula in float64."""
    with jax.enable_x64(x_dtype == "float64"):
        group = GROUPS["outlier"].astype(BFLOAT16 if x_dtype == "bfloat16" else x_dtype)
        planes = stored(group, scheme, str(parameter_dtype(group.dtype)))
        upper, lower, scale, zero = (p.astype(float) for p in planes)
        for read, expected in (
            (dequantize_jit(*planes, dtype=x_dtype), (16 * upper + lower - 8) * scale / 16 + zero),
            (dequantize_jit(planes[0], None, *planes[2:], dtype=x_dtype), upper * scale + zero),
        ):
            assert read.dtype == x_dtype
            eps = float(jnp.finfo(x_dtype).eps)
            tolerance = 2 * eps * (abs(upper * scale) + abs(scale) + abs(zero))
            assert (abs(np.asarray(read).astype(float) - expected) <= tolerance).all()


# Values that are not finite -------------------------------------------------------------------------------------------


def assert_poisoned(planes: tuple[np.ndarray, ...], groups: np.ndarray) -> None:
    """These groups, and no others, read as NaN."""
    upper, lower, scale, zero = map(jnp.asarray, planes)
    for read in (dequantize_jit(upper, lower, scale, zero, dtype="float32"), dequantize_jit(upper, None, scale, zero, dtype="float32")):
        np.testing.assert_array_equal(np.isnan(read), np.broadcast_to(groups[:, None], read.shape))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@both
def test_a_value_that_is_not_finite_spoils_its_group_alone(scheme, dtype, poison):
    x = GROUPS["means"].astype(np.float32)
    spoilt = x.copy()
    spoilt[7, 100] = spoilt[9, 0] = spoilt[9, 5] = spoilt[63, 127] = poison
    before, after = stored(x, scheme, dtype), stored(spoilt, scheme, dtype)
    others = np.setdiff1d(np.arange(64), [7, 9, 63])
    for old, new in zip(before, after):
        np.testing.assert_array_equal(bits(old[others]), bits(new[others]))
    assert_poisoned(after, np.isin(np.arange(64), [7, 9, 63]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@both
def test_a_range_beyond_float32_is_not_finite(scheme, dtype):
    x = GROUPS["gaussian"].astype(np.float32)
    wide = x.copy()
    wide[3, :2] = 3e38, -3e38
    before, after = stored(x, scheme, dtype), stored(wide, scheme, dtype)
    assert_poisoned(after, np.arange(64) == 3)
    others = np.delete(np.arange(64), 3)
    for old, new in zip(before, after):
        np.testing.assert_array_equal(bits(old[others]), bits(new[others]))


@repeatably(max_examples=100)
@given(
    x=hnp.arrays(np.float32, (4, 16), elements=st.one_of(finite, st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 1e-40]))),
    scheme=st.sampled_from([*SCHEMES]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_groups_are_independent(x, scheme, dtype):
    whole = stored(x, scheme, dtype)
    poisoned = ~np.isfinite(x).all(-1)
    assert_poisoned(whole, poisoned)
    cleared = np.where(poisoned[:, None], 0, x)
    for old, new in zip(whole, assert_within_a_step(cleared, scheme, dtype)):
        np.testing.assert_array_equal(bits(old[~poisoned]), bits(new[~poisoned]))
    # Nor does a group's place matter.
    for old, new in zip(whole, stored(x[::-1].copy(), scheme, dtype)):
        np.testing.assert_array_equal(bits(old), bits(new[::-1]))


# Rounding -------------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=1)
def rounded_as_stored(x: jax.Array, up: bool) -> tuple[jax.Array, jax.Array]:
    wide = (round_up if up else round_down)(x, jnp.dtype(jnp.bfloat16))
    return wide, wide.astype(jnp.bfloat16)


def exactly_rounded(x: np.ndarray, up: bool) -> np.ndarray:
    """The nearest bfloat16 on that side of x; infinity where there is none."""
    with np.errstate(all="ignore"):
        nearest = x.astype(BFLOAT16)
        wrong = nearest.astype(np.float32) < x if up else nearest.astype(np.float32) > x
        return np.where(wrong, np.nextafter(nearest, BFLOAT16.type(np.inf if up else -np.inf)), nearest)


def assert_rounded(x: np.ndarray, rounded: Callable = rounded_as_stored) -> None:
    nan = np.isnan(x)
    for up in (True, False):
        expected = exactly_rounded(x, up)
        wide, narrow = map(np.asarray, rounded(jnp.asarray(x), up))
        assert wide.dtype == np.float32
        np.testing.assert_array_equal(bits(wide)[~nan], bits(expected.astype(np.float32))[~nan])
        assert np.isnan(wide[nan]).all()
        np.testing.assert_array_equal(bits(narrow)[~nan], bits(expected)[~nan])


@pytest.mark.parametrize("jit", [False, True])
def test_round_to_bfloat16_of_every_upper_half(jit):
    # Every bfloat16, itself and with the lower halves next to it, next to the middle and next to the following one.
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = ((np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) | np.uint32(lower)).view(np.float32)
        assert_rounded(x, rounded_as_stored if jit else rounded_as_stored.__wrapped__)


@repeatably(max_examples=100)
@given(hnp.arrays(np.uint32, 16), hnp.arrays(np.float32, 16, elements=st.floats(width=32)))
def test_round_to_bfloat16(pattern, x):
    assert_rounded(pattern.view(np.float32))
    assert_rounded(x)


def test_round_to_the_same_dtype_changes_nothing():
    x = np.float32([0.1, -0.1, 1e-40, np.inf, -0.0])
    for function in (round_up, round_down):
        np.testing.assert_array_equal(bits(function(jnp.asarray(x), jnp.dtype(jnp.float32))), bits(x))


@both
def test_parameters_enclose_the_group(scheme):
    # What the bound rests on. A thousandth of a step is for the arithmetic in float32.
    first, last = {"paper": (0, 240), "int8_first": (-8, 247)}[scheme]
    for name in ("gaussian", "mean 100", "mean -1e4", "outlier", "outlier below"):
        x = GROUPS[name].astype(np.float32)
        _, _, scale, zero = (p.astype(float) for p in stored(x, scheme, "bfloat16"))
        assert (zero + (first - 1e-3) * scale / 16 <= x.min(-1, keepdims=True)).all(), name
        assert (zero + (last + 1e-3) * scale / 16 >= x.max(-1, keepdims=True)).all(), name


# Packing and layout ---------------------------------------------------------------------------------------------------


@repeatably(max_examples=100)
@given(hnp.arrays(np.uint8, (4, 6, 8), elements=st.integers(0, 15)))
def test_packing(codes):
    packed = np.asarray(pack_jit(codes))
    assert packed.dtype == np.uint8 and packed.shape == (4, 6, 4)
    np.testing.assert_array_equal(packed, codes[..., :4] + 16 * codes[..., 4:])
    np.testing.assert_array_equal(unpack_jit(packed), codes)


def test_every_byte_is_a_pair_of_codes():
    every = jnp.arange(256, dtype=jnp.uint8)
    np.testing.assert_array_equal(unpack(every)[:256], np.arange(256) % 16)
    np.testing.assert_array_equal(unpack(every)[256:], np.arange(256) // 16)
    np.testing.assert_array_equal(pack(unpack(every)), every)


B, K, C, G, H = 2, 3, 2, 16, 8


@functools.cache
def keys_and_values() -> tuple[np.ndarray, np.ndarray]:
    r = np.random.default_rng(3)
    channels = 10.0 ** r.uniform(-2, 2, (B, K, 1, 1, H))  # a scale per token, or per channel of values, would show
    tokens = 10.0 ** r.uniform(-2, 2, (B, K, C, G, 1))
    keys, values = r.standard_normal((2, B, K, C, G, H))
    return (keys * channels + channels).astype(np.float32), (values * tokens - tokens).astype(np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@both
def test_groups_are_laid_out_as_documented(scheme, dtype):
    keys, values = keys_and_values()
    key_planes, value_planes = quantize_groups_jit(jnp.asarray(keys), jnp.asarray(values), scheme=scheme, dtype=dtype)
    shape = lambda planes: [p.shape for p in (planes.upper, planes.lower, planes.scale, planes.zero)]
    assert shape(key_planes) == 2 * [(B, K, C, G, H // 2)] + 2 * [(B, K, C, H)]
    assert shape(value_planes) == 2 * [(B, K, C, H, G // 2)] + 2 * [(B, K, C, G)]
    assert {p.dtype for p in (key_planes.scale, value_planes.zero)} == {jnp.dtype(dtype)}

    read = {n: tuple(map(np.asarray, dequantize_groups_jit(key_planes, value_planes, planes=n, dtype="float32"))) for n in (1, 2)}
    assert {x.shape for pair in read.values() for x in pair} == {keys.shape}
    k, v = jax.tree.map(np.asarray, (key_planes, value_planes))
    for b, i, c, t, h in np.ndindex(keys.shape):
        # Entry i of the first half of a row in the low nibble of byte i, of the second half in the high nibble of byte i - half.
        for n, x, planes, row, (entry, half), parameter in (
            (0, keys, k, t, (h, H // 2), (b, i, c, h)),
            (1, values, v, h, (t, G // 2), (b, i, c, t)),
        ):
            byte = (b, i, c, row, entry % half)
            nibble = lambda byte, high=entry >= half: int(byte) >> 4 if high else int(byte) & 15
            scale, zero = float(planes.scale[parameter]), float(planes.zero[parameter])
            upper = nibble(planes.upper[byte]) * scale + zero
            target = upper + (nibble(planes.lower[byte]) - 8) * scale / 16
            assert abs(target - x[b, i, c, t, h]) <= (BOUNDS[scheme][0] + SLACK) * scale / 16
            tolerance = 1e-6 * (abs(zero) + 16 * scale)
            assert abs(read[1][n][b, i, c, t, h] - upper) <= tolerance
            assert abs(read[2][n][b, i, c, t, h] - target) <= tolerance


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@both
def test_keys_have_a_scale_per_channel_and_values_per_token(scheme, dtype):
    """Each channel of keys and each token of values, alone, is stored as it is among the others."""
    keys, values = keys_and_values()
    planes = quantize_groups_jit(jnp.asarray(keys), jnp.asarray(values), scheme=scheme, dtype=dtype)
    channels, tokens = np.moveaxis(keys, 3, -1).reshape(-1, G), values.reshape(-1, H)
    for rows, got in (channels, planes[0]), (tokens, planes[1]):
        upper, lower, scale, zero = stored(rows, scheme, dtype)
        # Both are stored with the group's channels or tokens on the second last axis of [.., G, H] or [.., H, G].
        codes = lambda x, shape=rows.shape: np.moveaxis(np.asarray(unpack_jit(x)), 3, -1).reshape(shape)
        np.testing.assert_array_equal(codes(got.upper), upper)
        np.testing.assert_array_equal(codes(got.lower), lower)
        np.testing.assert_array_equal(bits(got.scale).ravel(), bits(scale).ravel())
        np.testing.assert_array_equal(bits(got.zero).ravel(), bits(zero).ravel())


def test_poison_in_keys_and_values_stays_in_its_channel_and_token():
    keys, values = map(np.copy, keys_and_values())
    keys[1, 0, 1, 5, 3] = np.inf
    values[0, 1, 0, 12, 6] = np.nan
    planes = quantize_groups_jit(jnp.asarray(keys), jnp.asarray(values), scheme="paper", dtype="bfloat16")
    for number in (1, 2):
        k, v = dequantize_groups_jit(*planes, planes=number, dtype="float32")
        expected = np.zeros(keys.shape, bool)
        expected[1, 0, 1, :, 3] = True
        np.testing.assert_array_equal(np.isnan(k), expected)
        expected[:] = False
        expected[0, 1, 0, 12, :] = True
        np.testing.assert_array_equal(np.isnan(v), expected)


def test_a_scale_along_the_other_axis_would_err_more():
    # What the paper's table 5 is about: one loud channel of keys does not touch the others.
    keys, values = keys_and_values()
    planes = quantize_groups_jit(jnp.asarray(keys), jnp.asarray(values), scheme="paper", dtype="float32")
    k, v = dequantize_groups_jit(*planes, planes=1, dtype="float32")
    assert (abs(k - keys).max(3) <= 0.51 / 15 * np.ptp(keys, 3)).all()
    assert (abs(v - values).max(4) <= 0.51 / 15 * np.ptp(values, 4)).all()


@pytest.mark.parametrize("dtype, parameters", [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_empty_layer_has_the_documented_layout(dtype, parameters):
    layer = jax.eval_shape(lambda: HierarchicalLayer.zeros(B, K, C, G, 2 * G + 5, H, jnp.dtype(dtype)))
    assert (layer.groups, layer.group_size) == (C, G)
    filled = jax.eval_shape(functools.partial(quantize_groups, scheme="paper", dtype=parameter_dtype(dtype)), *keys_and_values())
    spec = lambda planes: jax.tree.map(lambda x: (x.shape, x.dtype), planes)
    assert (spec(layer.keys), spec(layer.values)) == (spec(filled[0]), spec(filled[1]))
    assert isinstance(layer.keys, Planes) and layer.keys.scale.dtype.itemsize == parameters
    assert layer.buffer.keys.shape == layer.buffer.values.shape == (B, K, 2 * G + 5, H) and layer.buffer.keys.dtype == dtype
    # The bits per value that the notes promise, for groups of 128 (here 16 tokens and 8 channels share their parameters).
    big = jax.eval_shape(lambda: HierarchicalLayer.zeros(1, 1, 4, 128, 256, 128, jnp.dtype(jnp.bfloat16)))
    size = lambda *arrays: sum(8 * a.size * a.dtype.itemsize for a in arrays) / (4 * 128 * 128)
    for p in (big.keys, big.values):
        assert (size(p.upper, p.scale, p.zero), size(p.upper, p.lower, p.scale, p.zero)) == (4.25, 8.25)
