"""Drafts with more to them: of two levels, dependent on what was observed, and as the registry makes them of a text. All are exact."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import hf_config, write_checkpoint
from markov import DRAFTS, ROWS, TABLE, Markov, MarkovDraft, MarkovSteps, V, counted, filtered, loop_of_its_own, p_value
from runs import prepared, random_model, random_prompts, run_rounds, with_draft
from tiers import in_system

from pallas_kernels.attention import reference
from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax.caches.cache import AppendedCache, longer
from qspec_jax.caches.prefill import prefill
from qspec_jax.decoding import round as rounds
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.round import CurrentRound, decode
from qspec_jax.decoding.sampling import make_sampler, prompt_keys
from qspec_jax.drafts import make_draft, quantspec, registry
from qspec_jax.drafts.cascade import CascadeDraft
from qspec_jax.drafts.draft import Draft, Proposal, Proposes, Taps
from qspec_jax.drafts.prompt_lookup import PromptLookupDraft
from qspec_jax.drafts.quantspec import QuantSpecDraft
from qspec_jax.drafts.registry import DRAFTS as REGISTRY
from qspec_jax.drafts.registry import parse_draft
from qspec_jax.drafts.stepwise import StepwiseDraft, propose_by_steps
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Seen
from qspec_jax.models.prompts import padded
from qspec_jax.models.viewed import ViewedModel

G = 4
SAMPLERS = [{"temperature": 1.0}, {"temperature": 1.2}, {"temperature": 0.7, "top_k": 3}, {"temperature": 1.0, "top_p": 0.8}]
SPARSE = "sparse:budget=0.2,min_groups=2"
CONFIG = GenerationConfig(max_new_tokens=24, group_size=G, ignore_eos=True, draft=SPARSE)


@pytest.fixture(scope="module")
def model(float64):
    return random_model(jnp.float64, num_hidden_layers=1)


# A draft of two levels ---------------------------------------------------------------------------------------------------


def two_levels(middle: str, small: str) -> CascadeDraft:
    table = lambda name: Markov(jnp.asarray(DRAFTS[name]))
    return CascadeDraft(MarkovDraft(table(small)), MarkovSteps(table(middle)))


NO_STATE = ((), ())


@pytest.mark.parametrize(
    ("options", "middle", "small"),
    [
        (SAMPLERS[1], "another table", "uniform"),
        *in_system(
            (SAMPLERS[2], "the target", "another table"),
            (SAMPLERS[3], "uniform", "the target"),
            *((SAMPLERS[i], "another table", "uniform") for i in (0, 2, 3)),
        ),
    ],
    ids=str,
)
def test_two_levels_have_the_targets_distribution(options, middle, small):
    p = filtered(TABLE, **options)
    sampler = make_sampler(GenerationConfig(**options))
    counts = counted(TABLE, two_levels(middle, small), sampler, gamma=4, length=3, draft_state=NO_STATE)
    assert p_value(counts, p[0][:, None, None] * p[:, :, None] * p) > 1e-3


@pytest.mark.parametrize("fault", ["keys", *in_system("distributions")])
def test_what_two_levels_get_wrong_is_seen(fault, monkeypatch):
    """Draws of both levels with the same keys, and the distributions of another model handed on."""
    if fault == "keys":
        monkeypatch.setattr(CurrentRound, "below", lambda self: self)
    if fault == "distributions":
        handed_on = CurrentRound.distributions
        monkeypatch.setattr(CurrentRound, "distributions", lambda self, logits, drafts: handed_on(self, 0 * logits, drafts))
    p, sampler = filtered(TABLE), make_sampler(GenerationConfig(temperature=1.0))
    counts = counted(TABLE, two_levels("another table", "uniform"), sampler, loop=loop_of_its_own(), draft_state=NO_STATE)
    chance = p_value(counts, p[0][:, None] * p)
    assert chance < 1e-6  # without a fault: test_two_levels_have_the_targets_distribution


def test_two_levels_are_greedy():
    tokens = [0]
    while len(tokens) < 9:
        tokens.append(int(TABLE[tokens[-1]].argmax()))
    for middle, small in (("another table", "uniform"), ("the target", "the target"), ("uniform", "one-hot wrong")):
        sampler = make_sampler(GenerationConfig())
        counts = counted(TABLE, two_levels(middle, small), sampler, gamma=5, length=4, at=5, draft_state=NO_STATE)
        assert np.argwhere(counts).tolist() == [tokens[5:9]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sometimes(MarkovDraft):
    """Proposes nothing after some tokens."""

    proposes = Proposes.ALL_OR_NONE

    def propose(self, state, cache, current):
        proposal, *others = super().propose(state, cache, current)
        eligible = jnp.where(current.pending % 2 == 0, proposal.eligible, 0)
        return dataclasses.replace(proposal, eligible=eligible, foreseen=eligible), *others


@pytest.mark.parametrize("options", [SAMPLERS[1], *in_system(SAMPLERS[3])], ids=str)
def test_a_first_draft_that_proposes_at_times(options):
    p, table = filtered(TABLE, **options), lambda name: Markov(jnp.asarray(DRAFTS[name]))
    draft = CascadeDraft(Sometimes(table("uniform")), MarkovSteps(table("another table")))
    counts = counted(TABLE, draft, make_sampler(GenerationConfig(**options)), gamma=4, length=3, draft_state=NO_STATE)
    assert p_value(counts, p[0][:, None, None] * p[:, :, None] * p) > 1e-3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AsIfAlways(PromptLookupDraft):
    proposes = Proposes.ALL


@pytest.mark.parametrize("temperature", [0.0, *in_system(0.8)])
def test_passes_without_drafts_are_steps_that_change_nothing(model, monkeypatch, temperature):
    """The middle's passes are of two sizes for a first draft that may have nothing to propose, and of one for others."""
    widths, verified = [], CascadeDraft._verified
    watched = lambda draft, m, tokens, *others: widths.append(tokens.shape[1]) or verified(draft, m, tokens, *others)
    monkeypatch.setattr(CascadeDraft, "_verified", watched)
    made = make_draft(f"cascade:middle=({SPARSE}),first_gamma=3", model)
    always = dataclasses.replace(made, first=AsIfAlways(**vars(made.first)))
    prompts, found = [[1, 2, 3, 4] * 5, random_prompts([30])[0]], []
    for draft, sizes in ((made, {4, 1}), (always, {4})):
        config = dataclasses.replace(CONFIG, draft=draft, num_speculative_tokens=6, temperature=temperature)
        found.append([generate(model, [prompt], config=config, key=jax.random.key(0)).token_ids for prompt in prompts])
        assert {*widths} == sizes
        widths.clear()
    assert found[0] == found[1]


