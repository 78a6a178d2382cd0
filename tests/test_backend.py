"""``torch.compile(model, backend="fxmem")``: what Dynamo does goes on working, and no more is kept than by ``optimize``."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import cases
import pytest
import torch
import torch.nn.functional as F
from oracle import same
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem.backend import fxmem_backend
from fxmem.cli import main
from fxmem.compiled import compare
from fxmem.errors import FxmemError
from fxmem.measure import Run, run
from fxmem.ops import packing
from fxmem.ops.decompositions import decompositions
from fxmem.render import as_compilations

AOT = {"compiler": "aot_eager"}
# Generated code rounds otherwise than eager's kernels.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's own: of Python modules that it loads, and of devices
        yield
    torch._dynamo.reset()


def compiled(model: nn.Module, compiler: str = "aot_eager", **kwargs: Any) -> Any:
    return torch.compile(model, backend="fxmem", options={"compiler": compiler}, **kwargs)


def agree(model: nn.Module, fast: nn.Module, args: tuple[Any, ...], *, exact: bool = True) -> tuple[Run, Run]:
    """Both on the same inputs: outputs, gradients, buffers; bitwise, and the generator's state, where no code is generated."""
    eager, ours = run(model, args), run(fast, args)
    strip = len("_orig_mod.")
    gradients, buffers = (
        {k[strip:] if k.startswith("_orig_mod.") else k: v for k, v in d.items()} for d in (ours.gradients, ours.buffers)
    )
    pairs = [(eager.outputs, ours.outputs), (eager.gradients, gradients), (eager.buffers, buffers)]
    if exact:
        assert all(same(a, b) for a, b in pairs)
        assert torch.equal(eager.rng_state, ours.rng_state)
    else:
        torch.testing.assert_close([a for a, _ in pairs], [b for _, b in pairs], **CLOSE)
    return eager, ours


