"""Every model of torchvision and the families of transformers: how it is captured, what is kept, and whether it is exact.

    python reports/models/run.py [--only NAME ...] [--kind KIND ...]

Writes results.json and the tables in README.md; models that are not asked for keep their last result. Kept bytes are counted at
the allocator. Bitwise: outputs, every gradient, every buffer and the state of the random number generator.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

import ecosystem  # noqa: E402
import zoo  # noqa: E402
from oracle import compare_runs  # noqa: E402

import fxmem  # noqa: E402
from fxmem.measure import Run, run  # noqa: E402

KINDS = {
    "transformers": ecosystem.TRANSFORMERS,
    "detection": ecosystem.DETECTION,
    "optical flow": ecosystem.FLOW,
    "torchvision": {name: ecosystem.torchvision_model(name) for name in zoo.NAMES},
}
CASES = {
    "all": "everything trains, train mode",
    "lora": "frozen, with LoRA adapters of peft (r = 4, dropout 0.1), train mode",
    "last": "the last quarter of the parameters trains, train mode",
    "input": "frozen, differentiated by the input, eval mode",
}


def prepared(kind: str, model: ecosystem.Model) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """The cases of one model, ready to run."""
    inputs = model.inputs()
    yield "all", model.build().train(), inputs
    if kind == "transformers":
        yield "lora", ecosystem.lora(model.build().train(), model.adapters), inputs
    elif kind == "torchvision":
        inputs["x"].requires_grad_()
        yield "input", model.build().eval().requires_grad_(False), inputs
    else:
        frozen = model.build().train().requires_grad_(False)
        parameters = list(frozen.parameters())
        for parameter in parameters[-(len(parameters) // 4) :]:
            parameter.requires_grad_()
        yield "last", frozen, inputs


def same(eager: Run, ours: Run) -> bool:
    """Whether two passes made the same of everything."""
    try:
        compare_runs(eager, ours)
    except AssertionError:
        return False
    return True


def measured(kind: str, name: str, model: ecosystem.Model) -> Iterator[dict[str, Any]]:
    """One result per case."""
    for case, module, inputs in prepared(kind, model):
        # The one input of torchvision's plain models goes by several names.
        args, kwargs = (tuple(inputs.values()), {}) if kind == "torchvision" else ((), inputs)
        optimized: Any = fxmem.optimize(module, args, kwargs)
        eager, ours = run(module, args, kwargs), run(optimized, args, kwargs)
        row: dict[str, Any] = {
            "kind": kind,
            "model": name,
            "case": case,
            "captured": "graph" if isinstance(optimized, fxmem.OptimizedModule) else "regions",
            "eager": eager.measurement.kept,
            "fxmem": ours.measurement.kept,
            "eager peak": eager.measurement.peak,
            "fxmem peak": ours.measurement.peak,
            "rewritten": sum(d.rewritten for d in optimized.decisions),
            "bitwise": same(eager, ours),
            "export": None,
        }
        if kind == "transformers":
            try:
                exported = run(fxmem.optimize(module, args, kwargs, capture="export"), args, kwargs)
                row["export"] = exported.measurement.kept if same(eager, exported) else "not bitwise"
            except fxmem.CaptureError as error:
                row["export"] = str(error).splitlines()[0]
        del optimized, eager, ours
        gc.collect()
        yield row


def table(rows: list[dict[str, Any]], kind: str) -> str:
    """Markdown of one kind."""
    export = kind == "transformers"
    head = ["model", "case", "captured", "kept, eager", "kept, fxmem", "ratio", "peak ratio", "bitwise equal"]
    head += ["kept by export"] if export else []
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        ratio = "" if not r["eager"] else f"{r['fxmem'] / r['eager']:.3f}"
        cells = [r["model"], r["case"], r["captured"], f"{r['eager']:,}", f"{r['fxmem']:,}", ratio]
        cells += [f"{r['fxmem peak'] / r['eager peak']:.3f}", "yes" if r["bitwise"] else "no"]
        cells += [(f"{r['export']:,}" if isinstance(r["export"], int) else "refused") if export else ""][: len(head) - 8]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


INTRODUCTION = """# Models

Made by `python reports/models/run.py`: every model of torchvision, and the families of transformers with a diffusion U-Net of
torch modules, from small random configurations; optimized with example inputs and `capture="auto"`, against eager.
{numbers} Bytes, on {device}, one thread, float32; {versions}; {date}.

Cases: {cases}.

*Kept by export* is the same with `capture="export"`, bitwise equal too. It keeps what regions keep, within 3% and seldom less,
takes longer to capture, and loses the model's interface: that is why `"auto"` goes from a symbolic trace to regions. It is
refused where code asks the data, and where the exported graph would keep more than the model's own code.
"""


def written(results: dict[str, Any]) -> str:
    """The README."""
    rows = results["rows"]
    worse = [r for r in rows if r["fxmem"] > r["eager"]]
    unequal = [r for r in rows if not r["bitwise"]]
    numbers = f"{len(rows)} rows. More kept than eager: {len(worse)}. Not bitwise equal: {len(unequal)}."
    versions = ", ".join(f"{name} {results[name]}" for name in ("torch", "transformers", "peft"))
    cases = ";\n".join(f"*{name}*: {what}" for name, what in CASES.items())
    parts = [INTRODUCTION.format(numbers=numbers, versions=versions, cases=cases, **results)]
    for kind in KINDS:
        of_kind = [r for r in rows if r["kind"] == kind]
        if of_kind:
            parts += [f"## {kind[0].upper()}{kind[1:]}\n", table(of_kind, kind) + "\n"]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of models")
    parser.add_argument("--kind", nargs="+", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import peft
    import transformers

    path = HERE / "results.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    found = {(r["kind"], r["model"], r["case"]): r for r in old}

    def place(row: dict[str, Any]) -> tuple[int, int]:
        return list(KINDS).index(row["kind"]), list(KINDS[row["kind"]]).index(row["model"])

    def save() -> None:
        results = {
            "unit": "bytes",
            "device": "cpu",
            "torch": torch.__version__.partition("+")[0],
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "date": datetime.date.today().isoformat(),
            "rows": sorted(found.values(), key=place),
        }
        path.write_text(json.dumps(results, indent=1) + "\n")
        (HERE / "README.md").write_text(written(results))

    for kind in options.kind:
        for name, model in KINDS[kind].items():
            if not options.only or name in options.only:
                for row in measured(kind, name, model):
                    found[kind, name, row["case"]] = row
                    print(*row.values(), flush=True)
                save()
    save()


if __name__ == "__main__":
    main()
