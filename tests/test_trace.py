"""Traces: a traced decode gives the tokens of an untraced one, and every figure of its record is that of the statistics."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import random_model, random_prompts
from tiers import in_system

from qspec_jax import GenerationConfig, InputError, generate
from qspec_jax.bench.simulated import SimulatedGreedy
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.decoding.tracing import pieces_of
from qspec_jax.drafts import make_draft
from qspec_jax.traces.page import page_of
from qspec_jax.traces.trace import GroupsRead

CASES = {
    "greedy": dict(draft="quantspec", num_speculative_tokens=4, adaptive=True, draft_cost=0.2, min_draft_confidence=0.1),
    "sampled": dict(draft="sparse:budget=0.5,weight_bits=16,min_groups=1", num_speculative_tokens=3, temperature=0.9, top_k=20),
    "combined": dict(draft="combine:prompt-lookup+quantspec:weight_bits=16", num_speculative_tokens=2, temperature=0.7),
    "without a draft": dict(draft="none", cache="int8", repetition_penalty=1.3),
}


@pytest.fixture(scope="module")
def small():
    """A model of one layer whose drafts are sometimes rejected."""
    return random_model(jnp.float32, num_hidden_layers=1, spread=0.4)


@pytest.mark.parametrize("case", ["greedy", *in_system(*(case for case in CASES if case != "greedy"))])
def test_a_traced_decode_is_the_untraced_one(case, small):
    """Its tokens and statistics; and its record agrees with these, and is consistent in itself."""
    config = GenerationConfig(max_new_tokens=30, group_size=8, ignore_eos=True, **CASES[case])
    prompts, key = random_prompts([40, 21]), jax.random.key(3)
    untraced, traced = (generate(small, prompts, config=config, key=key, trace=trace) for trace in (False, True))
    assert untraced.trace is None
    assert traced.token_ids == untraced.token_ids and traced.finish_reason == untraced.finish_reason
    assert traced.stats.rows == untraced.stats.rows
    check_figures(traced, config)
    check_verdicts(traced.trace, config)
    check_limits(traced.trace, config)
    check_notebook(traced, config)
    check_proposers(traced.trace)
    check_reads(traced.trace, config)


def check_figures(traced, config):
    """The sums over the rounds of the JSON are the statistics."""
    found = json.loads(json.dumps(traced.trace.as_object(), allow_nan=False))
    assert len(found["rows"]) == 2 and found["greedy"] == (config.temperature == 0)
    assert traced.stats.decode_s == pytest.approx(sum(map(sum, found["seconds"])), rel=1e-2)
    assert len(found["seconds"]) == max(len(row["rounds"]) for row in found["rows"])
    for row, tokens, stats in zip(found["rows"], traced.token_ids, traced.stats.rows):
        rounds = row["rounds"]
        sums = {name: sum(each[name] for each in rounds) for name in ("drafted", "accepted", "flushed", "emitted")}
        assert (sums["drafted"], sums["accepted"]) == (stats.num_draft_tokens, stats.num_accepted_draft_tokens)
        assert (sums["flushed"], 1 + sums["emitted"]) == (stats.flushes, stats.new_tokens)
        assert (row["token_ids"], row["prompt_tokens"]) == (tokens, stats.prompt_tokens)
        if config.speculative:
            assert len(rounds) == stats.num_spec_steps
            counted = [sum(each["accepted"] == n for each in rounds) for n in range(len(stats.acceptance_histogram))]
            assert counted == stats.acceptance_histogram
        assert [each["first"] for each in rounds] == np.cumsum([1] + [each["emitted"] for each in rounds[:-1]]).tolist()


def check_verdicts(trace, config):
    """The emitted tokens are the accepted drafts and the target's own, and each verdict follows from the recorded probabilities."""
    verdicts = set()
    for row in trace.rows:
        for each in row.rounds:
            accepted = each.judged_accepted
            tokens = [draft.token for draft in each.drafts[:accepted]] + [each.own_token]
            assert row.token_ids[each.first : each.first + each.emitted] == tokens[: each.emitted]
            assert len(each.likely) == len(each.drafts) + 1 and len(each.drafts) <= each.limits.asked
            if not config.min_draft_confidence and len(trace.proposers) < 2:
                assert len(each.drafts) == each.limits.asked
            for i, draft in enumerate(each.drafts[: accepted + 1]):
                (best, p), *_ = each.likely[i]
                assert p >= draft.p - 1e-6 and 0 < draft.q <= 1 + 1e-6
                passes = draft.token == best if config.temperature == 0 else draft.uniform * draft.q < draft.p
                assert passes == (i < accepted)
                verdicts.add(passes)
            if config.temperature == 0:
                assert each.own_token == each.likely[accepted][0][0]
            assert each.own_p > 0
    assert verdicts == ({True, False} if config.speculative else set())


