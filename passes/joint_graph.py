"""Rewrites of AOTAutograd's joint graph and of its two parts, so that backward is handed nothing that it need not be.

``drop_shape_only``: backward ops let go of the inputs that they read only for their shape. The edge from such an input to
backward would make the partitioner keep it, wherever the derivative came from: our own autograd functions or torch's.
Convolution's gradient with respect to its input becomes an op that has no input; the others get an empty tensor, of which
compilers see the shape alone.

``remake``: partitioners do not know that the inputs and outputs of a forward are alive anyway. A cast, a comparison or a view
of one of them is made again in backward, if that is all that stands between: a low-precision copy of a weight under autocast,
or the mask of a ReLU whose output the model returns.

Both require values (fake tensors) on the nodes, and return whether they changed anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import arg_tree_leaves

aten = torch.ops.aten

# Backward ops that read this argument for its shape alone, given what else they get.
_SHAPE_ONLY: dict[Any, int] = {
    aten.avg_pool2d_backward.default: 1,
    aten.avg_pool3d_backward.default: 1,
    aten._adaptive_avg_pool2d_backward.default: 1,
    aten._adaptive_avg_pool3d_backward.default: 1,
    aten.max_pool2d_with_indices_backward.default: 1,
    aten.max_pool3d_with_indices_backward.default: 1,
    aten.adaptive_max_pool2d_backward.default: 1,
    aten.adaptive_max_pool3d_backward.default: 1,
}

# What costs next to nothing to make again of its first argument.
_CHEAP = frozenset(
    {
        aten.eq,
        aten.ge,
        aten.gt,
        aten.le,
        aten.lt,
        aten.ne,
        aten._to_copy,
        torch.ops.prims.convert_element_type,
        aten.expand,
        aten.permute,
        aten.squeeze,
        aten.t,
        aten.transpose,
        aten.unsqueeze,
        aten.view,
    }
)


def drop_shape_only(graph: fx.Graph, channels_last: bool = False) -> bool:
    """Takes shape-only inputs away from the backward ops of a joint graph.

    Args:
        graph: forward and backward in ATen ops; changes in place.
        channels_last: whether the compiler will lay out a convolution's input so, whatever the graph's own values say.
    """
    changed = False
    for node in list(graph.nodes):
        if node.target is aten.convolution_backward.default:
            changed |= _convolution(graph, node, channels_last)
        elif node.target in _SHAPE_ONLY:
            changed |= _empty(graph, node, _SHAPE_ONLY[node.target])
    if changed:
        graph.eliminate_dead_code()
        graph.lint()
    return changed


def _convolution(graph: fx.Graph, node: Any, channels_last: bool) -> bool:
    grad, input, weight, _, *options, mask = node.args
    (needs_input, needs_weight, needs_bias) = mask
    users = {user.args[1]: user for user in node.users}
    value = _value(input)
    if value is None or value.dim() != _value(weight).dim() or value.device.type not in ("cpu", "cuda"):
        return False
    changed = False
    if channels_last and value.dim() == 4:
        laid_out = _laid_out(graph, node)
        grad, changed = laid_out, laid_out is not grad
    if needs_weight:
        return changed
    if value.dim() == 4:
        channels_last = channels_last or torch._prims_common.suggest_memory_format(value) is torch.channels_last
    if needs_bias and 2 in users:
        # The same kernel as eager's, which sums up the bias's gradient in its own order.
        return _empty(graph, node, 1) or changed
    if not needs_input or 0 not in users:
        return changed
    with graph.inserting_before(node):
        op = torch.ops.fxmem.convolution_backward_input.default
        arguments = (grad, weight, _sizes(graph, input, value), channels_last and value.dim() == 4, *options)
        users[0].replace_all_uses_with(_call(graph, node, op, arguments))
    return True


def _laid_out(graph: fx.Graph, node: Any) -> Any:
    """The incoming gradient, written channels-last by whatever generated kernel makes it, instead of copied afterwards."""
    from torch._inductor import inductor_prims

    grad = node.args[0]
    size = _value(grad).shape
    if not all(isinstance(n, int) for n in size):
        return grad
    strides = list(torch._prims_common.make_channels_last_strides_for(size))
    with graph.inserting_before(node):
        new = _call(graph, node, inductor_prims.force_stride_order, (grad, strides))
    node.update_arg(0, new)
    return new


def _empty(graph: fx.Graph, node: Any, index: int) -> bool:
    input = node.args[index]
    value = _value(input)
    if value is None or input.target is aten.empty_strided.default:
        return False
    if not all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        return False
    with graph.inserting_before(node):
        options = {"dtype": value.dtype, "device": value.device}
        empty = _call(graph, node, aten.empty_strided.default, (list(value.shape), list(value.stride())), options)
    node.update_arg(index, empty)
    return True


def _value(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _sizes(graph: fx.Graph, input: Any, value: Tensor) -> list[Any]:
    sizes: list[Any] = list(value.shape)
    for dim, size in enumerate(sizes):
        if not isinstance(size, int):
            node = graph.call_function(aten.sym_size.int, (input, dim))
            node.meta["val"] = size
            sizes[dim] = node
    return sizes


def _call(graph: fx.Graph, old: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    """A new node in the place of ``old``, with its value computed on fake tensors."""
    new: fx.Node = graph.call_function(target, args, kwargs)
    new.meta = {k: v for k, v in old.meta.items() if k not in ("val", "tensor_meta", "eager_input_vals")}
    values = fx.map_arg(args, lambda n: n.meta["val"])
    fake = next(t for t in torch.utils._pytree.tree_leaves((values, old.args[0].meta["val"])) if isinstance(t, FakeTensor))
    with fake.fake_mode:
        new.meta["val"] = target(*values, **(kwargs or {}))
    return new


def remake(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> bool:
    """Hands over an input or output of the forward in the place of something that backward can make of it at once.

    Args:
        forward: the forward's graph; its outputs are the model's and then what backward is handed.
        backward: the backward's graph; its placeholders have the names of what it is handed, and then come the tangents.
        num_outputs: of the forward, before what is handed over.
    """
    output = forward.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    own, handed = results[:num_outputs], results[num_outputs:]
    alive = {n for n in forward.nodes if n.op == "placeholder"} | {n for n in arg_tree_leaves(own) if isinstance(n, fx.Node)}
    slots = {n.name: n for n in backward.nodes if n.op == "placeholder"}
    changed = False
    for value in list(handed):
        chain = _chain(value, alive)
        if not chain or value.name not in slots:
            continue
        source = chain[0].args[0]
        old = slots.pop(value.name)
        with backward.inserting_before(old):
            new = slots.get(source.name)
            if new is None:
                new = slots[source.name] = backward.placeholder(source.name)
                new.meta = dict(source.meta)
                handed[handed.index(value)] = source
            else:
                handed.remove(value)
        made: dict[Any, Any] = {source: new}
        first = next(n for n in backward.nodes if n.op != "placeholder")
        with backward.inserting_before(first):
            for node in chain:
                made[node] = backward.node_copy(node, made.__getitem__)
        old.replace_all_uses_with(made[value])
        backward.erase_node(old)
        changed = True
    if changed:
        output.args = ((*own, *handed),)
        forward.eliminate_dead_code()
        backward.lint()
        forward.lint()
    return changed


def _chain(value: Any, alive: set[Any]) -> list[Any]:
    """The cheap calls that lead from something alive to ``value``, in order; none where others are needed."""
    chain: list[Any] = []
    while value not in alive:
        target = getattr(value, "target", None)
        if getattr(target, "overloadpacket", None) not in _CHEAP or value.all_input_nodes != [value.args[0]]:
            return []
        chain.insert(0, value)
        value = value.args[0]
    return chain
