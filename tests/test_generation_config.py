"""GenerationConfig: values, drafts and caches that are accepted or refused."""

import dataclasses

import pytest

from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.errors import InputError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_speculative_tokens", -1),
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", NAN),
        ("top_k", -1),
        ("max_new_tokens", 0),
        ("draft", "medusa"),
        ("cache", "int4"),
    ],
)
def test_generation_values_refused(name, value):
    with pytest.raises(InputError) as error:
        GenerationConfig(**{name: value})
    assert name in str(error.value) and str(value) in str(error.value) and "\n" not in str(error.value)


def test_generation_limits_accepted():
    config = GenerationConfig(draft="quantspec", num_speculative_tokens=0, temperature=0, top_p=1, top_k=0, max_new_tokens=1)
    assert dataclasses.replace(config, top_p=1e-6).top_p == 1e-6


WITHOUT_GROUPS, WITHOUT_TOKENS = ("full", "full:host=all", "kivi"), ("h2o:heavy=3", "streaming-llm")


@pytest.mark.parametrize(
    ("draft", "refused"),
    [
        *(
            (draft, ())
            for draft in ("none", "auto", "quantspec", "small-model:model=x", "prompt-lookup", "combine:prompt-lookup+quantspec")
        ),
        *((draft, WITHOUT_GROUPS + WITHOUT_TOKENS) for draft in ("sparse:budget=0.1", "h2o", "exact-topk", "chunk-means")),
        *((draft, WITHOUT_TOKENS) for draft in ("snapkv", "retrieval", "streaming-llm", "triforce:model=x")),
        ("triforce:model=x,middle=quantspec", ()),
        ("triforce:model=x,middle=sparse", WITHOUT_GROUPS + WITHOUT_TOKENS),
        ("combine:snapkv+(combine:prompt-lookup+sparse)", WITHOUT_GROUPS + WITHOUT_TOKENS),
        ("combine:prompt-lookup+snapkv", WITHOUT_TOKENS),
    ],
)
def test_a_draft_and_a_cache_that_are_not_compatible(draft, refused):
    for cache in ("int8", "int8:host=lower", "int8:host=all", *WITHOUT_GROUPS, *WITHOUT_TOKENS):
        if cache not in refused:
            GenerationConfig(draft=draft, cache=cache)
            continue
        with pytest.raises(InputError) as error:
            GenerationConfig(draft=draft, cache=cache)
        words = str(error.value)
        assert words.startswith(f"draft {draft} ") and f"; compatible drafts for cache {cache}: quantspec, " in words and "\n" not in words
        assert ("compatible caches: int8" in words) == (cache in WITHOUT_GROUPS or "groups" in words)
        assert GenerationConfig(draft=draft, cache=cache, num_speculative_tokens=0).cache == cache  # which never asks the draft


def test_an_empty_cache_is_none():
    for draft in ("none", "quantspec", "auto"):
        with pytest.raises(InputError, match=r"^cache '' should be one of full, "):
            GenerationConfig(draft=draft, cache="")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int8:lower=host", "cache 'int8:lower=host': 'lower=host' should be one of host=none|lower|all, resident=..."),
        ("int8:host", "'host' should be one of host=none|lower|all, resident=..."),
        ("full:host", "'host' should be one of host=none|all, resident=..."),
        ("full:host=lower", "cache host 'lower' should be none or all"),
        ("int8:resident=0.5", "cache resident 0.5 is for a cache with a part in host memory: give host too"),
    ],
)
def test_the_part_in_host_memory(text, words):
    with pytest.raises(InputError) as error:
        CacheConfig.parse(text)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("draft", "cache", "kind"),
    [
        ("quantspec", None, "int8"),
        ("quantspec", "full", "full"),
        ("none", None, "full"),
        ("none", "int8", "int8"),
    ],
)
def test_cache_of_a_draft(draft, cache, kind):
    config = GenerationConfig(draft=draft, cache=cache, group_size=16, scheme="paper")
    assert config.cache_config == CacheConfig(kind, 16, "paper")


@pytest.mark.parametrize(("size", "head_dim", "expected"), [(None, 64, 64), (None, 256, 128), (32, 128, 32), (256, 64, 256)])
def test_group_size(size, head_dim, expected):
    assert CacheConfig(group_size=size).group_size_for(head_dim) == expected


@pytest.mark.parametrize("size", [0, 1, 33, -2, 65538])
def test_group_size_refused(size):
    with pytest.raises(InputError, match=f"group size {size} "):
        CacheConfig(group_size=size).group_size_for(128)
