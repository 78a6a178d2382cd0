"""MemoryReport to text and Markdown, and two reports to their difference."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tabulate import tabulate

from fxmem.records import Footprint, MemoryReport, NodeRow

By = Literal["node", "module", "op"]

_GROUPS = 6
_REASON = 24


def human(nbytes: int) -> str:
    """Bytes in the unit that reads best, binary."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{nbytes} B" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def less(old: int, new: int) -> str:
    """How much less ``new`` is than ``old``, as a factor, or in percent where that says more; empty where it is not less."""
    if new >= old:
        return ""
    return f"{old / new:.1f}x less" if new and old / new >= 1.5 else f"{100 * (1 - new / old):.1f}% less"


@dataclass(frozen=True)
class Table:
    """A table ready to print.

    Args:
        title: what stands above it.
        head: column names.
        cells: rows of cells.
        left: columns that are words; the others are sizes or counts, aligned right.
        note: what stands below it, if anything.
    """

    title: str
    head: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    left: frozenset[int]
    note: str = ""


def as_text(
    report: MemoryReport, *, by: By = "op", top: int | None = None, depth: int | None = None, width: int | None = None
) -> str:
    """The report for a terminal.

    Args:
        report: the report.
        by: one line per node, per module or per kind of operation.
        top: only the lines that keep the most, this many.
        depth: with ``by="module"``, how many components of the path to go by; enough for some lines by default.
        width: columns to use; the terminal's by default.
    """
    width = width or shutil.get_terminal_size((120, 24)).columns
    parts = [_headline(report)]
    for table in tables(report, by=by, top=top, depth=depth):
        parts.append("\n".join(filter(None, (f"{table.title}:", _grid(table, width), table.note))))
    ends = [*(f"note: {note}" for note in report.notes), f"left out of the count: {report.LEFT_OUT}"]
    parts += [textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False) for line in ends]
    return "\n\n".join(parts)


def as_markdown(report: MemoryReport, *, by: By = "op", top: int | None = None, depth: int | None = None) -> str:
    """The report as Markdown with GitHub's tables; arguments as ``as_text`` takes them."""
    parts = [f"# {_escaped(_headline(report))}"]
    for table in tables(report, by=by, top=top, depth=depth):
        rule = ["---" if i in table.left else "---:" for i in range(len(table.head))]
        lines = [f"## {table.title[0].upper()}{table.title[1:]}", ""]
        lines += [f"| {' | '.join(_escaped(cell) for cell in row)} |" for row in (table.head, rule, *table.cells)]
        lines += ["", table.note] if table.note else []
        parts.append("\n".join(lines))
    if report.notes:
        parts.append("\n".join(f"- {_escaped(note)}" for note in report.notes))
    parts.append(f"Left out of the count: {report.LEFT_OUT}.")
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _headline(report: MemoryReport) -> str:
    autocast = f", autocast {report.autocast}" if report.autocast else ""
    ratio = ""
    if report.fxmem is not None and 0 < report.fxmem.kept < report.eager.kept:
        ratio = f": {less(report.eager.kept, report.fxmem.kept)} kept for backward"
    return f"{report.model} on {report.inputs} ({report.device}{autocast}){ratio}"


def tables(report: MemoryReport, *, by: By = "op", top: int | None = None, depth: int | None = None) -> tuple[Table, ...]:
    """Everything in the report that is a table, in the order to be read; arguments as ``as_text`` takes them."""
    found = [_totals(report), _step(report), _rows(report, by, top, depth)]
    if report.freezing:
        cells = tuple((f.parameter, human(f.eager), "" if f.fxmem is None else human(f.fxmem)) for f in report.freezing)
        found.append(_without_empty("what freezing would free", ("parameters", "eager", "fxmem"), cells))
    if report.optimizer:
        adamw, low, high = (sum(getattr(r, what) for r in report.optimizer.rows) for what in ("adamw", "rank_one", "cap"))
        cells = (
            ("AdamW", human(adamw), ""),
            ("Adapprox at rank 1", human(low), f"{100 * (1 - low / adamw):.1f}% saved"),
            ("Adapprox at its largest ranks", human(high), f"{100 * (1 - high / adamw):.1f}% saved"),
        )
        found.append(Table("optimizer state", ("optimizer", "bytes", "against AdamW"), cells, frozenset([0])))
    return tuple(found)


def columns_of(report: MemoryReport) -> list[tuple[str, Footprint]]:
    """The two ways of running, or eager alone where the model was not captured."""
    return [("eager", report.eager), *([("fxmem", report.fxmem)] if report.fxmem is not None else [])]


