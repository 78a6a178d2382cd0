"""What a kernel holds while it runs beyond its results, where that is large and known ahead.

On CPU, oneDNN's convolutions reorder their operands into blocked layouts of their own and their results back, and the backward
of batch norm allocates the input's gradient twice. The sequences of allocations were read off the profiler. What else kernels
hold (cuDNN, scratch of some KiB) is not counted.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_BLOCK = 16
_LARGE_PATCH = 256
_LARGEST_PATCH = 1024


def workspace(func: Any, args: tuple[Any, ...], results: list[Tensor]) -> int:
    """Most bytes that ``func`` holds beyond its operands before it returns, its results among them; 0 if those are all.

    Args:
        func: an ATen op.
        args: its arguments, fake or real.
        results: what it returned.
    """
    aten = torch.ops.aten
    if func is aten.convolution.default:
        x, weight, _, *geometry = args
        if _reorders(x, weight, geometry):
            return _forward(x, weight, sum(map(_nbytes, results)))
    elif func is aten.convolution_backward.default:
        gradient, x, weight, _, *geometry, mask = args
        if _reorders(x, weight, geometry):
            return _backward(gradient, x, weight, geometry, mask)
    elif func is aten.native_batch_norm_backward.default and args[9][0] and args[1].device.type == "cpu":
        return sum(map(_nbytes, results)) + _nbytes(args[1])
    return 0


def _forward(x: Tensor, weight: Tensor, y: int) -> int:
    if _channels_last(x):
        return y + 2 * _nbytes(weight)
    return max((0 if _few(x) else _nbytes(x)) + _nbytes(weight) + y, 2 * y)


def _backward(gradient: Tensor, x: Tensor, weight: Tensor, geometry: list[Any], mask: list[bool]) -> int:
    stride, _, _, _, _, groups = geometry
    g, i, w = _nbytes(gradient), _nbytes(x), _nbytes(weight)
    area = math.prod(weight.shape[2:])
    padded = w
    if _few(weight) and groups == 1:
        padded = w * (_BLOCK if area < _LARGEST_PATCH else _BLOCK // 2) // weight.shape[1]
    made = i if mask[0] else 0
    if _channels_last(x):
        return made + 2 * padded + (w if mask[1] else 0)
    by_input = by_weight = 0
    if mask[0]:
        # A strided one comes back channels last, and is copied once more.
        copies = 3 if groups == 1 and max(stride) > 1 else 2
        by_input = max(g + padded + i, copies * i)
    if mask[1]:
        if _few(x) and area >= _LARGE_PATCH:
            by_weight = made + 5 * w + i // max(x.shape[0], 1)
        else:
            by_weight = made + max((0 if _few(x) else i) + g + w, 2 * w)
    return max(by_input, by_weight)


def _reorders(x: Tensor, weight: Tensor, geometry: list[Any]) -> bool:
    """Whether oneDNN computes it, and not as the matrix product that a pointwise convolution is."""
    if x.device.type != "cpu" or x.dim() != weight.dim():
        return False
    stride, padding, dilation, transposed, output_padding, groups = geometry
    if not transposed and groups == 1 and all(n == 1 for n in (*weight.shape[2:], *stride)) and not any(padding):
        return False
    chosen = torch._C._select_conv_backend(x, weight, None, stride, padding, dilation, transposed, output_padding, groups)
    return str(chosen).endswith(".Mkldnn")


def _few(tensor: Tensor) -> bool:
    """Whether it has too few channels for a block."""
    return tensor.shape[1] < _BLOCK


def _channels_last(x: Tensor) -> bool:
    """Whether oneDNN takes it as it is."""
    last: Any = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return not x.is_contiguous() and last is not None and x.is_contiguous(memory_format=last)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
