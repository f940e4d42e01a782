"""A checkpoint's tokenizer: the ids are those of its tokenizer.json, whatever transformers makes of its class."""

import json
import logging
import shutil
import sys

import made_tokenizers as made
import pytest
from checkpoints import hf_config, write_checkpoint
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from qspec_jax import demo
from qspec_jax.checkpoints import tokenizers
from qspec_jax.checkpoints.tokenizers import load_tokenizer, special_tokens
from qspec_jax.errors import InputError

KINDS = {
    "llama3": lambda: made.byte_level(made.LLAMA3, bos=True),
    "qwen": lambda: made.byte_level(made.QWEN),
    "gpt2": lambda: made.byte_level(None),
    "gpt2-prefix": lambda: made.byte_level(None, add_prefix_space=True),
    "prepend": lambda: made.sentencepiece_like("normalizer"),
    "metaspace": lambda: made.sentencepiece_like("metaspace"),
    "no-prefix": lambda: made.sentencepiece_like(None, bos=False),
    "unigram": made.unigram,
    "wordpiece": made.word_piece,
}
CLASSES = ("GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast", None)
TEXTS = ("cats mew 12345", "  catsmew\n\n  x = 12345; it's", "É e\u0301 € cat's 🙂", "a<s>b</s> <think> c", "12345678")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CLASSES)
def test_ids_are_those_of_the_file(kind, name, tmp_path):
    for model_type in ("llama", "qwen2"):
        config = {} if name is None else {"tokenizer_class": name}
        directory = made.write(tmp_path / model_type, KINDS[kind](), model_type, **config)
        found, own = load_tokenizer(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))
        for text in TEXTS:
            ids = own.encode(text).ids
            assert found(text)["input_ids"] == ids
            assert found.decode(ids, skip_special_tokens=True) == own.decode(ids)
        assert (found.bos_token_id, found.eos_token_id) == (own.token_to_id("<s>"), own.token_to_id("</s>"))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    ("said", "before", "after"),
    [
        ({"add_bos_token": True}, True, False),
        ({"add_bos_token": False}, False, False),
        ({"add_bos_token": None, "add_eos_token": True}, None, True),
        ({"add_eos_token": False}, None, False),  # which says nothing of BOS
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_bos_and_eos_as_the_config_says(name, said, before, after, tmp_path):
    """And as the file does where it says nothing."""
    for kind in ("llama3", "qwen", "prepend", "no-prefix"):
        found = load_tokenizer(made.write(tmp_path / kind, KINDS[kind](), tokenizer_class=name, **said))
        own = KINDS[kind]()
        ids, bare = own.encode("cats mew").ids, own.encode("cats mew", add_special_tokens=False).ids
        begins = ids[: len(ids) - len(bare)] if before is None else [found.bos_token_id] if before else []
        assert found("cats mew")["input_ids"] == [*begins, *bare, *([found.eos_token_id] if after else [])]


@pytest.mark.parametrize("asked", [True, False])
def test_a_prefix_blank_as_the_config_says(asked, tmp_path):
    own = made.byte_level(None, add_prefix_space=not asked)
    found = load_tokenizer(made.write(tmp_path, own, tokenizer_class="GPT2Tokenizer", add_prefix_space=asked))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=asked)
    assert found("mew")["input_ids"] == own.encode("mew").ids


def test_what_is_put_in_place_is_logged(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "qspec_jax"):
        load_tokenizer(made.write(tmp_path, made.byte_level(made.LLAMA3), tokenizer_class="PreTrainedTokenizerFast"))
        load_tokenizer(demo.MODEL)
        assert not caplog.records
        tokenizers._follow_file(other := load_tokenizer(demo.MODEL), tmp_path / "tokenizer.json", {})
    (record,) = caplog.records
    assert "those of tokenizer.json: its pre_tokenizer, model" in record.getMessage() and other("12345")["input_ids"]


def test_a_class_that_cannot_be_made(tmp_path, caplog, monkeypatch):
    from transformers import AutoTokenizer

    directory = made.write(tmp_path, made.unigram(), tokenizer_class="SomeCodeOfItsOwn")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: {}["class"])
    found = load_tokenizer(directory)
    assert found("cats mew")["input_ids"] == made.unigram().encode("cats mew").ids
    assert "read from tokenizer.json alone" in caplog.text and "KeyError: 'class'" in caplog.text


def test_a_default_of_a_class_is_no_token(tmp_path):
    """GPT-2's EOS, which transformers adds to every vocabulary of that class."""
    found = load_tokenizer(made.write(tmp_path, made.byte_level(made.QWEN), tokenizer_class="GPT2Tokenizer", eos_token=None))
    assert "<|endoftext|>" not in found.get_vocab() and found.eos_token_id is None
    assert len(found) == made.byte_level(made.QWEN).get_vocab_size()


