"""Rewrite: puts the selective-save op in the place of torch's own where the plan says so.

A function or method node gets our function of the same signature. A module node keeps its target; the module there gets our
subclass, so it shares everything with what it was: parameters, buffers, hooks, flags. Requires a graph whose modules are not
shared with another model. Ensures that the graph lints. Says whether it changed anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from fxmem.errors import RewriteError
from fxmem.ops.common import Verdict
from fxmem.passes.base import module_of
from fxmem.passes.plan import Choice


def selective_save(gm: nn.Module, graph: fx.Graph, found: Sequence[Choice], verdicts: Sequence[Verdict]) -> bool:
    """Applies the verdicts.

    Args:
        gm: the module that holds the graph's submodules; those rewritten change their class.
        graph: the graph; rewritten nodes change in place.
        found: the choices.
        verdicts: the final verdict of each.

    Returns:
        Whether anything changed.

    Raises:
        RewriteError: the rewritten graph is not well formed.
    """
    changed = False
    for choice, verdict in zip(found, verdicts, strict=True):
        node = choice.node
        if not verdict.apply:
            continue
        changed = True
        module = module_of(gm, node)
        if module is None:
            node.op = "call_function"
            node.target = choice.replacement
        else:
            module.__class__ = choice.replacement
    for choice, verdict in zip(found, verdicts, strict=True):
        # A module that is called several times changes its class once; the calls that stay stock say so.
        module = module_of(gm, choice.node)
        if module is not None and choice.verdict.instead_of is not None and type(module) is choice.replacement:
            kwargs = {k: v for k, v in choice.node.kwargs.items() if k != "pack"}
            choice.node.kwargs = kwargs if verdict.apply else {**kwargs, "pack": False}
    try:
        graph.lint()
    except RuntimeError as error:
        raise RewriteError(f"the rewritten graph is not well formed: {error}.", remedy="Please report this model.") from error
    return changed


def check_metadata(before: Mapping[str, tuple[Any, ...]], after: Mapping[str, tuple[Any, ...]]) -> None:
    """Compares the shapes, dtypes, strides and devices of every node's value before and after the rewrite.

    Raises:
        RewriteError: they differ; names the node.
    """
    for name, expected in before.items():
        if name in after and after[name] != expected:
            raise RewriteError(
                f"its value changed from {expected} to {after[name]} (shape, dtype, stride, device).",
                where=name,
                remedy="Please report this model; until then leave the module out of the rewrite.",
            )
