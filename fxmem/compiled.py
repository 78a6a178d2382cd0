"""What compiled models hand from forward to backward: read from the partitioned graphs, and counted at the allocator."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils._pytree import arg_tree_leaves

from fxmem.measure import measure
from fxmem.records import Compilation


def handed_over(forward: fx.Graph, num_outputs: int) -> int:
    """Bytes of the storages that a partitioned forward returns for backward alone.

    Args:
        forward: its graph, with fake tensors as the values of nodes; sizes must not be symbolic.
        num_outputs: how many of its outputs come before those for backward.
    """
    results: Any = forward.output_node().args[0]
    alive = {_storage(n) for n in (*forward.find_nodes(op="placeholder"), *arg_tree_leaves(results[:num_outputs]))}
    handed = {_storage(n): n for n in results[num_outputs:]}
    return sum(n.meta["val"].untyped_storage().nbytes() for key, n in handed.items() if key is not None and key not in alive)


def _storage(node: Any) -> int | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


class _Reader(CustomPartitionerFn):
    """Torch's partitioner, and a look at what it makes."""

    def __init__(self) -> None:
        self.handed: dict[int, int] = {}

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        self.partitioned(gm, forward, kwargs["num_fwd_outputs"])
        return forward, backward

    def partitioned(self, joint: fx.GraphModule, forward: fx.GraphModule, num_outputs: int) -> None:
        """Takes note of a joint graph's forward; again, if it was changed since."""
        self.handed[id(joint)] = handed_over(forward.graph, num_outputs)

    def uuid(self) -> None:
        return None


def compare(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Compilation, ...]:
    """Runs a model eagerly, compiled by Inductor, and compiled by fxmem's backend; forward and backward, for real.

    Whatever was compiled before is forgotten (``torch._dynamo.reset``), and no compiler's cache is used.

    Args:
        model: the model, as ``fxmem.measure`` takes it.
        args: positional inputs.
        kwargs: keyword inputs.
        progress: called with a line of text before each longer step.

    Raises:
        ArgumentError: nothing in the output requires grad.
    """
    progress("measuring eager")
    rows = [Compilation("eager", 0, None, measure(model, args, kwargs))]
    for backend in ("inductor", "fxmem"):
        progress(f"compiling with {backend}")
        reader = _Reader()
        with _fresh():
            options: Any = {"custom_partitioner_fn": reader, "fx_graph_cache": False}
            compiled: Any = torch.compile(model, backend=backend, dynamic=False, options=options)
            measure(compiled, args, kwargs)  # compiles forward, and backward when it comes to that
            measured = measure(compiled, args, kwargs)
        rows.append(Compilation(backend, len(reader.handed), sum(reader.handed.values()), measured))
    return tuple(rows)


@contextmanager
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python modules and devices that Inductor looks for
            yield
    finally:
        torch._dynamo.reset()
