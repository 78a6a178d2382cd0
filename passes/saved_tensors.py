"""Analysis by observation: what each node asks autograd to keep.

The graph runs on fake tensors inside ``torch.autograd.graph.saved_tensors_hooks``, so no memory is used and no table of what
torch saves is written by hand. Requires a graph and inputs; changes nothing.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map_only

from fxmem.passes.base import module_path, op_name, tensors_of
from fxmem.records import Kind, SavedTensor, SavedTensors


class _Recorder(fx.Interpreter):
    """Runs the graph node by node, so that every packed tensor is known to be the current node's."""

    def __init__(self, gm: nn.Module, graph: fx.Graph) -> None:
        super().__init__(gm, graph=graph, garbage_collect_values=True)
        self.packed: list[tuple[fx.Node, Tensor]] = []
        self.outputs: dict[str, tuple[Any, ...]] = {}
        self.current: fx.Node | None = None
        self.walked: set[Any] = set()

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        # Generated code passes fresh lists, which a callee may change; the graph's own are immutable.
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return _mutable(args), _mutable(kwargs)

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        result = super().run_node(n)
        self._collect_numbers(result)
        self.outputs[n.name] = tuple((tuple(t.shape), t.dtype, tuple(t.stride()), t.device.type) for t in tensors_of(result))
        return result

    def _collect_numbers(self, result: Any) -> None:
        """Records the Python numbers that autograd keeps as tensors of no dimension; it shows them to no hook."""
        stack = [t.grad_fn for t in tensors_of(result)]
        while stack:
            function = stack.pop()
            if function is None or function in self.walked:
                continue
            self.walked.add(function)
            stack.extend(following for following, _ in function.next_functions)
            for name in _saved_attributes(type(function)):
                value = getattr(function, name)
                if isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.dim() == 0:
                    assert self.current is not None
                    self.packed.append((self.current, value))

    def pack(self, tensor: Tensor) -> Tensor:
        assert self.current is not None
        # A saved output that is packed as itself would hold its own graph alive for ever.
        tensor = tensor.detach()
        self.packed.append((self.current, tensor))
        return tensor


def _mutable(value: Any) -> Any:
    if isinstance(value, list):
        return [_mutable(v) for v in value]
    if isinstance(value, dict):
        return {k: _mutable(v) for k, v in value.items()}
    return tuple(_mutable(v) for v in value) if type(value) is tuple else value


@functools.cache
def _saved_attributes(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


@contextmanager
def _hooks_off(gm: nn.Module) -> Iterator[None]:
    """Modules without the user's hooks, which must not meet fake tensors; those that make torch's normalized weights stay."""
    old: list[tuple[nn.Module, str, Any]] = []
    for module in gm.modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
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
    """

    saved: SavedTensors
    metadata: Mapping[str, tuple[Any, ...]]


def observe(gm: nn.Module, graph: fx.Graph, inputs: Mapping[str, Any]) -> Observation:
    """Runs ``graph`` on fake tensors and records what each node keeps for backward.

    Args:
        gm: the module that holds the graph's parameters and submodules; its tensors may be of any device.
        graph: the graph.
        inputs: by placeholder name, real or fake tensors, with requires_grad as it will be, and other values.
    """
    given = [*tensors_of(inputs), *gm.parameters(), *gm.buffers()]
    mode = next((t.fake_mode for t in given if isinstance(t, FakeTensor)), FakeTensorMode(allow_non_fake_inputs=True))
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in fakes:
            fakes[id(tensor)] = mode.from_tensor(tensor)
        return fakes[id(tensor)]

    state = {
        name: fake(t) for name, t in (*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False))
    }
    fake_inputs = {name: tree_map_only(Tensor, fake, value) for name, value in inputs.items()}
    recorder = _Recorder(gm, graph)
    args = [
        fake_inputs[str(n.target)] if str(n.target) in fake_inputs else _default(n)
        for n in graph.nodes
        if n.op == "placeholder"
    ]
    with (
        mode,
        _hooks_off(gm),
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
        kinds[_storage(tensor)] = "output"
    for value in fake_inputs.values():
        for tensor in tensors_of(value):
            kinds[_storage(tensor)] = "input"
    for real in (*gm.buffers(), *gm.parameters()):
        kinds[_storage(fake(real))] = "parameter" if id(real) in parameters else "buffer"
    numbers: dict[int, int] = {}
    saved = []
    for node, tensor in recorder.packed:
        key = _storage(tensor)
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
    recorder.walked.clear()
    recorder.env.clear()
    return Observation(SavedTensors(tuple(saved)), recorder.outputs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _default(node: fx.Node) -> Any:
    return node.args[0] if node.args else None
