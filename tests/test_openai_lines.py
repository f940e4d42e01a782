"""Lines of OpenAI's batch files: what a body means in our own settings, what is refused, and the output, which depends on nothing else."""

import dataclasses
import json
import math

import pytest

from qspec_jax import demo
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.jsonl import Line, as_line, as_wrong, read_lines
from qspec_jax.decoding.results import Result

CONFIG = GenerationConfig(max_new_tokens=9, temperature=0.3)
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None}]


@pytest.fixture(scope="module")
def chat_tokenizer():
    tokenizer = load_tokenizer(demo.MODEL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def asked(url: str, **body) -> dict:
    return {"custom_id": "r", "method": "POST", "url": url, "body": body}


def read(model, tokenizer, *said: dict, config: GenerationConfig = CONFIG) -> list[Line]:
    return read_lines("\n".join(map(json.dumps, said)).encode(), model, tokenizer, config, 0)


@pytest.mark.parametrize(
    ("body", "own"),
    [
        ({}, {}),  # what a body does not say is the command's, temperature too
        ({"max_tokens": 4.0, "temperature": None, "user": "u", "metadata": {"a": "b"}}, {"max_new_tokens": 4}),
        ({"max_completion_tokens": 5, "max_tokens": 5, "temperature": 1}, {"max_new_tokens": 5, "temperature": 1.0}),
        (
            {"top_p": 0.5, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.2},
            {"top_p": 0.5, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.2},
        ),
        ({"stop": "x", "min_tokens": 2}, {"stop": ["x"], "min_new_tokens": 2}),
        ({"seed": 3, "logit_bias": {"7": -100, "8": None}}, {"seed": 3, "logit_bias": {"7": -100.0}}),
        ({"stop_token_ids": [3, 4.0]}, {"stop_token_ids": [[3], [4]]}),
        ({"best_of": 1, "stream": False, "echo": False, "presence_penalty": 0.0, "frequency_penalty": 0, "ignore_eos": False}, {}),
    ],
)
def test_what_a_body_says_is_a_line_of_our_own(body, own, model, chat_tokenizer):
    (ours,) = read(model, chat_tokenizer, {"messages": MESSAGES} | own)
    (theirs,) = read(model, chat_tokenizer, asked(CHAT, model="m", messages=MESSAGES, **body))
    assert theirs.error is None and theirs.request == ours.request
    (text,) = read(model, chat_tokenizer, asked(COMPLETIONS, prompt="[user]hi[assistant]", **body))
    assert text.request == ours.request


def test_prompts_and_logprobs(model, chat_tokenizer):
    said = [asked(COMPLETIONS, prompt=prompt, logprobs=k) for prompt, k in ((["a b"], 2), ([[5, 6.0]], 0), ([5, 6], None))]
    lines = read(
        model,
        chat_tokenizer,
        *said,
        asked(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=3),
        asked(CHAT, messages=MESSAGES, logprobs=False),
    )
    assert lines[0].request.tokens == chat_tokenizer("a b")["input_ids"] and lines[1].request.tokens == lines[2].request.tokens == [5, 6]
    assert [line.request.config.logprobs for line in lines] == [2, 0, None, 3, None]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"custom_id": None}, "custom_id should be a text, not None"),
        ({"custom_id": 3}, "custom_id should be a text, not 3"),
        ({"method": "GET"}, "method should be POST, not 'GET'"),
        ({"url": "/v1/embeddings"}, "url should be /v1/chat/completions or /v1/completions, not '/v1/embeddings'"),
        ({"body": "x"}, "body should be an object"),
        ({"extra": 1}, "unknown key 'extra'; there are custom_id, method, url, body"),
        (dict(n=0), "n 0 should be from 1 to 1,024"),
        (dict(stream=True), "stream True is not supported; it should be false"),
        (dict(presence_penalty=0.5), "presence_penalty 0.5 is not supported"),
        (dict(tools=[{}]), "body has 'tools', which is not supported; there are prompt, "),
        (dict(messages=[]), "body has 'messages', which is not supported"),
        (dict(ignore_eos=True), "ignore_eos is shared by all lines"),
        (dict(prompt=None), "body should have prompt"),
        (dict(prompt=["a", "b"]), "prompt should be one text or one list of token ids; give each prompt a line of its own"),
        (dict(prompt=[5, 6.5]), "prompt should be a list of whole numbers"),
        (dict(prompt=""), "the prompt is empty"),
        (dict(max_tokens=0), "max_tokens 0 should be at least 1"),
        (dict(max_tokens=3, max_completion_tokens=4), "max_tokens and max_completion_tokens are the same, and should not differ"),
        (dict(max_completion_tokens="x"), "max_completion_tokens should be a whole number"),
        (dict(min_tokens=30), "min_tokens 30 should be at most max_new_tokens"),
        (dict(logprobs=True), "logprobs should be a whole number, not True"),
        (dict(top_logprobs=2), "top_logprobs is for /v1/chat/completions"),
        (dict(stop_token_ids=[[3]]), "stop_token_ids should be a list of token ids, each of which stops by itself"),
        (dict(stop_token_ids=3), "stop_token_ids should be a list of token ids"),
        (dict(temperature=-1), "temperature -1 should be from 0"),
    ],
)
def test_what_is_refused(change, words, model, chat_tokenizer):
    whole = {"custom_id", "method", "url", "body", "extra"}
    said = asked(COMPLETIONS, prompt="a")
    said = said | change if change.keys() <= whole else said | {"body": said["body"] | change}
    (line,) = read(model, chat_tokenizer, said)
    assert words in line.error and line.request is None
    output, name = as_wrong(line), said["custom_id"] if isinstance(said["custom_id"], str) else None
    assert output["custom_id"] == name and output["id"] == f"batch_req_{name or 1}" and output["error"]["message"] == line.error
    assert output["response"]["status_code"] == 400 and output["response"]["body"]["error"]["message"] == line.error


