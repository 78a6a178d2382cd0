"""What users reported about software of this kind, and what fxmem does there. The oracle is the untouched model."""

from __future__ import annotations

import copy
import inspect

import cases
import pytest
import torch
from oracle import compare, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem.measure import run


@pytest.mark.parametrize(("module", "x"), cases.frozen_linear_maps(), ids=lambda v: type(v).__name__)
def test_frozen_linear_maps(module: nn.Module, x: Tensor) -> None:
    model = nn.Sequential(nn.Hardtanh(), module)
    gm = fxmem.optimize(model, (x,))
    eager, ours = compare(model, gm, (x,))
    between = 4 * x.numel()  # what the first layer hands on; its own input is the caller's
    assert eager.measurement.kept == between
    assert ours.measurement.kept == 0


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 16), (3, 5, 16)], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_frozen_linear_every_mask(shape: tuple[int, ...], bias: bool, autocast: bool) -> None:
    for mask in range(1, 8):
        layer = nn.Linear(16, 8, bias=bias)
        layer.weight.requires_grad_(bool(mask & 2))
        if bias:
            layer.bias.requires_grad_(bool(mask & 4))
        x = cases.randn(*shape, requires_grad=bool(mask & 1))
        if not any(t.requires_grad for t in (x, *layer.parameters())):
            continue
        gm = fxmem.optimize(layer, (x,))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            _, ours = compare(layer, gm, (x,))
        if not mask & 2:
            assert ours.measurement.kept == 0


def test_wide_frozen_middle() -> None:
    model, x = cases.wide_frozen_middle()
    gm = fxmem.optimize(model, (x,))
    eager, ours = compare(model, gm, (x,))
    positions = 4 * 26 * 26
    # The last layer trains and keeps its input; the two ReLUs need a bit per element of their 8 and 64 channels.
    assert ours.measurement.kept == 4 * 8 * positions + positions * (8 + 64) // 8
    assert eager.measurement.kept == 4 * positions * (8 + 64 + 8)
    decisions = {d.module: d for d in gm.decisions}
    assert all(decisions[m].rewritten for m in ("1", "2", "3", "4"))
    assert "0.weight requires grad" in decisions["0"].reason
    assert "6.weight requires grad" in decisions["6"].reason


def test_lora_a_keeps_the_input() -> None:
    x = cases.randn(8, 32)
    kept = []
    for train_a in (True, False):
        model = cases.LoRA(train_a)
        eager, ours = compare(model, fxmem.optimize(model, (x,)), (x,))
        assert eager.measurement.kept == ours.measurement.kept  # torch's linear is right already: honestly nothing saved
        kept.append(ours.measurement.kept)
    of_b = 4 * 8 * 4  # B trains and keeps A's output
    assert kept == [4 * x.numel() + of_b, of_b]


@pytest.mark.parametrize("pool", cases.pools(), ids=str)
@pytest.mark.parametrize("before_a_conv", [False, True])
def test_pool_indices(pool: nn.Module, before_a_conv: bool) -> None:
    x = cases.randn(2, 3, 17, 19)
    layers = [nn.Hardtanh(), pool, *([nn.Conv2d(3, 3, 2)] if before_a_conv else [])]
    model = nn.Sequential(*layers).requires_grad_(False)
    eager, ours = compare(model, fxmem.optimize(model, (x,)), (x,))
    made = pool(x).numel()
    assert ours.measurement.kept == made
    assert eager.measurement.kept == 4 * x.numel() + 8 * made + before_a_conv * 4 * made


def test_pool_that_returns_its_indices() -> None:
    x = cases.randn(2, 3, 17, 19)
    model = nn.Sequential(nn.MaxPool2d(2, return_indices=True))
    gm = fxmem.optimize(model, (x,))
    compare(model, gm, (x,))
    assert len(gm(x)) == 2
    assert not gm.decisions[0].rewritten


