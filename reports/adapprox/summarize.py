"""Tables and a plot of study (b) from results/train.jsonl: results/train_summary.json, results/train.svg.

python reports/adapprox/summarize.py
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from train import OPTIMIZERS, RESULTS, SEEDS, final, finished

COLORS = ("#444444", "#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#009e73", "#cc79a7", "#999999", "#f0e442", "#882255")


def summary() -> list[dict[str, Any]]:
    done = finished()
    adamw = next(row for (name, _, _), row in done.items() if name == "AdamW")
    adamw_bytes = adamw["state_bytes_every_20_steps"][-1]
    rows = []
    for name in OPTIMIZERS:
        tried = {lr: row for (n, lr, seed), row in done.items() if n == name and seed == 0}
        if not tried:
            continue
        best = min(tried, key=lambda lr: final(tried[lr]))
        runs = [done[name, best, seed] for seed in SEEDS if (name, best, seed) in done]
        losses = [final(row) for row in runs]
        rows.append(
            {
                "optimizer": name,
                "best_lr": best,
                "lrs_tried_with_seed_0": {str(lr): final(row) for lr, row in sorted(tried.items())},
                "seeds": len(runs),
                "held_out_loss_nats_mean": round(statistics.mean(losses), 4),
                "held_out_loss_nats_spread": round(max(losses) - min(losses), 4),
                "state_share_of_adamw_largest": round(
                    max(max(row["state_bytes_every_20_steps"]) for row in runs) / adamw_bytes, 4
                ),
                "state_share_of_adamw_end": round(runs[0]["state_bytes_every_20_steps"][-1] / adamw_bytes, 4),
                "step_time_ratio_to_adamw_cpu": round(
                    statistics.median(row["optimizer_step_cpu_seconds_mean"] for row in runs)
                    / statistics.median(
                        row["optimizer_step_cpu_seconds_mean"] for (n, _, _), row in done.items() if n == "AdamW"
                    ),
                    2,
                ),
            }
        )
    return rows


def plot(rows: list[dict[str, Any]]) -> str:
    done = finished()
    width, height, left, bottom = 760, 420, 50, 40
    low, high = 1.8, 3.6

    def point(step: float, loss: float) -> str:
        x = left + step / 1000 * (width - left - 200)
        y = height - bottom - (min(max(loss, low), high) - low) / (high - low) * (height - bottom - 20)
        return f"{x:.1f},{y:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="12">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for loss in (2.0, 2.5, 3.0, 3.5):
        a, b = point(0, loss), point(1000, loss)
        x, y = a.split(",")
        parts.append(f'<polyline points="{a} {b}" stroke="#dddddd"/>')
        parts.append(f'<text x="{float(x) - 32}" y="{float(y) + 4}">{loss}</text>')
    parts.append(
        f'<text x="{left}" y="{height - 12}">step 0 to 1000: training loss, nats per character, seed 0, best lr</text>'
    )
    for i, row in enumerate(rows):
        run = done[row["optimizer"], row["best_lr"], 0]
        color = COLORS[i % len(COLORS)]
        points = [point((j + 1) * 20, loss) for j, loss in enumerate(run["train_loss_nats_every_20_steps"])]
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(
            f'<text x="{width - 190}" y="{30 + 18 * i}" fill="{color}">{row["optimizer"]}, lr {row["best_lr"]:g}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    rows = summary()
    first = next(iter(finished().values()))
    stamp = {key: first[key] for key in ("device", "threads", "torch", "date", "steps", "parameters")}
    RESULTS.with_name("train_summary.json").write_text(json.dumps({**stamp, "rows": rows}, indent=1) + "\n")
    RESULTS.with_name("train.svg").write_text(plot(rows))
    for row in rows:
        print({k: v for k, v in row.items() if k != "lrs_tried_with_seed_0"})


if __name__ == "__main__":
    main()
