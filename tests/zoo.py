"""Every torchvision model that symbolic tracing can follow, small enough to run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

NAMES: tuple[str, ...] = tuple(
    name
    for module in ("", "segmentation", "video", "quantization")
    for name in torchvision.models.list_models(getattr(torchvision.models, module) if module else torchvision.models)
)

_KWARGS: dict[str, dict[str, Any]] = {
    "vit": {"image_size": 64},
    "vit_h_14": {"image_size": 56},
    "inception_v3": {"init_weights": False},
    "googlenet": {"init_weights": False},
}


@contextmanager
def _quick_init() -> Iterator[None]:
    """The truncated normal is slow on hundreds of millions of weights, and the values do not matter here."""
    old = nn.init.trunc_normal_

    def normal(tensor: Tensor, mean: float = 0.0, std: float = 1.0, *_: Any, **__: Any) -> Tensor:
        return nn.init.normal_(tensor, mean, std)

    nn.init.trunc_normal_ = normal
    try:
        yield
    finally:
        nn.init.trunc_normal_ = old


def build(name: str) -> nn.Module:
    """A model with random weights."""
    torch.manual_seed(0)
    kwargs = dict(_KWARGS.get(name, _KWARGS["vit"] if name.startswith("vit_") else {}))
    builder: Callable[..., nn.Module] = torchvision.models.get_model_builder(name)
    if name.startswith(("deeplab", "fcn", "lraspp")):
        kwargs |= {"weights_backbone": None}
    with _quick_init(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return builder(weights=None, **kwargs)


def inputs(name: str) -> tuple[Tensor, ...]:
    """A small batch for the model."""
    generator = torch.Generator().manual_seed(1)
    if name in ("mvit_v1_b", "mvit_v2_s"):
        shape: tuple[int, ...] = (1, 3, 16, 224, 224)
    elif name.startswith("swin3d"):
        shape = (1, 3, 4, 32, 32)
    elif name == "s3d":
        shape = (1, 3, 16, 224, 224)
    elif name in ("r3d_18", "mc3_18", "r2plus1d_18"):
        shape = (2, 3, 4, 32, 32)
    elif "inception" in name:
        shape = (2, 3, 299, 299)
    elif name == "maxvit_t":
        shape = (1, 3, 224, 224)
    elif name == "vit_h_14":
        shape = (2, 3, 56, 56)
    else:
        shape = (2, 3, 64, 64)
    return (torch.randn(shape, generator=generator),)
