"""The report and the command line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import cases
import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.cli import main


def _model() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.GELU(), nn.Flatten())
    model.eval().requires_grad_(False)
    model[3].weight.requires_grad_()
    return model


def _report(**options: object) -> fxmem.MemoryReport:
    return fxmem.report(_model(), torch.randn(2, 3, 10, 10, requires_grad=True), **options)  # type: ignore[arg-type]


def test_rows_add_up_and_say_why() -> None:
    report = _report()
    assert report.fxmem is not None
    assert sum(r.eager for r in report.rows) == report.eager.kept
    assert sum(r.fxmem or 0 for r in report.rows) == report.fxmem.kept
    rows = {r.module: r for r in report.rows}
    wide, out = 2 * 8 * 8 * 8 * 4, 2 * 4 * 6 * 6 * 4
    assert (rows["0"].eager, rows["0"].fxmem, rows["0"].rewritten) == (0, 0, True)
    assert (rows["1"].eager, rows["1"].fxmem) == (wide, 0)
    assert (rows["2"].eager, rows["2"].fxmem) == (wide, wide)
    assert rows["2"].reason == "kept: 3 keeps its output anyway"
    assert rows["3"].reason.startswith("kept: 3.weight requires grad")
    # Frozen, it lets its input go, of which the ReLU then keeps a bit per element.
    freed = wide - wide // 32
    assert report.freezing == (fxmem.records.FreezeRow("3.weight", 0, freed),)
    assert rows["3"].remedy == "freezing 3.weight frees 3.9 KiB"
    assert (rows["4"].eager, rows["4"].fxmem, rows["4"].shape, rows["4"].dtype) == (out, out, (2, 4, 6, 6), "float32")
    assert rows["4"].reason == "kept: the derivative of GELU needs its input"


def test_totals() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).requires_grad_(False)
    model[2].weight.requires_grad_()
    x = torch.randn(32, 16, requires_grad=True)
    report = fxmem.report(model, x, measured=True)
    assert report.measured is not None
    assert report.fxmem is not None
    for footprint, truth in zip((report.eager, report.fxmem), report.measured, strict=True):
        assert truth is not None
        assert (footprint.kept, footprint.outputs, footprint.gradients) == (truth.kept, truth.outputs, truth.gradients)
        assert footprint.peak == truth.peak
        assert max(step.live for step in footprint.timeline) == footprint.peak
        assert [s.phase for s in footprint.timeline] == sorted((s.phase for s in footprint.timeline), reverse=True)
        state = sum(p.numel() * 4 for p in model.parameters()) + sum(b.numel() * b.element_size() for b in model.buffers())
        adamw = 2 * model[2].weight.numel() * 4 + 4
        assert report.total(footprint) == state + x.numel() * 4 + adamw + (footprint.peak or 0)


def test_json_round_trip() -> None:
    report = _report(measured=True)
    text = report.to_json()
    assert fxmem.MemoryReport.from_json(text) == report
    data = json.loads(text)
    assert data["schema"] == 2
    with pytest.raises(fxmem.ArgumentError, match="schema 7, and this version reads"):
        fxmem.MemoryReport.from_json(json.dumps({**data, "schema": 7}))
    for wrong in ("{", "[]", json.dumps({**data, "eager": 3}), json.dumps({k: v for k, v in data.items() if k != "rows"})):
        with pytest.raises(fxmem.ArgumentError, match=r"Write it again|what --format json wrote"):
            fxmem.MemoryReport.from_json(wrong)
    data["rows"][0]["eager"] = "much"
    with pytest.raises(fxmem.ArgumentError, match="expected int, got 'much'"):
        fxmem.MemoryReport.from_json(json.dumps(data))


def test_inputs_are_needed() -> None:
    with pytest.raises(fxmem.ArgumentError, match="a report needs example inputs"):
        fxmem.report(_model())


def test_nothing_changes() -> None:
    model, x = _model(), torch.randn(2, 3, 10, 10, requires_grad=True)
    before = {n: (p, p.clone(), p.requires_grad, p.grad) for n, p in (*model.named_parameters(), *model.named_buffers())}
    state = torch.get_rng_state()
    fxmem.report(model, x, measured=True)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        old, value, flag, grad = before[name]
        assert tensor is old
        assert torch.equal(tensor, value)
        assert tensor.requires_grad == flag
        assert tensor.grad is grad
    assert x.grad is None
    assert torch.equal(state, torch.get_rng_state())
    assert torch.nn.functional.scaled_dot_product_attention is fxmem.passes.faithful._stock


@pytest.mark.parametrize("name", ["AdamW", "sgd", "Adapprox", "adafactor"])
def test_optimizer_by_name(name: str) -> None:
    model = nn.Linear(64, 32)
    report = fxmem.report(model, torch.randn(2, 64), optimizer=name)
    assert report.optimizer is not None
    expected = {"AdamW": 2 * 4 * (64 * 32 + 32) + 8, "sgd": 0, "adafactor": 4 * (64 + 32 + 32) + 8}
    expected["Adapprox"] = report.optimizer.rows[0].cap + report.optimizer.rows[1].cap
    assert report.optimizer.nbytes == expected[name]


def test_optimizer_of_the_user() -> None:
    model, x = nn.Linear(64, 32), torch.randn(2, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fresh = fxmem.report(model, x, optimizer=optimizer).optimizer
    model(x).sum().backward()
    optimizer.step()
    running = fxmem.report(model, x, optimizer=optimizer).optimizer
    assert fresh == running
    assert fresh is not None
    assert fresh.nbytes == 4 * (64 * 32 + 32)
    with pytest.raises(fxmem.ArgumentError, match=r"there is no optimizer 'AdmaW'. Near it: AdamW"):
        fxmem.report(model, x, optimizer="AdmaW")
    with pytest.raises(fxmem.ArgumentError, match="a step of LBFGS"):
        fxmem.report(model, x, optimizer="LBFGS")


def test_a_running_adapprox() -> None:
    model, x = nn.Linear(64, 32), torch.randn(2, 64)
    optimizer = fxmem.Adapprox(model.parameters())
    fresh = fxmem.report(model, x, optimizer=optimizer).optimizer
    assert fresh is not None
    assert fresh.nbytes == sum(r.cap for r in fresh.rows)
    model(x).sum().backward()
    optimizer.step()
    report = fxmem.report(model, x, optimizer=optimizer)
    assert report.optimizer is not None
    held = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor))
    assert report.optimizer.nbytes == sum(r.now or 0 for r in report.optimizer.rows) == held
    assert all(r.temporaries > 0 for r in report.optimizer.rows)
    assert "at this moment" in str(report)
    assert "more while it runs" in str(report)


def test_rows_with_names() -> None:
    model, x = cases.rows_with_names()
    report = fxmem.report(model, x)
    assert len(report.rows) == len({r.node for r in report.rows}) > 3
    for row in report.rows:
        assert row.op
        assert row.module or row.node
        assert row.source is not None
        assert row.source.rpartition(":")[0].endswith(".py")
    assert {r.module for r in report.rows} >= {"enc.0", "enc.1", "dec"}


def test_estimate_against_truth() -> None:
    model, x = cases.estimate_against_truth()
    report = fxmem.report(model, x, measured=True)
    assert report.measured is not None
    assert report.eager.kept == report.measured[0].kept
    assert report.eager.peak == pytest.approx(report.measured[0].peak, rel=0.02)
    text = str(report)
    assert "measured" in text
    assert "left out of the count: workspaces of kernels" in text


def test_data_dependent_op() -> None:
    model, x = cases.data_dependent_op()
    with pytest.raises(fxmem.ArgumentError, match=r"getitem \(.*cases\.py:\d+\): .*nonzero.*depends on the data.*--measure"):
        fxmem.report(model, x)
    report = fxmem.report(model, x, measured=True)
    assert any("aten.nonzero" in note and "a real run was observed" in note for note in report.notes)
    assert report.measured is not None
    assert report.eager.kept == report.measured[0].kept
    assert sum(r.eager for r in report.rows) == report.eager.kept
    assert report.fxmem is not None
    assert report.measured[1] is not None
    assert report.fxmem.kept == report.measured[1].kept


class _Numbers(nn.Module):
    """Reads numbers in a way that no fake tensor has: fails on those, runs for real."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).exp()
        return y * len(y.detach().numpy().tolist())


