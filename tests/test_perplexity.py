"""Perplexity through decode: against the target written down a second way (models.py), whatever the block; `qspec eval perplexity`."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import CASES, write_checkpoint
from models import target_logits
from runs import random_model, random_prompts
from scipy.special import log_softmax, rel_entr, softmax
from tiers import in_system

from pallas_kernels.formats.views import UPPER_PLANE
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints import loading
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.errors import InputError
from qspec_jax.evaluate import perplexity, scoring
from qspec_jax.evaluate.cache_views import cache_view
from qspec_jax.evaluate.scoring import divergence, score, token_logprobs

G = 4
PROMPTS = random_prompts([1, G + 1, 2 * G, 5 * G + 3])
# Of other lengths, so that rows end at other times; the longest row is flushed eight times.
CONTINUATIONS = random_prompts([30, 40, 17, 33], seed=4)


@pytest.fixture(scope="module")
def model(float64):
    return random_model(jnp.float64, num_hidden_layers=1)


@pytest.fixture(scope="module")
def expected(model):
    """The target's logits for each continuation, with the full cache and in INT8."""
    return {
        name: target_logits(model, PROMPTS, CONTINUATIONS, group_size=G, scheme=scheme)
        for name, scheme in (("full", None), ("int8", "int8_first"))
    }


@pytest.fixture(scope="module")
def scores(model):
    """Through all three caches, in blocks that end where a group does only when they must."""
    views = [cache_view(cache, group_size=G) for cache in perplexity.DEFAULT_CACHES]
    return score(model, PROMPTS, CONTINUATIONS, views, width=7)


def logprobs_of(logits, tokens):
    return log_softmax(logits, -1)[np.arange(len(tokens)), tokens]


def test_scores_are_the_targets(scores, expected):
    for row, tokens in enumerate(CONTINUATIONS):
        full, int8 = expected["full"][row], expected["int8"][row]
        logprobs, kl, agrees = (x[:, row, : len(tokens)] for x in (scores.logprobs, scores.divergence, scores.agrees))
        np.testing.assert_allclose(logprobs[0], logprobs_of(full, tokens), atol=1e-11)
        np.testing.assert_allclose(logprobs[1], logprobs_of(int8, tokens), atol=1e-11)
        np.testing.assert_allclose(kl[1], rel_entr(softmax(full, -1), softmax(int8, -1)).sum(-1), atol=1e-13)
        np.testing.assert_array_equal(agrees[1], full.argmax(-1) == int8.argmax(-1))
        assert (kl[0] == 0).all() and agrees[0].all()
    # Otherwise to read the full cache instead would pass.
    assert scores.divergence[1].max() > 1e-6 and scores.divergence[2].max() > 10 * scores.divergence[1].max()


def test_one_token_at_a_time_gives_the_same(model, scores):
    """With the draft's view, which nothing else here decodes one by one; NaN behind the shorter rows."""
    found = token_logprobs(model, PROMPTS, CONTINUATIONS, CacheConfig(group_size=G), width=1, view=UPPER_PLANE)
    assert found.shape == (4, 40)
    for row, tokens in enumerate(CONTINUATIONS):
        np.testing.assert_allclose(found[row, : len(tokens)], scores.logprobs[2, row, : len(tokens)], atol=1e-11)
        assert np.isnan(found[row, len(tokens) :]).all()


@pytest.mark.parametrize("fault", ["a block one too long", *in_system("never flushed")])
def test_a_wrong_schedule_is_seen(monkeypatch, model, expected, fault):
    if fault == "never flushed":
        monkeypatch.setattr(HierarchicalCache, "flush", lambda cache: (cache, jnp.zeros_like(cache.lengths.buffered)))
    room = 1 if fault == "a block one too long" else 100
    monkeypatch.setattr(HierarchicalCache, "draft_room", property(lambda cache: 2 * G - 1 + room - cache.lengths.buffered))
    afresh = Compiled(lambda *args, **static: scoring._score(*args, **static), static_argnames=("width", "kinds", "guesses"))
    monkeypatch.setattr(scoring, "SCORE", afresh)
    found = token_logprobs(model, PROMPTS, CONTINUATIONS, CacheConfig(group_size=G), width=7)
    errors = [
        np.abs(found[row, : len(tokens)] - logprobs_of(expected["int8"][row], tokens)).max() for row, tokens in enumerate(CONTINUATIONS)
    ]
    assert max(errors) > 1e-6


