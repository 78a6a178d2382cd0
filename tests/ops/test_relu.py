"""ReLU: one bit per element, in every form and on every value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import LAYOUTS, assert_identical, compare, kept, operand, special
from torch import Tensor

from fxmem.ops.packing import BLOCK
from fxmem.ops.relu import SelectiveReLU, relu, relu_

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 5, 7), (2, 3, 4, 5, 3), (0,), (2, 0, 3)]

# The in-place forms get a tensor that autograd made, as leaves refuse them.
FORMS: dict[str, tuple[Any, Any]] = {
    "relu": (F.relu, relu),
    "inplace argument": (lambda x: F.relu(x.clone(), inplace=True), lambda x: relu(x.clone(), inplace=True)),
    "relu_": (lambda x: torch.relu_(x.clone()), lambda x: relu_(x.clone())),
    "module": (torch.nn.ReLU(), SelectiveReLU()),
    "module in place": (lambda x: torch.nn.ReLU(True)(x.clone()), lambda x: SelectiveReLU(True)(x.clone())),
    "module, stock call": (torch.nn.ReLU(), lambda x: SelectiveReLU()(x, pack=False)),
    "view in place": (lambda x: torch.relu_(x.clone().flip(0)[...]), lambda x: relu_(x.clone().flip(0)[...])),
}


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forms(form: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if form == "view in place" and shape == ():
        form = "relu_"  # there is nothing to flip
    compare(*FORMS[form], [special(*shape, dtype=dtype)], [True])


@pytest.mark.parametrize("form", ["relu", "relu_"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("shape", [(3, 5), (4, 3, 7), (2, 3, 5, 7), (2, 1, 5, 7), (2, 3, 4, 5, 3)], ids=str)
def test_layouts(form: str, layout: str, shape: tuple[int, ...]) -> None:
    compare(*FORMS[form], [special(*shape, layout=layout)], [True])


@pytest.mark.parametrize("numel", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks(numel: int, dtype: torch.dtype) -> None:
    compare(F.relu, relu, [special(numel, dtype=dtype)], [True])


@pytest.mark.parametrize("numel", range(1, 40))
def test_negative_zero_at_every_place(numel: int) -> None:
    """Vector and scalar code may treat the sign of zero differently, so it must be the same code that runs."""
    for dtype in DTYPES:
        compare(F.relu, relu, [torch.full((numel,), -0.0, dtype=dtype)], [True], odd=False)


@pytest.mark.parametrize("cut", [lambda t: t[:, 1], lambda t: t[..., ::2], lambda t: t[1:, :, 2:4], lambda t: t.mT])
def test_in_place_on_a_view_reaches_its_base(cut: Any) -> None:
    results = []
    for op in (torch.relu_, relu_):
        x = special(3, 4, 6).requires_grad_()
        base = x.clone()
        out = op(cut(base))
        total = base * 2
        results.append((out, total, torch.autograd.grad(total, x, operand(3, 4, 6, seed=2))[0]))
    assert_identical(*results, "view")


@pytest.mark.parametrize("op", [torch.relu_, relu_])
def test_in_place_over_what_another_node_keeps_is_refused(op: Any) -> None:
    x = operand(5).requires_grad_()
    y = x.sigmoid()
    op(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("op", [torch.relu_, relu_])
@pytest.mark.parametrize("cut", [lambda t: t, lambda t: t[1:]])
def test_in_place_on_a_leaf_is_refused_and_leaves_it_alone(op: Any, cut: Any) -> None:
    x = (-torch.ones(5)).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place operation"):
        op(cut(x))
    assert torch.equal(x, -torch.ones(5))


@pytest.mark.parametrize("op", [torch.relu_, relu_])
def test_in_place_on_one_of_several_views_is_refused(op: Any) -> None:
    first, _ = operand(4, 6).requires_grad_().clone().split(3, 1)
    with pytest.raises(RuntimeError, match="multiple views"):
        op(first)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8], ids=str)
def test_integers(dtype: torch.dtype) -> None:
    x = torch.arange(10, dtype=dtype)
    assert torch.equal(relu(x), F.relu(x))


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000])
def test_bytes(numel: int) -> None:
    x = operand(numel)

    def followed(op: Any) -> Any:
        return lambda t: op(t.neg()).neg()  # neither neighbour keeps anything, so the output is the ReLU's to keep

    assert kept(followed(relu), [x], [True]) == -(-numel // 8)
    assert kept(followed(relu_), [x], [True]) == -(-numel // 8)
    assert kept(followed(F.relu), [x], [True]) == 4 * numel


def test_keeps_nothing_without_a_gradient() -> None:
    x = operand(9)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t), lambda t: t):
        assert relu(x).grad_fn is None
    assert not packed
