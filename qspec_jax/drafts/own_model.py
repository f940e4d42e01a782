"""Loads the model of a draft's own checkpoint; for an outlined target, makes an outline from config.json."""

import math

import jax
from jax.sharding import NamedSharding, PartitionSpec

from qspec_jax.checkpoints.hub import local
from qspec_jax.checkpoints.huggingface import load_config
from qspec_jax.checkpoints.loading import config_and_dtype, load_model
from qspec_jax.checkpoints.tokenizers import known_ids, load_tokenizer
from qspec_jax.drafts.int4 import int4_model
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama
from qspec_jax.models.sharding import mesh_of
from qspec_jax.quantization.outline import is_outline, outline


def own_config(checkpoint: str, target: Llama) -> LlamaConfig:
    """The config of a draft's own checkpoint, a directory or a name on the Hub.

    Raises InputError where it cannot be read, and where the vocabulary is of another size than the target's; unless its tokenizer's ids fit
    into both, so that only what pads them differs.
    """
    config = load_config(checkpoint) if is_outline(target) else config_and_dtype(checkpoint)[0]
    own, wanted = config.vocab_size, target.config.vocab_size
    if own != wanted and not _ids_of(checkpoint) <= min(own, wanted):
        raise InputError(f"{checkpoint}: a vocabulary of {own} tokens; a draft needs the target's, of {wanted}")
    return config


def _ids_of(checkpoint: str) -> float:
    """The largest id of a checkpoint's tokenizer, plus one; infinity where there is no tokenizer to say so."""
    try:
        return known_ids(load_tokenizer(checkpoint))
    except InputError:
        return math.inf


def own_model(checkpoint: str, target: Llama, *, weight_bits: int) -> Llama:
    """The model of a draft's own checkpoint, in the target's dtype and on its devices; where those are several, whole on each of them, for
    a small model's steps are too short to be divided. weight_bits: 16 for its weights as they are, or 4.

    Raises InputError where it cannot be loaded. It does not compare vocabularies: `own_config` alone does.
    """
    if is_outline(target):
        return outline(load_config(checkpoint), int4=weight_bits == 4)
    directory = local(checkpoint)
    model = load_model(directory, dtype=target.dtype.name)
    model = int4_model(model) if weight_bits == 4 else model
    mesh = mesh_of(target.weights())
    return model if mesh is None else jax.device_put(model, NamedSharding(mesh, PartitionSpec()))
