"""A checkpoint's tokenizer: loaded as its tokenizer.json says, its special tokens and ids, and whether two checkpoints share one."""

import codecs
import contextlib
import functools
import importlib.util
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qspec_jax.checkpoints.gguf_file import is_gguf
from qspec_jax.checkpoints.gguf_source import gguf_tokenizer_files
from qspec_jax.checkpoints.gguf_tokenizer import TOKENS, has_gguf_tokenizer
from qspec_jax.checkpoints.hub import TEMPLATES, local
from qspec_jax.checkpoints.text_ends import post_processor
from qspec_jax.errors import InputError, reading, with_type
from qspec_jax.files import read_json, refuse_pointer

log = logging.getLogger(__name__)

TOKENIZER_JSON, SENTENCEPIECE, CONFIG = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
TOKENIZER_FILES = (TOKENIZER_JSON, SENTENCEPIECE, "vocab.json")
LEGACY_TEMPLATE = "chat_template.json"  # of processors, of transformers before 4.51; AutoTokenizer does not read it
_TEXTS = (".json", ".jinja", ".txt")  # files that may begin with a byte order mark
_PACKAGES = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}  # module and package, for SentencePiece models
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The parts of tokenizer.json that decide on the ids of a text and the text of ids.
_PARTS = ("normalizer", "pre_tokenizer", "model", "decoder", "added_tokens")


def load_tokenizer(directory: str | Path):
    """Loads the directory's tokenizer (a transformers fast tokenizer), with exactly the token ids of its tokenizer.json.

    Args:
        directory: a checkpoint's directory, its GGUF file, or ORG/NAME on the Hub.

    Raises:
        InputError: if there is no tokenizer that can be read.
    """
    directory = local(directory)
    if is_gguf(directory):
        return _of_gguf(directory)
    found = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not found:
        raise InputError(f"{directory}: no tokenizer in it; one of {', '.join(TOKENIZER_FILES)} is needed")
    for path in found:
        with reading(path), path.open("rb") as file:
            refuse_pointer(path, file.read(64))
    missing = [package for module, package in _PACKAGES.items() if not _is_installed(module)]
    if missing and found[0].name == SENTENCEPIECE and _is_sentencepiece(found[0]):
        wanted = f"{' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
        raise InputError(f"{found[0]}: reading it takes {wanted}: pip install {' '.join(missing)}, or qspec-jax[sentencepiece]")
    # transformers warns on import if there is no torch, but only its tokenizers are used here.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

    # Old checkpoints name special tokens in a file of their own.
    stored = [read_json(path) for name in ("special_tokens_map.json", CONFIG) if (path := directory / name).is_file()]
    config = {name: value for each in stored for name, value in each.items()}
    with _without_marks(directory) as folder:
        try:
            tokenizer = _loaded(folder, config)
        except InputError:
            raise
        except Exception as error:  # broken files raise many kinds, in the tokenizers library a bare Exception
            raise InputError(f"{directory}: no tokenizer that transformers can read ({with_type(error)})") from None
        if not tokenizer.chat_template and (folder / LEGACY_TEMPLATE).is_file():
            tokenizer.chat_template = _legacy_template(directory / LEGACY_TEMPLATE)
    tokenizer.name_or_path = str(directory)  # for messages; it may have been read from a copy
    return tokenizer


def has_tokenizer(directory: Path) -> bool:
    """Whether a checkpoint's directory, or its GGUF file, has a tokenizer, readable or not."""
    return has_gguf_tokenizer(directory) if is_gguf(directory) else any((directory / name).is_file() for name in TOKENIZER_FILES)


