"""Every draft by its name, and how a text such as `sparse:budget=0.03,newest=0.5` or `combine:prompt-lookup+quantspec` chooses one.

A further draft is a file beside this one, and an entry here.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from qspec_jax.caches.registry import CACHES
from qspec_jax.checkpoints.tokenizers import check_same_tokens
from qspec_jax.drafts.chunk_means import ChunkMeansSettings
from qspec_jax.drafts.combine import CombinedSettings
from qspec_jax.drafts.draft import Draft, DraftSettings, checkpoints_of
from qspec_jax.drafts.exact_topk import ExactTopKSettings
from qspec_jax.drafts.h2o import H2OSettings
from qspec_jax.drafts.int4 import int4_model
from qspec_jax.drafts.prompt_lookup import PromptLookupSettings
from qspec_jax.drafts.quantspec import QuantSpecSettings
from qspec_jax.drafts.retrieval import RetrievalSettings
from qspec_jax.drafts.small_model import SmallModelSettings
from qspec_jax.drafts.snapkv import SnapKVSettings
from qspec_jax.drafts.sparse import SparseSettings
from qspec_jax.drafts.specache import GuessSettings
from qspec_jax.drafts.streaming_llm import StreamingSettings
from qspec_jax.drafts.triforce import TriForceSettings
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama

log = logging.getLogger(__name__)

NONE = "none"
AUTO = "auto"  # whichever of a few drafts pays; what runs a decode puts the text of one in its place
USUAL = "quantspec"  # for commands that take no auto, and what auto comes to where no stored cost holds

DRAFTS: dict[str, type[DraftSettings]] = {
    "quantspec": QuantSpecSettings,
    "sparse": SparseSettings,
    "streaming-llm": StreamingSettings,
    "snapkv": SnapKVSettings,
    "retrieval": RetrievalSettings,
    "triforce": TriForceSettings,
    "small-model": SmallModelSettings,
    "prompt-lookup": PromptLookupSettings,
    "combine": CombinedSettings,
    "exact-topk": ExactTopKSettings,
    "h2o": H2OSettings,
    "chunk-means": ChunkMeansSettings,
    "specache": GuessSettings,
}


def parse_draft(text: str) -> DraftSettings | None:
    """The settings that a text NAME[:SETTING=VALUE,...] asks for; None for `none`, which decodes without a draft.

    A comma in a value is written \\, with a backslash before it; = and : stand for themselves. A value that is a draft's text may stand in
    parentheses, within which commas need no backslash. `combine:A+B` has the texts of two drafts; each may stand in parentheses, and must
    if there is a + in it. Raises InputError for an unknown name or setting, and for a value of another type; and for `auto`, which is
    no draft but stands for one.
    """
    name, settings = _taken_apart(text)
    if name == AUTO:
        if settings:
            raise InputError(f"draft {text!r}: {AUTO} has no settings")
        raise InputError(f"draft {text!r}: {AUTO} stands alone, for generate and batch; in combine, and for other commands, name a draft")
    if name == NONE:
        if settings:
            raise InputError(f"draft {text!r}: {NONE} has no settings")
        return None
    if name not in DRAFTS:
        raise InputError(f"draft {name!r} should be one of {', '.join([*DRAFTS, NONE])}; generate and batch also take {AUTO}")
    if DRAFTS[name] is CombinedSettings:
        return CombinedSettings(*_two_drafts(text))
    # Those that drafts share stand behind a draft's own.
    fields = {field.name: field.type for field in sorted(dataclasses.fields(DRAFTS[name]), key=lambda field: field.kw_only)}
    if settings and not fields:
        of_cache = f"; the cache {name} has: --cache {name}:{','.join(settings) or 'SETTING=VALUE'}" if name in CACHES else ""
        raise InputError(f"draft {text!r}: {name} has no settings as a draft{of_cache}")
    given = {}
    for part in settings:
        setting, equals, value = part.partition("=")
        if setting not in fields or not equals:
            inner = [f"; the settings of {field} stand in parentheses with it" for field in fields if fields[field] is DraftSettings]
            inner += ["; several layers of skip stand in parentheses, as in skip=(3,5a)"] if "skip" in fields else []
            raise InputError(f"draft {text!r}: {part!r} should be one of {', '.join(f'{field}=...' for field in fields)}{''.join(inner)}")
        if setting in given:
            raise InputError(f"draft {text!r}: {setting} stands there twice")
        if fields[setting] is DraftSettings:
            given[setting] = _draft_setting(text, setting, value)
            continue
        try:
            given[setting] = fields[setting](value.replace("\\,", ","))
        except ValueError:
            kind = {int: "a whole number", float: "a number"}[fields[setting]]
            raise InputError(f"draft {text!r}: {setting} should be {kind}, not {value!r}") from None
    return DRAFTS[name](**given)


def _draft_setting(text: str, setting: str, value: str) -> DraftSettings:
    """The settings of a draft that is a setting of another."""
    if value.startswith("(") and value.count("(") != value.count(")"):
        raise InputError(f"draft {text!r}: the parentheses of {setting} should be in pairs")
    try:
        found = parse_draft(inside if (inside := _without_parentheses(value)) != value else value.replace("\\,", ","))
    except InputError as error:
        raise InputError(f"draft {text!r}: {setting}: {error}") from None
    if found is None:
        raise InputError(f"draft {text!r}: {setting} should be a draft, not {NONE}")
    return found


def name_of(text: str) -> str:
    """The name in the text of a draft."""
    return _taken_apart(text)[0]


def texts_in(text: str) -> tuple[str, ...]:
    """The texts of the drafts that a `combine` chooses between, in their order; of any other draft its own text. Raises InputError where
    there are not two."""
    if DRAFTS.get(name_of(text)) is not CombinedSettings:
        return (text,)
    return tuple(part for each in _two_texts(text) for part in texts_in(each))


def has_budget(text: str) -> bool:
    """Whether the draft of this text has a setting of that name."""
    settings = DRAFTS.get(name_of(text))
    return settings is not None and "budget" in {field.name for field in dataclasses.fields(settings)}


def unbudgeted(text: str) -> str:
    """The text of a draft without its budget."""
    if not has_budget(text):
        return text
    name, settings = _taken_apart(text)
    kept = [setting for setting in settings if not setting.startswith("budget=")]
    return f"{name}:{','.join(kept)}" if kept else name


def with_budget(text: str, budget: float) -> str:
    """The text of a draft that has a budget, with this one. Raises InputError where the text names its own."""
    if unbudgeted(text) != text:
        raise InputError(f"--draft {text} names its budget, and --budget others; give one of them")
    name, settings = _taken_apart(text)
    return f"{name}:{','.join([*settings, f'budget={_exact(budget)}'])}"


def _exact(number: float) -> str:
    """The number as a person writes it, with all of its digits."""
    return str(int(number)) if float(number).is_integer() else repr(number)


def _taken_apart(text: str) -> tuple[str, list[str]]:
    """The name in the text of a draft, and its settings as they stand there, with backslashes."""
    name, colon, rest = text.partition(":")
    if not colon:
        return name, []
    parts, depth, before = [""], 0, ""
    for character in rest:
        # Parentheses count where a value begins with one; in the middle of a path they are letters as others.
        depth += (character == "(" and (depth > 0 or before == "=")) - (character == ")" and depth > 0)
        if character == "," and depth == 0 and before != "\\":
            parts.append("")
        else:
            parts[-1] += character
        before = character
    return name, parts if depth == 0 else re.split(r"(?<!\\),", rest)


def _without_parentheses(text: str) -> str:
    """What stands in the parentheses that are around the whole text; without them the text itself."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth <= 0:
            return text[1:-1] if text.startswith("(") and i == len(text) - 1 else text
    return text


