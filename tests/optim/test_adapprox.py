"""The Adapprox update against a dense float64 reference, and the optimizer's behaviour as a torch optimizer."""

import copy
import io
import math

import pytest
import torch
from torch import nn

from fxmem.errors import OptimizerError
from fxmem.optim import Adapprox
from fxmem.optim import adapprox as module


class Reference:
    """The paper's update on one dense matrix in float64; the factorization is the exact SVD, cut at rank k."""

    def __init__(self, w, k, lr, betas, eps, weight_decay, d, guidance=None):
        self.w, self.k, self.lr, self.betas, self.eps = w.double().clone(), k, lr, betas, eps
        self.weight_decay, self.d, self.guidance = weight_decay, d, guidance
        self.v, self.m = torch.zeros_like(self.w), torch.zeros_like(self.w)

    def step(self, g):
        g = g.double()
        v = self.betas[1] * self.v.clamp(min=0) + (1 - self.betas[1]) * g * g
        unclamped = self.betas[1] * self.v + (1 - self.betas[1]) * g * g
        n = g / (v.sqrt() + self.eps)
        n = n / max(1.0, float(n.norm()) / math.sqrt(n.numel()) / self.d)
        self.m = self.betas[0] * self.m + (1 - self.betas[0]) * n
        scale = 1.0
        if self.guidance:
            theta = float((n * self.m).sum() / (n.norm() * self.m.norm()))
            scale = min(self.guidance, 1 / (1 - theta + self.eps)) if theta < 1 else self.guidance
        self.w = self.w - self.lr * (scale * self.m + self.weight_decay * self.w)
        if self.k is None:
            self.v = v
        else:
            left, values, right = torch.linalg.svd(unclamped, full_matrices=False)
            self.v = (left[:, : self.k] * values[: self.k]) @ right[: self.k]


def gradients(shape, steps, rank=3, seed=0):
    """Gradients whose squares have a quickly falling spectrum that drifts."""
    g = torch.Generator().manual_seed(seed)
    rows, columns = torch.rand(shape[0], rank, generator=g), torch.rand(rank, shape[1], generator=g)
    for _ in range(steps):
        yield (rows @ columns) * (1 + 0.02 * torch.randn(shape, generator=g)) * torch.randn(shape, generator=g).sign()


@pytest.mark.parametrize("kept_bytes", [0, 2**30], ids=["large", "small"])
@pytest.mark.parametrize("block", [64, 2**17])
@pytest.mark.parametrize("guidance", [False, True])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_update_is_the_papers(monkeypatch, beta1, guidance, block, kept_bytes):
    monkeypatch.setattr(module, "_BLOCK", {"cpu": block})
    monkeypatch.setattr(module, "_KEPT_BYTES", kept_bytes)
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(40, 24))
    # Rank 6 of 24 with many power iterations is the exact truncation, so the reference can take the SVD.
    options = {"rank": 6, "power_iterations": 8, "eps": 1e-6, "clip_threshold": 0.9, "weight_decay": 0.1, "lr": 0.01}
    opt = Adapprox([p], betas=(beta1, 0.9), guidance=guidance and beta1 > 0, guidance_bound=1.5, **options)
    bound = 1.5 if guidance and beta1 > 0 else None
    ref = Reference(p.detach(), 6, 0.01, (beta1, 0.9), 1e-6, 0.1, 0.9, bound)
    for g in gradients((40, 24), 25):
        p.grad = g
        opt.step()
        ref.step(g)
    moved = float((ref.w - p.detach().double()).norm() / (ref.w.norm()))
    assert moved < 2e-3
    second = opt.state[p]["q"] @ opt.state[p]["u"].T
    assert float((second.double() - ref.v).norm() / ref.v.norm()) < 1e-2


