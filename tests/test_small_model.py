"""A draft with a model and a KV cache of its own: what the cache holds, what is asked of the checkpoint. Exactness: test_exactness.py."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import hf_config, rope_settings, write_checkpoint
from runs import prepared, random_model, random_prompts, run_rounds, with_draft
from tiers import in_system

from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax import demo
from qspec_jax.caches.prefill import prefill
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.checkpoints.tokenizers import check_same_tokens
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.prepare import prepare
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.round import current_round, propose
from qspec_jax.decoding.run_identity import of_checkpoint
from qspec_jax.decoding.sampling import make_sampler
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.small_model import SmallModelDraft
from qspec_jax.errors import InputError
from qspec_jax.evaluate.acceptance import teacher_forced
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.quantization.weights import quantize_linears

G = 4
CONFIG = GenerationConfig(draft="quantspec", max_new_tokens=24, group_size=G, ignore_eos=True)
LENGTHS = [1, 2 * G, 5 * G + 3]


@pytest.fixture(scope="module")
def model(float64):
    return random_model(jnp.float64, num_hidden_layers=1)


def drafting(model, kind=SmallModelDraft):
    return kind(ViewedModel(model, BOTH_PLANES))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LastDraftForgotten(SmallModelDraft):
    """Planted: takes the last draft for held by its cache, which it was never fed to."""

    def propose(self, state, cache, current):
        proposal, state, cache = super().propose(state, cache, current)
        return proposal, dataclasses.replace(state, fed=proposal.eligible), cache


@pytest.mark.parametrize(
    ("kind", "gamma"),
    [
        *((kind, 4) for kind in (SmallModelDraft, LastDraftForgotten)),
        *in_system(*((kind, 1) for kind in (SmallModelDraft, LastDraftForgotten))),
    ],
)
def test_a_model_that_is_the_target_is_always_accepted(model, kind, gamma):
    """All drafts of each round are, so that every round begins without the K/V of the last one."""
    config = dataclasses.replace(CONFIG, cache="full", num_speculative_tokens=gamma)
    run = run_rounds(model, random_prompts(LENGTHS), config, draft=drafting(model, kind))
    assert run.rounds[-1].drafted.min() >= 11
    assert (run.rounds[-1].accepted == run.rounds[-1].drafted).all() == (kind is SmallModelDraft)
    assert run.tokens == run_rounds(model, random_prompts(LENGTHS), dataclasses.replace(config, draft="none")).tokens


@pytest.mark.system
def test_along_a_real_text(model):
    """Whose tokens are not those that were emitted: random ones, and the draft model's own, which the target may have rejected."""
    small, new = quantize_linears(model), CONFIG.max_new_tokens
    config, prompts = dataclasses.replace(CONFIG, cache="full", num_speculative_tokens=3), random_prompts([16, 28])
    out = teacher_forced(model, drafting(model), [prompt + prompt[::-1] + [1] * 9 for prompt in prompts], config, jax.random.key(0))
    assert out.conditional_rate == out.acceptance_rate == 1 and out.drafted > 30
    own = run_rounds(small, prompts, dataclasses.replace(config, draft="none")).tokens
    texts = [prompt + tokens for prompt, tokens in zip(prompts, own)]
    out = teacher_forced(model, drafting(small), texts, config, jax.random.key(0))
    accepted = drafted = 0
    for text, tokens, prompt in zip(texts, own, prompts):
        logits, _ = jax.jit(model)(jnp.array([text]), jnp.arange(len(text))[None], full_cache(model, 1, len(text)))
        agreed = np.asarray(logits[0].argmax(-1))[len(prompt) - 1 : -1] == tokens
        at = 1
        while at < new:
            right = agreed[at : at + min(3, new - at - 1)]
            leading = int(np.cumprod(right).sum())
            accepted, drafted, at = accepted + leading, drafted + len(right), at + leading + 1
    assert (out.accepted, out.drafted) == (accepted, drafted) and 0.2 < out.acceptance_rate < 0.9


