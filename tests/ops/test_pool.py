"""Pooling: the same numbers as eager; one byte per maximum, nothing for a mean."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_identical, compare, kept, kept_by_hooks, leaves, operand, special
from torch import Tensor, nn

from fxmem.ops import pool
from fxmem.passes.base import MODULES

MAX = [(getattr(F, f"max_pool{d}d"), getattr(pool, f"max_pool{d}d"), d) for d in (1, 2, 3)]
AVG = [(getattr(F, f"avg_pool{d}d"), getattr(pool, f"avg_pool{d}d"), d) for d in (1, 2, 3)]
ADAPTIVE_MAX = [(getattr(F, f"adaptive_max_pool{d}d"), getattr(pool, f"adaptive_max_pool{d}d"), d) for d in (1, 2, 3)]
ADAPTIVE_AVG = [(getattr(F, f"adaptive_avg_pool{d}d"), getattr(pool, f"adaptive_avg_pool{d}d"), d) for d in (1, 2, 3)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = (11, 9, 7)


def forms(*tables: list[tuple[Any, Any, int]]) -> Any:
    rows = [row for table in tables for row in table]
    return pytest.mark.parametrize(("stock", "ours", "dims"), rows, ids=[ours.__name__ for _, ours, _ in rows])


def bind(op: Any, *args: Any, **options: Any) -> Any:
    return lambda x: op(x, *args, **options)


def shape(dims: int, batch: int | None = 2, channels: int = 3) -> tuple[int, ...]:
    return (*(() if batch is None else (batch,)), channels, *SIZES[:dims])


MAX_OPTIONS: list[dict[str, Any]] = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 1, "dilation": 2, "padding": 1},
    {"kernel_size": 2, "stride": 3},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    {"kernel_size": 4, "stride": 3, "padding": 2, "ceil_mode": True},
    {"kernel_size": 1, "stride": 2},
]


@forms(MAX)
@pytest.mark.parametrize("batch", [2, None])
@pytest.mark.parametrize("options", MAX_OPTIONS, ids=str)
@pytest.mark.parametrize("make", [operand, special])
def test_max_pool(stock: Any, ours: Any, dims: int, options: dict[str, Any], batch: int | None, make: Any) -> None:
    compare(bind(stock, **options), bind(ours, **options), [make(*shape(dims, batch))], [True])


@forms(MAX)
def test_windows_of_their_own_size_per_dimension(stock: Any, ours: Any, dims: int) -> None:
    options: dict[str, Any] = {
        "kernel_size": (3, 2, 1)[:dims],
        "stride": (1, 2, 3)[:dims],
        "padding": (1, 0, 0)[:dims],
        "dilation": (2, 3, 1)[:dims],
    }
    compare(bind(stock, **options), bind(ours, **options), [operand(*shape(dims))], [True])


@forms(MAX, ADAPTIVE_MAX)
@pytest.mark.parametrize("value", [1.0, -float("inf"), float("nan"), -0.0])
def test_ties_go_to_the_element_that_torch_takes(stock: Any, ours: Any, dims: int, value: float) -> None:
    compare(bind(stock, 3), bind(ours, 3), [torch.full(shape(dims), value)], [True])


AVG_OPTIONS: list[dict[str, Any]] = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True},
]


@forms(AVG)
@pytest.mark.parametrize("batch", [2, None])
@pytest.mark.parametrize("options", [*AVG_OPTIONS, {"kernel_size": 3, "divisor_override": 5}], ids=str)
def test_avg_pool(stock: Any, ours: Any, dims: int, options: dict[str, Any], batch: int | None) -> None:
    if dims == 1 and "divisor_override" in options:
        options = {"kernel_size": (3,), "stride": (2,)}  # one dimension has no divisor_override; take tuples instead
    compare(bind(stock, **options), bind(ours, **options), [special(*shape(dims, batch))], [True])


@forms(ADAPTIVE_MAX, ADAPTIVE_AVG)
@pytest.mark.parametrize("batch", [2, None])
@pytest.mark.parametrize("size", [1, 2, 5, 7, 16, "mixed", "none"])
def test_adaptive(stock: Any, ours: Any, dims: int, size: Any, batch: int | None) -> None:
    if size == "mixed":
        size = (5, 3, 4)[:dims]
    if size == "none":
        size = (None, 3, 4)[:dims] if dims > 1 else 4
    compare(bind(stock, size), bind(ours, size), [special(*shape(dims, batch))], [True])


@forms(MAX, AVG, ADAPTIVE_MAX, ADAPTIVE_AVG)
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "gapped", "expanded"])
@pytest.mark.parametrize("batch", [2, None])
def test_layouts(stock: Any, ours: Any, dims: int, layout: str, batch: int | None) -> None:
    x = operand(*shape(dims, batch), layout=layout)
    if ours.__name__ == "max_pool3d" and batch is None and layout == "channels_last":
        assert outcome(stock, x, 3) == outcome(ours, x, 3)  # torch refuses this layout
        return
    compare(bind(stock, 3), bind(ours, 3), [x], [True])


@forms(MAX, AVG, ADAPTIVE_MAX, ADAPTIVE_AVG)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [1, 4])
def test_dtypes(stock: Any, ours: Any, dims: int, dtype: torch.dtype, channels: int) -> None:
    for layout in ("contiguous", "channels_last"):
        x = operand(*shape(dims, channels=channels), dtype=dtype, layout=layout)
        if ours.__name__ == "avg_pool3d" and dtype.itemsize == 2:
            assert outcome(stock, x, 3) == outcome(ours, x, 3)  # torch has no such kernel on CPU
            continue
        compare(bind(stock, 3), bind(ours, 3), [x], [True], odd=False)


def outcome(op: Any, x: Tensor, size: int) -> Any:
    """Shapes of the output and the gradient, or what the error says."""
    leaf = x.detach().requires_grad_()
    try:
        output = op(leaf, size)
        return output.shape, torch.autograd.grad(output.sum(), leaf)[0].shape
    except RuntimeError as error:
        return str(error).splitlines()[0]


@forms(MAX, AVG, ADAPTIVE_MAX, ADAPTIVE_AVG)
def test_empty_batch(stock: Any, ours: Any, dims: int) -> None:
    x = operand(0, 3, *SIZES[:dims])
    assert outcome(stock, x, 3) == outcome(ours, x, 3)


@forms(ADAPTIVE_MAX, ADAPTIVE_AVG)
def test_empty_output(stock: Any, ours: Any, dims: int) -> None:
    x = operand(*shape(dims))
    assert outcome(stock, x, 0) == outcome(ours, x, 0)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_many_rows_are_translated_in_parts(layout: str) -> None:
    x = operand(9, 8, 64, 64, layout=layout)
    compare(bind(F.max_pool2d, 3, 1, 1), bind(pool.max_pool2d, 3, 1, 1), [x], [True], odd=False)


@pytest.mark.parametrize("width", [256, 257])
def test_widest_window(width: int) -> None:
    """A byte tells 256 places apart; a wider window is torch's own."""
    x = operand(1, 2, 600)
    compare(bind(F.max_pool1d, width), bind(pool.max_pool1d, width), [x], [True])
    outputs = 2 * (600 // width)
    expected = outputs if width == 256 else 8 * outputs + 4 * x.numel()
    assert kept_by_hooks(lambda t: pool.max_pool1d(t.neg(), width).neg(), leaves([x], [True])) == expected


@forms(MAX, ADAPTIVE_MAX)
@pytest.mark.parametrize("positional", [True, False])
def test_return_indices(stock: Any, ours: Any, dims: int, positional: bool) -> None:
    x = operand(*shape(dims)).requires_grad_()
    rest = (3, 2, 1, 1, False, True) if "adaptive" not in ours.__name__ else (3, True)
    results = []
    for op in (stock, ours):
        output, indices = op(x, *rest) if positional else op(x, 3, return_indices=True)
        results.append((output, indices, torch.autograd.grad(output, x, operand(*output.shape, seed=2))[0]))
    assert_identical(*results, "return_indices")


@forms(MAX, AVG, ADAPTIVE_MAX, ADAPTIVE_AVG)
def test_bytes(stock: Any, ours: Any, dims: int) -> None:
    x = operand(*shape(dims))

    def followed(op: Any) -> Any:
        return lambda t: op(t.neg(), 3).neg()

    outputs = ours(x, 3).numel()
    is_max = "max" in ours.__name__
    assert kept(followed(ours), [x], [True]) == (outputs if is_max else 0)
    assert kept(followed(stock), [x], [True]) == 4 * x.numel() + (8 * outputs if is_max else 0)


@forms(ADAPTIVE_AVG)
def test_to_a_single_element_it_stays_torchs(stock: Any, ours: Any, dims: int) -> None:
    x = operand(*shape(dims)).requires_grad_()
    assert type(ours(x, 1).grad_fn) is type(stock(x, 1).grad_fn)
    assert kept_by_hooks(lambda t: ours(t.neg(), 1).neg(), [x]) == kept_by_hooks(lambda t: stock(t.neg(), 1).neg(), [x])


MODULE_OPTIONS: dict[type[nn.Module], list[tuple[Any, ...]]] = {
    nn.MaxPool1d: [(3,), (3, 2, 1, 2), (3, 2, 0, 1, True), (3, 2, 0, 1, False, True)],
    nn.MaxPool2d: [(3,), (3, 2, 1, 2), ((3, 2), 2, 0, 1, False, True)],
    nn.MaxPool3d: [(3,), (3, 2, 1, 2), (3, 2, 0, 1, False, True)],
    nn.AvgPool1d: [(3,), (3, 2, 1, True, False)],
    nn.AvgPool2d: [(3,), ((3, 2), 2, 1, True, False, 4)],
    nn.AvgPool3d: [(3,), (3, 2, 1, True, False, 4)],
    nn.AdaptiveMaxPool1d: [(3,), (3, True)],
    nn.AdaptiveMaxPool2d: [((None, 2),), (3, True)],
    nn.AdaptiveMaxPool3d: [(3,), (3, True)],
    nn.AdaptiveAvgPool1d: [(3,), (1,)],
    nn.AdaptiveAvgPool2d: [((None, 2),), (1,)],
    nn.AdaptiveAvgPool3d: [(3,), (1,)],
    nn.Upsample: [(3, None, "area"), (None, 1.5, "area"), (None, 2, "nearest"), (None, 2, "bilinear")],
}


@pytest.mark.parametrize(
    ("stock", "args"),
    [(m, a) for m, rows in MODULE_OPTIONS.items() for a in rows],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_modules(stock: type[nn.Module], args: tuple[Any, ...]) -> None:
    eager, selective = stock(*args), MODULES[stock][1](*args)
    x = operand(*shape(2 if stock is nn.Upsample else int(stock.__name__[-2])))
    if getattr(eager, "return_indices", False):
        assert_identical(list(eager(x.requires_grad_())), list(selective(x)), "indices")
    else:
        compare(eager, selective, [x], [True])


def test_every_pool_module_is_tested() -> None:
    table = {stock for rule in pool.RULES for stock in rule.modules}
    assert table == set(MODULE_OPTIONS)


@forms(MAX, AVG)
def test_bad_arguments_are_refused_as_torch_does(stock: Any, ours: Any, dims: int) -> None:
    x = operand(*shape(dims)).requires_grad_()
    calls: list[tuple[Tensor, tuple[Any, ...]]] = [
        (x, (20,)),
        (x, (3, 1, 2)),
        (x, (0,)),
        (x, ((2,) * (dims + 1),)),
        (x[0, 0], (3,)),
    ]
    for (tensor, args), op in itertools.product(calls, (stock, ours)):
        with pytest.raises((RuntimeError, IndexError)):
            op(tensor, *args)


@forms(ADAPTIVE_MAX, ADAPTIVE_AVG)
def test_bad_adaptive_arguments_are_refused(stock: Any, ours: Any, dims: int) -> None:
    x = operand(*shape(dims)).requires_grad_()
    for size, op in itertools.product(((3,) * (dims + 1), -1), (stock, ours)):
        with pytest.raises((RuntimeError, ValueError)):
            op(x, size)
