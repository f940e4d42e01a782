"""Plans, and `qspec plan`: what fits, what is best, tables and JSON, devices, bad input."""

import dataclasses
import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import planned
import pytest
from checkpoints import hf_config
from silent_draft import Silent

from pallas_kernels.attention.mosaic_plan import Plan
from qspec_jax.bench.architectures import ARCHITECTURES, architecture
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.converted import is_converted
from qspec_jax.drafts import registry
from qspec_jax.drafts.quantspec import QuantSpecSettings
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.prompts import bucket
from qspec_jax.planning import timing
from qspec_jax.planning.devices import DEVICES, find_device
from qspec_jax.planning.memory import memory_of
from qspec_jax.planning.operations import (
    model_bytes,
)
from qspec_jax.planning.plan import plan
from qspec_jax.planning.report import best_gammas
from qspec_jax.planning.steps import LayerReads

ROOT = Path(__file__).parent.parent
LLAMA_7B, LLAMA_8B, TINY = map(architecture, ("llama-2-7b", "llama-3.1-8b", "tiny"))
INT8, H100 = CacheConfig("int8"), DEVICES["h100"]


def test_a_tuned_configuration_is_found_by_the_kernels_own_problem(monkeypatch):
    shapes = dict(batch=2, kv_heads=8, tokens=5, heads_per_kv_head=4, head_dim=128, group_size=128, groups=9, buffer_rows=264)
    kernel = Plan(**shapes, planes=2, block_tiles=3, blocks_of_rows=1)
    monkeypatch.setattr(timing.tuning, "problems", lambda *_: [kernel.problem])
    count = lambda **sizes: timing.attention_cost(DEVICES["h200"], LLAMA_8B, LayerReads(2, 1024, 200), 128, **sizes).counts["int8"]
    assert count(batch=2, tokens=5) and not count(batch=2, tokens=7) and not count(batch=1, tokens=5)


def test_a_tuned_configuration_counts_for_its_own_problem():
    """On an H200 INT8 attention of 7 tokens with 8 KV heads was tuned for one row in groups of 128. Other batches and group sizes get the
    default's figure, so that verifying more tokens never takes less time; and a note for one row says which passes were tuned."""
    h200, layer = DEVICES["h200"], LayerReads(2, 1 << 17, 200)
    counts = lambda group_size, **sizes: timing.attention_cost(h200, LLAMA_8B, layer, group_size, **sizes).counts
    found = [counts(128, tokens=7), counts(64, tokens=7), counts(128, tokens=7, batch=8), counts(128, tokens=1)]
    assert [bool(each["int8"]) for each in found] == [True, False, False, False]
    assert [bool(each["int8_default"]) for each in found] == [False, True, True, True]
    planned_for = lambda device, *batches: plan("8b", LLAMA_8B, device, [131072], batches, drafts=["quantspec", "streaming-llm"])
    eight = planned_for(h200, 8)
    times = [row.target_ms for row in eight.rows if row.draft == "quantspec"]
    assert times == sorted(times) and not any("tuned" in note for note in eight.notes)
    (note,) = (note for note in planned_for(h200, 1, 8).notes if "tuned" in note)
    assert note.startswith("batch 1: ") and "was tuned on this device for a step of quantspec; verifying 7 tokens; " in note
    assert "; not for a token without a draft; verifying 2, 3, 4, 5, 9, 11, 13 tokens. " in note
    assert not any("tuned" in note for note in planned_for(H100, 1).notes + planned_for(DEVICES["l40s"], 1).notes)


def test_int4_weights_without_a_kernel_do_not_pay():
    """Beyond a device's maximum of rows they are dequantized in every step, which is slower than the target's own; above 8 rows another
    kernel multiplies them."""
    for name, most in (("h200", 64), ("l40s", 16)):
        found = plan("8b", LLAMA_8B, DEVICES[name], [1024], [1, 2 * most], drafts=["quantspec"], gammas=[2, 4])
        assert [best.draft for best in found.best] == ["quantspec", "none"]
        assert any(f"no kernel there for more than {most} rows" in note for note in found.notes)
    costs = [timing.int4_matmul_cost(DEVICES["h200"], 28672, 4096, rows).seconds(DEVICES["h200"]) for rows in (1, 8, 9, 64)]
    assert costs == sorted(costs) and costs[3] < 3 * costs[0]


