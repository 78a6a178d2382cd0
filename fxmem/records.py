"""What the passes find out, as frozen data: bytes are ints, printing lives elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
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
        return sum(self.by_node().values())

    def by_node(self) -> dict[str, int]:
        """Bytes kept by each node that keeps any, each storage booked on the first node that keeps it."""
        seen: set[int] = set()
        booked: dict[str, int] = {}
        for tensor in self.tensors:
            if tensor.kind == "activation" and tensor.storage not in seen:
                seen.add(tensor.storage)
                booked[tensor.node] = booked.get(tensor.node, 0) + tensor.nbytes
        return booked


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
class OptimizerRow:
    """Bytes of optimizer state of one parameter that trains.

    Args:
        parameter: its name.
        adamw: what AdamW keeps for it.
        rank_one: what Adapprox keeps at rank 1.
        cap: what Adapprox keeps at its largest rank.
        reason: why its second moment is factored or dense.
    """

    parameter: str
    adamw: int
    rank_one: int
    cap: int
    reason: str


@dataclass(frozen=True)
class NodeRow:
    """What one node keeps, under eager and under fxmem.

    A storage that several nodes keep is booked on the first of them, so that the rows add up to the totals.

    Args:
        node: name of the node.
        module: path of the module it comes from, empty at the top.
        op: short name of the operation.
        source: file and line of the call in the user's code, where known.
        eager: bytes that eager keeps here.
        fxmem: bytes that the rewritten model keeps here.
        reason: why, as one sentence; empty where no rule speaks of the node.
        remedy: what the user could do about it, if anything.
    """

    node: str
    module: str
    op: str
    source: str | None
    eager: int
    fxmem: int
    reason: str
    remedy: str | None = None


@dataclass(frozen=True)
class MemoryReport:
    """Eager against fxmem for one model and one set of inputs.

    Args:
        model: class name of the model.
        inputs: a short description of the inputs.
        rows: one for every node that keeps something under eager or fxmem, or that a rule speaks of.
        eager: bytes that eager keeps between forward and backward beyond parameters, buffers, inputs and outputs.
        fxmem: bytes that the rewritten model keeps.
        parameters: status of every parameter.
        optimizer: optimizer state of every parameter that trains.
        measured: the allocator's figures of eager and fxmem, when they were really run.
    """

    model: str
    inputs: str
    rows: tuple[NodeRow, ...]
    eager: int
    fxmem: int
    parameters: tuple[ParameterStatus, ...]
    optimizer: tuple[OptimizerRow, ...]
    measured: tuple[Measurement, Measurement] | None = None

    LEFT_OUT = "parameters, buffers, inputs, outputs, gradients, optimizer state and what kernels use while they run"

    def __str__(self) -> str:
        from fxmem.render import as_text

        return as_text(self)
