"""MemoryReport to text, Markdown and HTML; JSON is ``MemoryReport.to_json``."""

from __future__ import annotations

import math
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, NamedTuple, TypeVar

from tabulate import tabulate

from fxmem.records import Compilation, Footprint, MemoryReport, NodeRow, Step

By = Literal["node", "module", "op"]

# Narrowest column of reasons, and narrowest column of names, before a table may be wider than the terminal.
_WHY, _NAME = 30, 20
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_UNKNOWN = "not known"
_NOTHING = "Nothing is kept for backward."
_FREEZING = "What freezing more would free of what is kept"

_T = TypeVar("_T")


def human(nbytes: int) -> str:
    """Bytes in the unit that reads best, binary."""
    value = float(nbytes)
    for unit in _UNITS:
        # What would print as 1,024.0 reads better as 1.0 of the next unit.
        if round(abs(value), 1) < 1024 or unit == _UNITS[-1]:
            return f"{nbytes} B" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def as_text(
    report: MemoryReport,
    *,
    by: By = "op",
    top: int | None = None,
    depth: int | None = None,
    width: int | None = None,
) -> str:
    """The report for a terminal.

    Args:
        report: the report.
        by: one line per node, per module or per kind of operation.
        top: only the lines that keep the most, this many.
        depth: how many components of a module's path make a line of ``by="module"``; by default enough for six lines.
        width: columns to use; the terminal's by default.
    """
    width = width or shutil.get_terminal_size((120, 24)).columns
    document = _document(report, by, top, depth)
    return "\n\n".join(["\n".join(_wrap(line, width) for line in document.lead), *_parts_as_text(document.parts, width)])


def as_markdown(report: MemoryReport, *, by: By = "op", top: int | None = None, depth: int | None = None) -> str:
    """The report in Markdown as GitHub reads it.

    Args:
        report: the report.
        by: one line per node, per module or per kind of operation.
        top: only the lines that keep the most, this many.
        depth: how many components of a module's path make a line of ``by="module"``; by default enough for six lines.
    """
    document = _document(report, by, top, depth)
    title, *lead = document.lead
    lines = [f"# {_escape(title)}", "", *(f"{_escape(line)}  " for line in lead)]
    for part in document.parts:
        if isinstance(part, str):
            lines += ["", *(f"{_escape(line)}  " for line in part.splitlines())]
            continue
        lines += ["", f"## {_escape(part.title)}", ""]
        if part.cells:
            rule = ["---" if side == "left" else "---:" for side in part.sides]
            lines += ["| " + " | ".join(row) + " |" for row in ([_escape(c) for c in part.head], rule)]
            lines += ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in part.cells]
        lines += ["", *(_escape(line) for line in part.below)] if part.below else []
    return "\n".join(lines)


def as_diff(old: MemoryReport, new: MemoryReport, *, top: int | None = None, width: int | None = None) -> str:
    """What changed from one report to another: totals, and the nodes that grew, shrank, appeared or went.

    Nodes are matched by module, operation and their number among equals, and compared by what fxmem keeps, where both
    reports know it, else by what eager keeps.

    Args:
        old: the report before.
        new: the report after.
        top: only the lines that changed the most, this many.
        width: columns to use; the terminal's by default.
    """
    width = width or shutil.get_terminal_size((120, 24)).columns
    names = [_clean(f"{r.model} on {r.inputs}") for r in (old, new)]
    if old.model != new.model:
        lead = [f"Two different models: {names[0]}, then {names[1]}"]
    else:
        lead = [names[0] if names[0] == names[1] else f"{names[0]}, then {names[1]}"]
    settings = [_setting(r) for r in (old, new)]
    lead.append(settings[0] if settings[0] == settings[1] else f"{settings[0]}, then {settings[1]}")

    totals = [line for line in _totals_of_both(old, new) if line[1] != line[2]]
    ours = old.fxmem is not None and new.fxmem is not None
    changed = _changes(old, new, ours)
    if not totals and not changed:
        return "\n".join(_wrap(line, width) for line in [*lead, "", "No difference."])
    parts: list[_Table | str] = []
    if totals:
        cells = [(what, _known(a), _known(b), "" if a is None or b is None else _signed(b - a)) for what, a, b in totals]
        parts.append(_Table("Totals that changed", ("", "old", "new", "change"), cells, ("left", "right", "right", "right")))
    else:
        parts.append("The totals are the same.")
    if changed:
        shown, rest = _cut(changed, top)
        parts.append(
            _Table(
                f"Nodes that changed, by what {'fxmem' if ours else 'eager'} keeps",
                ("module", "op", "old", "new", "change", "why"),
                [
                    (
                        c.module or "(top)",
                        c.op,
                        *("" if n is None else human(n) for n in (c.old, c.new)),
                        f"{c.what} {_signed(c.delta)}",
                        c.why,
                    )
                    for c in shown
                ],
                ("left", "left", "right", "right", "right", "left"),
                (_more(len(rest), f"which change by {_signed(sum(c.delta for c in rest))} together"),) if rest else (),
                wraps=True,
            )
        )
    return "\n\n".join(["\n".join(_wrap(line, width) for line in lead), *_parts_as_text(parts, width)])