def test_what_is_refused_of_a_chat(model, chat_tokenizer):
    for body, words in (
        (dict(prompt="x"), "body has 'prompt', which is not supported; there are messages, "),
        (dict(messages=None), "body should have messages"),
        (dict(logprobs=3), "logprobs should be true or false, not 3"),
        (dict(top_logprobs=2), "top_logprobs needs logprobs"),
        (dict(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "part of type 'image_url'"),
    ):
        (line,) = read(model, chat_tokenizer, asked(CHAT, **{"messages": MESSAGES} | body))
        assert words in line.error
    (line,) = read(
        model, chat_tokenizer, asked(CHAT, messages=MESSAGES, ignore_eos=False), config=dataclasses.replace(CONFIG, ignore_eos=True)
    )
    assert "ignore_eos is shared" in line.error


@pytest.mark.parametrize(("reason", "theirs"), [("eos", "stop"), ("stop", "stop"), ("length", "length")])
def test_the_output(reason, theirs, model, chat_tokenizer):
    # Half of a character has no text, and so no bytes of a text.
    half = next(token for token in range(300) if "\N{REPLACEMENT CHARACTER}" in chat_tokenizer.decode([token]))
    a, b = chat_tokenizer("import os")["input_ids"]
    result = Result(0, [a, half], "import", reason, {}, [-0.5, -math.inf], [[(a, -0.5)], [(b, -1.0)]])
    completion, chat = read(model, chat_tokenizer, asked(COMPLETIONS, model="m", prompt="import os"), asked(CHAT, messages=MESSAGES))
    found = as_line(completion, [result], chat_tokenizer)
    logprobs = {
        "tokens": ["import", chat_tokenizer.decode([half])],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"import": -0.5}, {" os": -1.0}],
        "text_offset": [0, 6],
    }
    body = {
        "id": "cmpl-r",
        "object": "text_completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "text": "import", "logprobs": logprobs, "finish_reason": theirs}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    }
    response = {"status_code": 200, "request_id": "req_r", "body": body}
    assert found == {"id": "batch_req_r", "custom_id": "r", "response": response, "error": None}
    answer = as_line(chat, [result], chat_tokenizer)["response"]["body"]
    assert (answer["object"], answer["id"], answer["model"]) == ("chat.completion", "chatcmpl-r", "")
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "import", "refusal": None} and choice["finish_reason"] == theirs
    first, second = choice["logprobs"]["content"]
    alone = {"token": "import", "logprob": -0.5, "bytes": list(b"import")}
    assert first == alone | {"top_logprobs": [alone]} and (second["logprob"], second["bytes"]) == (-9999.0, None)
    bare = as_line(chat, [dataclasses.replace(result, logprobs=None, top_logprobs=None)], chat_tokenizer)
    assert bare["response"]["body"]["choices"][0]["logprobs"] is None


def test_which_lines_are_openais(model, chat_tokenizer):
    """Not those with a prompt of our own, whatever columns a data set has beside it."""
    page = {"url": "http://x", "body": "text", "custom_id": "c"}
    own, theirs, one_key = read(model, chat_tokenizer, page | {"prompt": "x"}, page | {"prompt": None}, {"url": "http://x"})
    assert own.call is None and "unknown key 'body'" in own.error
    assert theirs.call and one_key.call is None and "unknown key 'url'" in one_key.error
