"""Pooling: the input only for its shape, and a maximum's position as one byte within its window.

Average pooling's derivative is made of the incoming gradient and the input's shape. Max pooling's needs to know which
element of each window won: torch keeps an index of 64 bits into the whole plane, and the input for its shape. The place
within the window fits in a byte.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxmem.ops.common import NO_GRADIENT, Layout, Rule, Site, Verdict, engaged, form, ntuple
from fxmem.ops.packing import flat, fused

aten = torch.ops.aten

_BLOCK = 1 << 17


_library = torch.library.Library("fxmem", "FRAGMENT")
_WINDOWS = ", ".join(f"SymInt[] {name}" for name in ("strides", "divisors", "paddings", "counts", "steps", "widths", "sizes"))
_library.define(f"window_offsets(Tensor indices, {_WINDOWS}) -> Tensor")
_library.define(f"window_indices(Tensor offsets, {_WINDOWS}) -> Tensor")


@dataclass(frozen=True)
class _Windows:
    """Where the windows of one max pooling lie in a plane.

    An index into the plane is the origin of the window plus one of few distances; an offset numbers the distances. Along a
    dimension, window ``i`` starts at ``i * stride // divisor - padding``, which is negative in the padding.

    Args:
        strides: per spatial dimension, see above; for adaptive pooling the input's size.
        divisors: per dimension, see above; for adaptive pooling the output's size.
        paddings: per dimension, see above.
        counts: per dimension, the number of windows.
        steps: per dimension, the distance between a window's elements.
        widths: per dimension, the number of a window's elements.
        sizes: per dimension, the input's size.
    """

    strides: list[int]
    divisors: list[int]
    paddings: list[int]
    counts: list[int]
    steps: list[int]
    widths: list[int]
    sizes: list[int]

    def arguments(self) -> tuple[list[int], ...]:
        """As the registered ops take it."""
        return (self.strides, self.divisors, self.paddings, self.counts, self.steps, self.widths, self.sizes)

    @property
    def _planes(self) -> list[int]:
        return [math.prod(self.sizes[d + 1 :]) for d in range(len(self.sizes))]

    def distances(self) -> list[int]:
        """The distance from a window's origin for each offset."""
        places = itertools.product(*(range(0, w * s, s) for w, s in zip(self.widths, self.steps, strict=True)))
        return [sum(i * p for i, p in zip(place, self._planes, strict=True)) for place in places]

    def origins(self, device: torch.device) -> Tensor:
        """The index of every window's origin, int64, in the shape of the output's spatial dimensions."""
        total = torch.zeros((), dtype=torch.int64, device=device)
        for dim, (count, plane) in enumerate(zip(self.counts, self._planes, strict=True)):
            first = torch.arange(count, device=device).mul_(self.strides[dim])
            first = first.div_(self.divisors[dim], rounding_mode="floor").sub_(self.paddings[dim]).mul_(plane)
            total = total + first.view(-1, *[1] * (len(self.counts) - 1 - dim))
        return total


def _inner(tensor: Tensor, dims: int) -> int | None:
    """How many neighbours in memory have the same place in the plane: 1, or the channels if they come last; else None."""
    if tensor.is_contiguous():
        return 1
    last = tensor.movedim(-dims - 1, -1)
    return last.shape[-1] if last.is_contiguous() else None


