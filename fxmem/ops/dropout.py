"""Dropout: one bit per element in place of the noise.

On CPU torch keeps the noise as floats, on CUDA as one byte per element. The random numbers drawn are torch's own, in
the same order, and the generator ends in the same state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxmem.ops.common import NO_GRADIENT, PLAIN, Rule, Site, Verdict, engaged, form, is_dense, is_leaf_memory
from fxmem.ops.packing import dense_stride, pack_nonzero, scale_backward


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, p: float, inplace: bool, stride: tuple[int, ...], scale: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        if input.device.type == "cpu":
            noise = torch.empty_like(input).bernoulli_(1 - p)
            packed = pack_nonzero(noise)
            noise.div_(1 - p)
            if inplace:
                output = input.mul_(noise)
            else:
                output = noise.mul_(input) if is_dense(input) else input * noise
        else:
            output, mask = torch.native_dropout(input, p, True)
            packed = pack_nonzero(mask)
            if inplace:
                output = input.copy_(output)
        ctx.stride, ctx.scale = stride, scale
        ctx.save_for_backward(packed)
        if inplace:
            # Of several results none may be a view that is changed in place.
            ctx.mark_dirty(input)
            return output
        ctx.mark_non_differentiable(packed)
        return output, packed

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, None, None, None, None]:
        (packed,) = ctx.saved_tensors
        return scale_backward(grad, packed, ctx.stride, ctx.scale), None, None, None, None


Mask = tuple[Tensor, tuple[int, ...], float]
"""Packed bits, the strides of what was packed, and the scale of what is not dropped."""


def _run(input: Tensor, p: float, inplace: bool) -> tuple[Tensor, Mask | None]:
    stride = tuple(input.stride()) if is_dense(input) else dense_stride(torch.empty_like(input, device="meta"))
    scale = 1 / (1 - p)
    if input.device.type == "cpu" and not _is_fake(input):
        # The scale as the noise has it, rounded to the dtype.
        scale = float(torch.ones((), dtype=input.dtype).div_(1 - p))
    if inplace:
        return _Dropout.apply(input, p, True, stride, scale), None
    output, packed = _Dropout.apply(input, p, False, stride, scale)
    return output, (packed, stride, scale)


def _is_fake(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, nn.Parameter)


def _served(input: Tensor, p: float) -> bool:
    return 0 < p < 1 and input.is_floating_point() and input.numel() > 0 and input.device.type in ("cpu", "cuda")


def _ours(input: Tensor) -> bool:
    return engaged(input) or (type(input) in PLAIN and not torch._C._are_functorch_transforms_active())


def dropout_with_mask(input: Tensor, p: float) -> tuple[Tensor, Mask | None]:
    """``dropout`` in training, and what ``dropout_again`` takes; None where torch's own op runs.

    Args:
        input: any shape, floating-point.
        p: probability of zeroing an element.
    """
    return _run(input, p, False) if _served(input, p) and _ours(input) else (F.dropout(input, p), None)


def dropout_again(input: Tensor, mask: Mask) -> Tensor:
    """What ``dropout_with_mask`` returned for the same input.

    Args:
        input: any shape, floating-point.
        mask: as it was returned besides.
    """
    return scale_backward(input, *mask)


@form
def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.dropout`` that keeps one bit per element for backward.

    Args:
        input: any shape, floating-point.
        p: probability of zeroing an element.
        training: whether to drop at all.
        inplace: whether to overwrite ``input``.
    """
    if not training or not _served(input, p) or not engaged(input) or (inplace and is_leaf_memory(input)):
        return F.dropout(input, p, training, inplace)
    return _run(input, p, inplace)[0]


def _torch_dropout(input: Tensor, p: float, train: bool) -> Tensor:
    return dropout(input, p, train)


class SelectiveDropout(nn.Dropout):
    """``torch.nn.Dropout`` that keeps one bit per element for backward."""

    def forward(self, input: Tensor) -> Tensor:
        """Applies dropout in train mode."""
        return dropout(input, self.p, self.training, self.inplace)


def _check(site: Site) -> Verdict:
    if not site.needs("input"):
        return NO_GRADIENT
    p = site.module.p if isinstance(site.module, nn.Dropout) else site.arguments.get("p", 0.5)
    if p in (0, 1):
        return Verdict(False, f"nothing to save: p is {p}")
    if site.module is None and site.arguments.get("training", site.arguments.get("train", True)) is False:
        return Verdict(False, "nothing to save: it does not drop outside of training")
    return Verdict(True, "dropped: the derivative of dropout needs one bit per element")


RULE = Rule(
    name="dropout",
    eager="the noise, as floats on CPU and bytes on CUDA",
    needed="1 bit per element",
    check=_check,
    modules={nn.Dropout: SelectiveDropout},
    functions={F.dropout: dropout, torch.dropout: _torch_dropout},
)
