"""What ``fxmem report TARGET`` reports on: a model and its inputs by name."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fxmem.builtin import frozen_network
from fxmem.errors import ArgumentError, FxmemError

FORMS = (
    "torchvision:NAME, timm:NAME, transformers:path/to/config.json, transformers:CLASS:key=value,..., "
    "package.module:callable or path/file.py:callable"
)


@dataclass
class Target:
    """A model and what to call it with.

    Args:
        model: the model; on ``meta`` where nothing is to run for real.
        args: positional inputs.
        kwargs: keyword inputs.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None


def load(target: str | None, shapes: list[tuple[int, ...]], *, real: bool, lora: str | None = None) -> Target:
    """The target.

    Args:
        target: its name; None for the built-in network.
        shapes: shapes of the inputs, where given.
        real: whether it will run for real; else models that are built from a name are built on ``meta``.
        lora: options of a LoRA adapter to put around it, such as ``r=8,targets=q_proj``.

    Raises:
        ArgumentError: there is no such target, or it needs a package that is not installed.
    """
    if target is None:
        model, args = frozen_network()
        found = Target(model, args)
    else:
        kind, _, rest = target.partition(":")
        if not kind or not rest:
            raise ArgumentError(f"{target!r} names no model.", where="TARGET", remedy=f"Use {FORMS}.")
        named = {"torchvision": _torchvision, "timm": _timm, "transformers": _transformers}.get(kind)
        found = _built(named, rest, shapes, real) if named else _called(target)
    if lora is not None:
        with next((p.device for p in found.model.parameters()), torch.device("cpu")), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of one library about the other
            found.model = _with_lora(found.model, lora)
    if shapes and found.kwargs is None:
        found.args = tuple(_input(shape, real) for shape in shapes)
    if not found.args and not found.kwargs:
        raise ArgumentError("the input's shape is not known.", where="--input", remedy="Give it, such as --input 8x3x224x224.")
    return found


def _input(shape: tuple[int, ...], real: bool) -> Tensor:
    try:
        return torch.randn(shape, device="cpu" if real else "meta")
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"a tensor of {'x'.join(map(str, shape))} cannot be made: {str(error).splitlines()[0]}.",
            where="--input",
            remedy="Give a smaller one.",
        ) from error


def pairs(text: str, where: str) -> dict[str, Any]:
    """``key=value,...`` as a dict; values are numbers, true, false, none, lists separated by +, or words.

    Args:
        text: the text.
        where: what it is an argument of, for the error.
    """
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ArgumentError(f"{part!r} is not of the form key=value.", where=where, remedy="Separate pairs by commas.")
        words = [_value(word) for word in value.split("+")]
        found[key] = words if len(words) > 1 else words[0]
    return found


