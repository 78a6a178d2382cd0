"""Small models for the tests, most of them distilled from public bug reports about this kind of software."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def randn(*shape: int, seed: int = 0, requires_grad: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers, by default requiring grad."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return value.to(dtype).requires_grad_(requires_grad)


def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random parameters and statistics, none of them at a special value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator, dtype=torch.float64))
            if name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator, dtype=torch.float64) + 0.5)
    return model


def frozen_linear_maps() -> list[tuple[nn.Module, Tensor]]:
    """pytorch/pytorch#133566, #97575: these keep their input though only x needs a gradient."""
    cases: list[tuple[nn.Module, Tensor]] = []
    for n in (1, 2, 3):
        conv, transposed, norm = (getattr(nn, f"{k}{n}d") for k in ("Conv", "ConvTranspose", "BatchNorm"))
        x = randn(2, 4, *([7] * n))
        cases += [
            (conv(4, 6, 3, stride=2, padding=1, groups=2), x),
            (transposed(4, 6, 3, stride=2, output_padding=1), x),
            (fill(norm(4)).eval(), x),
        ]
    for module, _ in cases:
        module.requires_grad_(False)
    return cases


def wide_frozen_middle() -> tuple[nn.Sequential, Tensor]:
    """discuss.pytorch.org t/21936: freezing wide middle convolutions frees nothing behind a trainable layer."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 64, 1),
        nn.ReLU(),
        nn.Conv2d(64, 8, 1),
        nn.Flatten(),
        nn.Linear(8 * 26 * 26, 10),
    )
    model[2].requires_grad_(False)
    model[4].requires_grad_(False)
    return model, randn(4, 1, 28, 28, requires_grad=False)


class LoRA(nn.Module):
    """huggingface/peft#2468: y = Wx + B(Ax); a trainable A needs x."""

    def __init__(self, train_a: bool) -> None:
        super().__init__()
        self.base = nn.Linear(32, 32)
        self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
        self.base.requires_grad_(False)
        self.a.requires_grad_(train_a)

    def forward(self, x: Tensor) -> Tensor:
        y = x.neg()  # an activation, so that keeping it is not free
        return self.base(y) + self.b(self.a(y))


def pools() -> list[nn.Module]:
    """pytorch/pytorch#41099: max pooling keeps int64 indices and its whole input."""
    return [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(3, 2, 1, dilation=2),
        nn.MaxPool2d(3, 2, ceil_mode=True),
    ]


def relu_then_dropout(relu_in_place: bool) -> nn.Sequential:
    """pytorch/pytorch#92927: ReLU followed by dropout, one of them in place."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=relu_in_place),
        nn.Dropout(0.3, inplace=not relu_in_place),
        nn.Conv2d(8, 2, 1).requires_grad_(False),
    ).train()


def norms_with_flags() -> nn.Sequential:
    """huggingface/pytorch-image-models#1910: after a rewrite, a frozen norm's statistics are updated silently."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.BatchNorm2d(4, affine=False),
    )


class Branchy(nn.Module):
    """huggingface/transformers#36022: control flow that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.h = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x).mean((2, 3))
        return self.h(y) if y.sum() > 0 else self.h(-y)  # the line that CaptureError names


class Call(nn.Module):
    """A module whose forward is a function of the input alone."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class _RowsWithNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(8, 32), nn.GELU())
        self.dec = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.softmax(self.dec(self.enc(x)).mul(0.5), -1)


def rows_with_names() -> tuple[nn.Module, Tensor]:
    """Stonesjtu/pytorch_memlab#45, #48: rows named Tensor0 to Tensor10."""
    return _RowsWithNames(), torch.randn(4, 8)


def estimate_against_truth() -> tuple[nn.Module, Tensor]:
    """DeepSpeed#4527: an estimate of 0.49 GB, a reality of 14.7 GB."""
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.randn(2, 10, 32)


# pytorch/rfcs#108: will it fit before I rent a GPU?
WILL_IT_FIT = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}


class _Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        return y[y.sum(-1) > 0].relu()


def data_dependent_op() -> tuple[nn.Module, Tensor]:
    """pytorch/pytorch#126738: the fake-tensor estimate dies on a data-dependent op."""
    return _Picky(), torch.randn(4, 8)
