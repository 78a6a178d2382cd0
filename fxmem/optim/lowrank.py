"""Randomized low-rank factorization of a matrix that is only ever seen in row blocks: A ≈ Q Uᵀ.

Everything here is a pure function of its arguments, works on a batch of equally shaped matrices, and asks the matrix
for three things only: A X, Aᵀ Y and sums over its entries. So A may be a product plus a square of a gradient that is
never formed whole, and its rows may live on several processes (`reduce` then sums over them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
Draw = Callable[[int], Tensor]

# Below this pivot the Cholesky factor of a Gram matrix carries too few digits for the second pass to mend.
_PIVOT_FLOOR = {torch.float32: 3e-3, torch.float64: 1e-7}
# Directions whose share of the Gram matrix is below this are rounding noise even in float64.
_NULL_FLOOR = 1e-14
# Elements of a tall factor that are turned at once.
_TURN_BLOCK = 2**17
# ‖A‖² - ‖QᵀA‖² of float32 factors is good to about 1e-6 ‖A‖²; an error this small is measured instead of subtracted.
_CANCELLATION = 1e-4


def unreduced(x: Tensor) -> Tensor:
    """Return `x`: the sum over row shards when there is one shard."""
    return x


@dataclass(frozen=True)
class RowBlocks:
    """A batch of matrices A = decay · Q Uᵀ + S, where S is produced in row blocks on demand.

    Args:
        shape: (batch, rows held here, columns).
        rows: `rows(i, j)` gives rows i..j of S as a float32 tensor of shape (batch, j - i, columns), which the caller
            may overwrite and does not hold on to.
        block: rows per block.
        device: where S lives.
        q: orthonormal factor of shape (batch, rows, k), or None for A = S.
        u: the other factor of shape (batch, columns, k), or None.
        decay: weight of Q Uᵀ.
        reduce: sums a tensor over the processes that hold the other rows.
    """

    shape: tuple[int, int, int]
    rows: Callable[[int, int], Tensor]
    block: int
    device: torch.device
    q: Tensor | None = None
    u: Tensor | None = None
    decay: float = 1.0
    reduce: Reduce = unreduced

    @staticmethod
    def dense(a: Tensor, block: int | None = None) -> RowBlocks:
        """View a tensor of shape (..., rows, columns) as a batch of matrices."""
        a = a.detach().reshape(-1, *a.shape[-2:]).float()
        shape = (a.shape[0], a.shape[1], a.shape[2])
        return RowBlocks(shape, lambda i, j: a[:, i:j].clone(), block or max(1, a.shape[1]), a.device)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the row ranges, in order."""
        m = self.shape[1]
        for i in range(0, m, self.block):
            yield i, min(i + self.block, m)

    def times(self, x: Tensor) -> Tensor:
        """A X for X of shape (batch, columns, k); the rows held here."""
        b, m, _ = self.shape
        out = x.new_empty(b, m, x.shape[-1])
        inner = None if self.u is None else (self.u.mT @ x).mul_(self.decay)
        for i, j in self.spans():
            s = self.rows(i, j)
            if inner is None or self.q is None:
                out[:, i:j] = s @ x
            elif b == 1:
                torch.addmm(s[0] @ x[0], self.q[0, i:j], inner[0], out=out[0, i:j])
            else:
                out[:, i:j] = torch.baddbmm(s @ x, self.q[:, i:j], inner)
        return out

    def transposed_times(self, y: Tensor) -> Tensor:
        """Aᵀ Y for Y of shape (batch, rows held here, k); summed over all rows."""
        b, _, n = self.shape
        out = y.new_zeros(b, n, y.shape[-1])
        for i, j in self.spans():
            s = self.rows(i, j)
            if b == 1:
                out[0].addmm_(s[0].T, y[0, i:j])
            else:
                out.baddbmm_(s.mT, y[:, i:j])
        if self.u is not None and self.q is not None:
            out.baddbmm_(self.u, self.q.mT @ y, alpha=self.decay)
        return self.reduce(out)

    def entries(self, i: int, j: int, q: Tensor | None = None, u: Tensor | None = None) -> Tensor:
        """Rows i..j of A, less those of q uᵀ when given; float32 of shape (batch, j - i, columns)."""
        a = self.rows(i, j)
        if self.q is not None and self.u is not None:
            a.baddbmm_(self.q[:, i:j], self.u.mT, alpha=self.decay)
        if q is not None and u is not None:
            a.baddbmm_(q[:, i:j], u.mT, alpha=-1)
        return a

    def squared_norm(self, scale: Tensor, q: Tensor | None = None, u: Tensor | None = None) -> Tensor:
        """‖(A - q uᵀ) / scale‖_F² as float64 of shape (batch,), without the subtraction of two nearly equal sums."""
        total = torch.zeros(self.shape[0], dtype=torch.float64, device=self.device)
        for i, j in self.spans():
            a = self.entries(i, j, q, u).div_(scale)
            total += torch.linalg.vector_norm(a, dim=(1, 2)).double().square_()
        return self.reduce(total)

    def scale(self) -> Tensor:
        """The size of A's largest entry, (batch, 1, 1): squares of A / scale neither overflow nor vanish."""
        top = torch.zeros(self.shape[0], 1, 1, device=self.device)
        for i, j in self.spans():
            top = torch.maximum(top, self.entries(i, j).abs_().amax(dim=(1, 2), keepdim=True))
        return _nonzero(self.reduce(top))


