"""The files of tuned configurations: what is stored is found again, and what is in the package can be used."""

import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import tuning
from pallas_kernels.attention import mosaic_plan, triton

CONFIGS = {mosaic_plan.KERNEL: mosaic_plan.Config, triton.KERNEL: triton.Config}
PROBLEMS = {
    mosaic_plan.KERNEL: {"planes", "head_dim", "group_size", "batch", "heads", "block_tiles"},
    triton.KERNEL: {"planes", "head_dim", "group_size", "programs", "block_rows"},
}
plan = mosaic_plan.Plan(1, 32, 1, 1, 128, 128, 1024, 264, 1, block_tiles=1, blocks_of_rows=1)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="NVIDIA H100 80GB (x)", core_count=132)])
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    return tmp_path


def test_what_is_stored_is_found(folder):
    file = tuning.path()
    assert file == folder / "nvidia-h100-80gb-x-.json"
    assert tuning.lookup("k", {"planes": None}) is None
    tuning.store("k", {"planes": None, "n": 1}, {"splits": 4}, file)
    tuning.store("k", {"planes": 1, "n": 1}, {"splits": 5}, file)
    tuning.store("k", {"planes": 1, "n": 1}, {"splits": 6}, file)
    tuning.store("other", {}, {"splits": 7}, file)
    assert tuning.lookup("k", {"planes": None, "n": 1}) == {"splits": 4}
    assert tuning.lookup("k", {"n": 1, "planes": 1}) == {"splits": 6}
    assert tuning.lookup("k", {"planes": 2, "n": 1}) is None
    assert [len(entries) for entries in json.loads(file.read_text()).values()] == [2, 1]
    assert list(folder.iterdir()) == [file]


def test_a_tuned_configuration_takes_the_place_of_the_default(folder):
    default = plan.configured(None)
    other = mosaic_plan.Config(splits=3, blocks=1, warpgroups=2, team=2)
    assert default.config != other
    tuning.store(mosaic_plan.KERNEL, plan.problem, {"splits": 3, "blocks": 1, "warpgroups": 2, "team": 2}, tuning.path())
    assert plan.configured(None).config == other
    assert plan.configured(default.config) == default


