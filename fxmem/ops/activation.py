"""Piecewise linear activations: one bit per element in place of the input.

On every piece the derivative is a constant, so backward asks only which piece an element is on. Torch keeps the whole input
for that (leaky ReLU in place: its output; the other in-place forms: a copy of the input, made for the purpose).

The bits are asked of torch's own derivative kernel, applied to ones, so that what happens exactly on a boundary, for NaN and
for bounds that the dtype rounds is torch's own answer. For NaN the kernels of hardtanh, hardshrink and softshrink have two:
vector code gives 0 and scalar code the incoming gradient, and which of the two meets an element depends on its place, on the
layout of the gradient and on the number of threads. On one thread, for a gradient laid out like the output, ours is eager's.

The derivative of the absolute value has three values, because it is 0 at 0; it takes two bits. A trainable weight of
PReLU needs the input; with a frozen one a bit is enough. ``clamp`` is here too, with numbers for bounds.

Log-sigmoid is not piecewise linear, but on CPU torch keeps an exponential of the input's size beside the input; here it is
computed again, by the same kernel.

Left out: RReLU in train mode, whose noise is not piecewise constant; ``clamp`` between tensors, ``maximum``
and ``minimum``, which halve the gradient where two values are equal and keep several tensors for that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxmem.ops.common import NO_GRADIENT, Rule, Site, Verdict, engaged, form, is_dense, is_leaf_memory, weight_trains
from fxmem.ops.packing import flat, hardtanh_backward, leaky_backward, pack_flat, pack_nonzero, threshold_backward, unpack

aten = torch.ops.aten

_library = torch.library.Library("fxmem", "FRAGMENT")
_library.define("pack_piece(Tensor input, str kind, float[] bounds) -> Tensor")


def _passes_at_its_bound() -> bool:
    """Whether the derivative of clamp is 1 at a bound; there is no kernel of it to ask, and versions of torch differ."""
    with torch.inference_mode(False), torch.enable_grad(), torch._C._DisableTorchDispatch():
        x = torch.ones((), device="cpu", requires_grad=True)
        return bool(torch.autograd.grad(torch.clamp(x, min=1.0), x)[0])


ABOVE, BELOW = (torch.ge, torch.le) if _passes_at_its_bound() else (torch.gt, torch.lt)

# For each kind of piece, torch's kernel that writes something nonzero where an element is on it: (input, bounds, out).
_PIECES: dict[str, Callable[..., object]] = {
    "positive": lambda t, bounds, out: torch.gt(t, 0, out=out),
    "negative": lambda t, bounds, out: torch.lt(t, 0, out=out),
    "above": lambda t, bounds, out: ABOVE(t, *bounds, out=out),
    "below": lambda t, bounds, out: BELOW(t, *bounds, out=out),
    "clamp": lambda t, bounds, out: ABOVE(t, bounds[0], out=out).mul_(BELOW(t, bounds[1], out=torch.empty_like(out))),
    "hardtanh": lambda t, bounds, out: aten.hardtanh_backward.grad_input(_ones(t), t, *bounds, grad_input=out),
    "hardsigmoid": lambda t, bounds, out: aten.hardsigmoid_backward.grad_input(_ones(t), t, grad_input=out),
    "threshold": lambda t, bounds, out: aten.threshold_backward.grad_input(_ones(t), t, *bounds, grad_input=out),
    "hardshrink": lambda t, bounds, out: aten.hardshrink_backward.grad_input(_ones(t), t, *bounds, grad_input=out),
    "softshrink": lambda t, bounds, out: aten.softshrink_backward.grad_input(_ones(t), t, *bounds, grad_input=out),
}


def _ones(like: Tensor) -> Tensor:
    return like.new_ones(()).expand(like.shape)


def pack_piece(input: Tensor, kind: str, bounds: tuple[float, ...]) -> Tensor:
    """Packs which elements are on one piece, one bit per element in memory order.

    Args:
        input: any shape, floating-point; one that does not fill its memory is read in the order of ``torch.empty_like``.
        kind: the piece: ``"positive"``, ``"negative"``, or an activation for where its derivative is not zero.
        bounds: the activation's arguments on which its derivative depends.

    Returns:
        uint8 of ``ceil(numel / 8)`` elements.
    """
    return torch.ops.fxmem.pack_piece(input, kind, list(bounds))


def _pack_piece_impl(input: Tensor, kind: str, bounds: list[float]) -> Tensor:
    piece = _PIECES[kind]
    if not is_dense(input):
        mask = torch.empty_like(input)
        piece(input, bounds, mask)
        return pack_nonzero(mask)

    def bits(block: Tensor, out: Tensor | None) -> Tensor:
        out = torch.empty_like(block) if out is None else out
        piece(block, bounds, out)
        # Hardsigmoid's slope is not 1, and a bit must be.
        return torch.ne(out, 0, out=out) if kind == "hardsigmoid" else out

    return pack_flat(flat(input), kind, bounds, bits)


def _pack_piece_fake(input: Tensor, kind: str, bounds: list[float]) -> Tensor:
    return input.new_empty((input.numel() + 7) // 8, dtype=torch.uint8)


for _device in ("CPU", "CUDA"):
    _library.impl("pack_piece", _pack_piece_impl, _device)
torch.library.register_fake("fxmem::pack_piece", _pack_piece_fake, lib=_library)

# The pieces that the derivative of an activation tells apart, for those that go by the sign.
_SIGNS = {"leaky": ("positive",), "abs": ("positive", "negative")}

# The slope of torch's hardsigmoid: a float32, whatever the dtype.
_SIXTH = torch.tensor(1 / 6, dtype=torch.float32, device="cpu").item()


class _Activation(torch.autograd.Function):
    """Any of them: ``run`` with ``options`` is torch's own forward, ``kind`` with ``bounds`` says what its derivative is."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, run: Callable[..., Tensor], options: tuple[Any, ...], inplace: bool, kind: str, *bounds: float
    ) -> Tensor:
        ctx.kind, ctx.bounds = kind, bounds
        own = _distinct(input)
        ctx.expanded = own.shape != input.shape
        ctx.shape = tuple(own.shape)
        ctx.stride = tuple(own.stride() if is_dense(own) else torch.empty_like(own, device="meta").stride())
        if kind in _SIGNS:
            ctx.save_for_backward(*(pack_piece(own, piece, ()) for piece in _SIGNS[kind]))
        else:
            ctx.save_for_backward(pack_piece(own, kind, bounds))
        if inplace:
            ctx.mark_dirty(input)
        return run(input, *options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed, *more = ctx.saved_tensors
        if ctx.kind == "abs":
            sign = unpack(packed, ctx.shape, ctx.stride, grad.dtype)
            result = grad * sign.sub_(unpack(more[0], ctx.shape, ctx.stride, grad.dtype)).expand(grad.shape)
        elif ctx.expanded:
            mask = unpack(packed, ctx.shape, ctx.stride, grad.dtype).expand(grad.shape)
            result = _MASKED[ctx.kind](grad, mask, *ctx.bounds)
        elif ctx.kind == "leaky":
            result = leaky_backward(grad, packed, ctx.stride, *ctx.bounds)
        elif ctx.kind in ("threshold", "above", "below", "clamp"):
            result = threshold_backward(grad, packed, ctx.stride)
        else:
            result = hardtanh_backward(grad, packed, ctx.stride)
        if ctx.kind == "hardsigmoid":
            result = result.mul_(_SIXTH)
        return (result, None, None, None, None, *(None for _ in ctx.bounds))


def _distinct(input: Tensor) -> Tensor:
    """``input`` without the repetitions of an expanded tensor."""
    for dim, (size, stride) in enumerate(zip(input.shape, input.stride(), strict=True)):
        if stride == 0 and size > 1:
            input = input.narrow(dim, 0, 1)
    return input


def _by_hardtanh(grad: Tensor, mask: Tensor, *_: float) -> Tensor:
    return aten.hardtanh_backward(grad, mask, 0, 2)


# Torch's derivatives with a mask of zeros and ones for an input. The strides of the result are those of torch's own.
_MASKED: dict[str, Callable[..., Tensor]] = {
    "leaky": lambda grad, mask, slope: aten.leaky_relu_backward(grad, mask, slope, False),
    "threshold": lambda grad, mask, _: aten.threshold_backward(grad, mask, 0),
    **dict.fromkeys(("above", "below", "clamp"), lambda grad, mask, *_: torch.where(mask > 0, grad, 0.0)),
    "hardtanh": _by_hardtanh,
    "hardsigmoid": _by_hardtanh,
    "hardshrink": _by_hardtanh,
    "softshrink": _by_hardtanh,
}


def _served(input: Tensor, inplace: bool = False) -> bool:
    return engaged(input) and input.is_floating_point() and not (inplace and is_leaf_memory(input))


@form
def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.leaky_relu`` that keeps one bit per element for backward.

    Args:
        input: any shape, floating-point.
        negative_slope: the slope below zero.
        inplace: whether to overwrite ``input``; torch refuses to differentiate that for a negative slope.
    """
    # In place, torch's backward refuses a negative slope, so torch's op runs.
    if not _served(input, inplace) or (inplace and not negative_slope >= 0):
        return F.leaky_relu(input, negative_slope, inplace)
    return _Activation.apply(input, F.leaky_relu, (negative_slope, inplace), inplace, "leaky", float(negative_slope))


@form
def leaky_relu_(input: Tensor, negative_slope: float = 0.01) -> Tensor:
    """``torch.nn.functional.leaky_relu_`` that keeps one bit per element for backward."""
    return leaky_relu(input, negative_slope, True) if _served(input, True) else F.leaky_relu_(input, negative_slope)


@form
def rrelu(
    input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    """``torch.nn.functional.rrelu`` that outside of training, where it is a leaky ReLU, keeps one bit per element.

    Args:
        input: any shape, floating-point.
        lower: the least slope below zero.
        upper: the greatest.
        training: whether to draw the slopes; otherwise each is their mean.
        inplace: whether to overwrite ``input``.
    """
    slope = (float(lower) + float(upper)) / 2
    if training or lower > upper or not _served(input, inplace) or (inplace and not slope >= 0):
        return F.rrelu(input, lower, upper, training, inplace)
    return _Activation.apply(input, _mean_rrelu, (slope, inplace), inplace, "leaky", slope)


def _mean_rrelu(input: Tensor, slope: float, inplace: bool) -> Tensor:
    if inplace:
        return F.leaky_relu_(input, slope)
    # Torch's output is row-major whatever the input is.
    out = torch.empty_like(input, memory_format=torch.contiguous_format)
    return aten.leaky_relu.out(input, slope, out=out)


@form
def rrelu_(input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False) -> Tensor:
    """``torch.nn.functional.rrelu_`` that outside of training keeps one bit per element for backward."""
    if not _served(input, True):
        return torch.rrelu_(input, lower, upper, training)
    return rrelu(input, lower, upper, training, True)


@form
def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.hardtanh`` that keeps one bit per element for backward.

    Args:
        input: any shape, floating-point.
        min_val: the lower bound.
        max_val: the upper bound.
        inplace: whether to overwrite ``input``.
    """
    if min_val > max_val or not _served(input, inplace):
        return F.hardtanh(input, min_val, max_val, inplace)
    bounds = (float(min_val), float(max_val))
    return _Activation.apply(input, F.hardtanh, (min_val, max_val, inplace), inplace, "hardtanh", *bounds)


@form
def hardtanh_(input: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """``torch.nn.functional.hardtanh_`` that keeps one bit per element for backward."""
    return hardtanh(input, min_val, max_val, True) if _served(input, True) else F.hardtanh_(input, min_val, max_val)


@form
def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.relu6`` that keeps one bit per element for backward.

    Args:
        input: any shape, floating-point.
        inplace: whether to overwrite ``input``.
    """
    if not _served(input, inplace):
        return F.relu6(input, inplace)
    return _Activation.apply(input, F.relu6, (inplace,), inplace, "hardtanh", 0.0, 6.0)


@form
def relu6_(input: Tensor) -> Tensor:
    """``relu6`` in place."""
    return relu6(input, True) if _served(input, True) else torch._C._nn.relu6_(input)


@form
def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.hardsigmoid`` that keeps one bit per element for backward.

    Args:
        input: any shape, floating-point.
        inplace: whether to overwrite ``input``.
    """
    if not _served(input, inplace):
        return F.hardsigmoid(input, inplace)
    return _Activation.apply(input, F.hardsigmoid, (inplace,), inplace, "hardsigmoid")


@form
def hardsigmoid_(input: Tensor) -> Tensor:
    """``hardsigmoid`` in place."""
    return hardsigmoid(input, True) if _served(input, True) else torch._C._nn.hardsigmoid_(input)


@form
def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.threshold`` that keeps one bit per element for backward.

    Args:
        input: any shape, floating-point.
        threshold: what an element must exceed to stay.
        value: what the others become.
        inplace: whether to overwrite ``input``.
    """
    if not _served(input, inplace):
        return F.threshold(input, threshold, value, inplace)
    return _Activation.apply(input, F.threshold, (threshold, value, inplace), inplace, "threshold", float(threshold))


@form
def threshold_(input: Tensor, threshold: float, value: float) -> Tensor:
    """``torch.nn.functional.threshold_`` that keeps one bit per element for backward."""
    return _threshold(input, threshold, value, True) if _served(input, True) else torch.threshold_(input, threshold, value)


_threshold = threshold


@form
def hardshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """``torch.nn.functional.hardshrink`` that keeps one bit per element for backward.

    Args:
        input: any shape, floating-point.
        lambd: up to which distance from zero an element becomes zero.
    """
    if not _served(input):
        return F.hardshrink(input, lambd)
    return _Activation.apply(input, F.hardshrink, (lambd,), False, "hardshrink", float(lambd))


@form
def softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """``torch.nn.functional.softshrink`` that keeps one bit per element for backward.

    Args:
        input: any shape, floating-point.
        lambd: by how much an element is moved towards zero.
    """
    if not _served(input):
        return F.softshrink(input, lambd)
    return _Activation.apply(input, F.softshrink, (lambd,), False, "softshrink", float(lambd))


@form
def abs(input: Tensor) -> Tensor:
    """``torch.abs`` that keeps two bits per element for backward.

    Args:
        input: any shape and dtype; complex numbers are left to torch.
    """
    return _Activation.apply(input, torch.abs, (), False, "abs") if _served(input) else torch.abs(input)


@form
def abs_(input: Tensor) -> Tensor:
    """``torch.abs_`` that keeps two bits per element for backward."""
    return _Activation.apply(input, torch.abs_, (), True, "abs") if _served(input, True) else torch.abs_(input)


def _bound(bound: Any) -> bool:
    return isinstance(bound, int | float) and not isinstance(bound, bool)


def _clamp(input: Tensor, min: Any, max: Any, run: Callable[..., Tensor], inplace: bool) -> Tensor:
    bounds = tuple(b for b in (min, max) if b is not None)
    if not bounds or not all(_bound(b) for b in bounds) or not _served(input, inplace):
        return run(input, min, max)
    kind = "clamp" if len(bounds) == 2 else "above" if max is None else "below"
    return _Activation.apply(input, run, (min, max), inplace, kind, *bounds)


@form
def clamp(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """``torch.clamp`` that keeps one bit per element for backward.

    Args:
        input: any shape, floating-point.
        min: a number, or None; torch's op runs for a tensor.
        max: likewise.
    """
    return _clamp(input, min, max, torch.clamp, False)


@form
def clamp_(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """``torch.clamp_`` that keeps one bit per element for backward."""
    return _clamp(input, min, max, torch.clamp_, True)


@form
def clamp_min(input: Tensor, min: Any) -> Tensor:
    """``torch.clamp_min`` that keeps one bit per element for backward."""
    return _clamp(input, min, None, lambda x, min, _: torch.clamp_min(x, min), False)


@form
def clamp_min_(input: Tensor, min: Any) -> Tensor:
    """``torch.clamp_min_`` that keeps one bit per element for backward."""
    return _clamp(input, min, None, lambda x, min, _: torch.clamp_min_(x, min), True)


@form
def clamp_max(input: Tensor, max: Any) -> Tensor:
    """``torch.clamp_max`` that keeps one bit per element for backward."""
    return _clamp(input, None, max, lambda x, _, max: torch.clamp_max(x, max), False)


@form
def clamp_max_(input: Tensor, max: Any) -> Tensor:
    """``torch.clamp_max_`` that keeps one bit per element for backward."""
    return _clamp(input, None, max, lambda x, _, max: torch.clamp_max_(x, max), True)


class _PReLU(torch.autograd.Function):
    """PReLU with a frozen weight."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        own = _distinct(input)
        ctx.shape = tuple(own.shape)
        ctx.stride = tuple(own.stride() if is_dense(own) else torch.empty_like(own, device="meta").stride())
        ctx.save_for_backward(pack_piece(own, "positive", ()), weight)
        return torch.prelu(input, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        packed, weight = ctx.saved_tensors
        # Torch's second derivative takes 0 to be positive, its first does not; here zeros are -1 to both.
        mask = unpack(packed, ctx.shape, ctx.stride, grad.dtype).mul_(2).sub_(1).expand(grad.shape)
        # As torch lays the weight out: along the second dimension.
        channels = [weight.numel() if dim == min(1, grad.dim() - 1) else 1 for dim in range(grad.dim())]
        return aten._prelu_kernel_backward(grad, mask, weight.reshape(channels))[0], None


@form
def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """``torch.nn.functional.prelu`` that keeps one bit per element for backward if the weight is frozen.

    Args:
        input: any shape, floating-point.
        weight: one element, or one per channel.
    """
    if weight.requires_grad or weight.dim() > 1 or not _served(input) or not engaged(input, weight):
        return F.prelu(input, weight)
    return _PReLU.apply(input, weight)


class _LogSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return F.logsigmoid(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (input,) = ctx.saved_tensors
        with torch.no_grad():
            buffer = aten.log_sigmoid_forward(input)[1]
        return aten.log_sigmoid_backward(grad, input, buffer)


@form
def logsigmoid(input: Tensor) -> Tensor:
    """``torch.nn.functional.logsigmoid`` that keeps its input alone.

    Args:
        input: any shape, floating-point.
    """
    # On other devices torch keeps the input alone, too.
    if input.device.type != "cpu" or not _served(input):
        return F.logsigmoid(input)
    return _LogSigmoid.apply(input)


class SelectiveLeakyReLU(nn.LeakyReLU):
    """``torch.nn.LeakyReLU`` that keeps one bit per element for backward.

    Args of a call, as for every module here:
        input: any shape, floating-point.
        pack: False at the calls where what torch keeps is alive anyway; torch's own op runs there.
    """

    def forward(self, input: Tensor, pack: bool = True) -> Tensor:
        """Applies leaky ReLU."""
        return leaky_relu(input, self.negative_slope, self.inplace) if pack else super().forward(input)


class SelectiveRReLU(nn.RReLU):
    """``torch.nn.RReLU`` that keeps one bit per element for backward in eval mode."""

    def forward(self, input: Tensor) -> Tensor:
        """Applies randomized leaky ReLU."""
        return rrelu(input, self.lower, self.upper, self.training, self.inplace)


class SelectiveHardtanh(nn.Hardtanh):
    """``torch.nn.Hardtanh`` that keeps one bit per element for backward."""

    def forward(self, input: Tensor, pack: bool = True) -> Tensor:
        """Applies hardtanh."""
        return hardtanh(input, self.min_val, self.max_val, self.inplace) if pack else super().forward(input)


class SelectiveReLU6(nn.ReLU6):
    """``torch.nn.ReLU6`` that keeps one bit per element for backward."""

    def forward(self, input: Tensor, pack: bool = True) -> Tensor:
        """Applies ReLU6."""
        return hardtanh(input, self.min_val, self.max_val, self.inplace) if pack else super().forward(input)


class SelectiveHardsigmoid(nn.Hardsigmoid):
    """``torch.nn.Hardsigmoid`` that keeps one bit per element for backward."""

    def forward(self, input: Tensor, pack: bool = True) -> Tensor:
        """Applies hardsigmoid."""
        return hardsigmoid(input, self.inplace) if pack else super().forward(input)


class SelectiveThreshold(nn.Threshold):
    """``torch.nn.Threshold`` that keeps one bit per element for backward."""

    def forward(self, input: Tensor, pack: bool = True) -> Tensor:
        """Applies the threshold."""
        return threshold(input, self.threshold, self.value, self.inplace) if pack else super().forward(input)


class SelectiveHardshrink(nn.Hardshrink):
    """``torch.nn.Hardshrink`` that keeps one bit per element for backward."""

    def forward(self, input: Tensor, pack: bool = True) -> Tensor:
        """Applies hardshrink."""
        return hardshrink(input, self.lambd) if pack else super().forward(input)


class SelectiveSoftshrink(nn.Softshrink):
    """``torch.nn.Softshrink`` that keeps one bit per element for backward."""

    def forward(self, input: Tensor, pack: bool = True) -> Tensor:
        """Applies softshrink."""
        return softshrink(input, self.lambd) if pack else super().forward(input)


class SelectivePReLU(nn.PReLU):
    """``torch.nn.PReLU`` that keeps one bit per element for backward if its weight is frozen."""

    def forward(self, input: Tensor, pack: bool = True) -> Tensor:
        """Applies PReLU."""
        return prelu(input, self.weight) if pack else super().forward(input)


class SelectiveLogSigmoid(nn.LogSigmoid):
    """``torch.nn.LogSigmoid`` that keeps its input alone."""

    def forward(self, input: Tensor) -> Tensor:
        """Applies the logarithm of the sigmoid."""
        return logsigmoid(input)


_ONE = "dropped: the derivative needs one bit per element"
_TWO = "dropped: the derivative needs two bits per element"


def _check_leaky(site: Site) -> Verdict:
    if not site.needs("input"):
        return NO_GRADIENT
    return Verdict(True, _ONE, instead_of="output" if site.inplace else "input")


def _check_rrelu(site: Site) -> Verdict:
    if not site.needs("input"):
        return NO_GRADIENT
    training = site.module.training if site.module is not None else site.arguments.get("training", False)
    if training is not False:
        return Verdict(False, "kept: in train mode RReLU draws a slope for every element", "eval mode lets the input go")
    # Eager keeps noise of the input's size besides, which nobody else does.
    return Verdict(True, _ONE)


def _check(site: Site) -> Verdict:
    if not site.needs("input"):
        return NO_GRADIENT
    # In place, torch keeps a copy of the input that is nobody else's.
    return Verdict(True, _ONE, instead_of=None if site.inplace else "input")


def _check_abs(site: Site) -> Verdict:
    if not site.needs("input"):
        return NO_GRADIENT
    return Verdict(True, _TWO, instead_of=None if site.inplace else "input", bits=2)


def _check_clamp(site: Site) -> Verdict:
    bounds = [site.arguments[b] for b in ("min", "max") if site.arguments.get(b) is not None]
    if site.needs("input") and not all(_bound(b) for b in bounds):
        return Verdict(False, "kept: between tensors the derivative takes one of several values")
    return _check(site)


def _check_prelu(site: Site) -> Verdict:
    return weight_trains(site) if site.needs("weight") else _check(site)


def _check_logsigmoid(site: Site) -> Verdict:
    if not site.needs("input"):
        return NO_GRADIENT
    return Verdict(True, "kept: the derivative needs the input; on CPU the exponential of it is computed again")


_COPY = "its input; in place a copy of it"
_BIT = "1 bit per element, or nothing where that is kept anyway"


def _rule(
    name: str,
    modules: Mapping[type[nn.Module], type[nn.Module]],
    functions: Mapping[Callable[..., object], Callable[..., object]],
    methods: Mapping[str, Callable[..., object]] = MappingProxyType({}),
) -> Rule:
    eager = _COPY if modules.keys() & {nn.ReLU6, nn.Hardtanh, nn.Hardsigmoid, nn.Threshold} else "its input"
    return Rule(name, eager, _BIT, _check, modules, functions, methods)


RULES = (
    Rule(
        name="leaky_relu",
        eager="its input; in place its output",
        needed=_BIT,
        check=_check_leaky,
        modules={nn.LeakyReLU: SelectiveLeakyReLU},
        functions={
            F.leaky_relu: leaky_relu,
            torch._C._nn.leaky_relu: leaky_relu,
            torch._C._nn.leaky_relu_: leaky_relu_,
        },
    ),
    Rule(
        name="rrelu",
        eager="its input, or in place its output, and noise of that size",
        needed="in eval mode 1 bit per element",
        check=_check_rrelu,
        modules={nn.RReLU: SelectiveRReLU},
        functions={F.rrelu: rrelu, torch.rrelu: rrelu, torch.rrelu_: rrelu_},
    ),
    _rule(
        "hardtanh",
        {nn.ReLU6: SelectiveReLU6, nn.Hardtanh: SelectiveHardtanh},
        {
            F.relu6: relu6,
            torch._C._nn.relu6: relu6,
            torch._C._nn.relu6_: relu6_,
            F.hardtanh: hardtanh,
            torch._C._nn.hardtanh: hardtanh,
            torch._C._nn.hardtanh_: hardtanh_,
        },
    ),
    _rule(
        "hardsigmoid",
        {nn.Hardsigmoid: SelectiveHardsigmoid},
        {
            F.hardsigmoid: hardsigmoid,
            torch._C._nn.hardsigmoid: hardsigmoid,
            torch._C._nn.hardsigmoid_: hardsigmoid_,
        },
    ),
    _rule(
        "threshold",
        {nn.Threshold: SelectiveThreshold},
        {F.threshold: threshold, torch.threshold: threshold, torch.threshold_: threshold_},
    ),
    _rule("hardshrink", {nn.Hardshrink: SelectiveHardshrink}, {torch.hardshrink: hardshrink}, {"hardshrink": hardshrink}),
    _rule("softshrink", {nn.Softshrink: SelectiveSoftshrink}, {torch._C._nn.softshrink: softshrink}),
    Rule(
        name="abs",
        eager=_COPY,
        needed="2 bits per element, or nothing where that is kept anyway",
        check=_check_abs,
        functions={torch.abs: abs, torch.absolute: abs, operator.abs: abs, torch.abs_: abs_},
        methods={"abs": abs, "absolute": abs, "abs_": abs_, "absolute_": abs_},
    ),
    Rule(
        name="clamp",
        eager=_COPY,
        needed=_BIT,
        check=_check_clamp,
        functions={
            torch.clamp: clamp,
            torch.clip: clamp,
            torch.clamp_: clamp_,
            torch.clip_: clamp_,
            torch.clamp_min: clamp_min,
            torch.clamp_min_: clamp_min_,
            torch.clamp_max: clamp_max,
            torch.clamp_max_: clamp_max_,
        },
        methods={
            "clamp": clamp,
            "clip": clamp,
            "clamp_": clamp_,
            "clip_": clamp_,
            "clamp_min": clamp_min,
            "clamp_min_": clamp_min_,
            "clamp_max": clamp_max,
            "clamp_max_": clamp_max_,
        },
    ),
    Rule(
        name="prelu",
        eager="its input",
        needed="its input for a trainable weight, else " + _BIT,
        check=_check_prelu,
        modules={nn.PReLU: SelectivePReLU},
        functions={F.prelu: prelu},
        methods={"prelu": prelu},
    ),
    Rule(
        name="logsigmoid",
        eager="its input and, on CPU, as much again",
        needed="its input",
        check=_check_logsigmoid,
        modules={nn.LogSigmoid: SelectiveLogSigmoid},
        functions={F.logsigmoid: logsigmoid},
    ),
)
