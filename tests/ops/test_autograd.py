"""Every op under everything that autograd can do with it: eager is the oracle throughout."""

from __future__ import annotations

import importlib
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Operands, assert_identical, kept_by_allocator, kept_by_hooks, leaves, operand
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fxmem.ops import activation, batch_norm, conv, dropout, index, pad, pool, relu

# Torch's vmap says so of some of its own ops.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching")


@pytest.fixture(scope="module", autouse=True)
def _decompositions() -> None:
    """Forward-mode AD loads these at its first use, by a way that torch itself has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._decomp.decompositions_for_jvp")


@dataclass(frozen=True)
class Case:
    """One op with operands for which it steps in; ``mask`` says which of them require grad."""

    name: str
    stock: Callable[..., Tensor]
    ours: Callable[..., Tensor]
    tensors: Operands
    mask: tuple[bool, ...]
    bytes: int
    alive: int = 0  # of those, what somebody else holds anyway

    def args(self) -> list[Tensor | None]:
        return leaves(self.tensors, self.mask)

    def wanted(self, args: list[Tensor | None]) -> list[Tensor]:
        return [t for t in args if t is not None and t.requires_grad]

    def both(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """The stock op and ours, each on the same random numbers."""

        def seeded(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def call(*args: Any) -> Tensor:
                torch.manual_seed(5)
                return op(*args)

            return call

        return seeded(self.stock), seeded(self.ours)


DOUBLE = torch.float64
SPATIAL = (5, 4, 4)


def _convolutions() -> list[Case]:
    cases = []
    for dims in (1, 2, 3):
        x, w, b = (
            operand(*s, dtype=DOUBLE, seed=i) for i, s in enumerate(((2, 2, *SPATIAL[:dims]), (2, 2, *[3] * dims), (2,)))
        )
        for name in (f"conv{dims}d", f"conv_transpose{dims}d"):
            stock, ours = getattr(F, name), getattr(conv, name)
            cases.append(Case(name, stock, ours, (x, w, b), (True, False, True), 0))
    return [*cases, Case("conv, bias only", F.conv2d, conv.conv2d, cases[2].tensors, (False, False, True), 0)]


def _norms() -> list[Case]:
    cases = []
    for dims in (0, 1, 2, 3):
        x, mean, var, w, b = (operand(*s, dtype=DOUBLE, seed=i) for i, s in enumerate(((2, 3, *SPATIAL[:dims]), *[(3,)] * 4)))
        tensors = (x, mean, var.abs() + 0.5, w, b)
        mask = (True, False, False, False, True)
        cases.append(Case(f"batch_norm, {dims}d", F.batch_norm, batch_norm.batch_norm, tensors, mask, 0))
    return cases


def _pools() -> list[Case]:
    cases = []
    for dims in (1, 2, 3):
        x = operand(2, 2, *SPATIAL[:dims], dtype=DOUBLE)
        for name in ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"):
            stock, ours = getattr(F, f"{name}{dims}d"), getattr(pool, f"{name}{dims}d")
            nbytes = 4 * 2**dims if "max" in name else 0
            call, selective = ((lambda x, op=op: op(x, 2)) for op in (stock, ours))
            cases.append(Case(f"{name}{dims}d", call, selective, (x,), (True,), nbytes))
    return cases


_X = operand(3, 5, 2, dtype=DOUBLE)
_Y = operand(2, 2, 4, 5, dtype=DOUBLE)
_I = torch.tensor([4, 0, 2, 4]).view(1, 4, 1).expand(3, 4, 2)
_S, _R = operand(3, 4, 2, dtype=DOUBLE, seed=1), operand(3, 4, 2, dtype=DOUBLE, seed=2)

_Op = Callable[..., Tensor]


def _both(name: str, stock: Any, ours: Any, *rest: Any, **options: Any) -> tuple[_Op, _Op]:
    """Torch's function and ours, with all arguments but the first."""
    one, other = getattr(stock, name), getattr(ours, name)
    return lambda x: one(x, *rest, **options), lambda x: other(x, *rest, **options)


def _padded(padding: tuple[int, ...], mode: str) -> tuple[_Op, _Op]:
    return _both("pad", F, pad, padding, mode=mode)