def test_the_configuration_of_a_problem_alike_is_better_than_a_default(folder):
    """Alike are one row, a few tiles more, and twice the heads, with as many blocks as are resident; the problem's own comes first."""
    default = plan.configured(None)
    stored = lambda splits, **changed: tuning.store(
        mosaic_plan.KERNEL, plan.problem | changed, {"splits": splits, "warpgroups": 2, "team": 2}, tuning.path()
    )
    stored(3, block_tiles=plan.block_tiles + mosaic_plan.MORE_TILES + 1)
    assert plan.configured(None) == default
    stored(4, block_tiles=plan.block_tiles + 2)
    assert plan.configured(None).config == mosaic_plan.Config(splits=4, warpgroups=2, team=2)
    rows = dataclasses.replace(plan, batch=5)
    assert (rows.configured(None).config.warpgroups, rows.configured(None).config.team) == (2, 2)
    divided = dataclasses.replace(plan, kv_heads=plan.kv_heads // 2).configured(None).config
    assert divided == mosaic_plan.Config(splits=132 // 16, warpgroups=2, team=2)
    stored(5)
    assert plan.configured(None).config == mosaic_plan.Config(splits=5, warpgroups=2, team=2)
    stored(6, batch=5)
    assert rows.configured(None).config.splits == 6


def test_blocks_for_the_rows_of_a_batch():
    """As many for each row, enough besides to deal out, and few multiprocessors without one at the end."""
    for resident in (1, 4, 16, 33):
        alone = dataclasses.replace(plan, config=mosaic_plan.Config(resident))
        assert alone.balanced() == alone
        for batch in range(2, 200):
            splits = dataclasses.replace(alone, batch=batch).balanced().splits
            assert splits % batch == 0 and 2 * resident <= splits - batch <= 8 * (batch + resident)
            assert splits / (math.ceil(splits / resident) * resident) >= 0.75


def test_blocks_for_the_rows_of_a_batch_with_fixed_runs(monkeypatch):
    """A row has few runs: no team is without, and each has two partial results or more, unless multiprocessors would have no work."""
    monkeypatch.setattr(mosaic_plan, "multiprocessors", lambda: 132)
    for batch, groups in itertools.product((2, 3, 16, 17, 64, 200), (3, 9, 32, 256, 1024)):
        fixed = dataclasses.replace(plan, batch=batch, kv_heads=8, groups=groups, fixed_runs=True).configured(None)
        each, resident = fixed.splits // batch, 132 * fixed.config.blocks // 8
        assert fixed.splits % batch == 0 and fixed.slots >= 3
        most = fixed.max_partials / (mosaic_plan.PARTIALS_EACH * fixed.teams)
        assert each <= max(1, most, resident / batch)
        assert fixed.splits * fixed.teams >= min(resident * 3 / 4, batch * fixed.max_partials / mosaic_plan.PARTIALS_EACH)


@pytest.mark.parametrize(
    "config",
    [
        {"splits": 0},
        {"splits": "4"},
        {"splits": 4, "warps": 2},
        {"splits": 4, "team": 3},
        {"splits": 4, "blocks": 16, "warpgroups": 3},  # leaves no room
        {"splits": 4, "warpgroups": 9},
        {"splits": 10**9},
        {"splits": 10**30},
        {"splits": 4, "blocks": 10**30},
        {"splits": 4, "team": 10**30},
    ],
)
def test_a_tuned_configuration_that_cannot_work_is_passed_over(folder, caplog, config):
    default = plan.default()
    tuning.store(mosaic_plan.KERNEL, plan.problem, config, tuning.path())
    for _ in range(2):
        assert plan.configured(None) == default
    assert caplog.text.count("cannot work, the default takes its place") == 1
    assert str(tuning.path()) in caplog.text


@pytest.mark.parametrize(
    "config",
    [
        {"splits": 0, "num_warps": 1},
        {"splits": 1, "num_warps": 3},
        {"splits": 1, "num_warps": 1, "tile": 8},
        {"splits": 1, "num_warps": 1, "num_stages": 1000},
        {"splits": 1, "num_warps": 1, "num_stages": 8},  # leaves no room, as the next one
        {"splits": 1, "num_warps": 1, "tile": 65536},
        {"splits": 10**9, "num_warps": 1},
        {"splits": 10**30, "num_warps": 1},
    ],
)
def test_what_triton_cannot_take(config):
    problem = triton._Problem(planes=2, head_dim=128, group_size=128, programs=8, block_rows=16)
    with pytest.raises(ValueError, match=r"splits|num_warps|num_stages|shared memory"):
        problem.checked(triton.Config(**config))


@pytest.mark.parametrize("planes", [0, 1, 2])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_triton_has_by_default_can_work(planes, head_dim):
    for programs in (1, 8, 100, 100_000):
        problem = triton._Problem(planes, head_dim, 128 if planes else 0, programs, 16)
        assert problem.checked(problem.default()) == problem.default()


def test_candidates_can_work_and_begin_with_the_default():
    plans = plan.candidates()
    assert plans[0] == plan.default() and len(plans) == len(set(plans)) > 5
    for candidate in plans:
        many = candidate.config.warpgroups * candidate.config.blocks > 3
        assert candidate.slots >= (2 if many else 3) and candidate.shared_bytes <= mosaic_plan.SHARED_BYTES
        assert candidate.configured(candidate.config) == candidate


@pytest.mark.parametrize("config", [mosaic_plan.Config(1, team=3), mosaic_plan.Config(1, warpgroups=5, team=2)])
def test_configurations_that_cannot_work(config):
    with pytest.raises(ValueError, match="team"):
        plan.configured(config)


def test_the_files_in_the_package():
    files = sorted(tuning.FOLDER.glob("*.json"))
    assert files
    for file in files:
        for kernel, entries in json.loads(file.read_text()).items():
            assert len({json.dumps(entry["problem"], sort_keys=True) for entry in entries}) == len(entries) > 0
            for entry in entries:
                problem, config = entry["problem"], CONFIGS[kernel](**entry["config"])
                assert problem.keys() - {"list_width"} == PROBLEMS[kernel]
                if kernel == mosaic_plan.KERNEL:
                    rebuilt = mosaic_plan.Plan(
                        problem["batch"], problem["heads"], 1, 1, problem["head_dim"], problem["group_size"], 1024, 264, problem["planes"],
                        block_tiles=problem["block_tiles"], blocks_of_rows=1, list_width=problem.get("list_width"),
                    )  # fmt: skip
                    assert rebuilt.problem == problem and rebuilt.configured(config).slots >= 3


def test_a_file_that_cannot_be_read_is_as_none(folder, caplog):
    tuning._entries.cache_clear()
    entries = ('{"problem": {}}', '{"problem": 1, "config": {}}', '{"problem": {"n": "1"}, "config": {}}', "null", "3")
    rows = ("null", "3", "{}", *(f"[{entry}]" for entry in entries))
    for text in ("{", "[]", "[" * 100_000, *(f'{{"k": {of_kernel}}}' for of_kernel in rows)):
        tuning.path().write_text(text)
        tuning._entries.cache_clear()
        assert tuning.lookup("k", {}) is None
        assert "cannot be used" in caplog.text
        caplog.clear()
        with pytest.raises(ValueError):
            tuning.store("k", {}, {"splits": 1}, tuning.path())
        assert tuning.path().read_text() == text
    tuning.path().write_text("{}")
    tuning.path().chmod(0o640)
    tuning.store("k", {}, {"splits": 1}, tuning.path())
    assert tuning.lookup("k", {}) == {"splits": 1}
    assert tuning.path().stat().st_mode & 0o777 == 0o640
