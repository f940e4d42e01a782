"""Exact "auto": bits for a single prompt where a GPU has them, and tokens elsewhere."""

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from runs import random_model, random_prompts

from pallas_kernels.dispatch import NoFixedOrder
from qspec_jax.decoding import auto_exact
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.fixed_batch import Run
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.prepare import prepare
from qspec_jax.decoding.reading import prefill
from qspec_jax.decoding.sampling import Greedy
from qspec_jax.errors import warn_once
from qspec_jax.models.fixed_order import FixedOrderModel
from qspec_jax.models.uniform import UniformModel
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.quantization.weights import nest_linears, quantize_linears

PROMPTS = random_prompts([40, 30])
CONFIG = GenerationConfig(draft="prompt-lookup", cache="int8", group_size=16, ignore_eos=True, max_new_tokens=24)


@pytest.fixture(scope="module")
def model():
    return random_model(jnp.bfloat16, num_hidden_layers=1)


@pytest.fixture
def as_gpu(monkeypatch):
    """The choice is made as on a GPU that has the kernels; the bits are those of a CPU."""
    warn_once.cache_clear()
    monkeypatch.setattr(auto_exact, "dispatch", SimpleNamespace(platform=lambda: "gpu"))


def run_of(model, prompts, sampler=None, **changes) -> Run:
    config = GenerationConfig(**{**vars(CONFIG), **changes})
    return Run(prepare(model, prompts, config=config, key=jax.random.key(0)), sampler, 1)


def test_a_single_prompt_has_bits(model, as_gpu, caplog):
    with caplog.at_level(logging.INFO):
        run = run_of(model, PROMPTS[:1])
    assert "exact auto: bits" in caplog.text
    assert run.prepared.exact == run.prepared.config.exact == "bits" and isinstance(run.engine.target, UniformModel)
    bits = GenerationConfig(**{**vars(CONFIG), "exact": "bits"})
    assert generate(model, PROMPTS[:1], config=CONFIG).token_ids == generate(model, PROMPTS[:1], config=bits).token_ids


@pytest.mark.parametrize(
    ("changes", "prompts", "why"),
    [
        ({}, 2, "bits for single prompts alone"),
        (dict(num_return_sequences=2), 1, "bits for single prompts alone"),
        (dict(draft="none", cache="kivi"), 1, "cache is kivi"),
        (dict(num_speculative_tokens=16), 1, "at most 15 drafts"),
        (dict(temperature=0.5), 1, "bits for greedy decoding alone"),
    ],
)
def test_what_else_there_is_has_tokens_and_says_why(model, as_gpu, caplog, changes, prompts, why):
    with caplog.at_level(logging.INFO):
        run = run_of(model, PROMPTS[:prompts], **changes)
    assert run.prepared.exact == "tokens" and not isinstance(run.engine.target, UniformModel)
    assert "exact auto: tokens, since " in caplog.text and "give exact tokens" not in caplog.text and why in caplog.text


@pytest.mark.parametrize(
    "changed",
    [
        dict(attention_bias=True),
        dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"]),
        dict(model_type="smollm3", architectures=["SmolLM3ForCausalLM"], no_rope_layers=[0]),
    ],
)
def test_layers_that_were_not_checked_on_a_gpu_have_tokens(as_gpu, caplog, changed):
    model = random_model(jnp.bfloat16, num_hidden_layers=1, **changed)
    with caplog.at_level(logging.INFO):
        assert run_of(model, PROMPTS[:1]).prepared.exact == "tokens"
    assert "bits for Llama's layers alone" in caplog.text
    bits = run_of(model, PROMPTS[:1], exact="bits")  # which may be asked for
    assert bits.prepared.exact == "bits"


@pytest.mark.parametrize("coded", [quantize_linears, nest_linears])
@pytest.mark.parametrize("parts", [1, 2], ids=["all layers", "some layers"])
def test_a_model_with_coded_weights_has_tokens(model, as_gpu, caplog, coded, parts):
    """With INT4 or nested weights kernels of a fixed order have not been compared in speed."""
    own, others = model.weights(), coded(model).weights()
    weights = {path: others[path] if i % parts == 0 else weight for i, (path, weight) in enumerate(own.items())}
    assert any(weights[path] is not own[path] for path in own)
    with caplog.at_level(logging.INFO):
        assert run_of(model.with_weights(weights), PROMPTS[:1]).prepared.exact == "tokens"
    assert "bits for models without INT4 and nested weights" in caplog.text


def test_a_model_without_kernels_of_fixed_order_has_tokens(model, as_gpu, monkeypatch, caplog):
    """Kernels are asked for where a pass is traced, on a GPU by another model than here."""

    def refuses(*args, **others):
        raise NoFixedOrder("matmul in a fixed order: there is no such kernel")

    monkeypatch.setattr(ViewedModel, "watched", refuses)
    monkeypatch.setattr("qspec_jax.decoding.engine.UniformModel", FixedOrderModel)
    with caplog.at_level(logging.INFO):
        run = run_of(model, PROMPTS[:1], max_new_tokens=200)  # which was not traced before
    assert run.prepared.exact == "tokens" and "give exact tokens" not in caplog.text
    assert "exact auto: tokens, since exact bits needs kernels that add up in a fixed order; matmul in a fixed order" in caplog.text
    assert "there is no such kernel" in caplog.text


def test_states_and_samplers_of_the_callers_have_tokens(model, as_gpu):
    state = prefill(model, PROMPTS[0], config=CONFIG)
    assert run_of(model, state).prepared.exact == "tokens"
    assert not isinstance(run_of(model, PROMPTS[:1], sampler=Greedy()).engine.target, UniformModel)


def test_on_a_cpu_it_is_tokens(model, caplog):
    with caplog.at_level(logging.INFO):
        assert run_of(model, PROMPTS[:1]).prepared.exact == "tokens"
    assert "exact auto" not in caplog.text
