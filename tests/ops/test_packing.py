"""Bit packing: the round trip is exact for any size, dtype and layout, and fake kernels tell the truth."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from harness import LAYOUTS, assert_identical, operand, special
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxmem.ops.packing import (
    BLOCK,
    dense_stride,
    pack_nonzero,
    relu_pack,
    scale_backward,
    threshold_backward,
    unpack,
)

NUMELS = (0, 1, 7, 8, 9, 63, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def round_trip(mask_of: Tensor, dtype: torch.dtype) -> Tensor:
    packed = pack_nonzero(mask_of)
    assert packed.dtype is torch.uint8
    assert packed.shape == (-(-mask_of.numel() // 8),)
    return unpack(packed, tuple(mask_of.shape), dense_stride(mask_of), dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("numel", NUMELS)
def test_round_trip_of_floats(numel: int, dtype: torch.dtype) -> None:
    x = special(numel, dtype=dtype)
    assert_identical((x != 0).to(dtype), round_trip(x, dtype), "mask")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("numel", NUMELS)
def test_round_trip_of_masks(numel: int, dtype: torch.dtype) -> None:
    x = (operand(numel) > 0).to(dtype)
    if dtype is torch.uint8:
        x *= 255  # any nonzero value counts, not only 1
    assert_identical((x != 0).float(), round_trip(x, torch.float32), "mask")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 1, 9), (1, 1, 1), (4, 0, 3)], ids=str)
def test_every_dense_layout_keeps_its_strides(shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    inverse = tuple(order.index(i) for i in range(3))
    x = special(*shape).permute(order).contiguous().permute(inverse)
    assert dense_stride(x) == x.stride()
    assert_identical((x != 0).float(), round_trip(x, torch.float32), "mask")


@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 3, 4, 5, 3), (2, 1, 3, 3), (3, 4, 1, 1)], ids=str)
def test_channels_last(shape: tuple[int, ...], layout: str) -> None:
    x = special(*shape, layout=layout)
    assert dense_stride(x) == x.stride()
    assert_identical((x != 0).float(), round_trip(x, torch.float32), "mask")


@pytest.mark.parametrize("layout", ["gapped", "expanded"])
def test_a_tensor_with_gaps_or_overlaps_is_read_row_major(layout: str) -> None:
    x = special(3, 5, 7, layout=layout)
    assert dense_stride(x) == (35, 7, 1)
    assert_identical((x != 0).float().contiguous(), round_trip(x, torch.float32), "mask")


@given(
    shape=st.lists(st.integers(0, 7), max_size=4),
    bits=st.integers(0, 2**31),
    dtype=st.sampled_from(FLOATS),
    data=st.data(),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_round_trip_property(shape: list[int], bits: int, dtype: torch.dtype, data: Any) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    inverse = [order.index(i) for i in range(len(shape))]
    generator = torch.Generator().manual_seed(bits)
    mask = torch.rand(shape, generator=generator) < (bits % 5) / 4
    x = (mask.to(dtype) * 3).permute(order).contiguous().permute(inverse)
    assert_identical(mask.to(dtype).as_strided_(x.shape, x.stride()).copy_(x != 0), round_trip(x, dtype), "mask")


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("numel", NUMELS)
def test_relu_pack_is_relu_and_its_mask(numel: int, dtype: torch.dtype, inplace: bool) -> None:
    x = special(numel, dtype=dtype)
    expected = torch.relu(x)
    given_input = x.clone()
    output, packed = relu_pack(given_input, inplace)
    assert (output is given_input) == inplace
    assert_identical(expected, output, "output")
    assert_identical(pack_nonzero(expected), packed, "mask")
    if not inplace:
        assert_identical(x, given_input, "input")


@pytest.mark.parametrize("grad_layout", sorted(LAYOUTS))
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_backward_forms_agree_with_torch(dtype: torch.dtype, layout: str, grad_layout: str) -> None:
    output = torch.relu(special(2, 3, 5, 7, dtype=dtype, layout=layout))
    grad = operand(2, 3, 5, 7, dtype=dtype, seed=1, layout=grad_layout)
    packed, stride = pack_nonzero(output), dense_stride(output)
    expected = torch.ops.aten.threshold_backward(grad, output, 0)
    assert_identical(expected, threshold_backward(grad, packed, stride), "threshold")
    noise = (output != 0).to(dtype).mul_(1.25)
    assert_identical(grad * noise, scale_backward(grad, packed, stride, 1.25), "scale")


@pytest.mark.parametrize("numel", NUMELS)
def test_backward_forms_in_blocks(numel: int) -> None:
    output, grad = torch.relu(special(numel)), special(numel).flip(0)
    packed = pack_nonzero(output)
    expected = torch.ops.aten.threshold_backward(grad, output, 0)
    assert_identical(expected, threshold_backward(grad, packed, (1,)), "threshold")
    noise = (output != 0).float().mul_(1.25)
    assert_identical(grad * noise, scale_backward(grad, packed, (1,), 1.25), "scale")


SAMPLES = [
    (name, layout, grad_layout)
    for name in ("pack_nonzero", "relu_pack", "relu_pack_", "unpack")
    for layout, grad_layout in zip(LAYOUTS, LAYOUTS, strict=True)
    if name != "relu_pack_" or layout != "expanded"  # in place on overlapping memory is refused, by torch too
] + [
    (name, layout, grad_layout)
    for name in ("threshold_backward", "scale_backward")
    for layout in ("contiguous", "channels_last")
    for grad_layout in LAYOUTS
]


@pytest.mark.parametrize(("name", "layout", "grad_layout"), SAMPLES)
def test_fake_kernels_and_schemas(name: str, layout: str, grad_layout: str) -> None:
    x = special(2, 3, 5, 7, layout=layout)
    grad = operand(2, 3, 5, 7, seed=1, layout=grad_layout)
    packed, stride = pack_nonzero(x), list(dense_stride(x))
    args: tuple[Any, ...] = {
        "pack_nonzero": (x,),
        "relu_pack": (x,),
        "relu_pack_": (x,),
        "unpack": (packed, list(x.shape), stride, torch.float32),
        "threshold_backward": (grad, packed, stride),
        "scale_backward": (grad, packed, stride, 1.25),
    }[name]
    op = getattr(torch.ops.fxmem, name).default
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_the_default_device_does_not_matter() -> None:
    x = special(100)
    with torch.device("meta"):
        output, packed = relu_pack(x, False)
        mask = unpack(packed, (100,), (1,), torch.float32)
    assert_identical(torch.relu(x), output, "output")
    assert_identical((output != 0).float(), mask, "mask")
