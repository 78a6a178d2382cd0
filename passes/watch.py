"""Observation of a model without a graph: how its modules and functions are called, what they return, and what each keeps.

The model itself runs forward, on fake tensors or, where those cannot follow it, for real and without keeping anything: what
autograd asks to keep is noted and let go. A module may run as a graph meanwhile, whose nodes are then told apart. Requires a
model that shares no modules with another, and inputs; changes nothing.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from fxmem.passes.base import FUNCTIONS, METHODS, op_name, storages_of, tensors_of
from fxmem.passes.faithful import faithful
from fxmem.passes.fakes import Fakes
from fxmem.passes.saved_tensors import PlainInterpreter, fresh_functions, hooks_off, saved_numbers
from fxmem.records import Kind, SavedTensor, SavedTensors


@dataclass
class Called:
    """One call of a module.

    Args:
        form: what ``describe`` made of the arguments.
        requires_grad: of each tensor among the arguments, in the order of ``form``.
        returned: structure of the result, and (shape, dtype, stride, device, requires_grad) of every tensor in it.
    """

    form: Any
    requires_grad: tuple[bool, ...]
    returned: Any = None


SUBSTITUTES: dict[Any, Callable[..., Any]] = {
    **{stock: ours for stock, (_, ours) in FUNCTIONS.items()},
    **{getattr(Tensor, name): ours for name, (_, ours) in METHODS.items()},
}
"""Our function for each of torch's functions and tensor methods, as a mode on torch functions gets to see them."""

# Where torch's functions live: who calls them is beyond.
_CALLEES = tuple(m.__file__ for m in (torch.overrides, torch.nn.functional, torch._jit_internal, torch._tensor))


def caller() -> str:
    """``file:line`` of the code that calls a function of torch."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _CALLEES:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def top_hooks() -> Any:
    """The saved-tensor hooks in force, such as a checkpoint's, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@dataclass(frozen=True)
class Place:
    """Where a module's code calls a function that a rule speaks of.

    Args:
        path: the innermost module.
        function: the function, as a mode gets to see it.
        line: ``file:line`` of the call.
    """

    path: str
    function: Any
    line: str


@dataclass(frozen=True)
class Operand:
    """A tensor among the arguments of a function.

    Args:
        parameter: its name, if it is a parameter or buffer.
        requires_grad: whether it requires grad.
    """

    parameter: str | None
    requires_grad: bool


