"""Model to graph by ``torch.export``: the whole model in ATen's own ops, for the shapes and the mode that it is exported with.

Export follows Python code that symbolic tracing cannot, because it runs it on fake tensors. What it cannot follow is control
flow that asks the data. The graph has the model's own parameters and buffers, under their names; the batch dimension stays free
where the code allows it, and everything else that the code read is fixed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map

from fxmem.capture import (
    CONSTANTS,
    CallForm,
    Capture,
    bind_example,
    blame,
    custom_functions_refused,
    first_line,
    recorded_modes,
    source_line,
)
from fxmem.errors import ArgumentError, CaptureError

aten = torch.ops.aten


@dataclass(frozen=True)
class Interface:
    """What stands between the model's signature and the graph's tensors.

    Args:
        form: the form of call that the graph holds for.
        order: for each input of the graph, its number among the tensors of the form.
        shapes: of each input of the graph, sizes, or the name of a size that is free.
        ranges: the least and greatest value of each free size.
        out: structure of the output.
    """

    form: CallForm
    order: tuple[int, ...]
    shapes: tuple[tuple[int | str, ...], ...]
    ranges: Mapping[str, tuple[int, int]]
    out: TreeSpec

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The graph's inputs for one call of the model.

        Raises:
            ArgumentError: the graph does not hold for these arguments.
        """
        tensors = self.form.tensors(args, kwargs)
        if tensors is None:
            raise ArgumentError(
                "the exported graph holds for the arguments that it was captured with, of the same structure and with the same "
                "values where they are no tensors.",
                where="forward",
                remedy="Pass the arguments that the model is called with as example inputs of fxmem.optimize.",
            )
        given = [tensors[i] for i in self.order]
        sizes: dict[str, int] = {}
        for i, (tensor, expected) in enumerate(zip(given, self.shapes, strict=True)):
            ok = len(tensor.shape) == len(expected)
            for size, name in zip(tensor.shape, expected, strict=False):
                if isinstance(name, str):
                    low, high = self.ranges[name]
                    ok = ok and low <= size <= high and sizes.setdefault(name, int(size)) == size
                else:
                    ok = ok and size == name
            if not ok:
                raise ArgumentError(
                    f"the exported graph takes shape ({', '.join(map(str, expected))}) here, not {tuple(tensor.shape)}.",
                    where=f"tensor {i} of the inputs",
                    remedy="Optimize again with an example of this shape, or with capture='regions'.",
                )
        return given


