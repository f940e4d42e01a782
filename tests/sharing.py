"""What one process of a test run has compiled is read by the others: workers of pytest, processes started with `environment()`."""

import os
import tempfile

import jax

DIRECTORY = "QSPEC_TESTS_COMPILED"  # names this run's


def begin(config) -> None:
    """Before anything is compiled. config: pytest's. Workers inherit the variable."""
    if DIRECTORY not in os.environ:
        directory = tempfile.TemporaryDirectory(prefix="qspec-tests-")
        os.environ[DIRECTORY] = directory.name
        config.add_cleanup(directory.cleanup)
        config.add_cleanup(lambda: os.environ.pop(DIRECTORY))
    for name, value in _settings().items():
        jax.config.update(name, value)


def environment() -> dict[str, str]:
    return {name.upper(): str(value) for name, value in _settings().items()}


def _settings() -> dict[str, object]:
    return {
        "jax_compilation_cache_dir": os.environ[DIRECTORY],
        "jax_compilation_cache_max_size": 1 << 34,  # never reached; with a bound, files are locked as they are written
        "jax_persistent_cache_min_compile_time_secs": 0.3,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
