"""Files of prompts: what a line may say, `qspec batch` over them, and runs that were killed and go on."""

import dataclasses
import io
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import jax
import processes
import pytest

from convert.to_orbax import convert
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.journal import DEPENDS_ON, Journal
from qspec_jax.decoding.jsonl import KEYS, Columns, Line, as_wrong, read_lines
from qspec_jax.decoding.prefixes import Prefixes
from qspec_jax.decoding.run_identity import of_checkpoint
from qspec_jax.decoding.run_lines import MAX_REPORTED_LINES
from qspec_jax.errors import InputError

CONFIG = GenerationConfig(draft="quantspec", group_size=8, ignore_eos=True, num_speculative_tokens=3)
RUN = dict.fromkeys(DEPENDS_ON, "a hash")


GOOD = [
    {"prompt": "def main():", "max_new_tokens": 9, "id": "first"},
    {"token_ids": [5, 6, 7], "temperature": 0.8, "seed": 4},
    {"prompt": "import", "stop": ["\n"], "max_new_tokens": 30, "id": 3},
    {"token_ids": [1], "stop_token_ids": [[2, 3]], "temperature": 1.0, "top_k": 5, "top_p": 0.9},
]
BAD = {
    "": "empty",
    "{": "not JSON",
    "[" * 10**5: "not JSON",
    "3": "should be a JSON object",
    '{"prompt": "x", "best": 3}': "unknown key 'best'",
    '{"prompt": "x", "prompt": "y"}': "'prompt' is given twice",
    '{"token_ids": [' + "9" * 5000 + "]}": "a number has too many digits",
    '{"max_new_tokens": 3}': "has none",
    '{"prompt": "x", "token_ids": [1]}': "has prompt and token_ids",
    '{"prompt": ""}': "is empty",
    '{"prompt": 3}': "prompt should be a text",
    '{"token_ids": [1, true]}': "list of whole numbers",
    '{"token_ids": [4096]}': "outside the vocabulary",
    '{"token_ids": [1], "max_new_tokens": 1000}': "positions",
    '{"token_ids": [1], "max_new_tokens": 0}': "at least 1",
    '{"token_ids": [1], "max_new_tokens": 2.5}': "whole number",
    '{"token_ids": [1], "id": NaN}': "NaN is no number in JSON",
    '{"token_ids": [1], "logit_bias": {"1": -Infinity}}': "-Infinity is no number in JSON",
    '{"token_ids": [1], "id": 1e999}': "1e999 is too large a number",
    '{"token_ids": [1], "temperature": -1}': "temperature",
    '{"token_ids": [1], "temperature": "hot"}': "temperature should be a number",
    '{"token_ids": [1], "seed": -1}': "seed",
    '{"token_ids": [1], "stop": ""}': "stop",
    '{"token_ids": [1], "stop": [3]}': "stop",
    '{"token_ids": [1], "stop_token_ids": [3]}': "stop_token_ids",
    '{"token_ids": [1], "stop_token_ids": [[4096]]}': "outside the vocabulary",
    '{"token_ids": [1], "logit_bias": {"x": 1}}': "logit_bias",
    '{"token_ids": [1], "logit_bias": {"' + "9" * 5000 + '": 1}}': "logit_bias",
    '{"token_ids": [1], "temperature": 1' + "0" * 400 + "}": "too large",
    '{"prompt": "\\ud800"}': "surrogate",
    '{"token_ids": [1], "logit_bias": {"1": "much"}}': "logit_bias should be a number",
    '{"token_ids": [1], "banned_token_ids": [-1]}': "outside the vocabulary",
    '{"token_ids": [1], "min_p": 2}': "min_p",
    '{"token_ids": [1], "repetition_penalty": 0}': "repetition_penalty",
    '{"token_ids": [1], "min_new_tokens": 3, "max_new_tokens": 2}': "min_new_tokens",
    '{"token_ids": [1], "output_logprobs": 1}': "output_logprobs",
    '{"token_ids": [1], "top_logprobs": 5000}': "top_logprobs",
    '{"messages": [{"role": "user", "content": "x"}]}': "chat template",
}


def command(directory, source, output, *more) -> list[str]:
    flags = ["--model", directory, "--group-size", "8", "--max-new-tokens", "12", "--gamma", "3", "--ignore-eos", "--json"]
    flags += [] if "--draft" in more else ["--draft", "quantspec"]
    return ["batch", str(source), str(output), *map(str, flags), *map(str, more)]


