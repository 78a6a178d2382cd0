"""The plan: which rules to apply where.

Most selective ops keep a part of what torch keeps, or something small and private in place of something private: they are
applied wherever their rule says that something is won. One kind is different: an op that keeps a packed mask in place of its
own *output* or its *input* wins only if nobody else keeps that. Two ways tell:

- With an observation (a run on fake tensors in which the other rules are applied already) the keepers of every storage are
  known. Each such op touches one storage, so storages are independent of one another, and for each there are two choices that
  matter: all of its keepers take masks, which frees it, or none does. Taking the cheaper one per storage is the minimum.
- From structure alone, an output counts as free when every consumer is known not to keep its operand. An input counts as free
  when besides that the op that made it is known not to keep its result, and it is neither an input of the model nor a view of
  one. Masks that count on one another are taken together or not at all: whoever is refused keeps what torch keeps, which may
  refuse others, until nothing changes.

Requires the analysis' result; changes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
    inplace = arguments.get("inplace") is True or ours.__name__.endswith("_")
    return Choice(node, rule, ours, rule.check(Site(None, arguments, needs, called, inplace)))


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
    inplace = getattr(module, "inplace", False)
    return Choice(node, rule, ours, rule.check(Site(module, {}, needs, called, inplace)))


def decide_by_observation(found: list[Choice], saved: SavedTensors) -> list[Verdict]:
    """A final verdict for each choice, given what is kept when all but the masking ops are rewritten.

    Args:
        found: the choices.
        saved: the observation of the graph in which every choice that is not ``instead_of`` something is applied.
    """
    masks = {c.node.name: c.verdict.bits for c in found if c.verdict.apply and c.verdict.instead_of}
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
    verdict: Verdict, kept: list[Any], keepers: dict[int, list[str]], by_node: dict[str, list[Any]], masks: dict[str, int]
) -> Verdict:
    if not kept:
        return Verdict(False, "nothing to save: torch keeps nothing here")
    tensor, what = kept[0], verdict.instead_of
    if tensor.kind == "output":
        return Verdict(False, f"kept: its {what} is returned, so it is alive anyway")
    if tensor.kind != "activation":
        return Verdict(False, f"kept: its {what} shares memory with an {tensor.kind}, which is alive anyway")
    others = [name for name in keepers[tensor.storage] if name not in masks]
    if others:
        return Verdict(False, f"kept: {by_node[others[0]][0].module or others[0]} keeps its {what} anyway")
    sharing = dict.fromkeys(keepers[tensor.storage])
    price = sum(-(-_numel(by_node[name][0].shape) // 8) * masks[name] for name in sharing)
    if price >= tensor.nbytes:
        return Verdict(False, "kept: the masks of all that keep this memory would be larger than it")
    return verdict


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def decide_by_structure(gm: nn.Module, found: list[Choice], flow: GradFlow) -> list[Verdict]:
    """A final verdict for each choice from the graph alone: a mask only where nobody else can keep what it stands for."""
    plain = [c for c in found if not (c.verdict.apply and c.verdict.instead_of)]
    free = _Free(
        gm,
        flow,
        dropped={c.node for c in plain if c.verdict.apply and not _keeps_now(gm, c)},
        made={c.node for c in found if c.rule.name in _MAKE},
        masks={c.node: c.verdict.instead_of for c in found if c.verdict.apply and c.verdict.instead_of},
    )
    refused: dict[fx.Node, str] = {}
    pending = True
    while pending:
        pending = False
        for node, what in list(free.masks.items()):
            if node not in refused and (keeper := free.keeper(node, what)) is not None:
                refused[node] = keeper
                free.refused.add(node)
                pending = True
    return [Verdict(False, f"kept: {refused[c.node]}") if c.node in refused else c.verdict for c in found]


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


# Rules whose ops, stock or not, make a new tensor and do not keep it.
_MAKE = frozenset({"linear", "conv", "batch_norm", "max_pool", "avg_pool"})
# Consumers whose value is theirs alone, and is not kept by them.
_MAKERS = _FREE - {getattr, "size", "dim", "detach", nn.Dropout}


@dataclass
class _Free:
    """Who may keep a value, as far as the graph tells.

    Args:
        gm: the module that holds the graph's submodules.
        flow: which values require grad.
        dropped: nodes that a rule frees of their operands.
        made: nodes whose value is a new tensor that they do not keep.
        masks: nodes that could take a mask, and in place of what.
        refused: those of them that do not.
    """

    gm: nn.Module
    flow: GradFlow
    dropped: set[fx.Node]
    made: set[fx.Node]
    masks: Mapping[fx.Node, str | None]
    refused: set[fx.Node] = field(default_factory=set)

    def keeper(self, node: fx.Node, what: str | None) -> str | None:
        """Who may keep the output or the input of ``node``, as the end of a sentence; None if nobody can."""
        if what == "output":
            return self._consumer(node, node, "output")
        operands = [v for v in (*node.args[:1], node.kwargs.get("input")) if isinstance(v, fx.Node)]
        if len(operands) != 1:
            return "its input is not a value of the graph"
        root = operands[0]
        while _key(self.gm, root) in _ALIAS or (self._inplace(root) and (root in self.masks or root in self.dropped)):
            before = [v for v in root.args if isinstance(v, fx.Node)]
            if not before or self._keeps_output(root):
                return f"{root.name} keeps its input anyway, or may"
            root = before[0]
        if root.op in ("placeholder", "get_attr"):
            return f"its input shares memory with {root.name}, which is alive anyway"
        new = root in self.made or root in self.masks or _key(self.gm, root) in _MAKERS
        if not new or self._keeps_output(root):
            return f"{root.name} keeps its input anyway, or may"
        return self._consumer(root, node, "input")

    def _consumer(self, value: fx.Node, node: fx.Node, what: str) -> str | None:
        for alias in self._aliases(value):
            if alias is not node and self._keeps_output(alias):
                return f"{alias.name} keeps its {what} anyway"
            for user in alias.users:
                if user.op == "output":
                    return f"its {what} is returned, so it is alive anyway"
                if user is node or not self._may_keep(user):
                    continue
                may = "" if _key(self.gm, user) is nn.Linear else ", or may"
                return f"{user.name} keeps its {what} anyway{may}"
        return None

    def _may_keep(self, user: fx.Node) -> bool:
        """Whether ``user`` may keep an operand."""
        key = _key(self.gm, user)
        if key is nn.Linear:
            module = module_of(self.gm, user)
            return module is not None and any(p.requires_grad for p in module.parameters()) and user not in self.dropped
        if user in self.masks:
            return self.masks[user] == "input" and user in self.refused
        return not (key in _ALIAS or key in _FREE or user in self.dropped or not self.flow.requires_grad(user.name))

    def _keeps_output(self, node: fx.Node) -> bool:
        return self.masks.get(node) == "output" and node in self.refused

    def _inplace(self, user: fx.Node) -> bool:
        if getattr(module_of(self.gm, user), "inplace", False) or user.kwargs.get("inplace", False):
            return True
        if user.op == "call_function" and user.target in FUNCTIONS:
            arguments = bound_arguments(FUNCTIONS[user.target][1], user) or {}
            return bool(arguments.get("inplace", False)) or user.target.__name__.endswith("_")
        return user.op == "call_method" and str(user.target).endswith("_")

    def _aliases(self, node: fx.Node) -> Iterator[fx.Node]:
        seen = [node]
        for alias in seen:
            yield alias
            for user in alias.users:
                if (_key(self.gm, user) in _ALIAS or self._inplace(user)) and user not in seen:
                    seen.append(user)


def _key(gm: nn.Module, node: fx.Node) -> Any:
    module = module_of(gm, node)
    return node.target if module is None else stock_class(module)
