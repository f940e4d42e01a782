"""How often prompt lookup would have been right along the ends of prompts, by which a cascade that begins with it is planned.

A text that has repeated itself up to its end mostly goes on to do so. That is no certainty: what is generated may be of another kind.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from qspec_jax.drafts.prompt_lookup import PromptLookupSettings
from qspec_jax.planning.acceptance import ACCEPTANCE

DRAFTED = 3  # tokens of a proposal
LAST, PROMPTS = 1024, 8  # tokens that are looked at, of all prompts together, and of how many prompts
MIN_TOKENS = 64  # that are looked at; fewer say too little
PRIOR = 16  # judged tokens as which the stored acceptance counts besides: a few tokens alone say little


@dataclasses.dataclass(frozen=True)
class Repetition:
    """What prompt lookup proposed, as often as it was asked, and what of that was in the text.

    Attributes:
        asked: places at which a proposal was asked for.
        proposed: of these, where there was one.
        judged: proposed tokens up to the first that was not in the text.
        accepted: those before it.
    """

    asked: int = 0
    proposed: int = 0
    judged: int = 0
    accepted: int = 0

    @property
    def proposing(self) -> float:
        """The share of places with a proposal."""
        return self.proposed / max(1, self.asked)

    @property
    def acceptance(self) -> float:
        """The chance that a proposed token was in the text, given those before it; nearly the stored one where few were judged."""
        return (self.accepted + PRIOR * ACCEPTANCE["prompt-lookup"].rate) / (self.judged + PRIOR)

    @property
    def tokens(self) -> int:
        """Tokens of the text that were looked at: with each proposal those that were right, and one more."""
        return self.asked + self.accepted


def repetition(prompts: Sequence[Sequence[int]], settings: PromptLookupSettings) -> Repetition | None:
    """What prompt lookup proposed along the ends of prompts, a proposal after each token that it got wrong; None where these are shorter
    than `MIN_TOKENS`.

    Args:
        prompts: token ids. Of many, some that lie evenly among them.
        settings: of prompt lookup.
    """
    chosen = [prompts[i * len(prompts) // PROMPTS] for i in range(PROMPTS)] if len(prompts) > PROMPTS else prompts
    found = Repetition()
    for prompt in chosen:
        text = np.asarray(prompt)
        at = max(len(text) - LAST // len(chosen), len(text) // 2, 1)
        while at < len(text):
            tokens = looked_up(text[:at], settings, min(DRAFTED, len(text) - at))
            wrong = np.flatnonzero(tokens != text[at : at + len(tokens)])
            accepted = int(wrong[0]) if len(wrong) else len(tokens)
            found = Repetition(
                found.asked + 1,
                found.proposed + (len(tokens) > 0),
                found.judged + min(accepted + 1, len(tokens)),
                found.accepted + accepted,
            )
            at += accepted + 1
    return found if found.tokens >= MIN_TOKENS else None


def looked_up(text: Int[np.ndarray, "N"], settings: PromptLookupSettings, count: int) -> Int[np.ndarray, "n"]:
    """What prompt lookup proposes after a text, as `qspec_jax.drafts.prompt_lookup.look_up` does on a device: `count` tokens, or none."""
    places, newest = np.flatnonzero(text[:-1] == text[-1]), -1  # of the last token of n-grams that are as the text's end
    for size in range(1, min(settings.longest, len(text) - 1) + 1):
        places = places[places >= size - 1]
        places = places[text[places - (size - 1)] == text[-size]]
        if not len(places):
            break
        if size >= settings.shortest:
            newest = places[-1]
    if newest < 0:
        return text[:0]
    return text[newest + 1 + np.arange(count) % (len(text) - newest - 1)]
