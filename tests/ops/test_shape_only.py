"""Ops of which backward reads integers and shapes alone: padding, area interpolation, reading and writing by index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import LAYOUTS, assert_identical, compare, compare_all, kept, operand
from torch import Tensor, nn

import fxmem
from fxmem.ops import index, pad, pool

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PADDINGS = {(2, 1): (3, 5), (1, 0, 2, 1): (2, 3, 4, 5), (1, 1, 0, 2, 1, 0): (2, 3, 4, 4, 5), (-1, 2, 1, -1): (3, 4, 5)}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "constant"])
def test_pad(mode: str, dtype: torch.dtype, layout: str) -> None:
    for padding, shape in PADDINGS.items():
        if mode in ("reflect", "circular") and min(padding) < 0:
            continue
        x = operand(*shape, dtype=dtype, layout=layout)
        compare(lambda t, p=padding: F.pad(t, p, mode), lambda t, p=padding: pad.pad(t, p, mode), [x], [True])


def _frozen_convolution(mode: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode), nn.Tanh()).requires_grad_(False)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_padded_convolution(mode: str) -> None:
    """A convolution with a padding of its own keeps nothing if frozen, and once if not: eager keeps the input twice."""
    x = operand(2, 3, 6, 7).requires_grad_()
    model = nn.Sequential(_frozen_convolution(mode), nn.Conv2d(4, 4, 3, padding=1, padding_mode=mode))
    optimized = fxmem.optimize(model, (x,))
    eager, ours = fxmem.measure(model, (x,)), fxmem.measure(optimized, (x,))
    padded, tanh = 4 * 2 * 4 * 8 * 9, 4 * 2 * 4 * 6 * 7
    # Tanh keeps its output, the convolution after it the padded copy.
    assert ours.kept == padded + tanh
    assert eager.kept == padded + tanh + 4 * 2 * 3 * 8 * 9
    outputs = [m(x) for m in (model, optimized)]
    assert_identical(*outputs, "output")
    assert_identical(
        *[torch.autograd.grad(o, [x, *model[1].parameters()], operand(2, 4, 6, 7, seed=2)) for o in outputs], "grads"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_area(dtype: torch.dtype, layout: str) -> None:
    for shape in ((2, 3, 9), (2, 3, 6, 5), (2, 3, 4, 6, 5)):
        x = operand(*shape, dtype=dtype, layout=layout)
        for size, factor in ((3, None), (None, 0.5), (7, None)):
            stock = nn.Upsample(size, factor, "area")
            ours = pool.SelectiveUpsample(size, factor, "area")
            compare(stock, ours, [x], [True])
            compare(
                lambda t, s=size, f=factor: F.interpolate(t, s, f, "area"),
                lambda t, s=size, f=factor: pool.interpolate(t, s, f, mode="area"),
                [x],
                [True],
            )


def test_area_refuses_what_torch_refuses() -> None:
    x = operand(2, 3, 6, 5).requires_grad_()
    for options in ({}, {"size": 3, "scale_factor": 2.0}, {"size": (1, 2, 3)}, {"size": 3, "align_corners": True}):
        messages = []
        for op in (F.interpolate, pool.interpolate):
            with pytest.raises((ValueError, RuntimeError)) as error:
                op(x, mode="area", **options)  # type: ignore[arg-type]
            messages.append(str(error.value))
        assert messages[0] == messages[1]


WHERE = torch.tensor([3, 0, 2])
INDEX = WHERE.view(1, 3, 1).expand(2, 3, 5)
X, SOURCE = operand(2, 4, 5), operand(2, 3, 5, seed=1)
READS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "gather": (lambda x: torch.gather(x, 1, INDEX), lambda x: index.gather(x, 1, INDEX)),
    "take_along_dim": (lambda x: x.take_along_dim(INDEX[:1] - 4, -2), lambda x: index.take_along_dim(x, INDEX[:1] - 4, -2)),
    "take_along_dim, flat": (lambda x: torch.take_along_dim(x, WHERE), lambda x: index.take_along_dim(x, WHERE)),
    "take": (lambda x: torch.take(x, WHERE - 9), lambda x: index.take(x, WHERE - 9)),
    "masked_select": (lambda x: x.masked_select(X[0] > 0), lambda x: index.masked_select(x, X[0] > 0)),
}
WRITES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "index_add": (lambda x, s: x.index_add(1, WHERE, s), lambda x, s: index.index_add(x, 1, WHERE, s)),
    "index_add, alpha": (
        lambda x, s: torch.index_add(x, 1, WHERE, s, alpha=0.3),
        lambda x, s: index.index_add(x, 1, WHERE, s, alpha=0.3),
    ),
    "index_add_": (lambda x, s: (x + 0).index_add_(1, WHERE, s), lambda x, s: index.index_add_(x + 0, 1, WHERE, s)),
    "index_copy": (lambda x, s: x.index_copy(1, WHERE, s), lambda x, s: index.index_copy(x, 1, WHERE, s)),
    "index_copy_": (lambda x, s: (x + 0).index_copy_(1, WHERE, s), lambda x, s: index.index_copy_(x + 0, 1, WHERE, s)),
    **{
        f"scatter_reduce, {reduce}, {own}": (
            lambda x, s, r=reduce, o=own: torch.scatter_reduce(x, 1, INDEX, s, r, include_self=o),
            lambda x, s, r=reduce, o=own: index.scatter_reduce(x, 1, INDEX, s, r, include_self=o),
        )
        for reduce in ("sum", "mean", "amax")
        for own in (True, False)
    },
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "gapped", "expanded"])
def test_index(dtype: torch.dtype, layout: str) -> None:
    x, source = LAYOUTS[layout](X).to(dtype), LAYOUTS[layout](SOURCE).to(dtype)
    for name, (stock, ours) in READS.items():
        if not name.endswith("flat") or x.is_contiguous():  # else torch refuses
            compare(stock, ours, [x], [True])
    for stock, ours in WRITES.values():
        compare_all(stock, ours, [x, source])


def test_index_without_elements_and_dimensions() -> None:
    none = torch.zeros(0, 4, 5)
    nowhere = torch.zeros(0, dtype=torch.int64)
    compare(lambda x: x.gather(1, INDEX[:0]), lambda x: index.gather(x, 1, INDEX[:0]), [none], [True])
    compare(lambda x: x.masked_select(x > 0), lambda x: index.masked_select(x, x > 0), [none], [True])
    compare(lambda x: x.take(nowhere), lambda x: index.take(x, nowhere), [none], [True])
    write = lambda x, s: x.index_add(1, nowhere, s), lambda x, s: index.index_add(x, 1, nowhere, s)
    compare_all(*write, [X, torch.zeros(2, 0, 5)])
    one, zero = torch.tensor(2.0), torch.tensor(0)
    compare(lambda x: x.gather(0, zero), lambda x: index.gather(x, 0, zero), [one], [True])
    compare(lambda x: x.take(zero), lambda x: index.take(x, zero), [one], [True])
    compare_all(lambda x, s: x.index_add(0, zero, s), lambda x, s: index.index_add(x, 0, zero, s), [one, one + 1])
    compare_all(lambda x, s: x.index_copy(0, zero, s), lambda x, s: index.index_copy(x, 0, zero, s), [one, one + 1])


def test_index_of_complex_numbers() -> None:
    z, s = torch.complex(X, X.flip(0)), torch.complex(SOURCE, SOURCE.flip(0))
    for stock, ours in (READS["gather"], READS["take"]):
        results = []
        for op in (stock, ours):
            leaf = z.clone().requires_grad_()
            output = op(leaf)
            results.append([torch.view_as_real(t) for t in (output, *torch.autograd.grad(output, leaf, output.detach() * 2j))])
        assert_identical(*results, "complex")
    for stock, ours in (WRITES["index_add"], WRITES["index_copy"], WRITES["index_add, alpha"]):
        results = []
        for op in (stock, ours):
            leaves = [z.clone().requires_grad_(), s.clone().requires_grad_()]
            output = op(*leaves)
            gradients = torch.autograd.grad(output, leaves, output.detach() * 2j)
            results.append([torch.view_as_real(t.resolve_conj()) for t in gradients])
        assert_identical(*results, "complex")


def test_index_errors_are_torchs() -> None:
    x = X.clone().requires_grad_()
    for ours, stock, args in (
        (index.gather, torch.gather, (1, INDEX.float())),
        (index.gather, torch.gather, (5, INDEX)),
        (index.take_along_dim, torch.take_along_dim, (INDEX[:, :, :2], 1)),
        (index.take_along_dim, torch.take_along_dim, (WHERE, 1)),
        (index.index_add, torch.index_add, (1, WHERE, SOURCE[:, :2].clone().requires_grad_())),
        (index.scatter_reduce, torch.scatter_reduce, (1, INDEX, SOURCE, "median")),
    ):
        messages = []
        for op in (stock, ours):
            with pytest.raises((RuntimeError, IndexError)) as error:
                op(x, *args)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


def test_writing_into_a_leaf() -> None:
    """Refused as by torch where it requires grad; else it becomes the output."""
    source = SOURCE.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        index.index_add_(X.clone().requires_grad_(), 1, WHERE, source)
    results = []
    for op in (Tensor.index_add_, index.index_add_):
        total = torch.zeros(2, 4, 5)
        out = op(total, 1, WHERE, source)
        assert out is total
        assert total.requires_grad
        results.append([total, torch.autograd.grad(total, source, X)[0]])
    assert_identical(*results, "leaf")


def test_bytes_of_an_index() -> None:
    def between(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: op(*(t.neg() for t in args)).neg()

    for name, (stock, ours) in {**READS, **WRITES}.items():
        if "flat" in name or "amax" in name:
            continue  # torch's own op runs
        operands = [X] if name in READS else [X, SOURCE]
        args = [t.clone().requires_grad_() for t in operands]
        made = {"take_along_dim": 8 * 15, "take": 8 * 3, "masked_select": 20}.get(name, 0)  # the index, by the call itself
        assert fxmem.measure(_Module(between(ours)), tuple(args)).kept == made, name
        assert fxmem.measure(_Module(between(stock)), tuple(args)).kept > made, name


class _Module(nn.Module):
    def __init__(self, op: Callable[..., Tensor]) -> None:
        super().__init__()
        self.op = op

    def forward(self, *args: Tensor) -> Tensor:
        return self.op(*args)


def test_padding_keeps_nothing() -> None:
    for padding, shape in PADDINGS.items():
        if min(padding) >= 0:
            x = operand(*shape)
            assert kept(lambda t, p=padding: pad.pad(t.neg(), p, "reflect"), [x], [True]) == 0
            assert kept(lambda t, p=padding: F.pad(t.neg(), p, "reflect"), [x], [True]) == x.nbytes