def orthonormalize(y: Tensor, reduce: Reduce = unreduced) -> Tensor:
    """Orthonormal columns with the span of y's, in the order of a QR factorization.

    Cholesky QR, twice (Yamamoto, Nakatsukasa, Yanagisawa, Fukaya, 2015): only products and a k x k factorization, so it
    batches, and needs one small sum when the rows are spread over processes. Where the columns are too dependent for
    float32 it is done in float64, and where they are exactly dependent the eigenvectors of the Gram matrix take over: a
    direction that is not there becomes a zero column, which contributes nothing to any product.

    Args:
        y: (batch, rows, k), float32; any scale. It is overwritten: a second copy of a tall factor would be the
            largest thing that a step allocates.
        reduce: sums over the processes that hold the other rows.
    """
    y.div_(_nonzero(reduce(_column_max(y))))
    if y.shape[-1] == 0:
        return y
    for dtype in (torch.float32, torch.float64):
        # A pass that fails leaves the span as it was, so that the next dtype can go on from there.
        z = y.to(dtype)
        if all(_cholesky_qr_(z, reduce, _PIVOT_FLOOR[dtype]) for _ in range(2)):
            return z.to(y.dtype)
    if not bool(torch.isfinite(reduce(z.sum())).all()):
        return torch.full_like(y, torch.nan)
    for _ in range(2):
        values, vectors = torch.linalg.eigh(reduce(z.mT @ z))
        values, vectors = values.flip(-1), vectors.flip(-1)
        keep = values > _NULL_FLOOR * values[..., :1].clamp(min=0)
        weight = torch.where(keep, values, 1.0).rsqrt() * keep
        z = z @ (vectors * weight.unsqueeze(-2))
    return z.to(y.dtype)


def _cholesky_qr_(y: Tensor, reduce: Reduce, floor: float) -> bool:
    """Orthonormalize the columns of `y` in place; False, with `y` untouched, if they are too dependent."""
    gram = reduce(y.mT @ y)
    size = gram.diagonal(dim1=-2, dim2=-1)
    inverse = torch.where(size > 0, size, 1.0).rsqrt()
    gram = gram * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    # A zero column has nothing to normalize: a one on the diagonal passes it through unchanged.
    gram.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    factor, info = torch.linalg.cholesky_ex(gram)
    smallest = factor.diagonal(dim1=-2, dim2=-1).amin()
    if bool(info.ne(0).any() | ~(smallest > floor)):
        return False
    one = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device).expand_as(factor)
    turn = torch.linalg.solve_triangular(factor.mT, one, upper=True)
    _turn_columns_(y, inverse.unsqueeze(-1) * turn)
    return True


def _turn_columns_(y: Tensor, turn: Tensor) -> None:
    """y = y turn in place, in row blocks."""
    rows = max(1, _TURN_BLOCK // max(1, y.shape[0] * y.shape[-1]))
    for i in range(0, y.shape[-2], rows):
        y[:, i : i + rows] = y[:, i : i + rows] @ turn


def _column_max(y: Tensor) -> Tensor:
    if y.shape[-2] == 0:
        return y.new_zeros(*y.shape[:-2], 1, y.shape[-1])
    return y.abs().amax(dim=-2, keepdim=True)


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 1.0)


def _unit_columns(x: Tensor) -> Tensor:
    x = x / _nonzero(_column_max(x))
    return x / _nonzero(torch.linalg.vector_norm(x, dim=-2, keepdim=True))


