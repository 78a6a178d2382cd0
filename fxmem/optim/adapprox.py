"""Adapprox: Adam-like updates whose second moment is kept as a randomized low-rank factorization.

Source: Zhao, Li, Gu, Zheng, Kölker, Wang, Yuan, "Adapprox: Adaptive Approximation in Adam Optimization via Randomized
Low-Rank Matrices", arXiv 2403.14958 (2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import torch
from torch import Tensor

from fxmem.errors import OptimizerError
from fxmem.optim import lowrank
from fxmem.optim.layout import Layout, layout
from fxmem.optim.shards import Shards, full_shape, local_part, shards_of, wrap_factor

_FACTORS = ("q", "u")
_RANK_POLICIES = ("spectrum", "paper")
# Elements of one row block: its three or four operands stay in a core's L2 cache, or fill a GPU.
_BLOCK = {"cpu": 2**17}
_BLOCK_ELSEWHERE = 2**20
# A normalized gradient up to this size is kept between the two sweeps of an update instead of being computed again.
_KEPT_BYTES = 10 * 2**20
# Tensors of a factor's size alive at once while factors are found and turned.
_FACTOR_COPIES = 4
# Squares of larger gradients overflow float32 once they are summed up in a factor.
_SQUARE_LIMIT = 1e30
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Hyper:
    """The numbers of one step for one parameter group.

    Args:
        lr: learning rate α.
        beta1: decay of the first moment; 0 keeps none.
        beta2: decay of the second moment.
        eps: ε, added to the root of the second moment.
        weight_decay: decoupled weight decay λ.
        clip: d, the largest root mean square of a normalized gradient; inf never clips.
        guidance: largest factor by which the first moment is scaled where it agrees with the gradient; 0 is off.
        sign: 1 to minimize, -1 to maximize.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float = 0.0
    clip: float = 1.0
    guidance: float = 0.0
    sign: float = 1.0


class Rows:
    """A tensor seen as a matrix that is read and written in row blocks, whatever its strides.

    Args:
        tensor: at least 1-D; its first dimension are the rows, the others together the columns.
        dtype: what to compute in.
    """

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        try:
            tensor = tensor.view(tensor.shape[0], -1)
            viewed = True
        except RuntimeError:
            viewed = False
        self.tensor = tensor
        self.dtype = dtype
        self.in_place = viewed and tensor.dtype == dtype

    def read(self, i: int, j: int) -> Tensor:
        """Rows i..j as a matrix; a view of the tensor if `in_place`."""
        return self.tensor[i:j].reshape(j - i, -1).to(self.dtype)

    def write(self, i: int, j: int, value: Tensor) -> None:
        """Store what `read` returned, after it was changed in place."""
        if not self.in_place:
            part = self.tensor[i:j]
            part.copy_(value.view(part.shape))


@dataclass
class Matrix:
    """One matrix to update: its weight, gradient and first moment, and exactly one kind of second moment.

    Args:
        weight, grad: the rows held here.
        momentum: the first moment, or None.
        variance: the dense second moment, or None when it is factored.
        q, u: the factors (rows, k) and (columns, k), or None at the first step.
        rows, columns: the size of what is held here.
        seeds: what the random numbers of this step are drawn from.
    """

    weight: Rows
    grad: Rows
    momentum: Rows | None
    variance: Rows | None
    q: Tensor | None
    u: Tensor | None
    rows: int
    columns: int
    seed: int = 0
    shards: Shards = field(default_factory=Shards)


def adapprox_update(batch: list[Matrix], hyper: Hyper) -> None:
    """Update weights and first moments (and dense second moments) of equally shaped matrices, in place.

    With V = β2 max(Q Uᵀ, 0) + (1 - β2) G ∘ G in float32 row blocks, never whole:

        N = G / (sqrt(V) + ε);  N = N / max(1, RMS(N) / d);  M = β1 M + (1 - β1) N;  W = W - α (M + λ W)

    (Zhao et al., 2024, Algorithm 3; there is no bias correction.) Q Uᵀ can be negative where V cannot: it is clamped,
    so that V is at least (1 - β2) G ∘ G. With guidance M is scaled, in this step only, by 1 / (1 - θ + ε) with θ the
    cosine of N and M, bounded by `hyper.guidance`: at the first step θ = 1, and the paper gives no bound.

    Args:
        batch: the matrices; all have the same local size and the same kind of state.
        hyper: the group's numbers.
    """
    _Update(batch, hyper).run()


