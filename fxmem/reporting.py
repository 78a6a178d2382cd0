"""From a model and its inputs to a MemoryReport: observation, lifetimes, optimizer state and what freezing would free."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor

from fxmem.capture import bind_example, check_model
from fxmem.errors import ArgumentError, CaptureError, FxmemError
from fxmem.measure import measure
from fxmem.optim import Adapprox
from fxmem.passes.base import module_path, op_name, source_of, tensors_of
from fxmem.passes.fakes import Fakes
from fxmem.passes.lifetimes import Call, Lifetimes, follow
from fxmem.passes.optimizer_state import account, observed_state
from fxmem.passes.saved_tensors import Observation
from fxmem.passes.watch import Watched
from fxmem.pipeline import OptimizedModule, placeholders, rewrite
from fxmem.records import (
    Decision,
    FreezeRow,
    GradFlow,
    Measurement,
    MemoryReport,
    NodeRow,
    OptimizerRow,
    OptimizerState,
    ParameterStatus,
    SavedTensors,
)
from fxmem.regions import optimize_regions, original
from fxmem.render import human


@dataclass(frozen=True)
class Options:
    """What ``fxmem.report`` was asked for; see there."""

    measured: bool
    device: torch.device | None
    dtype: torch.dtype | None
    autocast: torch.dtype | None
    optimizer: str | torch.optim.Optimizer
    freezing: int


@dataclass(frozen=True)
class _Subject:
    """A model with its inputs, and how to look at them."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: Options
    real: bool = False

    def fakes(self) -> Fakes:
        """A new set of tensors to run on."""
        given = (*self.model.parameters(), *self.model.buffers(), *self.inputs())
        return Fakes(given, device=self.options.device, dtype=self.options.dtype, real=self.real)

    def inputs(self) -> Iterator[Tensor]:
        """The inputs that are tensors."""
        return tensors_of((self.args, self.kwargs))


def build_report(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    progress: Callable[[str], None],
) -> MemoryReport:
    """See ``fxmem.report``."""
    check_model(model)
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ArgumentError(
            "a compiled module runs what its compiler makes of it, which is not known ahead.",
            where="model",
            remedy="Report on the module that was compiled (model._orig_mod), or measure it: fxmem.measure(model, ...).",
        )
    if not args and not kwargs:
        raise ArgumentError("a report needs example inputs.", where="example_args", remedy="Pass the model's inputs.")
    source = model.source() if isinstance(model, OptimizedModule) else original(model)
    subject = _Subject(source, args, kwargs, options)
    _check_measurable(subject)
    device = options.device or next((t.device for t in (*source.parameters(), *subject.inputs())), torch.device("cpu"))
    if device.type == "meta":
        device = torch.device("cpu")
    notes: list[str] = []
    with _autocast(device.type, options.autocast):
        progress("capturing the graph and observing what it keeps")
        gm, seen = _captured(subject, model, notes)
        progress("following forward and backward of the model")
        try:
            before = _follow(subject, source)
            after = None
            if gm is not None:
                progress("following forward and backward of the rewritten model")
                after = _follow(subject, gm)
        except _Undecided as undecided:
            if not options.measured:
                raise undecided.error from undecided.__cause__
            notes.append(undecided.note)
            subject = _Subject(source, args, kwargs, options, real=True)
            before, after = _follow(subject, source), None if gm is None else _follow(subject, gm)
            seen = None
        if isinstance(gm, OptimizedModule) and isinstance(seen, Graphs):
            rows = _graph_rows(gm, seen)
        else:
            rows = _call_rows(before, after, gm)
        for which, lifetimes, held in (
            ("eager", before, sum(r.eager for r in rows)),
            ("fxmem", after, sum(r.fxmem or 0 for r in rows)),
        ):
            if lifetimes is not None and (missing := lifetimes.footprint.kept - held):
                who = "attributes of modules or functions, where autograd does not show them"
                if missing != lifetimes.hidden:
                    who += ", or because of hooks on modules"
                notes.append(f"{which}: {missing} of the bytes kept are held by {who}; no row has them")
        if before.footprint.peak is None:
            notes.append("nothing in the output requires grad, so there is no backward pass")
        real: tuple[Measurement, Measurement | None] | None = None
        if options.measured:
            progress("measuring")
            try:
                real = (measure(source, args, kwargs), None if gm is None else measure(gm, args, kwargs))
            except RuntimeError as error:
                raise ArgumentError(
                    f"it does not run for real: {str(error).splitlines()[0]}.", where="measured", remedy="Leave measured out."
                ) from error
        freezing = _freezing(subject, gm, seen, before, progress) if not subject.real else ()
    parameters = _parameters(source, gm, options.dtype)
    buffers = {id(b): b for b in source.buffers()}.values()
    return MemoryReport(
        model=type(source).__name__,
        inputs=_describe(args, kwargs),
        device=str(device),
        autocast=None if options.autocast is None else _name(options.autocast),
        rows=_with_freed(rows, freezing),
        eager=before.footprint,
        fxmem=None if after is None else after.footprint,
        parameters=parameters,
        buffer_bytes=sum(_nbytes(b, options.dtype) for b in buffers),
        input_bytes=sum(_nbytes(t, options.dtype) for t in {id(t): t for t in subject.inputs()}.values()),
        optimizer=_optimizer(source, options, notes),
        freezing=freezing,
        measured=real,
        notes=tuple(notes) + (() if gm is None else vars(gm)["notes"]),
        torch=torch.__version__,
    )


