"""Study (b), downstream: the GPT that AdamW trained is fine-tuned to name the topic that a passage is from.

    python reports/adapprox/downstream.py [--only NAME ...] [--threads 1]

A passage is 128 characters, which the GPT reads as two windows of 64; its features are averaged. Topics are cut into
pieces of 512 characters, and of every ten pieces the fifth is for validation and the tenth for the test: a topic's end is
about other things than its beginning, so that the text held out from the GPT's own training would ask for more than the
topic's name. The GPT has therefore seen most of the test text, but none of its labels.

As in train.py, every run is appended to results/downstream.jsonl, runs found there are not repeated, seed 0 tries the
learning rates and seeds 1 and 2 take the best one, by the validation passages.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpt import CONTEXT, GPT, Text
from torch import Tensor, nn
from torch.nn import functional
from train import OPTIMIZERS, Make, append, final, next_run, read, run, schedule, state_bytes
from train import RESULTS as TRAINED

RESULTS = Path(__file__).parent / "results" / "downstream.jsonl"
STEPS, BATCH = 300, 4
GRID = (1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3)
WINDOWS, PIECE = 2, 512
# Shorter topics, in characters, have fewer than two pieces to test on.
SHORTEST = 10_000
NAMES = [
    "AdamW",
    "Adapprox",
    "Adapprox beta1=0",
    "Adapprox guidance",
    "Adafactor",
    "CAME",
    "Adapprox paper",
]


class Passages:
    """Passages and the number of the topic each is from."""

    def __init__(self, text: Text) -> None:
        topics = [torch.cat(parts) for parts in zip(text.train_topics, text.held_out_topics, strict=True)]
        pieces = [topic.split(PIECE) for topic in topics if len(topic) >= SHORTEST]
        self.classes = len(pieces)
        self.train = self._windows(pieces, (0, 1, 2, 3, 5, 6, 7, 8), 1)
        self.validation = self._windows(pieces, (4,), CONTEXT)
        self.test = self._windows(pieces, (9,), CONTEXT // 2)

    def _windows(self, topics: list[tuple[Tensor, ...]], which: tuple[int, ...], stride: int) -> tuple[Tensor, Tensor]:
        length = WINDOWS * CONTEXT
        found, labels = [], []
        for label, pieces in enumerate(topics):
            for i, piece in enumerate(pieces):
                if i % 10 in which and len(piece) >= length:
                    found.append(piece.unfold(0, length, stride))
                    labels.append(torch.full((len(found[-1]),), label))
        return torch.cat(found), torch.cat(labels)

    def largest_class(self) -> float:
        """Accuracy on the test passages of always naming the topic with the most text."""
        return float((self.test[1] == self.train[1].bincount().argmax()).float().mean())


class Classifier(nn.Module):
    def __init__(self, gpt: GPT, classes: int) -> None:
        super().__init__()
        self.gpt = gpt
        self.head = nn.Linear(gpt.tokens.embedding_dim, classes)

    def forward(self, ids: Tensor) -> Tensor:
        features = self.gpt.features(ids.reshape(-1, CONTEXT))
        return self.head(features.view(len(ids), ids.shape[1], -1).mean(1))


@torch.no_grad()
def accuracy(model: Classifier, passages: tuple[Tensor, Tensor]) -> float:
    right = [(model(x).argmax(-1) == y).sum() for x, y in zip(*(t.split(64) for t in passages), strict=True)]
    return int(sum(right)) / len(passages[0])


def pretrained(text: Text) -> dict[str, Tensor]:
    """The weights that AdamW reaches at its best learning rate; kept in the temporary directory between calls."""
    lr = min((row for row in read(TRAINED) if row["optimizer"] == "AdamW" and row["seed"] == 0), key=final)["lr"]
    path = Path(tempfile.gettempdir()) / f"fxmem_reports_gpt_{lr:g}.pt"
    if not path.exists():
        _, model = run(OPTIMIZERS["AdamW"], lr, 0, text)
        torch.save(model.state_dict(), path)
    return torch.load(path, weights_only=True)


def tune(make: Make, lr: float, seed: int, text: Text, passages: Passages, weights: dict[str, Tensor]) -> dict[str, Any]:
    torch.manual_seed(seed)
    gpt = GPT(text.vocabulary)
    gpt.load_state_dict(weights)
    model = Classifier(gpt, passages.classes)
    optimizer = make(model.parameters(), lr)
    generator = torch.Generator().manual_seed(2000 + seed)
    curve: list[float] = []
    window = 0.0
    started = time.perf_counter()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step, STEPS)
        picked = torch.randint(len(passages.train[0]), (BATCH,), generator=generator)
        loss = functional.cross_entropy(model(passages.train[0][picked]), passages.train[1][picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        window += loss.item()
        if (step + 1) % 20 == 0:
            curve.append(round(window / 20, 4))
            window = 0.0
    return {
        "lr": lr,
        "seed": seed,
        "steps": STEPS,
        "validation_accuracy": round(accuracy(model, passages.validation), 4),
        "test_accuracy": round(accuracy(model, passages.test), 4),
        "train_loss_nats_every_20_steps": curve,
        "state_bytes": state_bytes(optimizer),
        "classes": passages.classes,
        "test_passages": len(passages.test[0]),
        "largest_class_accuracy": round(passages.largest_class(), 4),
        "wall_seconds": round(time.perf_counter() - started, 1),
    }


def following(name: str) -> tuple[float, int] | None:
    rows = [row for row in read(RESULTS) if row["optimizer"] == name]
    return next_run({(row["lr"], row["seed"]): -row["validation_accuracy"] for row in rows}, GRID)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=NAMES)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = Text()
    passages = Passages(text)
    sizes = ", ".join(str(len(part[0])) for part in (passages.train, passages.validation, passages.test))
    print(
        f"{passages.classes} topics; passages to train, validate, test: {sizes}; largest class {passages.largest_class():.3f}"
    )
    weights = pretrained(text)
    for name in args.only or NAMES:
        while (due := following(name)) is not None:
            row = tune(OPTIMIZERS[name], *due, text, passages, weights)
            append(RESULTS, {"optimizer": name, **row, "threads": args.threads})
            print(
                name,
                *due,
                row["validation_accuracy"],
                row["test_accuracy"],
                statistics.mean(row["train_loss_nats_every_20_steps"][-3:]),
                row["wall_seconds"],
                flush=True,
            )


if __name__ == "__main__":
    main()
