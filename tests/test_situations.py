"""Situations that broke other software of this kind, each against the untouched model in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
import torch.nn.functional as F
from oracle import compare, same
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fxmem
from fxmem.measure import Run, run
from fxmem.ops.conv import SelectiveConv2d
from fxmem.ops.relu import SelectiveReLU


def check(model: nn.Module, *args: Tensor) -> tuple[Run, Run]:
    """Optimizes with and without example inputs; both must agree with eager. Returns the runs of the former."""
    compare(model, fxmem.optimize(model), args)
    return compare(model, fxmem.optimize(model, args), args)


FREEZE: dict[str, Callable[[nn.Module], object]] = {
    "frozen": lambda m: m.requires_grad_(False),
    "trainable": lambda m: m,
    "half": lambda m: [p.requires_grad_(i % 2 == 0) for i, p in enumerate(m.parameters())],
}
freeze = pytest.mark.parametrize("freeze", sorted(FREEZE))


@freeze
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype, freeze: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 2))
    model = cases.fill(model).to(dtype).eval()
    FREEZE[freeze](model)
    _, ours = check(model, cases.randn(2, 3, 12, 12, dtype=dtype))
    if freeze == "frozen":
        assert ours.measurement.kept == 2 * 4 * 10 * 10 // 8 + 2 * 4 * 5 * 5


@freeze
@pytest.mark.parametrize("training", [True, False])
def test_autocast(freeze: str, training: bool) -> None:
    models = [
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 5)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)),
    ]
    for model in models:
        FREEZE[freeze](cases.fill(model).train(training))
        if freeze == "half":
            model[0].requires_grad_(False)
        x = cases.randn(2, 3, 12, 12)
        optimized = [fxmem.optimize(model), fxmem.optimize(model, (x,))]
        with torch.autocast("cpu", torch.bfloat16):
            for gm in (*optimized, fxmem.optimize(model, (x,))):
                compare(model, gm, (x,))
                assert model(x).dtype is torch.bfloat16


@freeze
@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_mode(mode: str, freeze: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode=mode), nn.ReLU(), nn.Conv2d(4, 2, 3))
    FREEZE[freeze](model)
    check(model, cases.randn(2, 3, 8, 9))


@freeze
@pytest.mark.parametrize("shape", [(2, 3, 8, 9), (3, 8, 9)], ids=str)
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_named_padding_and_unbatched_input(padding: str, shape: tuple[int, ...], freeze: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=padding, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 2, 3, padding=padding),
    )
    FREEZE[freeze](model)
    check(model, cases.randn(*shape))


class Upsample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3, stride=2), nn.ConvTranspose2d(4, 3, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x), output_size=x.size()[2:])


@freeze
def test_output_size(freeze: str) -> None:
    model = Upsample()
    FREEZE[freeze](model)
    x = cases.randn(2, 3, 9, 10)
    eager, ours = check(model, x)
    assert eager.outputs.shape == x.shape
    if freeze == "frozen":
        assert ours.measurement.kept == 0


class ScaledConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(2 * input) + 1


class ScaledNorm(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).sigmoid()


@freeze
def test_subclasses_that_override_forward(freeze: str) -> None:
    model = cases.fill(nn.Sequential(ScaledConv(3, 4, 3), ScaledNorm(4), nn.ReLU())).eval()
    FREEZE[freeze](model)
    check(model, cases.randn(2, 3, 8, 8))


def _weight_norm(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return torch.nn.utils.weight_norm(layer)


NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm hook": _weight_norm,
    "spectral_norm hook": torch.nn.utils.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
}


@freeze
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", sorted(NORMS))
def test_computed_weights(norm: str, freeze: str, training: bool) -> None:
    wrap = NORMS[norm]
    model = nn.Sequential(wrap(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Flatten(), wrap(nn.Linear(144, 5))).train(training)
    FREEZE[freeze](model)
    check(model, cases.randn(2, 3, 8, 8))


class UsesInputAgain(nn.Module):
    """The ReLU overwrites y, and y is read afterwards."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.conv, self.relu, self.form = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), form

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.form == "module":
            z = self.relu(y)
        elif self.form == "function":
            z = F.relu(y, inplace=True)
        elif self.form == "torch":
            z = torch.relu_(y)
        elif self.form == "method":
            z = y.relu_()
        else:
            y[:, 1:].relu_()
            z = y.neg()
        return z + 3 * y


@freeze
@pytest.mark.parametrize("form", ["module", "function", "torch", "method", "view"])
def test_input_of_an_inplace_relu_is_used_afterwards(form: str, freeze: str) -> None:
    model = UsesInputAgain(form)
    FREEZE[freeze](model)
    check(model, cases.randn(2, 3, 8, 8))


