"""Dropout: torch's own random numbers, one bit of them kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import LAYOUTS, compare, kept, operand, special
from torch import nn

from fxmem.ops.dropout import SelectiveDropout, dropout
from fxmem.ops.packing import BLOCK
from fxmem.passes.base import FUNCTIONS

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 5, 7), (0,), (2, 0, 3)]


def bind(op: Any, *args: Any, **options: Any) -> Any:
    return lambda x: op(x, *args, **options)


@pytest.mark.parametrize("p", [0, 0.1, 0.3, 0.5, 0.9, 1])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probabilities_modes_and_dtypes(p: float, training: bool, dtype: torch.dtype) -> None:
    x = special(3, 5, 7, dtype=dtype)
    compare(bind(F.dropout, p, training), bind(dropout, p, training), [x], [True])
    modules = [nn.Dropout(p).train(training), SelectiveDropout(p).train(training)]
    compare(*modules, [x], [True])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("inplace", [True, False])
def test_shapes(shape: tuple[int, ...], inplace: bool) -> None:
    compare(
        lambda x: F.dropout(x.clone(), 0.3, inplace=inplace),
        lambda x: dropout(x.clone(), 0.3, inplace=inplace),
        [special(*shape)],
        [True],
    )


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("shape", [(3, 5), (4, 3, 7), (2, 3, 5, 7), (2, 1, 5, 7), (2, 3, 4, 5, 3)], ids=str)
def test_layouts(layout: str, shape: tuple[int, ...]) -> None:
    compare(bind(F.dropout, 0.3), bind(dropout, 0.3), [operand(*shape, layout=layout)], [True])


@pytest.mark.parametrize("numel", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks(numel: int, dtype: torch.dtype) -> None:
    compare(bind(F.dropout, 0.1), bind(dropout, 0.1), [operand(numel, dtype=dtype)], [True])


@pytest.mark.parametrize("cut", [lambda t: t[:, 1], lambda t: t[..., ::2], lambda t: t.mT])
def test_in_place_on_a_view_reaches_its_base(cut: Any) -> None:
    def through(op: Any) -> Any:
        def call(x: Any) -> Any:
            base = x.clone()
            op(cut(base), 0.4, inplace=True)
            return base

        return call

    compare(through(F.dropout), through(dropout), [operand(3, 4, 6)], [True])


def test_in_place_on_a_leaf_is_refused_and_leaves_it_alone() -> None:
    x = torch.ones(50).requires_grad_()
    for op in (F.dropout, dropout):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place"):
            op(x, 0.5, inplace=True)
        assert torch.equal(x, torch.ones(50))


def test_positional_form_of_torch_dropout() -> None:
    ours = FUNCTIONS[torch.dropout][1]
    for train in (True, False):
        compare(bind(torch.dropout, 0.3, train), bind(ours, 0.3, train), [operand(3, 5)], [True])
        compare(bind(torch.dropout, p=0.3, train=train), bind(ours, p=0.3, train=train), [operand(3, 5)], [True])


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_bad_probability(p: float) -> None:
    for op in (F.dropout, dropout):
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            op(operand(3).requires_grad_(), p)


def test_probability_and_mode_are_read_at_every_call() -> None:
    ours, stock = SelectiveDropout(0.5), nn.Dropout(0.5)
    for p, training in ((0.2, True), (0.2, False), (0.7, True)):
        for module in (ours, stock):
            module.p = p
            module.train(training)
        compare(stock, ours, [operand(40)], [True])


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000])
def test_bytes(numel: int) -> None:
    x = operand(numel)

    def followed(op: Any, inplace: bool) -> Any:
        return lambda t: op(t.neg(), 0.5, inplace=inplace).neg()

    for inplace in (True, False):
        assert kept(followed(dropout, inplace), [x], [True]) == -(-numel // 8)
    assert kept(followed(F.dropout, False), [x], [True]) == 4 * numel
