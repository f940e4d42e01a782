"""Nested weights: 8 bits for the target, whose upper 4 are the draft's own INT4 weights, shared and not copied."""

import dataclasses
import logging
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simulated_devices
from checkpoints import hf_config, write_checkpoint
from runs import random_model, random_prompts
from tiers import in_system
from weight_matrices import weights

from convert import convert, export, verify
from convert.by_rows import stored_error
from pallas_kernels.formats.weights import Int4Weight, NestedWeight, dequantize_weight
from pallas_kernels.matmul import linear
from qspec_jax import demo
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints import loading
from qspec_jax.checkpoints.info import model_info
from qspec_jax.checkpoints.loading import load_model, load_plan, outline_model
from qspec_jax.checkpoints.tensor_names import weight_shapes
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.drafts.int4 import int4_model
from qspec_jax.drafts.registry import make_draft
from qspec_jax.drafts.step_bytes import weight_bytes
from qspec_jax.errors import InputError
from qspec_jax.models.sharding import model_mesh
from qspec_jax.planning.choice import Setting
from qspec_jax.planning.operations import model_bytes, step_weight_bytes
from qspec_jax.planning.steps import own_step
from qspec_jax.quantization.weights import is_linear, nest_linears, quantize_nested, quantize_rows, quantize_weight, weight_group_size

dequantize = jax.jit(dequantize_weight, static_argnames="dtype")


def nested_of(model) -> dict[str, NestedWeight]:
    return {path: weight for path, weight in model.weights().items() if isinstance(weight, NestedWeight)}


def errors(weight: np.ndarray, found) -> np.ndarray:
    return np.asarray(dequantize(found, dtype=jnp.float32), np.float64) - np.asarray(weight, np.float64)


@pytest.mark.parametrize("name", sorted(weights(128)))
@pytest.mark.parametrize(("inputs", "dtype"), [(128, "bfloat16"), (96, "float32"), (50, "bfloat16")])
def test_no_weight_is_clipped(name, inputs, dtype):
    """Each errs by half a step of the lower plane at most, and alone the upper plane by half a step of its own; also where scales and zeros
    are rounded to bfloat16."""
    weight = np.asarray(weights(inputs)[name]).astype(jnp.dtype(dtype))
    nested = quantize_nested(jnp.asarray(weight))
    size = weight_group_size(inputs)
    scale = np.repeat(np.asarray(nested.upper.scale, np.float64), size, 1)[:, :inputs]
    rounding = 8 * np.finfo(np.float32).eps * np.abs(np.asarray(weight, np.float64)).max()
    assert (np.abs(errors(weight, nested)) <= scale / 32 + rounding).all()
    assert (np.abs(errors(weight, nested.upper)) <= scale * 17 / 32 + rounding).all()
    assert nested.shape == weight.shape and nested.nbytes == nested.upper.nbytes + nested.upper.codes.nbytes


def trained() -> list[np.ndarray]:
    """Matrices with the tails that trained weights have: Student's t with 5 degrees of freedom, outputs of several sizes."""
    random = np.random.default_rng(0)
    sizes = np.exp(random.normal(0, 0.3, (256, 1)))
    return [(0.02 * sizes * random.standard_t(5, (256, 1024))).astype(jnp.bfloat16) for _ in range(2)]


def test_both_planes_err_less_than_int8_and_the_upper_one_like_int4():
    for weight in trained():
        mean = {
            how: np.square(errors(weight, found)).mean()
            for how, found in {
                "both": quantize_nested(jnp.asarray(weight)),
                "upper": quantize_nested(jnp.asarray(weight)).upper,
                "int4": quantize_weight(jnp.asarray(weight)),
            }.items()
        }
        rows = quantize_rows(jnp.asarray(weight))
        int8 = np.square(np.asarray(rows.codes, np.float64) * np.asarray(rows.scale)[:, None] - np.asarray(weight, np.float64)).mean()
        assert mean["both"] < int8
        assert mean["upper"] <= 1.1 * mean["int4"]


