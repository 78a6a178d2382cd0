"""Attention of fake tensors as it is of real ones.

On a CUDA device that is not there, torch cannot ask the driver which kernel to take. What is taken here holds for devices
of compute capability 8.0 and later, in torch's own order: flash attention, the memory-efficient kernel, plain arithmetic.
Transformers looks into position ids for packed sequences, cannot where they are fake, and makes masks of full size then: they
are taken not to be packed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_stock = F.scaled_dot_product_attention


@contextmanager
def attention_of_fakes() -> Iterator[None]:
    """While it lasts, attention of fake tensors runs as that of real ones would."""
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
        yield
    finally:
        for (place, name, _), old in zip(places, stock, strict=True):
            setattr(place, name, old)


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
