"""Layers with experts: their arithmetic, their checkpoints, and the bytes that are counted of them.

Their logits are compared with transformers' in test_model.py; drafts, conversion and several devices are in test_families.py.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import CASES, case_tokens, hf_config, random_tensors, write_checkpoint
from conversions import bits
from jax.sharding import Mesh
from quantized_checkpoints import make_quantized, write_safetensors
from read_checkpoints import refused
from tiers import in_system

from convert import convert, verify
from pallas_kernels.dispatch import watched
from pallas_kernels.experts import expert_mlps, reference
from pallas_kernels.formats.weights import Int4Weight
from qspec_jax.bench.architectures import architecture, random_model
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.huggingface import Source
from qspec_jax.checkpoints.info import model_info
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.diagnosis import kernels
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.reading import prefill
from qspec_jax.decoding.saving import load_state, save_state
from qspec_jax.drafts.int4 import int4_model
from qspec_jax.drafts.step_bytes import bytes_of, weight_bytes
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.experts import Experts, is_expert_matrix
from qspec_jax.models.experts_config import ExpertsConfig
from qspec_jax.planning.choice import Setting, choose
from qspec_jax.planning.devices import DEVICES
from qspec_jax.planning.memory import memory_of
from qspec_jax.planning.operations import matrix_parameters, model_bytes, pass_work, step_weight_bytes
from qspec_jax.planning.plan import plan
from qspec_jax.planning.steps import outlined, own_step
from qspec_jax.quantization.outline import outline
from qspec_jax.quantization.weights import is_linear

EXPERTS, MIXED = "qwen3_moe-experts", "qwen3_moe-mixed"  # in all layers, and in the first of two
COUNT, CHOSEN, WIDTH, INNER = 12, 2, 16, 8
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The directory of a case's checkpoint."""
    return functools.cache(lambda name: write_checkpoint(tmp_path_factory.mktemp(name) / "hf", CASES[name]))


# Arithmetic -----------------------------------------------------------------------------------------------------------


