"""Eager, fxmem, checkpointing per block, Inductor and memsave_torch side by side.

    python reports/selective/run.py [--device cuda] [--only MODEL ...] [--pairs N] [--inductor] [--again]

Every row is a model, what trains, and a mode (see ``models.py``). Kept and peak bytes are counted at the allocator over one
forward and backward pass with random cotangents; times are medians of ratios to eager of interleaved runs: process CPU time on
one thread, or CUDA events. Gradients are compared with eager's: "bitwise", or the largest relative distance of any gradient.
memsave_torch takes part where it can be imported, Inductor with ``--inductor``, because its compilation takes minutes. What
``results.json`` has for this device and version of torch is kept; ``--again`` measures it anew.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import ROWS, checkpointed, make
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fxmem
from fxmem.measure import Run, run
from fxmem.passes.base import loss_or_outputs

HERE = Path(__file__).parent
BEGIN, END = "<!-- made by run.py -->\n", "\n<!-- end -->"
WAYS = ("fxmem", "memsave_torch", "checkpoint", "inductor")
MIB = 2**20
# How often glibc gives memory back to the system and faults it in again depends on accidents of the heap and costs more than
# most ops: it moves the ratio of two runs of one model by 20%. So it is told to keep what it has, for eager and all others.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def _memsave(name: str, model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
    from memsave_torch.nn import convert_to_memory_saving

    # Its dropout raises, so dropout stays torch's.
    return convert_to_memory_saving(model, dropout=False)


def _inductor(name: str, model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model)


MAKE: dict[str, Callable[[str, nn.Module, Any, Any], nn.Module]] = {
    "fxmem": lambda name, model, args, kwargs: fxmem.optimize(model, args, kwargs),
    "memsave_torch": _memsave,
    "checkpoint": lambda name, model, args, kwargs: checkpointed(name, copy.deepcopy(model)),
    "inductor": _inductor,
}


def _seconds(model: nn.Module, args: Any, kwargs: Any, wanted: list[Tensor], cuda: bool) -> float:
    for t in wanted:
        t.grad = None
    if cuda:
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
    else:
        start = time.process_time()
    ends = [t for t in loss_or_outputs(model(*args, **kwargs)) if t.requires_grad]
    torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    if cuda:
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3
    return time.process_time() - start


def _distance(eager: Run, other: Run) -> float:
    """The largest relative distance of any gradient; 0 if all are bitwise equal."""
    worst = 0.0
    theirs = list(other.gradients.values())
    for mine, its in zip(eager.gradients.values(), theirs, strict=True):
        if mine is None or its is None:
            if (mine is None) != (its is None):
                return float("inf")
        elif not torch.equal(mine, its):
            worst = max(worst, float((mine - its).norm() / mine.norm().clamp_min(1e-30)))
    return worst


def _move(device: str, model: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module, Any, Any]:
    def moved(t: Tensor) -> Tensor:
        return t.detach().to(device).requires_grad_(t.requires_grad)

    return model.to(device), tuple(moved(t) for t in args), {k: moved(v) for k, v in kwargs.items()}


def measure_row(name: str, case: str, mode: str, device: str, ways: list[str], pairs: int) -> dict[str, Any]:
    """One row: every way's bytes, gradients and times."""
    model, args, kwargs = _move(device, *make(name, case, mode))
    inputs = [t for t in tree_leaves((args, kwargs)) if t.requires_grad]
    eager = run(model, args, kwargs)
    row: dict[str, Any] = {"model": name, "case": case, "mode": mode, "device": device, "torch": torch.__version__}
    row["date"] = datetime.date.today().isoformat()
    row["eager"] = {"kept_bytes": eager.measurement.kept, "peak_bytes": eager.measurement.peak}
    models = {}
    for way in ways:
        try:
            models[way] = MAKE[way](name, model, args, kwargs)
            if way == "inductor":
                run(models[way], args, kwargs)
            theirs = run(models[way], args, kwargs)
        except Exception as error:
            first = str(error).strip().splitlines() or [""]
            row[way] = {"failed": f"{type(error).__name__}: {first[0][:200]}"}
            models.pop(way, None)
            continue
        row[way] = {
            "kept_bytes": theirs.measurement.kept,
            "peak_bytes": theirs.measurement.peak,
            "gradient_distance": _distance(eager, theirs),
        }
        del theirs
    del eager
    gc.collect()
    wanted = {way: inputs + [p for p in m.parameters() if p.requires_grad] for way, m in {"eager": model, **models}.items()}
    times: dict[str, list[float]] = {way: [] for way in models}
    for number in range(-1, pairs):
        for way, other in models.items():
            # Its neighbour in time, so that what slows the machine slows both.
            if way not in ("fxmem",) and number >= max(3, pairs // 3):
                continue
            own = _seconds(other, args, kwargs, wanted[way], device == "cuda")
            ratio = own / _seconds(model, args, kwargs, wanted["eager"], device == "cuda")
            if number >= 0:
                times[way].append(ratio)
    for way, ratios in times.items():
        if ratios:
            row[way] |= {"time_ratio_median": round(statistics.median(ratios), 3), "time_ratios": [round(r, 3) for r in ratios]}
    return row


def key(row: dict[str, Any]) -> tuple[str, ...]:
    """What tells rows apart."""
    return row["device"], row["torch"], row["model"], row["case"], row["mode"]


def _cell(row: dict[str, Any], way: str) -> str:
    cell = row.get(way)
    if cell is None:
        return ""
    if "failed" in cell:
        return "fails"
    text = f"{cell['kept_bytes'] / MIB:.1f} / {cell['peak_bytes'] / MIB:.0f}"
    return text + (f" / {cell['time_ratio_median']:.2f}" if "time_ratio_median" in cell else "")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| model | trains | mode | limit | eager | fxmem | gradients | memsave_torch | checkpoint | Inductor |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        limit = ROWS[row["model"], row["case"], row["mode"]]
        distance = row["fxmem"].get("gradient_distance")
        gradients = "" if distance is None else "bitwise" if distance == 0 else f"{distance:.0e}"
        cells = [row["model"], row["case"], row["mode"], "" if limit is None else f"{limit:g}", _cell(row, "eager")]
        cells += [f"**{_cell(row, 'fxmem')}**", gradients, *(_cell(row, way) for way in WAYS[1:])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(rows: list[dict[str, Any]]) -> str:
    """Which rows keep the limits, in words."""
    missed = []
    for row in rows:
        name = f"{row['model']} {row['case']} {row['mode']}"
        ours, eager, limit = row["fxmem"], row["eager"], ROWS[row["model"], row["case"], row["mode"]]
        if "failed" in ours:
            missed.append(f"{name}: {ours['failed']}")
            continue
        others = [eager] + [row[w] for w in ("memsave_torch",) if "kept_bytes" in row.get(w, {})]
        for what in ("kept_bytes", "peak_bytes"):
            best = min(o[what] for o in others)
            if ours[what] > best:
                missed.append(f"{name}: {what.removesuffix('_bytes')} {ours[what] / MIB:.2f} MiB, another {best / MIB:.2f}")
        # The limits have the digits that are printed.
        if limit is not None and ours["kept_bytes"] > 1.02 * (limit + (0.05 if limit != int(limit) else 0.5)) * MIB:
            missed.append(f"{name}: kept {ours['kept_bytes'] / MIB:.1f} MiB, above 1.02 x {limit:g}")
        if ours["gradient_distance"] != 0:
            missed.append(f"{name}: gradients are not bitwise eager's")
        if ours["time_ratio_median"] > 1.05:
            missed.append(f"{name}: {ours['time_ratio_median']:.2f}x of eager's time")
    head = (
        f"Wanted of each of the {len(rows)} rows: kept at most 1.02 times the limit, kept and peak at most eager's and "
        "memsave_torch's, gradients bitwise eager's, time at most 1.05 times eager's."
    )
    return f"{head} " + ("All have it." if not missed else "Missed:\n\n" + "\n".join(f"- {m}" for m in missed))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Bytes kept, one group of bars per row."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fxmem"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1))
    shades = {"eager": "#b0b7bf", "checkpoint": "#e3a857", "memsave_torch": "#7aa6c2", "fxmem": "#b5304f"}
    for i, row in enumerate(rows):
        for j, (way, shade) in enumerate(shades.items()):
            kept = row.get(way, {}).get("kept_bytes")
            if kept:
                axes.barh(i + 0.2 * j, kept / MIB, 0.2, color=shade, label=way if i == 0 else None)
    axes.set_yticks([i + 0.3 for i in range(len(rows))], [f"{r['model']} {r['case']} {r['mode']}" for r in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("kept between forward and backward, MiB")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", nargs="*", default=sorted({r[0] for r in ROWS}))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--row", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    ways = [w for w in WAYS if w != "inductor" or options.inductor]
    if importlib.util.find_spec("memsave_torch") is None:
        ways.remove("memsave_torch")
    torch.set_num_threads(1)
    if options.row:
        *what, missing = options.row
        print(json.dumps(measure_row(*what, options.device, missing.split(","), options.pairs)))
        return 0
    file = HERE / "results.json"
    old: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": []}
    rows = {key(row): row for row in old["rows"]}
    failed = 0
    for name, case, mode in ROWS:
        known = {} if options.again else rows.get((options.device, torch.__version__, name, case, mode), {})
        missing = [w for w in ways if "kept_bytes" not in known.get(w, {})]
        if name not in options.only or not missing:
            continue
        if options.device == "cuda":
            # There, starting a process takes longer than a row, and the allocator's counts know no leftovers.
            row = measure_row(name, case, mode, "cuda", missing, options.pairs)
            torch.cuda.empty_cache()
        else:
            # A process of its own: what a row leaves in caches and heaps is no part of the next one's.
            command = [sys.executable, __file__, "--row", name, case, mode, ",".join(missing), "--pairs", str(options.pairs)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | MALLOC)
            if done.returncode:
                print(f"{name} {case} {mode}: {done.stderr[-2000:]}", file=sys.stderr)
                failed += 1
                continue
            row = json.loads(done.stdout.splitlines()[-1])
        row = known | row
        rows[key(row)] = row
        print(table([row]).splitlines()[-1], flush=True)
        written = {"unit": "bytes, ratios of seconds", "machine": platform.machine(), "rows": list(rows.values())}
        file.write_text(json.dumps(written, indent=1) + "\n")
    order = list(ROWS)
    shown = sorted(
        (r for r in rows.values() if r["device"] == options.device and r["torch"] == torch.__version__),
        key=lambda r: order.index((r["model"], r["case"], r["mode"])),
    )
    if options.device == "cpu":
        readme = HERE / "README.md"
        before, begin, rest = readme.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        head = f"torch {torch.__version__}, CPU, one thread."
        readme.write_text(before + begin + f"{head}\n\n{table(shown)}\n\n{verdict(shown)}" + end + after)
        plot(shown, HERE / "kept.svg")
    print(table(shown), verdict(shown), sep="\n\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