@pytest.mark.parametrize("relu_in_place", [True, False])
def test_relu_then_dropout(relu_in_place: bool) -> None:
    model, x = cases.relu_then_dropout(relu_in_place), cases.randn(2, 3, 9, 9)
    gm = fxmem.optimize(model, (x,))
    if not relu_in_place:
        # Dropout overwrites the ReLU's output. Torch's ReLU keeps that and refuses; the mask does not mind.
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(model, (x,))
        model[3].inplace = False
        assert isinstance(gm.get_submodule("3"), nn.Dropout)
        assert gm.get_submodule("3").inplace
    eager, ours = compare(model, gm, (x,))
    elements = 2 * 8 * 7 * 7
    # Two masks; the batch norm's input and the statistics of 8 channels stay.
    assert ours.measurement.kept == 4 * elements + 2 * 8 * 4 + 2 * (elements // 8)
    assert eager.measurement.kept > ours.measurement.kept


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("front_too", [True, False])
def test_checkpoint_over_frozen_front(reentrant: bool, front_too: bool) -> None:
    front = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).requires_grad_(False)
    body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.5))
    x = cases.randn(4, 8, requires_grad=reentrant)  # the reentrant kind needs an input that requires grad
    results = []
    for f, b in ((front, body), (fxmem.optimize(front, (x,)), fxmem.optimize(body, (cases.randn(4, 8),)))):
        torch.manual_seed(0)
        y = checkpoint(f, x, use_reentrant=reentrant) if front_too else f(x)
        y = checkpoint(b, y, use_reentrant=reentrant)
        wanted = [*body.parameters(), *([x] if reentrant else [])]
        for t in wanted:
            t.grad = None
        y.square().sum().backward()
        results.append([y, *[t.grad for t in wanted], torch.get_rng_state()])
    assert same(*results)
    assert all(g is not None for g in results[0])


def test_batchnorm_flags_after_the_pass() -> None:
    eager = cases.fill(cases.norms_with_flags())
    model = copy.deepcopy(eager)
    x = cases.randn(4, 3, 9, 9)
    gm = fxmem.optimize(model, (x,))
    for training in (True, False, True):
        for m in (eager, gm):
            m.train(training)
        outputs = [m(x) for m in (eager, gm)]
        assert same(*outputs)
        assert same(*[torch.autograd.grad(y.square().sum(), m.parameters()) for y, m in zip(outputs, (eager, gm), strict=True)])
        assert same(dict(eager.named_buffers()), dict(gm.named_buffers()))
    for m in (eager, gm):
        m.get_submodule("5").eval()  # one norm alone
        m.get_submodule("4").momentum = 0.25
        m(x)
    assert same(dict(eager.named_buffers()), dict(gm.named_buffers()))
    assert int(gm.get_buffer("4.num_batches_tracked")) == 3
    assert int(gm.get_buffer("5.num_batches_tracked")) == 2


def test_untraceable_model() -> None:
    source, first = inspect.getsourcelines(cases.Branchy.forward)
    line = first + next(i for i, text in enumerate(source) if "CaptureError names" in text)
    with pytest.raises(fxmem.CaptureError) as raised:
        fxmem.optimize(cases.Branchy().eval(), (cases.randn(2, 3, 9, 9),), fullgraph=True)
    assert raised.value.where is not None
    assert raised.value.where.startswith(f"{cases.__file__}:{line} ")
    assert raised.value.remedy
    model, x = cases.Branchy().eval(), cases.randn(2, 3, 9, 9)
    model.f.requires_grad_(False)
    optimized = fxmem.optimize(model, (x,))
    eager, ours = compare(model, optimized, (x,))
    # One bit per element of the ReLU; what the head keeps is the mean, one number per channel.
    assert ours.measurement.kept == 2 * 8 * 49 // 8 + 2 * 8 * 4
    assert eager.measurement.kept > 30 * ours.measurement.kept
    assert any("captured by regions" in note and f"{cases.__file__}:{line} " in note for note in optimized.notes)


def test_functional_transforms() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)).eval()
    cases.fill(model).requires_grad_(False)
    x = cases.randn(2, 2, 8, 8, requires_grad=False)
    gm = fxmem.optimize(model, (cases.randn(2, 2, 8, 8),))
    assert [d.rewritten for d in gm.decisions] == [True] * 4
    results = []
    for m in (model, gm):

        def scalar(t: Tensor, m: nn.Module = m) -> Tensor:
            return m(t).pow(3).sum()

        parameters = dict(m.named_parameters())
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(scalar(leaf), leaf, create_graph=True)
        results.append(
            [
                torch.func.grad(scalar)(x),
                torch.func.vmap(torch.func.grad(scalar))(torch.stack([x, 2 * x])),
                torch.func.grad(lambda p, m=m: torch.func.functional_call(m, p, (x,)).sum())(parameters),
                torch.autograd.grad(first.square().sum(), leaf)[0],
            ]
        )
    assert same(*results)


def test_unfreeze_after_optimize() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    x = cases.randn(4, 8, requires_grad=False)
    gm = fxmem.optimize(model, (x,))
    compare(model, gm, (x,))
    model[0].requires_grad_(True)
    assert run(gm, (x,)).gradients["0.weight"] is not None
    compare(model, gm, (x,))
    model[2].requires_grad_(False)
    compare(model, gm, (x,))
