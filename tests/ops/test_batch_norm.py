"""Batch norm: in eval mode no input is kept for a frozen weight; in train mode torch's own op runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import compare, compare_all, kept, kept_by_hooks, leaves, masks, operand
from torch import Tensor, nn

from fxmem.ops.batch_norm import SelectiveBatchNorm1d, SelectiveBatchNorm2d, SelectiveBatchNorm3d, batch_norm

SHAPES = [(5, 3), (4, 3, 7), (2, 3, 5, 7), (2, 3, 4, 5, 3)]
STATISTICS = (1, 2)  # the operands that never require grad


def operands(
    shape: tuple[int, ...],
    *,
    weight: bool = True,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    parameters: torch.dtype | None = None,
    layout: str = "contiguous",
) -> list[Tensor | None]:
    """Input, running mean and variance, weight and bias."""
    c, other = shape[1], parameters or dtype
    return [
        operand(*shape, dtype=dtype, layout=layout),
        operand(c, dtype=other, seed=1),
        operand(c, dtype=other, seed=2).abs() + 0.5,
        operand(c, dtype=other, seed=3) if weight else None,
        operand(c, dtype=other, seed=4) if bias else None,
    ]


@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 1, 3, 3), (1, 3, 1, 1)], ids=str)
def test_eval_masks(shape: tuple[int, ...], weight: bool, bias: bool) -> None:
    compare_all(F.batch_norm, batch_norm, operands(shape, weight=weight, bias=bias), never=STATISTICS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_dtypes(shape: tuple[int, ...], dtype: torch.dtype, parameters: torch.dtype) -> None:
    tensors = operands(shape, dtype=dtype, parameters=parameters)
    compare_all(F.batch_norm, batch_norm, tensors, never=STATISTICS)


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "gapped", "expanded"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layouts(shape: tuple[int, ...], layout: str) -> None:
    compare_all(F.batch_norm, batch_norm, operands(shape, layout=layout), never=STATISTICS)


@pytest.mark.parametrize("eps", [1e-5, 0.0, 0.3])
def test_eps(eps: float) -> None:
    def bind(op: Any) -> Any:
        return lambda *args: op(*args, False, 0.1, eps)

    compare_all(bind(F.batch_norm), bind(batch_norm), operands((2, 3, 5, 7)), never=STATISTICS)


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 5, 7), (2, 3, 0, 7)], ids=str)
def test_nothing_to_normalize(shape: tuple[int, ...]) -> None:
    """Torch's backward of an empty batch in eval mode divides by zero on some versions: here it is left to torch."""
    tensors = operands(shape)
    for mask in masks(tensors, STATISTICS):
        outputs = [op(*leaves(tensors, mask)) for op in (F.batch_norm, batch_norm)]
        assert outputs[0].shape == outputs[1].shape == shape
        assert type(outputs[0].grad_fn) is type(outputs[1].grad_fn)  # so backward is torch's own, whatever it does


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_train(shape: tuple[int, ...]) -> None:
    tensors = operands(shape)
    for mask in masks(tensors, STATISTICS):
        statistics = []
        for op in (F.batch_norm, batch_norm):
            mean, var = torch.zeros(3), torch.ones(3)
            x, _, _, w, b = leaves(tensors, mask)
            output = op(x, mean, var, w, b, True, 0.2)
            wanted = [t for t in (x, w, b) if t is not None and t.requires_grad]
            gradients = torch.autograd.grad(output, wanted, operand(*shape, seed=5))
            statistics.append((output, mean, var, *gradients))
        for eager, ours in zip(*statistics, strict=True):
            assert torch.equal(eager, ours)


def test_bytes() -> None:
    tensors = operands((2, 3, 5, 7))
    nbytes = 4 * 2 * 3 * 5 * 7

    def after_an_activation(op: Any) -> Any:
        return lambda x, *rest: op(x.neg(), *rest)

    eager, ours = after_an_activation(F.batch_norm), after_an_activation(batch_norm)
    for mask in masks(tensors, STATISTICS):
        assert kept_by_hooks(eager, leaves(tensors, mask)) == nbytes
        assert kept_by_hooks(ours, leaves(tensors, mask)) == (nbytes if mask[3] else 0), mask
    assert kept(ours, tensors, (True, False, False, False, True)) == 0
    assert kept(ours, tensors, (True, False, False, True, True)) == nbytes


MODULES: list[tuple[type[nn.Module], type[nn.Module], tuple[int, ...]]] = [
    (nn.BatchNorm1d, SelectiveBatchNorm1d, (5, 3)),
    (nn.BatchNorm1d, SelectiveBatchNorm1d, (4, 3, 7)),
    (nn.BatchNorm2d, SelectiveBatchNorm2d, (2, 3, 5, 7)),
    (nn.BatchNorm3d, SelectiveBatchNorm3d, (2, 3, 4, 5, 3)),
]
CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"momentum": 0.0, "eps": 0.1},
]


@pytest.mark.parametrize(("stock", "ours", "shape"), MODULES, ids=["1d-2D", "1d-3D", "2d", "3d"])
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("trains", ["", "weight", "bias", "weight bias"])
def test_modules_through_mode_switches(
    stock: Any, ours: Any, shape: tuple[int, ...], options: dict[str, Any], trains: str
) -> None:
    """Train, eval, train: outputs, gradients and every buffer, num_batches_tracked included, stay eager's."""
    twins = [stock(3, **options), ours(3, **options)]
    for module in twins:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trains)
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    for training in (True, False, True, False):
        results = []
        for module in twins:
            module.train(training)
            x = operand(*shape).requires_grad_()
            output = module(x)
            wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
            gradients = torch.autograd.grad(output, wanted, operand(*shape, seed=6))
            results.append((output, *gradients, *module.buffers()))
        for eager, selective in zip(*results, strict=True):
            assert torch.equal(eager, selective)
            assert eager.dtype is selective.dtype


def test_statistics_kept_but_not_tracked() -> None:
    """``track_running_stats`` switched off on the instance, with buffers there: eval uses them, train the batch's."""
    twins: list[Any] = [nn.BatchNorm2d(3), SelectiveBatchNorm2d(3)]
    for module in twins:
        module.track_running_stats = False
        module.requires_grad_(False)
        module.running_mean.fill_(0.5)
    for training in (False, True):
        for module in twins:
            module.train(training)
        compare(*twins, [operand(2, 3, 5, 7)], [True])
    assert [int(m.num_batches_tracked) for m in twins] == [0, 0]


def test_wrong_dimensions_are_refused_in_both_modes() -> None:
    for training in (True, False):
        with pytest.raises(ValueError, match="expected 4D input"):
            SelectiveBatchNorm2d(3).train(training)(operand(2, 3, 5).requires_grad_())
