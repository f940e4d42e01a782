"""`qspec plan` and `--draft auto` of cascades and of EAGLE-3 heads: rounds of two levels, times by hand, and the choice of both gammas."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import numpy as np
import planned
import pytest
from checkpoints import hf_config

from qspec_jax.bench.architectures import architecture, random_model
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.caches.schedule import Schedule
from qspec_jax.decoding.config import GAMMA as USUAL_GAMMA
from qspec_jax.decoding.config import GenerationConfig, beside_draft
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.reading import prefill
from qspec_jax.decoding.resolve import resolve_draft
from qspec_jax.drafts.cascade import FIRST_GAMMA
from qspec_jax.drafts.prompt_lookup import PromptLookupSettings
from qspec_jax.drafts.registry import first_gamma_of, levels_in, may_become, parse_draft, with_first_gamma
from qspec_jax.drafts.small_model import BLOCK
from qspec_jax.errors import InputError
from qspec_jax.models.prompts import bucket
from qspec_jax.planning import timing
from qspec_jax.planning.acceptance import ACCEPTANCE, PROPOSING
from qspec_jax.planning.choice import DraftChoice, Setting, choose, choose_gammas
from qspec_jax.planning.devices import DEVICES
from qspec_jax.planning.heads import fusing_cost, head_cost
from qspec_jax.planning.memory import memory_of
from qspec_jax.planning.plan import plan
from qspec_jax.planning.plan_report import PlannedRow
from qspec_jax.planning.planner import FIRST_GAMMAS
from qspec_jax.planning.repetition import Repetition
from qspec_jax.planning.report import PlanReport, best_gammas
from qspec_jax.planning.rounds import Asked, expected_rounds, inner_rounds

LLAMA_7B, LLAMA_8B, TINY = map(architecture, ("llama-2-7b", "llama-3.1-8b", "tiny"))
INT8, H100, H200, G = CacheConfig("int8"), DEVICES["h100"], DEVICES["h200"], 128
CONTEXT, GAMMA = 4096, 6
LOOKED_UP = "cascade:first=prompt-lookup,middle=sparse"
HEAD = dict(
    architectures=["LlamaForCausalLMEagle3"],
    model_type="llama",
    vocab_size=LLAMA_8B.vocab_size,
    draft_vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=1,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_position_embeddings=2048,
)


def report(*drafts: str, gammas=(GAMMA,), context: int = CONTEXT, batch: int = 1, model=LLAMA_8B, device=H100, **given) -> PlanReport:
    return plan("a model", model, device, [context], [batch], drafts=drafts, gammas=gammas, **given)


def row_for(draft: str, **given) -> PlannedRow:
    return report(draft, **given).rows[-1]


def drafting_ms(row: PlannedRow) -> float:
    """What a round takes besides the target's passes and what every round takes."""
    return row.round_ms - row.target_ms - row.flush_ms - 1e3 * timing.FITTED.round


def middle_ms(row: PlannedRow) -> float:
    """What the passes of the middle take, each of which verifies as a round does."""
    return row.middle_passes * (row.step_ms + 1e3 * timing.FITTED.round)


def seconds(cost: timing.Cost) -> float:
    return cost.seconds(H100)


@pytest.fixture
def head(tmp_path) -> Path:
    """The config.json of a head for Llama-3.1-8B, and nothing else."""
    directory = tmp_path / "head"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(HEAD))
    return directory


@pytest.fixture
def small(tmp_path) -> Path:
    """That of JF68M's shape, a small model for Llama-2-7B."""
    directory = tmp_path / "small"
    directory.mkdir()
    sizes = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=12, num_key_value_heads=12)
    config = hf_config(**sizes, vocab_size=LLAMA_7B.vocab_size, max_position_embeddings=2048)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


# Rounds of two levels


