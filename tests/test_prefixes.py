"""Lines with a prefix and with several samples: tokens, cuts, results, what is refused, and runs that go on."""

import dataclasses
import json
import logging
from pathlib import Path

import jax
import pytest
from runs import random_model

from qspec_jax import demo
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding import reading, shared_prefixes
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.device_memory import bytes_of_round
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.journal import Journal
from qspec_jax.decoding.jsonl import Line, as_line, first_with_prefix, read_lines
from qspec_jax.decoding.prefixes import Prefixes
from qspec_jax.decoding.prepare import prepare
from qspec_jax.decoding.reading import extend, prefill
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.run_lines import line_of_rows, prepare_lines
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.step_bytes import bytes_in_loop

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
# As those that remove the reasoning of earlier answers.
REWRITES = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:6] }}")
G = 8

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(scope="module")
def network():
    """One layer compiles in half the time."""
    return random_model("float64", vocab_size=4096, num_hidden_layers=1)


@pytest.fixture(scope="module")
def config(network):
    """Its states have a pool so large that it never grows: programs are compiled for its size."""
    draft = make_draft("quantspec", network)
    sizes = dict(group_size=G, num_speculative_tokens=3, max_new_tokens=6, ignore_eos=True)
    made = GenerationConfig(draft=draft, cache="int8", temperature=0.8, **sizes)
    pool = prefill(network, [1, 2, 3], config=made, room=20).reader.pool
    pool.make_room(100)
    yield made


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo.MODEL)


def with_template(template: str):
    tokenizer = load_tokenizer(demo.MODEL)
    tokenizer.chat_template = template
    return tokenizer


def read(network, tokenizer, config, *said: dict, folder=None) -> list[Line]:
    content = "\n".join(map(json.dumps, said)).encode()
    return read_lines(content, network, tokenizer, config, 0, prefixes=Prefixes(tokenizer, folder))


def outputs(network, tokenizer, config, lines, size) -> list[str]:
    """What is written for these lines."""
    prepared, owners, found = prepare_lines(network, tokenizer, lines, config, size, on_ray=False, shared=True), line_of_rows(lines), {}
    for result in run_batch(network, prepared, batch_size=size):
        found[result.index] = result
    return [json.dumps(as_line(line, [found[row] for row in sorted(found) if owners[row] == i], tokenizer)) for i, line in enumerate(lines)]


def test_the_cut_and_the_tokens(network, tokenizer, config, tmp_path):
    """A rest has its blank and no BOS, and tokens do not merge over the cut."""
    (tmp_path / "doc.txt").write_bytes(b"\xef\xbb\xbfimport os")
    ids = tokenizer("import os")["input_ids"]
    for prefix in ("import os", {"file": "doc.txt"}, ids, list(map(float, ids))):
        text, given, nothing = read(
            network,
            tokenizer,
            config,
            {"prefix": prefix, "prompt": " as x"},
            {"prefix": prefix, "token_ids": [5, 6]},
            {"prefix": prefix, "prompt": ""},
            folder=tmp_path,
        )
        assert text.request.prefix == given.request.prefix == nothing.request.prefix == len(ids)
        assert tokenizer.decode(text.request.tokens[len(ids) :]) == " as x" and given.request.tokens == [*ids, 5, 6]
        assert text.request.tokens[: len(ids)] == nothing.request.tokens == ids
    (line,) = read(network, tokenizer, config, {"prefix": "impo", "prompt": "rt"})
    assert line.request.tokens != tokenizer("import")["input_ids"] and tokenizer.decode(line.request.tokens) == "import"


@pytest.mark.parametrize("template", [TEMPLATE, REWRITES])
def test_messages_are_one_conversation(template, network, config, caplog):
    """The prefix ends where the template changes it, and the log says so once."""
    tokenizer = with_template(template)
    prefix, rest = ([{"role": "user", "content": content}] for content in ("a text that goes on", "and more"))
    with caplog.at_level(logging.WARNING, "qspec_jax"):
        one, two = read(network, tokenizer, config, *({"prefix": prefix, "messages": rest} for _ in range(2)))
    whole = tokenizer.apply_chat_template([*prefix, *rest], add_generation_prompt=True, return_dict=True)["input_ids"]
    alone = tokenizer.apply_chat_template(prefix, add_generation_prompt=False, return_dict=True)["input_ids"]
    assert one.request.tokens == whole and one.request.prefix == two.request.prefix > 0
    assert whole[: one.request.prefix] == alone[: one.request.prefix]
    assert (one.request.prefix == len(alone)) == (template == TEMPLATE)
    assert len([record for record in caplog.records if "the chat template changes" in record.message]) == (template == REWRITES)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"prefix": "", "prompt": "a"}, "the prefix is empty"),
        ({"prefix": [], "prompt": "a"}, "the prefix is empty"),
        ({"prefix": 3, "prompt": "a"}, "prefix should be a text, a list of token ids, "),
        ({"prefix": [1, "a"], "prompt": "a"}, "prefix should be a text, a list of token ids, "),
        ({"prefix": {"path": "x"}, "prompt": "a"}, "prefix should be a text, a list of token ids, "),
        ({"prefix": "a", "messages": [{"role": "user", "content": "x"}]}, "a list of messages where the line has messages, not 'a'"),
        ({"prefix": [{"role": "user", "content": "x"}], "prompt": "a"}, "a list of messages where the line has messages"),
        ({"prefix": {"file": "none.txt"}, "prompt": "a"}, "none.txt: cannot be read"),
        ({"prefix": {"file": "."}, "prompt": "a"}, "should be a file"),
        ({"prefix": {"file": "bytes"}, "prompt": "a"}, "bytes is not in UTF-8 (its byte 2)"),
        ({"prefix": [5000], "prompt": "a"}, "outside the vocabulary"),
        ({"prefix": "a"}, "should have one of prompt, token_ids, messages"),
        ({"prompt": "a", "n": 0}, "n 0 should be from 1 to 1,024"),
        ({"prompt": "a", "n": 1025}, "n 1025 should be from 1 to 1,024"),
        ({"prompt": "a", "n": 1.5}, "n should be a whole number"),
    ],
)
def test_what_is_refused(said, words, network, tokenizer, config, tmp_path):
    (tmp_path / "bytes").write_bytes(b"a\xff")
    wrong, right = read(network, tokenizer, config, said, {"prompt": "a"}, folder=tmp_path)
    assert words in wrong.error and wrong.request is None and right.error is None


