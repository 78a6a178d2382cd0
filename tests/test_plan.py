"""The plan against brute force: no choice of masks keeps fewer bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxmem
from fxmem.ops import activation, relu
from fxmem.passes.plan import least

STORAGES = 6


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sets(st.integers(0, STORAGES - 1), max_size=3), st.integers(0, 9)), min_size=1, max_size=7),
    st.lists(st.integers(0, 12), min_size=STORAGES, max_size=STORAGES),
)
def test_least_is_the_minimum(nodes: list[tuple[set[int], int]], weights: list[int]) -> None:
    stock = {f"n{i}": storages for i, (storages, _) in enumerate(nodes)}
    price = {f"n{i}": p for i, (_, p) in enumerate(nodes)}

    def cost(packed: Iterable[str]) -> int:
        kept = {s for node in stock if node not in packed for s in stock[node]}
        return sum(price[node] for node in packed) + sum(weights[s] for s in kept)

    plans = [set(p) for size in range(len(stock) + 1) for p in itertools.combinations(stock, size)]
    minimum = min(map(cost, plans))
    packed = least(stock, price, dict(enumerate(weights)))
    assert cost(packed) == minimum
    assert len(packed) == min(len(p) for p in plans if cost(p) == minimum)


# Ops whose rule may take a mask, stock and masked; the others keep what they keep.
MASKED: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "relu": (torch.relu, relu.relu),
    "leaky": (F.leaky_relu, activation.leaky_relu),
    "hardtanh": (F.hardtanh, activation.hardtanh),
    "softshrink": (F.softshrink, activation.softshrink),
    "abs": (torch.abs, activation.abs),
    "relu_": (torch.relu_, relu.relu_),
}
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "sin": torch.sin,
    "neg": torch.neg,
    "double": lambda t: t + t,
    "turn": lambda t: t.transpose(0, 1).flatten().view(t.shape),
    "crop": lambda t: F.pad(t[:, :1], (0, t.shape[1] - 1)),
}


class _Net(nn.Module):
    """A random network of unary ops and sums; ``masked`` says which of its ops are written with our functions."""

    def __init__(self, program: list[tuple[str, int, int]], masked: tuple[bool, ...] = ()) -> None:
        super().__init__()
        self.program, self.masked = program, masked

    def forward(self, x: Tensor) -> Tensor:
        values, flags = [x + 1], iter(self.masked)
        for op, first, second in self.program:
            value = values[first % len(values)]
            if second < len(values):
                value = value + values[second]
            if op in PLAIN:
                values.append(PLAIN[op](value))
                continue
            if op == "relu_":
                value = value.clone()
            values.append(MASKED[op][next(flags, False)](value))
        return sum(v.sum(1, keepdim=True) for v in values)


def _kept(model: nn.Module, x: Tensor) -> int:
    """Bytes kept of tensors that are neither input nor output; each storage once."""
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    for alive in (x, y):
        sizes.pop(alive.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted([*MASKED, *MASKED, *PLAIN])), st.integers(0, 6), st.integers(0, 30)),
        min_size=1,
        max_size=7,
    ).filter(lambda program: 1 <= sum(op in MASKED for op, _, _ in program) <= 4),
    st.sampled_from([(4, 6), (1, 3), (16, 16)]),
)
def test_no_choice_of_masks_keeps_less(program: list[Any], shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    count = sum(op in MASKED for op, _, _ in program)
    brute = {flags: _kept(_Net(program, flags), x) for flags in itertools.product((False, True), repeat=count)}
    ours = fxmem.optimize(_Net(program), x)
    assert _kept(ours, x) == min(brute.values())
    assert ours.saved is not None
    assert tuple(s.kept for s in ours.saved) == (brute[(False,) * count], min(brute.values()))


def test_a_mask_of_two_operands_frees_both_or_neither() -> None:
    # Two nodes share one storage, and one of them keeps another that somebody keeps anyway.
    stock = {"a": (1, 2), "b": (2,), "c": (3,)}
    price = {"a": 3, "b": 3, "c": 1}
    assert least(stock, price, {1: 4, 2: 4}) == {"a", "b"}
    assert least(stock, price, {2: 4}) == frozenset()
    assert least(stock, price, {1: 4, 2: 1, 3: 1}) == {"a"}
