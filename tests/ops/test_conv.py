"""Convolutions: eager's results for every mask, and no input kept for a frozen weight."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import compare, compare_all, kept, kept_by_hooks, leaves, masks, operand
from torch import Tensor, nn

from fxmem.ops import conv

CONVS = [(F.conv1d, conv.conv1d, 1), (F.conv2d, conv.conv2d, 2), (F.conv3d, conv.conv3d, 3)]
TRANSPOSED = [
    (F.conv_transpose1d, conv.conv_transpose1d, 1),
    (F.conv_transpose2d, conv.conv_transpose2d, 2),
    (F.conv_transpose3d, conv.conv_transpose3d, 3),
]
SIZES = (9, 7, 5)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

conv_forms = pytest.mark.parametrize(("stock", "ours", "dims"), CONVS, ids=["1d", "2d", "3d"])
transposed_forms = pytest.mark.parametrize(("stock", "ours", "dims"), TRANSPOSED, ids=["1d", "2d", "3d"])
every_form = pytest.mark.parametrize(
    ("stock", "ours", "dims"), CONVS + TRANSPOSED, ids=[f.__name__ for f, _, _ in CONVS + TRANSPOSED]
)


def operands(
    dims: int,
    *,
    groups: int = 1,
    bias: bool = True,
    batch: int | None = 2,
    kernel: int = 3,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
) -> list[Tensor | None]:
    """Input (N, 4, ...), weight and bias of a convolution from 4 to 4 channels, regular or transposed."""
    lead = () if batch is None else (batch,)
    return [
        operand(*lead, 4, *SIZES[:dims], dtype=dtype, layout=layout),
        operand(4, 4 // groups, *([kernel] * dims), dtype=dtype, seed=1),
        operand(4, dtype=dtype, seed=2) if bias else None,
    ]


def bind(op: Any, **options: Any) -> Any:
    return lambda x, w, b: op(x, w, b, **options)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 1, "groups": 2},
    {"padding": 2, "dilation": 2},
    {"stride": 3, "padding": 1, "dilation": 2, "groups": 4},
]


@conv_forms
@pytest.mark.parametrize(("options", "bias"), [*((o, True) for o in OPTIONS), ({}, False)], ids=str)
def test_options_and_masks(stock: Any, ours: Any, dims: int, options: dict[str, Any], bias: bool) -> None:
    tensors = operands(dims, groups=options.get("groups", 1), bias=bias)
    compare_all(bind(stock, **options), bind(ours, **options), tensors, odd=False)


@transposed_forms
@pytest.mark.parametrize(
    ("options", "bias"),
    [*((o, True) for o in OPTIONS[1:3]), ({"stride": 3, "output_padding": 2, "groups": 4}, True), ({}, False)],
    ids=str,
)
def test_transposed_options_and_masks(stock: Any, ours: Any, dims: int, options: dict[str, Any], bias: bool) -> None:
    tensors = operands(dims, groups=options.get("groups", 1), bias=bias)
    compare_all(bind(stock, **options), bind(ours, **options), tensors, odd=False)


@every_form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(stock: Any, ours: Any, dims: int, dtype: torch.dtype) -> None:
    compare_all(bind(stock, stride=2, padding=1), bind(ours, stride=2, padding=1), operands(dims, dtype=dtype))


@every_form
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "gapped", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(stock: Any, ours: Any, dims: int, layout: str, dtype: torch.dtype) -> None:
    if layout == "transposed" and dims == 1:
        layout = "channels_last"  # the same thing in one dimension
    tensors = operands(dims, dtype=dtype, layout=layout)
    compare_all(bind(stock, stride=2, padding=1), bind(ours, stride=2, padding=1), tensors)


@pytest.mark.parametrize(("stock", "ours"), [(F.conv2d, conv.conv2d), (F.conv_transpose2d, conv.conv_transpose2d)])
def test_channels_last_weight(stock: Any, ours: Any) -> None:
    x, w, b = operands(2)
    assert w is not None
    compare_all(bind(stock), bind(ours), [x, w.contiguous(memory_format=torch.channels_last), b])


@pytest.mark.parametrize("channels", [(1, 4), (4, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_single_channels_and_pointwise(channels: tuple[int, int], kernel: int, layout: str) -> None:
    """Where one dimension is of size 1 the strides do not tell the memory format."""
    given, made = channels
    tensors = [
        operand(2, given, 5, 7, layout=layout),
        operand(made, given, kernel, kernel, seed=1),
        operand(made, seed=2),
    ]
    compare_all(F.conv2d, conv.conv2d, tensors)


@every_form
@pytest.mark.parametrize("batch", [0, None, 1])
def test_empty_and_missing_batch(stock: Any, ours: Any, dims: int, batch: int | None) -> None:
    compare_all(bind(stock, stride=2), bind(ours, stride=2), operands(dims, batch=batch))


@conv_forms
@pytest.mark.parametrize("batch", [2, None])
@pytest.mark.parametrize(("padding", "kernel", "dilation"), [("same", 3, 1), ("same", 4, 2), ("valid", 3, 1)])
def test_named_padding(stock: Any, ours: Any, dims: int, padding: str, kernel: int, dilation: int, batch: int | None) -> None:
    options = {"padding": padding, "dilation": dilation}
    compare_all(bind(stock, **options), bind(ours, **options), operands(dims, kernel=kernel, batch=batch), odd=False)


def test_uneven_same_padding() -> None:
    """Torch warns once in a process that it pads before; we pad too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for stock, ours, dims in CONVS:
            for batch in (2, None):
                tensors = operands(dims, kernel=4, batch=batch)
                compare_all(bind(stock, padding="same"), bind(ours, padding="same"), tensors)


