"""Groups in pages of a pool that rows share: everything as where each row has room of its own, bit for bit; no page is in two rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import in_pages, of_nobody, out_of_pages
from problems.attention import Case, random_lists, random_problem
from problems.batch import outcome, some_requests
from problems.flush import DUE, filled_layer, lengths_of
from runs import with_draft
from tiers import in_system

from pallas_kernels.attention import decode_attention
from pallas_kernels.flush import flush
from pallas_kernels.formats.kv_cache import Lengths, dequantize_tokens
from pallas_kernels.formats.views import BOTH_PLANES, UPPER_PLANE, ChosenTokens, DenseView, LargestMass
from qspec_jax import drafts
from qspec_jax.caches.hierarchical import HierarchicalCache
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.decoding import prefill_groups, slots
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.engine import Engine
from qspec_jax.drafts.step_bytes import bytes_of
from qspec_jax.states.pages import PagePool

pytestmark = pytest.mark.usefixtures("paged")

CASE = Case(3, 4, 2, 16)
VIEWS = {
    "upper": UPPER_PLANE,
    "both": BOTH_PLANES,
    "listed": random_lists(CASE),
    "chosen": ChosenTokens(jax.random.bernoulli(jax.random.key(0), 0.3, (6, 2, CASE.capacity * CASE.group_size))),
    "largest": LargestMass(jnp.array([0, 2, 20, 40, 3, 7]), False),
}


def same_bits(found, expected) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("name", [*("both", "largest"), *in_system(*(name for name in VIEWS if name not in ("both", "largest")))])
def test_attention(name: str):
    view = VIEWS[name]
    q, layer = random_problem(CASE, "float32")
    attend = jax.jit(lambda *args: decode_attention(*args)[0])
    expected = attend(q, layer, CASE.lengths, view)
    assert np.isfinite(expected).all()
    same_bits(attend(q, in_pages(layer), CASE.lengths, view), expected)


def test_attention_mass():
    q, layer = random_problem(CASE, "float32")
    attend = jax.jit(lambda layer: decode_attention(q, layer, CASE.lengths, DenseView(2, observed=True)))
    same_bits(attend(in_pages(layer)), attend(layer))


@jax.jit
def flushed(layer, due):
    return flush(layer, lengths_of(4), due, scheme="int8_first")


@pytest.mark.parametrize("due", DUE)
def test_flush(due):
    layer, due = filled_layer(4, "float32", 24), jnp.array(due)
    paged = in_pages(layer)
    new = flushed(paged, due)
    same_bits(out_of_pages(new), flushed(layer, due))
    same_bits(new.pages, paged.pages)
    for x, y in zip(of_nobody(new), of_nobody(paged)):
        np.testing.assert_array_equal(x, y)


def test_a_full_row_that_is_due_writes_nothing():
    layer = in_pages(filled_layer(4, "float32", 24))
    full = Lengths(jnp.full(5, layer.groups * 4, jnp.int32), jnp.full(5, 8, jnp.int32))
    new = flush(layer, full, jnp.ones(5, bool), scheme="int8_first")
    same_bits((new.keys, new.values), (layer.keys, layer.values))


def test_single_tokens():
    _, layer = random_problem(CASE, "float32")
    tokens = jax.random.randint(jax.random.key(0), (6, 2, 9), -3, CASE.capacity * CASE.group_size + 3)
    same_bits(dequantize_tokens(in_pages(layer), tokens, dtype=jnp.float32), dequantize_tokens(layer, tokens, dtype=jnp.float32))


def test_rows_take_the_place_of_others():
    """A row in its pages is the row that it was, nobody else's bits change, and what it has no page for is dropped."""
    _, layer = random_problem(CASE, "float32")
    row = lambda b, n: HierarchicalCache((jax.tree.map(lambda x: x[b : b + 1], layer),), Lengths(*jnp.full((2, 1), n)), "int8_first")
    pool = row(0, 0).pooled(3, 9)
    assert pool.groups == CASE.capacity and pool.layers[0].keys.upper.shape[:3] == (9, 2, 1)
    table = lambda *pages: jnp.array([[*pages, *[0] * (CASE.capacity - len(pages))]])
    pool = pool.with_rows(row(0, 3), jnp.array([1]), table(4, 2, 8))
    before = pool
    pool = pool.with_rows(row(5, 7), jnp.array([2]), table(1, 5, 3, 7, 6))
    found = out_of_pages(pool._layer(0))
    for b, slot, groups in ((0, 1, 3), (5, 2, 5)):
        for x, y in zip(jax.tree.leaves((found.keys, found.values)), jax.tree.leaves((layer.keys, layer.values))):
            np.testing.assert_array_equal(x[slot, :, :groups], y[b, :, :groups])
        same_bits(jax.tree.map(lambda x, slot=slot: x[slot], found.buffer), jax.tree.map(lambda x, b=b: x[b], layer.buffer))
    assert pool.lengths.quantized.tolist() == [0, 3, 7]
    for x, y in zip(*(jax.tree.leaves((p.layers[0].keys, p.layers[0].values)) for p in (pool, before))):
        kept = np.array([0, 2, 4, 8])
        np.testing.assert_array_equal(x[kept], y[kept])
        assert not np.asarray(x[0]).any(), "page 0 is nobody's"


