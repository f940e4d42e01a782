"""Families whose layers differ from Llama's: what they differ in, with every draft, converted, divided, and as part of a larger model.

Their logits are compared with transformers' in test_model.py.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simulated_devices
from checkpoints import (
    CASES,
    FAMILY_CASES,
    GOLDENS,
    WINDOW_CASES,
    WRAPPER,
    case_tokens,
    hf_config,
    random_tensors,
    wrapped,
    write_checkpoint,
)
from conversions import bits
from quantized_checkpoints import make_quantized, write_safetensors
from safetensors.numpy import load_file
from test_model import one_pass
from tiers import in_system

from convert import convert, export, verify
from pallas_kernels.formats.views import BOTH_PLANES
from pallas_kernels.formats.weights import Int4Weight
from pallas_kernels.rope_append import rotate
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.huggingface import load_config
from qspec_jax.checkpoints.info import model_info
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.errors import InputError
from qspec_jax.evaluate.scoring import token_logprobs
from qspec_jax.models import rope
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.experts_config import ExpertsConfig
from qspec_jax.models.llama import Llama
from qspec_jax.models.sharding import model_mesh
from qspec_jax.models.skipping import MaskedSkippingModel, Skipped, SkippingModel
from qspec_jax.planning.devices import DEVICES
from qspec_jax.planning.operations import linear_parameters
from qspec_jax.planning.plan import plan
from qspec_jax.quantization.calibration import quantize_linears_for
from qspec_jax.quantization.weights import is_linear, quantize_linears

# One of each family.
FAMILIES = [name for name in FAMILY_CASES if name not in ("granite-biases", "phi3-partial-longrope", "glm4-whole", "qwen3_moe-mixed")]
# After OLMo's norms, with a share of RoPE, after a norm that follows RoPE, with an activation that has weights, with a query scale, and
# with experts.
DIFFERENT = ["olmo2-widths", "glm4-partial", "hunyuan-alpha", "apertus-xielu", "ministral3-scaled", "qwen3_moe-experts"]
WITH_WINDOWS = [name for name in WINDOW_CASES if name != "mistral-window"]  # which has no layer without one
# With drafts; others are among the longer tests: activations alone, one more form of RoPE, and windows without an offset of norms.
DRAFTED = ["gemma3-window"]
# With a draft that observes attention, after norms of queries and keys; with windows: test_sliding.py.
OBSERVED = ["olmo2-widths"]
# With a draft that has a cache of its own: what keys, and queries, go through.
OF_ATTENTION = ["olmo2-widths", "glm4-partial", "hunyuan-alpha", "ministral3-scaled"]
# Where halves of a layer are left out: norms after them, windows, and experts. Others are among the longer tests.
GREEDY = GenerationConfig(group_size=8, max_new_tokens=24, ignore_eos=True, num_speculative_tokens=3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The directory of a case's checkpoint."""
    return functools.cache(lambda name: write_checkpoint(tmp_path_factory.mktemp(name) / "hf", CASES[name]))


@pytest.fixture(scope="module")
def small(directory, tmp_path_factory):
    """The directory of a case's checkpoint with one layer, which compiles in half the time; of all layers where some have windows."""

    @functools.cache
    def make(name: str):
        if name in WITH_WINDOWS:
            return directory(name)
        changes = {"num_hidden_layers": 1} | {key: types[:1] for key, types in CASES[name].items() if key == "layer_types"}
        return write_checkpoint(tmp_path_factory.mktemp(name) / "hf", CASES[name] | changes)

    return make


def golden(name: str) -> np.ndarray:
    with np.load(GOLDENS) as goldens:
        return goldens[f"{name}-48"]


def is_golden(model: Llama, name: str) -> None:
    np.testing.assert_allclose(one_pass(model, case_tokens(name), 48), golden(name), rtol=0, atol=1e-4)


# What they differ in --------------------------------------------------------------------------------------------------


