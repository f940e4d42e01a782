"""The tokenizer of a GGUF file, made from its metadata: the files that a Hugging Face directory has for it."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qspec_jax.checkpoints.gguf_file import GgufFile, read_gguf
from qspec_jax.checkpoints.text_ends import post_processor
from qspec_jax.errors import InputError, flat, warn_once

log = logging.getLogger(__name__)

TOKENS = "tokenizer.ggml.tokens"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
# Texts are divided into words by an expression, whose words are encoded one by one.
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre of BPE over bytes -> the expression; None is GPT-2's own.
_WORDS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("gpt-2", "gpt2", "olmo", "mpt", "smollm", "starcoder", "refact", "command-r"), None),
    "tekken": _TEKKEN,
}
_DIGITS = ("smollm", "starcoder", "refact", "command-r")  # where a digit is a word
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")  # where a word of the vocabulary is not merged
_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")  # where texts begin with BOS unless the metadata says otherwise
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_BLANK = "▁"


def tokenizer_files(file: GgufFile, max_length: int) -> dict[str, bytes]:
    """The contents of tokenizer.json, tokenizer_config.json and chat_template.jinja; empty for a file without a tokenizer.

    Args:
        file: the headers.
        max_length: the model's positions.

    Raises:
        InputError: for a kind of tokenizer that is not supported, and for metadata that contradicts itself.
    """
    if TOKENS not in file.metadata:
        return {}
    reader = _Reader(file)
    named = {name: token for key, name in _NAMED.items() if (token := reader.named(key)) is not None}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **named,
    }
    files = {
        "tokenizer.json": reader.tokenizer().to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n",
    }
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        files["chat_template.jinja"] = template.encode()
    return files


def has_gguf_tokenizer(path: Path) -> bool:
    """Whether a GGUF file has the tokens of a tokenizer, of a supported kind or not."""
    return TOKENS in read_gguf(path).metadata


class _Reader:
    """Makes a tokenizer of the metadata of one file; every error names the file."""

    def __init__(self, file: GgufFile):
        self.file = file
        self.kind = file.metadata.get("tokenizer.ggml.model")
        if self.kind not in ("gpt2", "llama"):
            raise self.error(f"a tokenizer of kind {self.kind} (tokenizer.ggml.model) is not supported; gpt2 and llama are")
        self.tokens: list[str] = self.array(TOKENS)
        self.types: Sequence[int] = self.array("tokenizer.ggml.token_type", [_NORMAL] * len(self.tokens))
        if not all(isinstance(token, str) for token in self.tokens) or len(self.types) != len(self.tokens):
            raise self.error(f"{TOKENS} should be texts, and tokenizer.ggml.token_type a number for each of them")
        self.types = [int(each) for each in self.types]
        # Rows of the vocabulary that no token has are named after their ids.
        self.vocabulary = {
            token: index for index, token in enumerate(self.tokens) if not (self.types[index] == _UNUSED and token == f"[PAD{index}]")
        }

    def error(self, what: str) -> InputError:
        return InputError(f"{self.file.path}: {flat(what)}")

    def array(self, key: str, default: Any = None) -> Any:
        found = self.file.metadata.get(key, default)
        if found is None or isinstance(found, str | int | float):
            raise self.error(f"{key} {'is missing' if found is None else 'should be an array'}; its tokenizer needs it")
        return found

    def id_of(self, key: str) -> int | None:
        """The id of BOS, EOS and the like; None if there is none."""
        found = self.file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if found is None or (found == 0xFFFFFFFF and key != "bos"):
            return None
        if not isinstance(found, int) or not 0 <= found < len(self.tokens):
            raise self.error(f"tokenizer.ggml.{key}_token_id is {found}, and there are {len(self.tokens)} tokens")
        return found

    def named(self, key: str) -> str | None:
        """The token that is BOS, EOS and the like."""
        index = self.id_of(key)
        return None if index is None else self.tokens[index]

    def flag(self, key: str, default: bool) -> bool:
        found = self.file.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(found, bool):
            raise self.error(f"tokenizer.ggml.{key} is {found!r}, should be true or false")
        return found

    def tokenizer(self) -> Any:
        """The tokenizer of the package tokenizers."""
        from tokenizers import AddedToken

        made = self.over_bytes() if self.kind == "gpt2" else self.sentencepiece()
        added = [
            AddedToken(token, special=self.types[index] != _USER_DEFINED, normalized=False)
            for token, index in self.vocabulary.items()
            if self.types[index] in (_CONTROL, _USER_DEFINED, _UNKNOWN)
        ]
        made.add_tokens(added)
        return made

    def over_bytes(self) -> Any:
        """BPE over bytes, as GPT-2 has it."""
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        pre = self.file.metadata.get("tokenizer.ggml.pre")
        if pre not in _WORDS:
            found = "is missing" if pre is None else f"{pre} is not known"
            raise self.error(f"tokenizer.ggml.pre, how texts are divided into words, {found}; known are {', '.join(_WORDS)}")
        model = models.BPE(vocab=self.vocabulary, merges=self.stored_merges(), ignore_merges=pre in _WHOLE_WORDS)
        made, words = Tokenizer(model), _WORDS[pre]
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
        first = pre_tokenizers.Split(Regex(words), "isolated") if words else pre_tokenizers.Digits(individual_digits=True)
        made.pre_tokenizer = pre_tokenizers.Sequence([first, bytes_of]) if words or pre in _DIGITS else bytes_of
        if words == _QWEN2:
            made.normalizer = normalizers.NFC()
        made.decoder = decoders.ByteLevel()
        self.add_ends(made, pre in _BOS)
        return made

    def sentencepiece(self) -> Any:
        """BPE of SentencePiece, as Llama 2 has it: pieces are joined in the order of their scores."""
        from tokenizers import Tokenizer, decoders, models, normalizers

        scores = self.array("tokenizer.ggml.scores")
        if len(scores) != len(self.tokens):
            raise self.error(f"tokenizer.ggml.scores should have a number for each of {len(self.tokens)} tokens, and has {len(scores)}")
        unknown = next((token for index, token in enumerate(self.tokens) if self.types[index] == _UNKNOWN), None)
        has_bytes = _BYTE in self.types
        model = models.BPE(vocab=self.vocabulary, merges=self.merges(scores), unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
        made, blank = Tokenizer(model), self.flag("add_space_prefix", True)
        replaced = [normalizers.Replace(" ", _BLANK)]
        made.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), *replaced] if blank else replaced)
        stripped = [decoders.Strip(" ", 1, 0)] if blank else []
        made.decoder = decoders.Sequence([decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped])
        self.add_ends(made, True)
        return made

    def merges(self, scores: Sequence[float]) -> list[tuple[str, str]]:
        """The pairs of pieces that make a piece, the piece of the highest score first.

        Pieces of equal scores, and pairs of one piece, are in the order of their ids.
        """
        found = []
        for piece, index in self.vocabulary.items():
            if self.types[index] in (_NORMAL, _USER_DEFINED):
                halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
                pairs = [(left, right) for left, right in halves if left in self.vocabulary and right in self.vocabulary]
                pairs.sort(key=lambda pair: (self.vocabulary[pair[0]], self.vocabulary[pair[1]]))
                found += [(-float(scores[index]), pair) for pair in pairs]
        return [pair for _, pair in sorted(found, key=lambda entry: entry[0])]

    def stored_merges(self) -> list[tuple[str, str]]:
        """The merges whose parts and result are tokens; the package tokenizers refuses others."""
        kept, lost = [], []
        for text in self.array("tokenizer.ggml.merges"):
            left, _, right = text.partition(" ")
            is_known = left in self.vocabulary and right in self.vocabulary and left + right in self.vocabulary
            (kept if is_known else lost).append((left, right))
        if lost:
            first = repr(" ".join(lost[0]))
            are = f"the merge {first} is" if len(lost) == 1 else f"{len(lost)} merges, such as {first}, are"
            warn_once(log, f"{self.file.path}: {are} left out, whose parts or result are no tokens of its vocabulary")
        return kept

    def add_ends(self, made: Any, bos: bool) -> None:
        """Makes texts begin with BOS and end with EOS as the metadata says. bos: where it does not say."""
        asked = {"bos": self.flag("add_bos_token", bos), "eos": self.flag("add_eos_token", False)}
        tokens = {key: self.named(key) for key, add in asked.items() if add and self.named(key) is not None}
        if not tokens:
            return
        before, after = ([tokens[key]] if key in tokens else [] for key in asked)
        made.post_processor = post_processor(before, after, self.vocabulary.__getitem__)
