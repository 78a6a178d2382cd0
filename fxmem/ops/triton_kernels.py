"""One pass through memory where torch's own ops would take several: packing, masking and pool offsets in Triton.

The order of the bits is the one in which ``packing`` lays them out on any device but the CPU: for ``n`` elements in ``m``
bytes, bit ``j`` of byte ``i`` belongs to element ``j m + i``. Neighbouring threads then read neighbouring elements for every
bit, and a tensor packed here can be unpacked by torch's ops and the other way round.

Every comparison and product is that of torch's CUDA kernels: hardtanh, hardsigmoid, leaky ReLU and dropout compute in float32
for the types of 16 bits, threshold and the shrinks round their bound to the type; NaN falls on the side on which their
comparisons put it, which is not the one of the vector code for the CPU.

Import this only where a kernel is about to run: Triton comes with torch's builds for GPUs, not with the others.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORK = {torch.float64: tl.float64, torch.float32: tl.float32, torch.float16: tl.float32, torch.bfloat16: tl.float32}


@triton.jit
def _number(bits, work):
    # Triton hands floats to kernels as float32; the bits of a float64 arrive whole.
    return tl.cast(tl.cast(bits, tl.int64), tl.float64, bitcast=True).to(work)


@triton.jit(do_not_specialize=["first", "second"])
def _pack_kernel(
    input,
    output,
    packed,
    n,
    m,
    first,
    second,
    PIECE: tl.constexpr,
    WORK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    byte = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.full((BLOCK,), 0, tl.int32)
    a = _number(first, WORK)
    b = _number(second, WORK)
    for j in tl.static_range(8):
        at = tl.cast(m, tl.int64) * j + byte
        inside = (byte < m) & (at < n)
        raw = tl.load(input + at, mask=inside, other=0)
        x = raw.to(WORK)
        if PIECE == "nonzero":
            off = x == 0
        elif PIECE == "relu":
            off = x <= 0
            tl.store(output + at, tl.where(x < 0, tl.full((BLOCK,), 0, raw.dtype), raw), mask=inside)
        elif PIECE == "positive":
            off = (x > 0) == 0
        elif PIECE == "negative":
            off = (x < 0) == 0
        elif PIECE == "threshold":
            off = x <= a
        elif PIECE == "hardtanh":
            off = (x <= a) | (x >= b)
        elif PIECE == "hardsigmoid":
            off = ((x > -3) & (x < 3)) == 0
        else:
            off = (x >= -a) & (x <= a)
        bits = bits | (tl.where(off | (inside == 0), 0, 1) << j)
    tl.store(packed + byte, bits.to(tl.uint8), mask=byte < m)


@triton.jit(do_not_specialize=["factor"])
def _mask_kernel(
    grad,
    packed,
    output,
    n,
    m,
    factor,
    FORM: tl.constexpr,
    WORK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    byte = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(packed + byte, mask=byte < m, other=0).to(tl.int32)
    f = _number(factor, WORK)
    for j in tl.static_range(8):
        at = tl.cast(m, tl.int64) * j + byte
        inside = (byte < m) & (at < n)
        on = ((bits >> j) & 1) != 0
        if FORM == "unpack":
            tl.store(output + at, tl.where(on, 1.0, 0.0).to(output.dtype.element_ty), mask=inside)
        else:
            g = tl.load(grad + at, mask=inside, other=0)
            if FORM == "keep":
                result = tl.where(on, g, tl.full((BLOCK,), 0, g.dtype))
            elif FORM == "leaky":
                result = tl.where(on, g, (g.to(WORK) * f).to(g.dtype))
            else:
                result = (g.to(WORK) * tl.where(on, f, 0.0).to(WORK)).to(g.dtype)
            tl.store(output + at, result, mask=inside)


@triton.jit
def _first(place, stride, divisor, padding):
    return place * stride // divisor - padding


@triton.jit
def _pool_kernel(
    indices,
    offsets,
    n,
    inner,
    stride0,
    stride1,
    stride2,
    divisor0,
    divisor1,
    divisor2,
    padding0,
    padding1,
    padding2,
    count0,
    count1,
    count2,
    step0,
    step1,
    step2,
    width1,
    width2,
    size1,
    size2,
    FORWARD: tl.constexpr,
    PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    # Of 32 bits wherever the tensors allow: a division of 64 bits takes several times as long.
    place = at.to(PLACE) // inner
    place2 = place % count2
    place1 = place // count2 % count1
    place0 = place // count2 // count1 % count0
    first0 = _first(place0, stride0, divisor0, padding0)
    first1 = _first(place1, stride1, divisor1, padding1)
    first2 = _first(place2, stride2, divisor2, padding2)
    if FORWARD:
        index = tl.load(indices + at, mask=inside, other=0).to(PLACE)
        offset = (index // size2 // size1 - first0) // step0
        offset = offset * width1 + (index // size2 % size1 - first1) // step1
        offset = offset * width2 + (index % size2 - first2) // step2
        tl.store(offsets + at, offset.to(tl.uint8), mask=inside)
    else:
        offset = tl.load(offsets + at, mask=inside, other=0).to(PLACE)
        index = first0 + offset // width2 // width1 * step0
        index = index * size1 + first1 + offset // width2 % width1 * step1
        index = index * size2 + first2 + offset % width2 * step2
        tl.store(indices + at, index.to(tl.int64), mask=inside)


def _bits_of(value: float) -> int:
    return int(struct.unpack("q", struct.pack("d", value))[0])


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype, device="cpu"))


def _columns(dtype: torch.dtype) -> int:
    # Four bytes and as many loads of 16 bytes (for types of 16 bits: eight) to a thread.
    return 1024 if dtype.itemsize <= 2 else 512


PIECES = frozenset(
    {"nonzero", "relu", "positive", "negative", "threshold", "hardtanh", "hardsigmoid", "hardshrink", "softshrink"}
)


def pack(flat: Tensor, piece: str, bounds: Sequence[float] = (), output: Tensor | None = None) -> Tensor:
    """Packs a bit for every element of a dense tensor of one dimension.

    Args:
        flat: the tensor; of any real or bool dtype for ``"nonzero"``, else floating-point.
        piece: where the bit is set: ``"nonzero"``, ``"relu"`` (NaN and greater than 0), or another of ``PIECES``.
        bounds: the activation's arguments on which its derivative depends.
        output: for ``"relu"``: what its output is written to, in the order of ``flat``, which it may be.

    Returns:
        uint8 of ``ceil(numel / 8)`` elements.
    """
    n = flat.numel()
    m = -(-n // 8)
    packed = torch.empty(m, dtype=torch.uint8, device=flat.device)
    if n == 0:
        return packed
    if piece in ("threshold", "hardshrink", "softshrink"):
        bounds = [_rounded(bound, flat.dtype) for bound in bounds]
    first, second, *_ = (*map(_bits_of, bounds), 0, 0)
    work = _WORK.get(flat.dtype)
    if work is None:
        flat = flat.view(torch.uint8) if flat.dtype is torch.bool else flat
        work = tl.int64
    block = _columns(flat.dtype)
    with torch.cuda.device_of(flat):
        _pack_kernel[(triton.cdiv(m, block),)](
            flat, flat if output is None else output, packed, n, m, first, second, PIECE=piece, WORK=work, BLOCK=block
        )
    return packed


def mask(form: str, packed: Tensor, output: Tensor, grad: Tensor | None = None, factor: float = 0.0) -> Tensor:
    """Writes what the packed bits make of a gradient.

    Args:
        form: ``"keep"``: the gradient where the bit is set, else 0; ``"leaky"``: else the gradient times ``factor``;
            ``"scale"``: the gradient times ``factor`` or 0; ``"unpack"``: 1 or 0, without a gradient.
        packed: what ``pack`` returned.
        output: floating-point, dense, in the order of the packed tensor.
        grad: of the dtype and in the order of ``output``.
        factor: see ``form``.

    Returns:
        ``output``.
    """
    n, m = output.numel(), packed.numel()
    if n:
        block = _columns(output.dtype)
        grad = output if grad is None else grad
        with torch.cuda.device_of(output):
            _mask_kernel[(triton.cdiv(m, block),)](
                grad, packed, output, n, m, _bits_of(factor), FORM=form, WORK=_WORK[output.dtype], BLOCK=block
            )
    return output


_POOL_BLOCK = 512


def pool(indices: Tensor, offsets: Tensor, inner: int, windows: Sequence[Sequence[int]], forward: bool) -> None:
    """Turns the indices of a max pooling into offsets within the windows, or back.

    Args:
        indices: int64, dense; written unless ``forward``.
        offsets: uint8, of the same order; written if ``forward``.
        inner: how many neighbouring elements in memory have the same place in the plane: 1, or the channels if they come last.
        windows: strides, divisors, paddings, counts, steps, widths and sizes of ``pool``'s windows, per dimension.
        forward: from indices to offsets.
    """
    n = indices.numel()
    if n == 0:
        return
    filled = [[*[fill] * (3 - len(values)), *values] for values, fill in zip(windows, (1, 1, 0, 1, 1, 1, 1), strict=True)]
    strides, divisors, paddings, counts, steps, widths, sizes = filled
    largest = max(n, sizes[0] * sizes[1] * sizes[2], *(c * s for c, s in zip(counts, strides, strict=True)))
    with torch.cuda.device_of(indices):
        _pool_kernel[(triton.cdiv(n, _POOL_BLOCK),)](
            indices,
            offsets,
            n,
            inner,
            *strides,
            *divisors,
            *paddings,
            *counts,
            *steps,
            *widths[1:],
            *sizes[1:],
            FORWARD=forward,
            PLACE=tl.int32 if largest + _POOL_BLOCK < 2**31 else tl.int64,
            BLOCK=_POOL_BLOCK,
        )
