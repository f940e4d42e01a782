"""A vocabulary that is padded beyond the tokenizer's ids: padding is neither drafted nor generated, and a draft may be padded otherwise."""

import dataclasses

import jax
import numpy as np
import pytest
from checkpoints import hf_config, random_tensors, write_checkpoint
from runs import with_draft
from tiers import in_system

from qspec_jax import GenerationConfig, InputError, demo, generate
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.checkpoints.tokenizers import load_tokenizer, padding_from
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.requests import Request
from qspec_jax.drafts import make_draft
from qspec_jax.evaluate.acceptance import teacher_forced

IDS, PADDED = 4096, 4160  # of the embedded model's tokenizer, and of the target
TOKENIZER = load_tokenizer(demo.MODEL)
PROMPT = "import os\n"
GREEDY = GenerationConfig(max_new_tokens=12, group_size=16, ignore_eos=True, draft="quantspec", cache="int8")


def checkpoint(folder, vocab_size, *, loud=False):
    """A model of one layer whose first IDS rows of embedding and head are the same for every vocabulary. loud: the likeliest token is
    always one of two that pad the vocabulary."""
    config = hf_config(vocab_size=PADDED + 64, num_hidden_layers=1)
    tensors = random_tensors(config)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:vocab_size].copy()
    if loud:
        tensors["lm_head.weight"][-1] = -100 * tensors["lm_head.weight"][-2]
        tensors["lm_head.weight"][-2] *= 100
    return write_checkpoint(folder, config | {"vocab_size": vocab_size}, tensors=tensors, tokenizer=demo.MODEL)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = lambda name, *args, **settings: checkpoint(tmp_path_factory.mktemp("model") / name, *args, **settings)
    return {"loud": made("loud", PADDED, loud=True), **{size: made(str(size), size) for size in (IDS - 1, IDS, PADDED, PADDED + 64)}}


@pytest.fixture(scope="module")
def loud(folders):
    return load_model(folders["loud"])


def test_where_padding_begins():
    assert padding_from(TOKENIZER, PADDED) == IDS and padding_from(TOKENIZER, IDS) is padding_from(None, PADDED) is None


@pytest.mark.system
@pytest.mark.parametrize(("draft", "temperature"), [("quantspec", 1.0), ("none", 1.0), ("quantspec", 0.0), ("prompt-lookup", 1.0)])
def test_padding_is_never_generated(draft, temperature, loud):
    config = dataclasses.replace(GREEDY, draft=draft, temperature=temperature)
    settings = dict(config=config, key=jax.random.key(0))
    found = generate(loud, [PROMPT], tokenizer=TOKENIZER, **settings).token_ids[0]
    assert max(found) < IDS
    (result,) = run_batch(
        loud, [Request(TOKENIZER(PROMPT)["input_ids"], config, jax.random.fold_in(settings["key"], 0))], tokenizer=TOKENIZER
    )
    assert result.token_ids == found


@pytest.mark.system
def test_padding_is_never_drafted_along_a_text(loud, folders):
    """Acceptance is that of a model whose padding is never likely; without a tokenizer target and draft agree on padding."""
    text = TOKENIZER("".join(f"import module_{i}\n" for i in range(20)))["input_ids"]
    plain, key = load_model(folders[PADDED]), jax.random.key(0)
    found, expected, without = (
        teacher_forced(model, make_draft("quantspec", model), [text], GREEDY, key, tokenizer)
        for model, tokenizer in ((loud, TOKENIZER), (plain, TOKENIZER), (loud, None))
    )
    assert found == expected and found.drafted and without.acceptance_rate == 1.0 > found.acceptance_rate


def test_without_a_tokenizer_nothing_says_what_is_padding(loud):
    found = generate(loud, [TOKENIZER(PROMPT)["input_ids"]], config=dataclasses.replace(GREEDY, draft="none")).token_ids[0]
    assert min(found) >= IDS


@pytest.mark.parametrize(("size", "reads"), [(IDS, "text"), *in_system((PADDED + 64, "window,sinks=2,window=30"))])
def test_a_draft_that_is_padded_otherwise_drafts_the_same(size, reads, folders):
    """It is the target but for the padding, so that every draft is accepted."""
    target = load_model(folders[PADDED])
    draft = make_draft(f"small-model:model={folders[size]},reads={reads}", target)
    config = dataclasses.replace(GREEDY, cache="full", draft=f"small-model:model={folders[size]}")
    out = generate(target, [PROMPT], config=with_draft(config, draft), tokenizer=TOKENIZER)
    assert (
        out.token_ids
        == generate(target, [PROMPT], config=dataclasses.replace(GREEDY, draft="none", cache="full"), tokenizer=TOKENIZER).token_ids
    )
    assert out.stats.draft_acceptance_rate == 1.0


@pytest.mark.system
def test_drafts_of_another_padding_are_lossless_where_padding_is_loud(folders, loud):
    config = dataclasses.replace(GREEDY, draft=f"small-model:model={folders[PADDED + 64]}")
    expected = generate(loud, [PROMPT], config=dataclasses.replace(GREEDY, draft="none"), tokenizer=TOKENIZER).token_ids
    assert generate(loud, [PROMPT], config=config, tokenizer=TOKENIZER).token_ids == expected


def test_a_prompt_with_padding_is_read(folders):
    """Ids that the draft does not have are read as its last one; the target decides."""
    target = load_model(folders[PADDED])
    prompt = [5, PADDED - 1, 7, PADDED - 2]
    draft = make_draft(f"small-model:model={folders[IDS]}", target)
    out = generate(target, [prompt], config=with_draft(GREEDY, draft))
    assert out.token_ids == generate(target, [prompt], config=dataclasses.replace(GREEDY, draft="none")).token_ids
    assert out.stats.num_draft_tokens > 0
    assert draft.in_own_vocabulary(np.array([prompt])).tolist() == [[5, IDS - 1, 7, IDS - 1]]


@pytest.mark.parametrize("settings", [{"banned_token_ids": range(IDS)}, {"logit_bias": dict.fromkeys(range(IDS), -np.inf)}])
def test_banning_all_tokens_is_refused(settings, loud):
    with pytest.raises(InputError, match="no token is left that may be generated"):
        generate(loud, [PROMPT], config=dataclasses.replace(GREEDY, **settings), tokenizer=TOKENIZER)


@pytest.mark.parametrize("settings", [{"logit_bias": {IDS + 9: 5.0}}, {"stop_token_ids": ((3, IDS + 9),)}])
def test_favouring_and_stopping_at_padding_is_refused(settings, loud):
    with pytest.raises(
        InputError, match=f"token id {IDS + 9} to favour or stop at is padding of the vocabulary: the tokenizer has {IDS} ids"
    ):
        generate(loud, [PROMPT], config=dataclasses.replace(GREEDY, **settings), tokenizer=TOKENIZER)


def test_an_eos_in_the_padding_ends_rows(loud):
    """A checkpoint's EOS that its tokenizer does not have."""
    config = dataclasses.replace(GREEDY, draft="none", eos_token_ids=(PADDED - 1, PADDED - 2), ignore_eos=False)
    out = generate(loud, [PROMPT], config=config, tokenizer=TOKENIZER)
    assert out.finish_reason == ["eos"] and out.token_ids[0][-1] in config.eos_token_ids


def test_a_vocabulary_without_all_ids_is_refused(folders):
    with pytest.raises(InputError, match=f"a vocabulary of {IDS - 1} tokens; a draft needs the target's, of {PADDED}$"):
        make_draft(f"small-model:model={folders[IDS - 1]}", load_model(folders[PADDED]))
