"""The model and the text of the training studies: a small GPT on the help texts that ship with Python."""

from __future__ import annotations

import pydoc_data.topics

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 64


class Block(nn.Module):
    """Pre-norm transformer block, as GPT-2's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT with tied embeddings; 3.2 M parameters as it stands."""

    def __init__(self, vocabulary: int, width: int = 256, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def features(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.features(ids) @ self.tokens.weight.T


class Text:
    """Characters of `pydoc_data.topics` as ids; the last tenth of every topic is held out."""

    def __init__(self) -> None:
        topics = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
        alphabet = sorted(set("".join(topics)))
        index = {c: i for i, c in enumerate(alphabet)}
        self.vocabulary = len(alphabet)
        ids = [torch.tensor([index[c] for c in topic]) for topic in topics]
        self.train_topics = [x[: len(x) * 9 // 10] for x in ids]
        self.held_out_topics = [x[len(x) * 9 // 10 :] for x in ids]
        self.train, self.held_out = torch.cat(self.train_topics), torch.cat(self.held_out_topics)

    def batch(self, data: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - CONTEXT - 1, (size,), generator=generator)
        windows = torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def held_out_loss(model: GPT, text: Text, windows: int = 256) -> float:
    """Mean loss in nats per character over windows spread evenly over the held-out text; the same for every run."""
    last = len(text.held_out) - CONTEXT - 1
    starts = [i * last // (windows - 1) for i in range(windows)]
    total = 0.0
    for i in range(0, windows, 64):
        x = torch.stack([text.held_out[s : s + CONTEXT + 1] for s in starts[i : i + 64]])
        total += float(functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten(), reduction="sum"))
    return total / (windows * CONTEXT)
