"""The Triton kernels agree with torch's ops: in Triton's interpreter on CPU, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import LAYOUTS, assert_identical, compare, operand, special
from torch import Tensor

from fxmem.ops import activation, dropout, packing, pool, relu

pytest.importorskip("triton", reason="this build of torch comes without Triton")

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUMELS = (0, 1, 7, 8, 9, 31, 1023, 1025, 8 * 1024 + 9)
FEW_LAYOUTS = ("contiguous", "channels_last", "gapped")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
# The interpreter computes in numpy, which warns of what floating-point hardware does silently.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """The kernels' module, imported anew as one for the interpreter."""
    spec = importlib.util.find_spec("fxmem.ops.triton_kernels")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def fused(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The ops run on the interpreted kernels."""
    for module in (packing, pool):
        monkeypatch.setattr(module, "fused", lambda device: kernels)
    return kernels


def by_torch(mask: Tensor) -> Tensor:
    """A mask packed as torch's ops pack it on any device but the CPU."""
    return packing.pack_whole(mask, torch.empty(-(-mask.numel() // 8), dtype=torch.uint8, device=mask.device))


def on_piece(piece: str, x: Tensor, bounds: tuple[float, ...]) -> Tensor:
    """Where torch's derivative on CUDA is not 0 (leaky ReLU: is 1), by what its source says."""
    work = x if x.dtype is torch.float64 else x.float()
    # A bound as a tensor of one dimension takes part in type promotion.
    opmath = [torch.tensor([b], dtype=work.dtype, device=x.device) for b in bounds]
    rounded = [b.to(x.dtype).to(work.dtype) for b in opmath]
    if piece == "nonzero":
        return work != 0
    if piece == "positive":
        return work > 0
    if piece == "negative":
        return work < 0
    if piece == "threshold":
        return ~(work <= rounded[0])
    if piece == "hardtanh":
        return ~((work <= opmath[0]) | (work >= opmath[1]))
    if piece == "hardsigmoid":
        return (work > -3) & (work < 3)
    return ~((work >= -rounded[0]) & (work <= rounded[0]))


# The bounds: exact in every dtype, and rounded by all of them.
PIECES: list[tuple[str, tuple[float, ...]]] = [
    ("nonzero", ()),
    ("positive", ()),
    ("negative", ()),
    ("hardsigmoid", ()),
    *(("threshold", (b,)) for b in (0.0, 0.5, 0.1)),
    *(("hardshrink", (b,)) for b in (0.5, 0.1)),
    *(("softshrink", (b,)) for b in (0.5, 0.1)),
    *(("hardtanh", b) for b in ((-1.0, 1.0), (0.0, 6.0), (-0.1, 0.7))),
]


def at_bounds(numel: int, dtype: torch.dtype, bounds: tuple[float, ...]) -> Tensor:
    """NaN, infinities, zeros of both signs, and elements at and next to the bounds."""
    x = special(numel, dtype=dtype)
    edges = [e for b in (*bounds, 3.0) for e in (b, -b)]
    steps = torch.tensor(edges, dtype=torch.float64).to(dtype).repeat_interleave(3)
    steps[1::3] = torch.nextafter(steps[1::3], torch.full_like(steps[1::3], math.inf))
    steps[2::3] = torch.nextafter(steps[2::3], torch.full_like(steps[2::3], -math.inf))
    place = x[1::3]
    place[: steps.numel()] = steps[: place.numel()]
    return x


@pytest.mark.parametrize(("piece", "bounds"), PIECES, ids=str)
def test_pieces(kernels: ModuleType, piece: str, bounds: tuple[float, ...]) -> None:
    for dtype in FLOATS:
        x = at_bounds(1025, dtype, bounds)
        if dtype is torch.bfloat16:  # whose subnormal numbers the interpreter converts to wrong ones
            x[x.abs() < torch.finfo(dtype).tiny] = 0
        assert_identical(by_torch(on_piece(piece, x, bounds)), kernels.pack(x, piece, bounds), str(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("piece", "bounds"), [p for p in PIECES if p[0] != "nonzero"], ids=str)
def test_pieces_are_those_of_the_cpu(kernels: ModuleType, piece: str, bounds: tuple[float, ...], dtype: torch.dtype) -> None:
    # The CPU's vector code has its own answer for NaN.
    x = at_bounds(1025, dtype, bounds).nan_to_num(0.3, math.inf, -math.inf)
    assert_identical(activation.pack_piece(x, piece, bounds), kernels.pack(x, piece, bounds), "bits")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("numel", NUMELS)
def test_masks_of_other_types(kernels: ModuleType, numel: int, dtype: torch.dtype) -> None:
    x = (operand(numel) > 0).to(dtype)
    if dtype is not torch.bool:
        x *= 200  # any nonzero value counts, not only 1
    assert_identical(by_torch(x != 0), kernels.pack(x, "nonzero"), "bits")


@pytest.mark.parametrize(("layout", "inplace"), [*itertools.product(LAYOUTS, [False]), *itertools.product(FEW_LAYOUTS, [True])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_relu_pack(fused: ModuleType, dtype: torch.dtype, layout: str, inplace: bool) -> None:
    x = special(2, 3, 5, 7, dtype=dtype, layout=layout)
    mine = LAYOUTS[layout](x.clone())
    output, packed = packing.relu_pack(mine, inplace)
    assert_identical(torch.relu_(LAYOUTS[layout](x.clone())) if inplace else torch.relu(x), output, "output")
    assert (output is mine) == inplace
    mask = packing.unpack(packed, tuple(output.shape), packing.dense_stride(output), torch.float32)
    assert torch.equal(mask, (output != 0).float())


@pytest.mark.parametrize("numel", NUMELS)
def test_relu_pack_of_odd_sizes(fused: ModuleType, numel: int) -> None:
    for dtype in FLOATS:
        x = special(numel, dtype=dtype)
        output, packed = packing.relu_pack(x.clone(), False)
        assert_identical(torch.relu(x), output, "output")
        assert_identical(by_torch(output != 0), packed, "bits")


@pytest.mark.parametrize("grad_layout", FEW_LAYOUTS)
@pytest.mark.parametrize("layout", FEW_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_forms_agree_with_torch(fused: ModuleType, dtype: torch.dtype, layout: str, grad_layout: str) -> None:
    mask = torch.relu(special(2, 3, 5, 7, dtype=dtype, layout=layout))
    _backward_forms(mask, LAYOUTS[grad_layout](special(2, 3, 5, 7, dtype=dtype).flip(0)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_backward_forms_of_odd_sizes(fused: ModuleType, dtype: torch.dtype) -> None:
    for numel in NUMELS:
        _backward_forms(torch.relu(special(numel, dtype=dtype)), special(numel, dtype=dtype).flip(0))


def _interpreted(work: Tensor, dtype: torch.dtype) -> Tensor:
    """``work`` in ``dtype`` as the interpreter converts it: it cuts bfloat16 off where every device rounds."""
    if dtype is not torch.bfloat16:
        return work.to(dtype)
    return (work.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _backward_forms(mask: Tensor, grad: Tensor) -> None:
    packed, stride = packing.pack_nonzero(mask), packing.dense_stride(mask)
    ones = mask.new_empty_strided(mask.shape, stride).copy_(mask != 0)
    expected = torch.ops.aten.threshold_backward(grad, ones, 0)
    assert_identical(expected, packing.threshold_backward(grad, packed, stride), "threshold")
    expected = torch.ops.aten.hardtanh_backward(grad, ones, 0, 2)
    assert_identical(expected, packing.hardtanh_backward(grad, packed, stride), "hardtanh")
    if grad.stride() != stride or not grad.is_contiguous():
        # Two to the power of minus two: nothing is to be rounded.
        expected = torch.ops.aten.leaky_relu_backward(grad, ones, 0.25, False)
        assert_identical(expected, packing.leaky_backward(grad, packed, stride, 0.25), "leaky")
        assert_identical(grad * ones.mul(0.25), packing.scale_backward(grad, packed, stride, 0.25), "scale")
        return
    work = grad if grad.dtype is torch.float64 else grad.float()
    expected = torch.where(ones > 0, grad, _interpreted(work * 0.1, grad.dtype))
    assert_identical(expected, packing.leaky_backward(grad, packed, stride, 0.1), "leaky")
    expected = _interpreted(work * ones.to(work.dtype).mul(1 / 0.9), grad.dtype)
    assert_identical(expected, packing.scale_backward(grad, packed, stride, 1 / 0.9), "scale")


ACTIVATIONS: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
    ("relu", F.relu, relu.relu),
    ("leaky_relu", F.leaky_relu, activation.leaky_relu),
    ("hardtanh", F.hardtanh, activation.hardtanh),
    ("relu6", F.relu6, activation.relu6),
    ("hardsigmoid", F.hardsigmoid, activation.hardsigmoid),
    ("hardshrink", F.hardshrink, activation.hardshrink),
    ("softshrink", F.softshrink, activation.softshrink),
    ("threshold", lambda x: F.threshold(x, 0.1, 2.0), lambda x: activation.threshold(x, 0.1, 2.0)),
    ("abs", torch.abs, activation.abs),
    ("dropout", lambda x: F.dropout(x, 0.3), lambda x: dropout.dropout(x, 0.3)),
]
NAMES = [name for name, _, _ in ACTIVATIONS]


@pytest.mark.parametrize("layout", FEW_LAYOUTS)
@pytest.mark.parametrize(("name", "stock", "ours"), ACTIVATIONS, ids=NAMES)
def test_ops_on_the_kernels(
    fused: ModuleType, name: str, stock: Callable[..., Any], ours: Callable[..., Any], layout: str
) -> None:
    x = LAYOUTS[layout](operand(2, 3, 5, 7).mul(4))
    compare(stock, ours, [x], [True])


POOLS: list[tuple[str, int, dict[str, Any]]] = [
    *(("max_pool", dims, {"kernel_size": 3, "stride": 2, "padding": 1}) for dims in (1, 2, 3)),
    ("max_pool", 2, {"kernel_size": (2, 3), "stride": (3, 1), "dilation": (1, 2), "padding": (1, 0), "ceil_mode": True}),
    ("max_pool", 3, {"kernel_size": (2, 1, 3), "stride": 2, "dilation": (2, 1, 1)}),
    *(("adaptive_max_pool", dims, {"output_size": 4}) for dims in (1, 2, 3)),
    ("adaptive_max_pool", 2, {"output_size": (3, None)}),
]


def pool_sample(dims: int, layout: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return LAYOUTS[layout](special(2, 3, *(13, 11, 9)[:dims], dtype=dtype))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("kind", "dims", "options"), POOLS, ids=str)
def test_pools_on_the_kernels(fused: ModuleType, kind: str, dims: int, options: dict[str, Any], layout: str) -> None:
    stock, ours = getattr(F, f"{kind}{dims}d"), getattr(pool, f"{kind}{dims}d")
    compare(lambda x: stock(x, **options), lambda x: ours(x, **options), [pool_sample(dims, layout)], [True])


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("numel", [1, 9, 1025])
def test_pool_offsets_of_odd_sizes(fused: ModuleType, monkeypatch: pytest.MonkeyPatch, numel: int, layout: str) -> None:
    x = LAYOUTS[layout](special(1, 3, numel, 4))
    _, indices = F.max_pool2d(x, (3, 2), (2, 1), (1, 1), return_indices=True)
    indices = LAYOUTS[layout](indices)
    count = list(indices.shape[-2:])
    windows = ([2, 1], [1, 1], [1, 1], count, [1, 1], [3, 2], [numel, 4])
    offsets = torch.ops.fxmem.window_offsets(indices, *windows)
    assert_identical(indices, torch.ops.fxmem.window_indices(offsets, *windows), "indices")
    monkeypatch.setattr(pool, "fused", lambda device: None)
    assert_identical(torch.ops.fxmem.window_offsets(indices, *windows), offsets, "offsets")
    assert_identical(indices, torch.ops.fxmem.window_indices(offsets, *windows), "indices by torch")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernels_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str) -> None:
    """For a GPU, without one; every load and store of elements moves 16 bytes."""
    from triton import language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from fxmem.ops import triton_kernels

    def ptx(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in ("n", "m") or name in types}
        source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
        return str(compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"])

    common = {"WORK": tl.float32, "BLOCK": 1024 if dtype == "bf16" else 512}
    pointers = dict.fromkeys(("input", "output", "grad"), f"*{dtype}") | {"packed": "*u8"}
    numbers = dict.fromkeys(("first", "second", "factor"), "i64")
    for piece in ("nonzero", "relu", "hardtanh", "hardsigmoid", "threshold", "hardshrink", "positive", "negative"):
        text = ptx(triton_kernels._pack_kernel, pointers | numbers, {"PIECE": piece, **common})
        assert (text.count("ld.global.v4.b32"), text.count("st.global.v4.b32")) == (8, 8 if piece == "relu" else 0)
    for form in ("unpack", "keep", "leaky", "scale"):
        text = ptx(triton_kernels._mask_kernel, pointers | numbers, {"FORM": form, **common})
        assert (text.count("ld.global.v4.b32"), text.count("st.global.v4.b32")) == (0 if form == "unpack" else 8, 8)
    for forward, place in itertools.product((True, False), (tl.int32, tl.int64)):
        constants = {"FORWARD": forward, "PLACE": place, "BLOCK": 512}
        assert ptx(triton_kernels._pool_kernel, {"indices": "*i64", "offsets": "*u8"}, constants)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on this machine's CUDA device")
def test_where_the_kernels_do_not_run_torch_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    load = packing._triton_kernels.__wrapped__
    with pytest.warns(RuntimeWarning, match="torch's own kernels take the place of fxmem's"):
        assert load(torch.device("cuda")) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert load(torch.device("cuda")) is None


def test_the_cpu_has_kernels_of_its_own() -> None:
    assert packing.fused(torch.device("cpu")) is None


@on_gpu
@pytest.mark.parametrize(("name", "stock", "ours"), ACTIVATIONS, ids=NAMES)
@pytest.mark.parametrize("triton", [True, False])
def test_on_cuda(
    monkeypatch: pytest.MonkeyPatch, triton: bool, name: str, stock: Callable[..., Any], ours: Callable[..., Any]
) -> None:
    if triton:
        assert packing.fused(torch.device("cuda", 0)) is not None
    else:
        monkeypatch.setattr(packing, "fused", lambda device: None)
    for shape, dtype, layout in itertools.product(((2, 3, 5, 7), (1, 1, 1, 1), (3, 5, 41, 101)), FLOATS, LAYOUTS):
        x = LAYOUTS[layout](special(*shape, dtype=dtype).cuda())
        results = []
        for op in (stock, ours):
            torch.manual_seed(3)
            leaf = x.detach().requires_grad_()
            output = op(leaf)
            grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
            results.append((output.detach(), *torch.autograd.grad(output, leaf, torch.empty_like(output).copy_(grad))))
        for eager, mine in zip(*results, strict=True):
            assert eager.stride() == mine.stride()
            assert_identical(eager.cpu(), mine.cpu(), f"{name} {shape} {dtype} {layout}")


@on_gpu
@pytest.mark.parametrize(("piece", "bounds"), PIECES, ids=str)
def test_pieces_on_cuda(monkeypatch: pytest.MonkeyPatch, piece: str, bounds: tuple[float, ...]) -> None:
    def pack(x: Tensor) -> Tensor:
        return packing.pack_nonzero(x) if piece == "nonzero" else activation.pack_piece(x, piece, bounds)

    for numel, dtype in itertools.product(NUMELS, FLOATS):
        x = at_bounds(numel, dtype, bounds).cuda()
        ours = pack(x)
        assert_identical(by_torch(on_piece(piece, x, bounds)), ours, f"{numel} {dtype}")
        with monkeypatch.context() as patch:
            patch.setattr(packing, "fused", lambda device: None)
            assert_identical(pack(x), ours, f"{numel} {dtype}: as several of torch's ops")


@on_gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("kind", "dims", "options"), POOLS, ids=str)
@pytest.mark.parametrize("triton", [True, False])
def test_pools_on_cuda(
    monkeypatch: pytest.MonkeyPatch, triton: bool, kind: str, dims: int, options: dict[str, Any], layout: str
) -> None:
    if not triton:
        monkeypatch.setattr(pool, "fused", lambda device: None)
    stock, ours = getattr(F, f"{kind}{dims}d"), getattr(pool, f"{kind}{dims}d")
    x = pool_sample(dims, layout).cuda()
    results = []
    for op in (stock, ours):
        leaf = x.detach().requires_grad_()
        output = op(leaf, **options)
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).cuda()
        results.append((output.detach(), *torch.autograd.grad(output, leaf, grad)))
    assert torch.equal(results[0][0].nan_to_num(), results[1][0].nan_to_num())
    # Overlapping windows add up in any order there.
    torch.testing.assert_close(results[0][1], results[1][1])
