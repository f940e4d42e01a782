"""Every draft by its name, and how a text such as `sparse:budget=0.03,newest=0.5` chooses one.

A further draft is a file beside this one, and an entry here.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.int4 import int4_model
from qspec_jax.drafts.quantspec import QuantSpecSettings
from qspec_jax.drafts.sparse import SparseSettings
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama

NONE = "none"


class DraftSettings(Protocol):
    """The settings of a draft: a frozen dataclass of numbers and texts, each with a default."""

    def make(self, model: Llama, int4: Callable[[], Llama]) -> Draft:
        """The draft of a model. int4: makes the model's INT4 weights, for those that want them. Raises InputError for a setting that does
        not fit the model."""
        ...


DRAFTS: dict[str, type[DraftSettings]] = {"quantspec": QuantSpecSettings, "sparse": SparseSettings}


def parse_draft(text: str) -> DraftSettings | None:
    """The settings that a text NAME[:SETTING=VALUE,...] asks for; None for `none`, which decodes without a draft.

    Raises InputError for an unknown name or setting, and for a value of another type.
    """
    name, colon, rest = text.partition(":")
    if name == NONE:
        if colon:
            raise InputError(f"draft {text!r}: {NONE} has no settings")
        return None
    if name not in DRAFTS:
        raise InputError(f"draft {name!r} should be one of {', '.join([*DRAFTS, NONE])}")
    fields = {field.name: field.type for field in dataclasses.fields(DRAFTS[name])}
    given = {}
    for part in rest.split(",") if colon else ():
        setting, equals, value = part.partition("=")
        if setting not in fields or not equals:
            raise InputError(f"draft {text!r}: {part!r} should be one of {', '.join(f'{field}=...' for field in fields)}")
        if setting in given:
            raise InputError(f"draft {text!r}: {setting} stands there twice")
        try:
            given[setting] = fields[setting](value)
        except ValueError:
            kind = {int: "a whole number", float: "a number"}[fields[setting]]
            raise InputError(f"draft {text!r}: {setting} should be {kind}, not {value!r}") from None
    return DRAFTS[name](**given)


def make_draft(
    draft: str | DraftSettings,
    model: Llama,
    *,
    int4: Llama | None = None,
    directory: str | Path | None = None,
    calibration: Sequence[Sequence[int]] | None = None,
    progress: bool | None = None,
) -> Draft | None:
    """The draft of a model by its text or settings; None without one.

    int4: the model with INT4 weights, if it is there already; otherwise directory, calibration and progress say where they come from, see
    `int4_model`. Raises InputError as `parse_draft` does, and for a
    setting that is out of range.
    """
    settings = parse_draft(draft) if isinstance(draft, str) else draft
    if settings is None:
        return None
    made = lambda: int4_model(model, directory=directory, calibration=calibration, progress=progress)
    return settings.make(model, made if int4 is None else lambda: int4)
