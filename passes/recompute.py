"""Recompute: what is cheap to make again is not kept.

Autograd keeps a value where some derivative reads it, also where it could be had again at little cost: the output of a norm or
an activation that a trainable layer keeps, while the norm or activation itself keeps its input. This pass looks at a run on
fake tensors: which storage every node makes, which it changes, which it keeps. Storages that are kept are what is wanted;
``cheapest`` chooses which of them, or of the values before them, to keep; the others are kept as recipes (``ops.recipe``).

A value is a node's tensor. It can be kept, or a recipe be made of it, if nothing overwrites its memory later on; on the way to
another value it may be overwritten, because a recipe runs the same ops in the same order on memory of its own. It can be made
again if its op is in the tables below: elementwise ops, norms, softmax, reductions, copies and views, all without random
numbers or effects on buffers. Two ops are special. Batch norm in train mode is computed again from the batch, and does not
update its running statistics a second time. Dropout hands out its packed mask, which the recipe applies again.

An in-place activation whose derivative needs its input makes autograd keep a copy of it, which no other node knows: such calls
are first put out of place, if nobody else reads the memory.

Work is counted in bytes read and written, times a factor for ops that compute more than they move, plus a constant per op.

Requires a graph after ``selective_save``, and inputs. Ensures the values and gradients of before, bit by bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from fxmem.capture import has_hooks
from fxmem.ops import dropout
from fxmem.ops import recipe as runtime
from fxmem.passes.base import bound_arguments, module_of, module_path, op_name, source_of, tensors_of
from fxmem.passes.cheapest import Item, cheapest, needed
from fxmem.passes.fakes import Fakes
from fxmem.passes.plan import stock_class
from fxmem.passes.saved_tensors import Recorder, record, storage_of
from fxmem.records import Decision

RECIPES = "_fxmem_recipes"
RATE = 1 / 64
"""Bytes kept that a byte moved in backward is worth."""

_PER_OP = 1 << 16
"""What calling an op takes, in bytes that could be moved meanwhile."""

_FLOPS = 8
"""Floating-point operations in the time of a byte moved."""

_SMALLEST = 1 << 14
"""Bytes below which a recipe takes more than it spares."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MOVES = _words(
    """chunk clone contiguous expand expand_as flatten getitem movedim narrow permute reshape select split split_with_sizes
    squeeze swapaxes swapdims t transpose unbind unflatten unsqueeze view view_as cat concat stack repeat repeat_interleave
    roll flip tril triu pad broadcast_to _unsafe_view slice alias repeat_kv"""
)
_SIMPLE = _words(
    """add sub mul truediv div neg rsub iadd isub imul itruediv add_ sub_ mul_ div_ neg_ abs square reciprocal where masked_fill
    masked_fill_ maximum minimum clamp clamp_ clamp_min clamp_max relu relu_ relu6 leaky_relu hardtanh hardtanh_ hardsigmoid
    hardswish hardswish_ threshold addcmul addcdiv lerp to float half double bfloat16 type type_as _to_copy sum mean amax amin
    sqrt rsqrt sqrt_ rsqrt_ zeros_like ones_like"""
)
_MATH = _words(
    """pow exp exp_ erf tanh tanh_ sigmoid sigmoid_ gelu silu silu_ mish mish_ elu elu_ selu celu softplus softsign logsigmoid
    log log1p expm1 cos sin softmax log_softmax _softmax _log_softmax layer_norm group_norm rms_norm glu var std norm
    logsumexp widen unit_rms weigh"""
)
_FACTORS = {**dict.fromkeys(_MOVES | _SIMPLE, 1), **dict.fromkeys(_MATH, 2)}
_PLAIN_LAYERS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Threshold, nn.Identity, nn.Flatten),
    *(nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Sigmoid, nn.Tanh),
    *(nn.Softmax, nn.LogSoftmax, nn.Unflatten, nn.GLU, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink),
)
_LAYERS: dict[type[nn.Module], int] = {
    **dict.fromkeys(_PLAIN_LAYERS, 2),
    **dict.fromkeys((nn.LayerNorm, nn.GroupNorm, nn.RMSNorm), 2),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), 1),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), 4),
    nn.Dropout: 2,
}
_HEAVY_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_HEAVY = _words("linear conv1d conv2d conv3d matmul bmm mm addmm baddbmm einsum scaled_dot_product_attention")
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_OUT_OF_PLACE: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.SiLU: F.silu,
    nn.Hardswish: F.hardswish,
    nn.Mish: F.mish,
}