class _Update:
    def __init__(self, batch: list[Matrix], hyper: Hyper) -> None:
        self.batch = batch
        self.hyper = hyper
        self.first = first = batch[0]
        self.device = first.grad.tensor.device
        self.block = rows_per_block(self.device, len(batch), first.columns)
        self.reduce = first.shards.sum
        factored = first.q is not None and first.u is not None
        self.q = _stack([m.q for m in batch if m.q is not None]) if factored else None
        # sqrt(1 - β2) is taken out of the root: V / (1 - β2) = β2 / (1 - β2) Q Uᵀ + G ∘ G saves a sweep over the block.
        self.root = math.sqrt(1 - hyper.beta2) if first.variance is None else 1.0
        weight = hyper.beta2 / (1 - hyper.beta2)
        self.u = _stack([m.u for m in batch if m.u is not None]).mT * weight if factored else None

    def run(self) -> None:
        first, hyper = self.first, self.hyper
        size = len(self.batch) * first.rows * first.columns * 4
        kept = self._empty(first.rows) if size <= _KEPT_BYTES else None
        scratch = None if kept is not None else self._empty(min(self.block, first.rows))
        total = torch.zeros(len(self.batch), dtype=torch.float64, device=self.device)
        for i, j in self._spans():
            out = kept[:, i:j] if kept is not None else scratch[:, : j - i]  # type: ignore[index]
            total += _squared_norm(self._normalized(i, j, out, advance=True))
        total = self.reduce(total)
        count = max(1, first.shards.count(first.rows * first.columns))
        rms = (total / count).sqrt() / self.root
        # What turns the sweep's result into the clipped N: the root comes back, and the sign of ascent goes in.
        scale = hyper.sign / (rms / hyper.clip).clamp(min=1.0) / self.root
        step = scale if self.device.type != "cpu" else scale.tolist()
        dots = torch.zeros(2, len(self.batch), dtype=torch.float64, device=self.device)
        for i, j in self._spans():
            if kept is not None:
                n = kept[:, i:j]
            else:
                n = self._normalized(i, j, scratch[:, : j - i], advance=False)  # type: ignore[index]
            self._move(i, j, n, step, dots)
        if hyper.guidance and first.momentum is not None:
            del kept, scratch
            self._guide(self.reduce(dots), total * scale.square())

    def _spans(self) -> Iterator[tuple[int, int]]:
        for i in range(0, self.first.rows, self.block):
            yield i, min(i + self.block, self.first.rows)

    def _empty(self, rows: int) -> Tensor:
        return torch.empty(len(self.batch), rows, self.first.columns, device=self.device)

    def _normalized(self, i: int, j: int, out: Tensor, *, advance: bool) -> Tensor:
        """Rows i..j of `root` · G / (sqrt(V) + ε) in `out`; `advance` moves a dense second moment on."""
        grad = _stack([m.grad.read(i, j) for m in self.batch])
        if self.first.variance is not None:
            for b, m in enumerate(self.batch):
                assert m.variance is not None
                v = m.variance.read(i, j)
                if advance:
                    v.mul_(self.hyper.beta2).addcmul_(grad[b], grad[b], value=1 - self.hyper.beta2)
                    m.variance.write(i, j, v)
                torch.sqrt(v, out=out[b])
        elif self.q is None or self.u is None:
            torch.abs(grad, out=out)
        else:
            if len(self.batch) == 1:
                torch.mm(self.q[0, i:j], self.u[0], out=out[0])
            else:
                torch.bmm(self.q[:, i:j], self.u, out=out)
            out.clamp_(min=0).addcmul_(grad, grad).sqrt_()
        # Even with ε = 0 a zero gradient where V is zero moves nothing: 0 / 0 would be NaN.
        eps = max(self.hyper.eps, _SMALLEST)
        return torch.div(grad, out.add_(eps / self.root), out=out)

    def _move(self, i: int, j: int, n: Tensor, step: list[float] | Tensor, dots: Tensor) -> None:
        hyper = self.hyper
        if isinstance(step, Tensor):
            n = n.mul_(step.to(n.dtype).view(-1, 1, 1))
        for b, m in enumerate(self.batch):
            scale = 1.0 if isinstance(step, Tensor) else step[b]
            w = m.weight.read(i, j)
            if not hyper.guidance and hyper.weight_decay:
                w.mul_(1 - hyper.lr * hyper.weight_decay)
            if m.momentum is None:
                w.add_(n[b], alpha=-hyper.lr * scale)
            else:
                moment = m.momentum.read(i, j)
                moment.mul_(hyper.beta1).add_(n[b], alpha=(1 - hyper.beta1) * scale)
                m.momentum.write(i, j, moment)
                if hyper.guidance:
                    dots[0, b] += (n[b] * moment).sum(dtype=torch.float64) * scale
                    dots[1, b] += moment.square().sum(dtype=torch.float64)
                    continue
                w.add_(moment, alpha=-hyper.lr)
            m.weight.write(i, j, w)

    def _guide(self, dots: Tensor, squares: Tensor) -> None:
        hyper = self.hyper
        norms = (dots[1] * squares).sqrt()
        theta = torch.where(norms > 0, dots[0] / norms, 0.0)
        scale = (1 / (1 - theta + hyper.eps).clamp(min=1 / hyper.guidance)).tolist()
        for i, j in self._spans():
            for b, m in enumerate(self.batch):
                assert m.momentum is not None
                w = m.weight.read(i, j)
                w.mul_(1 - hyper.lr * hyper.weight_decay).add_(m.momentum.read(i, j), alpha=-hyper.lr * scale[b])
                m.weight.write(i, j, w)


