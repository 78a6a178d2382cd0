"""The companion pass: what the optimizer of a graph's parameters keeps, and its conversion to Adapprox."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from fxmem.errors import OptimizerError
from fxmem.optim.accounting import StateReport, account
from fxmem.optim.adapprox import Adapprox
from fxmem.optim.adapt import adapt_optimizer


def trainable_parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The named parameters that require a gradient, a tied one once; of a GraphModule those that its graph uses.

    Args:
        module: a module or a torch.fx.GraphModule.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not isinstance(module, fx.GraphModule):
        return named
    used: set[int] = set()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            owner, _, leaf = str(node.target).rpartition(".")
            value = getattr(module.get_submodule(owner), leaf)
            used |= {id(p) for p in (value.parameters() if isinstance(value, nn.Module) else [value])}
        elif node.op == "call_module":
            used |= {id(p) for p in module.get_submodule(str(node.target)).parameters()}
    return [(name, p) for name, p in named if id(p) in used]


def optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[StateReport, Adapprox | None]:
    """Account for the optimizer state of a module's trainable parameters and, given an optimizer, convert it.

    Args:
        module: a module or a torch.fx.GraphModule; parameters on `meta` will do without an optimizer.
        optimizer: an Adapprox, taken as it is; an Adam or AdamW, converted with its groups and running state; or None.

    Raises:
        OptimizerError: the optimizer cannot be converted, or holds none of the module's parameters.
    """
    named = trainable_parameters(module)
    if optimizer is None:
        return account(named), None
    mine = {id(p) for _, p in named}
    if named and not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
        raise OptimizerError(
            "it holds none of the module's trainable parameters.",
            where="optimizer",
            remedy="Build it from the parameters of the module that is given.",
        )
    adapted = optimizer if isinstance(optimizer, Adapprox) else adapt_optimizer(optimizer)
    return account(named, optimizer=adapted), adapted