# A draft that depends on what it observed --------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observed(Markov):
    """A target whose attention mass gives its query tokens away: query t attends to the group with its token's number."""

    def watched(self, tokens, positions, cache, *, observe, taps):
        given = jax.nn.one_hot(tokens, V)
        return *self(tokens, positions, cache), Seen((given[:, None],) if observe else (), given if taps else None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adversary(Draft):
    """Drafts uniformly, but where it observed the second draft of the last round, from that token and the last one alone.

    The noise that drew a rejected token is used again for the next token of its position. Whoever knows which token it drew from all knows
    that it will draw the same from these two, though they look equally likely.
    """

    reads: str = dataclasses.field(default="masses", metadata={"static": True})

    @property
    def observes(self):
        return self.reads == "masses"

    @property
    def taps(self):
        return Taps((0,), 0, 1) if self.reads == "features" else None

    def begin(self, prompt):
        return jnp.full(prompt.tokens.shape[0], -1)

    def propose(self, state, cache, current):
        def step(tokens, positions, cache):
            two = (jnp.arange(V) == state[:, None]) | (jnp.arange(V) == V - 1)
            table = jnp.where((state[:, None] < 0) | two, 0.0, -1e9)
            return table[:, None], cache.rollback(longer(cache.lengths, 1))

        proposal, cache = propose_by_steps(step, cache, current)
        return proposal, state, cache

    def commit(self, state, result, cache):
        second = result.masses[0][:, 0, 2] if self.observes else result.features[:, 2]
        return jnp.where(second.sum(-1) > 0, second.argmax(-1), -1)


@pytest.mark.parametrize("reads", ["masses", "features"])
@pytest.mark.parametrize(
    ("options", "masked"),
    [
        (SAMPLERS[1], True),
        (SAMPLERS[1], False),
        *in_system(*((SAMPLERS[i], True) for i in (0, 2, 3))),
    ],
    ids=str,
)
def test_observations_of_rejected_drafts_are_hidden(options, masked, reads, monkeypatch):
    if not masked:
        for name in ("seen_by_accepted", "of_accepted"):
            monkeypatch.setattr(rounds, name, lambda seen, kept: seen)
    loop = jax.jit(lambda *args: decode(*args))  # of its own, since jit remembers what it has traced
    p, sampler = filtered(TABLE, **options), make_sampler(GenerationConfig(**options))
    state = jnp.full(ROWS, -1)
    counts = counted(Observed(jnp.asarray(TABLE)), Adversary(reads), sampler, length=3, loop=loop, draft_state=state)
    chance = p_value(counts, p[0][:, None, None] * p[:, :, None] * p)
    assert chance > 1e-3 if masked else chance < 1e-6


# Rounds ---------------------------------------------------------------------------------------------------------------


def test_more_drafts_than_a_round_allows_are_not_counted(model):
    """Or the output would silently not be the target's."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Greedy(QuantSpecDraft):
        def propose(self, state, cache, current):
            proposal, state, cache = super().propose(state, cache, current)
            return dataclasses.replace(proposal, eligible=jnp.full_like(proposal.eligible, current.gamma)), state, cache

    honest = quantspec(model, weight_bits=16, cache="int8")
    runs = [run_rounds(model, random_prompts([5, 30]), CONFIG, draft=draft) for draft in (honest, Greedy(honest.step))]
    assert runs[0].tokens == runs[1].tokens
    np.testing.assert_array_equal([state.buffered for state in runs[0].rounds], [state.buffered for state in runs[1].rounds])


def test_an_engine_without_a_draft(model):
    engine = Engine(model, None, cache=CONFIG.cache_config, gamma=4, prompt_tokens=9, max_new_tokens=24)
    state = engine.prefill(random_prompts([9]), make_sampler(CONFIG), prompt_keys(jax.random.key(0), 1), make_limits(model, CONFIG))
    state = engine.rounds(state, make_sampler(CONFIG), make_limits(model, CONFIG))
    target = dataclasses.replace(CONFIG, draft="none", cache="int8")
    assert state.tokens[0, :24].tolist() == run_rounds(model, random_prompts([9]), target).tokens[0]


def test_observing_changes_nothing(model):
    """Neither in the logits, nor by chunks that are not whole: 13 groups, some at a time."""
    prompts, n = padded(random_prompts([61, 40]))
    empty = CONFIG.cache_config.empty(model.config, batch=2, capacity=64, num_speculative_tokens=4, dtype=model.dtype)
    _, cache = jax.jit(prefill)(model, prompts, n, empty)
    tokens = prompts[:, :3]
    positions = cache.lengths.total[:, None] + jnp.arange(3)
    plain, _ = jax.jit(lambda: model(tokens, positions, cache))()
    observed, _, seen = jax.jit(lambda: ViewedModel(model, BOTH_PLANES).watched(tokens, positions, cache, observe=True))()
    np.testing.assert_array_equal(plain, observed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "CHUNK_TOKENS", 5 * G)
        _, _, chunks = jax.jit(lambda: ViewedModel(model, BOTH_PLANES).watched(tokens, positions, cache, observe=True))()
    (mass,) = seen.masses
    np.testing.assert_allclose(chunks.masses[0], mass, atol=1e-7)
    assert mass.shape[3] == 15 and (np.asarray(mass).sum(-1) < 2).all() and np.asarray(mass).sum(-1).max() > 0.5


# Of a draft with a cache of its own: test_compact_drafts.py.
@pytest.mark.system
def test_more_of_the_cache_is_more_accepted(float64):
    """A draft of the target's own weights: with the budget alone it differs from the target's reading, with everything in nothing."""
    model = random_model(jnp.float64, num_hidden_layers=1, spread=0.4)
    prompts = random_prompts([150, 201])
    rates = {}
    for draft in ("sparse:budget=0.01,min_groups=1,weight_bits=16", "sparse:budget=1.0,weight_bits=16", "quantspec:weight_bits=16"):
        config = dataclasses.replace(CONFIG, draft=draft, num_speculative_tokens=2)
        rates[draft] = generate(model, prompts, config=config).stats.draft_acceptance_rate
    few, all, dense = rates.values()
    assert few < all == dense


STEPWISE = [name for name in REGISTRY if name not in ("small-model", "eagle3", "prompt-lookup", "combine", "cascade", "triforce")]
FIRST = "quantspec", "snapkv"  # the one appends to the target's cache, and the other does not


@pytest.mark.parametrize("name", [*FIRST, *in_system(*(name for name in STEPWISE if name not in FIRST))])
def test_own_cache_says_whose_cache_the_steps_append_to(model, name):
    """A cache that only lies around the target's is the target's."""
    draft = make_draft(f"{name}:dense_layers=0,chunk=2" if name == "chunk-means" else name, model)
    state, *_ = prepared(model, random_prompts([70]), CONFIG, draft=draft)
    stepped = draft.cache_of_steps(state.draft, state.cache)
    assert isinstance(draft, StepwiseDraft) and isinstance(stepped, AppendedCache)
    buffers = {id(leaf) for leaf in jax.tree.leaves(state.cache.layers)}
    assert draft.own_cache == buffers.isdisjoint(map(id, jax.tree.leaves(stepped.layers)))


SECOND = "small-model:model={directory}"
ALL = {"adaptive": True, "min_draft_confidence": 0.1, "temperature": 0.9, "top_k": 9}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint with the random models' vocabulary."""
    return write_checkpoint(tmp_path_factory.mktemp("small"), hf_config(num_hidden_layers=1))


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (SPARSE, {"adaptive": True, "min_draft_confidence": 0.1}),
        *in_system(
            ("snapkv:budget=36,generated=5", {"adaptive": True, "min_draft_confidence": 0.1}),
            ("streaming-llm:budget=12,sinks=3", {"temperature": 0.9, "top_k": 9}),
            ("retrieval:budget=44,chunk=2,rebuild=5,least_accepted=0.3,generated=7", ALL),
            ("triforce:model={directory},gamma1=3,sinks=2,window=9,middle=(sparse:budget=0.2,min_groups=2)", {}),
            (f"{SECOND},reads=window,sinks=2,window=9", ALL),
        ),
        # Of the same kinds: other scores of groups and chunks, and drafts of two.
        *(
            pytest.param(text, ALL, marks=pytest.mark.system)
            for text in (
                "exact-topk:unit=token,budget=0.2",
                "h2o:budget=0.2,min_groups=2",
                "sparse:budget=0.2,min_groups=2,newest=0.25,memory=0.6,heads=by-mass",
                "chunk-means:budget=0.2,chunk=2,rebuild=5,dense_layers=0",
                "triforce:model={directory},gamma1=2,sinks=2,window=9,middle=(retrieval:budget=44,chunk=2,rebuild=5)",
                f"combine:prompt-lookup+{SECOND}",
            )
        ),
    ],
    ids=str,
)
def test_rows_replaced_in_a_running_batch_are_as_alone(text, settings, model, small):
    """Or as beside a copy of itself: one row would have a program of its own, and two have that of the batch."""
    config = dataclasses.replace(CONFIG, **settings)
    draft = make_draft(text.format(directory=small), model)
    keys = prompt_keys(jax.random.key(3), 5)
    prompts = random_prompts([3, 30, 9, 41, 17])
    new = (24, 9, 24, 5, 20)
    requests = [Request(prompt, dataclasses.replace(config, max_new_tokens=n), key) for prompt, n, key in zip(prompts, new, keys)]
    together = {result.index: result.token_ids for result in run_batch(model, with_draft(requests, draft), batch_size=2)}
    for i, (request, prompt) in enumerate(zip(requests, prompts)):
        copies = run_rounds(model, [prompt] * 2, request.config, draft=draft, keys=keys[jnp.array([i, i])])
        assert [together[i]] * 2 == copies.tokens and len(together[i]) == new[i]
        if "temperature" not in settings:
            target = dataclasses.replace(CONFIG, draft="none", cache="int8", max_new_tokens=new[i])
            assert copies.tokens == run_rounds(model, [prompt] * 2, target).tokens


