"""Prompts and their new tokens, against the positions of a model."""

import pytest

from qspec_jax.decoding.requests import check_positions
from qspec_jax.errors import InputError


def test_what_to_ask_for_instead():
    for tokens, new, advice in (
        (500, 20, "at most 12 new tokens"),
        (600, 20, "at most 492 tokens"),
        (600, 512, "less than 512 new tokens"),
    ):
        with pytest.raises(InputError, match=f"512 positions; .*{advice}"):
            check_positions("model", 512, "a prompt", tokens, new)