# What every format says, as data.


@dataclass(frozen=True)
class _Table:
    """One table of text or Markdown: cells in full, alignment per column, lines below; with ``wraps`` the last column wraps."""

    title: str
    head: tuple[str, ...]
    cells: Sequence[tuple[str, ...]]
    sides: tuple[str, ...]
    below: tuple[str, ...] = ()
    wraps: bool = False


class _Document(NamedTuple):
    lead: list[str]
    parts: list[_Table | str]


class _Line(NamedTuple):
    """Eager beside fxmem; None where a figure is not known."""

    what: str
    eager: int | None
    fxmem: int | None


class _Group(NamedTuple):
    """Rows of one module or one kind of operation."""

    key: str
    calls: int
    eager: int
    fxmem: int
    why: str


class _Change(NamedTuple):
    module: str
    op: str
    old: int | None
    new: int | None
    why: str

    @property
    def delta(self) -> int:
        return (self.new or 0) - (self.old or 0)

    @property
    def what(self) -> str:
        if self.old is None:
            return "appeared"
        if self.new is None:
            return "went"
        return "grew" if self.delta > 0 else "shrank"


def _document(report: MemoryReport, by: By, top: int | None, depth: int | None) -> _Document:
    both = report.fxmem is not None
    lead = [_clean(f"{report.model} on {report.inputs}"), _setting(report)]
    parts: list[_Table | str] = [_passes_table(report), _step_table(report), "\n".join(_sentences(report))]
    parts.append(_rows_table(report, by, top, depth))
    if report.freezing:
        shown, rest = _cut(report.freezing, 5)
        parts.append(
            _Table(
                _FREEZING,
                ("freezing", "eager", *(["fxmem"] if both else [])),
                [(_clean(f.parameter), human(f.eager), *([_known(f.fxmem)] if both else [])) for f in shown],
                ("left", "right", *(("right",) if both else ())),
                (f"and {len(rest):,} more",) if rest else (),
            )
        )
    parts += [f"note: {_clean(note)}" for note in report.notes]
    parts.append(f"left out of the count: {report.LEFT_OUT}")
    return _Document(lead, parts)


def _setting(report: MemoryReport) -> str:
    autocast = f"autocast to {report.autocast}" if report.autocast else "no autocast"
    return _clean(f"{report.device}, {autocast}, torch {report.torch}")


def _passes(report: MemoryReport) -> list[tuple[_Line, _Line | None]]:
    """The figures of forward and backward, predicted and, where it was really run, measured."""
    eager, ours = report.eager, report.fxmem
    real, real_ours = report.measured or (None, None)
    lines: list[tuple[_Line, _Line | None]] = []
    for what, field in (
        ("kept for backward", "kept"),
        ("outputs", "outputs"),
        ("gradients", "gradients"),
        ("peak", "peak"),
    ):
        predicted = _Line(what, getattr(eager, field), getattr(ours, field, None))
        measured = _Line(what, getattr(real, field), getattr(real_ours, field, None)) if real else None
        lines.append((predicted, measured))
    return lines


