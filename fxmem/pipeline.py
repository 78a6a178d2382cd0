"""The passes in order, and the module that comes out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.graph_module import reduce_graph_module
from torch.utils._pytree import tree_unflatten

from fxmem.capture import CONSTANTS, Capture, first_line, has_hooks, trace
from fxmem.errors import ArgumentError, CaptureError, FxmemError
from fxmem.export import Interface
from fxmem.optim import Adapprox
from fxmem.passes import base
from fxmem.passes.base import tensors_of
from fxmem.passes.budget import fit
from fxmem.passes.fakes import Fakes
from fxmem.passes.grad_flow import grad_flow
from fxmem.passes.lifetimes import follow
from fxmem.passes.plan import choices, decide_by_observation, decide_by_structure, inner_choices, without_masks
from fxmem.passes.recompute import RECIPES, recompute
from fxmem.passes.saved_tensors import Observation, observe
from fxmem.passes.selective_save import check_metadata, selective_save
from fxmem.records import Decision, GradFlow, SavedTensors

_STANDARD = frozenset(vars(nn.Module()))


def share(module: nn.Module, memo: dict[int, nn.Module] | None = None) -> nn.Module:
    """A copy of the module tree that shares parameters, buffers and hooks with the original, but not the train/eval flags."""
    memo = {} if memo is None else memo
    if isinstance(module, torch.jit.ScriptModule):
        return module  # compiled already: it lives on the far side of Python, flags and all
    if id(module) not in memo:
        twin = object.__new__(type(module))
        twin.__dict__ = dict(vars(module))
        memo[id(module)] = twin
        twin.__dict__["_modules"] = {
            name: None if child is None else share(child, memo) for name, child in module._modules.items()
        }
    return memo[id(module)]


class OptimizedModule(fx.GraphModule):
    """A GraphModule that keeps only what backward needs.

    It has the parameters, buffers, hooks and state_dict keys of the model that it was made of, by identity, and train/eval
    flags of its own. ``decisions`` says what was done to each node and why; ``grad_flow`` holds the analysis; ``saved`` the
    tensors that eager and this module keep, when example inputs were given; ``optimizer`` the Adapprox that takes the place of
    the optimizer given to ``fxmem.optimize``.
    """

    decisions: tuple[Decision, ...]
    grad_flow: GradFlow
    saved: tuple[SavedTensors, SavedTensors] | None
    notes: tuple[str, ...]
    optimizer: Adapprox | None

    def __init__(
        self,
        source: nn.Module,
        given: Mapping[str, Any] | None = None,
        exported: tuple[Capture, Interface, nn.Module] | None = None,
    ) -> None:
        """Captures ``source`` and wraps the graph, with nothing rewritten yet.

        Args:
            source: the model.
            given: example inputs by name, which decide what optional arguments are fixed to.
            exported: what ``fxmem.export.export`` made of it, to be taken in place of a symbolic trace.
        """
        capture = trace(source, given) if exported is None else exported[0]
        root = share(source)
        _add_constants(root, capture)
        if exported is not None and (exported[2]._modules or exported[2]._buffers):
            root._modules[CONSTANTS] = exported[2]
        try:
            super().__init__(root, capture.graph, type(source).__name__)
        except SyntaxError as error:
            raise CaptureError(
                f"the graph's code is no Python: {error}.",
                where=type(source).__name__,
                remedy="Rename submodules and parameters that have line breaks in their names.",
            ) from error
        self._adopt(vars(root))
        self.__dict__.update(
            _source=source,
            # What trace needs of the example inputs: their names, and the values that it fixes.
            _interface=None if exported is None else exported[1],
            _given=given and {k: v if v is None or isinstance(v, bool | str) else ... for k, v in given.items()},
            decisions=(),
            saved=None,
            notes=(),
            optimizer=None,
        )
        self._set_graph(capture)

    def _adopt(self, state: Mapping[str, Any]) -> None:
        """Takes over a module's children, tensors, hooks, flags and plain attributes."""
        for name, value in state.items():
            if name in _STANDARD or (name not in self.__dict__ and name != "forward"):
                self.__dict__[name] = value

    def _set_graph(self, capture: Capture) -> None:
        self.__dict__["_modes"] = dict(capture.modes)
        self.__dict__["_inlined"] = capture.inlined
        self.__dict__["_opaque"] = dict(capture.opaque)
        self.__dict__["notes"] = tuple(f"the forward sets {name} on every call; the graph does not" for name in capture.written)
        self.graph = capture.graph

    def source(self) -> nn.Module:
        """The model that this module was made of.

        Raises:
            CaptureError: a submodule was replaced since, so it no longer is.
        """
        self._check_unchanged()
        source: nn.Module = self.__dict__["_source"]
        return source

    def copy_flags(self, other: nn.Module) -> None:
        """Takes over the train/eval flags of a module of the same hierarchy."""
        theirs = dict(other.named_modules(remove_duplicate=False))
        for path, module in self.named_modules(remove_duplicate=False):
            if path in theirs:
                module.training = theirs[path].training

    # Everything below this line keeps the module true to its model while flags change and copies are made.

    def recompile(self) -> Any:
        """Generates the code of the graph; what the traced code took for granted is checked first."""
        outer = type(self)
        # Torch generates into the class of its own that every GraphModule has; fully_shard puts a subclass over that.
        cls: Any = next(c for c in outer.__mro__ if OptimizedModule in c.__bases__)
        self.__class__ = cls
        try:
            code = super().recompile()
        finally:
            self.__class__ = outer
        generated = cls.forward
        if self.__dict__.get("_interface") is not None:

            def call(self: OptimizedModule, *args: Any, **kwargs: Any) -> Any:
                interface: Interface = self.__dict__["_interface"]
                self._check_modes({path: self.get_submodule(path).training for path in self.__dict__["_modes"]})
                return tree_unflatten(generated(self, *interface.inputs(args, kwargs)), interface.out)

            cls.forward = call
        elif self.__dict__.get("_modes") or self.__dict__.get("_inlined"):

            def forward(self: OptimizedModule, *args: Any, **kwargs: Any) -> Any:
                if self._stale():
                    self._respecialize()
                    return type(self).forward(self, *args, **kwargs)
                return generated(self, *args, **kwargs)

            cls.forward = forward
        return code

    def train(self, mode: bool = True) -> OptimizedModule:
        """Sets the train/eval flags.

        Raises:
            CaptureError: the graph was exported and holds for the other mode alone.
        """
        if self.__dict__.get("_interface") is not None:
            self._check_modes(dict.fromkeys(self.__dict__["_modes"], mode))
        return super().train(mode)

    def _check_modes(self, now: Mapping[str, bool]) -> None:
        modes: dict[str, bool] = self.__dict__["_modes"]
        wrong = [(path, mode) for path, mode in modes.items() if now[path] != mode]
        if not wrong:
            return
        path, mode = wrong[0]
        raise CaptureError(
            f"torch.export fixed this module to {'train' if mode else 'eval'} mode, and the graph does not hold for the other.",
            where=path or self._get_name(),
            remedy="Optimize the model once in each mode, which share parameters and buffers, or with capture='regions', "
            "which follows train() and eval().",
        )

    def _stale(self) -> bool:
        modes: dict[str, bool] = self.__dict__["_modes"]
        return any(self.get_submodule(path).training != mode for path, mode in modes.items()) or any(
            has_hooks(self.get_submodule(path)) for path in self.__dict__["_inlined"]
        )

    def _respecialize(self) -> None:
        """Captures the model again under the flags and hooks as they are now, and rewrites it from structure.

        A module that was given hooks since (by the user, or by ``fully_shard``) is called as a whole from then on.
        """
        source = self.source()
        with _flags_of(self, source):
            capture = trace(source, self.__dict__["_given"])
        _add_constants(self, capture)
        recipes = self._modules.pop(RECIPES, None)
        self._set_graph(capture)
        rewrite(self, None)
        if recipes is not None:
            note = (
                "flags or hooks changed after optimize, so everything goes by the policy 'exact' until optimize is called again"
            )
            self.__dict__["notes"] = (*self.notes, note)

    def _check_unchanged(self) -> None:
        source: Any = self._source
        theirs = dict(source.named_modules(remove_duplicate=False))
        for path, module in self.named_modules(remove_duplicate=False):
            if path.startswith((CONSTANTS, RECIPES)):
                continue
            if path not in theirs or (path and theirs[path]._parameters is not module._parameters):
                raise CaptureError(
                    "this module was replaced after optimize, so the model cannot be captured again.",
                    where=path,
                    remedy="Replace it in the original model and optimize that.",
                )

    def _deepcopy_init(self) -> Any:
        return OptimizedModule._restore

    def _restore(self, body: nn.Module, graph: fx.Graph) -> None:
        """Second half of copying and unpickling: an instance from a full set of attributes and a graph."""
        fx.GraphModule.__init__(self, body, graph, vars(body).get("_graphmodule_cls_name", "GraphModule"))
        self._adopt(vars(body))
        self.recompile()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.__dict__["_interface"] is not None:
            raise CaptureError(
                "an exported graph cannot be pickled: reading it back would run what does not depend on an input.",
                where=self._get_name(),
                remedy="Save the state_dict and optimize again, or use capture='regions', whose result can be pickled.",
            )
        rebuild, (body, imports) = super().__reduce__()
        del rebuild
        return _unpickle, (body, imports)


