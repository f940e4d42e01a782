"""Conversations, and the commands that keep states: chat, prefill, generate --state and score."""

import dataclasses
import datetime
import io
import json
import logging
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from checkpoints import hf_config, write_checkpoint
from runs import interrupted_rounds

from qspec_jax import demo
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.cli import process
from qspec_jax.cli.process import CtrlC, CtrlCAtPrompt
from qspec_jax.decoding.chat import chat_tokens
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.conversation import Conversation
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.reading import extend, prefill
from qspec_jax.decoding.scoring import score
from qspec_jax.errors import InputError

END = "<|endoftext|>"
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + END + "{% endfor %}[assistant]"
# Leaves out the answers before the last message, as templates of models that reason leave out their reasoning.
REWRITES = (
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}[{{ m.role }}]{{ m.content }}"
    + END
    + "{% endif %}{% endfor %}[assistant]"
)
SETTINGS = ["--max-new-tokens", "6", "--group-size", "8"]
CONFIG = GenerationConfig(max_new_tokens=6, group_size=8, draft="none", cache="int8", ignore_eos=True)


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """A random model of one layer and 512 positions, whose tokenizer has a chat template."""
    config = hf_config(vocab_size=4096, num_hidden_layers=1, max_position_embeddings=512)
    found = write_checkpoint(tmp_path_factory.mktemp("talks"), config, tokenizer=demo.MODEL)
    settings = json.loads((found / "tokenizer_config.json").read_text())
    (found / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return found


@pytest.fixture(scope="module")
def network(talks):
    return load_model(talks)


@pytest.fixture
def tokenizer(talks):
    return load_tokenizer(talks)


@pytest.fixture
def piped(run, talks, monkeypatch):
    """`qspec chat` with these lines on standard input."""

    def call(*lines: str, options=()):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("".join(line + "\n" for line in lines).encode())))
        return run("chat", "--model", talks, "--cache", "int8", "--draft", "none", *SETTINGS, "--ignore-eos", *options)

    return call


def said(talk: Conversation, message: str) -> str:
    return "".join(talk.ask(message))


def test_each_turn_is_read_onto_the_state_of_those_before(network, tokenizer, monkeypatch):
    """What is answered is what the target continues the whole conversation by, if it is read in the same parts."""
    talk, read = Conversation(network, tokenizer, config=CONFIG, system="Be short."), []
    monkeypatch.setattr("qspec_jax.decoding.conversation.extend", lambda state, ids: read.append(ids) or extend(state, ids))
    first = said(talk, "one two three")
    state = talk.state
    assert talk.answer.new_tokens == 6 and talk.answer.finish_reason == "length" and not read
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    second = said(talk, "four")
    ids = chat_tokens(tokenizer, talk.messages[:-1])
    beginning = state if ids[: len(state)] == state.tokens.tolist() else state.trim(len(ids) - len(read[0]))
    assert beginning.tokens.tolist() + read[0] == ids and talk.answer.read_tokens == len(read[0]) < 40
    again = generate(network, [extend(beginning, read[0])], config=CONFIG, tokenizer=tokenizer)
    assert second == again.text[0] == talk.messages[-1]["content"] and first == talk.messages[-3]["content"]


def test_undo_and_reset_go_back_to_kept_states(network, tokenizer):
    talk = Conversation(network, tokenizer, config=CONFIG, documents={"a.txt": "x = 1\n" * 20})
    assert talk.read_documents() > 60 and talk.messages == []
    base = talk.state
    answers = [said(talk, "What is x?"), said(talk, "And y?")]
    assert talk.messages[0]["content"].startswith("a.txt:\n\nx = 1\n") and talk.messages[0]["content"].endswith("\n\nWhat is x?")
    talk.undo()
    assert len(talk.messages) == 2 and said(talk, "And y?") == answers[1]
    talk.reset()
    assert talk.messages == [] and talk.state is base and said(talk, "What is x?") == answers[0] and talk.answer.read_tokens < 12
    talk.undo(), talk.undo()
    assert len(talk.messages) == 4
    talk.undo(), talk.undo()
    with pytest.raises(InputError, match="there is nothing to take back"):
        talk.undo()


