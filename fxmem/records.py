"""What the passes find out, as frozen data: bytes are ints, printing lives elsewhere."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from fxmem.errors import ArgumentError

SCHEMA = 2


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
class Compilation:
    """One way of running a model.

    Args:
        name: ``"eager"``, ``"inductor"`` or ``"fxmem"``.
        graphs: how many graphs with a backward were compiled; 0 for eager.
        handed: bytes that these hand from forward to backward beyond their inputs and outputs; None for eager. A compiler that
            lays out otherwise what it returns may keep more, and what passes between graphs is not in it.
        measured: what the allocator counted.
    """

    name: str
    graphs: int
    handed: int | None
    measured: Measurement


@dataclass(frozen=True)
class Step:
    """One step of the timeline: a call in the forward pass, or the backward of it.

    Args:
        phase: ``"forward"`` or ``"backward"``.
        module: path of the module that the call comes from, empty at the top.
        op: short name of the operation.
        live: most bytes alive during the step, counted as ``Footprint.peak`` counts them.
    """

    phase: Literal["forward", "backward"]
    module: str
    op: str
    live: int


@dataclass(frozen=True)
class Footprint:
    """Predicted bytes of one forward and backward pass.

    Args:
        kept: alive between forward and backward beyond parameters, buffers, inputs and outputs.
        peak: most bytes alive at once over both passes, beyond what was alive before; the outputs and the new gradients
            count, the cotangents do not. None where the backward pass cannot be followed; the report's notes say why.
        outputs: bytes of the outputs' own storages.
        gradients: bytes of the gradients of parameters and inputs.
        timeline: live bytes step by step over forward and backward, empty where peak is None.
    """

    kept: int
    peak: int | None
    outputs: int
    gradients: int
    timeline: tuple[Step, ...] = ()

    @property
    def temporaries(self) -> int:
        """Bytes of the peak beyond what is kept and the outputs: values on their way and gradients; 0 without a peak."""
        return 0 if self.peak is None else self.peak - self.kept - self.outputs


@dataclass(frozen=True)
class OptimizerRow:
    """Bytes of optimizer state of one parameter that trains.

    Args:
        parameter: its name.
        adamw: what AdamW keeps for it.
        rank_one: what Adapprox keeps at rank 1.
        cap: what Adapprox keeps at its largest rank.
        reason: why its second moment is factored or dense.
        now: what the given optimizer, an Adapprox, keeps at this moment; None for others.
        temporaries: what a step of Adapprox needs for it above its state, at most.
    """

    parameter: str
    adamw: int
    rank_one: int
    cap: int
    reason: str
    now: int | None = None
    temporaries: int = 0


@dataclass(frozen=True)
class OptimizerState:
    """Bytes of state of one optimizer, and what AdamW and Adapprox would keep for each parameter.

    Args:
        name: of the optimizer that counts in the report's totals, such as ``AdamW``.
        nbytes: its state after the first step, or at this moment for one that has made steps; for the name Adapprox at the
            largest ranks.
        rows: one for every parameter that trains.
    """

    name: str
    nbytes: int
    rows: tuple[OptimizerRow, ...]


@dataclass(frozen=True)
class NodeRow:
    """What one node keeps, under eager and under fxmem.

    A storage that several nodes keep is booked on the first of them, so that the rows add up to the totals.

    Args:
        node: name of the node, unique in the report.
        module: path of the module it comes from, empty at the top.
        op: short name of the operation.
        source: file and line of the call in the user's code, where known.
        shape: shape of the first tensor that it returns, where it returns one.
        dtype: its dtype, without the ``torch.`` prefix.
        eager: bytes that eager keeps here.
        fxmem: bytes that the rewritten model keeps here; None where the model was not captured.
        rewritten: whether a selective-save op takes its place.
        reason: why, as one sentence.
        remedy: what the user could do about it, if anything.
    """

    node: str
    module: str
    op: str
    source: str | None
    shape: tuple[int, ...] | None
    dtype: str | None
    eager: int
    fxmem: int | None
    rewritten: bool
    reason: str
    remedy: str | None = None


@dataclass(frozen=True)
class FreezeRow:
    """What freezing one more parameter, or a family of parameters, would free.

    Args:
        parameter: its name, or a glob pattern over names, as ``--freeze`` takes it.
        eager: bytes kept that eager would be rid of.
        fxmem: bytes kept that the rewritten model would be rid of; None where the model was not captured.
    """

    parameter: str
    eager: int
    fxmem: int | None


@dataclass(frozen=True)
class MemoryReport:
    """Eager against fxmem for one model and one set of inputs; all sizes in bytes.

    Args:
        model: class name of the model.
        inputs: a short description of the inputs.
        device: device that the figures hold for.
        autocast: dtype of autocast, if it was on.
        rows: one for every node that keeps something under eager or fxmem, or that a rule speaks of.
        eager: figures of the model as it is.
        fxmem: figures of the rewritten model; None where the model was not captured, the notes say why.
        parameters: status of every parameter.
        buffer_bytes: bytes of the buffers.
        input_bytes: bytes of the inputs.
        optimizer: optimizer state; None where nothing trains.
        freezing: the parameters and families of parameters whose freezing frees most, most first.
        measured: the allocator's figures of eager and, where there is one, of the rewritten model, when they were really run.
        notes: what the reader must know besides.
        torch: version of torch that was observed.
    """

    model: str
    inputs: str
    device: str
    autocast: str | None
    rows: tuple[NodeRow, ...]
    eager: Footprint
    fxmem: Footprint | None
    parameters: tuple[ParameterStatus, ...]
    buffer_bytes: int
    input_bytes: int
    optimizer: OptimizerState | None
    freezing: tuple[FreezeRow, ...]
    measured: tuple[Measurement, Measurement | None] | None
    notes: tuple[str, ...]
    torch: str

    LEFT_OUT = (
        "workspaces of kernels (cuDNN, cuBLAS), the CUDA context, rounding and fragmentation of the allocator, and what the "
        "step of the optimizer uses while it runs"
    )

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, tied ones once."""
        return sum(p.nbytes for p in self.parameters)

    def total(self, footprint: Footprint) -> int | None:
        """Bytes of a whole training step: parameters, buffers, inputs, optimizer state and the peak; None without a peak."""
        if footprint.peak is None:
            return None
        state = self.optimizer.nbytes if self.optimizer else 0
        return self.parameter_bytes + self.buffer_bytes + self.input_bytes + state + footprint.peak

    def to_json(self) -> str:
        """The report as JSON with the version of its schema."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> MemoryReport:
        """The report that ``to_json`` wrote.

        Raises:
            ArgumentError: it is no report, or one of another schema.
        """
        return from_json(text)

    def __str__(self) -> str:
        from fxmem.render import as_text

        return as_text(self)


def to_json(report: MemoryReport) -> str:
    """``report`` as JSON: bytes as ints, ``schema`` first."""
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(report)}, indent=1)


def from_json(text: str) -> MemoryReport:
    """The report that ``to_json`` wrote.

    Raises:
        ArgumentError: it is no report, or one of another schema.
    """
    try:
        data = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"it is no JSON: {error}.", where="report", remedy="Pass what --format json wrote.") from error
    schema = data.pop("schema", None) if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise ArgumentError(
            f"it is of schema {schema!r}, and this version reads {SCHEMA}.",
            where="report",
            remedy="Write it again with this version: fxmem report --format json.",
        )
    try:
        report = _read(MemoryReport, data)
    except (TypeError, ValueError, KeyError) as error:
        raise ArgumentError(f"a field is missing or wrong: {error}.", where="report", remedy="Write it again.") from error
    assert isinstance(report, MemoryReport)
    return report


def _read(kind: Any, value: Any) -> Any:
    """``value``, as json reads it, as an instance of the annotation ``kind``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (a for a in arguments if a is not type(None))
        return _read(kind, value)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is none of {arguments}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"expected a list, got {value!r}")
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_read(k, v) for k, v in zip(kinds, value, strict=True))
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise TypeError(f"expected an object, got {value!r}")
        hints, make = get_type_hints(kind), cast(Any, kind)
        return make(**{key: _read(hints[key], v) for key, v in value.items()})
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value
