"""``torch.compile(model, backend="fxmem")``: the same rules in front of AOTAutograd and Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxmem.passes.grad_flow import grad_flow
from fxmem.passes.plan import choices, decide_by_structure
from fxmem.passes.selective_save import selective_save


def fxmem_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Rewrites Dynamo's graph so that it keeps only what backward needs, then hands it to Inductor.

    Args:
        gm: Dynamo's graph; parameters are inputs of it.
        example_inputs: fake or real inputs, whose requires_grad says what trains.
        options: as Inductor takes them.
    """
    names = [str(n.target) for n in gm.graph.nodes if n.op == "placeholder"]
    flags = {
        name: isinstance(value, torch.Tensor) and value.requires_grad for name, value in zip(names, example_inputs, strict=True)
    }
    flow = grad_flow(gm, gm.graph, flags)
    found = choices(gm, gm.graph, flow)
    if selective_save(gm, gm.graph, found, decide_by_structure(gm, found, flow)):
        gm.recompile()
    compiled: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")(gm, list(example_inputs), **options)
    return compiled
