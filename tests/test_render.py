"""The report as text, Markdown, JSON and HTML, on reports made by hand."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxmem import render
from fxmem.errors import ArgumentError
from fxmem.records import (
    Footprint,
    FreezeRow,
    Measurement,
    MemoryReport,
    NodeRow,
    OptimizerRow,
    OptimizerState,
    ParameterStatus,
    Step,
)
from fxmem.render import By, as_diff, as_html, as_markdown, as_text, human

WHY: dict[str, tuple[str, str | None]] = {
    "conv": ("dropped: {0}.weight is frozen, and nothing else needs the input", None),
    "batch_norm": ("dropped: the statistics are fixed and the weight is frozen", None),
    "relu": ("dropped: the derivative of ReLU needs one bit per element", None),
    "gelu": ("kept: its derivative needs it, and no rule speaks of this op", None),
    "linear": ("kept: {0}.weight requires grad, and its gradient is made of the input", "freezing {0}.weight frees it"),
}
SHRINK = {"conv": 0.0, "batch_norm": 0.0, "relu": 1 / 32, "gelu": 1.0, "linear": 1.0}


def make_report(blocks: int = 60, seed: int = 0, **changes: Any) -> MemoryReport:
    """A report as a deep network would give it: 5 rows per block, and twice as many steps."""
    draw = random.Random(seed)
    rows: list[NodeRow] = []
    parameters = []
    for i in range(blocks):
        wide = (8, 64 << (4 * i // blocks), 56 >> (2 * i // blocks), 56 >> (2 * i // blocks))
        nbytes = 4 * wide[0] * wide[1] * wide[2] * wide[3]
        for op, part in zip(WHY, ("conv1", "bn1", "", "act", "proj"), strict=True):
            module = ".".join(filter(None, [f"backbone.layer{1 + 4 * i // blocks}", str(i), part]))
            reason, remedy = WHY[op][0].format(module), (WHY[op][1] or "").format(module) or None
            source = f"/opt/site-packages/torchvision/models/resnet.py:{100 + len(rows) % 90}"
            name = module.replace(".", "_") or "n"
            kept = nbytes if draw.random() < 0.9 else 0
            rows.append(
                NodeRow(f"{name}_{op}", module, op, source, wide, "float32", kept, int(kept * SHRINK[op]), True, reason, remedy)
            )
            if part:
                trains = op == "linear"
                parameters.append(ParameterStatus(f"{module}.weight", trains, wide[1] * 4 * 9, (f"{name}_{op}",)))
    rows.append(NodeRow("mean", "", "mean", None, (), "float32", 0, 0, False, "dropped: only the input's shape is needed"))

    def footprint(which: str) -> Footprint:
        live, over = 0, []
        for row in rows:
            live += getattr(row, which)
            over.append(Step("forward", row.module, row.op, live + draw.randrange(1 << 22)))
        kept = live
        for row in reversed(rows):
            over.append(Step("backward", row.module, row.op, live + (48 << 20) + draw.randrange(1 << 22)))
            live -= getattr(row, which)
        return Footprint(kept, max(s.live for s in over), 32000, 40 << 20, tuple(over))

    eager, ours = footprint("eager"), footprint("fxmem")
    adamw = tuple(
        OptimizerRow(p.name, 2 * p.nbytes, p.nbytes + 512, 3 * p.nbytes // 2, "factored as (64, 9), rank 1 to 16")
        for p in parameters
        if p.requires_grad
    )
    report = MemoryReport(
        "ResNet",
        "8x3x224x224 float32 requires grad",
        "cuda",
        "bfloat16",
        tuple(rows),
        eager,
        ours,
        tuple(parameters),
        123456,
        4816896,
        OptimizerState("AdamW", sum(r.adamw for r in adamw), adamw),
        tuple(FreezeRow(f"backbone.layer{i}.*", (9 - i) << 22, (9 - i) << 21) for i in range(1, 9)),
        (
            Measurement(eager.kept, (eager.peak or 0) + 512, 32000, 40 << 20, "cuda:0"),
            Measurement(ours.kept, (ours.peak or 0) - 512, 32000, 40 << 20, "cuda:0"),
        ),
        ("the forward sets cache on every call; the graph does not",),
        "2.14.1",
    )
    return dataclasses.replace(report, **changes)


REPORT = make_report()
UNSEEN = dataclasses.replace(
    REPORT,
    fxmem=None,
    measured=None,
    eager=dataclasses.replace(REPORT.eager, peak=None, timeline=()),
    rows=tuple(dataclasses.replace(r, fxmem=None) for r in REPORT.rows),
    freezing=tuple(dataclasses.replace(f, fxmem=None) for f in REPORT.freezing),
)
EMPTY = dataclasses.replace(
    UNSEEN,
    rows=(),
    eager=Footprint(0, 0, 0, 0),
    parameters=(),
    buffer_bytes=0,
    input_bytes=0,
    optimizer=None,
    freezing=(),
    notes=(),
)
BYS = ("op", "module", "node")


def test_human() -> None:
    wanted = {
        0: "0 B",
        -1: "-1 B",
        1023: "1023 B",
        1024: "1.0 KiB",
        1536: "1.5 KiB",
        -1536: "-1.5 KiB",
        (1 << 20) - 1: "1.0 MiB",
        5 << 20: "5.0 MiB",
        3 << 30: "3.0 GiB",
        7 << 40: "7.0 TiB",
        5000 << 40: "5,000.0 TiB",
    }
    assert {n: human(n) for n in wanted} == wanted


@given(st.integers(-(1 << 50), 1 << 50))
def test_human_is_right_to_the_last_digit(nbytes: int) -> None:
    number, unit = human(nbytes).split()
    size = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    value = float(number.replace(",", ""))
    assert abs(value * size - nbytes) <= 0.0501 * size
    assert abs(value) < 1024 or unit == "TiB"


@pytest.mark.parametrize("by", BYS)
@pytest.mark.parametrize("report", [REPORT, UNSEEN, EMPTY], ids=["full", "unseen", "empty"])
def test_text_is_no_wider_than_the_terminal(by: By, report: MemoryReport) -> None:
    for width in (80, 100, 130, 200):
        forced = 113 if by == "node" else 0
        assert max(map(len, as_text(report, by=by, width=width).splitlines())) <= max(width, forced)


NAMES = st.text("ab.|<_ \n\té*", max_size=90)


@settings(max_examples=40, deadline=None)
@given(NAMES, NAMES, NAMES, st.sampled_from(BYS), st.integers(60, 220))
def test_any_name_fits(module: str, reason: str, model: str, by: By, width: int) -> None:
    row = NodeRow("n", module, "convolution", "/a/b.py:1", (1, 2), "float32", 1 << 20, 5, True, reason, module)
    report = dataclasses.replace(EMPTY, model=model, rows=(row, row), freezing=(FreezeRow(module, 5, 7),), notes=(reason,))
    assert max(map(len, as_text(report, by=by, width=width).splitlines())) <= max(width, 105)
    _check_tables(as_markdown(report, by=by))


def test_text_says_it_all() -> None:
    assert REPORT.optimizer
    text = as_text(REPORT, width=120)
    assert text.startswith("ResNet on 8x3x224x224 float32 requires grad\ncuda, autocast to bfloat16, torch 2.14.1\n")
    for piece in (
        "measured",
        f"optimizer state: AdamW {human(REPORT.optimizer.nbytes)}",
        "peak: eager in the backward of backbone.layer4.59.proj (linear), fxmem in the backward of mean",
        "60 tensors",
        "kept: … requires grad, and its gradient is made of the input",
        "What freezing more would free",
        "and 3 more",
        "note: the forward sets cache on every call",
        "left out of the count: workspaces of kernels",
    ):
        assert piece in text
    assert "fxmem" not in as_text(UNSEEN).split("left out")[0]
    assert as_text(UNSEEN).count("not known") == 3
    assert "Nothing is kept for backward." in as_text(EMPTY)


def test_optimizer_percentages() -> None:
    row = OptimizerRow("w", 1000, 155, 655, "factored")
    text = as_text(dataclasses.replace(EMPTY, optimizer=OptimizerState("Adapprox", 655, (row, row))), width=200)
    assert "AdamW 2.0 KiB, Adapprox 310 B at rank 1 (84.5% saved), 1.3 KiB at its largest ranks (34.5% saved)" in text
    assert "optimizer state (Adapprox)" in text


@pytest.mark.parametrize("by", BYS)
def test_lines_add_up(by: By) -> None:
    rows: Sequence[Any] = REPORT.rows if by == "node" else render._groups(REPORT, by, None)
    assert sum(r.eager for r in rows) == REPORT.eager.kept
    assert sum(r.fxmem or 0 for r in rows) == (REPORT.fxmem and REPORT.fxmem.kept)
    *parts, total = render._step(REPORT)
    assert sum(p.eager or 0 for p in parts) == total.eager == REPORT.total(REPORT.eager)
    assert sum(p.fxmem or 0 for p in parts) == total.fxmem
    text = as_text(REPORT, by=by, top=2, width=200)
    count = len(rows) - 2
    assert f"and {count} more lines, which keep" in text
    assert "more line" not in as_text(REPORT, by=by, width=200)


def test_depth_of_modules() -> None:
    assert "backbone.layer1.0 " in as_text(REPORT, by="module", width=200)
    assert "backbone.layer1 " in as_text(REPORT, by="module", depth=2, width=200)
    few = dataclasses.replace(REPORT, rows=REPORT.rows[:5])
    assert {g.key for g in render._groups(few, "module", None)} == {
        f"backbone.layer1.0{part}" for part in ("", ".conv1", ".bn1", ".act", ".proj")
    }
    assert "(top)" in {g.key for g in render._groups(REPORT, "module", 1)}


def _check_tables(text: str) -> int:
    """Checks that every row of every Markdown table has as many cells as its head; the number of tables."""
    tables: list[str] = re.findall(r"(?:^\|.*\n?)+", text, flags=re.M)
    for table in tables:
        assert len({len(re.split(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table
    return len(tables)


@pytest.mark.parametrize("by", BYS)
def test_markdown(by: By) -> None:
    assert _check_tables(as_markdown(REPORT, by=by)) == 4
    assert _check_tables(as_markdown(UNSEEN, by=by, top=3)) == 4
    row = dataclasses.replace(REPORT.rows[0], module="a|b<i>", op="x|y", reason="because | of *this*")
    text = as_markdown(dataclasses.replace(REPORT, rows=(row,)), by="node")
    assert _check_tables(text) == 4
    assert r"| a\|b\<i\> | x\|y |" in text


def test_json_round_trip() -> None:
    for report in (REPORT, UNSEEN, EMPTY):
        assert MemoryReport.from_json(report.to_json()) == report
    data = json.loads(REPORT.to_json())
    assert next(iter(data)) == "schema"
    for change, message in (
        ({"schema": 1}, "schema 1"),
        ({"model": 3}, "expected str, got 3"),
        ({"buffer_bytes": True}, "expected int, got True"),
        ({"buffer_bytes": 1.5}, "expected int"),
        ({"rows": "no"}, "expected a list"),
        ({"measured": [None]}, "a field is missing or wrong"),
        ({"surprise": 1}, "surprise"),
        ({"eager": {"kept": 1}}, "missing"),
        ({"eager": {**data["eager"], "timeline": [{"phase": "sideways", "module": "", "op": "", "live": 0}]}}, "sideways"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(message)):
            MemoryReport.from_json(json.dumps({**data, **change}))
    del data["notes"]
    for text, message in ((json.dumps(data), "notes"), ("{", "it is no JSON"), ("[]", "schema None"), ("3", "schema None")):
        with pytest.raises(ArgumentError, match=message):
            MemoryReport.from_json(text)


def test_diff_of_equals() -> None:
    assert as_diff(REPORT, REPORT, width=120).splitlines()[-1] == "No difference."
    other = dataclasses.replace(REPORT, torch="2.15.0")
    assert "torch 2.14.1, then cuda, autocast to bfloat16, torch 2.15.0" in as_diff(REPORT, other, width=120)


def test_diff() -> None:
    first, second, *rest = REPORT.rows
    big = dataclasses.replace(second, fxmem=9 << 20)
    added = dataclasses.replace(first, node="again", fxmem=5 << 20)
    last = rest[-2]
    assert last.fxmem
    new = dataclasses.replace(
        REPORT,
        rows=(first, big, *rest[:-2], rest[-1], added),
        eager=dataclasses.replace(REPORT.eager, kept=REPORT.eager.kept - (1 << 30)),
        buffer_bytes=0,
    )
    text = as_diff(REPORT, new, width=200)
    lines = {
        line.split()[0]: line
        for line in text.split("Nodes that changed, by what fxmem keeps")[1].splitlines()
        if "MiB " in line
    }
    assert "0 B" in lines[second.module]
    assert "grew +9.0 MiB" in lines[second.module]
    assert "appeared +5.0 MiB" in lines[first.module]
    assert f"went {human(-last.fxmem)}" in lines[last.module]
    assert len(lines) == 3
    assert re.search(r"eager: kept for backward +2\.4 GiB +1\.4 GiB +-1\.0 GiB", text)
    assert re.search(r"buffers +120\.6 KiB +0 B +-120\.6 KiB", text)
    assert "parameters " not in text
    assert "and 2 more lines, which change by" in as_diff(REPORT, new, top=1, width=200)
    assert max(map(len, as_diff(REPORT, new, width=110).splitlines())) <= 110


def test_diff_of_other_models_goes_by_eager_where_fxmem_is_not_known() -> None:
    text = as_diff(dataclasses.replace(UNSEEN, model="VGG", rows=UNSEEN.rows[1:]), REPORT, width=200)
    assert text.startswith("Two different models: VGG on 8x3x224x224 float32 requires grad, then ResNet on")
    assert "Nodes that changed, by what eager keeps" in text
    assert re.search(r"fxmem: kept for backward +not known +959\.7 MiB", text)


# The page.

HOSTILE = "<script>document.title='owned'</script>"
VOID = {"meta", "link", "input", "wbr", "br"}


class _Page(HTMLParser):
    """Reads a page strictly: every tag must be closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _hostile() -> MemoryReport:
    """A report in which every text that comes from a user is a script."""
    row = dataclasses.replace(
        REPORT.rows[0], node=HOSTILE, module=f"a.{HOSTILE}", op=HOSTILE, source=HOSTILE, reason=HOSTILE, remedy=HOSTILE
    )
    step = Step("forward", HOSTILE, HOSTILE, 5)
    state = OptimizerState(HOSTILE, 2, (OptimizerRow(HOSTILE, 2, 1, 1, HOSTILE),))
    return dataclasses.replace(
        REPORT,
        model=HOSTILE,
        inputs=HOSTILE,
        device=HOSTILE,
        rows=(row, dataclasses.replace(row, module="")),
        eager=dataclasses.replace(REPORT.eager, timeline=(step,)),
        freezing=(FreezeRow(HOSTILE, 1, 1),),
        optimizer=state,
        notes=(HOSTILE,),
    )