def test_an_answer_that_is_ended_early_is_kept(network, tokenizer):
    """With what was said by then, which the next turn reads."""
    whole, talk = (Conversation(network, tokenizer, config=CONFIG) for _ in range(2))
    text = said(whole, "one")
    pieces = talk.ask("one")
    begun = next(pieces) + next(pieces)
    pieces.close()
    assert talk.messages[-1] == {"role": "assistant", "content": begun} and text.startswith(begun)
    assert talk.answer.finish_reason == "interrupted" and talk.answer.new_tokens == 2
    said(talk, "two")
    assert talk.messages[1]["content"] == begun and len(talk.messages) == 4
    assert talk.state.tokens.tolist()[:-6] == chat_tokens(tokenizer, talk.messages[:-1])


def test_what_an_interrupted_run_has_lost_is_read_again(network, tokenizer):
    talk, whole = (Conversation(network, tokenizer, config=CONFIG, documents={"a.txt": "x = 1\n" * 20}) for _ in range(2))
    talk.read_documents()
    expected = said(whole, "one")
    with interrupted_rounds():
        said(talk, "one")
    assert talk.messages == [] and said(talk, "one") == expected
    said(talk, "two")
    assert talk.answer.read_tokens < 40 and not talk.state.lost


def test_a_template_that_rewrites_history(network, tokenizer, caplog):
    """The text is read again from the first change on, or from the latest kept state, and a line says so."""
    tokenizer.chat_template = REWRITES
    talk = Conversation(network, tokenizer, config=CONFIG)
    caplog.set_level(logging.INFO)
    said(talk, "one")
    assert "has changed the conversation" not in caplog.text
    said(talk, "two")
    assert "the chat template has changed the conversation after its first" in caplog.text
    ids = chat_tokens(tokenizer, talk.messages[:-1])
    assert talk.state.tokens.tolist()[:-6] == ids
    long = " and".join(map(str, range(40)))
    said(talk, long)
    said(talk, long)
    assert talk.state.tokens.tolist()[:-6] == chat_tokens(tokenizer, talk.messages[:-1])


def test_an_answer_whose_text_has_other_tokens(network, tokenizer, caplog):
    """The tokens of the text are read, and a line says that this is not the template's doing."""
    (space,) = tokenizer(" ")["input_ids"]
    caplog.set_level(logging.INFO)
    talk = Conversation(network, tokenizer, config=dataclasses.replace(CONFIG, max_new_tokens=4, logit_bias={space: 1e4}))
    assert said(talk, "one") == " " * 4 and talk.state.tokens.tolist()[-4:] != tokenizer(" " * 4)["input_ids"]
    said(talk, "two")
    assert "the text of an answer has other tokens than it was generated by, so tokens from" in caplog.text
    assert talk.state.tokens.tolist()[:-4] == chat_tokens(tokenizer, talk.messages[:-1])


def test_a_template_with_a_date(network, tokenizer, tmp_path, caplog, monkeypatch):
    """The date is that of the conversation's beginning, on later days too, so that nothing is read again."""
    tokenizer.chat_template = "[{{ strftime_now('%d %B %Y') }}]" + TEMPLATE
    document = {"a.txt": "x = 1\n" * 20}
    talk = Conversation(network, tokenizer, config=CONFIG, documents=document)
    talk.read_documents()
    talk.save(tmp_path / "talk")
    now = datetime.datetime.now()
    later = type("Later", (datetime.datetime,), {"now": classmethod(lambda cls, zone=None: now + datetime.timedelta(days=40))})
    monkeypatch.setattr("datetime.datetime", later)
    monkeypatch.setattr("datetime.date", type("Day", (datetime.date,), {"today": classmethod(lambda cls: later.now().date())}))
    caplog.set_level(logging.INFO)
    other = Conversation(network, tokenizer, config=CONFIG)
    other.load(tmp_path / "talk")
    assert f"which stays that of the saved conversation: {now.date()}" in caplog.text
    assert said(other, "x?") == said(talk, "x?") and other.answer.read_tokens == talk.answer.read_tokens < 12
    assert f"{now:%d %B %Y}" in tokenizer.decode(other.state.tokens) and "read again" not in caplog.text


def test_a_conversation_in_a_file(network, tokenizer, tmp_path):
    talk = Conversation(network, tokenizer, config=CONFIG)
    with pytest.raises(InputError, match="there is nothing to save"):
        talk.save(tmp_path / "talk")
    said(talk, "one")
    talk.save(tmp_path / "talk")
    other = Conversation(network, tokenizer, config=GenerationConfig(max_new_tokens=6, ignore_eos=True))
    other.load(tmp_path / "talk")
    assert other.messages == talk.messages and said(other, "two") == said(talk, "two") and other.config.cache == "int8"


