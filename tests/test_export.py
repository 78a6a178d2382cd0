"""Whole models by torch.export: ATen's forms of every rule, the model's own tensors, shapes and modes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import cases
import pytest
import torch
import torch.nn.functional as F
from oracle import compare
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem.ops import RULES
from fxmem.passes.base import FUNCTIONS

IMAGE = (4, 3, 12, 12)

FORMS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (nn.Linear(8, 4), (4, 8)),
    "conv1d": (nn.Conv1d(3, 4, 3, stride=2), (4, 3, 12)),
    "conv2d": (nn.Conv2d(3, 4, 3, padding=1), IMAGE),
    "conv2d same": (nn.Conv2d(3, 4, 3, padding="same"), IMAGE),
    "conv2d reflect": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect", bias=False), IMAGE),
    "conv3d": (nn.Conv3d(3, 4, 3), (2, 3, 5, 5, 5)),
    "conv_transpose1d": (nn.ConvTranspose1d(3, 4, 3), (4, 3, 12)),
    "conv_transpose2d": (nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), IMAGE),
    "conv_transpose3d": (nn.ConvTranspose3d(3, 4, 2), (2, 3, 4, 4, 4)),
    "batch_norm": (nn.BatchNorm2d(3).eval(), IMAGE),
    "relu": (F.relu, IMAGE),
    "relu in place": (nn.ReLU(inplace=True), IMAGE),
    "leaky_relu": (nn.LeakyReLU(0.2), IMAGE),
    "leaky_relu in place": (nn.LeakyReLU(0.2, inplace=True), IMAGE),
    "rrelu": (nn.RReLU().eval(), IMAGE),
    "relu6": (nn.ReLU6(), IMAGE),
    "hardtanh": (F.hardtanh, IMAGE),
    "hardtanh in place": (nn.Hardtanh(-0.5, 0.5, inplace=True), IMAGE),
    "hardsigmoid": (nn.Hardsigmoid(), IMAGE),
    "threshold": (nn.Threshold(0.1, 0.3), IMAGE),
    "hardshrink": (nn.Hardshrink(), IMAGE),
    "softshrink": (nn.Softshrink(), IMAGE),
    "abs": (torch.abs, IMAGE),
    "max_pool1d": (nn.MaxPool1d(3, 2), (4, 3, 12)),
    "max_pool2d": (nn.MaxPool2d(3, 2, 1, ceil_mode=True), IMAGE),
    "max_pool3d": (nn.MaxPool3d(2), (2, 3, 4, 4, 4)),
    "adaptive_max_pool2d": (nn.AdaptiveMaxPool2d(5), IMAGE),
    "adaptive_max_pool3d": (nn.AdaptiveMaxPool3d(2), (2, 3, 5, 5, 5)),
    "avg_pool1d": (nn.AvgPool1d(3), (4, 3, 12)),
    "avg_pool2d": (nn.AvgPool2d(3, 2, 1), IMAGE),
    "avg_pool3d": (nn.AvgPool3d(2), (2, 3, 4, 4, 4)),
    "adaptive_avg_pool2d": (nn.AdaptiveAvgPool2d(5), IMAGE),
    "dropout": (nn.Dropout(0.4), IMAGE),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    layer, shape = copy.deepcopy(FORMS[name][0]), FORMS[name][1]
    inner = layer if isinstance(layer, nn.Module) else cases.Call(layer)
    # What comes before keeps its output and what comes after its input, neither of which is the layer's.
    model = nn.Sequential(cases.Call(torch.neg), inner, cases.Call(torch.neg)).requires_grad_(False)
    x = cases.randn(*shape)
    exported = fxmem.optimize(model, (x,), capture="export")
    # Padding that reflects is a call of its own.
    assert sum(d.rewritten for d in exported.decisions) == 1 + ("reflect" in name), exported.decisions
    eager, ours = compare(model, exported, (x,))
    if name != "linear":
        assert ours.measurement.kept < eager.measurement.kept
    _, symbolic = compare(model, fxmem.optimize(model, (x,), capture="symbolic"), (x,))
    assert ours.measurement.kept == symbolic.measurement.kept
    larger = cases.randn(shape[0] + 3, *shape[1:], seed=1)
    compare(model, exported, (larger,))


def test_every_rule_has_an_overload() -> None:
    found = {rule.name for target, (rule, _) in FUNCTIONS.items() if isinstance(target, torch._ops.OpOverload)}
    # Batch norm's arguments come in another order in ATen: capture turns it into the functional form. Interpolation by area
    # is adaptive pooling there.
    assert found | {"batch_norm", "interpolate"} == {rule.name for rule in RULES if rule.functions}


class Conditional(nn.Module):
    """What only export can follow: shapes that steer the code, and optional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU())
        self.tied = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8)
        self.head.weight = self.tied.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor | None = None, *, double: bool = False) -> dict[str, Any]:
        if x.dim() == 2:
            x = x[None]
        x = F.dropout(self.front(x), 0.3, self.training).mean(-1) * self.scale
        for _ in range(x.dim()):
            x = F.relu(self.tied(x))
        if mask is not None:
            x = x * mask
        with torch.no_grad():
            norm = x.square().sum()
        out = self.head(x) * (2 if double else 1)
        return {"out": (out, x.mean() + torch.arange(3)), "norm": norm}


