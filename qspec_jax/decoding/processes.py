"""Several processes, on one machine or many, that run the same program on all their devices together: `qspec ... --distributed`.

Every process makes the same calls in the same order, for each of them runs a part of every compiled program. What only one of them knows is
sent to the others here, and so is an error of one, since the others would wait.
"""

import json
import logging
import os
import socket
import threading
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from qspec_jax.errors import InputError, one_line

T = TypeVar("T")

log = logging.getLogger(__name__)

PATIENCE_S = 300  # until all processes should have found each other
SILENCE_S = 5  # until a line says that others are waited for
ADDRESS, PROCESSES, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
STARTERS = "SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"  # one of them is set where JAX finds the processes itself


def join() -> None:
    """Finds the other processes, before JAX is asked for its devices. Raises InputError where there are none to be found.

    Slurm, Open MPI and Kubernetes tell JAX who they are; so do, for others, the environment variables `ADDRESS` (of the first process, with
    a port), `PROCESSES` (how many there are) and `NUMBER` (which of them this is, from 0). All processes but the first log errors alone.
    """
    settings = _by_hand(os.environ)
    if not settings and not any(name in os.environ for name in STARTERS):
        names = f"{ADDRESS}, {PROCESSES} and {NUMBER}"
        text = f"--distributed: neither Slurm nor Open MPI nor Kubernetes has started this process; set {names}, which say where others are"
        raise InputError(text)
    if not settings and len(visible := os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1 and visible[0]:
        settings["local_device_ids"] = [0]  # JAX would take the number of the process on its machine, and find no such device
    if settings.get("process_id") == 0:
        _check_free(settings["coordinator_address"])
    jax.config.update("jax_enable_preemption_service", False)  # which would catch SIGTERM, and let the process go on
    failed: list[BaseException] = []

    def initialize() -> None:
        try:
            # Longer than the patience here: XLA, whose patience is at an end, ends the process.
            jax.distributed.initialize(**settings, initialization_timeout=2 * PATIENCE_S)
        except BaseException as error:
            failed.append(error)

    # In a thread, for it waits where no signal reaches Python.
    thread = threading.Thread(target=initialize, daemon=True)
    thread.start()
    thread.join(SILENCE_S)
    if thread.is_alive():
        by_way = "" if "coordinator_address" not in settings else f" by way of {settings['coordinator_address']}"
        log.warning("--distributed: waits for all processes%s, for up to %d s", by_way, PATIENCE_S)
    for _ in range(PATIENCE_S):
        thread.join(1)
        if not thread.is_alive():
            break
    else:
        raise InputError(f"--distributed: not all processes have come within {PATIENCE_S} s")
    if failed:
        raise InputError(f"--distributed: the processes have not found each other ({one_line(failed[0])})")
    if not is_first():
        root = logging.getLogger()
        for each in (root, *root.handlers):  # a module's logger may have a level of its own, which root's is not asked for
            each.setLevel(logging.ERROR)


def check_alike(options: str) -> None:
    """Raises InputError in all processes where they have not been given the same options: their calls would not go together."""
    of_all = multihost_utils.process_allgather(np.uint32(zlib.crc32(options.encode())))
    if len(others := np.flatnonzero(of_all != of_all[0])):
        raise InputError(f"--distributed: process {others[0]} has been given other options than process 0; all should have the same")


def _by_hand(environment: Mapping[str, str]) -> dict[str, Any]:
    """What the three variables say, for `jax.distributed.initialize`. Raises InputError where they say nothing that could be."""
    given = {name: environment[name] for name in (ADDRESS, PROCESSES, NUMBER) if name in environment}
    if not given or (list(given) == [ADDRESS] and any(name in environment for name in STARTERS)):
        return {}
    if lacking := [name for name in (ADDRESS, PROCESSES, NUMBER) if name not in given]:
        raise InputError(f"--distributed: {' and '.join(given)} set, but not {' and '.join(lacking)}; the three go together")
    host, colon, port = given[ADDRESS].rpartition(":")
    if not (host and colon and _is_number(port) and 1 <= int(port) < 1 << 16):
        raise InputError(f"--distributed: {ADDRESS} {given[ADDRESS]!r} should be a host, a colon and a port, such as node0:1234")
    for name, least in ((PROCESSES, 1), (NUMBER, 0)):
        if not (_is_number(given[name]) and int(given[name]) >= least):
            raise InputError(f"--distributed: {name} {given[name]!r} should be a whole number, at least {least}")
    if int(given[NUMBER]) >= int(given[PROCESSES]):
        raise InputError(f"--distributed: {NUMBER} {given[NUMBER]} should be less than {PROCESSES}, {given[PROCESSES]}")
    return dict(coordinator_address=given[ADDRESS], num_processes=int(given[PROCESSES]), process_id=int(given[NUMBER]))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _check_free(address: str) -> None:
    """Raises InputError where the first process could not listen at this port; XLA would end it with a trace."""
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise InputError(f"--distributed: {ADDRESS} {address}: port {port} cannot be used ({one_line(error)})") from None


def count() -> int:
    """How many processes there are. To ask JAX where it is one alone would make it look for devices."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def is_first() -> bool:
    """Whether this process is the one that writes; it is where there is no other."""
    return count() == 1 or jax.process_index() == 0


def all_or_none(make: Callable[[], T]) -> T:
    """What each process makes for itself. Where one raises an exception, the others raise InputError."""
    if count() == 1:
        return make()
    made, failed = None, None
    try:
        made = make()
    except Exception as error:
        failed = error
    others = np.flatnonzero(multihost_utils.process_allgather(np.int32(failed is not None)))
    if failed is not None:
        raise failed
    if len(others):
        raise InputError(f"--distributed: process {others[0]} failed; see its standard error")
    return made


def from_first(make: Callable[[], Any]) -> Any:
    """What the first process makes, of what JSON knows, in all processes. Where it raises InputError, all do."""
    value = all_or_none(lambda: make() if is_first() else None)
    if count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.zeros(size, np.uint8)
    padded[: len(text[:size])] = text[:size]
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))))