def tokenizer_problem(directory: str | Path) -> str | None:
    """The reason why `load_tokenizer` cannot read the tokenizer of a directory; None if it can."""
    try:
        load_tokenizer(directory)
    except InputError as error:
        return str(error)
    return None


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The special tokens of a tokenizer of transformers, which no text has, and their ids.

    They are those that its files flag as special, and those with a name, such as EOS.
    """
    added = len(getattr(tokenizer, "added_tokens_decoder", ()))
    return _special_tokens(tokenizer, added, tuple(getattr(tokenizer, "all_special_tokens", ())))


@functools.lru_cache(maxsize=8)
def _special_tokens(tokenizer: Any, count: int, named: tuple[str, ...]) -> dict[str, int]:
    """`special_tokens`, found once, since some tokenizers have thousands of added tokens, unless their count or the named ones change."""

    def is_left_out(index: int) -> bool:
        """Whether texts leave a token out, as they do if only one of two files flags it as special."""
        return tokenizer.decode([index], skip_special_tokens=True) != tokenizer.decode([index], skip_special_tokens=False)

    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {token.content: index for index, token in added.items() if token.special or is_left_out(index)}
    return found | {token: tokenizer.convert_tokens_to_ids(token) for token in named}


@functools.lru_cache(maxsize=8)
def known_ids(tokenizer: Any) -> int:
    """The largest id that a tokenizer has, plus one."""
    return max(tokenizer.get_vocab().values()) + 1


def padding_from(tokenizer: Any, vocab_size: int) -> int | None:
    """The first id of a model's vocabulary that is padding: no text has it, and it should not be generated.

    Models of one family may be padded differently. None if the tokenizer has every id, or does not say which ids it has.
    """
    if not hasattr(tokenizer, "get_vocab") or len(tokenizer) >= vocab_size:
        return None
    return known if (known := known_ids(tokenizer)) < vocab_size else None


def check_same_tokens(draft: str | Path, target: str | Path) -> None:
    """Raises InputError if the tokenizers of two checkpoints give a token different ids, or an id to different tokens.

    Tokens that were added to a vocabulary, special ones among them, may have other names. Checkpoints without a tokenizer pass.
    """
    directories = [local(draft), local(target)]
    if directories[0].samefile(directories[1]) or not all(map(has_tokenizer, directories)):
        return
    files = [directory / TOKENIZER_JSON for directory in directories]
    if all(path.is_file() for path in files) and files[0].read_bytes() == files[1].read_bytes():
        return
    tokenizers = [load_tokenizer(directory) for directory in directories]
    added = {token for tokenizer in tokenizers for token in tokenizer.get_added_vocab()}
    own, wanted = ({index: token for token, index in tokenizer.get_vocab().items() if token not in added} for tokenizer in tokenizers)
    if other := [index for index in sorted(own.keys() & wanted.keys()) if own[index] != wanted[index]]:
        raise InputError(
            f"{draft}: token {other[0]} is {own[other[0]]!r} in its vocabulary and {wanted[other[0]]!r} in that of {target}; a draft needs "
            "the target's vocabulary"
        )


def _of_gguf(path: Path) -> Any:
    """The tokenizer of a GGUF file."""
    files = gguf_tokenizer_files(path)
    if not files:
        raise InputError(f"{path}: no tokenizer in it; its metadata should have {TOKENS}")
    with tempfile.TemporaryDirectory(prefix="qspec-") as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        tokenizer = load_tokenizer(folder)
    tokenizer.name_or_path = str(path)
    return tokenizer


def _loaded(folder: Path, config: dict[str, Any]):
    """The tokenizer as transformers loads it, but always with the contents of tokenizer.json.

    `config` has the settings of tokenizer_config.json and special_tokens_map.json.
    """
    # Slow to import, and not needed for token ids.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.tokenization_utils_base import get_fast_tokenizer_file

    file = folder / get_fast_tokenizer_file(config.get("fast_tokenizer_files", []))
    settings = dict(local_files_only=True, trust_remote_code=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **settings)
    except Exception as error:
        if not file.is_file():
            raise
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), **settings)
        except Exception:
            raise error from None
        log.warning("the tokenizer is read from %s alone: transformers cannot make its class (%s)", file.name, with_type(error))
    if file.is_file() and hasattr(tokenizer, "backend_tokenizer"):
        _follow_file(tokenizer, file, config)
    return tokenizer


def _follow_file(tokenizer: Any, file: Path, config: dict[str, Any]) -> None:
    """Replaces the parts that a tokenizer's class made by those of tokenizer.json.

    Tokens that the file does not have stay, and so do the settings of tokenizer_config.json for a prefix blank, BOS and EOS.
    """
    import tokenizers

    backend, own, defaults = tokenizer.backend_tokenizer, tokenizers.Tokenizer.from_file(str(file)), []
    # A class's default, such as GPT-2's <|endoftext|>, is no token of a checkpoint that names it nowhere, and must not take another's id.
    for name in _NAMED:
        token = getattr(tokenizer, name, None)
        if token is not None and name not in config and own.token_to_id(token) is None:
            setattr(tokenizer, name, None)
            defaults.append(token)
    own.add_tokens([token for _, token in sorted(backend.get_added_tokens_decoder().items()) if token.content not in defaults])
    own.encode_special_tokens = backend.encode_special_tokens
    blank = config.get("add_prefix_space")
    if isinstance(blank, bool) and isinstance(own.pre_tokenizer, tokenizers.pre_tokenizers.ByteLevel):
        own.pre_tokenizer.add_prefix_space = blank
    own.post_processor = _post_processor(own, tokenizer, config)
    made, wanted = (json.loads(each.to_str()) for each in (backend, own))
    if others := [part for part in _PARTS if made[part] != wanted[part]]:
        name = type(tokenizer).__name__
        log.info("tokens are those of %s: its %s replace those of transformers' %s", file.name, ", ".join(others), name)
        tokenizer._tokenizer = own
    else:
        backend.post_processor = own.post_processor


def _post_processor(own: Any, tokenizer: Any, config: dict[str, Any]) -> Any:
    """The file's post-processor, or one that adds BOS and EOS as tokenizer_config.json says explicitly."""
    bare, whole = (own.encode("a", add_special_tokens=special).ids for special in (False, True))
    at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    has = {"add_bos_token": whole[:at], "add_eos_token": whole[at + len(bare) :]}
    ids = {"add_bos_token": tokenizer.bos_token_id, "add_eos_token": tokenizer.eos_token_id}
    said = {name: config[name] for name in has if isinstance(config.get(name), bool)}
    asked = {name: [ids[name]] if add and ids[name] is not None else [] for name, add in said.items()}
    if has | asked == has:
        return own.post_processor
    before, after = ([own.id_to_token(index) for index in (has | asked)[name]] for name in has)
    return post_processor(before, after, own.token_to_id)


