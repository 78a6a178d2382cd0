"""What the packing ops are made of, for compilers that generate code: Inductor fuses these with their neighbours.

A bit's place is told by logical position, not by memory order, so that the compiler is free in its choice of layouts: the
tensor is cut into eight equal parts along dimensions of even size, and bit ``j`` of a byte belongs to part ``j``.
The packed tensor keeps the number of dimensions. As in the ops themselves there is one byte for eight elements; where the
sizes do not split (or are symbolic) nothing is decomposed and the op stays one call. Packing and unpacking agree
because both go by the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxmem.ops.activation import ABOVE, BELOW

_BITS = 8


def _factors(shape: Sequence[Any]) -> list[int] | None:
    """Into how many parts each dimension is cut, eight in all; None where that does not come out even."""
    factors, left = [1] * len(shape), _BITS
    # Channels last: they may be innermost in memory, and what is left of few channels is less than a vector.
    for dim in sorted(range(len(shape)), key=lambda d: d == 1 and len(shape) in (4, 5)):
        size = shape[dim]
        while left > 1 and isinstance(size, int) and size > 0 and size % 2 == 0:
            factors[dim] *= 2
            size, left = size // 2, left // 2
    return factors if left == 1 else None


def _parts(shape: Sequence[Any], factors: list[int]) -> tuple[list[Any], list[int]]:
    """The shape with the parts as dimensions of their own, and which dimensions these are."""
    cut: list[Any] = []
    dims: list[int] = []
    for size, factor in zip(shape, factors, strict=True):
        if factor > 1:
            dims.append(len(cut))
            cut.append(factor)
        cut.append(size if factor == 1 else size // factor)
    return cut, dims


def _powers(cut: list[Any], dims: list[int], device: torch.device) -> Tensor:
    """The power of two of every part, shaped to broadcast over the cut tensor."""
    number, step = torch.zeros((), dtype=torch.int32, device=device), 1
    for dim in reversed(dims):
        view = [1] * len(cut)
        view[dim] = cut[dim]
        number = number + torch.arange(cut[dim], dtype=torch.int32, device=device).mul(step).view(view)
        step *= cut[dim]
    return torch.bitwise_left_shift(torch.ones_like(number), number)


def _pack(mask: Tensor) -> Any:
    factors = _factors(mask.shape)
    if factors is None:
        return NotImplemented
    cut, dims = _parts(mask.shape, factors)
    # Floats are what the generated code vectorizes best; a byte is exact in them.
    powers = _powers(cut, dims, mask.device).to(torch.float32)
    return torch.where(mask.reshape(cut), powers, 0.0).sum(dims).to(torch.uint8)


def _unpack(packed: Tensor, shape: Sequence[Any]) -> Any:
    factors = _factors(shape)
    if factors is None:
        return NotImplemented
    cut, dims = _parts(shape, factors)
    spread = packed
    for dim in dims:
        spread = spread.unsqueeze(dim)
    # Bit j is set where the number divided by 2 ** j and rounded down is odd.
    inverse = _powers(cut, dims, packed.device).to(torch.float32).reciprocal()
    half = torch.floor(spread.to(torch.float32) * inverse) * 0.5
    return (half != torch.floor(half)).reshape(list(shape))


def _pack_nonzero(input: Tensor) -> Any:
    return _pack(input != 0)


def _relu_pack(input: Tensor) -> Any:
    output = torch.relu(input)
    packed = _pack(output != 0)
    return packed if packed is NotImplemented else (output, packed)


# As Inductor's own derivatives have it: where each is not zero.
_PIECES: dict[str, Callable[..., Tensor]] = {
    "positive": lambda x: x > 0,
    "negative": lambda x: x < 0,
    "above": ABOVE,
    "below": BELOW,
    "clamp": lambda x, low, high: ABOVE(x, low) & BELOW(x, high),
    "hardtanh": lambda x, low, high: ~((x <= low) | (x >= high)),
    "hardsigmoid": lambda x: (x > -3) & (x < 3),
    "threshold": lambda x, bound: ~(x <= bound),
    "hardshrink": lambda x, bound: ~((x >= -bound) & (x <= bound)),
    "softshrink": lambda x, bound: ~((x >= -bound) & (x <= bound)),
}


def _pack_piece(input: Tensor, kind: str, bounds: Sequence[float]) -> Any:
    return _pack(_PIECES[kind](input, *bounds))


def _unpack_op(packed: Tensor, size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype) -> Any:
    mask = _unpack(packed, size)
    return mask if mask is NotImplemented else mask.to(dtype)


def _masked(derive: Callable[..., Tensor]) -> Callable[..., Any]:
    def backward(grad: Tensor, packed: Tensor, stride: Sequence[Any], *rest: float) -> Any:
        mask = _unpack(packed, grad.shape)
        return mask if mask is NotImplemented else derive(mask, grad, *rest)

    return backward


def decompositions() -> dict[Any, Callable[..., Any]]:
    """By op overload, its decomposition into aten ops, which returns ``NotImplemented`` where there is none."""
    ops = torch.ops.fxmem
    passed = _masked(lambda mask, grad: torch.where(mask, grad, 0))
    return {
        ops.pack_nonzero.default: _pack_nonzero,
        ops.relu_pack.default: _relu_pack,
        ops.pack_piece.default: _pack_piece,
        ops.unpack.default: _unpack_op,
        ops.threshold_backward.default: passed,
        ops.hardtanh_backward.default: passed,
        ops.leaky_backward.default: _masked(lambda mask, grad, slope: torch.where(mask, grad, grad * slope)),
        ops.scale_backward.default: _masked(lambda mask, grad, scale: grad * torch.where(mask, scale, 0.0).to(grad.dtype)),
    }
