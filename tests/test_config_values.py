"""Values of `GenerationConfig` in the forms that people give them, and what is refused in one sentence."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from qspec_jax import GenerationConfig, InputError


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("max_new_tokens", np.int64(5), 5),
        ("num_speculative_tokens", np.int32(3), 3),
        ("top_k", np.uint8(7), 7),
        ("top_k", None, 0),
        ("temperature", None, 0.0),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", 1, 1),
        ("temperature", jnp.float32(0.5), 0.5),
        ("top_p", None, 1.0),
        ("repetition_penalty", None, 1.0),
        ("ignore_eos", np.bool_(True), True),
        ("draft", None, GenerationConfig.draft),
        ("stop", None, ()),
        ("stop", "\n", ("\n",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("eos_token_ids", 5, (5,)),
        ("eos_token_ids", [5, np.int64(7)], (5, 7)),
        ("eos_token_ids", np.array([2, 3]), (2, 3)),
        ("eos_token_ids", None, None),
        ("stop_token_ids", 3, ((3,),)),
        ("stop_token_ids", (3,), ((3,),)),
        ("stop_token_ids", [3, [4, 5]], ((3,), (4, 5))),
        ("stop_token_ids", None, ()),
        ("banned_token_ids", 3, (3,)),
        ("banned_token_ids", None, ()),
        ("logit_bias", {np.int64(3): np.float32(1)}, {3: 1.0}),
        ("logit_bias", None, {}),
        ("group_size", np.int64(64), 64),
        ("top_logprobs", np.int64(2), 2),
    ],
)
def test_what_is_taken(name, given, kept):
    found = getattr(GenerationConfig(draft="none" if name != "draft" else given, **({} if name == "draft" else {name: given})), name)
    assert found == kept and type(found) is type(kept)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 5.0}, "max_new_tokens should be a whole number, not 5.0"),
        ({"max_new_tokens": True}, "max_new_tokens should be a whole number, not True"),
        ({"max_new_tokens": "5"}, "max_new_tokens should be a whole number, not '5'"),
        ({"top_k": 2.7}, "top_k should be a whole number, not 2.7"),
        ({"min_new_tokens": 1.5}, "min_new_tokens should be a whole number, not 1.5"),
        ({"num_speculative_tokens": 4.0}, "num_speculative_tokens should be a whole number, not 4.0"),
        ({"group_size": 2.0}, "group_size should be a whole number, not 2.0"),
        ({"top_logprobs": 2.0}, "top_logprobs should be a whole number, not 2.0"),
        ({"temperature": "hot"}, "temperature should be a number, not 'hot'"),
        ({"temperature": True}, "temperature should be a number, not True"),
        ({"top_p": [0.9]}, "top_p should be a number, not [0.9]"),
        ({"draft_cost": "low"}, "draft_cost should be a number, not 'low'"),
        ({"ignore_eos": 1}, "ignore_eos should be true or false, not 1"),
        ({"draft": 3}, "draft should be a text or a draft, not 3"),
        ({"cache": ("int8",)}, "cache should be a text, not ('int8',)"),
        ({"stop": 3}, "stop should be a text or a list of them"),
        ({"stop": ["a", 3]}, "stop should be a text or a list of them"),
        ({"eos_token_ids": 2.0}, "eos_token_ids should be a token id or a list of them, not 2.0"),
        ({"eos_token_ids": "</s>"}, "eos_token_ids should be a token id or a list of them, not '</s>'"),
        ({"banned_token_ids": [1.0]}, "banned_token_ids should be a token id or a list of them, not [1.0]"),
        ({"banned_token_ids": {3: 1}}, "banned_token_ids should be a token id or a list of them, not {3: 1}"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids should be a list of token ids and of lists of them, not ['a']"),
        ({"stop_token_ids": [[1], [[2]]]}, "stop_token_ids should be a list of token ids and of lists of them, not [[1], [[2]]]"),
        ({"logit_bias": {3.5: 1.0}}, "logit_bias should have token ids as its keys, not 3.5"),
        ({"logit_bias": {3: "much"}}, "logit_bias of token 3 should be a number, not 'much'"),
        ({"logit_bias": [3]}, "logit_bias should be a dictionary with a number for each token id, not [3]"),
    ],
)
def test_what_is_refused(settings, message):
    with pytest.raises(InputError, match=re.escape(message) + "$"):
        GenerationConfig(**settings)


def test_a_long_value_is_cut():
    with pytest.raises(InputError) as refused:
        GenerationConfig(draft=list(range(9999)))
    assert len(str(refused.value)) < 100