def _legacy_template(path: Path) -> Any:
    """The template in a LEGACY_TEMPLATE file, or the templates by their names."""
    template = read_json(path).get("chat_template")
    try:
        named = {each["name"]: each["template"] for each in template} if isinstance(template, list) else {"default": template}
    except (KeyError, TypeError):
        named = {}
    if not named or not all(isinstance(each, str) for each in named.values()):
        raise InputError(f'{path}: should be {{"chat_template": TEXT}}')
    return named if isinstance(template, list) else template


@contextlib.contextmanager
def _without_marks(directory: Path) -> Iterator[Path]:
    """Yields the directory, or if a text in it has a byte order mark, which transformers refuses, a copy without the marks.

    The copy is temporary, and has links to the other files.
    """
    files = [path for path in (*directory.iterdir(), *directory.glob(TEMPLATES)) if path.is_file()]
    marked = [path for path in files if path.suffix in _TEXTS and _begins_with(path, codecs.BOM_UTF8)]
    if not marked:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="qspec-") as folder:
        for path in files:
            place = folder / path.relative_to(directory)
            place.parent.mkdir(exist_ok=True)
            if path in marked:
                place.write_bytes(path.read_bytes().removeprefix(codecs.BOM_UTF8))
            else:
                place.symlink_to(path.resolve())
        yield Path(folder)


def _begins_with(path: Path, content: bytes) -> bool:
    with reading(path), path.open("rb") as file:
        return file.read(len(content)) == content


def _is_sentencepiece(path: Path) -> bool:
    """Whether a tokenizer.model is SentencePiece's, a protobuf message that begins with its first piece; others are text of tiktoken."""
    return _begins_with(path, b"\n")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not installed
        return False