@dataclass
class Value:
    """What one run showed of one node.

    Args:
        node: the node.
        operands: the nodes that it reads.
        storages: of the tensors in its value.
        created: those that none of its operands has.
        changed: storages that it writes to.
        single: its value, if that is one tensor that fills its storage: (shape, stride, dtype, bytes).
        kept: storages that autograd keeps for it, with their versions then.
        sizes: their bytes.
        copies: kept storages that it copies inside: each with the storage that it reads and the geometry.
        moved: bytes of its operands and its value.
        flops: floating-point operations of matrix products, convolutions and attention.
        plain: whether there is no tensor in its value.
    """

    node: fx.Node
    operands: tuple[fx.Node, ...]
    storages: tuple[int, ...] = ()
    created: frozenset[int] = frozenset()
    changed: frozenset[int] = frozenset()
    single: tuple[Any, ...] | None = None
    kept: list[tuple[int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    copies: dict[int, tuple[int, runtime.Geometry]] = field(default_factory=dict)
    moved: int = 0
    flops: int = 0
    plain: bool = False


class Watch(Recorder):
    """Notes what every node reads, makes, changes and keeps; holds all values, so that no storage takes a dead one's number."""

    def __init__(self, gm: nn.Module, graph: fx.Graph, state: set[int]) -> None:
        super().__init__(gm, graph, state)
        self.garbage_collect_values = False
        self.values: dict[fx.Node, Value] = {}
        self.versions: dict[int, int] = {}
        self.alive: list[Any] = []
        self.outside: set[int] = set()
        self.names: dict[int, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Runs ``n`` and notes everything about it."""
        operands = [self.env[a] for a in n.all_input_nodes]
        before = {storage_of(t): (t, t._version) for t in tensors_of(operands)}
        start = len(self.packed)
        with FlopCounterMode(display=False) as counter, runtime.Copies() as copies:
            result = super().run_node(n)
        tensors = list(tensors_of(result))
        self.alive.append(result)
        storages = tuple(dict.fromkeys(storage_of(t) for t in tensors))
        value = Value(n, tuple(n.all_input_nodes), storages)
        value.created = frozenset(s for s in storages if s not in before)
        value.changed = frozenset(s for s, (t, version) in before.items() if t._version != version)
        value.plain = not tensors
        if isinstance(result, Tensor) and result.layout == torch.strided:
            nbytes = result.untyped_storage().nbytes()
            if result.numel() * result.element_size() == nbytes and result.storage_offset() == 0:
                value.single = (tuple(result.shape), tuple(result.stride()), result.dtype, nbytes)
        value.moved = sum(t.numel() * t.element_size() for t in (*tensors, *(t for t, _ in before.values())))
        value.flops = counter.get_total_flops()
        kept = {storage_of(t) for _, t in self.packed[start:] if t._version == 0}
        value.copies = {s: copies.made[s] for s in kept if s in copies.made and s not in storages and s not in before}
        value.sizes = [t.untyped_storage().nbytes() for _, t in self.packed[start:]]
        value.kept = [(storage_of(t), t._version) for _, t in self.packed[start:]]
        for t in (*tensors, *(t for t, _ in before.values())):
            self.versions[storage_of(t)] = t._version
        self.values[n] = value
        return result


def recompute(
    gm: nn.Module, graph: fx.Graph, inputs: Mapping[str, Any], fakes: Callable[[], Fakes | None], rate: float = RATE
) -> list[Decision]:
    """Puts recipes in the place of what is cheap to make again.

    Args:
        gm: the module that holds the graph's submodules; recipes are added to it.
        graph: the graph; nodes that keep something change in place.
        inputs: by placeholder name, real or fake.
        fakes: makes what the graph runs on to be observed.
        rate: bytes kept that a byte moved is worth.

    Returns:
        One decision for each value that is not kept any more.
    """
    watch = look(gm, graph, inputs, fakes)
    rewrite = Rewrite(gm, graph, watch)
    kept = cheapest(rewrite.items, sorted(rewrite.demands), rate)
    return rewrite.apply(rewrite.separately(kept))


def look(gm: nn.Module, graph: fx.Graph, inputs: Mapping[str, Any], fakes: Callable[[], Fakes | None]) -> Watch:
    """What one run shows of every node, after calls that hide a copy of their input were put out of place.

    Args:
        gm: the module that holds the graph's submodules.
        graph: the graph.
        inputs: by placeholder name, real or fake.
        fakes: makes what the graph runs on.
    """
    watch = _observe(gm, graph, inputs, fakes)
    changed = _put_out_of_place(gm, watch)
    changed |= _write_out_norms(gm, graph, watch)
    return _observe(gm, graph, inputs, fakes) if changed else watch


def _observe(gm: nn.Module, graph: fx.Graph, inputs: Mapping[str, Any], fakes: Callable[[], Fakes | None]) -> Watch:
    watch, kinds = record(gm, graph, inputs, fakes(), Watch)
    assert isinstance(watch, Watch)
    watch.outside = set(kinds)
    watch.names = {storage_of(t): name for name, t in gm.named_parameters() if kinds.get(storage_of(t)) == "parameter"}
    # Autograd's graph holds the recorder, which must not hold the graph.
    watch.env.clear()
    watch.alive.clear()
    return watch


def _put_out_of_place(gm: nn.Module, watch: Watch) -> bool:
    done = False
    for node, value in watch.values.items():
        if not value.changed or len(node.args) != 1 or node.kwargs.keys() - {"inplace"}:
            continue
        operand = node.args[0]
        module = module_of(gm, node)
        function: Any = _OUT_OF_PLACE.get(type(module)) if module is not None and not has_hooks(module) else None
        if node.op == "call_function" and node.target in _OUT_OF_PLACE.values():
            function = node.target
        copies = [s for s, _ in value.kept if s not in value.storages and s not in value.changed]
        if function is None or not copies or not isinstance(operand, fx.Node) or list(operand.users) != [node]:
            continue
        if sum(bool({*value.changed} & {*other.storages}) for other in watch.values.values()) - len(_line(node, watch)) > 1:
            continue
        node.op, node.target, node.kwargs = "call_function", function, {}
        done = True
    return done


def _write_out_norms(gm: nn.Module, graph: fx.Graph, watch: Watch) -> bool:
    """Puts the steps of an RMS norm in its place, where autograd keeps one of them that no other node would know."""
    done = False
    for node, value in watch.values.items():
        module = module_of(gm, node)
        if type(module) is not nn.RMSNorm or has_hooks(module) or len(node.args) != 1 or node.kwargs:
            continue
        operands = {s for a in value.operands for s in watch.values[a].storages}
        own = {s for s, _ in value.kept} - operands - {*value.storages} - watch.outside
        if module.weight is None or not module.weight.requires_grad or not own or module.weight.device.type != "cpu":
            continue
        with graph.inserting_before(node):
            layer = graph.create_node("get_attr", str(node.target))
            weight = graph.create_node("get_attr", f"{node.target}.weight")
            wide = graph.call_function(runtime.widen, (node.args[0],))
            unit = graph.call_function(runtime.unit_rms, (layer, wide))
        for step in (wide, unit):
            step.meta = {**node.meta, "is_wrapped": True}
        node.op, node.target, node.args = "call_function", runtime.weigh, (unit, weight, node.args[0])
        node.meta["is_wrapped"] = True
        done = True
    return done


def _line(node: fx.Node, watch: Watch) -> list[fx.Node]:
    """``node`` and those after it that hand on or change its memory: they see what it returns, in place or not."""
    line = [node]
    for one in line:
        mine = {*watch.values[one].storages}
        line += [u for u in one.users if u not in line and mine & {*watch.values[u].storages}]
    return line


@dataclass(frozen=True)
class _Copied:
    """A copy that a call makes inside and keeps.

    Args:
        node: the call.
        source: the node whose value it copies; None for a parameter.
        parameter: name of that.
        geometry: how.
    """

    node: fx.Node
    source: fx.Node | None
    parameter: str
    geometry: runtime.Geometry


@dataclass(frozen=True)
class Batch:
    """Values that one recipe makes.

    Args:
        made: the nodes that it runs, by position.
        wanted: those of them whose values it returns.
    """

    made: tuple[int, ...]
    wanted: tuple[int, ...]


class Rewrite:
    """One graph, its values as items of the problem, and the recipes that come of a plan.

    Args:
        gm: the module that holds the graph's submodules.
        graph: the graph.
        watch: what a run of it showed.
        heavy: whether matrix products, convolutions and attention can be made again too.
    """

    def __init__(self, gm: nn.Module, graph: fx.Graph, watch: Watch, heavy: bool = False) -> None:
        self.gm, self.graph, self.heavy = gm, graph, heavy
        self.values = watch.values
        self.nodes = list(watch.values)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.outside = watch.outside
        self.versions = watch.versions
        self.writers: dict[int, list[fx.Node]] = {}
        for node, value in watch.values.items():
            for storage in value.created | value.changed:
                self.writers.setdefault(storage, []).append(node)
        self.programs: dict[str, str] = {}
        self.masks: dict[fx.Node, fx.Node] = {}
        self.items = [self._item(node) for node in self.nodes]
        self.demands: dict[int, list[fx.Node]] = {}
        for node, value in self.values.items():
            for storage, version in value.kept:
                owner = self._owner(storage)
                if owner is None or version != self.versions[storage]:
                    continue
                position = self.position[owner]
                if (self.items[position].nbytes or 0) >= _SMALLEST and node not in self.demands.setdefault(position, []):
                    self.demands[position].append(node)
        self.copied: dict[int, _Copied] = {}
        for node in self.nodes:
            self._take_copies(node, watch.names)
        self.demands = {position: consumers for position, consumers in self.demands.items() if consumers}

    def place(self, position: int) -> int:
        """Where a value is in the graph; a copy that a call makes inside is where the call is."""
        copied = self.copied.get(position)
        return position if copied is None else self.position[copied.node]

    def separately(self, kept: Collection[int]) -> list[Batch]:
        """A recipe for each wanted value that is not kept; values on its way that only steps of it keep come along.

        Backward wants those right after it, one step after the other.

        Args:
            kept: the plan.
        """
        recipes = {i: needed(self.items, kept, i) for i in sorted(self.demands) if i not in kept}
        batches: list[Batch] = []
        along: set[int] = set()
        for i in sorted(recipes, reverse=True):
            made = recipes[i]
            assert made is not None
            if i in along:
                continue
            steps = {self.nodes[m] for m in made if m not in self.copied}
            near = [j for j in made if j in recipes and j != i and j not in along and steps.issuperset(self.demands[j])]
            along.update(near)
            batches.append(Batch(tuple(sorted(made)), (i, *sorted(near))))
        return batches[::-1]

    def _take_copies(self, node: fx.Node, names: Mapping[int, str]) -> None:
        """Adds a value for each large copy that a call makes inside and keeps, of a value of the graph or a parameter."""
        sizes = dict(zip((s for s, _ in self.values[node].kept), self.values[node].sizes, strict=True))
        for storage, (source, geometry) in self.values[node].copies.items():
            owner = self._owner(source)
            if sizes[storage] < _SMALLEST or (owner is None and source not in names):
                continue
            if owner is not None and self.position[owner] >= self.position[node]:
                continue
            position = len(self.items)
            self.copied[position] = _Copied(node, owner, names.get(source, ""), geometry)
            sources = () if owner is None else (self.position[owner],)
            self.items.append(Item(sizes[storage], sources, _PER_OP + 2 * sizes[storage]))
            self.demands[position] = [node]

    def _owner(self, storage: int) -> fx.Node | None:
        """The node whose value is the last content of a storage, if that is a value that can be kept."""
        writers = self.writers.get(storage)
        if storage in self.outside or not writers:
            return None
        return writers[-1] if self.values[writers[-1]].single is not None else None

    def _item(self, node: fx.Node) -> Item:
        value = self.values[node]
        position = self.position[node]
        if node.op in ("placeholder", "get_attr") or value.plain:
            return Item(0, None)
        if all(s in self.outside and not self.writers.get(s) for s in value.storages):
            return Item(0, None)
        nbytes: int | None = None
        mine = value.created | (value.changed & {*value.storages})
        if value.single is not None and mine and self.writers[next(iter(mine))][-1] is node:
            nbytes = 0 if next(iter(mine)) in self.outside else value.single[3]
        factor = self._factor(node)
        # Who reads memory that was overwritten under another name reads what no recipe of its operand makes.
        fresh = all(
            not any(self.position[a] < self.position[w] < position for w in self.writers.get(s, ()))
            for a in value.operands
            for s in self.values[a].storages
        )
        private = value.changed <= {*value.storages} and not value.changed & self.outside
        if factor is None or not fresh or not private:
            return Item(nbytes, None)
        work = _PER_OP + factor * value.moved + value.flops // _FLOPS if value.created or value.changed else _PER_OP // 8
        return Item(nbytes, tuple(self.position[a] for a in value.operands), work)

    def _factor(self, node: fx.Node) -> int | None:
        """How much more than to move bytes the op of ``node`` takes; None if it is not cheap."""
        if node.op == "call_module":
            module = module_of(self.gm, node)
            assert module is not None
            if has_hooks(module) or "forward" in vars(module) or node.kwargs or len(node.args) != 1:
                return None
            kind = stock_class(module)
            if any(not isinstance(vars(module)["_parameters"].get(n), nn.Parameter | None) for n in ("weight", "bias")):
                return None
            if (kind is nn.Dropout and (module.inplace or module.p == 1)) or getattr(module, "return_indices", False):
                return None
            return 1 if self.heavy and kind in _HEAVY_LAYERS else _LAYERS.get(kind)
        if node.op == "call_method":
            return 1 if self.heavy and node.target in _HEAVY else _FACTORS.get(str(node.target))
        if node.op != "call_function":
            return None
        target: Any = node.target
        if target is getattr or _drop_arguments(node) is not None or _drops_rows(node):
            return 2
        home = getattr(target, "__module__", None)
        if isinstance(target, torch._ops.OpOverload):
            name = target._schema.name.rpartition("::")[2] if target.namespace == "aten" else ""
        elif home is None or home in ("_operator", "math", "torch") or home.startswith(("torch.", "fxmem.ops.")):
            name = target.__name__.strip("_") if home == "_operator" else target.__name__
        else:
            return None
        if name in _HEAVY:
            drops = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
            return 1 if self.heavy and (name != "scaled_dot_product_attention" or drops == 0) else None
        return _FACTORS.get(name)

    def apply(self, batches: Sequence[Batch]) -> list[Decision]:
        """Puts the recipes into the graph.

        Args:
            batches: what each recipe makes.

        Returns:
            A decision for each value that is not kept any more.
        """
        decisions = []
        entries: dict[fx.Node, list[tuple[fx.Node, int, fx.Node | None]]] = {}
        copies: dict[fx.Node, list[tuple[fx.Node, int, fx.Node, runtime.Geometry]]] = {}
        self._hand_out_masks({self.nodes[m] for batch in batches for m in batch.made if m not in self.copied})
        for batch in batches:
            consumers = {c for i in batch.wanted for c in self.demands[i]}
            recipe = self._recipe(batch, consumers)
            how = " -> ".join(
                "copy" if m in self.copied else op_name(self.gm, self.nodes[m]) for m in batch.made if not self._is_view(m)
            )
            for index, i in enumerate(batch.wanted):
                copied = self.copied.get(i)
                owner = self.nodes[i] if copied is None else copied.node
                if copied is not None:
                    source = copied.source
                    if source is None:
                        with self.graph.inserting_before(self._start(self.position[owner])):
                            source = self.graph.create_node("get_attr", copied.parameter)
                    copies.setdefault(owner, []).append((recipe, index, source, copied.geometry))
                for consumer in self.demands[i] if copied is None else ():
                    entries.setdefault(consumer, []).append((recipe, index, None if consumer is owner else owner))
                nbytes = self.items[i].nbytes
                reason = f"not kept: {nbytes} bytes are made again in backward by {how}"
                decisions.append(Decision(owner.name, module_path(owner), "recompute", True, reason, None, source_of(owner)))
        for consumer in dict.fromkeys((*entries, *copies)):
            self._consume(consumer, entries.get(consumer, []), copies.get(consumer, []))
        return decisions

    def _is_view(self, position: int) -> bool:
        if position in self.copied:
            return False
        value = self.values[self.nodes[position]]
        return not value.created and not value.changed

    def _hand_out_masks(self, made: set[fx.Node]) -> None:
        """Dropout and batch norm nodes that are made again return their mask, or their statistics, as well."""
        for node in self.nodes:
            arguments = _drop_arguments(node)
            module = module_of(self.gm, node)
            layer = module is not None and (stock_class(module) is nn.Dropout or _is_batch_norm(module))
            if node not in made or not (arguments is not None or layer or _drops_rows(node)):
                continue
            with self.graph.inserting_before(node):
                if _drops_rows(node):
                    pair = self._call(runtime.drop_rows, (self._function(node.target), *node.args), dict(node.kwargs))
                elif layer:
                    get = self.graph.create_node("get_attr", str(node.target))
                    pair = self._call(runtime.normalize if _is_batch_norm(module) else runtime.drop, (get, node.args[0]))
                else:
                    assert arguments is not None
                    pair = self._call(runtime.drop_function, arguments)
            node.op, node.target = "call_function", operator.getitem
            node.args, node.kwargs = (pair, 0), {}
            with self.graph.inserting_after(node):
                self.masks[node] = self.graph.call_function(operator.getitem, (pair, 1))

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        node = self.graph.call_function(function, args, kwargs)
        node.meta["is_wrapped"] = True
        return node

    def _recipe(self, batch: Batch, consumers: set[fx.Node]) -> fx.Node:
        """A node, ahead of all consumers, that makes the recipe for a batch."""
        program = fx.Graph()
        inside: dict[fx.Node, fx.Node] = {}
        operands: list[fx.Node] = []
        values: dict[int, fx.Node] = {}

        def operand(node: fx.Node) -> fx.Node:
            if node not in inside:
                operands.append(node)
                with program.inserting_before():
                    inside[node] = program.placeholder(f"operand_{len(operands)}")
            return inside[node]

        first = min(map(self.position.__getitem__, consumers))
        sources = {s for m in batch.made for s in self.items[m].sources or () if s not in batch.made}
        # A dropout that is made again is itself no source, and its mask is there right after it.
        sources |= {m for m in batch.made if m not in self.copied and self.nodes[m] in self.masks}
        after = max(sources, default=-1) + 1
        with self.graph.inserting_before(self._start(max(first, after))):
            for m in batch.made:
                if m in self.copied:
                    values[m] = self._copy(program, self.copied[m], operand)
                else:
                    node = self.nodes[m]
                    values[m] = inside[node] = self._step(program, node, operand)
            program.output(tuple(values[i] for i in batch.wanted))
            name = self._program(program)
            get = self.graph.create_node("get_attr", f"{RECIPES}.{name}")
            # Each placeholder was put in front of those before it.
            operands.reverse()
            if after <= first:
                return self._call(runtime.recipe, (get, *operands))
        with self.graph.inserting_before(self._start(first)):
            recipe = self._call(runtime.promise, (self.values[self.nodes[first]].operands[0],))
        with self.graph.inserting_before(self._start(after)):
            self._call(runtime.fulfil, (recipe, get, *operands))
        return recipe

    def _copy(self, program: fx.Graph, copied: _Copied, operand: Callable[[fx.Node], fx.Node]) -> fx.Node:
        source = copied.source or self.graph.create_node("get_attr", copied.parameter)
        step = program.call_function(runtime.copy_again, (operand(source), copied.geometry))
        step.meta["is_wrapped"] = True
        return step

    def _start(self, position: int) -> fx.Node:
        """The first node of the call at a position, which may have become a pair and its first part."""
        node = self.nodes[position]
        return node.args[0] if node in self.masks else node  # type: ignore[return-value]

    def _step(self, program: fx.Graph, node: fx.Node, operand: Callable[[fx.Node], fx.Node]) -> fx.Node:
        def again(function: Callable[..., Any], *args: fx.Node) -> fx.Node:
            step = program.call_function(function, args)
            step.meta["is_wrapped"] = True
            return step

        if node in self.masks:
            pair: Any = node.args[0]
            source = pair.args[0 if pair.target is runtime.drop_function else 1]
            ways: dict[Any, Callable[..., Any]] = {
                runtime.drop_rows: runtime.drop_rows_again,
                runtime.normalize: runtime.normalize_again,
            }
            return again(ways.get(pair.target, runtime.drop_again), operand(source), operand(self.masks[node]))
        module = module_of(self.gm, node)
        if module is None:
            args = fx.map_arg(node.args, operand)
            step = program.create_node(node.op, node.target, args, fx.map_arg(node.kwargs, operand))
            step.meta["is_wrapped"] = node.meta.get("is_wrapped", False)
            return step
        (source,) = node.args
        assert isinstance(source, fx.Node)
        layer = self.graph.create_node("get_attr", str(node.target))
        if isinstance(module, (*_NORMS, *_HEAVY_LAYERS)):
            named = {n for n, p in module._parameters.items() if p is not None}
            tensors = [
                operand(self.graph.create_node("get_attr", f"{node.target}.{n}")) if n in named else None
                for n in ("weight", "bias")
            ]
            return again(runtime.weighted_again, operand(layer), operand(source), *tensors)  # type: ignore[arg-type]
        return again(runtime.layer_again, operand(layer), operand(source))

    def _program(self, graph: fx.Graph) -> str:
        """Name of the program among the recipes; equal ones are the same."""
        graph.lint()
        program = fx.GraphModule({}, graph, "Recipe")
        holder = self.gm._modules.setdefault(RECIPES, nn.Module())
        assert holder is not None
        key = program.code
        if key not in self.programs:
            self.programs[key] = f"program_{len(self.programs)}"
            holder.add_module(self.programs[key], program)
        return self.programs[key]

    def _consume(
        self,
        node: fx.Node,
        found: list[tuple[fx.Node, int, fx.Node | None]],
        copies: list[tuple[fx.Node, int, fx.Node, runtime.Geometry]],
    ) -> None:
        node = self._start(self.position[node])
        args: tuple[Any, ...] = node.args
        function: Any
        with self.graph.inserting_before(node):
            if node.op == "call_module":
                function = self.graph.create_node("get_attr", str(node.target))
            elif node.op == "call_method":
                function = str(node.target)
            else:
                function = self._function(node.target)
        kwargs = dict(node.kwargs)
        node.op, node.target = "call_function", runtime.consume
        node.args, node.kwargs = (function, tuple(found), args, kwargs, *((tuple(copies),) if copies else ())), {}
        node.meta["is_wrapped"] = True

    def _function(self, target: Any) -> fx.Node:
        """A node for a function, which a graph can pass on as a module only."""
        holder: Any = self.gm._modules.setdefault(RECIPES, nn.Module())
        name = "function_" + getattr(target, "__name__", "call").replace(".", "_")
        while name in holder._modules and holder._modules[name].function is not target:
            name += "_"
        if name not in holder._modules:
            holder.add_module(name, runtime.Function(target))
        return self.graph.create_node("get_attr", f"{RECIPES}.{name}")


def _is_batch_norm(module: nn.Module | None) -> bool:
    return isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)


def _drops_rows(node: fx.Node) -> bool:
    """Whether it is torchvision's stochastic depth, with the input as its first argument."""
    target: Any = node.target
    home = "torchvision.ops.stochastic_depth"
    return node.op == "call_function" and getattr(target, "__module__", "") == home and bool(node.args)


def _drop_arguments(node: fx.Node) -> tuple[Any, ...] | None:
    """(input, p, whether it drops) of a call of the function dropout that is not in place."""
    if node.op != "call_function" or node.target not in (F.dropout, torch.dropout, dropout.dropout, dropout._torch_dropout):
        return None
    function: Any = dropout._torch_dropout if node.target in (torch.dropout, dropout._torch_dropout) else dropout.dropout
    arguments = bound_arguments(function, node)
    if arguments is None or arguments.get("inplace", False) is not False:
        return None
    return arguments["input"], arguments.get("p", 0.5), arguments.get("training", arguments.get("train", True))
