"""What users call."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxmem.capture import bind_example, check_model
from fxmem.errors import ArgumentError, CaptureError
from fxmem.export import export
from fxmem.passes.optimizer_state import attach
from fxmem.pipeline import OptimizedModule, placeholders, rewrite
from fxmem.records import MemoryReport
from fxmem.regions import check_kept, optimize_regions, original
from fxmem.reporting import Options, build_report

_POLICIES = ("exact", "recompute")
_CAPTURES = ("auto", "symbolic", "export", "regions")


def optimize(
    model: nn.Module,
    example_args: tuple[Any, ...] | Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    policy: str = "exact",
    budget: int | float | str | None = None,
    capture: str = "auto",
    fullgraph: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> OptimizedModule | nn.Module:
    """Rewrites a model so that its forward keeps only what backward needs; outputs and gradients stay those of eager.

    The result shares the model's parameters, buffers and hooks; its train/eval flags are its own. The model itself is left
    as it is. Freezing and unfreezing parameters afterwards gives eager's gradients; to save the most again, call ``optimize``
    again.

    A model that ``torch.fx`` can trace becomes one graph, an ``OptimizedModule``. Any other is rewritten by regions: the result
    is a copy of its modules, of the same classes, whose own Python code goes on running, so ``generate``, ``config`` and
    ``isinstance`` work as before. In it the largest submodules that can be traced are planned as graphs, and layers outside
    of them one by one. Its ``decisions``, ``grad_flow``, ``saved`` and ``notes`` say what each part got, and why no larger
    one did.

    Args:
        model: the model, its parameters frozen or not as they will be in training; an optimized module is rewritten anew.
        example_args: positional inputs, real or fake tensors, with requires_grad as it will be; a lone tensor stands for a
            tuple of one. With them the rewrite is planned in bytes, without them from the structure of the graph.
        example_kwargs: keyword inputs.
        policy: ``"exact"``: keep what the derivatives read. ``"recompute"``: of that, do not keep what is cheap to make again
            in backward (outputs of norms, activations, dropout, elementwise ops); needs example inputs, and a graph of the
            whole model. Outputs and gradients are those of eager under both.
        budget: most bytes alive at once over forward and backward, as ``measure`` counts them: a number, a text such as
            ``"8GiB"``, or as a float a fraction of eager's peak. What the policy ``"recompute"`` would keep is then made again
            as far as that takes, matrix products and convolutions included, at the least extra work.
        capture: how to get the graph. ``"symbolic"`` traces the whole model with ``torch.fx``. ``"export"`` takes
            ``torch.export``, which needs example inputs and fixes the mode (``train()`` and ``eval()`` refuse to change what
            the graph depends on), the arguments that are no tensors and all sizes but the batch's. Hooks that
            submodules get afterwards do not fire, as nobody calls them. ``"regions"`` works region
            by region. ``"auto"`` is the first, and the last where that cannot: by regions as little is kept as by export, and
            the model keeps its interface, its modes and its shapes.
        fullgraph: whether ``"auto"`` takes export in the place of regions, and raises, naming the line, if that cannot either.
        optimizer: an Adam or AdamW of the model's parameters, fresh or in the middle of a run; the result's ``optimizer`` is
            an Adapprox with its groups, hyperparameters and running state.

    Raises:
        ArgumentError: not a module, a ScriptModule, an unknown policy, inputs that do not fit the model, or a budget that no
            plan meets; it names the smallest peak that one does.
        CaptureError: the forward does what a graph cannot express, and regions are ruled out.
        RewriteError: the rewritten graph failed its checks.
        OptimizerError: the optimizer cannot be turned into Adapprox, or is another model's.

    Source: Bhatia and Dangel, *Lowering PyTorch's Memory Consumption for Selective Differentiation*, arXiv 2404.12406.
    """
    check_model(model)
    _check_choice("policy", policy, _POLICIES)
    _check_choice("capture", capture, _CAPTURES)
    args = (example_args,) if isinstance(example_args, Tensor) else tuple(example_args)
    kwargs = dict(example_kwargs or {})
    source = model.source() if isinstance(model, OptimizedModule) else original(model)
    bound = bind_example(source, args, kwargs) if args or kwargs else None
    limit = _budget(budget)
    if (policy != "exact" or limit is not None) and bound is None:
        raise ArgumentError(
            f"{f'the policy {policy!r}' if limit is None else 'a budget'} plans in bytes.",
            where="example_args",
            remedy="Pass example inputs, real or fake.",
        )
    result: nn.Module | None = None
    why = None
    if capture != "regions":
        try:
            gm = _graph(source, bound, args, kwargs, capture, fullgraph)
        except CaptureError as error:
            if capture != "auto" or fullgraph:
                raise
            why = error
        else:
            if isinstance(model, OptimizedModule):
                gm.copy_flags(model)
            inputs = None if bound is None else placeholders(gm, bound, args, kwargs)
            rewrite(gm, inputs, policy=policy, budget=limit, call=(args, kwargs))
            check_kept(gm, source, args, kwargs)
            result = gm
    if result is None:
        result = optimize_regions(source, args, kwargs, why=why, flags=model).module
        if limit is not None:
            raise ArgumentError(
                f"a budget needs a graph of the whole model, and there is none: {why or 'capture is regions'}",
                where="budget",
                remedy="Leave it out, or make the model traceable.",
            )
        if policy != "exact":
            note = (
                f"the policy {policy!r} needs a graph of the whole model, so everything went by the policy 'exact'; "
                "capture='export' may give one"
            )
            vars(result)["notes"] = (*vars(result)["notes"], note)
    if optimizer is not None:
        vars(result)["optimizer"] = attach(result, optimizer)
    return result


def _graph(
    source: nn.Module,
    bound: dict[str, Any] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    capture: str,
    fullgraph: bool,
) -> OptimizedModule:
    """The whole model as a graph."""
    if capture == "export" and bound is None:
        raise ArgumentError("torch.export needs example inputs.", where="example_args", remedy="Pass the model's inputs.")
    if capture != "export":
        try:
            return OptimizedModule(source, bound)
        except CaptureError:
            if capture == "symbolic" or not fullgraph or bound is None:
                raise
            try:
                return OptimizedModule(source, bound, export(source, args, kwargs))
            except CaptureError:
                pass  # the error of the symbolic trace names the line
            raise
    return OptimizedModule(source, bound, export(source, args, kwargs))


def report(
    model: nn.Module,
    example_args: tuple[Any, ...] | Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    measured: bool = False,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    autocast: torch.dtype | str | None = None,
    optimizer: str | torch.optim.Optimizer = "AdamW",
    freezing: int = 3,
    progress: Callable[[str], None] | None = None,
) -> MemoryReport:
    """What eager keeps for backward, what fxmem keeps, and why, without running anything for real.

    Forward and backward run on fake tensors, so neither memory nor the device is needed. A model that fxmem cannot capture
    is reported as it is, without fxmem's column; the notes say why.

    Args:
        model: the model, on any device, ``meta`` and fake ones included.
        example_args: positional inputs, real or fake; a lone tensor stands for a tuple of one.
        example_kwargs: keyword inputs.
        measured: whether to run both for real as well and add the allocator's figures. Where an op's result depends on the
            data, this real run takes the place of the one on fake tensors.
        device: device to report for, such as ``"cuda"``, whether it is there or not; the model's own by default.
        dtype: dtype of floating-point parameters, buffers and inputs to report for; their own by default.
        autocast: dtype of autocast to report under; none by default.
        optimizer: whose state counts: ``"Adapprox"`` or the name of a class in ``torch.optim``, or an optimizer of the model's
            parameters, fresh or in the middle of a run.
        freezing: for how many parameters, and how many families of them, to find out what freezing them would free.
        progress: called with a line of text before each longer step.

    Raises:
        ArgumentError: as ``optimize``, there are no example inputs, an option does not fit, or an op depends on the data.
    """
    if example_args is None or isinstance(example_args, Mapping):
        raise ArgumentError(
            f"expected a tuple of positional inputs, got {type(example_args).__name__}.",
            where="example_args",
            remedy="Pass inputs by name as example_kwargs.",
        )
    args = (example_args,) if isinstance(example_args, Tensor) else tuple(example_args)
    options = Options(measured, _device(device), _dtype("dtype", dtype), _dtype("autocast", autocast), optimizer, freezing)
    with _ONE_AT_A_TIME:
        return build_report(model, args, dict(example_kwargs or {}), options, progress or (lambda line: None))


# Observation hooks into torch for as long as it lasts, which no other thread's may see.
_ONE_AT_A_TIME = threading.RLock()


def _device(device: str | torch.device | None) -> torch.device | None:
    try:
        place = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        text = str(error).splitlines()[0]
        raise ArgumentError(f"it is no device: {text}.", where=f"device {device}", remedy="Pass cpu or cuda.") from error
    if place is not None and place.type not in ("cpu", "cuda"):
        raise ArgumentError(
            "what is kept on this kind of device is not known.", where=f"device {device}", remedy="Pass cpu or cuda."
        )
    return place


def _dtype(where: str, dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ArgumentError(f"{dtype!r} is no floating-point dtype.", where=where, remedy="Pass torch.bfloat16 or the like.")
    return found


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def in_bytes(text: str, where: str) -> int:
    """An amount of memory such as ``8GiB`` or ``80 GB`` in bytes.

    Args:
        text: a number and a unit of 1000 or 1024 bytes, or none.
        where: the option or argument that it is of.

    Raises:
        ArgumentError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)", text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ArgumentError(f"{text!r} is no size.", where=where, remedy="Write it as 24GiB, 80GB or a number.")
    return int(float(found[1]) * unit)


def _budget(value: int | float | str | None) -> int | float | None:
    """Bytes, or a fraction."""
    if value is None:
        return None
    amount = in_bytes(value, "budget") if isinstance(value, str) else value
    if not isinstance(amount, int | float) or isinstance(amount, bool) or amount <= 0:
        raise ArgumentError(
            f"{value!r} is no amount of memory.", where="budget", remedy='Pass bytes, "8GiB" or the like, or a fraction of 1.'
        )
    if isinstance(amount, float) and amount > 1:
        raise ArgumentError(
            f"{value!r} as a fraction is more than eager takes.", where="budget", remedy="Pass bytes as an int or a text."
        )
    return amount


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ArgumentError(f"unknown value {value!r}.", where=name, remedy=f"Choose one of {', '.join(allowed)}.")