@pytest.mark.parametrize("report", [REPORT, UNSEEN, EMPTY, _hostile()], ids=["full", "unseen", "empty", "hostile"])
def test_page_is_whole_and_needs_nothing(report: MemoryReport) -> None:
    text = as_html(report)
    page = _Page(text)
    assert not re.search(r"https?:|url\(|@import|<img|<iframe", text)
    assert all("src" not in attributes for _, attributes in page.tags)
    assert [a for tag, a in page.tags if tag == "link"] == [{"rel": "icon", "href": "data:,"}]
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert ("meta", {"name": "color-scheme", "content": "light dark"}) in page.tags
    assert ("html", {"lang": "en"}) in page.tags
    assert report.LEFT_OUT in page.text
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    named = {name for _, a in page.tags for name in (a.get("aria-labelledby") or "").split()}
    assert named <= set(ids)


def test_page_shows_names_as_they_are() -> None:
    text = as_html(_hostile())
    assert "<script>document" not in text
    assert _Page(text).text.count(HOSTILE.split(".")[0]) >= 12


def test_page_says_it_all() -> None:
    text = _Page(as_html(REPORT)).text
    assert REPORT.optimizer
    assert REPORT.fxmem
    for piece in (
        human(REPORT.eager.kept),
        human(REPORT.fxmem.kept),
        human(REPORT.total(REPORT.eager) or 0),
        "Peak: eager in the backward of backbone.layer4.59.proj (linear), fxmem in the backward of mean.",
        "Predicted and measured",
        "Adapprox saves 25.0% to 47.0%",
        "freezing backbone.layer2.16.proj.weight frees it",
        "resnet.py:110",
        "the forward sets cache",
        "34 nodes that a rule speaks of keep nothing",
    ):
        assert piece in text, piece
    unseen = _Page(as_html(UNSEEN)).text
    assert "not known" in unseen
    assert "fxmem" not in unseen.split("no autocast")[-1].split("use strict")[0].split("torch 2.14.1")[-1]


