"""Lifetimes on fake tensors: bytes against the allocator's, and backward without the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from fxmem.measure import run
from fxmem.passes.fakes import Fakes
from fxmem.passes.lifetimes import follow
from fxmem.passes.walk import walk

# What kernels hold while they run goes by the number of threads.
pytestmark = pytest.mark.usefixtures("one_thread")


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return a * y + b, a * x + b


class _Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(32, 32), nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        y, z = _Twice.apply(self.layer(x), x * self.scale)  # type: ignore[no-untyped-call]
        return self.layer(y) + z.exp().mean(0)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + self.out(y)


class _Partial(nn.Module):
    """Outputs that nobody differentiates, values that reach the loss by two ways, and one that reaches it by none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.a(x).tanh()
        top, rest = self.b(y).topk(4)
        self.c(y)
        return {"loss": (top.sum() + y[:, ::2].square().sum()), "rest": rest, "y": y}


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 8)),
        torch.randn(64, 16),
    ),
    "custom": lambda: (_Custom(), torch.randn(64, 32)),
    "attention": lambda: (nn.Sequential(_Attention(), _Attention()), torch.randn(4, 16, 32)),
    "partial": lambda: (_Partial(), torch.randn(32, 16)),
    "double": lambda: (nn.Sequential(nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 4)).double(), torch.randn(8, 16).double()),
    "complex": lambda: (nn.Sequential(nn.Linear(8, 8, dtype=torch.complex64)), torch.randn(4, 8, dtype=torch.complex64)),
    "embedding": lambda: (nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)), torch.randint(50, (4, 12))),
    "lstm": lambda: (_First(nn.LSTM(8, 16, batch_first=True)), torch.randn(2, 6, 8)),
    "norms": lambda: (
        nn.Sequential(nn.Linear(16, 32), nn.Unflatten(1, (8, 4)), nn.GroupNorm(2, 8), nn.Flatten(), nn.BatchNorm1d(32)),
        torch.randn(16, 16),
    ),
}


class _First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", ["all", "input", "last"])
def test_kept_is_the_allocators(name: str, case: str) -> None:
    model, x = MODELS[name]()
    if case == "input" and not (x.is_floating_point() or x.is_complex()):
        pytest.skip("ids have no gradient")
    if case != "all":
        model.requires_grad_(False)
    if case == "last":
        for parameter in list(model.parameters())[-2:]:
            parameter.requires_grad_()
    if (name, case) == ("partial", "last"):
        pytest.skip("its last layer does not reach the loss")
    x.requires_grad_(case == "input")
    predicted = follow(model, (x,), {}, Fakes((x,)))
    truth = run(model, (x,)).measurement
    footprint = predicted.footprint
    assert (footprint.kept, footprint.outputs, footprint.gradients) == (truth.kept, truth.outputs, truth.gradients)
    assert predicted.saved.kept == footprint.kept
    if name not in ("complex", "lstm"):  # where kernels make conjugates and reordered weights for themselves
        assert footprint.peak == pytest.approx(truth.peak, rel=0.06)


