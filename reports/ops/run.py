"""The map: what torch's own ops keep for backward, and what of it backward reads.

    python reports/ops/run.py [--only NAME ...]

Every differentiable op of torch's databases ``op_db`` and ``module_db`` runs on CPU in float32, on its first sample that is not
tiny, for every choice of which floating-point operands require grad (up to three operands; with more, each alone, the
operands without the parameters, and all). What goes through the saved-tensor hooks is kept; each storage counts once.

What is needed is found by poisoning: backward runs again with other values in the place of one kept storage, NaN and then
finite ones, and if no requested gradient changes by a bit, the storage is not needed. Storages that are not needed one by
one are then poisoned together; if a gradient changes, what they hold is there twice, and the smallest counts as needed.
A needed storage of which a small relative change of every element changes no gradient is a *mask*: its derivative is piecewise
constant in it, and a few bits per element would do.

Limits: needed is an upper bound for these samples; a value that backward can rebuild from others counts as needed; what is
kept past the hooks (by Python objects, or by ops that hide it) is not seen; integers are reflected within their range, so that
no index leaves it, and constant integers are taken to be needed.

Writes results.json and the tables in README.md. Each op runs in a process of its own, so that one that crashes is reported
and stops nothing.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from fxmem.ops import RULES

HERE = Path(__file__).parent
TINY = 24  # elements of the largest operand
SAMPLES = 40  # looked at in search of one that is not tiny
SECONDS = 8.0  # per op; the choices of operands that are left then are reported as left out
LIMIT = 40.0  # after which the process is ended
MARK = "<!-- made by run.py -->"


@dataclass
class Call:
    """One sample: a function of its floating-point operands.

    Args:
        operands: by name, leaves that do not require grad.
        function: takes new leaves in that order.
        parameters: how many of the operands, counted from the end, are a module's parameters.
    """

    operands: dict[str, Tensor]
    function: Callable[[Sequence[Tensor]], Any]
    parameters: int = 0


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and (value.is_floating_point() or value.is_complex())


def _spread(values: list[Any], names: list[str], call: Callable[[list[Any]], Any], parameters: dict[str, Tensor]) -> Call:
    where = [i for i, value in enumerate(values) if _is_float(value)]

    def function(leaves: Sequence[Tensor]) -> Any:
        filled = list(values)
        for i, leaf in zip(where, leaves, strict=False):
            filled[i] = leaf
        return call([*filled, *leaves[len(where) :]])

    operands = {names[i]: values[i].detach() for i in where}
    return Call({**operands, **{name: p.detach() for name, p in parameters.items()}}, function, len(parameters))


def _names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    named: list[str] = []
    for i, value in enumerate(args):
        n = len(tree_flatten(value)[0])
        base = "input" if i == 0 else f"arg{i}"
        named += [base] if n == 1 else [f"{base}[{j}]" for j in range(n)]
    for key, value in kwargs.items():
        n = len(tree_flatten(value)[0])
        named += [key] if n == 1 else [f"{key}[{j}]" for j in range(n)]
    return named


def op_calls(info: Any, inplace: bool) -> Iterator[Call]:
    """The samples of one entry of op_db, or of its in-place variant."""
    op = info.inplace_variant if inplace else info.op
    for sample in itertools.islice(info.sample_inputs("cpu", torch.float32, requires_grad=False), SAMPLES):
        if inplace and sample.broadcasts_input:
            continue
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        values, spec = tree_flatten((args, kwargs))

        def call(filled: list[Any], spec: Any = spec, post: Any = sample.output_process_fn_grad) -> Any:
            args, kwargs = tree_unflatten(filled, spec)
            if inplace:
                # Autograd refuses to change a leaf. The clone keeps nothing.
                args = (args[0].clone(), *args[1:])
            return post(op(*args, **kwargs))

        yield _spread(values, _names(args, kwargs), call, {})


def module_calls(info: Any, training: bool) -> Iterator[Call]:
    """The samples of one entry of module_db."""
    inputs = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=False, training=training)
    for sample in itertools.islice(inputs, SAMPLES):
        if sample.forward_input is None:
            continue
        made = sample.constructor_input
        module: nn.Module = info.module_cls(*made.args, **made.kwargs).train(training)
        args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
        values, spec = tree_flatten((args, kwargs))
        parameters = dict(module.named_parameters())

        def call(filled: list[Any], m: Any = module, spec: Any = spec, names: Any = tuple(parameters)) -> Any:
            n = len(filled) - len(names)
            args, kwargs = tree_unflatten(filled[:n], spec)
            buffers = {name: b.clone() for name, b in m.named_buffers()}
            return torch.func.functional_call(m, {**dict(zip(names, filled[n:], strict=True)), **buffers}, args, kwargs)

        yield _spread(values, _names(args, kwargs), call, parameters)


def pick(calls: Iterator[Call]) -> Call | None:
    """The first call that is not tiny, else the largest."""
    best, most = None, -1
    for call in calls:
        largest = max((t.numel() for t in call.operands.values()), default=-1)
        if largest >= TINY:
            return call
        if largest > most:
            best, most = call, largest
    return best


def masks(call: Call) -> list[tuple[bool, ...]]:
    """Which operands require grad: every choice of up to three, else the telling ones."""
    n = len(call.operands)
    if n <= 3:
        return [mask for mask in itertools.product((True, False), repeat=n) if any(mask)]
    inputs = n - call.parameters
    chosen = [tuple(i == j for i in range(n)) for j in range(min(n, 8))]
    chosen += [tuple(i < inputs for i in range(n)), (True,) * n]
    return [mask for mask in dict.fromkeys(chosen) if any(mask)]


class Unusable(Exception):
    """This sample says nothing; the message says why."""


@dataclass
class Run:
    """One forward and backward.

    Args:
        packed: what was saved, in order.
        gradients: of the operands that require grad.
        places: by storage address, what it is to the call.
    """

    packed: list[Tensor]
    gradients: tuple[Tensor | None, ...]
    places: dict[int, str]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _floats(output: Any) -> list[Tensor]:
    return [t for t in tree_flatten(output)[0] if _is_float(t) and t.requires_grad]


def run(call: Call, mask: Sequence[bool], swap: Callable[[int, Tensor], Tensor]) -> Run:
    """Runs the call, with ``swap`` in the place of each saved tensor, by its number."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.detach())
        return len(packed) - 1

    torch.manual_seed(0)
    leaves = [
        t.clone(memory_format=torch.preserve_format).requires_grad_(f)
        for t, f in zip(call.operands.values(), mask, strict=True)
    ]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: swap(i, packed[i])):
        output = call.function(leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    outputs = _floats(output)
    if not outputs:
        raise Unusable("no output requires grad")
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.empty_like(t).copy_(torch.randn(t.shape, generator=generator, dtype=t.dtype)) for t in outputs]
    places = {_address(t): "output" for t in tree_flatten(output)[0] if isinstance(t, Tensor) and t.layout == torch.strided}
    places |= {_address(t): name for name, t in zip(call.operands, leaves, strict=True)}
    gradients = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
    return Run(packed, gradients, places)