def test_samples_of_a_conversation(network, tokenizer):
    """The same seed gives the same conversation; a question that is asked again has other draws."""
    config = GenerationConfig(max_new_tokens=6, draft="none", temperature=1.0, ignore_eos=True)
    with pytest.raises(InputError, match="key should be given"):
        Conversation(network, tokenizer, config=config)
    one, other = (Conversation(network, tokenizer, config=config, key=jax.random.key(3)) for _ in range(2))
    first = said(one, "a")
    assert first == said(other, "a")
    one.undo()
    assert said(one, "a") != first


def test_chat_through_a_pipe(piped, tmp_path):
    """Answers on standard output, all else on standard error; a saved conversation goes on elsewhere."""
    saved = tmp_path / "talk.state"
    code, out, err = piped("one", "", f"/save {saved}", "two", "/undo", "two", "/reset", "one", "/quit", "never")
    assert code == 0 and "> " not in out + err and err.count("[0 messages and answers") == 1 and err.count("1 message and answers") == 1
    answers = out.split("\n")
    assert "6 tokens" in err and "tokens/s" in err and "ended at --max-new-tokens" in err and f"saved to {saved}: " in err
    code, after, err = piped("two", options=["--state", saved])
    assert code == 0 and "1 message and answers" in err and out.count(after) == 2
    assert answers[0] and err.count("ended at") == 1


def test_a_message_of_several_lines(piped, monkeypatch):
    """Between two marks; it may begin with / and hold empty lines."""
    asked, ask = [], Conversation.ask
    monkeypatch.setattr(Conversation, "ask", lambda talk, text: asked.append(text) or ask(talk, text))
    code, _, err = piped('"""one', "", '/two"""', '"""', "/three", '"""', '"""four"""')
    assert (code, asked) == (0, ["one\n\n/two", "/three", "four"]) and err.count("[6 tokens, ") == 3
    code, _, err = piped('"""one', "two")
    assert code == 2 and len(asked) == 3 and 'the message that """ began has no end' in err


# With fewer assertions: test_prefill_for_chat.
@pytest.mark.system
def test_chat_with_a_document(piped, tmp_path, caplog):
    document = tmp_path / "a.txt"
    document.write_text("x = 1\n" * 20)
    code, out, err = piped("//x?", options=["--file", document, "--system", "Be short."])
    assert code == 0 and out.strip() and f"tokens of {document} in" in caplog.text
    assert int(err.split("[6 tokens")[1].split("read ")[1].split()[0]) < 16


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["/what"], "/what is no command: /help lists them"),
        (["/save"], "/save needs the name of a file after it"),
        (["/undo 2"], "/undo takes nothing after it"),
        (["/undo"], "there is nothing to take back"),
        (["/load nowhere"], "nowhere: cannot be read"),
        (["/load ~/nowhere"], f"{os.path.expanduser('~')}/nowhere: cannot be read"),
        (["/save x"], "there is nothing to save"),
        (["word " * 600], "and the model has 512 positions"),
    ],
)
def test_mistakes_in_a_pipe(piped, lines, words):
    code, out, err = piped(*lines)
    assert (code, out) == (2, "") and err.count("qspec: error: ") == 1 and words in err


def test_chat_is_refused(fails, talks, directory, tmp_path):
    chat = ["chat", "--model", talks]
    fails(["chat", "--model", directory, "--draft", "none"], "a conversation needs a tokenizer with a chat template")
    fails([*chat, "--exact", "bits"], "--exact bits is for whole prompts", "leave --exact out")
    fails([*chat, "--file", "-"], "--file - cannot be read")
    fails([*chat, "--file", tmp_path / "no"], "no: cannot be read")
    fails([*chat, "--state", tmp_path / "x", "--system", "s"], "leave --system out")
    fails([*chat, "--logprobs"], "--logprobs and --top-logprobs are for generate --json")