def test_where_fake_tensors_fail_a_real_run_is_observed() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(fxmem.ArgumentError, match="observe a real run: measured=True, or --measure"):
        fxmem.report(_Numbers(), x)
    report = fxmem.report(_Numbers(), x, measured=True)
    assert any("a real run was observed" in note for note in report.notes)
    assert report.measured is not None
    assert report.eager.kept == report.measured[0].kept
    assert sum(r.eager for r in report.rows) == report.eager.kept


def test_wide_frozen_middle() -> None:
    model, x = cases.wide_frozen_middle()
    report = fxmem.report(model, x)
    rows = {r.module: r for r in report.rows}
    assert all(rows[m].rewritten for m in ("1", "2", "3", "4"))
    assert rows["4"].reason == "dropped: 4.weight is frozen, and nothing else needs the input"
    assert "0.weight requires grad" in rows["0"].reason
    assert "6.weight requires grad" in rows["6"].reason
    assert {f.parameter for f in report.freezing} >= {"6.weight"}


def test_lora_a_keeps_the_input() -> None:
    x = cases.randn(8, 32)
    first, second = (fxmem.report(cases.LoRA(train_a), x) for train_a in (True, False))
    kept = 4 * x.numel()
    assert first.fxmem is not None
    assert first.fxmem.kept == first.eager.kept
    row = next(r for r in first.rows if r.module == "a")
    assert row.reason == "kept: a.weight requires grad, and its gradient is made of the input"
    assert row.remedy == "freezing a.weight frees 1.0 KiB"
    assert fxmem.records.FreezeRow("a.weight", kept, kept) in first.freezing
    assert next(r for r in second.rows if r.module == "a").eager == 0


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.first(x).relu()
        if y.sum(0).shape[0] > 3 and len(list(x)):
            y = y * 2
        logits = self.second(y)
        return {"loss": logits.square().mean(), "logits": logits}