LEFT_OUT = {
    "granite-multipliers": (
        *({field: 1.0} for field in ("embedding_multiplier", "residual_multiplier", "logits_scaling")),
        {"attention_scale": None},
    ),
    "ministral3-scaled": ({"query_scale_beta": 0.0},),
    "glm4-partial": ({"interleaved": False}, {"partial_rotary_factor": 1.0}, {"norms": "input"}),
    "phi3-partial": ({"partial_rotary_factor": 1.0},),
    "olmo2-widths": ({"norms": "input"}, {"norms": "sandwich"}, {"qk_norm": None}),
    "exaone4-full": ({"norms": "input"},),
    "hunyuan-alpha": ({"qk_norm": "head"}, {"qk_norm": None}, {"rope_theta": 10000.0}),
    "apertus-xielu": ({"activation": "relu2"},),
    "arcee-relu2": ({"activation": "xielu"},),
    "seed_oss-biases": ({"output_bias": False},),
    "gemma3-window": (
        *({"sliding_window": None}, {"sliding_window": 11}, {"sliding_rope": None}),
        *({"norm_offset": 0.0}, {"activation": "silu"}, {"sliding_layers": (1,)}),
    ),
    "gemma3-idle-window": ({"sliding_rope": None},),
    "exaone4-window": ({"nope_layers": ()},),
    "mistral-window": ({"sliding_window": 13},),
    "qwen3_moe-experts": (
        {"experts": ExpertsConfig((0, 1), 12, 2, 32, normalized=False)},
        {"experts": ExpertsConfig((0, 1), 12, 3, 32, normalized=True)},
    ),
    "qwen3_moe-mixed": ({"experts": ExpertsConfig((0,), 5, 2, 32, normalized=True)},),
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, first) for name, (first, *_) in LEFT_OUT.items()),
        *in_system(*((name, other) for name, (_, *others) in LEFT_OUT.items() for other in others)),
    ],
    ids=str,
)
def test_logits_show_what_is_left_out(directory, name, changes):
    """By much more than the tolerance of the comparison with transformers: with one difference left out, the model is another."""
    model, of_rope = load_model(directory(name), progress=False), {field.name for field in dataclasses.fields(rope.RopeConfig)}
    inner = {field: value for field, value in changes.items() if field in of_rope}
    config = dataclasses.replace(model.config, rope=dataclasses.replace(model.config.rope, **inner))
    config = dataclasses.replace(config, **{field: value for field, value in changes.items() if field not in of_rope})
    weights, others = model.weights(), {"input_norm": "attention_output_norm", "post_attention_norm": "mlp_output_norm"}

    def make(path: str, shape: tuple[int, ...]) -> jax.Array:
        """The weight; where the model has none there, that of the norm in the other place."""
        for here, there in others.items():
            path = path if path in weights else path.replace(f".{here}.", f".{there}.")
        return weights.get(path, jnp.full(shape, 0.5))

    found = one_pass(Llama(config, make), case_tokens(name), 48)
    assert np.abs(found - golden(name)).max() > 0.1


def test_a_plain_model_multiplies_nothing():
    """What Llama lacks costs it no operation."""
    config = LlamaConfig.from_hf(hf_config())
    model = Llama(config, lambda path, shape: jnp.ones(shape, jnp.float32))
    x, angles = jnp.ones((1, 2, config.hidden_size)), model.angles(jnp.zeros((1, 2), int), jnp.ones((1, 2), int))
    block = model.layers[0]
    y = block.qkv(block.attention_input(x))
    assert block.for_attention(y, *block.angles_of(angles)) == (y, *angles.cos_sin[0]) and angles.query_scale is None
    assert rope.channel_order(config.rope, config.head_dim) is None and config.is_fusable
    names = [str(e.primitive) for e in jax.make_jaxpr(model.embed)(jnp.zeros((1, 2), int)).eqns]
    assert "mul" not in str(jax.make_jaxpr(model.embed)(jnp.zeros((1, 2), int))), names


