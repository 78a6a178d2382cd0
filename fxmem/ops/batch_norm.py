"""Batch norm in eval mode: the input is kept only for a trainable weight.

With fixed statistics batch norm is an affine map per channel: its derivative with respect to the input is made of the
weight and the running variance. In train mode the derivative needs the input, and torch's own op runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxmem.ops.common import NO_GRADIENT, Layout, Rule, Site, Verdict, engaged, form, weight_trains


class _BatchNormEval(torch.autograd.Function):
    """Batch norm with fixed statistics and a frozen weight."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        ctx.eps, ctx.layout = eps, Layout.of(input)
        ctx.save_for_backward(mean, var, weight)
        return F.batch_norm(input, mean, var, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mean, var, weight = ctx.saved_tensors
        # With fixed statistics the kernel makes the input's gradient of grad alone, but reads an input on the way, for
        # sums that only a weight gradient needs. Any tensor of the input's layout does: grad itself if it can.
        fits = Layout.of(grad) == ctx.layout and not grad.requires_grad
        unused = mean.new_empty(0)  # the batch's own statistics, as torch's eval mode saves them
        grad_input, _, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad,
            grad if fits else ctx.layout.stand_in(grad),
            weight,
            mean,
            var,
            unused,
            unused,
            False,
            ctx.eps,
            [ctx.needs_input_grad[0], False, ctx.needs_input_grad[4]],
        )
        return grad_input, None, None, None, grad_bias, None


@form
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.batch_norm`` that keeps its input, outside of training, only for a trainable weight.

    Args:
        input: (N, C, ...).
        running_mean: (C).
        running_var: (C).
        weight: (C), or None.
        bias: (C), or None.
        training: whether to use the batch's own statistics; torch's op runs then.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
    """
    served = not training and running_mean is not None and running_var is not None and input.numel() > 0
    if (
        not served
        or (weight is not None and weight.requires_grad)
        or not engaged(input, running_mean, running_var, weight, bias)
    ):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return _BatchNormEval.apply(input, running_mean, running_var, weight, bias, eps)


def _forward(module: Any, stock: Any, input: Tensor) -> Tensor:
    # Without running statistics batch norm trains whatever the mode, and in train mode it counts batches.
    if module.training or module.running_mean is None or module.running_var is None:
        return stock(input)
    module._check_input_dim(input)
    return batch_norm(input, module.running_mean, module.running_var, module.weight, module.bias, False, 0.0, module.eps)


class SelectiveBatchNorm1d(nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` that keeps its input in eval mode only for a trainable weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes."""
        return _forward(self, super().forward, input)


class SelectiveBatchNorm2d(nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` that keeps its input in eval mode only for a trainable weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes."""
        return _forward(self, super().forward, input)


class SelectiveBatchNorm3d(nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` that keeps its input in eval mode only for a trainable weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes."""
        return _forward(self, super().forward, input)


def _check(site: Site) -> Verdict:
    if site.needs("weight"):
        return weight_trains(site, " in eval mode")
    if not site.needs("input") and not site.needs("bias"):
        return NO_GRADIENT
    module = site.module
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if module.running_mean is None or module.running_var is None:
            return Verdict(False, "kept: it has no running statistics, so the derivative needs the input")
        if module.training:
            return Verdict(
                True,
                "kept in train mode, where the derivative needs the input; dropped in eval mode",
                "eval() on this module drops its input",
            )
    elif site.arguments.get("training", False) is not False:
        return Verdict(False, "kept: with the batch's own statistics the derivative needs the input")
    return Verdict(True, "dropped: the statistics are fixed and the weight is frozen")


RULE = Rule(
    name="batch_norm",
    eager="its input",
    needed="in eval mode its input for a trainable weight, else nothing; in train mode its input",
    check=_check,
    modules={
        nn.BatchNorm1d: SelectiveBatchNorm1d,
        nn.BatchNorm2d: SelectiveBatchNorm2d,
        nn.BatchNorm3d: SelectiveBatchNorm3d,
    },
    functions={F.batch_norm: batch_norm},
)
