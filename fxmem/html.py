"""MemoryReport to one HTML file that needs nothing else."""

from __future__ import annotations

from importlib.resources import files
from itertools import pairwise
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from fxmem.records import Footprint, MemoryReport, Step
from fxmem.render import columns_of, human, less, parts_of, sentence, tables

_MOST_ROWS = 2000
_MOST_POINTS = 400
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 1080, 320, 74, 14, 30


def as_html(report: MemoryReport) -> str:
    """The report as one HTML page: totals, the timeline as a picture, roll-ups, and every call in a sortable table.

    Args:
        report: the report.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    # Macros stand at the end, where they do not hide the page, and must be known before it.
    page, _, macros = files("fxmem").joinpath("report.html.j2").read_text().partition("{% macro")
    template = environment.from_string("{% macro" + macros + page)
    totals, step, *others = tables(report)
    del totals
    kept = sorted((r for r in report.rows if r.eager or r.fxmem or r.rewritten), key=lambda r: -max(r.eager, r.fxmem or 0))
    omitted = ""
    if len(kept) > _MOST_ROWS:
        rest = sum(r.eager for r in kept[_MOST_ROWS:])
        omitted = f"{len(kept) - _MOST_ROWS} more calls keep {human(rest)} under eager; the JSON report has them all."
    columns = [("module", "path"), ("op", ""), ("result", ""), ("source", ""), ("eager", "n"), ("fxmem", "n"), ("why", "why")]
    rows = []
    for r in kept[:_MOST_ROWS]:
        size = "" if r.shape is None else f"{'x'.join(map(str, r.shape)) or 'scalar'} {r.dtype}"
        cells = [
            _cell(r.module or r.node),
            _cell(r.op),
            _cell(size),
            _cell((r.source or "").replace("\\", "/").rpartition("/")[2]),
        ]
        cells += [_cell(human(r.eager), r.eager), _cell("" if r.fxmem is None else human(r.fxmem), r.fxmem or 0)]
        rows.append([*cells, _cell(sentence(r))])
    if report.fxmem is None:
        columns = [c for c in columns if c[0] != "fxmem"]
        rows = [row[:5] + row[6:] for row in rows]
    by_module = tables(report, by="module")[2]
    named = columns_of(report)
    return template.render(
        report=report,
        cards=_cards(report),
        timeline=_timeline(report),
        parts=list(parts_of(report, report.eager)),
        bars=[_bar(report, name, footprint, max(report.total(f) or 1 for _, f in named)) for name, footprint in named],
        step=step,
        rollups=[others[0], by_module, *others[1:]],
        columns=columns,
        rows=rows,
        omitted=omitted,
    )


def _cell(text: str, value: int | None = None) -> dict[str, Any]:
    return {"text": text, "value": value}


def _cards(report: MemoryReport) -> list[dict[str, str]]:
    eager, ours = report.eager, report.fxmem
    cards = []
    figures: list[tuple[str, int | None, int | None]] = [
        ("kept for backward", eager.kept, None if ours is None else ours.kept),
        ("peak of forward and backward", eager.peak, None if ours is None else ours.peak),
        ("one training step", report.total(eager), None if ours is None else report.total(ours)),
    ]
    for title, old, new in figures:
        if old is None:
            cards.append({"title": title, "kind": "", "value": "unknown", "words": "see the notes"})
        elif new is None:
            cards.append(
                {"title": title, "kind": "eager", "value": human(old), "words": "eager; fxmem cannot capture the model"}
            )
        else:
            words = ", ".join(filter(None, (f"eager {human(old)}", less(old, new))))
            cards.append({"title": title, "kind": "fxmem", "value": human(new), "words": words})
    if report.measured is not None:
        first, second = report.measured
        words = "; ".join(
            f"{name} {human(m.kept)} kept, {human(m.peak)} peak" for name, m in (("eager", first), ("fxmem", second)) if m
        )
        cards.append({"title": "kept, measured", "kind": "", "value": human((second or first).kept), "words": words})
    return cards


def _bar(report: MemoryReport, name: str, footprint: Footprint, most: int) -> dict[str, Any]:
    parts = parts_of(report, footprint)
    total = report.total(footprint)
    return {
        "name": name,
        "total": "unknown" if total is None else human(total),
        "shares": [f"{100 * nbytes / most:.3f}" for nbytes in parts.values()],
        "label": ", ".join(f"{what} {human(nbytes)}" for what, nbytes in parts.items()),
    }


def _timeline(report: MemoryReport) -> Markup | None:
    """Live bytes of both as an SVG picture: forward on the left half, backward on the right one."""
    curves = [(name, f) for name, f in columns_of(report) if f.timeline]
    if not curves:
        return None
    most = max(step.live for _, f in curves for step in f.timeline) or 1
    unit = _tick(most)
    top = -(-most // unit) * unit
    inner, floor = _WIDTH - _LEFT - 10, _HEIGHT - _BOTTOM

    def y(nbytes: float) -> float:
        return floor - (floor - _TOP) * nbytes / top

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="live memory over forward and backward">']
    for tick in range(0, top + 1, unit):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{human(tick)}</text>')
    middle = _LEFT + inner / 2
    parts.append(f'<line class="grid" x1="{middle}" x2="{middle}" y1="{_TOP}" y2="{floor}" stroke-dasharray="4 3"/>')
    for x, word in ((_LEFT + inner / 4, "forward"), (_LEFT + 3 * inner / 4, "backward")):
        parts.append(f'<text x="{x:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{word}</text>')
    labels = []
    taken: list[float] = []
    for name, footprint in curves:
        points: list[tuple[float, float]] = []
        for phase, start in (("forward", _LEFT), ("backward", middle)):
            steps = _fewer([s for s in footprint.timeline if s.phase == phase])
            points += [(start + inner / 2 * i / len(steps), y(s.live)) for i, s in enumerate(steps)]
            if steps:
                points.append((start + inner / 2, y(steps[-1].live)))
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in _stairs(points))
        parts.append(f'<g class="{name}"><polygon class="area" points="{_LEFT},{floor} {path} {_WIDTH - 10},{floor}"/>')
        px, py = min(points, key=lambda p: p[1])
        parts.append(f'<polyline class="curve" points="{path}"/><circle class="dot" cx="{px:.1f}" cy="{py:.1f}" r="3.5"/></g>')
        anchor, shift = ("end", -8) if px > _WIDTH - 190 else ("start", 8)
        words = f"{name}: {human(footprint.peak or 0)}"
        height = max(py - 6, 12.0)
        while any(abs(height - other) < 16 for other in taken):
            height += 16
        taken.append(height)
        labels.append(f'<text class="label {name}" x="{px + shift:.0f}" y="{height:.0f}" text-anchor="{anchor}">{words}</text>')
    return Markup("".join((*parts, *labels, "</svg>")))


def _stairs(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of a step curve through ``points``."""
    corners = points[:1]
    for (_, before), (x, after) in pairwise(points):
        corners += [(x, before), (x, after)]
    return corners


def _fewer(steps: list[Step]) -> list[Step]:
    """At most so many steps as can be seen: of neighbours the highest."""
    size = -(-len(steps) // _MOST_POINTS) or 1
    return [max(steps[i : i + size], key=lambda s: s.live) for i in range(0, len(steps), size)]


def _tick(most: int) -> int:
    """A round distance between the lines of the picture, for four to eight of them."""
    unit = 1
    while most // unit >= 1024:
        unit *= 1024
    for step in (1, 2, 5, 10, 20, 50, 100, 200):
        if most / (unit * step) <= 6:
            return unit * step
    return unit * 200
