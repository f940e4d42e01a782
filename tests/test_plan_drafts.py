"""`qspec plan` of drafts besides the target's own model: prompt lookup, a model with a checkpoint of its own, and two drafts in turn."""

import dataclasses
import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import planned
import pytest
from checkpoints import hf_config, write_checkpoint
from rich.console import Console

from qspec_jax.bench import architectures
from qspec_jax.bench.architectures import architecture
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.caches.schedule import Schedule
from qspec_jax.drafts import make_draft, registry
from qspec_jax.drafts.draft import Draft, Prompt, Proposes
from qspec_jax.drafts.registry import parse_draft, texts_in
from qspec_jax.drafts.small_model import BLOCK, SmallModelDraft
from qspec_jax.drafts.step_bytes import bytes_of, step_bytes
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.prompts import bucket
from qspec_jax.planning import timing
from qspec_jax.planning.acceptance import ACCEPTANCE, PROPOSING
from qspec_jax.planning.devices import DEVICES
from qspec_jax.planning.memory import memory_of
from qspec_jax.planning.operations import int4_bytes, layer_weight_bytes, model_bytes, step_weight_bytes
from qspec_jax.planning.plan import plan
from qspec_jax.planning.plan_report import PlannedRow
from qspec_jax.planning.report import PlanReport
from qspec_jax.planning.rounds import Asked, expected_rounds
from qspec_jax.planning.steps import LayerReads, outlined
from qspec_jax.quantization.outline import outline
from qspec_jax.reports import TABLE_WIDTH

LLAMA_8B, TINY = map(architecture, ("llama-3.1-8b", "tiny"))
INT8, H100, G = CacheConfig("int8"), DEVICES["h100"], 128
SHAPE = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4)
CONTEXT, GAMMA = 4096, 4


def write_config(directory: Path, **changes) -> Path:
    """A directory that holds the config of a small model with Llama 3's vocabulary, and nothing else."""
    directory.mkdir()
    config = hf_config(**(SHAPE | dict(vocab_size=LLAMA_8B.vocab_size, max_position_embeddings=16384) | changes))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def small(tmp_path) -> Path:
    return write_config(tmp_path / "small")


def report(*drafts: str, gammas=(GAMMA,), context: int = CONTEXT, batch: int = 1, **given) -> PlanReport:
    return plan("8b", LLAMA_8B, H100, [context], [batch], drafts=drafts, gammas=gammas, **given)


def row_for(draft: str, **given) -> PlannedRow:
    return report(draft, **given).rows[-1]


def seconds(cost: timing.Cost) -> float:
    return cost.seconds(H100)


def round_ms(row: PlannedRow, *drafting_s: float) -> float:
    """What a round takes by hand, for these passes of the draft."""
    return row.target_ms + row.flush_ms + 1e3 * (timing.FITTED.round + sum(drafting_s))


# prompt-lookup


def test_prompt_lookup_costs_a_verification():
    row = row_for("prompt-lookup")
    acceptance, proposing = ACCEPTANCE["prompt-lookup"], PROPOSING["prompt-lookup"]
    rounds = expected_rounds(Schedule(G), GAMMA, Asked(acceptance.rate, proposing.rate))
    assert row.step_ms is None and row.round_ms == pytest.approx(round_ms(row))
    assert row.ms_per_token == pytest.approx(row.round_ms / rounds.tokens) and row.tokens_per_round == rounds.tokens
    assert (row.acceptance, row.proposing, row.kernels_measured) == (0.37, pytest.approx(0.9), True)
    assert "0.371 with the embedded model" in row.acceptance_source and "docs/measurements/2026-11.md" in row.acceptance_source
    assert row.target_ms == row_for("quantspec").target_ms and row.memory.draft == 0
    settings = "whatever its settings but shortest"
    assert row.note.startswith(f"it is ASSUMED to have a proposal in 90% of the rounds that ask it, {settings}: 0.907")


