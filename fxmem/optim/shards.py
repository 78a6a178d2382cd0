"""DTensor parameters: decisions from the global shape, sums over the processes that hold the other rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxmem.errors import OptimizerError
from fxmem.optim.layout import Layout

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard
except ImportError:  # A torch built without distributed has no DTensor to meet.
    DTensor = None  # type: ignore[assignment,misc]


@dataclass(frozen=True)
class Shards:
    """How a parameter is spread over processes.

    Args:
        mesh: the device mesh, or None for a parameter that is whole here.
        dims: the mesh dimensions over which sums are taken.
        transposed: whether the columns are spread, so that the matrix is worked on transposed.
        elements: elements of the whole matrix, or None where they are all here.
        offset: position of the first matrix here in a stack that is spread over processes.
    """

    mesh: Any = None
    dims: tuple[int, ...] = ()
    transposed: bool = False
    elements: int | None = None
    offset: int = 0

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the processes that hold the other rows; every process gets the same bits."""
        for dim in self.dims:
            x = x.contiguous()
            torch.distributed.all_reduce(x, group=self.mesh.get_group(dim))
        return x

    def count(self, here: int) -> int:
        """Elements of the whole matrix of which `here` are held here."""
        return here if self.elements is None else self.elements


WHOLE = Shards()


def is_sharded(p: Tensor) -> bool:
    """Whether `p` is a DTensor."""
    return DTensor is not None and isinstance(p, DTensor)


def full_shape(p: Tensor) -> torch.Size:
    """The global shape (a DTensor's own)."""
    return p.shape


def local_part(p: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return p.to_local() if is_sharded(p) else p  # type: ignore[attr-defined]


def shards_of(p: Tensor, plan: Layout | None, name: str) -> Shards:
    """How a parameter with this layout is spread.

    Args:
        p: the parameter.
        plan: its layout, None for a dense second moment.
        name: for the error.

    Raises:
        OptimizerError: a placement in which neither rows nor columns are whole.
    """
    if not is_sharded(p):
        return WHOLE
    placements = p.placements  # type: ignore[attr-defined]
    mesh = p.device_mesh  # type: ignore[attr-defined]
    spread = [(i, x) for i, x in enumerate(placements) if not isinstance(x, Replicate)]
    if not spread:
        return Shards(mesh)
    dims = tuple(i for i, _ in spread)
    plain = all(type(x) is Shard for _, x in spread)
    if plan is None and all(hasattr(x, "dim") for _, x in spread):
        # Element by element: only the root mean square needs a sum.
        return Shards(mesh, dims, elements=p.numel())
    matrix_dims = {x.dim for _, x in spread} if plain else set()
    if plan is not None and len(spread) == 1 and plan.stacked and matrix_dims == {0}:
        local = p.to_local().shape[0]  # type: ignore[attr-defined]
        size, rank = mesh.size(dims[0]), mesh.get_local_rank(dims[0])
        chunk = -(-plan.batch // size)
        return Shards(mesh, (), offset=min(plan.batch, rank * chunk) if local else 0)
    if plan is not None and len(spread) == 1 and not plan.stacked and matrix_dims == {0}:
        return Shards(mesh, dims, elements=p.numel())
    if plan is not None and len(spread) == 1 and p.ndim == 2 and matrix_dims == {1}:
        return Shards(mesh, dims, transposed=True, elements=p.numel())
    raise OptimizerError(
        f"Adapprox cannot factorize a DTensor placed as {tuple(placements)}.",
        where=name,
        remedy="Shard it along its first or (a matrix) second dimension over one mesh dimension, or put it in a group "
        "with rank=0, which keeps its second moment dense.",
    )


def wrap_factor(x: Tensor, name: str, p: Tensor, plan: Layout, shards: Shards) -> Tensor:
    """A factor as it is kept: for a sharded parameter a DTensor, spread as the rows are.

    Args:
        x: what this process holds of Q or U.
        name: "q" or "u".
        p: the parameter.
        plan: its layout.
        shards: how it is spread.
    """
    if shards.mesh is None:
        return x
    stack = (plan.batch,) if plan.stacked else ()
    rows, columns = (plan.columns, plan.rows) if shards.transposed else (plan.rows, plan.columns)
    shape = torch.Size((*stack, rows if name == "q" else columns, x.shape[-1]))
    spread = [not isinstance(pl, Replicate) for pl in p.placements]  # type: ignore[attr-defined]
    along_first = name == "q" or plan.stacked
    placements = [Shard(0) if s and along_first else Replicate() for s in spread]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x.contiguous(), shards.mesh, placements, run_check=False, shape=shape, stride=stride)