def test_token_logprobs_refuse_what_cannot_be_scored(model):
    ask = lambda prompts, continuations, **settings: token_logprobs(model, prompts, continuations, CacheConfig(), **settings)
    with pytest.raises(InputError, match="width 0"):
        ask([[1]], [[2]], width=0)
    with pytest.raises(InputError, match="2 prompts and 1 continuations"):
        ask([[1], [1]], [[2]])
    with pytest.raises(InputError, match="continuation 1 is empty"):
        ask([[1], [1]], [[2], []])
    with pytest.raises(InputError, match="prompt 1 is empty"):
        ask([[1], []], [[2], [2]])
    for wrong in ([64], [64, 1], [1, -1]):
        with pytest.raises(InputError, match=r"prompt 1 .* vocabulary of 64"):
            ask([[1], [1]], [[2], wrong])
    with pytest.raises(InputError, match="4096 positions"):
        ask([[1] * 4090], [[2] * 7])


def test_texts_that_cross_to_the_long_rope_factors_are_refused(tmp_path):
    """The cache would hold keys of both factors; on one side of the boundary there is nothing to refuse."""
    model = loading.load_model(write_checkpoint(tmp_path, CASES["phi3-longrope"]), progress=False)
    ask = lambda prompt, new: token_logprobs(model, [[1], [1] * prompt], [[2], [2] * new], CacheConfig("full"))
    for prompt, new in ((30, 4), (1, 40)):
        with pytest.raises(InputError, match=r"prompt 1 of .* cross the 32 tokens"):
            ask(prompt, new)
    assert np.isfinite(ask(30, 3)[1]).all()


def test_divergence():
    """Against scipy in float64, also where a probability underflows; in float32 where the two hardly differ."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, [[1], [20], [400]], (3, 512))
    p, q = (log_softmax(x, -1) for x in (logits, logits + rng.normal(0, 0.5, logits.shape)))
    exact = rel_entr(np.exp(p), np.exp(q)).sum(-1)
    with jax.enable_x64(True):
        np.testing.assert_allclose(divergence(jnp.array(p), jnp.array(q)), exact, rtol=1e-9)
    np.testing.assert_allclose(divergence(jnp.float32(p), jnp.float32(q)), exact, rtol=1e-4)
    close = log_softmax(logits[0] + rng.normal(0, 1e-3, 512))
    found = divergence(jax.nn.log_softmax(jnp.float32(logits[0])), jnp.float32(close))
    np.testing.assert_allclose(found, rel_entr(np.exp(p[0]), np.exp(close)).sum(), rtol=1e-2)


def test_figures_by_hand():
    """Two caches, two texts of three tokens."""
    logprobs = -np.array([[[1.0, 2, 3], [2, 2, 2]], [[1, 2, 3], [2, 2, 5]]])
    agrees = np.array([[[True] * 3] * 2, [[True] * 3, [True, False, False]]])
    scores = scoring.Scores(logprobs, np.array([[[0.0] * 3] * 2, [[0, 0, 0], [0, 0.5, 1]]]), agrees, agrees)
    found = scoring.figures(scores, 1, 30)
    assert found.perplexity == pytest.approx(np.exp(2.5))
    assert found.perplexity_change == pytest.approx(np.exp(0.5) - 1)
    assert found.bits_per_byte == pytest.approx(15 / np.log(2) / 30)
    assert (found.kl, found.top1_agreement) == (0.25, pytest.approx(4 / 6))
    parts = perplexity.by_distance(scores, 1)
    assert [(part.first, part.last) for part in parts] == [(1, 1), (2, 2), (3, 3)]
    assert [part.kl for part in parts] == [0, 0.25, 0.5]
    assert [part.perplexity for part in parts] == pytest.approx(np.exp([1.5, 2, 4]))


def test_batches():
    texts = [[i] for i in range(17)]
    assert [len(batch) for batch in scoring.batches(texts)] == [6, 6, 5]
    assert [text for batch in scoring.batches(texts) for text in batch] == texts


# The command -----------------------------------------------------------------------------------------------------------

SIZES = ["--prompt-tokens", 40, "--max-new-tokens", 24, "--group-size", 8]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three texts, the second of them too short."""
    folder = tmp_path_factory.mktemp("texts")
    texts = ("".join(f"value_{i} = {i} * {k}\n" for i in range(40 if k != 1 else 5)) for k in range(4))
    paths = [folder / f"{k}.py" for k in range(4)]
    for path, text in zip(paths, texts):
        path.write_text(text)
    return paths