def check_limits(trace, config):
    """A round drafts up to the next flush, and up to the last token that is wanted."""
    gamma = config.num_speculative_tokens if config.speculative else 0
    for row in trace.rows:
        for each in row.rounds:
            assert each.limits.gamma == gamma and (each.limits.adaptive is None) != config.adaptive
            n = row.prompt_tokens + each.first - 1
            assert each.limits.room == 15 - (n - max(0, n // 8 - 1) * 8)
            assert each.limits.wanted == 30 - each.first - 1


def check_notebook(traced, config):
    """A notebook shows a table of the rows and the histogram, and the page of the trace."""
    table, rows = traced._repr_html_(), traced.stats.rows
    assert all(f">{row.new_tokens}</td>" in table for row in rows) and ("drafts accepted" in table) == config.speculative
    if config.speculative:
        assert f"({rows[0].num_accepted_draft_tokens} / {rows[0].num_draft_tokens})" in table
        assert table.count("background:") == len(traced.stats.acceptance_histogram)
    assert traced.trace._repr_html_().startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')


def check_proposers(trace):
    """Each draft of combine is named; what is looked up has all probability."""
    drafts = [draft for row in trace.rows for each in row.rounds for draft in each.drafts]
    assert {draft.by for draft in drafts} == set(range(len(trace.proposers)))
    if "prompt-lookup" in trace.proposers:
        assert trace.proposers == ("prompt-lookup", "quantspec") and all((draft.q == 1) == (draft.by == 0) for draft in drafts)


def check_reads(trace, config):
    """Half of the groups: the first, the newest, and those with the most mass, in both KV heads of the one layer."""
    if not config.draft.startswith("sparse"):
        assert all(row.reads is None for row in trace.rows)
        return
    for row in trace.rows:
        cached = row.prompt_tokens + np.array([each.first for each in row.rounds]) - 1
        groups = np.maximum(cached // 8 - 1, 0)
        over_rounds, rounds = row.reads.over_rounds, np.arange(len(groups))
        assert over_rounds.shape == (len(groups), groups.max()) and row.reads.over_layers.shape == (1, groups.max())
        assert (over_rounds[:, 0] == 255).all() and (over_rounds[rounds, groups - 1] == 255)[groups > 2].all()
        # A group that one of two heads reads has 128 of 255.
        assert over_rounds.sum(1) / 255 == pytest.approx(np.ceil(groups / 2), abs=0.02)
        there = np.arange(groups.max()) < groups[:, None]
        assert row.reads.over_layers[0] == pytest.approx(over_rounds.sum(0) / there.sum(0), abs=0.6)


@pytest.mark.system
def test_who_proposed_of_triforce(directory, model):
    """The small model is the target here, so that the middle accepts all of its tokens, two at a time, and adds one of its own."""
    draft = make_draft(f"triforce:model={directory},gamma1=2,sinks=2,window=80,middle=(quantspec:weight_bits=16)", model)
    config = GenerationConfig(max_new_tokens=22, draft=draft, num_speculative_tokens=6, ignore_eos=True)
    trace = generate(model, random_prompts([20]), config=config, trace=True).trace
    assert trace.proposers == ("small-model", "quantspec")
    assert [[draft.by for draft in each.drafts] for each in trace.rows[0].rounds] == [[0, 0, 1, 0, 0, 1]] * 3


def test_maps_of_what_is_read_are_binned():
    """Rounds and groups share bins, and a group that came later is averaged over the rounds that had it."""
    rounds = [np.full((2, 600 if i < 400 else 700), 255 if i < 400 else 51, np.uint8) for i in range(800)]
    reads = GroupsRead.of(rounds, 128)
    assert (reads.groups_per_bin, reads.rounds_per_bin) == (3, 2)
    assert reads.over_rounds.shape == (400, 234) and reads.over_layers.shape == (2, 234)
    assert (reads.over_rounds[:200, :200] == 255).all() and (reads.over_rounds[200:, :200] == 51).all()
    assert (reads.over_layers[:, :200] == 153).all() and (reads.over_layers[:, 200:] == 51).all()


def test_a_strategy_that_does_not_say_its_distributions(small):
    """Its probabilities are not known, and the trace names it."""
    config = GenerationConfig(max_new_tokens=6, draft="quantspec:weight_bits=16", num_speculative_tokens=2, group_size=8, ignore_eos=True)
    strategy = SimulatedGreedy(jnp.array(0.5))
    out = generate(small, random_prompts([20]), config=config, key=jax.random.key(0), sampler=strategy, trace=True)
    assert out.trace.settings["strategy"] == "SimulatedGreedy"
    drafts = [draft for each in out.trace.rows[0].rounds for draft in each.drafts]
    assert drafts and all((draft.p, draft.q, draft.chance, draft.likely) == (None, None, None, []) for draft in drafts)


def test_a_model_that_is_divided_over_devices_is_refused(directory):
    """The same for a mesh of one device, which tests have."""
    divided = load_model(directory, mesh=jax.make_mesh((1,), ("model",)))
    with pytest.raises(InputError, match="a trace is of a model on one device"):
        generate(divided, [1, 2], trace=True)


def test_pieces_are_the_text(tokenizer):
    """Bytes that are parts of characters, special tokens and a stop string."""
    text = "x = '日本語 é'\nend here"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, tokens[:3], tokens[3:], None)
    assert len(pieces) == len(tokens) - 3 and "" in pieces
    assert tokenizer.decode(tokens[:3]) + "".join(pieces) == text
    cut = "".join(pieces)[:-4]
    assert "".join(pieces_of(tokenizer, tokens[:3], tokens[3:], cut)) == cut
    assert "".join(pieces_of(tokenizer, [], [tokenizer.eos_token_id, *tokens], None)) == text


def data_of(page: str) -> list[dict]:
    """The traces in a page."""
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))["traces"]