def test_a_file_of_prompts(run, directory, model, tokenizer, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    # With a byte order mark, and blank lines at its end.
    source.write_text("\ufeff" + "\n".join(map(json.dumps, GOOD)) + "\n\n \n")
    code, said, _ = run(*command(directory, source, out))
    report = json.loads(said)
    assert code == 0 and (report["lines"], report["wrong"], report["prompts"]) == (4, 0, 4)
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(result["line"], result.get("id")) for result in results] == [(1, "first"), (2, None), (3, 3), (4, None)]
    assert [len(result["token_ids"]) for result in results[:2]] == [9, 12] and "\n" not in results[2]["text"]
    config = dataclasses.replace(CONFIG, max_new_tokens=12)
    requests = [line.request for line in read_lines(source.read_bytes(), model, tokenizer, config, 0)]
    for result, expected in zip(results, sorted(run_batch(model, requests, tokenizer=tokenizer), key=lambda result: result.index)):
        expected = dataclasses.asdict(expected)
        assert {name: expected[name] for name in ("text", "token_ids", "finish_reason", "stats")}.items() <= result.items()
    assert report["new_tokens"] == sum(len(result["token_ids"]) for result in results)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_seed_makes_a_line_its_own(model, tokenizer, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(json.dumps({"token_ids": [1], "seed": seed}) for seed in (1, 2, 1)) + '\n{"token_ids": [1]}')
    config = dataclasses.replace(CONFIG, max_new_tokens=9)
    one, two, three, four = (line.request.key for line in read_lines(source.read_bytes(), model, tokenizer, config, 0))
    assert one == three != two and four == jax.random.fold_in(jax.random.key(0), 3)


WHOLE = {
    "max_new_tokens": (7.0, 7),
    "min_new_tokens": (3.0, 3),
    "top_k": (4.0, 4),
    "top_logprobs": (2.0, 2),
    "banned_token_ids": ([8.0, 9], [8, 9]),
    "stop_token_ids": ([[1.0, 2.0]], [[1, 2]]),
    "seed": (5.0, 5),
    "token_ids": ([5.0, 6], [5, 6]),
    "logit_bias": ({"5": 1, "6": None}, {"5": 1.0}),
}

REFUSED = Columns()


def read(model, tokenizer, *said: dict, columns: Columns = REFUSED, **settings) -> list[Line]:
    config = dataclasses.replace(CONFIG, max_new_tokens=9, **settings)
    return read_lines("\n".join(map(json.dumps, said)).encode(), model, tokenizer, config, 0, columns=columns)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_as_data_frames_write_them(name, model, tokenizer):
    prompt = {} if name == "token_ids" else {"token_ids": [5, 6]}
    found, expected = (read(model, tokenizer, prompt | {name: value})[0] for value in WHOLE[name])
    assert found.request == expected.request and found.error is None
    assert all(type(token) is int for token in found.request.tokens)
    if name != "logit_bias":
        broken = json.loads(json.dumps({name: WHOLE[name][0]}).replace(".0", ".5"))
        (line,) = read(model, tokenizer, prompt | broken)
        assert name in line.error and "whole number" in line.error


def test_null_is_as_an_absent_key(model, tokenizer):
    absent = dict.fromkeys(KEYS)
    bare, nulls = (read(model, tokenizer, more | {"token_ids": [5, 6]}, temperature=0.5, top_k=3)[0] for more in ({}, absent))
    assert nulls == bare and nulls.request
    assert read(model, tokenizer, {"token_ids": [5], "answer": None, "custom_id": None})[0].error is None
    assert "has none" in read(model, tokenizer, absent)[0].error
    assert read(model, tokenizer, {"token_ids": [5], "top_k": -1}, top_k=3)[0].request.config.top_k == 0
    assert "top_k" in read(model, tokenizer, {"token_ids": [5], "top_k": -2})[0].error


def test_columns_of_a_data_set(model, tokenizer, caplog):
    said = [{"prompt": "x", "answer": {"n": None}, "level": 3.0, "seed": 1}, {"prompt": 3, "answer": None}, {"prompt": "x", "lvel": 1}]
    refused = read(model, tokenizer, *said)
    assert all(word in refused[0].error for word in ("unknown key 'answer'", "--ignore-columns", "--pass-columns NAME,..."))
    some = read(model, tokenizer, *said, columns=Columns(passed=("answer", "level", "seed")))
    assert some[0].error is None and some[0].passed == {"answer": {"n": None}, "level": 3.0, "seed": 1}
    assert as_wrong(some[1]) == {"line": 2, "answer": None, "error": "prompt should be a text"} and "unknown key 'lvel'" in some[2].error
    assert not caplog.messages
    all_taken = read(model, tokenizer, *said[:1], said[2], columns=Columns(ignore=True, passed=("nowhere",)))
    assert [line.error for line in all_taken] == [None, None]
    assert caplog.messages == [
        "no line has the key 'nowhere', which should be passed through",
        "keys that are ignored: answer, level, lvel",
    ]
    for taken in ("text", "line", "id"):
        with pytest.raises(InputError, match=f"column '{taken}' cannot be passed through: the output has a key of that name"):
            Columns(passed=("level", taken))


