"""How often prompt lookup would have been right along the ends of prompts, by which `auto` judges cascades."""

import jax.numpy as jnp
import numpy as np
import pytest

from qspec_jax.drafts.prompt_lookup import PromptLookupSettings, look_up
from qspec_jax.planning import repetition as module
from qspec_jax.planning.repetition import LAST, MIN_TOKENS, PROMPTS, Repetition, looked_up, repetition

USUAL = PromptLookupSettings()


@pytest.mark.parametrize("settings", [USUAL, PromptLookupSettings(longest=1), PromptLookupSettings(longest=5, shortest=2)], ids=str)
def test_it_proposes_what_the_draft_does(settings):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 2 + i % 3, n) for i, n in enumerate(rng.integers(1, 24, 100))]
    padded = jnp.array([np.pad(text, (0, 24 - len(text))) for text in texts])
    lengths = jnp.array(list(map(len, texts)))
    tokens, found = look_up(padded, lengths, 4, longest=settings.longest, shortest=settings.shortest)
    for text, expected, there in zip(texts, tokens, found, strict=True):
        assert looked_up(text, settings, 4).tolist() == (expected.tolist() if there else [])
    assert 10 < sum(map(bool, found)) < 100


def test_what_counts(monkeypatch):
    """From the middle of the text on: after 1 came 2 3 4, of which 2 is right; after 9 nothing; after 2 came 9 2, and after 1 came 2 9, in
    vain; after 7 nothing. Of pairs only 1 2 came before."""
    monkeypatch.setattr(module, "MIN_TOKENS", 1)
    prompt = [1, 2, 3, 4, 5, 1, 2, 9, 2, 1, 7, 1]
    assert repetition([prompt], USUAL) == Repetition(asked=5, proposed=3, judged=4, accepted=1)
    assert repetition([prompt], PromptLookupSettings(shortest=2)) == Repetition(asked=6, proposed=1, judged=1)


def test_texts_that_repeat_themselves_and_those_that_never_do():
    rng = np.random.default_rng(0)
    phrase, noise = rng.integers(0, 1 << 17, 40), rng.permutation(1 << 17)[:4096]
    found = repetition([np.tile(phrase, 30)], USUAL)
    assert found.accepted == found.judged and found.proposing == 1 and found.acceptance > 0.97
    assert repetition([noise], USUAL) == Repetition(asked=LAST)
    # Two prompts have as much to say as one.
    found = repetition([np.tile(phrase, 60), noise], USUAL)
    assert found.accepted == found.judged and found.proposed == LAST // 2 // 4 and found.asked == LAST // 2 + LAST // 2 // 4


def test_short_prompts_say_nothing():
    """Whether or not they repeat themselves: what counts is how long they are."""
    for length in (1, 2, MIN_TOKENS, 2 * MIN_TOKENS - 2):
        assert repetition([np.arange(length)], USUAL) is None
    assert repetition([np.arange(2 * MIN_TOKENS)], USUAL) == Repetition(asked=MIN_TOKENS)
    found = repetition([np.tile(np.arange(8), MIN_TOKENS // 4)], USUAL)
    assert found.tokens == MIN_TOKENS == 4 * found.asked


def test_a_few_tokens_say_little():
    assert Repetition(64, 2, 2, 2).acceptance < 0.5 and Repetition(64, 0).acceptance == pytest.approx(0.37)
    assert Repetition(600, 600, 900, 450).acceptance == pytest.approx(0.5, abs=0.003)


def test_of_many_prompts_some_are_read():
    """That of 1,000 long prompts the choice of a draft takes no longer than of a few."""
    read = []

    class Prompt(list):
        def __array__(self, dtype=None, copy=None):
            read.append(self[0])
            return np.array(list(self))

    prompts = [Prompt([i, *range(1000, 1500)]) for i in range(10 * PROMPTS)]
    assert repetition(prompts, USUAL) == Repetition(asked=LAST) and read == list(range(0, 10 * PROMPTS, 10))
