"""One bit per element: packing the mask that backward needs in place of a tensor.

The elements are taken in the order in which they lie in memory and cut into blocks of ``BLOCK``. Within a block of
``8 m`` elements (the last one padded), bit ``j`` of byte ``i`` belongs to element ``j m + i``. With this order packing
is a sum of eight rows times the powers of two, unpacking a broadcast bitwise and, and both run through the cache block by
block: the temporaries stay below a megabyte whatever the size of the tensor.

On other devices the whole tensor is one block, and where Triton is there its kernels do the work in one pass.

The entry points are registered with ``torch.library``, so fake tensors, tracers and partitioners see one op each.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from fxmem.ops.common import is_dense

BLOCK = 1 << 17

_library = torch.library.Library("fxmem", "DEF")
_library.define("pack_nonzero(Tensor input) -> Tensor")
_library.define("relu_pack(Tensor input) -> (Tensor, Tensor)")
_library.define("relu_pack_(Tensor(a!) input) -> Tensor")
_library.define("unpack(Tensor packed, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor")
_library.define("threshold_backward(Tensor grad, Tensor packed, SymInt[] stride) -> Tensor")
_library.define("hardtanh_backward(Tensor grad, Tensor packed, SymInt[] stride) -> Tensor")
_library.define("leaky_backward(Tensor grad, Tensor packed, SymInt[] stride, float slope) -> Tensor")
_library.define("scale_backward(Tensor grad, Tensor packed, SymInt[] stride, float scale) -> Tensor")


def pack_nonzero(input: Tensor) -> Tensor:
    """Packs ``input != 0``, one bit per element in memory order; NaN counts, as it does in torch's threshold.

    Args:
        input: any shape and real or bool dtype; a tensor that does not fill its memory is read in row-major order.

    Returns:
        uint8 of ``ceil(numel / 8)`` elements.
    """
    return torch.ops.fxmem.pack_nonzero(input)


def relu_pack(input: Tensor, inplace: bool) -> tuple[Tensor, Tensor]:
    """ReLU and the packed sign of its output, in one pass through memory.

    Args:
        input: any shape, floating-point.
        inplace: whether to overwrite ``input``.

    Returns:
        The output, and what ``pack_nonzero`` makes of it.
    """
    if inplace and not isinstance(input, FunctionalTensor):
        return input, torch.ops.fxmem.relu_pack_(input)
    output, packed = torch.ops.fxmem.relu_pack(input)
    # While AOTAutograd traces, the plain form with a copy: a custom op that mutates would be wrapped, and never decomposed.
    return input.copy_(output) if inplace else output, packed


def unpack(packed: Tensor, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The packed mask as a tensor of zeros and ones.

    Args:
        packed: what ``pack_nonzero`` returned.
        size: shape of the tensor that was packed.
        stride: its strides if it fills its memory, else those of a row-major tensor.
        dtype: a floating-point dtype.
    """
    return torch.ops.fxmem.unpack(packed, size, stride, dtype)


def threshold_backward(grad: Tensor, packed: Tensor, stride: tuple[int, ...]) -> Tensor:
    """``grad`` where the bit is set, 0 elsewhere: torch's ``threshold_backward`` with a packed mask.

    Args:
        grad: gradient of the output, of the packed tensor's shape.
        packed: what ``pack_nonzero`` returned.
        stride: strides of the packed tensor, as in ``unpack``.
    """
    return torch.ops.fxmem.threshold_backward(grad, packed, stride)


def hardtanh_backward(grad: Tensor, packed: Tensor, stride: tuple[int, ...]) -> Tensor:
    """``grad`` where the bit is set, 0 elsewhere: torch's ``hardtanh_backward`` with a packed mask.

    It differs from ``threshold_backward`` in the strides of the result alone: they follow grad's, not the packed tensor's.

    Args:
        grad: gradient of the output, of the packed tensor's shape.
        packed: the bits, as ``pack_nonzero`` lays them out.
        stride: strides of the packed tensor, as in ``unpack``.
    """
    return torch.ops.fxmem.hardtanh_backward(grad, packed, stride)


def leaky_backward(grad: Tensor, packed: Tensor, stride: tuple[int, ...], slope: float) -> Tensor:
    """``grad`` where the bit is set, ``grad * slope`` elsewhere: torch's ``leaky_relu_backward`` with a packed mask.

    Args:
        grad: gradient of the output, of the packed tensor's shape.
        packed: the bits, as ``pack_nonzero`` lays them out.
        stride: strides of the packed tensor, as in ``unpack``.
        slope: the derivative where the bit is not set.
    """
    return torch.ops.fxmem.leaky_backward(grad, packed, stride, slope)