def full_cache(model, batch, capacity):
    return CacheConfig("full").empty(model.config, batch=batch, capacity=capacity, num_speculative_tokens=0, dtype=model.dtype)


@pytest.mark.system
@pytest.mark.parametrize(
    "settings",
    [{}, {"adaptive": True, "draft_cost": 0.6}, {"min_draft_confidence": 0.05, "num_speculative_tokens": 6}],
    ids=str,
)
def test_its_cache_holds_what_a_prefill_of_the_text_gives(model, settings):
    """After every round, across three flushes of the target's cache, rounds without a draft, and rounds that stop early."""
    draft = drafting(quantize_linears(model))
    config, prompts = dataclasses.replace(CONFIG, **settings), random_prompts(LENGTHS)
    state, step, _ = prepared(model, prompts, config, draft=draft)
    plain = 0
    while (np.asarray(state.status) == 0).any():
        before = np.asarray(state.counts.drafted)
        state = step(state)
        held, n = np.asarray(state.draft.own.read_so_far), np.asarray(state.cache.lengths.total)
        running = np.asarray(state.status) == 0
        plain += ((np.asarray(state.counts.drafted) == before) & running).sum()
        assert (held <= n)[running].all()
        if "adaptive" not in settings:
            assert (held >= n - 2)[running].all()  # the last draft, and a round without any
    assert (np.asarray(state.counts.flushes) >= 3).all() and np.asarray(state.counts.accepted).min() > 0
    assert plain > 5 or "adaptive" not in settings
    texts = [prompt + row[:count].tolist() for prompt, row, count in zip(prompts, np.asarray(state.tokens), state.emitted)]
    tokens = jnp.array([text + [0] * (64 - len(text)) for text in texts], jnp.int32)
    _, whole = jax.jit(prefill)(draft.step.model, tokens, n, full_cache(model, 3, 64))
    for own, fresh in zip(state.draft.own.cache.layers, whole.layers, strict=True):
        for row, count in enumerate(held):
            np.testing.assert_allclose(own.keys[row, :, :count], fresh.keys[row, :, :count], atol=1e-10)
            np.testing.assert_allclose(own.values[row, :, :count], fresh.values[row, :, :count], atol=1e-10)


@pytest.mark.system
@pytest.mark.parametrize("sinks", [3, 0])
def test_a_window_of_the_text_is_read_as_if_it_were_all(model, sinks):
    """By a model of one layer, in which a token's keys and values depend on no other token: what it drafts in each round is what it says
    after the first tokens, the window, and what came since: for the first draft the tokens that the cache lacked, then drafts."""
    window, gamma = 9, 3
    draft = SmallModelDraft(ViewedModel(quantize_linears(model), BOTH_PLANES), sinks, window)
    config, prompts = dataclasses.replace(CONFIG, num_speculative_tokens=gamma, max_new_tokens=20), random_prompts([1, 8, 11, 70])
    state, step, limits = prepared(model, prompts, config, draft=draft)
    say = jax.jit(lambda tokens: draft.step(tokens, jnp.arange(tokens.shape[1])[None], full_cache(model, 1, 32))[0])

    def left(text):
        return text if len(text) <= sinks + window else text[:sinks] + text[-window:]

    def expected(text, held):
        drafts = []
        while len(drafts) < gamma:
            tokens = left(text) + drafts if drafts else left(text[:held]) + text[held:]
            drafts.append(int(say(jnp.array([tokens + [0] * (32 - len(tokens))]))[0, len(tokens) - 1].argmax()))
        return drafts

    proposing, rounds = jax.jit(propose), 0
    while (np.asarray(state.status) == 0).any():
        current = current_round(make_sampler(config), state, limits)
        proposal, _, _ = proposing(draft, state.draft, state.cache, current)
        for row, prompt in enumerate(prompts):
            eligible = int(proposal.eligible[row])
            text = prompt + state.tokens[row, : state.emitted[row]].tolist()
            assert proposal.tokens[row, :eligible].tolist() == expected(text, int(state.draft.own.read_so_far[row]))[:eligible]
        state, rounds = step(state), rounds + 1
    target = run_rounds(model, prompts, dataclasses.replace(config, draft="none", cache="int8"))
    assert state.tokens[:, : config.max_new_tokens].tolist() == target.tokens and state.counts.accepted.sum() > 10


