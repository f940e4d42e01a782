"""What reading a config.json refuses."""

import pytest

from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig


def refused(config, *named: str) -> None:
    """from_hf must refuse a config in one line that names the file and these."""
    with pytest.raises(InputError) as error:
        LlamaConfig.from_hf(config, source="some/config.json")
    message = str(error.value)
    assert message.startswith("some/config.json: ") and "\n" not in message
    assert all(name in message for name in named), message
