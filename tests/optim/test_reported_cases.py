"""Situations that users of low-rank and factored optimizers reported, each with what must happen here."""

import io

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from fxmem.errors import OptimizerError
from fxmem.optim import Adapprox


def steps(opt, params, count, seed=0):
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
        opt.step()


def test_state_dtype_survives_saving():
    """pytorch/ao#3314: load_state_dict casts state to the parameter's dtype."""

    def params():
        g = torch.Generator().manual_seed(0)
        return [nn.Parameter(torch.randn(s, generator=g).bfloat16()) for s in ((64, 48), (7,))]

    straight = params()
    opt = Adapprox(straight, lr=0.01)
    steps(opt, straight, 7)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    broken = [nn.Parameter(p.detach().clone()) for p in straight]
    resumed = Adapprox(broken, lr=0.01)
    resumed.load_state_dict(torch.load(buffer, weights_only=True, map_location="cpu"))
    assert {resumed.state[broken[0]][k].dtype for k in ("q", "u")} == {torch.float32}
    assert resumed.state[broken[1]]["exp_avg_sq"].dtype == torch.float32
    steps(opt, straight, 10, seed=1)
    steps(resumed, broken, 10, seed=1)
    for p, q in zip(straight, broken, strict=True):
        assert torch.equal(p, q)


SHAPES = [(), (1,), (513,), (3, 5), (1, 64), (64, 1), (4, 32, 16), (8, 4, 3, 3), (0, 4)]


@pytest.mark.parametrize("options", [{}, {"rank": "paper"}, {"rank": 100}, {"guidance": True}, {"betas": (0.0, 0.9)}])
def test_every_shape_trains(options):
    """jiaweizzhao/GaLore#2, #47, #17: flat, 3-D and convolution parameters, ranks above the smaller side."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(s)) for s in SHAPES]
    before = [p.detach().clone() for p in params]
    opt = Adapprox(params, lr=0.05, weight_decay=0.0, **options)
    for _ in range(15):
        opt.zero_grad()
        sum(p.square().sum() for p in params).backward()
        opt.step()
    for p, start in zip(params, before, strict=True):
        assert bool(torch.isfinite(p).all())
        if p.numel():
            assert float(p.detach().square().sum()) < float(start.square().sum())


def _hard(kind):
    g = torch.Generator().manual_seed(0)
    u, v = torch.randn(64, 1, generator=g), torch.randn(1, 48, generator=g)
    noise = torch.randn(64, 48, generator=g)
    return {
        "zero": torch.zeros(64, 48),
        "rank 1": u @ v,
        "tiny": 1e-30 * noise,
        "huge": 1e30 * noise,
        "largest": torch.full((64, 48), torch.finfo(torch.float32).max),
        "one entry": torch.zeros(64, 48).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(1e25)),
    }[kind]


@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("rank", ["spectrum", "paper", 4, 0])
@pytest.mark.parametrize("kind", ["zero", "rank 1", "tiny", "huge", "largest", "one entry"])
def test_finite_gradients_keep_finite_weights(kind, rank, eps):
    """jiaweizzhao/GaLore#58: factorization fails when the loss reaches zero."""
    p = nn.Parameter(torch.ones(64, 48))
    opt = Adapprox([p], lr=0.01, rank=rank, eps=eps)
    normal = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))
    for i in range(24):
        p.grad = (_hard(kind) if i % 12 < 6 else normal).clone()
        opt.step()
        assert bool(torch.isfinite(p).all()), i
        for value in opt.state[p].values():
            if kind not in ("huge", "largest", "one entry") or rank != 0:
                assert bool(torch.isfinite(value).all()), i


@pytest.mark.parametrize("rank", ["spectrum", "paper", 4, 0])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_inf_and_nan_gradients_end_in_nan_weights_as_in_adamw(bad, rank):
    p, q = nn.Parameter(torch.ones(64, 48)), nn.Parameter(torch.ones(64, 48))
    opt, adamw = Adapprox([p], rank=rank), torch.optim.AdamW([q])
    for _ in range(12):
        p.grad, q.grad = torch.full((64, 48), bad), torch.full((64, 48), bad)
        opt.step()
        adamw.step()
    assert bool(torch.isnan(q).all())
    assert bool(torch.isnan(p).all())