@pytest.mark.parametrize("inputs", [128, 896, 4864])
def test_inputs_in_an_odd_number_of_groups_have_a_cost_at_any_rows(inputs):
    costs = [timing.int4_matmul_cost(DEVICES["h200"], 896, inputs, rows).seconds(DEVICES["h200"]) for rows in (1, 8, 9, 64)]
    assert costs == sorted(costs) and costs[0] > 0


def test_devices_that_were_never_measured_are_estimates():
    for name, device in DEVICES.items():
        found = plan("8b", LLAMA_8B, device, [4096], [1], drafts=["quantspec"], gammas=[4])
        assert found.estimated == (name not in ("h100", "h200"))
        assert found.estimated == any("ESTIMATE" in note for note in found.notes)
        assert all(math.isfinite(row.ms_per_token) and row.ms_per_token > 0 for row in found.rows)


def test_what_fits():
    found = plan("7b", LLAMA_7B, DEVICES["h100"], [65536, 131072], [1, 4], drafts=["quantspec"], gammas=[6])
    by = {(row.context, row.batch, row.draft, row.cache): row for row in found.rows}
    # At 128k a full cache of Llama-2-7B does not fit into 80 GB, and an int8 one does: that is the baseline then.
    assert by[131072, 1, "none", "full"].status == "does not fit" and by[131072, 1, "quantspec", "int8"].status == "planned"
    assert {row.baseline for row in found.rows if (row.context, row.batch) == (131072, 1)} == {"int8"}
    assert by[131072, 4, "quantspec", "int8"].speedup is None and found.best[3].draft is None
    row = by[65536, 1, "quantspec", "int8"]
    room = 79e9

    def total(batch: int, context: int) -> float:
        drafts = planned.drafts_of(LLAMA_7B, "quantspec")
        return memory_of(LLAMA_7B, INT8, drafts, batch=batch, context=bucket(context), new_tokens=640, gamma=6).total

    assert total(row.max_rows, 65536) <= room < total(row.max_rows + 1, 65536)
    assert total(1, row.longest_context) <= room < total(1, row.longest_context + 1)


def test_the_best_gamma_is_one_that_fits(run, tmp_path):
    """The table shows what "Best" names, where a larger gamma would be faster and takes more memory than there is."""
    device = dataclasses.replace(H100, memory_gb=80)
    memory = {row.gamma: row.memory.total for row in plan("8b", LLAMA_8B, device, [8192], [1], drafts=["quantspec"]).rows}
    device = dataclasses.replace(device, memory_gb=(memory[6] + memory[8]) / 2e9 + 1)
    found = plan("8b", LLAMA_8B, device, [8192], [1], drafts=["quantspec"], acceptances={"": 1.0})
    eight, six = (next(row for row in found.rows if row.gamma == gamma) for gamma in (8, 6))
    assert eight.status == "does not fit" and six.status == "planned" and eight.ms_per_token < six.ms_per_token
    shown = next(row for row in best_gammas(found) if row.draft == "quantspec")
    assert (shown.gamma, found.best[0].gamma) == (6, 6)
    file = tmp_path / "device.json"
    file.write_text(json.dumps(dataclasses.asdict(device)))
    code, out, _ = run("plan", "--arch", "llama-3.1-8b", "--device", file, "--context", 8192, "--draft", "quantspec", "--acceptance", 1)
    assert code == 0 and "does not fit" not in out and "quantspec with 6" in out
    # Where none fits the table says so.
    small = plan("8b", LLAMA_8B, dataclasses.replace(H100, memory_gb=12), [8192], [1], drafts=["quantspec"])
    assert {row.status for row in best_gammas(small)} == {"does not fit"}
    baseline = plan("8b", LLAMA_8B, H100, [8192], [1], drafts=["none"]).rows[-1].memory.total
    file.write_text(json.dumps(dataclasses.asdict(H100) | {"memory_gb": baseline / 1e9 + 1.1}))
    code, out, _ = run("plan", "--arch", "llama-3.1-8b", "--device", file, "--context", 8192, "--draft", "quantspec")
    assert code == 0 and "8,192 tokens, batch 1: no draft fits; without one over the int8 cache" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--draft", "none"], "no draft was compared; without one over the"),
        (["--draft", "h2o"], "no draft was compared; without one over the"),
        (["--draft", "quantspec", "--acceptance", 0.1], "no draft pays; without one over the"),
        (["--draft", "h2o", "--draft", "quantspec", "--acceptance", "quantspec=0.1"], "no draft pays; without one over the"),
    ],
)
def test_no_draft_pays_where_one_was_compared(run, arguments, said):
    code, out, _ = run("plan", "--arch", "llama-3.1-8b", "--context", 4096, *arguments)
    assert code == 0 and f"4,096 tokens, batch 1: {said}" in out


