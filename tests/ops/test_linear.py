"""Linear: torch's own, except that under autocast no low-precision copy of a frozen weight is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import compare, compare_all, kept, kept_by_hooks, leaves, masks, operand
from torch import Tensor, nn

from fxmem.ops.linear import SelectiveLinear, linear

SHAPES = [(16,), (5, 16), (3, 5, 16), (2, 3, 1, 16), (0, 16), (3, 0, 16)]


def operands(shape: tuple[int, ...], bias: bool, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    return [
        operand(*shape, dtype=dtype),
        operand(9, 16, dtype=dtype, seed=1),
        operand(9, dtype=dtype, seed=2) if bias else None,
    ]


def under_autocast(op: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    def call(*args: Any) -> Any:
        with torch.autocast("cpu", dtype):
            return op(*args)

    return call


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_without_autocast(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    compare_all(F.linear, linear, operands(shape, bias, dtype))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_under_autocast(dtype: torch.dtype, shape: tuple[int, ...], bias: bool, low: torch.dtype) -> None:
    compare_all(under_autocast(F.linear, low), under_autocast(linear, low), operands(shape, bias, dtype))


@pytest.mark.parametrize("layout", ["transposed", "gapped", "expanded"])
@pytest.mark.parametrize("shape", [(5, 16), (3, 5, 16)], ids=str)
def test_layouts_under_autocast(shape: tuple[int, ...], layout: str) -> None:
    tensors = [operand(*shape, layout=layout), operand(9, 16, seed=1, layout=layout), operand(9, seed=2)]
    compare_all(under_autocast(F.linear), under_autocast(linear), tensors)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float64], ids=str)
def test_mixed_dtypes_under_autocast(weight_dtype: torch.dtype) -> None:
    """A weight that is low-precision already is used as it is; one in float64 is refused by torch, so also by us."""
    tensors = [operand(5, 16), operand(9, 16, dtype=weight_dtype, seed=1), None]
    if weight_dtype is torch.float64:
        for op in (F.linear, linear):
            with pytest.raises(RuntimeError, match="dtype"):
                under_autocast(op)(*leaves(tensors, (True, False, False)))
    else:
        compare_all(under_autocast(F.linear), under_autocast(linear), tensors)


def test_nested_autocast() -> None:
    def nest(op: Any) -> Any:
        def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = op(x, w, b)
                with torch.autocast("cpu", enabled=False):
                    z: Tensor = op(x, w, b)
            return y.float() + z

        return call

    compare_all(nest(F.linear), nest(linear), operands((5, 16), True))


def test_backward_inside_the_autocast_region() -> None:
    results = []
    for op in (F.linear, linear):
        x, w, b = leaves(operands((3, 5, 16), True), (True, False, True))
        with torch.autocast("cpu", torch.bfloat16):
            y = op(x, w, b)
            results.append(torch.autograd.grad(y, [x, b], torch.ones_like(y)))
    for eager, ours in zip(*results, strict=True):
        assert torch.equal(eager, ours)
        assert eager.dtype is ours.dtype


@pytest.mark.parametrize("bias", [True, False])
def test_bytes_without_autocast_are_torchs(bias: bool) -> None:
    tensors = operands((5, 16), bias)
    for mask in masks(tensors):
        assert kept_by_hooks(linear, leaves(tensors, mask)) == kept_by_hooks(F.linear, leaves(tensors, mask)) == 0


COPY_OF_WEIGHT, COPY_OF_INPUT = 2 * 9 * 16, 2 * 5 * 16


@pytest.mark.parametrize("bias", [True, False])
def test_bytes_under_autocast(bias: bool) -> None:
    tensors = operands((5, 16), bias)
    for mask in masks(tensors):
        needs_input, needs_weight, _ = mask
        ours = kept_by_hooks(under_autocast(linear), leaves(tensors, mask))
        # A trainable weight takes torch's own op: its copy, for the input's gradient, and the input's.
        expected = (COPY_OF_WEIGHT * needs_input + COPY_OF_INPUT) if needs_weight else 0
        assert ours == expected, mask
        eager = COPY_OF_WEIGHT * needs_input + COPY_OF_INPUT * needs_weight
        assert kept_by_hooks(under_autocast(F.linear), leaves(tensors, mask)) == eager, mask
    assert kept(under_autocast(linear), tensors, (True, False, bias)) == 0


def test_module_form() -> None:
    for autocast in (False, True):
        stock = nn.Linear(16, 9)
        ours = SelectiveLinear(16, 9)
        ours.load_state_dict(stock.state_dict())
        stock.weight.requires_grad_(False)
        ours.weight.requires_grad_(False)
        wrap = under_autocast if autocast else lambda f: f
        compare(wrap(stock), wrap(ours), [operand(5, 16)], [True])