def _wrote(name: str, **options: Any) -> tuple[_Op, _Op]:
    where = torch.tensor([4, 0, 2, 3])
    one, other = getattr(torch, name), getattr(index, name)
    return lambda x, source: one(x, 1, where, source, **options), lambda x, source: other(x, 1, where, source, **options)


def _scattered(reduce: str, **options: Any) -> tuple[_Op, _Op]:
    return (
        lambda x, src: torch.scatter_reduce(x, 1, _I, src, reduce, **options),
        lambda x, src: index.scatter_reduce(x, 1, _I, src, reduce, **options),
    )


CASES = [
    *_convolutions(),
    *_norms(),
    *_pools(),
    Case("relu", F.relu, relu.relu, (_X,), (True,), 4),
    Case("relu_", lambda x: torch.relu_(x.neg()), lambda x: relu.relu_(x.neg()), (_X,), (True,), 4),
    Case("leaky_relu", F.leaky_relu, activation.leaky_relu, (_X,), (True,), 4),
    Case("leaky_relu_", lambda x: F.leaky_relu_(x.neg()), lambda x: activation.leaky_relu_(x.neg()), (_X,), (True,), 4),
    Case("hardtanh", F.hardtanh, activation.hardtanh, (_X,), (True,), 4),
    Case("hardtanh_", lambda x: F.hardtanh_(x.neg()), lambda x: activation.hardtanh_(x.neg()), (_X,), (True,), 4),
    Case("threshold", lambda x: F.threshold(x, 0.1, 2), lambda x: activation.threshold(x, 0.1, 2), (_X,), (True,), 4),
    Case("clamp", lambda x: torch.clamp(x, -0.5, 1), lambda x: activation.clamp(x, -0.5, 1), (_X,), (True,), 4),
    Case("prelu", F.prelu, activation.prelu, (_X, operand(5, dtype=DOUBLE)), (True, False), 4),
    Case("logsigmoid", F.logsigmoid, activation.logsigmoid, (_X,), (True,), 240),
    Case("reflection_pad1d", *_padded((1, 1), "reflect"), (_Y[0],), (True,), 0),
    Case("reflection_pad2d", *_padded((1, 1, 2, 0), "reflect"), (_Y,), (True,), 0),
    Case("replication_pad2d", *_padded((1, 1, 2, 0), "replicate"), (_Y,), (True,), 0),
    Case("area", *_both("interpolate", F, pool, 2, mode="area"), (_Y,), (True,), 0),
    Case("gather", *_both("gather", torch, index, 1, _I), (_X,), (True,), 32, 32),
    Case("take", *_both("take", torch, index, _I), (_X,), (True,), 32, 32),
    Case("masked_select", *_both("masked_select", torch, index, _X > 0), (_X,), (True,), 30, 30),
    Case("index_add, source", *_wrote("index_add"), (_X, _S), (False, True), 32, 32),
    Case("index_copy", *_wrote("index_copy"), (_X, _S), (True, True), 32, 32),
    Case("scatter_reduce, mean", *_scattered("mean"), (_X, _R), (True, True), 32, 32),
    Case("scatter_reduce, source", *_scattered("mean", include_self=False), (_X, _R), (False, True), 32, 32),
    Case("abs", torch.abs, activation.abs, (_X,), (True,), 8),
    Case("dropout", lambda x: F.dropout(x, 0.3), lambda x: dropout.dropout(x, 0.3), (_X,), (True,), 4),
    Case(
        "dropout in place",
        lambda x: F.dropout(x.neg(), 0.3, inplace=True),
        lambda x: dropout.dropout(x.neg(), 0.3, inplace=True),
        (_X,),
        (True,),
        4,
    ),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
# One of each family, for what does not depend on the number of dimensions.
FAMILIES = [c for c in CASES if c.name[-2:] not in ("1d", "3d", "0d")]
each_family = pytest.mark.parametrize("case", FAMILIES, ids=lambda c: c.name)


def cotangent(output: Tensor) -> Tensor:
    return operand(*output.shape, dtype=output.dtype, seed=8)


@every_case
def test_double_backward(case: Case) -> None:
    results = []
    for op in case.both():
        args = case.args()
        wanted = case.wanted(args)
        output = op(*args)
        v = cotangent(output).requires_grad_()
        first = torch.autograd.grad(output, wanted, v, create_graph=True)
        scalar = sum((g.pow(3).sum() for g in first), output.square().sum())
        second = torch.autograd.grad(scalar, [*wanted, v], create_graph=True)
        third = torch.autograd.grad(sum(g.pow(2).sum() for g in second), [*wanted, v], allow_unused=True)
        results.append([output, *first, *second, *third])
    assert_identical(*results, "derivatives")


@every_case
def test_gradcheck(case: Case) -> None:
    _, ours = case.both()
    args = case.args()
    assert torch.autograd.gradcheck(ours, args, fast_mode=True)
    assert torch.autograd.gradgradcheck(ours, args, fast_mode=True)


@every_case
def test_second_backward(case: Case) -> None:
    """Refused without retain_graph, as eager does; with it, equal to the first."""
    messages = []
    for op in case.both():
        args = case.args()
        wanted = case.wanted(args)
        output = op(*args)
        v = cotangent(output)
        first = torch.autograd.grad(output, wanted, v, retain_graph=True)
        second = torch.autograd.grad(output, wanted, v)
        assert_identical(list(first), list(second), "second backward")
        try:
            torch.autograd.grad(output, wanted, v)
        except RuntimeError as error:
            messages.append(str(error).split("(")[0])
        else:
            messages.append("accepted")
    assert messages[0] == messages[1]
    assert messages[0].startswith("Trying to backward through the graph a second time")


@every_case
def test_what_is_kept(case: Case) -> None:
    """Hooks see every byte that the allocator holds, and it is the known number."""

    def after_an_activation(*args: Any) -> Tensor:
        return case.ours(args[0].neg(), *args[1:]).neg()

    assert kept_by_hooks(after_an_activation, case.args()) == case.bytes
    if case in FAMILIES:
        assert kept_by_allocator(after_an_activation, case.args()) == case.bytes - case.alive


@every_case
def test_nothing_stays_alive_after_backward(case: Case) -> None:
    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    boxes: list[weakref.ref[Box]] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor)
        boxes.append(weakref.ref(box))
        return box

    args = case.args()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        output = case.ours(*args)
    alive = sum(box() is not None for box in boxes)
    assert alive == len(boxes)
    torch.autograd.grad(output, case.wanted(args), cotangent(output))
    assert not [box for box in boxes if box() is not None]
    assert output.grad_fn is not None  # the output is still held


