"""`--draft auto` and the cost of a draft for `--adaptive`: by stored costs, the target never changed, and what a run is known by."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import planned
import pytest
import runs
from tiers import in_system

from qspec_jax.bench.architectures import ARCHITECTURES, architecture, random_int4, random_model
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.cli import batch as batch_command
from qspec_jax.decoding.batch import Request, run_batch
from qspec_jax.decoding.config import GAMMA, GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.limits import DRAFT_COST, make_limits
from qspec_jax.decoding.out_of_memory import explained_memory
from qspec_jax.decoding.prepare import prepare
from qspec_jax.decoding.resolve import fill_draft_costs, resolve_draft
from qspec_jax.decoding.results import BatchStats
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.prompt_lookup import PromptLookupSettings
from qspec_jax.drafts.registry import USUAL
from qspec_jax.errors import InputError
from qspec_jax.evaluate.acceptance import teacher_forced
from qspec_jax.planning import choice, cpu
from qspec_jax.planning.choice import CANDIDATES, GAMMAS, Setting, choose, relative_cost, without_kernels
from qspec_jax.planning.devices import DEVICES, stored_device
from qspec_jax.planning.plan import plan
from qspec_jax.planning.repetition import repetition

LLAMA_7B, LLAMA_8B, TINY = map(architecture, ("llama-2-7b", "llama-3.1-8b", "tiny"))
H200, H100 = DEVICES["h200"].kind, DEVICES["h100"].kind
INT8 = CacheConfig()


def setting(model=LLAMA_8B, kind=H200, dtype="bfloat16", cache=INT8) -> Setting:
    return Setting(model, dtype, cache, kind)


# The choice


@pytest.mark.parametrize(
    ("name", "batch", "context"), [("h200", 1, 4736), ("h100", 8, 33408), *in_system(("h200", 1, 131712), ("h200", 32, 4736))]
)
@pytest.mark.parametrize("model", [LLAMA_7B, LLAMA_8B], ids=["7b", "8b"])
def test_it_is_what_the_plan_finds_fastest(name, batch, context, model):
    found = choose(setting(model, DEVICES[name].kind), context=context, batch=batch)
    rows = plan("", model, DEVICES[name], [context], [batch], drafts=CANDIDATES, gammas=GAMMAS).rows
    rows = [row for row in rows if row.cache == "int8"]
    best = min(rows, key=lambda row: row.ms_per_token)
    assert (found.draft, found.gamma) == (best.draft, best.gamma)
    for draft in ("none", *CANDIDATES):  # each with what is expected of it
        least = min(row.ms_per_token for row in rows if row.draft == draft)
        assert f"{draft} {least:.3g}" in found.reason
    assert "\n" not in found.reason and found.reason.count("ASSUMED") == len(CANDIDATES)


def test_each_of_them_is_chosen_somewhere():
    """Sparse at long context, dense at a short one, none with many short rows, more than INT4 weights have a kernel for."""
    found = [choose(setting(LLAMA_7B), context=context, batch=batch) for context, batch in ((1 << 17, 1), (4736, 1), (1000, 128))]
    assert [each.draft for each in found] == ["sparse", "quantspec", "none"]
    assert all(6 <= each.gamma <= 12 for each in found[:2]) and found[2].gamma == 0


def test_no_draft_is_chosen_that_saves_next_to_nothing():
    """A draft shares INT4 weights of the target, and so saves reads of the cache and the head alone: at a short context next to nothing."""
    packed = setting(dataclasses.replace(LLAMA_8B, int4_weights=True))
    short, long = (choose(packed, context=context, batch=1) for context in (4096, 32768))
    assert (short.draft, long.draft) == ("none", "sparse")
    assert short.reason.endswith("no draft saves 2%") and "no draft saves" not in long.reason


def test_no_draft_is_chosen_for_a_shape_without_kernels(run, monkeypatch):
    """576 inputs are no whole groups of 128; on a CPU the choice is another."""
    small = architecture("smollm2-135m")
    for kind in (H200, H100, "NVIDIA A100-SXM4-80GB"):
        found = choose(setting(small, kind), context=4096, batch=1)
        assert (found.draft, found.gamma) == ("none", 0) and "a linear layer of 576 inputs" in found.reason
    assert "kernels" not in choose(setting(small, cpu.KIND), context=4096, batch=1).reason
    assert without_kernels(small) and not without_kernels(LLAMA_8B)
    # Doctor traces a round of the model: of one layer that takes a moment.
    monkeypatch.setitem(ARCHITECTURES, "smollm2-135m", ARCHITECTURES["smollm2-135m"] | {"num_hidden_layers": 1})
    code, out, _ = run("doctor", "--arch", "smollm2-135m", "--json")
    assert code == 0 and "576 inputs" in json.loads(out)["no_draft_pays"]
    code, out, _ = run("doctor", "--arch", "smollm2-135m")
    assert code == 0 and "On a GPU give --draft none" in out


def test_no_device_is_asked(monkeypatch):
    def refuse(*_):
        raise AssertionError("a device was asked")

    expected = choose(setting(), context=40000, batch=1)
    for name in ("devices", "local_devices", "default_backend"):
        monkeypatch.setattr(jax, name, refuse)
    assert choose(setting(), context=40000, batch=1) == expected


def test_the_number_of_drafts_that_is_given_stays():
    for gamma in (1, 5, 15):
        found = choose(setting(), context=131072, batch=1, gamma=gamma)
        assert (found.draft, found.gamma) == ("sparse", gamma)
    assert (found := choose(setting(), context=131072, batch=1, gamma=0)).draft == "none" and found.gamma == 0


def test_sparse_is_left_out_where_its_verifications_have_no_kernel():
    kinds = setting(kind="NVIDIA A100-SXM4-80GB"), setting(cache=CacheConfig("full"))
    for where, said in zip(kinds, ("sparse has no kernel for its verifications there", "sparse needs the int8 cache"), strict=True):
        found = choose(where, context=131072, batch=1)
        assert found.draft in ("quantspec", "none") and found.reason.endswith(said)
    assert "stored costs of the A100 for 'NVIDIA A100-SXM4-80GB', ESTIMATES," in choose(kinds[0], context=4096, batch=1).reason


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (setting(kind="NVIDIA GH200 480GB"), "no costs are stored for 'NVIDIA GH200 480GB'"),
        (setting(dtype="float32"), "not of float32"),
        (dataclasses.replace(setting(), lacking=(("mosaic_gpu", "needs a newer jax"),)), "of mosaic_gpu, which needs a newer jax"),
        (setting(dataclasses.replace(LLAMA_8B, head_dim=96)), "a head_dim of 96"),
        (setting(cache=CacheConfig(group_size=8)), "groups of 8 tokens"),
        (setting(cache=CacheConfig.parse("int8:host=lower")), "no costs are stored for the int8:host=lower cache"),
        (setting(cache=CacheConfig.parse("full:host=all")), "no costs are stored for the full:host=all cache"),
    ],
    ids=lambda value: None,
)
def test_without_stored_costs_it_is_the_default(where, said):
    found = choose(where, context=131072, batch=1)
    assert (found.draft, found.gamma) == (USUAL, GAMMA) and "the default, as" in found.reason and said in found.reason
    assert choose(where, context=131072, batch=1, gamma=7).gamma == 7
    assert relative_cost(where, planned.drafts_of(LLAMA_8B, "quantspec")[0].draft, context=4096, gamma=4) is None


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (H100, "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        (H200, "h200"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("cpu", None),
    ],
)
def test_devices_by_what_jax_calls_them(kind, name):
    assert stored_device(kind) == (name and DEVICES[name])


# The cost of a draft, for adaptive speculation


@pytest.mark.parametrize("draft", ["quantspec", "sparse"])
def test_a_drafts_cost_is_the_plans(draft):
    (outlined,) = planned.drafts_of(LLAMA_7B, draft)
    for context, gamma in ((4096, 4), (65536, 8)):
        (row,) = plan("", LLAMA_7B, DEVICES["h200"], [context], [1], drafts=[draft], gammas=[gamma]).rows[2:]
        cost = relative_cost(setting(LLAMA_7B), outlined.draft, context=context, gamma=gamma)
        assert cost == pytest.approx(row.step_ms / row.target_ms)
    # A dense draft reads as much more at a longer context as a verification does; a sparse one hardly more.
    short, long = (relative_cost(setting(LLAMA_7B), outlined.draft, context=context, gamma=6) for context in (4096, 1 << 17))
    assert (short < long) == (draft == "quantspec")


def test_the_cost_of_a_draft_with_weights_is_that_of_its_outline():
    model = random_model(TINY)
    for text in ("quantspec", "quantspec:weight_bits=16", "sparse", "combine:prompt-lookup+quantspec"):
        real = make_draft(text, model, int4=random_int4(model))
        last = planned.drafts_of(TINY, text)[-1]
        costs = {relative_cost(setting(TINY), each, context=4096, gamma=4) for each in (real.in_turn()[-1], last.draft)}
        assert len(costs) == 1 and 0 < costs.pop() < 2
    without = ("prompt-lookup", "exact-topk", "combine:quantspec+exact-topk", "combine:exact-topk+quantspec")  # no model, an oracle
    made = [make_draft(text, model, int4=random_int4(model)) for text in without]
    assert [relative_cost(setting(TINY), each, context=4096, gamma=4) for each in made] == [None] * 4
    first, alone = (
        relative_cost(setting(TINY), make_draft(text, model, int4=random_int4(model)), context=4096, gamma=4)
        for text in ("combine:quantspec+prompt-lookup", "quantspec")
    )
    assert first == alone
    other = dataclasses.replace(setting(TINY), lacking=(("triton", "needs jax-triton"),))
    assert relative_cost(other, make_draft("quantspec", model, int4=random_int4(model)), context=4096, gamma=4)


@pytest.fixture
def on_h200(monkeypatch):
    """As if stored costs held for any model, and this were an H200; returns what makes it another device."""
    to = lambda name: monkeypatch.setattr(Setting, "costed", lambda self: DEVICES[name])
    to("h200")
    return to


@pytest.fixture(scope="module")
def model():
    return random_model(TINY)


def test_costs_go_by_each_rows_own_length(model, on_h200):
    draft = make_draft("quantspec", model, int4=random_int4(model))
    config = GenerationConfig(draft="quantspec", adaptive=True, max_new_tokens=100)
    configs = [config, config, dataclasses.replace(config, draft_cost=0.7), GenerationConfig(draft="quantspec")]
    found = fill_draft_costs(model, configs, [1 << 16, 100, 100, 100], draft)
    expected = [relative_cost(setting(TINY), draft, context=context, gamma=4) for context in ((1 << 16) + 100, 200)]
    assert [each.draft_cost for each in found] == [*expected, 0.7, None] and expected[0] != expected[1]
    assert np.asarray(make_limits(model, *found).draft_cost) == pytest.approx([*expected, 0.7, 0])
    assert fill_draft_costs(model, configs[:1], [100], None)[0].draft_cost == DRAFT_COST
    # No more drafts than a round is made for count, whatever is asked.
    few, many = (dataclasses.replace(config, num_speculative_tokens=gamma, max_new_tokens=64) for gamma in (64, 5000))
    assert len({each.draft_cost for each in fill_draft_costs(model, [few, many], [100, 100], draft)}) == 1


def test_a_cost_that_nobody_knows_is_the_constant(model):
    (found,) = fill_draft_costs(
        model, [GenerationConfig(draft="quantspec", adaptive=True)], [100], make_draft("quantspec", model, int4=random_int4(model))
    )
    assert found.draft_cost == DRAFT_COST  # on this CPU
    assert make_limits(model, GenerationConfig(draft="quantspec", adaptive=True)).draft_cost == jnp.float32(DRAFT_COST)
    assert make_limits(model, GenerationConfig(draft="quantspec")).draft_cost is None


# What is settled


def test_what_auto_leaves_open():
    assert GenerationConfig(draft="quantspec").num_speculative_tokens == GenerationConfig(draft="sparse").num_speculative_tokens == GAMMA
    config = GenerationConfig()
    assert config == GenerationConfig(draft="auto")
    assert config.num_speculative_tokens is None and config.cache_config == INT8
    assert GenerationConfig(draft="auto", num_speculative_tokens=6).num_speculative_tokens == 6
    for text in ("auto:budget=0.1", "combine:auto+prompt-lookup"):
        with pytest.raises(InputError, match=r"auto has no settings|auto is for generate and batch, and not part of another draft"):
            GenerationConfig(draft=text)


@pytest.mark.parametrize("given", [{}, {"cache": "full"}, {"group_size": 64}, {"cache": "int8", "num_speculative_tokens": 3}], ids=str)
@pytest.mark.parametrize("batch", [1, 64])
def test_the_target_does_not_depend_on_the_choice(model, on_h200, given, batch, caplog):
    config = GenerationConfig(draft="auto", **given)
    with caplog.at_level("INFO", "qspec_jax.decoding.resolve"):
        found = resolve_draft(model, [config], [5000], batch=batch)
    (settled,) = found
    assert settled.cache_config == config.cache_config and settled.draft != "auto"
    gamma = given.get("num_speculative_tokens")
    expected = choose(setting(TINY, "cpu", cache=config.cache_config), context=5256, batch=batch, gamma=gamma)
    assert (settled.draft, settled.num_speculative_tokens) == (expected.draft, gamma or expected.gamma)
    ignored = "; without a draft, num_speculative_tokens has no effect" if gamma and expected.draft == "none" else ""
    assert caplog.messages == [expected.reason + ignored]
    # Settled once, it stays.
    assert resolve_draft(model, found, [5000], batch=1) == found


def test_the_choice_is_logged_once_if_memory_is_too_small(model, caplog):
    config = GenerationConfig()
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 85899345920 bytes.")
    with caplog.at_level("INFO", "qspec_jax.decoding.resolve"), pytest.raises(InputError), explained_memory(model, config, 100, rows=1):
        resolve_draft(model, [config], [100], batch=1)
        raise full
    assert len(caplog.messages) == 1


def test_one_choice_for_all_rows_of_a_batch(model, on_h200, monkeypatch):
    asked = []
    monkeypatch.setattr("qspec_jax.decoding.resolve.choose", lambda *_, **sizes: asked.append(sizes) or choose(setting(), **sizes))
    configs = [GenerationConfig(draft="auto", max_new_tokens=new, num_speculative_tokens=gamma) for new, gamma in ((10, None), (900, 2))]
    found = resolve_draft(model, configs, [1000, 200], batch=2)
    assert asked == [dict(context=1100, batch=2, gamma=None, repeats=None)]
    assert found[0].draft == found[1].draft and [each.num_speculative_tokens for each in found][1] == 2
    prompts = [[1, 2, 3] * 300 + [4] * 100, [5] * 200]
    resolve_draft(model, configs, [1000, 200], prompts=prompts, batch=2)
    assert asked[1].pop("repeats")(PromptLookupSettings()) == repetition(prompts, PromptLookupSettings())
    assert asked[1] == dict(context=1100, batch=2, gamma=None)


def test_prompts_that_repeat_themselves_get_a_cascade(model, monkeypatch):
    monkeypatch.setattr("qspec_jax.decoding.resolve._setting", lambda *_: setting())
    rng = np.random.default_rng(0)
    for prompt, cascade in ((np.tile(rng.integers(0, 256, 50), 20), True), (rng.permutation(1000), False)):
        assert prepare(model, [prompt % 256], config=GenerationConfig(max_new_tokens=1000)).config.draft.startswith("cascade:") == cascade


@pytest.mark.system
def test_auto_gives_way_to_a_draft_that_is_given(caplog):
    model = random_model(dataclasses.replace(TINY, num_layers=1))
    auto = GenerationConfig(max_new_tokens=6, ignore_eos=True)
    named, draft = dataclasses.replace(auto, draft="prompt-lookup"), make_draft("prompt-lookup", model)
    prompt = [1, 2, 3] * 5
    with caplog.at_level("INFO", "qspec_jax.decoding.resolve"):
        one, other = (generate(model, [prompt], config=runs.with_draft(config, draft)) for config in (auto, named))
        assert one.stats.rows == other.stats.rows and one.token_ids == other.token_ids and one.stats.num_draft_tokens
        (result,) = run_batch(model, runs.with_draft([Request(prompt, auto, jax.random.key(0))], draft))
    assert result.token_ids == one.token_ids[0] and result.stats == one.stats.rows[0]
    assert not caplog.messages
    for gamma in (None, 2):
        assert dataclasses.replace(auto, num_speculative_tokens=gamma, draft=draft).num_speculative_tokens == (gamma or GAMMA)
    found = teacher_forced(model, draft, [prompt], auto, jax.random.key(0))
    assert found == teacher_forced(model, draft, [prompt], named, jax.random.key(0)) and found.drafted


# Whole decodes


@pytest.mark.system
def test_generate_and_batch_decode_with_what_was_chosen(monkeypatch, on_h200):
    """The very tokens of the draft that is named, sampled ones too."""
    model = random_model(dataclasses.replace(TINY, num_layers=1))
    chosen = choice.DraftChoice("sparse:min_groups=1,weight_bits=16", 3, "because")
    monkeypatch.setattr("qspec_jax.decoding.resolve.choose", lambda *_, **sizes: chosen)
    auto = GenerationConfig(draft="auto", max_new_tokens=20, temperature=0.9, group_size=8, ignore_eos=True, adaptive=True)
    named = dataclasses.replace(auto, draft=chosen.draft, num_speculative_tokens=3)
    prompts, key = [list(range(30)), [5, 6, 7]], jax.random.key(1)
    one, other = (generate(model, prompts, config=config, key=key) for config in (auto, named))
    assert one.token_ids == other.token_ids and one.stats.rows == other.stats.rows and one.stats.num_draft_tokens > 0
    requests = lambda config: [Request(prompt, config, key) for prompt in prompts]
    one, other = (sorted(run_batch(model, requests(config), batch_size=2), key=lambda each: each.index) for config in (auto, named))
    assert one == other


# On a CPU


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_on_a_cpu_it_is_none(dtype):
    """Whatever the sizes: no draft is at 0.95 of the speed without one where nothing that it proposes is accepted."""
    cases = (("tiny", "int8", None, 8), ("smollm2-135m", "full", 100, 1), ("llama-3.1-70b", "kivi", 1 << 17, 64))
    for (shape, cache, context, batch), gamma in itertools.product(cases, (None, 1, 12)):
        found = choose(setting(architecture(shape), "cpu", dtype, CacheConfig.parse(cache)), context=context, batch=batch, gamma=gamma)
        assert (found.draft, found.gamma) == ("none", 0) and found.reason.startswith("draft auto: none, by costs stored for CPUs")


def test_costs_on_a_cpu_go_by_the_nearest_measured_shape(monkeypatch):
    shapes = {"tiny": 8, "smollm2-135m": 135, "llama-3.1-8b": 135}
    for name, millions in shapes.items():
        for dtype, kind in (("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float32", "float32"), ("float64", "float32")):
            found = cpu.nearest(architecture(name), dtype)
            assert (found.millions, found.dtype) == (millions, kind)
    # Were verifying as cheap as a step, or drafting next to nothing, they would pay.
    monkeypatch.setattr(cpu, "MEASURED", (cpu.CpuCosts(8, "bfloat16", 1.05, 2.0), cpu.CpuCosts(8, "float32", 1.5, 0.1)))
    assert cpu.choose(TINY, "bfloat16", None)[:2] == ("prompt-lookup", cpu.GAMMA) and cpu.choose(TINY, "bfloat16", 8)[0] == "none"
    assert cpu.choose(TINY, "float32", 6)[:2] == ("quantspec", 6)


def test_where_rows_are_not_known_it_goes_by_the_device_alone(model, caplog):
    with caplog.at_level("INFO", "qspec_jax.decoding.resolve"):
        for kind, draft in (("cpu", "none"), (H200, USUAL), ("a GPU of the cluster", USUAL)):
            (found,) = resolve_draft(model, [GenerationConfig()], None, batch=8, device_kind=kind)
            assert (found.draft, found.cache_config) == (draft, INT8)
    assert len(caplog.messages) == 3 and "the lengths of the rows are not known" in caplog.messages[1]


@pytest.mark.parametrize("cache", ["int8", "full", "kivi:bits=2,residual=8", "streaming-llm", "h2o"])
def test_settings_of_drafts_are_no_errors_without_one(cache, model, caplog):
    group_size = 8 if cache in ("int8", "kivi:bits=2,residual=8") else None
    for given in ({}, {"adaptive": True, "draft_cost": 0.5, "min_draft_confidence": 0.3, "num_speculative_tokens": 3}):
        caplog.clear()
        config = GenerationConfig(cache=cache, max_new_tokens=4, group_size=group_size, **given)
        with caplog.at_level("INFO", "qspec_jax.decoding.resolve"):
            (found,) = resolve_draft(model, [config], [27], batch=1)
        assert found.draft == "none" and found.cache_config == config.cache_config
        (line,) = caplog.messages
        assert line.startswith("draft auto: none") and all(name in line for name in given) and ("no effect" in line) == bool(given)


def test_without_a_draft_its_settings_change_no_token():
    model = random_model(dataclasses.replace(TINY, num_layers=1))
    named = GenerationConfig(draft="none", cache="full", max_new_tokens=4, ignore_eos=True)
    config = dataclasses.replace(named, draft="auto", adaptive=True, draft_cost=0.5, min_draft_confidence=0.3, num_speculative_tokens=3)
    out = generate(model, [[1, 2, 3] * 9], config=config)
    assert out.token_ids == generate(model, [[1, 2, 3] * 9], config=named).token_ids and out.stats.num_spec_steps == 0


@pytest.mark.system
def test_the_default_emits_the_tokens_of_quantspec():
    with jax.enable_x64(True):
        model = runs.random_model(jnp.float64, num_hidden_layers=1)
        config = GenerationConfig(max_new_tokens=40, group_size=8, ignore_eos=True)
        prompts = runs.random_prompts([30, 3])
        default, named = (generate(model, prompts, config=dataclasses.replace(config, draft=draft)) for draft in ("auto", "quantspec"))
    assert default.token_ids == named.token_ids
    assert default.stats.num_spec_steps == 0 < named.stats.num_spec_steps
    assert default.stats.flushes == named.stats.flushes > 0  # of the same cache


@pytest.mark.parametrize("named", [[], ["--draft", "auto"]])
def test_the_command_says_what_it_chose(run, directory, caplog, named):
    code, out, _ = run("generate", "--model", directory, "--prompt", "ab", "--max-new-tokens", 4, "--json", *named)
    assert code == 0 and json.loads(out)["stats"]["num_spec_steps"] == 0
    (line,) = [record.getMessage() for record in caplog.records if record.name == "qspec_jax.decoding.resolve"]
    assert line.startswith("draft auto: none, by costs stored for CPUs")


@pytest.mark.system
@pytest.mark.parametrize("option", [["--sensitive-layers", 1], ["--calibrate"]])
def test_options_of_int4_weights_imply_quantspec(run, directory, caplog, option):
    code, out, _ = run("generate", "--model", directory, "--prompt", "ab", "--max-new-tokens", 4, "--json", *option)
    assert code == 0 and json.loads(out)["stats"]["num_spec_steps"] > 0
    said = [record.getMessage() for record in caplog.records if record.name != "qspec_jax.decoding.requests"]  # of its EOS, once a process
    assert said == [f"draft auto: quantspec, which has the INT4 weights that {option[0]} is for"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["generate", "--prompt", "a", "--draft", "auto:budget=1"], "auto has no settings"),
        (["plan", "--max-new-tokens", 8, "--draft", "auto"], "auto is for generate and batch"),
        (["eval", "acceptance", "--draft", "auto"], "auto chooses a draft for generate and batch; name the drafts"),
    ],
)
def test_where_auto_is_refused(fails, directory, command, said):
    fails([*command, "--model", directory], said)


def test_a_run_is_known_by_what_was_chosen(run, directory, tmp_path, on_h200, monkeypatch):
    """A batch that was killed goes on where the same draft is chosen, or named, and is refused where another is."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": "ab" * n}) + "\n" for n in (3, 40, 9)))
    ran = []

    def killed(prepared, lines, journal, *_, **__):
        ran.append(prepared.configs)
        journal.add({"line": lines[-1].number})  # or nothing would be left to go on from
        raise KeyboardInterrupt

    monkeypatch.setattr(batch_command, "decode_lines", killed)
    monkeypatch.setattr(choice, "MIN_SAVING", 0)  # or no draft would be chosen for a model so small
    command = lambda *more: run("batch", source, output, "--model", directory, "--max-new-tokens", 8, *more)
    assert command("--draft", "auto", "--adaptive")[0] == 130
    (config,) = {(each.draft, each.num_speculative_tokens) for each in ran[0]}
    assert config[0] != "auto" and len({each.draft_cost for each in ran[0]}) > 1
    named = ["--draft", config[0], "--gamma", config[1], "--adaptive"]
    assert command("--draft", "auto", "--adaptive")[0] == command(*named)[0] == 130
    # Another device has other costs, so that other drafts may be made.
    on_h200("a100")
    code, _, err = command(*named)
    assert code == 2 and "is of a run with other settings; " in err
    on_h200("h200")
    monkeypatch.setattr("qspec_jax.decoding.resolve.choose", lambda *_, **sizes: choice.DraftChoice("quantspec", 1, "because"))
    code, _, err = command("--draft", "auto", "--adaptive")
    assert code == 2 and "is of a run with other settings; " in err
    # The choice is by all lines, also those that are done.
    monkeypatch.undo()
    asked = []
    monkeypatch.setattr(
        "qspec_jax.decoding.resolve.choose", lambda *_, **sizes: asked.append(sizes) or choice.DraftChoice("none", 0, "because")
    )
    monkeypatch.setattr(batch_command, "decode_lines", lambda *_, **__: BatchStats())
    other = tmp_path / "other.jsonl"
    assert run("batch", source, other, "--model", directory, "--max-new-tokens", 8, "--draft", "auto")[0] == 0
    assert [sizes["batch"] for sizes in asked] == [3]
