"""What users call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxmem.capture import bind_example, check_model
from fxmem.errors import ArgumentError
from fxmem.measure import measure
from fxmem.passes.base import module_path, op_name, source_of
from fxmem.passes.optimizer_state import account, attach
from fxmem.pipeline import OptimizedModule, placeholders, rewrite
from fxmem.records import MemoryReport, NodeRow, OptimizerRow, SavedTensors

_POLICIES = ("exact",)
_CAPTURES = ("auto", "symbolic")


def optimize(
    model: nn.Module,
    example_args: tuple[Any, ...] | Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    policy: str = "exact",
    capture: str = "auto",
    optimizer: torch.optim.Optimizer | None = None,
) -> OptimizedModule:
    """Rewrites a model so that its forward keeps only what backward needs; outputs and gradients stay those of eager.

    The result shares the model's parameters, buffers and hooks; its train/eval flags are its own. The model itself is left
    as it is. Freezing and unfreezing parameters afterwards gives eager's gradients; to save the most again, call ``optimize``
    again.

    Args:
        model: the model, its parameters frozen or not as they will be in training; an optimized module is rewritten anew.
        example_args: positional inputs, real or fake tensors, with requires_grad as it will be; a lone tensor stands for a
            tuple of one. With them the rewrite is planned in bytes, without them from the structure of the graph.
        example_kwargs: keyword inputs.
        policy: ``"exact"``: the outputs and gradients of eager.
        capture: how to get the graph: ``"symbolic"`` or ``"auto"``.
        optimizer: an Adam or AdamW of the model's parameters, fresh or in the middle of a run; the result's ``optimizer`` is
            an Adapprox with its groups, hyperparameters and running state.

    Raises:
        ArgumentError: not a module, a ScriptModule, an unknown policy, or inputs that do not fit the model.
        CaptureError: the forward does what a graph cannot express.
        RewriteError: the rewritten graph failed its checks.
        OptimizerError: the optimizer cannot be turned into Adapprox, or is another model's.

    Source: Bhatia and Dangel, *Lowering PyTorch's Memory Consumption for Selective Differentiation*, arXiv 2404.12406.
    """
    check_model(model)
    _check_choice("policy", policy, _POLICIES)
    _check_choice("capture", capture, _CAPTURES)
    args = (example_args,) if isinstance(example_args, Tensor) else tuple(example_args)
    kwargs = dict(example_kwargs or {})
    source = model
    if isinstance(model, OptimizedModule):
        source = model.source()
    bound = bind_example(source, args, kwargs) if args or kwargs else None
    gm = OptimizedModule(source, bound)
    if isinstance(model, OptimizedModule):
        gm.copy_flags(model)
    rewrite(gm, None if bound is None else placeholders(gm, bound))
    if optimizer is not None:
        gm.optimizer = attach(gm, optimizer)
    return gm


def report(
    model: nn.Module,
    example_args: tuple[Any, ...] | Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    measured: bool = False,
) -> MemoryReport:
    """What eager keeps for backward, what fxmem keeps, and why, without running anything for real.

    Args:
        model: the model.
        example_args: positional inputs, real or fake; a lone tensor stands for a tuple of one.
        example_kwargs: keyword inputs.
        measured: whether to run both for real as well and add the allocator's figures.

    Raises:
        ArgumentError: as ``optimize``, or there are no example inputs.
        CaptureError: as ``optimize``.
    """
    args = (example_args,) if isinstance(example_args, Tensor) else tuple(example_args)
    if not args and not example_kwargs:
        raise ArgumentError("a report needs example inputs.", where="example_args", remedy="Pass the model's inputs.")
    gm = optimize(model, args, example_kwargs)
    if gm.saved is None:
        raise ArgumentError("; ".join(gm.notes) + ".", where="model", remedy="Measure it instead: fxmem.measure(model, ...).")
    eager, ours = gm.saved
    real = None
    if measured:
        real = (measure(model, args, example_kwargs), measure(gm, args, example_kwargs))
    return MemoryReport(
        type(model).__name__,
        _describe((*args, *(example_kwargs or {}).values())),
        _rows(gm, eager, ours),
        eager.kept,
        ours.kept,
        tuple(gm.grad_flow.parameters.values()),
        tuple(OptimizerRow(r.name, r.adamw, r.rank_one, r.cap, r.reason) for r in account(gm).rows),
        real,
    )


def _describe(values: tuple[Any, ...]) -> str:
    return ", ".join(
        f"{'x'.join(map(str, t.shape))} {str(t.dtype).removeprefix('torch.')}{' requires grad' if t.requires_grad else ''}"
        for t in values
        if isinstance(t, Tensor)
    )


def _rows(gm: OptimizedModule, eager: SavedTensors, ours: SavedTensors) -> tuple[NodeRow, ...]:
    before, after = eager.by_node(), ours.by_node()
    decisions = {d.node: d for d in gm.decisions}
    rows = []
    for node in gm.graph.nodes:
        decision = decisions.get(node.name)
        old, new = before.get(node.name, 0), after.get(node.name, 0)
        if decision is None and not old and not new:
            continue
        reason = decision.reason if decision else ""
        if not reason and old:
            reason = "kept: its derivative needs it, and no rule speaks of this op"
        rows.append(
            NodeRow(
                node.name,
                module_path(node),
                op_name(gm, node),
                source_of(node),
                old,
                new,
                reason,
                decision.remedy if decision else None,
            )
        )
    return tuple(rows)


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ArgumentError(f"unknown value {value!r}.", where=name, remedy=f"Choose one of {', '.join(allowed)}.")
