"""Study (c): the error of the factors against rank over training, for the rank policies.

    python reports/adapprox/rank_study.py [--steps 1000] [--threads 1]

AdamW trains the GPT of train.py. For some of its matrices every policy's Adapprox, over copies of the parameters that
stand still (lr 0), gets the same gradients, and its factors are compared with the exact second moment, a float64 moving
average of the squared gradients. Writes results/rank_study.jsonl, one line per step recorded, matrix and policy.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Text
from torch import Tensor, nn
from torch.nn import functional
from train import BATCH, OPTIMIZERS, PAPER, SEEDS, STEPS, schedule

from fxmem.optim import Adapprox

RESULTS = Path(__file__).parent / "results" / "rank_study.jsonl"
LR, BETA2 = 1e-3, 0.999
MATRICES = ("tokens.weight", "blocks.0.qkv.weight", "blocks.1.up.weight", "blocks.2.out.weight", "blocks.3.down.weight")
POLICIES: dict[str, dict[str, Any]] = {
    "spectrum, xi 0.1": {},
    "spectrum, xi 0.01": {"xi": 0.01},
    "paper, xi 0.01": PAPER,
    "rank 1": {"rank": 1},
    "rank 4": {"rank": 4},
    "rank 16": {"rank": 16},
}
# Wanted errors for which the rank that the exact second moment needs is recorded.
ERRORS = (0.1, 0.01)


def compare(optimizer: Adapprox, p: Tensor, exact: Tensor, tails: Tensor) -> dict[str, Any]:
    state = optimizer.state[p]
    q, u = state["q"].double(), state["u"].double()
    k = q.shape[1]
    return {
        "rank": k,
        "error": float(f"{float((exact - q @ u.T).norm() / exact.norm()):.4g}"),
        "best_error_at_rank": float(f"{float(tails[k]):.4g}"),
        "second_moment_bytes": sum(state[name].numel() * state[name].element_size() for name in ("q", "u")),
        "dense_bytes": 4 * p.numel(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = Text()
    torch.manual_seed(SEEDS[0])
    model = GPT(text.vocabulary)
    named = dict(model.named_parameters())
    adamw = OPTIMIZERS["AdamW"](model.parameters(), LR)
    generator = torch.Generator().manual_seed(1000 + SEEDS[0])
    exact = {name: torch.zeros_like(named[name], dtype=torch.float64) for name in MATRICES}
    copies = {policy: {name: nn.Parameter(named[name].detach().clone()) for name in MATRICES} for policy in POLICIES}
    shadows = {
        policy: Adapprox(copies[policy].values(), lr=0.0, betas=(0.0, BETA2), **options) for policy, options in POLICIES.items()
    }
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    for step in range(1, args.steps + 1):
        for group in adamw.param_groups:
            group["lr"] = LR * schedule(step - 1, args.steps)
        x, y = text.batch(text.train, BATCH, generator)
        adamw.zero_grad()
        functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        for name in MATRICES:
            exact[name].mul_(BETA2).add_(named[name].grad.double() ** 2, alpha=1 - BETA2)
            for policy in POLICIES:
                copies[policy][name].grad = named[name].grad
        for optimizer in shadows.values():
            optimizer.step()
        adamw.step()
        # The ranks are searched at steps 1, 11, 21 and so on: what is recorded has been followed for nine steps.
        if step in (1, 10, 20) or step % 50 == 0:
            for name in MATRICES:
                squares = torch.linalg.svdvals(exact[name]).square()
                tails = torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)]).div(squares.sum()).sqrt()
                needed = {f"rank_needed_for_{xi:g}": int((tails > xi).sum()) for xi in ERRORS}
                for policy, optimizer in shadows.items():
                    found = compare(optimizer, copies[policy][name], exact[name], tails)
                    rows.append({"step": step, "matrix": name, "shape": list(named[name].shape), "policy": policy})
                    rows[-1] |= found | needed
            print(step, round(time.perf_counter() - started, 1), flush=True)
    stamp = {"threads": args.threads, "device": "cpu", "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    RESULTS.write_text("".join(json.dumps(row | stamp) + "\n" for row in rows))


if __name__ == "__main__":
    main()