def problem(rows: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Rows, their experts and shares, and the matrices of all experts."""
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(COUNT)[:CHOSEN] for _ in range(rows)])
    matrices = (rng.normal(size=shape) for shape in ((COUNT, WIDTH, INNER), (COUNT, WIDTH, INNER), (COUNT, INNER, WIDTH)))
    return rng.normal(size=(rows, WIDTH)), chosen, rng.uniform(size=(rows, CHOSEN)), *matrices


def one_by_one(x, chosen, shares, gate, up, down) -> np.ndarray:
    def mlp(row, expert):
        z = row @ gate[expert]
        return (z / (1 + np.exp(-z)) * (row @ up[expert])) @ down[expert]

    return np.stack([sum(s * mlp(row, e) for e, s in zip(*each)) for row, *each in zip(x, chosen, shares)])


@pytest.fixture(params=["cpu", "tpu"])
def platform(request, monkeypatch):
    """Where `ragged_dot` is expanded to every expert, and where it is not."""
    monkeypatch.setattr(reference, "platform", lambda: request.param)


@pytest.mark.parametrize("rows", [1, 40, *in_system(2, 3)])
@pytest.mark.parametrize("max_bytes", [1, 9 * COUNT * WIDTH * 8, 1 << 28])
def test_each_row_goes_through_its_experts(rows, max_bytes, monkeypatch, platform):
    """The matrices of few rows are gathered; many rows go through all experts, in parts of one row, of nine, or all at once."""
    monkeypatch.setattr(reference, "MAX_BYTES", max_bytes)
    with jax.enable_x64(True):
        given = problem(rows)
        np.testing.assert_allclose(expert_mlps(*map(jnp.asarray, given)), one_by_one(*given), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [2, 9])
def test_rows_do_not_matter_to_each_other(rows, platform):
    """Whatever the rows of padding hold, and whichever experts they choose."""
    x, chosen, shares, *matrices = (jnp.asarray(each, jnp.float32 if each.dtype == float else jnp.int32) for each in problem(rows))
    run = jax.jit(functools.partial(expert_mlps))  # a function of its own, which is traced again for another platform
    expected = run(x, chosen, shares, *matrices)
    for value in (0.0, jnp.inf, jnp.nan):
        found = run(x.at[-1].set(value), chosen.at[-1].set(chosen[0]), shares.at[-1].set(value), *matrices)
        assert np.array_equal(found[:-1], expected[:-1])


def test_few_rows_read_the_experts_that_they_choose_alone():
    x, chosen, shares, *matrices = map(jnp.asarray, problem(2))
    others = jnp.asarray(sorted(set(range(COUNT)) - set(chosen.ravel().tolist())))
    found = expert_mlps(x, chosen, shares, *(each.at[others].set(jnp.nan) for each in matrices))
    assert np.array_equal(found, expert_mlps(x, chosen, shares, *matrices))


def test_an_expert_that_a_row_does_not_choose_does_not_matter():
    """Not even if its output is infinite."""
    x, chosen, shares, gate, up, down = (jnp.asarray(each, jnp.float32 if each.dtype == float else jnp.int32) for each in problem(9))
    huge = up.at[COUNT - 1].set(jnp.inf)
    found, expected = expert_mlps(x, chosen, shares, gate, huge, down), expert_mlps(x, chosen, shares, gate, up, down)
    others = np.asarray((chosen != COUNT - 1).all(1))
    assert np.array_equal(found[others], expected[others]) and not np.isfinite(found[~others]).all()


@pytest.mark.usefixtures("platform")
def test_products_are_rounded_where_those_of_an_mlp_are():
    """In bfloat16: those of gate and up; the outputs of experts are added up in float32."""
    given = [jnp.asarray(each, jnp.bfloat16 if each.dtype == float else jnp.int32) for each in problem(9)]
    given[2] = given[2].astype(jnp.float32)
    found = expert_mlps(*given)
    assert found.dtype == jnp.float32
    exact = one_by_one(*(np.asarray(each, np.int64 if each.dtype == jnp.int32 else np.float64) for each in given))
    assert 0 < np.abs(found - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize("normalized", [True, False])
def test_the_router(normalized):
    """In float32 whatever the dtype: the largest of a softmax over all experts, divided by their sum or not."""
    config = LlamaConfig.from_hf(CASES[EXPERTS])
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, chosen=3, normalized=normalized))
    rng = np.random.default_rng(0)
    experts = Experts(config, lambda path, shape: jnp.asarray(rng.normal(0, 0.3, shape), jnp.bfloat16), "experts", None)
    rows = jnp.asarray(rng.normal(size=(5, config.hidden_size)), jnp.bfloat16)
    chosen, shares = experts.route(rows)
    logits = np.asarray(rows, np.float64) @ np.asarray(experts.router.get_value(), np.float64).T
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert np.array_equal(chosen, np.argsort(-expected)[:, :3]) and shares.dtype == jnp.float32
    expected = np.take_along_axis(expected, np.asarray(chosen), -1)
    np.testing.assert_allclose(shares, expected / expected.sum(-1, keepdims=True) if normalized else expected, rtol=1e-5)


def test_what_runs_is_listed():
    config = LlamaConfig.from_hf(CASES[MIXED])
    found = kernels(config, GenerationConfig(draft="quantspec", max_new_tokens=4), 16)
    assert ("experts", "reference") in {(choice.kernel, choice.implementation) for choice in found}
    with watched() as seen:
        expert_mlps(*map(jnp.asarray, problem(1)))
    assert [(choice.kernel, choice.implementation, choice.passed_over) for choice in seen] == [("experts", "reference", ())]


# Checkpoints ----------------------------------------------------------------------------------------------------------


def test_one_weight_is_made_of_the_tensors_of_all_experts(directory):
    tensors, source = random_tensors(CASES[EXPERTS]), Source(directory(EXPERTS))
    for name in ("gate", "up", "down"):
        stored = [tensors[f"model.layers.1.mlp.experts.{e}.{name}_proj.weight"].T for e in range(12)]
        memory = np.empty(source.read_bytes(f"layers.1.experts.{name}"), np.uint8)
        found = source.read(f"layers.1.experts.{name}", memory)
        assert np.shares_memory(found, memory) and np.array_equal(found, np.stack(stored))
    assert not any(path.startswith("layers.1.experts") for path in load_model(directory(MIXED), progress=False).weights())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(EXPERT), f"missing {EXPERT}"),
        (lambda tensors: tensors.update({EXPERT.replace(".3.", ".12."): tensors[EXPERT]}), "unexpected model.layers.0.mlp.experts.12.up_"),
        (lambda tensors: tensors.update({EXPERT: tensors[EXPERT].T.copy()}), f"{EXPERT} has shape [64, 32], config.json asks for [32, 64]"),
        (
            lambda tensors: tensors.update({EXPERT: tensors[EXPERT].astype(ml_dtypes.bfloat16)}),
            f"{EXPERT} BF16 and model.layers.0.mlp.experts.11.up_proj.weight F32; the experts of a layer should have one dtype",
        ),
        (lambda tensors: tensors.pop("model.layers.1.mlp.gate.weight"), "missing model.layers.1.mlp.gate.weight"),
    ],
)
def test_tensors_that_do_not_fit(change, words, tmp_path, fails):
    tensors = random_tensors(CASES[EXPERTS])
    change(tensors)
    source = write_checkpoint(tmp_path / "hf", CASES[EXPERTS], tensors=tensors)
    refused(source, words)
    fails(["convert", source, tmp_path / "out"], words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 13}, "num_experts_per_tok is 13, should be at most num_experts, which is 12"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0, should be more than 0"),
        ({"num_experts": -1}, "num_experts is -1, should be more than -1"),
        ({"num_experts": 5000}, "num_experts is 5000, should be at most 4096"),
        ({"num_local_experts": 8}, "num_experts is 12 and num_local_experts is 8; both should be the number of experts of a layer"),
        ({"mlp_only_layers": [2]}, "mlp_only_layers is [2], should be a list of layers, from 0 to 1"),
        ({"mlp_only_layers": 1}, "mlp_only_layers is 1, should be a list of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0, should be more than 0"),
        ({"moe_intermediate_size": 32.5}, "moe_intermediate_size is 32.5, not a whole number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, not true or false"),
        ({"num_experts": 4096}, "config.json asks for 2 layers with 8192 experts together, and there are 93 tensors"),
    ],
)
def test_settings_that_are_refused(changes, words, directory, tmp_path, fails):
    (tmp_path / "model.safetensors").symlink_to(directory(EXPERTS) / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CASES[EXPERTS] | changes))
    fails(["info", tmp_path], words)


def test_which_layers_have_experts():
    def read(**changes) -> ExpertsConfig | None:
        return LlamaConfig.from_hf(hf_config("Qwen3MoeForCausalLM", num_hidden_layers=6, **changes)).experts

    assert read() == ExpertsConfig((0, 1, 2, 3, 4, 5), 128, 8, 768, normalized=False)
    assert read(decoder_sparse_step=2).layers == (1, 3, 5)
    assert read(decoder_sparse_step=2, mlp_only_layers=[0, 3]).layers == (1, 5)
    assert read(num_experts=12, num_local_experts=12).count == 12
    assert read(num_experts=0) is None and read(decoder_sparse_step=7) is None
    mixed = LlamaConfig.from_hf(CASES[MIXED])
    assert mixed.mlp_sizes == {"the MLP": 96, "each expert": 32} and not mixed.is_fusable
    assert LlamaConfig.from_hf(CASES[EXPERTS]).mlp_sizes == {"each expert": 32}


def test_every_layer_has_the_window_if_it_is_used():
    """Whatever `max_window_layers` is."""
    window = dict(sliding_window=12, max_window_layers=1)
    used = LlamaConfig.from_hf(hf_config("Qwen3MoeForCausalLM", use_sliding_window=True, **window))
    assert used.windowed_layers == (0, 1) and used.sliding_window == 12
    assert not LlamaConfig.from_hf(hf_config("Qwen3MoeForCausalLM", **window)).windowed_layers


@pytest.mark.parametrize("name", ["fp8-block", "awq"])
def test_quantized_checkpoints(name, tmp_path):
    """Experts are dequantized; other linear layers can stay packed."""
    changes = {key: CASES[MIXED][key] for key in ("num_local_experts", "mlp_only_layers", "num_experts_per_tok", "moe_intermediate_size")}
    config, tensors, plain = make_quantized(name, "Qwen3MoeForCausalLM", **changes)
    without = {key: value for key, value in config.items() if key != "quantization_config"}
    plain = {key: np.ascontiguousarray(tensor) for key, tensor in plain.items()}
    expected = load_model(write_checkpoint(tmp_path / "plain", without, tensors=plain), dtype="float32", progress=False)
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    write_safetensors(source / "model.safetensors", tensors)
    assert bits(load_model(source, dtype="float32", progress=False)) == bits(expected)
    if name == "awq":
        weights = load_model(source, dtype="float32", weights="packed", progress=False).weights()
        assert {path for path, weight in weights.items() if isinstance(weight, Int4Weight)} == set(filter(is_linear, weights))
        assert all(np.array_equal(weights[path], x) for path, x in expected.weights().items() if is_expert_matrix(path))
        convert(source, tmp_path / "out", weights="packed", progress=False)
        assert verify(source, tmp_path / "out", progress=False).wrong == []


def test_the_first_layers_of_a_shape_have_experts():
    assert architecture("qwen3-30b-a3b", layers=2).expert_layers == (0, 1)


def test_devices_that_do_not_divide_experts(directory, tmp_path):
    source = write_checkpoint(tmp_path / "hf", CASES[EXPERTS] | {"moe_intermediate_size": 18})
    with pytest.raises(InputError, match="4 devices do not divide the model's 18 columns of each expert evenly; 1, 2 do"):
        load_model(source, mesh=Mesh(np.array(jax.devices()[:1] * 4), ("model",)))


# Drafts, states, and bytes --------------------------------------------------------------------------------------------


def test_a_draft_in_int4_has_the_experts_of_the_target(directory, caplog):
    caplog.set_level("INFO")
    model = load_model(directory(MIXED), progress=False)
    own, drafted = model.weights(), int4_model(model).weights()
    assert "of experts it reads the target's own weights" in caplog.text
    for path, weight in drafted.items():
        assert isinstance(weight, Int4Weight) if is_linear(path) else weight is own[path]
    assert len(list(filter(is_expert_matrix, drafted))) == 3 and not any(is_linear(p) for p in own if is_expert_matrix(p))


@pytest.mark.system
def test_a_state_goes_on(directory, tmp_path):
    with jax.enable_x64(True):
        model = load_model(directory(EXPERTS), dtype="float64", progress=False)
        tokens = case_tokens(EXPERTS)[0].tolist()
        settings = GenerationConfig(draft="quantspec", group_size=8, num_speculative_tokens=3, max_new_tokens=9, ignore_eos=True)
        save_state(prefill(model, tokens, config=settings, room=30), tmp_path / "state")
        state = load_state(tmp_path / "state", model)
        plain = generate(model, [tokens], config=dataclasses.replace(settings, draft="none", cache="int8"))
        assert generate(model, state, config=settings).token_ids == plain.token_ids
        other = model.with_weights({path: weight + is_expert_matrix(path) for path, weight in model.weights().items()})
        with pytest.raises(InputError, match="other weights"):
            load_state(tmp_path / "state", other)


def test_experts_that_are_read():
    experts = ExpertsConfig((0,), 16, 4, 32, normalized=True)
    assert experts.read(1600, None) == 1600 and experts.read(1600, 1) == 400 and experts.read(1600, 1000) == 1600
    rng = np.random.default_rng(0)
    drawn = [len({e for _ in range(5) for e in rng.permutation(16)[:4]}) for _ in range(4000)]
    assert experts.read(1600, 5) == pytest.approx(100 * np.mean(drawn), rel=0.01)


def bfloat16(name: str) -> LlamaConfig:
    return dataclasses.replace(LlamaConfig.from_hf(CASES[name]), dtype="bfloat16")


@pytest.mark.parametrize("name", [EXPERTS, MIXED])
def test_bytes_of_weights(name):
    """A model and its outline count the same: all bytes that are held, and the experts that a pass reads."""
    config, layers = bfloat16(name), {EXPERTS: 2, MIXED: 1}[name]
    model = random_model(config)
    assert model_bytes(config) == bytes_of(model.weights())
    step = own_step(config, CacheConfig("full").outline(config, 16), 16)
    unread = 0 if config.tie_word_embeddings else 2 * 64 * 64
    of_expert, count = 3 * 2 * 64 * 32, config.experts.count
    for rows in (1, 5, 1000):
        read = round(count * (1 - (1 - 2 / count) ** rows) * of_expert)
        assert abs(weight_bytes(model, rows=rows) - (model_bytes(config) - unread - layers * (count * of_expert - read))) <= layers
        assert abs(step_weight_bytes(step, rows) - weight_bytes(model, rows=rows)) <= layers
    assert weight_bytes(model) == model_bytes(config) - unread - layers * (count - 2) * of_expert
    (draft,) = outlined(GenerationConfig(draft="quantspec").draft_settings, outline(config), lambda: outline(config, int4=True))
    sizes = dict(batch=1, context=16, new_tokens=8, gamma=3)
    in_int4 = sum(bytes_of(w) for w in int4_model(model).weights().values() if isinstance(w, Int4Weight))
    assert memory_of(config, CacheConfig(), [draft], **sizes).draft == in_int4


@pytest.mark.parametrize("name", [EXPERTS, MIXED])
def test_flops_are_those_of_the_chosen_experts(name):
    config = bfloat16(name)
    attention, mlp, experts = 64 * (64 + 2 * 32) + 64 * 64, 3 * 96 * 64, config.experts.count * 64 + 2 * 3 * 32 * 64
    layers = {EXPERTS: 2 * experts, MIXED: experts + mlp}[name] + 2 * attention
    assert matrix_parameters(config) == layers
    step = own_step(config, CacheConfig("full").outline(config, 16), 16)
    assert pass_work(step, batch=2, tokens=3).linear.flops == 2 * 6 * (layers + 64 * 64)


def test_info_and_plan_and_auto(directory, run):
    info = model_info(directory(EXPERTS))
    assert info.experts.count == 12 and info.parameters - info.token_parameters == 2 * 10 * 3 * 64 * 32
    code, out, _ = run("info", directory(EXPERTS))
    said = " ".join(out.split())
    assert code == 0 and "12 of width 32 in each of 2 layers, 2 for each token" in said
    assert f"of which a token goes through {info.token_parameters:,}" in said
    assert "MLP" not in said and "MLP 96" in run("info", directory(MIXED))[1]
    config = bfloat16(MIXED)
    notes = plan(MIXED, config, DEVICES["h100"], [64], [1], drafts=["quantspec"], gammas=[3], max_new_tokens=8).notes
    assert any("a token reads 2 of 5 experts" in note and "was not measured" in note for note in notes)
    setting = Setting(architecture("qwen3-30b-a3b"), "bfloat16", CacheConfig(), DEVICES["h200"].kind)
    found = choose(setting, context=4096, batch=1)
    assert found.draft == "none" and "reads 8 of 128 experts for each of them" in found.reason
    assert setting.costed() == "stored costs are those of kernels, which there are none of for experts"