@dataclass(frozen=True)
class RankPolicy:
    """How the factors of the new second moment are found.

    Args:
        rank: "spectrum", "paper" or the rank itself.
        xi: relative Frobenius error that the rank search aims at.
        cap: the largest rank.
        iterations: power iterations.
        oversampling: extra random columns of a search.
        search: whether the rank may change in this step.
    """

    rank: str | int
    xi: float
    cap: int
    iterations: int
    oversampling: int
    search: bool

    @staticmethod
    def of(group: dict[str, Any], plan: Layout, *, search: bool) -> RankPolicy:
        """The policy of a parameter group for one layout."""
        iterations = group["power_iterations"]
        if iterations is None:
            iterations = 5 if group["rank"] == "paper" else 1
        return RankPolicy(group["rank"], group["xi"], plan.cap, iterations, group["oversampling"], search)


def second_moment(batch: list[Matrix], beta2: float, limit: float | None = None) -> lowrank.RowBlocks:
    """V / (1 - β2) = β2 / (1 - β2) Q Uᵀ + G ∘ G of equally shaped matrices, as something to multiply with.

    The division spares a sweep over every block of squares.

    Args:
        batch: the matrices, whose q and u are the previous factors.
        beta2: decay.
        limit: clamp the squares here, for gradients whose squares overflow.
    """
    first = batch[0]
    device = first.grad.tensor.device
    factored = first.q is not None and first.u is not None
    block = rows_per_block(device, len(batch), first.columns)
    scratch = torch.empty(len(batch), min(block, first.rows), first.columns, device=device)

    def rows(i: int, j: int) -> Tensor:
        grad = _stack([m.grad.read(i, j) for m in batch])
        squares = torch.mul(grad, grad, out=scratch[:, : j - i])
        return squares if limit is None else squares.clamp_(max=limit)

    return lowrank.RowBlocks(
        shape=(len(batch), first.rows, first.columns),
        rows=rows,
        block=block,
        device=device,
        q=_stack([m.q for m in batch if m.q is not None]) if factored else None,
        u=_stack([m.u for m in batch if m.u is not None]) if factored else None,
        decay=beta2 / (1 - beta2),
        reduce=first.shards.sum,
    )


def factorize(batch: list[Matrix], beta2: float, policy: RankPolicy) -> lowrank.Factors:
    """The factors of the new second moment of equally shaped matrices with equally many factor columns.

    Between searches the old factors are followed by `policy.iterations` power iterations ("spectrum" and fixed ranks),
    or found again from noise at the same rank ("paper").

    Args:
        batch: the matrices.
        beta2: decay.
        policy: rank policy.
    """
    for limit in (None, _SQUARE_LIMIT):
        found = find_factors(second_moment(batch, beta2, limit), [m.seed for m in batch], policy)
        # Only an overflow can be mended; a NaN in the gradient stays one, as in AdamW.
        if bool(torch.isfinite(found.u).all()):
            break
    return replace(found, u=found.u * (1 - beta2))


