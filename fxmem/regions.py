"""Models without a whole graph: the largest submodules that can be traced, and single layers where none can.

The model's own Python code goes on running, in a copy of its modules that shares parameters and buffers, so whatever the model
can do besides its forward, the copy can. Where a rule speaks of a layer, the layer changes its class. Where it speaks of a
function that a traceable submodule calls, that submodule's forward runs as a graph, but only in calls of the kind that the
graph was captured for: for other arguments, flags, attributes, hooks or children, the code it was made of runs. Where it speaks
of a function that other code calls, a mode on torch functions puts ours in its place, at the lines where that was seen to save.

Who else keeps a value cannot be seen from one region. With example inputs the whole model is therefore observed, and a mask
takes a tensor's place only if nobody in it keeps that; without them only if nobody in the region can and it does not leave it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.fx.graph_module import _format_import_block, _forward_from_src
from torch.overrides import TorchFunctionMode
from torch.package.importer import sys_importer
from torch.utils._pytree import tree_map_only

from fxmem.capture import CallForm, RegionCapture, first_line, has_hooks, trace_region, unchanged
from fxmem.errors import CaptureError, RewriteError
from fxmem.ops.common import Verdict
from fxmem.passes.base import FUNCTIONS, MODULES, tensors_of
from fxmem.passes.fakes import Fakes
from fxmem.passes.grad_flow import grad_flow
from fxmem.passes.plan import (
    Choice,
    choices,
    decide_by_observation,
    decide_by_structure,
    stock_class,
    unless_mask,
    without_masks,
)
from fxmem.passes.selective_save import selective_save
from fxmem.passes.watch import SUBSTITUTES, Operand, Place, Watched, caller, top_hooks, watch
from fxmem.pipeline import OptimizedModule, does_not_run, share
from fxmem.records import Decision, GradFlow, ParameterStatus


class _Forward:
    """What stands in the place of a module's forward, on the instance."""

    module: nn.Module

    def stock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the class's forward."""
        forward: Any = type(self.module).forward
        return forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        forward: Any = type(self.module).forward
        return inspect.signature(MethodType(forward, self.module))


class Substituted(_Forward):
    """A module's own forward, in which some calls of torch's functions are calls of ours.

    Args:
        module: the module; it takes this as its forward.
        lines: for the name of each function of ours, the lines of code whose calls it takes.
    """

    def __init__(self, module: nn.Module, lines: Mapping[str, frozenset[str]]) -> None:
        self.module = module
        self.lines = lines

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        # Nothing is kept without a graph, and a compiler plans by itself.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.stock(args, kwargs)
        with _Substitution(self.lines):
            return self.stock(args, kwargs)


class _Substitution(TorchFunctionMode):
    def __init__(self, lines: Mapping[str, frozenset[str]]) -> None:
        super().__init__()
        self.lines = lines
        self.hooks = top_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = SUBSTITUTES.get(func)
        here = ours is not None and ours.__name__ in self.lines and caller() in self.lines[ours.__name__]
        # A checkpoint runs again when this mode is gone, and must then do what it did.
        if here and top_hooks() == self.hooks and torch.is_grad_enabled():
            func = ours
        return func(*args, **(kwargs or {}))