def _step(report: MemoryReport) -> list[_Line]:
    """The bytes of a whole training step at its peak, line by line; the last line is their sum."""
    eager, ours = report.eager, report.fxmem

    def at_peak(footprint: Footprint | None) -> int | None:
        return None if footprint is None or footprint.peak is None else footprint.temporaries

    fixed = [("parameters", report.parameter_bytes), ("buffers", report.buffer_bytes), ("inputs", report.input_bytes)]
    if report.optimizer:
        fixed.append((f"optimizer state ({_clean(report.optimizer.name)})", report.optimizer.nbytes))
    return [
        *(_Line(what, nbytes, None if ours is None else nbytes) for what, nbytes in fixed),
        _Line("kept for backward", eager.kept, None if ours is None else ours.kept),
        _Line("outputs", eager.outputs, None if ours is None else ours.outputs),
        _Line("gradients and temporaries at the peak", at_peak(eager), at_peak(ours)),
        _Line("total", report.total(eager), None if ours is None else report.total(ours)),
    ]


def _sentences(report: MemoryReport) -> list[str]:
    """Where the peaks are, what trains, and what the optimizers keep."""
    lines = []
    peaks = [
        f"{name} {_place(peak)}"
        for name, footprint in (("eager", report.eager), ("fxmem", report.fxmem))
        if footprint and (peak := _peak_step(footprint))
    ]
    if peaks:
        lines.append(f"peak: {', '.join(peaks)}")
    trained = [p for p in report.parameters if p.requires_grad]
    size = human(sum(p.nbytes for p in trained))
    lines.append(f"training: {size} of {human(report.parameter_bytes)} of parameters, {_count(len(trained), 'tensor')}")
    if report.optimizer and report.optimizer.rows:
        lines.append(f"optimizer state: {_optimizers(report)}")
    return lines


def _optimizers(report: MemoryReport) -> str:
    adamw, low, high = _optimizer_totals(report)
    rows = report.optimizer.rows if report.optimizer else ()
    known = [r.now for r in rows if r.now is not None]
    now = f", {human(sum(known))} at this moment{_saved(sum(known), adamw)}" if known else ""
    most = max((r.temporaries for r in rows), default=0)
    while_running = f"; a step of Adapprox needs at most {human(most)} more while it runs" if most else ""
    return (
        f"AdamW {human(adamw)}, Adapprox {human(low)} at rank 1{_saved(low, adamw)}, "
        f"{human(high)} at its largest ranks{_saved(high, adamw)}{now}{while_running}"
    )


def _optimizer_totals(report: MemoryReport) -> tuple[int, int, int]:
    rows = report.optimizer.rows if report.optimizer else ()
    return sum(r.adamw for r in rows), sum(r.rank_one for r in rows), sum(r.cap for r in rows)


def _saved(nbytes: int, adamw: int) -> str:
    """How much less than AdamW's it is, in parentheses; nothing to say where AdamW keeps nothing."""
    return f" ({_percent(nbytes, adamw)} saved)" if adamw else ""


def _percent(nbytes: int, adamw: int) -> str:
    return f"{100 * (1 - nbytes / adamw):.1f}%"


def _peak_step(footprint: Footprint) -> Step | None:
    return max(footprint.timeline, key=lambda step: step.live, default=None)


def _place(step: Step) -> str:
    return f"in the {step.phase} of {_clean(f'{step.module} ({step.op})' if step.module else step.op)}"