def test_page_of_a_large_model_stays_small() -> None:
    report = make_report(4000)
    text = as_html(report)
    assert text.count("<tr>") < 2000 + 3 * 200 + 60
    assert len(text) < 2_500_000
    kept = sum(1 for r in report.rows if r.eager)
    assert f"and {kept - 2000:,} more lines, which keep" in text
    # The picture has as many points as it has room for, not one for each of the 40,000 steps.
    assert max(map(len, re.findall(r' d="([^"]*)"', text))) < 30_000


def test_timeline_keeps_its_peaks() -> None:
    steps = [Step("forward", "", "a", 10)] * 5000 + [Step("backward", "", "b", 1000)] + [Step("backward", "", "b", 10)] * 5000
    chart = render._chart([("eager", tuple(steps)), ("fxmem", tuple(steps[:9000]))], 400, 200)
    first, second = chart.curves
    assert first.peak == second.peak == 1000
    assert (first.x, first.y) == (chart.middle, chart.top)
    assert f"V{chart.top}" in first.path
    assert abs(first.label_y - second.label_y) >= 20
    assert [t.label for t in chart.ticks] == ["0 B", "200 B", "400 B", "600 B", "800 B", "1000 B"]
    lonely = render._chart([("eager", (Step("backward", "", "a", 0),))], 400, 200)
    assert lonely.curves[0].start == lonely.middle
    assert render._maxima([3, 1, 4, 1, 5, 9, 2, 6], 3) == [3, 5, 9]


