"""The correctness oracle: eager PyTorch on the same numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fxmem.measure import Run, run


def same(a: Any, b: Any) -> bool:
    """Whether two nests hold the same tensors: values bitwise (NaN equal to NaN), shape, dtype and strides."""
    leaves_a, spec_a = tree_flatten(a)
    leaves_b, spec_b = tree_flatten(b)
    return spec_a == spec_b and all(_same(x, y) for x, y in zip(leaves_a, leaves_b, strict=True))


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        return False
    if torch.equal(a, b):
        return True
    return bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def compare_runs(eager: Run, ours: Run) -> None:
    """Asserts that two passes made the same of everything."""
    assert same(eager.outputs, ours.outputs), "outputs differ"
    assert eager.gradients.keys() == ours.gradients.keys()
    wrong = [name for name in eager.gradients if not same(eager.gradients[name], ours.gradients[name])]
    assert not wrong, f"gradients differ: {wrong[:5]}"
    wrong = [name for name in eager.buffers if not same(eager.buffers[name], ours.buffers[name])]
    assert not wrong, f"buffers differ: {wrong[:5]}"
    assert torch.equal(eager.rng_state, ours.rng_state), "the random number generator was left in another state"


def compare(
    model: nn.Module, optimized: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> tuple[Run, Run]:
    """Runs both on the same inputs, asserts that everything agrees and that no more is kept, and returns both runs."""
    eager, ours = run(model, args, kwargs), run(optimized, args, kwargs)
    compare_runs(eager, ours)
    assert ours.measurement.kept <= eager.measurement.kept
    return eager, ours