def _passes_table(report: MemoryReport) -> _Table:
    lines, both = _passes(report), report.fxmem is not None
    columns: list[tuple[str, list[int | None]]] = [("eager", [line.eager for line, _ in lines])]
    if report.measured:
        columns.append(("measured", [real and real.eager for _, real in lines]))
    if both:
        columns.append(("fxmem", [line.fxmem for line, _ in lines]))
        if report.measured and report.measured[1]:
            columns.append(("measured", [real and real.fxmem for _, real in lines]))
    cells = [
        (line.what, *(_known(values[i]) for _, values in columns), *([_less(line.eager, line.fxmem)] if both else []))
        for i, (line, _) in enumerate(lines)
    ]
    head = ("", *(name for name, _ in columns), *([""] if both else []))
    return _Table("Forward and backward", head, cells, ("left", *(["right"] * (len(head) - 1))))


def _step_table(report: MemoryReport) -> _Table:
    both = report.fxmem is not None
    cells = [
        (line.what, _known(line.eager), *([_known(line.fxmem), _less(line.eager, line.fxmem)] if both else []))
        for line in _step(report)
    ]
    head = ("", "eager", *(["fxmem", ""] if both else []))
    return _Table("A whole training step at its peak", head, cells, ("left", *(["right"] * (len(head) - 1))))


def _rows_table(report: MemoryReport, by: By, top: int | None, depth: int | None) -> _Table:
    both = report.fxmem is not None
    items: Sequence[_Group | NodeRow]
    if by == "node":
        items = sorted(report.rows, key=_size)
        head: tuple[str, ...] = ("module", "op", "output", "source")
        sides: tuple[str, ...] = ("left",) * 4
        why = "why"
    else:
        items = _groups(report, by, depth)
        head, sides, why = (by, "calls"), ("left", "right"), "why, mostly"
    shown, rest = _cut(items, top)
    cells = []
    for item in shown:
        if isinstance(item, NodeRow):
            first: tuple[str, ...] = (_clean(item.module or item.node), _clean(item.op), _value(item), _basename(item.source))
            reason = _reason(item)
        else:
            first, reason = (item.key, f"{item.calls:,}"), item.why
        cells.append((*first, human(item.eager), *([human(item.fxmem or 0)] if both else []), reason))
    below: tuple[str, ...] = () if cells else (_NOTHING,)
    if rest:
        below = (_more(len(rest), f"which keep {_sums(rest, both)}"),)
    figures = ("right", "right") if both else ("right",)
    return _Table(
        f"Kept for backward, by {by}",
        (*head, "eager", *(["fxmem"] if both else []), why),
        cells,
        (*sides, *figures, "left"),
        below,
        wraps=True,
    )


def _groups(report: MemoryReport, by: By, depth: int | None) -> list[_Group]:
    """The rows rolled up by module or by operation, those that keep the most first."""
    if by == "module" and depth is None:
        depth = _depth(report.rows)
    members: dict[str, list[NodeRow]] = {}
    for row in report.rows:
        members.setdefault(_clean(row.op) if by == "op" else _module(row, depth or 1), []).append(row)
    groups = [
        _Group(key, len(rows), sum(r.eager for r in rows), sum(r.fxmem or 0 for r in rows), _mostly(rows))
        for key, rows in members.items()
    ]
    return sorted(groups, key=_size)


def _size(item: NodeRow | _Group) -> tuple[int, int]:
    """Sort key: what keeps the most first, under whichever of the two."""
    return -max(item.eager, item.fxmem or 0), -(item.fxmem or 0)


def _module(row: NodeRow, depth: int) -> str:
    return _clean(".".join(row.module.split(".")[:depth])) or "(top)"


def _depth(rows: Iterable[NodeRow]) -> int:
    """The smallest depth of module paths that tells six groups apart, else the deepest there is."""
    rows = list(rows)
    deepest = max((row.module.count(".") + 1 for row in rows), default=1)
    return next((d for d in range(1, deepest) if len({_module(row, d) for row in rows}) >= 6), deepest)


def _mostly(rows: Iterable[NodeRow]) -> str:
    """The reason that most bytes have, without names where the rows that share it have different ones."""
    weights: Counter[str] = Counter()
    wordings: dict[str, set[str]] = {}
    for row in rows:
        reason = _clean(row.reason)
        general = _general(reason)
        weights[general] += max(row.eager, row.fxmem or 0, 1)
        wordings.setdefault(general, set()).add(reason)
    if not weights:
        return ""
    general = weights.most_common(1)[0][0]
    return wordings[general].pop() if len(wordings[general]) == 1 else general


