"""Lifetimes: what is alive at every step of forward and backward, on fake tensors.

The model itself runs, not a graph of it, so it need not be capturable: a dispatch mode sees every storage that an op makes and,
through a finalizer, when it dies; hooks on autograd tell what is kept, and for which call. Requires a model and inputs; changes
nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fxmem.passes.base import loss_or_outputs, storages_of, tensors_of
from fxmem.passes.faithful import faithful
from fxmem.passes.fakes import Fakes
from fxmem.passes.saved_tensors import fresh_functions, saved_as, saved_numbers
from fxmem.passes.walk import walk
from fxmem.passes.workspace import workspace
from fxmem.records import Footprint, Kind, SavedTensor, SavedTensors, Step

_NOT_USERS = tuple(
    str(Path(str(sys.modules[name].__file__)).parent) + "/" for name in ("torch", "fxmem.records", "fxmem.passes.base")
)
_MOST_STEPS = 2000


@dataclass
class Call:
    """One call that a forward makes of torch: of one of its layers, or of one of its functions.

    Args:
        name: unique in the run.
        module: path of the innermost module that the call is in or of, empty at the top.
        op: class of the layer or name of the function.
        source: file and line in the user's code, where known.
        shape: shape of the first tensor that it returns.
        dtype: its dtype, without the ``torch.`` prefix.
        saves: what autograd keeps here, of ``"input"``, ``"output"`` and ``"own"``.
    """

    name: str
    module: str
    op: str
    source: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    saves: tuple[str, ...] = ()
    operands: set[int] = field(default_factory=set, repr=False)
    packed: list[int] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Lifetimes:
    """What one forward and backward pass showed.

    Args:
        footprint: the bytes.
        saved: what each call keeps; ``node`` is the name of the call.
        calls: the calls, in order.
        hidden: bytes kept that autograd shows to nobody.
    """

    footprint: Footprint
    saved: SavedTensors
    calls: tuple[Call, ...]
    hidden: int


def follow(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fakes: Fakes,
    *,
    backward: bool = True,
    trail: list[Call] | None = None,
) -> Lifetimes:
    """Runs forward and backward and records what lives when.

    Args:
        model: any module; its hooks run.
        args: positional inputs, real or fake.
        kwargs: keyword inputs.
        fakes: makes the tensors that it runs on.
        backward: whether to run backward too; without it there is no peak.
        trail: takes the calls as they are made, so that whoever catches an error knows where.
    """
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    state = {name: fakes(t) for name, t in named}
    kinds: dict[int, Kind] = {id(fakes(t)): "parameter" if isinstance(t, nn.Parameter) else "buffer" for _, t in named}
    args, kwargs = tree_map_only(Tensor, fakes, (tuple(args), dict(kwargs)))
    inputs = list(tensors_of((args, kwargs)))
    leaves = [t for t in {id(t): t for t in (*inputs, *state.values())}.values() if t.requires_grad and t.is_leaf]
    live = _Live([*state.values(), *inputs])
    calls = _Calls(model, live, list(state.values()), trail)
    gradients: list[Tensor] = []
    with ExitStack() as stack:
        if fakes.mode is not None:
            stack.enter_context(fakes.mode)
            stack.enter_context(faithful())
        stack.enter_context(_reparametrize_module(model, state, stack_weights=True))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        with calls.modules(), torch.autograd.graph.saved_tensors_hooks(calls.pack, lambda t: t), live, calls:
            live.enter("forward", calls.where)
            torch.clear_autocast_cache()
            output = model(*args, **kwargs)
            torch.clear_autocast_cache()
            live.leave()
        outputs = list(tensors_of(output))
        held = sum(live.counted.get(serial, 0) for serial in {s for t in outputs for s in live.serials(t)})
        by_serial: dict[int, Kind] = {s: "output" for t in outputs for s in live.serials(t)}
        by_serial |= {s: "input" for t in inputs for s in live.serials(t)}
        by_serial |= {s: kinds[id(t)] for t in state.values() for s in live.serials(t)}
        saved = calls.saved(by_serial)
        shown = {t.storage for t in saved.tensors if t.kind == "activation"}
        hidden = live.total - held - sum(live.counted.get(serial, 0) for serial in shown)
        ends = [t for t in loss_or_outputs(output) if t.requires_grad]
        ran = bool(backward and ends)
        if ran:
            cotangents = [torch.empty_like(t) for t in ends]
            for cotangent in cotangents:
                live.know(cotangent)
            live.enter("backward", calls.where_in_backward)
            with live:
                if any(t.device.type == "cuda" for t in ends) and not torch.cuda.is_available():
                    # Whoever holds an output holds its graph.
                    roots = [t.grad_fn for t in ends]
                    outputs = [t.detach() for t in outputs]
                    del output, ends
                    gradients = walk(roots, cotangents, calls.visit)
                else:
                    torch.autograd.backward(ends, cotangents)
                    gradients = [t.grad for t in leaves if t.grad is not None]
            live.leave()
        made = sum({s._cdata: s.nbytes() for t in gradients for s in storages_of(t)}.values())
    for t in leaves:
        t.grad = None
    peak, steps = (live.peak, _fewer(live.steps)) if backward and ran else (None, ())
    return Lifetimes(Footprint(saved.kept + hidden, peak, held, made, steps), saved, tuple(calls.calls), hidden)


def _fewer(steps: list[Step]) -> tuple[Step, ...]:
    """At most ``_MOST_STEPS`` of the steps: of neighbours the highest."""
    size = -(-len(steps) // _MOST_STEPS) or 1
    return tuple(max(steps[i : i + size], key=lambda s: s.live) for i in range(0, len(steps), size))


class _Live(TorchDispatchMode):
    """Counts the bytes of the storages that ops make, from their first sight to their death."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.total = self.peak = 0
        self.steps: list[Step] = []
        self.counted: dict[int, int] = {}
        self._serials: dict[int, int] = {}
        self._watched: dict[int, Any] = {}
        self._next = 0
        self._phase: Literal["forward", "backward"] = "forward"
        self._where: Callable[[], tuple[str, str]] = lambda: ("", "")
        self._here: tuple[str, str] | None = None
        self._high = 0
        for tensor in known:
            self.know(tensor)

    def enter(self, phase: Literal["forward", "backward"], where: Callable[[], tuple[str, str]]) -> None:
        """Begins a phase, whose steps ``where`` names."""
        self._phase, self._where, self._here = phase, where, None

    def leave(self) -> None:
        """Ends the last step."""
        if self._here is not None:
            self.steps.append(Step(self._phase, *self._here, self._high))
        self._here = None

    def know(self, tensor: Tensor) -> None:
        """Takes note of a storage that does not count."""
        for storage in storages_of(tensor):
            self._register(storage, 0)

    def serials(self, tensor: Tensor) -> list[int]:
        """Numbers of the tensor's storages, their own for as long as the run lasts."""
        self.know(tensor)
        return [self._serials[storage._cdata] for storage in storages_of(tensor)]

    def alive(self) -> set[int]:
        """Numbers of the storages that live."""
        return set(self._serials.values())

    def _register(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = storage._cdata
        if key in self._serials:
            return
        self._next += 1
        self._serials[key] = self._next
        if nbytes:
            self.counted[self._next] = nbytes
            self.total += nbytes
        self._watched[key] = weakref.ref(storage, lambda _: self._die(key))

    def _die(self, key: int) -> None:
        del self._watched[key]
        self.total -= self.counted.pop(self._serials.pop(key), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        where = self._where()
        if where != self._here:
            self.leave()
            self._here, self._high = where, self.total
        before = self.total
        result = func(*args, **(kwargs or {}))
        made = list(tensors_of(result))
        for tensor in made:
            for storage in storages_of(tensor):
                self._register(storage, storage.nbytes())
        high = max(self.total, before + workspace(func, args, made))
        self._high = max(self._high, high)
        self.peak = max(self.peak, high)
        return result


# Reads of a tensor's properties, which make and keep nothing.
_PROPERTIES = frozenset(["__get__", "size", "dim", "stride", "numel", "is_floating_point", "is_complex", "data_ptr"])


class _Calls(TorchFunctionMode):
    """Knows at any time which call of the model is running, and collects what autograd keeps for each."""

    def __init__(self, model: nn.Module, live: _Live, state: list[Tensor], trail: list[Call] | None) -> None:
        super().__init__()
        self.calls: list[Call] = [] if trail is None else trail
        self._live = live
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._state = {s for t in state for s in live.serials(t)}
        self._modules: list[tuple[str, str, Call | None]] = []
        self._current: Call | None = None
        self._names: dict[str, int] = {}
        self._packed: list[SavedTensor] = []
        self._numbers: list[Tensor] = []
        self._makers: dict[int, Call] = {}
        self._node: Any = None

    @contextmanager
    def modules(self) -> Iterator[None]:
        """While it lasts, calls of modules are seen."""
        before = global_hooks.register_module_forward_pre_hook(self._enter_module)
        after = global_hooks.register_module_forward_hook(self._leave_module, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def where(self) -> tuple[str, str]:
        """Module path and op of the call that is running."""
        if self._current is not None:
            return self._current.module, self._current.op
        path, kind, _ = self._modules[-1] if self._modules else ("", "", None)
        return path, kind

    def where_in_backward(self) -> tuple[str, str]:
        """Module path and op of the call whose backward is running."""
        node: Any = torch._C._current_autograd_node() or self._node
        call = None if node is None else self._makers.get(node._sequence_nr())
        return (call.module, call.op) if call else ("", "gradients")

    def visit(self, node: Any) -> None:
        """Says which node of autograd's graph runs, where the engine does not."""
        self._node = node

    def pack(self, tensor: Tensor) -> Tensor:
        """Hook on autograd: takes note of one kept tensor."""
        call = self._current
        if call is None:
            path, kind, _ = self._modules[-1] if self._modules else ("", "forward", None)
            call = self._current = self._open(path, kind, ())
        with torch._C.DisableTorchFunction():
            tensor = tensor.detach()
        self._record(call, tensor)
        return tensor

    def saved(self, kinds: Mapping[int, Kind]) -> SavedTensors:
        """What is kept now.

        Args:
            kinds: what storages are, by number, those that are no activations.
        """
        alive = self._live.alive()
        return SavedTensors(
            tuple(replace(t, kind=kinds.get(t.storage, "activation")) for t in self._packed if t.storage in alive)
        )

    def _record(self, call: Call, tensor: Tensor) -> None:
        # Numbers and words alone: a tensor that is held here would not die.
        shape, dtype = tuple(tensor.shape), _name(tensor.dtype)
        for serial, storage in zip(self._live.serials(tensor), storages_of(tensor), strict=True):
            call.packed.append(serial)
            self._packed.append(
                SavedTensor(call.name, call.module, call.op, shape, dtype, serial, storage.nbytes(), "activation")
            )

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        path, kind = self._paths.get(id(module), ""), type(module).__name__
        origin = type(module).__module__
        leaf = origin.startswith(("torch.nn.modules.", "fxmem.ops.")) and not module._modules
        call = None
        if self._leaf() is None and leaf:
            call = self._open(path, kind.removeprefix("Selective"), args)
        self._current = call or self._leaf()
        self._modules.append((path, kind, call))

    def _leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        _, _, call = self._modules.pop()
        if call is not None:
            self._close(call, result)
        self._current = self._leaf()

    def _leaf(self) -> Call | None:
        return self._modules[-1][2] if self._modules else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._leaf() is not None or name in _PROPERTIES:
            return func(*args, **kwargs)
        path = self._modules[-1][0] if self._modules else ""
        call = self._open(path, name.strip("_").removesuffix(".default"), (args, kwargs))
        self._current = call
        try:
            result = func(*args, **kwargs)
        finally:
            self._current = None
        self._close(call, result)
        return result

    def _hooked(self) -> bool:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return hooks is not None and hooks[0] == self.pack

    def _open(self, path: str, op: str, operands: Any) -> Call:
        name = f"{path}.{op}" if path else op
        count = self._names[name] = self._names.get(name, 0) + 1
        call = Call(name if count == 1 else f"{name}#{count}", path, op, _source())
        call.operands = {s for t in tensors_of(operands) for s in self._live.serials(t)}
        self.calls.append(call)
        return call

    def _close(self, call: Call, result: Any) -> None:
        with torch._C.DisableTorchFunction():
            tensors = list(tensors_of(result))
            for function in fresh_functions(tensors, self._makers):
                self._makers[function._sequence_nr()] = call
                # Under hooks of somebody else, such as a checkpoint's, to look at what is saved would make it anew.
                for number in saved_numbers(function) if self._hooked() else ():
                    self._numbers.append(number)
                    self._record(call, number)
            if tensors:
                call.shape, call.dtype = tuple(tensors[0].shape), _name(tensors[0].dtype)
            if call.packed:
                results = {s for t in tensors for s in self._live.serials(t)}
                words = [saved_as(s, call.operands, results) for s in call.packed if s not in self._state]
                call.saves = tuple(dict.fromkeys(words))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _source() -> str | None:
    """``file:line`` of the innermost frame that is the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_NOT_USERS, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None
