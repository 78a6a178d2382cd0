"""The truth at run time: bytes counted at the allocator over one real forward and backward pass."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fxmem.errors import ArgumentError
from fxmem.passes.base import loss_or_outputs, storages_of
from fxmem.records import Measurement

_FORWARD, _BACKWARD = "fxmem::forward", "fxmem::backward"


@dataclass(frozen=True)
class Run:
    """One measured pass with its results.

    Args:
        measurement: the bytes.
        outputs: the model's output, detached from nothing.
        gradients: by parameter name, or ``input 0``, ``input 1``, ... for tensor inputs that require grad; None where no
            gradient arrived.
        buffers: the model's buffers after the pass, by name.
        rng_state: state of the CPU generator after the pass.
    """

    measurement: Measurement
    outputs: Any
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    rng_state: Tensor


def measure(
    model: nn.Module,
    example_args: tuple[Any, ...] | Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
) -> Measurement:
    """Really runs forward and backward and counts bytes.

    Backward starts at the loss where the output is a mapping that has one, else at every output, with random cotangents.
    Gradients, buffers and the state of the random number generators are afterwards as they were.

    Args:
        model: any module, optimized or not.
        example_args: positional inputs; a lone tensor stands for a tuple of one.
        example_kwargs: keyword inputs.

    Raises:
        ArgumentError: nothing in the output requires grad.
    """
    return run(model, example_args, example_kwargs).measurement


def run(
    model: nn.Module,
    example_args: tuple[Any, ...] | Tensor = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
) -> Run:
    """Like ``measure``, and returns what the pass made as well.

    Args:
        model: any module, optimized or not.
        example_args: positional inputs; a lone tensor stands for a tuple of one.
        example_kwargs: keyword inputs.
        seed: seeds the pass and the cotangents.

    Raises:
        ArgumentError: nothing in the output requires grad.
    """
    args = (example_args,) if isinstance(example_args, Tensor) else tuple(example_args)
    kwargs = dict(example_kwargs or {})
    # What a graph leads to begins anew here: what is before it is not the model's.
    args, kwargs = tree_map_only(
        Tensor, lambda t: t if t.is_leaf else t.detach().requires_grad_(t.requires_grad), (args, kwargs)
    )
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    wanted: dict[str, Tensor] = {f"input {i}": t for i, t in enumerate(inputs) if t.requires_grad and t.is_leaf}
    wanted |= {name: p for name, p in model.named_parameters() if p.requires_grad}
    anchor = next(iter((*inputs, *model.parameters(), *model.buffers())), torch.empty(0))
    meter = _CudaMeter(anchor.device) if anchor.device.type == "cuda" else _CpuMeter()
    grads = {name: t.grad for name, t in wanted.items()}
    buffers = {name: (b, b.detach().clone()) for name, b in model.named_buffers()}
    bound = [(m, dict(m._buffers)) for m in model.modules() if m._buffers]
    for t in wanted.values():
        t.grad = None
    cuda = [anchor.device.index or 0] if anchor.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda), torch.enable_grad():
            torch.manual_seed(seed)
            # Under autocast, a pass begins without copies of weights and its end drops them, as leaving autocast would.
            torch.clear_autocast_cache()
            with meter.session():
                with meter.section(_FORWARD):
                    output = model(*args, **kwargs)
                    torch.clear_autocast_cache()
                ends = [t for t in loss_or_outputs(output) if t.requires_grad]
                meter.after_forward([t for t in tree_leaves(output) if isinstance(t, Tensor)])
                if not ends:
                    raise ArgumentError(
                        "nothing in the output requires grad, so there is no backward pass to measure.",
                        where="model",
                        remedy="Let a parameter or an input require grad.",
                    )
                generator = torch.Generator().manual_seed(seed + 1)
                cotangents = [_cotangent(t, generator) for t in ends]
                with meter.section(_BACKWARD):
                    torch.autograd.backward(ends, cotangents)
            rng_state = torch.get_rng_state()
        gradients = {name: t.grad for name, t in wanted.items()}
        after = {name: b.detach().clone() for name, (b, _) in buffers.items()}
    finally:
        for name, t in wanted.items():
            t.grad = grads[name]
        for module, old in bound:
            module._buffers.update(old)
        with torch.no_grad():
            for buffer, value in buffers.values():
                buffer.copy_(value)
    kept, peak, held = meter.result()
    made = sum(s.nbytes() for g in gradients.values() if g is not None for s in storages_of(g))
    return Run(Measurement(kept, peak, held, made, str(anchor.device)), output, gradients, after, rng_state)


def _cotangent(output: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers in the output's own layout, so that backward meets the strides it would meet in a network."""
    value = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    if output.is_complex():
        value = torch.complex(value, torch.randn(output.shape, generator=generator, dtype=torch.float64))
    return torch.empty_like(output).copy_(value)


