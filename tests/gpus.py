"""Which tests need a GPU, and which of its kernels they must find able to run."""

import jax
import pytest

from pallas_kernels.dispatch import compute_capability

needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
gpu = lambda test: pytest.mark.gpu(needs_gpu(test))


def skip_or_fail(implementation: str, reason: str | None) -> None:
    """Where a kernel says why it cannot run: skips the test on machines that lack something, and fails it where the kernel should run."""
    if reason:
        here = compute_capability() == 9.0 and jax.__version_info__ >= (0, 11) and "not installed" not in reason
        (pytest.fail if here else pytest.skip)(f"{implementation} {reason}")
