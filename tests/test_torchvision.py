"""Every torchvision model that can be traced: outputs, gradients and buffers of eager, never more bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import zoo
from oracle import compare
from torch import nn

import fxmem

# On several threads eager itself differs from run to run: the gradient of an index sums in any order.
pytestmark = pytest.mark.usefixtures("one_thread")


def _input(model: nn.Module) -> None:
    model.eval().requires_grad_(False)


def _first(model: nn.Module) -> None:
    model.eval().requires_grad_(False)
    parameters = list(model.parameters())
    for parameter in parameters[: max(1, len(parameters) // 4)]:
        parameter.requires_grad_()


def _last(model: nn.Module) -> None:
    model.train().requires_grad_(False)
    parameters = list(model.parameters())
    for parameter in parameters[-max(1, len(parameters) // 4) :]:
        parameter.requires_grad_()


def _all(model: nn.Module) -> None:
    model.train().requires_grad_(True)


CASES: dict[str, Callable[[nn.Module], None]] = {"input": _input, "first": _first, "last": _last, "all": _all}
QUICK = (
    "swin3d_t",
    "fcn_resnet50",
    "resnet18",
    "densenet121",
    "mobilenet_v3_small",
    "squeezenet1_1",
    "r3d_18",
    "quantized_shufflenet_v2_x0_5",
)


def _check(name: str) -> None:
    model = zoo.build(name)
    keys = list(model.state_dict())
    for case, prepare in CASES.items():
        prepare(model)
        inputs = tuple(x.requires_grad_(case == "input") for x in zoo.inputs(name))
        optimized = fxmem.optimize(model, inputs)
        assert list(optimized.state_dict()) == keys
        eager, ours = compare(model, optimized, inputs)
        assert optimized.saved is not None
        observed = tuple(saved.kept for saved in optimized.saved)
        assert observed == (eager.measurement.kept, ours.measurement.kept), f"{case}: predicted bytes are not the measured ones"


@pytest.mark.parametrize("name", QUICK)
def test_quick(name: str) -> None:
    _check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in zoo.NAMES if name not in QUICK])
def test_every_model(name: str) -> None:
    _check(name)


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "mobilenet_v3_small", "googlenet"])
@pytest.mark.parametrize("case", CASES)
def test_structure_alone(name: str, case: str) -> None:
    model = zoo.build(name)
    CASES[case](model)
    inputs = tuple(x.requires_grad_(case == "input") for x in zoo.inputs(name))
    compare(model, fxmem.optimize(model), inputs)


def test_resnet50_frozen_keeps_sixty_times_less() -> None:
    model = zoo.build("resnet50").eval().requires_grad_(False)
    x = zoo.inputs("resnet50")[0].requires_grad_()
    eager, ours = compare(model, fxmem.optimize(model, x), (x,))
    # One bit per ReLU output, one byte per pooled element.
    sizes = [16 * 16 * 64 * 2]
    relus = 32 * 32 * 64
    for depth, inner, side in ((3, 64, 16), (4, 128, 8), (6, 256, 4), (3, 512, 2)):
        first = 4 if inner > 64 else 1
        relus += depth * side * side * (inner * 2 + inner * 4) + (first - 1) * side * side * inner
    sizes.append(relus * 2 // 8)
    assert ours.measurement.kept == sum(sizes)
    assert eager.measurement.kept >= 50 * ours.measurement.kept
    assert ours.measurement.peak < eager.measurement.peak


def test_resnet50_trainable_keeps_no_more_and_peaks_no_higher() -> None:
    model = zoo.build("resnet50").train()
    inputs = zoo.inputs("resnet50")
    eager, ours = compare(model, fxmem.optimize(model, inputs), inputs)
    assert ours.measurement.peak <= eager.measurement.peak