def _offsets_impl(indices: Tensor, *windows: list[int]) -> Tensor:
    where = _Windows(*windows)
    out = torch.empty_like(indices, dtype=torch.uint8)
    kernels, inner = fused(indices.device), _inner(indices, len(where.counts))
    if kernels and inner:
        kernels.pool(indices, out, inner, windows, forward=True)
        return out
    origins, distances = where.origins(indices.device), torch.tensor(where.distances(), device=indices.device)
    # Two places at the same distance have the same index: either number brings it back.
    number = torch.zeros(int(max(where.distances())) + 1, dtype=torch.uint8, device=indices.device)
    number[distances] = torch.arange(distances.numel(), dtype=torch.uint8, device=indices.device)
    rows = indices.shape[0]
    if indices.device.type == "cpu" and indices.numel() > _BLOCK:
        rows = max(1, _BLOCK * rows // indices.numel())
    for part, target in zip(indices.split(rows), out.split(rows), strict=True):
        torch.index_select(number, 0, flat(part.sub(origins)), out=flat(target))
    return out


def _indices_impl(offsets: Tensor, *windows: list[int]) -> Tensor:
    where = _Windows(*windows)
    out = torch.empty_like(offsets, dtype=torch.int64)
    kernels, inner = fused(offsets.device), _inner(offsets, len(where.counts))
    if kernels and inner:
        kernels.pool(out, offsets, inner, windows, forward=False)
        return out
    distances = torch.tensor(where.distances(), device=offsets.device)
    block = _BLOCK if offsets.device.type == "cpu" else max(offsets.numel(), 1)
    for part, target in zip(flat(offsets).split(block), flat(out).split(block), strict=True):
        torch.index_select(distances, 0, part.to(torch.int32), out=target)
    return out.add_(where.origins(offsets.device))


for _device in ("CPU", "CUDA"):
    _library.impl("window_offsets", _offsets_impl, _device)
    _library.impl("window_indices", _indices_impl, _device)
torch.library.register_fake(
    "fxmem::window_offsets", lambda indices, *_: torch.empty_like(indices, dtype=torch.uint8), lib=_library
)
torch.library.register_fake(
    "fxmem::window_indices", lambda offsets, *_: torch.empty_like(offsets, dtype=torch.int64), lib=_library
)


_MOST = 256  # that an offset of one byte can tell apart


class _MaxPool(torch.autograd.Function):
    """Max pooling, regular or adaptive: ``options`` are the arguments of the forward and backward kernels."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, forward: Any, backward: Any, windows: Any, *options: Any) -> Tensor:
        output, indices = forward(input, *options)
        ctx.layout, ctx.backward, ctx.options = Layout.of(input), backward, options
        ctx.windows = windows(output).arguments()
        ctx.save_for_backward(torch.ops.fxmem.window_offsets(indices, *ctx.windows))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        indices = torch.ops.fxmem.window_indices(offsets, *ctx.windows)
        options = ctx.options if ctx.backward not in _ADAPTIVE_BACKWARD else ()
        grad_input = ctx.backward(grad, ctx.layout.stand_in(grad), *options, indices)
        return (grad_input, None, None, None, *(None for _ in ctx.options))


_ADAPTIVE_BACKWARD = (aten.adaptive_max_pool2d_backward, aten.adaptive_max_pool3d_backward)


class _AvgPool(torch.autograd.Function):
    """Average pooling, regular or adaptive."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, forward: Any, backward: Any, *options: Any) -> Tensor:
        ctx.layout, ctx.backward, ctx.options = Layout.of(input), backward, options
        return forward(input, *options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Nothing is saved, but to ask for it is what makes a second backward raise as torch's own does.
        _ = ctx.saved_tensors
        options = ctx.options if ctx.backward in (aten.avg_pool2d_backward, aten.avg_pool3d_backward) else ()
        grad_input = ctx.backward(grad, ctx.layout.stand_in(grad), *options)
        return (grad_input, None, None, *(None for _ in ctx.options))


_Size = int | Sequence[int]


def _lifted(call: Callable[[Tensor], Tensor], input: Tensor, dims: int) -> Tensor:
    """Runs a 1-d pooling as the 2-d one it is in torch."""
    return call(input.unsqueeze(-2)).squeeze(-2) if dims == 1 else call(input)


def _pad(values: list[int], dims: int, fill: int) -> list[int]:
    return [fill, *values] if dims == 1 else values


def _make_max_pool(dims: int, stock: Callable[..., Any]) -> Callable[..., Any]:
    forward = aten.max_pool3d_with_indices if dims == 3 else aten.max_pool2d_with_indices
    backward = aten.max_pool3d_with_indices_backward if dims == 3 else aten.max_pool2d_with_indices_backward

    def max_pool(
        input: Tensor,
        kernel_size: _Size,
        stride: _Size | None = None,
        padding: _Size = 0,
        dilation: _Size = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        def torch_op() -> Any:
            return stock(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)

        if return_indices or not _served(input, dims):
            return torch_op()
        kernel = ntuple(kernel_size, dims)
        strides = ntuple(stride, dims) if stride not in (None, [], ()) else kernel
        paddings, dilations = ntuple(padding, dims), ntuple(dilation, dims)
        sizes = input.shape[-dims:]
        if math.prod(kernel) > _MOST:
            return torch_op()

        def windows(output: Tensor) -> _Windows:
            return _Windows(strides, [1] * dims, paddings, list(output.shape[-dims:]), dilations, kernel, list(sizes))

        options = (
            _pad(kernel, dims, 1),
            _pad(strides, dims, 1),
            _pad(paddings, dims, 0),
            _pad(dilations, dims, 1),
            ceil_mode,
        )
        return _lifted(lambda x: _MaxPool.apply(x, forward, backward, windows, *options), input, dims)

    return form(_document(max_pool, f"max_pool{dims}d", "keeps one byte per output element"))


def _make_adaptive_max_pool(dims: int, stock: Callable[..., Any]) -> Callable[..., Any]:
    forward = aten.adaptive_max_pool3d if dims == 3 else aten.adaptive_max_pool2d
    backward = aten.adaptive_max_pool3d_backward if dims == 3 else aten.adaptive_max_pool2d_backward

    def adaptive_max_pool(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        if return_indices or not _served(input, dims):
            return stock(input, output_size, return_indices)
        sizes = input.shape[-dims:]
        counts = _output_size(output_size, sizes, dims)
        firsts = [[o * n // c for o in range(c)] for n, c in zip(sizes, counts, strict=True)]
        ends = [[-(-(o + 1) * n // c) for o in range(c)] for n, c in zip(sizes, counts, strict=True)]
        widths = [max((b - a for a, b in zip(f, e, strict=True)), default=1) for f, e in zip(firsts, ends, strict=True)]
        if 0 in counts or math.prod(widths) > _MOST:
            return stock(input, output_size, return_indices)
        windows = _Windows(list(sizes), counts, [0] * dims, counts, [1] * dims, widths, list(sizes))
        options = _pad(counts, dims, 1)
        return _lifted(lambda x: _MaxPool.apply(x, forward, backward, lambda _: windows, options), input, dims)

    return form(_document(adaptive_max_pool, f"adaptive_max_pool{dims}d", "keeps one byte per output element"))


def _make_avg_pool(dims: int, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    forward = aten.avg_pool3d if dims == 3 else aten.avg_pool2d
    backward = aten.avg_pool3d_backward if dims == 3 else aten.avg_pool2d_backward

    def run(input: Tensor, kernel_size: _Size, stride: Any, padding: _Size, *rest: Any) -> Tensor:
        kernel = ntuple(kernel_size, dims)
        strides = ntuple(stride, dims) if stride not in (None, [], ()) else kernel
        options = (_pad(kernel, dims, 1), _pad(strides, dims, 1), _pad(ntuple(padding, dims), dims, 0), *rest)
        return _lifted(lambda x: _AvgPool.apply(x, forward, backward, *options), input, dims)

    if dims == 1:

        def avg_pool1d(
            input: Tensor,
            kernel_size: _Size,
            stride: _Size | None = None,
            padding: _Size = 0,
            ceil_mode: bool = False,
            count_include_pad: bool = True,
        ) -> Tensor:
            options = (kernel_size, stride, padding, ceil_mode, count_include_pad)
            if not _served(input, dims):
                return stock(input, *_without_none(options))
            return run(input, *options, None)

        return form(_document(avg_pool1d, "avg_pool1d", "keeps nothing"))

    def avg_pool(
        input: Tensor,
        kernel_size: _Size,
        stride: _Size | None = None,
        padding: _Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        options = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
        if not _served(input, dims):
            return stock(input, *_without_none(options))
        return run(input, *options)

    return form(_document(avg_pool, f"avg_pool{dims}d", "keeps nothing"))


def _without_none(options: tuple[Any, ...]) -> tuple[Any, ...]:
    kernel_size, stride, *rest = options
    return (kernel_size, kernel_size if stride is None else stride, *rest)


def _make_adaptive_avg_pool(dims: int, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    forward = aten._adaptive_avg_pool3d if dims == 3 else aten._adaptive_avg_pool2d
    backward = aten._adaptive_avg_pool3d_backward if dims == 3 else aten._adaptive_avg_pool2d_backward

    def adaptive_avg_pool(input: Tensor, output_size: Any) -> Tensor:
        counts = _pad(_output_size(output_size, input.shape[-dims:], dims), dims, 1)
        # To a single element it is a mean, of which torch keeps nothing.
        if not _served(input, dims) or all(n == 1 for n in counts):
            return stock(input, output_size)
        return _lifted(lambda x: _AvgPool.apply(x, forward, backward, counts), input, dims)

    return form(_document(adaptive_avg_pool, f"adaptive_avg_pool{dims}d", "keeps nothing"))


def _output_size(output_size: Any, sizes: Sequence[int], dims: int) -> list[int]:
    wanted = [output_size] * dims if isinstance(output_size, int) or output_size is None else list(output_size)
    return [n if w is None else w for w, n in zip(wanted, sizes, strict=True)]


def _served(input: Tensor, dims: int) -> bool:
    return engaged(input) and input.dim() in (dims + 1, dims + 2) and input.is_floating_point() and input.numel() > 0


def _document(function: Callable[..., Any], name: str, what: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"``torch.nn.functional.{name}`` that {what} for backward; same arguments."
    return function


max_pool1d = _make_max_pool(1, F.max_pool1d)
max_pool2d = _make_max_pool(2, F.max_pool2d)
max_pool3d = _make_max_pool(3, F.max_pool3d)
adaptive_max_pool1d = _make_adaptive_max_pool(1, F.adaptive_max_pool1d)
adaptive_max_pool2d = _make_adaptive_max_pool(2, F.adaptive_max_pool2d)
adaptive_max_pool3d = _make_adaptive_max_pool(3, F.adaptive_max_pool3d)
avg_pool1d = _make_avg_pool(1, F.avg_pool1d)
avg_pool2d = _make_avg_pool(2, F.avg_pool2d)
avg_pool3d = _make_avg_pool(3, F.avg_pool3d)
adaptive_avg_pool1d = _make_adaptive_avg_pool(1, F.adaptive_avg_pool1d)
adaptive_avg_pool2d = _make_adaptive_avg_pool(2, F.adaptive_avg_pool2d)
adaptive_avg_pool3d = _make_adaptive_avg_pool(3, F.adaptive_avg_pool3d)


@form
def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """``torch.nn.functional.interpolate`` that keeps nothing for backward in area mode.

    Args:
        input: (N, C, ...), floating-point.
        size: the output's spatial size.
        scale_factor: or by how much to multiply the input's.
        mode: ``"area"`` is adaptive average pooling; torch keeps nothing in the other modes.
        align_corners: torch refuses it in area mode.
        recompute_scale_factor: without effect in area mode.
        antialias: torch refuses it in area mode.
    """
    options = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    dims = input.dim() - 2
    if mode != "area" or dims not in _ADAPTIVE_AVG_POOL or not _served(input, dims):
        return F.interpolate(input, *options)
    # Torch works out the size, and refuses what it refuses, on a tensor without memory.
    shape = F.interpolate(torch.empty(input.shape, device="meta"), *options).shape
    return _ADAPTIVE_AVG_POOL[dims](input, list(shape[2:]))


_ADAPTIVE_AVG_POOL = {1: adaptive_avg_pool1d, 2: adaptive_avg_pool2d, 3: adaptive_avg_pool3d}


def _max_pool_forward(pool: Callable[..., Any], module: Any, input: Tensor) -> Any:
    return pool(
        input,
        module.kernel_size,
        module.stride,
        module.padding,
        module.dilation,
        ceil_mode=module.ceil_mode,
        return_indices=module.return_indices,
    )


class SelectiveMaxPool1d(nn.MaxPool1d):
    """``torch.nn.MaxPool1d`` that keeps one byte per output element."""

    def forward(self, input: Tensor) -> Any:
        """Pools."""
        return _max_pool_forward(max_pool1d, self, input)


class SelectiveMaxPool2d(nn.MaxPool2d):
    """``torch.nn.MaxPool2d`` that keeps one byte per output element."""

    def forward(self, input: Tensor) -> Any:
        """Pools."""
        return _max_pool_forward(max_pool2d, self, input)


class SelectiveMaxPool3d(nn.MaxPool3d):
    """``torch.nn.MaxPool3d`` that keeps one byte per output element."""

    def forward(self, input: Tensor) -> Any:
        """Pools."""
        return _max_pool_forward(max_pool3d, self, input)


class SelectiveAdaptiveMaxPool1d(nn.AdaptiveMaxPool1d):
    """``torch.nn.AdaptiveMaxPool1d`` that keeps one byte per output element."""

    def forward(self, input: Tensor) -> Any:
        """Pools."""
        return adaptive_max_pool1d(input, self.output_size, self.return_indices)


class SelectiveAdaptiveMaxPool2d(nn.AdaptiveMaxPool2d):
    """``torch.nn.AdaptiveMaxPool2d`` that keeps one byte per output element."""

    def forward(self, input: Tensor) -> Any:
        """Pools."""
        return adaptive_max_pool2d(input, self.output_size, self.return_indices)


class SelectiveAdaptiveMaxPool3d(nn.AdaptiveMaxPool3d):
    """``torch.nn.AdaptiveMaxPool3d`` that keeps one byte per output element."""

    def forward(self, input: Tensor) -> Any:
        """Pools."""
        return adaptive_max_pool3d(input, self.output_size, self.return_indices)


class SelectiveAvgPool1d(nn.AvgPool1d):
    """``torch.nn.AvgPool1d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Pools."""
        return avg_pool1d(input, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad)


class SelectiveAvgPool2d(nn.AvgPool2d):
    """``torch.nn.AvgPool2d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Pools."""
        options = (self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad)
        return avg_pool2d(input, *options, self.divisor_override)


class SelectiveAvgPool3d(nn.AvgPool3d):
    """``torch.nn.AvgPool3d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Pools."""
        options = (self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad)
        return avg_pool3d(input, *options, self.divisor_override)


class SelectiveAdaptiveAvgPool1d(nn.AdaptiveAvgPool1d):
    """``torch.nn.AdaptiveAvgPool1d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Pools."""
        return adaptive_avg_pool1d(input, self.output_size)


class SelectiveAdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """``torch.nn.AdaptiveAvgPool2d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Pools."""
        return adaptive_avg_pool2d(input, self.output_size)


class SelectiveAdaptiveAvgPool3d(nn.AdaptiveAvgPool3d):
    """``torch.nn.AdaptiveAvgPool3d`` that keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Pools."""
        return adaptive_avg_pool3d(input, self.output_size)


class SelectiveUpsample(nn.Upsample):
    """``torch.nn.Upsample`` that keeps nothing in area mode."""

    def forward(self, input: Tensor) -> Tensor:
        """Interpolates."""
        options = (self.size, self.scale_factor, self.mode, self.align_corners)
        return interpolate(input, *options, recompute_scale_factor=self.recompute_scale_factor)


def _check_max(site: Site) -> Verdict:
    if not site.needs("input"):
        return NO_GRADIENT
    indices = getattr(site.module, "return_indices", False) or site.arguments.get("return_indices", False)
    if indices is not False:
        return Verdict(False, "kept: its indices are returned, so they are alive anyway")
    return Verdict(True, "dropped: a byte tells which element of a window won, and only the input's shape is needed")


def _check_avg(site: Site) -> Verdict:
    if not site.needs("input"):
        return NO_GRADIENT
    size = getattr(site.module, "output_size", None) or site.arguments.get("output_size")
    if size == 1 or (isinstance(size, tuple | list) and all(n == 1 for n in size)):
        return Verdict(False, "nothing to save: to a single element it is a mean, of which torch keeps nothing")
    return Verdict(True, "dropped: only the input's shape is needed")


def _check_interpolate(site: Site) -> Verdict:
    if not site.needs("input"):
        return NO_GRADIENT
    mode = site.module.mode if isinstance(site.module, nn.Upsample) else site.arguments.get("mode", "nearest")
    if mode != "area":
        return Verdict(False, "nothing to save: torch keeps nothing here")
    return Verdict(True, "dropped: only the input's shape is needed")


RULES = (
    Rule(
        name="max_pool",
        eager="its input, and an index of 8 bytes per output element",
        needed="1 byte per output element (windows of at most 256 elements)",
        check=_check_max,
        modules={
            nn.MaxPool1d: SelectiveMaxPool1d,
            nn.MaxPool2d: SelectiveMaxPool2d,
            nn.MaxPool3d: SelectiveMaxPool3d,
            nn.AdaptiveMaxPool1d: SelectiveAdaptiveMaxPool1d,
            nn.AdaptiveMaxPool2d: SelectiveAdaptiveMaxPool2d,
            nn.AdaptiveMaxPool3d: SelectiveAdaptiveMaxPool3d,
        },
        functions={
            F.max_pool1d: max_pool1d,
            F.max_pool2d: max_pool2d,
            F.max_pool3d: max_pool3d,
            torch.max_pool1d: max_pool1d,
            torch.max_pool2d: max_pool2d,
            torch.max_pool3d: max_pool3d,
            F.adaptive_max_pool1d: adaptive_max_pool1d,
            F.adaptive_max_pool2d: adaptive_max_pool2d,
            F.adaptive_max_pool3d: adaptive_max_pool3d,
        },
    ),
    Rule(
        name="avg_pool",
        eager="its input",
        needed="nothing",
        check=_check_avg,
        modules={
            nn.AvgPool1d: SelectiveAvgPool1d,
            nn.AvgPool2d: SelectiveAvgPool2d,
            nn.AvgPool3d: SelectiveAvgPool3d,
            nn.AdaptiveAvgPool1d: SelectiveAdaptiveAvgPool1d,
            nn.AdaptiveAvgPool2d: SelectiveAdaptiveAvgPool2d,
            nn.AdaptiveAvgPool3d: SelectiveAdaptiveAvgPool3d,
        },
        functions={
            F.avg_pool1d: avg_pool1d,
            F.avg_pool2d: avg_pool2d,
            F.avg_pool3d: avg_pool3d,
            F.adaptive_avg_pool1d: adaptive_avg_pool1d,
            F.adaptive_avg_pool2d: adaptive_avg_pool2d,
            F.adaptive_avg_pool3d: adaptive_avg_pool3d,
        },
    ),
    Rule(
        name="interpolate",
        eager="its input in area mode",
        needed="nothing",
        check=_check_interpolate,
        modules={nn.Upsample: SelectiveUpsample},
        functions={F.interpolate: interpolate},
    ),
)