def convs(blocks: int = 2, width: int = 8) -> nn.Sequential:
    parts: list[nn.Module] = []
    for i in range(blocks):
        parts += [nn.Conv2d(3 if i == 0 else width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    model = nn.Sequential(*parts, nn.MaxPool2d(2), nn.Conv2d(width, 4, 3))
    cases.fill(model).eval().requires_grad_(False)
    return model


def x_of(*shape: int, **kwargs: Any) -> Tensor:
    return cases.randn(*(shape or (2, 3, 12, 12)), **kwargs)


class Counting:
    """The backend, and how often it was called."""

    def __init__(self, **options: Any) -> None:
        self.options = {"compiler": "aot_eager", **options}
        self.count = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.count += 1
        return fxmem_backend(gm, inputs, options=dict(self.options))


# ---- options


def test_found_by_name() -> None:
    assert "fxmem" in torch._dynamo.list_backends(exclude_tags=())


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_compilers(compiler: str) -> None:
    model, x = convs(), x_of()
    eager, ours = agree(model, compiled(model, compiler, fullgraph=True), (x,), exact=compiler != "inductor")
    optimized = run(fxmem.optimize(model, (x,)), (x,))
    assert ours.measurement.kept <= optimized.measurement.kept < eager.measurement.kept


@pytest.mark.parametrize(
    ("kwargs", "where"),
    [
        ({"options": {"compiler": "nvcc"}}, "options['compiler']"),
        ({"options": {"policy": "magic"}}, "options['policy']"),
        ({"options": {"no_such_option": 1}}, "no_such_option"),
        ({"options": {"max_autotune": "yes"}}, "max_autotune"),
        ({"options": {"compiler": "eager", "max_autotune": True}}, "options['max_autotune']"),
        ({"mode": "no-such-mode"}, "no-such-mode"),
    ],
)
def test_wrong_options(kwargs: dict[str, Any], where: str) -> None:
    model = torch.compile(nn.Linear(2, 2), backend="fxmem", **kwargs)
    with pytest.raises(BackendCompilerFailed) as raised:
        model(torch.randn(1, 2))
    error = raised.value.inner_exception
    assert isinstance(error, FxmemError)
    assert where in str(error)
    assert error.remedy


def test_mode_and_inductors_options_reach_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def compile_fx(gm: Any, inputs: Any, inner: Any, config_patches: Any, decompositions: Any) -> Any:
        seen.append(config_patches)
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    torch.compile(nn.Linear(2, 2), backend="fxmem", mode="max-autotune-no-cudagraphs")(torch.randn(1, 2))
    torch._dynamo.reset()
    torch.compile(nn.Linear(2, 2), backend="fxmem", options={"max_fusion_size": 3})(torch.randn(1, 2))
    assert seen[0]["max_autotune"] is True
    assert seen[1]["max_fusion_size"] == 3


# ---- what is kept


def test_weights_are_handed_over_without_copies() -> None:
    """Inductor's layout optimization keeps channels-last copies of them; 3x3 kernels are where the two layouts differ."""
    model = nn.Sequential(*[nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)]).requires_grad_(False)
    x = x_of(1, 16, 4, 4)
    copies = 3 * model[0].weight.nbytes
    assert run(torch.compile(model), (x,)).measurement.kept >= copies
    torch._dynamo.reset()
    _, ours = agree(model, compiled(model, "inductor"), (x,), exact=False)
    assert ours.measurement.kept == 0


def test_shapes_alone_keep_nothing() -> None:
    """Inside a checkpoint-like region no autograd function of ours stands: the joint graph's edges go all the same."""

    def inside(x: Tensor, weight: Tensor) -> Tensor:
        return F.avg_pool2d(torch.convolution(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), 2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(cases.randn(4, 4, 3, 3).detach(), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return inside(inside(x.sin(), self.weight), self.weight).cos()

    model, x = Model(), x_of(2, 4, 8, 8)
    eager = run(model, (x,)).measurement.kept
    _, ours = agree(model, compiled(model), (x,))
    # What is left is the input of cos; x itself is an input.
    assert ours.measurement.kept <= 2 * 4 * 2 * 2 * 4 + x.nbytes < eager


@pytest.mark.parametrize("shape", [(8, 5), (2, 4, 3, 3), (1, 2, 4, 7), (3, 8), (3, 5), (16,), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_decompositions_agree_with_the_ops(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask that comes back is the same, and as small, whichever of the two packed it."""
    table = decompositions()
    x = x_of(*shape, requires_grad=False).to(dtype)
    if x.numel() > 2:
        x.view(-1)[:3] = torch.tensor([0.0, float("nan"), -0.0])
    grad = x_of(*shape, seed=1, requires_grad=False).to(dtype)
    stride = packing.dense_stride(x)
    ops = torch.ops.fxmem
    backwards = [
        (ops.threshold_backward.default, ()),
        (ops.hardtanh_backward.default, ()),
        (ops.leaky_backward.default, (0.25,)),
        (ops.scale_backward.default, (2.0,)),
    ]
    packers: list[tuple[Any, tuple[Any, ...]]] = [(ops.pack_nonzero.default, ())]
    for kind, bounds in {
        "positive": (),
        "negative": (),
        "hardtanh": (-0.5, 0.5),
        "hardsigmoid": (),
        "threshold": (0.3,),
        "hardshrink": (0.5,),
        "softshrink": (0.5,),
    }.items():
        packers.append((ops.pack_piece.default, (kind, list(bounds))))
    even = x.numel() % 8 == 0 and x.numel() > 0 and shape not in [(3, 5)]
    ordinary = torch.nan_to_num(x)
    for op, rest in packers:
        value = x if op is ops.pack_nonzero.default else ordinary  # for NaN torch's own kernels differ among themselves
        packed, ours = op(value, *rest), table[op](value, *rest)
        if ours is NotImplemented:
            assert not even
            continue
        assert ours.dtype == torch.uint8
        assert ours.numel() == packed.numel()
        for backward, more in backwards:
            assert same(table[backward](grad, ours, stride, *more), backward(grad, packed, stride, *more))
        unpack = ops.unpack.default
        assert same(table[unpack](ours, shape, stride, dtype), unpack(packed, shape, stride, dtype))
    if even:
        output, packed = table[ops.relu_pack.default](x)
        assert same(output, torch.relu(x))
        assert same(
            table[ops.threshold_backward.default](grad, packed, stride), torch.ops.aten.threshold_backward(grad, output, 0)
        )


@pytest.mark.parametrize("shape", [(3, 5, 7), (16, 32, 16)])
def test_ops_that_do_not_decompose(shape: tuple[int, ...]) -> None:
    """Inductor calls the op where sizes do not split into eight, and fuses it where they do."""
    model, x = nn.Sequential(nn.LeakyReLU(), cases.Call(torch.sin), nn.ReLU6(), nn.Flatten(0)), x_of(*shape)
    eager, ours = agree(model, compiled(model, "inductor"), (x,), exact=False)
    assert ours.measurement.kept <= eager.measurement.kept


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("groups", "stride", "transposed"), [(1, 1, False), (2, 2, False), (1, 2, True)])
def test_convolution_backward_input(layout: torch.memory_format, groups: int, stride: int, transposed: bool) -> None:
    """The op without an input gives what torch's gives with one, and its fake the same strides."""
    x = x_of(2, 4, 9, 8, requires_grad=False).to(memory_format=layout)
    weight = x_of(4, 4 // groups, 3, 3, seed=1, requires_grad=False)
    options = ([stride] * 2, [1, 1], [1, 1], transposed, [0, 0], groups)
    grad = torch.randn_like(torch.convolution(x, weight, None, *options))
    expected = torch.ops.aten.convolution_backward(grad, x, weight, None, *options, [True, False, False])[0]
    op = torch.ops.fxmem.convolution_backward_input.default
    arguments = (grad, weight, list(x.shape), layout is torch.channels_last, *options)
    assert same(expected, op(*arguments))
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_comparison_reads_the_graphs_as_the_allocator_counts() -> None:
    model, x = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8), nn.GELU()), x_of(16, 8)
    eager, inductor, ours = compare(model, (x,))
    assert (eager.name, eager.graphs, eager.handed) == ("eager", 0, None)
    for row in (inductor, ours):
        assert row.graphs == 1
        assert row.handed == row.measured.kept > 0
    frozen = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)).requires_grad_(False)
    _, inductor, ours = compare(frozen, (x_of(1, 16, 4, 4),))
    assert ours.handed == ours.measured.kept == 0
    # Copies of weights are made when the graphs are long parted.
    assert inductor.measured.kept > inductor.handed > 0
    rows = as_compilations((eager, inductor, ours), markdown=True).splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["eager", "inductor", "fxmem"]


def test_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(2, 4)\n"
    )
    assert main(["report", f"{path}:build", "--compile", "--quiet", "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["unit"] == "bytes"
    kept = {row["name"]: row["measured"]["kept"] for row in result["rows"]}
    assert 0 < kept["fxmem"] <= min(kept["eager"], kept["inductor"])
    for wrong in (["--fits", "1GiB"], ["--format", "html"], ["--measure"]):
        assert main(["report", f"{path}:build", "--compile", *wrong, "--quiet"]) == 2
        assert "fxmem: error:" in capsys.readouterr().err


class _Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.conv(x))
        return {"a": y, "b": (F.hardtanh(y * 3, -0.5, 0.5, True).transpose(1, 2), x.abs()), "n": 3}


class _InPlace(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        z = y.view(2, -1)
        F.hardtanh_(y)
        z.add_(1)
        return F.leaky_relu_(z, 0.1), y * 2


_FORMS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "1-d": lambda: (nn.Sequential(nn.Conv1d(3, 8, 3), nn.LeakyReLU(), nn.AvgPool1d(2), nn.Conv1d(8, 8, 3)), x_of(2, 3, 20)),
    "3-d": lambda: (
        nn.Sequential(nn.Conv3d(3, 4, 3), nn.ReLU(), nn.MaxPool3d(2), nn.ConvTranspose3d(4, 2, 2), nn.Hardtanh()),
        x_of(2, 3, 6, 6, 6),
    ),
    "outputs": lambda: (_Outputs(), x_of()),
    "in place": lambda: (_InPlace(), x_of()),
    "unbatched": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), x_of(3, 8, 8)),
    "empty": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), x_of(0, 3, 8, 8)),
    "padding": lambda: (nn.Sequential(nn.Conv2d(3, 8, 4, padding="same"), nn.ReLU6(), nn.AdaptiveMaxPool2d(2)), x_of()),
    "bfloat16": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardshrink()).bfloat16(), x_of(dtype=torch.bfloat16)),
    "float64": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softshrink()).double(), x_of(dtype=torch.float64)),
    "channels last": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2)).to(memory_format=torch.channels_last),
        x_of().detach().to(memory_format=torch.channels_last).requires_grad_(),
    ),
}


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_forms(form: str, bias: bool) -> None:
    """Bitwise eager's, and no more kept; with biases alone training too."""
    model, x = _FORMS[form]()
    model.eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bias and name.endswith("bias"))
    eager, ours = agree(model, compiled(model), (x,))
    assert ours.measurement.kept <= eager.measurement.kept


