"""The library on a GPU: the embedded model through the kernels, and through the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import target_logits

from pallas_kernels import attention, flush
from qspec_jax import GenerationConfig, checkpoint, demo, generate
from qspec_jax.demo import corpus
from qspec_jax.generate import DECODE, PREPARE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")]

NEW_TOKENS = 300
# In bfloat16 the two best logits of a near-tie are no further apart.
TIE = 0.25


def generated(model, prompts: list[list[int]], **settings) -> list[list[int]]:
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True, **settings)
    return generate(model, prompts, config=config).token_ids


@pytest.mark.parametrize("settings", [{"method": "quantspec"}, {"method": "autoregressive", "cache": "int8"}, {"method": "autoregressive"}])
def test_greedy_tokens_are_the_reference_paths_but_for_ties(settings, monkeypatch):
    model = checkpoint.load_model(demo.MODEL, progress=False)
    assert model.dtype == jnp.bfloat16
    text = corpus.held_out_files()[0].read_text(encoding="utf-8")
    tokens = checkpoint.load_tokenizer(demo.MODEL)(text)["input_ids"]
    prompts = [tokens[:1500], tokens[1500:2300], tokens[2300:2340]]
    with_kernels = generated(model, prompts, **settings)
    monkeypatch.setattr(attention, "GPU_IMPLEMENTATIONS", ())
    monkeypatch.setattr(flush, "GPU_IMPLEMENTATIONS", ())
    # Both remember what they compiled with kernels.
    for compiled in (PREPARE, DECODE):
        monkeypatch.setattr(compiled, "executables", {})
    jax.clear_caches()
    reference = generated(model, prompts, **settings)
    scheme = None if settings == {"method": "autoregressive"} else "int8_first"
    logits = target_logits(model, prompts, reference, group_size=128, scheme=scheme)
    equal = 0
    for ours, theirs, row in zip(with_kernels, reference, logits):
        differ = np.flatnonzero(np.array(ours) != np.array(theirs))
        at = differ[0] if len(differ) else NEW_TOKENS
        equal += at
        if at < NEW_TOKENS:
            assert abs(row[at, ours[at]] - row[at].max()) <= TIE and abs(row[at, theirs[at]] - row[at].max()) <= TIE
    print(f"{settings}: {equal} of {3 * NEW_TOKENS} tokens equal before a first tie")
    assert equal > NEW_TOKENS
