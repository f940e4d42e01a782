"""Tests of several devices, which run in a process of their own with simulated ones where there are too few."""

import os
import subprocess
import sys

import jax


def devices(request, count: int) -> list[jax.Device] | None:
    """So many devices. None: the test that asks has run in another process, passed there, and is over here."""
    if len(jax.devices()) >= count:
        return jax.devices()[:count]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{request.path}::{request.node.name}"]
    done = subprocess.run(
        command, env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    return None