# ---- what Dynamo does


def test_graph_breaks_and_several_regions() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = convs(1), cases.fill(nn.Conv2d(4, 4, 1)), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            x = self.c(self.b(x))
            if x.sum() > 0:  # depends on the data
                return x * 2
            return self.c(x - 1)

    model = Model().requires_grad_(False)
    counting = Counting()
    eager, ours = agree(model, torch.compile(model, backend=counting), (x_of(),))
    assert counting.count >= 3
    assert ours.measurement.kept <= eager.measurement.kept
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend=Counting(), fullgraph=True)(x_of())


def test_regions_compiled_on_their_own() -> None:
    model, x = convs(3), x_of()
    regional = copy.deepcopy(model)
    for i in (0, 3, 6):
        regional[i] = torch.compile(regional[i], backend="fxmem", options=dict(AOT))
        regional[i + 1].compile(backend="fxmem", options=dict(AOT))
    eager, ours = run(model, (x,)), run(regional, (x,))
    assert same(eager.outputs, ours.outputs)
    assert same(eager.gradients["input 0"], ours.gradients["input 0"])


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_dynamic_shapes(compiler: str) -> None:
    model = convs()
    fast = compiled(model, compiler, dynamic=True)
    for n, size in ((2, 12), (5, 16)):
        agree(model, fast, (x_of(n, 3, size, size),), exact=compiler != "inductor")