@pytest.mark.parametrize(("first_gamma", "first"), [(2, Asked(0.6)), (3, Asked(0.8, 0.5)), (1, Asked(0.0)), (4, Asked(1.0))])
def test_rounds_within_rounds(first_gamma, first):
    """Those that are drawn one by one, in a row alone and in the slower of two rows."""
    rounds, random, count = expected_rounds(Schedule(16), GAMMA, Asked(0.9)), np.random.default_rng(0), 4000

    def drawn() -> np.ndarray:
        """The drafts that each pass of the middle may verify in one row's round, and those that it has."""
        most, done, wanted, had = random.choice(GAMMA + 1, p=rounds.allowed), 0, [], []
        while done < most:
            wanted.append(min(first_gamma, most - done - 1))
            had.append(wanted[-1] if random.random() < first.proposing else 0)
            tried = random.random(had[-1]) < first.acceptance
            done += int(np.argmin(np.append(tried, False))) + 1
        none = [-1] * (GAMMA - len(wanted))
        return np.array([wanted + none, had + none])

    assert sum(rounds.allowed) == pytest.approx(1) and sum(rounds.emitted) == pytest.approx(1)
    assert rounds.tokens == pytest.approx(sum(chance * tokens for tokens, chance in enumerate(rounds.emitted, 1)))
    for batch in 1, 2:
        wanted, had = np.moveaxis(np.array([np.max([drawn() for _ in range(batch)], 0) for _ in range(count)]), 1, 0)
        found = inner_rounds(rounds.allowed, first_gamma, first, batch=batch)
        assert found.passes == pytest.approx((wanted >= 0).sum(1).mean(), rel=0.03)
        assert found.with_drafts == pytest.approx((had > 0).sum(1).mean(), rel=0.05)
        assert found.proposals == pytest.approx([(wanted >= k).sum(1).mean() for k in range(1, first_gamma + 1)], rel=0.08, abs=0.02)


def test_passes_of_rounds_of_one_length():
    """7 drafts take 3 passes of the middle where 2 drafts at a time are accepted, and 7 where none is (docs/drafts.md)."""
    allowed = (*[0.0] * 7, 1.0)
    assert [inner_rounds(allowed, 2, Asked(rate)).passes for rate in (1.0, 0.0)] == [3, 7]
    assert inner_rounds(allowed, 2, Asked(1.0)).proposals == (2, 2)  # the last pass is for one token, the middle's own
    assert inner_rounds((1.0, 0.0), 2, Asked(1.0)).passes == 0


# Times


def test_prompt_lookup_before_a_middle():
    row = row_for(LOOKED_UP + ",first_gamma=2", acceptances={"sparse": 0.9}, inner_acceptances={"prompt-lookup": 0.5})
    alone = row_for("sparse", acceptances={"": 0.9})
    share = PROPOSING["prompt-lookup"].rate
    rounds = expected_rounds(Schedule(G), GAMMA, Asked(0.9))
    found = inner_rounds(rounds.allowed, 2, Asked(0.5, share))
    block = seconds(timing.pass_cost(H100, planned.draft_reads(LLAMA_8B, "sparse", CONTEXT + 3), G, tokens=3))
    assert row.step_ms == pytest.approx(1e3 * block) and alone.step_ms < row.step_ms < 1.5 * alone.step_ms
    assert row.middle_passes == found.passes < rounds.steps
    # Without drafts a pass is a step.
    shorter_ms = (found.passes - found.with_drafts) * (row.step_ms - alone.step_ms)
    assert 0 < found.with_drafts < found.passes and drafting_ms(row) == pytest.approx(middle_ms(row) - shorter_ms)
    # For the target nothing differs: what it is given are tokens of the middle, which observes.
    same = ("target_ms", "flush_ms", "tokens_per_round", "accepted_of_drafted", "acceptance", "prefill_s", "step_tuned")
    assert all(getattr(row, name) == getattr(alone, name) for name in same) and row.proposing == 1
    assert row.memory.draft == alone.memory.draft and row.kernels_measured
    assert (row.first_gamma, row.inner_acceptance, row.inner_acceptance_source, row.first_step_ms) == (2, 0.5, "given", None)
    assert row.assumed == ("proposing",) and "prompt-lookup is ASSUMED to have a proposal in 90% of the rounds" in row.note


def test_a_draft_of_the_targets_own_model_before_a_middle():
    text = "cascade:first=quantspec,middle=sparse,first_gamma=3"
    row = row_for(text, inner_acceptances={"": 0.8})
    found = inner_rounds(expected_rounds(Schedule(G), GAMMA, Asked(0.93)).allowed, 3, Asked(0.8))
    assert row.first_step_ms == row_for("quantspec").step_ms and row.acceptance == 0.93
    assert drafting_ms(row) == pytest.approx(middle_ms(row) + sum(found.proposals) * row.first_step_ms)