def test_memory_is_what_the_engine_allocates():
    # Prompts and caches are padded: no context between two buckets fits that the larger bucket does not.
    found = {row.cache: row for row in plan("7b", LLAMA_7B, H100, [9000], [1], drafts=["none"]).rows}
    assert all(row.longest_context == bucket(row.longest_context) for row in found.values())
    padded = plan("7b", LLAMA_7B, H100, [bucket(9000)], [1], drafts=["none"]).rows
    assert [row.memory for row in padded] == [row.memory for row in found.values()]


def test_contexts_end_with_the_models_positions():
    config = dataclasses.replace(TINY, max_position_embeddings=8192)
    assert {row.longest_context for row in plan("tiny", config, H100, [1024], [1], drafts=["quantspec"]).rows} == {8192 - 640}
    with pytest.raises(InputError, match="7,553 tokens and 640 new ones are more than the 8,192 positions"):
        plan("tiny", config, H100, [7553], [1])


def test_a_budget_beyond_the_context_is_refused():
    with pytest.raises(InputError, match="draft streaming-llm:budget=200000: draft budget 200000 should be at most 4736"):
        plan("8b", LLAMA_8B, H100, [4096], [1], drafts=["streaming-llm:budget=200000"])
    assert plan("8b", LLAMA_8B, H100, [4096], [1], drafts=["streaming-llm:budget=4736"]).rows[-1].speedup


def test_an_oracle_is_not_planned_and_the_best_with_measured_kernels_is_named():
    found = plan("8b", LLAMA_8B, H100, [131072], [1], acceptances={"": 0.93, "prompt-lookup": 0.4})
    (oracle,) = (row for row in found.rows if row.draft == "exact-topk")
    assert (oracle.status, oracle.speedup) == ("not planned", None)
    with pytest.raises(InputError, match="exact-topk: an oracle"):
        plan("8b", LLAMA_8B, H100, [4096], [1], drafts=["exact-topk"])
    # Kernels for listed groups were timed on Hopper alone, and only there does one observe.
    assert found.best[0].draft == "sparse" and found.best[0].with_measured_kernels is None
    found = plan("8b", LLAMA_8B, DEVICES["a100"], [131072], [1], acceptances={"": 0.93, "prompt-lookup": 0.4})
    (best,) = found.best
    assert best.draft == "sparse" and best.with_measured_kernels.draft == "quantspec" and best.with_measured_kernels.speedup < best.speedup
    (said,) = (note for note in found.notes if note.startswith("sparse: "))
    assert said.endswith("on A100 there is none that observes; " + said.split("; ")[-1])


def test_speedups_are_over_the_better_baseline():
    found = plan("8b", LLAMA_8B, H100, [131072], [1], gammas=[1, 4])
    full, int8, *drafts = (row for row in found.rows if row.ms_per_token)
    better = min(full, int8, key=lambda row: row.ms_per_token)
    assert better.speedup == 1 and {row.baseline for row in drafts} == {better.cache}
    assert all(row.speedup == pytest.approx(better.ms_per_token / row.ms_per_token) for row in drafts)
    fastest = min([full, int8, *drafts], key=lambda row: row.ms_per_token)
    assert (found.best[0].draft, found.best[0].gamma) == (fastest.draft, fastest.gamma)