def test_ctrl_c_at_work_and_at_the_prompt(monkeypatch):
    monkeypatch.setattr(process, "_received", [])  # what ends a process changes how it takes later signals
    before = signal.getsignal(signal.SIGINT)
    with CtrlC() as ctrl_c:
        signal.raise_signal(signal.SIGINT)
        assert ctrl_c.pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        ctrl_c.at_prompt = True
        with pytest.raises(CtrlCAtPrompt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.system
def test_prefill_and_generate_from_the_state(run, fails, talks, tmp_path, caplog):
    """The same text as from the prompt itself; other prompts continue the same state."""
    document, saved = tmp_path / "a.py", tmp_path / "a.state"
    document.write_text("def main():\n    return 1\n" * 8)
    draft = ["--draft", "sparse", "--gamma", "3", "--group-size", "8"]
    code, out, err = run("prefill", "--model", talks, "--file", document, "--save", saved, *draft)
    assert code == 0 and out.startswith(f"{saved}: ") and "read in" in out and "tokens in" in out and f"tokens of {document}" in caplog.text
    report = json.loads(run("prefill", "--model", talks, "--file", document, "--save", saved, *draft, "--room", 50, "--json")[1])
    assert report["bytes"] == saved.stat().st_size and report["draft"] == "sparse" and report["cache"] == "int8"
    sampling = ["--max-new-tokens", 12, "--ignore-eos"]
    code, expected, _ = run("generate", "--model", talks, "--prompt-file", document, *draft, *sampling)
    assert code == 0
    code, out, err = run("generate", "--model", talks, "--state", saved, *sampling)
    assert (code, out) == (0, expected) and "acceptance rate" in err
    found = json.loads(run("generate", "--model", talks, "--state", saved, *sampling, "--prompt", "a", "--prompt", "b", "--json")[1])
    assert len(found["text"]) == 2 and found["stats"]["prompt_tokens"] == 2 * report["tokens"] + 2 and "states" not in found
    generated = ["generate", "--model", talks, "--state"]
    fails([*generated, saved, "--chat"], "--chat cannot be combined with --state", "qspec chat --state")
    fails([*generated, saved, "--cache", "kivi", "--draft", "none"], "the state was made with another cache (int8, here kivi)")
    fails([*generated, saved, "--draft", "quantspec"], "the state was made with another draft (SparseDraft")
    fails([*generated, saved, "--gamma", 5], "num_speculative_tokens 3", "is 5 here")
    fails([*generated, saved, "--cache", "kivi"], "which does not fit what is given")
    fails([*generated, saved, "--dtype", "bfloat16"], "another dtype (float32, here bfloat16)")
    fails([*generated, document], "is not a saved state")
    fails(
        ["chat", "--model", talks, "--state", saved],
        "is the state of a text, not of a conversation; read the text with `qspec prefill --chat`",
    )


def test_prefill_for_chat(run, fails, talks, piped, tmp_path, caplog):
    """The answers are those of `qspec chat --file`, and the document is not read again."""
    document, saved = tmp_path / "a.txt", tmp_path / "a.state"
    document.write_text("x = 1\n" * 20)
    prefilled = ["prefill", "--model", talks, "--file", document, "--save", saved, "--cache", "int8", "--draft", "none", "--group-size", 8]
    assert run(*prefilled)[0] == 0 and "--chat reads it for qspec chat" in caplog.text
    fails([*prefilled, "--system", "Be short."], "--system is for --chat")
    caplog.clear()
    report = json.loads(run(*prefilled, "--chat", "--system", "Be short.", "--json")[1])
    assert report["bytes"] == saved.stat().st_size and report["tokens"] > 60 and "raw text" not in caplog.text
    code, out, err = piped("x?", options=["--state", saved])
    assert code == 0 and f"[{report['tokens']} tokens, 0 messages and answers" in err
    assert int(err.split("[6 tokens")[1].split("read ")[1].split()[0]) < 16
    assert piped("x?", options=["--file", document, "--system", "Be short."])[1] == out


def test_prefill_is_refused_before_it_reads(fails, talks, tmp_path):
    document = tmp_path / "a.py"
    document.write_text("x = 1\n")
    prefilled = ["prefill", "--model", talks, "--file", document, "--save"]
    fails([*prefilled, document], "would replace", "which is read")
    fails([*prefilled, tmp_path], "cannot be written (Is a directory)")
    fails([*prefilled, "/dev/null"], "should be a file")
    fails([*prefilled, tmp_path / "no" / "state"], "cannot be written (No such file or directory)")
    document.write_text("")
    fails([*prefilled, tmp_path / "state"], "a.py is empty")
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]