def test_dense_update_is_the_papers():
    torch.manual_seed(0)
    p, vector = nn.Parameter(torch.randn(10, 6)), nn.Parameter(torch.randn(11))
    opt = Adapprox([p, vector], lr=0.01, betas=(0.9, 0.99), rank=0, weight_decay=0.1)
    refs = [Reference(t.detach(), None, 0.01, (0.9, 0.99), 1e-8, 0.1, 1.0) for t in (p, vector)]
    for g in gradients((10, 6), 20):
        p.grad, vector.grad = g, g.flatten()[:11].clone()
        opt.step()
        for ref, t in zip(refs, (p, vector), strict=True):
            ref.step(t.grad)
    for ref, t in zip(refs, (p, vector), strict=True):
        torch.testing.assert_close(t.detach().double(), ref.w, atol=1e-5, rtol=1e-5)


def test_maximize_mirrors_minimize():
    torch.manual_seed(0)
    start = torch.randn(32, 24)
    down, up = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    a, b = Adapprox([down], lr=0.01), Adapprox([up], lr=0.01, maximize=True)
    for g in gradients((32, 24), 5):
        down.grad, up.grad = g, -g
        a.step()
        b.step()
    assert torch.equal(down, up)


def train(opt, params, seed=0, steps=10):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).to(p.dtype) * (1 + p.detach().abs())
        opt.step()


def test_batched_equals_one_by_one(monkeypatch):
    torch.manual_seed(0)
    start = [torch.randn(24, 16) for _ in range(5)]
    together, apart = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    a = Adapprox(together, lr=0.01)
    train(a, together, steps=12)
    monkeypatch.setattr(module, "_BLOCK", {"cpu": 24 * 16})
    b = Adapprox(apart, lr=0.01)
    train(b, apart, steps=12)
    for p, q in zip(together, apart, strict=True):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=1e-4)


def test_rank_follows_the_spectrum_and_stays_below_the_cap():
    p = nn.Parameter(torch.zeros(64, 48))
    opt = Adapprox([p], lr=1e-3, xi=0.05, interval=5, betas=(0.9, 0.9))
    ranks = []
    for i in range(20):
        g = torch.Generator().manual_seed(i)
        p.grad = torch.ones(64, 48) if i < 10 else torch.randn(64, 48, generator=g)
        opt.step()
        ranks.append(opt.state[p]["q"].shape[1])
    assert ranks[:10] == [1] * 10
    assert ranks[-1] == 12
    assert len(set(ranks[10:15])) == 1  # between searches the rank stays


@pytest.mark.parametrize("rank", ["spectrum", "paper", 3])
def test_rank_policies_meet_their_error(rank):
    p = nn.Parameter(torch.zeros(48, 40))
    opt = Adapprox([p], rank=rank, xi=0.05, betas=(0.9, 0.99))
    dense = torch.zeros(48, 40, dtype=torch.float64)
    for g in gradients((48, 40), 21):
        p.grad = g
        dense = 0.99 * dense + 0.01 * g.double() ** 2
        opt.step()
    factors = opt.state[p]["q"].double() @ opt.state[p]["u"].double().T
    relative = float((factors - dense).norm() / dense.norm())
    assert relative <= 0.06
    if rank == 3:
        assert opt.state[p]["q"].shape[1] == 3


def test_no_first_moment_without_beta1():
    p, v = nn.Parameter(torch.randn(32, 24)), nn.Parameter(torch.randn(7))
    opt = Adapprox([p, v], betas=(0.0, 0.999))
    train(opt, [p, v])
    assert set(opt.state[p]) == {"step", "q", "u"}
    assert set(opt.state[v]) == {"step", "exp_avg_sq"}


