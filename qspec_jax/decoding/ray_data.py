"""Batches over many machines with Ray Data: a predictor for `map_batches`, and the lines of a file through actors that hold it.

Ray starts an actor that has died again and gives it the same lines. A line's result depends on the line alone, so nothing is lost, and
nothing comes out twice. Needs the extra `ray`.
"""

import dataclasses
import json
import logging
import math
import os
import re
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from qspec_jax.checkpoints.loading import load_model
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.journal import kept
from qspec_jax.decoding.jsonl import KEYS, OPENAI_KEYS, Columns, Line, LineReader, as_line, as_wrong, error_of, is_whole
from qspec_jax.decoding.prepare import ROWS_OF_AUTO, completed
from qspec_jax.decoding.resolve import resolve_draft
from qspec_jax.decoding.results import Result
from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.registry import make_draft
from qspec_jax.errors import InputError, one_line
from qspec_jax.files import to_json

ANSWER_S = 10  # until a cluster should have answered
LOCAL = "local"  # as an address: a cluster of this machine alone, which ends with the process
# Once actors have died so often, all together, the run ends: Ray itself would start them again for ever, as where memory is too small.
RESTARTS = 16
BATCHES = 8  # whose lines an actor is given at a time, so that slots are seldom empty at their end
# Columns. REQUEST: the JSON of a line instead of a column for each key; a name that no data set has.
LINE, REQUEST, RESULT = "line", "qspec: request", "result"
KNOWN = {*KEYS, *OPENAI_KEYS}  # of a line