def _two_drafts(text: str) -> list[DraftSettings]:
    """The settings of the drafts in combine:A+B."""
    found = list(map(parse_draft, _two_texts(text)))
    if None in found:
        raise InputError(f"draft {text!r}: {NONE} proposes nothing that could be combined")
    return found


def _two_texts(text: str) -> list[str]:
    """The texts of the drafts in combine:A+B."""
    depth, parts = 0, [""]
    for character in text.partition(":")[2]:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == "+" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        raise InputError(f"draft {text!r}: its parentheses should be in pairs")
    if len(parts) != 2:
        raise InputError(f"draft {text!r}: combine takes two drafts with a + between them, as in combine:prompt-lookup+quantspec")
    return list(map(_without_parentheses, parts))


def make_draft(
    draft: str | DraftSettings,
    model: Llama,
    *,
    int4: Llama | Callable[[], Llama] | None = None,
    directory: str | Path | None = None,
    calibration: Sequence[Sequence[int]] | None = None,
    progress: bool | None = None,
) -> Draft | None:
    """The draft of a model by its text or settings; None without one.

    int4: the model with INT4 weights, or what makes it; without it directory, calibration and progress say where they come from, see
    `int4_model`; a draft that does not want such weights has nothing to calibrate, and this is logged. directory: where the model was
    loaded from; its tokens and those of a draft's own model should be the same. Raises InputError as `parse_draft` does, for a
    setting that is out of range, and for a checkpoint that a draft cannot use.
    """
    settings = parse_draft(draft) if isinstance(draft, str) else draft
    if settings is None:
        return None
    for checkpoint in checkpoints_of(settings) if directory is not None else ():
        check_same_tokens(checkpoint, directory)
    if int4 is None:
        asked = []
        quantized = lambda: int4_model(model, directory=directory, calibration=calibration, progress=progress)
        made = settings.make(model, lambda: asked.append(settings) or quantized())
        if calibration is not None and not asked:
            name = next((name for name, kind in DRAFTS.items() if type(settings) is kind), settings)
            log.warning("nothing is calibrated: draft %s has no INT4 weights of the target", name)
        return made
    return settings.make(model, (lambda: int4) if isinstance(int4, Llama) else int4)