def test_a_small_model_before_a_middle(small):
    """It begins a round with what the round before emitted, 4 tokens a pass, and goes on with what the middle added."""
    text = f"triforce:model={small},gamma1=2,middle=(retrieval:budget=1024)"
    given = dict(model=LLAMA_7B, acceptances={"retrieval": 0.9}, inner_acceptances={"small-model": 0.5})
    row = row_for(text, **given)
    own = f"small-model:model={small},reads=window,sinks=16,window=240"
    step, block = (seconds(timing.pass_cost(H100, planned.draft_reads(LLAMA_7B, own, CONTEXT + n), G, tokens=n)) for n in (1, BLOCK))
    rounds = expected_rounds(Schedule(G), GAMMA, Asked(0.9))
    found = inner_rounds(rounds.allowed, 2, Asked(0.5))
    further = sum(chance for tokens, chance in enumerate(rounds.emitted, 1) if tokens > BLOCK)  # a second pass
    assert row.first_step_ms == pytest.approx(1e3 * step)
    first_ms = 1e3 * ((found.proposals[0] + further) * block + found.proposals[1] * step)
    assert drafting_ms(row) == pytest.approx(middle_ms(row) + first_ms)
    assert row.prefill_s > row_for("retrieval:budget=1024", model=LLAMA_7B, acceptances={"": 0.9}).prefill_s
    of = lambda draft, gamma: memory_of(
        LLAMA_7B, INT8, planned.drafts_of(LLAMA_7B, draft), batch=1, context=bucket(CONTEXT), new_tokens=bucket(640), gamma=gamma
    )
    # Blocks may extend beyond a round.
    assert row.memory.draft == of(own, GAMMA + 2).draft + of("retrieval:budget=1024", GAMMA + 2).draft


@pytest.mark.parametrize(
    ("context", "batch", "budget", "retrieval", "sparse"),
    [(122880, 1, 4096, 5.68, 3.72), (57344, 2, 1024, 6.18, 4.43)],
)
def test_cascades_take_what_was_measured(small, context, batch, budget, retrieval, sparse):
    """ms/token of TriForce on an H200, simulated acceptance (docs/measurements/2026-11.md). Of more rows up to 21 % more is planned."""
    given = dict(acceptances={"": 0.9234}, inner_acceptances={"": 0.4649}, context=context, batch=batch, model=LLAMA_7B, device=H200)
    for middle, measured in ((f"retrieval:budget={budget}", retrieval), ("sparse:budget=0.03", sparse)):
        row = row_for(f"triforce:model={small},gamma1=2,middle=({middle})", **given, max_new_tokens=256)
        assert row.ms_per_token == pytest.approx(measured, rel=0.1)


def test_times_of_a_head(head):
    """A round reads the pairs of all tokens that it may have, whose features are fused, and steps once for each further draft."""
    text = f"eagle3:model={head}"
    row, (outlined,) = row_for(text, acceptances={"eagle3": 0.6}), planned.drafts_of(LLAMA_8B, text)
    rounds = expected_rounds(Schedule(G), GAMMA, Asked(0.6))
    draft, where = outlined.head, dict(context=CONTEXT, batch=1)
    step, first = (seconds(head_cost(H100, draft, **where, tokens=tokens)) for tokens in (1, GAMMA + 1))
    fused = seconds(fusing_cost(H100, draft, batch=1, tokens=GAMMA + 1))
    assert row.step_ms == pytest.approx(1e3 * step)
    assert drafting_ms(row) == pytest.approx(1e3 * (first + fused + sum(rounds.passes[1:]) * step))
    assert (
        row.tokens_per_round == rounds.tokens
        and not row.kernels_measured
        and "no pass of a head has been timed by itself on a GPU" in row.note
    )
    # Of each pair the layer's input is twice as wide. The window is 4 + 1,020 pairs, and the pair of the pass.
    matrices = (4096 + 2 * 1024) * 8192 + 4096 * 4096 + 3 * 4096 * 14336 + 32000 * 4096
    by_bytes = 2 * (matrices + 4 * 4096) + 4 * 32000 + 2 * (4096 + 32000) + 1025 * 2 * 8 * 128 * 2
    assert head_cost(H100, draft, **where, tokens=1).floor == pytest.approx(by_bytes / H100.read_bytes_per_s, rel=1e-9)
    short = head_cost(H100, draft, context=100, batch=1, tokens=1).floor
    assert head_cost(H100, draft, **where, tokens=1).floor - short == pytest.approx(924 * 4096 / H100.read_bytes_per_s)
    assert fusing_cost(H100, draft, batch=1, tokens=1).floor * H100.read_bytes_per_s == pytest.approx(2 * (4096 * 3 * 4096 + 4 * 4096))


