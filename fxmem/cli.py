"""The command line: ``fxmem report``."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import fxmem
from fxmem.api import in_bytes
from fxmem.errors import ArgumentError, FxmemError
from fxmem.records import Footprint, MemoryReport
from fxmem.render import as_compilations, as_diff, as_html, as_markdown, as_text, human
from fxmem.targets import FORMS, load

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments; those of the process by default.

    Returns:
        Exit status: 0; 1 where ``--fits`` finds that it does not; 2 after an error, which is printed on one line.
    """
    options = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            # Data goes to stdout and errors are one line; what libraries warn of as they load is neither.
            warnings.simplefilter("ignore")
            logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
            return _report(options)
    except FxmemError as error:
        print(f"fxmem: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader went away (head, less); the interpreter must not complain about it while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"fxmem: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fxmem: interrupted", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all others of the command are."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"fxmem: error: {message} ({self.prog} --help says what there is)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fxmem", description=fxmem.__doc__)
    parser.add_argument("--version", action="version", version=f"fxmem {fxmem.__version__} (torch {torch.__version__})")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    report = commands.add_parser(
        "report",
        help="what a model keeps for backward, what it need not, and whether it fits",
        description="What a model keeps for backward, what it need not, and whether it fits. Nothing runs for real unless "
        "--measure is given, so neither memory nor the device is needed.",
    )
    report.set_defaults(patterns=[])
    report.add_argument(
        "target", nargs="?", metavar="TARGET", help=f"{FORMS}; a callable returns a model, or a model and its inputs"
    )
    model = report.add_argument_group("the model and what trains")
    model.add_argument("--input", action="append", metavar="8x3x224x224", help="shape of an input, once per input")
    model.add_argument("--train", action=_Pattern, metavar="PATTERN", help="parameters that train (glob, repeatable)")
    model.add_argument("--freeze", action=_Pattern, metavar="PATTERN", help="parameters that do not; the last match wins")
    model.add_argument("--lora", metavar="r=8,targets=q_proj+v_proj", help="freeze it and put LoRA adapters around it, by peft")
    model.add_argument("--input-grad", action="store_true", help="differentiate with respect to the inputs")
    model.add_argument("--mode", choices=("train", "eval"), help="train or eval mode; as built by default")
    where = report.add_argument_group("how it runs")
    where.add_argument("--device", metavar="cuda", help="device to report for, whether it is there or not")
    where.add_argument("--dtype", choices=_DTYPES, help="dtype of parameters, buffers and inputs")
    where.add_argument("--autocast", choices=_DTYPES, help="dtype of autocast")
    where.add_argument("--optimizer", default="AdamW", metavar="NAME", help="Adapprox or one of torch.optim; AdamW by default")
    where.add_argument("--measure", action="store_true", help="run it for real as well and print what the allocator counted")
    where.add_argument(
        "--compile", action="store_true", help="print what eager, Inductor and fxmem's backend keep instead, in real runs"
    )
    what = report.add_argument_group("what is printed")
    what.add_argument("--by", choices=("op", "module", "node"), default="op", help="one line for each of these")
    what.add_argument("--depth", type=_positive, metavar="N", help="with --by module: components of the path to go by")
    what.add_argument("--top", type=_positive, metavar="N", help="only the N lines that keep the most")
    what.add_argument(
        "--freezing", type=_count, default=3, metavar="N", help="parameters and families to try freezing; 3 by default"
    )
    what.add_argument("--format", choices=("table", "json", "markdown", "html"), default="table")
    what.add_argument("--fits", metavar="24GiB", help="whether a training step fits: exit status 0 or 1, and what dominates")
    what.add_argument("--diff", metavar="OLD.json", help="what grew and what went since a report that --format json wrote")
    what.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser


