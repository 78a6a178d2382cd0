"""The companion pass: which parameters' optimizer state is factored, what it costs, and the optimizer that does it.

Bytes come from shapes alone, so tensors on ``meta`` will do. Frozen parameters have no state; a tied one counts once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fxmem.errors import ArgumentError, OptimizerError
from fxmem.optim.adapprox import Adapprox, largest_temporary
from fxmem.optim.adapt import adapt_optimizer
from fxmem.optim.layout import Layout, layout

_STEP_BYTES = 4
_MOST_ELEMENTS = 2**28


@dataclass(frozen=True)
class StateRow:
    """What one parameter costs.

    Args:
        name: of the parameter.
        shape: its global shape.
        dtype: its dtype.
        layout: its matrix view, or None if its second moment is dense.
        adamw: bytes that AdamW keeps for it.
        rank_one: bytes that Adapprox keeps at rank 1.
        cap: bytes that it keeps at the largest rank.
        now: bytes that a given optimizer keeps at this moment, or None without one.
        temporaries: bytes that a step needs for it above the state, at most.
        reason: why factored or dense.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None
    adamw: int
    rank_one: int
    cap: int
    now: int | None
    temporaries: int
    reason: str


@dataclass(frozen=True)
class StateReport:
    """The rows of all trainable parameters.

    Args:
        rows: one per parameter that has state; a tied parameter once.
    """

    rows: tuple[StateRow, ...]

    @property
    def adamw(self) -> int:
        """Bytes of AdamW's state."""
        return sum(row.adamw for row in self.rows)

    @property
    def rank_one(self) -> int:
        """Bytes of Adapprox's state at rank 1."""
        return sum(row.rank_one for row in self.rows)

    @property
    def cap(self) -> int:
        """Bytes of Adapprox's state at the largest ranks."""
        return sum(row.cap for row in self.rows)

    @property
    def now(self) -> int | None:
        """Bytes of the given optimizer's state, or None without one."""
        known = [row.now for row in self.rows if row.now is not None]
        return sum(known) if len(known) == len(self.rows) else None

    @property
    def temporaries(self) -> int:
        """Bytes that a step needs above the state, at most: parameters are updated one bucket at a time."""
        return max((row.temporaries for row in self.rows), default=0)

    def saved(self, part: int) -> float:
        """The share of AdamW's bytes that `part` bytes save, in percent."""
        return 100 * (1 - part / self.adamw)


def account(
    parameters: nn.Module | Iterable[tuple[str, Tensor]],
    *,
    optimizer: Adapprox | None = None,
    beta1: float = 0.9,
    rank: str | int = "spectrum",
    max_rank_fraction: float = 0.25,
) -> StateReport:
    """Account for the state of every parameter that requires a gradient; tensors on `meta` will do.

    Args:
        parameters: a module or GraphModule, or named parameters.
        optimizer: take options and the bytes now from it; parameters that it lacks are left out.
        beta1: decay of the first moment, without an optimizer.
        rank: rank policy, without an optimizer.
        max_rank_fraction: largest rank as a fraction, without an optimizer.
    """
    options: dict[str, object] = {"betas": (beta1, 0.999), "rank": rank, "max_rank_fraction": max_rank_fraction}
    options |= {"state_dtype": "float32", "momentum_dtype": None}
    rows = []
    for name, p in _once(parameters):
        if not p.requires_grad:
            continue
        group = options
        if optimizer is not None:
            owners = [g for g in optimizer.param_groups if any(p is q for q in g["params"])]
            if not owners:
                continue
            group = owners[0]
        state = None if optimizer is None else optimizer.state.get(p, {})
        now = None
        if state is not None:
            now = sum(t.numel() * t.element_size() for t in state.values() if isinstance(t, Tensor))
        rows.append(_row(name, tuple(p.shape), p.dtype, group, now))
    return StateReport(tuple(rows))