@conv_forms
def test_bad_padding_is_refused_as_torch_does(stock: Any, ours: Any, dims: int) -> None:
    args = leaves(operands(dims), (True, False, False))
    for op in (stock, ours):
        with pytest.raises(RuntimeError, match="Invalid padding string"):
            op(*args, padding="sane")
        with pytest.raises(RuntimeError, match="not supported for strided"):
            op(*args, padding="same", stride=2)


@every_form
def test_bad_shapes_are_refused_as_torch_does(stock: Any, ours: Any, dims: int) -> None:
    x, w, b = leaves(operands(dims), (True, False, False))
    assert x is not None
    assert w is not None
    messages = []
    for op in (stock, ours):
        for bad in (x[:, :3], x[0, 0], x[None]):
            with pytest.raises(RuntimeError) as raised:
                op(bad, w, b)
            messages.append(str(raised.value).splitlines()[0])
    assert messages[:3] == messages[3:]


@every_form
def test_complex_is_left_to_torch(stock: Any, ours: Any, dims: int) -> None:
    x, w, _ = operands(dims)
    assert x is not None
    assert w is not None
    args = [torch.complex(x, x.flip(-1)).requires_grad_(), torch.complex(w, w)]
    y, z = stock(*args), ours(*args)
    assert torch.equal(y, z)
    cotangent = torch.complex(*[operand(*y.shape, seed=s) for s in (3, 4)])
    assert torch.equal(*[torch.autograd.grad(out, args[0], cotangent)[0] for out in (y, z)])


def low(op: Any) -> Any:
    def call(*args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return op(*args)

    return call


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_under_autocast(stock: Any, ours: Any, dims: int, dtype: torch.dtype) -> None:
    tensors = operands(dims, dtype=dtype)
    compare_all(low(bind(stock, stride=2, padding=1)), low(bind(ours, stride=2, padding=1)), tensors)


def after_an_activation(op: Any) -> Any:
    return lambda x, w, b: op(x.neg(), w, b)  # the derivative of neg keeps nothing, so the input is the convolution's own


@every_form
@pytest.mark.parametrize("autocast", [False, True])
def test_bytes(stock: Any, ours: Any, dims: int, autocast: bool) -> None:
    tensors = operands(dims)
    x, w, _ = tensors
    assert x is not None
    assert w is not None
    eager, selective = (after_an_activation(low(op) if autocast else op) for op in (stock, ours))
    for mask in masks(tensors):
        # A trainable weight takes torch's own op.
        stock_bytes = kept_by_hooks(eager, leaves(tensors, mask))
        assert kept_by_hooks(selective, leaves(tensors, mask)) == (stock_bytes if mask[1] else 0), mask
        assert stock_bytes == (2 * (x.numel() + w.numel()) if autocast else 4 * x.numel()), mask
    assert kept(selective, tensors, (True, False, True)) == 0


MODULES: list[tuple[type[nn.Module], type[nn.Module], int]] = [
    (nn.Conv1d, conv.SelectiveConv1d, 1),
    (nn.Conv2d, conv.SelectiveConv2d, 2),
    (nn.Conv3d, conv.SelectiveConv3d, 3),
    (nn.ConvTranspose1d, conv.SelectiveConvTranspose1d, 1),
    (nn.ConvTranspose2d, conv.SelectiveConvTranspose2d, 2),
    (nn.ConvTranspose3d, conv.SelectiveConvTranspose3d, 3),
]
module_forms = pytest.mark.parametrize(("stock", "ours", "dims"), MODULES, ids=[m.__name__ for m, _, _ in MODULES])


def twins(stock: type[nn.Module], ours: type[nn.Module], *args: Any, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """The same frozen-weight layer of both classes."""
    eager, selective = stock(*args, **kwargs), ours(*args, **kwargs)
    selective.load_state_dict(eager.state_dict())
    for module in (eager, selective):
        module.weight.requires_grad_(False)
    return eager, selective


@module_forms
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_padding_modes(stock: type[nn.Module], ours: type[nn.Module], dims: int, mode: str) -> None:
    if "Transpose" in stock.__name__ and mode != "zeros":
        with pytest.raises(ValueError, match="zeros"):
            ours(4, 6, 3, padding=1, padding_mode=mode)
        return
    eager, selective = twins(stock, ours, 4, 6, 3, padding=1, padding_mode=mode, stride=2)
    x = operand(2, 4, *SIZES[:dims])
    compare(eager, selective, [x], [True])
    frozen_input = [torch.autograd.grad(m(x).square().sum(), m.bias)[0] for m in (eager, selective)]
    assert torch.equal(*frozen_input)


@module_forms
def test_output_size(stock: type[nn.Module], ours: type[nn.Module], dims: int) -> None:
    if "Transpose" not in stock.__name__:
        return
    eager, selective = twins(stock, ours, 4, 6, 3, stride=2, padding=1)
    x = operand(2, 4, *SIZES[:dims])
    size = [2 * n for n in SIZES[:dims]]
    assert selective(x, output_size=size).shape[2:] == torch.Size(size)
    compare(lambda x: eager(x, output_size=size), lambda x: selective(x, output_size=size), [x], [True])
    for module in (eager, selective):
        with pytest.raises(ValueError, match="output size"):
            module(x, output_size=[n + 9 for n in size])