# Its checkpoint ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("small"), hf_config(num_hidden_layers=1, max_position_embeddings=40), seed=3)


def test_weights_of_4_bits_and_the_targets_dtype(model, small):
    for bits, same in ((16, True), (4, False)):
        draft = make_draft(f"small-model:model={small},weight_bits={bits}", model)
        weights, own = draft.step.model.weights(), load_model(small, dtype="float64").weights()
        assert draft.step.model.dtype == model.dtype
        assert (type(weights["layers.0.q_proj.weight"]) is type(own["layers.0.q_proj.weight"])) == same


def test_a_directory_with_all_kinds_of_characters(model, small, tmp_path):
    shutil.copytree(small, odd := tmp_path / "a=b:c,d+e(f)")
    text = "small-model:model=" + str(odd).replace(",", "\\,")
    for draft in (text, f"combine:({text})+prompt-lookup"):
        make_draft(draft, model)


def test_runs_beyond_the_draft_models_positions_are_refused(model, small):
    config = dataclasses.replace(CONFIG, cache="full")
    prompts, draft = random_prompts([9, 30]), make_draft(f"combine:prompt-lookup+small-model:model={small}", model)
    each = [Request(prompt, config, jax.random.key(0)) for prompt in prompts]
    for what, work in (
        ("prompt 1", lambda: generate(model, prompts, config=with_draft(config, draft))),
        ("prompt 1", lambda: run_batch(model, with_draft(each, draft))),
        ("prompt 1", lambda: teacher_forced(model, draft, [prompt + [1] * 24 for prompt in prompts], config, jax.random.key(0))),
    ):
        said = f"^{what} of 30 tokens and 24 new ones exceed the draft's 40 positions; ask for at most 10 new"
        with pytest.raises(InputError, match=said):
            work()
    # Each request by itself, not the longest prompt with the most new tokens of another.
    fewer = dataclasses.replace(each[1], config=dataclasses.replace(config, max_new_tokens=10))
    assert prepare(model, with_draft([each[0], fewer], draft)).draft is not None


@pytest.mark.system
def test_a_window_takes_longer_texts(model, small):
    config, prompts = dataclasses.replace(CONFIG, num_speculative_tokens=2), random_prompts([9, 90])
    draft = make_draft(f"small-model:model={small},reads=window,sinks=4,window=36", model)
    out = generate(model, prompts, config=with_draft(config, draft))
    assert out.token_ids == generate(model, prompts, config=dataclasses.replace(config, draft="none", cache="int8")).token_ids


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({}, "sinks=4,window=37", "sinks 4 and window 37 should together be at most the 40 positions"),
        (rope_settings("dynamic"), "sinks=4,window=37", "its dynamic RoPE"),
    ],
)
def test_windows_that_are_refused(model, small, tmp_path, changes, settings, words):
    directory = write_checkpoint(tmp_path / "x", hf_config(num_hidden_layers=1) | changes) if changes else small
    with pytest.raises(InputError, match=words):
        make_draft(f"small-model:model={directory},reads=window,{settings}".rstrip(","), model)


def test_another_vocabulary(model, small, tmp_path):
    other = write_checkpoint(tmp_path / "other", hf_config(vocab_size=96, num_hidden_layers=1))
    for draft in (f"small-model:model={other}", f"combine:prompt-lookup+small-model:model={other}"):
        with pytest.raises(InputError, match=r"other: a vocabulary of 96 tokens; a draft needs the target's, of 64$"):
            make_draft(draft, model)


