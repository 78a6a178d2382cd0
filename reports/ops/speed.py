"""Times the ops that keep a mask against torch's own; writes ``speed.json`` and the table in ``speed.md`` beside this script.

    OMP_NUM_THREADS=1 python reports/ops/speed.py [--only NAME ...] [--pairs N] [--check]

Every op runs on an activation of 8x256x56x56 elements, 6.4 million. A pair is a forward and backward pass of torch's op and
then one of ours, on one thread of the CPU. Compared is process CPU time; the figures are medians over the pairs: ms of
eager, and the ratio ours / eager of forward, of backward and of both. What an op in place overwrites is made before the time is
taken, and its backward includes that of the product it was made by, for torch's op and ours alike. ``--only`` prints and
writes nothing; ``--check`` compares the committed table with the committed results.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxmem.ops import activation, dropout, pool, relu

HERE = Path(__file__).parent
SHAPE = (8, 256, 56, 56)
DTYPES = (torch.float32, torch.bfloat16)
WARM_UP = 2

Op = Callable[..., Any]

# The name, torch's op, ours, the arguments, and the shape where it is another view of the same elements.
OPS: tuple[tuple[str, Op, Op, dict[str, Any], tuple[int, ...]], ...] = (
    ("relu", F.relu, relu.relu, {}, SHAPE),
    ("relu, in place", F.relu, relu.relu, {"inplace": True}, SHAPE),
    ("leaky_relu", F.leaky_relu, activation.leaky_relu, {}, SHAPE),
    ("leaky_relu, in place", F.leaky_relu, activation.leaky_relu, {"inplace": True}, SHAPE),
    ("rrelu, eval", F.rrelu, activation.rrelu, {}, SHAPE),
    ("hardtanh", F.hardtanh, activation.hardtanh, {}, SHAPE),
    ("relu6, in place", F.relu6, activation.relu6, {"inplace": True}, SHAPE),
    ("hardsigmoid", F.hardsigmoid, activation.hardsigmoid, {}, SHAPE),
    ("threshold", F.threshold, activation.threshold, {"threshold": 0.1, "value": 0.0}, SHAPE),
    ("hardshrink", F.hardshrink, activation.hardshrink, {}, SHAPE),
    ("softshrink", F.softshrink, activation.softshrink, {}, SHAPE),
    ("abs", torch.abs, activation.abs, {}, SHAPE),
    ("dropout", F.dropout, dropout.dropout, {}, SHAPE),
    ("max_pool1d 2", F.max_pool1d, pool.max_pool1d, {"kernel_size": 2}, (8, 256, 56 * 56)),
    ("max_pool2d 2", F.max_pool2d, pool.max_pool2d, {"kernel_size": 2}, SHAPE),
    ("max_pool2d 3, stride 2", F.max_pool2d, pool.max_pool2d, {"kernel_size": 3, "stride": 2, "padding": 1}, SHAPE),
    ("max_pool2d 3, stride 1", F.max_pool2d, pool.max_pool2d, {"kernel_size": 3, "stride": 1, "padding": 1}, SHAPE),
    ("max_pool3d 2", F.max_pool3d, pool.max_pool3d, {"kernel_size": 2}, (8, 64, 4, 56, 56)),
    ("adaptive_max_pool2d 7", F.adaptive_max_pool2d, pool.adaptive_max_pool2d, {"output_size": 7}, SHAPE),
)


def _keep_pages() -> None:
    """Lets glibc use the memory of freed tensors again: fresh pages would cost more than the ops do."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        mmap_threshold, trim_threshold = -3, -1
        if not (libc.mallopt(mmap_threshold, 32 << 20) and libc.mallopt(trim_threshold, 1 << 30)):
            print("the allocator hands freed memory back: times include fresh pages", file=sys.stderr)


def _times(op: Op, options: dict[str, Any], x: Tensor) -> tuple[float, float]:
    input = x * 1 if options.get("inplace") else x
    start = time.process_time()
    output = op(input, **options)
    forward = time.process_time() - start
    cotangent = torch.full_like(output, 0.5)
    start = time.process_time()
    torch.autograd.grad(output, x, cotangent)
    return forward, time.process_time() - start


def _row(name: str, dtype: torch.dtype, pairs: int) -> dict[str, Any]:
    _, stock, ours, options, shape = next(op for op in OPS if op[0] == name)
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype).requires_grad_()
    runs = [(*_times(stock, options, x), *_times(ours, options, x)) for _ in range(WARM_UP + pairs)][WARM_UP:]

    def median(of: Callable[[tuple[float, ...]], float]) -> float:
        return statistics.median(of(run) for run in runs)

    return {
        "op": name,
        "dtype": str(dtype).removeprefix("torch."),
        "eager_forward_ms": round(1e3 * median(lambda r: r[0]), 2),
        "eager_backward_ms": round(1e3 * median(lambda r: r[1]), 2),
        "forward_ratio": round(median(lambda r: r[2] / r[0]), 3),
        "backward_ratio": round(median(lambda r: r[3] / r[1]), 3),
        "ratio": round(median(lambda r: (r[2] + r[3]) / (r[0] + r[1])), 3),
    }


def _table(results: dict[str, Any]) -> str:
    lines = [
        f"torch {results['torch']}, {results['device']}, {results['date']}, medians of {results['pairs']} pairs.",
        "",
        "| op | dtype | eager forward, ms | eager backward, ms | forward | backward | both |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['op']} | {r['dtype']} | {r['eager_forward_ms']:.2f} | {r['eager_backward_ms']:.2f} "
        f"| {r['forward_ratio']:.2f}x | {r['backward_ratio']:.2f}x | {r['ratio']:.2f}x |"
        for r in results["rows"]
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[op[0] for op in OPS], help="these ops")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        if _table(json.loads((HERE / "speed.json").read_text())) != (HERE / "speed.md").read_text():
            print("speed.md is not the table of speed.json", file=sys.stderr)
            return 1
        return 0
    torch.set_num_threads(1)
    _keep_pages()
    names = options.only or [op[0] for op in OPS]
    results = {
        "unit": "ms of process CPU time, and ratios",
        "device": f"cpu ({platform.machine()}), 1 thread",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "pairs": options.pairs,
        "rows": [_row(name, dtype, options.pairs) for name in names for dtype in DTYPES],
    }
    if not options.only:
        (HERE / "speed.json").write_text(json.dumps(results, indent=1) + "\n")
        (HERE / "speed.md").write_text(_table(results))
    print(_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
