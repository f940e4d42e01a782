"""The command line as a person meets it: what it prints, its JSON, and one clear line with exit code 2 for every mistake."""

import functools
import io
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import typer
from checkpoints import hf_config, tensor_shapes, write_checkpoint
from safetensors.numpy import load_file, save_file

from qspec_jax import demo, progress
from qspec_jax.bench import decode
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.cli import batch as cli_batch
from qspec_jax.cli import generate
from qspec_jax.cli.app import app
from qspec_jax.drafts import quantspec
from qspec_jax.files import read_texts
from qspec_jax.quantization.weights import quantize_head

SETTINGS = ["--max-new-tokens", "24", "--group-size", "8", "--ignore-eos"]
DRAFTED = [*SETTINGS, "--draft", "quantspec"]


def test_generate_prints_the_text_and_statistics(run, directory):
    code, out, err = run("generate", "--model", directory, "--prompt", "def main():", *DRAFTED)
    assert code == 0
    assert out.strip()
    assert "acceptance rate" in err
    assert "acceptance rate" not in out


@pytest.mark.parametrize("flags", [[], ["--stream"], ["--json"]], ids=str)
def test_generate_says_what_it_does(run, directory, monkeypatch, flags):
    """From the beginning, until text may come."""
    monkeypatch.setattr(sys.modules["qspec_jax.cli.generate"], "shown", functools.partial(progress.shown, file_seconds=0.01))
    code, out, err = run("generate", "--model", directory, "--prompt", "def main():", "--max-new-tokens", 4, *flags)
    assert code == 0 and out and bool(re.search(r"^qspec: 0 s: ", err, re.MULTILINE)) == (flags != ["--json"])


@pytest.fixture(scope="module")
def other_tokens(directory, tmp_path_factory) -> Path:
    """A copy of the model whose tokenizer has two tokens the other way round."""
    shutil.copytree(directory, found := tmp_path_factory.mktemp("other") / "model")
    content = json.loads((found / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(set(vocabulary) - {token["content"] for token in content["added_tokens"]}, key=vocabulary.get)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (found / "tokenizer.json").write_text(json.dumps(content))
    return found


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--prompt", "ab", "--max-new-tokens", 4),
        ("batch", "INPUT", "OUTPUT", "--max-new-tokens", 4),
        ("eval", "acceptance", "--file", "TEXT", "--context", 16, "--max-new-tokens", 8, "--no-calibrate"),
        ("eval", "needle", "--lengths", 100, "--samples", 1),
        ("bench", "decode", "--context", 16, "--max-new-tokens", 32, "--repeats", 1),
        ("bench", "batch", "--prompt-tokens", "8-16", "--new-tokens", "2-4", "--file", "TEXT"),
    ],
    ids=lambda command: " ".join(itertools.takewhile(str.isalpha, command)),
)
def test_a_draft_of_other_tokens_is_refused(fails, directory, other_tokens, tmp_path, monkeypatch, command):
    """By every command that decodes with the model of a checkpoint."""
    monkeypatch.setattr(decode, "read_bandwidth", lambda *, repeats: 20.0)
    files = {name: tmp_path / name for name in ("INPUT", "OUTPUT", "TEXT")}
    files["INPUT"].write_text(json.dumps({"prompt": "ab"}) + "\n")
    files["TEXT"].write_text("".join(f"value_{i} = {i}\n" for i in range(40)))
    draft = f"small-model:model={other_tokens}"
    fails([*(files.get(each, each) for each in command), "--model", directory, "--draft", draft], "a draft needs the target's vocabulary")


