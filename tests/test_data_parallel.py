"""A batch on several devices: one queue of requests, and every row as on one device."""

import dataclasses
import json
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simulated_devices
from runs import with_draft

from qspec_jax.checkpoints.loading import load_model
from qspec_jax.cli import options
from qspec_jax.decoding import data_parallel
from qspec_jax.decoding.batch import Request, run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.data_parallel import copied_to, side_by_side
from qspec_jax.decoding.sampling import make_sampler
from qspec_jax.drafts.registry import make_draft
from qspec_jax.errors import InputError

CONFIG = GenerationConfig(draft="quantspec", group_size=8, ignore_eos=True, num_speculative_tokens=3)
DRAFTS = ("retrieval:budget=48,chunk=4", "none")  # test_tensor_parallel.py has others, on several copies too


def some_requests(count: int, draft: str = "quantspec") -> list[Request]:
    """Greedy and sampled, of different lengths; without a draft over a cache in full precision."""
    r, config = np.random.default_rng(0), dataclasses.replace(CONFIG, draft=draft)
    settings = lambda i: dict(max_new_tokens=int(r.integers(1, 30)), temperature=(0.0, 0.9)[i % 2])
    return [
        Request(r.integers(0, 4096, int(r.integers(1, 60))).tolist(), dataclasses.replace(config, **settings(i)), jax.random.key(i))
        for i in range(count)
    ]


def tokens_of(run) -> list[list[int]]:
    found = {result.index: result.token_ids for result in run}
    return [found[index] for index in range(len(found))]


@pytest.fixture
def two_devices(request):
    return simulated_devices.devices(request, 2)


@pytest.mark.system
def test_with_simulated_devices(request):
    simulated_devices.run_those_of(request, 2)


@pytest.mark.several_devices
def test_rows_are_as_on_one_device(directory, two_devices):
    """In float64, refilled and in fixed batches."""
    with jax.enable_x64(True):
        model = load_model(directory, dtype="float64")
        for name in DRAFTS:
            requests = some_requests(9, name)
            draft = None if name == "none" else make_draft(name, model)
            one = run_batch(model, with_draft(requests, draft), batch_size=2)
            whole = tokens_of(one)
            for refill in (True, False):
                run = run_batch(model, with_draft(requests, draft), batch_size=2, refill=refill, devices=two_devices)
                assert tokens_of(run) == whole
                assert (run.stats.prompts, run.stats.new_tokens) == (9, one.stats.new_tokens)
                assert run.stats.busy_rounds == one.stats.busy_rounds


@pytest.mark.several_devices
def test_both_work(directory, two_devices):
    """Once programs are there and both begin together, each takes requests from the queue."""
    model, together = load_model(directory), threading.Barrier(2, timeout=60)
    requests = some_requests(2) * 16

    def strategy(*configs):
        together.wait()
        return make_sampler(*configs)

    for device in two_devices:
        list(run_batch(model, requests, batch_size=2, devices=[device]))
    run = run_batch(model, requests, batch_size=2, devices=two_devices, strategy=strategy)
    assert len(tokens_of(run)) == 32 and run.stats.batch_size == 4


@pytest.mark.several_devices
def test_a_device_that_is_not_the_first(directory, two_devices):
    """The weights are copied to it, and nothing of the batch is elsewhere."""
    model, requests, found = load_model(directory), some_requests(3), []

    def strategy(*configs):
        found.append(make_sampler(*configs))
        return found[-1]

    run = run_batch(model, requests, devices=two_devices[1:], strategy=strategy)
    assert len(tokens_of(run)) == 3
    assert {leaf.devices().pop() for leaf in jax.tree.leaves(found)} == {two_devices[1]}


@pytest.mark.several_devices
def test_bench_compares_them_with_one(run, one_layer, two_devices):
    sizes = ["--prompts", 6, "--batch-size", 2, "--prompt-tokens", "4-9", "--new-tokens", "3-12", "--gamma", 2]
    code, out, err = run("bench", "batch", "--arch", "tiny", *sizes, "--devices", "all", "--no-fixed", "--json")
    report = json.loads(out)
    rows = {row["way"]: row for row in report["rows"]}
    assert (code, err, report["devices"], list(rows)) == (0, "", 2, ["refilled", "several devices"])
    assert report["speedup"] is None
    assert rows["several devices"]["same_tokens"] == 1 and rows["several devices"]["stats"]["compile_s"] == 0
    assert report["devices_speedup"] == rows["several devices"]["tokens_per_second"] / rows["refilled"]["tokens_per_second"]


@pytest.mark.system
def test_more_devices_than_requests(model):
    run = run_batch(model, some_requests(2), devices=jax.devices()[:1] * 3)
    assert len(tokens_of(run)) == run.stats.prompts == 2


def test_what_one_raises_ends_all(model):
    made = []

    def strategy(*configs):
        made.append(threading.current_thread().name)
        if len(made) > 1:
            raise ZeroDivisionError("planted")
        return make_sampler(*configs)

    with pytest.raises(ZeroDivisionError, match="planted"):
        list(run_batch(model, some_requests(6), batch_size=1, devices=jax.devices()[:1] * 2, strategy=strategy))
    assert len(made) == 2 and not set(made) & {thread.name for thread in threading.enumerate()}


def test_closed_early():
    closed = []

    def make(device, is_stopped):
        try:
            yield from range(1 << 20)
        finally:
            closed.append(device)

    found = side_by_side(jax.devices()[:1] * 2, make)
    next(found)
    found.close()
    assert len(closed) == 2


def test_closed_while_nothing_comes(model, monkeypatch):
    """Who works on is told, and a batch asks before it goes on."""

    def make(device, is_stopped):
        yield device
        while not is_stopped():
            time.sleep(0.01)
        raise data_parallel.Stopped

    found = data_parallel.side_by_side(jax.devices()[:1] * 2, make)
    next(found)
    found.close()
    monkeypatch.setattr(data_parallel, "side_by_side", lambda devices, make: make(devices[0], lambda: True))
    with pytest.raises(data_parallel.Stopped):
        list(run_batch(model, some_requests(4), devices=jax.devices()[:1] * 2))


def test_each_has_its_share_of_the_rows_that_fit(model):
    run = run_batch(model, some_requests(6), batch_size=None, devices=jax.devices()[:1] * 3)
    assert len(tokens_of(run)) == 6 and run.stats.batch_size <= 6


def test_devices_of_another_kind_are_left_out(monkeypatch, caplog):
    device = lambda kind: types.SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(jax, "local_devices", lambda: [device("large"), device("small"), device("large")])
    assert [found.device_kind for found in options.devices_of("all")] == ["large"] * 2
    assert "left out, as of another kind than the first (large): 1 of the devices" in caplog.text
    with pytest.raises(InputError, match="a number from 1 to 2"):
        options.devices_of("3")


def test_what_stands_twice_is_copied_once():
    x, y = jnp.ones(3), jnp.zeros(2)
    (a, b), c = copied_to(((x, y), x), jax.devices()[-1])
    assert a is c and b is not a


def test_devices_that_are_not_there(fails, directory, tmp_path):
    command = ["batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--model", directory, "--devices"]
    for text in ("0", "9", "two", "-1"):
        fails([*command, text], f"--devices {text} should be all, or a number from 1 to {len(jax.devices())}")
