"""Small tokenizers of the kinds that checkpoints have, as tokenizer.json."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA3.replace("{1,3}", "")
SPECIAL = ("<unk>", "<s>", "</s>")
WORDS = ("cats", "mew", "12", "345")


def byte_level(regex: str | None, *, bos: bool = False, add_prefix_space: bool = False) -> Tokenizer:
    """Byte-level BPE, as of GPT-2 and Llama 3. regex: of the words; None is GPT-2's."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(_bpe(vocabulary, "Ġ", ignore_merges=bos))
    if regex is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space)
    else:
        words = pre_tokenizers.Split(Regex(regex), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return _with_special(tokenizer, bos)


def sentencepiece_like(blank: str | None, *, bos: bool = True) -> Tokenizer:
    """BPE with byte fallback, as of Llama 2. blank: what puts one before a text: "normalizer", "metaspace" or nothing."""
    vocabulary = {
        token: i for i, token in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))])
    }
    tokenizer = Tokenizer(_bpe(vocabulary, "▁", unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if blank == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        prepend = [normalizers.Prepend("▁")] if blank else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if blank else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return _with_special(tokenizer, bos)


def unigram() -> Tokenizer:
    pieces = [*((token, 0.0) for token in SPECIAL), ("▁", -3.0), *(("▁" + word, -2.0) for word in WORDS)]
    tokenizer = Tokenizer(models.Unigram([*pieces, *((chr(code), -6.0) for code in range(33, 127))], unk_id=0))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizers.NFKC(), pre_tokenizers.Metaspace(), decoders.Metaspace()
    return _with_special(tokenizer, bos=False)


def word_piece() -> Tokenizer:
    characters = sorted({*"".join(WORDS), *"abc6789"})
    tokens = [*SPECIAL, *WORDS, *characters, *("##" + character for character in characters)]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return _with_special(tokenizer, bos=False)


def write(directory: Path, tokenizer: Tokenizer, model_type: str = "llama", **config: Any) -> Path:
    """Writes tokenizer.json, tokenizer_config.json with these entries and a config.json of that type; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | config))
    return directory


def _bpe(vocabulary: dict[str, int], blank: str, **settings: Any) -> models.BPE:
    """With merges to the words, with and without a blank before them; "12" and "345" merge too, where a regex leaves them together."""
    pairs = {}
    for word in (blank + blank, *WORDS, "12345", "sm", *("o" + blank, "m" + blank)):
        parts = ["12", "345"] if word == "12345" else word
        for i in range(1, len(parts)):
            pairs["".join(parts[:i]), parts[i]] = None
    pairs |= {(blank, word): None for word in WORDS}
    for pair in pairs:
        vocabulary.setdefault("".join(pair), len(vocabulary))
    return models.BPE(vocab=vocabulary, merges=list(pairs), **settings)


def _with_special(tokenizer: Tokenizer, bos: bool) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if bos:
        tokens = [("<s>", tokenizer.token_to_id("<s>"))]
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=tokens)
    return tokenizer
