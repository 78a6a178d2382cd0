"""Linear: under autocast, no low-precision copy of a frozen weight.

Torch's own linear already keeps its input only for a trainable weight. Under autocast, though, it keeps the
low-precision copy of every weight; here the weight itself is kept, which costs nothing, and cast again in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxmem.ops.common import NO_GRADIENT, Rule, Site, Verdict, autocast_dtype, cast, engaged, form, weight_trains


class _Linear(torch.autograd.Function):
    """Linear with a frozen weight in another dtype."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        ctx.column_major = input.dim() == 2 and input.stride() == (1, input.shape[0])
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None)
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input, weight.to(dtype), cast(bias, dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        grad_input = grad_bias = None
        if weight is not None:
            weight = weight.to(ctx.dtype)
            # Torch gives the gradient of a matrix product the layout of the operand.
            grad_input = weight.t().mm(grad.t()).t() if ctx.column_major else torch.matmul(grad, weight)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum_to_size(grad.shape[-1:]).to(ctx.bias_dtype)
        return grad_input, None, grad_bias, None


@form
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` that keeps no low-precision copy of the weight under autocast.

    Args:
        input: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features), or None.
    """
    dtype = autocast_dtype(input)
    served = dtype is not None and weight.dtype not in (dtype, torch.float64) and weight.is_floating_point()
    if not served or weight.requires_grad or input.dim() < 2 or not engaged(input, weight, bias):
        return F.linear(input, weight, bias)
    return _Linear.apply(input.to(dtype), weight, bias, dtype)


class SelectiveLinear(nn.Linear):
    """``torch.nn.Linear`` that keeps no low-precision copy of a frozen weight under autocast."""

    def forward(self, input: Tensor) -> Tensor:
        """Applies the affine map."""
        return linear(input, self.weight, self.bias)


def _check(site: Site) -> Verdict:
    if site.needs("weight"):
        return weight_trains(site)
    if not site.needs("input"):
        return NO_GRADIENT
    return Verdict(True, "nothing kept: the weight is frozen, and under autocast no copy of it is kept either")


RULE = Rule(
    name="linear",
    eager="its input for a trainable weight; under autocast a low-precision copy of the weight",
    needed="its input for a trainable weight",
    check=_check,
    modules={nn.Linear: SelectiveLinear},
    functions={F.linear: linear},
)