_REAL_RUN = "; if it does accept them and fake tensors are the reason, observe a real run: measured=True, or --measure."


class _Undecided(Exception):
    """A run on fake tensors could not go on, where a real one may.

    Args:
        note: what the report says if the real one does.
        error: what the user is told otherwise.
    """

    def __init__(self, note: str, error: ArgumentError) -> None:
        self.note, self.error = note, error
        super().__init__(note)


def _follow(subject: _Subject, model: nn.Module, *, backward: bool = True) -> Lifetimes:
    where: list[Call] = []
    try:
        return follow(model, subject.args, subject.kwargs, subject.fakes(), backward=backward, trail=where)
    except FxmemError:
        raise
    except Exception as error:
        last = where[-1] if where else None
        place = f"{last.name} ({last.source})" if last and last.source else last.name if last else "example_args"
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            name = getattr(error, "func", error)
            told = ArgumentError(
                f"the result of {name} depends on the data, so fake tensors cannot go on from here.",
                where=place,
                remedy="Observe a real run instead: measured=True, or --measure.",
            )
            reason = f"{name} depends on the data"
        else:
            text = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {text[0] if text else ''}"
            reason += "" if reason.endswith((".", "!", "?", ":")) else "."
            told = ArgumentError(
                f"the model does not run on these example inputs: {reason}",
                where=place,
                remedy="Pass inputs that model(*example_args, **example_kwargs) accepts"
                + ("." if subject.options.measured else _REAL_RUN),
            )
        if subject.real:
            raise told from error
        raise _Undecided(f"{place}: {reason}, so a real run was observed in place of one on fake tensors", told) from error


@dataclass(frozen=True)
class Graphs:
    """What was observed of a graph before and after its rewrite."""

    before: Observation
    after: Observation


@dataclass(frozen=True)
class Runs:
    """What was observed of a model without a graph before and after its rewrite."""

    before: Watched
    after: Watched


def _captured(subject: _Subject, model: nn.Module, notes: list[str]) -> tuple[nn.Module | None, Graphs | Runs | None]:
    """The model rewritten, with what was observed; nothing, and a note, where it cannot be captured."""
    bound = bind_example(subject.model, subject.args, subject.kwargs)
    try:
        gm = OptimizedModule(subject.model, bound)
    except CaptureError as error:
        return _by_regions(subject, model, error, notes)
    if isinstance(model, OptimizedModule):
        gm.copy_flags(model)
    try:
        seen = rewrite(gm, placeholders(gm, bound, subject.args, subject.kwargs), subject.fakes)
        return gm, seen and Graphs(*seen)
    except ArgumentError as error:
        if not subject.options.measured:
            raise
        # If the model itself runs for real, fake tensors are at fault.
        notes.append(f"not rewritten: {error}")
        return None, None


def _by_regions(
    subject: _Subject, model: nn.Module, why: CaptureError, notes: list[str]
) -> tuple[nn.Module | None, Runs | None]:
    try:
        found = optimize_regions(subject.model, subject.args, subject.kwargs, why=why, flags=model, fakes=subject.fakes)
    except CaptureError as error:
        notes.append(f"not captured, so there is nothing of fxmem to show: {error}")
        return None, None
    except ArgumentError as error:
        # Whoever follows the model itself next says more, or finds that it runs for real.
        notes.append(f"not rewritten: {error}")
        return None, None
    return found.module, found.seen and Runs(*found.seen)


def _graph_rows(gm: OptimizedModule, seen: Graphs) -> tuple[NodeRow, ...]:
    stock, final = seen.before, seen.after
    before, after = stock.saved.by_node(), final.saved.by_node()
    decisions = {d.node: d for d in gm.decisions}
    rows = []
    for node in gm.graph.nodes:
        decision = decisions.get(node.name)
        old, new = before.get(node.name, 0), after.get(node.name, 0)
        if decision is None and not old and not new:
            continue
        op = op_name(gm, node)
        shape, dtype = next(((s, _name(d)) for s, d, *_ in final.metadata.get(node.name, ())), (None, None))
        rows.append(
            NodeRow(
                node=node.name,
                module=module_path(node),
                op=op,
                source=source_of(node),
                shape=shape,
                dtype=dtype,
                eager=old,
                fxmem=new,
                rewritten=bool(decision and decision.rewritten),
                reason=decision.reason if decision else _derivative(op, stock.saves.get(node.name, ())),
                remedy=decision.remedy if decision else None,
            )
        )
    return tuple(rows)