def test_calibrated_upper_codes_make_up_for_one_another_within_the_lower_planes_reach():
    random = np.random.default_rng(0)
    weight = jnp.asarray(trained()[0][:, :512])
    x = random.normal(size=(2048, 64)) @ random.normal(size=(64, 512)) + 0.3 * random.normal(size=(2048, 512))
    moments = jnp.asarray(x.T @ x, jnp.float32)
    nearest, calibrated = quantize_nested(weight), quantize_nested(weight, moments)

    def of_outputs(found) -> float:
        return np.square(x @ errors(weight, found).T).mean()

    assert of_outputs(calibrated.upper) < of_outputs(nearest.upper) / 4
    assert of_outputs(calibrated.upper) < 3 * of_outputs(quantize_weight(weight, moments))
    assert of_outputs(calibrated) < of_outputs(nearest)
    assert (np.asarray(calibrated.upper.codes) != np.asarray(nearest.upper.codes)).mean() > 0.2
    scale = np.repeat(np.asarray(calibrated.upper.scale, np.float64), 128, 1)
    assert (np.abs(errors(weight, calibrated)) <= scale + 2.0**-7 * np.abs(np.asarray(weight, np.float64)).max()).all()


def test_weights_are_calibrated_on_a_text(tmp_path, caplog):
    text = tmp_path / "text.py"
    text.write_text(Path(dataclasses.__file__).read_text()[:3000])
    how, source = f"nested:calibration={text}", tmp_path / "source"
    write_checkpoint(source, hf_config(vocab_size=4096, hidden_size=128, intermediate_size=256, num_hidden_layers=1), tokenizer=demo.MODEL)
    model = load_model(source, weights=how, progress=False)
    weights = nested_of(model)
    assert {weight.steps for weight in weights.values()} == {8} and model.config.nested_weights
    convert(source, tmp_path / "out", weights=how, progress=False)
    assert not verify(source, tmp_path / "out", progress=False).wrong
    stored = nested_of(load_model(tmp_path / "out"))
    for path, weight in weights.items():
        assert stored[path].steps == 8
        np.testing.assert_array_equal(np.asarray(stored[path].lower), np.asarray(weight.lower))
    outlined = outline_model(source, weights=how)
    assert jax.tree.structure(outlined.weights()) == jax.tree.structure(model.weights())
    with pytest.raises(InputError, match="calibration is for nested weights"):
        load_model(source, weights=f"packed:calibration={text}")
    with pytest.raises(InputError, match="calibration should be a file of text"):
        load_model(source, weights="nested:calibration=")
    with pytest.raises(InputError, match="its weights are nested already; calibrate its source"):
        load_model(tmp_path / "out", weights=how)
    with pytest.raises(InputError, match=r"none\.txt: cannot be read"):
        load_model(source, weights=f"nested:calibration={tmp_path / 'none.txt'}")


def test_the_ends_of_a_range_err_no_more_than_what_is_within():
    """In a checkpoint that was quantized before, many weights are there."""
    weight = np.random.default_rng(0).normal(size=(512, 128)).astype(np.float32)
    squared = np.square(errors(weight, quantize_nested(jnp.asarray(weight))))
    ends = (weight == weight.min(1, keepdims=True)) | (weight == weight.max(1, keepdims=True))
    assert squared[ends].mean() < 1.2 * squared[~ends].mean()