def test_never_more_state_than_adamw_with_bfloat16():
    """zyushun/Adam-mini#17: an 'efficient' optimizer that uses more than AdamW with bfloat16 parameters."""

    def size(opt, p):
        return sum(t.numel() * t.element_size() for t in opt.state[p].values())

    params = [nn.Parameter(torch.randn(768, 768).bfloat16()), nn.Parameter(torch.randn(6, 6).bfloat16())]
    adamw = torch.optim.AdamW(params)
    steps(adamw, params, 1)
    for xi in (0.5, 0.0):  # 0: the largest rank allowed
        opt = Adapprox(params, xi=xi)
        steps(opt, params, 1)
        for p in params:
            assert size(opt, p) < size(adamw, p)


def test_reproducible_whatever_else_draws():
    """pytorch/pytorch#77206: randomized SVD differs between calls after one seed."""
    results = []
    for extra in (0, 3):
        torch.manual_seed(extra)
        torch.rand(extra)
        p = nn.Parameter(torch.ones(32, 24))
        opt = Adapprox([p], lr=0.01, seed=5, interval=3)
        g = torch.Generator().manual_seed(0)
        for _ in range(10):
            p.grad = torch.randn(32, 24, generator=g)
            torch.rand(extra)
            before = torch.get_rng_state()
            opt.step()
            assert torch.equal(before, torch.get_rng_state())
        results.append((p.detach().clone(), opt.state[p]["q"]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_another_seed_draws_other_numbers():
    factors = []
    for seed in (0, 1):
        p = nn.Parameter(torch.ones(32, 24))
        opt = Adapprox([p], rank=2, seed=seed)
        p.grad = torch.randn(32, 24, generator=torch.Generator().manual_seed(0))
        opt.step()
        factors.append(opt.state[p]["q"])
    assert not torch.equal(*factors)


def test_grad_scaler_with_a_group_without_gradients():
    """nerfstudio#1919: GradScaler with groups whose gradients are all None."""
    a, b = nn.Parameter(torch.randn(32, 24)), nn.Parameter(torch.randn(32, 24))
    opt = Adapprox([{"params": [a]}, {"params": [b]}], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    untouched, start = b.detach().clone(), a.detach().clone()
    for scale in (1.0, float("inf")):
        opt.zero_grad()
        scaler.scale(a.square().sum() * scale).backward()
        scaler.step(opt)
        scaler.update()
    assert torch.equal(b, untouched)
    assert not torch.equal(a, start)
    assert float(opt.state[a]["step"]) == 1  # the infinite step was skipped
    assert bool(torch.isfinite(a).all())


def test_one_cycle_under_compile_does_not_recompile():
    """pytorch/pytorch#130467: OneCycleLR changes lr and betas every step."""
    torch._dynamo.reset()
    params = [nn.Parameter(torch.randn(32, 24)), nn.Parameter(torch.randn(32, 24))]
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    opt, eager = Adapprox(params, lr=0.01, interval=3), Adapprox(twins, lr=0.01, interval=3)
    schedules = [OneCycleLR(o, max_lr=0.1, total_steps=20) for o in (opt, eager)]
    compiled = torch.compile(opt.step, backend="eager")
    g = torch.Generator().manual_seed(0)
    frames = []
    for _ in range(15):
        for p, q in zip(params, twins, strict=True):
            p.grad = torch.randn(p.shape, generator=g)
            q.grad = p.grad.clone()
        compiled()
        eager.step()
        for schedule in schedules:
            schedule.step()
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert len(set(frames[1:])) == 1, frames
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


def test_groups_changed_on_resume_lists_both_layouts():
    """Lightning#6891: staged unfreezing adds parameter groups; resuming with other groups fails unclearly."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    opt = Adapprox(model[1].named_parameters(prefix="1"), lr=0.01)
    opt.add_param_group({"params": list(model[0].named_parameters(prefix="0"))})
    model(torch.randn(4, 8)).sum().backward()
    opt.step()
    one = Adapprox(model[1].named_parameters(prefix="1"), lr=0.01)
    with pytest.raises(OptimizerError) as caught:
        one.load_state_dict(opt.state_dict())
    text = str(caught.value)
    assert "Saved: group 0 has 2 parameter(s): 1.weight, 1.bias; group 1 has 2 parameter(s): 0.weight, 0.bias." in text
    assert "This optimizer: group 0 has 2 parameter(s): 1.weight, 1.bias." in text
    whole = Adapprox(model.parameters(), lr=0.01)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        whole.load_state_dict(opt.state_dict())
    other = Adapprox([{"params": [model[0].weight]}, {"params": [model[1].weight]}])
    with pytest.raises(OptimizerError, match=r"doesn't match the size.*group 0 has 1 parameter"):
        other.load_state_dict(opt.state_dict())
    one.add_param_group({"params": list(model[0].named_parameters(prefix="0"))})
    one.load_state_dict(opt.state_dict())
    assert len(one.state) == 4
