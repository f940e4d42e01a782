"""States in files: saved with the identity of model, draft and cache (`state_identity`), and loaded for the same ones only."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qspec_jax.decoding.adaptive import Adaptive
from qspec_jax.decoding.config import GAMMA, GenerationConfig
from qspec_jax.decoding.prepare import OF_STATES
from qspec_jax.decoding.reading import ROOM, reader_of
from qspec_jax.decoding.state_arrays import shapes_of
from qspec_jax.decoding.state_identity import NAMES, difference, identity_of
from qspec_jax.drafts.cascade import FIRST_GAMMA
from qspec_jax.drafts.registry import first_gamma_of, is_cascade, may_become, with_first_gamma
from qspec_jax.errors import InputError, listed
from qspec_jax.files import is_replaced
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket
from qspec_jax.states import file
from qspec_jax.states.state import Reader, Room, State

FORMAT = 3  # of the files; it changes when their content gets another meaning
# The features that a head keeps (`KeptFeatures`), which files of format 2 have not. Zeros mean that none are known.
EARLIER, ADDED = 2, ".kept."
COUNTS = ("cached", "num_queries")
AUTO_SKIP = "skip=auto"
# Parts of a state that may be None, and what a header says of each: whether it is in the file.
KNOWN = {"logits": bool, "adaptive": bool}
# The parts of a header, and of its part "room", with their types.
TYPES = {"format": int, "identity": dict, "room": dict, "known": dict, "settings": dict, "choices": list, "notes": object}
TYPES |= dict.fromkeys(("tokens", *COUNTS), int)
ROOM_TYPES = {field.name: int for field in dataclasses.fields(Room)}
NOT_SAVED_HERE, AGAIN = "is no state that this program saved", "make the state again"
TOKENS, GROUPS, OWN = "tokens", "groups", "own"  # first parts of the names of arrays


def save_state(state: State, path: str | Path, *, notes: Any = None) -> None:
    """Writes a state to a file, which appears whole or not at all.

    Args:
        state: the state.
        path: of the file; one that exists is replaced.
        notes: anything that JSON can express, which `load_with_notes` returns.

    Raises:
        InputError: if the file cannot be written, and for a model that is divided over several processes.
    """
    path = Path(path)
    if not is_replaced(path):
        raise InputError(f"{path}: a state should be saved to a file, since its checksum is written last")
    if not state.reader.model.norm.weight.get_value().is_fully_addressable:
        raise InputError("a state of a model that is divided over several processes cannot be saved; divide it over the devices of one")
    arrays = {TOKENS: state.tokens} | _named(OWN, _own(state))
    if state.pages is not None:
        arrays |= _named(GROUPS, state.reader.pool.groups_of(state.pages))
    header = {"format": FORMAT, "identity": identity_of(state.reader), "room": dataclasses.asdict(state.room), "tokens": len(state)}
    header |= {name: getattr(state, name) for name in COUNTS} | {"known": _known(state), "notes": notes}
    if (choices := _choices(state.reader)) is None:
        raise InputError("a state of a draft with several skip= of which one is auto cannot be saved; give the layers instead of auto")
    header["choices"] = choices
    header["settings"] = {name: value for name, value in state.reader.settings.items() if isinstance(value, str | int)}
    file.write(path, header, arrays)


def load_state(path: str | Path, model: Llama, *, config: GenerationConfig | None = None) -> State:
    """Reads a state from a file that `save_state` wrote.

    Args:
        path: of the file.
        model: the model that the state was made by, with the same weights.
        config: draft, cache and number of drafts, where they should be those that the state was made for; what is left at its default is
            taken from the file. A draft that was given as an object is not in the file.

    Raises:
        InputError: if the file cannot be read, is damaged or no state, and for a state of other weights, dtype, RoPE, cache or draft.
    """
    return load_with_notes(path, model, config=config)[0]


def load_with_notes(path: str | Path, model: Llama, *, config: GenerationConfig | None = None) -> tuple[State, Any]:
    """The state and the notes in a file; see `load_state`."""
    path = Path(path)
    header = file.read_header(path)
    if header.get("format") not in (EARLIER, FORMAT):
        known = f"this program reads versions {EARLIER} and {FORMAT}"
        raise InputError(f"{path}: has version {header.get('format')!r:.60} of the format of states, and {known}")
    if fault := _fault(header, model):
        raise InputError(f"{path}: {NOT_SAVED_HERE}, since {fault}; {AGAIN}")
    stored = header["settings"]
    draft = stored.get("draft")
    if header["format"] == EARLIER and is_cascade(draft) and first_gamma_of(draft) is None:
        # Where a text left it open, it was not chosen then.
        stored = stored | {"draft": with_first_gamma(draft, FIRST_GAMMA)}
    config = _with_stored(path, stored, config or GenerationConfig())
    reader = _reader_with(model, config, min(header["tokens"], model.config.max_length - 1), header["choices"])
    if differs := difference(header["identity"], identity_of(reader)):
        raise InputError(f"{path}: the state was made with {differs}; give what it was made with, or read the text again")
    return _read_state(path, header, reader), header["notes"]


def _read_state(path: Path, header: dict[str, Any], reader: Reader) -> State:
    """The state in a file whose header was checked. Raises InputError for arrays that no state with this header has."""
    room, cached = Room(**header["room"]), header["cached"]
    count = 0 if reader.pool is None else reader.schedule.max_flushes(cached)
    own, groups = shapes_of(reader, room, count)
    own |= {name: None for name, known in header["known"].items() if not known}
    if header["known"]["adaptive"]:
        own["adaptive"] = jax.eval_shape(lambda: Adaptive.begin(1))
    shapes = {TOKENS: jax.ShapeDtypeStruct((header["tokens"],), jnp.int32)} | _named(OWN, own) | _named(GROUPS, groups)
    arrays = file.read(path, shapes, zeros=[name for name in shapes if header["format"] == EARLIER and ADDED in name])

    def filled(part: str, tree: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in _named(part, tree)])

    tokens, held, size = np.asarray(arrays[TOKENS]), filled(OWN, own), reader.model.config.vocab_size
    if tokens.min() < 0 or tokens.max() >= size:
        raise InputError(f"{path}: {NOT_SAVED_HERE}, since it has token ids outside the vocabulary of {size}; {AGAIN}")
    if jax.device_get(held["cache"].lengths) != jax.device_get(reader.schedule.lengths(jnp.array([cached], jnp.int32))):
        raise InputError(f"{path}: {NOT_SAVED_HERE}, since the lengths of its cache are not those of {cached} tokens; {AGAIN}")
    pages = None
    if reader.pool is not None:
        pages = reader.pool.reserve(count)
        reader.pool.fill(pages, filled(GROUPS, groups))
    return State(tokens, **held, **{name: header[name] for name in COUNTS}, room=room, reader=reader, pages=pages)


def _fault(header: dict[str, Any], model: Llama) -> str | None:
    """What a header has that no state of the model has; None without a fault. Nothing of the sizes that it names is allocated."""
    for part, types in ((header, TYPES), (header.get("room"), ROOM_TYPES), (header.get("known"), KNOWN), (header.get("identity"), NAMES)):
        if set(part) != set(types):
            return f"its header has {listed(sorted(part))}, which should be {listed(types)}"
        for name, kind in types.items():
            if types is not NAMES and type(part[name]) is not kind and kind is not object:
                return f"{name} is {part[name]!r:.60} in its header"
    tokens, cached, longest = header["tokens"], header["cached"], model.config.max_length
    if not 1 <= tokens <= longest:
        return f"it has {tokens} tokens, and the model positions for {longest}"
    if not max(1, tokens - 1) <= cached <= tokens or not 0 <= header["num_queries"] <= cached:
        return f"of its {tokens} tokens {cached} are cached, with queries of {header['num_queries']}"
    room = Room(**header["room"])
    if not (0 < room.text <= room.capacity <= 2 * bucket(longest) + ROOM and 0 <= room.gamma <= room.appended <= ROOM):
        return f"its room is {room}"
    if room.capacity < tokens:
        return f"it has {tokens} tokens, and room for {room.capacity}"
    types = dict.fromkeys(OF_STATES, str) | dict.fromkeys(("group_size", "num_speculative_tokens"), int)
    if any(type(value) is not types.get(name) for name, value in header["settings"].items()):
        return f"its settings are {header['settings']!r:.60}"
    if not all(isinstance(choice, str) for choice in header["choices"]):
        return f"its choices are {header['choices']!r:.60}"
    return None


def _choices(reader: Reader) -> list[str] | None:
    """What skip=auto became in the draft, each time; None if that is not known."""
    text = reader.settings["draft"]
    if not isinstance(text, str) or AUTO_SKIP not in text:
        return []
    chosen = [*reader.draft.chosen()] or ["none"]
    return chosen if len(chosen) == text.count(AUTO_SKIP) == text.count("skip=") else None


def _reader_with(model: Llama, config: GenerationConfig, tokens: int, choices: Sequence[str]) -> Reader:
    """What reads the states of a file. choices: see `_choices`; made by the text of the state, they are not made by another."""
    text = config.draft
    if not choices or not isinstance(text, str):
        return reader_of(model, config, tokens)
    for choice in choices:
        text = text.replace(AUTO_SKIP, f"skip={choice}", 1)
    reader = reader_of(model, dataclasses.replace(config, draft=text), tokens)
    return dataclasses.replace(reader, settings=reader.settings | {"draft": config.draft})


def _with_stored(path: Path, stored: dict[str, Any], config: GenerationConfig) -> GenerationConfig:
    """The config with the stored settings of a state where it has defaults. Raises InputError where it has others."""
    default, gamma = GenerationConfig(), "num_speculative_tokens"
    taken = {
        name: value
        for name, value in stored.items()
        if getattr(config, name) == getattr(default, name) or may_become(getattr(config, name), value)
    }
    made_with = ", ".join(f"{name} {value}" for name, value in stored.items())
    if gamma in stored:  # a config that names a draft has a number of drafts, given or not
        if config.num_speculative_tokens not in (None, GAMMA, stored[gamma]):
            raise InputError(f"{path}: the state was made with {made_with}, and {gamma} (--gamma) is {config.num_speculative_tokens} here")
        taken[gamma] = stored[gamma]
    try:
        return dataclasses.replace(config, **taken)
    except InputError as error:
        raise InputError(f"{path}: the state was made with {made_with}, which does not fit what is given: {error}") from None


def _own(state: State) -> dict[str, Any]:
    """The trees of arrays that belong to the state alone."""
    return {name: getattr(state, name) for name in ("cache", "draft", "logits", "queries", "adaptive")}


def _known(state: State) -> dict[str, bool]:
    return {name: getattr(state, name) is not None for name in KNOWN}


def _named(part: str, tree: Any) -> dict[str, Any]:
    """The arrays of a tree by names that begin with `part`."""
    return {part + jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
