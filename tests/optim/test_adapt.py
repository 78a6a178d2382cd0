"""Adam and AdamW turned into Adapprox in the middle of a run."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from fxmem.errors import OptimizerError
from fxmem.optim import Adapprox, adapt_optimizer


def problem(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    x = torch.randn(512, 32)
    with torch.no_grad():
        y = teacher(x) * 3

    def loss_of(m, i):
        part = slice(i * 64 % 512, i * 64 % 512 + 64)
        return (m(x[part]) - y[part]).square().mean()

    def whole(m):
        with torch.no_grad():
            return float((m(x) - y).square().mean())

    return model, loss_of, whole


def run(model, opt, loss_of, start, count):
    for i in range(start, start + count):
        opt.zero_grad()
        loss_of(model, i).backward()
        opt.step()


@pytest.mark.parametrize("steps_before", [5, 100])
@pytest.mark.parametrize("options", [{}, {"rank": "paper"}, {"rank": 2}, {"betas": (0.0, 0.999)}])
def test_a_half_trained_run_continues_without_a_jump(options, steps_before):
    model, loss_of, whole = problem()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run(model, adamw, loss_of, 0, steps_before)
    before = whole(model)
    twin = copy.deepcopy(model)
    twin_adamw = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    twin_adamw.load_state_dict(adamw.state_dict())
    opt = adapt_optimizer(adamw, **options)
    worst = before
    for i in range(20):
        run(model, opt, loss_of, steps_before + i, 1)
        worst = max(worst, whole(model))
    run(twin, twin_adamw, loss_of, steps_before, 20)
    assert worst <= before * 1.02
    # What is changed on purpose (no first moment, two columns only) may be slower, but goes on falling.
    assert whole(model) <= (before if "betas" in options or options.get("rank") == 2 else whole(twin) * 1.1)


def test_the_next_step_is_adams_where_the_state_is_exact():
    # Rank 0 keeps the second moment as it is. What remains: Adam divides the whole first moment by the newest root.
    model, loss_of, _ = problem()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    run(model, adam, loss_of, 0, 100)
    opt = adapt_optimizer(adam, rank=0, clip_threshold=float("inf"))
    for p in model.parameters():
        state = adam.state[p]
        exact = (state["exp_avg"] / (1 - 0.9**100)) / ((state["exp_avg_sq"] / (1 - 0.999**100)).sqrt() + 1e-8)
        torch.testing.assert_close(opt.state[p]["exp_avg"], exact, rtol=1e-4, atol=1e-5)
    twin, start = copy.deepcopy(model), [p.detach().clone() for p in model.parameters()]
    twin_adam = torch.optim.Adam(twin.parameters(), lr=1e-3)
    twin_adam.load_state_dict(adam.state_dict())
    run(model, opt, loss_of, 100, 1)
    run(twin, twin_adam, loss_of, 100, 1)
    for p, q, s in zip(model.parameters(), twin.parameters(), start, strict=True):
        assert float((p - q).detach().norm()) <= 0.03 * float((q - s).detach().norm())


def test_factors_are_those_of_the_second_moment():
    model, loss_of, _ = problem()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run(model, adamw, loss_of, 0, 50)
    opt = adapt_optimizer(adamw, xi=0.05)
    for p in model.parameters():
        dense = adamw.state[p]["exp_avg_sq"] / (1 - 0.999**50)
        if p.ndim == 2:
            kept = opt.state[p]["q"] @ opt.state[p]["u"].T
            cap = min(p.shape) // 4
            full = opt.state[p]["q"].shape[1] == cap
            assert float((kept - dense).norm() / dense.norm()) <= (0.05 if not full else 0.6)
        else:
            torch.testing.assert_close(opt.state[p]["exp_avg_sq"], dense)
        assert float(opt.state[p]["step"]) == 50


def test_groups_hyperparameters_names_and_order_are_kept():
    model, loss_of, _ = problem()
    model[0].weight.requires_grad_(False)
    named = dict(model.named_parameters())
    adamw = torch.optim.AdamW(
        [
            {
                "params": [(n, p) for n, p in named.items() if p.ndim == 2],
                "weight_decay": 0.3,
                "lr": 2e-3,
            },
            {"params": [(n, p) for n, p in named.items() if p.ndim < 2], "weight_decay": 0.0, "eps": 1e-6},
        ],
        lr=1e-3,
        betas=(0.8, 0.95),
        maximize=True,
        foreach=True,
    )
    run(model, adamw, loss_of, 0, 3)
    opt = adapt_optimizer(adamw, xi=0.2)
    assert isinstance(opt, Adapprox)
    for mine, theirs in zip(opt.param_groups, adamw.param_groups, strict=True):
        assert mine["param_names"] == theirs["param_names"]
        assert all(p is q for p, q in zip(mine["params"], theirs["params"], strict=True))
        for key in ("lr", "betas", "eps", "weight_decay", "maximize"):
            assert mine[key] == theirs[key]
        assert mine["xi"] == 0.2
        assert "foreach" not in mine
    assert model[0].weight not in opt.state
    run(model, opt, loss_of, 3, 2)
    assert model[0].weight not in opt.state
    assert set(adamw.state) == set(opt.state)


def test_fresh_optimizer_and_tied_parameters():
    embedding, head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
    head.weight = embedding.weight
    module = nn.ModuleDict({"embedding": embedding, "head": head})
    opt = adapt_optimizer(torch.optim.AdamW(module.parameters()))
    assert len(opt.param_groups[0]["params"]) == 1
    assert not opt.state
    head(embedding(torch.tensor([1, 2]))).sum().backward()
    opt.step()
    assert len(opt.state) == 1


def test_every_shape_and_dtype_is_carried():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(s)) for s in ((), (5,), (3, 24, 16), (8, 4, 3, 3), (1, 9), (0, 4))]
    params.append(nn.Parameter(torch.randn(32, 24).bfloat16()))
    adam = torch.optim.Adam(params)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        adam.step()
    opt = adapt_optimizer(adam)
    for p in params:
        p.grad = torch.randn_like(p)
    fresh = Adapprox(params)
    opt.step()
    fresh.load_state_dict(opt.state_dict())
    for p in params:
        assert bool(torch.isfinite(p).all())
    assert opt.state[params[-1]]["q"].dtype == torch.float32
    assert opt.state[params[-1]]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "build",
    [
        lambda opt, last: CosineAnnealingLR(opt, 10, last_epoch=last),
        lambda opt, last: LambdaLR(opt, lambda epoch: 1 / (1 + epoch), last_epoch=last),
    ],
    ids=["chained", "closed form"],
)
def test_a_scheduler_built_anew_goes_on_where_the_old_one_was(build):
    def rates(adapt):
        p = nn.Parameter(torch.ones(32, 24))
        opt = torch.optim.AdamW([p], lr=0.1)
        scheduler = build(opt, -1)
        for i in range(10):
            if adapt and i == 4:
                opt = adapt_optimizer(opt)
                scheduler = build(opt, scheduler.last_epoch - 1)
            yield opt.param_groups[0]["lr"]
            p.grad = torch.ones_like(p)
            opt.step()
            scheduler.step()

    assert list(rates(True)) == pytest.approx(list(rates(False)))


def test_refusals():
    p = nn.Parameter(torch.randn(8, 8))
    with pytest.raises(OptimizerError, match="SGD"):
        adapt_optimizer(torch.optim.SGD([p]))
    with pytest.raises(OptimizerError, match="amsgrad"):
        adapt_optimizer(torch.optim.AdamW([p], amsgrad=True))
    with pytest.raises(OptimizerError, match="decouples"):
        adapt_optimizer(torch.optim.Adam([p], weight_decay=0.1))
    assert adapt_optimizer(torch.optim.Adam([p], weight_decay=0.1), weight_decay=0.05).param_groups[0]["weight_decay"] == 0.05
    assert adapt_optimizer(torch.optim.Adam([p])).param_groups[0]["weight_decay"] == 0
    assert adapt_optimizer(torch.optim.AdamW([p], weight_decay=0.1)).param_groups[0]["weight_decay"] == 0.1