@pytest.mark.system
def test_scores_are_those_of_python(run, fails, talks, network, tokenizer, tmp_path):
    document = tmp_path / "a.py"
    document.write_text("def main():\n    return 1\n")
    ids = tokenizer(document.read_text())["input_ids"]
    config = GenerationConfig(draft="none")
    expected = score(prefill(network, ids[:1], config=config), [ids[1:]])[0]
    code, out, _ = run("score", "--model", talks, "--file", document)
    assert code == 0 and out.count("\n") == 1
    assert f"{document}: log-probability {expected.logprob:.4f} of {len(ids) - 1} tokens: perplexity " in out and "bits per byte" in out
    found = json.loads(run("score", "--model", talks, "--file", document, "--json")[1])
    np.testing.assert_allclose(found["logprobs"], expected.logprobs)
    assert found["perplexity"] == pytest.approx(math.exp(-expected.logprob / (len(ids) - 1)))
    count = len(document.read_bytes()) - len(tokenizer.decode(ids[:1]))
    assert found["bits_per_byte"] == pytest.approx(-expected.logprob / math.log(2) / count)
    context = prefill(network, "def f():", config=config, tokenizer=tokenizer)
    expected = score(context, [" return", " pass\n"], tokenizer=tokenizer)
    continued = ["--continuation", " return", "--continuation", " pass\n"]
    found = json.loads(run("score", "--model", talks, "--prompt", "def f():", *continued, "--json")[1])
    assert [row["logprob"] for row in found["scores"]] == pytest.approx([each.logprob for each in expected])
    assert found["context_tokens"] == len(context) and found["scores"][0]["text"] == " return"
    saved = tmp_path / "state"
    run("prefill", "--model", talks, "--file", document, "--save", saved, "--draft", "none", "--cache", "full")
    tables = [run("score", "--model", talks, *given, *continued) for given in (("--state", saved), ("--file", document))]
    assert tables[0] == tables[1] and "' return'" in tables[0][1] and "perplexity" in tables[0][1]
    score_of = ["score", "--model", talks]
    fails(score_of, "one of --file, --prompt and --state should be given, not none of them")
    fails([*score_of, "--file", document, "--state", saved], "not --file and --state")
    fails([*score_of, "--prompt", "a"], "so at least one --continuation should be given")
    fails([*score_of, "--prompt", "a", "--continuation", ""], "continuation 0 is empty")
    document.write_text("x")
    fails([*score_of, "--file", document], "has one token")


@pytest.mark.system
def test_chat_in_a_terminal(talks, request):
    """Prompt signs; Ctrl-C ends an answer and keeps it; at the prompt it discards the line; Ctrl-D leaves."""
    terminal, other = pty.openpty()
    options = ["--draft", "none", "--ignore-eos", "--max-new-tokens", "300"]
    command = [sys.executable, "-m", "qspec_jax.cli", "chat", "--model", talks, *options]
    started = subprocess.Popen(command, stdin=other, stdout=other, stderr=other)
    request.addfinalizer(lambda: (started.kill(), started.wait()))
    seen = b""

    def read() -> None:
        nonlocal seen
        assert select.select([terminal], [], [], 120)[0], seen
        seen += os.read(terminal, 4096)

    def until(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            read()
        seen = seen.partition(text)[2]

    until(b"> ")
    os.write(terminal, b"hello\n")
    until(b"hello\r\n")
    while len(seen) < 10:
        read()
    started.send_signal(signal.SIGINT)
    until(b"ended by Ctrl-C]")
    until(b"> ")
    os.write(terminal, b"half a line")
    until(b"half a line")
    time.sleep(0.3)  # readline shows a line before it waits for the next key or signal
    started.send_signal(signal.SIGINT)
    until(b"> ")
    os.write(terminal, b"/what\n")
    until(b"/what is no command")
    until(b"> ")
    os.write(terminal, b"\x1b[200~one\ntwo\x1b[201~\n")  # as terminals mark what is pasted
    until(b"tokens/s")
    os.write(terminal, b"/undo\n")
    until(b"1 message and answers")
    os.write(terminal, b"word " * 600 + b"\n")
    until(b"and the model has 512 positions")
    until(b"> ")
    os.write(terminal, b"\x04")
    assert started.wait(30) == 0
    os.close(terminal), os.close(other)
