"""From logits to tokens: greedy or sampled, and the acceptance of drafts that keeps the target's distribution.

Random draws depend on (seed, prompt index, position, purpose) alone (`qspec_jax.decoding.keys`), so a row's tokens do not change with its
neighbours.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.keys import IMPLEMENTATION, as_threefry
from qspec_jax.errors import InputError

DRAFT, ACCEPT, TARGET = range(3)  # the purpose of a draw


def prompt_keys(key: Key[Array, ""], prompts: int) -> Key[Array, "B"]:
    """A key per prompt index, of threefry. Raises InputError as `as_threefry`."""
    key = as_threefry(key)
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(prompts))


def draw_keys(keys: Key[Array, "B"], positions: Int[Array, "*B"], purpose: int) -> Key[Array, "*B"]:
    """The key of each row's draw for the token at a position [B] or [B, T]. Raises InputError for keys of another generator."""
    if jax.random.key_impl(keys) != IMPLEMENTATION:
        raise InputError(f"row keys should be of {IMPLEMENTATION}, as prompt_keys makes them, not of {jax.random.key_impl(keys)}")
    fold = lambda key, position: jax.random.fold_in(jax.random.fold_in(key, position), purpose)
    if positions.ndim == 2:
        fold = jax.vmap(fold, (None, 0))
    return jax.vmap(fold)(keys, positions)


class Sampler(Protocol):
    """A decoding strategy. `choose` and `verify` are given the row keys and the positions of the tokens that they choose."""

    def choose(self, logits: Float[Array, "B V"], keys: Key[Array, "B"], positions: Int[Array, "B"], purpose: int) -> tuple[Array, Array]:
        """A token per row, and what `verify` must know of the distribution it came from, [B, W]."""
        ...

    def distributions(self, logits: Float[Array, "B T V"]) -> Float[Array, "B T W"]:
        """What `verify` must know of the distributions that these logits stand for."""
        ...

    def certain(self, tokens: Int[Array, "B T"], vocab_size: int) -> Float[Array, "B T W"]:
        """What `verify` must know of tokens that were not drawn but given: all probability is theirs."""
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
        """How many of the first `eligible` drafts are accepted, and the target's own token after them."""
        ...

    def below(self) -> "Sampler":
        """The strategy one level deeper, in a draft that itself proposes and verifies: the same, unless acceptance is simulated."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Greedy:
    """The most likely token; of equals, the one of lowest id."""

    def choose(self, logits, keys, positions, purpose):
        return jnp.argmax(logits, -1).astype(jnp.int32), self.distributions(logits)

    def distributions(self, logits):
        return jnp.zeros((*logits.shape[:-1], 0), logits.dtype)

    def certain(self, tokens, vocab_size):
        return jnp.zeros((*tokens.shape, 0))

    def verify(self, logits, drafts, proposals, eligible, keys, positions):
        tokens = jnp.argmax(logits, -1).astype(jnp.int32)
        accepted = _leading(drafts == tokens[:, :-1], eligible)
        return accepted, _pick(tokens, accepted)

    def below(self):
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, top-p and min-p, in Hugging Face's order; speculative sampling (arXiv 2211.17192, algorithm 1).

    Settings are of every row, [1], or of each, [B]. A row of temperature 0 is greedy: all of its probability is the likeliest token's.
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
        p = self._sampled(logits)
        if not self.some_greedy:
            return p
        likeliest = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=p.dtype)
        return jnp.where(_by_row(self.temperature, logits) == 0, likeliest, p)

    def _sampled(self, logits: Float[Array, "B *T V"]) -> Float[Array, "B *T V"]:
        temperature = jnp.maximum(self.temperature, jnp.finfo(jnp.float32).tiny).astype(logits.dtype)
        # The largest first taken off: a tiny temperature then gives -inf, never inf - inf.
        logits = (logits - logits.max(-1, keepdims=True)) / _by_row(temperature, logits)
        kept = logits
        if self.use_top_k or self.use_top_p:
            kept = jnp.where(logits < self._last_ranked(logits), -jnp.inf, kept)
        if self.use_min_p:
            kept = jnp.where(logits < jnp.log(_by_row(self.min_p, logits)).astype(logits.dtype), -jnp.inf, kept)
        return jax.nn.softmax(kept, -1)

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

    def choose(self, logits, keys, positions, purpose):
        probabilities = self.probabilities(logits)
        return _draw(probabilities, draw_keys(keys, positions, purpose)), probabilities

    def distributions(self, logits):
        return self.probabilities(logits)

    def certain(self, tokens, vocab_size):
        return jax.nn.one_hot(tokens, vocab_size)

    def verify(self, logits, drafts, proposals, eligible, keys, positions):
        p = self.probabilities(logits)
        if drafts.shape[1] == 0:
            accepted = jnp.zeros_like(eligible)
            return accepted, _draw(p[:, 0], draw_keys(keys, positions[:, 0], TARGET))
        of_draft = lambda x: jnp.take_along_axis(x, drafts[..., None], -1)[..., 0]
        chances = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, dtype=p.dtype)))(draw_keys(keys, positions[:, :-1], ACCEPT))
        accepted = _leading(chances * of_draft(proposals) < of_draft(p[:, :-1]), eligible)
        # Where drafts ran out rather than failed, the next token is the target's own and not the residual's.
        q = _pick(proposals, jnp.minimum(accepted, drafts.shape[1] - 1))
        q = jnp.where((accepted < eligible)[:, None], q, 0)
        return accepted, _draw(residual(_pick(p, accepted), q), draw_keys(keys, _pick(positions, accepted), TARGET))

    def below(self):
        return self


def residual(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """What to draw from after a rejection, max(p - q, 0), not normalized; p itself where rounding leaves nothing."""
    rest = jnp.maximum(p - q, 0)
    return jnp.where(rest.sum(-1, keepdims=True) > 0, rest, p)


def make_sampler(*configs: GenerationConfig) -> Sampler:
    """The sampler of one config for all rows, or of one for each. Greedy where all have temperature 0, otherwise sampling."""
    hot = [config for config in configs if config.temperature > 0]
    if not hot:
        return Greedy()
    return Sampling(
        jnp.array([config.temperature for config in configs], jnp.float32),
        jnp.array([config.top_k for config in configs], jnp.int32),
        jnp.array([config.top_p for config in configs], jnp.float32),
        jnp.array([config.min_p for config in configs], jnp.float32),
        any(config.top_k > 0 for config in hot),
        any(config.top_p < 1 for config in hot),
        any(config.min_p > 0 for config in hot),
        len(hot) < len(configs),
    )


def _leading(match: Array, eligible: Int[Array, "B"]) -> Int[Array, "B"]:
    """How many of the first `eligible` entries of each row are true before the first false one."""
    match &= jnp.arange(match.shape[1]) < eligible[:, None]
    return jnp.cumprod(match, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)


def _by_row(setting: Array, logits: Array) -> Array:
    """The setting reshaped to broadcast against logits [B, ..., V]."""
    return setting.reshape(-1, *(1,) * (logits.ndim - 1))


def _pick(x: Array, index: Int[Array, "B"]) -> Array:
    return jax.vmap(lambda row, i: row[i])(x, index)


def _draw(weights: Float[Array, "B V"], keys: Key[Array, "B"]) -> Int[Array, "B"]:
    return jax.vmap(lambda key, w: jax.random.categorical(key, jnp.log(w)))(keys, weights).astype(jnp.int32)