def test_a_command_writes_the_page(run, fails, directory, tmp_path):
    arguments = ["generate", "--model", directory, "--prompt", "def main():", "--max-new-tokens", 24, "--draft", "quantspec:weight_bits=16"]
    arguments += ["--gamma", 2, "--stop", "s", "--samples", 2, "--temperature", 1, "--seed", 5]
    code, out, _ = run(*arguments, "--json", "--trace", tmp_path / "trace.html")
    printed, page = json.loads(out), (tmp_path / "trace.html").read_text()
    assert code == 0 and "trace" not in printed
    (trace,) = data_of(page)
    assert [row["token_ids"] for row in trace["rows"]] == printed["token_ids"]
    assert ["".join(row["pieces"]) for row in trace["rows"]] == printed["text"] and printed["finish_reason"] == ["stop", "stop"]
    assert trace["settings"]["draft"] == "quantspec:weight_bits=16" and trace["about"]["loaded"]
    assert not re.search(r"(?:src|href)=.?(?:http|//)", page)  # nothing is loaded
    fails([*arguments, "--trace", "-"], "--trace -", "file of its own")
    fails([*arguments, "--output", tmp_path / "same", "--trace", tmp_path / "same"], "file of its own")
    fails([*arguments, "--trace", tmp_path / "none" / "trace.html"], tmp_path / "none")
    fails(["generate", "--model", directory, "--prompt", "x", "--stream", "--trace", tmp_path / "t.html"], "--trace", "--stream")
    fails([*arguments, "--devices", 2, "--trace", tmp_path / "t.html"], "--trace", "--devices")


def test_a_text_cannot_end_the_script():
    trace = {"settings": {"draft": "none"}, "about": {"model": "<b>"}, "names": {"1": "</script><!--\u2028"}}
    page = page_of([trace])
    assert data_of(page) == [trace] and page.count("</script>") == 2 and "<title>Trace: &lt;b&gt;" in page