@given(st.integers(0, 1 << 52))
def test_ticks_are_few_and_within(highest: int) -> None:
    ticks = render._ticks(highest)
    assert ticks[0][0] == 0
    assert all(n <= highest * (1 + 1e-8) for n, _ in ticks)
    assert len({text for _, text in ticks}) == len(ticks) <= 6
    assert len(ticks) >= min(3, highest + 1)


def _luminance(color: str) -> float:
    if len(color) == 4:
        color = "#" + "".join(2 * c for c in color[1:])
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_contrast(scheme: int) -> None:
    block = re.findall(r":root \{(.*?)\}", as_html(EMPTY), flags=re.S)[scheme]
    colors = dict(re.findall(r"--(\w+): (#\w+)", block))

    def contrast(a: str, b: str) -> float:
        low, high = sorted((_luminance(colors[a]), _luminance(colors[b])))
        return (high + 0.05) / (low + 0.05)

    for ink in ("text", "quiet", "eager", "fxmem"):
        assert min(contrast(ink, paper) for paper in ("surface", "page", "hover")) >= 4.5, ink
    for part in range(1, 8):
        assert contrast(f"part{part}", "surface") >= 3, part


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the path")


def _browse(folder: Path, text: str) -> tuple[str, list[str], list[str]]:
    """Opens a page from a file; the document after its scripts ran, the console's lines, and the addresses asked for."""
    page, log = folder / "page.html", folder / "net.json"
    page.write_text(text, encoding="utf-8")
    assert BROWSER
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder / 'profile'}",
            f"--log-net-log={log}",
            "--enable-logging=stderr",
            "--v=0",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = json.loads(log.read_text())["events"]
    starts = [e["params"] for e in events if {"url", "initiator"} <= e.get("params", {}).keys()]
    # What the browser asks for on its own behalf (the time, dictionaries) has no page behind it.
    addresses = [p["url"] for p in starts if p["initiator"] != "not an origin"]
    return done.stdout, console, addresses


