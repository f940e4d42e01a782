"""A language of six tokens in which the last one decides the next, and how often the decode loop emits what."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import chisquare

from pallas_kernels.formats.kv_cache import Lengths
from qspec_jax.caches.cache import Cache, Reads, longer
from qspec_jax.caches.schedule import Schedule
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.round import decode
from qspec_jax.decoding.sampling import prompt_keys
from qspec_jax.decoding.state import UNLIMITED, start
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.stepwise import StepwiseDraft, propose_by_steps

V, ROWS, GAMMA = 6, 20_000, 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoCache(Cache):
    """What the loop asks of a cache, for models that look at the last token alone. room: the drafts that the schedule has room for."""

    lengths: Lengths
    room: jax.Array
    layers: tuple = ()

    schedule = Schedule(None)
    capacity = fill = attend = tokens = reads = bytes_of_reads = None

    @property
    def draft_room(self):
        return self.room


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Markov:
    """A model whose logits are a table's row."""

    table: jax.Array
    model = types.SimpleNamespace(config=types.SimpleNamespace(windowed_layers=()))  # what drafts ask of it

    def __call__(self, tokens, positions, cache):
        return self.table[tokens], cache.rollback(longer(cache.lengths, tokens.shape[1]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarkovDraft(Draft):
    """Single-token steps of such a model."""

    step: Markov

    independent = True

    def propose(self, state, cache, current):
        proposal, cache = propose_by_steps(self.step, cache, current)
        return proposal, state, cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarkovSteps(StepwiseDraft):
    """The same as a draft that others can verify with."""

    step: Markov

    def step_in_round(self, state, cache):
        return self.step

    def made_for(self):
        return ()

    def reads(self, layer, cache, tokens):
        return Reads(0, 0, 1)


RNG = np.random.default_rng(0)
TABLE = RNG.normal(0, 1.5, (V, V))
DRAFTS = {
    "uniform": np.zeros((V, V)),
    "one-hot wrong": np.where(np.arange(V) == TABLE.argmin(-1)[:, None], 0.0, -1e9),
    "zero where the target is likely": np.where(np.arange(V) == TABLE.argmax(-1)[:, None], -1e9, TABLE),
    "another table": RNG.normal(0, 1.5, (V, V)),
    "the target": TABLE,
}


def filtered(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Hugging Face's temperature, top-k, top-p and min-p, in plain numpy, one row at a time."""
    out = []
    for row in np.asarray(logits, np.float64).reshape(-1, np.shape(logits)[-1]):
        row = row / temperature
        if top_k:
            row = np.where(row < np.sort(row)[-min(top_k, len(row))], -np.inf, row)
        p = np.exp(row - row.max())
        p /= p.sum()
        if top_p < 1:
            ascending = np.argsort(row, kind="stable")
            remove = ascending[np.cumsum(p[ascending]) <= 1 - top_p]
            p[remove[remove != ascending[-1]]] = 0
            p /= p.sum()
        p = np.where(p < min_p * p.max(), 0, p)
        out.append(p / p.sum())
    return np.array(out).reshape(np.shape(logits))


def loop_of_its_own():
    """The decode loop, jitted apart from others: jit remembers what it has traced."""
    return jax.jit(lambda *args: decode(*args))


# The second is for tests that plant an error in `sampling.residual`.
LOOP, WRONG = loop_of_its_own(), loop_of_its_own()


def counted(
    target,
    draft,
    sampler,
    *,
    room=100,
    seed=0,
    batches=1,
    gamma=GAMMA,
    rows=slice(None),
    loop=LOOP,
    at=1,
    length=2,
    settings=None,
    draft_state=(),
):
    """Counts [V] * length of the tokens emitted from `at` on, after token 0, over ROWS rows or some of them.

    target, draft: tables, or a model and a draft. batches: of rows, of seeds from `seed` on. settings: a config, for what `make_limits`
    makes of it. draft_state: what the draft begins with.
    """
    nothing, new = jnp.zeros(ROWS, jnp.int32), at + length + 1
    cache = NoCache(Lengths(nothing, nothing), jnp.broadcast_to(jnp.asarray(room, jnp.int32), ROWS))
    config = dataclasses.replace(
        settings or GenerationConfig(ignore_eos=True), draft="quantspec", max_new_tokens=new, num_speculative_tokens=gamma
    )
    limits = make_limits(None, *[config] * ROWS)
    seen = jnp.zeros((ROWS, V), bool) if limits.asks_what_was_seen else None
    if not isinstance(draft, Draft):
        draft = MarkovDraft(Markov(jnp.asarray(draft)))
    if isinstance(target, np.ndarray):
        target = Markov(jnp.asarray(target))
    counts = np.zeros(V**length, int)
    for each in range(seed, seed + batches):
        keys = prompt_keys(jax.random.key(each), ROWS)
        state = start(cache, nothing, keys, limits, max_new_tokens=new, gamma=gamma, draft=draft_state, seen=seen)
        state = loop(target, draft, sampler, state, limits, jnp.int32(UNLIMITED))
        tokens = np.asarray(state.tokens)[rows, at : at + length]
        assert (np.asarray(state.emitted) >= at + length).all()
        counts += np.bincount(tokens @ V ** np.arange(length)[::-1], minlength=V**length)
    return counts.reshape([V] * length)


def p_value(counts, expected):
    """Chi-square of counts against probabilities; 0 where something impossible was seen."""
    if counts[expected == 0].sum():
        return 0.0
    possible = expected > 0
    return chisquare(counts[possible], expected[possible] / expected.sum() * counts.sum()).pvalue