def test_a_file_that_changes_while_it_is_read(network, tokenizer, config, tmp_path, monkeypatch):
    (tmp_path / "doc").write_text("abc")
    read_bytes = Path.read_bytes

    def changing(path):
        content = read_bytes(path)
        (tmp_path / "doc").write_text("abcd")
        return content

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", changing)
        (line,) = read(network, tokenizer, config, {"prefix": {"file": "doc"}, "prompt": "a"}, folder=tmp_path)
    assert "was changed while it was read" in line.error


@pytest.mark.system
def test_results_depend_on_the_line_alone(network, tokenizer, config, monkeypatch):
    """Not on neighbours, order, batch size or what shares the prefix; each prefix is read once, and is gone before the next one is read."""
    document, other = "import os\n\ndef main(path):\n    return os.path", "class Other:\n    pass"
    said = [
        {"prefix": document, "prompt": ".join(path)", "n": 3},
        {"prompt": "def quick", "n": 2, "seed": 4},
        {"prefix": other, "prompt": "\n\n", "n": 2},
        {"prefix": document, "prompt": " + path", "seed": 9},
        {"prompt": "print(", "temperature": 0},
        {"prefix": other, "prompt": "", "seed": 3, "n": 2},
    ]
    lines = read(network, tokenizer, config, *said)
    alone = [outputs(network, tokenizer, config, [line], 1)[0] for line in lines]
    read_prefixes, of_prefix = [], shared_prefixes.state_of_prefix

    def counted(prepared, on_compile):
        read_prefixes.append(tuple(prepared.requests[0].tokens[: prepared.requests[0].prefix]))
        return of_prefix(prepared, on_compile)

    monkeypatch.setattr(shared_prefixes, "state_of_prefix", counted)
    for order, size in ((range(6), 2), ([5, 3, 1, 0, 4, 2], None)):
        read_prefixes.clear()
        assert outputs(network, tokenizer, config, [lines[i] for i in order], size) == [alone[i] for i in order]
        assert len(read_prefixes) == len(set(read_prefixes)) == 3
    three = json.loads(alone[0])["samples"]
    assert len({tuple(sample["token_ids"]) for sample in three}) == 3 and "samples" not in json.loads(alone[3])
    # Sample 1 of a line is not sample 0 of another, and sample 0 is the line's without `n`.
    (bare,) = read(network, tokenizer, config, {name: value for name, value in said[0].items() if name != "n"})
    assert json.loads(outputs(network, tokenizer, config, [bare], 1)[0])["token_ids"] == three[0]["token_ids"]
    # Where nothing is shared, samples of a prompt are the same.
    plain = prepare_lines(network, tokenizer, [lines[1]], config, 2, on_ray=False, shared=False)
    found = sorted(run_batch(network, plain, batch_size=2), key=lambda result: result.index)
    assert [result.token_ids for result in found] == [sample["token_ids"] for sample in json.loads(alone[1])["samples"]]
    # The straight way.
    greedy = dataclasses.replace(config, temperature=0.0)
    (line,) = read(network, tokenizer, greedy, said[3])
    state = extend(prefill(network, document, config=greedy, tokenizer=tokenizer, room=20), " + path", tokenizer=tokenizer)
    expected = generate(network, state, config=greedy, tokenizer=tokenizer).token_ids[0]
    assert json.loads(outputs(network, tokenizer, greedy, [line], 1)[0])["token_ids"] == expected


