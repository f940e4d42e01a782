"""`exact="bits"` with samples: a sampled row has the tokens that it has alone, with the same draft and settings."""

import jax
import jax.numpy as jnp
import pytest
from runs import random_model, random_prompts

from pallas_kernels.formats.views import UPPER_PLANE
from qspec_jax.decoding import batch, exact_bits, sampling
from qspec_jax.decoding import prepare as prepare_module
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.exact_bits import samples_with_bits
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.prepare import prepare
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.rounds_by_row import round_by_row
from qspec_jax.decoding.sampling import Sampling, make_sampler, prompt_keys
from qspec_jax.errors import InputError

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="for GPUs there is test_exact_bits_gpu.py")

BITS = dict(exact="bits", cache="int8", group_size=16, ignore_eos=True, max_new_tokens=32, temperature=0.9)
ALIKE = random_prompts([100, 90, 70])  # of one padded length, so that decoding each alone takes one program
PROMPTS = random_prompts([40, 100, 300])
KEYS = prompt_keys(jax.random.key(3), 3)


@pytest.fixture(scope="module")
def model():
    return random_model(jnp.bfloat16, num_hidden_layers=2, tie_word_embeddings=False)


def requests(prompts, **settings) -> list[Request]:
    return [Request(prompt, GenerationConfig(**BITS | settings), key) for prompt, key in zip(prompts, KEYS, strict=True)]


def alone(model, request: Request) -> list[int]:
    return generate(model, prepare(model, [request])).token_ids[0]


def check(model, prompts, **settings) -> None:
    asked = requests(prompts, **settings)
    together = generate(model, prepare(model, asked)).token_ids
    assert together == [alone(model, request) for request in asked]


@pytest.mark.system
@pytest.mark.parametrize(
    ("draft", "more"),
    [
        ("none", {}),
        ("sparse", {}),
        ("prompt-lookup", {}),
        ("snapkv", {}),
        ("streaming-llm", {}),
        ("h2o", {}),
        ("retrieval:rebuild=16", {}),
        ("chunk-means:chunk=4,dense_layers=0", {}),
        ("combine:prompt-lookup+quantspec", {}),
        ("cascade:first=prompt-lookup,middle=sparse", {}),
        ("eagle3:model=random,window=9", {}),
        ("quantspec", dict(adaptive=True, top_p=0.9, top_k=20, min_draft_confidence=0.1, repetition_penalty=1.1)),
        ("quantspec", dict(cache="full", group_size=None)),
    ],
)
def test_whatever_drafts_beside_prompts_of_other_lengths(model, draft, more):
    """Whose caches are larger."""
    check(model, PROMPTS, draft=draft, **more)


@pytest.mark.system
def test_slots_are_refilled_and_other_rows_are_greedy_or_filtered(model):
    config, *others = (GenerationConfig(**BITS | dict(draft="quantspec"), **each) for each in ({}, dict(top_k=5), dict(min_p=0.05)))
    greedy = GenerationConfig(**BITS | dict(draft="quantspec", temperature=0))
    asked = [Request(prompt, each, key) for prompt, each, key in zip(ALIKE, (config, greedy, others[0]), KEYS)]
    asked.append(Request(ALIKE[0], others[1], KEYS[1]))
    found = {result.index: result.token_ids for result in run_batch(model, asked, batch_size=2)}
    assert [found[i] for i in range(4)] == [alone(model, request) for request in asked]
    without = Request(asked[1].tokens, GenerationConfig(**BITS | dict(draft="none", temperature=0)), KEYS[1])
    assert found[1] == alone(model, without)


@pytest.mark.system
def test_rows_beside_rows_of_other_processors_and_adaptive_ones(model):
    settings = {}, dict(adaptive=True), dict(repetition_penalty=1.2, top_p=0.9)
    config = [GenerationConfig(**BITS | dict(draft="quantspec", max_new_tokens=64) | each) for each in settings]
    asked = [Request(prompt, each, key) for prompt, each, key in zip(PROMPTS, config, KEYS)]
    assert generate(model, prepare(model, asked)).token_ids == [alone(model, request) for request in asked]


def test_nothing_of_drafts_and_draws_is_computed_for_several_rows(model, monkeypatch):
    """What would be otherwise for several rows is seen, and is not there: in the usual rounds it is."""
    scaled = Sampling._scaled
    monkeypatch.setattr(Sampling, "_scaled", lambda self, logits: scaled(self, logits * (1.0 if len(logits) == 1 else 1.1)))
    Compiled.forget()
    check(model, ALIKE, draft="quantspec")
    monkeypatch.setattr(Engine, "_of_round", {})
    with pytest.raises(AssertionError):
        check(model, ALIKE, draft="quantspec")
    Compiled.forget()


def test_which_rounds_run(model):
    def engine(**settings) -> Engine:
        return prepare(model, requests(ALIKE, draft="quantspec", **settings)).engine()

    assert engine()._of_round == {"one_round": round_by_row}
    assert engine(temperature=0)._of_round == engine(exact="tokens")._of_round == {}
    config = GenerationConfig(**BITS)
    assert make_sampler(config).use_top_p and not make_sampler(GenerationConfig(temperature=0.9)).use_top_p


def test_what_does_not_go_with_them_is_refused(model, monkeypatch):
    asked = requests(ALIKE, draft="quantspec")
    with pytest.raises(InputError, match="exact bits of samples cannot be traced"):
        generate(model, prepare(model, asked), trace=True)
    others = [Request(PROMPTS[0], GenerationConfig(**BITS | dict(draft="quantspec", num_speculative_tokens=2)), KEYS[0]), asked[1]]
    with pytest.raises(InputError, match=r"exact bits of samples is for rows with the same num_speculative_tokens \(gamma\), .* 2 or 4"):
        prepare(model, others)


def test_on_a_gpu_samples_are_decoded_in_turn(model, monkeypatch, caplog):
    """Whatever settings each has, and with them greedy rows."""
    settings = {}, dict(num_speculative_tokens=2, top_k=5), dict(temperature=0)
    configs = [GenerationConfig(**BITS | dict(draft="quantspec") | each) for each in settings]
    asked = [Request(prompt, config, key) for prompt, config, key in zip(PROMPTS, configs, KEYS, strict=True)]
    expected = [alone(model, request) for request in asked]
    in_turn = lambda configs: samples_with_bits(configs)  # as on a GPU
    for module in (exact_bits, sampling, batch, prepare_module):
        monkeypatch.setattr(module, "decodes_in_turn", in_turn)
    prepared = prepare(model, asked)
    with pytest.raises(InputError, match=r"samples on a GPU is for one prompt at a time, not for 3; .*; give exact tokens"):
        generate(model, prepared)
    rows = []
    made = Engine.for_configs
    monkeypatch.setattr(Engine, "for_configs", lambda *args, **more: rows.append(len(args[2])) or made(*args, **more))
    with caplog.at_level("INFO"):
        run = run_batch(model, prepared, batch_size=2)
        found = list(run)
    assert rows == [1, 1, 1] and [result.index for result in found] == [0, 1, 2]
    assert run.stats.batch_size == 1 and run.stats.held_bytes > 0
    assert [result.token_ids for result in found] == expected
    assert "on a GPU rows are decoded one after the other" in caplog.text
    with pytest.raises(InputError, match="view is not for samples with exact bits"):
        run_batch(model, prepared, view=UPPER_PLANE)
