"""Draft objects, samplers and states that are given to the library, and which of them do not fit."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import random_model, random_prompts, with_draft

from qspec_jax import GenerationConfig, InputError, generate, prepare, stream
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.sampling import Greedy, make_sampler, prompt_keys
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.cascade import CascadeDraft
from qspec_jax.drafts.quantspec import QuantSpecSettings
from qspec_jax.drafts.registry import parse_draft
from qspec_jax.drafts.retrieval import RetrievalSettings
from qspec_jax.drafts.sparse import SparseSettings

CONFIG = GenerationConfig(max_new_tokens=8, group_size=16, ignore_eos=True, draft="quantspec")
PROMPTS = random_prompts([20])
model_of = functools.cache(lambda **shape: random_model(jnp.float32, **{"num_hidden_layers": 1} | shape))


def made_of(text):
    """A function of a model that makes the draft of a text for it."""
    return lambda model: make_draft(text, model)


@pytest.mark.parametrize(
    "made",
    [
        made_of("quantspec"),
        made_of("sparse"),
        made_of("streaming-llm"),
        made_of("combine:prompt-lookup+quantspec"),
        lambda model: CascadeDraft(make_draft("prompt-lookup", model), make_draft("quantspec", model)),
    ],
)
@pytest.mark.parametrize(("shape", "message"), [({"num_hidden_layers": 2}, "num_layers is 2"), ({"vocab_size": 80}, "vocab_size is 80")])
def test_a_draft_of_another_model_is_refused(made, shape, message):
    draft = made(model_of(**shape))
    for call in (lambda: generate(model_of(), PROMPTS, config=with_draft(CONFIG, draft)), lambda: list(batch(draft))):
        with pytest.raises(InputError, match=f"the draft was made for a model whose {message}, and that of this model is"):
            call()


def test_a_lookup_in_another_vocabulary_is_refused():
    with pytest.raises(InputError, match="vocab_size is 48"):
        generate(model_of(), PROMPTS, config=with_draft(CONFIG, make_draft("prompt-lookup", model_of(vocab_size=48))))


def batch(made, **settings):
    config = dataclasses.replace(CONFIG, **settings)
    return run_batch(model_of(), with_draft([Request(prompt, config, jax.random.key(0)) for prompt in PROMPTS], made))


@pytest.mark.parametrize("value", [3, object(), GenerationConfig])
def test_what_is_no_draft_is_refused(value):
    with pytest.raises(InputError, match="draft should be a text or a draft, not "):
        GenerationConfig(draft=value)


def test_the_draft_itself_decides_whether_a_cache_is_compatible():
    """Its text, its settings, and the draft that is made of them are refused alike, and taken alike."""
    for text, cache in (("sparse", "full"), ("exact-topk", "kivi"), ("combine:prompt-lookup+sparse", "full")):
        for draft in (text, parse_draft(text), make_draft(text, model_of())):
            with pytest.raises(InputError, match=r"compatible caches: int8.*; compatible drafts for cache"):
                GenerationConfig(draft=draft, cache=cache)
    out = [
        generate(model_of(), PROMPTS, config=with_draft(CONFIG, d))
        for d in ("sparse", parse_draft("sparse"), make_draft("sparse", model_of()))
    ]
    assert len({str((each.token_ids, each.stats.rows)) for each in out}) == 1 and out[0].stats.num_draft_tokens


@pytest.mark.parametrize("call", [lambda **s: generate(model_of(), PROMPTS, **s), lambda **s: stream(model_of(), PROMPTS[0], **s)])
def test_draws_want_a_key(call):
    with pytest.raises(InputError, match=r"temperature 0.5 draws tokens at random, so key should be given"):
        call(config=dataclasses.replace(CONFIG, temperature=0.5))
    with pytest.raises(InputError, match="a sampler of your own draws, so key should be given"):
        call(config=CONFIG, sampler=Greedy())
    with pytest.raises(InputError, match="a sampler of your own draws, so key should be given"):
        generate(model_of(), prepare(model_of(), PROMPTS, config=CONFIG), sampler=Greedy())

    prepared = prepare(model_of(), PROMPTS, config=CONFIG)
    with pytest.raises(InputError, match="a strategy of your own draws, so `prepare` should be given a key"):
        run_batch(model_of(), prepared, strategy=lambda configs: Greedy())


def test_requests_have_settings_of_their_own():
    request = Request(PROMPTS[0], CONFIG, jax.random.key(0))
    for call in (lambda: generate(model_of(), [request], config=CONFIG), lambda: stream(model_of(), request, config=CONFIG)):
        with pytest.raises(InputError, match="a Request has settings and a key of its own: give requests to run_batch"):
            call()
    with pytest.raises(InputError, match="at least one request should be selected"):
        prepare(model_of(), [request]).select([])


def test_one_prompt_may_be_an_array_but_not_bytes():
    one = generate(model_of(), np.array(PROMPTS[0]), config=CONFIG)
    assert one.token_ids == generate(model_of(), PROMPTS, config=CONFIG).token_ids
    for prompts in (b"abc", [b"abc"]):
        with pytest.raises(InputError, match="prompt 0 should be a text or a list of token ids"):
            generate(model_of(), prompts, config=CONFIG)


def test_what_a_tokenizer_returns_is_no_list_of_prompts():
    with pytest.raises(InputError, match="not a mapping with 'input_ids', 'attention_mask'; of what a tokenizer returns, give 'input_ids'"):
        generate(model_of(), collections.UserDict(input_ids=PROMPTS, attention_mask=[[1]]), config=CONFIG)


def test_what_is_no_model_is_refused():
    for call in (lambda: generate("some/model", PROMPTS), lambda: make_draft(model_of(), "quantspec"), lambda: prepare(None, PROMPTS)):
        with pytest.raises(InputError, match="model should be what `load` or `load_model` returns, not "):
            call()


def test_filters_without_draws_are_said_to_have_no_effect(caplog):
    prepare(model_of(), PROMPTS, config=dataclasses.replace(CONFIG, top_p=0.9, top_k=5))
    assert caplog.messages == ["top_k, top_p have no effect at temperature 0, which is greedy decoding"]


class Characters:
    """A tokenizer of texts of digits."""

    def __call__(self, text, **_):
        return {"input_ids": list(map(int, text))}


def test_arrays_of_prompts_are_prompts():
    prompts = np.array([[1, 2], [3]], dtype=object)
    for several in (prompts, np.array([[1, 2], [3, 4]])):
        assert prepare(model_of(), several, config=CONFIG).prompts == list(map(list, several))
    assert prepare(model_of(), np.array(["12", "3"]), config=CONFIG, tokenizer=Characters()).prompts == [[1, 2], [3]]


@pytest.mark.parametrize("draft", ["quantspec", "quantspec:skip=(0a)"])
def test_the_identity_of_a_run_is_the_same_where_its_draft_is_made_elsewhere(draft):
    prepared = prepare(model_of(), PROMPTS, config=dataclasses.replace(CONFIG, draft=draft))
    assert prepared.draft is not None and dataclasses.replace(prepared, draft=None).identity() == prepared.identity()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda: RetrievalSettings(chunk=2.5), "draft chunk 2.5 should be a whole number"),
        (lambda: RetrievalSettings(rebuild=True), "draft rebuild True should be a whole number"),
        (lambda: QuantSpecSettings(sensitive_layers="x"), "draft sensitive_layers 'x' should be a whole number"),
        (lambda: SparseSettings(budget="0.1"), "draft budget '0.1' should be a number"),
    ],
)
def test_settings_have_their_types(settings, message):
    with pytest.raises(InputError, match=message):
        settings()


def test_what_is_prepared_is_for_its_model():
    prepared = prepare(model_of(), PROMPTS, config=CONFIG)
    for call in (generate, run_batch):
        with pytest.raises(InputError, match="were prepared for another model"):
            call(random_model(jnp.float32, num_hidden_layers=1), prepared)


def test_what_is_no_sampler_is_refused():
    with pytest.raises(InputError, match=r"sampler should have the methods of .*Sampler, and 'greedy' has not"):
        generate(model_of(), PROMPTS, config=CONFIG, sampler="greedy", key=jax.random.key(0))


def test_prompts_may_come_from_a_generator():
    assert generate(model_of(), (p for p in PROMPTS), config=CONFIG).token_ids == generate(model_of(), PROMPTS, config=CONFIG).token_ids


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LeastLikely(Greedy):
    """A strategy of one's own."""

    def choose(self, logits, keys, positions, purpose):
        return super().choose(-logits, keys, positions, purpose)

    def verify(self, logits, *more):
        return super().verify(-logits, *more)