@pytest.mark.parametrize("layout_of", ["contiguous", "channels_last", "transposed"])
def test_strides_do_not_matter(layout_of):
    torch.manual_seed(0)
    shape = (8, 6, 3, 3) if layout_of != "transposed" else (24, 16)
    start = torch.randn(shape)
    plain = nn.Parameter(start.clone())
    if layout_of == "channels_last":
        other = nn.Parameter(start.clone().to(memory_format=torch.channels_last))
    elif layout_of == "transposed":
        other = nn.Parameter(start.T.contiguous().T)
    else:
        other = nn.Parameter(start.clone())
    a, b = Adapprox([plain], lr=0.01), Adapprox([other], lr=0.01)
    train(a, [plain])
    train(b, [other])
    torch.testing.assert_close(plain, other, atol=1e-5, rtol=1e-5)
    assert other.stride() == (start.T.contiguous().T if layout_of == "transposed" else other).stride()


def test_stack_is_its_matrices():
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(3, 32, 16))
    single = [nn.Parameter(stack.detach()[i].clone()) for i in range(3)]
    a, b = Adapprox([stack], lr=0.01, rank=2, power_iterations=4), Adapprox(single, lr=0.01, rank=2, power_iterations=4)
    for i in range(5):
        stack.grad = torch.stack(list(gradients((32, 16), 3, seed=i)))
        for j, p in enumerate(single):
            p.grad = stack.grad[j].clone()
        a.step()
        b.step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in single]), atol=1e-4, rtol=1e-4)
    assert a.state[stack]["q"].shape == (3, 32, 2)


def test_double_parameters_are_not_rounded_to_float():
    p = nn.Parameter(torch.full((8, 8), 1 + 1e-12, dtype=torch.float64))
    opt = Adapprox([p], lr=0.0, weight_decay=0.0)
    p.grad = torch.ones_like(p)
    opt.step()
    assert torch.equal(p.detach(), torch.full((8, 8), 1 + 1e-12, dtype=torch.float64))


def test_first_moment_and_factors_keep_their_dtypes():
    p = nn.Parameter(torch.randn(64, 48).bfloat16())
    opt = Adapprox([p], momentum_dtype=torch.float32, state_dtype=torch.bfloat16)
    train(opt, [p])
    assert opt.state[p]["exp_avg"].dtype == torch.float32
    assert opt.state[p]["q"].dtype == torch.bfloat16
    q = nn.Parameter(torch.randn(64, 48).bfloat16())
    opt = Adapprox([q])
    train(opt, [q])
    assert opt.state[q]["exp_avg"].dtype == torch.bfloat16
    assert opt.state[q]["q"].dtype == torch.float32


def test_inside_autocast_nothing_is_rounded():
    torch.manual_seed(0)
    start = torch.randn(32, 24)
    a, b = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    plain, cast = Adapprox([a], lr=0.01), Adapprox([b], lr=0.01)
    train(plain, [a])
    with torch.autocast("cpu", torch.bfloat16):
        train(cast, [b])
    assert torch.equal(a, b)


def test_resumes_bit_for_bit_through_every_kind_of_copy():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(s)) for s in ((32, 24), (7,), (3, 16, 16))]
    opt = Adapprox(params, lr=0.01, interval=4)
    train(opt, params, seed=0, steps=6)
    saved = io.BytesIO()
    torch.save(opt.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True, map_location="cpu")
    others = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = Adapprox(others, lr=1.0)
    resumed.load_state_dict(loaded)
    copied_opt, copied = copy.deepcopy((opt, params))
    train(opt, params, seed=1)
    train(resumed, others, seed=1)
    train(copied_opt, copied, seed=1)
    for p, q, r in zip(params, others, copied, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)


def test_state_dict_holds_tensors_and_numbers_only():
    params = [nn.Parameter(torch.randn(32, 24)), nn.Parameter(torch.randn(7))]
    opt = Adapprox(params)
    train(opt, params, steps=2)
    saved = opt.state_dict()
    for state in saved["state"].values():
        assert all(isinstance(value, torch.Tensor) for value in state.values())
    for group in saved["param_groups"]:
        for key, value in group.items():
            assert value is None or isinstance(value, (int, float, str, tuple, list)), key


