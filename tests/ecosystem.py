"""Models of other libraries, from small random configurations: transformers, peft, torchvision's detection and optical flow."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
import zoo
from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    """One model.

    Args:
        build: makes it, with random weights.
        inputs: its keyword inputs.
        adapters: names of the layers that LoRA adapts; none where it is not asked for.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    adapters: tuple[str, ...] = ()


def _ids(*shape: int, high: int = 96) -> Tensor:
    return torch.randint(2, high, shape, generator=torch.Generator().manual_seed(3))


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))


def _text(**more: Any) -> dict[str, Any]:
    ids = _ids(2, 24)
    mask = torch.ones_like(ids)
    mask[1, 18:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), **more}


def _seq2seq() -> dict[str, Any]:
    return {**_text(), "labels": _ids(2, 12), "use_cache": False}


def _transformers(
    kind: str, config: str, inputs: Callable[[], dict[str, Any]], adapters: tuple[str, ...], **values: Any
) -> Model:
    def build() -> nn.Module:
        import transformers

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformers.logging.set_verbosity_error()
            torch.manual_seed(0)
            model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**values))
            return model

    return Model(build, inputs, adapters)


_DECODER = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_ENCODER = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_QV = ("q_proj", "v_proj")


class _UNet(nn.Module):
    """A small diffusion U-Net of torch modules: residual blocks with a time embedding, attention in the middle."""

    class Block(nn.Module):
        def __init__(self, cin: int, cout: int) -> None:
            super().__init__()
            self.norm1, self.conv1 = nn.GroupNorm(4, cin), nn.Conv2d(cin, cout, 3, padding=1)
            self.norm2, self.conv2 = nn.GroupNorm(4, cout), nn.Conv2d(cout, cout, 3, padding=1)
            self.time, self.drop = nn.Linear(32, cout), nn.Dropout(0.1)
            self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
            return self.skip(x) + self.conv2(self.drop(F.silu(self.norm2(h))))

    def __init__(self) -> None:
        super().__init__()
        block = _UNet.Block
        self.embed = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.ModuleList([block(16, 16), block(16, 32)])
        self.pool = nn.ModuleList([nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.AvgPool2d(2)])
        self.mid, self.norm = block(32, 32), nn.GroupNorm(4, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.up = nn.ModuleList([block(64, 16), block(32, 16)])
        self.leave = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor, return_dict: bool = True) -> Any:
        if timestep.max() > 1000:
            raise ValueError("timesteps go to 1000")
        angles = timestep[:, None] * torch.exp(-torch.arange(8, device=timestep.device) / 2)
        t = self.embed(torch.cat([angles.sin(), angles.cos()], 1))
        x, skips = self.enter(sample), []
        for block, pool in zip(self.down, self.pool, strict=True):
            x = block(x, t)
            skips.append(x)
            x = pool(x)
        x = self.mid(x, t)
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        x = x + self.attention(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).view_as(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1), t)
        x = self.leave(x)
        return {"sample": x} if return_dict else (x,)


