"""The cases of a test that `make test` leaves to `make test-system`."""

import pytest


def in_system(*cases) -> list:
    """Cases for `pytest.mark.parametrize` with the mark `system`; a case of several parameters is a tuple."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.system) for case in cases]