def test_prompt_lookup_is_assumed_by_its_shortest_n_gram():
    """docs/plan.md has what was measured with a shortest of 2 and 3 tokens; what is longer is taken as 3."""
    found = {
        text: row_for(f"prompt-lookup:{text}") for text in ("shortest=1", "longest=5,shortest=2", "shortest=3", "shortest=6,longest=9")
    }
    chances = [(row.acceptance, row.proposing) for row in found.values()]
    assert chances == [(0.37, pytest.approx(0.9)), (0.54, pytest.approx(0.38)), *[(0.59, pytest.approx(0.16))] * 2]
    assert "n-grams of at least 3 tokens (docs/plan.md)" in found["shortest=3"].note
    assert "n-grams of at least 3 tokens (docs/plan.md)" in found["shortest=3"].acceptance_source
    given = row_for("prompt-lookup:shortest=3", acceptances={"": 0.5}, proposing={"prompt-lookup": 0.7})
    assert (given.acceptance, given.proposing) == (0.5, pytest.approx(0.7))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--draft", "prompt-lookup"], "times as fast (acceptance and proposing ASSUMED)"),
        (["--draft", "prompt-lookup", "--acceptance", 0.9], "times as fast (proposing ASSUMED)"),
        (["--draft", "prompt-lookup", "--acceptance", 0.9, "--proposing", 0.9], "times as fast"),
        (["--draft", "quantspec"], "times as fast (acceptance ASSUMED)"),
        (["--draft", "combine:prompt-lookup+quantspec", "--acceptance", "quantspec=0.9", "--proposing", 0.9], "(acceptance ASSUMED)"),
        (["--draft", "prompt-lookup", "--proposing", 0], "the int8 cache (acceptance ASSUMED)"),
        (["--draft", "quantspec", "--acceptance", 0], "over the int8 cache"),
        (["--draft", "chunk-means", "--draft", "quantspec", "--acceptance", "chunk-means=0.97"], "times (acceptance ASSUMED)"),
    ],
)
def test_what_is_best_says_what_is_assumed(run, arguments, line):
    code, out, _ = run("plan", "--arch", "llama-3.1-8b", "--context", 131072, *arguments)
    best = out.split("Best:\n")[1].split("\n\n")[0]
    assert code == 0 and best.endswith(line) and best.count("ASSUMED") == line.count("ASSUMED")


def test_prompt_lookup_proposes_all_or_none():
    """A round without a proposal takes as long, and emits a token."""
    half, none = (row_for("prompt-lookup", acceptances={"": 0.8}, proposing={"prompt-lookup": share}) for share in (0.5, 0.0))
    rounds = expected_rounds(Schedule(G), GAMMA, Asked(0.8, 0.5))
    assert half.tokens_per_round == rounds.tokens and half.round_ms == pytest.approx(round_ms(half))
    assert half.acceptance == 0.8 and half.proposing == 0.5 and not half.note
    assert none.tokens_per_round == pytest.approx(1) and none.accepted_of_drafted is None
    assert none.ms_per_token == pytest.approx(none.round_ms) and none.speedup < 1


def test_a_draft_without_a_model_is_planned_by_what_it_says_it_proposes(monkeypatch):
    """Without a word of its own in `planning`: it has to be given its acceptance, and may be given how often it has a proposal."""

    @dataclasses.dataclass(frozen=True)
    class Some(Draft):
        proposes = Proposes.ALL_OR_NONE

        def propose(self, state, cache, current):
            raise AssertionError("not run")

    class Settings:
        def make(self, model, int4):
            return Some()

    monkeypatch.setitem(registry.DRAFTS, "some", dataclasses.dataclass(Settings))
    row = row_for("some", acceptances={"some": 0.6})
    rounds = expected_rounds(Schedule(G), GAMMA, Asked(0.6))
    assert row.ms_per_token == pytest.approx(round_ms(row) / rounds.tokens) and "100% of the rounds that ask it" in row.note
    assert row_for("some").status == "no acceptance known"
    monkeypatch.setattr(Some, "proposes", Proposes.ALL)
    assert row_for("some", acceptances={"some": 0.6}).note == ""


# small-model


def test_what_a_small_model_reads(small):
    config = LlamaConfig.from_hf(small / "config.json")
    row = 4097
    found = planned.draft_reads(LLAMA_8B, f"small-model:model={small}", row)
    assert found.layers == (LayerReads(0, 0, 4097),) * 3 and found.config == config
    assert found.head_bits == 16 and found.kernels_measured
    window = f"small-model:model={small},reads=window,sinks=4,window=500"
    assert planned.draft_reads(LLAMA_8B, window, row).layers == (LayerReads(0, 0, 505),) * 3
    assert planned.draft_reads(LLAMA_8B, window, 300).layers == (LayerReads(0, 0, 300),) * 3
    assert planned.draft_reads(LLAMA_8B, f"small-model:model={small},weight_bits=4", row).layers == (LayerReads(0, 0, 4097, 4),) * 3


