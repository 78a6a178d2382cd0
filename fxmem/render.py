"""MemoryReport to text and JSON."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from typing import Literal

from tabulate import tabulate

from fxmem.records import MemoryReport, NodeRow

SCHEMA = 1

By = Literal["node", "module", "op"]


def human(nbytes: int) -> str:
    """Bytes in the unit that reads best, binary."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{nbytes} B" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def as_text(report: MemoryReport, *, by: By = "op", top: int | None = None, width: int | None = None) -> str:
    """The report as a table for a terminal.

    Args:
        report: the report.
        by: one line per node, per module or per kind of operation.
        top: only the lines that keep the most, this many.
        width: columns to use; the terminal's by default.
    """
    width = width or shutil.get_terminal_size((120, 24)).columns
    ratio = f", {report.eager / report.fxmem:.1f}x less" if 0 < report.fxmem < report.eager else ""
    lines = [
        f"{report.model} on {report.inputs}",
        f"kept for backward: eager {human(report.eager)}, fxmem {human(report.fxmem)}{ratio}",
    ]
    if report.measured:
        eager, ours = report.measured
        lines.append(f"measured: eager {human(eager.kept)}, fxmem {human(ours.kept)}")
        lines.append(f"measured peak of forward and backward: eager {human(eager.peak)}, fxmem {human(ours.peak)}")
    trained = [p for p in report.parameters if p.requires_grad]
    total, bytes_trained = (sum(p.nbytes for p in ps) for ps in (report.parameters, trained))
    lines.append(f"parameters: {human(total)}, of which {human(bytes_trained)} in {len(trained)} tensors train")
    if report.optimizer:
        adamw, low, high = (sum(getattr(r, what) for r in report.optimizer) for what in ("adamw", "rank_one", "cap"))
        lines.append(f"optimizer state: AdamW {human(adamw)}, Adapprox {human(low)} at rank 1 to {human(high)} at full rank")
    lines += ["", _table(report, by, top, width), "", f"left out: {report.LEFT_OUT}"]
    return "\n".join(lines)


def _table(report: MemoryReport, by: By, top: int | None, width: int) -> str:
    if by == "node":
        rows = sorted(report.rows, key=lambda r: -r.eager)[:top]
        head = ["module", "op", "eager", "fxmem", "why"]
        cells = [[r.module or r.node, r.op, human(r.eager), human(r.fxmem), _sentence(r)] for r in rows]
        alignment = ("left", "left", "right", "right", "left")
    else:
        groups: dict[str, list[NodeRow]] = {}
        for row in report.rows:
            key = row.op if by == "op" else row.module.split(".")[0] or "(top)"
            groups.setdefault(key, []).append(row)
        ordered = sorted(groups.items(), key=lambda g: -sum(r.eager for r in g[1]))[:top]
        head = [by, "calls", "eager", "fxmem", "why, mostly"]
        cells = []
        for key, members in ordered:
            weights: Counter[str] = Counter()
            for member in members:
                weights[_general(member.reason)] += max(member.eager, 1)
            old, new = sum(r.eager for r in members), sum(r.fxmem for r in members)
            cells.append([key, str(len(members)), human(old), human(new), weights.most_common(1)[0][0]])
        alignment = ("left", "right", "right", "right", "left")
    used = sum(max(len(row[i]) for row in [head, *cells]) + 2 for i in range(4))
    return tabulate(
        cells,
        headers=head,
        colalign=alignment if cells else None,
        maxcolwidths=[None, None, None, None, max(width - used, 24)],
        disable_numparse=True,
    )


def _sentence(row: NodeRow) -> str:
    return f"{row.reason}; {row.remedy}" if row.remedy else row.reason


def _general(reason: str) -> str:
    """A reason without the name of the parameter or node in it, so that like ones can be counted."""
    return " ".join("…" if "." in word.rstrip(".,;") or "_" in word else word for word in reason.split())


def as_json(report: MemoryReport) -> str:
    """The report as JSON: bytes as ints, and the version of the schema."""
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(report)}, indent=2)
