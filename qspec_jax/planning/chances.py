"""How `qspec plan` reads --acceptance, --inner-acceptance and --proposing."""

from collections.abc import Callable, Sequence

from qspec_jax.drafts.registry import texts_in
from qspec_jax.errors import InputError
from qspec_jax.planning.acceptance import keys_of, last_level


def parse_chances(
    option: str, texts: Sequence[str], drafts: Sequence[str], meant: Callable[[str], str | None] = last_level
) -> dict[str, float]:
    """Reads --acceptance, --inner-acceptance or --proposing: R for all drafts, or NAME=R for one, by its text or its name; a draft within a
    `combine` or a cascade has its own.

    Args:
        option: its name.
        texts: as it was given.
        drafts: that are planned.
        meant: which level of a cascade it is about: `last_level`, `inner_level` or `first_level`.

    Raises:
        InputError: for what is no number from 0 to 1, and for a draft that is not planned.
    """
    levels = [(level, part, draft) for draft in drafts for part in _parts(draft) if (level := _level(part, meant)) is not None]
    if texts and not levels:
        raise InputError(f"{option} {texts[0]}: no cascade is planned; there are {', '.join(drafts)}")
    known = {key for each in levels for key in keys_of(*each)} - {""}
    found: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = -1.0
        if not 0 <= rate <= 1:
            raise InputError(f"{option} {text}: {number!r} should be a number from 0 to 1")
        if equals and name not in known:
            raise InputError(f"{option} {text}: no draft {name!r} is planned; there are {', '.join(drafts)}")
        if name in found:
            raise InputError(f"{option} is given twice for {name or 'all drafts'}")
        found[name] = rate
    return found


def _parts(draft: str) -> tuple[str, ...]:
    """The drafts in the text of one; itself for a `combine` of none, which is listed and not planned."""
    try:
        return texts_in(draft)
    except InputError:
        return (draft,)


def _level(draft: str, meant: Callable[[str], str | None]) -> str | None:
    """A level of the text of a draft; itself where the text is none, which is said elsewhere."""
    try:
        return meant(draft)
    except InputError:
        return draft