def _totals(report: MemoryReport) -> Table:
    columns = columns_of(report)
    lines: list[tuple[str, list[int | None]]] = [
        ("kept for backward", [f.kept for _, f in columns]),
        ("peak of forward and backward", [f.peak for _, f in columns]),
    ]
    if report.measured is not None:
        real = [m for m in report.measured if m is not None]
        lines.insert(1, ("  measured", [m.kept for m in real]))
        lines.append(("  measured", [m.peak for m in real]))
    cells = tuple((name, *("unknown" if v is None else human(v) for v in values)) for name, values in lines)
    return Table("activations", ("", *(name for name, _ in columns)), cells, frozenset([0]))


def parts_of(report: MemoryReport, footprint: Footprint) -> dict[str, int]:
    """Where the memory of a whole training step goes, in bytes; the parts add up to the total."""
    return {
        "parameters": report.parameter_bytes,
        "buffers and inputs": report.buffer_bytes + report.input_bytes,
        "optimizer state": report.optimizer.nbytes if report.optimizer else 0,
        "activations kept for backward": footprint.kept,
        "outputs": footprint.outputs,
        "gradients and temporaries at the peak": footprint.temporaries,
    }


def _step(report: MemoryReport) -> Table:
    columns = columns_of(report)
    trained = [p for p in report.parameters if p.requires_grad]
    words = {
        "parameters": f"{human(sum(p.nbytes for p in trained))} in {len(trained)} of {len(report.parameters)} tensors train",
        "optimizer state": report.optimizer.name if report.optimizer else "nothing trains",
    }
    parts = [parts_of(report, f) for _, f in columns]
    cells = [
        (f"{what} ({words[what]})" if what in words else what, *(human(each[what]) for each in parts)) for what in parts[0]
    ]
    totals = [report.total(f) for _, f in columns]
    cells.append(("total", *("unknown" if t is None else human(t) for t in totals)))
    return Table("one training step", ("", *(name for name, _ in columns)), tuple(cells), frozenset([0]))


def _rows(report: MemoryReport, by: By, top: int | None, depth: int | None) -> Table:
    head: tuple[str, ...]
    cells: list[tuple[str, ...]]
    if by == "node":
        lines = sorted(report.rows, key=lambda r: -max(r.eager, r.fxmem or 0))
        head = ("module", "op", "result", "source", "eager", "fxmem", "why")
        cells = [(*_place(r), human(r.eager), _size(r.fxmem), sentence(r)) for r in lines]
        kept = [r.eager for r in lines]
        title = "what each call keeps"
    else:
        groups = _groups(report.rows, by, depth)
        head = (by, "calls", "eager", "fxmem", "why, mostly")
        cells, kept = [], []
        for key, members in sorted(groups.items(), key=lambda g: -max(sum(r.eager for r in g[1]), _sum(g[1]) or 0)):
            weights: Counter[str] = Counter()
            for member in members:
                weights[general(member.reason)] += max(member.eager, 1)
            kept.append(sum(r.eager for r in members))
            why = weights.most_common(1)[0][0]
            cells.append((key, str(len(members)), human(kept[-1]), _size(_sum(members)), why))
        title = f"what is kept, by {by}"
    note = ""
    if top is not None and len(cells) > top:
        note = f"{len(cells) - top} more lines keep {human(sum(kept[top:]))} under eager"
    return _without_empty(title, head, tuple(cells[:top]), note)


def _place(row: NodeRow) -> tuple[str, str, str, str]:
    result = "" if row.shape is None else f"{'x'.join(map(str, row.shape)) or 'scalar'} {row.dtype}"
    source = "" if row.source is None else row.source.replace("\\", "/").rpartition("/")[2]
    return row.module or row.node, row.op, result, source


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else human(nbytes)


def _sum(rows: Iterable[NodeRow]) -> int | None:
    values = [r.fxmem for r in rows if r.fxmem is not None]
    return sum(values) if values else None


def _groups(rows: Sequence[NodeRow], by: By, depth: int | None) -> dict[str, list[NodeRow]]:
    def grouped(key: Callable[[NodeRow], str]) -> dict[str, list[NodeRow]]:
        groups: dict[str, list[NodeRow]] = {}
        for row in rows:
            groups.setdefault(key(row), []).append(row)
        return groups

    if by == "op":
        return grouped(lambda r: r.op)
    deepest = max((r.module.count(".") + 1 for r in rows), default=1)
    for level in range(depth or 1, (depth or deepest) + 1):
        groups = grouped(lambda r, level=level: ".".join(r.module.split(".")[:level]) or "(top)")  # type: ignore[misc]
        if len(groups) >= _GROUPS:
            break
    return groups