def test_memory_of_a_head(head):
    """Its own weights, without the embedding, which is the target's; the window's keys and values, and the keys of 4 sinks once more; the
    features of its window, of 256 tokens before that, and of the sinks."""
    memory = lambda text: memory_of(LLAMA_8B, INT8, planned.drafts_of(LLAMA_8B, text), batch=2, context=4096, new_tokens=64, gamma=GAMMA)
    matrices = (4096 + 2 * 1024) * 8192 + 4096 * 4096 + 3 * 4096 * 14336 + 32000 * 4096 + 4096 * 3 * 4096
    held = 2 * ((4 + 1020 + 2 + GAMMA + 1) * 2 * 8 * 128 * 2 + (4 + 1020 + 256) * 4096 * 2)
    assert memory(f"eagle3:model={head}").draft == 2 * (matrices + 4 * 4096) + 4 * 32000 + held
    both = memory(f"cascade:first=(eagle3:model={head}),middle=quantspec,first_gamma=3").draft
    assert both - memory(f"eagle3:model={head}").draft == memory("quantspec").draft
    assert memory(f"eagle3:model={head},weight_bits=4,head_bits=8").draft < 0.4 * memory(f"eagle3:model={head}").draft


def test_what_a_head_shares_with_the_target_counts_once(head):
    """What makes its logits, of the whole vocabulary: the target's as it is, and in INT8 where the target's is in INT8 too."""
    (head / "config.json").write_text(json.dumps(HEAD | {"draft_vocab_size": LLAMA_8B.vocab_size}))

    def of_head(bits: int, **target) -> float:
        config, text = dataclasses.replace(LLAMA_8B, **target), f"eagle3:model={head},head_bits={bits}"
        return memory_of(config, INT8, planned.drafts_of(config, text), batch=1, context=4096, new_tokens=64, gamma=GAMMA).draft

    assert of_head(8, int8_head=True) == of_head(16) == of_head(8) - LLAMA_8B.vocab_size * (4096 + 4)


def test_a_head_in_fewer_bits_is_faster(head):
    row = lambda settings: row_for(f"eagle3:model={head}{settings}", acceptances={"": 0.6})
    int4, int8 = row(",weight_bits=4"), row(",weight_bits=4,head_bits=8")
    assert int8.step_ms < int4.step_ms < row("").step_ms


def test_a_head_before_a_middle(head):
    """It reads what came before each pass of the middle and after the last: first what a round may emit, then what a pass may."""
    text = f"cascade:first=(eagle3:model={head}),middle=sparse,first_gamma=2"
    row, (cascade,) = row_for(text, inner_acceptances={"eagle3": 0.7}), planned.drafts_of(LLAMA_8B, text)
    draft, where = cascade.levels[0].head, dict(context=CONTEXT, batch=1)
    step, later, first = (seconds(head_cost(H100, draft, **where, tokens=tokens)) for tokens in (1, 3, GAMMA + 1))
    fused, last = (seconds(fusing_cost(H100, draft, batch=1, tokens=tokens)) for tokens in (3, GAMMA + 1))
    found = inner_rounds(expected_rounds(Schedule(G), GAMMA, Asked(0.93)).allowed, 2, Asked(0.7))
    of_head = first + found.passes * later + found.proposals[1] * step + found.passes * fused + last
    assert drafting_ms(row) == pytest.approx(middle_ms(row) + 1e3 * of_head)
    assert not row.kernels_measured and row.first_step_ms == pytest.approx(1e3 * step)


def test_a_cascade_that_is_asked_in_turn():
    """In the rounds in which prompt-lookup has nothing."""
    text = "combine:prompt-lookup+(cascade:first=quantspec,middle=sparse,first_gamma=2)"
    row = row_for(text, proposing={"": 0.25}, inner_acceptances={"": 0.8})
    rounds = expected_rounds(Schedule(G), GAMMA, Asked(0.37, 0.25), Asked(0.93))
    allowed = [0.75 * chance for chance in rounds.allowed[1:]]
    assert row.middle_passes == pytest.approx(inner_rounds((1 - sum(allowed), *allowed), 2, Asked(0.8)).passes)
    assert row.acceptance == rounds.acceptance


# Both gammas