class Predictor:
    """Continues prompts, for `ray.data.Dataset.map_batches`; an actor loads the checkpoint once.

    A row has the columns that a line of `qspec batch` has keys (`prompt`, `max_new_tokens`, ...; None is left out, within objects too), and
    perhaps `line`, its number from 1. Sampled rows need `seed` or `line`, for their draws must not depend on what they are handed over
    with. What comes out has `line`, `text`, `finish_reason`, `error` (None, or what is wrong with the row), `result`, the JSON that `qspec
    batch` writes, and the columns that are passed through; of several samples `text` and `finish_reason` are the first one's. Raises
    InputError as `load_model` and `make_draft` do.

    Args:
        directory: of the checkpoint, at the same place on every machine.
        config: what a row does not say; its draft "auto" becomes one for all rows, whatever their lengths: none on a CPU, and else the one
            for devices without stored costs.
        batch_size: rows decoded at a time; None: those that fit.
        dtype: to load as; as stored, if None.
        seed: of sampled rows without one of their own.
        ignore_columns: whether columns that are no keys of a line are left out. Otherwise a row that has one is wrong.
        pass_columns: columns that come out as they are.
    """

    def __init__(
        self,
        directory: str,
        config: GenerationConfig | None = None,
        *,
        batch_size: int | None = 8,
        dtype: str | None = None,
        seed: int = 0,
        ignore_columns: bool = False,
        pass_columns: Sequence[str] = (),
    ):
        if dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        columns = Columns(ignore_columns, tuple(pass_columns))
        self.batch_size, self.pass_columns, self.ignores = batch_size, columns.passed, ignore_columns
        self.model, self.tokenizer = load_model(directory, dtype=dtype, progress=False), load_tokenizer(directory)
        # By model, settings and device alone: a row's result must not depend on the rows that it is handed over with.
        (config,) = resolve_draft(self.model, [config or GenerationConfig()], None, batch=batch_size or ROWS_OF_AUTO)
        if config.has_drafts:
            config = dataclasses.replace(config, draft=make_draft(config.draft, self.model).with_choice(_refuse_choice))
        self.reader = LineReader(self.model, self.tokenizer, config, seed, columns)

    def __call__(self, rows: Mapping[str, np.ndarray]) -> dict[str, Any]:
        columns = {name: _whole_again(list(map(_plain, values))) for name, values in rows.items()}
        lines = [self._line(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        outputs: list[dict[str, Any] | None] = [as_wrong(line) if line.error else None for line in lines]
        todo = [i for i, line in enumerate(lines) if not line.error]
        results: list[dict[int, Result]] = [{} for _ in lines]
        if todo:
            owners = [i for i in todo for _ in range(lines[i].samples)]
            requests = [request for i in todo for request in lines[i].requests(shared=True)]
            at_once = self.batch_size or ROWS_OF_AUTO
            prepared = completed(self.model, requests, tokenizer=self.tokenizer, batch_size=at_once)
            for result in run_batch(self.model, prepared, batch_size=self.batch_size):
                results[owners[result.index]][result.index] = result
            for i in todo:
                outputs[i] = as_line(lines[i], [results[i][index] for index in sorted(results[i])], self.tokenizer)
        first = [found[min(found)] if found else None for found in results]
        found = {
            LINE: [line.number for line in lines],
            "text": [result and result.text for result in first],
            "finish_reason": [result and result.finish_reason for result in first],
            "error": [error_of(output) for output in outputs],
            RESULT: list(map(to_json, outputs)),
        }
        return found | {name: rows[name] for name in self.pass_columns if name in rows}

    def _line(self, row: dict[str, Any]) -> Line:
        number, said = row.pop(LINE, None), row.pop(REQUEST, None)
        if number is not None and not (is_whole(number) and number > 0):
            return Line(None, error=f"line should be a whole number from 1, not {number!r:.40}")
        number = None if number is None else int(number)
        if said is None:
            kept = (name for name, value in row.items() if value is not None and (name in KNOWN | {*self.pass_columns} or not self.ignores))
            try:
                said = json.dumps({name: row[name] if name in KNOWN else _in_json(row[name]) for name in kept}, allow_nan=False)
            except (TypeError, ValueError) as error:  # of values that JSON has no form for, such as bytes, times and infinities
                return Line(number, error=f"a column cannot be read ({one_line(error)})")
        return self.reader.read(number, said.encode())


def _in_json(value: Any) -> Any:
    """The value of a column that no request reads; its text where JSON has no form for it, such as bytes and times."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


def _refuse_choice(_: Draft) -> NoReturn:
    raise InputError("draft skip=auto chooses layers by the rows of a block; name a draft and its layers")


class _StartCounter:
    """An actor that counts how often predictors were started."""

    def __init__(self):
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count


class _CountedPredictor(Predictor):
    """A predictor that fails once more than `most` have been started."""

    def __init__(self, starts: Any, most: int, *settings: Any, **more: Any):
        import ray

        if ray.get(starts.add.remote()) > most:
            raise InputError(f"actors died {RESTARTS} times; `ray logs` says of what, and often it is too little memory")
        super().__init__(*settings, **more)


def _plain(value: Any) -> Any:
    """A value of a column in plain Python. Ray has None in objects where other rows have a value, and NaN where a number is missing."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _whole_again(values: list[Any]) -> list[Any]:
    """Values of a column, or of a key of its objects, with whole numbers that are floats only because the value is missing elsewhere."""
    if keys := dict.fromkeys(key for value in values if isinstance(value, dict) for key in value):
        parts = {key: _whole_again([value.get(key) if isinstance(value, dict) else None for value in values]) for key in keys}
        return [{key: parts[key][i] for key in value} if isinstance(value, dict) else value for i, value in enumerate(values)]
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values) and all(isinstance(number, float) and number.is_integer() for number in numbers):
        return [None if value is None else int(value) for value in values]
    return values


def connect(address: str) -> None:
    """Connects this process to a Ray cluster, before JAX starts in it: Ray forks, which processes with threads should not.

    address: of the cluster, `auto` for the one that runs here, or `LOCAL`. Raises InputError where there is no Ray or no cluster.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise InputError('--ray needs Ray: pip install "qspec-jax[ray]"') from None
    here = None if address == LOCAL else address
    if here is not None and here != "auto":
        _check_that_something_answers(here)
    # Actors import this package: from where it is here if Ray starts on this machine; on the machines of a cluster it is installed.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    environment = {"env_vars": {"PYTHONPATH": path}} if here is None else None
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(here, include_dashboard=None if here else False, log_to_driver=False, logging_level="ERROR", runtime_env=environment)
    except (ConnectionError, ImportError, ValueError, RuntimeError, TimeoutError, ray.exceptions.RayError) as error:
        raise InputError(f"--ray {address}: no cluster can be used there ({one_line(error)})") from None
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # for which Ray has a handler of its own, which would not say how a run goes on


def _check_that_something_answers(address: str) -> None:
    """Raises InputError where nothing does: Ray would try for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not (host and colon and port.isascii() and port.isdecimal() and 1 <= int(port) < 1 << 16):
        raise InputError(f"--ray {address} should be {LOCAL}, auto, or a host, a colon and a port, such as node0:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise InputError(f"--ray {address}: nothing answers there ({one_line(error)})") from None


def cluster_gpus() -> int:
    """The number of GPUs of the cluster that `connect` found; actors run on these alone if there are any."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def through_actors(
    lines: Sequence[tuple[int, str]],
    directory: Path,
    config: GenerationConfig,
    *,
    batch_size: int | None,
    actors: int | None,
    dtype: str | None,
    seed: int,
    columns: Columns,
) -> Iterator[dict[str, Any]]:
    """Results of lines on the cluster that `connect` found, which is left at the end: as a `Journal` takes them, in any order.

    Raises InputError for what fails on the cluster.

    Args:
        lines: their numbers and JSON.
        directory: of the checkpoint.
        config: what a line does not say.
        batch_size: rows that an actor decodes at a time; None: those that fit.
        actors: how many; None: one for each GPU of the cluster, or one where it has none.
        dtype: to load as; as stored, if None.
        seed: the run's.
        columns: what becomes of keys that are unknown.
    """
    import ray
    import ray.data
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        gpus = cluster_gpus()
        actors = actors or gpus or 1
        block = max(1, min(BATCHES * (batch_size or 64), math.ceil(len(lines) / actors)))
        # Beside this process, with which it ends: another node's death would take the count with it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        counter = ray.remote(num_cpus=0, scheduling_strategy=here)(_StartCounter).remote()
        items = [{LINE: number, REQUEST: said} for number, said in lines]
        found = ray.data.from_items(items, override_num_blocks=math.ceil(len(items) / block)).map_batches(
            _CountedPredictor,
            fn_constructor_args=(counter, actors + RESTARTS, str(directory), config),
            fn_constructor_kwargs=dict(
                batch_size=batch_size, dtype=dtype, seed=seed, ignore_columns=columns.ignore, pass_columns=columns.passed
            ),
            batch_size=None,  # a block at a time: other sizes would join blocks, for fewer actors
            compute=ray.data.ActorPoolStrategy(size=actors),
            num_gpus=1 if gpus else 0,
        )
        for row in found.iter_rows():
            yield kept(row[LINE], json.loads(row[RESULT]))
    except ray.exceptions.RayError as error:
        raise InputError(f"--ray: {_cause(error)}") from None
    finally:
        ray.shutdown()


def _cause(error: Exception) -> str:
    """The message for an error on the cluster: that of an InputError, if there is one."""
    text = str(error)
    own = re.findall(r"InputError: (.*)", text)
    return own[-1] if own else one_line(error)