def test_a_sampler_of_ones_own():
    settings = dict(config=dataclasses.replace(CONFIG, draft="none", cache="int8"), key=jax.random.key(0))
    own = generate(model_of(), PROMPTS, sampler=LeastLikely(), **settings)
    (pieces,) = [list(stream(model_of(), PROMPTS[0], sampler=LeastLikely(), **settings))]
    drafted = generate(model_of(), PROMPTS, sampler=LeastLikely(), config=CONFIG, key=jax.random.key(0))
    assert own.token_ids == drafted.token_ids == [[token for piece in pieces for token in piece.token_ids]]
    assert own.token_ids != generate(model_of(), PROMPTS, config=CONFIG).token_ids


@pytest.mark.parametrize("how", ["rounds", "replace", "poll"])
def test_a_state_that_was_used_up_is_refused(how):
    model, config = model_of(), dataclasses.replace(CONFIG, draft="none", cache="int8")
    engine = Engine.for_configs(model, None, [config], prompt_tokens=20)
    sampler, limits = make_sampler(config), make_limits(model, config)
    state = engine.prefill(PROMPTS, sampler, prompt_keys(jax.random.key(0), 1), limits)
    after = engine.rounds(state, sampler, limits, 1)
    calls = {
        "rounds": lambda: engine.rounds(state, sampler, limits, 1),
        "replace": lambda: engine.replace(state, after, [0]),
        "poll": lambda: engine.poll(state, [0]),
    }
    with pytest.raises(InputError, match="this state was consumed by `rounds` or `replace`"):
        calls[how]()
    assert np.asarray(engine.rounds(after, sampler, limits).emitted) == 8


def test_rows_of_stats_have_attributes():
    out = generate(model_of(), [*PROMPTS, PROMPTS[0][:5]], config=dataclasses.replace(CONFIG, draft="none", cache="int8"))
    assert [row.new_tokens for row in out.stats.rows] == [8, 8] and [row.prompt_tokens for row in out.stats.rows] == [20, 5]
    assert out.stats.num_spec_steps == sum(row.num_spec_steps for row in out.stats.rows)
