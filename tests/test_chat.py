"""Messages by a chat template: contents of parts, values of None, what is no conversation, and raw texts where messages are meant."""

import json
import logging

import pytest
from tokenizers.processors import TemplateProcessing

from qspec_jax import demo
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.chat import chat_tokens, hint_at_chat
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate, stream
from qspec_jax.decoding.jsonl import read_lines
from qspec_jax.errors import InputError

END = "<|endoftext|>"  # the embedded tokenizer's one special token
TEXT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + END + "{% endfor %}[assistant]"
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}"
    "{% endfor %}{% endif %}" + END + "{% endfor %}[assistant]"
)
PARTS_ALONE = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}" + END + "{% endfor %}[assistant]"
JSON = "{% for m in messages %}{{ m | tojson }}" + END + "{% endfor %}[assistant]"


def with_template(template: str):
    tokenizer = load_tokenizer(demo.MODEL)
    tokenizer.chat_template = template
    return tokenizer


def rendered(template: str, *messages: dict) -> str:
    tokenizer = with_template(template)
    return tokenizer.decode(chat_tokens(tokenizer, list(messages)))


def user(content) -> dict:
    return {"role": "user", "content": content}


def part(text: str) -> dict:
    return {"type": "text", "text": text}


FIRST = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content if m.content is string else m.content[0].text }}" + END + "{% endfor %}[assistant]"
)


@pytest.mark.parametrize(("template", "joint"), [(TEXT, "\n"), (FIRST, "\n"), (PARTS, ""), (PARTS_ALONE, "")])
def test_a_content_of_parts_is_the_text_in_them(template, joint):
    assert rendered(template, user([part("one"), part("two")])) == f"[user]one{joint}two{END}[assistant]"
    assert rendered(template, user([part("one")])) == rendered(template, user("one")) == f"[user]one{END}[assistant]"
    assert rendered(template, user(["one", {"text": "two", "type": None, "image_url": None}])) == f"[user]one{joint}two{END}[assistant]"


def test_no_none_reaches_a_template():
    calls = [{"function": {"name": "f", "arguments": {"x": 1, "y": None}}}]
    asks = {"role": "assistant", "content": None, "name": None, "tool_calls": calls}
    text = rendered(JSON, user("a") | {"name": None, "tool_calls": None}, asks)
    assert "null" not in text and json.loads(text.split(END)[0]) == user("a")
    calls[0]["function"]["arguments"].pop("y")
    assert json.loads(text.split(END)[1]) == {"role": "assistant", "tool_calls": calls}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "list of objects with role and content, not an empty list"),
        ("hello", "list of objects with role and content, not 'hello'"),
        (user("hello"), "list of objects with role and content, not one object"),
        ([[user("a")], [user("b")]], "is a list of conversations, and should be one"),
        ([user("a"), "b"], "and message 1 is 'b'"),
        ([{"content": "a"}], "message 0 has no role"),
        ([user("a"), {"role": "assistant"}], "message 1 has no content, which only an assistant's message with tool_calls may leave out"),
        ([user(None) | {"tool_calls": [{}]}], "message 0 has no content"),
        ([user(3)], "the content of message 0 should be a text or a list of text parts, not 3"),
        (
            [user([{"type": "image_url", "image_url": {"url": "x"}}])],
            "message 0 has a part of type 'image_url'; only text parts can be read",
        ),
        ([user([part("a"), {"type": "input_audio"}])], "part of type 'input_audio'"),
        ([user([{"type": "text"}])], "a text part without a text"),
        ([user([3])], "what is no object"),
        ([user("a"), user([part("\udcff")])], "messages have half of a character (a surrogate)"),
    ],
)
def test_what_is_no_conversation_of_texts(messages, words):
    for template in (TEXT, PARTS, PARTS_ALONE):
        with pytest.raises(InputError) as refused:
            chat_tokens(with_template(template), messages)
        assert words in str(refused.value)


def test_messages_without_a_template(tokenizer, directory):
    with pytest.raises(InputError, match=f"messages need a tokenizer with a chat template, and that of {directory} has none"):
        chat_tokens(tokenizer, [user("a")])


