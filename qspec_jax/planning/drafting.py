"""What the drafts of a round take: passes of a model, of a head, or of both levels of a cascade."""

import dataclasses

from qspec_jax.caches.registry import CacheConfig
from qspec_jax.drafts.draft import Proposes
from qspec_jax.models.config import LlamaConfig
from qspec_jax.planning import timing
from qspec_jax.planning.devices import Device
from qspec_jax.planning.heads import fusing_cost, head_cost
from qspec_jax.planning.rounds import Asked, Rounds, inner_rounds
from qspec_jax.planning.steps import OutlinedDraft
from qspec_jax.planning.timing import Cost


@dataclasses.dataclass(frozen=True)
class Place:
    """Where drafts are made.

    Attributes:
        device: on which.
        target: the target's shape.
        cache: the target's.
        context, batch: tokens that a row of it holds, and rows.
        capacity: tokens that a row has room for.
    """

    device: Device
    target: LlamaConfig
    cache: CacheConfig
    context: int
    batch: int
    capacity: int

    def pass_of(self, draft: OutlinedDraft, tokens: int = 1) -> Cost:
        """A pass of a draft over `tokens` tokens of each row. Only for one with a model or a head."""
        if draft.head is not None:
            return head_cost(self.device, draft.head, context=self.context, batch=self.batch, tokens=tokens)
        where = dict(context=self.context, batch=self.batch, capacity=self.capacity)
        return timing.draft_cost(self.device, draft, self.target, self.cache, **where, tokens=tokens)

    def seconds_of(self, draft: OutlinedDraft, tokens: int = 1) -> float:
        """The time of `pass_of`."""
        return self.pass_of(draft, tokens).seconds(self.device)

    def fusing(self, draft: OutlinedDraft, tokens: int) -> float:
        """Seconds in which a head's features of `tokens` tokens of each row are fused."""
        return fusing_cost(self.device, draft.head, batch=self.batch, tokens=tokens).seconds(self.device)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """What a round's drafts take on average.

    Attributes:
        seconds: all of them together.
        step: a step of the draft; of a cascade a pass of its middle over its first draft's tokens. None without a model.
        first_step: a step of a cascade's first draft; None without a model.
        middle_passes: of a cascade in a round; None for other drafts.
    """

    seconds: float = 0.0
    step: Cost | None = None
    first_step: Cost | None = None
    middle_passes: float | None = None


def drafting(place: Place, draft: OutlinedDraft, rounds: Rounds, gamma: int, inner: Asked | None = None) -> Drafting:
    """What the last draft that rounds ask takes.

    Args:
        place: where.
        draft: that draft.
        rounds: the means of rounds.
        gamma: drafts of a round.
        inner: the first draft of a cascade, as its middle judges it.
    """
    if draft.levels:
        return _of_cascade(place, draft, rounds, gamma, inner)
    if draft.head is not None:
        # Pairs of as many tokens as a round may emit are read whether or not any drafts are allowed, and the steps follow one by one.
        seconds = place.seconds_of(draft, gamma + 1) + place.fusing(draft, gamma + 1)
        return Drafting(seconds + sum(rounds.passes[1:]) * place.seconds_of(draft), place.pass_of(draft))
    if draft.model is None:
        return Drafting()
    return Drafting(_of_model(place, draft, rounds), place.pass_of(draft))


def _of_model(place: Place, draft: OutlinedDraft, rounds: Rounds) -> float:
    """Seconds of the passes of a draft's model in a round. It reads first what it lacks of the text: after a round in which it was not
    asked it must catch up on all that round emitted."""
    step_s, width = place.seconds_of(draft), draft.model.first_pass
    if width == 1:
        return rounds.steps * step_s
    catching_up = (1 - rounds.asked) * rounds.tokens / width
    return (rounds.passes[0] + catching_up) * place.seconds_of(draft, width) + sum(rounds.passes[1:]) * step_s


def _of_cascade(place: Place, draft: OutlinedDraft, rounds: Rounds, gamma: int, inner: Asked) -> Drafting:
    """A round of a cascade: passes of the middle over what the first drafted and the token before, each of which samples and verifies as a
    round does; and what the first drafts before each of them."""
    first, middle = draft.levels
    at_once = draft.draft.at_once(gamma)
    of_asked = [rounds.asked * chance for chance in rounds.allowed[1:]]
    found = inner_rounds((1 - sum(of_asked), *of_asked), at_once, inner, batch=place.batch)
    middle_pass = place.pass_of(middle, at_once + 1)
    wide = found.passes if first.draft.proposes is Proposes.ALL else found.with_drafts
    seconds = found.passes * timing.FITTED.round + wide * middle_pass.seconds(place.device)
    seconds += (found.passes - wide) * place.seconds_of(middle)
    step = None
    if first.head is not None:
        # Before the first pass of the middle what a round may emit, and after each pass what that may.
        seconds += place.seconds_of(first, gamma + 1) + found.passes * place.seconds_of(first, at_once + 1)
        seconds += found.passes * place.fusing(first, at_once + 1) + place.fusing(first, gamma + 1)
        seconds += sum(found.proposals[1:]) * place.seconds_of(first)
        step = place.pass_of(first)
    elif first.model is not None:
        step, width = place.pass_of(first), first.model.first_pass
        steps = sum(found.proposals)
        if width > 1:
            # A round begins with what the round before emitted; what a pass of the middle added is never more than fits one pass.
            further = rounds.passes_over_emitted(width) - 1
            seconds += (found.proposals[0] + further) * place.seconds_of(first, width)
            steps -= found.proposals[0]
        seconds += steps * step.seconds(place.device)
    return Drafting(seconds, middle_pass, step, found.passes)