TRANSFORMERS: dict[str, Model] = {
    "GPT-2": _transformers(
        "GPT2LMHeadModel",
        "GPT2Config",
        lambda: _text(use_cache=False),
        ("c_attn",),
        n_layer=2,
        n_embd=48,
        n_head=4,
        vocab_size=96,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=1,
    ),
    "BERT": _transformers("BertForMaskedLM", "BertConfig", _text, ("query", "value"), **_ENCODER),
    "RoBERTa": _transformers("RobertaForMaskedLM", "RobertaConfig", _text, ("query", "value"), **_ENCODER),
    "DistilBERT": _transformers(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        _text,
        ("q_lin", "v_lin"),
        vocab_size=96,
        dim=48,
        hidden_dim=96,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=64,
    ),
    "Llama": _transformers("LlamaForCausalLM", "LlamaConfig", lambda: _text(use_cache=False), _QV, **_DECODER),
    "Mistral": _transformers("MistralForCausalLM", "MistralConfig", lambda: _text(use_cache=False), _QV, **_DECODER),
    "Qwen2": _transformers("Qwen2ForCausalLM", "Qwen2Config", lambda: _text(use_cache=False), _QV, **_DECODER),
    "T5": _transformers(
        "T5ForConditionalGeneration",
        "T5Config",
        _seq2seq,
        ("q", "v"),
        vocab_size=96,
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "BART": _transformers(
        "BartForConditionalGeneration",
        "BartConfig",
        _seq2seq,
        _QV,
        vocab_size=96,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=1,
        forced_eos_token_id=1,
    ),
    "ViT": _transformers(
        "ViTForImageClassification",
        "ViTConfig",
        lambda: {"pixel_values": _normal(2, 3, 32, 32), "labels": torch.tensor([0, 1])},
        ("query", "value", "q_proj", "v_proj"),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=0.1,
    ),
    "Swin": _transformers(
        "SwinForImageClassification",
        "SwinConfig",
        lambda: {"pixel_values": _normal(2, 3, 32, 32), "labels": torch.tensor([0, 1])},
        ("query", "value", "q_proj", "v_proj"),
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "CLIP": _transformers(
        "CLIPModel",
        "CLIPConfig",
        lambda: {"input_ids": _ids(2, 8), "pixel_values": _normal(2, 3, 32, 32), "return_loss": True},
        _QV,
        text_config={**_ENCODER, "bos_token_id": 0, "eos_token_id": 1},
        vision_config={**_ENCODER, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    ),
    "Whisper": _transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        lambda: {"input_features": _normal(2, 8, 32), "labels": _ids(2, 10), "use_cache": False},
        _QV,
        vocab_size=96,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    ),
    "diffusion U-Net": Model(
        _UNet,
        lambda: {"sample": _normal(2, 3, 16, 16), "timestep": torch.tensor([3, 700])},
        ("conv1", "conv2", "time"),
    ),
}


def lora(model: nn.Module, adapters: tuple[str, ...], kind: str = "lora") -> nn.Module:
    """The model frozen, with trainable adapters of peft."""
    import peft

    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    targets = [name for name in adapters if name in present]
    configs = {
        "lora": lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.1),
        "dora": lambda: peft.LoraConfig(r=4, target_modules=targets, use_dora=True),
        "ia3": lambda: peft.IA3Config(target_modules=targets, feedforward_modules=[]),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        adapted: nn.Module = peft.get_peft_model(model, configs[kind]())
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(5))
    return adapted


def _detection(name: str) -> Model:
    def build() -> nn.Module:
        builder = torchvision.models.get_model_builder(name)
        kwargs: dict[str, Any] = {"num_classes": 5}
        if name.startswith("ssd300"):
            kwargs["trainable_backbone_layers"] = 5
        else:
            kwargs |= {"min_size": 64, "max_size": 64} if not name.startswith("ssd") else {}
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return builder(weights=None, weights_backbone=None, **kwargs)

    def inputs() -> dict[str, Any]:
        targets = [
            {
                "boxes": torch.tensor([[5.0, 5.0, 40.0, 48.0], [10.0, 20.0, 30.0, 60.0]]),
                "labels": torch.tensor([1, 1]),
                "masks": torch.ones(2, 64, 64, dtype=torch.uint8),
                "keypoints": torch.tensor([[[20.0, 30.0, 1.0]] * 17] * 2),
            }
            for _ in range(2)
        ]
        return {"images": [_normal(3, 64, 64).sigmoid() for _ in range(2)], "targets": targets}

    return Model(build, inputs)


def _flow(name: str) -> Model:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return torchvision.models.get_model_builder(name)(weights=None)

    return Model(build, lambda: {"image1": _normal(1, 3, 128, 128), "image2": _normal(1, 3, 128, 128).flip(-1)})


DETECTION: dict[str, Model] = {name: _detection(name) for name in torchvision.models.list_models(torchvision.models.detection)}
FLOW: dict[str, Model] = {name: _flow(name) for name in torchvision.models.list_models(torchvision.models.optical_flow)}


def torchvision_model(name: str) -> Model:
    """A model of torchvision's other kinds, for one image or video."""
    return Model(lambda: zoo.build(name), lambda: {"x": zoo.inputs(name)[0]})
