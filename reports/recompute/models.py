"""Models of the study: three of torchvision's, and two decoders written in plain torch; fully trainable or with LoRA."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class LoRA(nn.Module):
    """A frozen linear layer and a trainable product of two thin matrices, as peft writes it: dropout before, a scale after."""

    def __init__(self, base: nn.Linear, rank: int = 8, p: float = 0.05) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.drop(x))) * 2.0


class GPTBlock(nn.Module):
    """GPT-2's block: written-out attention with dropout, tanh-GELU as its authors wrote it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop_weights, self.drop_attention, self.drop_mlp = nn.Dropout(0.1), nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = torch.chunk(self.attention(self.ln_1(x)), 3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(64)
        weights = self.drop_weights(torch.softmax(scores + mask, -1))
        x = x + self.drop_attention(self.projection(torch.matmul(weights, v).transpose(1, 2).flatten(2)))
        h = self.fc(self.ln_2(x))
        h = 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + self.drop_mlp(self.out(h))


class LlamaBlock(nn.Module):
    """Llama's block: RMS norms, fused attention, a gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 1024, bias=False) for _ in range(2))
        self.down = nn.Linear(1024, width, bias=False)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = torch.chunk(x, 2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm_1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Six blocks of width 384 over embedded tokens, and a head that is not tied.

    Args:
        kind: ``"gpt2"`` or ``"llama"``.
        lora: whether only LoRA matrices train.
    """

    LENGTH, WIDTH, HEADS, WORDS = 256, 384, 6, 5000

    def __init__(self, kind: str, lora: bool) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(self.WORDS, self.WIDTH)
        self.drop = nn.Dropout(0.1 if kind == "gpt2" else 0.0)
        block = GPTBlock if kind == "gpt2" else LlamaBlock
        self.blocks = nn.ModuleList(block(self.WIDTH, self.HEADS) for _ in range(6))
        self.norm = nn.LayerNorm(self.WIDTH) if kind == "gpt2" else nn.RMSNorm(self.WIDTH, 1e-6)
        self.head = nn.Linear(self.WIDTH, self.WORDS, bias=False)
        if kind == "gpt2":
            self.position = nn.Parameter(torch.randn(self.LENGTH, self.WIDTH) * 0.02)
            mask = torch.full((self.LENGTH, self.LENGTH), float("-inf")).triu(1)
            self.register_buffer("mask", mask)
        else:
            angles = torch.outer(torch.arange(self.LENGTH), 10000.0 ** (-torch.arange(0, 64, 2) / 64)).repeat(1, 2)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())
        if lora:
            self.requires_grad_(False)
            for b in self.blocks:
                for name in ("attention",) if kind == "gpt2" else ("q", "v"):
                    setattr(b, name, LoRA(getattr(b, name)))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.drop(x + self.position if self.kind == "gpt2" else x)
        for block in self.blocks:
            x = block(x, self.mask) if self.kind == "gpt2" else block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _vision(name: str, batch: int) -> Callable[[bool], tuple[nn.Module, tuple[Tensor, ...]]]:
    def build(lora: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        model = getattr(torchvision.models, name)(weights=None).train()
        if lora:
            model.requires_grad_(False)
            for parent in list(model.modules()):
                for child, layer in list(parent.named_children()):
                    if isinstance(layer, nn.Linear) and not isinstance(parent, nn.MultiheadAttention):
                        setattr(parent, child, LoRA(layer))
        return model, (torch.randn(batch, 3, 224, 224),)

    return build


def _text(kind: str) -> Callable[[bool], tuple[nn.Module, tuple[Tensor, ...]]]:
    def build(lora: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        model = Decoder(kind, lora).train()
        tokens = torch.randint(0, Decoder.WORDS, (4, Decoder.LENGTH + 1))
        return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    return build


MODELS: dict[str, Callable[[bool], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "resnet50": _vision("resnet50", 8),
    "convnext_tiny": _vision("convnext_tiny", 4),
    "vit_b_16": _vision("vit_b_16", 4),
    "gpt2-like": _text("gpt2"),
    "llama-like": _text("llama"),
}


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """What people checkpoint: residual blocks, encoder layers, decoder blocks."""
    kinds = ("Bottleneck", "CNBlock", "EncoderBlock", "GPTBlock", "LlamaBlock")
    yield from (m for m in model.modules() if type(m).__name__ in kinds)


def checkpoint_blocks(model: nn.Module) -> nn.Module:
    """Wraps the forward of each block in ``torch.utils.checkpoint``."""
    for block in blocks(model):
        forward: Any = block.forward
        block.forward = lambda *args, _forward=forward: checkpoint(_forward, *args, use_reentrant=False)  # type: ignore[method-assign]
    return model