@pytest.mark.parametrize("inplace", [True, False])
def test_relu_of_special_values(inplace: bool) -> None:
    values = [float("inf"), -float("inf"), float("nan"), -0.0, 0.0, 1e-45, -1e-45, 1.0, -1.0] * 7
    x = torch.tensor(values, requires_grad=True)
    model = nn.Sequential(nn.Identity(), cases.Call(torch.neg), nn.ReLU(inplace), cases.Call(torch.neg))
    eager, ours = check(model, x)
    assert torch.equal(eager.outputs.signbit(), ours.outputs.signbit())
    assert torch.equal(eager.gradients["input 0"].signbit(), ours.gradients["input 0"].signbit())  # type: ignore[union-attr]
    assert ours.measurement.kept == 8  # 63 bits


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("p", [0, 0.1, 0.5, 1])
@pytest.mark.parametrize("inplace", [True, False])
def test_dropout(p: float, training: bool, inplace: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 7), nn.Dropout(p, inplace), nn.Linear(7, 5)).train(training)
    check(model, cases.randn(9, 6))


@pytest.mark.parametrize("trains", ["", "weight", "bias", "weight bias"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}],
    ids=str,
)
def test_batch_norm(options: dict[str, Any], training: bool, trains: str) -> None:
    norm = nn.BatchNorm2d(4, **options)
    model = cases.fill(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU())).train(training)
    for name, parameter in norm.named_parameters():
        parameter.requires_grad_(name in trains)
    model[0].requires_grad_(False)
    x = cases.randn(2, 3, 8, 8)
    eager, _ = check(model, x)
    counted = eager.buffers.get("1.num_batches_tracked")
    assert counted is None or int(counted) == int(training)


@pytest.mark.parametrize("training", [True, False])
def test_empty_batch(training: bool) -> None:
    """In train mode torch refuses to normalize nothing in one form and accepts it in others; we do what it does."""
    model = cases.fill(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)))
    model.train(training).requires_grad_(False)
    x = cases.randn(0, 3, 8, 8)
    gm = fxmem.optimize(model, (cases.randn(2, 3, 8, 8),))
    outputs = [m(x) for m in (model, gm)]
    assert same(*outputs)
    # The derivative of batch norm in eval mode divides by zero here in some versions of torch, so it is not run.
    without_norm = nn.Sequential(model[0], model[2], model[3])
    check(without_norm, x)