def test_gammas_that_are_left_open_are_the_fastest():
    gammas = (1, 2, 6, 12)
    rows = [row for row in report(LOOKED_UP, gammas=gammas, context=131072).rows if row.draft == LOOKED_UP]
    assert [(row.gamma, row.first_gamma) for row in rows] == [
        (gamma, first) for gamma in gammas for first in FIRST_GAMMAS if first < gamma or first == gamma == 1
    ]
    best = min(rows, key=lambda row: row.ms_per_token)
    (shown,) = [row for row in best_gammas(report(LOOKED_UP, gammas=gammas, context=131072)) if row.draft == LOOKED_UP]
    assert shown == best and 1 < best.first_gamma < 8
    named = with_first_gamma(LOOKED_UP, best.first_gamma)
    fixed = [row for row in report(named, gammas=gammas, context=131072).rows if row.draft == named]
    assert [row.gamma for row in fixed] == list(gammas) and min(row.ms_per_token for row in fixed) == best.ms_per_token
    assert [row.first_gamma for row in fixed] == [min(best.first_gamma, max(1, gamma - 1)) for gamma in gammas]
    # What the middle never accepts is not worth many drafts at a time, and what it always accepts is.
    of = lambda rate: min(
        (row for row in report(LOOKED_UP, inner_acceptances={"": rate}, proposing={"": 1.0}, gammas=[12]).rows if row.first_gamma),
        key=lambda row: row.ms_per_token,
    )
    assert of(0.0).first_gamma == 1 and of(1.0).first_gamma > 3


def test_texts_of_cascades():
    assert levels_in("cascade") == ("prompt-lookup", "sparse") and levels_in("sparse") == ()
    assert levels_in("cascade:middle=(sparse:budget=0.1,newest=0.3),first=(prompt-lookup:shortest=2)") == (
        "prompt-lookup:shortest=2",
        "sparse:budget=0.1,newest=0.3",
    )
    small = "small-model:model=DIR,reads=window,sinks=16,window=240"
    assert levels_in("triforce:model=DIR,gamma1=3") == (small, "retrieval")
    for text in ("cascade", "cascade:first=(prompt-lookup:shortest=2)", "triforce:model=DIR", "triforce:model=DIR,sinks=3,window=5"):
        settings = parse_draft(text)
        assert tuple(map(parse_draft, levels_in(text))) == (settings.first, settings.middle)
    assert [first_gamma_of(text) for text in ("cascade", "cascade:first_gamma=auto", "triforce:model=x,gamma1=3")] == [None, None, 3]
    assert with_first_gamma("cascade", 3) == "cascade:first_gamma=3"
    assert with_first_gamma("triforce:model=x", 3) == "triforce:model=x,gamma1=3"
    assert may_become("cascade", "cascade:first_gamma=3") and not may_become("cascade:first_gamma=3", "cascade:first_gamma=3")
    assert not may_become("cascade", "sparse") and not may_become("triforce:model=x", "cascade:first_gamma=3")


# Acceptance of both levels


def test_acceptance_of_both_levels():
    """The target judges what the middle drew; the middle, what the first draft proposed."""
    row = row_for(LOOKED_UP)
    assert (row.acceptance, row.inner_acceptance) == (ACCEPTANCE["sparse"].rate, ACCEPTANCE["prompt-lookup"].rate)
    assert row.assumed == ("acceptance", "inner acceptance", "proposing")
    assert row.inner_acceptance_source.startswith("that of prompt-lookup by the target, as by a middle it depends on the text: 0.371")
    notes = report(LOOKED_UP).notes
    assert any(note.startswith(f"{LOOKED_UP}: inner acceptance 0.37 is ASSUMED: that of prompt-lookup") for note in notes)
    shortest = row_for("cascade:first=(prompt-lookup:shortest=2)")
    assert shortest.inner_acceptance == 0.54 and "whatever its settings but shortest" in report("cascade").notes[-1] + shortest.note
    given = dict(acceptances={"cascade": 0.8, "sparse": 0.7}, inner_acceptances={"": 0.1, LOOKED_UP: 0.2})
    assert (row_for(LOOKED_UP, **given).acceptance, row_for(LOOKED_UP, **given).inner_acceptance) == (0.7, 0.2)
    assert row_for(LOOKED_UP, acceptances={"cascade": 0.8}).acceptance == 0.8