def test_a_model_that_is_not_captured() -> None:
    model = _Branching()
    model.forward = model.forward  # type: ignore[method-assign]
    report = fxmem.report(model, torch.randn(4, 8), measured=True)
    assert report.fxmem is None
    assert report.measured is not None
    assert report.measured[1] is None
    assert report.eager.kept == report.measured[0].kept
    assert report.eager.peak == pytest.approx(report.measured[0].peak, rel=0.02)
    assert sum(r.eager for r in report.rows) == report.eager.kept
    assert all(r.fxmem is None for r in report.rows)
    assert any("not captured" in note for note in report.notes)
    rows = {(r.module, r.op): r for r in report.rows}
    assert rows["second", "Linear"].reason == "kept: the derivative of Linear needs its input"
    assert (rows["", "relu"].source or "").partition(":")[0] == __file__
    assert any(f.parameter == "second.weight" and f.fxmem is None for f in report.freezing)


def test_a_model_captured_by_regions() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Flatten(2), _Branching())
    model[0].requires_grad_(False)
    x = torch.randn(2, 1, 4, 2, requires_grad=True)
    report = fxmem.report(model, x, measured=True)
    assert report.fxmem is not None
    assert report.measured is not None
    assert report.measured[1] is not None
    assert report.fxmem.kept == report.measured[1].kept <= report.eager.kept == report.measured[0].kept
    assert sum(r.eager for r in report.rows) == report.eager.kept
    assert sum(r.fxmem or 0 for r in report.rows) == report.fxmem.kept
    assert any("captured by regions" in note for note in report.notes)
    assert any(f.parameter == "2.second.weight" and f.fxmem for f in report.freezing)