class _CpuMeter:
    """Counts the CPU allocator's own events, as the profiler records them: what ops hide is seen too."""

    def __init__(self) -> None:
        # The profiler's library reads this once, when it first loads; it logs every start and stop otherwise.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self.output_addresses: set[int] = set()
        self.events: Any = None

    @contextmanager
    def session(self) -> Iterator[None]:
        # What a collection would free inside the pass was allocated before it, or hides what the pass keeps.
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
            ) as profiler:
                yield
        finally:
            if collecting:
                gc.enable()
        assert profiler.profiler is not None
        self.events = profiler.profiler.kineto_results.experimental_event_tree()

    def section(self, name: str) -> Any:
        return torch.profiler.record_function(name)

    def after_forward(self, outputs: list[Tensor]) -> None:
        self.output_addresses = {t.untyped_storage().data_ptr() for t in outputs}

    def result(self) -> tuple[int, int, int]:
        """(kept, peak, bytes of the outputs)."""
        allocations: list[tuple[int, int, int]] = []
        spans: dict[str, tuple[int, int]] = {}
        stack = list(self.events)
        while stack:
            event = stack.pop()
            stack.extend(event.children)
            if event.tag.name == "Allocation":
                fields = event.extra_fields
                if fields.device.type == "cpu":
                    allocations.append((event.start_time_ns, fields.alloc_size, fields.ptr))
            elif event.name in (_FORWARD, _BACKWARD):
                spans[event.name] = (event.start_time_ns, event.end_time_ns)
        allocations.sort(key=lambda a: a[0])
        (start, end), (again, stop) = spans[_FORWARD], spans[_BACKWARD]
        live: dict[int, int] = {}
        total = peak = 0
        kept = held = -1
        for when, size, address in allocations:
            if when > end and kept < 0:
                held = sum(live.get(a, 0) for a in self.output_addresses)
                kept = total - held
            if size > 0:
                if start <= when <= end or again <= when <= stop:
                    live[address] = size
                    total += size
            elif address in live:
                total -= live.pop(address)
            peak = max(peak, total)
        if kept < 0:
            held = sum(live.get(a, 0) for a in self.output_addresses)
            kept = total - held
        return kept, peak, held


class _CudaMeter:
    """Reads the CUDA caching allocator's statistics of requested bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base = self.kept = self.held = self.peak = 0

    def _current(self) -> int:
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.memory_stats(self.device)["requested_bytes.all.current"])

    def _highest(self) -> int:
        return int(torch.cuda.memory_stats(self.device)["requested_bytes.all.peak"])

    @contextmanager
    def session(self) -> Iterator[None]:
        gc.collect()
        self.base = self._current()
        yield

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        before = self._current()
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        torch.cuda.synchronize(self.device)
        # The cotangents, made between the sections, do not count.
        extra = before - self.base - (0 if name == _FORWARD else self.kept + self.held)
        self.peak = max(self.peak, self._highest() - self.base - extra)

    def after_forward(self, outputs: list[Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in outputs}
        self.held = sum(storages.values())
        self.kept = self._current() - self.base - self.held

    def result(self) -> tuple[int, int, int]:
        """(kept, peak, bytes of the outputs)."""
        return self.kept, self.peak, self.held
