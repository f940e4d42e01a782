"""Every draft by its name, and how a text such as `sparse:budget=0.03,newest=0.5` or `combine:prompt-lookup+quantspec` chooses one.

A further draft is a file beside this one, and an entry here.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from qspec_jax.checkpoints.tokenizers import check_same_tokens
from qspec_jax.drafts.cascade import CascadeSettings
from qspec_jax.drafts.chunk_means import ChunkMeansSettings
from qspec_jax.drafts.combine import CombinedSettings
from qspec_jax.drafts.draft import Draft, DraftSettings, checkpoints_of, needs_full_layers
from qspec_jax.drafts.eagle3 import Eagle3Settings
from qspec_jax.drafts.exact_topk import ExactTopKSettings
from qspec_jax.drafts.h2o import H2ODraftSettings
from qspec_jax.drafts.int4 import int4_model
from qspec_jax.drafts.prompt_lookup import PromptLookupSettings
from qspec_jax.drafts.quantspec import QuantSpecSettings
from qspec_jax.drafts.retrieval import RetrievalSettings
from qspec_jax.drafts.small_model import SmallModelSettings
from qspec_jax.drafts.snapkv import SnapKVSettings
from qspec_jax.drafts.sparse import SparseSettings
from qspec_jax.drafts.streaming_llm import StreamingDraftSettings
from qspec_jax.drafts.triforce import TriForceSettings
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import Llama, check_model
from qspec_jax.progress import working
from qspec_jax.settings_text import nested_text, read_settings, split, split_text, without_parentheses

log = logging.getLogger(__name__)

NONE = "none"
AUTO = "auto"  # whichever of a few drafts pays; what runs a decode puts the text of one in its place
USUAL = "quantspec"  # for commands that take no auto, and what auto comes to where no stored cost holds

DRAFTS: dict[str, type[DraftSettings]] = {
    "quantspec": QuantSpecSettings,
    "sparse": SparseSettings,
    "streaming-llm": StreamingDraftSettings,
    "snapkv": SnapKVSettings,
    "retrieval": RetrievalSettings,
    "cascade": CascadeSettings,
    "triforce": TriForceSettings,
    "small-model": SmallModelSettings,
    "eagle3": Eagle3Settings,
    "prompt-lookup": PromptLookupSettings,
    "combine": CombinedSettings,
    "exact-topk": ExactTopKSettings,
    "h2o": H2ODraftSettings,
    "chunk-means": ChunkMeansSettings,
}


def parse_draft(text: str) -> DraftSettings | None:
    """The settings of the draft of a text NAME[:SETTING=VALUE,...], see `qspec_jax.settings_text`; None for `none`.

    `combine:A+B` has the texts of two drafts; each may be in parentheses, and must if there is a + in it. Raises InputError for an unknown
    name or setting, for a value that is none of its setting's, and for `auto`, for which a draft has yet to be chosen.
    """
    name, _, rest = text.partition(":")
    if name in (AUTO, NONE) and rest:
        raise InputError(f"draft {text!r}: {name} has no settings")
    if name == NONE:
        return None
    if name == AUTO:
        raise InputError(f"draft {text!r}: {AUTO} is for generate and batch, and not part of another draft; name a draft here")
    if name not in DRAFTS:
        raise InputError(f"draft {name!r} should be one of {', '.join([*DRAFTS, NONE])}; generate, batch and bench drafts also take {AUTO}")
    if DRAFTS[name] is CombinedSettings:
        return CombinedSettings(*map(_named_draft, _two_texts(text)))
    readers = {DraftSettings: lambda value: _named_draft(nested_text(value))}
    parts = split_text("draft", text)[1]
    if any(part.startswith("gamma=") for part in parts):
        raise InputError(f"draft {text!r}: gamma is no setting of a draft; num_speculative_tokens (--gamma) has it")
    return DRAFTS[name](**read_settings("draft", text, parts, DRAFTS[name], readers=readers))


def _named_draft(text: str) -> DraftSettings:
    """The settings of a draft that is part of another. Raises InputError for `none`, too."""
    found = parse_draft(text)
    if found is None:
        raise InputError(f"{NONE} proposes nothing; name a draft")
    return found


def name_of(text: str) -> str:
    """The name in the text of a draft."""
    return text.partition(":")[0]


def name_of_draft(draft: Draft) -> str:
    """The name of a draft that is made: that of the settings in its file, or the name of its class."""
    kind = type(draft)
    return next((name for name, settings in DRAFTS.items() if settings.__module__ == kind.__module__), kind.__name__)


def texts_in(text: str) -> tuple[str, ...]:
    """The texts of the drafts that a `combine` chooses between, in their order; of any other draft its own text. Raises InputError where
    there are not two."""
    if DRAFTS.get(name_of(text)) is not CombinedSettings:
        return (text,)
    return tuple(part for each in _two_texts(text) for part in texts_in(each))


def levels_in(text: str) -> tuple[str, ...]:
    """The texts of a cascade's first draft and of its middle; none for any other draft."""
    if not is_cascade(text):
        return ()
    given = dict(part.partition("=")[::2] for part in split_text("draft", text)[1])
    if DRAFTS[name_of(text)] is TriForceSettings:
        read = ",".join(f"{name}={given.get(name, getattr(TriForceSettings, name))}" for name in ("sinks", "window"))
        first, middle = f"small-model:model={given.get('model', '')},reads=window,{read}", "retrieval"
    else:
        first, middle = nested_text(given["first"]) if "first" in given else "prompt-lookup", "sparse"
    return first, nested_text(given["middle"]) if "middle" in given else middle