def _call_rows(before: Lifetimes, after: Lifetimes | None, gm: nn.Module | None) -> tuple[NodeRow, ...]:
    """Rows of a model without a graph that both columns could share: by calls, as the runs showed them."""
    made: tuple[Decision, ...] = () if gm is None else vars(gm)["decisions"]
    layers = {d.module: d for d in made if gm is not None and not gm.get_submodule(d.module)._modules}
    functions = {(d.module, d.source): d for d in made}
    old, new = before.saved.by_node(), after.saved.by_node() if after else {}
    calls = {c.name: c for c in (*(after.calls if after else ()), *before.calls)}
    order = [c.name for c in before.calls] + [c.name for c in (after.calls if after else ())]
    rows = []
    for name in dict.fromkeys(order):
        call = calls[name]
        if not old.get(name) and not new.get(name):
            continue
        decision = functions.get((call.module, call.source)) or layers.get(call.module)
        rows.append(
            NodeRow(
                node=name,
                module=call.module,
                op=call.op,
                source=call.source,
                shape=call.shape,
                dtype=call.dtype,
                eager=old.get(name, 0),
                fxmem=new.get(name, 0) if after else None,
                rewritten=bool(decision and decision.rewritten),
                reason=decision.reason if decision else _derivative(call.op, call.saves),
                remedy=decision.remedy if decision else None,
            )
        )
    return tuple(rows)


_WORDS = {"input": "its input", "output": "its output", "own": "values that it makes for it"}


def _derivative(op: str, saves: tuple[str, ...]) -> str:
    what = [_WORDS[s] for s in ("input", "output", "own") if s in saves]
    return f"kept: the derivative of {op} needs {' and '.join(what) or 'nothing more than parameters'}"


def _freezing(
    subject: _Subject,
    gm: nn.Module | None,
    seen: Graphs | Runs | None,
    before: Lifetimes,
    progress: Callable[[str], None],
) -> tuple[FreezeRow, ...]:
    """Freezes the most promising parameters, one by one and by families, and observes what is kept then."""
    trained = {name: p for name, p in subject.model.named_parameters() if p.requires_grad and p.is_leaf}
    read = _kept_for(trained, gm, None if seen is None else seen.after.saved, before.saved)
    scores = {name: sum(kept.values()) for name, kept in read.items() if kept}
    families: dict[str, list[str]] = {}
    for name in scores:
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        families.setdefault(pattern, [n for n in trained if fnmatch.fnmatchcase(n, pattern)])
    adapters = [n for n in trained if fnmatch.fnmatchcase(n, "*lora_A*")]
    if adapters:
        families["*lora_A*"] = adapters
    # Weights first: a bias or a scale of one element per channel seldom keeps anything by itself.
    alone = sorted(scores, key=lambda n: (trained[n].dim() < 2, -scores[n]))[: subject.options.freezing]
    together = [pattern for pattern, members in families.items() if len(members) > 1]

    def promise(pattern: str) -> tuple[bool, int]:
        members = families[pattern]
        return trained[members[0]].dim() < 2, -sum({k: v for n in members for k, v in read[n].items()}.values())

    together.sort(key=promise)
    candidates = {name: [name] for name in alone} | {p: families[p] for p in together[: subject.options.freezing]}
    found = []
    for pattern, members in candidates.items():
        if len(members) == len(trained) and not any(t.requires_grad for t in subject.inputs()):
            continue  # nothing would be left to differentiate by
        progress(f"finding out what freezing {pattern} would free")
        for name in members:
            trained[name].requires_grad_(False)
        try:
            if seen is None:
                then = _follow(subject, subject.model, backward=False).footprint.kept
                row = FreezeRow(pattern, before.footprint.kept - then, None)
            else:
                _, after = _captured(subject, subject.model, [])
                assert after is not None
                pairs = ((seen.before, after.before), (seen.after, after.after))
                row = FreezeRow(pattern, *(a.saved.kept - b.saved.kept for a, b in pairs))
        finally:
            for name in members:
                trained[name].requires_grad_(True)
        if row.eager > 0 or (row.fxmem or 0) > 0:
            found.append(row)
    return tuple(sorted(found, key=lambda row: -(row.eager if row.fxmem is None else row.fxmem)))


