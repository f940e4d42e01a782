"""Predicted times, costs and memory against what was measured."""

import dataclasses
import functools
import math

import measured_rows as rows
import planned
import pytest
from tiers import in_system

from qspec_jax.bench.architectures import architecture
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.caches.schedule import Schedule
from qspec_jax.planning import timing
from qspec_jax.planning.devices import DEVICES
from qspec_jax.planning.memory import memory_of
from qspec_jax.planning.plan import plan
from qspec_jax.planning.rounds import Asked, expected_rounds

FULL, INT8 = CacheConfig("full"), CacheConfig("int8")


@functools.cache
def compared(row: rows.Decode | None) -> list[planned.Compared]:
    """The figures of a decode; None: all others."""
    return planned.compared_others() if row is None else planned.compared_decode(row)


def test_efficiencies_are_fitted_on_the_rows_that_say_so():
    """And on no others: the coefficients follow from those rows. One is assumed."""
    found = planned.fitted()
    for name, value in dataclasses.asdict(timing.FITTED).items():
        if name != "launch_small":
            assert value == pytest.approx(getattr(found, name), rel=0.01), name


@pytest.mark.parametrize(
    "row", [*(row for row in rows.DECODES if not row.used), None], ids=lambda row: planned.name_of(row) if row else "others"
)
def test_predictions_stand_within_15_percent(row):
    """Every measured figure that nothing was fitted on is predicted."""
    found = [figure for figure in compared(row) if not figure.used]
    assert found
    for figure in found:
        assert figure.predicted == pytest.approx(figure.measured, rel=0.15), f"{figure.what}: {figure.unit}"


@pytest.mark.parametrize("row", [row for row in rows.DECODES if row.arch != "419m" and row.cache == "int8"], ids=planned.name_of)
def test_the_plan_says_what_was_compared(row):
    """With the acceptance that came out, `plan` gives the very figures that stand against the measured ones."""
    rate = planned.acceptance_of(Schedule(128), row.gamma, row.ratio)
    settings = dict(drafts=[row.draft], gammas=[row.gamma], acceptances={"": rate})
    found = plan(row.arch, architecture(row.arch), DEVICES[row.device], [row.context], [1], **settings)
    full, _, drafted = found.rows
    p = planned.predicted(row)
    assert full.ms_per_token == pytest.approx(p.baseline_ms)
    assert (drafted.step_ms, drafted.target_ms, drafted.ms_per_token) == pytest.approx((p.step_ms, p.verify_ms, p.ms))
    assert drafted.accepted_of_drafted == pytest.approx(row.ratio)


@pytest.mark.parametrize("arch", ["llama-3.2-1b", "tiny", *in_system("llama-2-13b", "llama-3.1-70b")])
def test_the_smallest_and_the_largest(arch):
    for name in ("h200", "orin"):
        found = plan(arch, architecture(arch), DEVICES[name], [1, (1 << 20) - 640], [1, 1 << 16], gammas=[1, 15])
        planned_rows = [row for row in found.rows if row.ms_per_token is not None]
        assert all(math.isfinite(row.ms_per_token) and row.ms_per_token > 0 and row.memory.total > 0 for row in planned_rows)
        assert {row.draft for row in planned_rows} >= {"none", "quantspec", "sparse"}


def test_most_rows_are_held_out():
    used = [row for row in rows.DECODES if row.used]
    assert len(used) == 3 and len(rows.DECODES) >= 28 and not any(row.arch == "419m" for row in used)
    found = [figure for row in [*rows.DECODES, None] for figure in compared(row)]
    assert sum(figure.used for figure in found) < len(found) / 4


def test_ranges_of_the_trained_model():
    """docs/measurements/2026-11.md: a round at 8k takes 2.2 to 2.3 ms, and with 4 drafts a round decoding is 1.40 to 1.80 times as fast."""
    trained = [row for row in rows.DECODES if row.arch == "419m" and row.device == "h200"]
    for row in trained[:2]:
        p = planned.predicted(row)
        assert p.ms * p.rounds.tokens == pytest.approx(2.25, rel=0.15)
    four = []
    for row in trained:
        rate = planned.acceptance_of(Schedule(128), 6, row.ratio)
        ratio = expected_rounds(Schedule(128), 4, Asked(rate)).accepted_of_drafted
        four.append(planned.predicted(row._replace(gamma=4, ratio=ratio)).speedup)
    assert (min(four), max(four)) == pytest.approx((1.40, 1.80), rel=0.15)


def test_costs_of_a_draft():
    """docs/measurements/2026-11.md, "Adaptive drafting": of verifying 0.311 for Llama-2-7B at 4k, 0.387 for Llama-3.1-8B at 128k."""
    for arch, context, cost in ("llama-2-7b", 4096, 0.311), ("llama-3.1-8b", 131072, 0.387):
        row = next(row for row in rows.DECODES if (row.arch, row.context) == (arch, context))
        found = planned.predicted(row)
        assert found.step_ms / found.verify_ms == pytest.approx(cost, rel=0.15)


@pytest.mark.parametrize("row", rows.MEMORY, ids=lambda row: f"{row.arch}-{row.context}")
def test_memory_is_what_was_measured(row):
    c = architecture(row.arch)
    sizes = dict(batch=1, context=row.context, new_tokens=row.new_tokens)
    draft = memory_of(c, INT8, planned.drafts_of(c, "quantspec"), **sizes, gamma=6)
    baseline = memory_of(c, FULL, (), **sizes, gamma=0)
    assert draft.cache / 1e9 == pytest.approx(row.cache_gb, rel=0.005, abs=0.005)
    assert draft.cache / baseline.cache == pytest.approx(row.share_of_full, abs=0.006)
    assert draft.total / 1e9 == pytest.approx(row.peak_gb, rel=0.05) and baseline.total / 1e9 == pytest.approx(row.baseline_gb, rel=0.05)


def test_docs_have_what_is_predicted():
    """The tables of docs/measurements/plan.md, which `python tests/planned.py` writes."""
    text = planned.DOCS.read_text()
    for table in planned.tables():
        assert table in text
    assert planned.with_tables(text) == text and planned.with_tables(text.replace("| fitted |", "| |")) == text