class Region(_Forward):
    """A submodule's forward, as a graph wherever the graph holds.

    Args:
        module: the submodule; it takes this as its forward.
        captured: its graph, rewritten, with the model's paths.
        path: its path in the model.
    """

    def __init__(self, module: nn.Module, captured: RegionCapture, path: str) -> None:
        at = captured.holder.at
        self.module = module
        self.form = captured.form
        self.modes = [(at(p), mode) for p, mode in captured.capture.modes.items()]
        self.attributes = [(at(p), name, value) for p, name, value in captured.attributes]
        self.inlined = [(at(p.rpartition(".")[0]), p.rpartition(".")[2], m) for p, m in captured.inlined.items()]
        graph = captured.capture.graph
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                node.target = node.target.removeprefix(f"{path}." if path else "")
        generated = graph.python_code("self")
        self.python = (generated.src, generated.globals)
        self.code = _forward_from_src(*self.python)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The submodule's forward."""
        tensors = self.form.tensors(args, kwargs) if self.holds() else None
        if tensors is None:
            return self.stock(args, kwargs)
        return self.code(self.module, *tensors)

    def holds(self) -> bool:
        """Whether what the traced code read is as it was."""
        return (
            all(m.training is mode for m, mode in self.modes)
            and all(parent._modules.get(name) is m and not has_hooks(m) for parent, name, m in self.inlined)
            and all(unchanged(value, vars(m).get(name)) for m, name, value in self.attributes)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        shared = {name: vars(self)[name] for name in ("python", "code", "form")}
        vars(twin).update(copy.deepcopy({k: v for k, v in vars(self).items() if k not in shared}, memo), **shared)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        source, names = self.python
        state = {k: v for k, v in vars(self).items() if k not in ("python", "code")}
        return {**state, "source": f"{_format_import_block(names, sys_importer)}\n{source}"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        source = state.pop("source")
        vars(self).update(state, python=(source, {}), code=_forward_from_src(source, {}))


def twin_of(source: nn.Module) -> nn.Module:
    """A copy of the module tree that shares parameters and buffers, starts with the same hooks, and leads nowhere else.

    Bound methods, partial functions and plain attributes that hold modules of the tree hold those of the copy.
    """
    memo: dict[int, nn.Module] = {}
    root = share(source, memo)
    for twin in memo.values():
        state = vars(twin)
        for name, value in state.items():
            if name in _TENSORS or name == "_modules":
                continue
            # Hooks that somebody registers on one of the two later are that one's alone.
            state[name] = value.copy() if name in _STANDARD and isinstance(value, dict | set) else _rebound(value, memo)
    return root


def original(model: nn.Module) -> nn.Module:
    """A model without what was done to its regions and layers, in a copy of its modules; itself where nothing was.

    The copy has the train/eval flags, adapters and whatever else was changed since.
    """
    if not any(isinstance(vars(m).get("forward"), _Forward) or stock_class(m) is not type(m) for m in model.modules()):
        return model
    root = twin_of(model)
    for module in root.modules():
        if isinstance(vars(module).get("forward"), _Forward):
            del vars(module)["forward"]
        module.__class__ = stock_class(module)
    return root


_STANDARD = frozenset(vars(nn.Module()))
_TENSORS = frozenset(["_parameters", "_buffers", "_non_persistent_buffers_set"])


def _rebound(value: Any, memo: Mapping[int, nn.Module]) -> Any:
    """``value`` with the copies in the place of the modules that it holds."""
    if isinstance(value, nn.Module):
        return memo.get(id(value), value)
    if isinstance(value, MethodType) and id(value.__self__) in memo:
        return MethodType(value.__func__, memo[id(value.__self__)])
    if type(value) is functools.partial:
        parts = (value.func, value.args, value.keywords)
        new = tuple(_rebound(part, memo) for part in parts)
        return value if all(a is b for a, b in zip(parts, new, strict=True)) else functools.partial(new[0], *new[1], **new[2])
    if type(value) in (list, tuple):
        items = [_rebound(v, memo) for v in value]
        return value if all(a is b for a, b in zip(value, items, strict=True)) else type(value)(items)
    if type(value) is dict:
        mapped = {k: _rebound(v, memo) for k, v in value.items()}
        return value if all(mapped[k] is v for k, v in value.items()) else mapped
    return value


@dataclass
class _Part:
    """A region, or the layers or functions that belong to none: choices that one graph shows.

    Args:
        path: of the region; None for the layers and functions.
        holder: root of the graph's paths.
        graph: the graph; that of the layers or functions is no program, only a list of calls.
        captured: the region.
        places: for each node of a function, where it is called.
        found: the choices.
        flow: which values require grad.
    """

    path: str | None
    holder: nn.Module
    graph: fx.Graph
    captured: RegionCapture | None = None
    places: dict[str, Place] = field(default_factory=dict)
    found: list[Choice] = field(default_factory=list)
    flow: GradFlow = field(default_factory=lambda: GradFlow({}, {}))


class _Partition:
    """Cuts the model into regions and layers.

    Args:
        root: the copy of the model.
        run: how its modules are called; None to go by signatures.
        whole: whether the root itself may be a region.
    """

    def __init__(self, root: nn.Module, run: Watched | None) -> None:
        self.root = root
        self.run = run
        self.regions: list[_Part] = []
        self.layers: list[str] = []
        self.failed: dict[str, str] = {}
        self._seen: set[int] = set()
        self._covered: set[str] = set()
        self._names: set[str] = set()
        self._walk(root, "")

    def _walk(self, module: nn.Module, path: str) -> None:
        if id(module) in self._seen or isinstance(module, torch.jit.ScriptModule):
            return
        self._seen.add(id(module))
        if _is_layer(module):
            if self._called(path):
                self.layers.append(path)
            return
        if module._modules and _has_forward(module):
            try:
                captured = trace_region(module, path, self._form(module, path))
            except CaptureError as error:
                self.failed[path] = _place(error)
            else:
                self._take(path, captured)
                return
        self._children(module, path)

    def _children(self, module: nn.Module, path: str) -> None:
        for name, child in module._modules.items():
            if child is not None:
                self._walk(child, f"{path}.{name}".removeprefix("."))

    def _take(self, path: str, captured: RegionCapture) -> None:
        graph = captured.capture.graph
        for node in graph.nodes:
            prefix = path.replace(".", "_")
            node._rename(self._unique(node.name if node.name.startswith(prefix) else f"{prefix}_{node.name}"))
        self.regions.append(_Part(path, captured.holder, graph, captured))
        self._covered |= {path, *captured.inlined}
        self._seen |= {id(m) for m in captured.inlined.values()}
        for node in graph.nodes:
            if node.op == "call_module":
                module = captured.holder.get_submodule(node.target)
                if id(module) not in self._seen:
                    self._seen.add(id(module))
                    self._children(module, node.target)

    def _unique(self, name: str) -> str:
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name

    def _called(self, path: str) -> bool:
        return self.run is None or path in self.run.calls

    def _form(self, module: nn.Module, path: str) -> CallForm:
        if self.run is None:
            return CallForm.default(module.forward)
        calls = self.run.calls.get(path)
        if not calls:
            raise CaptureError("the example inputs do not lead through its forward.", where=type(module).__name__)
        form: CallForm = calls[0].form
        if any(call.form != form for call in calls):
            raise CaptureError("it is called in several ways.", where=type(module).__name__)
        return form

    def parts(self) -> Iterator[_Part]:
        """Regions and layers with their choices."""
        for part in self.regions:
            part.flow = grad_flow(part.holder, part.graph, self._inputs(part))
            part.found = choices(part.holder, part.graph, part.flow)
            yield part
        graph = fx.Graph()
        values = {needed: graph.placeholder(f"layers_input{needed}") for needed in (False, True)}
        for path in self.layers:
            call = graph.call_module(path, (values[self._needed(path)],))
            call._rename(self._unique(path.replace(".", "_") or "root"))
        part = _Part(None, self.root, graph)
        part.flow = grad_flow(self.root, graph, {f"layers_input{needed}": needed for needed in values})
        part.found = choices(self.root, graph, part.flow)
        yield part
        yield self._functions()

    def _functions(self) -> _Part:
        """The functions that code outside of regions calls."""
        graph = fx.Graph()
        part = _Part(None, self.root, graph)
        values = {needed: graph.placeholder(f"functions_input{needed}") for needed in (False, True)}

        def node(operand: Operand) -> fx.Node:
            return values[operand.requires_grad] if operand.parameter is None else graph.get_attr(operand.parameter)

        for place, operands in ({} if self.run is None else self.run.functions).items():
            owner = self.root.get_submodule(place.path)
            if place.path in self._covered or "forward" in vars(owner) or not _has_forward(owner) or _is_layer(owner):
                continue
            # Under a mode these do not take the fast path that they take without a gradient.
            if any(isinstance(m, nn.MultiheadAttention | nn.TransformerEncoderLayer) for m in owner.modules()):
                continue
            args, kwargs = tree_map_only(Operand, node, operands)
            try:
                if place.function in FUNCTIONS:
                    call = graph.call_function(place.function, args, kwargs)
                else:
                    call = graph.call_method(place.function.__name__, args, kwargs)
            except NotImplementedError:
                continue  # an argument that no graph takes
            call.meta["source"] = place.line
            call._rename(self._unique(f"{place.path.replace('.', '_') or 'root'}_{place.function.__name__.strip('_')}"))
            part.places[call.name] = place
        part.flow = grad_flow(self.root, graph, {f"functions_input{needed}": needed for needed in values})
        part.found = choices(self.root, graph, part.flow)
        return part

    def _inputs(self, part: _Part) -> dict[str, bool] | None:
        if self.run is None or part.path is None:
            return None
        flags = [call.requires_grad for call in self.run.calls[part.path]]
        targets = [str(node.target) for node in part.graph.nodes if node.op == "placeholder"]
        return dict(zip(targets, (any(column) for column in zip(*flags, strict=True)), strict=True))

    def _needed(self, path: str) -> bool:
        return self.run is None or any(call.requires_grad[:1] == (True,) for call in self.run.calls[path])


def _is_layer(module: nn.Module) -> bool:
    return any(base in MODULES for base in (stock_class(module), *type(module).__mro__))


def _place(error: CaptureError) -> str:
    return f"{error.where}: {error.reason}" if error.where else error.reason


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


@dataclass(frozen=True)
class Regions:
    """What came out.

    Args:
        module: the copy of the model, rewritten.
        seen: what was observed before and after; None where structure alone decided.
    """

    module: nn.Module
    seen: tuple[Watched, Watched] | None


def optimize_regions(
    source: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    why: CaptureError | None,
    flags: nn.Module | None = None,
    fakes: Callable[[], Fakes | None] = lambda: None,
) -> Regions:
    """Rewrites a copy of the model region by region.

    Args:
        source: the model.
        args: example inputs; none, and no ``kwargs``, to go by structure alone.
        kwargs: example inputs by name.
        why: why there is no graph of the whole model.
        flags: a module of the same hierarchy whose train/eval flags are taken over; the model's own by default.
        fakes: makes what each observation runs on; fake tensors on the devices of the real ones by default.

    Raises:
        ArgumentError: the model does not run on the example inputs.
        CaptureError: the model's forward was replaced on the instance.
        RewriteError: a rewritten module returned something else than before.
    """
    if "forward" in vars(source):
        raise why or CaptureError(
            "the model's forward was replaced on the instance.",
            where=type(source).__name__,
            remedy="Remove the wrapper (accelerate's remove_hook_from_module, for one), optimize, and wrap the result.",
        )
    root = twin_of(source)
    present = dict(root.named_modules(remove_duplicate=False))
    for path, module in () if flags is None else flags.named_modules(remove_duplicate=False):
        if path in present:
            present[path].training = module.training
    notes = [] if why is None else [f"captured by regions, because the whole model is no graph: {_place(why)}"]
    look = _Look(root, args, kwargs, fakes, notes) if args or kwargs else None
    before = None if look is None else look()
    partition = _Partition(root, before)
    parts = list(partition.parts())
    found = [c for part in parts for c in part.found]
    seen = None
    broken: dict[str, str] = {}
    if before is None or look is None:
        verdicts = [v for part in parts for v in _by_structure(part)]
        verdicts = _agreed(parts, verdicts)
        _apply(parts, verdicts)
    else:
        sites = {name: place for part in parts for name, place in part.places.items()}
        plain = without_masks(found)
        _apply(parts, plain)
        graphs = {p.path: (p.holder, p.graph, p.captured.form) for p in parts if p.path is not None and p.captured}
        names = {
            str(n.target): n.name for part in parts if part.path is None for n in part.graph.nodes if n.op == "call_module"
        }
        after = before
        if any(v.apply for v in plain) or any(c.verdict.apply for c in found):
            after = _seen(look(names, graphs, _places(sites, found, plain)))
        broken = after.failed | {
            path: "its graph returns something else than its code"
            for path in graphs
            if path not in after.failed and _returned(before, path) != _returned(after, path)
        }
        verdicts = _agreed(parts, _without(broken, parts, decide_by_observation(found, after.saved)))
        _apply(parts, verdicts)
        run_as_graph = {p.path for p, _ in _running(parts, verdicts)}
        if [v.apply for v in verdicts] != [v.apply for v in plain] or run_as_graph:
            used = {path: graph for path, graph in graphs.items() if path in run_as_graph}
            after = _seen(look(names, used, _places(sites, found, verdicts)))
        for path in after.calls:
            if _returned(before, path) != _returned(after, path):
                raise RewriteError(
                    "it returns something else once rewritten (shape, dtype, stride, device or structure).",
                    where=path or type(source).__name__,
                    remedy="Please report this model; until then leave the module out of the rewrite.",
                )
        seen = (before, after)
    partition.failed |= broken
    running = _running(parts, verdicts)
    substituted = _substituted(parts, verdicts)
    notes += _told(root, partition, [part.path or "" for part, _ in running], substituted)
    decisions = _decisions(parts, verdicts)
    for part, captured in running:
        assert part.path is not None
        module = root.get_submodule(part.path)
        vars(module)["forward"] = Region(module, captured, part.path)
    for path, lines in substituted.items():
        module = root.get_submodule(path)
        vars(module)["forward"] = Substituted(module, lines)
    vars(root).update(
        {
            "decisions": decisions,
            "grad_flow": _flow(parts),
            "saved": seen and (seen[0].saved, seen[1].saved),
            "notes": tuple(notes),
            "optimizer": None,
        }
    )
    return Regions(root, seen)


def _seen(run: Watched | None) -> Watched:
    assert run is not None, "fake tensors could follow the model as it was"
    return run


def check_kept(gm: OptimizedModule, source: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuses an exported graph that keeps more than the model's own code: export undoes checkpoints and some views.

    Args:
        gm: the graph, rewritten; one that was not exported passes.
        source: the model.
        args: example inputs.
        kwargs: example inputs by name.

    Raises:
        CaptureError: it keeps more.
    """
    if vars(gm)["_interface"] is None or gm.saved is None:
        return
    look = _Look(twin_of(source), args, kwargs, lambda: None, [])
    eager, ours = _seen(look()).saved.kept, gm.saved[1].kept
    if ours > eager:
        raise CaptureError(
            f"the exported graph keeps {ours} bytes for backward and the model's own code {eager}.",
            where=type(source).__name__,
            remedy="Use capture='regions', which leaves the model's own code in place.",
        )


class _Look:
    """Runs the model on the example inputs: on fake tensors, or for real from the time that those cannot follow."""

    def __init__(
        self,
        root: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        fakes: Callable[[], Fakes | None],
        notes: list[str],
    ) -> None:
        self.root, self.args, self.kwargs, self.fakes, self.notes = root, args, kwargs, fakes, notes
        self.given = (*tensors_of((args, dict(kwargs))), *root.parameters(), *root.buffers())
        self.real = False

    def __call__(
        self,
        names: Mapping[str, str] | None = None,
        graphs: Mapping[str, Any] | None = None,
        places: Mapping[Place, tuple[str, bool]] | None = None,
    ) -> Watched | None:
        """One run; None where fake tensors cannot follow the model and there are no others."""
        if not self.real:
            fakes = self.fakes() or Fakes(self.given)
            try:
                return self._run(fakes, names, graphs, places)
            except Exception as error:
                depends = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
                if any(isinstance(t, FakeTensor) or t.device.type == "meta" for t in self.given) or fakes.mode is None:
                    if depends:
                        self.notes.append(f"{_func(error)} depends on the data, so the rewrite went by structure alone")
                        return None
                    raise does_not_run(error) from error
                self.real = True
                reason = f"{_func(error)} depends on the data" if depends else f"fake tensors fail ({first_line(error)})"
                self.notes.append(f"{reason}, so the forward was run for real to see who keeps what")
        try:
            return self._run(None, names, graphs, places)
        except Exception as error:
            raise does_not_run(error) from error

    def _run(self, fakes: Fakes | None, names: Any, graphs: Any, places: Any) -> Watched:
        return watch(
            self.root, self.args, self.kwargs, fakes=fakes, describe=CallForm.of, names=names, graphs=graphs, places=places
        )


def _places(sites: Mapping[str, Place], found: Sequence[Choice], verdicts: Sequence[Verdict]) -> dict[Place, tuple[str, bool]]:
    """The sites that functions are, and whether ours runs there."""
    applied = {c.node.name: v.apply for c, v in zip(found, verdicts, strict=True)}
    return {place: (name, applied.get(name, False)) for name, place in sites.items()}


def _func(error: Exception) -> str:
    return str(getattr(error, "func", error))


def _returned(run: Watched, path: str) -> list[Any]:
    return [call.returned for call in run.calls.get(path, ())]


def _by_structure(part: _Part) -> list[Verdict]:
    if part.path is not None:
        return decide_by_structure(part.holder, part.found, part.flow)
    return [unless_mask(c.verdict) for c in part.found]


def _agreed(parts: Sequence[_Part], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """A module has one class for all of its calls: a mask in the place of something else must win in each."""
    pairs = list(zip(((part, c) for part in parts for c in part.found), verdicts, strict=True))
    against: dict[int, Verdict] = {}
    for (part, choice), verdict in pairs:
        if choice.verdict.instead_of is not None and choice.node.op == "call_module" and not verdict.apply:
            against[id(part.holder.get_submodule(str(choice.node.target)))] = verdict
    agreed = []
    for (part, choice), verdict in pairs:
        module = part.holder.get_submodule(str(choice.node.target)) if choice.node.op == "call_module" else None
        agreed.append(against.get(id(module), verdict) if verdict.instead_of is not None else verdict)
    return agreed


def _without(broken: Mapping[str, str], parts: Sequence[_Part], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts, without the functions of regions whose graphs do not hold."""
    paths = [(part.path or "", c) for part in parts for c in part.found]
    return [
        Verdict(False, f"not rewritten: {broken[path]}") if path in broken and c.node.op != "call_module" else v
        for (path, c), v in zip(paths, verdicts, strict=True)
    ]


def _apply(parts: Sequence[_Part], verdicts: Sequence[Verdict]) -> None:
    rest = iter(verdicts)
    for part in parts:
        selective_save(part.holder, part.graph, part.found, [next(rest) for _ in part.found])


def _running(parts: Sequence[_Part], verdicts: Sequence[Verdict]) -> list[tuple[_Part, RegionCapture]]:
    """The regions that must run as graphs: those in which a function is rewritten."""
    rest = iter(verdicts)
    running = []
    for part in parts:
        own = [(c, next(rest)) for c in part.found]
        if part.captured is not None and any(v.apply and c.node.op != "call_module" for c, v in own):
            running.append((part, part.captured))
    return running


def _substituted(parts: Sequence[_Part], verdicts: Sequence[Verdict]) -> dict[str, dict[str, frozenset[str]]]:
    """For each module whose code calls functions that are rewritten, the lines of each."""
    rest = iter(verdicts)
    found: dict[str, dict[str, set[str]]] = {}
    for part in parts:
        for choice in part.found:
            verdict = next(rest)
            place = part.places.get(choice.node.name)
            if place is not None and verdict.apply:
                ours = SUBSTITUTES[place.function].__name__
                found.setdefault(place.path, {}).setdefault(ours, set()).add(place.line)
    return {path: {name: frozenset(lines) for name, lines in table.items()} for path, table in found.items()}


def _decisions(parts: Sequence[_Part], verdicts: Sequence[Verdict]) -> tuple[Decision, ...]:
    rest = iter(verdicts)
    made = []
    for part in parts:
        for choice in part.found:
            decision = choice.decision(next(rest))
            place = part.places.get(choice.node.name)
            made.append(replace(decision, module=decision.module or (place.path if place else part.path) or ""))
        for path, reason in () if part.captured is None else part.captured.capture.opaque.items():
            made.append(Decision(path, path, "module", False, reason, None, None))
    return tuple(made)


def _flow(parts: Sequence[_Part]) -> GradFlow:
    nodes = {name: status for part in parts for name, status in part.flow.nodes.items()}
    parameters: dict[str, ParameterStatus] = {}
    for part in parts[::-1]:
        for name, status in part.flow.parameters.items():
            old = parameters.get(name, replace(status, used_by=()))
            parameters[name] = replace(old, used_by=(*old.used_by, *status.used_by))
    return GradFlow(nodes, parameters)


def _told(root: nn.Module, partition: _Partition, running: Sequence[str], substituted: Iterable[str]) -> list[str]:
    """What became of the parts, and why they are not larger, one line for each kind of module."""
    kinds: dict[tuple[str, str], list[str]] = {}
    regions = [part.path or "" for part in partition.regions]
    for path in regions:
        how = "a region that runs as a graph" if path in running else "a region whose layers are rewritten in place"
        kinds.setdefault((type(root.get_submodule(path)).__name__, how), []).append(path)
    for path, reason in partition.failed.items():
        kinds.setdefault((type(root.get_submodule(path)).__name__, f"no region: {reason}"), []).append(path)
    for path in substituted:
        kinds.setdefault((type(root.get_submodule(path)).__name__, "its own code, with functions of ours"), []).append(path)
    for path in partition.layers:
        kinds.setdefault((stock_class(root.get_submodule(path)).__name__, "a layer by itself"), []).append(path)
    return [
        f"{paths[0] or 'the model'} ({kind}{f', and {len(paths) - 1} more of them' if len(paths) > 1 else ''}): {how}"
        for (kind, how), paths in kinds.items()
    ]