def same(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    """Whether two lists of gradients agree bit for bit, any NaN being a NaN."""
    for x, y in zip(a, b, strict=True):
        if x is None or y is None:
            if x is not y:
                return False
        elif x.shape != y.shape or not torch.allclose(x.to_dense(), y.to_dense(), rtol=0, atol=0, equal_nan=True):
            return False
    return True


def _filled(tensor: Tensor, values: Tensor) -> Tensor:
    """A tensor laid out as ``tensor`` with other values."""
    out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if 0 in tensor.stride():
        return values.clone()
    return out.copy_(values)


def poisons(tensor: Tensor) -> list[Tensor]:
    """Other values in the place of a saved tensor; none where no others are safe."""
    if tensor.numel() == 0:
        return []
    if tensor.dtype is torch.bool:
        return [_filled(tensor, ~tensor)]
    if tensor.is_floating_point() or tensor.is_complex():
        nan = torch.full_like(tensor, float("nan"))
        return [_filled(tensor, nan), _filled(tensor, 0.37 - 1.3 * tensor)]
    if bool((tensor == tensor.flatten()[0]).all()):
        return []
    return [_filled(tensor, tensor.max() - tensor + tensor.min())]


def examine(call: Call, mask: Sequence[bool]) -> dict[str, Any]:
    """Kept and needed for one choice of operands that require grad.

    Raises:
        Unusable: nothing can be said, and why.
    """
    base = run(call, mask, lambda _, t: t)
    if not same(base.gradients, run(call, mask, lambda _, t: t).gradients):
        raise Unusable("its gradients differ from run to run")
    groups: dict[int, list[int]] = {}
    for i, tensor in enumerate(base.packed):
        if tensor.layout != torch.strided:
            raise Unusable(f"it saves a tensor of layout {tensor.layout}")
        groups.setdefault(_address(tensor), []).append(i)

    def changes(numbers: set[int], which: int | None) -> bool:
        def swap(i: int, tensor: Tensor) -> Tensor:
            if i not in numbers:
                return tensor
            if which is None:
                if not tensor.is_floating_point():
                    return tensor
                wiggle = torch.linspace(1.0001, 1.0002, tensor.numel()).view(tensor.shape)
                return _filled(tensor, tensor * wiggle.to(tensor.dtype))
            others = poisons(tensor)
            return others[min(which, len(others) - 1)] if others else tensor

        try:
            return not same(base.gradients, run(call, mask, swap).gradients)
        except (RuntimeError, IndexError, ValueError):
            return True  # the poison was noticed

    rows, spare = [], []
    for address, numbers in groups.items():
        first = base.packed[numbers[0]]
        safe = any(poisons(base.packed[i]) for i in numbers)
        needed = not safe or changes(set(numbers), 0) or changes(set(numbers), 1)
        if first.untyped_storage().nbytes() == 0:
            continue
        use = "spare"
        if needed:
            moves = safe and first.is_floating_point() and bool((first != 0).any())
            use = "mask" if moves and not changes(set(numbers), None) else "needed"
        row = {"what": base.places.get(address, "own"), "bytes": first.untyped_storage().nbytes(), "use": use}
        rows.append(row)
        if not needed:
            spare.append((row, set(numbers)))
    spare.sort(key=lambda pair: pair[0]["bytes"])
    while len(spare) > 1 and changes(set().union(*(numbers for _, numbers in spare)), 0):
        row, _ = spare.pop(0)
        row["use"] = "needed"
    kept, spare_bytes = sum(r["bytes"] for r in rows), sum(r["bytes"] for r in rows if r["use"] == "spare")
    return {"kept": kept, "needed": kept - spare_bytes, "storages": [list(r.values()) for r in rows]}


def study(kind: str, index: int, variant: str) -> dict[str, Any]:
    """Everything about one op or module in one variant."""
    deadline = time.monotonic() + SECONDS
    if kind == "op":
        call = pick(op_calls(op_db[index], variant == "in place"))
    else:
        call = pick(module_calls(module_db[index], variant == "train"))
    if call is None:
        return {"failed": "it has no sample for this form"}
    if not call.operands:
        return {"failed": "no sample has a floating-point operand"}
    shapes = {name: list(t.shape) for name, t in call.operands.items()}
    rows, failures, skipped = [], [], 0
    for mask in masks(call):
        wanted = [name for name, flag in zip(shapes, mask, strict=True) if flag]
        if time.monotonic() > deadline:
            skipped += 1
            continue
        try:
            rows.append({"grad": wanted, **examine(call, mask)})
        except Unusable as error:
            failures.append(str(error))
        except Exception as error:
            failures.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:120])
    result: dict[str, Any] = {"operands": shapes, "masks": rows}
    if skipped:
        result["left out"] = skipped
    if failures:
        result["failures"] = sorted(set(failures))
    return result if rows else {"failed": "; ".join(sorted(set(failures))) or "it takes too long"}