def find_factors(a: lowrank.RowBlocks, seeds: list[int], policy: RankPolicy) -> lowrank.Factors:
    """The factors of a matrix in row blocks by a rank policy; `a.u` is what it starts from.

    Args:
        a: the matrices.
        seeds: one per matrix.
        policy: rank policy.
    """
    b, _, n = a.shape
    draw = lowrank.gaussian(n, seeds, a.device)
    iterations, oversampling = policy.iterations, policy.oversampling
    if policy.search and policy.rank == "paper":
        return lowrank.adaptive_s_rsi(a, policy.xi, policy.cap, draw, oversampling=oversampling, iterations=iterations)
    if policy.search:
        xi = policy.xi if policy.rank == "spectrum" else 0.0
        return lowrank.fixed_precision(a, xi, policy.cap, draw, start=a.u, oversampling=oversampling, iterations=iterations)
    assert a.u is not None
    k = a.u.shape[-1]
    if policy.rank == "paper":
        q, u = lowrank.s_rsi(a, k, draw, oversampling=min(oversampling, n - k), iterations=iterations)
    else:
        q, u = lowrank.follow(a, a.u, draw, iterations=iterations)
    return lowrank.Factors(q, u, [k] * b, [math.nan] * b)


def rows_per_block(device: torch.device, batch: int, columns: int) -> int:
    """Rows of `columns` columns that, `batch` times, make up one block on this device."""
    return max(1, _BLOCK.get(device.type, _BLOCK_ELSEWHERE) // (batch * columns))


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def _squared_norm(x: Tensor) -> Tensor:
    if len(x) == 1:
        return torch.linalg.vector_norm(x).double().square().view(1)
    return torch.linalg.vector_norm(x, dim=(1, 2)).double().square()


def largest_temporary(shape: Sequence[int], plan: Layout | None, rank: int | None = None) -> int:
    """The most bytes that a step on the CPU allocates for one parameter above its state, from its shape.

    Two phases follow each other. The update holds the normalized gradient (a block of it where it is large) and a
    block's worth of operands; the factorization a block of squares and `_FACTOR_COPIES` tensors of a factor's size.

    Args:
        shape: the parameter's.
        plan: its layout, or None when dense.
        rank: columns of its factors; None is the largest rank.
    """
    block = 4 * _BLOCK["cpu"]
    numel = math.prod(shape)
    if plan is None:
        return (4 * numel if 4 * numel <= _KEPT_BYTES else block) + 2 * block
    size = 4 * plan.rows * plan.columns
    together = max(1, _BLOCK["cpu"] // max(1, plan.rows * plan.columns))
    k = plan.cap if rank is None else rank
    factors = 4 * k * (plan.rows + plan.columns) * min(together, plan.batch if plan.stacked else together)
    update = (size if size <= _KEPT_BYTES else block) + 2 * block + factors
    return max(update, 2 * block + _FACTOR_COPIES * factors)


@dataclass
class _Job:
    """A parameter in this step: its matrices and where their new factors go."""

    param: Tensor
    state: dict[str, Any]
    layout: Layout | None
    matrices: list[Matrix]
    search: bool
    shards: Shards

    @property
    def width(self) -> int | None:
        u = self.matrices[0].u
        return None if u is None else u.shape[-1]


class Adapprox(torch.optim.Optimizer):
    """Adapprox, an Adam whose second moment is low-rank (Zhao et al., 2024, arXiv 2403.14958).

    A weight's second moment is kept as Q Uᵀ in float32, k (rows + columns) numbers in place of rows · columns. It is
    never formed whole: all work goes by row blocks. Parameters whose factors would not be smaller than AdamW's second
    moment keep a dense one, in float32. The first moment has the parameter's dtype. Every random number is drawn from
    (seed, parameter's position, step), which the state holds: a resumed run continues bit for bit, data-parallel
    processes agree, and no global generator is touched. A gradient that is inf or NaN makes weights NaN, as in AdamW.

    What differs from the paper by default: the rank comes from the spectrum of one growing basis instead of restarts,
    and the factors are followed from step to step instead of being found from noise; `rank="paper", xi=0.01` is the
    paper.

    Args:
        params: parameters, named parameters, or groups of them.
        lr: learning rate; a float or a one-element tensor.
        betas: decay of the first and second moment; a first of 0 keeps no first moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        clip_threshold: largest root mean square of a parameter's normalized gradient; inf never clips.
        rank: "spectrum" (smallest rank that meets `xi`), "paper" (restarts from noise with growing rank), or the rank
            as an integer; 0 keeps second moments dense.
        xi: relative Frobenius error that the rank search aims at, of what a step factorizes: the old factors, decayed,
            plus the squared gradient. What earlier steps cut off is not in it; against the exact moving average of
            squared gradients the error is larger.
        max_rank_fraction: largest rank as a fraction of min(rows, columns).
        interval: steps from one rank search to the next.
        power_iterations: passes of subspace iteration per step; None is 1, and 5 for `rank="paper"`.
        oversampling: extra random columns in a rank search.
        guidance: scale the first moment by 1 / (1 - θ + ε), θ its cosine with the normalized gradient.
        guidance_bound: largest such scale. Ours: the paper gives no bound, though θ = 1 at the first step.
        state_dtype: dtype of the second moment between steps.
        momentum_dtype: dtype of the first moment; None is the parameter's.
        maximize: ascend instead of descend.
        seed: of the random numbers.

    Raises:
        OptimizerError: an option out of range; a parameter that is complex, an integer, or an FSDP1 flat parameter; at
            step(), a sparse gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        clip_threshold: float = 1.0,
        *,
        rank: str | int = "spectrum",
        xi: float = 0.1,
        max_rank_fraction: float = 0.25,
        interval: int = 10,
        power_iterations: int | None = None,
        oversampling: int = 5,
        guidance: bool = False,
        guidance_bound: float = 2.0,
        state_dtype: torch.dtype | str = torch.float32,
        momentum_dtype: torch.dtype | str | None = None,
        maximize: bool = False,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "clip_threshold": clip_threshold,
            "rank": rank,
            "xi": xi,
            "max_rank_fraction": max_rank_fraction,
            "interval": interval,
            "power_iterations": power_iterations,
            "oversampling": oversampling,
            "guidance": guidance,
            "guidance_bound": guidance_bound,
            "state_dtype": _dtype_name(state_dtype),
            "momentum_dtype": None if momentum_dtype is None else _dtype_name(momentum_dtype),
            "maximize": maximize,
            "seed": seed,
        }
        _check_options(defaults)
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                # torch puts this one into the defaults of every unpickled optimizer.
                if name != "differentiable":
                    group.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as `torch.optim.Optimizer.add_param_group`.

        Args:
            param_group: "params" and the options that differ from the defaults.

        Raises:
            OptimizerError: an option out of range, or a parameter that cannot be served.
        """
        if isinstance(param_group, dict):
            for key in ("state_dtype", "momentum_dtype"):
                if param_group.get(key) is not None:
                    param_group[key] = _dtype_name(param_group[key])
            _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            for position, p in enumerate(added["params"]):
                _check_parameter(p, describe_parameter(len(self.param_groups) - 1, added, position))
        except OptimizerError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform one optimization step.

        Args:
            closure: reevaluates the model and returns the loss.

        Raises:
            OptimizerError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    # Ranks are found from the data and change shapes: Dynamo would trace a new graph whenever one does.
    @torch.compiler.disable
    def _step(self) -> None:
        position = 0
        for index, group in enumerate(self.param_groups):
            jobs = [self._job(index, group, i, position + i) for i, p in enumerate(group["params"]) if p.grad is not None]
            position += len(group["params"])
            if not jobs:
                continue
            hyper = _hyper(group)
            # Inside autocast the products would be taken in low precision.
            with torch.autocast(jobs[0].param.device.type, enabled=False):
                for bucket in _buckets(jobs):
                    _update_bucket(bucket, group, hyper)

    def _job(self, index: int, group: dict[str, Any], i: int, position: int) -> _Job:
        p = group["params"][i]
        if p.grad.is_sparse or p.grad.layout != torch.strided:
            raise OptimizerError(
                "its gradient is sparse, and Adapprox factorizes dense gradients.",
                where=describe_parameter(index, group, i),
                remedy="Make it dense (nn.Embedding(sparse=False)).",
            )
        plan = layout(full_shape(p), fraction=group["max_rank_fraction"], rank=group["rank"], itemsize=p.dtype.itemsize)
        shards = shards_of(p, plan, describe_parameter(index, group, i))
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
        if group["betas"][0] > 0 and "exp_avg" not in state:
            dtype = group["momentum_dtype"]
            state["exp_avg"] = torch.zeros_like(
                p, dtype=p.dtype if dtype is None else getattr(torch, dtype), memory_format=torch.preserve_format
            )
        if plan is None and "exp_avg_sq" not in state:
            state["exp_avg_sq"] = torch.zeros_like(
                p, dtype=getattr(torch, group["state_dtype"]), memory_format=torch.preserve_format
            )
        state["step"] += 1
        step = int(state["step"].item())
        search = plan is not None and ("q" not in state or (step - 1) % group["interval"] == 0)
        return _Job(p, state, plan, _matrices(p, state, plan, shards, group["seed"], position, step), search, shards)

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors and numbers, as `torch.optim.Optimizer.state_dict`.

        The factors of sharded parameters are widened to the largest rank by zero columns: distributed checkpoints are
        loaded into tensors whose shapes must be known before the rank is.
        """
        saved = super().state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        groups = [group for group in self.param_groups for _ in group["params"]]
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        for p, group, key in zip(params, groups, keys, strict=True):
            if key in saved["state"] and "q" in saved["state"][key]:
                shards = self._shards(p, group)
                plan = _plan(p, group)
                if shards is not None and plan is not None:
                    entry = dict(saved["state"][key])
                    for name in _FACTORS:
                        entry[name] = wrap_factor(_widen(local_part(entry[name]), plan.cap), name, p, plan, shards)
                    saved["state"][key] = entry
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, dtypes unchanged: float32 factors of bfloat16 weights stay float32.

        Args:
            state_dict: the state.

        Raises:
            OptimizerError: the groups or shapes saved are not those of this optimizer; both are listed.
        """
        final: list[dict[str, Any]] = []

        def see(optimizer: torch.optim.Optimizer, incoming: dict[str, Any]) -> None:
            _check_groups(self.param_groups, incoming["param_groups"])
            final.append(incoming)

        # Registered last: it sees what the user's own hooks made of the state.
        handle = self.register_load_state_dict_pre_hook(see)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self._restore(final[0])

    def _restore(self, saved: dict[str, Any]) -> None:
        """Undo torch's cast of all state to the parameter's dtype, and drop the padding of shards."""
        index = 0
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        for number, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                key = keys[index]
                index += 1
                if key not in saved["state"]:
                    continue
                state = self.state[p]
                for name, value in saved["state"][key].items():
                    if isinstance(value, Tensor):
                        # A copy, where torch may alias: stepping must not change what was loaded from.
                        state[name] = (value if name == "step" else value.to(device=p.device)).clone()
                _check_state(p, group, state, describe_parameter(number, group, i))
                shards, plan = self._shards(p, group), _plan(p, group)
                if shards is not None and plan is not None and "q" in state:
                    q, u = (local_part(state[name]) for name in _FACTORS)
                    # The padding is what both factors lack, and U is whole on every process.
                    used = u.abs().sum(dim=tuple(range(u.ndim - 1))).nonzero()
                    k = int(used.max()) + 1 if used.numel() else 1
                    state["q"] = wrap_factor(q[..., :k].contiguous(), "q", p, plan, shards)
                    state["u"] = wrap_factor(u[..., :k].contiguous(), "u", p, plan, shards)

    def _shards(self, p: Tensor, group: dict[str, Any]) -> Shards | None:
        shards = shards_of(p, _plan(p, group), "")
        return shards if shards.mesh is not None else None


def _plan(p: Tensor, group: dict[str, Any]) -> Layout | None:
    return layout(full_shape(p), fraction=group["max_rank_fraction"], rank=group["rank"], itemsize=p.dtype.itemsize)


def _matrices(
    p: Tensor, state: dict[str, Any], plan: Layout | None, shards: Shards, seed: int, position: int, step: int
) -> list[Matrix]:
    weight, grad = local_part(p).detach(), local_part(p.grad)  # type: ignore[arg-type]
    moment = local_part(state["exp_avg"]) if "exp_avg" in state else None
    variance = local_part(state["exp_avg_sq"]) if plan is None else None
    work = torch.promote_types(weight.dtype, torch.float32)
    if plan is None:
        parts = [(t if t is None or t.ndim else t.view(1)) for t in (weight, grad, moment, variance)]
    else:
        parts = [weight, grad, moment, None]
    if plan is None or not plan.stacked:
        if plan is not None and shards.transposed:
            parts = [None if t is None else t.flatten(1).T for t in parts]
        pieces = [parts]
        factors = [[None if plan is None or n not in state else local_part(state[n]) for n in _FACTORS]]
    else:
        assert weight.ndim == 3
        pieces = [[None if t is None else t[b] for t in parts] for b in range(weight.shape[0])]
        factors = [[None if n not in state else local_part(state[n])[b] for n in _FACTORS] for b in range(weight.shape[0])]
    matrices = []
    for b, ((w, g, m, v), (q, u)) in enumerate(zip(pieces, factors, strict=True)):
        assert w is not None
        assert g is not None
        rows = w.shape[0]
        columns = math.prod(w.shape[1:])
        matrices.append(
            Matrix(
                Rows(w, work),
                Rows(g, torch.float32),
                None if m is None else Rows(m, torch.promote_types(m.dtype, torch.float32)),
                None if v is None else Rows(v, torch.float32),
                None if q is None else q.float(),
                None if u is None else u.float(),
                rows,
                columns,
                stream_seed(seed, position, step, b + shards.offset),
                shards,
            )
        )
    return matrices


def stream_seed(seed: int, position: int, step: int, part: int) -> int:
    """One 63-bit seed of four numbers (multiply and xorshift, as in SplitMix64)."""
    value = 0
    for number in (seed, position, step, part):
        value = (value ^ number) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15
        value &= 2**64 - 1
        value ^= value >> 31
    return value >> 1


def _buckets(jobs: list[_Job]) -> Iterator[list[_Job]]:
    """Parameters that can be updated in one batch: same sizes, state, dtypes, device and shards."""
    found: dict[object, list[_Job]] = {}
    for job in jobs:
        if not job.matrices:
            continue
        m = job.matrices[0]
        dtype = None if m.momentum is None else m.momentum.tensor.dtype
        key = (
            (m.rows, m.columns, job.width, job.search, job.layout is None, job.layout and job.layout.cap),
            (job.param.dtype, dtype, job.param.device, job.shards.mesh, job.shards.dims),
        )
        found.setdefault(key, []).append(job)
    yield from found.values()


def _update_bucket(jobs: list[_Job], group: dict[str, Any], hyper: Hyper) -> None:
    matrices = [m for job in jobs for m in job.matrices]
    first = matrices[0]
    size = max(1, first.rows * first.columns)
    # A batch is what fits one block: larger matrices fill it alone.
    batch = max(1, _BLOCK.get(first.grad.tensor.device.type, _BLOCK_ELSEWHERE) // size)
    plan = jobs[0].layout
    found: list[tuple[Tensor, Tensor, int]] = []
    for start in range(0, len(matrices), batch):
        chunk = matrices[start : start + batch]
        adapprox_update(chunk, hyper)
        if plan is None:
            continue
        policy = RankPolicy.of(group, plan, search=jobs[0].search)
        factors = factorize(chunk, hyper.beta2, policy)
        if plan.stacked:
            found += [(factors.q[b], factors.u[b], factors.rank[b]) for b in range(len(chunk))]
        else:
            for b, m in enumerate(chunk):
                k = factors.rank[b]
                m.q, m.u = _cut(factors.q[b], k), _cut(factors.u[b], k)
    if plan is None:
        return
    dtype = getattr(torch, group["state_dtype"])
    done = 0
    for job in jobs:
        if plan.stacked:
            mine = found[done : done + len(job.matrices)]
            done += len(job.matrices)
            # One rank for a stack: its factors are one tensor.
            k = max(rank for _, _, rank in mine)
            q = torch.stack([_widen(q[:, :k], k) for q, _, _ in mine])
            u = torch.stack([_widen(u[:, :k], k) for _, u, _ in mine])
        else:
            q, u = job.matrices[0].q, job.matrices[0].u  # type: ignore[assignment]
        job.state["q"] = wrap_factor(q.to(dtype), "q", job.param, plan, job.shards)
        job.state["u"] = wrap_factor(u.to(dtype), "u", job.param, plan, job.shards)


def _cut(x: Tensor, k: int) -> Tensor:
    x = x[:, :k]
    # A view would keep the wider factor, or the whole batch's, alive.
    alone = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if alone else x.clone(memory_format=torch.contiguous_format)


def _widen(x: Tensor, k: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, k - x.shape[-1])) if x.shape[-1] < k else x


def _hyper(group: dict[str, Any]) -> Hyper:
    beta1, beta2 = group["betas"]
    return Hyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        clip=float(group["clip_threshold"]),
        guidance=float(group["guidance_bound"]) if group["guidance"] else 0.0,
        sign=-1.0 if group["maximize"] else 1.0,
    )


def _dtype_name(dtype: torch.dtype | str) -> str:
    name = str(dtype).removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptimizerError(f"{dtype!r} is not a floating-point dtype.", where="state_dtype / momentum_dtype")
    return name


def _check_options(options: dict[str, Any]) -> None:
    lr = options["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise OptimizerError("Tensor lr must be 1-element.", where="lr")
    rank = options["rank"]
    beta1, beta2 = options["betas"]
    iterations = options["power_iterations"]
    checks: list[tuple[str, object, bool, str]] = [
        ("lr", lr, float(lr) >= 0, "≥ 0"),
        ("betas", options["betas"], 0 <= beta1 < 1 and 0 <= beta2 < 1, "two numbers in [0, 1)"),
        ("eps", options["eps"], options["eps"] >= 0, "≥ 0"),
        ("weight_decay", options["weight_decay"], options["weight_decay"] >= 0, "≥ 0"),
        ("clip_threshold", options["clip_threshold"], options["clip_threshold"] > 0, "> 0 (inf never clips)"),
        (
            "rank",
            rank,
            rank in _RANK_POLICIES or (isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0),
            '"spectrum", "paper" or an integer ≥ 0',
        ),
        ("xi", options["xi"], 0 <= options["xi"] < 1, "in [0, 1)"),
        ("max_rank_fraction", options["max_rank_fraction"], 0 < options["max_rank_fraction"] <= 1, "in (0, 1]"),
        ("interval", options["interval"], options["interval"] >= 1, "≥ 1"),
        ("power_iterations", iterations, iterations is None or iterations >= 1, "None or ≥ 1"),
        ("oversampling", options["oversampling"], options["oversampling"] >= 0, "≥ 0"),
        ("guidance_bound", options["guidance_bound"], options["guidance_bound"] >= 1, "≥ 1"),
    ]
    for name, value, fine, expected in checks:
        if not fine:
            raise OptimizerError(f"Invalid {name}: {value!r}.", where=name, remedy=f"It must be {expected}.")


def _check_parameter(p: Tensor, name: str) -> None:
    if p.is_complex():
        raise OptimizerError(
            "complex parameters are not supported.",
            where=name,
            remedy="Optimize torch.view_as_real of it, or give it to another optimizer.",
        )
    if not p.is_floating_point():
        raise OptimizerError(f"parameters of dtype {p.dtype} are not supported.", where=name)
    if p.layout != torch.strided:
        raise OptimizerError(f"parameters of layout {p.layout} are not supported.", where=name)
    if getattr(p, "_fsdp_flattened", False) or type(p).__name__ == "FlatParameter":
        raise OptimizerError(
            "FSDP1 flattens parameters, and a flat parameter has no rows and columns to factorize.",
            where=name,
            remedy="Shard with torch.distributed.fsdp.fully_shard (FSDP2), which keeps shapes.",
        )


def describe_parameter(index: int, group: dict[str, Any], i: int) -> str:
    """A parameter's name if the group has names, else its position and shape."""
    names = group.get("param_names")
    shape = tuple(group["params"][i].shape)
    return f"parameter {names[i]!r}" if names else f"parameter {i} of group {index} (shape {shape})"


def _describe(groups: list[dict[str, Any]]) -> str:
    parts = []
    for i, group in enumerate(groups):
        names = f": {', '.join(group['param_names'])}" if group.get("param_names") else ""
        parts.append(f"group {i} has {len(group['params'])} parameter(s){names}")
    return "; ".join(parts) or "no groups"


def _check_groups(mine: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    if [len(g["params"]) for g in mine] == [len(g["params"]) for g in saved]:
        return
    # The first clause is torch's own wording, which callers may match.
    reason = (
        "loaded state dict has a different number of parameter groups"
        if len(mine) != len(saved)
        else "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
    )
    raise OptimizerError(
        f"{reason}. Saved: {_describe(saved)}. This optimizer: {_describe(mine)}.",
        remedy="Rebuild the groups as they were when the state was saved, load, and change them after that.",
    )


def _check_state(p: Tensor, group: dict[str, Any], state: dict[str, Any], name: str) -> None:
    plan, shape = _plan(p, group), tuple(full_shape(p))
    expected: dict[str, tuple[int, ...]] = {key: shape for key in ("exp_avg", "exp_avg_sq") if key in state}
    if plan is not None:
        if "exp_avg_sq" in state:
            raise OptimizerError(
                "the loaded state holds a dense second moment (Adam's?) where this optimizer keeps factors.",
                where=name,
                remedy="Convert the optimizer that it came from with fxmem.adapt_optimizer.",
            )
        if "q" in state:
            stack = (plan.batch,) if plan.stacked else ()
            k = state["u"].shape[-1]
            flip = shards_of(p, plan, name).transposed
            sides = (plan.columns, plan.rows) if flip else (plan.rows, plan.columns)
            expected |= {"q": (*stack, sides[0], k), "u": (*stack, sides[1], k)}
    elif "q" in state:
        raise OptimizerError("the loaded state holds factors where this optimizer keeps a dense second moment.", where=name)
    for key, want in expected.items():
        if tuple(state[key].shape) != want:
            raise OptimizerError(
                f"the loaded {key} has shape {tuple(state[key].shape)}, the parameter needs {want}.",
                where=name,
                remedy="Load the state into an optimizer over the parameters that it was saved for, in the same order.",
            )
