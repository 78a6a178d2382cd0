"""Backward without autograd's engine, which asks the driver of a device for a stream: for devices that are not there.

Calls the nodes of autograd's graph in the engine's order, and drops each as soon as it has run: what it keeps dies then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LEAF = "AccumulateGrad"


def walk(roots: list[Any], cotangents: list[Tensor], visit: Callable[[Any], None]) -> list[Tensor]:
    """Gradients of all leaves.

    Args:
        roots: the nodes to start from; the list is emptied. Nobody else may hold them, or nothing dies on time.
        cotangents: one for each root; the list is emptied.
        visit: called with each node before it runs.
    """
    inputs: dict[Any, list[Tensor | None]] = {}
    waits = _dependencies(roots)
    ready: list[tuple[int, int, Any]] = []
    count = 0
    leaves: dict[int, Tensor] = {}
    starts = list(dict.fromkeys(roots))
    for root, cotangent in zip(roots, cotangents, strict=True):
        _put(inputs, root, 0, cotangent)
    roots.clear()
    cotangents.clear()
    for root in starts:
        if not waits.get(root):
            heapq.heappush(ready, (-root._sequence_nr(), count, root))
            count += 1
    del starts, root, cotangent
    while ready:
        _, _, node = heapq.heappop(ready)
        visit(node)
        gradients = inputs.pop(node, [])
        following = node.next_functions
        results = _call(node, gradients)
        del gradients, node
        for i, (target, position) in enumerate(following):
            if target is None:
                continue
            value = results[i]
            results[i] = None
            if type(target).__name__ == _LEAF:
                if value is not None:
                    _accumulate(leaves, target.variable, value)
                continue
            if value is not None:
                _put(inputs, target, position, value)
            del value
            waits[target] -= 1
            if not waits[target]:
                del waits[target]
                heapq.heappush(ready, (-target._sequence_nr(), count, target))
                count += 1
        del following, target
    return list(leaves.values())


def _dependencies(roots: list[Any]) -> dict[Any, int]:
    waits: dict[Any, int] = {}
    seen = set(roots)
    stack = list(seen)
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is None or type(following).__name__ == _LEAF:
                continue
            waits[following] = waits.get(following, 0) + 1
            if following not in seen:
                seen.add(following)
                stack.append(following)
    return waits


def _call(node: Any, gradients: list[Tensor | None]) -> list[Tensor | None]:
    if all(g is None for g in gradients):
        return [None] * len(node.next_functions)
    wanted = len(node._input_metadata)
    padded = [*gradients, *[None] * (wanted - len(gradients))]
    with torch.no_grad():
        # Nodes of Python functions cannot be called, only applied.
        results = node(*padded) if callable(node) else node.apply(*padded)
    return list(results) if isinstance(results, tuple) else [results]


def _put(inputs: dict[Any, list[Tensor | None]], node: Any, position: int, value: Tensor) -> None:
    """Adds a gradient to those that wait for ``node``, in the shape and dtype that the engine would give it."""
    metadata = node._input_metadata[position]
    if tuple(value.shape) != tuple(metadata.shape):
        value = value.sum_to_size(metadata.shape)
    if value.dtype != metadata.dtype:
        value = value.to(metadata.dtype)
    slots = inputs.setdefault(node, [])
    slots.extend([None] * (position + 1 - len(slots)))
    old = slots[position]
    slots[position] = value if old is None else old + value


def _accumulate(leaves: dict[int, Tensor], leaf: Tensor, value: Tensor) -> None:
    if tuple(value.shape) != tuple(leaf.shape):
        value = value.sum_to_size(leaf.shape)
    if value.dtype != leaf.dtype:
        value = value.to(leaf.dtype)
    if id(leaf) in leaves:
        leaves[id(leaf)] = leaves[id(leaf)] + value
    else:
        # The engine keeps what it is given where the layout is the leaf's own, else it makes a copy.
        leaves[id(leaf)] = value if value.stride() == leaf.stride() else torch.empty_like(leaf, requires_grad=False)
