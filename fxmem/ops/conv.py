"""Convolutions: the input is kept only for a trainable weight.

The derivative with respect to the input is made of the weight alone, that with respect to the bias of nothing but the
incoming gradient. Torch keeps the input all the same. The kernels called here, forward and backward, are torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._prims_common import make_channels_last_strides_for, make_contiguous_strides_for

from fxmem.ops.common import (
    NO_GRADIENT,
    Layout,
    Rule,
    Site,
    Verdict,
    autocast_dtype,
    cast,
    engaged,
    form,
    ntuple,
    weight_trains,
)
from fxmem.ops.pad import pad

_library = torch.library.Library("fxmem", "FRAGMENT")
_library.define(
    "convolution_backward_input(Tensor grad, Tensor weight, SymInt[] size, bool channels_last, SymInt[] stride, "
    "SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)


def _strides(size: tuple[int, ...] | list[int], channels_last: bool) -> Sequence[int]:
    return make_channels_last_strides_for(size) if channels_last else make_contiguous_strides_for(size)


@functools.lru_cache(maxsize=256)
def _input_layout(size: tuple[int, ...], channels_last: bool, dtype: torch.dtype) -> Layout:
    return Layout(size, tuple(_strides(size, channels_last)), dtype)


def _backward_input(grad: Tensor, weight: Tensor, size: list[int], channels_last: bool, *options: Any) -> Tensor:
    """The gradient of a convolution's input, which kernels compute in the memory format of the input that they get."""
    # A kernel makes contiguous what it gets, so a whole tensor is had more cheaply than an expanded one.
    if type(grad) is Tensor and grad.device.type == "cpu":
        stand_in = _input_layout(tuple(size), channels_last, grad.dtype).stand_in(grad)
    else:
        stand_in = grad.new_empty_strided(size, _strides(size, channels_last))
    result: Tensor = torch.ops.aten.convolution_backward.default(grad, stand_in, weight, None, *options, [True, False, False])[
        0
    ]
    return result


for _key in ("CPU", "CUDA"):
    _library.impl("convolution_backward_input", _backward_input, _key)
torch.library.register_fake("fxmem::convolution_backward_input", _backward_input, lib=_library)


class _Convolution(torch.autograd.Function):
    """``aten::convolution`` with a frozen weight; ``options`` are its arguments from the stride on."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, *options: Any
    ) -> Tensor:
        ctx.dtype, ctx.options = dtype, options
        ctx.layout = Layout.of(input)
        ctx.bias = None if bias is None else (bias.shape[0], bias.dtype)
        ctx.save_for_backward(weight)
        if dtype is None:
            return torch.convolution(input, weight, bias, *options)
        with torch.autocast(input.device.type, enabled=False):
            return torch.convolution(input, cast(weight, dtype), cast(bias, dtype), *options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        grad_input, _, grad_bias = torch.ops.aten.convolution_backward(
            grad,
            ctx.layout.stand_in(grad),
            cast(weight, ctx.dtype),
            None if ctx.bias is None else [ctx.bias[0]],
            *ctx.options,
            [ctx.needs_input_grad[0], False, ctx.needs_input_grad[2]],
        )
        if grad_bias is not None:
            grad_bias = grad_bias.to(ctx.bias[1])
        return (grad_input, None, grad_bias, None, *(None for _ in ctx.options))


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Tensor:
    dtype = autocast_dtype(input)
    input = input if dtype is None else cast(input, dtype)
    batched = input.dim() == weight.dim()
    out: Tensor = _Convolution.apply(
        input if batched else input.unsqueeze(0),
        weight,
        bias,
        dtype,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
    )
    return out if batched else out.squeeze(0)


def _served(input: Tensor, weight: Tensor, bias: Tensor | None, dims: int) -> bool:
    if not engaged(input, weight, bias) or weight.dim() != dims + 2 or input.dim() not in (dims + 1, dims + 2):
        return False
    # With complex numbers torch composes several real convolutions.
    return input.is_floating_point() and weight.is_floating_point()


def _same_padding(input: Tensor, weight: Tensor, stride: list[int], dilation: list[int]) -> tuple[Tensor, list[int]]:
    """Padding "same" as torch does it: evenly inside the convolution, a surplus on the right by padding before."""
    if any(s != 1 for s in stride):
        raise RuntimeError("padding='same' is not supported for strided convolutions")
    total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if any(t % 2 for t in total):
        surplus: list[int] = []
        for t in reversed(total):
            surplus += [0, t % 2]
        input = F.pad(input, surplus)
    return input, [t // 2 for t in total]


def _make_conv(dims: int, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def conv(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Tensor:
        unknown = isinstance(padding, str) and padding not in ("same", "valid")
        if unknown or not _served(input, weight, bias, dims) or weight.requires_grad:
            return stock(input, weight, bias, stride, padding, dilation, groups)
        strides, dilations = ntuple(stride, dims), ntuple(dilation, dims)
        if padding == "same":
            input, paddings = _same_padding(input, weight, strides, dilations)
        else:
            paddings = [0] * dims if isinstance(padding, str) else ntuple(padding, dims)
        return _convolution(input, weight, bias, strides, paddings, dilations, False, [0] * dims, groups)

    return form(_document(conv, stock))


def _make_conv_transpose(dims: int, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def conv_transpose(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        groups: int = 1,
        dilation: int | Sequence[int] = 1,
    ) -> Tensor:
        if not _served(input, weight, bias, dims) or weight.requires_grad:
            return stock(input, weight, bias, stride, padding, output_padding, groups, dilation)
        return _convolution(
            input,
            weight,
            bias,
            ntuple(stride, dims),
            ntuple(padding, dims),
            ntuple(dilation, dims),
            True,
            ntuple(output_padding, dims),
            groups,
        )

    return form(_document(conv_transpose, stock))


def _document(function: Callable[..., Tensor], stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    name = stock.__name__
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"``torch.nn.functional.{name}`` that keeps its input only for a trainable weight; same arguments."
    return function


conv1d = _make_conv(1, F.conv1d)
conv2d = _make_conv(2, F.conv2d)
conv3d = _make_conv(3, F.conv3d)
conv_transpose1d = _make_conv_transpose(1, F.conv_transpose1d)
conv_transpose2d = _make_conv_transpose(2, F.conv_transpose2d)
conv_transpose3d = _make_conv_transpose(3, F.conv_transpose3d)


def _module_conv(module: Any, conv: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    padding = module.padding
    if module.padding_mode != "zeros":
        input = pad(input, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        padding = 0
    return conv(input, weight, bias, module.stride, padding, module.dilation, module.groups)


class SelectiveConv1d(nn.Conv1d):
    """``torch.nn.Conv1d`` that keeps its input only for a trainable weight."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _module_conv(self, conv1d, input, weight, bias)


