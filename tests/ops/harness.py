"""What the tests of the ops share: operands in any layout, bitwise comparison, counting what is kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxmem.measure import run

Operands = Sequence[Tensor | None]
Op = Callable[..., Any]

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def difference(a: Any, b: Any) -> str | None:
    """How two values differ, or None: dtype, shape, strides and every bit, the sign of zero too (any NaN is a NaN)."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None if a is b or (type(a) is type(b) and a == b) else f"{a} is not {b}"
    for what in ("dtype", "shape"):
        if getattr(a, what) != getattr(b, what):
            return f"{what} {getattr(a, what)} is not {getattr(b, what)}"
    if a.stride() != b.stride():
        return f"stride {a.stride()} is not {b.stride()}"
    x, y = a.detach().contiguous(), b.detach().contiguous()
    if not a.is_floating_point():
        return None if torch.equal(x, y) else "values differ"
    nan = x.isnan()
    if not torch.equal(nan, y.isnan()):
        return "NaN in different places"
    integer = _INTEGER[x.dtype.itemsize]
    unequal = (x.view(integer) != y.view(integer)) & ~nan
    return f"{int(unequal.sum())} of {x.numel()} values differ" if bool(unequal.any()) else None


def assert_identical(eager: Any, ours: Any, what: str) -> None:
    """Asserts that two values, or two sequences of them, do not differ."""
    if isinstance(eager, tuple | list):
        assert len(eager) == len(ours), what
        for i, (a, b) in enumerate(zip(eager, ours, strict=True)):
            assert_identical(a, b, f"{what} {i}")
        return
    found = difference(eager, ours)
    assert found is None, f"{what}: {found}"


def _channels_last(t: Tensor) -> Tensor:
    order = (0, *range(2, t.dim()), 1)
    inverse = (0, t.dim() - 1, *range(1, t.dim() - 1))
    return t.permute(order).contiguous().permute(inverse)


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def _gapped(t: Tensor) -> Tensor:
    base = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1])
    base[..., ::2] = t
    return base[..., ::2]


def _expanded(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "channels_last": _channels_last,
    "transposed": _transposed,
    "gapped": _gapped,
    "expanded": _expanded,
}


def operand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, layout: str = "contiguous") -> Tensor:
    """Normal random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return LAYOUTS[layout](torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))


SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 0.0)


def special(*shape: int, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> Tensor:
    """Random numbers, a third of which are NaN, infinities and zeros of both signs."""
    t = operand(*shape, dtype=dtype)
    flat = t.view(-1)
    for i in range(0, flat.numel(), 3):
        flat[i] = SPECIAL[(i // 3) % len(SPECIAL)]
    return LAYOUTS[layout](t)


def leaves(tensors: Operands, mask: Sequence[bool]) -> list[Tensor | None]:
    """New leaves that share the operands' memory, requiring grad as the mask says."""
    return [None if t is None else t.detach().requires_grad_(flag) for t, flag in zip(tensors, mask, strict=True)]


def masks(tensors: Operands, never: Iterable[int] = ()) -> list[tuple[bool, ...]]:
    """Every requires_grad mask over the operands with at least one True; absent ones and ``never`` stay False."""
    free = [(False, True) if t is not None and i not in set(never) else (False,) for i, t in enumerate(tensors)]
    return [mask for mask in itertools.product(*free) if any(mask)]


def cotangents(output: Tensor, *, odd: bool = True) -> list[Tensor]:
    """Random cotangents in the output's own layout and, if ``odd``, expanded from a scalar and with swapped strides."""
    value = operand(*output.shape, dtype=output.dtype, seed=7)
    found = [torch.empty_like(output).copy_(value)]
    if odd and output.numel():
        found.append(value.view(-1)[:1].view([1] * output.dim()).expand(output.shape))
        if output.dim() > 1:
            found.append(_transposed(value))
    return found


def compare(stock: Op, ours: Op, tensors: Operands, mask: Sequence[bool], *, odd: bool = True) -> None:
    """Asserts that outputs, gradients and the random number generator's state agree for one mask."""
    results = []
    for op in (stock, ours):
        torch.manual_seed(3)
        args = leaves(tensors, mask)
        output = op(*args)
        state = torch.get_rng_state()
        wanted = [t for t in args if t is not None and t.requires_grad]
        gradients = [
            torch.autograd.grad(output, wanted, cotangent, retain_graph=True, allow_unused=True)
            for cotangent in cotangents(output, odd=odd)
        ]
        results.append((output, gradients, state))
    (eager_output, eager_gradients, eager_state), (output, gradients, state) = results
    assert_identical(eager_output, output, f"{mask}: output")
    assert_identical(eager_gradients, gradients, f"{mask}: gradients by cotangent")
    assert torch.equal(eager_state, state), "the random number generator was left in another state"


def compare_all(stock: Op, ours: Op, tensors: Operands, *, never: Iterable[int] = (), odd: bool = True) -> None:
    """``compare`` for every mask."""
    for mask in masks(tensors, never):
        compare(stock, ours, tensors, mask, odd=odd)


def kept_by_hooks(op: Op, args: Operands) -> int:
    """Bytes that go through saved-tensor hooks, each storage once, without the operands' and the output's own."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = op(*args)
    known = {t.untyped_storage().data_ptr() for t in (*args, output) if t is not None}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in packed}
    return sum(size for address, size in sizes.items() if address not in known)


class _Call(nn.Module):
    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op

    def forward(self, *args: Any) -> Any:
        return self.op(*args)


def kept_by_allocator(op: Op, args: Operands) -> int:
    """Bytes that the allocator holds between forward and backward, without the output's own."""
    return run(_Call(op), tuple(args)).measurement.kept


def kept(op: Op, tensors: Operands, mask: Sequence[bool]) -> int:
    """Bytes kept for one mask, counted in both ways, which must agree."""
    seen = kept_by_hooks(op, leaves(tensors, mask))
    held = kept_by_allocator(op, leaves(tensors, mask))
    assert seen == held, f"hooks see {seen} bytes, the allocator holds {held}"
    return held
