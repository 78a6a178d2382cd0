"""Model to graph: symbolic tracing that keeps torch's layers, the hierarchy, parameter identity and source lines."""

from __future__ import annotations

import inspect
import operator
import os
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict
from torch.nn.parameter import is_lazy
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from fxmem.errors import ArgumentError, CaptureError

CONSTANTS = "_fxmem_constants"

_NOT_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Capture:
    """A captured model.

    Args:
        graph: the graph; its targets are paths in the model.
        modes: paths of modules whose train/eval flag the traced code read, with the value that it found. The graph holds for
            these values alone.
        opaque: paths of modules that were not looked into, each with the reason.
        constants: tensors that the traced code made by itself; the graph reads them under ``CONSTANTS``.
        written: plain attributes that the forward sets on every call, which the graph does not.
        inlined: paths of modules whose forward is part of the graph, so that nobody calls them; the root left out.
    """

    graph: fx.Graph
    modes: Mapping[str, bool]
    opaque: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    written: tuple[str, ...]
    inlined: tuple[str, ...] = ()


def check_model(model: object) -> nn.Module:
    """Refuses what cannot be optimized.

    Raises:
        ArgumentError: not a module, a ScriptModule, or a module with uninitialized lazy parameters.
    """
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"an object of type {type(model).__name__}"
        raise ArgumentError(f"expected a torch.nn.Module, got {what}.", where="model", remedy="Pass a module instance.")
    if isinstance(model, torch.jit.ScriptModule):
        raise ArgumentError(
            "a ScriptModule is compiled already and cannot be traced by torch.fx.",
            where="model",
            remedy="Pass the original nn.Module, before torch.jit.script or torch.jit.trace.",
        )
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(parameter):
            raise ArgumentError(
                "this lazy parameter has no shape yet.",
                where=name,
                remedy="Run the model once on an example before optimizing it.",
            )
    return model


