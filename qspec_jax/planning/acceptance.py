"""The acceptance, and the share of rounds with a proposal, that a plan assumes where none is given, with their sources."""

import dataclasses
from collections.abc import Mapping

from qspec_jax.drafts.registry import levels_in, name_of, parse_draft, texts_in


@dataclasses.dataclass(frozen=True)
class Chance:
    """A chance that a plan rests on, and where the figure comes from: `GIVEN`, or what it is assumed by."""

    rate: float
    source: str


GIVEN = "given"
_PAPER = "QuantSpec's paper, table 3, one draft a round, a quarter of the context, from"
_MEASURED = (
    "a model of 419 M parameters, conditional, teacher-forced, at a context of 64k; 3 texts of 256 tokens, standard error about 0.01"
)
LONGEST_MEASURED = 3  # of the shortest n-grams that prompt-lookup was measured with
_LOOKED_UP = "with the embedded model in 4 texts of 4,096 tokens, 64 more in each, for n-grams of at least"
# ACCEPTANCE and PROPOSING are by `key_of` a draft. The chance that a draft is accepted, given those before it in the round:
ACCEPTANCE = {
    "quantspec": Chance(
        0.97, f"0.970 with {_MEASURED}. Of all drafts in rounds of 6 such models accept 0.886 to 0.917 (docs/measurements/2026-11.md)"
    ),
    "sparse": Chance(0.93, f"0.929 with {_MEASURED}, where drafts read 6 % of the groups (docs/measurements/2026-11.md)"),
    "streaming-llm": Chance(0.87, f"{_PAPER} 0.79 to 0.91"),
    "snapkv": Chance(0.83, f"{_PAPER} 0.56 to 0.94"),
    "eagle3": Chance(
        0.55,
        "between the heads of two models, conditional, teacher-forced, at temperature 0, with standard errors of 0.02 to 0.03: 0.42 "
        "with the embedded one's, and 0.68 to 0.70 with that of a model of 419 M parameters, at contexts of 2k to 64k (docs/drafts.md)",
    ),
    "prompt-lookup": Chance(
        0.37,
        "0.371 with the embedded model, conditional, teacher-forced, at a context of 8k of code; 6 texts of 128 tokens, standard error "
        "0.039, and 0.412 with 0.100 at 4k (docs/measurements/2026-11.md)",
    ),
    "prompt-lookup:shortest=2": Chance(0.54, f"0.54 {_LOOKED_UP} 2 tokens (docs/plan.md)"),
    "prompt-lookup:shortest=3": Chance(0.59, f"0.59 {_LOOKED_UP} 3 tokens (docs/plan.md)"),
}
# The chance that a round in which a draft is asked finds it with a proposal, for those that may have none.
PROPOSING = {
    "prompt-lookup": Chance(
        0.9,
        "0.907 of the tokens that 492 rounds could at most have drafted, with the embedded model at a context of 8k of code; less at "
        "shorter contexts (docs/plan.md)",
    ),
    "prompt-lookup:shortest=2": Chance(0.38, f"0.38 {_LOOKED_UP} 2 tokens (docs/plan.md)"),
    "prompt-lookup:shortest=3": Chance(0.16, f"0.16 {_LOOKED_UP} 3 tokens (docs/plan.md)"),
}
# First drafts of which a middle accepts about as much as the target: what is looked up repeats itself or not, whichever model goes on from
# there, and of a head of a model of 419 M parameters the target accepted 0.68 to 0.80, the middle 0.64 to 0.79 (docs/drafts.md).
JUDGED_ALIKE = ("prompt-lookup", "eagle3")


def key_of(draft: str) -> str:
    """Under what ACCEPTANCE and PROPOSING have a draft: its name, for prompt-lookup with the nearest `shortest` that was measured."""
    name = name_of(draft)
    shortest = min(parse_draft(draft).shortest, LONGEST_MEASURED) if name == "prompt-lookup" else 1
    return name if shortest == 1 else f"{name}:shortest={shortest}"


def keys_of(draft: str, *wholes: str) -> tuple[str, ...]:
    """What may be given for a draft, the most particular first: its text, its name, those of the ones that it is a part of, or "" for all.
    wholes: the texts of these, the smallest first."""
    return (*(key for text in (draft, *wholes) for key in (text, name_of(text))), "")


def chance_of(draft: str, given: Mapping[str, float], assumed: Mapping[str, Chance], *wholes: str) -> Chance | None:
    """What to plan a draft with: given for one of `keys_of`, or assumed for its `key_of`; None where nothing is known.

    assumed: `ACCEPTANCE` or `PROPOSING`.
    """
    for key in keys_of(draft, *wholes):
        if key in given:
            return Chance(given[key], GIVEN)
    return assumed.get(key_of(draft))


def inner_chance_of(cascade: str, given: Mapping[str, float], *wholes: str, by_target: bool = True) -> Chance | None:
    """The chance that a token that a cascade's first draft proposes is accepted by its middle, given those before it; None where nothing is
    known.

    Args:
        cascade: its text.
        given, wholes: as of `chance_of`.
        by_target: whether what those of `JUDGED_ALIKE` propose is assumed to be accepted as often as by the target, where nothing is given.
    """
    first, _ = levels_in(cascade)
    for key in keys_of(first, cascade, *wholes):
        if key in given:
            return Chance(given[key], GIVEN)
    if not by_target or name_of(first) not in JUDGED_ALIKE:
        return None
    found = ACCEPTANCE[key_of(first)]
    return Chance(found.rate, f"that of {name_of(first)} by the target, as by a middle it depends on the text: {found.source}")


def last_level(draft: str) -> str:
    """The draft whose tokens the target judges: of a cascade the middle, from which those that it hands on are drawn; of others the draft
    itself."""
    return levels_in(draft)[-1] if levels_in(draft) else draft


def first_level(draft: str) -> str:
    """The draft that proposes first, and may have nothing to propose: of a cascade the first; of others the draft itself."""
    return levels_in(draft)[0] if levels_in(draft) else draft


def inner_level(draft: str) -> str | None:
    """The draft whose tokens a middle judges: the first of a cascade; None for other drafts."""
    return next(iter(levels_in(draft)), None)


def regardless(draft: str) -> str:
    """Which settings what is assumed for a draft does not depend on, as notes say it."""
    return "whatever its settings" + (" but shortest" if "prompt-lookup" in map(name_of, map(first_level, texts_in(draft))) else "")
