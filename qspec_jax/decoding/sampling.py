"""From logits to tokens: greedy or sampled, and the acceptance of drafts that keeps the target's distribution.

Random draws depend only on (seed, prompt index, position, purpose) (`qspec_jax.decoding.keys`), so a row's tokens do not depend on other
rows.
"""

import dataclasses
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from qspec_jax.decoding.config import BITS, GenerationConfig
from qspec_jax.decoding.exact_bits import decodes_in_turn
from qspec_jax.decoding.keys import IMPLEMENTATION, as_threefry
from qspec_jax.decoding.reductions import best, reduced, total_of
from qspec_jax.errors import InputError

DRAFT, ACCEPT, TARGET = range(3)  # purposes of a draw
SAMPLES = 0x7FFFFFFE  # folded into the key of a prompt's samples after the first; larger than any position


def prompt_keys(key: Key[Array, ""], prompts: int) -> Key[Array, "B"]:
    """A threefry key for each prompt index. Raises InputError as `as_threefry`."""
    return _folded(as_threefry(key), jnp.arange(prompts))


def sample_keys(key: Key[Array, ""], samples: int) -> list[Key[Array, ""]]:
    """The keys of samples of a prompt, of which the first has the prompt's own."""
    return [key, *_folded(jax.random.fold_in(key, SAMPLES), jnp.arange(1, samples))]


@jax.jit
def _folded(key: Key[Array, ""], numbers: Int[Array, "n"]) -> Key[Array, "n"]:
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(numbers)


def draw_keys(keys: Key[Array, "B"], positions: Int[Array, "*B"], purpose: int) -> Key[Array, "*B"]:
    """The key of each row's draw for the tokens at these positions, [B] or [B, T]. Raises InputError for keys that are not threefry's."""
    if jax.random.key_impl(keys) != IMPLEMENTATION:
        raise InputError(f"row keys should be of {IMPLEMENTATION}, as prompt_keys makes them, not of {jax.random.key_impl(keys)}")

    def fold(key: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, position), purpose)

    return jax.vmap(fold if positions.ndim == 1 else jax.vmap(fold, (None, 0)))(keys, positions)


