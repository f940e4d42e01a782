"""The embedded model's tokenizer: byte-level BPE for Python source, lossless, in Hugging Face's files."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from qspec_jax.files import whole_file, write_json

END_OF_TEXT = "<|endoftext|>"  # before every document; both BOS and EOS
END_OF_TEXT_ID = 0
SAMPLE_BYTES = 40_000_000

# Words with the character before them (" word", "_word", ".word"), single digits, runs of punctuation, and white space. A line break with
# the next line's indentation, except for its last space, is one piece, so that indentation costs one token a line.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n](?=\S)|\s+(?!\S)|\s+"


def train_tokenizer(texts: Sequence[str], vocab_size: int, *, seed: int) -> Tokenizer:
    """Trains a tokenizer on a random sample of the texts, of about `SAMPLE_BYTES`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_PIECES), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )
    sample, size = [], 0
    for text in random.Random(seed).sample(texts, len(texts)):
        if size >= SAMPLE_BYTES:
            break
        sample.append(text)
        size += len(text)
    tokenizer.train_from_iterator(sample, trainer, length=len(sample))
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, chunk: int = 2_000) -> list[np.ndarray]:
    """Token ids of each text, uint16, with END_OF_TEXT_ID in front; encoded on all cores, `chunk` texts at a time."""
    encoded = []
    for start in range(0, len(texts), chunk):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + chunk], add_special_tokens=False):
            encoded.append(np.asarray([END_OF_TEXT_ID, *encoding.ids], np.uint16))
    return encoded


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """The number of UTF-8 bytes of each token id's text, [V]; 0 for END_OF_TEXT."""
    sizes = np.zeros(tokenizer.get_vocab_size(), np.int64)
    for token, index in tokenizer.get_vocab().items():
        sizes[index] = len(token) if index != END_OF_TEXT_ID else 0  # byte-level BPE writes every byte as one character
    return sizes


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer loads."""
    with whole_file(directory / "tokenizer.json") as unfinished:
        tokenizer.save(str(unfinished))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,  # it would take spaces out of the decoded text
    }
    write_json(directory / "tokenizer_config.json", config)
