"""What the passes find out, as frozen data: bytes are ints, printing lives elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class GradStatus:
    """Whether the value of one node requires grad, and because of what.

    Args:
        node: name of the node in the graph.
        requires_grad: whether autograd would track the node's value.
        because: parameters and inputs that make it so, nearest first, at most ``LIMIT`` of them.
    """

    LIMIT = 4

    node: str
    requires_grad: bool
    because: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParameterStatus:
    """One parameter of the model as the graph sees it.

    Args:
        name: qualified name, the first one of a tied parameter.
        requires_grad: whether it trains.
        nbytes: its size in bytes.
        used_by: names of the nodes that read it; empty when the graph never does.
    """

    name: str
    requires_grad: bool
    nbytes: int
    used_by: tuple[str, ...]


@dataclass(frozen=True)
class GradFlow:
    """Result of the analysis pass: every node's and every parameter's status."""

    nodes: dict[str, GradStatus]
    parameters: dict[str, ParameterStatus]

    def requires_grad(self, node: str) -> bool:
        """Whether the value of ``node`` requires grad."""
        return self.nodes[node].requires_grad


@dataclass(frozen=True)
class Decision:
    """What was done with one node, and why.

    Args:
        node: name of the node.
        module: path of the module it comes from, empty at the top.
        op: name of the rule that speaks of it, such as ``conv``.
        rewritten: True when a selective-save op replaces it, False when the rule left it alone.
        reason: one sentence for the user.
        remedy: what the user could do to change it, if anything.
        source: file and line of the call in the user's code, where known.
    """

    node: str
    module: str
    op: str
    rewritten: bool
    reason: str
    remedy: str | None = None
    source: str | None = None


Kind = Literal["activation", "parameter", "buffer", "input", "output"]


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that one node asks autograd to keep for backward.

    Args:
        node: name of the node that keeps it.
        module: path of the module that the node comes from.
        op: short name of the operation.
        shape: its shape.
        dtype: its dtype, without the ``torch.`` prefix.
        storage: number of its storage; equal numbers share memory.
        nbytes: bytes of the whole storage.
        kind: what the storage is; only ``activation`` counts as kept.
    """

    node: str
    module: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    storage: int
    nbytes: int
    kind: Kind


@dataclass(frozen=True)
class SavedTensors:
    """Everything one forward pass keeps for backward."""

    tensors: tuple[SavedTensor, ...]

    @property
    def kept(self) -> int:
        """Bytes kept beyond parameters, buffers, inputs and outputs, each storage once."""
        return sum({t.storage: t.nbytes for t in self.tensors if t.kind == "activation"}.values())


@dataclass(frozen=True)
class Measurement:
    """Bytes counted at the allocator while one forward and backward pass ran.

    Args:
        kept: alive between forward and backward beyond parameters, buffers, inputs and outputs.
        peak: most bytes alive at once over both passes, beyond what was alive before; the outputs and the new gradients
            count, the cotangents do not.
        outputs: bytes of the outputs' own storages.
        gradients: bytes of the gradients of parameters and inputs.
        device: where it ran.
    """

    kept: int
    peak: int
    outputs: int
    gradients: int
    device: str


@dataclass(frozen=True)
class MemoryReport:
    """Eager against fxmem for one model and one set of inputs.

    Args:
        model: class name of the model.
        inputs: a short description of the inputs.
        eager: what the untouched model keeps.
        fxmem: what the rewritten model keeps.
        decisions: one for every node that a rule speaks of.
        parameters: status of every parameter.
        measured: measured figures of eager and fxmem, when they were really run.
    """

    model: str
    inputs: str
    eager: SavedTensors
    fxmem: SavedTensors
    decisions: tuple[Decision, ...]
    parameters: tuple[ParameterStatus, ...]
    measured: tuple[Measurement, Measurement] | None = field(default=None)