# Special tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_file", [True, False, None])
@pytest.mark.parametrize("in_config", [True, False, None])
@pytest.mark.parametrize("name", ["GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_special_tokens(in_file, in_config, name, tmp_path):
    """What either file flags, and nothing else: the texts are without these, and not without others."""
    tokenizer = made.byte_level(made.LLAMA3)
    id = tokenizer.get_vocab_size()
    if in_file is not None:
        (tokenizer.add_special_tokens if in_file else tokenizer.add_tokens)([AddedToken("<|call|>", normalized=False, special=in_file)])
    token = dict(content="<|call|>", special=in_config, normalized=False, lstrip=False, rstrip=False, single_word=False)
    added = {} if in_config is None else {"added_tokens_decoder": {str(id): token}}
    found = load_tokenizer(made.write(tmp_path, tokenizer, tokenizer_class=name, **added))
    wanted = {token: tokenizer.token_to_id(token) for token in made.SPECIAL}
    assert special_tokens(found) == wanted | ({"<|call|>": id} if in_file or in_config else {})
    if in_file is not None or in_config is not None:
        assert found.decode([id], skip_special_tokens=True) == ("" if in_file or in_config else "<|call|>")


def test_named_special_tokens(tmp_path):
    """Such as an EOS that no file flags."""
    tokenizer = made.byte_level(made.LLAMA3)
    found = load_tokenizer(made.write(tmp_path, tokenizer, tokenizer_class="PreTrainedTokenizerFast", eos_token="<think>"))
    assert special_tokens(found)["<think>"] == tokenizer.token_to_id("<think>")
    assert special_tokens(object()) == {}


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_git_lfs_pointer(name, tmp_path):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0a" * 32 + "\nsize 493443\n")
    with pytest.raises(InputError, match=rf"{name}: is a git-lfs pointer .*git lfs pull"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        (("sentencepiece",), "takes sentencepiece, which is not installed: pip install sentencepiece, or qspec-jax[sentencepiece]"),
        (("sentencepiece", "google.protobuf"), "takes sentencepiece and protobuf, which are not installed"),
    ],
)
def test_sentencepiece_that_is_not_installed(absent, words, tmp_path, monkeypatch):
    for module in absent:
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(InputError) as refused:
        load_tokenizer(tmp_path)
    assert words in str(refused.value)


def test_doctor_and_convert_see_it(run, caplog, tmp_path):
    """Before any weight is read, so that nobody waits for it; a model without a tokenizer takes token ids."""
    directory = write_checkpoint(tmp_path / "hf", hf_config(num_hidden_layers=1))
    command = ["doctor", "--model", directory, "--context", "32", "--max-new-tokens", "8"]
    for content, words in ((None, "no tokenizer in it"), (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer")):
        if content is not None:
            (directory / "tokenizer.model").write_bytes(content)
        code, out, err = run(*command)
        assert code == 2 and words in err and "kernel" in out
        caplog.clear()
        assert run("convert", directory, tmp_path / words)[0] == 0
        # One that was never there is left to the user.
        assert (words in caplog.text and "without it a conversion takes no text" in caplog.text) == (content is not None)
    made.write(tmp_path / "tokenizer", made.byte_level(made.LLAMA3))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "tokenizer" / name, directory)
    (directory / "tokenizer.model").unlink()
    assert run(*command)[0] == 0
    caplog.clear()
    assert run("convert", directory, tmp_path / "out")[0] == 0 and not caplog.records


TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def test_a_template_of_processors(tmp_path):
    directory = made.write(tmp_path, made.byte_level(made.LLAMA3), tokenizer_class="PreTrainedTokenizerFast")
    file = directory / "chat_template.json"
    for template in (TEMPLATE, [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}]):
        file.write_text(json.dumps({"chat_template": template}), encoding="utf-8-sig")
        found = load_tokenizer(directory)
        assert found.apply_chat_template([{"role": "user", "content": "mew"}], tokenize=False) == "[mew]"
    (directory / "chat_template.jinja").write_text("other")
    assert load_tokenizer(directory).chat_template == "other"
    (directory / "chat_template.jinja").unlink()
    for content in ({}, {"chat_template": 3}, {"chat_template": [{"name": "a"}]}):
        file.write_text(json.dumps(content))
        with pytest.raises(InputError, match=r'chat_template.json: should be \{"chat_template": TEXT\}'):
            load_tokenizer(directory)