@pytest.mark.parametrize("settings", ["", ",reads=window,sinks=4,window=500", ",weight_bits=4"])
def test_times_of_a_small_model(small, settings):
    text = f"small-model:model={small}{settings}"
    row = row_for(text, acceptances={"small-model": 0.8})
    one, block = (planned.draft_reads(LLAMA_8B, text, CONTEXT + new) for new in (1, BLOCK))
    step_s = seconds(timing.pass_cost(H100, one, G))
    first_s = seconds(timing.pass_cost(H100, block, G, tokens=BLOCK))
    rounds = expected_rounds(Schedule(G), GAMMA, Asked(0.8))
    assert row.step_ms == pytest.approx(1e3 * step_s) and first_s > step_s
    assert row.round_ms == pytest.approx(round_ms(row, rounds.passes[0] * first_s, sum(rounds.passes[1:]) * step_s))
    assert row.tokens_per_round == rounds.tokens and (row.acceptance, row.acceptance_source, row.note) == (0.8, "given", "")
    # It prefills the prompt too, or what its window holds of it.
    read = bucket(504) if "window" in settings else CONTEXT
    own = timing.prefill_cost(H100, one.config, batch=1, tokens=read).floor
    assert row.prefill_s == pytest.approx(row_for("quantspec").prefill_s + own) and own > 0


def test_memory_of_a_small_model(small):
    config = LlamaConfig.from_hf(small / "config.json")
    held = lambda tokens: 3 * 2 * tokens * 2 * 4 * 64 * 2  # 3 layers, 2 rows, keys and values of 4 heads of 64
    found = {
        settings: memory_of(
            LLAMA_8B,
            INT8,
            planned.drafts_of(LLAMA_8B, f"small-model:model={small}{settings}"),
            batch=2,
            context=4096,
            new_tokens=640,
            gamma=6,
        )
        for settings in ("", ",reads=window,sinks=4,window=500", ",weight_bits=4")
    }
    whole, window, int4 = (memory.draft for memory in found.values())
    assert whole == model_bytes(config) + held(4096 + 640 + 7)
    assert window == model_bytes(config) + held(504 + 7 + 2)  # 4 sinks, whose keys are there twice
    assert whole - int4 == 3 * (layer_weight_bytes(config, 16) - layer_weight_bytes(config, 4)) > 0
    # What does not fit is said.
    huge = write_config(small.parent / "huge", hidden_size=16384, intermediate_size=65536, num_hidden_layers=40)
    assert row_for(f"small-model:model={huge}", acceptances={"": 0.9}).status == "does not fit"


@pytest.mark.system
@pytest.mark.parametrize("settings", ["", ",reads=window,sinks=4,window=50", ",weight_bits=4"])
def test_a_small_model_is_outlined_as_it_is_loaded(tmp_path, settings):
    """The same shapes, dtypes and bytes, and a cache of its own of the size that is planned."""
    directory = write_checkpoint(tmp_path / "small", hf_config(**SHAPE, vocab_size=256, head_dim=64, tie_word_embeddings=True))
    text, target = f"small-model:model={directory}{settings}", architectures.random_model(TINY)
    (found,) = outlined(parse_draft(text), outline(TINY), lambda: outline(TINY, int4=True))
    real = make_draft(text, target)
    shapes = lambda draft: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(draft)]
    assert shapes(found.draft) == shapes(real) and jax.tree.structure(found.draft) == jax.tree.structure(real)
    assert step_weight_bytes(found.reads(INT8.outline(TINY, 1), 1)) == step_bytes(real, INT8, 1) - step_of_cache(real, 1)
    gamma, prompt, new = 6, 96, 32
    given = Prompt(jnp.zeros((2, prompt), jnp.int32), jnp.full(2, prompt, jnp.int32), None, capacity=prompt + new, gamma=gamma)
    own = jax.eval_shape(lambda draft, prompt: draft.begin(prompt), real, given).own
    memory = memory_of(TINY, INT8, (found,), batch=2, context=prompt, new_tokens=new, gamma=gamma)
    held = (own.cache.layers, getattr(own, "sinks", ()))
    assert bytes_of(held) == memory.draft - bytes_of(real.step.model.weights())


def step_of_cache(draft: SmallModelDraft, tokens: int) -> int:
    c = draft.step.model.config
    return c.num_layers * draft.reads(0, None, tokens).full * 2 * c.num_kv_heads * c.head_dim * 2