@dataclass
class Watched:
    """What one run showed.

    Args:
        saved: what is kept, by site: the name given to a module, the node of a graph, else the innermost module's path.
        calls: the calls of each module, by path.
        failed: modules that did not run as the graph they were given, by path, with the reason.
        functions: for each place, the arguments of a call there, ``Operand`` for tensors, of one that needs a gradient if any.
    """

    saved: SavedTensors
    calls: dict[str, list[Called]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    functions: dict[Place, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)


class _Serials:
    """Numbers storages, each its own for as long as the run lasts, without keeping them alive."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._watched: dict[int, Any] = {}
        self._next = itertools.count()

    def of(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = next(self._next)
            self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
        return self._numbers[key]

    def _forget(self, key: int) -> None:
        del self._numbers[key], self._watched[key]


class _Nodes(PlainInterpreter):
    """Runs a graph and tells the run which node is at work."""

    def __init__(self, holder: nn.Module, graph: fx.Graph, run: _Run) -> None:
        super().__init__(holder, graph=graph, garbage_collect_values=True)
        self.run_of = run

    def run_node(self, n: fx.Node) -> Any:
        kind = op_name(self.module, n)
        path = str(n.target) if n.op == "call_module" else self.run_of.site[1]
        with self.run_of.at(n.name, path, kind, closed=True):
            return super().run_node(n)


class _Run:
    def __init__(
        self, names: Mapping[str, str], places: Mapping[Place, tuple[str, bool]], describe: Callable[..., Any]
    ) -> None:
        self.names = names
        self.places = places
        self.tensors: dict[int, str] = {}
        self.functions: dict[Place, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.closed = False
        self.describe = describe
        self.site = ("", "", "")
        self.serials = _Serials()
        self.packed: list[SavedTensor] = []
        self.calls: dict[str, list[Called]] = {}
        self.failed: dict[str, str] = {}

    @contextmanager
    def at(self, name: str, module: str, op: str, *, closed: bool) -> Iterator[None]:
        """While it lasts, what is kept is this site's; one that is closed is a unit, whose functions do not count."""
        old, self.site, was, self.closed = self.site, (name, module, op), self.closed, closed
        try:
            yield
        finally:
            self.site, self.closed = old, was

    def call(self, function: Any, line: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function that a rule speaks of from a module's code."""
        place = Place(self.site[1], function, line)
        operands = tree_map_only(Tensor, self._operand, (args, kwargs))
        if place not in self.functions or any(isinstance(o, Operand) and o.requires_grad for o in tree_flatten(operands)[0]):
            self.functions[place] = operands
        kind = getattr(function, "__name__", "function")
        name, ours = self.places.get(place, (f"{place.path or 'the model'}.{kind}", False))
        with self.at(name, place.path, kind, closed=True):
            return (SUBSTITUTES[function] if ours else function)(*args, **kwargs)

    def _operand(self, tensor: Tensor) -> Operand:
        return Operand(self.tensors.get(id(tensor)), tensor.requires_grad)

    def pack(self, tensor: Tensor) -> None:
        name, module, op = self.site
        for storage in storages_of(tensor):
            dtype = str(tensor.dtype).removeprefix("torch.")
            number = self.serials.of(storage)
            self.packed.append(
                SavedTensor(name, module, op, tuple(tensor.shape), dtype, number, storage.nbytes(), "activation")
            )

    def watched(self, path: str, module: nn.Module, graph: tuple[nn.Module, fx.Graph, Any] | None) -> Callable[..., Any]:
        """The module's forward, watched; as a graph where the call is of the form that it holds for."""
        stock = module.forward
        # A leaf is one site with everything in it; so is a node that calls it.
        name = self.names.get(path)

        @functools.wraps(stock)
        def forward(*args: Any, **kwargs: Any) -> Any:
            form, operands = self.describe(stock, args, kwargs)
            called = Called(form, tuple(t.requires_grad for t in operands))
            self.calls.setdefault(path, []).append(called)
            op = type(module).__name__.removeprefix("Selective")
            inside = self.site[2] and self.site[1] == path
            site = self.site if inside else (name or path or "the model itself", path, op)
            with self.at(*site, closed=inside or name is not None):
                tensors = None if graph is None else graph[2].tensors(args, kwargs)
                result = (
                    stock(*args, **kwargs) if tensors is None else self._as_graph(path, stock, graph, tensors, args, kwargs)
                )
            flat, spec = tree_flatten(result)
            called.returned = (
                spec,
                tuple(
                    (tuple(t.shape), t.dtype, tuple(t.stride()), t.device, t.requires_grad)
                    if isinstance(t, Tensor)
                    else type(t)
                    for t in flat
                ),
            )
            return result

        return forward

    def _as_graph(self, path: str, stock: Any, graph: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        holder, nodes, _ = graph
        before = len(self.packed)
        try:
            return _Nodes(holder, nodes, self).run(*tensors, enable_io_processing=False)
        except Exception as error:
            text = str(error).strip().splitlines()
            self.failed[path] = f"its graph does not run: {type(error).__name__}: {text[0] if text else ''}"
            del self.packed[before:]
            return stock(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """Shows the run what functions the code of modules calls, outside of checkpoints."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in SUBSTITUTES or self.run.closed or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        hooks = top_hooks()
        if hooks is None or hooks[0] != self.run.pack:
            return func(*args, **kwargs)
        return self.run.call(func, caller(), args, kwargs)


def watch(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    fakes: Fakes | None,
    describe: Callable[..., Any],
    names: Mapping[str, str] | None = None,
    graphs: Mapping[str, tuple[nn.Module, fx.Graph, Any]] | None = None,
    places: Mapping[Place, tuple[str, bool]] | None = None,
) -> Watched:
    """Runs the model forward and records what is kept, and how its modules are called.

    Args:
        model: the model; hooks of the user's do not run.
        args: positional inputs, real or fake, with requires_grad as it will be.
        kwargs: keyword inputs.
        fakes: makes the tensors to run on; None to run for real, on copies of buffers and inputs.
        describe: makes of ``(forward, args, kwargs)`` of a call what ``Called.form`` is to be, and its tensors in order.
        names: sites that modules are, by path.
        graphs: modules to run as a graph: (root of its paths, graph, an object whose ``tensors(args, kwargs)`` gives what to
            call it with, or None where a call is of another form).
        places: sites that calls of functions are, and whether our function runs there.
    """
    graphs = graphs or {}
    run = _Run(names or {}, places or {}, describe)
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        return copies.setdefault(id(tensor), tensor.detach().clone().requires_grad_(tensor.requires_grad))

    make: Callable[[Tensor], Tensor] = fakes or copied
    state = {name: make(t) for name, t in named}
    parameters = {name for name, t in named if isinstance(t, nn.Parameter)}
    kinds: dict[int, Kind] = {}
    args, kwargs = tree_map_only(Tensor, make, (tuple(args), dict(kwargs)))
    inputs = list(tensors_of((args, kwargs)))
    devices = sorted({t.device.index or 0 for t in state.values() if t.device.type == "cuda"}) if fakes is None else []
    modules = [(path, m) for path, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)]
    own = {path: vars(m).get("forward") for path, m in modules}
    with ExitStack() as stack:
        if fakes is not None and fakes.mode is not None:
            stack.enter_context(fakes.mode)
            stack.enter_context(faithful())
        stack.enter_context(hooks_off(model))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_reparametrize_module(model, state, stack_weights=True))
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.callback(_restore, modules, own)
        for path, module in modules:
            vars(module)["forward"] = run.watched(path, module, graphs.get(path))
        run.tensors = {id(t): name for name, t in state.items()}
        with torch.autograd.graph.saved_tensors_hooks(run.pack, _nothing), _Functions(run):
            output = model(*args, **kwargs)
    outputs = list(tensors_of(output))
    if fakes is not None:
        walked: dict[int, Any] = {}
        for function in fresh_functions(outputs, walked):
            walked[function._sequence_nr()] = function
            for number in saved_numbers(function):
                run.pack(number)
    ends: tuple[tuple[list[Tensor], Kind], ...] = ((outputs, "output"), (inputs, "input"))
    for found, kind in ends:
        for t in found:
            kinds |= {run.serials.of(s): kind for s in storages_of(t)}
    for name, t in state.items():
        own_kind: Kind = "parameter" if name in parameters else "buffer"
        kinds |= {run.serials.of(s): own_kind for s in storages_of(t)}
    saved = tuple(
        SavedTensor(t.node, t.module, t.op, t.shape, t.dtype, t.storage, t.nbytes, kinds.get(t.storage, t.kind))
        for t in run.packed
    )
    return Watched(SavedTensors(saved), run.calls, run.failed, run.functions)


def _nothing(packed: None) -> Tensor:
    """What whoever looks at a saved tensor gets to see: there is no backward pass."""
    return torch.empty(0)


def _restore(modules: list[tuple[str, nn.Module]], own: Mapping[str, Any]) -> None:
    for path, module in modules:
        if own[path] is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own[path]