# Drafts by name ----------------------------------------------------------------------------------------------------------


def test_a_text_chooses_a_draft():
    assert parse_draft("none") is None
    assert parse_draft("sparse:budget=0.03,newest=0.25") == REGISTRY["sparse"](budget=0.03, newest=0.25)
    assert parse_draft("quantspec") == REGISTRY["quantspec"]()
    small, lookup = REGISTRY["small-model"], REGISTRY["prompt-lookup"]
    assert parse_draft("small-model:model=a=b:c\\,d,weight_bits=4") == small("a=b:c,d", weight_bits=4)
    both = parse_draft("combine:prompt-lookup:longest=5,shortest=2+small-model:model=x")
    assert both == REGISTRY["combine"](lookup(5, 2), small("x"))
    assert parse_draft("combine:(combine:prompt-lookup:longest=5,shortest=2+small-model:model=x)+(small-model:model=(c++))") == (
        REGISTRY["combine"](both, small("(c++)"))
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("magic", "quantspec, sparse, .*none"),
        ("", "quantspec, sparse, .*none"),
        ("none:budget=1", "has no settings"),
        ("sparse:", "budget=..."),
        ("sparse:size=3", "'size=3'"),
        ("sparse:budget=much", "a number, not 'much'"),
        ("sparse:dense_layers=1.5", "a whole number, not '1.5'"),
        ("sparse:budget=0.1,budget=0.2", "twice"),
        ("sparse:budget=0", "budget 0"),
        ("sparse:budget=1.5", "budget 1.5"),
        ("sparse:budget=inf", "budget inf"),
        ("sparse:budget=5000", "the model's 4096 positions"),
        ("exact-topk:budget=-1", "budget -1"),
        ("exact-topk:unit=page", "'page' should be group or token"),
        ("exact-topk:dense_layers=2", "dense_layers 2"),
        ("h2o:budget=nan", "budget nan"),
        ("chunk-means:chunk=0", "chunk 0"),
        ("chunk-means:rebuild=-1", "rebuild -1"),
        ("chunk-means:dense_layers=2", "dense_layers 2"),
        ("sparse:newest=1.5", "newest 1.5"),
        ("sparse:min_groups=0", "min_groups 0"),
        ("sparse:memory=1", "memory 1"),
        ("sparse:memory=-0.1", "memory -0.1"),
        ("sparse:heads=some", "heads 'some'"),
        ("h2o:memory=0.5", "memory is for sparse"),
        ("sparse:dense_layers=9", "dense_layers 9"),
        ("quantspec:cache=int2", "'int2'"),
        ("quantspec:weight_bits=5", "weight_bits 5"),
        ("small-model", "small-model:model=DIR"),
        ("small-model:model=", "small-model:model=DIR"),
        ("small-model:model=no/such", "no/such: no such directory"),
        ("sparse:budget=0.1,gamma=3", "gamma is no setting of a draft; num_speculative_tokens \\(--gamma\\) has it"),
        ("small-model:model=no,such", "'such' should be one of model=..., reads=text.window, "),
        ("small-model:model=x,weight_bits=8", "weight_bits 8"),
        ("small-model:model=x,reads=int8", "reads 'int8' should be text or window"),
        ("small-model:model=x,reads=window,window=0", "window 0 should be at least 1"),
        ("small-model:model=x,reads=window,sinks=-1", "sinks -1 should be at least 0"),
        ("small-model:model=x,window=8", "are for reads=window"),
        ("prompt-lookup:shortest=0", "shortest 0 should be at least 1"),
        ("prompt-lookup:longest=2,shortest=3", "longest 2 should be at least shortest, 3"),
        ("combine", "combine takes two drafts"),
        ("combine:quantspec", "combine takes two drafts"),
        ("combine:quantspec+sparse+prompt-lookup", "combine takes two drafts"),
        ("combine:quantspec+magic", "'magic' should be one of"),
        ("combine:quantspec+", "'' should be one of"),
        ("combine:quantspec+none", "none proposes nothing"),
        ("combine:(quantspec+sparse", "parentheses should be in pairs"),
        ("combine:quantspec)+(sparse", "parentheses should be in pairs"),
        ("combine:quantspec+(combine:sparse)", "'combine:sparse': combine takes two drafts"),
        ("combine:quantspec+(sparse:budget=2.5)", "budget 2.5"),
        ("streaming-llm:budget=0", "budget 0 should be a share of the prompt"),
        ("streaming-llm:budget=-5", "budget -5"),
        ("streaming-llm:budget=1.5", "budget 1.5"),
        ("streaming-llm:budget=nan", "budget nan"),
        ("streaming-llm:budget=inf", "budget inf"),
        ("streaming-llm:budget=16", "more than the 16 sinks"),
        ("streaming-llm:sinks=-1", "sinks -1"),
        ("streaming-llm:positions=new", "'new' should be window or kept"),
        ("streaming-llm:cache=bf16", "'bf16' should be full or int8"),
        ("streaming-llm:weight_bits=8", "weight_bits 8"),
        ("snapkv:budget=32", "more than the 32 last tokens"),
        ("snapkv:budget=1", "budget 1 should"),
        ("snapkv:generated=0", "generated 0"),
        ("snapkv:sinks=4", "'sinks=4'"),
        ("retrieval:budget=47", "more than the 47 recent tokens and those of the first chunk"),
        ("retrieval:chunk=0", "chunk 0"),
        ("retrieval:rebuild=-1", "rebuild -1"),
        ("retrieval:generated=0", "generated 0"),
        ("retrieval:least_accepted=1", "least_accepted 1"),
        ("triforce", "triforce:model=DIR"),
        ("triforce:model=no/such", "no/such: no such directory"),
        ("triforce:model=x,gamma1=0", "gamma1 0 should be auto, or a whole number from 1 to 15"),
        ("triforce:model=x,gamma1=16", "gamma1 16 should be auto, or a whole number from 1 to 15"),
        ("triforce:model=x,window=0", "window 0 should be at least 1"),
        ("triforce:model=x,middle=none", "middle: none proposes nothing; name a draft"),
        ("triforce:model=x,middle=magic", "'magic' should be one of"),
        ("triforce:model=x,middle=(sparse:budget=2.5,newest=0.5)", "budget 2.5"),
        ("triforce:model=x,middle=(sparse:budget=0.5,newest=0.5", "its parentheses should be in pairs"),
        ("triforce:model=x,middle=(sparse:budget=0.5))", "middle: the parentheses should be in pairs"),
        ("triforce:model=x,middle=()", "triforce:model=x,middle=.*: middle: draft '' should be one of"),
        ("triforce:model=x,middle=retrieval:budget=64,chunk=2", "commas in a value need parentheses, as in middle="),
    ],
)
def test_texts_that_choose_none(text, words, model):
    with pytest.raises(InputError, match=words) as error:
        make_draft(text, model)
    assert "\n" not in str(error.value)