def _child(pipe: Any, *task: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        pipe.send(study(*task))
    except Exception as error:
        pipe.send({"failed": "".join(traceback.format_exception_only(error)).strip().splitlines()[-1][:120]})


def isolated(*task: Any) -> dict[str, Any]:
    """``study`` in a process of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(there, *task), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(LIMIT):
            process.kill()
            return {"failed": f"it takes more than {LIMIT:.0f} s"}
        return here.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        return {"failed": f"the process ended with exit code {process.exitcode}"}
    finally:
        process.join(1)


def tasks(only: Sequence[str]) -> Iterator[tuple[str, str, int, str]]:
    """Name, database, index and variant of everything to examine, and of what is left out with the variant empty."""
    for i, info in enumerate(op_db):
        name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        if only and name not in only:
            continue
        differentiable = info.supports_autograd and torch.float32 in info.supported_dtypes("cpu")
        yield name, "op", i, "" if differentiable else "none"
        if differentiable and info.inplace_variant is not None:
            yield name, "op", i, "in place"
    for i, info in enumerate(module_db):
        if not only or info.name in only:
            name = info.formatted_name.replace("_", ".")
            for variant in ("train", "eval"):
                if torch.float32 in info.supported_dtypes("cpu"):
                    yield name, "module", i, variant
                else:
                    yield name, "module", i, "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="print these ops and write nothing")
    args = parser.parse_args()
    start = time.monotonic()
    results = []
    for name, kind, index, variant in tasks(args.only):
        if variant == "none":
            found: dict[str, Any] = {"failed": "it is not differentiable in float32 on CPU"}
        else:
            found = isolated(kind, index, variant)
        results.append({"name": name, "kind": kind, "variant": variant.replace("none", ""), **found})
        if args.only:
            print(json.dumps(results[-1], indent=1))
    if args.only:
        return
    data = {
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "unit": "bytes",
        "device": "cpu",
        "dtype": "float32",
        "seconds": round(time.monotonic() - start),
    }
    lines = ",\n".join("  " + json.dumps(r) for r in results)
    text = json.dumps(data, indent=1)[:-2] + ',\n "results": [\n' + lines + "\n ]\n}\n"
    (HERE / "results.json").write_text(text)
    write_tables(json.loads(text))


# Why an op of the map has no rule, by the beginning of its name; the first that fits counts.
REASONS = (
    ("linalg.|lu|lu_|logdet|cholesky|ormqr|triangular_|svd|norm.nuc", "linear algebra: small matrices, rare in models"),
    ("fft.|stft|complex", "backward reads only a dtype and a shape; signal processing, rare in models that train"),
    ("angle|copysign|div.|nextafter|sgn|ldexp", "its derivative is zero or rare in models"),
    ("_batch_norm|_native_batch_norm|native_|max_pool2d_with|_softmax_backward|grid_sampler|torch.ops.aten", "an ATen form"),
    (
        "nn.BatchNorm|nn.functional.instance|nn.functional.group|nn.GroupNorm|nn.LayerNorm|nn.functional.layer",
        "wasted where the bias alone needs a gradient and the input none: at the very front of a model",
    ),
    ("scatter_reduce|index_reduce", "a product, maximum or minimum: backward reads what was reduced; else rare in models"),
    ("put|_unsafe|nanquantile|quantile", "backward reads only a shape; rare in models"),
    ("maximum|minimum|max.binary|min.binary|fmax|fmin", "bits would do, if nobody else keeps either operand; rare in models"),
    ("fmod|remainder|__rmod__|nan_to_num|nanmean|nansum|prod|masked.|cummax|cummin|cdist", "rare in models"),
    (
        "pow|float_power|__rpow__|xlogy|special.|addcdiv",
        "wasted where the other operand alone needs a gradient: rare in models",
    ),
    ("nn.functional.fractional|nn.LPPool|nn.LocalResponseNorm|nn.functional.local_response", "rare in models"),
    ("nn.functional.scaled_dot_product", "left as it is: its kernels choose what they keep"),
    ("nn.functional.multi_head", "made of other ops"),
    ("nn.functional.embedding_bag", "integers, small beside the embeddings"),
    (
        "nn.NLLLoss|nn.functional.nll|nn.BCE|nn.functional.binary|nn.L1|nn.functional.l1|nn.Margin|nn.Multi|nn.Hinge|nn.Linear"
        "|nn.functional.margin|nn.functional.multi|nn.functional.hinge|nn.functional.cosine_emb",
        "a loss: small beside the model",
    ),
    ("nn.Transformer|nn.RNN|nn.LSTM|nn.GRU", "made of other ops; the waste is parameters, alive anyway"),
    ("nn.functional.grid_sample", "open: the input, where the grid needs no gradient"),
)

# Entries of the databases that are one variant of a function, for those variants that a rule serves.
VARIANTS = {
    "pad.reflect": "pad",
    "pad.replicate": "pad",
    "pad.replicate_negative": "pad",
    "interpolate.area": "interpolate",
    "logsigmoid": "log_sigmoid",
    "scatter_reduce.sum": "scatter_reduce",
    "scatter_reduce.mean": "scatter_reduce",
}


def served_by(name: str) -> str:
    """Which rule serves an op of the map, else why none does."""
    short = name.removeprefix("nn.functional.")
    short = VARIANTS.get(short, short)
    for rule in RULES:
        if name.startswith("nn.functional."):
            known = {getattr(f, "__name__", "").strip("_") for f in rule.functions}
        elif name.startswith("nn."):
            known, short = {m.__name__ for m in rule.modules}, name.removeprefix("nn.")
        else:
            known = {getattr(f, "__name__", "").strip("_") for f in rule.functions if getattr(torch, short, None) is f}
        if short in known:
            return f"rule {rule.name}"
    for starts, reason in REASONS:
        if name.startswith(tuple(starts.split("|"))):
            return reason
    return "open"


def _merged(rows: list[tuple[str, str, tuple[str, ...]]]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Rows of (name, variant, rest), those that differ in the variant alone made one."""
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, variant, rest in rows:
        merged.setdefault((name, rest), []).append(variant or "plain")
    return [(name, ", ".join(variants), rest) for (name, rest), variants in merged.items()]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names)) if len(names) < 4 else f"{', '.join(dict.fromkeys(names[:3]))}, ..."


