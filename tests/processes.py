"""Processes to be killed, from a server that has imported what they need."""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path


def context() -> BaseContext:
    made = multiprocessing.get_context("forkserver")
    # What is installed: Python 3.11's server does not find the tests' own modules.
    made.set_forkserver_preload(["pytest", "convert", "qspec_jax.decoding.generate", "orbax.checkpoint.v1", "tensorstore"])
    return made


def command_line(arguments: Sequence, out: Path | None, err: Path | None) -> BaseProcess:
    """`qspec` as a process of its own, at work. out, err: where its streams go; None closes them."""
    process = context().Process(target=_command_line, args=([str(a) for a in arguments], out, err))
    process.start()
    return process


def _command_line(arguments: list[str], out: Path | None, err: Path | None) -> None:
    from qspec_jax.cli import main

    files = [path and path.open("a") for path in (out, err)]
    for number, name, file in zip((1, 2), ("stdout", "stderr"), files):
        if file:
            os.dup2(file.fileno(), number)
        else:
            os.close(number)
        setattr(sys, name, file and os.fdopen(number, "w", closefd=False))
    sys.argv = ["qspec", *arguments]
    main()