def bind_example(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The example inputs by the names of the model's forward.

    Raises:
        ArgumentError: they do not fit the signature.
    """
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(
            f"the example inputs do not fit {type(model).__name__}.forward{inspect.signature(model.forward)}: {error}.",
            where="example_args",
            remedy="Pass exactly what the model is called with, positional inputs as a tuple.",
        ) from error
    return dict(bound.arguments)


def has_hooks(module: nn.Module) -> bool:
    """Whether anybody registered a hook on the call of ``module``."""
    return any(getattr(module, hooks, None) for hooks in HOOKS)


class _Proxy(fx.Proxy):
    """Proxy that keeps in-place operators in place; torch's own turns ``x += y`` into ``x = x + y``, a new tensor."""


def _inplace(operation: Callable[[Any, Any], Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def record(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    return record


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul"):
    setattr(_Proxy, f"__{_name}__", _inplace(getattr(operator, f"__{_name}__")))


# Torch's own layers whose forward branches on its input: a user's subclass that calls it is a leaf as they are.
_UNTRACEABLE = (nn.modules.batchnorm._NormBase, nn.RNNBase, nn.MultiheadAttention)


class _Tracer(fx.Tracer):
    """Symbolic tracer that refuses what a graph cannot express rather than baking it in."""

    # Else what a forward does to its buffers would happen once, while it is traced.
    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.inlined: dict[str, nn.Module] = {}
        self.record_stack_traces = True
        self.opaque: dict[str, str] = {}
        self.grad_mode = torch.is_grad_enabled()
        self.autocast = _autocast_state()
        self.hooks = _saved_tensors_hooks()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if super().is_leaf_module(m, module_qualified_name) or type(m).__module__.startswith("fxmem.ops."):
            return True
        if isinstance(m, _UNTRACEABLE):
            return True
        reason = None
        if has_hooks(m):
            reason = "not looked into: it has hooks, which must run on real tensors"
        elif "forward" in vars(m):
            reason = "not looked into: its forward was replaced on the instance"
        if reason is not None:
            self.opaque[module_qualified_name] = reason
        return reason is not None

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self.path_of_module(m)
        if not self.is_leaf_module(m, path):
            self.inlined[path] = m
        return super().call_module(m, forward, args, kwargs)

    def create_arg(self, a: Any) -> Any:
        # Torch's own tracer turns every mapping into a plain dict.
        if type(a) is OrderedDict:
            return self.create_proxy("call_function", OrderedDict, (list(a.items()),), {}).node
        if isinstance(a, dict) and type(a) not in (dict, immutable_dict):
            raise CaptureError(
                f"the forward makes a {type(a).__name__}, which a graph would turn into a dict.",
                remedy="Let the modules below it be optimized one by one (capture='regions').",
            )
        return super().create_arg(a)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if torch.is_grad_enabled() != self.grad_mode:
            raise CaptureError(
                "the forward switches grad mode (torch.no_grad or the like), which symbolic tracing would lose.",
                remedy="Move that part into a module of its own that is not traced, or detach instead.",
            )
        if _autocast_state() != self.autocast:
            raise CaptureError(
                "the forward switches autocast, which symbolic tracing would lose.",
                remedy="Enter autocast around the call of the model instead.",
            )
        if _saved_tensors_hooks() != self.hooks:
            raise CaptureError(
                "the forward runs under saved-tensor hooks (activation checkpointing, save_on_cpu), which symbolic tracing "
                "would lose.",
                remedy="Optimize what is checkpointed, and checkpoint the result.",
            )
        node = super().create_node(*args, **kwargs)
        if isinstance(node.type, str):
            # An annotation that is not evaluated; older torch takes it for an object to import on unpickling.
            node.type = None
        if node.stack_trace:
            node.meta["source"] = source_line(node.stack_trace)
        return node


def _saved_tensors_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _autocast_state() -> tuple[bool, bool, torch.dtype]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
    )


def source_line(stack_trace: str) -> str | None:
    """``file:line`` of the innermost frame of a recorded stack that is not torch's own."""
    found = None
    for line in stack_trace.splitlines():
        line = line.strip()
        if line.startswith('File "'):
            file, _, rest = line[6:].partition('", line ')
            if file.startswith(_NOT_USERS):
                continue
            found = f"{file}:{rest.split(',')[0]}"
    return found


def _paths_of(model: nn.Module) -> dict[int, str]:
    paths = {id(module): path for path, module in model.named_modules(remove_duplicate=True)}
    if isinstance(model, Holder):
        del paths[id(model)]
        paths[id(model.module)] = model.path
    return paths


@contextmanager
def recorded_modes(model: nn.Module) -> Iterator[dict[str, bool]]:
    """Records which modules' ``training`` flags are read, except by torch's own layers, which read it on every call."""
    paths = _paths_of(model)
    seen: dict[str, bool] = {}

    def read(self: nn.Module) -> bool:
        value: bool = self.__dict__["training"]
        if id(self) in paths:
            seen[paths[id(self)]] = value
        return value

    def write(self: nn.Module, value: bool) -> None:
        self.__dict__["training"] = value

    nn.Module.training = property(read, write)  # type: ignore[assignment]
    try:
        yield seen
    finally:
        del nn.Module.training


@contextmanager
def custom_functions_refused(operand: type, how: str) -> Iterator[None]:
    """While it lasts, tracing does not look into autograd functions of the user's, whose backward it would lose.

    Args:
        operand: what the tracer passes in place of tensors.
        how: the tracer, for the message.
    """
    stock = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        own = not cls.__module__.startswith("torch._")
        if own and any(isinstance(a, operand) for a in tree_leaves((args, kwargs))):
            raise CaptureError(
                f"{cls.__name__} is an autograd function of its own, whose backward {how} would lose.",
                remedy="Let the modules around it be optimized one by one (capture='regions').",
            )
        return stock.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = stock


def _specialized(model: nn.Module, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Optional arguments that are not given and steer Python code: they stay at their defaults in the graph."""
    concrete: dict[str, Any] = {}
    for name, parameter in inspect.signature(model.forward).parameters.items():
        default = parameter.default
        if default is inspect.Parameter.empty:
            continue
        value = default if given is None or name not in given else given[name]
        if value is None or isinstance(value, bool | str):
            concrete[name] = value
    return concrete


def trace(model: nn.Module, given: Mapping[str, Any] | None = None) -> Capture:
    """Captures ``model`` by symbolic tracing.

    Args:
        model: any module; it is left as it is.
        given: example inputs by name. Optional arguments that are absent from it, or None, bool or str, are fixed in the graph.

    Raises:
        CaptureError: the forward does what a graph cannot express; says where.
    """
    if "forward" in vars(model):
        raise CaptureError(
            "the model's forward was replaced on the instance, and tracing follows the class.",
            where=type(model).__name__,
            remedy="Remove the wrapper (accelerate's remove_hook_from_module, for one), optimize, and wrap the result.",
        )
    return _run(_Tracer(), model, _specialized(model, given) or None)


def _run(tracer: _Tracer, model: nn.Module, concrete: dict[str, Any] | None) -> Capture:
    rng = torch.get_rng_state()
    before = set(vars(model))
    states = {path: _State.of(m) for path, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)}
    try:
        with recorded_modes(model) as modes, custom_functions_refused(fx.Proxy, "symbolic tracing"):
            graph = tracer.trace(model, concrete_args=concrete)
    except CaptureError as error:
        raise CaptureError(error.reason, where=error.where or blame(error, model), remedy=error.remedy) from error
    except Exception as error:
        raise CaptureError(
            f"symbolic tracing cannot follow this code: {first_line(error)}.",
            where=blame(error, model),
            remedy="Wrap it in nn.Sequential, so that it is a layer of a model."
            if tracer.is_leaf_module(model, "")
            else "Make the shape or value it branches on a constant, move the code into a module that torch.fx does not "
            "trace, or optimize the traceable submodules one by one.",
        ) from error
    finally:
        # The tracer leaves tensors that it met as constants on the model; they belong to the graph.
        names = [name for name in set(vars(model)) - before if name.startswith("_tensor_constant")]
        constants = {name: vars(model).pop(name) for name in names}
        written = tuple(name for path, state in states.items() for name in state.undo(path))
    rebound = [name for name in written if name.rpartition(".")[2] in _tensors_of(model, name)]
    if rebound:
        raise CaptureError(
            "the forward puts another tensor in the place of this one, which a graph cannot.",
            where=rebound[0],
            remedy="Change it in place, such as self.calls.add_(1).",
        )
    if not torch.equal(rng, torch.get_rng_state()):
        torch.set_rng_state(rng)
        raise CaptureError(
            "the forward draws random numbers while it is traced, which a graph would repeat on every call.",
            where=type(model).__name__,
            remedy="Draw them from a tensor that depends on the input, such as torch.rand_like(x), or pass them in.",
        )
    if concrete is not None or not isinstance(tracer, _RegionTracer):
        _name_placeholders(graph, model)
    for node in graph.nodes:
        if node.op == "get_attr" and node.target in constants:
            node.target = f"{CONSTANTS}.{node.target}"
    return Capture(graph, dict(modes), tracer.opaque, constants, written, tuple(tracer.inlined))


class _Tensor:
    """Stands for a tensor among the leaves of a call."""

    def __repr__(self) -> str:
        return "a tensor"

    def __reduce__(self) -> str:
        return "TENSOR"


TENSOR = _Tensor()
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class Parameters:
    """What a forward takes.

    Args:
        positional: names of the parameters that can be passed by position.
        required: names of those without a default, by position or by name.
        defaults: the others' defaults.
    """

    positional: tuple[str, ...]
    required: tuple[str, ...]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, forward: Callable[..., Any]) -> Parameters:
        """The parameters of a bound forward."""
        named = [p for p in inspect.signature(forward).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return cls(
            tuple(p.name for p in named if p.kind is not p.KEYWORD_ONLY),
            tuple(p.name for p in named if p.default is p.empty),
            {p.name: p.default for p in named if p.default is not p.empty},
        )

    def canonical(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]] | None:
        """Every argument by its name, in one order, and those beyond the named ones; None where one is passed twice."""
        given = dict(zip(self.positional, args, strict=False))
        if given.keys() & kwargs.keys():
            return None
        named = {**self.defaults, **given, **kwargs}
        ordered = {name: named.pop(name) for name in self.positional if name in named}
        return {**ordered, **dict(sorted(named.items()))}, args[len(self.positional) :]


@dataclass(frozen=True)
class CallForm:
    """How a module is called: the structure of the arguments, where the tensors are, and the other values.

    However they are passed, and whether or not defaults are, calls with the same arguments are of the same form.

    Args:
        spec: structure of the arguments.
        leaves: ``TENSOR``, or a value that the graph holds fixed.
        parameters: what the forward takes.
        positional: how many arguments to pass by position while tracing.
        keywords: which ones to pass by name then.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]
    parameters: Parameters = field(compare=False)
    positional: int = field(compare=False)
    keywords: tuple[str, ...] = field(compare=False)

    @classmethod
    def of(
        cls, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[CallForm, list[torch.Tensor]]:
        """The form of one call, and its tensors in order."""
        parameters = Parameters.of(forward)
        leaves, spec = tree_flatten(parameters.canonical(args, kwargs))
        fixed = tuple(TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return cls(spec, fixed, parameters, len(args), tuple(kwargs)), tensors

    @classmethod
    def default(cls, forward: Callable[..., Any]) -> CallForm:
        """The form that a signature suggests: a tensor for every argument without a default, the others left out."""
        parameters = Parameters.of(forward)
        stand_in = torch.empty(0)
        args = tuple(stand_in for name in parameters.positional if name in parameters.required)
        by_name = {name: stand_in for name in parameters.required if name not in parameters.positional}
        return cls.of(forward, args, by_name)[0]

    @property
    def foreign(self) -> Any:
        """A value among the arguments that a graph cannot hold fixed, or None."""
        return next((v for v in self.leaves if v is not TENSOR and not isinstance(v, _PLAIN)), None)

    def call(self, forward: Callable[..., Any], tensors: Iterable[Any]) -> Any:
        """Calls ``forward`` with these tensors in their places."""
        given = iter(tensors)
        named, rest = tree_unflatten([next(given) if leaf is TENSOR else leaf for leaf in self.leaves], self.spec)
        args = [named[name] for name in self.parameters.positional[: self.positional]]
        return forward(*args, *rest, **{name: named[name] for name in self.keywords})

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """The tensors of a call of this form, in order; None if it is of another one."""
        leaves, spec = tree_flatten(self.parameters.canonical(args, kwargs))
        if spec != self.spec:
            return None
        tensors = []
        for leaf, expected in zip(leaves, self.leaves, strict=True):
            if expected is TENSOR:
                if not isinstance(leaf, torch.Tensor):
                    return None
                tensors.append(leaf)
            elif type(leaf) is not type(expected) or leaf != expected:
                return None
        return tensors


class _RegionTracer(_Tracer):
    """Traces one submodule's forward for one form of call, with the paths that it has in the model."""

    traced_func_name = "_fxmem_region"

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in self.names)]


class Holder(nn.Module):
    """Root of a tree in which a module has the path that it has in the model.

    Args:
        module: the module.
        path: its path; if that is empty, the holder has its children and tensors.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__()
        vars(self).update(module=module, path=path, call=module.forward)
        if not path:
            vars(self).update({name: vars(module)[name] for name in ("_modules", "_parameters", "_buffers")})
            return
        place: nn.Module = self
        *above, last = path.split(".")
        for name in above:
            place._modules[name] = nn.Module()
            place = place.get_submodule(name)
        place._modules[last] = module

    def at(self, path: str) -> nn.Module:
        """The module at a path of the model."""
        module: nn.Module = vars(self)["module"]
        return module if path == vars(self)["path"] else self.get_submodule(path)

    def _fxmem_region(self, *tensors: Any) -> Any:
        return vars(self)["call"](*tensors)


@dataclass(frozen=True)
class RegionCapture:
    """A captured submodule.

    Args:
        holder: root of the graph's paths, which are the model's.
        capture: its graph, whose placeholders are the tensors of ``form`` in order.
        form: the form of call that the graph holds for.
        inlined: the modules in the graph that were looked into, by path, the submodule itself left out.
        attributes: plain attributes that the traced code read, as (path, name, value).
    """

    holder: Holder
    capture: Capture
    form: CallForm
    inlined: Mapping[str, nn.Module]
    attributes: tuple[tuple[str, str, Any], ...]


def trace_region(module: nn.Module, path: str, form: CallForm) -> RegionCapture:
    """Captures one submodule by symbolic tracing.

    Args:
        module: the submodule.
        path: its path in the model.
        form: how it is called.

    Raises:
        CaptureError: the forward does what a graph cannot express, or what would be seen outside of it; says where.
    """
    kind = type(module).__name__
    if "forward" in vars(module):
        raise CaptureError("its forward was replaced on the instance, and tracing follows the class.", where=kind)
    if (foreign := form.foreign) is not None:
        raise CaptureError(f"it is called with an object of type {type(foreign).__name__}.", where=kind)
    count = sum(leaf is TENSOR for leaf in form.leaves)
    tracer = _RegionTracer([f"{path.replace('.', '_')}_input{i or ''}".lstrip("_") for i in range(count)])
    holder = Holder(module, path)

    vars(holder)["call"] = lambda *tensors: form.call(module.forward, tensors)
    with _recorded_reads(holder) as reads:
        capture = _run(tracer, holder, None)
    if capture.written:
        raise CaptureError(f"the forward sets {capture.written[0]} on every call, which others may read.", where=kind)
    if capture.constants:
        raise CaptureError("the forward makes tensors that do not depend on its input.", where=kind)
    try:
        compile(capture.graph.python_code("self").src, path, "exec")
    except SyntaxError as error:
        raise CaptureError(f"the graph's code is no Python: {error}.", where=kind) from error
    attributes = tuple((place, name, value) for (place, name), value in reads.items())
    return RegionCapture(holder, capture, form, tracer.inlined, attributes)


_STANDARD = frozenset(vars(nn.Module()))


@contextmanager
def _recorded_reads(model: nn.Module) -> Iterator[dict[tuple[str, str], Any]]:
    """Records the plain attributes that are read of the model's modules, by path and name, as they are then."""
    paths = _paths_of(model)
    seen: dict[tuple[str, str], Any] = {}

    def read(self: nn.Module, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name not in _STANDARD and not name.startswith("__") and id(self) in paths:
            own = object.__getattribute__(self, "__dict__")
            if name in own:
                seen.setdefault((paths[id(self)], name), snapshot(value))
        return value

    nn.Module.__getattribute__ = read  # type: ignore[method-assign,assignment]
    try:
        yield seen
    finally:
        del nn.Module.__getattribute__


def snapshot(value: Any) -> Any:
    """What to compare an attribute with later: a copy of a list, dict or set, anything else itself."""
    return value.copy() if type(value) in (list, dict, set) else value


def unchanged(old: Any, new: Any) -> bool:
    """Whether an attribute is still what its snapshot says: plain values and what lists hold by value, objects by identity."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, list | tuple):
        return len(old) == len(new) and all(map(unchanged, old, new))
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(unchanged(v, new[k]) for k, v in old.items())
    return isinstance(old, (*_PLAIN, set)) and bool(old == new)


@dataclass(frozen=True)
class _State:
    """A module's attributes, to find and undo what tracing its forward did to them."""

    module: nn.Module
    plain: dict[str, Any]
    nested: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, module: nn.Module) -> _State:
        plain = dict(vars(module))
        return cls(module, plain, {kind: dict(plain[kind]) for kind in ("_buffers", "_parameters") if kind in plain})

    def undo(self, path: str) -> list[str]:
        """Puts everything back and names what had changed."""
        changed = []
        for old, new in ((self.plain, vars(self.module)), *((v, vars(self.module)[k]) for k, v in self.nested.items())):
            for name in {*old, *new}:
                if old.get(name, _ABSENT) is not new.get(name, _ABSENT):
                    changed.append(f"{path}.{name}".removeprefix("."))
                    if name in old:
                        new[name] = old[name]
                    else:
                        del new[name]
        return sorted(changed)


_ABSENT = object()


def _tensors_of(model: nn.Module, name: str) -> set[str]:
    module = model.get_submodule(name.rpartition(".")[0])
    return {*module._buffers, *module._parameters}


def _name_placeholders(graph: fx.Graph, model: nn.Module) -> None:
    """Gives fixed arguments their own names back, and a check that speaks of them in place of fx's."""
    for name, node in zip(
        inspect.signature(model.forward).parameters, [n for n in graph.nodes if n.op == "placeholder"], strict=False
    ):
        if not str(node.target).startswith("*"):
            node.target = name
    for node in list(graph.nodes):
        fixed = node.op == "call_function" and node.target in (torch._assert, fx._symbolic_trace._assert_is_none)
        if not fixed or "has been specialized" not in str(node.args[1]):
            continue
        condition = node.args[0]
        placeholder, value = (condition, None) if condition.op == "placeholder" else condition.args
        with graph.inserting_before(node):
            check = graph.call_function(check_fixed, (placeholder, value, str(placeholder.target)))
        # Generated code that is traced again, as unpickling does, must not look into the function.
        check.meta["is_wrapped"] = True
        graph.erase_node(node)
        if condition is not placeholder:
            graph.erase_node(condition)


@fx.wrap
def check_fixed(value: Any, expected: Any, name: str) -> None:
    """Refuses another value of an argument than the one that the graph was captured with.

    Args:
        value: what was passed.
        expected: what the graph holds for: None, a bool or a str.
        name: the argument.

    Raises:
        ArgumentError: they differ.
    """
    if type(value) is not type(expected) or value != expected:
        what = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise ArgumentError(
            f"the graph was captured with {expected!r} here and cannot take {what}.",
            where=name,
            remedy=f"Pass {name} among the example inputs of fxmem.optimize.",
        )


def first_line(error: Exception) -> str:
    """Kind and first sentence of an error, for a message of ours."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].partition('. ')[0].rstrip('.')}" if text else type(error).__name__


def blame(error: BaseException, model: nn.Module) -> str:
    """``file:line (in function)`` of the innermost frame of user code."""
    user = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_USERS)]
    if not user:
        return type(model).__name__
    last = user[-1]
    return f"{last.filename}:{last.lineno} (in {last.name})"