def _general(reason: str) -> str:
    """A reason without the name of the parameter or node in it, so that like ones can be counted."""
    return " ".join("…" if "." in word.rstrip(".,;:") or "_" in word else word for word in reason.split())


def _reason(row: NodeRow) -> str:
    return _clean(f"{row.reason}; {row.remedy}" if row.remedy else row.reason)


def _value(row: NodeRow) -> str:
    return _clean(" ".join(filter(None, [_shape(row), row.dtype])))


def _shape(row: NodeRow) -> str:
    return "" if row.shape is None else "x".join(map(str, row.shape)) or "scalar"


def _basename(source: str | None) -> str:
    return _clean(re.split(r"[/\\]", source)[-1]) if source else ""


def _totals_of_both(old: MemoryReport, new: MemoryReport) -> list[_Line]:
    """Every total that two reports can differ in, the old figure beside the new one."""

    def figures(report: MemoryReport) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for name, footprint in (("eager", report.eager), ("fxmem", report.fxmem)):
            found[f"{name}: kept for backward"] = getattr(footprint, "kept", None)
            found[f"{name}: peak of forward and backward"] = getattr(footprint, "peak", None)
            found[f"{name}: outputs"] = getattr(footprint, "outputs", None)
            found[f"{name}: gradients"] = getattr(footprint, "gradients", None)
            found[f"{name}: whole training step"] = report.total(footprint) if footprint else None
        found["parameters"] = report.parameter_bytes
        found["parameters that train"] = sum(p.nbytes for p in report.parameters if p.requires_grad)
        found["buffers"] = report.buffer_bytes
        found["inputs"] = report.input_bytes
        found["optimizer state"] = report.optimizer.nbytes if report.optimizer else 0
        return found

    after = figures(new)
    return [_Line(what, nbytes, after[what]) for what, nbytes in figures(old).items()]


def _changes(old: MemoryReport, new: MemoryReport, ours: bool) -> list[_Change]:
    """The nodes that keep more or less than before, those that changed the most first."""

    def numbered(report: MemoryReport) -> dict[tuple[str, str, int], tuple[int, str]]:
        seen: Counter[tuple[str, str]] = Counter()
        found = {}
        for row in report.rows:
            key = (_clean(row.module), _clean(row.op))
            found[(*key, seen[key])] = ((row.fxmem or 0) if ours else row.eager, _reason(row))
            seen[key] += 1
        return found

    before, after = numbered(old), numbered(new)
    changes = []
    for key in dict.fromkeys([*before, *after]):
        was, now = before.get(key), after.get(key)
        changes.append(_Change(key[0], key[1], was and was[0], now and now[0], (now or was or (0, ""))[1]))
    return sorted((c for c in changes if c.delta), key=lambda c: -abs(c.delta))


# Words and layout.


def _known(nbytes: int | None) -> str:
    return _UNKNOWN if nbytes is None else human(nbytes)


def _signed(nbytes: int) -> str:
    return f"{'+' if nbytes > 0 else ''}{human(nbytes)}"


def _less(old: int | None, new: int | None) -> str:
    """How much less ``new`` is than ``old``, in words; empty where they are equal or not known."""
    if old is None or new is None or old == new:
        return ""
    if not new:
        return "nothing left"
    if not old:
        return "new"
    low, high = sorted((old, new))
    word = "less" if new < old else "more"
    ratio = high / low
    # A ratio that prints as 1.0x would say nothing.
    return f"{ratio:,.1f}x {word}" if ratio >= 1.05 else f"{100 * (high - low) / old:.1f}% {word}"


def _sums(rows: Iterable[NodeRow | _Group], both: bool) -> str:
    rows = list(rows)
    eager, ours = sum(r.eager for r in rows), sum(r.fxmem or 0 for r in rows)
    return f"{human(eager)} under eager and {human(ours)} under fxmem" if both else f"{human(eager)} under eager"


