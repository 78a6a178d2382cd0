"""Analysis: for every node, whether its value requires grad and because of which parameter or input.

Needs a graph of torch-level calls; example inputs are not needed. Where the input's own status is unknown it is taken to
require grad, which is the case in which the most is at stake. Changes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn

from fxmem.passes.base import attribute, module_of
from fxmem.records import GradFlow, GradStatus, ParameterStatus

# What never carries a gradient on: values that are no floating-point tensors, or are cut off on purpose.
_STOPS_FUNCTIONS = frozenset(
    {
        torch.ops.aten.detach.default,
        torch.ops.aten.detach_.default,
        torch.argmax,
        torch.argmin,
        torch.argsort,
        torch.bucketize,
        torch.eq,
        torch.ne,
        torch.lt,
        torch.le,
        torch.gt,
        torch.ge,
        torch.isnan,
        torch.isinf,
        torch.isfinite,
        torch.zeros_like,
        torch.ones_like,
        torch.empty_like,
        torch.full_like,
        torch.rand_like,
        torch.randn_like,
        torch.sign,
        operator.eq,
        operator.ne,
        operator.lt,
        operator.le,
        operator.gt,
        operator.ge,
        len,
    }
)
_STOPS_METHODS = frozenset(
    {
        "argmax",
        "argmin",
        "argsort",
        "bool",
        "detach",
        "dim",
        "eq",
        "ge",
        "gt",
        "int",
        "item",
        "le",
        "long",
        "lt",
        "ne",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "numel",
        "size",
        "stride",
    }
)
_STOPS_ATTRIBUTES = frozenset(["device", "dtype", "grad", "is_cuda", "ndim", "shape"])


def grad_flow(gm: nn.Module, graph: fx.Graph, inputs: Mapping[str, bool] | None = None) -> GradFlow:
    """Propagates requires_grad from parameters and inputs through the graph.

    Args:
        gm: the module that holds the graph's parameters and submodules.
        graph: the graph.
        inputs: for each placeholder, whether what is passed there requires grad; one that is missing is taken to.
    """
    names = {id(p): name for name, p in gm.named_parameters()}
    readers: dict[str, list[str]] = {name: [] for name in names.values()}
    status: dict[str, GradStatus] = {}

    def reads(node: fx.Node, parameter: Tensor) -> tuple[str, ...]:
        name = names.get(id(parameter))
        if name is None:
            return ("a computed weight",) if parameter.requires_grad else ()
        readers[name].append(node.name)
        return (name,) if parameter.requires_grad else ()

    for node in graph.nodes:
        causes: list[str] = []
        if node.op == "placeholder":
            if inputs is None or inputs.get(str(node.target), True):
                causes.append(f"input {node.target}")
        elif node.op == "get_attr":
            value = attribute(gm, str(node.target))
            if isinstance(value, Tensor):
                causes += reads(node, value)
        else:
            module = module_of(gm, node)
            if module is not None:
                for parameter in module.parameters():
                    causes += reads(node, parameter)
            if not _stops(node):
                for source in node.all_input_nodes:
                    causes += status[source.name].because
        unique = tuple(dict.fromkeys(causes))
        status[node.name] = GradStatus(node.name, bool(unique), unique[: GradStatus.LIMIT])
    parameters = {
        names[id(p)]: ParameterStatus(names[id(p)], p.requires_grad, p.numel() * p.element_size(), tuple(readers[names[id(p)]]))
        for p in gm.parameters()
    }
    return GradFlow(status, parameters)


def _stops(node: fx.Node) -> bool:
    value = node.meta.get("val")  # as torch.export leaves it
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        return True
    if node.op == "call_function":
        if node.target is getattr:
            return node.args[1] in _STOPS_ATTRIBUTES
        return node.target in _STOPS_FUNCTIONS
    return node.op == "call_method" and node.target in _STOPS_METHODS