def test_keys_that_are_normed_after_rope_turn_on(directory):
    """As the sinks of a window do: to what they are at the later position, except where the norm's weight is 0."""
    with jax.enable_x64(True):
        model = load_model(directory("hunyuan-alpha"), dtype="float64", progress=False)
        block, x = model.layers[0], model.embed(jnp.asarray(case_tokens("hunyuan-alpha")[:1, :5]))
        positions = jnp.arange(5)[None]
        keys = [
            jnp.swapaxes(block.before_attention(x, *block.angles_of(model.angles(at, at + 1)))[1], 1, 2)
            for at in (positions, positions + 7)
        ]
        further = block.angles_of(model.angles(jnp.full((1, 1), 7), jnp.full((1, 1), 8)))
        turned = block.turned(keys[0], *further)
        np.testing.assert_allclose(turned, keys[1], atol=1e-5)  # angles are in float32
        assert np.abs(rotate(keys[0], *further) - keys[1]).max() > 0.1


def test_a_residual_multiplier_needs_norms_of_the_stream():
    config = LlamaConfig.from_hf(CASES["olmo2-widths"])
    with pytest.raises(ValueError, match=r"residual_multiplier is 0\.5; without norms before attention and MLP it should be 1"):
        dataclasses.replace(config, residual_multiplier=0.5)


def test_an_mlp_without_a_gate_has_two_matrices():
    gated, ungated = (LlamaConfig.from_hf(CASES[name]) for name in ("exaone4-full", "arcee-relu2"))
    assert linear_parameters(gated) - linear_parameters(ungated) == gated.hidden_size * gated.intermediate_size


@pytest.mark.parametrize("name", ["granite-multipliers", "olmo2-widths"])
def test_a_plan_says_where_there_is_no_fused_kernel(name):
    """Granite's multipliers need none of their own."""
    config = LlamaConfig.from_hf(CASES[name])
    for device in ("h100", "a100"):
        notes = plan(name, config, DEVICES[device], [64], [1], drafts=["quantspec"], gammas=[3], max_new_tokens=8).notes
        said = [note for note in notes if "no fused kernel" in note]
        assert len(said) == (name == "olmo2-widths" and device == "h100")


# With drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*DRAFTED, *in_system(*(name for name in FAMILIES + WITH_WINDOWS if name not in DRAFTED))])
def test_drafts_emit_the_targets_tokens(directory, small, name):
    """Greedily, in float64, with the same log-probabilities; and a draft that reads everything is always accepted, so that draft and target
    do the same to queries."""
    with jax.enable_x64(True):
        # A draft with a cache of its own is seen in tokens alone, which depend on their context in two layers.
        model = load_model((directory if name in OF_ATTENTION else small)(name), dtype="float64", progress=False)
        prompts = [case_tokens(name)[0].tolist(), case_tokens(name)[1, :19].tolist()]

        def run(draft: str, cache: str = "int8"):
            return generate(model, prompts, config=dataclasses.replace(GREEDY, draft=draft, cache=cache, output_logprobs=True))

        expected, whole = run("none"), run("quantspec:cache=int8,weight_bits=16")
        assert whole.token_ids == expected.token_ids and whole.stats.draft_acceptance_rate == 1
        np.testing.assert_allclose(whole.logprobs, expected.logprobs, atol=1e-9)
        if name in OBSERVED:
            assert run("sparse:budget=0.3,min_groups=1").token_ids == expected.token_ids
        if name in OF_ATTENTION:
            # In a cache of its own, which holds the target's keys.
            assert run("streaming-llm:budget=120,weight_bits=16", "full").stats.draft_acceptance_rate == 1


@pytest.mark.system
@pytest.mark.parametrize("cache", ["kivi:residual=8", "specache:bits=1,residual=16,k=3"])
def test_caches_of_few_bits_score_what_they_generate(small, cache):
    """KIVI's and SpeCache's hold the keys of a model whose norms and RoPE are not Llama's: one token at a time as in one pass."""
    name = "olmo2-widths"
    with jax.enable_x64(True):
        model, prompt = load_model(small(name), dtype="float64", progress=False), case_tokens(name)[0].tolist()
        plain = dataclasses.replace(GREEDY, draft="none", num_speculative_tokens=0, output_logprobs=True)
        exact = generate(model, [prompt], config=dataclasses.replace(plain, cache="full", group_size=None))
        settings = dataclasses.replace(plain, cache=cache)
        found = generate(model, [prompt], config=settings)
        scores = token_logprobs(model, [prompt], found.token_ids, settings.cache_config)[0]
        np.testing.assert_allclose(found.logprobs[0], scores, atol=1e-12)
        assert np.abs(np.subtract(found.logprobs[0], exact.logprobs[0])).max() > 1e-3, "the cache is read"


