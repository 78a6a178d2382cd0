"""Recipes: what a call of torch keeps for backward, replaced by how to make it again.

A call runs under saved-tensor hooks that take note of what autograd keeps for it. Of what is known to be the value of a recipe
only the recipe stays, everything else is kept as it is. What recipes are made of is kept through ``save_for_backward`` of a
function outside of those hooks: whoever listens to saved tensors (offloading, checkpoints, the report) is shown it, torch
checks its version, and it lives exactly as long as those who need it.

Backward makes a value when it first asks for it and holds it until everybody that keeps it has asked. It is made by the same
kernels from the same numbers under the same autocast. Autograd puts it at its place in the graph, so it can be
differentiated again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd import Variable, forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from fxmem.ops.common import PLAIN
from fxmem.ops.dropout import Mask, dropout_again, dropout_with_mask

_Layout = tuple[torch.Size, tuple[int, ...], int]


class _Keep(torch.autograd.Function):
    """Keeps tensors and has nothing to do with anybody's gradient: its node is held by those who need them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        raise AssertionError("nothing is made of this output")


def _keep(tensors: list[Tensor]) -> Any:
    """A node of autograd's graph that keeps ``tensors`` and gives them back as its ``saved_tensors``."""
    return _Keep.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn


class _Slot:
    """Stands for a tensor among the other operands of a recipe."""


_SLOT: Final = _Slot()


class Recipe:
    """How to make some values again."""

    def __init__(self) -> None:
        self._program: nn.Module | None = None
        self._operands: Any = ()
        self._kept: Any = None
        self._autocast: tuple[str, bool, torch.dtype | None] = ("cpu", False, None)
        self._handles: dict[int, list[weakref.ref[_Handle]]] = {}
        self._held: dict[int, tuple[Tensor, set[int]]] = {}
        self._task = -1

    def fill(self, program: nn.Module, operands: tuple[Any, ...]) -> None:
        """Says what to make the values of.

        Args:
            program: called with the operands, returns the values.
            operands: tensors, tuples of tensors, and whatever else the program takes.
        """
        tensors: list[Tensor] = []
        self._program = program
        self._operands = _take_out(operands, tensors)
        self._kept = _keep(tensors) if tensors else None
        self._autocast = _autocast(tensors[0].device.type if tensors else "cpu")

    def add(self, handle: _Handle, index: int) -> None:
        """Counts ``handle`` among those that will ask for the value ``index``."""
        self._handles.setdefault(index, []).append(weakref.ref(handle))

    def value(self, index: int, asker: _Handle) -> Tensor:
        """The value ``index``, made or held."""
        task = torch._C._current_graph_task_id()
        if task < 0:
            return self._make()[index]
        if task != self._task:
            self._held.clear()
            self._task = task
        if index not in self._held:
            self._hold(self._make())
        value, waiting = self._held[index]
        waiting.discard(id(asker))
        if not waiting:
            del self._held[index]
        return value

    def _hold(self, values: tuple[Tensor, ...]) -> None:
        waiting = 0
        for i, value in enumerate(values):
            askers = {id(handle) for ref in self._handles.get(i, ()) if (handle := ref()) is not None}
            if askers:
                self._held[i] = (value, askers)
                waiting += len(askers)
        if waiting > 1:
            # Of a backward pass that visits a part of the graph alone, some never ask.
            held = weakref.ref(self)
            Variable._execution_engine.queue_callback(lambda: _release(held))

    def _make(self) -> tuple[Tensor, ...]:
        tensors = iter(self._kept.saved_tensors if self._kept is not None else ())
        operands = _put_back(self._operands, tensors)
        device, enabled, dtype = self._autocast
        same = _autocast(device) == self._autocast
        with torch.no_grad(), nullcontext() if same else torch.autocast(device, dtype, enabled, cache_enabled=False):
            assert self._program is not None, "backward ran before the forward pass was over"
            values: tuple[Tensor, ...] = self._program.forward(*operands)
        return values


def _release(recipe: weakref.ref[Recipe]) -> None:
    found = recipe()
    if found is not None:
        found._held.clear()


def _autocast(device: str) -> tuple[str, bool, torch.dtype | None]:
    if not torch.amp.is_autocast_available(device):
        return device, False, None
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _take_out(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _SLOT
    return tuple(_take_out(v, tensors) for v in value) if type(value) in (tuple, list) else value


def _put_back(value: Any, tensors: Iterator[Tensor]) -> Any:
    if value is _SLOT:
        return next(tensors)
    return tuple(_put_back(v, tensors) for v in value) if type(value) is tuple else value


Geometry = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, tuple[int, ...], tuple[int, ...], torch.dtype]
"""Of a copy that a call makes inside: size, strides, offset and dtype of what is read; size, strides and dtype of the copy."""