@pytest.mark.parametrize("name", MODELS)
def test_backward_without_the_engine(name: str) -> None:
    model, x = MODELS[name]()
    torch.manual_seed(0)
    output = model(x)
    ends = [output["loss"]] if isinstance(output, dict) else [output]
    cotangents = [torch.randn_like(t) for t in ends]
    names = [n for n, _ in model.named_parameters()]
    expected = torch.autograd.grad(ends, list(model.parameters()), cotangents, retain_graph=True, allow_unused=True)
    seen: list[Any] = []
    gradients = walk([t.grad_fn for t in ends], list(cotangents), seen.append)
    assert len(seen) >= 2
    for wanted, which in zip(expected, names, strict=True):
        if wanted is not None:
            assert any(g.shape == wanted.shape and torch.equal(g, wanted) for g in gradients), which
    assert len(gradients) == sum(g is not None for g in expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the engine can run for CUDA here")
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"lstm", "attention"}))
def test_an_absent_device_needs_what_a_present_one_does(name: str) -> None:
    """Ops whose kernels are alike on both: the walk frees what the engine frees, when it does."""
    model, x = MODELS[name]()
    if name == "mlp":
        model[3] = nn.Identity()  # type: ignore[index]  # dropout keeps a byte there and a float here
    here = follow(model, (x,), {}, Fakes((x,))).footprint
    there = follow(model, (x,), {}, Fakes((x,), device=torch.device("cuda"))).footprint
    assert there.gradients == here.gradients
    if name != "norms":  # batch norm keeps its reserve there
        assert there.kept == here.kept
        assert there.peak == pytest.approx(here.peak, rel=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can ask the driver here")
@pytest.mark.parametrize(
    ("dtype", "mask", "kernel"),
    [
        (torch.bfloat16, False, "scaled_dot_product_flash_attention"),
        (torch.float32, False, "scaled_dot_product_efficient_attention"),
        (torch.float16, True, "scaled_dot_product_efficient_attention"),
        (torch.float64, False, "scaled_dot_product_attention"),
    ],
)
@pytest.mark.parametrize("width", [64, 60])
def test_attention_kernels_of_cuda(dtype: torch.dtype, mask: bool, kernel: str, width: int) -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, allowed: Tensor | None) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, attn_mask=allowed) * 2

    q = torch.randn(2, 4, 128, width, requires_grad=True)
    allowed = torch.ones(128, 128, dtype=torch.bool) if mask else None
    found = follow(Model(), (q, allowed), {}, Fakes((q,), device=torch.device("cuda"), dtype=dtype))
    assert kernel in {c.op for c in found.calls}
    assert found.footprint.gradients == q.numel() * dtype.itemsize
    if kernel.endswith("flash_attention") and width == 64:
        # Its output and the logarithms of its sums; q is an input. A few bytes more are the state of the generator.
        assert found.footprint.kept - q.numel() * 2 - 2 * 4 * 128 * 4 in range(64)


def test_steps_and_calls() -> None:
    model, x = MODELS["attention"]()
    found = follow(model, (x,), {}, Fakes((x,)))
    names = [c.name for c in found.calls]
    assert len(names) == len(set(names))
    assert {"0.norm", "1.qkv"} <= {c.module for c in found.calls}
    steps = found.footprint.timeline
    assert steps[0].module == "0.norm"
    assert "1.out" in [s.module for s in steps if s.phase == "backward"][:4]
    assert next(c for c in found.calls if c.module == "0.norm").saves == ("input", "own")
    assert next(c for c in found.calls if c.module == "1.norm").saves == ("input", "own")


def test_a_long_timeline_is_shortened() -> None:
    model = nn.Sequential(*(nn.Tanh() for _ in range(1500)))
    found = follow(model, (torch.randn(4, requires_grad=True),), {}, Fakes())
    assert len(found.footprint.timeline) <= 2000
    assert max(s.live for s in found.footprint.timeline) == found.footprint.peak


def test_convolutions_channels_last_and_strided() -> None:
    for options in ({}, {"stride": 2}, {"groups": 4}):
        conv = nn.Conv2d(32, 32, 3, padding=1, **options)  # type: ignore[arg-type]
        model = nn.Sequential(conv, nn.ReLU(), nn.Conv2d(32, 32, 3))
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(4, 32, 40, 40).to(memory_format=layout).requires_grad_()
            for module in (model, fxmem.optimize(model, x)):
                predicted, truth = follow(module, (x,), {}, Fakes((x,))).footprint, run(module, (x,)).measurement
                assert predicted.kept == truth.kept
                assert predicted.peak == pytest.approx(truth.peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50_32x4d", "vit_b_16"])
@pytest.mark.parametrize("case", ["all", "input", "last quarter"])
def test_the_peak_of_real_models(name: str, case: str) -> None:
    """reports/report/run.py has all ResNets and ViTs; these show that its table still holds."""
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    model = torchvision.models.get_model(name, weights=None).train(case != "input").requires_grad_(case == "all")
    if case == "last quarter":
        parameters = list(model.parameters())
        for parameter in parameters[-(len(parameters) // 4) :]:
            parameter.requires_grad_()
    x = torch.randn(2, 3, 224, 224, requires_grad=case == "input")
    report = fxmem.report(model, x, measured=True, freezing=0)
    assert report.measured is not None
    for footprint, truth in zip((report.eager, report.fxmem), report.measured, strict=True):
        assert footprint is not None
        assert truth is not None
        assert (footprint.kept, footprint.outputs, footprint.gradients) == (truth.kept, truth.outputs, truth.gradients)
        assert footprint.peak == pytest.approx(truth.peak, rel=0.02)