def test_convert_and_generate_with_the_draft_that_is_stored(run, directory, tmp_path, monkeypatch):
    code, out, _ = run("convert", directory, tmp_path / "out", "--draft-bits", "4", "--json")
    report = json.loads(out)
    assert code == 0 and (report["draft_bits"], report["tensors"], report["dtype"]) == (4, 12, "float32")
    int4, texts = sys.modules["qspec_jax.drafts.int4"], []
    quantized = int4.quantize_linears

    def of_shapes_alone(model):
        assert isinstance(model.embedding.get_value(), jax.core.Tracer)
        return quantized(model)

    for model in (directory, tmp_path / "out"):
        code, out, _ = run("generate", "--model", model, "--prompt", "def main():", *DRAFTED)
        assert code == 0
        texts.append(out)
        monkeypatch.setattr(int4, "quantize_linears", of_shapes_alone)  # the second model has a draft that is stored
    assert texts[0] == texts[1]
    code, out, _ = run("verify", directory, tmp_path / "out")
    assert code == 0 and "12 weights compared, and logits: all as in the source; 7 of the draft, whose errors are at most 0." in out
    code, out, _ = run("export", tmp_path / "out", tmp_path / "back", "--json")
    assert code == 0 and json.loads(out)["tensors"] == 12
    tensors = load_file(tmp_path / "back" / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * 2}, tmp_path / "back" / "model.safetensors")
    code, out, _ = run("verify", tmp_path / "back", tmp_path / "out")
    assert code == 1 and "norm.weight differs from model.norm.weight" in out
    code, out, err = run("convert", directory, tmp_path / "out")
    assert code == 2 and "--overwrite" in err and not out
    code, out, _ = run("convert", directory, tmp_path / "out", "--dtype", "bfloat16", "--overwrite")
    assert code == 0 and "12 tensors in bfloat16" in out


def test_a_terminal_sees_a_bar(run, directory, monkeypatch):
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True, raising=False)
    monkeypatch.setattr(generate, "progress_bar", functools.partial(generate.progress_bar, mininterval=0))  # 24 tokens are there at once
    code, out, err = run("generate", "--model", directory, "--prompt", "x = 1", *DRAFTED)
    assert code == 0 and "read the prompt:   0%" in err and "24/24" in err
    assert out == run("generate", "--model", directory, "--prompt", "x = 1", *DRAFTED)[1]


