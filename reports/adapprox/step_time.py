"""Study (b), times: a step of every optimizer of train.py on the same gradients, in turn.

    python reports/adapprox/step_time.py [--steps 300] [--threads 1]

The runs of train.py follow each other for hours, on a machine that may be busier in one than in the next. Here AdamW
trains the GPT, and in every step all optimizers step on copies of it with its gradients, so that they find the moments and
ranks of a real run. Process CPU seconds; writes results/step_time.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from pathlib import Path

import torch
from gpt import GPT, Text
from torch.nn import functional
from train import BATCH, OPTIMIZERS, STEPS, schedule

RESULTS = Path(__file__).parent / "results" / "step_time.json"
LR = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = Text()
    torch.manual_seed(0)
    model = GPT(text.vocabulary)
    driver = OPTIMIZERS["AdamW"](model.parameters(), LR)
    copies = {name: GPT(text.vocabulary) for name in OPTIMIZERS}
    timed = {name: make(copies[name].parameters(), LR) for name, make in OPTIMIZERS.items()}
    times: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    generator = torch.Generator().manual_seed(1000)
    for step in range(args.steps):
        for group in driver.param_groups:
            group["lr"] = LR * schedule(step, STEPS)
        x, y = text.batch(text.train, BATCH, generator)
        driver.zero_grad()
        functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        for name in sorted(timed, key=lambda name: (list(timed).index(name) + step) % len(timed)):
            for p, q in zip(model.parameters(), copies[name].parameters(), strict=True):
                q.grad = p.grad
            clock = time.process_time()
            timed[name].step()
            times[name].append(time.process_time() - clock)
        driver.step()
    last = {name: values[-args.steps // 3 :] for name, values in times.items()}
    mean = {name: statistics.mean(values) for name, values in last.items()}
    rows = {
        name: {
            "step_cpu_seconds_mean": round(mean[name], 5),
            "step_cpu_seconds_median": round(statistics.median(last[name]), 5),
            "ratio_of_means_to_adamw": round(mean[name] / mean["AdamW"], 3),
            "ratio_of_medians_to_adamw": round(statistics.median(last[name]) / statistics.median(last["AdamW"]), 3),
        }
        for name in OPTIMIZERS
    }
    stamp = {"device": "cpu", "threads": args.threads, "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    RESULTS.write_text(
        json.dumps({"optimizers": rows, "steps": args.steps, "of_the_last": args.steps // 3, **stamp}, indent=1) + "\n"
    )
    for name, row in rows.items():
        print(name, row)


if __name__ == "__main__":
    main()