def test_add_param_group_with_its_own_options():
    a, b = nn.Parameter(torch.randn(32, 24)), nn.Parameter(torch.randn(32, 24))
    opt = Adapprox([a], lr=0.01)
    train(opt, [a], steps=3)
    opt.add_param_group({"params": [b], "rank": 2, "betas": (0.0, 0.99), "state_dtype": torch.float32})
    train(opt, [a, b], steps=3)
    assert opt.state[b]["q"].shape[1] == 2
    assert "exp_avg" not in opt.state[b]
    assert float(opt.state[a]["step"]) == 6


def test_refusals_name_the_parameter():
    with pytest.raises(OptimizerError, match=r"'bad'.*complex"):
        Adapprox([("bad", nn.Parameter(torch.randn(3, 3, dtype=torch.complex64)))])
    with pytest.raises(OptimizerError, match=r"parameter 1 of group 0 \(shape \(4,\)\).*int"):
        Adapprox([nn.Parameter(torch.randn(2)), torch.ones(4, dtype=torch.int32)])
    embedding = nn.Embedding(10, 4, sparse=True)
    opt = Adapprox(embedding.named_parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match=r"'weight'.*sparse"):
        opt.step()
    good = Adapprox([nn.Parameter(torch.randn(2))])
    with pytest.raises(OptimizerError, match="complex"):
        good.add_param_group({"params": [nn.Parameter(torch.randn(3, dtype=torch.complex64))]})
    assert len(good.param_groups) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"lr": torch.ones(2)},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, 1.0)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"clip_threshold": 0.0},
        {"rank": "full"},
        {"rank": -1},
        {"rank": True},
        {"xi": 1.0},
        {"max_rank_fraction": 0.0},
        {"interval": 0},
        {"power_iterations": 0},
        {"oversampling": -1},
        {"guidance_bound": 0.5},
        {"state_dtype": torch.int8},
        {"momentum_dtype": "notadtype"},
    ],
    ids=str,
)
def test_options_out_of_range_are_named(options):
    with pytest.raises(OptimizerError, match="lr" if "lr" in options else next(iter(options)).split("_dtype")[0]):
        Adapprox([nn.Parameter(torch.randn(2, 2))], **options)


def test_loading_refuses_what_does_not_fit():
    a = nn.Parameter(torch.randn(32, 24))
    opt = Adapprox([("a", a)])
    train(opt, [a], steps=1)
    other = nn.Parameter(torch.randn(24, 32))
    with pytest.raises(OptimizerError, match=r"parameter 'a'.*\(32, 24\).*\(24, 32\)"):
        Adapprox([("b", other)]).load_state_dict(opt.state_dict())
    adamw = torch.optim.AdamW([a])
    train(adamw, [a], steps=1)
    with pytest.raises(OptimizerError, match="adapt_optimizer"):
        Adapprox([("a", a)]).load_state_dict({**opt.state_dict(), "state": adamw.state_dict()["state"]})


def test_user_hooks_see_and_change_the_loaded_state():
    a = nn.Parameter(torch.randn(32, 24))
    opt = Adapprox([a])
    train(opt, [a], steps=3)
    fresh = Adapprox([a])

    def hook(optimizer, state_dict):
        state_dict["state"][0]["step"] = torch.tensor(100.0)
        return state_dict

    fresh.register_load_state_dict_pre_hook(hook)
    fresh.load_state_dict(opt.state_dict())
    assert float(fresh.state[a]["step"]) == 100


def test_temporaries_stay_within_the_promise():
    from torch.profiler import ProfilerActivity, profile

    # 9 and 24 MiB: one kept between sweeps, one not.
    params = [nn.Parameter(torch.randn(1024, 2304)), nn.Parameter(torch.randn(8192, 768))]
    opt = Adapprox(params, rank=16, interval=3)
    g = torch.Generator().manual_seed(0)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g)
    opt.step()
    for searching in (False, False, True):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            opt.step()
        peak = _peak(prof)
        assert 2**19 < peak <= 16 * 2**20, (searching, peak)


def _peak(prof):
    live = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