def test_hidden_bytes_are_told() -> None:
    class Hoarder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.__dict__["kept"] = []

        def forward(self, x: Tensor) -> Tensor:
            if len(list(x)):
                self.__dict__["kept"] = [x.neg()]
            return self.layer(x)

    report = fxmem.report(Hoarder(), torch.randn(4, 8))
    assert report.eager.kept == 4 * 8 * 4
    assert sum(r.eager for r in report.rows) == 0
    assert any(f"{4 * 8 * 4} of the bytes kept are held by attributes" in note for note in report.notes)


@pytest.mark.parametrize("train", [True, False])
def test_recurrent_layers_keep_a_workspace(train: bool) -> None:
    model = _First(nn.LSTM(8, 16, 2, bidirectional=True)).train(train)
    report = fxmem.report(model, torch.randn(5, 2, 8, requires_grad=True), measured=True)
    assert report.measured is not None
    assert report.eager.kept == report.measured[0].kept


class _First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.inner(x)[0]
        return first


class _Rebinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + x.mean(0).detach()
        return self.layer(x) + self.mean


def test_models_that_change_themselves_are_left_as_they_were() -> None:
    model = _Rebinds()
    old = model.mean
    report = fxmem.report(model, torch.randn(4, 8), measured=True)
    assert model.mean is old
    assert not old.any()
    assert report.measured is not None
    assert report.eager.kept == report.measured[0].kept
    assert any("are held by attributes of modules" in note for note in report.notes)


@pytest.mark.parametrize("form", ["vmap", "hook", "not a leaf", "sparse"])
def test_unusual_models(form: str) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
    if form == "vmap":

        class Mapped(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.func.vmap(lambda t: t.sin() * 2)(x)

        model = Mapped()
    elif form == "hook":
        model[0].register_forward_hook(lambda m, i, o: o * 2)  # type: ignore[index]
    elif form == "not a leaf":
        x = x * 2
    else:
        model, x = nn.Sequential(nn.Embedding(10, 4, sparse=True)), torch.randint(10, (3,))
    report = fxmem.report(model, x, measured=True)
    assert report.measured is not None
    missing = report.measured[0].kept - report.eager.kept
    assert missing == (8 if form == "vmap" else 0)  # a number, which vmap wraps so that nobody sees it
    assert report.eager.peak is not None


def test_bad_options() -> None:
    model, x = _model(), torch.randn(2, 3, 10, 10)
    with pytest.raises(fxmem.ArgumentError, match="a real run takes the model as it is"):
        fxmem.report(model, x, measured=True, dtype=torch.bfloat16)
    with pytest.raises(fxmem.ArgumentError, match="this tensor has no numbers to measure with"):
        fxmem.report(model.to("meta"), x.to("meta"), measured=True)
    with pytest.raises(fxmem.ArgumentError, match="does not run on these example inputs"):
        fxmem.report(_model(), torch.randn(2, 4, 10, 10))
    with pytest.raises(fxmem.ArgumentError, match="does not run on these example inputs"):
        fxmem.report(_Branching(), torch.randn(4, 9))


@pytest.mark.parametrize("case", ["all", "input", "last"])
def test_autocast(case: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 196, 32), nn.GELU(), nn.Linear(32, 8)
    )
    model.train(case != "input").requires_grad_(case == "all")
    if case == "last":
        model[-1].requires_grad_()
    x = torch.randn(4, 3, 16, 16, requires_grad=case == "input")
    report = fxmem.report(model, x, measured=True, autocast=torch.bfloat16, freezing=0)
    assert report.measured is not None
    for footprint, truth in zip((report.eager, report.fxmem), report.measured, strict=True):
        assert footprint is not None
        assert truth is not None
        assert (footprint.kept, footprint.outputs, footprint.gradients) == (truth.kept, truth.outputs, truth.gradients)