class SelectiveConv2d(nn.Conv2d):
    """``torch.nn.Conv2d`` that keeps its input only for a trainable weight."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _module_conv(self, conv2d, input, weight, bias)


class SelectiveConv3d(nn.Conv3d):
    """``torch.nn.Conv3d`` that keeps its input only for a trainable weight."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _module_conv(self, conv3d, input, weight, bias)


def _module_conv_transpose(
    module: Any, conv: Callable[..., Tensor], dims: int, input: Tensor, output_size: list[int] | None
) -> Tensor:
    padding = module._output_padding(
        input, output_size, module.stride, module.padding, module.kernel_size, dims, module.dilation
    )
    return conv(input, module.weight, module.bias, module.stride, module.padding, padding, module.groups, module.dilation)


class SelectiveConvTranspose1d(nn.ConvTranspose1d):
    """``torch.nn.ConvTranspose1d`` that keeps its input only for a trainable weight."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Applies the transposed convolution."""
        return _module_conv_transpose(self, conv_transpose1d, 1, input, output_size)


class SelectiveConvTranspose2d(nn.ConvTranspose2d):
    """``torch.nn.ConvTranspose2d`` that keeps its input only for a trainable weight."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Applies the transposed convolution."""
        return _module_conv_transpose(self, conv_transpose2d, 2, input, output_size)


class SelectiveConvTranspose3d(nn.ConvTranspose3d):
    """``torch.nn.ConvTranspose3d`` that keeps its input only for a trainable weight."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Applies the transposed convolution."""
        return _module_conv_transpose(self, conv_transpose3d, 3, input, output_size)


def _check(site: Site) -> Verdict:
    if site.needs("weight"):
        if site.needs("input") and getattr(site.module, "padding_mode", "zeros") in ("reflect", "replicate"):
            return Verdict(True, f"kept as it is padded, not twice: {site.name('weight')} requires grad")
        return weight_trains(site)
    if not site.needs("input") and not site.needs("bias"):
        return NO_GRADIENT
    return Verdict(True, f"dropped: {site.name('weight')} is frozen, and nothing else needs the input")


RULE = Rule(
    name="conv",
    eager="its input; under autocast a low-precision copy of the weight",
    needed="its input for a trainable weight, else nothing",
    check=_check,
    modules={
        nn.Conv1d: SelectiveConv1d,
        nn.Conv2d: SelectiveConv2d,
        nn.Conv3d: SelectiveConv3d,
        nn.ConvTranspose1d: SelectiveConvTranspose1d,
        nn.ConvTranspose2d: SelectiveConvTranspose2d,
        nn.ConvTranspose3d: SelectiveConvTranspose3d,
    },
    functions={
        F.conv1d: conv1d,
        F.conv2d: conv2d,
        F.conv3d: conv3d,
        F.conv_transpose1d: conv_transpose1d,
        F.conv_transpose2d: conv_transpose2d,
        F.conv_transpose3d: conv_transpose3d,
    },
)
