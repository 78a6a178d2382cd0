"""Memory against time: eager, the policies and budgets of fxmem, and a checkpoint around each block.

    python reports/recompute/run.py [--only NAME ...] [--pairs N] [--no-time] [--render]

Writes results.json, the table in README.md, and fronts.svg where matplotlib is there. Bytes are the allocator's. Time is
process CPU time of forward and backward on one thread: the median over pairs of runs of this and of eager, in turns;
gradients are compared with eager's bit by bit.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from models import MODELS, checkpoint_blocks
from torch import Tensor, nn

import fxmem
from fxmem.measure import Run, run

HERE = Path(__file__).parent
MIB = 2**20
BUDGETS = (0.5, 0.35)


def variants(name: str, lora: bool) -> Any:
    """(label, model, inputs, planned peak or None) of each way to train a model; those that no plan meets are left out."""
    model, args = MODELS[name](lora)
    yield "eager", model, args, None
    wrapped, args_2 = MODELS[name](lora)
    yield "checkpoint per block", checkpoint_blocks(wrapped), args_2, None
    yield "exact", fxmem.optimize(model, args), args, None
    ours = fxmem.optimize(model, args, policy="recompute")
    yield "recompute", ours, args, _planned(ours, args)
    as_checkpoint = run(wrapped, args_2).measurement.peak
    for label, budget in [("budget: peak of the checkpoints", as_checkpoint), *((f"budget {b}", b) for b in BUDGETS)]:
        try:
            ours = fxmem.optimize(model, args, budget=budget)
        except fxmem.ArgumentError as error:
            print(f"  {label}: {error}", flush=True)
            continue
        yield label, ours, args, _planned(ours, args)


def _planned(model: nn.Module, args: tuple[Tensor, ...]) -> int | None:
    from fxmem.passes.fakes import Fakes
    from fxmem.passes.lifetimes import follow

    return follow(model, args, {}, Fakes((*args, *model.parameters()))).footprint.peak


def _step(model: nn.Module, args: tuple[Tensor, ...], cotangent: Tensor) -> float:
    for p in model.parameters():
        p.grad = None
    start = time.process_time()
    model(*args).backward(cotangent)
    return time.process_time() - start


def ratio(eager: nn.Module, other: nn.Module, args: tuple[Tensor, ...], pairs: int) -> float:
    """Median over pairs of the time of ``other`` over that of ``eager``."""
    cotangent = torch.randn_like(eager(*args))
    ratios = []
    for i in range(pairs + 1):
        order = (eager, other) if i % 2 else (other, eager)
        times = {id(m): _step(m, args, cotangent) for m in order}
        ratios.append(times[id(other)] / times[id(eager)])
    return statistics.median(ratios[1:])  # the first pair warms up


def same(a: Run, b: Run) -> bool:
    """Whether all gradients and buffers are the same bits."""
    pairs = [(a.gradients[n], b.gradients[n]) for n in a.gradients] + [(a.buffers[n], b.buffers[n]) for n in a.buffers]
    return all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


def study(name: str, lora: bool, pairs: int, timed: bool) -> list[dict[str, Any]]:
    """All variants of one model."""
    rows = []
    eager, reference, buffers = None, None, {}
    for label, model, args, planned in variants(name, lora):
        measured = run(model, args)
        if eager is None or reference is None:
            eager, reference = model, measured
            buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
        row = {
            "model": name,
            "trains": "LoRA" if lora else "everything",
            "how": label,
            "kept": measured.measurement.kept,
            "peak": measured.measurement.peak,
            "planned peak": planned,
            "time": 1.0 if model is eager else round(ratio(eager, model, args, pairs), 3) if timed else None,
            "bitwise": same(reference, measured),
        }
        rows.append(row)
        print(row, flush=True)
        with torch.no_grad():
            # Timing moved the running statistics, which all variants but the checkpoints share.
            for n, b in eager.named_buffers():
                b.copy_(buffers[n])
    return rows


def render(results: dict[str, Any]) -> None:
    """The table in README.md, and the plot."""
    lines = ["| model | trains | how | kept, MiB | peak, MiB | planned | time | bitwise |", "|---|---|---|---|---|---|---|---|"]
    for r in results["rows"]:
        planned = "" if r["planned peak"] is None else f"{r['planned peak'] / r['peak'] - 1:+.1%}"
        when = "" if r["time"] is None else f"{r['time']:.2f}x"
        sizes = f"{r['kept'] / MIB:.1f} | {r['peak'] / MIB:.1f}"
        lines.append(
            f"| {r['model']} | {r['trains']} | {r['how']} | {sizes} | {planned} | {when} | {'yes' if r['bitwise'] else 'no'} |"
        )
    path = HERE / "README.md"
    text = path.read_text()
    begin, end = "<!-- made by run.py -->", "<!-- end -->"
    head, tail = text.split(begin)[0], text.split(end)[1]
    about = f"torch {results['torch']}, {results['device']}, {results['date']}, one thread, float32."
    path.write_text(f"{head}{begin}\n{about}\n\n" + "\n".join(lines) + f"\n{end}{tail}")
    if importlib.util.find_spec("matplotlib") is not None:
        _plot(results["rows"])


def _plot(rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys((r["model"], r["trains"]) for r in rows))
    figure, axes = pyplot.subplots(2, (len(cases) + 1) // 2, figsize=(3.2 * ((len(cases) + 1) // 2), 6), squeeze=False)
    for axis, case in zip(axes.flat, cases, strict=False):
        own = [r for r in rows if (r["model"], r["trains"]) == case and r["time"] is not None]
        for r in own:
            kind = {"eager": "k^", "checkpoint per block": "rs"}.get(r["how"], "bo")
            axis.plot(r["peak"] / MIB, r["time"], kind)
        axis.set_title(f"{case[0]}, {case[1]}", fontsize=8)
        axis.set_xlabel("peak, MiB", fontsize=7)
        axis.set_ylabel("time, eager = 1", fontsize=7)
    figure.tight_layout()
    figure.savefig(HERE / "fronts.svg")


def main() -> None:
    """Runs the study and writes what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--render", action="store_true", help="write the table from results.json again")
    options = parser.parse_args()
    path = HERE / "results.json"
    if not options.render:
        torch.set_num_threads(1)
        old = json.loads(path.read_text())["rows"] if path.exists() else []
        rows = [r for r in old if r["model"] not in options.only]
        for name in options.only:
            for lora in (False, True) if name != "resnet50" else (False,):
                rows += study(name, lora, options.pairs, not options.no_time)
                rows.sort(key=lambda r: (list(MODELS).index(r["model"]), r["trains"] == "LoRA"))
                results = {
                    "unit": "bytes; time as a ratio to eager",
                    "device": f"CPU ({platform.machine()})",
                    "torch": torch.__version__,
                    "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
                    "rows": rows,
                }
                path.write_text(json.dumps(results, indent=1) + "\n")
    render(json.loads(path.read_text()))


if __name__ == "__main__":
    main()