@pytest.mark.system
def test_bytes_of_a_step_of_a_small_model(tmp_path):
    """As benchmarks and evaluations report them: its own weights, and its own keys and values."""
    directory = write_checkpoint(tmp_path / "small", hf_config(vocab_size=256, num_hidden_layers=1))
    draft = make_draft(f"small-model:model={directory}", architectures.random_model(TINY))
    found = [step_bytes(draft, INT8, tokens) for tokens in (401, 402)]
    c = draft.step.model.config
    assert found[1] - found[0] == 2 * c.num_kv_heads * c.head_dim * 2 and found[0] > 401 * (found[1] - found[0])


def test_small_models_that_are_refused(run, small, tmp_path):
    other, empty, broken = write_config(tmp_path / "other", vocab_size=96), tmp_path / "empty", tmp_path / "broken"
    for directory in empty, broken:
        directory.mkdir()
    (broken / "config.json").write_text("{")
    long = "small-model:model={},reads=window,window=20000"
    for draft, said in (
        (f"small-model:model={tmp_path / 'none'}", "none: no such directory"),
        (f"small-model:model={empty}", "empty/config.json"),
        (f"small-model:model={broken}", "broken/config.json"),
        (f"small-model:model={other}", f"other: a vocabulary of 96 tokens; a draft needs the target's, of {LLAMA_8B.vocab_size}"),
        (f"combine:prompt-lookup+small-model:model={other}", "other: a vocabulary of 96 tokens"),
        (long.format(small), "sinks 16 and window 20000 should together be at most the 16384 positions"),
    ):
        code, out, err = run("plan", "--arch", "llama-3.1-8b", "--context", CONTEXT, "--draft", draft)
        assert code == 2 and not out and err.startswith(f"qspec: error: draft {draft}: ") and err.count("\n") == 1 and said in err
    text = f"small-model:model={small}"
    with pytest.raises(InputError, match=r"a context of 16,000 tokens and 640 new ones are more than the 16,384 positions of its model"):
        row_for(text, context=16000)
    assert row_for(f"{text},reads=window", context=16000, acceptances={"": 0.9}).speedup
    # The longest context is the draft's too.
    assert row_for(text, acceptances={"": 0.9}).longest_context == 16384 - 640


def test_a_small_model_wants_its_acceptance(run, small):
    command = ["plan", "--arch", "llama-3.1-8b", "--context", CONTEXT, "--draft", f"small-model:model={small}"]
    code, out, _ = run(*command)
    assert code == 0 and "no acceptance known; give --acceptance small-model=R." in " ".join(out.split())
    code, out, _ = run(*command, "--acceptance", "small-model=0.7", "--json")
    assert code == 0 and {row["acceptance"] for row in json.loads(out)["rows"]} == {None, 0.7}


# combine


def times(row: PlannedRow) -> tuple:
    return row.round_ms, row.target_ms, row.step_ms, row.tokens_per_round, row.ms_per_token, row.acceptance, row.proposing


@pytest.mark.parametrize(
    ("text", "alone", "said"),
    [
        ("combine:quantspec+prompt-lookup", "quantspec", "what quantspec alone would: prompt-lookup after that is never asked"),
        ("combine:sparse+(prompt-lookup:shortest=2)", "sparse", "what sparse alone would: prompt-lookup:shortest=2 after that"),
        ("combine:prompt-lookup+quantspec", "prompt-lookup", "what prompt-lookup alone would: quantspec after that is never asked"),
        (
            "combine:(combine:prompt-lookup+prompt-lookup:longest=4)+h2o",
            "prompt-lookup",
            "alone would: prompt-lookup:longest=4 and h2o after",
        ),
        ("combine:(combine:quantspec+sparse)+snapkv", "quantspec", "what quantspec alone would: sparse and snapkv after that"),
    ],
)
def test_a_draft_that_has_all_tokens_leaves_nothing_to_others(text, alone, said):
    shares = {"prompt-lookup": 1.0} if alone == "prompt-lookup" else {}
    found, first = row_for(text, proposing=shares), row_for(alone, proposing=shares)
    assert said in found.note and found.note.startswith("it drafts what") and found.kernels_measured
    # What those behind it observe is observed all the same.
    observed = any(each in text and each != alone for each in ("sparse", "h2o"))
    assert observed == (found.target_ms > first.target_ms) and observed == (times(found) != times(first))
    longer = found.target_ms - first.target_ms
    assert (found.round_ms - longer, found.step_ms, found.tokens_per_round) == pytest.approx(
        (first.round_ms, first.step_ms, first.tokens_per_round)
    )
    assert found.memory.draft >= first.memory.draft