def test_a_draft_without_int4_weights_has_nothing_to_calibrate(model, caplog, monkeypatch):
    monkeypatch.setattr(registry, "int4_model", lambda model, **_: model)
    for text, warned in (("prompt-lookup", True), ("quantspec:weight_bits=16", True), ("quantspec", False)):
        caplog.clear()
        make_draft(text, model, calibration=[[1, 2, 3]])
        words = [f"nothing is calibrated: draft {text.partition(':')[0]} has no INT4 weights of the target"]
        assert [record.getMessage() for record in caplog.records] == (words if warned else [])
    caplog.clear()
    make_draft("prompt-lookup", model)
    assert not caplog.records


@pytest.mark.parametrize("text", [SPARSE, "exact-topk", "h2o", "chunk-means:dense_layers=0"])
def test_drafts_that_choose_groups_need_the_int8_cache(model, text):
    with pytest.raises(InputError, match=r"^draft \w+Draft reads groups of the int8 cache; compatible caches: int8; "):
        generate(
            model,
            random_prompts([9]),
            config=with_draft(dataclasses.replace(CONFIG, draft="quantspec", cache="full"), make_draft(text, model)),
        )
    with pytest.raises(
        InputError, match=f"^draft {text} reads groups of the int8 cache; compatible caches: int8; compatible drafts for cache full"
    ):
        dataclasses.replace(CONFIG, draft=text, cache="full")


