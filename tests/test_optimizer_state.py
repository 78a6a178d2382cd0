"""Bytes of optimizer state from shapes against a real optimizer's, and the paper's table."""

import pytest
import torch
from torch import nn

from fxmem.optim import Adapprox
from fxmem.passes.optimizer_state import account


def gpt2(width, layers, vocabulary=50257, context=1024, device="meta"):
    shapes = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,)]
        shapes += [(width, 4 * width), (width,), (width,), (width,), (width,), (width,)]
    shapes += [(width,), (width,)]
    return [(f"p{i}", nn.Parameter(torch.zeros(s, device=device))) for i, s in enumerate(shapes)]


@pytest.mark.parametrize(
    ("width", "layers", "beta1", "at_cap", "at_one"),
    [(768, 12, 0.9, 34.5, 49.9), (1024, 24, 0.9, 33.8, 49.9), (768, 12, 0.0, 84.5, 99.9), (1024, 24, 0.0, 83.8, 99.9)],
)
def test_the_papers_percentages(width, layers, beta1, at_cap, at_one):
    report = account(gpt2(width, layers), beta1=beta1)
    assert round(report.saved(report.cap), 1) == at_cap
    assert round(report.saved(report.rank_one), 1) == at_one


def real_bytes(opt):
    return sum(t.numel() * t.element_size() for s in opt.state.values() for t in s.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta1", [0.9, 0.0])
def test_equal_to_a_real_optimizers_state(beta1, dtype):
    named = gpt2(32, 2, vocabulary=100, context=16, device="cpu")
    named += [(n, nn.Parameter(torch.randn(s))) for n, s in (("stack", (3, 24, 16)), ("conv", (8, 4, 3, 3)), ("s", ()))]
    named = [(n, nn.Parameter(p.detach().to(dtype))) for n, p in named]
    params = [p for _, p in named]
    for p in params:
        p.grad = torch.randn_like(p)
    adamw = torch.optim.AdamW(params)
    adamw.step()
    report = account(named, beta1=beta1)
    assert report.adamw == real_bytes(adamw)
    # xi = 0 asks for the largest rank; ones squared are of rank 1.
    largest = Adapprox(named, betas=(beta1, 0.999), xi=0.0)
    largest.step()
    assert report.cap == real_bytes(largest)
    for p in params:
        p.grad = torch.ones_like(p)
    smallest = Adapprox(named, betas=(beta1, 0.999), xi=0.1)
    smallest.step()
    assert report.rank_one == real_bytes(smallest)
    live = account(named, optimizer=smallest)
    assert live.now == real_bytes(smallest)
    assert live.cap == report.cap


def test_rows_say_why_and_skip_frozen_and_tied():
    model = nn.ModuleDict({"a": nn.Linear(32, 24), "b": nn.Linear(24, 24), "c": nn.Linear(24, 24)})
    model["b"].requires_grad_(False)
    model["c"].weight = model["a"].weight
    report = account(model)
    reasons = {row.name: row.reason for row in report.rows}
    assert reasons == {
        "a.weight": "factored as 24 x 32, rank 1 to 6",
        "a.bias": "dense: not a matrix",
        "c.bias": "dense: not a matrix",
    }
    assert account([("thin", nn.Parameter(torch.zeros(3, 5)))]).rows[0].reason == "dense: factors would not be smaller"
    assert account([("w", nn.Parameter(torch.zeros(32, 32)))], rank=0).rows[0].reason == "dense: rank 0 was asked for"
    assert account([("w", nn.Parameter(torch.zeros(32, 32)))], rank=5).rows[0].reason == "factored as 32 x 32, rank 5 to 5"


def test_temporaries_are_an_upper_bound_of_what_a_step_allocates():
    from torch.profiler import ProfilerActivity, profile

    for shape, rank in (((1024, 2304), 16), ((8192, 768), 64), ((300, 200), 20), ((513,), 1), ((16, 64, 64), 8)):
        p = nn.Parameter(torch.randn(shape))
        opt = Adapprox([p], rank=rank)
        p.grad = torch.randn(shape)
        opt.step()
        row = account([("p", p)], rank=rank).rows[0]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            opt.step()
        live = peak = 0
        for event in prof.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
        # A batch of small matrices fills a block whatever the size of one of them.
        assert peak <= row.temporaries <= 8 * peak + 2**21, (shape, peak, row.temporaries)


def test_the_pass_attaches_a_converted_optimizer():
    import fxmem

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 16))
    model[0].requires_grad_(False)
    x = torch.randn(4, 3, 8, 8)
    adamw = torch.optim.AdamW([{"params": [model[3].weight], "lr": 1e-3}, {"params": [model[3].bias]}], weight_decay=0.3)
    target = torch.randn(4, 16)
    for _ in range(60):
        adamw.zero_grad()
        (model(torch.randn(4, 3, 8, 8)) - target).square().mean().backward()
        adamw.step()
    optimized = fxmem.optimize(model, (x,), optimizer=adamw)
    adapprox = optimized.optimizer
    assert isinstance(adapprox, fxmem.Adapprox)
    assert [g["lr"] for g in adapprox.param_groups] == [1e-3, 1e-3]
    assert [g["weight_decay"] for g in adapprox.param_groups] == [0.3, 0.3]
    assert set(adapprox.state) == {model[3].weight, model[3].bias}
    # The next step is the one that AdamW would have taken, up to the factorization.
    old = model[3].weight.detach().clone()
    adamw.zero_grad()
    (optimized(x) - target).square().mean().backward()
    adapprox.step()
    mine = model[3].weight.detach() - old
    with torch.no_grad():
        model[3].weight.copy_(old)
    adamw.step()
    theirs = model[3].weight.detach() - old
    assert torch.cosine_similarity(mine.flatten(), theirs.flatten(), 0) > 0.95
    assert fxmem.optimize(model, (x,), optimizer=adapprox).optimizer is adapprox
    assert fxmem.optimize(model).optimizer is None
    with pytest.raises(fxmem.OptimizerError, match="optimizer: it holds 2 parameters that are not the model's"):
        fxmem.optimize(model, optimizer=torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    with pytest.raises(fxmem.OptimizerError, match="SGD cannot be turned into Adapprox"):
        fxmem.optimize(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    report = fxmem.report(model, (x,))
    assert report.optimizer is not None
    assert {r.parameter for r in report.optimizer.rows} == {"3.weight", "3.bias"}
    assert "optimizer state: AdamW" in str(report)