@pytest.mark.parametrize("batch", [1, 4])
def test_the_second_drafts_where_the_first_has_nothing(batch):
    text, given = "combine:prompt-lookup+quantspec", dict(acceptances={"prompt-lookup": 0.4, "quantspec": 0.9}, batch=batch)
    row = row_for(text, proposing={"prompt-lookup": 0.6}, **given)
    rounds = expected_rounds(Schedule(G), GAMMA, Asked(0.4, 0.6), Asked(0.9), batch=batch)
    quantspec = row_for("quantspec", batch=batch)
    assert row.step_ms == quantspec.step_ms and rounds.asked == pytest.approx(0.4)
    assert row.round_ms == pytest.approx(round_ms(row, rounds.steps * row.step_ms / 1e3))
    assert row.ms_per_token == pytest.approx(row.round_ms / rounds.tokens)
    assert (row.acceptance, row.proposing, row.note) == (rounds.acceptance, 1, "") and row.acceptance_source == "given"
    # Without a proposal of the first it is the second draft.
    never = row_for(text, proposing={"": 0.0}, **given)
    second = row_for("quantspec", acceptances={"": 0.9}, batch=batch)
    assert times(never) == pytest.approx(times(second))


def test_a_small_model_catches_up_with_rounds_that_did_not_ask_it(small):
    text = f"small-model:model={small}"
    given = dict(acceptances={"prompt-lookup": 0.4, "small-model": 0.8})
    row = row_for(f"combine:prompt-lookup+{text}", proposing={"": 0.75}, **given)
    rounds = expected_rounds(Schedule(G), GAMMA, Asked(0.4, 0.75), Asked(0.8))
    reads = planned.draft_reads(LLAMA_8B, text, CONTEXT + BLOCK)
    first_s = seconds(timing.pass_cost(H100, reads, G, tokens=BLOCK))
    steps_s = sum(rounds.passes[1:]) * row.step_ms / 1e3
    assert row.round_ms == pytest.approx(round_ms(row, (rounds.passes[0] + 0.75 * rounds.tokens / BLOCK) * first_s, steps_s))
    # It prefills, and takes memory, even where it is never asked.
    never = row_for(f"combine:prompt-lookup+{text}", proposing={"": 1.0}, **given)
    assert never.round_ms == pytest.approx(round_ms(never)) and never.memory.draft == row.memory.draft > 0
    assert never.prefill_s == row.prefill_s > row_for("prompt-lookup").prefill_s


def test_notes_name_the_part_that_they_are_about():
    said = lambda text, **given: row_for(text, **given).note
    unmeasured = "no kernel that reads or observes as {} has been measured"
    assert said("sparse") == "" and said("chunk-means:budget=512", acceptances={"": 0.9}).startswith(unmeasured.format("it does") + "; ")
    on_a100 = lambda text: plan("8b", LLAMA_8B, DEVICES["a100"], [CONTEXT], [1], drafts=[text], gammas=[GAMMA]).rows[-1].note
    assert on_a100("sparse").startswith(unmeasured.format("it does") + ", and on A100 there is none that observes; ")
    assert "observes;" not in on_a100("chunk-means:budget=512")
    assert unmeasured.format("sparse does") in on_a100("combine:prompt-lookup+sparse")
    assert unmeasured.format("sparse:budget=0.1 and h2o do") in on_a100("combine:(combine:prompt-lookup+sparse:budget=0.1)+h2o")
    assert said("combine:prompt-lookup+quantspec").startswith("prompt-lookup is ASSUMED to have a proposal")
    for draft in "prompt-lookup", "combine:prompt-lookup+quantspec":
        notes = report(draft, gammas=(1, 4)).notes
        assert not any(f"{draft}: {draft}" in note for note in notes)


def test_memory_of_two_drafts(small):
    """Both have the target's INT4 weights and head in common, and each its own cache and weights."""
    of = lambda text: memory_of(LLAMA_8B, INT8, planned.drafts_of(LLAMA_8B, text), batch=32, context=64, new_tokens=64, gamma=4)
    quantspec, snapkv = of("quantspec"), of("snapkv:weight_bits=4")
    assert quantspec.draft == 32 * int4_bytes(LLAMA_8B)
    assert of("combine:quantspec+snapkv:weight_bits=4").draft == snapkv.draft > quantspec.draft
    both = of(f"combine:quantspec+small-model:model={small}").draft
    assert both == quantspec.draft + of(f"small-model:model={small}").draft
    # The head in INT8 is made after prefill, and counts where that needs less: once, unless the models differ.
    one = dict(batch=1, context=64, new_tokens=64, gamma=4)
    besides = lambda text: memory_of(LLAMA_8B, INT8, planned.drafts_of(LLAMA_8B, text), **one).besides
    assert besides("combine:quantspec+sparse") == besides("quantspec")
    assert besides("combine:quantspec:sensitive_layers=1+sparse") == 2 * besides("quantspec")