class Twice(nn.Module):
    """One module under two names, called three times, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.second = self.first
        self.act = nn.ReLU()
        self.head = nn.Linear(6, 6)
        self.head.weight = self.first[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.head(self.act(self.second(self.first(x))))).neg()


@freeze
def test_one_module_under_two_names(freeze: str) -> None:
    model = Twice()
    FREEZE[freeze](model)
    x = cases.randn(3, 6)
    check(model, x)
    gm = fxmem.optimize(model, (x,))
    assert gm.get_submodule("first") is gm.get_submodule("second")
    assert gm.get_parameter("head.weight") is gm.get_parameter("first.0.weight") is model.first[0].weight
    assert list(gm.state_dict()) == list(model.state_dict())
    assert [n for n, _ in gm.named_parameters()] == [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_rewritten_modules(when: str) -> None:
    model = cases.fill(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))).eval()
    model.requires_grad_(False)
    x = cases.randn(2, 3, 8, 8)
    calls: list[tuple[str, str]] = []

    def attach(root: nn.Module) -> None:
        for name in "0123":
            m = root.get_submodule(name)
            m.register_forward_pre_hook(lambda m, i, n=name: calls.append(("pre", n)))
            m.register_forward_hook(lambda m, i, o, n=name: calls.append(("forward", n)) or o * 2)
            m.register_full_backward_pre_hook(lambda m, g, n=name: calls.append(("backward pre", n)))
            m.register_full_backward_hook(lambda m, g, o, n=name: calls.append(("backward", n)))

    reference = copy.deepcopy(model)
    attach(reference)
    expected = run(reference, (x,))
    wanted = list(calls)
    assert len(wanted) == 16
    if when == "before":
        attach(model)
    gm = fxmem.optimize(model, (x,))
    if when == "after":
        attach(gm)
    assert isinstance(gm.get_submodule("0"), SelectiveConv2d)
    calls.clear()
    ours = run(gm, (x,))
    assert calls == wanted
    assert same(expected.outputs, ours.outputs)
    assert same(expected.gradients, ours.gradients)


def test_flags_are_kept_and_followed() -> None:
    model = cases.fill(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.ReLU())).eval()
    model[2].train()
    x = cases.randn(2, 3, 8, 8)
    flags = [m.training for m in model.modules()]
    gm = fxmem.optimize(model, (x,))
    assert [m.training for m in gm.modules()] == flags
    compare(model, gm, (x,))
    for training in (True, False):
        gm.train(training)
        assert [m.training for m in model.modules()] == flags  # the model's own are left alone
        reference = copy.deepcopy(model).train(training)
        compare(reference, gm, (x,))


def test_an_optimizer_built_before_goes_on() -> None:
    results = []
    for optimized in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)
        x = cases.randn(4, 6, requires_grad=False)
        used: nn.Module = fxmem.optimize(model, (x,)) if optimized else model
        if optimized:
            assert all(a is b for a, b in zip(model.parameters(), used.parameters(), strict=True))
        for _ in range(3):
            optimizer.zero_grad()
            used(x).square().sum().backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert same(*results)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (lambda: nn.Conv2d(3, 3, 3), (2, 3, 6, 6)),
    "transposed conv": (lambda: nn.ConvTranspose2d(3, 3, 3), (2, 3, 6, 6)),
    "batch norm": (lambda: cases.fill(nn.BatchNorm2d(3)).eval(), (2, 3, 6, 6)),
    "linear": (lambda: nn.Linear(6, 5), (4, 6)),
    "relu": (lambda: nn.ReLU(), (4, 6)),
    "max pool": (lambda: nn.MaxPool2d(2), (2, 3, 6, 6)),
    "avg pool": (lambda: nn.AvgPool2d(2), (2, 3, 6, 6)),
    "dropout in eval": (lambda: nn.Dropout(0.5).eval(), (4, 6)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # forward-mode AD loads by it
@pytest.mark.parametrize("layer", sorted(LAYERS))
def test_functional_transforms(layer: str) -> None:
    make, shape = LAYERS[layer]
    model = nn.Sequential(nn.Identity(), make()).requires_grad_(False)
    gm = fxmem.optimize(model, (cases.randn(*shape),))
    x, v = cases.randn(*shape, requires_grad=False), cases.randn(*shape, seed=1, requires_grad=False)
    results = []
    for m in (model, gm):

        def scalar(t: Tensor, m: nn.Module = m) -> Tensor:
            return m(t).pow(2).sum()

        results.append(
            [
                torch.func.vmap(m)(torch.stack([x, v])),
                torch.func.jvp(m, (x,), (v,)),
                torch.func.grad(scalar)(x),
                torch.func.vmap(torch.func.grad(scalar))(torch.stack([x, v])),
            ]
        )
    assert same(*results)


@pytest.mark.parametrize("before_a_conv", [False, True])
@pytest.mark.parametrize("options", [{"ceil_mode": True}, {"ceil_mode": True, "padding": 1}], ids=str)
def test_max_pool_with_ceil_mode(options: dict[str, Any], before_a_conv: bool) -> None:
    layers = [nn.Hardtanh(), nn.MaxPool2d(3, 2, **options), *([nn.Conv2d(3, 2, 2)] if before_a_conv else [])]
    model = nn.Sequential(*layers).requires_grad_(False)
    x = cases.randn(2, 3, 10, 12)
    _, ours = check(model, x)
    assert ours.measurement.kept == nn.MaxPool2d(3, 2, **options)(x).numel()


class Unpool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y, indices = self.pool(x.sin())
        return self.unpool(y, indices)


def test_max_pool_with_indices() -> None:
    check(Unpool(), cases.randn(2, 3, 8, 8))


def test_frozen_parameters_stay_frozen() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
    FREEZE["half"](model)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    gm = fxmem.optimize(model, (cases.randn(2, 3, 8, 8),))
    assert {name: p.requires_grad for name, p in gm.named_parameters()} == flags
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags


BACKWARD: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "max pool": lambda: nn.MaxPool1d(2),
    "avg pool": lambda: nn.AvgPool1d(2),
    "dropout": nn.Dropout,
    "conv": lambda: nn.Conv1d(3, 3, 2),
    "batch norm": lambda: nn.BatchNorm1d(3).eval(),
}


@pytest.mark.parametrize("layer", sorted(BACKWARD))
def test_second_backward_is_refused(layer: str) -> None:
    model = nn.Sequential(nn.Hardtanh(), BACKWARD[layer](), cases.Call(torch.neg)).requires_grad_(False)
    x = cases.randn(2, 3, 6)
    gm = fxmem.optimize(model, (x,))
    assert gm.decisions[-1].rewritten
    for m in (model, gm):
        y = m(x).sum()
        y.backward(retain_graph=True)
        y.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()


@pytest.mark.parametrize("layer", sorted(BACKWARD))
def test_nothing_stays_alive_after_backward(layer: str) -> None:
    model = nn.Sequential(nn.Hardtanh(), BACKWARD[layer](), cases.Call(torch.neg)).requires_grad_(False)
    x = cases.randn(2, 3, 6)
    gm = fxmem.optimize(model, (x,))
    alive = 0

    class Box:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal alive
            alive += 1
            self.tensor = tensor

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    with torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.tensor):
        y = gm(x)
    assert alive > 0
    y.sum().backward()
    assert alive == 0
    assert y.grad_fn is not None


def test_relu_is_stock_where_its_output_is_kept_anyway() -> None:
    """Not in the list, but what the list's masks must not cost: a mask beside a kept output."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    x = cases.randn(3, 6)
    eager, ours = check(model, x)
    assert ours.measurement.kept == eager.measurement.kept == 4 * 3 * 6
    assert not isinstance(fxmem.optimize(model, (x,)).get_submodule("1"), SelectiveReLU)
