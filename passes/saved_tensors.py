"""Analysis by observation: what each node asks autograd to keep.

The graph runs on fake tensors inside ``torch.autograd.graph.saved_tensors_hooks``, so no memory is used and no table of what
torch saves is written by hand. Requires a graph and inputs; changes nothing.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map_only

from fxmem.capture import HOOKS
from fxmem.ops.recipe import unseen
from fxmem.passes.base import module_path, op_name, tensors_of
from fxmem.passes.faithful import faithful
from fxmem.passes.fakes import Fakes
from fxmem.records import Kind, SavedTensor, SavedTensors


class PlainInterpreter(fx.Interpreter):
    """Runs a graph as generated code would: with fresh lists, which a callee may change, where the graph's are immutable."""

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        """The arguments of ``n``."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return _mutable(args), _mutable(kwargs)


class Recorder(PlainInterpreter):
    """Runs the graph node by node, so that every packed tensor is known to be the current node's."""

    def __init__(self, gm: nn.Module, graph: fx.Graph, state: set[int]) -> None:
        super().__init__(gm, graph=graph, garbage_collect_values=True)
        self.state = state
        self.packed: list[tuple[fx.Node, Tensor]] = []
        self.outputs: dict[str, tuple[Any, ...]] = {}
        self.current: fx.Node | None = None
        self.walked: dict[int, Any] = {}
        self.saves: dict[str, tuple[str, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Runs ``n`` and notes what it keeps."""
        self.current = n
        start = len(self.packed)
        args = super().fetch_args_kwargs_from_env(n)
        result = super().run_node(n)
        for function in fresh_functions(tensors_of(result), self.walked):
            self.walked[function._sequence_nr()] = n
            self.packed += [(n, number) for number in saved_numbers(function)]
        self.outputs[n.name] = tuple((tuple(t.shape), t.dtype, tuple(t.stride()), t.device.type) for t in tensors_of(result))
        if len(self.packed) > start:
            operands, results = ({storage_of(t) for t in tensors_of(value)} for value in (args, result))
            self.saves[n.name] = tuple(
                dict.fromkeys(
                    saved_as(storage_of(t), operands, results)
                    for _, t in self.packed[start:]
                    if storage_of(t) not in self.state
                )
            )
        return result

    def pack(self, tensor: Tensor) -> Tensor:
        """Hook on autograd: takes note of one kept tensor."""
        assert self.current is not None
        # A saved output that is packed as itself would hold its own graph alive for ever.
        tensor = tensor.detach()
        self.packed.append((self.current, tensor))
        return tensor


def _mutable(value: Any) -> Any:
    if type(value) in (list, immutable_list):
        return [_mutable(v) for v in value]
    if type(value) in (dict, immutable_dict):
        return {k: _mutable(v) for k, v in value.items()}
    return tuple(_mutable(v) for v in value) if type(value) is tuple else value


def saved_as(storage: int, operands: set[int], results: set[int]) -> str:
    """What a kept storage is to the call that keeps it: ``"input"``, ``"output"`` or ``"own"``."""
    return "input" if storage in operands else "output" if storage in results else "own"


def fresh_functions(tensors: Iterable[Tensor], known: Mapping[int, Any]) -> Iterator[Any]:
    """The nodes of autograd's graph behind ``tensors`` whose sequence numbers are not ``known``; the caller adds them."""
    stack = [t.grad_fn for t in tensors]
    while stack:
        function = stack.pop()
        # Leaves have no number of their own, and keep nothing.
        if function is None or type(function).__name__ == "AccumulateGrad" or function._sequence_nr() in known:
            continue
        stack.extend(following for following, _ in function.next_functions)
        yield function


def saved_numbers(function: Any) -> Iterator[Tensor]:
    """The Python numbers that a node keeps as tensors of no dimension; autograd shows them to no hook."""
    for name in _saved_attributes(cast(Hashable, type(function))):
        with unseen():
            value = getattr(function, name)
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.dim() == 0:
            yield value


@functools.cache
def _saved_attributes(kind: Hashable) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


@contextmanager
def hooks_off(gm: nn.Module) -> Iterator[None]:
    """Modules without the user's hooks, which must not meet fake tensors; those that make torch's normalized weights stay."""
    old: list[tuple[nn.Module, str, Any]] = []
    for module in gm.modules():
        for kind in HOOKS:
            hooks = vars(module).get(kind)
            if hooks:
                own = ((key, hook) for key, hook in hooks.items() if type(hook).__module__.startswith("torch.nn.utils."))
                old.append((module, kind, hooks))
                vars(module)[kind] = OrderedDict(own)
    try:
        yield
    finally:
        for module, kind, hooks in old:
            vars(module)[kind] = hooks


@dataclass(frozen=True)
class Observation:
    """What one run on fake tensors showed.

    Args:
        saved: the tensors kept, node by node.
        metadata: for each node, (shape, dtype, stride, device) of every tensor in its value.
        saves: for each node that keeps something, what of it: ``"input"``, ``"output"``, ``"own"``.
    """

    saved: SavedTensors
    metadata: Mapping[str, tuple[Any, ...]]
    saves: Mapping[str, tuple[str, ...]]


def record(
    gm: nn.Module, graph: fx.Graph, inputs: Mapping[str, Any], fakes: Fakes | None, kind: type[Recorder]
) -> tuple[Recorder, dict[int, Kind]]:
    """Runs ``graph`` on fake tensors and notes what happens.

    Args:
        gm: the module that holds the graph's parameters and submodules; its tensors may be of any device.
        graph: the graph.
        inputs: by placeholder name, real or fake tensors, with requires_grad as it will be, and other values.
        fakes: makes the tensors that it runs on; by default fake ones on the devices of the real ones.
        kind: who takes note.

    Returns:
        The recorder, and what storages that are not activations are.
    """
    fake = fakes or Fakes((*tensors_of(inputs), *gm.parameters(), *gm.buffers()))
    state = {
        name: fake(t) for name, t in (*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False))
    }
    fake_inputs = {name: tree_map_only(Tensor, fake, value) for name, value in inputs.items()}
    recorder = kind(gm, graph, {storage_of(t) for t in state.values()})
    args = [
        fake_inputs[str(n.target)] if str(n.target) in fake_inputs else _default(n)
        for n in graph.nodes
        if n.op == "placeholder"
    ]
    with (
        fake.mode or nullcontext(),
        faithful(),
        hooks_off(gm),
        torch.enable_grad(),
        # A module under two names is swapped twice: only the reverse order brings the real tensors back.
        _reparametrize_module(gm, state, stack_weights=True),
        torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda t: t),
        torch.random.fork_rng(devices=[]),
    ):
        output = recorder.run(*args, enable_io_processing=False)
    kinds: dict[int, Kind] = {}
    parameters = {id(p) for p in gm.parameters()}
    for tensor in tensors_of(output):
        kinds[storage_of(tensor)] = "output"
    for value in fake_inputs.values():
        for tensor in tensors_of(value):
            kinds[storage_of(tensor)] = "input"
    for real in (*gm.buffers(), *gm.parameters()):
        kinds[storage_of(fake(real))] = "parameter" if id(real) in parameters else "buffer"
    return recorder, kinds


