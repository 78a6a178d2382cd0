"""``torch.compile(model, backend="fxmem")``: the same rules in front of AOTAutograd and Inductor."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxmem import ops
from fxmem.errors import ArgumentError, FxmemError
from fxmem.ops.decompositions import decompositions
from fxmem.passes import joint_graph
from fxmem.passes.base import FUNCTIONS, METHODS
from fxmem.passes.grad_flow import grad_flow
from fxmem.passes.joint_graph import drop_shape_only, remake
from fxmem.passes.plan import Choice, choices, decide_by_observation, decide_by_structure, without_masks
from fxmem.passes.saved_tensors import observe
from fxmem.passes.selective_save import selective_save

_log = logging.getLogger(__name__)

_POLICIES = ("exact",)
_COMPILERS = ("inductor", "aot_eager", "eager")
# What Inductor keeps less for by itself: it draws dropout's random numbers again.
_INDUCTORS_OWN = frozenset({"dropout"})


def fxmem_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """Rewrites Dynamo's graph so that it keeps only what backward needs, then hands it to a compiler.

    Args:
        gm: Dynamo's graph; parameters are inputs of it.
        example_inputs: fake or real inputs, whose requires_grad says what trains.
        mode: as Inductor takes it.
        options: ``"compiler"``: ``"inductor"`` (by default), ``"aot_eager"`` (AOTAutograd, no code generated) or ``"eager"``;
            ``"policy"``: as in ``fxmem.optimize``; the rest as Inductor takes them.

    Raises:
        ArgumentError: an option is unknown, has a value of the wrong kind, or does not go with the compiler.
        RewriteError: the rewritten graph failed its checks.
    """
    compiler, config = _settings(mode, dict(options or {}), unknown)
    _rewrite(gm, example_inputs, _INDUCTORS_OWN if compiler == "inductor" and not config.get("fallback_random") else ())
    return _COMPILE[compiler](gm, list(example_inputs), config)


def _settings(mode: str | None, options: dict[str, Any], unknown: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The compiler, and Inductor's configuration."""
    if unknown:
        raise ArgumentError(
            "this backend has no such argument.", where=next(iter(unknown)), remedy="Pass what it takes as mode or options."
        )
    compiler, policy = options.pop("compiler", "inductor"), options.pop("policy", "exact")
    for name, value, allowed in (("compiler", compiler, _COMPILERS), ("policy", policy, _POLICIES)):
        if value not in allowed:
            raise ArgumentError(
                f"unknown value {value!r}.", where=f"options[{name!r}]", remedy=f"Choose one of {', '.join(allowed)}."
            )
    if compiler != "inductor":
        given = [f"options[{name!r}]" for name in options] + ([f"mode {mode!r}"] if mode and mode != "default" else [])
        if given:
            raise ArgumentError(
                f"it is Inductor's, and the compiler is {compiler!r}.",
                where=given[0],
                remedy='Leave it out, or choose "inductor".',
            )
        return compiler, {}
    try:
        # Torch's own check of both.
        return compiler, torch._TorchCompileInductorWrapper(mode, options, None).config
    except RuntimeError as error:
        text = str(error).partition(", known options are ")[0]
        raise ArgumentError(
            f"Inductor refuses it: {text}.",
            where=f"mode {mode!r}" if mode else f"options {', '.join(options)}",
            remedy='torch._inductor.list_options() and list_mode_options() name its own; ours are "compiler" and "policy".',
        ) from error


def _rewrite(gm: fx.GraphModule, inputs: Sequence[Any], without: frozenset[str] | tuple[()]) -> None:
    names = [str(n.target) for n in gm.graph.nodes if n.op == "placeholder"]
    given = dict(zip(names, inputs, strict=True))
    flow = grad_flow(gm, gm.graph, {name: isinstance(v, Tensor) and v.requires_grad for name, v in given.items()})
    found = [c for c in choices(gm, gm.graph, flow) if c.rule.name not in without]
    if not any(c.verdict.apply for c in found):
        return
    verdicts = _observed(gm, found, given) or decide_by_structure(gm, found, flow)
    if selective_save(gm, gm.graph, found, verdicts):
        gm.recompile()


def _observed(gm: fx.GraphModule, found: list[Choice], given: Mapping[str, Any]) -> list[Any] | None:
    """The verdicts from a run on fake tensors, or None where sizes are symbolic or the graph does not run on fakes."""
    tensors = [t for t in given.values() if isinstance(t, Tensor)]
    sizes = [n for t in tensors if t.layout == torch.strided for n in (*t.shape, *t.stride())]
    if len(tensors) < len(given) or not all(isinstance(n, int) for n in sizes):
        return None
    plain = without_masks(found)
    if all(p is c.verdict for p, c in zip(plain, found, strict=True)):
        return plain
    trial = fx.GraphModule(gm, fx.Graph())
    nodes: dict[fx.Node, fx.Node] = {}
    trial.graph.output(trial.graph.graph_copy(gm.graph, nodes))
    copies = [Choice(nodes[c.node], c.rule, c.replacement, c.verdict) for c in found]
    # Not on the compiler's own fakes: in-place ops would leave their traces on them.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, torch.no_grad():
            fakes = {
                name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).requires_grad_(t.requires_grad)
                for name, t in given.items()
            }
        selective_save(trial, trial.graph, copies, plain)
        return decide_by_observation(copies, observe(trial, trial.graph, fakes).saved)
    except FxmemError:
        raise
    except Exception as error:
        # Dynamo's graphs may hold anything; what does not run on fakes is the compiler's to report, and structure is safe.
        _log.debug("planned by structure alone, as the graph does not run on fake tensors: %s", error)
        return None


