"""Several processes, on one machine or many, that run the same program on all their devices together: `qspec ... --distributed`.

Every process makes the same calls in the same order, for each of them runs a part of every compiled program. What only one of them knows is
told to the others here, and an error of one ends all: who is left alone would wait.
"""

import json
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from qspec_jax.errors import InputError, one_line

T = TypeVar("T")

PATIENCE_S = 300  # until all processes should have found each other
ADDRESS, PROCESSES, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def join() -> None:
    """Meets the other processes, before JAX is asked for its devices. Raises InputError where there are none to be found.

    Slurm, Open MPI and Kubernetes say who they are; so do, for others, the environment variables `ADDRESS` (of the first process, with a
    port), `PROCESSES` (how many there are) and `NUMBER` (which of them this is, from 0). Of all but the first only errors are logged.
    """
    by_hand = {name: os.environ[name] for name in (ADDRESS, PROCESSES, NUMBER) if name in os.environ}
    if by_hand and len(by_hand) < 3:
        lacking = ", ".join(name for name in (ADDRESS, PROCESSES, NUMBER) if name not in by_hand)
        raise InputError(f"--distributed: {', '.join(by_hand)} is set, and {lacking} is not; they go together")
    settings: dict[str, Any] = {"initialization_timeout": PATIENCE_S}
    if by_hand:
        settings |= dict(coordinator_address=by_hand[ADDRESS], num_processes=_number(PROCESSES, 1), process_id=_number(NUMBER, 0))
        if settings["process_id"] >= settings["num_processes"]:
            raise InputError(f"--distributed: {NUMBER} {by_hand[NUMBER]} should be less than {PROCESSES}, {by_hand[PROCESSES]}")
    try:
        jax.distributed.initialize(**settings)
    except ValueError:  # nothing says who is there
        names = f"{ADDRESS}, {PROCESSES} and {NUMBER}"
        raise InputError(
            f"--distributed: neither Slurm nor Open MPI nor Kubernetes has started this process; {names} say where others are"
        ) from None
    except RuntimeError as error:
        raise InputError(f"--distributed: the processes have not found each other ({one_line(error)})") from None
    if not is_first():
        logging.getLogger().setLevel(logging.ERROR)


def _number(name: str, least: int) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise InputError(f"--distributed: {name} {text!r} should be a whole number, at least {least}")
    return int(text)


def _processes() -> int:
    """How many there are; asking JAX for it would make it look for devices."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def is_first() -> bool:
    """Whether this process is the one that writes; it is where there is no other."""
    return _processes() == 1 or jax.process_index() == 0


def together(make: Callable[[], T]) -> T:
    """What each process makes for itself. Raises InputError in all of them where it is raised in one."""
    if _processes() == 1:
        return make()
    made, failed = None, None
    try:
        made = make()
    except InputError as error:
        failed = error
    others = np.flatnonzero(multihost_utils.process_allgather(np.int32(failed is not None)))
    if failed is not None:
        raise failed
    if len(others):
        raise InputError(f"--distributed: process {others[0]} has failed, and says why")
    return made


def from_first(value: Any) -> Any:
    """A value of the first process, of what JSON knows, in all processes."""
    if _processes() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.zeros(size, np.uint8)
    padded[: len(text[:size])] = text[:size]
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))))