def gaussian(columns: int, seeds: list[int], device: torch.device) -> Draw:
    """`draw(k)`: the next k Gaussian columns (batch, columns, k), each matrix's from a generator of its own.

    Args:
        columns: columns of the matrices.
        seeds: one per matrix, so that what one matrix gets does not depend on how matrices are batched.
        device: where the numbers are wanted. They are drawn on the CPU: every device sees the same.
    """
    generators: list[torch.Generator] = []

    def draw(k: int) -> Tensor:
        if not generators:
            generators.extend(torch.Generator().manual_seed(seed) for seed in seeds)
        return torch.stack([torch.randn(columns, k, generator=g) for g in generators]).to(device)

    return draw


def s_rsi(a: RowBlocks, k: int, draw: Draw, *, oversampling: int = 5, iterations: int = 5) -> tuple[Tensor, Tensor]:
    """Streamlined randomized subspace iteration from noise (Zhao et al., 2024, Algorithm 1).

    Args:
        a: the matrices.
        k: rank.
        draw: gives Gaussian columns.
        oversampling: extra columns carried along; the first k are returned, as in the paper.
        iterations: power iterations.

    Returns:
        Q (batch, rows, k), orthonormal, and U = Aᵀ Q (batch, columns, k).
    """
    u = draw(k + oversampling)
    q = u
    for _ in range(iterations):
        q = orthonormalize(a.times(_unit_columns(u)), a.reduce)
        u = a.transposed_times(q)
    return q[..., :k].contiguous(), u[..., :k].contiguous()


def follow(a: RowBlocks, u: Tensor, draw: Draw, *, iterations: int = 1) -> tuple[Tensor, Tensor]:
    """Subspace iteration from the previous factor: for a matrix that moved a little since `u` was its factor.

    Args:
        a: the matrices.
        u: (batch, columns, k), the previous U. Zero columns, which could never grow again, are drawn afresh.
        draw: gives Gaussian columns.
        iterations: power iterations; each passes over A twice.

    Returns:
        Q (batch, rows, k), orthonormal, and U = Aᵀ Q (batch, columns, k).
    """
    q = u
    for _ in range(max(1, iterations)):
        x = _unit_columns(u)
        gone = x.abs().sum(dim=-2, keepdim=True) == 0
        if bool(gone.any()):
            x = torch.where(gone, draw(u.shape[-1]), x)
        q = orthonormalize(a.times(x), a.reduce)
        u = a.transposed_times(q)
    return q, u


@dataclass(frozen=True)
class Factors:
    """A ≈ Q Uᵀ with the columns in the order of their singular values.

    Args:
        q: (batch, rows, k), orthonormal or zero columns.
        u: (batch, columns, k) = Aᵀ Q, orthogonal columns.
        rank: per matrix, the fewest leading columns that meet the error asked for (or the cap).
        error: per matrix, ‖A - Q Uᵀ‖_F / ‖A‖_F when cut at `rank`.
    """

    q: Tensor
    u: Tensor
    rank: list[int]
    error: list[float]


def fixed_precision(
    a: RowBlocks,
    xi: float,
    cap: int,
    draw: Draw,
    *,
    start: Tensor | None = None,
    oversampling: int = 5,
    iterations: int = 1,
) -> Factors:
    """The smallest rank whose relative error is at most xi, found by growing one basis.

    Blocks of an orthonormal basis are added (Yu, Gu, Li, 2018, randQB_EI) until ‖A‖² - ‖QᵀA‖² says that the error is
    met; then the basis is rotated to the singular directions and cut. The error is the subtraction while that has
    digits left and a pass over the residual below. Blocks double, so that passes grow with log(rank).

    Args:
        a: the matrices.
        xi: the relative Frobenius error to reach, ≥ 0; 0 asks for the rank `cap`.
        cap: the largest rank returned.
        draw: gives Gaussian columns.
        start: (batch, columns, k): directions to begin with, or None.
        oversampling: columns beyond the cap (and beyond `start`) that are tried before cutting.
        iterations: power iterations per block.
    """
    _, m, n = a.shape
    scale = a.scale()
    norm = a.squared_norm(scale)
    limit = min(cap + oversampling, n)
    first = draw(min(limit, cap if xi == 0 else 1) + oversampling)
    seeds = first if start is None else torch.cat([_unit_columns(start), first[..., :oversampling]], -1)
    seeds = seeds[..., :limit]
    q, u = seeds.new_empty(a.shape[0], m, 0), seeds.new_empty(a.shape[0], n, 0)
    while True:
        block_q, block_u = _extend(a, q, u, seeds, scale, iterations)
        q, u = (block_q, block_u) if not q.shape[-1] else (torch.cat([q, block_q], -1), torch.cat([u, block_u], -1))
        del block_q, block_u
        lost = norm - u.double().square().sum(dim=(1, 2))
        if bool((lost < _CANCELLATION * norm).any()):
            lost = a.squared_norm(scale, q, u * scale)
        width = q.shape[-1]
        if width >= limit or bool((lost <= xi**2 * norm).all()):
            break
        seeds = draw(min(limit - width, max(8, width)))
    return _rotate_and_cut(q, u, scale, norm, lost.clamp(min=0), xi, cap)