def _reversed(case: Case, op: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """The op as a function of its first operand that trains, the others fixed."""
    index = case.mask.index(True)

    def call(t: Tensor) -> Tensor:
        args = list(case.tensors)
        args[index] = t
        return op(*args)

    return call


def _point(case: Case) -> Tensor:
    point = case.tensors[case.mask.index(True)]
    assert point is not None
    return point


@each_family
def test_func_transforms(case: Case) -> None:
    x = _point(case)
    results = []
    for op in case.both():
        f = _reversed(case, op)

        def scalar(t: Tensor, f: Any = f) -> Tensor:
            return f(t).pow(3).sum()

        random = {"randomness": "same"}
        results.append(
            [
                torch.func.grad(scalar)(x),
                torch.func.vmap(f, **random)(torch.stack([x, 2 * x])),
                torch.func.vmap(torch.func.grad(scalar), **random)(torch.stack([x, 2 * x])),
                torch.func.jvp(f, (x,), (x.flip(0),))[1],
                torch.func.vjp(f, x)[1](cotangent(f(x)))[0],
            ]
        )
    assert_identical(*results, "func")


@each_family
def test_vmap_over_backward(case: Case) -> None:
    """The forward ran as usual; only its backward is batched, in both of torch's ways."""
    results = []
    for op in case.both():
        args = case.args()
        wanted = case.wanted(args)
        output = op(*args)
        many = operand(3, *output.shape, dtype=DOUBLE, seed=9)

        def back(v: Tensor, output: Tensor = output, wanted: list[Tensor] = wanted) -> tuple[Tensor, ...]:
            return torch.autograd.grad(output, wanted, v, retain_graph=True)

        batched = torch.autograd.grad(output, wanted, many, retain_graph=True, is_grads_batched=True)
        one_by_one = [torch.stack(gs) for gs in zip(*[back(v) for v in many], strict=True)]
        for group in (batched, torch.func.vmap(back)(many)):
            for a, b in zip(group, one_by_one, strict=True):
                torch.testing.assert_close(a, b)
        results.append(list(batched))
    assert_identical(*results, "batched")


@each_family
def test_hessian_vectorized(case: Case) -> None:
    x = _point(case)
    hessians = []
    for f in [_reversed(case, op) for op in case.both()]:
        hessians.append(torch.autograd.functional.hessian(lambda t, f=f: f(t).pow(3).sum(), x, vectorize=True))
    torch.testing.assert_close(*hessians, rtol=1e-12, atol=1e-12)  # batched kernels sum in an order of their own


@each_family
def test_forward_mode(case: Case) -> None:
    x = _point(case)
    tangents = []
    for op in case.both():
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.detach().requires_grad_(), x.flip(0))
            output = _reversed(case, op)(dual)
            tangents.append(forward_ad.unpack_dual(output).tangent)
    assert_identical(*tangents, "tangent")


