"""Measures the table at the top of the README and writes ``results.json`` beside this script.

    python reports/readme/run.py [--check]

Every row is one torchvision model, frozen and in eval mode, differentiated with respect to its input; kept and peak bytes
are counted at the allocator, times are medians of ratios of interleaved runs of process CPU time on one thread. ``--check``
only compares the README's table with the committed results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import fxmem
from fxmem.measure import run
from fxmem.render import human

HERE = Path(__file__).parent
README = HERE.parent.parent / "README.md"
MODELS = {
    "resnet50": (8, 3, 224, 224),
    "densenet121": (8, 3, 224, 224),
    "mobilenet_v3_large": (8, 3, 224, 224),
    "vgg16": (4, 3, 224, 224),
}
PAIRS = 15
BEGIN, END = "<!-- made by reports/readme/run.py -->\n", "\n<!-- end -->"


def _seconds(model: nn.Module, x: Tensor, cotangent: Tensor) -> float:
    x.grad = None
    start = time.process_time()
    model(x).backward(cotangent)
    return time.process_time() - start


def _row(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None).eval().requires_grad_(False)
    x = torch.randn(shape, requires_grad=True)
    optimized = fxmem.optimize(model, (x,))
    eager, ours = run(model, (x,)), run(optimized, (x,))
    equal = torch.equal(eager.outputs, ours.outputs) and all(
        torch.equal(eager.gradients[k], ours.gradients[k]) for k in eager.gradients
    )
    cotangent = torch.randn_like(eager.outputs)
    for _ in range(2):
        _seconds(model, x, cotangent), _seconds(optimized, x, cotangent)
    ratios = [_seconds(optimized, x, cotangent) / _seconds(model, x, cotangent) for _ in range(PAIRS)]
    return {
        "model": name,
        "input": list(shape),
        "kept_eager_bytes": eager.measurement.kept,
        "kept_fxmem_bytes": ours.measurement.kept,
        "peak_eager_bytes": eager.measurement.peak,
        "peak_fxmem_bytes": ours.measurement.peak,
        "bitwise_equal": equal,
        "time_ratio_median": round(statistics.median(ratios), 3),
        "time_ratios": [round(r, 3) for r in ratios],
    }


def _table(results: dict[str, Any]) -> str:
    lines = [
        "| model | batch | kept, eager | kept, fxmem | less | peak, eager | peak, fxmem | time | bitwise equal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results["rows"]:
        less = r["kept_eager_bytes"] / r["kept_fxmem_bytes"]
        sizes = [human(r[f"{what}_bytes"]) for what in ("kept_eager", "kept_fxmem", "peak_eager", "peak_fxmem")]
        lines.append(
            f"| {r['model']} | {r['input'][0]} | {sizes[0]} | {sizes[1]} | **{less:.0f}x** | {sizes[2]} | {sizes[3]} "
            f"| {r['time_ratio_median']:.2f}x | {'yes' if r['bitwise_equal'] else 'no'} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        table = _table(json.loads((HERE / "results.json").read_text()))
        if table not in README.read_text():
            print("the README's table is not the one in reports/readme/results.json", file=sys.stderr)
            return 1
        return 0
    torch.set_num_threads(1)
    results = {
        "unit": "bytes",
        "device": f"cpu ({platform.machine()}), 1 thread",
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "date": datetime.date.today().isoformat(),
        "rows": [_row(name, shape) for name, shape in MODELS.items()],
    }
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    before, begin, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    README.write_text(before + begin + _table(results) + end + after)
    print(_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