def _more(count: int, what: str) -> str:
    return f"and {_count(count, 'more line')}, {what}"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _cut(items: Sequence[_T], top: int | None) -> tuple[Sequence[_T], Sequence[_T]]:
    return (items, ()) if top is None else (items[: max(top, 0)], items[max(top, 0) :])


def _clean(text: str) -> str:
    """``text`` on one line, as names from users may hold anything."""
    return " ".join(text.split())


def _escape(text: str) -> str:
    """Text that Markdown prints as it is, also in the cell of a table."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)


def _wrap(text: str, width: int) -> str:
    return "\n".join(textwrap.fill(line, max(width, _WHY), subsequent_indent="  ") for line in text.splitlines())


def _middle(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters, with an ellipsis in the middle where it is longer: both ends of a path tell."""
    if len(text) <= width:
        return text
    tail = width // 2
    return f"{text[: width - tail - 1]}…{text[len(text) - tail :]}"


def _parts_as_text(parts: Iterable[_Table | str], width: int) -> list[str]:
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(_wrap(part, width))
            continue
        lines = [part.title]
        if part.cells:
            head, *cells = _fit(part, width)
            lines.append(tabulate(cells, headers=head, colalign=part.sides, disable_numparse=True))
        texts.append("\n".join([*lines, *(_wrap(line, width) for line in part.below)]))
    return texts


def _fit(table: _Table, width: int) -> list[list[str]]:
    """Head and cells such that the table is no wider than ``width``, if its figures let it.

    What is too wide gives way in this order: reasons wrap, descriptions of outputs wrap, names lose their middle.
    """
    lines = [list(table.head), *(list(row) for row in table.cells)]
    # tabulate makes a column two wider than its head.
    widths = [max(len(head) + 2, *map(len, column)) for head, *column in zip(*lines, strict=True)]
    gaps = 2 * (len(widths) - 1)
    spare = width - sum(widths[:-1]) - gaps - (min(_WHY, widths[-1]) if table.wraps else widths[-1])
    if spare < 0 and "output" in table.head:
        column = table.head.index("output")
        for line in lines:
            line[column] = line[column].replace(" ", "\n")
        spare += widths[column] - max(len(part) for line in lines for part in line[column].split("\n"))
    if spare < 0:
        kept = min(widths[0], max(widths[0] + spare, _NAME))
        spare += widths[0] - kept
        for line in lines:
            line[0] = _middle(line[0], kept)
    if table.wraps:
        room = min(_WHY, widths[-1]) + max(spare, 0)
        for line in lines:
            line[-1] = textwrap.fill(line[-1], max(room, 1))
    return lines


# The page.

_LINES, _NODES = 200, 2000


def as_html(report: MemoryReport) -> str:
    """The report as one HTML file that needs nothing from anywhere.

    Args:
        report: the report.
    """
    import jinja2  # torch depends on it; only this format needs it

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters.update(human=human, known=_known, share=_share, shape=_shape, basename=_basename)
    template = environment.from_string(files("fxmem").joinpath("report.html.j2").read_text("utf-8"))
    return template.render(_page(report))