def _kept_for(
    trained: Mapping[str, Tensor], gm: nn.Module | None, ours: SavedTensors | None, eager: SavedTensors
) -> dict[str, dict[int, int]]:
    """By parameter, the storages that the calls which read it keep, with their bytes."""
    places: dict[str, dict[int, int]] = {}
    for tensor in (ours or eager).tensors:
        if tensor.kind == "activation":
            by_node = ours is not None and isinstance(gm, OptimizedModule)
            places.setdefault(tensor.node if by_node else tensor.module, {})[tensor.storage] = tensor.nbytes
    read = {}
    for name in trained:
        if ours is None or not isinstance(gm, OptimizedModule):
            readers: tuple[str, ...] = (name.rpartition(".")[0],)
        else:
            readers = gm.grad_flow.parameters[name].used_by
        read[name] = {storage: n for reader in readers for storage, n in places.get(reader, {}).items()}
    return read


def _with_freed(rows: tuple[NodeRow, ...], freezing: tuple[FreezeRow, ...]) -> tuple[NodeRow, ...]:
    """The rows, with the bytes in the remedies that freezing was tried for."""
    freed = {f"freezing {f.parameter} ": f for f in freezing}
    told = []
    for row in rows:
        found = next((f for start, f in freed.items() if row.remedy and row.remedy.startswith(start)), None)
        nbytes = 0 if found is None else found.eager if found.fxmem is None else found.fxmem
        told.append(replace(row, remedy=f"freezing {found.parameter} frees {human(nbytes)}") if found and nbytes else row)
    return tuple(told)


def _parameters(model: nn.Module, gm: nn.Module | None, dtype: torch.dtype | None) -> tuple[ParameterStatus, ...]:
    flow: GradFlow = GradFlow({}, {}) if gm is None else vars(gm)["grad_flow"]
    readers = {name: p.used_by for name, p in flow.parameters.items()}
    return tuple(
        ParameterStatus(name, p.requires_grad, _nbytes(p, dtype), readers.get(name, ())) for name, p in model.named_parameters()
    )


def _optimizer(model: nn.Module, options: Options, notes: list[str]) -> OptimizerState | None:
    named = [(n, _as(p, options.dtype)) for n, p in model.named_parameters() if p.requires_grad]
    if not named:
        return None
    chosen = options.optimizer
    running = chosen if isinstance(chosen, Adapprox) else None
    # Found again by identity, so in the dtype that it has.
    costs = account(named if running is None else model, optimizer=running)
    rows = tuple(
        OptimizerRow(r.name, r.adamw, r.rank_one, r.cap, r.reason, r.now if running and running.state else None, r.temporaries)
        for r in costs.rows
    )
    if running is not None and not running.state:
        return OptimizerState("Adapprox", costs.cap, rows)
    if isinstance(chosen, str) and chosen.lower() == "adapprox":
        return OptimizerState("Adapprox", costs.cap, rows)
    name, nbytes = observed_state(chosen, [p for _, p in named])
    return OptimizerState(name, nbytes, rows)


def _check_measurable(subject: _Subject) -> None:
    if not subject.options.measured:
        return
    if subject.options.device is not None or subject.options.dtype is not None:
        raise ArgumentError(
            "a real run takes the model as it is.",
            where="measured",
            remedy="Move the model and the inputs to that device and dtype instead of passing device or dtype.",
        )
    tensors = {**dict(subject.model.named_parameters()), **dict(subject.model.named_buffers())}
    for name, tensor in (*tensors.items(), *(("example_args", t) for t in subject.inputs())):
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            raise ArgumentError("this tensor has no numbers to measure with.", where=name, remedy="Leave measured out.")


@contextmanager
def _autocast(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast, also for a device that is not there, where torch's own switches itself off."""
    if dtype is None:
        yield
        return
    if device != "cuda" or torch.cuda.is_available():
        with torch.autocast(device, dtype):
            yield
        return
    old = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, old[0])
        torch.set_autocast_dtype(device, old[1])


def _describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    parts = [_shape(t) for t in args if isinstance(t, Tensor)]
    parts += [f"{name} {_shape(t)}" for name, t in kwargs.items() if isinstance(t, Tensor)]
    return ", ".join(parts)


def _shape(tensor: Tensor) -> str:
    size = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{size} {_name(tensor.dtype)}{' requires grad' if tensor.requires_grad else ''}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _nbytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * (dtype.itemsize if dtype and tensor.is_floating_point() else tensor.element_size())


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The parameter's shape in the dtype to report for."""
    same = dtype is None or dtype == tensor.dtype or not tensor.is_floating_point()
    return tensor if same else torch.empty(tensor.shape, dtype=dtype, device="meta", requires_grad=tensor.requires_grad)
