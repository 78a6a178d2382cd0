"""Fake tensors that stand for a model's own: shapes, dtypes and strides without memory, on whatever device is asked for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class Fakes:
    """Makes one fake tensor of each tensor, the same one whenever it is asked again.

    Args:
        given: tensors of the model and its inputs; if one of them is fake, its mode is taken.
        device: device of the fake tensors, which need not exist on this machine; each one's own by default, CPU for ``meta``.
        dtype: dtype of those with floating-point numbers; each one's own by default.
        real: pass clones of the real tensors through instead, for runs that fake tensors cannot follow.
    """

    def __init__(
        self,
        given: Iterable[Tensor] = (),
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        real: bool = False,
    ) -> None:
        modes = (t.fake_mode for t in given if isinstance(t, FakeTensor))
        self.mode = None if real else next(modes, None) or FakeTensorMode(allow_non_fake_inputs=True)
        self.device, self.dtype = device, dtype
        self._made: dict[int, Tensor] = {}
        # An id is a tensor's only while it lives.
        self._asked: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        """The fake tensor of ``tensor``, with its requires_grad."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = self._make(tensor)
            self._asked.append(tensor)
        return self._made[id(tensor)]

    def _make(self, tensor: Tensor) -> Tensor:
        if self.mode is None:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        device = self.device or (torch.device("cpu") if tensor.device.type == "meta" else tensor.device)
        dtype = self.dtype if self.dtype and tensor.is_floating_point() else tensor.dtype
        # What a graph leads to begins anew here: what is before it is not the model's.
        given = tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)
        fake = given if isinstance(given, FakeTensor) else self.mode.from_tensor(given)
        if _same(fake.device, device) and fake.dtype == dtype:
            return fake
        with self.mode, torch.no_grad():
            moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
        return moved.requires_grad_(tensor.requires_grad)


def _same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index or 0) == (other.index or 0)