class Sampler(Protocol):
    """A decoding strategy. A distribution is an array of any width W that `verify` understands.

    keys are those of the rows; positions are those of the tokens that are chosen.
    """

    def choose(self, logits: Float[Array, "B V"], keys: Key[Array, "B"], positions: Int[Array, "B"], purpose: int) -> tuple[Array, Array]:
        """A token per row, and the distribution that it came from, [B, W]."""
        ...

    def distributions(self, logits: Float[Array, "B T V"]) -> Float[Array, "B T W"]:
        """The distributions by these logits."""
        ...

    def certain(self, tokens: Int[Array, "B T"], vocab_size: int) -> Float[Array, "B T W"]:
        """The distributions in which these tokens have all probability, for tokens that were not drawn but given."""
        ...

    def verify(
        self,
        logits: Float[Array, "B T V"],
        drafts: Int[Array, "B gamma"],
        proposals: Float[Array, "B gamma W"],
        eligible: Int[Array, "B"],
        keys: Key[Array, "B"],
        positions: Int[Array, "B T"],
    ) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        """Accepts some of the drafts.

        Args:
            logits: the target's, after the pending token and after each draft.
            drafts: the proposed tokens.
            proposals: the distributions that they came from.
            eligible: the number of drafts that may be accepted in each row.
            keys: of the rows.
            positions: of the tokens after the pending one.

        Returns:
            How many of the first `eligible` drafts are accepted, and the target's own token after them.
        """
        ...

    def below(self) -> Self:
        """The strategy of a draft that itself proposes and verifies, one level deeper: the same, unless acceptance is simulated."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Greedy:
    """The most likely token; of several, the one with the lowest id."""

    def choose(self, logits: Float[Array, "B V"], keys: Key[Array, "B"], positions: Int[Array, "B"], purpose: int) -> tuple[Array, Array]:
        return jnp.argmax(logits, -1).astype(jnp.int32), self.distributions(logits)

    def distributions(self, logits: Float[Array, "B T V"]) -> Float[Array, "B T W"]:
        return jnp.zeros((*logits.shape[:-1], 0), logits.dtype)

    def certain(self, tokens: Int[Array, "B T"], vocab_size: int) -> Float[Array, "B T W"]:
        return jnp.zeros((*tokens.shape, 0))

    def verify(
        self,
        logits: Float[Array, "B T V"],
        drafts: Int[Array, "B gamma"],
        proposals: Float[Array, "B gamma W"],
        eligible: Int[Array, "B"],
        keys: Key[Array, "B"],
        positions: Int[Array, "B T"],
    ) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        tokens = jnp.argmax(logits, -1).astype(jnp.int32)
        accepted = _leading(self._right(tokens, drafts, keys, positions), jnp.minimum(eligible, drafts.shape[1]))
        return accepted, _pick(tokens, accepted)

    def _right(
        self, tokens: Int[Array, "B T"], drafts: Int[Array, "B gamma"], keys: Key[Array, "B"], positions: Int[Array, "B T"]
    ) -> Bool[Array, "B T"]:
        """Which drafts count as right: those that are the target's own tokens. The last place, which has no draft, is never eligible."""
        return jnp.pad(drafts, ((0, 0), (0, 1))) == tokens

    def below(self) -> Self:
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, top-p and min-p, in Hugging Face's order; speculative sampling (arXiv 2211.17192, algorithm 1).

    Each setting is that of all rows, [1], or of each, [B]. A row of temperature 0 is greedy: its most likely token has all probability.

    Attributes:
        temperature: divides the logits.
        top_k: how many of the most likely tokens are kept; 0 keeps all.
        top_p: the most likely tokens are kept until they have this probability together; 1 keeps all.
        min_p: the probability, relative to the most likely token's, from which a token is kept; 0 keeps all.
        use_top_k, use_top_p, use_min_p: whether any row has the setting.
        some_greedy: whether any row has temperature 0.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    use_top_k: bool = dataclasses.field(metadata={"static": True})
    use_top_p: bool = dataclasses.field(metadata={"static": True})
    use_min_p: bool = dataclasses.field(metadata={"static": True})
    some_greedy: bool = dataclasses.field(metadata={"static": True})

    def probabilities(self, logits: Float[Array, "B *T V"]) -> Float[Array, "B *T V"]:
        """The distribution that tokens are drawn from. Ties with the last token kept are kept too."""
        return _normalized(self._scaled(logits))

    def _scaled(self, logits: Float[Array, "B *T V"]) -> Float[Array, "B *T V"]:
        """The logarithms of weights that tokens are drawn by, the largest of them 0."""
        temperature = jnp.maximum(self.temperature, jnp.finfo(jnp.float32).tiny).astype(logits.dtype)
        # The largest is subtracted first. A tiny temperature then gives -inf, never inf - inf; of large logits, as biases make them, the
        # differences stay, beside which the noise of a draw counts; and XLA cannot round the largest in two ways.
        scaled = (logits - logits.max(-1, keepdims=True)) / _by_row(temperature, logits)
        kept = scaled
        if self.use_top_k or self.use_top_p:
            kept = jnp.where(scaled < self._last_ranked(scaled), -jnp.inf, kept)
        if self.use_min_p:
            kept = jnp.where(scaled < jnp.log(_by_row(self.min_p, scaled)).astype(scaled.dtype), -jnp.inf, kept)
        if not self.some_greedy:
            return kept
        greedy = jnp.log(jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=kept.dtype))
        return jnp.where(_by_row(self.temperature, logits) == 0, greedy, kept)

    def _last_ranked(self, logits: Float[Array, "B *T V"]) -> Float[Array, "B *T 1"]:
        """The smallest logit that top-k and top-p keep."""
        ranked = jnp.sort(logits, -1, descending=True)
        keep = jnp.ones_like(ranked, dtype=bool)
        if self.use_top_k:
            k = _by_row(self.top_k, logits)
            keep &= (jnp.arange(ranked.shape[-1]) < k) | (k == 0)
        if self.use_top_p:
            mass = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), -1)
            p = _by_row(self.top_p, logits)
            keep &= (jnp.cumsum(mass, -1) - mass < p) | (jnp.arange(ranked.shape[-1]) == 0) | (p == 1)
        return jnp.min(jnp.where(keep, ranked, jnp.inf), -1, keepdims=True)

    def choose(self, logits: Float[Array, "B V"], keys: Key[Array, "B"], positions: Int[Array, "B"], purpose: int) -> tuple[Array, Array]:
        scaled = self._scaled(logits)
        weights, noise = jnp.exp(scaled), _noise(scaled, draw_keys(keys, positions, purpose))
        (total,), (_, token) = reduced(total_of(weights), best(scaled + noise))
        return token, weights / total[..., None].astype(weights.dtype)

    def distributions(self, logits: Float[Array, "B T V"]) -> Float[Array, "B T W"]:
        return self.probabilities(logits)

    def certain(self, tokens: Int[Array, "B T"], vocab_size: int) -> Float[Array, "B T W"]:
        return jax.nn.one_hot(tokens, vocab_size)

    def verify(
        self,
        logits: Float[Array, "B T V"],
        drafts: Int[Array, "B gamma"],
        proposals: Float[Array, "B gamma W"],
        eligible: Int[Array, "B"],
        keys: Key[Array, "B"],
        positions: Int[Array, "B T"],
    ) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        if drafts.shape[1] == 0:
            return jnp.zeros_like(eligible), self.choose(logits[:, 0], keys, positions[:, 0], TARGET)[0]
        scaled = self._scaled(logits)
        p = _normalized(scaled)
        q_of_drafts, p_of_drafts = (jnp.take_along_axis(x, drafts[..., None], -1)[..., 0] for x in (proposals, p[:, :-1]))
        uniform = accept_draws(keys, positions[:, :-1], p.dtype)
        accepted = _leading(uniform * q_of_drafts < p_of_drafts, eligible)
        # If all eligible drafts are accepted, the next token is drawn from the target's distribution and not from the residual.
        rest = residual(_pick(p, accepted), _pick(proposals, jnp.minimum(accepted, drafts.shape[1] - 1)))
        noise = _noise(rest, draw_keys(keys, _pick(positions, accepted), TARGET))
        (most, of_rest), (_, token) = reduced(best(jnp.log(rest) + noise), best(_pick(scaled, accepted) + noise))
        return accepted, jnp.where((accepted < eligible) & (most > -jnp.inf), of_rest, token)

    def below(self) -> Self:
        return self


