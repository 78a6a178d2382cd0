"""Study (b): AdamW, Adafactor, CAME and Adapprox on one GPT; held-out loss, state bytes, time of a step.

    python reports/adapprox/train.py [--only NAME ...] [--threads 1]

Every run is appended to results/train.jsonl as it ends, and runs found there are not repeated, so the study can be
stopped and continued. Seed 0 tries every learning rate of the grid, the same for all, and goes on by factors of two where
the best is at an end; seeds 1 and 2 take the best one.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Text, held_out_loss
from torch.nn import functional

from fxmem.optim.adapprox import Adapprox

RESULTS = Path(__file__).parent / "results" / "train.jsonl"
STEPS, BATCH, WARMUP = 1000, 4, 50
GRID = (5e-4, 1e-3, 2e-3, 4e-3)
SEEDS = (0, 1, 2)
DECAY = 0.1

Make = Callable[[Iterable[Any], float], torch.optim.Optimizer]


def _came(params: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    from came_pytorch import CAME

    return CAME(params, lr=lr, weight_decay=DECAY)


def _adapprox(**options: Any) -> Make:
    return lambda params, lr: Adapprox(params, lr=lr, weight_decay=DECAY, **options)


PAPER = {"rank": "paper", "xi": 0.01, "interval": 10, "power_iterations": 5}
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=DECAY, foreach=True),
    "Adapprox": _adapprox(),
    "Adapprox beta1=0": _adapprox(betas=(0.0, 0.999)),
    "Adapprox guidance": _adapprox(guidance=True),
    "Adafactor": lambda params, lr: torch.optim.Adafactor(params, lr=lr, weight_decay=DECAY),
    "CAME": _came,
    "Adapprox paper": _adapprox(**PAPER),
    "Adapprox paper guidance": _adapprox(**PAPER, guidance=True),
    "Adapprox paper beta1=0": _adapprox(**PAPER, betas=(0.0, 0.999)),
}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)
    )


def schedule(step: int, steps: int = STEPS) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))


def run(make: Make, lr: float, seed: int, text: Text, steps: int = STEPS) -> tuple[dict[str, Any], GPT]:
    torch.manual_seed(seed)
    model = GPT(text.vocabulary)
    optimizer = make(model.parameters(), lr)
    generator = torch.Generator().manual_seed(1000 + seed)
    curve: list[float] = []
    held_out: list[tuple[int, float]] = []
    bytes_seen: list[int] = []
    times: list[float] = []
    window = 0.0
    started = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step, steps)
        x, y = text.batch(text.train, BATCH, generator)
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        clock = time.process_time()
        optimizer.step()
        times.append(time.process_time() - clock)
        window += loss.item()
        if (step + 1) % 20 == 0:
            curve.append(round(window / 20, 4))
            window = 0.0
            bytes_seen.append(state_bytes(optimizer))
            if not math.isfinite(curve[-1]):
                break
        if (step + 1) % 200 == 0:
            held_out.append((step + 1, round(held_out_loss(model, text), 5)))
    row = {
        "lr": lr,
        "seed": seed,
        "steps": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "held_out_loss_nats": held_out,
        "train_loss_nats_every_20_steps": curve,
        "state_bytes_every_20_steps": bytes_seen,
        "optimizer_step_cpu_seconds_median": round(statistics.median(times), 5),
        "optimizer_step_cpu_seconds_mean": round(statistics.mean(times), 5),
        "wall_seconds": round(time.perf_counter() - started, 1),
    }
    return row, model


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, row: dict[str, Any]) -> None:
    stamp = {"device": "cpu", "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    with path.open("a") as file:
        file.write(json.dumps(row | stamp) + "\n")


def final(row: dict[str, Any]) -> float:
    losses = row["held_out_loss_nats"]
    return losses[-1][1] if losses and losses[-1][0] == row["steps"] else math.inf


def next_run(done: dict[tuple[float, int], float], grid: Iterable[float]) -> tuple[float, int] | None:
    """The learning rate and seed to run next, or None when all is done; `done` has what to minimize by both."""
    for lr in grid:
        if (lr, 0) not in done:
            return lr, 0
    tried = sorted(lr for lr, seed in done if seed == 0)
    best = min(tried, key=lambda lr: done[lr, 0])
    if best == tried[0]:
        return best / 2, 0
    if best == tried[-1]:
        return best * 2, 0
    return next(((best, seed) for seed in SEEDS if (best, seed) not in done), None)


def following(name: str) -> tuple[float, int] | None:
    rows = [row for row in read(RESULTS) if row["optimizer"] == name]
    return next_run({(row["lr"], row["seed"]): final(row) for row in rows}, GRID)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=OPTIMIZERS)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    RESULTS.parent.mkdir(exist_ok=True)
    text = Text()
    for name in args.only or OPTIMIZERS:
        if name == "CAME" and importlib.util.find_spec("came_pytorch") is None:
            print("CAME left out: pip install came-pytorch")
            continue
        while (due := following(name)) is not None:
            row, _ = run(OPTIMIZERS[name], *due, text)
            append(RESULTS, {"optimizer": name, **row, "threads": args.threads})
            print(name, *due, final(row), row["wall_seconds"], flush=True)


if __name__ == "__main__":
    main()
