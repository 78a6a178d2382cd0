"""What fake tensors get wrong about bytes, put right.

- Attention on a CUDA device that is not there: torch cannot ask the driver which kernel to take. What is taken here holds for
  devices of compute capability 8.0 and later, in torch's own order: flash, memory-efficient, plain arithmetic.
- Transformers looks into position ids for packed sequences, cannot where they are fake, and then makes masks of full size: they
  are taken not to be packed.
- The workspace that oneDNN's recurrent layers keep for backward is empty in torch's fake implementation: its size is asked of
  the kernel itself.
- The fake backward of batch norm returns gradients that were not asked for, and its forward, on CPU and under autocast,
  statistics of the input's dtype in place of the wider one.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

_stock = F.scaled_dot_product_attention


@contextmanager
def faithful() -> Iterator[None]:
    """While it lasts, fake tensors take the bytes that real ones would."""
    places: list[tuple[Any, str, Any]] = []
    if not torch.cuda.is_available():
        places.append((F, "scaled_dot_product_attention", _attention))
    masking = sys.modules.get("transformers.masking_utils")
    if hasattr(masking, "find_packed_sequence_indices"):
        places.append((masking, "find_packed_sequence_indices", _unpacked))
    stock = [getattr(place, name) for place, name, _ in places]
    for place, name, ours in places:
        setattr(place, name, ours)
    try:
        with _Corrections():
            yield
    finally:
        for (place, name, _), old in zip(places, stock, strict=True):
            setattr(place, name, old)


class _Corrections(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if func is aten.native_batch_norm_backward.default:
            return tuple(t if wanted else None for t, wanted in zip(result, args[9], strict=True))
        if func is aten.native_batch_norm.default and args[0].device.type == "cpu" and args[5]:
            y, *statistics = result
            wide = next((t.dtype for t in args[1:5] if t is not None and t.dtype != args[0].dtype), None)
            return (y, *(t.to(wide) for t in statistics)) if wide and isinstance(y, FakeTensor) else result
        if func is aten.mkldnn_rnn_layer.default and torch.is_grad_enabled():
            *values, workspace = result
            if isinstance(workspace, FakeTensor) and not workspace.numel():
                key = tuple((tuple(a.shape), a.dtype) if isinstance(a, Tensor) else _frozen(a) for a in args)
                return (*values, workspace.new_empty(_rnn_workspace(key)))
        return result


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@functools.lru_cache
def _rnn_workspace(key: tuple[Any, ...]) -> int:
    """Bytes of the workspace of one layer, from a run of it; ``key`` are its arguments, tensors as (shape, dtype)."""
    with unset_fake_temporarily():
        real = (
            torch.zeros(k[0], dtype=k[1]) if isinstance(k, tuple) and len(k) == 2 and isinstance(k[0], tuple) else k
            for k in key
        )
        return int(torch.ops.aten.mkldnn_rnn_layer.default(*real)[3].numel())


def _unpacked(position_ids: Tensor) -> None:
    return None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    width, heads = query.shape[-1], query.shape[1] if query.dim() == 4 else 0
    fused = (
        isinstance(query, FakeTensor)
        and query.device.type == "cuda"
        and query.dim() == key.dim() == value.dim() == 4
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and min(query.shape[2], key.shape[2]) > 0
    )
    flash = fused and attn_mask is None and query.dtype != torch.float32 and width <= 256 and value.shape[-1] == width
    scale = scale if scale is not None else 1 / math.sqrt(width)
    aten: Any = torch.ops.aten
    result: Tensor
    if flash:
        padding = -width % 8
        q, k, v = (F.pad(t, (0, padding)) if padding else t for t in (query, key, value))
        result = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return result[..., :width] if padding else result
    if fused and not enable_gqa and not (attn_mask is not None and is_causal):
        bias = attn_mask
        if bias is not None:
            if bias.dtype == torch.bool:
                bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), -math.inf)
            bias = bias.expand(query.shape[0], heads, query.shape[2], key.shape[2])
        grad = any(t.requires_grad for t in (query, key, value))
        result = aten._scaled_dot_product_efficient_attention(query, key, value, bias, grad, dropout_p, is_causal, scale=scale)[
            0
        ]
        return result
    return _stock(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
