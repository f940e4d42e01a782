"""How often prompt lookup would have been right along the ends of prompts, by which a cascade that begins with it is planned.

A text that has repeated itself up to its end mostly goes on to do so. That is no certainty: what is generated may be of another kind.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from qspec_jax.drafts.prompt_lookup import PromptLookupSettings

DRAFTED = 3  # tokens of a proposal
LAST, PROMPTS = 1024, 8  # tokens that are looked at, of all prompts together, and of how many prompts
MIN_ASKED = 64  # proposals that were asked for; fewer say too little


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
        """The chance that a proposed token was in the text, given those before it."""
        return self.accepted / max(1, self.judged)


def repetition(prompts: Sequence[Sequence[int]], settings: PromptLookupSettings) -> Repetition | None:
    """What prompt lookup proposed along the ends of prompts, a proposal after each token that it got wrong; None if it was asked less than
    `MIN_ASKED` times.

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
    return found if found.asked >= MIN_ASKED else None


def looked_up(text: Int[np.ndarray, "N"], settings: PromptLookupSettings, count: int) -> Int[np.ndarray, "n"]:
    """What prompt lookup proposes after a text, as `qspec_jax.drafts.prompt_lookup.look_up` does on a device: `count` tokens, or none."""
    for size in range(min(settings.longest, len(text) - 1), settings.shortest - 1, -1):
        earlier = np.flatnonzero(text[size - 1 : -1] == text[-1])  # the places of the n-gram's last token, from 0
        for back in range(1, size):
            earlier = earlier[text[earlier + size - 1 - back] == text[-1 - back]]
        if len(earlier):
            start = earlier[-1] + size
            return text[start + np.arange(count) % (len(text) - start)]
    return text[:0]