def _extend(a: RowBlocks, q: Tensor, u: Tensor, seeds: Tensor, scale: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """New basis columns for what q uᵀ leaves of A / scale, and their factor."""
    block_q, block_u = seeds, seeds
    for _ in range(max(1, iterations)):
        x = _unit_columns(block_u)
        y = a.times(x).div_(scale)
        if q.shape[-1]:
            # Twice: what one projection leaves along q is rounding error relative to A, not to the residual.
            y.baddbmm_(q, u.mT @ x, alpha=-1)
            y = orthonormalize(y, a.reduce)
            y.baddbmm_(q, a.reduce(q.mT @ y), alpha=-1)
        block_q = orthonormalize(y, a.reduce)
        block_u = a.transposed_times(block_q).div_(scale)
    return block_q, block_u


def _rotate_and_cut(q: Tensor, u: Tensor, scale: Tensor, norm: Tensor, lost: Tensor, xi: float, cap: int) -> Factors:
    gram = u.mT.double() @ u.double()
    if not bool(torch.isfinite(gram).all()):
        rank = min(cap, q.shape[-1])
        return Factors(q[..., :rank], u[..., :rank] * scale, [rank] * len(q), [math.nan] * len(q))
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(-1).clamp(min=0), vectors.flip(-1)
    # What a cut at j columns loses: the residual plus the tail, both sums of positive numbers.
    tail = values.flip(-1).cumsum(-1).flip(-1)
    after = torch.cat([tail[..., 1:], torch.zeros_like(tail[..., :1])], -1) + lost.unsqueeze(-1)
    met = after <= xi**2 * norm.unsqueeze(-1)
    cap = min(cap, q.shape[-1])
    counts = q.shape[-1] - met.sum(-1) + 1
    ranks = [min(cap, int(count)) for count in counts.tolist()]
    turn = vectors.to(q.dtype)
    _turn_columns_(q, turn)
    width = max(ranks)
    safe = torch.where(norm > 0, norm, 1.0)
    errors = [float((after[b, rank - 1] / safe[b]).sqrt()) for b, rank in enumerate(ranks)]
    return Factors(q[..., :width], (u @ turn[..., :width]).mul_(scale), ranks, errors)


def relative_error(a: RowBlocks, q: Tensor, u: Tensor) -> list[float]:
    """‖A - Q Uᵀ‖_F / ‖A‖_F per matrix, by a pass over the residual; 0 for A = 0."""
    scale = a.scale()
    norm = a.squared_norm(scale)
    lost = a.squared_norm(scale, q, u)
    return (lost / torch.where(norm > 0, norm, 1.0)).sqrt().tolist()


def next_rank(k: int, error: float, xi: float, cap: int) -> int:
    """The rank to try after rank k missed the error, for the paper's policy of restarts.

    The paper grows the rank by a sigmoid-shaped function of the error whose constants it does not give. Ours: grow by a
    factor between 1.5 (just missed) and 2 (far off), by at least 1: k · (1 + σ(ln(error / xi))).
    """
    share = error / (error + xi) if error > 0 else 0.5
    return min(cap, max(k + 1, round(k * (1 + share))))


def adaptive_s_rsi(
    a: RowBlocks, xi: float, cap: int, draw: Draw, *, start_rank: int = 1, oversampling: int = 5, iterations: int = 5
) -> Factors:
    """The paper's rank search: restart S-RSI from noise with a larger rank until the error is met or the cap reached.

    Args and return value as `fixed_precision`; one rank for the whole batch (Zhao et al., 2024, Algorithm 2; the growth
    rule is `next_rank`'s).
    """
    k = min(start_rank, cap)
    while True:
        q, u = s_rsi(a, k, draw, oversampling=min(oversampling, a.shape[2] - k), iterations=iterations)
        errors = relative_error(a, q, u)
        if max(errors) <= xi or k >= cap:
            return Factors(q, u, [k] * len(errors), errors)
        k = next_rank(k, max(errors), xi, cap)
