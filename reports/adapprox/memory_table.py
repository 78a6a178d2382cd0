"""Study (a): the paper's memory table, from shapes on `meta`.

    python reports/adapprox/memory_table.py

Writes results/memory_table.json: the share of AdamW's state bytes that Adapprox saves, in percent.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import torch

from fxmem.passes.optimizer_state import account

RESULTS = Path(__file__).parent / "results" / "memory_table.json"
MODELS = {"GPT-2 117M": (768, 12), "GPT-2 345M": (1024, 24)}


def gpt2_shapes(width: int, layers: int, vocabulary: int = 50257, context: int = 1024) -> dict[str, tuple[int, ...]]:
    """The parameters of GPT-2 (embeddings tied), as (out, in)."""
    shapes: dict[str, tuple[int, ...]] = {"wte": (vocabulary, width), "wpe": (context, width)}
    for i in range(layers):
        for name, size in (("attn.qkv", (3, 1)), ("attn.proj", (1, 1)), ("mlp.fc", (4, 1)), ("mlp.proj", (1, 4))):
            shapes[f"h.{i}.{name}.weight"] = (size[0] * width, size[1] * width)
            shapes[f"h.{i}.{name}.bias"] = (size[0] * width,)
        for name in ("ln_1", "ln_2"):
            shapes[f"h.{i}.{name}.weight"] = shapes[f"h.{i}.{name}.bias"] = (width,)
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (width,)
    return shapes


def saved_percent(width: int, layers: int, beta1: float) -> dict[str, float | int]:
    shapes = gpt2_shapes(width, layers)
    named = [(name, torch.nn.Parameter(torch.empty(shape, device="meta"))) for name, shape in shapes.items()]
    report = account(named, beta1=beta1)
    return {
        "parameters": sum(p.numel() for _, p in named),
        "adamw_state_bytes": report.adamw,
        "adapprox_state_bytes_at_k_max": report.cap,
        "adapprox_state_bytes_at_rank_1": report.rank_one,
        "saved_percent_at_k_max": round(report.saved(report.cap), 1),
        "saved_percent_at_rank_1": round(report.saved(report.rank_one), 1),
    }


def main() -> None:
    rows = [
        {"model": model, "beta1": beta1, **saved_percent(width, layers, beta1)}
        for beta1 in (0.9, 0.0)
        for model, (width, layers) in MODELS.items()
    ]
    result = {"rows": rows, "device": "meta", "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