def test_marked_dynamic() -> None:
    model, counting = convs(), Counting()
    fast = torch.compile(model, backend=counting)
    for n in (3, 4, 6):
        x = x_of(n, 3, 12, 12)
        torch._dynamo.mark_dynamic(x, 0)
        agree(model, fast, (x,))
    assert counting.count == 1


def test_flags_flip() -> None:
    """Freezing, unfreezing, train() and eval() compile anew; each time the result is eager's."""
    model, x = convs(), x_of()
    fast = compiled(model)
    for flip in (
        lambda: None,
        lambda: model.train(),
        lambda: model[3].requires_grad_(True),
        lambda: model.eval(),
        lambda: model.requires_grad_(True),
        lambda: model.requires_grad_(False),
        lambda: model[1].train(),
    ):
        flip()
        eager, ours = agree(model, fast, (x,))
        assert ours.measurement.kept <= eager.measurement.kept
    with torch.no_grad():
        assert same(model(x), fast(x))
    with torch.inference_mode():
        assert same(model(x), fast(x))


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_autocast(compiler: str) -> None:
    model, x = nn.Sequential(convs(), nn.Flatten(), nn.Linear(64, 8).requires_grad_(False)), x_of()
    double = copy.deepcopy(model).double()
    truth = double(x.detach().double()).detach()
    with torch.autocast("cpu", torch.bfloat16):
        eager, optimized = run(model, (x,)), run(fxmem.optimize(model, (x,)), (x,))
        ours = run(compiled(model, compiler), (x,))
    assert ours.outputs.dtype == eager.outputs.dtype == torch.bfloat16
    # No low-precision copy of a weight either.
    assert ours.measurement.kept <= optimized.measurement.kept
    errors = [float((r.outputs.double() - truth).norm() / truth.norm()) for r in (eager, ours)]
    assert errors[1] <= 2 * errors[0] + 1e-3
    if compiler == "aot_eager":
        assert same(eager.gradients["input 0"], ours.gradients["input 0"])


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.a, self.b, self.c = convs(), nn.Linear(64, 4096), nn.Linear(4096, 64), nn.Linear(64, 4096)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(self.front(x).flatten(1))))))


