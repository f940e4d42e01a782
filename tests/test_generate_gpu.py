"""The library on a GPU: the embedded model through the kernels, and through the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import needs_gpu
from models import target_logits

from pallas_kernels import dispatch
from qspec_jax import GenerationConfig, demo
from qspec_jax.checkpoints import loading
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.generate import generate
from qspec_jax.training import corpus

pytestmark = [pytest.mark.gpu, needs_gpu]

NEW_TOKENS = 300
# In bfloat16 the two best logits of a near-tie are no further apart. TIES: the share of tokens that may be the second of one.
TIE, TIES = 0.25, 0.01


def generated(model, prompts: list[list[int]], **settings) -> list[list[int]]:
    # What was compiled before may be of other kernels.
    Compiled.forget()
    jax.clear_caches()
    config = GenerationConfig(**{"draft": "quantspec", "max_new_tokens": NEW_TOKENS, "ignore_eos": True} | settings)
    return generate(model, prompts, config=config).token_ids


@pytest.mark.parametrize(
    "settings",
    [
        {"draft": "quantspec"},
        {"draft": "none", "cache": "int8"},
        {"draft": "none"},
        # Lists that observation chooses, of few groups, so that they change; and 13 tokens in a verification.
        {"draft": "sparse:budget=0.25,min_groups=2", "num_speculative_tokens": 7},
        {"draft": "h2o:budget=0.25,min_groups=2", "num_speculative_tokens": 12},
    ],
)
def test_greedy_tokens_are_the_targets_but_for_ties(settings, monkeypatch):
    model = loading.load_model(demo.MODEL, progress=False)
    assert model.dtype == jnp.bfloat16
    text = corpus.held_out_files()[0].read_text(encoding="utf-8")
    tokens = load_tokenizer(demo.MODEL)(text)["input_ids"]
    prompts = [tokens[:1500], tokens[1500:2300], tokens[2300:2340]]
    with_kernels = generated(model, prompts, **settings)
    plain = ("append_attend", "attention", "flush", "rope_append")
    monkeypatch.setattr(dispatch, "KERNELS", tuple(kernel for kernel in dispatch.KERNELS if kernel.operation not in plain))
    reference = generated(model, prompts, **settings)
    scheme = None if settings == {"draft": "none"} else "int8_first"
    for rows in (with_kernels, reference):
        logits = np.stack(target_logits(model, prompts, rows, group_size=128, scheme=scheme))
        below = logits.max(-1) - np.take_along_axis(logits, np.array(rows)[..., None], -1)[..., 0]
        assert below.max() <= TIE and (below > 0).mean() <= TIES
    equal = (np.cumsum(np.array(with_kernels) != np.array(reference), 1) == 0).sum(1)
    print(f"{settings}: {equal} of {NEW_TOKENS} tokens of each prompt equal before a first tie")