def test_pages_are_handed_out_once():
    pool, held = PagePool(40), []
    r = np.random.default_rng(0)
    for _ in range(300):
        count, there = int(r.integers(0, 15)), 39 - sum(map(len, held))
        pages = pool.reserve(count)
        assert (pages is None) == (count > there)
        held += [] if pages is None else [pages]
        everyone = [page for pages in held for page in pages]
        assert len(set(everyone)) == len(everyone) and all(0 < page < 40 for page in everyone)
        if held and r.random() < 0.6:
            pool.release(held.pop(int(r.integers(len(held)))))


class AnyOrder(PagePool):
    """Hands pages out in a random order."""

    def __init__(self, size):
        super().__init__(size)
        np.random.default_rng(7).shuffle(self._free)


class Small(PagePool):
    """With as many pages as a single request needs at most, so that others wait for them."""

    def __init__(self, size):
        super().__init__(1 + max(1, (size - 1) // 2))


ORDER = np.random.default_rng(2).permutation(9)


@pytest.mark.system
def test_results_do_not_depend_on_pages_slots_and_neighbours(directory, monkeypatch):
    alike = lambda results, places: [dataclasses.replace(result, index=0) for result in (results[i] for i in places)]
    with jax.enable_x64(True):
        model = load_model(directory, dtype="float64")
        draft, requests = drafts.quantspec(model), some_requests(9)
        expected = outcome(run_batch(model, with_draft(requests, draft), batch_size=1))
        for pool, together, share in ((AnyOrder, 1, 1 / 16), (Small, 2, 2 / 3)):
            monkeypatch.setattr(slots, "PagePool", pool)
            monkeypatch.setattr(prefill_groups, "ROWS_PER_PREFILL", {"cpu": together})
            monkeypatch.setattr(slots, "REFILL_SHARE", share)  # with 2 / 3 of the rows two are prepared ahead
            found = outcome(run_batch(model, with_draft([requests[i] for i in ORDER], draft), batch_size=3))
            assert alike(found, range(9)) == alike(expected, ORDER)


@pytest.mark.system
def test_ragged_rows_pay_for_what_they_hold(directory, monkeypatch):
    """The pool is as large as three rows that follow one another ever need, and not three times the longest of them."""
    made, batch_of = [], Engine.batch_of

    def seen(*sizes):
        state = batch_of(*sizes)
        made.append((jax.eval_shape(lambda cache: cache, state.cache), bytes_of(state)))
        return state

    monkeypatch.setattr(Engine, "batch_of", seen)
    requests, held = [some_requests(9)[i] for i in ORDER], []
    with jax.enable_x64(True):  # with the programs of the test before
        model = load_model(directory, dtype="float64")
        for count in (9, 3):
            run = run_batch(model, with_draft(requests[-count:], drafts.quantspec(model)), batch_size=3)
            for _ in run:
                pass
            held.append(run.stats.held_bytes)
    groups = [max(0, (len(r.tokens) + r.config.max_new_tokens) // 8 - 1) for r in requests]
    most = max(sum(groups[i : i + 3]) for i in range(7))
    assert sum(groups[-3:]) <= most < 3 * max(groups)
    (cache, _), (_, of_three) = made
    of_group = sum(x.size // x.shape[0] * x.dtype.itemsize for layer in cache.layers for x in jax.tree.leaves((layer.keys, layer.values)))
    buffers = sum(x.size * x.dtype.itemsize for layer in cache.layers for x in jax.tree.leaves(layer.buffer))
    assert cache.num_bytes == buffers + of_group * (1 + most)
    assert held[1] == of_three - of_group  # page 0 is nobody's
    assert of_three / 3 < held[0] < of_three + of_group * most
