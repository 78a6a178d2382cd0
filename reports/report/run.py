"""The report against the truth: predicted and measured bytes, and what reporting on a model of 70 billion parameters takes.

    python reports/report/run.py [--only NAME ...]

Writes results.json and the tables in README.md. Predicted are kept bytes and peak on fake tensors, measured the allocator's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torchvision

import fxmem

HERE = Path(__file__).parent
NAMES = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
    "vit_b_16",
    "vit_b_32",
    "vit_l_16",
    "vit_l_32",
    "vit_h_14",
)
BATCH = 2
LLAMA_70B = (
    "transformers:LlamaForCausalLM:hidden_size=8192,num_hidden_layers=80,num_attention_heads=64,num_key_value_heads=8,"
    "intermediate_size=28672,vocab_size=128256,max_position_embeddings=8192"
)
LLAMA_7B = (
    "transformers:LlamaForCausalLM:hidden_size=4096,num_hidden_layers=32,num_attention_heads=32,intermediate_size=11008,"
    "vocab_size=32000"
)
COMMANDS = {
    "70B, LoRA, sequence 4096": [LLAMA_70B, "--lora", "r=8,targets=q_proj+v_proj", "--input", "1x4096"],
    "7B, everything trains, sequence 2048": [LLAMA_7B, "--input", "1x2048", "--fits", "24GiB"],
    "7B, LoRA, sequence 2048": [LLAMA_7B, "--lora", "r=8,targets=q_proj+v_proj", "--input", "1x2048", "--fits", "24GiB"],
}


def compared(name: str) -> list[dict[str, Any]]:
    """Predicted against measured for one model, three ways to train it, eager and rewritten."""
    kwargs: dict[str, Any] = {"image_size": 224} if name.startswith("vit") else {}
    model = torchvision.models.get_model(name, weights=None, **kwargs)
    rows = []
    for case in ("all", "input", "last quarter"):
        model.train(case != "input").requires_grad_(case == "all")
        if case == "last quarter":
            parameters = list(model.parameters())
            for parameter in parameters[-(len(parameters) // 4) :]:
                parameter.requires_grad_()
        x = torch.randn(BATCH, 3, 224, 224, requires_grad=case == "input")
        report = fxmem.report(model, x, measured=True, freezing=0)
        assert report.measured is not None
        for way, footprint, truth in zip(("eager", "fxmem"), (report.eager, report.fxmem), report.measured, strict=True):
            assert footprint is not None
            assert truth is not None
            rows.append(
                {
                    "model": name,
                    "case": case,
                    "way": way,
                    "kept_bytes_predicted": footprint.kept,
                    "kept_bytes_measured": truth.kept,
                    "peak_bytes_predicted": footprint.peak,
                    "peak_bytes_measured": truth.peak,
                }
            )
    return rows


def commanded(arguments: list[str]) -> dict[str, Any]:
    """Time, memory and answer of one command, run as a program."""
    command = [sys.executable, "-m", "fxmem.cli", "report", *arguments, "--device", "cuda", "--dtype", "bfloat16", "--quiet"]
    start = time.perf_counter()
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    report = fxmem.MemoryReport.from_json(done.stdout)
    return {
        "seconds": round(seconds, 1),
        "exit_status": done.returncode,
        "most_memory_bytes_of_any_command": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "parameter_bytes": report.parameter_bytes,
        "kept_bytes": report.eager.kept,
        "peak_bytes": report.eager.peak,
        "training_step_bytes": report.total(report.eager),
    }


def tables(results: dict[str, Any]) -> str:
    lines = ["| model | case | way | kept, MiB | predicted | peak, MiB | predicted |", "|---|---|---|---|---|---|---|"]
    for row in results["bytes"]:
        kept, peak = row["kept_bytes_measured"], row["peak_bytes_measured"]
        exact = "to the byte" if row["kept_bytes_predicted"] == kept else f"{row['kept_bytes_predicted'] / kept:.4f}"
        ratio = row["peak_bytes_predicted"] / peak
        near = "to the byte" if row["peak_bytes_predicted"] == peak else f"{100 * (ratio - 1):+.2f}%"
        words = f"{row['model']} | {row['case']} | {row['way']}"
        lines.append(f"| {words} | {kept / 2**20:.1f} | {exact} | {peak / 2**20:.1f} | {near} |")
    lines += [
        "",
        "| Llama in bfloat16 on an absent CUDA device | parameters, GiB | kept, GiB | step, GiB | fits 24 GiB | seconds |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for name, row in results["commands"].items():
        sizes = " | ".join(f"{row[key] / 2**30:.1f}" for key in ("parameter_bytes", "kept_bytes", "training_step_bytes"))
        fits = {0: "yes", 1: "no"}[row["exit_status"]] if "fits" in " ".join(COMMANDS[name]) else ""
        lines.append(f"| {name} | {sizes} | {fits} | {row['seconds']:.0f} |")
    memory = max(row["most_memory_bytes_of_any_command"] for row in results["commands"].values())
    lines += ["", f"None of these commands took more than {memory / 2**30:.2f} GiB of memory."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results: dict[str, Any] = {
        "device": "cpu",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "batch": BATCH,
        "commands": {name: commanded(arguments) for name, arguments in COMMANDS.items()},
        "bytes": [row for name in options.only for row in compared(name)],
    }
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    readme = HERE / "README.md"
    before, begin, rest = readme.read_text().partition("<!-- results -->\n")
    _, end, after = rest.partition("<!-- end -->")
    readme.write_text(before + begin + tables(results) + "\n" + end + after)
    print(tables(results))


if __name__ == "__main__":
    main()
