"""Torch's own databases as the acceptance test: every sample of every op and module that a rule speaks of, against eager.

The forms come from the table of rules, the samples from ``op_db`` and ``module_db``, so a new rule is covered by being there. A
form without samples fails unless ``NO_SAMPLES`` says why. For every choice of operands that require grad: values, strides,
gradients, buffers and the random number generator's state are eager's, no more is kept than by eager, and where the rule
promises to step in (and the op does), what is kept beside the operands is exactly what ``PROMISED`` says.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ops.harness import assert_identical
from oracle import compare
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_unflatten

import fxmem
from fxmem.ops import RULES
from fxmem.ops.common import Rule, Site

# Forms that the databases have no samples for, and why they need none.
NO_SAMPLES = {
    "RReLU": "not in module_db; its function is in op_db, the module in tests/ops/test_activation.py",
    "Hardsigmoid": "not in module_db; its function is in op_db, the module in tests/ops/test_activation.py",
    "Upsample": "not in module_db; its function is in op_db, the module in tests/ops/test_shape_only.py",
    "Dropout": "not in module_db; its function is in op_db, the module in tests/ops/test_dropout.py",
}
# Forms that take the arguments of the samples under other names (None: not at all).
RENAMED: dict[Callable[..., Any], dict[str, str | None]] = {
    torch.dropout: {"training": "train", "inplace": None},
    **{stock: {"return_indices": None} for stock in (torch.max_pool1d, torch.max_pool2d, torch.max_pool3d)},
}
# Bytes kept beside operands, parameters and buffers where a rule steps in; nothing for those that are not here.
PROMISED: dict[str, Callable[[Tensor, Tensor], int]] = {
    "max_pool": lambda input, output: output.numel(),
    **dict.fromkeys(
        (
            *("relu", "leaky_relu", "rrelu", "hardtanh", "hardsigmoid", "threshold", "hardshrink", "softshrink"),
            *("clamp", "prelu", "dropout"),
        ),
        lambda input, output: -(-input.numel() // 8),
    ),
    "logsigmoid": lambda input, output: input.nbytes,
    "abs": lambda input, output: 2 * -(-input.numel() // 8),
}
# Rules that win only where these tests do not go.
NO_WIN = {"linear": "only under autocast"}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FEW = 8  # samples of a form in the quick tests


def _bare(name: str) -> str:
    return name.rpartition(".")[2].replace("_", "")


@dataclass(frozen=True)
class Form:
    """A function or method that a rule replaces."""

    rule: Rule
    kind: str
    stock: Callable[..., Any]
    ours: Callable[..., Any]
    name: str

    @property
    def inplace(self) -> bool:
        return self.name.endswith("_") and not self.name.endswith("__")

    @property
    def samples_of(self) -> list[int]:
        """The entries of op_db whose samples it takes, by their place there."""
        known = [(i, info) for i, info in enumerate(op_db) if info.supports_autograd]
        names = {i: (info.name, *(alias.name for alias in info.aliases)) for i, info in known}
        return [i for i in names if _bare(self.name) in {_bare(name) for name in names[i]}]


def _method(name: str) -> Callable[..., Any]:
    return lambda input, *args, **kwargs: getattr(input, name)(*args, **kwargs)


FORMS = [
    *(Form(r, "function", stock, ours, stock.__name__) for r in RULES for stock, ours in r.functions.items()),
    *(Form(r, "method", _method(name), ours, name) for r in RULES for name, ours in r.methods.items()),
]
MODULES = [(rule, stock, ours) for rule in RULES for stock, ours in rule.modules.items()]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Some of eager's answers to NaN depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samples that are meant to warn
        yield
    torch.set_num_threads(threads)


def spread(items: Sequence[Any], most: int | None) -> Sequence[Any]:
    """``most`` of the items, the same ones every time."""
    if most is None or len(items) <= most:
        return items
    return [items[i] for i in sorted(random.Random(0).sample(range(len(items)), most))]


@functools.lru_cache(maxsize=64)
def _samples(index: int, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(1)
    return list(op_db[index].sample_inputs("cpu", dtype, requires_grad=False))


def masks(n: int) -> list[tuple[bool, ...]]:
    """Which of n operands require grad: every choice of up to three, else each alone, all but each, and all."""
    if n <= 3:
        return [mask for mask in itertools.product((True, False), repeat=n) if any(mask)]
    one = [tuple(i == j for i in range(n)) for j in range(n)]
    return [*one, *(tuple(not flag for flag in mask) for mask in one), (True,) * n]


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and (value.is_floating_point() or value.is_complex())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass
class Outcome:
    """What one forward and backward made."""

    results: list[Any]
    kept: int
    beside: int
    output: Tensor


class Refused(Exception):
    """A sample says nothing about a form; the message says why."""


def outcome(op: Callable[..., Any], args: Any, kwargs: Any, mask: Sequence[bool], known: Sequence[Tensor] = ()) -> Outcome:
    """Runs ``op`` on fresh operands, those that require grad made by an op that keeps nothing, and counts what is kept.

    Args:
        op: a function, or a module's call.
        args: positional arguments.
        kwargs: keyword arguments.
        mask: which of the floating-point tensors among them require grad.
        known: parameters and buffers; of those that require grad the gradients are compared too.
    """
    values, spec = tree_flatten((args, kwargs))
    where = [i for i, v in enumerate(values) if _is_float(v)]
    leaves = {i: values[i].detach().clone().requires_grad_(flag) for i, flag in zip(where, mask, strict=True)}
    filled = [v.detach().clone() if isinstance(v, Tensor) and v.layout == torch.strided else v for v in values]
    for i, leaf in leaves.items():
        # The input is always new, as in-place forms overwrite it.
        filled[i] = leaf.neg().neg() if leaf.requires_grad else leaf
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    call_args, call_kwargs = tree_unflatten(filled, spec)
    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = op(*call_args, **call_kwargs)
    state = torch.get_rng_state()
    outputs = [t for t in tree_flatten(output)[0] if isinstance(t, Tensor)]
    grown = [t for t in outputs if t.requires_grad]
    operands = [v for v in filled if isinstance(v, Tensor) and not v.requires_grad and v.layout == torch.strided]
    free = {_storage(t) for t in (*operands, *leaves.values(), *known)}
    sizes = {_storage(t): t.untyped_storage().nbytes() for t in packed}
    wanted = [t for t in (*leaves.values(), *known) if t.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    if grown:
        generator = torch.Generator().manual_seed(7)
        cotangents = [torch.empty_like(t).copy_(torch.randn(t.shape, generator=generator, dtype=torch.double)) for t in grown]
        gradients = torch.autograd.grad(grown, wanted, cotangents, allow_unused=True)
    beside = sum(size for address, size in sizes.items() if address not in free)
    results = [*outputs, *gradients, *(t.detach() for t in operands), state]
    return Outcome(results, sum(sizes.values()), beside, outputs[0])


def verdict_of(form: Form, args: Any, kwargs: Any, mask: Sequence[bool]) -> bool:
    """Whether the rule wants its op at a call with these operands."""
    bound = inspect.signature(form.ours).bind(*args, **kwargs).arguments
    flags = iter(mask)
    needs = {}
    for name, value in bound.items():
        needs[name] = sum(next(flags) for leaf in tree_flatten(value)[0] if _is_float(leaf)) > 0
    inplace = bound.get("inplace") is True or form.inplace
    return form.rule.check(Site(None, bound, needs, inplace=inplace)).apply


def check(form: Form, args: Any, kwargs: Any) -> tuple[int, int]:
    """Compares one sample for every mask; how many were compared, and in how many of them ours kept less.

    Raises:
        Refused: torch, or this form, does not take the sample, or nothing in it is differentiable.
    """
    renamed = RENAMED.get(form.stock, {})
    if any(kwargs[name] for name in kwargs if name in renamed and renamed[name] is None):
        raise Refused("it has an argument that this form does not take")
    kwargs = {renamed.get(name, name): value for name, value in kwargs.items() if renamed.get(name, name) is not None}
    try:
        inspect.signature(form.ours).bind(*args, **kwargs)
    except TypeError as error:
        raise Refused(str(error)) from error
    operands = [v for v in tree_flatten((args, kwargs))[0] if _is_float(v)]
    compared = won = 0
    for mask in masks(len(operands)):
        try:
            eager = outcome(form.stock, args, kwargs, mask)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
            continue
        ours = outcome(form.ours, args, kwargs, mask)
        assert_identical(eager.results, ours.results, f"{mask}")
        assert ours.kept <= eager.kept, f"{mask}: {ours.kept} bytes are kept, by eager {eager.kept}"
        compared += 1
        if ours.kept < eager.kept:
            won += 1
            if verdict_of(form, args, kwargs, mask):
                promised = PROMISED.get(form.rule.name, lambda input, output: 0)(args[0], ours.output)
                assert ours.beside == promised, f"{mask}: {ours.beside} bytes are kept, not {promised}"
    if not compared:
        raise Refused("no choice of operands is differentiable")
    return compared, won


def _with_numbers(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Clamp's samples have tensors for bounds, which are torch's own matter; each gives way to a number of the input."""
    input, *rest = args
    number = float(input.flatten()[0]) if input.numel() else 1.0
    rest, kwargs = torch.utils._pytree.tree_map_only(Tensor, lambda _: number, (rest, kwargs))
    return (input, *rest), kwargs


