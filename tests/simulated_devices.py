"""Processes that simulate several devices, and tests of several devices.

Where there are too few these are skipped, and one test of the module runs all of them in a process of its own that simulates the devices:
to start one takes as long as such a test.
"""

import os
import subprocess
import sys

import jax
import pytest


def devices(request: pytest.FixtureRequest, count: int) -> list[jax.Device]:
    """So many devices; skips the test that asks, where there are too few."""
    assert request.node.get_closest_marker("several_devices"), "without the mark nothing would ever run this test"
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices: the module's test_with_simulated_devices runs it where they are simulated")
    return jax.devices()[:count]


def environment(count: int) -> dict[str, str]:
    """The environment of a process that simulates this number of devices, and compiles as this one."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def run_those_of(request: pytest.FixtureRequest, count: int) -> None:
    """Runs the module's tests with the mark `several_devices` in a process with this number of devices, unless there are as many here."""
    if len(jax.devices()) >= count:
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "several_devices", "--durations=5", str(request.path)]
    done = subprocess.run(command, env=environment(count), capture_output=True, text=True, timeout=540)
    print(done.stdout)  # which pytest shows where this fails
    summary = done.stdout.rstrip().splitlines()[-1]
    assert done.returncode == 0 and " passed" in summary and "skipped" not in summary, summary