# The command

PLAN = ["plan", "--arch", "llama-2-7b", "--device", "h100", "--context", 4096]


def test_the_command_prints_tables_and_json(run):
    code, out, _ = run(*PLAN, "--context", 65536, "--batch", 1, "--batch", 8, "--draft", "quantspec", "--gamma", 2, "--gamma", 6)
    assert (
        code == 0
        and "decode attention" in out
        and "share of time" in out
        and "(of drafted)" in out
        and "quantspec with 6 drafts a round" in out
    )
    code, out, _ = run(
        *PLAN, "--draft", "quantspec", "--draft", "sparse:budget=0.1", "--acceptance", 0.9, "--acceptance", "sparse=0.8", "--json"
    )
    found = json.loads(out)
    assert code == 0 and found["device"]["name"] == "H100" and not found["estimated"]
    given = {row["draft"]: (row["acceptance"], row["acceptance_source"]) for row in found["rows"] if row["gamma"] == 6}
    assert given == {"quantspec": (0.9, "given"), "sparse:budget=0.1": (0.8, "given")}
    assert all(row["memory"]["weights"] == model_bytes(LLAMA_7B) for row in found["rows"])


def test_a_shape_is_planned_with_the_weights_that_are_chosen(run, fails):
    """An 8B model with 128k tokens fits a card of 24 GB."""
    arguments = "plan", "--arch", "llama-3.1-8b", "--device", "rtx4090", "--context", 131072, "--draft", "quantspec", "--json"
    config = dataclasses.replace(architecture("llama-3.1-8b"), nested_weights=True, int8_head=True)
    code, out, _ = run(*arguments, "--weights", "nested:head_bits=8")
    found = json.loads(out)
    assert code == 0 and found["weight_bytes"] == model_bytes(config) < 0.6 * model_bytes(architecture("llama-3.1-8b"))
    assert "linear layers nested in 8 bits, head in INT8" in found["model"]
    memory = {row["draft"]: sum(row["memory"][part] for part in ("weights", "draft", "cache", "besides")) for row in found["rows"]}
    assert memory["quantspec"] < 21e9 and {row["status"] for row in found["rows"] if row["draft"] == "quantspec"} == {"planned"}
    fails((*arguments, "--weights", "nested:calibration=x"), "needs a trained checkpoint")
    fails((*arguments, "--weights", "int8"), "weights 'int8' should be one of packed, dequantized, nested")


