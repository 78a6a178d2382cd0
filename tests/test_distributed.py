"""Optimized models under torch's distributed wrappers, in two gloo processes: eager's results in no more memory."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from oracle import same
from torch import Tensor, nn

import fxmem
from fxmem.ops import RULES

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="a torch without distributed")


class Block(nn.Module):
    """A frozen convolution and norm between trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(8, 8, 1)
        self.frozen = nn.Conv2d(8, 8, 3, padding=1, bias=False).requires_grad_(False)
        self.norm = nn.BatchNorm2d(8).eval().requires_grad_(False)
        self.act = nn.ReLU()
        self.base = nn.Linear(12, 12).requires_grad_(False)
        self.adapter = nn.Linear(12, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.frozen(self.enter(x))))
        return x + self.base(x) + self.adapter(x)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(), Block(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(288, 4))


def data() -> Tensor:
    return torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def cotangent() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(2))


def part(rank: int, t: Tensor) -> Tensor:
    return t.chunk(2)[rank].clone()


def whole(t: Tensor | None) -> Tensor | None:
    return t.full_tensor() if t is not None and hasattr(t, "full_tensor") else t


def storages(tensors: list[Tensor]) -> dict[int, int]:
    return {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}


def train(model: nn.Module, wrapped: nn.Module, x: Tensor, g: Tensor, steps: int = 3) -> list[Any]:
    """Bytes saved beyond parameters and buffers, the output and the gradients of every step.

    The bytes are read between forward and backward, so a storage that the wrapper has freed by then counts as nothing.
    """
    opt = fxmem.Adapprox([p for p in wrapped.parameters() if p.requires_grad], lr=0.01, rank=2)
    results: list[Any] = []
    for _ in range(steps):
        opt.zero_grad()
        saved: list[Tensor] = []

        def pack(t: Tensor) -> Tensor:
            saved.append(t)  # noqa: B023
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = wrapped(x)
        apart = storages([t.to_local() if hasattr(t, "to_local") else t for t in (*model.parameters(), *model.buffers())])
        kept = sum(n for key, n in storages(saved).items() if key not in apart)
        saved.clear()
        out.backward(g)
        opt.step()
        grads = {name: whole(p.grad) for name, p in model.named_parameters()}
        results.append((kept, out.detach(), grads))
    return results


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for name in ("1", "2"):
        fully_shard(model.get_submodule(name))
    fully_shard(model)
    return model


def fsdp_layers(model: nn.Module) -> nn.Module:
    """Every layer with parameters is a unit of its own, frozen ones included."""
    from torch.distributed.fsdp import fully_shard

    for child in model.modules():
        if any(True for _ in child.parameters(recurse=False)):
            fully_shard(child)
    fully_shard(model)
    return model