def export(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Capture, Interface, nn.Module]:
    """Captures ``model`` by ``torch.export``, in the mode that it is in.

    Args:
        model: any module; it is left as it is.
        args: example inputs.
        kwargs: example inputs by name.

    Returns:
        The graph; how to call it; and what it reads that is not the model's, to be put under ``CONSTANTS``.

    Raises:
        CaptureError: export cannot follow the forward; says where.
    """
    kind = type(model).__name__
    rng = torch.get_rng_state()
    free = _dims(model, args, kwargs)
    level = logging.root.manager.disable
    with recorded_modes(model) as modes, custom_functions_refused(Tensor, "torch.export"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Where it fails it logs the whole graph; the error says enough.
        logging.disable(logging.ERROR)
        try:
            program = torch.export.export(model, tuple(args), dict(kwargs), dynamic_shapes=free, strict=False)
            exported: Any = program.module()
        except CaptureError as error:
            raise CaptureError(error.reason, where=blame(error, model), remedy=error.remedy) from error
        except Exception as error:
            raise CaptureError(
                f"torch.export cannot follow the forward: {first_line(error)}.",
                where=kind,
                remedy="Use capture='regions', which leaves the model's own code in place.",
            ) from error
        finally:
            logging.disable(level)
            torch.set_rng_state(rng)
    graph: fx.Graph = exported.graph
    leaves, _ = tree_flatten((tuple(args), dict(kwargs)))
    form, tensors = CallForm.of(model.forward, args, kwargs)
    places = [node for node in graph.nodes if node.op == "placeholder"]
    order, shapes = [], []
    for node, leaf in zip(places, leaves, strict=True):
        if not isinstance(leaf, Tensor):
            continue
        order.append(next(i for i, t in enumerate(tensors) if t is leaf))
        shapes.append(tuple(_size(s) for s in node.meta["val"].shape))
    ranges = {str(symbol): _bounds(r) for symbol, r in program.range_constraints.items()}
    for shape in shapes:
        for size in shape:
            if isinstance(size, str) and size not in ranges:
                raise CaptureError(
                    f"the batch sizes of the inputs depend on one another ({size}), which is not supported.", where=kind
                )
    fixed = {node for node, leaf in zip(places, leaves, strict=True) if not isinstance(leaf, Tensor)}
    tidy, holder = _tidy(model, exported, graph, fixed)
    interface = Interface(form, tuple(order), tuple(shapes), ranges, program.call_spec.out_spec)
    return Capture(tidy, dict(modes), {}, {}, ()), interface, holder


def _dims(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The batch dimension of every tensor free where it can be."""

    def free(leaf: Any) -> Any:
        return {0: torch.export.Dim.AUTO} if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] > 1 else None

    bound = bind_example(model, tuple(args), kwargs)
    return tree_map(free, bound)


def _size(size: Any) -> int | str:
    if isinstance(size, int):
        return size
    return int(size.node.expr) if size.node.expr.is_number else str(size.node.expr)


def _bounds(values: Any) -> tuple[int, int]:
    most = 2**63 - 1
    return int(values.lower), int(min(values.upper, most))


def _tidy(model: nn.Module, exported: nn.Module, graph: fx.Graph, fixed: set[fx.Node]) -> tuple[fx.Graph, nn.Module]:
    """Makes the graph one of plain tensors in and out, and collects what it reads that is not the model's."""
    graph.set_codegen(fx.graph.CodeGen())
    holder = nn.Module()
    for node in list(graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            graph.erase_node(node)  # our own check of the shapes speaks of inputs by their place
            continue
        if node.stack_trace:
            node.meta["source"] = source_line(node.stack_trace)
        if node.op == "get_attr" and not _has(model, node.target):
            name = node.target.replace(".", "_")
            value = _read(exported, node.target)
            if isinstance(value, nn.Module):
                holder._modules[name] = value
            else:
                holder.register_buffer(name, value, persistent=False)
            node.target = f"{CONSTANTS}.{name}"
    for node in fixed:
        if node.users:
            raise CaptureError("the graph computes with an argument that is no tensor.", where=str(node.target))
        graph.erase_node(node)
    for node in list(graph.nodes):
        if node.target in _ADAPTIVE_MAX and all(u.args[1] == 0 or not u.users for u in node.users):
            # Without its indices it is torch's functional form.
            for user in list(node.users):
                if user.args[1] == 0:
                    user.replace_all_uses_with(node, delete_user_cb=lambda n, user=user: n is not user)
                graph.erase_node(user)
            node.target = _ADAPTIVE_MAX[node.target]
        elif node.target is aten.batch_norm.default:
            x, weight, bias, mean, var, *options, _ = node.args
            node.target, node.args = F.batch_norm, (x, mean, var, weight, bias, *options)
    # The exported module owns the old one.
    fresh = fx.Graph()
    fresh.output(fresh.graph_copy(graph, {}))
    return fresh, holder


_ADAPTIVE_MAX = {
    aten.adaptive_max_pool2d.default: F.adaptive_max_pool2d,
    aten.adaptive_max_pool3d.default: F.adaptive_max_pool3d,
    aten.adaptive_max_pool1d.default: F.adaptive_max_pool1d,
}


def _read(module: nn.Module, target: str) -> Any:
    path, _, name = target.rpartition(".")
    return getattr(module.get_submodule(path), name)


def _has(model: nn.Module, target: str) -> bool:
    path, _, name = target.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        return False
    return name in owner._parameters or name in owner._buffers
