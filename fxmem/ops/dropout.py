"""Dropout: one bit per element in place of the noise.

On CPU torch keeps the noise as floats, on CUDA as one byte per element. The random numbers drawn are torch's own, in
the same order, and the generator ends in the same state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from fxmem.ops.common import NO_GRADIENT, Rule, Site, Verdict, engaged, intercepted, is_dense, is_leaf_memory
from fxmem.ops.packing import dense_stride, pack_nonzero, scale_backward


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, p: float, inplace: bool) -> Tensor:
        if input.device.type == "cpu":
            noise = torch.empty_like(input).bernoulli_(1 - p)
            ctx.stride = dense_stride(noise)
            packed = pack_nonzero(noise)
            noise.div_(1 - p)
            # The scale as the noise has it, rounded to the dtype.
            ctx.scale = float(torch.ones((), dtype=input.dtype).div_(1 - p)) if not _is_fake(input) else 1 / (1 - p)
            if inplace:
                output = input.mul_(noise)
            else:
                output = noise.mul_(input) if is_dense(input) else input * noise
        else:
            output, mask = torch.native_dropout(input, p, True)
            ctx.stride = dense_stride(mask)
            packed = pack_nonzero(mask)
            ctx.scale = 1 / (1 - p)
            if inplace:
                output = input.copy_(output)
        if inplace:
            ctx.mark_dirty(input)
        ctx.save_for_backward(packed)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        (packed,) = ctx.saved_tensors
        return scale_backward(grad, packed, ctx.stride, ctx.scale), None, None


def _is_fake(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, nn.Parameter)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.dropout`` that keeps one bit per element for backward.

    Args:
        input: any shape, floating-point.
        p: probability of zeroing an element.
        training: whether to drop at all.
        inplace: whether to overwrite ``input``.
    """
    if intercepted(input):
        return handle_torch_function(dropout, (input,), input, p=p, training=training, inplace=inplace)
    served = training and 0 < p < 1 and input.is_floating_point() and input.numel() > 0
    if not served or not engaged(input) or (inplace and is_leaf_memory(input)) or input.device.type not in ("cpu", "cuda"):
        return F.dropout(input, p, training, inplace)
    return _Dropout.apply(input, p, inplace)


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
