"""Models by name: the Hugging Face families, predicted against measured, and models that no machine here could hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cases
import pytest
import torch
from torch import nn

import fxmem
from fxmem.cli import main
from fxmem.targets import load, pairs

SMALL = {
    "GPT2LMHeadModel": "n_embd=64,n_layer=2,n_head=4,vocab_size=199,n_positions=64,bos_token_id=0,eos_token_id=0",
    "BertForMaskedLM": "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,intermediate_size=96,vocab_size=199",
    "LlamaForCausalLM": "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,intermediate_size=96,"
    "vocab_size=199",
    "T5ForConditionalGeneration": "d_model=64,num_layers=2,num_heads=4,d_kv=16,d_ff=96,vocab_size=199",
    "ViTForImageClassification": "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,intermediate_size=96,image_size=32,"
    "patch_size=8",
}


@pytest.fixture(autouse=True)
def _needs_transformers() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("case", ["all", "input", "last"])
def test_predicted_is_measured(name: str, case: str) -> None:
    target = load(f"transformers:{name}:{SMALL[name]}", [] if name.startswith("ViT") else [(2, 24)], real=True)
    model, kwargs = target.model, dict(target.kwargs or {})
    model.train(case != "input").requires_grad_(case == "all")
    if case == "last":
        parameters = list(model.parameters())
        for parameter in parameters[-max(1, len(parameters) // 4) :]:
            parameter.requires_grad_()
    if case == "input":
        if "input_ids" in kwargs:
            ids = kwargs.pop("input_ids")
            kwargs["inputs_embeds"] = torch.randn(*ids.shape, 64)
        for value in kwargs.values():
            value.requires_grad_(value.is_floating_point())
    report = fxmem.report(model, (), kwargs, measured=True, freezing=0)
    assert report.measured is not None
    for footprint, truth in zip((report.eager, report.fxmem), report.measured, strict=True):
        assert (footprint is None) == (truth is None)
        if footprint is not None and truth is not None:
            assert (footprint.kept, footprint.outputs, footprint.gradients) == (truth.kept, truth.outputs, truth.gradients)
            if not name.startswith("ViT"):  # the weights of so small a patch convolution are padded to several times their size
                assert footprint.peak == pytest.approx(truth.peak, rel=0.02)
    assert sum(r.eager for r in report.rows) == report.eager.kept


def test_lora() -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    target = load(
        f"transformers:LlamaForCausalLM:{SMALL['LlamaForCausalLM']}", [(2, 24)], real=True, lora="r=4,targets=q_proj+v_proj"
    )
    trained = [n for n, p in target.model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all("lora_" in n for n in trained)
    report = fxmem.report(target.model, (), target.kwargs, measured=True)
    assert report.measured is not None
    assert report.eager.kept == report.measured[0].kept
    # The first layer's A keep the output of its norm, which nothing else does, so freezing all of them frees that.
    assert {f.parameter for f in report.freezing} >= {"*lora_A*"}


def test_what_a_real_run_skips_is_skipped() -> None:
    """Transformers makes a mask of sequence by sequence where it cannot look into its inputs, and a real run has none."""
    target = load(f"transformers:LlamaForCausalLM:{SMALL['LlamaForCausalLM']}", [(1, 256)], real=False)
    report = fxmem.report(target.model, (), target.kwargs, device="cuda", dtype=torch.bfloat16, freezing=0)
    ops = {r.op for r in report.rows}
    assert torch.cuda.is_available() or "scaled_dot_product_flash_attention" in ops
    assert not any(r.shape is not None and r.shape[-2:] == (256, 256) for r in report.rows)


def test_seventy_billion_parameters() -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    config = (
        "hidden_size=8192,num_hidden_layers=80,num_attention_heads=64,num_key_value_heads=8,intermediate_size=28672,"
        "vocab_size=128256,max_position_embeddings=8192"
    )
    options = ["--input", "1x4096", "--device", "cuda", "--dtype", "bfloat16", "--lora", "r=8,targets=q_proj+v_proj"]
    code = (
        "import resource, sys, time; from fxmem.cli import main; start = time.time(); status = main(sys.argv[1:]);"
        "print(time.time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr);"
        "sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "report", f"transformers:LlamaForCausalLM:{config}", *options]
    done = subprocess.run([*command, "--format", "json", "--quiet"], capture_output=True, text=True, check=True)
    report = fxmem.MemoryReport.from_json(done.stdout)
    assert report.parameter_bytes == 2 * (70_553_706_496 + 80 * 8 * (8192 + 8192 + 8192 + 1024))
    assert report.eager.peak is not None
    assert report.eager.kept > 50 * 2**30
    # The logits (in the loss's float32) are the most that is on its way at the peak.
    assert report.eager.peak - report.eager.kept < 3 * 4096 * 128256 * 4
    assert report.eager.gradients == 2 * 80 * 8 * (8192 + 8192 + 8192 + 1024)
    seconds, memory = map(float, done.stderr.split()[-2:])
    assert memory < 4 * 2**30
    assert seconds < 60 * 3  # a minute on a quiet machine; reports/report holds the time itself


def test_will_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    config = ",".join(f"{k}={v}" for k, v in cases.WILL_IT_FIT.items())
    target = f"transformers:LlamaForCausalLM:{config}"
    options = ["--device", "cuda", "--dtype", "bfloat16", "--input", "1x2048", "--freezing", "0", "--quiet"]
    assert main(["report", target, *options, "--fits", "24GiB"]) == 1
    out = capsys.readouterr().out
    assert "fits: no" in out
    assert "optimizer state" in out.partition("fits: no")[2]
    pytest.importorskip("peft", reason="peft is not installed")
    assert main(["report", target, *options, "--lora", "r=8,targets=q_proj", "--fits", "80GiB"]) == 0
    assert "fits: yes" in capsys.readouterr().out


def test_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    config = {k: int(v) for k, v in (pair.split("=") for pair in SMALL["BertForMaskedLM"].split(","))}
    path.write_text(json.dumps({"architectures": ["BertForMaskedLM"], **config}))
    assert main(["report", f"transformers:{path}", "--input", "2x16", "--quiet", "--freezing", "0", "--format", "json"]) == 0
    report = fxmem.MemoryReport.from_json(capsys.readouterr().out)
    assert report.model == "BertForMaskedLM"
    assert report.inputs == "input_ids 2x16 int64, labels 2x16 int64"


def test_torchvision_on_meta() -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    target = load("torchvision:vit_h_14", [(1, 3, 224, 224)], real=False)
    assert {p.device.type for p in target.model.parameters()} == {"meta"}
    assert all(p.device.type == "cpu" for p in load("torchvision:resnet18", [], real=True).model.parameters())
    swin = load("torchvision:swin_t", [], real=False)  # whose constructor reads numbers from tensors
    assert isinstance(swin.model, nn.Module)


def test_timm() -> None:
    pytest.importorskip("timm", reason="timm is not installed")
    report = fxmem.report(load("timm:resnet10t", [(2, 3, 64, 64)], real=True).model, torch.randn(2, 3, 64, 64), measured=True)
    assert report.measured is not None
    assert report.eager.kept == report.measured[0].kept


def test_the_papers_percentages(capsys: pytest.CaptureFixture[str]) -> None:
    """Adapprox's table, from the report's own rows: state saved against AdamW's at the largest ranks and at rank 1."""
    for config, cap, one in (
        ("n_embd=768,n_layer=12,n_head=12", 34.5, 49.9),
        ("n_embd=1024,n_layer=24,n_head=16", 33.8, 49.9),
    ):
        options = ["--input", "1x8", "--freezing", "0", "--quiet", "--format", "json"]
        assert main(["report", f"transformers:GPT2LMHeadModel:{config}", *options]) == 0
        report = fxmem.MemoryReport.from_json(capsys.readouterr().out)
        assert report.optimizer is not None
        adamw, low, high = (sum(getattr(r, what) for r in report.optimizer.rows) for what in ("adamw", "rank_one", "cap"))
        assert round(100 * (1 - high / adamw), 1) == cap
        assert round(100 * (1 - low / adamw), 1) == one
        # Without a first moment half of AdamW's bytes go first: the same factors against the same total.
        steps = 4 * len(report.optimizer.rows)
        moment = (adamw - steps) // 2
        assert round(100 * (1 - (high - moment) / adamw), 1) == cap + 50
        assert round(100 * (1 - (low - moment) / adamw), 1) == one + 50


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in {
        ("transformers:LlamaForCausualLM:hidden_size=8",): "Did you mean LlamaForCausalLM",
        ("transformers:LlamaForCausalLM:hiden_size=8",): "LlamaConfig has no hiden_size. Did you mean hidden_size",
        ("transformers:LlamaForCausalLM:hidden_size",): "is not of the form key=value",
        ("transformers:nowhere/config.json",): "there is no such file",
        ("torchvision:resnet18", "--lora", "r=8,targets=nothing"): "peft refuses it",
    }.items():
        assert main(["report", *arguments, "--quiet"]) == 2, arguments
        captured = capsys.readouterr()
        assert message in captured.err
        assert len(captured.err.splitlines()) == 1
        assert captured.out == ""


def test_pairs() -> None:
    assert pairs("r=8,targets=q_proj+v_proj,dropout=0.1,bias=none,use=True", "--lora") == {
        "r": 8,
        "targets": ["q_proj", "v_proj"],
        "dropout": 0.1,
        "bias": None,
        "use": True,
    }