def test_arguments_of_the_wrong_kind() -> None:
    model, x = _model(), torch.randn(2, 3, 10, 10)
    for options, message in (
        ({"device": "mps"}, "what is kept on this kind of device"),
        ({"device": "foo"}, "it is no device"),
        ({"dtype": "int8"}, "'int8' is no floating-point dtype"),
        ({"autocast": True}, "True is no floating-point dtype"),
        ({"optimizer": torch.optim.Adam}, "expected an optimizer or the name of one"),
    ):
        with pytest.raises(fxmem.ArgumentError, match=message):
            fxmem.report(model, x, **options)  # type: ignore[arg-type]
    with pytest.raises(fxmem.ArgumentError, match="Pass inputs by name as example_kwargs"):
        fxmem.report(model, {"input": x})  # type: ignore[arg-type]
    with pytest.raises(fxmem.ArgumentError, match="it is no JSON"):
        fxmem.MemoryReport.from_json(None)  # type: ignore[arg-type]
    with pytest.raises(fxmem.ArgumentError, match=r"model\._orig_mod"):
        fxmem.report(torch.compile(model, backend="eager"), x)  # type: ignore[arg-type]
    assert fxmem.report(model, x, dtype="bfloat16").eager == fxmem.report(model, x, dtype=torch.bfloat16).eager


def test_reports_in_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    model, x = _model(), torch.randn(2, 3, 10, 10, requires_grad=True)
    expected = fxmem.report(model, x)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: fxmem.report(model, x), range(4))) == [expected] * 4


def test_names_that_are_no_python() -> None:
    model = nn.Sequential()
    model.add_module("a\n", nn.Linear(3, 3))
    with pytest.raises(fxmem.CaptureError, match="the graph's code is no Python"):
        fxmem.optimize(model, fullgraph=True)
    report = fxmem.report(model, torch.randn(2, 3))
    assert report.fxmem is not None
    assert any("the graph's code is no Python" in note for note in report.notes)


def test_meta_and_dtype_and_device() -> None:
    model, x = _model(), torch.randn(2, 3, 10, 10, requires_grad=True)
    plain = fxmem.report(model, x)
    half = fxmem.report(model, x, dtype=torch.bfloat16)
    assert half.eager.kept * 2 == plain.eager.kept
    assert half.parameter_bytes * 2 == plain.parameter_bytes
    meta = fxmem.report(_model().to("meta"), torch.empty(2, 3, 10, 10, device="meta", requires_grad=True))
    assert (meta.eager, meta.fxmem) == (plain.eager, plain.fxmem)
    cuda = fxmem.report(model, x, device="cuda")
    assert cuda.device == "cuda"
    assert cuda.fxmem is not None
    assert cuda.fxmem.kept < cuda.eager.kept
    assert cuda.eager.gradients == plain.eager.gradients
    amp = fxmem.report(model, x, device="cuda", autocast=torch.float16)
    assert amp.autocast == "float16"
    assert {r.dtype for r in amp.rows if r.op == "Conv2d"} == {"float16"}
    assert not torch.is_autocast_enabled("cuda")


# The command line


def test_cli_builtin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--format", "json"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["eager"]["kept"] >= 50 * data["fxmem"]["kept"] > 0
    assert data["eager"]["kept"] == sum(row["eager"] for row in data["rows"])
    assert "fxmem: capturing the graph" in captured.err


