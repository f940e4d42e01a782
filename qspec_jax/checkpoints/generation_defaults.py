"""The sampling settings of a checkpoint's generation_config.json, as `generate` of transformers reads them."""

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
        default: transformers' value if neither the checkpoint nor the caller gives one.
        off: the value that changes nothing, also for None from the caller.
        fits: whether a number is valid.
        words: the valid values, for a message.
        sampled: whether it is left out in greedy decoding.
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

# Settings of transformers that this library does not have, with the values that change nothing.
_NOT_TAKEN = {
    **dict.fromkeys(("num_beams", "typical_p", "guidance_scale"), (1,)),
    **dict.fromkeys(("penalty_alpha", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "stop_strings"), ([],)),
    **dict.fromkeys(("top_h", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), ()),
}


@dataclasses.dataclass(frozen=True)
class StoredDefaults:
    """The settings of a checkpoint's generation_config.json.

    Attributes:
        path: the file; None if there is none.
        values: its settings, without those that are null.
    """

    path: Path | None
    values: Mapping[str, Any]

    def with_said(self, said: Mapping[str, Any]) -> dict[str, float | int]:
        """The settings that `generate(**said)` of transformers takes, as fields of this library's `GenerationConfig`.

        The caller's settings take precedence, then the file's, then transformers' own defaults, of which one filters: a top_k of 50.
        Without do_sample decoding is greedy, and all settings but the repetition penalty are left out.

        Args:
            said: the caller's settings by transformers' names; None turns one off.

        Returns:
            temperature, which is 0 for greedy decoding, top_k, top_p, min_p and repetition_penalty.

        Raises:
            InputError: for a value of the wrong type or out of range, if it is used.
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
        """One line for the log: the settings in use and their sources.

        Args:
            said: as given to `with_said`.
            taken: the settings that `with_said` returned.
            caller: a name for the source of `said`, such as "the task".
        """
        sampled = taken["temperature"] > 0
        used = [name for name, setting in SAMPLING.items() if sampled or not setting.sampled]
        shown = [name for name in used if name == "temperature" or taken[name] != SAMPLING[name].off]
        sources = [f"of {caller}" if name in said else f"of {FILE}" if name in self.values else "transformers' default" for name in shown]
        each = [f"{name} {taken[name]:g} ({source})" for name, source in zip(shown, sources)]
        return ", ".join(["generation: sampled" if sampled else "generation: greedy", *each])

    def _refused(self, name: str, value: Any, words: str, said: Mapping[str, Any]) -> InputError:
        source = "" if name in said else f"{self.path}: "
        return InputError(f"{source}{name} {value!r} should be {words}")


def stored_defaults(directory: str | Path) -> StoredDefaults:
    """The settings of generation_config.json in a checkpoint's directory, or of ORG/NAME on the Hub; a warning names unsupported ones.

    Raises:
        InputError: for a file that cannot be read, and for a directory that does not exist.
    """
    path = local(directory) / FILE
    if not path.exists():
        return StoredDefaults(None, {})
    values = {name: value for name, value in read_json(path).items() if value is not None}
    if left_out := [name for name, neutral in _NOT_TAKEN.items() if name in values and values[name] not in neutral]:
        names = ", ".join(left_out) + (" is" if len(left_out) == 1 else " are")
        warn_once(log, f"{path}: {names} not taken: qspec has no such setting")
    return StoredDefaults(path, values)


def generation_defaults(directory: str | Path) -> dict[str, float | int]:
    """The settings with which transformers' `generate` decodes a checkpoint by default, as fields of `GenerationConfig`.

    Returns:
        temperature, top_k, top_p, min_p and repetition_penalty; a checkpoint that does not sample has temperature 0.

    Raises:
        InputError: as `stored_defaults` and `StoredDefaults.with_said`.
    """
    return stored_defaults(directory).with_said({})