def test_columns_and_lines_of_openai_in_a_file(run, fails, directory, tmp_path, monkeypatch):
    """Beside lines of our own, and over a restart; what is passed through belongs to the run."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "import", "max_tokens": 5}
    said = [
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body, "level": 1},
        {"prompt": "import", "max_new_tokens": 5, "level": 2},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body | {"n": 0}, "level": 3},
    ]
    source.write_text("\n".join(map(json.dumps, said)))
    asked = command(directory, source, out, "--on-error", "skip", "--pass-columns", "level", "--batch-size", 1)
    add = Journal.add
    ends = lambda journal, result: add(journal, result) or (signal.raise_signal(signal.SIGINT) if result["line"] == 1 else None)
    monkeypatch.setattr(Journal, "add", ends)
    assert run(*asked)[0] == 130
    monkeypatch.undo()
    fails([*asked, "--ignore-columns"], "is of a run with other settings")
    code, report, _ = run(*asked)
    assert code == 0 and json.loads(report)["done_before"] == 1 and json.loads(report)["wrong"] == 1
    first, own, wrong = map(json.loads, out.read_text().splitlines())
    answer = first["response"]["body"]
    assert answer["choices"][0]["text"] == own["text"] and answer["usage"]["completion_tokens"] == 5 == len(own["token_ids"])
    assert (first["custom_id"], wrong["custom_id"], first["error"]) == ("a", "c", None) and "n 0" in wrong["error"]["message"]
    assert [each["level"] for each in (first, own, wrong)] == [1, 2, 3] and "line" not in first
    fails([*asked, "--overwrite", "--pass-columns", "stats"], "--pass-columns: column 'stats' cannot be passed through")
    fails([*asked, "--overwrite", "--pass-columns", "a,"], "--pass-columns 'level,a,' should be names with commas between them")


def test_messages_go_through_the_chat_template(model, directory, tmp_path):
    tokenizer = load_tokenizer(directory)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    source = tmp_path / "in.jsonl"
    tokenizer.chat_template = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + tokenizer.chat_template
    said = [{"role": "user", "content": "hi"}], [3], [{"role": "tool", "content": "x"}]
    source.write_text("\n".join(json.dumps({"messages": messages}) for messages in said))
    config = dataclasses.replace(CONFIG, max_new_tokens=9)
    good, bad, unfit = read_lines(source.read_bytes(), model, tokenizer, config, 0)
    assert good.request.tokens == tokenizer("user: hi\nassistant:")["input_ids"]
    assert bad.error == "messages should be a list of objects with role and content, and message 0 is 3"
    assert "do not fit the chat template (TemplateError: no tools)" in unfit.error


def test_lines_that_exact_bits_is_not_for(model):
    """Each for itself; the others are decoded."""
    said = {"token_ids": [3]}, {"token_ids": [3], "n": 2}, {"token_ids": [5], "prefix": [3]}
    config = dataclasses.replace(CONFIG, exact="bits", draft="none", max_new_tokens=9)
    good, *wrong = read_lines("\n".join(map(json.dumps, said)).encode(), model, None, config, 0, prefixes=Prefixes(None, Path()))
    assert good.error is None and good.request.config.exact == "bits"
    for line, words in zip(wrong, ("(samples) is 2", "not for a prompt with a prefix"), strict=True):
        assert words in line.error


def test_lines_that_are_wrong(run, fails, directory, tmp_path, caplog):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([json.dumps(GOOD[0]), *BAD, json.dumps(GOOD[1])]))
    fails(command(directory, source, out), f"{source}, line 2: empty (and {len(BAD) - 1} more; --on-error skip does the other lines)")
    assert not out.exists()
    code, said, _ = run(*command(directory, source, out, "--on-error", "skip", "--draft", "none"))
    assert code == 0 and (report := json.loads(said))["wrong"] == len(BAD) and report["prompts"] == 2
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert (
        [result["line"] for result in results] == list(range(1, len(BAD) + 3)) and "token_ids" in results[0] and "token_ids" in results[-1]
    )
    for number, (result, named) in enumerate(zip(results[1:-1], BAD.values()), start=2):
        assert named in result["error"]
        assert (f"{source}, line {number}: {result['error']}" in caplog.messages) == (number < 2 + MAX_REPORTED_LINES)
    assert f"{source}: {len(BAD) - MAX_REPORTED_LINES} more lines are wrong; OUTPUT says why" in caplog.messages


def test_files_that_are_not_there_or_are_in_the_way(fails, directory, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    fails(command(directory, source, out), source, "cannot be read")
    source.write_text("")
    fails(command(directory, source, out), source, "empty")
    source.write_text('{"token_ids": [1]}')
    fails(command(directory, source, tmp_path / "no" / "out.jsonl"), "cannot be written")
    out.write_text("mine")
    fails(command(directory, source, out), out, "exists already")
    fails([*command(directory, source, source), "--overwrite"], source, "same file")
    fails([*command(directory, source, tmp_path), "--overwrite"], tmp_path, "is a folder")
    assert out.read_text() == "mine"
    out.unlink()
    out.symlink_to(out)
    fails(command(directory, source, out), out, "a loop of symbolic links")


def test_standard_input_is_read_once(run, fails, directory, tmp_path, monkeypatch):
    """A restart with the same content goes on; one with another is refused. Half a character in an id stays as it is."""
    out, content = tmp_path / "out.jsonl", b'{"token_ids": [1], "id": "\\udcff"}\n{"token_ids": [2]}\n'
    piped = lambda content: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    add = Journal.add
    monkeypatch.setattr(Journal, "add", lambda journal, result: add(journal, result) or signal.raise_signal(signal.SIGINT))
    piped(content)
    code, _, err = run(*command(directory, "-", out, "--batch-size", 1))
    assert code == 130 and f"qspec: interrupted; the same command, with the same input, goes on from {out}.partial\n" in err
    monkeypatch.undo()
    piped(content.replace(b"2", b"3"))
    fails(command(directory, "-", out), "is of a run with other prompts; --overwrite drops the 1 lines that are done there")
    piped(content)
    code, said, _ = run(*command(directory, "-", out))
    assert code == 0 and json.loads(said)["done_before"] == 1
    assert [(found["line"], found.get("id")) for found in map(json.loads, out.read_text().splitlines())] == [(1, "\udcff"), (2, None)]
    piped(b"\n")
    fails(command(directory, "-", tmp_path / "other"), "standard input: empty")


def test_an_output_that_is_a_link_or_a_device(run, directory, tmp_path, monkeypatch):
    """A device is not replaced; results through a link are in the file that it names, the journal beside that."""
    source, link, target, fifo = tmp_path / "in.jsonl", tmp_path / "link", tmp_path / "folder" / "target", tmp_path / "fifo"
    source.write_text('{"token_ids": [1]}')
    target.parent.mkdir()
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    paths, add = [], Journal.add
    monkeypatch.setattr(Journal, "add", lambda journal, result: paths.append(journal.path) or add(journal, result))
    assert run(*command(directory, source, link, "--overwrite"))[0] == 0
    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o640 and list(target.parent.iterdir()) == [target]
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    assert run(*command(directory, source, fifo))[0] == 0
    assert os.read(reader, 1 << 16).decode() == target.read_text() and fifo.is_fifo()
    os.close(reader)
    null = tmp_path / "null"  # a link: whatever goes wrong, the device itself is left
    null.symlink_to("/dev/null")
    assert run(*command(directory, source, null, "--overwrite"))[0] == 0 and null.is_symlink()
    assert paths == [target.with_name("target.partial"), None, None]


def test_a_run_belongs_to_its_checkpoint(directory, tmp_path):
    """Its hash sees every file that results depend on, and no other."""
    model = tmp_path / "model"
    shutil.copytree(directory, model)
    seen = [of_checkpoint(model)]
    (model / "README.md").write_text("new")
    assert of_checkpoint(model) == seen[0]
    (model / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "additional_chat_templates/tool.jinja"):
        (model / name).write_text("new")
        seen.append(of_checkpoint(model))
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # in the last row of a weight
    weights.unlink()
    (tmp_path / "blob").write_bytes(content)
    weights.symlink_to(tmp_path / "blob")
    seen.append(of_checkpoint(model))
    convert(directory, tmp_path / "converted", progress=False)
    seen.append(of_checkpoint(tmp_path / "converted"))
    stored = next(path for path in (tmp_path / "converted" / "target").rglob("*") if path.is_file())
    os.utime(stored, (1, 1))
    seen.append(of_checkpoint(tmp_path / "converted"))
    assert all(one != other for one, other in itertools.combinations(seen, 2))


def test_sigterm_ends_a_batch_in_order(directory, tmp_path):
    source, out, err, journal = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "err", "out.jsonl.partial"))
    source.write_text('{"token_ids": [1]}\n' * 500)
    flags = ["--batch-size", 1, "--draft", "none"]
    process = processes.command_line(command(directory, source, out, *flags), tmp_path / "said", err)
    deadline = time.monotonic() + 120
    while process.is_alive() and time.monotonic() < deadline and not (journal.exists() and journal.read_bytes().count(b"\n") > 2):
        time.sleep(0.01)
    process.terminate()
    process.join(60)
    assert process.exitcode == 143 and (tmp_path / "said").read_text() == ""
    assert err.read_text() == f"qspec: interrupted; the same command, with the same input, goes on from {journal}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["err", "in.jsonl", "out.jsonl.partial", "said"]


def test_a_journal_goes_on_wherever_it_was_cut(tmp_path):
    results = [{"line": i, "text": "é" * i} for i in (2, 1, 3)]
    journal = Journal(tmp_path / "whole", RUN, overwrite=False)
    for result in results:
        journal.add(result)
    content = journal.path.read_bytes()
    with pytest.raises(InputError, match="another process"):
        Journal(tmp_path / "whole", RUN, overwrite=False)
    journal.finish()
    whole = (tmp_path / "whole").read_bytes()
    assert [json.loads(line)["line"] for line in whole.splitlines()] == [1, 2, 3] and not journal.path.exists()
    for cut in range(len(content) + 1):
        (tmp_path / "out.partial").write_bytes(content[:cut])
        again = Journal(tmp_path / "out", RUN, overwrite=False)
        for result in results:
            if result["line"] not in again.done:
                again.add(result)
        again.finish()
        assert (tmp_path / "out").read_bytes() == whole
        (tmp_path / "out").unlink()
    (tmp_path / "out.partial").write_bytes(content)
    with pytest.raises(InputError, match="is of a run with other settings; --overwrite drops the "):
        Journal(tmp_path / "out", RUN | {"settings": "others"}, overwrite=False)
    assert (tmp_path / "out.partial").read_bytes() == content
    for mine in ("years\n", "years", '{"ru\n', '{"rum'):
        (tmp_path / "mine.partial").write_text(mine)
        with pytest.raises(InputError, match="not what a run has left"):
            Journal(tmp_path / "mine", RUN, overwrite=True)
        assert (tmp_path / "mine.partial").read_text() == mine
    (tmp_path / "old.partial").write_text('{"run": "abc"}\n{"line": 1}\n')
    with pytest.raises(InputError, match="is of another run, by another version of this program"):
        Journal(tmp_path / "old", RUN, overwrite=False)
    (tmp_path / "old.partial").write_text('{"run": "abc"}\n')  # there is nothing to lose
    Journal(tmp_path / "old", RUN, overwrite=False).finish()
    another = Journal(tmp_path / "out", RUN | {"settings": "others"}, overwrite=True)
    assert another.done == {}
    another.finish()


def _write_in_a_process(output: Path) -> None:
    journal = Journal(output, RUN, overwrite=False)
    for i in range(60):
        if i not in journal.done:
            time.sleep(0.02)
            journal.add({"line": i, "text": str(i) * 10_000})
    journal.finish()


def test_killed_at_any_moment(tmp_path):
    """Ten times: the output is that of a run that was left alone. What a line gives does not depend on a restart, see above."""

    def started(output: Path) -> BaseProcess:
        process = processes.context().Process(target=_write_in_a_process, args=(output,))
        process.start()
        return process

    process = started(tmp_path / "alone")
    process.join(120)
    expected = (tmp_path / "alone").read_bytes()
    assert process.exitcode == 0 and len(expected.splitlines()) == 60
    draw, out, journal, killed = random.Random(0), tmp_path / "out", tmp_path / "out.partial", 0
    written = lambda: len(journal.read_bytes().splitlines()) if journal.exists() else 0
    while killed < 10:
        enough = written() + draw.randrange(1, 6)
        process = started(out)
        while process.is_alive() and written() < enough:
            time.sleep(draw.uniform(0, 0.003))
        killed += process.is_alive()
        process.kill()
        process.join(120)
        if out.exists():
            assert out.read_bytes() == expected
            out.unlink()
    process = started(out)
    process.join(120)
    assert process.exitcode == 0 and out.read_bytes() == expected
