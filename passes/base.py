"""What the passes share: how to read a node."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxmem.ops import RULES
from fxmem.ops.common import Rule


def module_of(gm: nn.Module, node: fx.Node) -> nn.Module | None:
    """The module that a ``call_module`` node calls, else None."""
    return gm.get_submodule(str(node.target)) if node.op == "call_module" else None


def module_path(node: fx.Node) -> str:
    """Path of the innermost module whose forward contains the call; empty at the top."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def op_name(gm: nn.Module, node: fx.Node) -> str:
    """Short name of the operation of ``node``."""
    if node.op == "call_module":
        name = type(module_of(gm, node)).__name__
        return name.removeprefix("Selective")
    if node.op in ("call_function", "call_method"):
        return getattr(node.target, "__name__", str(node.target))
    return node.op


def source_of(node: fx.Node) -> str | None:
    """``file:line`` of the call in the user's code, if the tracer recorded it."""
    location: str | None = node.meta.get("source")
    return location


def attribute(gm: nn.Module, path: str) -> Any:
    """The value that a ``get_attr`` node reads."""
    prefix, _, name = path.rpartition(".")
    return getattr(gm.get_submodule(prefix), name)


def _by_function() -> dict[Callable[..., object], tuple[Rule, Callable[..., object]]]:
    named = {stock: (rule, ours) for rule in RULES for stock, ours in rule.functions.items()}
    overloads = {
        overload: (rule, ours)
        for rule in RULES
        for ours in dict.fromkeys((*rule.functions.values(), *rule.methods.values()))
        for overload in _overloads(ours)
    }
    return {**named, **overloads}


_SAME = {"self": "input", "train": "training"}


# Functions that ATen calls by another name.
_ATEN = {"logsigmoid": "log_sigmoid"}


def _overloads(ours: Callable[..., object]) -> Iterator[Callable[..., object]]:
    """The ATen ops of our function's name that take the same arguments in the same order and return one tensor."""
    packet = getattr(torch.ops.aten, _ATEN.get(ours.__name__, ours.__name__), None)
    for name in () if packet is None else packet.overloads():
        overload = getattr(packet, name)
        schema = overload._schema
        theirs = [_SAME.get(a.name, a.name) for a in schema.arguments if a.name != "generator"]
        same = theirs == list(inspect.signature(ours).parameters)[: len(theirs)]
        if same and len(schema.returns) == 1 and not any(a.is_out for a in schema.arguments):
            yield overload


def _by_method() -> dict[str, tuple[Rule, Callable[..., object]]]:
    return {name: (rule, ours) for rule in RULES for name, ours in rule.methods.items()}


FUNCTIONS = _by_function()
METHODS = _by_method()
MODULES: dict[type[nn.Module], tuple[Rule, type[nn.Module]]] = {
    stock: (rule, ours) for rule in RULES for stock, ours in rule.modules.items()
}


def bound_arguments(function: Callable[..., object], node: fx.Node) -> dict[str, Any] | None:
    """The arguments of a function or method node by the names of ``function``, or None if they do not fit it."""
    try:
        return dict(inspect.signature(function).bind(*node.args, **node.kwargs).arguments)
    except TypeError:
        return None


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of tuples, lists, dicts and dataclass-like outputs."""
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages behind a tensor: one of a plain one, several of a sparse one or a subclass that holds tensors, or none."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return []
    outer: Any = tensor
    if is_traceable_wrapper_subclass(outer):
        return [s for name in outer.__tensor_flatten__()[0] for s in storages_of(getattr(outer, name))]
    if tensor.layout == torch.sparse_coo:
        return [*storages_of(tensor._indices()), *storages_of(tensor._values())]
    return [tensor.untyped_storage()] if tensor.layout == torch.strided else []


def loss_or_outputs(output: Any) -> list[torch.Tensor]:
    """Where backward starts: the loss alone where the output is a mapping that has one, else every tensor in it.

    Args:
        output: what a model returned.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else None
    return [loss] if isinstance(loss, torch.Tensor) else list(tensors_of(output))