def _unpickle(body: dict[str, Any], imports: str) -> OptimizedModule:
    graph: Any = reduce_graph_module(dict(body), imports).graph
    holder = nn.Module()
    holder.__dict__.update(body)
    module = OptimizedModule.__new__(OptimizedModule)
    module._restore(holder, graph)
    return module


def _add_constants(root: nn.Module, capture: Capture) -> None:
    if capture.constants:
        holder = nn.Module()
        for name, value in capture.constants.items():
            holder.register_buffer(name, value, persistent=False)
        root._modules[CONSTANTS] = holder


@contextmanager
def _flags_of(module: nn.Module, source: nn.Module) -> Iterator[None]:
    """``source`` with the train/eval flags of ``module``, for a while."""
    theirs = dict(source.named_modules(remove_duplicate=False))
    old = {path: m.training for path, m in theirs.items()}
    for path, m in module.named_modules(remove_duplicate=False):
        if path in theirs:
            theirs[path].training = m.training
    try:
        yield
    finally:
        for path, flag in old.items():
            theirs[path].training = flag


def rewrite(
    gm: OptimizedModule,
    inputs: Mapping[str, Any] | None,
    fakes: Callable[[], Fakes | None] = lambda: None,
    policy: str = "exact",
    budget: int | float | None = None,
    call: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {}),
) -> tuple[Observation, Observation] | None:
    """Runs analysis, plan and rewrite over a freshly captured module.

    Args:
        gm: the module; its graph is rewritten in place.
        inputs: example inputs by placeholder, real or fake; None to go by structure alone.
        fakes: makes what each observation runs on; fake tensors on the devices of the real ones by default.
        policy: ``"exact"`` or, with example inputs, ``"recompute"``.
        budget: most bytes alive at once, or a fraction of eager's peak.
        call: the example inputs as the model is called with them, for a budget.

    Returns:
        What was observed before and after, or None where structure alone decided.

    Raises:
        ArgumentError: the example inputs do not run through the model.
        RewriteError: the rewritten graph failed its checks.
    """
    graph = gm.graph
    flow = grad_flow(gm, graph, None if inputs is None else _input_flags(inputs))
    found = choices(gm, graph, flow)
    stock = None if inputs is None else _observe_stock(gm, graph, inputs, fakes)
    seen = None
    again: list[Decision] = []
    listed, inner = inner_choices(gm, graph, flow)
    selective_save(gm, listed, inner, [c.verdict for c in inner])
    if stock is None or inputs is None:
        verdicts = decide_by_structure(gm, found, flow)
        selective_save(gm, graph, found, verdicts)
    else:
        plain = without_masks(found)
        selective_save(gm, graph, found, plain)
        verdicts = decide_by_observation(found, observe(gm, graph, inputs, fakes()).saved)
        selective_save(gm, graph, found, verdicts)
        if budget is not None:
            graph, again = _fit(gm, graph, inputs, fakes, budget, call)
        elif policy == "recompute":
            again = recompute(gm, graph, inputs, fakes)
        final = observe(gm, graph, inputs, fakes())
        check_metadata(stock.metadata, final.metadata)
        seen = (stock, final)
    opaque: Any = gm._opaque
    refused = tuple(
        Decision(node.name, str(node.target), "module", False, opaque[str(node.target)], None, base.source_of(node))
        for node in graph.nodes
        if node.op == "call_module" and str(node.target) in opaque
    )
    gm.__dict__.update(
        decisions=(
            *(c.decision(v) for c, v in zip(found, verdicts, strict=True)),
            *(c.decision(c.verdict) for c in inner),
            *again,
            *refused,
        ),
        grad_flow=flow,
        saved=seen and (seen[0].saved, seen[1].saved),
    )
    gm.recompile()
    return seen


