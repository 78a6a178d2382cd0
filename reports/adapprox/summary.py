"""Puts the studies into tables and plots: reads results/, writes its SVG files and the tables in README.md.

python reports/adapprox/summary.py
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
COLORS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#b07aa1", "#9c755f", "#8c8c8c", "#d37295")
Row = dict[str, Any]
Runs = dict[str, list[Row]]


def read(name: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def final(row: Row) -> float:
    losses = row["held_out_loss_nats"]
    return losses[-1][1] if losses and losses[-1][0] == row["steps"] else math.inf


def best_runs(name: str, loss: Callable[[Row], float]) -> tuple[Runs, dict[str, str]]:
    """Per optimizer the runs at its best learning rate, by the loss of seed 0, and the rates tried."""
    runs: dict[str, dict[float, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in read(name):
        runs[row["optimizer"]][row["lr"]].append(row)
    chosen, tried = {}, {}
    for optimizer, by_lr in runs.items():
        lr = min(by_lr, key=lambda lr: min(loss(r) for r in by_lr[lr] if r["seed"] == 0))
        chosen[optimizer] = by_lr[lr]
        end = " (an end)" if lr in (min(by_lr), max(by_lr)) else ""
        tried[optimizer] = f"{lr:g} of {min(by_lr):g} to {max(by_lr):g}{end}"
    return chosen, tried


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def training(runs: Runs, tried: dict[str, str]) -> str:
    times = json.loads((RESULTS / "step_time.json").read_text())["optimizers"]
    adamw = runs["AdamW"]
    base = statistics.mean(map(final, adamw))
    lines = [
        "| optimizer | learning rate | seeds | held-out loss, mean (min to max) | against AdamW | state / AdamW's "
        "| step time / AdamW's |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in sorted(runs.items(), key=lambda item: statistics.mean(map(final, item[1]))):
        losses = [final(r) for r in rows]
        state = max(max(r["state_bytes_every_20_steps"]) for r in rows) / adamw[0]["state_bytes_every_20_steps"][-1]
        last = max(r["state_bytes_every_20_steps"][-1] for r in rows) / adamw[0]["state_bytes_every_20_steps"][-1]
        more = 100 * (statistics.mean(losses) / base - 1)
        lines.append(
            f"| {name} | {tried[name]} | {len(rows)} | {spread(losses, 3)} | {more:+.1f}% | {last:.3f}, at most {state:.3f} "
            f"| {times[name]['ratio_of_means_to_adamw']:.1f} |"
        )
    return "\n".join(lines)


def downstream(runs: Runs, tried: dict[str, str]) -> str:
    any_row = runs["AdamW"][0]
    state = any_row["state_bytes"]
    lines = [
        f"{any_row['classes']} topics, {any_row['test_passages']} test passages; always naming the largest topic is right in "
        f"{100 * any_row['largest_class_accuracy']:.1f}%.",
        "",
        "| optimizer | learning rate | seeds | test accuracy in %, mean (min to max) | validation | state / AdamW's |",
        "|---|---|---|---|---|---|",
    ]

    def mean(rows: list[Row], key: str) -> float:
        return statistics.mean(100 * r[key] for r in rows)

    for name, rows in sorted(runs.items(), key=lambda item: -mean(item[1], "test_accuracy")):
        lines.append(
            f"| {name} | {tried[name]} | {len(rows)} | {spread([100 * r['test_accuracy'] for r in rows], 1)} "
            f"| {mean(rows, 'validation_accuracy'):.1f} | {max(r['state_bytes'] for r in rows) / state:.3f} |"
        )
    return "\n".join(lines)


def speed() -> str:
    lines = [
        "| Adapprox | largest rank | step / AdamW's | with rank searches | temporaries, MiB: step, search | state / AdamW's |",
        "|---|---|---|---|---|---|",
    ]
    for name, case in json.loads((RESULTS / "speed.json").read_text())["cases"].items():
        temporaries = ", ".join(f"{n / 2**20:.1f}" for n in case["temporaries_bytes"].values())
        lines.append(
            f"| {name} | {case['rank_largest']} | {case['ratio_cpu']:.2f} | {case['ratio_cpu_with_searches']:.2f} "
            f"| {temporaries} | {case['state_bytes_share_of_adamw']:.3f} |"
        )
    return "\n".join(lines)


def at_step(rows: list[Row], policy: str, step: int) -> list[Row]:
    return [r for r in rows if r["policy"] == policy and r["step"] == step]


def geometric(values: list[float]) -> float:
    return math.exp(statistics.mean(math.log(v) for v in values))


def ranks(rows: list[Row]) -> str:
    last = max(r["step"] for r in rows)
    lines = [
        f"| policy | ranks at step {last} | error against the exact V | best error at that rank | above the best, mean "
        "| bytes of V |",
        "|---|---|---|---|---|---|",
    ]
    for policy in dict.fromkeys(r["policy"] for r in rows):
        found = at_step(rows, policy, last)
        share = sum(r["second_moment_bytes"] for r in found) / sum(r["dense_bytes"] for r in found)
        columns = [
            ", ".join(f"{r[key]:{form}}" for r in found)
            for key, form in (("rank", "d"), ("error", ".3f"), ("best_error_at_rank", ".3f"))
        ]
        above = geometric([r["error"] / r["best_error_at_rank"] for r in found]) - 1
        lines.append(f"| {policy} | {' | '.join(columns)} | {100 * above:.0f}% | {100 * share:.1f}% |")
    found = at_step(rows, rows[0]["policy"], last)
    for key in sorted((k for k in found[0] if k.startswith("rank_needed_for_")), reverse=True):
        needed = ", ".join(str(r[key]) for r in found)
        lines.append(f"| exact V, error {key.removeprefix('rank_needed_for_')} | {needed} | | | | |")
    return "\n".join(lines)


Line = tuple[str, str, list[tuple[float, float]], bool]


def chart(title: str, lines: list[Line], ticks: list[float], *, log: bool, left: int, width: int, height: int) -> list[str]:
    """One panel: a line is a name, a colour, points and whether it is dashed; the ticks are y's, and its range."""
    scale = math.log if log else float
    low, high = scale(ticks[0]), scale(ticks[-1])
    first = min(x for _, _, points, _ in lines for x, _ in points)
    last = max(x for _, _, points, _ in lines for x, _ in points)
    top, bottom = 34, height - 30

    def place(x: float, y: float) -> str:
        share = (min(max(scale(y), low), high) - low) / (high - low)
        return f"{left + width * (x - first) / (last - first):.1f},{bottom - (bottom - top) * share:.1f}"

    parts = [f'<text x="{left}" y="18" fill="#222" font-weight="bold">{title}</text>']
    for tick in ticks:
        y = float(place(first, tick).split(",")[1])
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" fill="#444" text-anchor="end">{tick:g}</text>')
    for x in (first, last):
        anchor = "start" if x == first else "end"
        parts.append(f'<text x="{place(x, ticks[0]).split(",")[0]}" y="{height - 10}" fill="#444" text-anchor="{anchor}">')
        parts[-1] += f"step {x:g}</text>"
    for _, color, points, dashed in lines:
        style = ' stroke-dasharray="3 3" stroke-width="1"' if dashed else ' stroke-width="1.6"'
        path = " ".join(place(*point) for point in points)
        parts.append(f'<polyline fill="none" stroke="{color}"{style} points="{path}"/>')
    return parts