@pytest.mark.system
def test_eval_perplexity(run, directory, files, tmp_path, monkeypatch):
    """Its figures are those of one full pass, and of a second batch as of the first; its JSON, its plot, its table."""
    monkeypatch.setattr(scoring, "ROWS", 2)
    plot = tmp_path / "plot.png"
    code, out, err = run("eval", "perplexity", *files, "--model", directory, *SIZES, "--json", "--plot", plot)
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert set(report) == {field.name for field in dataclasses.fields(perplexity.PerplexityReport)}
    assert (report["texts"], report["tokens"], report["group_size"], report["scheme"]) == (3, 72, 8, "int8_first")
    tokenizer = load_tokenizer(directory)
    encoded = [tokenizer(path.read_text(), return_offsets_mapping=True) for path in files]
    assert report["too_short"] == [{"name": str(files[1]), "tokens": len(encoded[1]["input_ids"])}]
    whole = [text for text in encoded if len(text["input_ids"]) >= 64]
    # The texts are in ASCII.
    assert report["bytes"] == sum(text["offset_mapping"][63][1] - text["offset_mapping"][39][1] for text in whole)
    texts = [text["input_ids"][:64] for text in whole]
    prompts, continuations = [text[:40] for text in texts], [text[40:] for text in texts]
    model = loading.load_model(directory, progress=False)
    assert [row["cache"] for row in report["results"]] == ["full", "int8", "int4"]
    for row, scheme in zip(report["results"], (None, "int8_first")):
        logits = target_logits(model, prompts, continuations, group_size=8, scheme=scheme)
        loss = -np.mean([logprobs_of(np.float64(x), tokens) for x, tokens in zip(logits, continuations)])
        assert row["perplexity"] == pytest.approx(np.exp(loss), rel=1e-4)
        assert row["bits_per_byte"] == pytest.approx(loss * 72 / np.log(2) / report["bytes"], rel=1e-5)
        assert [(part["first"], part["last"]) for part in row["by_distance"]] == [(i, i + 2) for i in range(1, 24, 3)]
    full, int8, int4 = report["results"]
    assert (full["kl"], full["top1_agreement"], full["perplexity_change"]) == (0, 1, 0)
    assert 0 < 10 * int8["kl"] < int4["kl"]
    assert int8["perplexity_change"] == pytest.approx(int8["perplexity"] / full["perplexity"] - 1)
    assert plot.read_bytes().startswith(b"\x89PNG")

    table = tmp_path / "table.txt"
    only = ["--cache", "int4", "--cache", "int8"]
    code, out, _ = run("eval", "perplexity", *files, "--model", directory, *SIZES, *only, "--output", table)
    assert (code, out) == (0, "")
    shown = table.read_text()
    for words in ("72 tokens", "1 text left out", "1.py"):
        assert words in shown
    cells = {line.split()[0]: line.split() for line in shown.splitlines() if line[:4] in ("int4", "int8")}
    # Not digit for digit: two runs may add their float32 numbers in different orders.
    for row in (int4, int8):
        assert float(cells[row["cache"]][1]) == pytest.approx(row["perplexity"], rel=1e-5)
        assert float(cells[row["cache"]][4]) == pytest.approx(row["kl"], rel=1e-2)
    assert "full" not in shown
    code, out, _ = run("eval", "perplexity", *files, "--model", directory, *SIZES, "--cache", "kivi:bits=1,residual=32", "--json")
    assert code == 0 and [row["cache"] for row in json.loads(out)["results"]] == ["kivi:bits=1,residual=32"]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--cache", "int2"], "cache 'int2' should be one of full, int8, kivi, specache, streaming-llm, h2o, int4"),
        (["--cache", "int4:bits=1"], "cache 'int4:bits=1' should be one of full, int8"),
        (["--cache", "specache:host=store,k=8"], "gives the same tokens as on the device: leave host=store out"),
        (["--cache", "kivi:bits=1", "--cache", "kivi:bytes=1"], "'bytes=1' should be one of"),
        (["--cache", "full:host=all"], "'full:host=all' gives the same tokens as on the device: leave host=all out"),
        (["--scheme", "magic"], "magic"),
        (["--group-size", "7"], "7"),
        (["--prompt-tokens", "0"], "prompt_tokens 0"),
        (["--max-new-tokens", "-3"], "max_new_tokens -3"),
        (["--prompt-tokens", "9999"], "10023"),
        (["--prompt-tokens", "120"], "128 positions"),
        (["--plot", "plot.txt"], "plot.txt"),
        (["--output", "no/such/folder/file"], "no/such/folder/file"),
        (["no/such/text"], "no/such/text"),
    ],
)
def test_bad_input(fails, directory, files, flags, word):
    fails(["eval", "perplexity", files[0], "--model", directory, *SIZES, *flags], word)