def fsdp_low_precision(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # fully_shard casts parameters, not buffers
            module.running_mean, module.running_var = module.running_mean.bfloat16(), module.running_var.bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name in ("1", "2"):
        fully_shard(model.get_submodule(name), mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": ddp,
    "fully_shard": fsdp,
    "fully_shard per layer": fsdp_layers,
    "fully_shard in bfloat16": fsdp_low_precision,
}


def _process(rank: int, body: Callable[..., None], folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        body(rank, folder, *args)
        # A process that goes while the other is still talking to it may take it down.
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def two_processes(body: Callable[..., None], *args: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, args=(body, folder, args), nprocs=2)


def _wrapped(rank: int, folder: str, expected: list[Any]) -> None:
    x, g = part(rank, data()), part(rank, cotangent())
    for name, wrap in WRAPPERS.items():
        runs = []
        for optimize in (False, True):
            model = net()
            if optimize:
                model = fxmem.optimize(model, (x,))
            runs.append(train(model, wrap(model), x, g.to(torch.bfloat16) if "bfloat16" in name else g))
        for i, (eager, ours) in enumerate(zip(*runs, strict=True)):
            assert same(eager[1:], ours[1:]), f"{name}, step {i}"
            assert ours[0] < eager[0], f"{name}, step {i}: kept {ours[0]}, eager {eager[0]}"
        if "bfloat16" not in name:
            # Both halves of the batch, averaged, are the whole batch in one process.
            for step, (output, grads) in zip(runs[1], expected, strict=True):
                torch.testing.assert_close(step[1], part(rank, output), atol=1e-4, rtol=1e-4)
                for key, grad in grads.items():
                    torch.testing.assert_close(step[2][key], grad, atol=1e-4, rtol=1e-4, msg=lambda m: f"{name} {key}: {m}")  # noqa: B023


def one_process() -> list[Any]:
    model = net()
    return [step[1:] for step in train(model, model, data(), cotangent() / 2)]


def _frozen_weights_are_freed(rank: int, folder: str) -> None:
    """Between forward and backward no unsharded weight is alive that eager under the same wrapper would have freed."""
    alive = []
    for optimize in (False, True):
        model = net()
        x = part(rank, data())
        if optimize:
            model = fxmem.optimize(model, (x,))
        fsdp_layers(model)
        full: list[Tensor] = []

        def note(module: nn.Module, *_: Any) -> None:
            full.extend(p for p in module.parameters(recurse=False))  # noqa: B023

        seen = 0
        for child in model.modules():
            if list(child.parameters(recurse=False)):
                child.register_forward_pre_hook(note)
                seen += 1
        out = model(x)
        gc.collect()
        assert len(full) >= seen
        assert not any(hasattr(t, "to_local") for t in full)
        alive.append(sorted(t.untyped_storage().nbytes() for t in full))
        out.backward(part(rank, cotangent()))
    assert alive[0] == alive[1]
    assert 0 in alive[1]


def _checkpoint(rank: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    x, g = part(rank, data()), part(rank, cotangent())

    def fresh() -> tuple[nn.Module, fxmem.Adapprox]:
        model = fsdp(fxmem.optimize(net(), (x,)))
        return model, fxmem.Adapprox([p for p in model.parameters() if p.requires_grad], lr=0.01, rank=2)

    def steps(model: nn.Module, opt: fxmem.Adapprox, count: int) -> None:
        for _ in range(count):
            opt.zero_grad()
            model(x).backward(g)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()

    model, opt = fresh()
    steps(model, opt, 3)
    state, optim = get_state_dict(model, opt)
    assert list(state) == list(net().state_dict())
    dcp.save({"model": state, "optim": optim}, checkpoint_id=str(Path(folder) / "dcp"))
    steps(model, opt, 3)
    again, other = fresh()
    state, optim = get_state_dict(again, other)
    target = {"model": state, "optim": optim}
    dcp.load(target, checkpoint_id=str(Path(folder) / "dcp"))
    set_state_dict(again, other, model_state_dict=target["model"], optim_state_dict=target["optim"])
    steps(again, other, 3)
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(whole(p.detach()), whole(q.detach())), name
    # The eager model reads the same file, whole, in one process's way.
    plain = net().state_dict()
    dcp.load({"model": plain}, checkpoint_id=str(Path(folder) / "dcp"))
    assert not torch.equal(plain["0.weight"], net().state_dict()["0.weight"])


def _accumulate(rank: int, folder: str) -> None:
    x, g = part(rank, data()), part(rank, cotangent())
    results = []
    for optimize in (False, True):
        model = net()
        if optimize:
            model = fxmem.optimize(model, (x,))
        wrapped = ddp(model)
        with wrapped.no_sync():
            wrapped(x).backward(g)
        wrapped(x.flip(0)).backward(g)
        results.append({n: p.grad for n, p in model.named_parameters()})
    assert same(*results)


def _tensor_parallel(rank: int, folder: str) -> None:
    """A graph whose linears are split by columns and rows: DTensors go to torch's own ops."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))

    def mlp() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8).requires_grad_(False))

    x, g = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)), torch.ones(4, 8).cumsum(0)
    results = []
    for optimize in (False, True):
        model = mlp()
        if optimize:
            model = fxmem.optimize(model, (x,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        assert isinstance(model.get_submodule("2").weight, DTensor)
        opt = fxmem.Adapprox([p for p in model.parameters() if p.requires_grad], lr=0.01, rank=2)
        for _ in range(2):
            opt.zero_grad()
            out = model(x)
            out.backward(g)
            opt.step()
        results.append((out.detach(), {n: whole(p.grad) for n, p in model.named_parameters()}))
    assert same(*results)


def _subclass(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    relu = next(f for r in RULES for f, ours in r.functions.items() if f is nn.functional.relu)
    ours = next(r.functions[relu] for r in RULES if relu in r.functions)
    for placement in (Shard(0), Replicate()):
        x = distribute_tensor(torch.randn(6, 5, generator=torch.Generator().manual_seed(1)), mesh, [placement])
        a, b = x.detach().requires_grad_(), x.detach().requires_grad_()
        relu(a).backward(x)
        ours(b).backward(x)
        assert a.grad.placements == b.grad.placements
        assert torch.equal(a.grad.full_tensor(), b.grad.full_tensor())


def _everything(rank: int, folder: str, expected: list[Any]) -> None:
    # One start of two processes for all: starting them takes longer than what they do.
    _wrapped(rank, folder, expected)
    for body in (_frozen_weights_are_freed, _checkpoint, _accumulate, _tensor_parallel, _subclass):
        body(rank, folder)


def test_wrapped_models_give_eagers_results_in_less() -> None:
    two_processes(_everything, one_process())
