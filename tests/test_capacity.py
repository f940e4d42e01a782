"""`--batch-size auto`: as many rows as fit, by what a batch is made of."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from problems.batch import CONFIG, outcome, some_requests
from runs import with_draft
from tiers import in_system

from qspec_jax import drafts
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.decoding import capacity, device_memory
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.capacity import Capacity, divided, enough_for
from qspec_jax.decoding.engine import Engine
from qspec_jax.drafts.step_bytes import bytes_of
from qspec_jax.errors import InputError

pytestmark = pytest.mark.usefixtures("paged")


@pytest.fixture(scope="module")
def model(directory):
    return load_model(directory)


def test_rows_and_pages_fill_what_is_free():
    r, refused = np.random.default_rng(0), 0
    for _ in range(300):
        groups = r.integers(0, 50, int(r.integers(1, 60))).tolist()
        free, of_row, of_page = r.uniform(0, 1000), r.uniform(1, 20), r.uniform(0.1, 3)
        found = divided(free, of_row, of_page, groups, len(groups))
        if found is None:
            refused += 1
            assert of_row + of_page * (1 + max(groups)) > free - of_page
            continue
        assert 1 <= found.rows <= len(groups) and max(groups) < found.pages <= enough_for(found.rows, groups).pages
        assert found.rows * of_row + found.pages * of_page <= free + of_page  # page 0
        # Another row would not fit, with what rows need in the mean.
        if found.rows < len(groups) and found.pages > max(groups) + 1 + of_row / of_page:
            assert (found.rows + 1) * (of_row + of_page * np.mean(groups)) > free
    assert 0 < refused < 150


def test_short_requests_let_more_rows_in_than_the_longest_would():
    groups = [2] * 97 + [100] * 3
    found = divided(400, 1, 1, groups, 100)
    assert found.rows == int(400 // (1 + np.mean(groups))) == 67 and found.pages == 333


def test_rows_without_pages():
    assert divided(100, 30, 0, None, 9) == Capacity(3, None)
    assert divided(100, 30, 0, None, 2) == Capacity(2, None)
    assert divided(29, 30, 0, None, 2) is None


@pytest.mark.parametrize("kind", ["full", *in_system("int8")])
def test_what_is_made_fits(model, monkeypatch, caplog, kind):
    """The batch and two rows beside it take no more than was free, and the results are the same."""
    requests, made, batch_of = some_requests(9), [], Engine.batch_of
    draft = drafts.quantspec(model) if kind == "int8" else None
    # Greedy ones: with the settings of the others the program is twice as large.
    config = CONFIG if kind == "int8" else dataclasses.replace(CONFIG, cache="full", draft="none")
    requests = [dataclasses.replace(r, config=dataclasses.replace(config, max_new_tokens=r.config.max_new_tokens)) for r in requests]

    def seen(self, row, *sizes):
        state = batch_of(self, row, *sizes)
        made.append((bytes_of(state), bytes_of(row)))
        return state

    monkeypatch.setattr(Engine, "batch_of", seen)
    expected = outcome(run_batch(model, with_draft(requests, draft), batch_size=2))
    two, row = made.pop()
    monkeypatch.setattr(capacity, "free_bytes", lambda mesh=None: 3 * two + 2 * row + int(20e6))
    with caplog.at_level("INFO", "qspec_jax.decoding.capacity"):
        run = run_batch(model, with_draft(requests, draft), batch_size=None)
        assert outcome(run) == expected
    assert 2 < run.stats.batch_size <= 9 and sum(made[0]) + row <= capacity.free_bytes()
    assert re.search(rf"batch size auto: {run.stats.batch_size} rows fit", caplog.text)
    monkeypatch.setattr(capacity, "free_bytes", lambda mesh=None: 2 * row)
    with pytest.raises(InputError, match=r"not one row fits; the largest request takes 0\.\d GB more than are free"):
        run_batch(model, with_draft(requests, draft), batch_size=None)


def test_of_the_command(run, fails, directory, tmp_path, caplog):
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"token_ids": [1, 2, 3]}\n' * 2)
    flags = ["--model", directory, "--max-new-tokens", 2, "--draft", "none", "--dtype", "float32"]
    with caplog.at_level("INFO", "qspec_jax.decoding.capacity"):
        code, out, _ = run("batch", lines, tmp_path / "out.jsonl", *flags, "--batch-size", "auto", "--json")
    assert code == 0 and json.loads(out)["batch_size"] == 2
    assert "2 rows, since this device does not report its memory" in caplog.text
    for wrong in ("0", "-1", "1.5", "many", "²", "99999999"):
        fails(["batch", lines, tmp_path / "out.jsonl", *flags, f"--batch-size={wrong}"], f"--batch-size {wrong} should be a whole number")


def test_a_cpu_does_not_say(monkeypatch):
    assert jax.default_backend() != "cpu" or device_memory.free_bytes() is None
    says = type("Device", (), {"memory_stats": lambda self: {"bytes_limit": 1000, "bytes_in_use": 300}})
    monkeypatch.setattr(jax, "local_devices", lambda: [says()])
    assert device_memory.free_bytes() == 670