@pytest.mark.system
def test_drafts_that_keep_the_prompt_are_replaced_in_a_batch(model):
    """Prompts of several buckets, whose tokens are the draft's state; it proposes the token that came last before the same one."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Remembering(Draft):
        def begin(self, prompt):
            return prompt.tokens, prompt.n

        def propose(self, state, cache, current):
            tokens, n = state
            same = (tokens == current.pending[:, None]) & (jnp.arange(tokens.shape[1]) < n[:, None] - 1)
            at = jnp.where(same, jnp.arange(tokens.shape[1]), 0).max(1)[:, None] + jnp.arange(1, current.gamma + 1)
            found = jnp.take_along_axis(tokens, jnp.minimum(at, tokens.shape[1] - 1), 1)
            return Proposal(found, current.certain(found, 64), current.eligible), state, cache

    prompts = random_prompts([70, 3, 150, 20])
    requests = [Request(prompt, CONFIG, key) for prompt, key in zip(prompts, prompt_keys(jax.random.key(0), 4))]
    found = {result.index: result.token_ids for result in run_batch(model, with_draft(requests, Remembering()), batch_size=2)}
    target = dataclasses.replace(CONFIG, draft="none", cache="int8")
    assert [found[i] for i in range(4)] == run_rounds(model, prompts, target).tokens


def test_a_draft_gets_the_last_real_queries(model):
    """The prompts are ragged, and one is shorter than what is asked for; in float64."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Asking(Draft):
        prompt_queries = 5

        def begin(self, prompt):
            return prompt.queries

        def propose(self, state, cache, current):
            raise AssertionError("no round is run here")

    prompts = random_prompts([3, 70, 64])
    engine = Engine(model, Asking(), cache=CONFIG.cache_config, gamma=1, prompt_tokens=70, max_new_tokens=4)
    state = engine.prefill(prompts, make_sampler(CONFIG), prompt_keys(jax.random.key(0), 3), make_limits(model, *[CONFIG] * 3))
    queries = state.draft
    for row, prompt in enumerate(prompts):
        tokens, _ = padded([prompt])
        angles = model.angles(jnp.arange(tokens.shape[1])[None], jnp.full(tokens.shape, len(prompt)))
        q, _, _ = model.layers[0].before_attention(model.embed(tokens), *model.layers[0].angles_of(angles))
        expected = np.asarray(q[0, max(0, len(prompt) - 5) : len(prompt)])
        found = np.asarray(queries[0][row])
        np.testing.assert_allclose(found[5 - len(expected) :], expected, atol=1e-12)
        assert (found[: 5 - len(expected)] == 0).all()


@pytest.mark.system
@pytest.mark.parametrize("text", ["cascade:first=quantspec,middle=(sparse:budget=0.3)", "combine:quantspec+sparse"])
def test_two_drafts_with_a_head_in_int8_each_run_on_a_cpu(text):
    """Where no head is made for the loop."""
    model = random_model(jnp.bfloat16, num_hidden_layers=1)
    config = GenerationConfig(draft=text, group_size=8, ignore_eos=True, max_new_tokens=12)
    assert len(generate(model, [[1, 2, 3] * 9], config=config).token_ids[0]) == 12