def _page(report: MemoryReport) -> dict[str, Any]:
    """What the template needs, by name."""
    both = report.fxmem is not None
    modules, more_modules = _cut(_groups(report, "module", None), _LINES)
    ops, more_ops = _cut(_groups(report, "op", None), _LINES)
    freezing, more_freezing = _cut(report.freezing, _LINES)
    nodes, more_nodes = _cut(sorted((r for r in report.rows if r.eager or r.fxmem), key=_size), _NODES)
    rows = sorted(report.optimizer.rows, key=lambda r: -r.adamw) if report.optimizer else []
    states, more_states = _cut(rows, _LINES)
    footprints = [("eager", report.eager), *([("fxmem", report.fxmem)] if report.fxmem else [])]
    drawn = [(name, footprint.timeline) for name, footprint in footprints if footprint.timeline]
    places = _sentences(report)[0] if drawn else ""
    step = _step(report)
    stacks = [("eager", [line.eager for line in step])]
    stacks += [("fxmem", [line.fxmem for line in step])] if both else []
    total = max(sum(n or 0 for n in parts) for _, (*parts, _) in stacks)
    # The optimizer's line is absent where nothing trains; the colours of the others stay theirs.
    swatches = [f"part{n}" for n in (1, 2, 3, *([4] if report.optimizer else []), 5, 6, 7)]
    return {
        "report": report,
        "setting": _setting(report),
        "both": both,
        "nothing": _NOTHING,
        "most": lambda items: max(max(item.eager, item.fxmem or 0) for item in items),
        "cards": _cards(report),
        "charts": [_chart(drawn, 1150, 330), _chart(drawn, 360, 260)] if drawn else [],
        "peaks": f"P{places[1:]}." if places else "",
        "step": [
            {**line._asdict(), "less": _less(line.eager, line.fxmem), "swatch": swatch}
            for line, swatch in zip(step, [*swatches, ""], strict=True)
        ],
        "stacks": [
            {"name": name, "parts": [(swatch, _share(n, total)) for n, swatch in zip(parts, swatches, strict=True) if n]}
            for name, (*parts, _) in stacks
        ],
        "step_label": "; ".join(f"{name} {_known(sizes[-1])}" for name, sizes in stacks),
        "passes": _passes_table(report),
        "modules": modules,
        "modules_more": _more(len(more_modules), f"which keep {_sums(more_modules, both)}") if more_modules else "",
        "ops": ops,
        "ops_more": _more(len(more_ops), f"which keep {_sums(more_ops, both)}") if more_ops else "",
        "freezing": freezing,
        "freezing_title": _FREEZING,
        "freezing_more": f"and {len(more_freezing):,} more" if more_freezing else "",
        "nodes": nodes,
        "nodes_more": _left_out(len(report.rows) - len(nodes) - len(more_nodes), more_nodes, both),
        "optimizer": f"{_optimizers(report)}.",
        "states": states,
        "states_more": f"and {len(more_states):,} more" if more_states else "",
    }


def _left_out(empty: int, more: Sequence[NodeRow], both: bool) -> str:
    """Which nodes the table of nodes leaves out, in words."""
    parts = [_more(len(more), f"which keep {_sums(more, both)}")] if more else []
    parts += [f"{_count(empty, 'node')} that a rule speaks of {'keeps' if empty == 1 else 'keep'} nothing"] if empty else []
    return "; ".join(parts)


class _Card(NamedTuple):
    what: str
    value: str
    details: list[str]


def _cards(report: MemoryReport) -> list[_Card]:
    """The totals at a glance."""
    eager, ours = report.eager, report.fxmem

    def card(what: str, old: int | None, new: int | None) -> _Card:
        if ours is None:
            return _Card(what, _known(old), ["under eager"])
        return _Card(what, _known(new), [f"eager: {_known(old)}", _less(old, new)])

    cards = [
        card("Kept for backward", eager.kept, None if ours is None else ours.kept),
        card("Peak of both passes", eager.peak, None if ours is None else ours.peak),
        card("Whole training step", report.total(eager), None if ours is None else report.total(ours)),
    ]
    trained = [p for p in report.parameters if p.requires_grad]
    cards.append(
        _Card(
            "Parameters that train",
            human(sum(p.nbytes for p in trained)),
            [f"of {human(report.parameter_bytes)}", _count(len(trained), "tensor")],
        )
    )
    if report.optimizer and report.optimizer.rows:
        adamw, low, high = _optimizer_totals(report)
        name = report.optimizer.name
        details = [f"with {name}", *([] if name == "AdamW" else [f"AdamW: {human(adamw)}"])]
        if adamw:
            saved = dict.fromkeys([_percent(high, adamw), _percent(low, adamw)])
            details.append(f"Adapprox saves {' to '.join(saved)}")
        cards.append(_Card("Optimizer state", human(report.optimizer.nbytes), details))
    return cards


class _Tick(NamedTuple):
    y: float
    label: str


