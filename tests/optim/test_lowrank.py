"""The randomized factorization against the exact singular value decomposition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxmem.optim import lowrank
from fxmem.optim.lowrank import RowBlocks

SPECTRA = {
    "polynomial": 1 / torch.arange(1, 61, dtype=torch.float64),
    "geometric": 0.7 ** torch.arange(60, dtype=torch.float64),
    "slow": torch.arange(1, 61, dtype=torch.float64).rsqrt(),
    "cliff": torch.cat([torch.ones(8), torch.full((52,), 1e-3)]).double(),
}


def with_spectrum(m, n, values, seed=0):
    g = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(m, len(values), dtype=torch.float64, generator=g))[0]
    right = torch.linalg.qr(torch.randn(n, len(values), dtype=torch.float64, generator=g))[0]
    return (left * values) @ right.T


def draw_for(a, seed=0):
    return lowrank.gaussian(a.shape[2], [seed + b for b in range(a.shape[0])], a.device)


def error(exact, q, u, scale=1.0):
    return float(torch.linalg.norm(exact / scale - q.double() @ (u.double() / scale).mT))


def blocks(exact, block=None):
    return RowBlocks.dense(exact.float().unsqueeze(0), block)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("k", [1, 5, 20])
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("method", ["s_rsi", "fixed_precision", "adaptive_s_rsi"])
def test_error_within_five_percent_of_the_best(method, name, k, scale):
    exact = with_spectrum(150, 100, SPECTRA[name]) * scale
    a = blocks(exact, block=64)
    if method == "s_rsi":
        q, u = lowrank.s_rsi(a, k, draw_for(a), iterations=5)
    elif method == "fixed_precision":
        found = lowrank.fixed_precision(a, 0.0, k, draw_for(a), iterations=3)
        q, u = found.q, found.u
    else:
        found = lowrank.adaptive_s_rsi(a, 0.0, k, draw_for(a), start_rank=k)
        q, u = found.q, found.u
    assert q.shape == (1, 150, k)
    assert u.shape == (1, 100, k)
    best = float((SPECTRA[name][k:] ** 2).sum().sqrt())
    # The slack is float32's rounding of the matrix itself.
    assert error(exact, q[0], u[0], scale) <= 1.05 * best + 1e-6 * float(SPECTRA[name].norm())


@pytest.mark.parametrize("xi", [0.5, 0.1, 0.01, 1e-3, 1e-4])
@pytest.mark.parametrize("name", SPECTRA)
def test_fixed_precision_finds_the_smallest_rank(name, xi):
    values = SPECTRA[name]
    exact = with_spectrum(150, 100, values)
    a = blocks(exact, block=40)
    found = lowrank.fixed_precision(a, xi, 100, draw_for(a), iterations=3)
    tails = (values**2).flip(0).cumsum(0).flip(0).sqrt() / values.norm()
    smallest = int((tails > xi).sum())
    assert smallest <= found.rank[0] <= smallest + 2
    measured = error(exact, found.q[0], found.u[0]) / float(values.norm())
    assert measured <= xi
    assert found.error[0] == pytest.approx(measured, rel=0.02, abs=2e-6)
    assert found.error[0] <= xi


def test_error_is_read_off_without_cancellation():
    # ‖A‖² - ‖QᵀA‖² in float32 knows nothing about an error of 1e-5.
    values = torch.cat([torch.ones(4), torch.full((40,), 1e-5 / math.sqrt(10))]).double()
    exact = with_spectrum(120, 80, values)
    a = blocks(exact)
    found = lowrank.fixed_precision(a, 2e-5, 60, draw_for(a), iterations=2)
    assert found.rank == [4]
    assert found.error[0] == pytest.approx(error(exact, found.q[0], found.u[0]) / float(values.norm()), rel=0.05)


def test_growth_is_cut_at_the_cap():
    a = blocks(with_spectrum(90, 70, SPECTRA["slow"]))
    found = lowrank.fixed_precision(a, 0.01, 7, draw_for(a))
    assert found.rank == [7]
    assert found.q.shape[-1] == 7
    assert found.error[0] > 0.01


def test_batch_equals_one_by_one_and_each_gets_its_own_rank():
    parts = [with_spectrum(60, 50, SPECTRA[name][:40]) for name in ("geometric", "slow", "cliff")]
    together = RowBlocks.dense(torch.stack(parts).float(), 16)
    found = lowrank.fixed_precision(together, 0.1, 40, draw_for(together), iterations=2)
    assert len(set(found.rank)) == 3
    for b, part in enumerate(parts):
        k = found.rank[b]
        relative = error(part, found.q[b, :, :k], found.u[b, :, :k]) / float(part.norm())
        assert relative <= 0.1
        alone = blocks(part, 16)
        single = lowrank.fixed_precision(alone, 0.1, 40, draw_for(alone, b), iterations=2)
        assert abs(single.rank[0] - k) <= 1


def test_warm_start_follows_a_moving_matrix():
    exact = with_spectrum(100, 80, SPECTRA["geometric"])
    a = blocks(exact)
    found = lowrank.fixed_precision(a, 0.0, 8, draw_for(a), iterations=3)
    moved = exact + 0.05 * with_spectrum(100, 80, SPECTRA["geometric"], seed=1)
    b = blocks(moved)
    q, u = lowrank.follow(b, found.u, draw_for(b))
    best = float((torch.linalg.svdvals(moved)[8:] ** 2).sum().sqrt())
    stale = float(torch.linalg.norm(moved - found.q[0].double() @ found.u[0].double().T))
    followed = error(moved, q[0], u[0])
    assert followed <= 1.01 * best
    assert followed < stale


def test_followed_zero_factor_is_drawn_afresh():
    a = blocks(with_spectrum(40, 30, SPECTRA["geometric"][:20]))
    q, u = lowrank.follow(a, torch.zeros(1, 30, 2), draw_for(a))
    assert float(u.norm()) > 0
    torch.testing.assert_close(q.mT @ q, torch.eye(2).unsqueeze(0), atol=1e-5, rtol=0)


def test_row_blocks_of_a_product_and_a_square_are_the_dense_matrix():
    g = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(2, 30, 4, generator=g))[0]
    u = torch.randn(2, 20, 4, generator=g)
    s = torch.randn(2, 30, 20, generator=g) ** 2
    a = RowBlocks((2, 30, 20), lambda i, j: s[:, i:j].clone(), 7, s.device, q, u, 0.9)
    dense = 0.9 * q @ u.mT + s
    x, y = torch.randn(2, 20, 3, generator=g), torch.randn(2, 30, 3, generator=g)
    torch.testing.assert_close(a.times(x), dense @ x)
    torch.testing.assert_close(a.transposed_times(y), dense.mT @ y)
    norms = a.squared_norm(torch.ones(2, 1, 1))
    torch.testing.assert_close(norms, dense.double().square().sum(dim=(1, 2)), rtol=1e-6, atol=0)
    assert torch.equal(a.scale(), dense.abs().amax(dim=(1, 2), keepdim=True))


def test_rows_on_two_holders_equal_the_whole():
    # `reduce` stands for a sum over processes: here both halves are computed, and summed, in lockstep by threads.
    import threading

    exact = with_spectrum(64, 40, SPECTRA["geometric"][:40]).float().unsqueeze(0)
    barrier, slots, results = threading.Barrier(2), [None, None], [None, None]

    def work(me):
        def reduce(x):
            slots[me] = x
            barrier.wait()
            total = slots[0] + slots[1]
            barrier.wait()
            return total

        part = exact[:, :20] if me == 0 else exact[:, 20:]
        a = RowBlocks((1, part.shape[1], 40), lambda i, j: part[:, i:j].clone(), 16, part.device, reduce=reduce)
        results[me] = lowrank.fixed_precision(a, 0.05, 30, draw_for(a), iterations=2)

    threads = [threading.Thread(target=work, args=(me,)) for me in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    first, second = results
    assert torch.equal(first.u, second.u)
    assert first.rank == second.rank
    a = RowBlocks.dense(exact)
    whole = lowrank.fixed_precision(a, 0.05, 30, draw_for(a), iterations=2)
    assert whole.rank == first.rank
    product = torch.cat([first.q, second.q], 1) @ first.u.mT
    torch.testing.assert_close(product, whole.q @ whole.u.mT, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("columns", ["independent", "nearly dependent", "equal", "zero"])
def test_orthonormal_columns_span_the_input(columns):
    g = torch.Generator().manual_seed(0)
    y = torch.randn(1, 50, 4, generator=g)
    if columns == "nearly dependent":
        y[..., 3] = y[..., 0] + 1e-4 * y[..., 3]
    elif columns == "equal":
        y[..., 3] = y[..., 0]
    elif columns == "zero":
        y[..., 1] = 0
    q = lowrank.orthonormalize(y * 1e-25)  # overwrites its argument, not y
    rank = {"independent": 4, "nearly dependent": 4, "equal": 3, "zero": 3}[columns]
    gram = (q.mT @ q)[0]
    eigenvalues = torch.linalg.eigvalsh(gram)
    torch.testing.assert_close(eigenvalues[-rank:], torch.ones(rank), atol=1e-5, rtol=0)
    torch.testing.assert_close(eigenvalues[:-rank], torch.zeros(4 - rank), atol=1e-5, rtol=0)
    torch.testing.assert_close(q @ (q.mT @ y), y, atol=1e-4, rtol=1e-4)


def test_nan_stays_nan_and_ends():
    a = torch.randn(1, 30, 20)
    a[0, 3, 3] = math.nan
    rows = RowBlocks.dense(a)
    found = lowrank.fixed_precision(rows, 0.1, 5, draw_for(rows))
    assert bool(torch.isnan(found.u).any())
    assert bool(torch.isnan(lowrank.adaptive_s_rsi(rows, 0.1, 5, draw_for(rows)).u).any())


def test_paper_rank_growth_is_monotone_in_the_error_and_bounded():
    assert lowrank.next_rank(1, 0.5, 0.01, 100) == 2
    assert lowrank.next_rank(10, 10.0, 0.01, 100) == 20
    assert lowrank.next_rank(10, 0.0101, 0.01, 100) == 15
    assert lowrank.next_rank(90, 1.0, 0.01, 100) == 100


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    true_rank=st.integers(0, 6),
    exponent=st.integers(-30, 30),
    block=st.integers(1, 50),
    seed=st.integers(0, 2**20),
)
def test_exact_rank_is_found_at_every_shape_and_scale(m, n, true_rank, exponent, block, seed):
    g = torch.Generator().manual_seed(seed)
    true_rank = min(true_rank, m, n)
    exact = torch.rand(m, true_rank, dtype=torch.float64, generator=g) @ torch.rand(
        true_rank, n, dtype=torch.float64, generator=g
    )
    scale = 10.0**exponent
    a = blocks(exact * scale, block)
    cap = min(m, n)
    found = lowrank.fixed_precision(a, 1e-4, cap, draw_for(a, seed), iterations=2)
    assert 1 <= found.rank[0] <= max(1, true_rank)
    k = found.rank[0]
    assert bool(torch.isfinite(found.q).all())
    assert bool(torch.isfinite(found.u).all())
    left = error(exact * scale, found.q[0, :, :k], found.u[0, :, :k], scale)
    assert left <= 1.2e-4 * float(exact.norm()) + 1e-12


@settings(max_examples=40, deadline=None)
@given(m=st.integers(2, 40), n=st.integers(2, 40), k=st.integers(1, 8), seed=st.integers(0, 2**20))
def test_fixed_rank_is_near_the_best_of_random_squares(m, n, k, seed):
    g = torch.Generator().manual_seed(seed)
    exact = torch.randn(m, n, dtype=torch.float64, generator=g) ** 2
    k = min(k, m, n)
    a = blocks(exact)
    found = lowrank.fixed_precision(a, 0.0, k, draw_for(a, seed), iterations=5, oversampling=10)
    best = float((torch.linalg.svdvals(exact)[k:] ** 2).sum().sqrt())
    assert error(exact, found.q[0], found.u[0]) <= 1.05 * best + 1e-5 * float(exact.norm())