def test_acceptance_of_heads(head):
    """As of two trained ones, by the target or by a middle."""
    rate, text = ACCEPTANCE["eagle3"].rate, f"cascade:first=(eagle3:model={head}),middle=sparse"
    assert row_for(f"eagle3:model={head}").acceptance == rate and row_for(f"eagle3:model={head}").assumed == ("acceptance",)
    row = row_for(text)
    assert (row.acceptance, row.inner_acceptance) == (ACCEPTANCE["sparse"].rate, rate) and row.assumed == ("acceptance", "inner acceptance")
    # So the numbers of drafts of such a cascade are chosen, and not the default.
    found = choose_gammas(setting(), text, context=32768, batch=1)
    assert "the default" not in found.reason and f"inner acceptance ASSUMED {rate}" in found.reason and found.gamma > USUAL_GAMMA


def test_acceptance_that_has_to_be_given(small):
    note = lambda draft, **given: (lambda row: (row.status, row.note))(row_for(draft, **given))
    unknown = "no acceptance known"
    assert note("cascade:middle=retrieval") == (unknown, "give --acceptance retrieval=R")
    assert note("cascade:first=quantspec") == (unknown, "give --inner-acceptance quantspec=R")
    triforce = f"triforce:model={small}"
    assert note(triforce, model=LLAMA_7B, acceptances={"": 0.9}) == (unknown, "give --inner-acceptance small-model=R")
    # Where no draft is named, none is planned by an acceptance that was not measured.
    every = plan("a model", LLAMA_8B, H100, [CONTEXT], [1], gammas=[GAMMA])
    (cascade,) = (row for row in every.rows if row.draft == "cascade")
    assert (cascade.status, cascade.note) == (unknown, "give --inner-acceptance prompt-lookup=R")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--draft", "cascade:first=(combine:prompt-lookup+prompt-lookup)"],
            "no cost is known of a cascade whose first draft is a combine",
        ),
        (["--draft", "cascade:middle=exact-topk"], "an oracle"),
        (["--draft", "cascade:middle=(quantspec:skip=(0))"], "no cost is known of steps that skip layers"),
        (["--draft", "cascade:first_gamma=x"], "first_gamma should be auto, or a whole number from 1 to 15, not 'x'"),
        (["--draft", "quantspec", "--inner-acceptance", 0.5], "--inner-acceptance 0.5: no cascade is planned; there are quantspec"),
        (["--draft", "cascade", "--inner-acceptance", "sparse=0.5"], "--inner-acceptance sparse=0.5: no draft 'sparse' is planned"),
        (["--draft", "cascade", "--inner-acceptance", 2], "--inner-acceptance 2: '2' should be a number from 0 to 1"),
        (
            ["--draft", "cascade", "--acceptance", "prompt-lookup=0.5"],
            "--acceptance prompt-lookup=0.5: no draft 'prompt-lookup' is planned",
        ),
        (["--draft", "cascade:first=quantspec", "--proposing", 0.5], "--proposing 0.5: every draft has a proposal in every round"),
    ],
)
def test_cascades_that_are_refused(run, arguments, said):
    code, out, err = run("plan", "--arch", "tiny", "--context", 64, *arguments)
    assert code == 2 and not out and err.startswith("qspec: error: ") and err.count("\n") == 1 and said in err


def test_the_command_shows_both_levels(run):
    command = ["plan", "--arch", "llama-3.1-8b", "--device", "h200", "--context", 131072, "--draft", LOOKED_UP, "--gamma", 8]
    given = ["--acceptance", "sparse=0.9", "--inner-acceptance", "prompt-lookup=0.8", "--proposing", 0.9]
    code, out, _ = run(*command, *given)
    assert code == 0 and "inner 0.80" in out and "ASSUMED" not in out
    code, found, _ = run(*command, *given, "--json")
    rows = [row for row in json.loads(found)["rows"] if row["draft"] == LOOKED_UP]
    best = min(rows, key=lambda row: row["ms_per_token"])
    assert f"8, {best['first_gamma']}" in out and f"with 8 drafts a round, {best['first_gamma']} of its first draft at a time" in out
    assert {(row["acceptance"], row["inner_acceptance"]) for row in rows} == {(0.9, 0.8)}
    code, out, _ = run(*command)
    assert code == 0 and "(acceptance and inner acceptance and proposing ASSUMED)" in " ".join(out.split())


# The choice where text is generated


def setting(model=LLAMA_8B, kind=H200.kind, cache=INT8) -> Setting:
    return Setting(model, "bfloat16", cache, kind)