@pytest.mark.system
def test_rows_that_fit_beside_a_prefix(network, config, monkeypatch):
    """By the largest requests, with pages for what follows the prefix alone."""
    tokens = list(range(3, 43))
    requests = [
        Request([*tokens, *range(length)], dataclasses.replace(config, max_new_tokens=new), jax.random.key(0), prefix=40)
        for length, new in ((4, 8), (40, 30), (8, 8))
    ]
    prepared = prepare(network, requests)
    prefix = reading.state_of_prefix(prepared, lambda seconds: None)
    assert shared_prefixes.rows_that_fit(prepared, prefix) == 3  # the device does not say
    pool, per_layer = prefix.reader.pool, 2 * network.config.num_kv_heads * G * network.config.head_dim
    of_page = pool.num_bytes // pool.pages.size
    assert of_page > network.config.num_layers * per_layer  # keys and values of a group, a byte for each number
    own = 2 * prefix.num_bytes + bytes_of_round(network.config, 3)
    pages = [prefix.reader.schedule.max_flushes(length) - len(prefix.pages) for length in (110, 56, 52)]
    assert pages[0] > pages[1] >= pages[2] >= 0
    for rows in range(4):
        free = bytes_in_loop(prepared.draft) + rows * own + sum(pages[:rows]) * of_page
        monkeypatch.setattr(shared_prefixes, "free_bytes", lambda mesh, free=free: free)
        assert shared_prefixes.rows_that_fit(prepared, prefix) == max(rows, 1)
    monkeypatch.setattr(shared_prefixes, "free_bytes", lambda mesh: free - 1)
    assert shared_prefixes.rows_that_fit(prepared, prefix) == 2
    run = run_batch(network, prepared, batch_size=None)
    assert len(list(run)) == 3 and run.stats.batch_size == 2


@pytest.mark.system
def test_samples_in_openais_form(network, tokenizer, config):
    body = {"model": "m", "prompt": "import", "n": 3, "max_tokens": 4}
    (line,) = read(network, tokenizer, config, {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": body})
    found = json.loads(outputs(network, tokenizer, config, [line], 2)[0])
    choices, usage = found["response"]["body"]["choices"], found["response"]["body"]["usage"]
    assert found["custom_id"] == "r" and [choice["index"] for choice in choices] == [0, 1, 2] and len({c["text"] for c in choices}) > 1
    assert usage == {"prompt_tokens": 1, "completion_tokens": 12, "total_tokens": 13}


def test_the_first_line_with_a_prefix():
    assert first_with_prefix(b'{"prompt": "prefix"}\n{"prefix": null}\nprefix\n{"prefix": "a"}') == 4
    assert first_with_prefix(b'{"prompt": "a"}') is None


COMMAND = ["--max-new-tokens", "4", "--draft", "none", "--dtype", "float32", "--json"]


def test_a_run_and_its_files(run, fails, shallow, tmp_path, monkeypatch):
    """A file belongs to the run; lines with a prefix are refused on Ray and on several devices before anything is loaded."""
    source, out, document = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "doc.txt"
    document.write_text("import os\n")
    said = [
        {"prefix": {"file": "doc.txt"}, "prompt": "import ", "temperature": 1.0},
        {"prefix": {"file": "no.txt"}, "prompt": "a"},
        {"prefix": {"file": "doc.txt"}, "prompt": "def "},
    ]
    source.write_text("\n".join(map(json.dumps, said)))
    command = ["batch", str(source), str(out), "--model", str(shallow), *COMMAND, "--seed", "1", "--samples", "2"]
    fails(command, "line 2: the prefix file", "no.txt: cannot be read")
    fails([*command[:3], "--model", "/nowhere", "--ray", "local"], "line 1: lines with a prefix are decoded on one device, and --ray works")
    with monkeypatch.context() as patch:
        patch.setattr("qspec_jax.cli.batch.devices_of", lambda devices: jax.devices() * 2)
        fails(
            [*command[:3], "--model", "/nowhere"],
            "line 1: lines with a prefix are decoded on one device, and there are 2; give --devices 1",
        )
    monkeypatch.chdir("/")
    code, said, _ = run(*command, "--on-error", "skip")
    first, second, third = map(json.loads, out.read_text().splitlines())
    assert code == 0 and (json.loads(said)["prompts"], json.loads(said)["samples"]) == (2, 4) and "no.txt" in second["error"]
    assert len(first["samples"]) == len(third["samples"]) == 2 and third["samples"][0] == third["samples"][1]
    whole = out.read_text()
    # A run that was killed after its first line goes on; with another text in the file it is another run.
    add, kept = Journal.add, []

    def killed(self, result):
        if result["line"] != 2 and kept:
            raise KeyboardInterrupt
        kept.extend([result] * (result["line"] != 2))
        add(self, result)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", killed)
        run(*command, "--on-error", "skip", "--overwrite")
    out.unlink(missing_ok=True)
    document.write_text("import re\n")
    code, _, error = run(*command, "--on-error", "skip")
    assert code == 2 and "is of a run with other prompts" in error
    document.write_text("import os\n")
    code, said, _ = run(*command, "--on-error", "skip")
    assert json.loads(said)["done_before"] == 1 and out.read_text() == whole
    sampled = ["--prompt", "import", "--samples", "2", "--temperature", "1", "--seed", "1"]
    code, said, _ = run("generate", "--model", shallow, *COMMAND[:-1], *sampled)
    assert code == 0 and said.startswith("=== sample 0 ===\n") and "=== sample 1 ===\n" in said