def first_gamma_of(text: str) -> int | None:
    """How many tokens the text of a cascade says that its first draft drafts at a time; None where it leaves that open."""
    return getattr(parse_draft(text), DRAFTS[name_of(text)].NAME_OF_FIRST_GAMMA)


def is_cascade(draft: Any) -> bool:
    """Whether this is the text of a cascade, whose numbers of drafts may be chosen."""
    return isinstance(draft, str) and DRAFTS.get(name_of(draft)) in (CascadeSettings, TriForceSettings)


def with_first_gamma(text: str, first_gamma: int) -> str:
    """The text of a cascade that leaves it open, with how many tokens its first draft drafts at a time."""
    name, parts = split_text("draft", text)
    setting = DRAFTS[name].NAME_OF_FIRST_GAMMA
    others = [part for part in parts if part.partition("=")[0].strip() != setting]  # which may say that it is open
    return f"{name}:{','.join([*others, f'{setting}={first_gamma}'])}"


def may_become(draft: Any, settled: Any) -> bool:
    """Whether a text of a cascade leaves open how many tokens its first draft drafts at a time, and this is the same text with a number."""
    if not is_cascade(draft) or not is_cascade(settled) or first_gamma_of(draft) is not None:
        return False
    chosen = first_gamma_of(settled)
    return chosen is not None and settled == with_first_gamma(draft, chosen)


def _two_texts(text: str) -> list[str]:
    """The texts of the drafts in combine:A+B."""
    parts = split("draft", text, text.partition(":")[2], "+")
    if len(parts) != 2:
        raise InputError(f"draft {text!r}: combine takes two drafts with a + between them, as in combine:prompt-lookup+quantspec")
    return list(map(without_parentheses, parts))


def has_budget(text: str) -> bool:
    """Whether the draft of this text has a setting of that name."""
    settings = DRAFTS.get(name_of(text))
    return settings is not None and "budget" in {field.name for field in dataclasses.fields(settings)}


def unbudgeted(text: str) -> str:
    """The text of a draft without its budget."""
    if not has_budget(text):
        return text
    name, settings = split_text("draft", text)
    kept = [setting for setting in settings if not setting.startswith("budget=")]
    return f"{name}:{','.join(kept)}" if kept else name


def with_budget(text: str, budget: float) -> str:
    """The text of a draft that has a budget, with this one. Raises InputError where the text names its own."""
    if unbudgeted(text) != text:
        raise InputError(f"--draft {text} names its budget, and --budget others; give one of them")
    name, settings = split_text("draft", text)
    number = int(budget) if float(budget).is_integer() else budget
    return f"{name}:{','.join([*settings, f'budget={number}'])}"


def check_windows(settings: DraftSettings, config: LlamaConfig) -> None:
    """Raises InputError for a draft that needs layers without a sliding window, of a model in which every layer has one."""
    if not config.full_layers and needs_full_layers(settings):
        name = next((name for name, kind in DRAFTS.items() if type(settings) is kind), settings)
        raise InputError(f"draft {name} chooses what it reads in layers without a sliding window, and the model has no such layer")


@working("making the draft")
def make_draft(
    draft: str | DraftSettings,
    model: Llama,
    *,
    int4: Llama | Callable[[], Llama] | None = None,
    calibration: Sequence[Sequence[int]] | None = None,
    progress: bool | None = None,
) -> Draft | None:
    """The draft of a model by its text or settings; None for "none".

    Args:
        draft: the text NAME[:SETTING=VALUE,...], or settings.
        model: the target.
        int4: the model with INT4 weights, or a function that makes it. None: the weights that are stored with the model, or its own,
            rounded (`int4_model`).
        calibration: token ids of texts for which INT4 weights are rounded. It is logged if the draft has no such weights.
        progress: a bar on standard error while weights are rounded; None shows it on a terminal.

    Raises:
        InputError: as `parse_draft` and `int4_model` do, for a setting that is out of range, and for a checkpoint that a draft cannot use,
            such as one with other tokens than the checkpoint that the model was loaded from.
    """
    check_model(model)
    settings = parse_draft(draft) if isinstance(draft, str) else draft
    if settings is None:
        return None
    check_windows(settings, model.config)
    for checkpoint in checkpoints_of(settings) if model.origin.directory is not None else ():
        check_same_tokens(checkpoint, model.origin.directory)
    if int4 is None:
        asked = []

        def quantized():
            return int4_model(model, calibration=calibration, progress=progress)

        made = settings.make(model, lambda: asked.append(settings) or quantized())
        if calibration is not None and not asked:
            name = next((name for name, kind in DRAFTS.items() if type(settings) is kind), settings)
            log.warning("nothing is calibrated: draft %s has no INT4 weights of the target", name)
        return made
    return settings.make(model, (lambda: int4) if isinstance(int4, Llama) else int4)