def test_generate_json_has_the_promised_fields(run, directory, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("import os\n" * 9)
    code, out, _ = run("generate", "--model", directory, "--prompt", "x = 1", "--prompt-file", file, *DRAFTED, "--json")
    result = json.loads(out)
    assert code == 0
    assert {"text", "token_ids", "finish_reason", "stats"} == result.keys()
    assert [len(ids) for ids in result["token_ids"]] == [24, 24]
    assert result["finish_reason"] == ["length", "length"]
    stats = result["stats"]
    assert set(stats) == {
        *("prompt_tokens", "new_tokens", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "draft_acceptance_rate"),
        *("mean_acceptance_length", "acceptance_histogram", "flushes", "compile_s", "prefill_s", "decode_s", "tokens_per_second"),
        *("peak_memory_bytes", "cache_bytes", "host_cache_bytes", "rows"),
    }
    assert stats["new_tokens"] == 48
    assert stats["draft_acceptance_rate"] == stats["num_accepted_draft_tokens"] / stats["num_draft_tokens"]
    assert stats["flushes"] >= 2
    for name in ("prompt_tokens", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
        assert stats[name] == sum(row[name] for row in stats["rows"])


@pytest.mark.system
def test_methods_and_streaming_agree(run, directory):
    """Greedy: quantspec, its INT8 target one token at a time, and the streamed text are the same."""
    base = ["generate", "--model", directory, "--prompt", "class Reader:", *SETTINGS, "--dtype", "float32"]
    _, text, _ = run(*base)
    assert run(*base, "--stream")[1] == text
    assert run(*base, "--draft", "none", "--cache", "int8")[1] == text
    assert run(*base, "--draft", "quantspec")[1] == text
    assert run(*base, "--calibrate")[1] == text


def test_sampling_follows_the_seed(run, directory):
    base = ["generate", "--model", directory, "--prompt", "a", *SETTINGS, "--temperature", "1", "--top-k", "50", "--top-p", "0.9"]
    texts = [run(*base, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_seed_that_is_used_is_said(run, directory, caplog):
    base = ["generate", "--model", directory, "--prompt", "a", *SETTINGS]
    sampled = [*base, "--temperature", "1", "--top-k", "50", "--top-p", "0.9"]  # as above, so that programs are there
    code, text, _ = run(*sampled)
    assert code == 0 and "tokens are sampled with --seed 0; another seed gives another text" in caplog.messages
    caplog.clear()
    assert run(*sampled, "--seed", "0")[1] == text and run(*base)[0] == 0
    assert not any("--seed" in message for message in caplog.messages)


@pytest.mark.system
def test_equal_samples_are_said(run, directory, caplog, tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "a", "n": 2}))
    batch = ["batch", "--model", directory, *SETTINGS, "--overwrite", tmp_path / "in.jsonl", tmp_path / "out.jsonl"]
    for command in (["generate", "--model", directory, "--prompt", "a", *SETTINGS, "--samples", "2"], batch):
        for temperature, says in ((), True), (("--temperature", "1"), False):
            caplog.clear()
            assert run(*command, *temperature)[0] == 0
            assert any("because decoding is greedy" in message for message in caplog.messages) is says


@pytest.mark.system
def test_prompts_and_samples_are_counted_apart(run, directory, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for samples, said in ((3, "2 prompts, 4 samples, "), (1, "2 prompts, ")):
        source.write_text("".join(json.dumps({"prompt": "a", "n": n, "temperature": 1, "seed": 0}) + "\n" for n in (1, samples)))
        code, _, err = run("batch", "--model", directory, *SETTINGS, "--overwrite", source, out)
        assert code == 0 and f": {said}" in err and ("samples, " in err) == (samples > 1)
    (code, text, _) = run("batch", "--model", directory, *SETTINGS, "--overwrite", "--json", source, out)
    assert code == 0 and (json.loads(text)["prompts"], json.loads(text)["samples"]) == (2, 2)


@pytest.mark.system
def test_the_seed_of_lines_that_sample_is_said(run, directory, caplog, tmp_path):
    for own, says in (({}, True), ({"seed": 3}, False)):
        (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "a", "temperature": 1} | own) + "\n" + json.dumps({"prompt": "b"}))
        caplog.clear()
        code, _, _ = run("batch", "--model", directory, *SETTINGS, "--overwrite", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
        assert code == 0 and any("--seed 0" in message for message in caplog.messages) is says


def test_a_prompt_is_called_by_its_file(fails, directory, tmp_path):
    empty, long = tmp_path / "empty.txt", tmp_path / "long.txt"
    empty.write_text("")
    long.write_text("word " * 200)
    base = ["generate", "--model", directory, *SETTINGS, "--prompt", "a", "--prompt-file"]
    fails([*base, empty], f"error: {empty} is empty; it should have at least one token")
    fails([*base, long], f"error: {long} of ", "128 positions")


@pytest.mark.system
def test_float64_runs_in_a_process_of_its_own(directory):
    """The flag turns on 64-bit JAX for the whole process, so it is tried in another one."""
    command = [
        sys.executable,
        "-m",
        "qspec_jax.cli",
        "generate",
        "--model",
        directory,
        "--prompt",
        "ab",
        *SETTINGS,
        "--dtype",
        "float64",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert len(json.loads(done.stdout)["token_ids"][0]) == 24


def test_info(run, tmp_path):
    directory = write_checkpoint(tmp_path, hf_config(vocab_size=4096))
    code, out, _ = run("info", directory, "--context", 64, "--group-size", 16, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["architecture"] == "LlamaForCausalLM"
    shapes = tensor_shapes(hf_config(vocab_size=4096))
    assert found["parameters"] == sum(map(math.prod, shapes.values()))
    assert found["weight_bytes"] == 4 * found["parameters"]
    # 2 layers x keys and values x 2 heads x head_dim 64 x (64 tokens and 5 rows of a round) x 4 bytes.
    assert found["full_cache_bytes"] == 2 * 2 * 2 * 64 * (64 + 5) * 4
    model = load_model(directory)
    kept, drafted = model.weights(), quantize_head(quantspec(model).step.model).weights()
    own = [weight for path, weight in drafted.items() if weight is not kept.get(path)]
    assert found["draft_weight_bytes"] == sum(weight.nbytes for weight in own)
    code, out, _ = run("info", directory)
    assert code == 0
    assert "INT4 draft" in out


def test_demo(run, shallow, monkeypatch):
    monkeypatch.setattr(demo, "MODEL", shallow)
    command = ["demo", "--prompt-tokens", 60, "--max-new-tokens", 8, "--no-calibrate", "--temperature", 0]
    code, out, _ = run(*command, "--json")
    result = json.loads(out)
    assert code == 0
    assert result["file"] == "argparse.py"
    for method in ("quantspec", "autoregressive"):
        assert len(result[method]["token_ids"][0]) == 8
    code, out, _ = run(*command)
    assert code == 0
    for words in ("argparse.py", "acceptance rate", "mean acceptance length", "rounds", "tokens/s", "KV cache", "not its speed-up"):
        assert words in out.replace("\n", " ")


GENERATE = ["generate", "--prompt", "ab", *SETTINGS, "--model"]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--gamma", "-1"], "-1"),
        (["--temperature", "-0.5"], "-0.5"),
        (["--temperature", "nan"], "nan"),
        (["--top-p", "0"], "top_p 0"),
        (["--top-p", "1.5"], "top_p 1.5"),
        (["--top-k", "-2"], "-2"),
        (["--top-k", "99999999999"], "99999999999"),
        (["--gamma", "99999999999"], "99999999999"),
        (["--seed", "-1"], "--seed"),
        (["--max-new-tokens", "0"], "0"),
        (["--max-new-tokens", "x"], "x"),
        (["--group-size", "7"], "7"),
        (["--group-size", "0"], "0"),
        (["--draft", "magic"], "magic"),
        (["--dtype", "int8"], "int8"),
        (["--cache", "int2"], "cache 'int2' should be one of full, int8, kivi"),
        (["--cache", ""], "cache '' should be one of full, "),
        (["--cache", "int8:lower=host"], "'lower=host' should be one of host=none|lower|all, resident=..."),
        (["--cache", "full", "--draft", "sparse"], "int8 cache"),
        (["--cache", "kivi:residual=100,group=64"], "cache kivi: residual 100 should be a multiple of the group size, 64"),
        (["--draft", "streaming-llm:sinks=99999999999999999999"], "sinks 99999999999999999999 should be less than the model's 128"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--stream", "--json"], "--stream"),
        (["--stream", "--prompt", "b"], "--stream"),
        (["--prompt", ""], "prompt 1 is empty"),
        (["--prompt-file", "no/such/file"], "no/such/file"),
        (["--model", "./nope"], "error: ./nope: no such directory"),
        (["--prompt", "word " * 200], "128 positions"),
        (["--max-new-tokens", "128"], "ask for at most 127"),
        (["--calibrate", "--draft", "none"], "--calibrate"),
        (["--sensitive-layers", "1", "--draft", "none"], "--sensitive-layers"),
        (["--sensitive-layers", "3"], "the model's 1 layers"),
        (["--adaptive", "--draft", "none"], "--adaptive"),
        (["--draft-cost", "0.5"], "--adaptive"),
        (["--adaptive", "--draft-cost", "nan"], "draft_cost nan"),
        (["--top-logprobs", "2"], "--json"),
        (["--min-p", "2"], "min_p 2"),
        (["--repetition-penalty", "inf"], "repetition_penalty inf"),
        (["--min-new-tokens", "99999"], "min_new_tokens 99999"),
        (["--logit-bias", "5"], "'5'"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "twice"),
        (["--logit-bias", "5000=1"], "token id 5000"),
        (["--ban", "x"], "'x'"),
        (["--stop-token-ids", "1,-1"], "token id -1"),
        (["--stop", ""], "stop string"),
        (["--prompt", "a\udcff"], "surrogate"),
        (["--output", "no/such/folder/file"], "no/such/folder/file"),
    ],
)
def test_bad_flags_and_prompts(fails, directory, flags, word):
    fails([*GENERATE, directory, *flags], word)


def test_settings_reach_the_loop(run, directory):
    """Each changes what comes out as its name says; what there is without any, is banned, and favoured."""
    result = lambda *flags: json.loads(run(*GENERATE, directory, "--json", *flags)[1])
    plain = result()
    first = plain["token_ids"][0][0]
    assert plain.keys() == {"text", "token_ids", "finish_reason", "stats"}
    other = result("--ban", first, "--top-logprobs", 2)
    assert other["token_ids"][0][0] == other["top_logprobs"][0][0][1][0] != first == other["top_logprobs"][0][0][0][0]
    assert other["logprobs"][0][0] == other["top_logprobs"][0][0][1][1]
    assert set(result("--logit-bias", f"{other['token_ids'][0][0]}=1000")["token_ids"][0]) == {other["token_ids"][0][0]}


@pytest.mark.system
def test_settings_of_drafts_and_ends_reach_the_loop(run, directory):
    result = lambda *flags: json.loads(run(*GENERATE, directory, "--json", *flags)[1])
    ids = result()["token_ids"][0]
    stopped = result("--stop-token-ids", f"{ids[3]},{ids[4]}", "--adaptive", "--sensitive-layers", 1)
    assert stopped["token_ids"][0] == ids[:5] and stopped["finish_reason"] == ["stop"]
    assert result("--adaptive", "--draft-cost", 0.1, "--min-draft-confidence", 0.01)["token_ids"][0] == ids


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--model", "x", "--max-new-tokens", "1e3"],
        ["generate", "--model", "x", "--seed", "abc"],
        ["generate", "--model", "x", "--seed", "-1"],
        ["eval", "acceptance", "--temperature", "abc"],
        ["eval", "acceptance", "--texts", "0"],
        ["bench", "decode", "--simulate-acceptance", "92"],
        ["bench", "decode", "--simulate-acceptance", "nan"],
        ["bench", "decode", "--max-new-tokens", "4"],
    ],
)
def test_a_refused_number_is_named(fails, arguments):
    """With its option, whatever version of typer words it."""
    fails(arguments, *arguments[-2:])


def test_without_drafts_the_table_says_so(run, directory):
    code, _, err = run(*GENERATE, directory, "--gamma", 0)
    assert code == 0 and err.split()[0] == "none"


@pytest.mark.system
def test_acceptance_needs_drafts_and_room(fails):
    fails(["eval", "acceptance", "--gamma", "0", "--prompt-tokens", "64"], "--gamma 0")
    fails(["eval", "acceptance", "--max-new-tokens", "1", "--prompt-tokens", "64"], "max_new_tokens 1 should be at least 3")
    fails(["eval", "acceptance", "--prompt-tokens", "20000"], "8192 positions")
    fails(["demo", "--prompt-tokens", "20000"], "--prompt-tokens 20000", "8192 positions")
    fails(["demo", "--prompt-tokens", "8000"], "--max-new-tokens 256", "8192 positions")


def test_a_prompt_from_standard_input(run, directory, monkeypatch):
    given = run("generate", "--model", directory, "--prompt", "import os", "--max-new-tokens", 4)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"import os")))
    assert run("generate", "--model", directory, "--max-new-tokens", 4)[:2] == given[:2]