class Copies(TorchDispatchMode):
    """Takes note of the copies that a call makes inside: of part of which storage, and with which geometry."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[int, Geometry]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op, and notes it if it copies."""
        result = func(*args, **(kwargs or {}))
        if func in _COPYING:
            source = args[0]
            if source.layout == result.layout == torch.strided and _is_new(source, result):
                geometry = (*_geometry(source), source.dtype, tuple(result.shape), tuple(result.stride()), result.dtype)
                self.made[result.untyped_storage()._cdata] = (source.untyped_storage()._cdata, geometry)
        return result


_COPYING = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


def _is_new(source: Tensor, result: Tensor) -> bool:
    return source.untyped_storage()._cdata != result.untyped_storage()._cdata and source.device == result.device


def _geometry(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


@fx.wrap
def copy_again(source: Tensor, geometry: Geometry) -> Tensor:
    """A copy that a call made inside.

    Args:
        source: the value or parameter that it was made of.
        geometry: how.
    """
    size, stride, offset, _, shape, strides, dtype = geometry
    copied = torch.empty_strided(shape, strides, dtype=dtype, device=source.device)
    return copied.copy_(source.as_strided(size, stride, offset))


_UNSEEN = ContextVar("unseen", default=False)


@contextmanager
def unseen() -> Iterator[None]:
    """While it lasts, whoever reads what a node of autograd's graph keeps gets a stand-in, and nothing is made."""
    token = _UNSEEN.set(True)
    try:
        yield
    finally:
        _UNSEEN.reset(token)


class _Handle:
    """What autograd holds in place of a tensor: the tensor until its call is over, then where to have it from."""

    __slots__ = ("__weakref__", "index", "layout", "source", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.source: Any = None
        self.index = 0
        self.layout: _Layout | None = None

    def unpack(self) -> Tensor:
        if _UNSEEN.get():
            return torch.empty(1)
        if self.tensor is not None:
            return self.tensor
        if self.layout is None:
            kept: Tensor
            (kept,) = self.source.saved_tensors
            return kept
        value: Tensor = self.source.value(self.index, self)
        return value if _layout(value) == self.layout else value.as_strided(*self.layout)


def _layout(tensor: Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


@fx.wrap
def promise(_: object = None) -> Recipe | None:
    """A recipe that is filled later, or None where autograd does not record, or others must see the tensors themselves.

    It steps aside under ``torch.func`` transforms, forward-mode AD and ``torch.compile``, and where saved-tensor hooks are
    forbidden. The argument is for tracers, which record a call of a wrapped function only if it is given something traced.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    hooks: Any = torch._C._autograd
    return Recipe() if hooks._saved_tensors_hooks_is_enabled() else None


@fx.wrap
def fulfil(recipe: Recipe | None, program: nn.Module, *operands: Any) -> None:
    """Fills a promised recipe.

    Args:
        recipe: what ``promise`` returned.
        program: called with the operands, returns the values.
        operands: tensors, tuples of tensors, and whatever else the program takes.
    """
    if recipe is not None:
        recipe.fill(program, operands)


@fx.wrap
def recipe(program: nn.Module, *operands: Any) -> Recipe | None:
    """A recipe, or None where there is none to promise.

    Args:
        program: called with the operands, returns the values.
        operands: tensors, tuples of tensors, and whatever else the program takes.
    """
    new = promise()
    fulfil(new, program, *operands)
    return new


@fx.wrap
def consume(
    function: Callable[..., Any] | str,
    recipes: tuple[tuple[Recipe | None, int, Tensor | None], ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    copies: tuple[tuple[Recipe | None, int, Tensor, Geometry], ...] = (),
) -> Any:
    """Calls ``function``; of what autograd keeps for it, values of the recipes stay as recipes.

    Args:
        function: a function or module, or the name of a method of the first argument.
        recipes: (recipe, which of its values, that value); None as the value stands for what the function returns.
        args: its positional arguments.
        kwargs: its keyword arguments.
        copies: (recipe, which of its values, the value or parameter that ``function`` copies inside, the geometry of that).
    """
    call: Callable[..., Any] = function if callable(function) else getattr(args[0], function)
    args = args if callable(function) else args[1:]
    present = [(r, i, v) for r, i, v in recipes if r is not None]
    inside = {(v.untyped_storage()._cdata, g): (r, i) for r, i, v, g in copies if r is not None and type(v) in PLAIN}
    if not present and not inside:
        return call(*args, **kwargs)
    with Copies() if inside else nullcontext() as seen:
        handles, result = _listen(lambda: call(*args, **kwargs))
    known = {}
    for r, i, value in present:
        value = result if value is None else value
        if isinstance(value, Tensor) and type(value) in PLAIN and value.layout == torch.strided:
            known[value.untyped_storage()._cdata] = (r, i, value.dtype)
    others = []
    for handle in handles:
        tensor = handle.tensor
        assert tensor is not None
        found = known.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
        if found is None and seen is not None and tensor.layout == torch.strided and tensor._version == 0:
            copied = inside.get(seen.made.get(tensor.untyped_storage()._cdata, (0, None)))
            found = None if copied is None else (*copied, tensor.dtype)
        if found is None or found[2] != tensor.dtype:
            others.append(handle)
            continue
        handle.source, handle.index, _ = found
        handle.layout, handle.tensor = _layout(tensor), None
        found[0].add(handle, handle.index)
    _keep_all(others)
    return result


def _listen(call: Callable[[], Any]) -> tuple[list[_Handle], Any]:
    """What autograd keeps for a call, in order, and what it returns."""
    handles: list[_Handle] = []

    def pack(tensor: Tensor) -> _Handle:
        handles.append(_Handle(tensor))
        return handles[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, _Handle.unpack):
        result = call()
    found = handles[:]
    # Autograd holds the hook, and the hook this list.
    handles.clear()
    return found, result


def _keep_all(handles: list[_Handle]) -> None:
    """Keeps what the handles hold, as autograd would."""
    for handle in handles:
        assert handle.tensor is not None
        # Each by itself, because a checkpoint lets a tensor be asked for once.
        handle.source, handle.tensor = _keep([handle.tensor]), None


class Function(nn.Module):
    """A function as a module, for a graph to pass on.

    Args:
        function: anything callable that can be pickled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)


class Statistics:
    """What a batch norm layer computed with besides its input, without the tensors.

    Args:
        known: whether the batch's own statistics are among the tensors.
        trains: whether it used the batch's statistics.
        eps: added to the variance.
        updates: number and dtype of the running statistics that it updated.
    """

    __slots__ = ("eps", "known", "trains", "updates")

    def __init__(self, known: bool, trains: bool, eps: float, updates: tuple[int, torch.dtype] | None) -> None:
        self.known, self.trains, self.eps, self.updates = known, trains, eps, updates


_State = tuple[Statistics, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@fx.wrap
def normalize(module: nn.modules.batchnorm._BatchNorm, input: Tensor) -> tuple[Tensor, _State]:
    """The output of a batch norm layer, and what ``normalize_again`` takes.

    In train mode that is the batch's mean and inverse deviation, which autograd keeps anyway, where the kernel is known to
    make the output of them: torch's own on CPU. Elsewhere the batch's statistics are computed again.

    Args:
        module: the layer.
        input: (N, C, ...).
    """
    mean, var, weight = module.running_mean, module.running_var, module.weight
    trains = module.training or (mean is None and var is None)
    updates = (mean.numel(), mean.dtype) if trains and module.training and mean is not None else None
    state = (
        Statistics(False, trains, module.eps, updates),
        weight,
        module.bias,
        None if trains else mean,
        None if trains else var,
    )
    dense = input.is_contiguous() or (input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last))
    if not (trains and dense and input.device.type == "cpu" and type(input) in PLAIN) or promise() is None:
        return module(input), state
    handles, result = _listen(lambda: module(input))
    statistics = [h.tensor for h in handles[-2:] if h.tensor is not None]
    dtypes = {t.dtype for t in (*statistics, *(t for t in (weight, module.bias) if t is not None))}
    fits = len(statistics) == 2 and all(t.shape == input.shape[1:2] for t in statistics)
    if fits and len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64} and _name(result) == "NativeBatchNormBackward0":
        state = Statistics(True, False, 0.0, None), weight, module.bias, statistics[0].detach(), statistics[1].detach()
    _keep_all(handles)
    return result, state


def _name(result: Tensor) -> str:
    return "" if result.grad_fn is None else result.grad_fn.name()


@fx.wrap
def normalize_again(input: Tensor, state: _State) -> Tensor:
    """The output of a batch norm layer; no running statistics change.

    Args:
        input: (N, C, ...).
        state: what ``normalize`` returned besides.
    """
    how, weight, bias, mean, var = state
    if how.known:
        assert mean is not None
        assert var is not None
        # The kernel computes the factor ``weight / sqrt(var)``, here 1 times what it was in train mode, and then as there.
        factor = var if weight is None else var * weight
        return F.batch_norm(input, mean, torch.ones_like(mean), factor, bias, False, 0.0, 0.0)
    if how.updates is not None:
        # Which kernel runs may depend on whether there are any.
        mean, var = (input.new_zeros(how.updates[0], dtype=how.updates[1]) for _ in range(2))
    return F.batch_norm(input, mean, var, weight, bias, how.trains, 0.0, how.eps)


@fx.wrap
def drop(module: nn.Dropout, input: Tensor) -> tuple[Tensor, Mask | tuple[Tensor] | None]:
    """The output of a dropout layer, and what ``drop_again`` takes: None if it drops nothing.

    Args:
        module: the layer.
        input: any shape.
    """
    return drop_function(input, module.p, module.training)


@fx.wrap
def drop_function(input: Tensor, p: float = 0.5, training: bool = True) -> tuple[Tensor, Mask | tuple[Tensor] | None]:
    """``torch.nn.functional.dropout``, and what ``drop_again`` takes: None if it drops nothing.

    Args:
        input: any shape.
        p: probability of zeroing an element.
        training: whether to drop at all.
    """
    if not training or p == 0:
        return F.dropout(input, p, training), None
    output, mask = dropout_with_mask(input, p)
    return output, (output,) if mask is None else mask


@fx.wrap
def drop_again(input: Tensor, mask: Mask | tuple[Tensor] | None) -> Tensor:
    """The output of a dropout, from its input.

    Args:
        input: what it was given.
        mask: what ``drop`` returned besides: its mask, or the output itself where there is none.
    """
    if mask is None:
        return input
    return mask[0] if len(mask) == 1 else dropout_again(input, mask)


@fx.wrap
def drop_rows(
    function: Callable[..., Tensor], input: Tensor, p: float, mode: str, training: bool = True
) -> tuple[Tensor, Tensor | None]:
    """The output of torchvision's stochastic depth, and its factors: None if it drops nothing.

    Args:
        function: ``torchvision.ops.stochastic_depth``.
        input: (N, ...).
        p: probability of zeroing a row, or everything.
        mode: ``"row"`` or ``"batch"``.
        training: whether to drop at all.
    """
    if not training or p == 0:
        return function(input, p, mode, training), None
    # It draws one number per row, or one in all, whatever else the shape is.
    factors = function(input.new_ones((input.shape[0], *(1 for _ in input.shape[1:]))), p, mode, training)
    return input * factors, factors


@fx.wrap
def drop_rows_again(input: Tensor, factors: Tensor | None) -> Tensor:
    """The output of stochastic depth, from its input.

    Args:
        input: what it was given.
        factors: what ``drop_rows`` returned besides.
    """
    return input if factors is None else input * factors


@fx.wrap
def weighted_again(module: nn.Module, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The output of a layer, group or RMS norm, linear or convolution layer.

    Args:
        module: the layer, for its settings.
        input: what it was given.
        weight: its weight.
        bias: its bias.
    """
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(input, module.num_groups, weight, bias, module.eps)
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(input, module.normalized_shape, weight, module.eps)
    if isinstance(module, nn.Linear):
        assert weight is not None
        return F.linear(input, weight, bias)
    if isinstance(module, nn.modules.conv._ConvNd):
        convolve: Any = module
        return convolve._conv_forward(input, weight, bias)
    assert isinstance(module, nn.LayerNorm)
    return F.layer_norm(input, module.normalized_shape, weight, bias, module.eps)


@fx.wrap
def layer_again(module: nn.Module, *args: Any) -> Any:
    """The output of a layer without parameters, and without its hooks.

    Args:
        module: the layer.
        args: what it was given.
    """
    return module.forward(*args)


@fx.wrap
def widen(input: Tensor) -> Tensor:
    """What an RMS norm computes with: the input, in float32 if it is narrower.

    Args:
        input: any shape, floating-point.
    """
    return input.float() if input.dtype in (torch.float16, torch.bfloat16) else input


@fx.wrap
def unit_rms(module: nn.RMSNorm, input: Tensor) -> Tensor:
    """The input over its root mean square, in the steps of torch's RMS norm on CPU.

    Args:
        module: the layer, for its settings.
        input: (..., *normalized_shape), what ``widen`` returned.
    """
    eps = torch.finfo(input.dtype).eps if module.eps is None else module.eps
    dims = list(range(input.dim() - len(module.normalized_shape), input.dim()))
    return input.mul(torch.rsqrt(torch.pow(input, 2).mean(dims, True).add_(eps)))


@fx.wrap
def weigh(unit: Tensor, weight: Tensor, input: Tensor) -> Tensor:
    """The last step of an RMS norm.

    Args:
        unit: what ``unit_rms`` returned.
        weight: the layer's weight.
        input: the layer's input, for its dtype.
    """
    return unit.mul(weight).type_as(input)
