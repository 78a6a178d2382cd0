"""The plan: which rules to apply where.

Most selective ops keep a part of what torch keeps, or something small and private in place of something private: they are
applied wherever their rule says that something is won. One kind is different: an op that keeps a packed mask in place of its
own *output* or its *input* wins only if nobody else keeps that. Two ways tell:

- With an observation (a run on fake tensors in which the other rules are applied already) the keepers of every storage are
  known, and the plan is the minimum over all choices, by a minimum cut (``least``).
- From structure alone, an output counts as free when every consumer is known not to keep its operand. An input counts as free
  when besides that the op that made it is known not to keep its result, and it is neither an input of the model nor a view of
  one. Masks that count on one another are taken together or not at all: whoever is refused keeps what torch keeps, which may
  refuse others, until nothing changes.

Why the cut is the minimum. Let node ``n`` either stay stock and keep the set ``S(n)`` of storages, or take a mask of ``p(n)``
bytes that nobody shares; let storage ``s`` weigh ``w(s)`` bytes, or nothing if it is alive anyway, because a node that has no
choice keeps it or because it is a parameter, a buffer, an input or an output. A storage is kept iff one of its keepers stays
stock, so a plan costs

    sum of p(n) over n that take masks  +  sum of w(s) over s in the union of S(n) over n that stay stock.

Draw an arc source -> n of capacity p(n), an arc n -> s without limit for every s in S(n), an arc s -> sink of capacity w(s).
A cut is a set of vertices with the source and without the sink; call a node stock if it is in the set. A cut of finite
capacity cuts no unlimited arc, so it has every storage of every stock node in the set, and pays w(s) for it; it pays p(n) for
every node that is not in the set; a storage in the set that no stock node keeps only makes it dearer. So the cheapest cut among
those with given stock nodes costs what the plan does, every plan is such a cut, and the minimum cut is the minimum plan.
Of several, the one with most stock nodes is taken: where nothing is won, nothing is rewritten.

Requires the analysis' result; changes nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from fxmem.ops.common import Rule, Site, Verdict
from fxmem.passes.base import FUNCTIONS, METHODS, MODULES, bound_arguments, module_of, module_path, source_of
from fxmem.passes.grad_flow import grad_flow
from fxmem.records import Decision, GradFlow, SavedTensor, SavedTensors


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


def least(stock: Mapping[str, Iterable[int]], price: Mapping[str, int], weight: Mapping[int, int]) -> frozenset[str]:
    """The nodes that take masks in a plan that keeps the fewest bytes; as few of them as such a plan can have.

    Args:
        stock: the storages that each node keeps if it takes no mask.
        price: bytes of each node's mask.
        weight: bytes of each storage that is not alive anyway.
    """
    paid = {node: [s for s in storages if weight.get(s, 0)] for node, storages in stock.items()}
    if not any(paid.values()):
        return frozenset()
    flow: Any = nx.DiGraph()
    source, sink = "source", "sink"
    flow.add_nodes_from((source, sink))
    for node, storages in paid.items():
        if storages:
            flow.add_edge(source, (node,), capacity=price[node])
        for s in storages:
            # An arc without capacity has no limit.
            flow.add_edge((node,), s)
            flow.add_edge(s, sink, capacity=weight[s])
    # networkx puts on the sink's side just what can still reach it, so of all minimum cuts this is the one with most stock.
    _, (_, cut) = nx.minimum_cut(flow, source, sink)
    return frozenset(node for node, storages in paid.items() if storages and (node,) in cut)


def inner_choices(gm: nn.Module, graph: fx.Graph, flow: GradFlow) -> tuple[fx.Graph, list[Choice]]:
    """Layers inside of the modules that the graph calls whole, such as ``nn.TransformerEncoderLayer`` or one with hooks.

    Who else keeps what there is unknown, so a mask takes no other tensor's place.

    Args:
        gm: the module that holds the graph's submodules.
        graph: the graph.
        flow: which values require grad.

    Returns:
        A graph that only lists the layers, and the choices.
    """
    listed = fx.Graph()
    values = {needed: listed.placeholder(f"input_{needed}") for needed in (False, True)}
    called = {id(module_of(gm, node)) for node in graph.nodes if node.op == "call_module"}
    for node in graph.nodes:
        module = module_of(gm, node)
        if module is None or isinstance(module, torch.jit.ScriptModule) or stock_class(module) in MODULES:
            continue
        for name, inner in module.named_modules():
            if name and id(inner) not in called and stock_class(inner) in MODULES:
                called.add(id(inner))
                listed.call_module(f"{node.target}.{name}", (values[flow.requires_grad(node.name)],))
    inner_flow = grad_flow(gm, listed, {f"input_{needed}": needed for needed in values})
    found = choices(gm, listed, inner_flow)
    return listed, [replace(choice, verdict=unless_mask(choice.verdict)) for choice in found]


def unless_mask(verdict: Verdict) -> Verdict:
    """The verdict for a layer without a graph around it: no mask in the place of what somebody else may keep."""
    if verdict.instead_of is None or not verdict.apply:
        return verdict
    return Verdict(
        False,
        f"kept: without a graph around it, who else keeps its {verdict.instead_of} is unknown",
        "pass example inputs and capture='regions', so that the whole model is observed",
    )


def without_masks(found: Iterable[Choice]) -> list[Verdict]:
    """The verdicts to observe under: every choice applied but those that take a mask in the place of something."""
    return [c.verdict if c.verdict.instead_of is None else Verdict(False, c.verdict.reason) for c in found]


def decide_by_observation(found: list[Choice], saved: SavedTensors) -> list[Verdict]:
    """A final verdict for each choice, given what is kept when all but the masking ops are rewritten.

    Args:
        found: the choices.
        saved: the observation of the graph in which every choice that is not ``instead_of`` something is applied.
    """
    masks = {c.node.name: c.verdict.bits for c in found if c.verdict.apply and c.verdict.instead_of}
    kept: dict[str, list[SavedTensor]] = {name: [] for name in masks}
    anyway: dict[int, SavedTensor] = {}
    for tensor in saved.tensors:
        if tensor.node in masks:
            kept[tensor.node].append(tensor)
        if tensor.node not in masks or tensor.kind != "activation":
            anyway.setdefault(tensor.storage, tensor)
    packed = least(
        {name: {t.storage for t in tensors} for name, tensors in kept.items()},
        {name: _price(tensors) * masks[name] for name, tensors in kept.items()},
        {t.storage: t.nbytes for tensors in kept.values() for t in tensors if t.storage not in anyway},
    )
    return [
        _refusal(c.verdict, kept[c.node.name], anyway) if c.node.name in masks and c.node.name not in packed else c.verdict
        for c in found
    ]


def _price(tensors: Iterable[SavedTensor]) -> int:
    """Bytes of one bit per element, for a node that runs several times once for each."""
    return sum(-(-math.prod(t.shape) // 8) for t in {t.storage: t for t in tensors}.values())


def _refusal(verdict: Verdict, kept: list[SavedTensor], anyway: Mapping[int, SavedTensor]) -> Verdict:
    """Why the plan leaves a node stock that could take a mask."""
    if not kept:
        return Verdict(False, "nothing to save: torch keeps nothing here")
    what = verdict.instead_of
    keepers = [anyway.get(t.storage) for t in kept]
    if None in keepers:
        return Verdict(False, "kept: the masks of all that keep this memory would be larger than it")
    keeper = next((k for k in keepers if k is not None and k.kind == "activation"), None)
    if keeper is not None:
        return Verdict(False, f"kept: {keeper.module or keeper.node} keeps its {what} anyway")
    if kept[0].kind == "output":
        return Verdict(False, f"kept: its {what} is returned, so it is alive anyway")
    return Verdict(False, f"kept: its {what} shares memory with an {kept[0].kind}, which is alive anyway")


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
