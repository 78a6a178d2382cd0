"""The models and cases of the benchmark."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NORMS = (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class Subject:
    """One model of the benchmark.

    Args:
        build: makes it with random weights.
        inputs: makes its inputs: positional ones, or keyword ones as a dict.
        first: a regular expression for the parameters of its first quarter.
        last: the same for the last.
        block: the class of the blocks that are checkpointed one by one.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...] | dict[str, Tensor]]
    first: str
    last: str
    block: str


def _vision(name: str, batch: int, size: int, first: str, last: str, block: str, **kwargs: Any) -> Subject:
    def build() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torchvision.models.get_model(name, weights=None, **kwargs)

    return Subject(build, lambda: (torch.randn(batch, 3, size, size),), first, last, block)


VOCABULARY, BATCH, LENGTH, WIDTH = 5000, 4, 256, 384


def _tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=6,
        n_embd=WIDTH,
        n_head=6,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=6,
        hidden_size=WIDTH,
        intermediate_size=1024,
        num_attention_heads=6,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=6,
        d_model=WIDTH,
        d_ff=1536,
        d_kv=64,
        num_heads=6,
        vocab_size=VOCABULARY,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


TARGETS = {"gpt2_like": ["c_attn"], "llama_like": ["q_proj", "v_proj"], "t5_like": ["q", "v"]}

SUBJECTS: dict[str, Subject] = {
    "resnet50": _vision("resnet50", 8, 224, r"(conv1|layer1)\b", r"(layer4|fc)\b", "Bottleneck"),
    "efficientnet_v2_s": _vision("efficientnet_v2_s", 4, 224, r"features\.[0-3]\b", r"(features\.[67]|classifier)\b", "MBConv"),
    "mobilenet_v3_large": _vision(
        "mobilenet_v3_large", 8, 224, r"features\.[0-6]\.", r"(features\.1[3-6]|classifier)\b", "InvertedResidual"
    ),
    "convnext_tiny": _vision("convnext_tiny", 4, 224, r"features\.[01]\b", r"(features\.7|classifier)\b", "CNBlock"),
    "deeplabv3_resnet50": _vision(
        "deeplabv3_resnet50",
        2,
        256,
        r"backbone\.(conv1|bn1|layer1)\b",
        r"classifier\b",
        "Bottleneck",
        weights_backbone=None,
    ),
    "vit_b_16": _vision("vit_b_16", 4, 224, r"(conv_proj|.*encoder_layer_0)\b", r"(.*layer_(9|10|11)|heads)\b", "EncoderBlock"),
    "gpt2_like": Subject(_gpt2, _tokens, r"transformer\.(wte|wpe|h\.0)\b", r"transformer\.(h\.5|ln_f)\b", "GPT2Block"),
    "llama_like": Subject(
        _llama, _tokens, r"model\.(embed_tokens|layers\.0)\b", r"model\.(layers\.5|norm)\b", "LlamaDecoderLayer"
    ),
    "t5_like": Subject(_t5, _tokens, r"encoder\.block\.0\b", r"decoder\.block\.5\b", "T5Block"),
}

# (model, case, train or eval mode): the limits set beforehand for what is kept, in MiB. They count tensor by tensor what the
# derivatives read; None where no such account was made.
ROWS: dict[tuple[str, str, str], float | None] = {
    ("resnet50", "input", "eval"): 10.7,
    ("resnet50", "input", "train"): 350,
    ("resnet50", "norm", "eval"): 350,
    ("resnet50", "norm", "train"): 350,
    ("resnet50", "first", "eval"): 235,
    ("resnet50", "first", "train"): 439,
    ("resnet50", "last", "eval"): 39,
    ("resnet50", "last", "train"): 39,
    ("resnet50", "all", "eval"): 614,
    ("resnet50", "all", "train"): 614,
    ("efficientnet_v2_s", "input", "eval"): 215,
    ("efficientnet_v2_s", "input", "train"): 401,
    ("efficientnet_v2_s", "norm", "eval"): 400,
    ("efficientnet_v2_s", "all", "train"): 586,
    ("mobilenet_v3_large", "input", "eval"): 67,
    ("mobilenet_v3_large", "input", "train"): 201,
    ("mobilenet_v3_large", "norm", "eval"): 201,
    ("mobilenet_v3_large", "all", "train"): 332,
    ("convnext_tiny", "input", "eval"): 177,
    ("convnext_tiny", "norm", "eval"): 177,
    ("convnext_tiny", "first", "eval"): 273,
    ("convnext_tiny", "all", "train"): 414,
    ("deeplabv3_resnet50", "input", "eval"): 18,
    ("deeplabv3_resnet50", "input", "train"): 281,
    ("deeplabv3_resnet50", "norm", "eval"): 281,
    ("deeplabv3_resnet50", "all", "train"): 498,
    ("vit_b_16", "input", "eval"): 280,
    ("vit_b_16", "norm", "eval"): 280,
    ("vit_b_16", "first", "eval"): 294,
    ("vit_b_16", "all", "train"): 448,
    ("gpt2_like", "lora", "train"): 292,
    ("gpt2_like", "all", "train"): 348,
    ("llama_like", "lora", "train"): 155,
    ("llama_like", "all", "train"): 210,
    ("t5_like", "lora", "train"): None,
    ("t5_like", "all", "train"): None,
}


def make(name: str, case: str, mode: str) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    """A model with what trains set for the case, and its inputs."""
    subject = SUBJECTS[name]
    torch.manual_seed(0)
    model, given = subject.build(), subject.inputs()
    if case == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=TARGETS[name], fan_in_fan_out=name == "gpt2_like"))
    else:
        _choose(model, case, subject)
    model.train(mode == "train")
    args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
    if case == "input":
        for t in args:
            t.requires_grad_()
    return model, args, kwargs


def _choose(model: nn.Module, case: str, subject: Subject) -> None:
    model.requires_grad_(case == "all")
    if case == "norm":
        for module in model.modules():
            if isinstance(module, NORMS):
                module.requires_grad_()
    if case in ("first", "last"):
        pattern = re.compile(subject.first if case == "first" else subject.last)
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(pattern.match(parameter_name) is not None)


class Checkpointed(nn.Module):
    """A block under torch's own checkpoint."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def checkpointed(name: str, model: nn.Module) -> nn.Module:
    """``model`` with every block checkpointed, in place."""
    wanted = {SUBJECTS[name].block, "FusedMBConv"} if name == "efficientnet_v2_s" else {SUBJECTS[name].block}
    for module in list(model.modules()):
        for child_name, child in list(module._modules.items()):
            if child is not None and type(child).__name__ in wanted:
                module._modules[child_name] = Checkpointed(child)
    return model