def check_form(form: Form, dtypes: Sequence[torch.dtype], most: int | None) -> None:
    """Compares samples of a form; some must be taken, and in some of them less must be kept."""
    assert form.samples_of or form.name in NO_SAMPLES, "the databases have no samples for it; NO_SAMPLES does not say why"
    compared = won = 0
    for index, dtype in itertools.product(form.samples_of, dtypes):
        if dtype not in op_db[index].supported_dtypes("cpu"):
            continue
        for sample in spread(_samples(index, dtype), most):
            for extra in ({}, {"inplace": True}):
                if extra and "inplace" not in inspect.signature(form.ours).parameters:
                    continue
                if (extra or form.inplace) and sample.broadcasts_input:
                    continue
                args, kwargs = (sample.input, *sample.args), {**sample.kwargs, **extra}
                if form.rule.name == "clamp":
                    args, kwargs = _with_numbers(args, kwargs)
                try:
                    found = check(form, args, kwargs)
                except Refused:
                    continue
                except AssertionError as error:
                    raise AssertionError(f"{op_db[index].name} {dtype} {sample} {extra}: {error}") from error
                compared, won = compared + found[0], won + found[1]
    if form.samples_of:
        assert compared, "none of the samples could be compared"
        assert won or form.rule.name in NO_WIN, "in none of the samples less is kept"


