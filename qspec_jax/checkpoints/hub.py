"""Checkpoints of the Hugging Face Hub, in its local cache. Config, tokenizer and safetensors are fetched; never code or pickles."""

import functools
import glob
import logging
import re
import sys
from pathlib import Path

from qspec_jax.checkpoints.gguf_file import gguf_in, is_gguf
from qspec_jax.checkpoints.other_formats import describe_file
from qspec_jax.checkpoints.weight_files import weight_files
from qspec_jax.errors import InputError, one_line, reading, with_type

log = logging.getLogger(__name__)

SMALL_FILES = (
    *("config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
TEMPLATES = "additional_chat_templates/*.jinja"  # further chat templates, as transformers stores them
_FETCHED = ("*.safetensors", "*.safetensors.index.json", "quantize_config.json", *SMALL_FILES)
# Another layout of the same weights, and files in folders, unless an index names them.
_NOT_FETCHED = ("consolidated*", "adapter*", "*/*")
_NEEDED = "a Hugging Face checkpoint directory, a GGUF file or ORG/NAME on the Hub is needed"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")


def local(checkpoint: str | Path, *, progress: bool | None = None) -> Path:
    """The directory of a checkpoint, or its GGUF file.

    Args:
        checkpoint: a directory, a GGUF file, or ORG/NAME or ORG/NAME@REVISION, which is fetched from the Hub.
        progress: whether bars are shown; None: where standard error is a terminal.

    Returns:
        The directory; the GGUF file if one is given, or if a directory has one and no safetensors.

    Raises:
        InputError: if it is no directory and cannot be fetched.
    """
    if checkpoint == "":
        raise InputError(f"the name of the checkpoint is empty; {_NEEDED}")
    directory = Path(checkpoint)
    with reading(checkpoint):
        if directory.is_dir():
            return gguf_in(directory) or directory
        if is_gguf(directory):
            return directory
        if directory.exists():
            raise InputError(f"{checkpoint}: {describe_file(directory)}")
        # A name that does not exist in a folder that does is a mistyped path.
        mistyped = directory.parent.is_dir() and "@" not in directory.name
        if mistyped or not _NAME.fullmatch(str(checkpoint)):
            raise InputError(f"{checkpoint}: no such directory or file; {_NEEDED}")
    from huggingface_hub import constants, utils  # slow to import, and not needed for a directory

    hide = not (sys.stderr.isatty() if progress is None else progress) and constants.HF_HUB_DISABLE_PROGRESS_BARS is None
    if hide:
        utils.disable_progress_bars()
    try:
        found = _fetched(str(checkpoint))
        if not found.is_dir():  # removed since it was fetched
            _fetched.cache_clear()
            found = _fetched(str(checkpoint))
        return found
    finally:
        if hide:
            utils.enable_progress_bars()


def _named_elsewhere(snapshot: Path) -> list[str]:
    """Patterns for the weights that an index or config.json names and that _FETCHED leaves out: those in folders."""
    try:
        names = weight_files(snapshot).names
    except InputError:  # loading says what is wrong
        return []
    return [glob.escape(name) for name in names if name.endswith(".safetensors") and not (snapshot / name).exists()]


@functools.cache
def _fetched(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    repository, _, revision = name.partition("@")
    unreached = None
    try:
        HfApi().model_info(repository, revision=revision or "main", timeout=30)
    except Exception as error:  # the network and the Hub raise many kinds
        unreached = error
    fetch = functools.partial(snapshot_download, repository, revision=revision or None, local_files_only=unreached is not None)
    try:
        found = fetch(allow_patterns=_FETCHED, ignore_patterns=_NOT_FETCHED)
        if further := _named_elsewhere(Path(found)):
            found = fetch(allow_patterns=further)
    except Exception as error:
        reason = _described(unreached or error)
        raise InputError(f"{name}: no such directory, and it cannot be fetched from the Hugging Face Hub {reason}") from None
    if unreached:
        log.warning("%s: the Hub did not answer (%s); this is commit %s of the local cache", name, one_line(unreached), Path(found).name)
    return Path(found)


def _described(error: Exception) -> str:
    """Why nothing was fetched, and what to do where the Hub was not reached."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):  # the Hub answered, and its own words say what to do
        return f"({with_type(error)})"
    offline = isinstance(error, OfflineModeIsEnabled)
    why, remedy = ("HF_HUB_OFFLINE is set", "unset it") if offline else (with_type(error), "connect this machine to the network")
    return f"({why}) and is not in the local cache; {remedy}, or give a directory that holds the checkpoint"
