"""Reading and writing by index: integers alone are kept.

The derivatives move the incoming gradient to where the elements came from. Of floating-point operands they read the shape
alone, but torch keeps those whole. (Indexing with brackets, ``index_select``, ``scatter`` and ``scatter_add`` keep integers in
torch too.)

Left out: ``put`` and ``index_reduce``, rare in models; ``scatter_reduce`` of a product, maximum or minimum, whose
derivatives read what was reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxmem.ops.common import NO_GRADIENT, Layout, Rule, Site, Verdict, engaged, form, is_leaf_memory

aten = torch.ops.aten


class _Gather(torch.autograd.Function):
    """``gather``, or if ``wrap`` is set ``take_along_dim``, which counts negative indices from the end."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int, index: Tensor, wrap: bool) -> Tensor:
        ctx.shape, ctx.dim, ctx.wrap = input.shape, dim, wrap
        ctx.save_for_backward(index)
        return torch.gather(input, dim, _wrapped(index, input.shape[dim]) if wrap else index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        if ctx.wrap:
            index = _wrapped(index, ctx.shape[ctx.dim])
        return grad.new_zeros(ctx.shape).scatter_add_(ctx.dim, index, grad), None, None, None


def _wrapped(index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, index: Tensor) -> Tensor:
        ctx.layout = Layout.of(input)
        ctx.save_for_backward(index)
        return torch.take(input, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return ctx.layout.zeros(grad).put_(index, grad, accumulate=True), None


class _MaskedSelect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, mask: Tensor) -> Tensor:
        ctx.layout = Layout.of(input)
        ctx.save_for_backward(mask)
        return torch.masked_select(input, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return aten.masked_select_backward(grad, ctx.layout.stand_in(grad), mask), None


class _IndexWrite(torch.autograd.Function):
    """``index_add`` or ``index_copy``, or their in-place forms, which is what ``run`` does."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, dim: int, index: Tensor, source: Tensor, run: Callable[..., Tensor], alpha: Any, inplace: bool
    ) -> Tensor:
        ctx.dim, ctx.alpha, ctx.shape = dim, alpha, source.shape
        ctx.save_for_backward(index)
        if inplace:
            ctx.mark_dirty(input)
        return run(input, dim, index, source) if alpha is None else run(input, dim, index, source, alpha=alpha)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        to_input = to_source = None
        if ctx.needs_input_grad[0]:
            to_input = grad.index_fill(ctx.dim, index, 0) if ctx.alpha is None else grad
        if ctx.needs_input_grad[3]:
            if ctx.shape:
                to_source = grad.index_select(ctx.dim, index).expand(ctx.shape)
            else:
                to_source = grad.index_select(ctx.dim, index.squeeze(0))
            if ctx.alpha not in (None, 1):
                to_source = to_source * ctx.alpha
        return to_input, None, None, to_source, None, None, None


class _ScatterReduce(torch.autograd.Function):
    """``scatter_reduce`` by sum or mean."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, include_self: bool) -> Tensor:
        ctx.dim, ctx.reduce, ctx.include_self = dim, reduce, include_self
        ctx.layout = Layout.of(src)
        ctx.save_for_backward(index)
        return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        dim, to_input, to_src = ctx.dim, grad, None
        if ctx.reduce == "mean":
            count = torch.ones_like(grad) if ctx.include_self else torch.zeros_like(grad)
            one = grad.new_ones(()).expand(ctx.layout.shape)
            count = count.scatter_add(dim, index, one)
            count.masked_fill_(count == 0, 1)
            to_input = grad / count
            if ctx.needs_input_grad[3]:
                to_src = grad.gather(dim, index) / count.gather(dim, index)
        elif ctx.needs_input_grad[3]:
            to_src = grad.gather(dim, index)
        if not ctx.needs_input_grad[0]:
            return None, None, None, to_src, None, None
        if not ctx.include_self:
            to_input = to_input.scatter(dim, index, 0)
        return to_input, None, None, to_src, None, None


@form
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """``torch.gather`` that keeps its index alone.

    Args:
        input: any shape.
        dim: along which to index.
        index: int64, as many dimensions as ``input``.
        sparse_grad: whether the gradient is to be sparse; torch's op runs then.
    """
    if sparse_grad or not engaged(input, index):
        return torch.gather(input, dim, index, sparse_grad=sparse_grad)
    return _Gather.apply(input, dim, index, False)


@form
def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """``torch.take_along_dim`` that keeps its index alone.

    Args:
        input: any shape.
        indices: int64; broadcast against ``input`` but for ``dim``.
        dim: along which to index; None for ``input`` flattened.
    """
    fits = dim is not None and input.dim() == indices.dim() and indices.dtype == torch.int64 and input.dim() > 0
    if not fits or dim is None or not engaged(input, indices):
        return torch.take_along_dim(input, indices, dim)
    # As torch composes it; what does not broadcast is torch's to refuse.
    wanted, given = list(input.shape), list(indices.shape)
    wanted[dim], given[dim] = indices.shape[dim], input.shape[dim]
    try:
        indices = indices.expand(torch.broadcast_shapes(wanted, indices.shape))
        input = input.expand(torch.broadcast_shapes(given, input.shape))
    except RuntimeError:
        return torch.take_along_dim(input, indices, dim)
    return _Gather.apply(input, dim, indices, True)


@form
def take(input: Tensor, index: Tensor) -> Tensor:
    """``torch.take`` that keeps its index alone.

    Args:
        input: any shape.
        index: int64, into ``input`` flattened.
    """
    return _Take.apply(input, index) if engaged(input, index) else torch.take(input, index)


@form
def masked_select(input: Tensor, mask: Tensor) -> Tensor:
    """``torch.masked_select`` that keeps its mask alone.

    Args:
        input: any shape.
        mask: bool, broadcast against ``input``.
    """
    return _MaskedSelect.apply(input, mask) if engaged(input, mask) else torch.masked_select(input, mask)


def _writes(input: Tensor, index: Tensor, source: Tensor, inplace: bool = False) -> bool:
    """Whether our form of a write may run: torch's keeps ``source`` where that requires grad, else integers alone."""
    if not engaged(input, index, source) or not source.requires_grad or index.dim() > 1:
        return False
    return not (inplace and input.requires_grad and is_leaf_memory(input))


@form
def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    """``torch.index_add`` that keeps its index alone.

    Args:
        input: any shape.
        dim: along which to add.
        index: int32 or int64, one for each slice of ``source``.
        source: what to add.
        alpha: what to multiply it by.
    """
    if not _writes(input, index, source):
        return torch.index_add(input, dim, index, source, alpha=alpha)
    return _IndexWrite.apply(input, dim, index, source, torch.index_add, alpha, False)


@form
def index_add_(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    """``torch.Tensor.index_add_`` that keeps its index alone."""
    if not _writes(input, index, source, True):
        return input.index_add_(dim, index, source, alpha=alpha)
    return _IndexWrite.apply(input, dim, index, source, Tensor.index_add_, alpha, True)


@form
def index_copy(input: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``torch.index_copy`` that keeps its index alone.

    Args:
        input: any shape.
        dim: along which to write.
        index: int64, one for each slice of ``source``.
        source: what to write.
    """
    if not _writes(input, index, source):
        return torch.index_copy(input, dim, index, source)
    return _IndexWrite.apply(input, dim, index, source, torch.index_copy, None, False)


@form
def index_copy_(input: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``torch.Tensor.index_copy_`` that keeps its index alone."""
    if not _writes(input, index, source, True):
        return input.index_copy_(dim, index, source)
    return _IndexWrite.apply(input, dim, index, source, Tensor.index_copy_, None, True)


@form
def scatter_reduce(input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True) -> Tensor:
    """``torch.scatter_reduce`` that keeps its index alone for a sum or a mean.

    Args:
        input: any shape.
        dim: along which to reduce.
        index: int64, as many dimensions as ``input``.
        src: what to reduce into ``input``.
        reduce: ``"sum"`` or ``"mean"``; torch's op runs for the others.
        include_self: whether the elements of ``input`` take part.
    """
    if reduce not in ("sum", "mean") or not engaged(input, index, src):
        return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self)
    return _ScatterReduce.apply(input, dim, index, src, reduce, include_self)


_SHAPE = Verdict(True, "dropped: only the input's shape is needed")


def _check_read(site: Site) -> Verdict:
    if not site.needs("input"):
        return NO_GRADIENT
    if site.arguments.get("sparse_grad", False) is not False:
        return Verdict(False, "kept: its gradient is sparse")
    return _SHAPE


def _check_write(site: Site) -> Verdict:
    if not site.needs("source"):
        return Verdict(False, "nothing to save: torch keeps integers alone") if site.needs("input") else NO_GRADIENT
    return Verdict(True, "dropped: only the shape of what is written is needed")


def _check_reduce(site: Site) -> Verdict:
    if not site.needs("input") and not site.needs("src"):
        return NO_GRADIENT
    if site.arguments.get("reduce") not in ("sum", "mean"):
        return Verdict(False, "kept: the derivative reads what was reduced")
    return Verdict(True, "dropped: the derivative of a sum or mean needs the index alone")


RULES = (
    Rule(
        name="gather",
        eager="its input and the index",
        needed="the index",
        check=_check_read,
        functions={
            torch.gather: gather,
            torch.take_along_dim: take_along_dim,
            torch.take: take,
            torch.masked_select: masked_select,
        },
        methods={"gather": gather, "take_along_dim": take_along_dim, "take": take, "masked_select": masked_select},
    ),
    Rule(
        name="index_add",
        eager="what it writes, if that requires grad, and the index",
        needed="the index",
        check=_check_write,
        functions={torch.index_add: index_add, torch.index_copy: index_copy},
        methods={
            "index_add": index_add,
            "index_add_": index_add_,
            "index_copy": index_copy,
            "index_copy_": index_copy_,
        },
    ),
    Rule(
        name="scatter_reduce",
        eager="its input, what it reduces into that, the result and the index",
        needed="the index for a sum or mean, else the same",
        check=_check_reduce,
        functions={torch.scatter_reduce: scatter_reduce},
        methods={"scatter_reduce": scatter_reduce},
    ),
)