def _value(word: str) -> Any:
    constants = {"true": True, "false": False, "none": None}
    if word.lower() in constants:
        return constants[word.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(word)
    return word


def _built(
    build: Callable[[str, list[tuple[int, ...]]], Target], name: str, shapes: list[tuple[int, ...]], real: bool
) -> Target:
    if not real:
        try:
            with torch.device("meta"):
                return build(name, shapes)
        except (RuntimeError, NotImplementedError):
            pass  # its constructor computes with the numbers of tensors; an error of its own comes again below
    return build(name, shapes)


def _package(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ArgumentError(f"{name} cannot be imported: {error}.", where=where, remedy=f"pip install {name}.") from error


def _named(names: list[str], name: str, where: str) -> None:
    if name not in names:
        near = ", ".join(get_close_matches(name.lower(), names)) or "one of those in its documentation"
        raise ArgumentError(f"it has no model {name}.", where=where, remedy=f"Did you mean {near}?")


def _torchvision(name: str, shapes: list[tuple[int, ...]]) -> Target:
    models = _package("torchvision", f"torchvision:{name}").models
    _named(models.list_models(), name, "torchvision")
    options: dict[str, Any] = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None
    size = 299 if name == "inception_v3" else 224
    video = models.get_model_builder(name).__module__.startswith("torchvision.models.video")
    shape = (1, 3, 16, size, size) if video else (8, 3, size, size)
    return Target(models.get_model(name, weights=None, **options), (torch.randn(shapes[0] if shapes else shape),))


def _timm(name: str, shapes: list[tuple[int, ...]]) -> Target:
    timm = _package("timm", f"timm:{name}")
    _named(timm.list_models(), name, "timm")
    model = timm.create_model(name, pretrained=False)
    return Target(model, (torch.randn(shapes[0] if shapes else (8, *model.default_cfg["input_size"])),))


def _transformers(name: str, shapes: list[tuple[int, ...]]) -> Target:
    where = f"transformers:{name}"
    transformers = _package("transformers", where)
    if name.endswith(".json"):
        path = Path(name)
        if not path.is_file():
            raise ArgumentError("there is no such file.", where=where, remedy="Pass the path of a config.json.")
        options = json.loads(path.read_text())
        kind = (options.get("architectures") or ["AutoModel"])[0]
    else:
        kind, _, rest = name.partition(":")
        options = pairs(rest, where)
    cls: Any = getattr(transformers, kind, None)
    configured = getattr(cls, "config_class", None)
    if configured is None:
        classes = [n for n in dir(transformers) if n.endswith(("Model", "LM", "LMHeadModel", "Classification", "Generation"))]
        near = ", ".join(get_close_matches(kind, classes)) or "LlamaForCausalLM"
        raise ArgumentError(f"transformers has no model {kind}.", where=where, remedy=f"Did you mean {near}?")
    known = inspect.signature(configured.__init__).parameters
    for key in () if name.endswith(".json") else options:
        # Configurations take any key in silence; one that is nearly a key of theirs is a slip.
        alike = get_close_matches(key, known, cutoff=0.8)
        if alike and key not in known and not hasattr(configured(), key):
            raise ArgumentError(f"{configured.__name__} has no {key}.", where=where, remedy=f"Did you mean {', '.join(alike)}?")
    config = configured.from_dict(options)
    config.use_cache = False  # a cache is of no use in training, and would be kept
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # labels are shifted by it
    model = cls(config)
    return Target(model, (), _inputs(model, config, shapes))


def _inputs(model: Any, config: Any, shapes: list[tuple[int, ...]]) -> dict[str, Tensor]:
    """What a transformers model is trained with: its main input, and the labels where they have its shape."""
    name = str(model.main_input_name)
    if name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {name: torch.randn(shapes[0] if shapes else (8, getattr(config, "num_channels", 3), height, width))}
    if name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 1500)
        shape = shapes[0] if shapes else (1, getattr(config, "num_mel_bins", 80), frames)
        tokens = torch.zeros((shape[0], 64), dtype=torch.long)
        return {name: torch.randn(shape), "labels": tokens}
    shape = shapes[0] if shapes else (1, min(1024, getattr(config, "max_position_embeddings", 1024) or 1024))
    ids = torch.zeros(shape, dtype=torch.long)
    parameters = inspect.signature(model.forward).parameters
    if "pixel_values" in parameters and (vision := getattr(config, "vision_config", None)) is not None:
        images = torch.randn(shape[0], getattr(vision, "num_channels", 3), vision.image_size, vision.image_size)
        return {name: ids[:, : min(shape[1], 64)], "pixel_values": images}
    per_token = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM"))
    if "labels" in parameters and per_token:
        return {name: ids, "labels": ids}
    if "decoder_input_ids" in parameters:
        return {name: ids, "decoder_input_ids": ids}
    return {name: ids}


def _with_lora(model: nn.Module, text: str) -> nn.Module:
    peft = _package("peft", "--lora")
    options = pairs(text, "--lora")
    targets = options.pop("targets", None)
    options["target_modules"] = [targets] if isinstance(targets, str) else targets
    if "alpha" in options:
        options["lora_alpha"] = options.pop("alpha")
    if "dropout" in options:
        options["lora_dropout"] = options.pop("dropout")
    try:
        adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**options))
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"peft refuses it: {' '.join(str(error).split())}", where="--lora", remedy="Write it as r=8,targets=q_proj+v_proj."
        ) from error
    return adapted


def _called(target: str) -> Target:
    place, _, name = target.rpartition(":")
    try:
        found = _callable(place, name)
        built = found if isinstance(found, nn.Module) else found()
    except FxmemError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"it raised {type(error).__name__}: {' '.join(str(error).split())}.",
            where=target,
            remedy="It is called without arguments, and returns a model, or a model and its inputs.",
        ) from error
    if isinstance(built, tuple):
        model, *rest = built
        inputs = tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], tuple | list) else tuple(rest)
    else:
        model, inputs = built, ()
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"it returned {type(model).__name__}, not a module.",
            where=target,
            remedy="Return a model, or a model and its inputs.",
        )
    if len(inputs) == 1 and isinstance(inputs[0], dict):
        return Target(model, (), inputs[0])
    return Target(model, inputs)


def _callable(place: str, name: str) -> Callable[[], Any]:
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            if "" not in sys.path:
                sys.path.insert(0, "")
            module = importlib.import_module(place)
    except Exception as error:
        text = " ".join(str(error).split())
        raise ArgumentError(
            f"it cannot be imported: {type(error).__name__}: {text}.",
            where=place,
            remedy=f"Check the path and its imports. TARGET is {FORMS}.",
        ) from error
    found: Any = getattr(module, name, None)
    if not callable(found):
        if found is not None:
            what = f"{name} is of type {type(found).__name__} and cannot be called."
            raise ArgumentError(what, where=place, remedy="Name a function that returns a model, or a model.")
        near = ", ".join(get_close_matches(name, dir(module))) or "another one"
        raise ArgumentError(f"there is no callable {name}.", where=place, remedy=f"Did you mean {near}?")
    made: Callable[[], Any] = found
    return made
