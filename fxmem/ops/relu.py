"""ReLU: one bit per element in place of the output.

Torch keeps the output of a ReLU although its derivative only asks whether each element is positive. The bit is
enough, as long as nobody else keeps the output anyway: whether to use it is therefore decided per call, not per module.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxmem.ops.common import NO_GRADIENT, Rule, Site, Verdict, engaged, form, is_leaf_memory
from fxmem.ops.packing import dense_stride, relu_pack, threshold_backward


class _ReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, inplace: bool) -> Tensor:
        if inplace:
            ctx.mark_dirty(input)
        output, packed = relu_pack(input, inplace)
        ctx.stride = dense_stride(output)
        ctx.save_for_backward(packed)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (packed,) = ctx.saved_tensors
        return threshold_backward(grad, packed, ctx.stride), None


@form
def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.relu`` that keeps one bit per element for backward.

    Args:
        input: any shape, floating-point.
        inplace: whether to overwrite ``input``.
    """
    if not _served(input, inplace):
        return F.relu(input, inplace)
    return _ReLU.apply(input, inplace)


@form
def relu_(input: Tensor) -> Tensor:
    """``torch.relu_`` that keeps one bit per element for backward."""
    if not _served(input, True):
        return torch.relu_(input)
    return _ReLU.apply(input, True)


def _served(input: Tensor, inplace: bool) -> bool:
    return engaged(input) and input.is_floating_point() and not (inplace and is_leaf_memory(input))


class SelectiveReLU(nn.ReLU):
    """``torch.nn.ReLU`` that keeps one bit per element for backward.

    Args of a call:
        input: any shape, floating-point.
        pack: False at the calls whose output somebody else keeps anyway; torch's own op runs there.
    """

    def forward(self, input: Tensor, pack: bool = True) -> Tensor:
        """Applies ReLU."""
        return relu(input, self.inplace) if pack else F.relu(input, self.inplace)


def _check(site: Site) -> Verdict:
    if not site.needs("input"):
        return NO_GRADIENT
    return Verdict(True, "dropped: the derivative of ReLU needs one bit per element", instead_of="output")


RULE = Rule(
    name="relu",
    eager="its output",
    needed="1 bit per element, or nothing where the output is kept anyway",
    check=_check,
    modules={nn.ReLU: SelectiveReLU},
    functions={F.relu: relu, torch.relu: relu, F.relu_: relu_, torch.relu_: relu_},
    methods={"relu": relu, "relu_": relu_},
)