def observe(gm: nn.Module, graph: fx.Graph, inputs: Mapping[str, Any], fakes: Fakes | None = None) -> Observation:
    """Runs ``graph`` on fake tensors and records what each node keeps for backward.

    Args:
        gm: the module that holds the graph's parameters and submodules; its tensors may be of any device.
        graph: the graph.
        inputs: by placeholder name, real or fake tensors, with requires_grad as it will be, and other values.
        fakes: makes the tensors that it runs on; by default fake ones on the devices of the real ones.
    """
    recorder, kinds = record(gm, graph, inputs, fakes, Recorder)
    numbers: dict[int, int] = {}
    saved = []
    for node, tensor in recorder.packed:
        key = storage_of(tensor)
        saved.append(
            SavedTensor(
                node=node.name,
                module=module_path(node),
                op=op_name(gm, node),
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                storage=numbers.setdefault(key, len(numbers)),
                nbytes=tensor.untyped_storage().nbytes(),
                kind=kinds.get(key, "activation"),
            )
        )
    # Autograd's graph holds the hook and the hook this recorder, which must not hold the graph: no collector would see it.
    recorder.env.clear()
    return Observation(SavedTensors(tuple(saved)), recorder.outputs, recorder.saves)


def storage_of(tensor: Tensor) -> int:
    """A number of the tensor's storage, its own for as long as it lives."""
    return tensor.untyped_storage()._cdata


def _default(node: fx.Node) -> Any:
    return node.args[0] if node.args else None
