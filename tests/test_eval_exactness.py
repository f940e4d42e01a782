"""`qspec eval exactness`: which tokens differ from one-by-one decoding, how they were decided, and how it is shown."""

import json

import jax.numpy as jnp
import pytest
from runs import random_model, random_prompts

from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.evaluate import exactness, exactness_report
from qspec_jax.evaluate.exactness import Agreement, Baseline, Difference, units_between
from qspec_jax.models.llama import Llama

PROMPTS = random_prompts([20, 14, 20])
SETTINGS = dict(cache="int8", group_size=16, max_new_tokens=40, ignore_eos=True)
ALONE = GenerationConfig(draft="none", **SETTINGS)
DRAFTED = GenerationConfig(draft="prompt-lookup", num_speculative_tokens=3, **SETTINGS)


@pytest.fixture(scope="module")
def model():
    return random_model(jnp.float32, num_hidden_layers=1, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def baseline(model):
    return Baseline(model, PROMPTS, ALONE)


@pytest.fixture
def rounds_that_err(monkeypatch):
    """Passes of several tokens add to each logit what passes of one token do not."""

    def logits(model, x, added=None):
        found = exact(model, x, added)
        return found if x.shape[1] == 1 else found + 0.8 * jnp.cos(7.0 * jnp.arange(found.shape[-1]))

    exact = Llama.logits
    monkeypatch.setattr(Llama, "logits", logits)
    Compiled.forget()
    yield
    Compiled.forget()


def test_a_batch_and_a_second_run_agree_with_each_prompt_alone(model, baseline):
    for batch in (1, 3):
        found = baseline.compared(ALONE, batch)
        assert (found.rows, found.tokens, found.agreeing, found.differences) == (3, 120, 120, [])
        assert (found.share, found.first) == (1, None)
    assert baseline.tokens == generate(model, PROMPTS, config=ALONE).token_ids


def test_the_first_difference_of_each_row_is_found_and_its_passes_reproduce_it(model, baseline, rounds_that_err):
    found = baseline.compared(DRAFTED, 3)
    others = generate(model, PROMPTS, config=DRAFTED).token_ids
    first = [next((i for i in range(40) if own[i] != other[i]), 40) for own, other in zip(baseline.tokens, others, strict=True)]
    assert (found.agreeing, found.first) == (sum(first), min(first)) and 0 < min(first) < 40
    assert [(each.prompt, each.position) for each in found.differences] == [(b, at) for b, at in enumerate(first) if at < 40]
    for each in found.differences:
        own, other = each.tokens
        assert (own, other) == (baseline.tokens[each.prompt][each.position], others[each.prompt][each.position])
        assert each.reproduced and each.one_by_one[0] > each.one_by_one[1] and each.in_round[0] < each.in_round[1]
        added = [after - before for before, after in zip(each.one_by_one, each.in_round)]
        assert added == pytest.approx([0.8 * float(jnp.cos(7.0 * token)) for token in (own, other)], abs=1e-3)
        assert each.units[0] > 0 > each.units[1]


def test_passes_that_choose_otherwise_are_said_not_to_reproduce_it(baseline, rounds_that_err, monkeypatch):
    """What is right but in the rounds of the decode: the pass that shows the logits does not err."""
    decode = exactness._Decoding.tokens.func

    def tokens(decoding):
        found = decode(decoding)
        return [[*row[:5], (row[5] + 1) % 64, *row[6:]] for row in found]

    monkeypatch.setattr(exactness._Decoding, "tokens", property(tokens))
    (difference, *_) = baseline.compared(ALONE, 1).differences
    own = baseline.tokens[0][5]
    assert (difference.position, difference.tokens, difference.reproduced) == (5, (own, (own + 1) % 64), False)
    assert difference.one_by_one == difference.in_round


def test_the_choice_of_a_first_token_is_that_of_prefill(model, baseline):
    row = exactness._Decoding(model, PROMPTS, DRAFTED, None)
    choices = row.choices({b: (0, (tokens[0], (tokens[0] + 1) % 64)) for b, tokens in enumerate(baseline.tokens)})
    assert [choices[b].token for b in range(3)] == [tokens[0] for tokens in baseline.tokens]
    assert all(first > second for first, second in (choice.logits for choice in choices.values()))


def test_units_are_distances_between_neighbouring_numbers():
    above = 1 + 2.0**-7  # the number after 1 in bfloat16
    assert units_between((1.0, above), jnp.bfloat16) == -1
    assert units_between((8 * above, 8.0), jnp.bfloat16) == 1
    assert units_between((-8 * above, -8.0), jnp.bfloat16) == -1
    assert units_between((1.0, above), jnp.float32) == -(2**16)
    assert units_between((0.0, 0.0), jnp.float32) == 0


SIZES = ["--context", 20, "--max-new-tokens", 4]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"value_{i} = {i}\n" for i in range(40)))
    return path


