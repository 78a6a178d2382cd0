"""The plan: which rules to apply where.

Most selective ops keep a part of what torch keeps, or something small and private in place of something private: they are
applied wherever their rule says that something is won. One kind is different: an op that keeps a packed mask in place of its
own *output* wins only if nobody else keeps that output. Two ways tell:

- With an observation (a run on fake tensors in which the other rules are applied already) the keepers of every storage are
  known. Each such op touches one storage, so storages are independent of one another, and for each there are two choices that
  matter: all of its keepers take masks, which frees it, or none does. Taking the cheaper one per storage is the minimum.
- From structure alone, an output counts as free when every consumer is known not to keep its operand.

Requires the analysis' result; changes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from fxmem.ops.common import Rule, Site, Verdict
from fxmem.passes.base import FUNCTIONS, METHODS, MODULES, bound_arguments, module_of, module_path, source_of
from fxmem.records import Decision, GradFlow, SavedTensors


@dataclass(frozen=True)
class Choice:
    """One node that a rule speaks of.

    Args:
        node: the node.
        rule: the rule.
        replacement: our module class or function.
        verdict: what the rule says.
    """

    node: fx.Node
    rule: Rule
    replacement: Any
    verdict: Verdict

    def decision(self, verdict: Verdict) -> Decision:
        """The record of this choice under ``verdict``."""
        node = self.node
        return Decision(
            node.name,
            module_path(node),
            self.rule.name,
            verdict.apply,
            verdict.reason,
            verdict.remedy,
            source_of(node),
        )


_STOCK = {ours: stock for stock, (_, ours) in MODULES.items()}


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class of ``module`` before any rewrite."""
    return _STOCK.get(type(module), type(module))


def choices(gm: nn.Module, graph: fx.Graph, flow: GradFlow) -> list[Choice]:
    """Every node that a rule speaks of, with the rule's verdict, in graph order."""
    names = {id(p): name for name, p in gm.named_parameters()}
    return [choice for node in graph.nodes if (choice := _choice(gm, node, flow, names)) is not None]


def _choice(gm: nn.Module, node: fx.Node, flow: GradFlow, names: dict[int, str]) -> Choice | None:
    if node.op == "call_module":
        return _module_choice(gm, node, flow, names)
    table: Any = {"call_function": FUNCTIONS, "call_method": METHODS}.get(node.op, {})
    entry = table.get(node.target)
    if entry is None:
        return None
    rule, ours = entry
    arguments = bound_arguments(ours, node)
    if arguments is None:
        return Choice(
            node, rule, ours, Verdict(False, "not rewritten: it is called with arguments that our form does not take")
        )
    needs, called = {}, {}
    for name, value in arguments.items():
        nodes = [n for n in torch.utils._pytree.tree_leaves(value) if isinstance(n, fx.Node)]
        needs[name] = any(flow.requires_grad(n.name) for n in nodes)
        if len(nodes) == 1 and nodes[0].op == "get_attr":
            called[name] = str(nodes[0].target)
    return Choice(node, rule, ours, rule.check(Site(None, arguments, needs, called)))


def _module_choice(gm: nn.Module, node: fx.Node, flow: GradFlow, names: dict[int, str]) -> Choice | None:
    module = module_of(gm, node)
    assert module is not None
    entry = MODULES.get(stock_class(module))
    if entry is None:
        base = next((b for b in type(module).__mro__ if b in MODULES), None)
        if base is None:
            return None
        rule, ours = MODULES[base]
        what = "it is parametrized" if is_parametrized(module) else f"{type(module).__name__} is a class of its own"
        return Choice(node, rule, ours, Verdict(False, f"not rewritten: {what}, not {base.__name__} itself"))
    rule, ours = entry
    if "forward" in vars(module):
        return Choice(node, rule, ours, Verdict(False, "not rewritten: its forward was replaced on the instance"))
    computed = [n for n in ("weight", "bias") if isinstance(vars(module).get(n), Tensor)]
    if computed:
        reason = f"not rewritten: its {computed[0]} is computed by a hook before every call"
        return Choice(node, rule, ours, Verdict(False, reason))
    operands = [*node.args, *node.kwargs.values()]
    needs = {"input": any(isinstance(n, fx.Node) and flow.requires_grad(n.name) for n in operands[:1])}
    called = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            needs[name] = parameter.requires_grad
            called[name] = names.get(id(parameter), f"{node.target}.{name}")
    return Choice(node, rule, ours, rule.check(Site(module, {}, needs, called)))