X = cases.randn(4, 3, 12)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_whole_model(train: bool, frozen: bool) -> None:
    model = Conditional().train(train).requires_grad_(not frozen)
    exported = fxmem.optimize(model, (X,), capture="export")
    assert list(exported.state_dict()) == list(model.state_dict())
    assert [n for n, _ in exported.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(model.parameters(), exported.parameters(), strict=True))
    assert exported.tied.weight is exported.head.weight
    eager, ours = compare(model, exported, (X,))
    assert ours.measurement.kept < eager.measurement.kept
    assert exported.saved[1].kept == ours.measurement.kept
    compare(model, exported, (), {"x": X, "mask": None})
    compare(model, exported, (cases.randn(9, 3, 12),))
    for parameter in list(model.parameters())[:3]:
        parameter.requires_grad_(frozen)
    compare(model, exported, (X,))


def test_arguments() -> None:
    model, mask = Conditional(), torch.rand(4, 8)
    exported = fxmem.optimize(model, (X,), {"mask": mask, "double": True}, capture="export")
    compare(model, exported, (X, mask), {"double": True})
    assert exported(X, mask=mask, double=True)["out"][0].shape == (4, 8)
    for args, kwargs in (((X, mask), {}), ((X,), {"double": True}), ((X, 3), {"double": True})):
        with pytest.raises(fxmem.ArgumentError, match="holds for the arguments that it was captured with"):
            exported(*args, **kwargs)
    for x, m in ((cases.randn(4, 3, 13), mask), (X[:2], mask), (X[0], mask)):
        with pytest.raises(fxmem.ArgumentError, match=r"takes shape .* here, not"):
            exported(x, m, double=True)
    with pytest.raises(TypeError):
        exported(X, mask, what=1)


def test_modes_are_fixed() -> None:
    # pytorch/pytorch#151726
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), torch.randn(8, 4)
    exported = fxmem.optimize(model, (x,), capture="export")
    assert exported.train() is exported
    with pytest.raises(fxmem.CaptureError, match=r"1: torch\.export fixed this module to train mode.*capture='regions'"):
        exported.eval()
    assert exported.training
    compare(model, exported, (x,))
    exported.get_submodule("2").eval()
    with pytest.raises(fxmem.CaptureError, match="2: torch"):
        exported(x)
    free = fxmem.optimize(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (x,), capture="export")
    assert free.eval().train() is free


def test_equal_sizes_stay_equal() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 4)

        def forward(self, pairs: tuple[Tensor, Tensor], extra: dict[str, Tensor]) -> list[Tensor]:
            return [self.layer(pairs[0] * pairs[1]), extra["c"].relu() + self.layer.weight]

    a, b, c = cases.randn(4, 12), cases.randn(4, 12), cases.randn(4, 12)
    exported = fxmem.optimize(Pairs(), ((a, b), {"c": c}), capture="export")
    with pytest.raises(fxmem.ArgumentError, match="takes shape"):
        exported((a, b[:3]), {"c": c})
    with pytest.raises(fxmem.ArgumentError, match="takes shape"):
        exported((a, b), {"c": torch.cat([c, c])})
    assert exported((a[:2], b[:2]), {"c": c})[0].shape == (2, 4)


def test_copies() -> None:
    model = Conditional()
    exported = fxmem.optimize(model, (X,), capture="export")
    twin = copy.deepcopy(exported)
    assert isinstance(twin, fxmem.OptimizedModule)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    compare(exported, twin, (X,))
    with pytest.raises(fxmem.CaptureError):
        twin.eval()
    with pytest.raises(fxmem.CaptureError, match=r"cannot be pickled.*Save the state_dict"):
        pickle.dumps(exported)


def test_errors() -> None:
    with pytest.raises(fxmem.ArgumentError, match=r"torch\.export needs example inputs"):
        fxmem.optimize(Conditional(), capture="export")
    with pytest.raises(fxmem.CaptureError, match=r"torch\.export cannot follow the forward.*capture='regions'"):
        fxmem.optimize(cases.Branchy(), (cases.randn(2, 3, 9, 9),), capture="export")


def test_what_export_would_lose_is_refused() -> None:
    class Checkpointing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    with pytest.raises(fxmem.CaptureError, match="keeps 1728 bytes for backward and the model's own code 0"):
        fxmem.optimize(Checkpointing(), (X,), capture="export")


def test_fullgraph_takes_the_exported_one() -> None:
    whole: Any = fxmem.optimize(Conditional(), (X,), fullgraph=True)
    assert isinstance(whole, fxmem.OptimizedModule)
    with pytest.raises(fxmem.CaptureError, match=r"test_export\.py:\d+ \(in forward\)"):
        fxmem.optimize(Conditional(), fullgraph=True)
