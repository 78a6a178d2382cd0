"""Reflecting and replicating padding: the input only for its shape.

The derivative adds up what was copied, for which the kernel needs no value of the input. (Constant and circular padding
are made of ops that keep nothing.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxmem.ops.common import NO_GRADIENT, Layout, Rule, Site, Verdict, engaged, form

aten = torch.ops.aten

# By mode and number of padded dimensions: torch's forward and backward kernels.
_KERNELS = {
    ("reflect", 1): (aten.reflection_pad1d, aten.reflection_pad1d_backward),
    ("reflect", 2): (aten.reflection_pad2d, aten.reflection_pad2d_backward),
    ("reflect", 3): (aten.reflection_pad3d, aten.reflection_pad3d_backward),
    ("replicate", 1): (aten.replication_pad1d, aten.replication_pad1d_backward),
    ("replicate", 2): (aten.replication_pad2d, aten.replication_pad2d_backward),
    ("replicate", 3): (aten.replication_pad3d, aten.replication_pad3d_backward),
}


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, padding: list[int], mode: str) -> Tensor:
        forward, ctx.backward = _KERNELS[mode, len(padding) // 2]
        ctx.layout, ctx.padding = Layout.of(input), padding
        return forward(input, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Nothing is saved, but to ask for it is what makes a second backward raise as torch's own does.
        _ = ctx.saved_tensors
        return ctx.backward(grad, ctx.layout.stand_in(grad), ctx.padding), None, None


@form
def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """``torch.nn.functional.pad`` that keeps nothing for backward where it reflects or replicates.

    Args:
        input: (N, C, ...) or (C, ...), floating-point; any shape for the other modes.
        pad: how much before and after, from the last dimension on.
        mode: ``"constant"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        value: what to fill with in constant mode.
    """
    dims = len(pad) // 2
    served = value is None and input.is_floating_point() and input.numel() > 0 and engaged(input)
    if not served or (mode, dims) not in _KERNELS or len(pad) % 2 or input.dim() not in (dims + 1, dims + 2):
        return F.pad(input, pad, mode, value)
    # On CUDA torch then takes another way for one of them.
    if torch.are_deterministic_algorithms_enabled() and input.device.type != "cpu":
        return F.pad(input, pad, mode, value)
    return _Pad.apply(input, list(pad), mode)


class SelectiveReflectionPad1d(nn.ReflectionPad1d):
    """``torch.nn.ReflectionPad1d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Pads."""
        return pad(input, self.padding, "reflect")


class SelectiveReflectionPad2d(nn.ReflectionPad2d):
    """``torch.nn.ReflectionPad2d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Pads."""
        return pad(input, self.padding, "reflect")


class SelectiveReflectionPad3d(nn.ReflectionPad3d):
    """``torch.nn.ReflectionPad3d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Pads."""
        return pad(input, self.padding, "reflect")


class SelectiveReplicationPad1d(nn.ReplicationPad1d):
    """``torch.nn.ReplicationPad1d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Pads."""
        return pad(input, self.padding, "replicate")


class SelectiveReplicationPad2d(nn.ReplicationPad2d):
    """``torch.nn.ReplicationPad2d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Pads."""
        return pad(input, self.padding, "replicate")


class SelectiveReplicationPad3d(nn.ReplicationPad3d):
    """``torch.nn.ReplicationPad3d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Pads."""
        return pad(input, self.padding, "replicate")


def _check(site: Site) -> Verdict:
    if not site.needs("input"):
        return NO_GRADIENT
    if site.module is None and site.arguments.get("mode", "constant") in ("constant", "circular"):
        return Verdict(False, "nothing to save: torch keeps nothing here")
    return Verdict(True, "dropped: only the input's shape is needed")


RULE = Rule(
    name="pad",
    eager="its input, where it reflects or replicates",
    needed="nothing",
    check=_check,
    modules={
        nn.ReflectionPad1d: SelectiveReflectionPad1d,
        nn.ReflectionPad2d: SelectiveReflectionPad2d,
        nn.ReflectionPad3d: SelectiveReflectionPad3d,
        nn.ReplicationPad1d: SelectiveReplicationPad1d,
        nn.ReplicationPad2d: SelectiveReplicationPad2d,
        nn.ReplicationPad3d: SelectiveReplicationPad3d,
    },
    functions={F.pad: pad},
)
