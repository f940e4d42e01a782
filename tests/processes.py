"""Processes to be killed, from a server that has imported what they need."""

import multiprocessing
from multiprocessing.context import BaseContext


def context() -> BaseContext:
    made = multiprocessing.get_context("forkserver")
    # What is installed: Python 3.11's server does not find the tests' own modules.
    made.set_forkserver_preload(["pytest", "convert", "qspec_jax.evaluate", "orbax.checkpoint.v1", "tensorstore"])
    return made