def test_cli_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def both(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()), torch.randn(1, 3, 8, 8)\n"
        "def model(): return both()[0]\ndef number(): return 3\ndef wrong(): raise ValueError('no\\nway')\n"
        "def given(size): return size\nprint('read')\nnothing = 3\ninstance = model()\n"
    )
    options = ["--freeze", "*", "--input-grad", "--measure", "--by", "node", "--top", "2", "--quiet"]
    assert main(["report", f"{path}:both", *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == "read\n"
    assert "measured" in captured.out
    assert main(["report", f"{path}:model", "--input", "2x3x8x8", "--freeze", "*", "--train", "0.bias", "--mode", "eval"]) == 0
    assert "training: 16 B of 448 B of parameters, 1 tensor" in capsys.readouterr().out
    assert main(["report", f"{path}:instance", "--input", "999999x3x8x8", "--quiet"]) == 0
    assert "GiB" in capsys.readouterr().out
    for arguments, message in {
        (f"{path}:model",): "--input: the input's shape is not known",
        (f"{path}:wrong",): "it raised ValueError: no way. It is called without arguments",
        (f"{path}:given",): "missing 1 required positional argument",
        (f"{path}:both", "--device", "nonsense"): "device nonsense: it is no device",
        (":both",): "names no model",
        (f"{path}:both", "--device", "xpu"): "what is kept on this kind of device is not known",
        (f"{path}:both", "--diff", str(path), "--format", "json"): "a difference is printed as a table alone",
        (f"{path}:model", "--input", "9999999999999999999999x3"): "cannot be made",
        (f"{path}:nothing",): "nothing is of type int and cannot be called",
        (f"{path}:number",): "it returned int, not a module",
        (f"{path}:modle",): "Did you mean model",
        (f"{path}:model", "--input", "2xx"): "'2xx' is no shape",
        (f"{path}:both", "--freeze", "0.wieght"): "matches no parameter. Near it: 0.weight",
        ("nowhere.at.all:f",): "cannot be imported",
        ("resnet",): "names no model",
        ("torchvision:resnet5",): "Did you mean resnet50",
        (f"{path}:both", "--fits", "much"): "'much' is no size",
        (f"{path}:both", "--diff", str(path)): "it is no JSON",
        (f"{path}:both", "--diff", "nowhere.json"): "it cannot be read",
        (f"{path}:both", "--optimizer", "nothing"): "there is no optimizer",
        (f"{path}:both", "--measure", "--device", "cuda"): "the model cannot be moved there",
    }.items():
        if "cuda" in arguments and torch.cuda.is_available():
            continue
        assert main(["report", *arguments, "--quiet"]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert len([line for line in captured.err.splitlines() if line != "read"]) == 1
        assert captured.out == ""  # what the file prints is not data


def test_a_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["report", "--dtype", "float3"], ["report", "--top", "0"], ["report", "--nope"], []):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        lines = capsys.readouterr().err.splitlines()
        assert exit.value.code == 2
        assert len(lines) == 1
        assert lines[0].startswith("fxmem: error: ")


def test_cli_torchvision(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--freeze", "*", "--input-grad", "--mode", "eval", "--device", "cuda", "--autocast", "bfloat16"]
    assert main(["report", "torchvision:squeezenet1_1", *options]) == 0
    assert capsys.readouterr().out.startswith(
        "SqueezeNet on 8x3x224x224 float32 requires grad\ncuda, autocast to bfloat16, torch"
    )


def test_cli_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "torchvision:resnet18", "--fits", "10GiB", "--freezing", "0"]) == 0
    assert "fits: yes" in capsys.readouterr().out
    assert main(["report", "torchvision:resnet18", "--fits", "0.1GB", "--freezing", "0", "--format", "json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["model"] == "ResNet"
    assert "fits: no" in captured.err
    assert "too much; most of it is activations kept for backward" in captured.err


def test_cli_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.json"
    base = ["report", "torchvision:resnet18", "--mode", "eval", "--freezing", "0", "--quiet"]
    assert main([*base, "--format", "json", "--input", "2x3x64x64"]) == 0
    old.write_text(capsys.readouterr().out)
    assert main([*base, "--diff", str(old), "--input", "2x3x64x64"]) == 0
    assert "No difference." in capsys.readouterr().out
    assert main([*base, "--diff", str(old), "--input", "4x3x64x64", "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert "grew" in out
    assert "more lines, which change by" in out
    assert main([*base, "--diff", str(old), "--input", "2x3x64x64", "--freeze", "layer1.*"]) == 0
    assert "layer1.0.bn1" in capsys.readouterr().out


def test_cli_as_a_program() -> None:
    command = [sys.executable, "-m", "fxmem.cli"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"fxmem {fxmem.__version__} (torch {torch.__version__}")
    assert subprocess.run([*command, "report", "--by", "nothing"], capture_output=True, check=False).returncode == 2
    assert subprocess.run([*command, "report", "--top", "-1"], capture_output=True, check=False).returncode == 2


def test_reports_are_frozen() -> None:
    report = _report()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.model = "other"  # type: ignore[misc]