@pytest.mark.system
@pytest.mark.parametrize("name", [*DIFFERENT, "gemma3-window"])
def test_skipped_sublayers(directory, name):
    """By one program for all choices as by a program of their own, whatever is between two attentions."""
    with jax.enable_x64(True):
        model = load_model(directory(name), dtype="float64", progress=False)
        tokens = jnp.asarray(case_tokens(name)[:, :4])
        positions = jnp.broadcast_to(jnp.arange(4), tokens.shape)
        sizes = dict(batch=2, capacity=64, num_speculative_tokens=3, dtype=jnp.float64)
        cache = CacheConfig("int8", group_size=8).empty(model.config, **sizes)
        for skipped in (Skipped(), Skipped(frozenset({1})), Skipped(frozenset(), frozenset({0})), Skipped(frozenset({0}), frozenset({1}))):
            keep = np.array([[i not in skipped.attention, i not in skipped.mlp] for i in range(2)])
            expected, _ = MaskedSkippingModel(model, BOTH_PLANES, jnp.asarray(keep))(tokens, positions, cache)
            found, _ = SkippingModel(model, BOTH_PLANES, skipped)(tokens, positions, cache)
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
            unread = skipped.weights(list(model.weights()))
            assert ({path.split(".")[1] for path in unread} == set()) == (not skipped)


@pytest.mark.system
@pytest.mark.parametrize("name", ["olmo2-widths", "glm4-partial", "apertus-xielu", "gemma3-window", "qwen3_moe-mixed"])
def test_calibration(directory, name):
    """For the inputs that the linear layers have: after no norm, after one of two, without a gate, and beside experts."""
    model, tokens = load_model(directory(name), progress=False), case_tokens(name)
    exact = one_pass(model, tokens, 48)
    fitted = quantize_linears_for(model, tokens.tolist(), progress=False)
    assert {path for path, weight in fitted.weights().items() if isinstance(weight, Int4Weight)} == set(filter(is_linear, model.weights()))
    errors = [float(jnp.square(one_pass(each, tokens, 48) - exact).sum()) for each in (quantize_linears(model), fitted)]
    assert 0 < errors[1] < 0.8 * errors[0]


# Converted, and divided -----------------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize("name", ["gemma3-window", *DIFFERENT])
def test_converted_and_exported(directory, name, tmp_path):
    source = directory(name)
    convert(source, tmp_path / "out", draft_bits=4, progress=False)
    assert verify(source, tmp_path / "out", progress=False).wrong == []
    is_golden(load_model(tmp_path / "out"), name)
    assert model_info(tmp_path / "out") == model_info(source)
    export(tmp_path / "out", tmp_path / "back", progress=False)
    found, expected = (load_file(each / "model.safetensors") for each in (tmp_path / "back", source))
    assert {key: x.tobytes() for key, x in found.items()} == {key: x.tobytes() for key, x in expected.items()}


@pytest.fixture
def four(request):
    return simulated_devices.devices(request, 4)


@pytest.mark.system
def test_with_simulated_devices(request):
    simulated_devices.run_those_of(request, 4)