def picture(panels: list[list[str]], names: dict[str, str], width: int, height: int) -> str:
    """Panels and a key at the right, on a background of its own so that a dark page does not swallow the text."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    parts = [head, f'<rect width="{width}" height="{height}" fill="white"/>']
    for panel in panels:
        parts += panel
    for i, (name, color) in enumerate(names.items()):
        parts.append(f'<rect x="{width - 205}" y="{40 + 20 * i}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{width - 187}" y="{50 + 20 * i}" fill="#222">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def curves(runs: Runs) -> str:
    lines: list[Line] = []
    names = {}
    for i, (name, rows) in enumerate(runs.items()):
        values = zip(*(r["train_loss_nats_every_20_steps"] for r in rows), strict=False)
        lines.append((name, COLORS[i % len(COLORS)], [(20 * (j + 1), statistics.mean(v)) for j, v in enumerate(values)], False))
        names[f"{name} ({len(rows)} seeds)"] = lines[-1][1]
    title = "training loss, nats per character, mean over seeds"
    panel = chart(title, lines, [1.5, 2.0, 2.5, 3.0, 3.5, 4.0], log=False, left=50, width=500, height=420)
    return picture([panel], names, 770, 420)


def rank_curves(rows: list[Row]) -> str:
    steps = sorted({r["step"] for r in rows})
    errors: list[Line] = []
    sizes: list[Line] = []
    names = {}
    for i, policy in enumerate(dict.fromkeys(r["policy"] for r in rows)):
        color = names[policy] = COLORS[i]
        for key, dashed, lines in (("error", False, errors), ("best_error_at_rank", True, errors), ("rank", False, sizes)):
            points = [(float(step), geometric([r[key] for r in at_step(rows, policy, step)])) for step in steps]
            lines.append((policy, color, points, dashed))
    title = "error against the exact V (dashed: best at that rank)"
    left = chart(title, errors, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0], log=True, left=50, width=380, height=420)
    right = chart("rank", sizes, [1, 2, 4, 8, 16, 32, 64], log=True, left=490, width=250, height=420)
    return picture([left, right], names, 970, 420)


def main() -> None:
    readme = RESULTS.parent / "README.md"
    text = readme.read_text()
    runs, tried = best_runs("train.jsonl", final)
    rows = read("rank_study.jsonl")
    tables = {
        "training": training(runs, tried),
        "downstream": downstream(*best_runs("downstream.jsonl", lambda row: -row["validation_accuracy"])),
        "ranks": ranks(rows),
        "speed": speed(),
    }
    for name, table in tables.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        assert begin, name
        assert end, name
        text = before + begin + table + "\n" + end + after
        print(table, "\n")
    readme.write_text(text)
    (RESULTS / "curves.svg").write_text(curves(runs))
    (RESULTS / "ranks.svg").write_text(rank_curves(rows))


if __name__ == "__main__":
    main()
