"""The meter, on cases whose answer is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.measure import run


class _Hidden(torch.autograd.Function):
    """Keeps a tensor where no saved-tensor hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.hidden = torch.ones(1000)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class _Apply(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _x(n: int = 256) -> Tensor:
    return torch.randn(n, requires_grad=True)


def test_exp_keeps_its_output_which_does_not_count() -> None:
    m = fxmem.measure(_Apply(torch.exp), (_x(),))
    assert (m.kept, m.outputs, m.gradients) == (0, 1024, 1024)
    # The output, the input's gradient; the cotangent is not counted.
    assert m.peak == 2048


def test_chain_keeps_the_middle() -> None:
    m = fxmem.measure(_Apply(lambda x: torch.exp(torch.exp(x))), (_x(),))
    assert m.kept == 1024
    # Middle, output, then in backward the middle's gradient and the input's.
    assert m.peak == 4096


def test_views_share_one_storage() -> None:
    m = fxmem.measure(_Apply(lambda x: (lambda y: (y[:128].square(), y[128:].square()))(-x)), (_x(),))
    assert (m.kept, m.outputs) == (1024, 1024)


def test_output_that_is_the_input_costs_nothing() -> None:
    m = fxmem.measure(_Apply(lambda x: x.view(16, 16)), (_x(),))
    assert (m.kept, m.outputs) == (0, 0)


def test_hidden_tensors_are_seen() -> None:
    assert fxmem.measure(_Apply(_Hidden.apply), (_x(),)).kept == 4000


def test_temporaries_count_for_the_peak_alone() -> None:
    def forward(x: Tensor) -> Tensor:
        torch.zeros(100_000)
        return x + 1

    m = fxmem.measure(_Apply(forward), (_x(),))
    assert (m.kept, m.peak) == (0, 400_000)


def test_parameters_buffers_and_inputs_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16).eval())
    x = torch.randn(8, 16)
    # Linear keeps the input and its weight; batch norm its input, the hidden activation.
    assert fxmem.measure(model, x).kept == 8 * 16 * 4


def test_nothing_is_left_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    old = torch.ones(4, 4)
    model[0].weight.grad = old
    x = torch.randn(8, 4, requires_grad=True)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    state = torch.get_rng_state()
    fxmem.measure(model, x)
    assert model[0].weight.grad is old
    assert model[0].bias.grad is None
    assert x.grad is None
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert torch.equal(state, torch.get_rng_state())


def test_agrees_with_a_second_meter() -> None:
    """Storages that autograd's hooks see, for a model that hides nothing."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Sigmoid())
    x = torch.randn(2, 3, 12, 12, requires_grad=True)
    left_out = {t.untyped_storage().data_ptr() for t in (x, *model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    left_out.add(y.untyped_storage().data_ptr())
    assert fxmem.measure(model, x).kept == sum(n for pointer, n in seen.items() if pointer not in left_out)


def test_results_come_back() -> None:
    model = nn.Linear(4, 2)
    x = torch.randn(3, 4, requires_grad=True)
    result = run(model, (x,))
    assert torch.equal(result.outputs, model(x))
    assert set(result.gradients) == {"input 0", "weight", "bias"}


def test_no_backward_is_an_error() -> None:
    with pytest.raises(fxmem.ArgumentError, match="nothing in the output requires grad"):
        fxmem.measure(nn.Linear(2, 2).requires_grad_(False), torch.randn(1, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_cuda_counts_the_same() -> None:
    x = torch.randn(256, device="cuda", requires_grad=True)
    m = fxmem.measure(_Apply(lambda x: torch.exp(torch.exp(x))), (x,))
    assert (m.kept, m.outputs, m.gradients, m.peak) == (1024, 1024, 1024, 4096)