@pytest.mark.parametrize(("text", "gamma"), [("cascade", None), (LOOKED_UP, 5), ("cascade:first_gamma=2", None)])
def test_gammas_are_those_that_the_plan_finds_fastest(text, gamma):
    found = choose_gammas(setting(), text, context=131072, batch=1, gamma=gamma)
    gammas = range(1, 13) if gamma is None else [gamma]
    rows = [row for row in report(text, gammas=gammas, context=131072, device=H200).rows if row.draft == text]
    best = min(rows, key=lambda row: row.ms_per_token)
    expected = text if "first_gamma" in text else with_first_gamma(text, best.first_gamma)
    assert (found.draft, found.gamma) == (expected, best.gamma) and "\n" not in found.reason
    assert found.reason.startswith(f"draft {text}: {best.gamma} drafts a round, {best.first_gamma} of its first draft at a time, by stored")
    assert found.reason.endswith(f"{best.ms_per_token:.3g} (acceptance ASSUMED 0.93, inner acceptance ASSUMED 0.37)")


def test_gammas_are_the_default_where_nothing_is_known(small):
    for where, text, said in (
        (setting(kind="cpu"), "cascade", "no costs are stored for 'cpu'"),
        (setting(architecture("smollm2-135m")), "cascade", "a linear layer of 576 inputs"),
        (
            setting(LLAMA_7B),
            f"triforce:model={small}",
            "no acceptance is stored of a part of it (--acceptance retrieval=R of `qspec plan`)",
        ),
        (setting(), "cascade:first=quantspec", "(--inner-acceptance quantspec=R of `qspec plan`)"),
        (setting(), "cascade:first=(combine:prompt-lookup+prompt-lookup)", "whose first draft is a combine"),
    ):
        found = choose_gammas(where, text, context=4096, batch=1)
        assert (found.draft, found.gamma) == (with_first_gamma(text, FIRST_GAMMA), USUAL_GAMMA)
        assert "the default, as " in found.reason and said in found.reason
    given = choose_gammas(setting(kind="cpu"), "cascade:first_gamma=3", context=4096, batch=1, gamma=7)
    assert (given.draft, given.gamma) == ("cascade:first_gamma=3", 7)
    assert "lengths of the rows are not known" in choose_gammas(setting(), "cascade", context=None, batch=1).reason


def test_auto_takes_a_cascade_where_the_prompts_repeat_themselves():
    without = choose(setting(), context=131072, batch=1)
    assert without.draft == "sparse" and "cascade" not in without.reason

    def chosen(acceptance: float, **settings) -> DraftChoice:
        found = Repetition(asked=1000, proposed=900, judged=1000, accepted=round(1000 * acceptance))
        return choose(setting(**settings), context=131072, batch=1, repeats=lambda settings: found)

    found = chosen(0.7)
    first_gamma = first_gamma_of(found.draft)
    assert found.draft == with_first_gamma(LOOKED_UP, first_gamma) and first_gamma
    assert f"auto: {found.draft} with {found.gamma} drafts a round" in found.reason
    assert "(7 drafts, acceptance ASSUMED 0.93, inner acceptance 0.69 in 90% of passes, as at the prompts' ends)" in found.reason
    # Passes of the middle with drafts that it never accepts take longer than its steps.
    assert chosen(0.0).draft == "sparse" and LOOKED_UP in chosen(0.0).reason
    assert LOOKED_UP + " needs the int8 cache" in chosen(0.7, cache=CacheConfig("full")).reason
    assert choose(setting(), context=131072, batch=1, repeats=lambda settings: None) == without


def test_a_cascade_should_save_something_beside_other_drafts():
    """As much as a draft beside none."""
    taken = set()
    for accepted in range(0, 1000, 20):
        repeats = functools.partial(lambda found, settings: found, Repetition(1000, 1000, 1000, accepted))
        found = choose(setting(), context=131072, batch=1, gamma=7, repeats=repeats)
        sparse, cascade = (float(re.search(rf"{name} ([\d.]+) ", found.reason)[1]) for name in ("sparse", LOOKED_UP))
        assert (found.draft == "sparse") == (cascade * 1.02 > sparse) or abs(cascade * 1.02 / sparse - 1) < 0.01  # three figures are shown
        taken.add(found.draft == "sparse")
    assert len(taken) == 2