def test_tokens_of_other_ids(model, small, tmp_path):
    """Whatever the tokens that were added are called."""
    target, draft = (write_checkpoint(tmp_path / name, hf_config(), tokenizer=demo.MODEL) for name in ("target", "draft"))
    file = draft / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]

    def changed(*names):
        first, second = names
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        file.write_text(json.dumps(content))

    file.write_text(json.dumps(content))  # other bytes, the same tokens
    check_same_tokens(draft, target)
    check_same_tokens(small, target)  # which has none
    ordinary = sorted(set(vocabulary) - {token["content"] for token in content["added_tokens"]}, key=vocabulary.get)
    changed(*ordinary[100:102])
    with pytest.raises(InputError, match=f"token {vocabulary[ordinary[101]]} is .* a draft needs the target's vocabulary"):
        make_draft(f"small-model:model={draft}", load_model(target))


@pytest.mark.system
def test_command_lines(run, fails, directory, tmp_path):
    """Directory: a model of 128 positions with the embedded model's tokenizer."""
    generate = ["generate", "--model", directory, "--prompt", "ab", "--max-new-tokens", "12", "--group-size", "8", "--ignore-eos", "--json"]
    tokens = lambda draft: json.loads(run(*generate, "--draft", draft, "--cache", "full")[1])["token_ids"]
    expected = tokens("none")
    for draft in (
        f"small-model:model={directory}",
        f"combine:(prompt-lookup:longest=2)+(small-model:model={directory},weight_bits=4)",
    ):
        assert tokens(draft) == expected
    short = write_checkpoint(tmp_path / "short", hf_config(vocab_size=4096, max_position_embeddings=8), tokenizer=demo.MODEL)
    fails([*generate, "--draft", f"small-model:model={short}"], "exceed the draft's 8 positions")
    fails([*generate, "--draft", "small-model:model=no/such"], "no/such: no such directory")
    fails([*generate, "--draft", f"small-model:model={directory}", "--sensitive-layers", "1"], "--sensitive-layers")


@pytest.mark.system
def test_a_batch_belongs_to_the_drafts_checkpoint_too(run, fails, directory, tmp_path):
    """Sampled tokens follow the draft's."""
    source, draft = tmp_path / "in", tmp_path / "draft"
    shutil.copytree(directory, draft)
    source.write_text(json.dumps({"prompt": "ab"}) + "\n")
    command = ["batch", source, tmp_path / "out", "--model", directory, "--max-new-tokens", "4", "--draft", f"small-model:model={draft}"]
    assert run(*command)[0] == 0
    before = of_checkpoint(draft)
    (draft / "vocab.json").write_text("{}")
    assert of_checkpoint(draft) != before
    fails(command, "out")


@pytest.mark.system
def test_lines_that_are_too_long_for_the_draft(run, fails, directory, tmp_path):
    """Each is wrong by itself, and counted as people do; without drafts there is no draft that could be too short, or even missing."""
    source, out = tmp_path / "in", tmp_path / "out"
    short = write_checkpoint(tmp_path / "short", hf_config(vocab_size=4096, max_position_embeddings=8), tokenizer=demo.MODEL)
    source.write_text("\n".join(json.dumps({"token_ids": [1] * n}) for n in (2, 7, 3, 9)))
    command = ["batch", source, out, "--model", directory, "--max-new-tokens", "4", "--group-size", "8", "--json"]
    drafting = [*command, "--draft", f"small-model:model={short}"]
    said = "the prompt of 7 tokens and 4 new ones exceed the draft's 8 positions; ask for at most 1 new tokens"
    fails(drafting, f"line 2: {said} (and 1 more")
    code, report, _ = run(*drafting, "--on-error", "skip")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert code == 0 and json.loads(report)["wrong"] == 2
    assert [line["line"] for line in lines if "token_ids" in line] == [1, 3] and lines[1] == {"line": 2, "error": said}
    code, report, _ = run(*command, "--gamma", "0", "--draft", "small-model:model=no/such", "--overwrite")
    assert code == 0 and json.loads(report)["wrong"] == 0