def test_calibrated_codes_err_no_more_than_is_allowed():
    """Where inputs go together and groups differ in their size, lower codes make up for much."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(64, 512)) * np.repeat([30, 1, 1 / 30, 1], 128)
    inputs = rng.normal(size=(2000, 8)) @ rng.normal(size=(8, 512)) + 0.05 * rng.normal(size=(2000, 512))
    found = quantize_nested(jnp.asarray(weight, jnp.float32), jnp.asarray(inputs.T @ inputs, jnp.float32))
    worst = stored_error(jax.tree.map(np.asarray, found), weight.astype(np.float32))
    assert 0.5 < worst <= 1


def test_a_long_text_is_calibrated_on_in_pieces_spread_over_it(tmp_path, monkeypatch, caplog):
    text = tmp_path / "text.py"
    text.write_text(Path(dataclasses.__file__).read_text()[:4000])
    tokens = load_tokenizer(demo.MODEL)(text.read_text())["input_ids"]
    monkeypatch.setattr(loading, "MAX_TEXT_TOKENS", 100)
    monkeypatch.setattr(loading, "MAX_TOKENS", 300)
    with caplog.at_level(logging.INFO):
        pieces = loading._calibration_texts(demo.MODEL, str(text), None)
    count = -(-len(tokens) // 100)
    assert count > 6 and pieces == [tokens[at : at + 100] for at in (0, count // 3 * 100, 2 * count // 3 * 100)]
    assert f"text.py: weights are rounded for 300 of its {len(tokens)} tokens" in caplog.text and "are few" not in caplog.text
    text.write_text("import os")
    loading._calibration_texts(demo.MODEL, str(text), None)
    assert "tokens are few to calibrate on" in caplog.text
    text.write_text("")
    with pytest.raises(InputError, match=r"text\.py: has no tokens to calibrate on"):
        loading._calibration_texts(demo.MODEL, str(text), None)


def test_they_need_the_same_memory_wherever_they_come_from(checkpoint, tmp_path, monkeypatch):
    """A byte a number, without the scales of groups, beside embedding, head and norms."""
    convert(checkpoint, tmp_path / "out", weights="nested", progress=False)
    shapes = weight_shapes(load_model(checkpoint).config)
    needed = sum(math.prod(shape) * (1 if is_linear(path) else 4) for path, shape in shapes.items())
    limit = {"bytes_limit": needed}
    device = SimpleNamespace(memory_stats=lambda: limit, device_kind="NVIDIA H100")
    monkeypatch.setattr(loading.jax, "local_devices", lambda: [device])
    for directory in checkpoint, tmp_path / "out":
        assert nested_of(load_model(directory, weights="nested", dtype="float32"))
    limit["bytes_limit"] -= 1
    for directory in checkpoint, tmp_path / "out":
        with pytest.raises(InputError, match="of NVIDIA H100"):
            load_model(directory, weights="nested", dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [3, 100])
def test_linear_multiplies_by_both_planes(dtype, rows):
    random = np.random.default_rng(1)
    x = jnp.asarray(random.normal(size=(rows, 96)), dtype)
    made = [quantize_nested(jnp.asarray(random.normal(size=(out, 96)), dtype)) for out in (24, 8)]
    plain = jnp.asarray(random.normal(size=(16, 96)), dtype)
    found = jax.jit(linear)(x, [*made, plain])
    wide = [np.asarray(dequantize(weight, dtype=jnp.float32), np.float64) for weight in made] + [np.asarray(plain, np.float64)]
    expected = np.concatenate([np.asarray(x, np.float64) @ weight.T for weight in wide], -1)
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    assert np.linalg.norm(np.asarray(found, np.float64) - expected) <= tolerance * np.linalg.norm(expected)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("nested") / "hf", hf_config())


def test_a_draft_has_the_targets_upper_planes(checkpoint, caplog):
    caplog.set_level("INFO", "qspec_jax.checkpoints.loading")
    model = load_model(checkpoint, weights="nested")
    assert "put into 8 bits" in caplog.text and model.config.nested_weights
    nested, draft = nested_of(model), make_draft("quantspec", model).step.model.weights()
    assert nested.keys() == set(filter(is_linear, model.weights())) and len(nested) == 14
    assert all(draft[path].codes is weight.upper.codes and isinstance(draft[path], Int4Weight) for path, weight in nested.items())
    assert int4_model(outline_model(checkpoint, weights="nested")).weights()["norm.weight"].shape == draft["norm.weight"].shape


@pytest.mark.parametrize("draft", ["quantspec", *in_system("sparse:budget=0.3")])
def test_greedy_tokens_are_the_nested_targets(draft):
    """In float64, across flushes."""
    with jax.enable_x64(True):
        model = nest_linears(random_model(jnp.float64))
        prompts = random_prompts([60, 41])
        settings = dict(cache="int8", group_size=16, ignore_eos=True, max_new_tokens=48)
        alone = [generate(model, [prompt], config=GenerationConfig(draft="none", **settings)).token_ids[0] for prompt in prompts]
        config = GenerationConfig(draft=draft, num_speculative_tokens=5, **settings)
        found = generate(model, prompts, config=config)
        assert found.token_ids == alone


def test_plans_and_info_count_its_bytes(checkpoint, tmp_path):
    convert(checkpoint, tmp_path / "out", weights="nested", progress=False)
    model, info = load_model(tmp_path / "out"), model_info(tmp_path / "out")
    assert info.linear_layers == "nested in 8 bits" and info.draft_weight_bytes < info.weight_bytes / 4
    assert info.weight_bytes == sum(x.nbytes for x in jax.tree.leaves(model.weights()))
    step = own_step(model.config, CacheConfig("full").outline(model.config, 64), 64)
    with_dtype = load_model(checkpoint, dtype="bfloat16", weights="nested")
    assert model_bytes(with_dtype.config) == sum(x.nbytes for x in jax.tree.leaves(with_dtype.weights()))
    assert step_weight_bytes(step) == weight_bytes(with_dtype)


def test_conversions_keep_both_planes(checkpoint, tmp_path, caplog):
    report = convert(checkpoint, tmp_path / "out", weights="nested", progress=False)
    assert (report.nested, report.packed) == (14, 0)
    verified = verify(checkpoint, tmp_path / "out", progress=False)
    assert not verified.wrong and verified.nested == 14 and 0 < verified.nested_error <= 1 and not verified.logits
    direct, stored = load_model(checkpoint, weights="nested"), load_model(tmp_path / "out")
    for a, b in zip(jax.tree.leaves(direct.weights()), jax.tree.leaves(stored.weights()), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert load_plan(tmp_path / "out").config == stored.config and stored.config.nested_weights
    as_stored = load_model(tmp_path / "out", weights="nested")
    assert nested_of(as_stored).keys() == nested_of(stored).keys()
    plain = load_model(tmp_path / "out", weights="dequantized")
    assert not nested_of(plain) and not plain.config.nested_weights
    path = "layers.0.q_proj.weight"
    np.testing.assert_array_equal(
        np.asarray(plain.weights()[path]), np.asarray(dequantize(stored.weights()[path], dtype=jnp.float32).astype(plain.dtype))
    )
    convert(checkpoint, tmp_path / "plain", progress=False)
    made = load_model(tmp_path / "plain", weights="nested")
    np.testing.assert_array_equal(np.asarray(made.weights()[path].lower), np.asarray(direct.weights()[path].lower))


def test_what_does_not_go_with_them_is_refused(checkpoint, tmp_path):
    with pytest.raises(InputError, match="weights nested: a draft reads their upper 4 bits; convert without one"):
        convert(checkpoint, tmp_path / "out", weights="nested", draft_bits=4)
    assert not (tmp_path / "out").exists()
    convert(checkpoint, tmp_path / "out", weights="nested", progress=False)
    with pytest.raises(InputError, match="logits of nested weights cannot be compared"):
        verify(checkpoint, tmp_path / "out", logits=True, progress=False)
    with pytest.raises(InputError, match="its weights are stored nested; convert the checkpoint again with packed weights"):
        load_model(tmp_path / "out", weights="packed")
    with pytest.raises(InputError, match="convert with dequantized weights and export that"):
        export(tmp_path / "out", tmp_path / "hf", progress=False)
    with pytest.raises(InputError, match="weights 'nest' should be one of packed, dequantized, nested"):
        load_model(checkpoint, weights="nest")


def test_no_cost_of_them_is_stored(checkpoint):
    model = load_model(checkpoint, weights="nested", dtype="bfloat16")
    setting = Setting(model.checkpoint_config, "bfloat16", CacheConfig.parse("int8"), "NVIDIA H200")
    assert setting.costed() == "no costs are stored of nested weights"


def test_a_wrong_code_is_found(checkpoint, tmp_path, monkeypatch):
    import convert.to_orbax as to_orbax

    def with_another(weight, quantize=quantize_weight):
        made = jax.tree.map(np.array, quantize(jnp.asarray(weight)))
        if isinstance(made, NestedWeight):
            made.lower[0, 0, 0] ^= 0x8
        return made

    monkeypatch.setattr(to_orbax, "quantize_by_rows", with_another)
    convert(checkpoint, tmp_path / "out", weights="nested", progress=False)
    found = verify(checkpoint, tmp_path / "out", progress=False)
    assert len(found.wrong) == 14 and all("times as much as it may" in each for each in found.wrong)


@pytest.mark.system
def test_with_simulated_devices(request):
    simulated_devices.run_those_of(request, 2)


@pytest.mark.several_devices
def test_devices_have_parts_of_both_planes(request, tmp_path):
    """Each group is on one device, and the values are those on one."""
    shape = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    source = write_checkpoint(tmp_path / "hf", hf_config(**shape))
    mesh = model_mesh(list(simulated_devices.devices(request, 2)))
    whole, divided = (load_model(source, dtype="float32", weights="nested", mesh=each) for each in (None, mesh))
    convert(source, tmp_path / "out", weights="nested", dtype="float32", progress=False)
    stored = load_model(tmp_path / "out", mesh=mesh)
    for path, weight in nested_of(divided).items():
        inner = path.rsplit(".", 2)[1] in ("o_proj", "down_proj")
        assert weight.lower.sharding.shard_shape(weight.lower.shape)[int(inner)] * 2 == weight.lower.shape[int(inner)]
        for other in weight, stored.weights()[path]:
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), other, whole.weights()[path])
    prompt = random_prompts([40])
    config = GenerationConfig(draft="quantspec", cache="int8", ignore_eos=True, max_new_tokens=12)
    assert generate(divided, prompt, config=config).token_ids == generate(whole, prompt, config=config).token_ids