def observed_state(optimizer: str | torch.optim.Optimizer, parameters: Sequence[Tensor]) -> tuple[str, int]:
    """Name and bytes of state of an optimizer: what it holds, or what its first step makes, run on fake tensors.

    Args:
        optimizer: the name of a class in ``torch.optim``, in any case of letters, or an optimizer.
        parameters: the parameters that train, for a name; of any device.

    Raises:
        ArgumentError: there is no such class, or it cannot be built or stepped without more arguments.
    """
    if not isinstance(optimizer, str | torch.optim.Optimizer):
        raise ArgumentError(
            f"expected an optimizer or the name of one, got {optimizer!r}.",
            where="optimizer",
            remedy='Pass "AdamW" or the like.',
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        if optimizer.state:
            return name, _bytes_of(optimizer)
    else:
        classes = {n.lower(): n for n, c in vars(torch.optim).items() if isinstance(c, type) and n != "Optimizer"}
        if optimizer.lower() not in classes:
            near = get_close_matches(optimizer, [*classes.values(), "Adapprox"]) or ["AdamW", "Adapprox"]
            raise ArgumentError(
                f"there is no optimizer {optimizer!r}.", where="optimizer", remedy=f"Near it: {', '.join(near)}."
            )
        name = classes[optimizer.lower()]
    own = isinstance(optimizer, torch.optim.Optimizer)
    shapes = Counter((tuple(p.shape), p.dtype) for p in parameters)
    try:
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                twin = _twin(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else _new(name, parameters)
                return name, _stepped(twin)
        except DataDependentOutputException:
            # It reads numbers, so it needs some; state depends on the shape alone, and one tensor at a time is enough.
            if own or any(math.prod(shape) > _MOST_ELEMENTS for shape, _ in shapes):
                raise
            return name, sum(
                count * _stepped(_new(name, [torch.zeros(shape, dtype=dtype)])) for (shape, dtype), count in shapes.items()
            )
    except Exception as error:
        text = str(error).splitlines()
        raise ArgumentError(
            f"a step of {name} to see its state fails: {text[0] if text else type(error).__name__}.",
            where="optimizer",
            remedy="Pass an optimizer that has made a step already.",
        ) from error


def _new(name: str, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, name)([_stand_in(p) for p in parameters])
    return made


def _stepped(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state after one step with zero gradients."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    return _bytes_of(optimizer)


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A fresh optimizer of the same class and options on fake parameters."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    groups = [
        {**group, "params": [_stand_in(p) for p in group["params"] if p.requires_grad]} for group in optimizer.param_groups
    ]
    twin.__setstate__({"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups})
    return twin


def _stand_in(parameter: Tensor) -> Tensor:
    # Where the tensors are makes no difference to the bytes, and CPU is always there.
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu", requires_grad=True)


def _bytes_of(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)
    )


def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> Adapprox:
    """The optimizer to train ``model`` with in the place of a given one.

    Args:
        model: the module whose parameters train.
        optimizer: an Adam or AdamW, fresh or in the middle of a run, which is converted; an Adapprox is taken as it is.

    Raises:
        OptimizerError: another optimizer, or one that holds parameters which are not the model's.
    """
    own = {id(p) for p in model.parameters()}
    strangers = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise OptimizerError(
            f"it holds {strangers} parameters that are not the model's.",
            where="optimizer",
            remedy="Build it from the parameters of the model that is optimized.",
        )
    return optimizer if isinstance(optimizer, Adapprox) else adapt_optimizer(optimizer)


def _once(parameters: nn.Module | Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    named = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters
    seen: set[int] = set()
    for name, p in named:
        if id(p) not in seen:
            seen.add(id(p))
            yield name, p


def _row(name: str, shape: Sequence[int], dtype: torch.dtype, group: dict[str, object], now: int | None) -> StateRow:
    rank, fraction = group["rank"], group["max_rank_fraction"]
    assert isinstance(rank, str | int)
    assert isinstance(fraction, float | int)
    plan = layout(shape, fraction=fraction, rank=rank, itemsize=dtype.itemsize)
    numel = math.prod(shape)
    betas, moment_dtype = group["betas"], group["momentum_dtype"]
    assert isinstance(betas, tuple | list)
    itemsize = dtype.itemsize if moment_dtype is None else getattr(torch, str(moment_dtype)).itemsize
    fixed = _STEP_BYTES + (numel * itemsize if betas[0] > 0 else 0)
    second_itemsize = getattr(torch, str(group["state_dtype"])).itemsize
    if plan is None:
        low = high = fixed + numel * second_itemsize
        reason = "dense: not a matrix" if len(shape) < 2 else "dense: factors would not be smaller"
        if rank == 0:
            reason = "dense: rank 0 was asked for"
    else:
        lowest = plan.cap if isinstance(rank, int) else 1
        low = fixed + plan.factor_elements(lowest) * second_itemsize
        high = fixed + plan.factor_elements(plan.cap) * second_itemsize
        view = f"{plan.batch} x {plan.rows} x {plan.columns}" if plan.stacked else f"{plan.rows} x {plan.columns}"
        reason = f"factored as {view}, rank {lowest} to {plan.cap}"
    return StateRow(
        name=name,
        shape=tuple(shape),
        dtype=dtype,
        layout=plan,
        adamw=_STEP_BYTES + 2 * numel * dtype.itemsize,
        rank_one=low,
        cap=high,
        now=now,
        temporaries=largest_temporary(shape, plan),
        reason=reason,
    )