def _id(form: Form) -> str:
    where = getattr(form.stock, "__module__", None) or "torch"
    return f"{form.rule.name}-{form.kind}-{where.rpartition('.')[2]}.{form.name}"


@pytest.mark.parametrize("form", FORMS, ids=_id)
def test_form(form: Form) -> None:
    check_form(form, DTYPES[:1], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=_id)
def test_form_on_every_sample(form: Form) -> None:
    # Other dtypes run the same Python on the same layouts; what differs is the kernel.
    check_form(form, DTYPES[:1], None)
    check_form(form, DTYPES[1:], 3 * FEW)


def check_module(
    rule: Rule, stock: type[nn.Module], ours: type[nn.Module], dtypes: Sequence[torch.dtype], most: int | None
) -> None:
    """The same for a module class."""
    infos = [info for info in module_db if info.module_cls is stock]
    assert infos or stock.__name__ in NO_SAMPLES, "the databases have no samples for it; NO_SAMPLES does not say why"
    won = compared = 0
    for info, dtype, training in itertools.product(infos, dtypes, (True, False)):
        if dtype not in info.supported_dtypes("cpu"):
            continue
        torch.manual_seed(1)
        inputs = list(info.module_inputs_func(info, "cpu", dtype, requires_grad=False, training=training))
        for sample in spread([s for s in inputs if s.forward_input is not None], most):
            made = sample.constructor_input
            module = stock(*made.args, **made.kwargs).train(training).to(dtype)
            for inplace in (False, True)[: 1 + hasattr(module, "inplace")]:
                if inplace:
                    module.inplace = True  # type: ignore[assignment]
                try:
                    found = _check_module_sample(rule, module, ours, sample.forward_input)
                except AssertionError as error:
                    raise AssertionError(f"{module} {dtype} {training=} {inplace=} {sample.forward_input}: {error}") from error
                compared, won = compared + found[0], won + found[1]
    if infos:
        assert compared, "none of the samples could be compared"
        assert won or rule.name in NO_WIN, "in none of the samples less is kept"


