"""`mosaic_runs.Runs` on plain integers: runs divide whatever a row holds, and the teams of `emit_block` store each once."""

import dataclasses
import itertools
import types

import numpy as np
import pytest

from pallas_kernels.attention import mosaic_plan, mosaic_runs
from pallas_kernels.attention.mosaic_plan import Plan
from pallas_kernels.attention.support import PASS_SPAN

SHAPES = [(128, 8, 128), (128, 32, 128), (128, 1, 64), (64, 2, 64), (128, 200, 128)]  # tokens of a group, KV heads, head_dim
GROUPS = np.arange(2001)


@pytest.fixture(autouse=True)
def on_integers(monkeypatch):
    ptx = types.SimpleNamespace(i32=int, minimum=np.minimum, maximum=np.maximum, select=np.where)
    monkeypatch.setattr(mosaic_runs, "ptx", ptx)


def plan(group_size: int, kv_heads: int, head_dim: int, *, groups: int, buffer_rows: int) -> Plan:
    coded = groups > 0
    shape = dict(batch=3, kv_heads=kv_heads, tokens=1, heads_per_kv_head=4, head_dim=head_dim, block_tiles=1, blocks_of_rows=1)
    shape |= dict(group_size=group_size if coded else 0, groups=groups, buffer_rows=buffer_rows, planes=2 if coded else None)
    return Plan(**shape, fixed_runs=True)


def edges(runs: mosaic_runs.Runs) -> tuple[np.ndarray, np.ndarray]:
    """The first group and the first chunk of each run and of the one after the last, on a last axis for all rows alike."""
    run = np.minimum(np.arange(np.max(runs.number) + 1), runs.number)
    return runs.first_group(run), runs.first_chunk(run)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunks", range(14))  # a buffer of 128 tokens more than usual among them
def test_runs_divide_groups_and_then_chunks(shape, chunks):
    of_plan = plan(*shape, groups=GROUPS[-1], buffer_rows=400)
    runs = mosaic_runs.Runs(of_plan, 0, chunks * of_plan.chunk, GROUPS[:, None])
    first_group, first_chunk = edges(runs)
    assert (runs.number >= 1).all() and (runs.number <= of_plan.max_runs).all()
    assert (first_group[:, 0] == 0).all() and (first_group[:, -1] == GROUPS).all() and (np.diff(first_group) >= 0).all()
    assert (first_chunk[:, 0] == 0).all() and (first_chunk[:, -1] == chunks).all() and (np.diff(first_chunk) >= 0).all()
    assert (first_group == GROUPS[:, None])[first_chunk > 0].all()  # chunks come after all groups
    has_groups, ends_with_group = np.diff(first_group) > 0, np.diff(first_chunk) == 0
    run = np.arange(has_groups.shape[1])
    assert (has_groups == (run < runs.with_groups)).all()
    assert ends_with_group[run < runs.without_chunks].all()
    assert np.isin(runs.with_groups - runs.without_chunks, (0, 1)).all()
    # Neither a smaller cache nor more in the buffer moves a run, but for the end of what is there.
    for groups in (1, 7, 300):
        of_smaller = plan(*shape, groups=groups, buffer_rows=300)
        smaller = mosaic_runs.Runs(of_smaller, 0, 14 * of_smaller.chunk, GROUPS[: groups + 1, None])
        assert (smaller.number == runs.number[: groups + 1]).all() and smaller.number.max() <= smaller.plan.max_runs
        longer_group, longer_chunk = edges(smaller)
        width = longer_group.shape[1]
        assert (longer_group == first_group[: groups + 1, :width]).all()
        inner = np.arange(width) < smaller.number
        assert (np.minimum(longer_chunk, chunks) == first_chunk[: groups + 1, :width])[inner].all()


