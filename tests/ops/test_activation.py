"""Piecewise linear activations: one bit per element, in every form and on every value."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import LAYOUTS, SPECIAL, assert_identical, compare, kept, leaves, operand
from torch import Tensor, nn

from fxmem.ops import activation as ours
from fxmem.ops.packing import BLOCK

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 5, 7), (2, 3, 4, 5, 3), (0,), (2, 0, 3)]


# Where hardtanh, hardshrink and softshrink meet NaN, eager itself depends on the number of threads.
pytestmark = pytest.mark.usefixtures("one_thread")


SLOPE = torch.tensor([0.3])

# By name: torch's op, ours, and where the pieces meet.
PLAIN: dict[str, tuple[Any, Any, tuple[float, ...]]] = {
    "leaky_relu": (F.leaky_relu, ours.leaky_relu, (0.0,)),
    "leaky_relu, slope 0": (lambda x: F.leaky_relu(x, 0), lambda x: ours.leaky_relu(x, 0), (0.0,)),
    "leaky_relu, slope 0.1": (lambda x: F.leaky_relu(x, 0.1), lambda x: ours.leaky_relu(x, 0.1), (0.0,)),
    "leaky_relu, slope -2": (lambda x: F.leaky_relu(x, -2), lambda x: ours.leaky_relu(x, -2), (0.0,)),
    "rrelu": (F.rrelu, ours.rrelu, (0.0,)),
    "rrelu, bounds": (lambda x: F.rrelu(x, 0, 1), lambda x: ours.rrelu(x, 0, 1), (0.0,)),
    "rrelu, training": (lambda x: F.rrelu(x, training=True), lambda x: ours.rrelu(x, training=True), (0.0,)),
    "hardtanh": (F.hardtanh, ours.hardtanh, (-1.0, 1.0)),
    "hardtanh, rounded bounds": (lambda x: F.hardtanh(x, -0.3, 0.1), lambda x: ours.hardtanh(x, -0.3, 0.1), (-0.3, 0.1)),
    "hardtanh, no width": (lambda x: F.hardtanh(x, 1, 1), lambda x: ours.hardtanh(x, 1, 1), (1.0,)),
    "relu6": (F.relu6, ours.relu6, (0.0, 6.0)),
    "hardsigmoid": (F.hardsigmoid, ours.hardsigmoid, (-3.0, 3.0)),
    "threshold": (lambda x: F.threshold(x, 0.1, 20), lambda x: ours.threshold(x, 0.1, 20), (0.1,)),
    "torch.threshold": (lambda x: torch.threshold(x, -1, 0), lambda x: ours.threshold(x, -1, 0), (-1.0,)),
    "hardshrink": (F.hardshrink, ours.hardshrink, (-0.5, 0.5)),
    "hardshrink, lambd": (lambda x: F.hardshrink(x, 0.1), lambda x: ours.hardshrink(x, 0.1), (-0.1, 0.1)),
    "softshrink": (F.softshrink, ours.softshrink, (-0.5, 0.5)),
    "softshrink, lambd": (lambda x: F.softshrink(x, 0.1), lambda x: ours.softshrink(x, 0.1), (-0.1, 0.1)),
    "abs": (torch.abs, ours.abs, (0.0,)),
    "clamp": (lambda x: torch.clamp(x, -0.3, 0.1), lambda x: ours.clamp(x, -0.3, 0.1), (-0.3, 0.1)),
    "clamp, no width": (lambda x: torch.clamp(x, 1, 1), lambda x: ours.clamp(x, 1, 1), (1.0,)),
    "clamp, min above max": (lambda x: torch.clamp(x, 1, 0), lambda x: ours.clamp(x, 1, 0), (0.0, 1.0)),
    "clamp, min": (lambda x: torch.clamp(x, min=0.1), lambda x: ours.clamp(x, min=0.1), (0.1,)),
    "clamp, max": (lambda x: torch.clip(x, max=0.1), lambda x: ours.clamp(x, max=0.1), (0.1,)),
    "clamp_min": (lambda x: torch.clamp_min(x, 0), lambda x: ours.clamp_min(x, 0), (0.0,)),
    "clamp_max": (lambda x: torch.clamp_max(x, 6), lambda x: ours.clamp_max(x, 6), (6.0,)),
    "prelu": (lambda x: F.prelu(x, SLOPE.to(x)), lambda x: ours.prelu(x, SLOPE.to(x)), (0.0,)),
}
INPLACE: dict[str, tuple[Any, Any, tuple[float, ...]]] = {
    "leaky_relu_": (F.leaky_relu_, ours.leaky_relu_, (0.0,)),
    "leaky_relu_, slope 0": (lambda x: F.leaky_relu(x, 0, True), lambda x: ours.leaky_relu(x, 0, True), (0.0,)),
    "rrelu_": (F.rrelu_, ours.rrelu_, (0.0,)),
    "rrelu_, training": (lambda x: F.rrelu_(x, training=True), lambda x: ours.rrelu_(x, training=True), (0.0,)),
    "hardtanh_": (F.hardtanh_, ours.hardtanh_, (-1.0, 1.0)),
    "hardtanh_, bounds": (lambda x: F.hardtanh(x, -0.3, 0.1, True), lambda x: ours.hardtanh(x, -0.3, 0.1, True), (-0.3, 0.1)),
    "relu6_": (lambda x: F.relu6(x, True), lambda x: ours.relu6(x, True), (0.0, 6.0)),
    "hardsigmoid_": (lambda x: F.hardsigmoid(x, True), lambda x: ours.hardsigmoid(x, True), (-3.0, 3.0)),
    "threshold_": (lambda x: F.threshold_(x, 0.1, 20), lambda x: ours.threshold_(x, 0.1, 20), (0.1,)),
    "abs_": (torch.abs_, ours.abs_, (0.0,)),
    "clamp_": (lambda x: torch.clamp_(x, -0.3, 0.1), lambda x: ours.clamp_(x, -0.3, 0.1), (-0.3, 0.1)),
    "clamp_, min": (lambda x: torch.clamp_(x, min=0.1), lambda x: ours.clamp_(x, min=0.1), (0.1,)),
    "clamp_min_": (lambda x: torch.clamp_min_(x, 0), lambda x: ours.clamp_min_(x, 0), (0.0,)),
    "clamp_max_": (lambda x: torch.clamp_max_(x, 6), lambda x: ours.clamp_max_(x, 6), (6.0,)),
}
# The in-place forms get a tensor that autograd made, as leaves refuse them.
FORMS = PLAIN | {
    name: (lambda x, op=stock: op(x.clone()), lambda x, op=mine: op(x.clone()), where)
    for name, (stock, mine, where) in INPLACE.items()
}
# For these torch has two answers to NaN, by the layout of the gradient.
NAN_BY_LAYOUT = ("hardtanh", "relu6", "hardshrink", "softshrink")

MODULES: dict[str, tuple[nn.Module, nn.Module, tuple[float, ...]]] = {
    "LeakyReLU": (nn.LeakyReLU(0.2), ours.SelectiveLeakyReLU(0.2), (0.0,)),
    "RReLU": (nn.RReLU().eval(), ours.SelectiveRReLU().eval(), (0.0,)),
    "RReLU, train": (nn.RReLU(), ours.SelectiveRReLU(), (0.0,)),
    "Hardtanh": (nn.Hardtanh(-2, 1), ours.SelectiveHardtanh(-2, 1), (-2.0, 1.0)),
    "ReLU6": (nn.ReLU6(), ours.SelectiveReLU6(), (0.0, 6.0)),
    "Hardsigmoid": (nn.Hardsigmoid(), ours.SelectiveHardsigmoid(), (-3.0, 3.0)),
    "Threshold": (nn.Threshold(0.1, 20), ours.SelectiveThreshold(0.1, 20), (0.1,)),
    "Hardshrink": (nn.Hardshrink(0.3), ours.SelectiveHardshrink(0.3), (-0.3, 0.3)),
    "PReLU": (nn.PReLU().requires_grad_(False), ours.SelectivePReLU().requires_grad_(False), (0.0,)),
    "LogSigmoid": (nn.LogSigmoid(), ours.SelectiveLogSigmoid(), (0.0,)),
    "Softshrink": (nn.Softshrink(0.3), ours.SelectiveSoftshrink(0.3), (-0.3, 0.3)),
}


def values(*shape: int, where: tuple[float, ...], dtype: torch.dtype = torch.float32, nan: bool = True) -> Tensor:
    """Random numbers, half of which are special, where pieces meet, or right beside."""
    t = operand(*shape, dtype=dtype)
    least = torch.finfo(dtype).smallest_normal
    points = torch.tensor([*where, 0.0], dtype=dtype)
    ends = torch.tensor([-torch.inf, torch.inf], dtype=dtype)
    beside = [torch.nextafter(points, end.expand_as(points)) for end in ends]
    others = [v for v in SPECIAL if nan or v == v]
    picked = torch.cat([torch.tensor([*others, least, -least / 2], dtype=dtype), points, *beside])
    flat = t.view(-1)
    for i, value in zip(range(0, flat.numel(), 2), itertools.cycle(picked), strict=False):
        flat[i] = value
    return t


def check(form: tuple[Any, Any, tuple[float, ...]], name: str, x: Tensor) -> None:
    stock, mine, _ = form
    by_layout = name.startswith(NAN_BY_LAYOUT)
    compare(stock, mine, [x], [True], odd=not by_layout)
    if by_layout:
        compare(stock, mine, [x.nan_to_num(0.25)], [True])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forms(name: str, dtype: torch.dtype) -> None:
    if "training" in name and dtype is torch.float16:
        pytest.skip("torch draws no slopes in float16 on CPU")
    for shape in (*SHAPES, (101,)):
        check(FORMS[name], name, values(*shape, where=FORMS[name][2], dtype=dtype))


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    stock, mine, where = MODULES[name]
    x = values(3, 67, where=where, nan=not name.startswith(("Hardtanh", "ReLU6", "Hardshrink", "Softshrink")))
    compare(stock, mine, [x], [True])
    if "RReLU" not in name and name != "LogSigmoid":
        compare(stock, lambda t: mine(t, pack=False), [x], [True])
    if hasattr(stock, "inplace"):
        stock.inplace = mine.inplace = True
        compare(lambda t: stock(t.clone()), lambda t: mine(t.clone()), [x], [True])
        stock.inplace = mine.inplace = False


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts(name: str, layout: str) -> None:
    for shape in ((3, 5), (4, 3, 7), (2, 3, 5, 7), (2, 1, 5, 7)):
        check(FORMS[name], name, LAYOUTS[layout](values(*shape, where=FORMS[name][2])))


@pytest.mark.parametrize(
    "name", ["leaky_relu", "hardtanh", "hardsigmoid", "threshold", "hardshrink", "softshrink", "abs", "clamp"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks(name: str, dtype: torch.dtype) -> None:
    pattern = values(997, where=FORMS[name][2], dtype=dtype)
    for numel in (BLOCK - 1, BLOCK + 1, 2 * BLOCK + 5):
        compare(*FORMS[name][:2], [pattern.repeat(-(-numel // 997))[:numel].clone()], [True], odd=False)


@pytest.mark.parametrize("name", INPLACE)
@pytest.mark.parametrize("cut", [lambda t: t[:, 1], lambda t: t[..., ::2], lambda t: t.mT])
def test_in_place_on_a_view_reaches_its_base(name: str, cut: Any) -> None:
    results = []
    for op in INPLACE[name][:2]:
        torch.manual_seed(3)
        x = values(3, 4, 6, where=INPLACE[name][2], nan=False).requires_grad_()
        base = x.clone()
        out = op(cut(base))
        total = base * 2
        results.append((out, total, torch.autograd.grad(total, x, operand(3, 4, 6, seed=2))[0]))
    assert_identical(*results, "view")


@pytest.mark.parametrize("name", INPLACE)
def test_in_place_is_refused_as_torch_refuses_it(name: str) -> None:
    for op in INPLACE[name][:2]:
        x = (-torch.ones(5)).requires_grad_()
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place operation"):
            op(x[1:])
        assert torch.equal(x, -torch.ones(5))
        y = operand(5).requires_grad_().sigmoid()
        op(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("op", [F.leaky_relu, ours.leaky_relu])
def test_negative_slope_in_place_has_no_derivative(op: Any) -> None:
    y = op(operand(5).requires_grad_().clone(), -0.1, True)
    with pytest.raises(RuntimeError, match="negative slope"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("stock", "mine"), [(F.hardtanh, ours.hardtanh), (lambda x, a, b: F.rrelu(x, a, b), lambda x, a, b: ours.rrelu(x, a, b))]
)
def test_bounds_in_the_wrong_order(stock: Any, mine: Any) -> None:
    messages = []
    for op in (stock, mine):
        with pytest.raises((ValueError, RuntimeError)) as error:
            op(operand(5).requires_grad_(), 2, 1)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_complex_and_integers_are_torchs() -> None:
    z = torch.randn(5, dtype=torch.complex64)
    compare(torch.abs, ours.abs, [z], [True], odd=False)
    n = torch.arange(-3, 3)
    assert torch.equal(ours.abs(n), n.abs())
    assert torch.equal(ours.relu6(n), F.relu6(n))


# What the gradient of NaN is says whether both forms ask the same comparison.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_nan_at_every_place(name: str, dtype: torch.dtype) -> None:
    if "training" in name and dtype is torch.float16:
        pytest.skip("torch draws no slopes in float16 on CPU")
    for numel in (*range(1, 8), 15, 16, 17, 31, 33, 63, 64, 65, 200):
        compare(*FORMS[name][:2], [torch.full((numel,), float("nan"), dtype=dtype)], [True], odd=False)


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("name", [n for n in FORMS if "training" not in n and "-2" not in n and n != "prelu"])
def test_bytes(name: str, numel: int) -> None:
    stock, mine, _ = FORMS[name]
    planes = 2 if name.startswith("abs") else 1

    def surrounded(op: Any) -> Any:
        return lambda t: op(t.neg()).neg()  # neither neighbour keeps anything

    x = operand(numel)
    assert kept(surrounded(mine), [x], [True]) == planes * -(-numel // 8)
    assert kept(surrounded(stock), [x], [True]) == (8 if name.startswith("rrelu") else 4) * numel


@pytest.mark.parametrize("name", FORMS)
def test_keeps_nothing_without_a_gradient(name: str) -> None:
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t), lambda t: t):
        assert FORMS[name][1](operand(9)).grad_fn is None
    assert not packed


def test_the_random_number_generator_is_left_alone_in_eval_mode() -> None:
    state = torch.get_rng_state()
    for name in ("rrelu", "rrelu_"):
        FORMS[name][1](*leaves([operand(9)], [True])).sum().backward()
    assert torch.equal(state, torch.get_rng_state())


def test_hardsigmoid_differentiates_twice_though_torchs_own_does_not() -> None:
    x = operand(3, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(ours.hardsigmoid, [x])
    stock, mine = (
        torch.func.vmap(torch.func.grad(lambda t, op=op: op(t).sum()))(x) for op in (F.hardsigmoid, ours.hardsigmoid)
    )
    assert torch.equal(stock, mine)


def test_every_form_that_torch_has_is_replaced() -> None:
    found = {f for rule in ours.RULES for f in rule.functions}
    for name in ("leaky_relu", "rrelu", "relu6", "hardtanh", "hardsigmoid", "threshold", "hardshrink", "softshrink"):
        for where in (F, torch, torch._C._nn):
            for form in (name, f"{name}_"):
                if hasattr(where, form):
                    assert getattr(where, form) in found, f"{where}.{form}"
    assert {torch.abs, torch.absolute, torch.abs_, operator.abs} <= found