def _eager(gm: fx.GraphModule, inputs: list[Any], config: dict[str, Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch._dynamo.lookup_backend("eager")(gm, inputs)
    return compiled


def _aot_eager(gm: fx.GraphModule, inputs: list[Any], config: dict[str, Any]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    compile_graph = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=_Partitioner(None), keep_inference_input_mutations=True
    )
    compiled: Callable[..., Any] = compile_graph(gm, inputs)
    return compiled


class _Partitioner(CustomPartitionerFn):
    """Torch's partitioner, or the user's, between ours of the joint graph and of its parts.

    Args:
        inner: the user's, if there is one.
        decide_layout: tells of a joint graph whether convolutions' inputs will be laid out channels-last.
    """

    def __init__(
        self, inner: CustomPartitionerFn | None, decide_layout: Callable[[fx.GraphModule], bool] | None = None
    ) -> None:
        self.inner, self.decide_layout = inner, decide_layout

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        if drop_shape_only(gm.graph, self.decide_layout is not None and self.decide_layout(gm)):
            gm.recompile()
        # Inputs are alive as long as whoever passed them wants, not only parameters.
        primals = [i for i, n in enumerate(gm.graph.find_nodes(op="placeholder")) if "tangents" not in str(n.target)]
        forward, backward = (self.inner or min_cut_rematerialization_partition)(
            gm, joint_inputs, **{**kwargs, "static_lifetime_input_indices": primals}
        )
        if remake(forward.graph, backward.graph, kwargs["num_fwd_outputs"]):
            forward.recompile()
            backward.recompile()
        # A reader among partitioners asks to be shown what has become of it.
        show = getattr(self.inner, "partitioned", None)
        if show is not None:
            show(gm, forward, kwargs["num_fwd_outputs"])
        return forward, backward

    def uuid(self) -> Any:
        return _code(), None if self.inner is None else self.inner.uuid()


@functools.cache
def _code() -> str:
    """A hash of everything that shapes what we compile, for caches."""
    folders = (Path(joint_graph.__file__).parent, Path(ops.__file__).parent)
    sources = [Path(__file__), *(path for folder in folders for path in sorted(folder.glob("*.py")))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _inductor(gm: fx.GraphModule, inputs: list[Any], config: dict[str, Any]) -> Callable[..., Any]:
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering

    def given(name: str) -> Any:
        return config.get(name, getattr(inductor_config, name))

    functions = {f"{f.__module__}.{f.__name__}": _code() for _, f in (*FUNCTIONS.values(), *METHODS.values())}
    patches = {
        **config,
        "custom_partitioner_fn": _Partitioner(
            given("custom_partitioner_fn"), functools.partial(GraphLowering.decide_layout_opt, is_inference=False)
        ),
        # Ours are cached by their code.
        "unsafe_marked_cacheable_functions": {**given("unsafe_marked_cacheable_functions"), **functions},
    }
    with inductor_config.patch(patches):
        table = {**select_decomp_table(), **decompositions()}
    inner = functools.partial(_compile_graph, compile_fx_inner)
    compiled: Any = compile_fx(gm, inputs, inner, config_patches=patches, decompositions=table)
    return compiled


def _compile_graph(inner: Callable[..., Any], gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Inductor's compiler of one graph, which must hand a forward's inputs to backward as they are.

    Its layout optimization returns a channels-last copy in the place of a weight that backward needs, and that copy stays alive
    between the two. Outputs that users see keep their layout, so the weights are named as such.
    """
    from torch._inductor.decomposition import select_decomp_table

    if not kwargs.get("is_backward") and not kwargs.get("is_inference"):
        output = gm.graph.output_node()
        leaves = torch.utils._pytree.arg_tree_leaves(*output.args)
        inputs_kept = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node) and leaf.op == "placeholder"]
        seen = output.meta.get("user_visible_output_idxs", [])
        output.meta["user_visible_output_idxs"] = sorted({*seen, *inputs_kept})
    if "get_decomp_fn" in kwargs:
        # Torch's, without ours: what is left of our ops now stays as it is. By name, as caches need it.
        kwargs["get_decomp_fn"] = select_decomp_table
    return inner(gm, inputs, **kwargs)


_COMPILE: dict[str, Callable[[fx.GraphModule, list[Any], dict[str, Any]], Callable[..., Any]]] = {
    "inductor": _inductor,
    "aot_eager": _aot_eager,
    "eager": _eager,
}
