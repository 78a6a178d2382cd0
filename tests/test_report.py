"""The report and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fxmem
from fxmem.cli import main
from fxmem.render import as_text, human


def _model() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.GELU(), nn.Flatten())
    model.eval().requires_grad_(False)
    model[3].weight.requires_grad_()
    return model


def _report(**kwargs: bool) -> fxmem.MemoryReport:
    return fxmem.report(_model(), torch.randn(2, 3, 10, 10, requires_grad=True), **kwargs)


def test_rows_add_up_and_say_why() -> None:
    report = _report()
    assert sum(r.eager for r in report.rows) == report.eager
    assert sum(r.fxmem for r in report.rows) == report.fxmem
    rows = {r.module: r for r in report.rows}
    wide, out = 2 * 8 * 8 * 8 * 4, 2 * 4 * 6 * 6 * 4
    assert (rows["0"].eager, rows["0"].fxmem) == (0, 0)
    assert (rows["1"].eager, rows["1"].fxmem) == (wide, 0)
    assert (rows["2"].eager, rows["2"].fxmem) == (wide, wide)
    assert rows["2"].reason == "kept: _3 keeps its output anyway"
    assert rows["3"].reason.startswith("kept: 3.weight requires grad")
    assert rows["3"].remedy == "freezing 3.weight lets the input go"
    assert (rows["4"].eager, rows["4"].fxmem) == (out, out)
    assert rows["4"].reason == "kept: its derivative needs it, and no rule speaks of this op"
    assert all((r.source and "test_report.py" not in r.source) or r.source is None for r in report.rows)


def test_measured_agrees() -> None:
    report = _report(measured=True)
    assert report.measured is not None
    assert (report.measured[0].kept, report.measured[1].kept) == (report.eager, report.fxmem)


def test_inputs_are_needed() -> None:
    with pytest.raises(fxmem.ArgumentError, match="a report needs example inputs"):
        fxmem.report(_model())


@pytest.mark.parametrize("by", ["op", "module", "node"])
def test_text(by: str) -> None:
    text = as_text(_report(), by=by, width=100)  # type: ignore[arg-type]
    assert "kept for backward: eager 9.1 KiB, fxmem 5.1 KiB, 1.8x less" in text
    assert "left out: parameters" in text
    assert max(map(len, text.splitlines())) <= 140
    assert str(_report()).startswith("Sequential on 2x3x10x10 float32 requires grad")


def test_human() -> None:
    assert [human(n) for n in (0, 1023, 1024, 1536, 5 << 20, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]


def test_cli_builtin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == 1
    assert data["eager"] >= 50 * data["fxmem"] > 0
    assert data["eager"] == sum(row["eager"] for row in data["rows"])


def test_cli_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def both(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()), torch.randn(1, 3, 8, 8)\n"
        "def model(): return both()[0]\ndef number(): return 3\n"
    )
    assert main(["report", f"{path}:both", "--freeze", "*", "--input-grad", "--measure", "--by", "node", "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "measured: eager" in out
    assert main(["report", f"{path}:model", "--input", "2x3x8x8", "--freeze", "*", "--train", "0.bias", "--mode", "eval"]) == 0
    assert "in 1 tensors train" in capsys.readouterr().out
    for arguments, message in {
        (f"{path}:model",): "--input: the input's shape is not known",
        (f"{path}:number",): "it returned int, not a module",
        (f"{path}:modle",): "Did you mean model",
        (f"{path}:model", "--input", "2xx"): "'2xx' is no shape",
        (f"{path}:both", "--freeze", "0.wieght"): "matches no parameter. Near it: 0.weight",
        ("nowhere.at.all:f",): "cannot be imported",
        ("resnet",): "names no model",
        ("torchvision:resnet5",): "Did you mean resnet50",
    }.items():
        assert main(["report", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert len(captured.err.splitlines()) == 1
        assert captured.out == ""


def test_cli_torchvision(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "torchvision:squeezenet1_1", "--freeze", "*", "--input-grad", "--mode", "eval"]) == 0
    assert "SqueezeNet on 8x3x224x224" in capsys.readouterr().out


def test_cli_as_a_program() -> None:
    command = [sys.executable, "-m", "fxmem.cli"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"fxmem {fxmem.__version__} (torch {torch.__version__}")
    assert subprocess.run([*command, "report", "--by", "nothing"], capture_output=True, check=False).returncode == 2
