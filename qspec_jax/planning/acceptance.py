"""The acceptance that a plan assumes where none is given, with its source; and how --acceptance is read."""

import dataclasses
from collections.abc import Mapping, Sequence

from qspec_jax.drafts.registry import name_of
from qspec_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class AssumedAcceptance:
    """The chance that a draft is accepted, given those before it in the round, and where the figure comes from."""

    rate: float
    source: str


GIVEN = "given"
_PAPER = "QuantSpec's paper, table 3, one draft a round, a quarter of the context, from"
_MEASURED = (
    "a model of 419 M parameters, conditional, teacher-forced, at a context of 64k; 3 texts of 256 tokens, standard error about 0.01"
)
# By the name of the draft, whatever its settings.
ASSUMED = {
    "quantspec": AssumedAcceptance(
        0.97, f"0.970 with {_MEASURED}. Of all drafts in rounds of 6, another measure, such models accept 0.886 to 0.917 (docs/results.md)"
    ),
    "sparse": AssumedAcceptance(0.93, f"0.929 with {_MEASURED}, where drafts read 6 % of the groups (docs/results.md)"),
    "streaming-llm": AssumedAcceptance(0.87, f"{_PAPER} 0.79 to 0.91"),
    "snapkv": AssumedAcceptance(0.83, f"{_PAPER} 0.56 to 0.94"),
}


def acceptance_of(draft: str, given: Mapping[str, float]) -> AssumedAcceptance | None:
    """What to plan a draft with: given for its text, for its name or for all (""), or assumed for its name; None where nothing is known."""
    name = name_of(draft)
    for key in (draft, name, ""):
        if key in given:
            return AssumedAcceptance(given[key], GIVEN)
    return ASSUMED.get(name)


def parse_acceptances(texts: Sequence[str], drafts: Sequence[str]) -> dict[str, float]:
    """Reads --acceptance: R for all drafts, or NAME=R for one, by its text or its name.

    Raises InputError for what is no number from 0 to 1, and for a draft that is not planned.
    """
    known = {*drafts, *map(name_of, drafts)}
    found: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = -1.0
        if not 0 <= rate <= 1:
            raise InputError(f"--acceptance {text}: {number!r} should be a number from 0 to 1")
        if equals and name not in known:
            raise InputError(f"--acceptance {text}: no draft {name!r} is planned; there are {', '.join(drafts)}")
        if name in found:
            raise InputError(f"--acceptance is given twice for {name or 'all drafts'}")
        found[name] = rate
    return found
