"""Turn a torch Adam or AdamW, fresh or in the middle of a run, into an Adapprox."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxmem.errors import OptimizerError
from fxmem.optim import lowrank
from fxmem.optim.adapprox import (
    Adapprox,
    RankPolicy,
    Rows,
    describe_parameter,
    find_factors,
    rows_per_block,
    stream_seed,
)
from fxmem.optim.layout import Layout, layout
from fxmem.optim.shards import Shards, full_shape, local_part, shards_of, wrap_factor

# Options of torch's Adam that say how it computes, not what.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable", "amsgrad", "decoupled_weight_decay"}


def adapt_optimizer(optimizer: torch.optim.Optimizer, **overrides: Any) -> Adapprox:
    """An Adapprox with the groups, hyperparameters and running state of an Adam or AdamW.

    The second moment, corrected for its bias, is factorized parameter by parameter. The first moment m of the gradient
    becomes Adapprox's first moment of the normalized gradient, m̂ / (sqrt(v̂) + ε): the direction that the next Adam step
    would have taken. `step` is carried over. Parameters that Adam has no state for (frozen ones) get none. The old
    optimizer is left as it is; drop it to free its state. A learning-rate scheduler goes on driving the old one: build it
    anew on the result, with `last_epoch=old.last_epoch - 1` to continue where it was (groups keep their `initial_lr`).

    Args:
        optimizer: a torch.optim.Adam or AdamW.
        overrides: options of Adapprox, for all groups.

    Raises:
        OptimizerError: another optimizer; `amsgrad` or `differentiable`; Adam with coupled weight decay.
    """
    if not isinstance(optimizer, torch.optim.Adam):
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot be turned into Adapprox.",
            where="optimizer",
            remedy="Give a torch.optim.Adam or AdamW, or build fxmem.Adapprox from the parameters.",
        )
    adapted = Adapprox([_convert(i, g, overrides) for i, g in enumerate(optimizer.param_groups)], **overrides)
    position = 0
    for index, group in enumerate(adapted.param_groups):
        for i, p in enumerate(group["params"]):
            if optimizer.state.get(p):
                state = optimizer.state[p]
                # The group may have had other betas: the bias is that of the betas that the state was collected with.
                betas = _group_of(optimizer, p)["betas"]
                name = describe_parameter(index, group, i)
                adapted.state[p] = _carry(p, group, state, (float(betas[0]), float(betas[1])), position, name)
            position += 1
    return adapted


def _group_of(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(p is q for q in group["params"]))


def _convert(index: int, group: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    where = f"group {index}"
    for option in ("amsgrad", "differentiable"):
        if group.get(option):
            raise OptimizerError(
                f"Adapprox has no counterpart of {option}=True.",
                where=where,
                remedy=f"Rebuild Adam with {option}=False.",
            )
    decay = overrides.get("weight_decay", group["weight_decay"])
    if decay and "weight_decay" not in overrides and not group["decoupled_weight_decay"]:
        raise OptimizerError(
            "Adam adds weight_decay to the gradient, Adapprox decouples it as AdamW does.",
            where=where,
            remedy="Pass adapt_optimizer(..., weight_decay=<the decoupled decay you want>), or use AdamW.",
        )
    params: list[Any] = list(dict.fromkeys(group["params"]))
    if "param_names" in group:
        names = dict(zip(group["params"], group["param_names"], strict=True))
        params = [(names[p], p) for p in params]
    kept = {k: v for k, v in group.items() if k not in _IMPLEMENTATION and k not in ("params", "param_names")}
    kept["betas"] = tuple(float(beta) for beta in group["betas"])
    return {**kept, **overrides, "params": params}


def _carry(
    p: Tensor, group: dict[str, Any], adam: dict[str, Any], betas: tuple[float, float], position: int, name: str
) -> dict[str, Any]:
    step = float(adam["step"])
    state: dict[str, Any] = {"step": torch.tensor(step)}
    first, second = adam["exp_avg"].detach(), adam["exp_avg_sq"].detach()
    correct1 = 1 / (1 - betas[0] ** step) if step else 1.0
    correct2 = 1 / (1 - betas[1] ** step) if step else 1.0
    if group["betas"][0] > 0:
        moment = torch.zeros_like(
            p,
            dtype=p.dtype if group["momentum_dtype"] is None else getattr(torch, group["momentum_dtype"]),
            memory_format=torch.preserve_format,
        )
        target, m, v = (local_part(t).flatten() if t.ndim == 0 else local_part(t) for t in (moment, first, second))
        columns = max(1, m[:1].numel())
        block = rows_per_block(m.device, 1, columns)
        for i in range(0, m.shape[0], block):
            root = v[i : i + block].float().mul(correct2).sqrt_().add_(group["eps"])
            target[i : i + block].copy_(m[i : i + block].float().mul(correct1).div_(root))
        state["exp_avg"] = moment
    plan = layout(full_shape(p), fraction=group["max_rank_fraction"], rank=group["rank"], itemsize=p.dtype.itemsize)
    dtype = getattr(torch, group["state_dtype"])
    if plan is None:
        state["exp_avg_sq"] = (second.float() * correct2).to(dtype)
        return state
    shards = shards_of(p, plan, name)
    seeds = (group["seed"], position, int(step))
    q, u = _factors(local_part(second), correct2, plan, shards, group, seeds)
    state["q"] = wrap_factor(q.to(dtype), "q", p, plan, shards)
    state["u"] = wrap_factor(u.to(dtype), "u", p, plan, shards)
    return state


def _factors(
    second: Tensor, correct: float, plan: Layout, shards: Shards, group: dict[str, Any], seeds: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    if plan.stacked:
        parts = list(second)
    else:
        parts = [second.flatten(1).T if shards.transposed else second]
    policy = RankPolicy.of(group, plan, search=True)
    found = [
        find_factors(_blocks(part, correct, shards), [stream_seed(*seeds, b + shards.offset)], policy)
        for b, part in enumerate(parts)
    ]
    if not plan.stacked:
        k = found[0].rank[0]
        return found[0].q[0, :, :k].clone(), found[0].u[0, :, :k].clone()
    k = max((f.rank[0] for f in found), default=1)
    q, u = ([torch.nn.functional.pad(t, (0, k - t.shape[-1])) for t in ts] for ts in _first_columns(found))
    if not found:
        return second.new_zeros(0, plan.rows, k), second.new_zeros(0, plan.columns, k)
    return torch.stack(q), torch.stack(u)


def _first_columns(found: list[lowrank.Factors]) -> tuple[list[Tensor], list[Tensor]]:
    return [f.q[0, :, : f.rank[0]] for f in found], [f.u[0, :, : f.rank[0]] for f in found]


def _blocks(second: Tensor, correct: float, shards: Shards) -> lowrank.RowBlocks:
    rows = Rows(second, torch.float32)
    m, n = second.shape[0], second[:1].numel() if second.shape[0] else 1
    return lowrank.RowBlocks(
        shape=(1, m, n),
        rows=lambda i, j: (rows.read(i, j) * correct).unsqueeze(0),
        block=rows_per_block(second.device, 1, n),
        device=second.device,
        reduce=shards.sum,
    )
