"""The kernel that chooses the tokens with the largest shares, on a CPU (simulated_ptx.py), against a sort of all shares."""

import jax.numpy as jnp
import numpy as np
import pytest
from simulated_gpu import launch
from simulated_ptx import at_once, simulate
from simulated_races import here
from tiers import in_system

from pallas_kernels.attention.mosaic_low_bits import TILE
from pallas_kernels.attention.partials import MIN_LOG_SHARE
from pallas_kernels.gpu import ptx
from pallas_kernels.replaced_attention import mosaic_choice, mosaic_choice_block


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    simulate(monkeypatch)
    monkeypatch.setattr(mosaic_choice, "launch", launch)
    monkeypatch.setattr(mosaic_choice, "run", at_once(mosaic_choice.run))
    monkeypatch.setattr(mosaic_choice, "no_mosaic_gpu", lambda: None)


def problem(
    quantized: list[int], kv_heads: int, S: int, N: int, n: int, *, splits: int = 3, rows: int = 0, levels: int = 0, less: int = 0
) -> dict:
    """What is found, and the arguments of `mosaic_choice.choose_tokens` but k: a quarter of what may be replaced is not. rows: query rows
    besides the last token's. levels: if not 0, each share is one of this number of powers of two, times the heads; many are then equal.
    less: shares are 2^-less times as large."""
    r = np.random.default_rng(S + N + n)
    B, K = len(quantized), kv_heads
    relative_to = r.integers(-40, -8, (B, K, S // TILE, N)).astype(np.float32)
    logits = np.minimum(0, r.normal(-20, 6, (B, K, n, N)))
    if levels:
        exponents = r.integers(-levels, 0, (B, K, S, 1)) - np.repeat(relative_to, TILE, axis=2)
        weights, logits = np.exp2(exponents), r.integers(-levels, 0, (B, K, n, 1)).repeat(N, 3)
    else:
        weights = np.exp2(np.minimum(8, r.normal(0, 4, (B, K, S, N))))
        weights[r.random(weights.shape) < 0.05] = 0
    positions = np.full((B, K, n), -1, np.int32)
    for (b, j), count in np.ndenumerate(np.minimum(np.array(quantized) * 3 // 4, n * 3 // 4)[:, None].repeat(K, 1)):
        positions[b, j, r.permutation(n)[:count]] = r.choice(quantized[b], count, replace=False)
        weights[b, j, positions[b, j][positions[b, j] >= 0]] = 0
    for b, end in enumerate(quantized):
        weights[b, :, end:], relative_to[b, :, end // TILE :] = np.nan, np.nan
    # As attention stores them: larger, and relative to less.
    weights, relative_to, logits = weights * 2.0**64, relative_to - 64 - less, logits - less
    # The sum of weights is a power of two for each head, so that nothing is rounded. A split may have had no tokens.
    top = np.full((B * K, splits, rows + N), -1e30, np.float32)
    top[:, : max(1, splits - 1), :] = r.integers(0, 12, (B * K, 1, rows + N))
    total = np.where(top < -1e20, 0, 1 / max(1, splits - 1)).astype(np.float32)
    return {
        "weights": jnp.asarray(weights, jnp.bfloat16),
        "relative_to": jnp.asarray(relative_to),
        "top": jnp.asarray(top),
        "total": jnp.asarray(total),
        "replaced_logits": jnp.asarray(logits, jnp.float32),
        "positions": jnp.asarray(positions),
        "quantized": jnp.asarray(quantized, jnp.int32),
    }


def shares(weights, relative_to, top, total, replaced_logits, positions, quantized) -> np.ndarray:
    """[B, K, S], of all tokens; -inf where there is none."""
    B, K, S, N = weights.shape
    wide = lambda x: np.asarray(x, np.float64)
    top = wide(top)[..., -N:]
    most = top.max(1, keepdims=True)
    whole = np.log2((wide(total)[..., -N:] * np.exp2(top - most)).sum(1)) + most[:, 0]
    whole = whole.reshape(B, K, 1, N)
    of_all = lambda parts: np.fmax(parts, 2.0**MIN_LOG_SHARE).sum(-1)
    out = of_all(wide(weights) * np.exp2(np.repeat(wide(relative_to), TILE, axis=2) - whole))
    for (b, j, i), position in np.ndenumerate(positions):
        if position >= 0:
            out[b, j, position] = of_all(np.exp2(wide(replaced_logits)[b, j, i] - whole[b, j, 0]))
    out[np.broadcast_to(np.arange(S) >= np.asarray(quantized)[:, None, None], out.shape)] = -np.inf
    return out


def chosen(arguments: dict, k: int) -> np.ndarray:
    found = {name: x for name, x in arguments.items() if name not in ("positions", "quantized")}
    return np.array(mosaic_choice.choose_tokens(found, arguments["positions"], arguments["quantized"], k))


def check(arguments: dict, k: int, *, exact: bool) -> None:
    """exact: shares are so that no rounding decides between them."""
    found = chosen(arguments, k)
    share = shares(**arguments)
    assert found.shape == (*share.shape[:2], k)
    for of_head, positions in zip(share.reshape(-1, share.shape[2]), found.reshape(-1, k)):
        count = min(k, np.isfinite(of_head).sum())
        expected = np.sort(np.argsort(-of_head, kind="stable")[:count])
        assert (positions[count:] == -1).all()
        if exact:
            np.testing.assert_array_equal(positions[:count], expected)
        else:
            assert (np.diff(positions[:count]) > 0).all() and (positions[:count] >= 0).all()
            np.testing.assert_allclose(np.sort(of_head[positions[:count]]), np.sort(of_head[expected]), rtol=1e-5)


@pytest.mark.parametrize(
    ("quantized", "kv_heads", "S", "N", "n", "k", "settings"),
    [
        ([0, 32, 608, 640], 2, 640, 4, 8, 8, {}),
        ([2144, 1024], 1, 2144, 4, 33, 20, {"rows": 4}),  # two warpgroups
        ([320, 96], 1, 320, 1, 5, 3, {"splits": 1}),
        ([640], 2, 640, 2, 64, 7, {"splits": 40}),
        ([352, 0], 1, 352, 3, 4, 5, {"rows": 3}),
        ([480], 1, 480, 7, 6, 4, {"splits": 300, "rows": 7}),
        ([256, 224], 1, 256, 8, 16, 4, {}),
        ([320, 640], 1, 640, 4, 8, 6, {"less": 64}),
        ([64, 0, 96], 1, 96, 4, 200, 16, {}),  # all tiles are chosen
        ([64, 32], 1, 64, 6, 150, 80, {}),  # more than there are tokens
    ],
)
def test_the_largest_shares_are_chosen(quantized, kv_heads, S, N, n, k, settings):
    check(problem(quantized, kv_heads, S, N, n, **settings), k, exact=False)


@pytest.mark.parametrize("levels", [1, 3, 9])
@pytest.mark.parametrize(("S", "N", "n", "k"), [(640, 4, 40, 6), (96, 1, 24, 40)])
def test_of_equal_shares_the_first_are_chosen(levels, S, N, n, k):
    check(problem([S, S // 2 // TILE * TILE], 1, S, N, n, levels=levels), k, exact=True)


def test_four_warpgroups():
    check(problem([8224], 1, 8224, 1, 300, levels=20), 40, exact=True)


def test_more_rows_than_are_held(monkeypatch):
    monkeypatch.setattr(mosaic_choice_block, "HELD_ROWS", 0)
    check(problem([2080], 1, 2080, 4, 30, levels=9), 17, exact=True)


def test_shares_that_are_as_good_as_none_are_chosen_in_their_order():
    arguments = problem([640], 1, 640, 2, 8, levels=1)
    arguments["weights"] = jnp.zeros_like(arguments["weights"])
    check(arguments, 6, exact=True)


@pytest.mark.parametrize("name", ["weights", "relative_to", "replaced_logits", "top", "total"])
@pytest.mark.parametrize("value", [np.nan, *in_system(np.inf)])
def test_what_is_no_number_chooses_some_tokens(name, value):
    arguments = problem([320, 64], 2, 320, 4, 8)
    of_row = arguments[name].reshape(2, 2, *arguments[name].shape[1 + (name not in ("top", "total")) :])
    clean = chosen(arguments, 6)
    arguments[name] = of_row.at[0, 1, 1].set(value).reshape(arguments[name].shape)
    found = chosen(arguments, 6)
    assert len(set(found[0, 1])) == 6 and (found[0, 1] >= 0).all() and (found[0, 1] < 320).all()
    found[0, 1] = clean[0, 1]
    np.testing.assert_array_equal(found, clean)


@pytest.mark.parametrize("meeting", range(6))
def test_a_meeting_of_warps_that_is_left_out_is_seen(monkeypatch, meeting):
    meet, met = ptx.synchronize, {}

    def all_but_one(barrier, warps):
        met[here.warp] = met.get(here.warp, -1) + 1
        if met[here.warp] != meeting:
            meet(barrier, warps)

    monkeypatch.setattr(ptx, "synchronize", all_but_one)
    with pytest.raises(AssertionError, match="a race: warp"):
        chosen(problem([640], 1, 640, 4, 8), 8)


@pytest.mark.parametrize(
    ("size", "heads", "replaced", "k", "reason"),
    [
        (1 << 20, 8, 256, 256, None),
        (32, 5, 1, 300, None),
        (64, 9, 1, 1, "query heads"),
        (48, 1, 1, 1, "tiles of 32"),
        (0, 1, 1, 1, "tiles of 32"),
        (64, 1, 0, 1, "at least one to choose"),
        (1 << 21, 1, 1, 1, "tiles of 32 tokens"),
        (1 << 20, 1, 1, 1024, "shared memory"),
    ],
)
def test_what_is_unsupported(size, heads, replaced, k, reason):
    found = mosaic_choice.unsupported(size, heads, replaced, k)
    assert found is None if reason is None else reason in found
