"""The report as text, Markdown, JSON and HTML, on reports made by hand."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Sequence
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
from fxmem.render import By, as_diff, as_markdown, as_text, human

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