def test_no_prompt_and_no_model(fails, directory, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    fails(["generate", "--model", directory], "a prompt is needed: --prompt")
    fails(["generate", "--prompt", "a"], "--model")
    fails([*GENERATE, "no/such/model"], "no/such/model")
    fails(["info", "no/such/model"], "no/such/model")
    fails(["info", directory, "--context", "0"], "context 0")
    fails(["no-such-command"], "no-such-command")


def test_prompt_files_that_are_no_text(fails, directory, tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    empty = tmp_path / "empty"
    empty.write_text("")
    fails(["generate", "--model", directory, "--prompt-file", binary], binary)
    fails(["generate", "--model", directory, "--prompt-file", tmp_path], tmp_path)
    fails(["generate", "--model", directory, "--prompt-file", empty], "empty")
    fails(["generate", "--model", directory, "--prompt-file", "-", "--prompt-file", "-"], "--prompt-file -", "once")


def test_a_prompt_from_standard_input_or_with_a_byte_order_mark(fails, directory, tmp_path, monkeypatch):
    marked = tmp_path / "marked"
    marked.write_bytes(b"\xef\xbb\xbfdef main():\r\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def main():\n")))
    assert read_texts("--prompt-file", [marked, Path("-")]) == ["def main():\n"] * 2
    monkeypatch.setattr(sys, "stdin", None)
    fails(["generate", "--model", directory, "--prompt-file", "-"], "standard input: cannot be read (it is closed)")