def scale_backward(grad: Tensor, packed: Tensor, stride: tuple[int, ...], scale: float) -> Tensor:
    """``grad * (scale where the bit is set, else 0)``: the derivative of dropout with a packed mask.

    Args:
        grad: gradient of the output, of the packed tensor's shape.
        packed: what ``pack_nonzero`` returned.
        stride: strides of the packed tensor, as in ``unpack``.
        scale: what the kept elements were multiplied by.
    """
    return torch.ops.fxmem.scale_backward(grad, packed, stride, scale)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides under which ``pack_nonzero`` reads ``tensor``: its own, or row-major if it has gaps or overlaps."""
    if is_dense(tensor):
        return tuple(tensor.stride())
    stride: list[int] = []
    step = 1
    for n in reversed(tensor.shape):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def fused(device: torch.device) -> ModuleType | None:
    """The Triton kernels, if they run on ``device``; torch's own ops lay out the bits in the same order."""
    return _triton_kernels(device) if device.type == "cuda" else None


@functools.cache
def _triton_kernels(device: torch.device) -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    # What can be missing is many things, a C compiler, a recent enough device, and shows when the first kernel runs.
    try:
        from fxmem.ops import triton_kernels

        triton_kernels.pack(torch.ones(8, device=device), "nonzero")
    except Exception as error:
        warnings.warn(
            f"Triton does not run on {device}, so torch's own kernels take the place of fxmem's: {error}", RuntimeWarning
        )
        return None
    return triton_kernels


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in memory order, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _block(n: int, device: torch.device) -> int:
    """Elements per block."""
    # Elsewhere than on CPU a launch costs more than a pass over memory; the bit order is then that of one block.
    return BLOCK if device.type == "cpu" else max(-(-n // 8) * 8, 8)


def _pack_impl(input: Tensor) -> Tensor:
    return pack_flat(flat(input) if is_dense(input) else input.contiguous().view(-1))


def _relu_pack_inplace_impl(input: Tensor) -> Tensor:
    if not is_dense(input):
        return _pack_impl(torch.relu_(input))
    elements = flat(input)
    return pack_flat(elements, relu_of=elements)


def _relu_pack_impl(input: Tensor) -> tuple[Tensor, Tensor]:
    if not is_dense(input):
        output = torch.relu(input)
        return output, _pack_impl(output)
    output = torch.empty_like(input)
    return output, pack_flat(flat(output), relu_of=flat(input))


def pack_flat(
    elements: Tensor,
    piece: str = "nonzero",
    bounds: Sequence[float] = (),
    bits: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    relu_of: Tensor | None = None,
) -> Tensor:
    """Packs a bit for every element of a dense tensor of one dimension.

    Args:
        elements: the tensor.
        piece: for which elements the bit is set, by its name in ``triton_kernels.pack``, if that has it.
        bounds: what that depends on.
        bits: the same by torch's ops: makes zeros and ones of a block of it, written to the second argument, of the block's
            dtype, unless that is None. By default, whether an element is not 0.
        relu_of: ``elements`` is first made the ReLU of this, block by block while it is in the cache.
    """
    n = elements.numel()
    if kernels := fused(elements.device):
        if relu_of is not None:
            return kernels.pack(relu_of, "relu", output=elements)
        if piece in kernels.PIECES:
            return kernels.pack(elements, piece, bounds)
    out = torch.empty(-(-n // 8), dtype=torch.uint8, device=elements.device)
    if n == 0:
        return out
    if elements.device.type != "cpu":
        if relu_of is not None:
            torch.clamp_min(relu_of, 0, out=elements)
        return pack_whole(elements.to(torch.bool) if bits is None else bits(elements, None), out)
    sources = elements.split(BLOCK) if relu_of is None else relu_of.split(BLOCK)
    pack = _packer(elements, out, bits)
    for block, source, packed in zip(elements.split(BLOCK), sources, out.split(BLOCK // 8), strict=True):
        if relu_of is not None:
            torch.clamp_min(source, 0, out=block)
        pack(block, packed)
    return out


def _packer(
    elements: Tensor, out: Tensor, bits: Callable[[Tensor, Tensor | None], Tensor] | None
) -> Callable[[Tensor, Tensor], None]:
    """What packs one block of ``elements`` into its part of ``out``, on CPU, with buffers for all of them."""
    # Devices are named throughout: the default device may be another one.
    size = min(BLOCK, 8 * out.numel())
    work = torch.float64 if elements.dtype is torch.float64 else torch.float32
    direct = bits is not None and elements.dtype is work
    mask = torch.empty(size, dtype=work if direct else torch.uint8, device=elements.device)
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=mask.dtype, device=elements.device)
    sums = torch.empty(size // 8, dtype=mask.dtype, device=elements.device)

    def pack(block: Tensor, packed: Tensor) -> None:
        n, m = block.numel(), packed.numel()
        ones = mask if mask.numel() == 8 * m else mask[: 8 * m]
        if n != 8 * m:
            ones[n:] = 0
        part = ones if n == 8 * m else ones[:n]
        rows = ones.view(8, m)
        if bits is not None and direct:
            # Comparing into a buffer of the operand's own dtype is several times faster than into bool.
            bits(block, part)
            packed.copy_(torch.mv(rows.t(), powers, out=sums[:m]))
        else:
            # So is converting to bool, which asks whether an element is not 0.
            part.view(torch.bool).copy_(block if bits is None else bits(block, None))
            torch.sum(rows.mul_(powers[:, None]), 0, dtype=torch.uint8, out=packed)

    return pack


def pack_whole(bits: Tensor, out: Tensor) -> Tensor:
    """Packs zeros and ones, a tensor of one dimension and any device, as one block into ``out``."""
    mask = torch.zeros(8 * out.numel(), dtype=torch.uint8, device=out.device)
    mask[: bits.numel()] = bits
    shifts = torch.arange(8, dtype=torch.uint8, device=out.device)
    return torch.sum(mask.view(8, -1).bitwise_left_shift_(shifts[:, None]), 0, dtype=torch.uint8, out=out)


@functools.lru_cache
def _bits(device: torch.device) -> Tensor:
    return torch.tensor([1 << j for j in range(8)], dtype=torch.uint8, device=device)[:, None]


# Made here, so that no pass finds itself a few bytes above eager's for it.
_bits(torch.device("cpu"))


def _spread(packed: Tensor, out: Tensor) -> None:
    """Writes one block: something positive where the bit is set, 0 elsewhere, into the flat float tensor ``out``."""
    out.copy_(torch.bitwise_and(packed, _bits(out.device)).view(-1)[: out.numel()])


def _unpack_impl(packed: Tensor, size: list[int], stride: list[int], dtype: torch.dtype) -> Tensor:
    out = torch.empty_strided(size, stride, dtype=dtype, device=packed.device)
    if kernels := fused(packed.device):
        kernels.mask("unpack", packed, flat(out))
        return out
    for bits, block in _paired(packed, out):
        _spread(bits, block)
        block.gt_(0)
    return out


def _threshold_backward_impl(grad: Tensor, packed: Tensor, stride: list[int]) -> Tensor:
    if not is_dense(grad) or list(grad.stride()) != list(stride):
        mask = _unpack_impl(packed, list(grad.shape), stride, grad.dtype)
        return torch.ops.aten.threshold_backward(grad, mask, 0)
    out = torch.empty_like(grad)
    if kernels := fused(grad.device):
        kernels.mask("keep", packed, flat(out), flat(grad))
        return out
    for bits, block, part in _paired(packed, out, grad):
        _spread(bits, block)
        torch.ops.aten.threshold_backward.grad_input(part, block, 0, grad_input=block)
    return out


def _hardtanh_backward_impl(grad: Tensor, packed: Tensor, stride: list[int]) -> Tensor:
    if not is_dense(grad) or list(grad.stride()) != list(stride):
        mask = _unpack_impl(packed, list(grad.shape), stride, grad.dtype)
        return torch.ops.aten.hardtanh_backward(grad, mask, 0, 2)
    return _threshold_backward_impl(grad, packed, stride)


def _leaky_backward_impl(grad: Tensor, packed: Tensor, stride: list[int], slope: float) -> Tensor:
    if not is_dense(grad) or list(grad.stride()) != list(stride):
        mask = _unpack_impl(packed, list(grad.shape), stride, grad.dtype)
        return torch.ops.aten.leaky_relu_backward(grad, mask, slope, False)
    out = torch.empty_like(grad)
    if kernels := fused(grad.device):
        kernels.mask("leaky", packed, flat(out), flat(grad), slope)
        return out
    for bits, block, part in _paired(packed, out, grad):
        _spread(bits, block)
        torch.ops.aten.leaky_relu_backward.grad_input(part, block, slope, False, grad_input=block)
    return out


def _scale_backward_impl(grad: Tensor, packed: Tensor, stride: list[int], scale: float) -> Tensor:
    if not is_dense(grad) or list(grad.stride()) != list(stride):
        return (grad * _unpack_impl(packed, list(grad.shape), stride, grad.dtype)).mul_(scale)
    out = torch.empty_like(grad)
    if kernels := fused(grad.device):
        kernels.mask("scale", packed, flat(out), flat(grad), scale)
        return out
    for bits, block, part in _paired(packed, out, grad):
        _spread(bits, block)
        # The scale last: what has more digits than the dtype is rounded once.
        block.gt_(0).mul_(part).mul_(scale)
    return out


def _paired(packed: Tensor, *dense: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Block by block, the packed bytes and the elements of dense tensors of one layout that belong to them."""
    block = _block(dense[0].numel(), packed.device)
    return zip(packed.split(block // 8), *(flat(t).split(block) for t in dense), strict=True)


def _pack_fake(input: Tensor) -> Tensor:
    return input.new_empty((input.numel() + 7) // 8, dtype=torch.uint8)


def _relu_pack_inplace_fake(input: Tensor) -> Tensor:
    return _pack_fake(input)


def _relu_pack_fake(input: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(input), _pack_fake(input)


def _unpack_fake(packed: Tensor, size: list[int], stride: list[int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty_strided(size, stride, dtype=dtype)


def _threshold_backward_fake(grad: Tensor, packed: Tensor, stride: list[int]) -> Tensor:
    return torch.ops.aten.threshold_backward(grad, grad.new_empty_strided(grad.shape, stride), 0)


def _hardtanh_backward_fake(grad: Tensor, packed: Tensor, stride: list[int]) -> Tensor:
    return torch.ops.aten.hardtanh_backward(grad, grad.new_empty_strided(grad.shape, stride), 0, 2)


def _leaky_backward_fake(grad: Tensor, packed: Tensor, stride: list[int], slope: float) -> Tensor:
    return torch.ops.aten.leaky_relu_backward(grad, grad.new_empty_strided(grad.shape, stride), slope, False)


def _scale_backward_fake(grad: Tensor, packed: Tensor, stride: list[int], scale: float) -> Tensor:
    return grad * grad.new_empty_strided(grad.shape, stride)


for _name, _impl, _fake in (
    ("pack_nonzero", _pack_impl, _pack_fake),
    ("relu_pack", _relu_pack_impl, _relu_pack_fake),
    ("relu_pack_", _relu_pack_inplace_impl, _relu_pack_inplace_fake),
    ("unpack", _unpack_impl, _unpack_fake),
    ("threshold_backward", _threshold_backward_impl, _threshold_backward_fake),
    ("hardtanh_backward", _hardtanh_backward_impl, _hardtanh_backward_fake),
    ("leaky_backward", _leaky_backward_impl, _leaky_backward_fake),
    ("scale_backward", _scale_backward_impl, _scale_backward_fake),
):
    _library.impl(_name, _impl, "CPU")
    _library.impl(_name, _impl, "CUDA")
    torch.library.register_fake(f"fxmem::{_name}", _fake, lib=_library)


# The derivatives are linear in grad and each its own derivative, so they differentiate any number of times.


def _save_packed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, packed, *ctx.rest = inputs
    ctx.save_for_backward(packed)


def _derive(op: Callable[..., Tensor]) -> Callable[..., Any]:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return op(grad, packed, *ctx.rest), None, *(None for _ in ctx.rest)

    return backward


def _batch(op: Callable[..., Tensor]) -> Callable[..., Any]:
    def batched(info: Any, in_dims: Any, grad: Tensor, packed: Tensor, *rest: Any) -> tuple[Tensor, int]:
        grads, masks = (
            [t] * info.batch_size if dim is None else t.unbind(dim) for t, dim in zip((grad, packed), in_dims, strict=False)
        )
        return torch.stack([op(g, m, *rest) for g, m in zip(grads, masks, strict=True)]), 0

    return batched


for _op in (threshold_backward, hardtanh_backward, leaky_backward, scale_backward):
    _qualified = f"fxmem::{_op.__name__}"
    torch.library.register_autograd(_qualified, _derive(_op), setup_context=_save_packed, lib=_library)
    torch.library.register_vmap(_qualified, _batch(_op), lib=_library)