class _Curve(NamedTuple):
    """One curve, and the dot and label at its peak."""

    name: str
    start: float
    path: str
    peak: int
    x: float
    y: float
    label_y: float
    anchor: str


class _Chart(NamedTuple):
    """Geometry of the timeline in the units of its picture."""

    width: int
    height: int
    left: int
    right: int
    middle: float
    top: int
    bottom: int
    ticks: list[_Tick]
    curves: list[_Curve]


def _chart(timelines: Sequence[tuple[str, tuple[Step, ...]]], width: int, height: int) -> _Chart:
    """The curves of live bytes, forward in the left half and backward in the right, whatever their number of steps."""
    left, right, top, bottom = 72, width - 8, 30, height - 30
    middle = (left + right) / 2
    highest = max(step.live for _, steps in timelines for step in steps)

    def y(nbytes: float) -> float:
        return round(bottom - (bottom - top) * nbytes / max(highest, 1), 1)

    curves: list[_Curve] = []
    for name, steps in timelines:
        path, end = "", left * 1.0
        start, dot, peak = None, (left * 1.0, bottom * 1.0), -1
        for phase, begin in (("forward", left * 1.0), ("backward", middle)):
            values = [step.live for step in steps if step.phase == phase]
            heights = _maxima(values, int(middle - left))
            for i, value in enumerate(heights):
                path += f"V{y(value)}" if path else f"M{begin:.1f} {y(value)}"
                end = begin + (middle - left) * (i + 1) / len(heights)
                path += f"H{end:.1f}"
            start = begin if start is None and values else start
            if values and max(values) > peak:
                peak = max(values)
                dot = (round(begin + (middle - left) * (values.index(peak) + 0.5) / len(values), 1), y(peak))
        # A label of some 150 units must stay inside the picture, and off the label of the curve before.
        anchor = "start" if dot[0] < left + 75 else "end" if dot[0] > right - 75 else "middle"
        near = any(abs(c.x - dot[0]) < 170 and abs(c.y - dot[1]) < 20 for c in curves)
        curves.append(_Curve(name, start or left, path, peak, *dot, dot[1] + (20 if near else -10), anchor))
    return _Chart(width, height, left, right, middle, top, bottom, [_Tick(y(n), text) for n, text in _ticks(highest)], curves)


def _maxima(values: Sequence[int], count: int) -> list[int]:
    """At most ``count`` values for many: the largest of each stretch, so that no peak is lost."""
    if len(values) <= count:
        return list(values)
    return [max(values[i * len(values) // count : (i + 1) * len(values) // count]) for i in range(count)]


def _ticks(highest: int) -> list[tuple[float, str]]:
    """Round numbers of bytes from 0 up to ``highest``, three to six of them, and how to write them."""
    power = next(p for p in reversed(range(len(_UNITS))) if highest >= 1024**p or p == 0)
    unit = 1024**power
    rough = highest / unit / 5
    magnitude = 10.0 ** math.floor(math.log10(rough)) if rough else 1.0
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough)
    step = step if power else max(step, 1.0)
    return [(i * step * unit, f"{i * step:g} {_UNITS[power]}") for i in range(int(highest / unit / step + 1e-9) + 1)]


def _share(nbytes: int | None, most: int) -> float:
    return round(100 * (nbytes or 0) / most, 2) if most else 0.0


def as_compilations(rows: Sequence[Compilation], *, markdown: bool = False) -> str:
    """Eager and compiled forms of one model side by side, as a table.

    Args:
        rows: as ``fxmem.compiled.compare`` returns them.
        markdown: whether to write it in Markdown.
    """
    head = ("", "graphs", "handed to backward", "kept, measured", "peak, measured")
    cells = [
        (r.name, r.graphs or "", "" if r.handed is None else human(r.handed), human(r.measured.kept), human(r.measured.peak))
        for r in rows
    ]
    form = "pipe" if markdown else "simple"
    return tabulate(cells, headers=head, tablefmt=form, colalign=("left", *["right"] * 4), disable_numparse=True)