def test_rows_of_a_command(run, directory, file, tmp_path, monkeypatch):
    """Each draft with each gamma and batch, and none; an interrupted command goes on from the rows that it has."""
    asked, ends_after = [], [3]

    class Fake:
        def __init__(self, model, prompts, config, tokenizer):
            assert [len(prompt) for prompt in prompts] == [20, 20] and config.draft == "none" and config.cache == "int8"

        def compared(self, config, batch):
            if len(asked) == ends_after[0]:
                raise KeyboardInterrupt
            asked.append((config.draft_name, config.num_speculative_tokens, batch, config.cache, config.adaptive))
            differences = [Difference(1, 3, (5, 7), (2.5, 2.25), (2.25, 2.5), (16.0, -16.0), batch == 1)]
            return Agreement(2, 8, 7, differences) if config.draft != "none" else Agreement(2, 8, 8, [])

    monkeypatch.setattr(exactness_report, "Baseline", Fake)
    output = tmp_path / "report.txt"
    drafts = ["--draft", "quantspec:weight_bits=16", "--draft", "prompt-lookup", "--gamma", "2,3", "--batch", "1,2", "--cache", "int8"]
    base = ["eval", "exactness", "--model", directory, "--file", file, "--joined", "--texts", 2, *SIZES, *drafts, "--adaptive"]
    code, _, err = run(*base, "--output", output)
    assert code == 130 and err.endswith(f"qspec: interrupted; the same command goes on from {output}.partial\n")
    assert "qspec: none, batch 1, 20 tokens: 0 of 2 rows differ, 100.00% of 8 tokens agree" in err
    ends_after[0] = None
    code, _, err = run(*base, "--output", output)
    assert code == 0
    of_batch = [("none", 4, False), *((name, gamma, True) for name in ("QuantSpecDraft", "PromptLookupDraft") for gamma in (2, 3))]
    assert asked == [(name, gamma, batch, "int8", adaptive) for batch in (1, 2) for name, gamma, adaptive in of_batch]
    table = output.read_text()
    assert "87.50%" in table and "+16.00 / -16.00" in table and "Not reproduced" in table and "adaptive True" in table
    report = json.loads(run(*base, "--json")[1])
    assert [row["draft"] for row in report["results"][:2]] == ["none", "quantspec:weight_bits=16"]
    assert report["results"][1]["differences"][0]["tokens"] == [5, 7] and report["results"][1]["share"] == 7 / 8


def test_wrong_settings(fails, directory, file):
    base = ["eval", "exactness", "--model", directory, "--file", file, *SIZES]
    fails([*base, "--exact", "bits", "--gamma", "4,16"], "exact bits is for at most 15 drafts", "(gamma) is 16")
    fails([*base, "--gamma", 0], "--gamma 0 should be at least 1")
    fails([*base, "--batch", "1,0"], "--batch 0 should be at least 1")
    fails([*base, "--batch", 2], "--batch 2 should be at most the number of texts, 1")
    fails([*base, "--draft", "auto"], "--draft auto", "name the drafts")
    fails([*base, "--draft", "sparse", "--cache", "full"], "draft sparse", "cache full")
    fails([*base, "--cache", "int9"], "int9")