def test_acceptance_of_drafts_in_a_combine(run):
    """By a draft's own text or name, else by those of the combine; what is assumed is named for each draft that is asked."""
    text = "combine:(prompt-lookup:shortest=2)+quantspec"
    rates = lambda **given: row_for(text, proposing={"": 0.5}, **given).acceptance
    expected = lambda first, second: expected_rounds(Schedule(G), GAMMA, Asked(first, 0.5), Asked(second)).acceptance
    assert rates() == expected(0.54, 0.97)
    assert rates(acceptances={"prompt-lookup": 0.5, text: 0.9}) == expected(0.5, 0.9)
    assert rates(acceptances={"prompt-lookup:shortest=2": 0.6, "prompt-lookup": 0.5, "combine": 0.8}) == expected(0.6, 0.8)
    assert rates(acceptances={"": 0.7}) == pytest.approx(0.7)
    source = row_for(text, proposing={"": 0.5}).acceptance_source
    assert source.startswith("prompt-lookup:shortest=2 0.54, 0.54 with") and "; quantspec 0.97, 0.970 with" in source
    assert texts_in(text) == ("prompt-lookup:shortest=2", "quantspec")
    notes = [note for note in report(text, gammas=(1, 4)).notes if "acceptance" in note]
    assert notes == [f"{text}: acceptance is ASSUMED, whatever its settings but shortest: {source}"]
    # What the second accepts is not asked for where it never drafts.
    assert (
        row_for("combine:quantspec+h2o").status == "planned"
        and row_for("combine:prompt-lookup+h2o", proposing={"": 1.0}).status == "planned"
    )
    (lacking,) = report("combine:prompt-lookup+h2o").rows[2:]
    assert (lacking.status, lacking.note) == ("no acceptance known", "give --acceptance h2o=R")
    command = ["plan", "--arch", "llama-3.1-8b", "--context", CONTEXT, "--draft", text]
    code, out, _ = run(*command, "--proposing", "prompt-lookup=0.5", "--acceptance", "quantspec=0.9", "--gamma", GAMMA, "--json")
    assert code == 0 and json.loads(out)["rows"][-1]["acceptance"] == expected(0.54, 0.9)


def test_names_of_drafts_are_not_cut():
    """Two that differ in their ends alone are told apart."""
    both = "combine:prompt-lookup+quantspec", "combine:prompt-lookup+quantspec:cache=int8"
    for width in TABLE_WIDTH, 250:
        console = Console(width=width, file=io.StringIO())
        console.print(report(*both).table())
        rows = console.file.getvalue().split("prefill s")[1].split("Best:")[0]
        lines = [line.split() for line in rows.splitlines()[3:] if line.strip()]
        # A name that is folded goes on in lines of its own.
        names = "".join(f" {words[2]}" if len(words) > 1 else words[0] for words in lines)
        assert names.split() == list(both)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--draft", "quantspec", "--proposing", "quantspec=0.5"], "--proposing quantspec=0.5: quantspec has a proposal in every round"),
        (["--draft", "quantspec", "--proposing", "0.5"], "--proposing 0.5: every draft has a proposal in every round"),
        (["--draft", "prompt-lookup", "--proposing", "2"], "--proposing 2: '2' should be a number from 0 to 1"),
        (["--draft", "prompt-lookup", "--proposing", "sparse=1"], "--proposing sparse=1: no draft 'sparse' is planned"),
        (["--draft", "combine:quantspec+sparse", "--acceptance", "h2o=1"], "no draft 'h2o' is planned; there are combine:quantspec+sparse"),
        (["--draft", "combine:quantspec"], "combine takes two drafts with a + between them"),
        (["--draft", "combine:quantspec+exact-topk"], "combine:quantspec+exact-topk: an oracle"),
    ],
)
def test_shares_and_combines_that_are_refused(run, arguments, said):
    code, out, err = run("plan", "--arch", "tiny", "--context", 64, *arguments)
    assert code == 2 and not out and err.startswith("qspec: error: ") and err.count("\n") == 1 and said in err