class _Pattern(argparse.Action):
    """Collects --train and --freeze in the order given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.patterns = [*namespace.patterns, (self.dest == "train", values)]


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _report(options: argparse.Namespace) -> int:
    if options.diff is not None and options.format != "table":
        raise ArgumentError("a difference is printed as a table alone.", where="--diff", remedy="Leave --format out.")
    if options.compile:
        return _compiled(options)
    limit = None if options.fits is None else in_bytes(options.fits, "--fits")
    old = None if options.diff is None else _old(options.diff)
    progress = _progress(options.quiet)
    # What the user's code prints is no part of the report.
    with contextlib.redirect_stdout(sys.stderr):
        report = _built(options, progress)
    progress("")
    shown: dict[str, Any] = {"by": options.by, "top": options.top, "depth": options.depth}
    if old is not None:
        print(as_diff(old, report, top=options.top))
    elif options.format == "json":
        print(report.to_json())
    elif options.format == "html":
        print(as_html(report))
    else:
        print((as_markdown if options.format == "markdown" else as_text)(report, **shown))
    if limit is None:
        return 0
    fits, verdict = _verdict(report, limit)
    print(verdict, file=sys.stdout if options.format == "table" else sys.stderr)
    return 0 if fits else 1


def _built(options: argparse.Namespace, progress: Callable[[str], None]) -> MemoryReport:
    model, inputs, device, dtype = _subject(options, progress, real=options.measure)
    return fxmem.report(
        model,
        *inputs,
        measured=options.measure,
        device=device,
        dtype=dtype,
        autocast=_DTYPES.get(options.autocast),
        optimizer=options.optimizer,
        freezing=options.freezing,
        progress=progress,
    )


def _subject(
    options: argparse.Namespace, progress: Callable[[str], None], *, real: bool
) -> tuple[nn.Module, Any, str | None, torch.dtype | None]:
    """The model, its inputs, and the device and dtype to report for, if it is not there already."""
    progress(f"building {options.target or 'a residual network'}")
    target = load(options.target, [_shape(text) for text in options.input or ()], real=real, lora=options.lora)
    model, inputs = target.model, (target.args, target.kwargs or {})
    if options.mode:
        model.train(options.mode == "train")
    for train, pattern in options.patterns:
        _set_requires_grad(model, pattern, train)
    device, dtype = options.device, _DTYPES.get(options.dtype)
    if real and (device or dtype):
        model = _moved(model, device, dtype)
        inputs = tree_map_only(Tensor, lambda t: t.to(device, dtype if t.is_floating_point() else None), inputs)
        device = dtype = None
    if options.input_grad:
        inputs = tree_map_only(Tensor, lambda t: t.detach().requires_grad_() if t.is_floating_point() else t, inputs)
    return model, inputs, device, dtype


def _compiled(options: argparse.Namespace) -> int:
    for name in ("fits", "diff", "measure"):
        if getattr(options, name):
            raise ArgumentError("it does not go with --compile.", where=f"--{name}", remedy="Leave one of the two out.")
    if options.format == "html":
        raise ArgumentError("with --compile there is no HTML.", where="--format", remedy="Choose table, markdown or json.")
    # Inductor takes seconds to load, and no other report needs it.
    from fxmem.compiled import compare

    progress = _progress(options.quiet)
    with contextlib.redirect_stdout(sys.stderr):
        model, (args, kwargs), _, _ = _subject(options, progress, real=True)
        dtype, device = _DTYPES.get(options.autocast), torch.device(options.device or "cpu").type
        with torch.autocast(device, dtype) if dtype else contextlib.nullcontext():
            rows = compare(model, args, kwargs, progress=progress)
    progress("")
    if options.format == "json":
        print(json.dumps({"unit": "bytes", "torch": torch.__version__, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print(as_compilations(rows, markdown=options.format == "markdown"))
    return 0


def _verdict(report: MemoryReport, limit: int) -> tuple[bool, str]:
    """Whether a training step fits, and the sentences that say so."""
    lines = []
    fits = False
    for name, footprint in (("eager", report.eager), ("fxmem", report.fxmem)):
        if footprint is None:
            continue
        total = report.total(footprint)
        if total is None:
            lines.append(f"{name}: the peak is not known; {'; '.join(report.notes)}")
            continue
        largest = sorted(_parts(report, footprint).items(), key=lambda part: -part[1])[:2]
        words = " and ".join(f"{what} ({human(nbytes)})" for what, nbytes in largest)
        room = limit - total
        left = f"{human(room)} to spare" if room >= 0 else f"{human(-room)} too much"
        lines.append(f"{name}: {human(total)} of {human(limit)}, {left}; most of it is {words}")
        fits = fits or room >= 0
    return fits, "\n".join((f"fits: {'yes' if fits else 'no'}", *lines))


def _parts(report: MemoryReport, footprint: Footprint) -> dict[str, int]:
    return {
        "parameters": report.parameter_bytes,
        "optimizer state": report.optimizer.nbytes if report.optimizer else 0,
        "activations kept for backward": footprint.kept,
        "outputs": footprint.outputs,
        "gradients and temporaries": footprint.temporaries,
        "inputs and buffers": report.input_bytes + report.buffer_bytes,
    }


def _progress(quiet: bool) -> Callable[[str], None]:
    """Prints lines to stderr; to a terminal each in the place of the last."""
    if quiet:
        return lambda line: None
    if sys.stderr.isatty():
        return lambda line: print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    return lambda line: print(f"fxmem: {line}", file=sys.stderr) if line else None


def _old(path: str) -> MemoryReport:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"it cannot be read: {error}.", where=path, remedy="Pass what --format json wrote.") from error
    return MemoryReport.from_json(text)


def _moved(model: nn.Module, device: str | None, dtype: torch.dtype | None) -> nn.Module:
    try:
        return model.to(device=device, dtype=dtype)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"the model cannot be moved there: {str(error).splitlines()[0]}", where="--measure", remedy="Leave --measure out."
        ) from error


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