def _with_script(text: str, script: str) -> str:
    return text.replace("</body>", f"<script>{{{script}}}</script></body>")


@needs_browser
def test_browser_tells_errors_and_requests(tmp_path: Path) -> None:
    bad = "<!DOCTYPE html><html><body><img src='http://example.invalid/x.png'><script>nowhere()</script></body></html>"
    _, console, addresses = _browse(tmp_path, bad)
    assert any("nowhere is not defined" in line for line in console)
    assert "http://example.invalid/x.png" in addresses


@needs_browser
@pytest.mark.parametrize("report", [REPORT, _hostile()], ids=["full", "hostile"])
def test_page_in_a_browser(report: MemoryReport, tmp_path: Path) -> None:
    dom, console, addresses = _browse(tmp_path, as_html(report))
    assert console == []
    assert [a for a in addresses if not a.startswith(("file:", "data:"))] == []
    assert "<title>owned</title>" not in dom
    assert dom.count("<button") >= 20


@needs_browser
def test_sorting_and_filtering_in_a_browser(tmp_path: Path) -> None:
    script = """
    const table = document.getElementById("nodes"), said = [];
    const column = (i) => Array.from(table.tBodies[0].rows, (row) => row.cells[i].dataset.v || row.cells[i].textContent);
    const press = (i) => {
      const head = table.tHead.rows[0].cells[i];
      head.querySelector("button").click();
      said.push([head.getAttribute("aria-sort"), table.querySelectorAll("th[aria-sort]").length, column(i)]);
    };
    press(5); press(5); press(0); press(0);
    const input = document.getElementById("filter");
    input.value = "LAYER3 gelu";
    input.dispatchEvent(new Event("input"));
    const shown = Array.from(table.tBodies[0].rows).filter((row) => !row.hidden);
    said.push([document.getElementById("count").textContent, shown.length]);
    const pre = document.createElement("pre");
    pre.id = "said";
    pre.textContent = JSON.stringify(said);
    document.body.append(pre);
    """
    dom, console, _ = _browse(tmp_path, _with_script(as_html(REPORT), script))
    assert console == []
    found = re.search(r'<pre id="said">(.*?)</pre>', dom)
    assert found
    down, up, names, back, counted = json.loads(found[1])
    sizes = [r.eager for r in REPORT.rows if r.eager]
    assert down[:2] == ["descending", 1]
    assert list(map(int, down[2])) == sorted(sizes, reverse=True)
    assert up[:2] == ["ascending", 1]
    assert list(map(int, up[2])) == sorted(sizes)
    assert names[:2] == ["ascending", 1]
    # Numbers in names count as numbers: layer1.2 comes before layer1.10.
    assert names[2] == sorted(names[2], key=lambda n: [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in n.split(".")])
    assert back[0] == "descending"
    assert back[2] == names[2][::-1]
    wanted = sum(1 for r in REPORT.rows if r.eager and "layer3" in r.module and r.op == "gelu")
    assert counted == [f"{wanted} of {len(sizes)} rows", wanted]


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_page_does_not_scroll_sideways(width: int, tmp_path: Path) -> None:
    frame = f'<iframe srcdoc="{escape(as_html(REPORT))}" style="border:0;width:{width}px;height:900px"></iframe>'
    script = """onload = () => {
      const root = document.querySelector("iframe").contentDocument.documentElement;
      document.title = `${root.clientWidth} ${root.scrollWidth} ${getComputedStyle(root.querySelector("svg.narrow")).display}`;
    };"""
    dom, _, _ = _browse(tmp_path, f"<!DOCTYPE html><html><head></head><body>{frame}<script>{script}</script></body></html>")
    found = re.search(r"<title>(\d+) (\d+) (\w+)</title>", dom)
    assert found
    assert int(found[2]) <= int(found[1]) <= width
    assert found[3] == ("block" if width < 720 else "none")