def accept_draws(keys: Key[Array, "B"], positions: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T"]:
    """The number that decides over the draft at each of these positions: it is accepted where this times q is less than p."""
    return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, dtype=dtype)))(draw_keys(keys, positions, ACCEPT))


def residual(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """The weights to draw from after a rejection: max(p - q, 0), not normalized. Rounding may leave none."""
    return jnp.maximum(p - q, 0)


def make_sampler(*configs: GenerationConfig) -> Sampler:
    """The sampler of rows with these configs: one for all rows, or one for each. Greedy if all have temperature 0."""
    sampled = [config for config in configs if config.temperature > 0]
    if not sampled:
        return Greedy()
    # With other settings, those of rows beside it, a row's program would differ.
    all_used = configs[0].exact == BITS and not decodes_in_turn(configs)
    return Sampling(
        jnp.array([config.temperature for config in configs], jnp.float32),
        jnp.array([config.top_k for config in configs], jnp.int32),
        jnp.array([config.top_p for config in configs], jnp.float32),
        jnp.array([config.min_p for config in configs], jnp.float32),
        use_top_k=all_used or any(config.top_k > 0 for config in sampled),
        use_top_p=all_used or any(config.top_p < 1 for config in sampled),
        use_min_p=all_used or any(config.min_p > 0 for config in sampled),
        some_greedy=all_used or len(sampled) < len(configs),
    )


def _leading(match: Array, eligible: Int[Array, "B"]) -> Int[Array, "B"]:
    """How many of the first `eligible` entries of each row are true before the first false one."""
    place, places = jnp.arange(match.shape[1]), match.shape[1]
    return jnp.where(match & (place < eligible[:, None]), places, place).min(1, initial=places).astype(jnp.int32)


def _by_row(setting: Array, logits: Array) -> Array:
    """The setting reshaped to broadcast against logits [B, ..., V]."""
    return setting.reshape(-1, *(1,) * (logits.ndim - 1))


def _pick(x: Array, index: Int[Array, "B"]) -> Array:
    return jax.vmap(lambda row, i: row[i])(x, index)


def _normalized(scaled: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """The distribution with these logarithms of weights, the largest of which is 0. `jax.nn.softmax` would look for the largest again."""
    weights = jnp.exp(scaled)
    return weights / weights.sum(-1, keepdims=True)


def _noise(scaled: Float[Array, "B V"], keys: Key[Array, "B"]) -> Float[Array, "B V"]:
    """What is added to logarithms of weights, of which the best one is then drawn by these weights (Gumbel noise)."""
    return jax.vmap(lambda key: jax.random.gumbel(key, scaled.shape[1:], scaled.dtype))(keys)