@pytest.mark.parametrize("rows", [1, 63, 512, 513, 5000, 40000])
def test_runs_divide_a_full_precision_cache(rows):
    of_plan = plan(128, 8, 128, groups=0, buffer_rows=rows)
    for tokens in {*range(1, rows, 61), rows}:
        runs = mosaic_runs.Runs(of_plan, 0, tokens, 0)
        first = edges(runs)[1]
        assert 1 <= runs.number <= of_plan.max_runs
        assert first[0] == 0 and first[-1] == runs.chunks and (np.diff(first) >= 0).all()
        # They are those of the longest pass from there that keeps its bits, but for the end.
        longest = -(-tokens // PASS_SPAN) * PASS_SPAN
        longer = mosaic_runs.Runs(dataclasses.replace(of_plan, tokens=longest - tokens + 1), 0, longest, 0)
        np.testing.assert_array_equal(np.minimum(edges(longer)[1], runs.chunks), first)
    # Too large a length writes no partial result outside of the row's own.
    beyond = mosaic_runs.Runs(of_plan, 0, 10 * rows + 5000, 0)
    assert beyond.number <= of_plan.max_runs and edges(beyond)[1][-1] == beyond.chunks


def store(runs: mosaic_runs.Runs, stored: dict, partials: dict, run: int, state: list, worker: int) -> None:
    """Stores what a run has read; with whole folds the last run of each, and the team has had all of that fold."""
    assert stored.setdefault(run, (worker, state)) == (worker, state)
    if runs.plan.whole_folds and not runs.ends_fold(run):
        return
    first = run // mosaic_plan.FOLD_RUNS * mosaic_plan.FOLD_RUNS if runs.plan.whole_folds else run
    assert {stored[earlier][0] for earlier in range(first, run + 1)} == {worker}
    assert partials.setdefault(runs.place(0, 0, run), run) == run


@pytest.mark.parametrize("whole_folds", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_teams_store_each_run_once_with_what_it_reads(monkeypatch, shape, whole_folds):
    """The loops of `emit_block`, with what a state has read for the state."""
    monkeypatch.setattr(mosaic_plan, "FOLDS_EACH", 0 if whole_folds else 1 << 30)
    of_plan = plan(*shape, groups=2000, buffer_rows=400)
    assert of_plan.whole_folds == whole_folds
    for groups, chunks, workers in itertools.product((*range(12), 39, 97, 2000), (0, 1, 4, 5), (1, 3, 48, 500)):
        runs = mosaic_runs.Runs(of_plan, 0, chunks * of_plan.chunk, groups)
        stored, partials = {}, {}
        for worker in range(workers):
            first, last = runs.dealt(worker, workers), runs.dealt(worker + 1, workers)
            state = []
            for run in range(first, min(last, runs.with_groups)):
                state = [("group", x) for x in range(runs.first_group(run), runs.first_group(run + 1))]
                if run < runs.without_chunks:
                    store(runs, stored, partials, run, state, worker)
            first = max(first, runs.without_chunks)
            state = state if first < min(last, runs.with_groups) else []
            for run in range(first, last):
                state = state + [("chunk", x) for x in range(runs.first_chunk(run), runs.first_chunk(run + 1))]
                store(runs, stored, partials, run, state, worker)
                state = []
        assert sorted(stored) == list(range(runs.number))
        assert sorted(partials) == list(range(runs.folds if whole_folds else runs.number)) and len(partials) <= of_plan.max_partials
        read = [unit for run in range(runs.number) for unit in stored[run][1]]
        assert read == [("group", x) for x in range(groups)] + [("chunk", x) for x in range(chunks)]


@pytest.mark.parametrize("whole_folds", [False, True])
def test_teams_divide_a_full_precision_cache(monkeypatch, whole_folds):
    monkeypatch.setattr(mosaic_plan, "FOLDS_EACH", 0 if whole_folds else 1 << 30)
    of_plan = plan(128, 8, 128, groups=0, buffer_rows=140000)
    assert of_plan.whole_folds == whole_folds
    for tokens, workers in itertools.product((1, 33, 300, 512, 513, 8000, 40000, 131072, 140000), (1, 3, 16, 64, 500)):
        runs = mosaic_runs.Runs(of_plan, 0, tokens, 0)
        stored, partials = {}, {}
        edge = [runs.dealt(worker, workers) for worker in range(workers + 1)]
        for worker in range(workers):
            for run in range(edge[worker], edge[worker + 1]):
                store(runs, stored, partials, run, [*range(runs.first_chunk(run), runs.first_chunk(run + 1))], worker)
        assert [chunk for run in range(runs.number) for chunk in stored[run][1]] == [*range(runs.chunks)]
        assert sorted(partials) == list(range(runs.folds if whole_folds else runs.number)) and len(partials) <= of_plan.max_partials
        # A team has its share of what there may be up to the next multiple of `PASS_SPAN`, or up to a run (or fold) more.
        longest = max(len(state) for _, state in stored.values()) * (mosaic_plan.FOLD_RUNS if whole_folds else 1)
        read = [runs.first_chunk(last) - runs.first_chunk(first) for first, last in itertools.pairwise(edge)]
        assert max(read) <= (runs.chunks + PASS_SPAN // of_plan.chunk) / workers + 1 + longest
