"""The model that ``fxmem report`` shows when none is named."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _Block(nn.Module):
    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        out = inner * 4
        self.reduce = nn.Conv2d(width, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.spatial = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.expand = nn.Conv2d(inner, out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width != out:
            self.shortcut = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.reduce(x)))
        y = self.relu(self.norm2(self.spatial(y)))
        y = self.norm3(self.expand(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResidualNetwork(nn.Module):
    """A residual network of 50 layers for images, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        width = 64
        stages = []
        for stage, (inner, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
            blocks = []
            for i in range(depth):
                blocks.append(_Block(width, inner, 2 if i == 0 and stage > 1 else 1))
                width = inner * 4
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 1000) of images (N, 3, H, W)."""
        logits: Tensor = self.head(self.stages(self.stem(x)))
        return logits


def frozen_network() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The network frozen and in eval mode, and eight images to differentiate it by."""
    torch.manual_seed(0)
    model = ResidualNetwork().eval().requires_grad_(False)
    return model, (torch.randn(8, 3, 224, 224, requires_grad=True),)
