"""What is taken of generation_config.json is what transformers' `generate` takes: the table below is what its processors were there."""

import json

import pytest

from qspec_jax.checkpoints.generation_defaults import generation_defaults, stored_defaults
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.errors import InputError

GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
SAMPLED = GREEDY | {"temperature": 1.0, "top_k": 50}


def written(directory, values):
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize(
    ("values", "taken"),
    [
        ({}, GREEDY),
        ({"do_sample": None, "temperature": 0.8}, GREEDY),
        ({"do_sample": False, "temperature": 0.0, "top_p": 0.0}, GREEDY),
        ({"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}, GREEDY | {"repetition_penalty": 1.05}),
        ({"do_sample": True}, SAMPLED),
        ({"do_sample": True, "top_k": None, "temperature": 2}, SAMPLED | {"temperature": 2.0}),
        ({"do_sample": True, "top_k": 0}, SAMPLED | {"top_k": 0}),
        ({"do_sample": True, "top_k": -1, "min_p": 0.05}, SAMPLED | {"top_k": 0, "min_p": 0.05}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 7, "top_p": 0.95, "repetition_penalty": 1.1},
            {"temperature": 0.6, "top_k": 7, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.1},
        ),
    ],
)
def test_a_checkpoints_own(tmp_path, values, taken):
    found = generation_defaults(written(tmp_path, values))
    assert found == taken
    GenerationConfig(**found)


def test_no_file_is_greedy(tmp_path):
    assert generation_defaults(tmp_path) == GREEDY


@pytest.mark.parametrize(
    ("values", "said", "taken"),
    [
        ({"do_sample": True, "temperature": 0.6}, {"do_sample": False}, GREEDY),
        ({"top_p": 0.9}, {"do_sample": True}, SAMPLED | {"top_p": 0.9}),
        (
            {"do_sample": True, "top_p": 0.9, "top_k": 5},
            {"temperature": 0.3, "top_k": 9},
            SAMPLED | {"temperature": 0.3, "top_p": 0.9, "top_k": 9},
        ),
        (
            {"do_sample": True, "top_k": 5, "min_p": 0.2, "repetition_penalty": 1.3},
            dict.fromkeys(("top_k", "min_p", "repetition_penalty")),
            SAMPLED | {"top_k": 0},
        ),
        ({"do_sample": True, "temperature": "hot"}, {"temperature": 0.5}, SAMPLED | {"temperature": 0.5}),
    ],
)
def test_what_the_caller_says_goes_first(tmp_path, values, said, taken):
    assert stored_defaults(written(tmp_path, values)).with_said(said) == taken


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"do_sample": "yes"}, "do_sample 'yes' should be true or false"),
        ({"do_sample": 1}, "do_sample 1 should be true or false"),
        ({"do_sample": True, "temperature": 0.0}, "temperature 0.0 should be a number above 0"),
        ({"do_sample": True, "temperature": "0.7"}, "temperature '0.7' should be a number"),
        ({"do_sample": True, "temperature": True}, "temperature True should be a number"),
        ({"do_sample": True, "top_k": 2.5}, "top_k 2.5 should be a whole number"),
        ({"do_sample": True, "top_k": 2**31}, "top_k 2147483648 should be a whole number"),
        ({"do_sample": True, "top_p": 1.5}, "top_p 1.5 should be a number above 0 and at most 1"),
        ({"do_sample": True, "min_p": [0.1]}, r"min_p \[0.1\] should be a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty 0 should be a number from 0.01 to 100"),
        ({"do_sample": True, "top_p": float("nan")}, "top_p nan should be"),
    ],
)
def test_values_that_are_refused(tmp_path, values, words):
    with pytest.raises(InputError, match=f"generation_config.json: {words}"):
        generation_defaults(written(tmp_path, values))
    with pytest.raises(InputError, match=f"^{words}"):
        stored_defaults(tmp_path / "..").with_said(values)


def test_what_is_not_taken_is_named(tmp_path, caplog):
    stored_defaults(written(tmp_path, {"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "eos_token_id": 2, "max_length": 9}))
    assert not caplog.records
    stored_defaults(written(tmp_path, {"num_beams": 4, "no_repeat_ngram_size": 3}))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "num_beams, no_repeat_ngram_size are not taken: qspec has no such setting"
    ]