def write_tables(data: dict[str, Any]) -> None:
    """Writes the tables that are in README.md between its marks."""
    wasted, few_bits, failed = [], [], []
    examined = runs = 0
    for result in data["results"]:
        variant = result["variant"]
        for reason in [result["failed"]] if "failed" in result else result.get("failures", []):
            failed.append((result["name"], variant, reason))
        if "failed" in result:
            continue
        examined += 1
        runs += len(result["masks"])
        bits = {what for m in result["masks"] for what, size, use in m["storages"] if use == "mask" and 4 * size >= m["kept"]}
        if bits:
            few_bits.append((result["name"], variant, (", ".join(sorted(bits)), served_by(result["name"]))))
        worst = max(result["masks"], key=lambda m: 1 - m["needed"] / m["kept"] if m["kept"] else 0)
        if worst["needed"] == worst["kept"]:
            continue
        spare = _listed([what for what, _, use in worst["storages"] if use == "spare"])
        share = 1 - worst["needed"] / worst["kept"]
        count = sum(m["needed"] < m["kept"] for m in result["masks"])
        columns = (f"{share:.0%}", _listed(worst["grad"]), str(worst["kept"]), str(worst["needed"]), spare)
        wasted.append((share, (result["name"], variant, (*columns, f"{count}/{len(result['masks'])}"))))
    wasted.sort(key=lambda row: (-row[0], row[1][0]))
    reasons: dict[str, list[str]] = {}
    for name, variant, reason in failed:
        reasons.setdefault(reason, []).append(f"{name} ({variant})" if variant else name)
    lines = [
        f"torch {data['torch']}, {data['date']}, {data['dtype']} on {data['device']}: {examined} forms of ops and modules "
        f"examined for {runs} choices of what requires grad; {len(wasted)} forms keep something that backward never reads.",
        "",
        "| op | form | wasted | grad of | kept, bytes | needed | what is spare | choices that waste | fxmem |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, variant, rest in _merged([row for _, row in wasted]):
        lines.append(f"| {name} | {variant} | {' | '.join(rest)} | {served_by(name)} |")
    lines += [
        "",
        "## A few bits would do",
        "",
        "Kept floats, at least a quarter of what the op keeps; a small relative change of every element changes no gradient:",
        "",
        "| op | form | what | fxmem |",
        "|---|---|---|---|",
    ]
    lines += [f"| {name} | {variant} | {' | '.join(rest)} |" for name, variant, rest in _merged(few_bits)]
    lines += ["", "## Not examined, or not for every choice", ""]
    lines += [f"- {reason.rstrip('.')}: {', '.join(dict.fromkeys(names))}." for reason, names in sorted(reasons.items())]
    readme = HERE / "README.md"
    head = readme.read_text().split(MARK)[0]
    readme.write_text(head + MARK + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