def _check_module_sample(rule: Rule, module: nn.Module, ours: type[nn.Module], call: Any) -> tuple[int, int]:
    operands = [v for v in tree_flatten((call.args, call.kwargs))[0] if _is_float(v)]
    names = [name for name, _ in module.named_parameters()]
    compared = won = 0
    for mask in masks(len(operands) + len(names)):
        outcomes = []
        for kind in (type(module), ours):
            run = copy.deepcopy(module)
            run.__class__ = kind
            for parameter, flag in zip(run.parameters(), mask[len(operands) :], strict=True):
                parameter.requires_grad_(flag)
            try:
                known = [*run.parameters(), *run.buffers()]
                outcomes.append(outcome(run, call.args, call.kwargs, mask[: len(operands)], known))
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                if kind is ours:
                    raise
                break
            outcomes[-1].results += [b.detach() for b in run.buffers()]
        if not outcomes:
            continue
        eager, selective = outcomes
        assert_identical(eager.results, selective.results, f"{mask}")
        assert selective.kept <= eager.kept, f"{mask}: {selective.kept} bytes are kept, by eager {eager.kept}"
        compared += 1
        if selective.kept < eager.kept:
            won += 1
            promised = PROMISED.get(rule.name, lambda input, output: 0)(operands[0], selective.output)
            assert selective.beside == promised, f"{mask}: {selective.beside} bytes are kept, not {promised}"
    return compared, won


each_module = pytest.mark.parametrize(("rule", "stock", "ours"), MODULES, ids=lambda v: getattr(v, "__name__", ""))


@each_module
def test_module(rule: Rule, stock: type[nn.Module], ours: type[nn.Module]) -> None:
    check_module(rule, stock, ours, DTYPES[:1], FEW)


@pytest.mark.slow
@each_module
def test_module_on_every_sample(rule: Rule, stock: type[nn.Module], ours: type[nn.Module]) -> None:
    check_module(rule, stock, ours, DTYPES[:1], None)
    check_module(rule, stock, ours, DTYPES[1:], 3 * FEW)


class _Surrounded(nn.Module):
    """A call between ops that keep nothing."""

    def __init__(self, form: Form, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.form, self.rest, self.kwargs = form, args, kwargs

    def forward(self, input: Tensor) -> Any:
        call = self.form.stock
        return call(input.neg(), *self.rest, **self.kwargs).neg()


@pytest.mark.parametrize("form", [f for f in FORMS if f.samples_of], ids=_id)
def test_form_in_a_model(form: Form) -> None:
    """Captured, planned and rewritten: the first samples that differentiate their input alone."""
    done = 0
    for index in form.samples_of:
        for sample in spread(_samples(index, torch.float32), 12):
            others = tree_flatten((sample.args, sample.kwargs))[0]
            usable = _is_float(sample.input) and sample.input.numel() >= 8 and not any(isinstance(v, Tensor) for v in others)
            if done >= 2 or not usable:
                continue
            model = _Surrounded(form, sample.args, sample.kwargs)
            x = sample.input.detach().clone().requires_grad_()
            try:
                model(x)
            except (RuntimeError, TypeError, AttributeError):
                continue
            compare(model, fxmem.optimize(model, (x,)), (x,))
            done += 1
