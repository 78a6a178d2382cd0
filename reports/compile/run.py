"""Measures what compiled models keep, row by row, and writes ``rows/*.json``, ``results.json`` and the README's table.

    python reports/compile/run.py [--rows GLOB] [--redo] [--no-time] [--list]

A row is a model and a case: kept bytes at the allocator of eager, ``fxmem.optimize``, Inductor and ``backend="fxmem"``, the
gradients' error of the last two against float64, and the time of a forward and backward pass of fxmem's backend as a ratio to
Inductor's (median over interleaved pairs of process CPU time, one thread). Each row is a process of its own; those that exist
already are kept unless ``--redo``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import fnmatch
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxmem
from fxmem.measure import run
from fxmem.render import human

HERE = Path(__file__).parent
ROWS, README = HERE / "rows", HERE / "README.md"
BEGIN, END = "<!-- results -->\n", "\n<!-- end -->"
PAIRS = 11
PIXELS = 224
VISION = {"resnet50": 4, "mobilenet_v3_large": 4, "convnext_tiny": 2, "vit_b_16": 2, "efficientnet_v2_s": 2}
TEXT = {"gpt2": (2, 128), "llama": (2, 128)}
CASES = {
    **dict.fromkeys(VISION, ("input eval", "input train", "norm eval", "all train")),
    **dict.fromkeys(TEXT, ("lora train", "all train")),
}


def _vision(name: str, case: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import torchvision

    trained, mode = case.split()
    model = torchvision.models.get_model(name, weights=None).train(mode == "train").requires_grad_(trained == "all")
    if trained == "norm":
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.LayerNorm):
                module.requires_grad_(True)
    for module in model.modules():
        # The head of a vision transformer starts at zero, and lets no gradient through.
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.02)
        # Compiled code draws other random numbers, so gradients are compared without any.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "mode") and type(module).__name__ == "StochasticDepth":
            module.p = 0.0
    return model, {"": torch.randn(VISION[name], 3, PIXELS, PIXELS, requires_grad=trained == "input")}


class _Language(nn.Module):
    """A language model that returns its loss, and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def _text(name: str, case: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import peft
    import transformers

    config: Any
    model: Any
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=6, n_embd=384, n_head=6, vocab_size=5000, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
        model, targets = transformers.GPT2LMHeadModel(config), ["c_attn"]
    else:
        config = transformers.LlamaConfig(
            hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6, vocab_size=5000
        )
        model, targets = transformers.LlamaForCausalLM(config), ["q_proj", "v_proj"]
    if case.startswith("lora"):
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=targets, fan_in_fan_out=name == "gpt2"))
    tokens = torch.randint(0, 5000, TEXT[name])
    return _Language(model).train(), {"": tokens}


