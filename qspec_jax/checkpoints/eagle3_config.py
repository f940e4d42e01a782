"""The config.json of an EAGLE-3 head, as SpecForge, speculators or ModelOpt writes it, read and checked against the target's config."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qspec_jax.checkpoints.quantized.formats import CONFIG_KEY
from qspec_jax.errors import InputError, either, flat
from qspec_jax.files import read_json
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.config_values import Values
from qspec_jax.models.eagle3 import Eagle3Config
from qspec_jax.models.families import ARCHITECTURES, FROM
from qspec_jax.models.sliding_layers import read_window

_MIN_LAYERS = 7  # of a target whose taps by default are different and in order
_KIND, _LAYERS, _LEGACY_FC_NORM = "speculators_model_type", "transformer_layer_config", "use_aux_norm"
_NESTED = "eagle_config"
_MODEL_TYPES = "llama", "qwen3"  # of the head's layers
_WINDOWS = "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"
# Keys that list layers of the target, within another key or at the top level, and what to add to get indices of residual streams.
_TAPS = (
    (None, "eagle_aux_hidden_state_layer_ids", 0),
    (None, "aux_hidden_state_layer_ids", 0),
    (_NESTED, "eagle_aux_hidden_state_layer_ids", 1),  # numbers of the layers that have these outputs
)


def load_head_config(directory: Path, target: LlamaConfig) -> Eagle3Config:
    """The configuration of the head in a directory; its weights need not be there. Raises InputError as `read_head_config`."""
    path = directory / "config.json"
    return read_head_config(read_json(path), target, source=str(path))


def read_head_config(raw: Mapping[str, Any], target: LlamaConfig, *, source: str = "config.json") -> Eagle3Config:
    """Reads a head's config.json.

    Args:
        raw: its contents.
        target: the config of the target.
        source: the name of the contents in messages.

    Raises:
        InputError: for another kind of draft, for layers that are not supported, for a value that is missing or impossible, and for a head
            of another target.
    """
    values = Values({key: value for key, value in raw.items() if value is not None}, source)
    layers = _layers(values)
    given = _object(values, _NESTED)
    if not values.flag("use_aux_hidden_state", True, of=given):
        raise values.error(f"use_aux_hidden_state of {_NESTED} is false, which is not supported; EAGLE-3 heads read several layers")
    sizes = {"vocab_size": (layers.vocab_size, target.vocab_size)}
    whose = "target_hidden_size" if "target_hidden_size" in values.raw else "hidden_size"
    sizes[whose] = values.number(whose, layers.hidden_size), target.hidden_size
    for name, (own, wanted) in sizes.items():
        if own != wanted:
            raise values.error(f"{name} is {own}, should be {wanted} for this target; the head was made for another one")
    taps = residual_taps(raw, target.num_layers, source=source)
    if (count := values.number("num_aux_hidden_states", len(taps))) != len(taps):
        raise values.error(f"num_aux_hidden_states is {count}, should be {len(taps)}, the number of layers that the head reads")

    def flag(name: str, default: bool = False) -> bool:
        return values.flag(name, default, of=values.raw if name in values.raw else given)

    return Eagle3Config(
        layers=layers,
        taps=taps,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=values.number("draft_vocab_size", layers.vocab_size, maximum=layers.vocab_size),
        # speculators always writes this one; without it, other engines take its heads, and no others, to have the norm there.
        norm_before_residual=flag("norm_before_residual", _KIND in values.raw),
        norm_before_fc=flag("norm_before_fc"),
        fc_norm=flag("fc_norm") or flag(_LEGACY_FC_NORM),
        norm_output=flag("norm_output"),
    )


def residual_taps(raw: Mapping[str, Any], layers: int, *, source: str = "config.json") -> tuple[int, ...]:
    """The residual streams of a target that a head reads, see `Eagle3Config`.

    Args:
        raw: the contents of the head's config.json.
        layers: of the target.
        source: the name of the contents in messages.

    Raises:
        InputError: for a list that is none of layers in order, for two lists that differ, and, without a list, for a target that has too
            few layers.
    """
    values, found = Values(raw, source), {}
    for outer, key, offset in _TAPS:
        given = (raw if outer is None else _object(values, outer)).get(key)
        if given is None or given == []:
            continue
        name, last = key if outer is None else f"{outer}.{key}", layers - offset
        numbers = isinstance(given, list) and all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= last for i in given)
        if not numbers or any(second <= first for first, second in itertools.pairwise(given)):
            raise values.error(f"{name} is {given!r}, should list layers of the target, of {layers}, in order: numbers from 0 to {last}")
        found[name] = tuple(i + offset for i in given)
    if len(set(found.values())) > 1:
        raise values.error(f"{' and '.join(found)} name different layers; {_NESTED} counts from 1 less, and one of them is wrong")
    if found:
        return next(iter(found.values()))
    if layers < _MIN_LAYERS:
        raise values.error(
            f"eagle_aux_hidden_state_layer_ids is missing, and a target of {layers} layers is too shallow for the default, which needs "
            f"{_MIN_LAYERS}"
        )
    return 2, layers // 2, layers - 3


def _object(values: Values, key: str) -> Mapping[str, Any]:
    """The object of a key; empty without one."""
    given = values.raw.get(key)
    if given is not None and not isinstance(given, Mapping):
        raise values.error(f"{key} is {given!r}, should be an object")
    return {name: value for name, value in (given or {}).items() if value is not None}


def _layers(values: Values) -> LlamaConfig:
    """The configuration of the head's layers."""
    raw, source = values.raw, values.source
    kind, name = raw.get(_KIND), _architecture(raw)
    if kind is not None and kind != "eagle3":
        raise values.error(f"{_KIND} {kind} is not supported; eagle3 is")
    if kind is None and "draft_vocab_size" not in raw and "eagle3" not in name.lower():
        raise values.error(
            f"architecture {name} is no EAGLE-3 head; that is LlamaForCausalLMEagle3, or Eagle3DraftModel with {_KIND} eagle3"
        )
    if CONFIG_KEY in raw:
        raise values.error(f"{CONFIG_KEY} says that the head's weights are quantized, which is not supported; bring them unquantized")
    if kind is not None:
        if not (raw := _object(values, _LAYERS)):
            raise values.error(f"{_LAYERS} is missing, the settings of the head's layers")
        source = f"{source}: {_LAYERS}"
    if (model_type := raw.get("model_type")) not in _MODEL_TYPES:
        what = "is missing" if model_type is None else f"{flat(str(model_type))} is not supported for a head"
        raise InputError(f"{source}: model_type {what}; it should be {either(_MODEL_TYPES)}")
    # The names of architectures are heads' here, and whether tensors are tied to the target's is seen from those that are there.
    plain = {key: value for key, value in raw.items() if key not in ("architectures", *_WINDOWS)} | {"tie_word_embeddings": False}
    config = LlamaConfig.from_hf(plain, source=source)
    # A head may have a window where Llama has none, and one as long as its positions counts too: the target's text may be longer.
    rule = dataclasses.replace(ARCHITECTURES[config.architecture], window_rule=FROM)
    found, window = read_window(Values(raw, source), rule, config.num_layers, ())
    return dataclasses.replace(config, sliding_layers=found, sliding_window=window)


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    return flat(names[0]) if isinstance(names, list) and names and isinstance(names[0], str) else "(none)"
