"""The Hopper kernel of decode attention over KIVI's format, and with replaced tokens, against the reference in float32."""

import numpy as np
import pytest
from gpus import needs_gpu, skip_or_fail
from problems.low_bits import assert_attention_is_exact, assert_attention_with_replaced_tokens_is_exact, random_codes
from runs import random_model

from pallas_kernels import dispatch
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(
    ("bits", "T", "heads", "kv_heads", "head_dim", "group"),
    [
        (2, 1, 8, 2, 128, 32),
        (1, 2, 8, 2, 128, 32),
        (1, 7, 1, 1, 128, 64),
        (2, 5, 1, 1, 64, 32),
        (1, 2, 4, 4, 256, 32),
        (2, 1, 7, 1, 256, 128),
    ],
)
def test_equals_float32(bits, T, heads, kv_heads, head_dim, group, outliers):
    skip_or_fail("mosaic_gpu", dispatch.no_mosaic_gpu())
    assert_attention_is_exact(*random_codes(bits, T, heads, kv_heads, head_dim, group, outliers=outliers))


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(
    ("bits", "T", "heads", "kv_heads", "head_dim", "group", "count"),
    [
        (1, 2, 8, 2, 128, 32, 64),
        (2, 2, 4, 4, 128, 64, 16),
        (2, 1, 7, 1, 64, 32, 33),
    ],
)
def test_replaced_tokens(bits, T, heads, kv_heads, head_dim, group, count, outliers):
    """In rows with fewer tokens than may be replaced, or none; other tokens of each KV head, and not all of them there."""
    skip_or_fail("mosaic_gpu", dispatch.no_mosaic_gpu())
    problem = random_codes(bits, T, heads, kv_heads, head_dim, group, outliers=outliers)
    assert_attention_with_replaced_tokens_is_exact(*problem, count, outliers)


def test_decoding_takes_it():
    """Over several flushes; the same chances as by the reference, up to rounding."""
    skip_or_fail("mosaic_gpu", dispatch.no_mosaic_gpu())
    shape = dict(hidden_size=512, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
    model = random_model("bfloat16", vocab_size=512, spread=0.05, **shape)
    settings = dict(max_new_tokens=300, draft="none", num_speculative_tokens=0, ignore_eos=True, output_logprobs=True)
    config = GenerationConfig(cache="kivi:bits=2,residual=128", **settings)
    prompt = np.random.default_rng(0).integers(0, 512, 700).tolist()
    Compiled.forget()
    with dispatch.watched() as seen:
        found = generate(model, [prompt], config=config)
    assert "mosaic_gpu" in {choice.implementation for choice in seen if choice.kernel == "attention"}
    assert len(found.token_ids[0]) == 300 and np.isfinite(found.logprobs[0]).all()

    with dispatch.watched() as seen:
        found = generate(model, [prompt], config=GenerationConfig(cache="specache:bits=1,residual=128", **settings))
    assert [choice.implementation for choice in seen if choice.kernel == "replaced_attention"] == ["mosaic_gpu"]
    assert len(found.token_ids[0]) == 300 and np.isfinite(found.logprobs[0]).all()