@pytest.mark.several_devices
@pytest.mark.parametrize("name", [*DIFFERENT, "gemma3-window"])
def test_divided_over_devices(directory, name, four):
    """Over two devices, and over four, where each two have the same KV head; norms over all heads add up what all devices have."""
    with jax.enable_x64(True):
        prompts = case_tokens(name)[:, :30].tolist()
        config = dataclasses.replace(GREEDY, draft="none", cache="int8", max_new_tokens=8)
        expected = generate(load_model(directory(name), dtype="float64"), prompts, config=config).token_ids
        for count in (2, 4):
            model = load_model(directory(name), dtype="float64", mesh=model_mesh(four[:count]))
            assert generate(model, prompts, config=config).token_ids == expected
            if name == "olmo2-widths":
                sizes = [model.weights()[f"layers.0.{n}_width_norm.weight"].addressable_shards[0].data.size for n in "qk"]
                assert sizes == [64 // count, 16 * max(1, 2 // count)]


# As part of a multimodal model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tied", "prefix"),
    [
        *((False, "language_model.model."), (None, "model.language_model.")),
        *in_system((None, "language_model.model."), (False, "model.language_model.")),
    ],
)
def test_the_text_model_of_a_multimodal_one(prefix, tied, tmp_path, caplog):
    """In either spelling; and a stored head counts where the embeddings are tied by default."""
    name = "ministral3-scaled"
    config, tensors = wrapped(CASES[name], tied=tied, prefix=prefix)
    source = write_checkpoint(tmp_path / "hf", config, tensors=tensors, shards=1 if tied is None else 2)
    model = load_model(source, progress=False)
    is_golden(model, name)
    assert not model.config.tie_word_embeddings and model.config.wrapper == WRAPPER
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and said[0].startswith(
        f"{source}: the text model of {WRAPPER} is read; 2 tensors of its other parts are left out"
    )
    convert(source, tmp_path / "out", progress=False)
    assert verify(source, tmp_path / "out", progress=False).wrong == []
    assert bits(load_model(tmp_path / "out")) == bits(model) and load_config(tmp_path / "out") == load_config(source)
    # The export has the text model alone, as a model by itself, which is converted again.
    export(tmp_path / "out", back := tmp_path / "back", progress=False)
    written = json.loads((back / "config.json").read_text())
    assert written["architectures"] == ["Ministral3ForCausalLM"] and not {"text_config", "vision_config"} & written.keys()
    assert load_file(back / "model.safetensors").keys() == random_tensors(CASES[name]).keys()
    assert load_config(back) == dataclasses.replace(load_config(source), wrapper=None)
    assert bits(load_model(back)) == bits(model)
    convert(back, tmp_path / "again", progress=False)
    assert verify(back, tmp_path / "again", progress=False).wrong == []
    assert bits(load_model(tmp_path / "again")) == bits(model)


@pytest.mark.parametrize("tied", [True, None])
def test_a_multimodal_model_without_a_head(tied, tmp_path):
    """The flag outside of the text model's config counts."""
    text = CASES["llama-theta"] | {"model_type": "mistral", "tie_word_embeddings": True}
    config, tensors = wrapped(text, tied=tied)
    model = load_model(write_checkpoint(tmp_path, config, tensors=tensors), progress=False)
    assert model.head is None and model.config.architecture == "MistralForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(InputError, match=r"missing language_model\.lm_head\.weight \(config.json says that the embeddings are not tied"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["fp8-tensor", "ct-w4-group"])
def test_a_quantized_multimodal_model(name, tmp_path):
    """The settings of quantization are outside of the text model's, and name parts that are left out; both spellings of names."""
    config, tensors, plain = make_quantized(name, "Ministral3ForCausalLM")
    settings = config.pop("quantization_config")
    settings |= {"ignore" if "ignore" in settings else "modules_to_not_convert": ["model.vision_tower", "lm_head"]}
    expected = load_model(write_checkpoint(tmp_path / "plain", config, tensors=plain), dtype="float32", progress=False)
    for prefix in ("language_model.model.", "model.language_model."):
        outer, own = wrapped(config, prefix=prefix, tensors=tensors, quantization_config=settings)
        directory = tmp_path / prefix
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(outer))
        write_safetensors(directory / "model.safetensors", own)
        assert bits(load_model(directory, dtype="float32", progress=False)) == bits(expected)


def test_other_tensors_of_a_multimodal_model_are_unexpected(tmp_path):
    config, tensors = wrapped(CASES["ministral3-scaled"])
    tensors["audio_tower.weight"] = np.ones(8, np.float32)
    with pytest.raises(InputError, match=r"unexpected audio_tower\.weight"):
        load_model(write_checkpoint(tmp_path, config, tensors=tensors))
    with pytest.raises(InputError, match=r"unexpected vision_tower\.ln_pre"):
        plain = random_tensors(hf_config()) | {"vision_tower.ln_pre.weight": np.ones(8, np.float32)}
        load_model(write_checkpoint(tmp_path / "plain", hf_config(), tensors=plain))
