"""Which parameters get a factored second moment, how they are seen as matrices, and how many bytes that takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """A parameter seen as `batch` matrices of `rows` x `columns`.

    Args:
        batch: number of matrices; more than one for 3-D stacks only.
        rows: rows of each.
        columns: columns of each.
        cap: the largest rank allowed, ≥ 1.
        stacked: whether the parameter is a 3-D stack, whose factors then are 3-D too.
    """

    batch: int
    rows: int
    columns: int
    cap: int
    stacked: bool

    def factor_elements(self, rank: int) -> int:
        """Elements of Q and U together at one rank."""
        return self.batch * rank * (self.rows + self.columns)


def layout(shape: Sequence[int], *, fraction: float = 0.25, rank: str | int = "spectrum", itemsize: int = 4) -> Layout | None:
    """The matrix view of a parameter, or None where its second moment stays dense.

    Matrices are themselves; convolution weights are (out, in · kernel); a 3-D tensor is a stack of matrices when its
    last two dimensions are worth factoring, and a 1-D convolution's weight otherwise. Vectors, scalars and empty
    tensors stay dense, and so does every matrix whose factors would not be smaller than the second moment that AdamW
    keeps for it.

    Args:
        shape: the global shape (a sharded parameter's, not the shard's).
        fraction: largest rank as a fraction of min(rows, columns).
        rank: the rank policy; an integer is the rank itself, 0 keeps everything dense.
        itemsize: bytes per element of the parameter, which AdamW's second moment would have. Factors have 4.
    """
    if len(shape) < 2 or math.prod(shape) == 0 or rank == 0:
        return None
    views = [(1, shape[0], math.prod(shape[1:]), False)]
    if len(shape) == 3:
        views.insert(0, (shape[0], shape[1], shape[2], True))
    for batch, rows, columns, stacked in views:
        smaller = (rows * columns * itemsize - 1) // (4 * (rows + columns))
        wanted = rank if isinstance(rank, int) else math.floor(min(rows, columns) * fraction)
        cap = min(wanted, min(rows, columns), smaller)
        if cap >= 1:
            return Layout(batch, rows, columns, cap, stacked)
    return None