def decide_by_observation(found: list[Choice], saved: SavedTensors) -> list[Verdict]:
    """A final verdict for each choice, given what is kept when all but the masking ops are rewritten.

    Args:
        found: the choices.
        saved: the observation of the graph in which every choice that is not ``instead_of_output`` is applied.
    """
    masks = {c.node.name for c in found if c.verdict.apply and c.verdict.instead_of_output}
    keepers: dict[int, list[str]] = {}
    by_node: dict[str, list[Any]] = {}
    for tensor in saved.tensors:
        keepers.setdefault(tensor.storage, []).append(tensor.node)
        by_node.setdefault(tensor.node, []).append(tensor)
    verdicts = []
    for choice in found:
        verdict = choice.verdict
        if choice.node.name in masks:
            verdict = _mask_verdict(verdict, by_node.get(choice.node.name, []), keepers, by_node, masks)
        verdicts.append(verdict)
    return verdicts


def _mask_verdict(
    verdict: Verdict, kept: list[Any], keepers: dict[int, list[str]], by_node: dict[str, list[Any]], masks: set[str]
) -> Verdict:
    if not kept:
        return Verdict(False, "nothing to save: torch keeps nothing here")
    tensor = kept[0]
    if tensor.kind == "output":
        return Verdict(False, "kept: its output is returned, so it is alive anyway")
    if tensor.kind != "activation":
        return Verdict(False, f"kept: its output shares memory with an {tensor.kind}, which is alive anyway")
    others = [name for name in keepers[tensor.storage] if name not in masks]
    if others:
        return Verdict(False, f"kept: {by_node[others[0]][0].module or others[0]} keeps its output anyway")
    price = sum(-(-_numel(by_node[name][0].shape) // 8) for name in dict.fromkeys(keepers[tensor.storage]))
    if price >= tensor.nbytes:
        return Verdict(False, "kept: the masks of all that keep this memory would be larger than it")
    return verdict


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def decide_by_structure(gm: nn.Module, found: list[Choice], flow: GradFlow) -> list[Verdict]:
    """A final verdict for each choice from the graph alone: a mask only where no consumer can keep the output."""
    dropped = {c.node for c in found if c.verdict.apply and not _keeps_now(gm, c)}
    masks = {c.node for c in found if c.verdict.instead_of_output}
    verdicts = []
    for choice in found:
        verdict = choice.verdict
        if verdict.apply and verdict.instead_of_output:
            keeper = _keeper(gm, choice.node, flow, dropped, masks)
            if keeper is not None:
                verdict = Verdict(False, f"kept: {keeper}")
        verdicts.append(verdict)
    return verdicts


def _keeps_now(gm: nn.Module, choice: Choice) -> bool:
    module = module_of(gm, choice.node)
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training


# Consumers whose derivative reads no operand.
_FREE: frozenset[Callable[..., Any] | str | type] = frozenset(
    {
        operator.add,
        operator.sub,
        operator.neg,
        torch.add,
        torch.sub,
        torch.cat,
        torch.concat,
        torch.stack,
        torch.mean,
        torch.sum,
        F.pad,
        getattr,
        "add",
        "sub",
        "mean",
        "sum",
        "size",
        "dim",
        "detach",
        nn.Linear,
        nn.Dropout,
    }
)
# Consumers whose value may be the operand's own memory.
_ALIAS: frozenset[Callable[..., Any] | str | type] = frozenset(
    {
        operator.getitem,
        operator.iadd,
        operator.isub,
        torch.flatten,
        torch.reshape,
        torch.permute,
        torch.transpose,
        torch.squeeze,
        torch.unsqueeze,
        torch.chunk,
        torch.split,
        torch.unbind,
        "add_",
        "sub_",
        "flatten",
        "view",
        "reshape",
        "permute",
        "transpose",
        "squeeze",
        "unsqueeze",
        "contiguous",
        "chunk",
        "split",
        "unbind",
        "expand",
        nn.Flatten,
        nn.Unflatten,
        nn.Identity,
        nn.Dropout,
    }
)


def _keeper(gm: nn.Module, node: fx.Node, flow: GradFlow, dropped: set[fx.Node], masks: set[fx.Node]) -> str | None:
    """Who may keep the value of ``node``, as the end of a sentence; None if nobody can."""
    for alias in _aliases(gm, node):
        for user in alias.users:
            if user.op == "output":
                return "its output is returned, so it is alive anyway"
            key = _key(gm, user)
            if key in _ALIAS or key in _FREE or user in dropped or user in masks or not flow.requires_grad(user.name):
                if key is nn.Linear and any(p.requires_grad for p in module_of(gm, user).parameters()):  # type: ignore[union-attr]
                    return f"{user.name} keeps its output anyway"
                continue
            return f"{user.name} keeps its output anyway, or may"
    return None


def _aliases(gm: nn.Module, node: fx.Node) -> Iterator[fx.Node]:
    seen = [node]
    for alias in seen:
        yield alias
        for user in alias.users:
            inplace = getattr(module_of(gm, user), "inplace", False) or user.kwargs.get("inplace", False)
            method = user.op == "call_method" and str(user.target).endswith("_")
            if (_key(gm, user) in _ALIAS or inplace or method) and user not in seen:
                seen.append(user)


def _key(gm: nn.Module, node: fx.Node) -> Any:
    module = module_of(gm, node)
    return node.target if module is None else stock_class(module)