def test_contexts_that_are_not_given_are_those_that_the_model_has_positions_for(run, tmp_path):
    """As --help and docs/plan.md say; a known shape has positions for more."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config(num_hidden_layers=1, max_position_embeddings=40000)))
    contexts = {}
    for which in ("--model", tmp_path), ("--arch", "llama-3.1-8b"):
        code, out, _ = run("plan", *which, "--draft", "none", "--max-new-tokens", 100, "--json")
        assert code == 0
        contexts[which[0]] = [row["context"] for row in json.loads(out)["sizes"]]
    assert contexts == {"--model": [4096, 32768, 39900], "--arch": [4096, 32768, 131072]}
    assert {architecture(name).max_length for name in ARCHITECTURES} == {1 << 20}
    said = " ".join(run("plan", "--help")[1].replace("│", " ").split())
    assert "each cut to what the model's positions have room for" in said and "A known shape, with 2^20 positions" in said


def test_a_checkpoint_is_planned_by_its_config_alone(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(num_hidden_layers=3)))
    code, out, _ = run("plan", "--model", tmp_path, "--context", 64, "--max-new-tokens", 8, "--json")
    config = LlamaConfig.from_hf(tmp_path / "config.json")
    assert code == 0 and not is_converted(tmp_path) and json.loads(out)["weight_bytes"] == model_bytes(config)


def test_a_device_of_ones_own(run, tmp_path):
    file = tmp_path / "device.json"
    fields = {"name": "Mine", "bandwidth_gb_per_s": 500, "memory_gb": 24, "bf16_tflops": 80.5}
    fields |= {"multiprocessors": 40, "clock_ghz": 1.5, "kernels": "triton"}
    file.write_text(json.dumps(fields))
    code, out, _ = run("plan", "--arch", "tiny", "--device", file, "--json")
    found = json.loads(out)
    assert code == 0 and found["estimated"] and found["device"]["multiprocessors"] == 40 and found["ridge"] == 80.5e12 / 500e9
    file.write_text(json.dumps(fields | {"host_gb_per_s": 0}))  # 0: not measured, as of other bandwidths
    code, out, _ = run("plan", "--arch", "tiny", "--device", file, "--cache", "int8:host=lower", "--cache", "int8:host=none", "--json")
    unmeasured = json.loads(out)
    assert code == 0 and all(row["copying_ms"] for row in unmeasured["rows"] if row["cache"] == "int8:host=lower" and row["target_ms"])


def test_a_lossy_cache_is_no_best_beside_others():
    """Unless nothing else is asked for; a note says what it is."""
    shape, device = architecture("llama-2-7b"), DEVICES["h200"]
    both, alone = (plan("7b", shape, device, [32768], [1], caches=caches, drafts=["quantspec"]) for caches in (["int8", "kivi"], ["kivi"]))
    assert both.best[0].cache == "int8" and alone.best[0].cache == "kivi"
    assert any(note.startswith("kivi: this cache is lossy") for note in both.notes)


def test_a_device_as_it_is_printed():
    assert find_device("H200") is find_device("h200") is DEVICES["h200"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory_gb": None}, "memory_gb is missing"),
        ({"memory_gb": -1}, "memory_gb is -1, should be a number of more than 0"),
        ({"bf16_tflops": "fast"}, "bf16_tflops is 'fast', should be a number"),
        ({"multiprocessors": 1.5}, "multiprocessors is 1.5, should be a whole number"),
        ({"clock_ghz": float("inf")}, "clock_ghz is inf, should be a number"),
        ({"kernels": "cuda"}, "kernels is 'cuda', should be mosaic_gpu or triton"),
        ({"shared_memory": 1}, "shared_memory is 1, not true or false"),
        ({"color": "red"}, "color is no field of a device"),
    ],
)
def test_devices_that_are_refused(run, tmp_path, changes, said):
    file = tmp_path / "device.json"
    fields = dataclasses.asdict(DEVICES["orin"]) | changes
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    code, out, err = run("plan", "--arch", "tiny", "--device", file)
    assert code == 2 and not out and err.count("\n") == 1 and f"{file}: {said}" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "llama-9"], "no architecture 'llama-9'; there are llama-2-7b"),
        ([], "give one of --arch and --model"),
        (["--arch", "tiny", "--model", "x"], "give one of --arch and --model"),
        (["--arch", "tiny", "--device", "h900"], "no device 'h900'; there are h200, h100"),
        (["--arch", "tiny", "--context", 0], "--context 0 should be from 1 to 1,047,936"),
        (["--arch", "tiny", "--context", 10**9], "--context 1,000,000,000 should be from 1 to 1,047,936, the model's 1,048,576 positions"),
        (["--arch", "tiny", "--batch", 0], "--batch 0 should be from 1 to"),
        (["--arch", "tiny", "--gamma", 16], "--gamma 16 should be from 1 to 15"),
        (["--arch", "tiny", "--max-new-tokens", 0], "--max-new-tokens 0 should be from 1 to"),
        (["--arch", "tiny", "--max-new-tokens", 1 << 20], "--max-new-tokens 1,048,576 should be less than the model's 1,048,576 positions"),
        (["--arch", "tiny", "--acceptance", "1.1"], "--acceptance 1.1: '1.1' should be a number from 0 to 1"),
        (["--arch", "tiny", "--acceptance", "nan"], "'nan' should be a number from 0 to 1"),
        (["--arch", "tiny", "--acceptance", "sparse=x"], "'x' should be a number from 0 to 1"),
        (["--arch", "tiny", "--acceptance", "medusa=0.5"], "no draft 'medusa' is planned"),
        (["--arch", "tiny", "--acceptance", 0.5, "--acceptance", 0.6], "given twice for all drafts"),
        (["--arch", "tiny", "--draft", "medusa"], "draft 'medusa' should be one of quantspec"),
        (["--arch", "tiny", "--draft", "quantspec:sensitive_layers=9"], "sensitive_layers 9 should be from 0 to the model's 2 layers"),
        (["--arch", "tiny", "--draft", "sparse:dense_layers=9"], "dense_layers 9 should be from 0 to the model's 2 layers"),
        (["--arch", "tiny", "--plot", "x.txt"], "--plot x.txt: the name must end in"),
        (["--model", "no/such"], "no/such"),
    ],
)
def test_bad_input(run, arguments, said):
    code, out, err = run("plan", *arguments)
    assert code == 2 and not out and err.startswith("qspec: error: ") and err.count("\n") == 1 and said in err


def test_a_draft_without_a_cost_is_listed(run, monkeypatch):
    """Drafts of the registry that do not say how much they propose, or of which no acceptance is known."""

    @dataclasses.dataclass(frozen=True)
    class Wanting:
        def __post_init__(self):
            raise InputError("it wants a checkpoint")

    for name, settings in {"silent": Silent, "other": QuantSpecSettings, "wanting": Wanting}.items():
        monkeypatch.setitem(registry.DRAFTS, name, settings)
    code, out, _ = run(*PLAN)
    assert code == 0 and "* silent: no model of its cost.\n" in out
    assert "* other: no acceptance known; give --acceptance other=R.\n" in out
    assert "* wanting: not planned; it wants a checkpoint.\n" in out
    assert run(*PLAN, "--draft", "wanting")[::2] == (2, "qspec: error: draft wanting: it wants a checkpoint\n")
    code, out, _ = run(*PLAN, "--acceptance", "other=0.9", "--json")
    rows = json.loads(out)["rows"]
    assert all((row["kernels_measured"] is None) == (row["ms_per_token"] is None) for row in rows)
    status = {row["draft"]: row["status"] for row in rows}
    assert code == 0 and (status["silent"], status["other"], status["quantspec"]) == ("no model of its cost", "planned", "planned")


def test_plots(run, tmp_path):
    pytest.importorskip("matplotlib")
    code, _, _ = run(*PLAN, "--context", 16384, "--batch", 1, "--batch", 4, "--plot", tmp_path / "plan.png")
    assert code == 0 and (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.system
@pytest.mark.parametrize("own", [False, True])
def test_it_answers_at_once_and_asks_no_device(tmp_path, own):
    """In 2 to 3 seconds on an idle machine, nearly all of it to import the commands. What counts here is the processor's time, since others
    may be at work, in times of what that import takes just then, for machines differ: 1.2 to 1.4. No backend of JAX is initialised."""
    check = "import sys; from qspec_jax.cli.app import app; app(sys.argv[1:], standalone_mode=False); "
    check += "from jax._src import xla_bridge; assert not xla_bridge._backends"
    arguments = [*map(str, PLAN)]
    if own:
        (tmp_path / "config.json").write_text(json.dumps(hf_config(vocab_size=LLAMA_7B.vocab_size, max_position_embeddings=8192)))
        draft = f"combine:prompt-lookup+small-model:model={tmp_path},weight_bits=4"
        arguments += ["--draft", draft, "--acceptance", "0.8", "--json"]

    def spent(code: str, *arguments: str) -> tuple[float, str]:
        used = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        before = used()
        done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return used() - before, done.stdout

    (imports, _), (plan, out) = spent("import qspec_jax.cli.app"), spent(check, *arguments)
    assert not own or json.loads(out)["rows"][-1]["speedup"] > 0
    assert plan < 2 * imports