@each_family
def test_without_a_graph(case: Case) -> None:
    stock, ours = case.both()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs = [stock(*case.args()), ours(*case.args())]
        assert_identical(*outputs, mode.__name__)
        assert not outputs[1].requires_grad
        assert outputs[0].is_inference() == outputs[1].is_inference()


@each_family
def test_anomaly_mode(case: Case) -> None:
    results = []
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        for op in case.both():
            args = case.args()
            output = op(*args)
            results.append([output, *torch.autograd.grad(output, case.wanted(args), cotangent(output))])
    assert_identical(*results, "anomaly mode")


@each_family
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(case: Case, reentrant: bool) -> None:
    results = []
    for op in (case.stock, case.ours):
        torch.manual_seed(2)
        args = case.args()
        output = checkpoint(lambda *a, op=op: op(*a).tanh(), *args, use_reentrant=reentrant)
        torch.autograd.backward(output, cotangent(output))
        results.append([output, *[t.grad for t in case.wanted(args)], torch.get_rng_state()])
    assert_identical(*results, "checkpoint")


@each_family
def test_save_on_cpu(case: Case) -> None:
    results = []
    for op in case.both():
        args = case.args()
        with torch.autograd.graph.save_on_cpu():
            output = op(*args)
        results.append([output, *torch.autograd.grad(output, case.wanted(args), cotangent(output))])
    assert_identical(*results, "save_on_cpu")


@each_family
def test_deterministic_mode(case: Case) -> None:
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for op in case.both():
            args = case.args()
            output = op(*args)
            results.append([output, *torch.autograd.grad(output, case.wanted(args), cotangent(output))])
    finally:
        torch.use_deterministic_algorithms(False)
    assert_identical(*results, "deterministic")


class Tagged(Tensor):
    """A subclass that records by which functions it is handled."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@each_family
def test_tensor_subclass_meets_torchs_own_function(case: Case) -> None:
    results = []
    for op in case.both():
        Tagged.seen = []
        x = _point(case).detach().as_subclass(Tagged).requires_grad_()
        output = _reversed(case, op)(x)
        functions = [f for f in Tagged.seen if not getattr(f, "__name__", "").startswith("__")]
        assert isinstance(output, Tagged)
        (gradient,) = torch.autograd.grad(output, x, cotangent(output))
        results.append([output.as_subclass(Tensor), gradient.as_subclass(Tensor), functions[-1]])
    assert_identical(*results, "subclass")


@each_family
def test_default_device(case: Case) -> None:
    """The default device decides where factories put tensors; operands say where an op runs."""
    results = []
    for op in (case.stock, case.ours):
        torch.manual_seed(5)
        args = case.args()
        with torch.device("meta"):
            output = op(*args)
            gradients = torch.autograd.grad(output, case.wanted(args), torch.ones_like(output))
        results.append([output, *gradients])
    assert_identical(*results, "default device")
