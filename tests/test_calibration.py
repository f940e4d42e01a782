"""Calibration of a model's INT4 weights with texts: what is summed over the inputs of its layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import hf_config, write_checkpoint
from weight_matrices import read

from pallas_kernels.formats.weights import Int4Weight
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.quantization import calibration
from qspec_jax.quantization.calibration import READERS, quantize_linears_for
from qspec_jax.quantization.weights import quantize_linears


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Llama:
    config = hf_config(hidden_size=128, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, attention_bias=True)
    return load_model(write_checkpoint(tmp_path_factory.mktemp("tiny"), config), progress=False)


def texts(*lengths: int) -> list[list[int]]:
    r = np.random.default_rng(3)
    return [[int(t) for t in r.integers(0, 64, length)] for length in lengths]


def logits_of(model: Llama, text: list[int]) -> np.ndarray:
    """After every token of one text, in one pass over a batch of one."""
    tokens = jnp.asarray([text + [0] * (-len(text) % 64)])
    positions = jnp.arange(tokens.shape[1])[None]
    return np.asarray(_forward(model, tokens, positions))[0, : len(text)]


@jax.jit
def _forward(model: Llama, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    x, angles = model.embed(tokens), model.angles(positions, positions + 1)
    for block in model.layers:
        x = block.after_attention(x, calibration.attend_prompt(*block.before_attention(x, *block.angles_of(angles))))
    return model.logits(x)


@functools.cache
def calibrated(model: Llama, *lengths: int) -> Llama:
    return quantize_linears_for(model, texts(*lengths), progress=False)


def test_every_linear_is_quantized_and_nothing_else(model):
    before = model.weights()
    for quantized in (quantize_linears(model), calibrated(model, 60)):
        after = quantized.weights()
        assert after.keys() == before.keys() and quantized.config == model.config
        linears = {path for path, weight in after.items() if isinstance(weight, Int4Weight)}
        assert linears == {f"layers.{i}.{name}.weight" for i in range(2) for names in READERS.values() for name in names}
        assert all(after[path] is before[path] for path in after.keys() - linears)
        for path in linears:
            weight = np.asarray(before[path])
            assert after[path].shape == weight.shape
            assert np.square(read(after[path]) - weight).sum() < 0.05 * np.square(weight).sum(), path


def test_calibration_reduces_the_error_of_logits(model):
    (text,) = texts(60)
    exact = logits_of(model, text)
    plain, fitted = (np.square(logits_of(m, text) - exact).sum() for m in (quantize_linears(model), calibrated(model, 60)))
    assert 0 < fitted < 0.6 * plain < 0.1 * np.square(exact).sum()


def block_inputs(model: Llama, rows: list[list[int]], width: int, filler: int = 0) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
    tokens = np.array([row + [filler] * (width - len(row)) for row in rows])
    n = np.array([len(row) for row in rows])
    positions = np.broadcast_to(np.arange(width), tokens.shape)
    angles = model.angles(jnp.asarray(positions), jnp.asarray(np.broadcast_to(n[:, None], tokens.shape)))
    return model.embed(jnp.asarray(tokens)), angles, jnp.asarray(positions < n[:, None])


def test_moments_are_sums_over_the_tokens(model):
    """The tokens are each linear layer's own inputs, seen by running the block."""
    (text,) = texts(20)
    block = model.layers[0]
    x, angles, valid = block_inputs(model, [text], 64)
    _, moments = calibration._block(block, x, angles, valid)
    assert moments.keys() == READERS.keys()
    h = block.input_norm(x)
    attended = calibration.attend_prompt(*block.before_attention(x, *block.angles_of(angles))).reshape(1, 64, -1)
    _, mlp = block.add_attention(x, attended)
    hidden = jax.nn.silu(block.gate_proj(mlp)) * block.up_proj(mlp)
    inputs = dict.fromkeys(["q_proj", "k_proj", "v_proj"], h) | {"o_proj": attended, "down_proj": hidden}
    source_of = {name: source for source, names in READERS.items() for name in names}
    for name, x in (inputs | dict.fromkeys(["gate_proj", "up_proj"], mlp)).items():
        read_by = np.asarray(x).astype(np.float64)[0, :20]
        expected = read_by.T @ read_by
        np.testing.assert_allclose(moments[source_of[name]], expected, rtol=0, atol=1e-5 * np.diag(expected).max(), err_msg=name)


def test_padding_does_not_matter(model):
    """A text beside a longer one, in a wider row, and with other tokens after it, adds the same moments."""
    short, long = texts(20, 100)
    found = {}
    for name, rows, width, filler in (
        ("short", [short], 64, 0),
        ("filled otherwise", [short], 64, 7),
        ("wide", [short], 128, 0),
        ("long", [long], 128, 0),
        ("both", [short, long], 128, 0),
    ):
        x, angles, valid = block_inputs(model, rows, width, filler)
        _, moments = calibration._block(model.layers[0], x, angles, valid)
        found[name] = {source: np.asarray(m) for source, m in moments.items()}
    for source, alone in found["short"].items():
        for other, expected in (("filled otherwise", alone), ("wide", alone), ("both", found["long"][source] + alone)):
            np.testing.assert_allclose(found[other][source], expected, rtol=0, atol=1e-5 * np.diag(expected).max(), err_msg=other)
        assert np.trace(found["long"][source]) > 2 * np.trace(alone) > 0


def test_texts_are_cut_to_their_last_tokens(model, monkeypatch):
    """The caps on texts and tokens decide what is read, and nothing else does."""
    seen = []
    monkeypatch.setattr(calibration, "_block", lambda block, x, angles, valid: seen.append((x, valid)) or stop())
    monkeypatch.setattr(calibration, "MAX_TEXTS", 3)
    monkeypatch.setattr(calibration, "MAX_TOKENS", 60)
    monkeypatch.setattr(calibration, "MAX_TEXT_TOKENS", 25)

    class Stop(Exception):
        pass

    def stop():
        raise Stop

    def read_of(rows: list[list[int]]) -> list[np.ndarray]:
        with pytest.raises(Stop):
            quantize_linears_for(model, rows, progress=False)
        x, valid = map(np.asarray, seen.pop())
        return [row[keep] for row, keep in zip(x, valid)]

    embedding = np.asarray(model.embedding.get_value())
    rows = texts(40, 10, 30, 20)
    for given, expected in (
        (rows[:1], [rows[0][-25:]]),
        (rows, [rows[0][-20:], rows[1], rows[2][-20:]]),
        (rows[1:2], [rows[1]]),
    ):
        for got, text in zip(read_of(given), expected, strict=True):
            np.testing.assert_array_equal(got, embedding[text])


def test_activations_that_are_not_finite_are_refused(model):
    weights = model.weights()
    weights["embedding"] = weights["embedding"].at[5, 7].set(jnp.inf)
    spoilt = Llama(model.config, lambda path, shape: weights[path])
    with pytest.raises(InputError, match="layer 0 has activations that are not finite"):
        quantize_linears_for(spoilt, [[1, 5, 2]], progress=False)
    # Where no text has that token, all is well.
    quantize_linears_for(spoilt, [[1, 2, 3]], progress=False)


@pytest.mark.parametrize("nothing", [[], [[]], [[1, 2], []]])
def test_calibration_needs_tokens(model, nothing):
    with pytest.raises(InputError, match="at least one token"):
        quantize_linears_for(model, nothing, progress=False)
