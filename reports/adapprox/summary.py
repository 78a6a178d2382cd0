"""Puts the training study into a table and a plot: reads results/train.jsonl, writes curves.svg and the table in README.md.

    python reports/adapprox/summary.py
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
COLORS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#b07aa1", "#9c755f", "#bab0ac")


def final(row: dict[str, Any]) -> float:
    return row["held_out_loss_nats"][-1][1]


def best_runs() -> dict[str, list[dict[str, Any]]]:
    """Per optimizer the runs at its best learning rate, by the held-out loss of seed 0."""
    runs: dict[str, dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in (RESULTS / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        runs[row["optimizer"]][row["lr"]].append(row)
    chosen = {}
    for name, by_lr in runs.items():
        lr = min(by_lr, key=lambda lr: min(final(r) for r in by_lr[lr] if r["seed"] == 0))
        chosen[name] = by_lr[lr]
    return chosen


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    adamw = runs["AdamW"][0]
    lines = [
        "| optimizer | learning rate | seeds | held-out loss, mean (min to max) | state / AdamW's | step time / AdamW's |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in sorted(runs.items(), key=lambda item: statistics.mean(map(final, item[1]))):
        losses = [final(r) for r in rows]
        state = max(r["state_bytes_every_20_steps"][-1] for r in rows) / adamw["state_bytes_every_20_steps"][-1]
        time = statistics.median(r["optimizer_step_cpu_seconds_median"] for r in rows)
        lines.append(
            f"| {name} | {rows[0]['lr']:g} | {len(rows)} | {statistics.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f}) "
            f"| {state:.3f} | {time / adamw['optimizer_step_cpu_seconds_median']:.1f} |"
        )
    return "\n".join(lines)


def plot(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Training loss over steps, mean over seeds, as SVG."""
    width, height, left, top = 760, 420, 50, 20
    curves = {
        name: [statistics.mean(values) for values in zip(*(r["train_loss_nats_every_20_steps"] for r in rows), strict=False)]
        for name, rows in runs.items()
    }
    low, high = min(min(c) for c in curves.values()), 4.0
    inner_w, inner_h = width - left - 210, height - top - 40

    def point(i: int, n: int, loss: float) -> str:
        return f"{left + inner_w * i / (n - 1):.1f},{top + inner_h * (1 - (min(loss, high) - low) / (high - low)):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="{height - 8}">step 1 to 1000, training loss in nats per character, mean over seeds</text>',
    ]
    for tick in (2.0, 2.5, 3.0, 3.5, 4.0):
        if tick >= low:
            y = top + inner_h * (1 - (tick - low) / (high - low))
            parts.append(f'<line x1="{left}" x2="{left + inner_w}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="12" y="{y + 4:.1f}">{tick:.1f}</text>')
    for i, (name, curve) in enumerate(curves.items()):
        color = COLORS[i % len(COLORS)]
        points = " ".join(point(j, len(curve), loss) for j, loss in enumerate(curve))
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{points}"/>')
        parts.append(f'<text x="{width - 195}" y="{top + 16 + 18 * i}" fill="{color}">{name} ({len(runs[name])} seeds)</text>')
    return "\n".join([*parts, "</svg>"])


def main() -> None:
    runs = best_runs()
    readme = RESULTS.parent / "README.md"
    before, begin, rest = readme.read_text().partition("<!-- summary -->\n")
    _, end, after = rest.partition("<!-- end -->")
    readme.write_text(before + begin + table(runs) + "\n" + end + after)
    (RESULTS / "curves.svg").write_text(plot(runs) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