def test_no_second_bos():
    """The template writes one, and the tokenizer would add one to any text."""
    tokenizer = with_template(END + TEXT)
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, bos)])
    assert tokenizer("a")["input_ids"].count(bos) == 1
    tokens = chat_tokens(tokenizer, [user("a")])
    assert tokens[0] == bos != tokens[1]


def test_messages_as_prompts_of_generate(model):
    tokenizer = with_template(TEXT)
    settings = dict(config=GenerationConfig(max_new_tokens=4, draft="none"), tokenizer=tokenizer)
    conversation = [{"role": "system", "content": "s"}, user([part("hi")])]
    tokens = tokenizer(f"[system]s{END}[user]hi{END}[assistant]")["input_ids"]
    expected = generate(model, [tokens, [5, 6]], **settings)
    out = generate(model, [conversation, [5, 6]], **settings)
    assert out.token_ids == expected.token_ids and out.stats.prompt_tokens == len(tokens) + 2
    streamed = stream(model, conversation, **settings)
    assert [token for piece in streamed for token in piece.token_ids] == expected.token_ids[0]
    for prompts, words in (
        (conversation, "prompts is a list of messages, and should be a list of prompts"),
        ([[5], [conversation]], "prompt 1: messages is a list of conversations"),
        ([[user(3)]], "prompt 0: the content of message 0"),
    ):
        with pytest.raises(InputError, match=words):
            generate(model, prompts, **settings)
    with pytest.raises(InputError, match="prompts are messages, so a tokenizer is needed"):
        generate(model, [conversation], config=settings["config"])


def test_a_raw_text_where_messages_are_meant(model, caplog):
    """The marks are special tokens, or where the template has none its own texts; BOS, which other texts have too, is none."""
    special = with_template(TEXT)
    special.bos_token = "def"
    assert END in hint_at_chat(special, "def f", "give messages") and hint_at_chat(special, f"x{END}", "") is None
    plain = with_template("### User: {{ messages[0].content }}\n### Answer:")
    assert "(### User: ### Answer:)" in hint_at_chat(plain, "import", "") and hint_at_chat(plain, "### User: hi", "") is None
    assert hint_at_chat(with_template(END + "{{ messages[0].content }}"), "import", "") is None  # BOS alone: no mark is known
    assert hint_at_chat(load_tokenizer(demo.MODEL), "import", "") is None
    lines = [{"token_ids": [1]}, {"messages": [user("x")]}, {"prompt": f"[user]x{END}"}, {"prompt": "raw"}, {"prompt": "raw too"}]
    read_lines("\n".join(map(json.dumps, lines)).encode(), model, with_template(TEXT), GenerationConfig(max_new_tokens=2), 0)
    (said,) = caplog.messages
    assert said.startswith("line 4: the checkpoint has a chat template") and "give messages instead of prompt" in said


def test_generate_chat(run, fails, shallow, tmp_path, caplog):
    """The options of a checkpoint without a template are refused; with one, a system message goes first and a raw text is hinted at."""
    asked = ["generate", "--model", shallow, "--prompt", "hi", "--max-new-tokens", 2, "--draft", "none", "--json"]
    fails([*asked, "--chat"], "--chat needs a tokenizer with a chat template")
    fails([*asked, "--system", "s"], "--system is for --chat")
    said = json.loads((shallow / "tokenizer_config.json").read_text())
    (shallow / "tokenizer_config.json").write_text(json.dumps(said | {"chat_template": TEXT}))
    try:
        tokenizer = with_template(TEXT)
        code, out, _ = run(*asked, "--chat", "--system", "s")
        n = len(tokenizer(f"[system]s{END}[user]hi{END}[assistant]")["input_ids"])
        assert code == 0 and json.loads(out)["stats"]["prompt_tokens"] == n and not caplog.messages
        caplog.set_level(logging.WARNING)
        code, out, _ = run(*asked, "--prompt", "ho")
        assert code == 0 and json.loads(out)["stats"]["prompt_tokens"] == 2
        assert [message for message in caplog.messages if "--chat takes it as a user's message" in message] == caplog.messages
        assert len(caplog.messages) == 1
    finally:
        (shallow / "tokenizer_config.json").write_text(json.dumps(said))
