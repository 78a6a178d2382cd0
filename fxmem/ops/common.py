"""What every op family needs: when to step in, and stand-ins for inputs whose values backward never reads."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, overload
from typing import cast as cast_type

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

# AOTAutograd wraps the plain tensors of the graphs that it traces in FunctionalTensor.
PLAIN = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)


def intercepted(*operands: object) -> bool:
    """Whether ``__torch_function__`` should be shown our own function: under a mode, and for a tracer's proxies.

    A tensor subclass is not: it falls through to torch's function, which it may know by identity.

    Args:
        operands: the operands of the call.
    """
    if any(isinstance(t, Tensor) and type(t) not in PLAIN for t in operands):
        return False
    return has_torch_function(operands)


_Form = TypeVar("_Form", bound=Callable[..., Any])


def form(ours: _Form) -> _Form:
    """Our form of a function of torch, which tracers and modes get to see as one call."""

    @functools.wraps(ours)
    def seen(*args: Any, **kwargs: Any) -> Any:
        operands = [v for v in (*args, *kwargs.values()) if hasattr(type(v), "__torch_function__")]
        if intercepted(*operands):
            return handle_torch_function(seen, operands, *args, **kwargs)
        return ours(*args, **kwargs)

    return cast_type(_Form, seen)


def engaged(*tensors: Tensor | None) -> bool:
    """Whether a selective-save op should run in place of torch's own.

    It should when autograd records the call and every tensor is a plain one. Under ``torch.func`` transforms and
    forward-mode AD, and for tensor subclasses, torch's own op runs: the result is the same, only nothing is saved.

    Args:
        tensors: the operands of the call; None stands for an absent one.
    """
    if not torch.is_grad_enabled():
        return False
    needed = False
    for t in tensors:
        if t is None:
            continue
        if type(t) not in PLAIN:
            return False
        needed = needed or t.requires_grad
    return needed and not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def is_leaf_memory(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a leaf or a view of one: autograd refuses to change those in place."""
    base = tensor._base
    return tensor.is_leaf or (base is not None and base.is_leaf)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype to which autocast would cast ``tensor`` for a matrix product or convolution here, or None."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    if not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return None
    return torch.get_autocast_dtype(device)


@overload
def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor: ...
@overload
def cast(tensor: None, dtype: torch.dtype | None) -> None: ...
def cast(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """``tensor`` in ``dtype`` as autocast would cast it: float64 and integers stay; None stays None."""
    if tensor is None or dtype is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(dtype)


# Pages that are private to the process and only read are all one page of zeros, so a stand-in may be used again and again.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


@functools.lru_cache(maxsize=64)
def _untouched(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    pages = mmap.mmap(-1, extent * dtype.itemsize, **_PRIVATE)
    return torch.frombuffer(pages, dtype=dtype).as_strided(shape, stride)


@dataclass(frozen=True)
class Layout:
    """Shape, strides and dtype of a tensor that is not kept."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The layout of ``tensor``."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def stand_in(self, like: Tensor) -> Tensor:
        """A tensor of this layout for kernels that read only the shape and the strides of an argument.

        On CPU it lies in fresh anonymous pages of which none is ever touched, so it costs address space and no memory:
        oneDNN calls ``contiguous()`` on such arguments, and any smaller tensor would be copied to full size. On other
        devices (and for fake tensors) it is one element, expanded, with strides that suggest the same memory format.

        Args:
            like: a tensor on the device to use.
        """
        if 0 in self.shape:
            return like.new_empty_strided(self.shape, self.stride, dtype=self.dtype)
        # To Dynamo a fake tensor passes for a plain one.
        if like.device.type == "cpu" and type(like) in (Tensor, nn.Parameter) and not torch.compiler.is_dynamo_compiling():
            return _untouched(self.shape, self.stride, self.dtype)
        if len(self.shape) in (4, 5) and self.stride[1] == 1 and self.shape[1] > 1:
            # Channels-last is recognised by its strides alone, and all-zero strides read as contiguous.
            small = [1] * len(self.shape)
            small[0], small[2] = self.shape[0], self.shape[2]
            return like.new_empty(small, dtype=self.dtype).expand(self.shape)
        return like.new_empty((1,) * len(self.shape), dtype=self.dtype).expand(self.shape)

    def zeros(self, like: Tensor) -> Tensor:
        """Zeros in the memory format that ``torch.zeros_like`` gives a tensor of this layout.

        Args:
            like: a tensor on the device to use.
        """
        stride = torch.empty_like(torch.empty_strided(self.shape, self.stride, device="meta")).stride()
        return like.new_empty_strided(self.shape, stride, dtype=self.dtype).zero_()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of ``tensor`` fill one stretch of memory, each address once, in any order of dims."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class Site:
    """One call that a rule may replace, with what the analysis knows of it.

    Args:
        module: the module called, or None for a function or method.
        arguments: the call's arguments by the name torch's functional form gives them, values or nodes.
        requires_grad: which of them require grad.
        names: the parameter's qualified name, for those that are parameters.
        inplace: whether the call overwrites its input.
    """

    module: nn.Module | None
    arguments: Mapping[str, object]
    requires_grad: Mapping[str, bool]
    names: Mapping[str, str] = field(default_factory=dict)
    inplace: bool = False

    def needs(self, argument: str) -> bool:
        """Whether ``argument`` requires grad; absent ones do not."""
        return self.requires_grad.get(argument, False)

    def name(self, argument: str) -> str:
        """What to call ``argument`` in a message."""
        return self.names.get(argument, argument)


@dataclass(frozen=True)
class Verdict:
    """A rule's answer for one site.

    Args:
        apply: whether the selective op keeps less there.
        reason: one sentence for the user.
        remedy: what the user could do about a refusal.
        instead_of: ``"input"`` or ``"output"`` when the op keeps a mask in place of that, which wins only if nobody else keeps
            it; None when it wins anyway.
        bits: of that mask, per element.
    """

    apply: bool
    reason: str
    remedy: str | None = None
    instead_of: Literal["input", "output"] | None = None
    bits: int = 1


@dataclass(frozen=True)
class Rule:
    """What one op family replaces, when, and by what.

    Args:
        name: the family.
        eager: what torch keeps, for the table of supported ops.
        needed: what is kept instead.
        modules: exact module class to the subclass that replaces it.
        functions: torch function to our function of the same signature.
        methods: tensor method to our function of the same signature, the tensor first.
        check: the decision for one site.
    """

    name: str
    eager: str
    needed: str
    check: Callable[[Site], Verdict]
    modules: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    functions: Mapping[Callable[..., object], Callable[..., object]] = field(default_factory=dict)
    methods: Mapping[str, Callable[..., object]] = field(default_factory=dict)


def weight_trains(site: Site, when: str = "") -> Verdict:
    """The refusal of a site whose weight requires grad; ``when`` says under what condition freezing it would help."""
    name = site.name("weight")
    return Verdict(
        False,
        f"kept: {name} requires grad, and its gradient is made of the input",
        f"freezing {name} lets the input go{when}",
    )


NO_GRADIENT = Verdict(False, "nothing to save: no gradient flows through it")


def ntuple(value: int | Sequence[int], n: int) -> list[int]:
    """``value`` as a list of ``n`` ints, as torch's own ops expand a single one."""
    if isinstance(value, int):
        return [value] * n
    values = list(value)
    return values * n if len(values) == 1 else values