def _without_empty(title: str, head: tuple[str, ...], cells: tuple[tuple[str, ...], ...], note: str = "") -> Table:
    """A table without columns in which there is nothing."""
    columns = [i for i in range(len(head)) if not cells or any(row[i] for row in cells)]
    words = {"module", "op", "result", "source", "why", "why, mostly", "parameters"}
    return Table(
        title,
        tuple(head[i] for i in columns),
        tuple(tuple(row[i] for i in columns) for row in cells),
        frozenset(j for j, i in enumerate(columns) if head[i] in words),
        note,
    )


def _grid(table: Table, width: int) -> str:
    """The table within ``width`` columns: long paths lose their middle, the last column of words is wrapped."""
    rows = [list(row) for row in table.cells]
    last = len(table.head) - 1
    wraps = table.head[last].startswith("why")
    for room in (60, 40, 28):
        used = sum(max((len(row[i]) for row in [table.head, *rows]), default=0) + 2 for i in range(last + (not wraps)))
        if used + (_REASON if wraps else 0) <= width:
            break
        rows = [[_shortened(cell, room) if i in table.left and i < last else cell for i, cell in enumerate(r)] for r in rows]
    used = sum(max((len(row[i]) for row in [table.head, *rows]), default=0) + 2 for i in range(last))
    limits = [None] * last + [max(width - used, _REASON) if wraps else None]
    return tabulate(
        rows,
        headers=table.head,
        colalign=["left" if i in table.left else "right" for i in range(len(table.head))] if rows else None,
        maxcolwidths=limits if rows else None,
        disable_numparse=True,
        preserve_whitespace=True,
    )


def _shortened(text: str, room: int) -> str:
    half = (room - 1) // 2
    return text if len(text) <= room else f"{text[:half]}…{text[-(room - 1 - half) :]}"


def sentence(row: NodeRow) -> str:
    """Why, and what to do about it."""
    return f"{row.reason}; {row.remedy}" if row.remedy else row.reason


def general(reason: str) -> str:
    """A reason without the name of the parameter or node in it, so that like ones can be counted."""
    return " ".join("…" if "." in word.rstrip(".,;") or "_" in word else word for word in reason.split())


def as_diff(old: MemoryReport, new: MemoryReport, *, top: int | None = None, width: int | None = None) -> str:
    """What grew, shrank, came and went between two reports.

    Args:
        old: the report to start from.
        new: the report to compare with it.
        top: only the largest differences, this many.
        width: columns to use; the terminal's by default.
    """
    width = width or shutil.get_terminal_size((120, 24)).columns
    ours = old.fxmem is not None and new.fxmem is not None
    lines = [f"from {_headline(old)}", f"to   {_headline(new)}", ""]
    totals: list[tuple[str, int | None, int | None]] = []
    for name in ("eager", "fxmem"):
        before, after = getattr(old, name), getattr(new, name)
        if before is not None and after is not None:
            totals += [(f"{name}: kept", before.kept, after.kept), (f"{name}: peak", before.peak, after.peak)]
            totals.append((f"{name}: training step", old.total(before), new.total(after)))
    cells = [(what, human(a), human(b), _signed(b - a)) for what, a, b in totals if a is not None and b is not None]
    lines.append(tabulate(cells, headers=["", "old", "new", "change"], colalign=("left", "right", "right", "right")))
    first, second = _keyed(old, ours), _keyed(new, ours)
    changes = []
    for key in dict.fromkeys((*first, *second)):
        a, b = first.get(key), second.get(key)
        if (a or 0) != (b or 0):
            word = "came" if a is None else "went" if b is None else "grew" if b > a else "shrank"
            changes.append(((b or 0) - (a or 0), word, key))
    changes.sort(key=lambda change: -abs(change[0]))
    if not changes:
        return "\n".join((*lines, "", "no call keeps more or less than before"))
    rows = tuple((k[0] or "(top)", k[1], str(k[2]), word, _signed(delta)) for delta, word, k in changes[:top])
    column = "fxmem" if ours else "eager"
    table = Table("", ("module", "op", "call", "", f"{column}, change"), rows, frozenset([0, 1, 3]))
    lines += ["", _grid(table, width)]
    if top is not None and len(changes) > top:
        lines.append(f"{len(changes) - top} more calls differ, by {_signed(sum(c[0] for c in changes[top:]))}")
    return "\n".join(lines)


def _keyed(report: MemoryReport, ours: bool) -> dict[tuple[str, str, int], int]:
    """Bytes by module, op and how many-eth call of the two it is."""
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for row in report.rows:
        seen[row.module, row.op] += 1
        found[row.module, row.op, seen[row.module, row.op]] = (row.fxmem or 0) if ours else row.eager
    return found


def _signed(nbytes: int) -> str:
    return f"{'+' if nbytes > 0 else '-' if nbytes < 0 else ''}{human(abs(nbytes))}"