def _fit(
    gm: OptimizedModule,
    graph: fx.Graph,
    inputs: Mapping[str, Any],
    fakes: Callable[[], Fakes | None],
    budget: int | float,
    call: tuple[tuple[Any, ...], Mapping[str, Any]],
) -> tuple[fx.Graph, list[Decision]]:
    """The graph that fits a budget; its decisions, and a note of the plan."""
    if isinstance(budget, float):
        given = (*tensors_of(inputs), *gm.parameters(), *gm.buffers())
        source = gm.source()
        with _flags_of(gm, source):
            peak = follow(source, *call, fakes() or Fakes(given)).footprint.peak
        budget = int(budget * (peak or 0))
    outcome = fit(gm, graph, inputs, fakes, budget, call)
    gm._modules.pop(RECIPES, None)
    if outcome.recipes is not None:
        gm._modules[RECIPES] = outcome.recipes
    gm.graph = outcome.graph
    note = f"budget of {budget} bytes: a peak of {outcome.peak} is planned, at {outcome.extra:.1%} more work, by estimate"
    gm.__dict__["notes"] = (*gm.notes, note)
    return gm.graph, outcome.decisions


def _observe_stock(
    gm: OptimizedModule, graph: fx.Graph, inputs: Mapping[str, Any], fakes: Callable[[], Fakes | None]
) -> Observation | None:
    try:
        return observe(gm, graph, inputs, fakes())
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        name = getattr(error, "func", error)
        gm.__dict__["notes"] = (
            *gm.notes,
            f"{name} depends on the data, so bytes are unknown ahead of a run: the rewrite went by structure alone",
        )
        return None
    except FxmemError:
        raise
    except Exception as error:
        raise does_not_run(error) from error


def does_not_run(error: Exception) -> ArgumentError:
    """What to raise where a model fails on its example inputs."""
    return ArgumentError(
        f"the model does not run on these example inputs: {first_line(error)}.",
        where="example_args",
        remedy="Pass inputs that model(*example_args, **example_kwargs) accepts.",
    )


def _input_flags(inputs: Mapping[str, Any]) -> dict[str, bool]:
    return {name: any(t.requires_grad for t in base.tensors_of(value)) for name, value in inputs.items()}


def placeholders(
    gm: OptimizedModule, bound: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of one call by the graph's placeholders.

    Args:
        gm: the module.
        bound: the arguments by the names of the model's forward.
        args: the same by position.
        kwargs: and by name.
    """
    targets = [str(node.target) for node in gm.graph.nodes if node.op == "placeholder"]
    interface: Interface | None = vars(gm)["_interface"]
    if interface is not None:
        return dict(zip(targets, interface.inputs(args, kwargs), strict=True))
    return {target: bound[target.lstrip("*")] for target in targets if target.lstrip("*") in bound}
