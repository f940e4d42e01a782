"""How a checkpoint's generation_config.json has text generated, as `generate` of transformers takes it."""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qspec_jax.checkpoints.hub import local
from qspec_jax.errors import InputError, warn_once
from qspec_jax.files import read_json

log = logging.getLogger(__name__)

FILE = "generation_config.json"
MAX_TEMPERATURE, MAX_TOP_K, PENALTIES = 1e6, 2**31 - 1, (0.01, 100.0)


@dataclasses.dataclass(frozen=True)
class _Setting:
    """A setting of `generate`.

    Attributes:
        default: what transformers takes where neither the checkpoint nor the caller says anything.
        off: what changes nothing; also what None from the caller means.
        fits: whether a number may be taken.
        words: what it should be.
        sampled: whether greedy decoding leaves it out.
    """

    default: float
    off: float
    fits: Callable[[float], bool]
    words: str
    sampled: bool = True


SAMPLING = {
    "temperature": _Setting(1.0, 1.0, lambda x: 0 < x <= MAX_TEMPERATURE, "a number above 0 and at most 1e6 where do_sample is true"),
    "top_k": _Setting(
        50, 0, lambda x: x == int(x) and -1 <= x <= MAX_TOP_K, "a whole number, at least 1 and less than 2**31, or 0 for off"
    ),
    "top_p": _Setting(1.0, 1.0, lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "min_p": _Setting(0.0, 0.0, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "repetition_penalty": _Setting(1.0, 1.0, lambda x: PENALTIES[0] <= x <= PENALTIES[1], "a number from 0.01 to 100", sampled=False),
}

# Settings that change what transformers generates and that there are none of here, with the values that change nothing.
_NOT_TAKEN = {
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "sequence_bias": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "stop_strings": ([],),
    "watermarking_config": (),
}


@dataclasses.dataclass(frozen=True)
class StoredDefaults:
    """What the generation_config.json of a checkpoint says.

    Attributes:
        path: the file, None where there is none.
        values: its settings, without those that are null.
    """

    path: Path | None
    values: Mapping[str, Any]

    def with_said(self, said: Mapping[str, Any]) -> dict[str, float | int]:
        """The settings that `generate(**said)` of transformers takes, as fields of this library's `GenerationConfig`.

        What the caller says goes before what the file says, and that before transformers' own defaults, of which one filters: a top_k
        of 50. Without do_sample, of either, decoding is greedy, and all but the repetition penalty is left out.

        Args:
            said: settings by the names that transformers has for them; None turns one off.

        Returns:
            temperature, which is 0 for greedy decoding, top_k, top_p, min_p and repetition_penalty.

        Raises:
            InputError: for a value of the wrong type or out of range, among those that are used.
        """
        sampled = said["do_sample"] if "do_sample" in said else self.values.get("do_sample")
        if not isinstance(sampled, bool | None):
            raise self._refused("do_sample", sampled, "true or false", said)
        taken: dict[str, float | int] = {}
        for name, setting in SAMPLING.items():
            if setting.sampled and not sampled:
                taken[name] = 0.0 if name == "temperature" else setting.off
                continue
            value = said[name] if name in said else self.values.get(name, setting.default)
            value = setting.off if value is None else value
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or not setting.fits(value):
                raise self._refused(name, value, setting.words, said)
            taken[name] = max(0, int(value)) if name == "top_k" else float(value)
        return taken

    def described(self, said: Mapping[str, Any], taken: Mapping[str, float | int], caller: str) -> str:
        """One line that says what is taken from where, for the log.

        Args:
            said: as given to `with_said`.
            taken: what that returned.
            caller: who said it, such as "the task".
        """
        sampled = taken["temperature"] > 0
        used = [name for name, setting in SAMPLING.items() if sampled or not setting.sampled]
        shown = [name for name in used if name == "temperature" or taken[name] != SAMPLING[name].off]
        source = lambda name: f"of {caller}" if name in said else f"of {FILE}" if name in self.values else "transformers' default"
        each = [f"{name} {taken[name]:g} ({source(name)})" for name in shown]
        return ", ".join(["generation: sampled" if sampled else "generation: greedy", *each])

    def _refused(self, name: str, value: Any, words: str, said: Mapping[str, Any]) -> InputError:
        source = "" if name in said else f"{self.path}: "
        return InputError(f"{source}{name} {value!r} should be {words}")


def stored_defaults(directory: str | Path) -> StoredDefaults:
    """The generation_config.json of a checkpoint's directory, or of ORG/NAME on the Hub. A warning names what is not taken from it.

    Args:
        directory: where the checkpoint is.

    Raises:
        InputError: for a file that cannot be read, and for a directory that is none.
    """
    path = local(directory) / FILE
    if not path.exists():
        return StoredDefaults(None, {})
    values = {name: value for name, value in read_json(path).items() if value is not None}
    if left_out := [name for name, neutral in _NOT_TAKEN.items() if name in values and values[name] not in neutral]:
        names = ", ".join(left_out) + (" is" if len(left_out) == 1 else " are")
        warn_once(log, f"{path}: {names} not taken: there is no such setting here")
    return StoredDefaults(path, values)


def generation_defaults(directory: str | Path) -> dict[str, float | int]:
    """The settings with which transformers' `generate` decodes a checkpoint where the caller says nothing, as fields of `GenerationConfig`.

    Args:
        directory: where the checkpoint is.

    Returns:
        temperature, top_k, top_p, min_p and repetition_penalty; a checkpoint that does not sample has temperature 0.

    Raises:
        InputError: as `stored_defaults` and `StoredDefaults.with_said`.
    """
    return stored_defaults(directory).with_said({})
