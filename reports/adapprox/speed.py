"""Study (d): time and temporaries of a step at GPT-2 117M's shapes, against torch's AdamW (foreach).

    python reports/adapprox/speed.py [--rounds 7] [--threads 1]

The gradients are those of the model itself on the topics text (words as tokens), one backward pass of 2 x 64 tokens per
step, so that the ranks are those that training reaches. The two optimizers step on the same gradients in turn; times
are of process CPU and of the wall clock. Writes results/speed.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pydoc_data.topics
import statistics
import time
import weakref
import zlib
from pathlib import Path
from typing import Any

import torch
from gpt import Block
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxmem.optim import Adapprox

RESULTS = Path(__file__).parent / "results" / "speed.json"
VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 50257, 1024, 768, 12, 12
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "beta1=0": {"betas": (0.0, 0.999)},
    "rank 64": {"rank": 64},
    "largest rank (192)": {"xi": 0.0},
}


class GPT2(nn.Module):
    """GPT-2 117M's shapes: 124,439,808 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.blocks(self.wte(ids) + self.wpe.weight[: ids.shape[1]])) @ self.wte.weight.T


def tokens() -> Tensor:
    words = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).split()
    return torch.tensor([zlib.crc32(word.encode()) % VOCABULARY for word in words])


class Meter(TorchDispatchMode):
    """Counts the bytes of storages that operators make, and those of the old state that they set free."""

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()
        for t in held:
            self._watch(t)
        self.live = self.peak = 0

    def _watch(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor):
                self._watch(t)
        return out


def peak_bytes(optimizer: torch.optim.Optimizer) -> int:
    held = [t for state in optimizer.state.values() for t in state.values()]
    held += [t for group in optimizer.param_groups for p in group["params"] for t in (p.detach(), p.grad)]
    with Meter(held) as meter:
        del held
        optimizer.step()
    return meter.peak


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())


def timed(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    optimizer.step()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(options: dict[str, Any], rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT2()
    data = tokens()
    twins = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    ours = Adapprox(model.parameters(), lr=3e-4, weight_decay=0.1, **options)
    adamw = torch.optim.AdamW(twins, lr=3e-4, weight_decay=0.1, foreach=True)
    generator = torch.Generator().manual_seed(0)
    times: dict[str, list[tuple[float, float]]] = {"adamw": [], "ours": []}
    searching, temporaries = [], {}
    for i in range(rounds + 2):
        starts = torch.randint(len(data) - 65, (2,), generator=generator).tolist()
        batch = torch.stack([data[s : s + 65] for s in starts])
        model.zero_grad()
        functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        for p, q in zip(model.parameters(), twins, strict=True):
            q.grad = p.grad
        if i == rounds + 1:
            # A rank search is due when the steps done are a multiple of the interval.
            for kind, done in (("step", 1), ("rank search", 0)):
                for state in ours.state.values():
                    state["step"].fill_(ours.param_groups[0]["interval"] * 100.0 + done)
                temporaries[kind] = peak_bytes(ours)
            break
        for name, optimizer in (("adamw", adamw), ("ours", ours)) if i % 2 else (("ours", ours), ("adamw", adamw)):
            spent = timed(optimizer)
            if i == 0 and name == "ours":
                searching.append(spent)
            elif i and not (name == "ours" and i % ours.param_groups[0]["interval"] == 0):
                times[name].append(spent)
            elif i and name == "ours":
                searching.append(spent)
    wall = {name: statistics.median(t[0] for t in values) for name, values in times.items()}
    cpu = {name: statistics.median(t[1] for t in values) for name, values in times.items()}
    interval = ours.param_groups[0]["interval"]
    search = statistics.median(t[1] for t in searching)
    ranks = [ours.state[p]["q"].shape[1] for p in model.parameters() if "q" in ours.state[p]]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "adamw_step_seconds_wall": round(wall["adamw"], 4),
        "adapprox_step_seconds_wall": round(wall["ours"], 4),
        "adamw_step_seconds_cpu": round(cpu["adamw"], 4),
        "adapprox_step_seconds_cpu": round(cpu["ours"], 4),
        "adapprox_search_step_seconds_cpu": round(search, 4),
        "ratio_wall": round(wall["ours"] / wall["adamw"], 3),
        "ratio_cpu": round(cpu["ours"] / cpu["adamw"], 3),
        "ratio_cpu_with_searches": round(((interval - 1) * cpu["ours"] + search) / interval / cpu["adamw"], 3),
        "temporaries_bytes": temporaries,
        "temporaries_allowed_bytes": max(sum(p.numel() for p in model.parameters()) * 4 // 50, 16 * 2**20),
        "state_bytes_share_of_adamw": round(state_bytes(ours) / state_bytes(adamw), 4),
        "ranks_wte_wpe_then_by_layer": ranks[:10],
        "rank_largest": max(ranks),
        "steps": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=CASES)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {"cases": {}}
    if RESULTS.exists():
        result = json.loads(RESULTS.read_text())
    for name in args.only or CASES:
        row = measure(CASES[name], args.rounds)
        print(name, row, flush=True)
        stamp = {"device": "cpu", "threads": args.threads, "torch": torch.__version__}
        result["cases"][name] = row | stamp | {"date": datetime.date.today().isoformat()}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