def test_open_gammas_of_a_cascade_go_by_the_prompts():
    of = lambda accepted, draft="cascade": choose_gammas(
        setting(), draft, context=131072, batch=1, gamma=12, repeats=lambda settings: Repetition(1000, 1000, 1000, 10 * accepted)
    )
    assert first_gamma_of(of(5).draft) == 1 < first_gamma_of(of(95).draft)
    assert "inner acceptance 0.94 in 100% of passes, as at the prompts' ends" in of(95).reason
    asked = []
    text = "cascade:first=(prompt-lookup:shortest=2),middle=sparse"
    choose_gammas(setting(), text, context=4096, batch=1, repeats=asked.append)
    choose_gammas(setting(), "cascade:first=quantspec", context=4096, batch=1, repeats=asked.append)
    assert asked == [PromptLookupSettings(shortest=2)]


def test_what_a_cascade_leaves_open():
    config = GenerationConfig(draft="cascade")
    assert (
        config.num_speculative_tokens is None and config.leaves_gammas_open and beside_draft(config).num_speculative_tokens == USUAL_GAMMA
    )
    assert GenerationConfig(draft="cascade", num_speculative_tokens=5).leaves_gammas_open
    assert not GenerationConfig(draft="cascade:first_gamma=2", num_speculative_tokens=5).leaves_gammas_open
    assert not GenerationConfig(draft="cascade", num_speculative_tokens=0).leaves_gammas_open
    assert not GenerationConfig(draft="sparse").leaves_gammas_open and not GenerationConfig().leaves_gammas_open
    with pytest.raises(InputError, match="first_gamma 0 should be auto, or a whole number from 1 to 15"):
        GenerationConfig(draft="cascade:first_gamma=0")


def test_open_gammas_are_settled_with_one_line(monkeypatch, caplog):
    monkeypatch.setattr(Setting, "costed", lambda self: H200)
    model = random_model(TINY)
    configs = [GenerationConfig(draft="cascade", max_new_tokens=100, num_speculative_tokens=gamma) for gamma in (None, 2)]
    with caplog.at_level("INFO", "qspec_jax.decoding.resolve"):
        found = resolve_draft(model, configs, [1000, 200], batch=2)
        assert resolve_draft(model, found, [1000, 200], batch=2) == found
    expected = choose_gammas(setting(TINY, "cpu"), "cascade", context=1100, batch=2)
    assert caplog.messages == [expected.reason]
    assert {each.draft for each in found} == {expected.draft} and not any(each.leaves_gammas_open for each in found)
    assert [each.num_speculative_tokens for each in found] == [expected.gamma, 2]


def test_generate_says_what_it_chose(run, directory, caplog):
    code, out, _ = run("generate", "--model", directory, "--prompt", "abab", "--max-new-tokens", 4, "--json", "--draft", "cascade")
    assert code == 0 and json.loads(out)["stats"]["num_spec_steps"] > 0
    (line,) = [record.getMessage() for record in caplog.records if record.name == "qspec_jax.decoding.resolve"]
    assert line.startswith("draft cascade: 4 drafts a round, 2 of its first draft at a time, the default, as no costs are stored for")


def test_a_state_continues_with_the_gammas_that_were_chosen(model):
    """Its draft has a number for what was left open; a draft that leaves it open again is the same one."""
    config = GenerationConfig(draft="cascade", max_new_tokens=3, ignore_eos=True)
    state = prefill(model, [1, 2, 3] * 5, config=config)
    assert state.reader.settings["draft"] == "cascade:first_gamma=2"
    out = [generate(model, state, config=each).token_ids for each in (config, dataclasses.replace(config, draft="auto"))]
    assert out[0] == out[1]
    with pytest.raises(InputError, match="draft 'cascade:first_gamma=3' should be 'cascade:first_gamma=2', for which the state was made"):
        generate(model, state, config=dataclasses.replace(config, draft="cascade:first_gamma=3"))


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("cascade", "cascade:first_gamma=3"),
        ("cascade:first_gamma=auto,middle=quantspec", "cascade:middle=quantspec,first_gamma=3"),
        ("cascade:first=(eagle3:model=a=b,window=20)", "cascade:first=(eagle3:model=a=b,window=20),first_gamma=3"),
        ("triforce:model=x,gamma1=auto", "triforce:model=x,gamma1=3"),
    ],
)
def test_what_a_text_leaves_open_is_filled_in_once(text, chosen):
    assert with_first_gamma(text, 3) == chosen and may_become(text, chosen)