def _build(name: str, case: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model, inputs = (_vision if name in VISION else _text)(name, case)
    return model, tuple(inputs.values())


def _error(gradients: dict[str, Tensor | None], truth: dict[str, Tensor | None]) -> float:
    """Of all gradients as one vector, relative, in float64."""
    difference = norm = 0.0
    for name, exact in truth.items():
        found = gradients.get(name, gradients.get(f"_orig_mod.{name}"))
        assert (found is None) == (exact is None), name
        if exact is not None and found is not None:
            difference += float((found.double() - exact).square().sum())
            norm += float(exact.square().sum())
    return (difference / norm) ** 0.5


def _seconds(model: nn.Module, x: Tensor) -> float:
    for t in (x, *model.parameters()):
        t.grad = None
    start = time.process_time()
    model(x).sum().backward()
    return time.process_time() - start


def _row(name: str, case: str, timed: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, (x,) = _build(name, case)
    truth_model, truth_x = copy.deepcopy(model).double(), x.detach().clone()
    if x.is_floating_point():
        truth_x = truth_x.double().requires_grad_(x.requires_grad)
    truth = run(truth_model, (truth_x,)).gradients
    del truth_model
    row: dict[str, Any] = {"model": name, "case": case, "input": list(x.shape)}
    eager = run(model, (x,))
    row |= {"kept_eager_bytes": eager.measurement.kept, "peak_eager_bytes": eager.measurement.peak}
    row["error_eager"] = _error(eager.gradients, truth)
    try:
        optimized = run(fxmem.optimize(model, (x,)), (x,)).measurement
        row |= {"kept_optimize_bytes": optimized.kept, "peak_optimize_bytes": optimized.peak}
    except fxmem.FxmemError as error:
        row |= {"kept_optimize_bytes": None, "peak_optimize_bytes": None, "optimize_error": str(error)}
    fast: dict[str, Any] = {}
    for backend in ("inductor", "fxmem"):
        # Compiled apart, so that both stay there for the timing.
        started = time.perf_counter()
        fast[backend] = torch.compile(model if backend == "inductor" else _twin(model), backend=backend, dynamic=False)
        run(fast[backend], (x,))
        row[f"compile_{backend}_seconds"] = round(time.perf_counter() - started, 1)
        found = run(fast[backend], (x,))
        row |= {f"kept_{backend}_bytes": found.measurement.kept, f"peak_{backend}_bytes": found.measurement.peak}
        row[f"error_{backend}"] = _error(found.gradients, truth)
    row["time_ratio_median"], row["time_ratios"] = None, []
    if timed:
        for _ in range(2):
            _seconds(fast["inductor"], x), _seconds(fast["fxmem"], x)
        ratios = [_seconds(fast["fxmem"], x) / _seconds(fast["inductor"], x) for _ in range(PAIRS)]
        row |= {"time_ratio_median": round(statistics.median(ratios), 3), "time_ratios": [round(r, 3) for r in ratios]}
    return row | {
        "unit": "bytes",
        "device": f"cpu ({platform.machine()}), 1 thread",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def _twin(model: nn.Module) -> nn.Module:
    """A module of the same parameters and buffers whose compiled code is its own."""
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def _misses(row: dict[str, Any]) -> list[str]:
    found = []
    ours = row["kept_fxmem_bytes"]
    if ours > row["kept_inductor_bytes"]:
        found.append(f"keeps {human(ours - row['kept_inductor_bytes'])} more than Inductor")
    if row["kept_optimize_bytes"] is not None and ours > row["kept_optimize_bytes"]:
        found.append(f"keeps {human(ours - row['kept_optimize_bytes'])} more than optimize")
    if row["error_fxmem"] > 1.5 * max(row["error_inductor"], row["error_eager"]):
        found.append("error")
    if row["time_ratio_median"] is not None and row["time_ratio_median"] > 1.05:
        found.append("time")
    return found


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | case | eager | optimize | Inductor | fxmem | error, Inductor | error, fxmem | time | misses |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        sizes = [r[f"kept_{w}_bytes"] for w in ("eager", "optimize", "inductor", "fxmem")]
        cells = ["-" if n is None else human(n) for n in sizes]
        cells[3] = f"**{cells[3]}**"
        ratio = "-" if r["time_ratio_median"] is None else f"{r['time_ratio_median']:.2f}x"
        cells += [f"{r['error_inductor']:.1e}", f"{r['error_fxmem']:.1e}", ratio, "; ".join(_misses(r))]
        lines.append(f"| {r['model']}, {'x'.join(map(str, r['input']))} | {r['case']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _write() -> None:
    order = [f"{name} {case}" for name, cases in CASES.items() for case in cases]
    rows = [json.loads(path.read_text()) for path in ROWS.glob("*.json")]
    rows.sort(key=lambda r: order.index(f"{r['model']} {r['case']}"))
    (HERE / "results.json").write_text(json.dumps({"unit": "bytes", "rows": rows}, indent=1) + "\n")
    before, begin, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    README.write_text(before + begin + _table(rows) + end + after)


def _path(name: str, case: str) -> Path:
    return ROWS / f"{name}-{case.replace(' ', '-')}.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", metavar="GLOB", help='such as "resnet50 input*"')
    parser.add_argument("--redo", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    ROWS.mkdir(exist_ok=True)
    if options.one:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            row = _row(*options.one, timed=not options.no_time)
        _path(*options.one).write_text(json.dumps(row, indent=1) + "\n")
        return 0
    wanted = [(n, c) for n, cases in CASES.items() for c in cases if fnmatch.fnmatchcase(f"{n} {c}", options.rows)]
    for name, case in wanted:
        if options.list:
            print(name, case)
        elif options.redo or not _path(name, case).exists():
            command = [sys.executable, __file__, "--one", name, case, *(["--no-time"] if options.no_time else [])]
            done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
            print(name, case, "failed" if done.returncode else "done", flush=True)
    _write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
