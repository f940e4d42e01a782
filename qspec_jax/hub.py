"""Checkpoints of the Hugging Face Hub, in its local cache. Config, tokenizer and safetensors are fetched; never code or pickles."""

import functools
import re
import sys
from pathlib import Path

from qspec_jax.errors import InputError

# Of tokenizers; never code.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
SMALL_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
_FETCHED = ("*.safetensors", "*.safetensors.index.json", *SMALL_FILES)
# Another layout of the same weights; and all that is in folders.
_LEFT = ("consolidated*", "*/*")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w.-]+)?")


def local(checkpoint: str | Path, *, progress: bool | None = None) -> Path:
    """The directory of a checkpoint: itself, or, of ORG/NAME or ORG/NAME@REVISION, what is fetched from the Hub.

    progress: bars on standard error; None shows them on a terminal. Raises InputError where it is neither.
    """
    directory = Path(checkpoint)
    try:
        if directory.is_dir():
            return directory
        if directory.exists() or not _NAME.fullmatch(str(checkpoint)):
            raise InputError(f"{checkpoint}: no such directory; a Hugging Face checkpoint directory is needed, or ORG/NAME on the Hub")
    except OSError as error:
        raise InputError(f"{checkpoint}: cannot be read ({error.strerror})") from None
    from huggingface_hub import utils  # slow to import, and for a directory not needed

    shown = not utils.are_progress_bars_disabled()
    if shown and not (sys.stderr.isatty() if progress is None else progress):
        utils.disable_progress_bars()
    try:
        return _fetched(str(checkpoint))
    finally:
        if shown:
            utils.enable_progress_bars()


@functools.cache
def _fetched(name: str) -> Path:
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=_FETCHED, ignore_patterns=_LEFT))
    except Exception as error:  # of the network, of the Hub, of its cache
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise InputError(f"{name}: no such directory, and not to be had from the Hugging Face Hub ({reason})") from None
