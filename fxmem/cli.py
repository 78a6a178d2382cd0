"""The command line: ``fxmem report``."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxmem
from fxmem.builtin import frozen_network
from fxmem.errors import ArgumentError, FxmemError
from fxmem.render import as_json, as_text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments; those of the process by default.

    Returns:
        Exit status: 0, or 2 after an error, which is printed on one line.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        print(_report(options))
    except FxmemError as error:
        print(f"fxmem: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader went away (head, less); the interpreter must not complain about it while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fxmem", description=fxmem.__doc__)
    parser.add_argument("--version", action="version", version=f"fxmem {fxmem.__version__} (torch {torch.__version__})")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    report = commands.add_parser("report", help="what a model keeps for backward, and what it need not")
    report.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="torchvision:NAME, package.module:callable or path/file.py:callable, which returns a model or a model and its "
        "inputs; a frozen residual network if left out",
    )
    report.add_argument("--input", action="append", metavar="8x3x224x224", help="shape of an input, once per input")
    report.add_argument("--train", action=_Pattern, metavar="PATTERN", help="parameters that train (glob, repeatable)")
    report.add_argument("--freeze", action=_Pattern, metavar="PATTERN", help="parameters that do not; the last match wins")
    report.add_argument("--input-grad", action="store_true", help="differentiate with respect to the inputs")
    report.add_argument("--mode", choices=("train", "eval"), help="train or eval mode; as built by default")
    report.add_argument("--measure", action="store_true", help="run it for real as well and print what the allocator counted")
    report.add_argument("--by", choices=("op", "module", "node"), default="op", help="one line for each of these")
    report.add_argument("--top", type=int, metavar="N", help="only the N lines that keep the most")
    report.add_argument("--format", choices=("table", "json"), default="table")
    return parser


class _Pattern(argparse.Action):
    """Collects --train and --freeze in the order given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.patterns = [*getattr(namespace, "patterns", []), (self.dest == "train", values)]


def _report(options: argparse.Namespace) -> str:
    model, inputs = _load(options.target)
    if options.input:
        inputs = tuple(torch.randn(_shape(text)) for text in options.input)
    if not inputs:
        raise ArgumentError("the input's shape is not known.", where="--input", remedy="Give it, such as --input 8x3x224x224.")
    if options.mode:
        model.train(options.mode == "train")
    for train, pattern in getattr(options, "patterns", []):
        _set_requires_grad(model, pattern, train)
    if options.input_grad:
        inputs = tuple(t.detach().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs)
    report = fxmem.report(model, inputs, measured=options.measure)
    return as_json(report) if options.format == "json" else as_text(report, by=options.by, top=options.top)


def _load(target: str | None) -> tuple[nn.Module, tuple[Any, ...]]:
    if target is None:
        return frozen_network()
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ArgumentError(
            f"{target!r} names no model.",
            where="TARGET",
            remedy="Use torchvision:NAME, package.module:callable or file.py:callable.",
        )
    if place == "torchvision":
        return _torchvision(name), (torch.randn(8, 3, 224, 224),)
    built = _callable(place, name)()
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
    return model, inputs


def _torchvision(name: str) -> nn.Module:
    try:
        import torchvision
    except ImportError as error:
        raise ArgumentError(
            "torchvision is not installed.", where=f"torchvision:{name}", remedy="pip install torchvision."
        ) from error
    names = torchvision.models.list_models()
    if name not in names:
        near = ", ".join(get_close_matches(name, names)) or "one that torchvision.models.list_models() shows"
        raise ArgumentError("torchvision has no such model.", where=f"torchvision:{name}", remedy=f"Did you mean {near}?")
    model: nn.Module = torchvision.models.get_model(name, weights=None)
    return model


def _callable(place: str, name: str) -> Any:
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
    except (ImportError, OSError) as error:
        raise ArgumentError(
            f"it cannot be imported: {error}.", where=place, remedy="Check the path and its imports."
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        near = ", ".join(get_close_matches(name, dir(module))) or "a callable that is there"
        raise ArgumentError(f"there is no callable {name}.", where=place, remedy=f"Did you mean {near}?")
    return found


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in text.lower().split("x"))
    except ValueError:
        raise ArgumentError(f"{text!r} is no shape.", where="--input", remedy="Write it as 8x3x224x224.") from None


def _set_requires_grad(model: nn.Module, pattern: str, train: bool) -> None:
    names = dict(model.named_parameters())
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        near = ", ".join(get_close_matches(pattern, names, cutoff=0.4)) or next(iter(names), "nothing: there are no parameters")
        option = "--train" if train else "--freeze"
        raise ArgumentError(f"{pattern!r} matches no parameter.", where=option, remedy=f"Near it: {near}.")
    for name in found:
        names[name].requires_grad_(train)


if __name__ == "__main__":
    sys.exit(main())
