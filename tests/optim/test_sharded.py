"""DTensor parameters in two gloo processes: equal to one process, checkpoints, refusals."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from fxmem.errors import OptimizerError
from fxmem.optim import Adapprox, adapt_optimizer

STEPS = 14
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="a torch without distributed")


def model_and_data():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8)), torch.randn(16, 64)


def train(model, opt, x, steps=STEPS):
    for _ in range(steps):
        opt.zero_grad()
        model(x).square().sum().backward()
        opt.step()


OPTIONS = {
    "default": {},
    "paper": {"rank": "paper"},
    "no first moment": {"betas": (0.0, 0.999), "rank": 3},
    "guidance": {"guidance": True, "interval": 4},
}


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def _fully_shard(rank, expected, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    for name, options in OPTIONS.items():
        model, x = model_and_data()
        fully_shard(model)
        opt = Adapprox(model.parameters(), lr=0.01, **options)
        train(model, opt, x)
        for p, e in zip(model.parameters(), expected[name], strict=True):
            torch.testing.assert_close(whole(p.detach()), e, atol=2e-3, rtol=2e-3)
        weight = next(model.parameters())
        state = opt.state[weight]
        # The factors are spread as the rows are; the rank is found from the global shape.
        assert state["q"].shape[0] == 64 - 16
        assert state["q"].to_local().shape[0] == 24
        assert state["u"].to_local().shape == state["u"].shape
        if rank == 0:
            assert state["q"].shape[1] <= 12

        path = str(Path(folder) / name.replace(" ", "_"))
        saved = get_optimizer_state_dict(model, opt)
        dcp.save({"optim": saved}, checkpoint_id=path)
        other, _ = model_and_data()
        fully_shard(other)
        with torch.no_grad():
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                q.copy_(p)
        resumed = Adapprox(other.parameters(), lr=0.01, **options)
        target = {"optim": get_optimizer_state_dict(other, resumed)}
        dcp.load(target, checkpoint_id=path)
        set_optimizer_state_dict(other, resumed, target["optim"])
        assert resumed.state[next(other.parameters())]["q"].shape == state["q"].shape
        train(model, opt, x, 6)
        train(other, resumed, x, 6)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(whole(p.detach()), whole(q.detach()))


def _adapted(rank, expected, folder):
    from torch.distributed.fsdp import fully_shard

    model, x = model_and_data()
    fully_shard(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, adamw, x, 5)
    opt = adapt_optimizer(adamw)
    train(model, opt, x, 5)
    for p, e in zip(model.parameters(), expected["adapted"], strict=True):
        torch.testing.assert_close(whole(p.detach()), e, atol=2e-3, rtol=2e-3)


def _placements(rank, expected, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    g = torch.Generator().manual_seed(0)
    start = torch.randn(33, 24, generator=g)
    # Squares of rank 3: four columns hold them exactly, whatever the process started from.
    base = torch.rand(33, 2, generator=g) @ torch.rand(2, 24, generator=g)
    grads = [base * torch.randn(33, 24, generator=g).sign() * (1 + i) for i in range(5)]
    results = []
    for placement in (Replicate(), Shard(0), Shard(1)):
        p = nn.Parameter(distribute_tensor(start.clone(), mesh, [placement]))
        opt = Adapprox([p], lr=0.01, rank=4, power_iterations=6)
        for grad in grads:
            p.grad = distribute_tensor(grad, mesh, [placement])
            opt.step()
        opt.load_state_dict(opt.state_dict())
        results.append(p.detach().full_tensor())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-3, rtol=1e-3)
    # A stack spread over its matrices, and a vector.
    stack, vector = torch.randn(3, 24, 16, generator=g), torch.randn(7, generator=g)
    params = [nn.Parameter(distribute_tensor(t.clone(), mesh, [Shard(0)])) for t in (stack, vector)]
    plain = [nn.Parameter(t.clone()) for t in (stack, vector)]
    a, b = (Adapprox(ps, lr=0.01, rank=2, power_iterations=6) for ps in (params, plain))
    for _ in range(3):
        for p, q in zip(params, plain, strict=True):
            q.grad = torch.randn(q.shape, generator=g)
            p.grad = distribute_tensor(q.grad, mesh, [Shard(0)])
        a.step()
        b.step()
    for p, q in zip(params, plain, strict=True):
        torch.testing.assert_close(p.detach().full_tensor(), q.detach(), atol=1e-4, rtol=1e-4)
    two = nn.Parameter(distribute_tensor(torch.randn(4, 24, 16), mesh, [Shard(1)]))
    two.grad = torch.zeros_like(two)
    with pytest.raises(OptimizerError, match=r"parameter 'stack'.*Shard\(dim=1\).*rank=0"):
        Adapprox([("stack", two)]).step()
    dense = Adapprox([two], rank=0)
    dense.step()


def _fsdp1(rank, expected, folder):
    from torch.distributed.fsdp import FullyShardedDataParallel

    for original in (True, False):
        model, _ = model_and_data()
        wrapped = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
        with pytest.raises(OptimizerError, match=r"FSDP1 flattens.*fully_shard"):
            Adapprox(wrapped.parameters())


def _process(rank, body, expected, folder):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        body(rank, expected, folder)
        # A process that goes while the other is still talking to it may take it down.
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def two_processes(body, expected=None):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, args=(body, expected, folder), nprocs=2)


def test_fully_shard_equals_one_process_and_round_trips_through_dcp():
    """huggingface/transformers#26776: FSDP cannot save factored state."""
    expected = {}
    for name, options in OPTIONS.items():
        model, x = model_and_data()
        train(model, Adapprox(model.parameters(), lr=0.01, **options), x)
        expected[name] = [p.detach() for p in model.parameters()]
    two_processes(_fully_shard, expected)


def test_adapting_a_sharded_adamw_equals_one_process():
    model, x = model_and_data()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, adamw, x, 5)
    train(model, adapt_optimizer(adamw), x, 5)
    two_processes(_adapted, {"adapted": [p.detach() for p in model.parameters()]})


def test_every_placement_equals_the_whole_or_is_refused():
    two_processes(_placements)


def test_fsdp1_flat_parameters_are_refused():
    """huggingface/transformers#26776: flat parameters destroy the matrix shape."""
    two_processes(_fsdp1)
