"""Piecewise linear activations: one bit per element in place of the input.

On every piece the derivative is a constant, so backward asks only which piece an element is on. Torch keeps the whole input
for that (leaky ReLU in place: its output; the other in-place forms: a copy of the input, made for the purpose).

The bits are asked of torch's own derivative kernel, applied to ones, so that what happens exactly on a boundary, for NaN and
for bounds that the dtype rounds is torch's own answer. For NaN the kernels of hardtanh, hardshrink and softshrink have two:
vector code gives 0 and scalar code the incoming gradient, and which of the two meets an element depends on its place, on the
layout of the gradient and on the number of threads. On one thread, for a gradient laid out like the output, ours is eager's.

The derivative of the absolute value has three values, because it is 0 at 0; it takes two bits.

Left out: PReLU, whose weight's gradient needs the input; RReLU in train mode, whose noise is not piecewise constant.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from fxmem.ops.common import NO_GRADIENT, Rule, Site, Verdict, engaged, intercepted, is_dense, is_leaf_memory
from fxmem.ops.packing import flat, hardtanh_backward, leaky_backward, pack_flat, pack_nonzero, threshold_backward, unpack

aten = torch.ops.aten

_library = torch.library.Library("fxmem", "FRAGMENT")
_library.define("pack_piece(Tensor input, str kind, float[] bounds) -> Tensor")

# For each kind of piece, torch's kernel that writes something nonzero where an element is on it: (input, bounds, out).
_PIECES: dict[str, Callable[..., object]] = {
    "positive": lambda t, bounds, out: torch.gt(t, 0, out=out),
    "negative": lambda t, bounds, out: torch.lt(t, 0, out=out),
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
        elif ctx.kind == "threshold":
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
    "hardtanh": _by_hardtanh,
    "hardsigmoid": _by_hardtanh,
    "hardshrink": _by_hardtanh,
    "softshrink": _by_hardtanh,
}


_Form = TypeVar("_Form", bound=Callable[..., Tensor])


def _form(ours: _Form) -> _Form:
    """Our form of an activation, which tracers and modes get to see as one call."""

    @functools.wraps(ours)
    def form(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if intercepted(input):
            return handle_torch_function(form, (input,), input, *args, **kwargs)
        return ours(input, *args, **kwargs)

    return cast(_Form, form)


def _served(input: Tensor, inplace: bool = False) -> bool:
    return engaged(input) and input.is_floating_point() and not (inplace and is_leaf_memory(input))


@_form
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


@_form
def leaky_relu_(input: Tensor, negative_slope: float = 0.01) -> Tensor:
    """``torch.nn.functional.leaky_relu_`` that keeps one bit per element for backward."""
    return leaky_relu(input, negative_slope, True) if _served(input, True) else F.leaky_relu_(input, negative_slope)


@_form
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


@_form
def rrelu_(input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False) -> Tensor:
    """``torch.nn.functional.rrelu_`` that outside of training keeps one bit per element for backward."""
    if not _served(input, True):
        return torch.rrelu_(input, lower, upper, training)
    return rrelu(input, lower, upper, training, True)


@_form
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


@_form
def hardtanh_(input: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """``torch.nn.functional.hardtanh_`` that keeps one bit per element for backward."""
    return hardtanh(input, min_val, max_val, True) if _served(input, True) else F.hardtanh_(input, min_val, max_val)


@_form
def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.relu6`` that keeps one bit per element for backward.

    Args:
        input: any shape, floating-point.
        inplace: whether to overwrite ``input``.
    """
    if not _served(input, inplace):
        return F.relu6(input, inplace)
    return _Activation.apply(input, F.relu6, (inplace,), inplace, "hardtanh", 0.0, 6.0)


@_form
def relu6_(input: Tensor) -> Tensor:
    """``relu6`` in place."""
    return relu6(input, True) if _served(input, True) else torch._C._nn.relu6_(input)


@_form
def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.hardsigmoid`` that keeps one bit per element for backward.

    Args:
        input: any shape, floating-point.
        inplace: whether to overwrite ``input``.
    """
    if not _served(input, inplace):
        return F.hardsigmoid(input, inplace)
    return _Activation.apply(input, F.hardsigmoid, (inplace,), inplace, "hardsigmoid")


@_form
def hardsigmoid_(input: Tensor) -> Tensor:
    """``hardsigmoid`` in place."""
    return hardsigmoid(input, True) if _served(input, True) else torch._C._nn.hardsigmoid_(input)


@_form
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


@_form
def threshold_(input: Tensor, threshold: float, value: float) -> Tensor:
    """``torch.nn.functional.threshold_`` that keeps one bit per element for backward."""
    return _threshold(input, threshold, value, True) if _served(input, True) else torch.threshold_(input, threshold, value)


_threshold = threshold


@_form
def hardshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """``torch.nn.functional.hardshrink`` that keeps one bit per element for backward.

    Args:
        input: any shape, floating-point.
        lambd: up to which distance from zero an element becomes zero.
    """
    if not _served(input):
        return F.hardshrink(input, lambd)
    return _Activation.apply(input, F.hardshrink, (lambd,), False, "hardshrink", float(lambd))


@_form
def softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """``torch.nn.functional.softshrink`` that keeps one bit per element for backward.

    Args:
        input: any shape, floating-point.
        lambd: by how much an element is moved towards zero.
    """
    if not _served(input):
        return F.softshrink(input, lambd)
    return _Activation.apply(input, F.softshrink, (lambd,), False, "softshrink", float(lambd))


@_form
def abs(input: Tensor) -> Tensor:
    """``torch.abs`` that keeps two bits per element for backward.

    Args:
        input: any shape and dtype; complex numbers are left to torch.
    """
    return _Activation.apply(input, torch.abs, (), False, "abs") if _served(input) else torch.abs(input)


@_form
def abs_(input: Tensor) -> Tensor:
    """``torch.abs_`` that keeps two bits per element for backward."""
    return _Activation.apply(input, torch.abs_, (), True, "abs") if _served(input, True) else torch.abs_(input)


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
)