def test_distributed_data_parallel(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, x = Wide(), x_of(requires_grad=False)
        plain = copy.deepcopy(model)
        # Buckets so small that Dynamo splits the graph at their borders.
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
        counting = Counting()
        fast = torch.compile(wrapped, backend=counting)
        for m in (plain, fast):
            m(x).square().mean().backward()
        assert counting.count > 1
        assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    finally:
        torch.distributed.destroy_process_group()


def test_caches(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain Inductor's cached graphs are never taken for ours, nor the other way round; ours are found again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3)).requires_grad_(False)
    x = x_of(1, 4, 6, 6)
    kept = {}
    for backend in ("inductor", "fxmem", "inductor", "fxmem"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        kept[backend] = run(torch.compile(model, backend=backend), (x,)).measurement.kept
    hits = torch._dynamo.utils.counters
    assert hits["aot_autograd"]["autograd_cache_hit"] + hits["inductor"]["fxgraph_cache_hit"] > 0
    assert kept["fxmem"] == 0 < kept["inductor"]
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        agree(model, compiled(model, "inductor"), (x,), exact=False)


@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.slow), "aot_eager"])
def test_optimized_module_compiles(backend: str) -> None:
    model, x = convs(), x_of()
    optimized = fxmem.optimize(model, (x,))
    agree(model, torch.compile(optimized, backend=backend), (x,), exact=backend == "aot_eager")
    torch._dynamo.reset()
    _, ours = agree(model, compiled(optimized), (x,))
    assert ours.measurement.kept <= run(optimized, (x,)).measurement.kept


def test_users_joint_pass_still_runs() -> None:
    seen = []
    fast = torch.compile(convs(1), backend="fxmem", options={"joint_custom_pre_pass": lambda graph: seen.append(graph)})
    run(fast, (x_of(),))
    assert seen


def test_dropout() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8)).train()
    x = x_of(4, 8)
    agree(model, compiled(model), (x,))
    torch._dynamo.reset()
    # Inductor draws other numbers unless told not to, and draws them again in backward.
    fast = torch.compile(model, backend="fxmem", options={"fallback_random": True})
    agree(model, fast, (x,), exact=False)
    torch._dynamo.reset()
    kept = [run(torch.compile(model, backend=b), (x,)).measurement.kept for b in ("inductor", "fxmem")]
    assert kept[1] <= kept[0]


# ---- from public bug reports


def test_unfreeze_while_compiled() -> None:
    """pytorch/pytorch#139476: the newly trainable layer gets eager's gradient."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    x = cases.randn(4, 8, requires_grad=False)
    for fast in (compiled(model), compiled(model, "inductor")):
        model[0].requires_grad_(False)
        agree(model, fast, (x,), exact=False)
        model[0].requires_grad_(True)
        _, ours = agree(model, fast, (x,), exact=False)
        assert ours.gradients["_orig_mod.0.weight"] is not None


def test_one_block_compiled_many_times() -> None:
    """pytorch/pytorch#141039: at most two graphs, one for an input that requires grad and one for another."""
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)])
    x, counting = cases.randn(4, 8, requires_grad=False), Counting()
    with torch._dynamo.config.patch(inline_inbuilt_nn_modules=True):

        def through(compile_blocks: bool) -> Tensor:
            y = x
            for block in blocks:
                y = (torch.compile(block, backend=counting) if compile_blocks else block)(y)
            return y

        expected, found = through(False), through(True)
    assert same(expected.detach(), found.detach())
    assert counting.count <= 2


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_keeps_what_the_op_dropped(compiler: str) -> None:
    """pytorch/pytorch#141881: no more is kept than by ``fxmem.optimize``."""
    model = nn.Sequential(
        *[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
    )
    cases.fill(model).eval().requires_grad_(False)
    x = cases.randn(2, 8, 32, 32)
    optimized = run(fxmem.optimize(model, (x,)), (x,)).measurement
    _, ours = agree(model, compiled(model, compiler), (x,), exact=compiler == "aot_eager")
    assert ours.measurement.kept <= optimized.kept


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_lora_dropout_checkpoint(compiler: str) -> None:
    """huggingface/peft#3020: LoRA, checkpointing and Inductor together fail once dropout is not 0."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.dropout = nn.Linear(16, 16).requires_grad_(False), nn.Dropout(0.05)
            self.a, self.b = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)

        def body(self, x: Tensor) -> Tensor:
            return F.relu(self.base(x) + self.b(self.a(self.dropout(x))))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, checkpoint(self.body, x, use_reentrant=False), use_reentrant=False)

    model = cases.fill(Model())
    x = cases.randn(4, 16)
    agree(model.eval(), compiled(model, compiler), (x,), exact=False)
    torch._dynamo.reset()
    model.train()
    fast = compiled(model, compiler)
    found = run(fast, (x,))
    assert all(g is not None and torch.isfinite(g).all() for name, g in found.gradients.items() if "base" not in name)