def test_broken_checkpoints(fails, directory, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(directory, broken)
    whole = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    fails([*GENERATE, broken], "model.safetensors")
    (broken / "model.safetensors").unlink()
    fails([*GENERATE, broken], "model.safetensors", "missing")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    fails([*GENERATE, broken], "GPT2LMHeadModel")
    (broken / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}))
    fails([*GENERATE, broken], "spiral")
    (broken / "config.json").write_text("{")
    fails([*GENERATE, broken], "config.json")


def test_help_names_every_command(run):
    code, out, _ = run("--help")
    assert code == 0
    for command in ("demo", "generate", "info", "eval", "bench"):
        assert command in out


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0 and out.startswith("qspec-jax ") and "(jax " in out
    loaded = "import sys; from qspec_jax.cli import main; from qspec_jax import InputError; print({'jax', 'typer'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"  # so it is quick, and signals are taken care of before what is slow


def every_command(command, path=("qspec",)):
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from every_command(below, (*path, name))


COMMANDS = {" ".join(path): command for path, command in every_command(typer.main.get_command(app))}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal(name):
    """At 80 columns no option's name and no command's summary is cut off."""
    command = COMMANDS[name]
    context = command.make_context(name.split()[-1], [], resilient_parsing=True, terminal_width=80)
    lines = command.get_help(context).splitlines()
    assert [line for line in lines if "\N{HORIZONTAL ELLIPSIS}" in line or (line.endswith("...") and not line.startswith("Usage"))] == []
    shown = [parameter for parameter in command.params if not parameter.hidden]
    options = [name for parameter in shown for name in parameter.opts if name.startswith("--")]
    assert all(any(word.strip(",") == name for line in lines for word in line.split()) for name in options)
    assert all(len(line) <= 80 or line.lstrip().startswith("--") for line in lines)


def test_a_group_size_that_makes_no_difference(run, caplog):
    base = ["generate", "--model", "no/such", "--prompt", "a", "--group-size", 64, "--cache"]
    for cache, warned in (("h2o:heavy=3", True), ("full", True), ("int8", False), ("kivi", False), ("kivi:group=16", True)):
        caplog.clear()
        assert run(*base, cache)[0] == 2
        own = " with its own group=16" if "group" in cache else ""
        words = [f"--group-size 64 makes no difference to cache {cache.partition(':')[0]}{own}"]
        assert [record.getMessage() for record in caplog.records] == (words if warned else [])


def test_a_cache_in_host_memory_is_for_one_device(run, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(cli_batch, "devices_of", lambda text: jax.devices()[:1] * 8)
    for cache, words in (
        ("int8:host=lower", ["cache int8:host=lower: one device of 8 is used, as they would share host memory"]),
        ("int8", []),
    ):
        caplog.clear()
        assert run("batch", "no/such", tmp_path / "out", "--model", "no/such", "--cache", cache)[0] == 2
        assert [record.getMessage() for record in caplog.records] == words
